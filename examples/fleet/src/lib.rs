//! Simulated fleet, load generator and Envoy handling: what the demo and the end-to-end tests drive.
//!
//! | module | what it does |
//! |---|---|
//! | [`engine`] | the model of one inference engine, without I/O |
//! | [`api`] | OpenAI-shaped requests and answers |
//! | [`metrics_text`] | engine state as vLLM's `/metrics` |
//! | [`replica`] | one engine behind a real HTTP server, with test controls |
//! | [`fleet`] | several replicas in one process |
//! | [`client`] | a small HTTP client |
//! | [`patience`] | waits for what nobody outside can see |
//! | [`process`] | helper programs that an interrupt ends |
//! | [`toolchain`] | finds Rust's programs, adds missing targets |
//! | [`dependencies`] | the packages of a build, their licences and checksums |
//! | [`wasm`] | builds the filter's `.wasm` |
//! | [`envoy`] | finds or fetches Envoy and runs it |
//! | [`envoy_config`] | what an Envoy should do, as its config |
//! | [`odd`] | peers that misbehave as no replica does |
//! | [`saboteur`] | another plugin that reads and writes our shared data |
//! | [`patched`] | the shipped module with one function that traps or stalls |
//! | [`faults`] | the fault matrix: what breaks, with and without the filter |
//! | [`calibrate`] | fits the engine model to real servers |
//! | [`workload`] | a workload file → requests with arrival times |
//! | [`load`] | sends them and notes what happened |
//! | [`report`] | sums that up: rows, table, JSON, a page |
//! | [`demo`] | all of it in turn, for each strategy |
//! | [`soak`] | long runs: what must stay bounded, equal and whole |
//! | [`simulator`] | the core's strategies on many such engines in virtual time |

pub mod api;
pub mod calibrate;
pub mod client;
pub mod demo;
pub mod dependencies;
pub mod engine;
pub mod envoy;
pub mod envoy_config;
pub mod faults;
pub mod fleet;
pub mod load;
pub mod metrics_text;
pub mod odd;
pub mod patched;
pub mod patience;
pub mod process;
pub mod replica;
pub mod report;
pub mod saboteur;
pub mod toolchain;
pub mod simulator;
pub mod soak;
pub mod wasm;
pub mod workload;
