//! What each rule of the scripts is for, as one short scenario per rule: scripts called by hand on virtual time.
//!
//! Here they pass; `mutants.rs` breaks the scripts, and the scenario of the rule that was broken has to fail.

use redis::{Cmd, Connection, ConnectionLike, Value, cmd};
use redis_fifo_lock::protocol::{Command, Next, Record, Reply, Terms, TicketId};

use crate::support::scripts::{LOCK, LOST, QUEUE, Scripts, Sources, bell, decode, text};
use crate::support::server::{Server, connect};

/// Why a scenario does not hold.
type Broken = String;

/// A scenario: `Ok` if the scripts keep the rule.
pub(crate) type Scenario = fn(&mut RawLock) -> Result<(), Broken>;

/// How an error of a script begins that no scenario asked for.
pub(crate) const SCRIPT_FAILED: &str = "a script failed: ";

const TERMS: Terms = Terms { claim_ms: CLAIM, idle_ms: IDLE, regroup_ms: REGROUP };
const CLAIM: u64 = 1_000;
const IDLE: u64 = 86_400_000;
const REGROUP: u64 = 3_000;

/// The lease of most tickets, milliseconds.
const LEASE: u64 = 60_000;

const A: &str = "a.1.60000";
const B: &str = "b.1.60000";
const B2: &str = "b.2.60000";
const B3: &str = "b.3.60000";
const C: &str = "c.1.60000";
const D: &str = "d.1.60000";

/// A lock as the scripts see it, and the time.
pub(crate) struct RawLock<'a> {
    connection: &'a mut Connection,
    scripts: &'a Scripts,
    /// Microseconds.
    now: u64,
    max_queue: Option<u64>,
}

/// A grant: its fence and its ticket's position.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Grant {
    fence: u64,
    position: u64,
}

/// A place in the queue.
#[derive(Clone, Debug, PartialEq)]
struct Place {
    position: u64,
    ahead: u64,
    holder_ms: u64,
    newest: u64,
    reentered: bool,
    next: Option<Next>,
}

fn id(ticket: &str) -> TicketId {
    TicketId::parse(ticket).expect("a ticket")
}

/// Breaks off a scenario unless `holds`.
fn ensure(holds: bool, otherwise: &str) -> Result<(), Broken> {
    if holds { Ok(()) } else { Err(otherwise.to_owned()) }
}

/// Breaks off a scenario unless two values are equal.
fn equal<T: PartialEq + std::fmt::Debug>(is: T, should_be: T, what: &str) -> Result<(), Broken> {
    if is == should_be { Ok(()) } else { Err(format!("{what}: {is:?} instead of {should_be:?}")) }
}

