//! Plugin JSON → typed configuration.
//!
//! In goes the text of the plugin's `configuration`, the same for filter and companion; out comes a [`Config`] that
//! cannot be wrong. Unknown keys, wrong types and values out of range are refused with the key's path and what would be
//! accepted: a configuration fails closed, at load. Every key stands in the README with type, unit, default and reason;
//! the reasons of the defaults are at the constants in `config/pool.rs`.
//!
//! All keys but `pools` and `companion` may stand at the top, as defaults for all pools, or inside a pool.

mod document;
mod pool;
mod reader;

use serde_json::Value;

use self::pool::PoolDraft;
pub use self::reader::ConfigError;
use self::reader::Reader;
use crate::poller::{Discovery, MetricsConfig};
use crate::prompt::PromptOptions;
use crate::strategy::RecomputeWeight;

/// What the operator configured.
#[derive(Debug, Clone)]
pub struct Config {
    /// Who polls.
    pub companion: CompanionMode,
    /// One entry for each cluster that Warmroute routes for, in the order of their names.
    pub pools: Vec<PoolConfig>,
}

/// Who polls the engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompanionMode {
    /// The bootstrap service; a filter's root context takes over when it stops.
    Service,
    /// One of the filter's root contexts, elected among them.
    Embedded,
}

/// Configuration of one pool: the hosts of one Envoy cluster.
#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// Name of the cluster.
    pub name: String,
    /// How a host is chosen.
    pub strategy: StrategyName,
    /// When `hybrid` leaves the home host.
    pub overflow: Overflow,
    /// λ of the cost rule.
    pub recompute_weight: RecomputeWeight,
    /// Request header that names the hosts to the cluster's `override_host` policy.
    pub steering_header: String,
    /// Adds the `x-warmroute-*` headers to responses.
    pub debug_headers: bool,
    /// Decides and reports, but leaves the choice to Envoy.
    pub dry_run: bool,
    /// Bytes of a body that are held before the host is chosen with what is there.
    pub max_buffer_bytes: u32,
    /// Envoy's buffer limit for a stream, where it is too small for that and cannot be raised.
    pub stream_buffer_bytes: Option<u32>,
    /// What of a body counts, and how.
    pub prompt: PromptOptions,
    /// Request header whose value keeps tenants' prefixes apart.
    pub tenant_header: Option<String>,
    /// Request headers that name a session, strongest first.
    pub session_headers: Vec<String>,
    /// Depth of the fixed home key and of the shallowest adaptive one.
    pub home_bytes: u32,
    /// Bound of the memory for how often prefixes were used.
    pub recent_prefix_bytes: u32,
    /// Bound of the prefix index of each worker.
    pub index_memory_bytes: u32,
    /// Bound of the memory that completes cut bodies.
    pub late_field_bytes: u32,
    /// Age at which the host table stops being believed.
    pub table_fresh_ms: u32,
    /// Prompt bytes that make a token, until answers tell.
    pub bytes_per_token: u32,
    /// Whose answers are read for what the engine counted.
    pub usage_feedback: UsageFeedback,
    /// Where endpoints come from.
    pub discovery: Discovery,
    /// How engines are scraped.
    pub metrics: MetricsConfig,
}

/// Whose answers are read for the engine's count of prompt tokens and cached ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UsageFeedback {
    /// Nobody's.
    Off,
    /// Those that come whole.
    Answers,
    /// Those and streamed ones.
    Streams,
}

impl UsageFeedback {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Off, Self::Answers, Self::Streams];

    /// The name used in the configuration.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Answers => "answers",
            Self::Streams => "streams",
        }
    }

    /// Whether a streamed answer, or one that comes whole, is read.
    #[must_use]
    pub fn reads(self, is_streamed: bool) -> bool {
        match self {
            Self::Off => false,
            Self::Answers => !is_streamed,
            Self::Streams => true,
        }
    }
}

/// Names of the strategies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StrategyName {
    /// Next host.
    RoundRobin,
    /// Fewest requests in flight.
    LeastOutstanding,
    /// Rendezvous hash of the prefix, always.
    PrefixHash,
    /// Rendezvous order of the prefix, first host that is worth it.
    Hybrid,
    /// Least cost over the hosts that hold the prefix, the rendezvous order and the least loaded.
    CacheAware,
}

