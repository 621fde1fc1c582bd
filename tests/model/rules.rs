//! The clients of the model: what they may do, what they believe and from when, as in `waiting.rs` and `holding.rs`.

use super::few::Few;
use super::server::{Broken, Names};
use super::world::{
    Budget, Call, Kind, NEVER, NIL, NOBODY, Num, Phase, Ring, Shape, Ticket, Ticks, Told, Use, World,
};

/// One configuration.
pub(crate) struct Model {
    pub(crate) name: &'static str,
    pub(crate) shape: Shape,
    /// What the tickets are for: those of the first client, then of the next.
    pub(crate) tasks: Vec<Use>,
    pub(crate) lease: Ticks,
    pub(crate) claim: Ticks,
    pub(crate) regroup: Ticks,
    /// How long an idle lock and lost leases are remembered; for ever if not given.
    pub(crate) idle: Option<Ticks>,
    /// How far the server's clock steps ahead.
    pub(crate) ahead: Ticks,
    /// How many calls may be on their way at once.
    pub(crate) calls: usize,
    pub(crate) budget: Budget,
    /// What is broken on purpose.
    pub(crate) fault: Option<Fault>,
    pub(crate) names: Names,
}

/// One deliberate fault, in a rule of the client or in the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Client: a ring is believed although a `waiting` reply has named a newer fence.
    StaleNews,
    /// Client: a grant in the reply to its own call counts from the receipt of that reply.
    CountsFromReceipt,
    /// Client: a renewed lease counts from the receipt of the reply.
    RenewalCountsFromReceipt,
    /// Client: a ring counts from when it is heard.
    RingCountsFromHearing,
    /// Client: a grant is given back, or its ticket withdrawn, and believed again when the server still names it.
    BelievesWhatItGaveBack,
    /// Client: `already` is a success, however late the release was.
    AlreadyIsSuccess,
    /// Client: nobody polls after the first call.
    NoPolls,
    /// Machine: an unclaimed grant is passed over without a look at its bell.
    FreeWithoutBell,
    /// Machine: a reply names a grant and leaves it unclaimed.
    NamingDoesNotClaim,
    /// Machine: a renewal takes a free lock.
    RenewalReowns,
    /// Machine: a renewal takes the lock back from whoever was granted since.
    RenewalSteals,
    /// Machine: a release asks for the holder only, not for the fence.
    ReleaseByHolderOnly,
    /// Machine: no lost lease is written down.
    LostNotRecorded,
    /// Machine: a fence from before the record counts as released.
    BornNotChecked,
    /// Machine: fences are counted, not taken from the clock.
    FenceCounts,
    /// Machine: a newcomer does not look at the queue.
    NewcomersBarge,
    /// Machine: the poll of a queued ticket grants nothing.
    PollsDoNotAdvance,
}

/// One step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A ticket's first call is sent.
    Start(u8),
    /// A call whose predecessor failed is sent again.
    Again(u8),
    /// The room polls with this ticket.
    Poll(u8),
    Renew(u8),
    Release(u8),
    /// The thread gives up: its deadline has passed, or the release bound.
    GiveUp(u8),
    /// Nobody waits for the ticket for now.
    Park(u8),
    /// Somebody waits for it again.
    Resume(u8),
    /// A withdrawal is sent again.
    Withdraw(u8),
    /// A grant is given back again.
    Return(u8),
    /// A call reaches the server.
    Arrive(u8),
    /// An answer reaches its client.
    Answer(u8),
    /// The client loses patience; the call may still arrive later, or never.
    Late(u8),
    /// The answer is lost.
    Unanswered(u8),
    /// The call will arrive twice.
    Twice(u8),
    /// A late call arrives; nobody reads the answer.
    Haunt(u8),
    /// The server pops the bell for a blocked client.
    Pop(u8),
    /// The ring reaches the client.
    Heard(u8),
    /// The ring is lost on the way.
    Unheard(u8),
    Crash(u8),
    Tick,
    /// The server's clock steps back, or ahead.
    Back,
    Ahead,
    /// All data is lost.
    Wipe,
    /// An operator takes the lease away.
    Evict,
}

/// A step that is not possible now, for want of room among the calls.
pub(crate) struct NoRoom;

/// What a client does in answer to news: it may need a call.
type Sent = Result<(), NoRoom>;

