//! The checker accepts good logs, and refuses each of these corrupted ones by the rule it breaks.

use super::{Rule, check};
use crate::history::{Event, Op, Stored, Terms, Verb, What, Why};

const A: Op = Op { process: 1, n: 1 };
const B: Op = Op { process: 2, n: 1 };
const C: Op = Op { process: 1, n: 2 };
const D: Op = Op { process: 3, n: 1 };
const E: Op = Op { process: 3, n: 2 };
const FOREVER: Terms = Terms { lease: 1000, claim: 200, poll: 300, hold: 100, wait: None };
const TRY: Terms = Terms { wait: Some(0), ..FOREVER };

fn ms(at: u64, what: What) -> Event {
    Event { at: at * 1_000_000, what }
}

fn invoke(op: Op, terms: Terms) -> What {
    What::Invoke { op, lock: "x".into(), terms }
}

fn granted(op: Op, fence: u64, position: u64) -> What {
    What::Granted { op, fence, position, left_us: 950_000 }
}

fn call(verb: Verb, ticket: &str) -> What {
    What::Call { lock: "x".into(), verb, ticket: ticket.into() }
}

fn queued(ticket: &str, position: u64) -> What {
    What::Queued { lock: "x".into(), ticket: ticket.into(), position }
}

fn popped() -> What {
    What::Popped { lock: "x".into(), first: true }
}

fn dropped(ticket: &str) -> What {
    What::Dequeued { lock: "x".into(), tickets: vec![ticket.into()] }
}

/// A record: `(holder, its position)`, stored at `now` of the server, in ms.
fn record(now: u64, holder: Option<(&str, u64)>, fence: u64, until: u64, claim: Option<u64>) -> What {
    let stored = Stored {
        holder: holder.map(|(ticket, _)| ticket.into()),
        fence,
        until: until * 1000,
        claim: claim.map(|at| at * 1000),
        suspects: Vec::new(),
        place: holder.map_or(0, |(_, place)| place),
    };
    What::Record { lock: "x".into(), now_us: now * 1000, record: stored }
}

fn suspecting(suspect: &str, what: What) -> What {
    match what {
        What::Record { lock, now_us, mut record } => {
            record.suspects.push(suspect.into());
            What::Record { lock, now_us, record }
        }
        other => panic!("{other:?}"),
    }
}

/// A holds, B and C queue; B is served, then C, who dies with the lock; D, who came last, gets it a lease later. E only
/// tries, while D holds. The server's clock shows the log's.
fn good() -> Vec<Event> {
    use Verb::{Acquire, RenewOrRelease};
    vec![
        ms(0, invoke(A, FOREVER)),
        ms(1, call(Acquire, "a.1.1000")),
        ms(2, record(2, Some(("a.1.1000", 50)), 100, 1002, None)),
        ms(5, granted(A, 100, 50)),
        ms(6, invoke(B, FOREVER)),
        ms(7, call(Acquire, "b.1.1000")),
        ms(7, queued("b.1.1000", 60)),
        ms(7, record(7, Some(("a.1.1000", 50)), 100, 1002, None)),
        ms(8, invoke(C, FOREVER)),
        ms(9, call(Acquire, "a.2.1000")),
        ms(9, queued("a.2.1000", 70)),
        ms(9, record(9, Some(("a.1.1000", 50)), 100, 1002, None)),
        ms(50, What::Holding { op: A, left_us: 900_000 }),
        ms(100, What::ReleaseInvoke { op: A, left_us: 850_000 }),
        ms(101, call(RenewOrRelease, "a.1.1000")),
        ms(101, popped()),
        ms(101, record(101, Some(("b.1.1000", 60)), 110, 1101, Some(301))),
        ms(102, What::Released { op: A }),
        ms(103, granted(B, 110, 60)),
        ms(120, call(RenewOrRelease, "b.1.1000")),
        ms(120, record(120, Some(("b.1.1000", 60)), 110, 1120, None)),
        ms(150, What::ReleaseInvoke { op: B, left_us: 900_000 }),
        ms(151, call(RenewOrRelease, "b.1.1000")),
        ms(151, popped()),
        ms(151, record(151, Some(("a.2.1000", 70)), 120, 1151, Some(351))),
        ms(152, What::Released { op: B }),
        ms(155, granted(C, 120, 70)),
        ms(160, What::Killed { process: 1 }),
        ms(
            160,
            What::Fault { fault: "sigkill".into(), process: Some(1), from: 159_000_000, to: 160_000_000 },
        ),
        ms(170, invoke(D, FOREVER)),
        ms(171, call(Acquire, "d.1.1000")),
        ms(171, queued("d.1.1000", 80)),
        ms(171, record(171, Some(("a.2.1000", 70)), 120, 1151, Some(351))),
        ms(1300, call(Acquire, "d.1.1000")),
        ms(1300, popped()),
        ms(1300, suspecting("a", record(1300, Some(("d.1.1000", 80)), 130, 2300, None))),
        ms(1301, granted(D, 130, 80)),
        ms(1302, invoke(E, TRY)),
        ms(1303, What::Refused { op: E }),
        ms(1350, What::ReleaseInvoke { op: D, left_us: 900_000 }),
        ms(1351, call(RenewOrRelease, "d.1.1000")),
        ms(1351, record(1351, None, 130, 0, None)),
        ms(1352, What::Released { op: D }),
        ms(1400, What::Calm),
        ms(1500, What::End),
    ]
}

