//! Renewal: one thread per lease, kept for the next lease for a while.
//!
//! Invariant: a thread stands in the list of idle ones exactly while it has no lease, no call under way and has not
//! retired; so a lease is never given to a thread that may be stuck in the call of another one.
//!
//! A thread looks at its slot at its own pace: beginning or ending a lease needs no signal unless the thread would
//! look too late.

use std::sync::Arc;
use std::time::Duration;

use log::{debug, error};

use crate::backoff::Backoff;
use crate::clock::{self, Moment};
use crate::error::Error;
use crate::holding::Holding;
use crate::protocol::{Command, Reply};
use crate::sync::atomic::Ordering;
use crate::sync::channel::{self, Receiver, RecvTimeoutError, Sender};
use crate::sync::{Mutex, thread};

/// An idle thread ends after this long.
const IDLE: Duration = Duration::from_secs(10);
/// More idle threads than this end at once.
const IDLE_THREADS: usize = 64;
/// A lease is renewed when this part of it is over: three more attempts fit before it lapses.
const BEATS: u32 = 4;
/// The shortest bound on one renewal; below it an ordinary hiccup would cost a connection.
const SHORTEST_CALL: Duration = Duration::from_millis(20);

/// The renewal threads of one client.
pub(crate) struct Renewals {
    idle: Arc<Mutex<Vec<Arc<Worker>>>>,
}

/// One renewal thread.
pub(crate) struct Worker {
    slot: Mutex<Slot>,
    /// Has the thread look at its slot now.
    wake: Sender<()>,
}

/// What a renewal thread is on.
struct Slot {
    /// The lease it renews.
    lease: Option<Arc<Holding>>,
    /// Whether it is in a call.
    busy: bool,
    /// When it looks at its slot next.
    looks_at: Moment,
    /// When the lease is due for renewal.
    due: Moment,
    /// Set when the thread is to end, or has.
    retired: bool,
}

impl Renewals {
    pub(crate) fn new() -> Renewals {
        Renewals { idle: Arc::new(Mutex::new(Vec::new())) }
    }

    /// Has `holding` renewed until [`stop`](Renewals::stop) or its loss.
    pub(crate) fn start(&self, holding: &Arc<Holding>) -> Result<Arc<Worker>, Error> {
        let due = holding.proven().after(holding.settings.lease / BEATS).min(holding.held_until());
        loop {
            let Some(worker) = self.idle.lock().pop() else { return self.spawn(holding, due) };
            let mut slot = worker.slot.lock();
            if slot.retired {
                continue;
            }
            slot.lease = Some(Arc::clone(holding));
            slot.due = due;
            if slot.looks_at > due {
                // A full channel means that it is about to look anyway.
                let _ = worker.wake.try_send(());
            }
            drop(slot);
            return Ok(worker);
        }
    }

    /// Starts a thread for `holding`.
    fn spawn(&self, holding: &Arc<Holding>, due: Moment) -> Result<Arc<Worker>, Error> {
        let (wake, woken) = channel::bounded(1);
        let slot = Slot {
            lease: Some(Arc::clone(holding)),
            busy: false,
            looks_at: Moment::NEVER,
            due,
            retired: false,
        };
        let worker = Arc::new(Worker { slot: Mutex::new(slot), wake });
        let (run, idle) = (Arc::clone(&worker), Arc::clone(&self.idle));
        let thread = thread::Builder::new().name("fifo-renew".into()).spawn(move || run.run(&woken, &idle));
        match thread {
            Ok(_) => Ok(worker),
            Err(why) => {
                Err(Error::Thread { lock: holding.room.keys.name.clone(), why: why.to_string().into() })
            }
        }
    }

    /// Stops the renewal of `holding`. Does not wait for a call that is under way: its answer changes nothing.
    pub(crate) fn stop(&self, worker: &Arc<Worker>, holding: &Arc<Holding>) {
        let mut slot = worker.slot.lock();
        // After its loss the thread has left it, and may be on another lease by now.
        if slot.lease.as_ref().is_some_and(|lease| Arc::ptr_eq(lease, holding)) {
            slot.lease = None;
            if !slot.busy {
                rest(worker, &mut slot, &self.idle);
            }
        }
    }
}

impl Drop for Renewals {
    /// Ends the idle threads; the others end with their leases.
    fn drop(&mut self) {
        // Out of the list first: a thread takes its slot before the list, never the other way round.
        let idle = std::mem::take(&mut *self.idle.lock());
        for worker in idle {
            worker.slot.lock().retired = true;
            let _ = worker.wake.try_send(());
        }
    }
}

