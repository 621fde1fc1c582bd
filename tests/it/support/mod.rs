//! What the tests stand on: private servers, faults, other processes, and records of what happened.

pub(crate) mod child;
mod eventually;
pub(crate) mod log_capture;
pub(crate) mod monitor;
pub(crate) mod overlap;
pub(crate) mod port;
pub(crate) mod postgres;
pub(crate) mod process;
pub(crate) mod proxy;
pub(crate) mod reaper;
pub(crate) mod resp;
pub(crate) mod roles;
pub(crate) mod server;

use std::fs;

pub(crate) use self::eventually::{POLL, eventually};

/// The number of threads of this process whose name starts with `prefix`. Linux keeps 15 bytes of a name.
pub(crate) fn threads_named(prefix: &str) -> usize {
    let prefix = &prefix.as_bytes()[..prefix.len().min(15)];
    thread_names().iter().filter(|name| name.starts_with(prefix)).count()
}

/// The number of threads of this process, those of the test runner and of other tests included.
pub(crate) fn thread_count() -> usize {
    thread_names().len()
}

fn thread_names() -> Vec<Vec<u8>> {
    let tasks = fs::read_dir("/proc/self/task").expect("a Linux /proc");
    // A thread that ends between the listing and the reading has no name any more.
    tasks.filter_map(|task| fs::read(task.ok()?.path().join("comm")).ok()).collect()
}
