//! Real vLLM servers, given by URL → coefficients of the engine model, and how well the model then predicts them.
//!
//! Two workloads, both on all servers at once: one of single prompts, of small groups that decode together and of prompts
//! that arrive while another decodes, to fit the coefficients; the other of prompts with shared prefixes that arrive at
//! random, to check them. The check replays the same arrivals through the model and compares hit share and mean time to
//! first token; nothing of it enters the fit. Half of the first workload runs before the second and half after, so that a
//! machine that changes its pace is met on both sides. Prompts are random token ids, so that
//! nothing is hit by chance. Servers must be idle, started with `--enable-prompt-tokens-details`, and each pinned to cores
//! of its own: the model knows no time that one server takes from another.

use std::time::Instant;

use bytes::BytesMut;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::Duration;

use crate::client::{Client, full, post_request};
use crate::engine::{EngineModel, Fit, Observation};

mod check;

use check::Asked;

/// Runs with the given command line; says whether the model predicts well enough.
///
/// # Errors
/// Says in words what is wrong with the command line, a server or the report.
pub async fn run(arguments: impl Iterator<Item = String>) -> Result<bool, String> {
    let options = Options::read(arguments)?;
    let mut servers = Vec::new();
    for (number, url) in options.urls.iter().enumerate() {
        servers.push(Server::find(url, number as u64, Instant::now()).await?);
    }
    let (cache_blocks, block_tokens) = (servers[0].cache_blocks, servers[0].block_tokens);
    if servers
        .iter()
        .any(|s| (s.cache_blocks, s.block_tokens) != (cache_blocks, block_tokens))
    {
        return Err("the servers' caches differ".to_owned());
    }
    println!(
        "{} servers, {cache_blocks} blocks of {block_tokens} tokens, load {}",
        servers.len(),
        load_average()
    );

    let mut rounds = Vec::new();
    for number in 0..options.runs {
        let seed = number as u64;
        let mut observations = observe_all(&servers, &options, 2 * seed).await?;
        let asked = Asked::from_servers(&servers, &options, seed).await?;
        observations.extend(observe_all(&servers, &options, 2 * seed + 1).await?);
        let fit = Fit::of(&observations).ok_or("too few observations")?;
        println!(
            "run {}: {} observations, median error {:.1} %",
            number + 1,
            observations.len(),
            100.0 * fit.median_error
        );
        println!(
            "front end {:.0} us and {:.2} us a prompt token\n{:#?}",
            fit.front_end_us, fit.front_end_token_us, fit.times
        );
        let model = EngineModel {
            // vLLM keeps one block for itself (`null_block` in `vllm/v1/core/block_pool.py`).
            cache_blocks: cache_blocks - 1,
            block_tokens,
            max_running: options.max_running,
            step_tokens: options.step_tokens,
            times: fit.times,
            speed: 1.0,
        };
        let checked = asked.check(&model, fit.front_end(options.shares_core))?;
        println!("{}", checked.table());
        rounds.push((fit, checked));
    }
    println!("{}", check::summary(&rounds));
    check::write_report(&options.report, &rounds)?;
    Ok(check::hold(&rounds))
}

/// The fitting workload, on all servers at once.
async fn observe_all(servers: &[Server], options: &Options, round: u64) -> Result<Vec<Observation>, String> {
    let mut fitting = JoinSet::new();
    for server in servers {
        let (server, options) = (server.clone(), options.clone());
        fitting.spawn(async move { server.observe(&options, round).await });
    }
    let mut observations = Vec::new();
    while let Some(observed) = fitting.join_next().await {
        observations.extend(observed.map_err(|error| error.to_string())??);
    }
    Ok(observations)
}

#[derive(Debug, Clone)]
struct Options {
    urls: Vec<String>,
    step_tokens: usize,
    max_running: usize,
    /// How often to fit and check, each time with other prompts.
    runs: usize,
    /// Repetitions of the fitting workload on each side of the checking one.
    repetitions: usize,
    /// Requests a server in the checking workload.
    requests: usize,
    /// Their arrival rate, a server.
    rate_per_s: f64,
    /// Whether a server's front end runs on the core of its engine.
    shares_core: bool,
    report: String,
}

