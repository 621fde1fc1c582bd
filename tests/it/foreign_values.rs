//! A value of somebody else's on one of the lock's keys is named in an error, and nothing is changed: no script has
//! written anything when it finds out.
//!
//! Every call is made in every situation. Which keys it touches there is told by scripts that note each key before
//! they use it. Each of those keys then gets a foreign value, and the call has to fail; a foreign value on any other
//! key has to make no difference.

use std::collections::{BTreeMap, BTreeSet};

use redis::{Cmd, Value, cmd};

use crate::situations::Act::Wait;
use crate::situations::{A, B, CLIENTS, Played, SITUATIONS, dumping, every_call, last_three};
use crate::support::scripts::{LOCK, LOST, QUEUE, Sources, bell, pipelined, text};
use crate::support::server::{Server, connect};

/// What is foreign to every key, the last because the string is no record.
const FOREIGN: [&[&str]; 3] =
    [&["HSET", "field", "value"], &["SADD", "member"], &["SET", "no record of ours"]];

/// Records that are none: strings that are foreign to the lock's key only.
const NO_RECORDS: [&str; 7] = [
    "",
    "a.1.60000",
    "- 7 0 - 9 1 -",
    "- 7 0 soon 9 1 - 0",
    "nobody 7 0 - 9 1 - 0",
    "- 9007199254740992 0 - 9 1 - 0",
    "- 7 9007199254740992 - 9 1 - 0",
];

/// Keys that a script touches somewhere in the situations, and must: else the situations prove nothing.
const TOUCHED: [(&str, &[&str]); 6] = [
    ("abandon", &["another's bell", "own bell", "lock", "queue"]),
    ("acquire", &["another's bell", "own bell", "lock", "lost", "queue"]),
    ("evict", &["another's bell", "lock", "lost", "queue"]),
    ("inspect", &["lock", "queue"]),
    ("release", &["another's bell", "own bell", "lock", "lost", "queue"]),
    ("renew", &["own bell", "lock", "queue"]),
];

/// Makes scripts note every key that they use.
const NOTING: &str = "
local real = redis
local function noted(use)
  return function(command, key, ...)
    real.call('SADD', 'touched', key)
    return use(command, key, ...)
  end
end
local redis = {call = noted(real.call), pcall = noted(real.pcall)}
";

/// The command that puts a foreign value on `key`.
fn spoil(key: &str, value: &[&str]) -> Cmd {
    let mut eval = cmd("EVAL");
    eval.arg("redis.call('DEL', KEYS[1]) return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))")
        .arg(1)
        .arg(key)
        .arg(value);
    eval
}

