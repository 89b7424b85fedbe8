//! Which metric names of an engine mean what: tables, with their sources.

use std::num::NonZeroU32;

/// The engine whose metric names are read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Preset {
    /// vLLM, also in front of data-parallel engines.
    #[default]
    Vllm,
    /// SGLang, started with `--enable-metrics`.
    Sglang,
    /// TensorRT-LLM: `trtllm-serve` with `return_perf_metrics: true`, or Triton's `nv_trt_llm_…` on its metrics port.
    TensorRtLlm,
    /// Text Generation Inference.
    Tgi,
    /// llama.cpp's `llama-server`, started with `--metrics`.
    LlamaCpp,
    /// Names from the config.
    Custom(Box<CustomMetrics>),
}

/// Metric names from the config; what is `None` is not read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CustomMetrics {
    /// Gauge, requests waiting for their prefill.
    pub waiting: Option<String>,
    /// Gauge, requests running.
    pub running: Option<String>,
    /// Gauge, part of the KV cache in use.
    pub kv_usage: Option<String>,
    /// The value of `kv_usage` that means a full cache: 1 (the default) for a ratio, 100 for percent.
    pub kv_usage_scale: NonZeroU32,
    /// Counter, tokens looked up in the prefix cache.
    pub prefix_queries: Option<String>,
    /// Counter, tokens found in the prefix cache.
    pub prefix_hits: Option<String>,
    /// Gauge, size of the KV cache in tokens.
    pub kv_capacity_tokens: Option<String>,
    /// Gauge, start of the process in seconds since the Unix epoch.
    pub started_seconds: Option<String>,
}

impl Default for CustomMetrics {
    fn default() -> Self {
        Self {
            waiting: None,
            running: None,
            kv_usage: None,
            kv_usage_scale: NonZeroU32::MIN,
            prefix_queries: None,
            prefix_hits: None,
            kv_capacity_tokens: None,
            started_seconds: None,
        }
    }
}

impl Preset {
    /// The preset that the config calls `name`; custom names have none.
    pub fn from_name(name: &str) -> Option<Self> {
        [
            Self::Vllm,
            Self::Sglang,
            Self::TensorRtLlm,
            Self::Tgi,
            Self::LlamaCpp,
        ]
        .into_iter()
        .find(|preset| preset.as_str() == name)
    }

    /// The name used in the config.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::TensorRtLlm => "tensorrt_llm",
            Self::Tgi => "tgi",
            Self::LlamaCpp => "llama_cpp",
            Self::Custom(_) => "custom",
        }
    }

    /// Where the engine serves its metrics unless told otherwise. `trtllm-serve` answers `/metrics` with JSON.
    pub const fn default_path(&self) -> &'static str {
        match self {
            Self::TensorRtLlm => "/prometheus/metrics",
            Self::Vllm | Self::Sglang | Self::Tgi | Self::LlamaCpp | Self::Custom(_) => "/metrics",
        }
    }

    pub(super) fn rules(&self) -> Vec<Rule<'_>> {
        match self {
            Self::Vllm => VLLM.to_vec(),
            Self::Sglang => SGLANG.to_vec(),
            Self::TensorRtLlm => TENSORRT_LLM.to_vec(),
            Self::Tgi => TGI.to_vec(),
            Self::LlamaCpp => LLAMA_CPP.to_vec(),
            Self::Custom(names) => [
                (&names.waiting, Field::Waiting),
                (&names.running, Field::Running),
                (&names.kv_usage, Field::KvUsage),
                (&names.prefix_queries, Field::PrefixQueries),
                (&names.prefix_hits, Field::PrefixHits),
                (&names.kv_capacity_tokens, Field::KvCapacityTokens),
                (&names.started_seconds, Field::StartedSeconds),
            ]
            .into_iter()
            .filter_map(|(name, field)| Some(Rule::new(name.as_deref()?, field)))
            .collect(),
        }
    }

    pub(super) fn kv_usage_scale(&self) -> f64 {
        match self {
            Self::Custom(names) => f64::from(names.kv_usage_scale.get()),
            Self::Vllm | Self::Sglang | Self::TensorRtLlm | Self::Tgi | Self::LlamaCpp => 1.0,
        }
    }
}

/// One metric that is read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rule<'a> {
    pub(super) name: &'a str,
    pub(super) only: Only<'a>,
    pub(super) field: Field,
    /// Of several names for one field, the least rank counts.
    pub(super) rank: u8,
}

/// Which series of the metric are read.
#[derive(Debug, Clone, Copy)]
pub(super) enum Only<'a> {
    /// All.
    Any,
    /// Those whose label has this value.
    Is(&'a str, &'a str),
    /// Those whose label has another value, or that lack the label.
    Not(&'a str, &'a str),
}

