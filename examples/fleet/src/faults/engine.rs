//! Faults of engines: they die, restart, freeze, crawl, break answers off, refuse, and show nonsense as metrics.

use std::time::Duration;

use super::load::{End, Load, LoadPlan, Sent};
use super::stand::{POLL, Stand, busiest, eventually};
use super::{FaultError, Recovery, Scenario, Seen};
use crate::engine::EngineConfig;
use crate::replica::{Fault, Replica};

mod answers;
mod metrics;

pub(super) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = vec![
        Scenario::new(PART, "killed", |stand| Box::pin(killed(stand))).in_short_form(),
        Scenario::new(PART, "killed while nobody asks", |stand| {
            Box::pin(killed_unnoticed(stand))
        }),
        Scenario::new(
            PART,
            "vanished: open connections go silent, new ones are refused",
            |stand| Box::pin(vanished(stand)),
        ),
        Scenario::new(PART, "restarted cold", |stand| Box::pin(restarted(stand))).in_short_form(),
        Scenario::new(PART, "frozen: accepts and never answers", |stand| {
            Box::pin(frozen(stand, Frozen::Whole, LoadPlan::default()))
        }),
        Scenario::new(PART, "frozen, all answers come whole", |stand| {
            let plan = LoadPlan {
                streams_every: u64::MAX,
                ..LoadPlan::default()
            };
            Box::pin(frozen(stand, Frozen::Whole, plan))
        }),
        Scenario::new(PART, "frozen, long prompts of which it has the most", |stand| {
            Box::pin(frozen(stand, Frozen::Whole, long_prompts()))
        }),
        Scenario::new(PART, "frozen, clients give up after 2 s", |stand| {
            Box::pin(given_up(stand, Frozen::Whole))
        }),
        Scenario::new(
            PART,
            "frozen, metrics still answer, clients give up after 2 s",
            |stand| Box::pin(given_up(stand, Frozen::ButMetrics)),
        ),
        Scenario::new(PART, "frozen, metrics still answer", |stand| {
            Box::pin(frozen(stand, Frozen::ButMetrics, long_prompts()))
        }),
    ];
    scenarios.extend(answers::scenarios());
    scenarios.extend(metrics::scenarios());
    scenarios
}

async fn killed(stand: &Stand) -> Result<Seen, FaultError> {
    let lasting = stand.long_or_short(Duration::from_secs(6), Duration::from_secs(3));
    let hit = Hit::play(stand, LoadPlan::default(), lasting, async |victim| {
        victim.stop().await;
    })
    .await?;
    let last = hit.last_chosen();
    let mut seen = hit.seen();
    seen.recovery = stand.is_filtered().then(|| nothing_sent(last));
    Ok(seen)
}

/// Between two loads, so that no request tells of it and only the metrics can.
async fn killed_unnoticed(stand: &Stand) -> Result<Seen, FaultError> {
    let mut fleet = stand.fleet(4, engine()).await?;
    let gateway = stand.ready(&stand.config_of(&fleet), 4).await?;
    let load = Load::start(&gateway, LoadPlan::default());
    tokio::time::sleep(WARM_UP).await;
    let mut sent = load.stop().await;
    let number = busiest(&fleet);
    let victim = &mut fleet.replicas[number];
    let address = victim.address().to_string();
    let chosen = |sent: &[Sent]| {
        let first = sent.iter().filter(|sent| sent.host.as_deref() == Some(&address));
        first.count()
    };
    let before = chosen(&sent);
    victim.stop().await;
    let pause = POLL + Duration::from_secs(1);
    tokio::time::sleep(pause).await;

    let load = Load::start(&gateway, LoadPlan::default());
    tokio::time::sleep(WARM_UP).await;
    let after = load.stop().await;
    let (count, all) = (chosen(&after), after.len());
    sent.extend(after);
    let mut seen = Seen::of(sent);
    if stand.is_filtered() {
        seen.check(before > 0, "nothing was sent to it before");
        seen.check(
            count == 0,
            format!("{count} of {all} requests were sent to it first"),
        );
        seen.note = format!(
            "{} ms later, {count} of {all} requests were sent to it first",
            pause.as_millis()
        );
    }
    Ok(seen)
}

async fn vanished(stand: &Stand) -> Result<Seen, FaultError> {
    let hit = Hit::play(
        stand,
        LoadPlan::default(),
        Duration::from_secs(7),
        async |victim| {
            hang(victim);
            victim.close_listener();
        },
    )
    .await?;
    let (hung, last, at) = (hit.hung(), hit.last_post(), hit.at);
    let mut seen = hit.seen();
    // A request on a connection that was open cannot know, and how many there are is chance on both sides; later ones can.
    for sent in &mut seen.sent {
        sent.is_lost_with_engine |= sent.end == End::Hung && sent.at < at + POLL + Duration::from_secs(1);
    }
    seen.check(hung > 0, "nothing was caught on its connections");
    seen.note = format!("{hung} requests hung on it");
    seen.recovery = stand.is_filtered().then(|| nothing_sent(last));
    Ok(seen)
}

