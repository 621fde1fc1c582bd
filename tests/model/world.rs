//! One state of the model: the keys on the server, what every client knows, and the messages on their way.
//!
//! Invariant: two states that differ only in how late it is, in numbers that nobody compares any more, or in which of
//! two equal clients is called the first, are made the same state ([`World::settle`]). So time has no bound.

use super::few::Few;

/// A fence or a position: its order among its kind is what counts, and whether the server's clock has reached it. A
/// thousand is a tick of that clock; what is not above 500 lies behind `now`.
pub(crate) type Num = i16;
/// No number; below every other one, as 0 is on the server.
pub(crate) const NIL: Num = Num::MIN;
/// A span of time in ticks. On the server: from now; in a client: how long ago.
pub(crate) type Ticks = i8;
/// No time; long past.
pub(crate) const NEVER: Ticks = Ticks::MIN;
/// No ticket.
pub(crate) const NOBODY: u8 = u8::MAX;
/// The most clients.
pub(crate) const CLIENTS: usize = 3;
/// The most tickets of all clients together.
pub(crate) const TICKETS: usize = 6;
/// The most calls on their way at once.
pub(crate) const CALLS: usize = 4;
/// The most calls that are late at once.
pub(crate) const GHOSTS: usize = 4;
/// The most lost fences that still matter at once.
pub(crate) const DEAD: usize = 6;

/// The most numbers of one kind that differ.
const NUMBERS: usize = 32;

/// What a ticket is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Use {
    /// `lock`: waits until it has the lock or gives up.
    #[default]
    Lock,
    /// `try_lock`: asks without waiting.
    Try,
    /// `lock` with a limit on the queue: one ticket.
    Limited,
    /// `enqueue`: takes a place, is waited for later, perhaps with pauses.
    Place,
}

/// How far a ticket has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Not begun.
    #[default]
    New,
    /// Its own call is to tell.
    Asking,
    /// A thread waits for it.
    Waiting,
    /// Nobody waits for it now.
    Parked,
    /// It has the lock, as far as its client knows.
    Held,
    /// Its release has begun.
    Releasing,
    /// Its client has forgotten it.
    Gone,
}

/// One ticket, as its client knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ticket {
    pub(crate) task: Use,
    pub(crate) phase: Phase,
    /// Its position once known.
    pub(crate) position: Num,
    /// The fence of its grant.
    pub(crate) fence: Num,
    /// How long ago the call was sent that last proved the grant.
    pub(crate) age: Ticks,
    /// Before or after which upset of the server the grant was last proved.
    pub(crate) epoch: u8,
    /// The newest fence of this ticket that was passed over.
    pub(crate) given: Num,
    /// A grant that was heard of while its own call was under way.
    pub(crate) news: Num,
    /// How long ago the call was sent that made that grant, if one of its client did.
    pub(crate) news_age: Ticks,
    pub(crate) news_epoch: u8,
    /// The server refused to renew it.
    pub(crate) lost: bool,
    /// A release of it may have arrived without an answer.
    pub(crate) sent_before: bool,
    /// A call of it may still arrive.
    pub(crate) doubtful: bool,
    /// Its withdrawal is still to be delivered.
    pub(crate) owes: bool,
    /// The release of `given` is still to be delivered.
    pub(crate) returns: bool,
}

/// One client: what its wait room knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Client {
    pub(crate) alive: bool,
    /// The newest fence that a `waiting` reply named.
    pub(crate) newest: Num,
    /// The newest fence of its own that ended.
    pub(crate) ended: Num,
    /// How long ago the call was sent that last proved that the lock was not its own.
    pub(crate) proven: Ticks,
    /// The ring that the server has popped and the client has not got yet.
    pub(crate) popped: Ring,
}

/// A grant as it stands on a bell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ring {
    pub(crate) ticket: u8,
    pub(crate) fence: Num,
    /// When the bell expires.
    pub(crate) expires: Ticks,
    /// When the grant was made.
    pub(crate) epoch: u8,
}

impl Default for Ring {
    fn default() -> Ring {
        Ring { ticket: NOBODY, fence: NIL, expires: NEVER, epoch: 0 }
    }
}

