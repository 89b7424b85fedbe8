//! Any metrics text under any preset → a load within its bounds, which depends on nothing but the samples.

use std::num::NonZeroU32;

use warmroute::host_table::{Host, HostTable, Load, MAX_ADAPTERS};
use warmroute::load::{CustomMetrics, LoadError, Preset, parse};

use super::choices::{Choices, Seen, shown};
use super::json::shuffle;

/// Names of metrics that the presets read, and of labels that they look at.
pub(crate) const NAMES: [&str; 33] = [
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:cache_config_info",
    "vllm:lora_requests_info",
    "process_start_time_seconds",
    "sglang:num_queue_reqs",
    "sglang:num_running_reqs",
    "sglang:token_usage",
    "sglang:max_total_num_tokens",
    "sglang:cache_config_info",
    "sglang:prompt_tokens_total",
    "sglang:cached_tokens_total",
    "trtllm_num_requests_waiting",
    "trtllm_num_requests_running",
    "trtllm_kv_cache_utilization",
    "trtllm_kv_cache_used_blocks",
    "trtllm_kv_cache_max_blocks",
    "trtllm_kv_cache_tokens_per_block",
    "trtllm_prompt_tokens_total",
    "trtllm_prompt_cached_tokens_total",
    "nv_trt_llm_request_metrics",
    "nv_trt_llm_kv_cache_block_metrics",
    "tgi_queue_size",
    "tgi_batch_current_size",
    "llamacpp:requests_deferred",
    "llamacpp:requests_processing",
    "llamacpp:kv_cache_usage_ratio",
    "own_waiting",
    "own_usage",
];

/// Labels that the presets look at.
pub(crate) const LABELS: [&str; 13] = [
    "engine",
    "model_name",
    "running_lora_adapters",
    "waiting_lora_adapters",
    "block_size",
    "num_gpu_blocks",
    "kv_cache_size_tokens",
    "max_total_num_tokens",
    "page_size",
    "num_pages",
    "cache_source",
    "request_type",
    "kv_cache_block_type",
];

/// Checks everything on the text that the bytes stand for.
pub(crate) fn check(data: &[u8], seen: &mut Seen) {
    let mut choices = Choices::new(data);
    let mode = choices.byte();
    let preset = preset(&mut choices);
    if mode.is_multiple_of(2) {
        let lines = lines(&mut choices, &preset, seen);
        let body = lines.concat();
        check_text(&preset, body.as_bytes(), data, seen);
        check_order(&preset, lines, &mut choices, seen);
    } else {
        check_text(&preset, choices.rest(), data, seen);
    }
}

fn check_text(preset: &Preset, body: &[u8], data: &[u8], seen: &mut Seen) {
    let told = || format!("{}, {}", preset.as_str(), shown(body));
    let load = parse(preset, body);
    match &load {
        Ok(load) => {
            seen.note("load");
            seen.note(preset.as_str());
            seen.note_if("adapters", !load.adapters.is_empty());
            seen.note_if("cache size", load.kv_capacity_tokens.is_some());
            check_bounds(load, &told);
        }
        Err(LoadError::NoKnownMetric) => seen.note("no load"),
    }
    // Half a line at the end is nothing, wherever the body was cut.
    let whole_lines = body
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |at| at + 1);
    assert_eq!(parse(preset, &body[..whole_lines]), load, "{}", told());
    let cut = Choices::new(data).u32() as usize % (body.len() + 1);
    let head_lines = body[..cut]
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |at| at + 1);
    assert_eq!(
        parse(preset, &body[..cut]),
        parse(preset, &body[..head_lines]),
        "cut at {cut}: {}",
        told()
    );
    // Comments, empty lines, spaces around lines and the exporter's way to write colons are nothing.
    let mut padded = Vec::with_capacity(body.len() * 2);
    for line in body[..whole_lines].split_inclusive(|byte| *byte == b'\n') {
        padded.extend_from_slice(b"# HELP vllm:num_requests_waiting 7\n\n \t\r\n  ");
        padded.extend_from_slice(&line[..line.len() - 1]);
        padded.extend_from_slice(b" \r\n");
    }
    assert_eq!(parse(preset, &padded), load, "padded: {}", told());
}

