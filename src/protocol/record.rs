//! The record of a lock: the one string that says who holds it.

use std::fmt;

use super::{EXACT, TicketId};

/// How many suspected clients a record remembers; the longest suspected is forgotten first.
///
/// A forgotten suspect costs the queue one more claim window, no more; 16 processes of one lock dying together is
/// already an outage of another kind.
pub(super) const SUSPECTS: usize = 16;

/// The record of a lock, `holder fence until claim pos born suspect place` on the server, `-` for none.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Record {
    /// The ticket that holds the lock.
    pub holder: Option<TicketId>,
    /// The newest fence that was minted; the holder's, if there is one.
    pub fence: u64,
    /// When the lease ends unless renewed, server time in microseconds. Without a holder: until when nobody is
    /// granted because data was lost and waiters are still coming back; 0 otherwise.
    pub until: u64,
    /// Set while nobody has shown yet that the holder knows of its grant: when it may be passed over.
    pub claim: Option<u64>,
    /// The newest position that was given.
    pub pos: u64,
    /// When this record was created or the lost list was last cut: a fence below it predates what we remember.
    pub born: u64,
    /// Clients that did not pick up a grant, oldest first, at most 16.
    pub suspects: Vec<Box<str>>,
    /// The position of the holder; 0 without one.
    pub place: u64,
}

impl Record {
    /// The record of a lock nobody remembers anything of.
    #[must_use]
    pub fn new(now_us: u64) -> Record {
        Record {
            holder: None,
            fence: 0,
            until: 0,
            claim: None,
            pos: 0,
            born: now_us,
            suspects: Vec::new(),
            place: 0,
        }
    }

    /// Reads a record, or `None` if `text` is not one: never a record with a holder that the text does not name.
    #[must_use]
    pub fn parse(text: &str) -> Option<Record> {
        let mut fields = text.split(' ');
        let mut field = || fields.next();
        let holder = match field()? {
            "-" => None,
            ticket => Some(TicketId::parse(ticket)?),
        };
        let fence = number(field()?)?;
        let until = number(field()?)?;
        let claim = match field()? {
            "-" => None,
            at => Some(number(at)?),
        };
        let pos = number(field()?)?;
        let born = number(field()?)?;
        let suspects = match field()? {
            "-" => Vec::new(),
            "" => return None,
            list => list.split(',').map(Box::from).collect(),
        };
        let place = number(field()?)?;
        fields.next().is_none().then_some(Record { holder, fence, until, claim, pos, born, suspects, place })
    }

    /// Whether `client` is suspected of being gone.
    #[must_use]
    pub fn suspects(&self, client: &str) -> bool {
        self.suspects.iter().any(|suspect| &**suspect == client)
    }
}

/// Reads a number that a double holds exactly, written without sign, exponent or leading blanks.
fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.len() <= 16 && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().ok())?.filter(|n| *n < EXACT)
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.holder {
            Some(ticket) => write!(f, "{ticket}")?,
            None => f.write_str("-")?,
        }
        write!(f, " {} {} ", self.fence, self.until)?;
        match self.claim {
            Some(at) => write!(f, "{at}")?,
            None => f.write_str("-")?,
        }
        write!(f, " {} {} ", self.pos, self.born)?;
        match self.suspects.as_slice() {
            [] => f.write_str("-")?,
            list => f.write_str(&list.join(","))?,
        }
        write!(f, " {}", self.place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_reads_back_as_it_was_written() {
        let full = "h-1-a.3.60000 1796000000000001 1796000060000001 1796000001000001 1796000000000007 1795000000000000 b,c 1796000000000000";
        let idle = "- 7 0 - 9 1 - 0";
        for text in [full, idle] {
            assert_eq!(Record::parse(text).expect("a record").to_string(), text);
        }
    }

    #[test]
    fn anything_else_is_no_record() {
        for text in [
            "",
            "held",
            "- 7 0 - 9 1 -",
            "- 7 0 - 9 1 - 0 0",
            "- 7 0 - 9 1  0",
            "- -7 0 - 9 1 - 0",
            "- 7e3 0 - 9 1 - 0",
            "x 7 0 - 9 1 - 0",
            "- 9007199254740993 0 - 9 1 - 0",
            " - 7 0 - 9 1 - 0",
        ] {
            assert_eq!(Record::parse(text), None, "{text}");
        }
    }
}
