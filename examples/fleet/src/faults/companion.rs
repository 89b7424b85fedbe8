//! Faults of whoever polls: it dies, its thread stalls, its configuration goes, it never was there.

use std::fs;
use std::time::{Duration, Instant};

use serde_json::json;

use super::load::{Load, LoadPlan, Sent};
use super::stand::{Gateway, Stand, eventually};
use super::{FaultError, Recovery, Scenario, Seen};
use crate::engine::EngineConfig;
use crate::envoy::{Folder, write_atomically};
use crate::envoy_config::EnvoyConfig;
use crate::fleet::Fleet;
use crate::patched::{Act, Counted, When, counted};

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        Scenario::new(PART, "the service panics and never comes back", |stand| {
            Box::pin(service_panics(stand))
        })
        .in_short_form(),
        Scenario::new(PART, "the service's thread stalls for seconds", |stand| {
            Box::pin(service_stalls(stand))
        }),
        Scenario::new(
            PART,
            "embedded: the thread of the filter that polls stalls",
            |stand| Box::pin(embedded_stalls(stand)),
        ),
        Scenario::new(PART, "embedded: a worker that polls stalls", |stand| {
            Box::pin(worker_stalls(stand))
        }),
        Scenario::new(
            PART,
            "embedded: config pushes to the filter that polls",
            |stand| Box::pin(pushes(stand)),
        ),
        Scenario::new(PART, "no service where one is expected", |stand| {
            Box::pin(absent(stand))
        }),
    ]
}

async fn service_panics(stand: &Stand) -> Result<Seen, FaultError> {
    let (folder, fleet) = (Folder::new()?, fleet(stand).await?);
    let mut config = stand.config_of(&fleet);
    service_that_panics(stand, &mut config, &folder)?;
    let gateway = stand.ready(&config, 4).await?;
    let load = Load::start(&gateway, LoadPlan::default());
    if !stand.is_filtered() {
        tokio::time::sleep(AS_LONG_AS_A_TAKEOVER).await;
        return Ok(Seen::of(load.stop().await));
    }
    let recovery = taken_over(&gateway).await?;
    let taken_over = load.elapsed();
    tokio::time::sleep(AFTERWARDS).await;
    let mut seen = Seen::of(load.stop().await);
    seen.recovery = Some(recovery);
    judge_decisions(&mut seen, taken_over);
    Ok(seen)
}

async fn service_stalls(stand: &Stand) -> Result<Seen, FaultError> {
    let (folder, fleet) = (Folder::new()?, fleet(stand).await?);
    let mut config = stand.config_of(&fleet);
    if let Some(plugin) = &mut config.plugin {
        let wasm = folder.file("service.wasm");
        fs::write(&wasm, counted(&stand.wasm, &[STALL])?)?;
        plugin.service_wasm = Some(wasm);
    }
    let gateway = stand.ready(&config, 4).await?;
    let load = Load::start(&gateway, LoadPlan::default());
    returns(stand, &gateway, load, SERVICE_POLLS).await
}

async fn embedded_stalls(stand: &Stand) -> Result<Seen, FaultError> {
    let (folder, fleet) = (Folder::new()?, fleet(stand).await?);
    let mut config = embedded(stand, &fleet);
    if let Some(plugin) = &mut config.plugin {
        let wasm = folder.file("filter.wasm");
        fs::write(&wasm, counted(&stand.wasm, &[STALL])?)?;
        plugin.wasm = wasm;
    }
    let gateway = stand.ready(&config, 4).await?;
    let load = Load::start(&gateway, LoadPlan::default());
    returns(stand, &gateway, load, FILTER_POLLS).await
}

/// Waits until whoever polls stalled, another polls, and the first is back; it must not bring old news then.
async fn returns(
    stand: &Stand,
    gateway: &Gateway,
    load: Load,
    first_polls: &str,
) -> Result<Seen, FaultError> {
    if !stand.is_filtered() {
        tokio::time::sleep(AS_LONG_AS_A_STALL).await;
        return Ok(Seen::of(load.stop().await));
    }
    eventually("another polls", async || Ok(takeovers(gateway) > 1)).await?;
    let taken_over = load.elapsed();
    eventually("the first is back", async || Ok(takeovers(gateway) > 2)).await?;
    tokio::time::sleep(AFTERWARDS).await;
    let mut seen = Seen::of(load.stop().await);
    let times = log_times(gateway, POLLS);
    let back = times
        .last()
        .copied()
        .zip(times.get(times.len().saturating_sub(2)).copied());
    let back = back.map_or(0, |(back, taken)| back.saturating_sub(taken));
    let polled = log_times(gateway, first_polls).len();
    seen.check(polled > 1, "the first to poll never polled again");
    seen.note = format!("the stalled one was back {back} ms after another had taken over");
    judge_decisions(&mut seen, taken_over);
    Ok(seen)
}