/// What a metric says.
#[derive(Debug, Clone, Copy)]
pub(super) enum Field {
    Waiting,
    Running,
    /// Ratio, times the preset's scale.
    KvUsage,
    KvUsedBlocks,
    KvCapacityTokens,
    BlockTokens,
    Blocks,
    PrefixQueries,
    PrefixHits,
    StartedSeconds,
    /// An info metric whose labels hold the cache's size: in tokens, or as block size and number of blocks.
    CacheInfo {
        tokens: &'static str,
        block_tokens: &'static str,
        blocks: &'static str,
    },
    /// An info metric whose labels list adapters and whose value is the time of the listing.
    Adapters,
}

impl<'a> Rule<'a> {
    const fn new(name: &'a str, field: Field) -> Self {
        Self {
            name,
            only: Only::Any,
            field,
            rank: 0,
        }
    }

    const fn ranked(self, rank: u8) -> Self {
        Self { rank, ..self }
    }

    const fn only(self, only: Only<'a>) -> Self {
        Self { only, ..self }
    }
}

/// `prometheus_client`'s process collector, Linux only.
const PROCESS_START: Rule<'static> = Rule::new("process_start_time_seconds", Field::StartedSeconds);

/// vLLM 0.32 `/metrics` (captured); `gpu_cache_usage_perc` up to 0.9 (vLLM's deprecation list); `lora_requests_info` as
/// described in the llm-d plugin metric protocol, its value is the time of the listing.
const VLLM: &[Rule<'static>] = &[
    Rule::new("vllm:num_requests_waiting", Field::Waiting),
    Rule::new("vllm:num_requests_running", Field::Running),
    Rule::new("vllm:kv_cache_usage_perc", Field::KvUsage),
    Rule::new("vllm:gpu_cache_usage_perc", Field::KvUsage).ranked(1),
    Rule::new("vllm:prefix_cache_queries_total", Field::PrefixQueries),
    Rule::new("vllm:gpu_prefix_cache_queries_total", Field::PrefixQueries).ranked(1),
    Rule::new("vllm:prefix_cache_hits_total", Field::PrefixHits),
    Rule::new("vllm:gpu_prefix_cache_hits_total", Field::PrefixHits).ranked(1),
    Rule::new(
        "vllm:cache_config_info",
        Field::CacheInfo {
            tokens: "kv_cache_size_tokens",
            block_tokens: "block_size",
            blocks: "num_gpu_blocks",
        },
    ),
    Rule::new("vllm:lora_requests_info", Field::Adapters),
    PROCESS_START,
];

/// SGLang `python/sglang/srt/…/metrics_collector.py`: gauges come once per data-parallel rank, written by one tensor rank
/// (unless `--enable-metrics-for-all-schedulers` repeats them). `cached_tokens_total` counts by `cache_source`, where
/// `total` stands alone when the split is unknown. `cache_hit_rate` is no counter and not read.
const SGLANG: &[Rule<'static>] = &[
    Rule::new("sglang:num_queue_reqs", Field::Waiting),
    Rule::new("sglang:num_running_reqs", Field::Running),
    Rule::new("sglang:token_usage", Field::KvUsage),
    Rule::new("sglang:max_total_num_tokens", Field::KvCapacityTokens),
    Rule::new(
        "sglang:cache_config_info",
        Field::CacheInfo {
            tokens: "max_total_num_tokens",
            block_tokens: "page_size",
            blocks: "num_pages",
        },
    )
    .ranked(1),
    Rule::new("sglang:prompt_tokens_total", Field::PrefixQueries),
    Rule::new("sglang:cached_tokens_total", Field::PrefixHits).only(Only::Not("cache_source", "total")),
    Rule::new("sglang:cached_tokens_total", Field::PrefixHits)
        .only(Only::Is("cache_source", "total"))
        .ranked(1),
    PROCESS_START,
];

/// TensorRT-LLM `tensorrt_llm/metrics/collector.py` (`trtllm_…`), and the batch manager statistics of Triton's
/// TensorRT-LLM backend since 23.11 (`nv_trt_llm_…`, README section "Triton Metrics").
const TENSORRT_LLM: &[Rule<'static>] = &[
    Rule::new("trtllm_num_requests_waiting", Field::Waiting),
    Rule::new("trtllm_num_requests_running", Field::Running),
    Rule::new("trtllm_kv_cache_utilization", Field::KvUsage),
    Rule::new("trtllm_kv_cache_used_blocks", Field::KvUsedBlocks),
    Rule::new("trtllm_kv_cache_max_blocks", Field::Blocks),
    Rule::new("trtllm_kv_cache_tokens_per_block", Field::BlockTokens),
    Rule::new("trtllm_prompt_tokens_total", Field::PrefixQueries),
    Rule::new("trtllm_prompt_cached_tokens_total", Field::PrefixHits),
    Rule::new("nv_trt_llm_request_metrics", Field::Waiting)
        .only(Only::Is("request_type", "waiting"))
        .ranked(1),
    Rule::new("nv_trt_llm_request_metrics", Field::Running)
        .only(Only::Is("request_type", "scheduled"))
        .ranked(1),
    Rule::new("nv_trt_llm_kv_cache_block_metrics", Field::KvUsage)
        .only(Only::Is("kv_cache_block_type", "fraction"))
        .ranked(1),
    Rule::new("nv_trt_llm_kv_cache_block_metrics", Field::KvUsedBlocks)
        .only(Only::Is("kv_cache_block_type", "used"))
        .ranked(1),
    Rule::new("nv_trt_llm_kv_cache_block_metrics", Field::Blocks)
        .only(Only::Is("kv_cache_block_type", "max"))
        .ranked(1),
    Rule::new("nv_trt_llm_kv_cache_block_metrics", Field::BlockTokens)
        .only(Only::Is("kv_cache_block_type", "tokens_per"))
        .ranked(1),
    PROCESS_START,
];