/// What a call asks for, and in the client which way the answer goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// `acquire` by the ticket's own thread.
    #[default]
    Ask,
    /// `acquire` by whoever polls for the room.
    Poll,
    Renew,
    Release,
    /// `release` of a grant that nobody waits for.
    PassOver,
    Abandon,
}

/// What the server answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Told {
    /// Nothing yet: the call has not arrived.
    #[default]
    Nothing,
    Granted,
    Waiting,
    Busy,
    Full,
    Renewed,
    Lost,
    Released,
    Already,
    Abandoned,
}

/// A call on its way to the server, or its answer on the way back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Call {
    pub(crate) ticket: u8,
    pub(crate) kind: Kind,
    /// How long ago it was sent.
    pub(crate) age: Ticks,
    /// `acquire`: the position it gives.
    pub(crate) position: Num,
    /// The fence it gives.
    pub(crate) fence: Num,
    pub(crate) told: Told,
    /// The fence of the grant, or the newest fence.
    pub(crate) number: Num,
    /// The position in the answer.
    pub(crate) place: Num,
    /// The grant that the answer names, if it is not for `ticket` itself.
    pub(crate) next: u8,
    pub(crate) next_fence: Num,
    /// When the grant that the answer tells of was made or renewed.
    pub(crate) epoch: u8,
}

impl Default for Call {
    fn default() -> Call {
        Call {
            ticket: NOBODY,
            kind: Kind::Ask,
            age: 0,
            position: NIL,
            fence: NIL,
            told: Told::Nothing,
            number: NIL,
            place: NIL,
            next: NOBODY,
            next_fence: NIL,
            epoch: 0,
        }
    }
}

/// A queued ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Queued {
    pub(crate) position: Num,
    pub(crate) ticket: u8,
}

impl Default for Queued {
    fn default() -> Queued {
        Queued { position: NIL, ticket: NOBODY }
    }
}

/// The keys on the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Server {
    /// Whether there is a record.
    pub(crate) known: bool,
    pub(crate) holder: u8,
    pub(crate) fence: Num,
    pub(crate) until: Ticks,
    pub(crate) claim: Ticks,
    pub(crate) last: Num,
    pub(crate) born: Num,
    /// A bit for each client.
    pub(crate) suspects: u8,
    pub(crate) place: Num,
    pub(crate) record_expires: Ticks,
    pub(crate) lost_expires: Ticks,
    pub(crate) queue: Few<Queued, TICKETS>,
    /// The lost fences that anybody can still name.
    pub(crate) lost: Few<Num, DEAD>,
    pub(crate) bells: [Ring; CLIENTS],
    /// Before or after which upset the grant was made or renewed.
    pub(crate) epoch: u8,
}

impl Default for Server {
    fn default() -> Server {
        Server {
            known: false,
            holder: NOBODY,
            fence: NIL,
            until: NEVER,
            claim: NEVER,
            last: NIL,
            born: NIL,
            suspects: 0,
            place: NIL,
            record_expires: NEVER,
            lost_expires: NEVER,
            queue: Few::default(),
            lost: Few::default(),
            bells: [Ring::default(); CLIENTS],
            epoch: 0,
        }
    }
}

/// How much may still go wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Budget {
    /// Messages lost or made late: calls, answers, popped rings.
    pub(crate) lose: u8,
    /// Calls that arrive twice.
    pub(crate) double: u8,
    /// Clients that crash.
    pub(crate) crash: u8,
    /// Threads that give up: waiting, or asking or releasing after a failure.
    pub(crate) quit: u8,
    /// Times a place is left unattended.
    pub(crate) park: u8,
    /// Steps back of the server's clock.
    pub(crate) back: u8,
    /// Steps ahead of the server's clock.
    pub(crate) ahead: u8,
    /// Losses of all data.
    pub(crate) wipe: u8,
    /// Leases that an operator takes away.
    pub(crate) evict: u8,
}

/// One state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct World {
    pub(crate) server: Server,
    pub(crate) clients: [Client; CLIENTS],
    pub(crate) tickets: [Ticket; TICKETS],
    pub(crate) calls: Few<Call, CALLS>,
    /// Calls whose sender is gone or has lost patience: they may still arrive.
    pub(crate) ghosts: Few<Call, GHOSTS>,
    pub(crate) budget: Budget,
    /// The highest fence that was ever minted.
    pub(crate) top: Num,
    /// Fences whose lease was taken away, as far as anybody can still name them.
    pub(crate) displaced: Few<Num, DEAD>,
    /// How many upsets there were after which leases from before may overlap with those from after.
    pub(crate) epoch: u8,
}

