//! `Idempotency`: jobs that are done once, however often they are delivered.

use std::fmt;
use std::thread;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use super::canonical::canonicalize;
use super::claim::Claim;
use super::key::{IdempotencyKey, hexadecimal};
use super::memo::Memo;
use super::status::{JobResult, JobStatus};
use crate::backoff::Backoff;
use crate::client::LockClient;
use crate::clock::{self, Moment};
use crate::error::Error;
use crate::fifo_lock::FifoLock;
use crate::keys;
use crate::protocol::job::{Call, Reply, Shown, Stage};
use crate::settings::{LONGEST, SHORTEST, within};

/// How long the lock of a single job is remembered when nobody uses it: a fence needs no memory to ascend.
const LOCK_IDLE: Duration = Duration::from_secs(60);
/// The longest pause between two looks at a job that is waited for.
const LOOK: Duration = Duration::from_millis(200);

/// Jobs that are done once, however often they are delivered.
///
/// [`begin`](Idempotency::begin) says what is to be done: the job is the caller's ([`Begin::Begun`],
/// [`Begin::Reclaimed`]), or it is done already and this is the memo, or somebody works on it.
///
/// Whoever works on a job holds a lock, and the job is *pending by the fence* of that grant. So there is one lease, renewed
/// in the background, and one truth: a job is in progress exactly as long as its owner's grant is the lock's. A worker
/// that was killed is replaced when its lease has run out; one that runs is not, however long it takes (up to
/// `max_hold`); the time for which results are remembered has nothing to do with it.
///
/// # Two kinds
///
/// | made by | the lock |
/// |---|---|
/// | [`LockClient::idempotency`] | each job has one of its own: jobs run side by side |
/// | [`FifoLock::idempotency`] | this one: its jobs run one at a time. [`FifoLock::run_once`] does it all in one call |
///
/// The two, and two locks, know nothing of each other's jobs.
///
/// # There is no gap to stall in
///
/// First the lock is taken, then the job is begun by a script that looks at the lock's record in the same step: it begins
/// the job only if the caller's grant is the lock's at that moment, and then the job is pending by that fence. A caller
/// that stalls between the two has recorded nothing; if it wakes after its lease it is refused, and starts over. A
/// caller that stalls afterwards is pending by a fence that is not the lock's any more once somebody else is granted, and
/// exactly then his `begin` reclaims the job. As the lock has one holder, there is one who can. The same script that
/// records an end looks at the lock's record, the fence and the attempt, so a worker that was replaced cannot end the job
/// of its successor.
///
/// # Examples
///
/// ```
/// use redis_fifo_lock::LockClient;
/// use redis_fifo_lock::idempotency::{Begin, IdempotencyKey};
///
/// # let locks = LockClient::memory();
/// let jobs = locks.idempotency().build()?;
/// let key = IdempotencyKey::new("invoice", &serde_json::json!({"customer": 7, "month": "2026-11"}))?;
/// let total: u64 = match jobs.begin(&key)? {
///     Begin::Begun(claim) | Begin::Reclaimed(claim) => {
///         let total = 117; // ... the work ...
///         claim.complete(&total)?;
///         total
///     }
///     Begin::Done(memo) => memo.get()?.expect("every version of this job leaves a memo"),
///     other => panic!("not now: {other:?}"),
/// };
/// assert_eq!(total, 117);
/// # Ok::<(), redis_fifo_lock::Error>(())
/// ```
#[derive(Clone)]
pub struct Idempotency {
    place: Place,
    terms: Terms,
}

/// Which lock is a job's.
#[derive(Clone)]
enum Place {
    /// One for each job.
    Own { client: LockClient, lease: Duration, max_hold: Duration },
    /// This one.
    Lock(FifoLock),
}

/// What is agreed on all jobs of a handle.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// How long an end is remembered.
    pub(super) result_ttl: Duration,
    /// How often a job may be begun.
    pub(super) max_attempts: Option<u64>,
}

