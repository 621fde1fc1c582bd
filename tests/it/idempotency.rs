//! Jobs by their parts: begun by one, ended by nobody else, remembered for as long as they should be.

#![cfg(feature = "idempotency")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use redis::cmd;
use redis_fifo_lock::idempotency::{
    Begin, Claim, Failure, Idempotency, IdempotencyKey, JobResult, JobStatus, Memo,
};
use redis_fifo_lock::{ClientBuilder, Error, LockClient, MemoryServer};
use serde_json::json;

use crate::support::child::Child;
use crate::support::dice::Dice;
use crate::support::eventually;
use crate::support::proxy::{Proxy, Swallow};
use crate::support::server::Server;

const LONG: Duration = Duration::from_secs(20);

fn key(id: u64) -> IdempotencyKey {
    IdempotencyKey::new("job", &json!({ "id": id })).expect("a key")
}

/// A client of each engine.
fn engines(server: &Server) -> [(&'static str, ClientBuilder); 2] {
    [
        ("memory", LockClient::options().memory(&MemoryServer::new())),
        ("redis", LockClient::options().url(&server.url())),
    ]
}

fn jobs(client: &LockClient, lease_ms: u64) -> Idempotency {
    client.idempotency().lease(Duration::from_millis(lease_ms)).build().expect("jobs")
}

#[track_caller]
fn begun(begin: Result<Begin, Error>) -> Claim {
    match begin {
        Ok(Begin::Begun(claim)) => claim,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn reclaimed(begin: Result<Begin, Error>) -> Claim {
    match begin {
        Ok(Begin::Reclaimed(claim)) => claim,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_job_is_done_once_and_its_memo_is_there_for_all() {
    let server = Server::start();
    for (engine, client) in engines(&server) {
        let (a, b) = (client.clone().build().expect("a client"), client.build().expect("a client"));
        let (a, b) = (jobs(&a, 60_000), jobs(&b, 60_000));
        assert_eq!(b.status(&key(1)).expect("a status"), JobStatus::Unknown);
        assert_eq!(b.get_result::<u32>(&key(1)).expect("an answer"), JobResult::NotDone);
        let claim = begun(a.begin(&key(1)));
        assert!(matches!(b.begin(&key(1)), Ok(Begin::InProgress { .. })), "{engine}");
        assert!(
            matches!(a.begin(&key(1)), Ok(Begin::InProgress { .. })),
            "{engine}: by the same client, too"
        );
        match b.status(&key(1)).expect("a status") {
            JobStatus::InProgress { attempt: 1, fence, .. } => assert_eq!(fence, claim.fence()),
            other => panic!("{other:?}"),
        }
        assert!(!b.clear(&key(1)).expect("an answer"), "a live job is not cleared");
        claim.complete(&json!({"total": 117})).expect("recorded");
        match b.begin(&key(1)).expect("an answer") {
            Begin::Done(memo) => assert_eq!(memo.json(), Some(r#"{"total":117}"#)),
            other => panic!("{other:?}"),
        }
        let result = b.get_result::<BTreeMap<String, u32>>(&key(1)).expect("an answer");
        assert_eq!(result, JobResult::Done([("total".to_owned(), 117)].into()));
        assert!(
            matches!(b.get_result::<u32>(&key(1)), Err(Error::Protocol(_))),
            "another version of the job"
        );

        begun(a.begin(&key(2))).complete_without_memo().expect("recorded");
        assert_eq!(b.get_result::<u32>(&key(2)).expect("an answer"), JobResult::NoMemo);
        begun(a.begin(&key(3))).complete(&()).expect("recorded");
        assert_eq!(
            b.get_result::<Option<u32>>(&key(3)).expect("an answer"),
            JobResult::Done(None),
            "null is a memo"
        );

        assert!(b.clear(&key(1)).expect("an answer"));
        assert_eq!(begun(b.begin(&key(1))).attempt(), 1);
    }
}

/// A37: a record is pending by a grant, so there is none without the lock, and none is taken for an orphan while its
/// owner lives: not before its first renewal, and not while a lease runs out that nobody else was granted.
#[test]
fn a_live_job_is_never_reclaimed() {
    let server = Server::start();
    for (engine, client) in engines(&server) {
        let (a, b) = (client.clone().build().expect("a client"), client.build().expect("a client"));
        let (a, b) = (jobs(&a, 300), jobs(&b, 300));
        let claim = begun(a.begin(&key(1)));
        let start = Instant::now();
        // Five times its lease: it is renewed.
        while start.elapsed() < Duration::from_millis(1500) {
            match b.begin(&key(1)).expect("an answer") {
                Begin::InProgress { age, .. } => assert!(age < LONG),
                other => panic!("{engine}: {other:?} after {:?}", start.elapsed()),
            }
            assert!(matches!(b.status(&key(1)).expect("a status"), JobStatus::InProgress { .. }));
            thread::sleep(Duration::from_millis(20));
        }
        claim.complete(&1).expect("still ours");
        assert!(matches!(b.begin(&key(1)), Ok(Begin::Done(_))), "{engine}");
    }
}

/// A39: a crash or an error does not wedge the key, and only what was meant to be final is.
#[test]
fn an_error_or_a_panic_leaves_the_job_to_the_next_and_a_final_failure_does_not() {
    let server = Server::start();
    for (engine, client) in engines(&server) {
        let client = client.build().expect("a client");
        let jobs = client.idempotency().result_ttl(Duration::from_secs(3600)).build().expect("jobs");
        drop(begun(jobs.begin(&key(1))));
        assert!(matches!(jobs.status(&key(1)).expect("a status"), JobStatus::Orphaned { attempt: 1, .. }));
        let panicked = thread::scope(|scope| {
            let worker = scope.spawn(|| {
                let _claim = reclaimed(jobs.begin(&key(1)));
                panic!("in the work");
            });
            worker.join()
        });
        assert!(panicked.is_err());
        let claim = reclaimed(jobs.begin(&key(1)));
        assert_eq!(claim.attempt(), 3, "{engine}");
        claim.fail(Failure::Retryable, "no connection").expect("recorded");
        match jobs.status(&key(1)).expect("a status") {
            JobStatus::Retryable { attempt: 3, memo } => assert_eq!(memo.json(), Some("\"no connection\"")),
            other => panic!("{other:?}"),
        }
        let claim = begun(jobs.begin(&key(1)));
        assert_eq!(claim.attempt(), 4);
        claim.fail(Failure::Final, "no such customer").expect("recorded");
        for _ in 0..2 {
            match jobs.begin(&key(1)).expect("an answer") {
                Begin::Failed(memo) => {
                    assert_eq!(memo.get::<String>().expect("text"), Some("no such customer".into()));
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(matches!(jobs.get_result::<u32>(&key(1)), Ok(JobResult::Failed(_))));
    }
}

/// A39: killed after `begin`, with a result that would be remembered for an hour.
#[test]
fn exactly_one_of_twenty_racers_reclaims_the_job_of_a_killed_worker() {
    let server = Server::start();
    let (lease, poll) = (Duration::from_millis(1000), Duration::from_millis(100));
    let mut worker = Child::spawn("job", &[&server.url(), "own", "1000", "7"]);
    let fence: u64 = worker.line(LONG).expect("its fence").parse().expect("a number");
    worker.sigkill();
    let killed = Instant::now();
    let wins = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| {
                let client = LockClient::connect(&server.url()).expect("a client");
                let jobs = jobs(&client, 1000);
                loop {
                    match jobs.begin(&key(7)).expect("an answer") {
                        Begin::Reclaimed(claim) => {
                            let took = killed.elapsed();
                            assert!(took < lease + Duration::from_secs(1) + poll, "{took:?}");
                            assert!(claim.fence().get() > fence);
                            assert_eq!(claim.attempt(), 2);
                            wins.fetch_add(1, Ordering::Relaxed);
                            thread::sleep(Duration::from_millis(300));
                            return claim.complete(&"by a racer").expect("recorded");
                        }
                        Begin::InProgress { .. } => thread::sleep(poll / 2),
                        Begin::Done(memo) => return assert_eq!(memo.json(), Some("\"by a racer\"")),
                        other => panic!("{other:?}"),
                    }
                }
            });
        }
    });
    assert_eq!(wins.into_inner(), 1);
}

/// A38: one worker ends the job while its lease may have run out, another one reclaims it.
///
/// The lease ends in the middle of it all by an operator's eviction, so that no round has to wait for it.
#[test]
fn whoever_ends_or_reclaims_first_the_job_is_done_once() {
    let server = Server::start();
    for (engine, client) in engines(&server) {
        let rounds = 5000;
        let (a, b) = (client.clone().build().expect("a client"), client.build().expect("a client"));
        let (lock_a, lock_b) = (a.fifo_lock("x").expect("a lock"), b.fifo_lock("x").expect("a lock"));
        let (a, b) =
            (lock_a.idempotency().build().expect("jobs"), lock_b.idempotency().build().expect("jobs"));
        let (mut by_a, mut by_b) = (0, 0);
        for round in 0..rounds {
            let key = key(round);
            let claim = begun(a.begin(&key));
            let fence = claim.fence();
            let (ended, reclaimed) = thread::scope(|scope| {
                let (key, a) = (
                    &key,
                    scope.spawn(move || {
                        Dice::new(2 * round).pause(300);
                        claim.complete("a").is_ok()
                    }),
                );
                Dice::new(2 * round + 1).pause(300);
                let _ = lock_b.evict(fence).expect("an answer");
                let reclaimed = loop {
                    match b.begin(key).expect("an answer") {
                        Begin::Reclaimed(claim) => {
                            claim.complete("b").expect("nobody disturbs this one");
                            break true;
                        }
                        Begin::Done(_) => break false,
                        // The other one's lease is being given back.
                        Begin::Busy { .. } | Begin::InProgress { .. } => {}
                        other => panic!("{engine}, round {round}: {other:?}"),
                    }
                };
                (a.join().expect("no panic"), reclaimed)
            });
            assert!(ended != reclaimed, "{engine}, round {round}: ended {ended}, reclaimed {reclaimed}");
            let winner = if ended { "a" } else { "b" };
            let result = a.get_result::<String>(&key).expect("an answer");
            assert_eq!(result, JobResult::Done(winner.into()), "{engine}, round {round}");
            if ended { by_a += 1 } else { by_b += 1 }
        }
        assert!(
            by_a > rounds / 20 && by_b > rounds / 20,
            "{engine}: one of them wins always: {by_a} and {by_b}"
        );
    }
}

#[test]
fn the_same_key_with_another_payload_is_an_error() {
    let server = Server::start();
    for (_, client) in engines(&server) {
        let jobs = jobs(&client.build().expect("a client"), 60_000);
        let refused = |jobs: &Idempotency| match jobs.begin_for(&key(1), &json!({"amount": 999})) {
            Err(Error::PayloadMismatch { key: told }) => assert_eq!(&*told, key(1).as_str()),
            other => panic!("{other:?}"),
        };
        let claim = begun(jobs.begin_for(&key(1), &json!({"amount": 100, "to": 7})));
        refused(&jobs);
        claim.complete(&1).expect("recorded");
        refused(&jobs);
        let again = jobs.begin_for(&key(1), &json!({"to": 7, "amount": 100}));
        assert!(matches!(again, Ok(Begin::Done(_))), "the order of fields is no difference: {again:?}");
        assert!(matches!(jobs.begin(&key(1)), Ok(Begin::Done(_))));
    }
}

#[test]
fn a_job_that_kills_its_workers_stops() {
    let server = Server::start();
    for (_, client) in engines(&server) {
        let jobs = client.build().expect("a client").idempotency().max_attempts(3).build().expect("jobs");
        drop(begun(jobs.begin(&key(1))));
        drop(reclaimed(jobs.begin(&key(1))));
        reclaimed(jobs.begin(&key(1))).fail(Failure::Retryable, &()).expect("recorded");
        for _ in 0..2 {
            assert!(matches!(jobs.begin(&key(1)), Ok(Begin::Exhausted { attempts: 3 })));
        }
        assert!(jobs.clear(&key(1)).expect("an answer"));
        drop(begun(jobs.begin(&key(1))));
    }
}

#[test]
fn waiting_for_a_result_ends_with_it_or_with_the_time() {
    let server = Server::start();
    for (_, client) in engines(&server) {
        let jobs = jobs(&client.build().expect("a client"), 60_000);
        let claim = begun(jobs.begin(&key(1)));
        let start = Instant::now();
        let status = jobs.wait_for_result(&key(1), Duration::from_millis(150)).expect("a status");
        assert!(matches!(status, JobStatus::InProgress { .. }), "{status:?}");
        assert!(
            start.elapsed() >= Duration::from_millis(150) && start.elapsed() < Duration::from_millis(400)
        );
        thread::scope(|scope| {
            let waiter = scope.spawn(|| jobs.wait_for_result(&key(1), LONG).expect("a status"));
            thread::sleep(Duration::from_millis(100));
            claim.complete(&7).expect("recorded");
            match waiter.join().expect("no panic") {
                JobStatus::Done { memo, .. } => assert_eq!(memo.get::<u32>().expect("a number"), Some(7)),
                other => panic!("{other:?}"),
            }
        });
        assert!(start.elapsed() < LONG);
    }
}

/// Two times, and neither has to do with the other: the owner's lease, and the result's.
#[test]
fn results_are_remembered_for_their_own_time_and_leave_nothing() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).expect("a client");
    let lock = client.builder("x").idle(Duration::from_millis(400)).build().expect("a lock");
    let jobs = lock.idempotency().result_ttl(Duration::from_millis(800)).build().expect("jobs");
    let claim = begun(jobs.begin(&key(1)));
    let record = format!("fifo:{{x}}:job:{}", key(1));
    assert_eq!(server.keys("*job*").join(" "), record);
    assert!(server.pttl(&record) > 1_800_000, "a pending record outlives the longest hold");
    claim.complete(&1).expect("recorded");
    assert!(server.pttl(&record) <= 800);
    eventually(LONG, "nothing is left", || server.keys("*").is_empty());
    let claim = begun(jobs.begin(&key(1)));
    assert_eq!(claim.attempt(), 1);
    // An evicted record does not keep its owner from ending the job: nobody else can have ended it.
    let mut connection = server.connection();
    let _: u64 = cmd("DEL").arg(&record).query(&mut connection).expect("an answer");
    claim.complete(&2).expect("recorded");
    assert_eq!(jobs.get_result(&key(1)).expect("an answer"), JobResult::Done(2));
    // A foreign value is named and kept.
    let _: () = cmd("SET").arg(&record).arg("mine").query(&mut connection).expect("an answer");
    match jobs.begin(&key(1)) {
        Err(Error::Protocol(why)) => assert!(why.contains(&*record), "{why}"),
        other => panic!("{other:?}"),
    }
    // A full server still lets a job be ended.
    let claim = begun(jobs.begin(&key(2)));
    server.fill_memory();
    let full = jobs.begin(&key(3));
    let ended = claim.complete(&3);
    server.set_maxmemory(0);
    assert!(
        matches!(full, Ok(Begin::InProgress { .. } | Begin::Busy { .. }) | Err(Error::OutOfMemory { .. })),
        "{full:?}"
    );
    ended.expect("recorded");
    assert_eq!(jobs.get_result(&key(2)).expect("an answer"), JobResult::Done(3));
}

/// The calls that begin and end a job may be repeated: the same grant gets the same answer.
#[test]
fn a_lost_reply_is_no_second_attempt() {
    let server = Server::start();
    for how in [Swallow::Cut, Swallow::Silence, Swallow::CutBefore] {
        let proxy = Proxy::start(server.addr());
        let client = LockClient::options().url(&proxy.url()).call_timeout(Duration::from_millis(300)).build();
        let jobs =
            client.expect("a client").fifo_lock("x").expect("a lock").idempotency().build().expect("jobs");
        let payload = json!({"amount": 100});
        // Only what begins or ends the job carries the fingerprint of the payload.
        let print = IdempotencyKey::new("job", &payload).expect("a key");
        jobs.status(&key(1)).expect("connected");
        let fault = proxy.swallow_next_reply(print.fingerprint(), how);
        let claim = begun(jobs.begin_for(&key(1), &payload));
        assert!(fault.happened());
        assert_eq!(claim.attempt(), 1, "one attempt, not two");
        let fault = proxy.swallow_next_reply(print.fingerprint(), how);
        claim.complete(&1).expect("recorded");
        assert!(fault.happened());
        assert_eq!(jobs.get_result(&key(1)).expect("an answer"), JobResult::Done(1));
        assert!(jobs.clear(&key(1)).expect("an answer"));
    }
}

/// Random calls by two clients, on both engines: all answers alike.
#[test]
fn both_engines_answer_alike() {
    let server = Server::start();
    let mut seen = BTreeMap::<String, u32>::new();
    for seed in 0..40 {
        server.flush_all();
        let [memory, redis] = engines(&server).map(|(_, client)| play(client, seed));
        for (step, (here, there)) in memory.iter().zip(&redis).enumerate() {
            assert_eq!(here, there, "seed {seed}, step {step}: {memory:#?}");
            *seen.entry(here.split([' ', '(']).next().unwrap_or_default().to_owned()).or_default() += 1;
        }
    }
    let all = [
        "Begun",
        "Reclaimed",
        "Done",
        "Failed",
        "InProgress",
        "Busy",
        "Exhausted",
        "PayloadMismatch",
        "ended",
        "lost",
        "Unknown",
        "Orphaned",
        "Retryable",
        "cleared",
    ];
    assert!(all.iter().all(|word| seen.contains_key(*word)), "not everything was met: {seen:?}");
}

/// Runs random calls, and tells what came of each.
fn play(client: ClientBuilder, seed: u64) -> Vec<String> {
    let mut dice = Dice::new(seed);
    let clients = [client.clone().build().expect("a client"), client.build().expect("a client")];
    let locks = clients.clone().map(|client| client.fifo_lock("x").expect("a lock"));
    let handles: Vec<Idempotency> = clients
        .iter()
        .zip(&locks)
        .flat_map(|(client, lock)| {
            [client.idempotency().max_attempts(4).build(), lock.idempotency().max_attempts(4).build()]
        })
        .map(|jobs| jobs.expect("jobs"))
        .collect();
    let mut claims: Vec<Claim> = Vec::new();
    let mut told = Vec::new();
    for _ in 0..60 {
        let jobs = dice.pick(&handles);
        let key = key(dice.below(2));
        let said = match dice.below(12) {
            0..=3 => {
                let begin = match dice.below(4) {
                    0 => jobs.begin_for(&key, &json!({"to": 8})),
                    1 => jobs.begin_for(&key, &json!({"to": 7})),
                    _ => jobs.begin(&key),
                };
                match begin {
                    Ok(Begin::Begun(claim)) => {
                        claims.push(claim);
                        format!("Begun {}", claims[claims.len() - 1].attempt())
                    }
                    Ok(Begin::Reclaimed(claim)) => {
                        claims.push(claim);
                        format!("Reclaimed {}", claims[claims.len() - 1].attempt())
                    }
                    Ok(Begin::Done(memo)) => format!("Done {:?}", memo.json()),
                    Ok(Begin::Failed(memo)) => format!("Failed {:?}", memo.json()),
                    Ok(Begin::Exhausted { attempts }) => format!("Exhausted {attempts}"),
                    Ok(Begin::InProgress { .. }) => "InProgress".into(),
                    Ok(Begin::Busy { owner }) => format!("Busy {}", owner.is_some()),
                    Err(Error::PayloadMismatch { .. }) => "PayloadMismatch".into(),
                    other => panic!("{other:?}"),
                }
            }
            4..=6 if !claims.is_empty() => {
                let at = usize::try_from(dice.below(claims.len() as u64)).expect("an index");
                let claim = claims.swap_remove(at);
                let ended = match dice.below(6) {
                    0 => claim.complete("done"),
                    1 => claim.complete_without_memo(),
                    2 => claim.fail(Failure::Retryable, "again"),
                    3 => claim.fail(Failure::Final, "never"),
                    _ => {
                        drop(claim);
                        Ok(())
                    }
                };
                match ended {
                    Ok(()) => "ended".into(),
                    Err(Error::LeaseLost { .. }) => "lost".into(),
                    other => panic!("{other:?}"),
                }
            }
            7 if !claims.is_empty() => {
                // Only claims under the shared lock can be evicted from here.
                let fence = dice.pick(&claims).fence();
                format!("evicted {}", locks[0].evict(fence).expect("an answer"))
            }
            8 => format!("cleared {}", jobs.clear(&key).expect("an answer")),
            _ => match jobs.status(&key).expect("a status") {
                JobStatus::InProgress { attempt, .. } => format!("InProgress {attempt}"),
                JobStatus::Orphaned { attempt, .. } => format!("Orphaned {attempt}"),
                other => format!("{other:?}"),
            },
        };
        told.push(said);
    }
    told
}

/// A memo is what it was made of.
#[test]
fn a_memo_is_typed() {
    let client = LockClient::memory();
    let jobs = jobs(&client, 60_000);
    begun(jobs.begin(&key(1))).complete(&vec![Some(1.5), None]).expect("recorded");
    let Ok(Begin::Done(memo)) = jobs.begin(&key(1)) else { panic!("it is done") };
    assert_eq!(memo.get::<Vec<Option<f64>>>().expect("its type"), Some(vec![Some(1.5), None]));
    let wrong: Result<Option<String>, Error> = Memo::get(&memo);
    assert!(wrong.is_err());
}
