//! The second workload of the calibration: on the servers, and the same arrivals in the model.

use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{Duration, sleep_until};

use super::{Options, Random, Server, load_average};
use crate::engine::{Engine, EngineModel, EventKind, Fit, Prompt};

/// The checking workload, on the servers and in the model.
pub(super) async fn check(
    servers: &[Server],
    model: &EngineModel,
    fit: &Fit,
    options: &Options,
) -> Result<Checked, String> {
    let mut random = Random::new(77);
    let documents: Vec<_> = (0..DOCUMENTS)
        .map(|_| {
            let tokens = 1_000 + random.below(3_000);
            random.tokens(tokens)
        })
        .collect();
    let mut running = JoinSet::new();
    let begins = tokio::time::Instant::now();
    let mut arrives_s = 0.0;
    for number in 0..options.requests * servers.len() {
        arrives_s += -(1.0 - random.unit()).ln() / (options.rate_per_s * servers.len() as f64);
        // The first documents are asked about more often than the last.
        let document = &documents[random.below(DOCUMENTS).min(random.below(DOCUMENTS))];
        let mut prompt = document.clone();
        let own = 100 + random.below(900);
        prompt.extend(random.tokens(own));
        let (at, output_tokens) = (random.below(servers.len()), 8 + random.below(40));
        let server = servers[at].clone();
        running.spawn(async move {
            sleep_until(begins + Duration::from_secs_f64(arrives_s)).await;
            let sample = server.ask(prompt.clone(), output_tokens).await?;
            Ok::<_, String>((number, at, prompt, sample))
        });
    }
    let mut asked = Vec::new();
    while let Some(sample) = running.join_next().await {
        asked.push(sample.map_err(|error| error.to_string())??);
    }
    asked.sort_by_key(|(number, _, _, sample)| (sample.sent_us, *number));

    let mut checked = Checked::default();
    for at in 0..servers.len() {
        let mut engine = Engine::new(model.clone());
        let (mut events, mut samples) = (Vec::new(), Vec::new());
        for (_, _, prompt, sample) in asked.iter().filter(|(_, to, _, _)| *to == at) {
            engine.advance_into(sample.sent_us, &mut events);
            let prompt = Prompt::from_token_ids(prompt, model.block_tokens);
            let id = engine.submit(sample.sent_us, prompt, sample.tokens.len());
            samples.push((
                id.map_err(|refusal| format!("the model refuses: {refusal:?}"))?,
                sample,
            ));
        }
        engine.advance_into(u64::MAX / 2, &mut events);
        for (id, sample) in samples {
            let predicted = events.iter().find_map(|event| match event.kind {
                EventKind::Prefilled { cached_tokens } if event.id == id => {
                    Some((event.at_us, cached_tokens))
                }
                _ => None,
            });
            let (at_us, cached_tokens) = predicted.ok_or("the model lost a request")?;
            checked.rows.push(Row {
                prompt_tokens: sample.prompt_tokens,
                cached_tokens: [sample.cached_tokens, cached_tokens],
                ttft_us: [
                    sample.ttft_us(),
                    (at_us - sample.sent_us) as f64 + fit.front_end_us,
                ],
            });
        }
    }
    Ok(checked)
}

/// One request of the check: measured, predicted.
#[derive(Debug)]
struct Row {
    prompt_tokens: usize,
    cached_tokens: [usize; 2],
    ttft_us: [f64; 2],
}

#[derive(Debug, Default)]
pub(super) struct Checked {
    rows: Vec<Row>,
}

impl Checked {
    /// Cached share of all prompt tokens, percent.
    fn hit_share(&self, side: usize) -> f64 {
        let cached: usize = self.rows.iter().map(|row| row.cached_tokens[side]).sum();
        let prompt: usize = self.rows.iter().map(|row| row.prompt_tokens).sum();
        100.0 * cached as f64 / prompt.max(1) as f64
    }

