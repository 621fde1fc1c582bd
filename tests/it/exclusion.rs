//! One holder at a time, in order of arrival, with ascending fences: across threads and processes.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use redis_fifo_lock::{Error, FifoLock, LockClient};

use crate::support::child::Child;
use crate::support::eventually;
use crate::support::overlap::{Journal, Section};
use crate::support::server::Server;

const LONG: Duration = Duration::from_secs(20);

fn lock(server: &Server, name: &str, lease: Duration) -> FifoLock {
    let client = LockClient::connect(&server.url()).expect("a client");
    client.builder(name).lease(lease).build().expect("a lock")
}

fn waiting(lock: &FifoLock) -> u64 {
    lock.status().expect("a status").waiting
}

#[test]
fn thirty_two_threads_in_four_processes_never_overlap_and_keep_their_order() {
    let server = Server::start();
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().to_str().expect("a path");
    let mut children: Vec<Child> =
        (0..4).map(|_| Child::spawn("rounds", &[&server.url(), "x", "8", "200", path])).collect();
    let outsider = lock(&server, "x", Duration::from_secs(10));
    let done = AtomicBool::new(false);
    let barged = AtomicUsize::new(0);
    thread::scope(|scope| {
        // Whoever only tries is let in at no time when anybody is queued, before and after.
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let before = waiting(&outsider);
                if let Some(guard) = outsider.try_lock().expect("an answer") {
                    let section = Section::enter(dir.path(), "outsider");
                    let queued = waiting(&outsider);
                    drop(section);
                    drop(guard);
                    // Those who came while it was held do not count; those who were there before do.
                    if before > 0 && queued >= before {
                        barged.fetch_add(1, Ordering::Relaxed);
                    }
                }
                thread::sleep(Duration::from_millis(3));
            }
        });
        for child in &mut children {
            assert_eq!(child.line(Duration::from_secs(120)).as_deref(), Some("done"));
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(Section::violations(dir.path()), Vec::<String>::new());
    let journal = Journal::at(dir.path().join("journal")).read();
    assert_eq!(journal.len(), 4 * 8 * 200);
    for pair in journal.windows(2) {
        assert!(pair[0].fence < pair[1].fence, "fences ascend: {pair:?}");
        assert!(pair[0].position < pair[1].position, "first come, first served: {pair:?}");
    }
    assert_eq!(barged.load(Ordering::Relaxed), 0, "try_lock overtook somebody");
}

#[test]
fn try_lock_fails_while_anybody_is_queued_even_when_nobody_holds() {
    let server = Server::start();
    let (a, b) = (lock(&server, "x", Duration::from_secs(10)), lock(&server, "x", Duration::from_secs(10)));
    let held = a.lock().expect("the lock");
    let ticket = a.enqueue().expect("a ticket");
    assert!(b.try_lock().expect("an answer").is_none());
    // The ticket that nobody waits for is passed over and the lock is free; the ticket is not queued any more.
    held.unlock().expect("released");
    eventually(LONG, "the unattended ticket is passed over", || !b.status().expect("a status").held);
    let other = b.try_lock().expect("an answer").expect("a free lock without a queue");
    // It has kept its position all the same.
    assert!(ticket.position() < other.position());
    let late = thread::spawn({
        let b = b.clone();
        move || b.lock().map(|guard| guard.position())
    });
    eventually(LONG, "the latecomer queues", || waiting(&b) == 1);
    let guard = thread::scope(|scope| {
        scope.spawn(|| {
            eventually(LONG, "the ticket queues again", || waiting(&b) == 2);
            drop(other);
        });
        ticket.wait()
    });
    let guard = guard.expect("the ticket's turn");
    assert!(!late.is_finished(), "the latecomer is still behind the ticket");
    drop(guard);
    late.join().expect("no panic").expect("the latecomer's turn");
}

