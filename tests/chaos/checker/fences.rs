//! Fences ascend, whoever looks, and nobody holds one that the server did not mint.

use std::collections::{BTreeMap, HashMap};

use super::replay::Server;
use super::{Attempt, Found, Grant, Rule, Story};

pub(super) fn check(story: &Story, server: &Server, found: &mut Found) {
    let mut locks: BTreeMap<&str, Vec<(&Attempt, u64, Grant)>> = BTreeMap::new();
    for (attempt, look, grant) in story.granted() {
        locks.entry(&attempt.lock).or_default().push((attempt, look.at, grant));
    }
    for (lock, grants) in &locks {
        unique(lock, grants, found);
        ascending(lock, grants, found);
        for (attempt, _, grant) in grants {
            if let Err(why) = server.minted(lock, grant.fence, grant.position) {
                found.add(
                    Rule::Fences,
                    format!("`{lock}`: {:?} has fence {}: {why}", attempt.op, grant.fence),
                );
            }
        }
        in_order(lock, grants, server, found);
    }
}

fn unique(lock: &str, grants: &[(&Attempt, u64, Grant)], found: &mut Found) {
    let mut owners = HashMap::new();
    for (attempt, _, grant) in grants {
        if let Some(other) = owners.insert(grant.fence, attempt.op) {
            let both = format!("`{lock}`: {other:?} and {:?} have fence {}", attempt.op, grant.fence);
            found.add(Rule::Fences, both);
        }
    }
}

/// A call that began after another had its grant gets a newer fence.
fn ascending(lock: &str, grants: &[(&Attempt, u64, Grant)], found: &mut Found) {
    let mut by_end: Vec<_> = grants.iter().collect();
    by_end.sort_by_key(|(_, at, _)| *at);
    let mut by_start: Vec<_> = grants.iter().collect();
    by_start.sort_by_key(|(attempt, _, _)| attempt.invoked);
    let mut ended = by_end.into_iter().peekable();
    let mut newest = (0, None);
    for (attempt, _, grant) in by_start {
        while let Some((before, _, older)) = ended.next_if(|(_, at, _)| *at < attempt.invoked) {
            newest = newest.max((older.fence, Some(before.op)));
        }
        if newest.0 >= grant.fence {
            let (op, fence) = (attempt.op, grant.fence);
            let what = format!("`{lock}`: {op:?} got fence {fence} after {:?} had {}", newest.1, newest.0);
            found.add(Rule::Fences, what);
        }
    }
}

/// Grants follow positions, save for tickets that were out of the queue when they were overtaken.
fn in_order(lock: &str, grants: &[(&Attempt, u64, Grant)], server: &Server, found: &mut Found) {
    let mut by_fence: Vec<_> = grants.iter().collect();
    by_fence.sort_by_key(|(_, _, grant)| grant.fence);
    // The grant with the largest position so far.
    let mut furthest: Option<&(&Attempt, u64, Grant)> = None;
    for grant in by_fence {
        match furthest {
            Some(before) if before.2.position >= grant.2.position => {
                if !server.was_out(lock, grant.2.fence, before.2.fence) {
                    let (first, second) = (before.0.op, grant.0.op);
                    let what = format!(
                        "`{lock}`: {first:?} at position {} overtook {second:?} at {}",
                        before.2.position, grant.2.position
                    );
                    found.add(Rule::Order, what);
                }
            }
            _ => furthest = Some(grant),
        }
    }
}