/// How many clients and tickets a world has, and how far back its numbers count.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) clients: usize,
    /// Tickets of each client.
    pub(crate) each: usize,
    /// Ages stop here.
    pub(crate) oldest: Ticks,
    /// How far the server's clock may step back.
    pub(crate) back: Ticks,
    /// Whether the server forgets within the time that is modelled.
    pub(crate) forgets: bool,
    /// Whether fences may start again below old ones: the clock steps back and data is lost.
    pub(crate) reverts: bool,
    /// Whether old news is believed, which is a fault.
    pub(crate) gullible: bool,
}

impl Shape {
    pub(crate) fn tickets(&self) -> usize {
        self.clients * self.each
    }

    /// The client of `ticket`.
    pub(crate) fn owner(&self, ticket: u8) -> usize {
        usize::from(ticket) / self.each
    }

    pub(crate) fn tickets_of(&self, client: usize) -> std::ops::Range<usize> {
        client * self.each..(client + 1) * self.each
    }
}

/// Looks at, or changes, every field of a world in a fixed order.
trait Visit {
    fn byte(&mut self, _: &mut u8) {}
    fn time(&mut self, _: &mut Ticks) {}
    /// A fence that somebody may name to the server or believe.
    fn fence(&mut self, _: &mut Num) {}
    /// A fence that others are compared with.
    fn mark(&mut self, _: &mut Num) {}
    /// A fence that matters only while somebody may name it.
    fn dead(&mut self, _: &mut Num) {}
    fn place(&mut self, _: &mut Num) {}
    fn pick<T: Copy + PartialEq>(&mut self, _: &mut T, _: &[T]) {}
    /// How many items a list has.
    fn list<T: Copy + Default, const N: usize>(&mut self, _: &mut Few<T, N>) {}

    fn flag(&mut self, flag: &mut bool) {
        self.pick(flag, &[false, true]);
    }
}

const USES: [Use; 4] = [Use::Lock, Use::Try, Use::Limited, Use::Place];
const PHASES: [Phase; 7] =
    [Phase::New, Phase::Asking, Phase::Waiting, Phase::Parked, Phase::Held, Phase::Releasing, Phase::Gone];
const KINDS: [Kind; 6] = [Kind::Ask, Kind::Poll, Kind::Renew, Kind::Release, Kind::PassOver, Kind::Abandon];
const TOLD: [Told; 10] = [
    Told::Nothing,
    Told::Granted,
    Told::Waiting,
    Told::Busy,
    Told::Full,
    Told::Renewed,
    Told::Lost,
    Told::Released,
    Told::Already,
    Told::Abandoned,
];

impl Ring {
    fn visit(&mut self, v: &mut impl Visit) {
        v.byte(&mut self.ticket);
        if self.ticket != NOBODY {
            v.fence(&mut self.fence);
            v.time(&mut self.expires);
            v.byte(&mut self.epoch);
        }
    }
}

impl Call {
    fn visit(&mut self, v: &mut impl Visit) {
        v.byte(&mut self.ticket);
        v.pick(&mut self.kind, &KINDS);
        v.time(&mut self.age);
        match self.kind {
            Kind::Ask | Kind::Poll => v.place(&mut self.position),
            Kind::Renew | Kind::Release | Kind::PassOver => v.fence(&mut self.fence),
            Kind::Abandon => {}
        }
        v.pick(&mut self.told, &TOLD);
        match self.told {
            Told::Nothing => return,
            Told::Granted => {
                v.fence(&mut self.number);
                v.place(&mut self.place);
            }
            Told::Waiting => {
                v.mark(&mut self.number);
                v.place(&mut self.place);
            }
            _ => {}
        }
        v.byte(&mut self.next);
        if self.next != NOBODY {
            v.fence(&mut self.next_fence);
        }
        v.byte(&mut self.epoch);
    }
}

