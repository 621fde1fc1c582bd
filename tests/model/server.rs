//! The server of the model: the real [`apply`] between a small state and a small state, and what must hold of it.

use redis_fifo_lock::protocol::machine::Bell;
use redis_fifo_lock::protocol::{ClientId, Command, Next, Record, Reply, State, Terms, TicketId, apply};

use super::rules::{Fault, Model};
use super::world::{Call, Kind, NEVER, NIL, NOBODY, Num, Queued, Ring, Server, Ticks, Told, Use, World};

/// Where the numbers of the model lie among those of the server; far from 0, which means none there.
const ORIGIN: i64 = 1_000_000;
/// Server time at every command, microseconds. Within a tick it is later than all that happened before, as on a real
/// server, where no two commands run in the same microsecond.
const NOW: u64 = ORIGIN as u64 + 500;
/// For ever, as far as the model goes.
const LONG: Ticks = 100;

/// What the model check looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    /// Two tickets believe that they hold the lock.
    Exclusion,
    /// A fence is not higher than all before it, or comes back after a newer one.
    Fence,
    /// A grant passed over a queued ticket with a smaller position whose client was not suspected.
    Order,
    /// A release was confirmed, but its lease had been taken away.
    Verdict,
    /// A bell has two rings.
    Bell,
    /// Clients act, and yet one of them waits for ever.
    Stuck,
}

/// What the server's keys are called, and the settings that are sent.
#[derive(Default)]
pub(crate) struct Names {
    tickets: Vec<TicketId>,
    clients: Vec<ClientId>,
    terms: Option<Terms>,
    /// Whether an idle lock is forgotten within the time that is modelled.
    forgets: bool,
}

impl Names {
    pub(crate) fn new(model: &Model) -> Names {
        let clients: Vec<_> =
            (0..model.shape.clients).map(|index| ClientId::cleaned(["a", "b", "c"][index])).collect();
        let lease_ms = model.lease as u64;
        let ticket = |index| TicketId::new(&clients[model.shape.owner(index)], index.into(), lease_ms);
        let terms = Terms {
            claim_ms: model.claim as u64,
            idle_ms: model.idle.unwrap_or(LONG) as u64,
            regroup_ms: model.regroup as u64,
        };
        let tickets = (0..model.shape.tickets() as u8).map(ticket).collect();
        Names { tickets, clients, terms: Some(terms), forgets: model.idle.is_some() }
    }

    fn ticket(&self, index: u8) -> Option<TicketId> {
        (index != NOBODY).then(|| self.tickets[usize::from(index)].clone())
    }

    fn index(&self, ticket: Option<&TicketId>) -> u8 {
        let Some(ticket) = ticket else { return NOBODY };
        self.tickets.iter().position(|one| one == ticket).map_or(NOBODY, |index| index as u8)
    }

    fn client(&self, index: usize) -> Box<str> {
        self.clients[index].as_str().into()
    }

    /// The command that `call` is.
    fn command(&self, call: &Call, task: Use) -> Command {
        let ticket = self.tickets[usize::from(call.ticket)].clone();
        let fence = real(call.fence);
        match call.kind {
            Kind::Ask | Kind::Poll => Command::Acquire {
                ticket,
                position: (call.position != NIL).then(|| real(call.position)),
                wait: task != Use::Try,
                max_queue: (task == Use::Limited && call.kind == Kind::Ask).then_some(1),
            },
            Kind::Renew => Command::Renew { ticket, fence },
            Kind::Release | Kind::PassOver => Command::Release { ticket, fence },
            Kind::Abandon => Command::Abandon { ticket },
        }
    }

