//! A TCP proxy between a client and a server that loses, holds and delays what passes through.
//!
//! It follows the protocol message by message: every request in turn is given its fate, and the reply in the
//! same place of the connection meets it. Pipelines are therefore handled as single requests are.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::port;
use super::resp::{frame_len, is_push};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// What becomes of a connection whose reply is swallowed. The request has reached the server in every case
/// but the last two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Swallow {
    /// It stays open, and nothing comes back on it ever again. Requests still get through.
    Silence,
    /// It is closed instead of the reply.
    Cut,
    /// It is held, with all that follows on it, until `release_held`.
    Hold,
    /// The request is held, with all that follows on it, until `release_held`: the server sees it late, even if
    /// the client has gone.
    HoldRequest,
    /// It is closed instead of the request: the server never sees that.
    CutBefore,
}

/// One fault that was asked for.
#[derive(Clone)]
pub(crate) struct Fault(Arc<AtomicUsize>);

impl Fault {
    /// How often it really happened.
    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    pub(crate) fn happened(&self) -> bool {
        self.count() > 0
    }

    fn add(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// What the proxy has really done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Connections that were accepted for forwarding.
    pub(crate) connections: usize,
    /// Connections that were closed at once.
    pub(crate) refused: usize,
    /// Connections closed by `cut`.
    pub(crate) cut: usize,
    /// Messages, ends of connections and new connections that stood still because of `freeze`.
    pub(crate) frozen: usize,
    /// Replies and requests that met a `swallow_*` fault.
    pub(crate) swallowed: usize,
}

pub(crate) struct Proxy {
    addr: SocketAddr,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

impl Proxy {
    pub(crate) fn start(target: SocketAddr) -> Self {
        let listener = port::listen();
        let addr = listener.local_addr().expect("a bound listener");
        let state = State {
            target,
            frozen: false,
            refusing: false,
            closing: false,
            delay: Duration::ZERO,
            holds: 0,
            rewrite: None,
            rules: Vec::new(),
            links: Vec::new(),
            threads: Vec::new(),
            counts: Counts::default(),
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let for_thread = Arc::clone(&shared);
        let accepting = spawn("proxy-accept", move || accept(&for_thread, &listener));
        Self { addr, shared, accepting: Some(accepting) }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}/", self.addr)
    }

    /// Stops forwarding, both ways. Sockets stay open, and the end of one side is kept from the other.
    pub(crate) fn freeze(&self) {
        self.shared.state().frozen = true;
    }

    /// Forwards again, what was held back first.
    pub(crate) fn thaw(&self) {
        self.change(|state| state.frozen = false);
    }

    /// Closes all connections, on both sides; says how many.
    pub(crate) fn cut(&self) -> usize {
        let links = std::mem::take(&mut self.shared.state().links);
        let cut = links.iter().filter(|link| link.close()).count();
        self.shared.state().counts.cut += cut;
        cut
    }

    /// Whether new connections are closed at once.
    pub(crate) fn refuse(&self, refuse: bool) {
        self.shared.state().refusing = refuse;
    }

    /// Holds every message back for so long, requests and replies alike.
    pub(crate) fn delay(&self, delay: Duration) {
        self.shared.state().delay = delay;
    }

    /// Where new connections go.
    pub(crate) fn retarget(&self, target: SocketAddr) {
        self.shared.state().target = target;
    }

    /// Loses the reply to the next request that contains `text`.
    pub(crate) fn swallow_next_reply(&self, text: &str, how: Swallow) -> Fault {
        let text = text.as_bytes().to_vec();
        self.swallow_next_reply_to(how, move |request| contains(request, &text))
    }

    /// Loses the reply to the next request of which `matches` is true; it sees the bytes on the wire.
    pub(crate) fn swallow_next_reply_to(
        &self,
        how: Swallow,
        matches: impl Fn(&[u8]) -> bool + Send + 'static,
    ) -> Fault {
        self.swallow_replies_to(1, how, matches)
    }

    /// Loses the replies to the next `times` requests of which `matches` is true.
    pub(crate) fn swallow_replies_to(
        &self,
        times: usize,
        how: Swallow,
        matches: impl Fn(&[u8]) -> bool + Send + 'static,
    ) -> Fault {
        let fault = Fault(Arc::default());
        let rule = Rule { left: times, how, matches: Box::new(matches), fault: fault.clone() };
        self.shared.state().rules.push(rule);
        fault
    }

