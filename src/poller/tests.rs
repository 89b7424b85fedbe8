//! Tests of single steps, driven by hand.

use super::*;
use crate::discovery::StaticHost;
use crate::host_table::{Health, Host, Load, Role};
use crate::load::Preset;

const NOW_MS: u64 = 1_700_000_000_000;

pub(super) fn config() -> PollerConfig {
    PollerConfig {
        cluster: "llm".to_owned(),
        discovery: Discovery::default(),
        metrics: MetricsConfig::of_cluster("llm-metrics"),
        steering_header: "x-steer".to_owned(),
    }
}

/// An admin answer with these hosts.
pub(super) fn admin_answer(cluster: &str, hosts: &[(String, Health)]) -> String {
    let mut answer = format!("{cluster}::added_via_api::false\n");
    for (address, health) in hosts {
        let flags = match health {
            Health::Healthy => "healthy",
            Health::Degraded => "/degraded_eds_health",
            Health::Unhealthy => "/failed_active_hc",
            Health::Draining => "/eds_status_draining",
        };
        answer.push_str(&format!(
            "{cluster}::{address}::health_flags::{flags}\n{cluster}::{address}::weight::1\n"
        ));
    }
    answer
}

fn static_config(addresses: &[&str]) -> PollerConfig {
    let hosts = addresses
        .iter()
        .map(|address| StaticHost::new(address, Role::Both).unwrap())
        .collect();
    PollerConfig {
        discovery: Discovery::Static(hosts),
        ..config()
    }
}

fn ok<'a>(served_by: Option<&'a str>, body: &'a str) -> Answer<'a> {
    Answer {
        status: 200,
        served_by,
        body: body.as_bytes(),
    }
}

/// A poller that discovered these addresses at `NOW_MS`, with the scrapes that the next tick started.
fn discovered(config: PollerConfig, addresses: &[&str]) -> (Poller, Vec<Call>) {
    let mut poller = Poller::new(config);
    let calls = poller.tick(NOW_MS);
    answer_discovery(&mut poller, &calls[0], NOW_MS, addresses);
    let calls = poller.tick(NOW_MS);
    (poller, calls)
}

fn answer_discovery(poller: &mut Poller, call: &Call, now_ms: u64, addresses: &[&str]) {
    let hosts: Vec<(String, Health)> = addresses
        .iter()
        .map(|address| ((*address).to_owned(), Health::Healthy))
        .collect();
    poller.on_answer(call.token, now_ms, ok(None, &admin_answer("llm", &hosts)));
}

/// Ticks until a scrape starts; panics when none does within ten seconds.
fn next_scrape(poller: &mut Poller, now_ms: &mut u64) -> Call {
    for _ in 0..1_000 {
        *now_ms += 10;
        let calls = poller.tick(*now_ms);
        if let Some(call) = calls.into_iter().find(|call| call.cluster != "admin") {
            return call;
        }
    }
    panic!("no scrape within 10 s");
}

fn only_host(poller: &mut Poller) -> Host {
    let hosts = &poller.table(NOW_MS).hosts;
    assert_eq!(hosts.len(), 1);
    hosts[0].clone()
}

const SAMPLE: &str = "vllm:num_requests_waiting 3\n";

#[test]
fn the_first_call_asks_the_admin_for_the_pools_cluster() {
    let calls = Poller::new(config()).tick(NOW_MS);
    let expected = Call {
        token: CallToken(0),
        cluster: "admin".to_owned(),
        method: "GET",
        path: "/clusters?filter=%5Ellm%24".to_owned(),
        authority: "localhost".to_owned(),
        headers: Vec::new(),
        timeout_ms: 2_000,
    };
    assert_eq!(calls, [expected]);
}

#[test]
fn discovery_is_asked_once_an_interval_and_never_twice_at_once() {
    let mut poller = Poller::new(config());
    let first = poller.tick(NOW_MS);
    assert_eq!(first.len(), 1);
    assert!(poller.tick(NOW_MS + 2_000).is_empty(), "the first is still out");
    answer_discovery(&mut poller, &first[0], NOW_MS + 2_100, &[]);
    assert_eq!(poller.tick(NOW_MS + 2_100).len(), 1);
}

#[test]
fn a_refused_filter_is_not_sent_again() {
    let mut poller = Poller::new(config());
    let calls = poller.tick(NOW_MS);
    let refusal = Answer {
        status: 400,
        served_by: None,
        body: b"Invalid regex",
    };
    poller.on_answer(calls[0].token, NOW_MS, refusal);
    assert_eq!(poller.tick(NOW_MS + 2_000)[0].path, "/clusters");
    assert_eq!(poller.counters().discovery_failures, 1);
}