impl Default for Terms {
    fn default() -> Terms {
        Terms { result_ttl: Duration::from_secs(24 * 3600), max_attempts: None }
    }
}

impl Terms {
    pub(super) fn checked(self) -> Result<Terms, Error> {
        within("result_ttl", self.result_ttl, SHORTEST, LONGEST)?;
        if self.max_attempts == Some(0) {
            return Err(Error::Config("max_attempts is 0: at least 1 is allowed".into()));
        }
        Ok(self)
    }
}

/// What [`Idempotency::begin`] says.
#[derive(Debug)]
#[non_exhaustive]
pub enum Begin {
    /// The job is yours. It was not begun before, or the last attempt failed in order.
    Begun(Claim),
    /// The job is yours. The worker that began it before is gone: it was killed, stalled for longer than its lease, or
    /// panicked, and may have done a part of the work.
    Reclaimed(Claim),
    /// The job is done.
    Done(Memo),
    /// The job failed for good.
    Failed(Memo),
    /// Somebody works on the job.
    InProgress {
        /// The client that does: `host-pid-random`.
        owner: Box<str>,
        /// For how long it has.
        age: Duration,
    },
    /// The lock is held, or others wait for it, and this job is not in progress: its turn has not come.
    Busy {
        /// The client that holds the lock, if somebody does.
        owner: Option<Box<str>>,
    },
    /// The job was begun as often as it may be, and never ended well.
    Exhausted {
        /// How often it was begun.
        attempts: u64,
    },
}

/// The lock and the record of one job.
pub(super) struct Spot {
    lock: FifoLock,
    key: Box<str>,
    record: Box<str>,
}

impl LockClient {
    /// Starts building a handle on jobs that have a lock each; see [`Idempotency`].
    ///
    /// # Examples
    ///
    /// ```
    /// # let locks = redis_fifo_lock::LockClient::memory();
    /// use std::time::Duration;
    ///
    /// let jobs = locks
    ///     .idempotency()
    ///     .lease(Duration::from_secs(30))
    ///     .result_ttl(Duration::from_secs(7 * 24 * 3600))
    ///     .max_attempts(5)
    ///     .build()?;
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn idempotency(&self) -> IdempotencyBuilder {
        IdempotencyBuilder {
            client: Some(self.clone()),
            lock: None,
            terms: Terms::default(),
            lease: None,
            max_hold: None,
        }
    }
}

impl FifoLock {
    /// Starts building a handle on the jobs of this lock; see [`Idempotency`].
    ///
    /// # Examples
    ///
    /// ```
    /// # let lock = redis_fifo_lock::LockClient::memory().fifo_lock("invoices")?;
    /// let jobs = lock.idempotency().max_attempts(5).build()?;
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn idempotency(&self) -> IdempotencyBuilder {
        IdempotencyBuilder {
            client: None,
            lock: Some(self.clone()),
            terms: Terms::default(),
            lease: None,
            max_hold: None,
        }
    }
}

impl Idempotency {
    pub(super) fn of_lock(lock: &FifoLock, terms: Terms) -> Idempotency {
        Idempotency { place: Place::Lock(lock.clone()), terms }
    }

    /// Begins the job unless it is done or somebody works on it. Does not wait.
    ///
    /// # Errors
    ///
    /// As [`FifoLock::try_lock`]; [`Error::Config`] if the key is too long for the name of a lock.
    pub fn begin(&self, key: &IdempotencyKey) -> Result<Begin, Error> {
        self.start(key, "", None, false)
    }

