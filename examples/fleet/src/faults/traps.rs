//! A VM that traps in each of its callbacks, under each failure policy, with streams in flight.
//!
//! The module works until so many requests came; then the callback traps wherever it is called next. One worker serves
//! everything, so every stream in flight is one of the VM that dies.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::HeaderMap;
use hyper::header::HeaderValue;
use serde_json::json;
use tokio::task::JoinHandle;

use super::load::{End, Sent, chat, exchange};
use super::stand::{CHAT, Gateway, Policy, Stand, eventually};
use super::{FaultError, Recovery, Scenario, Seen};
use crate::client::{Client, ClientError, pieces, post_request};
use crate::engine::EngineConfig;
use crate::envoy::{Folder, write_atomically};
use crate::envoy_config::EnvoyConfig;
use crate::fleet::Fleet;
use crate::patched::{Act, Counted, When, another_build, counted};

pub(super) fn scenarios() -> Vec<Scenario> {
    let scenario = |&callback: &Callback, policies| {
        let fault = format!("in {}", callback.export);
        Scenario::new(PART, fault, move |stand| Box::pin(trap(stand, callback))).under(policies)
    };
    let mut scenarios = Vec::new();
    for callback in CALLBACKS {
        if callback.is_short {
            scenarios.push(scenario(callback, &[Policy::Shipped]).in_short_form());
            scenarios.push(scenario(callback, OTHER_POLICIES));
        } else {
            scenarios.push(scenario(callback, Policy::ALL));
        }
    }
    scenarios
}

/// A callback that traps, and what makes Envoy call it.
#[derive(Debug, Clone, Copy)]
struct Callback {
    export: &'static str,
    is_called: Called,
    is_short: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Called {
    /// While requests come.
    AsRequestsCome,
    /// When a configuration arrives for the VM that serves.
    AtAPush,
    /// When a configuration arrives with another module.
    WithAnotherModule,
}

const fn by(export: &'static str, is_called: Called) -> Callback {
    Callback {
        export,
        is_called,
        is_short: false,
    }
}

const fn short(export: &'static str) -> Callback {
    Callback {
        is_short: true,
        ..by(export, Called::AsRequestsCome)
    }
}

/// What becomes of a stand in which a callback traps.
async fn trap(stand: &Stand, callback: Callback) -> Result<Seen, FaultError> {
    let trial = Trial::begin(stand, callback).await?;
    let streams = trial.open_streams().await?;
    let start = Instant::now();
    if callback.is_called != Called::AsRequestsCome {
        trial.push(&trial.trapping, 3001).await?;
    }
    let mut probes = Vec::new();
    let mut trapped = None;
    for number in 0..PROBES {
        let due = start + PAUSE * number;
        tokio::time::sleep_until(due.into()).await;
        let trapped_before = trapped.is_some();
        let probe = trial.probe(u64::from(number) + STREAMS, start).await;
        if !trapped_before && trial.has_trapped() {
            trapped = Some(probes.len());
        }
        probes.push(probe);
    }
    let mut sent = Vec::new();
    for stream in streams {
        let stream = stream.await;
        sent.push(stream.map_err(|error| FaultError::Never(format!("a stream ends: {error}")))?);
    }
    let cut = sent.iter().filter(|sent| sent.has_failed()).count();
    let mut seen = Seen::of(sent);
    if stand.is_filtered() {
        let has_fired = trapped.is_some() || trial.has_trapped();
        seen.check(has_fired, format!("{} never trapped", callback.export));
        let later = probes.get(trapped.map_or(0, |at| at + 1)..).unwrap_or_default();
        let refused = later.iter().filter(|probe| probe.has_failed()).count();
        let first = trapped.and_then(|at| probes.get(at));
        let first = first.map_or_else(|| "none".to_owned(), |probe| outcome(&probe.end));
        let undecided = later
            .iter()
            .filter(|probe| probe.host.is_none() && !probe.has_failed())
            .count();
        seen.note = format!(
            "{cut} of {STREAMS} streams in flight cut; the request at the trap: {first}; of {} later ones {refused} \
             refused, {} passed undecided",
            later.len(),
            undecided,
        );
        let decided = |probe: &&Sent| !probe.has_failed() && probe.reason.is_some();
        let decided = later.iter().find(decided);
        let trapped_at = trapped
            .and_then(|at| probes.get(at))
            .map_or(Duration::ZERO, |probe| probe.at);
        match decided {
            Some(_) if callback.is_called == Called::WithAnotherModule => {
                seen.note.push_str("; the module before it goes on");
            }
            Some(probe) => {
                seen.recovery = Some(Recovery {
                    until: "the filter decided again by itself",
                    took: Some(probe.at + probe.took - trapped_at),
                    within: None,
                });
            }
            None => trial.revive(&mut seen).await?,
        }
    }
    seen.sent.extend(probes);
    Ok(seen)
}

/// One Envoy with the module that is going to trap.
struct Trial {
    stand: Stand,
    callback: Callback,
    fleet: Fleet,
    gateway: Gateway,
    client: Client,
    config: EnvoyConfig,
    lds: PathBuf,
    trapping: PathBuf,
    folder: Folder,
}

impl Trial {
    async fn begin(stand: &Stand, callback: Callback) -> Result<Self, FaultError> {
        // A stream lasts for seconds, and nobody waits for a prefill.
        let engine = EngineConfig {
            prefill_tokens_per_s: 1_000_000,
            decode_us_per_token: 20_000,
            ..EngineConfig::default()
        };
        let fleet = stand.fleet(2, engine).await?;
        let folder = Folder::new()?;
        let (lds, trapping) = (folder.file("lds.json"), folder.file("trapping.wasm"));
        let mut config = stand.config_of(&fleet);
        config.lds_path = Some(lds.clone());
        // Over HTTP/2, since Envoy takes no trailers from an HTTP/1.1 upstream.
        let has_trailers = callback.export == RESPONSE_TRAILERS;
        config.pools.iter_mut().for_each(|pool| pool.http2 = has_trailers);
        fleet
            .replicas
            .iter()
            .for_each(|replica| replica.set_trailers(has_trailers));
        if stand.is_filtered() {
            let is_at_once = callback.is_called == Called::WithAnotherModule;
            let (calls_of, count) = match callback.is_called {
                // The first request after the streams began is the one too many.
                Called::AsRequestsCome => (REQUEST_HEADERS, STREAMS as u32),
                Called::AtAPush => (REQUEST_HEADERS, STREAMS as u32 - 1),
                Called::WithAnotherModule => (callback.export, 0),
            };
            let patch = Counted {
                export: callback.export,
                calls_of,
                when: When::Above(count),
                act: Act::Trap,
            };
            fs::write(&trapping, counted(&stand.wasm, &[patch])?)?;
            if let Some(plugin) = config.plugin.as_mut().filter(|_| !is_at_once) {
                plugin.wasm = trapping.clone();
            }
        }
        write_atomically(&lds, &stand.sided(&config).listeners_file())?;
        let gateway = stand.start(&config, 1).await?;
        if stand.is_filtered() {
            gateway.shows("warmroute_hosts", 2).await?;
            gateway.rescraped(2).await?;
        }
        Ok(Self {
            stand: stand.clone(),
            callback,
            fleet,
            gateway,
            client: Client::http2().with_deadline(PATIENCE),
            config,
            lds,
            trapping,
            folder,
        })
    }

