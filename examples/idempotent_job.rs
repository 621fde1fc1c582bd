//! A job that is delivered again and again is done once, and a job whose worker was killed is done all the same.
//!
//! `cargo run --features idempotency --example idempotent_job` needs nothing but Rust: the server is inside the process.
//! With `REDIS_URL` set, the same program runs on that Redis, and the worker that is killed is another process.

use std::error::Error;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use redis_fifo_lock::idempotency::{Begin, IdempotencyKey, JobStatus, Outcome, RunOnce};
use redis_fifo_lock::{ClientBuilder, FifoLock, LockClient, MemoryServer};
use serde::{Deserialize, Serialize};

/// What a queue delivers. It is the job's identity, so nothing in it may change from one delivery to the next.
#[derive(Serialize)]
struct Job {
    customer: u32,
    month: &'static str,
    /// Two runs of this example on one Redis have different jobs.
    run: u32,
}

/// What doing it gives.
#[derive(Serialize, Deserialize, Debug, PartialEq)]
struct Invoice {
    number: u64,
    cents: u64,
}

/// The run whose worker this process is, if it was started as one.
const WORKER_OF: &str = "IDEMPOTENT_JOB_WORKER_OF";
/// How long a worker that is gone is missed at most.
const LEASE: Duration = Duration::from_secs(1);

fn main() -> Result<(), Box<dyn Error>> {
    if let Ok(run) = std::env::var(WORKER_OF) {
        return doomed_worker(&std::env::var("REDIS_URL")?, run.parse()?);
    }
    let run = std::process::id();
    let server = server();
    let lock = lock(server.clone().build()?, run)?;

    println!("1. Delivered three times, done once\n");
    let key = key(7, run)?;
    let mut done = 0;
    for delivery in 1..=3 {
        let outcome = lock.run_once(&key, &RunOnce::new(), |claim| {
            println!("   delivery {delivery}: working, fence {}", claim.fence());
            done += 1;
            Ok::<Invoice, std::io::Error>(Invoice { number: 42, cents: 11_700 })
        })?;
        match &outcome {
            Outcome::Ran(invoice) => println!("   delivery {delivery}: did it: {invoice:?}"),
            Outcome::Done(invoice) => println!("   delivery {delivery}: was done before: {invoice:?}"),
            other => panic!("{other:?}"),
        }
        assert_eq!(outcome.result(), Some(Invoice { number: 42, cents: 11_700 }));
    }
    assert_eq!(done, 1);

    println!("\n2. A worker is killed in the middle of a job\n");
    let key = self::key(8, run)?;
    let jobs = lock.idempotency().build()?;
    kill_a_worker(&server, run, &key)?;
    let killed = Instant::now();
    println!("   the job is now: {:?}", jobs.status(&key)?);
    let outcome = lock.run_once(&key, &RunOnce::new(), |claim| {
        println!(
            "   {} ms later the next one has it, attempt {}",
            killed.elapsed().as_millis(),
            claim.attempt()
        );
        assert_eq!(claim.attempt(), 2);
        Ok::<u64, std::io::Error>(2)
    })?;
    assert_eq!(outcome, Outcome::Ran(2));
    assert!(killed.elapsed() < 3 * LEASE);
    assert!(matches!(jobs.status(&key)?, JobStatus::Done { attempt: 2, .. }));
    println!("   done");
    for customer in [7, 8] {
        jobs.clear(&self::key(customer, run)?)?;
    }
    Ok(())
}

fn key(customer: u32, run: u32) -> Result<IdempotencyKey, redis_fifo_lock::Error> {
    IdempotencyKey::new("invoice", &Job { customer, month: "2026-11", run })
}

fn lock(client: LockClient, run: u32) -> Result<FifoLock, redis_fifo_lock::Error> {
    client.builder(&format!("idempotent-job-{run}")).lease(LEASE).build()
}

/// Leaves the job begun by a worker that is gone.
fn kill_a_worker(server: &ClientBuilder, run: u32, key: &IdempotencyKey) -> Result<(), Box<dyn Error>> {
    if std::env::var("REDIS_URL").is_err() {
        // Nobody can be killed inside one process. A claim that is forgotten, and renewed for a lease only, is as good.
        let client = server.clone().build()?;
        let lock = client.builder(&format!("idempotent-job-{run}"));
        let lock = lock.lease(LEASE).max_hold(LEASE + Duration::from_millis(1)).build()?;
        match lock.idempotency().build()?.begin(key)? {
            Begin::Begun(claim) => std::mem::forget(claim),
            other => return Err(format!("{other:?}").into()),
        }
        println!("   it was forgotten");
        return Ok(());
    }
    let mut worker = Command::new(std::env::current_exe()?).env(WORKER_OF, run.to_string()).spawn()?;
    let jobs = lock(server.clone().build()?, run)?.idempotency().build()?;
    let start = Instant::now();
    while !matches!(jobs.status(key)?, JobStatus::InProgress { .. }) {
        if start.elapsed() > Duration::from_secs(10) {
            worker.kill()?;
            return Err("the worker did not begin".into());
        }
        thread::sleep(Duration::from_millis(10));
    }
    worker.kill()?;
    worker.wait()?;
    println!("   it was killed");
    Ok(())
}

/// What the process does that will be killed: it begins the job and never ends it.
fn doomed_worker(url: &str, run: u32) -> Result<(), Box<dyn Error>> {
    let lock = lock(LockClient::connect(url)?, run)?;
    lock.run_once(&key(8, run)?, &RunOnce::new(), |claim| {
        println!("   worker {}: working, fence {}", std::process::id(), claim.fence());
        // Longer than the parent waits; should it be gone, this ends by itself.
        thread::sleep(Duration::from_secs(20));
        Ok::<u64, std::io::Error>(1)
    })?;
    Ok(())
}

/// The Redis that `REDIS_URL` names, or a server inside this process.
fn server() -> ClientBuilder {
    match std::env::var("REDIS_URL") {
        Ok(url) => {
            println!("(on the Redis that REDIS_URL names)\n");
            LockClient::options().url(&url)
        }
        Err(_) => {
            println!("(on a server inside this process; set REDIS_URL to use a Redis)\n");
            LockClient::options().memory(&MemoryServer::new())
        }
    }
}
