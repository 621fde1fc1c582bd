//! Connections that lie, end, hang or change their server's mind: nobody has to notice, and nothing happens twice.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use redis::cmd;
use redis_fifo_lock::{Error, FifoLock, LockClient};

use crate::support::child::Child;
use crate::support::eventually;
use crate::support::overlap::{Journal, Section};
use crate::support::proxy::{Proxy, Swallow};
use crate::support::server::Server;

const LONG: Duration = Duration::from_secs(20);

fn client(url: &str, call_ms: u64) -> LockClient {
    LockClient::options().url(url).call_timeout(Duration::from_millis(call_ms)).build().expect("a client")
}

fn lock(url: &str, lease: Duration, call_ms: u64) -> FifoLock {
    client(url, call_ms).builder("x").lease(lease).build().expect("a lock")
}

fn waiting(lock: &FifoLock) -> u64 {
    lock.status().expect("a status").waiting
}

fn runs_script(request: &[u8]) -> bool {
    request.windows(7).any(|window| window == b"EVALSHA")
}

/// The fences that a server's monitor saw being given, in order: every record that was stored names its newest.
fn fences(lines: &[String]) -> BTreeSet<u64> {
    let records = lines.iter().filter(|line| line.contains("lua] \"SET\" \"fifo:{x}:lock\""));
    records
        .map(|line| line.split(' ').nth(6).expect("a record").parse().expect("a fence"))
        .filter(|fence| *fence > 0)
        .collect()
}

fn section_is_clean(dir: &Path) {
    assert_eq!(Section::violations(dir), [""; 0]);
}

/// Has the pool of the lock's client hold as many connections.
fn fill_pool(proxy: &Proxy, lock: &FifoLock, connections: usize) {
    let held = proxy.swallow_replies_to(connections, Swallow::Hold, runs_script);
    thread::scope(|scope| {
        for _ in 0..connections {
            scope.spawn(|| waiting(lock));
        }
        eventually(LONG, "each has a connection of its own", || held.count() == connections);
        proxy.release_held();
    });
}

/// A27: whatever is being called when the scripts are gone, nobody sees it.
#[test]
fn scripts_flushed_again_and_again_are_no_errors() {
    let server = Server::start();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let locks = [
        lock(&server.url(), Duration::from_millis(2000), 2000),
        lock(&server.url(), Duration::from_millis(2000), 2000),
    ];
    let done = AtomicBool::new(false);
    let flushes = thread::scope(|scope| {
        let flusher = scope.spawn(|| {
            let mut flushes = 0;
            while !done.load(Ordering::Relaxed) {
                server.script_flush();
                flushes += 1;
                thread::sleep(Duration::from_millis(3));
            }
            flushes
        });
        let workers: Vec<_> = (0..8)
            .map(|id| {
                let (lock, dir) = (&locks[id % 2], dir.path());
                scope.spawn(move || {
                    for round in 0..30 {
                        let guard = match (id + round) % 4 {
                            0 => lock.try_lock_for(LONG).expect("an answer").expect("a turn"),
                            1 => lock.enqueue().expect("a place").wait().expect("a turn"),
                            2 => {
                                // Withdrawn, looked at, tried in vain or not; none of it an error.
                                drop(lock.try_lock_for(Duration::from_micros(500)).expect("an answer"));
                                drop(lock.enqueue().expect("a place"));
                                drop(lock.try_lock().expect("an answer"));
                                lock.lock().expect("a turn")
                            }
                            _ => lock.lock().expect("a turn"),
                        };
                        let section = Section::enter(dir, &format!("{id}-{round}")).expect("alone");
                        lock.status().expect("a status");
                        drop(section);
                        guard.unlock().expect("released");
                    }
                })
            })
            .collect();
        // A holder for some beats, so that renewals meet the flushes, too.
        let beats = client(&server.url(), 2000);
        let beats = beats.builder("y").lease(Duration::from_millis(400)).build().expect("a lock");
        let guard = beats.lock().expect("the lock");
        for worker in workers {
            worker.join().expect("no error");
        }
        thread::sleep(Duration::from_millis(800));
        assert!(!guard.is_lost());
        guard.unlock().expect("renewed all the time");
        done.store(true, Ordering::Relaxed);
        flusher.join().expect("no panic")
    });
    assert!(flushes > 20, "{flushes}");
    assert!(server.command_calls("eval") > 20, "the flushes met somebody");
    section_is_clean(dir.path());
}

