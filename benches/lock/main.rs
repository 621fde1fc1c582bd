//! `cargo bench`: what the lock costs, as ratios to honest floors measured interleaved in the same run.
//!
//! Starts its own redis-server (`REDIS_SERVER_BIN` picks another). Floors are raw commands on connections of the same
//! kind, with no lease, no fence, no renewal:
//!
//! * (a) `SET NX PX` and a compare-and-delete script: two round trips;
//! * (b) a bare FIFO hand-over: a script that queues or takes, a script that pops the next and rings its bell, BLPOP, a
//!   connection per waiter;
//! * (c) minimal fenced: `INCR` + `SET NX PX` and `GET` + `DEL` as two scripts, for the server's CPU.
//!
//! Each figure is the median of five rounds, with the least and the most behind it. Machines are noisy: quote ratios.

mod support;

use std::env;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use redis::{Commands, Connection};
use redis_fifo_lock::LockClient;
use support::server::Server;

/// Rounds per figure.
const ROUNDS: usize = 5;
/// How long contenders run in one round.
const ROUND: Duration = Duration::from_millis(1500);
/// Cycles of one uncontended round.
const CYCLES: u32 = 5000;
/// Marks a child process: what it is to do, on which server.
const CHILD: &str = "FIFO_BENCH_CHILD";

const COMPARE_AND_DELETE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";
const QUEUE_OR_TAKE: &str = "if redis.call('SET', KEYS[1], '1', 'NX') then return 1 end redis.call('RPUSH', KEYS[2], ARGV[1]) return 0";
const POP_AND_RING: &str = "local n = redis.call('LPOP', KEYS[2]) if n then redis.call('LPUSH', n, '1') else redis.call('DEL', KEYS[1]) end return 0";
const FENCED_TAKE: &str = "local f = redis.call('INCR', KEYS[2]) if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return f end return 0";

fn main() {
    if let Ok(job) = env::var(CHILD) {
        return child(&job);
    }
    let server = Server::start();
    println!("{} cores, {}", thread::available_parallelism().map_or(0, usize::from), version(&server));
    println!("median of {ROUNDS} interleaved rounds (least to most)\n");
    uncontended(&server);
    for threads in [8, 64] {
        hand_over_threads(&server, threads);
    }
    hand_over_processes(&server, 8);
    waiting(&server, 1000);
}

fn version(server: &Server) -> String {
    let info: String = redis::cmd("INFO").arg("server").query(&mut server.connection()).expect("INFO");
    let line =
        |name: &str| info.lines().find_map(|line| line.strip_prefix(name).map(str::trim).map(str::to_owned));
    format!("Redis {}", line("redis_version:").unwrap_or_default())
}

fn connect(url: &str) -> Connection {
    let info: redis::ConnectionInfo = redis::IntoConnectionInfo::into_connection_info(url).expect("a URL");
    let tcp = info.tcp_settings().clone().set_nodelay(true);
    redis::Client::open(info.set_tcp_settings(tcp))
        .and_then(|client| client.get_connection())
        .expect("a connection")
}

/// Loads a script and gives its digest.
fn load(connection: &mut Connection, script: &str) -> String {
    redis::cmd("SCRIPT").arg("LOAD").arg(script).query(connection).expect("a script")
}

/// Runs a script by its digest.
fn run(connection: &mut Connection, digest: &str, keys: &[&str], args: &[&str]) -> u64 {
    redis::cmd("EVALSHA")
        .arg(digest)
        .arg(keys.len())
        .arg(keys)
        .arg(args)
        .query(connection)
        .expect("an answer")
}

/// Figures of one thing over all rounds.
#[derive(Default)]
struct Figures(Vec<f64>);

impl Figures {
    fn show(&mut self) -> String {
        self.0.sort_by(f64::total_cmp);
        let (least, most) = (self.0[0], self.0[self.0.len() - 1]);
        format!("{:9.2} ({least:.2} to {most:.2})", self.0[self.0.len() / 2])
    }
}

/// Microseconds of CPU that the server has used.
fn server_cpu_us(connection: &mut Connection) -> f64 {
    let info: String = redis::cmd("INFO").arg("cpu").query(connection).expect("INFO");
    let of = |name: &str| {
        info.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok()).unwrap_or_default()
    };
    (of("used_cpu_user:") + of("used_cpu_sys:")) * 1e6
}

