//! Deadlines in every state of the server, times at the edge of what a `Duration` can say, and leases.

use std::net::{Ipv4Addr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use redis::{Commands, cmd};
use redis_fifo_lock::{ClientBuilder, Error, FifoLock, LockClient, LockGuard};

use crate::support::proxy::{Proxy, Swallow};
use crate::support::server::Server;
use crate::support::{eventually, port};

const LONG: Duration = Duration::from_secs(20);
/// What a call with a deadline may take beyond it on a machine that others load; 100 ms of it are for withdrawing.
const SLACK: Duration = Duration::from_millis(500);

fn options(url: &str) -> ClientBuilder {
    LockClient::options().url(url)
}

fn lock(url: &str, name: &str) -> FifoLock {
    options(url).build().expect("a client").fifo_lock(name).expect("a lock")
}

fn waiting(lock: &FifoLock) -> u64 {
    lock.status().expect("a status").waiting
}

fn is_evalsha(request: &[u8]) -> bool {
    request.windows(7).any(|window| window == b"EVALSHA")
}

fn timed<T>(call: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let result = call();
    (result, start.elapsed())
}

/// The record's `until`, microseconds of server time.
fn until(server: &Server, name: &str) -> u64 {
    let record: String = server.connection().get(format!("fifo:{{{name}}}:lock")).expect("a record");
    record.split(' ').nth(2).expect("a record").parse().expect("a number")
}

/// A21: nobody who waits for ten read timeouts is told of one.
#[test]
fn a_wait_much_longer_than_the_read_timeout_is_no_error_and_keeps_its_place() {
    let server = Server::start();
    let holder = lock(&server.url(), "x");
    let client = options(&server.url()).call_timeout(Duration::from_millis(150)).build().expect("a client");
    let patient = client.fifo_lock("x").expect("a lock");
    let held = holder.lock().expect("the lock");
    held.detach();
    let (none, took) = timed(|| patient.try_lock_for(Duration::from_millis(1000)).expect("no error"));
    assert!(none.is_none());
    assert!(took >= Duration::from_millis(1000) && took < Duration::from_millis(1000) + SLACK, "{took:?}");
    thread::scope(|scope| {
        let waiter =
            scope.spawn(|| timed(|| patient.try_lock_for(Duration::from_secs(10)).expect("no error")));
        eventually(LONG, "it queues", || waiting(&holder) == 1);
        let places: Vec<(String, u64)> =
            server.connection().zrange_withscores("fifo:{x}:queue", 0, 0).expect("the queue");
        thread::sleep(Duration::from_millis(1500));
        held.unlock().expect("released");
        let (guard, took) = waiter.join().expect("no panic");
        assert_eq!(guard.expect("its turn").position(), places[0].1, "its first place");
        assert!(
            took >= Duration::from_millis(1500) && took < Duration::from_millis(1500) + SLACK,
            "{took:?}"
        );
    });
}

/// What a call with a deadline is to give in some state of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Nothing,
    Redis,
    Pool,
}

/// Has every call with a deadline give `expected`, in time.
#[track_caller]
fn keeps_deadlines(state: &str, lock: &FifoLock, expected: Answer) {
    let judge = |result: Result<Option<LockGuard>, Error>| match result {
        Ok(None) | Err(Error::Timeout { .. }) => Answer::Nothing,
        Err(Error::Redis { .. }) => Answer::Redis,
        Err(Error::Pool { .. }) => Answer::Pool,
        other => panic!("{state}: {other:?}"),
    };
    type Call<'a> = (&'a str, u64, &'a dyn Fn() -> Result<Option<LockGuard>, Error>);
    let ms = Duration::from_millis;
    let never = |lease: redis_fifo_lock::Lease| -> Option<LockGuard> { panic!("a lease: {lease:?}") };
    let calls: [Call<'_>; 6] = [
        ("try_lock_for(300 ms)", 300, &|| lock.try_lock_for(ms(300))),
        ("acquire_timeout(300 ms)", 300, &|| lock.acquire_timeout(ms(300)).map(never)),
        ("try_lock_until(+300 ms)", 300, &|| lock.try_lock_until(Instant::now() + ms(300))),
        // At least one attempt is made, which gets 200 ms.
        ("try_lock_for(1 ns)", 200, &|| lock.try_lock_for(Duration::from_nanos(1))),
        // Without a deadline of their own they have the call timeout, 400 ms here.
        ("try_lock()", 400, &|| lock.try_lock()),
        ("acquire_timeout(0)", 400, &|| lock.acquire_timeout(Duration::ZERO).map(never)),
    ];
    // Twice: what the first round leaves behind must not change the answers of the second.
    for (name, bound, call) in calls.iter().chain(&calls) {
        let (result, took) = timed(call);
        assert!(took < ms(*bound) + SLACK, "{state}: {name} took {took:?}");
        let what = format!("{result:?}");
        assert_eq!(judge(result), expected, "{state}: {name} gave {what}");
    }
}

