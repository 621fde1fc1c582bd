//! The integration tests: one binary, one module per behaviour.

mod support;
mod support_works;
