//! A thousand endpoints: each an address of the loopback network with one small server behind all of them.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::{FaultError, Load, LoadPlan, PART, POOL, PoolConfig, Scenario, Seen, Stand, eventually};
use crate::engine::EngineCounters;
use crate::faults::stand::SCRAPES_OK;
use crate::metrics_text::MetricsView;

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![Scenario::new(PART, "1 000 of them", |stand| {
        Box::pin(thousand(stand))
    })]
}

async fn thousand(stand: &Stand) -> Result<Seen, FaultError> {
    let crowd = Crowd::start(HOSTS).await?;
    let pool = PoolConfig::new(POOL, crowd.addresses.clone());
    let mut settings = stand.settings();
    // Four times as often as shipped, so that a discovery that keeps Envoy's main thread for long shows.
    settings["discovery"]["interval_ms"] = json!(DISCOVERY.as_millis());
    let mut config = stand.config(pool, &settings);
    config.extra = json!({"enable_dispatcher_stats": true, "stats_flush_interval": "1s"});
    let gateway = stand.start(&config, 2).await?;
    if stand.is_filtered() {
        gateway.shows("warmroute_hosts", HOSTS as u64).await?;
        // Once round, so that what is measured is the steady state.
        eventually("every host is scraped", async || {
            Ok(gateway.stat(SCRAPES_OK).await? >= HOSTS as u64)
        })
        .await?;
    }
    let before = Loops::read(&gateway).await?;
    let scraped = crowd.served.scrapes.load(Ordering::Relaxed);
    let plan = LoadPlan {
        per_second: 200,
        ..LoadPlan::default()
    };
    let load = Load::start(&gateway, plan);
    tokio::time::sleep(LASTING).await;
    let scraped = crowd.served.scrapes.load(Ordering::Relaxed) - scraped;
    let mut seen = Seen::of(load.stop().await);
    let loops = Loops::read(&gateway).await?.since(&before);
    let mut took: Vec<Duration> = seen.sent.iter().map(|sent| sent.took).collect();
    took.sort_unstable();
    let late = took.get(took.len() * 99 / 100).copied().unwrap_or_default();
    if stand.is_filtered() {
        seen.note = format!("{scraped} scrapes; ");
    }
    seen.note += &format!(
        "{} of {} rounds of the workers and {} of {} of the main thread took more than 10 ms; 99 of 100 requests within {} ms",
        loops.workers.1,
        loops.workers.0,
        loops.main.1,
        loops.main.0,
        late.as_millis()
    );
    if stand.is_filtered() {
        seen.check(scraped > u64::from(HOSTS), format!("only {scraped} scrapes"));
        seen.check(
            loops.workers.1 * NOISE <= loops.workers.0,
            format!(
                "{} of {} rounds of the workers took more than 10 ms",
                loops.workers.1, loops.workers.0
            ),
        );
        let discoveries = (LASTING.as_millis() / DISCOVERY.as_millis()) as u64;
        seen.check(
            loops.main.1 * 2 < discoveries,
            format!(
                "{} rounds of the main thread took more than 10 ms in the time of {discoveries} discoveries",
                loops.main.1
            ),
        );
    }
    Ok(seen)
}

/// Rounds of the event loops of Envoy's threads: all, and those that took more than 10 ms.
#[derive(Debug, Clone, Copy, Default)]
struct Loops {
    workers: (u64, u64),
    main: (u64, u64),
}

impl Loops {
    async fn read(gateway: &super::Gateway) -> Result<Self, FaultError> {
        // Envoy shows a histogram as it was when it last flushed.
        tokio::time::sleep(2 * FLUSH).await;
        let text = gateway
            .process
            .admin_get("/stats/prometheus?filter=loop_duration_us")
            .await?
            .text();
        let mut loops = Self::default();
        for line in text.lines() {
            let Some((name, value)) = line.rsplit_once(' ') else {
                continue;
            };
            let value: u64 = value.parse().unwrap_or(0);
            let of = if name.contains("worker") {
                &mut loops.workers
            } else {
                &mut loops.main
            };
            if name.contains("_count") {
                of.0 += value;
            } else if name.contains("le=\"10000\"") {
                of.1 += value;
            }
        }
        for of in [&mut loops.workers, &mut loops.main] {
            of.1 = of.0.saturating_sub(of.1);
        }
        Ok(loops)
    }

