//! `run_once`: one call for a worker, whatever happens to the worker.

#![cfg(feature = "idempotency")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use redis_fifo_lock::idempotency::{
    Conflict, Failure, IdempotencyKey, JobResult, JobStatus, Outcome, RunError, RunOnce,
};
use redis_fifo_lock::{ClientBuilder, Error, FifoLock, LockClient, MemoryServer};
use serde_json::json;

use crate::support::child::Child;
use crate::support::dice::Dice;
use crate::support::eventually;
use crate::support::server::Server;

const LONG: Duration = Duration::from_secs(20);

fn key(id: u64) -> IdempotencyKey {
    IdempotencyKey::new("job", &json!({ "id": id })).expect("a key")
}

/// A client of each engine.
fn engines(server: &Server) -> [ClientBuilder; 2] {
    [LockClient::options().memory(&MemoryServer::new()), LockClient::options().url(&server.url())]
}

fn lock(client: &ClientBuilder, lease_ms: u64) -> FifoLock {
    let client = client.clone().build().expect("a client");
    let lock = client.builder("x").lease(Duration::from_millis(lease_ms)).poll(Duration::from_millis(200));
    lock.build().expect("a lock")
}

type Ran = Result<Outcome<u64>, RunError<String>>;

/// From many threads of several clients, a job that takes five times its lease.
#[test]
fn a_job_that_outlasts_its_lease_runs_once() {
    let server = Server::start();
    for client in engines(&server) {
        let ran = AtomicU64::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                let (lock, ran) = (lock(&client, 300), &ran);
                for _ in 0..4 {
                    let lock = lock.clone();
                    scope.spawn(move || {
                        let outcome: Ran = lock.run_once(&key(1), &RunOnce::new(), |claim| {
                            assert_eq!(claim.attempt(), 1);
                            thread::sleep(Duration::from_millis(1500));
                            claim.ensure_held().map_err(|error| error.to_string())?;
                            Ok(ran.fetch_add(1, Ordering::Relaxed) + 7)
                        });
                        match outcome.expect("an outcome") {
                            Outcome::Ran(7) | Outcome::Done(7) => {}
                            other => panic!("{other:?}"),
                        }
                    });
                }
            }
        });
        assert_eq!(ran.into_inner(), 1);
    }
}

/// A worker that is stopped for longer than its lease in the middle of the job, and goes on.
#[test]
fn a_worker_that_wakes_too_late_can_neither_end_the_job_nor_write() {
    let server = Server::start();
    let mut worker = Child::spawn("job", &[&server.url(), "x", "600", "7"]);
    let stale: u64 = worker.line(LONG).expect("its fence").parse().expect("a number");
    worker.send("write");
    assert_eq!(worker.line(LONG).as_deref(), Some("Ok(())"), "it writes while it holds the lock");
    worker.sigstop();
    let lock = lock(&LockClient::options().url(&server.url()), 10_000);
    let gate = lock.gate("{x}:target").expect("a gate");
    let outcome: Ran = lock.run_once(&key(7), &RunOnce::new(), |claim| {
        assert!(claim.fence().get() > stale);
        assert_eq!(claim.attempt(), 2);
        worker.sigcont();
        // Nothing of the successor's is written yet.
        worker.send("write");
        let refused = worker.line(LONG).expect("an answer");
        assert!(refused.starts_with("Err(FencedOut"), "{refused}");
        gate.set_if_fresh(claim.fence(), "successor").expect("the holder writes");
        worker.send("finish");
        let refused = worker.line(LONG).expect("an answer");
        assert!(refused.starts_with("Err(NotRecorded(LeaseLost"), "{refused}");
        Ok(117)
    });
    assert_eq!(outcome.expect("an outcome"), Outcome::Ran(117));
    let jobs = lock.idempotency().build().expect("jobs");
    assert_eq!(jobs.get_result(&key(7)).expect("an answer"), JobResult::Done(117));
    let mut connection = server.connection();
    let written: String = redis::cmd("GET").arg("{x}:target").query(&mut connection).expect("a string");
    assert_eq!(written, "successor");
}

