//! Fenced writes into SQLite: what each outcome leaves behind, and writers that race on one file.
#![cfg(feature = "sqlite")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use redis_fifo_lock::sql::sqlite::rusqlite::types::Value;
use redis_fifo_lock::sql::sqlite::rusqlite::{Connection, OptionalExtension, ToSql, params};
use redis_fifo_lock::sql::sqlite::{FencedTable, guard};
use redis_fifo_lock::sql::{CREATE_GUARD_TABLE, Fenced};
use redis_fifo_lock::{Error, Fence};

const ONE: Fenced = Fenced::Applied { rows: 1 };

fn fence(number: u64) -> Fence {
    Fence::new(number).expect("a test's fence is in range")
}

/// A table `jobs` with rows 1 to 4, fences NULL, 0, 5 and 10, and status `new`.
fn jobs() -> (Connection, FencedTable) {
    let conn = Connection::open_in_memory().expect("memory");
    conn.execute_batch(
        "CREATE TABLE jobs (id INTEGER PRIMARY KEY, lot TEXT DEFAULT 'a', status TEXT, fence_token BIGINT);
         INSERT INTO jobs (id, status, fence_token) VALUES (1, 'new', NULL), (2, 'new', 0), (3, 'new', 5), (4, 'new', 10);",
    )
    .expect("schema");
    (conn, FencedTable::builder("jobs").build().expect("fine names"))
}

fn row(conn: &Connection, id: i64) -> Option<(String, Option<i64>)> {
    conn.query_row("SELECT status, fence_token FROM jobs WHERE id = ?", [id], |row| {
        Ok((row.get(0)?, row.get(1)?))
    })
    .optional()
    .expect("a row")
}

#[test]
fn never_fenced_and_older_rows_are_written_newer_ones_refused_and_missing_ones_told_apart() {
    let (conn, jobs) = jobs();
    let mut outcomes = Vec::new();
    for id in 1..=5_i64 {
        outcomes.push(jobs.update(&conn, fence(7), &[("id", &id)], &[("status", &"done")]).expect("update"));
    }
    assert_eq!(outcomes, [ONE, ONE, ONE, Fenced::Stale { newest: fence(10) }, Fenced::Missing]);
    for id in 1..=3 {
        assert_eq!(row(&conn, id), Some(("done".into(), Some(7))));
    }
    assert_eq!(row(&conn, 4), Some(("new".into(), Some(10))));
    assert_eq!(row(&conn, 5), None);

    for (id, expected) in [(1, ONE), (4, Fenced::Stale { newest: fence(10) }), (5, ONE)] {
        let got = jobs.upsert(&conn, fence(8), &[("id", &id)], &[("status", &"up")]).expect("upsert");
        assert_eq!(got, expected, "{id}");
    }
    assert_eq!(row(&conn, 4), Some(("new".into(), Some(10))));
    assert_eq!(row(&conn, 5), Some(("up".into(), Some(8))));

    for (id, expected) in [(2, ONE), (4, Fenced::Stale { newest: fence(10) }), (6, Fenced::Missing)] {
        assert_eq!(jobs.delete(&conn, fence(9), &[("id", &id)]).expect("delete"), expected, "{id}");
    }
    assert_eq!(row(&conn, 2), None);
    assert!(row(&conn, 4).is_some());
}

#[test]
fn an_equal_fence_may_write_again() {
    let (conn, jobs) = jobs();
    for status in ["half", "done"] {
        assert_eq!(jobs.update(&conn, fence(7), &[("id", &1)], &[("status", &status)]).expect("update"), ONE);
        assert_eq!(jobs.upsert(&conn, fence(7), &[("id", &2)], &[("status", &status)]).expect("upsert"), ONE);
    }
    assert_eq!(row(&conn, 1), Some(("done".into(), Some(7))));
    assert_eq!(row(&conn, 2), Some(("done".into(), Some(7))));
    assert_eq!(jobs.delete(&conn, fence(7), &[("id", &1)]).expect("delete"), ONE);
}

