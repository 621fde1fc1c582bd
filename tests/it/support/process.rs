//! A process that a test started: signalled by its own id, and ended with its value.

use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use super::eventually;
use super::reaper::{self, Last};

/// How long the kernel may take to stop, continue or end a process on a busy machine.
const SIGNAL_PATIENCE: Duration = Duration::from_secs(10);

pub(crate) struct Process {
    child: Child,
    ended: Option<ExitStatus>,
}

impl Process {
    #[track_caller]
    pub(crate) fn spawn(command: &mut Command, last: Last) -> Self {
        let child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        reaper::watch(child.id(), last);
        Self { child, ended: None }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn take_stdin(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    pub(crate) fn take_stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// Its exit status if it has ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() && self.is_waitable() {
            reaper::forget(self.child.id());
            self.ended = Some(self.child.wait().expect("a child of this process"));
        }
        self.ended
    }

    /// Waits until it ends; `None` if it still runs after `timeout`.
    pub(crate) fn wait(&mut self, timeout: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        while self.ended().is_none() && start.elapsed() < timeout {
            std::thread::sleep(super::POLL);
        }
        self.ended
    }

    /// SIGKILL, and waits until it is gone.
    pub(crate) fn kill(&mut self) {
        if self.ended().is_none() {
            self.signal(Signal::KILL);
            assert!(self.wait(SIGNAL_PATIENCE).is_some(), "process {} survives SIGKILL", self.id());
        }
    }

    /// SIGTERM, and waits up to `timeout` for its end.
    pub(crate) fn terminate(&mut self, timeout: Duration) -> Option<ExitStatus> {
        self.end_with(Signal::TERM, timeout)
    }

    /// SIGQUIT, and waits up to `timeout` for its end.
    pub(crate) fn quit(&mut self, timeout: Duration) -> Option<ExitStatus> {
        self.end_with(Signal::QUIT, timeout)
    }

    /// SIGSTOP; returns when every thread of it stands still.
    #[track_caller]
    pub(crate) fn freeze(&self) {
        self.signal(Signal::STOP);
        eventually(SIGNAL_PATIENCE, "the process stops", || {
            self.state(WaitIdOptions::STOPPED).is_some_and(|status| status.stopped())
        });
    }

    /// SIGCONT.
    pub(crate) fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    fn end_with(&mut self, signal: Signal, timeout: Duration) -> Option<ExitStatus> {
        if self.ended().is_none() {
            self.signal(signal);
        }
        self.wait(timeout)
    }

    fn signal(&self, signal: Signal) {
        // The id is ours until the child is waited for, and only `ended` does that.
        if self.ended.is_none() {
            kill_process(self.pid(), signal).expect("a child of this process");
        }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    fn is_waitable(&self) -> bool {
        self.state(WaitIdOptions::EXITED).is_some()
    }

    fn state(&self, of: WaitIdOptions) -> Option<rustix::process::WaitIdStatus> {
        // NOWAIT leaves the end of the process to `Child::wait`, which must be the one to reap it.
        let look = WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(self.pid()), of | look).ok().flatten()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended().is_none() {
            self.signal(Signal::KILL);
            // A stuck process must not turn a failing test into an abort: no assertion here.
            self.wait(SIGNAL_PATIENCE);
        }
    }
}