fn hurried(url: &str) -> FifoLock {
    let client = options(url).call_timeout(Duration::from_millis(400)).build().expect("a client");
    client.fifo_lock("x").expect("a lock")
}

/// A23: nobody listens on the port.
#[test]
fn a_refused_port_keeps_the_deadline() {
    let url = format!("redis://{}/", SocketAddr::from((Ipv4Addr::LOCALHOST, port::free())));
    keeps_deadlines("refused port", &hurried(&url), Answer::Redis);
}

/// A23: a pool of one whose first attempt failed retries in its own time; a caller in between hears the same cause.
#[test]
fn a_refused_port_is_never_called_an_exhausted_pool() {
    let url = format!("redis://{}/", SocketAddr::from((Ipv4Addr::LOCALHOST, port::free())));
    let client =
        options(&url).command_pool(1).call_timeout(Duration::from_millis(100)).build().expect("a client");
    let lock = client.fifo_lock("x").expect("a lock");
    for round in 0..8 {
        let error = lock.try_lock().expect_err("no server");
        assert!(
            matches!(&error, Error::Redis { source, .. } if source.is_connection_refusal()),
            "round {round}: {error:?}"
        );
    }
}

/// A23: the kernel accepts connections, the server says nothing; the pool is empty.
#[test]
fn a_frozen_server_keeps_the_deadline_of_a_new_client() {
    let server = Server::start();
    let lock = hurried(&server.url());
    server.freeze();
    keeps_deadlines("frozen, no connection yet", &lock, Answer::Redis);
    // Nothing is queued, so there is nothing to be patient for: the connect timeout is the bound.
    let (result, took) = timed(|| hurried(&server.url()).lock());
    assert!(matches!(result, Err(Error::Redis { .. })), "{result:?}");
    assert!(took < Duration::from_secs(1) + SLACK, "{took:?}");
}

/// A23: as before, with connections in the pool.
#[test]
fn a_frozen_server_keeps_the_deadline_of_an_old_client() {
    let server = Server::start();
    let lock = hurried(&server.url());
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| waiting(&lock));
        }
    });
    server.freeze();
    keeps_deadlines("frozen, connected", &lock, Answer::Redis);
}

/// A23: the server answers nobody for a while, as it does in a failover by hand.
#[test]
fn a_paused_server_keeps_the_deadline() {
    let server = Server::start();
    let lock = hurried(&server.url());
    waiting(&lock);
    server.client_pause(60_000, "ALL");
    keeps_deadlines("paused", &lock, Answer::Redis);
}

