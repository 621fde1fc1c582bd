//! Tickets whose withdrawal could not be delivered at once, or has to be repeated; and grants to pass over.
//!
//! Invariant: a ticket that was given up is withdrawn as soon as the server answers, and the thread that gave it up
//! does not wait for that. A call that was sent and not answered may arrive even after its ticket's withdrawal, so such
//! a ticket is withdrawn twice: at once, and when the call must have arrived.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use log::{debug, warn};

use crate::backoff::Backoff;
use crate::clock::{self, Moment};
use crate::protocol::{Command, Reply, TicketId};
use crate::settings::Settings;
use crate::sync::{Condvar, Mutex, thread};
use crate::waiting::Room;

/// The longest pause between attempts.
const RETRY: Duration = Duration::from_millis(500);
/// Attempts end after this long, or a lease if that is longer: by then the ticket has lapsed or was passed over.
const GIVE_UP: Duration = Duration::from_secs(60);
/// The thread ends when there was nothing to do for this long.
const IDLE: Duration = Duration::from_secs(1);

/// The open withdrawals of one client.
pub(crate) struct Withdrawals {
    list: Arc<List>,
}

/// What callers and the thread share.
struct List {
    open: Mutex<Open>,
    added: Condvar,
}

struct Open {
    entries: VecDeque<Entry>,
    /// Whether a thread works on them.
    running: bool,
}

/// One ticket to withdraw, or one grant of it to pass over.
struct Entry {
    room: Arc<Room>,
    settings: Arc<Settings>,
    ticket: TicketId,
    /// Only the grant with this fence is given up, and the ticket keeps its place.
    fence: Option<u64>,
    /// Not before.
    at: Moment,
    /// Not after.
    until: Moment,
    /// Whether to withdraw it once more.
    again: bool,
    backoff: Backoff,
}

impl Withdrawals {
    pub(crate) fn new() -> Withdrawals {
        let open = Mutex::new(Open { entries: VecDeque::new(), running: false });
        Withdrawals { list: Arc::new(List { open, added: Condvar::new() }) }
    }

    /// Has `ticket` withdrawn in the background; `doubtful` if a call of it may still be on its way.
    pub(crate) fn add(&self, room: &Arc<Room>, settings: &Settings, ticket: &TicketId, doubtful: bool) {
        self.push(Entry { again: doubtful, ..Entry::new(room, settings, ticket) });
    }

    /// Has `ticket` withdrawn in the background, not before `at`.
    pub(crate) fn add_at(&self, room: &Arc<Room>, settings: &Settings, ticket: &TicketId, at: Moment) {
        self.push(Entry { at, ..Entry::new(room, settings, ticket) });
    }

    /// Has the grant of `ticket` with this fence released in the background.
    pub(crate) fn pass_over(&self, room: &Arc<Room>, settings: &Settings, ticket: &TicketId, fence: u64) {
        self.push(Entry { fence: Some(fence), ..Entry::new(room, settings, ticket) });
    }

    fn push(&self, entry: Entry) {
        let ticket = entry.ticket.clone();
        let mut open = self.list.open.lock();
        open.entries.push_back(entry);
        if open.running {
            self.list.added.notify_one();
            return;
        }
        let list = Arc::clone(&self.list);
        match thread::Builder::new().name("fifo-withdraw".into()).spawn(move || list.run()) {
            Ok(_) => open.running = true,
            Err(why) => {
                // Kept, it would keep the room and so this list for ever, since nobody works on it; so it is left to
                // the claim window or the lease.
                open.entries.pop_back();
                warn!("no thread to withdraw {ticket} with: {why}");
            }
        }
    }
}

impl List {
    fn run(&self) {
        let mut open = self.open.lock();
        loop {
            let now = clock::now();
            let first = open.entries.iter().map(|entry| entry.at).min();
            match first {
                None => {
                    if self.added.wait_for(&mut open, IDLE).timed_out() && open.entries.is_empty() {
                        // Under the lock: whoever adds the next one starts another thread.
                        open.running = false;
                        return;
                    }
                }
                Some(at) if at > now => {
                    self.added.wait_for(&mut open, at.since(now));
                }
                Some(at) => {
                    let due = open.entries.iter().position(|entry| entry.at == at);
                    let Some(mut entry) = due.and_then(|index| open.entries.remove(index)) else { continue };
                    drop(open);
                    let keep = entry.attempt();
                    open = self.open.lock();
                    if keep {
                        open.entries.push_back(entry);
                    }
                }
            }
        }
    }
}

impl Entry {
    fn new(room: &Arc<Room>, settings: &Settings, ticket: &TicketId) -> Entry {
        let now = clock::now();
        Entry {
            room: Arc::clone(room),
            settings: Arc::new(settings.clone()),
            ticket: ticket.clone(),
            fence: None,
            at: now,
            until: now.after(GIVE_UP.max(settings.lease)),
            again: false,
            backoff: Backoff::new(RETRY),
        }
    }

    /// Tries once; says whether there is more to do.
    fn attempt(&mut self) -> bool {
        let now = clock::now();
        let call_timeout = self.room.shared.call_timeout;
        let ticket = self.ticket.clone();
        let command = match self.fence {
            Some(fence) => Command::Release { ticket, fence },
            None => Command::Abandon { ticket },
        };
        match self.room.call(&self.settings, &command, now.after(call_timeout)) {
            Ok(Reply::Abandoned { next }) => {
                self.room.hear(&self.settings, next, None);
                // Whatever was sent before has arrived or died by then.
                self.at = now.after(call_timeout);
                std::mem::replace(&mut self.again, false)
            }
            Ok(Reply::Released { next }) => {
                self.room.hear(&self.settings, next, Some(now));
                false
            }
            Ok(Reply::Already { next } | Reply::Lost { next }) => {
                self.room.hear(&self.settings, next, None);
                false
            }
            Ok(other) => {
                warn!("withdrawing {} was answered with {other:?}", self.ticket);
                false
            }
            Err(failure) => {
                let pause = self.backoff.pause();
                self.at = clock::now().after(pause);
                let more = self.at < self.until && failure.retry;
                if !more {
                    debug!("`{}`: {} is left to lapse: {}", self.room.keys.name, self.ticket, failure.error);
                }
                more
            }
        }
    }
}