/// The clients' part of a log.
fn unseen(mut log: Vec<Event>) -> Vec<Event> {
    log.retain(|event| {
        !matches!(
            event.what,
            What::Call { .. }
                | What::Queued { .. }
                | What::Dequeued { .. }
                | What::Popped { .. }
                | What::Record { .. }
                | What::Flushed
                | What::Found { .. }
        )
    });
    log
}

/// Everything is lost while A holds, and B gets the lock at once; A is told so.
fn forgotten() -> Vec<Event> {
    use Verb::{Acquire, RenewOrRelease};
    vec![
        ms(0, invoke(A, FOREVER)),
        ms(1, call(Acquire, "a.1.1000")),
        ms(2, record(2, Some(("a.1.1000", 50)), 100, 1002, None)),
        ms(5, granted(A, 100, 50)),
        ms(20, What::Flushed),
        ms(21, What::DataLost { from: 19_000_000, to: 21_000_000 }),
        ms(22, invoke(B, FOREVER)),
        ms(23, call(Acquire, "b.1.1000")),
        ms(23, record(23, Some(("b.1.1000", 60)), 110, 1023, None)),
        ms(24, granted(B, 110, 60)),
        ms(200, What::Holding { op: A, left_us: 700_000 }),
        ms(250, What::Lost { op: A }),
        ms(260, What::ReleaseInvoke { op: A, left_us: 0 }),
        ms(261, What::ReleaseLost { op: A }),
        ms(300, What::ReleaseInvoke { op: B, left_us: 700_000 }),
        ms(301, call(RenewOrRelease, "b.1.1000")),
        ms(301, record(301, None, 110, 0, None)),
        ms(302, What::Released { op: B }),
        ms(400, What::Calm),
        ms(500, What::End),
    ]
}

/// Like `log`, with the event at `index(what)` changed by `change`.
fn corrupt(mut log: Vec<Event>, which: impl Fn(&What) -> bool, change: impl Fn(&mut Event)) -> Vec<Event> {
    let event = log.iter_mut().find(|event| which(&event.what)).expect("an event to corrupt");
    change(event);
    log.sort_by_key(|event| event.at);
    log
}

fn without(mut log: Vec<Event>, which: impl Fn(&What) -> bool) -> Vec<Event> {
    let at = log.iter().position(|event| which(&event.what)).expect("an event to leave out");
    log.remove(at);
    log
}

