//! The one place that spells a key.

use std::fmt::Write as _;

use crate::error::Error;

/// Bytes a lock's name may have before it is encoded.
pub(crate) const NAME_BYTES: usize = 512;

/// The keys of one lock. All of them share the hash tag `{NAME}`, so a cluster keeps them in one slot.
#[derive(Clone, Debug)]
pub(crate) struct LockKeys {
    /// The lock's name as the user gave it.
    pub(crate) name: Box<str>,
    /// `PREFIX:{NAME}:lock`.
    pub(crate) lock: Box<str>,
    /// `PREFIX:{NAME}:queue`.
    pub(crate) queue: Box<str>,
    /// `PREFIX:{NAME}:lost`.
    pub(crate) lost: Box<str>,
    /// `PREFIX:{NAME}:bell:CLIENT` of the calling client.
    pub(crate) bell: Box<str>,
}

impl LockKeys {
    /// Spells the keys of the lock `name` as `client` uses them.
    pub(crate) fn new(prefix: &str, name: &str, client: &str) -> Result<LockKeys, Error> {
        if name.is_empty() || name.len() > NAME_BYTES {
            return Err(Error::Config(format!(
                "the lock's name has {} bytes: 1 to {NAME_BYTES} are allowed",
                name.len()
            )));
        }
        let base = format!("{prefix}:{{{}}}", encode(name));
        Ok(LockKeys {
            name: name.into(),
            lock: format!("{base}:lock").into(),
            queue: format!("{base}:queue").into(),
            lost: format!("{base}:lost").into(),
            bell: format!("{base}:bell:{client}").into(),
        })
    }
}

/// Refuses a prefix that would break the hash tag or the reading of keys by hand.
pub(crate) fn check_prefix(prefix: &str) -> Result<(), Error> {
    let allowed = |c: char| !c.is_control() && !c.is_whitespace() && !matches!(c, '{' | '}' | '%');
    if prefix.is_empty() || prefix.len() > 64 || !prefix.chars().all(allowed) {
        return Err(Error::Config(format!(
            "prefix {prefix:?}: 1 to 64 bytes without braces, `%`, blanks and control characters are allowed"
        )));
    }
    Ok(())
}

/// Percent-encodes what would break the hash tag or a line of text: `{ } %`, control characters and whitespace.
fn encode(name: &str) -> String {
    let mut encoded = String::with_capacity(name.len());
    for c in name.chars() {
        if c.is_control() || c.is_whitespace() || matches!(c, '{' | '}' | '%') {
            for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                // Writing to a String cannot fail.
                let _ = write!(encoded, "%{byte:02X}");
            }
        } else {
            encoded.push(c);
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_leave_its_hash_tag() {
        let keys = LockKeys::new("fifo", "a}b{c%d\n\u{a0}é", "me").expect("a name");
        assert_eq!(&*keys.lock, "fifo:{a%7Db%7Bc%25d%0A%C2%A0é}:lock");
        assert_eq!(&*keys.bell, "fifo:{a%7Db%7Bc%25d%0A%C2%A0é}:bell:me");
    }

    #[test]
    fn names_and_prefixes_out_of_bounds_are_refused() {
        assert!(LockKeys::new("fifo", "", "me").is_err());
        assert!(LockKeys::new("fifo", &"x".repeat(513), "me").is_err());
        assert!(LockKeys::new("fifo", &"x".repeat(512), "me").is_ok());
        for prefix in ["", "a b", "a{b", "%"] {
            assert!(check_prefix(prefix).is_err(), "{prefix}");
        }
        assert!(check_prefix("my:app").is_ok());
    }
}
