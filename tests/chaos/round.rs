//! One round: a server, processes that reach it through a proxy each, the faults of a schedule, then calm; and the
//! judgement of what was logged.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use redis::{Connection, cmd};

use crate::checker::{self, Tally, Violation};
use crate::clock::ServerClock;
use crate::history::What;
use crate::log_file::{self, Log, now};
use crate::mutants::Mutant;
use crate::random::Random;
use crate::schedule::{Fault, Step, schedule};
use crate::support::child::Child;
use crate::support::proxy::{self, Proxy, Swallow};
use crate::support::server::{self, Server};
use crate::tap::{Tap, stored};

/// Processes at a time, threads of each, and the locks that they share.
pub(crate) const SLOTS: usize = 4;
const THREADS: u64 = 6;
const LOCKS: u64 = 3;
/// How long they may take to finish once all is calm: more than the checker allows, so that it can say so.
const FINISH: Duration = Duration::from_secs(60);

/// How often each kind of fault really happened.
pub(crate) type Counts = BTreeMap<&'static str, usize>;

/// Runs a round and judges it. The logs are in `dir` afterwards.
pub(crate) fn run(
    seed: u64,
    length: Duration,
    dir: &Path,
    mutant: Option<&Mutant>,
) -> (Counts, Tally, Vec<Violation>) {
    let mut round = Round::start(seed, dir, mutant);
    round.play(&schedule(seed, length, SLOTS));
    // The last faults are over, and what they left behind is for the clients to mend.
    round.run_until(length);
    round.calm();
    let counts = std::mem::take(&mut round.counts);
    drop(round);
    let (tally, violations) = checker::check(&log_file::read(dir));
    (counts, tally, violations)
}

/// What is going on.
struct Round {
    dir: std::path::PathBuf,
    /// Whether faults are told as they begin.
    verbose: bool,
    log: Arc<Log>,
    random: Random,
    started: Instant,
    clock: Option<ServerClock>,
    /// The latest time that the server's clock has shown, as of this machine's.
    highest_us: i64,
    paused_until: Instant,
    slots: Vec<Slot>,
    processes: u32,
    counts: Counts,
    probes: Vec<(Fault, Receiver<Duration>, Duration)>,
    // Dropped in this order: the tap before the server that it listens to.
    tap: Option<Tap>,
    server: Server,
}

/// A place for a process, with its own way to the server.
struct Slot {
    proxy: Proxy,
    child: Child,
    process: u32,
    alive: bool,
    stopped: bool,
}

/// A fault under way, and what is needed to see whether it really happened.
struct Active {
    fault: Fault,
    from: u64,
    process: Option<u32>,
    evidence: Evidence,
}

enum Evidence {
    /// It is over already, and was counted.
    None,
    /// Something was counted up to here before.
    Since(usize),
    /// When each loss happened, by CLOCK_BOOTTIME; 0 if it has not yet.
    Swallowed(proxy::Fault, Arc<AtomicU64>),
    /// What a probe that was sent at once will say that it took, and how long it must take. Another fault may hold it,
    /// so nobody waits for it before all is calm.
    Probe(Receiver<Duration>, Duration),
}

impl Round {
    fn start(seed: u64, dir: &Path, mutant: Option<&Mutant>) -> Self {
        let log = Arc::new(Log::create(&dir.join("scheduler.log")));
        let clock = match ServerClock::make(dir) {
            Ok(clock) => Some(clock),
            Err(why) => {
                super::tell(&format!("chaos: NO CLOCK STEPS, for the clock cannot be made: {why}"));
                None
            }
        };
        // Not synced: SIGKILL ends the server, not the machine, and what was written stays.
        let mut builder = Server::builder().arg("--appendonly").arg("yes").arg("--appendfsync").arg("no");
        for (name, value) in clock.iter().flat_map(ServerClock::env) {
            builder = builder.env(name, value);
        }
        let server = builder.start();
        let tap = Tap::start(server.addr(), Arc::clone(&log));
        log_file::watch_for_stalls(&log, None);
        let mut random = Random::new(seed);
        let mut processes = 0;
        let mut slot = |_| {
            let proxy = Proxy::start(server.addr());
            if let Some(mutant) = mutant {
                proxy.rewrite_requests(mutant.rewrite());
            }
            processes += 1;
            let child = spawn(&proxy, processes, random.next(), dir);
            Slot { proxy, child, process: processes, alive: true, stopped: false }
        };
        let slots = (0..SLOTS).map(&mut slot).collect();
        Self {
            dir: dir.to_owned(),
            verbose: std::env::var_os("CHAOS_VERBOSE").is_some(),
            log,
            random,
            started: Instant::now(),
            clock,
            highest_us: 0,
            paused_until: Instant::now(),
            slots,
            processes,
            counts: Counts::new(),
            probes: Vec::new(),
            tap: Some(tap),
            server,
        }
    }

