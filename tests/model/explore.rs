//! The explorer: breadth first through all states of a configuration, each once.
//!
//! A state is remembered by 64 bits of its written form and those of its predecessor, so a run of 50 million states
//! takes about 2 GB and overlooks a state with a chance of less than one in 10 000. The way to a fault is found again
//! by walking the predecessors, and is as short as any.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::time::{Duration, Instant};

use super::fair::Fair;
use super::rules::{Model, Step};
use super::server::Broken;
use super::world::{Kind, TICKETS, Told, World};

/// What came of a run.
pub(crate) struct Report {
    pub(crate) name: &'static str,
    pub(crate) states: usize,
    pub(crate) steps: u64,
    pub(crate) depth: usize,
    pub(crate) time: Duration,
    /// How often each kind of step was taken, by [`Step::kind`].
    pub(crate) taken: [u64; KINDS.len()],
    /// How often the server suspected a client that was alive.
    pub(crate) suspected: u64,
    /// The longest time in ticks until all waiters were served, once clients acted.
    pub(crate) slowest: u8,
    /// What went wrong, and how it came to that.
    pub(crate) broken: Option<(Broken, Vec<String>)>,
}

/// Names of steps for the summary.
pub(crate) const KINDS: [&str; 25] = [
    "start",
    "again",
    "poll",
    "renew",
    "release",
    "give up",
    "park",
    "resume",
    "withdraw",
    "return",
    "arrive",
    "answer",
    "late",
    "unanswered",
    "twice",
    "haunt",
    "pop",
    "heard",
    "unheard",
    "crash",
    "tick",
    "back",
    "ahead",
    "wipe",
    "evict",
];

impl Step {
    fn kind(self) -> usize {
        match self {
            Step::Start(_) => 0,
            Step::Again(_) => 1,
            Step::Poll(_) => 2,
            Step::Renew(_) => 3,
            Step::Release(_) => 4,
            Step::GiveUp(_) => 5,
            Step::Park(_) => 6,
            Step::Resume(_) => 7,
            Step::Withdraw(_) => 8,
            Step::Return(_) => 9,
            Step::Arrive(_) => 10,
            Step::Answer(_) => 11,
            Step::Late(_) => 12,
            Step::Unanswered(_) => 13,
            Step::Twice(_) => 14,
            Step::Haunt(_) => 15,
            Step::Pop(_) => 16,
            Step::Heard(_) => 17,
            Step::Unheard(_) => 18,
            Step::Crash(_) => 19,
            Step::Tick => 20,
            Step::Back => 21,
            Step::Ahead => 22,
            Step::Wipe => 23,
            Step::Evict => 24,
        }
    }
}

impl Report {
    /// How often the step of this name was taken.
    pub(crate) fn count(&self, kind: &str) -> u64 {
        KINDS.iter().position(|name| *name == kind).map_or(0, |index| self.taken[index])
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { name, states, steps, depth, time, suspected, slowest, .. } = self;
        write!(f, "{name}: {states} states, {steps} steps, depth {depth}, {:.1} s", time.as_secs_f64())?;
        write!(f, "; all served within {slowest} ticks; live clients suspected {suspected}")?;
        for (kind, taken) in KINDS.iter().zip(self.taken).filter(|(_, taken)| *taken > 0) {
            write!(f, ", {kind} {taken}")?;
        }
        if let Some((broken, way)) = &self.broken {
            write!(f, "\n{broken:?} is broken:")?;
            for line in way {
                write!(f, "\n  {line}")?;
            }
        }
        Ok(())
    }
}

/// A map by fingerprints, which need no hashing.
pub(crate) type Prints<T> = HashMap<u64, T, BuildHasherDefault<Print>>;

/// Takes a fingerprint for its own hash.
#[derive(Default)]
pub(crate) struct Print(u64);

impl Hasher for Print {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("fingerprints are whole words");
    }

    fn write_u64(&mut self, print: u64) {
        self.0 = print;
    }
}