/// Like `log`, with more events.
fn with(mut log: Vec<Event>, more: impl IntoIterator<Item = Event>) -> Vec<Event> {
    log.extend(more);
    log.sort_by_key(|event| event.at);
    log
}

fn is_grant(to: Op) -> impl Fn(&What) -> bool {
    move |what| matches!(what, What::Granted { op, .. } if *op == to)
}

fn is_end(of: Op) -> impl Fn(&What) -> bool {
    move |what| matches!(what, What::Released { op } | What::ReleaseLost { op } if *op == of)
}

/// Changes the record stored at `at` ms.
fn restored(at: u64, change: impl Fn(&mut Stored)) -> Vec<Event> {
    let mut log = good();
    let stored = log.iter_mut().find_map(|event| match &mut event.what {
        What::Record { record, .. } if event.at == at * 1_000_000 => Some(record),
        _ => None,
    });
    change(stored.expect("a record at that time"));
    log
}

#[track_caller]
fn accepts(log: &[Event]) {
    let (_, violations) = check(log);
    let said: Vec<_> = violations.iter().map(|violation| (violation.rule, &violation.what)).collect();
    assert!(said.is_empty(), "{said:#?}");
}

#[track_caller]
fn refuses(rule: Rule, log: &[Event]) {
    let (_, violations) = check(log);
    assert!(violations.iter().any(|violation| violation.rule == rule), "no {rule:?} among {violations:#?}");
}

#[test]
fn good_logs_are_accepted() {
    accepts(&good());
    accepts(&unseen(good()));
    accepts(&forgotten());
    accepts(&unseen(forgotten()));
    accepts(&[]);
    let (tally, _) = check(&good());
    assert_eq!((tally.operations, tally.grants, tally.server_grants), (5, 4, 4));
    assert_eq!((tally.displaced, tally.released, tally.refused), (1, 3, 1));
    let mut twice = tally.clone();
    twice.add(&tally);
    assert_eq!((twice.operations, twice.released, twice.recovery_ms), (10, 6, tally.recovery_ms));
}

#[test]
fn a_log_reads_back_as_it_was_written() {
    for event in good().into_iter().chain(forgotten()) {
        let line = serde_json::to_string(&event).expect("JSON");
        assert_eq!(serde_json::from_str::<Event>(&line).expect("an event"), event);
    }
}

#[test]
fn log_what_cannot_have_happened_is_refused() {
    refuses(Rule::Log, &without(good(), |what| matches!(what, What::Invoke { op: B, .. })));
    refuses(Rule::Log, &without(good(), is_grant(A)));
    refuses(Rule::Log, &with(good(), [ms(1360, What::Released { op: D })]));
}

#[test]
fn exclusion_two_beliefs_at_one_time_are_refused() {
    // B is in before A starts to release.
    refuses(Rule::Exclusion, &corrupt(unseen(good()), is_grant(B), |event| event.at = 90_000_000));
    // D is in while the lease of the dead C is still good by C's clock.
    refuses(Rule::Exclusion, &corrupt(unseen(good()), is_grant(D), |event| event.at = 900_000_000));
    // A never released, and its lease was good for longer than until B came.
    let log = without(without(good(), |what| matches!(what, What::ReleaseInvoke { op: A, .. })), is_end(A));
    refuses(Rule::Exclusion, &log);
    // Without the loss of data nothing excuses it; and it excuses no belief that outlives the lease.
    refuses(Rule::Exclusion, &without(forgotten(), |what| matches!(what, What::DataLost { .. })));
    let longer = corrupt(
        without(forgotten(), |what| matches!(what, What::Lost { .. })),
        |what| matches!(what, What::ReleaseInvoke { op: A, .. }),
        |event| {
            *event = ms(1300, What::ReleaseInvoke { op: A, left_us: 500_000 });
        },
    );
    let longer =
        corrupt(longer, |what| matches!(what, What::ReleaseLost { .. }), |event| event.at = 1_301_000_000);
    let longer = corrupt(
        longer,
        |what| matches!(what, What::ReleaseInvoke { op: B, .. }),
        |event| {
            *event = ms(1310, What::ReleaseInvoke { op: B, left_us: 500_000 });
        },
    );
    let longer = corrupt(longer, is_end(B), |event| event.at = 1_311_000_000);
    refuses(Rule::Exclusion, &longer);
}

