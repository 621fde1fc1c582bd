//! Fences as numbers, keys and commands as an administrator sees them, errors as a caller does, and secrets as nobody
//! should.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as _;
use std::fmt::Debug;
use std::net::{Ipv4Addr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use redis::{Commands, cmd};
use redis_fifo_lock::{Error, FifoLock, LockClient};

use crate::support::log_capture::LogCapture;
use crate::support::proxy::{Proxy, Swallow};
use crate::support::server::{Builder, Server};
use crate::support::{eventually, port};

const LONG: Duration = Duration::from_secs(20);
/// What a call may take beyond its deadline on a machine that others load.
const SLACK: Duration = Duration::from_millis(500);
const SECRET: &str = "S3CRETpw";

fn client(url: &str) -> LockClient {
    LockClient::connect(url).expect("a client")
}

fn lock(url: &str) -> FifoLock {
    client(url).fifo_lock("x").expect("a lock")
}

fn record(server: &Server) -> Vec<String> {
    let record: String = server.connection().get("fifo:{x}:lock").expect("a record");
    record.split(' ').map(str::to_owned).collect()
}

/// A32: a fence is the same digits in the reply, in the record, in a ring and in the lost list, up to where doubles
/// end to be exact; and the next is one more, through renewals, release and hand-over.
#[test]
fn fences_are_exact_up_to_the_end_of_exact_doubles() {
    const EXACT: u64 = 1 << 53;
    // Beyond 14 digits, where Lua's own conversion rounds; beyond 2^52; and near the end.
    for newest in [99_999_999_999_999, (1 << 52) + 1, EXACT - 40] {
        let server = Server::start();
        let preset = format!("- {newest} 0 - {newest} 1 - 0");
        server.connection().set::<_, _, ()>("fifo:{x}:lock", preset).expect("SET");
        let (a, b) = (client(&server.url()), client(&server.url()));
        let a = a.builder("x").lease(Duration::from_millis(800)).build().expect("a lock");
        let b = b.builder("x").lease(Duration::from_millis(800)).build().expect("a lock");
        let first = a.lock().expect("the lock");
        first.detach();
        // By the clock rule the first fence may be the server's time, which has sixteen digits until 2286.
        assert!(first.fence().get() > newest);
        assert!(newest < 1 << 52 || first.fence().get() == newest + 1, "{} after {newest}", first.fence());
        thread::scope(|scope| {
            let mut monitor = server.monitor();
            let waiter = scope.spawn(|| b.lock().expect("its turn"));
            // Three beats.
            thread::sleep(Duration::from_millis(700));
            assert_eq!(record(&server)[1], first.fence().to_string());
            let fence = first.fence().get();
            first.unlock().expect("released");
            let second = waiter.join().expect("no panic");
            assert!(second.fence().get() > fence);
            assert!(
                newest < 1 << 52 || second.fence().get() == fence + 1,
                "{} after {fence}",
                second.fence()
            );
            assert_eq!(record(&server)[1], second.fence().to_string());
            let ring = format!(" {}\"", second.fence());
            let lines = monitor.lines();
            assert!(lines.iter().any(|line| line.contains("\"LPUSH\"") && line.ends_with(&ring)), "{ring}");
            // Taken away: the lost list knows it by the same digits.
            let fence = second.fence();
            assert!(a.evict(fence).expect("an answer"));
            let lost: Vec<String> = server.connection().zrange("fifo:{x}:lost", 0, -1).expect("the list");
            assert_eq!(lost, [fence.to_string()]);
            assert!(matches!(second.unlock(), Err(Error::LeaseLost { .. })));
            let digits = |text: &str| text.bytes().any(|byte| byte.is_ascii_digit());
            let rounded = |word: &str| digits(word) && (word.contains("e+") || word.contains(".0"));
            let numbers = lines.iter().filter(|line| line.contains("lua]"));
            let mut words = numbers.flat_map(|line| line.split([' ', '"']).skip(3));
            assert_eq!(words.find(|word| rounded(word)), None);
        });
    }
}

/// A32: nothing makes fences start again: no lost key, no lost data, no restart, no other client.
#[test]
fn fences_and_positions_ascend_over_every_loss_of_data() {
    let server = Server::start();
    let (mut fence, mut position) = (0, 0);
    let losses: [(&str, &dyn Fn()); 5] = [
        ("nothing", &|| {}),
        ("DEL", &|| cmd("DEL").arg("fifo:{x}:lock").exec(&mut server.connection()).expect("DEL")),
        ("FLUSHALL", &|| server.flush_all()),
        ("expiry", &|| {
            cmd("PEXPIRE").arg("fifo:{x}:lock").arg(1).exec(&mut server.connection()).expect("PEXPIRE");
            eventually(LONG, "it expires", || server.keys("*").is_empty());
        }),
        ("restart", &|| {
            server.kill();
            server.start_again();
        }),
    ];
    for (name, lose) in losses.iter().chain(&losses) {
        lose();
        let guard = lock(&server.url()).lock().expect("the lock");
        assert!(guard.fence().get() > fence, "{name}: {} after {fence}", guard.fence());
        assert!(guard.position() > position, "{name}: {} after {position}", guard.position());
        (fence, position) = (guard.fence().get(), guard.position());
    }
}

/// What a user of the lock must be allowed to run, and what for; on the keys `fifo:*`, or `fifo:{NAME}:*` for one lock.
const NEEDED: [(&str, &str); 19] = [
    ("evalsha", "every call"),
    ("eval", "a call whose script the server does not know yet, or any more"),
    ("blpop", "listening for one's turn; without it waiters poll every 200 ms"),
    ("time", "the server's clock"),
    ("get", "the record"),
    ("set", "the record"),
    ("persist", "the first write of a call that must work without memory"),
    ("pexpire", "rings and the list of lost leases end by themselves"),
    ("zcard", "the queue's length, and the lost list's"),
    ("zadd", "queueing, and remembering a lost lease"),
    ("zscore", "whether a ticket is queued, or a lease was lost"),
    ("zrank", "how many stand before a ticket"),
    ("zrange", "who is next, when some of them may be dead"),
    ("zrem", "withdrawing a ticket"),
    ("zpopmin", "granting the first"),
    ("lpush", "ringing"),
    ("ltrim", "silencing a bell"),
    ("lindex", "whether a ring was heard"),
    ("llen", "whether a bell can be rung"),
];

/// What saves round trips or warns, and is missed by nobody else.
const USEFUL: [(&str, &str); 2] = [
    ("script|load", "loads the scripts ahead"),
    ("info", "warns of an eviction policy that can take a held lock"),
];

/// Does everything that the library can do to the lock `x`, through two clients.
fn everything(url: &str) {
    let (a_client, b_client) = (client(url), client(url));
    let build = |client: &LockClient, lease: u64| {
        let lock = client.builder("x").lease(Duration::from_millis(lease)).claim(Duration::from_millis(50));
        lock.build().expect("a lock")
    };
    let (a, b) = (build(&a_client, 400), build(&b_client, 400));
    // Renewed, looked at, tried in vain, waited for in vain, handed over by a ring.
    let held = a.lock().expect("the lock");
    held.detach();
    assert!(b.try_lock().expect("an answer").is_none());
    assert!(b.try_lock_for(Duration::from_millis(5)).expect("an answer").is_none());
    thread::scope(|scope| {
        let waiter = scope.spawn(|| b.lock().expect("its turn"));
        eventually(LONG, "it queues", || a.status().expect("a status").waiting == 1);
        thread::sleep(Duration::from_millis(250));
        held.unlock().expect("released");
        waiter.join().expect("no panic").unlock().expect("released");
    });
    // Granted to a ticket that nobody waits for, passed over, and back again.
    let held = a.lock().expect("the lock");
    held.detach();
    let (first, second) = (b.enqueue().expect("a ticket"), a.enqueue().expect("a ticket"));
    held.unlock().expect("released");
    second.wait().expect("its turn").unlock().expect("released");
    first.wait().expect("its turn").unlock().expect("released");
    // Taken away while somebody waits.
    let stuck = a.lock().expect("the lock");
    stuck.detach();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| b.lock().expect("its turn"));
        eventually(LONG, "it queues", || a.status().expect("a status").waiting == 1);
        assert!(a.evict(stuck.fence()).expect("an answer"));
        waiter.join().expect("no panic").unlock().expect("released");
    });
    assert!(matches!(stuck.unlock(), Err(Error::LeaseLost { .. })));
}

