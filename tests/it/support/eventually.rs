//! Waiting for a state instead of sleeping.

use std::thread;
use std::time::{Duration, Instant};

/// How often it looks.
pub(crate) const POLL: Duration = Duration::from_millis(5);

/// Waits until `reached` is true; panics naming `what` if that takes longer than `timeout`.
#[track_caller]
pub(crate) fn eventually(timeout: Duration, what: &str, mut reached: impl FnMut() -> bool) {
    let start = Instant::now();
    loop {
        // Read before the check, so that a slow check still gets one try after the deadline.
        let late = start.elapsed() >= timeout;
        if reached() {
            return;
        }
        assert!(!late, "not within {timeout:?}: {what}");
        thread::sleep(POLL);
    }
}
