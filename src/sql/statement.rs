//! The text of every statement: identifiers are quoted or refused here, and values never get this far.
//!
//! Every column is written as `"fenced"."column"`, never bare. SQLite takes a bare quoted name that is no column
//! for a string, so that a misspelt key would compare two constants and match every row or none, silently.

use std::fmt::Write as _;

use crate::error::Error;

/// The name every statement gives the table it works on.
const ALIAS: &str = "\"fenced\"";

/// What differs between the databases in the text of a statement.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dialect {
    /// What stands before the number of a bound value.
    pub(super) sign: char,
    /// The longest identifier in bytes; PostgreSQL cuts longer ones off, and may then mean another column.
    pub(super) longest: usize,
    /// Whether a quoted identifier still matches whatever its case.
    pub(super) folds_case: bool,
}

/// A table and its fence column, by name.
#[derive(Debug, Clone)]
pub(super) struct Target {
    /// The database the statements are for.
    pub(super) dialect: Dialect,
    /// The schema, or `None` for whatever the connection finds the table in.
    pub(super) schema: Option<String>,
    /// The table.
    pub(super) table: String,
    /// The column that holds the newest fence.
    pub(super) fence: String,
}

/// A fenced write and the question that tells why it did nothing.
#[derive(Debug)]
pub(super) struct Statement {
    /// Binds the key's values, then the other values, then the fence.
    pub(super) write: String,
    /// Binds the key's values; answers one row: how many rows there are, and the newest fence among them.
    pub(super) newest: String,
}

impl Target {
    pub(super) fn new(dialect: Dialect, table: String) -> Target {
        Target { dialect, schema: None, table, fence: "fence_token".into() }
    }

    /// Refuses names the database could not hold.
    pub(super) fn validate(&self) -> Result<(), Error> {
        for name in self.schema.iter().chain([&self.table, &self.fence]) {
            self.identifier(name)?;
        }
        Ok(())
    }

    /// The table as it stands in a statement.
    pub(super) fn path(&self) -> String {
        match &self.schema {
            Some(schema) => format!("{}.{}", quote(schema), quote(&self.table)),
            None => quote(&self.table),
        }
    }

    /// The table as it stands in a message.
    pub(super) fn label(&self) -> String {
        match &self.schema {
            Some(schema) => format!("{schema}.{}", self.table),
            None => self.table.clone(),
        }
    }

    pub(super) fn add_column(&self) -> String {
        format!("ALTER TABLE {} ADD COLUMN {} BIGINT NOT NULL DEFAULT 0", self.path(), quote(&self.fence))
    }

    /// `UPDATE` of every row the key matches and whose fence is not newer.
    pub(super) fn update(&self, key: &[&str], set: &[&str]) -> Result<Statement, Error> {
        self.columns(key, set, false)?;
        let fence = self.fence_value(key.len() + set.len() + 1);
        let mut write = format!("UPDATE {} AS {ALIAS} SET ", self.path());
        for (at, column) in set.iter().enumerate() {
            let _ = write!(write, "{} = {}, ", quote(column), self.value(key.len() + at + 1));
        }
        let _ = write!(
            write,
            "{} = {fence} WHERE {} AND {}",
            quote(&self.fence),
            self.matches(key),
            self.not_newer(&fence)
        );
        Ok(Statement { write, newest: self.newest(key) })
    }

    /// `INSERT`, or the update of the row that is in its way if that row's fence is not newer.
    pub(super) fn upsert(&self, key: &[&str], set: &[&str]) -> Result<Statement, Error> {
        self.columns(key, set, true)?;
        let fence = self.fence_value(key.len() + set.len() + 1);
        let list = |names: &mut dyn Iterator<Item = String>| names.collect::<Vec<_>>().join(", ");
        let all = key.iter().chain(set);
        let columns = list(&mut all.clone().map(|column| quote(column)).chain([quote(&self.fence)]));
        let values = list(&mut (1..=all.count()).map(|at| self.value(at)).chain([fence.clone()]));
        let keys = list(&mut key.iter().map(|column| quote(column)));
        let mut write = format!(
            "INSERT INTO {} AS {ALIAS} ({columns}) VALUES ({values}) ON CONFLICT ({keys}) DO UPDATE SET ",
            self.path()
        );
        for column in set {
            let _ = write!(write, "{0} = excluded.{0}, ", quote(column));
        }
        // The fence is bound again, not taken from `excluded`, which a trigger may have changed.
        let _ = write!(write, "{} = {fence} WHERE {}", quote(&self.fence), self.not_newer(&fence));
        Ok(Statement { write, newest: self.newest(key) })
    }

