//! Gates: no stale fence writes, all writes of a call or none, and both engines alike.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use redis::{Connection, FromRedisValue, Value, cmd};
use redis_fifo_lock::fence::{Answer, FenceGate, Tx};
use redis_fifo_lock::protocol::gate::{Call, Reply, apply};
use redis_fifo_lock::protocol::keyspace::{Bytes, Change, Content, Keyspace, Life, Write};
use redis_fifo_lock::{ClientBuilder, Error, Fence, LockClient, MemoryServer};

use crate::support::dice::Dice;
use crate::support::eventually;
use crate::support::server::Server;

const LONG: Duration = Duration::from_secs(20);

fn fence(number: u64) -> Fence {
    Fence::new(number).expect("a fence")
}

/// A client of each engine.
fn engines(server: &Server) -> [(&'static str, ClientBuilder); 2] {
    [
        ("memory", LockClient::options().memory(&MemoryServer::new())),
        ("redis", LockClient::options().url(&server.url())),
    ]
}

#[track_caller]
fn assert_fenced_out<T: std::fmt::Debug>(result: Result<T, Error>, by: Fence) {
    match result {
        Err(Error::FencedOut { newest, .. }) => assert_eq!(newest, by),
        other => panic!("{other:?}"),
    }
}

fn get<T: FromRedisValue>(connection: &mut Connection, key: &str) -> T {
    cmd("GET").arg(key).query(connection).expect("an answer")
}

/// The largest numbers that doubles tell apart are not the largest fences.
#[test]
fn fences_are_exact_up_to_the_largest() {
    let server = Server::start();
    let tokens = [1, 9, 10, (1 << 53) - 1, 1 << 53, (1 << 53) + 1, i64::MAX as u64 - 1, i64::MAX as u64];
    for (engine, client) in engines(&server) {
        let client = client.build().expect("a client");
        for (i, newest) in tokens.into_iter().enumerate() {
            let gate = client.gate(&format!("target-{newest}")).expect("a gate");
            gate.set_if_fresh(fence(newest), newest.to_string()).expect("the first write");
            for stale in &tokens[..i] {
                assert_fenced_out(gate.set_if_fresh(fence(*stale), "stale"), fence(newest));
                assert!(!gate.check(fence(*stale)).expect("an answer"), "{engine}: {stale} after {newest}");
            }
            for fresh in &tokens[i..] {
                assert!(gate.check(fence(*fresh)).expect("an answer"), "{engine}: {fresh} after {newest}");
            }
            assert_eq!(gate.current_max().expect("an answer"), Some(fence(newest)));
            gate.set_if_fresh(fence(newest), "again").expect("an equal fence writes again");
        }
    }
}

/// From the moment somebody else was granted, not from his first write.
#[test]
fn a_holder_is_refused_as_soon_as_somebody_else_was_granted() {
    let server = Server::start();
    for (engine, client) in engines(&server) {
        let (client, other) = (client.clone().build().expect("a client"), client.build().expect("a client"));
        let (lock, other) = (client.fifo_lock("x").expect("a lock"), other.fifo_lock("x").expect("a lock"));
        let gate = lock.gate("{x}:target").expect("a gate");
        let free = client.gate("free").expect("a gate");
        let first = lock.lock().expect("the lock");
        let stale = first.fence();
        gate.set_if_fresh(stale, "1").expect("the holder writes");
        free.set_if_fresh(stale, "1").expect("the holder writes");
        first.unlock().expect("released");
        gate.set_if_fresh(stale, "2").expect("nobody else was granted");
        let successor = other.lock().expect("the lock");
        assert_fenced_out(gate.set_if_fresh(stale, "3"), successor.fence());
        assert_fenced_out(gate.check_and_advance(stale), successor.fence());
        assert_fenced_out(gate.apply(stale, |tx| _ = tx.del("{x}:target")), successor.fence());
        assert!(!gate.check(stale).expect("an answer"));
        free.set_if_fresh(stale, "2").expect("a gate of no lock does not know yet");
        free.check_and_advance(successor.fence()).expect("the newest");
        assert_fenced_out(free.set_if_fresh(stale, "3"), successor.fence());
        if engine == "redis" {
            let mut connection = server.connection();
            assert_eq!(get::<String>(&mut connection, "{x}:target"), "2");
            assert_eq!(get::<String>(&mut connection, "free"), "2");
        }
    }
}

#[test]
fn after_a_loss_the_live_holder_writes_and_what_is_still_known_counts() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).expect("a client");
    let lock = client.builder("x").idle(Duration::from_millis(300)).build().expect("a lock");
    let gate = lock.gate("target").expect("a gate");
    let mut connection = server.connection();
    let mut lose = |key: &str| {
        assert_eq!(cmd("DEL").arg(key).query::<u64>(&mut connection).expect("an answer"), 1, "{key}");
    };

    let stale = lock.lock().expect("the lock").fence();
    let live = lock.lock().expect("the lock");
    live.detach();
    gate.set_if_fresh(live.fence(), "1").expect("the holder writes");
    lose("fifo:{x}:gate:target");
    assert_fenced_out(gate.set_if_fresh(stale, "stale"), live.fence());
    gate.set_if_fresh(live.fence(), "2").expect("the live holder writes");

    lose("fifo:{x}:lock");
    assert_fenced_out(gate.set_if_fresh(stale, "stale"), live.fence());
    gate.set_if_fresh(live.fence(), "3").expect("nobody else was granted");
    let next = lock.lock().expect("free, as the record is gone");
    assert_fenced_out(gate.set_if_fresh(live.fence(), "stale"), next.fence());
    gate.set_if_fresh(next.fence(), "4").expect("the live holder writes");
    let newest = next.fence();
    assert!(live.unlock().is_err(), "it was lost");

    // The record goes by itself when the lock is idle; the gate stays.
    next.unlock().expect("released");
    eventually(LONG, "the idle lock is forgotten", || server.keys("fifo:*:lock").is_empty());
    assert_fenced_out(gate.set_if_fresh(stale, "stale"), newest);
    let after = lock.lock().expect("the lock");
    gate.set_if_fresh(after.fence(), "5").expect("fences go on ascending");
    assert_eq!(server.pttl("fifo:{x}:gate:target"), -1);
}

