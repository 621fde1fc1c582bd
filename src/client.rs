//! `LockClient`: one process's connection to the server, from which locks are made.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use log::warn;

use crate::backoff;
use crate::engine::{Engine, MemoryServer, RedisEngine, RedisOptions};
use crate::error::Error;
use crate::fifo_lock::{FifoLock, LockBuilder};
use crate::keys;
use crate::protocol::{ClientId, TicketId};
use crate::renewal::Renewals;
use crate::settings::within;
use crate::sync::Mutex;
use crate::waiting::Room;
use crate::withdrawal::Withdrawals;

/// A client of one server: makes locks, and shares its connections and threads among them.
///
/// Cheap to clone; make one per process and server. Nothing is connected until the first call. Locks of one name
/// made from clones of one client share one queue listener; a thread that waits for a lock it holds through the same
/// client gets [`Error::WouldDeadlock`].
///
/// When the last handle (client or lock) goes while leases are held, a warning names them; each goes on until its
/// guard is dropped, or, if that was forgotten, until `max_hold`.
///
/// # Examples
///
/// ```
/// use redis_fifo_lock::LockClient;
///
/// let locks = LockClient::memory(); // or LockClient::connect("redis://127.0.0.1/")?
/// let lock = locks.fifo_lock("invoices")?;
/// let guard = lock.lock()?;
/// println!("invoices is ours, fence {}", guard.fence());
/// # Ok::<(), redis_fifo_lock::Error>(())
/// ```
#[derive(Clone)]
pub struct LockClient {
    shared: Arc<Shared>,
    handle: Arc<Handle>,
}

/// What everything made from one client shares.
pub(crate) struct Shared {
    /// The server.
    pub(crate) engine: Box<dyn Engine>,
    /// Who we are in queues.
    pub(crate) id: ClientId,
    /// Before every key.
    pub(crate) prefix: Box<str>,
    /// Tickets taken.
    tickets: AtomicU64,
    /// A room per lock that is in use, by name.
    rooms: Mutex<HashMap<Box<str>, Weak<Room>>>,
    /// Threads that renew.
    pub(crate) renewals: Renewals,
    /// Tickets that could not be withdrawn at once.
    pub(crate) withdrawals: Withdrawals,
    /// Bound on one call.
    pub(crate) call_timeout: Duration,
}

impl Shared {
    /// Takes a new ticket.
    pub(crate) fn ticket(&self, lease_ms: u64) -> TicketId {
        TicketId::new(&self.id, self.tickets.fetch_add(1, Ordering::Relaxed) + 1, lease_ms)
    }

    /// Forgets the room `name` if nobody is in it any more, so that names used once leave nothing behind.
    pub(crate) fn forget_room(&self, name: &str) {
        let mut rooms = self.rooms.lock();
        if rooms.get(name).is_some_and(|room| room.strong_count() == 0) {
            rooms.remove(name);
        }
    }
}

/// Counts the clients and locks a user holds: dropped with the last of them.
pub(crate) struct Handle {
    shared: Weak<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let Some(shared) = self.shared.upgrade() else { return };
        let rooms: Vec<_> = shared.rooms.lock().values().filter_map(Weak::upgrade).collect();
        for room in rooms {
            for fence in room.held() {
                // A guard that was forgotten cannot be told from one that outlives its client on purpose
                // (`FifoLock::connect(..)?.lock()?`), so this neither panics nor releases.
                warn!(
                    "the last handle of client {} went while the lease on `{}` (fence {fence}) is held; it ends with \
                     its guard, or with max_hold if that was forgotten",
                    shared.id, room.keys.name
                );
            }
        }
    }
}

impl LockClient {
    /// Makes a client of the Redis at `url`: `redis://[user:password@]host[:port][/db]`, `redis+unix:///path`.
    ///
    /// Nothing is connected yet.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if `url` is not one.
    ///
    /// # Examples
    ///
    /// ```
    /// let locks = redis_fifo_lock::LockClient::connect("redis://127.0.0.1/")?;
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn connect(url: &str) -> Result<LockClient, Error> {
        LockClient::options().url(url).build()
    }

    /// Makes a client of a server of its own inside this process; see [`MemoryServer`].
    ///
    /// # Examples
    ///
    /// ```
    /// let locks = redis_fifo_lock::LockClient::memory();
    /// assert!(locks.fifo_lock("x")?.try_lock()?.is_some());
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    #[must_use]
    pub fn memory() -> LockClient {
        LockClient::new(Box::new(MemoryServer::new()), "fifo", None, Duration::from_secs(2))
    }

