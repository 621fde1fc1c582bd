//! The key under which it is remembered that a job has been done; it is a function of the job and of nothing else.

use std::fmt;

use serde::Serialize;
use sha2::{Digest, Sha256};

use super::canonical::canonicalize;
use crate::error::Error;

/// The length of a SHA-256 in hexadecimal.
const FINGERPRINT_LEN: usize = 64;

/// The name of one job: `NAMESPACE:SHA256`, where the hash is that of the payload's canonical JSON.
///
/// Equal payloads have equal keys, in whatever order their maps and fields come and whichever machine asks. It is the
/// string that `idempotency_key(payload, namespace=...)` of the Python package `fencekit` returns, so Rust and Python
/// can share the work. Put into the payload what makes the job this job (the invoice, the month) and nothing that
/// changes when it is tried again (a time, a retry counter, a random id). Two jobs of different kinds need different
/// namespaces: the kind is not in the payload.
///
/// [`canonicalize`] has the rules, and shows the text that is hashed.
///
/// # Examples
///
/// ```
/// use redis_fifo_lock::idempotency::IdempotencyKey;
///
/// #[derive(serde::Serialize)]
/// struct Job<'a> {
///     engine: &'a str,
///     game_ids: &'a [&'a str],
/// }
///
/// let key = IdempotencyKey::new("analysis", &Job { engine: "sf16", game_ids: &["abc", "def"] })?;
/// assert_eq!(key.as_str(), "analysis:3e292d69dea31502d95dc56e0d86f198d7f7f2b2485aac670d2190f4d8d2a14f");
/// # Ok::<(), redis_fifo_lock::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IdempotencyKey {
    /// The namespace, which has no colon, then a colon and the fingerprint.
    text: Box<str>,
}

impl IdempotencyKey {
    /// Makes the key of a payload.
    ///
    /// # Examples
    ///
    /// ```
    /// use redis_fifo_lock::Error;
    /// use redis_fifo_lock::idempotency::IdempotencyKey;
    /// use serde_json::json;
    ///
    /// let key = IdempotencyKey::new("mail", &json!({"to": 7, "about": "invoice"}))?;
    /// assert_eq!(key, IdempotencyKey::new("mail", &json!({"about": "invoice", "to": 7}))?);
    /// assert_ne!(key, IdempotencyKey::new("mail", &json!({"about": "invoice", "to": 7.0}))?);
    ///
    /// let prices = std::collections::BTreeMap::from([("total", f64::NAN)]);
    /// match IdempotencyKey::new("mail", &prices) {
    ///     Err(Error::Config(why)) => assert_eq!(why, "payload.total is NaN; a number must be finite"),
    ///     other => panic!("{other:?}"),
    /// }
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if the namespace is empty or has a colon or whitespace in it (anything else is allowed), or if
    /// the payload has no canonical form: see [`canonicalize`].
    pub fn new(namespace: &str, payload: &(impl Serialize + ?Sized)) -> Result<IdempotencyKey, Error> {
        if namespace.is_empty() || namespace.contains(|each: char| each == ':' || is_space(each)) {
            return Err(Error::Config(format!(
                "{namespace:?} is no namespace: it must not be empty and must not contain `:` or whitespace"
            )));
        }
        let fingerprint = hexadecimal(&Sha256::digest(canonicalize(payload)?));
        Ok(IdempotencyKey { text: format!("{namespace}:{fingerprint}").into() })
    }

    /// Returns the key as text, `NAMESPACE:SHA256`.
    ///
    /// # Examples
    ///
    /// ```
    /// # use redis_fifo_lock::idempotency::IdempotencyKey;
    /// let key = IdempotencyKey::new("mail", &serde_json::json!({}))?;
    /// assert_eq!(key.as_str(), "mail:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a");
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns the namespace the key was made with.
    ///
    /// # Examples
    ///
    /// ```
    /// # use redis_fifo_lock::idempotency::IdempotencyKey;
    /// assert_eq!(IdempotencyKey::new("mail", &serde_json::json!({}))?.namespace(), "mail");
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.text[..self.text.len() - FINGERPRINT_LEN - 1]
    }

    /// Returns the SHA-256 of the canonical payload: 64 lower-case hexadecimal digits.
    ///
    /// Payloads of different namespaces that are alike have the same fingerprint.
    ///
    /// # Examples
    ///
    /// ```
    /// # use redis_fifo_lock::idempotency::IdempotencyKey;
    /// let (mail, bill) = (serde_json::json!({"to": 7}), serde_json::json!({"to": 7}));
    /// let (mail, bill) = (IdempotencyKey::new("mail", &mail)?, IdempotencyKey::new("bill", &bill)?);
    /// assert_eq!(mail.fingerprint(), bill.fingerprint());
    /// assert_ne!(mail, bill);
    /// # Ok::<(), redis_fifo_lock::Error>(())
    /// ```
    #[must_use]
    pub fn fingerprint(&self) -> &str {
        &self.text[self.text.len() - FINGERPRINT_LEN..]
    }
}

impl fmt::Display for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.text)
    }
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("IdempotencyKey").field(&self.text).finish()
    }
}

impl AsRef<str> for IdempotencyKey {
    fn as_ref(&self) -> &str {
        &self.text
    }
}

/// Writes bytes as lower-case hexadecimal digits.
pub(super) fn hexadecimal(bytes: &[u8]) -> String {
    let nibbles = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    nibbles.filter_map(|nibble| char::from_digit(nibble.into(), 16)).collect()
}

/// Whether Python calls a character whitespace: what Unicode does, and the four separators of ASCII.
fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&character)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn whitespace_is_what_python_calls_whitespace() {
        // Printed by Python 3.11 (Unicode 14): `[hex(c) for c in range(0x110000) if chr(c).isspace()]`.
        let python = [
            0x9, 0xa, 0xb, 0xc, 0xd, 0x1c, 0x1d, 0x1e, 0x1f, 0x20, 0x85, 0xa0, 0x1680, 0x2000, 0x2001,
            0x2002, 0x2003, 0x2004, 0x2005, 0x2006, 0x2007, 0x2008, 0x2009, 0x200a, 0x2028, 0x2029, 0x202f,
            0x205f, 0x3000,
        ];
        let here: Vec<u32> = (char::MIN..=char::MAX).filter(|each| is_space(*each)).map(u32::from).collect();
        assert_eq!(here, python);
    }

    #[test]
    fn parts_and_text_agree() {
        let key = IdempotencyKey::new("Ünter{konto}", &json!({})).expect("a namespace");
        assert_eq!(key.namespace(), "Ünter{konto}");
        assert_eq!(format!("{}:{}", key.namespace(), key.fingerprint()), key.as_str());
        assert_eq!(key.to_string(), key.as_str());
        assert_eq!(key.as_ref(), key.as_str());
        assert_eq!(format!("{key:?}"), format!("IdempotencyKey({:?})", key.as_str()));
    }

    #[test]
    fn a_namespace_that_would_be_ambiguous_is_refused() {
        for namespace in ["", ":", "a:b", " a", "a\n", "a\u{1c}", "a\u{3000}b"] {
            match IdempotencyKey::new(namespace, &json!({})) {
                Err(Error::Config(why)) => {
                    assert!(why.starts_with(&format!("{namespace:?} is no namespace")), "{why}")
                }
                other => panic!("{other:?}"),
            }
        }
    }
}
