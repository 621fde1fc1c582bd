//! The gate in front of a target: `apply(keys, gate, record, now, call)` gives the reply and makes the writes.
//!
//! Each call is one script in `scripts/` (`newest.lua`, `apply.lua`) with the same order of decisions. All checks come
//! before the first write, and after them nothing can fail.
//!
//! | fence | writes | then |
//! |---|---|---|
//! | below the gate's, or below that of the lock's record | | fenced out: nothing changes |
//! | any other | one of them does not fit | refused: nothing changes, the gate's fence included |
//! | any other | all fit, or there are none | the gate takes the fence, all writes are made |

use super::Record;
use super::keyspace::{Answer, Change, Content, Keyspace, Kind, Life, Write, whole};

/// One call at a gate.
#[derive(Clone, Debug, PartialEq)]
pub enum Call {
    /// Shows the newest fence.
    Newest,
    /// Makes the writes if the fence is not older than the newest.
    Apply {
        /// The fence.
        fence: u64,
        /// How long the gate is remembered, milliseconds; `None` for ever.
        remember_ms: Option<u64>,
        /// The writes, in order. An increment comes before any other write to the same number, and a conditional
        /// `SET` before any other write to its key: the checks look at what stands there before the first write.
        writes: Vec<Write>,
    },
}

/// The answer to a [`Call`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The newest fence that the gate and the lock's record know; 0 for none.
    Newest(u64),
    /// All writes were made; the answer of each.
    Applied(Vec<Answer>),
    /// Nothing was changed: this newer fence is known.
    FencedOut(u64),
    /// Nothing was changed: the key of this write holds something of this other type.
    WrongType(usize, Kind),
    /// Nothing was changed: this write increments what is no number, or too large a one.
    NoNumber(usize),
    /// Nothing was changed: the server does not permit us this write.
    NotPermitted(usize),
}

/// Runs one call. `record` is that of the lock the gate is bound to.
pub fn apply(keys: &mut Keyspace, gate: &str, record: Option<&Record>, now_us: u64, call: &Call) -> Reply {
    let known = match keys.get(gate, now_us) {
        Some(Content::String(text)) => std::str::from_utf8(text).ok().and_then(|text| text.parse().ok()),
        _ => None,
    };
    let newest = known.unwrap_or(0).max(record.map_or(0, |record| record.fence));
    let Call::Apply { fence, remember_ms, writes } = call else { return Reply::Newest(newest) };
    if *fence < newest {
        return Reply::FencedOut(newest);
    }
    let mut kinds: Vec<(&str, Kind)> = Vec::new();
    for (index, write) in writes.iter().enumerate() {
        let seen = kinds.iter().rev().find(|(key, _)| *key == &*write.key);
        let before = seen.map_or_else(|| keys.kind(&write.key, now_us), |(_, kind)| *kind);
        if write.change.needs().is_some_and(|needed| before != Kind::None && before != needed) {
            return Reply::WrongType(index, before);
        }
        if let Change::IncrBy(by) | Change::HIncrBy(_, by) = &write.change
            && let Some(text) = keys.number_text(write, now_us)
        {
            let (least, most) = Change::addable(*by);
            if !whole(Some(text)).is_some_and(|number| (least..=most).contains(&number)) {
                return Reply::NoNumber(index);
            }
        }
        kinds.push((&write.key, write.change.leaves(before)));
    }
    let life = remember_ms.map_or(Life::Forever, Life::For);
    let value = fence.to_string().as_bytes().into();
    let change = Change::Set { value, life, present: None };
    keys.change(&Write { key: gate.into(), change }, now_us);
    Reply::Applied(writes.iter().map(|write| keys.change(write, now_us)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(key: &str, value: &str) -> Write {
        let change = Change::Set { value: value.as_bytes().into(), life: Life::Keep, present: None };
        Write { key: key.into(), change }
    }

    fn call(fence: u64, writes: Vec<Write>) -> Call {
        Call::Apply { fence, remember_ms: None, writes }
    }

    #[test]
    fn a_lower_fence_changes_nothing_and_an_equal_one_writes_again() {
        let mut keys = Keyspace::default();
        assert_eq!(
            apply(&mut keys, "g", None, 1, &call(7, vec![set("a", "1")])),
            Reply::Applied(vec![Answer::Done])
        );
        let before = keys.clone();
        assert_eq!(apply(&mut keys, "g", None, 2, &call(6, vec![set("a", "2")])), Reply::FencedOut(7));
        assert_eq!(keys, before);
        assert_eq!(
            apply(&mut keys, "g", None, 3, &call(7, vec![set("a", "3")])),
            Reply::Applied(vec![Answer::Done])
        );
        let mut record = Record::new(1);
        record.fence = 8;
        assert_eq!(apply(&mut keys, "g", Some(&record), 4, &call(7, vec![])), Reply::FencedOut(8));
        assert_eq!(apply(&mut keys, "g", Some(&record), 4, &Call::Newest), Reply::Newest(8));
    }

    #[test]
    fn one_write_that_does_not_fit_stops_all() {
        let mut keys = Keyspace::default();
        let push = Write { key: "a".into(), change: Change::RPush(vec![b"x"[..].into()]) };
        let writes = vec![set("b", "1"), set("a", "1"), push];
        assert_eq!(apply(&mut keys, "g", None, 1, &call(7, writes)), Reply::WrongType(2, Kind::String));
        assert!(keys.entries.is_empty());
        apply(&mut keys, "g", None, 1, &call(7, vec![set("n", "9223372036854775807")]));
        let before = keys.clone();
        let add = Write { key: "n".into(), change: Change::IncrBy(1) };
        assert_eq!(apply(&mut keys, "g", None, 1, &call(8, vec![set("b", "1"), add])), Reply::NoNumber(1));
        assert_eq!(keys, before);
    }
}
