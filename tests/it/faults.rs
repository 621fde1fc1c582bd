//! Lost replies, frozen and restarted servers, lost data, no memory: nothing is granted twice and nothing is lost.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use redis_fifo_lock::{Error, FifoLock, LockClient};

use crate::support::eventually;
use crate::support::proxy::{Proxy, Swallow};
use crate::support::server::Server;

const LONG: Duration = Duration::from_secs(20);

fn client(url: &str) -> LockClient {
    LockClient::options().url(url).call_timeout(Duration::from_millis(300)).build().expect("a client")
}

fn lock(url: &str, name: &str, lease: Duration) -> FifoLock {
    client(url).builder(name).lease(lease).build().expect("a lock")
}

fn waiting(lock: &FifoLock) -> u64 {
    lock.status().expect("a status").waiting
}

/// Matches the command that carries out a transition: its ticket stands in no other command at that time.
fn evalsha(bytes: &[u8]) -> bool {
    bytes.windows(7).any(|window| window == b"EVALSHA")
}

#[test]
fn a_release_whose_reply_is_lost_is_ok_and_hands_over_once() {
    for kind in [Swallow::Silence, Swallow::Cut] {
        let server = Server::start();
        let proxy = Proxy::start(server.addr());
        let a = lock(&proxy.url(), "x", Duration::from_secs(10));
        let b = lock(&server.url(), "x", Duration::from_secs(10));
        let held = a.lock().expect("the lock");
        let first = held.fence().get();
        let grants = AtomicUsize::new(0);
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let guard = b.lock().expect("its turn");
                grants.fetch_add(1, Ordering::Relaxed);
                guard
            });
            eventually(LONG, "it queues", || waiting(&b) == 1);
            let fault = proxy.swallow_next_reply_to(kind, evalsha);
            held.unlock().expect("no false alarm");
            assert!(fault.happened());
            let guard = waiter.join().expect("no panic");
            assert!(guard.fence().get() > first);
            let status = b.status().expect("a status");
            assert_eq!(status.fence, Some(guard.fence()), "one hand-over, not two");
        });
        assert_eq!(grants.load(Ordering::Relaxed), 1);
    }
}

#[test]
fn an_acquire_whose_reply_is_lost_gets_the_same_grant() {
    for kind in [Swallow::Silence, Swallow::Cut] {
        let server = Server::start();
        let proxy = Proxy::start(server.addr());
        let lock = lock(&proxy.url(), "x", Duration::from_secs(10));
        lock.status().expect("connected");
        let fault = proxy.swallow_next_reply_to(kind, evalsha);
        let guard = lock.lock().expect("the lock");
        assert!(fault.happened());
        let status = lock.status().expect("a status");
        assert_eq!(status.fence, Some(guard.fence()), "one fence");
        assert_eq!(status.waiting, 0);
        guard.unlock().expect("released");
        assert!(!lock.status().expect("a status").held);
    }
}

#[test]
fn a_lapsed_lease_that_nobody_took_is_released_without_alarm() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let lock = lock(&proxy.url(), "x", Duration::from_millis(200));
    let guard = lock.lock().expect("the lock");
    proxy.freeze();
    eventually(LONG, "the lease lapses", || guard.is_lost());
    proxy.thaw();
    guard.unlock().expect("nobody was granted since");
}

/// The holder's own clock says so before the server could give the lock away.
#[test]
fn a_holder_cut_off_from_the_server_knows_in_time_and_its_drop_is_bounded() {
    let server = Server::start();
    let client = client(&server.url());
    let lock = client
        .builder("x")
        .lease(Duration::from_secs(1))
        .release_bound(Duration::from_millis(700))
        .build()
        .expect("a lock");
    let guard = lock.lock().expect("the lock");
    let lost = guard.on_lost();
    let start = Instant::now();
    server.freeze();
    assert!(!guard.is_lost());
    lost.recv_timeout(Duration::from_secs(3)).expect("told");
    let took = start.elapsed();
    // The last proof is at most a quarter of a lease old when the server freezes, and never younger than that.
    assert!(took < Duration::from_millis(1100) && took > Duration::from_millis(600), "{took:?}");
    assert!(guard.is_lost() && guard.remaining().is_zero());
    assert!(matches!(guard.ensure_held(), Err(Error::LeaseLost { .. })));
    let start = Instant::now();
    drop(guard);
    assert!(start.elapsed() < Duration::from_millis(1300), "{:?}", start.elapsed());
    server.thaw();
    let next = lock.try_lock_for(LONG).expect("an answer");
    assert!(next.is_some());
}