/// Many writers, each with a pause between its grant and its write: the order in which writes were accepted is theirs.
#[test]
fn ten_thousand_interleaved_writers_never_go_back() {
    let server = Server::start();
    for (engine, client) in engines(&server) {
        let client = client.build().expect("a client");
        let gate = client.gate("{t}").expect("a gate");
        let granted = AtomicU64::new(0);
        let (accepted, refused) = (AtomicU64::new(0), AtomicU64::new(0));
        thread::scope(|scope| {
            for writer in 0..8 {
                let (gate, granted, accepted, refused) = (gate.clone(), &granted, &accepted, &refused);
                scope.spawn(move || {
                    let mut dice = Dice::new(writer);
                    loop {
                        let mine = granted.fetch_add(1, Ordering::Relaxed) + 1;
                        if mine > 10_000 {
                            return;
                        }
                        dice.pause(400);
                        let mine = fence((1 << 53) - 5000 + mine);
                        let log = |tx: &mut Tx| {
                            _ = tx.rpush("{t}:log", [mine.to_string()]).set("{t}", mine.to_string())
                        };
                        match gate.apply(mine, log) {
                            Ok(_) => accepted.fetch_add(1, Ordering::Relaxed),
                            Err(Error::FencedOut { newest, .. }) => {
                                assert!(newest > mine);
                                refused.fetch_add(1, Ordering::Relaxed)
                            }
                            Err(other) => panic!("{other}"),
                        };
                    }
                });
            }
        });
        let (accepted, refused) = (accepted.into_inner(), refused.into_inner());
        assert_eq!(accepted + refused, 10_000);
        if engine == "memory" {
            continue;
        }
        assert!(accepted > 500 && refused > 500, "{engine}: {accepted} accepted, {refused} refused");
        let mut connection = server.connection();
        let log: Vec<u64> =
            cmd("LRANGE").arg("{t}:log").arg(0).arg(-1).query(&mut connection).expect("a list");
        assert_eq!(log.len() as u64, accepted);
        assert!(log.is_sorted(), "an older fence was accepted after a newer one");
        assert_eq!(Some(&get::<u64>(&mut connection, "{t}")), log.last());
    }
}

