//! Fenced writes into a real PostgreSQL: what each outcome leaves behind, and what happens when writers meet.
#![cfg(feature = "postgres")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use redis_fifo_lock::sql::postgres::postgres::error::SqlState;
use redis_fifo_lock::sql::postgres::postgres::types::ToSql;
use redis_fifo_lock::sql::postgres::postgres::{Client, IsolationLevel, NoTls};
use redis_fifo_lock::sql::postgres::{FencedTable, guard};
use redis_fifo_lock::sql::{CREATE_GUARD_TABLE, Fenced};
use redis_fifo_lock::{Error, Fence};

use crate::support::eventually;
use crate::support::postgres::Postgres;

const ONE: Fenced = Fenced::Applied { rows: 1 };
/// How long another session may take to get where a test wants it.
const PATIENCE: Duration = Duration::from_secs(30);

/// A connection string for an empty database of its own.
fn database() -> String {
    Postgres::shared().database()
}

fn connect(database: &str) -> Client {
    Client::connect(database, NoTls).expect("a connection")
}

fn fence(number: u64) -> Fence {
    Fence::new(number).expect("a test's fence is in range")
}

/// A table `jobs` with rows 1 to 4, fences NULL, 0, 5 and 10, all in lot `a` with status `new`.
fn jobs() -> (String, Client, FencedTable) {
    let database = database();
    let mut client = connect(&database);
    client
        .batch_execute(
            "CREATE TABLE jobs (id INT PRIMARY KEY, lot TEXT DEFAULT 'a', status TEXT, fence_token BIGINT);
             INSERT INTO jobs (id, status, fence_token)
             VALUES (1, 'new', NULL), (2, 'new', 0), (3, 'new', 5), (4, 'new', 10);",
        )
        .expect("schema");
    (database, client, FencedTable::builder("jobs").build().expect("fine names"))
}

fn row(client: &mut Client, id: i32) -> Option<(String, Option<i64>)> {
    let row =
        client.query_opt("SELECT status, fence_token FROM jobs WHERE id = $1", &[&id]).expect("a row")?;
    Some((row.get(0), row.get(1)))
}

#[test]
fn never_fenced_and_older_rows_are_written_newer_ones_refused_and_missing_ones_told_apart() {
    let (_, mut client, jobs) = jobs();
    let mut outcomes = Vec::new();
    for id in 1..=5 {
        outcomes.push(
            jobs.update(&mut client, fence(7), &[("id", &id)], &[("status", &"done")]).expect("update"),
        );
    }
    assert_eq!(outcomes, [ONE, ONE, ONE, Fenced::Stale { newest: fence(10) }, Fenced::Missing]);
    for id in 1..=3 {
        assert_eq!(row(&mut client, id), Some(("done".into(), Some(7))));
    }
    assert_eq!(row(&mut client, 4), Some(("new".into(), Some(10))));
    assert_eq!(row(&mut client, 5), None);

    for (id, expected) in [(1, ONE), (4, Fenced::Stale { newest: fence(10) }), (5, ONE)] {
        let got = jobs.upsert(&mut client, fence(8), &[("id", &id)], &[("status", &"up")]).expect("upsert");
        assert_eq!(got, expected, "{id}");
    }
    assert_eq!(row(&mut client, 4), Some(("new".into(), Some(10))));
    assert_eq!(row(&mut client, 5), Some(("up".into(), Some(8))));

    for (id, expected) in [(2, ONE), (4, Fenced::Stale { newest: fence(10) }), (6, Fenced::Missing)] {
        assert_eq!(jobs.delete(&mut client, fence(9), &[("id", &id)]).expect("delete"), expected, "{id}");
    }
    assert_eq!(row(&mut client, 2), None);
    assert!(row(&mut client, 4).is_some());
}

