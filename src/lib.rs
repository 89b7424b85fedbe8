//! Warmroute: routes each LLM request to the replica whose KV cache is already warm.
pub mod prompt;
pub mod chunk;
pub mod late_fields;
pub mod recent;
pub mod host_table;
pub mod journal;
pub mod lease;
pub mod load;
pub mod discovery;
pub mod poller;
pub mod candidate;
pub mod strategy;
pub mod decision;
pub mod config;
