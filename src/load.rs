//! Prometheus text of one engine → its [`Load`].
//!
//! In: the body of a `/metrics` answer and the [`Preset`] that says which names mean what. Out: the load, or that none of
//! the names was there. The body is untrusted: no panic, at most [`MAX_METRICS_BYTES`] and [`MAX_METRICS_LINES`] are
//! looked at, nothing is allocated per line, and what is not understood is passed over. A last line without its line
//! feed is dropped, because half a number looks like a number.
//!
//! One address can carry several series of a metric (data-parallel engines, several models). They are combined so:
//! waiting, running, prefix queries, prefix hits and cache capacity are summed; cache usage is the plain mean, since
//! data-parallel engines have caches of one size; the start time is the newest, since one restarted engine lost its
//! cache; adapters are the union over engines of each engine's newest series. Where two names mean the same (an engine
//! renamed it), the one ranked first in the preset counts and the other is ignored.

mod preset;

use std::fmt;

use memchr::memchr;

pub use self::preset::{CustomMetrics, Preset};
use self::preset::{Field, Only, Rule};
use crate::chunk::name_hash;
use crate::host_table::{Load, MAX_ADAPTERS};

/// Why a body gave no load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadError {
    /// None of the preset's load metrics is in the body: the wrong preset, path or port.
    NoKnownMetric,
}

/// The load that `body` tells, read with the names of `preset`.
///
/// # Errors
/// When the body holds none of the preset's metrics besides the process start time, which every exporter has.
pub fn parse(preset: &Preset, body: &[u8]) -> Result<Load, LoadError> {
    let rules = preset.rules();
    let mut reading = Reading::default();
    let mut rest = body.get(..MAX_METRICS_BYTES).unwrap_or(body);
    for _ in 0..MAX_METRICS_LINES {
        let Some(end) = memchr(b'\n', rest) else {
            break;
        };
        let (line, tail) = rest.split_at_checked(end).unwrap_or((rest, &[]));
        rest = tail.get(1..).unwrap_or(&[]);
        if let Some(sample) = Sample::of_line(line) {
            for rule in rules.iter().filter(|rule| rule.takes(&sample)) {
                reading.add(rule, &sample);
            }
        }
    }
    reading.finish(preset.kv_usage_scale())
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoKnownMetric => f.write_str("no metric of the preset in the answer"),
        }
    }
}

impl std::error::Error for LoadError {}

/// A sample line taken apart: `name{labels} value …`.
struct Sample<'a> {
    name: &'a [u8],
    /// What stands between the braces.
    labels: &'a [u8],
    /// What follows: value, perhaps a timestamp, perhaps an exemplar.
    tail: &'a [u8],
}

impl<'a> Sample<'a> {
    fn of_line(line: &'a [u8]) -> Option<Self> {
        let line = line.trim_ascii();
        if matches!(line.first(), None | Some(b'#')) {
            return None;
        }
        let name_end = line.iter().position(|byte| matches!(byte, b'{' | b' ' | b'\t'))?;
        let (name, rest) = line.split_at_checked(name_end)?;
        let Some(inner) = rest.strip_prefix(b"{") else {
            return Some(Self {
                name,
                labels: &[],
                tail: rest,
            });
        };
        // Where the braces end is looked for only when a rule wants the sample.
        Some(Self {
            name,
            labels: inner,
            tail: &[],
        })
    }

    /// Labels and tail, with the braces resolved.
    fn parts(&self) -> Option<(&'a [u8], &'a [u8])> {
        if self.labels.is_empty() {
            return Some((self.labels, self.tail));
        }
        let mut in_quotes = false;
        let mut escaped = false;
        let end = self.labels.iter().position(|&byte| {
            let closes = byte == b'}' && !in_quotes;
            in_quotes ^= byte == b'"' && !escaped;
            escaped = byte == b'\\' && !escaped;
            closes
        })?;
        let (labels, tail) = self.labels.split_at_checked(end)?;
        Some((labels, tail.get(1..)?))
    }

