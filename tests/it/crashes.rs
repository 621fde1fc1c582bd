//! Holders and waiters that die, freeze, panic or leak: who is replaced when, and who learns of it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use redis_fifo_lock::{Error, FifoLock, LockClient};

use crate::support::child::Child;
use crate::support::eventually;
use crate::support::log_capture::LogCapture;
use crate::support::server::Server;

const LONG: Duration = Duration::from_secs(20);

fn lock(server: &Server, name: &str, lease: Duration, poll: Duration) -> FifoLock {
    let client = LockClient::connect(&server.url()).expect("a client");
    client.builder(name).lease(lease).poll(poll).build().expect("a lock")
}

fn waiting(lock: &FifoLock) -> u64 {
    lock.status().expect("a status").waiting
}

#[test]
fn a_killed_holder_is_replaced_within_its_lease_whatever_the_poll_is() {
    let server = Server::start();
    let mut holder = Child::spawn("hold", &[&server.url(), "x", "1000"]);
    let fence: u64 = holder.line(LONG).expect("its fence").parse().expect("a number");
    let lock = lock(&server, "x", Duration::from_secs(10), Duration::from_secs(30));
    thread::scope(|scope| {
        let waiters: Vec<_> = (0..5)
            .map(|_| {
                let waiter = scope.spawn(|| {
                    let guard = lock.lock().expect("its turn");
                    (Instant::now(), guard.fence().get(), guard.position())
                });
                thread::sleep(Duration::from_millis(30));
                waiter
            })
            .collect();
        eventually(LONG, "they queue", || waiting(&lock) == 5);
        // The last renewal may be as young as this.
        let killed = Instant::now();
        holder.sigkill();
        let mut entries: Vec<_> =
            waiters.into_iter().map(|waiter| waiter.join().expect("no panic")).collect();
        let took = entries[0].0.duration_since(killed);
        // Promised: the lease + 100 ms, on an idle machine.
        assert!(took < Duration::from_millis(1400), "{took:?}");
        entries.insert(0, (killed, fence, 0));
        assert!(entries.windows(2).all(|pair| pair[0].1 < pair[1].1 && pair[0].2 < pair[1].2), "{entries:?}");
    });
}

#[test]
fn a_holder_stopped_past_its_lease_learns_it_first_and_cannot_hurt_its_successor() {
    let server = Server::start();
    let mut holder = Child::spawn("hold", &[&server.url(), "x", "600"]);
    holder.line(LONG).expect("its fence");
    let lock = lock(&server, "x", Duration::from_secs(10), Duration::from_secs(30));
    holder.sigstop();
    let successor = lock.try_lock_for(LONG).expect("an answer").expect("its turn");
    holder.sigcont();
    holder.send("lost");
    assert_eq!(holder.line(LONG).as_deref(), Some("true"));
    holder.send("unlock");
    assert!(holder.line(LONG).expect("an answer").starts_with("Err(LeaseLost"));
    let status = lock.status().expect("a status");
    assert_eq!(status.fence, Some(successor.fence()));
    assert!(status.held && !successor.is_lost());
    successor.unlock().expect("untouched");
}

/// The dead cost the claim window and a poll once, not once per ticket, and never a lease.
#[test]
fn a_killed_process_with_eight_tickets_delays_the_next_by_one_claim_window() {
    let server = Server::start();
    let lock = lock(&server, "x", Duration::from_secs(60), Duration::from_secs(2));
    let held = lock.lock().expect("the lock");
    held.detach();
    let mut dead = Child::spawn("queue", &[&server.url(), "x", "60000", "8"]);
    assert_eq!(dead.line(LONG).as_deref(), Some("queued"));
    // Alternating with a second process: each of the two is suspected once.
    let mut also_dead = Child::spawn("queue", &[&server.url(), "x", "60000", "2"]);
    assert_eq!(also_dead.line(LONG).as_deref(), Some("queued"));
    thread::scope(|scope| {
        let live = scope.spawn(|| {
            let guard = lock.lock().expect("its turn");
            (Instant::now(), guard)
        });
        eventually(LONG, "it queues", || waiting(&lock) == 11);
        dead.sigkill();
        also_dead.sigkill();
        let released = Instant::now();
        held.unlock().expect("released");
        let (entered, guard) = live.join().expect("no panic");
        let took = entered.duration_since(released);
        assert!(took < 2 * Duration::from_millis(3500), "{took:?}: claim + poll + 500 ms for each of two");
        assert!(took > Duration::from_millis(900), "{took:?}: the window was not even given");
        assert_eq!(waiting(&lock), 0, "the dead are gone from the queue");
        guard.unlock().expect("released");
    });
}

