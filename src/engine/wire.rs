//! Commands and replies as they go over the wire.
//!
//! Invariant: whatever a server answers, decoding ends in a reply the protocol knows or in an error; never in a
//! panic, and never in a grant the bytes do not spell out.

use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};

use super::Failure;
use crate::error::Error;
use crate::keys::LockKeys;
use crate::protocol::machine::Ring;
use crate::protocol::{Command, EXACT, Inspection, Next, Record, Reply, Terms, TicketId};

/// Appends the keys and arguments of `command` as its script takes them, the number of keys first.
pub(super) fn encode(cmd: &mut Cmd, keys: &LockKeys, terms: &Terms, command: &Command) {
    let (lock, queue, lost, bell) = (&*keys.lock, &*keys.queue, &*keys.lost, &*keys.bell);
    let claim_us = terms.claim_ms.saturating_mul(1000);
    let regroup_us = terms.regroup_ms.saturating_mul(1000);
    match command {
        Command::Acquire { ticket, position, wait, max_queue } => {
            cmd.arg(4).arg(lock).arg(queue).arg(lost).arg(bell).arg(ticket.as_str());
            optional(cmd, *position);
            cmd.arg(claim_us).arg(terms.idle_ms).arg(regroup_us).arg(u8::from(*wait));
            optional(cmd, *max_queue);
        }
        Command::Renew { ticket, fence } => {
            cmd.arg(4).arg(lock).arg(queue).arg(lost).arg(bell);
            cmd.arg(ticket.as_str()).arg(*fence).arg(terms.idle_ms).arg(regroup_us);
        }
        Command::Release { ticket, fence } => {
            cmd.arg(4).arg(lock).arg(queue).arg(lost).arg(bell);
            cmd.arg(ticket.as_str()).arg(*fence).arg(claim_us).arg(terms.idle_ms);
        }
        Command::Abandon { ticket } => {
            cmd.arg(4).arg(lock).arg(queue).arg(lost).arg(bell);
            cmd.arg(ticket.as_str()).arg(claim_us).arg(terms.idle_ms);
        }
        Command::Inspect { limit } => {
            cmd.arg(2).arg(lock).arg(queue).arg(*limit);
        }
        Command::Evict { fence } => {
            cmd.arg(3).arg(lock).arg(queue).arg(lost).arg(*fence).arg(claim_us).arg(terms.idle_ms);
        }
    }
}

/// Appends a number, or an empty argument.
fn optional(cmd: &mut Cmd, number: Option<u64>) {
    match number {
        Some(number) => cmd.arg(number),
        None => cmd.arg(""),
    };
}

/// Reads the answer to `command`.
///
/// # Errors
///
/// [`Error::Protocol`] if it is none that the protocol knows.
pub fn decode(command: &Command, value: &Value) -> Result<Reply, Error> {
    let Value::Array(items) = value else { return Err(unknown(command, value)) };
    let reply = match command {
        Command::Acquire { .. } => acquired(items),
        Command::Renew { .. } => match (int(items, 0), items.len()) {
            (Some(1), 2) => int(items, 1).map(|waiters| Reply::Renewed { waiters }),
            (Some(2), 3) => next(items, 1).map(|next| Reply::Lost { next }),
            _ => None,
        },
        Command::Release { .. } => match (int(items, 0), items.len()) {
            (Some(1), 3) => next(items, 1).map(|next| Reply::Released { next }),
            (Some(2), 3) => next(items, 1).map(|next| Reply::Already { next }),
            (Some(3), 3) => next(items, 1).map(|next| Reply::Lost { next }),
            _ => None,
        },
        Command::Abandon { .. } => match (int(items, 0), items.len()) {
            (Some(1), 3) => next(items, 1).map(|next| Reply::Abandoned { next }),
            _ => None,
        },
        Command::Inspect { .. } => inspected(items),
        Command::Evict { .. } => match (int(items, 0), items.len()) {
            (Some(1), 1) => Some(Reply::Evicted),
            (Some(2), 1) => Some(Reply::Changed),
            _ => None,
        },
    };
    reply.ok_or_else(|| unknown(command, value))
}

