//! The integration tests: one binary, one module per behaviour.

/// The judge of the chaos suite; here for its tests on corrupted logs.
#[path = "../chaos/checker/mod.rs"]
mod checker;
mod crashes;
mod exclusion;
mod faults;
mod fuzz_slice;
/// What it judges.
#[path = "../chaos/history.rs"]
mod history;
mod idempotency_keys;
mod residue;
mod sql_postgres;
mod sql_sqlite;
mod support;
mod support_works;