/// A28: sockets to a demoted primary stay open and answer; they are left all the same.
#[test]
fn a_failover_behind_one_address_is_survived_by_holder_waiter_and_newcomer() {
    let (old, new) = (Server::start(), Server::start());
    let link = |replica: &Server, primary: Option<&Server>| {
        let (host, port) = primary.map_or(("NO".into(), "ONE".into()), |primary| {
            (primary.addr().ip().to_string(), primary.port().to_string())
        });
        cmd("REPLICAOF").arg(host).arg(port).exec(&mut replica.connection()).expect("REPLICAOF");
    };
    link(&new, Some(&old));
    let is_linked = || {
        let info: String = cmd("INFO").arg("replication").query(&mut new.connection()).expect("INFO");
        info.contains("master_link_status:up")
    };
    eventually(LONG, "the replica is linked", is_linked);

    let proxy = Proxy::start(old.addr());
    let (a, b) =
        (lock(&proxy.url(), Duration::from_secs(3), 500), lock(&proxy.url(), Duration::from_secs(3), 500));
    let held = a.lock().expect("the lock");
    held.detach();
    let direct = client(&new.url(), 500).fifo_lock("x").expect("a lock");
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let guard = b.lock().expect("its turn");
            (guard.fence(), guard.unlock())
        });
        eventually(LONG, "the replica knows of both", || {
            let status = direct.status().expect("a status");
            status.waiting == 1 && status.fence == Some(held.fence())
        });
        link(&new, None);
        link(&old, Some(&new));
        proxy.retarget(new.addr());
        let connections = proxy.connections();
        assert!(connections >= 2, "{connections} sockets still lead to the old primary");
        // Longer than the lease: renewals have found the new primary, or it would be lost.
        thread::sleep(Duration::from_millis(3300));
        assert!(!held.is_lost());
        let fence = held.fence();
        let start = Instant::now();
        held.unlock().expect("released on the new primary");
        let (next, released) = waiter.join().expect("no panic");
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
        assert!(next > fence);
        released.expect("released");
        // Clients whose pooled sockets lead to the old primary, and a new one.
        for lock in [&a, &b, &lock(&proxy.url(), Duration::from_secs(3), 500)] {
            let start = Instant::now();
            assert!(lock.try_lock_for(LONG).expect("no error").expect("free").fence() > next);
            assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        }
    });
}

/// A28: a client that has done nothing since before the failover is not told of it either.
#[test]
fn every_call_of_a_client_with_connections_to_a_demoted_primary_succeeds() {
    let (old, new) = (Server::start(), Server::start());
    let proxy = Proxy::start(old.addr());
    let lock = lock(&proxy.url(), Duration::from_secs(30), 500);
    let calls: [(&str, &dyn Fn()); 4] = [
        ("lock", &|| drop(lock.lock().expect("no error"))),
        ("try_lock", &|| drop(lock.try_lock().expect("no error").expect("free"))),
        ("try_lock_for", &|| drop(lock.try_lock_for(LONG).expect("no error").expect("free"))),
        ("enqueue", &|| drop(lock.enqueue().expect("no error").wait().expect("no error"))),
    ];
    let (mut from, mut to) = (&old, &new);
    for (name, call) in calls {
        fill_pool(&proxy, &lock, 4);
        cmd("REPLICAOF")
            .arg(to.addr().ip().to_string())
            .arg(to.port())
            .exec(&mut from.connection())
            .expect("REPLICAOF");
        proxy.retarget(to.addr());
        call();
        cmd("REPLICAOF").arg("NO").arg("ONE").exec(&mut from.connection()).expect("REPLICAOF");
        assert!(to.keys("*").contains(&"fifo:{x}:lock".to_owned()), "{name} went to the new primary");
        (from, to) = (to, from);
    }
}

