//! A private PostgreSQL server for this test process, with a fresh database for every test that asks.
//!
//! It listens on a unix socket in its own directory only, so no port can collide.

use std::env;
use std::fs::{self, File};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::eventually;
use super::process::Process;
use super::reaper::{self, Last};
use tempfile::TempDir;

const SUPERUSER: &str = "postgres";
/// How long the server may take to start or to end on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running PostgreSQL server.
pub(crate) struct Postgres {
    process: Process,
    programs: PathBuf,
    databases: AtomicUsize,
    dir: TempDir,
}

impl Postgres {
    /// The server that all tests of this process share; started by the first that asks.
    pub(crate) fn shared() -> &'static Self {
        static SHARED: OnceLock<Postgres> = OnceLock::new();
        // Nothing drops a static: the reaper ends it.
        SHARED.get_or_init(Self::start)
    }

    #[track_caller]
    pub(crate) fn start() -> Self {
        let dir = tempfile::Builder::new().prefix("fifo-pg-").tempdir().expect("a temporary directory");
        reaper::remove_at_end(dir.path());
        let programs = programs();
        let user = unprivileged();
        if let Some((uid, gid)) = user {
            chown(dir.path(), Some(uid), Some(gid)).expect("root may give a directory away");
        }
        let command = |program: &str| {
            let mut command = Command::new(programs.join(program));
            command.current_dir(dir.path()).stdin(Stdio::null());
            if let Some((uid, gid)) = user {
                command.uid(uid).gid(gid);
            }
            command
        };
        let initdb = command("initdb")
            .args(["-D", "data", "-A", "trust", "-U", SUPERUSER, "-E", "UTF8", "--locale=C", "--no-sync"])
            .output()
            .expect("initdb");
        assert!(initdb.status.success(), "initdb: {}", String::from_utf8_lossy(&initdb.stderr));

        let log = File::create(dir.path().join("log")).expect("a log file");
        let mut server = command("postgres");
        server.args([
            "-D",
            "data",
            "-c",
            "listen_addresses=",
            "-c",
            "fsync=off",
            "-c",
            "max_connections=200",
            "-k",
        ]);
        server.arg(dir.path());
        server.stdout(log.try_clone().expect("a second handle")).stderr(log);
        let mut server = Self {
            process: Process::spawn(&mut server, Last::Quit),
            programs,
            databases: AtomicUsize::new(0),
            dir,
        };
        eventually(PATIENCE, "PostgreSQL answers", || {
            let ended = server.process.ended();
            assert!(ended.is_none(), "PostgreSQL ends at once:\n{}", server.log());
            server.psql("postgres", "select 1").is_ok()
        });
        server
    }

    /// A new, empty database: its connection string, as libpq and the `postgres` crate read it.
    pub(crate) fn database(&self) -> String {
        let name = format!("test_{}", self.databases.fetch_add(1, Ordering::Relaxed));
        self.psql("postgres", &format!("create database {name}")).expect("a new database");
        self.url(&name)
    }

    /// Runs one statement in a database (a name or a connection string); what psql prints, bare.
    pub(crate) fn psql(&self, database: &str, statement: &str) -> Result<String, String> {
        let database = if database.contains('=') { database.to_owned() } else { self.url(database) };
        let output = Command::new(self.programs.join("psql"))
            .args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", &database, "-c", statement])
            .stdin(Stdio::null())
            .output()
            .expect("psql");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    fn url(&self, database: &str) -> String {
        format!("host={} user={SUPERUSER} dbname={database}", self.dir.path().display())
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // SIGKILL, the last resort of `Process`, would leave the server's own children and shared memory behind.
        self.process.quit(PATIENCE);
        if std::thread::panicking() {
            println!("--- log of PostgreSQL ---\n{}--- end ---", self.log());
        }
    }
}

/// Where the server's programs are: `PG_BIN`, or what is usual.
fn programs() -> PathBuf {
    let path = env::var_os("PG_BIN").map(PathBuf::from);
    let from_path =
        env::var_os("PATH").into_iter().flat_map(|path| env::split_paths(&path).collect::<Vec<_>>());
    // Debian keeps them out of PATH, a directory per version; the newest is the last.
    let mut debian: Vec<_> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .map(|version| version.path())
        .collect();
    debian.sort();
    let debian = debian.into_iter().rev().map(|version| version.join("bin"));
    // A directory with only some of them holds links to one that has them all.
    let has_server =
        |dir: &PathBuf| ["initdb", "postgres", "psql"].iter().all(|name| dir.join(name).is_file());
    path.into_iter()
        .chain(from_path)
        .chain(debian)
        .find(has_server)
        .expect("a PostgreSQL server: set PG_BIN, or install one as `sh tests/run.sh` does")
}

/// PostgreSQL refuses to run as root: who it runs as instead, as user and group ids. `None` if we are not root.
fn unprivileged() -> Option<(u32, u32)> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let id = |option: &str, user: &str| {
        let output = Command::new("id").args([option, user]).stderr(Stdio::null()).output().ok()?;
        String::from_utf8(output.stdout).ok()?.trim().parse::<u32>().ok()
    };
    let user = ["postgres", "nobody"].iter().find_map(|user| Some((id("-u", user)?, id("-g", user)?)));
    Some(user.expect("a user `postgres` or `nobody` for PostgreSQL to run as"))
}