#[test]
fn one_newer_row_keeps_all_rows_from_being_written() {
    let (conn, jobs) = jobs();
    let everything = [("lot", &"a" as &dyn ToSql)];
    let stale = Fenced::Stale { newest: fence(10) };
    assert_eq!(jobs.update(&conn, fence(7), &everything, &[("status", &"done")]).expect("update"), stale);
    assert_eq!(jobs.delete(&conn, fence(7), &everything).expect("delete"), stale);
    for (id, number) in [(1, None), (2, Some(0)), (3, Some(5)), (4, Some(10))] {
        assert_eq!(row(&conn, id), Some(("new".into(), number)));
    }
    let all = Fenced::Applied { rows: 4 };
    assert_eq!(jobs.update(&conn, fence(11), &everything, &[("status", &"done")]).expect("update"), all);
    assert_eq!(jobs.delete(&conn, fence(11), &everything).expect("delete"), all);
}

#[test]
fn a_stale_write_inside_a_transaction_undoes_only_itself() {
    let (mut conn, jobs) = jobs();
    let tx = conn.transaction().expect("begin");
    tx.execute("UPDATE jobs SET status = 'mine' WHERE id = 4", []).expect("plain");
    let stale = jobs.update(&tx, fence(7), &[("lot", &"a")], &[("status", &"done")]).expect("update");
    assert_eq!(stale, Fenced::Stale { newest: fence(10) });
    assert_eq!(jobs.update(&tx, fence(7), &[("id", &1)], &[("status", &"done")]).expect("update"), ONE);
    tx.commit().expect("commit");
    assert_eq!(row(&conn, 1), Some(("done".into(), Some(7))));
    assert_eq!(row(&conn, 2), Some(("new".into(), Some(0))));
    assert_eq!(row(&conn, 4), Some(("mine".into(), Some(10))));

    let tx = conn.transaction().expect("begin");
    assert_eq!(jobs.update(&tx, fence(8), &[("id", &1)], &[("status", &"undone")]).expect("update"), ONE);
    drop(tx);
    assert_eq!(row(&conn, 1), Some(("done".into(), Some(7))), "the caller's rollback takes the write along");
}

#[test]
fn an_empty_set_takes_the_row_and_refuses_older_holders() {
    let (conn, jobs) = jobs();
    assert_eq!(jobs.update(&conn, fence(8), &[("id", &1)], &[]).expect("update"), ONE);
    assert_eq!(row(&conn, 1), Some(("new".into(), Some(8))));
    let late = jobs.update(&conn, fence(7), &[("id", &1)], &[("status", &"done")]).expect("update");
    assert_eq!(late, Fenced::Stale { newest: fence(8) });
}

#[test]
fn an_update_may_change_the_column_it_looks_for() {
    let (conn, jobs) = jobs();
    conn.execute("DELETE FROM jobs WHERE id = 4", []).expect("delete");
    let got = jobs.update(&conn, fence(7), &[("status", &"new")], &[("status", &"done")]).expect("update");
    assert_eq!(got, Fenced::Applied { rows: 3 });
    let got = jobs.update(&conn, fence(7), &[("status", &"new")], &[("status", &"done")]).expect("update");
    assert_eq!(got, Fenced::Missing);
}

