//! The tools of the tests do what they say; a fault that does not happen would prove nothing.

use std::thread;
use std::time::{Duration, Instant};

use redis::{Commands, Connection, RedisResult, cmd};

use crate::support::child::Child;
use crate::support::log_capture::LogCapture;
use crate::support::overlap::{Entry, Journal, Section};
use crate::support::postgres::Postgres;
use crate::support::proxy::{Proxy, Swallow};
use crate::support::resp::frame_len;
use crate::support::server::{Server, connect, is_interrupted};
use crate::support::{eventually, thread_count, threads_named};

/// Much longer than anything here takes.
const LONG: Duration = Duration::from_secs(20);
/// After so long, an answer counts as missing.
const SHORT: Duration = Duration::from_millis(150);

fn ping(connection: &mut Connection) -> RedisResult<()> {
    cmd("PING").exec(connection)
}

fn incr(connection: &mut Connection) -> RedisResult<i64> {
    connection.incr("counter", 1)
}

/// Whether a call gets no answer for a while.
fn is_silent<T>(connection: &mut Connection, call: impl Fn(&mut Connection) -> RedisResult<T>) -> bool {
    connection.set_read_timeout(Some(SHORT)).expect("a read timeout");
    let answer = call(connection);
    connection.set_read_timeout(None).expect("no read timeout");
    answer.is_err_and(|error| error.is_timeout() || is_interrupted(&error))
}

fn is_closed<T>(result: RedisResult<T>) -> bool {
    result.is_err_and(|error| error.is_connection_dropped())
}

#[test]
#[should_panic(expected = "a state that never comes")]
fn eventually_names_what_it_waited_for() {
    eventually(Duration::from_millis(20), "a state that never comes", || false);
}

#[test]
fn threads_are_found_by_their_name() {
    let name = "named-for-this-test";
    assert_eq!(threads_named(name), 0);
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let body = move || stopped.recv();
    let thread = thread::Builder::new().name(name.to_owned()).spawn(body).expect("a thread");
    eventually(LONG, "the thread has its name", || threads_named(name) == 1);
    assert!(thread_count() >= 2);
    drop(stop);
    assert!(thread.join().expect("no panic").is_err());
    eventually(LONG, "the thread is gone", || threads_named(name) == 0);
}

#[test]
fn server_with_aof_has_its_data_again_after_a_crash() {
    let server = Server::builder().aof(true).start();
    server.connection().set::<_, _, ()>("kept", 1).expect("SET");
    server.kill();
    assert!(connect(&server.url()).is_err());
    server.start_again();
    assert_eq!(server.keys("*"), ["kept"]);
    server.stop();
    server.start_again();
    assert_eq!(server.keys("*"), ["kept"]);
}

#[test]
fn server_without_aof_is_empty_after_a_restart() {
    let server = Server::start();
    let (port, url) = (server.port(), server.url());
    server.connection().set::<_, _, ()>("lost", 1).expect("SET");
    server.stop();
    server.start_again();
    assert_eq!((server.port(), server.url()), (port, url));
    assert!(server.keys("*").is_empty());
}

#[test]
fn server_takes_arguments_and_a_password() {
    let server = Server::builder().arg("--databases").arg("3").password("S3CRETpw").start();
    let databases: Vec<String> =
        cmd("CONFIG").arg("GET").arg("databases").query(&mut server.connection()).expect("CONFIG");
    assert_eq!(databases, ["databases", "3"]);
    assert!(ping(&mut connect(&server.unix_url()).expect("a connection")).is_ok());
    let refused =
        connect(&format!("redis://{}/", server.addr())).and_then(|mut connection| ping(&mut connection));
    assert_eq!(refused.expect_err("no password").code(), Some("NOAUTH"));
    assert!(!server.monitor().lines().iter().any(|line| line.contains("S3CRETpw")));
}

