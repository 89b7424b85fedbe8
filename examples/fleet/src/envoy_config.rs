//! What an Envoy should do → its bootstrap config, as JSON (which Envoy reads as the YAML it is a subset of).
//!
//! The defaults are the shape that Warmroute ships: guard, filter with its flag, steering by `override_host`, `x-served-by`,
//! a cluster for the admin interface, the companion as a bootstrap service. Every knob is a public field, and
//! [`EnvoyConfig::bootstrap`] gives the tree for whatever a knob does not reach.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::envoy::ADMIN_PORT_PLACEHOLDER;

/// Name of the listener that clients use.
pub const LISTENER: &str = "llm";
/// Name of the cluster behind which Envoy's admin interface is.
pub const ADMIN_CLUSTER: &str = "admin";
/// Request header that names the hosts to try, best first.
pub const STEERING_HEADER: &str = "x-gateway-destination-endpoint";

/// A whole Envoy.
#[derive(Debug, Clone)]
pub struct EnvoyConfig {
    /// The filter; without it this is a plain Envoy that balances by `least_request`.
    pub plugin: Option<PluginConfig>,
    /// Clusters of replicas.
    pub pools: Vec<PoolConfig>,
    /// Routes in order; when empty, everything goes to the first pool.
    pub routes: Vec<RouteConfig>,
    /// Whether a `header_mutation` filter in front removes the steering header that a client sent.
    pub guard: bool,
    /// Filters between guard and Warmroute, as Envoy configs.
    pub filters_before: Vec<Value>,
    /// Filters between Warmroute and router, as Envoy configs.
    pub filters_after: Vec<Value>,
    /// `request_body_buffer_limit` of the virtual host: what counts from Envoy 1.37 on.
    pub request_body_buffer_limit_bytes: Option<u64>,
    /// `per_connection_buffer_limit_bytes` of the listener: what counts on 1.36.
    pub connection_buffer_limit_bytes: Option<u64>,
    /// Whether HTTP/1.1 trailers are let through.
    pub http1_trailers: bool,
    /// Port of the listener on 127.0.0.1; 0 for an ephemeral one.
    pub listener_port: u16,
    /// Port of the admin interface; `None` for a free one.
    pub admin_port: Option<u16>,
    /// File that holds the listeners ([`EnvoyConfig::listeners_file`]); `None` to put them into the bootstrap.
    pub lds_path: Option<PathBuf>,
    /// More clusters, as Envoy configs.
    pub extra_clusters: Vec<Value>,
    /// Routes before all others, as Envoy configs.
    pub extra_routes: Vec<Value>,
    /// Fields to set in the connection manager, such as `request_timeout`.
    pub extra_manager: Value,
    /// Fields to set at the top of the bootstrap, such as `stats_config`.
    pub extra: Value,
}

impl EnvoyConfig {
    /// One pool behind the filter, as shipped.
    pub fn new(plugin: PluginConfig, pool: PoolConfig) -> Self {
        Self {
            plugin: Some(plugin),
            ..Self::plain(pool)
        }
    }

    /// One pool without the filter.
    pub fn plain(pool: PoolConfig) -> Self {
        Self {
            plugin: None,
            pools: vec![pool],
            routes: Vec::new(),
            guard: true,
            filters_before: Vec::new(),
            filters_after: Vec::new(),
            request_body_buffer_limit_bytes: Some(4 << 20),
            connection_buffer_limit_bytes: Some(16 << 20),
            http1_trailers: false,
            listener_port: 0,
            admin_port: None,
            lds_path: None,
            extra_clusters: Vec::new(),
            extra_routes: Vec::new(),
            extra_manager: Value::Null,
            extra: Value::Null,
        }
    }

    /// The bootstrap config as text.
    pub fn render(&self) -> String {
        pretty(&self.bootstrap())
    }

