//! What a transition answers.

use super::{Record, TicketId};

/// The current grant, named because it belongs to the calling client.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Next {
    /// The ticket that holds the lock now.
    pub ticket: TicketId,
    /// The fence of its grant.
    pub fence: u64,
}

/// The answer to one [`Command`](super::Command).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Reply {
    /// `acquire`: the ticket holds the lock.
    Granted {
        /// The fence of the grant.
        fence: u64,
        /// The ticket's position.
        position: u64,
    },
    /// `acquire`: the ticket is queued.
    Waiting {
        /// The ticket's position.
        position: u64,
        /// How many tickets stand before it.
        ahead: u64,
        /// Milliseconds, rounded up, until the lock may come free without anybody ringing: the holder's lease
        /// lapses or its claim window ends.
        holder_ms: u64,
        /// The newest fence: whatever names one that is not newer is old news.
        newest: u64,
        /// The ticket gave a position and was not in the queue: its client was forgotten.
        reentered: bool,
        /// The current grant, if it is the caller's.
        next: Option<Next>,
    },
    /// `acquire` without waiting: somebody holds the lock or waits for it.
    Busy {
        /// The current grant, if it is the caller's.
        next: Option<Next>,
    },
    /// `acquire`: the queue is full and the ticket was not queued.
    Full {
        /// The current grant, if it is the caller's.
        next: Option<Next>,
    },
    /// `renew`: the lease counts from now.
    Renewed {
        /// How many tickets are queued.
        waiters: u64,
    },
    /// `renew`, `release`: the lease is not the caller's any more.
    Lost {
        /// The current grant, if it is the caller's.
        next: Option<Next>,
    },
    /// `release`: the lease ended now.
    Released {
        /// The current grant, if it is the caller's.
        next: Option<Next>,
    },
    /// `release`: this lease was released before.
    Already {
        /// The current grant, if it is the caller's.
        next: Option<Next>,
    },
    /// `abandon`: the ticket is neither queued nor holder.
    Abandoned {
        /// The current grant, if it is the caller's.
        next: Option<Next>,
    },
    /// `inspect`: the state as it is.
    Inspected(Inspection),
    /// `evict`: the lease was taken away.
    Evicted,
    /// `evict`: that lease is over; nothing was changed.
    Changed,
}

/// The state of a lock as `inspect` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Inspection {
    /// The server's time, microseconds.
    pub now_us: u64,
    /// The record, if there is one.
    pub record: Option<Record>,
    /// How many tickets are queued.
    pub waiting: u64,
    /// The first tickets of the queue with their positions.
    pub queue: Vec<(TicketId, u64)>,
}
