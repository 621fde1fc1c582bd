//! Fenced writes into PostgreSQL through the synchronous `postgres` crate.
//!
//! # Isolation
//!
//! A call that is handed a [`Client`](::postgres::Client) runs its own transaction at the session's default
//! level. Hand it a [`Transaction`] from `client.build_transaction()` for another level, or to make it one step
//! of more; it then works in a savepoint.
//!
//! Under READ COMMITTED the write waits for the row lock of a concurrent writer and then looks at the row *as
//! that writer left it*. Under REPEATABLE READ and SERIALIZABLE the same meeting is a serialization failure
//! (`40001`), and [`Error::is_retryable`] says so. Index the key: without an index SERIALIZABLE sees every write
//! of the table as a possible conflict. Two writes of several rows each may meet in a deadlock (`40P01`), also
//! retryable.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use ::postgres;
use ::postgres::types::ToSql;
use ::postgres::{GenericClient, Transaction};

use super::statement::{Dialect, Statement, Target};
use super::{Fenced, GUARD_KEY, GUARD_TABLE, Verdict, held_back, judge, wrong_type};
use crate::error::Error;
use crate::fence::Fence;

/// NAMEDATALEN - 1: the server cuts longer identifiers off with no more than a notice.
const DIALECT: Dialect = Dialect { sign: '$', longest: 63, folds_case: false };

/// How often a write is tried again when the rows it had to write came and went meanwhile. Each round takes another
/// transaction that got in between, so a few are many.
const ROUNDS: usize = 16;

/// Answers no row if there is no such table, else the column's type (NULL without such a column) and whether it, or
/// what it is a domain over, is BIGINT. `$1` is the quoted table, `$2` the bare column.
const COLUMN_TYPE: &str = "\
    SELECT pg_catalog.format_type(a.atttypid, a.atttypmod), \
           COALESCE(NULLIF(t.typbasetype, 0), t.oid) = 'pg_catalog.int8'::pg_catalog.regtype \
    FROM (SELECT pg_catalog.to_regclass($1) AS oid) AS r \
    LEFT JOIN pg_catalog.pg_attribute AS a \
           ON a.attrelid = r.oid AND a.attname = $2 AND a.attnum > 0 AND NOT a.attisdropped \
    LEFT JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid \
    WHERE r.oid IS NOT NULL";

/// A column and the value it is compared with or set to.
type Pair<'a> = (&'a str, &'a (dyn ToSql + Sync));

/// A PostgreSQL table whose rows keep the newest fence they were written with.
///
/// A handle is a cheap clone; keep one for each table of each database, since the first write through it looks up
/// the type of the fence column, and no other does.
///
/// # Examples
///
/// ```no_run
/// use redis_fifo_lock::Fence;
/// use redis_fifo_lock::sql::Fenced;
/// use redis_fifo_lock::sql::postgres::FencedTable;
/// use redis_fifo_lock::sql::postgres::postgres::{Client, NoTls};
///
/// let mut client = Client::connect("host=localhost user=app", NoTls)?;
/// let invoices = FencedTable::builder("invoices").schema("billing").build()?;
/// client.batch_execute(&invoices.add_column())?; // once, in a migration
///
/// let fence = Fence::new(41).unwrap(); // in real life: the guard's
/// match invoices.update(&mut client, fence, &[("id", &7_i64)], &[("status", &"done")])? {
///     Fenced::Applied { rows } => println!("{rows} written"),
///     Fenced::Stale { newest } => println!("overtaken by {newest}, stop"),
///     Fenced::Missing => println!("there is no invoice 7"),
/// }
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
    /// Names the schema. Defaults to whatever the connection's `search_path` finds the table in.
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
    /// [`Error::Config`] for a name that is empty, holds a NUL or has more than 63 bytes.
    pub fn build(self) -> Result<FencedTable, Error> {
        self.target.validate()?;
        Ok(FencedTable { table: Arc::new(Table { target: self.target, checked: AtomicBool::new(false) }) })
    }
}

impl FencedTable {
    /// Starts the settings of a handle on `table`: the table's name alone, in its exact case, without quotes.
    pub fn builder(table: impl Into<String>) -> FencedTableBuilder {
        FencedTableBuilder { target: Target::new(DIALECT, table.into()) }
    }