/// 64 bits of `bytes`.
pub(crate) fn fingerprint(bytes: &[u8]) -> u64 {
    let mix = |a: u64, b: u64| {
        let product = u128::from(a) * u128::from(b);
        product as u64 ^ (product >> 64) as u64
    };
    let mut print = 0x9e37_79b9_7f4a_7c15 ^ bytes.len() as u64;
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        print = mix(print ^ u64::from_le_bytes(word), 0xd6e8_feb8_6659_fd93) ^ print.rotate_left(29);
    }
    mix(print, 0xa076_1d64_78bd_642f)
}

/// States one after the other, each behind its length.
#[derive(Default)]
struct Layer(Vec<u8>);

impl Layer {
    fn push(&mut self, state: &[u8]) {
        self.0.extend(u16::try_from(state.len()).expect("states are short").to_le_bytes());
        self.0.extend(state);
    }

    fn states(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = &self.0[..];
        std::iter::from_fn(move || {
            let (len, more) = rest.split_first_chunk::<2>()?;
            let (state, more) = more.split_at(u16::from_le_bytes(*len).into());
            rest = more;
            Some(state)
        })
    }
}

/// Looks at every state that `model` can reach, up to the first fault.
pub(crate) fn explore(model: &Model) -> Report {
    let start = Instant::now();
    let mut report = Report {
        name: model.name,
        states: 0,
        steps: 0,
        depth: 0,
        time: Duration::ZERO,
        taken: [0; KINDS.len()],
        suspected: 0,
        slowest: 0,
        broken: None,
    };
    let mut before: Prints<u64> = Prints::default();
    let mut fair = Fair::new(model);
    let (mut layer, mut next) = (Layer::default(), Layer::default());
    let (mut bytes, mut steps) = (Vec::new(), Vec::new());
    model.start().pack(&model.shape, &mut bytes);
    before.insert(fingerprint(&bytes), 0);
    layer.push(&bytes);
    'run: while !layer.0.is_empty() {
        for state in layer.states() {
            let print = fingerprint(state);
            let world = World::unpack(&model.shape, state);
            if let Err(broken) = fair.serves(&world) {
                report.broken = Some((broken, way(model, &before, print, None)));
                break 'run;
            }
            model.steps(&world, &mut steps);
            for step in &steps {
                let mut reached = match model.step(&world, *step) {
                    None => continue,
                    Some(Ok(reached)) => reached,
                    Some(Err(broken)) => {
                        report.broken = Some((broken, way(model, &before, print, Some(*step))));
                        break 'run;
                    }
                };
                report.steps += 1;
                report.taken[step.kind()] += 1;
                let suspects = reached.server.suspects & !world.server.suspects;
                report.suspected += u64::from(
                    (0..model.shape.clients).any(|c| suspects >> c & 1 == 1 && reached.clients[c].alive),
                );
                reached.settle(&model.shape);
                bytes.clear();
                reached.pack(&model.shape, &mut bytes);
                if let std::collections::hash_map::Entry::Vacant(new) = before.entry(fingerprint(&bytes)) {
                    new.insert(print);
                    assert_eq!(
                        World::unpack(&model.shape, &bytes),
                        reached,
                        "all that counts is written down"
                    );
                    next.push(&bytes);
                }
            }
        }
        report.depth += 1;
        layer.0.clear();
        std::mem::swap(&mut layer, &mut next);
    }
    report.states = before.len();
    report.slowest = fair.slowest;
    report.time = start.elapsed();
    report
}

