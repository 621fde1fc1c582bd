//! `FifoLock`: a lock by name, and the ways to take it.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::client::{Handle, LockClient};
use crate::clock::{self, Moment};
use crate::error::Error;
use crate::fence::Fence;
use crate::guard::LockGuard;
use crate::holding::Held;
use crate::lease::Lease;
use crate::protocol::{Command, Reply};
use crate::settings::Settings;
use crate::status::Status;
use crate::ticket::Ticket;
use crate::waiting::{Attempt, Outcome, Room};

/// Time the first call gets even if the caller's deadline is shorter: at least one attempt is always made.
const FIRST_ATTEMPT: Duration = Duration::from_millis(200);

/// A lock by name, granted strictly in order of arrival at the server.
///
/// A handle: cheap to clone, shared freely among threads. Two handles of one name are the same lock, whatever their
/// settings, in this process or another.
///
/// # Examples
///
/// ```
/// # let locks = redis_fifo_lock::LockClient::memory();
/// let lock = locks.fifo_lock("invoices")?;
/// std::thread::scope(|scope| {
///     for worker in 0..4 {
///         let lock = lock.clone();
///         scope.spawn(move || -> Result<(), redis_fifo_lock::Error> {
///             let guard = lock.lock()?; // waits its turn
///             println!("worker {worker} is alone in here, fence {}", guard.fence());
///             Ok(())
///         });
///     }
/// });
/// # Ok::<(), redis_fifo_lock::Error>(())
/// ```
#[derive(Clone)]
pub struct FifoLock {
    room: Arc<Room>,
    settings: Arc<Settings>,
    /// Counts the handles a user holds.
    _handle: Arc<Handle>,
}

impl FifoLock {
    /// Makes a client of the Redis at `url` and the lock `name` on it, in one line.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if `url` is not a URL or `name` not a name.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use redis_fifo_lock::FifoLock;
    ///
    /// let guard = FifoLock::connect("redis://127.0.0.1/", "invoices")?.lock()?;
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn connect(url: &str, name: &str) -> Result<FifoLock, Error> {
        LockClient::connect(url)?.fifo_lock(name)
    }

