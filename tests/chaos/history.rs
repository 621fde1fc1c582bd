//! The log of a chaos run: what clients, server and faults did, one JSON object a line.
//!
//! Every time is of CLOCK_BOOTTIME, which all processes of a machine share. What a client writes *before* it asks the
//! library is stamped before, what it writes after is stamped after; so intervals that the log spells are certain, and
//! never longer than the truth.

use serde::{Deserialize, Serialize};

/// One attempt to take a lock: a process, and a number in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct Op {
    pub(crate) process: u32,
    pub(crate) n: u64,
}

/// With what an attempt was made, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Terms {
    pub(crate) lease: u64,
    pub(crate) claim: u64,
    pub(crate) poll: u64,
    /// How long it is going to hold the lock.
    pub(crate) hold: u64,
    /// How long it is going to wait; none is for ever, 0 does not queue.
    pub(crate) wait: Option<u64>,
}

/// Why a call gave no lease and no refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Why {
    /// The server could not be reached, or not in time.
    Unreachable,
    OutOfMemory,
    /// Nothing that a fault of this suite can cause.
    Other,
}

/// The script that a call runs, as far as MONITOR tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verb {
    Acquire,
    RenewOrRelease,
    Abandon,
    Other,
}

/// The record of a lock as a script stored it. Times are of the server's clock, in microseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stored {
    pub(crate) holder: Option<String>,
    pub(crate) fence: u64,
    pub(crate) until: u64,
    pub(crate) claim: Option<u64>,
    pub(crate) suspects: Vec<String>,
    pub(crate) place: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub(crate) enum What {
    // Of a client.
    Invoke {
        op: Op,
        lock: String,
        terms: Terms,
    },
    Granted {
        op: Op,
        fence: u64,
        position: u64,
        left_us: u64,
    },
    /// Busy, or the time ran out.
    Refused {
        op: Op,
    },
    Failed {
        op: Op,
        why: Why,
        text: String,
    },
    /// The lease was good for so long when it was looked at after this moment.
    Holding {
        op: Op,
        left_us: u64,
    },
    Lost {
        op: Op,
    },
    ReleaseInvoke {
        op: Op,
        left_us: u64,
    },
    Released {
        op: Op,
    },
    ReleaseLost {
        op: Op,
    },
    ReleaseFailed {
        op: Op,
        text: String,
    },

    // Of the scheduler.
    /// Ended by SIGKILL.
    Killed {
        process: u32,
    },
    /// A fault that was there from `from` to `to`, for one process or for all.
    Fault {
        fault: String,
        process: Option<u32>,
        from: u64,
        to: u64,
    },
    /// All data went in that time.
    DataLost {
        from: u64,
        to: u64,
    },
    /// The server's clock was moved in that time.
    ClockMoved {
        by_us: i64,
        from: u64,
        to: u64,
    },
    /// No fault is active from here on, nor will be; clients finish what they are at.
    Calm,
    /// Whatever is still open now has been given up.
    End,

    // Of the server, in its own order. `now_us` is its clock.
    Call {
        lock: String,
        verb: Verb,
        ticket: String,
    },
    Queued {
        lock: String,
        ticket: String,
        position: u64,
    },
    Dequeued {
        lock: String,
        tickets: Vec<String>,
    },
    /// The first of the queue was taken out; or the last, which no script does.
    Popped {
        lock: String,
        first: bool,
    },
    Record {
        lock: String,
        now_us: u64,
        record: Stored,
    },
    Flushed,
    /// The state as it was found after the record had a gap.
    Found {
        lock: String,
        record: Option<Stored>,
        queue: Vec<(String, u64)>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Event {
    pub(crate) at: u64,
    #[serde(flatten)]
    pub(crate) what: What,
}
