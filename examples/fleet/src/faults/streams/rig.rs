//! The Envoy and the upstreams that exchanges are played on, and the comparison of what was seen.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::http1::{self, Do};
use super::http2::{self, Do2};
use super::http2_upstream::Http2Upstream;
use super::upstream::{Notes, Upstream};
use crate::envoy_config::{EnvoyConfig, PoolConfig, RouteConfig};
use crate::faults::stand::{POOL, eventually};
use crate::faults::{FaultError, Gateway, Seen, Stand};
use crate::odd::free_port;

/// A running Envoy before upstreams that play.
pub(super) struct Rig {
    pub(super) gateway: Gateway,
    notes: Arc<Notes>,
    address: SocketAddr,
    _upstreams: Vec<Upstream>,
    _http2_upstream: Http2Upstream,
}

/// One exchange.
#[derive(Debug, Clone)]
pub(super) struct Exchange {
    /// What is odd about it.
    pub(super) what: String,
    /// What must be seen on both sides, or it is not what it says.
    pub(super) expects: &'static str,
    pub(super) steps: Steps,
}

/// What its client does.
#[derive(Debug, Clone)]
pub(super) enum Steps {
    Http1(Vec<Do>),
    Http2(Vec<Do2>),
}

/// What was seen of an exchange.
#[derive(Debug, Clone)]
pub(super) struct Outcome {
    pub(super) seen: Vec<String>,
    pub(super) at: Duration,
    pub(super) took: Duration,
    /// Whether Envoy lost it by its own fault, so that it says nothing of either side.
    pub(super) is_lost: bool,
}

impl Exchange {
    /// Whether it neither waits for long nor moves megabytes.
    pub(super) fn is_brisk(&self) -> bool {
        let (mut waits, mut bytes) = (Duration::ZERO, 0);
        match &self.steps {
            Steps::Http1(steps) => {
                for step in steps {
                    match step {
                        Do::Pause(time) => waits += *time,
                        Do::Send(sent) => bytes += sent.len(),
                        _ => {}
                    }
                }
            }
            Steps::Http2(steps) => {
                for step in steps {
                    match step {
                        Do2::Pause(time) => waits += *time,
                        Do2::Data(sent) => bytes += sent.len(),
                        _ => {}
                    }
                }
            }
        }
        waits < Duration::from_millis(600) && bytes < 1 << 20
    }
}

impl Rig {
    /// Starts them, with these changes to Envoy's config.
    pub(super) async fn start(
        stand: &Stand,
        change: impl FnOnce(&mut EnvoyConfig),
    ) -> Result<Self, FaultError> {
        let notes = Arc::new(Notes::default());
        let upstreams = vec![
            Upstream::start(&notes).await?,
            Upstream::start(&notes).await?,
            Upstream::closing().await?,
        ];
        let http2_upstream = Http2Upstream::start(&notes).await?;
        let [one, two, closing] = [0, 1, 2].map(|at: usize| upstreams[at].address);
        let nobody = SocketAddr::from(([127, 0, 0, 1], free_port()?));
        let http1 = |cluster: &str, endpoints: &[SocketAddr]| PoolConfig {
            // By default no more than three may be retried at once.
            extra: json!({"circuit_breakers": {"thresholds": [{
                "max_connections": 8192, "max_pending_requests": 8192, "max_requests": 8192, "max_retries": 8192,
            }]}}),
            ..PoolConfig::new(cluster, endpoints.to_vec())
        };
        let mut pools = vec![
            http1(POOL, &[one, two]),
            PoolConfig::new("http2", vec![http2_upstream.address]),
            http1("half-dead", &[nobody, one]),
            http1("half-closing", &[closing, one]),
            http1("dead", &[nobody]),
            http1("closing", &[closing]),
        ];
        pools[1].http2 = true;
        let mut settings = stand.settings();
        settings["metrics"] = json!({"enabled": false});
        for pool in &pools {
            settings["pools"][&pool.cluster] = json!({});
        }
        let mut config = stand.config(pools[0].clone(), &settings);
        let shipped = config.routes[0].clone();
        config.routes = routes(&shipped, &pools[1..]);
        config.pools = pools;
        config.http1_trailers = true;
        config.request_body_buffer_limit_bytes = Some(32 << 20);
        config.extra_manager = manager();
        config.extra_routes = vec![connect_route()];
        change(&mut config);
        let gateway = stand.start(&config, 2).await?;
        if stand.is_filtered() {
            gateway.shows("warmroute_hosts", 2).await?;
        }
        let address = gateway.process.listener(crate::envoy_config::LISTENER);
        Ok(Self {
            address: address.ok_or_else(|| FaultError::Never("a listener".to_owned()))?,
            gateway,
            notes,
            _upstreams: upstreams,
            _http2_upstream: http2_upstream,
        })
    }

