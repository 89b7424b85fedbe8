//! Warmroute: routes each LLM request to the replica whose KV cache is already warm.

pub mod chunk;
pub mod prompt;
pub mod late_fields;
pub mod recent;
pub mod blob;
pub mod host_table;
pub mod journal;
pub mod candidate;
pub mod decision;
pub mod strategy;
pub mod load;
pub mod discovery;
pub mod lease;
pub mod poller;
pub mod config;
pub mod hold;
pub mod pool;
pub mod exchange;
