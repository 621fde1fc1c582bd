//! The integration tests: one binary, one module per behaviour.

mod differential;
mod foreign_values;
mod support;
mod support_works;