/// [`everything`], and what only crashes bring about: a grant that its client never heard of is passed over.
fn everything_and_crashes(server: &Server, url: &str) {
    everything(url);
    let proxy = Proxy::start(server.addr());
    let dead_url = url.replace(&server.addr().to_string(), &proxy.addr().to_string());
    let build = |url: &str| {
        let client = LockClient::options().url(url).call_timeout(Duration::from_millis(200)).build();
        let lock = client.expect("a client").builder("x").claim(Duration::from_millis(50));
        lock.poll(Duration::from_millis(100)).build().expect("a lock")
    };
    let (dead, live) = (build(&dead_url), build(url));
    let held = live.lock().expect("the lock");
    held.detach();
    let forgotten = dead.enqueue().expect("a ticket");
    proxy.freeze();
    let next = live.enqueue().expect("a ticket");
    held.unlock().expect("released, to the dead");
    next.wait().expect("its turn, after the claim window").unlock().expect("released");
    // It comes back to life, and is told that nobody waits for it.
    proxy.thaw();
    drop(forgotten);
    eventually(LONG, "nobody is left", || {
        let status = live.status().expect("a status");
        !status.held && status.waiting == 0
    });
}

/// The words of a line of MONITOR behind the client's address; none of ours has a quote or a blank inside.
fn words(line: &str) -> Vec<String> {
    let (_, command) = line.split_once("] ").expect("a line of MONITOR");
    command.split("\" \"").map(|word| word.trim_matches('"').to_owned()).collect()
}