impl<'a> RawLock<'a> {
    /// A lock that nobody used yet, on an empty server.
    pub(crate) fn new(connection: &'a mut Connection, scripts: &'a Scripts) -> RawLock<'a> {
        let mut lock = RawLock { connection, scripts, now: 1_796_000_000_000_123, max_queue: None };
        lock.tell(cmd("CONFIG").arg("SET").arg("maxmemory").arg(0));
        lock.lose_all();
        lock
    }

    fn call(&mut self, command: Command) -> Result<Reply, Broken> {
        self.raw(&command).and_then(|value| decode(&command, &value))
    }

    /// Calls a script; an error of the server breaks the scenario off.
    fn raw(&mut self, command: &Command) -> Result<Value, Broken> {
        let call = self.scripts.call(self.now, &TERMS, command);
        match self.connection.req_command(&call) {
            Ok(Value::ServerError(error)) => Err(format!("{SCRIPT_FAILED}{error:?}")),
            Ok(value) => Ok(value),
            Err(error) => Err(format!("{SCRIPT_FAILED}{error:?}")),
        }
    }

    fn acquire(&mut self, ticket: &str, position: Option<u64>, wait: bool) -> Result<Reply, Broken> {
        let max_queue = self.max_queue;
        self.call(Command::Acquire { ticket: id(ticket), position, wait, max_queue })
    }

    /// An acquire that has to be granted.
    fn granted(&mut self, ticket: &str) -> Result<Grant, Broken> {
        match self.acquire(ticket, None, true)? {
            Reply::Granted { fence, position } => Ok(Grant { fence, position }),
            other => Err(format!("{ticket} is not granted: {other:?}")),
        }
    }

    /// An acquire that has to wait.
    fn waits(&mut self, ticket: &str) -> Result<Place, Broken> {
        self.waits_at(ticket, None)
    }

    /// An acquire with a position that has to wait.
    fn waits_at(&mut self, ticket: &str, position: Option<u64>) -> Result<Place, Broken> {
        match self.acquire(ticket, position, true)? {
            Reply::Waiting { position, ahead, holder_ms, newest, reentered, next } => {
                Ok(Place { position, ahead, holder_ms, newest, reentered, next })
            }
            other => Err(format!("{ticket} does not wait: {other:?}")),
        }
    }

    /// A try that has to find the lock busy.
    fn busy(&mut self, ticket: &str) -> Result<Option<Next>, Broken> {
        match self.acquire(ticket, None, false)? {
            Reply::Busy { next } => Ok(next),
            other => Err(format!("{ticket} does not find the lock busy: {other:?}")),
        }
    }

    fn renew(&mut self, ticket: &str, fence: u64) -> Result<Reply, Broken> {
        self.call(Command::Renew { ticket: id(ticket), fence })
    }

    fn release(&mut self, ticket: &str, fence: u64) -> Result<Reply, Broken> {
        self.call(Command::Release { ticket: id(ticket), fence })
    }

    /// A release that has to end the lease; names the next grant if it is the caller's.
    fn released(&mut self, ticket: &str, fence: u64) -> Result<Option<Next>, Broken> {
        match self.release(ticket, fence)? {
            Reply::Released { next } => Ok(next),
            other => Err(format!("{ticket} is not released: {other:?}")),
        }
    }

    /// A renewal that has to succeed.
    fn renewed(&mut self, ticket: &str, fence: u64) -> Result<(), Broken> {
        match self.renew(ticket, fence)? {
            Reply::Renewed { .. } => Ok(()),
            other => Err(format!("{ticket} is not renewed: {other:?}")),
        }
    }

    /// A renewal or release that has to learn of a loss.
    fn lost(&mut self, reply: Reply) -> Result<(), Broken> {
        ensure(matches!(reply, Reply::Lost { .. }), &format!("a lost lease is answered {reply:?}"))
    }

    fn abandon(&mut self, ticket: &str) -> Result<Option<Next>, Broken> {
        match self.call(Command::Abandon { ticket: id(ticket) })? {
            Reply::Abandoned { next } => Ok(next),
            other => Err(format!("{other:?}")),
        }
    }

    fn evict(&mut self, fence: u64) -> Result<Reply, Broken> {
        self.call(Command::Evict { fence })
    }

    fn pass(&mut self, ms: u64) {
        self.now += ms * 1000;
    }

    fn clock_back(&mut self, ms: u64) {
        self.now -= ms * 1000;
    }

    fn tell(&mut self, command: &Cmd) -> Value {
        self.connection.req_command(command).expect("an answer from the test's server")
    }

    /// Takes a ring off a client's bell.
    fn pop(&mut self, client: &str) -> Option<String> {
        text(&self.tell(cmd("LPOP").arg(bell(client)))).map(str::to_owned)
    }

    fn lose(&mut self, key: &str) {
        self.tell(cmd("DEL").arg(key));
    }

    fn lose_all(&mut self) {
        self.tell(&cmd("FLUSHDB"));
    }

    fn record(&mut self) -> Result<Record, Broken> {
        let value = self.tell(cmd("GET").arg(LOCK));
        let record = text(&value).and_then(Record::parse);
        record.ok_or_else(|| format!("no record: {value:?}"))
    }

    fn holder(&mut self) -> Result<Option<TicketId>, Broken> {
        self.record().map(|record| record.holder)
    }

    /// Breaks off unless `ticket` holds the lock.
    fn held_by(&mut self, ticket: &str) -> Result<(), Broken> {
        equal(self.holder()?, Some(id(ticket)), "the holder")
    }

    /// Milliseconds until a key expires; minus 1 if it does not, minus 2 if there is no such key.
    fn life(&mut self, key: &str) -> i64 {
        match self.tell(cmd("PTTL").arg(key)) {
            Value::Int(life) => life,
            other => panic!("no expiry: {other:?}"),
        }
    }

    fn queue(&mut self) -> Vec<String> {
        match self.tell(cmd("ZRANGE").arg(QUEUE).arg(0).arg(-1)) {
            Value::Array(queue) => queue.iter().filter_map(text).map(str::to_owned).collect(),
            other => panic!("no queue: {other:?}"),
        }
    }

    /// Lets a client get the lock by a ring that it does not pick up: a holds and releases, `dead` is next.
    fn ring_unheard(&mut self, dead: &[&str], behind: &[&str]) -> Result<u64, Broken> {
        let held = self.granted(A)?;
        for ticket in dead.iter().chain(behind) {
            self.waits(ticket)?;
        }
        self.released(A, held.fence)?;
        self.held_by(dead[0])?;
        Ok(self.record()?.fence)
    }
}

/// A grant whose ring nobody picked up is passed over when its claim window ends.
fn a_dead_waiter_costs_one_claim_window(lock: &mut RawLock) -> Result<(), Broken> {
    lock.ring_unheard(&[B], &[C])?;
    lock.pass(CLAIM - 1);
    let place = lock.waits(C)?;
    equal(place.holder_ms, 1, "the time to the window's end")?;
    lock.pass(1);
    lock.granted(C).map(drop)
}

/// Whoever popped the bell has the lock, whatever its window; whoever deletes the bell takes it away.
fn the_claim_window_is_decided_by_the_bell(lock: &mut RawLock) -> Result<(), Broken> {
    let fence = lock.ring_unheard(&[B], &[C])?;
    equal(lock.pop("b"), Some(format!("{B} {fence}")), "the ring")?;
    lock.pass(CLAIM);
    lock.waits(C)?;
    lock.pass(LEASE - CLAIM - 1);
    lock.waits(C)?;
    lock.renewed(B, fence)
}

/// Only the ring of this very grant shows that nobody picked it up.
fn an_older_ring_does_not_pass_a_grant_over(lock: &mut RawLock) -> Result<(), Broken> {
    let fence = lock.ring_unheard(&[B], &[C])?;
    lock.pop("b");
    lock.tell(cmd("LPUSH").arg(bell("b")).arg(format!("{B} {}", fence - 1)));
    lock.pass(CLAIM);
    lock.waits(C).map(drop)
}

/// Whoever was passed over does not hear of its grant any more.
fn a_displaced_grant_rings_no_more(lock: &mut RawLock) -> Result<(), Broken> {
    lock.ring_unheard(&[B], &[C])?;
    lock.pass(CLAIM);
    lock.granted(C)?;
    equal(lock.pop("b"), None, "the bell of the displaced")
}

/// A grant that a reply names is taken for known: nobody passes it over, and its ring is gone.
fn naming_is_claiming(lock: &mut RawLock) -> Result<(), Broken> {
    let fence = lock.ring_unheard(&[B, B2], &[C])?;
    let named = Some(Next { ticket: id(B), fence });
    equal(lock.waits(B2)?.next, named, "the grant in the poll's reply")?;
    equal(lock.record()?.claim, None, "the claim window of a named grant")?;
    equal(lock.life(&bell("b")), -2, "the bell of a named grant")?;
    lock.pass(CLAIM);
    lock.waits(C)?;
    lock.renewed(B, fence)
}

