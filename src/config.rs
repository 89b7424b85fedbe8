//! Plugin JSON → typed config.

/// Names of the strategies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StrategyName {
    /// Next host.
    RoundRobin,
    /// Fewest in flight.
    LeastOutstanding,
    /// Rendezvous hash of the prefix, always.
    PrefixHash,
    /// Rendezvous order, first host that is worth it.
    Hybrid,
}

impl StrategyName {
    /// The name used in config, headers and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::RoundRobin => "round_robin",
            Self::LeastOutstanding => "least_outstanding",
            Self::PrefixHash => "prefix_hash",
            Self::Hybrid => "hybrid",
        }
    }
}

/// When `hybrid` leaves the home host.
#[derive(Debug, Clone, PartialEq)]
pub enum Overflow {
    /// The cost rule.
    Auto,
    /// Explicit thresholds; a host over any of them is passed over. Each is for a prompt of `reference_tokens` and is
    /// scaled by prompt length: long prompts tolerate more, short ones leave earlier.
    Thresholds(Thresholds),
}

/// Explicit overflow thresholds; `None` = not looked at.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Thresholds {
    /// Requests waiting at the engine.
    pub waiting_requests: Option<u32>,
    /// KV cache usage, thousandths.
    pub kv_usage_permille: Option<u16>,
    /// Requests in flight through the gateways.
    pub in_flight: Option<u32>,
}