/// A33: no key outside the lock's own prefix and hash tag, and none that is not declared but the bell of whoever is
/// granted or silenced: only the script can know whose that is.
#[test]
fn every_key_in_a_script_is_declared_or_the_bell_of_another_client() {
    let server = Server::start();
    let mut monitor = server.monitor();
    everything_and_crashes(&server, &server.url());
    let (mut declared, mut computed) = (Vec::<String>::new(), 0);
    let mut inside = BTreeSet::new();
    for line in monitor.lines() {
        let words = words(&line);
        match words[0].to_uppercase().as_str() {
            "EVALSHA" | "EVAL" => {
                let count: usize = words[2].parse().expect("a number of keys");
                declared = words[3..3 + count].to_vec();
                assert!((2..=4).contains(&count));
                assert!(declared.iter().all(|key| key.starts_with("fifo:{x}:")), "{declared:?}");
                // Values are never passed as keys, nor keys as values.
                assert!(!words[3 + count..].iter().any(|value| value.starts_with("fifo:")), "{line}");
            }
            "TIME" | "SCRIPT" => {}
            command if line.contains(" lua] ") => {
                inside.insert(command.to_owned());
                let key = &words[1];
                if !declared.contains(key) {
                    computed += 1;
                    assert!(key.starts_with("fifo:{x}:bell:"), "{line}");
                }
            }
            "BLPOP" => assert!(words[1].starts_with("fifo:{x}:bell:"), "{line}"),
            _ => assert!(!line.contains("fifo:"), "{line}"),
        }
    }
    assert!(computed > 0 && inside.len() > 10, "{computed} computed, {inside:?}");
}

/// A33: all keys of a lock live in one slot, so a server of a cluster runs everything.
#[test]
fn a_cluster_enabled_server_runs_everything() {
    let server = Server::builder().arg("--cluster-enabled").arg("yes").start();
    let mut connection = server.connection();
    let slots: Vec<String> = (0..16384).map(|slot| slot.to_string()).collect();
    cmd("CLUSTER").arg("ADDSLOTS").arg(slots).exec(&mut connection).expect("CLUSTER ADDSLOTS");
    eventually(LONG, "the cluster is up", || {
        let info: String = cmd("CLUSTER").arg("INFO").query(&mut connection).expect("CLUSTER INFO");
        info.contains("cluster_state:ok")
    });
    let mut monitor = server.monitor();
    everything_and_crashes(&server, &server.url());
    let slots: BTreeSet<u64> = monitor
        .lines()
        .iter()
        .flat_map(|line| words(line))
        .filter(|word| word.starts_with("fifo:"))
        .collect::<BTreeSet<_>>()
        .into_iter()
        .map(|key| cmd("CLUSTER").arg("KEYSLOT").arg(key).query(&mut connection).expect("CLUSTER KEYSLOT"))
        .collect();
    assert_eq!(slots.len(), 1, "{slots:?}");
    // A name with braces of its own cannot leave its tag either.
    for name in ["a}b", "{a}b", "a{b}c", "}{"] {
        let lock = client(&server.url()).fifo_lock(name).expect("a lock");
        let held = lock.lock().expect("the lock");
        held.detach();
        let ticket = lock.enqueue().expect("a ticket");
        held.unlock().expect("released");
        drop(ticket.wait().expect("its turn"));
    }
}

/// A user who may run what the tables say, on the keys of the lock `x` only.
fn add_user(server: &Server, commands: &[(&str, &str)]) -> String {
    let mut rules = cmd("ACL");
    rules.arg("SETUSER").arg("worker").arg("reset").arg("on").arg(format!(">{SECRET}"));
    // On 6.2 a user without channels is the default, too.
    rules.arg("resetchannels").arg("~fifo:{x}:*");
    for (command, _) in commands {
        rules.arg(format!("+{command}"));
    }
    rules.exec(&mut server.connection()).expect("ACL SETUSER");
    format!("redis://worker:{SECRET}@{}/", server.addr())
}

