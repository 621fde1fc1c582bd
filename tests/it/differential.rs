//! The Lua scripts and the Rust machine are one protocol: the same commands at the same times give the same
//! replies, and the same keys after every single one of them.
//!
//! Time is virtual on both sides. What the machine says has expired is deleted on the server; what still lives there
//! gets, before every command, the life that is left to it by virtual time, and [`SPARE`] on top. So nothing expires
//! by the real clock, and the expiry found afterwards tells exactly whether the command set it, and to what.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fmt::Write as _;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestError, TestRunner};
use redis::{Cmd, Connection, Value, cmd};
use redis_fifo_lock::protocol::machine::{Bell, DROPPED_AT_ONCE, LOST_KEPT, Ring};
use redis_fifo_lock::protocol::{ClientId, Command, Next, Reply, State, Terms, TicketId, apply};

use crate::mutants;
use crate::support::scripts::{LOCK, LOST, QUEUE, Scripts, Sources, bell, decode, pipelined, spell, text};
use crate::support::server::{Server, connect};

/// Sequences of one test; there are four. `FIFO_SEQUENCES` is another number.
const SEQUENCES: u32 = 500;

/// Commands of a sequence.
const COMMANDS: usize = 50;

/// Milliseconds that a key on the server lives longer than by virtual time. Longer than any life a script gives.
const SPARE: u64 = 1_000_000_000_000;

/// Milliseconds that may pass between a command and the look at what it did. Shorter than half of any difference
/// between two lives a script gives, and than any of them.
const TOLERANCE: u64 = 40_000;

/// The leases of tickets, milliseconds.
const LEASES: [u64; 4] = [100_000, 200_000, 300_000, 400_000];

/// How long idle locks are remembered, milliseconds.
const IDLES: [u64; 2] = [1_000_000, 2_000_000];

/// Claim windows, milliseconds; the last is longer than the shortest lease.
const CLAIMS: [u64; 3] = [1_000, 5_000, 150_000];

/// Times to regroup, milliseconds.
const REGROUPS: [u64; 2] = [3_000, 20_000];

/// Two that are alike but for what a careless pattern would overlook, and one that needs quoting in patterns.
const CLIENTS: [&str; 3] = ["a", "a-1", "b_a"];

/// Shows all that the lock's keys hold: how many keys there are, and for each its type, expiry and contents.
const SNAPSHOT: &str = "
local shown = {redis.call('DBSIZE')}
for i, key in ipairs(KEYS) do
  local kind, contents = redis.call('TYPE', key).ok, {}
  if kind == 'string' then
    contents = {redis.call('GET', key)}
  elseif kind == 'list' then
    contents = redis.call('LRANGE', key, 0, -1)
  elseif kind == 'zset' then
    contents = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
    for j = 2, #contents, 2 do contents[j] = string.format('%.17g', tonumber(contents[j])) end
  end
  shown[i + 1] = {redis.call('PTTL', key), unpack(contents)}
end
return shown";

/// One thing that happens to the lock at one time.
#[derive(Clone, Debug)]
enum Op {
    /// A client calls.
    Call(Terms, Command),
    /// A client takes a ring off its bell.
    Pop(Box<str>),
    /// Somebody else writes to a bell, on top of it.
    Forge(Ring),
    /// Data is lost.
    Lose(Loss),
}

/// What is lost.
#[derive(Clone, Debug)]
enum Loss {
    All,
    Record,
    Queue,
    Lost,
    Bell(Box<str>),
}

/// What an operation gives back.
#[derive(Clone, Debug, PartialEq)]
enum Outcome {
    Reply(Reply),
    Popped(Option<String>),
    Nothing,
}

impl Op {
    /// Does it to the machine.
    fn apply(&self, state: &mut State, now: u64) -> Outcome {
        state.expire(now);
        match self {
            Op::Call(terms, command) => return Outcome::Reply(apply(state, now, terms, command)),
            Op::Pop(client) => {
                return Outcome::Popped(state.pop_bell(client, now).as_ref().map(spell));
            }
            Op::Forge(ring) => {
                let new = || Bell { expires: u64::MAX, ..Bell::default() };
                let bell = state.bells.entry(ring.ticket.client().into()).or_insert_with(new);
                bell.rings.push_front(ring.clone());
            }
            Op::Lose(Loss::All) => *state = State::default(),
            Op::Lose(Loss::Record) => (state.record, state.record_expires) = (None, None),
            Op::Lose(Loss::Queue) => state.queue.clear(),
            Op::Lose(Loss::Lost) => state.lost.clear(),
            Op::Lose(Loss::Bell(client)) => {
                state.bells.remove(client);
            }
        }
        Outcome::Nothing
    }

