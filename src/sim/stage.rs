//! Clients, threads and checks for scenarios; runs the schedules of one.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::scheduler::{self, Pace, Rng, Summary, draw};
use super::server::{Faults, Server};
use crate::client::LockClient;
use crate::clock::{self, Moment};
use crate::error::Error;
use crate::fifo_lock::FifoLock;
use crate::guard::LockGuard;
use crate::protocol::{ClientId, Terms, TicketId};
use crate::waiting::Room;

/// The bound on one call.
pub(super) const CALL: Duration = Duration::from_millis(300);
/// When no network and no thread is slow, a grant reaches its waiter within this time.
const SMOOTH: Duration = Duration::from_millis(15);
/// How long a grant may stay unclaimed.
const CLAIM: Duration = Duration::from_millis(100);
/// And without a listener, within this.
const DEAF: Duration = Duration::from_millis(200);
/// No withdrawal goes on for longer, and no thread idles for longer.
const SETTLE: Duration = Duration::from_secs(75);

/// What the seed decides before a schedule begins.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) pace: Pace,
    pub(super) faults: Faults,
    pub(super) lease: Duration,
    pub(super) poll: Duration,
}

impl Plan {
    fn new(rng: &mut Rng) -> Plan {
        let pace = Pace {
            switch: [30, 150, 500][rng.below(3) as usize],
            ranked: rng.permille(250),
            stall: if rng.permille(300) { 1 + rng.below(40) } else { 0 },
            no_thread: 0,
            limit: Duration::from_secs(120),
        };
        // A third goes well, a third has a hiccup, a third is rough.
        let worst = [0, 40, 200][rng.below(3) as usize];
        let mut often = || if worst == 0 { 0 } else { rng.below(worst) };
        let faults = Faults {
            refused: often(),
            request_lost: often(),
            reply_lost: often(),
            late: often(),
            busy: often(),
            bell_refused: often(),
            bell_broken: often(),
            ring_lost: often(),
            ring_late: often(),
            noise: often() / 10,
            slow: if worst == 0 { 0 } else { often() },
            panics: 0,
            bell_panics: 0,
            instant: false,
        };
        Plan {
            pace,
            faults,
            lease: Duration::from_millis([200, 600, 2000][rng.below(3) as usize]),
            poll: Duration::from_millis([100, 300, 1000][rng.below(3) as usize]),
        }
    }
}

/// What a scenario plays on.
#[derive(Clone)]
pub(super) struct Stage {
    inner: Arc<Inner>,
}

struct Inner {
    plan: Plan,
    server: Server,
    threads: Mutex<Vec<usize>>,
    rooms: Mutex<Vec<Weak<Room>>>,
    clients: Mutex<u32>,
}

impl Stage {
    pub(super) fn server(&self) -> &Server {
        &self.inner.server
    }

    pub(super) fn plan(&self) -> &Plan {
        &self.inner.plan
    }

    /// Whether nothing goes wrong and nobody is kept from running.
    pub(super) fn is_smooth(&self) -> bool {
        self.plan().faults.none() && self.is_prompt()
    }

    /// Whether no thread is kept from running.
    pub(super) fn is_prompt(&self) -> bool {
        self.plan().pace.stall == 0
    }

    /// Makes a client of the server.
    pub(super) fn client(&self) -> LockClient {
        let mut clients = self.inner.clients.lock();
        *clients += 1;
        let label = format!("c{clients}");
        drop(clients);
        LockClient::new(Box::new(self.server().clone()), "sim", Some(&label), CALL)
    }

    /// Makes the lock with the settings of the plan.
    pub(super) fn lock(&self, client: &LockClient) -> FifoLock {
        self.lock_with(client, Duration::from_secs(20))
    }

    /// Makes it with this patience.
    pub(super) fn lock_with(&self, client: &LockClient, patience: Duration) -> FifoLock {
        let lock = client
            .builder("x")
            .lease(self.plan().lease)
            .max_hold(Duration::from_secs(10))
            .poll(self.plan().poll)
            .claim(CLAIM)
            .release_bound(Duration::from_secs(1))
            .patience(patience)
            .build()
            .expect("settings within bounds");
        self.watch(client);
        lock
    }

    /// Has the client's room looked at in the end.
    pub(super) fn watch(&self, client: &LockClient) {
        if let Ok((room, _)) = client.room("x") {
            self.inner.rooms.lock().push(Arc::downgrade(&room));
        }
    }

    /// Starts a thread of the user's.
    pub(super) fn thread(&self, name: &str, body: impl FnOnce(&Stage) + Send + 'static) {
        let stage = self.clone();
        let id = scheduler::spawn(name, true, move || body(&stage)).expect("ours are never refused");
        self.inner.threads.lock().push(id);
    }

