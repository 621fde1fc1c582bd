//! Calls at a gate and their replies as they go over the wire.

use redis::{Cmd, RedisError, Value};

use super::{Failure, wire};
use crate::error::Error;
use crate::fence::Fence;
use crate::keys::GateKeys;
use crate::protocol::gate::{Call, Reply};
use crate::protocol::keyspace::{Answer, Bytes, Change, Kind, Life, Write};

/// What is being done, for errors.
const DOING: &str = "write behind the gate of";

/// Appends the keys and arguments of `call` as its script takes them, the number of keys first.
pub(super) fn encode(cmd: &mut Cmd, keys: &GateKeys, call: &Call) {
    let mut all: Vec<&str> = vec![&keys.gate];
    all.extend(keys.lock.as_deref());
    let bound = u8::from(keys.lock.is_some());
    let Call::Apply { fence, remember_ms, writes } = call else {
        cmd.arg(all.len()).arg(all).arg(bound);
        return;
    };
    let mut targets = Vec::with_capacity(writes.len());
    for write in writes {
        let known = all.iter().position(|key| *key == &*write.key);
        targets.push(known.unwrap_or(all.len()) + 1);
        if known.is_none() {
            all.push(&write.key);
        }
    }
    cmd.arg(all.len()).arg(all).arg(bound).arg(*fence);
    match remember_ms {
        Some(ms) => cmd.arg(*ms),
        None => cmd.arg(""),
    };
    for (write, target) in writes.iter().zip(targets) {
        cmd.arg(write.change.command()).arg(target);
        arguments(cmd, &write.change);
    }
}

/// Appends the two words of a write, the number of its arguments, and these.
fn arguments(cmd: &mut Cmd, change: &Change) {
    let list = |cmd: &mut Cmd, items: &[Bytes]| {
        cmd.arg("").arg("").arg(items.len());
        for item in items {
            cmd.arg(&**item);
        }
    };
    let words = |cmd: &mut Cmd, by: i64| {
        let (least, most) = Change::addable(by);
        cmd.arg(least).arg(most);
    };
    match change {
        Change::Set { value, life, present } => {
            let condition = match present {
                None => "",
                Some(false) => "NX",
                Some(true) => "XX",
            };
            cmd.arg(condition).arg("");
            match life {
                Life::Keep => cmd.arg(2).arg(&**value).arg("KEEPTTL"),
                Life::Forever => cmd.arg(1).arg(&**value),
                Life::For(ms) => cmd.arg(3).arg(&**value).arg("PX").arg(*ms),
            };
        }
        Change::Del | Change::Persist => list(cmd, &[]),
        Change::Expire(ms) => {
            cmd.arg("").arg("").arg(1).arg(*ms);
        }
        Change::LTrim(first, last) => {
            cmd.arg("").arg("").arg(2).arg(*first).arg(*last);
        }
        Change::IncrBy(by) => {
            words(cmd, *by);
            cmd.arg(1).arg(*by);
        }
        Change::HIncrBy(field, by) => {
            words(cmd, *by);
            cmd.arg(2).arg(&**field).arg(*by);
        }
        Change::HSet(fields) => {
            cmd.arg("").arg("").arg(fields.len() * 2);
            for (field, value) in fields {
                cmd.arg(&**field).arg(&**value);
            }
        }
        Change::ZAdd(members) => {
            cmd.arg("").arg("").arg(members.len() * 2);
            for (member, score) in members {
                cmd.arg(score.to_string()).arg(&**member);
            }
        }
        Change::HDel(items)
        | Change::LPush(items)
        | Change::RPush(items)
        | Change::SAdd(items)
        | Change::SRem(items)
        | Change::ZRem(items) => list(cmd, items),
    }
}

/// Reads the answer to `call`.
pub(super) fn decode(call: &Call, value: &Value) -> Result<Reply, Error> {
    let items = if let Value::Array(items) = value { &**items } else { &[] };
    let reply = match call {
        Call::Newest => fence(items, 0).filter(|_| items.len() == 1).map(Reply::Newest),
        Call::Apply { writes, .. } => applied(writes, items),
    };
    reply.ok_or_else(|| wire::not_understood("a call at a gate", value))
}

/// Reads the answer of `apply`.
fn applied(writes: &[Write], items: &[Value]) -> Option<Reply> {
    let index = || wire::int(items, 1).and_then(|n| usize::try_from(n).ok()).filter(|n| *n < writes.len());
    match (wire::int(items, 0)?, items.len()) {
        (1, length) if length == writes.len() + 1 => {
            let answers = writes.iter().enumerate().map(|(i, write)| answer(&write.change, items, i + 1));
            Some(Reply::Applied(answers.collect::<Option<_>>()?))
        }
        (2, 2) => Some(Reply::FencedOut(fence(items, 1)?)),
        (3, 3) => Some(Reply::WrongType(index()?, kind(wire::text(items, 2)?))),
        (4, 2) => Some(Reply::NoNumber(index()?)),
        (5, 2) => Some(Reply::NotPermitted(index()?)),
        _ => None,
    }
}

/// The answer at `at` to one write.
fn answer(change: &Change, items: &[Value], at: usize) -> Option<Answer> {
    match change {
        Change::IncrBy(_) | Change::HIncrBy(..) => wire::text(items, at)?.parse().ok().map(Answer::Number),
        Change::Set { .. } | Change::Expire(_) | Change::Persist | Change::LTrim(..) => {
            match wire::int(items, at)? {
                0 => Some(Answer::Skipped),
                _ => Some(Answer::Done),
            }
        }
        _ => wire::int(items, at).map(Answer::Count),
    }
}

/// A fence as text, 0 for none.
fn fence(items: &[Value], at: usize) -> Option<u64> {
    wire::text(items, at)?.parse().ok().filter(|fence| *fence <= Fence::MAX.get())
}

/// The type that Redis has this word for. One that we know nothing of is no type that we could write to either.
fn kind(word: &str) -> Kind {
    let known = [Kind::String, Kind::Hash, Kind::List, Kind::Set, Kind::Sorted];
    known.into_iter().find(|kind| kind.word() == word).unwrap_or(Kind::None)
}

/// Judges an error of the server or the connection to it.
pub(super) fn failure(keys: &GateKeys, error: RedisError, sent: bool) -> Failure {
    let mut ours: Vec<&str> = vec![&keys.gate];
    ours.extend(keys.lock.as_deref());
    wire::judge(&keys.target, &ours, DOING, error, sent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_the_protocol_does_not_know_is_an_error() {
        let write = Write { key: "a".into(), change: Change::Del };
        let call = Call::Apply { fence: 1, remember_ms: None, writes: vec![write] };
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let odd = [
            Value::Nil,
            Value::Array(vec![]),
            Value::Array(vec![Value::Int(1)]),
            Value::Array(vec![Value::Int(2), text("9223372036854775808")]),
            Value::Array(vec![Value::Int(3), Value::Int(1), text("list")]),
            Value::Array(vec![Value::Int(9), Value::Int(0)]),
        ];
        for value in odd {
            assert!(matches!(decode(&call, &value), Err(Error::Protocol(_))), "{value:?}");
        }
        let known = Value::Array(vec![Value::Int(2), text("9223372036854775807")]);
        assert_eq!(decode(&call, &known).ok(), Some(Reply::FencedOut(i64::MAX as u64)));
    }
}
