//! The scenarios. Each is a claim about the client logic that holds in every schedule; on top of what a scenario checks,
//! the server checks exclusion, fences and order after every transition, and the stage that nothing is left.

use std::sync::Arc;
use std::time::Duration;

use super::scheduler::{self, Injected, Rng, draw};
use super::server::Faults;
use super::stage::{CALL, Plan, Stage, explore, run};
use crate::client::LockClient;
use crate::clock;
use crate::error::Error;
use crate::sync::Mutex;

fn as_it_comes(_: &mut Plan, _: &mut Rng) {}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Up to `most` milliseconds, in steps of a tenth.
fn some_ms(most: u64) -> Duration {
    Duration::from_micros(draw(most * 10 + 1) * 100)
}

/// Threads of one or two clients that wait with and without deadlines, and hold for a while.
fn crowd(stage: &Stage) {
    let clients: Vec<_> = (0..1 + draw(2)).map(|_| stage.client()).collect();
    for i in 0..3 + draw(3) {
        let lock = stage.lock(&clients[draw(clients.len() as u64) as usize]);
        stage.thread(&format!("user {i}"), move |stage| {
            for _ in 0..1 + draw(2) {
                let wait = (draw(3) > 0).then(|| some_ms(800));
                if let Some(guard) = stage.obtain(&lock, wait) {
                    stage.use_up(guard, some_ms(300));
                }
            }
        });
    }
    for client in &clients {
        stage.empty(client);
    }
}

#[test]
fn somebody_polls_whoever_leaves_the_room_and_how() {
    fn tune(plan: &mut Plan, rng: &mut Rng) {
        // Without bells everything rests on the poller.
        if rng.permille(300) {
            plan.faults.bell_refused = 1000;
        }
        if rng.permille(500) {
            plan.faults.panics = 60;
        }
    }
    explore("leadership", 1200, tune, crowd);
}

#[test]
fn a_ring_for_a_waiter_that_just_timed_out_is_not_lost() {
    fn play(stage: &Stage) {
        let (a, b) = (stage.client(), stage.client());
        let (held, slow, next) = (stage.lock(&a), stage.lock(&b), stage.lock(&b));
        let far = stage.lock(&a);
        let meet = 100 + draw(200);
        stage.thread("holder", move |stage| {
            if let Some(guard) = stage.obtain(&held, Some(ms(500))) {
                stage.use_up(guard, ms(meet) + some_ms(3));
            }
        });
        stage.thread("in a hurry", move |stage| {
            scheduler::sleep(ms(5));
            let deadline = ms(meet - 5) + some_ms(3);
            if let Some(guard) = stage.obtain(&slow, Some(deadline)) {
                stage.use_up(guard, some_ms(10));
            }
        });
        for (name, lock) in [("same client", next), ("other client", far)] {
            stage.thread(name, move |stage| {
                scheduler::sleep(ms(10) + some_ms(5));
                if let Some(guard) = stage.obtain(&lock, None) {
                    stage.use_up(guard, some_ms(10));
                }
            });
        }
        stage.empty(&a);
        stage.empty(&b);
    }
    fn tune(plan: &mut Plan, rng: &mut Rng) {
        if rng.permille(300) {
            plan.faults.ring_late = 400;
            plan.faults.ring_lost = 100;
        }
    }
    explore("ring after timeout", 1200, tune, play);
}

#[test]
fn a_renewal_that_meets_the_release_is_no_loss() {
    fn tune(plan: &mut Plan, rng: &mut Rng) {
        plan.lease = ms(200);
        // Some renewals take about as long as the pause between them.
        match rng.below(3) {
            0 => plan.faults.slow = 60,
            1 => plan.faults = Faults { slow: 60, ..Faults::default() },
            _ => {}
        }
    }
    fn play(stage: &Stage) {
        let client = stage.client();
        for name in ["one", "two"] {
            let lock = stage.lock(&client);
            stage.thread(name, move |stage| {
                for _ in 0..3 {
                    // A renewal is due every quarter of the lease.
                    let Some(guard) = stage.obtain(&lock, Some(ms(2000))) else { continue };
                    let news = guard.on_lost();
                    let beats = if draw(4) == 0 { 8 } else { 1 + draw(3) };
                    stage.work(&guard, ms(50 * beats) + some_ms(1));
                    let good = scheduler::quietly(|| {
                        !guard.is_lost() && guard.held.holding.good_until().left() > CALL / 3
                    });
                    let fence = scheduler::quietly(|| guard.fence().get());
                    let holding = Arc::clone(&guard.held.holding);
                    stage.unlock(guard);
                    let lost = scheduler::quietly(|| holding.was_lost());
                    if good && stage.is_prompt() && lost && !stage.server().was_displaced(fence) {
                        scheduler::fail(format!("the release of {fence} was taken for its loss"));
                    }
                    if !lost && news.try_recv() != Err(crossbeam_channel::TryRecvError::Disconnected) {
                        scheduler::fail("whoever waits for the loss is not told of the end".into());
                    }
                }
            });
        }
        stage.empty(&client);
    }
    explore("renewal meets release", 1000, tune, play);
}

