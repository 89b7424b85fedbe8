//! Engine state → `/metrics` text with the names, labels and number format of vLLM 0.32.
//!
//! Names and order follow a capture of a real vLLM 0.32 (one engine, `prometheus_client` text format). Families that no
//! router reads are left out, but for a few that a parser has to step over.

use std::fmt::Write;

use crate::engine::EngineCounters;

/// What one scrape shows.
#[derive(Debug, Clone)]
pub struct MetricsView<'a> {
    /// Label `model_name`.
    pub model: &'a str,
    /// Gauge, requests; `vllm:num_requests_running`.
    pub running: f64,
    /// Gauge, requests; `vllm:num_requests_waiting`.
    pub waiting: f64,
    /// Gauge, 0 to 1; `vllm:kv_cache_usage_perc`.
    pub kv_usage: f64,
    /// KV cache size in blocks; label `num_gpu_blocks` of `vllm:cache_config_info`.
    pub cache_blocks: usize,
    /// Tokens in a block; its label `block_size`.
    pub block_tokens: usize,
    /// Counters since `started_s`.
    pub counters: EngineCounters,
    /// When the process began, seconds since the Unix epoch; `process_start_time_seconds`.
    pub started_s: f64,
    /// LoRA adapters that run, for `vllm:lora_requests_info`; the family is absent when there are none.
    pub adapters: &'a [String],
}

impl MetricsView<'_> {
    /// The text of one scrape.
    pub fn render(&self) -> String {
        let mut out = String::with_capacity(4096);
        let counters = &self.counters;
        let engine = format!("{{engine=\"0\",model_name=\"{}\"}}", self.model);
        family(
            &mut out,
            "python_info",
            "gauge",
            "Python platform information",
            r#"{implementation="CPython",major="3",minor="11",patchlevel="7",version="3.11.7"}"#,
            1.0,
        );
        let started = "Start time of the process since unix epoch in seconds.";
        family(
            &mut out,
            "process_start_time_seconds",
            "gauge",
            started,
            "",
            self.started_s,
        );
        let gauges = [
            (
                "vllm:num_requests_running",
                "Number of requests in model execution batches.",
                self.running,
            ),
            (
                "vllm:num_requests_waiting",
                "Number of requests waiting to be processed.",
                self.waiting,
            ),
            (
                "vllm:kv_cache_usage_perc",
                "KV-cache usage. 1 means 100 percent usage.",
                self.kv_usage,
            ),
        ];
        for (name, help, value) in gauges {
            family(&mut out, name, "gauge", help, &engine, value);
        }
        self.render_waiting_by_reason(&mut out);
        let totals = [
            (
                "vllm:prefix_cache_queries",
                "Prefix cache queries, in terms of number of queried tokens.",
                counters.prefix_query_tokens,
            ),
            (
                "vllm:prefix_cache_hits",
                "Prefix cache hits, in terms of number of cached tokens.",
                counters.prefix_hit_tokens,
            ),
            (
                "vllm:num_preemptions",
                "Cumulative number of preemption from the engine.",
                counters.preemptions,
            ),
            (
                "vllm:prompt_tokens",
                "Number of prefill tokens processed.",
                counters.prompt_tokens,
            ),
            (
                "vllm:prompt_tokens_cached",
                "Number of cached prompt tokens (local + external).",
                counters.prefix_hit_tokens,
            ),
            (
                "vllm:generation_tokens",
                "Number of generation tokens processed.",
                counters.generation_tokens,
            ),
        ];
        for (name, help, value) in totals {
            family(
                &mut out,
                &format!("{name}_total"),
                "counter",
                help,
                &engine,
                value as f64,
            );
            family(
                &mut out,
                &format!("{name}_created"),
                "gauge",
                help,
                &engine,
                self.started_s,
            );
        }
        self.render_success(&mut out);
        let cache_labels = format!(
            "{{block_size=\"{}\",cache_dtype=\"auto\",enable_prefix_caching=\"True\",engine=\"0\",\
             kv_cache_size_tokens=\"{}\",num_cpu_blocks=\"None\",num_gpu_blocks=\"{}\",\
             prefix_caching_hash_algo=\"sha256\"}}",
            self.block_tokens,
            self.cache_blocks.saturating_mul(self.block_tokens),
            self.cache_blocks,
        );
        let config_help = "Information of the LLMEngine CacheConfig";
        family(
            &mut out,
            "vllm:cache_config_info",
            "gauge",
            config_help,
            &cache_labels,
            1.0,
        );
        if !self.adapters.is_empty() {
            let labels = format!(
                "{{max_lora=\"8\",running_lora_adapters=\"{}\",waiting_lora_adapters=\"\"}}",
                self.adapters.join(",")
            );
            let help = "Running stats on lora requests.";
            family(
                &mut out,
                "vllm:lora_requests_info",
                "gauge",
                help,
                &labels,
                self.started_s,
            );
        }
        out
    }

    fn render_waiting_by_reason(&self, out: &mut String) {
        let name = "vllm:num_requests_waiting_by_reason";
        let _ = writeln!(
            out,
            "# HELP {name} Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling \
             capacity; 'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum \
             of all reasons equals vllm:num_requests_waiting.\n# TYPE {name} gauge"
        );
        for (reason, count) in [("capacity", self.waiting), ("deferred", 0.0)] {
            let _ = writeln!(
                out,
                "{name}{{engine=\"0\",model_name=\"{}\",reason=\"{reason}\"}} {}",
                self.model,
                number(count),
            );
        }
    }

    fn render_success(&self, out: &mut String) {
        out.push_str("# HELP vllm:request_success_total Count of successfully processed requests.\n");
        out.push_str("# TYPE vllm:request_success_total counter\n");
        let reasons = [
            ("stop", 0),
            ("length", self.counters.finished),
            ("abort", self.counters.aborted),
            ("error", 0),
            ("repetition", 0),
        ];
        for (reason, count) in reasons {
            let _ = writeln!(
                out,
                "vllm:request_success_total{{engine=\"0\",finished_reason=\"{reason}\",model_name=\"{}\"}} {}",
                self.model,
                number(count as f64),
            );
        }
    }
}