#[test]
fn a_scrape_names_one_host_in_the_steering_header() {
    let (_, calls) = discovered(config(), &["[2001:db8::1]:8000"]);
    let expected = Call {
        token: CallToken(1),
        cluster: "llm-metrics".to_owned(),
        method: "GET",
        path: "/metrics".to_owned(),
        authority: "[2001:db8::1]:8000".to_owned(),
        headers: vec![
            ("x-steer".to_owned(), "[2001:db8::1]:8000".to_owned()),
            ("accept".to_owned(), "text/plain".to_owned()),
        ],
        timeout_ms: 1_000,
    };
    assert_eq!(calls, [expected]);
}

#[test]
fn a_metrics_port_replaces_the_serving_port() {
    let mut config = config();
    config.metrics.port = Some(8002);
    let (mut poller, calls) = discovered(config, &["10.0.0.1:8000"]);
    assert_eq!(calls[0].authority, "10.0.0.1:8002");
    poller.on_answer(calls[0].token, NOW_MS, ok(Some("10.0.0.1:8002"), SAMPLE));
    let host = only_host(&mut poller);
    assert_eq!(
        (host.address.as_str(), host.load.waiting),
        ("10.0.0.1:8000", Some(3))
    );
}

#[test]
fn static_hosts_need_no_discovery() {
    let mut poller = Poller::new(static_config(&["10.0.0.2:80", "10.0.0.1:80", "10.0.0.2:80"]));
    let calls = poller.tick(NOW_MS);
    assert!(calls.iter().all(|call| call.cluster == "llm-metrics"));
    let addresses: Vec<&str> = poller
        .table
        .hosts
        .iter()
        .map(|host| host.address.as_str())
        .collect();
    assert_eq!(addresses, ["10.0.0.1:80", "10.0.0.2:80"]);
    assert_eq!(poller.table(NOW_MS).hosts[1].slot, Slot(1));
}

#[test]
fn metrics_can_be_off() {
    let mut config = static_config(&["10.0.0.1:80"]);
    config.metrics.enabled = false;
    let mut poller = Poller::new(config);
    assert!((0..100).all(|step| poller.tick(NOW_MS + step * 100).is_empty()));
    assert_eq!(poller.table(NOW_MS).hosts.len(), 1);
}

#[test]
fn fewer_scrapes_are_in_flight_through_the_pools_own_cluster() {
    let addresses: Vec<String> = (0..200).map(|number| format!("10.0.0.{number}:80")).collect();
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    for (cluster, configured, bound) in [
        ("llm", 16, 8),
        ("llm-metrics", 16, 16),
        ("m", 99, 16),
        ("m", 0, 1),
    ] {
        let mut config = static_config(&addresses);
        config.metrics.cluster = cluster.to_owned();
        config.metrics.max_in_flight = configured;
        let mut poller = Poller::new(config);
        let started: usize = (0..40).map(|step| poller.tick(NOW_MS + step * 20).len()).sum();
        assert_eq!(started, bound, "{cluster} with {configured}");
    }
}

#[test]
fn who_answered_decides_whether_a_sample_counts() {
    let cases = [
        (Some("10.0.0.1:80"), false, true),
        (Some("10.0.0.2:80"), false, false),
        (Some(""), false, false),
        (None, false, true),
        (None, true, false),
        (Some("10.0.0.1:80"), true, true),
    ];
    for (served_by, required, accepted) in cases {
        let mut config = config();
        config.metrics.require_served_by = required;
        let (mut poller, calls) = discovered(config, &["10.0.0.1:80"]);
        poller.on_answer(calls[0].token, NOW_MS + 5, ok(served_by, SAMPLE));
        let host = only_host(&mut poller);
        let expected = if accepted {
            (NOW_MS + 5, Some(3))
        } else {
            (0, None)
        };
        assert_eq!(
            (host.sampled_ms, host.load.waiting),
            expected,
            "{served_by:?}, required {required}"
        );
        let counters = poller.counters();
        assert_eq!(counters.served_by_mismatch, u64::from(!accepted));
        assert_eq!(
            counters.served_by_absent,
            u64::from(accepted && served_by.is_none())
        );
        assert_eq!(counters.scrapes_ok, u64::from(accepted));
    }
}

#[test]
fn failures_keep_the_last_sample_and_are_counted_by_cause() {
    let (mut poller, calls) = discovered(config(), &["10.0.0.1:80"]);
    let mut now_ms = NOW_MS;
    poller.on_answer(calls[0].token, now_ms, ok(Some("10.0.0.1:80"), SAMPLE));
    let sampled = only_host(&mut poller);

    let call = next_scrape(&mut poller, &mut now_ms);
    poller.on_answer(
        call.token,
        now_ms,
        Answer {
            status: 503,
            served_by: None,
            body: b"",
        },
    );
    let call = next_scrape(&mut poller, &mut now_ms);
    poller.on_failure(call.token, now_ms);
    let call = next_scrape(&mut poller, &mut now_ms);
    poller.on_answer(call.token, now_ms, ok(Some("10.0.0.1:80"), "<html>\n"));
    let counters = poller.counters();
    assert_eq!(
        (
            counters.scrape_failures,
            counters.parse_failures,
            counters.scrapes_ok
        ),
        (2, 1, 1)
    );
    assert_eq!(only_host(&mut poller), sampled);
}