    fn mean_ttft_ms(&self, side: usize) -> f64 {
        let sum: f64 = self.rows.iter().map(|row| row.ttft_us[side]).sum();
        sum / 1e3 / self.rows.len().max(1) as f64
    }

    fn ttft_ms(&self, side: usize, percent: usize) -> f64 {
        let mut sorted: Vec<_> = self.rows.iter().map(|row| row.ttft_us[side]).collect();
        sorted.sort_by(f64::total_cmp);
        let at = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
        sorted.get(at).map_or(0.0, |us| us / 1e3)
    }

    fn hit_error_points(&self) -> f64 {
        self.hit_share(1) - self.hit_share(0)
    }

    fn ttft_error_percent(&self) -> f64 {
        100.0 * (self.mean_ttft_ms(1) / self.mean_ttft_ms(0) - 1.0)
    }

    pub(super) fn holds(&self) -> bool {
        self.hit_error_points().abs() <= HIT_BAR_POINTS && self.ttft_error_percent().abs() <= TTFT_BAR_PERCENT
    }

    pub(super) fn table(&self) -> String {
        let mut out = format!(
            "{} requests        measured  predicted     error\n",
            self.rows.len()
        );
        out.push_str(&format!(
            "hit share, %       {:>9.1}  {:>9.1}  {:>+8.2} points (bar {HIT_BAR_POINTS})\n",
            self.hit_share(0),
            self.hit_share(1),
            self.hit_error_points(),
        ));
        out.push_str(&format!(
            "mean TTFT, ms      {:>9.1}  {:>9.1}  {:>+8.1} % (bar {TTFT_BAR_PERCENT})\n",
            self.mean_ttft_ms(0),
            self.mean_ttft_ms(1),
            self.ttft_error_percent(),
        ));
        for percent in [50, 90] {
            let (measured, predicted) = (self.ttft_ms(0, percent), self.ttft_ms(1, percent));
            let error = 100.0 * (predicted / measured - 1.0);
            out.push_str(&format!(
                "p{percent} TTFT, ms       {measured:>9.1}  {predicted:>9.1}  {error:>+8.1} %\n"
            ));
        }
        out
    }

    /// Writes everything as JSON.
    pub(super) fn write_report(&self, report: &str, fit: &Fit) -> Result<(), String> {
        let rows: Vec<_> = self
            .rows
            .iter()
            .map(|row| {
                json!({"prompt_tokens": row.prompt_tokens, "cached_measured": row.cached_tokens[0],
                    "cached_predicted": row.cached_tokens[1], "ttft_us_measured": row.ttft_us[0],
                    "ttft_us_predicted": row.ttft_us[1]})
            })
            .collect();
        let times = fit.times;
        let content = json!({
            "front_end_us": fit.front_end_us, "base_us": times.base_us, "prefill_token_us": times.prefill_token_us,
            "prefill_pair_us": times.prefill_pair_us, "decode_us": times.decode_us,
            "decode_context_us": times.decode_context_us, "median_error": fit.median_error,
            "hit_share_measured": self.hit_share(0), "hit_share_predicted": self.hit_share(1),
            "mean_ttft_ms_measured": self.mean_ttft_ms(0), "mean_ttft_ms_predicted": self.mean_ttft_ms(1),
            "holds": self.holds(), "load_average": load_average(), "rows": rows,
        });
        let path = std::path::Path::new(report);
        let written = path
            .parent()
            .map_or(Ok(()), std::fs::create_dir_all)
            .and_then(|()| std::fs::write(path, format!("{content:#}\n")));
        written.map_err(|error| format!("{report}: {error}"))
    }
}

/// Documents of 2 500 tokens on average, so that not all fit a cache of 16 384.
const DOCUMENTS: usize = 8;
const HIT_BAR_POINTS: f64 = 3.0;
const TTFT_BAR_PERCENT: f64 = 25.0;
