//! Connections that cannot hang, and the manager that pools them.
//!
//! Invariant: every connection has a connect, a read and a write timeout from its first byte to its last, and one
//! that failed in any way is never pooled again: after a timed-out BLPOP it would still eat the next ring, and after
//! a half-written command it would answer the wrong question.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use log::{debug, warn};
use parking_lot::Mutex;
use redis::{Client, Cmd, Connection, ConnectionLike, FromRedisValue, RedisError, RedisResult, Value};

use super::scripts::{COUNT, SCRIPTS};
use super::wire;
use crate::clock::{self, Moment};

/// A call that was given less time than this and timed out may have met an ordinary hiccup.
const SILENCE: Duration = Duration::from_millis(100);

/// What all connections of one client share.
#[derive(Debug)]
pub(super) struct Endpoint {
    /// Where to connect and as whom; its `Debug` hides the password.
    client: Client,
    /// Bound on connecting.
    connect_timeout: Duration,
    /// Bound on reading or writing one command.
    pub(super) call_timeout: Duration,
    /// Rises whenever a connection is found dead, so that its contemporaries are not tried one after the other.
    generation: AtomicU64,
    /// When the newest call was sent that timed out, in nanoseconds of [`Moment`]. A network that dropped one
    /// connection without a word has dropped others, and a lease has no time to try them one after the other: only
    /// those that have answered since are trusted.
    silent: AtomicU64,
    /// Why the newest attempt to connect failed, if it did; r2d2 keeps only its text.
    last_error: Mutex<Option<RedisError>>,
    /// Whether the eviction policy has been looked at.
    looked: AtomicBool,
}

impl Endpoint {
    pub(super) fn new(client: Client, connect_timeout: Duration, call_timeout: Duration) -> Endpoint {
        Endpoint {
            client,
            connect_timeout,
            call_timeout,
            generation: AtomicU64::new(0),
            silent: AtomicU64::new(0),
            last_error: Mutex::new(None),
            looked: AtomicBool::new(false),
        }
    }

    /// Why there is no connection: the newest attempt failed, or has not come to an end.
    pub(super) fn unreachable(&self) -> RedisError {
        let slow = || std::io::Error::new(std::io::ErrorKind::TimedOut, "no connection came about in time");
        self.last_error.lock().clone().unwrap_or_else(|| slow().into())
    }

    /// Opens a connection; `scripts` says whether it will run them.
    fn open(&self, scripts: bool) -> RedisResult<Link> {
        let generation = self.generation.load(Ordering::Acquire);
        let conn = self.client.get_connection_with_timeout(self.connect_timeout)?;
        conn.set_read_timeout(Some(self.call_timeout))?;
        conn.set_write_timeout(Some(self.call_timeout))?;
        let mut link = Link {
            conn,
            digests: Default::default(),
            generation,
            answered: clock::now(),
            broken: false,
            in_flight: false,
            read_timeout: self.call_timeout,
            cmd: Cmd::new(),
        };
        if scripts {
            self.prepare(&mut link)?;
        }
        Ok(link)
    }

    /// Loads the scripts, and looks at the eviction policy once per client, all in one round trip.
    fn prepare(&self, link: &mut Link) -> RedisResult<()> {
        let look = !self.looked.load(Ordering::Relaxed);
        let mut pipe = redis::pipe();
        for script in &SCRIPTS {
            pipe.cmd("SCRIPT").arg("LOAD").arg(script.source);
        }
        if look {
            pipe.cmd("INFO").arg("memory");
        }
        // A server that does not let us read its settings, or load scripts ahead, still runs them.
        pipe.ignore_errors();
        let replies: Vec<RedisResult<Value>> = pipe.query(&mut link.conn)?;
        let mut replies = replies.into_iter();
        for (digest, reply) in link.digests.iter_mut().zip(replies.by_ref().take(COUNT)) {
            if let Err(error) = &reply
                && error.code() == Some("NOAUTH")
            {
                // Said here, because the next call would only hear that it has too many words for a stranger.
                return Err(error.clone());
            }
            *digest = reply.and_then(|value| Ok(String::from_redis_value(value)?)).unwrap_or_default();
        }
        if look && !self.looked.swap(true, Ordering::Relaxed) {
            match replies.next() {
                Some(Ok(info)) => warn_of_eviction(&String::from_redis_value(info).unwrap_or_default()),
                other => debug!("the server's eviction policy is not known: {other:?}"),
            }
        }
        Ok(())
    }
}

/// Says once that the server may throw away held locks: they carry no TTL, so only `allkeys-*` can.
fn warn_of_eviction(info: &str) {
    let policy = info.lines().find_map(|line| line.trim().strip_prefix("maxmemory_policy:"));
    if let Some(policy) = policy.filter(|policy| policy.starts_with("allkeys")) {
        warn!(
            "the server's maxmemory-policy is {policy}: under memory pressure it can evict a held lock or its \
             queue; set noeviction or a volatile policy, or give locks a server of their own"
        );
    }
}

