//! What is left behind: one key per idle lock, then none; no threads, no connections.

use std::thread;
use std::time::Duration;

use redis_fifo_lock::LockClient;

use crate::support::eventually;
use crate::support::server::Server;

const LONG: Duration = Duration::from_secs(20);

#[test]
fn a_thousand_cycles_leave_one_key_and_then_none() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).expect("a client");
    let lock = client.builder("x").idle(Duration::from_millis(1500)).build().expect("a lock");
    for _ in 0..1000 {
        drop(lock.lock().expect("the lock"));
    }
    assert_eq!(server.keys("*"), ["fifo:{x}:lock"]);
    assert!(server.pttl("fifo:{x}:lock") > 0);
    eventually(LONG, "even that goes", || server.keys("*").is_empty());
}

#[test]
fn a_held_lock_and_a_queue_have_no_ttl_and_an_idle_lock_has() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).expect("a client");
    let lock = client.fifo_lock("x").expect("a lock");
    let held = lock.lock().expect("the lock");
    let ticket = lock.enqueue().expect("a ticket");
    assert_eq!(server.pttl("fifo:{x}:lock"), -1);
    assert_eq!(server.pttl("fifo:{x}:queue"), -1);
    drop(held);
    drop(ticket);
    let ttl = server.pttl("fifo:{x}:lock");
    assert!(ttl > 23 * 3600 * 1000 && ttl <= 24 * 3600 * 1000, "{ttl}");
}

#[test]
fn a_thousand_names_leave_one_key_each_with_a_ttl() {
    let server = Server::start();
    let client = LockClient::connect(&server.url()).expect("a client");
    for name in 0..1000 {
        let lock = client.fifo_lock(&format!("name-{name}")).expect("a lock");
        drop(lock.lock().expect("the lock"));
    }
    let keys = server.keys("*");
    assert_eq!(keys.len(), 1000);
    for key in &keys {
        assert!(server.pttl(key) > 0, "{key}");
    }
}

#[test]
fn connections_and_listeners_go_with_the_client() {
    let server = Server::start();
    let before = server.connected_clients();
    let client = LockClient::connect(&server.url()).expect("a client");
    let lock = client.builder("x").poll(Duration::from_millis(100)).build().expect("a lock");
    for _ in 0..3 {
        let held = lock.lock().expect("the lock");
        held.detach();
        thread::scope(|scope| {
            for _ in 0..20 {
                scope.spawn(|| drop(lock.lock().expect("its turn")));
            }
            eventually(LONG, "they wait", || lock.status().expect("a status").waiting == 20);
            drop(held);
        });
    }
    drop((client, lock));
    eventually(LONG, "no connection is left", || server.connected_clients() == before);
}