    /// The lock's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.room.keys.name
    }

    /// Waits its turn and takes the lock.
    ///
    /// Blocks for as long as others hold the lock or stand before this call in the queue. An outage of the server is
    /// ridden out for up to `patience`, with the place in the queue kept.
    ///
    /// # Errors
    ///
    /// [`Error::Redis`] if the server cannot be reached (at the first call at once, later when patience is over),
    /// [`Error::WouldDeadlock`] if this thread holds the lock already, [`Error::QueueFull`],
    /// [`Error::OutOfMemory`], [`Error::ReadOnly`], [`Error::Pool`], [`Error::Protocol`], [`Error::Thread`].
    ///
    /// # Examples
    ///
    /// ```
    /// # let lock = redis_fifo_lock::LockClient::memory().fifo_lock("invoices")?;
    /// let guard = lock.lock()?;
    /// // only one thread of one process is here at a time
    /// drop(guard);
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn lock(&self) -> Result<LockGuard, Error> {
        match self.obtain(true, Moment::NEVER, true)? {
            Some(held) => Ok(LockGuard::new(held)),
            None => Err(self.timed_out(Duration::MAX)),
        }
    }

    /// Takes the lock if it is free and nobody waits for it; `None` otherwise. Never queues, never overtakes.
    ///
    /// # Errors
    ///
    /// As [`lock`](FifoLock::lock), without `WouldDeadlock` and `QueueFull`.
    ///
    /// # Examples
    ///
    /// ```
    /// # let lock = redis_fifo_lock::LockClient::memory().fifo_lock("invoices")?;
    /// let guard = lock.try_lock()?.expect("nobody else is here");
    /// assert!(lock.try_lock()?.is_none());
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn try_lock(&self) -> Result<Option<LockGuard>, Error> {
        let deadline = clock::now().after(self.room.shared.call_timeout);
        Ok(self.obtain(false, deadline, true)?.map(LockGuard::new))
    }

    /// Waits up to `wait` for its turn; `None` if it did not come, with the ticket withdrawn.
    ///
    /// Zero tries once, as [`try_lock`](FifoLock::try_lock); [`Duration::MAX`] waits for ever. The call returns
    /// within 20 ms of `wait` on an idle machine with a server that answers.
    ///
    /// # Errors
    ///
    /// As [`lock`](FifoLock::lock). If the server could not be reached when the time ran out, that is an error too,
    /// not `None`.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// # let lock = redis_fifo_lock::LockClient::memory().fifo_lock("invoices")?;
    /// if let Some(guard) = lock.try_lock_for(Duration::from_secs(30))? {
    ///     println!("ours, fence {}", guard.fence());
    /// }
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn try_lock_for(&self, wait: Duration) -> Result<Option<LockGuard>, Error> {
        if wait.is_zero() {
            return self.try_lock();
        }
        Ok(self.obtain(true, clock::now().after(wait), true)?.map(LockGuard::new))
    }

    /// Waits until `deadline` for its turn; see [`try_lock_for`](FifoLock::try_lock_for).
    ///
    /// # Errors
    ///
    /// As [`try_lock_for`](FifoLock::try_lock_for).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::{Duration, Instant};
    /// # let lock = redis_fifo_lock::LockClient::memory().fifo_lock("invoices")?;
    /// let guard = lock.try_lock_until(Instant::now() + Duration::from_secs(30))?;
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn try_lock_until(&self, deadline: Instant) -> Result<Option<LockGuard>, Error> {
        self.try_lock_for(deadline.saturating_duration_since(Instant::now()))
    }

    /// Waits its turn and takes the lock by hand: for leases that are taken here and released elsewhere.
    ///
    /// # Errors
    ///
    /// As [`lock`](FifoLock::lock).
    ///
    /// # Examples
    ///
    /// ```
    /// # let lock = redis_fifo_lock::LockClient::memory().fifo_lock("invoices")?;
    /// let lease = lock.acquire()?;
    /// std::thread::spawn(move || lease.release()).join().unwrap()?;
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn acquire(&self) -> Result<Lease, Error> {
        match self.obtain(true, Moment::NEVER, false)? {
            Some(held) => Ok(Lease::new(held)),
            None => Err(self.timed_out(Duration::MAX)),
        }
    }

    /// Waits up to `wait` for its turn and takes the lock by hand.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] if the turn did not come, with the ticket withdrawn; else as [`lock`](FifoLock::lock).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use redis_fifo_lock::Error;
    ///
    /// # let lock = redis_fifo_lock::LockClient::memory().fifo_lock("invoices")?;
    /// let lease = lock.acquire()?;
    /// assert!(matches!(lock.acquire_timeout(Duration::from_millis(10)), Err(Error::Timeout { .. })));
    /// lease.release()?;
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn acquire_timeout(&self, wait: Duration) -> Result<Lease, Error> {
        let start = clock::now();
        let deadline =
            if wait.is_zero() { start.after(self.room.shared.call_timeout) } else { start.after(wait) };
        match self.obtain(!wait.is_zero(), deadline, false)? {
            Some(held) => Ok(Lease::new(held)),
            None => Err(self.timed_out(clock::now().since(start))),
        }
    }

    /// Takes a place in the queue now, to be waited for later.
    ///
    /// If its turn comes while nobody waits for it, the ticket is passed over and keeps its position.
    ///
    /// # Errors
    ///
    /// As [`lock`](FifoLock::lock), without `WouldDeadlock`.
    ///
    /// # Examples
    ///
    /// ```
    /// # let lock = redis_fifo_lock::LockClient::memory().fifo_lock("invoices")?;
    /// let ticket = lock.enqueue()?;
    /// // ... load what the job needs, the place in the queue is kept ...
    /// let guard = ticket.wait()?;
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn enqueue(&self) -> Result<Ticket, Error> {
        let mut attempt = Attempt::open(&self.room, &self.settings, false)?;
        let position = match attempt.ask(true, Moment::NEVER)? {
            Outcome::Granted(grant) => {
                attempt.pass_over(grant);
                grant.position
            }
            Outcome::NotYet(position) => {
                attempt.park();
                position
            }
        };
        Ok(Ticket::new(attempt, position))
    }

    /// Says who holds the lock and how many wait.
    ///
    /// # Errors
    ///
    /// [`Error::Redis`], [`Error::Pool`] if the server cannot be reached, [`Error::Protocol`] if a key holds
    /// something foreign.
    ///
    /// # Examples
    ///
    /// ```
    /// # let lock = redis_fifo_lock::LockClient::memory().fifo_lock("invoices")?;
    /// let guard = lock.lock()?;
    /// let status = lock.status()?;
    /// assert!(status.held);
    /// assert_eq!(status.fence, Some(guard.fence()));
    /// assert_eq!(status.waiting, 0);
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn status(&self) -> Result<Status, Error> {
        match self.request(&Command::Inspect { limit: 0 })? {
            Reply::Inspected(inspection) => Ok(Status::new(self.name(), &inspection)),
            other => Err(Error::Protocol(format!("inspect was answered with {other:?}"))),
        }
    }

    /// Takes away exactly the lease with this fence, whoever holds it, and grants the next ticket.
    ///
    /// For operators: get the fence from [`status`](FifoLock::status), decide, then evict what was seen. Gives
    /// `false`, with nothing changed, if that lease is over. Its holder learns of the loss at its next renewal, which
    /// is why the fence has to guard what it writes until then.
    ///
    /// # Errors
    ///
    /// As [`status`](FifoLock::status).
    ///
    /// # Examples
    ///
    /// ```
    /// # let lock = redis_fifo_lock::LockClient::memory().fifo_lock("invoices")?;
    /// let stuck = lock.lock()?;
    /// assert!(lock.evict(stuck.fence())?);
    /// assert!(!lock.evict(stuck.fence())?);
    /// assert!(stuck.unlock().is_err());
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn evict(&self, fence: Fence) -> Result<bool, Error> {
        match self.request(&Command::Evict { fence: fence.get() })? {
            Reply::Evicted => Ok(true),
            Reply::Changed => Ok(false),
            other => Err(Error::Protocol(format!("evict was answered with {other:?}"))),
        }
    }

    /// Sends a command of no ticket; once more if the connection was a dead one.
    fn request(&self, command: &Command) -> Result<Reply, Error> {
        let deadline = clock::now().after(self.room.shared.call_timeout);
        match self.room.call(&self.settings, command, deadline) {
            Err(failure) if failure.retry && failure.sent && clock::now() < deadline => {
                self.room.call(&self.settings, command, deadline).map_err(|failure| failure.error)
            }
            result => result.map_err(|failure| failure.error),
        }
    }

    /// Takes the lock by `deadline`, queueing for it if `wait`; `bound` to the calling thread or to nobody.
    fn obtain(&self, wait: bool, deadline: Moment, bound: bool) -> Result<Option<Held>, Error> {
        let mut attempt = Attempt::open(&self.room, &self.settings, wait)?;
        let first = deadline.max(clock::now().after(FIRST_ATTEMPT));
        let granted = match attempt.ask(wait, first)? {
            Outcome::Granted(grant) => Some(grant),
            Outcome::NotYet(_) if wait => attempt.wait(deadline)?,
            Outcome::NotYet(_) => {
                attempt.refused();
                None
            }
        };
        granted.map(|grant| Held::begin(attempt, grant, bound)).transpose()
    }

    fn timed_out(&self, waited: Duration) -> Error {
        Error::Timeout { lock: self.name().into(), waited }
    }
}

