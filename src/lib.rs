//! Warmroute sends each LLM request to the replica whose KV cache is already warm for it, and leaves that replica as
//! soon as waiting there would cost more than computing the prefix elsewhere. It is a WebAssembly HTTP filter for stock
//! Envoy with a companion, in the same module, that keeps the load of the replicas known.
//!
//! # The flow
//!
//! ```text
//! request bytes ─▶ prompt ─▶ chained keys ─▶ candidates ─▶ strategy ─▶ Decision{hosts, reason} ─▶ header ─▶ Envoy
//!                                             ▲      ▲
//!                        prefix index ────────┘      └──── host table ◀─ companion: endpoints + /metrics
//!                                                    ▲
//!                the other workers' placements and tallies (journals in Envoy's shared data)
//! ```
//!
//! Modules stand in the order of the flow; one may use those above it, never those below.
//!
//! | step | module | in → out |
//! |---|---|---|
//! | 1 | [`chunk`] | framed text → chained hashes and keys (a versioned scheme with golden vectors) |
//! | 1 | [`prompt`] | body bytes → prompt segments, namespace, keys; one file an API family |
//! | 1 | [`late_fields`] | cut body → the namespace that an earlier turn had |
//! | 2 | [`recent`] | keys → how often each was used lately, and so which one is the prompt's home |
//! | 3 | [`blob`] | the frame of every shared blob: magic, version, length, checksum |
//! | 3 | [`host_table`] | bytes ↔ hosts with load, health, epoch |
//! | 3 | [`journal`] | bytes ↔ one worker's tallies, placements and heartbeat; those of many workers as one |
//! | 3 | [`shared_keys`] | a pool → the fixed set of its keys in shared data |
//! | 3 | [`index`] | keys → which hosts hold how much of the prompt |
//! | 4 | [`candidate`] | host table × tallies → candidates, each with its backlog, rate and penalty |
//! | 5 | [`decision`] | which hosts, in which order, and why |
//! | 5 | [`strategy`] | candidates → decision; one file a strategy |
//! | 6 | [`usage`] | the end of an answer → tokens of its prompt, and how many of them were cached |
//! | 6 | [`load`] | an engine's metrics text → its load |
//! | 6 | [`discovery`] | Envoy's admin JSON → endpoints |
//! | 6 | [`lease`] | who polls: one holder among service and filters |
//! | 6 | [`poller`] | the companion of one pool: time and answers in → calls to make, table to publish |
//! | 7 | [`config`] | plugin JSON → configuration, or the path of what is wrong with it |
//! | 8 | [`hold`] | how much of a body may be held |
//! | 8 | [`pool`] | all of the above for one pool of one worker |
//! | 8 | [`exchange`] | one request: headers, body, trailers, response in → the next step out |
//! | 9 | `proxy` | wasi only: Envoy's callbacks and host calls, translated |
//!
//! All but `proxy` is pure: no I/O, no clock (`now_ms` is an argument), no globals, no threads, and randomness only
//! from a seed. It runs natively, on `wasm32-unknown-unknown` and in the filter. `proxy-wasm` is a dependency of the
//! wasi target alone, so a leak of the shell into the core fails the native build.
//!
//! # Glossary
//!
//! * **endpoint**, **host**: one replica of an engine; endpoint as Envoy lists it, host once it has a slot here.
//! * **pool**: the hosts of one Envoy cluster; everything is kept by pool.
//! * **slot**, **epoch**: a host's small number, and how often it was given anew or its engine restarted.
//! * **prefix**, **chunk**, **key**: the head of a prompt, its pieces at growing spacing, and the 64-bit hash of the
//!   prefix up to the end of one of them, with the namespace mixed in.
//! * **namespace**: what must be equal besides the messages for two prompts to share KV cache: model, adapter, salt,
//!   tenant, tools, template inputs.
//! * **home**: the first host in the rendezvous order of a prompt's home key.
//! * **placement**, **index**: which keys went to which host, and what is believed of their caches from that.
//! * **charge**, **tally**: the work that a placed request adds to its host, and the sum of those.
//! * **candidate**, **decision**: a host that a strategy looks at, and what it chose, with the reason.
//! * **companion**, **lease**, **journal**, **host table**: who polls, how it is elected, what workers tell each other,
//!   and what the companion tells them.
//!
//! # When something fails
//!
//! A configuration fails closed, at load, naming the key. A request never does: whatever cannot be read, found or
//! decided leaves the steering header unset, is counted by cause, and Envoy's own policy chooses the host. Old knowledge
//! ages: a fresh table gives costs, a stale one leaves the requests in flight, none leaves the rendezvous order over the
//! last known hosts.

pub mod chunk;
pub mod prompt;
pub mod late_fields;
pub mod recent;
pub mod blob;
pub mod host_table;
pub mod journal;
pub mod shared_keys;
pub mod index;
pub mod candidate;
pub mod decision;
pub mod strategy;
pub mod usage;
pub mod load;
pub mod discovery;
pub mod lease;
pub mod poller;
pub mod config;
pub mod hold;
pub mod pool;
pub mod exchange;
#[cfg(target_os = "wasi")]
mod proxy;
