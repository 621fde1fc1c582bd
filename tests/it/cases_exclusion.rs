//! Who may be inside: cases A01 to A03 and A07 of known bugs of other locks. Release and renewal act on exactly one
//! lease, whatever is late, lost, repeated or racing.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use redis_fifo_lock::{Error, LockGuard};

use crate::support::child::Child;
use crate::support::eventually;
use crate::support::log_capture::LogCapture;
use crate::support::proxy::{Proxy, Swallow};
use crate::support::seen::{Seen, client};
use crate::support::server::Server;

/// Much longer than anything here takes.
const LONG: Duration = Duration::from_secs(20);

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn is_lost<T>(result: &Result<T, Error>) -> bool {
    matches!(result, Err(Error::LeaseLost { .. }))
}

fn is_script(request: &[u8]) -> bool {
    request.windows(7).any(|part| part == b"EVALSHA")
}

/// How often the library logged the loss of a lease on `name`.
fn losses(log: &LogCapture, name: &str) -> usize {
    let of_lock = log.records_containing(&format!("`{name}`"));
    of_lock.iter().filter(|record| record.message.contains("was lost")).count()
}

/// A01: the holder's process stood still until its lease was granted to the next; its release changes nothing.
#[test]
fn late_release_of_a_frozen_process_leaves_the_successor_alone() {
    let server = Server::start();
    let seen = Seen::of(&server, "late");
    let mut frozen = Child::spawn("hold", &[&server.url(), "late", "300"]);
    let old: u64 = frozen.line(LONG).expect("its fence").parse().expect("a number");
    frozen.sigstop();

    let locks = client(&server.url());
    let successor = locks.fifo_lock("late").and_then(|lock| lock.lock()).expect("the lock");
    frozen.sigcont();
    assert!(frozen.send("lost"));
    assert_eq!(frozen.line(LONG).as_deref(), Some("true"));
    assert!(frozen.send("unlock"));
    assert!(frozen.line(LONG).expect("an answer").starts_with("Err(LeaseLost"));

    assert!(old < successor.fence().get());
    assert_eq!(seen.held_with(), Some(successor.fence().get()));
    let third = client(&server.url()).fifo_lock("late").expect("a lock");
    assert!(third.try_lock().expect("an answer").is_none());
    successor.unlock().expect("the successor's own release");
    assert!(third.try_lock().expect("an answer").is_some());
}

/// A01: the release itself is held up by the network until the lease was granted to the next.
#[test]
fn release_that_arrives_late_leaves_the_successor_alone() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let seen = Seen::of(&server, "slow");
    let slow = client(&proxy.url()).builder("slow").lease(ms(400)).build().expect("a lock");
    let holder = slow.lock().expect("the lock");
    proxy.freeze();
    let release = thread::spawn(move || holder.unlock());

    let successor = client(&server.url()).fifo_lock("slow").and_then(|lock| lock.lock()).expect("the lock");
    let calls = server.command_calls("evalsha");
    assert!(proxy.counts().frozen > 0, "the release was not on its way");
    proxy.thaw();
    let released = release.join().expect("no panic");
    assert!(is_lost(&released), "{released:?}");
    eventually(LONG, "the release arrives", || server.command_calls("evalsha") > calls);
    assert_eq!(seen.held_with(), Some(successor.fence().get()));
    successor.unlock().expect("the successor's own release");
}

/// A02: one handle in many hands. A third of the holders is evicted inside, a third lets its lease lapse: each of
/// them, and nobody else, is told so by its own release, and nobody ever ends the lease of another.
#[test]
fn guards_of_one_handle_are_independent_owners() {
    const THREADS: usize = 16;
    const ROUNDS: usize = 6;
    let server = Server::start();
    let locks = client(&server.url());
    // Waiters of a client do not ask how long each other's leases are: a short poll notices soon when a short one lapses.
    let builder = locks.builder("shared").poll(ms(50));
    let shared = builder.clone().build().expect("a lock");
    // A holder that takes no notice of its end: renewed for 80 ms, lapsed 60 ms later at most.
    let lapsing = builder.lease(ms(60)).max_hold(ms(80)).build().expect("a lock");
    let inside = AtomicUsize::new(0);
    let grants = Mutex::new(Vec::new());

    let enter = |guard: &LockGuard, seen: &Seen| {
        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders");
        let record = seen.record().expect("a record");
        assert_eq!(record.fence, guard.fence().get());
        let ticket = record.holder.expect("a holder").to_string();
        grants.lock().expect("no panic").push((record.fence, ticket));
        inside.fetch_sub(1, Ordering::SeqCst);
    };
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (shared, lapsing, server, enter) = (&shared, &lapsing, &server, &enter);
            scope.spawn(move || {
                let seen = Seen::of(server, "shared");
                for round in 0..ROUNDS {
                    let kind = (thread + round) % 3;
                    let guard = if kind == 2 { lapsing.lock() } else { shared.lock() }.expect("the lock");
                    let fence = guard.fence().get();
                    match kind {
                        0 => {
                            enter(&guard, &seen);
                            guard.unlock().expect("nobody took this lease away");
                        }
                        1 => {
                            enter(&guard, &seen);
                            assert!(shared.evict(guard.fence()).expect("an answer"));
                            let released = guard.unlock();
                            assert!(is_lost(&released), "evicted: {released:?}");
                        }
                        _ => {
                            // As long as others wait, a lapsed lease goes to one of them.
                            let newest = || seen.record().map(|record| record.fence);
                            eventually(LONG, "the lease goes to the next", || {
                                newest() != Some(fence) || seen.waiting() == 0
                            });
                            let granted_on = newest() != Some(fence);
                            let released = guard.unlock();
                            assert!(is_lost(&released) || !granted_on, "lapsed: {released:?}");
                        }
                    }
                }
            });
        }
    });

    let grants = grants.into_inner().expect("no panic");
    assert_eq!(grants.len(), THREADS * ROUNDS * 2 / 3);
    assert!(grants.is_sorted_by(|a, b| a.0 < b.0), "fences must ascend: {grants:?}");
    let tickets: HashSet<&str> = grants.iter().map(|(_, ticket)| ticket.as_str()).collect();
    assert_eq!(tickets.len(), grants.len(), "an owner's name was used twice");
    assert_eq!(Seen::of(&server, "shared").waiting(), 0);
    assert!(shared.try_lock().expect("an answer").is_some());
}