/// What was denied to the user, as (reason, object); the name that a connection gives itself is not counted, for the
/// client library tries that by itself and does not mind.
fn denied(server: &Server) -> BTreeSet<(String, String)> {
    type Entries = Vec<BTreeMap<String, redis::Value>>;
    let entries: Entries = cmd("ACL").arg("LOG").query(&mut server.connection()).expect("ACL LOG");
    let text = |entry: &BTreeMap<String, redis::Value>, field: &str| -> String {
        redis::from_redis_value(entry[field].clone()).expect("text")
    };
    let denied = entries.iter().map(|entry| (text(entry, "reason"), text(entry, "object")));
    denied.filter(|(_, object)| !object.starts_with("client")).collect()
}

/// A33: the tables above are what is needed, with nothing denied.
#[test]
fn the_documented_acl_is_enough_for_everything() {
    let server = Server::start();
    let url = add_user(&server, &[&NEEDED[..], &USEFUL[..]].concat());
    everything_and_crashes(&server, &url);
    assert_eq!(denied(&server), BTreeSet::new());
    // A lock outside the pattern is not for this user, and that has a name.
    let other = client(&url).fifo_lock("y").expect("a lock").lock();
    assert!(matches!(&other, Err(error @ Error::Redis { .. }) if !error.is_retryable()), "{other:?}");
}

/// A33: without what is merely useful everything works as well.
#[test]
fn without_script_load_and_info_everything_works_all_the_same() {
    let server = Server::start();
    let url = add_user(&server, &NEEDED);
    everything_and_crashes(&server, &url);
    let denied: BTreeSet<_> = denied(&server).into_iter().map(|(_, object)| object).collect();
    let useful = ["info", "script|load", "script"].map(str::to_owned);
    assert!(denied.is_subset(&BTreeSet::from(useful)), "{denied:?}");
}

/// A33: and nothing in the table is superfluous.
#[test]
fn the_documented_acl_names_no_command_that_is_never_run() {
    let server = Server::start();
    server.reset_stats();
    everything_and_crashes(&server, &server.url());
    server.script_flush();
    drop(lock(&server.url()).lock().expect("the lock"));
    // EVAL is for scripts that were flushed under an open connection.
    let lock = lock(&server.url());
    drop(lock.lock().expect("the lock"));
    server.script_flush();
    drop(lock.lock().expect("the lock"));
    for (command, what_for) in NEEDED {
        assert!(server.command_calls(command) > 0, "{command}: {what_for}");
    }
    let info: String = cmd("INFO").arg("commandstats").query(&mut server.connection()).expect("INFO");
    let run = info.lines().filter_map(|line| Some(line.strip_prefix("cmdstat_")?.split_once(':')?.0));
    let own = ["info", "config", "script", "client", "auth", "hello", "select"];
    let known: Vec<&str> = NEEDED.iter().map(|(command, _)| *command).chain(own).collect();
    let unknown: Vec<&str> = run.filter(|name| !known.contains(&name.split('|').next().unwrap())).collect();
    assert_eq!(unknown, [""; 0]);
}

/// How a call that failed looks to its caller: the variant, the server's code, and whether trying again makes sense.
/// Redis 6.2 wraps what a command in a script answers, so its code is among the words then.
fn looks(error: &Error) -> (String, Option<String>, bool) {
    let variant = format!("{error:?}");
    let variant = variant.split([' ', '(', '{']).next().unwrap_or_default().to_owned();
    let code = match error {
        Error::Redis { source, .. } => {
            assert!(error.source().is_some(), "the cause is there to be asked");
            let text = source.to_string();
            let wrapped = text.split(['-', ' ']).find(|word| {
                word.len() > 4 && text.contains("running script") && *word == word.to_uppercase()
            });
            wrapped.or(source.code()).map(str::to_owned)
        }
        _ => None,
    };
    (variant, code, error.is_retryable())
}

