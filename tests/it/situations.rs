//! Every call in every situation: the table behind the tests on foreign values and on a full server.

use redis::{Cmd, Connection, Value, cmd};
use redis_fifo_lock::protocol::{Command, State, Terms, TicketId, apply};

use crate::support::scripts::{LOCK, LOST, QUEUE, Scripts, bell};

const TERMS: Terms = Terms { claim_ms: 1_000, idle_ms: 86_400_000, regroup_ms: 3_000 };

/// Server time at the beginning of every situation, microseconds.
const START: u64 = 1_796_000_000_000_007;

/// One thing that happens. Tickets are spelled in full.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Act {
    Wait(&'static str),
    Try(&'static str),
    /// Waits with the position that the ticket was given so many microseconds before [`START`].
    Back(&'static str, u64),
    /// Tries with such a position, as no client does.
    TryBack(&'static str, u64),
    /// With the record's fence; so all below that need one.
    Renew(&'static str),
    Release(&'static str),
    /// With a fence that is older.
    LateRenew(&'static str),
    LateRelease(&'static str),
    Abandon(&'static str),
    Evict,
    Inspect,
    /// Milliseconds.
    Pass(i64),
}

use Act::{Abandon, Back, Evict, Inspect, LateRelease, LateRenew, Pass, Release, Renew, Try, TryBack, Wait};

pub(crate) const A: &str = "a.1.60000";
pub(crate) const B: &str = "b.1.60000";
const B2: &str = "b.2.60000";
/// Never queued before.
const B3: &str = "b.3.60000";
const C: &str = "c.1.60000";
const D: &str = "d.1.60000";

pub(crate) const CLIENTS: [&str; 4] = ["a", "b", "c", "d"];

/// Each is played from empty keys on.
pub(crate) const SITUATIONS: [(&str, &[Act]); 15] = [
    ("nobody was ever here", &[]),
    ("idle", &[Wait(A), Release(A)]),
    ("held", &[Wait(A)]),
    ("held and queued for", &[Wait(A), Wait(B), Wait(C)]),
    ("lapsed", &[Wait(A), Pass(60_000)]),
    ("lapsed and queued for", &[Wait(A), Wait(B), Wait(C), Pass(60_000)]),
    ("rung", &[Wait(A), Wait(B), Wait(B2), Wait(C), Release(A)]),
    ("rung and not picked up", &[Wait(A), Wait(B), Wait(B2), Wait(C), Release(A), Pass(1_000)]),
    ("rung, lapsed", &[Wait(A), Wait(B), Wait(B2), Wait(C), Release(A), Pass(60_000)]),
    ("a suspect is gone", &[Wait(A), Wait(B), Wait(C), Wait(D), Release(A), Pass(1_000), Wait(C)]),
    (
        "a suspect is at the head",
        &[Wait(A), Wait(B), Wait(C), Wait(B2), Wait(D), Release(A), Pass(1_000), Wait(D), Wait(C)],
    ),
    (
        "a suspect is at the head, lapsed",
        &[
            Wait(A),
            Wait(B),
            Wait(C),
            Wait(B2),
            Wait(D),
            Release(A),
            Pass(1_000),
            Wait(D),
            Wait(C),
            Pass(60_000),
        ],
    ),
    ("regrouping", &[Back(B, 9), Back(C, 8)]),
    ("regrouped", &[Back(B, 9), Back(C, 8), Pass(3_000)]),
    ("regrouping without anybody, and the clock went back", &[TryBack(A, 9), Pass(-100_000)]),
];

/// What every ticket does in every situation.
const CALLS: [fn(&'static str) -> Act; 8] =
    [Wait, Try, |ticket| Back(ticket, 5), Renew, Release, LateRenew, LateRelease, Abandon];

/// Shows the whole keyspace: each key with its type, whether it expires, and what it holds.
const DUMP: &str = "
local keys = redis.call('KEYS', '*')
table.sort(keys)
local shown = {}
local reading = {list = {'LRANGE', 0, -1}, zset = {'ZRANGE', 0, -1, 'WITHSCORES'}, hash = {'HGETALL'},
  set = {'SMEMBERS'}, string = {'GET'}}
for i, key in ipairs(keys) do
  local kind = redis.call('TYPE', key).ok
  local command = reading[kind]
  local held = redis.call(command[1], key, unpack(command, 2))
  shown[i] = {key, kind, redis.call('PTTL', key) >= 0 and 'expires' or 'stays', held}
end
return shown";

fn id(ticket: &str) -> TicketId {
    TicketId::parse(ticket).expect("a ticket")
}

/// The command for an act, by the machine's state.
fn command(act: Act, state: &State) -> Option<Command> {
    let fence = state.record.as_ref().map_or(START, |record| record.fence);
    let acquire =
        |ticket, position, wait| Command::Acquire { ticket: id(ticket), position, wait, max_queue: None };
    Some(match act {
        Wait(ticket) => acquire(ticket, None, true),
        Try(ticket) => acquire(ticket, None, false),
        Back(ticket, ago) => acquire(ticket, Some(START - ago), true),
        TryBack(ticket, ago) => acquire(ticket, Some(START - ago), false),
        Renew(ticket) => Command::Renew { ticket: id(ticket), fence },
        Release(ticket) => Command::Release { ticket: id(ticket), fence },
        LateRenew(ticket) => Command::Renew { ticket: id(ticket), fence: fence.saturating_sub(1).max(1) },
        LateRelease(ticket) => Command::Release { ticket: id(ticket), fence: fence.saturating_sub(1).max(1) },
        Abandon(ticket) => Command::Abandon { ticket: id(ticket) },
        Evict => Command::Evict { fence },
        Inspect => Command::Inspect { limit: 9 },
        Pass(_) => return None,
    })
}

/// A situation as commands for the server, and a call in it.
pub(crate) struct Played {
    /// The machine's state before the call.
    pub(crate) state: State,
    situation: Vec<(u64, Command)>,
    now: u64,
    pub(crate) call: Command,
}

impl Played {
    pub(crate) fn new(situation: &[Act], call: Act) -> Played {
        let mut state = State::default();
        let mut now = START;
        let mut commands = Vec::new();
        for act in situation {
            match command(*act, &state) {
                Some(command) => {
                    apply(&mut state, now, &TERMS, &command);
                    commands.push((now, command));
                }
                None => {
                    let Pass(ms) = act else { unreachable!("all else is a command") };
                    now = now.saturating_add_signed(ms * 1000);
                }
            }
        }
        let call = command(call, &state).expect("a call");
        Played { state, situation: commands, now, call }
    }

    /// From empty keys on: the situation, `prepared`, a dump, the call by the scripts `calling`, and another dump.
    pub(crate) fn commands(
        &self,
        scripts: &Scripts,
        calling: &Scripts,
        prepared: Option<Cmd>,
        dump: &Cmd,
    ) -> Vec<Cmd> {
        let mut commands = vec![cmd("FLUSHDB")];
        commands.extend(self.situation.iter().map(|(now, command)| scripts.call(*now, &TERMS, command)));
        commands.extend(prepared);
        commands.push(dump.clone());
        commands.push(calling.call(self.now, &TERMS, &self.call));
        commands.push(dump.clone());
        commands
    }

    pub(crate) fn script(&self) -> &'static str {
        match self.call {
            Command::Acquire { .. } => "acquire",
            Command::Renew { .. } => "renew",
            Command::Release { .. } => "release",
            Command::Abandon { .. } => "abandon",
            Command::Inspect { .. } => "inspect",
            Command::Evict { .. } => "evict",
        }
    }

    /// What `key` is to the caller.
    pub(crate) fn part(&self, key: &str) -> &'static str {
        let own = match &self.call {
            Command::Acquire { ticket, .. }
            | Command::Renew { ticket, .. }
            | Command::Release { ticket, .. }
            | Command::Abandon { ticket } => bell(ticket.client()),
            Command::Inspect { .. } | Command::Evict { .. } => String::new(),
        };
        match key {
            LOCK => "lock",
            QUEUE => "queue",
            LOST => "lost",
            key if key == own => "own bell",
            _ => "another's bell",
        }
    }
}

/// The last answers of a pipeline: the dump before the call, its reply or the text of an error, the dump after it.
pub(crate) fn last_three(answers: &[Value]) -> (&Value, Result<&Value, String>, &Value) {
    match answers {
        [.., before, Value::ServerError(error), after] => {
            (before, Err(error.details().unwrap_or_default().to_owned()), after)
        }
        [.., before, reply, after] => (before, Ok(reply), after),
        _ => panic!("too few answers: {answers:?}"),
    }
}

/// The command that shows the whole keyspace.
pub(crate) fn dumping(connection: &mut Connection) -> Cmd {
    let digest: String = cmd("SCRIPT").arg("LOAD").arg(DUMP).query(connection).expect("a script");
    cmd("EVALSHA").arg(digest).arg(0).to_owned()
}

pub(crate) fn every_call() -> impl Iterator<Item = Act> {
    let tickets = [A, B, B2, B3, C, D];
    let calls = CALLS.into_iter().flat_map(move |call| tickets.map(call));
    calls.chain([Evict, Inspect])
}
