//! The record of one job: `apply(job, record, now, call)` gives the reply and moves the record.
//!
//! Each call is one script in `scripts/` with the same order of decisions: `begin.lua`, `finish.lua`, `show.lua`,
//! `clear.lua`.
//!
//! A job is pending *by a fence*: that of the grant under which it was begun. It is alive exactly as long as that
//! grant is the lock's, so there is no second lease to keep and no second heartbeat to miss; and as only the holder of
//! the lock can begin it, whoever finds it pending by another fence than his own finds it orphaned.
//!
//! | record | `begin` by the holder | `finish` by the holder |
//! |---|---|---|
//! | none | pending, attempt 1 | ended: only the holder can have begun it |
//! | pending by this fence | the same again: the reply was lost | ended |
//! | pending by another fence | pending by this one, next attempt: *reclaimed* | lost |
//! | to be tried again | pending by this fence, next attempt | the same again if by this fence, else lost |
//! | done, failed | says so, with the memo | the same again if by this fence, else lost |
//!
//! By anybody who is not the holder (any more), `begin` and `finish` are answered `lost`; only a repeated `finish` whose
//! first try was recorded is answered as that was. A change from anything but *none* keeps count of the attempts.

use super::{Record, TicketId};

/// How far a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Begun under a grant, and not ended.
    Pending,
    /// Failed, to be tried again.
    Retry,
    /// Done.
    Done,
    /// Failed for good.
    Failed,
}

impl Stage {
    /// The word that stands in the record.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Stage::Pending => "pending",
            Stage::Retry => "retry",
            Stage::Done => "done",
            Stage::Failed => "failed",
        }
    }
}

/// The record of a job, a hash on the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// How far it is.
    pub stage: Stage,
    /// How often it was begun.
    pub attempt: u64,
    /// The fence under which it was begun last.
    pub fence: u64,
    /// The client that began it last.
    pub owner: Box<str>,
    /// When that was, server time in microseconds.
    pub begun_us: u64,
    /// The fingerprint of the payload; empty if none was given.
    pub print: Box<str>,
    /// Whether the last attempt took it over from an owner that was gone.
    pub reclaimed: bool,
    /// What was left by whoever ended it, JSON.
    pub memo: Option<Box<str>>,
    /// When the record expires, server time in microseconds.
    pub expires: u64,
}

/// One call about a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// Begins the job as the holder of the lock.
    Begin {
        /// The holder.
        ticket: TicketId,
        /// The fence of its grant.
        fence: u64,
        /// The fingerprint of the payload, or empty.
        print: Box<str>,
        /// How often the job may be begun, if that is limited.
        most: Option<u64>,
        /// How long the record is kept, milliseconds: longer than any grant can last.
        keep_ms: u64,
    },
    /// Ends the attempt.
    Finish {
        /// The holder.
        ticket: TicketId,
        /// The fence of its grant.
        fence: u64,
        /// The attempt.
        attempt: u64,
        /// The fingerprint of the payload, or empty.
        print: Box<str>,
        /// How it ended: anything but pending.
        stage: Stage,
        /// What to remember, JSON.
        memo: Option<Box<str>>,
        /// How long that is remembered, milliseconds.
        keep_ms: u64,
    },
    /// Shows the record.
    Show,
    /// Deletes the record unless somebody works on the job.
    Clear,
}

/// The answer to a [`Call`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// `begin`: the job is the caller's.
    Begun {
        /// Which attempt this is, from 1.
        attempt: u64,
        /// Whether the one before was left by an owner that is gone.
        reclaimed: bool,
    },
    /// `begin`: the job is done.
    Done(Option<Box<str>>),
    /// `begin`: the job failed for good.
    Failed(Option<Box<str>>),
    /// `begin`: the job was begun as often as it may be.
    Exhausted(u64),
    /// `begin`: the key was used for another payload.
    OtherPayload,
    /// `begin`, `finish`: the caller does not hold the lock any more, or the job is somebody else's.
    Lost,
    /// `finish`: recorded.
    Recorded,
    /// `show`.
    Shown(Shown),
    /// `clear`: whether there was a record.
    Cleared(bool),
    /// `clear`: somebody works on the job.
    Busy,
}

