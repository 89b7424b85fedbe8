//! Faults of Envoy itself: configurations that come under load, listeners that go, a clock that jumps.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::json;

use super::companion::{has_panicked, service_that_panics, taken_over};
use super::load::{Load, LoadPlan, Sent};
use super::stand::{Gateway, POLL, POOL, Stand, eventually};
use super::{FaultError, Recovery, Scenario, Seen};
use crate::engine::EngineConfig;
use crate::envoy::{EnvoyOptions, Folder, write_atomically};
use crate::envoy_config::PoolConfig;
use crate::odd::free_port;
use crate::process::{run, workspace_root};
use crate::toolchain::tool;

pub(super) fn scenarios() -> Vec<Scenario> {
    let jump = |fault: &str, seconds: i64| {
        let fault = fault.to_owned();
        Scenario::new(PART, fault, move |stand| Box::pin(clock_jumps(stand, seconds)))
    };
    vec![
        Scenario::new(PART, "config pushes under load", |stand| Box::pin(pushes(stand))).in_short_form(),
        Scenario::new(PART, "listener removed and added again", |stand| {
            Box::pin(listener_goes(stand))
        }),
        jump("clock jumps ahead by an hour", HOUR),
        jump("clock jumps back by an hour", -HOUR),
        jump("clock jumps ahead by ten years", 10 * 365 * 24 * HOUR),
        jump("clock jumps back by ten years", -10 * 365 * 24 * HOUR),
        Scenario::new(
            PART,
            "embedded, workers born at one moment of the clock",
            |stand| Box::pin(born_at_one_moment(stand)),
        ),
        Scenario::new(
            PART,
            "clock jumps back by an hour, then the service panics",
            |stand| Box::pin(clock_jumps_and_service_panics(stand)),
        ),
    ]
}

