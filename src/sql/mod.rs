//! Fenced writes into SQL tables: the database refuses a holder that was overtaken, even when the holder does not
//! know yet.
//!
//! A lock's lease cannot stop a process that was frozen for longer than the lease and writes when it wakes. The
//! table can: each row keeps the newest [`Fence`] it was written with, and a write with an older one changes
//! nothing. What happened is told apart as [`Fenced::Applied`], [`Fenced::Stale`] and [`Fenced::Missing`].
//!
//! The module of each database has a `FencedTable` for single writes and a `guard` for whole transactions:
//! `sql::postgres` for the synchronous `postgres` crate (feature `postgres`), `sql::sqlite` for `rusqlite`
//! (feature `sqlite`; `sqlite-bundled` brings SQLite along). A table needs one more column, which
//! `FencedTable::add_column` spells: `fence_token BIGINT NOT NULL DEFAULT 0`. `guard` needs the table of
//! [`CREATE_GUARD_TABLE`].
//!
//! # The rules
//!
//! | the rows the key matches | outcome | what changed |
//! |---|---|---|
//! | none | `Missing` (an upsert inserts: `Applied`) | nothing |
//! | all with a fence that is NULL, older or equal | `Applied` | all of them, and their fence |
//! | at least one with a newer fence | `Stale`, with the newest of them | nothing, not even the other rows |
//!
//! - NULL and 0 mean *never fenced*: the first fence may write. An equal fence may write again, so a holder can
//!   write as often as it likes and can repeat a write whose answer was lost.
//! - Every call is one transaction: its own, or a savepoint in the one it is handed. On `Stale`, `Missing` and
//!   any error what the call did is undone.
//! - The fence is compared by the writing statement itself, which the database looks at again after waiting for
//!   another writer. No writer can slip in between a check and a write, at any isolation level.
//! - Where a transaction was overtaken in a way that only a fresh one can see (serialization failure, deadlock,
//!   busy database) the call fails with an [`Error::Sql`] that [`is_retryable`](Error::is_retryable): run the
//!   *whole* transaction again, with the same fence.
//! - Identifiers are quoted, so their case counts in PostgreSQL, and a dot is part of a name (the schema is given
//!   apart). What cannot be quoted is refused. Values are bound, never written into the text.
//! - The fence column must hold every `i64` exactly; any other type is refused with an [`Error::Config`]. The type
//!   is looked up once for each handle, so keep the handle.
//!
//! # What it does not do
//!
//! - It cannot see a write that leaves the fence out. Every writer of a fenced row has to go through it.
//! - A key value of NULL matches nothing, as always in SQL, and two NULLs never conflict in an upsert.
//! - **A deleted row forgets its fence.** After a delete an overtaken holder's upsert finds no row and inserts
//!   one. Where that matters, do not delete but mark: `update` a column such as `deleted_at`, which keeps the row
//!   and its fence, and sweep the marked rows once no holder can be that old; or write in a `guard`, whose row
//!   outlives what it guards.
//! - Rows that a trigger, a rule or a row-level policy hides or skips are hidden from the fence too. If every
//!   matching row is kept from being written although its fence allows it, the call fails with an `Error::Config`.
//! - In PostgreSQL's REPEATABLE READ and SERIALIZABLE the outcome is that of the transaction's snapshot:
//!   `Missing` then means that there was no row when the transaction began. A write over a newer fence fails
//!   there as well.

#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "sqlite")]
pub mod sqlite;
mod statement;

use std::error::Error as StdError;

use crate::error::Error;
use crate::fence::Fence;

/// The statement that creates the table in which `guard` keeps one row for each resource.
///
/// It is the same for PostgreSQL and SQLite and does nothing if the table is there. PostgreSQL finds the table
/// through the `search_path`.
pub const CREATE_GUARD_TABLE: &str = "CREATE TABLE IF NOT EXISTS \"fifo_fences\" \
     (\"resource\" TEXT NOT NULL PRIMARY KEY, \"fence_token\" BIGINT NOT NULL DEFAULT 0)";

/// The table of [`CREATE_GUARD_TABLE`] and the column of its key.
const GUARD_TABLE: &str = "fifo_fences";
const GUARD_KEY: &str = "resource";

/// What a fenced write did.
///
/// These three are all there are, so a `match` needs no arm for what may come.
#[must_use = "a stale or missing row was not written"]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fenced {
    /// Every matching row was written and carries the fence now.
    Applied {
        /// The number of rows written, at least 1.
        rows: u64,
    },
    /// A matching row has a newer fence: somebody else was granted the lock since. Nothing was written; stop
    /// working.
    Stale {
        /// The newest fence among the matching rows.
        newest: Fence,
    },
    /// No row matches the key. Nothing was written.
    Missing,
}

