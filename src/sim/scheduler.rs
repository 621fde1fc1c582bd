//! Who runs next, what time it is, and whether anybody is stuck.
//!
//! Invariant: between two scheduling points exactly one simulated thread runs, so what it does there is atomic, and a
//! seed repeats exactly.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::panic::{self, AssertUnwindSafe, Location};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::clock::Moment;

/// Nobody has the baton.
const NOBODY: usize = usize::MAX;
/// More scheduling points than this are a livelock.
const MOST_POINTS: u64 = 400_000;
/// More than this at one moment are one, too.
const MOST_AT_ONCE: u64 = 20_000;
/// How many points a failure shows.
const TRACE: usize = 120;
/// Nobody who could run is kept from it for longer at a time, nanoseconds.
const STALL: u64 = 250_000_000;
/// Threads that are left this long after the scenario has ended never end.
const DRAIN: Duration = Duration::from_secs(90);
/// Time starts here, so that nothing looks as if it were at the beginning of all things.
const START: Duration = Duration::from_secs(1000);

thread_local! {
    /// The simulated thread that this OS thread is.
    static ME: RefCell<Option<Me>> = const { RefCell::new(None) };
    /// How many simulated mutexes it holds.
    static LOCKS: Cell<usize> = const { Cell::new(0) };
    /// Whether its operations are no scheduling points now.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// A seeded generator (splitmix64): small, and the same on every machine.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.next() % bound }
    }

    /// True `n` times in a thousand.
    pub(crate) fn permille(&mut self, n: u64) -> bool {
        n > 0 && self.below(1000) < n
    }
}

/// How a schedule goes about its choices.
#[derive(Clone, Debug)]
pub(crate) struct Pace {
    /// How often in a thousand points another thread is considered.
    pub(crate) switch: u64,
    /// Whether the thread with the highest of random priorities runs, which now and then are dealt anew.
    pub(crate) ranked: bool,
    /// How often in a thousand points time passes although somebody could run.
    pub(crate) stall: u64,
    /// How often in a thousand the system refuses a thread to the library.
    pub(crate) no_thread: u64,
    /// The scenario fails when it is not over by then.
    pub(crate) limit: Duration,
}

/// What a blocked thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// A mutex, by address.
    Mutex(usize),
    /// A condition variable, by address.
    Condvar(usize),
    /// A channel, by address.
    Channel(usize),
    /// A ring, by the number of the listening.
    Bell(u64),
    /// The end of a thread.
    Join(usize),
    /// Time.
    Sleep,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ready,
    Running,
    Blocked { on: Cause, timer: Option<(u64, u64)> },
    Done,
}