/// A37, with the gap that others have between *begin* and *acquire*: a worker is stopped for longer than its lease at any
/// point of `run_once`, again and again.
#[test]
fn a_worker_that_is_stopped_anywhere_does_not_make_a_job_run_twice() {
    let server = Server::start();
    let mut worker = Child::spawn("jobs", &[&server.url(), "x", "60"]);
    assert_eq!(worker.line(LONG).as_deref(), Some("ready"));
    let lock = lock(&LockClient::options().url(&server.url()), 1000);
    let mut dice = Dice::new(1);
    let (mut early, mut late, mut stopped) = (0, 0, 0);
    for round in 0..60 {
        worker.send(&round.to_string());
        let longest = *dice.pick(&[1500, 8000]);
        thread::sleep(Duration::from_micros(dice.below(longest)));
        worker.sigstop();
        let outcome: Ran = lock.run_once(&key(round), &RunOnce::new(), |_| {
            worker.sigcont();
            // What the worker says now, it says while its successor holds the lock.
            thread::sleep(Duration::from_millis(5));
            Ok(2)
        });
        worker.sigcont();
        let theirs = worker.line(LONG).expect("an answer");
        match (outcome.expect("an outcome"), &*theirs) {
            // It was done with it before it was stopped, or had not begun.
            (Outcome::Done(1), "Ok(Ran(1))") => early += 1,
            (Outcome::Ran(2), "Ok(Done(2))") => late += 1,
            (Outcome::Ran(2), theirs) if theirs.starts_with("Err(NotRecorded(LeaseLost") => stopped += 1,
            (mine, theirs) => panic!("round {round}: {mine:?} here, {theirs} there"),
        }
    }
    assert!(early > 0 && stopped > 0, "{early} early, {late} late, {stopped} stopped");
}

/// The same with nobody but waiters: the killed worker's job goes to exactly one of them.
#[test]
fn a_killed_workers_job_goes_to_the_first_in_line() {
    let server = Server::start();
    let mut worker = Child::spawn("job", &[&server.url(), "x", "1000", "7"]);
    let stale: u64 = worker.line(LONG).expect("its fence").parse().expect("a number");
    let client = LockClient::options().url(&server.url());
    let ran = AtomicU64::new(0);
    thread::scope(|scope| {
        let lock = lock(&client, 1000);
        let workers: Vec<_> = (0..20)
            .map(|_| {
                let (lock, ran) = (lock.clone(), &ran);
                scope.spawn(move || {
                    let outcome: Ran = lock.run_once(&key(7), &RunOnce::new(), |claim| {
                        ran.fetch_add(1, Ordering::Relaxed);
                        Ok(claim.attempt())
                    });
                    (Instant::now(), outcome.expect("an outcome"))
                })
            })
            .collect();
        eventually(LONG, "they queue", || lock.status().expect("a status").waiting == 20);
        worker.sigkill();
        let killed = Instant::now();
        let outcomes: Vec<_> = workers.into_iter().map(|worker| worker.join().expect("no panic")).collect();
        let first = outcomes.iter().map(|(at, _)| at.duration_since(killed)).min().expect("twenty");
        assert!(first < Duration::from_millis(1000 + 1000 + 200), "{first:?}: lease + claim + poll");
        assert_eq!(outcomes.iter().filter(|(_, outcome)| *outcome == Outcome::Ran(2)).count(), 1);
        assert_eq!(outcomes.iter().filter(|(_, outcome)| *outcome == Outcome::Done(2)).count(), 19);
        let fence = lock.status().expect("a status").fence.expect("a fence");
        assert!(fence.get() > stale);
    });
    assert_eq!(ran.into_inner(), 1);
}