#[test]
fn a_killed_waiter_delays_the_next_by_at_most_claim_and_poll() {
    let server = Server::start();
    let lock = lock(&server, "x", Duration::from_secs(60), Duration::from_secs(2));
    let held = lock.lock().expect("the lock");
    held.detach();
    let mut dead = Child::spawn("queue", &[&server.url(), "x", "60000", "8"]);
    assert_eq!(dead.line(LONG).as_deref(), Some("queued"));
    thread::scope(|scope| {
        let live = scope.spawn(|| {
            let guard = lock.lock().expect("its turn");
            (Instant::now(), guard)
        });
        eventually(LONG, "it queues", || waiting(&lock) == 9);
        dead.sigkill();
        let released = Instant::now();
        held.unlock().expect("released");
        let (entered, _guard) = live.join().expect("no panic");
        let took = entered.duration_since(released);
        assert!(took < Duration::from_millis(3500), "{took:?}");
    });
}

#[test]
fn a_panic_in_the_section_releases_the_lock() {
    let server = Server::start();
    let lock = lock(&server, "x", Duration::from_secs(60), Duration::from_secs(2));
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _guard = lock.lock().expect("the lock");
        panic!("in the section");
    }));
    assert!(panicked.is_err());
    assert!(lock.try_lock().expect("an answer").is_some());
}

#[test]
fn a_leaked_lease_panics_in_debug_builds_and_is_released_in_all() {
    let log = LogCapture::install();
    let server = Server::start();
    let name = "leaked-lease";
    let lock = lock(&server, name, Duration::from_secs(60), Duration::from_secs(2));
    let lease = lock.acquire().expect("the lock");
    let fence = lease.fence();
    let leaked = catch_unwind(AssertUnwindSafe(|| drop(lease)));
    assert_eq!(leaked.is_err(), cfg!(debug_assertions));
    assert!(!lock.status().expect("a status").held);
    assert_eq!(log.records_containing(&format!("lease on `{name}` (fence {fence}) was dropped")).len(), 1);
    // While unwinding already, it must not abort the process.
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let _lease = lock.acquire().expect("the lock");
        panic!("with a lease in hand");
    }));
    assert_eq!(unwound.unwrap_err().downcast_ref::<&str>(), Some(&"with a lease in hand"));
    assert!(!lock.status().expect("a status").held);
}

/// The last handle says so, `max_hold` ends it, and the thread is gone.
#[test]
fn a_forgotten_guard_is_bounded_by_max_hold() {
    let log = LogCapture::install();
    let server = Server::start();
    let name = "forgotten-guard";
    let client = LockClient::connect(&server.url()).expect("a client");
    let doomed = client
        .builder(name)
        .lease(Duration::from_millis(300))
        .max_hold(Duration::from_secs(1))
        .build()
        .expect("a lock");
    let start = Instant::now();
    std::mem::forget(doomed.lock().expect("the lock"));
    drop((doomed, client));
    assert_eq!(log.records_containing(&format!("the lease on `{name}`")).len(), 1, "the last handle went");
    let next = lock(&server, name, Duration::from_secs(10), Duration::from_secs(30));
    let guard = next.try_lock_for(Duration::from_secs(5)).expect("an answer").expect("its turn");
    let took = start.elapsed();
    assert!(took > Duration::from_millis(900) && took < Duration::from_millis(1800), "{took:?}");
    eventually(LONG, "the loss is told once", || {
        log.records_containing("max_hold is over").iter().filter(|r| r.message.contains(name)).count() == 1
    });
    drop(guard);
}

#[test]
fn a_guard_ends_its_renewal_wherever_it_is_dropped() {
    let server = Server::start();
    let lock = lock(&server, "x", Duration::from_millis(500), Duration::from_secs(2));
    let moved = lock.lock().expect("the lock");
    moved.detach();
    thread::spawn(move || drop(moved)).join().expect("no panic");
    assert!(!lock.status().expect("a status").held);
    let early = || -> Result<(), Error> {
        let _guard = lock.lock()?;
        Err(Error::Config("an early return".into()))
    };
    assert!(early().is_err());
    assert!(!lock.status().expect("a status").held);
    let mut many = vec![lock.lock().expect("the lock")];
    many.clear();
    assert!(!lock.status().expect("a status").held);
}