struct Slot {
    name: Box<str>,
    state: State,
    /// Whether its last wait ended by time.
    timed_out: bool,
    /// Who runs first, when ranks count.
    rank: u64,
    os: Option<thread::Thread>,
    /// What it did last, for the report on a schedule that is stuck.
    at: Option<(&'static str, &'static Location<'static>)>,
}

/// What happens at some time.
enum Due {
    Thread(usize),
    Event(Box<dyn FnOnce() + Send>),
}

struct Core {
    rng: Rng,
    pace: Pace,
    /// Nanoseconds.
    now: u64,
    threads: Vec<Slot>,
    timers: BTreeMap<(u64, u64), Due>,
    sequence: u64,
    points: u64,
    points_at_once: u64,
    /// Sums up what was chosen, to compare two runs.
    digest: u64,
    trace: VecDeque<(u64, usize, &'static str, &'static Location<'static>)>,
    /// When the scenario ended.
    over: Option<u64>,
    failure: Option<String>,
    live: usize,
}

/// The scheduler of one schedule.
pub(crate) struct Scheduler {
    core: Mutex<Core>,
    /// Who has the baton.
    running: AtomicUsize,
    /// All threads have ended, or one has failed.
    end: Condvar,
    /// Whether every point is printed.
    loud: bool,
}

#[derive(Clone)]
struct Me {
    scheduler: Arc<Scheduler>,
    id: usize,
}

/// What a schedule that went well amounts to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) points: u64,
    pub(crate) digest: u64,
    pub(crate) took: Duration,
}

/// The payload of a panic that a scenario wants.
pub(crate) struct Injected;

/// The time of the simulation, if the calling thread is in one.
pub(crate) fn now() -> Option<Moment> {
    me().map(|me| Moment::from_nanos(me.scheduler.core.lock().now))
}

/// A random number of the simulation, if the calling thread is in one.
pub(crate) fn random() -> Option<u64> {
    me().map(|me| me.scheduler.core.lock().rng.next())
}

/// A number below `bound`, in a simulation.
pub(crate) fn draw(bound: u64) -> u64 {
    expect().scheduler.core.lock().rng.below(bound)
}

/// True `n` times in a thousand, in a simulation.
pub(crate) fn permille(n: u64) -> bool {
    n > 0 && expect().scheduler.core.lock().rng.permille(n)
}

fn me() -> Option<Me> {
    ME.with_borrow(Clone::clone)
}

fn expect() -> Me {
    me().expect("this thread is in a simulation")
}

/// Whether the calling thread is simulated, and its operations count.
pub(crate) fn inside() -> bool {
    ME.with_borrow(Option::is_some)
}

/// Runs `look` without scheduling points.
pub(crate) fn quietly<T>(look: impl FnOnce() -> T) -> T {
    let before = QUIET.replace(true);
    let seen = look();
    QUIET.set(before);
    seen
}

/// A scheduling point.
#[track_caller]
pub(crate) fn point(what: &'static str) {
    if QUIET.get() {
        return;
    }
    if let Some(me) = me() {
        me.scheduler.point(me.id, what, Location::caller());
    }
}

/// Blocks until woken or until `until`; says whether it was woken.
#[track_caller]
pub(crate) fn block(what: &'static str, on: Cause, until: Option<Moment>) -> bool {
    let me = expect();
    assert!(!QUIET.get(), "a look must not block on {on:?}");
    me.scheduler.block(me.id, what, Location::caller(), on, until)
}

/// Sleeps.
#[track_caller]
pub(crate) fn sleep(time: Duration) {
    let until = now().map(|now| now.after(time));
    block("sleep", Cause::Sleep, until);
}

/// Wakes one of those that wait for `on`, or all.
pub(crate) fn wake(on: Cause, all: bool) {
    if let Some(me) = me() {
        me.scheduler.core.lock().wake(on, all);
    }
}

/// Has `event` happen at `at`.
pub(crate) fn at(at: Moment, event: impl FnOnce() + Send + 'static) {
    let me = expect();
    let mut core = me.scheduler.core.lock();
    core.timer(at.as_nanos(), Due::Event(Box::new(event)));
}

/// Counts a simulated mutex that was taken or given back.
pub(crate) fn holds(one: bool) {
    LOCKS.with(|locks| locks.set(if one { locks.get() + 1 } else { locks.get() - 1 }));
}

/// Fails the schedule if the calling thread holds a mutex: what follows may take as long as a network does.
pub(crate) fn holds_nothing(what: &str) {
    if LOCKS.get() != 0 {
        fail(format!("{what} with {} mutexes held", LOCKS.get()));
    }
}

/// Ends the schedule: something that must hold does not.
pub(crate) fn fail(why: String) -> ! {
    let me = expect();
    me.scheduler.fail(Some(me.id), why)
}

/// Says something in the trace.
pub(crate) fn note(what: impl FnOnce() -> String) {
    let Some(me) = me() else { return };
    if me.scheduler.loud {
        let now = me.scheduler.core.lock().now;
        // To show a guard is to look at its lease.
        eprintln!("{} {:>2} -- {}", spell(now), me.id, quietly(what));
    }
}

/// Starts a simulated thread; `None` if the system refuses one to the library.
pub(crate) fn spawn(name: &str, ours: bool, body: impl FnOnce() + Send + 'static) -> Option<usize> {
    let me = expect();
    if !ours {
        let mut core = me.scheduler.core.lock();
        let chance = core.pace.no_thread;
        if core.rng.permille(chance) {
            return None;
        }
    }
    Some(me.scheduler.spawn(name, body))
}

/// Waits for the end of a thread.
#[track_caller]
pub(crate) fn join(id: usize) {
    let me = expect();
    while me.scheduler.core.lock().threads[id].state != State::Done {
        block("join", Cause::Join(id), None);
    }
}

/// Gives what follows so much time, instead of what the plan gave the whole.
pub(crate) fn extend(time: Duration) {
    let me = expect();
    let mut core = me.scheduler.core.lock();
    core.pace.limit = Duration::from_nanos(core.now) - START + time;
}

/// Notes that the scenario is over: what is left has to end by itself.
pub(crate) fn over() {
    let me = expect();
    let mut core = me.scheduler.core.lock();
    core.over = Some(core.now);
}

/// Runs one schedule with `body` as its first thread.
pub(crate) fn run(
    seed: u64,
    pace: Pace,
    loud: bool,
    body: impl FnOnce() + Send + 'static,
) -> Result<Summary, String> {
    let core = Core {
        rng: Rng::new(seed),
        pace,
        now: START.as_nanos() as u64,
        threads: Vec::new(),
        timers: BTreeMap::new(),
        sequence: 0,
        points: 0,
        points_at_once: 0,
        digest: 0,
        trace: VecDeque::with_capacity(TRACE),
        over: None,
        failure: None,
        live: 0,
    };
    let scheduler = Arc::new(Scheduler {
        core: Mutex::new(core),
        running: AtomicUsize::new(NOBODY),
        end: Condvar::new(),
        loud,
    });
    let first = scheduler.spawn("scenario", body);
    let mut core = scheduler.core.lock();
    let os = core.threads[first].os.clone();
    core.threads[first].state = State::Running;
    scheduler.running.store(first, Ordering::Release);
    os.expect("it was started").unpark();
    while core.live > 0 && core.failure.is_none() {
        scheduler.end.wait(&mut core);
    }
    match core.failure.take() {
        // Its threads stay where they are: to end them, they would have to run on.
        Some(why) => Err(why),
        None => Ok(Summary {
            points: core.points,
            digest: core.digest,
            took: Duration::from_nanos(core.now) - START,
        }),
    }
}

impl Scheduler {
    fn spawn(self: &Arc<Scheduler>, name: &str, body: impl FnOnce() + Send + 'static) -> usize {
        let mut core = self.core.lock();
        let id = core.threads.len();
        let rank = core.rng.next();
        core.live += 1;
        core.threads.push(Slot {
            name: name.into(),
            state: State::Ready,
            timed_out: false,
            rank,
            os: None,
            at: None,
        });
        let scheduler = Arc::clone(self);
        let started = thread::Builder::new().name(format!("sim-{id}-{name}")).spawn(move || {
            scheduler.wait_for_baton(id);
            ME.set(Some(Me { scheduler: Arc::clone(&scheduler), id }));
            let ended = panic::catch_unwind(AssertUnwindSafe(body));
            if let Err(payload) = ended
                && !payload.is::<Injected>()
            {
                scheduler.fail(Some(id), format!("panicked: {}", said(&*payload)));
            }
            // Still as one of the simulation: what is due next may happen on this thread.
            scheduler.leave(id);
        });
        core.threads[id].os = Some(started.expect("an OS thread").thread().clone());
        id
    }

