//! Idempotency keys: byte for byte those of Python's fencekit, and a function of the payload's meaning alone.

#![cfg(feature = "idempotency")]

use std::fs;
use std::path::Path;

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use proptest::sample::Index;
use redis_fifo_lock::Error;
use redis_fifo_lock::idempotency::{IdempotencyKey, canonicalize};
use serde::ser::{Serialize, SerializeMap, SerializeSeq, SerializeTuple, Serializer};

/// The vectors' typed form of a payload; serialises as a Rust value of that kind would.
#[derive(Clone, Debug, PartialEq)]
enum Typed {
    Null,
    Bool(bool),
    Signed(i128),
    /// Beyond `i128::MAX` only.
    Unsigned(u128),
    Float(f64),
    Text(String),
    Bytes(Vec<u8>),
    List(Vec<Typed>),
    Tuple(Vec<Typed>),
    Map(Vec<(Typed, Typed)>),
}

impl Serialize for Typed {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Typed::Null => serializer.serialize_none(),
            Typed::Bool(value) => serializer.serialize_bool(*value),
            Typed::Signed(value) => match (i64::try_from(*value), u64::try_from(*value)) {
                (Ok(value), _) => serializer.serialize_i64(value),
                (_, Ok(value)) => serializer.serialize_u64(value),
                _ => serializer.serialize_i128(*value),
            },
            Typed::Unsigned(value) => serializer.serialize_u128(*value),
            Typed::Float(value) => serializer.serialize_f64(*value),
            Typed::Text(value) => serializer.serialize_str(value),
            Typed::Bytes(value) => serializer.serialize_bytes(value),
            Typed::List(items) => {
                let mut list = serializer.serialize_seq(None)?;
                items.iter().try_for_each(|item| list.serialize_element(item))?;
                list.end()
            }
            Typed::Tuple(items) => {
                let mut tuple = serializer.serialize_tuple(items.len())?;
                items.iter().try_for_each(|item| tuple.serialize_element(item))?;
                tuple.end()
            }
            Typed::Map(entries) => {
                let mut map = serializer.serialize_map(None)?;
                entries.iter().try_for_each(|(key, value)| map.serialize_entry(key, value))?;
                map.end()
            }
        }
    }
}

impl Typed {
    /// Reads the typed form.
    fn read(json: &serde_json::Value) -> Typed {
        use serde_json::Value;
        let all = |items: &Value| items.as_array().expect("an array").iter().map(Typed::read).collect();
        match json {
            Value::Null => Typed::Null,
            Value::Bool(value) => Typed::Bool(*value),
            Value::String(value) => Typed::Text(value.clone()),
            Value::Array(_) => Typed::List(all(json)),
            Value::Number(_) => panic!("a bare number: {json}"),
            Value::Object(tagged) => {
                assert_eq!(tagged.len(), 1, "{json}");
                let (tag, value) = tagged.iter().next().expect("one entry");
                let text = || value.as_str().expect("text");
                match tag.as_str() {
                    "i" => text().parse().map_or_else(
                        |_| Typed::Unsigned(text().parse().expect("an integer of at most 128 bits")),
                        Typed::Signed,
                    ),
                    "f" => Typed::Float(text().parse().expect("a float")),
                    "b" => Typed::Bytes(serde_json::from_value(value.clone()).expect("bytes")),
                    "t" => Typed::Tuple(all(value)),
                    "m" => {
                        let pair = |pair: &Value| (Typed::read(&pair[0]), Typed::read(&pair[1]));
                        Typed::Map(value.as_array().expect("pairs").iter().map(pair).collect())
                    }
                    _ => panic!("an unknown tag: {json}"),
                }
            }
        }
    }

    /// Rotates each map by what `turns` yields, and swaps its first two entries if that is odd.
    fn shuffle(&mut self, turns: &mut impl Iterator<Item = usize>) {
        match self {
            Typed::List(items) | Typed::Tuple(items) => items.iter_mut().for_each(|item| item.shuffle(turns)),
            Typed::Map(entries) => {
                let turn = turns.next().expect("endless");
                if !entries.is_empty() {
                    let by = turn % entries.len();
                    entries.rotate_left(by);
                }
                if turn % 2 == 1 && entries.len() > 1 {
                    entries.swap(0, 1);
                }
                entries.iter_mut().for_each(|(_, value)| value.shuffle(turns));
            }
            _ => {}
        }
    }