    /// The command that does it to the server.
    fn command(&self, scripts: &Scripts, now: u64) -> Cmd {
        let with = |name: &str, key: &str| cmd(name).arg(key).to_owned();
        match self {
            Op::Call(terms, command) => scripts.call(now, terms, command),
            Op::Pop(client) => with("LPOP", &bell(client)),
            Op::Forge(ring) => with("LPUSH", &bell(ring.ticket.client())).arg(spell(ring)).to_owned(),
            Op::Lose(Loss::All) => cmd("FLUSHDB"),
            Op::Lose(Loss::Record) => with("DEL", LOCK),
            Op::Lose(Loss::Queue) => with("DEL", QUEUE),
            Op::Lose(Loss::Lost) => with("DEL", LOST),
            Op::Lose(Loss::Bell(client)) => with("DEL", &bell(client)),
        }
    }

    /// Reads what the server answered.
    fn outcome(&self, value: &Value) -> Result<Outcome, String> {
        match (self, value) {
            (_, Value::ServerError(error)) => Err(format!("{error:?}")),
            (Op::Call(_, command), value) => decode(command, value).map(Outcome::Reply),
            (Op::Pop(_), Value::Nil) => Ok(Outcome::Popped(None)),
            (Op::Pop(_), value) => text(value)
                .map(|ring| Outcome::Popped(Some(ring.to_owned())))
                .ok_or_else(|| format!("{value:?}")),
            _ => Ok(Outcome::Nothing),
        }
    }
}

/// What the lock's keys hold, key by key; absent ones are left out.
type Contents = BTreeMap<String, Vec<String>>;

/// The contents that the machine's state stands for.
fn contents(state: &State) -> Contents {
    let mut contents = Contents::new();
    if let Some(record) = &state.record {
        contents.insert(LOCK.to_owned(), vec![record.to_string()]);
    }
    let queue = state.queue.iter().flat_map(|(position, ticket)| [ticket.to_string(), position.to_string()]);
    contents.insert(QUEUE.to_owned(), queue.collect());
    let lost = state.lost.iter().flat_map(|fence| [fence.to_string(), fence.to_string()]);
    contents.insert(LOST.to_owned(), lost.collect());
    for (client, rung) in &state.bells {
        contents.insert(bell(client), rung.rings.iter().map(spell).collect());
    }
    contents.retain(|_, held| !held.is_empty());
    contents
}

/// When the keys of the state expire, those that do.
fn deadlines(state: &State) -> BTreeMap<String, u64> {
    let bells = state.bells.iter().map(|(client, rung)| (bell(client), rung.expires));
    let mut deadlines: BTreeMap<_, _> = bells.filter(|(_, at)| *at != u64::MAX).collect();
    if let (Some(at), true) = (state.record_expires, state.record.is_some()) {
        deadlines.insert(LOCK.to_owned(), at);
    }
    if !state.lost.is_empty() {
        deadlines.insert(LOST.to_owned(), state.lost_expires);
    }
    deadlines
}

/// Milliseconds from `now` to `at`, rounded up.
fn left(at: u64, now: u64) -> u64 {
    (at - now).div_ceil(1000)
}

/// Runs operations on both sides.
struct Both<'a> {
    connection: &'a mut Connection,
    scripts: &'a Scripts,
    /// The digest of [`SNAPSHOT`].
    snapshot: &'a str,
}

/// What the machine says about one operation.
struct Expected {
    outcome: Outcome,
    /// What the keys hold then, if somebody looks, and for each key with an expiry the lives that it may have, in
    /// milliseconds.
    keys: Option<(Contents, BTreeMap<String, Vec<u64>>)>,
}

