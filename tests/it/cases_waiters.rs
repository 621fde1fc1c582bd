//! Waiters that are gone: cases A12 and A13 of known bugs of other locks. The queue goes on past the dead, and those that
//! gave up leave nothing behind.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use redis::cmd;
use redis_fifo_lock::{Error, FifoLock};

use crate::support::child::Child;
use crate::support::proxy::{Proxy, Swallow};
use crate::support::seen::{Seen, client, take};
use crate::support::server::Server;
use crate::support::{SetOnDrop, eventually};

/// Much longer than anything here takes.
const LONG: Duration = Duration::from_secs(20);
/// How much later than promised a busy machine may do something: much less than what a failure costs.
const SLACK: Duration = ms(3000);
/// The claim window and the poll of these tests, and of the roles of their children.
const SHORT: Duration = ms(300);

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A lock of a client of its own, with short windows.
fn quick(server: &Server, name: &str, lease: Duration) -> FifoLock {
    let builder = client(&server.url()).builder(name).lease(lease);
    builder.claim(SHORT.min(lease)).poll(SHORT).build().expect("a lock")
}

/// The fence that a child says when it is in.
fn fence_of(child: &Child) -> u64 {
    child.line(LONG).expect("its fence").parse().expect("a number")
}

/// A12: crowds that wait in three processes die; whoever stands behind them waits for a claim window and a poll for each
/// process, whatever the number of its tickets and the lease.
#[test]
fn dead_waiters_cost_a_claim_window_per_process() {
    const CROWDS: usize = 3;
    const CROWD: usize = 5;
    let server = Server::start();
    let seen = Seen::of(&server, "dead");
    let holder = quick(&server, "dead", ms(30_000)).lock().expect("the lock");
    let mut crowds: Vec<Child> = (1..=CROWDS)
        .map(|number| {
            let crowd = Child::spawn("queue", &[&server.url(), "dead", "30000", &CROWD.to_string()]);
            assert_eq!(crowd.line(LONG).as_deref(), Some("queued"));
            assert_eq!(seen.waiting(), number * CROWD);
            crowd
        })
        .collect();
    let live = quick(&server, "dead", ms(30_000));
    thread::scope(|scope| {
        let waiter = scope.spawn(|| take(&live));
        seen.wait_for_queue(CROWDS * CROWD + 1);
        crowds.iter_mut().for_each(Child::sigkill);
        eventually(LONG, "the server has seen their end", || server.blocked_clients() <= 1);
        let start = Instant::now();
        holder.unlock().expect("its own release");
        let guard = waiter.join().expect("no panic");
        let bound = (SHORT + SHORT) * u32::try_from(CROWDS).expect("a few");
        assert!(start.elapsed() < bound + SLACK, "{:?}", start.elapsed());
        assert_eq!(seen.waiting(), 0);
        guard.unlock().expect("its own release");
    });
}

/// A12: the holder dies, and the waiters behind it die with it: one lease for the holder, a window for the others.
#[test]
fn waiter_behind_a_dead_holder_and_dead_waiters_waits_for_one_lease() {
    let server = Server::start();
    let seen = Seen::of(&server, "wiped out");
    // Spelled as in keys.
    let queue = "fifo:{wiped%20out}:queue";
    let waiting = || seen.query::<usize>(cmd("ZCARD").arg(queue));
    let mut holder = Child::spawn("hold", &[&server.url(), "wiped out", "600"]);
    fence_of(&holder);
    let mut crowd = Child::spawn("queue", &[&server.url(), "wiped out", "600", "4"]);
    assert_eq!(crowd.line(LONG).as_deref(), Some("queued"));
    let live = quick(&server, "wiped out", ms(600));
    thread::scope(|scope| {
        let waiter = scope.spawn(|| take(&live));
        eventually(LONG, "the live waiter is queued", || waiting() == 5);
        crowd.sigkill();
        holder.sigkill();
        let start = Instant::now();
        waiter.join().expect("no panic").unlock().expect("its own release");
        assert!(start.elapsed() < ms(600) + SHORT + SHORT + SLACK, "{:?}", start.elapsed());
    });
}

