//! Tests of discovery, apart because of the answers they hold.

use super::*;
use crate::blob::tests::Random;

/// The lines of a host that discovery reads, among some that it does not.
fn host(cluster: &str, address: &str, health_flags: &str, weight: &str) -> String {
    let mut lines = String::new();
    for (name, value) in [
        ("cx_active", "1"),
        ("rq_total", "17"),
        ("hostname", "vllm.example"),
        ("health_flags", health_flags),
        ("weight", weight),
        ("region", ""),
        ("priority", priority_of(address)),
        ("success_rate", "-1"),
    ] {
        lines.push_str(&format!("{cluster}::{address}::{name}::{value}\n"));
    }
    lines
}

/// So that every answer has hosts of two of them.
fn priority_of(address: &str) -> &'static str {
    if address.starts_with("10.0.0.2:") {
        "1"
    } else {
        "0"
    }
}

/// The lines of a cluster.
fn answer(cluster: &str, hosts: &[(&str, &str, &str)]) -> String {
    let mut lines = String::new();
    for (name, value) in [
        ("observability_name", cluster),
        ("outlier::success_rate_average", "-1"),
        ("default_priority::max_connections", "1024"),
        ("high_priority::max_retries", "3"),
        ("added_via_api", "true"),
    ] {
        lines.push_str(&format!("{cluster}::{name}::{value}\n"));
    }
    for (address, health_flags, weight) in hosts {
        lines.push_str(&host(cluster, address, health_flags, weight));
    }
    lines
}

fn only(body: &str) -> Discovered {
    endpoints(body.as_bytes(), "llm").unwrap()
}

fn addresses(found: &Discovered) -> Vec<&str> {
    found
        .endpoints
        .iter()
        .map(|endpoint| endpoint.address.as_str())
        .collect()
}

#[test]
fn hosts_are_read_with_health_weight_and_priority() {
    let body = answer("admin", &[("127.0.0.1:9901", "healthy", "1")])
        + &answer(
            "llm",
            &[
                ("10.0.0.2:8000", "healthy", "5"),
                ("10.0.0.1:8000", "/eds_status_draining", "1"),
            ],
        );
    let endpoint = |address: &str, health, weight, priority| Endpoint {
        address: address.to_owned(),
        health,
        role: Role::Both,
        weight,
        priority,
    };
    let expected = Discovered {
        endpoints: vec![
            endpoint("10.0.0.1:8000", Health::Draining, 1, 0),
            endpoint("10.0.0.2:8000", Health::Healthy, 5, 1),
        ],
        is_known: true,
        skipped_addresses: 0,
        over_limit: 0,
    };
    assert_eq!(only(&body), expected);
}

/// Real answers, see the README beside them.
#[test]
fn real_answers_are_read() {
    let answers: [(&[u8], u16); 2] = [
        (
            include_bytes!("../../tests/fixtures/clusters/envoy-1.36.2.txt"),
            19_901,
        ),
        (
            include_bytes!("../../tests/fixtures/clusters/envoy-1.40.0-filtered.txt"),
            19_902,
        ),
    ];
    for (body, admin_port) in answers {
        let found = endpoints(body, "outbound|8000||llm.ns").unwrap();
        let seen: Vec<(&str, Health, u32)> = found
            .endpoints
            .iter()
            .map(|endpoint| (endpoint.address.as_str(), endpoint.health, endpoint.weight))
            .collect();
        let admin = format!("127.0.0.1:{admin_port}");
        let expected = [
            (admin.as_str(), Health::Healthy, 3),
            ("127.0.0.2:9", Health::Unhealthy, 1),
            ("127.0.0.3:9", Health::Unhealthy, 1),
            ("127.0.0.4:9", Health::Degraded, 1),
            ("127.0.0.5:9", Health::Unhealthy, 1),
            ("127.0.0.6:9", Health::Draining, 1),
            ("[::1]:9", Health::Unhealthy, 1),
        ];
        assert_eq!(seen, expected);
        assert_eq!((found.is_known, found.skipped_addresses), (true, 0));
    }
    let pipes = endpoints(answers[0].0, "pipes").unwrap();
    assert_eq!((pipes.endpoints.len(), pipes.skipped_addresses), (0, 1));
    assert!(
        request_path(true, "outbound|8000||llm.ns")
            .ends_with("%5Eoutbound%5C%7C8000%5C%7C%5C%7Cllm%5C.ns%24"),
        "as the answers were asked for"
    );
}

#[test]
fn an_unknown_cluster_is_told_from_an_empty_one() {
    assert_eq!(only(""), Discovered::default());
    let others = answer("other", &[("10.0.0.1:80", "healthy", "1")])
        + &answer("llm-2", &[("10.0.0.2:80", "healthy", "1")])
        + &answer("llm::2", &[("10.0.0.3:80", "healthy", "1")]);
    assert_eq!(only(&others), Discovered::default());
    assert!(only(&answer("llm", &[])).is_known);
    assert!(only("llm::10.0.0.1:80::health_flags::healthy").is_known);
}