impl Both<'_> {
    /// Runs `ops`, each at its time, and gives the first difference. Replies are compared after each, states after
    /// every `every`th and the last.
    fn compare(&mut self, ops: &[(u64, Op)], every: usize, seen: &mut Seen) -> Result<(), String> {
        let clients = ops.iter().filter_map(|(_, op)| match op {
            Op::Call(_, Command::Acquire { ticket, .. }) => Some(ticket.client()),
            _ => None,
        });
        let clients: BTreeSet<&str> = clients.chain(CLIENTS).collect();
        let keys: Vec<String> = [LOCK, QUEUE, LOST]
            .map(str::to_owned)
            .into_iter()
            .chain(clients.iter().map(|c| bell(c)))
            .collect();
        let mut snapshot = cmd("EVALSHA");
        snapshot.arg(self.snapshot).arg(keys.len()).arg(&keys);

        let mut state = State::default();
        let mut commands = vec![cmd("FLUSHDB")];
        // Where in `commands` each operation stands; the look at its effect follows.
        let mut places = Vec::new();
        let mut expected = Vec::new();
        for (i, (now, op)) in ops.iter().enumerate() {
            let old = state.clone();
            state.expire(*now);
            let kept = deadlines(&state);
            for key in deadlines(&old).into_keys().filter(|key| !kept.contains_key(key)) {
                commands.push(cmd("DEL").arg(key).to_owned());
            }
            for (key, at) in &kept {
                commands.push(cmd("PEXPIRE").arg(key).arg(left(*at, *now) + SPARE).to_owned());
            }
            places.push(commands.len());
            commands.push(op.command(self.scripts, *now));
            let looks = i % every == 0 || i + 1 == ops.len();
            if looks {
                commands.push(snapshot.clone());
            }
            let before = state.clone();
            let outcome = op.apply(&mut state, *now);
            seen.note(&old, &before, &state, &outcome);
            let lives = deadlines(&state).into_iter().map(|(key, at)| {
                let life = left(at, *now);
                let kept = (kept.get(&key) == Some(&at)).then_some(life + SPARE);
                (key, [life].into_iter().chain(kept).collect())
            });
            let keys = looks.then(|| (contents(&state), lives.collect()));
            expected.push(Expected { outcome, keys });
        }

        let values = pipelined(self.connection, &commands).expect("answers from the test's server");
        for (i, (place, expected)) in places.iter().zip(&expected).enumerate() {
            let outcome = check_outcome(&ops[i].1, &expected.outcome, &values[*place]);
            let keys = expected
                .keys
                .as_ref()
                .map_or(Ok(()), |(contents, lives)| check_keys(&keys, contents, lives, &values[place + 1]));
            if let Err(difference) = outcome.and(keys) {
                return Err(format!("{}\n{difference}", told(&ops[i.saturating_sub(COMMANDS)..=i])));
            }
        }
        Ok(())
    }
}

/// Compares what the server answered with what the machine says.
fn check_outcome(op: &Op, machine: &Outcome, reply: &Value) -> Result<(), String> {
    match op.outcome(reply) {
        Ok(scripts) if scripts == *machine => Ok(()),
        scripts => Err(format!("scripts: {scripts:?}\nmachine: {machine:?}")),
    }
}

/// Compares what the server's keys hold, and for how long, with what the machine says.
fn check_keys(
    keys: &[String],
    machine: &Contents,
    lives: &BTreeMap<String, Vec<u64>>,
    shown: &Value,
) -> Result<(), String> {
    let odd = || format!("no snapshot: {shown:?}");
    let Value::Array(shown) = shown else { return Err(odd()) };
    let (Value::Int(count), shown) = (&shown[0], &shown[1..]) else { return Err(odd()) };
    let mut contents = Contents::new();
    for (key, shown) in keys.iter().zip(shown) {
        let Value::Array(shown) = shown else { return Err(odd()) };
        let Value::Int(life) = shown[0] else { return Err(odd()) };
        // Minus 2 is no key, minus 1 is no expiry.
        if life == -2 {
            continue;
        }
        contents.insert(
            key.clone(),
            shown[1..].iter().map(|item| text(item).unwrap_or("?").to_owned()).collect(),
        );
        let fits = match (lives.get(key), u64::try_from(life)) {
            (None, _) => life == -1,
            (Some(_), Err(_)) => false,
            (Some(lives), Ok(life)) => lives.iter().any(|by| life <= *by && by - life < TOLERANCE),
        };
        if !fits && machine.contains_key(key) {
            return Err(format!("scripts: {key} lives {life} ms\nmachine: {:?}", lives.get(key)));
        }
    }
    if contents != *machine {
        return Err(format!("scripts: {contents:#?}\nmachine: {machine:#?}"));
    }
    if *count != contents.len() as i64 {
        return Err(format!("{count} keys on the server, {} of them the lock's", contents.len()));
    }
    Ok(())
}

/// The operations, a line each, with the time that passed.
fn told(ops: &[(u64, Op)]) -> String {
    let mut told = String::new();
    let mut last = ops[0].0;
    for (now, op) in ops {
        let passed = *now as i64 - last as i64;
        // Writing to a String cannot fail.
        let _ = write!(told, "\n{now} ({passed:+}) {op:?}");
        last = *now;
    }
    told
}