#[test]
fn fences_are_exact_up_to_the_largest() {
    let edges = [(1 << 53) - 1, 1 << 53, (1 << 53) + 1, i64::MAX as u64 - 1, i64::MAX as u64];
    let (mut conn, jobs) = jobs();
    conn.execute_batch(CREATE_GUARD_TABLE).expect("guard table");
    for held in edges {
        for tried in edges {
            conn.execute("DELETE FROM jobs WHERE id = 9", []).expect("clean");
            conn.execute("DELETE FROM fifo_fences", []).expect("clean");
            assert_eq!(jobs.upsert(&conn, fence(held), &[("id", &9)], &[]).expect("upsert"), ONE);
            guard(&mut conn, fence(held), "edge", |_| Ok::<_, Error>(())).expect("first");
            let expected = if tried < held { Fenced::Stale { newest: fence(held) } } else { ONE };
            let upserted = jobs.upsert(&conn, fence(tried), &[("id", &9)], &[]).expect("upsert");
            assert_eq!(upserted, expected, "{tried} after {held}");
            let updated = jobs.update(&conn, fence(tried), &[("id", &9)], &[]).expect("update");
            assert_eq!(updated, expected, "{tried} after {held}");
            let guarded = guard(&mut conn, fence(tried), "edge", |_| Ok::<_, Error>(()));
            assert_eq!(guarded.is_err(), tried < held, "{tried} after {held}");
            let deleted = jobs.delete(&conn, fence(tried), &[("id", &9)]).expect("delete");
            assert_eq!(deleted, expected, "{tried} after {held}");
        }
    }
}

#[test]
fn names_with_quotes_and_spaces_are_quoted_and_never_run() {
    let conn = Connection::open_in_memory().expect("memory");
    conn.execute_batch(
        "CREATE TABLE victim (id INTEGER);
         CREATE TABLE \"my \"\"jobs\"\"; DROP TABLE victim; --\" (\"the id\" INTEGER PRIMARY KEY, \"sta\"\"tus\" TEXT);",
    )
    .expect("schema");
    let odd = FencedTable::builder("my \"jobs\"; DROP TABLE victim; --")
        .schema("main")
        .fence_column("f\"ence to'ken")
        .build()
        .expect("can be quoted");
    conn.execute_batch(&odd.add_column()).expect("add the column");
    let status = "'; DROP TABLE victim; --";
    let upserted = odd.upsert(&conn, fence(7), &[("the id", &1)], &[("sta\"tus", &status)]).expect("upsert");
    assert_eq!(upserted, ONE);
    let updated = odd.update(&conn, fence(7), &[("the id", &1)], &[("sta\"tus", &status)]).expect("update");
    assert_eq!(updated, ONE);
    let found: String = conn
        .query_row(
            &format!("SELECT \"sta\"\"tus\" FROM {}", "\"my \"\"jobs\"\"; DROP TABLE victim; --\""),
            [],
            |row| row.get(0),
        )
        .expect("the row");
    assert_eq!(found, status);
    assert_eq!(odd.delete(&conn, fence(7), &[("the id", &1)]).expect("delete"), ONE);
    conn.execute("INSERT INTO victim VALUES (1)", []).expect("the victim is still there");

    for name in ["", "a\0b"] {
        assert!(matches!(FencedTable::builder(name).build(), Err(Error::Config(_))), "{name:?}");
        assert!(matches!(FencedTable::builder("t").schema(name).build(), Err(Error::Config(_))), "{name:?}");
        assert!(
            matches!(FencedTable::builder("t").fence_column(name).build(), Err(Error::Config(_))),
            "{name:?}"
        );
    }
}

#[test]
fn a_misspelt_column_is_an_error_and_not_a_string() {
    let (conn, jobs) = jobs();
    // Bare, `"ghost" = 'ghost'` compares two strings in SQLite and matches every row.
    let key: (&str, &dyn ToSql) = ("ghost", &"ghost");
    assert!(matches!(jobs.update(&conn, fence(99), &[key], &[("status", &"done")]), Err(Error::Sql { .. })));
    assert!(matches!(jobs.delete(&conn, fence(99), &[key]), Err(Error::Sql { .. })));
    assert!(matches!(jobs.upsert(&conn, fence(99), &[key], &[("status", &"done")]), Err(Error::Sql { .. })));
    assert!(conn.is_autocommit(), "a failed call leaves no transaction open");
    assert_eq!(row(&conn, 1), Some(("new".into(), None)));
}

