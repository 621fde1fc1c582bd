//! The integration tests: one binary, one module per behaviour.

mod differential;
mod support;
mod support_works;
