//! The engine that runs the scripts on a Redis server, over three pools: one for calls, one for bells, and a small one
//! for renewals and releases that find the first one used up.
//!
//! Invariant: neither a blocked bell nor a call that hangs holds a connection that a renewal or a release could need.

use std::sync::Arc;
use std::time::Duration;

use r2d2::{NopErrorHandler, Pool, PooledConnection};
use redis::{Cmd, FromRedisValue, IntoConnectionInfo, RedisError, Value};
use scheduled_thread_pool::{OnPoolDropBehavior, ScheduledThreadPool};

use super::connection::{Endpoint, Manager};
#[cfg(feature = "idempotency")]
use super::job_wire;
use super::{Bell, Engine, Failure, Heard, gate_wire, scripts, wire};
use crate::clock::{self, Moment};
use crate::error::Error;
use crate::keys::{GateKeys, LockKeys};
#[cfg(feature = "idempotency")]
use crate::protocol::job;
use crate::protocol::{Command, Reply, Terms, gate};

/// How much longer than its own timeout a BLPOP may take to answer: the server looks at its clock ten times a second.
const BELL_GRACE: Duration = Duration::from_secs(1);

/// The shortest BLPOP: below, Redis 6.2 and 7.0.0 to 7.0.7 round down to 0 and block for ever (redis/redis#11687).
const SHORTEST_LISTEN: Duration = Duration::from_millis(50);

/// Idle pooled connections are closed after this long.
const IDLE_CONNECTION: Duration = Duration::from_secs(60);

/// Connections in reserve. With the one that listens this makes two beyond the pool, however many wait for a lock; one that
/// hangs is dropped within a quarter of the lease and replaced.
const RESERVE: u32 = 1;

/// What an engine is made of.
#[derive(Debug, Clone)]
pub(crate) struct RedisOptions {
    /// Connections for calls.
    pub(crate) command_pool: u32,
    /// Connections for bells.
    pub(crate) bell_connections: u32,
    /// Bound on connecting.
    pub(crate) connect_timeout: Duration,
    /// Bound on one call.
    pub(crate) call_timeout: Duration,
}

/// The Redis engine.
pub(crate) struct RedisEngine {
    endpoint: Arc<Endpoint>,
    options: RedisOptions,
    commands: Pool<Manager>,
    /// For renewals and releases alone, while `commands` is used up.
    reserve: Pool<Manager>,
    bells: Pool<Manager>,
}

impl RedisEngine {
    /// Prepares the pools; connects nothing yet.
    pub(crate) fn new(client: &redis::Client, options: RedisOptions) -> Result<RedisEngine, Error> {
        let info = client.get_connection_info().clone();
        let tcp = info
            .tcp_settings()
            .clone()
            // The crate leaves Nagle on, which would hold back the second of two small commands.
            .set_nodelay(true)
            .set_keepalive(keepalive());
        let unusable =
            |error: RedisError| Error::Config(format!("the server's address is not usable: {error}"));
        let info = info.into_connection_info().map_err(unusable)?.set_tcp_settings(tcp);
        let client = redis::Client::open(info).map_err(unusable)?;
        let endpoint = Arc::new(Endpoint::new(client, options.connect_timeout, options.call_timeout));
        let workers = ScheduledThreadPool::builder()
            .num_threads(2)
            .thread_name_pattern("fifo-pool-{}")
            // Else they outlive the pools until these would have been looked through the next time, half a minute.
            .on_drop_behavior(OnPoolDropBehavior::DiscardPendingScheduled)
            .build();
        let workers = Arc::new(workers);
        let pool = |max_size: u32, scripts: bool| {
            Pool::builder()
                .max_size(max_size)
                .min_idle(Some(0))
                // No PING: `is_valid` only compares two numbers.
                .test_on_check_out(true)
                .max_lifetime(None)
                .idle_timeout(Some(IDLE_CONNECTION))
                .connection_timeout(options.connect_timeout)
                .error_handler(Box::new(NopErrorHandler))
                .thread_pool(Arc::clone(&workers))
                .build_unchecked(Manager { endpoint: Arc::clone(&endpoint), scripts })
        };
        let commands = pool(options.command_pool, true);
        let reserve = pool(RESERVE, true);
        let bells = pool(options.bell_connections, false);
        Ok(RedisEngine { endpoint, options, commands, reserve, bells })
    }

    /// The pool for a call: the reserve only if nothing else is to be had.
    ///
    /// Calls of waiters may take longer than a lease when the server does not answer. They may have all of `commands`
    /// for so long, and a lease must not lapse for want of a connection then.
    fn pool(&self, command: &Command) -> &Pool<Manager> {
        let urgent = matches!(command, Command::Renew { .. } | Command::Release { .. });
        let used_up = |state: r2d2::State| {
            state.idle_connections == 0 && state.connections >= self.options.command_pool
        };
        if urgent && used_up(self.commands.state()) { &self.reserve } else { &self.commands }
    }