impl Model {
    /// The first state.
    pub(crate) fn start(&self) -> World {
        let mut world = World { top: NIL, budget: self.budget, ..World::default() };
        for client in &mut world.clients[..self.shape.clients] {
            client.alive = true;
            (client.newest, client.ended, client.proven) = (NIL, NIL, self.shape.oldest);
        }
        for index in 0..self.shape.tickets() {
            world.tickets[index] = Ticket { task: self.tasks[index], ..Ticket::blank() };
        }
        world.settle(&self.shape);
        world
    }

    fn owner(&self, ticket: u8) -> usize {
        self.shape.owner(ticket)
    }

    /// Whether a ticket believes that it holds the lock.
    pub(crate) fn believes(&self, ticket: &Ticket) -> bool {
        ticket.phase == Phase::Held && !ticket.lost && ticket.age < self.lease
    }

    /// Whether a live thread waits for the lock with this ticket.
    pub(crate) fn waits(&self, world: &World, ticket: u8) -> bool {
        let Ticket { phase, task, .. } = world.tickets[usize::from(ticket)];
        let asks = phase == Phase::Asking && matches!(task, Use::Lock | Use::Place);
        world.clients[self.owner(ticket)].alive && (asks || phase == Phase::Waiting)
    }

    /// All steps that may be possible in `world`.
    pub(crate) fn steps(&self, world: &World, out: &mut Vec<Step>) {
        out.clear();
        let budget = &world.budget;
        for index in 0..self.shape.tickets() as u8 {
            if world.clients[self.owner(index)].alive {
                self.ticket_steps(world, index, out);
            }
        }
        for (index, call) in world.calls.iter().enumerate() {
            let index = index as u8;
            if call.told == Told::Nothing {
                out.push(Step::Arrive(index));
                if budget.lose > 0 && !world.ghosts.is_full() {
                    out.push(Step::Late(index));
                }
                if budget.double > 0 && !world.ghosts.is_full() {
                    out.push(Step::Twice(index));
                }
            } else {
                out.push(Step::Answer(index));
                if budget.lose > 0 {
                    out.push(Step::Unanswered(index));
                }
            }
        }
        for index in 0..world.ghosts.len() {
            out.push(Step::Haunt(index as u8));
        }
        for index in 0..self.shape.clients {
            let client = &world.clients[index];
            let rings = world.server.bells[index].ticket != NOBODY;
            let index = index as u8;
            if client.popped.ticket != NOBODY {
                out.push(Step::Heard(index));
                if budget.lose > 0 {
                    out.push(Step::Unheard(index));
                }
            } else if rings && (client.alive || budget.lose > 0) {
                // A dead client's connection may still look alive to the server.
                out.push(Step::Pop(index));
            }
            if client.alive && budget.crash > 0 {
                out.push(Step::Crash(index));
            }
        }
        out.push(Step::Tick);
        if budget.back > 0 {
            out.push(Step::Back);
        }
        if budget.ahead > 0 {
            out.push(Step::Ahead);
        }
        if budget.wipe > 0 && world.server.known {
            out.push(Step::Wipe);
        }
        if budget.evict > 0 && world.server.holder != NOBODY {
            out.push(Step::Evict);
        }
    }

    fn ticket_steps(&self, world: &World, index: u8, out: &mut Vec<Step>) {
        let ticket = &world.tickets[usize::from(index)];
        let quits = world.budget.quit > 0;
        let under_way = |kinds: &[Kind]| {
            world.calls.iter().any(|call| call.ticket == index && kinds.contains(&call.kind))
        };
        match ticket.phase {
            Phase::New => out.push(Step::Start(index)),
            Phase::Asking => {
                if !under_way(&[Kind::Ask]) {
                    out.push(Step::Again(index));
                    if quits {
                        out.push(Step::GiveUp(index));
                    }
                }
            }
            Phase::Waiting => {
                if !under_way(&[Kind::Ask, Kind::Poll]) {
                    out.push(Step::Poll(index));
                }
                if quits {
                    out.push(Step::GiveUp(index));
                }
                if ticket.task == Use::Place && world.budget.park > 0 {
                    out.push(Step::Park(index));
                }
            }
            Phase::Parked => {
                if world.budget.park > 0 {
                    out.push(Step::Resume(index));
                }
                if quits {
                    out.push(Step::GiveUp(index));
                }
            }
            Phase::Held => {
                // Renewing in the tick of the last proof proves nothing more.
                if self.believes(ticket) && ticket.age > 0 && !under_way(&[Kind::Renew]) {
                    out.push(Step::Renew(index));
                }
                out.push(Step::Release(index));
            }
            Phase::Releasing => {
                if !under_way(&[Kind::Release]) {
                    out.push(Step::Again(index));
                    if quits {
                        out.push(Step::GiveUp(index));
                    }
                }
            }
            Phase::Gone => {}
        }
        if ticket.owes && !under_way(&[Kind::Abandon]) {
            out.push(Step::Withdraw(index));
        }
        if ticket.returns && !under_way(&[Kind::PassOver]) {
            out.push(Step::Return(index));
        }
    }

