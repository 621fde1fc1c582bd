//! How long to wait before the next attempt.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

/// A jittered, doubling pause; the first attempt after a failure comes at once.
#[derive(Debug)]
pub(crate) struct Backoff {
    /// The next pause before jitter.
    next: Duration,
    /// The longest pause.
    longest: Duration,
}

impl Backoff {
    /// The first pause that is one.
    const FIRST: Duration = Duration::from_millis(5);

    /// Starts anew.
    pub(crate) fn new(longest: Duration) -> Backoff {
        Backoff { next: Duration::ZERO, longest }
    }

    /// The next pause: between half and all of a time that doubles, so that clients cut off together do not come
    /// back together.
    pub(crate) fn pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).clamp(Backoff::FIRST, self.longest.max(Backoff::FIRST));
        pause.mul_f64(0.5 + 0.5 * chance())
    }
}

/// A number from 0 to below 1, from the randomness std seeds its hash maps with.
fn chance() -> f64 {
    (random() >> 11) as f64 / (1u64 << 53) as f64
}

/// A random number, good enough to tell clients apart and to spread them out; no secret rests on it.
pub(crate) fn random() -> u64 {
    #[cfg(test)]
    if let Some(number) = crate::sim::random() {
        return number;
    }
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_start_at_once_and_stay_bounded() {
        let mut backoff = Backoff::new(Duration::from_millis(100));
        assert_eq!(backoff.pause(), Duration::ZERO);
        for _ in 0..20 {
            let pause = backoff.pause();
            assert!(pause >= Backoff::FIRST / 2 && pause <= Duration::from_millis(100), "{pause:?}");
        }
    }
}