    /// Begins and ends every fault at its time.
    fn play(&mut self, steps: &[Step]) {
        let mut actions: Vec<(Duration, Option<Fault>, usize)> = Vec::new();
        for (index, step) in steps.iter().enumerate() {
            actions.push((step.at, Some(step.fault), index));
            actions.push((step.at + step.lasts, None, index));
        }
        actions.sort_by_key(|(at, begins, _)| (*at, begins.is_some()));
        let mut active: BTreeMap<usize, Active> = BTreeMap::new();
        for (at, begins, index) in actions {
            self.run_until(at);
            match begins {
                Some(fault) => {
                    if self.verbose {
                        super::tell(&format!("chaos: {at:?}: {fault:?}"));
                    }
                    if let Some(begun) = self.begin(fault, steps[index].lasts) {
                        active.insert(index, begun);
                    }
                }
                None => {
                    if let Some(begun) = active.remove(&index) {
                        self.end(begun);
                    }
                }
            }
        }
    }

    fn run_until(&self, at: Duration) {
        thread::sleep(at.saturating_sub(self.started.elapsed()));
    }

    fn begin(&mut self, fault: Fault, lasts: Duration) -> Option<Active> {
        let mut process = None;
        // Whoever waits here does so before the fault, not in it.
        match fault {
            Fault::FlushAll | Fault::Restart { keep: false } => self.await_highest_clock(),
            // A pause ends by the server's clock: moved back, it would last.
            Fault::Clock { .. } => thread::sleep(self.paused_until.saturating_duration_since(Instant::now())),
            _ => {}
        }
        let from = now();
        let evidence = match fault {
            Fault::Kill { slot } => {
                let slot = &mut self.slots[slot];
                if !slot.alive {
                    return None;
                }
                slot.child.sigkill();
                slot.alive = false;
                process = Some(slot.process);
                self.log.now(What::Killed { process: slot.process });
                self.count(fault);
                Evidence::None
            }
            Fault::Stop { slot } => {
                let slot = &mut self.slots[slot];
                if !slot.alive || slot.stopped {
                    return None;
                }
                slot.child.sigstop();
                slot.stopped = true;
                process = Some(slot.process);
                Evidence::None
            }
            Fault::Cut { slot } => {
                process = self.process(slot);
                if self.proxies(slot).map(Proxy::cut).sum::<usize>() > 0 {
                    self.count(fault);
                }
                Evidence::None
            }
            Fault::Freeze { slot } => {
                process = self.process(slot);
                self.proxies(slot).for_each(Proxy::freeze);
                Evidence::Since(self.proxies(slot).map(|proxy| proxy.counts().frozen).sum())
            }
            Fault::Swallow { slot, how, bell } => {
                process = self.process(Some(slot));
                let (word, when) = (if bell { "BLPOP" } else { "EVALSHA" }, Arc::new(AtomicU64::new(0)));
                let stamp = Arc::clone(&when);
                let lost = self.slots[slot].proxy.swallow_next_reply_to(how, move |request| {
                    let is_it = request.windows(word.len()).any(|part| part == word.as_bytes());
                    if is_it {
                        stamp.store(now(), Ordering::SeqCst);
                    }
                    is_it
                });
                Evidence::Swallowed(lost, when)
            }
            Fault::Delay { slot, by } => {
                process = self.process(slot);
                self.proxies(slot).for_each(|proxy| proxy.delay(by));
                let url = self.slots[slot.unwrap_or(0)].proxy.url();
                // One way would do; the handshake and the PING take several.
                Evidence::Probe(
                    probe(move || server::connect(&url).is_ok_and(|mut link| ping(&mut link))),
                    by,
                )
            }
            Fault::ClientKill => {
                if self.kill_clients() > 0 {
                    self.count(fault);
                }
                Evidence::None
            }
            Fault::ScriptFlush => {
                let before = self.errors("NOSCRIPT");
                self.server.script_flush();
                Evidence::Since(before)
            }
            Fault::Pause { writes } => {
                let mut link = self.server.connection();
                let ms = u64::try_from(lasts.as_millis()).expect("a sane number");
                self.server.client_pause(ms, if writes { "WRITE" } else { "ALL" });
                self.paused_until = Instant::now() + lasts;
                Evidence::Probe(
                    probe(move || cmd("SET").arg("probe").arg(1).exec(&mut link).is_ok()),
                    lasts / 2,
                )
            }
            Fault::FlushAll => {
                let keys = self.keys();
                self.server.flush_all();
                self.log.now(What::DataLost { from, to: now() });
                if keys > 0 {
                    self.count(fault);
                }
                Evidence::None
            }
            Fault::Restart { keep } => {
                let had = self.keys();
                self.restart(keep, from);
                if had > 0 && (self.keys() > 0) == keep {
                    self.count(fault);
                }
                Evidence::None
            }
            Fault::OutOfMemory => {
                let before = self.errors("OOM");
                self.server.fill_memory();
                Evidence::Since(before)
            }
            Fault::Clock { by_us } => {
                self.step_clock(by_us, from);
                return None;
            }
        };
        Some(Active { fault, from, process, evidence })
    }

