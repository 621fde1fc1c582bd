//! What the client logic blocks on: mutexes, condition variables, threads and the channel of the renewal.
//!
//! Invariant: outside of this crate's unit tests these are parking_lot's, std's and crossbeam's own, by name and without
//! a layer in between. In unit tests they are those of the simulation (`sim`), which pass a thread that belongs to none
//! on to the same originals.

#[cfg(not(test))]
pub(crate) use {
    crossbeam_channel as channel,
    parking_lot::{Condvar, Mutex, MutexGuard},
    std::sync::atomic,
    std::thread,
};

#[cfg(test)]
pub(crate) use crate::sim::primitives::{Condvar, Mutex, MutexGuard, atomic, channel, thread};
