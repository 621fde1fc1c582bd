//! How long a lease goes on: cases A04 to A06 and A08 to A11 of known bugs of other locks. Renewal goes on through
//! trouble, ends with its lease on every way out, and its holder learns of a loss in time.

use std::thread;
use std::time::{Duration, Instant};

use redis::{ErrorKind, ServerErrorKind, cmd};
use redis_fifo_lock::{Error, FifoLock, LockClient, LockGuard};

use crate::support::child::{Child, hear, say};
use crate::support::log_capture::LogCapture;
use crate::support::proxy::{Proxy, Swallow};
use crate::support::seen::{Seen, client, take};
use crate::support::server::{Server, connect};
use crate::support::{eventually, threads_named};

/// Much longer than anything here takes.
const LONG: Duration = Duration::from_secs(20);
/// How much later than promised a busy machine may do something.
const SLACK: Duration = ms(1000);

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn is_lost<T>(result: &Result<T, Error>) -> bool {
    matches!(result, Err(Error::LeaseLost { .. }))
}

fn is_script(request: &[u8]) -> bool {
    request.windows(7).any(|part| part == b"EVALSHA")
}

/// Whether a request is an `acquire`: no other call has so many arguments.
fn is_acquire(request: &[u8]) -> bool {
    is_script(request) && request.starts_with(b"*14\r\n")
}

/// How long the lease is good unless renewed, by the server.
fn left(lock: &FifoLock) -> Duration {
    lock.status().expect("an answer").lease_remaining.unwrap_or_default()
}

/// A04: a lock that was lost and taken again by the same thread is renewed like the first one.
#[test]
fn lease_taken_again_after_a_loss_is_renewed() {
    let server = Server::start();
    let seen = Seen::of(&server, "again");
    let lock = client(&server.url()).builder("again").lease(ms(800)).build().expect("a lock");
    let other = client(&server.url()).fifo_lock("again").expect("a lock");
    for _ in 0..2 {
        let lost = lock.lock().expect("the lock");
        seen.lose_record();
        eventually(LONG, "the loss is noticed", || lost.is_lost());
        drop(lost);

        let guard = lock.lock().expect("the lock");
        let start = Instant::now();
        while start.elapsed() < ms(1600) {
            // Renewed at three quarters of the lease; half of it is for a busy machine.
            let left = left(&other);
            assert!(left >= ms(200), "{left:?} left after {:?}", start.elapsed());
            assert!(other.try_lock().expect("an answer").is_none());
            thread::sleep(ms(50));
        }
        guard.unlock().expect("its own release");
    }
}

/// A05: whatever keeps the server from answering for less than the lease costs some renewals, never the lease.
#[test]
fn renewal_outlives_every_short_trouble() {
    let log = LogCapture::install();
    let server = Server::builder().arg("--enable-debug-command").arg("yes").start();
    let lock = client(&server.url()).builder("troubled").lease(ms(2000)).build().expect("a lock");
    let other = client(&server.url()).fifo_lock("troubled").expect("a lock");
    let guard = lock.lock().expect("the lock");

    let kill = || {
        assert!(server.client_kill_normal() > 0);
    };
    let pause = || server.client_pause(600, "ALL");
    let busy = || {
        let set = |ms: u64| cmd("CONFIG").arg("SET").arg("busy-reply-threshold").arg(ms).to_owned();
        set(50).exec(&mut server.connection()).expect("CONFIG SET");
        let mut connection = server.connection();
        let script = thread::spawn(move || cmd("EVAL").arg("while true do end").arg(0).exec(&mut connection));
        thread::sleep(ms(600));
        // Connecting says more than a busy server answers; it knows these connections already.
        eventually(LONG, "the script ends", || {
            let mut killer = connect(&server.url()).expect("a connection");
            cmd("SCRIPT").arg("KILL").exec(&mut killer).is_ok() || script.is_finished()
        });
        assert!(script.join().expect("no panic").is_err());
    };
    let sleep = || cmd("DEBUG").arg("SLEEP").arg("0.7").exec(&mut server.connection()).expect("DEBUG SLEEP");
    let freeze = || {
        server.freeze();
        thread::sleep(ms(700));
        server.thaw();
    };
    let troubles: [(&str, &dyn Fn()); 6] = [
        ("kill", &kill),
        ("kill", &kill),
        ("pause", &pause),
        ("busy", &busy),
        ("sleep", &sleep),
        ("freeze", &freeze),
    ];
    for (trouble, happen) in troubles {
        happen();
        eventually(LONG, "the lease is whole again", || left(&other) > ms(1400));
        assert!(!guard.is_lost(), "lost after {trouble}");
        assert!(other.try_lock().expect("an answer").is_none(), "free after {trouble}");
        thread::sleep(ms(100));
    }
    assert!(!guard.is_lost());
    let failed = log.records_containing("renewal of the lease on `troubled` failed").len();
    assert!(failed >= 2, "only {failed} renewals failed: no trouble");
    guard.unlock().expect("its own release");
}