    /// Calls `visit` with each value in the payload, itself included.
    fn walk(&mut self, visit: &mut impl FnMut(&mut Typed)) {
        visit(self);
        match self {
            Typed::List(items) | Typed::Tuple(items) => items.iter_mut().for_each(|item| item.walk(visit)),
            Typed::Map(entries) => entries.iter_mut().for_each(|(_, value)| value.walk(visit)),
            _ => {}
        }
    }

    /// Applies `change` to one of the values it can change, and tells whether there was one.
    fn change_one(&mut self, which: Index, change: impl Fn(&Typed) -> Option<Typed>) -> bool {
        let mut count = 0;
        self.walk(&mut |value| count += usize::from(change(value).is_some()));
        if count == 0 {
            return false;
        }
        let mut left = which.index(count);
        let mut done = false;
        self.walk(&mut |value| {
            if done {
                return;
            }
            match change(value) {
                Some(other) if left == 0 => {
                    *value = other;
                    done = true;
                }
                Some(_) => left -= 1,
                None => {}
            }
        });
        done
    }
}

/// The least change there is to a scalar: the next number, another type, one more character.
fn another_scalar(value: &Typed) -> Option<Typed> {
    match value {
        Typed::Null => Some(Typed::Bool(false)),
        Typed::Bool(value) => Some(Typed::Bool(!value)),
        Typed::Signed(value) => Some(Typed::Signed(value ^ 1)),
        Typed::Unsigned(value) => Some(Typed::Unsigned(value ^ 1)),
        Typed::Float(value) => Some(Typed::Float(f64::from_bits(value.to_bits() ^ 1))),
        Typed::Text(value) => Some(Typed::Text(format!("{value}\0"))),
        _ => None,
    }
}

/// The same number or word with another type; Python's `==` cannot tell the numbers apart.
fn another_type(value: &Typed) -> Option<Typed> {
    match value {
        Typed::Null => Some(Typed::Text("null".into())),
        Typed::Bool(value) => Some(Typed::Signed((*value).into())),
        Typed::Signed(value) => Some(Typed::Float(*value as f64)),
        Typed::Float(value) => Some(Typed::Text(format!("{value:?}"))),
        _ => None,
    }
}

/// An array whose first and last elements have changed places, if they are scalars that differ.
fn another_order(value: &Typed) -> Option<Typed> {
    let (Typed::List(items) | Typed::Tuple(items)) = value else { return None };
    let (first, last) = (items.first()?, items.last()?);
    // A list or map may differ here and yet be the same once its maps are sorted.
    if first == last || another_scalar(first).is_none() || another_scalar(last).is_none() {
        return None;
    }
    let mut items = items.clone();
    let end = items.len() - 1;
    items.swap(0, end);
    Some(Typed::List(items))
}

fn payloads() -> impl Strategy<Value = Typed> {
    let scalar = prop_oneof![
        Just(Typed::Null),
        any::<bool>().prop_map(Typed::Bool),
        any::<i128>().prop_map(Typed::Signed),
        (-3..3i128).prop_map(Typed::Signed),
        ((1 << 127)..=u128::MAX).prop_map(Typed::Unsigned),
        any::<f64>().prop_filter_map("finite", |value| value.is_finite().then_some(Typed::Float(value))),
        (-3..3i8).prop_map(|value| Typed::Float(value.into())),
        any::<String>().prop_map(Typed::Text),
    ];
    fn map(value: impl Strategy<Value = Typed>) -> impl Strategy<Value = Typed> {
        let key = prop_oneof!["[a-c]{0,2}", any::<String>()];
        btree_map(key, value, 0..6).prop_map(|entries| {
            Typed::Map(entries.into_iter().map(|(key, value)| (Typed::Text(key), value)).collect())
        })
    }
    let value = scalar.prop_recursive(4, 48, 6, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..5).prop_map(Typed::List),
            vec(inner.clone(), 0..4).prop_map(Typed::Tuple),
            map(inner),
        ]
    });
    map(value)
}

