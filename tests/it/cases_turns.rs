//! Whose turn it is: cases A14 to A18 of known bugs of other locks. Everybody is woken in time, and gets in in the order of
//! arrival.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use redis::cmd;
use redis_fifo_lock::protocol::TicketId;
use redis_fifo_lock::{Error, FifoLock, LockClient, LockGuard};

use crate::support::child::Child;
use crate::support::proxy::Proxy;
use crate::support::seen::{Seen, client, take};
use crate::support::server::Server;
use crate::support::{SetOnDrop, eventually};

/// Much longer than anything here takes.
const LONG: Duration = Duration::from_secs(20);
/// How much later than promised a busy machine may do something: much less than what a failure costs.
const SLACK: Duration = ms(3000);
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
                    drop(lock.try_lock_for(ms(20)));
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

/// Has `threads` threads on each of `locks` take the lock `rounds` times by `take`; says the longest time from a release to
/// the next entry.
fn slowest_handover(
    locks: &[FifoLock],
    threads: usize,
    rounds: usize,
    take: impl Fn(&FifoLock) -> LockGuard + Sync,
) -> Duration {
    // The last release, and the longest time from one to the next entry.
    let handovers = Mutex::new((Instant::now(), Duration::ZERO));
    thread::scope(|scope| {
        for lock in locks {
            for _ in 0..threads {
                let (handovers, take) = (&handovers, &take);
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
        let slowest = slowest_handover(&locks, threads, rounds, take);
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
        slowest_handover(&locks, 3, 60, |lock| {
            loop {
                match lock.try_lock_for(LONG) {
                    // A first call whose connection is cut while it is being made ends at once: nothing is queued yet.
                    Err(Error::Redis { .. }) => {}
                    taken => return taken.expect("an answer").expect("the lock in time"),
                }
            }
        })
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
