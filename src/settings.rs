//! What can be set on a lock, with defaults and bounds.
//!
//! Invariant: a `Settings` that left `checked` makes every number derived from it fit: no deadline overflows, no
//! key expires at once, no window is longer than the lease it belongs to.

use std::time::Duration;

use crate::error::Error;
use crate::protocol::Terms;

/// The shortest lease: below it a renewal every quarter has no room for a round trip.
pub(crate) const SHORTEST_LEASE: Duration = Duration::from_millis(10);
/// The longest lease.
pub(crate) const LONGEST_LEASE: Duration = Duration::from_secs(24 * 3600);
/// The longest anything else can be set to: 10 years, so that sums of settings fit everywhere.
pub(crate) const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// The shortest of the other times.
pub(crate) const SHORTEST: Duration = Duration::from_millis(1);

/// The settings of one lock handle.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// How long a grant is good without renewal.
    pub(crate) lease: Duration,
    /// How long a lease is renewed.
    pub(crate) max_hold: Duration,
    /// How often a waiter asks although nobody rang.
    pub(crate) poll: Duration,
    /// How long a grant may stay unclaimed; `None` is 1 s, or the lease if that is shorter.
    pub(crate) claim: Option<Duration>,
    /// How long the server remembers an idle lock.
    pub(crate) idle: Duration,
    /// How long releasing may block.
    pub(crate) release_bound: Duration,
    /// How long a waiter rides out an outage.
    pub(crate) patience: Duration,
    /// How many may be queued.
    pub(crate) max_queue: Option<u64>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            lease: Duration::from_secs(60),
            max_hold: Duration::from_secs(30 * 60),
            poll: Duration::from_secs(2),
            claim: None,
            idle: Duration::from_secs(24 * 3600),
            release_bound: Duration::from_secs(5),
            patience: Duration::from_secs(60),
            max_queue: None,
        }
    }
}

impl Settings {
    /// The default claim window.
    const CLAIM: Duration = Duration::from_secs(1);

    /// Gives the settings back if they make sense.
    pub(crate) fn checked(mut self) -> Result<Settings, Error> {
        within("lease", self.lease, SHORTEST_LEASE, LONGEST_LEASE)?;
        // The ticket carries the lease in whole milliseconds; both sides must mean the same.
        self.lease = Duration::from_millis(millis(self.lease));
        within("max_hold", self.max_hold, SHORTEST, LONGEST)?;
        if self.max_hold <= self.lease {
            return Err(Error::Config(format!(
                "max_hold is {:?}: it must exceed the lease ({:?})",
                self.max_hold, self.lease
            )));
        }
        within("poll", self.poll, SHORTEST_LEASE, Duration::from_secs(3600))?;
        if let Some(claim) = self.claim {
            within("claim", claim, SHORTEST, self.lease)?;
        }
        within("idle", self.idle, SHORTEST, LONGEST)?;
        within("release_bound", self.release_bound, SHORTEST, Duration::from_secs(3600))?;
        within("patience", self.patience, Duration::ZERO, LONGEST)?;
        if self.max_queue == Some(0) {
            return Err(Error::Config(
                "max_queue is 0: at least 1 is allowed; to never queue, use try_lock".into(),
            ));
        }
        Ok(self)
    }

    /// The claim window.
    pub(crate) fn claim(&self) -> Duration {
        self.claim.unwrap_or(Settings::CLAIM.min(self.lease))
    }

    /// What the server is told.
    pub(crate) fn terms(&self) -> Terms {
        Terms {
            claim_ms: millis(self.claim()),
            idle_ms: millis(self.idle),
            // Every room polls within `poll`, and when the lease ends that it knew of; the window on top is for the
            // call and for a slow start.
            regroup_ms: millis(self.poll.min(self.lease)) + millis(self.claim()),
        }
    }

    /// The lease, less what clocks may drift apart while it runs: 1 %.
    pub(crate) fn good_for(&self) -> Duration {
        self.lease - self.lease / 100
    }
}

/// Whole milliseconds, at least 1.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1)
}

/// Refuses a time out of bounds.
pub(crate) fn within(name: &str, time: Duration, least: Duration, most: Duration) -> Result<(), Error> {
    if time < least || time > most {
        return Err(Error::Config(format!("{name} is {time:?}: {least:?} to {most:?} is allowed")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_out_of_bounds_is_refused_by_name() {
        type Break = fn(&mut Settings);
        let breaks: [(&str, Break); 12] = [
            ("lease", |s| s.lease = Duration::ZERO),
            ("lease", |s| s.lease = Duration::from_micros(9_999)),
            ("lease", |s| s.lease = Duration::MAX),
            ("max_hold", |s| s.max_hold = s.lease),
            ("max_hold", |s| s.max_hold = Duration::MAX),
            ("poll", |s| s.poll = Duration::ZERO),
            ("claim", |s| s.claim = Some(s.lease + Duration::from_millis(1))),
            ("claim", |s| s.claim = Some(Duration::ZERO)),
            ("idle", |s| s.idle = Duration::ZERO),
            ("release_bound", |s| s.release_bound = Duration::MAX),
            ("patience", |s| s.patience = Duration::MAX),
            ("max_queue", |s| s.max_queue = Some(0)),
        ];
        for (name, wrong) in breaks {
            let mut settings = Settings::default();
            wrong(&mut settings);
            match settings.checked() {
                Err(Error::Config(message)) => {
                    assert!(
                        message.contains(name) && message.contains("llowed") || message.contains("exceed"),
                        "{message}"
                    );
                }
                other => panic!("{name}: {other:?}"),
            }
        }
    }

    #[test]
    fn the_claim_window_never_exceeds_the_lease() {
        let settings = Settings { lease: Duration::from_millis(200), ..Settings::default() };
        assert_eq!(settings.claim(), Duration::from_millis(200));
        assert_eq!(Settings::default().claim(), Duration::from_secs(1));
    }
}