/// How often the things happened that the sequences are meant to bring about.
#[derive(Debug, Default)]
struct Seen(BTreeMap<&'static str, u64>);

/// All of them.
const SIGHTS: [&str; 26] = [
    "granted",
    "waiting",
    "reentered",
    "busy",
    "full",
    "renewed",
    "lost",
    "released",
    "already",
    "abandoned",
    "evicted",
    "changed",
    "named",
    "popped",
    "displaced",
    "passed over for its bell",
    "suspected",
    "trusted again",
    "suspects dropped",
    "rung",
    "handed over in the reply",
    "regrouping",
    "clock taken back",
    "record expired",
    "bell expired",
    "lost list expired",
];

impl Seen {
    /// Notes what one operation shows: `old` before the time passed, `before` and `after` around it.
    fn note(&mut self, old: &State, before: &State, after: &State, outcome: &Outcome) {
        let mut saw = |sight: &'static str, happened: bool| {
            if happened {
                assert!(SIGHTS.contains(&sight), "{sight}");
                *self.0.entry(sight).or_default() += 1;
            }
        };
        let reply = match outcome {
            Outcome::Reply(reply) => Some(reply),
            Outcome::Popped(ring) => {
                saw("popped", ring.is_some());
                None
            }
            Outcome::Nothing => None,
        };
        saw("record expired", old.record.is_some() && before.record.is_none());
        saw("lost list expired", !old.lost.is_empty() && before.lost.is_empty());
        saw("bell expired", old.bells.len() > before.bells.len());
        let Some(reply) = reply else { return };
        let (word, next) = match reply {
            Reply::Granted { .. } => ("granted", &None),
            Reply::Waiting { next, reentered, .. } => {
                saw("reentered", *reentered);
                ("waiting", next)
            }
            Reply::Busy { next } => ("busy", next),
            Reply::Full { next } => ("full", next),
            Reply::Renewed { .. } => ("renewed", &None),
            Reply::Lost { next } => ("lost", next),
            Reply::Released { next } => ("released", next),
            Reply::Already { next } => ("already", next),
            Reply::Abandoned { next } => ("abandoned", next),
            Reply::Evicted => ("evicted", &None),
            Reply::Changed => ("changed", &None),
            Reply::Inspected(_) => return,
        };
        saw(word, true);
        saw("named", next.is_some());
        saw("displaced", after.lost.len() > before.lost.len());
        let rings = |state: &State| state.bells.values().map(|bell| bell.rings.len()).sum::<usize>();
        saw("rung", rings(after) > rings(before));
        let Some(record) = &after.record else { return };
        let Some(earlier) = &before.record else {
            saw("regrouping", record.holder.is_none() && record.until > 0);
            return;
        };
        let minted = record.fence > earlier.fence;
        let displaced = after.lost.len() > before.lost.len();
        saw(
            "handed over in the reply",
            minted && next.as_ref().is_some_and(|next| next.fence == record.fence),
        );
        saw("passed over for its bell", displaced && earlier.until > record.fence && word != "evicted");
        saw("suspected", record.suspects.iter().any(|client| !earlier.suspects(client)));
        saw(
            "trusted again",
            earlier.suspects.iter().any(|client| !record.suspects(client)) && record.holder.is_some(),
        );
        let came = usize::from(word == "waiting" && after.queue.len() > before.queue.len());
        saw("suspects dropped", before.queue.len() > after.queue.len() + 1 + came);
        saw(
            "clock taken back",
            !minted
                && earlier.holder == record.holder
                && record.until + 50 < earlier.until
                && record.until > 0
                && word != "renewed"
                && word != "granted",
        );
    }
}

/// How often the rarer things happen, as weights among others that sum up to about 100.
struct Temper {
    /// The clock goes back.
    back: u32,
    /// Data is lost.
    loss: u32,
    /// Time goes to where something ends.
    ends: u32,
    /// Clients hear their bells.
    hear: u32,
    /// A client falls silent when its bell rings; of 8.
    silence: u32,
}

/// A number that is drawn before what it decides is known; 0 stands for the simplest, so that failing sequences
/// shrink towards that.
#[derive(Clone, Copy, Debug)]
struct Draw(u32);

impl Draw {
    /// A number below `end`.
    fn below(self, end: usize) -> usize {
        // Less than `end`, because the draw is less than 2^32.
        ((u64::from(self.0) * end as u64) >> 32) as usize
    }