    fn point(&self, me: usize, what: &'static str, at: &'static Location<'static>) {
        let mut core = self.core.lock();
        self.mark(&mut core, me, what, at);
        // Most points change nothing: spare them the look at all threads.
        let pace = &core.pace;
        let (switch, stall) = (pace.switch, pace.stall);
        if !core.pace.ranked && !core.rng.permille(switch + stall) {
            return;
        }
        core.threads[me].state = State::Ready;
        self.switch(core, me);
    }

    fn block(
        &self,
        me: usize,
        what: &'static str,
        at: &'static Location<'static>,
        on: Cause,
        until: Option<Moment>,
    ) -> bool {
        let mut core = self.core.lock();
        self.mark(&mut core, me, what, at);
        let timer = until.filter(|until| *until != Moment::NEVER).map(|until| {
            // A system wakes nobody early, but late.
            let late = if core.rng.permille(300) { core.rng.below(200_000) } else { 0 };
            core.timer(until.as_nanos().saturating_add(late), Due::Thread(me))
        });
        core.threads[me].timed_out = false;
        core.threads[me].state = State::Blocked { on, timer };
        self.switch(core, me);
        !self.core.lock().threads[me].timed_out
    }

    fn mark(&self, core: &mut Core, me: usize, what: &'static str, at: &'static Location<'static>) {
        core.points += 1;
        core.points_at_once += 1;
        core.threads[me].at = Some((what, at));
        core.digest = (core.digest ^ (me as u64) ^ core.now ^ u64::from(at.line()))
            .rotate_left(7)
            .wrapping_mul(0x0100_0000_01b3);
        if core.trace.len() == TRACE {
            core.trace.pop_front();
        }
        let now = core.now;
        core.trace.push_back((now, me, what, at));
        if self.loud {
            eprintln!("{} {me:>2} {what} {}:{}", spell(now), at.file(), at.line());
        }
    }