#[test]
fn server_has_the_environment_it_was_given() {
    // A title would be written over what /proc shows of the environment.
    let server = Server::builder().env("FIFO_MARK", "given").arg("--set-proc-title").arg("no").start();
    let mut link = server.connection();
    let info: String = cmd("INFO").arg("server").query(&mut link).expect("INFO");
    let pid = info.lines().find_map(|line| line.strip_prefix("process_id:")).expect("its id");
    let environ = std::fs::read(format!("/proc/{}/environ", pid.trim())).expect("its environment");
    assert!(environ.split(|byte| *byte == 0).any(|variable| variable == b"FIFO_MARK=given"));
}

#[test]
fn servers_do_not_share_anything() {
    let (one, other) = (Server::start(), Server::start());
    assert_ne!(one.port(), other.port());
    one.connection().set::<_, _, ()>("mine", 1).expect("SET");
    assert!(other.keys("*").is_empty());
}

#[test]
fn dropped_server_is_gone() {
    let server = Server::start();
    let url = server.url();
    drop(server);
    assert!(connect(&url).is_err());
}

#[test]
fn frozen_server_answers_only_after_the_thaw() {
    let server = Server::start();
    let mut connection = connect(&server.url()).expect("a connection");
    server.freeze();
    assert!(is_silent(&mut connection, ping));
    server.thaw();
    assert!(ping(&mut connection).is_ok());
}

#[test]
fn clients_can_be_killed_and_paused() {
    let server = Server::start();
    let mut connection = connect(&server.url()).expect("a connection");
    assert_eq!(server.connected_clients(), 1);
    assert_eq!(server.client_kill_normal(), 1);
    assert!(is_closed(ping(&mut connection)));
    eventually(LONG, "the client is gone", || server.connected_clients() == 0);

    let mut connection = connect(&server.url()).expect("a connection");
    server.client_pause(60_000, "WRITE");
    assert!(ping(&mut connection).is_ok());
    assert!(is_silent(&mut connection, incr));
}

#[test]
fn blocked_clients_are_counted_and_unblocked() {
    let server = Server::start();
    let block = |url: String| {
        let mut connection = connect(&url).expect("a connection");
        connection.blpop::<_, Option<(String, String)>>("bell", 0.0)
    };
    for error in [false, true] {
        let url = server.url();
        let blocked = thread::spawn(move || block(url));
        eventually(LONG, "a client is blocked", || server.blocked_clients() == 1);
        assert_eq!(server.unblock_all_blocked(error), 1);
        match blocked.join().expect("no panic") {
            Ok(popped) => assert!(!error && popped.is_none()),
            Err(refusal) => assert!(error && refusal.code() == Some("UNBLOCKED")),
        }
    }
}

#[test]
fn scripts_and_data_are_flushed() {
    let server = Server::start();
    let mut connection = server.connection();
    let sha: String = cmd("SCRIPT").arg("LOAD").arg("return 1").query(&mut connection).expect("SCRIPT LOAD");
    server.script_flush();
    let gone = cmd("EVALSHA").arg(&sha).arg(0).exec(&mut connection).expect_err("no such script");
    assert_eq!(gone.code(), Some("NOSCRIPT"));
    connection.set::<_, _, ()>("key", 1).expect("SET");
    server.flush_all();
    assert!(server.keys("*").is_empty());
}

#[test]
fn full_server_refuses_to_grow() {
    let server = Server::start();
    let mut connection = server.connection();
    server.fill_memory();
    let refused = connection.set::<_, _, ()>("key", 1).expect_err("no memory");
    assert_eq!(refused.code(), Some("OOM"));
    server.set_maxmemory(0);
    assert!(connection.set::<_, _, ()>("key", 1).is_ok());
}

#[test]
fn command_calls_are_counted() {
    let server = Server::start();
    let mut connection = server.connection();
    server.reset_stats();
    for _ in 0..3 {
        connection.set::<_, _, ()>("key", 1).expect("SET");
    }
    cmd("EVAL")
        .arg("return redis.call('SET', KEYS[1], 2)")
        .arg(1)
        .arg("key")
        .exec(&mut connection)
        .expect("EVAL");
    assert_eq!(server.command_calls("SET"), 4);
    assert_eq!(server.command_calls("eval"), 1);
    assert_eq!(server.command_calls("ping"), 0);
    server.reset_stats();
    assert_eq!(server.command_calls("set"), 0);
}