    fn of<T>(self, items: &[T]) -> &T {
        &items[self.below(items.len())]
    }

    /// The number of a choice among some with these weights.
    fn weighted(self, weights: &[u32]) -> usize {
        let mut left = self.below(weights.iter().sum::<u32>() as usize) as u32;
        let fits = |weight: &u32| {
            let fits = left < *weight;
            left = left.saturating_sub(*weight);
            fits
        };
        weights.iter().position(fits).expect("less than the sum of all")
    }
}

/// What decides one step: the kind of time that passes and how much, the kind of operation and three for its parts.
type Step = [Draw; 6];

/// What decides a sequence: its beginning and all its steps.
type Plan = ([Draw; 32], Vec<Step>);

/// Plans are plain numbers because proptest's own choices take ten times as long as all else in an unoptimised test.
fn plans() -> impl Strategy<Value = ([u32; 32], Vec<[u32; 6]>)> {
    (any::<[u32; 32]>(), vec(any::<[u32; 6]>(), COMMANDS))
}

/// Turns a plan into operations, step by step, by what the machine has answered so far.
struct Story<'a> {
    temper: &'a Temper,
    state: State,
    now: u64,
    tickets: Vec<TicketId>,
    /// By client.
    terms: BTreeMap<Box<str>, Terms>,
    /// What each ticket was given.
    positions: BTreeMap<TicketId, u64>,
    fences: BTreeMap<TicketId, u64>,
    /// All fences that were minted.
    minted: Vec<u64>,
    calls: Vec<(Terms, Command)>,
    /// A client that is not heard of for some steps.
    silent: Option<(Box<str>, u32)>,
}

