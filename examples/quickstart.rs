//! Several threads want one lock: they get in one at a time, in order of arrival, each with a larger fence.
//!
//! `cargo run --example quickstart` needs nothing but Rust: the server is inside the process. With `REDIS_URL` set, the
//! same program runs on that Redis: `REDIS_URL=redis://127.0.0.1/ cargo run --example quickstart`.

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use redis_fifo_lock::{ClientBuilder, LockClient, MemoryServer};

fn main() -> Result<(), Box<dyn Error>> {
    let server = server();
    let start = Instant::now();
    let say = |who: &str, what: &str| println!("{:>5} ms  {who:<9} {what}", start.elapsed().as_millis());

    // One client per process; locks are made from it by name. The name is new each time, so that two runs on one
    // Redis do not meet.
    let locks: LockClient = server.clone().build()?;
    let name = format!("quickstart-{}", std::process::id());
    let lock = locks.builder(&name).lease(Duration::from_secs(1)).poll(Duration::from_secs(1)).build()?;

    println!("1. One at a time, in order of arrival\n");
    let first = lock.lock()?;
    say("main", &format!("holds the lock with fence {}", first.fence()));
    let mut fences = vec![first.fence()];
    let mut order = Vec::new();
    thread::scope(|scope| -> Result<(), Box<dyn Error>> {
        let mut workers = Vec::new();
        for worker in 1..=4 {
            // A ticket is a place in the queue; taking it here makes the order of arrival visible.
            let ticket = lock.enqueue()?;
            let who = format!("worker {worker}");
            say(&who, "arrives and queues");
            workers.push(scope.spawn(move || {
                let guard = ticket.wait()?;
                say(&who, &format!("is in, fence {}", guard.fence()));
                thread::sleep(Duration::from_millis(50));
                say(&who, "leaves; the next in line is in at once");
                Ok::<_, redis_fifo_lock::Error>((guard.position(), guard.fence(), worker))
            }));
        }
        match lock.try_lock()? {
            None => say("main", "try_lock: no, it is held, and nobody jumps the queue"),
            Some(_) => return Err("try_lock jumped the queue".into()),
        }
        say("main", &format!("{} wait; main leaves", lock.status()?.waiting));
        first.unlock()?;
        for worker in workers {
            let (_, fence, worker) = worker.join().map_err(|_| "a worker panicked")??;
            fences.push(fence);
            order.push(worker);
        }
        Ok(())
    })?;
    assert!(fences.is_sorted_by(|a, b| a < b), "every grant has a larger fence than the one before");
    assert_eq!(order, [1, 2, 3, 4], "first come, first served");
    println!(
        "\n          fences ascend: {}\n",
        fences.iter().map(ToString::to_string).collect::<Vec<_>>().join(" < ")
    );

    println!("2. A holder crashes\n");
    // A client of its own stands for another process. Its lease is one second, and it will never be renewed or
    // released: max_hold ends the renewal, as the end of a process would.
    let doomed: LockClient = server.build()?;
    let doomed =
        doomed.builder(&name).lease(Duration::from_secs(1)).max_hold(Duration::from_millis(1001)).build()?;
    let abandoned = doomed.lock()?;
    let stale = abandoned.fence();
    say("doomed", &format!("holds the lock with fence {stale}, and crashes"));
    std::mem::forget(abandoned);
    let guard = lock.lock()?;
    say("main", &format!("is in as soon as the lease ran out, fence {}", guard.fence()));
    assert!(guard.fence() > stale);
    println!("\n          Should the crashed one come back to life and write, whatever stores the result");
    println!("          can tell: {stale} is smaller than {}.", guard.fence());
    guard.unlock()?;
    Ok(())
}

/// The Redis that `REDIS_URL` names, or a server inside this process.
fn server() -> ClientBuilder {
    match std::env::var("REDIS_URL") {
        Ok(url) => {
            println!("(on the Redis that REDIS_URL names)\n");
            LockClient::options().url(&url)
        }
        Err(_) => {
            println!("(on a server inside this process; set REDIS_URL to use a Redis)\n");
            LockClient::options().memory(&MemoryServer::new())
        }
    }
}
