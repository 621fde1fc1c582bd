//! What a child process can do.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use redis_fifo_lock::{FifoLock, LockClient};

use super::child::{hear, say};
use super::leaving::leftovers;
use super::overlap::{Journal, Section};
use super::server::Server;

pub(crate) fn play(role: &str, args: &[&str]) {
    match (role, args) {
        ("echo", _) => echo(args),
        ("server", _) => server(),
        ("leftovers", [url, case]) => leftovers(url, case),
        ("hold", [url, name, lease_ms]) => hold(&lock(url, name, lease_ms)),
        ("queue", [url, name, lease_ms, tickets]) => queue(&lock(url, name, lease_ms), number(tickets)),
        ("rounds", [url, name, threads, times, dir]) => {
            rounds(&lock(url, name, "10000"), number(threads), number(times), &PathBuf::from(dir));
        }
        other => panic!("no such role: {other:?}"),
    }
}

fn number(text: &str) -> u64 {
    text.parse().expect("a number")
}

fn lock(url: &str, name: &str, lease_ms: &str) -> FifoLock {
    let lease = Duration::from_millis(number(lease_ms));
    let client = LockClient::connect(url).expect("a client");
    client.builder(name).lease(lease).poll(Duration::from_millis(200)).build().expect("a lock")
}

/// Says its arguments, then every line that it hears.
fn echo(args: &[&str]) {
    say(&format!("ready {}", args.join("|")));
    while let Some(line) = hear() {
        say(&line);
    }
}

/// Runs a Redis server and says its URL and its directory.
fn server() {
    let server = Server::start();
    say(&server.url());
    say(&server.dir().display().to_string());
    hear();
}

/// Takes the lock and says its fence; then answers `lost` with whether it is, and `unlock` with what came of it.
fn hold(lock: &FifoLock) {
    let guard = lock.lock().expect("the lock");
    say(&guard.fence().to_string());
    while let Some(line) = hear() {
        match line.as_str() {
            "lost" => say(&guard.is_lost().to_string()),
            "unlock" => return say(&format!("{:?}", guard.unlock())),
            other => panic!("not understood: {other}"),
        }
    }
}

/// Queues as many threads and says so; each says its fence once it is in, and leaves.
fn queue(lock: &FifoLock, tickets: u64) {
    thread::scope(|scope| {
        for _ in 0..tickets {
            let ticket = lock.enqueue().expect("a ticket");
            scope.spawn(move || {
                let guard = ticket.wait().expect("the lock");
                say(&guard.fence().to_string());
            });
        }
        say("queued");
    });
}

/// Has threads take the lock again and again, each time as witnessed by a section and a journal in `dir`.
fn rounds(lock: &FifoLock, threads: u64, rounds: u64, dir: &Path) {
    let journal = Journal::at(dir.join("journal"));
    thread::scope(|scope| {
        for id in 0..threads {
            let journal = &journal;
            scope.spawn(move || {
                for round in 0..rounds {
                    let guard = lock.lock().expect("the lock");
                    let me = format!("{}-{id}-{round}", std::process::id());
                    let section = Section::enter(dir, &me);
                    journal.write(guard.fence().get(), guard.position(), &me);
                    // Mostly nothing, sometimes long, once in a while longer than the poll.
                    match (id + round * 7) % 199 {
                        0 => thread::sleep(Duration::from_millis(250)),
                        n if n % 20 == 0 => thread::sleep(Duration::from_millis(2)),
                        _ => {}
                    }
                    assert!(!guard.is_lost(), "nothing here outlasts a lease");
                    drop(section);
                }
            });
        }
    });
    say("done");
}
