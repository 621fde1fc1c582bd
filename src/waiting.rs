//! The wait room of one lock in one client: who waits here, who listens for them, and what is believed.
//!
//! Invariant: while anybody waits, one waiter polls; and polls alone, without any bell, get everybody in.
//!
//! | part | who | does |
//! |---|---|---|
//! | listener | a thread of the room | blocks on the bell; hands each ring to the ticket it names |
//! | poller | one of the waiters, the last in line when it was chosen | polls with the first ticket when that is due |
//! | the others | parked, each until its own deadline | withdraw their tickets when it passes |
//!
//! What is believed:
//!
//! * A grant in the reply to the ticket's own call: always, good from the sending of that call.
//! * A grant named by a ring or by the reply to another call: only if its fence is newer than the newest that a
//!   `waiting` reply has named, for rings and replies overtake each other. It was made after the room last proved that
//!   the lock was not yet ours, so it is good from then: an answer that the lock is somebody else's proves it for every
//!   queued ticket of the room, save the one that the same answer names. It may be heard of before the ticket's own call is
//!   answered, and again by nobody, so it is kept until its thread sits, and passed over if it parks the ticket instead.
//! * A grant that was passed over: never again, also if the ticket's own call is answered with it, because the release of it
//!   may still be on its way.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use log::{debug, error, warn};

use crate::backoff::Backoff;
use crate::client::Shared;
use crate::clock::{self, Moment};
use crate::engine::{Bell, Failure, Heard};
use crate::error::Error;
use crate::keys::LockKeys;
use crate::protocol::{Command, Next, Reply, TicketId};
use crate::settings::Settings;
use crate::sync::thread::{self, ThreadId};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// The listener stays this long after the last waiter left, so that a lock in steady use keeps its connection.
const LINGER: Duration = Duration::from_secs(1);
/// How long the listener blocks at first, and when nobody waits.
const LISTEN: Duration = Duration::from_secs(2);
/// How long it blocks at most. Only a bell that died without a word costs more than one command per this time.
const LISTEN_LONG: Duration = Duration::from_secs(16);
/// A waiter this much further back polls this much later, up to [`POLL_LONG`].
const POLL_PER_AHEAD: Duration = Duration::from_millis(10);
/// The longest time between polls that distance stretches to.
const POLL_LONG: Duration = Duration::from_secs(30);
/// The shortest time between polls.
const POLL_SHORT: Duration = Duration::from_millis(5);
/// How often to poll while nobody can listen.
const POLL_DEAF: Duration = Duration::from_millis(200);
/// How long a caller whose deadline has passed waits for its ticket to be withdrawn; then it is done in the background.
const WITHDRAW_NOW: Duration = Duration::from_millis(100);
/// An outage counts at a deadline once it has lasted this long; a call that the deadline itself cut short proves nothing.
const UNREACHABLE: Duration = Duration::from_millis(100);
/// The longest pause between attempts in an outage.
const RETRY: Duration = Duration::from_millis(250);

/// A grant as it reached this client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    /// Its fence.
    pub(crate) fence: u64,
    /// The ticket's position.
    pub(crate) position: u64,
    /// The lease counts from here: no later than the server made the grant.
    pub(crate) since: Moment,
}

/// The wait room of one lock.
pub(crate) struct Room {
    pub(crate) shared: Arc<Shared>,
    pub(crate) keys: LockKeys,
    state: Mutex<State>,
}

/// What the room knows.
struct State {
    /// The tickets of this client on this lock, from the first call until they are withdrawn or released.
    tickets: HashMap<TicketId, Known>,
    /// Those with a thread that waits, by position.
    waiting: BTreeMap<(u64, TicketId), Seat>,
    /// Leases, and the thread that took each, to find a thread that waits for itself.
    holders: Vec<(TicketId, u64, Option<ThreadId>)>,
    /// The newest fence a `waiting` reply named: what names one that is not newer is old news.
    newest: u64,
    /// The newest fence of ours that ended: a grant of an unknown ticket that is newer is a ghost.
    ended: u64,
    /// When a call was sent whose answer proved that the lock was not ours.
    proven: Moment,
    /// Who polls: a key of `waiting`.
    poller: Option<(u64, TicketId)>,
    /// When to poll next.
    next_poll: Moment,
    /// Set while no call comes through.
    outage: Option<Outage>,
    /// Whether a listener runs.
    listening: bool,
    /// Whether the listener has no connection.
    deaf: bool,
    /// When the last waiter left.
    emptied: Moment,
}

/// What is known of a ticket.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    /// What became of it so far.
    place: Place,
    /// A grant that was heard of while its own call was under way, as fence and since when its lease counts. The reply
    /// may be older than this news.
    news: Option<(u64, Moment)>,
    /// The newest fence of it that was passed over. The release may arrive late, so no grant up to here is believed.
    passed_over: u64,
    /// When the last `acquire` for it ended without an answer: it may arrive for the time of one call from then on.
    doubt: Option<Moment>,
}

