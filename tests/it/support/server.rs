//! A private Redis server for one test: own port, own directory, gone with its value.

use std::collections::HashMap;
use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use redis::{Client, Connection, ConnectionLike, FromRedisValue, RedisError, RedisResult, cmd};
use tempfile::TempDir;

use super::monitor::Monitor;
use super::port;
use super::process::Process;
use super::reaper::{self, Last};

/// How long a server may take to start or to end on a busy machine.
const SERVER_PATIENCE: Duration = Duration::from_secs(20);

/// What a server is started with.
#[derive(Clone, Default)]
pub(crate) struct Builder {
    args: Vec<String>,
    env: Vec<(String, OsString)>,
    aof: bool,
    password: Option<String>,
}

impl Builder {
    /// Adds an argument for the server, as on its command line.
    pub(crate) fn arg(mut self, arg: impl Into<String>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// Sets a variable in the server's environment.
    pub(crate) fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.env.push((name.to_owned(), value.into()));
        self
    }

    /// Whether every write is on disk before it is answered, and is there again after `start_again`.
    /// Defaults to `false`.
    pub(crate) fn aof(mut self, aof: bool) -> Self {
        self.aof = aof;
        self
    }

    /// The password that clients need; `url()` carries it. Defaults to none.
    pub(crate) fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_owned());
        self
    }

    #[track_caller]
    pub(crate) fn start(self) -> Server {
        let dir = tempfile::Builder::new().prefix("fifo-redis-").tempdir().expect("a temporary directory");
        reaper::remove_at_end(dir.path());
        let mut server = Server {
            options: self,
            port: 0,
            binary: binary(),
            process: Mutex::new(None),
            own: Mutex::new(None),
            dir,
        };
        // Between the choice of a port and the server's bind, another process can take the port.
        for _ in 0..20 {
            server.port = port::free();
            if server.try_run() {
                return server;
            }
        }
        panic!("{} does not start", server.binary);
    }
}

/// A running Redis server.
pub(crate) struct Server {
    options: Builder,
    port: u16,
    binary: String,
    /// None while the server is down.
    process: Mutex<Option<Process>>,
    /// The connection of this value's own questions, the one that its counts of clients leave out. It is kept:
    /// a server counts a closed connection until it has noticed.
    own: Mutex<Option<Connection>>,
    dir: TempDir,
}

impl Server {
    /// Starts a server that keeps nothing on disk.
    #[track_caller]
    pub(crate) fn start() -> Self {
        Self::builder().start()
    }