    /// Does one step. `None` if there is no room for a call that it needs.
    pub(crate) fn step(&self, world: &World, step: Step) -> Option<Result<World, Broken>> {
        let mut world = *world;
        match self.act(&mut world, step) {
            Err(NoRoom) => None,
            Ok(Err(broken)) => Some(Err(broken)),
            Ok(Ok(())) => Some(self.check_exclusion(&world).map(|()| world)),
        }
    }

    /// At most one believes. Those whose grant was proved before an upset (loss of data, server's clock ahead, an
    /// operator's eviction) may overlap with those after it, but not with each other.
    fn check_exclusion(&self, world: &World) -> Result<(), Broken> {
        let mut seen = 0_u8;
        for ticket in world.tickets[..self.shape.tickets()].iter().filter(|ticket| self.believes(ticket)) {
            if seen >> ticket.epoch & 1 == 1 {
                return Err(Broken::Exclusion);
            }
            seen |= 1 << ticket.epoch;
        }
        Ok(())
    }

    pub(crate) fn act(&self, world: &mut World, step: Step) -> Result<Result<(), Broken>, NoRoom> {
        match step {
            Step::Start(index) => self.ask(world, index)?,
            Step::Again(index) => match world.tickets[usize::from(index)].phase {
                Phase::Releasing => self.release(world, index)?,
                _ => self.ask(world, index)?,
            },
            Step::Poll(index) => {
                let position = world.tickets[usize::from(index)].position;
                self.send(world, Call { ticket: index, kind: Kind::Poll, position, ..Call::default() })?;
            }
            Step::Renew(index) => {
                let fence = world.tickets[usize::from(index)].fence;
                self.send(world, Call { ticket: index, kind: Kind::Renew, fence, ..Call::default() })?;
            }
            Step::Release(index) => self.release(world, index)?,
            Step::GiveUp(index) => {
                world.budget.quit -= 1;
                self.give_up(world, index)?;
            }
            Step::Park(index) => {
                world.budget.park -= 1;
                world.tickets[usize::from(index)].phase = Phase::Parked;
            }
            Step::Resume(index) => {
                world.budget.park -= 1;
                self.ask(world, index)?;
            }
            Step::Withdraw(index) => {
                world.tickets[usize::from(index)].owes = false;
                self.send(world, Call { ticket: index, kind: Kind::Abandon, ..Call::default() })?;
            }
            Step::Return(index) => {
                let ticket = &mut world.tickets[usize::from(index)];
                ticket.returns = false;
                let fence = ticket.given;
                self.send(world, Call { ticket: index, kind: Kind::PassOver, fence, ..Call::default() })?;
            }
            Step::Arrive(index) => {
                let call = world.calls.remove(index.into());
                match self.serve(world, call) {
                    Ok(answered) => world.calls.push(answered),
                    Err(broken) => return Ok(Err(broken)),
                }
            }
            Step::Answer(index) => {
                let call = world.calls.remove(index.into());
                return self.answered(world, &call);
            }
            Step::Late(index) => {
                world.budget.lose -= 1;
                let call = world.calls.remove(index.into());
                world.ghosts.push(call);
                self.failed(world, &call);
            }
            Step::Unanswered(index) => {
                world.budget.lose -= 1;
                let call = world.calls.remove(index.into());
                self.failed(world, &call);
            }
            Step::Twice(index) => {
                world.budget.double -= 1;
                let call = world.calls[usize::from(index)];
                world.ghosts.push(call);
            }
            Step::Haunt(index) => {
                let ghost = world.ghosts.remove(index.into());
                if let Err(broken) = self.serve(world, ghost) {
                    return Ok(Err(broken));
                }
            }
            Step::Pop(index) => {
                let ring = std::mem::take(&mut world.server.bells[usize::from(index)]);
                let client = &mut world.clients[usize::from(index)];
                if client.alive {
                    client.popped = ring;
                } else {
                    world.budget.lose -= 1;
                }
            }
            Step::Heard(index) => {
                let ring = std::mem::take(&mut world.clients[usize::from(index)].popped);
                self.hear(world, ring.ticket, ring.fence, ring.epoch, None)?;
            }
            Step::Unheard(index) => {
                world.budget.lose -= 1;
                world.clients[usize::from(index)].popped = Ring::default();
            }
            Step::Crash(index) => self.crash(world, index.into())?,
            Step::Tick => self.tick(world),
            Step::Back => {
                world.budget.back -= 1;
                world.shift(&self.shape, self.shape.back);
            }
            Step::Ahead => {
                world.budget.ahead -= 1;
                world.epoch += 1;
                world.shift(&self.shape, -self.ahead);
            }
            Step::Wipe => {
                world.budget.wipe -= 1;
                world.epoch += 1;
                if self.shape.reverts {
                    // With the clock behind, fences start again wherever it stands, and pass old ones later.
                    world.top = NIL;
                    world.displaced = Few::default();
                } else if world.server.holder != NOBODY {
                    world.displaced.push(world.server.fence);
                }
                world.server = Default::default();
            }
            Step::Evict => {
                world.budget.evict -= 1;
                world.epoch += 1;
                return Ok(self.evict(world));
            }
        }
        Ok(Ok(()))
    }