/// What became of a ticket so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    /// A call is under way whose reply will tell.
    #[default]
    Asking,
    /// A thread waits for it, at this position.
    Waiting(u64),
    /// It is queued, or was passed over, and nobody waits for it.
    Parked,
    /// It holds the lock.
    Held,
}

/// A waiting thread.
struct Seat {
    /// Wakes it.
    wake: Arc<Condvar>,
    /// Its settings.
    settings: Arc<Settings>,
    /// What it got.
    grant: Option<Grant>,
    /// Why it waits no longer.
    error: Option<Error>,
    /// Its ticket has to be queued again at its old position.
    reenter: bool,
}

/// A time in which no call comes through.
struct Outage {
    /// When the first call that failed was sent.
    since: Moment,
    /// When to try again.
    backoff: Backoff,
    /// Why the newest call failed.
    error: Error,
}

/// What hearing of a grant asks for.
enum Errand {
    /// Nobody waits for this ticket of ours: let the next one have the lock.
    PassOver(TicketId, u64),
    /// We know nothing of this ticket: an old call of ours arrived late.
    Withdraw(TicketId),
}

impl Room {
    pub(crate) fn new(shared: Arc<Shared>, keys: LockKeys) -> Room {
        Room {
            shared,
            keys,
            state: Mutex::new(State {
                tickets: HashMap::new(),
                waiting: BTreeMap::new(),
                holders: Vec::new(),
                newest: 0,
                ended: 0,
                proven: Moment::from_nanos(0),
                poller: None,
                next_poll: Moment::NEVER,
                outage: None,
                listening: false,
                deaf: false,
                emptied: Moment::from_nanos(0),
            }),
        }
    }

    /// Sends a command about this lock.
    pub(crate) fn call(&self, settings: &Settings, command: &Command, by: Moment) -> Result<Reply, Failure> {
        self.shared.engine.call(&self.keys, &settings.terms(), command, by)
    }

    /// The fences of leases that are held.
    pub(crate) fn held(&self) -> Vec<u64> {
        self.state.lock().holders.iter().map(|(_, fence, _)| *fence).collect()
    }

    /// Writes down a ticket before its first call. Refuses a thread that would wait for itself.
    fn open(&self, ticket: &TicketId, waits: bool) -> Result<(), Error> {
        let mut state = self.state.lock();
        if waits {
            let me = thread::current().id();
            if state.holders.iter().any(|(_, _, owner)| *owner == Some(me)) {
                return Err(Error::WouldDeadlock { lock: self.keys.name.clone() });
            }
        }
        state.put(ticket, Place::Asking);
        Ok(())
    }

    /// Writes down that `ticket` holds the lock, and which thread took it.
    fn take(&self, ticket: &TicketId, fence: u64, owner: Option<ThreadId>) {
        let mut state = self.state.lock();
        state.put(ticket, Place::Held);
        state.holders.push((ticket.clone(), fence, owner));
    }

    /// Writes down which thread has the lease now; `None` if no thread in particular, or if it was lost.
    pub(crate) fn own(&self, ticket: &TicketId, owner: Option<ThreadId>) {
        if let Some(holder) = self.state.lock().holders.iter_mut().find(|(held, _, _)| held == ticket) {
            holder.2 = owner;
        }
    }

    /// Forgets a lease that ended. Gives the time since when an `acquire` for its ticket may still arrive, if one may.
    pub(crate) fn end(&self, ticket: &TicketId, fence: u64) -> Option<Moment> {
        let mut state = self.state.lock();
        let known = state.tickets.remove(ticket);
        state.holders.retain(|(held, _, _)| held != ticket);
        state.ended = state.ended.max(fence);
        known.and_then(|known| known.doubt)
    }

    /// Takes note of the grant that a reply named. `fresh` is when the call was sent, if that call made the grant.
    pub(crate) fn hear(self: &Arc<Room>, settings: &Settings, named: Option<Next>, fresh: Option<Moment>) {
        let Some(named) = named else { return };
        let errand = self.state.lock().hear(&named, fresh);
        self.run(settings, errand);
    }