    /// The keys as the machine has them.
    fn state(&self, server: &Server) -> State {
        let mut state = State::default();
        if server.known {
            let suspects = (0..self.clients.len())
                .filter(|index| server.suspects >> index & 1 == 1)
                .map(|i| self.client(i));
            state.record = Some(Record {
                holder: self.ticket(server.holder),
                fence: real(server.fence),
                until: instant(server.until).unwrap_or(0),
                claim: instant(server.claim),
                pos: real(server.last),
                born: real(server.born),
                suspects: suspects.collect(),
                place: real(server.place),
            });
            state.record_expires = instant(server.record_expires);
        }
        state.queue = server
            .queue
            .iter()
            .map(|queued| (real(queued.position), self.tickets[usize::from(queued.ticket)].clone()))
            .collect();
        state.lost = server.lost.iter().map(|fence| real(*fence)).collect();
        state.lost_expires = instant(server.lost_expires).unwrap_or(u64::MAX);
        for (index, ring) in server.bells.iter().enumerate() {
            if let Some(ticket) = self.ticket(ring.ticket) {
                let rings = [Next { ticket, fence: real(ring.fence) }].into();
                let expires = instant(ring.expires).unwrap_or(0);
                state.bells.insert(self.client(index), Bell { rings, expires });
            }
        }
        state
    }

    /// The keys as the model keeps them. `epoch` is when what was granted now was granted.
    fn server(&self, state: &State, before: &Server, epoch: u8) -> Result<Server, Broken> {
        let mut server = Server::default();
        if let Some(record) = &state.record {
            server.known = true;
            server.holder = self.index(record.holder.as_ref());
            server.fence = num(record.fence);
            server.until = if record.until == 0 { NEVER } else { ticks(record.until) };
            server.claim = record.claim.map_or(NEVER, ticks);
            server.last = num(record.pos);
            server.born = num(record.born);
            for (index, client) in self.clients.iter().enumerate() {
                server.suspects |= u8::from(record.suspects(client.as_str())) << index;
            }
            server.place = num(record.place);
            server.epoch = if before.fence == server.fence { before.epoch } else { epoch };
            if self.forgets {
                server.record_expires = state.record_expires.map_or(NEVER, ticks);
            }
        }
        for (position, ticket) in &state.queue {
            server.queue.push(Queued { position: num(*position), ticket: self.index(Some(ticket)) });
        }
        for fence in &state.lost {
            server.lost.push(num(*fence));
        }
        if self.forgets && !server.lost.is_empty() {
            server.lost_expires = ticks(state.lost_expires);
        }
        for (index, client) in self.clients.iter().enumerate() {
            let Some(bell) = state.bells.get(client.as_str()) else { continue };
            let Some(ring) = bell.rings.front() else { continue };
            if bell.rings.len() > 1 {
                return Err(Broken::Bell);
            }
            let fence = num(ring.fence);
            let old = before.bells[index];
            let epoch = if old.ticket != NOBODY && old.fence == fence { old.epoch } else { epoch };
            server.bells[index] =
                Ring { ticket: self.index(Some(&ring.ticket)), fence, expires: ticks(bell.expires), epoch };
        }
        Ok(server)
    }
}

impl Model {
    /// Lets `call` arrive: gives it with its answer.
    pub(crate) fn serve(&self, world: &mut World, mut call: Call) -> Result<Call, Broken> {
        let task = world.tickets[usize::from(call.ticket)].task;
        let reply = self.run(world, &self.names.command(&call, task))?;
        let (told, next) = match reply {
            Reply::Granted { fence, position } => {
                (call.number, call.place) = (num(fence), num(position));
                (Told::Granted, None)
            }
            Reply::Waiting { newest, position, next, .. } => {
                (call.number, call.place) = (num(newest), num(position));
                (Told::Waiting, next)
            }
            Reply::Busy { next } => (Told::Busy, next),
            Reply::Full { next } => (Told::Full, next),
            Reply::Renewed { .. } => (Told::Renewed, None),
            Reply::Lost { next } => (Told::Lost, next),
            Reply::Released { next } => (Told::Released, next),
            Reply::Already { next } => (Told::Already, next),
            Reply::Abandoned { next } => (Told::Abandoned, next),
            other => unreachable!("no call of a ticket is answered with {other:?}"),
        };
        call.told = told;
        call.next = self.names.index(next.as_ref().map(|next| &next.ticket));
        call.next_fence = next.map_or(NIL, |next| num(next.fence));
        if matches!(told, Told::Granted | Told::Renewed) {
            world.server.epoch = world.epoch;
        }
        call.epoch = world.server.epoch;
        if told == Told::Renewed && world.displaced.contains(&call.fence) {
            // An old fence came back after a newer one.
            return Err(Broken::Fence);
        }
        let confirmed = matches!(told, Told::Released | Told::Already);
        // What the server has forgotten it cannot tell; the client knows that it may have.
        let remembers = told == Told::Released || self.idle.is_none();
        if confirmed && remembers && world.displaced.contains(&call.fence) {
            return Err(Broken::Verdict);
        }
        Ok(call)
    }

