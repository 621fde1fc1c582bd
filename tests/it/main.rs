//! The integration tests: one binary, one module per behaviour.

mod idempotency_keys;
mod sql_postgres;
mod sql_sqlite;
mod support;
mod support_works;