/// A29: a network that says nothing for three seconds costs a waiter those, not its wait.
#[test]
fn a_waiter_behind_a_silent_network_gets_in_when_it_is_back() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let (holder, lock) = (lock(&server.url(), LONG, 500), lock(&proxy.url(), LONG, 300));
    let held = holder.lock().expect("the lock");
    held.detach();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| lock.try_lock_for(Duration::from_secs(10)).expect("no error"));
        eventually(LONG, "it listens", || waiting(&holder) == 1 && server.blocked_clients() == 1);
        proxy.freeze();
        thread::sleep(Duration::from_millis(1500));
        // Its bell rings into the silence.
        held.unlock().expect("released");
        thread::sleep(Duration::from_millis(1500));
        assert!(!waiter.is_finished());
        proxy.thaw();
        let start = Instant::now();
        assert!(waiter.join().expect("no panic").is_some());
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        assert!(proxy.counts().frozen > 0);
    });
}

/// A29: all connections that were open are dead without a word, new ones work: a lease has no time to try the dead
/// ones one after the other.
#[test]
fn a_renewal_leaves_half_open_connections_in_time() {
    const OPEN: usize = 5;
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let lock = lock(&proxy.url(), Duration::from_secs(2), 1000);
    fill_pool(&proxy, &lock, OPEN);
    let guard = lock.lock().expect("the lock");
    assert_eq!(proxy.connections(), OPEN, "all of them idle in the pool");
    // Every connection that runs a script falls silent, up to the first new one: that begins by loading the scripts.
    let renewed = AtomicBool::new(false);
    let silent = proxy.swallow_replies_to(OPEN, Swallow::Silence, move |request| {
        renewed.fetch_or(request.windows(4).any(|word| word == b"LOAD"), Ordering::Relaxed);
        runs_script(request) && !renewed.load(Ordering::Relaxed)
    });
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(3500) {
        assert!(!guard.is_lost(), "after {:?} and {} dead connections", start.elapsed(), silent.count());
        thread::sleep(Duration::from_millis(10));
    }
    assert!(silent.happened());
    guard.unlock().expect("never lost");
}

/// A29: a crash of the server with waiters of several clients blocked on it.
#[test]
fn waiters_that_block_while_the_server_crashes_are_served_in_order() {
    let server = Server::builder().aof(true).start();
    let locks: Vec<FifoLock> = (0..3).map(|_| lock(&server.url(), LONG, 300)).collect();
    let held = locks[0].lock().expect("the lock");
    held.detach();
    let order = parking_lot::Mutex::new(Vec::new());
    thread::scope(|scope| {
        for arrival in 0..6_usize {
            let (lock, order) = (&locks[arrival % 3], &order);
            scope.spawn(move || {
                let guard = lock.lock().expect("its turn");
                order.lock().push((arrival, guard.position(), guard.fence()));
            });
            eventually(LONG, "it queues", || waiting(lock) == arrival as u64 + 1);
        }
        eventually(LONG, "all clients listen", || server.blocked_clients() == 3);
        for _ in 0..2 {
            server.kill();
            thread::sleep(Duration::from_millis(100));
            server.start_again();
            eventually(LONG, "it answers again", || locks[0].status().is_ok());
        }
        held.unlock().expect("released");
    });
    let order = order.into_inner();
    assert_eq!(order.len(), 6);
    assert!(order.is_sorted_by(|a, b| a.0 < b.0 && a.1 < b.1 && a.2 < b.2), "{order:?}");
}

