//! A strict FIFO, fenced, self-renewing distributed lock on Redis for threads.

mod backoff;
mod client;
mod clock;
mod engine;
mod error;
pub mod fence;
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
mod status;
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
