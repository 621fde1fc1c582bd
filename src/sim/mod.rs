//! The client logic under a deterministic scheduler: threads, time and server are simulated, the code is the real one.
//!
//! Invariant: a seed decides everything. Exactly one simulated thread runs at a time; it may be exchanged for another at
//! every operation of [`sync`](crate::sync), every read or write of a lease's atomics and every call to the server, and time
//! passes only when the scheduler says so.
//!
//! | part | is |
//! |---|---|
//! | `scheduler` | who runs next, what time it is, whether anybody is stuck |
//! | `primitives` | what `crate::sync` names in unit tests |
//! | `server` | the pure machine behind a faulty network, and what must hold after every transition |
//! | `stage` | clients, threads and checks for scenarios; runs the schedules of one |
//! | `scenarios` | the tests |
//!
//! Simulated threads are OS threads that pass a baton, because the code under test asks for `thread::panicking()` and
//! `thread::current().id()`, which coroutines would answer for the thread that carries them. The same and the clock are why
//! this is not `shuttle`: it has no time, so its timed waits never end by themselves.
//!
//! A failing schedule prints its seed. `FIFO_SIM_SEED=<seed> cargo test --lib sim::scenarios::<name>` repeats it alone, with
//! a trace; `FIFO_SIM_SCHEDULES=<n>` and `FIFO_SIM_FIRST=<seed>` explore others than CI does.

pub(crate) mod primitives;
mod scenarios;
mod scheduler;
mod server;
mod stage;

pub(crate) use self::scheduler::{now, random};
