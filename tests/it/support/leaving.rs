//! Ways for a lease to end, and what has to be gone with it.

use std::thread;
use std::time::Duration;

use redis::cmd;
use redis_fifo_lock::{Error, LockClient, LockGuard};

use super::child::{hear, say};
use super::seen::client;
use super::server::connect;
use super::{eventually, threads_named};

/// Much longer than anything here takes.
const LONG: Duration = Duration::from_secs(20);

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A way for a guard to go.
pub(crate) type WayOut = fn(LockGuard);

/// All that tests know.
pub(crate) const WAYS_OUT: [(&str, WayOut); 4] = [
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

/// Ends a lease of the lock `left` and says `nothing is left` when that is true. To be played by a process of its own,
/// for it counts the threads of the process.
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
