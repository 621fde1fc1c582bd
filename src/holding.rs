//! A lease as the process that holds it sees it: until when it is good, whether it was lost, how it ends.
//!
//! Invariant: by the local clock a lease never looks good for longer than the server keeps it. Every proof counts from
//! the *sending* of the call that gave it, and 1 % is taken off for clocks that drift.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};
use log::error;

use crate::backoff::Backoff;
use crate::clock::{self, Moment};
use crate::error::Error;
use crate::fence::Fence;
use crate::protocol::{Command, Reply, TicketId};
use crate::renewal::Worker;
use crate::settings::Settings;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::thread::{self, ThreadId};
use crate::waiting::{Attempt, Grant, Room};

/// The longest pause between attempts to release.
const RELEASE_RETRY: Duration = Duration::from_millis(200);

/// What the holder's handle and the renewal thread share of one lease.
pub(crate) struct Holding {
    pub(crate) room: Arc<Room>,
    pub(crate) settings: Arc<Settings>,
    pub(crate) ticket: TicketId,
    pub(crate) fence: Fence,
    pub(crate) position: u64,
    /// When it began.
    pub(crate) started: Moment,
    /// The sending of the newest call that proved it, in nanoseconds of [`Moment`].
    proven: AtomicU64,
    /// Set once, for good.
    lost: AtomicBool,
    /// Set when its release begins: a refused renewal is no loss from then on.
    ending: AtomicBool,
    /// How many waited when it was last renewed.
    pub(crate) waiters: AtomicU64,
    /// Who wants to hear of its loss.
    listeners: Mutex<Vec<Sender<()>>>,
}

impl Holding {
    /// When a call that proved the lease was last sent.
    pub(crate) fn proven(&self) -> Moment {
        Moment::from_nanos(self.proven.load(Ordering::Acquire))
    }

    /// Until when the lease is good by the local clock.
    pub(crate) fn good_until(&self) -> Moment {
        self.proven().after(self.settings.good_for())
    }

    /// When renewing ends.
    pub(crate) fn held_until(&self) -> Moment {
        self.started.after(self.settings.max_hold)
    }

    /// Counts the lease from `sent`, when a call was sent that proved it.
    pub(crate) fn prove(&self, sent: Moment) {
        self.proven.fetch_max(sent.as_nanos(), Ordering::AcqRel);
    }

    /// Whether the release has begun.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    /// Whether the lease is known to be lost.
    pub(crate) fn was_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Whether the lease is lost, by what was heard or by the clock.
    pub(crate) fn is_lost(&self) -> bool {
        if !self.was_lost() && !self.is_ending() && clock::now() >= self.good_until() {
            self.lose("it ran out by the local clock");
        }
        self.was_lost()
    }

    /// Declares the lease lost, once, and tells everybody.
    pub(crate) fn lose(&self, why: &str) {
        if self.lost.swap(true, Ordering::AcqRel) {
            return;
        }
        error!("lease on `{}` was lost (fence {}): {why}", self.room.keys.name, self.fence);
        // Whoever waits for it now waits for somebody else.
        self.room.own(&self.ticket, None);
        for listener in self.listeners.lock().drain(..) {
            let _ = listener.try_send(());
        }
    }

    /// A channel that gets one message when the lease is lost, and is closed when it ends otherwise.
    pub(crate) fn on_lost(&self) -> Receiver<()> {
        let (sender, receiver) = crossbeam_channel::bounded(1);
        let lost = self.is_lost();
        let mut listeners = self.listeners.lock();
        // `lose` sets the flag first and tells the list second, so nobody who looks with the list in hand is left out.
        if lost || self.was_lost() {
            let _ = sender.try_send(());
        } else {
            listeners.push(sender);
        }
        receiver
    }

    pub(crate) fn lost_error(&self) -> Error {
        Error::LeaseLost { lock: self.room.keys.name.clone(), fence: self.fence }
    }
}

/// A lease in the hands of its holder: what [`LockGuard`](crate::LockGuard) and [`Lease`](crate::Lease) have in common.
pub(crate) struct Held {
    pub(crate) holding: Arc<Holding>,
    worker: Arc<Worker>,
    /// The thread that has it, if one has it for itself.
    owner: Mutex<Option<ThreadId>>,
    /// Whether the release was sent.
    ended: bool,
}

