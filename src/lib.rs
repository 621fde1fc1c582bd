//! A strict FIFO, fenced, self-renewing distributed lock on Redis for threads.
//!
//! ```no_run
//! use redis_fifo_lock::LockClient;
//! # fn post_invoices(_: redis_fifo_lock::Fence) -> Result<(), redis_fifo_lock::Error> { Ok(()) }
//!
//! let locks = LockClient::connect("redis://127.0.0.1/")?;
//! let lock = locks.fifo_lock("invoices")?;
//! let guard = lock.lock()?;              // waits its turn, in order of arrival at Redis
//! post_invoices(guard.fence())?;         // whatever stores the result can refuse a stale fence
//! drop(guard);                           // released; the next in line has it one network trip later
//! # Ok::<(), redis_fifo_lock::Error>(())
//! ```
//!
//! # What it guarantees
//!
//! * **Mutual exclusion** on one Redis primary, as long as the holder's process runs and reaches Redis at least once per
//!   lease (60 s by default).
//! * **Strict FIFO by arrival at Redis.** A newcomer never overtakes a queued ticket, [`try_lock`](FifoLock::try_lock)
//!   included.
//! * **Fences strictly increase**, also after Redis lost the lock's data.
//! * **Crashes heal.** A crashed holder is replaced within its lease + 100 ms; the crash of a waiting process delays the
//!   queue by at most `claim` + `poll` (3 s by default), however many tickets it had.
//! * **A holder learns of its loss** during the section, by its own clock, also when Redis cannot be reached or the
//!   machine slept: [`is_lost`](LockGuard::is_lost), [`on_lost`](LockGuard::on_lost).
//! * **Release is exact.** Retried, it is no false alarm; a lost lease is never reported as released.
//!
//! # What it does not
//!
//! * Exclusion through a freeze (`SIGSTOP`, VM pause, partition) that is longer than the lease. No lease can give that.
//!   Pass the [`Fence`] to what you protect and let it refuse stale ones.
//! * Anything over a failover that loses writes.
//! * A bound on a holder that is alive but stuck: `max_hold` is a backstop, 30 minutes by default.
//!
//! # Logging
//!
//! Through the `log` crate, and the levels are policy: `error` for a lease that was lost, renewed late, or not released;
//! `warn` for what will become one (eviction policy, no thread to be had, a foreign writer on our keys); `debug` for
//! retries and re-entries. Nothing is logged on the way of an ordinary lock and unlock. No message carries a password.
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `serde` | `Serialize` and `Deserialize` for [`Fence`] |
//! | `idempotency` | jobs that are done once, and their keys |
//! | `postgres` | fenced writes to PostgreSQL |
//! | `sqlite` | fenced writes to SQLite; `sqlite-bundled` brings an SQLite along |

mod backoff;
mod client;
mod clock;
mod engine;
mod error;
pub mod fence;
/// The parsers of what a server sends, for the fuzz targets of this repository; no part of the API.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::engine::wire::{decode, ring};
}
mod fifo_lock;
mod guard;
mod holding;
#[cfg(feature = "idempotency")]
pub mod idempotency;
mod keys;
mod lease;
#[doc(hidden)]
pub mod protocol;
mod renewal;
mod settings;
#[cfg(test)]
mod sim;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub mod sql;
mod status;
mod sync;
mod ticket;
mod waiting;
mod withdrawal;

pub use redis;

pub use crate::client::{ClientBuilder, LockClient};
pub use crate::engine::MemoryServer;
pub use crate::error::Error;
pub use crate::fence::Fence;
pub use crate::fifo_lock::{FifoLock, LockBuilder};
pub use crate::guard::LockGuard;
pub use crate::lease::Lease;
pub use crate::status::Status;
pub use crate::ticket::Ticket;
