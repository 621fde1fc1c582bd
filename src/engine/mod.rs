//! What the client logic sees of a server: one call at a time, and a bell to listen to.
//!
//! Invariant: an engine makes one attempt per call and never repeats one behind the caller's back, so whoever
//! retries knows that he does.

mod connection;
mod gate_wire;
#[cfg(feature = "idempotency")]
mod job_wire;
mod memory;
mod redis;
mod scripts;
pub(crate) mod wire;

use std::time::Duration;

use crate::clock::Moment;
use crate::error::Error;
use crate::keys::{GateKeys, LockKeys};
#[cfg(feature = "idempotency")]
use crate::protocol::job;
use crate::protocol::machine::Ring;
use crate::protocol::{Command, Reply, Terms, gate};

pub use self::memory::MemoryServer;
pub(crate) use self::redis::{RedisEngine, RedisOptions};
pub(crate) use self::wire::is_transient;

/// A server that runs the protocol.
pub(crate) trait Engine: Send + Sync {
    /// Runs one transition, once, and answers by `by` at the latest.
    fn call(&self, keys: &LockKeys, terms: &Terms, command: &Command, by: Moment) -> Result<Reply, Failure>;

    /// Runs one call at a gate, once, and answers by `by` at the latest.
    fn gate(&self, keys: &GateKeys, call: &gate::Call, by: Moment) -> Result<gate::Reply, Failure>;

    /// Runs one call about the job whose record is the key `job`, once, and answers by `by` at the latest.
    #[cfg(feature = "idempotency")]
    fn job(&self, keys: &LockKeys, job: &str, call: &job::Call, by: Moment) -> Result<job::Reply, Failure>;

    /// Opens the bell of the calling client on one lock.
    fn bell(&self, keys: &LockKeys, by: Moment) -> Result<Box<dyn Bell>, Failure>;
}

/// A bell somebody listens to. Dropping it stops the listening.
pub(crate) trait Bell: Send {
    /// Waits for a ring, for about `wait`: the server looks at its clock ten times a second, so nothing exact may
    /// rest on it. A bell that failed is to be dropped.
    fn listen(&mut self, wait: Duration) -> Result<Heard, Failure>;
}

/// What came of listening.
#[derive(Debug)]
pub(crate) enum Heard {
    /// A grant.
    Ring(Ring),
    /// Something that is not a ring; somebody else writes to our key.
    Noise,
    /// The time ran out.
    Nothing,
}

/// Why a call has no reply.
#[derive(Debug)]
pub(crate) struct Failure {
    /// What to tell the user if nothing comes of it.
    pub(crate) error: Error,
    /// Whether the server may have run the call all the same.
    pub(crate) sent: bool,
    /// Whether the same call may succeed soon.
    pub(crate) retry: bool,
}