/// Every reply names the current grant of the calling client.
fn every_reply_names_the_callers_grant(lock: &mut RawLock) -> Result<(), Broken> {
    let fence = lock.ring_unheard(&[B, B2], &[C])?;
    let named = Some(Next { ticket: id(B), fence });
    equal(lock.busy(B3)?, named.clone(), "try")?;
    equal(lock.waits(B2)?.next, named.clone(), "poll")?;
    equal(lock.renew(B3, fence - 1)?, Reply::Lost { next: named.clone() }, "renewal")?;
    equal(lock.release(B3, fence + 1)?, Reply::Lost { next: named.clone() }, "release")?;
    equal(lock.abandon(B2)?, named, "abandon")?;
    equal(lock.waits(C)?.next, None, "another's poll")
}

/// A client that polls for one ticket is not passed over with another: its own grant is named instead.
fn a_client_does_not_pass_itself_over(lock: &mut RawLock) -> Result<(), Broken> {
    let fence = lock.ring_unheard(&[B, B2], &[C])?;
    lock.pass(CLAIM);
    equal(lock.waits(B2)?.next, Some(Next { ticket: id(B), fence }), "the grant in the poll's reply")?;
    lock.held_by(B)
}

/// A client that takes the lock from its own lapsed grant is alive, so its tickets are not dropped for it.
fn a_client_does_not_suspect_itself(lock: &mut RawLock) -> Result<(), Broken> {
    lock.ring_unheard(&[B, B2], &[C])?;
    lock.pass(LEASE);
    lock.granted(B2)?;
    equal(lock.record()?.suspects.len(), 0, "suspects")
}

/// A renewal that comes after the lock went on is refused, and the new holder keeps the lock.
fn a_renewal_never_takes_the_lock_back(lock: &mut RawLock) -> Result<(), Broken> {
    let old = lock.granted(A)?;
    lock.pass(LEASE);
    lock.granted(B)?;
    let reply = lock.renew(A, old.fence)?;
    lock.lost(reply)?;
    lock.held_by(B)
}

/// A renewal is for one fence: the same ticket's later grant is another lease.
fn a_renewal_is_for_one_fence(lock: &mut RawLock) -> Result<(), Broken> {
    let old = lock.granted(A)?;
    lock.pass(LEASE);
    let between = lock.granted(B)?;
    lock.released(B, between.fence)?;
    let new = lock.granted(A)?;
    lock.pass(1_000);
    let until = lock.record()?.until;
    let reply = lock.renew(A, old.fence)?;
    equal(lock.record()?.until, until, "the end of the lease")?;
    lock.lost(reply)?;
    lock.renewed(A, new.fence)
}

/// A lease that lapsed is whole until somebody else is granted.
fn a_lapsed_lease_may_be_renewed_while_nobody_came(lock: &mut RawLock) -> Result<(), Broken> {
    let held = lock.granted(A)?;
    lock.pass(LEASE + 5_000);
    lock.renewed(A, held.fence)?;
    equal(lock.record()?.until, lock.now + LEASE * 1000, "the end of the lease")?;
    lock.busy(B).map(drop)
}

/// Renewal claims: a holder that renews has picked its ring up.
fn a_renewal_claims(lock: &mut RawLock) -> Result<(), Broken> {
    let fence = lock.ring_unheard(&[B], &[C])?;
    lock.renewed(B, fence)?;
    lock.pass(CLAIM);
    lock.waits(C)?;
    equal(lock.life(&bell("b")), -2, "the bell of a holder that renewed")
}

/// A release is for one fence: the same ticket's later grant is another lease.
fn a_release_is_for_one_fence(lock: &mut RawLock) -> Result<(), Broken> {
    let old = lock.granted(A)?;
    lock.pass(LEASE);
    let between = lock.granted(B)?;
    lock.released(B, between.fence)?;
    lock.granted(A)?;
    let reply = lock.release(A, old.fence)?;
    lock.held_by(A)?;
    lock.lost(reply)
}

/// A release is by the holder: a fence alone, which all may know, ends nothing.
fn a_release_is_by_the_holder(lock: &mut RawLock) -> Result<(), Broken> {
    let held = lock.granted(A)?;
    lock.release(B, held.fence)?;
    lock.held_by(A)
}

/// A release whose reply was lost is answered `already` when it is repeated, and hands over once.
fn a_repeated_release_is_answered_already(lock: &mut RawLock) -> Result<(), Broken> {
    let held = lock.granted(A)?;
    lock.waits(B)?;
    lock.released(A, held.fence)?;
    let fence = lock.record()?.fence;
    equal(lock.release(A, held.fence)?, Reply::Already { next: None }, "the repeated release")?;
    lock.held_by(B)?;
    equal(lock.record()?.fence, fence, "the fence after it")?;
    lock.released(B, fence)?;
    equal(lock.release(A, held.fence)?, Reply::Already { next: None }, "once more, when nobody holds")
}

/// A lease that lapsed and that nobody took is released like any other.
fn a_lapsed_lease_that_nobody_took_is_released(lock: &mut RawLock) -> Result<(), Broken> {
    let held = lock.granted(A)?;
    lock.pass(LEASE + 1);
    lock.released(A, held.fence).map(drop)
}

/// A lease that was taken away is never called released.
fn a_lost_lease_is_never_called_released(lock: &mut RawLock) -> Result<(), Broken> {
    let held = lock.granted(A)?;
    lock.pass(LEASE);
    let next = lock.granted(B)?;
    let reply = lock.release(A, held.fence)?;
    lock.lost(reply)?;
    lock.released(B, next.fence)?;
    let reply = lock.release(A, held.fence)?;
    lock.lost(reply)
}