/// Between two loads, so that no failure tells of the restart and only the metrics can.
async fn restarted(stand: &Stand) -> Result<Seen, FaultError> {
    let mut fleet = stand.fleet(4, engine()).await?;
    let gateway = stand.ready(&stand.config_of(&fleet), 4).await?;
    // Whole answers tell how much of the prompt was cached.
    let plan = LoadPlan {
        streams_every: u64::MAX,
        ..LoadPlan::default()
    };
    let load = Load::start(&gateway, plan.clone());
    tokio::time::sleep(WARM_UP).await;
    let mut sent = load.stop().await;
    let restarts = "warmroute_engine_restarts_total";
    let seen_before = stand.is_filtered().then_some(gateway.stat(restarts).await?);
    let number = busiest(&fleet);
    let victim = &mut fleet.replicas[number];
    let address = victim.address().to_string();
    let believed = sent
        .iter()
        .any(|sent| sent.host.as_deref() == Some(&address) && sent.matched_bytes > Some(0));
    victim.restart().await?;

    let load = Load::start(&gateway, plan);
    tokio::time::sleep(stand.long_or_short(Duration::from_secs(4), Duration::from_millis(1700))).await;
    let after = load.stop().await;
    let false_claims: Vec<&Sent> = after
        .iter()
        .filter(|sent| sent.replica.as_deref() == Some(fleet.replicas[number].name()))
        .filter(|sent| sent.matched_bytes > Some(0) && sent.cached_tokens == Some(0))
        .collect();
    let took = false_claims.iter().map(|sent| sent.at).max().unwrap_or_default();
    let count = false_claims.len();
    let kept_away = after.iter().all(|sent| sent.host.as_deref() != Some(&address));
    sent.extend(after);
    let mut seen = Seen::of(sent);
    if let Some(seen_before) = seen_before {
        seen.check(believed, "nothing was believed of its cache before");
        seen.check(!kept_away, "nothing was sent to it afterwards");
        eventually("the restart is seen", async || {
            Ok(gateway.stat(restarts).await? > seen_before)
        })
        .await?;
        seen.note = format!("{count} requests sent to it for what it had lost");
        seen.recovery = Some(Recovery {
            until: "nothing was believed of its old cache",
            took: Some(took),
            within: Some(POLL + Duration::from_secs(1)),
        });
    }
    Ok(seen)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Frozen {
    Whole,
    /// As an engine whose scheduler hangs behind a server that does not.
    ButMetrics,
}

async fn frozen(stand: &Stand, how: Frozen, plan: LoadPlan) -> Result<Seen, FaultError> {
    frozen_for(stand, Duration::from_secs(8), how, plan).await
}

/// Those who waited leave, so that after a while nobody waits who could tell the others.
async fn given_up(stand: &Stand, how: Frozen) -> Result<Seen, FaultError> {
    let plan = LoadPlan {
        deadline: Duration::from_secs(2),
        ..LoadPlan::default()
    };
    frozen_for(stand, Duration::from_secs(20), how, plan).await
}

async fn frozen_for(
    stand: &Stand,
    lasting: Duration,
    how: Frozen,
    plan: LoadPlan,
) -> Result<Seen, FaultError> {
    let hit = Hit::play(stand, plan, lasting, async |victim| {
        victim.set_fault(Fault::Hang);
        if how == Frozen::Whole {
            hang(victim);
        }
    })
    .await?;
    let (hung, last) = (hit.hung(), hit.last_post());
    let late = hit.posts_after(POLL + Duration::from_secs(1));
    let mut seen = hit.seen();
    seen.check(hung > 0, "nothing hung");
    seen.note = format!("{hung} requests hung, {late} of them sent more than one poll and 1 s after");
    seen.recovery = stand.is_filtered().then(|| nothing_sent(last));
    Ok(seen)
}

/// Conversations of which all but the end is cached: what pulls hardest to the engine that has them.
fn long_prompts() -> LoadPlan {
    LoadPlan {
        prefixes: 12,
        prefix_bytes: 64 << 10,
        ..LoadPlan::default()
    }
}

/// An engine that holds all beginnings and computes even a long one within the warm-up.
fn engine() -> EngineConfig {
    EngineConfig {
        cache_blocks: 1 << 15,
        prefill_tokens_per_s: 100_000,
        ..EngineConfig::default()
    }
}

fn hang(victim: &Replica) {
    victim.set_fault(Fault::Hang);
    victim.set_metrics_fault(Fault::Hang);
    victim.set_health_fault(Fault::Hang);
}

fn nothing_sent(last: Duration) -> Recovery {
    Recovery {
        until: "nothing was sent to it any more",
        took: Some(last),
        within: Some(POLL + Duration::from_secs(1)),
    }
}

/// The busiest of four engines under load, to which something happens, and what became of the requests.
struct Hit {
    sent: Vec<Sent>,
    /// When it happened, by the clock of the load.
    at: Duration,
    address: String,
    /// Posts it had received at times after it happened.
    posts: Vec<(Duration, u64)>,
    /// By how much Envoy's resident memory was larger at the end than when it happened.
    grown_kb: u64,
}

impl Hit {
    async fn play(
        stand: &Stand,
        plan: LoadPlan,
        lasting: Duration,
        strike: impl AsyncFnOnce(&mut Replica),
    ) -> Result<Self, FaultError> {
        Self::play_on(stand, engine(), plan, lasting, strike).await
    }

    async fn play_on(
        stand: &Stand,
        engine: EngineConfig,
        plan: LoadPlan,
        lasting: Duration,
        strike: impl AsyncFnOnce(&mut Replica),
    ) -> Result<Self, FaultError> {
        let mut fleet = stand.fleet(4, engine).await?;
        let gateway = stand.ready(&stand.config_of(&fleet), 4).await?;
        let load = Load::start(&gateway, plan);
        tokio::time::sleep(WARM_UP).await;
        let number = busiest(&fleet);
        let victim = &mut fleet.replicas[number];
        let before = victim.posts_received();
        let resident_kb = gateway.resident_kb()?;
        let at = load.elapsed();
        strike(victim).await;
        let mut posts = vec![(Duration::ZERO, before)];
        while load.elapsed() < at + lasting {
            tokio::time::sleep(Duration::from_millis(20)).await;
            posts.push((load.elapsed() - at, victim.posts_received()));
        }
        let (address, replica) = (victim.address().to_string(), victim.name().to_owned());
        let grown_kb = gateway.resident_kb()?.saturating_sub(resident_kb);
        let sent = load.stop().await;
        if before == 0 {
            return Err(FaultError::Never(format!("{replica} had traffic before")));
        }
        Ok(Self {
            sent,
            at,
            address,
            posts,
            grown_kb,
        })
    }

    /// All requests; those that were on the engine when it happened and failed are lost with it.
    fn seen(mut self) -> Seen {
        lost_with_engine(&mut self.sent, self.at);
        Seen::of(self.sent)
    }

    /// When, after it happened, the filter last chose the engine first, for a request that was answered.
    fn last_chosen(&self) -> Duration {
        let chosen = self
            .sent
            .iter()
            .filter(|sent| sent.host.as_deref() == Some(&self.address) && sent.at > self.at);
        chosen.map(|sent| sent.at - self.at).max().unwrap_or_default()
    }

    /// When, after it happened, it last received a request.
    fn last_post(&self) -> Duration {
        let pairs = self.posts.iter().zip(self.posts.iter().skip(1));
        let grew = pairs.filter(|(before, now)| now.1 > before.1);
        grew.map(|(_, now)| now.0).max().unwrap_or_default()
    }

    /// Requests that it received later than this after it happened.
    fn posts_after(&self, after: Duration) -> u64 {
        let count = |at: usize| self.posts.get(at).map_or(0, |posts| posts.1);
        let first = self.posts.partition_point(|(at, _)| *at <= after);
        count(self.posts.len() - 1) - count(first.saturating_sub(1))
    }

    /// Requests that it received in the last second.
    fn posts_in_last_second(&self) -> u64 {
        let end = self.posts.last().map(|posts| posts.0).unwrap_or_default();
        self.posts_after(end.saturating_sub(Duration::from_secs(1)))
    }

    /// Its share of what was sent after it happened, in percent; attempts that were then made elsewhere count as its own.
    fn share_of_posts(&self) -> u64 {
        let sent = self.sent.iter().filter(|sent| sent.at > self.at).count() as u64;
        self.posts_after(Duration::ZERO) * 100 / sent.max(1)
    }

    /// Requests that were sent after it happened and hung.
    fn hung(&self) -> usize {
        let hung = |sent: &&Sent| sent.at > self.at && sent.end == End::Hung;
        self.sent.iter().filter(hung).count()
    }
}

/// Marks what was in flight when an engine went away and failed: on that engine, nothing could have saved it.
fn lost_with_engine(sent: &mut [Sent], at: Duration) {
    for sent in sent {
        sent.is_lost_with_engine = sent.at < at && sent.at + sent.took >= at && sent.has_failed();
    }
}

const PART: &str = "engine";
/// Long enough for every beginning to be in a cache.
const WARM_UP: Duration = Duration::from_secs(2);