#[test]
fn fences_that_do_not_ascend_are_refused() {
    let fence = |of: Op, to: u64| {
        corrupt(unseen(good()), is_grant(of), move |event| match &mut event.what {
            What::Granted { fence, .. } => *fence = to,
            other => panic!("{other:?}"),
        })
    };
    // The same twice; and a smaller one for a call that began after a larger one was had.
    refuses(Rule::Fences, &fence(B, 100));
    refuses(Rule::Fences, &fence(D, 105));
    // The server mints a smaller one.
    refuses(Rule::Fences, &restored(1300, |record| record.fence = 119));
    // A client has one that the server never minted.
    refuses(Rule::Fences, &corrupt(good(), is_grant(A), |event| event.what = granted(A, 99, 50)));
    // After a loss of data they begin anew.
    let log = corrupt(forgotten(), is_grant(B), |event| event.what = granted(B, 1, 60));
    refuses(Rule::Fences, &log);
}

#[test]
fn order_that_is_broken_is_refused() {
    // C is granted before B, as the clients see it and as the server does.
    let swapped = corrupt(unseen(good()), is_grant(B), |event| event.what = granted(B, 110, 75));
    refuses(Rule::Order, &swapped);
    refuses(Rule::Order, &restored(101, |record| record.holder = Some("a.2.1000".into())));
    let last = corrupt(
        good(),
        |what| matches!(what, What::Popped { .. }),
        |event| event.what = What::Popped { lock: "x".into(), first: false },
    );
    refuses(Rule::Order, &last);
    // Nobody was taken from the queue, and a newcomer was granted.
    refuses(Rule::Order, &without(good(), |what| matches!(what, What::Popped { .. })));
    // A newcomer stands before those who came first; a place is given twice; a ticket moves.
    let place = |ticket: &'static str, at: u64| {
        corrupt(
            good(),
            move |what| matches!(what, What::Queued { ticket: queued, .. } if queued == ticket),
            move |event| event.what = queued(ticket, at),
        )
    };
    refuses(Rule::Order, &place("d.1.1000", 65));
    refuses(Rule::Order, &place("a.2.1000", 60));
    refuses(
        Rule::Order,
        &with(good(), [ms(20, call(Verb::Acquire, "b.1.1000")), ms(20, queued("b.1.1000", 90))]),
    );
    // A ticket whose client nobody suspects is dropped.
    let drop = [
        ms(80, call(Verb::Acquire, "d.9.1000")),
        ms(80, dropped("b.1.1000")),
        ms(80, record(80, Some(("a.1.1000", 50)), 100, 1002, None)),
    ];
    refuses(Rule::Order, &with(good(), drop));
}

#[test]
fn handover_without_a_right_to_it_is_refused() {
    // D displaces C before its lease has lapsed, and before its claim window is over.
    let early = |now: u64| {
        corrupt(
            good(),
            |what| matches!(what, What::Record { now_us: 1_300_000, .. }),
            move |event| match &mut event.what {
                What::Record { now_us, .. } => *now_us = now * 1000,
                other => panic!("{other:?}"),
            },
        )
    };
    refuses(Rule::Handover, &early(300));
    accepts(&early(400));
    // It was claimed, so only the lease counts.
    let claimed = [
        ms(200, call(Verb::RenewOrRelease, "a.2.1000")),
        ms(200, record(200, Some(("a.2.1000", 70)), 120, 1151, None)),
    ];
    refuses(Rule::Handover, &with(early(400), claimed));
    // Somebody else's release ends A's lease; a renewal takes the lock.
    let foreign = corrupt(
        good(),
        |what| matches!(what, What::Call { verb: Verb::RenewOrRelease, .. }),
        |event| event.what = call(Verb::RenewOrRelease, "b.7.1000"),
    );
    refuses(Rule::Handover, &foreign);
    let taken = [
        ms(1360, call(Verb::RenewOrRelease, "b.1.1000")),
        ms(1360, record(1360, Some(("b.1.1000", 60)), 140, 2360, None)),
    ];
    refuses(Rule::Handover, &with(good(), taken));
    // A client is suspected that left nothing unclaimed.
    refuses(Rule::Handover, &restored(1300, |record| record.suspects = vec!["b".into()]));
}