    /// The finite, non-negative value.
    fn value(&self) -> Option<f64> {
        let (_, tail) = self.parts()?;
        let token = tail.trim_ascii_start().split(u8::is_ascii_whitespace).next()?;
        let value: f64 = core::str::from_utf8(token).ok()?.parse().ok()?;
        (value.is_finite() && value >= 0.0).then_some(value)
    }

    /// The raw value of a label, escapes not resolved.
    fn label(&self, name: &str) -> Option<&'a [u8]> {
        let (mut rest, _) = self.parts()?;
        loop {
            let equals = memchr(b'=', rest)?;
            let key = rest.get(..equals)?.trim_ascii();
            let key = key.strip_prefix(b",").unwrap_or(key).trim_ascii();
            let quoted = rest
                .get(equals.checked_add(1)?..)?
                .trim_ascii_start()
                .strip_prefix(b"\"")?;
            let mut escaped = false;
            let end = quoted.iter().position(|&byte| {
                let closes = byte == b'"' && !escaped;
                escaped = byte == b'\\' && !escaped;
                closes
            })?;
            let (value, after) = quoted.split_at_checked(end)?;
            if key == name.as_bytes() {
                return Some(value);
            }
            rest = after.get(1..)?;
        }
    }

    fn label_number(&self, name: &str) -> Option<f64> {
        let value: f64 = core::str::from_utf8(self.label(name)?).ok()?.parse().ok()?;
        (value.is_finite() && value > 0.0).then_some(value)
    }
}

impl Rule<'_> {
    fn takes(&self, sample: &Sample<'_>) -> bool {
        if !same_name(sample.name, self.name.as_bytes()) {
            return false;
        }
        match self.only {
            Only::Any => true,
            Only::Is(label, value) => sample.label(label) == Some(value.as_bytes()),
            Only::Not(label, value) => sample.label(label) != Some(value.as_bytes()),
        }
    }
}

/// Equal names, where `:` and `_` are one: exporters that pass engine metrics on tend to rename the one to the other.
fn same_name(seen: &[u8], wanted: &[u8]) -> bool {
    let plain = |byte: &u8| if *byte == b':' { b'_' } else { *byte };
    seen.len() == wanted.len() && seen.iter().map(plain).eq(wanted.iter().map(plain))
}

/// What was found of one quantity, from the best-ranked name so far.
#[derive(Default)]
struct Found {
    rank: u8,
    series: u32,
    sum: f64,
    greatest: f64,
}

impl Found {
    fn add(&mut self, rank: u8, value: f64) {
        if self.series > 0 && rank > self.rank {
            return;
        }
        if self.series > 0 && rank < self.rank {
            *self = Self::default();
        }
        self.rank = rank;
        self.series = self.series.saturating_add(1);
        self.sum += value;
        self.greatest = self.greatest.max(value);
    }

    fn sum(&self) -> Option<f64> {
        (self.series > 0).then_some(self.sum)
    }

    fn mean(&self) -> Option<f64> {
        self.sum().map(|sum| sum / f64::from(self.series))
    }

    fn greatest(&self) -> Option<f64> {
        (self.series > 0).then_some(self.greatest)
    }
}

/// The newest adapter series of one engine.
struct EngineAdapters<'a> {
    engine: &'a [u8],
    stamp: f64,
    running: &'a [u8],
    waiting: &'a [u8],
}

impl<'a> EngineAdapters<'a> {
    /// Greater is newer; of equally new series the names decide, so that the order of the lines does not.
    fn age(&self) -> (f64, &'a [u8], &'a [u8]) {
        (self.stamp, self.running, self.waiting)
    }
}

#[derive(Default)]
struct Reading<'a> {
    waiting: Found,
    running: Found,
    kv_usage: Found,
    kv_used_blocks: Found,
    kv_capacity: Found,
    block_tokens: Found,
    blocks: Found,
    prefix_queries: Found,
    prefix_hits: Found,
    started_seconds: Found,
    adapters: Vec<EngineAdapters<'a>>,
}