#[test]
fn an_equal_fence_may_write_again() {
    let (_, mut client, jobs) = jobs();
    for status in ["half", "done"] {
        let updated = jobs.update(&mut client, fence(7), &[("id", &1)], &[("status", &status)]);
        assert_eq!(updated.expect("update"), ONE);
        let upserted = jobs.upsert(&mut client, fence(7), &[("id", &2)], &[("status", &status)]);
        assert_eq!(upserted.expect("upsert"), ONE);
    }
    assert_eq!(row(&mut client, 1), Some(("done".into(), Some(7))));
    assert_eq!(row(&mut client, 2), Some(("done".into(), Some(7))));
    assert_eq!(jobs.delete(&mut client, fence(7), &[("id", &1)]).expect("delete"), ONE);
}

#[test]
fn one_newer_row_keeps_all_rows_from_being_written() {
    let (_, mut client, jobs) = jobs();
    let stale = Fenced::Stale { newest: fence(10) };
    let update = |client: &mut Client, number| {
        jobs.update(client, fence(number), &[("lot", &"a")], &[("status", &"done")]).expect("update")
    };
    assert_eq!(update(&mut client, 7), stale);
    assert_eq!(jobs.delete(&mut client, fence(7), &[("lot", &"a")]).expect("delete"), stale);
    for (id, number) in [(1, None), (2, Some(0)), (3, Some(5)), (4, Some(10))] {
        assert_eq!(row(&mut client, id), Some(("new".into(), number)));
    }
    let all = Fenced::Applied { rows: 4 };
    assert_eq!(update(&mut client, 11), all);
    assert_eq!(jobs.delete(&mut client, fence(11), &[("lot", &"a")]).expect("delete"), all);
}

#[test]
fn a_stale_write_inside_a_transaction_undoes_only_itself() {
    let (_, mut client, jobs) = jobs();
    let mut tx = client.transaction().expect("begin");
    tx.batch_execute("UPDATE jobs SET status = 'mine' WHERE id = 4").expect("plain");
    let stale = jobs.update(&mut tx, fence(7), &[("lot", &"a")], &[("status", &"done")]).expect("update");
    assert_eq!(stale, Fenced::Stale { newest: fence(10) });
    assert_eq!(jobs.update(&mut tx, fence(7), &[("id", &1)], &[("status", &"done")]).expect("update"), ONE);
    tx.commit().expect("commit");
    assert_eq!(row(&mut client, 1), Some(("done".into(), Some(7))));
    assert_eq!(row(&mut client, 2), Some(("new".into(), Some(0))));
    assert_eq!(row(&mut client, 4), Some(("mine".into(), Some(10))));

    let mut tx = client.transaction().expect("begin");
    assert_eq!(jobs.update(&mut tx, fence(8), &[("id", &1)], &[("status", &"undone")]).expect("update"), ONE);
    drop(tx);
    let after = row(&mut client, 1);
    assert_eq!(after, Some(("done".into(), Some(7))), "the caller's rollback takes the write along");
}

#[test]
fn fences_are_exact_up_to_the_largest() {
    let edges = [(1 << 53) - 1, 1 << 53, (1 << 53) + 1, i64::MAX as u64 - 1, i64::MAX as u64];
    let (_, mut client, jobs) = jobs();
    client.batch_execute(CREATE_GUARD_TABLE).expect("guard table");
    for held in edges {
        for tried in edges {
            client.batch_execute("DELETE FROM jobs WHERE id = 9; DELETE FROM fifo_fences").expect("clean");
            assert_eq!(jobs.upsert(&mut client, fence(held), &[("id", &9)], &[]).expect("upsert"), ONE);
            guard(&mut client, fence(held), "edge", |_| Ok::<_, Error>(())).expect("first");
            let expected = if tried < held { Fenced::Stale { newest: fence(held) } } else { ONE };
            let upserted = jobs.upsert(&mut client, fence(tried), &[("id", &9)], &[]).expect("upsert");
            assert_eq!(upserted, expected, "{tried} after {held}");
            let updated = jobs.update(&mut client, fence(tried), &[("id", &9)], &[]).expect("update");
            assert_eq!(updated, expected, "{tried} after {held}");
            let guarded = guard(&mut client, fence(tried), "edge", |_| Ok::<_, Error>(()));
            assert_eq!(guarded.is_err(), tried < held, "{tried} after {held}");
            let deleted = jobs.delete(&mut client, fence(tried), &[("id", &9)]).expect("delete");
            assert_eq!(deleted, expected, "{tried} after {held}");
        }
    }
}