fn family(out: &mut String, name: &str, kind: &str, help: &str, labels: &str, value: f64) {
    let _ = write!(
        out,
        "# HELP {name} {help}\n# TYPE {name} {kind}\n{name}{labels} {}\n",
        number(value)
    );
}

/// A number as `prometheus_client` writes it: Python's `repr`, but with an exponent from 1e6 on (`floatToGoString` in
/// `prometheus_client/utils.py`).
fn number(value: f64) -> String {
    let text = format!("{value:?}");
    match text.split_once('.') {
        Some((whole, fraction)) if value > 0.0 && whole.len() > 6 => {
            let (first, rest) = whole.split_at(1);
            let mantissa = format!("{first}.{rest}{fraction}");
            format!(
                "{}e+{:02}",
                mantissa.trim_end_matches(['0', '.']),
                whole.len() - 1
            )
        }
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_look_as_in_a_real_scrape() {
        assert_eq!(number(0.0), "0.0");
        assert_eq!(number(123_405.0), "123405.0");
        assert_eq!(number(1_795_986_143.34), "1.79598614334e+09");
        assert_eq!(number(0.0625), "0.0625");
        assert_eq!(number(2_000_000.0), "2e+06");
    }

    #[test]
    fn every_sample_has_its_type_line() {
        let view = MetricsView {
            model: "tiny",
            running: 2.0,
            waiting: 3.0,
            kv_usage: 0.5,
            cache_blocks: 100,
            block_tokens: 16,
            counters: EngineCounters {
                prefix_query_tokens: 123_405,
                ..EngineCounters::default()
            },
            started_s: 1_795_986_143.34,
            adapters: &["sql".to_owned(), "fr".to_owned()],
        };
        let text = view.render();
        assert!(text.contains("vllm:num_requests_waiting{engine=\"0\",model_name=\"tiny\"} 3.0\n"));
        assert!(
            text.contains("vllm:prefix_cache_queries_total{engine=\"0\",model_name=\"tiny\"} 123405.0\n")
        );
        assert!(text.contains("block_size=\"16\"") && text.contains("num_gpu_blocks=\"100\""));
        assert!(text.contains("running_lora_adapters=\"sql,fr\""));
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let name = line.split(['{', ' ']).next().unwrap();
            assert!(text.contains(&format!("# TYPE {name} ")), "{name}");
        }
    }
}