#[test]
fn a_host_that_fails_is_asked_less_often_until_it_answers() {
    let mut now_ms = NOW_MS;
    let mut gaps = Vec::new();
    let mut last_ms = NOW_MS;
    let mut poller = Poller::new(static_config(&["10.0.0.1:80"]));
    for round in 0..10 {
        let call = next_scrape(&mut poller, &mut now_ms);
        gaps.push(now_ms - last_ms);
        last_ms = now_ms;
        if round == 7 {
            poller.on_answer(call.token, now_ms, ok(Some("10.0.0.1:80"), SAMPLE));
        } else {
            poller.on_failure(call.token, now_ms);
        }
    }
    let gaps = &gaps[1..];
    assert!(gaps.windows(2).take(4).all(|pair| pair[1] > pair[0]), "{gaps:?}");
    assert!(gaps[..7].iter().all(|gap| *gap <= 8_500), "{gaps:?}");
    assert!(gaps[7] <= 1_000, "an answer ends it: {gaps:?}");
    assert!(gaps[8] <= 1_000, "the next failure is a first one: {gaps:?}");
}

#[test]
fn a_call_that_never_ends_is_given_up() {
    let mut now_ms = NOW_MS;
    let mut poller = Poller::new(static_config(&["10.0.0.1:80"]));
    let lost = next_scrape(&mut poller, &mut now_ms);
    let lost_ms = now_ms;
    let next = next_scrape(&mut poller, &mut now_ms);
    assert!(now_ms > lost_ms + 2_000, "timeout and a second");
    assert_eq!(poller.counters().scrape_failures, 1);
    poller.on_answer(lost.token, now_ms, ok(Some("10.0.0.1:80"), SAMPLE));
    assert_eq!(poller.counters().scrapes_ok, 0, "too late");
    poller.on_answer(next.token, now_ms, ok(Some("10.0.0.1:80"), SAMPLE));
    assert_eq!(poller.counters().scrapes_ok, 1);
}

#[test]
fn a_sample_for_a_host_that_left_changes_nothing() {
    let (mut poller, scrapes) = discovered(config(), &["10.0.0.1:80"]);
    let calls = poller.tick(NOW_MS + 2_000);
    let discovery = calls.iter().find(|call| call.cluster == "admin").unwrap();
    answer_discovery(&mut poller, discovery, NOW_MS + 2_000, &["10.0.0.2:80"]);
    poller.on_answer(scrapes[0].token, NOW_MS + 2_000, ok(Some("10.0.0.1:80"), SAMPLE));
    let host = only_host(&mut poller);
    assert_eq!((host.address.as_str(), host.sampled_ms), ("10.0.0.2:80", 0));
}

#[test]
fn failed_discoveries_keep_the_hosts() {
    let (mut poller, _) = discovered(config(), &["10.0.0.1:80"]);
    let answers: [Option<Answer<'_>>; 4] = [
        None,
        Some(Answer {
            status: 503,
            served_by: None,
            body: b"",
        }),
        Some(ok(None, "no clusters")),
        Some(ok(None, "")),
    ];
    let mut now_ms = NOW_MS;
    for answer in answers {
        now_ms += 2_000;
        let calls = poller.tick(now_ms);
        let token = calls.iter().find(|call| call.cluster == "admin").unwrap().token;
        match answer {
            Some(answer) => poller.on_answer(token, now_ms, answer),
            None => poller.on_failure(token, now_ms),
        }
    }
    assert_eq!(poller.table(now_ms).hosts.len(), 1);
    let counters = poller.counters();
    assert_eq!(
        (
            counters.discovery_failures,
            counters.parse_failures,
            counters.discoveries_ok
        ),
        (4, 1, 1)
    );
}

#[test]
fn an_empty_cluster_empties_the_table() {
    let (mut poller, _) = discovered(config(), &["10.0.0.1:80"]);
    let calls = poller.tick(NOW_MS + 2_000);
    let token = calls.iter().find(|call| call.cluster == "admin").unwrap().token;
    poller.on_answer(token, NOW_MS + 2_000, ok(None, &admin_answer("llm", &[])));
    assert!(poller.table(NOW_MS).hosts.is_empty());
}

