//! The server's side of a log: its state, rebuilt from the writes that MONITOR shows, and who ended which lease.

use std::collections::{BTreeMap, HashMap};

use super::{Found, Rule};
use crate::history::{Event, Stored, Verb, What};

/// How a lease came to its end on the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// By a call of its own ticket.
    Own,
    /// Somebody else was granted the lock after it had lapsed or stood unclaimed.
    Displaced,
    /// With all data.
    Forgotten,
    /// By a call that had no right to.
    Foreign,
    /// Nobody saw.
    Unseen,
}

pub(super) struct Server {
    locks: BTreeMap<String, Lock>,
}

/// What is known of one lock.
#[derive(Default)]
struct Lock {
    record: Option<Stored>,
    queue: HashMap<String, u64>,
    /// The call that runs.
    call: Option<(Verb, String)>,
    /// What it took from the head of the queue, and what it dropped.
    popped: Option<(String, u64)>,
    dropped: Vec<String>,
    /// Where each ticket that was ever seen stands, and whose each position is.
    places: HashMap<String, Place>,
    taken: HashMap<u64, String>,
    /// The largest position and fence so far, and the largest position when the record last had a gap.
    furthest: u64,
    newest: u64,
    gap: u64,
    grants: HashMap<u64, Grant>,
    /// Fences that were minted unseen, as ranges.
    unseen: Vec<(u64, u64)>,
    endings: HashMap<u64, Ending>,
}

#[derive(Clone, Copy)]
struct Place {
    position: u64,
    /// Whether it may come back at another place: it was dropped, given up or lost.
    gone: bool,
    /// The newest fence when it was first out of the queue without having been served.
    out: Option<u64>,
    /// The fence of its first grant.
    served: Option<u64>,
}

struct Grant {
    ticket: String,
    position: u64,
}

impl Server {
    pub(super) fn replay(events: &[Event], found: &mut Found) -> Server {
        let mut locks: BTreeMap<String, Lock> = BTreeMap::new();
        for event in events {
            match &event.what {
                What::Call { lock, verb, ticket } => {
                    let lock = locks.entry(lock.clone()).or_default();
                    lock.call = Some((*verb, ticket.clone()));
                    lock.popped = None;
                    lock.dropped.clear();
                }
                What::Queued { lock, ticket, position } => {
                    locks.entry(lock.clone()).or_default().enqueue(lock, ticket, *position, found);
                }
                What::Dequeued { lock, tickets } => {
                    locks.entry(lock.clone()).or_default().dequeue(tickets);
                }
                What::Popped { lock, first } => locks.entry(lock.clone()).or_default().pop(*first),
                What::Record { lock, now_us, record } => {
                    locks.entry(lock.clone()).or_default().store(lock, *now_us, record, found);
                }
                What::Flushed => locks.values_mut().for_each(Lock::forget),
                What::Found { lock, record, queue } => {
                    locks.entry(lock.clone()).or_default().find(lock, record.as_ref(), queue, found);
                }
                _ => {}
            }
        }
        Server { locks }
    }

    /// Whether the server made this grant; an error says what is wrong.
    pub(super) fn minted(&self, lock: &str, fence: u64, position: u64) -> Result<(), String> {
        let Some(lock) = self.locks.get(lock) else { return Ok(()) };
        match lock.grants.get(&fence) {
            Some(grant) if grant.position == position => Ok(()),
            Some(grant) => Err(format!("at position {position}, not {}", grant.position)),
            None if lock.unseen.iter().any(|(after, to)| *after < fence && fence <= *to) => Ok(()),
            None => Err("the server never minted it".to_owned()),
        }
    }

    /// How the lease with this fence ended; `None` if it did not, or was never seen.
    pub(super) fn ending(&self, lock: &str, fence: u64) -> Option<Ending> {
        self.locks.get(lock)?.endings.get(&fence).copied()
    }

    /// Whether the ticket that got `fence` was out of the queue for some reason before `other` was granted.
    pub(super) fn was_out(&self, lock: &str, fence: u64, other: u64) -> bool {
        let Some(lock) = self.locks.get(lock) else { return false };
        // A grant that nobody saw says nothing of its ticket.
        let Some(grant) = lock.grants.get(&fence) else { return !lock.unseen.is_empty() };
        lock.places.get(&grant.ticket).and_then(|place| place.out).is_some_and(|newest| newest < other)
    }

    pub(super) fn grants(&self) -> usize {
        self.locks.values().map(|lock| lock.grants.len()).sum()
    }

