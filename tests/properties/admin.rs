//! Any admin answer → sound endpoints, and any answers at any time → a poller whose calls and table are sound.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use warmroute::discovery::{Discovered, Endpoint, StaticHost, endpoints, request_path};
use warmroute::host_table::{Health, HostTable, MAX_ADDRESS_BYTES, MAX_HOSTS, Role};
use warmroute::poller::{Answer, CallToken, Discovery, MetricsConfig, Poller, PollerConfig};

use super::choices::{Choices, Seen, shown};
use super::host_table;

/// What the lines of the admin's answer are made of.
const WORDS: [&str; 25] = [
    "llm",
    "llm2",
    "other",
    "::",
    "\n",
    "10.0.0.1:8000",
    "10.0.0.2:8000",
    "[2001:db8::1]:8000",
    "/run/pipe",
    "envoy://listener/id",
    "default_priority",
    "added_via_api",
    "hostname",
    "health_flags",
    "weight",
    "priority",
    "healthy",
    "/failed_active_hc",
    "/eds_status_draining",
    "/degraded_eds_health",
    "/pending_dynamic_removal",
    "4294967296",
    "7",
    "[",
    "]",
];

/// Checks everything on the answers that the bytes stand for.
pub(crate) fn check(data: &[u8], seen: &mut Seen) {
    let mut choices = Choices::new(data);
    match choices.below(4) {
        0 if choices.one_in(2) => check_bytes(choices.rest(), seen),
        0 => check_bytes(words(&mut choices).as_bytes(), seen),
        1 => check_poller(&mut choices, seen),
        _ => check_answer(&mut choices, seen),
    }
}

fn check_bytes(body: &[u8], seen: &mut Seen) {
    let Ok(found) = endpoints(body, "llm") else {
        seen.note("answer refused");
        return;
    };
    seen.note("answer read");
    check_found(&found, body);
    // What is told of other clusters changes nothing.
    let mut among_others = b"other::10.0.0.9:1::health_flags::healthy\n".to_vec();
    among_others.extend_from_slice(body);
    among_others.extend_from_slice(b"\nllm2::10.0.0.9:1::health_flags::healthy");
    assert_eq!(endpoints(&among_others, "llm"), Ok(found), "{}", shown(body));
}

fn check_found(found: &Discovered, body: &[u8]) {
    assert!(found.endpoints.len() <= MAX_HOSTS, "{}", shown(body));
    for pair in found.endpoints.windows(2) {
        assert!(pair[0].address < pair[1].address, "{}", shown(body));
    }
    for endpoint in &found.endpoints {
        let parsed: SocketAddr = endpoint.address.parse().expect("an address");
        assert!(parsed.port() > 0 && endpoint.weight > 0, "{}", shown(body));
        assert!(endpoint.address.len() <= MAX_ADDRESS_BYTES, "{}", shown(body));
    }
}

/// An answer as Envoy writes it, with hosts in any number and order: each address as it comes first.
fn check_answer(choices: &mut Choices<'_>, seen: &mut Seen) {
    let mut expected: Vec<Endpoint> = Vec::new();
    let mut is_known = false;
    let mut body = String::new();
    for _ in 0..choices.below(4) {
        let name = choices.pick(&["llm", "llm", "llm2", "other"]);
        let wanted = name == "llm";
        is_known |= wanted;
        let count = if choices.one_in(3) {
            20 + choices.below(60)
        } else {
            choices.below(8)
        };
        for what in [
            "observability_name",
            "default_priority::max_retries",
            "added_via_api",
        ] {
            body.push_str(&format!("{name}::{what}::3\n"));
        }
        for _ in 0..count {
            let (lines, endpoint) = host(choices, name);
            body.push_str(&lines);
            let is_new = |address: &str| expected.iter().all(|known| known.address != address);
            if wanted && is_new(&endpoint.address) {
                expected.push(endpoint);
            }
        }
    }
    expected.sort_by(|left, right| left.address.cmp(&right.address));
    let found = endpoints(body.as_bytes(), "llm").expect("a sound answer");
    check_found(&found, body.as_bytes());
    seen.note("sound answer");
    seen.note_if("many endpoints", found.endpoints.len() > 20);
    assert_eq!(found.endpoints, expected, "{}", shown(body.as_bytes()));
    assert_eq!(found.is_known, is_known, "{}", shown(body.as_bytes()));
}

/// The lines of one host, and what is to be read of it.
fn host(choices: &mut Choices<'_>, cluster: &str) -> (String, Endpoint) {
    let number = choices.below(48);
    let address = if number < 40 {
        format!("10.0.0.{number}:8000")
    } else {
        format!("[2001:db8::{number}]:8000")
    };
    let weight = u32::from(choices.byte()) + 1;
    let priority = choices.byte() % 4;
    let (flags, health) = choices.pick(&[
        ("healthy", Health::Healthy),
        ("/degraded_eds_health", Health::Degraded),
        ("/eds_status_draining", Health::Draining),
        ("/failed_outlier_check/degraded_active_hc", Health::Unhealthy),
    ]);
    let mut lines = String::new();
    for (name, value) in [
        ("cx_total", choices.byte().to_string()),
        (
            "hostname",
            choices.pick(&["", "vllm-1", "2001:db8::7"]).to_owned(),
        ),
        ("health_flags", flags.to_owned()),
        ("weight", weight.to_string()),
        ("zone", String::new()),
        ("priority", priority.to_string()),
    ] {
        lines.push_str(&format!("{cluster}::{address}::{name}::{value}\n"));
    }
    let host = StaticHost::new(&address, Role::Both).expect("an address");
    let endpoint = Endpoint {
        weight,
        health,
        priority,
        ..Endpoint::of_static(&host)
    };
    (lines, endpoint)
}

