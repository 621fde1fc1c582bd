//! Judges the log of a chaos run. Pure: events in, violations out.
//!
//! | rule | what it demands | what excuses |
//! |---|---|---|
//! | `Log` | events in an order that makes sense | nothing |
//! | `Exclusion` | no two clients hold one lock by their own reckoning at one time | the older lease began before all data was lost, or the server's clock moved forward, and is over a lease later |
//! | `Fences` | strictly ascending: in the server's order, and for clients whenever one call ended before another began; none that the server did not mint | nothing |
//! | `Order` | whoever is granted has the smallest position queued; positions are unique, kept, and ascend with arrival; who is dropped was suspected | a ticket that was dropped, given up, passed over or lost with all data is out of the queue |
//! | `Handover` | a lease is ended by its own ticket, or by a newcomer after it lapsed or stood unclaimed for its window | loss of data |
//! | `Verdict` | `released`: its own call ended exactly this lease; `lost`: somebody else did | `lost`: data lost; or the client had no answer in time, and a fault explains that |
//! | `Waiting` | every attempt ends: within its deadline, and without any within the bound after the last fault; errors have a fault that explains them | a killed process |
//!
//! A holder believes in its lease from the answer to its call until it starts to release, or its own clock says that
//! the lease has run out, or it says that the lease is lost. Stopped processes need no exception: their clock goes on.

mod exclusion;
mod fences;
mod replay;
mod verdicts;
mod waiting;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};

use self::replay::Server;
use super::history::{Event, Op, Terms, What, Why};

const MS: u64 = 1_000_000;
/// How long after a fault its traces still show: the bound on a call, and on the one that follows.
const TRACES: u64 = 3000 * MS;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Rule {
    Log,
    Exclusion,
    Fences,
    Order,
    Handover,
    Verdict,
    Waiting,
}

/// One thing that must not be.
#[derive(Clone, Debug)]
pub(crate) struct Violation {
    pub(crate) rule: Rule,
    pub(crate) what: String,
}

/// What there was to judge: a log that shows nothing proves nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) operations: usize,
    pub(crate) grants: usize,
    /// Grants that the server made.
    pub(crate) server_grants: usize,
    /// Leases that their holders found lost.
    pub(crate) losses: usize,
    /// Leases that the server took away.
    pub(crate) displaced: usize,
    pub(crate) released: usize,
    pub(crate) release_lost: usize,
    pub(crate) refused: usize,
    pub(crate) failed: usize,
    /// From the last fault until the last waiter was in.
    pub(crate) recovery_ms: u64,
}

impl Tally {
    /// Adds another log's.
    pub(crate) fn add(&mut self, other: &Tally) {
        self.operations += other.operations;
        self.grants += other.grants;
        self.server_grants += other.server_grants;
        self.losses += other.losses;
        self.displaced += other.displaced;
        self.released += other.released;
        self.release_lost += other.release_lost;
        self.refused += other.refused;
        self.failed += other.failed;
        self.recovery_ms = self.recovery_ms.max(other.recovery_ms);
    }
}

/// Judges a whole log.
pub(crate) fn check(events: &[Event]) -> (Tally, Vec<Violation>) {
    let mut found = Found::default();
    let story = Story::of(events, &mut found);
    let server = Server::replay(events, &mut found);
    exclusion::check(&story, &mut found);
    fences::check(&story, &server, &mut found);
    verdicts::check(&story, &server, &mut found);
    let recovery = waiting::check(&story, &mut found);
    (story.tally(&server, recovery), found.0)
}

#[derive(Default)]
struct Found(Vec<Violation>);

impl Found {
    fn add(&mut self, rule: Rule, what: impl Into<String>) {
        self.0.push(Violation { rule, what: what.into() });
    }
}

/// How an attempt ended.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    Refused,
    Failed(Why, String),
    Released,
    ReleaseLost,
    ReleaseFailed(String),
}

/// What a holder said of its lease: when it looked, and for how long it was good then.
#[derive(Clone, Copy, Debug)]
struct Look {
    at: u64,
    left: u64,
}

struct Attempt {
    op: Op,
    lock: String,
    terms: Terms,
    invoked: u64,
    granted: Option<(Look, Grant)>,
    /// While it was held and good.
    looks: Vec<Look>,
    lost: Option<u64>,
    release: Option<Look>,
    outcome: Option<(u64, Outcome)>,
}

#[derive(Clone, Copy)]
struct Grant {
    fence: u64,
    position: u64,
}

/// A fault and whom it met.
struct Disturbance {
    process: Option<u32>,
    from: u64,
    to: u64,
}

/// The clients' side of a log, attempt by attempt.
struct Story {
    attempts: BTreeMap<Op, Attempt>,
    killed: HashMap<u32, u64>,
    disturbances: Vec<Disturbance>,
    losses: Vec<(u64, u64)>,
    /// Steps of the server's clock into the future.
    steps: Vec<(u64, u64)>,
    calm: Option<u64>,
    end: Option<u64>,
}

impl Story {
    fn of(events: &[Event], found: &mut Found) -> Story {
        let mut story = Story {
            attempts: BTreeMap::new(),
            killed: HashMap::new(),
            disturbances: Vec::new(),
            losses: Vec::new(),
            steps: Vec::new(),
            calm: None,
            end: None,
        };
        for event in events {
            story.take(event, found);
        }
        story
    }

