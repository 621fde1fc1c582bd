//! Exhaustive model check of the protocol: every state that a configuration can reach is looked at, once.
//!
//! The server is the real `protocol::machine`; the clients follow the rules of `waiting.rs` and `holding.rs` (see
//! `rules.rs`); between them is a network that loses, delays and repeats. Time is discrete and without bound: a lease is
//! two or three ticks, a claim window one. Nothing forces a client to act, so a frozen process needs no step of its own.
//!
//! | file | what it is |
//! |---|---|
//! | `world.rs` | a state, and which states are the same |
//! | `rules.rs` | the steps: clients, network, crashes, clocks, loss of data |
//! | `server.rs` | the machine, what must hold of each of its steps, and broken machines |
//! | `fair.rs` | liveness: what happens from every state once clients act |
//! | `explore.rs` | breadth-first search and the way to a fault |
//!
//! Checked in every state and step:
//!
//! * At most one ticket believes that it holds the lock, by its client's clock.
//! * Fences strictly increase in the order of grants, and a displaced one is never renewed.
//! * No grant passes over a queued ticket with a smaller position unless its client is suspected.
//! * A release answered `released` or `already` was not displaced before; nor was one whose holder is told of success.
//! * A bell never has two rings.
//! * Once clients act, whoever waits is granted, with bells and without any.
//!
//! What is relaxed, and where:
//!
//! * Loss of all data, a step ahead of the server's clock and an operator's eviction end leases that their holders still
//!   believe. A belief proved before such an upset may overlap with one proved after it, never two from the same side.
//! * If the server's clock steps back *and* data is lost, fences start again where the clock stands: they increase among
//!   the grants since the loss, and when they pass a fence from before it, its release is answered `already`. So neither
//!   the order across the loss nor the verdict on a lease from before it is checked there; all else is.
//! * Where the server forgets lost leases (`idle` of two ticks), its `already` may be wrong; what the holder is told must
//!   not be.
//!
//! Bounds: how often each mishap may happen in a run ([`Budget`]) and how many calls are on their way at once; a step that
//! would need one more call waits. `MODEL_BOUND=large cargo test --release --test model -- --nocapture` raises them; `tests/run.sh` runs the small bound. Every run prints
//! its number of states and steps, its depth, its time, and how often each kind of step was taken.

#![expect(
    clippy::needless_range_loop,
    reason = "the index is the name of a client or ticket, used in several arrays"
)]

mod explore;
mod fair;
mod few;
mod rules;
mod server;
mod world;

use self::explore::explore;
use self::rules::{Fault, Model};
use self::server::{Broken, Names};
use self::world::{Budget, Shape, Ticks, Use};

const L: Use = Use::Lock;
const T: Use = Use::Try;
const M: Use = Use::Limited;
const P: Use = Use::Place;

/// No mishaps.
const NONE: Budget =
    Budget { lose: 0, double: 0, crash: 0, quit: 0, park: 0, back: 0, ahead: 0, wipe: 0, evict: 0 };

/// A configuration: the tickets of the first client, then those of the next; what may go wrong.
fn model<const CLIENTS: usize, const EACH: usize>(
    name: &'static str,
    tasks: [[Use; EACH]; CLIENTS],
    budget: Budget,
) -> Model {
    let lease: Ticks = 2;
    let reverts = budget.back > 0 && budget.wipe > 0;
    let shape = Shape {
        clients: CLIENTS,
        each: EACH,
        oldest: lease,
        back: 2,
        forgets: false,
        reverts,
        gullible: false,
    };
    Model {
        name,
        shape,
        tasks: tasks.concat(),
        lease,
        claim: 1,
        regroup: 2,
        idle: None,
        ahead: 2,
        calls: 2,
        budget,
        fault: None,
        names: Names::default(),
    }
}

/// Whether the larger bounds were asked for.
fn large() -> bool {
    std::env::var("MODEL_BOUND").is_ok_and(|bound| bound == "large")
}

/// The bound for every run of the tests, or the larger one.
fn bound(always: u8, when_large: u8) -> u8 {
    if large() { when_large } else { always }
}

/// Looks at every state; nothing may be broken, and every mishap that is allowed must have happened.
#[track_caller]
fn holds(mut model: Model) {
    model.names = Names::new(&model);
    let report = explore(&model);
    println!("{report}");
    assert_eq!(report.broken.as_ref().map(|(broken, _)| *broken), None, "{report}");
    let Budget { lose, double, crash, quit, park, back, ahead, wipe, evict } = model.budget;
    let mishaps = [
        (lose, "late"),
        (lose, "unanswered"),
        (lose, "haunt"),
        (double, "twice"),
        (crash, "crash"),
        (quit, "give up"),
        (quit, "withdraw"),
        (park, "resume"),
        (back, "back"),
        (ahead, "ahead"),
        (wipe, "wipe"),
        (evict, "evict"),
    ];
    for (allowed, kind) in mishaps {
        assert!(allowed == 0 || report.count(kind) > 0, "{kind} never happened: {report}");
    }
}

/// Breaks something on purpose: the check must find it, and by this property.
#[track_caller]
fn finds(fault: Fault, expected: Broken, mut model: Model) {
    model.fault = Some(fault);
    model.shape.gullible = fault == Fault::StaleNews;
    model.names = Names::new(&model);
    let report = explore(&model);
    println!("{fault:?} in {report}");
    assert_eq!(report.broken.map(|(broken, _)| broken), Some(expected), "{fault:?}");
}

