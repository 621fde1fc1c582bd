//! `run_once`: take the lock, do the job unless it is done, remember its result, in one call.

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::claim::{Claim, Failure};
use super::jobs::{Begin, Idempotency, Terms, fingerprint};
use super::key::IdempotencyKey;
use super::memo::Memo;
use crate::clock;
use crate::error::Error;
use crate::fifo_lock::FifoLock;

/// How [`FifoLock::run_once`] does a job.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use redis_fifo_lock::idempotency::{Conflict, Failure, RunOnce};
///
/// let options = RunOnce::new()
///     .result_ttl(Duration::from_secs(7 * 24 * 3600))
///     .max_attempts(5)
///     .on_conflict(Conflict::Skip)
///     .on_error(Failure::Final);
/// ```
#[must_use = "options do nothing until they are passed on"]
#[derive(Clone, Debug, Default)]
pub struct RunOnce {
    terms: Terms,
    conflict: Conflict,
    failure: Option<Failure>,
    /// The fingerprint of the payload, or empty.
    print: String,
}

/// What to do while somebody else holds the lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Conflict {
    /// Waits its turn, in order of arrival.
    #[default]
    Wait,
    /// Waits its turn for so long; then the call gives [`Error::Timeout`].
    WaitFor(Duration),
    /// Does not wait: the call gives [`Outcome::Skipped`].
    Skip,
    /// Does not wait: the call gives [`Error::InProgress`].
    Fail,
}

impl RunOnce {
    /// Options with their defaults.
    pub fn new() -> RunOnce {
        RunOnce::default()
    }

    /// Sets how long the end of the job is remembered, with its result. Defaults to 24 h; 1 ms to 10 years are allowed.
    pub fn result_ttl(mut self, ttl: Duration) -> RunOnce {
        self.terms.result_ttl = ttl;
        self
    }

    /// Sets how often the job may be begun, so that one that kills its workers stops. Defaults to any number of times.
    pub fn max_attempts(mut self, attempts: u64) -> RunOnce {
        self.terms.max_attempts = Some(attempts);
        self
    }

    /// Sets what to do while somebody else holds the lock. Defaults to waiting.
    pub fn on_conflict(mut self, conflict: Conflict) -> RunOnce {
        self.conflict = conflict;
        self
    }

    /// Sets what an error of the job means. Defaults to [`Failure::Retryable`].
    pub fn on_error(mut self, failure: Failure) -> RunOnce {
        self.failure = Some(failure);
        self
    }

    /// Has the job refused if its key was used for another payload; for keys that do not stand for all of it.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if the payload has no canonical form.
    pub fn payload(mut self, payload: &(impl Serialize + ?Sized)) -> Result<RunOnce, Error> {
        self.print = fingerprint(payload)?;
        Ok(self)
    }
}

/// What came of [`FifoLock::run_once`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome<T> {
    /// This call did the job; the result is remembered.
    Ran(T),
    /// The job was done before, with this result.
    Done(T),
    /// The job was done before, and left no result.
    NoMemo,
    /// The job failed for good before.
    Failed(Memo),
    /// Somebody else holds the lock, and the call was not to wait.
    Skipped {
        /// The client that does, if it is known: `host-pid-random`.
        owner: Option<Box<str>>,
        /// Whether it works on this very job, rather than on another one of the lock.
        same_job: bool,
    },
    /// The job was begun as often as it may be, and never ended well.
    Exhausted {
        /// How often it was begun.
        attempts: u64,
    },
}

impl<T> Outcome<T> {
    /// The result of the job, whoever did it.
    #[must_use]
    pub fn result(self) -> Option<T> {
        match self {
            Outcome::Ran(result) | Outcome::Done(result) => Some(result),
            _ => None,
        }
    }
}

/// Why [`FifoLock::run_once`] has no outcome.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum RunError<E> {
    /// The job's own error. It was recorded as `on_error` says.
    Job(E),
    /// The job did not run.
    Lock(Error),
    /// The job ran, and how it ended could not be recorded: it may be done again. [`Error::LeaseLost`] means that
    /// somebody else was granted the lock meanwhile.
    NotRecorded(Error),
}

impl<E> From<Error> for RunError<E> {
    fn from(error: Error) -> RunError<E> {
        RunError::Lock(error)
    }
}

impl<E: fmt::Display> fmt::Display for RunError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunError::Job(error) => write!(f, "the job failed: {error}"),
            RunError::Lock(error) => write!(f, "the job did not run: {error}"),
            RunError::NotRecorded(error) => write!(f, "the job ran, and its end was not recorded: {error}"),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for RunError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            RunError::Job(error) => Some(error),
            RunError::Lock(error) | RunError::NotRecorded(error) => Some(error),
        }
    }
}