    fn end(&mut self, active: Active) {
        let Active { fault, mut from, process, evidence } = active;
        let mut to = now();
        match fault {
            Fault::Kill { slot } => {
                self.processes += 1;
                let seed = self.random.next();
                let slot = &mut self.slots[slot];
                slot.child = spawn(&slot.proxy, self.processes, seed, &self.dir);
                (slot.process, slot.alive, slot.stopped) = (self.processes, true, false);
            }
            // It may have been killed meanwhile, with another in its place.
            Fault::Stop { slot } if process == self.process(Some(slot)) && self.slots[slot].alive => {
                self.slots[slot].child.sigcont();
                self.slots[slot].stopped = false;
                self.count(fault);
            }
            Fault::Freeze { slot } => self.proxies(slot).for_each(Proxy::thaw),
            Fault::Delay { slot, .. } => self.proxies(slot).for_each(|proxy| proxy.delay(Duration::ZERO)),
            Fault::OutOfMemory => self.server.set_maxmemory(0),
            Fault::Swallow { slot, how: Swallow::Hold | Swallow::HoldRequest, .. } => {
                self.slots[slot].proxy.release_held()
            }
            _ => {}
        }
        let happened = match evidence {
            Evidence::None => false,
            Evidence::Since(before) => match fault {
                Fault::Freeze { slot } => {
                    self.proxies(slot).map(|proxy| proxy.counts().frozen).sum::<usize>() > before
                }
                Fault::ScriptFlush => self.errors("NOSCRIPT") > before,
                _ => self.errors("OOM") > before,
            },
            Evidence::Swallowed(lost, when) => {
                let at = when.load(Ordering::SeqCst);
                // Whoever asked waits for an answer as long as a call may take.
                (from, to) = if at > 0 { (at, to.max(at + 1_000_000_000)) } else { (from, to) };
                lost.happened()
            }
            Evidence::Probe(probe, least) => {
                self.probes.push((fault, probe, least));
                false
            }
        };
        if happened {
            self.count(fault);
        }
        self.log.now(What::Fault { fault: fault.name().to_owned(), process, from, to: to.max(now()) });
    }

    /// Ends whatever is left of the faults, lets everybody finish, and writes that down.
    fn calm(&mut self) {
        for slot in &self.slots {
            slot.proxy.swallow_nothing();
            slot.proxy.release_held();
        }
        self.log.now(What::Calm);
        for slot in &mut self.slots {
            slot.child.send("stop");
        }
        let start = Instant::now();
        for slot in &mut self.slots {
            while let Some(line) = slot.child.line(FINISH.saturating_sub(start.elapsed())) {
                if line == "done" {
                    break;
                }
            }
        }
        self.log.now(What::End);
        for (fault, probe, least) in std::mem::take(&mut self.probes) {
            if probe.try_recv().is_ok_and(|took| took >= least) {
                self.count(fault);
            }
        }
        for slot in &mut self.slots {
            slot.child.sigkill();
        }
    }

    /// Kills the server and starts it again while nobody can reach it, so that the tap misses nothing it does.
    fn restart(&mut self, keep: bool, from: u64) {
        self.server.kill();
        if let Some(tap) = self.tap.take() {
            tap.finish();
        }
        for slot in &self.slots {
            slot.proxy.refuse(true);
            slot.proxy.cut();
        }
        if !keep {
            fs::remove_dir_all(self.server.dir().join("appendonlydir")).expect("the server's data");
        }
        self.server.start_again();
        self.tap = Some(Tap::start(self.server.addr(), Arc::clone(&self.log)));
        if keep {
            self.write_down_state();
            self.log.now(What::Fault { fault: "restart".to_owned(), process: None, from, to: now() });
        } else {
            self.log.now(What::Flushed);
            self.log.now(What::DataLost { from, to: now() });
        }
        for slot in &self.slots {
            slot.proxy.refuse(false);
        }
        self.paused_until = Instant::now();
    }

