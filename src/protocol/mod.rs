//! The protocol as pure data and functions: what the Lua scripts do, without a server.
//!
//! Invariant: nothing below this module reads a clock, does I/O or draws a random number, so the same commands at
//! the same times always give the same replies and the same state.
//!
//! The module is public for the tests of this repository (differential, model check, fuzz) and for people who
//! explore the protocol; it is hidden because its shape follows the scripts and carries no promise of stability.

pub mod gate;
#[cfg(feature = "idempotency")]
pub mod job;
pub mod keyspace;
pub mod machine;
mod record;
mod reply;
mod ticket;

pub use self::machine::{Command, State, Terms, apply};
pub use self::record::Record;
pub use self::reply::{Inspection, Next, Reply};
pub use self::ticket::{ClientId, TicketId};

/// Numbers from here on are not exact as IEEE doubles, which is what Lua and sorted sets count in.
pub const EXACT: u64 = 1 << 53;