impl Options {
    fn read(arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            urls: Vec::new(),
            step_tokens: 2048,
            max_running: 32,
            runs: 3,
            repetitions: 1,
            requests: 60,
            rate_per_s: 0.5,
            shares_core: true,
            report: "target/reports/calibrate.json".to_owned(),
        };
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
            fn number<T: std::str::FromStr>(text: String) -> Result<T, String> {
                text.parse().map_err(|_| format!("`{text}` is no such number"))
            }
            match argument.as_str() {
                "--step-tokens" => options.step_tokens = number(value()?)?,
                "--max-running" => options.max_running = number(value()?)?,
                "--runs" => options.runs = number::<usize>(value()?)?.max(1),
                "--repetitions" => options.repetitions = number(value()?)?,
                "--requests" => options.requests = number(value()?)?,
                "--rate" => options.rate_per_s = number(value()?)?,
                "--separate-front-end" => options.shares_core = false,
                "--report" => options.report = value()?,
                url if url.starts_with("http://") => options.urls.push(url.trim_end_matches('/').to_owned()),
                _ => return Err(format!("unknown argument `{argument}`\n{USAGE}")),
            }
        }
        if options.urls.is_empty() {
            return Err(format!("no server given\n{USAGE}"));
        }
        Ok(options)
    }
}

/// One server under test.
#[derive(Debug, Clone)]
struct Server {
    url: String,
    model: String,
    cache_blocks: usize,
    block_tokens: usize,
    seed: u64,
    origin: Instant,
    client: Client,
}

impl Server {
    async fn find(url: &str, number: u64, origin: Instant) -> Result<Self, String> {
        let client = Client::new().with_deadline(Duration::from_secs(300));
        let get = async |path: &str| {
            let answer = client.get(&format!("{url}{path}")).await;
            answer.map_err(|error| format!("{url}{path}: {error}"))
        };
        let models = get("/v1/models").await?.json();
        let model = models["data"][0]["id"].as_str().ok_or("no model is listed")?;
        let metrics = get("/metrics").await?.text();
        let info = metrics
            .lines()
            .find(|line| line.starts_with("vllm:cache_config_info{"))
            .ok_or("no vllm:cache_config_info")?;
        let label = |name: &str| {
            let rest = info.split_once(&format!("{name}=\"")).map(|(_, rest)| rest);
            let value = rest.and_then(|rest| rest.split('"').next());
            value
                .and_then(|value| value.parse::<usize>().ok())
                .ok_or(format!("no {name}"))
        };
        // Other labels end in `block_size` too: the comma or brace before it tells them apart.
        let block_tokens = label(",block_size").or_else(|_| label("{block_size"))?;
        Ok(Self {
            url: url.to_owned(),
            model: model.to_owned(),
            cache_blocks: label("num_gpu_blocks")?,
            block_tokens,
            seed: number,
            origin,
            client,
        })
    }

    /// The fitting workload: prompts alone, prompts whose beginning is cached, requests that decode together, and prompts
    /// that arrive while another request decodes.
    async fn observe(&self, options: &Options, round: u64) -> Result<Vec<Observation>, String> {
        let mut random = Random::new(1_000 + 100 * round + self.seed);
        self.ask(random.tokens(300), 8).await?;
        let mut observations = Vec::new();
        for _ in 0..options.repetitions {
            for size in PROMPT_SIZES {
                let sample = self.ask(random.tokens(size), 9).await?;
                observations.extend(sample.observations(options));
            }
            let document = random.tokens(SHARED_TOKENS);
            self.ask(document.clone(), 1).await?;
            for (shared, own) in CONTINUATIONS {
                let mut prompt = document[..shared].to_vec();
                prompt.extend(random.tokens(own));
                let sample = self.ask(prompt, 9).await?;
                observations.extend(sample.observations(options));
            }
            for (together, context) in GROUPS {
                let group = (0..together).map(|_| (random.tokens(context), 48));
                let samples = self.ask_together(group.collect()).await?;
                observations.extend(decoding_together(&samples));
            }
            for size in ARRIVALS {
                let (decoding, arriving) = (random.tokens(DECODING_TOKENS), random.tokens(size));
                let decoded = async { self.ask(decoding, 60).await };
                let arrived = async {
                    // While the other decodes: its prefill is over long before, its sixtieth token far off.
                    tokio::time::sleep(Duration::from_millis(400)).await;
                    self.ask(arriving, 1).await
                };
                let (decoded, arrived) = tokio::join!(decoded, arrived);
                observations.extend(mixed_step(&decoded?, &arrived?));
            }
        }
        Ok(observations)
    }

    /// Sends prompts at the same time.
    async fn ask_together(&self, prompts: Vec<(Vec<u32>, usize)>) -> Result<Vec<Sample>, String> {
        let mut group = JoinSet::new();
        for (prompt, output_tokens) in prompts {
            let server = self.clone();
            group.spawn(async move { server.ask(prompt, output_tokens).await });
        }
        let mut samples = Vec::new();
        while let Some(sample) = group.join_next().await {
            samples.push(sample.map_err(|error| error.to_string())??);
        }
        Ok(samples)
    }