    /// Makes a client that connects as `client` does.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if its address cannot be used.
    ///
    /// # Examples
    ///
    /// ```
    /// use redis_fifo_lock::{LockClient, redis};
    ///
    /// let locks = LockClient::from_client(redis::Client::open("redis://127.0.0.1/")?)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn from_client(client: redis::Client) -> Result<LockClient, Error> {
        LockClient::options().redis(client).build()
    }

    /// Starts building a client with settings of its own.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use redis_fifo_lock::LockClient;
    ///
    /// let locks = LockClient::options()
    ///     .url("redis://127.0.0.1/")
    ///     .prefix("billing")
    ///     .call_timeout(Duration::from_millis(500))
    ///     .build()?;
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn options() -> ClientBuilder {
        ClientBuilder::default()
    }

    /// Makes the lock `name` with default settings.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if `name` has not 1 to 512 bytes.
    ///
    /// # Examples
    ///
    /// ```
    /// # let locks = redis_fifo_lock::LockClient::memory();
    /// let lock = locks.fifo_lock("invoices")?;
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn fifo_lock(&self, name: &str) -> Result<FifoLock, Error> {
        LockBuilder::new(self.clone(), name).build()
    }

    /// Starts building the lock `name` with settings of its own.
    ///
    /// # Examples
    ///
    /// ```
    /// # let locks = redis_fifo_lock::LockClient::memory();
    /// use std::time::Duration;
    ///
    /// let lock = locks.builder("invoices").lease(Duration::from_secs(10)).build()?;
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    pub fn builder(&self, name: &str) -> LockBuilder {
        LockBuilder::new(self.clone(), name)
    }

    /// The id under which this client stands in queues: `host-pid-random`.
    ///
    /// # Examples
    ///
    /// ```
    /// let locks = redis_fifo_lock::LockClient::memory();
    /// assert!(locks.id().contains(&std::process::id().to_string()));
    /// ```
    #[must_use]
    pub fn id(&self) -> &str {
        self.shared.id.as_str()
    }

    pub(crate) fn new(
        engine: Box<dyn Engine>,
        prefix: &str,
        label: Option<&str>,
        call_timeout: Duration,
    ) -> LockClient {
        let host = label.map_or_else(host_name, str::to_owned);
        // Long host names would make every ticket long.
        let host: String = host.chars().take(48).collect();
        let id = ClientId::cleaned(&format!("{host}-{}-{:016x}", std::process::id(), backoff::random()));
        let shared = Arc::new(Shared {
            engine,
            id,
            prefix: prefix.into(),
            tickets: AtomicU64::new(0),
            rooms: Mutex::new(HashMap::new()),
            renewals: Renewals::new(),
            withdrawals: Withdrawals::new(),
            call_timeout,
        });
        let handle = Arc::new(Handle { shared: Arc::downgrade(&shared) });
        LockClient { shared, handle }
    }

    /// What everything made from this client shares.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The room of the lock `name`, with the token that counts the user's handles.
    pub(crate) fn room(&self, name: &str) -> Result<(Arc<Room>, Arc<Handle>), Error> {
        let mut rooms = self.shared.rooms.lock();
        if let Some(room) = rooms.get(name).and_then(Weak::upgrade) {
            return Ok((room, Arc::clone(&self.handle)));
        }
        let keys = keys::LockKeys::new(&self.shared.prefix, name, self.shared.id.as_str())?;
        let room = Arc::new(Room::new(Arc::clone(&self.shared), keys));
        rooms.insert(name.into(), Arc::downgrade(&room));
        Ok((room, Arc::clone(&self.handle)))
    }
}

impl fmt::Debug for LockClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockClient")
            .field("id", &self.shared.id)
            .field("prefix", &self.shared.prefix)
            .finish_non_exhaustive()
    }
}

/// The machine's name, or `host` if it does not tell.
fn host_name() -> String {
    #[cfg(unix)]
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    #[cfg(not(unix))]
    let name = std::env::var("COMPUTERNAME").unwrap_or_default();
    if name.is_empty() { "host".into() } else { name }
}

/// Builds a [`LockClient`]; made by [`LockClient::options`].
///
/// # Examples
///
/// ```
/// use redis_fifo_lock::{LockClient, MemoryServer};
///
/// let locks = LockClient::options().memory(&MemoryServer::new()).prefix("billing").build()?;
/// # Ok::<(), redis_fifo_lock::Error>(())
/// ```
#[must_use = "a builder does nothing until `build`"]
#[derive(Clone)]
pub struct ClientBuilder {
    server: Server,
    prefix: String,
    label: Option<String>,
    options: RedisOptions,
}