fn key(payload: &Typed) -> IdempotencyKey {
    IdempotencyKey::new("jobs", payload).expect("a key")
}

/// A40: what fencekit computed for each vector is what we compute, and we refuse what it refuses.
#[test]
fn every_vector_has_the_key_that_python_gives_it() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/idempotency_keys.jsonl");
    let file = fs::read_to_string(path).expect("the vectors");
    let (mut equal, mut refused) = (0, 0);
    for (number, line) in file.lines().enumerate().skip(1) {
        let vector: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let text =
            |name: &str| vector[name].as_str().unwrap_or_else(|| panic!("line {}: {name}", number + 1));
        let payload = Typed::read(&vector["payload"]);
        let result = IdempotencyKey::new(text("namespace"), &payload);
        if vector["error"] == true {
            assert!(matches!(result, Err(Error::Config(_))), "line {}: {result:?}\n{line}", number + 1);
            refused += 1;
            continue;
        }
        let canonical = canonicalize(&payload).unwrap_or_else(|error| panic!("line {}: {error}", number + 1));
        assert_eq!(canonical, text("canonical"), "line {}", number + 1);
        let key = result.unwrap_or_else(|error| panic!("line {}: {error}", number + 1));
        assert_eq!(key.as_str(), text("key"), "line {}", number + 1);
        assert_eq!(key.to_string(), text("key"), "line {}", number + 1);
        equal += 1;
    }
    assert!(equal >= 1000 && refused >= 100, "too few vectors: {equal} and {refused}");
}

proptest! {
    /// A40: the order of maps, at whatever level, has no say in the key.
    #[test]
    fn key_is_the_same_whatever_the_order_of_the_maps(payload in payloads(), turns in vec(any::<usize>(), 1..20)) {
        let mut other = payload.clone();
        other.shuffle(&mut turns.into_iter().cycle());
        prop_assert_eq!(key(&payload), key(&other));
    }

    /// A40: another scalar anywhere is another job, be it the same number with another type.
    #[test]
    fn key_is_another_if_any_scalar_is(payload in payloads(), which in any::<Index>()) {
        for change in [another_scalar, another_type] {
            let mut other = payload.clone();
            if other.change_one(which, change) {
                prop_assert_ne!(key(&payload), key(&other), "{:?}", other);
            }
        }
    }

    /// A40: the order of an array is part of the job.
    #[test]
    fn key_is_another_if_the_order_of_an_array_is(payload in payloads(), which in any::<Index>()) {
        let mut other = payload.clone();
        if other.change_one(which, another_order) {
            prop_assert_ne!(key(&payload), key(&other), "{:?}", other);
        }
    }

    /// A40: renaming a key, dropping or adding an entry makes another job.
    #[test]
    fn key_is_another_if_an_entry_is(payload in payloads(), which in any::<Index>()) {
        let without_first = |value: &Typed| match value {
            Typed::Map(entries) => entries.split_first().map(|(_, rest)| Typed::Map(rest.into())),
            _ => None,
        };
        let renamed = |value: &Typed| match value {
            Typed::Map(entries) => {
                let ((first, value), rest) = entries.split_first()?;
                let Typed::Text(name) = first else { return None };
                // Longer than any other name, so that it is nobody else's.
                let name = Typed::Text(format!("{name}{}", "x".repeat(300)));
                Some(Typed::Map([&[(name, value.clone())], rest].concat()))
            }
            _ => None,
        };
        let mut fewer = payload.clone();
        if fewer.change_one(which, without_first) {
            prop_assert_ne!(key(&payload), key(&fewer));
        }
        let mut other = payload.clone();
        if other.change_one(which, renamed) {
            prop_assert_ne!(key(&payload), key(&other));
        }
    }
}
