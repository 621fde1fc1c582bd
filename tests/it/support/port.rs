//! Ports for servers that can be stopped and started again on the same port.

use std::hash::{BuildHasher, RandomState};
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

// Below the ports that Linux and macOS hand to outgoing connections. A port from their range can be taken
// by any client while its server is down, and a client that knocks at such a port can connect to itself.
const PORTS: Range<u16> = 20_000..32_000;

/// A port of 127.0.0.1 that nobody listened on a moment ago, and that this process was not given recently.
///
/// Another process can still be faster: who starts a server on it has to check whose server answers.
pub(crate) fn free() -> u16 {
    listen().local_addr().expect("a bound listener").port()
}

/// A listener on such a port.
pub(crate) fn listen() -> TcpListener {
    static NEXT: OnceLock<AtomicU64> = OnceLock::new();
    let next = NEXT.get_or_init(|| AtomicU64::new(RandomState::new().hash_one(()) >> 32));
    let count = PORTS.end - PORTS.start;
    let port = |_| {
        let step = next.fetch_add(1, Ordering::Relaxed) % u64::from(count);
        PORTS.start + u16::try_from(step).expect("less than the number of ports")
    };
    let mut listeners = (0..count).map(port).map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)));
    listeners.find_map(Result::ok).expect("a free port")
}