/// Has `try_lock` and a wait fail in the given way, in time.
#[track_caller]
fn fails(state: &str, url: &str, variant: &str, code: Option<&str>, retryable: bool) {
    let client = LockClient::options()
        .url(url)
        .call_timeout(Duration::from_millis(400))
        .connect_timeout(Duration::from_millis(400))
        .build()
        .expect("a client");
    let lock = client.fifo_lock("x").expect("a lock");
    let wait = Duration::from_millis(300);
    let calls: [&dyn Fn() -> Result<bool, Error>; 3] = [
        &|| lock.try_lock().map(|guard| guard.is_some()),
        &|| lock.try_lock_for(wait).map(|guard| guard.is_some()),
        &|| lock.acquire_timeout(wait).map(|lease| lease.release().is_ok()),
    ];
    for (call, bound) in calls.iter().zip([400, 300, 300]) {
        let start = Instant::now();
        let error = call().expect_err(state);
        let took = start.elapsed();
        assert_eq!(looks(&error), (variant.into(), code.map(Into::into), retryable), "{state}: {error:?}");
        assert!(took < Duration::from_millis(bound) + SLACK, "{state}: {took:?}");
        assert!(error.to_string().contains('x') || variant == "Redis", "{state}: {error}");
    }
}

/// A34: a lock that is busy is no error, one that did not come free in time is a timeout, one that was lost is lost;
/// nothing else is any of the three.
#[test]
fn busy_timed_out_and_lost_are_three_things() {
    let server = Server::start();
    let (a, b) = (lock(&server.url()), lock(&server.url()));
    let held = a.lock().expect("the lock");
    held.detach();
    assert!(b.try_lock().expect("busy is an answer").is_none());
    assert!(b.try_lock_for(Duration::from_millis(20)).expect("so is a turn that did not come").is_none());
    let timeout = b.acquire_timeout(Duration::from_millis(20)).expect_err("held");
    assert_eq!(looks(&timeout), ("Timeout".into(), None, true));
    assert!(a.evict(held.fence()).expect("an answer"));
    let lost = held.unlock().expect_err("taken away");
    assert_eq!(looks(&lost), ("LeaseLost".into(), None, false));
    let deadlock = b.try_lock().expect("an answer").expect("free");
    let error = b.lock().expect_err("this thread holds it");
    assert_eq!(looks(&error), ("WouldDeadlock".into(), None, false));
    drop(deadlock);
}

/// A34: what is wrong with the server has the server's own word for it.
#[test]
fn every_trouble_of_a_server_has_its_own_error_in_time() {
    let nobody = format!("redis://{}/", SocketAddr::from((Ipv4Addr::LOCALHOST, port::free())));
    fails("port closed", &nobody, "Redis", None, true);

    let server = Server::builder().password(SECRET).start();
    fails("no password", &format!("redis://{}/", server.addr()), "Redis", Some("NOAUTH"), false);
    fails("wrong password", &format!("redis://:wrong@{}/", server.addr()), "Redis", None, false);

    let server = Server::start();
    let url = add_user(&server, &[("script|load", ""), ("info", "")]);
    fails("may not run scripts", &url, "Redis", Some("NOPERM"), false);
    let url = add_user(&server, &[("evalsha", ""), ("eval", "")]);
    // No version keeps the code of what a script is refused.
    fails("may not run what is inside", &url, "Redis", Some("ERR"), false);
    server.fill_memory();
    fails("out of memory", &server.url(), "OutOfMemory", None, true);

    let server = Server::start();
    server.connection().lpush::<_, _, ()>("fifo:{x}:lock", "an application's").expect("LPUSH");
    fails("foreign key", &server.url(), "Protocol", None, false);

    let cluster = Server::builder().arg("--cluster-enabled").arg("yes").start();
    fails("cluster without slots", &cluster.url(), "Redis", Some("CLUSTERDOWN"), true);

    let server = Server::start();
    cmd("REPLICAOF").arg("127.0.0.1").arg(port::free()).exec(&mut server.connection()).expect("REPLICAOF");
    fails("replica", &server.url(), "ReadOnly", None, true);
    cmd("CONFIG")
        .arg("SET")
        .arg("replica-serve-stale-data")
        .arg("no")
        .exec(&mut server.connection())
        .expect("CONFIG SET");
    fails("replica without primary", &server.url(), "Redis", Some("MASTERDOWN"), true);

    let server = Server::builder().arg("--min-replicas-to-write").arg("1").start();
    fails("too few replicas", &server.url(), "Redis", Some("NOREPLICAS"), true);
}