impl FifoLock {
    /// Does a job once: takes the lock, runs `job` unless it is done, and remembers its result.
    ///
    /// | the job | what happens |
    /// |---|---|
    /// | is done, or failed for good | its memo comes back; the lock is not even taken |
    /// | is not begun, orphaned, or to be tried again | `job` runs under the lock, with the lease renewed |
    /// | gives `Ok` | the result is remembered as its memo, in the same step that checks the fence |
    /// | gives `Err` | it may be tried again, or not: see [`RunOnce::on_error`]; the error's text is the memo |
    /// | panics, is killed, stalls for longer than the lease | it is reclaimed by the next call; never *done* |
    ///
    /// Jobs of one lock run one at a time, whatever their keys. Give each kind of work, or each job, a lock of its own if
    /// they can run side by side; a lock costs one key while it is used. See [`Idempotency`] for why there is no gap
    /// between the lock and the job's record.
    ///
    /// `job` gets the [`Claim`], for its fence and to see whether the lease was lost. It runs on the calling thread, of
    /// whatever pool. If it calls `run_once` or `lock` of the same lock on this thread, it gets
    /// [`Error::WouldDeadlock`].
    ///
    /// # Errors
    ///
    /// [`RunError::Job`] with the job's own error; [`RunError::Lock`] if the job did not run, with an error of
    /// [`lock`](FifoLock::lock), [`Error::InProgress`], [`Error::Timeout`] or [`Error::PayloadMismatch`], or with
    /// [`Error::Protocol`] if the memo is no `T`; [`RunError::NotRecorded`] if it ran, and its end could not be recorded.
    ///
    /// # Examples
    ///
    /// ```
    /// use redis_fifo_lock::LockClient;
    /// use redis_fifo_lock::idempotency::{IdempotencyKey, Outcome, RunOnce};
    ///
    /// # let locks = LockClient::memory();
    /// let lock = locks.fifo_lock("invoices")?;
    /// let key = IdempotencyKey::new("invoice", &serde_json::json!({"customer": 7, "month": "2026-11"}))?;
    /// let deliver = || {
    ///     lock.run_once(&key, &RunOnce::new(), |claim| {
    ///         println!("working, fence {}", claim.fence());
    ///         Ok::<u64, std::io::Error>(117)
    ///     })
    /// };
    /// assert_eq!(deliver().unwrap(), Outcome::Ran(117));
    /// assert_eq!(deliver().unwrap(), Outcome::Done(117)); // delivered again, not done again
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn run_once<T, E>(
        &self,
        key: &IdempotencyKey,
        options: &RunOnce,
        job: impl FnOnce(&Claim) -> Result<T, E>,
    ) -> Result<Outcome<T>, RunError<E>>
    where
        T: Serialize + DeserializeOwned,
        E: fmt::Display,
    {
        let jobs = Idempotency::of_lock(self, options.terms.checked()?);
        let wait = match options.conflict {
            Conflict::Wait => Some(clock::Moment::NEVER),
            Conflict::WaitFor(time) => Some(clock::now().after(time)),
            Conflict::Skip | Conflict::Fail => None,
        };
        let refused = |owner: Option<Box<str>>, same_job| match options.conflict {
            Conflict::Fail => {
                let owner = owner.unwrap_or_else(|| "nobody yet".into());
                Err(RunError::Lock(Error::InProgress { key: key.as_str().into(), owner }))
            }
            _ => Ok(Outcome::Skipped { owner, same_job }),
        };
        let claim = match jobs.start(key, &options.print, wait, true)? {
            Begin::Begun(claim) | Begin::Reclaimed(claim) => claim,
            Begin::Done(memo) => return Ok(memo.get()?.map_or(Outcome::NoMemo, Outcome::Done)),
            Begin::Failed(memo) => return Ok(Outcome::Failed(memo)),
            Begin::InProgress { owner, .. } => return refused(Some(owner), true),
            Begin::Busy { owner } => return refused(owner, false),
            Begin::Exhausted { attempts } => return Ok(Outcome::Exhausted { attempts }),
        };
        // A panic drops the claim, which releases the lock and records nothing.
        match job(&claim) {
            Ok(result) => {
                claim.complete(&result).map_err(RunError::NotRecorded)?;
                Ok(Outcome::Ran(result))
            }
            Err(error) => {
                let failure = options.failure.unwrap_or(Failure::Retryable);
                match claim.fail(failure, &error.to_string()) {
                    // Unrecorded it can be tried again just the same, so the job's own error is the better news.
                    Err(_) if failure == Failure::Retryable => Err(RunError::Job(error)),
                    Err(unrecorded) => Err(RunError::NotRecorded(unrecorded)),
                    Ok(()) => Err(RunError::Job(error)),
                }
            }
        }
    }
}
