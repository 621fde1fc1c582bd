//! The pure machine behind a network that delays, loses and repeats; and what must hold after every transition.
//!
//! Invariant: the network does only what a network can: a request is delivered once, later or never, and never after its
//! caller has had the reply. A ring that the server took off a bell reaches the listener or is lost.

use std::collections::{BTreeMap, BTreeSet};
use std::panic;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

use super::scheduler::{self, Cause, Injected, draw, permille};
use crate::clock::{self, Moment};
use crate::engine::{Bell, Engine, Failure, Heard};
use crate::error::Error;
use crate::holding::{Held, Holding};
use crate::keys::{GateKeys, LockKeys};
#[cfg(feature = "idempotency")]
use crate::protocol::job;
use crate::protocol::machine::Ring;
use crate::protocol::{Command, Reply, State, Terms, TicketId, apply, gate};

/// Server time at the beginning of the simulation's, microseconds.
const EPOCH_US: u64 = 1_700_000_000_000_000;
/// A server looks at the timeouts of blocked clients ten times a second.
const GRAIN_US: u64 = 100_000;

/// How often in a thousand what goes wrong, and how slow the network is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Faults {
    /// A call finds no server.
    pub(crate) refused: u64,
    /// A request is lost.
    pub(crate) request_lost: u64,
    /// A reply is lost.
    pub(crate) reply_lost: u64,
    /// The caller is told of a broken connection, and the request arrives all the same, later.
    pub(crate) late: u64,
    /// The server answers that it is busy.
    pub(crate) busy: u64,
    /// A call for a ticket that waits panics.
    pub(crate) panics: u64,
    /// A bell cannot be opened.
    pub(crate) bell_refused: u64,
    /// A bell breaks while somebody listens.
    pub(crate) bell_broken: u64,
    /// A ring is lost on its way.
    pub(crate) ring_lost: u64,
    /// A ring is late.
    pub(crate) ring_late: u64,
    /// Something else lies on the bell.
    pub(crate) noise: u64,
    /// Listening panics.
    pub(crate) bell_panics: u64,
    /// Some ways take up to so many milliseconds longer.
    pub(crate) slow: u64,
    /// No way takes any time, so that much happens at once.
    pub(crate) instant: bool,
}

impl Faults {
    pub(crate) fn none(&self) -> bool {
        *self == Faults { instant: self.instant, ..Faults::default() }
    }
}

/// A server that all clients of a scenario share.
#[derive(Clone)]
pub(crate) struct Server {
    world: Arc<Mutex<World>>,
    /// The bound on one call, as the clients have it.
    pub(crate) call_timeout: Duration,
}

#[derive(Default)]
struct World {
    faults: Faults,
    /// How long tickets may be queued behind a grant of which nobody makes use, if that is limited.
    patience: Option<Duration>,
    /// While it cannot be reached.
    down: Vec<(Moment, Moment)>,
    locks: BTreeMap<Box<str>, Lock>,
    listeners: Vec<Listener>,
    listenings: u64,
    counts: BTreeMap<&'static str, u64>,
    /// When something last went wrong.
    troubled: Option<Moment>,
}

/// One lock on the server, and what is known of its past.
#[derive(Default)]
struct Lock {
    state: State,
    newest: u64,
    /// When each fence was granted.
    grants: BTreeMap<u64, Moment>,
    /// Fences whose lease was taken away.
    displaced: BTreeSet<u64>,
    /// Of these, those that an operator took away.
    evicted: BTreeSet<u64>,
    /// Grants that somebody has made use of.
    used: BTreeSet<u64>,
    /// Since when tickets are queued behind a grant of which nobody has made use.
    unused: Option<Moment>,
    /// Leases whose holders are in their sections.
    sections: BTreeMap<u64, Arc<Holding>>,
}

