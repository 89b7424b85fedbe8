//! Tests of discovery, apart because of the JSON they hold.

use super::*;
use crate::blob::tests::Random;
use crate::host_table::MAX_HOSTS;

fn host(address: &str, port: u32, rest: &str) -> String {
    format!(
        r#"{{"address":{{"socket_address":{{"address":"{address}","port_value":{port}}}}},
        "stats":[{{"name":"cx_total"}},{{"name":"rq_active","type":"GAUGE"}}]{rest}}}"#
    )
}

fn answer(cluster: &str, hosts: &[String]) -> String {
    format!(
        r#"{{"cluster_statuses":[{{"name":"{cluster}","added_via_api":true,"host_statuses":[{}],
        "circuit_breakers":{{"thresholds":[{{"max_connections":1024}}]}}}}]}}"#,
        hosts.join(",")
    )
}

fn only(body: &str) -> Discovered {
    endpoints(body.as_bytes(), &["llm"]).unwrap()
}

/// In the shape of a real answer of Envoy 1.40.
const REAL_SHAPE: &str = r#"{
 "cluster_statuses": [
  {
   "name": "admin",
   "host_statuses": [
    {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 9901}}, "weight": 1}
   ]
  },
  {
   "name": "llm",
   "added_via_api": true,
   "success_rate_ejection_threshold": {"value": 43.2},
   "host_statuses": [
    {
     "address": {"socket_address": {"address": "10.0.0.2", "port_value": 8000}},
     "stats": [
      {"value": "7", "name": "cx_connect_fail"},
      {"value": "12", "type": "GAUGE", "name": "rq_active"},
      {"name": "rq_error"},
      {"value": "3", "name": "rq_total"}
     ],
     "health_status": {"eds_health_status": "HEALTHY"},
     "success_rate": {"value": -1},
     "weight": 5,
     "hostname": "vllm-1.example",
     "priority": 1,
     "locality": {"region": "r", "zone": "z"}
    },
    {
     "address": {"socket_address": {"address": "10.0.0.1", "port_value": 8000}},
     "stats": [{"type": "GAUGE", "name": "rq_active"}],
     "health_status": {"eds_health_status": "DRAINING"},
     "weight": 1,
     "locality": {}
    }
   ],
   "circuit_breakers": {"thresholds": [{"max_connections": 1024}]},
   "observability_name": "llm"
  }
 ]
}"#;

#[test]
fn an_answer_in_the_real_shape_is_read_in_full() {
    let first = Endpoint {
        address: "10.0.0.1:8000".to_owned(),
        health: Health::Draining,
        role: Role::Both,
        weight: 1,
        rq_active: 0,
        hostname: String::new(),
        priority: 0,
    };
    let second = Endpoint {
        address: "10.0.0.2:8000".to_owned(),
        health: Health::Healthy,
        role: Role::Both,
        weight: 5,
        rq_active: 12,
        hostname: "vllm-1.example".to_owned(),
        priority: 1,
    };
    let expected = Discovered {
        endpoints: vec![first, second],
        clusters_found: 1,
        skipped_addresses: 0,
        over_limit: 0,
    };
    assert_eq!(only(REAL_SHAPE), expected);
}

/// Real answers, see the README beside them.
#[test]
fn real_answers_are_read() {
    let answers: [(&[u8], u16); 2] = [
        (
            include_bytes!("../../tests/fixtures/clusters/envoy-1.36.2.json"),
            19_901,
        ),
        (
            include_bytes!("../../tests/fixtures/clusters/envoy-1.40.0-filtered.json"),
            19_902,
        ),
    ];
    for (body, admin_port) in answers {
        let found = endpoints(body, &["outbound|8000||llm.ns"]).unwrap();
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
            ("[::1]:9", Health::Unhealthy, 1),
        ];
        assert_eq!(seen, expected);
        assert_eq!((found.clusters_found, found.skipped_addresses), (1, 0));
    }
    let pipes = endpoints(answers[0].0, &["pipes"]).unwrap();
    assert_eq!((pipes.endpoints.len(), pipes.skipped_addresses), (0, 1));
    let filter = request_path(true, &["outbound|8000||llm.ns"]);
    assert!(
        filter.ends_with("%5E%28outbound%5C%7C8000%5C%7C%5C%7Cllm%5C.ns%29%24"),
        "as the answers were asked for"
    );
}

