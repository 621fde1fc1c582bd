//! What every parser of foreign bytes keeps: an error, or exactly what the bytes spell; never a panic.
#![allow(dead_code, reason = "each fuzz target uses some of them")]

use redis_fifo_lock::fuzzing;
use redis_fifo_lock::protocol::{Command, EXACT, Next, Record, Reply, TicketId};
use redis_fifo_lock::redis::{Value, parse_redis_value};

/// A record that is read names no holder, and no number, that the text does not.
pub(crate) fn record(text: &str) {
    let Some(record) = Record::parse(text) else { return };
    let words: Vec<&str> = text.split(' ').collect();
    let [holder, fence, until, claim, pos, born, suspects, place] = words[..] else {
        panic!("{text:?} has not 8 fields")
    };
    assert_eq!(record.holder.as_ref().map_or("-", TicketId::as_str), holder);
    for (number, word) in [
        (record.fence, fence),
        (record.until, until),
        (record.pos, pos),
        (record.born, born),
        (record.place, place),
    ] {
        assert_eq!(Ok(number), word.parse(), "{text:?}");
        assert!(number < EXACT, "{text:?}");
    }
    assert_eq!(record.claim, claim.parse().ok(), "{text:?}");
    assert_eq!(record.claim.is_none(), claim == "-", "{text:?}");
    let listed = record.suspects.join(",");
    assert_eq!(if record.suspects.is_empty() { "-" } else { &*listed }, suspects, "{text:?}");
    // What is written back reads the same.
    assert_eq!(Record::parse(&record.to_string()), Some(record));
}

/// A ticket is the text that it was read from, in three parts.
pub(crate) fn ticket(text: &str) {
    let Some(ticket) = TicketId::parse(text) else { return };
    assert_eq!(ticket.as_str(), text);
    let parts: Vec<&str> = text.split('.').collect();
    assert_eq!(parts.len(), 3, "{text:?}");
    assert_eq!(ticket.client(), parts[0]);
    assert_eq!(Ok(ticket.lease_ms()), parts[2].parse());
    assert!(!parts[0].is_empty() && !text.contains([' ', ',', '{', '}', ':', '\0']), "{text:?}");
}

/// A ring names the ticket and the fence that its bytes do.
pub(crate) fn ring(bytes: &[u8]) {
    let Some(ring) = fuzzing::ring(bytes) else { return };
    let (ticket, fence) = str::from_utf8(bytes).expect("text").split_once(' ').expect("two words");
    assert_eq!(ring.ticket.as_str(), ticket);
    assert_eq!(Ok(ring.fence), fence.parse());
    assert!(ring.fence > 0 && ring.fence <= EXACT);
}

/// The bytes of a reply, as the client reads them off its socket.
pub(crate) fn wire(which: u8, bytes: &[u8]) {
    if let Ok(value) = parse_redis_value(bytes) {
        reply(which, &value);
    }
}

/// A reply says what its items spell, one by one.
pub(crate) fn reply(which: u8, value: &Value) {
    let command = command(which);
    let Ok(reply) = fuzzing::decode(&command, value) else { return };
    let Value::Array(items) = value else { panic!("{value:?} is no array") };
    let words: Vec<String> = items.iter().map(word).collect();
    if let Reply::Inspected(seen) = &reply {
        assert_eq!(words[0], seen.now_us.to_string());
        assert_eq!(seen.record, Record::parse(&words[1]), "{value:?}");
        assert_eq!(words[2], seen.waiting.to_string());
        assert_eq!(words.len(), 3 + 2 * seen.queue.len(), "{value:?}");
        for (pair, (ticket, position)) in words[3..].chunks(2).zip(&seen.queue) {
            assert_eq!(pair[0], ticket.as_str());
            assert_eq!(Ok(*position), pair[1].parse());
        }
        return;
    }
    assert_eq!(words, spell(&command, &reply), "{value:?}");
    if let Reply::Granted { fence, position } = reply {
        assert!(fence > 0 && position > 0, "{value:?}");
    }
}

/// One command of each kind.
fn command(which: u8) -> Command {
    let ticket = TicketId::parse("a.1.100").expect("a ticket");
    match which % 6 {
        0 => Command::Acquire { ticket, position: None, wait: true, max_queue: None },
        1 => Command::Renew { ticket, fence: 1 },
        2 => Command::Release { ticket, fence: 1 },
        3 => Command::Abandon { ticket },
        4 => Command::Inspect { limit: 1 },
        _ => Command::Evict { fence: 1 },
    }
}

/// The items that a reply must have come from.
fn spell(command: &Command, reply: &Reply) -> Vec<String> {
    let mut words = Vec::new();
    let mut put = |numbers: &[u64]| words.extend(numbers.iter().map(u64::to_string));
    let next = match reply {
        Reply::Granted { fence, position } => {
            put(&[1, *fence, *position]);
            return words;
        }
        Reply::Waiting { position, ahead, holder_ms, newest, reentered, next } => {
            put(&[2, *position, *ahead, *holder_ms, *newest, u64::from(*reentered)]);
            next
        }
        Reply::Renewed { waiters } => {
            put(&[1, *waiters]);
            return words;
        }
        Reply::Evicted => {
            put(&[1]);
            return words;
        }
        Reply::Changed => {
            put(&[2]);
            return words;
        }
        Reply::Busy { next } => {
            put(&[3]);
            next
        }
        Reply::Full { next } => {
            put(&[4]);
            next
        }
        Reply::Lost { next } => {
            put(&[if matches!(command, Command::Renew { .. }) { 2 } else { 3 }]);
            next
        }
        Reply::Released { next } | Reply::Abandoned { next } => {
            put(&[1]);
            next
        }
        Reply::Already { next } => {
            put(&[2]);
            next
        }
        Reply::Inspected(_) => panic!("compared elsewhere"),
    };
    let (ticket, fence) = match next {
        Some(Next { ticket, fence }) => (ticket.as_str(), *fence),
        None => ("", 0),
    };
    words.extend([ticket.to_owned(), fence.to_string()]);
    words
}

/// An item as text. One that is neither a number nor text cannot be part of a reply that was understood.
fn word(item: &Value) -> String {
    match item {
        Value::Int(number) => number.to_string(),
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).expect("text"),
        Value::SimpleString(text) => text.clone(),
        other => panic!("{other:?} was understood"),
    }
}