/// A blocked `BLPOP`.
struct Listener {
    number: u64,
    lock: Box<str>,
    client: Box<str>,
    ring: Option<Ring>,
    /// When it ends without a ring.
    until: Moment,
    /// The client is gone, and the server has not noticed yet.
    dead: bool,
}

pub(crate) fn server_us() -> u64 {
    EPOCH_US + clock::now().as_nanos() / 1000
}

impl Server {
    pub(crate) fn new(faults: Faults, call_timeout: Duration, patience: Option<Duration>) -> Server {
        let world = World { faults, patience, ..World::default() };
        Server { world: Arc::new(Mutex::new(world)), call_timeout }
    }

    /// Cannot be reached from `from` until `until`.
    pub(crate) fn down(&self, from: Moment, until: Moment) {
        let mut world = self.world.lock();
        world.down.push((from, until));
        drop(world);
        let server = self.clone();
        // Whoever listens then is cut off.
        scheduler::at(from, move || {
            let mut world = server.world.lock();
            world.count("outage");
            for listener in &mut world.listeners {
                listener.dead = true;
                scheduler::wake(Cause::Bell(listener.number), true);
            }
        });
    }

    pub(crate) fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.world.lock().counts.clone()
    }

    /// Whether it cannot be reached at some time.
    pub(crate) fn has_outage(&self) -> bool {
        !self.world.lock().down.is_empty()
    }

    /// Whether anything went wrong since `since`.
    pub(crate) fn troubled_since(&self, since: Moment) -> bool {
        self.world.lock().troubled.is_some_and(|at| at >= since)
    }

    /// Notes that a thread is in its section with this lease, which must be the only one that is believed.
    pub(crate) fn enter(&self, held: &Held) {
        let holding = &held.holding;
        let mut world = self.world.lock();
        let key = holding.room.keys.lock.clone();
        let lock = world.locks.entry(key).or_default();
        if lock.sections.insert(holding.fence.get(), Arc::clone(holding)).is_some() {
            scheduler::fail(format!("fence {} was handed out twice", holding.fence));
        }
        lock.used.insert(holding.fence.get());
        lock.unused = None;
        lock.check();
    }

    pub(crate) fn leave(&self, held: &Held) {
        let holding = &held.holding;
        let mut world = self.world.lock();
        let lock = world.locks.entry(holding.room.keys.lock.clone()).or_default();
        lock.check();
        lock.sections.remove(&holding.fence.get());
    }

    /// Whether the server took the lease with this fence away.
    pub(crate) fn was_displaced(&self, fence: u64) -> bool {
        self.world.lock().locks.values().any(|lock| lock.displaced.contains(&fence))
    }

    /// When this fence was granted.
    pub(crate) fn granted_at(&self, fence: u64) -> Option<Moment> {
        self.world.lock().locks.values().find_map(|lock| lock.grants.get(&fence).copied())
    }

    /// When somebody who listens stops next.
    pub(crate) fn listening_until(&self) -> Option<Moment> {
        self.world.lock().listeners.iter().map(|listener| listener.until).min()
    }

    /// How many grants there were.
    pub(crate) fn grants(&self) -> usize {
        self.world.lock().locks.values().map(|lock| lock.grants.len()).sum()
    }

    /// Who holds a lock, and who is queued for one.
    pub(crate) fn left(&self) -> Vec<TicketId> {
        let now_us = server_us();
        let mut world = self.world.lock();
        let mut left = Vec::new();
        for lock in world.locks.values_mut() {
            lock.state.expire(now_us);
            left.extend(lock.state.queue.iter().map(|(_, ticket)| ticket.clone()));
            left.extend(lock.state.record.as_ref().and_then(|record| record.holder.clone()));
        }
        left
    }

    /// Asks once for every lock as a stranger would.
    pub(crate) fn knock(&self, ticket: &TicketId, terms: &Terms) -> bool {
        let mut world = self.world.lock();
        let keys: Vec<_> = world.locks.keys().cloned().collect();
        keys.iter().all(|key| {
            let command =
                Command::Acquire { ticket: ticket.clone(), position: None, wait: true, max_queue: None };
            matches!(world.run(key, terms, &command), Reply::Granted { .. })
        })
    }

    fn trouble(&self, what: &'static str) {
        let mut world = self.world.lock();
        world.count(what);
        world.troubled = Some(clock::now());
        scheduler::note(|| format!("fault: {what}"));
    }

    /// Whether this goes wrong now.
    fn goes_wrong(&self, what: &'static str, often: impl Fn(&Faults) -> u64) -> bool {
        let often = often(&self.world.lock().faults);
        let wrong = permille(often);
        if wrong {
            self.trouble(what);
        }
        wrong
    }

    fn is_down(&self) -> bool {
        let now = clock::now();
        self.world.lock().down.iter().any(|(from, until)| *from <= now && now < *until)
    }

    /// How long a way takes.
    fn way(&self) -> Duration {
        let Faults { slow, instant, .. } = self.world.lock().faults;
        if instant {
            return Duration::ZERO;
        }
        let slow = if slow > 0 && permille(100) { draw(slow * 1000) } else { 0 };
        Duration::from_micros(50 + draw(500) + slow)
    }
}

