//! One pool's keys, at the top level or inside the pool → [`PoolConfig`].
//!
//! The reasons of the defaults are at the constants below.

use core::num::NonZeroU32;

use serde_json::Value;

use super::reader::{ConfigError, Reader, choice_of, string_of};
use super::{MAX_NAME_BYTES, Overflow, PoolConfig, StrategyName, Thresholds, UsageFeedback};
use crate::discovery::StaticHost;
use crate::host_table::Role;
use crate::load::{CustomMetrics, Preset};
use crate::poller::{Discovery, MetricsConfig};
use crate::prompt::{PromptOptions, SessionField, SessionMode};
use crate::strategy::RecomputeWeight;

/// A pool while it is being read: what the top level said, overridden by what the pool says.
#[derive(Debug, Clone)]
pub(super) struct PoolDraft {
    config: PoolConfig,
    discovery: Option<Discovery>,
    metrics_cluster: Option<String>,
    metrics_path: Option<String>,
}

impl Default for PoolDraft {
    fn default() -> Self {
        Self {
            config: PoolConfig {
                name: String::new(),
                strategy: StrategyName::Hybrid,
                overflow: Overflow::Auto,
                recompute_weight: RecomputeWeight::Utilisation,
                steering_header: DEFAULT_STEERING_HEADER.into(),
                debug_headers: false,
                dry_run: false,
                max_buffer_bytes: DEFAULT_MAX_BUFFER_BYTES,
                stream_buffer_bytes: None,
                prompt: PromptOptions::default(),
                tenant_header: None,
                session_headers: vec![DEFAULT_SESSION_HEADER.into()],
                home_bytes: DEFAULT_HOME_BYTES,
                recent_prefix_bytes: DEFAULT_RECENT_PREFIX_BYTES,
                index_memory_bytes: DEFAULT_INDEX_MEMORY_BYTES,
                late_field_bytes: DEFAULT_LATE_FIELD_BYTES,
                table_fresh_ms: DEFAULT_TABLE_FRESH_MS,
                bytes_per_token: DEFAULT_BYTES_PER_TOKEN,
                usage_feedback: UsageFeedback::Answers,
                discovery: Discovery::default(),
                metrics: MetricsConfig::of_cluster(""),
            },
            discovery: None,
            metrics_cluster: None,
            metrics_path: None,
        }
    }
}

impl PoolDraft {
    /// Takes over what `reader` says; keys that it lacks stay as they are.
    pub(super) fn read(mut self, reader: &mut Reader<'_>) -> Result<Self, ConfigError> {
        let config = &mut self.config;
        if let Some(strategy) =
            reader.choice("strategy", &StrategyName::ALL.map(|name| (name.as_str(), name)))?
        {
            config.strategy = strategy;
        }
        let path = reader.path_of("overflow");
        if let Some(value) = reader.value("overflow") {
            config.overflow = overflow(path, value)?;
        }
        if let Some(weight) = reader.auto_or_permille("recompute_weight", 16)? {
            config.recompute_weight = weight.map_or(RecomputeWeight::Utilisation, |permille| {
                RecomputeWeight::Fixed { permille }
            });
        }
        if let Some(name) = header_name(reader, "steering_header")? {
            config.steering_header = name;
        }
        if let Some(flag) = reader.boolean("debug_headers")? {
            config.debug_headers = flag;
        }
        if let Some(flag) = reader.boolean("dry_run")? {
            config.dry_run = flag;
        }
        if let Some(bytes) = reader.integer32("max_buffer_bytes", 4096, 16 << 20)? {
            config.max_buffer_bytes = bytes;
        }
        if let Some(bytes) = reader.integer32("stream_buffer_bytes", 4096, 1 << 30)? {
            config.stream_buffer_bytes = Some(bytes);
        }
        if let Some(bytes) = reader.integer32("late_field_bytes", 4096, 16 << 20)? {
            config.late_field_bytes = bytes;
        }
        // A table without news is published once a second.
        if let Some(age) = reader.integer32("table_fresh_ms", 1500, 60_000)? {
            config.table_fresh_ms = age;
        }
        if let Some(whose) = reader.choice(
            "usage_feedback",
            &UsageFeedback::ALL.map(|whose| (whose.as_str(), whose)),
        )? {
            config.usage_feedback = whose;
        }
        if let Some(mut prefix) = reader.object("prefix")? {
            config.read_prefix(&mut prefix)?;
            prefix.finish()?;
        }
        if let Some(mut index) = reader.object("index")? {
            if let Some(bytes) = index.integer32("memory_bytes", 256 << 10, 256 << 20)? {
                config.index_memory_bytes = bytes;
            }
            index.finish()?;
        }
        if let Some(mut session) = reader.object("session")? {
            config.read_session(&mut session)?;
            session.finish()?;
        }
        if let Some(mut discovery) = reader.object("discovery")? {
            self.discovery = Some(read_discovery(&mut discovery)?);
            discovery.finish()?;
        }
        if let Some(mut metrics) = reader.object("metrics")? {
            self.read_metrics(&mut metrics)?;
            metrics.finish()?;
        }
        Ok(self)
    }