/// Where to connect.
#[derive(Clone)]
enum Server {
    /// Not said yet.
    Unset,
    /// A text that may be a URL; it may hold a password and is never shown.
    Url(String),
    /// A client that was made elsewhere.
    Redis(Box<redis::Client>),
    /// A server inside this process.
    Memory(MemoryServer),
}

impl Default for ClientBuilder {
    fn default() -> ClientBuilder {
        ClientBuilder {
            server: Server::Unset,
            prefix: "fifo".into(),
            label: None,
            options: RedisOptions {
                command_pool: 8,
                bell_connections: 64,
                connect_timeout: Duration::from_secs(1),
                call_timeout: Duration::from_secs(2),
            },
        }
    }
}

impl ClientBuilder {
    /// Connects to the Redis at `url`. One of `url`, `redis` and `memory` is required.
    pub fn url(mut self, url: &str) -> ClientBuilder {
        self.server = Server::Url(url.into());
        self
    }

    /// Connects as `client` does.
    pub fn redis(mut self, client: redis::Client) -> ClientBuilder {
        self.server = Server::Redis(Box::new(client));
        self
    }

    /// Uses a server inside this process.
    pub fn memory(mut self, server: &MemoryServer) -> ClientBuilder {
        self.server = Server::Memory(server.clone());
        self
    }

    /// Puts `prefix` before every key. Defaults to `fifo`.
    pub fn prefix(mut self, prefix: &str) -> ClientBuilder {
        self.prefix = prefix.into();
        self
    }

    /// Starts the id under which this client stands in queues. Defaults to the host's name.
    pub fn label(mut self, label: &str) -> ClientBuilder {
        self.label = Some(label.into());
        self
    }

    /// Bounds the connections for calls. Defaults to 8; 1 is enough for any number of waiters. While all are in use, up
    /// to 2 more are opened for renewals and releases.
    pub fn command_pool(mut self, connections: u32) -> ClientBuilder {
        self.options.command_pool = connections;
        self
    }

    /// Bounds the connections that listen, one per lock somebody waits for. Defaults to 64; without one, waiters poll.
    pub fn bell_connections(mut self, connections: u32) -> ClientBuilder {
        self.options.bell_connections = connections;
        self
    }

    /// Bounds connecting. Defaults to 1 s; 10 ms to 60 s are allowed.
    pub fn connect_timeout(mut self, timeout: Duration) -> ClientBuilder {
        self.options.connect_timeout = timeout;
        self
    }

    /// Bounds one call to the server. Defaults to 2 s; 10 ms to 60 s are allowed.
    pub fn call_timeout(mut self, timeout: Duration) -> ClientBuilder {
        self.options.call_timeout = timeout;
        self
    }

    /// Makes the client. Nothing is connected yet.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if no server was named or a setting is out of bounds.
    pub fn build(self) -> Result<LockClient, Error> {
        keys::check_prefix(&self.prefix)?;
        let (least, most) = (Duration::from_millis(10), Duration::from_secs(60));
        within("connect_timeout", self.options.connect_timeout, least, most)?;
        within("call_timeout", self.options.call_timeout, least, most)?;
        for (name, size) in
            [("command_pool", self.options.command_pool), ("bell_connections", self.options.bell_connections)]
        {
            if !(1..=10_000).contains(&size) {
                return Err(Error::Config(format!("{name} is {size}: 1 to 10000 are allowed")));
            }
        }
        if self.label.as_ref().is_some_and(|label| label.is_empty() || label.len() > 48) {
            return Err(Error::Config("the label must have 1 to 48 bytes; that is what is allowed".into()));
        }
        let call_timeout = self.options.call_timeout;
        let engine: Box<dyn Engine> = match self.server {
            Server::Unset => {
                return Err(Error::Config(
                    "no server: one of `url`, `redis` and `memory` is required".into(),
                ));
            }
            Server::Memory(server) => Box::new(server),
            Server::Redis(client) => Box::new(RedisEngine::new(&client, self.options)?),
            Server::Url(url) => {
                // The crate's own error says what is wrong without repeating the text, which may hold a password.
                let client = redis::Client::open(url)
                    .map_err(|error| Error::Config(format!("not a Redis URL that is allowed: {error}")))?;
                Box::new(RedisEngine::new(&client, self.options)?)
            }
        };
        Ok(LockClient::new(engine, &self.prefix, self.label.as_deref(), call_timeout))
    }
}

impl fmt::Debug for ClientBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientBuilder")
            .field("prefix", &self.prefix)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