    /// Opens streams and waits until all of them are under way.
    async fn open_streams(&self) -> Result<Vec<JoinHandle<Sent>>, FaultError> {
        let tokens = if self.stand.is_short { 60 } else { 120 };
        let start = Instant::now();
        let stream = |number| {
            let (client, url) = (self.client.clone(), self.gateway.chat_url());
            let body = chat(number, number, PROMPT_BYTES, tokens, true);
            tokio::spawn(async move {
                let at = start.elapsed();
                let mut sent = Sent::new(number, "stream", at, Duration::ZERO, End::Hung);
                let answer = exchange(&client, &url, body, true, &mut sent);
                sent.end = tokio::time::timeout(PATIENCE, answer).await.unwrap_or(End::Hung);
                sent.took = start.elapsed() - at;
                sent
            })
        };
        let streams = (0..STREAMS).map(stream).collect();
        eventually("the streams run", async || {
            let running: usize = self.fleet.replicas.iter().map(|replica| replica.queue().1).sum();
            Ok(running as u64 == STREAMS)
        })
        .await?;
        Ok(streams)
    }

    /// Pushes a configuration that differs from the last by an age, with this module, and waits until Envoy has read it.
    async fn push(&self, wasm: &Path, fresh_ms: u32) -> Result<(), FaultError> {
        let pushes = async || {
            let stats = self.gateway.process.stats(PUSHES).await?;
            Ok::<_, FaultError>(stats.values().sum::<u64>())
        };
        let before = pushes().await?;
        let mut config = self.config.clone();
        if let Some(plugin) = &mut config.plugin {
            let mut settings = self.stand.settings();
            settings["table_fresh_ms"] = json!(fresh_ms);
            plugin.json = settings.to_string();
            wasm.clone_into(&mut plugin.wasm);
        }
        write_atomically(&self.lds, &self.stand.sided(&config).listeners_file())?;
        eventually("the config is read", async || Ok(pushes().await? > before))
            .await
            .map(drop)
    }

    /// A request with body and trailers.
    async fn probe(&self, number: u64, start: Instant) -> Sent {
        self.probe_with(&self.client, number, start).await
    }