    fn read_metrics(&mut self, reader: &mut Reader<'_>) -> Result<(), ConfigError> {
        let metrics = &mut self.config.metrics;
        if let Some(enabled) = reader.boolean("enabled")? {
            metrics.enabled = enabled;
        }
        let preset = reader.choice("preset", &PRESETS.map(|name| (name, name)))?;
        if let Some(preset) = preset.and_then(Preset::from_name) {
            metrics.preset = preset;
        }
        if let Some(mut names) = reader.object("names")? {
            if preset.is_some() {
                return Err(ConfigError::new(
                    reader.path_of("names"),
                    "expected either a preset or names of your own, not both",
                ));
            }
            let custom = custom_names(&mut names)?;
            names.finish()?;
            let tells_no_load = CustomMetrics {
                kv_usage_scale: custom.kv_usage_scale,
                started_seconds: custom.started_seconds.clone(),
                ..CustomMetrics::default()
            };
            if custom == tells_no_load {
                return Err(ConfigError::new(
                    reader.path_of("names"),
                    "expected at least one of waiting, running, kv_usage, kv_capacity_tokens, prefix_queries, prefix_hits",
                ));
            }
            metrics.preset = Preset::Custom(Box::new(custom));
        }
        if let Some(cluster) = reader.string("cluster", 1, MAX_NAME_BYTES)? {
            self.metrics_cluster = Some(cluster.into());
        }
        if let Some(path) = reader.string("path", 1, MAX_NAME_BYTES)? {
            if !path.starts_with('/') {
                return Err(ConfigError::new(
                    reader.path_of("path"),
                    "expected a path that starts with /",
                ));
            }
            self.metrics_path = Some(path.into());
        }
        if let Some(interval) = reader.integer32("interval_ms", 100, 60_000)? {
            metrics.interval_ms = interval;
        }
        if let Some(timeout) = reader.integer32("timeout_ms", 50, 60_000)? {
            metrics.timeout_ms = timeout;
        }
        if let Some(count) = reader.integer("max_in_flight", 1, 16)? {
            metrics.max_in_flight = u16::try_from(count).unwrap_or(u16::MAX);
        }
        if let Some(port) = reader.integer("port", 1, 65_535)? {
            metrics.port = u16::try_from(port).ok();
        }
        if let Some(flag) = reader.boolean("require_served_by")? {
            metrics.require_served_by = flag;
        }
        Ok(())
    }

    /// Checks what only the whole can tell and completes what depends on the pool's name.
    pub(super) fn finish(mut self, name: &str, path: &str) -> Result<PoolConfig, ConfigError> {
        let Some(discovery) = self.discovery else {
            return Err(ConfigError::new(
                format!("{path}.discovery"),
                "missing; expected {\"admin_cluster\": \"…\"} or {\"hosts\": [{\"address\": \"ip:port\"}, …]}",
            ));
        };
        self.config.name = name.into();
        self.config.discovery = discovery;
        let metrics = &mut self.config.metrics;
        metrics.path = self
            .metrics_path
            .unwrap_or_else(|| metrics.preset.default_path().into());
        metrics.cluster = self.metrics_cluster.unwrap_or_else(|| name.into());
        let fresh_ms = self.config.table_fresh_ms;
        if metrics.enabled && metrics.interval_ms > fresh_ms {
            return Err(ConfigError::new(
                format!("{path}.metrics.interval_ms"),
                format!(
                    "expected at most table_fresh_ms, {fresh_ms}, or a sample is stale before the next one comes; got {}",
                    metrics.interval_ms
                ),
            ));
        }
        Ok(self.config)
    }
}