/// A30: the script runs when nobody listens any more, and is sent again, several times: one grant.
#[test]
fn an_acquire_that_a_paused_server_answers_too_late_is_one_grant() {
    let server = Server::start();
    let lock = lock(&server.url(), LONG, 200);
    waiting(&lock);
    let mut monitor = server.monitor();
    server.client_pause(700, "ALL");
    let start = Instant::now();
    let guard = lock.lock().expect("the lock, when the server is back");
    assert!(start.elapsed() > Duration::from_millis(500), "the pause was met");
    let fence = guard.fence();
    guard.unlock().expect("released once");
    let lines = monitor.lines();
    assert_eq!(fences(&lines), BTreeSet::from([fence.get()]), "one fence in all records");
    let status = lock.status().expect("a status");
    assert!(!status.held && status.waiting == 0, "{status:?}");
}

/// A30: a caller whose time is over before the server answers is told, and what the server does later is undone.
#[test]
fn an_acquire_given_up_in_an_outage_is_withdrawn_after_it_not_a_lease_later() {
    for kind in ["the server freezes", "the network freezes", "only the reply is lost"] {
        for wait in [true, false] {
            let server = Server::start();
            let proxy = Proxy::start(server.addr());
            let lock = lock(&proxy.url(), Duration::from_secs(60), 300);
            waiting(&lock);
            match kind {
                "the server freezes" => server.freeze(),
                "the network freezes" => proxy.freeze(),
                // More often than it is tried in the time there is.
                _ => drop(proxy.swallow_replies_to(4, Swallow::Silence, runs_script)),
            }
            let result = if wait { lock.try_lock_for(Duration::from_millis(400)) } else { lock.try_lock() };
            assert!(matches!(result, Err(Error::Redis { .. })), "{kind}: {result:?}");
            server.thaw();
            proxy.thaw();
            let other = self::lock(&server.url(), LONG, 1000);
            let start = Instant::now();
            let next = other.try_lock_for(Duration::from_secs(10)).expect("an answer");
            assert!(next.is_some(), "{kind}");
            // A call may be on its way for its timeout, and the withdrawal is repeated after that.
            assert!(start.elapsed() < Duration::from_secs(3), "{kind}: {:?}", start.elapsed());
            drop(next);
            eventually(LONG, "nothing is left of it", || {
                let status = other.status().expect("a status");
                !status.held && status.waiting == 0
            });
        }
    }
}

/// A30: the process that waits is stopped and continued over and over, which ends its reads with EINTR.
#[test]
fn signals_to_waiters_and_holders_are_no_errors() {
    let server = Server::start();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().display().to_string();
    let mut children: Vec<Child> =
        (0..2).map(|_| Child::spawn("rounds", &[&server.url(), "x", "4", "60", &path])).collect();
    eventually(LONG, "they run", || Journal::at(dir.path().join("journal")).read().len() > 5);
    let mut stops = 0;
    let mut done = 0;
    while done < children.len() {
        for child in &mut children {
            if child.wait(Duration::ZERO).is_none() {
                child.sigstop();
                child.sigcont();
                stops += 1;
            }
        }
        thread::sleep(Duration::from_millis(5));
        done = children.iter_mut().filter_map(|child| child.wait(Duration::ZERO)).count();
    }
    for child in &mut children {
        assert_eq!(child.line(LONG).as_deref(), Some("done"), "no call of it gave an error");
        assert!(child.wait(LONG).expect("the end").success());
    }
    assert!(stops > 50, "{stops} stops");
    section_is_clean(dir.path());
    let entries = Journal::at(dir.path().join("journal")).read();
    assert_eq!(entries.len(), 2 * 4 * 60);
    assert!(entries.is_sorted_by(|a, b| a.fence < b.fence), "fences ascend");
}