    /// Begins the job as [`begin`](Idempotency::begin) does, for keys that do not stand for the whole payload, such as the
    /// id that a caller gave his request.
    ///
    /// # Errors
    ///
    /// [`Error::PayloadMismatch`] if the key was used for another payload; [`Error::Config`] if the payload has no
    /// canonical form. Else as [`begin`](Idempotency::begin).
    ///
    /// # Examples
    ///
    /// ```
    /// use redis_fifo_lock::idempotency::IdempotencyKey;
    /// use redis_fifo_lock::{Error, LockClient};
    /// use serde_json::json;
    ///
    /// let jobs = LockClient::memory().idempotency().build()?;
    /// let key = IdempotencyKey::new("transfer", &json!({"request": "c0ffee"}))?;
    /// let first = jobs.begin_for(&key, &json!({"amount": 100}))?;
    /// drop(first);
    /// assert!(matches!(jobs.begin_for(&key, &json!({"amount": 999})), Err(Error::PayloadMismatch { .. })));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn begin_for(
        &self,
        key: &IdempotencyKey,
        payload: &(impl Serialize + ?Sized),
    ) -> Result<Begin, Error> {
        self.start(key, &fingerprint(payload)?, None, false)
    }

    /// What is known of the job.
    ///
    /// # Errors
    ///
    /// [`Error::Redis`], [`Error::Pool`] if the server cannot be reached, [`Error::Protocol`] if a key holds something
    /// foreign.
    pub fn status(&self, key: &IdempotencyKey) -> Result<JobStatus, Error> {
        JobStatus::new(self.spot(key)?.show()?)
    }

    /// The result that the job left. That it left none is a case of its own.
    ///
    /// # Errors
    ///
    /// As [`status`](Idempotency::status); [`Error::Protocol`] if the memo is no `T`.
    ///
    /// # Examples
    ///
    /// ```
    /// use redis_fifo_lock::LockClient;
    /// use redis_fifo_lock::idempotency::{Begin, IdempotencyKey, JobResult};
    ///
    /// let jobs = LockClient::memory().idempotency().build()?;
    /// let key = IdempotencyKey::new("mail", &serde_json::json!({"to": 7}))?;
    /// assert_eq!(jobs.get_result::<u32>(&key)?, JobResult::NotDone);
    /// let Begin::Begun(claim) = jobs.begin(&key)? else { panic!("nobody did it before") };
    /// claim.complete_without_memo()?;
    /// assert_eq!(jobs.get_result::<u32>(&key)?, JobResult::NoMemo);
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn get_result<T: DeserializeOwned>(&self, key: &IdempotencyKey) -> Result<JobResult<T>, Error> {
        Ok(match self.status(key)? {
            JobStatus::Done { memo, .. } => memo.get()?.map_or(JobResult::NoMemo, JobResult::Done),
            JobStatus::Failed { memo, .. } => JobResult::Failed(memo),
            _ => JobResult::NotDone,
        })
    }

    /// Waits until the job is done or has failed for good, or `timeout` has passed, and gives its status then.
    ///
    /// It asks again and again, up to every 200 ms.
    ///
    /// # Errors
    ///
    /// As [`status`](Idempotency::status), for the last look.
    pub fn wait_for_result(&self, key: &IdempotencyKey, timeout: Duration) -> Result<JobStatus, Error> {
        let deadline = clock::now().after(timeout);
        let spot = self.spot(key)?;
        let mut backoff = Backoff::new(LOOK);
        loop {
            let status = spot.show().and_then(JobStatus::new);
            let left = deadline.left();
            match &status {
                Ok(status) if status.is_final() => {}
                Err(error) if !error.is_retryable() => {}
                _ if left.is_zero() => {}
                _ => {
                    thread::park_timeout(backoff.pause().min(left));
                    continue;
                }
            }
            return status;
        }
    }

    /// Forgets the job, so that it can be done again. Gives `false`, with nothing changed, while somebody works on it.
    ///
    /// # Errors
    ///
    /// As [`status`](Idempotency::status).
    pub fn clear(&self, key: &IdempotencyKey) -> Result<bool, Error> {
        match self.spot(key)?.request(&Call::Clear)? {
            Reply::Cleared(_) => Ok(true),
            Reply::Busy => Ok(false),
            other => Err(unexpected(&other)),
        }
    }

    /// Begins the job, waiting for the lock until `wait` if that is given; `bound` to the calling thread or to nobody.
    pub(super) fn start(
        &self,
        key: &IdempotencyKey,
        print: &str,
        wait: Option<Moment>,
        bound: bool,
    ) -> Result<Begin, Error> {
        let spot = self.spot(key)?;
        let started = clock::now();
        // Whoever is late learns so without standing in line.
        if let Some(known) = self.known(&spot, print, wait.is_none())? {
            return Ok(known);
        }
        loop {
            let deadline = wait.unwrap_or_else(|| clock::now().after(spot.lock.room().shared.call_timeout));
            let Some(held) = spot.lock.obtain(wait.is_some(), deadline, bound)? else {
                if wait.is_some() {
                    let waited = clock::now().since(started);
                    return Err(Error::Timeout { lock: spot.lock.name().into(), waited });
                }
                return self.refused(&spot, print);
            };
            let mut claim = Claim::new(held, &spot.key, spot.record.clone(), print, self.terms);
            return Ok(match claim.begin()? {
                Reply::Begun { reclaimed: false, .. } => Begin::Begun(claim),
                Reply::Begun { reclaimed: true, .. } => Begin::Reclaimed(claim),
                Reply::Done(memo) => Begin::Done(Memo::new(memo)),
                Reply::Failed(memo) => Begin::Failed(Memo::new(memo)),
                Reply::Exhausted(attempts) => Begin::Exhausted { attempts },
                Reply::OtherPayload => return Err(mismatch(&spot)),
                // This thread stalled for longer than the lease before it could begin: nothing was recorded.
                Reply::Lost => continue,
                other => return Err(unexpected(&other)),
            });
        }
    }

    /// What can be said of the job without the lock, if anything; `busy` says whether a live owner is an answer.
    fn known(&self, spot: &Spot, print: &str, busy: bool) -> Result<Option<Begin>, Error> {
        let shown = spot.show()?;
        let Some(job) = shown.job else { return Ok(None) };
        if !print.is_empty() && !job.print.is_empty() && print != &*job.print {
            return Err(mismatch(spot));
        }
        Ok(match job.stage {
            Stage::Done => Some(Begin::Done(Memo::new(job.memo))),
            Stage::Failed => Some(Begin::Failed(Memo::new(job.memo))),
            Stage::Pending if shown.live && busy => {
                Some(Begin::InProgress { owner: job.owner, age: Duration::from_millis(shown.age_ms) })
            }
            Stage::Pending if shown.live => None,
            _ if self.terms.max_attempts.is_some_and(|most| job.attempt >= most) => {
                Some(Begin::Exhausted { attempts: job.attempt })
            }
            _ => None,
        })
    }

    /// What to say when the lock was not to be had.
    fn refused(&self, spot: &Spot, print: &str) -> Result<Begin, Error> {
        if let Some(known) = self.known(spot, print, true)? {
            return Ok(known);
        }
        let owner = spot.show()?.holder;
        Ok(match (&self.place, owner) {
            // It has taken the job's own lock, and is about to begin.
            (Place::Own { .. }, Some(owner)) => Begin::InProgress { owner, age: Duration::ZERO },
            (_, owner) => Begin::Busy { owner },
        })
    }

    fn spot(&self, key: &IdempotencyKey) -> Result<Spot, Error> {
        let (lock, record) = match &self.place {
            Place::Lock(lock) => (lock.clone(), keys::job(&lock.room().keys, key.as_str())),
            Place::Own { client, lease, max_hold } => {
                let lock = client.builder(&keys::own_lock(key.as_str()));
                let lock = lock.lease(*lease).max_hold(*max_hold).idle(LOCK_IDLE).build()?;
                let record = keys::own_job(&lock.room().keys);
                (lock, record)
            }
        };
        Ok(Spot { lock, key: key.as_str().into(), record })
    }
}

