//! `FenceGate`: writes that a stale holder cannot make.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::Fence;
use super::tx::Tx;
use crate::client::{LockClient, Shared};
use crate::clock;
use crate::error::Error;
use crate::fifo_lock::FifoLock;
use crate::keys::GateKeys;
use crate::protocol::gate::{Call, Reply};
use crate::protocol::keyspace::{Answer, Change, Life, Write};
use crate::settings::{LONGEST, millis, within};

/// The shortest time a gate can be told to remember its fence.
const SHORTEST_MEMORY: Duration = Duration::from_secs(60);

/// A gate in front of a *target*: it remembers the newest fence that wrote, and lets no older one write.
///
/// A lease cannot stop a holder that was frozen for longer than it and writes when it wakes. A gate can, if every write
/// to the target goes through it: the fence is compared and the write is made in one step on the server.
///
/// The target is a Redis key, the one that [`set_if_fresh`](FenceGate::set_if_fresh) writes;
/// [`apply`](FenceGate::apply) writes any keys. Whoever writes the same target must use the same gate: those of
/// different locks, and the one of no lock, know nothing of each other.
///
/// # Two kinds
///
/// | made by | refuses a fence | key |
/// |---|---|---|
/// | [`LockClient::gate`] | older than one that wrote before | `PREFIX:gate:{TARGET}` |
/// | [`FifoLock::gate`] | that too, and from the moment *somebody else was granted the lock*, before he writes anything | `PREFIX:{NAME}:gate:TARGET` |
///
/// # What holds when data is lost
///
/// * *The gate's key is lost* (flushed, deleted, evicted, forgotten after [`remember`](FenceGate::remember)): the live
///   holder is not refused, for nothing is newer than its fence. A gate bound to a lock goes on refusing everybody whose
///   fence is older than the newest grant, as long as the lock's record is there. A gate of no lock lets any fence in
///   once, and is the gate again from that write on.
/// * *The lock's record is lost* (it also goes by itself when the lock was idle for long): whatever is older than the
///   newest fence that wrote stays refused. The next grant gets a newer fence than all before it, as fences follow the
///   server's clock; so its holder is not refused, unless that clock was set back at the same time.
/// * *Both are lost*: nobody is refused until the next grant or the next write.
///
/// A gate's key has no expiry unless `remember` sets one, so no eviction policy for keys that expire can take it. It is
/// one small key for each target.
///
/// # On a cluster
///
/// All keys of one call must be in one slot. A gate of no lock is in the slot of its target; the other keys of an
/// `apply` have to share the target's hash tag. A gate of the lock `NAME` is in the lock's slot, so the target and all
/// keys need the hash tag `{NAME}`.
///
/// # Examples
///
/// ```
/// use redis_fifo_lock::{Error, LockClient};
///
/// let lock = LockClient::memory().fifo_lock("invoices")?;
/// let gate = lock.gate("invoices:total")?;
/// let guard = lock.lock()?;
/// let fence = guard.fence();
/// gate.set_if_fresh(fence, "117")?;
/// guard.unlock()?;
///
/// let _successor = lock.lock()?; // has written nothing yet
/// assert!(matches!(gate.set_if_fresh(fence, "118"), Err(Error::FencedOut { .. })));
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone)]
pub struct FenceGate {
    shared: Arc<Shared>,
    keys: Arc<GateKeys>,
    /// How long the server remembers the fence after the last write, milliseconds.
    remember_ms: Option<u64>,
}

impl LockClient {
    /// Makes a gate in front of the key `target`, for fences of whatever origin.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if `target` has not 1 to 1024 bytes or is a key of a lock or a gate.
    ///
    /// # Examples
    ///
    /// ```
    /// use redis_fifo_lock::{Error, Fence, LockClient};
    ///
    /// let gate = LockClient::memory().gate("report:7")?;
    /// gate.set_if_fresh("42".parse()?, "draft")?;
    /// match gate.set_if_fresh("41".parse()?, "late") {
    ///     Err(Error::FencedOut { newest, .. }) => assert_eq!(newest.get(), 42),
    ///     other => panic!("{other:?}"),
    /// }
    /// # Ok::<(), Error>(())
    /// ```
    pub fn gate(&self, target: &str) -> Result<FenceGate, Error> {
        let keys = GateKeys::new(&self.shared().prefix, target, None)?;
        Ok(FenceGate { shared: Arc::clone(self.shared()), keys: Arc::new(keys), remember_ms: None })
    }
}