/// A lease that was given before all data was lost is not called released, whether the record is new or missing.
fn a_lease_from_before_a_loss_of_data_is_lost(lock: &mut RawLock) -> Result<(), Broken> {
    let held = lock.granted(A)?;
    lock.lose_all();
    let reply = lock.release(A, held.fence)?;
    lock.lost(reply)?;
    lock.pass(1);
    lock.granted(B)?;
    let reply = lock.release(A, held.fence)?;
    lock.lost(reply)
}

/// A fence newer than all that the record knows is of a record that was lost, not of a lease that was released.
fn a_lease_from_the_future_is_lost(lock: &mut RawLock) -> Result<(), Broken> {
    lock.pass(10_000);
    let held = lock.granted(A)?;
    lock.lose_all();
    lock.clock_back(10_000);
    lock.granted(B)?;
    let reply = lock.release(A, held.fence)?;
    lock.lost(reply)
}

/// The newest 128 lost fences are remembered, and those that are not count as lost.
fn forgotten_fences_count_as_lost(lock: &mut RawLock) -> Result<(), Broken> {
    let first = lock.granted("a.0.10")?;
    let mut second = None;
    for n in 1..=130 {
        lock.pass(10);
        let grant = lock.granted(&format!("a.{n}.10"))?;
        second.get_or_insert(grant);
    }
    equal(lock.tell(cmd("ZCARD").arg(LOST)), Value::Int(128), "remembered fences")?;
    let reply = lock.release("a.0.10", first.fence)?;
    lock.lost(reply)?;
    let reply = lock.release("a.1.10", second.map_or(0, |grant| grant.fence))?;
    lock.lost(reply)
}

/// The lost list lives as long as an idle lock.
fn the_lost_list_expires(lock: &mut RawLock) -> Result<(), Broken> {
    lock.granted(A)?;
    lock.pass(LEASE);
    lock.granted(B)?;
    ensure(lock.life(LOST) > 0, "the lost list does not expire")
}

/// Fences ascend over a record that was lost.
fn fences_ascend_over_a_lost_record(lock: &mut RawLock) -> Result<(), Broken> {
    let mut newest = 0;
    for _ in 0..3 {
        let grant = lock.granted(A)?;
        ensure(grant.fence > newest, "a fence does not ascend")?;
        newest = grant.fence;
        lock.pass(1);
        lock.lose_all();
    }
    Ok(())
}

/// Fences ascend when the clock goes back, and within one microsecond.
fn fences_ascend_when_the_clock_goes_back(lock: &mut RawLock) -> Result<(), Broken> {
    let first = lock.granted(A)?;
    lock.released(A, first.fence)?;
    let second = lock.granted(A)?;
    ensure(second.fence > first.fence, "a fence does not ascend within a microsecond")?;
    lock.released(A, second.fence)?;
    lock.clock_back(10_000);
    let third = lock.granted(A)?;
    ensure(third.fence > second.fence, "a fence does not ascend when the clock goes back")
}

/// All numbers stand in all keys to the last digit.
fn numbers_are_exact(lock: &mut RawLock) -> Result<(), Broken> {
    let held = lock.granted(A)?;
    equal(held.fence, lock.now, "the fence")?;
    equal(held.position, lock.now, "the position")?;
    let place = lock.waits(B)?;
    equal(place.position, lock.now + 1, "the next position")?;
    let score = lock.tell(cmd("ZSCORE").arg(QUEUE).arg(B));
    let exact =
        text(&score).and_then(|score| score.parse::<f64>().ok()).is_some_and(|s| s == (lock.now + 1) as f64);
    ensure(exact, &format!("the score: {score:?}"))?;
    let record = lock.record()?;
    let until = lock.now + LEASE * 1000;
    equal((record.fence, record.until, record.born), (lock.now, until, lock.now), "fence, end and birth")?;
    equal((record.pos, record.place), (lock.now + 1, lock.now), "positions")?;
    lock.pass(LEASE);
    lock.waits(C)?;
    let record = lock.record()?;
    equal(record.claim, Some(lock.now + CLAIM * 1000), "the end of the claim window")?;
    equal(lock.pop("b"), Some(format!("{B} {}", lock.now)), "the ring")?;
    let score = lock.tell(cmd("ZSCORE").arg(LOST).arg(held.fence));
    ensure(text(&score).is_some(), "the lost fence is not spelled in full")
}

/// Positions ascend within one microsecond.
fn positions_ascend_within_a_microsecond(lock: &mut RawLock) -> Result<(), Broken> {
    let held = lock.granted(A)?;
    // Their names would order them the other way.
    let (d, c, b) = (lock.waits(D)?, lock.waits(C)?, lock.waits(B)?);
    ensure(held.position < d.position, "the first waiter has the holder's position")?;
    ensure(d.position < c.position && c.position < b.position, "waiters share a position")?;
    equal(lock.queue(), vec![D.to_owned(), C.to_owned(), B.to_owned()], "the queue")
}

/// Positions ascend over a record that was lost, so a newcomer does not get before those that come back.
fn positions_ascend_over_a_lost_record(lock: &mut RawLock) -> Result<(), Broken> {
    lock.granted(A)?;
    lock.waits(C)?;
    let place = lock.waits(B)?;
    lock.lose_all();
    lock.pass(1);
    lock.granted(D)?;
    lock.waits("d.2.60000")?;
    let back = lock.waits_at(B, Some(place.position))?;
    equal((back.position, back.ahead), (place.position, 0), "the place of the one that came back")
}

