//! The integration tests: one binary, one module per behaviour.

mod idempotency_keys;
mod support;
mod support_works;
