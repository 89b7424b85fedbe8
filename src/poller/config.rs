//! What a companion is told: where hosts come from and how their metrics are read.

use crate::discovery::StaticHost;
use crate::load::Preset;

/// Settings of one pool's companion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PollerConfig {
    /// The pool's Envoy cluster.
    pub cluster: String,
    /// Where its hosts come from.
    pub discovery: Discovery,
    /// How their metrics are read.
    pub metrics: MetricsConfig,
    /// Request header in which Envoy's `override_host` policy looks for the one host to use.
    pub steering_header: String,
}

/// Where a pool's hosts come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Discovery {
    /// Envoy's admin interface.
    Admin {
        /// The Envoy cluster that leads to it.
        cluster: String,
        /// How often it is asked, ms.
        interval_ms: u32,
    },
    /// The config.
    Static(Vec<StaticHost>),
}

/// How a pool's metrics are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricsConfig {
    /// Whether they are read at all.
    pub enabled: bool,
    /// The Envoy cluster that leads to the hosts' metrics; it must hold the same addresses (but see `port`).
    pub cluster: String,
    /// Path of the metrics.
    pub path: String,
    /// Port of the metrics where it is not the port that serves requests; the addresses in `cluster` then have it, too.
    pub port: Option<u16>,
    /// Which metric names mean what.
    pub preset: Preset,
    /// How often each host is asked, ms.
    pub interval_ms: u32,
    /// When to give up on an answer, ms.
    pub timeout_ms: u32,
    /// Scrapes in flight at most; held within 1…16, and 1…8 when they go through the pool's own cluster.
    pub max_in_flight: u16,
    /// Whether an answer that does not say which host served it (no `x-served-by`) is dropped. Answers that name another
    /// host always are.
    pub require_served_by: bool,
}

impl Default for Discovery {
    /// Admin through a cluster called `admin`, every 2 s: hosts come and go slower.
    fn default() -> Self {
        Self::Admin {
            cluster: "admin".to_owned(),
            interval_ms: 2_000,
        }
    }
}

impl MetricsConfig {
    /// The defaults for metrics behind `cluster`: vLLM, each host twice a second (queues change within a second), 1 s to
    /// answer (an engine busy for longer is busy), 16 in flight.
    pub fn of_cluster(cluster: &str) -> Self {
        let preset = Preset::Vllm;
        Self {
            enabled: true,
            cluster: cluster.to_owned(),
            path: preset.default_path().to_owned(),
            port: None,
            preset,
            interval_ms: 500,
            timeout_ms: 1_000,
            max_in_flight: 16,
            require_served_by: false,
        }
    }

    /// The address to scrape for the host at `address`.
    pub(super) fn address_of(&self, address: &str) -> String {
        match (self.port, address.rsplit_once(':')) {
            (Some(port), Some((ip, _))) => {
                let mut scraped = String::with_capacity(ip.len().saturating_add(6));
                scraped.push_str(ip);
                scraped.push(':');
                scraped.push_str(&port.to_string());
                scraped
            }
            (Some(_), None) | (None, _) => address.to_owned(),
        }
    }
}

impl PollerConfig {
    /// Scrapes in flight at most. The pool's own cluster shares its circuit breakers with requests: 1 100 scrapes at once
    /// gave a user a 503.
    pub(super) fn max_scrapes_in_flight(&self) -> usize {
        let bound = if self.metrics.cluster == self.cluster {
            MAX_SCRAPES / 2
        } else {
            MAX_SCRAPES
        };
        usize::from(self.metrics.max_in_flight.clamp(1, bound))
    }
}

/// Scrapes in flight at most, whatever is configured: one takes 140 µs of the main thread.
pub(super) const MAX_SCRAPES: u16 = 16;
