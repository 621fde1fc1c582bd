//! What `crate::sync` names in unit tests: the originals for a thread outside of any simulation, simulated ones inside.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use super::scheduler::{self, Cause};
use crate::clock::{self, Moment};

/// A mutex.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T> {
    real: parking_lot::Mutex<T>,
}

/// Its guard.
pub(crate) struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    real: Option<parking_lot::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Mutex<T> {
        Mutex { real: parking_lot::Mutex::new(value) }
    }

    #[track_caller]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        scheduler::point("lock");
        MutexGuard { mutex: self, real: Some(self.take()) }
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(&self.real).addr()
    }

    #[track_caller]
    fn take(&self) -> parking_lot::MutexGuard<'_, T> {
        if !scheduler::inside() {
            return self.real.lock();
        }
        loop {
            if let Some(guard) = self.real.try_lock() {
                scheduler::holds(true);
                return guard;
            }
            scheduler::block("mutex", Cause::Mutex(self.address()), None);
        }
    }
}

impl<T> MutexGuard<'_, T> {
    fn give(&mut self) {
        if self.real.take().is_some() && scheduler::inside() {
            scheduler::holds(false);
            scheduler::wake(Cause::Mutex(self.mutex.address()), true);
        }
    }
}

impl<T> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        self.give();
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.real.as_ref().expect("it is locked")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.real.as_mut().expect("it is locked")
    }
}

/// A condition variable.
#[derive(Debug, Default)]
pub(crate) struct Condvar {
    real: parking_lot::Condvar,
}

/// How a timed wait ended.
pub(crate) struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    pub(crate) fn timed_out(&self) -> bool {
        self.0
    }
}

impl Condvar {
    pub(crate) fn new() -> Condvar {
        Condvar::default()
    }

    #[track_caller]
    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        if scheduler::inside() {
            self.block(guard, None);
        } else {
            self.real.wait(guard.real.as_mut().expect("it is locked"));
        }
    }

    #[track_caller]
    pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, time: Duration) -> WaitTimeoutResult {
        if scheduler::inside() {
            WaitTimeoutResult(!self.block(guard, Some(clock::now().after(time))))
        } else {
            let ended = self.real.wait_for(guard.real.as_mut().expect("it is locked"), time);
            WaitTimeoutResult(ended.timed_out())
        }
    }

    pub(crate) fn notify_one(&self) {
        scheduler::wake(Cause::Condvar(self.address()), false);
        self.real.notify_one();
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(&self.real).addr()
    }

    /// Unlocking and blocking are one step: there is no point in between.
    #[track_caller]
    fn block<T>(&self, guard: &mut MutexGuard<'_, T>, until: Option<Moment>) -> bool {
        guard.give();
        let woken = scheduler::block("wait", Cause::Condvar(self.address()), until);
        guard.real = Some(guard.mutex.take());
        woken
    }
}

/// The channel of the renewal.
pub(crate) mod channel {
    use std::sync::Arc;
    use std::time::Duration;

    pub(crate) use crossbeam_channel::{RecvTimeoutError, TryRecvError, TrySendError};

    use super::{Cause, clock, scheduler};

    pub(crate) struct Sender<T> {
        real: Option<crossbeam_channel::Sender<T>>,
        both: Arc<u8>,
    }

    pub(crate) struct Receiver<T> {
        real: crossbeam_channel::Receiver<T>,
        both: Arc<u8>,
    }

    pub(crate) fn bounded<T>(capacity: usize) -> (Sender<T>, Receiver<T>) {
        let (sender, receiver) = crossbeam_channel::bounded(capacity);
        let both = Arc::new(0);
        (Sender { real: Some(sender), both: Arc::clone(&both) }, Receiver { real: receiver, both })
    }

    fn cause(both: &Arc<u8>) -> Cause {
        Cause::Channel(Arc::as_ptr(both).addr())
    }