/// Reads the answer of `acquire`.
fn acquired(items: &[Value]) -> Option<Reply> {
    match (int(items, 0)?, items.len()) {
        (1, 3) => Some(Reply::Granted { fence: minted(items, 1)?, position: minted(items, 2)? }),
        (2, 8) => Some(Reply::Waiting {
            position: minted(items, 1)?,
            ahead: int(items, 2)?,
            holder_ms: int(items, 3)?,
            newest: int(items, 4)?,
            reentered: match int(items, 5)? {
                0 => false,
                1 => true,
                _ => return None,
            },
            next: next(items, 6)?,
        }),
        (3, 3) => Some(Reply::Busy { next: next(items, 1)? }),
        (4, 3) => Some(Reply::Full { next: next(items, 1)? }),
        _ => None,
    }
}

/// Reads the answer of `inspect`.
fn inspected(items: &[Value]) -> Option<Reply> {
    let record = match text(items, 1)? {
        "" => None,
        record => Some(Record::parse(record)?),
    };
    let mut queue = Vec::new();
    for pair in items.get(3..)?.chunks(2) {
        queue.push((TicketId::parse(text(pair, 0)?)?, text(pair, 1)?.parse().ok()?));
    }
    Some(Reply::Inspected(Inspection { now_us: int(items, 0)?, record, waiting: int(items, 2)?, queue }))
}

/// The whole, exact number at `at`.
pub(super) fn int(items: &[Value], at: usize) -> Option<u64> {
    match items.get(at)? {
        Value::Int(number) => u64::try_from(*number).ok().filter(|number| *number <= EXACT),
        _ => None,
    }
}

/// The fence or position at `at`: never 0.
fn minted(items: &[Value], at: usize) -> Option<u64> {
    int(items, at).filter(|number| *number > 0)
}

/// The text at `at`.
pub(super) fn text(items: &[Value], at: usize) -> Option<&str> {
    match items.get(at)? {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}

/// The grant that is named at `at` and behind, if one is. `None` outside means: not what the protocol says.
#[expect(clippy::option_option, reason = "outer: understood; inner: named")]
fn next(items: &[Value], at: usize) -> Option<Option<Next>> {
    match (text(items, at)?, int(items, at + 1)?) {
        ("", 0) => Some(None),
        (_, 0) => None,
        (ticket, fence) => Some(Some(Next { ticket: TicketId::parse(ticket)?, fence })),
    }
}

/// Reads a ring, `ticket fence`.
#[must_use]
pub fn ring(bytes: &[u8]) -> Option<Ring> {
    let (ticket, fence) = std::str::from_utf8(bytes).ok()?.split_once(' ')?;
    let digits = !fence.is_empty() && fence.bytes().all(|b| b.is_ascii_digit());
    let fence = digits.then(|| fence.parse().ok())??;
    (0 < fence && fence <= EXACT).then(|| TicketId::parse(ticket))?.map(|ticket| Ring { ticket, fence })
}

/// The word for a transition.
fn verb(command: &Command) -> &'static str {
    match command {
        Command::Acquire { .. } => "acquire",
        Command::Renew { .. } => "renew",
        Command::Release { .. } => "release",
        Command::Abandon { .. } => "withdraw",
        Command::Inspect { .. } => "inspect",
        Command::Evict { .. } => "evict",
    }
}

fn unknown(command: &Command, value: &Value) -> Error {
    not_understood(verb(command), value)
}

/// The error for an answer that the protocol does not know.
pub(super) fn not_understood(doing: &str, value: &Value) -> Error {
    let mut shown = format!("{value:?}");
    shown.truncate(shown.floor_char_boundary(200));
    Error::Protocol(format!("the server answered {doing} with {shown}, which the protocol does not know"))
}

/// Judges an error of the server or the connection to it. `sent` says whether the command may have gone out.
pub(super) fn failure(keys: &LockKeys, doing: &str, error: RedisError, sent: bool) -> Failure {
    judge(&keys.name, &[&keys.lock, &keys.queue, &keys.lost], doing, error, sent)
}