/// Puts a thread without a lease among the idle ones, or has it end if there are enough.
fn rest(worker: &Arc<Worker>, slot: &mut Slot, idle: &Mutex<Vec<Arc<Worker>>>) {
    let mut idle = idle.lock();
    if idle.len() < IDLE_THREADS {
        idle.push(Arc::clone(worker));
    } else {
        slot.retired = true;
        let _ = worker.wake.try_send(());
    }
}

impl Worker {
    fn run(self: Arc<Worker>, woken: &Receiver<()>, idle: &Mutex<Vec<Arc<Worker>>>) {
        let mut retry = Backoff::new(Duration::ZERO);
        // While idle: how long it looks away, and since when there is nothing to do.
        let mut pace = IDLE;
        let mut idle_since = None;
        loop {
            let mut slot = self.slot.lock();
            if slot.retired {
                return;
            }
            let now = clock::now();
            slot.looks_at = match slot.lease.clone() {
                Some(holding) => {
                    idle_since = None;
                    pace = holding.settings.lease / BEATS;
                    if slot.due > now {
                        slot.due
                    } else {
                        slot.busy = true;
                        drop(slot);
                        let next = beat(&holding, &mut retry);
                        let mut slot = self.slot.lock();
                        slot.busy = false;
                        match next {
                            Some(due) => slot.due = due,
                            None => slot.lease = None,
                        }
                        if slot.lease.is_none() {
                            rest(&self, &mut slot, idle);
                        }
                        continue;
                    }
                }
                None => {
                    let since = *idle_since.get_or_insert(now);
                    if now.since(since) >= IDLE && retire(&self, &mut slot, idle) {
                        return;
                    }
                    // Looking less and less often: right after a lease the next one is likely to be like it.
                    let look =
                        now.after(pace).min(since.after(IDLE)).max(now.after(Duration::from_millis(1)));
                    pace = (pace * 2).min(IDLE);
                    look
                }
            };
            let wait = slot.looks_at.since(now);
            drop(slot);
            if let Err(RecvTimeoutError::Disconnected) = woken.recv_timeout(wait) {
                return;
            }
        }
    }
}

/// Takes an idle thread out of the list for good, unless somebody has just taken it for a lease.
fn retire(worker: &Arc<Worker>, slot: &mut Slot, idle: &Mutex<Vec<Arc<Worker>>>) -> bool {
    let mut idle = idle.lock();
    let Some(at) = idle.iter().position(|other| Arc::ptr_eq(other, worker)) else { return false };
    idle.swap_remove(at);
    slot.retired = true;
    true
}

/// Renews once. Gives the time of the next renewal, or `None` if there is none.
fn beat(holding: &Holding, retry: &mut Backoff) -> Option<Moment> {
    let lease = holding.settings.lease;
    let sent = clock::now();
    if holding.is_ending() || holding.was_lost() {
        return None;
    }
    if sent >= holding.held_until() {
        holding.lose("max_hold is over; the holder may be stuck");
        return None;
    }
    if sent >= holding.good_until() {
        holding.lose("no renewal came through while it was good");
        return None;
    }
    let since = sent.since(holding.proven());
    if since > lease / 2 {
        error!(
            "renewal of the lease on `{}` is late: {since:?} of {lease:?} are over; raise the lease, or look at what \
             keeps this process or the server",
            holding.room.keys.name
        );
    }
    // A call must not use up the time for the next one.
    let bound = holding.room.shared.call_timeout.min((lease / BEATS).max(SHORTEST_CALL));
    let command = Command::Renew { ticket: holding.ticket.clone(), fence: holding.fence.get() };
    match holding.room.call(&holding.settings, &command, sent.after(bound)) {
        Ok(Reply::Renewed { waiters }) => {
            holding.prove(sent);
            holding.waiters.store(waiters, Ordering::Relaxed);
            *retry = Backoff::new(lease / (2 * BEATS));
            Some(sent.after(lease / BEATS).min(holding.held_until()))
        }
        Ok(Reply::Lost { next }) => {
            holding.room.hear(&holding.settings, next, None);
            // One refusal is final; but one that met our own release is no loss.
            if !holding.is_ending() {
                holding.lose("the server refused to renew it");
            }
            None
        }
        Ok(other) => {
            error!("renewal of the lease on `{}` was answered with {other:?}", holding.room.keys.name);
            Some(clock::now().after(retry.pause()).min(holding.good_until()))
        }
        Err(failure) => {
            debug!("renewal of the lease on `{}` failed: {}", holding.room.keys.name, failure.error);
            Some(clock::now().after(retry.pause()).min(holding.good_until()).min(holding.held_until()))
        }
    }
}
