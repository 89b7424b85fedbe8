//! The core's strategies on simulated engines, in virtual time.
//!
//! In: a [`Workload`] (a trace or a generated load) and a [`Setup`] (hosts, engine, gateways, what they share, what
//! happens to hosts). Out: an [`Outcome`] with one record a request, and its [`Summary`]. Equal inputs give equal
//! outcomes. A gateway is the same [`warmroute::pool::Pool`] that the filter runs and learns only what a filter would: its
//! own placements, first bytes and ends of its own requests, the other gateways' journals, and a host table that is
//! polled. Only the `oracle` row sees the engines. It must never read a clock or do I/O, reading trace files apart.
//!
//! | module | what it does |
//! |---|---|
//! | [`workload`] | prompts as the engine's blocks and as the core's keys, with arrival times |
//! | [`trace`] | published trace files → workloads |
//! | [`generate`] | parameters and a seed → workloads |
//! | [`setup`] | everything that may be varied |
//! | [`gateway`] | one gateway: the core, or a published rule for comparison |
//! | [`reference`](mod@reference) | those rules, and the oracle |
//! | [`run`](mod@run) | the event loop |
//! | [`machine`] | one host, and what the oracle sees of it |
//! | [`outcome`] | records → figures |
//! | [`utilisation`] | finds the scale at which the oracle spends a given share of host time in prefill |
//! | [`bars`] | the scenarios that the defaults are held to |
//! | [`compare`] | policies and seeds → rows |
//! | [`chart`] | rows → table, CSV and a page with charts |
//! | [`line_chart`] | lines over a few points → one SVG file |
//! | [`replay`] | a user's own log → what each strategy would have made of it |
//! | [`args`] | command lines |

pub mod args;
pub mod bars;
pub mod chart;
pub mod compare;
pub mod gateway;
pub mod generate;
pub mod line_chart;
pub mod machine;
pub mod outcome;
pub mod reference;
pub mod replay;
pub mod run;
pub mod setup;
pub mod trace;
pub mod utilisation;
pub mod workload;

pub use outcome::{Outcome, Summary};
pub use run::run;
pub use setup::{Happening, Policy, Setup, Sharing};
pub use workload::Workload;
