//! Who comes next: cases A12 to A18 of known bugs of other locks. The queue goes on past the dead and the departed, wakes
//! everybody in time, and keeps the order of arrival.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use redis::cmd;
use redis_fifo_lock::protocol::TicketId;
use redis_fifo_lock::{Error, FifoLock, LockClient};

use crate::support::child::Child;
use crate::support::proxy::{Proxy, Swallow};
use crate::support::seen::{Seen, client, take};
use crate::support::server::Server;
use crate::support::{SetOnDrop, eventually};

/// Much longer than anything here takes.
const LONG: Duration = Duration::from_secs(20);
/// How much later than promised a busy machine may do something.
const SLACK: Duration = ms(1000);
/// The claim window and the poll of these tests, and of the roles of their children.
const SHORT: Duration = ms(300);
/// So seldom that a test in which a poll has to help fails.
const SELDOM: Duration = ms(30_000);

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A lock of a client of its own, with short windows.
fn quick(server: &Server, name: &str, lease: Duration) -> FifoLock {
    let builder = client(&server.url()).builder(name).lease(lease);
    builder.claim(SHORT.min(lease)).poll(SHORT).build().expect("a lock")
}

/// A lock of a client of its own whose waiters hardly ever ask by themselves.
fn patient(server: &Server, name: &str, lease: Duration) -> FifoLock {
    client(&server.url()).builder(name).lease(lease).poll(SELDOM).build().expect("a lock")
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
                        match lock.try_lock_for(wait).expect("an answer") {
                            Some(guard) => {
                                guard.unlock().expect("its own release");
                                granted.fetch_add(1, Ordering::SeqCst);
                            }
                            None => {
                                gave_up.fetch_add(1, Ordering::SeqCst);
                            }
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

/// A14: ten waiters wait for ten claim windows while a hundred others come and go; all of them get in, in order.
#[test]
fn long_wait_costs_nobody_its_place() {
    const WAITERS: usize = 10;
    let server = Server::start();
    let seen = Seen::of(&server, "long");
    let holder = quick(&server, "long", ms(30_000)).lock().expect("the lock");
    let order = Mutex::new(Vec::new());
    let (over, visits) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        let waiters: Vec<_> = (0..WAITERS)
            .map(|number| {
                let lock = quick(&server, "long", ms(30_000));
                let order = &order;
                let waiter = scope.spawn(move || {
                    let guard = take(&lock);
                    order.lock().expect("no panic").push((number, guard.position()));
                });
                seen.wait_for_queue(number + 1);
                waiter
            })
            .collect();
        let queue = seen.queue();
        let _over = SetOnDrop(&over);
        for _ in 0..4 {
            scope.spawn(|| {
                let lock = quick(&server, "long", ms(30_000));
                while !over.load(Ordering::SeqCst) {
                    drop(lock.try_lock_for(ms(20)).expect("an answer"));
                    visits.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        let start = Instant::now();
        while start.elapsed() < SHORT * 10 {
            assert_eq!(seen.queue()[..WAITERS], queue);
            thread::sleep(ms(50));
        }
        let start = Instant::now();
        holder.unlock().expect("its own release");
        waiters.into_iter().for_each(|waiter| waiter.join().expect("no panic"));
        assert!(start.elapsed() < ms(1000) + SLACK, "{:?}", start.elapsed());
        assert!(visits.load(Ordering::SeqCst) >= 100, "nobody came and went");
    });
    let order = order.into_inner().expect("no panic");
    assert!(order.iter().map(|(number, _)| *number).eq(0..WAITERS), "{order:?}");
    assert!(order.is_sorted_by_key(|(_, position)| *position), "{order:?}");
}

/// A14: a waiter's process stands still when its turn comes, for so long that its grant lapses. It is passed over, and is
/// first again as soon as it is back.
#[test]
fn waiter_that_stood_still_is_first_again_when_it_is_back() {
    let server = Server::start();
    let seen = Seen::of(&server, "stalled");
    let holder = quick(&server, "stalled", ms(30_000)).lock().expect("the lock");
    let mut stalled = Child::spawn("hold", &[&server.url(), "stalled", "500"]);
    seen.wait_for_queue(1);
    let ticket = seen.queue().remove(0);
    let others = [(); 3].map(|()| quick(&server, "stalled", ms(30_000)));
    let leave = [(); 3].map(|()| AtomicBool::new(false));
    thread::scope(|scope| {
        let waiters: Vec<_> = others
            .iter()
            .zip(&leave)
            .enumerate()
            .map(|(number, (lock, leave))| {
                let waiter = scope.spawn(move || {
                    let guard = take(lock);
                    eventually(LONG, "the test goes on", || leave.load(Ordering::SeqCst));
                    let fence = guard.fence().get();
                    guard.unlock().expect("its own release");
                    fence
                });
                seen.wait_for_queue(number + 2);
                waiter
            })
            .collect();
        let first = seen.queue().remove(1);
        stalled.sigstop();
        holder.unlock().expect("its own release");
        eventually(LONG, "the first of the others has the lock", || {
            seen.holder().is_some_and(|holder| holder.as_str() == first)
        });
        assert!(!seen.queue().contains(&ticket), "it was not passed over");

        stalled.sigcont();
        eventually(LONG, "it is back at the head of the queue", || seen.queue().first() == Some(&ticket));
        leave[0].store(true, Ordering::SeqCst);
        let fence = fence_of(&stalled);
        for leave in &leave[1..] {
            leave.store(true, Ordering::SeqCst);
        }
        assert!(stalled.send("unlock"));
        assert_eq!(stalled.line(LONG).as_deref(), Some("Ok(())"));
        let fences: Vec<u64> = waiters.into_iter().map(|waiter| waiter.join().expect("no panic")).collect();
        assert!(fences[0] < fence && fence < fences[1] && fences[1] < fences[2], "{fence} among {fences:?}");
    });
}

/// A14: a waiter's process stands still for two claim windows, and its lease is longer: it gets the lock all the same, and
/// the others keep their order.
#[test]
fn short_standstill_of_a_waiter_keeps_the_order_of_the_others() {
    let server = Server::start();
    let seen = Seen::of(&server, "dozing");
    let holder = quick(&server, "dozing", ms(30_000)).lock().expect("the lock");
    let mut dozing = Child::spawn("hold", &[&server.url(), "dozing", "30000"]);
    seen.wait_for_queue(1);
    let order = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for number in 0..4 {
            let lock = quick(&server, "dozing", ms(30_000));
            let order = &order;
            scope.spawn(move || {
                let _guard = take(&lock);
                order.lock().expect("no panic").push(number);
            });
            seen.wait_for_queue(number + 2);
        }
        dozing.sigstop();
        holder.unlock().expect("its own release");
        thread::sleep(SHORT * 2);
        dozing.sigcont();
        fence_of(&dozing);
        assert!(dozing.send("unlock"));
        assert_eq!(dozing.line(LONG).as_deref(), Some("Ok(())"));
    });
    assert_eq!(order.into_inner().expect("no panic"), [0, 1, 2, 3]);
}

/// A15: nobody rings when a holder dies, and its waiters hardly ever poll: the next one is in when the lease is over.
#[test]
fn waiter_behind_a_crashed_holder_is_served_when_the_lease_ends() {
    let server = Server::start();
    let seen = Seen::of(&server, "crashed");
    let mut holder = Child::spawn("hold", &[&server.url(), "crashed", "500"]);
    fence_of(&holder);
    let lock = patient(&server, "crashed", ms(500));
    thread::scope(|scope| {
        let waiter = scope.spawn(|| take(&lock));
        seen.wait_for_queue(1);
        // It has seen the lease renewed, and has polled since.
        thread::sleep(ms(600));
        holder.sigkill();
        let start = Instant::now();
        waiter.join().expect("no panic").unlock().expect("its own release");
        assert!(start.elapsed() < ms(500 + 100) + SLACK, "{:?}", start.elapsed());
    });
}

/// A15: the record vanishes, and nobody rings. Five waiters that hardly ever poll are served, in order: they look when the
/// lease that they knew of ends, and then give each other as long as that to come back.
#[test]
fn waiters_whose_lock_vanished_are_served_in_order() {
    let server = Server::start();
    let seen = Seen::of(&server, "vanished");
    for keys in [&["lock"][..], &["lock", "queue"]] {
        let holder = patient(&server, "vanished", ms(500)).lock().expect("the lock");
        let order = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for number in 0..5 {
                let lock = patient(&server, "vanished", ms(500));
                let order = &order;
                scope.spawn(move || {
                    let _guard = take(&lock);
                    order.lock().expect("no panic").push(number);
                });
                seen.wait_for_queue(number + 1);
            }
            let mut lose = cmd("DEL");
            keys.iter().for_each(|kind| {
                lose.arg(seen.key(kind));
            });
            assert_eq!(seen.query::<usize>(&lose), keys.len());
            let start = Instant::now();
            eventually(LONG, "the first is in", || !order.lock().expect("no panic").is_empty());
            // The lease that was known, then the same again and a claim window for the others to come back.
            assert!(start.elapsed() < ms(500 + 500 + 500) + SLACK, "{keys:?}: {:?}", start.elapsed());
        });
        assert_eq!(order.into_inner().expect("no panic"), [0, 1, 2, 3, 4], "{keys:?}");
        assert!(holder.is_lost());
        drop(holder);
    }
}