/// Positions ascend when the clock goes back, over grants as well as over waiters.
fn positions_ascend_when_the_clock_goes_back(lock: &mut RawLock) -> Result<(), Broken> {
    let first = lock.granted(A)?;
    lock.clock_back(10_000);
    let second = lock.waits(B)?;
    ensure(second.position > first.position, "a waiter has an older position than the holder")?;
    lock.lose_all();
    lock.pass(30_000);
    // Nobody ever waited here: what comes back is newer than all that the record knows.
    lock.waits_at(C, Some(lock.now + 5))?;
    let last = lock.waits(D)?;
    ensure(last.position > lock.now + 5, "a newcomer has an older position than one that came back")
}

/// A holder is told its ticket's place in the queue, as it was.
fn a_grant_tells_the_position(lock: &mut RawLock) -> Result<(), Broken> {
    let held = lock.granted(A)?;
    let place = lock.waits(B)?;
    lock.pass(5);
    lock.released(A, held.fence)?;
    equal(lock.granted(B)?.position, place.position, "the position of a grant by ring")
}

/// A holder that picked its grant up and outlived its lease is no suspect: it may well wait for its next one.
fn a_lapsed_holder_is_no_suspect(lock: &mut RawLock) -> Result<(), Broken> {
    lock.granted(A)?;
    lock.pass(LEASE);
    lock.granted(B)?;
    equal(lock.record()?.suspects.len(), 0, "suspects")
}

/// The tickets of a process that died are dropped with it: it costs one window, not one per ticket.
fn a_dead_process_costs_one_window_whatever_it_queued(lock: &mut RawLock) -> Result<(), Broken> {
    lock.ring_unheard(&[B, B2, B3], &[C])?;
    equal(lock.record()?.suspects.len(), 0, "suspects before")?;
    lock.pass(CLAIM);
    lock.granted(C)?;
    equal(lock.record()?.suspects, vec![Box::from("b")], "suspects")?;
    equal(lock.queue(), Vec::new(), "the queue")
}

/// A release passes suspects over, too.
fn a_release_passes_suspects_over(lock: &mut RawLock) -> Result<(), Broken> {
    lock.ring_unheard(&[B], &[C, B2, D])?;
    lock.pass(CLAIM);
    let held = lock.granted(C)?;
    equal(lock.queue(), vec![B2.to_owned(), D.to_owned()], "the queue")?;
    lock.released(C, held.fence)?;
    lock.held_by(D)
}

/// So does an abandon.
fn an_abandon_passes_suspects_over(lock: &mut RawLock) -> Result<(), Broken> {
    lock.ring_unheard(&[B], &[C, B2, D])?;
    lock.pass(CLAIM);
    lock.granted(C)?;
    lock.abandon(C)?;
    lock.held_by(D)
}

/// Suspects are dropped where they are in the way; behind the living they keep their places.
fn suspects_behind_the_living_keep_their_places(lock: &mut RawLock) -> Result<(), Broken> {
    lock.ring_unheard(&[B, B2], &[C, B3])?;
    lock.pass(CLAIM);
    lock.granted(C)?;
    equal(lock.queue(), vec![B3.to_owned()], "the queue")
}

/// A suspect that calls is trusted again, and comes in at its turn.
fn a_suspect_that_comes_back_is_trusted_again(lock: &mut RawLock) -> Result<(), Broken> {
    lock.ring_unheard(&[B], &[C, B2, D])?;
    lock.pass(CLAIM);
    let held = lock.granted(C)?;
    lock.waits(B2)?;
    equal(lock.record()?.suspects.len(), 0, "suspects")?;
    lock.released(C, held.fence)?;
    lock.held_by(B2)
}

/// A live client that was passed over comes back at its old position, before those that queued behind it.
fn re_entry_keeps_the_old_position(lock: &mut RawLock) -> Result<(), Broken> {
    let held = lock.granted(A)?;
    lock.waits(B)?;
    let place = lock.waits(B2)?;
    for ticket in [C, D] {
        lock.waits(ticket)?;
    }
    lock.released(A, held.fence)?;
    lock.pass(CLAIM);
    lock.granted(C)?;
    equal(lock.queue(), vec![D.to_owned()], "the queue")?;
    let back = lock.waits_at(B2, Some(place.position))?;
    ensure(back.reentered, "a re-entry is not called one")?;
    equal((back.position, back.ahead), (place.position, 0), "the place")?;
    equal(lock.queue(), vec![B2.to_owned(), D.to_owned()], "the queue")
}

/// Also when it comes back at the moment at which the lock is free: then it is first.
fn re_entry_into_a_free_lock_keeps_the_old_position(lock: &mut RawLock) -> Result<(), Broken> {
    lock.granted(A)?;
    let place = lock.waits(B)?;
    lock.waits(C)?;
    lock.tell(cmd("ZREM").arg(QUEUE).arg(B));
    lock.pass(LEASE);
    match lock.acquire(B, Some(place.position), true)? {
        Reply::Granted { position, .. } => equal(position, place.position, "the position"),
        other => Err(format!("the first is not granted: {other:?}")),
    }
}

/// A held lock has no expiry, nor has one that somebody waits for: no eviction policy for volatile keys takes it.
fn a_held_lock_does_not_expire(lock: &mut RawLock) -> Result<(), Broken> {
    let held = lock.granted(A)?;
    lock.released(A, held.fence)?;
    let held = lock.granted(A)?;
    equal(lock.life(LOCK), -1, "a held record's life")?;
    lock.waits(B)?;
    lock.renewed(A, held.fence)?;
    equal((lock.life(LOCK), lock.life(QUEUE)), (-1, -1), "the lives of record and queue")?;
    lock.released(A, held.fence)?;
    equal(lock.life(LOCK), -1, "the life of a record that was handed over")
}

/// A lock that nobody holds or waits for is forgotten after a while.
fn an_idle_lock_expires(lock: &mut RawLock) -> Result<(), Broken> {
    let held = lock.granted(A)?;
    lock.released(A, held.fence)?;
    let life = lock.life(LOCK);
    let idle = IDLE as i64;
    ensure(life > idle - 60_000 && life <= idle, &format!("an idle record's life: {life}"))
}

