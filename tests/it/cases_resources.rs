//! What waiting and holding cost: connections, commands, keys, threads, memory; and what a panic costs.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use redis::{Commands, cmd};
use redis_fifo_lock::{FifoLock, LockClient};

use crate::support::child::Child;
use crate::support::proxy::Proxy;
use crate::support::server::Server;
use crate::support::{eventually, timed};

const LONG: Duration = Duration::from_secs(20);

fn client(server: &Server) -> LockClient {
    LockClient::connect(&server.url()).expect("a client")
}

fn lock(server: &Server, name: &str) -> FifoLock {
    client(server).fifo_lock(name).expect("a lock")
}

fn waiting(lock: &FifoLock) -> u64 {
    lock.status().expect("a status").waiting
}

/// How many scripts the server has run.
fn script_calls(server: &Server) -> u64 {
    server.command_calls("evalsha") + server.command_calls("eval")
}

/// The CPU time that a process has used, in milliseconds: fields 14 and 15 of its `stat`, in hundredths of a second.
fn cpu_ms(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("a Linux /proc");
    let (_, fields) = stat.rsplit_once(") ").expect("a name in parentheses");
    let ticks = fields.split(' ').skip(11).take(2).map(|field| field.parse::<u64>().expect("a number"));
    ticks.sum::<u64>() * 10
}

/// A19: whoever writes to a bell by mistake costs its owner neither a busy loop nor its turn.
#[test]
fn junk_on_a_bell_makes_no_waiter_spin_and_hides_no_ring() {
    let server = Server::start();
    let lock = lock(&server, "x");
    let held = lock.lock().expect("the lock");
    held.detach();
    let waiter = Child::spawn("queue", &[&server.url(), "x", "60000", "1"]);
    assert_eq!(waiter.line(LONG).as_deref(), Some("queued"));
    eventually(LONG, "it listens", || server.blocked_clients() == 1);
    let mut connection = server.connection();
    let ticket: Vec<String> = connection.zrange("fifo:{x}:queue", 0, 0).expect("the queue");
    let (owner, _) = ticket[0].split_once('.').expect("a client");
    let bell = format!("fifo:{{x}}:bell:{owner}");
    // Before the first junk, so that nothing it causes is missed.
    server.reset_stats();
    let cpu = cpu_ms(waiter.id());
    for _ in 0..1000 {
        connection.rpush::<_, _, ()>(&bell, "junk").expect("RPUSH");
    }
    let start = Instant::now();
    thread::sleep(Duration::from_secs(2));
    let cpu = cpu_ms(waiter.id()) - cpu;
    let seconds = start.elapsed().as_secs() + 1;
    // This client of ours polls every 200 ms, which is what the calls are; junk adds none.
    assert!(script_calls(&server) <= 5 * seconds + 2, "{} script calls", script_calls(&server));
    assert!(server.command_calls("blpop") <= 20, "{} BLPOPs", server.command_calls("blpop"));
    assert!(cpu <= 50 * seconds, "{cpu} ms of CPU in {seconds} s");
    assert!(connection.llen::<_, u64>(&bell).expect("LLEN") > 900, "the junk was there all the time");

    let start = Instant::now();
    held.unlock().expect("released");
    assert!(waiter.line(LONG).is_some(), "it gets in");
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    assert_ne!(server.pttl(&bell), -1, "the junk does not stay for ever either");
}

