//! A process of a chaos run: threads that take locks in every way there is, and write down what they are told.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use redis_fifo_lock::{Error, Fence, FifoLock, Lease, LockClient, LockGuard};

use crate::history::{Op, Terms, What, Why};
use crate::log_file::{self, Log, now};
use crate::random::Random;
use crate::support::child::{hear, say};

/// Leases of the processes, in milliseconds. Short, so that a run sees many of them lapse.
pub(crate) const LEASES: std::ops::Range<u64> = 500..1500;
/// How long a holder looks away between two looks at its lease.
const LOOK: Duration = Duration::from_millis(10);
const CALL_TIMEOUT: Duration = Duration::from_secs(1);

pub(crate) fn play(role: &str, args: &[&str]) {
    match (role, args) {
        ("chaos", [url, process, seed, dir, locks, threads]) => {
            let number = |text: &str| text.parse::<u64>().expect("a number");
            let process = u32::try_from(number(process)).expect("a process number");
            run(url, process, number(seed), Path::new(dir), number(locks), number(threads));
        }
        other => panic!("no such role: {other:?}"),
    }
}

/// What the threads of a process share.
struct Shared {
    process: u32,
    log: Arc<Log>,
    /// One handle per lock, with its settings.
    locks: Vec<(String, FifoLock, Terms)>,
    ops: AtomicU64,
    stop: AtomicBool,
}

fn run(url: &str, process: u32, seed: u64, dir: &Path, locks: u64, threads: u64) {
    let mut random = Random::new(seed);
    let client = LockClient::options()
        .url(url)
        .label(&format!("p{process}"))
        .connect_timeout(CALL_TIMEOUT)
        .call_timeout(CALL_TIMEOUT)
        .build()
        .expect("a client");
    let locks = (0..locks).map(|n| {
        let name = format!("chaos-{n}");
        let lease = random.within(LEASES);
        let (claim, poll) = (random.within(100..400), random.within(100..600));
        let ms = Duration::from_millis;
        let lock = client.builder(&name).lease(ms(lease)).claim(ms(claim)).poll(ms(poll)).build();
        (name, lock.expect("a lock"), Terms { lease, claim, poll, hold: 0, wait: None })
    });
    let shared = Arc::new(Shared {
        process,
        locks: locks.collect(),
        log: Arc::new(Log::create(&dir.join(format!("process-{process}.log")))),
        ops: AtomicU64::new(0),
        stop: AtomicBool::new(false),
    });
    log_file::watch_for_stalls(&shared.log, Some(process));
    // No connection is open yet, and all threads want one: a short deadline may pass while they are made.
    let start = now();
    let starts = What::Fault {
        fault: "start".to_owned(),
        process: Some(process),
        from: start,
        to: start + 1_000_000_000,
    };
    shared.log.at(start, starts);
    let start = |n| {
        let (shared, random) = (Arc::clone(&shared), Random::new(seed ^ (n + 1) << 32));
        thread::spawn(move || shared.work(random))
    };
    let threads: Vec<_> = (0..threads).map(start).collect();
    say("ready");
    // "stop", or the end of the parent.
    hear();
    shared.stop.store(true, Ordering::SeqCst);
    for thread in threads {
        thread.join().expect("no panic");
    }
    say("done");
}

/// A lease in either form.
enum Held {
    Guard(LockGuard),
    Lease(Lease),
}

impl Held {
    fn fence(&self) -> Fence {
        match self {
            Held::Guard(guard) => guard.fence(),
            Held::Lease(lease) => lease.fence(),
        }
    }

    fn position(&self) -> u64 {
        match self {
            Held::Guard(guard) => guard.position(),
            Held::Lease(lease) => lease.position(),
        }
    }

    fn left_us(&self) -> u64 {
        let left = match self {
            Held::Guard(guard) => guard.remaining(),
            Held::Lease(lease) => lease.remaining(),
        };
        u64::try_from(left.as_micros()).unwrap_or(u64::MAX)
    }