/// A bell that nobody hears is forgotten with the lease it is about.
fn a_bell_expires(lock: &mut RawLock) -> Result<(), Broken> {
    lock.ring_unheard(&[B], &[])?;
    let life = lock.life(&bell("b"));
    ensure(life > 0 && life <= LEASE as i64, &format!("a bell's life: {life}"))
}

/// A newcomer never gets a lock that somebody else has queued for, even if it is free.
fn a_newcomer_never_overtakes(lock: &mut RawLock) -> Result<(), Broken> {
    lock.granted(A)?;
    lock.waits(B)?;
    lock.pass(LEASE);
    let place = lock.waits(C)?;
    equal(place.ahead, 0, "how many are before the newcomer, the holder left out")?;
    lock.held_by(B)?;
    equal(lock.queue(), vec![C.to_owned()], "the queue")
}

/// A waiter that polls does not overtake either: its poll serves the first.
fn a_poll_serves_the_first(lock: &mut RawLock) -> Result<(), Broken> {
    lock.granted(A)?;
    lock.waits(B)?;
    lock.waits(C)?;
    lock.pass(LEASE);
    equal(lock.waits(C)?.ahead, 0, "how many are before the second")?;
    lock.held_by(B)
}

/// A try takes nothing from those that wait, even if the lock is free.
fn a_try_never_barges(lock: &mut RawLock) -> Result<(), Broken> {
    lock.granted(A)?;
    lock.waits(B)?;
    lock.busy(C)?;
    lock.pass(LEASE);
    lock.busy(C)?;
    lock.held_by(B)
}

/// A try leaves no ticket, whether it finds the lock held or hands it to another.
fn a_try_leaves_no_ticket(lock: &mut RawLock) -> Result<(), Broken> {
    lock.granted(A)?;
    lock.busy(C)?;
    equal(lock.queue(), Vec::new(), "the queue after a try on a held lock")?;
    lock.waits(B)?;
    lock.pass(LEASE);
    lock.busy(C)?;
    equal(lock.queue(), Vec::new(), "the queue after a try on a lapsed lock")
}

/// A full queue takes nobody in; those that are in it are not turned away.
fn a_full_queue_takes_nobody_in(lock: &mut RawLock) -> Result<(), Broken> {
    lock.max_queue = Some(1);
    lock.granted(A)?;
    lock.waits(B)?;
    let full = Reply::Full { next: None };
    equal(lock.acquire(C, None, true)?, full.clone(), "a newcomer")?;
    equal(lock.queue(), vec![B.to_owned()], "the queue")?;
    lock.waits(B)?;
    lock.max_queue = Some(0);
    lock.pass(LEASE);
    equal(lock.acquire(C, None, true)?, full, "a newcomer that hands the lock over")?;
    lock.held_by(B)?;
    equal(lock.queue(), Vec::new(), "the queue")
}

/// When the clock goes back under a lease, that lasts no longer than from now.
fn a_lease_ends_although_the_clock_went_back(lock: &mut RawLock) -> Result<(), Broken> {
    lock.granted(A)?;
    lock.waits(B)?;
    lock.clock_back(3_600_000);
    equal(lock.waits(B)?.holder_ms, LEASE, "the time until the lease lapses")?;
    // The poll has written the correction down: else the lease would start again with every poll.
    lock.pass(LEASE);
    lock.granted(B).map(drop)
}

/// Nor does a claim window, in proportion.
fn a_claim_window_ends_although_the_clock_went_back(lock: &mut RawLock) -> Result<(), Broken> {
    lock.ring_unheard(&[B], &[C])?;
    lock.clock_back(3_600_000);
    equal(lock.waits(C)?.holder_ms, CLAIM, "the time until the window ends")?;
    lock.pass(CLAIM);
    lock.granted(C).map(drop)
}

/// After a loss of all data the waiters come back in their old order, whoever polls first.
fn waiters_come_back_in_their_old_order_after_a_loss_of_data(lock: &mut RawLock) -> Result<(), Broken> {
    lock.granted(A)?;
    let (b, c) = (lock.waits(B)?, lock.waits(C)?);
    lock.lose_all();
    let back = lock.waits_at(C, Some(c.position))?;
    ensure(back.reentered, "a re-entry is not called one")?;
    equal(back.holder_ms, REGROUP, "the time to regroup")?;
    lock.pass(REGROUP - 1);
    equal(lock.waits_at(B, Some(b.position))?.ahead, 0, "how many are before the first")?;
    equal(lock.waits_at(C, Some(c.position))?.ahead, 1, "how many are before the second")?;
    lock.pass(1);
    lock.waits(C)?;
    lock.held_by(B)
}

/// A record that is lost alone is one of data that was lost, too: the queue says so.
fn nobody_is_granted_at_once_when_the_record_was_lost(lock: &mut RawLock) -> Result<(), Broken> {
    lock.granted(A)?;
    lock.waits(B)?;
    lock.lose(LOCK);
    lock.pass(1);
    lock.waits(C)?;
    lock.waits(B)?;
    lock.pass(REGROUP);
    lock.granted(B).map(drop)
}

/// And the queue says which position is the newest.
fn a_newcomer_is_behind_a_queue_that_lost_its_record(lock: &mut RawLock) -> Result<(), Broken> {
    lock.granted(A)?;
    let place = lock.waits(B)?;
    lock.lose(LOCK);
    lock.clock_back(5_000);
    let newcomer = lock.waits(C)?;
    ensure(newcomer.position > place.position, "a newcomer has an older position than one that is queued")?;
    equal(newcomer.ahead, 1, "how many are before the newcomer")
}