    /// Runs what hearing of a grant asked for, and what that asks for in turn.
    fn run(self: &Arc<Room>, settings: &Settings, mut errand: Option<Errand>) {
        while let Some(next) = errand.take() {
            let sent = clock::now();
            let command = match &next {
                Errand::PassOver(ticket, fence) => {
                    debug!("`{}`: nobody waits for {ticket} yet, so it is passed over", self.keys.name);
                    Command::Release { ticket: ticket.clone(), fence: *fence }
                }
                Errand::Withdraw(ticket) => {
                    debug!("`{}`: nobody here knows of {ticket} any more; it is withdrawn", self.keys.name);
                    Command::Abandon { ticket: ticket.clone() }
                }
            };
            match self.call(settings, &command, sent.after(self.shared.call_timeout)) {
                Ok(Reply::Released { next: Some(named) }) => {
                    errand = self.state.lock().hear(&named, Some(sent));
                }
                Ok(
                    Reply::Abandoned { next: Some(named) }
                    | Reply::Already { next: Some(named) }
                    | Reply::Lost { next: Some(named) },
                ) => {
                    errand = self.state.lock().hear(&named, None);
                }
                Ok(_) => {}
                // It is free of us as soon as that can be delivered, or when its lease ends.
                Err(_) => self.defer(settings, next),
            }
        }
    }

    /// Has an errand run in the background.
    fn defer(self: &Arc<Room>, settings: &Settings, errand: Errand) {
        match errand {
            // Never by `abandon`: its place is still wanted, and by the time this arrives it may hold the lock.
            Errand::PassOver(ticket, fence) => {
                self.shared.withdrawals.pass_over(self, settings, &ticket, fence);
            }
            Errand::Withdraw(ticket) => self.shared.withdrawals.add(self, settings, &ticket, false),
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.shared.forget_room(&self.keys.name);
    }
}

impl State {
    /// Writes down what became of a ticket.
    fn put(&mut self, ticket: &TicketId, place: Place) -> &mut Known {
        let known = self.tickets.entry(ticket.clone()).or_default();
        known.place = place;
        known
    }

    /// Notes that an `acquire` for `ticket` got no answer and may still arrive; says whether the ticket is known.
    fn doubt(&mut self, ticket: &TicketId) -> bool {
        // Not the time before the call: the thread may have been kept from sending it for a while.
        self.tickets.get_mut(ticket).map(|known| known.doubt = Some(clock::now())).is_some()
    }

    /// Decides to pass a grant over. From here on it is not believed: its release may arrive at any time.
    fn pass_over(&mut self, ticket: &TicketId, fence: u64) -> Errand {
        if let Some(known) = self.tickets.get_mut(ticket) {
            known.passed_over = known.passed_over.max(fence);
        }
        Errand::PassOver(ticket.clone(), fence)
    }

    /// Takes note of a grant of ours. `fresh` is when the call that made it was sent, if one of ours did.
    fn hear(&mut self, named: &Next, fresh: Option<Moment>) -> Option<Errand> {
        let Some(known) = self.tickets.get_mut(&named.ticket) else {
            // Its waiter gave up and is withdrawing it, or it was released and this reply was slower.
            let old = named.fence <= self.ended;
            return (!old).then(|| Errand::Withdraw(named.ticket.clone()));
        };
        let old = named.fence <= self.newest;
        let since = fresh.unwrap_or(self.proven);
        match known.place {
            Place::Parked => Some(self.pass_over(&named.ticket, named.fence)),
            Place::Held => None,
            // This lease lapsed, and the lock went on to somebody else since.
            Place::Asking | Place::Waiting(_) if old => None,
            // If its own call was answered before this grant was made, nobody says it again: to be named is to have
            // claimed, and a ring comes once.
            Place::Asking => {
                if known.news.is_none_or(|(fence, _)| fence < named.fence) {
                    known.news = Some((named.fence, since));
                }
                None
            }
            Place::Waiting(_) if named.fence <= known.passed_over => {
                Some(self.pass_over(&named.ticket, named.fence))
            }
            Place::Waiting(position) => {
                let seat = self.waiting.get_mut(&(position, named.ticket.clone()))?;
                if seat.grant.is_none_or(|grant| grant.fence < named.fence) {
                    seat.grant = Some(Grant { fence: named.fence, position, since });
                    seat.wake.notify_one();
                }
                None
            }
        }
    }

    /// Takes note of a `waiting` reply to a call sent at `sent`: what it proves, and when to ask again.
    fn absorb(&mut self, waiting: &Waiting, settings: &Settings, sent: Moment) -> Option<Errand> {
        self.outage = None;
        // First what it names, by what was known before: this answer proves nothing about that grant.
        let errand = waiting.next.as_ref().and_then(|named| self.hear(named, None));
        self.newest = self.newest.max(waiting.newest);
        self.proven = self.proven.max(sent);
        let stretched = (POLL_PER_AHEAD * u32::try_from(waiting.ahead).unwrap_or(u32::MAX)).min(POLL_LONG);
        let poll = settings.poll.max(stretched).min(if self.deaf { POLL_DEAF } else { Duration::MAX });
        // One more millisecond: asking just before the lease lapses would be for nothing.
        let lapses = Duration::from_millis(waiting.holder_ms.saturating_add(1));
        let due = sent.after(poll.min(lapses).max(POLL_SHORT));
        self.next_poll = self.next_poll.min(due);
        errand
    }