/// Has `threads` threads on each of `locks` take the lock `rounds` times; says the longest time from a release to the next
/// entry.
fn slowest_handover(locks: &[FifoLock], threads: usize, rounds: usize) -> Duration {
    // The last release, and the longest time from one to the next entry.
    let handovers = Mutex::new((Instant::now(), Duration::ZERO));
    thread::scope(|scope| {
        for lock in locks {
            for _ in 0..threads {
                let handovers = &handovers;
                scope.spawn(move || {
                    for _ in 0..rounds {
                        let guard = take(lock);
                        let mut handovers = handovers.lock().expect("no panic");
                        handovers.1 = handovers.1.max(handovers.0.elapsed());
                        handovers.0 = Instant::now();
                        drop(handovers);
                        guard.unlock().expect("its own release");
                    }
                });
            }
        }
    });
    handovers.into_inner().expect("no panic").1
}

/// A16: no release is missed by the one that waits, within a client or between two, alone or in a crowd: a missed one
/// would cost half a minute here.
#[test]
fn no_release_is_missed() {
    let server = Server::start();
    let lock = |name| patient(&server, name, ms(60_000));
    let one = lock("one");
    for (what, locks, threads, rounds) in [
        ("two threads of one client", vec![one.clone(), one], 1, 500),
        ("two clients", vec![lock("two"), lock("two")], 1, 1000),
        ("a crowd", vec![lock("crowd"), lock("crowd"), lock("crowd"), lock("crowd")], 12, 15),
    ] {
        let slowest = slowest_handover(&locks, threads, rounds);
        assert!(slowest < ms(1000) + SLACK, "{what}: {slowest:?}");
    }
}

