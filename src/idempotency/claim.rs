//! `Claim`: a job in the hands of the one worker that may do it.

use std::fmt;
use std::thread;
use std::time::Duration;

use crossbeam_channel::Receiver;
use log::{debug, error};
use serde::Serialize;

use super::jobs::Terms;
use super::memo::Memo;
use crate::backoff::Backoff;
use crate::clock;
use crate::error::Error;
use crate::fence::Fence;
use crate::holding::Held;
use crate::protocol::job::{Call, Reply, Stage};
use crate::settings::millis;

/// The longest pause between attempts to record an end.
const RETRY: Duration = Duration::from_millis(200);

/// A job that this worker, and nobody else, works on.
///
/// It stands on a lease of the lock, which is renewed as long as the claim lives: that is the job's heartbeat. End it with
/// [`complete`](Claim::complete) or [`fail`](Claim::fail), which record the end and release the lock. Dropping it, in a
/// panic for example, releases the lock and records nothing: the job can be reclaimed at once, and this attempt counts.
/// The drop blocks for at most the lock's `release_bound`. A claim that goes through [`std::mem::forget`] is renewed
/// until `max_hold`.
///
/// As with any lease, a process that is frozen for longer than the lease finds the job reclaimed by somebody else when it
/// wakes. Then `complete` and `fail` are refused, and so is every write that goes through a
/// [gate](crate::FifoLock::gate) of the lock with this [`fence`](Claim::fence); other side effects happen twice.
///
/// # Examples
///
/// See [`Idempotency`](super::Idempotency).
#[must_use = "the job is given up as soon as the claim is dropped"]
pub struct Claim {
    held: Held,
    /// The job's key.
    key: Box<str>,
    /// The key of its record.
    record: Box<str>,
    /// The fingerprint of the payload, or empty.
    print: Box<str>,
    terms: Terms,
    /// Which attempt this is; 0 before it was begun.
    attempt: u64,
}

/// Whether a job that failed may be tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Failure {
    /// It may: the next to begin it gets it.
    Retryable,
    /// It may not: whoever begins it later is told so, with the memo.
    Final,
}

impl Claim {
    /// A claim that has to be [begun](Claim::begin). From here on the lease is released on every way out.
    pub(super) fn new(held: Held, key: &str, record: Box<str>, print: &str, terms: Terms) -> Claim {
        Claim { held, key: key.into(), record, print: print.into(), terms, attempt: 0 }
    }

    /// Begins the job under the lease. The call may be repeated: the same grant gets the same answer.
    pub(super) fn begin(&mut self) -> Result<Reply, Error> {
        let holding = &self.held.holding;
        let reply = self.call(&Call::Begin {
            ticket: holding.ticket.clone(),
            fence: holding.fence.get(),
            print: self.print.clone(),
            most: self.terms.max_attempts,
            // A claim can be renewed for so long; the record of a live one must not go before.
            keep_ms: millis(holding.settings.max_hold + holding.settings.lease)
                + millis(self.terms.result_ttl),
        })?;
        if let Reply::Begun { attempt, .. } = reply {
            self.attempt = attempt;
        }
        Ok(reply)
    }

    /// The job's key.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The lock's name.
    #[must_use]
    pub fn lock_name(&self) -> &str {
        &self.held.holding.room.keys.name
    }

    /// Which attempt at the job this is, from 1.
    #[must_use]
    pub fn attempt(&self) -> u64 {
        self.attempt
    }

