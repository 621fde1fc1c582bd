//! The state machine of one lock: `apply(state, now, command)` gives the reply and moves the state.
//!
//! Each function here is one script in `scripts/`, with the same name and the same order of decisions; a
//! differential test holds the two equal. The table of transitions is in `docs/protocol.md`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::record::SUSPECTS;
use super::{Inspection, Next, Record, Reply, TicketId};

/// How many lost fences are remembered; `born` rises over those that are forgotten.
pub const LOST_KEPT: usize = 128;

/// How many tickets of suspects one call may drop, so that no call blocks the server for long.
pub const DROPPED_AT_ONCE: usize = 1000;

/// Settings of the calling client that a transition uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Terms {
    /// How long a grant may stay unclaimed, milliseconds. Never more than the granted ticket's lease counts.
    pub claim_ms: u64,
    /// How long an idle lock is remembered, milliseconds.
    pub idle_ms: u64,
    /// How long nobody is granted after data was lost, so that waiters come back in their old order, milliseconds.
    pub regroup_ms: u64,
}

/// One call to the server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Command {
    /// Takes the lock for `ticket`, or a place in its queue.
    Acquire {
        /// The ticket; the same one again means the same attempt.
        ticket: TicketId,
        /// The position it was given before, if any.
        position: Option<u64>,
        /// Whether to queue if the lock cannot be had at once.
        wait: bool,
        /// How many tickets may be queued, if that is limited.
        max_queue: Option<u64>,
    },
    /// Starts the lease again from now.
    Renew {
        /// The holder.
        ticket: TicketId,
        /// The fence of its grant.
        fence: u64,
    },
    /// Ends the lease and grants the next ticket.
    Release {
        /// The holder.
        ticket: TicketId,
        /// The fence of its grant.
        fence: u64,
    },
    /// Gives the ticket up, whatever became of it.
    Abandon {
        /// The ticket.
        ticket: TicketId,
    },
    /// Shows the state.
    Inspect {
        /// How many queued tickets to show.
        limit: u64,
    },
    /// Takes away exactly the lease with this fence.
    Evict {
        /// The fence.
        fence: u64,
    },
}

/// One ring: what stands on a bell.
pub type Ring = Next;

/// A bell: the rings on it, newest first, and when the key expires.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Bell {
    /// The rings, newest first; a pop takes the newest.
    pub rings: VecDeque<Ring>,
    /// When the key expires, microseconds.
    pub expires: u64,
}

/// The keys of one lock.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct State {
    /// `…:lock`.
    pub record: Option<Record>,
    /// When `…:lock` expires: only while nobody holds it or waits.
    pub record_expires: Option<u64>,
    /// `…:queue`, by position.
    pub queue: BTreeSet<(u64, TicketId)>,
    /// `…:lost`.
    pub lost: BTreeSet<u64>,
    /// When `…:lost` expires.
    pub lost_expires: u64,
    /// `…:bell:CLIENT`.
    pub bells: BTreeMap<Box<str>, Bell>,
}

impl State {
    /// Removes what expired by `now_us`, as the server does by itself.
    pub fn expire(&mut self, now_us: u64) {
        if self.record_expires.is_some_and(|at| at <= now_us) {
            self.record = None;
            self.record_expires = None;
        }
        if self.lost_expires <= now_us {
            self.lost.clear();
        }
        self.bells.retain(|_, bell| bell.expires > now_us && !bell.rings.is_empty());
    }

    /// Takes the newest ring off `client`'s bell, as a `BLPOP` does.
    pub fn pop_bell(&mut self, client: &str, now_us: u64) -> Option<Ring> {
        self.expire(now_us);
        let ring = self.bells.get_mut(client)?.rings.pop_front();
        self.expire(now_us);
        ring
    }

    /// Whether no key of this lock is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.record.is_none() && self.queue.is_empty() && self.lost.is_empty() && self.bells.is_empty()
    }

    /// The position of `ticket` in the queue, and how many stand before it.
    fn find(&self, ticket: &TicketId) -> Option<(u64, u64)> {
        let rank = self.queue.iter().position(|(_, queued)| queued == ticket)?;
        self.queue.iter().nth(rank).map(|(position, _)| (*position, rank as u64))
    }
}