#[test]
fn a_call_makes_all_of_its_writes_or_none() {
    let server = Server::builder().password("s").start();
    let client = LockClient::connect(&server.url()).expect("a client");
    let gate = client.gate("a").expect("a gate");
    let mut connection = server.connection();
    let mut run = |words: &[&str]| -> Value {
        let (name, arguments) = words.split_first().expect("a command");
        cmd(name).arg(arguments).query(&mut connection).expect("an answer")
    };
    run(&["RPUSH", "list", "x"]);
    run(&["SET", "number", "9223372036854775800"]);
    run(&["HSET", "hash", "field", "no number"]);
    gate.set_if_fresh(fence(5), "1").expect("the first write");
    type List = fn(&mut Tx);
    let lists: [(&str, List); 5] = [
        ("holds a list", |tx| _ = tx.set("a", "2").hset("list", [("f", "v")])),
        ("holds a string", |tx| _ = tx.set("a", "2").sadd("a", ["m"])),
        ("out of range", |tx| _ = tx.set("a", "2").incr_by("number", 8)),
        ("no whole number", |tx| _ = tx.set("a", "2").hincr_by("hash", "field", 1)),
        ("not allowed", |tx| _ = tx.set("a", "2").command("FLUSHALL", "a", [""; 0])),
    ];
    for (why, list) in lists {
        let error = gate.apply(fence(7), list).expect_err(why);
        assert!(error.to_string().contains(why), "{error}");
        assert_eq!(
            gate.current_max().expect("an answer"),
            Some(fence(5)),
            "the gate's fence is one of the writes"
        );
        assert_eq!(run(&["GET", "a"]), Value::BulkString(b"1".to_vec()));
    }
    let sum = gate.apply(fence(7), |tx| _ = tx.incr_by("number", 7)).expect("just in range");
    assert_eq!(sum, [Answer::Number(i64::MAX)]);

    // A key of the gate's that is not the gate's.
    run(&["SADD", "fifo:gate:{b}", "x"]);
    let error = client.gate("b").expect("a gate").set_if_fresh(fence(1), "1").expect_err("a foreign key");
    assert!(error.to_string().contains("`fifo:gate:{b}` holds something"), "{error}");
    run(&["SET", "fifo:gate:{b}", "1e15"]);
    assert!(matches!(client.gate("b").expect("a gate").current_max(), Err(Error::Protocol(_))));
    assert!(matches!(client.gate("fifo:gate:{b}"), Err(Error::Config(_))));

    // A user who may run scripts and set strings, but not push to lists.
    run(&["ACL", "SETUSER", "u", "on", ">p", "~*", "+@all", "-rpush"]);
    let limited = format!("redis://u:p@{}/", server.addr());
    let limited = LockClient::connect(&limited).expect("a client").gate("a").expect("a gate");
    let error =
        limited.apply(fence(8), |tx| _ = tx.set("a", "3").rpush("list", ["y"])).expect_err("no permission");
    assert!(error.to_string().contains("permit"), "{error}");
    assert_eq!(run(&["GET", "a"]), Value::BulkString(b"1".to_vec()));

    // A full server.
    server.fill_memory();
    let full = gate.apply(fence(9), |tx| _ = tx.set("a", "4").rpush("list", ["y"]));
    server.set_maxmemory(0);
    assert!(matches!(full, Err(Error::OutOfMemory { .. })), "{full:?}");
    assert_eq!(run(&["GET", "a"]), Value::BulkString(b"1".to_vec()));
    assert_eq!(gate.current_max().expect("an answer"), Some(fence(7)));
}

#[test]
fn a_time_to_live_is_kept_unless_another_is_given() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).expect("a client");
    let gate = client.gate("a").expect("a gate");
    let hour = Duration::from_secs(3600);
    gate.apply(fence(1), |tx| _ = tx.set_for("a", "1", hour)).expect("a write");
    gate.set_if_fresh(fence(2), "2").expect("a write");
    assert!(server.pttl("a") > 3_500_000);
    gate.apply(fence(2), |tx| _ = tx.command("SET", "a", ["3"])).expect("a write");
    assert!(server.pttl("a") > 3_500_000);
    gate.apply(fence(2), |tx| _ = tx.persist("a")).expect("a write");
    assert_eq!(server.pttl("a"), -1);
    assert_eq!(server.pttl("fifo:gate:{a}"), -1);
    let gate = gate.remember(hour).expect("a gate");
    gate.check_and_advance(fence(3)).expect("a write");
    assert!(server.pttl("fifo:gate:{a}") > 3_500_000);
    assert!(matches!(gate.remember(Duration::from_secs(1)), Err(Error::Config(_))));
}