    fn since(self, before: &Self) -> Self {
        let minus = |now: (u64, u64), then: (u64, u64)| (now.0 - then.0, now.1.saturating_sub(then.1));
        Self {
            workers: minus(self.workers, before.workers),
            main: minus(self.main, before.main),
        }
    }
}

/// Many addresses that answer alike.
struct Crowd {
    addresses: Vec<SocketAddr>,
    served: Arc<Served>,
    /// Ends with the crowd.
    _accepting: JoinSet<()>,
}

struct Served {
    metrics: Bytes,
    scrapes: AtomicU64,
}

impl Crowd {
    async fn start(hosts: u16) -> std::io::Result<Self> {
        let view = MetricsView {
            model: "sim",
            running: 0.0,
            waiting: 0.0,
            kv_usage: 0.0,
            cache_blocks: 4096,
            block_tokens: 16,
            counters: EngineCounters::default(),
            started_s: 1_790_000_000.0,
            adapters: &[],
        };
        let mut metrics = view.render();
        // As long as those of a real vLLM.
        while metrics.len() < METRICS_BYTES {
            metrics.push_str(
                "vllm:request_prefill_time_seconds_bucket{engine=\"0\",le=\"0.3\",model_name=\"sim\"} 0.0\n",
            );
        }
        let served = Arc::new(Served {
            metrics: metrics.into(),
            scrapes: AtomicU64::new(0),
        });
        let (mut addresses, mut accepting) = (Vec::new(), JoinSet::new());
        for number in 0..hosts {
            let [high, low] = number.to_be_bytes();
            let listener = TcpListener::bind((Ipv4Addr::new(127, 1, high, low.wrapping_add(1)), 0)).await?;
            addresses.push(listener.local_addr()?);
            accepting.spawn(accept(listener, Arc::clone(&served)));
        }
        Ok(Self {
            addresses,
            served,
            _accepting: accepting,
        })
    }
}

async fn accept(listener: TcpListener, served: Arc<Served>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        let served = Arc::clone(&served);
        connections.spawn(async move {
            let service = service_fn(move |request| answer(Arc::clone(&served), request));
            let _ = auto::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn answer(
    served: Arc<Served>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, hyper::Error> {
    if request.method() == Method::GET {
        served.scrapes.fetch_add(1, Ordering::Relaxed);
        return Ok(Response::new(Full::new(served.metrics.clone())));
    }
    let body = request.into_body().collect().await?.to_bytes();
    let wanted = b"\"stream\":true";
    let is_stream = body.windows(wanted.len()).any(|window| window == wanted);
    let text = if is_stream {
        "data: {}\n\ndata: [DONE]\n\n"
    } else {
        "{\"choices\":[]}"
    };
    let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
    if is_stream {
        let kind = hyper::header::HeaderValue::from_static("text/event-stream");
        response.headers_mut().insert(hyper::header::CONTENT_TYPE, kind);
    }
    Ok(response)
}

/// Of so many rounds one may take long because the machine has other things to do. Tables come twenty times a second, so
/// that one round in forty were late if workers were long at them.
const NOISE: u64 = 200;
const FLUSH: Duration = Duration::from_secs(1);
const HOSTS: u16 = 1000;
const LASTING: Duration = Duration::from_secs(6);
const DISCOVERY: Duration = Duration::from_millis(500);
/// What vLLM 0.32 shows after some traffic.
const METRICS_BYTES: usize = 58_000;