    /// `DELETE` of every row the key matches and whose fence is not newer.
    pub(super) fn delete(&self, key: &[&str]) -> Result<Statement, Error> {
        self.columns(key, &[], false)?;
        let fence = self.fence_value(key.len() + 1);
        let write = format!(
            "DELETE FROM {} AS {ALIAS} WHERE {} AND {}",
            self.path(),
            self.matches(key),
            self.not_newer(&fence)
        );
        Ok(Statement { write, newest: self.newest(key) })
    }

    fn newest(&self, key: &[&str]) -> String {
        format!(
            "SELECT count(*), max({ALIAS}.{}) FROM {} AS {ALIAS} WHERE {}",
            quote(&self.fence),
            self.path(),
            self.matches(key)
        )
    }

    /// Refuses columns that would make the statement mean something else.
    fn columns(&self, key: &[&str], set: &[&str], one_row: bool) -> Result<(), Error> {
        let table = self.label();
        if key.is_empty() {
            return Err(Error::Config(format!("no key was given for `{table}`: name the rows to write")));
        }
        let same = |one: &str, other: &str| match self.dialect.folds_case {
            true => one.eq_ignore_ascii_case(other),
            false => one == other,
        };
        for column in key.iter().chain(set) {
            self.identifier(column)?;
            if same(column, &self.fence) {
                return Err(Error::Config(format!(
                    "`{column}` is the fence column of `{table}`: it is set from the fence, leave it out"
                )));
            }
        }
        // An update may change the column it looks for; an insert names every column once.
        let named = if one_row { vec![[key, set].concat()] } else { vec![key.to_vec(), set.to_vec()] };
        for columns in named {
            for (at, column) in columns.iter().enumerate() {
                if columns[..at].iter().any(|earlier| same(earlier, column)) {
                    return Err(Error::Config(format!("column `{column}` of `{table}` is given twice")));
                }
            }
        }
        Ok(())
    }

    fn identifier(&self, name: &str) -> Result<(), Error> {
        let longest = self.dialect.longest;
        match name {
            "" => Err(Error::Config("an SQL identifier is empty".into())),
            _ if name.contains('\0') => Err(Error::Config(format!("SQL identifier {name:?} holds a NUL"))),
            _ if name.len() > longest => Err(Error::Config(format!(
                "SQL identifier `{name}` has {} bytes: {longest} are allowed",
                name.len()
            ))),
            _ => Ok(()),
        }
    }

    fn matches(&self, key: &[&str]) -> String {
        let equal =
            |(at, column): (usize, &&str)| format!("{ALIAS}.{} = {}", quote(column), self.value(at + 1));
        key.iter().enumerate().map(equal).collect::<Vec<_>>().join(" AND ")
    }

    /// The condition that makes a write fenced. It stands in the write's own `WHERE`, the one place the database
    /// looks at again after it waited for another writer's row lock.
    fn not_newer(&self, fence: &str) -> String {
        let column = format!("{ALIAS}.{}", quote(&self.fence));
        format!("({column} IS NULL OR {column} <= {fence})")
    }

    fn value(&self, at: usize) -> String {
        format!("{}{at}", self.dialect.sign)
    }

    /// The fence's place, cast so that its type never depends on the column it is compared with.
    fn fence_value(&self, at: usize) -> String {
        format!("CAST({}{at} AS BIGINT)", self.dialect.sign)
    }
}