/// A39: what did not end well is not done.
#[test]
fn errors_and_panics_leave_the_job_to_be_done() {
    let server = Server::start();
    for client in engines(&server) {
        let lock = lock(&client, 10_000);
        let jobs = lock.idempotency().build().expect("jobs");
        let failing =
            |options: &RunOnce| -> Ran { lock.run_once(&key(1), options, |_| Err("no paper".to_owned())) };
        assert!(matches!(failing(&RunOnce::new()), Err(RunError::Job(why)) if why == "no paper"));
        assert!(matches!(jobs.status(&key(1)).expect("a status"), JobStatus::Retryable { attempt: 1, .. }));
        let panicked = catch_unwind(AssertUnwindSafe(|| -> Ran {
            lock.run_once(&key(1), &RunOnce::new(), |_| panic!("in the job"))
        }));
        assert!(panicked.is_err());
        assert!(matches!(jobs.status(&key(1)).expect("a status"), JobStatus::Orphaned { attempt: 2, .. }));
        assert!(!lock.status().expect("a status").held, "the panic released the lock");
        let capped = RunOnce::new().max_attempts(2);
        assert!(matches!(failing(&capped), Ok(Outcome::Exhausted { attempts: 2 })));
        assert!(matches!(failing(&RunOnce::new().on_error(Failure::Final)), Err(RunError::Job(_))));
        match failing(&RunOnce::new()).expect("an outcome") {
            Outcome::Failed(memo) => assert_eq!(memo.get::<String>().expect("text"), Some("no paper".into())),
            other => panic!("{other:?}"),
        }
        // Which payload it was is part of the job.
        let with = |payload: u64| RunOnce::new().payload(&json!({ "amount": payload })).expect("a payload");
        assert_eq!(
            lock.run_once(&key(2), &with(1), |_| Ok::<u64, String>(1)).expect("an outcome"),
            Outcome::Ran(1)
        );
        let other: Ran = lock.run_once(&key(2), &with(2), |_| Ok(1));
        assert!(matches!(other, Err(RunError::Lock(Error::PayloadMismatch { .. }))), "{other:?}");
    }
}

#[test]
fn whoever_does_not_want_to_wait_is_told_who_holds_the_lock() {
    let server = Server::start();
    for client in engines(&server) {
        let (mine, other) = (lock(&client, 10_000), lock(&client, 10_000));
        let now = |id: u64, conflict: Conflict| -> Ran {
            other.run_once(&key(id), &RunOnce::new().on_conflict(conflict), |_| Ok(id))
        };
        let outcome: Ran = mine.run_once(&key(1), &RunOnce::new(), |_| {
            match now(1, Conflict::Skip) {
                Ok(Outcome::Skipped { owner: Some(_), same_job: true }) => {}
                other => panic!("{other:?}"),
            }
            match now(2, Conflict::Skip) {
                Ok(Outcome::Skipped { owner: Some(_), same_job: false }) => {}
                other => panic!("{other:?}"),
            }
            assert!(matches!(now(1, Conflict::Fail), Err(RunError::Lock(Error::InProgress { .. }))));
            let late = now(1, Conflict::WaitFor(Duration::from_millis(50)));
            assert!(matches!(late, Err(RunError::Lock(Error::Timeout { .. }))), "{late:?}");
            // A thread that waits for itself would wait for ever.
            let inner: Ran = mine.run_once(&key(3), &RunOnce::new(), |_| Ok(3));
            assert!(matches!(inner, Err(RunError::Lock(Error::WouldDeadlock { .. }))), "{inner:?}");
            Ok(1)
        });
        assert_eq!(outcome.expect("an outcome"), Outcome::Ran(1));
        assert_eq!(now(1, Conflict::Fail).expect("an outcome"), Outcome::Done(1));
        assert_eq!(other.status().expect("a status").waiting, 0, "nobody is left in the queue");
    }
}