/// A23: every connection is in use.
#[test]
fn an_exhausted_pool_keeps_the_deadline() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let client = options(&proxy.url()).command_pool(1).call_timeout(Duration::from_secs(60)).build();
    let lock = client.expect("a client").fifo_lock("x").expect("a lock");
    waiting(&lock);
    let fault = proxy.swallow_next_reply_to(Swallow::Hold, is_evalsha);
    thread::scope(|scope| {
        scope.spawn(|| waiting(&lock));
        eventually(LONG, "the only connection is in use", || fault.happened());
        for _ in 0..3 {
            let (result, took) = timed(|| lock.try_lock_for(Duration::from_millis(300)));
            assert!(matches!(result, Err(Error::Pool { size: 1, .. })), "{result:?}");
            assert!(took < Duration::from_millis(300) + SLACK, "{took:?}");
        }
        proxy.release_held();
    });
    assert!(lock.try_lock().expect("an answer").is_some());
}

/// A23: the ordinary case; and asking once is quick.
#[test]
fn a_held_lock_keeps_the_deadline_and_a_single_try_is_quick() {
    let server = Server::start();
    let (holder, lock) = (lock(&server.url(), "x"), hurried(&server.url()));
    let quickest = |call: &dyn Fn()| (0..10).map(|_| timed(call).1).min().expect("ten");
    let free = quickest(&|| drop(lock.try_lock().expect("an answer").expect("it is free")));
    assert!(free < Duration::from_millis(50), "{free:?}");
    let _held = holder.lock().expect("the lock");
    keeps_deadlines("held", &lock, Answer::Nothing);
    let busy = quickest(&|| assert!(lock.try_lock().expect("an answer").is_none()));
    assert!(busy < Duration::from_millis(50), "{busy:?}");
}

/// A23: a waiter whose deadline comes while the server says nothing is told just that: whether its turn came by then,
/// nobody knows.
#[test]
fn a_deadline_that_passes_in_an_outage_is_an_error_with_its_cause() {
    for how in ["frozen", "killed"] {
        let server = Server::start();
        let holder = lock(&server.url(), "x");
        let client =
            options(&server.url()).call_timeout(Duration::from_millis(200)).build().expect("a client");
        let lock = client.builder("x").poll(Duration::from_millis(100)).build().expect("a lock");
        let _held = holder.lock().expect("the lock");
        thread::scope(|scope| {
            let waiter = scope.spawn(|| timed(|| lock.try_lock_for(Duration::from_millis(1500))));
            eventually(LONG, "it queues", || waiting(&holder) == 1);
            if how == "frozen" {
                server.freeze()
            } else {
                server.kill()
            }
            let (result, took) = waiter.join().expect("no panic");
            assert!(
                matches!(&result, Err(error @ Error::Redis { .. }) if error.is_retryable()),
                "{how}: {result:?}"
            );
            assert!(took < Duration::from_millis(1500) + SLACK, "{how}: {took:?}");
        });
    }
}