#[test]
fn names_with_quotes_and_spaces_are_quoted_and_never_run() {
    let mut client = connect(&database());
    client
        .batch_execute(
            "CREATE TABLE victim (id INT);
             CREATE SCHEMA \"my \"\"schema\";
             CREATE TABLE \"my \"\"schema\".\"jobs\"\"; DROP TABLE victim; --\" (\"the id\" INT PRIMARY KEY, \"sta\"\"tus\" TEXT);",
        )
        .expect("schema");
    let odd = FencedTable::builder("jobs\"; DROP TABLE victim; --")
        .schema("my \"schema")
        .fence_column("f\"ence to'ken")
        .build()
        .expect("can be quoted");
    client.batch_execute(&odd.add_column()).expect("add the column");
    let status = "'; DROP TABLE victim; --";
    let set: [(&str, &(dyn ToSql + Sync)); 1] = [("sta\"tus", &status)];
    assert_eq!(odd.upsert(&mut client, fence(7), &[("the id", &1)], &set).expect("upsert"), ONE);
    assert_eq!(odd.update(&mut client, fence(7), &[("the id", &1)], &set).expect("update"), ONE);
    let found = client
        .query_one("SELECT \"sta\"\"tus\" FROM \"my \"\"schema\".\"jobs\"\"; DROP TABLE victim; --\"", &[])
        .expect("the row");
    assert_eq!(found.get::<_, &str>(0), status);
    assert_eq!(odd.delete(&mut client, fence(7), &[("the id", &1)]).expect("delete"), ONE);
    client.batch_execute("INSERT INTO victim VALUES (1)").expect("the victim is still there");

    // The server would cut the longest one down to the name of another table.
    for name in ["", "a\0b", &"x".repeat(64)] {
        assert!(matches!(FencedTable::builder(name).build(), Err(Error::Config(_))), "{name:?}");
        assert!(matches!(FencedTable::builder("t").schema(name).build(), Err(Error::Config(_))), "{name:?}");
        assert!(
            matches!(FencedTable::builder("t").fence_column(name).build(), Err(Error::Config(_))),
            "{name:?}"
        );
    }
}

#[test]
fn columns_that_do_not_hold_every_fence_are_refused() {
    let mut client = connect(&database());
    client
        .batch_execute("CREATE DOMAIN token AS BIGINT CHECK (VALUE >= 0); CREATE DOMAIN small AS INT")
        .expect("domains");
    for (kind, allowed) in [
        ("BIGINT", true),
        ("token", true),
        ("INTEGER", false),
        ("SMALLINT", false),
        ("small", false),
        ("TEXT", false),
        ("VARCHAR(20)", false),
        ("NUMERIC", false),
        ("NUMERIC(20)", false),
        ("REAL", false),
        ("DOUBLE PRECISION", false),
    ] {
        client
            .batch_execute(&format!(
                "DROP TABLE IF EXISTS jobs; CREATE TABLE jobs (id INT PRIMARY KEY, fence_token {kind})"
            ))
            .expect("schema");
        let jobs = FencedTable::builder("jobs").build().expect("fine names");
        match jobs.upsert(&mut client, fence(7), &[("id", &1)], &[]) {
            Ok(outcome) => assert!(allowed && outcome == ONE, "{kind}"),
            Err(Error::Config(why)) => {
                assert!(!allowed && why.contains("fence_token") && why.contains("BIGINT"), "{kind}: {why}");
            }
            Err(error) => panic!("{kind}: {error}"),
        }
    }
    let mut refusal = |table: FencedTable| match table.update(&mut client, fence(7), &[("id", &1)], &[]) {
        Err(Error::Config(why)) => why,
        other => panic!("{other:?}"),
    };
    let missing = refusal(FencedTable::builder("jobs").fence_column("token").build().expect("fine"));
    assert!(
        missing.contains("ALTER TABLE \"jobs\" ADD COLUMN \"token\" BIGINT NOT NULL DEFAULT 0"),
        "{missing}"
    );
    for absent in ["public.jobs", "Jobs"] {
        let missing = refusal(FencedTable::builder(absent).build().expect("fine"));
        assert!(missing.contains("no table"), "{missing}");
    }
}