    /// Gives the baton to whom the scheduler chooses, and waits until it comes back.
    fn switch(&self, core: parking_lot::MutexGuard<'_, Core>, me: usize) {
        if self.hand_on(core, me) {
            self.wait_for_baton(me);
        }
    }

    /// Gives the baton on; says whether somebody else has it now.
    fn hand_on<'a>(&'a self, mut core: parking_lot::MutexGuard<'a, Core>, me: usize) -> bool {
        let next = loop {
            match core.choose(me) {
                Choice::Run(next) => break next,
                Choice::Events(events) => {
                    drop(core);
                    events.into_iter().for_each(|event| event());
                    core = self.core.lock();
                }
                Choice::Stuck(why) => {
                    drop(core);
                    self.fail(None, why);
                }
            }
        };
        core.threads[next].state = State::Running;
        if next == me {
            return false;
        }
        let os = core.threads[next].os.clone();
        drop(core);
        self.running.store(next, Ordering::Release);
        os.expect("it was started").unpark();
        true
    }

    fn wait_for_baton(&self, me: usize) {
        while self.running.load(Ordering::Acquire) != me {
            thread::park();
        }
    }

    fn leave(&self, me: usize) {
        let mut core = self.core.lock();
        core.threads[me].state = State::Done;
        core.live -= 1;
        core.wake(Cause::Join(me), true);
        if core.live == 0 {
            self.end.notify_all();
            return;
        }
        self.hand_on(core, NOBODY);
    }

    fn fail(&self, me: Option<usize>, why: String) -> ! {
        let mut core = self.core.lock();
        let mut text = String::new();
        for (now, thread, what, at) in &core.trace {
            let name = &core.threads[*thread].name;
            let _ = writeln!(text, "  {} {thread:>2} {name} {what} {}:{}", spell(*now), at.file(), at.line());
        }
        let _ = write!(text, "{}: ", spell(core.now));
        if let Some(me) = me {
            let _ = write!(text, "thread {me} {}: ", core.threads[me].name);
        }
        text.push_str(&why);
        core.failure.get_or_insert(text);
        self.end.notify_all();
        drop(core);
        loop {
            thread::park();
        }
    }
}

enum Choice {
    Run(usize),
    Events(Vec<Box<dyn FnOnce() + Send>>),
    Stuck(String),
}

impl Core {
    fn timer(&mut self, at: u64, due: Due) -> (u64, u64) {
        self.sequence += 1;
        let key = (at, self.sequence);
        self.timers.insert(key, due);
        key
    }

