//! Nobody waits for ever, or longer than he wanted, or gives up without a reason.

use std::collections::BTreeMap;

use super::{Attempt, Found, MS, Outcome, Rule, Story};
use crate::history::Why;

/// What a machine with other work may add to any bound.
const LOAD: u64 = 5000 * MS;
/// Bounds of a client: on a call, twice, and on giving a release up.
const CALLS: u64 = 2 * 1000 * MS;

/// Gives the time from the last fault until the last waiter was in.
pub(super) fn check(story: &Story, found: &mut Found) -> u64 {
    let mut recovery = 0;
    for attempt in story.attempts.values() {
        let (op, lock) = (attempt.op, &attempt.lock);
        let killed = story.killed.contains_key(&op.process);
        match &attempt.outcome {
            None if killed => {}
            None if attempt.granted.is_some() => {
                found.add(Rule::Waiting, format!("`{lock}`: {op:?} never came to an end with its lease"));
            }
            None => found.add(Rule::Waiting, format!("`{lock}`: {op:?} waits for ever")),
            Some((at, Outcome::Failed(why, text))) => {
                let reason = *why != Why::Other && story.is_disturbed(op.process, attempt.invoked, *at);
                if !reason {
                    found.add(Rule::Waiting, format!("`{lock}`: {op:?} failed without a fault: {text}"));
                }
            }
            Some((at, Outcome::Refused)) => deadline(story, attempt, *at, found),
            Some(_) => {}
        }
    }
    let Some(calm) = story.calm else {
        return recovery;
    };
    for (lock, bound) in bounds(story, calm) {
        for attempt in story.attempts.values().filter(|attempt| attempt.lock == lock) {
            let waited_until =
                attempt.granted.map(|(look, _)| look.at).or(attempt.outcome.as_ref().map(|end| end.0));
            let Some(until) = waited_until.filter(|until| *until > calm) else { continue };
            recovery = recovery.max(until - calm);
            if until > calm + bound {
                let op = attempt.op;
                let took = (until - calm) / MS;
                let what = format!(
                    "`{lock}`: {op:?} was in {took} ms after the last fault; bound {} ms",
                    bound / MS
                );
                found.add(Rule::Waiting, what);
            }
        }
    }
    recovery
}

/// Whoever is refused was refused in time, and not too early.
fn deadline(story: &Story, attempt: &Attempt, at: u64, found: &mut Found) {
    let (op, lock) = (attempt.op, &attempt.lock);
    let Some(wait) = attempt.terms.wait else {
        return found
            .add(Rule::Waiting, format!("`{lock}`: {op:?} gave up although it wanted to wait for ever"));
    };
    let took = at - attempt.invoked;
    if took < wait * MS {
        let what = format!("`{lock}`: {op:?} gave up after {} ms of {wait} ms", took / MS);
        found.add(Rule::Waiting, what);
    }
    // A stopped process sleeps through its deadline.
    let met = |process: Option<u32>| process == Some(op.process);
    let asleep: u64 = story
        .disturbances
        .iter()
        .filter(|fault| met(fault.process) && fault.from <= at && fault.to >= attempt.invoked)
        .map(|fault| fault.to.min(at).saturating_sub(fault.from.max(attempt.invoked)))
        .sum();
    if took > wait * MS + CALLS + LOAD + asleep {
        let what = format!("`{lock}`: {op:?} waited {} ms instead of {wait} ms", took / MS);
        found.add(Rule::Waiting, what);
    }
}

/// For each lock: how long after the last fault the last waiter may come in.
///
/// A dead holder's lease; a claim window and a poll per process that is gone; the time for regrouping; the bounds on
/// calls that were under way; and the sections of all who are before him.
fn bounds(story: &Story, calm: u64) -> BTreeMap<&str, u64> {
    let mut locks: BTreeMap<&str, Vec<&Attempt>> = BTreeMap::new();
    for attempt in story.attempts.values() {
        locks.entry(&attempt.lock).or_default().push(attempt);
    }
    let bound = |attempts: Vec<&Attempt>| {
        let most = |of: fn(&Attempt) -> u64| attempts.iter().map(|attempt| of(attempt)).max().unwrap_or(0);
        let (lease, claim) = (most(|a| a.terms.lease), most(|a| a.terms.claim));
        let poll = most(|a| a.terms.poll);
        // Whoever died long ago has been noticed.
        let dead = story.killed.values().filter(|at| **at + 10_000 * MS > calm).count() as u64;
        let open = |a: &&&Attempt| a.outcome.as_ref().is_none_or(|end| end.0 > calm);
        let sections: u64 = attempts.iter().filter(open).map(|a| a.terms.hold).sum();
        (lease + (dead + 1) * (claim + poll) + (claim + poll) + sections) * MS + CALLS + LOAD
    };
    locks.into_iter().map(|(lock, attempts)| (lock, bound(attempts))).collect()
}
