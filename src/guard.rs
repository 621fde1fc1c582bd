//! `LockGuard`: the lock in the hands of one thread.

use crate::sync::atomic::Ordering;
use std::fmt;
use std::time::Duration;

use crossbeam_channel::Receiver;
use log::error;

use crate::error::Error;
use crate::fence::Fence;
use crate::holding::Held;

/// The lock, held until the guard is dropped.
///
/// Dropping it releases the lock, blocking for at most `release_bound` (5 s by default) if the server does not answer,
/// and logs what it could not do; the lease then lapses by itself. [`unlock`](LockGuard::unlock) does the same and
/// returns the error.
///
/// Holding it does *not* promise exclusion beyond the lease: a process that is frozen, or cut off from the server, for
/// longer than the lease finds the lock granted to the next in line. [`is_lost`](LockGuard::is_lost) tells as soon as
/// this process runs again; only a store that checks [`fence`](LockGuard::fence) refuses a write that comes too late.
///
/// A guard that goes through [`std::mem::forget`] is renewed until `max_hold`, then the lease lapses.
///
/// The guard can be sent to another thread. The thread that took it must then call [`detach`](LockGuard::detach)
/// first if it is going to lock again itself, or use [`Lease`](crate::Lease).
///
/// # Examples
///
/// ```
/// # let lock = redis_fifo_lock::LockClient::memory().fifo_lock("invoices")?;
/// let guard = lock.lock()?;
/// for batch in 0..3 {
///     guard.ensure_held()?; // stop at once if the lease was lost
///     println!("batch {batch}, fence {}", guard.fence());
/// }
/// guard.unlock()?;
/// # Ok::<(), redis_fifo_lock::Error>(())
/// ```
#[must_use = "the lock is released as soon as the guard is dropped"]
pub struct LockGuard {
    pub(crate) held: Held,
}

impl LockGuard {
    pub(crate) fn new(held: Held) -> LockGuard {
        LockGuard { held }
    }

    /// The fence of this grant: larger than every one before it.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.held.touch();
        self.held.holding.fence
    }

    /// The place this ticket had in the order of arrival: microseconds of server time, or one more than the one before.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.held.holding.position
    }

    /// The lock's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.held.holding.room.keys.name
    }

    /// Whether the lease was lost: refused by the server, run out by the local clock, or at the end of `max_hold`.
    /// Once lost, it stays lost. Asks nobody.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.held.touch();
        self.held.holding.is_lost()
    }

    /// Gives an error if the lease was lost; the `?` form of [`is_lost`](LockGuard::is_lost).
    ///
    /// # Errors
    ///
    /// [`Error::LeaseLost`] if it was.
    pub fn ensure_held(&self) -> Result<(), Error> {
        self.held.touch();
        self.held.ensure_held()
    }

    /// How long the lease is good unless it is renewed, by the local clock; zero if it was lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.held.touch();
        self.held.remaining()
    }

    /// How many waited for the lock when the lease was last renewed; 0 before the first renewal.
    #[must_use]
    pub fn waiters(&self) -> u64 {
        self.held.holding.waiters.load(Ordering::Relaxed)
    }

    /// A channel that gets one message when the lease is lost, for `select!`. It is closed without a message when the
    /// lock is released.
    ///
    /// # Examples
    ///
    /// ```
    /// # let lock = redis_fifo_lock::LockClient::memory().fifo_lock("invoices")?;
    /// let guard = lock.lock()?;
    /// let lost = guard.on_lost();
    /// assert!(lost.try_recv().is_err()); // still ours
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    #[must_use]
    pub fn on_lost(&self) -> Receiver<()> {
        self.held.holding.on_lost()
    }

    /// Makes the guard belong to no thread in particular, so that the thread that took it may wait for the lock again.
    ///
    /// # Examples
    ///
    /// ```
    /// # let lock = redis_fifo_lock::LockClient::memory().fifo_lock("invoices")?;
    /// let guard = lock.lock()?;
    /// guard.detach();
    /// let worker = std::thread::spawn(move || drop(guard));
    /// let next = lock.lock()?; // without `detach`: Error::WouldDeadlock, if it came first
    /// # worker.join().unwrap();
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn detach(&self) {
        self.held.unbind();
    }

    /// Releases the lock and says what came of it. Blocks for at most `release_bound`.
    ///
    /// # Errors
    ///
    /// [`Error::LeaseLost`] if the lease was taken away before, or if the server does not answer and the lease has run
    /// out; [`Error::Redis`] and others if the server does not answer and the lease is still running: it lapses by
    /// itself.
    pub fn unlock(mut self) -> Result<(), Error> {
        self.held.end()
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        if let Err(error) = self.held.end() {
            error!("`{}` was not released by its guard: {error}", self.name());
        }
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard")
            .field("name", &self.name())
            .field("fence", &self.held.holding.fence)
            .field("lost", &self.held.holding.was_lost())
            .finish_non_exhaustive()
    }
}