impl Spot {
    fn show(&self) -> Result<Shown, Error> {
        match self.request(&Call::Show)? {
            Reply::Shown(shown) => Ok(shown),
            other => Err(unexpected(&other)),
        }
    }

    /// Sends a call that may be repeated; once more if the connection was a dead one.
    fn request(&self, call: &Call) -> Result<Reply, Error> {
        let room = self.lock.room();
        let deadline = clock::now().after(room.shared.call_timeout);
        match room.shared.engine.job(&room.keys, &self.record, call, deadline) {
            Err(failure) if failure.retry && clock::now() < deadline => {
                room.shared.engine.job(&room.keys, &self.record, call, deadline)
            }
            result => result,
        }
        .map_err(|failure| failure.error)
    }
}

/// The fingerprint of a payload.
pub(super) fn fingerprint(payload: &(impl Serialize + ?Sized)) -> Result<String, Error> {
    Ok(hexadecimal(&Sha256::digest(canonicalize(payload)?)))
}

fn mismatch(spot: &Spot) -> Error {
    Error::PayloadMismatch { key: spot.key.clone() }
}

fn unexpected(reply: &Reply) -> Error {
    Error::Protocol(format!("a call about a job was answered with {reply:?}"))
}

impl fmt::Debug for Idempotency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lock = match &self.place {
            Place::Own { .. } => None,
            Place::Lock(lock) => Some(lock.name()),
        };
        f.debug_struct("Idempotency").field("lock", &lock).field("terms", &self.terms).finish_non_exhaustive()
    }
}

