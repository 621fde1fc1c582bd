//! The integration tests: one binary, one module per behaviour.

mod crashes;
mod differential;
mod exclusion;
mod faults;
mod foreign_values;
mod gate;
mod idempotency;
mod idempotency_keys;
mod residue;
mod run_once;
mod sql_postgres;
mod sql_sqlite;
mod support;
mod support_works;