/// A16: the same with a long way between the try and the listening, and with connections closed all the time.
#[test]
fn no_release_is_missed_on_a_slow_and_broken_network() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    proxy.delay(ms(1));
    let lock = || client(&proxy.url()).builder("slow").poll(SELDOM).build().expect("a lock");
    let locks = [lock(), lock()];
    let over = AtomicBool::new(false);
    let slowest = thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                thread::sleep(ms(150));
                proxy.cut();
            }
        });
        let _over = SetOnDrop(&over);
        slowest_handover(&locks, 3, 60)
    });
    assert!(proxy.counts().cut > 0, "nothing was cut");
    assert!(slowest < ms(1000) + SLACK, "{slowest:?}");
}

/// A17: twenty waiters, five a client, and eight threads that try and try again: none of these gets in while one of those
/// waits, and the waiters get in by position.
#[test]
fn newcomer_never_overtakes_a_waiter() {
    let server = Server::start();
    let seen = Seen::of(&server, "barging");
    let clients: Vec<LockClient> = (0..4).map(|_| client(&server.url())).collect();
    let holder = client(&server.url()).fifo_lock("barging").and_then(|lock| lock.lock()).expect("the lock");
    let order = Mutex::new(Vec::new());
    let over = AtomicBool::new(false);
    let (tries, barged) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        let waiters: Vec<_> = (0..20)
            .map(|number| {
                let lock = clients[number % 4].builder("barging").poll(SELDOM).build().expect("a lock");
                let (order, over) = (&order, &over);
                let waiter = scope.spawn(move || {
                    let guard = take(&lock);
                    let mut order = order.lock().expect("no panic");
                    order.push((number, guard.position(), guard.fence().get()));
                    // From now on nobody waits, so trying is allowed.
                    over.store(order.len() == 20, Ordering::SeqCst);
                    drop(order);
                    thread::sleep(ms(5));
                });
                seen.wait_for_queue(number + 1);
                waiter
            })
            .collect();
        for _ in 0..8 {
            scope.spawn(|| {
                let lock = client(&server.url()).fifo_lock("barging").expect("a lock");
                while !over.load(Ordering::SeqCst) {
                    let got = lock.try_lock().expect("an answer").is_some();
                    // Looked at again: the last waiter may have come and gone while the answer was under way.
                    if got && !over.load(Ordering::SeqCst) {
                        barged.fetch_add(1, Ordering::SeqCst);
                    }
                    tries.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        let _over = SetOnDrop(&over);
        eventually(LONG, "everybody tries", || tries.load(Ordering::SeqCst) > 40);
        holder.unlock().expect("its own release");
        waiters.into_iter().for_each(|waiter| waiter.join().expect("no panic"));
    });
    assert_eq!(barged.into_inner(), 0);
    let order = order.into_inner().expect("no panic");
    assert!(order.iter().map(|(number, ..)| *number).eq(0..20), "{order:?}");
    assert!(order.is_sorted_by(|a, b| a.1 < b.1 && a.2 < b.2), "{order:?}");
}

/// A18: thirty clients ask in one burst; they are granted in the order in which the server ran their calls.
#[test]
fn burst_is_served_in_the_order_of_arrival() {
    const CLIENTS: usize = 30;
    let server = Server::start();
    let seen = Seen::of(&server, "burst");
    let holder = client(&server.url()).fifo_lock("burst").and_then(|lock| lock.lock()).expect("the lock");
    let locks: Vec<FifoLock> = (0..CLIENTS)
        .map(|_| {
            let lock = patient(&server, "burst", ms(60_000));
            // Connects: a server that stands still answers no greeting.
            assert!(lock.try_lock().expect("an answer").is_none());
            lock
        })
        .collect();
    let monitor = server.monitor();
    let granted = Mutex::new(Vec::new());
    let arrived = thread::scope(|scope| {
        server.freeze();
        for lock in &locks {
            let (granted, seen) = (&granted, &seen);
            scope.spawn(move || {
                let _guard = take(lock);
                let holder = seen.holder().expect("a holder");
                granted.lock().expect("no panic").push(holder.to_string());
            });
        }
        thread::sleep(ms(300));
        server.thaw();
        seen.wait_for_queue(CLIENTS);
        let calls = monitor.stop();
        // The first call of a ticket is an `acquire` with a ticket and an empty position behind four keys.
        let ticket = |line: &String| {
            let args: Vec<&str> = line.split('"').skip(1).step_by(2).collect();
            let first = args.first() == Some(&"EVALSHA") && args.get(8) == Some(&"");
            first.then(|| args[7].to_owned())
        };
        let arrived: Vec<String> = calls.iter().filter_map(ticket).collect();
        assert_eq!(seen.queue(), arrived);
        holder.unlock().expect("its own release");
        arrived
    });
    assert_eq!(arrived.len(), CLIENTS);
    assert_eq!(granted.into_inner().expect("no panic"), arrived);
}

/// A18: the server's clock has been an hour ahead, so no position comes from the clock any more; tickets that would come
/// out in the order of their names are still granted in the order of arrival.
#[test]
fn order_of_arrival_rests_neither_on_the_clock_nor_on_names() {
    let server = Server::start();
    let seen = Seen::of(&server, "hour");
    let now: (u64, u64) = seen.query(&cmd("TIME"));
    let ahead = (now.0 + 3600) * 1_000_000;
    let record = format!("- {ahead} 0 - {ahead} 1 - 0");
    seen.query::<()>(cmd("SET").arg(seen.key("lock")).arg(record));
    let lock = |label: char| {
        let options = LockClient::options().url(&server.url()).label(&label.to_string());
        options.build().and_then(|locks| locks.fifo_lock("hour")).expect("a lock")
    };
    let holder = lock('m').lock().expect("the lock");
    assert_eq!((holder.position(), holder.fence().get()), (ahead + 1, ahead + 1));
    let labels = ['z', 'y', 'x', 'a', 'b', 'c', 'w', 'v', 'd', 'e'];
    let order = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for (number, label) in labels.into_iter().enumerate() {
            let lock = lock(label);
            let order = &order;
            scope.spawn(move || {
                let guard = take(&lock);
                order.lock().expect("no panic").push((label, guard.position(), guard.fence().get()));
            });
            seen.wait_for_queue(number + 1);
        }
        let queue: Vec<TicketId> =
            seen.queue().iter().map(|ticket| TicketId::parse(ticket).expect("a ticket")).collect();
        assert!(queue.iter().map(|ticket| ticket.client().chars().next()).eq(labels.map(Some)), "{queue:?}");
        holder.unlock().expect("its own release");
    });
    let expected = (2..).zip(labels).map(|(number, label)| (label, ahead + number, ahead + number));
    assert!(order.into_inner().expect("no panic").into_iter().eq(expected));
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