#[test]
fn after_a_flush_of_all_data_waiters_come_back_in_their_old_order() {
    let server = Server::start();
    // Waiters of three clients; only their positions hold them in order.
    let locks: Vec<FifoLock> = (0..3)
        .map(|_| {
            let client = client(&server.url());
            client
                .builder("x")
                .lease(Duration::from_secs(2))
                .poll(Duration::from_millis(700))
                .claim(Duration::from_millis(500))
                .build()
                .expect("a lock")
        })
        .collect();
    let held = locks[0].lock().expect("the lock");
    held.detach();
    let first = held.fence();
    let order = parking_lot::Mutex::new(Vec::new());
    thread::scope(|scope| {
        for arrival in 0..5_usize {
            let (lock, order) = (&locks[(arrival * 2) % 3], &order);
            scope.spawn(move || {
                let guard = lock.lock().expect("its turn");
                order.lock().push((arrival, guard.position(), guard.fence()));
                thread::sleep(Duration::from_millis(20));
            });
            eventually(LONG, "it queues", || waiting(lock) == arrival as u64 + 1);
        }
        server.flush_all();
        // The holder learns it at its next beat, a quarter of its lease later.
        let start = Instant::now();
        assert!(held.on_lost().recv_timeout(Duration::from_secs(1)).is_ok());
        assert!(start.elapsed() < Duration::from_secs(1));
        assert!(matches!(held.unlock(), Err(Error::LeaseLost { .. })));
    });
    let order = order.into_inner();
    assert_eq!(order.iter().map(|(arrival, ..)| *arrival).collect::<Vec<_>>(), [0, 1, 2, 3, 4], "{order:?}");
    assert!(order.windows(2).all(|pair| pair[0].1 < pair[1].1 && pair[0].2 < pair[1].2), "{order:?}");
    assert!(order[0].2 > first, "fences go on ascending");
}

#[test]
fn without_memory_holders_go_on_and_only_newcomers_are_refused() {
    let server = Server::start();
    let a = lock(&server.url(), "x", Duration::from_millis(600));
    let b = lock(&server.url(), "x", Duration::from_millis(600));
    let other = lock(&server.url(), "y", Duration::from_secs(10));
    let held = a.lock().expect("the lock");
    held.detach();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| b.lock().expect("its turn"));
        eventually(LONG, "it queues", || waiting(&a) == 1);
        server.fill_memory();
        // Two leases.
        thread::sleep(Duration::from_millis(1200));
        assert!(!held.is_lost(), "renewed without memory");
        assert!(matches!(other.lock(), Err(Error::OutOfMemory { .. })));
        assert!(matches!(other.try_lock(), Err(Error::OutOfMemory { .. })));
        assert!(matches!(a.try_lock_for(Duration::from_millis(100)), Err(Error::OutOfMemory { .. })));
        held.unlock().expect("released without memory");
        let guard = waiter.join().expect("no panic");
        assert!(!guard.is_lost(), "handed over without memory");
        guard.unlock().expect("released without memory");
        server.set_maxmemory(0);
        other.lock().expect("memory again").unlock().expect("released");
    });
}

#[test]
fn waiters_ride_out_a_restart_and_keep_their_order() {
    let server = Server::builder().aof(true).start();
    let (a, b) = (
        lock(&server.url(), "x", Duration::from_secs(30)),
        lock(&server.url(), "x", Duration::from_secs(30)),
    );
    let held = a.lock().expect("the lock");
    held.detach();
    let order = parking_lot::Mutex::new(Vec::new());
    thread::scope(|scope| {
        for arrival in 0..5_usize {
            let (lock, order) = (if arrival % 2 == 0 { &a } else { &b }, &order);
            scope.spawn(move || {
                let guard = lock.lock().expect("its turn");
                order.lock().push((arrival, guard.fence()));
            });
            eventually(LONG, "it queues", || waiting(&a) == arrival as u64 + 1);
        }
        server.stop();
        thread::sleep(Duration::from_millis(300));
        server.start_again();
        eventually(LONG, "it answers again", || a.status().is_ok());
        assert!(!held.is_lost());
        held.unlock().expect("released");
    });
    let order = order.into_inner();
    assert!(order.is_sorted(), "{order:?}");
    assert_eq!(order.len(), 5);
}

#[test]
fn an_outage_longer_than_patience_ends_the_wait_with_its_cause() {
    let server = Server::start();
    let a = lock(&server.url(), "x", Duration::from_secs(30));
    let b = client(&server.url()).builder("x").patience(Duration::from_millis(800)).build().expect("a lock");
    let _held = a.lock().expect("the lock");
    thread::scope(|scope| {
        let waiters: Vec<_> = (0..10).map(|_| scope.spawn(|| b.lock().map(drop))).collect();
        eventually(LONG, "they queue", || waiting(&a) == 10);
        let start = Instant::now();
        server.kill();
        for waiter in waiters {
            let error = waiter.join().expect("no panic").expect_err("no server");
            assert!(matches!(error, Error::Redis { .. }) && error.is_retryable(), "{error:?}");
        }
        let took = start.elapsed();
        assert!(took > Duration::from_millis(700) && took < Duration::from_secs(5), "{took:?}");
        server.start_again();
    });
}

#[test]
fn a_server_that_cannot_be_reached_is_told_at_once() {
    let server = Server::start();
    server.stop();
    let locks = LockClient::connect(&server.url()).expect("nothing is connected yet");
    let lock = locks.fifo_lock("x").expect("a lock");
    let start = Instant::now();
    let error = lock.lock().expect_err("no server");
    assert!(matches!(&error, Error::Redis { source, .. } if source.is_connection_refusal()), "{error:?}");
    assert!(start.elapsed() < Duration::from_millis(1500), "{:?}", start.elapsed());
}