    /// Waits for the threads that were started.
    pub(super) fn join(&self) {
        loop {
            let Some(id) = self.inner.threads.lock().pop() else { return };
            scheduler::join(id);
        }
    }

    /// Waits for the lock, and checks how that ends.
    pub(super) fn obtain(&self, lock: &FifoLock, wait: Option<Duration>) -> Option<LockGuard> {
        let start = clock::now();
        let result = match wait {
            None => lock.lock().map(Some),
            Some(wait) => lock.try_lock_for(wait),
        };
        self.judge(start, wait, result)
    }

    /// Checks how waiting since `start` ended.
    pub(super) fn judge(
        &self,
        start: Moment,
        wait: Option<Duration>,
        result: Result<Option<LockGuard>, Error>,
    ) -> Option<LockGuard> {
        let now = clock::now();
        let took = now.since(start);
        scheduler::note(|| format!("waiting ended after {took:?}: {result:?}"));
        // One attempt is made whatever the deadline; withdrawing may take 100 ms more.
        let bound = wait.map(|wait| wait.max(CALL) + Duration::from_millis(130));
        if self.is_prompt() && bound.is_some_and(|bound| took > bound) {
            scheduler::fail(format!("waited {took:?} instead of {wait:?}"));
        }
        match result {
            Ok(Some(guard)) => {
                let fence = scheduler::quietly(|| guard.fence().get());
                let granted = self.server().granted_at(fence);
                let deaf = if self.plan().pace.no_thread > 0 { DEAF } else { Duration::ZERO };
                if self.is_smooth() && granted.is_none_or(|at| now.since(at) > SMOOTH + deaf) {
                    scheduler::fail(format!(
                        "fence {fence} was granted at {granted:?} and arrived at {now:?}"
                    ));
                }
                return Some(guard);
            }
            Ok(None) if wait.is_some_and(|wait| took >= wait) => {}
            Err(Error::Redis { .. }) if self.server().troubled_since(start) => {}
            Err(Error::Thread { .. }) if self.plan().pace.no_thread > 0 => {}
            Ok(None) => scheduler::fail(format!("gave up after {took:?} of {wait:?}")),
            Err(error) => scheduler::fail(format!("waiting ended with {error:?}")),
        }
        None
    }

    /// Is in the section for a while, as long as the lease is good.
    pub(super) fn work(&self, guard: &LockGuard, time: Duration) {
        self.server().enter(&guard.held);
        let slices = 1 + draw(4) as u32;
        for _ in 0..slices {
            scheduler::sleep(time / slices);
            if guard.is_lost() {
                let Faults { slow, instant, .. } = self.plan().faults;
                let fine = self.plan().faults == Faults { slow, instant, ..Faults::default() };
                if fine && self.is_prompt() && !self.server().has_outage() {
                    scheduler::fail("a lease was lost although every call came through in the end".into());
                }
                break;
            }
        }
        self.server().leave(&guard.held);
    }

    /// Releases, and checks what is said about it.
    pub(super) fn unlock(&self, guard: LockGuard) {
        let holding = Arc::clone(&guard.held.holding);
        let fence = holding.fence.get();
        let start = clock::now();
        let result = guard.unlock();
        let took = clock::now().since(start);
        scheduler::note(|| format!("unlock of {fence} ended after {took:?}: {result:?}"));
        if self.is_prompt() && took > Duration::from_secs(1) + CALL + SMOOTH {
            scheduler::fail(format!("unlocking took {took:?}"));
        }
        let displaced = self.server().was_displaced(fence);
        let ran_out = scheduler::quietly(|| clock::now() >= holding.good_until() || holding.was_lost());
        match result {
            Ok(()) if displaced => scheduler::fail(format!("the lost lease {fence} was called released")),
            Ok(()) => {}
            Err(Error::LeaseLost { .. }) if displaced || ran_out => {}
            Err(Error::Redis { .. }) if self.server().troubled_since(start) => {}
            Err(error) => scheduler::fail(format!("unlocking {fence} ended with {error:?}")),
        }
    }

    /// Works and unlocks.
    pub(super) fn use_up(&self, guard: LockGuard, time: Duration) {
        self.work(&guard, time);
        if draw(3) == 0 {
            drop(guard);
        } else {
            self.unlock(guard);
        }
    }