impl<'a> Reading<'a> {
    fn add(&mut self, rule: &Rule<'_>, sample: &Sample<'a>) {
        let Some(value) = sample.value() else {
            return;
        };
        let found = match rule.field {
            Field::Waiting => &mut self.waiting,
            Field::Running => &mut self.running,
            Field::KvUsage => &mut self.kv_usage,
            Field::KvUsedBlocks => &mut self.kv_used_blocks,
            Field::KvCapacityTokens => &mut self.kv_capacity,
            Field::BlockTokens => &mut self.block_tokens,
            Field::Blocks => &mut self.blocks,
            Field::PrefixQueries => &mut self.prefix_queries,
            Field::PrefixHits => &mut self.prefix_hits,
            Field::StartedSeconds => &mut self.started_seconds,
            Field::CacheInfo {
                tokens,
                block_tokens,
                blocks,
            } => {
                let from_blocks = || Some(sample.label_number(block_tokens)? * sample.label_number(blocks)?);
                if let Some(tokens) = sample.label_number(tokens).or_else(from_blocks) {
                    self.kv_capacity.add(rule.rank, tokens);
                }
                return;
            }
            Field::Adapters => return self.add_adapters(value, sample),
        };
        found.add(rule.rank, value);
    }

    fn add_adapters(&mut self, stamp: f64, sample: &Sample<'a>) {
        let entry = EngineAdapters {
            engine: sample.label("engine").unwrap_or_default(),
            stamp,
            running: sample.label("running_lora_adapters").unwrap_or_default(),
            waiting: sample.label("waiting_lora_adapters").unwrap_or_default(),
        };
        if let Some(known) = self
            .adapters
            .iter_mut()
            .find(|known| known.engine == entry.engine)
        {
            if known.age() <= entry.age() {
                *known = entry;
            }
            return;
        }
        if self.adapters.len() < MAX_ENGINES {
            self.adapters.push(entry);
        }
    }

    fn finish(self, kv_usage_scale: f64) -> Result<Load, LoadError> {
        let kv_usage = self
            .kv_usage
            .mean()
            .map(|usage| usage / kv_usage_scale)
            .or_else(|| {
                let blocks = self.blocks.sum().filter(|blocks| *blocks > 0.0)?;
                Some(self.kv_used_blocks.sum()? / blocks)
            });
        let kv_capacity = self
            .kv_capacity
            .sum()
            .or_else(|| Some(self.blocks.sum()? * self.block_tokens.mean()?));
        let load = Load {
            waiting: self.waiting.sum().map(to_u32),
            running: self.running.sum().map(to_u32),
            kv_usage_permille: kv_usage.map(to_permille),
            kv_capacity_tokens: kv_capacity.map(to_u64).filter(|tokens| *tokens > 0),
            prefix_queries: self.prefix_queries.sum().map(to_u64),
            prefix_hits: self.prefix_hits.sum().map(to_u64),
            started_ms: None,
            adapters: adapter_hashes(&self.adapters),
        };
        if load == Load::default() {
            return Err(LoadError::NoKnownMetric);
        }
        let started_ms = self
            .started_seconds
            .greatest()
            .map(|seconds| to_u64(seconds * 1000.0));
        Ok(Load { started_ms, ..load })
    }
}