    pub(super) fn displaced(&self) -> usize {
        let endings = self.locks.values().flat_map(|lock| lock.endings.values());
        endings.filter(|ending| **ending == Ending::Displaced).count()
    }
}

impl Lock {
    fn enqueue(&mut self, name: &str, ticket: &str, position: u64, found: &mut Found) {
        self.place(name, ticket, position, found);
        self.queue.insert(ticket.to_owned(), position);
    }

    /// Writes down the position of a ticket that is queued or granted.
    fn place(&mut self, name: &str, ticket: &str, position: u64, found: &mut Found) {
        match self.places.get_mut(ticket) {
            Some(place) if place.position == position => place.gone = false,
            Some(place) if place.gone => (place.position, place.gone) = (position, false),
            Some(place) => {
                let what = format!("`{name}`: {ticket} moved from {} to {position}", place.position);
                found.add(Rule::Order, what);
                place.position = position;
            }
            None => {
                if position <= self.furthest && position > self.gap {
                    let what = format!(
                        "`{name}`: the newcomer {ticket} stands at {position}, before {}",
                        self.furthest
                    );
                    found.add(Rule::Order, what);
                }
                self.places
                    .insert(ticket.to_owned(), Place { position, gone: false, out: None, served: None });
            }
        }
        self.furthest = self.furthest.max(position);
        let owner = self.taken.entry(position).or_insert_with(|| ticket.to_owned());
        if owner != ticket {
            found.add(Rule::Order, format!("`{name}`: {owner} and {ticket} stand at {position}"));
        }
    }

    fn dequeue(&mut self, tickets: &[String]) {
        let own = match &self.call {
            Some((Verb::Abandon, ticket)) => tickets == std::slice::from_ref(ticket),
            _ => false,
        };
        for ticket in tickets {
            let queued = self.queue.remove(ticket).is_some();
            if queued && !own {
                self.dropped.push(ticket.clone());
            }
            self.take_out(ticket);
        }
    }

    fn take_out(&mut self, ticket: &str) {
        let newest = self.newest;
        if let Some(place) = self.places.get_mut(ticket) {
            place.gone = true;
            place.out.get_or_insert(newest);
        }
    }

    fn pop(&mut self, first: bool) {
        let order = |entry: &(&String, &u64)| (*entry.1, entry.0.clone());
        let entries = self.queue.iter();
        let popped = if first { entries.min_by_key(order) } else { entries.max_by_key(order) };
        let popped = popped.map(|(ticket, position)| (ticket.clone(), *position));
        if let Some((ticket, _)) = &popped {
            self.queue.remove(ticket);
        }
        self.popped = popped;
    }

    fn store(&mut self, name: &str, now_us: u64, new: &Stored, found: &mut Found) {
        let old = self.record.replace(new.clone()).unwrap_or_default();
        let (verb, caller) = self.call.clone().unwrap_or((Verb::Other, String::new()));
        self.judge_dropped(name, &old, &caller, found);
        if new.fence < old.fence {
            found.add(Rule::Fences, format!("`{name}`: fence {} after {}", new.fence, old.fence));
        }
        let ended = old.holder.is_some() && (new.holder != old.holder || new.fence != old.fence);
        let unclaimed = old.holder.as_deref().filter(|_| ended && old.claim.is_some()).map(client);
        for suspect in new.suspects.iter().filter(|suspect| !old.suspects.contains(suspect)) {
            if unclaimed != Some(suspect) {
                found.add(Rule::Handover, format!("`{name}`: {suspect} is suspected of nothing"));
            }
        }
        if ended {
            let ending = judge_end(name, &old, verb, &caller, now_us, found);
            self.endings.insert(old.fence, ending);
            // If it never heard of its grant, it does not know its position.
            if let Some(place) = old.holder.as_ref().and_then(|holder| self.places.get_mut(holder)) {
                place.gone = true;
            }
        }
        let granted = new.holder.is_some() && (old.holder != new.holder || new.fence != old.fence);
        if let Some(holder) = new.holder.as_ref().filter(|_| granted) {
            self.grant(name, holder, new, (verb, &caller), found);
        }
    }

    fn judge_dropped(&mut self, name: &str, old: &Stored, caller: &str, found: &mut Found) {
        let unclaimed = old.holder.as_deref().filter(|_| old.claim.is_some()).map(client);
        for ticket in std::mem::take(&mut self.dropped) {
            let who = client(&ticket);
            let suspected = old.suspects.iter().any(|suspect| suspect == who) || unclaimed == Some(who);
            if !suspected || who == client(caller) {
                found
                    .add(Rule::Order, format!("`{name}`: {ticket} was dropped from the queue for no reason"));
            }
        }
    }