#[test]
fn waiters_of_two_clients_are_served_strictly_in_order_of_arrival() {
    let server = Server::start();
    let locks = [lock(&server, "x", Duration::from_secs(10)), lock(&server, "x", Duration::from_secs(10))];
    let held = locks[0].lock().expect("the lock");
    let order = parking_lot::Mutex::new(Vec::new());
    thread::scope(|scope| {
        for arrival in 0..20_usize {
            let ticket = locks[arrival % 2].enqueue().expect("a ticket");
            let order = &order;
            scope.spawn(move || {
                let guard = ticket.wait().expect("its turn");
                order.lock().push((arrival, guard.fence(), guard.position()));
            });
            eventually(LONG, "it queues", || waiting(&locks[0]) == arrival as u64 + 1);
        }
        // Tickets that are waited for in vain would be passed over; see that all threads sit.
        drop(held);
    });
    let order = order.into_inner();
    assert!(order.windows(2).all(|pair| pair[0].1 < pair[1].1 && pair[0].2 < pair[1].2), "{order:?}");
    assert_eq!(order.iter().map(|(arrival, ..)| *arrival).collect::<Vec<_>>(), (0..20).collect::<Vec<_>>());
}

#[test]
fn a_thread_that_would_wait_for_itself_is_told() {
    let server = Server::start();
    let lock = lock(&server, "x", Duration::from_secs(10));
    let guard = lock.lock().expect("the lock");
    assert!(matches!(lock.lock(), Err(Error::WouldDeadlock { .. })));
    assert!(matches!(lock.clone().try_lock_for(LONG), Err(Error::WouldDeadlock { .. })));
    assert!(matches!(lock.acquire(), Err(Error::WouldDeadlock { .. })));
    assert!(lock.try_lock().expect("trying is no waiting").is_none());
    assert_eq!(waiting(&lock), 0, "nothing was queued");
    // Another thread may wait, and a thread that gave its guard away may wait too.
    guard.detach();
    let taker = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        drop(guard);
    });
    lock.lock().expect("its turn comes").unlock().expect("released");
    taker.join().expect("no panic");
}

/// A client with a short lease grants the ticket of one with a long lease: the long one counts.
#[test]
fn a_ticket_gets_its_own_lease_whoever_grants_it() {
    let server = Server::start();
    let short = lock(&server, "x", Duration::from_millis(200));
    let long = lock(&server, "x", Duration::from_secs(10));
    let held = short.lock().expect("the lock");
    thread::scope(|scope| {
        let waiter = scope.spawn(|| long.lock().expect("its turn"));
        eventually(LONG, "it queues", || waiting(&short) == 1);
        held.unlock().expect("released");
        let guard = waiter.join().expect("no panic");
        let left = short.status().expect("a status").lease_remaining.expect("a lease");
        assert!(left > Duration::from_secs(5), "{left:?}");
        assert!(guard.remaining() > Duration::from_secs(5), "{:?}", guard.remaining());
        // It would have lapsed several times over with the other's lease.
        thread::sleep(Duration::from_millis(600));
        assert!(short.try_lock().expect("an answer").is_none());
        guard.unlock().expect("released");
    });
}

#[test]
fn a_timed_wait_ends_on_time_and_leaves_nothing() {
    let server = Server::start();
    let (a, b) = (lock(&server, "x", Duration::from_secs(10)), lock(&server, "x", Duration::from_secs(10)));
    let held = a.lock().expect("the lock");
    for wait in [250, 20, 1] {
        let wait = Duration::from_millis(wait);
        let start = Instant::now();
        assert!(b.try_lock_for(wait).expect("an answer").is_none());
        let took = start.elapsed();
        assert!(took >= wait && took < wait + Duration::from_millis(100), "{wait:?} took {took:?}");
        assert_eq!(waiting(&a), 0, "its ticket is gone");
    }
    let start = Instant::now();
    assert!(matches!(b.acquire_timeout(Duration::from_millis(50)), Err(Error::Timeout { .. })));
    assert!(start.elapsed() < Duration::from_millis(150));
    drop(held);
    assert!(b.try_lock().expect("an answer").is_some());
}