/// A12: a waiter's machine vanishes, so that the server goes on taking it for a listener and hands it the ring. Nobody can
/// tell that from a holder that crashed at once: it costs that waiter's lease, no more.
#[test]
fn vanished_waiter_costs_its_lease_at_most() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let seen = Seen::of(&server, "vanished");
    let holder = quick(&server, "vanished", ms(30_000)).lock().expect("the lock");
    let vanished = client(&proxy.url()).builder("vanished").lease(ms(1000)).build().expect("a lock");
    let live = quick(&server, "vanished", ms(30_000));
    thread::scope(|scope| {
        let gone = scope.spawn(|| vanished.try_lock_for(ms(3000)).map(|guard| guard.is_some()));
        seen.wait_for_queue(1);
        let waiter = scope.spawn(|| take(&live));
        seen.wait_for_queue(2);
        eventually(LONG, "both listen", || server.blocked_clients() == 2);
        proxy.freeze();
        let start = Instant::now();
        holder.unlock().expect("its own release");
        let guard = waiter.join().expect("no panic");
        assert!(start.elapsed() < ms(1000) + SHORT + SLACK, "{:?}", start.elapsed());
        assert!(!matches!(gone.join().expect("no panic"), Ok(true)), "a grant out of nowhere");
        guard.unlock().expect("its own release");
    });
}

/// A13: two hundred waiters with deadlines of 1 to 50 ms on a lock that changes hands every 5 ms leave nothing behind.
#[test]
fn waiters_that_gave_up_leave_no_ticket_and_no_grant() {
    const THREADS: u64 = 20;
    const ROUNDS: u64 = 10;
    let server = Server::start();
    let seen = Seen::of(&server, "gave-up");
    let clients = [client(&server.url()), client(&server.url())];
    let over = AtomicBool::new(false);
    let (granted, gave_up) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            let lock = client(&server.url()).fifo_lock("gave-up").expect("a lock");
            while !over.load(Ordering::SeqCst) {
                let guard = take(&lock);
                thread::sleep(ms(5));
                guard.unlock().expect("its own release");
            }
        });
        let waiters: Vec<_> = (0..THREADS)
            .map(|thread| {
                let lock = clients[usize::from(thread % 2 == 0)].fifo_lock("gave-up").expect("a lock");
                let (granted, gave_up) = (&granted, &gave_up);
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let wait = ms(1 + (thread * 17 + round * 31) % 50);
                        match lock.try_lock_for(wait) {
                            Ok(Some(guard)) => {
                                guard.unlock().expect("its own release");
                                granted.fetch_add(1, Ordering::SeqCst);
                            }
                            // On a busy machine, not even a connection may come in time.
                            Ok(None) | Err(Error::Redis { .. } | Error::Pool { .. }) => {
                                gave_up.fetch_add(1, Ordering::SeqCst);
                            }
                            Err(other) => panic!("{other}"),
                        }
                    }
                })
            })
            .collect();
        let _over = SetOnDrop(&over);
        waiters.into_iter().for_each(|waiter| waiter.join().expect("no panic"));
    });
    // Both ways out were taken.
    let (granted, gave_up) = (granted.into_inner(), gave_up.into_inner());
    assert!(granted > 0 && gave_up > 0, "{granted} granted, {gave_up} gave up");
    let start = Instant::now();
    let next = client(&server.url()).fifo_lock("gave-up").and_then(|lock| lock.lock()).expect("the lock");
    assert!(start.elapsed() < SLACK, "{:?}", start.elapsed());
    next.unlock().expect("its own release");
    eventually(SLACK, "only the record and its past are left", || {
        server.keys("*").iter().all(|key| *key == seen.key("lock") || *key == seen.key("lost"))
    });
    assert_eq!(seen.holder(), None);
}

