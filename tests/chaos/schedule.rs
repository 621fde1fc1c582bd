//! What is to go wrong and when, decided by a seed alone.

use std::time::Duration;

use crate::random::Random;
use crate::support::proxy::Swallow;
use crate::worker::LEASES;

/// One thing to go wrong. A slot is a place for a process; `None` is all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// SIGKILL; another process starts in its place.
    Kill {
        slot: usize,
    },
    /// SIGSTOP for longer than any lease.
    Stop {
        slot: usize,
    },
    /// All connections are closed.
    Cut {
        slot: Option<usize>,
    },
    /// Nothing is forwarded.
    Freeze {
        slot: Option<usize>,
    },
    /// A reply, or the request itself, is lost.
    Swallow {
        slot: usize,
        how: Swallow,
        bell: bool,
    },
    /// Every message takes longer.
    Delay {
        slot: Option<usize>,
        by: Duration,
    },
    /// The server closes all connections of clients.
    ClientKill,
    ScriptFlush,
    /// The server holds commands back, all or those that write.
    Pause {
        writes: bool,
    },
    FlushAll,
    /// The server is killed and starts again, with its data or without.
    Restart {
        keep: bool,
    },
    /// The server refuses all that could grow.
    OutOfMemory,
    /// The server's wall clock jumps.
    Clock {
        by_us: i64,
    },
}

impl Fault {
    /// The name under which it is counted; all that a run has to show.
    pub(crate) const NAMES: [&str; 20] = [
        "SIGKILL",
        "SIGSTOP past the lease",
        "connections cut",
        "connections frozen",
        "reply lost, silence",
        "reply lost, cut",
        "reply held",
        "request lost, cut",
        "request held",
        "ring lost",
        "latency",
        "CLIENT KILL of all",
        "SCRIPT FLUSH",
        "CLIENT PAUSE ALL",
        "CLIENT PAUSE WRITE",
        "FLUSHALL",
        "restart with data",
        "restart without data",
        "out of memory",
        CLOCK,
    ];

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Fault::Kill { .. } => "SIGKILL",
            Fault::Stop { .. } => "SIGSTOP past the lease",
            Fault::Cut { .. } => "connections cut",
            Fault::Freeze { .. } => "connections frozen",
            Fault::Swallow { bell: true, .. } => "ring lost",
            Fault::Swallow { how: Swallow::Silence, .. } => "reply lost, silence",
            Fault::Swallow { how: Swallow::Cut, .. } => "reply lost, cut",
            Fault::Swallow { how: Swallow::Hold, .. } => "reply held",
            Fault::Swallow { how: Swallow::CutBefore, .. } => "request lost, cut",
            Fault::Swallow { how: Swallow::HoldRequest, .. } => "request held",
            Fault::Delay { .. } => "latency",
            Fault::ClientKill => "CLIENT KILL of all",
            Fault::ScriptFlush => "SCRIPT FLUSH",
            Fault::Pause { writes: false } => "CLIENT PAUSE ALL",
            Fault::Pause { writes: true } => "CLIENT PAUSE WRITE",
            Fault::FlushAll => "FLUSHALL",
            Fault::Restart { keep: true } => "restart with data",
            Fault::Restart { keep: false } => "restart without data",
            Fault::OutOfMemory => "out of memory",
            Fault::Clock { .. } => CLOCK,
        }
    }
}

/// The one fault that a machine without a C compiler cannot have.
pub(crate) const CLOCK: &str = "server clock stepped";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// From the start of the round.
    pub(crate) at: Duration,
    pub(crate) lasts: Duration,
    pub(crate) fault: Fault,
}

/// The faults of one round, in order. Every kind is there as often as every other, give or take one; several last at
/// the same time now and then.
pub(crate) fn schedule(seed: u64, length: Duration, slots: usize) -> Vec<Step> {
    let mut random = Random::new(seed);
    let length = u64::try_from(length.as_millis()).expect("a sane length");
    let mut deck = Vec::new();
    let mut steps = Vec::new();
    // Long enough for everybody to be at work.
    let mut at = 800;
    // The clock goes forward and back in turns, so it stays near the truth.
    let mut forward = random.within(0..2) == 0;
    loop {
        if deck.is_empty() {
            deck = (0..DECK).collect();
            random.shuffle(&mut deck);
        }
        let kind = deck.pop().expect("a full deck");
        let (fault, lasts) = fault(kind, &mut random, &mut forward, slots as u64);
        let lasts = Duration::from_millis(lasts);
        if at >= length {
            return steps;
        }
        steps.push(Step { at: Duration::from_millis(at), lasts, fault });
        at += random.within(300..length.min(30_000) / 12);
    }
}

/// Cards in the deck: the names, with the swallowed ring once for each way to lose it, and the clock both ways.
const DECK: u64 = 22;

/// Gives the fault of a card, and for how many milliseconds it lasts.
fn fault(card: u64, random: &mut Random, forward: &mut bool, slots: u64) -> (Fault, u64) {
    let slot = usize::try_from(random.within(0..slots)).expect("a slot");
    let some = (random.within(0..3) > 0).then_some(slot);
    let swallow = |how, bell| (Fault::Swallow { slot, how, bell }, 1200);
    match card {
        0 => (Fault::Kill { slot }, random.within(100..1500)),
        1 => (Fault::Stop { slot }, random.within(LEASES.end + 100..LEASES.end + 900)),
        2 => (Fault::Cut { slot: some }, 50),
        3 => (Fault::Freeze { slot: some }, random.within(200..2500)),
        4 => swallow(Swallow::Silence, false),
        5 => swallow(Swallow::Cut, false),
        6 => swallow(Swallow::Hold, false),
        7 => swallow(Swallow::CutBefore, false),
        8 => swallow(Swallow::Cut, true),
        9 => swallow(Swallow::Silence, true),
        10 => {
            let by = Duration::from_millis(random.within(15..150));
            (Fault::Delay { slot: some, by }, random.within(500..2000))
        }
        11 => (Fault::ClientKill, 50),
        12 => (Fault::ScriptFlush, 700),
        13 => (Fault::Pause { writes: false }, random.within(200..1500)),
        14 => (Fault::Pause { writes: true }, random.within(200..1500)),
        15 => (Fault::FlushAll, 50),
        16 => (Fault::Restart { keep: true }, 50),
        17 => (Fault::Restart { keep: false }, 50),
        18 => (Fault::OutOfMemory, random.within(500..2000)),
        19..=20 => {
            let by_us = i64::try_from(random.within(200_000..3_000_000)).expect("a number");
            let by_us = if *forward { by_us } else { -by_us };
            *forward = !*forward;
            (Fault::Clock { by_us }, 50)
        }
        21 => swallow(Swallow::HoldRequest, false),
        _ => unreachable!("a card of the deck"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_decides_the_schedule_and_a_round_has_every_fault() {
        let length = Duration::from_secs(30);
        for seed in 0..50 {
            let steps = schedule(seed, length, 4);
            assert_eq!(steps, schedule(seed, length, 4));
            assert_ne!(steps, schedule(seed + 1, length, 4));
        }
        let steps = schedule(1, length * 2, 4);
        for name in Fault::NAMES {
            assert!(steps.iter().any(|step| step.fault.name() == name), "{name} in {steps:#?}");
        }
    }
}