/// Grants that race the deadline are passed on: nobody is left with a lock that nobody uses.
#[test]
fn a_grant_that_races_a_timeout_is_passed_on() {
    let server = Server::start();
    let (a, b) = (lock(&server, "x", Duration::from_secs(30)), lock(&server, "x", Duration::from_secs(30)));
    let mut raced = 0;
    for round in 0..200_u64 {
        let held = a.lock().expect("the lock");
        thread::scope(|scope| {
            // Released from 2 ms before to 2 ms after the deadline of the waiter.
            let waiter =
                scope.spawn(|| b.try_lock_for(Duration::from_millis(10)).expect("an answer").is_some());
            thread::sleep(Duration::from_micros(8000 + round % 40 * 100));
            drop(held);
            raced += usize::from(!waiter.join().expect("no panic"));
        });
        let next = a.try_lock_for(Duration::from_millis(900)).expect("an answer");
        assert!(next.is_some(), "round {round}: the lock is stuck for less than the claim window");
    }
    assert!(raced > 0, "no timeout ever raced a grant; the test shows nothing");
}

#[test]
fn two_hundred_waiters_leave_a_command_pool_of_one_to_the_holder() {
    let server = Server::start();
    let client = LockClient::options().url(&server.url()).command_pool(1).build().expect("a client");
    let lock = client.builder("x").lease(Duration::from_secs(2)).build().expect("a lock");
    let other = LockClient::connect(&server.url()).expect("a client");
    let watch = other.fifo_lock("x").expect("a lock");
    let order = parking_lot::Mutex::new(Vec::new());
    let held = lock.lock().expect("the lock");
    held.detach();
    thread::scope(|scope| {
        for _ in 0..200 {
            let (lock, order) = (&lock, &order);
            scope.spawn(move || {
                let guard = lock.lock().expect("its turn");
                order.lock().push(guard.position());
            });
        }
        eventually(LONG, "all wait", || waiting(&watch) == 200);
        // Three leases: without renewals it would be lost by now.
        let until = Instant::now() + Duration::from_secs(6);
        while Instant::now() < until {
            assert!(!held.is_lost());
            // One connection for commands; two beyond that pool: one that listens, one in reserve; and the watcher's.
            assert!(server.connected_clients() <= 4, "{}", server.connected_clients());
            assert!(server.blocked_clients() <= 1);
            thread::sleep(Duration::from_millis(100));
        }
        let start = Instant::now();
        held.unlock().expect("released");
        assert!(start.elapsed() < Duration::from_secs(1));
    });
    let order = order.into_inner();
    assert_eq!(order.len(), 200);
    assert!(order.is_sorted(), "in order of arrival");
}

#[test]
fn a_full_queue_turns_newcomers_away() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).expect("a client");
    let lock = client.builder("x").max_queue(2).build().expect("a lock");
    let held = lock.lock().expect("the lock");
    let tickets = [lock.enqueue().expect("room"), lock.enqueue().expect("room")];
    assert!(matches!(lock.enqueue(), Err(Error::QueueFull { limit: 2, .. })));
    let [first, second] = tickets;
    first.cancel();
    assert_eq!(waiting(&lock), 1);
    let third = lock.enqueue().expect("room again");
    drop(held);
    drop((second, third));
    eventually(LONG, "nobody is left", || {
        let status = lock.status().expect("a status");
        status.waiting == 0 && !status.held
    });
}

#[test]
fn status_tells_who_holds_and_how_many_wait() {
    let server = Server::start();
    let client = LockClient::options().url(&server.url()).label("billing").build().expect("a client");
    let lock = client.fifo_lock("x").expect("a lock");
    let idle = lock.status().expect("a status");
    assert!(!idle.held && idle.owner.is_none() && idle.fence.is_none() && idle.lease_remaining.is_none());
    let guard = lock.lock().expect("the lock");
    let _ticket = lock.enqueue().expect("a ticket");
    let status = lock.status().expect("a status");
    assert!(status.held);
    assert_eq!(status.owner.as_deref(), Some(client.id()));
    assert!(client.id().starts_with(&format!("billing-{}-", std::process::id())));
    assert_eq!(status.fence, Some(guard.fence()));
    assert_eq!(status.waiting, 1);
    let left = status.lease_remaining.expect("a lease");
    assert!(left <= Duration::from_secs(60) && left > Duration::from_secs(50), "{left:?}");
}