    /// Waits until everything in the background has had its time, then checks that nothing is left.
    fn settle(&self) {
        self.join();
        scheduler::extend(SETTLE * 2);
        let server = self.server();
        scheduler::sleep(SETTLE);
        for room in self.inner.rooms.lock().drain(..) {
            if room.strong_count() > 0 {
                scheduler::fail("a room is left without a handle".into());
            }
        }
        // Without a thread nobody withdraws anything in the background.
        let left = server.left();
        if !left.is_empty() && self.plan().pace.no_thread == 0 {
            scheduler::fail(format!("left on the server: {left:?}"));
        }
        // Whatever happened, a stranger gets the lock.
        let stranger = TicketId::new(&ClientId::cleaned("stranger"), 1, 1000);
        let terms = Terms { claim_ms: 100, idle_ms: 1000, regroup_ms: 1000 };
        let start = clock::now();
        while !server.knock(&stranger, &terms) {
            if left.is_empty() || clock::now().since(start) > self.plan().lease + Duration::from_secs(1) {
                scheduler::fail("a stranger does not get the lock".into());
            }
            scheduler::sleep(Duration::from_millis(50));
        }
    }

    /// Checks that the client's room is empty, once it had the time to be.
    pub(super) fn empty(&self, client: &LockClient) {
        self.join();
        scheduler::extend(SETTLE * 2);
        scheduler::sleep(SETTLE);
        if let Ok((room, _)) = client.room("x") {
            let left = scheduler::quietly(|| room.residue());
            if !left.is_empty() {
                scheduler::fail(format!("left in the room: {left}"));
            }
        }
    }
}

/// Schedules of all scenarios of this run that went well.
static PLAYED: AtomicU64 = AtomicU64::new(0);

/// Runs `schedules` schedules of the scenario `name`. `tune` may change the plan of each.
pub(super) fn explore(name: &str, schedules: u64, tune: fn(&mut Plan, &mut Rng), play: fn(&Stage)) {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    if let Some(seed) = number("FIFO_SIM_SEED") {
        match run(seed, tune, play, true) {
            Ok((summary, counts)) => eprintln!("{name}: seed {seed} went well: {summary:?} {counts:?}"),
            Err(why) => panic!("{name}: seed {seed} failed:\n{why}"),
        }
        return;
    }
    let first = number("FIFO_SIM_FIRST").unwrap_or(0);
    let schedules = number("FIFO_SIM_SCHEDULES").unwrap_or(schedules);
    let start = Instant::now();
    let mut points = 0;
    let mut took = Duration::ZERO;
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in first..first + schedules {
        match run(seed, tune, play, false) {
            Ok((summary, counted)) => {
                points += summary.points;
                took += summary.took;
                for (what, count) in counted {
                    *counts.entry(what).or_default() += count;
                }
            }
            Err(why) => panic!("{why}\n{name}: seed {seed} failed; FIFO_SIM_SEED={seed} repeats it"),
        }
    }
    let counts: Vec<String> = counts.iter().map(|(what, count)| format!("{what} {count}")).collect();
    let all = PLAYED.fetch_add(schedules, Ordering::Relaxed) + schedules;
    let seconds = start.elapsed().as_secs_f64();
    // Past the capture of the test harness: the numbers belong in every log of CI.
    let _ = writeln!(
        std::io::stderr(),
        "sim {name}: {schedules} schedules in {seconds:.1} s ({:.0}/s), {} points and {:.1} s of virtual time each; {}; {all} in all",
        schedules as f64 / seconds,
        points / schedules.max(1),
        took.as_secs_f64() / schedules.max(1) as f64,
        counts.join(", "),
    );
}

/// What a schedule that went well amounts to, and what happened in it.
pub(super) type Played = (Summary, BTreeMap<&'static str, u64>);

/// Runs one schedule.
pub(super) fn run(
    seed: u64,
    tune: fn(&mut Plan, &mut Rng),
    play: fn(&Stage),
    loud: bool,
) -> Result<Played, String> {
    let mut rng = Rng::new(!seed);
    let mut plan = Plan::new(&mut rng);
    tune(&mut plan, &mut rng);
    // Whoever does not take up a grant costs the others its claim window and a poll.
    let smooth = plan.faults.none() && plan.pace.stall == 0 && plan.pace.no_thread == 0;
    let patience = smooth.then_some(CLAIM + plan.poll + SMOOTH);
    let server = Server::new(plan.faults.clone(), CALL, patience);
    let counted = server.clone();
    let pace = plan.pace.clone();
    if loud {
        eprintln!("{plan:?}");
    }
    let summary = scheduler::run(seed, pace, loud, move || {
        let inner = Inner {
            plan,
            server,
            threads: Mutex::default(),
            rooms: Mutex::default(),
            clients: Mutex::default(),
        };
        let stage = Stage { inner: Arc::new(inner) };
        play(&stage);
        stage.settle();
        scheduler::over();
    })?;
    let mut counts = counted.counts();
    counts.insert("grants", counted.grants() as u64);
    Ok((summary, counts))
}
