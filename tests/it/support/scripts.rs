//! The crate's Lua scripts, run by hand: at a time that the test chooses, and with faults that it puts in.

use redis::{Cmd, Connection, ConnectionLike, RedisResult, Value, cmd};
use redis_fifo_lock::protocol::machine::Ring;
use redis_fifo_lock::protocol::{Command, Inspection, Next, Record, Reply, Terms, TicketId};

/// Every file, by its path in `scripts/`.
const FILES: [(&str, &str); 9] = [
    ("lib/record.lua", include_str!("../../../scripts/lib/record.lua")),
    ("lib/grant.lua", include_str!("../../../scripts/lib/grant.lua")),
    ("lib/displace.lua", include_str!("../../../scripts/lib/displace.lua")),
    ("acquire.lua", include_str!("../../../scripts/acquire.lua")),
    ("renew.lua", include_str!("../../../scripts/renew.lua")),
    ("release.lua", include_str!("../../../scripts/release.lua")),
    ("abandon.lua", include_str!("../../../scripts/abandon.lua")),
    ("inspect.lua", include_str!("../../../scripts/inspect.lua")),
    ("evict.lua", include_str!("../../../scripts/evict.lua")),
];

/// Which files make up a script, as the engine joins them; `scripts_are_joined_as_the_engine_joins_them` says so.
const JOINED: [&[&str]; 6] = [
    &["lib/record.lua", "lib/grant.lua", "lib/displace.lua", "acquire.lua"],
    &["lib/record.lua", "renew.lua"],
    &["lib/record.lua", "lib/grant.lua", "release.lua"],
    &["lib/record.lua", "lib/grant.lua", "abandon.lua"],
    &["lib/record.lua", "inspect.lua"],
    &["lib/record.lua", "lib/grant.lua", "lib/displace.lua", "evict.lua"],
];

/// How the scripts read the server's clock; nothing else in them does.
const REAL_CLOCK: &str = "  local time = redis.call('TIME')\n  return time[1] * 1000000 + time[2]\n";

/// How they read the test's: every call carries the time behind its other arguments.
const VIRTUAL_CLOCK: &str = "  return tonumber(ARGV[#ARGV])\n";

/// The lock that all raw calls are about.
pub(crate) const LOCK: &str = "fifo:{x}:lock";
pub(crate) const QUEUE: &str = "fifo:{x}:queue";
pub(crate) const LOST: &str = "fifo:{x}:lost";

/// The key of `client`'s bell.
pub(crate) fn bell(client: &str) -> String {
    format!("fifo:{{x}}:bell:{client}")
}

/// The scripts' text, file by file.
#[derive(Clone)]
pub(crate) struct Sources {
    files: Vec<(&'static str, String)>,
}

impl Sources {
    /// The scripts as they are, but for the clock.
    pub(crate) fn on_virtual_time() -> Sources {
        let files = FILES.map(|(name, text)| (name, text.to_owned())).to_vec();
        let sources = Sources { files }.with("lib/record.lua", REAL_CLOCK, VIRTUAL_CLOCK, 1);
        let real = sources.files.iter().filter(|(_, text)| text.contains("'TIME'"));
        assert_eq!(real.count(), 0, "something else reads the server's clock");
        sources
    }

    /// Replaces `from`, which `file` must hold exactly `times` times.
    #[track_caller]
    pub(crate) fn with(mut self, file: &str, from: &str, to: &str, times: usize) -> Sources {
        let (_, text) = self.files.iter_mut().find(|(name, _)| *name == file).expect("a file in scripts/");
        assert_eq!(text.matches(from).count(), times, "{file} holds this another number of times: {from}");
        *text = text.replace(from, to);
        self
    }