/// A companion whose engines, admin interface and clock do as they like.
fn check_poller(choices: &mut Choices<'_>, seen: &mut Seen) {
    let discovery = if choices.one_in(4) {
        let hosts = (0..choices.below(40)).filter_map(|_| {
            let address = format!("10.0.0.{}:8000", choices.below(24));
            StaticHost::new(&address, choices.pick(&[Role::Both, Role::Prefill])).ok()
        });
        Discovery::Static(hosts.collect())
    } else {
        Discovery::default()
    };
    let static_hosts = match &discovery {
        Discovery::Static(hosts) => hosts.clone(),
        Discovery::Admin { .. } => Vec::new(),
    };
    let mut poller = Poller::new(PollerConfig {
        cluster: "llm".into(),
        discovery,
        metrics: MetricsConfig {
            port: choices.one_in(4).then_some(9000),
            require_served_by: choices.one_in(2),
            ..MetricsConfig::of_cluster("llm")
        },
        steering_header: "x-host".into(),
    });
    let mut now_ms = 1_700_000_000_000;
    let mut may_repeat = false;
    if choices.one_in(4) {
        let adopted = HostTable::decode(&host_table::table(choices).encode()).expect("its own blob");
        let addresses: BTreeSet<&str> = adopted.hosts.iter().map(|host| host.address.as_str()).collect();
        // An address that comes twice in it stays until the first discovery.
        may_repeat = addresses.len() < adopted.hosts.len();
        poller.adopt(&adopted);
        seen.note("table adopted");
    }
    let mut open: Vec<(CallToken, String, bool)> = Vec::new();
    let mut known = BTreeSet::new();
    while !choices.is_empty() {
        match choices.below(6) {
            0 => now_ms = choices.odd_u64(),
            1 => now_ms = now_ms.saturating_sub(u64::from(choices.u16())),
            _ => now_ms = now_ms.saturating_add(u64::from(choices.u16())),
        }
        for call in poller.tick(now_ms) {
            assert!(known.insert(call.token.0), "{:?} was given before", call.token);
            let is_discovery = call.path.starts_with("/clusters");
            assert_eq!(call.headers.is_empty(), is_discovery, "{call:?}");
            seen.note(if is_discovery {
                "discovery call"
            } else {
                "scrape call"
            });
            open.push((call.token, call.authority, is_discovery));
        }
        for _ in 0..choices.below(4).min(open.len()) {
            let (token, address, is_discovery) = open.swap_remove(choices.below(open.len()));
            let body = if is_discovery {
                discovery_body(choices)
            } else {
                format!(
                    "vllm:num_requests_waiting {}\nprocess_start_time_seconds {}\n",
                    choices.byte(),
                    choices.odd_u32()
                )
            };
            let served_by = [Some(address.as_str()), None, Some("10.0.0.1:1")][choices.below(3)];
            let answer = Answer {
                status: choices.pick(&[200, 200, 200, 400, 503, 0]),
                served_by,
                body: body.as_bytes(),
            };
            match choices.below(5) {
                0 => poller.on_failure(token, now_ms),
                1 => {
                    poller.on_answer(token, now_ms, answer);
                    poller.on_answer(token, now_ms, answer);
                }
                _ => poller.on_answer(token, now_ms, answer),
            }
        }
        let interval_ms = poller.tick_interval_ms();
        assert!((1..=1000).contains(&interval_ms), "{interval_ms}");
        if let Some(table) = poller.take_publishable(now_ms) {
            seen.note_if("table published", !table.hosts.is_empty());
            assert!(
                table
                    .hosts
                    .iter()
                    .all(|host| usize::from(host.slot.0) < MAX_HOSTS),
                "{table:?}"
            );
            let addresses: BTreeSet<&str> = table.hosts.iter().map(|host| host.address.as_str()).collect();
            may_repeat &= addresses.len() < table.hosts.len();
            assert!(
                may_repeat || addresses.len() == table.hosts.len(),
                "an address twice: {table:?}"
            );
            assert_eq!(HostTable::decode(&table.encode()).as_ref(), Ok(&table));
            for host in &table.hosts {
                let first = static_hosts.iter().find(|known| known.address() == host.address);
                assert!(first.is_none_or(|first| first.role() == host.role), "{host:?}");
            }
        }
    }
    let counters = poller.counters();
    seen.note_if("scrape counted", counters.scrapes_ok > 0);
    seen.note_if("restart seen", counters.restarts > 0);
    let path = request_path(true, "a.b|c");
    assert!(path.bytes().all(|byte| byte.is_ascii_graphic()), "{path}");
}

fn discovery_body(choices: &mut Choices<'_>) -> String {
    match choices.below(6) {
        0 => words(choices),
        1 => String::new(),
        _ => {
            let mut body = String::from("llm::added_via_api::false\n");
            for _ in 0..choices.below(24) {
                body.push_str(&host(choices, "llm").0);
            }
            body
        }
    }
}

fn words(choices: &mut Choices<'_>) -> String {
    (0..choices.below(60)).map(|_| choices.pick(&WORDS)).collect()
}
