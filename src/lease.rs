//! `Lease`: the lock by hand, acquired here and released elsewhere.

use crate::sync::atomic::Ordering;
use std::fmt;
use std::thread;
use std::time::Duration;

use crossbeam_channel::Receiver;
use log::error;

use crate::error::Error;
use crate::fence::Fence;
use crate::holding::Held;

/// The lock, held until [`release`](Lease::release).
///
/// For code that takes the lock in one place and gives it back in another, on whatever thread. It promises what
/// [`LockGuard`](crate::LockGuard) promises, no more.
///
/// Dropping a lease without releasing it is a bug. The lock is released all the same, then:
///
/// # Panics
///
/// In debug builds the drop panics, unless the thread is panicking already. In release builds it logs an error.
///
/// # Examples
///
/// ```
/// # let lock = redis_fifo_lock::LockClient::memory().fifo_lock("invoices")?;
/// let lease = lock.acquire()?;
/// println!("fence {}", lease.fence());
/// lease.release()?;
/// # Ok::<(), redis_fifo_lock::Error>(())
/// ```
#[must_use = "a lease has to be released"]
pub struct Lease {
    pub(crate) held: Held,
    released: bool,
}

impl Lease {
    pub(crate) fn new(held: Held) -> Lease {
        Lease { held, released: false }
    }

    /// The fence of this grant: larger than every one before it.
    #[must_use]
    pub fn fence(&self) -> Fence {
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

    /// How long the lease is good unless it is renewed, by the local clock; zero if it was lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.held.remaining()
    }

    /// How many waited for the lock when the lease was last renewed; 0 before the first renewal.
    #[must_use]
    pub fn waiters(&self) -> u64 {
        self.held.holding.waiters.load(Ordering::Relaxed)
    }

    /// A channel that gets one message when the lease is lost; see [`LockGuard::on_lost`](crate::LockGuard::on_lost).
    #[must_use]
    pub fn on_lost(&self) -> Receiver<()> {
        self.held.holding.on_lost()
    }

    /// Releases the lock and says what came of it. Blocks for at most `release_bound`.
    ///
    /// # Errors
    ///
    /// As [`LockGuard::unlock`](crate::LockGuard::unlock).
    pub fn release(mut self) -> Result<(), Error> {
        self.released = true;
        self.held.end()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.released {
            return;
        }
        // First of all the next in line gets the lock; the complaint comes after.
        let result = self.held.end();
        let leaked =
            format!("lease on `{}` (fence {}) was dropped without release", self.name(), self.fence());
        match result {
            Ok(()) => error!("{leaked}; it is released now"),
            Err(error) => error!("{leaked}, and could not be released: {error}"),
        }
        if cfg!(debug_assertions) && !thread::panicking() {
            panic!("{leaked}");
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("name", &self.name())
            .field("fence", &self.fence())
            .field("lost", &self.held.holding.was_lost())
            .finish_non_exhaustive()
    }
}