#[test]
fn a_guard_may_be_dropped_anywhere_and_outlive_its_client() {
    fn play(stage: &Stage) {
        let client = stage.client();
        let lock = stage.lock(&client);
        let other = stage.client();
        let rival = stage.lock(&other);
        stage.thread("taker", move |stage| {
            let Some(guard) = stage.obtain(&lock, None) else { return };
            drop(client);
            let again = (draw(2) == 0).then(|| lock.clone());
            drop(lock);
            stage.work(&guard, some_ms(100));
            stage.thread("dropper", move |stage| {
                // Using it makes it this thread's.
                stage.work(&guard, some_ms(400));
                if draw(2) == 0 {
                    stage.unlock(guard);
                } else {
                    drop(guard);
                }
            });
            if let Some(lock) = again {
                scheduler::sleep(some_ms(50));
                let start = clock::now();
                match lock.try_lock_for(ms(300)) {
                    // The guard is still this thread's: nobody has used it elsewhere yet, or it is back.
                    Err(Error::WouldDeadlock { .. }) => {}
                    result => {
                        if let Some(guard) = stage.judge(start, Some(ms(300)), result) {
                            stage.use_up(guard, some_ms(20));
                        }
                    }
                }
            }
        });
        stage.thread("rival", move |stage| {
            scheduler::sleep(some_ms(20));
            if let Some(guard) = stage.obtain(&rival, None) {
                stage.use_up(guard, some_ms(20));
            }
        });
        stage.empty(&other);
    }
    explore("guard elsewhere", 1000, as_it_comes, play);
}

#[test]
fn the_last_handle_may_go_while_somebody_waits() {
    fn play(stage: &Stage) {
        let other = stage.client();
        let rival = stage.lock(&other);
        stage.thread("rival", move |stage| {
            if let Some(guard) = stage.obtain(&rival, Some(ms(1000))) {
                stage.use_up(guard, some_ms(400));
            }
        });
        let client = stage.client();
        let lock = stage.lock(&client);
        scheduler::sleep(some_ms(10));
        let start = clock::now();
        match lock.enqueue() {
            Ok(ticket) => stage.thread("ticket", move |stage| {
                let start = clock::now();
                match draw(4) {
                    0 => drop(ticket),
                    1 => {
                        let wait = some_ms(600);
                        let result = ticket.wait_for(wait);
                        if let Some(guard) = stage.judge(start, Some(wait), result) {
                            stage.use_up(guard, some_ms(50));
                        }
                    }
                    _ => {
                        let result = ticket.wait().map(Some);
                        if let Some(guard) = stage.judge(start, None, result) {
                            stage.use_up(guard, some_ms(50));
                        }
                    }
                }
            }),
            Err(error) => {
                stage.judge(start, None, Err(error));
            }
        }
        stage.thread("user", move |stage| {
            if let Some(guard) = stage.obtain(&lock, Some(some_ms(600))) {
                drop(lock);
                stage.use_up(guard, some_ms(50));
            }
        });
        scheduler::sleep(some_ms(100));
        drop(client);
        stage.empty(&other);
    }
    explore("last handle", 1000, as_it_comes, play);
}