#[test]
fn skipped_addresses_are_counted() {
    let mut poller = Poller::new(config());
    let calls = poller.tick(NOW_MS);
    let body = "llm::added_via_api::false\nllm::/s::health_flags::healthy\n";
    poller.on_answer(calls[0].token, NOW_MS, ok(None, body));
    assert_eq!(poller.counters().skipped_addresses, 1);
}

#[test]
fn a_restart_shows_as_a_new_start_or_as_a_counter_that_fell() {
    let body = |started: f64, queries: u64, hits: u64| {
        format!(
            "process_start_time_seconds {started}\nvllm:prefix_cache_queries_total {queries}\n\
             vllm:prefix_cache_hits_total {hits}\n"
        )
    };
    let steps = [
        (body(1000.0, 50, 20), false),
        (body(1000.9, 60, 20), false),
        (body(1000.0, 60, 20), false),
        (body(2000.0, 70, 30), true),
        (body(2000.0, 69, 30), true),
        (body(2000.0, 80, 29), true),
        ("vllm:num_requests_waiting 1\n".to_owned(), false),
        (body(2000.0, 79, 29), true),
        (body(2000.0, 90, 40), false),
    ];
    let mut poller = Poller::new(static_config(&["10.0.0.1:80"]));
    let mut now_ms = NOW_MS;
    let mut last_epoch = 0;
    for (step, (body, restarted)) in steps.iter().enumerate() {
        let call = next_scrape(&mut poller, &mut now_ms);
        let epoch = only_host(&mut poller).epoch;
        assert!(step == 0 || epoch == last_epoch);
        poller.on_answer(call.token, now_ms, ok(Some("10.0.0.1:80"), body));
        last_epoch = only_host(&mut poller).epoch;
        assert_eq!(last_epoch > epoch, *restarted, "step {step}");
    }
    assert_eq!(poller.counters().restarts, 4);
}

#[test]
fn nothing_is_published_before_hosts_are_known() {
    let mut poller = Poller::new(config());
    let calls = poller.tick(NOW_MS);
    assert_eq!(poller.take_publishable(NOW_MS + 5_000), None);
    answer_discovery(&mut poller, &calls[0], NOW_MS + 5_001, &[]);
    assert_eq!(
        poller.take_publishable(NOW_MS + 5_001).unwrap().published_ms,
        NOW_MS + 5_001
    );
}

#[test]
fn tables_are_published_on_change_and_as_heartbeat() {
    let (mut poller, calls) = discovered(config(), &["10.0.0.1:80"]);
    assert!(poller.take_publishable(NOW_MS).is_some(), "new hosts");
    assert!(poller.take_publishable(NOW_MS + 1).is_none(), "nothing changed");
    poller.on_answer(calls[0].token, NOW_MS + 2, ok(Some("10.0.0.1:80"), SAMPLE));
    assert!(
        poller.take_publishable(NOW_MS + 49).is_none(),
        "samples wait for company"
    );
    assert_eq!(
        poller.take_publishable(NOW_MS + 50).unwrap().hosts[0]
            .load
            .waiting,
        Some(3)
    );
    assert!(poller.take_publishable(NOW_MS + 1_049).is_none());
    assert_eq!(
        poller.take_publishable(NOW_MS + 1_050).unwrap().published_ms,
        NOW_MS + 1_050
    );
}

#[test]
fn a_successor_keeps_slots_epochs_and_samples() {
    let hosts = [
        (3, 70, "10.0.0.1:80"),
        (1, 90, "10.0.0.2:80"),
        (5, 80, "10.0.0.9:80"),
    ];
    let hosts = hosts.map(|(slot, epoch, address)| Host {
        slot: Slot(slot),
        epoch,
        address: address.to_owned(),
        weight: 1,
        sampled_ms: NOW_MS - 300,
        load: Load {
            prefix_queries: Some(100),
            ..Load::default()
        },
        ..Host::default()
    });
    let mut poller = Poller::new(config());
    poller.adopt(&HostTable {
        published_ms: NOW_MS - 100,
        hosts: hosts.to_vec(),
    });
    assert_eq!(poller.take_publishable(NOW_MS).unwrap().hosts.len(), 3);
    let calls = poller.tick(NOW_MS);
    let discovery = calls.iter().find(|call| call.cluster == "admin").unwrap();
    answer_discovery(
        &mut poller,
        discovery,
        NOW_MS,
        &["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"],
    );
    let table = poller.table(NOW_MS).clone();
    assert_eq!(table.hosts[..2], [hosts[1].clone(), hosts[0].clone()]);
    let newcomer = &table.hosts[2];
    assert_eq!(
        newcomer.slot,
        Slot(6),
        "slots that may have been used a moment ago rest"
    );
    assert!(newcomer.epoch > 90);

    // A counter below the adopted sample is a restart that happened during the takeover.
    let mut now_ms = NOW_MS;
    loop {
        let call = next_scrape(&mut poller, &mut now_ms);
        if call.authority == "10.0.0.1:80" {
            poller.on_answer(
                call.token,
                now_ms,
                ok(None, "vllm:prefix_cache_queries_total 7\n"),
            );
            break;
        }
        poller.on_failure(call.token, now_ms);
    }
    assert!(
        poller
            .table(now_ms)
            .hosts
            .iter()
            .any(|host| host.slot == Slot(3) && host.epoch > 70)
    );
}

