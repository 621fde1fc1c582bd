//! What the integration tests stand on, for the bench, too.
#![expect(dead_code, reason = "shared with tests/it, which uses the rest")]

#[path = "../../tests/it/support/eventually.rs"]
mod eventually;
#[path = "../../tests/it/support/monitor.rs"]
pub(crate) mod monitor;
#[path = "../../tests/it/support/port.rs"]
pub(crate) mod port;
#[path = "../../tests/it/support/process.rs"]
pub(crate) mod process;
#[path = "../../tests/it/support/reaper.rs"]
pub(crate) mod reaper;
#[path = "../../tests/it/support/server.rs"]
pub(crate) mod server;

pub(crate) use self::eventually::{POLL, eventually};