    /// The bootstrap config as a tree.
    pub fn bootstrap(&self) -> Value {
        let admin_port = self
            .admin_port
            .map_or_else(|| json!(ADMIN_PORT_PLACEHOLDER), |port| json!(port));
        let admin = json!({"socket_address": {"address": "127.0.0.1", "port_value": admin_port}});
        let mut clusters = vec![cluster(
            ADMIN_CLUSTER,
            json!("STATIC"),
            &assignment_of(ADMIN_CLUSTER, &[&admin]),
        )];
        clusters.extend(self.pools.iter().map(PoolConfig::cluster));
        clusters.extend(self.extra_clusters.iter().cloned());
        let mut bootstrap = json!({
            "node": {"id": "warmroute", "cluster": "warmroute"},
            "admin": {"address": admin},
            "static_resources": {"clusters": clusters},
        });
        match &self.lds_path {
            Some(path) => {
                let source = json!({"path_config_source": {"path": path}, "resource_api_version": "V3"});
                bootstrap["dynamic_resources"] = json!({"lds_config": source});
            }
            None => bootstrap["static_resources"]["listeners"] = json!([self.listener()]),
        }
        let service = self.plugin.as_ref().filter(|plugin| plugin.service);
        if let Some(plugin) = service {
            bootstrap["bootstrap_extensions"] = json!([plugin.bootstrap_service()]);
        }
        set_fields(&mut bootstrap, &self.extra);
        bootstrap
    }

    /// The content of the file at [`EnvoyConfig::lds_path`]; replace it with
    /// [`write_atomically`](crate::envoy::write_atomically) to push a new config.
    pub fn listeners_file(&self) -> String {
        let mut listener = self.listener();
        listener["@type"] = json!("type.googleapis.com/envoy.config.listener.v3.Listener");
        pretty(&json!({"resources": [listener]}))
    }

    /// The listener as a tree.
    pub fn listener(&self) -> Value {
        let mut manager = json!({
            "@type": hcm("HttpConnectionManager"),
            "stat_prefix": LISTENER,
            "http_protocol_options": {"enable_trailers": self.http1_trailers},
            "route_config": {"name": LISTENER, "virtual_hosts": [self.virtual_host()]},
            "http_filters": self.http_filters(),
        });
        set_fields(&mut manager, &self.extra_manager);
        let filter =
            json!({"name": "envoy.filters.network.http_connection_manager", "typed_config": manager});
        let mut listener = json!({
            "name": LISTENER,
            "address": {"socket_address": {"address": "127.0.0.1", "port_value": self.listener_port}},
            "filter_chains": [{"filters": [filter]}],
        });
        if let Some(limit_bytes) = self.connection_buffer_limit_bytes {
            listener["per_connection_buffer_limit_bytes"] = json!(limit_bytes);
        }
        listener
    }

    fn virtual_host(&self) -> Value {
        let mut routes = self.extra_routes.clone();
        routes.extend(self.routes.iter().map(RouteConfig::to_json));
        if let (true, Some(pool)) = (self.routes.is_empty(), self.pools.first()) {
            routes.push(RouteConfig::to(&pool.cluster).to_json());
        }
        let mut host = json!({"name": LISTENER, "domains": ["*"], "routes": routes});
        if let Some(limit_bytes) = self.request_body_buffer_limit_bytes {
            // A 64-bit field of a protobuf message: a string in its JSON form.
            host["request_body_buffer_limit"] = json!(limit_bytes.to_string());
        }
        host
    }

    fn http_filters(&self) -> Vec<Value> {
        let mut filters = Vec::new();
        if self.guard {
            let mutations = json!({"request_mutations": [{"remove": STEERING_HEADER}]});
            filters.push(named_filter(
                "guard",
                "header_mutation",
                "HeaderMutation",
                json!({"mutations": mutations}),
            ));
        }
        filters.extend(self.filters_before.iter().cloned());
        filters.extend(self.plugin.as_ref().map(PluginConfig::http_filter));
        filters.extend(self.filters_after.iter().cloned());
        filters.push(named_filter(
            "envoy.filters.http.router",
            "router",
            "Router",
            json!({}),
        ));
        filters
    }
}

/// The Wasm filter and its companion.
#[derive(Debug, Clone)]
pub struct PluginConfig {
    /// The module.
    pub wasm: PathBuf,
    /// The plugin's config, the same text for filter and service.
    pub json: String,
    /// Another text for the service.
    pub service_json: Option<String>,
    /// Another module for the service.
    pub service_wasm: Option<PathBuf>,
    /// Whether the companion runs as a bootstrap service.
    pub service: bool,
    /// Whether the filter may pause at the headers and go on reading the body.
    pub allow_on_headers_stop_iteration: bool,
    /// Legacy `fail_open`.
    pub fail_open: bool,
    /// `failure_policy`, such as `FAIL_RELOAD`; excludes `fail_open`.
    pub failure_policy: Option<String>,
    /// Who shares data with whom.
    pub vm_id: String,
}

