//! Names for jobs that must not run twice: equal jobs get equal keys, on every machine and in Python as well.
//!
//! An [`IdempotencyKey`] is a namespace and the SHA-256 of a payload. The payload is first written as canonical JSON
//! ([`canonicalize`]), so neither the order of a map nor the order of a struct's fields has a say. Keys and canonical
//! text are, byte for byte, what the Python package `fencekit` (0.1.0 to 0.6.1) makes of the same data: a producer in
//! one language and a worker in the other agree on what has been done.
//!
//! Two payloads are the same job if their canonical text is the same, and only then. `1` and `1.0` are two jobs, and
//! so are a field that is `null` and a field that is absent: say `#[serde(skip_serializing_if = "Option::is_none")]`
//! where `None` should mean *absent*.

mod canonical;
mod compound;
mod key;
mod map_key;
mod refusal;
mod spelling;

pub use self::canonical::canonicalize;
pub use self::key::IdempotencyKey;