/// A19: a ring belongs to one grant of one ticket; one that comes again, or names an older grant, wakes nobody.
#[test]
fn stale_rings_neither_grant_nor_cost_calls() {
    let server = Server::start();
    let (a, b_client) = (lock(&server, "x"), client(&server));
    let b = b_client.builder("x").poll(Duration::from_secs(30)).build().expect("a lock");
    // A ticket of b that is over: its first.
    let over = b.lock().expect("the lock");
    let old_fence = over.fence();
    over.unlock().expect("released");
    let held = a.lock().expect("the lock");
    held.detach();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| b.lock().expect("its turn").fence());
        eventually(LONG, "it listens", || server.blocked_clients() == 1);
        let mut connection = server.connection();
        let waits: Vec<String> = connection.zrange("fifo:{x}:queue", 0, 0).expect("the queue");
        let bell = format!("fifo:{{x}}:bell:{}", b_client.id());
        server.reset_stats();
        for _ in 0..100 {
            for ticket in [&waits[0], &format!("{}.1.60000", b_client.id())] {
                // The waiting ticket with the fence that another one holds, and a ticket that is over with its own.
                let fence = if ticket == &waits[0] { held.fence() } else { old_fence };
                connection.rpush::<_, _, ()>(&bell, format!("{ticket} {fence}")).expect("RPUSH");
            }
        }
        eventually(LONG, "all are heard", || connection.llen::<_, u64>(&bell).expect("LLEN") == 0);
        thread::sleep(Duration::from_millis(200));
        assert!(!waiter.is_finished(), "the lock is still a's");
        assert!(script_calls(&server) <= 5, "{} script calls", script_calls(&server));
        assert!(server.command_calls("blpop") <= 205, "{} BLPOPs", server.command_calls("blpop"));
        let fence = held.fence();
        held.unlock().expect("released");
        assert!(waiter.join().expect("no panic") > fence);
    });
}

/// A20: names that are used once leave nothing for ever: not by use, not by timeouts; and two keys by a crash of all
/// who knew the name, until it is used again.
#[test]
fn names_used_once_leave_no_key_but_those_of_the_crashed() {
    const CRASHED: u64 = 20;
    let server = Server::start();
    let mut dies = Child::spawn("hold_many", &[&server.url(), "crashed", "500", &CRASHED.to_string()]);
    assert_eq!(dies.line(LONG).as_deref(), Some("held"));
    let (holder, user) = (client(&server), client(&server));
    let idle = Duration::from_millis(1500);
    for name in 0..200 {
        let name = format!("once-{name}");
        // One in ten is held by somebody else, so that waiting for it is in vain.
        let held = name.ends_with('0').then(|| {
            let lock = holder.builder(&name).idle(idle).build().expect("a lock");
            lock.lock().expect("the lock")
        });
        let lock = user.builder(&name).idle(idle).build().expect("a lock");
        let got = lock.try_lock_for(Duration::from_millis(10)).expect("an answer");
        assert_eq!(got.is_none(), held.is_some());
    }
    dies.sigkill();
    let crashed = |key: &String| key.starts_with("fifo:{crashed-");
    let mut connection = server.connection();
    eventually(LONG, "what was used goes", || server.keys("*").iter().all(crashed));
    let left = server.keys("*").len() as u64;
    assert!((CRASHED..=2 * CRASHED).contains(&left), "{left} keys of {CRASHED} names");
    // Whoever uses such a name again sweeps it, too.
    for name in 0..CRASHED {
        let lock = user.builder(&format!("crashed-{name}")).idle(idle).build().expect("a lock");
        assert!(lock.try_lock_for(LONG).expect("an answer").is_some(), "its lease has lapsed");
    }
    eventually(LONG, "nothing is left", || cmd("DBSIZE").query::<u64>(&mut connection).expect("DBSIZE") == 0);
}

/// A20: a process that goes through thousands of names does not grow.
#[test]
fn threads_files_and_memory_of_a_process_stay_flat_over_many_names() {
    let server = Server::start();
    let mut user = Child::spawn("names", &[&server.url(), "800"]);
    let mut measured = || -> [u64; 3] {
        assert!(user.send("go"));
        assert_eq!(user.line(LONG).as_deref(), Some("done"));
        let pid = user.id();
        let count = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).expect("Linux").count() as u64;
        // The process itself has two, each client two for its pools; idle renewal threads stay for ten seconds.
        eventually(LONG, "listeners of unused names end", || count("task") <= 12);
        let statm = fs::read_to_string(format!("/proc/{pid}/statm")).expect("a Linux /proc");
        let pages: u64 = statm.split(' ').nth(1).expect("the resident pages").parse().expect("a number");
        [count("task"), count("fd"), pages * 4]
    };
    let first = measured();
    let second = measured();
    // 72 pooled connections of the one client, 8 of the other, which waits for nobody, and what every process has.
    assert!(second[1] <= 100, "threads, files and KiB: {first:?}, then {second:?}");
    assert!(second[2] <= first[2] + 1024, "threads, files and KiB: {first:?}, then {second:?}");
}

