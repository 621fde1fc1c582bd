//! The fencing token of a grant, and gates that check it.
//!
//! A fence is a number that only ever grows. Whatever stores the result of the work compares it with the newest it has
//! seen, in the same step as the write: a [`FenceGate`] does that for keys on the server of the lock.

mod gate;
mod tx;

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;

use crate::error::Error;

pub use self::gate::FenceGate;
pub use self::tx::Tx;
pub use crate::protocol::keyspace::Answer;

/// The fencing token of one grant.
///
/// Every grant of a lock carries a larger fence than every grant before it. Pass it along with each write, and
/// let the store refuse a write whose fence is smaller than the largest it has seen: that closes the one hole a
/// lease cannot close, a holder that was frozen for longer than its lease and writes when it wakes.
///
/// A fence is the server's time of the grant in microseconds since the Unix epoch, or one more than the fence
/// before it, whichever is larger. It stays below 2^53 until the year 2255, so `f64`, JSON and SQL `BIGINT` hold
/// it exactly; values up to `i64::MAX` are representable.
///
/// # Examples
///
/// ```
/// use redis_fifo_lock::Fence;
///
/// let fence: Fence = "1796000000000001".parse()?;
/// assert!(fence > Fence::new(1_796_000_000_000_000).unwrap());
/// assert_eq!(fence.get(), 1_796_000_000_000_001);
/// assert_eq!(fence.to_string(), "1796000000000001");
/// # Ok::<(), redis_fifo_lock::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "u64", into = "u64"))]
pub struct Fence(NonZeroU64);

impl Fence {
    /// The largest fence there can be: `i64::MAX`, the largest value of an SQL `BIGINT`.
    pub const MAX: Fence = match NonZeroU64::new(i64::MAX as u64) {
        Some(max) => Fence(max),
        None => unreachable!(),
    };

    /// Makes a fence from a number, or `None` if it is 0 or above `i64::MAX`.
    #[must_use]
    pub const fn new(fence: u64) -> Option<Fence> {
        match NonZeroU64::new(fence) {
            Some(number) if fence <= i64::MAX as u64 => Some(Fence(number)),
            _ => None,
        }
    }

    /// Returns the fence as a number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0.get()
    }

    /// Returns the fence as the signed number an SQL `BIGINT` column takes.
    #[must_use]
    pub const fn as_i64(self) -> i64 {
        // `new` is the only constructor and refuses what does not fit.
        self.0.get() as i64
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fence({})", self.0)
    }
}

impl FromStr for Fence {
    type Err = Error;

    fn from_str(text: &str) -> Result<Fence, Error> {
        text.parse().ok().and_then(Fence::new).ok_or_else(|| {
            Error::Config(format!(
                "`{text}` is not a fence: a whole number from 1 to {} is allowed",
                Fence::MAX
            ))
        })
    }
}

impl TryFrom<u64> for Fence {
    type Error = Error;

    fn try_from(number: u64) -> Result<Fence, Error> {
        Fence::new(number).ok_or_else(|| {
            Error::Config(format!(
                "{number} is not a fence: a whole number from 1 to {} is allowed",
                Fence::MAX
            ))
        })
    }
}

impl From<Fence> for u64 {
    fn from(fence: Fence) -> u64 {
        fence.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips_and_nonsense_is_refused() {
        for number in [1, (1 << 53) - 1, 1 << 53, (1 << 53) + 1, i64::MAX as u64] {
            let fence = Fence::new(number).expect("in range");
            assert_eq!(fence.to_string().parse::<Fence>().expect("its own text"), fence);
            assert_eq!(fence.as_i64() as u64, number);
        }
        for text in ["", "0", "-1", "1e14", "9223372036854775808", " 1", "1.0"] {
            assert!(matches!(text.parse::<Fence>(), Err(Error::Config(_))), "{text}");
        }
    }
}