async fn pushes(stand: &Stand) -> Result<Seen, FaultError> {
    let (folder, fleet) = (Folder::new()?, stand.fleet(4, EngineConfig::default()).await?);
    let mut config = stand.config_of(&fleet);
    let lds = folder.file("lds.json");
    config.lds_path = Some(lds.clone());
    write_atomically(&lds, &stand.sided(&config).listeners_file())?;
    let gateway = stand.ready(&config, 4).await?;
    let before = stat(&gateway, ACCEPTED).await?;
    let load = Load::start(&gateway, LoadPlan::default());
    let pushes = if stand.is_short { 2 } else { 6 };
    for push in 1..=pushes {
        tokio::time::sleep(Duration::from_secs(1)).await;
        // Plain Envoy has to take something that changed, too.
        config.connection_buffer_limit_bytes = Some((16 << 20) + push);
        if let Some(plugin) = &mut config.plugin {
            let mut settings = stand.settings();
            settings["table_fresh_ms"] = json!(3000 + push);
            plugin.json = settings.to_string();
        }
        write_atomically(&lds, &stand.sided(&config).listeners_file())?;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let accepted = stat(&gateway, ACCEPTED).await? - before;
    let mut seen = Seen::of(load.stop().await);
    seen.check(
        accepted == pushes,
        format!("{accepted} of {pushes} pushes were accepted"),
    );
    if stand.is_filtered() {
        let bridged = seen.sent.iter().filter(|sent| is_bridged(sent)).count();
        seen.note = format!("{accepted} pushes accepted; {bridged} requests decided without a fresh table");
        seen.check(bridged == 0, "a push made the table stale or lost it");
    }
    Ok(seen)
}

async fn listener_goes(stand: &Stand) -> Result<Seen, FaultError> {
    let engine = EngineConfig {
        decode_us_per_token: 20_000,
        ..EngineConfig::default()
    };
    let (folder, fleet) = (Folder::new()?, stand.fleet(4, engine).await?);
    let mut config = stand.config_of(&fleet);
    let lds = folder.file("lds.json");
    config.lds_path = Some(lds.clone());
    // It has to come back where it was.
    config.listener_port = free_port()?;
    let listeners = stand.sided(&config).listeners_file();
    write_atomically(&lds, &listeners)?;
    let gateway = stand.ready(&config, 4).await?;
    let streams = Load::start(
        &gateway,
        LoadPlan {
            per_second: 20,
            streams_every: 1,
            max_tokens: 100,
            ..LoadPlan::default()
        },
    );
    tokio::time::sleep(Duration::from_secs(1)).await;
    let ended = streams.so_far().len();
    let removal = async {
        // The last stream is on its way.
        tokio::time::sleep(Duration::from_millis(200)).await;
        write_atomically(&lds, "{\"resources\": []}")?;
        eventually("the listener is gone", async || {
            Ok(stat(&gateway, ACTIVE).await? == 0)
        })
        .await
    };
    let (mut sent, removed) = tokio::join!(streams.stop(), removal);
    removed?;
    let in_flight = sent.len() - ended;
    write_atomically(&lds, &listeners)?;
    let back = eventually("the listener is back", async || {
        Ok(stat(&gateway, ACTIVE).await? == 1)
    })
    .await?;
    let load = Load::start(
        &gateway,
        LoadPlan {
            max_tokens: 1,
            ..LoadPlan::default()
        },
    );
    tokio::time::sleep(Duration::from_secs(2)).await;
    let later = load.stop().await;
    let recovered = later
        .iter()
        .filter(|sent| is_bridged(sent))
        .map(|sent| sent.at)
        .max();
    sent.extend(later);
    let mut seen = Seen::of(sent);
    seen.check(in_flight > 10, "hardly a stream was in flight");
    if stand.is_filtered() {
        let undecided = seen.sent.iter().filter(|sent| sent.reason.is_none()).count();
        seen.check(undecided == 0, format!("{undecided} requests were not decided"));
        seen.note = format!("{in_flight} streams in flight at the removal");
        seen.recovery = Some(Recovery {
            until: "the listener that came back decided by a fresh table",
            took: Some(back + recovered.unwrap_or_default()),
            within: Some(POLL + Duration::from_secs(1)),
        });
        no_tally_is_left(&gateway).await?;
    }
    Ok(seen)
}

async fn clock_jumps(stand: &Stand, seconds: i64) -> Result<Seen, FaultError> {
    let (folder, fleet) = (Folder::new()?, stand.fleet(4, EngineConfig::default()).await?);
    let clock = Clock::new(&folder)?;
    let gateway = stand
        .start_with(&stand.config_of(&fleet), &clock.options())
        .await?;
    if stand.is_filtered() {
        gateway.shows("warmroute_hosts", 4).await?;
        gateway.rescraped(4).await?;
    }
    let load = Load::start(&gateway, LoadPlan::default());
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let jumped = load.elapsed();
    clock.jump(seconds)?;
    tokio::time::sleep(Duration::from_secs(4)).await;
    let date = gateway.client.post(&gateway.chat_url(), &[], "{}").await?;
    let mut seen = Seen::of(load.stop().await);
    // Engines write no date, so this one is Envoy's.
    let date = date.header("date").unwrap_or_default().to_owned();
    seen.check(!date.is_empty(), "Envoy tells no date");
    if stand.is_filtered() {
        let bridged = || {
            seen.sent
                .iter()
                .filter(|sent| sent.at > jumped && is_bridged(sent))
        };
        let (count, last) = (bridged().count(), bridged().map(|sent| sent.at - jumped).max());
        seen.note = format!("{count} requests decided without a fresh table");
        seen.recovery = Some(Recovery {
            until: "the table counted as fresh",
            took: Some(last.unwrap_or_default()),
            within: Some(POLL + Duration::from_secs(1)),
        });
        let published_s = gateway.stat(PUBLISHED).await?;
        let expected_s = now_s().saturating_add_signed(seconds);
        seen.check(
            published_s.abs_diff(expected_s) < 60,
            format!("the filter did not see the jump: {published_s} where it is {expected_s}"),
        );
        no_tally_is_left(&gateway).await?;
    }
    Ok(seen)
}

/// Envoy's clock has microseconds, so contexts of several threads may begin at one moment of it; here all of them do.
async fn born_at_one_moment(stand: &Stand) -> Result<Seen, FaultError> {
    let (folder, fleet) = (Folder::new()?, stand.fleet(4, EngineConfig::default()).await?);
    let clock = Clock::new(&folder)?;
    clock.coarsen(100)?;
    let mut settings = stand.settings();
    settings["companion"] = json!({"mode": "embedded"});
    let mut config = stand.config(PoolConfig::new(POOL, fleet.addresses()), &settings);
    if let Some(plugin) = &mut config.plugin {
        plugin.service = false;
    }
    let options = EnvoyOptions {
        concurrency: 4,
        ..clock.options()
    };
    let gateway = stand.start_with(&config, &options).await?;
    if stand.is_filtered() {
        gateway.shows("warmroute_hosts", 4).await?;
    }
    let load = Load::start(&gateway, LoadPlan::default());
    // Who was first may hand the lease to the main thread.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let before = fleet.replicas[0].metrics_reads();
    tokio::time::sleep(POLL * 8).await;
    let reads = fleet.replicas[0].metrics_reads() - before;
    let mut seen = Seen::of(load.stop().await);
    if stand.is_filtered() {
        seen.check(
            (4..=11).contains(&reads),
            format!("{reads} scrapes in the time of 8"),
        );
        seen.note = format!("{reads} scrapes of a host in the time of 8");
        no_tally_is_left(&gateway).await?;
    }
    Ok(seen)
}

async fn clock_jumps_and_service_panics(stand: &Stand) -> Result<Seen, FaultError> {
    let (folder, fleet) = (Folder::new()?, stand.fleet(4, EngineConfig::default()).await?);
    let clock = Clock::new(&folder)?;
    let mut config = stand.config_of(&fleet);
    service_that_panics(stand, &mut config, &folder)?;
    let gateway = stand.start_with(&config, &clock.options()).await?;
    if stand.is_filtered() {
        gateway.shows("warmroute_hosts", 4).await?;
    }
    let load = Load::start(&gateway, LoadPlan::default());
    tokio::time::sleep(Duration::from_millis(500)).await;
    clock.jump(-HOUR)?;
    if !stand.is_filtered() {
        tokio::time::sleep(Duration::from_secs(6)).await;
        return Ok(Seen::of(load.stop().await));
    }
    let has_died_before = has_panicked(&gateway);
    let recovery = taken_over(&gateway).await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut seen = Seen::of(load.stop().await);
    seen.check(!has_died_before, "the service panicked before the clock jumped");
    seen.recovery = Some(recovery);
    let bridged = seen.sent.iter().filter(|sent| is_bridged(sent)).count();
    seen.note = format!("{bridged} requests decided without a fresh table");
    Ok(seen)
}

/// A wall clock that the scenario sets for one Envoy.
struct Clock {
    file: PathBuf,
    library: PathBuf,
}

impl Clock {
    fn new(folder: &Folder) -> Result<Self, FaultError> {
        let clock = Self {
            file: folder.file("clock"),
            library: folder.file("clock.so"),
        };
        fs::write(&clock.file, [0; 16])?;
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("preload/clock.rs");
        let built = run(Command::new(tool("RUSTC", "rustc"))
            .current_dir(workspace_root())
            .args(["--edition", "2024", "--crate-type", "cdylib"])
            .args(["-O", "-C", "panic=abort", "-o"])
            .arg(&clock.library)
            .arg(source));
        built.map_err(|error| FaultError::Never(format!("the clock is built: {error}")))?;
        Ok(clock)
    }

    fn options(&self) -> EnvoyOptions {
        let variable = |name: &str, path: &Path| (name.to_owned(), path.display().to_string());
        EnvoyOptions {
            variables: vec![
                variable("LD_PRELOAD", &self.library),
                variable("WARMROUTE_CLOCK", &self.file),
            ],
            ..EnvoyOptions::default()
        }
    }

    /// So far from the machine's clock.
    fn jump(&self, seconds: i64) -> Result<(), FaultError> {
        // In place: the library has the file mapped, and must never find it empty.
        let mut file = fs::OpenOptions::new().write(true).open(&self.file)?;
        Ok(file.write_all(&(seconds * 1_000_000_000).to_ne_bytes())?)
    }

    /// Goes on in steps of so many milliseconds.
    fn coarsen(&self, step_ms: i64) -> Result<(), FaultError> {
        Ok(fs::write(
            &self.file,
            [0, step_ms * 1_000_000].map(i64::to_ne_bytes).concat(),
        )?)
    }
}

fn is_bridged(sent: &Sent) -> bool {
    let reason = sent.reason.as_deref().unwrap_or_default();
    matches!(reason, "table_stale" | "no_table" | "no_hosts")
}

async fn stat(gateway: &Gateway, name: &str) -> Result<u64, FaultError> {
    Ok(gateway.process.stats(name).await?.get(name).copied().unwrap_or(0))
}

async fn no_tally_is_left(gateway: &Gateway) -> Result<(), FaultError> {
    let left = async || Ok(gateway.stat(IN_FLIGHT).await? == 0);
    eventually("no tally is left", left).await.map(drop)
}

fn now_s() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}

const PART: &str = "gateway";
const ACCEPTED: &str = "listener_manager.lds.update_success";
const ACTIVE: &str = "listener_manager.total_listeners_active";
const IN_FLIGHT: &str = "warmroute_requests_in_flight.pool.llm";
const PUBLISHED: &str = "warmroute_table_published_timestamp_seconds.pool.llm";
/// Seconds.
const HOUR: i64 = 3600;