#[test]
fn a_parked_ticket_is_passed_over_and_keeps_its_place() {
    fn play(stage: &Stage) {
        let client = stage.client();
        let other = stage.client();
        for (name, client) in [("holder", &client), ("rival", &other)] {
            let lock = stage.lock(client);
            stage.thread(name, move |stage| {
                scheduler::sleep(some_ms(5));
                for _ in 0..2 {
                    if let Some(guard) = stage.obtain(&lock, Some(ms(1500))) {
                        stage.use_up(guard, some_ms(60));
                    }
                    scheduler::sleep(some_ms(20));
                }
            });
        }
        let lock = stage.lock(&client);
        stage.thread("ticket", move |stage| {
            let start = clock::now();
            let ticket = match lock.enqueue() {
                Ok(ticket) => ticket,
                Err(error) => {
                    stage.judge(start, None, Err(error));
                    return;
                }
            };
            let position = ticket.position();
            for _ in 0..3 {
                scheduler::sleep(some_ms(150));
                let wait = if draw(3) == 0 { Duration::ZERO } else { some_ms(150) };
                let start = clock::now();
                let result = ticket.wait_for(wait);
                if let Some(guard) = stage.judge(start, Some(wait), result) {
                    // A first call without a position that arrives after the ticket was dropped as a suspect's queues it
                    // anew, and then it stands there.
                    let late = stage.plan().faults.late + stage.plan().faults.slow > 0;
                    if guard.position() != position && !late {
                        scheduler::fail(format!("position {position} became {}", guard.position()));
                    }
                    stage.use_up(guard, some_ms(60));
                    return;
                }
            }
            match draw(3) {
                0 => ticket.cancel(),
                _ => {
                    let start = clock::now();
                    let result = ticket.wait().map(Some);
                    if let Some(guard) = stage.judge(start, None, result) {
                        stage.use_up(guard, some_ms(60));
                    }
                }
            }
        });
        stage.empty(&client);
        stage.empty(&other);
    }
    explore("ticket", 1200, as_it_comes, play);
}

#[test]
fn whoever_sits_down_as_the_listener_goes_is_heard() {
    fn tune(plan: &mut Plan, rng: &mut Rng) {
        // Both at the same moment, and a poll that is far off.
        plan.faults = Faults { instant: true, ..Faults::default() };
        plan.pace.switch = 500;
        plan.pace.stall = 0;
        plan.pace.ranked = rng.permille(300);
        plan.poll = ms(1000);
        plan.lease = ms(2000);
    }
    fn play(stage: &Stage) {
        let (client, other) = (stage.client(), stage.client());
        let (lock, far) = (stage.lock(&client), stage.lock(&other));
        stage.thread("holder", move |stage| {
            if let Some(guard) = stage.obtain(&far, None) {
                // The listener goes when it has heard nothing for a while, two or three seconds from here.
                stage.use_up(guard, ms(2200) + some_ms(50));
            }
        });
        stage.thread("waiter", move |stage| {
            scheduler::sleep(ms(1));
            if let Some(guard) = stage.obtain(&lock, Some(ms(5))) {
                stage.use_up(guard, ms(1));
            }
            if let Some(until) = stage.server().listening_until() {
                scheduler::sleep(until.left());
            }
            if let Some(guard) = stage.obtain(&lock, None) {
                stage.use_up(guard, ms(1));
            }
        });
        stage.empty(&client);
        stage.empty(&other);
    }
    explore("listener goes", 600, tune, play);
}

#[test]
fn waiting_goes_on_without_a_listener() {
    fn tune(plan: &mut Plan, rng: &mut Rng) {
        match rng.below(4) {
            0 => plan.faults.bell_panics = 300,
            1 => plan.faults.bell_refused = 900,
            2 => plan.pace.no_thread = 300,
            _ => {
                plan.faults.noise = 300;
                plan.faults.bell_broken = 500;
            }
        }
    }
    explore("no listener", 1000, tune, crowd);
}