#[test]
fn a_strange_table_is_adopted_within_bounds() {
    let host = |slot, address: &str| Host {
        slot: Slot(slot),
        address: address.to_owned(),
        ..Host::default()
    };
    let hosts = vec![
        host(60_000, "10.0.0.1:80"),
        host(2, "10.0.0.2:80"),
        host(2, "10.0.0.3:80"),
        host(1, "10.0.0.2:80"),
    ];
    let mut poller = Poller::new(config());
    poller.adopt(&HostTable {
        published_ms: NOW_MS,
        hosts,
    });
    let calls = poller.tick(NOW_MS);
    let discovery = calls.iter().find(|call| call.cluster == "admin").unwrap();
    answer_discovery(&mut poller, discovery, NOW_MS, &["10.0.0.2:80"]);
    let host = only_host(&mut poller);
    assert_eq!((host.slot, host.address.as_str()), (Slot(1), "10.0.0.2:80"));
}

#[test]
fn a_clock_that_jumps_back_stops_nothing() {
    let (mut poller, calls) = discovered(config(), &["10.0.0.1:80"]);
    poller.on_answer(calls[0].token, NOW_MS, ok(Some("10.0.0.1:80"), SAMPLE));
    assert!(poller.take_publishable(NOW_MS).is_some());
    let mut now_ms = NOW_MS - 3_600_000;
    let calls = poller.tick(now_ms);
    assert!(
        calls.iter().any(|call| call.cluster == "admin"),
        "discovery is due"
    );
    assert!(poller.take_publishable(now_ms).is_some(), "a heartbeat is due");
    assert!(
        only_host(&mut poller).sampled_ms <= now_ms,
        "no sample from the future"
    );
    let before_ms = now_ms;
    let _ = next_scrape(&mut poller, &mut now_ms);
    assert!(now_ms <= before_ms + 1_000);
}

#[test]
fn slots_are_all_used_before_a_resting_one_is() {
    let mut slots = SlotBook::default();
    for _ in 0..MAX_HOSTS {
        slots.take(NOW_MS).unwrap();
    }
    assert_eq!(slots.take(NOW_MS), None);
    slots.free(Slot(9), NOW_MS + 2);
    slots.free(Slot(4), NOW_MS + 1);
    slots.free(Slot(7), NOW_MS + 3);
    assert_eq!(slots.take(NOW_MS + 10).unwrap().0, Slot(4), "rested longest");
    assert_eq!(
        slots.take(NOW_MS + 61_000).unwrap().0,
        Slot(7),
        "lowest that rested"
    );
    let (slot, epoch) = slots.take(NOW_MS + 61_000).unwrap();
    assert_eq!(slot, Slot(9));
    assert!(u64::from(epoch) > NOW_MS / 1_000);
}

#[test]
fn ticks_come_once_a_scrape_within_bounds() {
    let addresses: Vec<String> = (0..100).map(|number| format!("10.0.0.{number}:80")).collect();
    for (hosts, expected_ms) in [(0, 250), (1, 250), (5, 100), (100, 20)] {
        let addresses: Vec<&str> = addresses.iter().take(hosts).map(String::as_str).collect();
        let mut poller = Poller::new(static_config(&addresses));
        poller.tick(NOW_MS);
        assert_eq!(poller.tick_interval_ms(), expected_ms, "{hosts} hosts");
    }
}

#[test]
fn one_host_is_scraped_at_its_interval_with_the_ticks_that_were_asked_for() {
    let mut poller = Poller::new(static_config(&["10.0.0.1:80"]));
    let mut scrapes = 0;
    let mut now_ms = NOW_MS;
    while now_ms < NOW_MS + 20_000 {
        for call in poller.tick(now_ms) {
            poller.on_answer(call.token, now_ms, ok(Some("10.0.0.1:80"), SAMPLE));
            scrapes += 1;
        }
        // Envoy re-arms the timer after the handler: ticks come a little late.
        now_ms += poller.tick_interval_ms() + 2;
    }
    assert!((38..=41).contains(&scrapes), "{scrapes} in 20 s");
}