/// Hashes of all running and waiting adapters, sorted, each once. A waiting adapter is about to be loaded.
fn adapter_hashes(engines: &[EngineAdapters<'_>]) -> Vec<u64> {
    let lists = engines.iter().flat_map(|engine| [engine.running, engine.waiting]);
    let names = lists
        .flat_map(|list| list.split(|byte| *byte == b','))
        .map(<[u8]>::trim_ascii);
    let mut hashes: Vec<u64> = Vec::new();
    for name in names.filter(|name| !name.is_empty()) {
        let hash = if name.contains(&b'\\') {
            name_hash(&unescaped(name))
        } else {
            name_hash(name)
        };
        if hashes.len() < MAX_ADAPTERS && !hashes.contains(&hash) {
            hashes.push(hash);
        }
    }
    hashes.sort_unstable();
    hashes
}

/// A label value with `\\`, `\"` and `\n` resolved.
fn unescaped(raw: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(raw.len());
    let mut bytes = raw.iter().copied();
    while let Some(byte) = bytes.next() {
        let resolved = match byte {
            b'\\' => match bytes.next() {
                Some(b'n') => b'\n',
                Some(other) => other,
                None => b'\\',
            },
            other => other,
        };
        plain.push(resolved);
    }
    plain
}

#[expect(clippy::cast_possible_truncation, reason = "a cast from a float saturates")]
fn to_u32(value: f64) -> u32 {
    value.round() as u32
}

#[expect(clippy::cast_possible_truncation, reason = "a cast from a float saturates")]
fn to_u64(value: f64) -> u64 {
    value.round() as u64
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a cast from a float saturates, and 1000 is the bound"
)]
fn to_permille(ratio: f64) -> u16 {
    (ratio * 1000.0).round().min(1000.0) as u16
}

/// Bytes of a body that are looked at; a real engine's are 60 kB.
pub const MAX_METRICS_BYTES: usize = 4 * 1024 * 1024;

/// Lines of a body that are looked at; a real engine has 700.
pub const MAX_METRICS_LINES: usize = 100_000;