/// What `show` answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    /// The record, its `begun_us` and `expires` aside.
    pub job: Option<Job>,
    /// Whether it is pending and its owner holds the lock.
    pub live: bool,
    /// Milliseconds since it was begun last.
    pub age_ms: u64,
    /// The client that holds the lock.
    pub holder: Option<Box<str>>,
}

/// Runs one call. `record` is that of the lock.
pub fn apply(slot: &mut Option<Job>, record: Option<&Record>, now_us: u64, call: &Call) -> Reply {
    if slot.as_ref().is_some_and(|job| job.expires <= now_us) {
        *slot = None;
    }
    let holds = |ticket: &TicketId, fence: u64| {
        record.is_some_and(|record| record.holder.as_ref() == Some(ticket) && record.fence == fence)
    };
    let holder = record.filter(|record| record.until > now_us).and_then(|record| record.holder.as_ref());
    let is_live = |job: &Job| {
        job.stage == Stage::Pending
            && holder.is_some()
            && record.is_some_and(|record| record.fence == job.fence)
    };
    match call {
        Call::Begin { ticket, fence, print, most, keep_ms } => {
            if !holds(ticket, *fence) {
                return Reply::Lost;
            }
            let (mut attempt, mut reclaimed, mut print) = (0, false, print.clone());
            if let Some(job) = slot {
                if !print.is_empty() && !job.print.is_empty() && print != job.print {
                    return Reply::OtherPayload;
                }
                match job.stage {
                    Stage::Done => return Reply::Done(job.memo.clone()),
                    Stage::Failed => return Reply::Failed(job.memo.clone()),
                    Stage::Pending if job.fence == *fence => {
                        return Reply::Begun { attempt: job.attempt, reclaimed: job.reclaimed };
                    }
                    Stage::Pending => reclaimed = true,
                    Stage::Retry => {}
                }
                attempt = job.attempt;
                if print.is_empty() {
                    print = job.print.clone();
                }
            }
            if most.is_some_and(|most| attempt >= most) {
                return Reply::Exhausted(attempt);
            }
            *slot = Some(Job {
                stage: Stage::Pending,
                attempt: attempt + 1,
                fence: *fence,
                owner: ticket.client().into(),
                begun_us: now_us,
                print,
                reclaimed,
                memo: None,
                expires: now_us + keep_ms * 1000,
            });
            Reply::Begun { attempt: attempt + 1, reclaimed }
        }
        Call::Finish { ticket, fence, attempt, print, stage, memo, keep_ms } => {
            let mine = |job: &Job| job.fence == *fence && job.attempt == *attempt;
            if slot.as_ref().is_some_and(|job| job.stage == *stage && mine(job)) {
                return Reply::Recorded;
            }
            if !holds(ticket, *fence) {
                return Reply::Lost;
            }
            if slot.as_ref().is_some_and(|job| job.stage != Stage::Pending || !mine(job)) {
                return Reply::Lost;
            }
            let old = slot.take();
            *slot = Some(Job {
                stage: *stage,
                attempt: *attempt,
                fence: *fence,
                owner: ticket.client().into(),
                begun_us: old.as_ref().map_or(now_us, |job| job.begun_us),
                print: old.as_ref().map_or_else(|| print.clone(), |job| job.print.clone()),
                reclaimed: old.is_some_and(|job| job.reclaimed),
                memo: memo.clone(),
                expires: now_us + keep_ms * 1000,
            });
            Reply::Recorded
        }
        Call::Show => Reply::Shown(Shown {
            live: slot.as_ref().is_some_and(is_live),
            age_ms: slot.as_ref().map_or(0, |job| now_us.saturating_sub(job.begun_us) / 1000),
            job: slot.clone(),
            holder: holder.map(|ticket| ticket.client().into()),
        }),
        Call::Clear => match slot {
            Some(job) if is_live(job) => Reply::Busy,
            _ => Reply::Cleared(slot.take().is_some()),
        },
    }
}