fn quote(identifier: &str) -> String {
    format!("\"{}\"", identifier.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOLLAR: Dialect = Dialect { sign: '$', longest: 63, folds_case: false };
    const FOLDING: Dialect = Dialect { sign: '?', longest: usize::MAX, folds_case: true };

    fn target(dialect: Dialect) -> Target {
        Target { schema: Some("my schema".into()), ..Target::new(dialect, "in\"voices".into()) }
    }

    #[test]
    fn every_statement_carries_the_fence_condition_and_only_places_for_values() {
        let target = target(DOLLAR);
        let update = target.update(&["id"], &["status"]).expect("fine names");
        assert_eq!(
            update.write,
            "UPDATE \"my schema\".\"in\"\"voices\" AS \"fenced\" SET \"status\" = $2, \
             \"fence_token\" = CAST($3 AS BIGINT) WHERE \"fenced\".\"id\" = $1 AND \
             (\"fenced\".\"fence_token\" IS NULL OR \"fenced\".\"fence_token\" <= CAST($3 AS BIGINT))"
        );
        assert_eq!(
            update.newest,
            "SELECT count(*), max(\"fenced\".\"fence_token\") FROM \"my schema\".\"in\"\"voices\" AS \"fenced\" \
             WHERE \"fenced\".\"id\" = $1"
        );
        assert_eq!(
            target.upsert(&["a", "b"], &["c"]).expect("fine names").write,
            "INSERT INTO \"my schema\".\"in\"\"voices\" AS \"fenced\" (\"a\", \"b\", \"c\", \"fence_token\") \
             VALUES ($1, $2, $3, CAST($4 AS BIGINT)) ON CONFLICT (\"a\", \"b\") DO UPDATE SET \
             \"c\" = excluded.\"c\", \"fence_token\" = CAST($4 AS BIGINT) WHERE \
             (\"fenced\".\"fence_token\" IS NULL OR \"fenced\".\"fence_token\" <= CAST($4 AS BIGINT))"
        );
        assert_eq!(
            target.delete(&["a", "b"]).expect("fine names").write,
            "DELETE FROM \"my schema\".\"in\"\"voices\" AS \"fenced\" WHERE \"fenced\".\"a\" = $1 AND \
             \"fenced\".\"b\" = $2 AND \
             (\"fenced\".\"fence_token\" IS NULL OR \"fenced\".\"fence_token\" <= CAST($3 AS BIGINT))"
        );
    }

    #[test]
    fn names_that_cannot_be_quoted_are_refused() {
        let refused = |target: &Target, key: &[&str], set: &[&str]| {
            matches!(target.update(key, set), Err(Error::Config(_)))
        };
        let target = target(DOLLAR);
        assert!(target.validate().is_ok());
        assert!(refused(&target, &[""], &[]));
        assert!(refused(&target, &["i\0d"], &[]));
        assert!(refused(&target, &["id"], &[&"x".repeat(64)]));
        assert!(!refused(&target, &["id"], &[&"x".repeat(63)]));
        assert!(Target::new(DOLLAR, "x".repeat(64)).validate().is_err());
        assert!(Target::new(FOLDING, "x".repeat(64)).validate().is_ok());
    }

    #[test]
    fn a_missing_key_a_repeated_column_and_the_fence_itself_are_refused() {
        for dialect in [DOLLAR, FOLDING] {
            let target = target(dialect);
            assert!(target.update(&[], &["status"]).is_err());
            assert!(target.delete(&[]).is_err());
            assert!(target.update(&["id"], &["status", "status"]).is_err());
            assert!(target.update(&["id", "id"], &[]).is_err());
            assert!(target.update(&["id"], &["fence_token"]).is_err());
            assert!(target.delete(&["fence_token"]).is_err());
            assert!(
                target.update(&["status"], &["status"]).is_ok(),
                "an update may change what it looks for"
            );
            assert!(target.upsert(&["id"], &["id"]).is_err(), "an insert names a column once");
            assert_eq!(target.update(&["id"], &["FENCE_Token"]).is_err(), dialect.folds_case);
            assert_eq!(target.update(&["id"], &["a", "A"]).is_err(), dialect.folds_case);
        }
    }
}
