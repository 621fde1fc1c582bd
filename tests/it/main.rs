//! The integration tests: one binary, one module per behaviour.

mod crashes;
mod exclusion;
mod faults;
mod gate;
mod idempotency_keys;
mod residue;
mod support;
mod support_works;