/// A grant is never unclaimed for longer than it lasts.
fn a_claim_window_is_no_longer_than_the_lease(lock: &mut RawLock) -> Result<(), Broken> {
    let held = lock.granted(A)?;
    lock.waits("b.1.500")?;
    lock.released(A, held.fence)?;
    let record = lock.record()?;
    equal(record.claim, Some(record.until), "the end of the claim window")
}

/// A ticket gets the lease it asks for, whoever grants it.
fn a_ticket_is_granted_its_own_lease(lock: &mut RawLock) -> Result<(), Broken> {
    let held = lock.granted("a.1.200")?;
    lock.waits("b.1.10000")?;
    lock.released("a.1.200", held.fence)?;
    equal(lock.record()?.until, lock.now + 10_000_000, "the end of the lease")?;
    lock.pass(CLAIM);
    lock.granted("c.1.200")?;
    equal(lock.record()?.until, lock.now + 200_000, "the end of the next lease")
}

/// A ticket that is granted is renewed by its own acquire: the call's reply is a new proof.
fn an_acquire_by_the_holder_proves_the_grant_anew(lock: &mut RawLock) -> Result<(), Broken> {
    let held = lock.granted(A)?;
    lock.pass(LEASE - 1);
    equal(lock.granted(A)?, held, "the grant")?;
    equal(lock.record()?.until, lock.now + LEASE * 1000, "the end of the lease")?;
    lock.pass(1);
    lock.waits(B).map(drop)
}

/// A ring that is answered by acquire is claimed.
fn an_acquire_claims_its_ring(lock: &mut RawLock) -> Result<(), Broken> {
    let fence = lock.ring_unheard(&[B], &[C])?;
    equal(lock.granted(B)?.fence, fence, "the fence")?;
    lock.pass(CLAIM);
    lock.waits(C).map(drop)
}

/// Whoever gives a ticket up that was granted meanwhile gives the lock up.
fn an_abandon_of_a_grant_passes_it_on(lock: &mut RawLock) -> Result<(), Broken> {
    lock.ring_unheard(&[B], &[C])?;
    lock.abandon(B)?;
    lock.held_by(C)?;
    equal(lock.pop("b"), None, "the bell of the one that gave up")
}

/// Whoever gives a ticket up is not in the queue any more.
fn an_abandon_leaves_the_queue(lock: &mut RawLock) -> Result<(), Broken> {
    lock.granted(A)?;
    lock.waits(B)?;
    lock.waits(C)?;
    lock.abandon(B)?;
    equal(lock.queue(), vec![C.to_owned()], "the queue")?;
    lock.held_by(A)
}

/// The last that gives up lets the lock be forgotten.
fn an_abandon_of_the_last_ticket_lets_the_lock_expire(lock: &mut RawLock) -> Result<(), Broken> {
    lock.waits_at(B, Some(lock.now - 5))?;
    equal(lock.life(LOCK), -1, "the life of a record that somebody waits for")?;
    lock.abandon(B)?;
    ensure(lock.life(LOCK) > 0, "an idle record does not expire")
}

/// An operator ends exactly the lease that he saw.
fn an_eviction_is_for_one_fence(lock: &mut RawLock) -> Result<(), Broken> {
    let held = lock.granted(A)?;
    lock.waits(B)?;
    equal(lock.evict(held.fence - 1)?, Reply::Changed, "an eviction of an older lease")?;
    lock.held_by(A)?;
    equal(lock.evict(held.fence)?, Reply::Evicted, "the eviction")?;
    lock.held_by(B)?;
    let reply = lock.renew(A, held.fence)?;
    lock.lost(reply)?;
    let reply = lock.release(A, held.fence)?;
    lock.lost(reply)
}

/// A release rings the next client on its own bell, and that client holds the lock when it hears.
fn a_release_rings_the_next_client(lock: &mut RawLock) -> Result<(), Broken> {
    let fence = lock.ring_unheard(&[B], &[C])?;
    equal((lock.pop("a"), lock.pop("c")), (None, None), "the bells of others")?;
    equal(lock.pop("b"), Some(format!("{B} {fence}")), "the bell of the next")?;
    lock.renewed(B, fence)
}

/// A grant to the calling client is in the reply and on no bell.
fn a_hand_over_within_a_client_rings_nobody(lock: &mut RawLock) -> Result<(), Broken> {
    let held = lock.granted(B)?;
    equal((lock.life(&bell("b")), lock.record()?.claim), (-2, None), "bell and claim window of a grant")?;
    lock.waits(B2)?;
    let next = lock.released(B, held.fence)?;
    equal(next, Some(Next { ticket: id(B2), fence: held.fence + 1 }), "the grant in the reply")?;
    equal((lock.life(&bell("b")), lock.record()?.claim), (-2, None), "bell and claim window of the next")
}

/// A poll of a waiter names the newest fence, so that older news can be told from newer.
fn a_poll_tells_the_newest_fence(lock: &mut RawLock) -> Result<(), Broken> {
    let fence = lock.ring_unheard(&[B], &[C])?;
    equal(lock.waits(C)?.newest, fence, "the newest fence")
}

/// A holder renews, releases and hands over on a server that is out of memory, and waiters are served.
fn holders_and_waiters_go_on_without_memory(lock: &mut RawLock) -> Result<(), Broken> {
    let held = lock.granted(A)?;
    for ticket in [B, C, D] {
        lock.waits(ticket)?;
    }
    lock.tell(cmd("CONFIG").arg("SET").arg("maxmemory").arg(1));
    lock.renewed(A, held.fence)?;
    lock.granted(A)?;
    lock.released(A, held.fence)?;
    lock.held_by(B)?;
    lock.pass(CLAIM);
    lock.granted(C)?;
    lock.pass(LEASE);
    lock.granted(D)?;
    lock.abandon(D)?;
    equal(lock.holder()?, None, "the holder")
}