#[test]
fn remaining_life_is_read() {
    let server = Server::start();
    let mut connection = server.connection();
    connection.pset_ex::<_, _, ()>("ends", 1, 60_000).expect("PSETEX");
    connection.set::<_, _, ()>("stays", 1).expect("SET");
    assert!((50_000..=60_000).contains(&server.pttl("ends")));
    assert_eq!((server.pttl("stays"), server.pttl("absent")), (-1, -2));
    assert_eq!(server.keys("[e-s]*"), ["ends", "stays"]);
}

#[test]
fn monitor_misses_nothing_that_was_answered() {
    let server = Server::start();
    let mut connection = server.connection();
    connection.set::<_, _, ()>("before", 1).expect("SET");
    let mut monitor = server.monitor();
    for number in 0..100 {
        connection.set::<_, _, ()>(format!("key-{number}"), 1).expect("SET");
    }
    let sets = |lines: Vec<String>| lines.iter().filter(|line| line.contains("\"SET\"")).count();
    assert_eq!(sets(monitor.lines()), 100);
    connection.set::<_, _, ()>("last", 1).expect("SET");
    assert_eq!(sets(monitor.stop()), 101);
}

#[test]
fn messages_are_told_apart() {
    let whole = |text: &str| frame_len(text.as_bytes()) == Some(text.len());
    for message in [
        "+OK\r\n",
        ":12\r\n",
        "$-1\r\n",
        "$4\r\na\r\nb\r\n",
        "*-1\r\n",
        "*0\r\n",
        "*3\r\n$1\r\na\r\n*1\r\n:1\r\n$-1\r\n",
        "_\r\n",
        "%1\r\n+a\r\n:1\r\n",
        "|1\r\n+a\r\n:1\r\n+value\r\n",
        ">2\r\n+invalidate\r\n*0\r\n",
        "PING\r\n",
    ] {
        assert!(whole(message), "{message:?}");
        for end in 0..message.len() {
            assert_eq!(frame_len(&message.as_bytes()[..end]), None, "{message:?} up to {end}");
        }
    }
}

#[test]
fn proxy_forwards_and_retargets() {
    let (one, other) = (Server::start(), Server::start());
    let proxy = Proxy::start(one.addr());
    let mut old = connect(&proxy.url()).expect("a connection");
    proxy.retarget(other.addr());
    let mut new = connect(&proxy.url()).expect("a connection");
    old.set::<_, _, ()>("old", 1).expect("SET");
    new.set::<_, _, ()>("new", "x".repeat(100_000)).expect("SET");
    assert_eq!((one.keys("*"), other.keys("*")), (vec!["old".to_owned()], vec!["new".to_owned()]));
    assert_eq!(new.get::<_, String>("new").expect("GET").len(), 100_000);
    assert_eq!((proxy.connections(), proxy.counts().connections), (2, 2));
}

#[test]
fn proxy_keeps_a_pipeline_in_order() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let mut connection = connect(&proxy.url()).expect("a connection");
    let mut pipe = redis::pipe();
    for number in 0..200 {
        pipe.cmd("ECHO").arg(number);
    }
    let echoed: Vec<i32> = pipe.query(&mut connection).expect("a pipeline");
    assert!(echoed.into_iter().eq(0..200));
}

#[test]
fn frozen_proxy_holds_everything_and_delivers_it_later() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let mut connection = connect(&proxy.url()).expect("a connection");
    proxy.freeze();
    assert!(is_silent(&mut connection, incr));
    assert!(server.keys("*").is_empty());
    assert!(proxy.counts().frozen >= 1);
    proxy.thaw();
    eventually(LONG, "the request arrives", || server.keys("*") == ["counter"]);
    assert!(ping(&mut connection).is_ok());
}

#[test]
fn frozen_proxy_hides_the_end_of_a_client() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let connection = connect(&proxy.url()).expect("a connection");
    assert_eq!(server.connected_clients(), 1);
    proxy.freeze();
    drop(connection);
    eventually(LONG, "the proxy has seen the end", || proxy.counts().frozen == 1);
    assert_eq!(server.connected_clients(), 1);
    proxy.thaw();
    eventually(LONG, "the server sees the end", || server.connected_clients() == 0);
}