    /// Wakes whoever polls.
    fn wake_poller(&self) {
        if let Some(seat) = self.poller.as_ref().and_then(|key| self.waiting.get(key)) {
            seat.wake.notify_one();
        }
    }

    /// Has the next poll done now.
    fn poll_now(&mut self) {
        self.next_poll = clock::now();
        self.wake_poller();
    }
}

/// A `waiting` reply.
struct Waiting {
    position: u64,
    ahead: u64,
    holder_ms: u64,
    newest: u64,
    next: Option<Next>,
}

/// What came of an attempt.
pub(crate) enum Outcome {
    /// The lock is ours.
    Granted(Grant),
    /// The lock is not to be had now: busy, or queued at this position.
    NotYet(u64),
}

/// One ticket on its way: from its first call until it holds the lock. Dropped on any other way out, a panic
/// included, it withdraws itself.
pub(crate) struct Attempt {
    room: Arc<Room>,
    settings: Arc<Settings>,
    ticket: TicketId,
    /// Where it stands, once known.
    position: Option<u64>,
    /// Whether the server may know of it.
    known: bool,
    /// Whether a call of it may still arrive.
    doubtful: bool,
    /// Whether it needs no withdrawal any more.
    settled: bool,
}

impl Attempt {
    /// Takes a ticket. `waits` says whether the thread is going to wait for it.
    pub(crate) fn open(room: &Arc<Room>, settings: &Arc<Settings>, waits: bool) -> Result<Attempt, Error> {
        let lease_ms = u64::try_from(settings.lease.as_millis()).unwrap_or(u64::MAX);
        let ticket = room.shared.ticket(lease_ms);
        room.open(&ticket, waits)?;
        Ok(Attempt {
            room: Arc::clone(room),
            settings: Arc::clone(settings),
            ticket,
            position: None,
            known: false,
            doubtful: false,
            settled: false,
        })
    }

    pub(crate) fn room(&self) -> &Arc<Room> {
        &self.room
    }

    pub(crate) fn settings(&self) -> &Arc<Settings> {
        &self.settings
    }

    pub(crate) fn ticket(&self) -> &TicketId {
        &self.ticket
    }

    /// Asks for the lock, again and again while the server may have heard but did not answer, or is not ready; until
    /// `deadline` or for as long as patience lasts.
    ///
    /// A server that cannot be reached at all is told at once: nothing is queued, so there is nothing to wait for.
    pub(crate) fn ask(&mut self, wait: bool, deadline: Moment) -> Result<Outcome, Error> {
        let start = clock::now();
        let last = deadline.min(start.after(self.settings.patience.max(self.room.shared.call_timeout)));
        let mut backoff = Backoff::new(RETRY);
        let mut told = None;
        loop {
            let command = Command::Acquire {
                ticket: self.ticket.clone(),
                position: self.position,
                wait,
                max_queue: self.settings.max_queue,
            };
            let sent = clock::now();
            let failure = match self.room.call(&self.settings, &command, deadline) {
                Ok(reply) => match self.answered(reply, sent)? {
                    Outcome::Granted(grant) if self.was_passed_over(&grant) => match self.release(&grant) {
                        Ok(()) => continue,
                        Err(failure) => failure,
                    },
                    // An answer that took so long that little is left of the lease: ask again, which starts it anew.
                    Outcome::Granted(grant) if !self.is_fresh(&grant) && clock::now() < last => continue,
                    outcome => return Ok(outcome),
                },
                Err(failure) => failure,
            };
            if failure.sent {
                self.known = true;
                self.doubtful = true;
                self.room.state.lock().doubt(&self.ticket);
            }
            let answered = !matches!(&failure.error, Error::Redis { source, .. } if source.is_io_error());
            let hopeless = !failure.retry || !(self.known || answered);
            let pause = backoff.pause();
            if hopeless || clock::now().after(pause) >= last {
                // A last call that the deadline cut short says less than the server did before.
                let timed_out = matches!(&failure.error, Error::Redis { source, .. } if source.is_timeout());
                return Err(told.filter(|_| timed_out).unwrap_or(failure.error));
            }
            if answered {
                told = Some(failure.error);
            }
            thread::park_timeout(pause);
        }
    }

    /// Whether a release of this grant is on its way, or was.
    fn was_passed_over(&self, grant: &Grant) -> bool {
        let state = self.room.state.lock();
        state.tickets.get(&self.ticket).is_some_and(|known| grant.fence <= known.passed_over)
    }