/// Random lists of writes, on the server by scripts and here by the machine.
#[test]
fn scripts_and_machine_write_alike() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).expect("a client");
    let mut connection = server.connection();
    let mut seen = BTreeMap::<String, u32>::new();
    for seed in 0..60 {
        server.flush_all();
        let mut dice = Dice::new(seed);
        let mut space = Keyspace::default();
        for step in 0..60 {
            let target = *dice.pick(&["a", "b"]);
            let gate = client.gate(target).expect("a gate");
            let mine = (1 << 53) + dice.below(6) + step / 10;
            let writes: Vec<Write> = (0..dice.below(5)).map(|_| write(&mut dice)).collect();
            let result = gate.apply(fence(mine), |tx| writes.iter().for_each(|write| list(tx, write)));
            if let Err(Error::Config(_)) = result {
                continue;
            }
            let call = Call::Apply { fence: mine, remember_ms: None, writes: writes.clone() };
            let reply = apply(&mut space, &format!("fifo:gate:{{{target}}}"), None, 1, &call);
            let (shown, alike) = match (&reply, &result) {
                (Reply::Applied(answers), Ok(others)) => ("applied", answers == others),
                (Reply::FencedOut(newest), Err(Error::FencedOut { newest: other, .. })) => {
                    ("fenced out", *newest == other.get())
                }
                (Reply::WrongType(index, kind), Err(Error::Protocol(why))) => {
                    let key = &writes[*index].key;
                    ("wrong type", why.contains(&format!(" `{key}`: the key holds a {};", kind.word())))
                }
                (Reply::NoNumber(_), Err(Error::Protocol(why))) => {
                    ("no number", why.contains("no whole number"))
                }
                _ => ("", false),
            };
            assert!(alike, "seed {seed}, step {step}: {reply:?} and {result:?} to {writes:#?}");
            *seen.entry(shown.to_owned()).or_default() += 1;
            assert_eq!(
                contents_here(&space),
                contents_there(&mut connection),
                "seed {seed}, step {step}: {writes:#?}"
            );
        }
    }
    assert!(seen.len() == 4 && seen.values().all(|times| *times > 20), "not everything was met: {seen:?}");
}

/// A random write.
fn write(dice: &mut Dice) -> Write {
    let word = |dice: &mut Dice| -> Bytes {
        dice.pick(&["x", "y", "", "1", "-7", "9223372036854775807", "01"]).as_bytes().into()
    };
    let words = |dice: &mut Dice| -> Vec<Bytes> { (0..=dice.below(2)).map(|_| word(dice)).collect() };
    let change = match dice.below(17) {
        0..=1 => Change::Set {
            value: word(dice),
            life: *dice.pick(&[Life::Keep, Life::Keep, Life::For(3_600_000)]),
            present: *dice.pick(&[None, None, Some(true), Some(false)]),
        },
        2 => Change::Del,
        3 => Change::Expire(7_200_000),
        4 => Change::Persist,
        5..=6 => Change::IncrBy(*dice.pick(&[0, 1, -1, i64::MAX, i64::MIN])),
        7 => Change::HSet(words(dice).into_iter().map(|field| (field, word(dice))).collect()),
        8 => Change::HDel(words(dice)),
        9 => Change::HIncrBy(word(dice), *dice.pick(&[1, -1, i64::MAX, i64::MIN])),
        10 => Change::LPush(words(dice)),
        11 => Change::RPush(words(dice)),
        12 => Change::LTrim(*dice.pick(&[0, 1, -2, 9]), *dice.pick(&[0, -1, -3, i64::MIN])),
        13 => Change::SAdd(words(dice)),
        14 => Change::SRem(words(dice)),
        15 => Change::ZAdd(words(dice).into_iter().map(|m| (m, *dice.pick(&[0.5, -1.0, 1e300]))).collect()),
        _ => Change::ZRem(words(dice)),
    };
    Write { key: (*dice.pick(&["a", "b", "c", "d", "e", "f"])).into(), change }
}

/// Lists a write as a user does.
fn list(tx: &mut Tx, write: &Write) {
    let key = &write.key;
    match &write.change {
        Change::Set { value, life, present } => {
            let mut arguments = vec![value.to_vec()];
            if let Life::For(ms) = life {
                arguments.extend([b"PX".to_vec(), ms.to_string().into_bytes()]);
            }
            arguments.extend(present.map(|present| if present { b"XX".to_vec() } else { b"NX".to_vec() }));
            tx.command("SET", key, arguments)
        }
        Change::Del => tx.del(key),
        Change::Expire(ms) => tx.expire(key, Duration::from_millis(*ms)),
        Change::Persist => tx.persist(key),
        Change::IncrBy(by) => tx.incr_by(key, *by),
        Change::HSet(fields) => tx.hset(key, fields.iter().map(|(f, v)| (f, v))),
        Change::HDel(fields) => tx.hdel(key, fields),
        Change::HIncrBy(field, by) => tx.hincr_by(key, field, *by),
        Change::LPush(values) => tx.lpush(key, values),
        Change::RPush(values) => tx.rpush(key, values),
        Change::LTrim(first, last) => tx.ltrim(key, *first, *last),
        Change::SAdd(members) => tx.sadd(key, members),
        Change::SRem(members) => tx.srem(key, members),
        Change::ZAdd(members) => tx.zadd(key, members.iter().map(|(m, score)| (*score, m))),
        Change::ZRem(members) => tx.zrem(key, members),
    };
}

