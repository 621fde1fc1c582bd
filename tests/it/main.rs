//! The integration tests: one binary, one module per behaviour.

mod differential;
mod foreign_values;
mod full_server;
mod mutants;
mod scenarios;
mod situations;
mod support;
mod support_works;