/// A13: the server stands still when a waiter's deadline comes, and the lock is released meanwhile: the grant that finds
/// nobody goes on at once, although its lease is long.
#[test]
fn grant_that_comes_after_the_deadline_goes_on_at_once() {
    let server = Server::start();
    let seen = Seen::of(&server, "too-late");
    let lock = |name| client(&server.url()).builder(name).lease(ms(30_000)).build().expect("a lock");
    let holder = lock("too-late").lock().expect("the lock");
    let late = lock("too-late");
    let next = lock("too-late");
    // The connection is there before the server stands still.
    assert!(next.try_lock().expect("an answer").is_none());
    thread::scope(|scope| {
        let start = Instant::now();
        let late = scope.spawn(|| late.try_lock_for(ms(500)).map(|guard| guard.is_some()));
        seen.wait_for_queue(1);
        server.freeze();
        let release = scope.spawn(|| holder.unlock());
        let gave_up = late.join().expect("no panic");
        assert!(!matches!(gave_up, Ok(true)), "a grant out of nowhere");
        let waited = start.elapsed();
        assert!(waited >= ms(500) && waited < ms(500) + SLACK, "{waited:?}");
        thread::sleep(ms(300));
        server.thaw();
        release.join().expect("no panic").expect("its own release");
        let start = Instant::now();
        let guard = next.try_lock_for(LONG).expect("an answer").expect("the lock");
        assert!(start.elapsed() < ms(1000) + SLACK, "{:?}", start.elapsed());
        guard.unlock().expect("its own release");
    });
    assert_eq!((seen.waiting(), seen.holder()), (0, None));
}

/// A13: the server is gone when a waiter's deadline comes. That is no timeout, and nothing is left of the waiter when the
/// server is back with all its data.
#[test]
fn deadline_in_an_outage_is_an_error_and_leaves_nothing() {
    let server = Server::builder().aof(true).start();
    let holder = client(&server.url()).builder("outage").lease(ms(30_000)).build().expect("a lock");
    let holder = holder.lock().expect("the lock");
    let lock = client(&server.url()).fifo_lock("outage").expect("a lock");
    thread::scope(|scope| {
        let seen = Seen::of(&server, "outage");
        let start = Instant::now();
        let late = scope.spawn(|| lock.try_lock_for(ms(1500)).map(|guard| guard.is_some()));
        seen.wait_for_queue(1);
        eventually(LONG, "it listens", || server.blocked_clients() == 1);
        server.kill();
        let gave_up = late.join().expect("no panic");
        assert!(matches!(gave_up, Err(Error::Redis { .. })), "{gave_up:?}");
        assert!(start.elapsed() < ms(1500) + SLACK, "{:?}", start.elapsed());
    });
    server.start_again();
    Seen::of(&server, "outage").wait_for_queue(0);
    holder.unlock().expect("its own release");
    assert!(lock.try_lock().expect("an answer").is_some());
}

/// A13: a ticket is passed over because nobody waits for it; the message that says so is late, and its owner comes back
/// meanwhile. What he gets then is not taken from him by that message.
#[test]
fn ticket_that_was_passed_over_keeps_what_it_gets_later() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let seen = Seen::of(&server, "back");
    let holder = client(&server.url()).fifo_lock("back").and_then(|lock| lock.lock()).expect("the lock");
    let lock = client(&proxy.url()).fifo_lock("back").expect("a lock");
    let ticket = lock.enqueue().expect("a ticket");
    let inside = AtomicUsize::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            let _guard = take(&lock);
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders");
            inside.fetch_sub(1, Ordering::SeqCst);
        });
        seen.wait_for_queue(2);
        eventually(LONG, "the waiter listens", || server.blocked_clients() == 1);
        let passed_over = proxy.swallow_next_reply("EVALSHA", Swallow::HoldRequest);
        holder.unlock().expect("its own release");
        eventually(LONG, "the ticket is passed over", || passed_over.happened());
        let guard = ticket.wait_for(LONG).expect("an answer").expect("the lock");
        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders");
        let calls = server.command_calls("evalsha");
        proxy.release_held();
        eventually(LONG, "the message arrives", || server.command_calls("evalsha") > calls);
        thread::sleep(ms(100));
        assert_eq!(seen.held_with(), Some(guard.fence().get()), "it went to somebody else");
        inside.fetch_sub(1, Ordering::SeqCst);
        guard.unlock().expect("its own release");
    });
    assert_eq!((seen.waiting(), seen.holder()), (0, None));
}
