//! The second workload of the calibration: on the servers, and the same arrivals in the model.

use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{Duration, sleep_until};

use super::{Options, Random, Sample, Server, load_average};
use crate::engine::{Engine, EngineModel, EventKind, Fit, FrontEnd, Prompt};

/// The checking workload as it went on the servers.
pub(super) struct Asked {
    requests: Vec<AskedRequest>,
    servers: usize,
    /// By the engines' own clocks, of all requests together.
    queue_s: f64,
    prefill_s: f64,
}

struct AskedRequest {
    server: usize,
    prompt: Vec<u32>,
    sample: Sample,
}

impl Asked {
    /// Asks the servers.
    pub(super) async fn from_servers(
        servers: &[Server],
        options: &Options,
        seed: u64,
    ) -> Result<Self, String> {
        let mut random = Random::new(77 + seed);
        let documents: Vec<_> = (0..DOCUMENTS)
            .map(|_| {
                let tokens = 1_000 + random.below(3_000);
                random.tokens(tokens)
            })
            .collect();
        let clocks_before = engine_clocks(servers).await?;
        let mut running = JoinSet::new();
        let begins = tokio::time::Instant::now();
        let mut arrives_s = 0.0;
        for _ in 0..options.requests * servers.len() {
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
                Ok::<_, String>(AskedRequest {
                    server: at,
                    prompt,
                    sample,
                })
            });
        }
        let mut asked = Self {
            requests: Vec::new(),
            servers: servers.len(),
            queue_s: 0.0,
            prefill_s: 0.0,
        };
        while let Some(request) = running.join_next().await {
            asked.requests.push(request.map_err(|error| error.to_string())??);
        }
        asked.requests.sort_by_key(|request| request.sample.sent_us);
        for (before, after) in clocks_before.iter().zip(engine_clocks(servers).await?) {
            asked.queue_s += after[0] - before[0];
            asked.prefill_s += after[1] - before[1];
        }
        Ok(asked)
    }

    /// Replays the same arrivals through the model.
    pub(super) fn check(&self, model: &EngineModel, front_end: FrontEnd) -> Result<Checked, String> {
        let mut checked = Checked {
            rows: Vec::new(),
            queue_s: self.queue_s,
            prefill_s: self.prefill_s,
        };
        for server in 0..self.servers {
            let mut engine = Engine::with_front_end(model.clone(), front_end);
            let (mut events, mut samples) = (Vec::new(), Vec::new());
            for request in self.requests.iter().filter(|request| request.server == server) {
                let sample = &request.sample;
                engine.advance_into(sample.sent_us, &mut events);
                let prompt = Prompt::from_token_ids(&request.prompt, model.block_tokens);
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
                    server,
                    prompt_tokens: sample.prompt_tokens,
                    cached_tokens: [sample.cached_tokens, cached_tokens],
                    ttft_us: [sample.ttft_us(), (at_us - sample.sent_us) as f64],
                });
            }
        }
        Ok(checked)
    }
}

/// Seconds that requests waited in each engine, and that their prefill took, since it began.
async fn engine_clocks(servers: &[Server]) -> Result<Vec<[f64; 2]>, String> {
    let mut clocks = Vec::new();
    for server in servers {
        let url = format!("{}/metrics", server.url);
        let answer = server.client.get(&url).await;
        let text = answer.map_err(|error| format!("{url}: {error}"))?.text();
        clocks.push(
            ["queue", "prefill"].map(|part| sum_of(&text, &format!("vllm:request_{part}_time_seconds_sum"))),
        );
    }
    Ok(clocks)
}

/// The values of a metric, added up.
fn sum_of(text: &str, name: &str) -> f64 {
    let values = text.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let is_name = rest.starts_with(['{', ' ']);
        is_name.then(|| rest.rsplit(' ').next()?.parse::<f64>().ok())?
    });
    values.sum()
}

/// One request of the check: measured, predicted.
#[derive(Debug)]
struct Row {
    server: usize,
    prompt_tokens: usize,
    cached_tokens: [usize; 2],
    ttft_us: [f64; 2],
}

#[derive(Debug, Default)]
pub(super) struct Checked {
    rows: Vec<Row>,
    /// By the engines' own clocks, of all requests together.
    queue_s: f64,
    prefill_s: f64,
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

    /// Error of one server's mean TTFT.
    fn ttft_error_percent_of(&self, server: usize) -> f64 {
        let sum = |side: usize| -> f64 {
            let rows = self.rows.iter().filter(|row| row.server == server);
            rows.map(|row| row.ttft_us[side]).sum()
        };
        100.0 * (sum(1) / sum(0).max(1.0) - 1.0)
    }

    fn servers(&self) -> usize {
        self.rows.iter().map(|row| row.server + 1).max().unwrap_or(0)
    }

    fn holds(&self) -> bool {
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
        for server in 0..self.servers() {
            let error = self.ttft_error_percent_of(server);
            out.push_str(&format!(
                "mean TTFT of server {}                    {error:>+8.1} %\n",
                server + 1
            ));
        }
        let requests = self.rows.len().max(1) as f64;
        let (queue_ms, prefill_ms) = (1e3 * self.queue_s / requests, 1e3 * self.prefill_s / requests);
        out.push_str(&format!(
            "measured TTFT is {queue_ms:.1} ms in the engine's queue, {prefill_ms:.1} in prefill, {:.1} outside\n",
            self.mean_ttft_ms(0) - queue_ms - prefill_ms
        ));
        out
    }