    fn take(&mut self, event: &Event, found: &mut Found) {
        let at = event.at;
        let (op, what) = match &event.what {
            What::Invoke { op, lock, terms } => {
                let attempt = Attempt {
                    op: *op,
                    lock: lock.clone(),
                    terms: *terms,
                    invoked: at,
                    granted: None,
                    looks: Vec::new(),
                    lost: None,
                    release: None,
                    outcome: None,
                };
                if self.attempts.insert(*op, attempt).is_some() {
                    found.add(Rule::Log, format!("{op:?} began twice"));
                }
                return;
            }
            What::Killed { process } => {
                self.killed.insert(*process, at);
                return;
            }
            What::Fault { process, from, to, .. } => {
                self.disturbances.push(Disturbance { process: *process, from: *from, to: *to });
                return;
            }
            What::DataLost { from, to } => {
                self.losses.push((*from, *to));
                self.disturbances.push(Disturbance { process: None, from: *from, to: *to });
                return;
            }
            What::ClockMoved { by_us, from, to } => {
                if *by_us > 0 {
                    self.steps.push((*from, *to));
                }
                self.disturbances.push(Disturbance { process: None, from: *from, to: *to });
                return;
            }
            What::Calm => return self.calm = Some(at),
            What::End => return self.end = Some(at),
            What::Granted { op, .. }
            | What::Refused { op }
            | What::Failed { op, .. }
            | What::Holding { op, .. }
            | What::Lost { op }
            | What::ReleaseInvoke { op, .. }
            | What::Released { op }
            | What::ReleaseLost { op }
            | What::ReleaseFailed { op, .. } => (*op, &event.what),
            What::Call { .. }
            | What::Queued { .. }
            | What::Dequeued { .. }
            | What::Popped { .. }
            | What::Record { .. }
            | What::Flushed
            | What::Found { .. } => return,
        };
        let Some(attempt) = self.attempts.get_mut(&op) else {
            return found.add(Rule::Log, format!("{op:?} never began: {what:?}"));
        };
        if !attempt.take(at, what) {
            found.add(Rule::Log, format!("{op:?} cannot do that now: {what:?}"));
        }
    }

    /// Whether a fault that `process` could feel was there between `from` and `to`, or shortly before.
    fn is_disturbed(&self, process: u32, from: u64, to: u64) -> bool {
        self.disturbances.iter().any(|fault| {
            fault.process.is_none_or(|met| met == process) && fault.from <= to && fault.to + TRACES >= from
        })
    }

    /// Whether all data was lost at some time between `from` and `to`.
    fn is_forgotten(&self, from: u64, to: u64) -> bool {
        self.losses.iter().any(|loss| loss.0 <= to && loss.1 >= from)
    }

    /// The attempts that got the lock, with their grants.
    fn granted(&self) -> impl Iterator<Item = (&Attempt, Look, Grant)> {
        self.attempts.values().filter_map(|attempt| {
            let (look, grant) = attempt.granted?;
            Some((attempt, look, grant))
        })
    }

    fn tally(&self, server: &Server, recovery: u64) -> Tally {
        let mut tally = Tally {
            operations: self.attempts.len(),
            server_grants: server.grants(),
            displaced: server.displaced(),
            recovery_ms: recovery / MS,
            ..Tally::default()
        };
        for attempt in self.attempts.values() {
            tally.grants += usize::from(attempt.granted.is_some());
            tally.losses += usize::from(attempt.lost.is_some());
            match &attempt.outcome {
                Some((_, Outcome::Released)) => tally.released += 1,
                Some((_, Outcome::ReleaseLost)) => tally.release_lost += 1,
                Some((_, Outcome::Refused)) => tally.refused += 1,
                Some((_, Outcome::Failed(..) | Outcome::ReleaseFailed(_))) => tally.failed += 1,
                None => {}
            }
        }
        tally
    }
}

impl Attempt {
    /// Notes the next step of the attempt; false if it cannot come now.
    fn take(&mut self, at: u64, what: &What) -> bool {
        if self.outcome.is_some() || at < self.invoked {
            return false;
        }
        let holds = self.granted.is_some();
        let releasing = self.release.is_some();
        match what {
            What::Granted { fence, position, left_us, .. } if !holds => {
                let look = Look { at, left: left_us * 1000 };
                self.granted = Some((look, Grant { fence: *fence, position: *position }));
                self.look(look);
            }
            What::Holding { left_us, .. } if holds && !releasing => {
                self.look(Look { at, left: left_us * 1000 });
            }
            What::Lost { .. } if holds && !releasing => self.lost = self.lost.or(Some(at)),
            What::ReleaseInvoke { left_us, .. } if holds && !releasing => {
                let look = Look { at, left: left_us * 1000 };
                self.look(look);
                self.release = Some(look);
            }
            What::Refused { .. } if !holds => self.outcome = Some((at, Outcome::Refused)),
            What::Failed { why, text, .. } if !holds => {
                self.outcome = Some((at, Outcome::Failed(*why, text.clone())));
            }
            What::Released { .. } if releasing => self.outcome = Some((at, Outcome::Released)),
            What::ReleaseLost { .. } if releasing => self.outcome = Some((at, Outcome::ReleaseLost)),
            What::ReleaseFailed { text, .. } if releasing => {
                self.outcome = Some((at, Outcome::ReleaseFailed(text.clone())));
            }
            _ => return false,
        }
        true
    }

    fn look(&mut self, look: Look) {
        if look.left > 0 {
            self.looks.push(look);
        }
    }

    /// From when to when the holder took the lock for its own.
    fn belief(&self) -> Option<(u64, u64)> {
        let (first, last) = (self.looks.first()?, self.looks.last()?);
        let by_clock = last.at + last.left;
        let told = [self.release.map(|look| look.at), self.lost].into_iter().flatten();
        let end = told.min().map_or(by_clock, |told| told.min(by_clock));
        (first.at < end).then_some((first.at, end))
    }
}
