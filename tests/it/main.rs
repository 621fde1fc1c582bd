//! The integration tests: one binary, one module per behaviour.

mod cases_exclusion;
mod cases_renewal;
mod cases_turns;
mod cases_waiters;
mod crashes;
mod exclusion;
mod faults;
mod idempotency_keys;
mod residue;
mod sql_postgres;
mod sql_sqlite;
mod support;
mod support_works;
