//! Long runs before real Envoys: what must stay bounded, equal and whole over days, packed into minutes.
//!
//! | module | what it does |
//! |---|---|
//! | [`requests`] | a seed and a number → one request of a mix that nobody chose by hand |
//! | [`upstream`] | servers whose answers are a function of the request, so that a changed byte shows |
//! | [`memory`] | resident memory of an Envoy, and the linear memory of each of its VMs |
//! | [`twins`] | the same requests through an Envoy with the filter and one without: equal answers |
//! | [`bounds`] | many sizes, many pods: memory and metric names stay what they were |
//! | [`churn`] | hosts come and go, clients leave, configurations are pushed: every request counted once |
//! | [`report`] | what was checked, with figures: a table, a file, an exit code |
//! | [`args`] | the command line of the program `soak` |
//!
//! Nothing here knows how the filter works inside: it asks, counts, and looks at what an operator can see.

pub mod args;
pub mod bounds;
pub mod churn;
pub mod memory;
pub mod report;
pub mod requests;
pub mod stand;
pub mod twins;
pub mod upstream;