/// A30: a signal in the middle of listening loses neither the place nor the ring.
#[test]
fn a_waiter_stopped_and_continued_while_it_listens_is_rung_all_the_same() {
    let server = Server::start();
    let holder = lock(&server.url(), LONG, 1000);
    let held = holder.lock().expect("the lock");
    held.detach();
    let waiter = Child::spawn("queue", &[&server.url(), "x", "20000", "3"]);
    assert_eq!(waiter.line(LONG).as_deref(), Some("queued"));
    eventually(LONG, "it listens", || server.blocked_clients() == 1);
    for _ in 0..20 {
        waiter.sigstop();
        waiter.sigcont();
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(waiting(&holder), 3, "none of them gave up");
    // The ring comes while it stands still.
    waiter.sigstop();
    let start = Instant::now();
    held.unlock().expect("released");
    waiter.sigcont();
    let fences: Vec<u64> =
        (0..3).map(|_| waiter.line(LONG).expect("its turn").parse().expect("a fence")).collect();
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert!(fences.is_sorted_by(|a, b| a < b), "{fences:?}");
}

/// A31: a release that the server carries out late, because its process stood still, is one release.
#[test]
fn a_release_that_a_frozen_server_answers_late_hands_over_once() {
    for _ in 0..3 {
        let server = Server::start();
        let (a, b) = (lock(&server.url(), LONG, 150), lock(&server.url(), LONG, 2000));
        let held = a.lock().expect("the lock");
        held.detach();
        let first = held.fence();
        let mut monitor = server.monitor();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| b.lock().expect("its turn"));
            eventually(LONG, "it queues", || waiting(&b) == 1);
            server.freeze();
            let release = scope.spawn(move || held.unlock());
            thread::sleep(Duration::from_millis(400));
            assert!(!release.is_finished(), "it keeps trying");
            server.thaw();
            release.join().expect("no panic").expect("no false alarm");
            let guard = waiter.join().expect("no panic");
            let given = fences(&monitor.lines());
            assert_eq!(given, BTreeSet::from([first.get(), guard.fence().get()]), "one hand-over");
            guard.unlock().expect("still its own");
        });
    }
}

/// A31: a release that never arrived, and one whose reply was lost, are both told from a lease that was lost.
#[test]
fn a_repeated_release_tells_a_lost_reply_from_a_lost_lease() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let other = lock(&server.url(), LONG, 2000);
    for how in [Swallow::CutBefore, Swallow::Cut, Swallow::Silence] {
        let lock = lock(&proxy.url(), LONG, 300);
        let held = lock.lock().expect("the lock");
        let fault = proxy.swallow_next_reply_to(how, runs_script);
        held.unlock().unwrap_or_else(|error| panic!("{how:?}: {error}"));
        assert!(fault.happened());
        drop(other.try_lock().expect("an answer").expect("it is free"));
    }
    for how in [Swallow::CutBefore, Swallow::Cut, Swallow::Silence] {
        let lock = lock(&proxy.url(), LONG, 300);
        let held = lock.lock().expect("the lock");
        // Taken away behind its back, given to somebody else, and free again.
        assert!(other.evict(held.fence()).expect("an answer"));
        other.try_lock().expect("an answer").expect("free").unlock().expect("released");
        let fault = proxy.swallow_next_reply_to(how, runs_script);
        let result = held.unlock();
        assert!(matches!(result, Err(Error::LeaseLost { .. })), "{how:?}: {result:?}");
        assert!(fault.happened());
    }
}

/// A31: what a release could not deliver in its time is delivered when the server is back, not a lease later.
#[test]
fn a_release_that_ran_out_of_time_is_delivered_later() {
    let server = Server::start();
    let client = client(&server.url(), 150);
    let lock = client
        .builder("x")
        .lease(Duration::from_secs(60))
        .release_bound(Duration::from_millis(300))
        .build()
        .expect("a lock");
    let held = lock.lock().expect("the lock");
    server.freeze();
    let start = Instant::now();
    let result = held.unlock();
    assert!(matches!(&result, Err(Error::Redis { .. })), "{result:?}");
    assert!(start.elapsed() < Duration::from_millis(1000), "{:?}", start.elapsed());
    server.thaw();
    let other = self::lock(&server.url(), LONG, 1000);
    let start = Instant::now();
    assert!(other.try_lock_for(LONG).expect("an answer").is_some());
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    // Nothing arrives after that and takes it away from anybody.
    let next = other.lock().expect("free");
    thread::sleep(Duration::from_millis(300));
    assert_eq!(other.status().expect("a status").fence, Some(next.fence()));
    next.unlock().expect("untouched");
}