#[test]
fn columns_that_do_not_hold_every_fence_are_refused() {
    for (kind, allowed) in [
        ("BIGINT", true),
        ("INTEGER", true),
        ("int8", true),
        ("TEXT", false),
        ("VARCHAR(20)", false),
        ("REAL", false),
        ("DOUBLE PRECISION", false),
        ("NUMERIC", false),
        ("BLOB", false),
        ("", false),
    ] {
        let conn = Connection::open_in_memory().expect("memory");
        conn.execute_batch(&format!("CREATE TABLE jobs (id INTEGER PRIMARY KEY, fence_token {kind})"))
            .expect("schema");
        let jobs = FencedTable::builder("jobs").build().expect("fine names");
        match jobs.upsert(&conn, fence(7), &[("id", &1)], &[]) {
            Ok(outcome) => assert!(allowed && outcome == ONE, "{kind}"),
            Err(Error::Config(why)) => assert!(!allowed && why.contains("fence_token"), "{kind}: {why}"),
            Err(error) => panic!("{kind}: {error}"),
        }
        assert!(conn.is_autocommit());
    }
    let (conn, _) = jobs();
    let refusal = |table: FencedTable| match table.update(&conn, fence(7), &[("id", &1)], &[]) {
        Err(Error::Config(why)) => why,
        other => panic!("{other:?}"),
    };
    let missing = refusal(FencedTable::builder("jobs").fence_column("token").build().expect("fine"));
    assert!(
        missing.contains("ALTER TABLE \"jobs\" ADD COLUMN \"token\" BIGINT NOT NULL DEFAULT 0"),
        "{missing}"
    );
    let missing = refusal(FencedTable::builder("main.jobs").build().expect("fine"));
    assert!(missing.contains("no table"), "{missing}");
}

#[test]
fn a_fence_that_is_no_integer_is_refused_and_not_overwritten() {
    let (conn, jobs) = jobs();
    for odd in [Value::Text("soon".into()), Value::Real(6.5), Value::Blob(vec![1])] {
        conn.execute("UPDATE jobs SET fence_token = ? WHERE id = 3", params![odd]).expect("odd value");
        let refused = jobs.update(&conn, fence(7), &[("id", &3)], &[("status", &"done")]);
        let after = row_status(&conn, 3);
        match odd {
            // Smaller than the fence, so it was written over, as it would be in any table.
            Value::Real(_) => assert_eq!((refused.expect("update"), after.as_str()), (ONE, "done")),
            _ => assert!(matches!(refused, Err(Error::Config(_))) && after == "new", "{odd:?}"),
        }
        conn.execute("UPDATE jobs SET status = 'new' WHERE id = 3", []).expect("reset");
    }
}

fn row_status(conn: &Connection, id: i64) -> String {
    conn.query_row("SELECT status FROM jobs WHERE id = ?", [id], |row| row.get(0)).expect("a row")
}

#[test]
fn a_deleted_row_forgets_its_fence_and_a_marked_one_does_not() {
    let (conn, jobs) = jobs();
    assert_eq!(jobs.delete(&conn, fence(11), &[("id", &4)]).expect("delete"), ONE);
    let back = jobs.upsert(&conn, fence(7), &[("id", &4)], &[("status", &"back")]).expect("upsert");
    assert_eq!(back, ONE, "documented: nothing is left that could refuse");

    assert_eq!(jobs.update(&conn, fence(11), &[("id", &3)], &[("status", &"deleted")]).expect("mark"), ONE);
    let refused = jobs.upsert(&conn, fence(7), &[("id", &3)], &[("status", &"back")]).expect("upsert");
    assert_eq!(refused, Fenced::Stale { newest: fence(11) });
}

#[test]
fn rows_held_back_by_a_trigger_are_an_error_and_not_missing() {
    let (conn, jobs) = jobs();
    conn.execute_batch("CREATE TRIGGER no BEFORE UPDATE ON jobs BEGIN SELECT RAISE(IGNORE); END")
        .expect("trigger");
    let held = jobs.update(&conn, fence(7), &[("id", &1)], &[("status", &"done")]);
    assert!(matches!(&held, Err(Error::Config(why)) if why.contains("trigger")), "{held:?}");
}