/// A34: a script that never ends makes the server answer BUSY, which ends with it.
#[test]
fn a_busy_server_is_told_and_ridden_out() {
    let limit = ["--lua-time-limit", "50"];
    let server = Server::builder().arg(limit[0]).arg(limit[1]).start();
    let waits = lock(&server.url());
    drop(waits.try_lock().expect("connected"));
    thread::scope(|scope| {
        let busy = scope.spawn(|| {
            let mut connection = server.connection();
            cmd("EVAL").arg("while true do end").arg(0).exec(&mut connection).expect_err("it is killed")
        });
        let mut connection = server.connection();
        let ping = || cmd("PING").exec(&mut server.connection()).is_err();
        eventually(LONG, "the server is busy", ping);
        fails("busy", &server.url(), "Redis", Some("BUSY"), true);
        let waiter = scope.spawn(|| waits.try_lock_for(LONG).expect("ridden out").is_some());
        thread::sleep(Duration::from_millis(200));
        assert!(!waiter.is_finished());
        cmd("SCRIPT").arg("KILL").exec(&mut connection).expect("SCRIPT KILL");
        assert!(waiter.join().expect("no panic"));
        busy.join().expect("no panic");
    });
}

/// A34: a server that reads its data from disk says so; a caller with time waits for it, one without is told.
#[test]
fn a_loading_server_is_told_and_ridden_out() {
    let option = "loading-process-events-interval-bytes";
    let known: Vec<String> =
        cmd("CONFIG").arg("GET").arg(option).query(&mut Server::start().connection()).expect("CONFIG GET");
    if known.is_empty() {
        // Redis 6.2 answers nobody for two megabytes of its data at a time.
        return;
    }
    let server = Server::builder()
        .arg("--key-load-delay")
        .arg("500")
        .arg("--loading-process-events-interval-bytes")
        .arg("1024")
        .start();
    let mut connection = server.connection();
    for key in 0..3000 {
        connection.set::<_, _, ()>(format!("key-{key}"), "x".repeat(50)).expect("SET");
    }
    cmd("SAVE").exec(&mut connection).expect("SAVE");
    server.kill();
    thread::scope(|scope| {
        scope.spawn(|| server.start_again());
        let lock = lock(&server.url());
        let mut told = false;
        eventually(LONG, "it is loading", || {
            told = match lock.try_lock_for(Duration::from_millis(10)) {
                Err(error) => looks(&error) == ("Redis".into(), Some("LOADING".into()), true),
                Ok(_) => panic!("it loads for a second and a half"),
            };
            told
        });
        let waits = client(&server.url()).fifo_lock("x").expect("a lock");
        assert!(waits.try_lock_for(LONG).expect("ridden out").is_some());
    });
}

/// A34: what cannot be stored on disk is refused, if the server is told to refuse it.
#[test]
fn a_server_that_cannot_save_is_told() {
    let server = Server::start();
    let mut connection = server.connection();
    cmd("CONFIG").arg("SET").arg("save").arg("3600 100000").exec(&mut connection).expect("CONFIG SET");
    // A directory in place of the file: the save fails whoever runs the server.
    std::fs::create_dir(server.dir().join("dump.rdb")).expect("a directory");
    std::fs::write(server.dir().join("dump.rdb").join("file"), "").expect("a file in it");
    let failed = || -> bool {
        let info: String = cmd("INFO").arg("persistence").query(&mut connection).expect("INFO");
        if info.contains("rdb_last_bgsave_status:err") {
            return true;
        }
        let _ = cmd("BGSAVE").exec(&mut connection);
        false
    };
    eventually(LONG, "a save has failed", failed);
    fails("cannot save", &server.url(), "Redis", Some("MISCONF"), true);
}

/// Every key with its type and value.
fn dump(server: &Server) -> Vec<(String, Vec<u8>)> {
    let mut connection = server.connection();
    let value = |key: String| {
        let value = cmd("DUMP").arg(&key).query(&mut connection).expect("DUMP");
        (key, value)
    };
    server.keys("*").into_iter().map(value).collect()
}

/// A35: a lock has nothing to do with an application's keys, whatever they are called, nor with another prefix.
#[test]
fn a_lock_may_be_named_as_an_applications_keys_are() {
    let server = Server::start();
    let mut connection = server.connection();
    for key in ["x", "lock:x", "{x}", "fifo", "fifo:x", "fifo:{x}", "other:{x}", "{x}:lock", "queue"] {
        connection.hset::<_, _, _, ()>(key, "field", "an application's").expect("HSET");
    }
    let before = dump(&server);
    let prefixed = |prefix: &str| {
        let client = LockClient::options().url(&server.url()).prefix(prefix).build().expect("a client");
        client.builder("x").idle(Duration::from_millis(50)).build().expect("a lock")
    };
    let (one, other) = (prefixed("fifo"), prefixed("other"));
    // Both at once, one inside the other, and queued for both.
    let (held, also) = (one.lock().expect("the lock"), other.lock().expect("another lock"));
    held.detach();
    also.detach();
    let (ticket, other_ticket) = (one.enqueue().expect("a ticket"), other.enqueue().expect("a ticket"));
    assert_eq!((one.status().expect("a status").waiting, other.status().expect("a status").waiting), (1, 1));
    held.unlock().expect("released");
    assert!(other.status().expect("a status").held, "the other is not touched");
    also.unlock().expect("released");
    for ticket in [ticket, other_ticket] {
        ticket.wait().expect("its turn").unlock().expect("released");
    }
    eventually(LONG, "both locks are forgotten", || server.keys("*").len() == before.len());
    assert_eq!(dump(&server), before);
}