/// A22: waiters on many locks at once, with fewer listening connections than locks, leave the one connection for
/// calls to the renewals.
#[test]
fn more_contended_locks_than_connections_starve_no_renewal() {
    const LOCKS: usize = 6;
    const WAITERS: usize = 4;
    let server = Server::start();
    let client = LockClient::options()
        .url(&server.url())
        .command_pool(1)
        .bell_connections(2)
        .build()
        .expect("a client");
    let locks: Vec<FifoLock> = (0..LOCKS)
        .map(|name| {
            let name = format!("lock-{name}");
            client.builder(&name).lease(Duration::from_millis(1600)).build().expect("a lock")
        })
        .collect();
    let held: Vec<_> = locks.iter().map(|lock| lock.acquire().expect("the lock")).collect();
    thread::scope(|scope| {
        let waiters: Vec<_> = locks
            .iter()
            .flat_map(|lock| std::iter::repeat_n(lock, WAITERS))
            .map(|lock| scope.spawn(|| lock.try_lock_for(LONG).expect("an answer").is_some()))
            .collect();
        eventually(LONG, "all wait", || locks.iter().all(|lock| waiting(lock) == WAITERS as u64));
        let until = Instant::now() + Duration::from_millis(2800);
        while Instant::now() < until {
            assert!(!held.iter().any(redis_fifo_lock::Lease::is_lost), "renewed");
            // One for calls, two that listen, one in reserve for renewals and releases.
            assert!(server.connected_clients() <= 4, "{} connections", server.connected_clients());
            thread::sleep(Duration::from_millis(20));
        }
        for lease in held {
            let (released, took) = timed(|| lease.release());
            released.expect("still ours");
            assert!(took < Duration::from_millis(500), "{took:?}");
        }
        assert!(waiters.into_iter().all(|waiter| waiter.join().expect("no panic")), "all get in");
    });
}

/// A22: a waiter in the queue of the pool for calls does not miss that a broken connection made room.
#[test]
fn calls_that_queue_for_the_only_connection_survive_its_death() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let client = LockClient::options().url(&proxy.url()).command_pool(1).build().expect("a client");
    let lock = client.fifo_lock("x").expect("a lock");
    assert_eq!(waiting(&lock), 0);
    let start = Instant::now();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..20 {
                    drop(lock.lock().expect("a turn"));
                }
            });
        }
        for _ in 0..5 {
            thread::sleep(Duration::from_millis(20));
            proxy.cut();
        }
    });
    assert!(proxy.counts().cut > 0);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

/// A42: a panic in the section gives the lock to the next, costs the pool nothing, and ends the process in no way.
#[test]
fn a_hundred_panicking_holders_leave_lock_pool_and_process_healthy() {
    let server = Server::start();
    let mut panics = Child::spawn("panics", &[&server.url(), "x", "100"]);
    // How long the next acquire took, in milliseconds, best of five.
    let took: u64 = panics.line(LONG).expect("it lives").parse().expect("a number");
    assert!(took < 100, "{took} ms");
    assert_eq!(panics.line(LONG).as_deref(), Some("100 panics"));
    assert!(panics.wait(LONG).expect("the end").success());
    let status = lock(&server, "x").status().expect("a status");
    assert!(!status.held && status.waiting == 0, "{status:?}");
}