#[test]
fn a_guard_refuses_an_overtaken_holder_and_rolls_back_what_fails() {
    let (mut conn, _) = jobs();
    conn.execute_batch(CREATE_GUARD_TABLE).expect("guard table");
    conn.execute_batch(CREATE_GUARD_TABLE).expect("again");
    let mark = |conn: &mut Connection, number, status: &str| {
        guard(conn, fence(number), "jobs", |tx| {
            tx.execute("UPDATE jobs SET status = ? WHERE id = 1", [status])?;
            Ok::<_, Error>(())
        })
    };
    mark(&mut conn, 8, "eight").expect("first");
    mark(&mut conn, 8, "eight again").expect("equal");
    let mut entered = false;
    let refused = guard(&mut conn, fence(7), "jobs", |_| {
        entered = true;
        Ok::<_, Error>(())
    });
    assert!(
        matches!(refused, Err(Error::FencedOut { fence: tried, newest }) if tried == fence(7) && newest == fence(8))
    );
    assert!(!entered, "the section of an overtaken holder does not even start");
    guard(&mut conn, fence(7), "other", |_| Ok::<_, Error>(())).expect("another resource");

    let failed = guard(&mut conn, fence(9), "jobs", |tx| {
        tx.execute("UPDATE jobs SET status = 'half' WHERE id = 1", [])?;
        Err::<(), _>(Error::Config("gave up".into()))
    });
    assert!(matches!(failed, Err(Error::Config(why)) if why == "gave up"));
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        guard(&mut conn, fence(9), "jobs", |tx| -> Result<(), Error> {
            tx.execute("UPDATE jobs SET status = 'half' WHERE id = 1", [])?;
            panic!("in the section")
        })
    }));
    assert!(panicked.is_err());
    assert!(conn.is_autocommit(), "the panic ended the transaction");
    assert_eq!(row(&conn, 1), Some(("eight again".into(), None)));
    mark(&mut conn, 8, "still eight").expect("the failed ones took their fence back");
}

#[test]
fn a_guard_table_that_cannot_hold_every_fence_is_refused() {
    let mut conn = Connection::open_in_memory().expect("memory");
    conn.execute_batch("CREATE TABLE fifo_fences (resource TEXT PRIMARY KEY, fence_token REAL)")
        .expect("schema");
    let refused = guard(&mut conn, fence(7), "jobs", |_| Ok::<_, Error>(()));
    assert!(matches!(refused, Err(Error::Config(_))), "{refused:?}");
}

#[test]
fn a_busy_database_is_worth_another_try_and_a_broken_statement_is_not() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("jobs.db");
    let writer = open(&path);
    writer.execute_batch("CREATE TABLE jobs (id INTEGER PRIMARY KEY, fence_token BIGINT)").expect("schema");
    let late = open(&path);
    late.busy_timeout(Duration::ZERO).expect("no waiting");
    let jobs = FencedTable::builder("jobs").build().expect("fine names");
    writer.execute_batch("BEGIN IMMEDIATE").expect("lock");
    let busy = jobs.upsert(&late, fence(7), &[("id", &1)], &[]).expect_err("busy");
    assert!(busy.is_retryable(), "{busy}");
    writer.execute_batch("COMMIT").expect("unlock");
    assert_eq!(jobs.upsert(&late, fence(7), &[("id", &1)], &[]).expect("free"), ONE);
    let broken = jobs.update(&late, fence(7), &[("ghost", &1)], &[]).expect_err("no such column");
    assert!(!broken.is_retryable() && broken.to_string().contains("ghost"), "{broken}");
}

fn open(path: &Path) -> Connection {
    let conn = Connection::open(path).expect("a file");
    conn.busy_timeout(Duration::from_secs(60)).expect("busy timeout");
    conn.execute_batch("PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF").expect("pragmas");
    conn
}