/// The way to the state `print`, and the `last` step from there.
fn way(model: &Model, before: &Prints<u64>, print: u64, last: Option<Step>) -> Vec<String> {
    let mut prints = vec![print];
    while let Some(earlier) = prints.last().and_then(|print| before.get(print)).filter(|print| **print != 0) {
        prints.push(*earlier);
    }
    prints.pop();
    let mut world = model.start();
    let mut names: [u8; TICKETS] = std::array::from_fn(|index| index as u8);
    let mut lines = Vec::new();
    let (mut bytes, mut steps) = (Vec::new(), Vec::new());
    while let Some(print) = prints.pop() {
        model.steps(&world, &mut steps);
        let found = steps.iter().find_map(|step| {
            let mut reached = model.step(&world, *step)?.ok()?;
            let plain = reached;
            let moved = reached.settle(&model.shape);
            bytes.clear();
            reached.pack(&model.shape, &mut bytes);
            (fingerprint(&bytes) == print).then_some((*step, plain, reached, moved))
        });
        let (step, plain, reached, moved) = found.expect("every state has a way to it");
        lines.push(told(model, &world, step, Some(&plain), &names));
        names = moved.map(|old| names[usize::from(old)]);
        world = reached;
    }
    lines.extend(last.map(|step| told(model, &world, step, None, &names)));
    lines
}

/// A step in words.
fn told(model: &Model, world: &World, step: Step, after: Option<&World>, names: &[u8; TICKETS]) -> String {
    let ticket = |index: u8| {
        let Some(name) = names.get(usize::from(index)) else { return "-".into() };
        format!("{}{}", ["a", "b", "c"][model.shape.owner(*name)], usize::from(*name) % model.shape.each)
    };
    let client = |index: u8| {
        let name = ticket(index * model.shape.each as u8);
        name[..1].to_string()
    };
    let call = |call: &super::world::Call| {
        let answer = match call.told {
            Told::Nothing => String::new(),
            told => format!(
                ", answered {told:?} {} naming {} {}",
                call.number,
                ticket(call.next),
                call.next_fence
            ),
        };
        let fence = if matches!(call.kind, Kind::Renew | Kind::Release | Kind::PassOver) {
            format!(" {}", call.fence)
        } else {
            String::new()
        };
        format!("{} {:?}{fence}, sent {} ago{answer}", ticket(call.ticket), call.kind, call.age)
    };
    let what = match step {
        Step::Arrive(index) => {
            let arrives = &world.calls[usize::from(index)];
            let answered = after.and_then(|after| after.calls.last());
            format!("arrives: {}", call(answered.unwrap_or(arrives)))
        }
        Step::Answer(index) => format!("answer: {}", call(&world.calls[usize::from(index)])),
        Step::Late(index) => format!("is late: {}", call(&world.calls[usize::from(index)])),
        Step::Unanswered(index) => format!("answer lost: {}", call(&world.calls[usize::from(index)])),
        Step::Twice(index) => format!("will arrive twice: {}", call(&world.calls[usize::from(index)])),
        Step::Haunt(index) => format!("arrives late: {}", call(&world.ghosts[usize::from(index)])),
        Step::Pop(index) => format!("pop for {}", client(index)),
        Step::Heard(index) | Step::Unheard(index) => {
            let ring = &world.clients[usize::from(index)].popped;
            format!("{step:?}: ring for {} with {}", ticket(ring.ticket), ring.fence)
        }
        Step::Crash(index) => format!("{} crashes", client(index)),
        Step::Start(index)
        | Step::Again(index)
        | Step::Poll(index)
        | Step::Renew(index)
        | Step::Release(index)
        | Step::GiveUp(index)
        | Step::Park(index)
        | Step::Resume(index)
        | Step::Withdraw(index)
        | Step::Return(index) => format!("{} {}", KINDS[step.kind()], ticket(index)),
        Step::Tick | Step::Back | Step::Ahead | Step::Wipe | Step::Evict => {
            format!("{step:?}").to_lowercase()
        }
    };
    let Some(after) = after else { return what };
    let believers: Vec<_> = (0..model.shape.tickets())
        .filter(|index| model.believes(&after.tickets[*index]))
        .map(|index| format!("{} {}", ticket(index as u8), after.tickets[index].fence))
        .collect();
    format!(
        "{what}  [server: {} {}; believe: {}]",
        ticket(after.server.holder),
        after.server.fence,
        believers.join(", ")
    )
}