/// A suspect is trusted again on a server that is out of memory.
fn a_suspect_comes_back_without_memory(lock: &mut RawLock) -> Result<(), Broken> {
    lock.ring_unheard(&[B], &[C, B2, D])?;
    lock.pass(CLAIM);
    let held = lock.granted(C)?;
    lock.tell(cmd("CONFIG").arg("SET").arg("maxmemory").arg(1));
    lock.waits(B2)?;
    lock.released(C, held.fence)?;
    lock.held_by(B2)
}

/// A bell of the next holder that is not ours to ring stops a release before it has changed anything.
fn a_foreign_bell_stops_a_release_before_it_changes_anything(lock: &mut RawLock) -> Result<(), Broken> {
    let held = lock.granted(A)?;
    lock.waits(B)?;
    lock.tell(cmd("SET").arg(bell("b")).arg("x"));
    let before = (lock.record()?, lock.queue());
    let reply = lock.release(A, held.fence);
    let named = matches!(&reply, Err(error) if error.contains(&format!("FOREIGN {}", bell("b"))));
    ensure(named, &format!("the foreign value is not named: {reply:?}"))?;
    equal((lock.record()?, lock.queue()), before, "record and queue")
}

/// So does a bell of the caller's own, which naming its grant deletes.
fn a_foreign_bell_stops_a_call_that_would_name_before_it_changes_anything(
    lock: &mut RawLock,
) -> Result<(), Broken> {
    lock.ring_unheard(&[B, B2], &[])?;
    lock.tell(cmd("SET").arg(bell("b")).arg("x"));
    let before = (lock.record()?, lock.queue());
    for reply in [lock.acquire(B3, None, true).map(drop), lock.abandon(B2).map(drop)] {
        let named = matches!(&reply, Err(error) if error.contains(&format!("FOREIGN {}", bell("b"))));
        ensure(named, &format!("the foreign value is not named: {reply:?}"))?;
        equal((lock.record()?, lock.queue()), before.clone(), "record and queue")?;
    }
    Ok(())
}

/// Every scenario with its name.
macro_rules! scenarios {
    ($($name:ident),* $(,)?) => {
        pub(crate) const SCENARIOS: &[(&str, Scenario)] = &[$((stringify!($name), $name)),*];
    };
}

scenarios! {
    a_dead_waiter_costs_one_claim_window,
    the_claim_window_is_decided_by_the_bell,
    an_older_ring_does_not_pass_a_grant_over,
    a_displaced_grant_rings_no_more,
    naming_is_claiming,
    every_reply_names_the_callers_grant,
    a_client_does_not_pass_itself_over,
    a_client_does_not_suspect_itself,
    a_renewal_never_takes_the_lock_back,
    a_renewal_is_for_one_fence,
    a_lapsed_lease_may_be_renewed_while_nobody_came,
    a_renewal_claims,
    a_release_is_for_one_fence,
    a_release_is_by_the_holder,
    a_repeated_release_is_answered_already,
    a_lapsed_lease_that_nobody_took_is_released,
    a_lost_lease_is_never_called_released,
    a_lease_from_before_a_loss_of_data_is_lost,
    a_lease_from_the_future_is_lost,
    forgotten_fences_count_as_lost,
    the_lost_list_expires,
    fences_ascend_over_a_lost_record,
    fences_ascend_when_the_clock_goes_back,
    numbers_are_exact,
    positions_ascend_within_a_microsecond,
    positions_ascend_over_a_lost_record,
    positions_ascend_when_the_clock_goes_back,
    a_grant_tells_the_position,
    a_lapsed_holder_is_no_suspect,
    a_dead_process_costs_one_window_whatever_it_queued,
    a_release_passes_suspects_over,
    an_abandon_passes_suspects_over,
    suspects_behind_the_living_keep_their_places,
    a_suspect_that_comes_back_is_trusted_again,
    re_entry_keeps_the_old_position,
    re_entry_into_a_free_lock_keeps_the_old_position,
    a_held_lock_does_not_expire,
    an_idle_lock_expires,
    a_bell_expires,
    a_newcomer_never_overtakes,
    a_poll_serves_the_first,
    a_try_never_barges,
    a_try_leaves_no_ticket,
    a_full_queue_takes_nobody_in,
    a_lease_ends_although_the_clock_went_back,
    a_claim_window_ends_although_the_clock_went_back,
    waiters_come_back_in_their_old_order_after_a_loss_of_data,
    nobody_is_granted_at_once_when_the_record_was_lost,
    a_newcomer_is_behind_a_queue_that_lost_its_record,
    a_claim_window_is_no_longer_than_the_lease,
    a_ticket_is_granted_its_own_lease,
    an_acquire_by_the_holder_proves_the_grant_anew,
    an_acquire_claims_its_ring,
    an_abandon_of_a_grant_passes_it_on,
    an_abandon_leaves_the_queue,
    an_abandon_of_the_last_ticket_lets_the_lock_expire,
    an_eviction_is_for_one_fence,
    a_release_rings_the_next_client,
    a_hand_over_within_a_client_rings_nobody,
    a_poll_tells_the_newest_fence,
    holders_and_waiters_go_on_without_memory,
    a_suspect_comes_back_without_memory,
    a_foreign_bell_stops_a_release_before_it_changes_anything,
    a_foreign_bell_stops_a_call_that_would_name_before_it_changes_anything,
}

#[test]
fn the_scripts_keep_every_rule() {
    let server = Server::start();
    let mut connection = connect(&server.unix_url()).expect("a connection to the test's server");
    let scripts = Sources::on_virtual_time().load(&mut connection);
    let broken: Vec<String> = SCENARIOS
        .iter()
        .filter_map(|(name, scenario)| {
            let result = scenario(&mut RawLock::new(&mut connection, &scripts));
            result.err().map(|broken| format!("{name}: {broken}"))
        })
        .collect();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}