/// Builds an [`Idempotency`]; made by [`LockClient::idempotency`] and [`FifoLock::idempotency`].
///
/// # Examples
///
/// See [`LockClient::idempotency`].
#[must_use = "a builder does nothing until `build`"]
#[derive(Clone, Debug)]
pub struct IdempotencyBuilder {
    /// Whose jobs have locks of their own.
    client: Option<LockClient>,
    /// Whose jobs share it.
    lock: Option<FifoLock>,
    terms: Terms,
    lease: Option<Duration>,
    max_hold: Option<Duration>,
}

impl IdempotencyBuilder {
    /// Sets how long the end of a job is remembered, with its memo. Defaults to 24 h; 1 ms to 10 years are allowed.
    pub fn result_ttl(mut self, ttl: Duration) -> IdempotencyBuilder {
        self.terms.result_ttl = ttl;
        self
    }

    /// Sets how often a job may be begun, so that one that kills its workers stops. Defaults to any number of times.
    pub fn max_attempts(mut self, attempts: u64) -> IdempotencyBuilder {
        self.terms.max_attempts = Some(attempts);
        self
    }

    /// Sets the lease of each job's lock, see [`LockBuilder::lease`](crate::LockBuilder::lease). Only for jobs with locks
    /// of their own. Defaults to 60 s.
    pub fn lease(mut self, lease: Duration) -> IdempotencyBuilder {
        self.lease = Some(lease);
        self
    }

    /// Sets how long a worker may take, see [`LockBuilder::max_hold`](crate::LockBuilder::max_hold). Only for jobs with
    /// locks of their own. Defaults to 30 min.
    pub fn max_hold(mut self, max_hold: Duration) -> IdempotencyBuilder {
        self.max_hold = Some(max_hold);
        self
    }

    /// Makes the handle.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if a setting is out of bounds; the message says what is allowed.
    pub fn build(self) -> Result<Idempotency, Error> {
        let terms = self.terms.checked()?;
        let place = match (self.client, self.lock) {
            (_, Some(lock)) => {
                if self.lease.is_some() || self.max_hold.is_some() {
                    return Err(Error::Config(
                        "lease and max_hold are the lock's own: they are allowed for jobs with a lock each"
                            .into(),
                    ));
                }
                Place::Lock(lock)
            }
            (Some(client), None) => {
                let lease = self.lease.unwrap_or(Duration::from_secs(60));
                let max_hold = self.max_hold.unwrap_or(Duration::from_secs(30 * 60).max(lease * 30));
                // Says now what would be wrong with every lock.
                client.builder("job").lease(lease).max_hold(max_hold).build()?;
                Place::Own { client, lease, max_hold }
            }
            (None, None) => return Err(Error::Config("a client or a lock is required".into())),
        };
        Ok(Idempotency { place, terms })
    }
}
