//! Jobs that are done once, however often they are delivered, and their names.
//!
//! [`FifoLock::run_once`](crate::FifoLock::run_once) takes the lock, runs the job unless it is done, and remembers its
//! result, in one call. [`Idempotency`] has the parts.
//!
//! # Keys
//!
//! Equal jobs get equal keys, on every machine and in Python as well.
//!
//! An [`IdempotencyKey`] is a namespace and the SHA-256 of a payload. The payload is first written as canonical JSON
//! ([`canonicalize`]), so neither the order of a map nor the order of a struct's fields has a say. Keys and canonical
//! text are, byte for byte, what the Python package `fencekit` (0.1.0 to 0.6.1) makes of the same data: a producer in
//! one language and a worker in the other agree on what has been done.
//!
//! Two payloads are the same job if their canonical text is the same, and only then. `1` and `1.0` are two jobs, and
//! so are a field that is `null` and a field that is absent: say `#[serde(skip_serializing_if = "Option::is_none")]`
//! where `None` should mean *absent*.

mod canonical;
mod claim;
mod compound;
mod jobs;
mod key;
mod map_key;
mod memo;
mod refusal;
mod run_once;
mod spelling;
mod status;

pub use self::canonical::canonicalize;
pub use self::claim::{Claim, Failure};
pub use self::jobs::{Begin, Idempotency, IdempotencyBuilder};
pub use self::key::IdempotencyKey;
pub use self::memo::Memo;
pub use self::run_once::{Conflict, Outcome, RunError, RunOnce};
pub use self::status::{JobResult, JobStatus};
