#!/bin/sh
# Installs the servers that the tests start for themselves, if they are missing, and runs all tests.
# Arguments go to `cargo test`. REDIS_SERVER_BIN and PG_BIN name other servers than the installed ones.
set -eu
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "error: $*"
    say "Install redis-server (or valkey-server) and a PostgreSQL server by hand, or name them by"
    say "REDIS_SERVER_BIN=/path/to/redis-server and PG_BIN=/directory/with/postgres/and/initdb."
    exit 1
}

has() { command -v "$1" >/dev/null 2>&1; }

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif has sudo; then
        sudo -n "$@" || sudo "$@"
    else
        fail "'$*' needs root, and there is no sudo"
    fi
}

# Prints what to start as Redis.
find_redis() {
    command -v redis-server || command -v valkey-server
}

has_postgres() { [ -x "$1/postgres" ] && [ -x "$1/initdb" ] && [ -x "$1/psql" ]; }

# Prints the directory of PostgreSQL's programs. Most distributions keep those of the server out of PATH.
find_postgres() {
    newest=''
    for dir in /usr/lib/postgresql/*/bin /usr/pgsql-*/bin /usr/bin /usr/local/bin \
        /opt/homebrew/opt/postgresql@*/bin /usr/local/opt/postgresql@*/bin; do
        if has_postgres "$dir"; then
            newest=$dir
        fi
    done
    [ -n "$newest" ] && printf '%s\n' "$newest"
}

# The tests start private servers; those that a package starts on its own are none of ours.
stop_service() {
    if has systemctl && [ -d /run/systemd/system ]; then
        as_root systemctl disable --now "$1" >/dev/null 2>&1 || true
    elif has service; then
        as_root service "$1" stop >/dev/null 2>&1 || true
    fi
}

apt() { as_root env DEBIAN_FRONTEND=noninteractive apt-get "$@"; }

updated=no
apt_install() {
    if [ "$updated" = no ]; then
        # One broken source of many is no reason to give up: the packages may be in another.
        apt -qq update || say "apt-get update failed; trying what is known already"
        updated=yes
    fi
    apt -qq install -y --no-install-recommends "$@"
}

install_redis() {
    say "Redis is missing: installing it"
    if has apt-get; then
        apt_install redis-server || return 1
        stop_service redis-server
    elif has dnf; then
        as_root dnf -q -y install redis || as_root dnf -q -y install valkey
    elif has brew; then
        brew install --quiet redis
    else
        return 1
    fi
}

install_postgres() {
    say "PostgreSQL is missing: installing it"
    if has apt-get; then
        apt_install postgresql || return 1
        stop_service postgresql
    elif has dnf; then
        as_root dnf -q -y install postgresql-server postgresql
    elif has brew; then
        brew install --quiet postgresql@17
    else
        return 1
    fi
}

if [ -n "${REDIS_SERVER_BIN:-}" ]; then
    has "$REDIS_SERVER_BIN" || fail "REDIS_SERVER_BIN=$REDIS_SERVER_BIN is no program"
elif ! REDIS_SERVER_BIN=$(find_redis); then
    install_redis >&2 || fail "cannot install Redis"
    REDIS_SERVER_BIN=$(find_redis) || fail "installed Redis, but there is no redis-server"
fi
if [ -n "${PG_BIN:-}" ]; then
    has_postgres "$PG_BIN" || fail "PG_BIN=$PG_BIN lacks postgres, initdb or psql"
elif ! PG_BIN=$(find_postgres); then
    install_postgres >&2 || fail "cannot install PostgreSQL"
    PG_BIN=$(find_postgres) || fail "installed PostgreSQL, but there is no directory with its server"
fi
export REDIS_SERVER_BIN PG_BIN

# PostgreSQL refuses to run as root; the tests start it as one of these users then.
if [ "$(id -u)" -eq 0 ] && ! id postgres >/dev/null 2>&1 && ! id nobody >/dev/null 2>&1; then
    fail "under root, PostgreSQL needs a user 'postgres' or 'nobody' to run as"
fi

rustc --version
"$REDIS_SERVER_BIN" --version
"$PG_BIN/postgres" --version

cargo test --all-features "$@"

# With arguments, somebody wants just some tests; these two are suites of their own.
if [ "$#" -eq 0 ]; then
    # Millions of states: only this package, and only for this, is built with optimisation.
    cargo test --all-features --config 'profile.test.package.redis-fifo-lock.opt-level=3' --test model
    # Two minutes and a half, unless CHAOS_SECONDS says otherwise: long enough for every kind of fault.
    cargo test --all-features --test chaos
fi
