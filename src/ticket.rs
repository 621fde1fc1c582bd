//! `Ticket`: a place in the queue taken now and waited for later.

use std::cell::Cell;
use std::fmt;
use std::time::Duration;

use crate::clock;
use crate::error::Error;
use crate::guard::LockGuard;
use crate::holding::Held;
use crate::waiting::{Attempt, Grant, Outcome};

/// A place in the queue of a lock, made by [`FifoLock::enqueue`](crate::FifoLock::enqueue).
///
/// If its turn comes while nobody waits for it, it is passed over and keeps its position: the next
/// [`wait`](Ticket::wait) stands before all that came later. Dropping it gives the place up.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
///
/// # let lock = redis_fifo_lock::LockClient::memory().fifo_lock("invoices")?;
/// let (first, second) = (lock.enqueue()?, lock.enqueue()?);
/// assert!(first.position() < second.position());
/// let guard = first.wait()?;
/// assert!(second.wait_for(Duration::ZERO)?.is_none());
/// drop(guard);
/// assert!(second.wait_for(Duration::from_secs(1))?.is_some());
/// # Ok::<(), redis_fifo_lock::Error>(())
/// ```
#[must_use = "dropping a ticket gives its place up"]
pub struct Ticket {
    /// Taken out while it is waited for, and for good when it was granted.
    attempt: Cell<Option<Attempt>>,
    position: u64,
    name: Box<str>,
}

impl Ticket {
    pub(crate) fn new(attempt: Attempt, position: u64) -> Ticket {
        let name = attempt.room().keys.name.clone();
        Ticket { attempt: Cell::new(Some(attempt)), position, name }
    }

    /// The place in the order of arrival: microseconds of server time, or one more than the one before.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Waits for the ticket's turn.
    ///
    /// # Errors
    ///
    /// As [`FifoLock::lock`](crate::FifoLock::lock); the place is given up then. [`Error::Config`] if the ticket was
    /// granted before.
    pub fn wait(self) -> Result<LockGuard, Error> {
        match self.redeem(Duration::MAX)? {
            Some(guard) => Ok(guard),
            None => Err(Error::Timeout { lock: self.name.clone(), waited: Duration::MAX }),
        }
    }

    /// Waits up to `wait` for the ticket's turn; `None` if it did not come, with the place kept. Zero asks once.
    ///
    /// # Errors
    ///
    /// As [`FifoLock::lock`](crate::FifoLock::lock), with the place kept. [`Error::Config`] if the ticket was granted
    /// before.
    pub fn wait_for(&self, wait: Duration) -> Result<Option<LockGuard>, Error> {
        self.redeem(wait)
    }

    /// Gives the place up.
    ///
    /// Dropping the ticket does the same. If the server does not answer, it is told as soon as it does.
    pub fn cancel(self) {
        drop(self);
    }

    fn redeem(&self, wait: Duration) -> Result<Option<LockGuard>, Error> {
        let Some(mut attempt) = self.attempt.take() else {
            return Err(Error::Config(format!(
                "this ticket for `{}` was granted before; take a new one",
                self.name
            )));
        };
        match try_wait(&mut attempt, wait) {
            Ok(Some(grant)) => Held::begin(attempt, grant, true).map(|held| Some(LockGuard::new(held))),
            other => {
                attempt.park();
                self.attempt.set(Some(attempt));
                other.map(|_| None)
            }
        }
    }
}

/// Asks, with the old position, and waits if need be.
fn try_wait(attempt: &mut Attempt, wait: Duration) -> Result<Option<Grant>, Error> {
    attempt.resume(!wait.is_zero())?;
    let deadline = clock::now().after(wait);
    // Asking once takes a call, whatever the deadline.
    let first = deadline.max(clock::now().after(attempt.room().shared.call_timeout));
    match attempt.ask(true, first)? {
        Outcome::Granted(grant) => Ok(Some(grant)),
        Outcome::NotYet(_) => attempt.wait(deadline),
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket")
            .field("name", &self.name)
            .field("position", &self.position)
            .finish_non_exhaustive()
    }
}