/// A06: the server refuses the release; renewal has ended all the same, so the lock is free one lease later.
#[test]
fn refused_release_leaves_a_lease_that_only_runs_out() {
    let server = Server::start();
    let acl = |rule: &[&str]| {
        let mut command = cmd("ACL");
        command.arg("SETUSER").arg("worker").arg(rule);
        command.exec(&mut server.connection()).expect("ACL SETUSER");
    };
    acl(&["on", ">secret", "~*", "&*", "+@all"]);
    let url = format!("redis://worker:secret@{}/", server.addr());
    let lock = client(&url).builder("refused").lease(ms(1500)).build().expect("a lock");
    let other = client(&server.url()).fifo_lock("refused").expect("a lock");
    let guard = lock.lock().expect("the lock");
    acl(&["-evalsha", "-eval"]);
    let released = guard.unlock();
    let Err(Error::Redis { source, .. }) = &released else { panic!("{released:?}") };
    assert_eq!(source.kind(), ErrorKind::Server(ServerErrorKind::NoPerm));
    // Nobody is kept from renewing any more but by the release.
    acl(&["+evalsha", "+eval"]);

    let start = Instant::now();
    let mut before = left(&other);
    while before > Duration::ZERO && start.elapsed() < ms(1500) {
        thread::sleep(ms(20));
        let now = left(&other);
        assert!(now <= before, "{before:?} grew to {now:?}");
        before = now;
    }
    assert!(other.try_lock_for(ms(300) + SLACK).expect("an answer").is_some());
}

/// A06: the server does not answer the release in time; the lock is free as soon as it answers again, not a lease
/// later.
#[test]
fn unanswered_release_is_made_good_by_the_client() {
    let server = Server::start();
    let locks = LockClient::options().url(&server.url()).call_timeout(ms(200)).build().expect("a client");
    let lock = locks.builder("unanswered").lease(ms(30_000)).release_bound(ms(500)).build().expect("a lock");
    let other = client(&server.url()).fifo_lock("unanswered").expect("a lock");
    let guard = lock.lock().expect("the lock");
    server.freeze();
    let start = Instant::now();
    let released = guard.unlock();
    assert!(matches!(released, Err(Error::Redis { .. })), "{released:?}");
    assert!(start.elapsed() < ms(500) + SLACK, "blocked for {:?}", start.elapsed());
    thread::sleep(ms(1500).saturating_sub(start.elapsed()));
    server.thaw();
    assert!(other.try_lock_for(ms(1500) + SLACK).expect("an answer").is_some());
}