#[test]
fn proxy_changes_requests_and_takes_faults_back() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let mut before = connect(&proxy.url()).expect("a connection");
    proxy.rewrite_requests(|request| {
        if request.windows(3).any(|word| word == b"old") {
            return b"*2\r\n$4\r\nECHO\r\n$3\r\nnew\r\n".to_vec();
        }
        request
    });
    let mut connection = connect(&proxy.url()).expect("a connection");
    let echo = |connection: &mut Connection, text: &str| -> String {
        cmd("ECHO").arg(text).query(connection).expect("an echo")
    };
    assert_eq!(echo(&mut connection, "old"), "new");
    assert_eq!(echo(&mut connection, "same"), "same");
    assert_eq!(echo(&mut before, "old"), "old");
    let fault = proxy.swallow_next_reply("ECHO", Swallow::Cut);
    proxy.swallow_nothing();
    assert_eq!(echo(&mut connection, "same"), "same");
    assert!(!fault.happened());
}

#[test]
fn cut_closes_what_is_open_and_nothing_else() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let mut connection = connect(&proxy.url()).expect("a connection");
    assert_eq!((proxy.cut(), proxy.cut()), (1, 0));
    assert!(is_closed(ping(&mut connection)));
    eventually(LONG, "the server sees the end", || server.connected_clients() == 0);
    assert!(ping(&mut connect(&proxy.url()).expect("a connection")).is_ok());
    assert_eq!(proxy.counts().cut, 1);
}

#[test]
fn refusing_proxy_keeps_old_connections() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let mut old = connect(&proxy.url()).expect("a connection");
    proxy.refuse(true);
    assert!(connect(&proxy.url()).and_then(|mut new| ping(&mut new)).is_err());
    assert!(ping(&mut old).is_ok());
    assert!(proxy.counts().refused >= 1);
    proxy.refuse(false);
    assert!(ping(&mut connect(&proxy.url()).expect("a connection")).is_ok());
}

#[test]
fn delay_is_paid_both_ways() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let mut connection = connect(&proxy.url()).expect("a connection");
    proxy.delay(Duration::from_millis(50));
    let start = Instant::now();
    ping(&mut connection).expect("PING");
    assert!(start.elapsed() >= Duration::from_millis(100));
}

#[test]
fn silence_swallows_one_reply_and_mutes_its_connection() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let mut connection = connect(&proxy.url()).expect("a connection");
    let mut other = connect(&proxy.url()).expect("a connection");
    let fault = proxy.swallow_next_reply("counter", Swallow::Silence);
    assert!(ping(&mut connection).is_ok());
    assert!(!fault.happened());
    assert!(is_silent(&mut connection, incr));
    assert!(is_silent(&mut connection, ping));
    assert_eq!(incr(&mut other).expect("INCR"), 2);
    assert_eq!((fault.count(), proxy.counts().swallowed, proxy.connections()), (1, 1, 2));
}

#[test]
fn cut_swallows_one_reply_of_a_request_that_was_executed() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let mut connection = connect(&proxy.url()).expect("a connection");
    let is_script = |request: &[u8]| request.windows(4).any(|part| part == b"EVAL");
    let fault = proxy.swallow_next_reply_to(Swallow::Cut, is_script);
    let mut script = cmd("EVAL");
    script.arg("return redis.call('INCR', KEYS[1])").arg(1).arg("counter");
    assert!(is_closed(script.query::<i64>(&mut connection)));
    let mut connection = connect(&proxy.url()).expect("a connection");
    assert_eq!(script.query::<i64>(&mut connection).expect("EVAL"), 2);
    assert_eq!(fault.count(), 1);
}

#[test]
fn request_can_be_lost_before_the_server_sees_it() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let incr = || incr(&mut connect(&proxy.url()).expect("a connection"));
    let fault = proxy.swallow_replies_to(2, Swallow::CutBefore, |request| request.starts_with(b"*3"));
    // A new connection's first requests have other lengths.
    assert!(is_closed(incr()) && is_closed(incr()));
    assert_eq!(incr().expect("INCR"), 1);
    assert_eq!(fault.count(), 2);
}