    impl<T> Sender<T> {
        #[track_caller]
        pub(crate) fn try_send(&self, message: T) -> Result<(), TrySendError<T>> {
            scheduler::point("send");
            let sent = self.real.as_ref().expect("it is open").try_send(message);
            scheduler::wake(cause(&self.both), true);
            sent
        }
    }

    impl<T> Drop for Sender<T> {
        fn drop(&mut self) {
            self.real = None;
            scheduler::wake(cause(&self.both), true);
        }
    }

    impl<T> Receiver<T> {
        #[track_caller]
        pub(crate) fn recv_timeout(&self, time: Duration) -> Result<T, RecvTimeoutError> {
            if !scheduler::inside() {
                return self.real.recv_timeout(time);
            }
            let until = clock::now().after(time);
            scheduler::point("receive");
            loop {
                match self.real.try_recv() {
                    Ok(message) => return Ok(message),
                    Err(TryRecvError::Disconnected) => return Err(RecvTimeoutError::Disconnected),
                    Err(TryRecvError::Empty) if clock::now() >= until => {
                        return Err(RecvTimeoutError::Timeout);
                    }
                    Err(TryRecvError::Empty) => {
                        scheduler::block("receive", cause(&self.both), Some(until));
                    }
                }
            }
        }
    }
}

/// Threads.
pub(crate) mod thread {
    use std::io;
    use std::time::Duration;

    pub(crate) use std::thread::{ThreadId, current, panicking};

    use super::scheduler;

    /// Starts a thread.
    #[derive(Default)]
    pub(crate) struct Builder {
        name: String,
    }

    impl Builder {
        pub(crate) fn new() -> Builder {
            Builder::default()
        }

        pub(crate) fn name(self, name: String) -> Builder {
            Builder { name }
        }

        pub(crate) fn spawn(self, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
            if scheduler::inside() {
                let started = scheduler::spawn(&self.name, false, body);
                return started.map(drop).ok_or_else(|| io::Error::from(io::ErrorKind::WouldBlock));
            }
            std::thread::Builder::new().name(self.name).spawn(body).map(drop)
        }
    }

    #[track_caller]
    pub(crate) fn park_timeout(time: Duration) {
        if scheduler::inside() {
            scheduler::sleep(time);
        } else {
            std::thread::park_timeout(time);
        }
    }
}

/// Atomics, each access a scheduling point.
pub(crate) mod atomic {
    pub(crate) use std::sync::atomic::Ordering;

    use super::scheduler;

    #[derive(Debug)]
    pub(crate) struct AtomicBool(std::sync::atomic::AtomicBool);

    impl AtomicBool {
        pub(crate) const fn new(value: bool) -> AtomicBool {
            AtomicBool(std::sync::atomic::AtomicBool::new(value))
        }

        #[track_caller]
        pub(crate) fn load(&self, order: Ordering) -> bool {
            scheduler::point("load");
            self.0.load(order)
        }

        #[track_caller]
        pub(crate) fn store(&self, value: bool, order: Ordering) {
            scheduler::point("store");
            self.0.store(value, order);
        }

        #[track_caller]
        pub(crate) fn swap(&self, value: bool, order: Ordering) -> bool {
            scheduler::point("swap");
            self.0.swap(value, order)
        }
    }

    #[derive(Debug)]
    pub(crate) struct AtomicU64(std::sync::atomic::AtomicU64);

    impl AtomicU64 {
        pub(crate) const fn new(value: u64) -> AtomicU64 {
            AtomicU64(std::sync::atomic::AtomicU64::new(value))
        }

        #[track_caller]
        pub(crate) fn load(&self, order: Ordering) -> u64 {
            scheduler::point("load");
            self.0.load(order)
        }

        #[track_caller]
        pub(crate) fn store(&self, value: u64, order: Ordering) {
            scheduler::point("store");
            self.0.store(value, order);
        }

        #[track_caller]
        pub(crate) fn fetch_max(&self, value: u64, order: Ordering) -> u64 {
            scheduler::point("fetch_max");
            self.0.fetch_max(value, order)
        }
    }
}