#[test]
fn the_type_is_looked_up_once_for_all_clones_of_a_handle() {
    let (_, mut client, jobs) = jobs();
    assert_eq!(jobs.clone().update(&mut client, fence(7), &[("id", &1)], &[]).expect("update"), ONE);
    // Without a right to read the catalog a second look-up would fail. Roles belong to the whole server, hence the name.
    let database: String = client.query_one("SELECT current_database()::text", &[]).expect("a name").get(0);
    client
        .batch_execute(&format!(
            "CREATE ROLE {database}_blind; GRANT ALL ON jobs TO {database}_blind;
             REVOKE SELECT ON pg_catalog.pg_attribute FROM PUBLIC; SET ROLE {database}_blind",
        ))
        .expect("roles");
    assert_eq!(jobs.update(&mut client, fence(7), &[("id", &1)], &[]).expect("update"), ONE);
    let fresh = FencedTable::builder("jobs").build().expect("fine names");
    let refused = fresh.update(&mut client, fence(7), &[("id", &1)], &[]);
    assert!(matches!(refused, Err(Error::Sql { .. })), "{refused:?}");
}

#[test]
fn a_deleted_row_forgets_its_fence_and_a_marked_one_does_not() {
    let (_, mut client, jobs) = jobs();
    assert_eq!(jobs.delete(&mut client, fence(11), &[("id", &4)]).expect("delete"), ONE);
    let back = jobs.upsert(&mut client, fence(7), &[("id", &4)], &[("status", &"back")]).expect("upsert");
    assert_eq!(back, ONE, "documented: nothing is left that could refuse");

    let marked = jobs.update(&mut client, fence(11), &[("id", &3)], &[("status", &"deleted")]).expect("mark");
    assert_eq!(marked, ONE);
    let refused = jobs.upsert(&mut client, fence(7), &[("id", &3)], &[("status", &"back")]).expect("upsert");
    assert_eq!(refused, Fenced::Stale { newest: fence(11) });
}

#[test]
fn rows_held_back_by_a_trigger_are_an_error_and_not_missing() {
    let (_, mut client, jobs) = jobs();
    client
        .batch_execute(
            "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
             CREATE TRIGGER no BEFORE UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION no()",
        )
        .expect("trigger");
    let updated = jobs.update(&mut client, fence(7), &[("id", &1)], &[("status", &"done")]);
    let upserted = jobs.upsert(&mut client, fence(7), &[("id", &1)], &[("status", &"done")]);
    for held in [updated, upserted] {
        assert!(matches!(&held, Err(Error::Config(why)) if why.contains("trigger")), "{held:?}");
    }
}

/// Waits until some session of this database waits for a lock.
fn eventually_someone_waits(database: &str) {
    let mut client = connect(database);
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    eventually(PATIENCE, "the late writer waits for a lock", || {
        client.query_one(waiting, &[]).expect("activity").get::<_, i64>(0) > 0
    });
}

/// Runs `late` while another session has done `first` and not committed yet; then that session ends with `finish`.
fn meet<T: Send>(
    database: &str,
    level: &str,
    first: &str,
    finish: &str,
    late: impl FnOnce(&mut Client) -> T + Send,
) -> T {
    let mut fresh = connect(database);
    fresh.batch_execute(&format!("BEGIN; {first}")).expect("the first writer");
    thread::scope(|scope| {
        let late = scope.spawn(|| {
            let mut client = connect(database);
            client.batch_execute(&format!("SET default_transaction_isolation TO '{level}'")).expect("level");
            late(&mut client)
        });
        eventually_someone_waits(database);
        fresh.batch_execute(finish).expect("the first writer ends");
        late.join().expect("the late writer")
    })
}

