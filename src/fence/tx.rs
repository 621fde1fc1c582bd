//! `Tx`: the list of writes that a gate makes in one step.

use std::time::Duration;

use crate::error::Error;
use crate::keys;
use crate::protocol::keyspace::{Bytes, Change, Life, Write};
use crate::settings::{LONGEST, SHORTEST, millis, within};

/// Arguments that one command may have: Lua passes no more than 8000.
const ARGUMENTS: usize = 4000;

/// A list of writes for [`FenceGate::apply`](crate::fence::FenceGate::apply).
///
/// The writes are made in the order in which they are listed, all or none. A write that is refused, an empty list of
/// fields for example, makes `apply` give the error and send nothing.
///
/// | method | command | its answer |
/// |---|---|---|
/// | [`set`](Tx::set), [`set_for`](Tx::set_for) | `SET` | `Done` |
/// | [`del`](Tx::del) | `DEL` | `Count`: 1 if there was one |
/// | [`expire`](Tx::expire), [`persist`](Tx::persist) | `PEXPIRE`, `PERSIST` | `Done`, or `Skipped` without such a key |
/// | [`incr_by`](Tx::incr_by), [`hincr_by`](Tx::hincr_by) | `INCRBY`, `HINCRBY` | `Number`: the sum |
/// | [`hset`](Tx::hset), [`hdel`](Tx::hdel) | `HSET`, `HDEL` | `Count` of new, of removed fields |
/// | [`lpush`](Tx::lpush), [`rpush`](Tx::rpush) | `LPUSH`, `RPUSH` | `Count`: the length of the list |
/// | [`ltrim`](Tx::ltrim) | `LTRIM` | `Done` |
/// | [`sadd`](Tx::sadd), [`srem`](Tx::srem), [`zadd`](Tx::zadd), [`zrem`](Tx::zrem) | the same | `Count` of new, of removed members |
/// | [`command`](Tx::command) | any of these by name | |
///
/// An increment must stand before any other write to the same number, and a `SET` with `NX` or `XX` before any other
/// write to its key: what stands there is checked before the first write is made.
#[derive(Debug)]
pub struct Tx {
    /// Before our own keys, which are not written.
    prefix: Box<str>,
    writes: Vec<Write>,
    /// The first refusal.
    refused: Option<Error>,
}

impl Tx {
    pub(super) fn new(prefix: &str) -> Tx {
        Tx { prefix: prefix.into(), writes: Vec::new(), refused: None }
    }

    pub(super) fn into_writes(self) -> Result<Vec<Write>, Error> {
        match self.refused {
            Some(error) => Err(error),
            None => Ok(self.writes),
        }
    }

    /// Sets `key` to a string, whatever its type was. Its time to live, if it has one, goes on.
    pub fn set(&mut self, key: &str, value: impl AsRef<[u8]>) -> &mut Tx {
        self.add(key, Change::Set { value: value.as_ref().into(), life: Life::Keep, present: None })
    }

    /// Sets `key` to a string that expires after `time`; 1 ms to 10 years are allowed.
    pub fn set_for(&mut self, key: &str, value: impl AsRef<[u8]>, time: Duration) -> &mut Tx {
        self.check(within("the time to live", time, SHORTEST, LONGEST));
        self.add(
            key,
            Change::Set { value: value.as_ref().into(), life: Life::For(millis(time)), present: None },
        )
    }

    /// Deletes `key`.
    pub fn del(&mut self, key: &str) -> &mut Tx {
        self.add(key, Change::Del)
    }

    /// Has `key` expire after `time`; 1 ms to 10 years are allowed.
    pub fn expire(&mut self, key: &str, time: Duration) -> &mut Tx {
        self.check(within("the time to live", time, SHORTEST, LONGEST));
        self.add(key, Change::Expire(millis(time)))
    }

    /// Has `key` not expire.
    pub fn persist(&mut self, key: &str) -> &mut Tx {
        self.add(key, Change::Persist)
    }

    /// Adds `by` to the whole number in the string `key`.
    pub fn incr_by(&mut self, key: &str, by: i64) -> &mut Tx {
        self.add(key, Change::IncrBy(by))
    }

    /// Sets fields of the hash `key`.
    pub fn hset<F: AsRef<[u8]>, V: AsRef<[u8]>>(
        &mut self,
        key: &str,
        fields: impl IntoIterator<Item = (F, V)>,
    ) -> &mut Tx {
        let fields = fields.into_iter().map(|(field, value)| (field.as_ref().into(), value.as_ref().into()));
        self.add(key, Change::HSet(fields.collect()))
    }