impl Held {
    /// Starts a lease with the grant that `attempt` got. `bound` says whether it belongs to the calling thread.
    pub(crate) fn begin(mut attempt: Attempt, grant: Grant, bound: bool) -> Result<Held, Error> {
        let Some(fence) = Fence::new(grant.fence) else {
            return Err(Error::Protocol(format!("{} is not a fence", grant.fence)));
        };
        let owner = bound.then(|| thread::current().id());
        let holding = Arc::new(Holding {
            room: Arc::clone(attempt.room()),
            settings: Arc::clone(attempt.settings()),
            ticket: attempt.ticket().clone(),
            fence,
            position: grant.position,
            started: grant.since,
            proven: AtomicU64::new(grant.since.as_nanos()),
            lost: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            waiters: AtomicU64::new(0),
            listeners: Mutex::new(Vec::new()),
        });
        // Without a thread there is no renewal; the attempt withdraws itself on the way out.
        let worker = attempt.room().shared.renewals.start(&holding)?;
        attempt.settle(grant, owner);
        Ok(Held { holding, worker, owner: Mutex::new(owner), ended: false })
    }

    /// Notes that the calling thread uses the lease: whoever moved it here may lock again.
    pub(crate) fn touch(&self) {
        let mut owner = self.owner.lock();
        if let Some(known) = *owner {
            let me = thread::current().id();
            if known != me {
                *owner = Some(me);
                self.holding.room.own(&self.holding.ticket, Some(me));
            }
        }
    }

    /// Makes the lease belong to no thread in particular.
    pub(crate) fn unbind(&self) {
        *self.owner.lock() = None;
        self.holding.room.own(&self.holding.ticket, None);
    }

    /// Gives the lease back if it is still good, else an error.
    pub(crate) fn ensure_held(&self) -> Result<(), Error> {
        if self.holding.is_lost() { Err(self.holding.lost_error()) } else { Ok(()) }
    }

    /// How long the lease is good unless renewed.
    pub(crate) fn remaining(&self) -> Duration {
        if self.holding.is_lost() { Duration::ZERO } else { self.holding.good_until().left() }
    }

    /// Releases the lease, trying until the release bound; the second time it does nothing.
    pub(crate) fn end(&mut self) -> Result<(), Error> {
        if std::mem::replace(&mut self.ended, true) {
            return Ok(());
        }
        let holding = &self.holding;
        // In this order: a renewal that is refused because the release came first must find the flag.
        holding.ending.store(true, Ordering::Release);
        holding.room.shared.renewals.stop(&self.worker, holding);
        let began = clock::now();
        let result = release(holding);
        let room = &holding.room;
        if let Some(unanswered) = room.end(&holding.ticket, holding.fence.get()) {
            // An `acquire` of ours that was never answered takes the lock anew, for nobody, if it comes after the lease
            // has ended. As long as the ticket held the lock, it did no harm.
            let arrived = unanswered.after(room.shared.call_timeout);
            if arrived > began || result.is_err() {
                room.shared.withdrawals.add_at(room, &holding.settings, &holding.ticket, arrived);
            }
        }
        holding.listeners.lock().clear();
        result
    }
}

/// Sends the release until it is answered or the bound is reached.
fn release(holding: &Holding) -> Result<(), Error> {
    let room = &holding.room;
    let settings = &holding.settings;
    let deadline = clock::now().after(settings.release_bound);
    let command = Command::Release { ticket: holding.ticket.clone(), fence: holding.fence.get() };
    let mut backoff = Backoff::new(RELEASE_RETRY);
    let mut sent_before = false;
    loop {
        let sent = clock::now();
        let failure = match room.call(settings, &command, deadline) {
            Ok(Reply::Released { next }) => {
                room.hear(settings, next, Some(sent));
                return Ok(());
            }
            Ok(Reply::Already { next }) => {
                room.hear(settings, next, None);
                // Only a release of ours can have come first. The server remembers lost leases for `idle`, and this
                // one was whole when it was last proved: an answer that is here any later, or one to the first release
                // we send, may have forgotten that it was lost.
                let forgotten = clock::now() >= holding.proven().after(settings.idle);
                let ours = sent_before && !holding.was_lost() && !forgotten;
                return if ours { Ok(()) } else { Err(holding.lost_error()) };
            }
            Ok(Reply::Lost { next }) => {
                room.hear(settings, next, None);
                return Err(holding.lost_error());
            }
            Ok(other) => return Err(Error::Protocol(format!("release was answered with {other:?}"))),
            Err(failure) => failure,
        };
        sent_before |= failure.sent;
        let pause = backoff.pause();
        if !failure.retry || clock::now().after(pause) >= deadline {
            // It lapses by itself within a lease; sooner if this can still be delivered.
            room.shared.withdrawals.add(room, settings, &holding.ticket, false);
            let ran_out = clock::now() >= holding.good_until();
            return Err(if ran_out { holding.lost_error() } else { failure.error });
        }
        thread::park_timeout(pause);
    }
}