    pub(crate) fn builder() -> Builder {
        Builder::default()
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    pub(crate) fn url(&self) -> String {
        match &self.options.password {
            Some(password) => format!("redis://:{password}@{}/", self.addr()),
            None => format!("redis://{}/", self.addr()),
        }
    }

    /// The same server by its unix socket.
    pub(crate) fn unix_url(&self) -> String {
        let path = self.dir.path().join("socket");
        match &self.options.password {
            Some(password) => format!("redis+unix://{}?pass={password}", path.display()),
            None => format!("redis+unix://{}", path.display()),
        }
    }

    /// Ends the server as an operator does: by SIGTERM.
    pub(crate) fn stop(&self) {
        let mut process = self.process().take().expect("a running server");
        process.thaw();
        assert!(process.terminate(SERVER_PATIENCE).is_some(), "the server does not end");
    }

    /// Ends the server as a crash does: by SIGKILL.
    pub(crate) fn kill(&self) {
        self.process().take().expect("a running server").kill();
    }

    /// Starts the server again: same port, same directory. With `aof` it has its data again, else none.
    #[track_caller]
    pub(crate) fn start_again(&self) {
        assert!(self.process().is_none(), "the server still runs");
        let start = Instant::now();
        while !self.try_run() {
            assert!(start.elapsed() < SERVER_PATIENCE, "the server does not start again:\n{}", self.log());
            thread::sleep(super::POLL);
        }
    }

    /// Stops the server's process (SIGSTOP). Its sockets stay open, and the kernel still accepts connections.
    pub(crate) fn freeze(&self) {
        self.process().as_ref().expect("a running server").freeze();
    }

    /// Lets a frozen server go on.
    pub(crate) fn thaw(&self) {
        self.process().as_ref().expect("a running server").thaw();
    }

    /// A connection for looking at the server directly; see [`connect`].
    #[track_caller]
    pub(crate) fn connection(&self) -> Connection {
        connect(&self.url()).expect("a connection to the test's server")
    }

    /// Closes all client connections but its own; says how many.
    pub(crate) fn client_kill_normal(&self) -> usize {
        self.query(cmd("CLIENT").arg("KILL").arg("TYPE").arg("normal"))
    }

    /// Holds back the commands of all clients for `ms` milliseconds; `mode` is `ALL` or `WRITE`.
    ///
    /// Under `ALL` every method here that asks the server waits, too.
    pub(crate) fn client_pause(&self, ms: u64, mode: &str) {
        self.query(cmd("CLIENT").arg("PAUSE").arg(ms).arg(mode))
    }

    /// Ends every blocking command, with an `UNBLOCKED` error or as if it had timed out; says how many.
    pub(crate) fn unblock_all_blocked(&self, error: bool) -> usize {
        let how = if error { "ERROR" } else { "TIMEOUT" };
        let blocked = self.clients().into_iter().filter(|client| client["flags"].contains('b'));
        blocked
            .map(|client| self.query::<usize>(cmd("CLIENT").arg("UNBLOCK").arg(&client["id"]).arg(how)))
            .sum()
    }

    pub(crate) fn script_flush(&self) {
        self.query(cmd("SCRIPT").arg("FLUSH"))
    }

    pub(crate) fn flush_all(&self) {
        self.query(&cmd("FLUSHALL"))
    }

    /// Sets the memory limit in bytes; 0 is none.
    pub(crate) fn set_maxmemory(&self, bytes: u64) {
        self.query(cmd("CONFIG").arg("SET").arg("maxmemory").arg(bytes))
    }

    /// Makes the server full: it evicts nothing and refuses all that could grow, until `set_maxmemory(0)`.
    pub(crate) fn fill_memory(&self) {
        self.query::<()>(cmd("CONFIG").arg("SET").arg("maxmemory-policy").arg("noeviction"));
        // An empty server already uses more than one byte.
        self.set_maxmemory(1);
    }

    /// How often a command ran since the start or `reset_stats`, from within scripts included, subcommands
    /// included (`command_calls("client")` counts `CLIENT LIST`).
    pub(crate) fn command_calls(&self, name: &str) -> u64 {
        let name = name.to_lowercase();
        let stats: String = self.query(cmd("INFO").arg("commandstats"));
        let calls = stats.lines().filter_map(|line| {
            let (command, numbers) = line.strip_prefix("cmdstat_")?.split_once(':')?;
            let is_it = command.split('|').next() == Some(&name);
            is_it.then(|| numbers.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok())?
        });
        calls.sum()
    }

    pub(crate) fn reset_stats(&self) {
        self.query(cmd("CONFIG").arg("RESETSTAT"))
    }

    /// The number of clients, those of [`Monitor`] and its own connection left out.
    pub(crate) fn connected_clients(&self) -> usize {
        self.count_clients(|_| true)
    }

    /// The number of clients that wait in a blocking command.
    pub(crate) fn blocked_clients(&self) -> usize {
        self.count_clients(|client| client["flags"].contains('b'))
    }

    /// Records every command that the server runs from now on.
    pub(crate) fn monitor(&self) -> Monitor {
        Monitor::start(self.connection(), self.addr(), self.options.password.as_deref())
    }

    /// All keys that match, in order.
    pub(crate) fn keys(&self, pattern: &str) -> Vec<String> {
        let mut keys: Vec<String> = self.query(cmd("KEYS").arg(pattern));
        keys.sort();
        keys
    }

    /// A key's remaining life in milliseconds; -1 if it has no end, -2 if there is no such key.
    pub(crate) fn pttl(&self, key: &str) -> i64 {
        self.query(cmd("PTTL").arg(key))
    }

    /// Where it keeps its files.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// What the server has written so far.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    #[track_caller]
    fn query<T: FromRedisValue>(&self, command: &redis::Cmd) -> T {
        self.try_query(command).expect("an answer from the test's server")
    }

    fn try_query<T: FromRedisValue>(&self, command: &redis::Cmd) -> RedisResult<T> {
        let mut own = self.own();
        // It may be of a server that has been stopped since, or have been closed by a test.
        let kept = own.take().map(|mut connection| (command.query(&mut connection), connection));
        let (answer, connection) = match kept {
            Some((answer, connection)) if connection.is_open() => (answer, connection),
            _ => {
                let mut connection = connect(&self.url())?;
                (command.query(&mut connection), connection)
            }
        };
        *own = Some(connection);
        answer
    }

    fn count_clients(&self, mut counts: impl FnMut(&HashMap<String, String>) -> bool) -> usize {
        let own = self.query::<u64>(cmd("CLIENT").arg("ID")).to_string();
        let others = self.clients().into_iter().filter(|client| client["id"] != own);
        others.filter(|client| !client["flags"].contains('O') && counts(client)).count()
    }

    fn clients(&self) -> Vec<HashMap<String, String>> {
        let list: String = self.query(cmd("CLIENT").arg("LIST"));
        let fields = |line: &str| -> HashMap<String, String> {
            let pairs = line.split(' ').filter_map(|field| field.split_once('='));
            pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
        };
        list.lines().map(fields).collect()
    }

    /// Whether the server came up: false if its process ended, most likely for want of the port.
    #[track_caller]
    fn try_run(&self) -> bool {
        let old_log = self.log().len();
        let mut process = Process::spawn(&mut self.command(), Last::Kill);
        let start = Instant::now();
        while process.ended().is_none() {
            // A kept connection to a foreign server on the port would go on answering for ours.
            *self.own() = None;
            if self.is_ready(process.id()) {
                *self.process() = Some(process);
                return true;
            }
            assert!(start.elapsed() < SERVER_PATIENCE, "{} does not get ready:\n{}", self.binary, self.log());
            thread::sleep(super::POLL);
        }
        let log = self.log().split_off(old_log);
        assert!(log.contains("Address already in use"), "{} ends at once:\n{log}", self.binary);
        false
    }

    /// Whether it is our process that answers on the port, with all its data.
    fn is_ready(&self, id: u32) -> bool {
        self.try_query::<String>(&cmd("INFO")).is_ok_and(|info| {
            let has = |field: &str| info.lines().any(|line| line == field);
            has(&format!("process_id:{id}")) && has("loading:0")
        })
    }

    fn command(&self) -> Command {
        let log = File::options().create(true).append(true).open(self.log_path()).expect("a log file");
        let mut command = Command::new(&self.binary);
        command.current_dir(self.dir.path()).stdin(Stdio::null());
        command.stdout(log.try_clone().expect("a second handle")).stderr(log);
        command.args(["--port", &self.port.to_string(), "--bind", "127.0.0.1", "--save", ""]);
        command.args(["--daemonize", "no", "--unixsocket", "socket"]);
        if self.options.aof {
            command.args(["--appendonly", "yes", "--appendfsync", "always"]);
        }
        if let Some(password) = &self.options.password {
            command.args(["--requirepass", password]);
        }
        command.args(&self.options.args);
        command.envs(self.options.env.iter().map(|(name, value)| (name, value)));
        command
    }

    fn log_path(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    fn own(&self) -> MutexGuard<'_, Option<Connection>> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn process(&self) -> MutexGuard<'_, Option<Process>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.process().take());
        if thread::panicking() {
            println!("--- log of the Redis server on port {} ---\n{}--- end ---", self.port, self.log());
        }
    }
}

/// Connects to a server or proxy. The handshake has a timeout, later calls have none.
///
/// That is on purpose. The kernel restarts a read that a signal interrupts, unless the socket has a read timeout:
/// then the read fails with EINTR, which redis-rs passes on. Any thread of a process that starts children, as
/// tests do, can be hit by that, and so is every process after SIGSTOP and SIGCONT.
pub(crate) fn connect(url: &str) -> RedisResult<Connection> {
    let client = Client::open(url)?;
    loop {
        match client.get_connection_with_timeout(SERVER_PATIENCE) {
            Err(error) if is_interrupted(&error) => {}
            connected => return connected,
        }
    }
}

/// Whether a signal ended a call on a socket with a timeout.
pub(crate) fn is_interrupted(error: &RedisError) -> bool {
    // The io::Error inside is out of reach.
    error.to_string().contains("Interrupted system call")
}

fn binary() -> String {
    env::var("REDIS_SERVER_BIN").unwrap_or_else(|_| "redis-server".to_owned())
}
