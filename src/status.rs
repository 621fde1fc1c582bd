//! `Status`: what can be seen of a lock from outside.

use std::time::Duration;

use crate::fence::Fence;
use crate::protocol::Inspection;

/// The state of a lock at one moment, by [`FifoLock::status`](crate::FifoLock::status). Old news as soon as it is read.
///
/// # Examples
///
/// ```
/// # let lock = redis_fifo_lock::LockClient::memory().fifo_lock("invoices")?;
/// let status = lock.status()?;
/// assert!(!status.held && status.owner.is_none() && status.waiting == 0);
/// # Ok::<(), redis_fifo_lock::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// The lock's name.
    pub name: Box<str>,
    /// Whether somebody holds the lock; a lease that has lapsed does not count.
    pub held: bool,
    /// The client that holds it: `host-pid-random`.
    pub owner: Option<Box<str>>,
    /// The holder's fence, or the newest there was; `None` if nothing is remembered.
    pub fence: Option<Fence>,
    /// How long the lease is good unless renewed, by the server's clock.
    pub lease_remaining: Option<Duration>,
    /// How many tickets are queued.
    pub waiting: u64,
}

impl Status {
    pub(crate) fn new(name: &str, seen: &Inspection) -> Status {
        let record = seen.record.as_ref();
        let holder = record.and_then(|record| {
            let holder = record.holder.as_ref()?;
            // A server clock that went back makes a lease look longer than it can be.
            let left_us = record.until.saturating_sub(seen.now_us).min(holder.lease_ms() * 1000);
            (left_us > 0).then(|| (holder.client(), Duration::from_micros(left_us)))
        });
        Status {
            name: name.into(),
            held: holder.is_some(),
            owner: holder.map(|(client, _)| client.into()),
            fence: record.and_then(|record| Fence::new(record.fence)),
            lease_remaining: holder.map(|(_, left)| left),
            waiting: seen.waiting,
        }
    }
}