impl World {
    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn run(&mut self, key: &str, terms: &Terms, command: &Command) -> Reply {
        let now_us = server_us();
        let lock = self.locks.entry(key.into()).or_default();
        let reply = apply(&mut lock.state, now_us, terms, command);
        scheduler::note(|| format!("server: {command:?} -> {reply:?}"));
        if let (Command::Evict { fence }, Reply::Evicted) = (command, &reply) {
            lock.evicted.insert(*fence);
        }
        lock.displaced.extend(lock.state.lost.iter().copied());
        lock.check();
        if let (Some(patience), Some(unused)) = (self.patience, lock.unused)
            && clock::now().since(unused) > patience
        {
            scheduler::fail(format!("nobody has fence {} while others wait, since {unused:?}", lock.newest));
        }
        // A blocked client is served before the next command runs.
        for listener in self.listeners.iter_mut().filter(|listener| &*listener.lock == key) {
            if listener.ring.is_none() {
                listener.ring = lock.state.pop_bell(&listener.client, now_us);
                if listener.ring.is_some() {
                    scheduler::wake(Cause::Bell(listener.number), true);
                }
            }
        }
        self.listeners.retain(|listener| !(listener.dead && listener.ring.is_some()));
        reply
    }
}

impl Lock {
    /// What must hold after every transition.
    fn check(&mut self) {
        let now = clock::now();
        let Some(record) = &self.state.record else { return };
        if let Some(holder) = &record.holder
            && record.fence != self.newest
        {
            if record.fence < self.newest {
                scheduler::fail(format!("fence {} after {}", record.fence, self.newest));
            }
            self.newest = record.fence;
            self.unused = None;
            self.grants.insert(record.fence, now);
            let first = self.state.queue.iter().find(|(_, ticket)| !record.suspects(ticket.client()));
            if let Some((position, ticket)) = first
                && *position < record.place
            {
                scheduler::fail(format!("{holder} at {} was granted before {ticket}", record.place));
            }
        }
        if record.holder.is_none() || self.state.queue.is_empty() || self.used.contains(&record.fence) {
            self.unused = None;
        } else {
            self.unused.get_or_insert(now);
        }
        for (fence, holding) in &self.sections {
            let (good_until, lost) = scheduler::quietly(|| (holding.good_until(), holding.was_lost()));
            if lost || now >= good_until || self.evicted.contains(fence) {
                continue;
            }
            let until = Moment::from_nanos(record.until.saturating_sub(EPOCH_US) * 1000);
            if record.holder.is_none() || record.fence != *fence || until < good_until {
                scheduler::fail(format!(
                    "fence {fence} believes in its lease until {good_until:?}; the server says {record} at {now:?}"
                ));
            }
        }
    }
}