    async fn probe_with(&self, client: &Client, number: u64, start: Instant) -> Sent {
        let at = start.elapsed();
        let mut sent = Sent::new(number, "probe", at, Duration::ZERO, End::Hung);
        let body = chat(number % STREAMS, number, PROMPT_BYTES, 1, false);
        let mut trailers = HeaderMap::new();
        trailers.insert("x-trailer", HeaderValue::from_static("1"));
        let body = pieces(vec![Bytes::from(body)], Some(trailers));
        let url = format!("{}{CHAT}", self.gateway.process.url());
        sent.end = match post_request(&url, &[], body) {
            Ok(request) => match client.request(request).await {
                Ok(answer) => {
                    sent.replica = answer.header("x-replica").map(str::to_owned);
                    sent.host = answer.header("x-warmroute-host").map(str::to_owned);
                    sent.reason = answer.header("x-warmroute-reason").map(str::to_owned);
                    match answer.status {
                        200 if answer.json()["choices"].is_array() => End::Whole,
                        200 => End::Cut("the answer lacks its end".to_owned()),
                        status => End::Status(status, answer.text().chars().take(80).collect()),
                    }
                }
                Err(ClientError::Deadline(_)) => End::Hung,
                Err(cause) => End::NoAnswer(cause.to_string()),
            },
            Err(cause) => End::NoAnswer(cause.to_string()),
        };
        sent.took = start.elapsed() - at;
        sent
    }

    /// Envoy logs the stack of a trap with the names of exports.
    fn has_trapped(&self) -> bool {
        let log = self.gateway.process.log();
        log.contains("RuntimeError: unreachable") && log.contains(self.callback.export)
    }

    /// When the filter decides again after a push.
    async fn revive(&self, seen: &mut Seen) -> Result<(), FaultError> {
        let same = self.config.plugin.as_ref().map(|plugin| plugin.wasm.clone());
        let other = self.folder.file("other.wasm");
        fs::write(&other, another_build(&self.stand.wasm, "other")?)?;
        let pushes = [
            (
                same.unwrap_or_default(),
                "the filter decided again after a config push",
            ),
            (
                other,
                "the filter decided again after a push of another build, since one of the same was refused",
            ),
        ];
        for (wasm, until) in pushes {
            self.push(&wasm, 3002).await?;
            let pushed = Instant::now();
            if self.decides(pushed, REVIVAL_PROBES).await {
                seen.recovery = Some(Recovery {
                    until,
                    took: Some(pushed.elapsed()),
                    within: None,
                });
                return Ok(());
            }
        }
        seen.check(false, "no config push brings the filter back");
        Ok(())
    }

    async fn decides(&self, start: Instant, probes: u64) -> bool {
        for number in 0..probes {
            // A connection stays with the configuration that it began with.
            let client = Client::http2().with_deadline(PATIENCE);
            if self.probe_with(&client, number, start).await.reason.is_some() {
                return true;
            }
            tokio::time::sleep(PAUSE).await;
        }
        false
    }
}

fn outcome(end: &End) -> String {
    match end {
        End::Whole => "answered".to_owned(),
        End::Status(status, _) => format!("{status}"),
        other => other.to_string(),
    }
}

const PART: &str = "trap";
const OTHER_POLICIES: &[Policy] = &[Policy::FailOpen, Policy::FailReload, Policy::FailClosed];
const RESPONSE_TRAILERS: &str = "proxy_on_response_trailers";
const REQUEST_HEADERS: &str = "proxy_on_request_headers";
/// What Envoy calls of the module; the exports left out are for TCP, gRPC calls and queues, which Warmroute does not use.
const CALLBACKS: &[Callback] = &[
    short(REQUEST_HEADERS),
    by("proxy_on_request_body", Called::AsRequestsCome),
    by("proxy_on_request_trailers", Called::AsRequestsCome),
    by("proxy_on_response_headers", Called::AsRequestsCome),
    by("proxy_on_response_body", Called::AsRequestsCome),
    by(RESPONSE_TRAILERS, Called::AsRequestsCome),
    by("proxy_on_log", Called::AsRequestsCome),
    by("proxy_on_done", Called::AsRequestsCome),
    by("proxy_on_delete", Called::AsRequestsCome),
    by("proxy_on_context_create", Called::AsRequestsCome),
    by("proxy_on_memory_allocate", Called::AsRequestsCome),
    short("proxy_on_tick"),
    by("proxy_on_configure", Called::AtAPush),
    by("proxy_on_vm_start", Called::WithAnotherModule),
];
/// Configurations that were read, taken or not.
const PUSHES: &str = "listener_manager.lds.update_attempt";
const STREAMS: u64 = 10;
/// Requests after the streams began, one each pause.
const PROBES: u32 = 12;
const PAUSE: Duration = Duration::from_millis(100);
/// Fewer than make the module trap again.
const REVIVAL_PROBES: u64 = 8;
const PROMPT_BYTES: usize = 2048;
const PATIENCE: Duration = Duration::from_secs(8);