impl Story<'_> {
    fn ops(temper: &Temper, (beginning, steps): &Plan) -> Vec<(u64, Op)> {
        let mut beginning = beginning.iter().copied();
        let mut draw = || beginning.next().expect("draws enough for a beginning");
        // The one is now; the other is close to the last microsecond that a double counts.
        let now = *draw().of(&[1_796_000_000_000_007, 9_007_000_000_000_007]);
        let (mut tickets, mut terms) = (Vec::new(), BTreeMap::new());
        for name in CLIENTS {
            let client = ClientId::cleaned(name);
            let its = Terms {
                claim_ms: *draw().of(&CLAIMS),
                idle_ms: *draw().of(&IDLES),
                regroup_ms: *draw().of(&REGROUPS),
            };
            terms.insert(name.into(), its);
            for n in 0..=draw().below(4) as u64 {
                tickets.push(TicketId::new(&client, n, *draw().of(&LEASES)));
            }
        }
        let mut story = Story {
            temper,
            state: State::default(),
            now,
            tickets,
            terms,
            positions: BTreeMap::new(),
            fences: BTreeMap::new(),
            minted: vec![1],
            calls: Vec::new(),
            silent: None,
        };
        steps.iter().map(|step| story.step(step)).collect()
    }

    fn step(&mut self, &[pass, how_far, act, who, what, how]: &Step) -> (u64, Op) {
        self.now = self.after(pass, how_far);
        self.state.expire(self.now);
        let op = self.op(act, who, what, how);
        if let Op::Call(terms, command) = &op {
            self.calls.push((*terms, command.clone()));
        }
        match op.apply(&mut self.state, self.now) {
            Outcome::Reply(reply) => self.learn(&op, &reply),
            Outcome::Popped(Some(ring)) => {
                let (ticket, fence) = ring.split_once(' ').expect("a ring");
                self.fences
                    .insert(TicketId::parse(ticket).expect("a ticket"), fence.parse().expect("a fence"));
            }
            Outcome::Popped(None) | Outcome::Nothing => {}
        }
        self.silent =
            self.silent.take().filter(|(_, steps)| *steps > 0).map(|(client, steps)| (client, steps - 1));
        if let Some(record) = &self.state.record
            && let (Some(holder), Some(_), None) = (&record.holder, record.claim, &self.silent)
            && how.0 % 8 < self.temper.silence
        {
            self.silent = Some((holder.client().into(), 10));
        }
        (self.now, op)
    }

    /// The time of the next operation.
    fn after(&self, kind: Draw, how_far: Draw) -> u64 {
        match kind.weighted(&[30, 20, 3, self.temper.ends, self.temper.back]) {
            0 => self.now + how_far.below(3) as u64,
            1 => self.now + how_far.below(2_000_000) as u64,
            2 => self.now + 1_000_000 * how_far.below(5_000) as u64,
            3 => {
                let mut ends: Vec<u64> = deadlines(&self.state).into_values().collect();
                if let Some(record) = &self.state.record {
                    // Twice, because they are what it is all about.
                    ends.extend(
                        [record.until, record.until].into_iter().chain(record.claim).chain(record.claim),
                    );
                }
                ends.retain(|at| *at > self.now);
                match how_far.below(ends.len() * 3) {
                    _ if ends.is_empty() => self.now,
                    // At the moment at which something ends, and just next to it.
                    n => ends[n / 3] + n as u64 % 3 - 1,
                }
            }
            _ => {
                let back = [1 + how_far.0 as u64 % 10, 1_000 * u64::from(how_far.0), 100_000_000_000_000];
                self.now.saturating_sub(*how_far.of(&back)).max(1)
            }
        }
    }

    fn op(&self, act: Draw, who: Draw, what: Draw, how: Draw) -> Op {
        let call = |client: &str, command| Op::Call(self.terms[client], command);
        let Temper { loss, hear, .. } = *self.temper;
        match act.weighted(&[1, 45, 7, 15, 6, 2, hear, 6, 3, loss]) {
            1 => {
                let ticket = self.ticket(who, &[6, 2, 2, 2]);
                let position = self.position(what, &ticket);
                let wait = !how.0.is_multiple_of(8);
                let max_queue = (how.0 / 8).is_multiple_of(5).then_some(u64::from(how.0) / 40 % 4);
                let client = ticket.client().to_owned();
                call(&client, Command::Acquire { ticket, position, wait, max_queue })
            }
            act @ (2 | 3) => {
                let ticket = self.ticket(who, &[1, 3]);
                let fence = self.fence(what, how, &ticket);
                let client = ticket.client().to_owned();
                let renew = act == 2;
                call(
                    &client,
                    if renew { Command::Renew { ticket, fence } } else { Command::Release { ticket, fence } },
                )
            }
            4 => {
                let ticket = self.ticket(who, &[6, 2, 2, 2]);
                let client = ticket.client().to_owned();
                call(&client, Command::Abandon { ticket })
            }
            5 => call(CLIENTS[0], Command::Evict { fence: self.fence(what, how, who.of(&self.tickets)) }),
            6 => Op::Pop(self.ticket(who, &[1, 3]).client().into()),
            // An earlier call arrives again, or only now.
            7 if !self.calls.is_empty() => {
                let (terms, command) = what.of(&self.calls).clone();
                Op::Call(terms, command)
            }
            8 => {
                let ticket = self.ticket(who, &[1, 3]);
                Op::Forge(Ring { fence: self.fence(what, how, &ticket), ticket })
            }
            9 => Op::Lose(match what.below(6) {
                0 => Loss::Record,
                1 => Loss::Queue,
                2 => Loss::Lost,
                3 => Loss::Bell(self.ticket(who, &[1, 1]).client().into()),
                _ => Loss::All,
            }),
            _ => call(CLIENTS[0], Command::Inspect { limit: what.below(5) as u64 }),
        }
    }

    /// A ticket: any, the holder, the head of the queue, or one of the holder's client.
    fn ticket(&self, draw: Draw, weights: &[u32]) -> TicketId {
        let holder = self.state.record.as_ref().and_then(|record| record.holder.as_ref());
        // Another draw, made of the digits that the first choice leaves over.
        let speaks =
            |ticket: &&TicketId| self.silent.as_ref().is_none_or(|(silent, _)| **silent != *ticket.client());
        let speaking: Vec<_> = self.tickets.iter().filter(speaks).collect();
        let any = *Draw(draw.0.wrapping_mul(2_654_435_761)).of(&speaking);
        let found = match draw.weighted(weights) {
            0 => any,
            1 => holder.unwrap_or(any),
            2 => self.state.queue.first().map_or(any, |(_, head)| head),
            _ => {
                let client = holder.unwrap_or(any).client();
                let mates: Vec<_> = self.tickets.iter().filter(|ticket| ticket.client() == client).collect();
                mates[draw.0 as usize % mates.len()]
            }
        };
        if speaks(&found) { found.clone() } else { any.clone() }
    }

    /// A position: none, the ticket's own, another ticket's, or one next to the newest.
    fn position(&self, draw: Draw, ticket: &TicketId) -> Option<u64> {
        let other = &self.tickets[draw.0 as usize % self.tickets.len()];
        match draw.weighted(&[4, 8, 1, 1]) {
            0 => None,
            1 => self.positions.get(ticket).copied(),
            2 => self.positions.get(other).copied(),
            _ => {
                let newest = self.state.record.as_ref().map_or(self.now, |record| record.pos);
                Some((newest + u64::from(draw.0) % 5).saturating_sub(2).max(1))
            }
        }
    }

    /// A fence: the record's, the ticket's own, any that was minted, or one next to the record's.
    fn fence(&self, kind: Draw, how: Draw, ticket: &TicketId) -> u64 {
        let current = self.state.record.as_ref().map_or(1, |record| record.fence);
        let fence = match kind.weighted(&[6, 3, 1, 1]) {
            0 => current,
            1 => self.fences.get(ticket).copied().unwrap_or(current),
            2 => *how.of(&self.minted),
            _ => (current + how.below(3) as u64).saturating_sub(1),
        };
        fence.max(1)
    }

    /// Remembers what clients would.
    fn learn(&mut self, op: &Op, reply: &Reply) {
        let fence = self.state.record.as_ref().map_or(1, |record| record.fence);
        if self.minted.last() != Some(&fence) {
            self.minted.push(fence);
        }
        let Op::Call(_, Command::Acquire { ticket, .. }) = op else { return };
        match reply {
            Reply::Granted { fence, position } => {
                self.positions.insert(ticket.clone(), *position);
                self.fences.insert(ticket.clone(), *fence);
            }
            Reply::Waiting { position, next, .. } => {
                self.positions.insert(ticket.clone(), *position);
                if let Some(Next { ticket, fence }) = next {
                    self.fences.insert(ticket.clone(), *fence);
                }
            }
            _ => {}
        }
    }
}

