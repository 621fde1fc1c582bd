//! The engine inside this process: the state machine behind a mutex, its bells behind a condition variable.
//!
//! Invariant: exactly one thread at a time runs a transition, as on a server; nothing outlives the process.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::{Bell, Engine, Failure, Heard};
use crate::clock::{self, Moment};
use crate::keys::{GateKeys, LockKeys};
#[cfg(feature = "idempotency")]
use crate::protocol::job::{self, Job};
use crate::protocol::keyspace::{Content, Keyspace};
use crate::protocol::{Command, Record, Reply, State, Terms, apply, gate};

/// After this many calls, locks of which no key is left are forgotten.
const SWEEP_EVERY: u32 = 1024;

/// A server inside this process, for tests and for programs that do not need more than one process.
///
/// Clients made of clones of one `MemoryServer` share its locks, as processes share a Redis. Nothing survives the
/// process.
///
/// # Examples
///
/// ```
/// use redis_fifo_lock::{LockClient, MemoryServer};
///
/// let server = MemoryServer::new();
/// let (a, b) = (LockClient::options().memory(&server).build()?, LockClient::options().memory(&server).build()?);
/// let held = a.fifo_lock("invoices")?.lock()?;
/// assert!(b.fifo_lock("invoices")?.try_lock()?.is_none());
/// held.unlock()?;
/// assert!(b.fifo_lock("invoices")?.try_lock()?.is_some());
/// # Ok::<(), redis_fifo_lock::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct MemoryServer {
    inner: Arc<Inner>,
}

/// What the clones share.
#[derive(Default)]
struct Inner {
    locks: Mutex<Locks>,
    /// Notified when a bell was rung.
    rung: Condvar,
}

/// All locks of the server.
#[derive(Default)]
struct Locks {
    /// By the key of the record.
    states: HashMap<Box<str>, State>,
    /// Gates, and what is written through them.
    keys: Keyspace,
    /// Jobs, by the key of the record.
    #[cfg(feature = "idempotency")]
    jobs: HashMap<Box<str>, Job>,
    /// Calls since the last sweep.
    calls: u32,
    /// The newest time given out, microseconds: a server's clock that is stepped back is not what memory is for.
    newest_us: u64,
}

impl Locks {
    fn now(&mut self) -> u64 {
        self.newest_us = self.newest_us.max(clock::unix_us());
        self.newest_us
    }

    /// Forgets locks of which no key is left.
    fn sweep(&mut self, now_us: u64) {
        self.calls += 1;
        if self.calls >= SWEEP_EVERY {
            self.calls = 0;
            self.states.retain(|_, state| {
                state.expire(now_us);
                !state.is_empty()
            });
            self.keys.expire(now_us);
            #[cfg(feature = "idempotency")]
            self.jobs.retain(|_, job| job.expires > now_us);
        }
    }

    /// The record of the lock whose record is the key `lock`.
    fn record(states: &mut HashMap<Box<str>, State>, lock: &str, now_us: u64) -> Option<Record> {
        let state = states.get_mut(lock)?;
        state.expire(now_us);
        state.record.clone()
    }
}

impl MemoryServer {
    /// Starts a server of its own.
    #[must_use]
    pub fn new() -> MemoryServer {
        MemoryServer::default()
    }