/// A35: a foreign value on any key of a lock is named in the error, and stays as it is, as does everything else.
#[test]
fn a_foreign_value_on_a_key_of_the_lock_is_named_and_nothing_changes() {
    let server = Server::start();
    let mut connection = server.connection();
    let (a, b) = (client(&server.url()), client(&server.url()));
    let build = |client: &LockClient| {
        let lock = client.builder("x").lease(Duration::from_secs(60)).claim(Duration::from_millis(20));
        lock.poll(Duration::from_millis(50)).build().expect("a lock")
    };
    let (a_lock, b_lock) = (build(&a), build(&b));
    let foreign = |error: &Error, key: &str| match error {
        Error::Protocol(what) => what.contains(&format!("`{key}`")),
        _ => false,
    };
    type Put<'a> = &'a dyn Fn(&mut redis::Connection, &str);
    let values: [Put<'_>; 3] = [
        &|connection, key| connection.hset::<_, _, _, ()>(key, "field", 1).expect("HSET"),
        &|connection, key| connection.set::<_, _, ()>(key, "not a record").expect("SET"),
        &|connection, key| connection.rpush::<_, _, ()>(key, "1").expect("RPUSH"),
    ];
    // With no lock yet: the record and the queue are looked at by everybody.
    for key in ["fifo:{x}:lock", "fifo:{x}:queue"] {
        for put in values {
            put(&mut connection, key);
            let before = dump(&server);
            for result in [a_lock.lock().map(drop), a_lock.try_lock().map(drop), a_lock.enqueue().map(drop)] {
                assert!(foreign(result.as_ref().expect_err("foreign"), key), "{key}: {result:?}");
            }
            let status = a_lock.status();
            assert!(foreign(status.as_ref().expect_err("foreign"), key), "{key}: {status:?}");
            assert_eq!(dump(&server), before, "{key}");
            server.flush_all();
        }
    }
    // With a holder and a waiter: their bells and the lost list, which only a hand-over or a loss touch.
    for put in &values[..2] {
        let held = a_lock.lock().expect("the lock");
        held.detach();
        let fence = held.fence();
        let ticket = b_lock.enqueue().expect("a ticket");
        let bell = format!("fifo:{{x}}:bell:{}", b.id());
        put(&mut connection, &bell);
        let before = dump(&server);
        let evicted = a_lock.evict(fence);
        assert!(foreign(evicted.as_ref().expect_err("foreign"), &bell), "{evicted:?}");
        assert_eq!(dump(&server), before, "evict");
        let released = held.unlock();
        assert!(foreign(released.as_ref().expect_err("foreign"), &bell), "{released:?}");
        // The release is tried again in the background, and goes on to fail, until somebody mends it.
        assert_eq!(dump(&server), before, "release");
        cmd("DEL").arg(&bell).exec(&mut connection).expect("DEL");
        assert!(a_lock.evict(fence).is_ok(), "mended");
        drop(ticket);
        server.flush_all();

        let held = a_lock.lock().expect("the lock");
        put(&mut connection, "fifo:{x}:lost");
        let before = dump(&server);
        let evicted = b_lock.evict(held.fence());
        assert!(foreign(evicted.as_ref().expect_err("foreign"), "fifo:{x}:lost"), "{evicted:?}");
        assert_eq!(dump(&server), before, "evict");
        held.unlock().expect("an ordinary release does not need it");
        server.flush_all();
    }
}

/// Everything that an error says to anybody.
fn told(error: &Error) -> Vec<String> {
    let mut told = vec![format!("{error}"), format!("{error:?}"), format!("{error:#?}")];
    let mut source = error.source();
    while let Some(cause) = source {
        told.extend([format!("{cause}"), format!("{cause:?}")]);
        source = cause.source();
    }
    told
}

fn shown(value: &dyn Debug) -> Vec<String> {
    vec![format!("{value:?}"), format!("{value:#?}")]
}