#[test]
fn a_writer_that_waited_for_a_newer_one_is_refused_and_says_why() {
    let (database, _, jobs) = jobs();
    let key: [(&str, &(dyn ToSql + Sync)); 1] = [("id", &1)];
    let newer = "UPDATE jobs SET status = 'newer', fence_token = 10 WHERE id = 1";
    let stale = Fenced::Stale { newest: fence(10) };
    let reset = |sql: &str| connect(&database).batch_execute(sql).expect("reset");
    type Call<'a> = &'a (dyn Fn(&mut Client) -> Result<Fenced, Error> + Sync);
    let calls: [Call<'_>; 3] = [
        &|client| jobs.update(client, fence(7), &key, &[("status", &"late")]),
        &|client| jobs.upsert(client, fence(7), &key, &[("status", &"late")]),
        &|client| jobs.delete(client, fence(7), &key),
    ];
    for (at, call) in calls.into_iter().enumerate() {
        reset("UPDATE jobs SET status = 'new', fence_token = 5 WHERE id = 1");
        let got = meet(&database, "read committed", newer, "COMMIT", call).expect("read committed");
        assert_eq!(got, stale, "call {at}");
        assert_eq!(row(&mut connect(&database), 1), Some(("newer".into(), Some(10))), "call {at}");

        for level in ["repeatable read", "serializable"] {
            reset("UPDATE jobs SET status = 'new', fence_token = 5 WHERE id = 1");
            let lost = meet(&database, level, newer, "COMMIT", call).expect_err("40001");
            assert!(lost.is_retryable(), "call {at}, {level}: {lost}");
            assert_eq!(row(&mut connect(&database), 1), Some(("newer".into(), Some(10))), "call {at}");
            assert_eq!(call(&mut connect(&database)).expect("again"), stale, "call {at}");
        }

        reset("UPDATE jobs SET status = 'new', fence_token = 5 WHERE id = 1");
        let got = meet(&database, "serializable", newer, "ROLLBACK", call).expect("rolled back");
        assert_eq!(got, ONE, "call {at}");
        reset("DELETE FROM jobs WHERE id = 1; INSERT INTO jobs (id, status) VALUES (1, 'new')");
        let gone = "DELETE FROM jobs WHERE id = 1";
        let got = meet(&database, "read committed", gone, "COMMIT", call).expect("deleted");
        assert_eq!(got, if at == 1 { ONE } else { Fenced::Missing }, "call {at}");
        reset("DELETE FROM jobs WHERE id = 1; INSERT INTO jobs (id, status) VALUES (1, 'new')");
    }
}

#[test]
fn a_newer_row_that_appears_while_the_write_waits_undoes_it() {
    let (database, mut client, jobs) = jobs();
    client.batch_execute("DELETE FROM jobs WHERE id = 4").expect("only older rows are left");
    // When this one ends, the late writer goes on with a view of the table in which row 9 is not there yet.
    let first = "UPDATE jobs SET status = 'older', fence_token = 6 WHERE id = 3";
    let finish = "INSERT INTO jobs (id, status, fence_token) VALUES (9, 'newer', 10); COMMIT";
    let got = meet(&database, "read committed", first, finish, |client| {
        jobs.update(client, fence(7), &[("lot", &"a")], &[("status", &"late")]).expect("update")
    });
    assert_eq!(got, Fenced::Stale { newest: fence(10) });
    for (id, expected) in
        [(1, ("new", None)), (2, ("new", Some(0))), (3, ("older", Some(6))), (9, ("newer", Some(10)))]
    {
        assert_eq!(row(&mut client, id), Some((expected.0.into(), expected.1)));
    }
}