impl PluginConfig {
    /// The module with its config and the flags as shipped.
    pub fn new(wasm: PathBuf, json: impl Into<String>) -> Self {
        Self {
            wasm,
            json: json.into(),
            service_json: None,
            service_wasm: None,
            service: true,
            allow_on_headers_stop_iteration: true,
            fail_open: true,
            failure_policy: None,
            vm_id: "warmroute".to_owned(),
        }
    }

    /// The HTTP filter as an Envoy config.
    pub fn http_filter(&self) -> Value {
        let mut config = json!({
            "name": "warmroute",
            "root_id": "warmroute",
            "allow_on_headers_stop_iteration": self.allow_on_headers_stop_iteration,
            "configuration": string_value(&self.json),
            "vm_config": self.vm(&self.wasm),
        });
        match &self.failure_policy {
            Some(policy) => config["failure_policy"] = json!(policy),
            None => config["fail_open"] = json!(self.fail_open),
        }
        named_filter("warmroute", "wasm", "Wasm", json!({"config": config}))
    }

    fn bootstrap_service(&self) -> Value {
        let mut vm = self.vm(self.service_wasm.as_ref().unwrap_or(&self.wasm));
        // Without a difference here it would share a VM with the filter's context on the main thread.
        vm["configuration"] = string_value("service");
        let config = json!({
            "name": "warmroute_service",
            "root_id": "warmroute_service",
            "configuration": string_value(self.service_json.as_ref().unwrap_or(&self.json)),
            "vm_config": vm,
        });
        let service = json!({
            "@type": "type.googleapis.com/envoy.extensions.wasm.v3.WasmService",
            "singleton": true,
            "config": config,
        });
        json!({"name": "envoy.bootstrap.wasm", "typed_config": service})
    }

    fn vm(&self, wasm: &Path) -> Value {
        let code = json!({"local": {"filename": wasm}});
        json!({"vm_id": self.vm_id, "runtime": "envoy.wasm.runtime.v8", "code": code})
    }
}

/// An endpoint as its discovery tells of it.
#[derive(Debug, Clone, Copy)]
pub struct ToldEndpoint {
    /// Where it is.
    pub address: SocketAddr,
    /// Envoy's name of its health status, such as `HEALTHY` or `DRAINING`.
    pub health: &'static str,
    /// Its priority.
    pub priority: u32,
}

impl ToldEndpoint {
    /// A healthy one of the highest priority.
    pub const fn healthy(address: SocketAddr) -> Self {
        Self {
            address,
            health: "HEALTHY",
            priority: 0,
        }
    }
}

/// A cluster of replicas.
#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// Name of the cluster.
    pub cluster: String,
    /// Its endpoints.
    pub endpoints: Vec<SocketAddr>,
    /// Whether the steering header chooses the host, with `least_request` where it does not.
    pub override_host: bool,
    /// Whether `x-served-by` names the host that answered and the steering header is kept from it.
    pub upstream_filters: bool,
    /// Whether to speak HTTP/2 to the endpoints.
    pub http2: bool,
    /// File that holds the endpoints ([`PoolConfig::endpoints_file`]); `None` to put them into the cluster.
    pub eds_path: Option<PathBuf>,
    /// Fields to set in the cluster, such as health checks.
    pub extra: Value,
}

impl PoolConfig {
    /// A pool as shipped.
    pub fn new(cluster: impl Into<String>, endpoints: Vec<SocketAddr>) -> Self {
        Self {
            cluster: cluster.into(),
            endpoints,
            override_host: true,
            upstream_filters: true,
            http2: false,
            eds_path: None,
            extra: Value::Null,
        }
    }

    /// The content of the file at [`PoolConfig::eds_path`] for these endpoints.
    pub fn endpoints_file(&self, endpoints: &[SocketAddr]) -> String {
        let told: Vec<ToldEndpoint> = endpoints.iter().copied().map(ToldEndpoint::healthy).collect();
        self.told_endpoints_file(&told)
    }

    /// The same with health and priority.
    pub fn told_endpoints_file(&self, endpoints: &[ToldEndpoint]) -> String {
        let mut levels: BTreeMap<u32, Vec<Value>> = BTreeMap::new();
        for told in endpoints {
            let endpoint =
                json!({"endpoint": {"address": socket(told.address)}, "health_status": told.health});
            levels.entry(told.priority).or_default().push(endpoint);
        }
        let levels: Vec<Value> = levels
            .into_iter()
            .map(|(priority, endpoints)| json!({"priority": priority, "lb_endpoints": endpoints}))
            .collect();
        let mut assignment = json!({"cluster_name": self.cluster, "endpoints": levels});
        assignment["@type"] = json!("type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment");
        pretty(&json!({"resources": [assignment]}))
    }