impl Ticket {
    fn visit(&mut self, v: &mut impl Visit) {
        v.pick(&mut self.task, &USES);
        v.pick(&mut self.phase, &PHASES);
        v.place(&mut self.position);
        if matches!(self.phase, Phase::Held | Phase::Releasing) {
            v.fence(&mut self.fence);
            v.time(&mut self.age);
            v.byte(&mut self.epoch);
        }
        v.fence(&mut self.given);
        v.fence(&mut self.news);
        if self.news != NIL {
            v.time(&mut self.news_age);
            v.byte(&mut self.news_epoch);
        }
        for flag in
            [&mut self.lost, &mut self.sent_before, &mut self.doubtful, &mut self.owes, &mut self.returns]
        {
            v.flag(flag);
        }
    }
}

impl Client {
    fn visit(&mut self, v: &mut impl Visit) {
        v.flag(&mut self.alive);
        v.mark(&mut self.newest);
        v.mark(&mut self.ended);
        v.time(&mut self.proven);
        self.popped.visit(v);
    }
}

impl Server {
    fn visit(&mut self, shape: &Shape, v: &mut impl Visit) {
        v.flag(&mut self.known);
        if self.known {
            v.byte(&mut self.holder);
            v.mark(&mut self.fence);
            v.time(&mut self.until);
            v.time(&mut self.claim);
            v.place(&mut self.last);
            v.mark(&mut self.born);
            v.byte(&mut self.suspects);
            v.place(&mut self.place);
            v.time(&mut self.record_expires);
            v.byte(&mut self.epoch);
        }
        v.time(&mut self.lost_expires);
        v.list(&mut self.queue);
        for queued in self.queue.iter_mut() {
            v.place(&mut queued.position);
            v.byte(&mut queued.ticket);
        }
        v.list(&mut self.lost);
        for fence in self.lost.iter_mut() {
            v.dead(fence);
        }
        for bell in &mut self.bells[..shape.clients] {
            bell.visit(v);
        }
    }
}

impl World {
    fn visit(&mut self, shape: &Shape, v: &mut impl Visit) {
        self.server.visit(shape, v);
        for client in &mut self.clients[..shape.clients] {
            client.visit(v);
        }
        for ticket in &mut self.tickets[..shape.tickets()] {
            ticket.visit(v);
        }
        v.list(&mut self.calls);
        for call in self.calls.iter_mut() {
            call.visit(v);
        }
        v.list(&mut self.ghosts);
        for call in self.ghosts.iter_mut() {
            call.visit(v);
        }
        let b = &mut self.budget;
        for left in [
            &mut b.lose,
            &mut b.double,
            &mut b.crash,
            &mut b.quit,
            &mut b.park,
            &mut b.back,
            &mut b.ahead,
            &mut b.wipe,
            &mut b.evict,
        ] {
            v.byte(left);
        }
        v.mark(&mut self.top);
        v.list(&mut self.displaced);
        for fence in self.displaced.iter_mut() {
            v.dead(fence);
        }
        v.byte(&mut self.epoch);
    }

    /// Writes the world down at the end of `out`.
    pub(crate) fn pack(mut self, shape: &Shape, out: &mut Vec<u8>) {
        self.visit(shape, &mut Writer(out));
    }

    /// Reads what [`World::pack`] wrote.
    pub(crate) fn unpack(shape: &Shape, bytes: &[u8]) -> World {
        let mut world = World { tickets: [Ticket::blank(); TICKETS], ..World::default() };
        world.visit(shape, &mut Reader(bytes));
        world
    }

    /// Moves all numbers by `ticks` of the server's clock: down as it goes on.
    pub(crate) fn shift(&mut self, shape: &Shape, ticks: Ticks) {
        self.visit(shape, &mut Shift(Num::from(ticks) * 1000));
        let server = &mut self.server;
        let times =
            [&mut server.until, &mut server.claim, &mut server.record_expires, &mut server.lost_expires];
        for time in times.into_iter().chain(server.bells.iter_mut().map(|bell| &mut bell.expires)) {
            if *time != NEVER {
                *time += ticks;
            }
        }
    }

    /// Makes equal what nobody can tell apart. Gives the old index of every ticket.
    pub(crate) fn settle(&mut self, shape: &Shape) -> [u8; TICKETS] {
        self.forget(shape);
        let names = self.sort(shape);
        self.calls.sort_unstable();
        self.ghosts.sort_unstable();
        self.rank(shape);
        names
    }

    /// The same, but everybody keeps its name.
    pub(crate) fn still(&mut self, shape: &Shape) {
        self.forget(shape);
        self.rank(shape);
    }