/// Only the lock is simulated.
fn untold(what: &str) -> Failure {
    Failure { error: Error::Config(format!("the simulated server has no {what}")), sent: false, retry: false }
}

impl Engine for Server {
    fn call(&self, keys: &LockKeys, terms: &Terms, command: &Command, by: Moment) -> Result<Reply, Failure> {
        scheduler::holds_nothing("a call");
        scheduler::point("call");
        let waits = matches!(command, Command::Acquire { position: Some(_), .. });
        if waits && !thread::panicking() && self.goes_wrong("panic in a call", |faults| faults.panics) {
            panic::resume_unwind(Box::new(Injected));
        }
        let start = clock::now();
        let timeout =
            if by == Moment::NEVER { self.call_timeout } else { by.since(start).min(self.call_timeout) };
        let timeout = timeout.max(Duration::from_millis(1));
        if self.is_down() {
            self.trouble("call while down");
            if permille(500) {
                scheduler::sleep(timeout.min(self.way()));
                return Err(broken(false));
            }
            scheduler::sleep(timeout);
            return Err(broken(true));
        }
        if self.goes_wrong("refused", |faults| faults.refused) {
            scheduler::sleep(timeout.min(self.way()));
            return Err(broken(false));
        }
        if self.goes_wrong("request lost", |faults| faults.request_lost) {
            let noticed = if permille(500) { timeout } else { timeout.min(self.way()) };
            scheduler::sleep(noticed);
            return Err(broken(true));
        }
        if self.goes_wrong("late", |faults| faults.late) {
            // A broken connection does not take back what was sent. Whatever is on its way has arrived within the bound
            // on a call, which is what the withdrawal of doubtful tickets counts on.
            let noticed = if permille(500) { timeout } else { timeout.min(self.way()) };
            let arrives = Duration::from_micros(draw(self.call_timeout.as_micros() as u64));
            let (server, key, terms, command) = (self.clone(), keys.lock.clone(), *terms, command.clone());
            scheduler::at(start.after(arrives), move || {
                server.world.lock().run(&key, &terms, &command);
            });
            scheduler::sleep(noticed);
            return Err(broken(true));
        }
        let (there, back) = (self.way(), self.way());
        if there >= timeout {
            self.trouble("too slow");
            let (server, key, terms, command) = (self.clone(), keys.lock.clone(), *terms, command.clone());
            scheduler::at(start.after(there), move || {
                server.world.lock().run(&key, &terms, &command);
            });
            scheduler::sleep(timeout);
            return Err(broken(true));
        }
        scheduler::sleep(there);
        if self.is_down() {
            scheduler::sleep(timeout.saturating_sub(there));
            return Err(broken(true));
        }
        if self.goes_wrong("busy", |faults| faults.busy) {
            scheduler::sleep(back.min(timeout.saturating_sub(there)));
            return Err(loading());
        }
        let reply = self.world.lock().run(&keys.lock, terms, command);
        if there + back >= timeout || self.goes_wrong("reply lost", |faults| faults.reply_lost) {
            let rest = timeout.saturating_sub(there);
            let noticed = if permille(500) { rest } else { rest.min(back) };
            self.trouble("no reply");
            scheduler::sleep(noticed);
            return Err(broken(true));
        }
        scheduler::sleep(back);
        Ok(reply)
    }

    fn gate(&self, _: &GateKeys, _: &gate::Call, _: Moment) -> Result<gate::Reply, Failure> {
        Err(untold("gates"))
    }

    #[cfg(feature = "idempotency")]
    fn job(&self, _: &LockKeys, _: &str, _: &job::Call, _: Moment) -> Result<job::Reply, Failure> {
        Err(untold("jobs"))
    }