/// Runs one command on the state at server time `now_us`.
///
/// Bells that were rung stand in [`State::bells`] afterwards.
pub fn apply(state: &mut State, now_us: u64, terms: &Terms, command: &Command) -> Reply {
    state.expire(now_us);
    let mut call = Call { state, now: now_us, terms };
    match command {
        Command::Acquire { ticket, position, wait, max_queue } => {
            call.acquire(ticket, *position, *wait, *max_queue)
        }
        Command::Renew { ticket, fence } => call.renew(ticket, *fence),
        Command::Release { ticket, fence } => call.release(ticket, *fence),
        Command::Abandon { ticket } => call.abandon(ticket),
        Command::Inspect { limit } => call.inspect(*limit),
        Command::Evict { fence } => call.evict_command(*fence),
    }
}

/// One running transition.
struct Call<'a> {
    /// The keys.
    state: &'a mut State,
    /// Server time, microseconds.
    now: u64,
    /// The caller's settings.
    terms: &'a Terms,
}

impl Call<'_> {
    fn acquire(
        &mut self,
        ticket: &TicketId,
        position: Option<u64>,
        wait: bool,
        max_queue: Option<u64>,
    ) -> Reply {
        let me = ticket.client();
        let queued = self.state.find(ticket);
        let (mut record, mut changed) = match self.state.record.clone() {
            Some(record) => (record, false),
            None => {
                let mut record = Record::new(self.now);
                // Data was lost: somebody remembers a place that the record does not. Others will come back too,
                // so nobody is granted until they had the time; else the fastest would win over the first.
                if position.is_some() || !self.state.queue.is_empty() {
                    record.until = self.now + self.terms.regroup_ms * 1000;
                }
                // The newest position is in the queue, if that is still there; else a newcomer could get before it.
                if let Some((newest, _)) = self.state.queue.last() {
                    record.pos = *newest;
                }
                let regrouping = record.until > 0;
                (record, regrouping)
            }
        };
        changed |= self.correct_clock(&mut record);
        changed |= trust(&mut record, me);

        if record.holder.as_ref() == Some(ticket) {
            // The reply of an earlier call was lost, or a ring is on its way: this reply proves the grant anew.
            self.claim(&mut record);
            record.until = self.now + ticket.lease_ms() * 1000;
            let reply = Reply::Granted { fence: record.fence, position: record.place };
            self.keep(record);
            return reply;
        }

        let reentered = queued.is_none() && position.is_some() && wait;
        if !self.is_free(&record, me) {
            if queued.is_none() && !reentered {
                let full = max_queue.is_some_and(|limit| self.state.queue.len() as u64 >= limit);
                if !wait || full {
                    let (next, named) = self.name(&mut record, me);
                    if changed | named {
                        self.keep(record);
                    }
                    return if wait { Reply::Full { next } } else { Reply::Busy { next } };
                }
            }
            if queued.is_none() {
                self.enqueue(&mut record, ticket, position);
                changed = true;
            }
            return self.waiting(record, ticket, reentered, changed);
        }

        if record.holder.is_some() {
            self.displace(&mut record);
            // The caller lives, whatever it left unclaimed.
            trust(&mut record, me);
        }
        self.drop_suspects(&record);
        if reentered {
            self.enqueue(&mut record, ticket, position);
        }
        match self.state.queue.pop_first() {
            None => {
                let position = (record.pos + 1).max(self.now);
                self.grant(&mut record, ticket.clone(), position, me);
            }
            Some((position, head)) => self.grant(&mut record, head, position, me),
        }
        if record.holder.as_ref() == Some(ticket) {
            let reply = Reply::Granted { fence: record.fence, position: record.place };
            self.keep(record);
            return reply;
        }
        if queued.is_none() && !reentered {
            let full = max_queue.is_some_and(|limit| self.state.queue.len() as u64 >= limit);
            if !wait || full {
                let (next, _) = self.name(&mut record, me);
                self.keep(record);
                return if wait { Reply::Full { next } } else { Reply::Busy { next } };
            }
            self.enqueue(&mut record, ticket, None);
        }
        self.waiting(record, ticket, reentered, true)
    }

    fn renew(&mut self, ticket: &TicketId, fence: u64) -> Reply {
        let Some(mut record) = self.state.record.clone() else { return Reply::Lost { next: None } };
        let me = ticket.client();
        let mut changed = self.correct_clock(&mut record);
        changed |= trust(&mut record, me);
        if record.holder.as_ref() == Some(ticket) && record.fence == fence {
            // A lapsed lease that nobody was granted since is still whole, so it may go on.
            self.claim(&mut record);
            record.until = self.now + ticket.lease_ms() * 1000;
            self.keep(record);
            return Reply::Renewed { waiters: self.state.queue.len() as u64 };
        }
        let (next, named) = self.name(&mut record, me);
        if changed | named {
            self.keep(record);
        }
        Reply::Lost { next }
    }

    fn release(&mut self, ticket: &TicketId, fence: u64) -> Reply {
        let Some(mut record) = self.state.record.clone() else { return Reply::Lost { next: None } };
        let me = ticket.client();
        let changed = trust(&mut record, me);
        if record.holder.as_ref() == Some(ticket) && record.fence == fence {
            let next = self.advance(record, me);
            return Reply::Released { next };
        }
        let lost = self.state.lost.contains(&fence) || fence < record.born || fence > record.fence;
        let (next, named) = self.name(&mut record, me);
        if changed | named {
            self.keep(record);
        }
        if lost { Reply::Lost { next } } else { Reply::Already { next } }
    }

    fn abandon(&mut self, ticket: &TicketId) -> Reply {
        self.state.queue.retain(|(_, queued)| queued != ticket);
        let Some(mut record) = self.state.record.clone() else { return Reply::Abandoned { next: None } };
        let me = ticket.client();
        // Without a holder the ticket may have been the last that kept the record from going idle.
        let changed = trust(&mut record, me) | record.holder.is_none();
        if record.holder.as_ref() == Some(ticket) {
            self.claim(&mut record);
            let next = self.advance(record, me);
            return Reply::Abandoned { next };
        }
        let (next, named) = self.name(&mut record, me);
        if changed | named {
            self.keep(record);
        }
        Reply::Abandoned { next }
    }

    fn inspect(&self, limit: u64) -> Reply {
        let first = self.state.queue.iter().take(limit.try_into().unwrap_or(usize::MAX));
        Reply::Inspected(Inspection {
            now_us: self.now,
            record: self.state.record.clone(),
            waiting: self.state.queue.len() as u64,
            queue: first.map(|(position, ticket)| (ticket.clone(), *position)).collect(),
        })
    }

    fn evict_command(&mut self, fence: u64) -> Reply {
        let Some(mut record) = self.state.record.clone() else { return Reply::Changed };
        if record.holder.is_none() || record.fence != fence {
            return Reply::Changed;
        }
        self.displace(&mut record);
        // The operator is no client: every grant is rung.
        self.advance(record, "");
        Reply::Evicted
    }

    /// Takes a lease back into the present if the server's clock went back under it: else nobody could be granted
    /// until the clock has caught up.
    fn correct_clock(&self, record: &mut Record) -> bool {
        let longest = match &record.holder {
            Some(ticket) => ticket.lease_ms() * 1000,
            None => self.terms.regroup_ms * 1000,
        };
        let Some(ahead) = record.until.checked_sub(self.now + longest).filter(|ahead| *ahead > 0) else {
            return false;
        };
        record.until -= ahead;
        record.claim = record.claim.map(|at| at.saturating_sub(ahead));
        true
    }

    /// Whether a grant may be made: nobody holds the lock, the lease lapsed, or the grant was not picked up.
    fn is_free(&self, record: &Record, me: &str) -> bool {
        if record.until <= self.now {
            return true;
        }
        let (Some(holder), Some(claim)) = (&record.holder, record.claim) else { return false };
        // Popping the bell is atomic, and so is this look at it followed by its deletion: exactly one of the two
        // happens, so a grant that somebody believes is never taken for unclaimed. A grant of the caller's own is
        // named in the reply instead of being passed over.
        let ring = self.state.bells.get(holder.client()).and_then(|bell| bell.rings.front());
        claim <= self.now
            && holder.client() != me
            && ring.is_some_and(|ring| ring.ticket == *holder && ring.fence == record.fence)
    }

    /// Takes the lock from its holder: remembers the fence, silences its bell, suspects a client that never came.
    fn displace(&mut self, record: &mut Record) {
        let Some(holder) = record.holder.take() else { return };
        self.state.bells.remove(holder.client());
        self.state.lost.insert(record.fence);
        self.state.lost_expires = self.now + self.terms.idle_ms * 1000;
        while self.state.lost.len() > LOST_KEPT {
            if let Some(forgotten) = self.state.lost.pop_first() {
                record.born = record.born.max(forgotten + 1);
            }
        }
        if record.claim.take().is_some() && !record.suspects(holder.client()) {
            record.suspects.push(holder.client().into());
            if record.suspects.len() > SUSPECTS {
                record.suspects.remove(0);
            }
        }
        record.until = 0;
        record.place = 0;
    }

    /// Frees the lock and grants the head of the queue; gives the new grant if it is the caller's.
    fn advance(&mut self, mut record: Record, me: &str) -> Option<Next> {
        record.holder = None;
        record.until = 0;
        record.claim = None;
        record.place = 0;
        self.drop_suspects(&record);
        if let Some((position, head)) = self.state.queue.pop_first() {
            self.grant(&mut record, head, position, me);
        }
        let next = mine(&record, me);
        self.keep(record);
        next
    }

    /// Drops heads of the queue that belong to suspects. A live one comes back at its old position.
    fn drop_suspects(&mut self, record: &Record) {
        for _ in 0..DROPPED_AT_ONCE {
            match self.state.queue.first() {
                Some((_, head)) if record.suspects(head.client()) => self.state.queue.pop_first(),
                _ => break,
            };
        }
    }

    /// Gives the lock to `ticket`. A grant to the caller's client is told by the reply, any other by a ring.
    fn grant(&mut self, record: &mut Record, ticket: TicketId, position: u64, me: &str) {
        let lease = ticket.lease_ms() * 1000;
        record.fence = (record.fence + 1).max(self.now);
        record.until = self.now + lease;
        record.pos = record.pos.max(position);
        record.place = position;
        record.claim = None;
        if ticket.client() != me {
            record.claim = Some(self.now + lease.min(self.terms.claim_ms * 1000));
            let bell = self.state.bells.entry(ticket.client().into()).or_default();
            bell.rings.push_front(Ring { ticket: ticket.clone(), fence: record.fence });
            bell.expires = self.now + lease;
        }
        record.holder = Some(ticket);
    }

    /// Queues `ticket` at its old position, or at a new one behind all.
    fn enqueue(&mut self, record: &mut Record, ticket: &TicketId, position: Option<u64>) {
        let position = position.unwrap_or((record.pos + 1).max(self.now));
        record.pos = record.pos.max(position);
        self.state.queue.insert((position, ticket.clone()));
    }

    /// Answers `waiting` for a queued ticket.
    fn waiting(&mut self, mut record: Record, ticket: &TicketId, reentered: bool, changed: bool) -> Reply {
        let (next, named) = self.name(&mut record, ticket.client());
        let (position, ahead) = self.state.find(ticket).unwrap_or((0, 0));
        let free_at = record.claim.filter(|claim| *claim > self.now).unwrap_or(record.until);
        let holder_ms = free_at.saturating_sub(self.now).div_ceil(1000);
        let newest = record.fence;
        if changed | named {
            self.keep(record);
        }
        Reply::Waiting { position, ahead, holder_ms, newest, reentered, next }
    }

    /// Names the current grant if it is the caller's. Naming is claiming: from here on the caller may believe it.
    fn name(&mut self, record: &mut Record, me: &str) -> (Option<Next>, bool) {
        let next = mine(record, me);
        let named = next.is_some() && record.claim.is_some();
        if named {
            self.claim(record);
        }
        (next, named)
    }

    /// Takes the grant for known by its holder, so that nobody passes it over.
    fn claim(&mut self, record: &mut Record) {
        if record.claim.take().is_some()
            && let Some(holder) = &record.holder
        {
            self.state.bells.remove(holder.client());
        }
    }

    /// Stores the record: without expiry while somebody holds the lock or waits, so that no eviction policy for
    /// keys that expire can take it.
    fn keep(&mut self, mut record: Record) {
        let idle = record.holder.is_none() && self.state.queue.is_empty();
        if idle {
            // The dead have no tickets left, so there is nobody to suspect.
            record.suspects.clear();
        }
        self.state.record_expires = idle.then_some(self.now + self.terms.idle_ms * 1000);
        self.state.record = Some(record);
    }
}

/// Forgets a suspicion: `client` has just been heard of.
fn trust(record: &mut Record, client: &str) -> bool {
    let before = record.suspects.len();
    record.suspects.retain(|suspect| &**suspect != client);
    record.suspects.len() != before
}

/// The current grant, if it belongs to `client`.
fn mine(record: &Record, client: &str) -> Option<Next> {
    let holder = record.holder.as_ref().filter(|holder| holder.client() == client)?;
    Some(Next { ticket: holder.clone(), fence: record.fence })
}
