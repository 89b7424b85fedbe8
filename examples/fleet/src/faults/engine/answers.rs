//! Engines that answer badly: slowly, with refusals, or not to the end.

use std::time::Duration;

use super::{FaultError, Hit, LoadPlan, PART, Scenario, Seen, Stand, engine};
use crate::engine::EngineConfig;
use crate::faults::End;
use crate::replica::Fault;

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        Scenario::new(
            PART,
            "ten times as slow, where prompts cost next to nothing",
            |stand| Box::pin(slow(stand, engine())),
        ),
        Scenario::new(
            PART,
            "ten times as slow, where the others compute 10 000 tokens a second",
            |stand| {
                let engine = EngineConfig {
                    prefill_tokens_per_s: 10_000,
                    ..engine()
                };
                Box::pin(slow(stand, engine))
            },
        ),
        Scenario::new(PART, "resets each stream after its first token", |stand| {
            Box::pin(cuts(stand))
        }),
        Scenario::new(PART, "resets each request before the answer", |stand| {
            Box::pin(resets(stand))
        }),
        Scenario::new(PART, "answers 503 at once", |stand| Box::pin(refuses(stand))).in_short_form(),
        Scenario::new(PART, "answers 500 at once", |stand| Box::pin(fails(stand))),
    ]
}

async fn slow(stand: &Stand, engine: EngineConfig) -> Result<Seen, FaultError> {
    let hit = Hit::play_on(stand, engine, LoadPlan::default(), LASTING, async |victim| {
        victim.set_slow_factor(10.0);
    })
    .await?;
    let after: Vec<Duration> = hit
        .sent
        .iter()
        .filter(|sent| sent.at > hit.at)
        .map(|sent| sent.took)
        .collect();
    let mean = after.iter().sum::<Duration>() / after.len().max(1) as u32;
    let share = hit.share_of_posts();
    let mut seen = hit.seen();
    seen.note = format!(
        "{share} % of the requests went to it, mean time {} ms",
        mean.as_millis()
    );
    Ok(seen)
}

async fn cuts(stand: &Stand) -> Result<Seen, FaultError> {
    let plan = LoadPlan {
        streams_every: 1,
        ..LoadPlan::default()
    };
    let hit = Hit::play(stand, plan, LASTING, async |victim| victim.set_fault(Fault::Cut)).await?;
    let (share, last) = (hit.share_of_posts(), hit.posts_in_last_second());
    let cut = hit
        .sent
        .iter()
        .filter(|sent| matches!(sent.end, End::Cut(_)))
        .count();
    let mut seen = hit.seen();
    seen.check(cut > 0, "no stream was cut");
    seen.note = format!("{cut} streams cut; {share} % of the requests went to it, {last} in the last second");
    Ok(seen)
}

async fn resets(stand: &Stand) -> Result<Seen, FaultError> {
    failing(stand, Fault::Reset).await
}

/// Retried by the shipped route.
async fn refuses(stand: &Stand) -> Result<Seen, FaultError> {
    failing(stand, Fault::Status(503)).await
}

/// Not retried.
async fn fails(stand: &Stand) -> Result<Seen, FaultError> {
    failing(stand, Fault::Status(500)).await
}

/// A host that fails quickly has nothing in flight and must not draw traffic by that.
async fn failing(stand: &Stand, fault: Fault) -> Result<Seen, FaultError> {
    let lasting = stand.long_or_short(LASTING, Duration::from_millis(1500));
    let hit = Hit::play(stand, LoadPlan::default(), lasting, async |victim| {
        victim.set_fault(fault)
    })
    .await?;
    let (share, posts) = (hit.share_of_posts(), hit.posts_after(Duration::ZERO));
    let mut seen = hit.seen();
    seen.check(posts > 0, "nothing was sent to it");
    if stand.is_filtered() {
        seen.check(
            share <= FAIR_SHARE,
            format!("{share} % of the requests went to it"),
        );
    }
    seen.note = format!("{share} % of the requests went to it");
    Ok(seen)
}

const LASTING: Duration = Duration::from_secs(5);
/// What one of four engines gets that all work, in percent.
const FAIR_SHARE: u64 = 25;