#[test]
fn a_row_that_comes_and_goes_is_written_or_missing_or_newer_and_never_an_error() {
    const ROUNDS: usize = 1500;
    let (database, _, jobs) = jobs();
    let busy = AtomicUsize::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = connect(&database);
            while busy.load(Ordering::Relaxed) > 0 {
                for number in [1, 20] {
                    let insert = format!(
                        "INSERT INTO jobs (id, fence_token) VALUES (9, {number}) ON CONFLICT DO NOTHING"
                    );
                    client.batch_execute(&insert).expect("insert");
                    client.batch_execute("DELETE FROM jobs WHERE id = 9").expect("delete");
                }
            }
        });
        for upserts in [false, true] {
            let (database, jobs, busy) = (&database, &jobs, &busy);
            scope.spawn(move || {
                struct Leave<'a>(&'a AtomicUsize);
                impl Drop for Leave<'_> {
                    fn drop(&mut self) {
                        self.0.fetch_sub(1, Ordering::Relaxed);
                    }
                }
                let _leave = Leave(busy);
                let mut client = connect(database);
                for _ in 0..ROUNDS {
                    let got = match upserts {
                        true => jobs.upsert(&mut client, fence(7), &[("id", &9)], &[]),
                        false => jobs.update(&mut client, fence(7), &[("id", &9)], &[]),
                    };
                    match got.expect("an outcome") {
                        Fenced::Applied { rows: 1 } => {}
                        Fenced::Stale { newest } if newest == fence(20) => {}
                        Fenced::Missing if !upserts => {}
                        other => panic!("{other:?}"),
                    }
                }
            });
        }
    });
}

#[test]
fn a_guard_refuses_an_overtaken_holder_and_rolls_back_what_fails() {
    let (_, mut client, _) = jobs();
    client.batch_execute(CREATE_GUARD_TABLE).expect("guard table");
    client.batch_execute(CREATE_GUARD_TABLE).expect("again");
    let mark = |client: &mut Client, number, status: &str| {
        guard(client, fence(number), "jobs", |tx| {
            tx.execute("UPDATE jobs SET status = $1 WHERE id = 1", &[&status])?;
            Ok::<_, Error>(())
        })
    };
    mark(&mut client, 8, "eight").expect("first");
    mark(&mut client, 8, "eight again").expect("equal");
    let mut entered = false;
    let refused = guard(&mut client, fence(7), "jobs", |_| {
        entered = true;
        Ok::<_, Error>(())
    });
    assert!(
        matches!(refused, Err(Error::FencedOut { fence: tried, newest }) if tried == fence(7) && newest == fence(8))
    );
    assert!(!entered, "the section of an overtaken holder does not even start");
    guard(&mut client, fence(7), "other", |_| Ok::<_, Error>(())).expect("another resource");

    let failed = guard(&mut client, fence(9), "jobs", |tx| {
        tx.execute("UPDATE jobs SET status = 'half' WHERE id = 1", &[])?;
        Err::<(), _>(Error::Config("gave up".into()))
    });
    assert!(matches!(failed, Err(Error::Config(why)) if why == "gave up"));
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        guard(&mut client, fence(9), "jobs", |tx| -> Result<(), Error> {
            tx.execute("UPDATE jobs SET status = 'half' WHERE id = 1", &[])?;
            panic!("in the section")
        })
    }));
    assert!(panicked.is_err());
    assert_eq!(row(&mut client, 1), Some(("eight again".into(), None)));
    mark(&mut client, 8, "still eight").expect("the failed ones took their fence back");
}

