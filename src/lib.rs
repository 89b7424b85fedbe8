//! Warmroute: routes each LLM request to the replica whose KV cache is already warm.

pub mod chunk;
pub mod prompt;
pub mod late_fields;