    /// Returns the statement that gives the table its fence column: `ALTER TABLE … ADD COLUMN … BIGINT NOT NULL
    /// DEFAULT 0`.
    ///
    /// PostgreSQL 11 and later add such a column without rewriting the table.
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
    /// fence column that does not exist, or a fence column that is not `BIGINT`; [`Error::Sql`] for whatever the
    /// database reports.
    pub fn update<C: GenericClient>(
        &self,
        client: &mut C,
        fence: Fence,
        key: &[Pair<'_>],
        set: &[Pair<'_>],
    ) -> Result<Fenced, Error> {
        let statement = self.table.target.update(&names(key), &names(set))?;
        self.all_or_nothing(client, "update", &statement, fence, key, set)
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
    pub fn delete<C: GenericClient>(
        &self,
        client: &mut C,
        fence: Fence,
        key: &[Pair<'_>],
    ) -> Result<Fenced, Error> {
        let statement = self.table.target.delete(&names(key))?;
        self.all_or_nothing(client, "delete", &statement, fence, key, &[])
    }

    /// Inserts the row, or sets the columns in `set` of the row that has the same `key`, unless that row has a
    /// newer fence.
    ///
    /// The `key` columns need a unique index or constraint of exactly these columns. Never answers `Missing`.
    ///
    /// # Errors
    ///
    /// Those of [`update`](FencedTable::update); [`Error::Sql`] also if no unique index fits the key.
    pub fn upsert<C: GenericClient>(
        &self,
        client: &mut C,
        fence: Fence,
        key: &[Pair<'_>],
        set: &[Pair<'_>],
    ) -> Result<Fenced, Error> {
        let statement = self.table.target.upsert(&names(key), &names(set))?;
        self.check(client)?;
        let label = self.table.target.label();
        let failed = |error| failed(&format!("upsert of `{label}`"), error);
        let number = fence.as_i64();
        let keys = values(key);
        let all = [&keys[..], &values(set), &[&number]].concat();
        // One row and one statement, so there is nothing to undo. It answers no row only if it found a newer
        // fence, at that very moment; by now the row may be gone again, and then the insert has its way in the
        // next round.
        for _ in 0..ROUNDS {
            let rows = client.execute(&statement.write, &all).map_err(failed)?;
            if rows > 0 {
                return Ok(Fenced::Applied { rows });
            }
            let answer = client.query_one(&statement.newest, &keys).map_err(failed)?;
            if let Verdict::Done(stale @ Fenced::Stale { .. }) =
                judge(fence, 0, answer.get(0), answer.try_get(1).map_err(failed)?)
            {
                return Ok(stale);
            }
        }
        Err(held_back(&label))
    }

    /// Writes first and asks afterwards, in one transaction that is only kept if the answer is good.
    fn all_or_nothing<C: GenericClient>(
        &self,
        client: &mut C,
        verb: &str,
        statement: &Statement,
        fence: Fence,
        key: &[Pair<'_>],
        set: &[Pair<'_>],
    ) -> Result<Fenced, Error> {
        self.check(client)?;
        let label = self.table.target.label();
        let failed = |error| failed(&format!("{verb} of `{label}`"), error);
        let number = fence.as_i64();
        let keys = values(key);
        let all = [&keys[..], &values(set), &[&number]].concat();
        let mut tx = client.transaction().map_err(failed)?;
        for _ in 0..ROUNDS {
            // Compares and writes as one; waits for other writers and compares with what they left. Rows with a
            // newer fence are skipped.
            let rows = tx.execute(&statement.write, &all).map_err(failed)?;
            // The rows written are locked, the rows skipped can only have become newer: a newer fence seen here was
            // there in time. Under READ COMMITTED this also sees rows that came after the write began.
            let answer = tx.query_one(&statement.newest, &keys).map_err(failed)?;
            match judge(fence, rows, answer.get(0), answer.try_get(1).map_err(failed)?) {
                Verdict::Done(outcome) if outcome.is_applied() => {
                    tx.commit().map_err(failed)?;
                    return Ok(outcome);
                }
                Verdict::Done(outcome) => {
                    // Dropping would do the same and hide the error, after which the caller's transaction is not
                    // as it was.
                    tx.rollback().map_err(failed)?;
                    return Ok(outcome);
                }
                Verdict::Again => {}
            }
        }
        Err(held_back(&label))
    }

    /// Refuses a fence column that cannot hold every fence: an `f64` takes 2^53 for 2^53 + 1.
    fn check<C: GenericClient>(&self, client: &mut C) -> Result<(), Error> {
        let Table { target, checked } = &*self.table;
        if checked.load(Ordering::Relaxed) {
            return Ok(());
        }
        let label = target.label();
        let column = &target.fence;
        let answer = client
            .query_opt(COLUMN_TYPE, &[&target.path(), column])
            .map_err(|error| failed(&format!("look at the columns of `{label}`"), error))?;
        let Some(answer) = answer else {
            return Err(Error::Config(format!(
                "there is no table `{label}` here (case counts, and a schema is given with `schema`)"
            )));
        };
        match (answer.get::<_, Option<String>>(0), answer.get(1)) {
            (None, _) => Err(Error::Config(format!(
                "table `{label}` has no column `{column}`; this adds it: {}",
                target.add_column()
            ))),
            (Some(_), Some(true)) => {
                checked.store(true, Ordering::Relaxed);
                Ok(())
            }
            (Some(found), _) => Err(wrong_type(column, &label, &found, "BIGINT")),
        }
    }
}

/// Runs `section` in a transaction that is only committed if no newer fence was seen for `resource`.
///
/// The first statement moves the resource's row in the table of [`CREATE_GUARD_TABLE`](super::CREATE_GUARD_TABLE)
/// on to `fence`. An older fence is refused before `section` runs; and since the row stays locked to the end, no
/// newer holder gets past its own first statement before this transaction is over. Whatever `section` writes
/// needs no fence of its own, as long as every writer comes through a guard of the same resource.
///
/// If `section` fails or panics, everything is rolled back, the fence's move too. A holder that freezes *inside*
/// keeps newer ones waiting until its connection ends: set `idle_in_transaction_session_timeout` to what a
/// section may take.
///
/// # Examples
///
/// ```no_run
/// use redis_fifo_lock::sql::postgres::postgres::{Client, NoTls};
/// use redis_fifo_lock::sql::{self, CREATE_GUARD_TABLE};
/// use redis_fifo_lock::{Error, Fence};
///
/// let mut client = Client::connect("host=localhost user=app", NoTls)?;
/// client.batch_execute(CREATE_GUARD_TABLE)?; // once, in a migration
///
/// let fence = Fence::new(41).unwrap(); // in real life: the guard's
/// let open: i64 = sql::postgres::guard(&mut client, fence, "invoices", |tx| {
///     tx.execute("UPDATE invoices SET status = 'sent' WHERE status = 'new'", &[])?;
///     Ok::<_, Error>(tx.query_one("SELECT count(*) FROM invoices WHERE status = 'sent'", &[])?.get(0))
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`Error::FencedOut`] if a newer fence was seen; [`Error::Config`] if the table was made with another fence
/// column than `BIGINT`; [`Error::Sql`] for whatever the database reports, also for a statement that failed in
/// `section` and was ignored there, since PostgreSQL commits nothing after it; and the error of `section`.
pub fn guard<C, T, E, F>(client: &mut C, fence: Fence, resource: &str, section: F) -> Result<T, E>
where
    C: GenericClient,
    E: From<Error>,
    F: FnOnce(&mut Transaction<'_>) -> Result<T, E>,
{
    let failed = |error| failed(&format!("guard of `{resource}`"), error);
    let mut tx = client.transaction().map_err(failed)?;
    advance(&mut tx, fence, resource)?;
    let made = section(&mut tx)?;
    // COMMIT of a transaction in which a statement failed rolls back and reports success. This statement does not.
    tx.batch_execute("SELECT 1").map_err(failed)?;
    tx.commit().map_err(failed)?;
    Ok(made)
}

/// Moves the guard's row on to `fence`, or refuses.
fn advance(tx: &mut Transaction<'_>, fence: Fence, resource: &str) -> Result<(), Error> {
    let failed = |error| failed(&format!("guard of `{resource}`"), error);
    let target = Target::new(DIALECT, GUARD_TABLE.into());
    let statement = target.upsert(&[GUARD_KEY], &[])?;
    // The type comes with the answer: there is no handle that could remember it, and this saves a round trip.
    let write = format!("{} RETURNING pg_catalog.pg_typeof(\"{}\")::text", statement.write, target.fence);
    for _ in 0..ROUNDS {
        if let Some(moved) = tx.query_opt(&write, &[&resource, &fence.as_i64()]).map_err(failed)? {
            return match moved.get(0) {
                "bigint" => Ok(()),
                found => Err(wrong_type(&target.fence, GUARD_TABLE, found, "BIGINT")),
            };
        }
        let answer = tx.query_one(&statement.newest, &[&resource]).map_err(failed)?;
        if let Verdict::Done(Fenced::Stale { newest }) =
            judge(fence, 0, answer.get(0), answer.try_get(1).map_err(failed)?)
        {
            return Err(Error::FencedOut { fence, newest });
        }
    }
    Err(held_back(GUARD_TABLE))
}

/// Makes `?` work on the database's errors in a [`guard`].
impl From<::postgres::Error> for Error {
    fn from(error: ::postgres::Error) -> Error {
        failed("PostgreSQL", error)
    }
}

/// Whether running the transaction again can help.
pub(super) fn is_transient(error: &::postgres::Error) -> bool {
    use ::postgres::error::SqlState;

    // The transaction lost against another one, or did not get a lock within `lock_timeout`.
    const TRANSIENT: [&SqlState; 3] = [
        &SqlState::T_R_SERIALIZATION_FAILURE,
        &SqlState::T_R_DEADLOCK_DETECTED,
        &SqlState::LOCK_NOT_AVAILABLE,
    ];
    error.code().is_some_and(|code| TRANSIENT.contains(&code))
}

/// The crate's own `Display` says "db error" and leaves the server's words to the source.
fn failed(what: &str, error: ::postgres::Error) -> Error {
    let why = match (error.as_db_error(), std::error::Error::source(&error)) {
        (Some(server), _) => format!("{} ({})", server.message(), server.code().code()),
        (None, Some(cause)) => format!("{error}: {cause}"),
        (None, None) => error.to_string(),
    };
    Error::Sql { context: format!("{what}: {why}").into(), source: Arc::new(error) }
}

fn names<'a>(pairs: &[Pair<'a>]) -> Vec<&'a str> {
    pairs.iter().map(|(name, _)| *name).collect()
}

fn values<'a>(pairs: &[Pair<'a>]) -> Vec<&'a (dyn ToSql + Sync)> {
    pairs.iter().map(|(_, value)| *value).collect()
}