/// Up to two milliseconds now and then, else nothing: writers that overtake each other.
fn pause(seed: &mut u64) {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    match (*seed >> 33) % 8 {
        0 => thread::sleep(Duration::from_micros((*seed >> 40) % 2000)),
        1..4 => thread::yield_now(),
        _ => {}
    }
}

#[test]
fn no_accepted_write_is_older_than_one_accepted_before_it() {
    const WRITERS: u64 = 6;
    const WRITES: u64 = 600;
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("jobs.db");
    let conn = open(&path);
    conn.execute_batch(CREATE_GUARD_TABLE).expect("guard table");
    conn.execute_batch(
        "CREATE TABLE jobs (id INTEGER PRIMARY KEY, fence_token BIGINT);
         CREATE TABLE guarded (id INTEGER PRIMARY KEY, fence_token BIGINT);
         INSERT INTO jobs VALUES (1, 0);
         INSERT INTO guarded VALUES (1, 0);
         CREATE TABLE audit (at INTEGER PRIMARY KEY AUTOINCREMENT, place TEXT, fence INTEGER);
         CREATE TRIGGER a AFTER INSERT ON jobs BEGIN INSERT INTO audit (place, fence) VALUES ('jobs', NEW.fence_token); END;
         CREATE TRIGGER b AFTER UPDATE ON jobs BEGIN INSERT INTO audit (place, fence) VALUES ('jobs', NEW.fence_token); END;
         CREATE TRIGGER c AFTER UPDATE ON guarded BEGIN INSERT INTO audit (place, fence) VALUES ('guarded', NEW.fence_token); END;",
    )
    .expect("schema");
    let jobs = FencedTable::builder("jobs").build().expect("fine names");
    let next = AtomicU64::new(1);
    let (applied, stale) = (AtomicU64::new(0), AtomicU64::new(0));
    let start = Barrier::new(WRITERS as usize);
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (jobs, next, applied, stale, start, path) = (&jobs, &next, &applied, &stale, &start, &path);
            scope.spawn(move || {
                let mut conn = open(path);
                let mut seed = writer + 1;
                start.wait();
                for round in 0..WRITES {
                    let mine = fence(next.fetch_add(1, Ordering::SeqCst));
                    pause(&mut seed);
                    let accepted = match round % 3 {
                        0 => jobs.update(&conn, mine, &[("id", &1)], &[]).expect("update").is_applied(),
                        1 => jobs.upsert(&conn, mine, &[("id", &1)], &[]).expect("upsert").is_applied(),
                        _ => match guard(&mut conn, mine, "guarded", |tx| {
                            tx.execute("UPDATE guarded SET fence_token = ? WHERE id = 1", [mine.as_i64()])?;
                            Ok::<_, Error>(())
                        }) {
                            Ok(()) => true,
                            Err(Error::FencedOut { .. }) => false,
                            Err(error) => panic!("{error}"),
                        },
                    };
                    if accepted { applied } else { stale }.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    let mut statement = conn.prepare("SELECT place, fence FROM audit ORDER BY at").expect("audit");
    let log: Vec<(String, i64)> = statement
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))
        .expect("audit")
        .map(Result::unwrap)
        .collect();
    for place in ["jobs", "guarded"] {
        let fences: Vec<i64> = log.iter().filter(|(at, _)| at == place).map(|(_, fence)| *fence).collect();
        assert!(fences.is_sorted(), "{place}: an older fence was accepted after a newer one");
        let last: i64 = conn
            .query_row(&format!("SELECT fence_token FROM {place} WHERE id = 1"), [], |row| row.get(0))
            .expect("row");
        assert_eq!(Some(&last), fences.iter().max(), "{place}");
    }
    let (applied, stale) = (applied.into_inner(), stale.into_inner());
    assert!(applied > 100 && stale > 100, "{applied} applied and {stale} stale show little");
}