fn check_bounds(load: &Load, told: &dyn Fn() -> String) {
    assert!(
        load.kv_usage_permille.is_none_or(|usage| usage <= 1000),
        "{}",
        told()
    );
    assert!(load.kv_capacity_tokens != Some(0), "{}", told());
    assert!(load.adapters.len() <= MAX_ADAPTERS, "{}", told());
    assert!(
        load.adapters.windows(2).all(|pair| pair[0] < pair[1]),
        "{}",
        told()
    );
    let host = Host {
        address: "10.0.0.1:8000".into(),
        load: load.clone(),
        ..Host::default()
    };
    let table = HostTable {
        published_ms: 1,
        hosts: vec![host],
    };
    assert_eq!(
        HostTable::decode(&table.encode()).as_ref(),
        Ok(&table),
        "{}",
        told()
    );
}

/// Samples of whole numbers sum up the same in any order.
fn check_order(preset: &Preset, mut lines: Vec<String>, choices: &mut Choices<'_>, seen: &mut Seen) {
    let before = parse(preset, lines.concat().as_bytes());
    shuffle(&mut lines, choices);
    let body = lines.concat();
    let after = parse(preset, body.as_bytes());
    seen.note_if("samples in another order", after.is_ok());
    assert_eq!(before, after, "{}, {}", preset.as_str(), shown(body.as_bytes()));
}

fn preset(choices: &mut Choices<'_>) -> Preset {
    match choices.below(6) {
        0 => Preset::Vllm,
        1 => Preset::Sglang,
        2 => Preset::TensorRtLlm,
        3 => Preset::Tgi,
        4 => Preset::LlamaCpp,
        _ => {
            let mut name = || (!choices.one_in(4)).then(|| choices.pick(&NAMES).to_owned());
            Preset::Custom(Box::new(CustomMetrics {
                waiting: name(),
                running: name(),
                kv_usage: name(),
                kv_usage_scale: NonZeroU32::MIN,
                prefix_queries: name(),
                prefix_hits: name(),
                kv_capacity_tokens: name(),
                started_seconds: name(),
            }))
        }
    }
}

/// Sample lines, each with its line feed; no two have the same value, and values are small whole numbers, since sums of
/// floats depend on their order by a bit.
fn lines(choices: &mut Choices<'_>, preset: &Preset, seen: &mut Seen) -> Vec<String> {
    const VALUES: [&str; 12] = [
        "a", "a,b", "a, b ,c", "", "waiting", "total", "16", "1000", "used", "fraction", "x\\\"}y", "\\\\",
    ];
    let count = if choices.one_in(16) { 70 } else { choices.below(24) };
    (0..count)
        .map(|at| {
            let is_any = choices.one_in(4);
            let mut line = choices
                .pick(if is_any { &NAMES } else { own_names(preset) })
                .to_owned();
            if choices.one_in(4) {
                line = line.replace(':', "_");
            }
            if choices.one_in(2) {
                let labels = (0..choices.below(5)).map(|_| {
                    let value = choices.pick(&VALUES);
                    let equals = choices.pick(&["=", " = ", "="]);
                    format!("{}{equals}\"{value}\"", choices.pick(&LABELS))
                });
                line.push('{');
                line.push_str(&labels.collect::<Vec<_>>().join(","));
                line.push('}');
            }
            line.push_str(choices.pick(&[" ", "\t", "  "]));
            if choices.one_in(8) {
                seen.note("odd value");
                line.push_str(choices.pick(&["NaN", "+Inf", "-1", "1e999", "x", "", "0x10", "-0"]));
            } else {
                line.push_str(&(at + 1).to_string());
            }
            if choices.one_in(8) {
                line.push_str(" 1700000000000 # {trace_id=\"x\"} 1");
            }
            line.push('\n');
            line
        })
        .collect()
}

/// The names that a preset reads, and the start time that all read.
fn own_names(preset: &Preset) -> &'static [&'static str] {
    match preset {
        Preset::Vllm => &NAMES[..9],
        Preset::Sglang => &NAMES[8..16],
        Preset::TensorRtLlm => &NAMES[16..26],
        Preset::Tgi => &NAMES[26..28],
        Preset::LlamaCpp => &NAMES[28..31],
        Preset::Custom(_) => &NAMES,
    }
}
