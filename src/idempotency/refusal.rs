//! Why a payload was refused, and where in it the offending value is; only the way back up from an error costs.

use std::fmt;

use crate::error::Error;

/// The reason for refusing a payload, with the path to what was refused.
#[derive(Debug)]
pub(super) struct Refusal {
    /// From the value that is being serialised down to the offending one: `.items[3].price`, empty for itself.
    path: String,
    /// The predicate of a sentence whose subject is the path: `is NaN; …`.
    why: String,
}

impl Refusal {
    /// Refuses the value at hand.
    pub(super) fn new(why: impl Into<String>) -> Refusal {
        Refusal { path: String::new(), why: why.into() }
    }

    /// Says that the refused value stands in a map or struct, under `key`.
    pub(super) fn under(self, key: &str) -> Refusal {
        let plain = key.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_')
            && key.chars().all(|each| each.is_ascii_alphanumeric() || each == '_');
        let step = if plain { format!(".{key}") } else { format!("[{key:?}]") };
        Refusal { path: step + &self.path, ..self }
    }

    /// Says that the refused value stands in an array, at `index`.
    pub(super) fn at(self, index: usize) -> Refusal {
        Refusal { path: format!("[{index}]{}", self.path), ..self }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "payload{} {}", self.path, self.why)
    }
}

impl std::error::Error for Refusal {}

impl serde::ser::Error for Refusal {
    fn custom<T: fmt::Display>(message: T) -> Refusal {
        Refusal::new(format!("does not serialise: {message}"))
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Error {
        Error::Config(refusal.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_reads_from_the_payload_to_the_offending_value() {
        let refusal = Refusal::new("is NaN").under("price").at(3).under("items");
        assert_eq!(refusal.to_string(), "payload.items[3].price is NaN");
        let refusal = Refusal::new("is NaN").under("9a").under("a\n\"b").under("");
        assert_eq!(refusal.to_string(), r#"payload[""]["a\n\"b"]["9a"] is NaN"#);
    }
}