/// Text Generation Inference, reference page "Metrics"; it tells no cache figures.
const TGI: &[Rule<'static>] = &[
    Rule::new("tgi_queue_size", Field::Waiting),
    Rule::new("tgi_batch_current_size", Field::Running),
    PROCESS_START,
];

/// llama.cpp `tools/server/README.md`; newer builds dropped `kv_cache_usage_ratio`.
const LLAMA_CPP: &[Rule<'static>] = &[
    Rule::new("llamacpp:requests_deferred", Field::Waiting),
    Rule::new("llamacpp:requests_processing", Field::Running),
    Rule::new("llamacpp:kv_cache_usage_ratio", Field::KvUsage),
    PROCESS_START,
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_table::Load;
    use crate::load::parse;

    #[test]
    fn every_preset_is_found_by_its_name() {
        for name in ["vllm", "sglang", "tensorrt_llm", "tgi", "llama_cpp"] {
            assert_eq!(Preset::from_name(name).unwrap().as_str(), name);
        }
        assert_eq!(Preset::from_name("custom"), None);
        assert_eq!(Preset::from_name("ollama"), None);
    }

    #[test]
    fn every_preset_reads_its_fixture() {
        let sglang = Load {
            waiting: Some(5),
            running: Some(23),
            kv_usage_permille: Some(375),
            kv_capacity_tokens: Some(800_000),
            prefix_queries: Some(900_000),
            prefix_hits: Some(350_000),
            started_ms: Some(1_700_000_100_250),
            adapters: Vec::new(),
        };
        let trtllm = Load {
            waiting: Some(2),
            running: Some(7),
            kv_usage_permille: Some(433),
            kv_capacity_tokens: Some(638_720),
            prefix_queries: Some(51_200),
            prefix_hits: Some(12_800),
            started_ms: Some(1_700_000_200_000),
            adapters: Vec::new(),
        };
        let triton = Load {
            waiting: Some(3),
            running: Some(4),
            kv_usage_permille: Some(600),
            kv_capacity_tokens: Some(384_000),
            ..Load::default()
        };
        let tgi = Load {
            waiting: Some(7),
            running: Some(4),
            ..Load::default()
        };
        let llama_cpp = Load {
            waiting: Some(6),
            running: Some(4),
            kv_usage_permille: Some(625),
            ..Load::default()
        };
        let cases: [(Preset, &[u8], Load); 5] = [
            (
                Preset::Sglang,
                include_bytes!("../../tests/fixtures/metrics/sglang.txt"),
                sglang,
            ),
            (
                Preset::TensorRtLlm,
                include_bytes!("../../tests/fixtures/metrics/tensorrt_llm.txt"),
                trtllm,
            ),
            (
                Preset::TensorRtLlm,
                include_bytes!("../../tests/fixtures/metrics/tensorrt_llm_triton.txt"),
                triton,
            ),
            (
                Preset::Tgi,
                include_bytes!("../../tests/fixtures/metrics/tgi.txt"),
                tgi,
            ),
            (
                Preset::LlamaCpp,
                include_bytes!("../../tests/fixtures/metrics/llama_cpp.txt"),
                llama_cpp,
            ),
        ];
        for (preset, body, expected) in cases {
            assert_eq!(parse(&preset, body), Ok(expected), "{}", preset.as_str());
        }
    }

    #[test]
    fn sglang_hits_without_a_split_are_read_from_the_total() {
        let hits = |body: &str| parse(&Preset::Sglang, body.as_bytes()).unwrap().prefix_hits;
        assert_eq!(
            hits("sglang:cached_tokens_total{cache_source=\"total\"} 9\n"),
            Some(9)
        );
        assert_eq!(hits("sglang:cached_tokens_total 8\n"), Some(8));
        let both = "sglang:cached_tokens_total{cache_source=\"total\"} 9\n\
                    sglang:cached_tokens_total{cache_source=\"device\"} 7\n";
        assert_eq!(hits(both), Some(7));
    }

    #[test]
    fn triton_without_a_fraction_gives_usage_from_blocks() {
        let body = "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=\"used\",model=\"m\"} 25\n\
                    nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=\"max\",model=\"m\"} 100\n";
        assert_eq!(
            parse(&Preset::TensorRtLlm, body.as_bytes())
                .unwrap()
                .kv_usage_permille,
            Some(250)
        );
    }
}