impl PoolConfig {
    fn read_prefix(&mut self, reader: &mut Reader<'_>) -> Result<(), ConfigError> {
        if let Some(bytes) = reader.integer32("max_bytes", 1024, 4 << 20)? {
            self.prompt.max_prefix_bytes = bytes;
        }
        if let Some(bytes) = reader.integer32("home_bytes", 256, 65_536)? {
            self.home_bytes = bytes;
        }
        if let Some(bytes) = reader.integer32("memory_bytes", 16_384, 64 << 20)? {
            self.recent_prefix_bytes = bytes;
        }
        if let Some(bytes) = reader.integer32("bytes_per_token", 1, 16)? {
            self.bytes_per_token = bytes;
        }
        if let Some(secret) = reader.string("secret", 0, 256)? {
            self.prompt.secret = secret.as_bytes().to_vec();
        }
        if let Some(name) = header_name(reader, "tenant_header")? {
            if PER_REQUEST_HEADERS.contains(&name.as_str()) {
                return Err(ConfigError::new(
                    reader.path_of("tenant_header"),
                    "names one request, not a tenant: no two requests would share a prefix",
                ));
            }
            self.tenant_header = Some(name);
        }
        if let Some(items) = reader.list("volatile_heads", MAX_LIST_ITEMS)? {
            self.prompt.volatile_heads = items
                .into_iter()
                .map(|(path, item)| string_of(path, item, 1, 256).map(String::from))
                .collect::<Result<_, _>>()?;
        }
        Ok(())
    }

    fn read_session(&mut self, reader: &mut Reader<'_>) -> Result<(), ConfigError> {
        if let Some(mode) = reader.choice("mode", &SESSION_MODES.map(|mode| (mode.as_str(), mode)))? {
            self.prompt.session_mode = mode;
        }
        if let Some(items) = reader.list("headers", MAX_LIST_ITEMS)? {
            self.session_headers = items
                .into_iter()
                .map(|(path, item)| {
                    let name = header_of(&path, string_of(path.clone(), item, 1, MAX_NAME_BYTES)?)?;
                    if PER_REQUEST_HEADERS.contains(&name.as_str()) {
                        return Err(ConfigError::new(
                            path,
                            "names one request, not a session: every request would get another host",
                        ));
                    }
                    Ok(name)
                })
                .collect::<Result<_, _>>()?;
        }
        if let Some(items) = reader.list("fields", MAX_LIST_ITEMS)? {
            self.prompt.session_fields = items
                .into_iter()
                .map(|(path, item)| {
                    choice_of(
                        path,
                        item,
                        &SessionField::ALL.map(|field| (field.as_str(), field)),
                    )
                })
                .collect::<Result<_, _>>()?;
        }
        Ok(())
    }
}

fn overflow(path: String, value: &Value) -> Result<Overflow, ConfigError> {
    if value.is_string() {
        return choice_of(path, value, &[("auto", ())]).map(|()| Overflow::Auto);
    }
    let mut reader = Reader::open(path.clone(), value)?;
    let thresholds = Thresholds {
        waiting_requests: reader.integer32("waiting_requests", 1, 100_000)?,
        kv_usage_permille: reader.permille("kv_cache_usage")?,
        in_flight: reader.integer32("in_flight", 1, 100_000)?,
    };
    reader.finish()?;
    if thresholds == Thresholds::default() {
        return Err(ConfigError::new(
            path,
            "expected \"auto\" or at least one of waiting_requests, kv_cache_usage, in_flight",
        ));
    }
    Ok(Overflow::Thresholds(thresholds))
}

fn read_discovery(reader: &mut Reader<'_>) -> Result<Discovery, ConfigError> {
    let cluster = reader.string("admin_cluster", 1, MAX_NAME_BYTES)?;
    let interval_ms = reader.integer32("interval_ms", 500, 60_000)?;
    let hosts = reader.list("hosts", MAX_STATIC_HOSTS)?;
    if hosts.is_some() && cluster.is_none() && interval_ms.is_some() {
        return Err(ConfigError::new(
            reader.path_of("interval_ms"),
            "how often admin_cluster is asked; a list of hosts has no use for it",
        ));
    }
    match (cluster, hosts) {
        (Some(cluster), None) => Ok(Discovery::Admin {
            cluster: cluster.into(),
            interval_ms: interval_ms.unwrap_or(DEFAULT_DISCOVERY_INTERVAL_MS),
        }),
        (None, Some(hosts)) if !hosts.is_empty() => hosts
            .into_iter()
            .map(|(path, host)| static_host(path, host))
            .collect::<Result<_, _>>()
            .map(Discovery::Static),
        _ => Err(ConfigError::new(
            reader.path(),
            "expected either admin_cluster, the cluster that leads to Envoy's admin interface, or a list of hosts",
        )),
    }
}

fn static_host(path: String, value: &Value) -> Result<StaticHost, ConfigError> {
    let mut reader = Reader::open(path, value)?;
    let address_path = reader.path_of("address");
    let Some(address) = reader.string("address", 1, MAX_NAME_BYTES)? else {
        return Err(ConfigError::new(address_path, "missing; expected ip:port"));
    };
    let role = reader.choice("role", &ROLES)?.unwrap_or_default();
    reader.finish()?;
    StaticHost::new(address, role).map_err(|_| {
        ConfigError::new(
            address_path,
            "expected ip:port, IPv6 in brackets, with a port above 0",
        )
    })
}