/// The main thread's filter dies of its first answer, so that the lease goes to a worker, which stalls later.
async fn worker_stalls(stand: &Stand) -> Result<Seen, FaultError> {
    let (folder, fleet) = (Folder::new()?, fleet(stand).await?);
    let mut config = embedded(stand, &fleet);
    if let Some(plugin) = &mut config.plugin {
        let wasm = folder.file("filter.wasm");
        let serves_nothing = Counted {
            calls_of: "proxy_on_request_headers",
            when: When::Below(1),
            ..PANIC
        };
        fs::write(&wasm, counted(&stand.wasm, &[serves_nothing, STALL])?)?;
        plugin.wasm = wasm;
    }
    let gateway = stand.start(&config, 2).await?;
    let load = Load::start(&gateway, LoadPlan::default());
    if !stand.is_filtered() {
        tokio::time::sleep(AS_LONG_AS_A_STALL).await;
        return Ok(Seen::of(load.stop().await));
    }
    eventually("a worker polls", async || Ok(takeovers(&gateway) > 1)).await?;
    eventually("the other worker polls", async || Ok(takeovers(&gateway) > 2)).await?;
    let taken_over = load.elapsed();
    tokio::time::sleep(2 * AFTERWARDS).await;
    let mut seen = Seen::of(load.stop().await);
    let traps = log_times(&gateway, PANICKED).len();
    seen.check(
        traps == 1,
        format!("{traps} VMs trapped, not the main thread's alone"),
    );
    seen.note = "requests on the worker wait as long as it stalls".to_owned();
    judge_decisions(&mut seen, taken_over);
    Ok(seen)
}

async fn pushes(stand: &Stand) -> Result<Seen, FaultError> {
    let (folder, fleet) = (Folder::new()?, fleet(stand).await?);
    let mut config = embedded(stand, &fleet);
    let lds = folder.file("lds.json");
    config.lds_path = Some(lds.clone());
    write_atomically(&lds, &stand.sided(&config).listeners_file())?;
    let gateway = stand.ready(&config, 4).await?;
    let load = Load::start(&gateway, LoadPlan::default());
    let mut slowest = Duration::ZERO;
    for round in 1..=PUSHES {
        tokio::time::sleep(AFTERWARDS).await;
        let before = takeovers(&gateway);
        let mut settings = embedded_settings(stand);
        settings["table_fresh_ms"] = json!(3000 + round);
        if let Some(plugin) = &mut config.plugin {
            plugin.json = settings.to_string();
        }
        write_atomically(&lds, &stand.sided(&config).listeners_file())?;
        if stand.is_filtered() {
            let took = eventually("a newer filter polls", async || Ok(takeovers(&gateway) > before)).await?;
            slowest = slowest.max(took);
        }
    }
    tokio::time::sleep(AFTERWARDS).await;
    let mut seen = Seen::of(load.stop().await);
    if stand.is_filtered() {
        seen.recovery = Some(Recovery {
            until: "the newer filter polled",
            took: Some(slowest),
            within: Some(TAKEN_OVER_WITHIN),
        });
        judge_decisions(&mut seen, Duration::ZERO);
    }
    Ok(seen)
}

async fn absent(stand: &Stand) -> Result<Seen, FaultError> {
    let fleet = fleet(stand).await?;
    let mut config = stand.config_of(&fleet);
    if let Some(plugin) = &mut config.plugin {
        plugin.service = false;
    }
    let gateway = stand.start(&config, 2).await?;
    let start = Instant::now();
    let load = Load::start(&gateway, LoadPlan::default());
    if !stand.is_filtered() {
        tokio::time::sleep(AS_LONG_AS_A_TAKEOVER).await;
        return Ok(Seen::of(load.stop().await));
    }
    eventually("a filter polls", async || Ok(takeovers(&gateway) > 0)).await?;
    let took = start.elapsed();
    tokio::time::sleep(AFTERWARDS).await;
    let mut seen = Seen::of(load.stop().await);
    let last = seen
        .sent
        .iter()
        .rfind(|sent| sent.reason.as_deref() == Some("no_hosts"));
    let until = last.map_or(Duration::ZERO, |sent| sent.at);
    seen.check(
        until > Duration::ZERO,
        "hosts were known without anybody who polls",
    );
    seen.check(
        until < took + AFTERWARDS / 2,
        "a filter polls, and hosts are still unknown",
    );
    seen.recovery = Some(Recovery {
        until: "a filter polled",
        took: Some(took),
        within: Some(TAKEN_OVER_WITHIN + AFTERWARDS),
    });
    Ok(seen)
}

/// Gives the service a module of its own, which dies of its answers.
pub(super) fn service_that_panics(
    stand: &Stand,
    config: &mut EnvoyConfig,
    folder: &Folder,
) -> Result<(), FaultError> {
    if let Some(plugin) = &mut config.plugin {
        let wasm = folder.file("service.wasm");
        fs::write(&wasm, counted(&stand.wasm, &[PANIC])?)?;
        plugin.service_wasm = Some(wasm);
    }
    Ok(())
}

