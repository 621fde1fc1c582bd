//! Scripts that are broken on purpose, on their way to the server: what the suite has to see.

use crate::checker::Rule;

pub(crate) struct Mutant {
    pub(crate) name: &'static str,
    from: &'static str,
    to: &'static str,
    /// The rule that has to object.
    pub(crate) rule: Rule,
}

pub(crate) const MUTANTS: [Mutant; 14] = [
    Mutant {
        name: "an unclaimed grant is passed over without a look at the bell",
        from: "free = client ~= me and ask('LINDEX', bell_of(client), 0) == holder .. ' ' .. string.format('%.0f', fence)",
        to: "free = client ~= me",
        rule: Rule::Exclusion,
    },
    Mutant {
        name: "naming does not claim",
        from: "  local unclaimed = claim ~= false\n  claimed()",
        to: "  local unclaimed = claim ~= false",
        rule: Rule::Exclusion,
    },
    Mutant {
        name: "a lapsed lease takes the lock back by renewing",
        from: "if holder == ticket and fence == tonumber(ARGV[2]) then\n  -- A lapsed lease",
        to: "if fence >= tonumber(ARGV[2]) then holder = ticket; fence = tonumber(ARGV[2])\n  -- A lapsed lease",
        rule: Rule::Handover,
    },
    Mutant {
        name: "a release ends whatever lease its client has",
        from: "if holder == ticket and fence == mine then",
        to: "if parts(holder) == me then",
        rule: Rule::Handover,
    },
    Mutant {
        name: "a lease is taken away at half its time",
        from: "local free = until_at <= now",
        to: "local free = until_at - lease_ms * 500 <= now",
        rule: Rule::Handover,
    },
    Mutant {
        name: "fences count from 1",
        from: "math.max(fence + 1, now)",
        to: "fence + 1",
        rule: Rule::Fences,
    },
    Mutant {
        name: "the last in the queue is granted first",
        from: "ask('ZPOPMIN', QUEUE)",
        to: "ask('ZPOPMAX', QUEUE)",
        rule: Rule::Order,
    },
    Mutant {
        name: "whoever finds the lock free takes it",
        from: "if waiting == 0 then\n  grant(",
        to: "if true then\n  grant(",
        rule: Rule::Order,
    },
    Mutant {
        name: "newcomers get the position of the one before",
        from: "at = at or math.max(pos + 1, now)",
        to: "at = at or math.max(pos, 1)",
        rule: Rule::Order,
    },
    Mutant {
        name: "the living are dropped with the suspects",
        from: "if #doomed == 1000 or not suspected(client) then",
        to: "if #doomed == 1000 then",
        rule: Rule::Order,
    },
    Mutant {
        name: "a suspicion outlives the call of its client",
        from: "  if not suspected(client) then return false end",
        to: "  if true then return false end",
        rule: Rule::Order,
    },
    Mutant {
        name: "a lost lease is called released",
        from: "return {lost and 3 or 2, next_ticket, next_fence}",
        to: "return {1, next_ticket, next_fence}",
        rule: Rule::Verdict,
    },
    Mutant {
        name: "a released lease is called lost",
        from: "  keep(idle_ms, empty)\n  return {1, next_ticket, next_fence}\nend\nlocal lost",
        to: "  keep(idle_ms, empty)\n  return {3, next_ticket, next_fence}\nend\nlocal lost",
        rule: Rule::Verdict,
    },
    Mutant {
        name: "a lapsed lease is never taken away",
        from: "local free = until_at <= now",
        to: "local free = holder == '-'",
        rule: Rule::Waiting,
    },
];

impl Mutant {
    /// Changes the script in every request that brings one.
    pub(crate) fn rewrite(&self) -> impl Fn(Vec<u8>) -> Vec<u8> + Send + Sync + 'static {
        let (from, to) = (self.from, self.to);
        move |request| match words(&request) {
            Some(words) if words.iter().any(|word| word.contains(from)) => {
                let mut changed = format!("*{}\r\n", words.len());
                for word in words {
                    let word = word.replace(from, to);
                    changed.push_str(&format!("${}\r\n{word}\r\n", word.len()));
                }
                changed.into_bytes()
            }
            _ => request,
        }
    }
}

/// The words of a request that brings a script; `None` for any other.
fn words(request: &[u8]) -> Option<Vec<&str>> {
    // A call by digest is far shorter than any script.
    let mut rest = str::from_utf8(request).ok().filter(|text| text.len() > 1000)?;
    let mut line = || {
        let (line, after) = rest.split_once("\r\n")?;
        rest = after;
        Some(line)
    };
    let count = line()?.strip_prefix('*')?.parse().ok()?;
    let mut words = Vec::new();
    for _ in 0..count {
        // Scripts have no carriage returns.
        let length: usize = line()?.strip_prefix('$')?.parse().ok()?;
        words.push(line().filter(|word| word.len() == length)?);
    }
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All scripts, as they go to the server.
    const SCRIPTS: [&str; 6] = [
        concat!(
            include_str!("../../scripts/lib/record.lua"),
            include_str!("../../scripts/lib/grant.lua"),
            include_str!("../../scripts/lib/displace.lua"),
            include_str!("../../scripts/acquire.lua")
        ),
        include_str!("../../scripts/renew.lua"),
        include_str!("../../scripts/release.lua"),
        include_str!("../../scripts/abandon.lua"),
        include_str!("../../scripts/inspect.lua"),
        include_str!("../../scripts/evict.lua"),
    ];

    #[test]
    fn every_mutant_changes_a_script() {
        for mutant in &MUTANTS {
            let changed = SCRIPTS.iter().filter(|script| {
                let prelude = "-".repeat(1000);
                let length = prelude.len() + script.len();
                let request = format!("*2\r\n$4\r\nLOAD\r\n${length}\r\n{prelude}{script}\r\n").into_bytes();
                mutant.rewrite()(request.clone()) != request
            });
            assert!(changed.count() > 0, "{}", mutant.name);
        }
    }
}
