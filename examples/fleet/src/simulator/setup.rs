//! Everything that may be varied between runs of one workload.

use std::fmt;

use warmroute::config::{Config, PoolConfig, StrategyName};

use crate::engine::EngineModel;

/// One run's fleet, gateways and policy.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The engine of every host; a run gives it the workload's block size and the cache below.
    pub engine: EngineModel,
    /// Tokens of KV cache on each host.
    pub kv_tokens: usize,
    /// What the gateways are told of it, as a factor; 1 is the truth.
    pub kv_assumed_factor: f64,
    /// Hosts.
    pub hosts: usize,
    /// Speed of each host against the engine's; hosts beyond the list have 1.
    pub speeds: Vec<f64>,
    /// Gateways, each with an index and tallies of its own; requests are spread over them at random.
    pub gateways: usize,
    /// What they tell each other.
    pub sharing: Sharing,
    /// Time between polls of the hosts, ms.
    pub poll_ms: u64,
    /// Time from a sample to its use, ms.
    pub poll_delay_ms: u64,
    /// The rule that chooses hosts.
    pub policy: Policy,
    /// Where each request goes under [`Policy::Logged`].
    pub logged_hosts: std::sync::Arc<[u16]>,
    /// Keys of the pool's configuration as JSON, without `strategy` and `discovery`.
    pub pool_config: String,
    /// What happens to hosts, and when.
    pub happenings: Vec<(u64, Happening)>,
    /// Seeds arrivals within a tick, addresses of hosts and choices between equals.
    pub seed: u64,
}

/// What gateways tell each other through their journals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// Nothing: separate machines.
    Nothing,
    /// Where prompts were placed.
    Placements {
        /// Age of what is read, ms.
        delay_ms: u64,
    },
    /// Placements, and what each has open.
    All {
        /// Age of what is read, ms.
        delay_ms: u64,
    },
}

/// Something that happens to a host, named by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Happening {
    /// Its engine starts anew and loses cache and requests.
    Restart(usize),
    /// A new host joins the fleet; hosts are numbered on.
    Add,
    /// It leaves the fleet: what runs there ends, new requests are refused.
    Remove(usize),
    /// Every step takes so many thousandths of its time.
    Slow(usize, u64),
    /// It answers 503 at once.
    Fail(usize),
    /// It answers again.
    Recover(usize),
}

/// A rule that chooses hosts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Policy {
    /// One of the core's strategies.
    Core(StrategyName),
    /// The core's choice for prompts without keys: the least work that it placed and knows of, caches left out.
    LeastWork,
    /// The published rule of the SGLang router, `cache_aware` with its defaults.
    Sglang,
    /// `smetric` of the vLLM router.
    Smetric,
    /// LMetric: pending and new prefill work × requests in flight.
    Lmetric,
    /// The cost rule with true caches and true backlogs.
    Oracle(Lambda),
    /// Each request goes where a log says that it went.
    Logged,
}

/// What recomputing a token costs beyond its time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Lambda {
    /// Always the same.
    Fixed(f64),
    /// Follows the share of hosts with pending prefill.
    Utilisation,
}

/// Why a setup cannot be run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SetupError {
    /// The pool's configuration is refused.
    Config(String),
    /// There is no policy of that name.
    UnknownPolicy(String),
    /// There are no hosts, no gateways, or more than slots can name.
    Fleet,
}

impl Setup {
    /// Eight hosts of that engine and cache behind one gateway that polls twice a second.
    pub fn new(engine: EngineModel, kv_tokens: usize, policy: Policy) -> Self {
        Self {
            engine,
            kv_tokens,
            kv_assumed_factor: 1.0,
            hosts: 8,
            speeds: Vec::new(),
            gateways: 1,
            sharing: Sharing::Nothing,
            poll_ms: 500,
            poll_delay_ms: 20,
            policy,
            logged_hosts: std::sync::Arc::default(),
            pool_config: "{}".to_owned(),
            happenings: Vec::new(),
            seed: 1,
        }
    }