fn uncontended(server: &Server) {
    let lock =
        LockClient::connect(&server.url()).and_then(|client| client.fifo_lock("bench")).expect("a lock");
    let mut raw = connect(&server.url());
    let mut watch = server.connection();
    let (delete, take) = (load(&mut raw, COMPARE_AND_DELETE), load(&mut raw, FENCED_TAKE));
    let cycle = || drop(lock.lock().expect("the lock"));
    let mut floor = |n: u32| {
        let token = n.to_string();
        let _: redis::Value = redis::cmd("SET")
            .arg("a")
            .arg(&token)
            .arg("NX")
            .arg("PX")
            .arg(30_000)
            .query(&mut raw)
            .expect("set");
        run(&mut raw, &delete, &["a"], &[&token]);
    };
    (0..1000).for_each(|_| cycle());
    (0..1000).for_each(&mut floor);
    let mut fenced_connection = connect(&server.url());
    let mut fenced = |n: u32| {
        let token = n.to_string();
        run(&mut fenced_connection, &take, &["c", "c:fence"], &[&token, "30000"]);
        run(&mut fenced_connection, &delete, &["c"], &[&token]);
    };
    let (mut ours, mut theirs, mut ratio) = (Figures::default(), Figures::default(), Figures::default());
    let (mut cpu, mut cpu_fenced, mut cpu_ratio) =
        (Figures::default(), Figures::default(), Figures::default());
    for _ in 0..ROUNDS {
        let mut timed = |cycle: &mut dyn FnMut(u32)| {
            let before = server_cpu_us(&mut watch);
            let start = Instant::now();
            (0..CYCLES).for_each(cycle);
            let took = start.elapsed().as_secs_f64() * 1e6 / f64::from(CYCLES);
            (took, (server_cpu_us(&mut watch) - before) / f64::from(CYCLES))
        };
        let (us, server_us) = timed(&mut |_| cycle());
        let (floor_us, _) = timed(&mut floor);
        let (_, fenced_us) = timed(&mut fenced);
        ours.0.push(us);
        theirs.0.push(floor_us);
        ratio.0.push(us / floor_us);
        cpu.0.push(server_us);
        cpu_fenced.0.push(fenced_us);
        cpu_ratio.0.push(server_us / fenced_us);
    }
    println!("lock + unlock, nobody else, renewal armed");
    println!("  us a cycle             {}", ours.show());
    println!("  floor (a)              {}", theirs.show());
    println!("  ratio to floor (a)     {}", ratio.show());
    println!("  server us a cycle      {}", cpu.show());
    println!("  floor (c)              {}", cpu_fenced.show());
    println!("  ratio to floor (c)     {}\n", cpu_ratio.show());
}

/// Counts what `contenders` threads get done in a round.
fn contend(contenders: usize, work: impl Fn(usize, &AtomicBool, &AtomicU64) + Sync) -> f64 {
    let (stop, count) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for id in 0..contenders {
            let (work, stop, count) = (&work, &stop, &count);
            scope.spawn(move || work(id, stop, count));
        }
        thread::sleep(Duration::from_millis(300));
        let (before, start) = (count.load(Ordering::Relaxed), Instant::now());
        thread::sleep(ROUND);
        let rate = (count.load(Ordering::Relaxed) - before) as f64 / start.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        rate
    })
}

/// Floor (b) for one contender: its own connection, its own bell.
fn bare_fifo(url: &str, id: &str, stop: &AtomicBool, count: &AtomicU64) {
    let mut connection = connect(url);
    let (queue, ring) = (load(&mut connection, QUEUE_OR_TAKE), load(&mut connection, POP_AND_RING));
    let bell = format!("b:bell:{id}");
    while !stop.load(Ordering::Relaxed) {
        if run(&mut connection, &queue, &["b:lock", "b:queue"], &[&bell]) == 0 {
            let rung: Option<(String, String)> = connection.blpop(&bell, 30.0).expect("a ring");
            assert!(rung.is_some(), "hand-overs do not stop");
        }
        count.fetch_add(1, Ordering::Relaxed);
        run(&mut connection, &ring, &["b:lock", "b:queue"], &[]);
    }
}

/// Ours for one contender. Order is checked on the way: fences ascend.
fn fifo(lock: &redis_fifo_lock::FifoLock, newest: &AtomicU64, stop: &AtomicBool, count: &AtomicU64) {
    while !stop.load(Ordering::Relaxed) {
        let guard = lock.lock().expect("the lock");
        let fence = guard.fence().get();
        assert!(newest.swap(fence, Ordering::Relaxed) < fence, "out of order");
        count.fetch_add(1, Ordering::Relaxed);
        drop(guard);
    }
}

fn show_hand_over(what: &str, ours: &mut Figures, floor: &mut Figures, cpu: &mut Figures) {
    let mut ratio = Figures(ours.0.iter().zip(&floor.0).map(|(ours, floor)| ours / floor).collect());
    println!("hand-over, empty section, {what}");
    println!("  a second               {}", ours.show());
    println!("  floor (b)              {}", floor.show());
    println!("  ratio to floor (b)     {}", ratio.show());
    println!("  server us a hand-over  {}\n", cpu.show());
}

