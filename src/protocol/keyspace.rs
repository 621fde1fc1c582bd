//! Keys as a server keeps them, and the changes that a fenced write may make to one.
//!
//! Invariant: what [`Keyspace::change`] does and answers is what Redis does and answers; a key that has become empty
//! is gone.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// A value, a field or a member.
pub type Bytes = Box<[u8]>;

/// One write to one key.
#[derive(Clone, Debug, PartialEq)]
pub struct Write {
    /// The key.
    pub key: Box<str>,
    /// What is done to it.
    pub change: Change,
}

/// What a write does.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// `SET`: replaces whatever stands there.
    Set {
        /// The new value.
        value: Bytes,
        /// What becomes of the key's life.
        life: Life,
        /// Whether the key must be absent (`Some(false)`) or there (`Some(true)`).
        present: Option<bool>,
    },
    /// `DEL`.
    Del,
    /// `PEXPIRE`: milliseconds.
    Expire(u64),
    /// `PERSIST`.
    Persist,
    /// `INCRBY`.
    IncrBy(i64),
    /// `HSET`: fields and values.
    HSet(Vec<(Bytes, Bytes)>),
    /// `HDEL`: fields.
    HDel(Vec<Bytes>),
    /// `HINCRBY`: a field, and by how much.
    HIncrBy(Bytes, i64),
    /// `LPUSH`.
    LPush(Vec<Bytes>),
    /// `RPUSH`.
    RPush(Vec<Bytes>),
    /// `LTRIM`: the first and the last index that stay.
    LTrim(i64, i64),
    /// `SADD`.
    SAdd(Vec<Bytes>),
    /// `SREM`.
    SRem(Vec<Bytes>),
    /// `ZADD`: members and scores.
    ZAdd(Vec<(Bytes, f64)>),
    /// `ZREM`.
    ZRem(Vec<Bytes>),
}

/// What a `SET` makes of the life of its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// It stays what it was.
    Keep,
    /// The key does not expire.
    Forever,
    /// The key expires after so many milliseconds.
    For(u64),
}

/// What a command answered.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Answer {
    /// It was done: `SET`, `PEXPIRE`, `PERSIST`, `LTRIM`.
    Done,
    /// There was nothing to do: a `SET` whose condition did not hold, `PEXPIRE` of a missing key, `PERSIST` of one that
    /// does not expire.
    Skipped,
    /// How many were added or removed, or how long the list is now.
    Count(u64),
    /// The number that stands there now: `INCRBY`, `HINCRBY`.
    Number(i64),
}

/// The type of a key's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// No such key.
    None,
    /// A string.
    String,
    /// A hash.
    Hash,
    /// A list.
    List,
    /// A set.
    Set,
    /// A sorted set.
    Sorted,
}

impl Kind {
    /// The word Redis has for it.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Kind::None => "none",
            Kind::String => "string",
            Kind::Hash => "hash",
            Kind::List => "list",
            Kind::Set => "set",
            Kind::Sorted => "zset",
        }
    }
}