/// Runs `body` on a server of its own.
fn on_both(sources: &Sources, body: impl FnOnce(&mut Both)) {
    let server = Server::start();
    let mut connection = connect(&server.unix_url()).expect("a connection to the test's server");
    let scripts = sources.load(&mut connection);
    let snapshot: String =
        cmd("SCRIPT").arg("LOAD").arg(SNAPSHOT).query(&mut connection).expect("a script that shows the keys");
    body(&mut Both { connection: &mut connection, scripts: &scripts, snapshot: &snapshot });
}

/// Feeds `cases` random sequences to both sides and gives the first difference, made simpler `simpler` times at most.
fn difference(
    both: &mut Both,
    temper: &Temper,
    cases: u32,
    simpler: u32,
    seen: &RefCell<Seen>,
) -> Option<String> {
    let config = Config { cases, failure_persistence: None, max_shrink_iters: simpler, ..Config::default() };
    let both = RefCell::new(both);
    let run = TestRunner::new(config).run(&plans(), |(beginning, steps)| {
        let plan = (beginning.map(Draw), steps.iter().map(|step| step.map(Draw)).collect());
        let difference = both.borrow_mut().compare(&Story::ops(temper, &plan), 1, &mut seen.borrow_mut());
        difference.map_err(TestCaseError::fail)
    });
    match run {
        Ok(()) => None,
        Err(TestError::Fail(difference, _)) => Some(difference.to_string()),
        Err(error) => panic!("{error}"),
    }
}

/// Demands that both sides agree, and that the sequences were worth it.
fn agree(temper: &Temper) {
    let cases = env::var("FIFO_SEQUENCES").map_or(SEQUENCES, |number| number.parse().expect("a number"));
    on_both(&Sources::on_virtual_time(), |both| {
        let seen = RefCell::new(Seen::default());
        if let Some(difference) = difference(both, temper, cases, 5_000, &seen) {
            panic!("{difference}");
        }
        let seen = seen.into_inner();
        println!("{cases} sequences of {COMMANDS} commands: {:?}", seen.0);
        let unseen: Vec<_> = SIGHTS.iter().filter(|sight| !seen.0.contains_key(**sight)).collect();
        assert!(cases < SEQUENCES || unseen.is_empty(), "never happened: {unseen:?}");
    });
}

#[test]
fn scripts_and_machine_agree_while_clients_come_and_go() {
    agree(&Temper { back: 1, loss: 1, ends: 10, hear: 15, silence: 3 });
}

#[test]
fn scripts_and_machine_agree_while_clients_crash() {
    agree(&Temper { back: 1, loss: 1, ends: 40, hear: 3, silence: 6 });
}

#[test]
fn scripts_and_machine_agree_while_the_clock_jumps() {
    agree(&Temper { back: 12, loss: 1, ends: 20, hear: 10, silence: 2 });
}

#[test]
fn scripts_and_machine_agree_while_data_is_lost() {
    agree(&Temper { back: 2, loss: 8, ends: 20, hear: 10, silence: 5 });
}