/// Engines behind one address whose adapters are told apart.
const MAX_ENGINES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blob::tests::Random;

    fn vllm(body: &str) -> Result<Load, LoadError> {
        parse(&Preset::Vllm, body.as_bytes())
    }

    fn waiting(body: &str) -> Option<u32> {
        vllm(body).ok().and_then(|load| load.waiting)
    }

    fn sorted_hashes(names: &[&str]) -> Vec<u64> {
        let mut hashes: Vec<u64> = names.iter().map(|name| name_hash(name.as_bytes())).collect();
        hashes.sort_unstable();
        hashes
    }

    #[test]
    fn every_shape_of_a_sample_line_is_read() {
        let cases = [
            ("vllm:num_requests_waiting 3\n", Some(3)),
            ("vllm:num_requests_waiting{} 3\n", Some(3)),
            (
                "vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 3.0\n",
                Some(3),
            ),
            ("vllm:num_requests_waiting{engine=\"0\",} 3.0\n", Some(3)),
            (
                "vllm:num_requests_waiting{ engine = \"0\" , b = \"x\" } 3.0\n",
                Some(3),
            ),
            ("vllm:num_requests_waiting\t3\n", Some(3)),
            ("  vllm:num_requests_waiting   3  \n", Some(3)),
            ("vllm:num_requests_waiting 3\r\n", Some(3)),
            ("vllm:num_requests_waiting 3 1700000000000\n", Some(3)),
            (
                "vllm:num_requests_waiting{a=\"b\"} 3 # {trace_id=\"x\"} 9 1.5\n",
                Some(3),
            ),
            ("vllm:num_requests_waiting 3e0\n", Some(3)),
            ("vllm:num_requests_waiting{m=\"a}b\"} 3\n", Some(3)),
            ("vllm:num_requests_waiting{m=\"a\\\"} 7\"} 3\n", Some(3)),
            ("vllm:num_requests_waiting{m=\"a\\\\\"} 3\n", Some(3)),
            ("vllm_num_requests_waiting 3\n", Some(3)),
            ("vllm:num_requests_waiting NaN\n", None),
            ("vllm:num_requests_waiting +Inf\n", None),
            ("vllm:num_requests_waiting -1\n", None),
            ("vllm:num_requests_waiting three\n", None),
            ("vllm:num_requests_waiting\n", None),
            ("vllm:num_requests_waiting{a=\"b\" 3\n", None),
            (
                "vllm:num_requests_waiting_by_reason{reason=\"capacity\"} 3\n",
                None,
            ),
            ("# vllm:num_requests_waiting 3\n", None),
            ("vllm:num_requests_waiting 1e300\n", Some(u32::MAX)),
        ];
        for (body, expected) in cases {
            assert_eq!(waiting(body), expected, "{body:?}");
        }
    }

    #[test]
    fn a_last_line_without_its_line_feed_is_dropped() {
        assert_eq!(
            waiting("vllm:num_requests_waiting 1\nvllm:num_requests_waiting 23"),
            Some(1)
        );
    }

    #[test]
    fn a_bad_line_does_not_spoil_the_others() {
        let body = "}{\n\u{0}\u{ff}\nvllm:num_requests_waiting{ 1\nvllm:num_requests_waiting 2\n";
        assert_eq!(waiting(body), Some(2));
    }

    #[test]
    fn a_body_without_known_metrics_is_an_error() {
        for body in [
            "",
            "\n\n",
            "<html></html>\n",
            "{\"a\":1}\n",
            "process_start_time_seconds 1.7e9\n",
        ] {
            assert_eq!(vllm(body), Err(LoadError::NoKnownMetric), "{body:?}");
        }
    }

    #[test]
    fn series_are_combined_by_the_rule_of_each_metric() {
        let body = "\
vllm:num_requests_waiting{engine=\"0\"} 1
vllm:num_requests_waiting{engine=\"1\"} 2
vllm:num_requests_running{engine=\"0\"} 10
vllm:num_requests_running{engine=\"1\"} 20
vllm:kv_cache_usage_perc{engine=\"0\"} 0.2
vllm:kv_cache_usage_perc{engine=\"1\"} 0.4
vllm:prefix_cache_queries_total{engine=\"0\"} 100
vllm:prefix_cache_queries_total{engine=\"1\"} 200
vllm:prefix_cache_hits_total{engine=\"0\"} 10
vllm:prefix_cache_hits_total{engine=\"1\"} 20
vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"100\"} 1.0
vllm:cache_config_info{block_size=\"16\",engine=\"1\",num_gpu_blocks=\"200\"} 1.0
process_start_time_seconds{pid=\"1\"} 1.70000000025e+09
process_start_time_seconds{pid=\"2\"} 1.70000000050e+09
";
        let expected = Load {
            waiting: Some(3),
            running: Some(30),
            kv_usage_permille: Some(300),
            kv_capacity_tokens: Some(4_800),
            prefix_queries: Some(300),
            prefix_hits: Some(30),
            started_ms: Some(1_700_000_000_500),
            adapters: Vec::new(),
        };
        assert_eq!(vllm(body), Ok(expected));
    }

    #[test]
    fn of_two_names_for_one_thing_the_first_ranked_counts_in_either_order() {
        let new = "vllm:kv_cache_usage_perc 0.5\n";
        let old = "vllm:gpu_cache_usage_perc 0.9\n";
        let usage = |body: &str| vllm(body).unwrap().kv_usage_permille;
        assert_eq!(usage(old), Some(900));
        assert_eq!(usage(&format!("{new}{old}")), Some(500));
        assert_eq!(usage(&format!("{old}{new}")), Some(500));
    }

    #[test]
    fn cache_size_in_tokens_wins_over_blocks() {
        let info = |labels: &str| vllm(&format!("vllm:cache_config_info{{{labels}}} 1\n"));
        let capacity = |labels: &str| info(labels).unwrap().kv_capacity_tokens;
        assert_eq!(
            capacity("block_size=\"16\",kv_cache_size_tokens=\"1000\",num_gpu_blocks=\"99\""),
            Some(1000)
        );
        assert_eq!(
            capacity("block_size=\"16\",kv_cache_size_tokens=\"None\",num_gpu_blocks=\"10\""),
            Some(160)
        );
        assert_eq!(
            info("block_size=\"16\",num_gpu_blocks=\"None\""),
            Err(LoadError::NoKnownMetric)
        );
    }

    #[test]
    fn adapters_come_from_the_newest_series_of_each_engine() {
        let body = "\
vllm:lora_requests_info{max_lora=\"2\",running_lora_adapters=\"old\",waiting_lora_adapters=\"\"} 1.7e+09
vllm:lora_requests_info{max_lora=\"2\",running_lora_adapters=\"a, b\",waiting_lora_adapters=\"c,a\"} 1.8e+09
vllm:lora_requests_info{max_lora=\"2\",running_lora_adapters=\"older\",waiting_lora_adapters=\"\"} 1.6e+09
vllm:lora_requests_info{engine=\"1\",running_lora_adapters=\"d\\\"x\",waiting_lora_adapters=\"\"} 1.5e+09
";
        assert_eq!(
            vllm(body).unwrap().adapters,
            sorted_hashes(&["a", "b", "c", "d\"x"])
        );
    }

    #[test]
    fn of_equally_new_series_the_order_of_the_lines_does_not_decide() {
        let lines = [
            "vllm:lora_requests_info{running_lora_adapters=\"a\"} 0\n",
            "vllm:lora_requests_info{running_lora_adapters=\"b\"} -0\n",
        ];
        let one = vllm(&lines.concat()).unwrap();
        let other = vllm(&lines.iter().rev().copied().collect::<String>()).unwrap();
        assert_eq!(one, other);
        assert_eq!(one.adapters, sorted_hashes(&["b"]));
    }

    #[test]
    fn adapters_are_bounded() {
        let names: Vec<String> = (0..200).map(|number| format!("adapter-{number}")).collect();
        let body = format!(
            "vllm:lora_requests_info{{running_lora_adapters=\"{}\"}} 1\n",
            names.join(",")
        );
        assert_eq!(vllm(&body).unwrap().adapters.len(), MAX_ADAPTERS);
    }

    #[test]
    fn custom_names_are_read_with_their_scale() {
        let metrics = CustomMetrics {
            waiting: Some("my_queue".to_owned()),
            kv_usage: Some("my_cache_percent".to_owned()),
            kv_usage_scale: 100.try_into().unwrap(),
            kv_capacity_tokens: Some("my_cache_tokens".to_owned()),
            started_seconds: Some("my_start".to_owned()),
            ..CustomMetrics::default()
        };
        let body = b"my_queue 4\nmy_cache_percent 37.5\nmy_cache_tokens 9000\nmy_start 1.5\nmy_queue_max 9\n";
        let expected = Load {
            waiting: Some(4),
            kv_usage_permille: Some(375),
            kv_capacity_tokens: Some(9000),
            started_ms: Some(1500),
            ..Load::default()
        };
        assert_eq!(parse(&Preset::Custom(Box::new(metrics)), body), Ok(expected));
    }

    #[test]
    fn usage_above_full_is_full() {
        assert_eq!(
            vllm("vllm:kv_cache_usage_perc 1.7\n").unwrap().kv_usage_permille,
            Some(1000)
        );
    }

    #[test]
    fn bytes_and_lines_beyond_the_bounds_are_not_read() {
        let mut body = "vllm:num_requests_waiting 1\n".to_owned();
        body.push_str(&"#\n".repeat(MAX_METRICS_LINES));
        body.push_str("vllm:num_requests_running 1\n");
        assert_eq!(vllm(&body).unwrap().running, None);

        let mut body = "vllm:num_requests_waiting 1\n".to_owned();
        body.push_str(&"#".repeat(MAX_METRICS_BYTES));
        body.push_str("\nvllm:num_requests_running 1\n");
        assert_eq!(vllm(&body).unwrap().running, None);
    }

    #[test]
    fn damaged_bodies_never_panic() {
        let mut random = Random::seeded(8);
        let source = include_bytes!("../tests/fixtures/metrics/vllm.txt");
        for _ in 0..2_000 {
            let mut body = source.to_vec();
            for _ in 0..random.below(60) {
                let at = usize::try_from(random.below(body.len() as u64)).unwrap();
                body[at] = *b"{}\"\\\n ,=#e+-.\0\xff"
                    .get(usize::try_from(random.below(15)).unwrap())
                    .unwrap();
            }
            body.truncate(usize::try_from(random.below(body.len() as u64)).unwrap());
            for preset in [
                Preset::Vllm,
                Preset::Sglang,
                Preset::TensorRtLlm,
                Preset::Tgi,
                Preset::LlamaCpp,
            ] {
                let _ = parse(&preset, &body);
            }
        }
    }
}
