//! The server's own account: what MONITOR shows of the scripts' writes, put into the log as it comes.

use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use redis_fifo_lock::protocol::Record;

use crate::history::{Stored, Verb, What};
use crate::log_file::{Log, now};

pub(crate) struct Tap {
    stream: TcpStream,
    reader: Option<JoinHandle<()>>,
}

impl Tap {
    /// Listens to the server at `addr` from now on. All that it runs after this call is in the log.
    pub(crate) fn start(addr: SocketAddr, log: Arc<Log>) -> Self {
        let mut stream = TcpStream::connect(addr).expect("the server");
        let mut lines = BufReader::new(stream.try_clone().expect("a second handle"));
        stream.write_all(b"MONITOR\r\n").expect("the server");
        let mut reply = String::new();
        lines.read_line(&mut reply).expect("the server");
        assert_eq!(reply, "+OK\r\n");
        let read = move || {
            let mut line = Vec::new();
            while matches!(lines.read_until(b'\n', &mut line), Ok(length) if length > 0) {
                // A server that was killed may leave half a line.
                if line.ends_with(b"\n")
                    && let Some(what) = parse(&String::from_utf8_lossy(&line))
                {
                    log.at(now(), what);
                }
                line.clear();
            }
        };
        let reader = thread::Builder::new().name("tap".to_owned()).spawn(read).expect("a thread");
        Self { stream, reader: Some(reader) }
    }

    /// Waits until the server's last words are in the log; the server must be gone.
    pub(crate) fn finish(mut self) {
        self.join();
    }

    fn join(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.join().expect("the tap understood the server");
        }
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        // An error means that the stream has ended.
        let _ = self.stream.shutdown(Shutdown::Both);
        if !thread::panicking() {
            self.join();
        }
    }
}

/// Reads a line such as `+1795970020.361850 [0 lua] "SET" "fifo:{x}:lock" "..."`; `None` if it tells nothing.
fn parse(line: &str) -> Option<What> {
    let (head, rest) = line.trim_end().strip_prefix('+')?.split_once("] ")?;
    let words = words(rest);
    let mut words = words.iter().map(|word| &**word);
    let command = words.next()?.to_ascii_uppercase();
    if !head.ends_with("lua") {
        return match &*command {
            "FLUSHALL" => Some(What::Flushed),
            "EVAL" | "EVALSHA" => call(&words.skip(1).collect::<Vec<_>>()),
            _ => None,
        };
    }
    let (lock, kind) = key(words.next()?)?;
    let words: Vec<&str> = words.collect();
    match (&*command, kind) {
        ("SET", "lock") => {
            let (seconds, micros) = head.split(' ').next()?.split_once('.')?;
            let now_us = seconds.parse::<u64>().ok()? * 1_000_000 + micros.parse::<u64>().ok()?;
            Some(What::Record { lock, now_us, record: stored(words.first()?) })
        }
        ("ZADD", "queue") => {
            Some(What::Queued { lock, ticket: (*words.get(1)?).to_owned(), position: words[0].parse().ok()? })
        }
        ("ZREM", "queue") => {
            Some(What::Dequeued { lock, tickets: words.iter().map(|word| (*word).to_owned()).collect() })
        }
        ("ZPOPMIN", "queue") => Some(What::Popped { lock, first: true }),
        ("ZPOPMAX", "queue") => Some(What::Popped { lock, first: false }),
        _ => None,
    }
}

/// Reads the arguments of EVAL from the number of keys on.
fn call(words: &[&str]) -> Option<What> {
    let keys: usize = words.first()?.parse().ok()?;
    let (lock, _) = key(words.get(1)?)?;
    let arguments = words.get(1 + keys..)?;
    let verb = match (keys, arguments.len()) {
        (4, 7) => Verb::Acquire,
        (4, 4) => Verb::RenewOrRelease,
        (4, 3) => Verb::Abandon,
        _ => Verb::Other,
    };
    let ticket = arguments.first().copied().unwrap_or_default().to_owned();
    Some(What::Call { lock, verb, ticket })
}

/// The lock's name and the kind of a key.
fn key(key: &str) -> Option<(String, &str)> {
    let (name, kind) = key.strip_prefix("fifo:{")?.split_once("}:")?;
    Some((name.to_owned(), kind))
}

pub(crate) fn stored(text: &str) -> Stored {
    let record = Record::parse(text).unwrap_or_else(|| panic!("not a record: {text}"));
    Stored {
        holder: record.holder.map(|holder| holder.to_string()),
        fence: record.fence,
        until: record.until,
        claim: record.claim,
        suspects: record.suspects.iter().map(|suspect| suspect.to_string()).collect(),
        place: record.place,
    }
}

/// The arguments of a command as MONITOR quotes them.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = None;
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match (c, &mut word) {
            ('"', None) => word = Some(String::new()),
            ('"', Some(_)) => words.extend(word.take()),
            ('\\', Some(word)) => word.extend(chars.next()),
            (c, Some(word)) => word.push(c),
            (_, None) => {}
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn monitor_lines_are_understood() {
        let set = r#"+1795970020.361850 [0 lua] "SET" "fifo:{x}:lock" "a.1.100 7 9 - 5 1 b,c 5" "PX" "60""#;
        match parse(set) {
            Some(What::Record { lock, now_us, record }) => {
                assert_eq!((&*lock, now_us), ("x", 1_795_970_020_361_850));
                assert_eq!((record.holder.as_deref(), record.fence, record.place), (Some("a.1.100"), 7, 5));
                assert_eq!(record.suspects, ["b", "c"]);
            }
            other => panic!("{other:?}"),
        }
        let eval = r#"+1.5 [0 127.0.0.1:1] "EVALSHA" "ab" "4" "fifo:{x}:lock" "q" "l" "b" "a.1.100" "1" "2""#;
        let call = What::Call { lock: "x".into(), verb: Verb::Abandon, ticket: "a.1.100".into() };
        assert_eq!(parse(eval), Some(call));
        assert_eq!(parse(r#"+1.5 [0 127.0.0.1:1] "flushall""#), Some(What::Flushed));
        assert_eq!(parse(r#"+1.5 [0 127.0.0.1:1] "PING""#), None);
        assert_eq!(words(r#""a \"b\"" "" "c""#), [r#"a "b""#, "", "c"]);
    }
}