/// A08: a guard that nobody can find any more is renewed until `max_hold`; the next waiter gets in one lease later.
#[test]
fn forgotten_guard_is_not_renewed_beyond_max_hold() {
    let log = LogCapture::install();
    let server = Server::start();
    let lock =
        client(&server.url()).builder("forgotten").lease(ms(300)).max_hold(ms(1000)).build().expect("a lock");
    let other = client(&server.url()).builder("forgotten").poll(ms(30_000)).build().expect("a lock");
    let guard = lock.lock().expect("the lock");
    let start = Instant::now();
    let alarm = guard.on_lost();
    std::mem::forget(guard);
    let next = take(&other);
    let waited = start.elapsed();
    // The last renewal comes at most a quarter of the lease before the end.
    assert!(waited > ms(1000) && waited < ms(1000 + 300 + 100) + SLACK, "{waited:?}");
    assert_eq!(alarm.try_recv(), Ok(()));
    assert!(alarm.recv_timeout(LONG).is_err(), "told twice");
    let told = log.records_containing("lease on `forgotten` was lost");
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].message.contains("max_hold"));
    next.unlock().expect("its own release");
}

/// A08: the holder is stuck, but still has its guard.
#[test]
fn stuck_holder_learns_that_max_hold_is_over() {
    let server = Server::start();
    let locks = client(&server.url());
    let lock = locks.builder("stuck").lease(ms(300)).max_hold(ms(600)).build().expect("a lock");
    let guard = lock.lock().expect("the lock");
    let other = client(&server.url()).fifo_lock("stuck").expect("a lock");
    let next = take(&other);
    assert!(guard.is_lost());
    assert!(guard.fence() < next.fence());
    let released = guard.unlock();
    assert!(is_lost(&released), "{released:?}");
    next.unlock().expect("its own release");
}

/// A09: wherever and however a guard is dropped, the next waiter has the lock at once.
#[test]
fn dropped_guard_frees_the_lock_on_every_way_out() {
    let server = Server::start();
    let lock = client(&server.url()).fifo_lock("dropped").expect("a lock");
    let other = client(&server.url()).builder("dropped").poll(ms(30_000)).build().expect("a lock");
    let seen = Seen::of(&server, "dropped");
    for (way, leave) in WAYS_OUT {
        let guard = lock.lock().expect("the lock");
        guard.detach();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| take(&other).fence());
            seen.wait_for_queue(1);
            let start = Instant::now();
            leave(guard);
            waiter.join().expect("no panic");
            assert!(start.elapsed() < ms(100) + SLACK, "{way}: {:?}", start.elapsed());
        });
        assert_eq!(seen.holder(), None, "{way}");
    }
}

type WayOut = fn(LockGuard);

/// Ways for a guard to go.
const WAYS_OUT: [(&str, WayOut); 4] = [
    ("another thread", |guard| thread::spawn(move || drop(guard)).join().expect("no panic")),
    ("a panic", |guard| {
        let panics = thread::Builder::new().name("panics".to_owned()).spawn(move || {
            let _guard = guard;
            panic!("on purpose: a section that fails");
        });
        assert!(panics.expect("a thread").join().is_err());
    }),
    ("an early return", |guard| {
        let section = |guard: LockGuard| -> Result<(), Error> {
            let _guard = guard;
            LockClient::connect("not a URL")?;
            Ok(())
        };
        assert!(section(guard).is_err());
    }),
    ("Vec::clear", |guard| {
        let mut guards = vec![guard];
        guards.clear();
    }),
];

/// A06, A09: whatever way a lease ends, its threads and connections end, too.
#[test]
fn nothing_is_left_of_a_lease_in_its_process() {
    let server = Server::start();
    for case in ["dropped", "refused"] {
        let mut child = Child::spawn("leftovers", &[&server.url(), case]);
        assert_eq!(child.line(LONG + LONG).as_deref(), Some("nothing is left"), "{case}");
        assert_eq!(server.connected_clients(), 0, "{case}");
        child.close_stdin();
        assert!(child.wait(LONG).expect("the end").success());
    }
}