    /// Removes fields of the hash `key`.
    pub fn hdel<F: AsRef<[u8]>>(&mut self, key: &str, fields: impl IntoIterator<Item = F>) -> &mut Tx {
        self.add(key, Change::HDel(bytes(fields)))
    }

    /// Adds `by` to the whole number in a field of the hash `key`.
    pub fn hincr_by(&mut self, key: &str, field: impl AsRef<[u8]>, by: i64) -> &mut Tx {
        self.add(key, Change::HIncrBy(field.as_ref().into(), by))
    }

    /// Puts values before the list `key`, one after the other.
    pub fn lpush<V: AsRef<[u8]>>(&mut self, key: &str, values: impl IntoIterator<Item = V>) -> &mut Tx {
        self.add(key, Change::LPush(bytes(values)))
    }

    /// Puts values behind the list `key`.
    pub fn rpush<V: AsRef<[u8]>>(&mut self, key: &str, values: impl IntoIterator<Item = V>) -> &mut Tx {
        self.add(key, Change::RPush(bytes(values)))
    }

    /// Keeps the values `first` to `last` of the list `key`; negative indexes count from its end.
    pub fn ltrim(&mut self, key: &str, first: i64, last: i64) -> &mut Tx {
        self.add(key, Change::LTrim(first, last))
    }

    /// Adds members to the set `key`.
    pub fn sadd<M: AsRef<[u8]>>(&mut self, key: &str, members: impl IntoIterator<Item = M>) -> &mut Tx {
        self.add(key, Change::SAdd(bytes(members)))
    }

    /// Removes members of the set `key`.
    pub fn srem<M: AsRef<[u8]>>(&mut self, key: &str, members: impl IntoIterator<Item = M>) -> &mut Tx {
        self.add(key, Change::SRem(bytes(members)))
    }

    /// Adds members with scores to the sorted set `key`, or changes their scores.
    pub fn zadd<M: AsRef<[u8]>>(
        &mut self,
        key: &str,
        members: impl IntoIterator<Item = (f64, M)>,
    ) -> &mut Tx {
        let members = members.into_iter().map(|(score, member)| (member.as_ref().into(), score));
        self.add(key, Change::ZAdd(members.collect()))
    }

    /// Removes members of the sorted set `key`.
    pub fn zrem<M: AsRef<[u8]>>(&mut self, key: &str, members: impl IntoIterator<Item = M>) -> &mut Tx {
        self.add(key, Change::ZRem(bytes(members)))
    }

    /// Adds a command by its name, with the arguments that come behind its key, as Redis takes them.
    ///
    /// These are allowed: `SET` (with `EX`, `PX`, `KEEPTTL`, `NX`, `XX`; without a time to live it keeps the one there is,
    /// unlike plain `SET`), `DEL`, `EXPIRE`, `PEXPIRE`, `PERSIST`, `INCR`, `DECR`, `INCRBY`, `DECRBY`, `HSET`, `HDEL`,
    /// `HINCRBY`, `LPUSH`, `RPUSH`, `LTRIM`, `SADD`, `SREM`, `ZADD` (without options), `ZREM`.
    ///
    /// # Examples
    ///
    /// ```
    /// use redis_fifo_lock::LockClient;
    ///
    /// let gate = LockClient::memory().gate("a")?;
    /// gate.apply("1".parse()?, |tx| {
    ///     tx.command("HSET", "a", ["field", "value"]).command("SET", "b", ["value", "EX", "60", "NX"]);
    /// })?;
    /// assert!(gate.apply("1".parse()?, |tx| { tx.command("FLUSHALL", "a", [""]); }).is_err());
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn command<A: AsRef<[u8]>>(
        &mut self,
        name: &str,
        key: &str,
        arguments: impl IntoIterator<Item = A>,
    ) -> &mut Tx {
        let arguments = bytes(arguments);
        match parse(&name.to_ascii_uppercase(), &arguments) {
            Ok(change) => self.add(key, change),
            Err(why) => {
                self.check(Err(Error::Config(format!("{name} `{key}`: {why}"))));
                self
            }
        }
    }

    fn check(&mut self, result: Result<(), Error>) {
        if let Err(error) = result {
            self.refused.get_or_insert(error);
        }
    }

    fn add(&mut self, key: &str, change: Change) -> &mut Tx {
        self.check(keys::check_target(&self.prefix, key));
        if let Some(why) = self.why_not(key, &change) {
            self.check(Err(Error::Config(format!("{} `{key}`: {why}", change.command()))));
        }
        self.writes.push(Write { key: key.into(), change });
        self
    }