/// A24: the shortest and the longest times that a `Duration` can say, on a free lock and on one that is released later.
#[test]
fn extreme_waits_neither_panic_nor_block_for_ever_nor_end_early() {
    let server = Server::start();
    let (holder, lock) = (lock(&server.url(), "x"), lock(&server.url(), "x"));
    let short = [Duration::ZERO, Duration::from_nanos(1), Duration::from_micros(999)];
    let long = [Duration::MAX, Duration::from_secs(u64::MAX / 2), Duration::from_secs(u64::from(u32::MAX))];
    let mut monitor = server.monitor();
    for wait in short.into_iter().chain(long) {
        assert!(lock.try_lock_for(wait).expect("an answer").is_some(), "{wait:?} on a free lock");
        lock.acquire_timeout(wait).expect("free").release().expect("released");
        let ticket = lock.enqueue().expect("a ticket");
        assert!(ticket.wait_for(wait).expect("an answer").is_some(), "{wait:?} with a ticket");
    }
    let held = holder.lock().expect("the lock");
    held.detach();
    for wait in short {
        let (result, took) = timed(|| lock.try_lock_for(wait).expect("an answer"));
        assert!(result.is_none() && took < SLACK, "{wait:?}: {took:?}");
        let (result, took) = timed(|| lock.acquire_timeout(wait));
        assert!(matches!(result, Err(Error::Timeout { .. })) && took < SLACK, "{wait:?}: {took:?}");
        let ticket = lock.enqueue().expect("a ticket");
        let (result, took) = timed(|| ticket.wait_for(wait).expect("an answer"));
        assert!(result.is_none() && took < SLACK, "{wait:?}: {took:?}");
    }
    thread::scope(|scope| {
        let (start, lock) = (Instant::now(), &lock);
        let mut waiters: Vec<_> = long
            .into_iter()
            .map(|wait| {
                scope.spawn(move || lock.try_lock_for(wait).expect("an answer").map(|_| start.elapsed()))
            })
            .collect();
        waiters.push(scope.spawn(move || lock.lock().ok().map(|_| start.elapsed())));
        let far = start.checked_add(Duration::from_secs(100 * 365 * 24 * 3600)).expect("a far moment");
        waiters
            .push(scope.spawn(move || lock.try_lock_until(far).expect("an answer").map(|_| start.elapsed())));
        eventually(LONG, "all wait", || waiting(&holder) == 5);
        thread::sleep(Duration::from_millis(300).saturating_sub(start.elapsed()));
        held.unlock().expect("released");
        for waiter in waiters {
            let took = waiter.join().expect("no panic").expect("its turn");
            assert!(
                took >= Duration::from_millis(300) && took < Duration::from_millis(300) + SLACK,
                "{took:?}"
            );
        }
    });
    // 0 is for ever, and so are times below 1.5 ms on old servers; 16 s is the longest this library listens at once.
    let blocks: Vec<f64> = monitor
        .lines()
        .iter()
        .filter(|line| line.contains("\"BLPOP\""))
        .map(|line| {
            let timeout = line.trim_end_matches('"').rsplit_once('"').expect("an argument").1;
            assert!(!timeout.contains('e'), "an exponent: {line}");
            timeout.parse().expect("a number")
        })
        .collect();
    assert!(!blocks.is_empty() && blocks.iter().all(|block| (0.05..=16.0).contains(block)), "{blocks:?}");
}

/// A25: what makes no sense is refused before anything is sent, or even connected.
#[test]
fn a_lease_out_of_bounds_never_reaches_the_server() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).expect("a client");
    let commands = server.command_calls("evalsha");
    let max = Duration::MAX;
    let wrong = [
        Duration::ZERO,
        Duration::from_nanos(1),
        Duration::from_micros(999),
        Duration::from_micros(9999),
        Duration::from_secs(24 * 3600) + Duration::from_nanos(1),
        Duration::from_millis(i64::MAX as u64 / 10),
        Duration::from_millis(i64::MAX as u64),
        max,
    ];
    for lease in wrong {
        for max_hold in [None, Some(max), Some(Duration::from_secs(3650 * 24 * 3600))] {
            let builder = client.builder("x").lease(lease);
            let builder = if let Some(max_hold) = max_hold { builder.max_hold(max_hold) } else { builder };
            match builder.build() {
                Err(error @ Error::Config(_)) => {
                    assert!(error.to_string().starts_with("lease is "), "{error}");
                    assert!(!error.is_retryable());
                }
                other => panic!("{lease:?}: {other:?}"),
            }
        }
    }
    type Set = fn(redis_fifo_lock::LockBuilder) -> redis_fifo_lock::LockBuilder;
    let others: [(&str, Set); 8] = [
        ("max_hold", |lock| lock.max_hold(Duration::MAX)),
        ("max_hold", |lock| lock.max_hold(Duration::ZERO)),
        ("poll", |lock| lock.poll(Duration::ZERO)),
        ("claim", |lock| lock.claim(Duration::MAX)),
        ("claim", |lock| lock.claim(Duration::from_nanos(1))),
        ("idle", |lock| lock.idle(Duration::from_micros(999))),
        ("release_bound", |lock| lock.release_bound(Duration::MAX)),
        ("patience", |lock| lock.patience(Duration::MAX)),
    ];
    for (setting, set) in others {
        let error = set(client.builder("x")).build().expect_err("out of bounds");
        assert!(error.to_string().starts_with(&format!("{setting} is ")), "{error}");
    }
    assert_eq!(server.connected_clients(), 0, "nothing was connected");
    assert_eq!(server.command_calls("evalsha"), commands);
    assert_eq!(cmd("DBSIZE").query::<u64>(&mut server.connection()).expect("DBSIZE"), 0);
}