/// A08: a forgotten guard keeps its client alive, but not its renewal thread: that is idle after `max_hold`, and ends.
#[test]
fn renewal_thread_of_a_forgotten_guard_ends() {
    let server = Server::start();
    let mut child = Child::spawn("leftovers", &[&server.url(), "forgotten"]);
    assert_eq!(child.line(LONG + LONG).as_deref(), Some("nothing is left"));
    child.close_stdin();
    assert!(child.wait(LONG).expect("the end").success());
}

/// What the children of these tests do: processes of their own, for they count their threads.
pub(crate) fn leftovers(url: &str, case: &str) {
    let locks = client(url);
    match case {
        "dropped" => {
            let lock = locks.fifo_lock("left").expect("a lock");
            for (_, leave) in WAYS_OUT {
                let guard = lock.lock().expect("the lock");
                thread::scope(|scope| {
                    scope.spawn(|| drop(lock.lock().expect("the lock")));
                    leave(guard);
                });
            }
        }
        "refused" => {
            let lock = locks.builder("left").lease(ms(1000)).release_bound(ms(50)).build().expect("a lock");
            let guard = lock.lock().expect("the lock");
            eventually(LONG, "the lease has a thread", || threads_named("fifo-renew") == 1);
            let acl = |rule| {
                let mut connection = connect(url).expect("a connection");
                let mut command = cmd("ACL");
                command.arg("SETUSER").arg("default").arg(rule).exec(&mut connection).expect("ACL SETUSER");
            };
            acl("-evalsha");
            acl("-eval");
            assert!(guard.unlock().is_err());
            acl("+evalsha");
            acl("+eval");
        }
        "forgotten" => {
            let lock = locks.builder("left").lease(ms(300)).max_hold(ms(600)).build().expect("a lock");
            let guard = lock.lock().expect("the lock");
            let alarm = guard.on_lost();
            std::mem::forget(guard);
            eventually(LONG, "the lease has a thread", || threads_named("fifo-renew") == 1);
            alarm.recv_timeout(LONG).expect("the end of max_hold");
        }
        other => panic!("no such case: {other}"),
    }
    drop(locks);
    let kind = if case == "forgotten" { "fifo-renew" } else { "fifo-" };
    eventually(LONG, "all threads have ended", || threads_named(kind) == 0);
    say("nothing is left");
    hear();
}

/// A10: 64 leases, 32 of them with a waiter, over two connections. First two calls of waiters hang, so that these have
/// both connections for longer than a lease; then renewals hang, one by one. No lease is lost.
#[test]
fn slow_calls_do_not_starve_renewals() {
    const LEASES: usize = 64;
    const WAITERS: usize = 32;
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let options = LockClient::options().url(&proxy.url()).command_pool(2).call_timeout(ms(5000));
    let locks = options.build().expect("a client");
    let held: Vec<(FifoLock, LockGuard)> = (0..LEASES)
        .map(|number| {
            let lock = locks.builder(&format!("many-{number}")).lease(ms(2000)).poll(ms(500));
            let lock = lock.build().expect("a lock");
            let guard = lock.lock().expect("the lock");
            (lock, guard)
        })
        .collect();
    let watch = |held: &[(FifoLock, LockGuard)], time: Duration| {
        let start = Instant::now();
        while start.elapsed() < time {
            let lost = held.iter().filter(|(_, guard)| guard.is_lost()).map(|(lock, _)| lock.name());
            let lost: Vec<&str> = lost.collect();
            assert!(lost.is_empty(), "lost after {:?}: {lost:?}", start.elapsed());
            thread::sleep(ms(20));
        }
    };
    thread::scope(|scope| {
        let waiters: Vec<_> = held[..WAITERS]
            .iter()
            .map(|(lock, _)| lock.clone())
            .map(|lock| scope.spawn(move || take(&lock).fence()))
            .collect();
        eventually(LONG, "they wait", || server.keys("*:queue").len() == WAITERS);
        let hung = proxy.swallow_replies_to(2, Swallow::Silence, is_acquire);
        eventually(LONG, "both connections hang", || hung.count() == 2);
        watch(&held, ms(4000));

        let mut hung = 0;
        for _ in 0..4 {
            // It is waited for, then given up, for a quarter of a lease.
            let fault =
                proxy.swallow_next_reply_to(Swallow::Silence, |call| is_script(call) && !is_acquire(call));
            watch(&held, ms(500));
            hung += fault.count();
        }
        assert_eq!(hung, 4, "not every renewal hung that should");
        let fences: Vec<_> = held.iter().map(|(_, guard)| guard.fence()).collect();
        for (lock, guard) in held {
            guard.unlock().unwrap_or_else(|error| panic!("{}: {error}", lock.name()));
        }
        for (waiter, fence) in waiters.into_iter().zip(fences) {
            assert!(waiter.join().expect("no panic") > fence);
        }
    });
}

