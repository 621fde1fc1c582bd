//! Replies as they come over the wire; the first byte says to which command.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../properties.rs"]
mod properties;

fuzz_target!(|input: (u8, &[u8])| properties::wire(input.0, input.1));
