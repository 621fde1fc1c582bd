//! Liveness: from every state, once nothing goes wrong any more and clients act, whoever waits gets the lock.
//!
//! A fair run is a fixed function from state to state: everything on its way arrives, each client does what it owes,
//! holders release, a tick passes. That it serves all waiters from every state shows both that a grant stays reachable
//! and that it happens. Two runs are made, as different as can be: with bells, late calls arriving, clients in order;
//! and without any bell, late calls never arriving, clients in the opposite order. States on the way of a run are
//! remembered, so a run is cut short where an earlier one has been.

use super::explore::{Prints, fingerprint};
use super::rules::{Fault, Model, Step};
use super::server::Broken;
use super::world::{Budget, Kind, NOBODY, Phase, Ring, Told, World};

/// Nobody may wait longer than this once clients act.
const BOUND: u8 = 60;

/// What is known of fair runs.
pub(crate) struct Fair<'a> {
    model: &'a Model,
    /// In how many ticks all waiters are served from a state; for each kind of run.
    served: [Prints<u8>; 2],
    /// The longest of all.
    pub(crate) slowest: u8,
}

impl<'a> Fair<'a> {
    pub(crate) fn new(model: &'a Model) -> Fair<'a> {
        Fair { model, served: Default::default(), slowest: 0 }
    }

    /// Whether all who wait in `world` get the lock.
    pub(crate) fn serves(&mut self, world: &World) -> Result<(), Broken> {
        if !self.anybody_waits(world) {
            return Ok(());
        }
        for bells in [true, false] {
            let mut world = *world;
            world.budget = Budget::default();
            // What else a fair run breaks lies on a way that the explorer takes too, and tells shorter.
            if let Err(Broken::Stuck) = self.run(world, bells) {
                return Err(Broken::Stuck);
            }
        }
        Ok(())
    }

    fn anybody_waits(&self, world: &World) -> bool {
        (0..self.model.shape.tickets()).any(|index| self.model.waits(world, index as u8))
    }

    fn run(&mut self, mut world: World, bells: bool) -> Result<(), Broken> {
        let mut way = Vec::new();
        let mut bytes = Vec::new();
        let mut ticks = 0;
        self.arrive(&mut world, bells)?;
        while self.anybody_waits(&world) {
            world.settle(&self.model.shape);
            bytes.clear();
            world.pack(&self.model.shape, &mut bytes);
            let print = fingerprint(&bytes);
            if let Some(known) = self.served[usize::from(bells)].get(&print) {
                ticks = *known;
                break;
            }
            if way.len() > usize::from(BOUND) {
                return Err(Broken::Stuck);
            }
            way.push(print);
            self.round(&mut world, bells)?;
            self.arrive(&mut world, bells)?;
        }
        for print in way.into_iter().rev() {
            ticks += 1;
            self.served[usize::from(bells)].insert(print, ticks);
        }
        self.slowest = self.slowest.max(ticks);
        Ok(())
    }

    /// All that is on its way arrives, but for late calls that never do.
    fn arrive(&self, world: &mut World, bells: bool) -> Result<(), Broken> {
        while !world.ghosts.is_empty() {
            if bells {
                self.act(world, Step::Haunt(0))?;
            } else {
                world.ghosts.remove(0);
            }
        }
        self.deliver(world)
    }

    /// Everybody acts once, and a tick passes.
    fn round(&self, world: &mut World, bells: bool) -> Result<(), Broken> {
        let clients = self.model.shape.clients;
        for turn in 0..clients {
            let client = if bells { turn } else { clients - 1 - turn };
            if world.clients[client].alive {
                self.listen(world, client, bells)?;
                self.poll(world, client)?;
                self.finish(world, client)?;
            }
        }
        self.act(world, Step::Tick)
    }

    fn act(&self, world: &mut World, step: Step) -> Result<(), Broken> {
        *world = self.model.step(world, step).expect("what is on its way is delivered first")?;
        world.still(&self.model.shape);
        Ok(())
    }

    /// Delivers all calls and answers, and those that they give rise to.
    fn deliver(&self, world: &mut World) -> Result<(), Broken> {
        while let Some(call) = world.calls.first() {
            let step = if call.told == Told::Nothing { Step::Arrive(0) } else { Step::Answer(0) };
            self.act(world, step)?;
        }
        Ok(())
    }

    fn listen(&self, world: &mut World, client: usize, bells: bool) -> Result<(), Broken> {
        if !bells {
            world.clients[client].popped = Ring::default();
            return Ok(());
        }
        if world.clients[client].popped.ticket == NOBODY && world.server.bells[client].ticket != NOBODY {
            self.act(world, Step::Pop(client as u8))?;
        }
        if world.clients[client].popped.ticket != NOBODY {
            self.act(world, Step::Heard(client as u8))?;
        }
        self.deliver(world)
    }

    /// Polls with the first ticket of the room; with all of them if that had been forgotten.
    fn poll(&self, world: &mut World, client: usize) -> Result<(), Broken> {
        if self.model.fault == Some(Fault::NoPolls) {
            return Ok(());
        }
        let mut waiting: Vec<_> = self
            .model
            .shape
            .tickets_of(client)
            .filter(|at| world.tickets[*at].phase == Phase::Waiting)
            .collect();
        waiting.sort_by_key(|at| world.tickets[*at].position);
        for at in waiting {
            let queued =
                |world: &World| world.server.queue.iter().any(|queued| usize::from(queued.ticket) == at);
            let before = queued(world);
            if world.tickets[at].phase == Phase::Waiting {
                self.act(world, Step::Poll(at as u8))?;
                self.deliver(world)?;
            }
            if before || !queued(world) {
                break;
            }
        }
        Ok(())
    }

    /// Asks and releases again what came to nothing, withdraws what is owed, and releases what is held.
    fn finish(&self, world: &mut World, client: usize) -> Result<(), Broken> {
        for index in self.model.shape.tickets_of(client) {
            let at = index as u8;
            loop {
                let ticket = &world.tickets[index];
                let step = match ticket.phase {
                    _ if ticket.owes => Step::Withdraw(at),
                    _ if ticket.returns => Step::Return(at),
                    Phase::Held => Step::Release(at),
                    Phase::Asking | Phase::Releasing => Step::Again(at),
                    _ => break,
                };
                let asks = ticket.phase == Phase::Asking;
                self.act(world, step)?;
                let sent = world.calls.first().is_some_and(|call| call.kind == Kind::Ask);
                self.deliver(world)?;
                if asks && sent {
                    break;
                }
            }
        }
        Ok(())
    }
}