    fn send(&self, world: &mut World, call: Call) -> Sent {
        if world.calls.len() >= self.calls {
            return Err(NoRoom);
        }
        world.calls.push(call);
        Ok(())
    }

    fn ask(&self, world: &mut World, index: u8) -> Sent {
        let ticket = &mut world.tickets[usize::from(index)];
        ticket.phase = Phase::Asking;
        let position = ticket.position;
        self.send(world, Call { ticket: index, position, ..Call::default() })
    }

    fn release(&self, world: &mut World, index: u8) -> Sent {
        let ticket = &mut world.tickets[usize::from(index)];
        ticket.phase = Phase::Releasing;
        let fence = ticket.fence;
        self.send(world, Call { ticket: index, kind: Kind::Release, fence, ..Call::default() })
    }

    /// The attempt is dropped, or the release bound is over.
    fn give_up(&self, world: &mut World, index: u8) -> Sent {
        let owner = self.owner(index);
        let ticket = &mut world.tickets[usize::from(index)];
        if ticket.phase == Phase::Releasing {
            let ended = &mut world.clients[owner].ended;
            *ended = (*ended).max(ticket.fence);
        }
        ticket.phase = Phase::Gone;
        self.withdraw(world, index)
    }

    fn withdraw(&self, world: &mut World, index: u8) -> Sent {
        if world.calls.iter().any(|call| call.ticket == index && call.kind == Kind::Abandon) {
            world.tickets[usize::from(index)].owes = true;
            return Ok(());
        }
        self.send(world, Call { ticket: index, kind: Kind::Abandon, ..Call::default() })
    }

    /// Gives a grant back: nobody waits for its ticket now. What was given back is never believed again, for the
    /// release may arrive at any later time.
    fn pass_over(&self, world: &mut World, index: u8, fence: Num) -> Sent {
        let ticket = &mut world.tickets[usize::from(index)];
        ticket.given = ticket.given.max(fence);
        if world.calls.iter().any(|call| call.ticket == index && call.kind == Kind::PassOver) {
            world.tickets[usize::from(index)].returns = true;
            return Ok(());
        }
        self.send(world, Call { ticket: index, kind: Kind::PassOver, fence, ..Call::default() })
    }

    fn crash(&self, world: &mut World, index: usize) -> Sent {
        world.budget.crash -= 1;
        world.clients[index].alive = false;
        let tickets = self.shape.tickets_of(index);
        for at in (0..world.calls.len()).rev() {
            if !tickets.contains(&world.calls[at].ticket.into()) {
                continue;
            }
            let call = world.calls.remove(at);
            // What it has sent may still arrive.
            if call.told == Told::Nothing {
                if world.ghosts.is_full() {
                    return Err(NoRoom);
                }
                world.ghosts.push(call);
            }
        }
        Ok(())
    }

