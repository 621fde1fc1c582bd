//! A value of somebody else's on one of the lock's keys is named in an error, and nothing is changed: no script has
//! written anything when it finds out.
//!
//! Every call is made in every situation below. Which keys it touches there, scripts tell that note each key before
//! they use it. Each of those keys then gets a foreign value, and the call has to fail; a foreign value on any other
//! key has to make no difference.

use std::collections::{BTreeMap, BTreeSet};

use redis::{Cmd, Connection, Value, cmd};
use redis_fifo_lock::protocol::{Command, State, Terms, TicketId, apply};

use crate::support::scripts::{LOCK, LOST, QUEUE, Scripts, Sources, bell, pipelined, text};
use crate::support::server::{Server, connect};

const TERMS: Terms = Terms { claim_ms: 1_000, idle_ms: 86_400_000, regroup_ms: 3_000 };

/// Server time at the beginning of every situation, microseconds.
const START: u64 = 1_796_000_000_000_007;

/// One thing that happens. Tickets are spelled in full.
#[derive(Clone, Copy, Debug)]
enum Act {
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

const A: &str = "a.1.60000";
const B: &str = "b.1.60000";
const B2: &str = "b.2.60000";
/// Never queued before.
const B3: &str = "b.3.60000";
const C: &str = "c.1.60000";
const D: &str = "d.1.60000";

const CLIENTS: [&str; 4] = ["a", "b", "c", "d"];

/// Each is played from empty keys on.
const SITUATIONS: [(&str, &[Act]); 15] = [
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

/// What is foreign to every key, the last because the string is no record.
const FOREIGN: [&[&str]; 3] =
    [&["HSET", "field", "value"], &["SADD", "member"], &["SET", "no record of ours"]];

/// Records that are none: strings that are foreign to the lock's key only.
const NO_RECORDS: [&str; 7] = [
    "",
    "a.1.60000",
    "- 7 0 - 9 1 -",
    "- 7 0 soon 9 1 - 0",
    "nobody 7 0 - 9 1 - 0",
    "- 9007199254740992 0 - 9 1 - 0",
    "- 7 9007199254740992 - 9 1 - 0",
];

/// Keys that a script touches somewhere in the situations, and must: else the situations prove nothing.
const TOUCHED: [(&str, &[&str]); 6] = [
    ("abandon", &["another's bell", "own bell", "lock", "queue"]),
    ("acquire", &["another's bell", "own bell", "lock", "lost", "queue"]),
    ("evict", &["another's bell", "lock", "lost", "queue"]),
    ("inspect", &["lock", "queue"]),
    ("release", &["another's bell", "own bell", "lock", "lost", "queue"]),
    ("renew", &["own bell", "lock", "queue"]),
];

/// Makes scripts note every key that they use.
const NOTING: &str = "
local real = redis
local function noted(use)
  return function(command, key, ...)
    real.call('SADD', 'touched', key)
    return use(command, key, ...)
  end
end
local redis = {call = noted(real.call), pcall = noted(real.pcall)}
";

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
struct Played {
    situation: Vec<(u64, Command)>,
    now: u64,
    call: Command,
}

impl Played {
    fn new(situation: &[Act], call: Act) -> Played {
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
        Played { situation: commands, now, call }
    }

    /// From empty keys to the call's answer, which is the last but one; what happens before the call stands before
    /// a dump, and a dump is the last.
    fn commands(&self, scripts: &Scripts, calling: &Scripts, spoil: Option<Cmd>, dump: &Cmd) -> Vec<Cmd> {
        let mut commands = vec![cmd("FLUSHDB")];
        commands.extend(self.situation.iter().map(|(now, command)| scripts.call(*now, &TERMS, command)));
        commands.extend(spoil);
        commands.push(dump.clone());
        commands.push(calling.call(self.now, &TERMS, &self.call));
        commands.push(dump.clone());
        commands
    }

    fn script(&self) -> &'static str {
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
    fn part(&self, key: &str) -> &'static str {
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

/// The commands that put a foreign value on `key`.
fn spoil(key: &str, value: &[&str]) -> Cmd {
    // One command, so that the places in a pipeline stay countable.
    let mut eval = cmd("EVAL");
    eval.arg("redis.call('DEL', KEYS[1]) return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))")
        .arg(1)
        .arg(key)
        .arg(value);
    eval
}

/// The last answers of a pipeline: the dump before the call, its reply or the text of an error, the dump after it.
fn last_three(answers: &[Value]) -> (&Value, Result<&Value, String>, &Value) {
    match answers {
        [.., before, Value::ServerError(error), after] => {
            (before, Err(error.details().unwrap_or_default().to_owned()), after)
        }
        [.., before, reply, after] => (before, Ok(reply), after),
        _ => panic!("too few answers: {answers:?}"),
    }
}

/// The command that shows the whole keyspace.
fn dumping(connection: &mut Connection) -> Cmd {
    let digest: String = cmd("SCRIPT").arg("LOAD").arg(DUMP).query(connection).expect("a script");
    cmd("EVALSHA").arg(digest).arg(0).to_owned()
}

fn every_call() -> impl Iterator<Item = Act> {
    let tickets = [A, B, B2, B3, C, D];
    let calls = CALLS.into_iter().flat_map(move |call| tickets.map(call));
    calls.chain([Evict, Inspect])
}

#[test]
fn a_foreign_value_is_named_and_nothing_is_changed() {
    let server = Server::start();
    let mut connection = connect(&server.unix_url()).expect("a connection to the test's server");
    let scripts = Sources::on_virtual_time().load(&mut connection);
    let start = "-- The record of the lock, and the keys it stands on.";
    let noting = Sources::on_virtual_time().with("lib/record.lua", start, &format!("{NOTING}{start}"), 1);
    let noting = noting.load(&mut connection);
    let dump = dumping(&mut connection);
    let keys: Vec<String> =
        [LOCK, QUEUE, LOST].map(str::to_owned).into_iter().chain(CLIENTS.map(bell)).collect();
    let mut touched_by: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut wrong = Vec::new();
    let mut runs = 0;
    for (name, situation) in SITUATIONS {
        for act in every_call() {
            let played = Played::new(situation, act);
            let mut noted = played.commands(&scripts, &noting, None, &dump);
            noted.push(cmd("SMEMBERS").arg("touched").to_owned());
            let values = pipelined(&mut connection, &noted).expect("answers from the test's server");
            let touched = match values.last() {
                Some(Value::Array(touched)) => touched.iter().filter_map(text).map(str::to_owned).collect(),
                _ => BTreeSet::new(),
            };
            let usual = values[values.len() - 3].clone();
            let parts = touched.iter().map(|key| played.part(key));
            touched_by.entry(played.script()).or_default().extend(parts);

            for key in &keys {
                let uses = touched.contains(key);
                // What is not looked at can be anything.
                for value in &FOREIGN[..if uses { FOREIGN.len() } else { 1 }] {
                    let commands = played.commands(&scripts, &scripts, Some(spoil(key, value)), &dump);
                    let answers =
                        pipelined(&mut connection, &commands).expect("answers from the test's server");
                    runs += 1;
                    let (before, says, after) = last_three(&answers);
                    let fits = match &says {
                        Err(error) => uses && error.contains(&format!("FOREIGN {key}")) && before == after,
                        Ok(reply) => !uses && **reply == usual,
                    };
                    if !fits {
                        let changed = if before == after { "nothing" } else { "something" };
                        wrong.push(format!(
                            "{name}: {act:?} with {value:?} on {key}: {says:?}, {changed} changed"
                        ));
                    }
                }
            }
        }
    }
    println!("{runs} runs");
    assert!(wrong.is_empty(), "{} of {runs}:\n{}", wrong.len(), wrong.join("\n"));
    let all: Vec<(&str, Vec<&str>)> =
        touched_by.into_iter().map(|(script, parts)| (script, parts.into_iter().collect())).collect();
    let expected = TOUCHED.map(|(script, parts)| {
        let mut parts = parts.to_vec();
        parts.sort_unstable();
        (script, parts)
    });
    assert_eq!(all, expected);
}

#[test]
fn a_string_that_is_no_record_is_named_and_nothing_is_changed() {
    let server = Server::start();
    let mut connection = connect(&server.unix_url()).expect("a connection to the test's server");
    let scripts = Sources::on_virtual_time().load(&mut connection);
    let dump = dumping(&mut connection);
    for act in every_call() {
        let played = Played::new(&[Wait(A), Wait(B)], act);
        for text in NO_RECORDS {
            let commands = played.commands(&scripts, &scripts, Some(spoil(LOCK, &["SET", text])), &dump);
            let answers = pipelined(&mut connection, &commands).expect("answers from the test's server");
            let (before, says, after) = last_three(&answers);
            let error = says.expect_err(text);
            assert!(error.contains(&format!("FOREIGN {LOCK}")), "{act:?} with {text:?}: {error}");
            assert_eq!(before, after, "{act:?} with {text:?}");
        }
    }
}

#[test]
fn a_member_of_the_queue_that_is_no_ticket_is_never_granted_and_nothing_is_changed() {
    let server = Server::start();
    let mut connection = connect(&server.unix_url()).expect("a connection to the test's server");
    let scripts = Sources::on_virtual_time().load(&mut connection);
    let dump = dumping(&mut connection);
    let mut refused = BTreeSet::new();
    for (name, situation) in SITUATIONS {
        for act in every_call() {
            let played = Played::new(situation, act);
            // Before all others: it is the next to be granted.
            let stranger = cmd("ZADD").arg(QUEUE).arg(1).arg("no ticket").to_owned();
            let commands = played.commands(&scripts, &scripts, Some(stranger), &dump);
            let answers = pipelined(&mut connection, &commands).expect("answers from the test's server");
            let (before, says, after) = last_three(&answers);
            match says {
                Ok(_) => assert!(!format!("{after:?}").contains("no ticket 1"), "{name}: {act:?}: {after:?}"),
                Err(error) => {
                    assert!(error.contains(&format!("FOREIGN {QUEUE}")), "{name}: {act:?}: {error}");
                    assert_eq!(before, after, "{name}: {act:?}");
                    refused.insert(played.script());
                }
            }
        }
    }
    let grants = BTreeSet::from(["abandon", "acquire", "evict", "release"]);
    assert_eq!(refused, grants, "whatever grants finds out");
}