    /// Releases a grant that was passed over, now for certain: once this is answered, no other release of it matters.
    fn release(&self, grant: &Grant) -> Result<(), Failure> {
        let command = Command::Release { ticket: self.ticket.clone(), fence: grant.fence };
        let sent = clock::now();
        let reply = self.room.call(&self.settings, &command, sent.after(self.room.shared.call_timeout))?;
        match reply {
            Reply::Released { next } => self.room.hear(&self.settings, next, Some(sent)),
            // To be named is to have claimed: nobody says it again.
            Reply::Already { next } | Reply::Lost { next } => self.room.hear(&self.settings, next, None),
            _ => {}
        }
        Ok(())
    }

    /// Takes the reply to the ticket's own call.
    fn answered(&mut self, reply: Reply, sent: Moment) -> Result<Outcome, Error> {
        match reply {
            Reply::Granted { fence, position } => {
                self.known = true;
                self.position = Some(position);
                Ok(Outcome::Granted(Grant { fence, position, since: sent }))
            }
            Reply::Waiting { position, ahead, holder_ms, newest, next, .. } => {
                self.known = true;
                self.position = Some(position);
                let waiting = Waiting { position, ahead, holder_ms, newest, next };
                let errand = {
                    let mut state = self.room.state.lock();
                    if state.waiting.is_empty() {
                        state.next_poll = Moment::NEVER;
                    }
                    if let Some(known) = state.tickets.get_mut(&self.ticket) {
                        // In the queue it is not the holder any more.
                        known.news = known.news.filter(|(fence, _)| *fence > newest);
                    }
                    state.absorb(&waiting, &self.settings, sent)
                };
                self.room.run(&self.settings, errand);
                Ok(Outcome::NotYet(waiting.position))
            }
            Reply::Busy { next } => {
                self.room.hear(&self.settings, next, None);
                Ok(Outcome::NotYet(0))
            }
            Reply::Full { next } => {
                self.room.hear(&self.settings, next, None);
                let limit = self.settings.max_queue.unwrap_or(0);
                Err(Error::QueueFull { lock: self.room.keys.name.clone(), limit })
            }
            other => Err(Error::Protocol(format!("acquire was answered with {other:?}"))),
        }
    }

    /// Waits until the ticket holds the lock (`Some`) or `deadline` passes (`None`).
    ///
    /// It must be queued, or have been: a ticket that was passed over is queued again at its old position.
    pub(crate) fn wait(&mut self, deadline: Moment) -> Result<Option<Grant>, Error> {
        loop {
            let Some(position) = self.position else { return Ok(None) };
            let me =
                Waiter { room: &self.room, settings: &self.settings, key: (position, self.ticket.clone()) };
            let wake = me.sit_down();
            let failed = self.sit(&me.key, &wake, deadline);
            // A ring may come between the last look and standing up; it counts all the same.
            match (me.stand_up(), failed) {
                (Some(grant), _) if self.is_fresh(&grant) => return Ok(Some(grant)),
                // It went stale on the last few steps, so this is no time-out: ask, and if need be wait again.
                (Some(_), Ok(())) if clock::now() < deadline => {
                    if let Outcome::Granted(grant) = self.ask(true, deadline)? {
                        return Ok(Some(grant));
                    }
                }
                (stale, failed) => {
                    if let Some(grant) = stale {
                        let errand = self.room.state.lock().pass_over(&self.ticket, grant.fence);
                        // The caller's time is up.
                        self.room.defer(&self.settings, errand);
                    }
                    return failed.map(|()| None);
                }
            }
        }
    }

    /// Whether so much of the lease is left that its holder can start; else it is asked for again first.
    fn is_fresh(&self, grant: &Grant) -> bool {
        grant.since.after(self.settings.good_for()).left() >= self.settings.lease / 2
    }

    /// Waits on a seat until there is a grant on it, or `deadline` passes.
    fn sit(&self, key: &(u64, TicketId), wake: &Condvar, deadline: Moment) -> Result<(), Error> {
        loop {
            let mut state = self.room.state.lock();
            let now = clock::now();
            let Some(seat) = state.waiting.get_mut(key) else {
                // Nobody but this thread takes it away.
                return Err(Error::Protocol(format!("the seat of {} is gone", self.ticket)));
            };
            if let Some(grant) = seat.grant {
                if self.is_fresh(&grant) || now >= deadline {
                    return Ok(());
                }
                // News that took long: ask before believing. The reply proves the grant from now, or that it is gone.
                seat.grant = None;
                drop(state);
                self.room.poll(key, &self.settings, deadline);
                continue;
            }
            if let Some(error) = seat.error.take() {
                return Err(error);
            }
            if now >= deadline {
                // Whether the turn came by now is not known then, so it must not be told as "it did not".
                return match &state.outage {
                    Some(outage) if now.since(outage.since) >= UNREACHABLE => Err(outage.error.clone()),
                    _ => Ok(()),
                };
            }
            let mut wake_at = deadline;
            if state.poller.get_or_insert_with(|| key.clone()) == key {
                if state.next_poll <= now {
                    // Nobody else polls meanwhile; the next time is set by the answer.
                    state.next_poll = Moment::NEVER;
                    let first = state.waiting.iter().find(|(_, seat)| seat.grant.is_none());
                    let first = first.map(|(key, seat)| (key.clone(), Arc::clone(&seat.settings)));
                    drop(state);
                    self.room.listen();
                    if let Some((key, settings)) = first {
                        self.room.poll(&key, &settings, deadline);
                    }
                    continue;
                }
                wake_at = wake_at.min(state.next_poll);
            }
            park(wake, &mut state, wake_at);
        }
    }