#[test]
fn an_outage_is_ridden_out_for_as_long_as_patience_lasts() {
    fn play(stage: &Stage) {
        let client = stage.client();
        let other = stage.client();
        let patience = ms(1500);
        let length = [ms(300), ms(900), ms(4000)][draw(3) as usize];
        let start = clock::now().after(ms(100) + some_ms(100));
        stage.server().down(start, start.after(length));
        for i in 0..3 {
            let lock = stage.lock_with(if draw(2) == 0 { &client } else { &other }, patience);
            stage.thread(&format!("user {i}"), move |stage| {
                scheduler::sleep(some_ms(20));
                let begun = clock::now();
                let wait = (draw(3) == 0).then(|| some_ms(3000));
                let result = match wait {
                    None => lock.lock().map(Some),
                    Some(wait) => lock.try_lock_for(wait),
                };
                let took = clock::now().since(begun);
                // Everybody is queued before the outage begins, if nothing else goes wrong. Whoever has a deadline in it
                // is told that the server cannot be reached.
                if stage.is_smooth() && wait.is_none() && result.is_err() && length < patience {
                    scheduler::fail(format!("{took:?} into an outage of {length:?}: {result:?}"));
                }
                // A call, a pause, and what the others hold.
                let more = if length < patience { ms(6000) } else { ms(1000) };
                if stage.is_smooth() && took > start.after(length.min(patience)).since(begun) + more {
                    scheduler::fail(format!("waited {took:?} through an outage of {length:?}"));
                }
                let granted = match result {
                    Ok(granted) => granted,
                    Err(error) => stage.judge(begun, wait, Err(error)),
                };
                if let Some(guard) = granted {
                    stage.use_up(guard, some_ms(400));
                }
            });
        }
        stage.empty(&client);
        stage.empty(&other);
    }
    explore("outage", 1000, as_it_comes, play);
}

#[test]
fn a_ticket_given_up_in_an_outage_is_withdrawn_when_it_is_over() {
    fn tune(plan: &mut Plan, rng: &mut Rng) {
        if rng.permille(500) {
            plan.faults.late = 300;
        }
    }
    fn play(stage: &Stage) {
        let client = stage.client();
        let other = stage.client();
        let (lock, far) = (stage.lock(&client), stage.lock(&other));
        stage.thread("holder", move |stage| {
            if let Some(guard) = stage.obtain(&far, Some(ms(500))) {
                stage.use_up(guard, some_ms(900));
            }
        });
        for i in 0..2 {
            let lock = lock.clone();
            stage.thread(&format!("user {i}"), move |stage| {
                scheduler::sleep(ms(5) + some_ms(20));
                if let Some(guard) = stage.obtain(&lock, Some(ms(100) + some_ms(300))) {
                    stage.use_up(guard, some_ms(50));
                }
            });
        }
        drop(lock);
        let start = clock::now().after(ms(50) + some_ms(200));
        stage.server().down(start, start.after(some_ms(2000)));
        stage.empty(&client);
        stage.empty(&other);
    }
    explore("withdrawal", 1000, tune, play);
}

#[test]
fn a_stuck_holder_loses_the_lock_after_max_hold() {
    fn play(stage: &Stage) {
        let client = stage.client();
        let other = stage.client();
        let build = |client: &LockClient| {
            let lock = client.builder("x").lease(ms(200)).max_hold(ms(700)).claim(ms(50)).poll(ms(300));
            stage.watch(client);
            lock.build().expect("settings within bounds")
        };
        let (lock, far) = (build(&client), build(&other));
        stage.thread("stuck", move |stage| {
            let Some(guard) = stage.obtain(&lock, Some(ms(800))) else { return };
            let news = guard.on_lost();
            let start = clock::now();
            stage.server().enter(&guard.held);
            while !scheduler::quietly(|| guard.held.holding.was_lost()) {
                scheduler::sleep(ms(10));
                if clock::now().since(start) > ms(1000) && stage.is_prompt() {
                    scheduler::fail("held for longer than max_hold".into());
                }
            }
            scheduler::sleep(ms(20));
            if news.try_recv().is_err() {
                scheduler::fail("nobody was told of the loss".into());
            }
            stage.server().leave(&guard.held);
            scheduler::sleep(some_ms(400));
            stage.unlock(guard);
        });
        stage.thread("next", move |stage| {
            scheduler::sleep(some_ms(30));
            let start = clock::now();
            if let Some(guard) = stage.obtain(&far, None) {
                if stage.is_smooth() && clock::now().since(start) > ms(1300) {
                    scheduler::fail(format!("waited {:?} for a stuck holder", clock::now().since(start)));
                }
                stage.use_up(guard, some_ms(50));
            }
        });
        stage.empty(&client);
        stage.empty(&other);
    }
    explore("max_hold", 600, as_it_comes, play);
}