impl Change {
    /// The command.
    #[must_use]
    pub fn command(&self) -> &'static str {
        match self {
            Change::Set { .. } => "SET",
            Change::Del => "DEL",
            Change::Expire(_) => "PEXPIRE",
            Change::Persist => "PERSIST",
            Change::IncrBy(_) => "INCRBY",
            Change::HSet(_) => "HSET",
            Change::HDel(_) => "HDEL",
            Change::HIncrBy(..) => "HINCRBY",
            Change::LPush(_) => "LPUSH",
            Change::RPush(_) => "RPUSH",
            Change::LTrim(..) => "LTRIM",
            Change::SAdd(_) => "SADD",
            Change::SRem(_) => "SREM",
            Change::ZAdd(_) => "ZADD",
            Change::ZRem(_) => "ZREM",
        }
    }

    /// The type it needs if the key is there; `None` if any will do.
    #[must_use]
    pub fn needs(&self) -> Option<Kind> {
        match self {
            Change::Set { .. } | Change::Del | Change::Expire(_) | Change::Persist => None,
            Change::IncrBy(_) => Some(Kind::String),
            Change::HSet(_) | Change::HDel(_) | Change::HIncrBy(..) => Some(Kind::Hash),
            Change::LPush(_) | Change::RPush(_) | Change::LTrim(..) => Some(Kind::List),
            Change::SAdd(_) | Change::SRem(_) => Some(Kind::Set),
            Change::ZAdd(_) | Change::ZRem(_) => Some(Kind::Sorted),
        }
    }

    /// The type of the key afterwards, if it was `before`. A key that may have become empty keeps its type: the next
    /// write that needs another one is refused rather than gambled on.
    #[must_use]
    pub fn leaves(&self, before: Kind) -> Kind {
        match self {
            Change::Set { present: Some(true), .. } if before == Kind::None => Kind::None,
            Change::Set { present: Some(false), .. } if before != Kind::None => before,
            Change::Set { .. } | Change::IncrBy(_) => Kind::String,
            Change::Del => Kind::None,
            Change::HSet(_) | Change::HIncrBy(..) => Kind::Hash,
            Change::LPush(_) | Change::RPush(_) => Kind::List,
            Change::SAdd(_) => Kind::Set,
            Change::ZAdd(_) => Kind::Sorted,
            Change::Expire(_)
            | Change::Persist
            | Change::HDel(_)
            | Change::LTrim(..)
            | Change::SRem(_)
            | Change::ZRem(_) => before,
        }
    }

    /// The least and the largest number that adding `by` to does not overflow.
    #[must_use]
    pub fn addable(by: i64) -> (i64, i64) {
        (i64::MIN.saturating_sub(by.min(0)), i64::MAX.saturating_sub(by.max(0)))
    }
}

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// A string.
    String(Bytes),
    /// A hash.
    Hash(BTreeMap<Bytes, Bytes>),
    /// A list.
    List(VecDeque<Bytes>),
    /// A set.
    Set(BTreeSet<Bytes>),
    /// A sorted set.
    Sorted(BTreeMap<Bytes, f64>),
}

impl Content {
    /// Its type.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Content::String(_) => Kind::String,
            Content::Hash(_) => Kind::Hash,
            Content::List(_) => Kind::List,
            Content::Set(_) => Kind::Set,
            Content::Sorted(_) => Kind::Sorted,
        }
    }

    /// Whether nothing is left in it, so that the key goes.
    fn is_empty(&self) -> bool {
        match self {
            Content::String(_) => false,
            Content::Hash(fields) => fields.is_empty(),
            Content::List(items) => items.is_empty(),
            Content::Set(members) => members.is_empty(),
            Content::Sorted(members) => members.is_empty(),
        }
    }
}

/// A key's value and life.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The value.
    pub content: Content,
    /// When the key expires, server time in microseconds.
    pub expires: Option<u64>,
}

/// The keys of a server.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Keyspace {
    /// By name.
    pub entries: HashMap<Box<str>, Entry>,
}

impl Keyspace {
    /// Removes what expired by `now_us`, as the server does by itself.
    pub fn expire(&mut self, now_us: u64) {
        self.entries.retain(|_, entry| !is_over(entry, now_us));
    }

    /// The type of `key`.
    #[must_use]
    pub fn kind(&self, key: &str, now_us: u64) -> Kind {
        self.get(key, now_us).map_or(Kind::None, Content::kind)
    }

    /// The value of `key`.
    #[must_use]
    pub fn get(&self, key: &str, now_us: u64) -> Option<&Content> {
        self.entries.get(key).filter(|entry| !is_over(entry, now_us)).map(|entry| &entry.content)
    }

    /// The text that an increment would start from; `None` if there is none.
    #[must_use]
    pub fn number_text(&self, write: &Write, now_us: u64) -> Option<&Bytes> {
        match (&write.change, self.get(&write.key, now_us)?) {
            (Change::IncrBy(_), Content::String(text)) => Some(text),
            (Change::HIncrBy(field, _), Content::Hash(fields)) => fields.get(field),
            _ => None,
        }
    }

