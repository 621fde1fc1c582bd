//! The record of a lock, and the tickets in it.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../properties.rs"]
mod properties;

fuzz_target!(|text: &str| {
    properties::record(text);
    properties::ticket(text);
});