/// A36: a password is in no error, no `Debug` of any public type, and no log line of any level.
#[test]
fn a_password_is_shown_nowhere() {
    let log = LogCapture::install();
    let mut said = Vec::new();
    let with_password = Builder::default().password(SECRET).start();
    let addr = with_password.addr();
    let silent = Server::start();
    let nobody = SocketAddr::from((Ipv4Addr::LOCALHOST, port::free()));

    // Addresses that are none, or that lead nowhere, or where the password is wrong.
    let unix = with_password.unix_url();
    assert!(unix.contains(SECRET));
    let urls = [
        format!("redis://user:{SECRET}@{addr}:notaport/"),
        format!("redis://user:{SECRET}@127.0.0.1:99999/"),
        format!("redis://user:{SECRET}@[::1/"),
        format!("http://user:{SECRET}@{addr}/"),
        format!("rediss://user:{SECRET}@{addr}/"),
        format!("redis://:{SECRET}@{addr}/notadb"),
        format!("redis://:{SECRET}@{addr}/99999"),
        format!("redis+unix:///nowhere/at/all?pass={SECRET}"),
        format!("redis+unix:///nowhere?user=u&pass={SECRET}&db=x"),
        format!("user:{SECRET}@{addr}"),
        format!("redis://user:{SECRET}@{nobody}/"),
        format!("redis://user:{SECRET}@no.such.host.invalid/"),
        format!("redis://user:{SECRET}@{addr}/"),
        format!("redis://:{SECRET}x@{addr}/"),
        format!("redis://user:{SECRET}@{}/", silent.addr()),
        unix,
        with_password.url(),
    ];
    for url in &urls {
        let options = LockClient::options().url(url).connect_timeout(Duration::from_millis(300));
        said.extend(shown(&options));
        match options.build() {
            Err(error) => said.extend(told(&error)),
            Ok(client) => {
                said.extend(shown(&client));
                let builder = client.builder("x");
                said.extend(shown(&builder));
                let lock = builder.build().expect("a lock");
                said.extend(shown(&lock));
                match lock.try_lock_for(Duration::from_millis(100)) {
                    Err(error) => said.extend(told(&error)),
                    Ok(guard) => said.extend(shown(&guard)),
                }
                match lock.enqueue() {
                    Err(error) => said.extend(told(&error)),
                    Ok(ticket) => said.extend(shown(&ticket)),
                }
                match lock.status() {
                    Err(error) => said.extend(told(&error)),
                    Ok(status) => said.extend(shown(&status)),
                }
            }
        }
        match FifoLock::connect(url, "x") {
            Err(error) => said.extend(told(&error)),
            Ok(lock) => said.extend(shown(&lock)),
        }
    }
    let refused = said.iter().filter(|text| text.contains("refused")).count();
    assert!(refused > 0, "the errors are there");

    // A holder who loses its server, with all that is logged then.
    let client = LockClient::options()
        .url(&with_password.url())
        .call_timeout(Duration::from_millis(100))
        .build()
        .expect("a client");
    let lock = client.builder("no-secrets").lease(Duration::from_millis(400)).build().expect("a lock");
    let lease = lock.acquire().expect("the lock");
    said.extend(shown(&lease));
    with_password.kill();
    eventually(LONG, "it is lost", || lease.is_lost());
    said.extend(told(&lease.release().expect_err("no server")));
    assert!(!log.records_containing("`no-secrets`").is_empty(), "something was logged");

    for text in &said {
        assert!(!text.contains(SECRET), "{text}");
        assert!(!text.contains("redis://") && !text.contains("unix:/"), "an address: {text}");
    }
    // Other tests run beside this one, and none of them logs the word on its own.
    let records = log.records_containing(SECRET);
    assert!(records.is_empty(), "{records:?}");
}

/// A36: what a server answers is not passed on with what was asked.
#[test]
fn the_panic_of_an_unwrapped_error_shows_no_password() {
    let server = Builder::default().password(SECRET).start();
    let proxy = Proxy::start(server.addr());
    proxy.swallow_next_reply("AUTH", Swallow::Cut);
    let url = server.url().replace(&server.addr().to_string(), &proxy.addr().to_string());
    let client = LockClient::options().url(&url).connect_timeout(Duration::from_millis(200)).build();
    let lock = client.expect("a client").fifo_lock("x").expect("a lock");
    server.kill();
    let panicked = thread::spawn(move || {
        lock.try_lock_for(Duration::from_millis(50)).expect("this is to panic");
    });
    let message = panicked.join().expect_err("a panic");
    let message = message.downcast_ref::<String>().expect("a message");
    assert!(message.contains("this is to panic") && !message.contains(SECRET), "{message}");
}
