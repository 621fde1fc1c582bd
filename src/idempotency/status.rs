//! What is known of a job.

use std::time::Duration;

use super::memo::Memo;
use crate::error::Error;
use crate::fence::Fence;
use crate::protocol::job::{Shown, Stage};

/// How far a job is, by [`Idempotency::status`](super::Idempotency::status). Old news as soon as it is read, save
/// for `Done` and `Failed`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum JobStatus {
    /// Nothing is remembered of it.
    Unknown,
    /// Its owner holds the lock.
    InProgress {
        /// The client that works on it: `host-pid-random`.
        owner: Box<str>,
        /// How long ago this attempt began.
        age: Duration,
        /// Which attempt this is, from 1.
        attempt: u64,
        /// The fence under which it was begun.
        fence: Fence,
    },
    /// It was begun by somebody who does not hold the lock any more: the next to begin it reclaims it.
    Orphaned {
        /// The client that began it.
        owner: Box<str>,
        /// How long ago that was.
        age: Duration,
        /// Which attempt that was.
        attempt: u64,
    },
    /// It failed, and may be tried again.
    Retryable {
        /// How often it was tried.
        attempt: u64,
        /// What was left the last time.
        memo: Memo,
    },
    /// It is done.
    Done {
        /// How often it was begun.
        attempt: u64,
        /// What was left.
        memo: Memo,
    },
    /// It failed for good.
    Failed {
        /// How often it was begun.
        attempt: u64,
        /// What was left.
        memo: Memo,
    },
}

impl JobStatus {
    pub(super) fn new(shown: Shown) -> Result<JobStatus, Error> {
        let Some(job) = shown.job else { return Ok(JobStatus::Unknown) };
        let Some(fence) = Fence::new(job.fence) else {
            return Err(Error::Protocol(format!("{} is not a fence", job.fence)));
        };
        let (attempt, owner, age) = (job.attempt, job.owner, Duration::from_millis(shown.age_ms));
        let memo = Memo::new(job.memo);
        Ok(match job.stage {
            Stage::Pending if shown.live => JobStatus::InProgress { owner, age, attempt, fence },
            Stage::Pending => JobStatus::Orphaned { owner, age, attempt },
            Stage::Retry => JobStatus::Retryable { attempt, memo },
            Stage::Done => JobStatus::Done { attempt, memo },
            Stage::Failed => JobStatus::Failed { attempt, memo },
        })
    }

    /// Whether it is done or failed for good, so that nothing will change any more.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(self, JobStatus::Done { .. } | JobStatus::Failed { .. })
    }
}

/// The result of a job, by [`Idempotency::get_result`](super::Idempotency::get_result).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum JobResult<T> {
    /// It is not done: not begun, in progress, orphaned or to be tried again.
    NotDone,
    /// It is done, with this result.
    Done(T),
    /// It is done, and no memo was left.
    NoMemo,
    /// It failed for good.
    Failed(Memo),
}
