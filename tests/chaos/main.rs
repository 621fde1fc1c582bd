//! Chaos: processes and threads fight for a few locks while everything around them goes wrong; a checker judges the log.
//!
//! `cargo test --test chaos` runs for about three minutes; a plain `cargo test` leaves it out. Set by the environment:
//!
//! | variable | default | is |
//! |---|---|---|
//! | `CHAOS_SECONDS` | 150 | how long faults are injected, in rounds of 30 s; 3600 is the long form |
//! | `CHAOS_SEED` | of the day's own | the seed of the first round; the next ones count on |
//! | `CHAOS_DIR` | none | where to keep the logs; without it those of a round that failed are kept in the temporary directory |
//! | `CHAOS_VERBOSE` | unset | set to anything: tells each fault as it begins |
//!
//! `cargo test --test chaos -- --ignored` shows that broken scripts are seen.

mod checker;
mod clock;
mod history;
mod log_file;
mod mutants;
mod random;
mod round;
mod schedule;
mod support;
mod tap;
mod worker;

use std::collections::BTreeMap;
use std::env;
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use checker::{Tally, Violation};
use mutants::MUTANTS;
use schedule::{CLOCK, Fault};

const ROUND: Duration = Duration::from_secs(30);
/// Fewer grants than this in a second show that the run was busy with something else.
const LEAST_GRANTS: usize = 2;
/// Violations that are printed of one round.
const SHOWN: usize = 20;

/// Prints a line whether the test runner captures or not.
fn tell(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn setting(name: &str) -> Option<u64> {
    let text = env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, not a number")))
}

/// A directory for the logs of a round.
fn directory(name: &str) -> (PathBuf, bool) {
    match env::var_os("CHAOS_DIR") {
        Some(dir) => {
            let dir = PathBuf::from(dir).join(name);
            std::fs::create_dir_all(&dir).expect("a directory for the logs");
            (dir, true)
        }
        None => {
            (tempfile::Builder::new().prefix("fifo-chaos-").tempdir().expect("a directory").keep(), false)
        }
    }
}

#[test]
fn nothing_that_is_promised_breaks_in_chaos() {
    let seconds = Duration::from_secs(setting("CHAOS_SECONDS").unwrap_or(150));
    let first = setting("CHAOS_SEED").unwrap_or_else(|| RandomState::new().hash_one(()) % 1_000_000);
    let length = ROUND.min(seconds);
    let rounds = u64::try_from(seconds.as_millis() / length.as_millis()).expect("a sane number").max(1);
    tell(&format!("chaos: {rounds} rounds of {length:?}, CHAOS_SEED={first}"));
    let mut counts = BTreeMap::from(Fault::NAMES.map(|name| (name, 0)));
    let mut total = Tally::default();
    let mut failed = Vec::new();
    for seed in first..first + rounds {
        let (dir, keep) = directory(&format!("seed-{seed}"));
        let (happened, tally, violations) = round::run(seed, length, &dir, None);
        for (name, count) in happened {
            *counts.entry(name).or_default() += count;
        }
        tell(&format!("chaos: seed {seed}: {tally:?}"));
        total.add(&tally);
        if violations.is_empty() {
            if !keep {
                std::fs::remove_dir_all(&dir).expect("its own directory");
            }
            continue;
        }
        tell(&format!("chaos: seed {seed} FAILED; its logs are in {}", dir.display()));
        tell(&format!(
            "repeat: CHAOS_SEED={seed} CHAOS_SECONDS={} cargo test --test chaos",
            length.as_secs()
        ));
        show(&violations);
        failed.push(seed);
    }
    tell("chaos: faults that really happened");
    for (name, count) in &counts {
        tell(&format!("  {count:5}  {name}"));
    }
    tell(&format!("chaos: in all {total:?}"));
    assert!(failed.is_empty(), "promises were broken with the seeds {failed:?}");
    let least = LEAST_GRANTS * usize::try_from(seconds.as_secs()).expect("a sane number");
    assert!(total.grants >= least, "only {} grants in {seconds:?}", total.grants);
    assert!(total.losses > 0 && total.displaced > 0, "no lease was ever lost");
    // One round has hardly every fault; two have.
    if rounds > 1 {
        // A machine without a C compiler cannot move the clock, and says so loudly.
        let missing: Vec<_> = counts.iter().filter(|(name, count)| **count == 0 && **name != CLOCK).collect();
        assert!(missing.is_empty(), "these faults never happened: {missing:?}");
    }
}

fn show(violations: &[Violation]) {
    for violation in violations.iter().take(SHOWN) {
        tell(&format!("  {:?}: {}", violation.rule, violation.what));
    }
    if violations.len() > SHOWN {
        tell(&format!("  ... and {} more", violations.len() - SHOWN));
    }
}

/// Each rule is seen to object to scripts that are broken on purpose, under the same faults.
#[test]
#[ignore = "takes a quarter of an hour"]
fn broken_scripts_are_caught() {
    let only = env::var("CHAOS_MUTANT").ok();
    let first = setting("CHAOS_SEED").unwrap_or(1);
    let mut escaped = Vec::new();
    for mutant in MUTANTS.iter().filter(|mutant| only.as_ref().is_none_or(|only| mutant.name.contains(only)))
    {
        let caught = (first..first + 3).any(|seed| {
            let (dir, keep) = directory(&format!("mutant-{seed}"));
            let (_, _, violations) = round::run(seed, ROUND, &dir, Some(mutant));
            let mut rules = BTreeMap::<_, usize>::new();
            for violation in &violations {
                *rules.entry(violation.rule).or_default() += 1;
            }
            tell(&format!("mutant: {}: seed {seed}: {rules:?}", mutant.name));
            if !keep {
                std::fs::remove_dir_all(&dir).expect("its own directory");
            }
            rules.contains_key(&mutant.rule)
        });
        if !caught {
            escaped.push(mutant.name);
        }
    }
    assert!(escaped.is_empty(), "not seen by the rule that should: {escaped:?}");
}
