//! What a child process can do.

use super::child::{hear, say};
use super::server::Server;

pub(crate) fn play(role: &str, args: &[&str]) {
    match role {
        "echo" => echo(args),
        "server" => server(),
        other => panic!("no such role: {other}"),
    }
}

/// Says its arguments, then every line that it hears.
fn echo(args: &[&str]) {
    say(&format!("ready {}", args.join("|")));
    while let Some(line) = hear() {
        say(&line);
    }
}

/// Runs a Redis server and says its URL and its directory.
fn server() {
    let server = Server::start();
    say(&server.url());
    say(&server.dir().display().to_string());
    hear();
}
