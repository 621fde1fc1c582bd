//! A server that is out of memory refuses newcomers, and nobody else: holders renew and release, waiters are served.

use std::collections::BTreeSet;

use redis::cmd;
use redis_fifo_lock::protocol::Command;

use crate::situations::{Played, SITUATIONS, dumping, every_call, last_three};
use crate::support::scripts::{Sources, pipelined};
use crate::support::server::{Server, connect};

/// Situations in which newcomers that would wait are refused. In the others their call frees something first, as it
/// takes the lock from somebody who is gone, and may then grow. Where a ring was not picked up, that is so for all
/// but those of the client that it was for.
const REFUSING: [&str; 10] = [
    "nobody was ever here",
    "idle",
    "held",
    "held and queued for",
    "rung",
    "rung and not picked up",
    "a suspect is gone",
    "a suspect is at the head",
    "regrouping",
    "regrouping without anybody, and the clock went back",
];

/// A43: every call in every situation either does exactly what it does with memory to spare, or is refused with OOM
/// and changes nothing; and only those are refused that have neither the lock nor a place in its queue.
#[test]
fn a_full_server_refuses_newcomers_and_nobody_else() {
    let server = Server::builder().arg("--maxmemory-policy").arg("noeviction").start();
    let mut connection = connect(&server.unix_url()).expect("a connection to the test's server");
    let scripts = Sources::on_virtual_time().load(&mut connection);
    let dump = dumping(&mut connection);
    let limit = |bytes: u64| cmd("CONFIG").arg("SET").arg("maxmemory").arg(bytes).to_owned();
    let mut refusing = BTreeSet::new();
    let mut wrong = Vec::new();
    for (name, situation) in SITUATIONS {
        for act in every_call() {
            let played = Played::new(situation, act);
            let mut with = |prepared| {
                let mut commands = vec![limit(0)];
                commands.extend(played.commands(&scripts, &scripts, prepared, &dump));
                pipelined(&mut connection, &commands).expect("answers from the test's server")
            };
            let (usual, full) = (with(None), with(Some(limit(1))));
            let ((_, usual, then), (before, says, after)) = (last_three(&usual), last_three(&full));
            match (usual, says) {
                (Ok(usual), Ok(reply)) if usual == reply && then == after => {}
                (Ok(_), Err(error)) if error.contains("OOM") || error.contains("maxmemory") => {
                    let is_newcomer = match &played.call {
                        Command::Acquire { ticket, position: None, .. } => {
                            let record = played.state.record.as_ref();
                            let holds = record.is_some_and(|record| record.holder.as_ref() == Some(ticket));
                            !holds && played.state.queue.iter().all(|(_, queued)| queued != ticket)
                        }
                        _ => false,
                    };
                    if !is_newcomer || before != after {
                        wrong.push(format!("{name}: {act:?}: {error}, {before:?}, {after:?}"));
                    }
                    if matches!(played.call, Command::Acquire { wait: true, .. }) {
                        refusing.insert(name);
                    }
                }
                (usual, says) => {
                    wrong.push(format!(
                        "{name}: {act:?}: {says:?}, usually {usual:?}; {after:?}, usually {then:?}"
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!(refusing, BTreeSet::from(REFUSING));
}
