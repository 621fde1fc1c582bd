//! A record of every command that a server runs, from MONITOR.

use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use redis::{Connection, cmd};

use super::eventually;

const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) struct Monitor {
    /// Tells the server apart from the record: marks go this way.
    marks: Connection,
    stream: TcpStream,
    lines: Arc<Mutex<Vec<String>>>,
    reader: Option<JoinHandle<()>>,
    mark_count: usize,
}

impl Monitor {
    pub(crate) fn start(marks: Connection, addr: SocketAddr, password: Option<&str>) -> Self {
        let mut stream = TcpStream::connect(addr).expect("the test's server");
        let mut replies = BufReader::new(stream.try_clone().expect("a second handle"));
        let mut ask = |line: String| {
            stream.write_all(line.as_bytes()).expect("the test's server");
            let mut reply = String::new();
            replies.read_line(&mut reply).expect("the test's server");
            assert_eq!(reply, "+OK\r\n");
        };
        if let Some(password) = password {
            ask(format!("AUTH {password}\r\n"));
        }
        ask("MONITOR\r\n".to_owned());

        let lines = Arc::new(Mutex::new(Vec::new()));
        let record = Arc::clone(&lines);
        let read = move || {
            for line in replies.lines().map_while(Result::ok) {
                locked(&record).push(line);
            }
        };
        let reader = thread::Builder::new().name("monitor".to_owned()).spawn(read).expect("a thread");
        Self { marks, stream, lines, reader: Some(reader), mark_count: 0 }
    }

    /// The commands so far, as MONITOR writes them. All that were answered before this call are there.
    pub(crate) fn lines(&mut self) -> Vec<String> {
        self.mark_count += 1;
        let mark = format!("monitor-mark-{}", self.mark_count);
        cmd("ECHO").arg(&mark).exec(&mut self.marks).expect("the test's server");
        eventually(PATIENCE, "MONITOR shows our own mark", || {
            locked(&self.lines).iter().any(|line| line.contains(&mark))
        });
        locked(&self.lines).iter().filter(|line| !line.contains("monitor-mark-")).cloned().collect()
    }

    /// Ends the recording.
    pub(crate) fn stop(mut self) -> Vec<String> {
        self.lines()
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // The reader sleeps in a read that only the end of the stream wakes; an error means it has ended.
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

fn locked(lines: &Mutex<Vec<String>>) -> MutexGuard<'_, Vec<String>> {
    lines.lock().unwrap_or_else(PoisonError::into_inner)
}