#[test]
fn held_reply_arrives_late() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let mut connection = connect(&proxy.url()).expect("a connection");
    let fault = proxy.swallow_next_reply("counter", Swallow::Hold);
    let late = thread::spawn(move || incr(&mut connection));
    eventually(LONG, "the reply is held", || fault.happened());
    let mut other = connect(&proxy.url()).expect("a connection");
    assert_eq!(incr(&mut other).expect("INCR"), 2);
    assert!(!late.is_finished());
    proxy.release_held();
    assert_eq!(late.join().expect("no panic").expect("INCR"), 1);
}

#[test]
fn held_request_arrives_late_and_without_its_client() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let mut connection = connect(&proxy.url()).expect("a connection");
    let fault = proxy.swallow_next_reply("counter", Swallow::HoldRequest);
    assert!(is_silent(&mut connection, incr));
    drop(connection);
    assert_eq!((fault.count(), server.keys("*").len()), (1, 0));
    proxy.release_held();
    eventually(LONG, "the request arrives", || server.keys("*") == ["counter"]);
    eventually(LONG, "the server sees the end", || server.connected_clients() == 0);
}

#[test]
fn swallowed_reply_in_a_pipeline_is_the_right_one() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let mut connection = connect(&proxy.url()).expect("a connection");
    let fault = proxy.swallow_next_reply("second", Swallow::Cut);
    let mut pipe = redis::pipe();
    pipe.cmd("SET").arg("first").arg(1).cmd("SET").arg("second").arg(1).cmd("SET").arg("third").arg(1);
    assert!(is_closed(pipe.exec(&mut connection)));
    assert_eq!(fault.count(), 1);
    assert!(server.keys("*").contains(&"second".to_owned()));
}

#[test]
fn dropped_proxy_leaves_no_thread_that_serves_it() {
    let server = Server::start();
    let proxy = Proxy::start(server.addr());
    let held = connect(&proxy.url()).expect("a connection");
    proxy.swallow_next_reply("PING", Swallow::Hold);
    let mut connection = connect(&proxy.url()).expect("a connection");
    assert!(is_silent(&mut connection, ping));
    proxy.freeze();
    let addr = proxy.addr();
    // Joins its threads: to return at all is the claim.
    drop(proxy);
    // A process that another test is just starting can still have the listener, until it is that process.
    eventually(LONG, "nobody listens", || std::net::TcpStream::connect(addr).is_err());
    drop(held);
    eventually(LONG, "the server sees the end", || server.connected_clients() == 0);
}

#[test]
fn child_talks_and_ends() {
    let mut child = Child::spawn("echo", &["one", "two words", ""]);
    assert_eq!(child.line(LONG).as_deref(), Some("ready one|two words|"));
    for line in ["a", "b >> c"] {
        assert!(child.send(line));
        assert_eq!(child.line(LONG).as_deref(), Some(line));
    }
    assert_eq!(child.wait(Duration::ZERO), None);
    child.close_stdin();
    assert!(child.wait(LONG).expect("the end").success());
    assert_eq!(child.line(LONG), None);
    assert!(!child.send("anybody?"));
}

#[test]
fn child_dies_of_sigkill() {
    let mut child = Child::spawn("echo", &[]);
    assert!(child.line(LONG).is_some());
    child.sigkill();
    assert!(!child.wait(LONG).expect("the end").success());
    assert_eq!(child.line(LONG), None);
}

#[test]
fn stopped_child_is_silent_until_it_is_continued() {
    let mut child = Child::spawn("echo", &[]);
    assert!(child.line(LONG).is_some());
    for round in ["first", "second"] {
        child.sigstop();
        assert!(child.send(round));
        assert_eq!(child.line(SHORT), None);
        child.sigcont();
        assert_eq!(child.line(LONG).as_deref(), Some(round));
    }
}

#[test]
fn dropped_child_is_gone() {
    let child = Child::spawn("echo", &[]);
    let process = format!("/proc/{}", child.id());
    assert!(std::fs::exists(&process).expect("a Linux /proc"));
    drop(child);
    assert!(!std::fs::exists(&process).expect("a Linux /proc"));
}