#[test]
fn verdicts_that_are_wrong_are_refused() {
    // Lost, although its own call ended it; released, although somebody else's did.
    let lost = corrupt(good(), is_end(A), |event| event.what = What::ReleaseLost { op: A });
    refuses(Rule::Verdict, &lost);
    let released = corrupt(forgotten(), is_end(A), |event| event.what = What::Released { op: A });
    refuses(Rule::Verdict, &released);
    refuses(Rule::Verdict, &unseen(released));
    let displaced = corrupt(
        good(),
        |what| matches!(what, What::Call { verb: Verb::RenewOrRelease, .. }),
        |event| event.what = call(Verb::Acquire, "b.1.1000"),
    );
    refuses(Rule::Verdict, &displaced);
    // It failed without a fault.
    let quiet = without(good(), |what| matches!(what, What::Fault { .. }));
    let failed = corrupt(quiet, is_end(A), |event| {
        event.what = What::ReleaseFailed { op: A, text: "no connection".into() };
    });
    refuses(Rule::Verdict, &failed);
}

#[test]
fn waiting_for_ever_or_for_no_reason_is_refused() {
    let is_of = |of: Op| move |what: &What| format!("{what:?}").contains(&format!("{of:?}"));
    // D never gets an answer; D's lease never ends.
    let mut forgotten_waiter = unseen(good());
    forgotten_waiter.retain(|event| !is_of(D)(&event.what) || matches!(event.what, What::Invoke { .. }));
    refuses(Rule::Waiting, &forgotten_waiter);
    let held = without(unseen(good()), is_end(D));
    refuses(Rule::Waiting, &held);
    // It is in at last, but long after the last fault.
    let late = corrupt(unseen(good()), is_grant(D), |event| event.at = 40_000_000_000);
    let late = corrupt(
        late,
        |what| matches!(what, What::ReleaseInvoke { op: D, .. }),
        |event| event.at = 40_050_000_000,
    );
    let late = corrupt(late, is_end(D), |event| event.at = 40_051_000_000);
    refuses(Rule::Waiting, &late);
    // It gave up although it has no deadline; before its deadline; long after it.
    let refused = |wait: Option<u64>, at: u64| {
        let log = corrupt(
            unseen(good()),
            |what| matches!(what, What::Refused { .. }),
            move |event| {
                event.at = at * 1_000_000;
            },
        );
        corrupt(log, is_of(E), move |event| event.what = invoke(E, Terms { wait, ..FOREVER }))
    };
    refuses(Rule::Waiting, &refused(None, 1303));
    refuses(Rule::Waiting, &refused(Some(500), 1400));
    refuses(Rule::Waiting, &refused(Some(500), 20_000));
    accepts(&refused(Some(500), 1803));
    // It failed, and no fault explains it, or none can.
    let failed = |why: Why, faults: bool| {
        let log = corrupt(
            unseen(good()),
            |what| matches!(what, What::Refused { .. }),
            move |event| {
                event.what = What::Failed { op: E, why, text: "no".into() };
            },
        );
        let fault =
            What::Fault { fault: "cut".into(), process: None, from: 1_300_000_000, to: 1_310_000_000 };
        if faults { with(log, [ms(1310, fault)]) } else { log }
    };
    refuses(Rule::Waiting, &failed(Why::Unreachable, false));
    refuses(Rule::Waiting, &failed(Why::Other, true));
    accepts(&failed(Why::Unreachable, true));
}
