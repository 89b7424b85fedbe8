//! Bytes ↔ the companion's host table.

/// Small number of a host within a pool, stable while the host stays; reused with a new epoch after it left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u16);

/// What an endpoint is used for (disaggregated serving).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Role {
    /// Prefill and decode.
    #[default]
    Both,
    /// Prefill only.
    Prefill,
    /// Decode only.
    Decode,
}

/// What Envoy says of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Health {
    /// Takes traffic.
    #[default]
    Healthy,
    /// Takes traffic, reported degraded.
    Degraded,
    /// Failed health checks or was ejected.
    Unhealthy,
    /// Is being removed.
    Draining,
}

/// One host of the table.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Host {
    /// Slot number.
    pub slot: Slot,
    /// Grows each time the slot is reused or the engine process restarted.
    pub epoch: u32,
    /// `ip:port`, IPv6 in brackets, as Envoy's host map spells it.
    pub address: String,
    /// Role.
    pub role: Role,
    /// Health.
    pub health: Health,
    /// Load-balancing weight, 1 by default.
    pub weight: u32,
    /// When `load` was scraped, ms since the Unix epoch; 0 = never.
    pub sampled_ms: u64,
    /// What the engine said.
    pub load: Load,
}

impl Default for Slot {
    fn default() -> Self {
        Slot(0)
    }
}

/// Load of one engine as its `/metrics` tell it; absent metrics are `None`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Load {
    /// Requests waiting for their prefill.
    pub waiting: Option<u32>,
    /// Requests running.
    pub running: Option<u32>,
    /// KV cache in use, thousandths.
    pub kv_usage_permille: Option<u16>,
    /// KV cache size in tokens.
    pub kv_capacity_tokens: Option<u64>,
    /// Prefix cache: tokens queried, cumulative.
    pub prefix_queries: Option<u64>,
    /// Prefix cache: tokens hit, cumulative.
    pub prefix_hits: Option<u64>,
    /// Process start, ms since the Unix epoch.
    pub started_ms: Option<u64>,
    /// Hashes of the LoRA adapter names loaded or running (at most 64).
    pub adapters: Vec<u64>,
}

/// The table the companion publishes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct HostTable {
    /// When it was published, ms since the Unix epoch.
    pub published_ms: u64,
    /// Hosts in growing slot order.
    pub hosts: Vec<Host>,
}
