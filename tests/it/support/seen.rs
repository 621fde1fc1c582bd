//! A lock as it stands on the server, read past the library.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use redis::{Cmd, Connection, FromRedisValue, cmd};
use redis_fifo_lock::protocol::{Record, TicketId};
use redis_fifo_lock::{FifoLock, LockClient, LockGuard};

use super::eventually;
use super::server::Server;

/// Much longer than anything takes here, on a busy machine, too.
const PATIENCE: Duration = Duration::from_secs(20);

/// Makes a client of its own: to the server, another process.
#[track_caller]
pub(crate) fn client(url: &str) -> LockClient {
    LockClient::connect(url).expect("a client")
}

/// Waits its turn and takes the lock; a test that would wait for ever fails.
#[track_caller]
pub(crate) fn take(lock: &FifoLock) -> LockGuard {
    lock.try_lock_for(PATIENCE).expect("an answer").expect("the lock in time")
}

/// A look at the keys of one lock.
pub(crate) struct Seen {
    connection: Mutex<Connection>,
    name: String,
}

impl Seen {
    pub(crate) fn of(server: &Server, name: &str) -> Self {
        Self { connection: Mutex::new(server.connection()), name: name.to_owned() }
    }

    /// A key of the lock: `lock`, `queue`, `lost` or `bell:CLIENT`.
    pub(crate) fn key(&self, kind: &str) -> String {
        format!("fifo:{{{}}}:{kind}", self.name)
    }

    /// The record; `None` if there is none.
    pub(crate) fn record(&self) -> Option<Record> {
        let text: Option<String> = self.query(cmd("GET").arg(self.key("lock")));
        text.map(|text| Record::parse(&text).unwrap_or_else(|| panic!("not a record: {text:?}")))
    }

    /// The ticket that the record names as holder.
    pub(crate) fn holder(&self) -> Option<TicketId> {
        self.record()?.holder
    }

    /// The fence of the holder; `None` without one.
    pub(crate) fn held_with(&self) -> Option<u64> {
        self.record().filter(|record| record.holder.is_some()).map(|record| record.fence)
    }

    /// The queued tickets, first first.
    pub(crate) fn queue(&self) -> Vec<String> {
        self.query(cmd("ZRANGE").arg(self.key("queue")).arg(0).arg(-1))
    }

    /// The number of queued tickets.
    pub(crate) fn waiting(&self) -> usize {
        self.query(cmd("ZCARD").arg(self.key("queue")))
    }

    /// Waits until exactly `count` tickets are queued.
    #[track_caller]
    pub(crate) fn wait_for_queue(&self, count: usize) {
        eventually(PATIENCE, &format!("{count} tickets are queued"), || self.waiting() == count);
    }

    /// Removes the record, as a person or a failover can.
    pub(crate) fn lose_record(&self) {
        let lost: usize = self.query(cmd("DEL").arg(self.key("lock")));
        assert_eq!(lost, 1, "there was no record to lose");
    }

    #[track_caller]
    pub(crate) fn query<T: FromRedisValue>(&self, command: &Cmd) -> T {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        command.query(&mut *connection).expect("an answer from the test's server")
    }
}
