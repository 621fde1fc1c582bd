//! A record of everything that is logged in this process, by whatever thread.
//!
//! Tests share it, so a test looks for a text that only it can cause, such as the name of its lock.

use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use log::{Level, LevelFilter, Log, Metadata};

#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) level: Level,
    pub(crate) target: String,
    pub(crate) message: String,
}

pub(crate) struct LogCapture {
    records: Mutex<Vec<Record>>,
}

static CAPTURE: LogCapture = LogCapture { records: Mutex::new(Vec::new()) };

impl LogCapture {
    /// Starts the recording if no test has done so yet.
    pub(crate) fn install() -> &'static Self {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            log::set_logger(&CAPTURE).expect("no other logger in the tests");
            log::set_max_level(LevelFilter::Trace);
        });
        &CAPTURE
    }

    /// All records whose message contains `text`, oldest first.
    pub(crate) fn records_containing(&self, text: &str) -> Vec<Record> {
        self.records().iter().filter(|record| record.message.contains(text)).cloned().collect()
    }

    fn records(&self) -> MutexGuard<'_, Vec<Record>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Log for LogCapture {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        // Formatted before the lock is taken: a `Debug` that logs must not deadlock.
        let message = record.args().to_string();
        let record = Record { level: record.level(), target: record.target().to_owned(), message };
        self.records().push(record);
    }

    fn flush(&self) {}
}
