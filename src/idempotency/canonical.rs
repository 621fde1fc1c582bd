//! Writes whatever serde can serialise as canonical JSON: one text for one meaning, the same that Python's fencekit writes.

use serde::ser::{Serialize, Serializer};

use super::compound::{Elements, Entries, Fields};
use super::refusal::Refusal;
use super::spelling;
use crate::error::Error;

/// How many arrays and maps may stand within one another. Serialising recurses, so without a bound a payload from
/// outside could overflow the stack, which ends the process; `serde_json` reads to the same depth.
const MAX_DEPTH: usize = 128;

/// The struct (and its field) as which `serde_json` passes a number if any crate in the build switches on its feature
/// `arbitrary_precision`. Taken for a struct, it would change every key that has a number in it.
const JSON_NUMBER: &str = "$serde_json::private::Number";

/// The struct as which `serde_json` passes JSON text that it has not parsed (`RawValue`).
const JSON_TEXT: &str = "$serde_json::private::RawValue";

/// Writes a payload as canonical JSON: the text of which an [`IdempotencyKey`](crate::idempotency::IdempotencyKey) is
/// the hash.
///
/// Print it to see why two payloads have different keys. The text is that of Python's
/// `json.dumps(payload, sort_keys=True, separators=(",", ":"), ensure_ascii=True)`:
///
/// | value | canonical text |
/// |---|---|
/// | map, struct | keys sorted by code point, no whitespace |
/// | sequence, tuple, array, set | an array, in the order in which it is serialised |
/// | string, `char` | ASCII; anything else as `\u00e9`, beyond U+FFFF as two surrogates |
/// | integer | its digits, up to 128 bits |
/// | float | the shortest digits that read back as the same number: `1.0`, `-0.0`, `1e-05`, `1e+16` |
/// | `None`, `()`, unit struct | `null` |
/// | `Some(value)`, newtype struct | as the value |
/// | enum | `"Unit"`, `{"Newtype":1}`, `{"Tuple":[1,2]}`, `{"Struct":{"field":1}}` |
///
/// `serde_json` may write the same payload with another spelling (`1e16`); what Python reads from that has the same
/// canonical text. `HashSet` has no order: use a `BTreeSet` or sort.
///
/// # Examples
///
/// ```
/// use redis_fifo_lock::idempotency::canonicalize;
///
/// #[derive(serde::Serialize)]
/// struct Invoice<'a> {
///     total: f64,
///     customer: &'a str,
///     lines: (u32, Option<u32>),
/// }
///
/// let text = canonicalize(&Invoice { total: 20.0, customer: "Zoë", lines: (7, None) })?;
/// assert_eq!(text, r#"{"customer":"Zo\u00eb","lines":[7,null],"total":20.0}"#);
/// # Ok::<(), redis_fifo_lock::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Config`] naming the offending value and what is wrong with it, such as
/// `payload.items[3].price is NaN; a number must be finite`, if
///
/// - the payload as a whole is no map or struct,
/// - a float is NaN or infinite,
/// - a value is bytes (`serialize_bytes`; a `Vec<u8>` is an array of numbers unless `serde_bytes` is used),
/// - a key is no string, or a map has the same key twice (`#[serde(flatten)]` can do that),
/// - it has more than 128 levels,
/// - it holds a `serde_json::value::RawValue`, or its own `Serialize` fails.
pub fn canonicalize(payload: &(impl Serialize + ?Sized)) -> Result<String, Error> {
    let mut out = String::new();
    payload.serialize(Writer { out: &mut out, depth: 0 })?;
    let what = match out.as_bytes().first() {
        Some(b'{') => return Ok(out),
        Some(b'[') => "an array",
        Some(b'"') => "a string",
        Some(b't' | b'f') => "a boolean",
        Some(b'n') => "null",
        _ => "a number",
    };
    Err(Refusal::new(format!("is {what}; a map or a struct is required")).into())
}

/// Writes one value.
pub(super) struct Writer<'a> {
    /// Where the canonical text goes.
    pub(super) out: &'a mut String,
    /// How many arrays and maps are open around the value.
    pub(super) depth: usize,
}