    fn json(&self, fit: &Fit) -> serde_json::Value {
        let rows: Vec<_> = self
            .rows
            .iter()
            .map(|row| {
                json!({"server": row.server, "prompt_tokens": row.prompt_tokens,
                    "cached_measured": row.cached_tokens[0], "cached_predicted": row.cached_tokens[1],
                    "ttft_us_measured": row.ttft_us[0], "ttft_us_predicted": row.ttft_us[1]})
            })
            .collect();
        let times = fit.times;
        json!({
            "front_end_us": fit.front_end_us, "front_end_token_us": fit.front_end_token_us,
            "base_us": times.base_us, "prefill_token_us": times.prefill_token_us,
            "prefill_pair_us": times.prefill_pair_us, "decode_us": times.decode_us,
            "decode_context_us": times.decode_context_us, "median_error": fit.median_error,
            "hit_share_measured": self.hit_share(0), "hit_share_predicted": self.hit_share(1),
            "mean_ttft_ms_measured": self.mean_ttft_ms(0), "mean_ttft_ms_predicted": self.mean_ttft_ms(1),
            "engine_queue_s": self.queue_s, "engine_prefill_s": self.prefill_s,
            "holds": self.holds(), "rows": rows,
        })
    }
}

/// Whether every run holds the bars.
pub(super) fn hold(runs: &[(Fit, Checked)]) -> bool {
    runs.iter().all(|(_, checked)| checked.holds())
}

/// Median and range of the errors over the runs.
pub(super) fn summary(runs: &[(Fit, Checked)]) -> String {
    let spread = |error: &dyn Fn(&Checked) -> f64| {
        let mut errors: Vec<_> = runs.iter().map(|(_, checked)| error(checked)).collect();
        errors.sort_by(f64::total_cmp);
        let at = |index: usize| errors.get(index).copied().unwrap_or(0.0);
        let last = errors.len().saturating_sub(1);
        format!("median {:+.2}, {:+.2} to {:+.2}", at(last / 2), at(0), at(last))
    };
    format!(
        "error over {} runs: hit share, points: {}; mean TTFT, %: {}\n",
        runs.len(),
        spread(&Checked::hit_error_points),
        spread(&Checked::ttft_error_percent)
    )
}

/// Writes all runs as JSON.
pub(super) fn write_report(report: &str, runs: &[(Fit, Checked)]) -> Result<(), String> {
    let runs: Vec<_> = runs.iter().map(|(fit, checked)| checked.json(fit)).collect();
    let content = json!({"load_average": load_average(), "runs": runs});
    let path = std::path::Path::new(report);
    let written = path
        .parent()
        .map_or(Ok(()), std::fs::create_dir_all)
        .and_then(|()| std::fs::write(path, format!("{content:#}\n")));
    written.map_err(|error| format!("{report}: {error}"))
}

/// Documents of 2 500 tokens on average, so that not all fit a cache of 16 384.
const DOCUMENTS: usize = 8;
const HIT_BAR_POINTS: f64 = 3.0;
const TTFT_BAR_PERCENT: f64 = 25.0;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::EngineConfig;

    fn checked(rows: &[(usize, f64, f64)]) -> Checked {
        let rows = rows.iter().map(|(server, measured, predicted)| Row {
            server: *server,
            prompt_tokens: 100,
            cached_tokens: [50, 52],
            ttft_us: [*measured, *predicted],
        });
        Checked {
            rows: rows.collect(),
            ..Checked::default()
        }
    }

    #[test]
    fn errors_are_of_means_and_shares() {
        let checked = checked(&[(0, 1_000.0, 900.0), (1, 3_000.0, 2_300.0)]);
        assert!((checked.ttft_error_percent() + 20.0).abs() < 1e-9);
        assert!((checked.ttft_error_percent_of(0) + 10.0).abs() < 1e-9);
        assert!((checked.hit_error_points() - 2.0).abs() < 1e-9);
        assert!(checked.holds());
    }

    #[test]
    fn a_mean_a_third_too_low_does_not_hold() {
        assert!(!checked(&[(0, 900.0, 600.0)]).holds());
    }

    #[test]
    fn sums_of_histograms_are_found_by_their_whole_name() {
        let text = "# HELP vllm:q_sum x\nvllm:q_sum{a=\"b c\"} 1.5\nvllm:q_sum_more 7\nvllm:q_sum 2\n";
        assert_eq!(sum_of(text, "vllm:q_sum"), 3.5);
    }

    #[test]
    fn the_replay_shares_prefixes_and_keeps_servers_apart() {
        let request = |server, sent_us| AskedRequest {
            server,
            prompt: (0..1_000).collect(),
            sample: Sample {
                sent_us,
                prompt_tokens: 1_000,
                cached_tokens: 0,
                tokens: vec![sent_us + 2_000],
            },
        };
        let asked = Asked {
            requests: vec![request(0, 0), request(1, 10), request(0, 900_000)],
            servers: 2,
            queue_s: 0.0,
            prefill_s: 0.0,
        };
        let model = EngineModel::from(EngineConfig {
            prefill_tokens_per_s: 1_000_000,
            decode_us_per_token: 0,
            ..EngineConfig::default()
        });
        let front_end = FrontEnd {
            request_us: 500.0,
            ..FrontEnd::default()
        };
        let checked = asked.check(&model, front_end).unwrap();
        let predicted: Vec<_> = checked
            .rows
            .iter()
            .map(|row| (row.server, row.cached_tokens[1], row.ttft_us[1]))
            .collect();
        assert_eq!(predicted, [(0, 0, 1_500.0), (0, 992, 508.0), (1, 0, 1_500.0)]);
    }
}
