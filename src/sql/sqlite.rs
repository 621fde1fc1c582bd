//! Fenced writes into SQLite through `rusqlite`.
//!
//! # Concurrency
//!
//! SQLite lets one connection write at a time. Every call takes the write lock before it looks (`BEGIN
//! IMMEDIATE`) and waits for it as long as the connection's `busy_timeout` says, 5 seconds unless changed; then
//! it fails with a retryable error. Called inside a transaction it works in a savepoint. If that transaction has
//! read before and another connection has written since, SQLite refuses at once (`SQLITE_BUSY_SNAPSHOT`): begin
//! such transactions `IMMEDIATE` to be spared that.
//!
//! # Types
//!
//! SQLite goes by affinity: every declared type with `INT` in it holds 64-bit integers exactly, `INTEGER` and
//! `INT` as well as `BIGINT`, and is allowed. All others (`TEXT`, `REAL`, `NUMERIC`, `BLOB`, none) are refused,
//! because they store something else or take it in without a word. Since a value may still be of any type, a row
//! whose fence is no integer is refused too.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use ::rusqlite;
use ::rusqlite::types::{ToSql, ValueRef};
use ::rusqlite::{Connection, ErrorCode, OptionalExtension, Transaction, TransactionBehavior};

use super::statement::{Dialect, Statement, Target};
use super::{Fenced, GUARD_KEY, GUARD_TABLE, Verdict, held_back, judge, wrong_type};
use crate::error::Error;
use crate::fence::Fence;

const DIALECT: Dialect = Dialect { sign: '?', longest: usize::MAX, folds_case: true };

/// A column and the value it is compared with or set to.
type Pair<'a> = (&'a str, &'a dyn ToSql);

/// An SQLite table whose rows keep the newest fence they were written with.
///
/// A handle is a cheap clone; keep one for each table of each database, since the first write through it looks up
/// the type of the fence column, and no other does. Its calls take a [`Connection`] or, by deref, a
/// [`Transaction`], a savepoint or a pooled connection.
///
/// # Examples
///
/// ```
/// use redis_fifo_lock::Fence;
/// use redis_fifo_lock::sql::Fenced;
/// use redis_fifo_lock::sql::sqlite::FencedTable;
/// use redis_fifo_lock::sql::sqlite::rusqlite::Connection;
///
/// let conn = Connection::open_in_memory()?;
/// conn.execute_batch("CREATE TABLE invoices (id INTEGER PRIMARY KEY, status TEXT)")?;
/// conn.execute_batch("INSERT INTO invoices VALUES (7, 'new')")?;
/// let invoices = FencedTable::builder("invoices").build()?;
/// conn.execute_batch(&invoices.add_column())?; // once, in a migration
///
/// let older = Fence::new(41).unwrap();
/// let newer = Fence::new(42).unwrap();
/// let done = invoices.update(&conn, newer, &[("id", &7)], &[("status", &"done")])?;
/// assert_eq!(done, Fenced::Applied { rows: 1 });
///
/// // The holder that was overtaken wakes up and writes.
/// let late = invoices.update(&conn, older, &[("id", &7)], &[("status", &"failed")])?;
/// assert_eq!(late, Fenced::Stale { newest: newer });
/// assert_eq!(invoices.delete(&conn, older, &[("id", &8)])?, Fenced::Missing);
/// assert_eq!(invoices.upsert(&conn, older, &[("id", &8)], &[("status", &"new")])?, Fenced::Applied { rows: 1 });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct FencedTable {
    table: Arc<Table>,
}

/// What the clones of a handle share.
#[derive(Debug)]
struct Table {
    /// The names.
    target: Target,
    /// Whether the type of the fence column was looked up and found good.
    checked: AtomicBool,
}

/// Settings of a [`FencedTable`].
#[must_use = "a builder does nothing until `build`"]
#[derive(Debug, Clone)]
pub struct FencedTableBuilder {
    target: Target,
}