impl StrategyName {
    /// All of them, in the order of their metrics.
    pub const ALL: [Self; 5] = [
        Self::RoundRobin,
        Self::LeastOutstanding,
        Self::PrefixHash,
        Self::Hybrid,
        Self::CacheAware,
    ];

    /// The name used in config, headers and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::RoundRobin => "round_robin",
            Self::LeastOutstanding => "least_outstanding",
            Self::PrefixHash => "prefix_hash",
            Self::Hybrid => "hybrid",
            Self::CacheAware => "cache_aware",
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

impl Config {
    /// Reads the plugin's configuration.
    ///
    /// # Errors
    /// With the path of the first key that is unknown, of the wrong type or out of range.
    pub fn parse(text: &[u8]) -> Result<Self, ConfigError> {
        if text.len() > MAX_CONFIG_BYTES {
            return Err(ConfigError::new(
                "",
                format!("expected at most {MAX_CONFIG_BYTES} bytes of JSON"),
            ));
        }
        let document: Value = document::parse(text)
            .map_err(|error| ConfigError::new("", format!("expected one JSON object: {error}")))?;
        let mut top = Reader::open("", &document)?;
        let companion = companion(&mut top)?;
        let pools_value = top.value("pools");
        let defaults = PoolDraft::default().read(&mut top)?;
        top.finish()?;

        let Some(pools_value) = pools_value else {
            return Err(ConfigError::new(
                "pools",
                "missing; expected an object with one entry for each cluster to route for",
            ));
        };
        let names = Reader::open("pools", pools_value)?;
        let mut pools = Vec::new();
        for (name, value) in names.entries() {
            let path = names.path_of(name);
            if name.is_empty() || name.len() > MAX_NAME_BYTES {
                return Err(ConfigError::new(
                    path,
                    format!("expected the name of a cluster, 1 to {MAX_NAME_BYTES} bytes"),
                ));
            }
            let mut entry = Reader::open(path.clone(), value)?;
            let draft = defaults.clone().read(&mut entry)?;
            entry.finish()?;
            pools.push(draft.finish(name, &path)?);
        }
        if pools.is_empty() || pools.len() > MAX_POOLS {
            return Err(ConfigError::new(
                "pools",
                format!("expected 1 to {MAX_POOLS} pools, got {}", pools.len()),
            ));
        }
        let memory_bytes: u64 = pools.iter().map(PoolConfig::memory_bytes).sum();
        if memory_bytes > MAX_MEMORY_BYTES {
            return Err(ConfigError::new(
                "pools",
                format!(
                    "expected index.memory_bytes, prefix.memory_bytes and late_field_bytes of all pools to be at most \
                     {MAX_MEMORY_BYTES} together, got {memory_bytes}"
                ),
            ));
        }
        Ok(Self { companion, pools })
    }

    /// The pool of a cluster.
    #[must_use]
    pub fn pool(&self, cluster: &str) -> Option<&PoolConfig> {
        self.pools.iter().find(|pool| pool.name == cluster)
    }
}

fn companion(top: &mut Reader<'_>) -> Result<CompanionMode, ConfigError> {
    let Some(mut companion) = top.object("companion")? else {
        return Ok(CompanionMode::Service);
    };
    let mode = companion
        .choice(
            "mode",
            &[
                ("service", CompanionMode::Service),
                ("embedded", CompanionMode::Embedded),
            ],
        )?
        .unwrap_or(CompanionMode::Service);
    companion.finish()?;
    Ok(mode)
}

impl PoolConfig {
    /// What its pool keeps in each worker once it is full.
    fn memory_bytes(&self) -> u64 {
        [
            self.index_memory_bytes,
            self.recent_prefix_bytes,
            self.late_field_bytes,
        ]
        .into_iter()
        .map(u64::from)
        .sum()
    }
}

/// A VM can address 4 GiB, and one that gets no memory traps; pools of a configuration live on beside those of the next until
/// their requests are over.
const MAX_MEMORY_BYTES: u64 = 1536 << 20;
/// A whole configuration beyond this is refused unread: it is held twice while it is parsed.
const MAX_CONFIG_BYTES: usize = 1 << 20;
const MAX_POOLS: usize = 64;
const MAX_NAME_BYTES: usize = 256;