/// [`failure`] for whatever `name` is and keys that are `ours`.
pub(super) fn judge(name: &str, ours: &[&str], doing: &str, error: RedisError, sent: bool) -> Failure {
    let text = error.to_string();
    // Scripts name a key of another type; Redis 6.2 wraps every error of a script into ERR, and no version keeps
    // the code of one that is raised as text, so the words decide.
    if let Some((_, rest)) = text.split_once("FOREIGN ") {
        let key = rest.split([' ', ':', ',']).next().unwrap_or(rest);
        let key = ours.iter().find(|ours| rest.starts_with(**ours)).map_or(key, |ours| ours);
        let key = rest.split_whitespace().next().filter(|word| word.starts_with(key)).unwrap_or(key);
        let what = format!("`{key}` holds something this library did not write; nothing was changed");
        return Failure { error: Error::Protocol(what), sent: false, retry: false };
    }
    let context = || format!("{doing} `{name}`").into_boxed_str();
    if says(&error, "OOM") {
        return Failure { error: Error::OutOfMemory { lock: name.into() }, sent: false, retry: false };
    }
    if says(&error, "READONLY") {
        return Failure { error: Error::ReadOnly { context: context() }, sent: false, retry: true };
    }
    let retry = is_transient(&error);
    // An error the server spelled out means that the script did not run, or raised before its first write.
    let sent = sent && error.kind() == ErrorKind::Io;
    Failure { error: Error::Redis { context: context(), source: Box::new(error) }, sent, retry }
}

/// Whether the server answered with the code `word`, by itself or wrapped into another by a script on Redis 6.2.
pub(super) fn says(error: &RedisError, word: &str) -> bool {
    if error.code() == Some(word) {
        return true;
    }
    let text = error.to_string();
    text.contains(&format!("{word} ")) && text.contains("cript")
}

/// [`failure`] for a call that runs `command`.
pub(super) fn call_failure(keys: &LockKeys, command: &Command, error: RedisError, sent: bool) -> Failure {
    failure(keys, verb(command), error, sent)
}

/// Whether a call that failed with `error` can succeed later without anybody mending anything.
pub(crate) fn is_transient(error: &RedisError) -> bool {
    use ServerErrorKind::{Ask, BusyLoading, ClusterDown, MasterDown, Moved, NoScript, ReadOnly, TryAgain};
    match error.kind() {
        ErrorKind::Io => true,
        ErrorKind::Server(kind) => {
            matches!(
                kind,
                Ask | BusyLoading | ClusterDown | MasterDown | Moved | NoScript | ReadOnly | TryAgain
            ) || is_transient_text(error)
        }
        ErrorKind::Extension => {
            matches!(error.code(), Some("BUSY" | "UNBLOCKED" | "NOREPLICAS" | "MISCONF" | "OOM"))
        }
        _ => false,
    }
}

/// Redis 6.2 wraps what a command inside a script says into ERR.
fn is_transient_text(error: &RedisError) -> bool {
    let text = error.to_string();
    ["-LOADING", "-MASTERDOWN", "NOREPLICAS", "MISCONF", "max number of clients"]
        .iter()
        .any(|word| text.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn release() -> Command {
        Command::Release { ticket: TicketId::parse("a.1.100").expect("a ticket"), fence: 1 }
    }

    #[test]
    fn a_reply_the_protocol_does_not_know_is_an_error() {
        let odd = [
            Value::Nil,
            Value::Okay,
            Value::Array(vec![]),
            Value::Array(vec![Value::Int(1)]),
            Value::Array(vec![Value::Int(9), Value::BulkString(vec![]), Value::Int(0)]),
            Value::Array(vec![Value::Int(1), Value::BulkString(b"x".to_vec()), Value::Int(3)]),
            Value::Array(vec![Value::Int(1), Value::BulkString(b"a.1.1".to_vec()), Value::Int(-3)]),
        ];
        for value in odd {
            assert!(matches!(decode(&release(), &value), Err(Error::Protocol(_))), "{value:?}");
        }
    }

    #[test]
    fn a_ring_is_a_ticket_and_a_fence() {
        assert_eq!(ring(b"a.1.100 7").map(|ring| ring.fence), Some(7));
        for noise in
            [&b""[..], b"x", b"a.1.100", b"a.1.100 ", b"a.1.100 -1", b"a.1.100 0", b"a.1.100 +7", b"\xff 1"]
        {
            assert_eq!(ring(noise), None);
        }
    }
}