    fn cluster(&self) -> Value {
        let mut cluster = cluster(
            &self.cluster,
            json!("STATIC"),
            &assignment(&self.cluster, &self.endpoints),
        );
        if let Some(path) = &self.eds_path {
            let source = json!({"path_config_source": {"path": path}, "resource_api_version": "V3"});
            cluster["type"] = json!("EDS");
            cluster["eds_cluster_config"] = json!({"eds_config": source});
            cluster
                .as_object_mut()
                .map(|fields| fields.remove("load_assignment"));
        }
        let fallback = policy("least_request", "LeastRequest", json!({}));
        let policies = if self.override_host {
            let sources = json!([{"header": STEERING_HEADER}]);
            let config =
                json!({"override_host_sources": sources, "fallback_policy": {"policies": [fallback]}});
            policy("override_host", "OverrideHost", config)
        } else {
            fallback
        };
        cluster["load_balancing_policy"] = json!({"policies": [policies]});
        cluster["typed_extension_protocol_options"] = json!({PROTOCOL_OPTIONS: self.protocol_options()});
        // A saturated replica should show as waiting, not as errors of a circuit breaker.
        let limits = json!({"max_connections": 8192, "max_pending_requests": 8192, "max_requests": 8192});
        cluster["circuit_breakers"] = json!({"thresholds": [limits]});
        set_fields(&mut cluster, &self.extra);
        cluster
    }

    fn protocol_options(&self) -> Value {
        let protocol = if self.http2 {
            "http2_protocol_options"
        } else {
            "http_protocol_options"
        };
        let mut options = json!({
            "@type": format!("type.googleapis.com/{PROTOCOL_OPTIONS}"),
            "explicit_http_config": {protocol: {}},
        });
        if self.upstream_filters {
            let served_by = json!({
                "header": {"key": "x-served-by", "value": "%UPSTREAM_REMOTE_ADDRESS%"},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            });
            let mutations = json!({
                "request_mutations": [{"remove": STEERING_HEADER}],
                "response_mutations": [{"append": served_by}],
            });
            let mutation = json!({"mutations": mutations});
            options["http_filters"] = json!([
                named_filter(
                    "envoy.filters.http.header_mutation",
                    "header_mutation",
                    "HeaderMutation",
                    mutation
                ),
                named_filter(
                    "envoy.filters.http.upstream_codec",
                    "upstream_codec",
                    "UpstreamCodec",
                    json!({})
                ),
            ]);
        }
        options
    }
}

/// A route.
#[derive(Debug, Clone)]
pub struct RouteConfig {
    /// Path prefix that it takes.
    pub prefix: String,
    /// Header and exact value that it asks for.
    pub header: Option<(String, String)>,
    /// Clusters with their weights.
    pub clusters: Vec<(String, u32)>,
    /// How often to retry, on the next host of the steering header.
    pub retries: u32,
    /// `retry_on`.
    pub retry_on: String,
    /// Fields to set in the route action.
    pub extra: Value,
}

impl RouteConfig {
    /// Everything to one cluster, with retries and timeout as shipped.
    pub fn to(cluster: &str) -> Self {
        Self {
            prefix: "/".to_owned(),
            header: None,
            clusters: vec![(cluster.to_owned(), 1)],
            retries: 2,
            retry_on: "connect-failure,refused-stream,reset".to_owned(),
            extra: Value::Null,
        }
    }

    fn to_json(&self) -> Value {
        let mut matched = json!({"prefix": self.prefix});
        if let Some((name, value)) = &self.header {
            matched["headers"] = json!([{"name": name, "string_match": {"exact": value}}]);
        }
        let mut action = json!({"timeout": "0s"});
        if self.retries > 0 {
            action["retry_policy"] = json!({"retry_on": self.retry_on, "num_retries": self.retries});
        }
        if let [(cluster, _)] = self.clusters.as_slice() {
            action["cluster"] = json!(cluster);
        } else {
            let weighted = |(name, weight): &(String, u32)| json!({"name": name, "weight": weight});
            let clusters: Vec<Value> = self.clusters.iter().map(weighted).collect();
            action["weighted_clusters"] = json!({"clusters": clusters});
        }
        set_fields(&mut action, &self.extra);
        json!({"match": matched, "route": action})
    }
}