/// Takes, queues, waits, renews, inspects and releases with one lease.
fn whole_life(url: &str, lease: Duration, beats: u32) -> Result<(), Error> {
    let make = || -> Result<FifoLock, Error> {
        let client = LockClient::connect(url)?;
        client.builder("x").lease(lease).max_hold(lease + Duration::from_secs(3600)).build()
    };
    let (a, b) = (make()?, make()?);
    let held = a.lock()?;
    held.detach();
    let ticket = b.enqueue()?;
    assert!(ticket.position() > held.position());
    if beats > 0 {
        thread::sleep(lease / 4 * beats);
    }
    let status = a.status()?;
    assert!(status.lease_remaining.is_none_or(|left| left <= lease), "{status:?}");
    assert!(held.remaining() <= lease);
    held.unlock()?;
    let guard = ticket.wait()?;
    guard.ensure_held()?;
    guard.unlock()
}

/// A25: the bounds themselves work.
#[test]
fn the_shortest_and_the_longest_lease_live_a_whole_life() {
    let server = Server::start();
    let url = server.url();
    whole_life(&url, Duration::from_secs(24 * 3600), 0).expect("a day");
    // Ten milliseconds can be over before a loaded machine lets anybody renew; that has a name, and it does not last.
    let mut lived = 0;
    for _ in 0..200 {
        match whole_life(&url, Duration::from_millis(10), 8) {
            Ok(()) => lived += 1,
            Err(Error::LeaseLost { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
        if lived == 3 {
            break;
        }
    }
    assert!(lived > 0, "two hundred attempts");
    let status = lock(&url, "x").status().expect("a status");
    assert!(!status.held && status.waiting == 0, "{status:?}");
    assert!(server.pttl("fifo:{x}:lock") > 0, "idle, and to be forgotten one day");
}

/// A26: there is no extending by hand in this API; what is left is that no beat and nobody else ever takes from a lease.
#[test]
fn a_lease_is_never_shortened_by_beats_or_by_clients_with_other_settings() {
    let server = Server::start();
    let lease = Duration::from_millis(1200);
    let client = LockClient::connect(&server.url()).expect("a client");
    let lock = client.builder("x").lease(lease).build().expect("a lock");
    let guard = lock.lock().expect("the lock");
    let brief = options(&server.url()).build().expect("a client");
    let brief = brief.builder("x").lease(Duration::from_millis(10)).build().expect("a lock");
    let (mut last, mut beats) = (until(&server, "x"), 0);
    let end = Instant::now() + lease * 2;
    while Instant::now() < end {
        assert!(brief.try_lock().expect("an answer").is_none());
        assert!(brief.try_lock_for(Duration::from_millis(5)).expect("an answer").is_none());
        // Also of the same client, which has the same renewal threads.
        assert!(
            client.builder("x").lease(Duration::from_millis(10)).build().expect("a lock").try_lock().is_ok()
        );
        // Read first: the server's is never behind what the holder believes.
        let remaining = guard.remaining();
        let status = brief.status().expect("a status");
        let left = status.lease_remaining.expect("held");
        assert!(left <= lease, "{left:?}");
        assert!(remaining <= lease - lease / 100, "{remaining:?}");
        let now = until(&server, "x");
        assert!(now >= last, "{last} was taken back to {now}");
        if now > last {
            // Counted from now, whole and by the server's clock: not added to what was left.
            assert!(now - last <= 1_200_000 && now - last >= 200_000, "a beat of {} us", now - last);
            beats += 1;
        }
        last = now;
        thread::sleep(Duration::from_millis(5));
    }
    assert!((4..=9).contains(&beats), "{beats} beats in two leases");
    guard.unlock().expect("never lost");
}