impl FencedTableBuilder {
    /// Names the schema: `main`, `temp` or an attached database. Defaults to wherever SQLite finds the table first.
    pub fn schema(mut self, schema: impl Into<String>) -> FencedTableBuilder {
        self.target.schema = Some(schema.into());
        self
    }

    /// Names the column that keeps the newest fence. Defaults to `fence_token`.
    pub fn fence_column(mut self, column: impl Into<String>) -> FencedTableBuilder {
        self.target.fence = column.into();
        self
    }

    /// Makes the handle; no connection is needed yet.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for a name that is empty or holds a NUL.
    pub fn build(self) -> Result<FencedTable, Error> {
        self.target.validate()?;
        Ok(FencedTable { table: Arc::new(Table { target: self.target, checked: AtomicBool::new(false) }) })
    }
}

impl FencedTable {
    /// Starts the settings of a handle on `table`: the table's name alone, without quotes.
    pub fn builder(table: impl Into<String>) -> FencedTableBuilder {
        FencedTableBuilder { target: Target::new(DIALECT, table.into()) }
    }

    /// Returns the statement that gives the table its fence column: `ALTER TABLE … ADD COLUMN … BIGINT NOT NULL
    /// DEFAULT 0`.
    ///
    /// A `STRICT` table knows no `BIGINT`; add the column as `INTEGER NOT NULL DEFAULT 0` there.
    #[must_use]
    pub fn add_column(&self) -> String {
        self.table.target.add_column()
    }

