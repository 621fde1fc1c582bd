//! The integration tests: one binary, one module per behaviour.

mod cases_connections;
mod cases_deadlines;
mod cases_exclusion;
mod cases_keys_and_errors;
mod cases_renewal;
mod cases_resources;
mod cases_turns;
mod cases_waiters;
/// The judge of the chaos suite; here for its tests on corrupted logs.
#[path = "../chaos/checker/mod.rs"]
mod checker;
mod crashes;
mod differential;
mod exclusion;
mod faults;
mod foreign_values;
mod full_server;
mod fuzz_slice;
mod gate;
/// What it judges.
#[path = "../chaos/history.rs"]
mod history;
mod idempotency;
mod idempotency_keys;
mod mutants;
mod residue;
mod run_once;
mod scenarios;
mod situations;
mod sql_postgres;
mod sql_sqlite;
mod support;
mod support_works;
