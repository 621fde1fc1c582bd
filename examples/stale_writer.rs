//! The classic: A holds the lock and pauses, B takes over, A wakes and writes. The store refuses A's write.
//!
//! `cargo run --example stale_writer` needs nothing but Rust: the server is inside the process. With `REDIS_URL` set, the
//! same program runs on that Redis. `--features sqlite` adds the second half, where the store is an SQLite table.

use std::error::Error;
use std::thread;
use std::time::Duration;

use redis_fifo_lock::redis::{Client, FromRedisValue, cmd};
use redis_fifo_lock::{ClientBuilder, LockClient, LockGuard, MemoryServer};

fn main() -> Result<(), Box<dyn Error>> {
    let server = Server::find();
    println!("1. The store is the server of the lock: a gate compares the fence in the step that writes\n");
    behind_a_gate(&server)?;
    #[cfg(feature = "sqlite")]
    {
        println!("2. The store is an SQLite table: each row keeps the newest fence it was written with\n");
        in_a_table(&server)?;
    }
    Ok(())
}

/// A and B write a key through a gate.
fn behind_a_gate(server: &Server) -> Result<(), Box<dyn Error>> {
    // The name is new each time, so that two runs on one Redis do not meet. The braces matter on a cluster only: there
    // the target has to be in the slot of the lock.
    let name = format!("stale-writer-{}", std::process::id());
    let target = format!("{{{name}}}:balance");
    let (a, b) = takeover(server, &name)?;

    let gate = server.client().build()?.fifo_lock(&name)?.gate(&target)?;
    println!("   A (fence {}) wakes and writes, before B has written anything", a.fence());
    match gate.set_if_fresh(a.fence(), "what A thought it was") {
        Err(redis_fifo_lock::Error::FencedOut { newest, .. }) => {
            println!("   refused: fence {newest} has been granted since");
            assert_eq!(newest, b.fence());
        }
        other => panic!("a stale write went through: {other:?}"),
    }

    println!("   B (fence {}) writes several keys, all or none", b.fence());
    let log = format!("{{{name}}}:log");
    gate.apply(b.fence(), |tx| {
        tx.set(&target, "100").rpush(&log, ["B: 100"]).expire(&log, Duration::from_secs(60));
    })?;
    assert!(gate.apply(a.fence(), |tx| _ = tx.del(&target)).is_err());
    assert_eq!(server.get(&target)?, "100");
    println!("   the balance is {}\n", server.get(&target)?);

    assert!(a.unlock().is_err(), "A learns that it lost the lock");
    gate.apply(b.fence(), |tx| _ = tx.del(&target))?;
    b.unlock()?;
    Ok(())
}

/// A and B write a row of a table.
#[cfg(feature = "sqlite")]
fn in_a_table(server: &Server) -> Result<(), Box<dyn Error>> {
    use redis_fifo_lock::sql::Fenced;
    use redis_fifo_lock::sql::sqlite::FencedTable;
    use redis_fifo_lock::sql::sqlite::rusqlite::Connection;

    let db = Connection::open_in_memory()?;
    db.execute_batch("CREATE TABLE accounts (id INTEGER PRIMARY KEY, balance INTEGER)")?;
    db.execute_batch("INSERT INTO accounts VALUES (1, 0)")?;
    let accounts = FencedTable::builder("accounts").build()?;
    db.execute_batch(&accounts.add_column())?; // once, in a migration

    let (a, b) = takeover(server, &format!("stale-writer-table-{}", std::process::id()))?;
    let written = accounts.update(&db, b.fence(), &[("id", &1)], &[("balance", &100)])?;
    println!("   B (fence {}) writes: {written:?}", b.fence());
    assert_eq!(written, Fenced::Applied { rows: 1 });
    // A table knows of a successor only by its writes, so here B has to come first. The gate above is bound to the lock
    // and refused A before that.
    let refused = accounts.update(&db, a.fence(), &[("id", &1)], &[("balance", &-1)])?;
    println!("   A (fence {}) wakes and writes: {refused:?}", a.fence());
    assert_eq!(refused, Fenced::Stale { newest: b.fence() });
    let balance: i64 = db.query_row("SELECT balance FROM accounts WHERE id = 1", [], |row| row.get(0))?;
    assert_eq!(balance, 100);
    println!("   the balance is {balance}\n");

    assert!(a.unlock().is_err(), "A learns that it lost the lock");
    b.unlock()?;
    Ok(())
}

/// A takes the lock and pauses for longer than its lease, and B takes over.
fn takeover(server: &Server, name: &str) -> Result<(LockGuard, LockGuard), Box<dyn Error>> {
    // A process that is stopped renews nothing. Here max_hold ends the renewal, for a process cannot stop a part of itself.
    let lease = Duration::from_millis(500);
    let doomed = server.client().build()?;
    let doomed = doomed.builder(name).lease(lease).max_hold(lease + Duration::from_millis(1)).build()?;
    let a = doomed.lock()?;
    println!("   A holds the lock with fence {}, and pauses", a.fence());
    let b = server.client().build()?.fifo_lock(name)?.lock()?;
    println!("   B holds the lock with fence {}", b.fence());
    thread::sleep(Duration::from_millis(50));
    Ok((a, b))
}

/// The Redis that `REDIS_URL` names, or a server inside this process.
enum Server {
    Redis(String),
    Memory(MemoryServer),
}

impl Server {
    fn find() -> Server {
        match std::env::var("REDIS_URL") {
            Ok(url) => {
                println!("(on the Redis that REDIS_URL names)\n");
                Server::Redis(url)
            }
            Err(_) => {
                println!("(on a server inside this process; set REDIS_URL to use a Redis)\n");
                Server::Memory(MemoryServer::new())
            }
        }
    }

    fn client(&self) -> ClientBuilder {
        match self {
            Server::Redis(url) => LockClient::options().url(url),
            Server::Memory(server) => LockClient::options().memory(server),
        }
    }

    fn get(&self, key: &str) -> Result<String, Box<dyn Error>> {
        Ok(match self {
            Server::Redis(url) => {
                let mut connection = Client::open(url.as_str())?.get_connection()?;
                cmd("GET").arg(key).query(&mut connection)?
            }
            Server::Memory(server) => String::from_redis_value(server.value(key))?,
        })
    }
}