    /// The configuration that every gateway's core gets.
    ///
    /// # Errors
    /// When the core refuses it.
    pub fn pool_config(&self) -> Result<PoolConfig, SetupError> {
        let strategy = match self.policy {
            Policy::Core(name) => name,
            Policy::LeastWork
            | Policy::Sglang
            | Policy::Smetric
            | Policy::Lmetric
            | Policy::Oracle(_)
            | Policy::Logged => StrategyName::Hybrid,
        };
        pool_config(&self.pool_config, strategy)
    }

    /// Mean speed of the hosts.
    pub fn mean_speed(&self) -> f64 {
        let speed = |host: usize| self.speeds.get(host).copied().unwrap_or(1.0);
        (0..self.hosts).map(speed).sum::<f64>() / self.hosts.max(1) as f64
    }
}

/// The core's configuration of a pool with these keys.
///
/// # Errors
/// When the core refuses it.
pub fn pool_config(keys: &str, strategy: StrategyName) -> Result<PoolConfig, SetupError> {
    let mut document: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(keys).map_err(|error| SetupError::Config(error.to_string()))?;
    document.insert("strategy".into(), strategy.as_str().into());
    let pools = serde_json::json!({"llm": {"discovery": {"admin_cluster": "admin"}}});
    document.insert("pools".into(), pools);
    let text = serde_json::Value::Object(document).to_string();
    let config = Config::parse(text.as_bytes()).map_err(|error| SetupError::Config(error.to_string()))?;
    let pool = config.pools.into_iter().next();
    pool.ok_or_else(|| SetupError::Config("no pool".to_owned()))
}

impl Policy {
    /// The rows of a full comparison; the oracle's λ are the four that its row is the best of.
    pub const ALL: [Self; 13] = [
        Self::Core(StrategyName::RoundRobin),
        Self::Core(StrategyName::LeastOutstanding),
        Self::LeastWork,
        Self::Core(StrategyName::PrefixHash),
        Self::Sglang,
        Self::Smetric,
        Self::Lmetric,
        Self::Core(StrategyName::Hybrid),
        Self::Core(StrategyName::CacheAware),
        Self::ORACLES[0],
        Self::ORACLES[1],
        Self::ORACLES[2],
        Self::ORACLES[3],
    ];

    /// The oracle with each λ.
    pub const ORACLES: [Self; 4] = [
        Self::Oracle(Lambda::Fixed(0.5)),
        Self::Oracle(Lambda::Fixed(1.0)),
        Self::Oracle(Lambda::Fixed(2.0)),
        Self::Oracle(Lambda::Utilisation),
    ];

    /// The policy of that name.
    ///
    /// # Errors
    /// When there is none.
    pub fn parse(name: &str) -> Result<Self, SetupError> {
        let known = Self::ALL.into_iter().find(|policy| policy.to_string() == name);
        let of_number = || {
            let number = name.strip_prefix("oracle:")?.parse().ok()?;
            Some(Self::Oracle(Lambda::Fixed(number)))
        };
        known
            .or_else(of_number)
            .ok_or_else(|| SetupError::UnknownPolicy(name.to_owned()))
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Core(strategy) => f.write_str(strategy.as_str()),
            Self::LeastWork => f.write_str("least_work"),
            Self::Sglang => f.write_str("sglang"),
            Self::Smetric => f.write_str("smetric"),
            Self::Lmetric => f.write_str("lmetric"),
            Self::Oracle(Lambda::Fixed(number)) => write!(f, "oracle:{number}"),
            Self::Logged => f.write_str("as logged"),
            Self::Oracle(Lambda::Utilisation) => f.write_str("oracle:util"),
        }
    }
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => write!(f, "pool configuration: {error}"),
            Self::UnknownPolicy(name) => write!(f, "there is no policy {name}"),
            Self::Fleet => write!(
                f,
                "hosts and gateways must be 1 to {MAX_HOSTS} and 1 to {MAX_GATEWAYS}"
            ),
        }
    }
}

impl std::error::Error for SetupError {}

/// Hosts at most, those added included.
pub const MAX_HOSTS: usize = warmroute::host_table::MAX_HOSTS;
/// Gateways at most.
pub const MAX_GATEWAYS: usize = 64;