    fn tick(&self, world: &mut World) {
        world.shift(&self.shape, -1);
        let older = |age: &mut Ticks| *age = (*age + 1).min(self.shape.oldest);
        for client in &mut world.clients[..self.shape.clients] {
            older(&mut client.proven);
        }
        for ticket in &mut world.tickets[..self.shape.tickets()] {
            older(&mut ticket.age);
            if ticket.news_age != NEVER {
                older(&mut ticket.news_age);
            }
        }
        for call in world.calls.iter_mut() {
            older(&mut call.age);
        }
    }

    /// A call came to nothing, as far as its client knows.
    fn failed(&self, world: &mut World, call: &Call) {
        let believes = self.fault == Some(Fault::BelievesWhatItGaveBack);
        let ticket = &mut world.tickets[usize::from(call.ticket)];
        match call.kind {
            Kind::Ask => ticket.doubtful = true,
            Kind::Poll => {
                ticket.doubtful = true;
                ticket.owes |= ticket.phase == Phase::Gone;
            }
            Kind::Renew => {}
            Kind::Release => ticket.sent_before = true,
            Kind::PassOver if believes => ticket.owes = true,
            Kind::PassOver => ticket.returns = ticket.phase < Phase::Held,
            Kind::Abandon => ticket.owes = true,
        }
    }

    /// An answer has reached its client.
    fn answered(&self, world: &mut World, call: &Call) -> Result<Result<(), Broken>, NoRoom> {
        match call.kind {
            Kind::Ask => self.asked(world, call)?,
            Kind::Poll => self.polled(world, call)?,
            Kind::Renew => {
                self.hear_next(world, call, None)?;
                let ticket = &mut world.tickets[usize::from(call.ticket)];
                match call.told {
                    Told::Renewed if ticket.phase == Phase::Held => {
                        let late = self.fault == Some(Fault::RenewalCountsFromReceipt);
                        ticket.age = ticket.age.min(if late { 0 } else { call.age });
                        ticket.epoch = call.epoch;
                    }
                    Told::Lost if ticket.phase == Phase::Held => ticket.lost = true,
                    _ => {}
                }
            }
            Kind::Release => return self.released(world, call),
            Kind::PassOver => {
                self.hear_next(world, call, (call.told == Told::Released).then_some(call.age))?
            }
            Kind::Abandon => {
                self.hear_next(world, call, None)?;
                let ticket = &mut world.tickets[usize::from(call.ticket)];
                // A call that may still be on its way is withdrawn once more when it must have arrived.
                ticket.owes |= std::mem::take(&mut ticket.doubtful);
            }
        }
        Ok(Ok(()))
    }

    /// The answer to a ticket's own call.
    fn asked(&self, world: &mut World, call: &Call) -> Sent {
        let index = usize::from(call.ticket);
        let ticket = &mut world.tickets[index];
        let places = ticket.task == Use::Place && call.position == NIL;
        match call.told {
            Told::Granted => {
                ticket.position = call.place;
                if places {
                    ticket.phase = Phase::Parked;
                    let newest = call.number.max(ticket.news);
                    return self.pass_over(world, call.ticket, newest);
                }
                self.hold(world, call)
            }
            Told::Waiting => {
                ticket.position = call.place;
                self.absorb(world, call)?;
                let ticket = &mut world.tickets[index];
                ticket.phase = if places { Phase::Parked } else { Phase::Waiting };
                let Ticket { news, news_age, news_epoch, .. } = *ticket;
                if news == NIL {
                    return Ok(());
                }
                let fresh = (news_age != NEVER).then_some(news_age);
                self.hear(world, call.ticket, news, news_epoch, fresh)
            }
            Told::Busy | Told::Full => {
                self.hear_next(world, call, None)?;
                let ticket = &mut world.tickets[index];
                ticket.phase = Phase::Gone;
                ticket.owes = std::mem::take(&mut ticket.doubtful);
                Ok(())
            }
            told => unreachable!("acquire is not answered with {told:?}"),
        }
    }

    /// The answer to a poll.
    fn polled(&self, world: &mut World, call: &Call) -> Sent {
        let Ticket { phase, given, .. } = world.tickets[usize::from(call.ticket)];
        let passed = phase == Phase::Parked || (phase < Phase::Held && call.number <= given);
        match (call.told, phase) {
            (Told::Granted, _) if passed && self.fault != Some(Fault::BelievesWhatItGaveBack) => {
                self.pass_over(world, call.ticket, call.number)
            }
            (Told::Granted, Phase::Waiting) => self.hold(world, call),
            (Told::Granted, Phase::Parked | Phase::Gone) => self.withdraw(world, call.ticket),
            (Told::Granted, Phase::Asking) => {
                self.hear(world, call.ticket, call.number, call.epoch, Some(call.age))
            }
            (Told::Waiting, _) => {
                self.absorb(world, call)?;
                if phase == Phase::Gone { self.withdraw(world, call.ticket) } else { Ok(()) }
            }
            _ => Ok(()),
        }
    }