#[test]
fn a_holder_learns_that_its_lease_was_taken_away() {
    fn play(stage: &Stage) {
        let client = stage.client();
        let other = stage.client();
        let (lock, far) = (stage.lock(&client), stage.lock(&other));
        let operator = far.clone();
        stage.thread("holder", move |stage| {
            let Some(guard) = stage.obtain(&lock, Some(ms(800))) else { return };
            let fence = guard.fence();
            stage.server().enter(&guard.held);
            stage.thread("operator", move |_| {
                scheduler::sleep(some_ms(300));
                let _ = operator.evict(fence);
            });
            let start = clock::now();
            while !scheduler::quietly(|| guard.held.holding.was_lost()) && clock::now().since(start) < ms(900)
            {
                scheduler::sleep(some_ms(20));
            }
            let told = scheduler::quietly(|| guard.held.holding.was_lost());
            let lease = stage.plan().lease;
            let due = clock::now().since(start) > ms(300) + lease / 4 + ms(50);
            if stage.is_smooth() && due && !told {
                scheduler::fail("nobody told the holder".into());
            }
            stage.server().leave(&guard.held);
            stage.unlock(guard);
        });
        stage.thread("next", move |stage| {
            scheduler::sleep(some_ms(30));
            if let Some(guard) = stage.obtain(&far, None) {
                stage.use_up(guard, some_ms(50));
            }
        });
        stage.empty(&client);
        stage.empty(&other);
    }
    explore("eviction", 600, as_it_comes, play);
}

#[test]
fn threads_of_one_client_pass_the_lock_on_without_a_bell() {
    fn tune(plan: &mut Plan, rng: &mut Rng) {
        // So even without any bell nobody waits for a poll.
        if rng.permille(500) {
            plan.faults = Faults { bell_refused: 1000, ..Faults::default() };
            plan.poll = ms(1000);
        }
    }
    fn play(stage: &Stage) {
        let client = stage.client();
        let start = clock::now();
        for i in 0..4 {
            let lock = stage.lock(&client);
            stage.thread(&format!("user {i}"), move |stage| {
                scheduler::sleep(some_ms(5));
                if let Some(guard) = stage.obtain(&lock, None) {
                    let granted = scheduler::quietly(|| stage.server().granted_at(guard.fence().get()));
                    let only_deaf = stage.plan().faults.refused + stage.plan().faults.reply_lost == 0;
                    let took = granted.map(|at| clock::now().since(at));
                    let smooth = only_deaf && stage.is_prompt() && stage.plan().faults.slow == 0;
                    if smooth && took.is_none_or(|took| took > ms(5)) {
                        scheduler::fail(format!("passed on in {took:?}, {:?} in", clock::now().since(start)));
                    }
                    stage.use_up(guard, some_ms(50));
                }
            });
        }
        stage.empty(&client);
    }
    explore("hand-over", 800, tune, play);
}

#[test]
fn a_seed_repeats_exactly() {
    fn tune(plan: &mut Plan, rng: &mut Rng) {
        plan.faults.panics = rng.below(50);
    }
    for seed in 0..40 {
        let (first, second) = (run(seed, tune, crowd, false), run(seed, tune, crowd, false));
        assert_eq!(first, second, "seed {seed}");
        assert!(first.is_ok(), "seed {seed}: {first:?}");
    }
}

#[test]
fn stuck_threads_are_found_and_named() {
    fn deadlock(_: &Stage) {
        let pair = Arc::new((Mutex::new(()), Mutex::new(())));
        let other = Arc::clone(&pair);
        let thread = scheduler::spawn("other", true, move || {
            let _one = other.1.lock();
            scheduler::sleep(ms(1));
            let _two = other.0.lock();
        });
        let _one = pair.0.lock();
        scheduler::sleep(ms(1));
        let _two = pair.1.lock();
        scheduler::join(thread.expect("a thread"));
    }
    fn livelock(_: &Stage) {
        let mutex = Mutex::new(());
        loop {
            drop(mutex.lock());
        }
    }
    fn endless(_: &Stage) {
        loop {
            scheduler::sleep(ms(1000));
        }
    }
    fn panics(_: &Stage) {
        std::panic::resume_unwind(Box::new("by mistake"));
    }
    fn wanted(_: &Stage) {
        std::panic::resume_unwind(Box::new(Injected));
    }
    for (play, says) in [
        (deadlock as fn(&Stage), "deadlock"),
        (livelock, "livelock"),
        (endless, "does not end"),
        (panics, "by mistake"),
    ] {
        let why = run(1, as_it_comes, play, false).expect_err(says);
        assert!(why.contains(says), "{says}: {why}");
    }
    assert!(run(1, as_it_comes, wanted, false).is_ok());
}
