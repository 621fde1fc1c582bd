//! What a release was told is what happened to its lease.

use std::collections::BTreeMap;

use super::replay::{Ending, Server};
use super::{Found, Outcome, Rule, Story};

pub(super) fn check(story: &Story, server: &Server, found: &mut Found) {
    // Per lock: when each fence was known to be somebody's.
    let mut known: BTreeMap<&str, Vec<(u64, u64)>> = BTreeMap::new();
    for (attempt, look, grant) in story.granted() {
        known.entry(&attempt.lock).or_default().push((look.at, grant.fence));
    }
    for grants in known.values_mut() {
        grants.sort_unstable();
        // The newest fence that anybody had by then.
        let mut newest = 0;
        for (_, fence) in grants {
            newest = newest.max(*fence);
            *fence = newest;
        }
    }
    for (attempt, _, grant) in story.granted() {
        let (Some(release), Some((at, outcome))) = (attempt.release, &attempt.outcome) else { continue };
        let (op, process, lock, fence) = (attempt.op, attempt.op.process, &*attempt.lock, grant.fence);
        let ending = server.ending(lock, fence);
        let disturbed = story.is_disturbed(process, release.at, *at);
        match outcome {
            Outcome::Released => {
                let before = known.get(lock).map_or(&[][..], |grants| grants);
                let before = before[..before.partition_point(|(at, _)| *at < release.at)].last();
                if before.is_some_and(|(_, newest)| *newest > fence) {
                    let what =
                        format!("`{lock}`: {op:?} released fence {fence} after a newer one was granted");
                    found.add(Rule::Verdict, what);
                }
                if matches!(ending, Some(Ending::Displaced | Ending::Forgotten | Ending::Foreign)) {
                    let what =
                        format!("`{lock}`: {op:?} was told that fence {fence} was released: {ending:?}");
                    found.add(Rule::Verdict, what);
                }
            }
            Outcome::ReleaseLost => {
                let taken = matches!(ending, Some(Ending::Displaced | Ending::Forgotten | Ending::Foreign));
                let forgotten = story.is_forgotten(attempt.invoked, *at);
                // Nobody could say, and by its own clock it had run out.
                let ran_out = attempt.lost.is_some() || *at >= release.at + release.left;
                let justified = taken || forgotten || (ran_out && disturbed);
                if !justified {
                    let what = format!("`{lock}`: {op:?} was told that fence {fence} was lost: {ending:?}");
                    found.add(Rule::Verdict, what);
                }
            }
            Outcome::ReleaseFailed(text) => {
                if !disturbed {
                    found.add(
                        Rule::Verdict,
                        format!("`{lock}`: {op:?} could not release, without any fault: {text}"),
                    );
                }
            }
            Outcome::Refused | Outcome::Failed(..) => {}
        }
    }
}