    /// Replaces numbers by ranks and forgets those that nobody can name any more.
    fn rank(&mut self, shape: &Shape) {
        let mut known = Known::default();
        self.visit(shape, &mut known);
        self.server.lost.retain(|fence| known.fences.contains(fence));
        self.displaced.retain(|fence| known.fences.contains(fence));
        if self.server.lost.is_empty() {
            self.server.lost_expires = NEVER;
        }
        self.visit(shape, &mut Rank::new(&known, self.back(shape)));
    }

    /// How far back the clock may still step, which brings the recent past back.
    fn back(&self, shape: &Shape) -> Ticks {
        if self.budget.back > 0 { shape.back } else { 0 }
    }

    /// Drops what has no meaning any more.
    fn forget(&mut self, shape: &Shape) {
        let back = self.back(shape);
        let server = &mut self.server;
        if !server.known {
            let Server { queue, lost, lost_expires, bells, .. } = *server;
            *server = Server { queue, lost, lost_expires, bells, ..Server::default() };
        }
        for time in [&mut server.until, &mut server.claim] {
            // A claim that is over is not the same as none.
            *time = if *time == NEVER { NEVER } else { (*time).max(-back) };
        }
        if server.until <= -back {
            server.until = NEVER;
        }
        if server.record_expires != NEVER && server.record_expires <= -back {
            let Server { queue, lost, lost_expires, bells, .. } = *server;
            *server = Server { queue, lost, lost_expires, bells, ..Server::default() };
        }
        if server.lost_expires != NEVER && server.lost_expires <= -back {
            server.lost = Few::default();
        }
        if server.holder == NOBODY {
            server.epoch = if server.known { self.epoch } else { 0 };
        }
        for bell in &mut server.bells {
            if bell.ticket != NOBODY && bell.expires <= 0 {
                *bell = Ring::default();
            }
        }
        let withdrawing = self.calls.iter().filter(|call| call.kind == Kind::Abandon);
        let withdrawing = withdrawing.fold(0_u8, |all, call| all | 1 << call.ticket);
        for index in 0..shape.clients {
            let tickets = &mut self.tickets[shape.tickets_of(index)];
            let client = &mut self.clients[index];
            if !client.alive {
                *client = Client { newest: NIL, ended: NIL, proven: shape.oldest, ..Client::default() };
                for ticket in tickets {
                    *ticket = Ticket { task: ticket.task, phase: Phase::Gone, ..Ticket::blank() };
                }
                continue;
            }
            client.popped.expires = NEVER;
            if !tickets.iter().any(|ticket| ticket.phase < Phase::Held) {
                // Whoever waits here later proves it anew; nobody does.
                client.proven = shape.oldest;
                client.newest = NIL;
            }
            for (at, ticket) in shape.tickets_of(index).zip(tickets) {
                if !matches!(ticket.phase, Phase::Held | Phase::Releasing) {
                    (ticket.fence, ticket.age, ticket.epoch, ticket.lost) = (NIL, 0, 0, false);
                }
                if ticket.phase >= Phase::Held {
                    ticket.position = NIL;
                    ticket.given = NIL;
                    ticket.returns = false;
                }
                if ticket.phase != Phase::Asking {
                    ticket.news = NIL;
                }
                if ticket.news == NIL {
                    (ticket.news_age, ticket.news_epoch) = (0, 0);
                }
                match ticket.phase {
                    Phase::Releasing => {
                        ticket.epoch = 0;
                        ticket.age = if shape.forgets { ticket.age } else { 0 };
                    }
                    Phase::Gone => {
                        ticket.sent_before = false;
                        ticket.doubtful &= ticket.owes | (withdrawing >> at & 1 == 1);
                    }
                    _ => {}
                }
            }
        }
        for call in self.ghosts.iter_mut() {
            let Call { ticket, kind, position, fence, .. } = *call;
            *call = Call { ticket, kind, position, fence, ..Call::default() };
        }
        self.forget_news(shape);
        self.forget_ages(shape);
        if !shape.reverts {
            self.forget_marks(shape);
        }
    }