fn custom_names(reader: &mut Reader<'_>) -> Result<CustomMetrics, ConfigError> {
    let scale = reader
        .integer32("kv_usage_scale", 1, 1_000_000)?
        .and_then(NonZeroU32::new);
    let mut name = |key| Ok(reader.string(key, 1, MAX_NAME_BYTES)?.map(String::from));
    Ok(CustomMetrics {
        kv_usage_scale: scale.unwrap_or(NonZeroU32::MIN),
        waiting: name("waiting")?,
        running: name("running")?,
        kv_usage: name("kv_usage")?,
        kv_capacity_tokens: name("kv_capacity_tokens")?,
        prefix_queries: name("prefix_queries")?,
        prefix_hits: name("prefix_hits")?,
        started_seconds: name("started_seconds")?,
    })
}

fn header_name(reader: &mut Reader<'_>, key: &'static str) -> Result<Option<String>, ConfigError> {
    let path = reader.path_of(key);
    reader
        .string(key, 1, MAX_NAME_BYTES)?
        .map(|name| header_of(&path, name))
        .transpose()
}

fn header_of(path: &str, name: &str) -> Result<String, ConfigError> {
    let lower = name.to_ascii_lowercase();
    let is_token = lower
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    if is_token && !TRANSPORT_HEADERS.contains(&lower.as_str()) {
        Ok(lower)
    } else {
        Err(ConfigError::new(
            path,
            "expected the name of a header of your own: letters, digits, - _ and .",
        ))
    }
}

const MAX_LIST_ITEMS: usize = 32;
const MAX_STATIC_HOSTS: usize = 1024;
/// The name that endpoint pickers and Envoy's own documentation use for this header.
const DEFAULT_STEERING_HEADER: &str = "x-gateway-destination-endpoint";
const DEFAULT_SESSION_HEADER: &str = "x-session-id";
/// 99 % of real prompts are shorter; held plus one read of 1 MiB stays far below the shipped stream limits.
const DEFAULT_MAX_BUFFER_BYTES: u32 = 768 << 10;
/// About a thousand tokens: shallower keys put whole fleets' traffic on one host where a greeting is shared (in the
/// Mooncake conversation trace all requests share their first 512 tokens).
const DEFAULT_HOME_BYTES: u32 = 4096;
/// Some 40 000 keys: about a thousand long prompts, or the chats of some minutes on a busy worker.
const DEFAULT_RECENT_PREFIX_BYTES: u32 = 1 << 20;
/// Half a million keys: what eight hosts with caches of 1.5 M tokens hold, with message ends and room to spare.
const DEFAULT_INDEX_MEMORY_BYTES: u32 = 16 << 20;
/// Room for 1024 heads of prompts, of which a conversation takes up to eight; only those near the threshold are kept.
const DEFAULT_LATE_FIELD_BYTES: u32 = 256 << 10;
/// Three missed heartbeats of the companion.
const DEFAULT_TABLE_FRESH_MS: u32 = 3000;
/// English text and JSON; Chinese is nearer 2.
const DEFAULT_BYTES_PER_TOKEN: u32 = 4;
/// Endpoints change seldom, and `/clusters` is rendered on Envoy's main thread (2 ms for 1 000 hosts).
const DEFAULT_DISCOVERY_INTERVAL_MS: u32 = 2000;

/// Headers that Envoy or HTTP itself give a meaning to.
const TRANSPORT_HEADERS: [&str; 8] = [
    "host",
    "connection",
    "content-length",
    "content-type",
    "content-encoding",
    "transfer-encoding",
    "expect",
    "upgrade",
];
/// Headers that are new with every request and therefore never a session.
const PER_REQUEST_HEADERS: [&str; 8] = [
    "x-request-id",
    "request-id",
    "x-correlation-id",
    "x-trace-id",
    "traceparent",
    "x-b3-traceid",
    "x-amzn-trace-id",
    "x-cloud-trace-context",
];

/// Names of the presets, as [`Preset::from_name`] knows them.
const PRESETS: [&str; 5] = ["vllm", "sglang", "tensorrt_llm", "tgi", "llama_cpp"];
const SESSION_MODES: [SessionMode; 4] = [
    SessionMode::Off,
    SessionMode::Fallback,
    SessionMode::Replace,
    SessionMode::Extend,
];
const ROLES: [(&str, Role); 3] = [
    ("both", Role::Both),
    ("prefill", Role::Prefill),
    ("decode", Role::Decode),
];