/// Long sequences that reach what the record, the lost list and one call are limited to.
struct Script {
    now: u64,
    ops: Vec<(u64, Op)>,
}

impl Script {
    const TERMS: Terms = Terms { claim_ms: 1_000, idle_ms: IDLES[0], regroup_ms: 3_000 };

    fn new() -> Script {
        Script { now: 1_796_000_000_000_007, ops: Vec::new() }
    }

    fn call(&mut self, command: Command) {
        self.ops.push((self.now, Op::Call(Script::TERMS, command)));
    }

    fn wait(&mut self, ticket: &TicketId) {
        self.call(Command::Acquire { ticket: ticket.clone(), position: None, wait: true, max_queue: None });
    }

    fn pass(&mut self, ms: u64) {
        self.now += ms * 1000;
    }

    /// Runs it on both sides and gives the machine's last state.
    fn compare(&self) -> State {
        on_both(&Sources::on_virtual_time(), |both| {
            if let Err(difference) = both.compare(&self.ops, 25, &mut Seen::default()) {
                panic!("{difference}");
            }
        });
        let mut state = State::default();
        for (now, op) in &self.ops {
            op.apply(&mut state, *now);
        }
        state
    }
}

fn ticket(client: &str, n: usize) -> TicketId {
    TicketId::new(&ClientId::cleaned(client), n as u64, LEASES[0])
}

#[test]
fn scripts_and_machine_agree_on_more_suspects_than_a_record_holds() {
    let mut script = Script::new();
    let dead: Vec<_> = (0..40).map(|n| ticket(&format!("d{}", n % 20), n)).collect();
    let alive = ticket("alive", 1);
    for waiting in dead.iter().chain([&alive]) {
        script.wait(waiting);
    }
    script.pass(LEASES[0]);
    // Each costs the living a window, and those that are forgotten another one.
    for _ in 0..2 * dead.len() {
        script.wait(&alive);
        script.pass(1_000);
    }
    let state = script.compare();
    assert!(state.record.is_some_and(|record| record.holder == Some(alive)), "the living are served");
}

#[test]
fn scripts_and_machine_agree_on_more_lost_fences_than_are_kept() {
    let mut script = Script::new();
    for n in 0..LOST_KEPT + 12 {
        script.wait(&ticket("a", n));
        script.pass(LEASES[0] / 1000);
        script.call(Command::Inspect { limit: 0 });
        // One microsecond before the lease lapses it is still whole.
        script.pass(LEASES[0] - LEASES[0] / 1000 - 1);
        script.wait(&ticket("b", n));
        script.pass(1);
    }
    let state = script.compare();
    let born = state.record.expect("a record").born;
    assert!(state.lost.len() == LOST_KEPT && state.lost.first() >= Some(&born), "the oldest were cut off");
}

#[test]
fn scripts_and_machine_agree_on_more_tickets_of_suspects_than_one_call_drops() {
    let mut script = Script::new();
    let (holder, alive) = (ticket("x", 1), ticket("y", 1));
    script.wait(&holder);
    let many = DROPPED_AT_ONCE + 5;
    for n in 0..many {
        script.wait(&ticket("d", n));
    }
    script.wait(&alive);
    script.call(Command::Abandon { ticket: holder });
    script.pass(1_000);
    script.wait(&alive);
    // Of many and the living, one was granted and passed over, and one is granted now.
    let left = many + 1 - 2 - DROPPED_AT_ONCE;
    assert_eq!(script.compare().queue.len(), left, "one call drops no more");
    script.pass(1_000);
    script.wait(&alive);
    let state = script.compare();
    assert!(state.record.is_some_and(|record| record.holder == Some(alive)), "the next drops the others");
}

/// Random sequences find what they are for: faults of every kind, put into the scripts, show as differences.
#[test]
fn a_fault_in_the_scripts_shows_as_a_difference() {
    let temper = Temper { back: 3, loss: 3, ends: 30, hear: 6, silence: 4 };
    for fault in [
        "naming does not delete the bell",
        "a suspect is never cleared",
        "the claim window is longer than the lease",
        "the lost list does not expire",
        "the ring's fence is printed by tostring",
        "a claim window stays in the future",
    ] {
        on_both(&mutants::sources(fault), |both| {
            let found = difference(both, &temper, SEQUENCES, 0, &RefCell::default());
            assert!(found.is_some(), "{SEQUENCES} sequences do not show it: {fault}");
        });
    }
}