    /// Leaves the ticket queued, or passed over if its turn comes: nobody waits for it now.
    pub(crate) fn park(&self) {
        let errand = {
            let mut state = self.room.state.lock();
            let news = state.put(&self.ticket, Place::Parked).news.take();
            // Its turn came after the last answer, and nobody will say so again.
            news.map(|(fence, _)| state.pass_over(&self.ticket, fence))
        };
        if let Some(errand) = errand {
            self.room.defer(&self.settings, errand);
        }
    }

    /// Gives a grant on before anybody uses it; the ticket keeps its position.
    pub(crate) fn pass_over(&self, grant: Grant) {
        self.park();
        let errand = self.room.state.lock().pass_over(&self.ticket, grant.fence);
        self.room.run(&self.settings, Some(errand));
    }

    /// Ends the attempt with a lease: the ticket holds the lock, taken by `owner`.
    pub(crate) fn settle(&mut self, grant: Grant, owner: Option<ThreadId>) {
        self.settled = true;
        self.room.take(&self.ticket, grant.fence, owner);
    }

    /// Takes a parked ticket up again; `waits` as for [`open`](Attempt::open).
    pub(crate) fn resume(&self, waits: bool) -> Result<(), Error> {
        self.room.open(&self.ticket, waits)
    }

    /// Notes that the server does not know the ticket: it was not queued.
    pub(crate) fn refused(&mut self) {
        self.known = self.doubtful;
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if self.settled {
            return;
        }
        let known = self.room.state.lock().tickets.remove(&self.ticket);
        // Polls for it were sent by others.
        self.doubtful |= known.is_some_and(|known| known.doubt.is_some());
        if !self.known {
            return;
        }
        let sent = clock::now();
        let command = Command::Abandon { ticket: self.ticket.clone() };
        match self.room.call(&self.settings, &command, sent.after(WITHDRAW_NOW)) {
            Ok(Reply::Abandoned { next }) if !self.doubtful => self.room.hear(&self.settings, next, None),
            // A call that may still be on its way is withdrawn once more when it must have arrived.
            _ => self.room.shared.withdrawals.add(&self.room, &self.settings, &self.ticket, self.doubtful),
        }
    }
}

/// Parks until woken or until `at`.
fn park(wake: &Condvar, state: &mut MutexGuard<'_, State>, at: Moment) {
    if at == Moment::NEVER {
        wake.wait(state);
    } else {
        wake.wait_for(state, at.left());
    }
}

/// A thread in the room, from sitting down until it leaves on whatever way.
struct Waiter<'a> {
    room: &'a Arc<Room>,
    settings: &'a Arc<Settings>,
    key: (u64, TicketId),
}

impl Waiter<'_> {
    fn sit_down(&self) -> Arc<Condvar> {
        let wake = Arc::new(Condvar::new());
        let mut state = self.room.state.lock();
        let known = state.put(&self.key.1, Place::Waiting(self.key.0));
        let seat = Seat {
            wake: Arc::clone(&wake),
            settings: Arc::clone(self.settings),
            // What came while the ticket's own call was under way.
            grant: known
                .news
                .take()
                .filter(|(fence, _)| *fence > known.passed_over)
                .map(|(fence, since)| Grant { fence, position: self.key.0, since }),
            error: None,
            reenter: false,
        };
        state.waiting.insert(self.key.clone(), seat);
        if state.poller.is_none() {
            state.poller = Some(self.key.clone());
        } else if state.next_poll < clock::now().after(POLL_SHORT) {
            state.wake_poller();
        }
        let quiet = !state.listening;
        drop(state);
        if quiet {
            self.room.listen();
        }
        wake
    }
}