    /// Runs script `index` on a connection of `pool`, with whatever `encode` appends; `failed` judges an error and
    /// whether it came after sending.
    fn run(
        &self,
        pool: &Pool<Manager>,
        index: usize,
        by: Moment,
        encode: impl Fn(&mut Cmd),
        failed: impl Fn(RedisError, bool) -> Failure,
    ) -> Result<Value, Failure> {
        let mut link = self.checkout(pool, by, |error| failed(error, false))?;
        let timeout = if by == Moment::NEVER {
            self.options.call_timeout
        } else {
            by.left().min(self.options.call_timeout)
        };
        link.run(&self.endpoint, index, timeout, encode).map_err(|error| failed(error, true))
    }

    /// Takes a connection, waiting for one no longer than the connect timeout and `by` allow.
    fn checkout(
        &self,
        pool: &Pool<Manager>,
        by: Moment,
        failed: impl Fn(RedisError) -> Failure,
    ) -> Result<PooledConnection<Manager>, Failure> {
        if let Some(link) = pool.try_get() {
            return Ok(link);
        }
        let start = clock::now();
        // r2d2 adds this to an Instant, so it must be a sane number.
        let wait = by.since(start).min(self.options.connect_timeout);
        pool.get_timeout(wait).map_err(|_| {
            // A pool that lacks connections would have made one, if the server had let it. r2d2 tries again in its own
            // time, so the attempt that failed may have been an earlier one, or may still be under way.
            if pool.state().connections < pool.max_size() {
                return failed(self.endpoint.unreachable());
            }
            let error = Error::Pool { waited: clock::now().since(start), size: pool.max_size() };
            Failure { error, sent: false, retry: true }
        })
    }
}

/// Finds a peer that is gone without a word within about a minute.
fn keepalive() -> redis::io::tcp::socket2::TcpKeepalive {
    redis::io::tcp::socket2::TcpKeepalive::new()
        .with_time(Duration::from_secs(30))
        .with_interval(Duration::from_secs(10))
}

impl Engine for RedisEngine {
    fn call(&self, keys: &LockKeys, terms: &Terms, command: &Command, by: Moment) -> Result<Reply, Failure> {
        let encode = |cmd: &mut Cmd| wire::encode(cmd, keys, terms, command);
        let failed = |error, sent| wire::call_failure(keys, command, error, sent);
        let value = self.run(self.pool(command), scripts::index(command), by, encode, failed)?;
        wire::decode(command, &value).map_err(|error| Failure { error, sent: true, retry: false })
    }

    fn gate(&self, keys: &GateKeys, call: &gate::Call, by: Moment) -> Result<gate::Reply, Failure> {
        let encode = |cmd: &mut Cmd| gate_wire::encode(cmd, keys, call);
        let failed = |error, sent| gate_wire::failure(keys, error, sent);
        let value = self.run(&self.commands, scripts::gate_index(call), by, encode, failed)?;
        gate_wire::decode(call, &value).map_err(|error| Failure { error, sent: true, retry: false })
    }

    #[cfg(feature = "idempotency")]
    fn job(&self, keys: &LockKeys, job: &str, call: &job::Call, by: Moment) -> Result<job::Reply, Failure> {
        let encode = |cmd: &mut Cmd| job_wire::encode(cmd, keys, job, call);
        let failed = |error, sent| job_wire::failure(keys, job, call, error, sent);
        let value = self.run(&self.commands, scripts::job_index(call), by, encode, failed)?;
        job_wire::decode(call, &value).map_err(|error| Failure { error, sent: true, retry: false })
    }

    fn bell(&self, keys: &LockKeys, by: Moment) -> Result<Box<dyn Bell>, Failure> {
        let link = self.checkout(&self.bells, by, |error| wire::failure(keys, "listen on", error, false))?;
        Ok(Box::new(RedisBell { link, endpoint: Arc::clone(&self.endpoint), keys: keys.clone() }))
    }
}

/// A connection that listens.
struct RedisBell {
    link: PooledConnection<Manager>,
    endpoint: Arc<Endpoint>,
    keys: LockKeys,
}

impl Bell for RedisBell {
    fn listen(&mut self, wait: Duration) -> Result<Heard, Failure> {
        let wait = wait.max(SHORTEST_LISTEN);
        let mut cmd = Cmd::new();
        cmd.arg("BLPOP").arg(&*self.keys.bell).arg(wait.as_secs_f64());
        // The server answers first: a BLPOP that we stopped waiting for would still eat the next ring.
        let answer = self
            .link
            .ask(
                &self.endpoint,
                &cmd,
                wait.saturating_add(BELL_GRACE).saturating_add(self.endpoint.call_timeout),
            )
            .and_then(|value| Ok(Option::<(Vec<u8>, Vec<u8>)>::from_redis_value(value)?))
            .map_err(|error| wire::failure(&self.keys, "listen on", error, true))?;
        Ok(match answer {
            None => Heard::Nothing,
            Some((_, ring)) => wire::ring(&ring).map_or(Heard::Noise, Heard::Ring),
        })
    }
}

impl std::fmt::Debug for RedisEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisEngine").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}