    /// Makes one change. The caller has made sure that the key has the type it needs.
    pub fn change(&mut self, write: &Write, now_us: u64) -> Answer {
        let key = &write.key;
        if self.entries.get(key).is_some_and(|entry| is_over(entry, now_us)) {
            self.entries.remove(key);
        }
        let answer = match &write.change {
            Change::Set { value, life, present } => {
                let old = self.entries.get(key);
                if present.is_some_and(|present| present != old.is_some()) {
                    return Answer::Skipped;
                }
                let expires = match life {
                    Life::Keep => old.and_then(|entry| entry.expires),
                    Life::Forever => None,
                    Life::For(ms) => Some(now_us + ms * 1000),
                };
                let content = Content::String(value.clone());
                self.entries.insert(key.clone(), Entry { content, expires });
                return Answer::Done;
            }
            Change::Del => return Answer::Count(self.entries.remove(key).is_some().into()),
            Change::Expire(ms) => {
                let Some(entry) = self.entries.get_mut(key) else { return Answer::Skipped };
                entry.expires = Some(now_us + ms * 1000);
                return Answer::Done;
            }
            Change::Persist => {
                let expires = self.entries.get_mut(key).and_then(|entry| entry.expires.take());
                return if expires.is_some() { Answer::Done } else { Answer::Skipped };
            }
            Change::IncrBy(by) => {
                let number = whole(self.number_text(write, now_us)).unwrap_or(0).saturating_add(*by);
                let text = Bytes::from(number.to_string().as_bytes());
                match self.entries.get_mut(key) {
                    Some(entry) => entry.content = Content::String(text),
                    None => {
                        let entry = Entry { content: Content::String(text), expires: None };
                        self.entries.insert(key.clone(), entry);
                    }
                }
                return Answer::Number(number);
            }
            change => {
                let empty = match change.needs() {
                    Some(Kind::Hash) => Content::Hash(BTreeMap::new()),
                    Some(Kind::List) => Content::List(VecDeque::new()),
                    Some(Kind::Set) => Content::Set(BTreeSet::new()),
                    _ => Content::Sorted(BTreeMap::new()),
                };
                let entry =
                    self.entries.entry(key.clone()).or_insert(Entry { content: empty, expires: None });
                alter(&mut entry.content, change)
            }
        };
        if self.entries.get(key).is_some_and(|entry| entry.content.is_empty()) {
            self.entries.remove(key);
        }
        answer
    }
}

/// Changes a hash, a list, a set or a sorted set.
fn alter(content: &mut Content, change: &Change) -> Answer {
    let count = match (content, change) {
        (Content::Hash(hash), Change::HSet(fields)) => {
            let new =
                fields.iter().filter(|(field, value)| hash.insert(field.clone(), value.clone()).is_none());
            new.count()
        }
        (Content::Hash(hash), Change::HDel(fields)) => {
            fields.iter().filter(|field| hash.remove(*field).is_some()).count()
        }
        (Content::Hash(hash), Change::HIncrBy(field, by)) => {
            let number = whole(hash.get(field)).unwrap_or(0).saturating_add(*by);
            hash.insert(field.clone(), number.to_string().as_bytes().into());
            return Answer::Number(number);
        }
        (Content::List(list), Change::LPush(values)) => {
            values.iter().for_each(|value| list.push_front(value.clone()));
            list.len()
        }
        (Content::List(list), Change::RPush(values)) => {
            list.extend(values.iter().cloned());
            list.len()
        }
        (Content::List(list), Change::LTrim(first, last)) => {
            let length = i64::try_from(list.len()).unwrap_or(i64::MAX);
            let place = |index: i64| if index < 0 { index.saturating_add(length) } else { index };
            let (first, last) = (place(*first).max(0), place(*last).min(length - 1));
            if first > last {
                list.clear();
            } else {
                // Both lie within the list now.
                list.truncate(usize::try_from(last + 1).unwrap_or(usize::MAX));
                list.drain(..usize::try_from(first).unwrap_or(0));
            }
            return Answer::Done;
        }
        (Content::Set(set), Change::SAdd(members)) => {
            members.iter().filter(|member| set.insert((*member).clone())).count()
        }
        (Content::Set(set), Change::SRem(members)) => {
            members.iter().filter(|member| set.remove(*member)).count()
        }
        (Content::Sorted(sorted), Change::ZAdd(members)) => {
            members.iter().filter(|(member, score)| sorted.insert(member.clone(), *score).is_none()).count()
        }
        (Content::Sorted(sorted), Change::ZRem(members)) => {
            members.iter().filter(|member| sorted.remove(*member).is_some()).count()
        }
        _ => 0,
    };
    Answer::Count(count as u64)
}

/// The number in a string, as Redis reads one: no sign but a minus, no leading zeros, no blanks.
#[must_use]
pub fn whole(text: Option<&Bytes>) -> Option<i64> {
    let text = std::str::from_utf8(text?).ok()?;
    let number: i64 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

fn is_over(entry: &Entry, now_us: u64) -> bool {
    entry.expires.is_some_and(|at| at <= now_us)
}