#[test]
fn a_foreign_value_is_named_and_nothing_is_changed() {
    let server = Server::start();
    let mut connection = connect(&server.unix_url()).expect("a connection to the test's server");
    let scripts = Sources::on_virtual_time().load(&mut connection);
    let start = "-- The record of the lock, and the keys it stands on.";
    let noting = Sources::on_virtual_time().with("lib/record.lua", start, &format!("{NOTING}{start}"), 1);
    let noting = noting.load(&mut connection);
    let dump = dumping(&mut connection);
    let keys: Vec<String> =
        [LOCK, QUEUE, LOST].map(str::to_owned).into_iter().chain(CLIENTS.map(bell)).collect();
    let mut touched_by: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut wrong = Vec::new();
    let mut runs = 0;
    for (name, situation) in SITUATIONS {
        for act in every_call() {
            let played = Played::new(situation, act);
            let mut noted = played.commands(&scripts, &noting, None, &dump);
            noted.push(cmd("SMEMBERS").arg("touched").to_owned());
            let values = pipelined(&mut connection, &noted).expect("answers from the test's server");
            let touched = match values.last() {
                Some(Value::Array(touched)) => touched.iter().filter_map(text).map(str::to_owned).collect(),
                _ => BTreeSet::new(),
            };
            let usual = values[values.len() - 3].clone();
            let parts = touched.iter().map(|key| played.part(key));
            touched_by.entry(played.script()).or_default().extend(parts);

            for key in &keys {
                let uses = touched.contains(key);
                // What is not looked at can be anything.
                for value in &FOREIGN[..if uses { FOREIGN.len() } else { 1 }] {
                    let commands = played.commands(&scripts, &scripts, Some(spoil(key, value)), &dump);
                    let answers =
                        pipelined(&mut connection, &commands).expect("answers from the test's server");
                    runs += 1;
                    let (before, says, after) = last_three(&answers);
                    let fits = match &says {
                        Err(error) => uses && error.contains(&format!("FOREIGN {key}")) && before == after,
                        Ok(reply) => !uses && **reply == usual,
                    };
                    if !fits {
                        let changed = if before == after { "nothing" } else { "something" };
                        wrong.push(format!(
                            "{name}: {act:?} with {value:?} on {key}: {says:?}, {changed} changed"
                        ));
                    }
                }
            }
        }
    }
    println!("{runs} runs");
    assert!(wrong.is_empty(), "{} of {runs}:\n{}", wrong.len(), wrong.join("\n"));
    let all: Vec<(&str, Vec<&str>)> =
        touched_by.into_iter().map(|(script, parts)| (script, parts.into_iter().collect())).collect();
    let expected = TOUCHED.map(|(script, parts)| {
        let mut parts = parts.to_vec();
        parts.sort_unstable();
        (script, parts)
    });
    assert_eq!(all, expected);
}

#[test]
fn a_string_that_is_no_record_is_named_and_nothing_is_changed() {
    let server = Server::start();
    let mut connection = connect(&server.unix_url()).expect("a connection to the test's server");
    let scripts = Sources::on_virtual_time().load(&mut connection);
    let dump = dumping(&mut connection);
    for act in every_call() {
        let played = Played::new(&[Wait(A), Wait(B)], act);
        for text in NO_RECORDS {
            let commands = played.commands(&scripts, &scripts, Some(spoil(LOCK, &["SET", text])), &dump);
            let answers = pipelined(&mut connection, &commands).expect("answers from the test's server");
            let (before, says, after) = last_three(&answers);
            let error = says.expect_err(text);
            assert!(error.contains(&format!("FOREIGN {LOCK}")), "{act:?} with {text:?}: {error}");
            assert_eq!(before, after, "{act:?} with {text:?}");
        }
    }
}

#[test]
fn a_member_of_the_queue_that_is_no_ticket_is_never_granted_and_nothing_is_changed() {
    let server = Server::start();
    let mut connection = connect(&server.unix_url()).expect("a connection to the test's server");
    let scripts = Sources::on_virtual_time().load(&mut connection);
    let dump = dumping(&mut connection);
    let mut refused = BTreeSet::new();
    for (name, situation) in SITUATIONS {
        for act in every_call() {
            let played = Played::new(situation, act);
            // Before all others: it is the next to be granted.
            let stranger = cmd("ZADD").arg(QUEUE).arg(1).arg("no ticket").to_owned();
            let commands = played.commands(&scripts, &scripts, Some(stranger), &dump);
            let answers = pipelined(&mut connection, &commands).expect("answers from the test's server");
            let (before, says, after) = last_three(&answers);
            match says {
                Ok(_) => assert!(!format!("{after:?}").contains("no ticket 1"), "{name}: {act:?}: {after:?}"),
                Err(error) => {
                    assert!(error.contains(&format!("FOREIGN {QUEUE}")), "{name}: {act:?}: {error}");
                    assert_eq!(before, after, "{name}: {act:?}");
                    refused.insert(played.script());
                }
            }
        }
    }
    let grants = BTreeSet::from(["abandon", "acquire", "evict", "release"]);
    assert_eq!(refused, grants, "whatever grants finds out");
}
