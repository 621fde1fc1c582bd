//! The Lua scripts, one per transition.

#[cfg(feature = "idempotency")]
use crate::protocol::job;
use crate::protocol::{Command, gate};

/// One script: its index is its place in the list of digests a connection keeps.
pub(super) struct Script {
    /// Lua.
    pub(super) source: &'static str,
}

/// The number of scripts.
pub(super) const COUNT: usize = if cfg!(feature = "idempotency") { 12 } else { 8 };

/// All scripts, in the order of [`index`].
pub(super) static SCRIPTS: [Script; COUNT] = [
    Script {
        source: concat!(
            include_str!("../../scripts/lib/record.lua"),
            include_str!("../../scripts/lib/grant.lua"),
            include_str!("../../scripts/lib/displace.lua"),
            include_str!("../../scripts/acquire.lua"),
        ),
    },
    Script {
        source: concat!(
            include_str!("../../scripts/lib/record.lua"),
            include_str!("../../scripts/renew.lua")
        ),
    },
    Script {
        source: concat!(
            include_str!("../../scripts/lib/record.lua"),
            include_str!("../../scripts/lib/grant.lua"),
            include_str!("../../scripts/release.lua"),
        ),
    },
    Script {
        source: concat!(
            include_str!("../../scripts/lib/record.lua"),
            include_str!("../../scripts/lib/grant.lua"),
            include_str!("../../scripts/abandon.lua"),
        ),
    },
    Script {
        source: concat!(
            include_str!("../../scripts/lib/record.lua"),
            include_str!("../../scripts/inspect.lua")
        ),
    },
    Script {
        source: concat!(
            include_str!("../../scripts/lib/record.lua"),
            include_str!("../../scripts/lib/grant.lua"),
            include_str!("../../scripts/lib/displace.lua"),
            include_str!("../../scripts/evict.lua"),
        ),
    },
    Script {
        source: concat!(include_str!("../../scripts/lib/gate.lua"), include_str!("../../scripts/newest.lua")),
    },
    Script {
        source: concat!(include_str!("../../scripts/lib/gate.lua"), include_str!("../../scripts/apply.lua")),
    },
    #[cfg(feature = "idempotency")]
    Script {
        source: concat!(
            include_str!("../../scripts/lib/record.lua"),
            include_str!("../../scripts/lib/job.lua"),
            include_str!("../../scripts/begin.lua"),
        ),
    },
    #[cfg(feature = "idempotency")]
    Script {
        source: concat!(
            include_str!("../../scripts/lib/record.lua"),
            include_str!("../../scripts/lib/job.lua"),
            include_str!("../../scripts/finish.lua"),
        ),
    },
    #[cfg(feature = "idempotency")]
    Script {
        source: concat!(
            include_str!("../../scripts/lib/record.lua"),
            include_str!("../../scripts/lib/job.lua"),
            include_str!("../../scripts/show.lua"),
        ),
    },
    #[cfg(feature = "idempotency")]
    Script {
        source: concat!(
            include_str!("../../scripts/lib/record.lua"),
            include_str!("../../scripts/lib/job.lua"),
            include_str!("../../scripts/clear.lua"),
        ),
    },
];

/// The script that runs `command`.
pub(super) fn index(command: &Command) -> usize {
    match command {
        Command::Acquire { .. } => 0,
        Command::Renew { .. } => 1,
        Command::Release { .. } => 2,
        Command::Abandon { .. } => 3,
        Command::Inspect { .. } => 4,
        Command::Evict { .. } => 5,
    }
}

/// The script that runs `call` at a gate.
pub(super) fn gate_index(call: &gate::Call) -> usize {
    match call {
        gate::Call::Newest => 6,
        gate::Call::Apply { .. } => 7,
    }
}

/// The script that runs `call` about a job.
#[cfg(feature = "idempotency")]
pub(super) fn job_index(call: &job::Call) -> usize {
    match call {
        job::Call::Begin { .. } => 8,
        job::Call::Finish { .. } => 9,
        job::Call::Show => 10,
        job::Call::Clear => 11,
    }
}
