//! What can go wrong, one variant for each thing a caller would do differently.

#[cfg(any(feature = "postgres", feature = "sqlite"))]
use std::sync::Arc;
use std::time::Duration;

use crate::fence::Fence;

/// The error of every fallible call of this crate.
///
/// Expected outcomes are values, not errors: a lock that is held makes [`try_lock`](crate::FifoLock::try_lock)
/// answer `Ok(None)`. No variant carries a password or a URL.
///
/// # Examples
///
/// ```
/// use redis_fifo_lock::{Error, LockClient};
///
/// match LockClient::connect("http://localhost") {
///     Err(Error::Config(why)) => println!("mend the URL: {why}"),
///     other => panic!("{other:?}"),
/// }
/// ```
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The lease ran out or was taken away before its release. Whatever the section did since may have run beside
    /// the next holder: check what it wrote, or have the store check [`Fence`]s.
    #[error("lease on `{lock}` was lost (fence {fence})")]
    LeaseLost {
        /// The lock's name.
        lock: Box<str>,
        /// The fence of the lost lease.
        fence: Fence,
    },

    /// The time given for waiting ran out; the ticket was withdrawn. Try again later.
    #[error("`{lock}` was not acquired within {waited:?}")]
    Timeout {
        /// The lock's name.
        lock: Box<str>,
        /// How long the call waited.
        waited: Duration,
    },

    /// The calling thread holds this lock through the same client already, so waiting would never end. Pass the
    /// guard down instead of locking again.
    #[error("this thread already holds `{lock}`; waiting for it would never end")]
    WouldDeadlock {
        /// The lock's name.
        lock: Box<str>,
    },

    /// As many tickets wait as `max_queue` allows. Shed the work or try again later.
    #[error("the queue of `{lock}` is full (max_queue {limit})")]
    QueueFull {
        /// The lock's name.
        lock: Box<str>,
        /// The limit that was reached.
        limit: u64,
    },

    /// A setting or an argument makes no sense; the message says what is allowed. Nothing was sent to the server.
    #[error("{0}")]
    Config(String),

    /// The server could not be reached or answered with an error. [`is_retryable`](Error::is_retryable) says
    /// whether the same call can succeed later without anybody mending anything.
    #[error("{context}: {source}")]
    Redis {
        /// What was being done, on which lock.
        context: Box<str>,
        /// The cause as the `redis` crate gives it.
        source: Box<redis::RedisError>,
    },

    /// No pooled connection came free in time although the server answers. Raise `command_pool`, or try again.
    #[error("no connection came free within {waited:?} (pool of {size})")]
    Pool {
        /// How long the call waited for a connection.
        waited: Duration,
        /// The size of the pool.
        size: u32,
    },

    /// The server is at `maxmemory` and refuses new tickets and fenced writes, of which nothing was done; leases that are
    /// held go on. Free memory on the server.
    #[error("the server is out of memory and takes nothing new for `{lock}`")]
    OutOfMemory {
        /// The lock's name, or the gate's target.
        lock: Box<str>,
    },

    /// The server is a replica, or has been demoted to one, and takes no writes. Connect to the primary.
    #[error("the server is a read-only replica: {context}")]
    ReadOnly {
        /// What was being done, on which lock.
        context: Box<str>,
    },

    /// A key of this lock holds something this library did not write, a fenced write does not fit what its key holds,
    /// or the server answered what the protocol does not know. Nothing was changed. Use another name or prefix, or
    /// remove the foreign key.
    #[error("{0}")]
    Protocol(String),

    /// A newer fence has been seen: somebody else was granted the lock since. Nothing was written; stop working.
    #[error("fence {fence} is stale: {newest} is the newest")]
    FencedOut {
        /// The fence that was refused.
        fence: Fence,
        /// The newest fence known.
        newest: Fence,
    },

    /// The key of a job was used for another payload. Nothing was begun; the caller mixed up its keys.
    #[error("the key {key} was used for another payload")]
    PayloadMismatch {
        /// The job's key.
        key: Box<str>,
    },

    /// Somebody works on the job, or holds the lock that it needs. Try again later.
    #[error("{key} has to wait: `{owner}` holds its lock")]
    InProgress {
        /// The job's key.
        key: Box<str>,
        /// The client that does: `host-pid-random`.
        owner: Box<str>,
    },

    /// The operating system refused a thread. Lower the number of leases held or threads waiting at once.
    #[error("no thread could be started for `{lock}`: {why}")]
    Thread {
        /// The lock's name.
        lock: Box<str>,
        /// The operating system's words.
        why: Box<str>,
    },

    /// The SQL database could not be reached or answered with an error. What the call did is rolled back, unless
    /// the connection broke during the commit; as an equal fence may write again, the call can be repeated either
    /// way. [`is_retryable`](Error::is_retryable) tells a serialization failure, a deadlock or a busy database,
    /// after which the whole transaction may simply be run again, from what has to be mended first.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    #[error("{context}")]
    Sql {
        /// What was being done, on which table, and the database's words.
        context: Box<str>,
        /// The cause: a `postgres::Error` or a `rusqlite::Error`, to be had with `downcast_ref`.
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
}

impl Error {
    /// Whether the same call can succeed later without anybody mending anything.
    ///
    /// # Examples
    ///
    /// ```
    /// use redis_fifo_lock::Error;
    ///
    /// assert!(!Error::Config("lease is 0".into()).is_retryable());
    /// ```
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Error::Timeout { .. }
            | Error::QueueFull { .. }
            | Error::Pool { .. }
            | Error::OutOfMemory { .. }
            | Error::ReadOnly { .. }
            | Error::InProgress { .. }
            | Error::Thread { .. } => true,
            Error::Redis { source, .. } => crate::engine::is_transient(source),
            #[cfg(any(feature = "postgres", feature = "sqlite"))]
            Error::Sql { source, .. } => crate::sql::is_transient(source.as_ref()),
            Error::LeaseLost { .. }
            | Error::WouldDeadlock { .. }
            | Error::Config(_)
            | Error::Protocol(_)
            | Error::PayloadMismatch { .. }
            | Error::FencedOut { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_small_enough_to_return_by_value() {
        assert!(size_of::<Error>() <= 40, "{}", size_of::<Error>());
    }
}
