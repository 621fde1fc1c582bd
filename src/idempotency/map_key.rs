//! Takes the text out of what serialises as a string, and refuses everything else: the keys of a map.

use serde::ser::{Impossible, Serialize, Serializer};

use super::refusal::Refusal;

/// Serialises strings, characters and unit variants to their text.
///
/// `serde_json` turns numbers and booleans into text when they are keys, so that 1 and "1" become one key. Python's
/// fencekit refuses them, and so does this.
pub(super) struct MapKey;

/// The serializer's methods for scalars that are no key.
macro_rules! refuse {
    ($($method:ident: $from:ty => $what:literal),* $(,)?) => {
        $(
            fn $method(self, _: $from) -> Result<String, Refusal> {
                Err(no_key($what))
            }
        )*
    };
}

impl Serializer for MapKey {
    type Ok = String;
    type Error = Refusal;
    type SerializeSeq = Impossible<String, Refusal>;
    type SerializeTuple = Impossible<String, Refusal>;
    type SerializeTupleStruct = Impossible<String, Refusal>;
    type SerializeTupleVariant = Impossible<String, Refusal>;
    type SerializeMap = Impossible<String, Refusal>;
    type SerializeStruct = Impossible<String, Refusal>;
    type SerializeStructVariant = Impossible<String, Refusal>;

    refuse! {
        serialize_bool: bool => "a boolean",
        serialize_i8: i8 => "an integer",
        serialize_i16: i16 => "an integer",
        serialize_i32: i32 => "an integer",
        serialize_i64: i64 => "an integer",
        serialize_i128: i128 => "an integer",
        serialize_u8: u8 => "an integer",
        serialize_u16: u16 => "an integer",
        serialize_u32: u32 => "an integer",
        serialize_u64: u64 => "an integer",
        serialize_u128: u128 => "an integer",
        serialize_f32: f32 => "a float",
        serialize_f64: f64 => "a float",
        serialize_bytes: &[u8] => "bytes",
        serialize_unit_struct: &'static str => "null",
    }

    fn serialize_str(self, text: &str) -> Result<String, Refusal> {
        Ok(text.to_owned())
    }

    fn serialize_char(self, character: char) -> Result<String, Refusal> {
        Ok(character.to_string())
    }

    fn serialize_unit_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
    ) -> Result<String, Refusal> {
        Ok(variant.to_owned())
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<String, Refusal> {
        value.serialize(self)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        value: &T,
    ) -> Result<String, Refusal> {
        value.serialize(self)
    }

    fn serialize_none(self) -> Result<String, Refusal> {
        Err(no_key("null"))
    }

    fn serialize_unit(self) -> Result<String, Refusal> {
        Err(no_key("null"))
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: &T,
    ) -> Result<String, Refusal> {
        Err(no_key("a map"))
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Self::SerializeSeq, Refusal> {
        Err(no_key("an array"))
    }

    fn serialize_tuple(self, _: usize) -> Result<Self::SerializeTuple, Refusal> {
        Err(no_key("an array"))
    }

    fn serialize_tuple_struct(
        self,
        _: &'static str,
        _: usize,
    ) -> Result<Self::SerializeTupleStruct, Refusal> {
        Err(no_key("an array"))
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Self::SerializeTupleVariant, Refusal> {
        Err(no_key("a map"))
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Self::SerializeMap, Refusal> {
        Err(no_key("a map"))
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Self::SerializeStruct, Refusal> {
        Err(no_key("a map"))
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Self::SerializeStructVariant, Refusal> {
        Err(no_key("a map"))
    }
}

/// Refuses the map at hand for a key that is `what`.
fn no_key(what: &str) -> Refusal {
    Refusal::new(format!("has a key that is {what}; keys must be strings"))
}
