//! Another process that plays a role: this test binary, run again.
//!
//! Parent and child talk in lines. The child's begin with a marker, for the test runner writes there, too.

use std::env;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use super::process::Process;
use super::reaper::Last;
use super::roles;

const ROLE: &str = "FIFO_CHILD_ROLE";
const ARGS: &str = "FIFO_CHILD_ARGS";
/// Between two arguments: a character that no lock name or URL of ours has.
const SEPARATOR: char = '\x1f';
const MARKER: &str = ">>";

pub(crate) struct Child {
    process: Process,
    /// None once closed.
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Child {
    /// Starts a process that plays `role` (see `roles.rs`).
    #[track_caller]
    pub(crate) fn spawn(role: &str, args: &[&str]) -> Self {
        // The runner knows tests by their path within the crate.
        let (_, module) = module_path!().split_once("::").expect("a module of the test binary");
        let mut command = Command::new(env::current_exe().expect("the test binary"));
        command.args(["--exact", &format!("{module}::role_entry"), "--nocapture", "--test-threads=1"]);
        command.env(ROLE, role).env(ARGS, args.join(&SEPARATOR.to_string()));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Process::spawn(&mut command, Last::Kill);
        let stdin = process.take_stdin();
        let stdout = BufReader::new(process.take_stdout().expect("a pipe"));
        let (sender, lines) = channel();
        let read = move || {
            // The runner leaves its own line open before the first of ours, so the marker can stand anywhere.
            let lines = stdout.lines().map_while(Result::ok);
            for line in lines.filter_map(|line| Some(line.split_once(MARKER)?.1.to_owned())) {
                // A test that no longer listens is no reason to let the child block on a full pipe.
                let _ = sender.send(line);
            }
        };
        thread::Builder::new().name("child-lines".to_owned()).spawn(read).expect("a thread");
        Self { process, stdin, lines }
    }

    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    /// The next line that the child says; `None` if it says nothing for `timeout` or has ended.
    pub(crate) fn line(&self, timeout: Duration) -> Option<String> {
        self.lines.recv_timeout(timeout).ok()
    }

    /// Sends the child a line; false if it does not listen any more.
    pub(crate) fn send(&mut self, line: &str) -> bool {
        self.stdin.as_mut().is_some_and(|stdin| writeln!(stdin, "{line}").is_ok())
    }

    /// Tells the child that there will be no more lines.
    pub(crate) fn close_stdin(&mut self) {
        self.stdin = None;
    }

    pub(crate) fn sigkill(&mut self) {
        self.process.kill();
    }

    /// SIGSTOP; returns when all of the child's threads stand still.
    pub(crate) fn sigstop(&self) {
        self.process.freeze();
    }

    pub(crate) fn sigcont(&self) {
        self.process.thaw();
    }

    /// Waits until the child ends; `None` if it still runs after `timeout`.
    pub(crate) fn wait(&mut self, timeout: Duration) -> Option<ExitStatus> {
        self.process.wait(timeout)
    }
}

/// Says a line to the parent. For roles.
pub(crate) fn say(line: &str) {
    let mut stdout = io::stdout().lock();
    // A role goes on without its parent until it is killed: that is what some tests are about.
    let _ = writeln!(stdout, "{MARKER}{line}").and_then(|()| stdout.flush());
}

/// The parent's next line; `None` at the end. For roles.
pub(crate) fn hear() -> Option<String> {
    io::stdin().lines().next()?.ok()
}

/// Not a test: what a child process runs instead of tests.
#[test]
fn role_entry() {
    let Ok(role) = env::var(ROLE) else { return };
    let args = env::var(ARGS).unwrap_or_default();
    let args: Vec<&str> = if args.is_empty() { Vec::new() } else { args.split(SEPARATOR).collect() };
    roles::play(&role, &args);
}