fn hand_over_threads(server: &Server, threads: usize) {
    let url = server.url();
    let lock = LockClient::connect(&url).and_then(|client| client.fifo_lock("bench-t")).expect("a lock");
    let mut watch = server.connection();
    let (mut ours, mut floor, mut cpu) = (Figures::default(), Figures::default(), Figures::default());
    for _ in 0..ROUNDS {
        let newest = AtomicU64::new(0);
        let (before, start) = (server_cpu_us(&mut watch), Instant::now());
        let rate = contend(threads, |_, stop, count| fifo(&lock, &newest, stop, count));
        let seconds = start.elapsed().as_secs_f64();
        cpu.0.push((server_cpu_us(&mut watch) - before) / (rate * seconds));
        ours.0.push(rate);
        floor.0.push(contend(threads, |id, stop, count| bare_fifo(&url, &id.to_string(), stop, count)));
    }
    show_hand_over(&format!("{threads} threads of one process"), &mut ours, &mut floor, &mut cpu);
}

fn hand_over_processes(server: &Server, processes: usize) {
    let mut watch = server.connection();
    let (mut ours, mut floor, mut cpu) = (Figures::default(), Figures::default(), Figures::default());
    for _ in 0..ROUNDS {
        let (before, start) = (server_cpu_us(&mut watch), Instant::now());
        let rate = spawn("ours", &server.url(), processes);
        let seconds = start.elapsed().as_secs_f64();
        cpu.0.push((server_cpu_us(&mut watch) - before) / (rate * seconds));
        ours.0.push(rate);
        floor.0.push(spawn("bare", &server.url(), processes));
    }
    show_hand_over(&format!("{processes} processes of one thread"), &mut ours, &mut floor, &mut cpu);
}

/// Runs this program again as contenders, and adds up what they got done a second.
fn spawn(job: &str, url: &str, processes: usize) -> f64 {
    let me = env::current_exe().expect("this program");
    let children: Vec<_> = (0..processes)
        .map(|id| {
            let mut command = Command::new(&me);
            command.env(CHILD, format!("{job} {id} {url}")).stdout(Stdio::piped());
            command.spawn().expect("a process")
        })
        .collect();
    let rate = |child: std::process::Child| {
        let output = child.wait_with_output().expect("its output");
        String::from_utf8_lossy(&output.stdout).trim().parse::<f64>().expect("a rate")
    };
    children.into_iter().map(rate).sum()
}

fn child(job: &str) {
    let mut words = job.splitn(3, ' ');
    let (job, id, url) = (words.next(), words.next().expect("an id"), words.next().expect("a URL"));
    let newest = AtomicU64::new(0);
    let rate = match job {
        Some("ours") => {
            let lock =
                LockClient::connect(url).and_then(|client| client.fifo_lock("bench-p")).expect("a lock");
            contend(1, |_, stop, count| fifo(&lock, &newest, stop, count))
        }
        _ => contend(1, |_, stop, count| bare_fifo(url, id, stop, count)),
    };
    println!("{rate}");
}

/// What many waiting threads cost: connections, commands, CPU.
fn waiting(server: &Server, threads: usize) {
    let client = LockClient::connect(&server.url()).expect("a client");
    let lock = client.fifo_lock("bench-w").expect("a lock");
    let before = server.connected_clients();
    let held = lock.lock().expect("the lock");
    held.detach();
    let mut watch = server.connection();
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| drop(lock.lock().expect("its turn")));
        }
        while lock.status().expect("a status").waiting < threads as u64 {
            thread::sleep(Duration::from_millis(20));
        }
        thread::sleep(Duration::from_secs(1));
        let connections = server.connected_clients() - before - 1;
        let (commands, cpu, start) = (processed(&mut watch), process_cpu(), Instant::now());
        thread::sleep(Duration::from_secs(20));
        let seconds = start.elapsed().as_secs_f64();
        // One command is this INFO.
        let commands = (processed(&mut watch) - commands - 1.0) / seconds;
        println!("{threads} threads of one process wait for one lock, 20 s");
        println!("  connections            {connections}");
        println!("  commands a second      {commands:.2}");
        println!("  of a core              {:.2} %", (process_cpu() - cpu) / seconds * 100.0);
        let start = Instant::now();
        drop(held);
        thread::scope(|_| {});
        while lock.status().expect("a status").waiting > 0 {
            thread::sleep(Duration::from_millis(5));
        }
        println!("  all through in         {:.0} ms\n", start.elapsed().as_secs_f64() * 1000.0);
    });
}

/// Commands that the server has run.
fn processed(connection: &mut Connection) -> f64 {
    let info: String = redis::cmd("INFO").arg("stats").query(connection).expect("INFO");
    info.lines()
        .find_map(|line| line.strip_prefix("total_commands_processed:")?.trim().parse().ok())
        .unwrap_or_default()
}

/// Seconds of CPU that this process has used, by Linux's /proc; 0 elsewhere.
fn process_cpu() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok()).unwrap_or_default();
    // utime and stime are the 14th and 15th fields, in ticks of 10 ms.
    (ticks(11) + ticks(12)) / 100.0
}