    /// An operator takes the lease away.
    pub(crate) fn evict(&self, world: &mut World) -> Result<(), Broken> {
        let command = Command::Evict { fence: real(world.server.fence) };
        self.run(world, &command).map(|_| ())
    }

    /// Runs a command, and looks at what it did.
    fn run(&self, world: &mut World, command: &Command) -> Result<Reply, Broken> {
        let before = world.server;
        let mut state = self.names.state(&before);
        let reply = self.apply(&mut state, command);
        let after = self.names.server(&state, &before, world.epoch)?;
        world.server = after;
        let ended = |call: &Command| match call {
            Command::Release { ticket, fence } => {
                self.names.index(Some(ticket)) == before.holder && num(*fence) == before.fence
            }
            Command::Abandon { ticket } => self.names.index(Some(ticket)) == before.holder,
            _ => false,
        };
        let replaced = after.fence != before.fence || after.holder != before.holder;
        if before.known && before.holder != NOBODY && replaced && !ended(command) {
            world.displaced.push(before.fence);
        }
        if after.known && after.holder != NOBODY && (after.fence != before.fence || !before.known) {
            self.check_grant(world, &before, command)?;
        }
        Ok(reply)
    }

    /// A grant was made.
    fn check_grant(&self, world: &mut World, before: &Server, command: &Command) -> Result<(), Broken> {
        let after = &world.server;
        if after.fence <= world.top {
            return Err(Broken::Fence);
        }
        world.top = after.fence;
        if after.queue.iter().any(|queued| queued.position < after.place) {
            return Err(Broken::Order);
        }
        let left = |queued: &&Queued| !after.queue.iter().any(|other| other.ticket == queued.ticket);
        let given_up = match command {
            Command::Abandon { ticket } => self.names.index(Some(ticket)),
            _ => NOBODY,
        };
        for queued in before.queue.iter().filter(left) {
            let suspected = after.suspects >> self.shape.owner(queued.ticket) & 1 == 1;
            let passed = queued.position < after.place && queued.ticket != after.holder;
            if passed && !suspected && queued.ticket != given_up {
                return Err(Broken::Order);
            }
        }
        Ok(())
    }