#[test]
fn a_host_is_not_scraped_twice_in_a_row_after_a_stall() {
    let mut poller = Poller::new(static_config(&["10.0.0.1:80"]));
    let mut now_ms = NOW_MS;
    let call = next_scrape(&mut poller, &mut now_ms);
    poller.on_answer(call.token, now_ms, ok(Some("10.0.0.1:80"), SAMPLE));
    now_ms += 5_000;
    let calls = poller.tick(now_ms);
    assert_eq!(calls.len(), 1);
    poller.on_answer(calls[0].token, now_ms + 1, ok(Some("10.0.0.1:80"), SAMPLE));
    assert!(poller.tick(now_ms + 1).is_empty());
    assert!(poller.tick(now_ms + 249).is_empty());
}

#[test]
fn other_presets_are_asked_on_their_path() {
    let mut config = config();
    config.metrics.preset = Preset::TensorRtLlm;
    config.metrics.path = config.metrics.preset.default_path().to_owned();
    let (_, calls) = discovered(config, &["10.0.0.1:80"]);
    assert_eq!(calls[0].path, "/prometheus/metrics");
}

#[test]
fn no_more_is_wanted_of_metrics_than_is_read_and_nothing_of_an_answer_that_nobody_waits_for() {
    let mut poller = Poller::new(config());
    let discovery = poller.tick(NOW_MS).remove(0);
    assert_eq!(poller.wanted_bytes(discovery.token, 200), MAX_ANSWER_BYTES + 1);
    answer_discovery(&mut poller, &discovery, NOW_MS, &["10.0.0.1:8000"]);
    assert_eq!(poller.wanted_bytes(discovery.token, 200), 0);
    let scrape = poller.tick(NOW_MS).remove(0);
    assert_eq!(poller.wanted_bytes(scrape.token, 200), MAX_METRICS_BYTES);
    assert_eq!(poller.wanted_bytes(scrape.token, 503), MAX_REFUSAL_BYTES);
    assert_eq!(poller.wanted_bytes(scrape.token, 404), 0);
}

/// What Envoys answer in the place of a host that does not take the connection.
const REFUSALS: [&str; 2] = [
    // 1.36.2
    "upstream connect error or disconnect/reset before headers. reset reason: remote connection failure, transport failure \
     reason: delayed connect error: Connection refused",
    // 1.40.0
    "upstream connect error or disconnect/reset before headers. reset reason: remote connection failure",
];

fn of_envoy(status: u16, body: &str) -> Answer<'_> {
    Answer {
        status,
        served_by: None,
        body: body.as_bytes(),
    }
}

/// A poller of one host, of which it has a sample.
fn sampled(config: PollerConfig) -> (Poller, u64) {
    let (mut poller, calls) = discovered(config, &["10.0.0.1:80"]);
    let by = calls[0].authority.clone();
    poller.on_answer(calls[0].token, NOW_MS, ok(Some(&by), SAMPLE));
    poller.take_publishable(NOW_MS);
    (poller, NOW_MS)
}

#[test]
fn a_host_that_refuses_connections_is_unhealthy_until_it_takes_one() {
    for refusal in REFUSALS {
        let (mut poller, mut now_ms) = sampled(config());
        let call = next_scrape(&mut poller, &mut now_ms);
        assert!(poller.wanted_bytes(call.token, 503) >= refusal.len());
        poller.on_answer(call.token, now_ms, of_envoy(503, refusal));
        assert_eq!(only_host(&mut poller).health, Health::Unhealthy);
        let published = poller.take_publishable(now_ms).expect("health is told at once");
        assert_eq!(published.hosts[0].health, Health::Unhealthy);

        // Discovery does not know, and what does not tell changes nothing.
        let mut seen = Vec::new();
        for answer in [
            of_envoy(504, "upstream request timeout"),
            of_envoy(
                503,
                "upstream connect error or disconnect/reset before headers. reset reason: overflow",
            ),
            ok(Some("10.0.0.2:80"), SAMPLE),
        ] {
            let call = next_scrape(&mut poller, &mut now_ms);
            poller.on_answer(call.token, now_ms, answer);
            seen.push(only_host(&mut poller).health);
        }
        poller.apply_endpoints(
            &[Endpoint::of_static(
                &StaticHost::new("10.0.0.1:80", Role::Both).unwrap(),
            )],
            now_ms,
        );
        seen.push(only_host(&mut poller).health);
        assert_eq!(seen, [Health::Unhealthy; 4]);

        // Whoever answers, listens, be it with an error.
        let call = next_scrape(&mut poller, &mut now_ms);
        poller.on_answer(
            call.token,
            now_ms,
            Answer {
                served_by: Some("10.0.0.1:80"),
                ..of_envoy(503, "still loading")
            },
        );
        assert_eq!(only_host(&mut poller).health, Health::Healthy);
    }
}

