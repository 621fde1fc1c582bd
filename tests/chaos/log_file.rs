//! The log of a run in files, one for each process, by one clock.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::history::{Event, What};

/// How often it is looked whether the machine stalls, and when it does.
const BEAT: Duration = Duration::from_millis(25);
const STALL: Duration = Duration::from_millis(150);

/// Nanoseconds since the machine started, time asleep included.
pub(crate) fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// A file that one process writes events to. A line is one `write`, so a SIGKILL cuts none in two.
#[derive(Debug)]
pub(crate) struct Log {
    file: File,
}

impl Log {
    pub(crate) fn create(path: &Path) -> Self {
        let file = File::options().create(true).append(true).open(path);
        Self { file: file.expect("a file for the log") }
    }

    /// Writes down what happened at `at`.
    pub(crate) fn at(&self, at: u64, what: What) {
        let mut line = serde_json::to_vec(&Event { at, what }).expect("an event as JSON");
        line.push(b'\n');
        (&self.file).write_all(&line).expect("a line in the log");
    }

    /// Writes down what has just happened.
    pub(crate) fn now(&self, what: What) {
        self.at(now(), what);
    }
}

/// Writes down when this machine kept `process`, or the scheduler, from running: no fault of the schedule, but one that
/// explains a timeout. Ends when nobody else has the log any more.
pub(crate) fn watch_for_stalls(log: &Arc<Log>, process: Option<u32>) {
    let log = Arc::downgrade(log);
    thread::spawn(move || {
        let mut last = now();
        while let Some(log) = log.upgrade() {
            thread::sleep(BEAT);
            let at = now();
            if at - last > u64::try_from(STALL.as_nanos()).expect("a sane number") {
                log.at(at, What::Fault { fault: "machine stalled".to_owned(), process, from: last, to: at });
            }
            last = at;
        }
    });
}

/// All events of the logs in `dir`, in the order of their times.
pub(crate) fn read(dir: &Path) -> Vec<Event> {
    let files = fs::read_dir(dir).expect("a directory of logs").map(|file| file.expect("a file").path());
    let logs = files.filter(|file| file.extension().is_some_and(|kind| kind == "log"));
    let texts: Vec<String> = logs.map(|log| fs::read_to_string(log).expect("a log")).collect();
    let lines = texts.iter().flat_map(|text| text.lines());
    let mut events: Vec<Event> =
        lines.map(|line| serde_json::from_str(line).unwrap_or_else(|why| panic!("{why}: {line}"))).collect();
    // Stable: what one thread wrote at one time keeps its order.
    events.sort_by_key(|event| event.at);
    events
}