    /// Drops rings and answers that change nothing, whenever they are heard.
    fn forget_news(&mut self, shape: &Shape) {
        for client in &mut self.clients[..shape.clients] {
            let ring = client.popped;
            let Some(ticket) = self.tickets.get(usize::from(ring.ticket)) else { continue };
            let idle = match ticket.phase {
                Phase::Waiting => ring.fence <= client.newest && ticket.task != Use::Place && !shape.gullible,
                Phase::Held | Phase::Releasing => ring.fence <= ticket.fence,
                Phase::Gone => ring.fence <= client.ended,
                _ => false,
            };
            if idle {
                client.popped = Ring::default();
            }
        }
        let tickets = &self.tickets;
        self.calls.retain(|call| {
            let phase = tickets[usize::from(call.ticket)].phase;
            let room = &tickets[shape.tickets_of(shape.owner(call.ticket))];
            let idle = match (call.kind, call.told) {
                (Kind::Poll, Told::Granted) => matches!(phase, Phase::Held | Phase::Releasing),
                (Kind::Poll, Told::Waiting) => {
                    phase != Phase::Gone && room.iter().all(|ticket| ticket.phase >= Phase::Held)
                }
                (Kind::Renew, Told::Renewed | Told::Lost) => phase != Phase::Held,
                _ => false,
            };
            !idle || call.next != NOBODY
        });
    }

    /// Drops ages of calls that make no difference to what the answer proves.
    fn forget_ages(&mut self, shape: &Shape) {
        for call in self.calls.iter_mut() {
            let proven = self.clients[shape.owner(call.ticket)].proven;
            let phase = self.tickets[usize::from(call.ticket)].phase;
            match (call.kind, call.told) {
                (Kind::Ask | Kind::Poll, Told::Waiting) if call.age >= proven => call.age = shape.oldest,
                (Kind::Ask | Kind::Poll, Told::Waiting | Told::Nothing) => {}
                (Kind::Ask | Kind::Poll, Told::Granted) if phase < Phase::Held => {}
                (Kind::Renew, _) if phase == Phase::Held => {}
                // It may make a grant of its own client.
                (Kind::Release | Kind::PassOver, Told::Nothing) if shape.each > 1 => {}
                (Kind::Release | Kind::PassOver, Told::Released) if call.next != NOBODY => {}
                _ => call.age = 0,
            }
        }
    }

    /// Drops marks that no fence is compared with any more, and never will be: new ones are higher.
    fn forget_marks(&mut self, shape: &Shape) {
        for (index, client) in self.clients[..shape.clients].iter_mut().enumerate() {
            let mine = |ticket: u8| ticket != NOBODY && shape.owner(ticket) == index;
            let named = [
                (client.popped.ticket, client.popped.fence),
                (self.server.bells[index].ticket, self.server.bells[index].fence),
                (self.server.holder, self.server.fence),
            ];
            let calls = self.calls.iter().map(|call| (call.next, call.next_fence));
            let named =
                named.into_iter().chain(calls).filter(|(ticket, _)| mine(*ticket)).map(|(_, fence)| fence);
            let lowest = named.min().unwrap_or(Num::MAX);
            for mark in [&mut client.newest, &mut client.ended] {
                if *mark < lowest {
                    *mark = NIL;
                }
            }
        }
    }