    /// What stands at a key that was written through a [`FenceGate`](crate::fence::FenceGate), as `GET`, `HGETALL`,
    /// `LRANGE`, `SMEMBERS` or `ZRANGE … WITHSCORES` (here in the order of the members) would give it; `Nil` if there is
    /// no such key.
    ///
    /// # Examples
    ///
    /// ```
    /// use redis_fifo_lock::redis::Value;
    /// use redis_fifo_lock::{LockClient, MemoryServer};
    ///
    /// let server = MemoryServer::new();
    /// let locks = LockClient::options().memory(&server).build()?;
    /// locks.gate("report:7")?.set_if_fresh("42".parse()?, "draft")?;
    /// assert_eq!(server.value("report:7"), Value::BulkString(b"draft".to_vec()));
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    #[must_use]
    pub fn value(&self, key: &str) -> redis::Value {
        let mut locks = self.inner.locks.lock();
        let now_us = locks.now();
        let text = |bytes: &[u8]| redis::Value::BulkString(bytes.to_vec());
        let all = match locks.keys.get(key, now_us) {
            None => return redis::Value::Nil,
            Some(Content::String(value)) => return text(value),
            Some(Content::Hash(fields)) => fields.iter().flat_map(|(f, v)| [text(f), text(v)]).collect(),
            Some(Content::List(items)) => items.iter().map(|item| text(item)).collect(),
            Some(Content::Set(members)) => members.iter().map(|member| text(member)).collect(),
            Some(Content::Sorted(members)) => {
                members.iter().flat_map(|(m, score)| [text(m), text(score.to_string().as_bytes())]).collect()
            }
        };
        redis::Value::Array(all)
    }
}

impl fmt::Debug for MemoryServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryServer").field("locks", &self.inner.locks.lock().states.len()).finish()
    }
}

impl Engine for MemoryServer {
    fn call(&self, keys: &LockKeys, terms: &Terms, command: &Command, _by: Moment) -> Result<Reply, Failure> {
        let mut locks = self.inner.locks.lock();
        let now_us = locks.now();
        locks.sweep(now_us);
        let state = locks.states.entry(keys.lock.clone()).or_default();
        let reply = apply(state, now_us, terms, command);
        let rung = !state.bells.is_empty();
        drop(locks);
        if rung {
            self.inner.rung.notify_all();
        }
        Ok(reply)
    }

    fn gate(&self, keys: &GateKeys, call: &gate::Call, _by: Moment) -> Result<gate::Reply, Failure> {
        let mut locks = self.inner.locks.lock();
        let now_us = locks.now();
        locks.sweep(now_us);
        let record = keys.lock.as_ref().and_then(|lock| Locks::record(&mut locks.states, lock, now_us));
        Ok(gate::apply(&mut locks.keys, &keys.gate, record.as_ref(), now_us, call))
    }

    #[cfg(feature = "idempotency")]
    fn job(&self, keys: &LockKeys, job: &str, call: &job::Call, _by: Moment) -> Result<job::Reply, Failure> {
        let mut locks = self.inner.locks.lock();
        let now_us = locks.now();
        locks.sweep(now_us);
        let record = Locks::record(&mut locks.states, &keys.lock, now_us);
        let mut slot = locks.jobs.remove(job);
        let reply = job::apply(&mut slot, record.as_ref(), now_us, call);
        if let Some(kept) = slot {
            locks.jobs.insert(job.into(), kept);
        }
        Ok(reply)
    }

    fn bell(&self, keys: &LockKeys, _by: Moment) -> Result<Box<dyn Bell>, Failure> {
        let client = keys.bell.rsplit(':').next().unwrap_or_default();
        Ok(Box::new(MemoryBell { server: self.clone(), lock: keys.lock.clone(), client: client.into() }))
    }
}

/// A bell on a memory server.
struct MemoryBell {
    server: MemoryServer,
    /// The key of the record.
    lock: Box<str>,
    /// Whose bell it is.
    client: Box<str>,
}

impl Bell for MemoryBell {
    fn listen(&mut self, wait: Duration) -> Result<Heard, Failure> {
        let until = clock::now().after(wait);
        let mut locks = self.server.inner.locks.lock();
        loop {
            let now_us = locks.now();
            if let Some(ring) =
                locks.states.get_mut(&self.lock).and_then(|state| state.pop_bell(&self.client, now_us))
            {
                return Ok(Heard::Ring(ring));
            }
            let left = until.left();
            if left.is_zero() {
                return Ok(Heard::Nothing);
            }
            self.server.inner.rung.wait_for(&mut locks, left);
        }
    }
}
