//! The one place that reads a clock: monotonic, and counting while the machine sleeps where the system can say so.
//!
//! A lease goes on lapsing on the server while this machine is suspended, so a clock that stops meanwhile
//! (`std::time::Instant` on Linux) would let a holder believe in a lease that is long gone.

use std::time::Duration;

/// A point in time of this machine since some fixed point in the past.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(Duration);

/// The present.
pub(crate) fn now() -> Moment {
    #[cfg(test)]
    if let Some(now) = crate::sim::now() {
        return now;
    }
    system_now()
}

#[cfg(unix)]
fn system_now() -> Moment {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Boottime;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Monotonic;
    let time = rustix::time::clock_gettime(CLOCK);
    Moment(Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32))
}

#[cfg(not(unix))]
fn system_now() -> Moment {
    use std::sync::OnceLock;
    use std::time::Instant;
    static START: OnceLock<Instant> = OnceLock::new();
    Moment(START.get_or_init(Instant::now).elapsed())
}

impl Moment {
    /// A moment no deadline reaches.
    pub(crate) const NEVER: Moment = Moment(Duration::MAX);

    /// The moment `wait` from here; [`NEVER`](Moment::NEVER) if that cannot be expressed.
    pub(crate) fn after(self, wait: Duration) -> Moment {
        Moment(self.0.saturating_add(wait))
    }

    /// How long it is from `earlier` to here; zero if that lies ahead.
    pub(crate) fn since(self, earlier: Moment) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// How long it is from now to here; zero if it has passed.
    pub(crate) fn left(self) -> Duration {
        self.since(now())
    }

    /// Nanoseconds since the fixed point, for an atomic; 584 years fit.
    pub(crate) fn as_nanos(self) -> u64 {
        self.0.as_nanos().try_into().unwrap_or(u64::MAX)
    }

    /// The moment that [`as_nanos`](Moment::as_nanos) gave.
    pub(crate) fn from_nanos(nanos: u64) -> Moment {
        Moment(Duration::from_nanos(nanos))
    }
}

/// Microseconds since the Unix epoch by this machine's clock: what the memory engine takes for its server's time.
pub(crate) fn unix_us() -> u64 {
    use std::time::SystemTime;
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    since.as_micros().try_into().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_neither_overflow_nor_go_negative() {
        let start = now();
        assert_eq!(start.after(Duration::MAX), Moment::NEVER);
        assert_eq!(start.since(start.after(Duration::from_secs(1))), Duration::ZERO);
        assert_eq!(Moment::from_nanos(start.as_nanos()), start);
    }
}