impl FifoLock {
    /// Makes a gate in front of the key `target` that also refuses whoever is not the newest holder of this lock.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if `target` has not 1 to 1024 bytes or is a key of a lock or a gate.
    ///
    /// # Examples
    ///
    /// See [`FenceGate`](crate::fence::FenceGate).
    pub fn gate(&self, target: &str) -> Result<FenceGate, Error> {
        let shared = &self.room().shared;
        let keys = GateKeys::new(&shared.prefix, target, Some(&self.room().keys))?;
        Ok(FenceGate { shared: Arc::clone(shared), keys: Arc::new(keys), remember_ms: None })
    }
}

impl FenceGate {
    /// Has the server forget the gate's fence when nothing was written for so long. Defaults to never; 1 min to 10
    /// years are allowed.
    ///
    /// A fence that is forgotten too early lets a stale write pass: the time must exceed the longest that any writer
    /// can be frozen, and a key that expires can be evicted under a `volatile-*` policy.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if the time is out of bounds.
    pub fn remember(mut self, time: Duration) -> Result<FenceGate, Error> {
        within("remember", time, SHORTEST_MEMORY, LONGEST)?;
        self.remember_ms = Some(millis(time));
        Ok(self)
    }

    /// The key the gate stands in front of.
    #[must_use]
    pub fn target(&self) -> &str {
        &self.keys.target
    }

    /// Sets the target to `value`, whatever its type was, unless a newer fence is known. Its time to live, if it has one,
    /// goes on.
    ///
    /// # Errors
    ///
    /// [`Error::FencedOut`] if a newer fence is known; nothing was changed. Else as [`apply`](FenceGate::apply), but a
    /// call whose answer was lost is repeated, so an error of the connection is seldom.
    pub fn set_if_fresh(&self, fence: Fence, value: impl AsRef<[u8]>) -> Result<(), Error> {
        let change = Change::Set { value: value.as_ref().into(), life: Life::Keep, present: None };
        let write = Write { key: self.keys.target.clone(), change };
        self.write(fence, vec![write], true).map(|_| ())
    }

    /// Notes that `fence` wrote somewhere else, unless a newer one is known: older ones are refused from now on.
    ///
    /// # Errors
    ///
    /// As [`set_if_fresh`](FenceGate::set_if_fresh).
    ///
    /// # Examples
    ///
    /// ```
    /// # let lock = redis_fifo_lock::LockClient::memory().fifo_lock("invoices")?;
    /// let gate = lock.gate("shelf:7")?;
    /// let guard = lock.lock()?;
    /// gate.check_and_advance(guard.fence())?; // whoever held the lock before is out
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn check_and_advance(&self, fence: Fence) -> Result<(), Error> {
        self.write(fence, Vec::new(), true).map(|_| ())
    }

    /// Whether a write with `fence` would be let through. For diagnosis only: it is old news as soon as it is read, and
    /// protects nothing. To protect a write, make it through the gate.
    ///
    /// # Errors
    ///
    /// As [`current_max`](FenceGate::current_max).
    pub fn check(&self, fence: Fence) -> Result<bool, Error> {
        Ok(self.current_max()?.is_none_or(|newest| fence >= newest))
    }

    /// The newest fence that the gate, and the record of the lock it is bound to, know: the lowest that can write.
    ///
    /// # Errors
    ///
    /// [`Error::Redis`], [`Error::Pool`] if the server cannot be reached, [`Error::Protocol`] if the gate's key or the
    /// lock's record holds something foreign.
    pub fn current_max(&self) -> Result<Option<Fence>, Error> {
        match self.call(&Call::Newest, true)? {
            Reply::Newest(newest) => Ok(Fence::new(newest)),
            other => Err(unexpected(&other)),
        }
    }

