//! What the integration tests stand on, for this binary too.
#![expect(dead_code, reason = "shared with tests/it, which uses the rest")]

#[path = "../it/support/child.rs"]
pub(crate) mod child;
#[path = "../it/support/eventually.rs"]
mod eventually;
#[path = "../it/support/monitor.rs"]
pub(crate) mod monitor;
#[path = "../it/support/port.rs"]
pub(crate) mod port;
#[path = "../it/support/process.rs"]
pub(crate) mod process;
#[path = "../it/support/proxy.rs"]
pub(crate) mod proxy;
#[path = "../it/support/reaper.rs"]
pub(crate) mod reaper;
#[path = "../it/support/resp.rs"]
pub(crate) mod resp;
#[path = "../it/support/server.rs"]
pub(crate) mod server;

pub(crate) use self::eventually::{POLL, eventually};
/// What a child process of this binary can do.
pub(crate) use crate::worker as roles;