    /// Sets columns of every row whose `key` columns equal the given values, unless one of them has a newer fence.
    ///
    /// All or nothing: one newer row, and no row changes. With an empty `set` the rows just take the fence, which
    /// refuses older holders from then on.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for an empty key, a column given twice, the fence column among the columns, a table or
    /// fence column that does not exist, or a fence column that is not of integer affinity; [`Error::Sql`] for
    /// whatever SQLite reports.
    pub fn update(
        &self,
        conn: &Connection,
        fence: Fence,
        key: &[Pair<'_>],
        set: &[Pair<'_>],
    ) -> Result<Fenced, Error> {
        let statement = self.table.target.update(&names(key), &names(set))?;
        self.all_or_nothing(conn, "update", &statement, fence, key, set)
    }

    /// Deletes every row whose `key` columns equal the given values, unless one of them has a newer fence.
    ///
    /// All or nothing, as for [`update`](FencedTable::update). **The rows' fence is gone with them**: an older
    /// holder's upsert can bring the row back. [The module](super#what-it-does-not-do) says what to do where that
    /// matters.
    ///
    /// # Errors
    ///
    /// Those of [`update`](FencedTable::update).
    pub fn delete(&self, conn: &Connection, fence: Fence, key: &[Pair<'_>]) -> Result<Fenced, Error> {
        let statement = self.table.target.delete(&names(key))?;
        self.all_or_nothing(conn, "delete", &statement, fence, key, &[])
    }

    /// Inserts the row, or sets the columns in `set` of the row that has the same `key`, unless that row has a
    /// newer fence.
    ///
    /// The `key` columns need a unique index or primary key of exactly these columns. Never answers `Missing`.
    ///
    /// # Errors
    ///
    /// Those of [`update`](FencedTable::update); [`Error::Sql`] also if no unique index fits the key.
    pub fn upsert(
        &self,
        conn: &Connection,
        fence: Fence,
        key: &[Pair<'_>],
        set: &[Pair<'_>],
    ) -> Result<Fenced, Error> {
        let statement = self.table.target.upsert(&names(key), &names(set))?;
        self.all_or_nothing(conn, "upsert", &statement, fence, key, set)
    }

    /// Writes first and asks afterwards, in one transaction that is only kept if the answer is good.
    fn all_or_nothing(
        &self,
        conn: &Connection,
        verb: &str,
        statement: &Statement,
        fence: Fence,
        key: &[Pair<'_>],
        set: &[Pair<'_>],
    ) -> Result<Fenced, Error> {
        let target = &self.table.target;
        let failed = |error| failed(&format!("{verb} of `{}`", target.label()), error);
        let number = fence.as_i64();
        let keys = values(key);
        let all = [&keys[..], &values(set), &[&number]].concat();
        let scope = Scope::open(conn).map_err(failed)?;
        self.check(conn)?;
        let rows = conn.execute(&statement.write, &all[..]).map_err(failed)? as u64;
        let (matching, newest) = conn
            .query_row(&statement.newest, &keys[..], |row| {
                let newest = match row.get_ref(1)? {
                    ValueRef::Integer(newest) => Ok(Some(newest)),
                    ValueRef::Null => Ok(None),
                    other => Err(other.data_type()),
                };
                Ok((row.get(0)?, newest))
            })
            .map_err(failed)?;
        let newest = newest.map_err(|found| {
            let kind = format!("INTEGER, but a matching row holds {found} in it");
            wrong_type(&target.fence, &target.label(), &kind, "an integer in every row")
        })?;
        // Nobody else can write between the two statements, so there is no second round.
        match judge(fence, rows, matching, newest) {
            Verdict::Done(outcome) => {
                if outcome.is_applied() {
                    scope.commit().map_err(failed)?;
                }
                Ok(outcome)
            }
            Verdict::Again => Err(held_back(&target.label())),
        }
    }

    /// Refuses a fence column that cannot hold every fence: REAL takes 2^53 for 2^53 + 1, TEXT compares letter by
    /// letter.
    fn check(&self, conn: &Connection) -> Result<(), Error> {
        let Table { target, checked } = &*self.table;
        if checked.load(Ordering::Relaxed) {
            return Ok(());
        }
        let label = target.label();
        let failed = |error| failed(&format!("look at the columns of `{label}`"), error);
        let columns = |tail: &str, column: &[&dyn ToSql]| -> Result<Option<String>, Error> {
            let schema = target.schema.iter().map(|schema| schema as &dyn ToSql);
            let values: Vec<&dyn ToSql> = [&target.table as &dyn ToSql]
                .into_iter()
                .chain(schema)
                .chain(column.iter().copied())
                .collect();
            let arguments = if target.schema.is_some() { "?1, ?2" } else { "?1" };
            let query = format!("SELECT type FROM pragma_table_info({arguments}) {tail}");
            conn.query_row(&query, &values[..], |row| row.get(0)).optional().map_err(failed)
        };
        let column = &target.fence;
        let Some(found) = columns("WHERE name = ? COLLATE NOCASE", &[column])? else {
            return Err(Error::Config(match columns("LIMIT 1", &[])? {
                None => format!("there is no table `{label}` here (a schema is given with `schema`)"),
                Some(_) => {
                    format!("table `{label}` has no column `{column}`; this adds it: {}", target.add_column())
                }
            }));
        };
        if !found.to_ascii_uppercase().contains("INT") {
            let found = if found.is_empty() { "none" } else { &found };
            return Err(wrong_type(column, &label, found, "an integer type such as BIGINT or INTEGER"));
        }
        checked.store(true, Ordering::Relaxed);
        Ok(())
    }
}

/// Runs `section` in a transaction that is only committed if no newer fence was seen for `resource`.
///
/// The transaction takes the write lock at its start and moves the resource's row in the table of
/// [`CREATE_GUARD_TABLE`](super::CREATE_GUARD_TABLE) on to `fence`. An older fence is refused before `section`
/// runs. Whatever `section` writes needs no fence of its own, as long as every writer comes through a guard of
/// the same resource.
///
/// If `section` fails or panics, everything is rolled back, the fence's move too. A holder that freezes *inside*
/// keeps every writer of the database out until it goes on or its process ends.
///
/// # Examples
///
/// ```
/// use redis_fifo_lock::sql::sqlite::rusqlite::Connection;
/// use redis_fifo_lock::sql::{self, CREATE_GUARD_TABLE};
/// use redis_fifo_lock::{Error, Fence};
///
/// let mut conn = Connection::open_in_memory()?;
/// conn.execute_batch(CREATE_GUARD_TABLE)?; // once, in a migration
/// conn.execute_batch("CREATE TABLE payments (amount INTEGER)")?;
///
/// let pay = |conn: &mut Connection, fence: u64| {
///     sql::sqlite::guard(conn, Fence::new(fence).unwrap(), "payments", |tx| {
///         tx.execute("INSERT INTO payments VALUES (100)", [])?;
///         Ok::<_, Error>(tx.last_insert_rowid())
///     })
/// };
/// assert_eq!(pay(&mut conn, 42)?, 1);
/// assert!(matches!(pay(&mut conn, 41), Err(Error::FencedOut { .. })));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`Error::FencedOut`] if a newer fence was seen; [`Error::Config`] if the table was made with a fence column
/// that is not of integer affinity; [`Error::Sql`] for whatever SQLite reports; and the error of `section`.
pub fn guard<T, E, F>(conn: &mut Connection, fence: Fence, resource: &str, section: F) -> Result<T, E>
where
    E: From<Error>,
    F: FnOnce(&Transaction<'_>) -> Result<T, E>,
{
    let failed = |error| failed(&format!("guard of `{resource}`"), error);
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    // A fresh handle looks the type up each time: that costs no round trip here.
    FencedTable::builder(GUARD_TABLE)
        .build()?
        .upsert(&tx, fence, &[(GUARD_KEY, &resource)], &[])?
        .rows_or_fenced_out(fence)?;
    let made = section(&tx)?;
    tx.commit().map_err(failed)?;
    Ok(made)
}

/// A transaction of its own, or a savepoint in the caller's; undone when dropped.
struct Scope<'a> {
    conn: &'a Connection,
    /// Whether it is a savepoint.
    nested: bool,
    /// Whether there is nothing left to undo.
    over: bool,
}

impl<'a> Scope<'a> {
    fn open(conn: &'a Connection) -> Result<Scope<'a>, ::rusqlite::Error> {
        let nested = !conn.is_autocommit();
        conn.execute_batch(if nested { "SAVEPOINT redis_fifo_lock" } else { "BEGIN IMMEDIATE" })?;
        Ok(Scope { conn, nested, over: false })
    }

    fn commit(mut self) -> Result<(), ::rusqlite::Error> {
        // COMMIT may fail and leave the transaction open (a reader is in the way); then the drop undoes it.
        self.conn.execute_batch(if self.nested { "RELEASE redis_fifo_lock" } else { "COMMIT" })?;
        self.over = true;
        Ok(())
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        // Some errors (a full disk, say) make SQLite roll back all by itself.
        if !self.over && !self.conn.is_autocommit() {
            let undo = "ROLLBACK TO redis_fifo_lock; RELEASE redis_fifo_lock";
            let undone = self.conn.execute_batch(if self.nested { undo } else { "ROLLBACK" });
            if let Err(error) = undone {
                log::warn!("a fenced write could not be rolled back: {error}");
            }
        }
    }
}

/// Makes `?` work on SQLite's errors in a [`guard`].
impl From<::rusqlite::Error> for Error {
    fn from(error: ::rusqlite::Error) -> Error {
        failed("SQLite", error)
    }
}

/// Whether running the transaction again can help.
pub(super) fn is_transient(error: &::rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

fn failed(what: &str, error: ::rusqlite::Error) -> Error {
    Error::Sql { context: format!("{what}: {error}").into(), source: Arc::new(error) }
}

fn names<'a>(pairs: &[Pair<'a>]) -> Vec<&'a str> {
    pairs.iter().map(|(name, _)| *name).collect()
}

fn values<'a>(pairs: &[Pair<'a>]) -> Vec<&'a dyn ToSql> {
    pairs.iter().map(|(_, value)| *value).collect()
}