    /// Sends one prompt and notes when its tokens come.
    async fn ask(&self, prompt: Vec<u32>, output_tokens: usize) -> Result<Sample, String> {
        let body = json!({"model": self.model, "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": true,
            "temperature": 0.0, "stream": true, "stream_options": {"include_usage": true},
            "return_token_ids": true});
        let url = format!("{}/v1/completions", self.url);
        let request = post_request(&url, &[], full(body.to_string())).map_err(|error| error.to_string())?;
        let sent_us = self.now_us();
        let response = self
            .client
            .send(request)
            .await
            .map_err(|error| error.to_string())?;
        let status = response.status();
        let mut sample = Sample {
            sent_us,
            prompt_tokens: prompt.len(),
            cached_tokens: 0,
            tokens: Vec::new(),
        };
        let (mut body, mut held) = (response.into_body(), BytesMut::new());
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(|error| error.to_string())?.into_data() else {
                continue;
            };
            let at_us = self.now_us();
            held.extend_from_slice(&data);
            while let Some(end) = held.windows(2).position(|pair| pair == b"\n\n") {
                let event = held.split_to(end + 2);
                let event: Value = match event.strip_prefix(b"data: ").map(serde_json::from_slice) {
                    Some(Ok(event)) => event,
                    _ => continue,
                };
                let choice = &event["choices"][0];
                if choice.is_object() {
                    let count = choice["token_ids"].as_array().map_or(1, Vec::len);
                    sample.tokens.extend(std::iter::repeat_n(at_us, count));
                }
                if let Some(cached) = event["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64() {
                    sample.cached_tokens = cached as usize;
                }
            }
        }
        if sample.tokens.is_empty() {
            return Err(format!("{url}: {status}: {}", String::from_utf8_lossy(&held)));
        }
        Ok(sample)
    }

    fn now_us(&self) -> u64 {
        self.origin.elapsed().as_micros() as u64
    }
}

/// One request as it went.
#[derive(Debug, Clone)]
struct Sample {
    sent_us: u64,
    prompt_tokens: usize,
    cached_tokens: usize,
    /// When each token of output came.
    tokens: Vec<u64>,
}

impl Sample {
    fn first_us(&self) -> u64 {
        self.tokens.first().copied().unwrap_or(self.sent_us)
    }

    fn last_us(&self) -> u64 {
        self.tokens.last().copied().unwrap_or(self.sent_us)
    }

    fn ttft_us(&self) -> f64 {
        self.first_us().saturating_sub(self.sent_us) as f64
    }

    /// What a request that was alone says about prefill and about decoding.
    fn observations(&self, options: &Options) -> Vec<Observation> {
        let prefill = Observation::of_prefill(
            self.ttft_us(),
            self.prompt_tokens,
            self.cached_tokens,
            options.step_tokens,
        );
        let gaps = self.tokens.len().saturating_sub(1);
        let mut observations = vec![prefill];
        if gaps > 0 {
            let gap_us = (self.last_us() - self.first_us()) as f64 / gaps as f64;
            let context = self.prompt_tokens + self.tokens.len() / 2;
            observations.push(Observation::of_decode(gap_us, [context]));
        }
        observations
    }
}

/// What requests say about a step while all of them decode.
fn decoding_together(samples: &[Sample]) -> Option<Observation> {
    let from_us = samples.iter().map(Sample::first_us).max()?;
    let to_us = samples.iter().map(Sample::last_us).min()?;
    let inside = |sample: &Sample| {
        let times = sample
            .tokens
            .iter()
            .filter(|at_us| (from_us + 1..=to_us).contains(at_us));
        times.count()
    };
    let steps = samples.iter().map(inside).sum::<usize>() as f64 / samples.len() as f64;
    (steps >= 8.0).then(|| {
        let contexts = samples
            .iter()
            .map(|sample| sample.prompt_tokens + sample.tokens.len() / 2);
        Observation::of_decode((to_us - from_us) as f64 / steps, contexts)
    })
}