#[test]
fn an_unknown_cluster_is_told_from_an_empty_one() {
    assert_eq!(only("{}"), Discovered::default());
    assert_eq!(
        only(&answer("other", &[host("10.0.0.1", 80, "")])),
        Discovered::default()
    );
    assert_eq!(only(r#"{"cluster_statuses":[{"name":"llm"}]}"#).clusters_found, 1);
}

#[test]
fn health_follows_every_flag() {
    let cases = [
        (r#"{"eds_health_status":"HEALTHY"}"#, Health::Healthy),
        (r#"{"eds_health_status":"UNKNOWN"}"#, Health::Healthy),
        ("{}", Health::Healthy),
        (r#"{"eds_health_status":"DEGRADED"}"#, Health::Degraded),
        (
            r#"{"eds_health_status":"HEALTHY","failed_active_degraded_check":true}"#,
            Health::Degraded,
        ),
        (r#"{"eds_health_status":"DRAINING"}"#, Health::Draining),
        (
            r#"{"eds_health_status":"HEALTHY","pending_dynamic_removal":true}"#,
            Health::Draining,
        ),
        (
            r#"{"eds_health_status":"DEGRADED","pending_dynamic_removal":true}"#,
            Health::Draining,
        ),
        (r#"{"eds_health_status":"UNHEALTHY"}"#, Health::Unhealthy),
        (r#"{"eds_health_status":"TIMEOUT"}"#, Health::Unhealthy),
        (r#"{"failed_active_health_check":true}"#, Health::Unhealthy),
        (r#"{"failed_active_health_check":false}"#, Health::Healthy),
        (r#"{"failed_outlier_check":true}"#, Health::Unhealthy),
        (r#"{"pending_active_hc":true}"#, Health::Unhealthy),
        (r#"{"excluded_via_immediate_hc_fail":true}"#, Health::Unhealthy),
        (r#"{"active_hc_timeout":true}"#, Health::Unhealthy),
        (
            r#"{"eds_health_status":"DRAINING","failed_outlier_check":true}"#,
            Health::Unhealthy,
        ),
    ];
    for (status, expected) in cases {
        let body = answer(
            "llm",
            &[host("10.0.0.1", 80, &format!(r#","health_status":{status}"#))],
        );
        assert_eq!(only(&body).endpoints[0].health, expected, "{status}");
    }
}

#[test]
fn addresses_are_spelled_as_in_the_host_map() {
    let body = answer(
        "llm",
        &[host("2001:db8::1", 8000, ""), host("::ffff:10.0.0.9", 1, "")],
    );
    let addresses: Vec<String> = only(&body)
        .endpoints
        .into_iter()
        .map(|endpoint| endpoint.address)
        .collect();
    assert_eq!(addresses, ["[2001:db8::1]:8000", "[::ffff:10.0.0.9]:1"]);
}

#[test]
fn addresses_that_no_header_can_name_are_skipped_and_counted() {
    let hosts = [
        r#"{"address":{"pipe":{"path":"/tmp/s"}},"weight":1}"#.to_owned(),
        r#"{"address":{"envoy_internal_address":{"server_listener_name":"connect_originate","endpoint_id":"10.0.0.1:80"}}}"#
            .to_owned(),
        host("name.example", 80, ""),
        host("10.0.0.1", 0, ""),
        host("10.0.0.1", 70_000, ""),
        r#"{"weight":1}"#.to_owned(),
        host("10.0.0.3", 80, ""),
    ];
    let found = only(&answer("llm", &hosts));
    assert_eq!((found.endpoints.len(), found.skipped_addresses), (1, 6));
}

#[test]
fn an_address_counts_once_as_it_comes_first() {
    let hosts = [
        host("10.0.0.2", 80, ""),
        host("10.0.0.1", 80, r#","weight":7"#),
        host("10.0.0.1", 80, ""),
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
    let hosts: Vec<String> = (0..200)
        .map(|at| {
            host(
                &format!("10.0.0.{}", at * 7 % 50),
                80,
                &format!(r#","weight":{}"#, at + 1),
            )
        })
        .collect();
    for endpoint in only(&answer("llm", &hosts)).endpoints {
        assert!(endpoint.weight <= 50, "{endpoint:?}");
    }
}

#[test]
fn numbers_are_read_as_numbers_and_as_strings() {
    let body = r#"{"cluster_statuses":[{"name":"llm","host_statuses":[{
        "address":{"socket_address":{"address":"10.0.0.1","port_value":"80"}},
        "stats":[{"name":"rq_active","value":4},{"name":"rq_total","value":"x"}],"weight":"3"}]}]}"#;
    let endpoint = &only(body).endpoints[0];
    assert_eq!((endpoint.weight, endpoint.rq_active), (3, 4));
}

#[test]
fn a_name_that_comes_after_the_hosts_still_decides() {
    let body = |name: &str| {
        format!(
            r#"{{"cluster_statuses":[{{"host_statuses":[{}],"name":"{name}"}}]}}"#,
            host("10.0.0.1", 80, "")
        )
    };
    assert_eq!(only(&body("llm")).endpoints.len(), 1);
    assert_eq!(only(&body("other")), Discovered::default());
}

#[test]
fn several_clusters_are_merged() {
    let body = format!(
        r#"{{"cluster_statuses":[{{"name":"a","host_statuses":[{}]}},{{"name":"b","host_statuses":[{}]}},
        {{"name":"c","host_statuses":[{}]}}]}}"#,
        host("10.0.0.3", 80, ""),
        host("10.0.0.1", 80, ""),
        host("10.0.0.2", 80, "")
    );
    let found = endpoints(body.as_bytes(), &["a", "b"]).unwrap();
    let addresses: Vec<&str> = found
        .endpoints
        .iter()
        .map(|endpoint| endpoint.address.as_str())
        .collect();
    assert_eq!(
        (addresses, found.clusters_found),
        (vec!["10.0.0.1:80", "10.0.0.3:80"], 2)
    );
}

#[test]
fn other_answers_are_errors() {
    for body in [
        "",
        "[]",
        "null",
        "bad regex",
        "{\"cluster_statuses\":{}}",
        "{} {}",
        "{\"cluster_statuses\":[",
    ] {
        let result = endpoints(body.as_bytes(), &["llm"]);
        assert!(
            matches!(result, Err(DiscoveryError::InvalidJson { .. })),
            "{body:?}: {result:?}"
        );
    }
}

/// An answer with as much to a host as Envoy writes: about 744 bytes.
fn large_answer(clusters: usize, hosts: usize) -> String {
    let stats: Vec<String> = [
        "cx_connect_fail",
        "cx_total",
        "rq_error",
        "rq_success",
        "rq_timeout",
        "rq_total",
    ]
    .iter()
    .map(|name| format!(r#"{{"value":"123456","name":"{name}"}}"#))
    .collect();
    let mut parts = Vec::new();
    for cluster in 0..clusters {
        let hosts: Vec<String> = (0..hosts)
            .map(|number| {
                format!(
                    r#"{{"address":{{"socket_address":{{"address":"10.{cluster}.{}.{}","port_value":8000}}}},
                    "stats":[{},{{"type":"GAUGE","value":"{number}","name":"rq_active"}}],
                    "health_status":{{"eds_health_status":"HEALTHY"}},"weight":1,
                    "locality":{{"region":"region","zone":"zone"}}}}"#,
                    number / 250,
                    number % 250,
                    stats.join(",")
                )
            })
            .collect();
        parts.push(format!(
            r#"{{"name":"cluster-{cluster}","host_statuses":[{}]}}"#,
            hosts.join(",")
        ));
    }
    format!(r#"{{"cluster_statuses":[{}]}}"#, parts.join(","))
}

#[test]
fn a_thousand_hosts_among_many_clusters_are_found() {
    let body = large_answer(5, 1000);
    let found = endpoints(body.as_bytes(), &["cluster-3"]).unwrap();
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
    let found = endpoints(large_answer(1, 1100).as_bytes(), &["cluster-0"]).unwrap();
    assert_eq!((found.endpoints.len(), found.over_limit), (MAX_HOSTS, 76));
}

#[test]
fn damaged_answers_never_panic() {
    let mut random = Random::seeded(9);
    for _ in 0..4_000 {
        let mut body = REAL_SHAPE.as_bytes().to_vec();
        for _ in 0..=random.below(5) {
            let at = usize::try_from(random.below(body.len() as u64)).unwrap();
            body[at] = b"{}[]\",:0-nt\\\xff "[usize::try_from(random.below(14)).unwrap()];
        }
        let _ = endpoints(&body, &["llm"]);
    }
    for cut in 0..REAL_SHAPE.len() {
        assert!(endpoints(&REAL_SHAPE.as_bytes()[..cut], &["llm"]).is_err());
    }
    let deep = format!("{{\"cluster_statuses\":{}", "[".repeat(100_000));
    assert!(endpoints(deep.as_bytes(), &["llm"]).is_err());
}

#[test]
fn the_filter_is_a_quoted_expression() {
    assert_eq!(request_path(false, &["llm"]), "/clusters?format=json");
    assert_eq!(request_path(true, &[]), "/clusters?format=json");
    assert_eq!(
        request_path(true, &["llm_1"]),
        "/clusters?format=json&filter=%5E%28llm_1%29%24"
    );
    // ^(outbound\|8000\|\|x\.ns|b)$
    assert_eq!(
        request_path(true, &["outbound|8000||x.ns", "b"]),
        "/clusters?format=json&filter=%5E%28outbound%5C%7C8000%5C%7C%5C%7Cx%5C.ns%7Cb%29%24"
    );
    assert_eq!(
        request_path(true, &["é"]),
        "/clusters?format=json&filter=%5E%28%C3%A9%29%24"
    );
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
        std::hint::black_box(endpoints(std::hint::black_box(body.as_bytes()), &["cluster-0"]).unwrap());
    }
    println!("1000 hosts, {} bytes: {:?}", body.len(), start.elapsed() / rounds);
}
