//! A pool of workers and a queue that delivers at least once: each job is done once, by whoever gets it first; one that
//! panics is tried again, and one that always panics is given up.
//!
//! `cargo run --features idempotency --example worker_pool` needs nothing but Rust: the server is inside the process. With
//! `REDIS_URL` set, the same program runs on that Redis.

use std::collections::BTreeMap;
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use redis_fifo_lock::idempotency::{Begin, Claim, Idempotency, IdempotencyKey};
use redis_fifo_lock::{LockClient, MemoryServer};
use serde_json::json;

/// Jobs.
const JOBS: u32 = 8;
/// A job that panics on its first attempt.
const CLUMSY: u32 = 3;
/// A job that panics on every attempt.
const POISONED: u32 = 5;
/// How often a job is tried.
const ATTEMPTS: u64 = 3;

/// Who did which job, in order of their ends.
type Done = Mutex<BTreeMap<u32, Vec<usize>>>;

fn main() -> Result<(), Box<dyn Error>> {
    // The panics are part of the show; the workers tell of them.
    std::panic::set_hook(Box::new(|_| {}));
    // The worst that a queue does: it delivers everything twice.
    let (deliver, deliveries) = unbounded();
    for id in (0..JOBS).chain(0..JOBS) {
        deliver.send(id)?;
    }
    let done = Done::default();
    let start = Instant::now();
    thread::scope(|scope| {
        let workers: Vec<_> = clients()?
            .into_iter()
            .enumerate()
            .map(|(worker, client)| {
                // Each job has a lock of its own, so the workers do different jobs side by side.
                let jobs = client.idempotency().lease(Duration::from_secs(5)).max_attempts(ATTEMPTS).build();
                let (deliver, deliveries, done) = (deliver.clone(), deliveries.clone(), &done);
                scope.spawn(move || work(worker, &jobs?, &deliver, &deliveries, done))
            })
            .collect();
        for worker in workers {
            worker.join().map_err(|_| "a worker panicked")??;
        }
        Ok::<(), Box<dyn Error>>(())
    })?;
    let done = done.into_inner()?;
    println!("\n{} jobs in {} ms", done.len(), start.elapsed().as_millis());
    for id in 0..JOBS {
        let times = done.get(&id).map_or(0, Vec::len);
        assert_eq!(times, usize::from(id != POISONED), "job {id} was done {times} times");
    }
    Ok(())
}

/// Takes deliveries until none is left.
fn work(
    worker: usize,
    jobs: &Idempotency,
    deliver: &Sender<u32>,
    deliveries: &Receiver<u32>,
    done: &Done,
) -> Result<(), redis_fifo_lock::Error> {
    while let Ok(id) = deliveries.try_recv() {
        let key = IdempotencyKey::new("pool", &json!({"id": id, "run": std::process::id()}))?;
        match jobs.begin(&key)? {
            Begin::Begun(claim) | Begin::Reclaimed(claim) => {
                let attempt = claim.attempt();
                // A panic drops the claim, which records nothing; the next delivery reclaims the job at once.
                match catch_unwind(AssertUnwindSafe(|| run(id, worker, claim, done))) {
                    Ok(result) => result?,
                    Err(_) => {
                        println!("worker {worker}: job {id} panicked on attempt {attempt}; delivered again");
                        let _ = deliver.send(id);
                    }
                }
            }
            Begin::Done(memo) => println!("worker {worker}: job {id} was done: {:?}", memo.get::<String>()?),
            Begin::Exhausted { attempts } => {
                println!("worker {worker}: job {id} is given up after {attempts}")
            }
            Begin::InProgress { owner, age } => {
                // The queue delivers it again, should whoever works on it fail.
                println!("worker {worker}: job {id} is being done by {owner}, for {age:?}; put back");
                let _ = deliver.send(id);
                thread::sleep(Duration::from_millis(10));
            }
            other => panic!("{other:?}"),
        }
    }
    Ok(())
}

/// The work.
fn run(id: u32, worker: usize, claim: Claim, done: &Done) -> Result<(), redis_fifo_lock::Error> {
    thread::sleep(Duration::from_millis(30));
    assert!(id != POISONED && (id != CLUMSY || claim.attempt() > 1), "job {id} fails");
    println!("worker {worker}: did job {id}, attempt {}", claim.attempt());
    claim.complete(&format!("by worker {worker}"))?;
    if let Ok(mut done) = done.lock() {
        done.entry(id).or_default().push(worker);
    }
    Ok(())
}

/// A client for each worker, as if each were a process of its own: of the Redis that `REDIS_URL` names, or of a server
/// inside this process.
fn clients() -> Result<Vec<LockClient>, redis_fifo_lock::Error> {
    let server = match std::env::var("REDIS_URL") {
        Ok(url) => {
            println!("(on the Redis that REDIS_URL names)\n");
            LockClient::options().url(&url)
        }
        Err(_) => {
            println!("(on a server inside this process; set REDIS_URL to use a Redis)\n");
            LockClient::options().memory(&MemoryServer::new())
        }
    };
    (0..4).map(|_| server.clone().build()).collect()
}