impl<'a> Writer<'a> {
    /// Opens one more array or map.
    fn open(mut self, bracket: char) -> Result<Writer<'a>, Refusal> {
        if self.depth == MAX_DEPTH {
            return Err(Refusal::new(format!(
                "is too deep; {MAX_DEPTH} levels of arrays and maps are allowed"
            )));
        }
        self.depth += 1;
        self.out.push(bracket);
        Ok(self)
    }

    /// Opens the map of one entry as which an enum's value with data is written; whoever closes it pushes the brace.
    fn open_variant(self, variant: &'static str) -> Result<Writer<'a>, Refusal> {
        let writer = self.open('{')?;
        spelling::string(writer.out, variant);
        writer.out.push(':');
        Ok(writer)
    }

    /// Opens an array.
    fn elements(self, variant: Option<&'static str>) -> Result<Elements<'a>, Refusal> {
        Ok(Elements::new(self.open('[')?, variant))
    }

    /// Opens a map whose entries are sorted when it is closed.
    fn entries(self, variant: Option<&'static str>) -> Result<Entries<'a>, Refusal> {
        Ok(Entries::new(self.open('{')?, variant))
    }

    /// Appends what has only one spelling.
    pub(super) fn word(self, word: &str) -> Result<(), Refusal> {
        self.out.push_str(word);
        Ok(())
    }
}

/// The serializer's methods for integers.
macro_rules! integers {
    ($($method:ident: $from:ty),* $(,)?) => {
        $(
            fn $method(self, value: $from) -> Result<(), Refusal> {
                spelling::integer(self.out, value);
                Ok(())
            }
        )*
    };
}

impl<'a> Serializer for Writer<'a> {
    type Ok = ();
    type Error = Refusal;
    type SerializeSeq = Elements<'a>;
    type SerializeTuple = Elements<'a>;
    type SerializeTupleStruct = Elements<'a>;
    type SerializeTupleVariant = Elements<'a>;
    type SerializeMap = Entries<'a>;
    type SerializeStruct = Fields<'a>;
    type SerializeStructVariant = Entries<'a>;

    fn serialize_bool(self, value: bool) -> Result<(), Refusal> {
        self.word(if value { "true" } else { "false" })
    }

    integers! {
        serialize_i8: i8,
        serialize_i16: i16,
        serialize_i32: i32,
        serialize_i64: i64,
        serialize_i128: i128,
        serialize_u8: u8,
        serialize_u16: u16,
        serialize_u32: u32,
        serialize_u64: u64,
        serialize_u128: u128,
    }

    fn serialize_f32(self, value: f32) -> Result<(), Refusal> {
        spelling::single(self.out, value)
    }

    fn serialize_f64(self, value: f64) -> Result<(), Refusal> {
        spelling::double(self.out, value)
    }

    fn serialize_char(self, value: char) -> Result<(), Refusal> {
        self.serialize_str(value.encode_utf8(&mut [0; 4]))
    }

    fn serialize_str(self, value: &str) -> Result<(), Refusal> {
        spelling::string(self.out, value);
        Ok(())
    }

    fn serialize_bytes(self, _: &[u8]) -> Result<(), Refusal> {
        Err(Refusal::new("is bytes, for which JSON has no form; pass text or numbers"))
    }

    fn serialize_none(self) -> Result<(), Refusal> {
        self.word("null")
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<(), Refusal> {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Result<(), Refusal> {
        self.word("null")
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<(), Refusal> {
        self.word("null")
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Result<(), Refusal> {
        self.serialize_str(variant)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        value: &T,
    ) -> Result<(), Refusal> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<(), Refusal> {
        let Writer { out, depth } = self.open_variant(variant)?;
        value.serialize(Writer { out: &mut *out, depth }).map_err(|refusal| refusal.under(variant))?;
        out.push('}');
        Ok(())
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Elements<'a>, Refusal> {
        self.elements(None)
    }

    fn serialize_tuple(self, _: usize) -> Result<Elements<'a>, Refusal> {
        self.elements(None)
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Elements<'a>, Refusal> {
        self.elements(None)
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Elements<'a>, Refusal> {
        self.open_variant(variant)?.elements(Some(variant)).map_err(|refusal| refusal.under(variant))
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Entries<'a>, Refusal> {
        self.entries(None)
    }

    fn serialize_struct(self, name: &'static str, _: usize) -> Result<Fields<'a>, Refusal> {
        match name {
            JSON_NUMBER => Ok(Fields::Number(self)),
            JSON_TEXT => Err(Refusal::new("is raw JSON text; pass the parsed value")),
            _ => Ok(Fields::Struct(self.entries(None)?)),
        }
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Entries<'a>, Refusal> {
        self.open_variant(variant)?.entries(Some(variant)).map_err(|refusal| refusal.under(variant))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use serde::Serialize;
    use serde::ser::{self, SerializeMap};
    use serde_json::json;

    use super::*;

    #[derive(Serialize)]
    struct Meters(f64);

    #[derive(Serialize)]
    struct Marker;

    #[derive(Serialize)]
    enum Shape {
        Unit,
        Newtype(Meters),
        Tuple(u8, f64),
        Struct { side: f64, colour: Option<char> },
    }

    #[derive(Serialize)]
    struct Inner {
        a: u8,
    }

    #[derive(Serialize)]
    struct Flattened {
        a: u8,
        #[serde(flatten)]
        inner: Inner,
    }

    #[derive(Serialize)]
    #[serde(rename = "$serde_json::private::Number")]
    struct ArbitraryNumber {
        #[serde(rename = "$serde_json::private::Number")]
        text: &'static str,
    }

    #[derive(Serialize)]
    #[serde(rename = "$serde_json::private::RawValue")]
    struct RawText {
        #[serde(rename = "$serde_json::private::RawValue")]
        text: &'static str,
    }

    /// Writes its pairs as a map, whatever the keys are.
    struct Pairs<K, V>(Vec<(K, V)>);

    impl<K: Serialize, V: Serialize> Serialize for Pairs<K, V> {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let mut map = serializer.serialize_map(None)?;
            for (key, value) in &self.0 {
                map.serialize_entry(key, value)?;
            }
            map.end()
        }
    }

    struct Bytes;

    impl Serialize for Bytes {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.serialize_bytes(b"a")
        }
    }

    struct Unwilling;

    impl Serialize for Unwilling {
        fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            Err(ser::Error::custom("no luck"))
        }
    }

    fn under<T: Serialize>(key: &str, value: T) -> Result<String, String> {
        canonicalize(&Pairs(vec![(key, value)])).map_err(|error| match error {
            Error::Config(why) => why,
            other => panic!("{other:?}"),
        })
    }

    fn text(value: impl Serialize) -> String {
        let text = under("a", value).expect("canonical");
        text.strip_prefix("{\"a\":").and_then(|rest| rest.strip_suffix('}')).expect("a map of one").to_owned()
    }

    fn refusal(value: impl Serialize) -> String {
        under("a", value).expect_err("refused")
    }

    #[test]
    fn each_shape_of_serde_has_its_json() {
        assert_eq!(text(()), "null");
        assert_eq!(text(Marker), "null");
        assert_eq!(text(None::<u8>), "null");
        assert_eq!(text(Some(Some(1))), "1");
        assert_eq!(text(true), "true");
        assert_eq!(text('é'), r#""\u00e9""#);
        assert_eq!(text((1, 1.0, -0.0, "x")), r#"[1,1.0,-0.0,"x"]"#);
        assert_eq!(text([[0u8; 0]; 2]), "[[],[]]");
        assert_eq!(text(u128::MAX), "340282366920938463463374607431768211455");
        assert_eq!(text(i128::MIN), "-170141183460469231731687303715884105728");
        assert_eq!(text(0.1f32), "0.1");
        assert_eq!(text(Meters(2.5)), "2.5");
        assert_eq!(text(Shape::Unit), r#""Unit""#);
        assert_eq!(text(Shape::Newtype(Meters(1e16))), r#"{"Newtype":1e+16}"#);
        assert_eq!(text(Shape::Tuple(1, 2.0)), r#"{"Tuple":[1,2.0]}"#);
        assert_eq!(
            text(Shape::Struct { side: 1.0, colour: None }),
            r#"{"Struct":{"colour":null,"side":1.0}}"#
        );
        assert_eq!(text(HashMap::<String, u8>::new()), "{}");
    }

    #[test]
    fn keys_sort_by_code_point_and_not_as_they_are_written() {
        // As UTF-16 (and so escaped), U+1F600 comes before U+FFFD; "\"" comes before "#", its escape after.
        let keys = ["\u{1f600}", "\u{fffd}", "é", "a", "", "B", "#", "\"", "\n", "aa", "a\0", "10", "9"];
        let canonical = canonicalize(&Pairs(keys.map(|key| (key, 0)).into())).expect("canonical");
        let sorted = [
            "",
            "\\n",
            "\\\"",
            "#",
            "10",
            "9",
            "B",
            "a",
            "a\\u0000",
            "aa",
            "\\u00e9",
            "\\ufffd",
            "\\ud83d\\ude00",
        ];
        assert_eq!(canonical, format!("{{{}}}", sorted.map(|key| format!("\"{key}\":0")).join(",")));
    }

    #[test]
    fn what_is_text_can_be_a_key_and_nothing_else() {
        let canonical = |key| canonicalize(&key).expect("canonical");
        assert_eq!(canonical(Pairs(vec![(Some("k"), 0)])), r#"{"k":0}"#);
        assert_eq!(canonicalize(&Pairs(vec![('k', 0)])).expect("canonical"), r#"{"k":0}"#);
        assert_eq!(canonicalize(&Pairs(vec![(Shape::Unit, 0)])).expect("canonical"), r#"{"Unit":0}"#);

        assert_eq!(
            refusal(Pairs(vec![(1, 0)])),
            "payload.a has a key that is an integer; keys must be strings"
        );
        assert_eq!(
            refusal(Pairs(vec![(true, 0)])),
            "payload.a has a key that is a boolean; keys must be strings"
        );
        assert_eq!(
            refusal(Pairs(vec![(1.0, 0)])),
            "payload.a has a key that is a float; keys must be strings"
        );
        assert_eq!(refusal(Pairs(vec![((), 0)])), "payload.a has a key that is null; keys must be strings");
        assert_eq!(
            refusal(Pairs(vec![([""], 0)])),
            "payload.a has a key that is an array; keys must be strings"
        );
        assert_eq!(
            refusal(Pairs(vec![(json!({}), 0)])),
            "payload.a has a key that is a map; keys must be strings"
        );
        assert_eq!(
            refusal(Pairs(vec![(Bytes, 0)])),
            "payload.a has a key that is bytes; keys must be strings"
        );
    }

    #[test]
    fn a_key_that_occurs_twice_is_refused() {
        let twice = Flattened { a: 1, inner: Inner { a: 1 } };
        assert_eq!(refusal([twice]), r#"payload.a[0] has the key "a" twice"#);
    }

    #[test]
    fn a_refusal_names_the_place() {
        let nan = f64::NAN;
        assert_eq!(
            under("items", [Meters(0.0), Meters(nan)]).unwrap_err(),
            "payload.items[1] is NaN; a number must be finite"
        );
        assert_eq!(
            under("an item", -1.0 / 0.0).unwrap_err(),
            "payload[\"an item\"] is infinite; a number must be finite"
        );
        assert_eq!(refusal(Shape::Newtype(Meters(nan))), "payload.a.Newtype is NaN; a number must be finite");
        assert_eq!(refusal(Shape::Tuple(0, nan)), "payload.a.Tuple[1] is NaN; a number must be finite");
        assert_eq!(
            refusal(Shape::Struct { side: nan, colour: None }),
            "payload.a.Struct.side is NaN; a number must be finite"
        );
        assert_eq!(
            refusal(Some([Bytes])),
            "payload.a[0] is bytes, for which JSON has no form; pass text or numbers"
        );
        assert_eq!(refusal((0, Unwilling)), "payload.a[1] does not serialise: no luck");
    }

    #[test]
    fn only_a_map_is_a_payload() {
        for (payload, what) in [
            (json!([{}]), "an array"),
            (json!("{}"), "a string"),
            (json!(true), "a boolean"),
            (json!(null), "null"),
            (json!(-1), "a number"),
            (json!(0.5), "a number"),
        ] {
            match canonicalize(&payload) {
                Err(Error::Config(why)) => {
                    assert_eq!(why, format!("payload is {what}; a map or a struct is required"));
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(canonicalize(&json!({})).expect("a map"), "{}");
        assert_eq!(canonicalize(&Some(Shape::Newtype(Meters(0.0)))).expect("a map"), r#"{"Newtype":0.0}"#);
    }

    #[test]
    fn a_number_is_the_same_when_serde_json_keeps_its_text() {
        assert_eq!(text(ArbitraryNumber { text: "1e16" }), text(1e16));
        assert_eq!(text(ArbitraryNumber { text: "-7" }), text(-7));
        assert_eq!(
            refusal([ArbitraryNumber { text: "1e400" }]),
            "payload.a[0] is infinite; a number must be finite"
        );
        assert_eq!(refusal(RawText { text: "{}" }), "payload.a is raw JSON text; pass the parsed value");
    }

    #[test]
    fn nesting_is_bounded_before_the_stack_is() {
        let nested = |levels| (0..levels).fold(json!(0), |inner, _| serde_json::Value::Array(vec![inner]));
        assert!(under("a", nested(MAX_DEPTH - 1)).is_ok());
        for levels in [MAX_DEPTH, MAX_DEPTH * 20] {
            let why = refusal(nested(levels));
            assert!(why.ends_with("[0] is too deep; 128 levels of arrays and maps are allowed"), "{why}");
        }
    }
}
