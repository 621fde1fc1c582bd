//! The one place that spells a key.

use std::fmt::Write as _;

use crate::error::Error;

/// Bytes a lock's name may have before it is encoded.
pub(crate) const NAME_BYTES: usize = 512;

/// Bytes a key that is written through a gate may have.
const TARGET_BYTES: usize = 1024;

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

    /// `PREFIX:{NAME}:`, with which all of them begin.
    fn base(&self) -> &str {
        self.lock.strip_suffix("lock").unwrap_or(&self.lock)
    }
}

/// The keys of one gate.
#[derive(Clone, Debug)]
pub(crate) struct GateKeys {
    /// The target as the user named it.
    pub(crate) target: Box<str>,
    /// `PREFIX:{NAME}:gate:TARGET` in front of the work of a lock, else `PREFIX:gate:{TARGET}`.
    pub(crate) gate: Box<str>,
    /// The record of the lock it is bound to.
    pub(crate) lock: Option<Box<str>>,
}

impl GateKeys {
    /// Spells the gate of `target`, bound to the lock that `lock` spells, if any.
    ///
    /// Without a lock the gate has the target's own hash tag, so a cluster keeps the two in one slot:
    /// `PREFIX:gate:{TARGET}`; `PREFIX:gate:{TAG}:TARGET` if the target has a tag itself; and
    /// `PREFIX:gate:{}:TARGET`, which is in no particular slot, if it has a brace that makes no tag. In the last two
    /// `TARGET` is encoded as a lock's name is.
    pub(crate) fn new(prefix: &str, target: &str, lock: Option<&LockKeys>) -> Result<GateKeys, Error> {
        check_target(prefix, target)?;
        let gate = match lock {
            Some(lock) => format!("{}gate:{}", lock.base(), encode(target)),
            None => match hash_tag(target) {
                Some(tag) => format!("{prefix}:gate:{{{tag}}}:{}", encode(target)),
                None if target.contains(['{', '}']) => format!("{prefix}:gate:{{}}:{}", encode(target)),
                None => format!("{prefix}:gate:{{{target}}}"),
            },
        };
        Ok(GateKeys { target: target.into(), gate: gate.into(), lock: lock.map(|lock| lock.lock.clone()) })
    }
}

/// Spells the record of the job `key` under the lock that `lock` spells: `PREFIX:{NAME}:job:KEY`.
#[cfg(feature = "idempotency")]
pub(crate) fn job(lock: &LockKeys, key: &str) -> Box<str> {
    format!("{}job:{}", lock.base(), encode(key)).into()
}

/// The name of the lock that the job `key` has for itself.
#[cfg(feature = "idempotency")]
pub(crate) fn own_lock(key: &str) -> String {
    format!("job:{key}")
}

/// Spells the record of the job whose own lock `lock` spells: `PREFIX:{job:KEY}:job`.
#[cfg(feature = "idempotency")]
pub(crate) fn own_job(lock: &LockKeys) -> Box<str> {
    format!("{}job", lock.base()).into()
}

/// Refuses to write to a key that is one of this library's own.
pub(crate) fn check_target(prefix: &str, key: &str) -> Result<(), Error> {
    if key.is_empty() || key.len() > TARGET_BYTES {
        return Err(Error::Config(format!(
            "the key has {} bytes: 1 to {TARGET_BYTES} are allowed",
            key.len()
        )));
    }
    let ours = key.strip_prefix(prefix).and_then(|rest| rest.strip_prefix(':')).is_some_and(|rest| {
        let part = |rest: &str| rest.rsplit_once('}').map(|(_, part)| part.to_owned());
        let of_lock = |part: String| {
            matches!(&*part, ":lock" | ":queue" | ":lost" | ":job")
                || [":bell:", ":gate:", ":job:"].iter().any(|word| part.starts_with(word))
        };
        rest.starts_with("gate:{") || (rest.starts_with('{') && part(rest).is_some_and(of_lock))
    });
    if ours {
        return Err(Error::Config(format!(
            "`{key}` is a key of a lock or a gate itself; other keys are allowed, or another prefix"
        )));
    }
    Ok(())
}

/// The hash tag of `key`: what a cluster looks at instead of the whole key.
fn hash_tag(key: &str) -> Option<&str> {
    let (_, rest) = key.split_once('{')?;
    rest.split_once('}').map(|(tag, _)| tag).filter(|tag| !tag.is_empty())
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
    fn gates_are_spelled_apart_and_share_the_slot_of_their_target() {
        let lock = LockKeys::new("fifo", "x", "me").expect("a name");
        let gate = |target: &str| GateKeys::new("fifo", target, None).expect("a target").gate;
        assert_eq!(&*gate("report 7%"), "fifo:gate:{report 7%}");
        assert_eq!(&*gate("a:{7}:b"), "fifo:gate:{7}:a:%7B7%7D:b");
        assert_eq!(&*gate("a}b"), "fifo:gate:{}:a%7Db");
        assert_eq!(&*gate("{}a"), "fifo:gate:{}:%7B%7Da");
        for target in ["report", "a:{7}:b", "{{a}"] {
            let own = hash_tag(target).unwrap_or(target);
            assert_eq!(hash_tag(&gate(target)), Some(own), "{target}");
        }
        let bound = GateKeys::new("fifo", "a {7}", Some(&lock)).expect("a target");
        assert_eq!(&*bound.gate, "fifo:{x}:gate:a%20%7B7%7D");
        assert_eq!(bound.lock.as_deref(), Some("fifo:{x}:lock"));
    }

    #[test]
    fn no_key_of_ours_is_a_target() {
        let lock = LockKeys::new("fifo", "x", "me").expect("a name");
        let gate = GateKeys::new("fifo", "a", Some(&lock)).expect("a target").gate;
        let plain = GateKeys::new("fifo", "a", None).expect("a target").gate;
        for key in ["", &lock.lock, &lock.queue, &lock.lost, &lock.bell, &gate, &plain, &"x".repeat(1025)] {
            assert!(check_target("fifo", key).is_err(), "{key}");
        }
        for key in ["fifo", "fifo:{x}:report", "fifo:gate", "other:{x}:lock", "fifo:x:lock"] {
            assert!(check_target("fifo", key).is_ok(), "{key}");
        }
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