#[test]
fn health_follows_every_flag() {
    let cases = [
        ("healthy", Health::Healthy),
        ("", Health::Healthy),
        ("/a_flag_to_come", Health::Healthy),
        ("/degraded_eds_health", Health::Degraded),
        ("/degraded_active_hc", Health::Degraded),
        ("/eds_status_draining", Health::Draining),
        ("/pending_dynamic_removal", Health::Draining),
        ("/degraded_eds_health/pending_dynamic_removal", Health::Draining),
        ("/eds_status_draining/degraded_active_hc", Health::Draining),
        ("/failed_eds_health", Health::Unhealthy),
        ("/failed_active_hc", Health::Unhealthy),
        ("/failed_outlier_check", Health::Unhealthy),
        ("/pending_active_hc", Health::Unhealthy),
        ("/excluded_via_immediate_hc_fail", Health::Unhealthy),
        ("/active_hc_timeout", Health::Unhealthy),
        ("/failed_outlier_check/eds_status_draining", Health::Unhealthy),
        ("/eds_status_draining/failed_outlier_check", Health::Unhealthy),
    ];
    for (flags, expected) in cases {
        let body = answer("llm", &[("10.0.0.1:80", flags, "1")]);
        assert_eq!(only(&body).endpoints[0].health, expected, "{flags}");
    }
}

#[test]
fn addresses_are_spelled_as_envoy_spells_them() {
    let body = answer(
        "llm",
        &[
            ("[2001:db8::1]:8000", "healthy", "2"),
            ("[::ffff:10.0.0.9]:1", "/failed_active_hc", "3"),
            ("[::]:9", "healthy", "4"),
        ],
    );
    let found = only(&body);
    let seen: Vec<(&str, u32)> = found
        .endpoints
        .iter()
        .map(|endpoint| (endpoint.address.as_str(), endpoint.weight))
        .collect();
    assert_eq!(
        seen,
        [
            ("[2001:db8::1]:8000", 2),
            ("[::]:9", 4),
            ("[::ffff:10.0.0.9]:1", 3)
        ]
    );
}

#[test]
fn addresses_that_no_header_can_name_are_skipped_and_counted() {
    let hosts = [
        ("/tmp/s", "healthy", "1"),
        ("@abstract", "healthy", "1"),
        ("envoy://connect_originate/10.0.0.1:80", "healthy", "1"),
        ("name.example:80", "healthy", "1"),
        ("10.0.0.1:0", "healthy", "1"),
        ("10.0.0.1:70000", "healthy", "1"),
        ("10.0.0.3:80", "healthy", "1"),
    ];
    let found = only(&answer("llm", &hosts));
    assert_eq!((found.endpoints.len(), found.skipped_addresses), (1, 6));
}

#[test]
fn an_address_counts_once_as_it_comes_first() {
    let hosts = [
        ("10.0.0.2:80", "healthy", "1"),
        ("10.0.0.1:80", "healthy", "7"),
        ("10.0.0.1:80", "healthy", "1"),
    ];
    let found = only(&answer("llm", &hosts));
    let seen: Vec<(&str, u32)> = found
        .endpoints
        .iter()
        .map(|endpoint| (endpoint.address.as_str(), endpoint.weight))
        .collect();
    assert_eq!(seen, [("10.0.0.1:80", 7), ("10.0.0.2:80", 1)]);
}

#[test]
fn an_address_counts_as_it_comes_first_among_many() {
    let body: String = (0..200)
        .map(|at| {
            let address = format!("10.0.0.{}:80", at * 7 % 50);
            host("llm", &address, "healthy", &(at + 1).to_string())
        })
        .collect();
    for endpoint in only(&body).endpoints {
        assert!(endpoint.weight <= 50, "{endpoint:?}");
    }
}

#[test]
fn a_weight_is_at_least_one_and_belongs_to_the_host_before() {
    for (text, expected) in [
        ("3", 3),
        ("0", 1),
        ("", 1),
        ("x", 1),
        ("-4", 1),
        ("99999999999", u32::MAX),
    ] {
        let body = answer("llm", &[("10.0.0.1:80", "healthy", text)]);
        assert_eq!(only(&body).endpoints[0].weight, expected, "{text:?}");
    }
    let stray = answer("llm", &[("10.0.0.1:80", "healthy", "3")])
        + "llm::10.0.0.2:80::weight::9\nllm::weight::9\nllm-2::10.0.0.1:80::weight::9\n";
    assert_eq!(only(&stray).endpoints[0].weight, 3);
}

#[test]
fn values_that_look_like_more_lines_change_nothing() {
    let body = "llm::added_via_api::false\n\
        llm::10.0.0.1:80::hostname::a::health_flags::/failed_active_hc\n\
        llm::10.0.0.1:80::health_flags::healthy\n\
        llm::10.0.0.1:80::weight::2\n\
        llm::10.0.0.1:80::zone::weight::9\n";
    let found = only(body);
    assert_eq!(addresses(&found), ["10.0.0.1:80"]);
    assert_eq!(
        (found.endpoints[0].health, found.endpoints[0].weight),
        (Health::Healthy, 2)
    );
}