    /// The server says that the ticket holds the lock.
    fn hold(&self, world: &mut World, call: &Call) -> Sent {
        let ticket = &mut world.tickets[usize::from(call.ticket)];
        if call.number <= ticket.given && self.fault != Some(Fault::BelievesWhatItGaveBack) {
            return self.pass_over(world, call.ticket, call.number);
        }
        let age = if self.fault == Some(Fault::CountsFromReceipt) { 0 } else { call.age };
        // An answer that took too long is asked for again.
        if age < self.lease {
            (ticket.phase, ticket.fence, ticket.age) = (Phase::Held, call.number, age);
            ticket.epoch = call.epoch;
        }
        Ok(())
    }

    /// Takes note of a `waiting` reply.
    fn absorb(&self, world: &mut World, call: &Call) -> Sent {
        self.hear_next(world, call, None)?;
        let client = &mut world.clients[self.owner(call.ticket)];
        client.newest = client.newest.max(call.number);
        client.proven = client.proven.min(call.age);
        Ok(())
    }

    fn hear_next(&self, world: &mut World, call: &Call, fresh: Option<Ticks>) -> Sent {
        if call.next == NOBODY {
            return Ok(());
        }
        self.hear(world, call.next, call.next_fence, call.epoch, fresh)
    }

    /// Takes note of a grant of this client. `fresh` is how long ago the call was sent that made it, if one did.
    fn hear(&self, world: &mut World, index: u8, fence: Num, epoch: u8, fresh: Option<Ticks>) -> Sent {
        let client = world.clients[self.owner(index)];
        let ticket = &mut world.tickets[usize::from(index)];
        match ticket.phase {
            Phase::Waiting => {
                let stale = fence <= client.newest && self.fault != Some(Fault::StaleNews);
                let given = fence <= ticket.given && self.fault != Some(Fault::BelievesWhatItGaveBack);
                let heard = self.fault == Some(Fault::RingCountsFromHearing);
                let age = fresh.unwrap_or(if heard { 0 } else { client.proven });
                // News that took too long is asked for again.
                if !stale && given {
                    return self.pass_over(world, index, fence);
                }
                if !stale && age < self.lease {
                    (ticket.phase, ticket.fence, ticket.age, ticket.epoch) = (Phase::Held, fence, age, epoch);
                }
                Ok(())
            }
            Phase::Parked => self.pass_over(world, index, fence),
            Phase::Asking => {
                if ticket.news < fence {
                    (ticket.news, ticket.news_epoch) = (fence, epoch);
                    ticket.news_age = fresh.unwrap_or(NEVER);
                }
                Ok(())
            }
            Phase::Held | Phase::Releasing => Ok(()),
            Phase::New | Phase::Gone if fence <= client.ended => Ok(()),
            Phase::New | Phase::Gone => self.withdraw(world, index),
        }
    }

    /// The answer to a release: what the holder is told.
    fn released(&self, world: &mut World, call: &Call) -> Result<Result<(), Broken>, NoRoom> {
        self.hear_next(world, call, (call.told == Told::Released).then_some(call.age))?;
        let owner = self.owner(call.ticket);
        let ticket = &mut world.tickets[usize::from(call.ticket)];
        // The server remembers a lost lease for so long, and this one was whole when it was last proved.
        let forgotten = self.idle.is_some_and(|idle| ticket.age >= idle);
        let sure = !forgotten || self.fault == Some(Fault::AlreadyIsSuccess);
        let success = match call.told {
            Told::Released => true,
            Told::Already => ticket.sent_before && !ticket.lost && sure,
            _ => false,
        };
        ticket.phase = Phase::Gone;
        let ended = &mut world.clients[owner].ended;
        *ended = (*ended).max(call.fence);
        // An `acquire` that may still arrive is withdrawn when it must have.
        ticket.owes |= std::mem::take(&mut ticket.doubtful);
        let displaced = world.displaced.contains(&call.fence);
        Ok(if success && displaced { Err(Broken::Verdict) } else { Ok(()) })
    }
}