/// Waits until the service panicked and a filter polls, and tells how long nobody did.
pub(super) async fn taken_over(gateway: &Gateway) -> Result<Recovery, FaultError> {
    let died = || log_times(gateway, PANICKED).first().copied();
    // One that polled before, while the service was slow, does not count.
    let polls = |died: u64| {
        let polls = log_times(gateway, FILTER_POLLS);
        polls.into_iter().find(|polls| *polls >= died)
    };
    let took = || died().and_then(|died| Some(polls(died)? - died));
    eventually("a filter polls in place of the service", async || {
        Ok(took().is_some())
    })
    .await?;
    Ok(Recovery {
        until: "a filter polled in its place",
        took: took().map(Duration::from_millis),
        within: Some(TAKEN_OVER_WITHIN),
    })
}

/// Whether a VM trapped.
pub(super) fn has_panicked(gateway: &Gateway) -> bool {
    !log_times(gateway, PANICKED).is_empty()
}

async fn fleet(stand: &Stand) -> Result<Fleet, FaultError> {
    stand.fleet(4, EngineConfig::default()).await
}

fn embedded_settings(stand: &Stand) -> serde_json::Value {
    let mut settings = stand.settings();
    settings["companion"] = json!({"mode": "embedded"});
    settings
}

/// No service: the filter's root contexts elect who polls.
fn embedded(stand: &Stand, fleet: &Fleet) -> EnvoyConfig {
    let mut config = stand.config_of(fleet);
    if let Some(plugin) = &mut config.plugin {
        plugin.service = false;
        plugin.json = embedded_settings(stand).to_string();
    }
    config
}

/// A stale table is bridged by requests in flight; once somebody polls again nobody may see one, and hosts are never lost.
fn judge_decisions(seen: &mut Seen, taken_over: Duration) {
    let count = |wanted: &str, from: Duration| {
        let sent = seen.sent.iter().filter(|sent| sent.at >= from);
        sent.filter(|sent| sent.reason.as_deref() == Some(wanted)).count()
    };
    let stale = count("table_stale", Duration::ZERO);
    let late = count("table_stale", taken_over + AFTERWARDS / 2);
    let lost = count("no_hosts", taken_over);
    let gone = count("no_table", Duration::ZERO);
    if !seen.note.is_empty() {
        seen.note.push_str("; ");
    }
    seen.note
        .push_str(&format!("{stale} requests decided by a stale table"));
    seen.check(
        late == 0,
        format!("{late} requests decided by a stale table after somebody polled again"),
    );
    seen.check(
        lost + gone == 0,
        format!("{} requests decided without a table", lost + gone),
    );
    let undecided = |sent: &&Sent| sent.reason.is_none();
    let undecided = seen.sent.iter().filter(undecided).count();
    seen.check(undecided == 0, format!("{undecided} requests were not decided"));
}

fn takeovers(gateway: &Gateway) -> usize {
    log_times(gateway, POLLS).len()
}

/// When Envoy logged lines with this text, ms of the day.
fn log_times(gateway: &Gateway, text: &str) -> Vec<u64> {
    let log = gateway.process.log();
    let lines = log.lines().filter(|line| line.contains(text));
    lines.filter_map(time_of).collect()
}

/// Of `[2026-11-30 07:00:41.265][…`.
fn time_of(line: &str) -> Option<u64> {
    let time = line.strip_prefix('[')?.split_once(' ')?.1.split_once(']')?.0;
    let (clock, ms) = time.split_once('.')?;
    let mut seconds = 0;
    for part in clock.split(':') {
        seconds = seconds * 60 + part.parse::<u64>().ok()?;
    }
    Some(seconds * 1000 + ms.parse::<u64>().ok()?)
}

const PART: &str = "companion";
const PANICKED: &str = "RuntimeError: unreachable";
const POLLS: &str = "polls now";
const SERVICE_POLLS: &str = "this service polls now";
const FILTER_POLLS: &str = "this filter polls now";
/// Only who polls gets answers.
const PANIC: Counted<'_> = Counted {
    export: "proxy_on_http_call_response",
    calls_of: "proxy_on_http_call_response",
    when: When::Above(ANSWERS),
    act: Act::Trap,
};
const STALL: Counted<'_> = Counted {
    when: When::At(2 * ANSWERS),
    act: Act::Stall(STALL_MS),
    ..PANIC
};
/// Answers until the fault: more than it takes to be ready, about ten a second.
const ANSWERS: u32 = 28;
/// Longer than a lease lives without a heartbeat.
const STALL_MS: u32 = 4500;
const PUSHES: u32 = 3;
/// The bar for a companion that died.
const TAKEN_OVER_WITHIN: Duration = Duration::from_secs(3);
/// Load beyond the recovery.
const AFTERWARDS: Duration = Duration::from_secs(1);
/// How long a scenario goes on without the filter, where nobody waits for anything.
const AS_LONG_AS_A_TAKEOVER: Duration = Duration::from_secs(4);
const AS_LONG_AS_A_STALL: Duration = Duration::from_secs(8);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_from_log_lines() {
        let line = "[2026-11-30 07:00:41.265][24963][error][wasm] [source/x.cc:38] Function: f failed";
        assert_eq!(time_of(line), Some((7 * 3600 + 41) * 1000 + 265));
        assert_eq!(time_of("  a stack trace"), None);
    }
}