#[test]
fn other_answers_are_errors() {
    for body in [
        "bad regex",
        "null",
        "{\n \"cluster_statuses\": [",
        "<html>\nllm::added_via_api::true\n",
        "\n",
    ] {
        assert_eq!(
            endpoints(body.as_bytes(), "llm"),
            Err(DiscoveryError::NotClusters),
            "{body:?}"
        );
    }
}

/// An answer with as much to a host as Envoy writes: about 720 bytes.
fn large_answer(clusters: usize, hosts: usize) -> String {
    let names = [
        "cx_active",
        "cx_connect_fail",
        "cx_total",
        "rq_active",
        "rq_error",
        "rq_pending_active",
        "rq_success",
        "rq_timeout",
        "rq_total",
    ];
    let mut body = String::new();
    for cluster in 0..clusters {
        body.push_str(&answer(&format!("cluster-{cluster}"), &[]));
        for number in 0..hosts {
            let address = format!("10.{cluster}.{}.{}:8000", number / 250, number % 250);
            for name in names {
                body.push_str(&format!("cluster-{cluster}::{address}::{name}::0\n"));
            }
            body.push_str(&host(&format!("cluster-{cluster}"), &address, "healthy", "1"));
        }
    }
    body
}

#[test]
fn a_thousand_hosts_among_many_clusters_are_found() {
    let body = large_answer(5, 1000);
    let found = endpoints(body.as_bytes(), "cluster-3").unwrap();
    assert_eq!(found.endpoints.len(), 1000);
    assert!(
        found
            .endpoints
            .iter()
            .all(|endpoint| endpoint.address.starts_with("10.3."))
    );
}

#[test]
fn endpoints_beyond_the_bound_are_counted() {
    let found = endpoints(large_answer(1, 1100).as_bytes(), "cluster-0").unwrap();
    assert_eq!((found.endpoints.len(), found.over_limit), (MAX_HOSTS, 76));
}

#[test]
fn damaged_answers_never_panic() {
    let body = answer(
        "llm",
        &[
            ("10.0.0.2:8000", "healthy", "5"),
            ("[2001:db8::1]:8000", "/eds_status_draining", "1"),
        ],
    );
    let mut random = Random::seeded(9);
    for _ in 0..4_000 {
        let mut body = body.as_bytes().to_vec();
        for _ in 0..=random.below(5) {
            let at = usize::try_from(random.below(body.len() as u64)).unwrap();
            body[at] = b"[]::.0-nt/\n\xff "[usize::try_from(random.below(13)).unwrap()];
        }
        let _ = endpoints(&body, "llm");
    }
    for cut in 0..body.len() {
        if let Ok(found) = endpoints(&body.as_bytes()[..cut], "llm") {
            assert!(found.endpoints.len() <= 2, "{found:?}");
        }
    }
}

#[test]
fn the_filter_is_a_quoted_expression() {
    assert_eq!(request_path(false, "llm"), "/clusters");
    assert_eq!(request_path(true, "llm_1"), "/clusters?filter=%5Ellm_1%24");
    // ^outbound\|8000\|\|x\.ns$
    assert_eq!(
        request_path(true, "outbound|8000||x.ns"),
        "/clusters?filter=%5Eoutbound%5C%7C8000%5C%7C%5C%7Cx%5C.ns%24"
    );
    assert_eq!(request_path(true, "é"), "/clusters?filter=%5E%C3%A9%24");
}

#[test]
fn static_hosts_are_parsed_once() {
    let address = |text: &str| StaticHost::new(text, Role::Decode).map(|host| host.address().to_owned());
    assert_eq!(address("10.0.0.1:8000").as_deref(), Ok("10.0.0.1:8000"));
    assert_eq!(address("[2001:DB8:0:0::1]:80").as_deref(), Ok("[2001:db8::1]:80"));
    for text in [
        "",
        "10.0.0.1",
        "10.0.0.1:0",
        "10.0.0.1:99999",
        "name:80",
        "2001:db8::1:80x",
        " 10.0.0.1:80",
    ] {
        assert_eq!(address(text), Err(AddressError), "{text:?}");
    }
    assert_eq!(
        StaticHost::new("1.2.3.4:5", Role::Decode).unwrap().role(),
        Role::Decode
    );
}

/// Prints the cost of an answer: `cargo test --release -p warmroute --lib discovery::tests::answer_cost -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement, not a check"]
#[expect(clippy::disallowed_methods, reason = "measures itself")]
fn answer_cost() {
    let body = large_answer(1, 1000);
    let rounds = 100;
    let start = std::time::Instant::now();
    for _ in 0..rounds {
        std::hint::black_box(endpoints(std::hint::black_box(body.as_bytes()), "cluster-0").unwrap());
    }
    println!("1000 hosts, {} bytes: {:?}", body.len(), start.elapsed() / rounds);
}