#[test]
fn an_overtaken_holder_that_waits_for_the_newer_ones_guard_is_refused() {
    let (database, mut client, _) = jobs();
    client.batch_execute(CREATE_GUARD_TABLE).expect("guard table");
    let newer = "INSERT INTO fifo_fences VALUES ('jobs', 10) \
                 ON CONFLICT (resource) DO UPDATE SET fence_token = excluded.fence_token";
    for known in ["", "INSERT INTO fifo_fences VALUES ('jobs', 5)"] {
        client.batch_execute(&format!("DELETE FROM fifo_fences; {known}")).expect("reset");
        let got = meet(&database, "read committed", newer, "COMMIT", |client| {
            guard(client, fence(7), "jobs", |tx| {
                tx.batch_execute("UPDATE jobs SET status = 'late'")?;
                Ok::<_, Error>(())
            })
        });
        assert!(matches!(got, Err(Error::FencedOut { newest, .. }) if newest == fence(10)), "{got:?}");
        client.batch_execute(&format!("DELETE FROM fifo_fences; {known}")).expect("reset");
        let got = meet(&database, "serializable", newer, "COMMIT", |client| {
            guard(client, fence(7), "jobs", |tx| {
                tx.batch_execute("UPDATE jobs SET status = 'late'")?;
                Ok::<_, Error>(())
            })
        });
        assert!(matches!(&got, Err(error) if error.is_retryable()), "{got:?}");
    }
    assert_eq!(row(&mut client, 1), Some(("new".into(), None)));
}

#[test]
fn a_guard_does_not_report_success_for_what_was_rolled_back() {
    let (_, mut client, _) = jobs();
    client.batch_execute(CREATE_GUARD_TABLE).expect("guard table");
    let hidden = guard(&mut client, fence(7), "jobs", |tx| {
        tx.batch_execute("UPDATE jobs SET status = 'done' WHERE id = 1")?;
        let _ignored = tx.batch_execute("UPDATE ghosts SET status = 'done'");
        Ok::<_, Error>(())
    });
    assert!(matches!(hidden, Err(Error::Sql { .. })), "{hidden:?}");
    assert_eq!(row(&mut client, 1), Some(("new".into(), None)));
}

#[test]
fn a_guard_table_that_cannot_hold_every_fence_is_refused() {
    let mut client = connect(&database());
    for kind in ["DOUBLE PRECISION", "NUMERIC"] {
        client
            .batch_execute(&format!(
                "DROP TABLE IF EXISTS fifo_fences;
                 CREATE TABLE fifo_fences (resource TEXT PRIMARY KEY, fence_token {kind})"
            ))
            .expect("schema");
        let refused = guard(&mut client, fence(7), "jobs", |_| Ok::<_, Error>(()));
        assert!(matches!(refused, Err(Error::Config(_))), "{kind}: {refused:?}");
    }
}

#[test]
fn an_error_carries_the_servers_words_and_its_cause() {
    let (_, mut client, jobs) = jobs();
    let broken = jobs.update(&mut client, fence(7), &[("ghost", &1)], &[]).expect_err("no such column");
    assert!(!broken.is_retryable() && broken.to_string().contains("ghost"), "{broken}");
    let Error::Sql { source, .. } = broken.clone() else { panic!("{broken:?}") };
    let cause = source.downcast_ref::<redis_fifo_lock::sql::postgres::postgres::Error>().expect("the cause");
    assert_eq!(cause.code(), Some(&SqlState::UNDEFINED_COLUMN));
    assert_eq!(
        jobs.update(&mut client, fence(7), &[("id", &1)], &[]).expect("no transaction is left open"),
        ONE
    );
}

/// Up to three milliseconds now and then, else nothing: writers that overtake each other.
fn pause(seed: &mut u64) {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    match (*seed >> 33) % 6 {
        0 => thread::sleep(Duration::from_micros((*seed >> 40) % 3000)),
        1..4 => thread::yield_now(),
        _ => {}
    }
}

/// Runs `call` until it does not lose a race any more.
fn persistently<T>(retries: &AtomicU64, mut call: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    loop {
        match call() {
            Err(error) if error.is_retryable() => retries.fetch_add(1, Ordering::Relaxed),
            other => return other,
        };
    }
}