#[test]
fn messages_get_lost_and_come_late() {
    let budget = Budget { lose: bound(1, 2), crash: 1, ..NONE };
    holds(Model {
        lease: 3,
        shape: Shape { oldest: 3, ..model("", [[L], [L]], budget).shape },
        ..model("two clients, messages lost or late, a crash", [[L], [L]], budget)
    });
}

#[test]
fn calls_arrive_twice_and_waiters_give_up() {
    let budget = Budget { double: 1, crash: bound(0, 1), quit: 1, ..NONE };
    holds(model("two clients, calls twice, giving up", [[L], [L]], budget));
}

#[test]
fn three_clients_wait_and_the_slow_are_suspected() {
    let budget = Budget { crash: bound(0, 1), lose: bound(0, 1), ..NONE };
    holds(model("three clients", [[L], [L], [L]], budget));
}

#[test]
fn clients_have_two_tickets_each() {
    let budget = Budget { lose: bound(0, 1), ..NONE };
    holds(Model {
        calls: if large() { 2 } else { 1 },
        ..model("two tickets each", [[L, L], [L, L]], budget)
    });
}

#[test]
fn places_are_left_and_taken_up_again() {
    let budget = Budget { park: 2, lose: bound(0, 1), ..NONE };
    holds(model("two clients with places", [[P], [P]], budget));
}

#[test]
fn some_only_try_and_some_meet_a_full_queue() {
    let budget = Budget { lose: bound(0, 1), ..NONE };
    holds(model("three clients, one tries", [[L], [L], [T]], budget));
    holds(model("three clients that mind a full queue", [[M], [M], [M]], budget));
}

#[test]
fn the_clock_of_the_server_steps_back() {
    let budget = Budget { back: 1, lose: 1, ..NONE };
    holds(model("two clients, clock back", [[L], [L]], budget));
}

#[test]
fn the_clock_of_the_server_steps_ahead() {
    let budget = Budget { ahead: 1, lose: 1, ..NONE };
    holds(model("two clients, clock ahead", [[L], [L]], budget));
}

#[test]
fn all_data_is_lost() {
    let budget = Budget { wipe: bound(1, 2), lose: 1, ..NONE };
    holds(model("two clients, data lost", [[L], [L]], budget));
}

#[test]
fn the_clock_steps_back_and_all_data_is_lost() {
    let budget = Budget { back: 1, wipe: 1, lose: bound(0, 1), ..NONE };
    holds(model("two clients, clock back and data lost", [[L], [L]], budget));
}

#[test]
fn an_operator_evicts() {
    let budget = Budget { evict: 1, lose: bound(0, 1), ..NONE };
    holds(model("two clients, eviction", [[L], [L]], budget));
}

#[test]
fn the_server_forgets_lost_leases() {
    let budget = Budget { lose: 1, evict: bound(0, 1), ..NONE };
    holds(forgetful(budget));
}

/// The server forgets after two ticks.
fn forgetful(budget: Budget) -> Model {
    let base = model("two clients, the server forgets", [[L], [L]], budget);
    let shape = Shape { oldest: 3, forgets: true, ..base.shape };
    Model { idle: Some(2), shape, ..base }
}

#[test]
fn faults_of_clients_are_found() {
    let plain = || model("two clients", [[L], [L]], NONE);
    let three = || model("three clients", [[L], [L], [L]], NONE);
    let places = || model("places", [[P], [P]], Budget { park: 2, lose: 1, ..NONE });
    finds(Fault::StaleNews, Broken::Exclusion, three());
    finds(Fault::CountsFromReceipt, Broken::Exclusion, plain());
    finds(Fault::RenewalCountsFromReceipt, Broken::Exclusion, plain());
    finds(Fault::RingCountsFromHearing, Broken::Exclusion, three());
    finds(Fault::BelievesWhatItGaveBack, Broken::Exclusion, places());
    finds(Fault::AlreadyIsSuccess, Broken::Verdict, forgetful(Budget { lose: 1, ..NONE }));
    finds(Fault::NoPolls, Broken::Stuck, plain());
}

#[test]
fn faults_of_the_machine_are_found() {
    let plain = || model("two clients", [[L], [L]], NONE);
    let three = || model("three clients", [[L], [L], [L]], NONE);
    let pairs = || model("two tickets each", [[L, L], [L, L]], NONE);
    let places = || model("places", [[P], [P]], Budget { park: 2, lose: 1, ..NONE });
    let crashing = || model("a crash", [[L], [L]], Budget { crash: 1, ..NONE });
    let wiped = || model("data lost", [[L], [L]], Budget { wipe: 1, ..NONE });
    finds(Fault::FreeWithoutBell, Broken::Exclusion, three());
    finds(Fault::NamingDoesNotClaim, Broken::Exclusion, pairs());
    finds(Fault::RenewalReowns, Broken::Fence, plain());
    finds(Fault::RenewalSteals, Broken::Fence, plain());
    finds(Fault::ReleaseByHolderOnly, Broken::Verdict, places());
    finds(Fault::LostNotRecorded, Broken::Verdict, plain());
    finds(Fault::BornNotChecked, Broken::Verdict, wiped());
    finds(Fault::FenceCounts, Broken::Fence, wiped());
    finds(Fault::NewcomersBarge, Broken::Order, three());
    finds(Fault::PollsDoNotAdvance, Broken::Stuck, crashing());
}