/// A11: with the server out of reach, the loss is known by the holder's own clock, before anybody else is granted.
#[test]
fn loss_is_known_in_time_without_the_server() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let lock = client(&proxy.url()).builder("cut off").lease(ms(1000)).build().expect("a lock");
    let guard = lock.lock().expect("the lock");
    let alarm = guard.on_lost();
    // In the middle of its life, after renewals.
    thread::sleep(ms(600));
    proxy.freeze();
    let frozen = Instant::now();
    let left = guard.remaining();
    assert!(left > ms(300) && left < ms(1000), "{left:?}");

    thread::scope(|scope| {
        let next = scope.spawn(|| {
            let lock = client(&server.url()).fifo_lock("cut off").expect("a lock");
            let next = take(&lock);
            // Exclusion as long as both clocks run: whoever is granted next finds the old holder informed.
            assert!(guard.is_lost(), "granted to the next before its holder knew");
            next.fence()
        });
        let mut longest = Duration::ZERO;
        while !guard.is_lost() {
            let look = Instant::now();
            let _ = (guard.is_lost(), guard.remaining(), guard.ensure_held().is_ok());
            longest = longest.max(look.elapsed());
            thread::sleep(ms(2));
        }
        let lost = frozen.elapsed();
        assert!(lost + ms(20) >= left, "lost after {lost:?}, though good for {left:?}");
        assert!(lost < left + ms(50) + SLACK, "lost after {lost:?}, though good for {left:?} only");
        assert!(longest < ms(250), "a look took {longest:?}");
        assert_eq!(guard.remaining(), Duration::ZERO);
        assert!(is_lost(&guard.ensure_held()));
        // One message, then the end.
        assert_eq!(alarm.recv_timeout(LONG), Ok(()));
        assert!(alarm.recv_timeout(LONG).is_err_and(|error| error.is_disconnected()));
        assert!(next.join().expect("no panic") > guard.fence());
    });
    proxy.thaw();
    let released = guard.unlock();
    assert!(is_lost(&released), "{released:?}");
}

/// A11: a server that stands still for longer than the lease; on its return the lock goes to the waiter, and the release
/// is never called clean.
#[test]
fn release_after_a_frozen_server_is_never_clean_if_the_lock_went_on() {
    let server = Server::start();
    let lock = client(&server.url()).builder("standstill").lease(ms(1000)).build().expect("a lock");
    let other = client(&server.url()).builder("standstill").poll(ms(30_000)).build().expect("a lock");
    let seen = Seen::of(&server, "standstill");
    let guard = lock.lock().expect("the lock");
    thread::scope(|scope| {
        let waiter = scope.spawn(|| take(&other));
        seen.wait_for_queue(1);
        server.freeze();
        let alarm = guard.on_lost();
        assert_eq!(alarm.recv_timeout(ms(1000) + SLACK), Ok(()));
        server.thaw();
        let next = waiter.join().expect("no panic");
        assert!(guard.fence() < next.fence());
        let released = guard.unlock();
        assert!(is_lost(&released), "{released:?}");
        next.unlock().expect("its own release");
    });
}