    /// Makes a list of writes, all or none, in one step, unless a newer fence is known; gives the answer of each.
    ///
    /// The closure only lists them, on a [`Tx`]; it runs before anything is sent. An equal fence may write again.
    ///
    /// *All or none*: whatever can make a write fail is checked before the first is made. The fence, the type of each
    /// key as the writes before it leave it, and the range of each number that is incremented are checked by the script;
    /// the arguments when they are listed. Should the server be out of memory, it refuses the first write. A Redis user
    /// who is not permitted one of the commands is refused before the first as well; only Redis 6.2, which cannot tell
    /// beforehand, stops in the middle then.
    ///
    /// A call whose connection broke before the answer came may have been carried out. As an equal fence may write
    /// again, it can be repeated if making the same writes twice does no harm; it is not repeated by itself.
    ///
    /// # Errors
    ///
    /// [`Error::FencedOut`] if a newer fence is known, [`Error::Config`] if an argument was refused, [`Error::Protocol`]
    /// if a key has another type, or a number cannot be incremented, [`Error::OutOfMemory`], [`Error::ReadOnly`]; nothing
    /// was changed. [`Error::Redis`] and [`Error::Pool`] if the server cannot be reached.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use redis_fifo_lock::fence::Answer;
    ///
    /// # let lock = redis_fifo_lock::LockClient::memory().fifo_lock("invoices")?;
    /// let gate = lock.gate("invoice:7")?;
    /// let guard = lock.lock()?;
    /// let answers = gate.apply(guard.fence(), |tx| {
    ///     tx.hset("invoice:7", [("state", "sent"), ("total", "117")])
    ///         .incr_by("invoices:sent", 1)
    ///         .rpush("invoices:log", ["7 sent"])
    ///         .expire("invoices:log", Duration::from_secs(3600));
    /// })?;
    /// assert_eq!(answers, [Answer::Count(2), Answer::Number(1), Answer::Count(1), Answer::Done]);
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn apply(&self, fence: Fence, list: impl FnOnce(&mut Tx)) -> Result<Vec<Answer>, Error> {
        let mut tx = Tx::new(&self.shared.prefix);
        list(&mut tx);
        self.write(fence, tx.into_writes()?, false)
    }

    /// Sends writes; `repeatable` says whether making them twice is the same as making them once.
    fn write(&self, fence: Fence, writes: Vec<Write>, repeatable: bool) -> Result<Vec<Answer>, Error> {
        let call = Call::Apply { fence: fence.get(), remember_ms: self.remember_ms, writes };
        let refused = |index: usize, why: &str| {
            let Call::Apply { writes, .. } = &call else { return Error::Protocol(why.into()) };
            let (command, key) = writes.get(index).map_or(("?", "?"), |w| (w.change.command(), &w.key));
            Error::Protocol(format!("{command} `{key}`: {why}; nothing was changed"))
        };
        match self.call(&call, repeatable)? {
            Reply::Applied(answers) => Ok(answers),
            Reply::FencedOut(newest) => match Fence::new(newest) {
                Some(newest) => Err(Error::FencedOut { fence, newest }),
                None => Err(Error::Protocol(format!("{newest} is not a fence"))),
            },
            Reply::WrongType(index, kind) => Err(refused(index, &format!("the key holds a {}", kind.word()))),
            Reply::NoNumber(index) => {
                Err(refused(index, "what stands there is no whole number, or the sum would be out of range"))
            }
            Reply::NotPermitted(index) => {
                Err(refused(index, "the server does not permit this user the command"))
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Sends a call; once more if its answer was lost and it is `repeatable`, or if it was never sent.
    fn call(&self, call: &Call, repeatable: bool) -> Result<Reply, Error> {
        let deadline = clock::now().after(self.shared.call_timeout);
        match self.shared.engine.gate(&self.keys, call, deadline) {
            Err(failure) if failure.retry && (repeatable || !failure.sent) && clock::now() < deadline => {
                self.shared.engine.gate(&self.keys, call, deadline).map_err(|failure| failure.error)
            }
            result => result.map_err(|failure| failure.error),
        }
    }
}

fn unexpected(reply: &Reply) -> Error {
    Error::Protocol(format!("a call at a gate was answered with {reply:?}"))
}

impl fmt::Debug for FenceGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FenceGate")
            .field("target", &self.target())
            .field("bound", &self.keys.lock.is_some())
            .finish_non_exhaustive()
    }
}