    fn wake(&mut self, on: Cause, all: bool) {
        let waiting: Vec<usize> = (0..self.threads.len())
            .filter(|id| matches!(self.threads[*id].state, State::Blocked { on: other, .. } if other == on))
            .collect();
        if waiting.is_empty() {
            return;
        }
        let one = self.rng.below(waiting.len() as u64) as usize;
        let woken = if all { &waiting[..] } else { &waiting[one..=one] };
        for &id in woken {
            if let State::Blocked { timer: Some(timer), .. } = self.threads[id].state {
                self.timers.remove(&timer);
            }
            self.threads[id].state = State::Ready;
        }
    }

    /// Who runs next; `me` is the thread that ran.
    fn choose(&mut self, me: usize) -> Choice {
        if self.points > MOST_POINTS {
            return Choice::Stuck(format!("livelock: {} points\n{}", self.points, self.threads_left()));
        }
        if self.points_at_once > MOST_AT_ONCE {
            return Choice::Stuck(format!("livelock: no time passes\n{}", self.threads_left()));
        }
        let ready: Vec<usize> =
            (0..self.threads.len()).filter(|id| self.threads[*id].state == State::Ready).collect();
        let soon = self.timers.first_key_value().is_some_and(|((at, _), _)| *at < self.now + STALL);
        if ready.is_empty() || soon && self.rng.permille(self.pace.stall) {
            match self.advance() {
                Some(choice) => return choice,
                None if ready.is_empty() => {
                    return Choice::Stuck(format!("deadlock: nobody can run\n{}", self.threads_left()));
                }
                None => {}
            }
        }
        if self.pace.ranked {
            if self.rng.permille(20) {
                for slot in &mut self.threads {
                    slot.rank = self.rng.next();
                }
            }
            let best = ready.iter().copied().max_by_key(|id| self.threads[*id].rank);
            return Choice::Run(best.expect("one is ready"));
        }
        let stays = ready.contains(&me) && !self.rng.permille(self.pace.switch);
        Choice::Run(if stays { me } else { ready[self.rng.below(ready.len() as u64) as usize] })
    }

    /// Lets time pass until the next thing is due, and has all happen that is due then.
    fn advance(&mut self) -> Option<Choice> {
        let (&(at, _), _) = self.timers.first_key_value()?;
        if at > self.now {
            self.now = at;
            self.points_at_once = 0;
        }
        let limit = match self.over {
            Some(over) => over + DRAIN.as_nanos() as u64,
            None => (START + self.pace.limit).as_nanos() as u64,
        };
        if self.now > limit {
            let what = if self.over.is_some() { "threads are left" } else { "the scenario does not end" };
            return Some(Choice::Stuck(format!("{what}\n{}", self.threads_left())));
        }
        let later = self.timers.split_off(&(self.now + 1, 0));
        let mut events = Vec::new();
        for due in std::mem::replace(&mut self.timers, later).into_values() {
            match due {
                Due::Thread(id) => {
                    self.threads[id].timed_out = true;
                    self.threads[id].state = State::Ready;
                }
                Due::Event(event) => events.push(event),
            }
        }
        Some(Choice::Events(events))
    }

    fn threads_left(&self) -> String {
        let mut text = String::new();
        for (id, slot) in self.threads.iter().enumerate().filter(|(_, slot)| slot.state != State::Done) {
            let (what, file, line) =
                slot.at.map_or(("new", "", 0), |(what, at)| (what, at.file(), at.line()));
            let _ = writeln!(text, "  {id:>2} {} {:?} {what} {file}:{line}", slot.name, slot.state);
        }
        text
    }
}

/// What a panic said.
fn said(payload: &(dyn Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("something")
}

/// A time of the simulation in seconds.
fn spell(now: u64) -> String {
    format!("{:.6}", (Duration::from_nanos(now) - START).as_secs_f64())
}
