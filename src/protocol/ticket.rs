//! Names of those who wait: `CLIENT` and `CLIENT.N.LEASEMS`.

use std::fmt;
use std::sync::Arc;

/// The id of one client: `host-pid-random`, made of letters, digits, `-` and `_` only.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(Arc<str>);

impl ClientId {
    /// Takes `text` as an id; whatever is not a letter, a digit, `-` or `_` becomes `_`, so that an id can stand in
    /// a key, a record and a ticket without quoting. An empty text, or a lone `-` (which means "none" in a
    /// record), becomes `_`.
    #[must_use]
    pub fn cleaned(text: &str) -> ClientId {
        let clean = |c: char| if c.is_ascii_alphanumeric() || c == '-' || c == '_' { c } else { '_' };
        match text {
            "" | "-" => ClientId("_".into()),
            _ => ClientId(text.chars().map(clean).collect::<String>().into()),
        }
    }

    /// The id as it stands in keys.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One attempt to acquire: `CLIENT.N.LEASEMS`.
///
/// The lease is part of the name so that whoever grants the ticket, of whatever client, grants *its* lease.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TicketId(Arc<str>);

impl TicketId {
    /// Names the `n`th ticket of `client`, which wants a lease of `lease_ms` milliseconds.
    #[must_use]
    pub fn new(client: &ClientId, n: u64, lease_ms: u64) -> TicketId {
        TicketId(format!("{client}.{n}.{lease_ms}").into())
    }

    /// Reads a ticket's name, or `None` if `text` is not one.
    #[must_use]
    pub fn parse(text: &str) -> Option<TicketId> {
        let mut parts = text.split('.');
        let (client, n, lease_ms) = (parts.next()?, parts.next()?, parts.next()?);
        let named = !client.is_empty()
            && client != "-"
            && client.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
        let numbered = is_number(n) && is_number(lease_ms) && parts.next().is_none();
        (named && numbered).then(|| TicketId(text.into()))
    }

    /// The name as it stands in queues, records and rings.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The id of the client that took the ticket.
    #[must_use]
    pub fn client(&self) -> &str {
        self.0.split_once('.').map_or(&*self.0, |(client, _)| client)
    }

    /// The lease this ticket wants, in milliseconds.
    #[must_use]
    pub fn lease_ms(&self) -> u64 {
        // Both constructors put a number there.
        self.0.rsplit_once('.').and_then(|(_, lease)| lease.parse().ok()).unwrap_or(0)
    }
}

/// Whether `text` is a number as this crate spells one: 1 to 16 digits, below 10^16.
fn is_number(text: &str) -> bool {
    !text.is_empty() && text.len() <= 16 && text.bytes().all(|b| b.is_ascii_digit())
}

impl fmt::Display for TicketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for TicketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_reads_back_what_it_was_made_of() {
        let client = ClientId::cleaned("web 1.example.org-77-{x}%,é");
        assert_eq!(client.as_str(), "web_1_example_org-77-_x____");
        let ticket = TicketId::new(&client, 12, 86_400_000);
        assert_eq!(ticket.client(), client.as_str());
        assert_eq!(ticket.lease_ms(), 86_400_000);
        assert_eq!(TicketId::parse(ticket.as_str()), Some(ticket));
    }

    #[test]
    fn what_is_not_a_ticket_is_refused() {
        for text in [
            "",
            "-",
            "a",
            "a.1",
            "a.1.",
            "a..1",
            ".1.1",
            "-.1.1",
            "a b.1.1",
            "a.1.1.1",
            "a.-1.1",
            "a.1.99999999999999999",
        ] {
            assert_eq!(TicketId::parse(text), None, "{text}");
        }
    }
}