    /// Whether Envoy's log has this text.
    pub(super) fn has_logged(&self, text: &str) -> bool {
        self.gateway.process.log().contains(text)
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Plays exchanges, so many at a time; they have the numbers from `first` on.
    pub(super) async fn play(&self, exchanges: &[Exchange], first: u64, at_a_time: usize) -> Vec<Outcome> {
        let start = Instant::now();
        let next = std::cell::Cell::new(0);
        let outcomes = std::cell::RefCell::new(vec![None; exchanges.len()]);
        let worker = || async {
            while let Some(exchange) = exchanges.get(next.get()) {
                let number = next.replace(next.get() + 1);
                let outcome = self.play_one(exchange, first + number as u64, start).await;
                outcomes.borrow_mut()[number] = Some(outcome);
            }
        };
        all((0..at_a_time).map(|_| worker()).collect()).await;
        outcomes.into_inner().into_iter().flatten().collect()
    }

    async fn play_one(&self, exchange: &Exchange, id: u64, start: Instant) -> Outcome {
        let at = start.elapsed();
        let play = async {
            match &exchange.steps {
                Steps::Http1(steps) => http1::play(self, id, &numbered(steps, id)).await,
                Steps::Http2(steps) => http2::play(self, id, steps).await,
            }
        };
        let seen = tokio::time::timeout(HANGS, play).await;
        Outcome {
            seen: seen.unwrap_or_else(|_| vec!["hung".to_owned()]),
            at,
            took: start.elapsed() - at,
            is_lost: false,
        }
    }

    /// Waits until an upstream works on an exchange, or long enough to know that none will.
    pub(super) async fn has_come(&self, id: u64) {
        let start = Instant::now();
        while self.notes.of(id).0 == 0 && start.elapsed() < COMES {
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Waits until an upstream works on an exchange, as one will.
    pub(super) async fn reached(&self, id: u64) -> String {
        let start = Instant::now();
        while self.notes.of(id).0 == 0 {
            if start.elapsed() > RESTS {
                return "no upstream was reached".to_owned();
            }
            tokio::time::sleep(PAUSE).await;
        }
        "an upstream was reached".to_owned()
    }

    /// Waits until no upstream works on an exchange any more.
    pub(super) async fn rests(&self, id: u64) -> String {
        let start = Instant::now();
        while self.notes.of(id).1 > 0 {
            if start.elapsed() > RESTS {
                return "an upstream works on".to_owned();
            }
            tokio::time::sleep(PAUSE).await;
        }
        "at rest".to_owned()
    }

    /// Notes what must hold when all exchanges are over: nothing is in flight, and the filter did take part.
    pub(super) async fn check_rest(&self, stand: &Stand, seen: &mut Seen) -> Result<(), FaultError> {
        if !stand.is_filtered() {
            return Ok(());
        }
        let is_idle = eventually("no tally is left", async || {
            let stats = self.gateway.stats().await?;
            let mut tallies = stats
                .iter()
                .filter(|(name, _)| TALLIES.iter().any(|tally| name.starts_with(tally)));
            Ok(tallies.all(|(_, value)| *value == 0))
        });
        seen.check(
            is_idle.await.is_ok(),
            "tallies are left when nothing is in flight",
        );
        let has_decided = eventually("the filter decided", async || {
            let stats = self.gateway.stats().await?;
            Ok(stats
                .iter()
                .any(|(name, value)| name.starts_with("warmroute_decisions_total") && *value > 0))
        });
        seen.check(has_decided.await.is_ok(), "the filter decided nothing");
        Ok(())
    }
}

/// Waits for all of them at once.
async fn all(futures: Vec<impl Future<Output = ()>>) {
    let mut futures: Vec<_> = futures.into_iter().map(|future| Some(Box::pin(future))).collect();
    std::future::poll_fn(|context| {
        for slot in &mut futures {
            let is_over = slot
                .as_mut()
                .is_some_and(|future| future.as_mut().poll(context).is_ready());
            if is_over {
                *slot = None;
            }
        }
        if futures.iter().all(Option::is_none) {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
}

/// The steps with the exchange's number in the place of `@ID@`.
fn numbered(steps: &[Do], id: u64) -> Vec<Do> {
    let number = |step: &Do| match step {
        Do::Send(bytes) if bytes.len() < 64 << 10 => {
            let text = bytes.windows(MARK.len()).position(|window| window == MARK);
            let Some(at) = text else {
                return step.clone();
            };
            let mut numbered = bytes[..at].to_vec();
            numbered.extend_from_slice(id.to_string().as_bytes());
            numbered.extend_from_slice(&bytes[at + MARK.len()..]);
            Do::Send(numbered.into())
        }
        step => step.clone(),
    };
    steps.iter().map(number).collect()
}

/// A route for each value of `x-route`, then the shipped one.
fn routes(shipped: &RouteConfig, pools: &[PoolConfig]) -> Vec<RouteConfig> {
    let by_header = |name: &str, mut route: RouteConfig| {
        route.header = Some(("x-route".to_owned(), name.to_owned()));
        route
    };
    let with = |name: &str, extra: Value| {
        let mut route = RouteConfig::to(POOL);
        route.retries = 0;
        route.extra = extra;
        by_header(name, route)
    };
    let mut routes: Vec<RouteConfig> = pools
        .iter()
        .map(|pool| {
            let mut route = shipped.clone();
            route.clusters = vec![(pool.cluster.clone(), 1)];
            if pool.cluster == "half-closing" {
                // As shipped, a request that was begun on a connection that closes is not sent again: on either side it
                // would be a matter of luck which host it is sent to first.
                route.extra = retry_reset();
            }
            by_header(&pool.cluster, route)
        })
        .collect();
    routes.push(with("no-retry", json!({})));
    routes.push(with("retry-reset", retry_reset()));
    routes.push(with(
        "per-try",
        json!({"retry_policy": {"retry_on": "5xx", "num_retries": 2, "per_try_timeout": "0.4s"}}),
    ));
    routes.push(with(
        "hedge",
        json!({
            "retry_policy": {"retry_on": "5xx", "num_retries": 2, "per_try_timeout": "0.4s"},
            "hedge_policy": {"hedge_on_per_try_timeout": true},
        }),
    ));
    routes.push(with("timeout", json!({"timeout": "0.8s"})));
    routes.push(with("idle", json!({"idle_timeout": "0.8s"})));
    routes.push(shipped.clone());
    routes
}

fn retry_reset() -> Value {
    json!({"retry_policy": {"retry_on": "reset,5xx", "num_retries": 3}})
}

fn connect_route() -> Value {
    json!({
        "match": {"connect_matcher": {}},
        "route": {
            "cluster": POOL,
            "timeout": "0s",
            "upgrade_configs": [{"upgrade_type": "CONNECT", "connect_config": {}}],
        },
    })
}

/// Everything let in that Envoy can be made to let in.
fn manager() -> Value {
    json!({
        "http_protocol_options": {
            "enable_trailers": true, "accept_http_10": true, "default_host_for_http_10": "test",
        },
        "http2_protocol_options": {"allow_connect": true},
        "upgrade_configs": [{"upgrade_type": "websocket"}, {"upgrade_type": "CONNECT"}],
        "stream_idle_timeout": "0s",
    })
}

/// Stands in a head for the exchange's number.
const MARK: &[u8] = b"@ID@";
/// Gauges that are 0 when nothing is in flight.
const TALLIES: [&str; 2] = [
    "warmroute_requests_in_flight",
    "warmroute_prefill_tokens_in_flight",
];
/// Longer than any exchange takes.
const HANGS: Duration = Duration::from_secs(15);
/// By then Envoy has passed on what it will pass on before more comes.
const COMES: Duration = Duration::from_millis(400);
/// By then Envoy has told an upstream of a request or an abort.
const RESTS: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(5);
