//! What a child process can do.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use redis_fifo_lock::{FifoLock, LockClient};

use super::child::{hear, say};
use super::overlap::{Journal, Section};
use super::server::Server;

pub(crate) fn play(role: &str, args: &[&str]) {
    match (role, args) {
        ("echo", _) => echo(args),
        ("server", _) => server(),
        ("leftovers", [url, case]) => crate::cases_renewal::leftovers(url, case),
        ("hold", [url, name, lease_ms]) => hold(&lock(url, name, lease_ms)),
        ("queue", [url, name, lease_ms, tickets]) => queue(&lock(url, name, lease_ms), number(tickets)),
        ("rounds", [url, name, threads, times, dir]) => {
            rounds(&lock(url, name, "10000"), number(threads), number(times), &PathBuf::from(dir));
        }
        #[cfg(feature = "idempotency")]
        ("job", [url, name, lease_ms, id]) => job(url, name, lease_ms, number(id)),
        #[cfg(feature = "idempotency")]
        ("jobs", [url, name, lease_ms]) => jobs(&lock(url, name, lease_ms)),
        ("hold_many", [url, name, lease_ms, locks]) => hold_many(url, name, lease_ms, number(locks)),
        ("names", [url, count]) => names(url, number(count)),
        ("panics", [url, name, threads]) => panics(url, name, number(threads)),
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

/// Takes as many locks, `name-0` and on, says `held`, and keeps them.
fn hold_many(url: &str, name: &str, lease_ms: &str, locks: u64) {
    let lock = |number: u64| lock(url, &format!("{name}-{number}"), lease_ms);
    let _held: Vec<_> = (0..locks).map(|number| lock(number).acquire().expect("the lock")).collect();
    say("held");
    hear();
}

/// For each line that it hears, goes through as many new names, one in ten of them in vain; then says `done`.
fn names(url: &str, names: u64) {
    let (user, other) =
        (LockClient::connect(url).expect("a client"), LockClient::connect(url).expect("a client"));
    let mut next = 0..;
    while hear().is_some() {
        for name in next.by_ref().take(usize::try_from(names).expect("a number")) {
            let name = format!("name-{name}");
            let lock = user.builder(&name).idle(Duration::from_secs(1)).build().expect("a lock");
            let in_vain = name.ends_with('0');
            let held = in_vain.then(|| other.fifo_lock(&name).expect("a lock").lock().expect("the lock"));
            let got = lock.try_lock_for(Duration::from_millis(1)).expect("an answer");
            assert_eq!(got.is_none(), held.is_some());
        }
        // Listeners stay until their BLPOP of two seconds has ended.
        thread::sleep(Duration::from_millis(2800));
        say("done");
    }
}

/// Has threads panic with the lock, then says in how many milliseconds the lock was had again, and how many panicked.
fn panics(url: &str, name: &str, threads: u64) {
    let client = LockClient::options().url(url).command_pool(2).build().expect("a client");
    let lock = client.fifo_lock(name).expect("a lock");
    let sections: Vec<_> = (0..threads)
        .map(|_| {
            let lock = lock.clone();
            thread::spawn(move || {
                let _guard = lock.lock().expect("its turn");
                // A panic without the hundred-fold message.
                std::panic::resume_unwind(Box::new("in the section"));
            })
        })
        .collect();
    let panicked = sections.into_iter().map(thread::JoinHandle::join).filter(Result::is_err).count();
    let took = |_| {
        let start = Instant::now();
        drop(lock.try_lock_for(Duration::from_secs(5)).expect("an answer").expect("nobody is left"));
        start.elapsed().as_millis()
    };
    say(&(0..5).map(took).min().expect("five").to_string());
    say(&format!("{panicked} panics"));
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

/// Does a job, under the lock `name` or, if that is `own`, under its own, and says its fence. Then it answers `write` with
/// what came of a write through the lock's gate, and `finish` with what came of the whole.
#[cfg(feature = "idempotency")]
fn job(url: &str, name: &str, lease_ms: &str, id: u64) {
    use redis_fifo_lock::idempotency::{Begin, IdempotencyKey, RunOnce};

    let key = IdempotencyKey::new("job", &serde_json::json!({ "id": id })).expect("a key");
    if name == "own" {
        let client = LockClient::connect(url).expect("a client");
        let jobs = client.idempotency().lease(Duration::from_millis(number(lease_ms))).build().expect("jobs");
        let begin = jobs.begin(&key).expect("an answer");
        let Begin::Begun(claim) = begin else { panic!("{begin:?}") };
        say(&claim.fence().to_string());
        hear();
        return say(&format!("{:?}", claim.complete("by a child")));
    }
    let lock = lock(url, name, lease_ms);
    let gate = lock.gate("{x}:target").expect("a gate");
    let result = lock.run_once(&key, &RunOnce::new(), |claim| {
        say(&claim.fence().to_string());
        while hear().as_deref() == Some("write") {
            say(&format!("{:?}", gate.set_if_fresh(claim.fence(), "child")));
        }
        Ok::<u64, String>(1)
    });
    say(&format!("{result:?}"));
}

/// Does the job of each number that it hears, and says what came of it.
#[cfg(feature = "idempotency")]
fn jobs(lock: &FifoLock) {
    use redis_fifo_lock::idempotency::{IdempotencyKey, RunOnce};

    lock.status().expect("connected");
    say("ready");
    while let Some(id) = hear() {
        let key = IdempotencyKey::new("job", &serde_json::json!({ "id": number(&id) })).expect("a key");
        let result = lock.run_once(&key, &RunOnce::new(), |_| Ok::<u64, String>(1));
        say(&format!("{result:?}"));
    }
}