/// A03: the record is gone and the lock has been in other hands since; the old holder's renewals do not bring its lease
/// back, and it learns of that by itself.
#[test]
fn renewal_does_not_bring_a_vanished_lease_back() {
    let server = Server::start();
    let seen = Seen::of(&server, "gone");
    let lock = client(&server.url()).builder("gone").lease(ms(1200)).build().expect("a lock");
    let old = lock.lock().expect("the lock");
    let alarm = old.on_lost();
    seen.lose_record();
    let other = client(&server.url()).fifo_lock("gone").expect("a lock");
    let between = other.try_lock().expect("an answer").expect("nobody holds it");
    assert!(old.fence() < between.fence());
    between.unlock().expect("its own release");

    // A renewal is due every 300 ms: the refusal is what tells, long before the lease runs out.
    assert_eq!(alarm.recv_timeout(ms(1000)), Ok(()));
    assert!(old.is_lost());
    let calls = server.command_calls("evalsha");
    thread::sleep(ms(700));
    assert_eq!(server.command_calls("evalsha"), calls, "one refusal is final");
    assert_eq!(seen.holder(), None);
    let released = old.unlock();
    assert!(is_lost(&released), "{released:?}");
}

/// A03: a renewal that is still on its way when the lock changes hands arrives for nothing.
#[test]
fn renewal_that_arrives_after_the_release_takes_nothing_back() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let seen = Seen::of(&server, "belated");
    let lock = client(&proxy.url()).builder("belated").lease(ms(1200)).build().expect("a lock");
    for next_holder in [false, true] {
        let guard = lock.lock().expect("the lock");
        let renewal = proxy.swallow_next_reply_to(Swallow::HoldRequest, is_script);
        eventually(LONG, "the renewal is on its way", || renewal.happened());
        guard.unlock().expect("its own release");
        let other = client(&server.url()).fifo_lock("belated").expect("a lock");
        let next = next_holder.then(|| other.try_lock().expect("an answer").expect("nobody holds it"));

        let before = seen.record();
        let calls = server.command_calls("evalsha");
        proxy.release_held();
        eventually(LONG, "the renewal arrives", || server.command_calls("evalsha") > calls);
        assert_eq!(seen.record(), before);
        assert_eq!(seen.held_with(), next.as_ref().map(|guard| guard.fence().get()));
    }
}

/// A07: the refusal of a renewal that the release overtook is no loss.
#[test]
fn renewal_overtaken_by_its_release_raises_no_alarm() {
    let log = LogCapture::install();
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let lock = client(&proxy.url()).builder("overtaken").lease(ms(4000)).build().expect("a lock");
    let guard = lock.lock().expect("the lock");
    let alarm = guard.on_lost();
    let renewal = proxy.swallow_next_reply_to(Swallow::HoldRequest, is_script);
    eventually(LONG, "the renewal is on its way", || renewal.happened());
    guard.unlock().expect("its own release");
    let calls = server.command_calls("evalsha");
    // The renewal thread listens for a second: it gets the refusal.
    proxy.release_held();
    eventually(LONG, "the renewal arrives", || server.command_calls("evalsha") > calls);
    assert!(lock.lock().expect("the lock").unlock().is_ok());
    assert!(alarm.recv_timeout(LONG).is_err_and(|error| error.is_disconnected()));
    thread::sleep(ms(100));
    assert_eq!(losses(log, "overtaken"), 0);
}

/// A03, A07: releases at about the time at which a renewal is due, again and again: no false alarm, no holder left.
#[test]
fn releases_that_race_renewals_are_all_clean() {
    const LOCKS: u64 = 16;
    const ROUNDS: u64 = 8;
    let log = LogCapture::install();
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    // Long ways, so that many a renewal is under way when the release is sent.
    proxy.delay(ms(5));
    let locks = client(&proxy.url());
    thread::scope(|scope| {
        for number in 0..LOCKS {
            let (locks, server) = (&locks, &server);
            scope.spawn(move || {
                let name = format!("racing-{number}");
                let seen = Seen::of(server, &name);
                let lock = locks.builder(&name).lease(ms(1000)).build().expect("a lock");
                for round in 0..ROUNDS {
                    let guard = lock.lock().expect("the lock");
                    let alarm = guard.on_lost();
                    // The renewal is sent 250 ms after the call that took the lock, which took 10 ms.
                    thread::sleep(ms(228 + (number + 3 * round) % 20));
                    guard.unlock().expect("its own release");
                    assert_eq!(seen.holder(), None);
                    assert!(alarm.try_recv().is_err_and(|error| error.is_disconnected()));
                }
                thread::sleep(ms(300));
                assert_eq!(seen.holder(), None);
            });
        }
    });
    assert_eq!((0..LOCKS).map(|number| losses(log, &format!("racing-{number}"))).sum::<usize>(), 0);
    let renewals = server.command_calls("evalsha").saturating_sub(2 * LOCKS * ROUNDS);
    assert!(renewals > LOCKS, "only {renewals} renewals were sent: nothing raced");
}
