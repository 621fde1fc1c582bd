//! One holder at a time, by the holders' own reckoning.

use std::collections::BTreeMap;

use super::{Attempt, Found, Grant, MS, Rule, Story};

/// One holder's belief.
#[derive(Clone, Copy)]
struct Belief<'a> {
    from: u64,
    to: u64,
    attempt: &'a Attempt,
    grant: Grant,
}

pub(super) fn check(story: &Story, found: &mut Found) {
    let mut locks: BTreeMap<&str, Vec<Belief<'_>>> = BTreeMap::new();
    for (attempt, _, grant) in story.granted() {
        if let Some((from, to)) = attempt.belief() {
            locks.entry(&attempt.lock).or_default().push(Belief { from, to, attempt, grant });
        }
    }
    for (lock, mut beliefs) in locks {
        beliefs.sort_by_key(|belief| belief.from);
        // Those who still believe when the next one starts to.
        let mut inside: Vec<Belief<'_>> = Vec::new();
        for belief in beliefs {
            inside.retain(|other| other.to > belief.from);
            for other in &inside {
                let (old, new) =
                    if other.grant.fence < belief.grant.fence { (other, &belief) } else { (&belief, other) };
                if !is_excused(story, old, new) {
                    let both = old.to.min(new.to).saturating_sub(old.from.max(new.from));
                    found.add(
                        Rule::Exclusion,
                        format!(
                            "`{lock}`: {:?} (fence {}) and {:?} (fence {}) both held it for {} us",
                            old.attempt.op,
                            old.grant.fence,
                            new.attempt.op,
                            new.grant.fence,
                            both / 1000
                        ),
                    );
                }
            }
            inside.push(belief);
        }
    }
}

/// Whether a lease that began before data was lost, or the server's clock ran ahead, met one that began after: until it
/// hears of that or has run out by its own clock, the older one is taken for good, and no lock can help it.
fn is_excused(story: &Story, old: &Belief<'_>, new: &Belief<'_>) -> bool {
    story.losses.iter().chain(&story.steps).any(|(from, to)| {
        let lease = old.attempt.terms.lease * MS;
        old.attempt.invoked <= *to && new.from >= *from && old.to.min(new.to) <= to + lease
    })
}