impl Fenced {
    /// Returns whether the rows were written.
    #[must_use]
    pub const fn is_applied(self) -> bool {
        matches!(self, Fenced::Applied { .. })
    }

    /// Returns the number of rows written, and turns `Stale` into the error that ends the work.
    ///
    /// # Errors
    ///
    /// [`Error::FencedOut`] for `Stale`. `fence` is the one the write was tried with.
    pub fn rows_or_fenced_out(self, fence: Fence) -> Result<u64, Error> {
        match self {
            Fenced::Applied { rows } => Ok(rows),
            Fenced::Missing => Ok(0),
            Fenced::Stale { newest } => Err(Error::FencedOut { fence, newest }),
        }
    }
}

/// Whether a transaction that failed with `error` can succeed if it is run again.
pub(crate) fn is_transient(error: &(dyn StdError + Send + Sync + 'static)) -> bool {
    #[cfg(feature = "postgres")]
    if let Some(error) = error.downcast_ref::<::postgres::Error>() {
        return postgres::is_transient(error);
    }
    #[cfg(feature = "sqlite")]
    if let Some(error) = error.downcast_ref::<::rusqlite::Error>() {
        return sqlite::is_transient(error);
    }
    let _ = error;
    false
}

/// What a write and the question after it say together.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// This was the outcome. Unless it is `Applied`, the write has to be undone.
    Done(Fenced),
    /// A row is there that the write should have taken and did not: it came in between, or something holds it back.
    Again,
}

/// Reads the outcome from the number of rows `written`, of rows that match after the write, and the newest fence
/// of these.
fn judge(fence: Fence, written: u64, matching: i64, newest: Option<i64>) -> Verdict {
    match newest.and_then(|newest| Fence::new(u64::try_from(newest).ok()?)) {
        // Asked first: with one newer row the others must not be written either.
        Some(newest) if newest > fence => Verdict::Done(Fenced::Stale { newest }),
        _ if written > 0 => Verdict::Done(Fenced::Applied { rows: written }),
        _ if matching == 0 => Verdict::Done(Fenced::Missing),
        _ => Verdict::Again,
    }
}

/// The error for rows that stay at `Verdict::Again`.
fn held_back(table: &str) -> Error {
    Error::Config(format!(
        "the matching rows of `{table}` carry no newer fence and are still not written: \
         a trigger, a rule or a row-level policy holds them back"
    ))
}

/// The error for a fence column that cannot hold every fence.
fn wrong_type(column: &str, table: &str, found: &str, allowed: &str) -> Error {
    Error::Config(format!(
        "fence column `{column}` of `{table}` is of type {found}, which does not hold every fence: \
         it has to be {allowed}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_newer_row_outweighs_all_that_were_written() {
        let seven = Fence::new(7).expect("in range");
        let ten = Fence::new(10).expect("in range");
        let stale = Verdict::Done(Fenced::Stale { newest: ten });
        assert_eq!(judge(seven, 3, 4, Some(10)), stale);
        assert_eq!(judge(seven, 0, 1, Some(10)), stale);
        assert_eq!(judge(seven, 3, 3, Some(7)), Verdict::Done(Fenced::Applied { rows: 3 }));
        assert_eq!(judge(seven, 1, 0, None), Verdict::Done(Fenced::Applied { rows: 1 }));
        assert_eq!(judge(seven, 0, 0, None), Verdict::Done(Fenced::Missing));
        for newest in [None, Some(-1), Some(0), Some(6), Some(7)] {
            assert_eq!(judge(seven, 0, 1, newest), Verdict::Again, "{newest:?}");
        }
    }

    #[test]
    fn stale_is_the_only_outcome_that_becomes_an_error() {
        let seven = Fence::new(7).expect("in range");
        assert_eq!(Fenced::Applied { rows: 2 }.rows_or_fenced_out(seven).expect("applied"), 2);
        assert_eq!(Fenced::Missing.rows_or_fenced_out(seven).expect("missing"), 0);
        let refused = Fenced::Stale { newest: Fence::MAX }.rows_or_fenced_out(seven);
        assert!(
            matches!(refused, Err(Error::FencedOut { fence, newest }) if fence == seven && newest == Fence::MAX)
        );
    }
}