    /// What the server knows after a restart; its last steps before may have gone by unseen.
    fn write_down_state(&self) {
        let mut link = self.server.connection();
        for n in 0..LOCKS {
            let lock = format!("chaos-{n}");
            let key = |kind: &str| format!("fifo:{{{lock}}}:{kind}");
            let record: Option<String> = cmd("GET").arg(key("lock")).query(&mut link).expect("a record");
            let queue: Vec<(String, u64)> = cmd("ZRANGE")
                .arg(key("queue"))
                .arg(0)
                .arg(-1)
                .arg("WITHSCORES")
                .query(&mut link)
                .expect("a queue");
            self.log.now(What::Found { lock, record: record.as_deref().map(stored), queue });
        }
    }

    fn step_clock(&mut self, by_us: i64, from: u64) {
        let Some(clock) = &self.clock else { return };
        self.highest_us = self.highest_us.max(unix_us() + clock.offset_us());
        clock.step(by_us);
        let mut link = self.server.connection();
        let (seconds, micros): (i64, i64) = cmd("TIME").query(&mut link).expect("the server's time");
        let shown = seconds * 1_000_000 + micros - unix_us();
        self.log.now(What::ClockMoved { by_us, from, to: now() });
        // What it shows is a little old.
        if (shown - clock.offset_us()).abs() < 100_000 {
            self.count(Fault::Clock { by_us });
        }
    }

    /// Waits until the server's clock shows what it has shown before. Whoever loses all data *and* has the clock go
    /// back loses the order of fences: nothing on the server could know better, so that is not asked of it.
    fn await_highest_clock(&self) {
        let offset = self.clock.as_ref().map_or(0, ServerClock::offset_us);
        let behind = u64::try_from(self.highest_us + 100_000 - unix_us() - offset).unwrap_or(0);
        if self.highest_us > 0 {
            thread::sleep(Duration::from_micros(behind));
        }
    }

    /// Has the server close all connections but the tap's and its own; says how many.
    fn kill_clients(&self) -> usize {
        let mut link = self.server.connection();
        let own: u64 = cmd("CLIENT").arg("ID").query(&mut link).expect("an id");
        let list: String = cmd("CLIENT").arg("LIST").query(&mut link).expect("a list");
        let field = |line: &str, name: &str| {
            line.split(' ').find_map(|field| field.strip_prefix(name).map(str::to_owned)).unwrap_or_default()
        };
        let others = list.lines().filter(|line| !field(line, "flags=").contains('O'));
        let others = others.map(|line| field(line, "id=")).filter(|id| *id != own.to_string());
        let mut kill = |id| cmd("CLIENT").arg("KILL").arg("ID").arg(id).query::<usize>(&mut link);
        others.filter_map(|id| kill(id).ok()).sum()
    }

    /// How often the server has answered with this error.
    fn errors(&self, code: &str) -> usize {
        let mut link = self.server.connection();
        let info: String = cmd("INFO").arg("errorstats").query(&mut link).expect("counts of errors");
        let count = |line: &str| {
            line.strip_prefix("errorstat_")?.strip_prefix(code)?.strip_prefix(":count=")?.parse().ok()
        };
        info.lines().find_map(count).unwrap_or(0)
    }

    fn keys(&self) -> usize {
        cmd("DBSIZE").query(&mut self.server.connection()).expect("a number of keys")
    }

    fn proxies(&self, slot: Option<usize>) -> impl Iterator<Item = &Proxy> {
        let slots = self.slots.iter().enumerate();
        slots.filter(move |(index, _)| slot.is_none_or(|slot| slot == *index)).map(|(_, slot)| &slot.proxy)
    }

    fn process(&self, slot: Option<usize>) -> Option<u32> {
        slot.map(|slot| self.slots[slot].process)
    }

    fn count(&mut self, fault: Fault) {
        *self.counts.entry(fault.name()).or_default() += 1;
    }
}

fn spawn(proxy: &Proxy, process: u32, seed: u64, dir: &Path) -> Child {
    let dir = dir.to_str().expect("a path as text");
    let (process, seed) = (process.to_string(), seed.to_string());
    let (locks, threads) = (LOCKS.to_string(), THREADS.to_string());
    Child::spawn("chaos", &[&proxy.url(), &process, &seed, dir, &locks, &threads])
}

fn ping(link: &mut Connection) -> bool {
    cmd("PING").exec(link).is_ok()
}

/// Does something, and says how long that took unless it failed.
fn probe(body: impl FnOnce() -> bool + Send + 'static) -> Receiver<Duration> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let start = Instant::now();
        if body() {
            // Nobody may be waiting for it any more.
            let _ = sender.send(start.elapsed());
        }
    });
    receiver
}

fn unix_us() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock after 1970");
    i64::try_from(since.as_micros()).expect("a year before 292,000")
}