impl fmt::Debug for FifoLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FifoLock")
            .field("name", &self.name())
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// Builds a [`FifoLock`]; made by [`LockClient::builder`].
///
/// # Examples
///
/// ```
/// # let locks = redis_fifo_lock::LockClient::memory();
/// use std::time::Duration;
///
/// let lock = locks
///     .builder("invoices")
///     .lease(Duration::from_secs(20))
///     .max_hold(Duration::from_secs(600))
///     .max_queue(100)
///     .build()?;
/// # Ok::<(), redis_fifo_lock::Error>(())
/// ```
#[must_use = "a builder does nothing until `build`"]
#[derive(Clone, Debug)]
pub struct LockBuilder {
    client: LockClient,
    name: String,
    settings: Settings,
}

impl LockBuilder {
    pub(crate) fn new(client: LockClient, name: &str) -> LockBuilder {
        LockBuilder { client, name: name.into(), settings: Settings::default() }
    }

    /// Sets how long a grant is good without renewal, which bounds how long a crashed holder is missed. It must exceed
    /// the longest time this process may be frozen or cut off from the server. Defaults to 60 s; 10 ms to 24 h are
    /// allowed, counted in whole milliseconds.
    pub fn lease(mut self, lease: Duration) -> LockBuilder {
        self.settings.lease = lease;
        self
    }

    /// Sets how long a lease is renewed: the backstop for a holder that is alive but stuck. Defaults to 30 min; must
    /// exceed the lease.
    pub fn max_hold(mut self, max_hold: Duration) -> LockBuilder {
        self.settings.max_hold = max_hold;
        self
    }

    /// Sets how often the first waiter asks although nobody rang. Defaults to 2 s; 10 ms to 1 h are allowed.
    pub fn poll(mut self, poll: Duration) -> LockBuilder {
        self.settings.poll = poll;
        self
    }

    /// Sets how long a grant may wait for its client to take it before it goes to the next. Defaults to 1 s, or the
    /// lease if that is shorter; 1 ms to the lease are allowed.
    pub fn claim(mut self, claim: Duration) -> LockBuilder {
        self.settings.claim = Some(claim);
        self
    }

    /// Sets how long the server remembers a lock that nobody uses. Defaults to 24 h; 1 ms to 10 years are allowed.
    pub fn idle(mut self, idle: Duration) -> LockBuilder {
        self.settings.idle = idle;
        self
    }

    /// Sets how long dropping or unlocking a guard may block. Defaults to 5 s; 1 ms to 1 h are allowed.
    pub fn release_bound(mut self, bound: Duration) -> LockBuilder {
        self.settings.release_bound = bound;
        self
    }

    /// Sets how long a waiter rides out an outage of the server. Defaults to 60 s; up to 10 years are allowed.
    pub fn patience(mut self, patience: Duration) -> LockBuilder {
        self.settings.patience = patience;
        self
    }

    /// Limits how many tickets may be queued; whoever comes then gets [`Error::QueueFull`]. Defaults to no limit; at
    /// least 1 is allowed.
    pub fn max_queue(mut self, tickets: u64) -> LockBuilder {
        self.settings.max_queue = Some(tickets);
        self
    }

    /// Makes the lock. Nothing is sent to the server.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if the name or a setting is out of bounds; the message says what is allowed.
    pub fn build(self) -> Result<FifoLock, Error> {
        let settings = Arc::new(self.settings.checked()?);
        let (room, handle) = self.client.room(&self.name)?;
        Ok(FifoLock { room, settings, _handle: handle })
    }
}