/// One connection.
pub(super) struct Link {
    conn: Connection,
    /// SHA-1 of each script as the server gave it; empty if it would not load one.
    digests: [String; COUNT],
    /// The endpoint's generation when this was opened.
    generation: u64,
    /// When it last answered.
    answered: Moment,
    /// Set by the first failure.
    broken: bool,
    /// Set while an answer is due: a panic in between would leave it to the next user.
    in_flight: bool,
    /// The read timeout the socket has now.
    read_timeout: Duration,
    /// The command buffer, used again for each call.
    cmd: Cmd,
}

impl Link {
    /// Runs script `index` with whatever `encode` appends, and reads its answer within `timeout`.
    pub(super) fn run(
        &mut self,
        endpoint: &Endpoint,
        index: usize,
        timeout: Duration,
        encode: impl Fn(&mut Cmd),
    ) -> RedisResult<Value> {
        let mut cmd = std::mem::take(&mut self.cmd);
        cmd.clear();
        cmd.arg("EVALSHA").arg(&*self.digests[index]);
        encode(&mut cmd);
        let mut result = self.ask(endpoint, &cmd, timeout);
        let unknown =
            |error: &RedisError| error.kind() == redis::ErrorKind::Server(redis::ServerErrorKind::NoScript);
        if result.as_ref().is_err_and(unknown) {
            // Flushed, restarted or failed over. EVAL runs the script and loads it again, in one step.
            cmd.clear();
            cmd.arg("EVAL").arg(SCRIPTS[index].source);
            encode(&mut cmd);
            result = self.ask(endpoint, &cmd, timeout);
        }
        self.cmd = cmd;
        result
    }

    /// Sends one command and reads its answer within `timeout`, which is also a bound on sending it.
    pub(super) fn ask(&mut self, endpoint: &Endpoint, cmd: &Cmd, timeout: Duration) -> RedisResult<Value> {
        // A socket takes no zero timeout, and would take it for none at all.
        let timeout = timeout.max(Duration::from_millis(1));
        let sent = clock::now();
        self.in_flight = true;
        let result = self.set_read_timeout(timeout).and_then(|()| self.conn.req_command(cmd));
        self.in_flight = false;
        // The crate hands an error reply over as a value; it has to be judged like any other error.
        let result = result.and_then(|value| value.extract_error());
        if let Err(error) = &result {
            self.judge(endpoint, error);
            if error.is_timeout() && timeout >= SILENCE {
                endpoint.silent.fetch_max(sent.as_nanos(), Ordering::AcqRel);
            }
        }
        if !self.broken {
            self.answered = clock::now();
        }
        result
    }

    fn set_read_timeout(&mut self, timeout: Duration) -> RedisResult<()> {
        if self.read_timeout != timeout {
            self.conn.set_read_timeout(Some(timeout))?;
            self.read_timeout = timeout;
        }
        Ok(())
    }

    /// Marks the connection as broken unless the server just said no.
    fn judge(&mut self, endpoint: &Endpoint, error: &RedisError) {
        use redis::ErrorKind::{Extension, Io, Parse, Server};
        use redis::ServerErrorKind::{BusyLoading, ClusterDown, MasterDown};
        match error.kind() {
            // A demoted primary answers READONLY on every pooled connection; drop them all.
            Server(BusyLoading | MasterDown | ClusterDown) => self.outdate(endpoint),
            Server(_) if wire::says(error, "READONLY") => self.outdate(endpoint),
            Io | Parse => {
                // A signal says nothing about the other connections; a closed one says that they are closed too.
                if error.is_connection_dropped() {
                    self.outdate(endpoint);
                }
                self.broken = true;
            }
            Server(_) => {}
            Extension if error.code() != Some("UNBLOCKED") => {}
            _ => self.broken = true,
        }
    }

    /// Has this connection and all of its age dropped.
    fn outdate(&mut self, endpoint: &Endpoint) {
        self.broken = true;
        endpoint.generation.fetch_max(self.generation + 1, Ordering::AcqRel);
    }
}

/// Opens pooled connections.
#[derive(Debug)]
pub(super) struct Manager {
    pub(super) endpoint: Arc<Endpoint>,
    /// Whether these connections run scripts.
    pub(super) scripts: bool,
}

impl r2d2::ManageConnection for Manager {
    type Connection = Link;
    type Error = RedisError;

    fn connect(&self) -> Result<Link, RedisError> {
        let opened = self.endpoint.open(self.scripts);
        *self.endpoint.last_error.lock() = opened.as_ref().err().cloned();
        opened
    }

    /// Looks at what is known without asking the server: no PING per checkout.
    fn is_valid(&self, link: &mut Link) -> Result<(), RedisError> {
        let silent = Moment::from_nanos(self.endpoint.silent.load(Ordering::Acquire));
        if link.generation < self.endpoint.generation.load(Ordering::Acquire) || link.answered < silent {
            return Err(RedisError::from((redis::ErrorKind::Io, "others of its age were found dead")));
        }
        Ok(())
    }

    fn has_broken(&self, link: &mut Link) -> bool {
        link.broken || link.in_flight
    }
}
