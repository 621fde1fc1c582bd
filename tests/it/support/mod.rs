//! What the tests stand on: private servers, faults, other processes, and records of what happened.

pub(crate) mod child;
pub(crate) mod dice;
mod eventually;
pub(crate) mod leaving;
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
pub(crate) mod scripts;
pub(crate) mod seen;
pub(crate) mod server;

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

pub(crate) use self::eventually::{POLL, eventually};

/// What a call gives and how long it took, less the time for which the machine let nobody run.
///
/// A thread beside the call sleeps a little again and again. What it sleeps too long, by more than a busy machine's
/// scheduling explains, the call cannot be blamed for.
pub(crate) fn timed<T>(call: impl FnOnce() -> T) -> (T, Duration) {
    const NAP: Duration = Duration::from_millis(5);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let napper = scope.spawn(|| {
            let mut stolen = Duration::ZERO;
            while !done.load(Ordering::Relaxed) {
                let start = Instant::now();
                thread::sleep(NAP);
                let late = start.elapsed().saturating_sub(NAP);
                if late > Duration::from_millis(20) {
                    stolen += late;
                }
            }
            stolen
        });
        let start = Instant::now();
        let result = call();
        let took = start.elapsed();
        done.store(true, Ordering::Relaxed);
        (result, took.saturating_sub(napper.join().expect("no panic")))
    })
}

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

/// Sets a flag when it is dropped: for threads that run until then, which must end when their test fails, too.
pub(crate) struct SetOnDrop<'a>(pub(crate) &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
