//! The inside of arrays and maps: elements are written as they come, entries when all are known and sorted.

use std::collections::BTreeMap;

use serde::ser::{self, Serialize};

use super::canonical::Writer;
use super::map_key::MapKey;
use super::refusal::Refusal;
use super::spelling;

/// Writes the elements of an array as they come.
pub(super) struct Elements<'a> {
    /// Inside the array's brackets.
    writer: Writer<'a>,
    /// The enum variant whose data this is; its map is closed with the array.
    variant: Option<&'static str>,
    /// How many elements have been written.
    count: usize,
}

impl<'a> Elements<'a> {
    /// Takes over inside an open bracket; `variant` is the enum's, whose own map is open around it.
    pub(super) fn new(writer: Writer<'a>, variant: Option<&'static str>) -> Elements<'a> {
        Elements { writer, variant, count: 0 }
    }

    fn push<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Refusal> {
        if self.count > 0 {
            self.writer.out.push(',');
        }
        value
            .serialize(Writer { out: &mut *self.writer.out, depth: self.writer.depth })
            .map_err(|refusal| inside(refusal.at(self.count), self.variant))?;
        self.count += 1;
        Ok(())
    }

    fn close(self) -> Result<(), Refusal> {
        self.writer.word(if self.variant.is_some() { "]}" } else { "]" })
    }
}

/// Collects the entries of a map, which can be written only when the last one is known.
pub(super) struct Entries<'a> {
    /// Inside the map's braces.
    writer: Writer<'a>,
    /// The enum variant whose data this is; its map is closed with this one.
    variant: Option<&'static str>,
    /// Keys, and the canonical text of their values. Strings compare by their UTF-8 bytes, which is the order of their
    /// code points, which is Python's order; the keys as they are written (escaped) would sort otherwise.
    sorted: BTreeMap<String, String>,
    /// The key of the entry whose value comes next.
    key: Option<String>,
}

impl<'a> Entries<'a> {
    /// Takes over inside an open brace; `variant` is the enum's, whose own map is open around it.
    pub(super) fn new(writer: Writer<'a>, variant: Option<&'static str>) -> Entries<'a> {
        Entries { writer, variant, sorted: BTreeMap::new(), key: None }
    }

    fn insert<T: Serialize + ?Sized>(&mut self, key: String, value: &T) -> Result<(), Refusal> {
        let mut text = String::new();
        value
            .serialize(Writer { out: &mut text, depth: self.writer.depth })
            .map_err(|refusal| inside(refusal.under(&key), self.variant))?;
        if self.sorted.contains_key(&key) {
            // Which of the two a reader takes is anybody's guess, so it has no one meaning.
            return Err(inside(Refusal::new(format!("has the key {key:?} twice")), self.variant));
        }
        self.sorted.insert(key, text);
        Ok(())
    }

    fn close(self) -> Result<(), Refusal> {
        let out = self.writer.out;
        for (position, (key, text)) in self.sorted.iter().enumerate() {
            if position > 0 {
                out.push(',');
            }
            spelling::string(out, key);
            out.push(':');
            out.push_str(text);
        }
        out.push_str(if self.variant.is_some() { "}}" } else { "}" });
        Ok(())
    }
}

/// Writes what calls itself a struct: one, or a number of `serde_json`.
pub(super) enum Fields<'a> {
    /// A struct: a map whose keys are the names of its fields.
    Struct(Entries<'a>),
    /// A number, whose text is the only field.
    Number(Writer<'a>),
}

/// Adds the step from an enum's value to the data of its variant.
fn inside(refusal: Refusal, variant: Option<&'static str>) -> Refusal {
    match variant {
        Some(variant) => refusal.under(variant),
        None => refusal,
    }
}

/// The four traits of what becomes an array; they differ in names only.
macro_rules! arrays {
    ($($trait:ident: $method:ident),* $(,)?) => {
        $(
            impl ser::$trait for Elements<'_> {
                type Ok = ();
                type Error = Refusal;

                fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Refusal> {
                    self.push(value)
                }

                fn end(self) -> Result<(), Refusal> {
                    self.close()
                }
            }
        )*
    };
}

arrays! {
    SerializeSeq: serialize_element,
    SerializeTuple: serialize_element,
    SerializeTupleStruct: serialize_field,
    SerializeTupleVariant: serialize_field,
}

impl ser::SerializeMap for Entries<'_> {
    type Ok = ();
    type Error = Refusal;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), Refusal> {
        self.key = Some(key.serialize(MapKey)?);
        Ok(())
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Refusal> {
        match self.key.take() {
            Some(key) => self.insert(key, value),
            None => Err(Refusal::new("is a map that serialises a value before its key")),
        }
    }

    fn end(self) -> Result<(), Refusal> {
        self.close()
    }
}

impl ser::SerializeStructVariant for Entries<'_> {
    type Ok = ();
    type Error = Refusal;

    fn serialize_field<T: Serialize + ?Sized>(
        &mut self,
        name: &'static str,
        value: &T,
    ) -> Result<(), Refusal> {
        self.insert(name.to_owned(), value)
    }

    fn end(self) -> Result<(), Refusal> {
        self.close()
    }
}

impl ser::SerializeStruct for Fields<'_> {
    type Ok = ();
    type Error = Refusal;

    fn serialize_field<T: Serialize + ?Sized>(
        &mut self,
        name: &'static str,
        value: &T,
    ) -> Result<(), Refusal> {
        match self {
            Fields::Struct(entries) => entries.insert(name.to_owned(), value),
            Fields::Number(writer) => spelling::number(writer.out, &value.serialize(MapKey)?),
        }
    }

    fn end(self) -> Result<(), Refusal> {
        match self {
            Fields::Struct(entries) => entries.close(),
            Fields::Number(_) => Ok(()),
        }
    }
}