    /// Hands the scripts to a server.
    pub(crate) fn load(&self, connection: &mut Connection) -> Scripts {
        Scripts {
            digests: JOINED.map(|files| {
                let part = |file| &*self.files.iter().find(|(name, _)| name == file).expect("a file").1;
                let source: String = files.iter().map(part).collect();
                cmd("SCRIPT")
                    .arg("LOAD")
                    .arg(source)
                    .query(connection)
                    .expect("a script without syntax errors")
            }),
        }
    }
}

/// Scripts that a server has.
pub(crate) struct Scripts {
    /// In the order of [`JOINED`].
    digests: [String; 6],
}

impl Scripts {
    /// The call that runs `command` at `now_us`, its arguments those that the engine sends and the time.
    pub(crate) fn call(&self, now_us: u64, terms: &Terms, command: &Command) -> Cmd {
        let (claim_us, regroup_us) = (terms.claim_ms * 1000, terms.regroup_ms * 1000);
        let optional = |number: Option<u64>| number.map_or(String::new(), |number| number.to_string());
        let mut call = cmd("EVALSHA");
        let mut begin = |script: usize, client: Option<&str>| {
            call.arg(&self.digests[script]).arg(3 + usize::from(client.is_some()));
            call.arg(LOCK).arg(QUEUE).arg(LOST);
            if let Some(client) = client {
                call.arg(bell(client));
            }
        };
        match command {
            Command::Acquire { ticket, position, wait, max_queue } => {
                begin(0, Some(ticket.client()));
                call.arg(ticket.as_str()).arg(optional(*position)).arg(claim_us).arg(terms.idle_ms);
                call.arg(regroup_us).arg(u8::from(*wait)).arg(optional(*max_queue));
            }
            Command::Renew { ticket, fence } => {
                begin(1, Some(ticket.client()));
                call.arg(ticket.as_str()).arg(*fence).arg(terms.idle_ms).arg(regroup_us);
            }
            Command::Release { ticket, fence } => {
                begin(2, Some(ticket.client()));
                call.arg(ticket.as_str()).arg(*fence).arg(claim_us).arg(terms.idle_ms);
            }
            Command::Abandon { ticket } => {
                begin(3, Some(ticket.client()));
                call.arg(ticket.as_str()).arg(claim_us).arg(terms.idle_ms);
            }
            Command::Inspect { limit } => {
                begin(4, None);
                call.arg(*limit);
            }
            Command::Evict { fence } => {
                begin(5, None);
                call.arg(*fence).arg(claim_us).arg(terms.idle_ms);
            }
        }
        call.arg(now_us);
        call
    }
}

/// Runs commands in one round trip; an error of the server is a value among the others.
pub(crate) fn pipelined(connection: &mut Connection, commands: &[Cmd]) -> RedisResult<Vec<Value>> {
    let packed: Vec<u8> = commands.iter().flat_map(Cmd::get_packed_command).collect();
    connection.req_packed_commands(&packed, 0, commands.len())
}

/// Reads what a script answered to `command`; whatever the protocol does not know is an error that shows it.
pub(crate) fn decode(command: &Command, value: &Value) -> Result<Reply, String> {
    let known = match value {
        Value::Array(items) => decode_items(command, items),
        _ => None,
    };
    known.ok_or_else(|| format!("no reply to {command:?}: {value:?}"))
}

fn decode_items(command: &Command, items: &[Value]) -> Option<Reply> {
    let reply = match (command, items) {
        (Command::Inspect { .. }, [now, record, waiting, queue @ ..]) => {
            let record = match text(record)? {
                "" => None,
                text => Some(Record::parse(text)?),
            };
            let pairs = queue.chunks(2);
            let queue = pairs.map(|pair| match pair {
                [ticket, position] => Some((TicketId::parse(text(ticket)?)?, text(position)?.parse().ok()?)),
                _ => None,
            });
            let queue = queue.collect::<Option<Vec<_>>>()?;
            Reply::Inspected(Inspection { now_us: number(now)?, record, waiting: number(waiting)?, queue })
        }
        (_, [code, rest @ ..]) => match (command, number(code)?, rest) {
            (Command::Acquire { .. }, 1, [fence, position]) => {
                Reply::Granted { fence: number(fence)?, position: number(position)? }
            }
            (
                Command::Acquire { .. },
                2,
                [position, ahead, holder_ms, newest, reentered, next_ticket, next_fence],
            ) => Reply::Waiting {
                position: number(position)?,
                ahead: number(ahead)?,
                holder_ms: number(holder_ms)?,
                newest: number(newest)?,
                reentered: match number(reentered)? {
                    0 => false,
                    1 => true,
                    _ => return None,
                },
                next: next(next_ticket, next_fence)?,
            },
            (Command::Acquire { .. }, 3, [ticket, fence]) => Reply::Busy { next: next(ticket, fence)? },
            (Command::Acquire { .. }, 4, [ticket, fence]) => Reply::Full { next: next(ticket, fence)? },
            (Command::Renew { .. }, 1, [waiters]) => Reply::Renewed { waiters: number(waiters)? },
            (Command::Renew { .. }, 2, [ticket, fence]) => Reply::Lost { next: next(ticket, fence)? },
            (Command::Release { .. }, 1, [ticket, fence]) => Reply::Released { next: next(ticket, fence)? },
            (Command::Release { .. }, 2, [ticket, fence]) => Reply::Already { next: next(ticket, fence)? },
            (Command::Release { .. }, 3, [ticket, fence]) => Reply::Lost { next: next(ticket, fence)? },
            (Command::Abandon { .. }, 1, [ticket, fence]) => Reply::Abandoned { next: next(ticket, fence)? },
            (Command::Evict { .. }, 1, []) => Reply::Evicted,
            (Command::Evict { .. }, 2, []) => Reply::Changed,
            _ => return None,
        },
        _ => return None,
    };
    Some(reply)
}

fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}

/// The text of a bulk string.
pub(crate) fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        _ => None,
    }
}

/// The named grant, if one is. `None` outside means: not what the protocol says.
#[expect(clippy::option_option, reason = "outer: understood; inner: named")]
fn next(ticket: &Value, fence: &Value) -> Option<Option<Next>> {
    match (text(ticket)?, number(fence)?) {
        ("", 0) => Some(None),
        (_, 0) => None,
        (ticket, fence) => Some(Some(Next { ticket: TicketId::parse(ticket)?, fence })),
    }
}

/// A ring as it stands on a bell.
pub(crate) fn spell(ring: &Ring) -> String {
    format!("{} {}", ring.ticket, ring.fence)
}

#[test]
fn scripts_are_joined_as_the_engine_joins_them() {
    let engine = include_str!("../../../src/engine/scripts.rs");
    let joined: Vec<Vec<&str>> = engine
        .split("concat!(")
        .skip(1)
        .map(|script| {
            let parts = script.split("include_str!(\"../../scripts/").skip(1);
            parts.map(|part| part.split('"').next().expect("a path")).collect()
        })
        .collect();
    assert_eq!(joined, JOINED.map(<[&str]>::to_vec));
}
