//! Ends what the tests started when the test process ends in any way at all, SIGKILL and Ctrl-C included.
//!
//! A small shell process reads what to clean up from a pipe. Only this process holds the other end, so the
//! end of the pipe is the end of this process, and no destructor or exit handler has to run for it.

use std::io::Write;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};

// One word and its object a line; `read` leaves spaces in a path alone. The bounded wait lets a server that
// was asked to end stop writing before its directory is removed.
const SCRIPT: &str = r#"
trap '' INT TERM HUP QUIT
pids=''
while read -r verb what; do
  case $verb in
    KILL|QUIT) pids="$pids $what:$verb" ;;
    done) kept=''; for p in $pids; do case $p in "$what":*) ;; *) kept="$kept $p" ;; esac; done; pids=$kept ;;
    dir) set -- "$@" "$what" ;;
  esac
done
for p in $pids; do kill -s CONT "${p%:*}"; kill -s "${p#*:}" "${p%:*}"; done 2>/dev/null
for p in $pids; do
  tries=0
  while [ $tries -lt 30 ] && kill -0 "${p%:*}" 2>/dev/null; do sleep 0.1; tries=$((tries + 1)); done
done
for d in "$@"; do rm -rf -- "$d"; done
"#;

/// The signal that ends a process whose tests are gone.
#[derive(Clone, Copy)]
pub(crate) enum Last {
    /// SIGKILL.
    Kill,
    /// SIGQUIT, which PostgreSQL takes as: end at once, your own children included.
    Quit,
}

/// Ends process `pid` with this one.
pub(crate) fn watch(pid: u32, last: Last) {
    match last {
        Last::Kill => tell(&format!("KILL {pid}\n")),
        Last::Quit => tell(&format!("QUIT {pid}\n")),
    }
}

/// Forgets `pid`. To be called before the process is waited for: after that its number may be another's.
pub(crate) fn forget(pid: u32) {
    tell(&format!("done {pid}\n"));
}

/// Removes the directory `path` after this process, should it still be there.
pub(crate) fn remove_at_end(path: &Path) {
    tell(&format!("dir {}\n", path.display()));
}

fn tell(line: &str) {
    static SHELL: OnceLock<(Mutex<ChildStdin>, Child)> = OnceLock::new();
    let (pipe, _) = SHELL.get_or_init(|| {
        let mut shell = Command::new("sh")
            .args(["-c", SCRIPT, "reaper"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("sh");
        (Mutex::new(shell.stdin.take().expect("a pipe")), shell)
    });
    let mut pipe = pipe.lock().unwrap_or_else(PoisonError::into_inner);
    pipe.write_all(line.as_bytes()).expect("the reaper reads");
}