    /// Puts equal clients, and equal tickets of a client, in a fixed order.
    fn sort(&mut self, shape: &Shape) -> [u8; TICKETS] {
        let mut names: [u8; TICKETS] = std::array::from_fn(|index| index as u8);
        let mut keys = [(Key::default(), 0); TICKETS];
        // The order of tickets of one client first, then that of clients by theirs.
        let place = |ticket: usize, server: &Server| {
            let rank = server.queue.iter().position(|queued| usize::from(queued.ticket) == ticket);
            rank.map_or(0, |rank| rank as u8 + 1)
        };
        for index in 0..shape.tickets() {
            let mut ticket = self.tickets[index];
            let mut key = Key::default();
            ticket.visit(&mut key);
            key.add(place(index, &self.server));
            key.add(u8::from(usize::from(self.server.holder) == index));
            for call in self.calls.iter().filter(|call| usize::from(call.ticket) == index) {
                key.add(call.kind as u8 * 16 + call.told as u8);
                key.add(call.age as u8);
            }
            for call in self.ghosts.iter().filter(|call| usize::from(call.ticket) == index) {
                key.add(call.kind as u8 + 64);
            }
            keys[index] = (key, index as u8);
        }
        for client in 0..shape.clients {
            keys[shape.tickets_of(client)].sort_by_key(|(key, _)| key.0);
        }
        let mut order: [usize; CLIENTS] = std::array::from_fn(|index| index);
        let key = |client: usize| {
            let mut key = Key::default();
            let mut copy = self.clients[client];
            key.add(u8::from(copy.popped.ticket != NOBODY));
            copy.popped = Ring::default();
            copy.visit(&mut key);
            key.add(self.server.suspects >> client & 1);
            key
        };
        let own: [Key; CLIENTS] = std::array::from_fn(key);
        order[..shape.clients].sort_by(|a, b| {
            let tickets = |client: usize| keys[shape.tickets_of(client)].iter().map(|(key, _)| key.0);
            tickets(*a).cmp(tickets(*b)).then(own[*a].0.cmp(&own[*b].0))
        });
        let mut next = 0;
        for client in &order[..shape.clients] {
            for (_, old) in &keys[shape.tickets_of(*client)] {
                names[next] = *old;
                next += 1;
            }
        }
        if names.iter().enumerate().any(|(new, old)| new != usize::from(*old)) {
            self.rename(shape, &order, &names);
        }
        names
    }

    fn rename(&mut self, shape: &Shape, order: &[usize; CLIENTS], names: &[u8; TICKETS]) {
        let mut new = [NOBODY; TICKETS];
        for (index, old) in names.iter().enumerate() {
            new[usize::from(*old)] = index as u8;
        }
        let renamed = |ticket: &mut u8| {
            if *ticket != NOBODY {
                *ticket = new[usize::from(*ticket)];
            }
        };
        let old = *self;
        for index in 0..shape.clients {
            self.clients[index] = old.clients[order[index]];
            self.server.bells[index] = old.server.bells[order[index]];
            renamed(&mut self.clients[index].popped.ticket);
            renamed(&mut self.server.bells[index].ticket);
        }
        self.server.suspects =
            (0..shape.clients).map(|index| (old.server.suspects >> order[index] & 1) << index).sum();
        for index in 0..shape.tickets() {
            self.tickets[index] = old.tickets[usize::from(names[index])];
        }
        renamed(&mut self.server.holder);
        for queued in self.server.queue.iter_mut() {
            renamed(&mut queued.ticket);
        }
        for call in self.calls.iter_mut().chain(self.ghosts.iter_mut()) {
            renamed(&mut call.ticket);
            renamed(&mut call.next);
        }
    }
}

impl Ticket {
    /// A ticket nobody has used yet.
    pub(crate) fn blank() -> Ticket {
        Ticket { position: NIL, fence: NIL, given: NIL, news: NIL, ..Ticket::default() }
    }
}

/// Writes fields down.
struct Writer<'a>(&'a mut Vec<u8>);

impl Visit for Writer<'_> {
    fn byte(&mut self, byte: &mut u8) {
        self.0.push(*byte);
    }

    fn time(&mut self, time: &mut Ticks) {
        self.0.push(*time as u8);
    }

    fn fence(&mut self, fence: &mut Num) {
        self.0.extend(fence.to_le_bytes());
    }

    fn mark(&mut self, fence: &mut Num) {
        self.fence(fence);
    }

    fn dead(&mut self, fence: &mut Num) {
        self.fence(fence);
    }

    fn place(&mut self, place: &mut Num) {
        self.fence(place);
    }

    fn pick<T: Copy + PartialEq>(&mut self, value: &mut T, all: &[T]) {
        let index = all.iter().position(|one| one == value).expect("all are listed");
        self.0.push(index as u8);
    }

    fn list<T: Copy + Default, const N: usize>(&mut self, list: &mut Few<T, N>) {
        self.0.push(list.len() as u8);
    }
}

/// Reads what `Writer` wrote.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().expect("a whole world");
        self.0 = rest;
        *first
    }
}

