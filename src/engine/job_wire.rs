//! Calls about a job and their replies as they go over the wire.

use redis::{Cmd, RedisError, Value};

use super::{Failure, wire};
use crate::error::Error;
use crate::keys::LockKeys;
use crate::protocol::job::{Call, Job, Reply, Shown, Stage};

/// Appends the keys and arguments of `call` as its script takes them, the number of keys first.
pub(super) fn encode(cmd: &mut Cmd, keys: &LockKeys, job: &str, call: &Call) {
    cmd.arg(4).arg(&*keys.lock).arg(&*keys.queue).arg(&*keys.lost).arg(job);
    match call {
        Call::Begin { ticket, fence, print, most, keep_ms } => {
            cmd.arg(ticket.as_str()).arg(*fence).arg(&**print);
            match most {
                Some(most) => cmd.arg(*most),
                None => cmd.arg(""),
            };
            cmd.arg(*keep_ms);
        }
        Call::Finish { ticket, fence, attempt, print, stage, memo, keep_ms } => {
            cmd.arg(ticket.as_str()).arg(*fence).arg(*attempt).arg(&**print).arg(stage.word()).arg(*keep_ms);
            if let Some(memo) = memo {
                cmd.arg(&**memo);
            }
        }
        Call::Show | Call::Clear => {}
    }
}

/// Reads the answer to `call`.
pub(super) fn decode(call: &Call, value: &Value) -> Result<Reply, Error> {
    let items = if let Value::Array(items) = value { &**items } else { &[] };
    let reply = match call {
        Call::Begin { .. } => begun(items),
        Call::Finish { .. } => match (wire::int(items, 0), items.len()) {
            (Some(1), 1) => Some(Reply::Recorded),
            (Some(6), 1) => Some(Reply::Lost),
            _ => None,
        },
        Call::Show => shown(items).map(Reply::Shown),
        Call::Clear => match (wire::int(items, 0), items.len()) {
            (Some(0), 1) => Some(Reply::Cleared(false)),
            (Some(1), 1) => Some(Reply::Cleared(true)),
            (Some(2), 1) => Some(Reply::Busy),
            _ => None,
        },
    };
    reply.ok_or_else(|| wire::not_understood(verb(call), value))
}

/// Reads the answer of `begin`.
fn begun(items: &[Value]) -> Option<Reply> {
    match (wire::int(items, 0)?, items.len()) {
        (1, 3) => Some(Reply::Begun { attempt: wire::int(items, 1)?, reclaimed: flag(items, 2)? }),
        (2, 1 | 2) => Some(Reply::Done(memo(items, 1)?)),
        (3, 1 | 2) => Some(Reply::Failed(memo(items, 1)?)),
        (4, 2) => Some(Reply::Exhausted(wire::int(items, 1)?)),
        (5, 1) => Some(Reply::OtherPayload),
        (6, 1) => Some(Reply::Lost),
        _ => None,
    }
}

/// Reads the answer of `show`.
fn shown(items: &[Value]) -> Option<Shown> {
    let holder = wire::text(items, 2)?;
    let holder = (!holder.is_empty()).then(|| holder.into());
    let stage = match (wire::int(items, 0)?, items.len()) {
        (0, 3) => return Some(Shown { job: None, live: false, age_ms: 0, holder }),
        (1, 9 | 10) => Stage::Pending,
        (2, 9 | 10) => Stage::Retry,
        (3, 9 | 10) => Stage::Done,
        (4, 9 | 10) => Stage::Failed,
        _ => return None,
    };
    let job = Job {
        stage,
        attempt: wire::int(items, 3)?,
        fence: wire::int(items, 4)?,
        owner: wire::text(items, 5)?.into(),
        begun_us: 0,
        print: wire::text(items, 7)?.into(),
        reclaimed: flag(items, 8)?,
        memo: memo(items, 9)?,
        expires: u64::MAX,
    };
    Some(Shown { job: Some(job), live: flag(items, 1)?, age_ms: wire::int(items, 6)?, holder })
}

/// The memo at `at`, where a reply may end before it. `None` outside means: not what the protocol says.
#[expect(clippy::option_option, reason = "outer: understood; inner: there is one")]
fn memo(items: &[Value], at: usize) -> Option<Option<Box<str>>> {
    if items.len() == at { Some(None) } else { wire::text(items, at).map(|memo| Some(memo.into())) }
}

/// A yes or no at `at`.
fn flag(items: &[Value], at: usize) -> Option<bool> {
    match wire::int(items, at)? {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}

/// What is being done with the job.
fn verb(call: &Call) -> &'static str {
    match call {
        Call::Begin { .. } => "begin a job under",
        Call::Finish { .. } => "end a job under",
        Call::Show => "look at a job under",
        Call::Clear => "clear a job under",
    }
}

/// Judges an error of the server or the connection to it.
pub(super) fn failure(keys: &LockKeys, job: &str, call: &Call, error: RedisError, sent: bool) -> Failure {
    wire::judge(&keys.name, &[job, &keys.lock], verb(call), error, sent)
}