#[test]
fn a_host_that_refuses_is_asked_every_two_seconds_at_least() {
    let (mut poller, mut now_ms) = sampled(config());
    for _ in 0..8 {
        let before_ms = now_ms;
        let call = next_scrape(&mut poller, &mut now_ms);
        assert!(now_ms - before_ms <= 2_500, "{} ms", now_ms - before_ms);
        poller.on_answer(call.token, now_ms, of_envoy(503, REFUSALS[1]));
    }
}

#[test]
fn what_discovery_says_comes_back_when_connections_are_taken_again() {
    let (mut poller, mut now_ms) = sampled(config());
    let call = next_scrape(&mut poller, &mut now_ms);
    poller.on_answer(call.token, now_ms, of_envoy(503, REFUSALS[1]));
    let mut endpoint = Endpoint::of_static(&StaticHost::new("10.0.0.1:80", Role::Both).unwrap());
    for (discovered, refusing) in [
        (Health::Draining, Health::Draining),
        (Health::Degraded, Health::Unhealthy),
    ] {
        endpoint.health = discovered;
        poller.apply_endpoints(&[endpoint.clone()], now_ms);
        assert_eq!(only_host(&mut poller).health, refusing);
    }
    let call = next_scrape(&mut poller, &mut now_ms);
    poller.on_answer(call.token, now_ms, ok(None, SAMPLE));
    assert_eq!(only_host(&mut poller).health, Health::Degraded);
}

#[test]
fn a_host_adopted_as_unhealthy_is_what_discovery_or_a_scrape_tells_first() {
    let (mut before, mut now_ms) = sampled(config());
    let call = next_scrape(&mut before, &mut now_ms);
    before.on_answer(call.token, now_ms, of_envoy(503, REFUSALS[1]));
    let table = before.table(now_ms).clone();
    let unhealthy = [("10.0.0.1:80".to_owned(), Health::Unhealthy)];

    // The admin interface is away, and stays so.
    let mut poller = Poller::new(config());
    poller.adopt(&table);
    let call = next_scrape(&mut poller, &mut now_ms);
    assert_eq!(only_host(&mut poller).health, Health::Unhealthy);
    poller.on_answer(call.token, now_ms, ok(None, SAMPLE));
    assert_eq!(only_host(&mut poller).health, Health::Healthy);

    // Envoy's own health checks fail, whatever scrapes give.
    let mut poller = Poller::new(config());
    poller.adopt(&table);
    let call = poller.tick(now_ms).remove(0);
    poller.on_answer(call.token, now_ms, ok(None, &admin_answer("llm", &unhealthy)));
    let call = next_scrape(&mut poller, &mut now_ms);
    poller.on_answer(call.token, now_ms, ok(None, SAMPLE));
    assert_eq!(only_host(&mut poller).health, Health::Unhealthy);

    // Discovery knows of nothing wrong.
    let mut poller = Poller::new(config());
    poller.adopt(&table);
    let call = poller.tick(now_ms).remove(0);
    answer_discovery(&mut poller, &call, now_ms, &["10.0.0.1:80"]);
    assert_eq!(only_host(&mut poller).health, Health::Healthy);
}

#[test]
fn refusals_where_no_scrape_succeeded_or_of_another_port_say_nothing_of_the_host() {
    let (mut poller, calls) = discovered(config(), &["10.0.0.1:80"]);
    poller.on_answer(calls[0].token, NOW_MS, of_envoy(503, REFUSALS[0]));
    assert_eq!(only_host(&mut poller).health, Health::Healthy);

    let mut of_port = config();
    of_port.metrics.port = Some(9_000);
    let (mut poller, mut now_ms) = sampled(of_port);
    let call = next_scrape(&mut poller, &mut now_ms);
    poller.on_answer(call.token, now_ms, of_envoy(503, REFUSALS[0]));
    assert_eq!(only_host(&mut poller).health, Health::Healthy);
}

/// Hosts of these priorities, each with the health given.
fn endpoints_of(levels: &[&[Health]]) -> Vec<Endpoint> {
    let mut endpoints = Vec::new();
    for (priority, level) in (0u8..).zip(levels) {
        for (number, health) in level.iter().enumerate() {
            let address = format!("10.0.{priority}.{number}:80");
            endpoints.push(Endpoint {
                health: *health,
                priority,
                ..Endpoint::of_static(&StaticHost::new(&address, Role::Both).unwrap())
            });
        }
    }
    endpoints
}

/// How many hosts of each priority take traffic.
fn taking_traffic(poller: &mut Poller, now_ms: u64) -> [usize; 3] {
    let hosts = &poller.table(now_ms).hosts;
    [0, 1, 2].map(|priority| {
        let start = format!("10.0.{priority}.");
        let level = hosts.iter().filter(|host| host.address.starts_with(&start));
        level.filter(|host| host.health.takes_traffic()).count()
    })
}