    fn release(self) -> Result<(), Error> {
        match self {
            Held::Guard(guard) => guard.unlock(),
            // Somewhere else than where it was taken.
            Held::Lease(lease) => thread::spawn(move || lease.release()).join().expect("no panic"),
        }
    }
}

impl Shared {
    fn work(&self, mut random: Random) {
        // Not all at once: opening the first connections takes a busy machine a while.
        thread::sleep(Duration::from_millis(random.within(0..500)));
        while !self.stop.load(Ordering::SeqCst) {
            self.once(&mut random);
            thread::sleep(Duration::from_millis(random.within(0..30)));
        }
    }

    /// Takes a lock once, holds it, and gives it back.
    fn once(&self, random: &mut Random) {
        let (name, lock, terms) = random.pick(&self.locks);
        let op = Op { process: self.process, n: self.ops.fetch_add(1, Ordering::SeqCst) };
        let hold = match random.within(0..100) {
            0..88 => random.within(0..8),
            88..99 => random.within(8..80),
            // Longer than a lease: it has to be renewed.
            _ => random.within(terms.lease..terms.lease * 2),
        };
        let way = random.within(0..100);
        let wait = match way {
            60..70 => Some(0),
            70..85 => Some(random.within(20..1500)),
            _ => None,
        };
        let terms = Terms { hold, wait, ..*terms };
        self.log.now(What::Invoke { op, lock: name.clone(), terms });
        let held = match way {
            0..60 => lock.lock().map(|guard| Some(Held::Guard(guard))),
            60..70 => lock.try_lock().map(|guard| guard.map(Held::Guard)),
            70..85 => {
                let wait = Duration::from_millis(wait.unwrap_or(0));
                lock.try_lock_for(wait).map(|guard| guard.map(Held::Guard))
            }
            85..93 => lock.acquire().map(|lease| Some(Held::Lease(lease))),
            _ => lock.enqueue().and_then(|ticket| {
                thread::sleep(Duration::from_millis(random.within(0..100)));
                ticket.wait().map(|guard| Some(Held::Guard(guard)))
            }),
        };
        match held {
            Ok(Some(held)) => self.hold(op, hold, held),
            Ok(None) => self.log.now(What::Refused { op }),
            Err(error) => {
                let why = match error {
                    Error::Redis { .. } | Error::Pool { .. } | Error::ReadOnly { .. } => Why::Unreachable,
                    Error::OutOfMemory { .. } => Why::OutOfMemory,
                    _ => Why::Other,
                };
                self.log.now(What::Failed { op, why, text: error.to_string() });
                // An outage is no reason to fill the log.
                thread::sleep(Duration::from_millis(random.within(50..200)));
            }
        }
    }

    fn hold(&self, op: Op, hold: u64, held: Held) {
        // Stamped before the lease is asked: whatever it says then was true at the stamp, too.
        let (start, left_us) = (now(), held.left_us());
        let (fence, position) = (held.fence().get(), held.position());
        self.log.at(start, What::Granted { op, fence, position, left_us });
        let mut good = left_us > 0;
        while now() < start + hold * 1_000_000 {
            thread::sleep(LOOK.min(Duration::from_millis(hold)));
            let (at, left_us) = (now(), held.left_us());
            if left_us > 0 {
                self.log.at(at, What::Holding { op, left_us });
            } else if std::mem::replace(&mut good, false) {
                self.log.now(What::Lost { op });
            }
        }
        let (at, left_us) = (now(), held.left_us());
        self.log.at(at, What::ReleaseInvoke { op, left_us });
        self.log.now(match held.release() {
            Ok(()) => What::Released { op },
            Err(Error::LeaseLost { .. }) => What::ReleaseLost { op },
            Err(error) => What::ReleaseFailed { op, text: error.to_string() },
        });
    }
}
