//! A wall clock for one server that can be moved while the server runs.
//!
//! It is honest because the server itself reads it: a small library, compiled here and preloaded, answers
//! `gettimeofday` and `clock_gettime(CLOCK_REALTIME)` in the server's process. Nothing in the scripts is changed, and
//! the server's `TIME`, its expiry of keys and its timers follow. (libfaketime cannot do it: it allocates while it reads
//! the clock, and jemalloc reads the clock while it allocates.)

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicI64, Ordering};

pub(crate) struct ServerClock {
    library: PathBuf,
    file: PathBuf,
    offset_us: AtomicI64,
}

impl ServerClock {
    /// Makes the library and the file in `dir`; an error says why there is none.
    pub(crate) fn make(dir: &Path) -> Result<Self, String> {
        if !cfg!(target_os = "linux") {
            return Err("it is made for Linux".to_owned());
        }
        let (source, library, file) = (dir.join("clock.c"), dir.join("clock.so"), dir.join("clock"));
        fs::write(&source, include_str!("clock_step.c")).expect("a file");
        fs::write(&file, 0_i64.to_ne_bytes()).expect("a file");
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        let mut compile = Command::new(&compiler);
        compile.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source);
        match compile.output() {
            Ok(output) if output.status.success() => Ok(Self { library, file, offset_us: AtomicI64::new(0) }),
            Ok(output) => Err(format!("{compiler}: {}", String::from_utf8_lossy(&output.stderr))),
            Err(why) => Err(format!("{compiler}: {why}")),
        }
    }

    /// What a server needs in its environment.
    pub(crate) fn env(&self) -> [(&'static str, &Path); 2] {
        [("LD_PRELOAD", &self.library), ("CHAOS_CLOCK", &self.file)]
    }

    /// Moves the clock.
    pub(crate) fn step(&self, by_us: i64) {
        let offset = self.offset_us.fetch_add(by_us, Ordering::SeqCst) + by_us;
        let file = File::options().write(true).open(&self.file).expect("the clock's file");
        // Eight aligned bytes in one write: the server never reads half of them.
        file.write_all_at(&offset.to_ne_bytes(), 0).expect("the clock's file");
    }

    pub(crate) fn offset_us(&self) -> i64 {
        self.offset_us.load(Ordering::SeqCst)
    }
}