impl Waiter<'_> {
    /// Leaves the room with what lay on the seat.
    fn stand_up(self) -> Option<Grant> {
        self.leave()
    }

    fn leave(&self) -> Option<Grant> {
        let mut state = self.room.state.lock();
        let seat = state.waiting.remove(&self.key)?;
        // Until the attempt is settled, parked or withdrawn, its own calls tell.
        state.put(&self.key.1, Place::Asking);
        if state.poller.as_ref() == Some(&self.key) {
            // The last in line stays longest, so this wakes somebody seldom.
            state.poller = state.waiting.last_key_value().map(|(key, _)| key.clone());
            state.wake_poller();
        }
        if state.waiting.is_empty() {
            state.emptied = clock::now();
            state.outage = None;
        }
        seat.grant
    }
}

impl Drop for Waiter<'_> {
    /// Only a panic leaves a seat behind for this.
    fn drop(&mut self) {
        if thread::panicking() {
            self.leave();
            // It may have been about to poll.
            self.room.state.lock().poll_now();
        }
    }
}

impl Room {
    /// Asks for the ticket `key`, and then for all that have to be queued again, until `by`.
    fn poll(self: &Arc<Room>, key: &(u64, TicketId), settings: &Arc<Settings>, by: Moment) {
        let mut next = Some((key.clone(), Arc::clone(settings)));
        while let Some((key, settings)) = next {
            self.ask_for(&key, &settings, by);
            if clock::now() >= by {
                // Whoever polls next goes on.
                self.state.lock().poll_now();
                return;
            }
            let mut state = self.state.lock();
            next = state.waiting.iter_mut().find(|(_, seat)| seat.reenter).map(|(key, seat)| {
                seat.reenter = false;
                (key.clone(), Arc::clone(&seat.settings))
            });
        }
    }

    /// Sends one `acquire` for a ticket that waits here, and takes note of the answer.
    fn ask_for(self: &Arc<Room>, key: &(u64, TicketId), settings: &Arc<Settings>, by: Moment) {
        let command =
            Command::Acquire { ticket: key.1.clone(), position: Some(key.0), wait: true, max_queue: None };
        let sent = clock::now();
        let result = self.call(settings, &command, by);
        let mut state = self.state.lock();
        let errand = match result {
            Ok(Reply::Granted { fence, position }) => {
                state.outage = None;
                // The ticket behind it may have been forgotten like this one: see at once.
                state.next_poll = clock::now();
                let known = state.tickets.get(&key.1).copied();
                match (known, state.waiting.get_mut(key)) {
                    (Some(known), _) if known.place == Place::Parked || fence <= known.passed_over => {
                        Some(state.pass_over(&key.1, fence))
                    }
                    (_, Some(seat)) => {
                        seat.grant = Some(Grant { fence, position, since: sent });
                        seat.wake.notify_one();
                        None
                    }
                    // Its thread left while we asked, and its withdrawal may have come before this call.
                    (None, None) => Some(Errand::Withdraw(key.1.clone())),
                    // Its thread left and has not decided yet; or it has, and holds the lock.
                    (Some(_), None) => {
                        state
                            .tickets
                            .entry(key.1.clone())
                            .and_modify(|known| known.news = Some((fence, sent)));
                        None
                    }
                }
            }
            Ok(Reply::Waiting { position, ahead, holder_ms, newest, reentered, next }) => {
                let waiting = Waiting { position, ahead, holder_ms, newest, next };
                let errand = state.absorb(&waiting, settings, sent);
                if reentered {
                    debug!("`{}`: {} was forgotten and is queued again at {position}", self.keys.name, key.1);
                    for (other, seat) in &mut state.waiting {
                        seat.reenter |= other != key;
                    }
                }
                if !state.waiting.contains_key(key) && !state.tickets.contains_key(&key.1) {
                    Some(Errand::Withdraw(key.1.clone()))
                } else {
                    errand
                }
            }
            Ok(other) => {
                if let Some(seat) = state.waiting.get_mut(key) {
                    seat.error = Some(Error::Protocol(format!("acquire was answered with {other:?}")));
                    seat.wake.notify_one();
                }
                state.next_poll = clock::now().after(POLL_DEAF);
                None
            }
            Err(failure) => {
                let late = failure.sent && !state.doubt(&key.1);
                self.suffer(&mut state, key, sent, failure);
                drop(state);
                if late {
                    // It was given up meanwhile, and would be queued again, or granted, by the call that got no answer.
                    self.shared.withdrawals.add(self, settings, &key.1, true);
                }
                return;
            }
        };
        drop(state);
        self.run(settings, errand);
    }

