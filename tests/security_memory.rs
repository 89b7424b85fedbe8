//! How much memory names take that clients invent: a test alone in its process, whose memory it measures.

#![cfg(not(target_family = "wasm"))]

use serde_json::json;
use warmroute::config::Config;
use warmroute::host_table::{Host, HostTable, Slot};
use warmroute::pool::{DecisionInput, Pool};
use warmroute::prompt::{Api, BodyEnd};

const NOW_MS: u64 = 1_790_000_000_000;

#[test]
fn a_million_models_adapters_tenants_and_sessions_take_no_more_memory() {
    let settings = json!({
        "pools": {"llm": {"discovery": {"admin_cluster": "admin"}}},
        "prefix": {"tenant_header": "x-tenant", "memory_bytes": 65_536},
        "index": {"memory_bytes": 1_048_576},
        "late_field_bytes": 65_536,
        "max_buffer_bytes": 4096,
    });
    let config = Config::parse(settings.to_string().as_bytes()).unwrap();
    let mut pool = Pool::new(config.pools[0].clone(), 1);
    let host = |slot: u16| Host {
        slot: Slot(slot),
        epoch: 1,
        address: format!("10.0.0.{slot}:8000"),
        weight: 1,
        ..Host::default()
    };
    let table = HostTable {
        published_ms: NOW_MS,
        hosts: (0..8).map(host).collect(),
    };
    pool.apply_table(&table.encode(), NOW_MS).unwrap();
    let mut resident = Vec::new();
    for number in 0..1_000_000u32 {
        // Long enough for the memory of late fields to take it.
        let filler = if number % 64 == 0 {
            "long ".repeat(200)
        } else {
            String::new()
        };
        let body = format!(
            r#"{{"model":"m{number}","lora_path":"l{number}","session_id":"b{number}","cache_salt":"{number}","messages":[{{"role":"user","content":"hi {filler}"}}]}}"#
        );
        let tenant = format!("t{number}");
        let outcome = pool.decide(
            &DecisionInput {
                api: Api::OpenAiChat,
                path: "/v1/chat/completions",
                body: Some((body.as_bytes(), BodyEnd::EndOfStream)),
                content_length: None,
                tenant: Some(tenant.as_bytes()),
                session: Some(tenant.as_bytes()),
            },
            NOW_MS + u64::from(number),
        );
        assert!(outcome.decision.hosts.first().is_some());
        if number % 250_000 == 249_999 {
            resident.push(resident_bytes());
        }
    }
    assert!(pool.index().memory_bytes() <= 1_048_576);
    let growth = resident[3].saturating_sub(resident[0]);
    eprintln!("resident after each quarter: {resident:?} bytes");
    assert!(
        growth < 4 << 20,
        "{growth} bytes more from the first quarter to the last"
    );
}

/// Memory of this process; 0 where the system does not tell.
fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").ok();
    let pages = pages.and_then(|text| text.split(' ').nth(1)?.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}
