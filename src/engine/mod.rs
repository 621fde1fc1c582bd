//! placeholder

/// Whether a call that failed with `error` can succeed later by itself.
pub(crate) fn is_transient(_error: &redis::RedisError) -> bool { true }