    /// The machine, or a broken one.
    fn apply(&self, state: &mut State, command: &Command) -> Reply {
        let terms = self.names.terms.as_ref().expect("made from a whole model");
        let Some(fault) = self.fault else { return apply(state, NOW, terms, command) };
        state.expire(NOW);
        let before = state.clone();
        let record = before.record.as_ref();
        let holder = record.and_then(|record| record.holder.clone());
        match (fault, command) {
            (Fault::FreeWithoutBell, Command::Acquire { ticket, .. }) => {
                if let Some(record) = &mut state.record
                    && record.claim.is_some_and(|claim| claim <= NOW)
                    && holder.is_some_and(|holder| holder.client() != ticket.client())
                {
                    record.until = 0;
                }
                apply(state, NOW, terms, command)
            }
            (Fault::NamingDoesNotClaim, _) => {
                let reply = apply(state, NOW, terms, command);
                if let (Some(record), Some(old), Some(_)) = (&mut state.record, record, named(&reply))
                    && record.fence == old.fence
                {
                    record.claim = old.claim;
                    state.bells.clone_from(&before.bells);
                }
                reply
            }
            (Fault::RenewalReowns, Command::Renew { ticket, fence }) => {
                let reply = apply(state, NOW, terms, command);
                match (&mut state.record, reply) {
                    (Some(record), Reply::Lost { .. }) if record.holder.is_none() => {
                        record.holder = Some(ticket.clone());
                        record.until = NOW + ticket.lease_ms() * 1000;
                        record.fence = record.fence.max(*fence);
                        state.record_expires = None;
                        Reply::Renewed { waiters: 0 }
                    }
                    (_, reply) => reply,
                }
            }
            (Fault::RenewalSteals, Command::Renew { ticket, .. }) => {
                let reply = apply(state, NOW, terms, command);
                match (&mut state.record, reply) {
                    (Some(record), Reply::Lost { .. }) => {
                        record.holder = Some(ticket.clone());
                        record.until = NOW + ticket.lease_ms() * 1000;
                        record.claim = None;
                        Reply::Renewed { waiters: 0 }
                    }
                    (_, reply) => reply,
                }
            }
            (Fault::ReleaseByHolderOnly, Command::Release { ticket, fence }) => {
                let current = record.map_or(0, |record| record.fence);
                let fence = if holder.as_ref() == Some(ticket) { current } else { *fence };
                apply(state, NOW, terms, &Command::Release { ticket: ticket.clone(), fence })
            }
            (Fault::LostNotRecorded, _) => {
                let reply = apply(state, NOW, terms, command);
                state.lost.clear();
                reply
            }
            (Fault::BornNotChecked, Command::Release { fence, .. }) => {
                if let Some(record) = &mut state.record {
                    record.born = record.born.min(*fence);
                }
                apply(state, NOW, terms, command)
            }
            (Fault::FenceCounts, _) => {
                let reply = apply(state, NOW, terms, command);
                let old = record.map_or(0, |record| record.fence);
                match (&mut state.record, reply) {
                    (Some(record), Reply::Granted { position, .. }) if record.fence > old => {
                        record.fence = old.max(ORIGIN as u64 - 9000) + 1;
                        Reply::Granted { fence: record.fence, position }
                    }
                    (_, reply) => reply,
                }
            }
            (Fault::NewcomersBarge, Command::Acquire { ticket, .. }) => {
                let mine = |(_, queued): &(u64, TicketId)| queued == ticket;
                if before.queue.iter().any(mine) {
                    return apply(state, NOW, terms, command);
                }
                let others = std::mem::take(&mut state.queue);
                let reply = apply(state, NOW, terms, command);
                state.queue.extend(others);
                state.record_expires = None;
                reply
            }
            (Fault::PollsDoNotAdvance, Command::Acquire { ticket, .. }) => {
                let queued = before.queue.iter().any(|(_, queued)| queued == ticket);
                if let Some(record) = state.record.as_mut().filter(|_| queued) {
                    record.until = record.until.max(NOW + 1000);
                    record.claim = record.claim.map(|claim| claim.max(NOW + 1000));
                }
                let reply = apply(state, NOW, terms, command);
                if let (Some(record), Some(old)) = (&mut state.record, before.record.filter(|_| queued))
                    && record.holder == old.holder
                {
                    (record.until, record.claim) = (old.until, record.claim.and(old.claim));
                }
                reply
            }
            _ => apply(state, NOW, terms, command),
        }
    }
}

/// The grant that a reply names.
fn named(reply: &Reply) -> Option<&Next> {
    match reply {
        Reply::Waiting { next, .. }
        | Reply::Busy { next }
        | Reply::Full { next }
        | Reply::Lost { next }
        | Reply::Released { next }
        | Reply::Already { next }
        | Reply::Abandoned { next } => next.as_ref(),
        _ => None,
    }
}

fn real(number: Num) -> u64 {
    if number == NIL { 0 } else { (ORIGIN + i64::from(number)) as u64 }
}

fn num(number: u64) -> Num {
    if number == 0 { NIL } else { Num::try_from(number as i64 - ORIGIN).expect("a number of this model") }
}

fn instant(time: Ticks) -> Option<u64> {
    (time != NEVER).then(|| (NOW as i64 + i64::from(time) * 1000) as u64)
}

fn ticks(time: u64) -> Ticks {
    let ahead = time as i64 - NOW as i64;
    assert_eq!(ahead % 1000, 0, "the machine counts in whole ticks");
    Ticks::try_from(ahead / 1000).expect("a time of this model")
}