    /// Takes back all `swallow_*` that have not happened yet.
    pub(crate) fn swallow_nothing(&self) {
        self.shared.state().rules.clear();
    }

    /// Has every request of connections made from now on changed on its way.
    pub(crate) fn rewrite_requests(&self, rewrite: impl Fn(Vec<u8>) -> Vec<u8> + Send + Sync + 'static) {
        self.shared.state().rewrite = Some(Arc::new(rewrite));
    }

    /// Delivers all that [`Swallow::Hold`] and [`Swallow::HoldRequest`] hold at this moment.
    pub(crate) fn release_held(&self) {
        self.change(|state| state.holds += 1);
    }

    /// The number of open connections.
    pub(crate) fn connections(&self) -> usize {
        self.shared.state().links.iter().filter(|link| !link.is_closed()).count()
    }

    pub(crate) fn counts(&self) -> Counts {
        self.shared.state().counts
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.shared.state());
        self.shared.changed.notify_all();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.change(|state| state.closing = true);
        // The accepting thread sleeps in `accept`, which only a connection wakes.
        let _ = TcpStream::connect(self.addr);
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
        self.cut();
        // No link is added any more, but a link's first thread may be about to add its second.
        loop {
            let threads = std::mem::take(&mut self.shared.state().threads);
            if threads.is_empty() {
                break;
            }
            for thread in threads {
                let _ = thread.join();
            }
        }
    }
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    target: SocketAddr,
    frozen: bool,
    refusing: bool,
    /// The proxy is being dropped: nothing is forwarded or waited for any more.
    closing: bool,
    delay: Duration,
    /// How often `release_held` was called.
    holds: usize,
    rewrite: Option<Arc<Rewrite>>,
    rules: Vec<Rule>,
    links: Vec<Arc<Link>>,
    threads: Vec<JoinHandle<()>>,
    counts: Counts,
}

/// Whether a request, as its bytes on the wire, is the one that is meant.
type Matches = dyn Fn(&[u8]) -> bool + Send;

/// What becomes of a request's bytes on the way.
type Rewrite = dyn Fn(Vec<u8>) -> Vec<u8> + Send + Sync;

/// What is to become of a message; `None` passes.
type Fate = Option<(Swallow, Fault)>;

struct Rule {
    left: usize,
    how: Swallow,
    matches: Box<Matches>,
    fault: Fault,
}

/// One client's connection and the one that was made for it.
struct Link {
    client: TcpStream,
    server: OnceLock<TcpStream>,
    closed: AtomicBool,
    /// What becomes of the replies that are due, in order.
    due: Mutex<VecDeque<Fate>>,
}

impl Link {
    /// Whether this call closed it.
    fn close(&self) -> bool {
        let first = !self.closed.swap(true, Ordering::SeqCst);
        for stream in [Some(&self.client), self.server.get()].into_iter().flatten() {
            // An error says that the other side was faster.
            let _ = stream.shutdown(Shutdown::Both);
        }
        first
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    fn due(&self) -> MutexGuard<'_, VecDeque<Fate>> {
        self.due.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while the proxy is frozen; false if it is being dropped.
    fn pass(&self) -> bool {
        let mut state = self.state();
        if state.frozen && !state.closing {
            state.counts.frozen += 1;
        }
        while state.frozen && !state.closing {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.closing
    }

    /// Waits as long as a message has to; false if the proxy is being dropped.
    fn pass_message(&self) -> bool {
        let start = Instant::now();
        let mut state = self.state();
        while let Some(left) = state.delay.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
            if state.closing {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        self.pass()
    }

    /// Waits until `release_held` is called after its `releases`th time.
    fn hold(&self, releases: usize) {
        let mut state = self.state();
        while state.holds == releases && !state.closing {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn fate(&self, request: &[u8]) -> Fate {
        let mut state = self.state();
        let rule = state.rules.iter_mut().find(|rule| rule.left > 0 && (rule.matches)(request))?;
        rule.left -= 1;
        Some((rule.how, rule.fault.clone()))
    }

    fn happened(&self, fault: &Fault) {
        self.state().counts.swallowed += 1;
        fault.add();
    }
}

fn accept(shared: &Arc<Shared>, listener: &TcpListener) {
    for client in listener.incoming().map_while(Result::ok) {
        let mut state = shared.state();
        if state.closing {
            return;
        }
        if state.refusing {
            state.counts.refused += 1;
            continue;
        }
        state.counts.connections += 1;
        state.links.retain(|link| !link.is_closed());
        state.threads.retain(|thread| !thread.is_finished());
        let link = Arc::new(Link {
            client,
            server: OnceLock::new(),
            closed: AtomicBool::new(false),
            due: Mutex::default(),
        });
        state.links.push(Arc::clone(&link));
        let shared = Arc::clone(shared);
        state.threads.push(spawn("proxy-requests", move || {
            forward_requests(&shared, &link);
            link.close();
        }));
    }
}

fn forward_requests(shared: &Arc<Shared>, link: &Arc<Link>) {
    // A frozen network does not let a connection through either.
    if !shared.pass() {
        return;
    }
    let target = shared.state().target;
    let Ok(server) = TcpStream::connect_timeout(&target, CONNECT_TIMEOUT) else { return };
    for stream in [&link.client, &server] {
        let _ = stream.set_nodelay(true);
    }
    let server = link.server.get_or_init(|| server);
    if link.is_closed() {
        // `close` may have looked before the server's side was there; our caller closes again.
        return;
    }
    let (for_thread, link_for_thread) = (Arc::clone(shared), Arc::clone(link));
    let replies = spawn("proxy-replies", move || forward_replies(&for_thread, &link_for_thread));
    shared.state().threads.push(replies);

    let rewrite = shared.state().rewrite.clone();
    let mut messages = Messages::new(&link.client);
    while let Some(request) = messages.next() {
        let request = match &rewrite {
            Some(rewrite) => rewrite(request),
            None => request,
        };
        if !shared.pass_message() {
            return;
        }
        let fate = shared.fate(&request);
        if let Some((Swallow::CutBefore, fault)) = &fate {
            shared.happened(fault);
            return;
        }
        if let Some((Swallow::HoldRequest, fault)) = &fate {
            // Read first: the test may release it as soon as it sees the count.
            let releases = shared.state().holds;
            shared.happened(fault);
            shared.hold(releases);
        }
        link.due().push_back(fate);
        // If the server is gone, the thread for its replies sees that and decides.
        let mut server = server;
        let _ = server.write_all(&request);
    }
    shared.pass();
}

fn forward_replies(shared: &Shared, link: &Link) {
    let Some(server) = link.server.get() else { return };
    let mut messages = Messages::new(server);
    let mut silent = false;
    while let Some(reply) = messages.next() {
        if !shared.pass_message() {
            return;
        }
        let fate = if is_push(&reply) { None } else { link.due().pop_front().flatten() };
        match fate {
            Some((Swallow::Silence, fault)) => {
                silent = true;
                shared.happened(&fault);
            }
            Some((Swallow::Cut, fault)) => {
                // Counted first: the client may look at the count as soon as it sees the end.
                shared.happened(&fault);
                link.close();
                return;
            }
            Some((Swallow::Hold, fault)) => {
                let releases = shared.state().holds;
                shared.happened(&fault);
                shared.hold(releases);
            }
            Some((Swallow::HoldRequest | Swallow::CutBefore, _)) | None => {}
        }
        let mut client = &link.client;
        if !silent && client.write_all(&reply).is_err() {
            break;
        }
    }
    if !silent && shared.pass() {
        link.close();
    }
}

/// The messages that arrive on a stream, one by one.
struct Messages<'a> {
    stream: &'a TcpStream,
    received: Vec<u8>,
}

impl<'a> Messages<'a> {
    fn new(stream: &'a TcpStream) -> Self {
        Self { stream, received: Vec::new() }
    }

    fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            if let Some(length) = frame_len(&self.received) {
                let rest = self.received.split_off(length);
                return Some(std::mem::replace(&mut self.received, rest));
            }
            let mut chunk = [0; 16 * 1024];
            match self.stream.read(&mut chunk) {
                Ok(0) | Err(_) => return None,
                Ok(length) => self.received.extend_from_slice(&chunk[..length]),
            }
        }
    }
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    thread::Builder::new().name(name.to_owned()).spawn(body).expect("a thread")
}