/// Every key: whether it expires, and what it holds.
type Contents = BTreeMap<String, (bool, Vec<String>)>;

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn contents_here(space: &Keyspace) -> Contents {
    let contents = space.entries.iter().map(|(key, entry)| {
        let mut held: Vec<String> = match &entry.content {
            Content::String(value) => vec![lossy(value)],
            Content::Hash(fields) => {
                fields.iter().map(|(f, v)| format!("{} {}", lossy(f), lossy(v))).collect()
            }
            Content::List(items) => items.iter().map(|item| lossy(item)).collect(),
            Content::Set(members) => members.iter().map(|member| lossy(member)).collect(),
            Content::Sorted(members) => {
                members.iter().map(|(m, score)| format!("{} {score}", lossy(m))).collect()
            }
        };
        if !matches!(entry.content, Content::List(_)) {
            held.sort();
        }
        (key.to_string(), (entry.expires.is_some(), held))
    });
    contents.collect()
}

fn contents_there(connection: &mut Connection) -> Contents {
    let keys: Vec<String> = cmd("KEYS").arg("*").query(connection).expect("keys");
    if keys.is_empty() {
        return Contents::new();
    }
    let mut pipe = redis::pipe();
    for key in &keys {
        pipe.cmd("TYPE").arg(key).cmd("PTTL").arg(key);
    }
    let kinds: Vec<(String, i64)> = pipe
        .query::<Vec<Value>>(connection)
        .expect("types")
        .chunks(2)
        .map(|pair| {
            let text = |value: &Value| String::from_redis_value(value.clone()).expect("text");
            (text(&pair[0]), i64::from_redis_value(pair[1].clone()).expect("a number"))
        })
        .collect();
    let contents = keys.into_iter().zip(kinds).map(|(key, (kind, ttl))| {
        let mut command = match &*kind {
            "string" => cmd("GET"),
            "hash" => cmd("HGETALL"),
            "list" => cmd("LRANGE"),
            "set" => cmd("SMEMBERS"),
            _ => cmd("ZRANGE"),
        };
        command.arg(&key);
        match &*kind {
            "list" => command.arg(0).arg(-1),
            "zset" => command.arg(0).arg(-1).arg("WITHSCORES"),
            _ => &mut command,
        };
        let mut held: Vec<String> = match &*kind {
            "string" => vec![command.query(connection).expect("a string")],
            "hash" => {
                let pairs: Vec<(String, String)> = command.query(connection).expect("pairs");
                pairs.into_iter().map(|(f, v)| format!("{f} {v}")).collect()
            }
            "zset" => {
                let pairs: Vec<(String, f64)> = command.query(connection).expect("pairs");
                pairs.into_iter().map(|(member, score)| format!("{member} {score}")).collect()
            }
            _ => command.query(connection).expect("items"),
        };
        if kind != "list" {
            held.sort();
        }
        (key, (ttl >= 0, held))
    });
    contents.collect()
}

/// What stands at a key of the memory server.
#[test]
fn the_memory_server_shows_what_was_written() {
    let server = MemoryServer::new();
    let client = LockClient::options().memory(&server).build().expect("a client");
    let gate: FenceGate = client.gate("a").expect("a gate");
    gate.apply(fence(1), |tx| {
        tx.set("a", "1").hset("h", [("f", "v")]).rpush("l", ["x", "y"]).set_for(
            "t",
            "1",
            Duration::from_millis(50),
        );
    })
    .expect("a write");
    let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
    assert_eq!(server.value("a"), text("1"));
    assert_eq!(server.value("h"), Value::Array(vec![text("f"), text("v")]));
    assert_eq!(server.value("l"), Value::Array(vec![text("x"), text("y")]));
    assert_eq!(server.value("fifo:gate:{a}"), text("1"));
    eventually(LONG, "it expires", || server.value("t") == Value::Nil);
}