#[test]
fn hosts_that_are_not_needed_stand_by() {
    use Health::{Degraded as D, Draining as R, Healthy as H, Unhealthy as U};
    let cases: [(&[&[Health]], [usize; 3]); 23] = [
        (&[&[H, H, H, H]], [4, 0, 0]),
        (&[&[H, H], &[H, H], &[H]], [2, 0, 0]),
        // 1.4 × 3/4 is enough, 1.4 × 2/3 is not.
        (&[&[H, H, H, U], &[H]], [3, 0, 0]),
        (&[&[H, H, U], &[H]], [2, 1, 0]),
        (&[&[H, R], &[H], &[H]], [1, 1, 0]),
        // Only as many join as Envoy would need for what is missing: 7 %, 30 %, 54 % of which one level has 42.
        (&[&[H, H, U], &[H, H, H, H]], [2, 1, 0]),
        (&[&[H, U], &[H, H, H, H, H, H, H, H, H, H]], [1, 3, 0]),
        (
            &[&[H, U, U], &[H, H, H, U, U, U, U, U, U, U], &[H, H, H, H, H]],
            [1, 3, 1],
        ),
        // Those that take no traffic are not among them.
        (&[&[H, U], &[U, H, H, R]], [1, 1, 0]),
        (&[&[H, U], &[U, U, U, H, H, H, H, H, H, H, H, H]], [1, 3, 0]),
        // Half of one level and half of the next are enough together.
        (&[&[H, U], &[H, U], &[H]], [1, 1, 0]),
        (&[&[H, U, U], &[H, U, U], &[H]], [1, 1, 1]),
        (&[&[U, U], &[H, H], &[H]], [0, 2, 0]),
        (&[&[U], &[U], &[H]], [0, 0, 1]),
        // Degraded hosts come after the healthy ones of all levels.
        (&[&[H, H, H, D]], [3, 0, 0]),
        (&[&[H, H, D]], [3, 0, 0]),
        (&[&[H, H, D], &[H], &[D]], [2, 1, 0]),
        (&[&[H, D, D, D], &[U]], [3, 0, 0]),
        (&[&[D, D], &[H], &[H]], [0, 1, 0]),
        (&[&[D, D], &[H, U, U], &[H]], [0, 1, 1]),
        (&[&[D], &[D], &[U]], [1, 0, 0]),
        (&[&[], &[H], &[H]], [0, 1, 0]),
        (&[&[U], &[R], &[U]], [0, 0, 0]),
    ];
    let mut poller = Poller::new(config());
    for (levels, expected) in cases {
        poller.apply_endpoints(&endpoints_of(levels), NOW_MS);
        assert_eq!(taking_traffic(&mut poller, NOW_MS), expected, "{levels:?}");
    }
    // The last level that a byte can name is one like the others.
    let mut endpoints = endpoints_of(&[&[U], &[H]]);
    endpoints[1].priority = u8::MAX;
    poller.apply_endpoints(&endpoints, NOW_MS);
    assert_eq!(taking_traffic(&mut poller, NOW_MS), [0, 1, 0]);
    endpoints[0].health = H;
    poller.apply_endpoints(&endpoints, NOW_MS);
    assert_eq!(taking_traffic(&mut poller, NOW_MS), [1, 0, 0]);
}

#[test]
fn a_level_joins_when_a_host_before_it_refuses_connections_and_leaves_when_it_takes_them() {
    let mut poller = Poller::new(config());
    let mut now_ms = NOW_MS;
    poller.apply_endpoints(&endpoints_of(&[&[Health::Healthy], &[Health::Healthy]]), now_ms);
    // Answers until the first host was asked; who takes traffic by the table that is published for that.
    let mut ask_first = |poller: &mut Poller, is_up: bool| {
        loop {
            let call = next_scrape(poller, &mut now_ms);
            poller.take_publishable(now_ms);
            let is_first = call.authority.starts_with("10.0.0.");
            let answer = if is_first && !is_up {
                of_envoy(503, REFUSALS[0])
            } else {
                ok(Some(&call.authority), SAMPLE)
            };
            poller.on_answer(call.token, now_ms, answer);
            if is_first {
                let told_at_once = poller.take_publishable(now_ms).is_some();
                return (told_at_once, taking_traffic(poller, now_ms));
            }
        }
    };
    assert_eq!(ask_first(&mut poller, true), (false, [1, 0, 0]));
    assert_eq!(ask_first(&mut poller, false), (true, [0, 1, 0]));
    assert_eq!(ask_first(&mut poller, false), (false, [0, 1, 0]));
    assert_eq!(ask_first(&mut poller, true), (true, [1, 0, 0]));
}