    /// Takes note of a poll that was sent at `sent` and failed: when to try again, and who has no patience left.
    fn suffer(&self, state: &mut State, key: &(u64, TicketId), sent: Moment, failure: Failure) {
        let now = clock::now();
        if !failure.retry && !matches!(failure.error, Error::OutOfMemory { .. }) {
            if let Some(seat) = state.waiting.get_mut(key) {
                seat.error = Some(failure.error);
                seat.wake.notify_one();
            }
            state.next_poll = now;
            return;
        }
        if state.outage.is_none() && sent < state.proven {
            // A call that was sent later has come through: this one was lost, and no outage began with it.
            state.next_poll = now;
            return;
        }
        let outage = state.outage.get_or_insert_with(|| Outage {
            since: sent,
            backoff: Backoff::new(RETRY),
            error: failure.error.clone(),
        });
        outage.error = failure.error.clone();
        let since = outage.since;
        state.next_poll = now.after(outage.backoff.pause());
        debug!("`{}`: {}; waiting goes on", self.keys.name, failure.error);
        for seat in state.waiting.values_mut() {
            if now.since(since) >= seat.settings.patience {
                seat.error.get_or_insert_with(|| failure.error.clone());
                seat.wake.notify_one();
            }
        }
    }

    /// Makes sure that somebody listens while anybody waits. Without a thread or a connection, polling goes on.
    fn listen(self: &Arc<Room>) {
        {
            let mut state = self.state.lock();
            if state.listening || state.waiting.is_empty() {
                return;
            }
            state.listening = true;
        }
        let room = Arc::clone(self);
        let listener = thread::Builder::new().name("fifo-bell".into()).spawn(move || Listener { room }.run());
        if let Err(why) = listener {
            warn!("`{}`: no thread to listen with ({why}); polling instead", self.keys.name);
            let mut state = self.state.lock();
            state.listening = false;
            state.deaf = true;
            // The next poll may have been set for a room that hears.
            state.next_poll = state.next_poll.min(clock::now().after(POLL_DEAF));
            state.wake_poller();
        }
    }
}

/// The thread that blocks on the bell.
struct Listener {
    room: Arc<Room>,
}

impl Listener {
    fn run(self) {
        let mut bell: Option<Box<dyn Bell>> = None;
        let mut backoff = Backoff::new(Duration::from_secs(1));
        let mut wait = LISTEN;
        while let Some(settings) = self.stays() {
            let heard = match &mut bell {
                Some(bell) => bell.listen(wait),
                None => {
                    let by = clock::now().after(self.room.shared.call_timeout);
                    match self.room.shared.engine.bell(&self.room.keys, by) {
                        Ok(opened) => {
                            bell = Some(opened);
                            self.room.state.lock().deaf = false;
                            continue;
                        }
                        Err(failure) => Err(failure),
                    }
                }
            };
            match heard {
                Ok(Heard::Ring(ring)) => {
                    (wait, backoff) = (LISTEN, Backoff::new(Duration::from_secs(1)));
                    self.room.hear(&settings, Some(ring), None);
                }
                Ok(Heard::Nothing) => {
                    backoff = Backoff::new(Duration::from_secs(1));
                    wait = (wait * 2).min(LISTEN_LONG);
                    if self.room.state.lock().waiting.is_empty() {
                        wait = LISTEN;
                    }
                }
                Ok(Heard::Noise) => {
                    warn!("`{}`: somebody else writes to {}", self.room.keys.name, self.room.keys.bell);
                    thread::park_timeout(backoff.pause());
                }
                Err(failure) => {
                    debug!("`{}`: cannot listen: {}", self.room.keys.name, failure.error);
                    bell = None;
                    wait = LISTEN;
                    {
                        let mut state = self.room.state.lock();
                        state.deaf = true;
                        // What rang meanwhile may be lost with the connection.
                        state.poll_now();
                    }
                    thread::park_timeout(backoff.pause());
                }
            }
        }
    }

    /// Whether anybody may still need this thread; gives the settings of one who waits.
    fn stays(&self) -> Option<Arc<Settings>> {
        let mut state = self.room.state.lock();
        if let Some((_, seat)) = state.waiting.first_key_value() {
            return Some(Arc::clone(&seat.settings));
        }
        if clock::now().since(state.emptied) < LINGER {
            return Some(Arc::new(Settings::default()));
        }
        // In the same breath as the look at the room: whoever sits down next starts another listener.
        state.listening = false;
        None
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if thread::panicking() {
            error!("`{}`: the listener panicked; polling until the next one runs", self.room.keys.name);
            let mut state = self.room.state.lock();
            state.listening = false;
            state.poll_now();
        }
    }
}

#[cfg(test)]
impl Room {
    /// What is left in the room, for tests that it is nothing.
    pub(crate) fn residue(&self) -> String {
        let state = self.state.lock();
        let mut left = String::new();
        if !state.tickets.is_empty() {
            left = format!("tickets {:?} ", state.tickets);
        }
        if !state.waiting.is_empty() || state.poller.is_some() {
            left = format!("{left}{} seats, poller {:?} ", state.waiting.len(), state.poller);
        }
        if !state.holders.is_empty() || state.listening {
            left = format!("{left}holders {:?}, listening {}", state.holders, state.listening);
        }
        left
    }
}