/// The step in which a prompt was computed while another request decoded: the longest gap between tokens of that one from
/// the arrival to the first token. `None` where decoding did not go on on both sides of it.
fn mixed_step(decoded: &Sample, arrived: &Sample) -> Option<Observation> {
    let gaps = decoded.tokens.windows(2).enumerate();
    let (number, gap_us) = gaps
        .filter_map(|(number, pair)| match pair {
            [from_us, to_us] if *to_us > arrived.sent_us && *from_us < arrived.first_us() => {
                Some((number, to_us - from_us))
            }
            _ => None,
        })
        .max_by_key(|(_, gap_us)| *gap_us)?;
    let goes_on = arrived.sent_us > decoded.first_us() && arrived.first_us() < decoded.last_us();
    goes_on.then(|| {
        let context = decoded.prompt_tokens + number + 1;
        Observation::of_mixed_step(
            gap_us as f64,
            arrived.prompt_tokens,
            arrived.cached_tokens,
            [context],
        )
    })
}

/// Seeded numbers: PCG's multiplier on a 64-bit state, the high half used.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound.max(1)
    }

    fn unit(&mut self) -> f64 {
        self.below(1 << 30) as f64 / f64::from(1 << 30)
    }

    fn tokens(&mut self, count: usize) -> Vec<u32> {
        // Above the special tokens and bytes, below the end of the testbed's vocabulary of 8 192.
        (0..count).map(|_| 300 + self.below(7_000) as u32).collect()
    }
}

/// Load of the machine over the last minute, where the system tells.
fn load_average() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or("unknown").to_owned()
}

const USAGE: &str = "usage: calibrate http://HOST:PORT... [--runs 3] [--step-tokens 2048] [--max-running 32] \
                     [--repetitions 1] [--requests 60] [--rate 0.5] [--separate-front-end] \
                     [--report target/reports/calibrate.json]";
const PROMPT_SIZES: [usize; 10] = [20, 100, 300, 600, 1_000, 1_500, 2_000, 3_000, 4_500, 6_000];
/// A document that is asked for again, whole or its beginning.
const SHARED_TOKENS: usize = 5_984;
/// Tokens of the document, and tokens behind them that are new.
const CONTINUATIONS: [(usize, usize); 5] = [
    (5_984, 20),
    (4_000, 100),
    (4_000, 1_500),
    (2_016, 20),
    (2_016, 600),
];
/// Requests that decode together, and the prompt tokens of each; they fit a cache of 16 384 tokens.
const GROUPS: [(usize, usize); 6] = [(2, 400), (2, 4_000), (4, 300), (4, 2_500), (8, 200), (8, 1_200)];
/// Prompts that arrive while a request of [`DECODING_TOKENS`] decodes; each fits one step.
const ARRIVALS: [usize; 4] = [200, 500, 1_000, 1_800];
const DECODING_TOKENS: usize = 400;

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(sent_us: u64, prompt_tokens: usize, tokens: &[u64]) -> Sample {
        Sample {
            sent_us,
            prompt_tokens,
            cached_tokens: 0,
            tokens: tokens.to_vec(),
        }
    }

    #[test]
    fn the_step_of_an_arrival_is_the_longest_gap_of_the_one_that_decodes() {
        let decoded = sample(0, 400, &[100, 120, 140, 165, 315, 335, 700]);
        let observed = mixed_step(&decoded, &sample(150, 900, &[316])).unwrap();
        assert_eq!((observed.time_us, observed.steps), (150.0, 1.0));
        assert_eq!(
            (observed.load.prefill_tokens, observed.load.decode_context),
            (900, 404)
        );
        assert_eq!(observed.through_front_end, None);
    }

    #[test]
    fn an_arrival_beside_the_decoding_says_nothing() {
        let decoded = sample(0, 400, &[100, 120, 140]);
        assert_eq!(mixed_step(&decoded, &sample(90, 900, &[130])), None);
        assert_eq!(mixed_step(&decoded, &sample(130, 900, &[300])), None);
    }

    #[test]
    fn a_group_is_observed_only_while_all_of_it_decodes() {
        let first: Vec<u64> = (0..20).map(|number| 1_000 + 10 * number).collect();
        let second: Vec<u64> = (0..20).map(|number| 1_050 + 10 * number).collect();
        let observed = decoding_together(&[sample(0, 100, &first), sample(0, 200, &second)]).unwrap();
        assert_eq!((observed.time_us, observed.load.decodes), (10.0, 2));
        assert_eq!(observed.load.decode_context, 110 + 210);
    }

    #[test]
    fn options_are_read_and_strangers_refused() {
        let read = |line: &str| Options::read(line.split(' ').map(str::to_owned));
        let options = read("http://a:1/ --runs 2 --separate-front-end --rate 0.7").unwrap();
        assert_eq!((options.urls, options.runs), (vec!["http://a:1".to_owned()], 2));
        assert!(!options.shares_core && options.rate_per_s == 0.7);
        assert!(read("--runs 2").is_err() && read("http://a:1 --rate x").is_err());
    }
}