#[test]
fn servers_of_a_killed_test_process_are_gone() {
    let mut child = Child::spawn("server", &[]);
    let (url, dir) = (child.line(LONG).expect("a URL"), child.line(LONG).expect("a directory"));
    assert!(connect(&url).is_ok());
    child.sigkill();
    eventually(LONG, "the server is gone", || connect(&url).is_err());
    eventually(LONG, "its directory is gone", || !std::fs::exists(&dir).expect("a readable parent"));
}

#[test]
fn overlap_is_detected_and_stays_on_record() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("section");
    let first = Section::enter(&path, "first").expect("nobody inside");
    assert_eq!(Section::inside(&path).as_deref(), Some("first"));
    let overlap = Section::enter(&path, "second").expect_err("first is inside");
    assert_eq!((overlap.inside.as_str(), overlap.entering.as_str()), ("first", "second"));
    drop(first);
    drop(Section::enter(&path, "third").expect("nobody inside"));
    assert_eq!(Section::inside(&path), None);
    assert_eq!(Section::violations(&path), [overlap.to_string()]);
}

#[test]
fn cleared_holder_does_not_put_out_its_successor() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let stalled = Section::enter(dir.path(), "stalled").expect("nobody inside");
    Section::clear(dir.path());
    let successor = Section::enter(dir.path(), "successor").expect("nobody inside");
    drop(stalled);
    assert_eq!(Section::inside(dir.path()).as_deref(), Some("successor"));
    drop(successor);
    Section::clear(dir.path());
    assert!(Section::violations(dir.path()).is_empty());
}

#[test]
fn racing_holders_are_never_inside_together() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let inside = std::sync::atomic::AtomicUsize::new(0);
    let refused: usize = thread::scope(|scope| {
        let race = |holder: usize| {
            let (inside, path) = (&inside, dir.path());
            scope.spawn(move || {
                let enter = |_: &usize| match Section::enter(path, &holder.to_string()) {
                    Ok(section) => {
                        assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                        inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                        drop(section);
                        false
                    }
                    Err(_) => true,
                };
                (0..200).filter(enter).count()
            })
        };
        let racers: Vec<_> = (0..4).map(race).collect();
        racers.into_iter().map(|racer| racer.join().expect("no panic")).sum()
    });
    assert_eq!(Section::violations(dir.path()).len(), refused);
}

#[test]
fn journal_keeps_every_line_of_every_writer_whole() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let journal = Journal::at(dir.path().join("journal"));
    assert!(journal.read().is_empty());
    thread::scope(|scope| {
        for writer in 0..4_u64 {
            let journal = &journal;
            scope.spawn(move || (0..200).for_each(|line| journal.write(line, writer, "the holder")));
        }
    });
    let entries = journal.read();
    assert_eq!(entries.len(), 800);
    for position in 0..4 {
        let own = entries.iter().filter(|entry| entry.position == position);
        let expected = (0..200).map(|fence| Entry { fence, position, holder: "the holder".to_owned() });
        assert!(own.cloned().eq(expected));
    }
}

#[test]
fn log_records_of_any_thread_are_found() {
    let capture = LogCapture::install();
    let other = thread::spawn(|| log::warn!(target: "elsewhere", "lock `{}` is late", "log-capture-test"));
    other.join().expect("no panic");
    let records = capture.records_containing("`log-capture-test`");
    assert_eq!(records.len(), 1);
    assert_eq!((records[0].level, records[0].target.as_str()), (log::Level::Warn, "elsewhere"));
    assert_eq!(records[0].message, "lock `log-capture-test` is late");
    log::logger().flush();
}

#[test]
fn postgres_gives_every_test_its_own_database() {
    let server = Postgres::shared();
    let (one, other) = (server.database(), server.database());
    assert_eq!(server.psql(&one, "select 1").as_deref(), Ok("1"));
    server.psql(&one, "create table t (n int)").expect("a table");
    assert!(server.psql(&one, "select * from t").is_ok());
    assert!(server.psql(&other, "select * from t").is_err_and(|error| error.contains("does not exist")));
}