    /// Why a write is not allowed here.
    fn why_not(&self, key: &str, change: &Change) -> Option<&'static str> {
        let count = match change {
            Change::HSet(fields) => fields.len() * 2,
            Change::ZAdd(members) => members.len() * 2,
            Change::HDel(items)
            | Change::LPush(items)
            | Change::RPush(items)
            | Change::SAdd(items)
            | Change::SRem(items)
            | Change::ZRem(items) => items.len(),
            _ => 1,
        };
        if count == 0 {
            return Some("at least one argument is required");
        }
        if count > ARGUMENTS {
            return Some("at most 4000 arguments are allowed");
        }
        if let Change::ZAdd(members) = change
            && members.iter().any(|(_, score)| score.is_nan())
        {
            return Some("NaN is no score");
        }
        let mut before = self.writes.iter().filter(|write| &*write.key == key).map(|write| &write.change);
        let late = match change {
            Change::Set { present: Some(_), .. } => before.next().is_some(),
            Change::IncrBy(_) => before.any(|other| !matches!(other, Change::Expire(_) | Change::Persist)),
            Change::HIncrBy(field, _) => before.any(|other| match other {
                Change::HSet(fields) => fields.iter().any(|(other, _)| other == field),
                Change::HDel(fields) => fields.contains(field),
                Change::HIncrBy(other, _) => other == field,
                Change::Expire(_) | Change::Persist => false,
                _ => true,
            }),
            _ => false,
        };
        late.then_some("it must stand before all other writes to the same key or field")
    }
}

fn bytes<T: AsRef<[u8]>>(items: impl IntoIterator<Item = T>) -> Vec<Bytes> {
    items.into_iter().map(|item| item.as_ref().into()).collect()
}

/// Reads the arguments of the command `name`.
fn parse(name: &str, arguments: &[Bytes]) -> Result<Change, &'static str> {
    match (name, arguments) {
        ("SET", [value, options @ ..]) => set(value, options),
        ("DEL", []) => Ok(Change::Del),
        ("PERSIST", []) => Ok(Change::Persist),
        ("EXPIRE", [seconds]) => Ok(Change::Expire(time(seconds, 1000)?)),
        ("PEXPIRE", [ms]) => Ok(Change::Expire(time(ms, 1)?)),
        ("INCR", []) => Ok(Change::IncrBy(1)),
        ("DECR", []) => Ok(Change::IncrBy(-1)),
        ("INCRBY", [by]) => Ok(Change::IncrBy(whole(by)?)),
        ("DECRBY", [by]) => whole(by)?.checked_neg().map(Change::IncrBy).ok_or("the number is out of range"),
        ("HSET", pairs) if pairs.len() % 2 == 0 => {
            Ok(Change::HSet(pairs.chunks(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect()))
        }
        ("HDEL", fields) => Ok(Change::HDel(fields.to_vec())),
        ("HINCRBY", [field, by]) => Ok(Change::HIncrBy(field.clone(), whole(by)?)),
        ("LPUSH", values) => Ok(Change::LPush(values.to_vec())),
        ("RPUSH", values) => Ok(Change::RPush(values.to_vec())),
        ("LTRIM", [first, last]) => Ok(Change::LTrim(whole(first)?, whole(last)?)),
        ("SADD", members) => Ok(Change::SAdd(members.to_vec())),
        ("SREM", members) => Ok(Change::SRem(members.to_vec())),
        ("ZREM", members) => Ok(Change::ZRem(members.to_vec())),
        ("ZADD", pairs) if pairs.len() % 2 == 0 => {
            let scored = pairs.chunks(2).map(|pair| {
                let score = std::str::from_utf8(&pair[0]).ok().and_then(|text| text.parse().ok());
                Ok((pair[1].clone(), score.ok_or("a score must be a number")?))
            });
            Ok(Change::ZAdd(scored.collect::<Result<_, &str>>()?))
        }
        (
            "SET" | "DEL" | "PERSIST" | "EXPIRE" | "PEXPIRE" | "INCR" | "DECR" | "INCRBY" | "DECRBY" | "HSET"
            | "HINCRBY" | "LTRIM" | "ZADD",
            _,
        ) => Err("another number of arguments is required"),
        _ => Err("this command is not allowed; see `Tx::command`"),
    }
}

