//! A strict FIFO, fenced, self-renewing distributed lock on Redis for threads.

mod engine;
mod error;
mod fence;
#[cfg(feature = "idempotency")]
pub mod idempotency;

pub use crate::error::Error;
pub use crate::fence::Fence;