/// An HTTP filter of Envoy's own: `kind` as in its package, `message` its config's name.
pub fn named_filter(name: &str, kind: &str, message: &str, config: Value) -> Value {
    let type_url = format!("type.googleapis.com/envoy.extensions.filters.http.{kind}.v3.{message}");
    json!({"name": name, "typed_config": with_type(config, &type_url)})
}

fn policy(kind: &str, message: &str, config: Value) -> Value {
    let type_url =
        format!("type.googleapis.com/envoy.extensions.load_balancing_policies.{kind}.v3.{message}");
    let name = format!("envoy.load_balancing_policies.{kind}");
    json!({"typed_extension_config": {"name": name, "typed_config": with_type(config, &type_url)}})
}

fn cluster(name: &str, kind: Value, load_assignment: &Value) -> Value {
    json!({"name": name, "type": kind, "connect_timeout": "1s", "load_assignment": load_assignment})
}

fn assignment(cluster: &str, endpoints: &[SocketAddr]) -> Value {
    let addresses: Vec<Value> = endpoints.iter().copied().map(socket).collect();
    assignment_of(cluster, &addresses.iter().collect::<Vec<_>>())
}

fn socket(address: SocketAddr) -> Value {
    json!({"socket_address": {"address": address.ip(), "port_value": address.port()}})
}

fn assignment_of(cluster: &str, addresses: &[&Value]) -> Value {
    let endpoints: Vec<Value> = addresses
        .iter()
        .map(|address| json!({"endpoint": {"address": address}}))
        .collect();
    json!({"cluster_name": cluster, "endpoints": [{"lb_endpoints": endpoints}]})
}

fn set_fields(object: &mut Value, fields: &Value) {
    if let (Some(object), Some(fields)) = (object.as_object_mut(), fields.as_object()) {
        object.extend(fields.clone());
    }
}

fn with_type(mut config: Value, type_url: &str) -> Value {
    config["@type"] = json!(type_url);
    config
}

fn string_value(text: &str) -> Value {
    json!({"@type": "type.googleapis.com/google.protobuf.StringValue", "value": text})
}

fn hcm(message: &str) -> String {
    format!("type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.{message}")
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

const PROTOCOL_OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_shape_has_guard_filter_router_in_that_order() {
        let pool = PoolConfig::new("llm", vec!["127.0.0.1:1".parse().unwrap()]);
        let config = EnvoyConfig::new(PluginConfig::new("/x.wasm".into(), "{}"), pool);
        let names: Vec<_> = config
            .http_filters()
            .iter()
            .map(|filter| filter["name"].clone())
            .collect();
        assert_eq!(names, ["guard", "warmroute", "envoy.filters.http.router"]);
        let bootstrap = config.bootstrap();
        let service = &bootstrap["bootstrap_extensions"][0]["typed_config"]["config"]["vm_config"];
        assert_eq!(service["configuration"]["value"], "service");
    }

    #[test]
    fn knobs_reach_the_config() {
        let pool = |name: &str| PoolConfig::new(name, vec!["127.0.0.1:1".parse().unwrap()]);
        let mut plugin = PluginConfig::new("/x.wasm".into(), "{}");
        plugin.allow_on_headers_stop_iteration = false;
        plugin.service = false;
        plugin.failure_policy = Some("FAIL_RELOAD".to_owned());
        let mut config = EnvoyConfig::new(plugin, pool("a"));
        config.pools.push(pool("b"));
        let clusters = vec![("a".to_owned(), 3), ("b".to_owned(), 1)];
        config.routes = vec![RouteConfig {
            clusters,
            ..RouteConfig::to("a")
        }];
        config.request_body_buffer_limit_bytes = None;
        let bootstrap = config.bootstrap();
        assert!(bootstrap.get("bootstrap_extensions").is_none());
        let host = config.virtual_host();
        assert_eq!(
            host["routes"][0]["route"]["weighted_clusters"]["clusters"][1]["name"],
            "b"
        );
        assert!(host.get("request_body_buffer_limit").is_none());
        let filter = &config.http_filters()[1]["typed_config"]["config"];
        assert_eq!(filter["allow_on_headers_stop_iteration"], false);
        assert!(filter.get("fail_open").is_none());
    }
}