    fn bell(&self, keys: &LockKeys, _by: Moment) -> Result<Box<dyn Bell>, Failure> {
        scheduler::holds_nothing("a bell");
        scheduler::sleep(self.way());
        if self.is_down() || self.goes_wrong("bell refused", |faults| faults.bell_refused) {
            self.trouble("no bell");
            return Err(broken(false));
        }
        let client = keys.bell.rsplit(':').next().unwrap_or_default();
        Ok(Box::new(SimBell { server: self.clone(), lock: keys.lock.clone(), client: client.into() }))
    }
}

/// A connection that listens.
struct SimBell {
    server: Server,
    lock: Box<str>,
    client: Box<str>,
}

impl Bell for SimBell {
    fn listen(&mut self, wait: Duration) -> Result<Heard, Failure> {
        scheduler::holds_nothing("listening");
        scheduler::point("listen");
        let server = &self.server;
        if server.goes_wrong("panic of the listener", |faults| faults.bell_panics) {
            panic::resume_unwind(Box::new(Injected));
        }
        if server.goes_wrong("noise", |faults| faults.noise) {
            return Ok(Heard::Noise);
        }
        scheduler::sleep(server.way());
        if server.is_down() {
            return Err(broken(true));
        }
        let breaks = server.goes_wrong("bell broken", |faults| faults.bell_broken);
        let grain = Duration::from_micros(draw(GRAIN_US));
        let ends = if breaks { wait.mul_f64(draw(1000) as f64 / 1000.0) } else { wait + grain };
        let until = clock::now().after(ends);
        let number = {
            let mut world = server.world.lock();
            world.listenings += 1;
            let number = world.listenings;
            let ring = world
                .locks
                .get_mut(&self.lock)
                .and_then(|lock| lock.state.pop_bell(&self.client, server_us()));
            let (lock, client) = (self.lock.clone(), self.client.clone());
            world.listeners.push(Listener { number, lock, client, ring, until, dead: false });
            number
        };
        let heard = |world: &World| {
            world.listeners.iter().any(|other| other.number == number && (other.ring.is_some() || other.dead))
        };
        while clock::now() < until && !heard(&server.world.lock()) {
            scheduler::block("listen", Cause::Bell(number), Some(until));
        }
        let mut world = server.world.lock();
        let Some(at) = world.listeners.iter().position(|other| other.number == number) else {
            return Err(broken(true));
        };
        if breaks && world.listeners[at].ring.is_none() && permille(300) {
            // The server finds out later, and until then gives the next ring to nobody.
            world.listeners[at].dead = true;
            drop(world);
            let cleaner = server.clone();
            scheduler::at(clock::now().after(Duration::from_millis(draw(500))), move || {
                cleaner.world.lock().listeners.retain(|other| other.number != number);
            });
            return Err(broken(true));
        }
        let listener = world.listeners.swap_remove(at);
        drop(world);
        if listener.dead || breaks {
            return Err(broken(true));
        }
        let Some(ring) = listener.ring else { return Ok(Heard::Nothing) };
        if server.goes_wrong("ring lost", |faults| faults.ring_lost) {
            return Err(broken(true));
        }
        scheduler::sleep(server.way());
        if server.goes_wrong("ring late", |faults| faults.ring_late) {
            scheduler::sleep(Duration::from_millis(draw(400)));
        }
        scheduler::note(|| format!("ring: {ring:?}"));
        Ok(Heard::Ring(ring))
    }
}

/// A connection that could not be made, or broke.
fn broken(sent: bool) -> Failure {
    let source = redis::RedisError::from(std::io::Error::from(std::io::ErrorKind::ConnectionReset));
    let error = Error::Redis { context: "simulated".into(), source: Box::new(source) };
    Failure { error, sent, retry: true }
}

/// An answer that asks to come back later.
fn loading() -> Failure {
    let kind = redis::ErrorKind::Server(redis::ServerErrorKind::BusyLoading);
    let source = redis::RedisError::from((kind, "simulated"));
    let error = Error::Redis { context: "simulated".into(), source: Box::new(source) };
    Failure { error, sent: false, retry: true }
}