    fn grant(&mut self, name: &str, holder: &str, new: &Stored, by: (Verb, &str), found: &mut Found) {
        if new.fence <= self.newest {
            let what = format!("`{name}`: {holder} got fence {} after {} was given", new.fence, self.newest);
            found.add(Rule::Fences, what);
        }
        if by == (Verb::RenewOrRelease, holder) {
            found.add(Rule::Handover, format!("`{name}`: {holder} took the lock back by renewing"));
        }
        if let Some((ticket, position)) = self.popped.take()
            && (ticket != holder || position != new.place)
        {
            let what = format!("`{name}`: {ticket} was first, and {holder} was granted");
            found.add(Rule::Order, what);
        }
        let ahead = self.queue.iter().find(|(ticket, at)| **at < new.place && *ticket != holder);
        if let Some((ticket, at)) = ahead {
            let what = format!("`{name}`: {holder} at {} was granted before {ticket} at {at}", new.place);
            found.add(Rule::Order, what);
        }
        self.place(name, holder, new.place, found);
        if let Some(place) = self.places.get_mut(holder) {
            match place.served {
                // It was passed over or displaced the first time, and out of the queue from then on.
                Some(first) => place.out = Some(place.out.map_or(first, |out| out.min(first))),
                None => place.served = Some(new.fence),
            }
        }
        self.newest = self.newest.max(new.fence);
        let grant = Grant { ticket: holder.to_owned(), position: new.place };
        self.grants.insert(new.fence, grant);
    }

    /// All data is gone.
    fn forget(&mut self) {
        if let Some(fence) =
            self.record.take().filter(|record| record.holder.is_some()).map(|record| record.fence)
        {
            self.endings.insert(fence, Ending::Forgotten);
        }
        self.queue.clear();
        self.all_out();
    }

    fn all_out(&mut self) {
        let newest = self.newest;
        for place in self.places.values_mut() {
            place.gone = true;
            place.out.get_or_insert(newest);
        }
    }

    fn find(&mut self, name: &str, record: Option<&Stored>, queue: &[(String, u64)], found: &mut Found) {
        let (old, new) = (self.record.take(), record.cloned());
        if let Some(new) = &new {
            if new.fence < self.newest {
                found.add(Rule::Fences, format!("`{name}`: fence {} after {}", new.fence, self.newest));
            }
            if new.fence > self.newest {
                self.unseen.push((self.newest, new.fence));
                self.newest = new.fence;
            }
        }
        let holder = |record: &Stored| record.holder.is_some().then_some(record.fence);
        if let Some(fence) =
            old.as_ref().and_then(holder).filter(|fence| new.as_ref().and_then(holder) != Some(*fence))
        {
            self.endings.insert(fence, Ending::Unseen);
        }
        self.all_out();
        self.queue = queue.iter().cloned().collect();
        self.gap = queue.iter().map(|(_, position)| *position).fold(self.furthest, u64::max);
        self.furthest = self.gap;
        self.record = new;
    }
}

/// Judges the end of the lease in `old` by a call.
fn judge_end(name: &str, old: &Stored, verb: Verb, caller: &str, now_us: u64, found: &mut Found) -> Ending {
    let holder = old.holder.as_deref().unwrap_or_default();
    match verb {
        Verb::RenewOrRelease | Verb::Abandon if caller == holder => return Ending::Own,
        Verb::RenewOrRelease | Verb::Abandon => {
            found.add(Rule::Handover, format!("`{name}`: a call of {caller} ended the lease of {holder}"));
            return Ending::Foreign;
        }
        Verb::Acquire | Verb::Other => {}
    }
    // A clock that went back must not make a lease longer than it is.
    let lease_us = holder.rsplit('.').next().and_then(|ms| ms.parse::<u64>().ok()).unwrap_or(0) * 1000;
    let ahead = old.until.saturating_sub(now_us + lease_us);
    let lapsed = old.until - ahead <= now_us;
    let passed_over =
        old.claim.is_some_and(|at| at.saturating_sub(ahead) <= now_us) && client(holder) != client(caller);
    if !lapsed && !passed_over {
        let left = (old.until - ahead - now_us) / 1000;
        found.add(
            Rule::Handover,
            format!("`{name}`: {caller} displaced {holder}, whose lease had {left} ms left"),
        );
    }
    Ending::Displaced
}

/// The client that took a ticket.
fn client(ticket: &str) -> &str {
    ticket.split('.').next().unwrap_or(ticket)
}