/// Reads the options of `SET`.
fn set(value: &Bytes, mut options: &[Bytes]) -> Result<Change, &'static str> {
    let (mut life, mut present) = (None, None);
    while let [option, rest @ ..] = options {
        options = rest;
        match (&*option.to_ascii_uppercase(), rest) {
            (b"NX", _) if present.is_none() => present = Some(false),
            (b"XX", _) if present.is_none() => present = Some(true),
            (b"KEEPTTL", _) if life.is_none() => life = Some(Life::Keep),
            (b"EX", [seconds, rest @ ..]) if life.is_none() => {
                (life, options) = (Some(Life::For(time(seconds, 1000)?)), rest);
            }
            (b"PX", [ms, rest @ ..]) if life.is_none() => {
                (life, options) = (Some(Life::For(time(ms, 1)?)), rest);
            }
            _ => return Err("of the options EX, PX, KEEPTTL, NX and XX are allowed, one of each kind"),
        }
    }
    Ok(Change::Set { value: value.clone(), life: life.unwrap_or(Life::Keep), present })
}

/// Reads a whole number.
fn whole(text: &Bytes) -> Result<i64, &'static str> {
    crate::protocol::keyspace::whole(Some(text)).ok_or("a whole number is required")
}

/// Reads a time in units of `ms` milliseconds.
fn time(text: &Bytes, ms: u64) -> Result<u64, &'static str> {
    let number = u64::try_from(whole(text)?).ok().and_then(|number| number.checked_mul(ms));
    let allowed = |time: &u64| *time > 0 && Duration::from_millis(*time) <= LONGEST;
    number.filter(allowed).ok_or("the time to live must be from 1 ms to 10 years")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(list: impl FnOnce(&mut Tx)) -> Option<String> {
        let mut tx = Tx::new("fifo");
        list(&mut tx);
        tx.into_writes().err().map(|error| error.to_string())
    }

    #[test]
    fn commands_by_name_are_those_of_the_methods() {
        let mut tx = Tx::new("fifo");
        tx.command("set", "a", ["v", "ex", "2", "xx"]).command("INCR", "n", [""; 0]).command(
            "DECRBY",
            "m",
            ["4"],
        );
        tx.command("HSET", "h", ["f", "v"]).command("ZADD", "z", ["1.5", "m"]).command("SET", "b", ["v"]);
        let writes = tx.into_writes().expect("allowed");
        let v: Bytes = b"v"[..].into();
        let expected = [
            Change::Set { value: v.clone(), life: Life::For(2000), present: Some(true) },
            Change::IncrBy(1),
            Change::IncrBy(-4),
            Change::HSet(vec![(b"f"[..].into(), v.clone())]),
            Change::ZAdd(vec![(b"m"[..].into(), 1.5)]),
            Change::Set { value: v, life: Life::Keep, present: None },
        ];
        assert!(writes.iter().map(|write| &write.change).eq(&expected), "{writes:?}");
    }

    #[test]
    fn what_could_fail_on_the_server_is_refused_here() {
        let refused: [fn(&mut Tx); 16] = [
            |tx| _ = tx.command("FLUSHALL", "a", [""; 0]),
            |tx| _ = tx.command("SET", "a", ["v", "EX"]),
            |tx| _ = tx.command("SET", "a", ["v", "EX", "0"]),
            |tx| _ = tx.command("SET", "a", ["v", "NX", "XX"]),
            |tx| _ = tx.command("SET", "a", ["v", "PX", "1", "KEEPTTL"]),
            |tx| _ = tx.command("INCRBY", "a", ["1.5"]),
            |tx| _ = tx.command("DECRBY", "a", ["-9223372036854775808"]),
            |tx| _ = tx.command("HSET", "a", ["f"]),
            |tx| _ = tx.command("ZADD", "a", ["NX", "m"]),
            |tx| _ = tx.zadd("a", [(f64::NAN, "m")]),
            |tx| _ = tx.hdel("a", [""; 0]),
            |tx| _ = tx.sadd("a", vec!["x"; 4001]),
            |tx| _ = tx.set("a", "1").incr_by("a", 1),
            |tx| _ = tx.hset("a", [("f", "1")]).hincr_by("a", "f", 1),
            |tx| _ = tx.del("a").command("SET", "a", ["v", "NX"]),
            |tx| _ = tx.set("fifo:{x}:lock", "mine"),
        ];
        for (i, list) in refused.into_iter().enumerate() {
            assert!(refusal(list).is_some(), "{i}");
        }
        assert_eq!(
            refusal(|tx| _ =
                tx.hset("a", [("f", "1")]).hincr_by("a", "g", 1).incr_by("n", 1).expire("n", LONGEST)),
            None
        );
    }
}