impl Visit for Reader<'_> {
    fn byte(&mut self, byte: &mut u8) {
        *byte = self.take();
    }

    fn time(&mut self, time: &mut Ticks) {
        *time = self.take() as Ticks;
    }

    fn fence(&mut self, fence: &mut Num) {
        *fence = Num::from_le_bytes([self.take(), self.take()]);
    }

    fn mark(&mut self, fence: &mut Num) {
        self.fence(fence);
    }

    fn dead(&mut self, fence: &mut Num) {
        self.fence(fence);
    }

    fn place(&mut self, place: &mut Num) {
        self.fence(place);
    }

    fn pick<T: Copy + PartialEq>(&mut self, value: &mut T, all: &[T]) {
        *value = all[usize::from(self.take())];
    }

    fn list<T: Copy + Default, const N: usize>(&mut self, list: &mut Few<T, N>) {
        let len = self.take().into();
        list.resize(len);
    }
}

/// Moves every number.
struct Shift(Num);

impl Visit for Shift {
    fn fence(&mut self, fence: &mut Num) {
        if *fence != NIL {
            *fence += self.0;
        }
    }

    fn mark(&mut self, fence: &mut Num) {
        self.fence(fence);
    }

    fn dead(&mut self, fence: &mut Num) {
        self.fence(fence);
    }

    fn place(&mut self, place: &mut Num) {
        self.fence(place);
    }
}

/// Collects every number.
#[derive(Default)]
struct Known {
    fences: Few<Num, NUMBERS>,
    marks: Few<Num, NUMBERS>,
    places: Few<Num, NUMBERS>,
}

impl Visit for Known {
    fn fence(&mut self, fence: &mut Num) {
        add(&mut self.fences, *fence);
    }

    fn mark(&mut self, fence: &mut Num) {
        add(&mut self.marks, *fence);
    }

    fn place(&mut self, place: &mut Num) {
        add(&mut self.places, *place);
    }
}

/// Adds a number, once, in its order.
fn add(numbers: &mut Few<Num, NUMBERS>, number: Num) {
    if number == NIL {
        return;
    }
    let mut index = numbers.len();
    while index > 0 && numbers[index - 1] >= number {
        index -= 1;
    }
    if numbers.get(index) != Some(&number) {
        numbers.push(number);
        numbers[index..].rotate_right(1);
    }
}

/// Replaces every number by its rank among those of the same tick. Ranks are ten apart: one more than a number is
/// never another number.
struct Rank {
    fences: Few<(Num, Num), NUMBERS>,
    places: Few<(Num, Num), NUMBERS>,
}

impl Rank {
    fn new(known: &Known, back: Ticks) -> Rank {
        let mut fences = known.fences;
        for mark in known.marks.iter() {
            add(&mut fences, *mark);
        }
        Rank { fences: Rank::table(&fences, back), places: Rank::table(&known.places, back) }
    }

    fn table(numbers: &[Num], back: Ticks) -> Few<(Num, Num), NUMBERS> {
        let mut table = Few::default();
        let mut last = Num::MIN;
        let mut rank = 0;
        for number in numbers {
            let tick = number.div_euclid(1000).max(-Num::from(back)) * 1000;
            rank = if tick == last { rank + 10 } else { 0 };
            assert!(rank < 500, "fewer numbers than that matter");
            last = tick;
            table.push((*number, tick + rank));
        }
        table
    }

    fn replace(table: &[(Num, Num)], number: &mut Num) {
        if *number != NIL {
            *number = table.iter().find(|(old, _)| old == number).expect("all were collected").1;
        }
    }
}

impl Visit for Rank {
    fn fence(&mut self, fence: &mut Num) {
        Rank::replace(&self.fences, fence);
    }

    fn mark(&mut self, fence: &mut Num) {
        self.fence(fence);
    }

    fn dead(&mut self, fence: &mut Num) {
        self.fence(fence);
    }

    fn place(&mut self, place: &mut Num) {
        Rank::replace(&self.places, place);
    }
}

/// What tells a ticket or a client from its equals: everything but numbers, whose order is not known yet.
#[derive(Clone, Copy, Default)]
struct Key(u128);

impl Key {
    fn add(&mut self, byte: u8) {
        self.0 = self.0.wrapping_mul(251).wrapping_add(byte.into());
    }
}

impl Visit for Key {
    fn byte(&mut self, byte: &mut u8) {
        self.add(*byte);
    }

    fn time(&mut self, time: &mut Ticks) {
        self.add(*time as u8);
    }

    fn pick<T: Copy + PartialEq>(&mut self, value: &mut T, all: &[T]) {
        self.add(all.iter().position(|one| one == value).unwrap_or(0) as u8);
    }
}