/// A42: also with the server gone, unwinding is neither an abort nor unbounded.
#[test]
fn a_panic_while_the_server_is_gone_unwinds_within_the_release_bound() {
    let server = Server::start();
    let client = LockClient::options()
        .url(&server.url())
        .call_timeout(Duration::from_millis(200))
        .build()
        .expect("a client");
    let lock = client.builder("x").release_bound(Duration::from_millis(400)).build().expect("a lock");
    let other = client.builder("y").release_bound(Duration::from_millis(400)).build().expect("a lock");
    let section = thread::spawn(move || {
        let _guard = lock.lock().expect("the lock");
        let _lease = other.acquire().expect("the other");
        server.freeze();
        let start = Instant::now();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _both = (_guard, _lease);
            panic!("in the section");
        }));
        (panicked.is_err(), start.elapsed())
    });
    let (panicked, took) = section.join().expect("the panic was caught");
    assert!(panicked);
    // Two bounds of 400 ms, a call that may have begun just before each of them ended, and a loaded machine.
    assert!(took < Duration::from_millis(2000), "{took:?}");
}

/// A43: an uncontended pair is two commands, whatever came before it.
#[test]
fn an_uncontended_acquire_and_release_are_two_commands_and_no_ping() {
    let server = Server::start();
    let lock = lock(&server, "x");
    drop(lock.lock().expect("connected"));
    server.reset_stats();
    let mut monitor = server.monitor();
    for _ in 0..50 {
        drop(lock.lock().expect("the lock"));
    }
    assert_eq!(server.command_calls("evalsha"), 100);
    let from_clients = monitor.lines();
    let others: Vec<_> = from_clients
        .iter()
        .filter(|line| !line.contains(" lua]") && !line.contains("\"EVALSHA\"") && !line.contains("\"INFO\""))
        .collect();
    assert!(others.is_empty(), "{others:?}");
    // GET, TIME, ZCARD and SET; GET, ZPOPMIN and SET: what the design allows for each is four.
    let inside = from_clients.iter().filter(|line| line.contains(" lua]")).count();
    assert!(inside <= 50 * 8, "{inside} commands in 100 scripts");
}

/// A43: waiting is listening; two hundred waiters cost as much as one.
#[test]
fn two_hundred_idle_waiters_are_nearly_silent() {
    let server = Server::start();
    let (holder, client) = (lock(&server, "x"), client(&server));
    let lock = client.fifo_lock("x").expect("a lock");
    let held = holder.lock().expect("the lock");
    held.detach();
    thread::scope(|scope| {
        for _ in 0..200 {
            scope.spawn(|| drop(lock.lock().expect("its turn")));
        }
        eventually(LONG, "all wait", || waiting(&holder) == 200);
        server.reset_stats();
        thread::sleep(Duration::from_secs(3));
        let (scripts, blpops) = (script_calls(&server), server.command_calls("blpop"));
        // A poll every two seconds at most and a BLPOP of two seconds or more: not each, but all of them together.
        assert!(scripts + blpops <= 8, "{scripts} scripts, {blpops} BLPOPs in 3 s for 200 waiters");
        assert_eq!(server.command_calls("ping"), 0);
        held.unlock().expect("released");
    });
}

/// A43: the scripts do not depend on the lock.
#[test]
fn the_script_cache_does_not_grow_with_the_number_of_locks() {
    let server = Server::start();
    let client = client(&server);
    for name in 0..300 {
        let lock = client.fifo_lock(&format!("name-{name}")).expect("a lock");
        let guard = lock.lock().expect("the lock");
        assert!(lock.try_lock().expect("an answer").is_none());
        assert!(lock.status().expect("a status").held);
        drop(guard);
    }
    let info: String = cmd("INFO").arg("memory").query(&mut server.connection()).expect("INFO");
    let cached = info.lines().find_map(|line| line.strip_prefix("number_of_cached_scripts:"));
    let cached: u64 = cached.expect("the field").trim().parse().expect("a number");
    // As many as there are files in scripts/: those of gates and jobs are loaded with those of the lock.
    let scripts = fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts")).expect("the scripts");
    let scripts =
        scripts.filter(|entry| entry.as_ref().is_ok_and(|entry| entry.path().is_file())).count() as u64;
    assert!((1..=scripts).contains(&cached), "{cached} scripts of {scripts}");
}