fn race(level: IsolationLevel, name: &str) {
    const WRITERS: u64 = 6;
    const WRITES: u64 = 500;
    let (database, mut client, _) = jobs();
    client.batch_execute(CREATE_GUARD_TABLE).expect("guard table");
    client
        .batch_execute(
            // The number is drawn while the row is locked, so numbers and commits are in the same order.
            "CREATE TABLE audit (at BIGSERIAL, place TEXT, fence BIGINT);
             CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN INSERT INTO audit (place, fence) VALUES (TG_TABLE_NAME, NEW.fence_token); RETURN NULL; END';
             CREATE TABLE single (id INT PRIMARY KEY, fence_token BIGINT);
             INSERT INTO single VALUES (1, NULL);
             CREATE TABLE guarded (id INT PRIMARY KEY, fence_token BIGINT);
             INSERT INTO guarded VALUES (1, NULL);
             CREATE TRIGGER note AFTER INSERT OR UPDATE ON single FOR EACH ROW EXECUTE FUNCTION note();
             CREATE TRIGGER note AFTER INSERT OR UPDATE ON guarded FOR EACH ROW EXECUTE FUNCTION note();",
        )
        .expect("schema");
    let single = FencedTable::builder("single").build().expect("fine names");
    let next = AtomicU64::new(1);
    let (applied, stale, retries) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let start = Barrier::new(WRITERS as usize);
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (single, next, applied, stale, retries) = (&single, &next, &applied, &stale, &retries);
            let (start, database) = (&start, &database);
            scope.spawn(move || {
                let mut client = connect(database);
                client
                    .batch_execute(&format!("SET default_transaction_isolation TO '{name}'"))
                    .expect("level");
                let mut seed = writer + 1;
                start.wait();
                for round in 0..WRITES {
                    let mine = fence(next.fetch_add(1, Ordering::SeqCst));
                    pause(&mut seed);
                    let key: [(&str, &(dyn ToSql + Sync)); 1] = [("id", &1)];
                    let outcome = persistently(retries, || match round % 4 {
                        0 => single.update(&mut client, mine, &key, &[]),
                        1 => single.upsert(&mut client, mine, &key, &[]),
                        2 => {
                            let mut tx = client.build_transaction().isolation_level(level).start()?;
                            let outcome = single.update(&mut tx, mine, &key, &[])?;
                            tx.commit()?;
                            Ok(outcome)
                        }
                        _ => {
                            let done = guard(&mut client, mine, "guarded", |tx| {
                                let sql = "UPDATE guarded SET fence_token = $1 WHERE id = 1";
                                Ok::<_, Error>(Fenced::Applied { rows: tx.execute(sql, &[&mine.as_i64()])? })
                            });
                            match done {
                                Err(Error::FencedOut { newest, .. }) => Ok(Fenced::Stale { newest }),
                                other => other,
                            }
                        }
                    });
                    match outcome.expect("only races are lost") {
                        Fenced::Applied { rows: 1 } => applied.fetch_add(1, Ordering::Relaxed),
                        Fenced::Stale { newest } if newest > mine => stale.fetch_add(1, Ordering::Relaxed),
                        other => panic!("{other:?} for {mine}"),
                    };
                }
            });
        }
    });
    let mut noted = 0;
    for place in ["single", "guarded"] {
        let fences: Vec<i64> = client
            .query("SELECT fence FROM audit WHERE place = $1 ORDER BY at", &[&place])
            .expect("audit")
            .iter()
            .map(|row| row.get(0))
            .collect();
        noted += fences.len() as u64;
        assert!(fences.is_sorted(), "{place}: an older fence was accepted after a newer one");
        let last: i64 = client
            .query_one(&format!("SELECT fence_token FROM {place} WHERE id = 1"), &[])
            .expect("the row")
            .get(0);
        assert_eq!(Some(&last), fences.iter().max(), "{place}");
    }
    let (applied, stale, retries) = (applied.into_inner(), stale.into_inner(), retries.into_inner());
    println!("{name}: {applied} applied, {stale} stale, {retries} retries");
    assert_eq!(noted, applied, "every write that was said to be applied was, and no other");
    assert!(applied > 100 && stale > 100, "{applied} applied and {stale} stale show little");
}

#[test]
fn no_accepted_write_is_older_than_one_accepted_before_it_under_read_committed() {
    race(IsolationLevel::ReadCommitted, "read committed");
}

#[test]
fn no_accepted_write_is_older_than_one_accepted_before_it_under_serializable() {
    race(IsolationLevel::Serializable, "serializable");
}