    /// The fence under which the job was begun: larger than that of every attempt before it.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.held.holding.fence
    }

    /// Whether the lease was lost; see [`LockGuard::is_lost`](crate::LockGuard::is_lost).
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.held.holding.is_lost()
    }

    /// Gives an error if the lease was lost.
    ///
    /// # Errors
    ///
    /// [`Error::LeaseLost`] if it was.
    pub fn ensure_held(&self) -> Result<(), Error> {
        self.held.ensure_held()
    }

    /// How long the lease is good unless renewed, by the local clock; zero if it was lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.held.remaining()
    }

    /// A channel that gets one message when the lease is lost; see
    /// [`LockGuard::on_lost`](crate::LockGuard::on_lost).
    #[must_use]
    pub fn on_lost(&self) -> Receiver<()> {
        self.held.holding.on_lost()
    }

    /// Records that the job is done, with `result` as its memo, and releases the lock.
    ///
    /// # Errors
    ///
    /// [`Error::LeaseLost`] if somebody else was granted the lock since: nothing was recorded, and whatever the job did
    /// may be done again. [`Error::Config`] if `result` does not serialise; the job can be reclaimed.
    /// [`Error::Redis`] and others if the server does not answer within `release_bound`; it may have been recorded.
    pub fn complete(self, result: &(impl Serialize + ?Sized)) -> Result<(), Error> {
        let memo = Memo::of(result)?;
        self.end(Stage::Done, memo)
    }

    /// Records that the job is done, without a memo, and releases the lock.
    ///
    /// # Errors
    ///
    /// As [`complete`](Claim::complete).
    pub fn complete_without_memo(self) -> Result<(), Error> {
        self.end(Stage::Done, Memo::new(None))
    }

    /// Records that this attempt failed, with a memo, and releases the lock.
    ///
    /// # Errors
    ///
    /// As [`complete`](Claim::complete).
    pub fn fail(self, failure: Failure, memo: &(impl Serialize + ?Sized)) -> Result<(), Error> {
        let memo = Memo::of(memo)?;
        let stage = match failure {
            Failure::Retryable => Stage::Retry,
            Failure::Final => Stage::Failed,
        };
        self.end(stage, memo)
    }

    fn end(mut self, stage: Stage, memo: Memo) -> Result<(), Error> {
        let result = self.finish(stage, memo);
        // What counts is recorded; a release that failed costs the next in line a lease, and is in the log.
        if let Err(error) = self.held.end() {
            debug!("`{}` was not released after {}: {error}", self.lock_name(), self.key);
        }
        result
    }

    /// Records an end, trying until the release bound: the same call again is answered the same.
    fn finish(&self, stage: Stage, memo: Memo) -> Result<(), Error> {
        let holding = &self.held.holding;
        let call = Call::Finish {
            ticket: holding.ticket.clone(),
            fence: holding.fence.get(),
            attempt: self.attempt,
            print: self.print.clone(),
            stage,
            memo: memo.into_json(),
            keep_ms: millis(self.terms.result_ttl),
        };
        match self.call(&call)? {
            Reply::Recorded => Ok(()),
            Reply::Lost => Err(holding.lost_error()),
            other => Err(Error::Protocol(format!("the end of a job was answered with {other:?}"))),
        }
    }

    /// Sends a call until it is answered or the release bound is reached.
    fn call(&self, call: &Call) -> Result<Reply, Error> {
        let holding = &self.held.holding;
        let (room, settings) = (&holding.room, &holding.settings);
        let deadline = clock::now().after(settings.release_bound);
        let mut backoff = Backoff::new(RETRY);
        loop {
            match room.shared.engine.job(&room.keys, &self.record, call, deadline) {
                Ok(reply) => return Ok(reply),
                Err(failure) => {
                    let pause = backoff.pause();
                    if !failure.retry || clock::now().after(pause) >= deadline {
                        return Err(failure.error);
                    }
                    thread::park_timeout(pause);
                }
            }
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Ended before, or never begun: this only gives the lease back.
        if let Err(error) = self.held.end() {
            error!("`{}` was not released by the claim on {}: {error}", self.lock_name(), self.key);
        }
    }
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claim")
            .field("key", &self.key)
            .field("attempt", &self.attempt)
            .field("fence", &self.fence())
            .field("lost", &self.held.holding.was_lost())
            .finish_non_exhaustive()
    }
}
