//! Both Envoys under test run plain configs in front of a fleet.

use std::time::{Duration, Instant};

use bytes::Bytes;
use warmroute_fleet::client::{Client, pieces, post_request};
use warmroute_fleet::engine::EngineConfig;
use warmroute_fleet::envoy::{
    self, Envoy, EnvoyOptions, EnvoyProcess, Requirement, StartError, write_atomically,
};
use warmroute_fleet::envoy_config::{EnvoyConfig, LISTENER, PoolConfig, STEERING_HEADER};
use warmroute_fleet::fleet::{Fleet, FleetOptions};

const BODY: &str = r#"{"model":"sim","messages":[{"role":"user","content":"hi"}],"max_tokens":1}"#;

fn both() -> [Envoy; 2] {
    [Requirement::Oldest, Requirement::Newest]
        .map(|requirement| envoy::find(requirement).unwrap_or_else(|error| panic!("{error}")))
}

async fn fleet(replicas: usize) -> Fleet {
    let options = FleetOptions {
        replicas,
        engine: EngineConfig::instant(),
        ..FleetOptions::default()
    };
    Fleet::start(&options).await.unwrap()
}

async fn started(envoy: &Envoy, config: &EnvoyConfig) -> EnvoyProcess {
    let options = EnvoyOptions {
        concurrency: 4,
        ..EnvoyOptions::default()
    };
    EnvoyProcess::start(envoy, &config.render(), &options)
        .await
        .unwrap_or_else(|error| panic!("{error}"))
}

#[tokio::test]
async fn requests_pass_and_the_steering_header_is_kept_from_the_replica() {
    let fleet = fleet(2).await;
    for envoy in both() {
        let mut config = EnvoyConfig::plain(PoolConfig::new("llm", fleet.addresses()));
        config.guard = false;
        let process = started(&envoy, &config).await;
        let target = fleet.replicas[1].address().to_string();
        for _ in 0..8 {
            let url = format!("{}/v1/chat/completions", process.url());
            let answer = Client::new()
                .post(&url, &[(STEERING_HEADER, &target)], BODY)
                .await
                .unwrap();
            assert_eq!(answer.status, 200, "{}\n{}", answer.text(), process.log());
            assert_eq!(answer.header("x-replica"), Some("replica-1"));
            assert_eq!(answer.header("x-served-by"), Some(target.as_str()));
            assert!(!answer.header("x-seen-headers").unwrap().contains(STEERING_HEADER));
        }
        let stats = process.stats("cluster.llm.upstream_rq_").await.unwrap();
        assert_eq!(stats.get("cluster.llm.upstream_rq_200"), Some(&8));
        let clusters = process.admin_get("/clusters?format=json").await.unwrap().json();
        assert_eq!(clusters["cluster_statuses"].as_array().map(Vec::len), Some(2));
    }
}

#[tokio::test]
async fn http2_bodies_in_pieces_with_trailers_arrive_whole() {
    let fleet = fleet(1).await;
    for envoy in both() {
        let mut pool = PoolConfig::new("llm", fleet.addresses());
        pool.http2 = true;
        let process = started(&envoy, &EnvoyConfig::plain(pool)).await;
        let chunks = BODY.as_bytes().chunks(7).map(Bytes::copy_from_slice).collect();
        let mut trailers = hyper::HeaderMap::new();
        trailers.insert("x-end", "yes".parse().unwrap());
        let url = format!("{}/v1/chat/completions", process.url());
        let request = post_request(&url, &[], pieces(chunks, Some(trailers))).unwrap();
        let answer = Client::http2().request(request).await.unwrap();
        assert_eq!(answer.status, 200, "{}\n{}", answer.text(), process.log());
        assert_eq!(
            answer.header("x-body-bytes"),
            Some(BODY.len().to_string().as_str())
        );
    }
}

#[tokio::test]
async fn dropping_the_process_frees_its_port() {
    let fleet = fleet(1).await;
    let [_, newest] = both();
    let process = started(
        &newest,
        &EnvoyConfig::plain(PoolConfig::new("llm", fleet.addresses())),
    )
    .await;
    let admin = process.admin();
    drop(process);
    assert!(Client::new().get(&format!("http://{admin}/ready")).await.is_err());
}

#[tokio::test]
async fn a_bad_config_fails_with_what_envoy_logged() {
    for envoy in both() {
        let config = r#"{"static_resources": {"listeners": [{"nonsense": 1}]}}"#;
        let error = EnvoyProcess::start(&envoy, config, &EnvoyOptions::default())
            .await
            .unwrap_err();
        assert!(matches!(error, StartError::Exited { .. }), "{error}");
        assert!(error.to_string().contains("nonsense"), "{error}");
        assert!(envoy::validate(&envoy, config).is_err());
    }
}

#[tokio::test]
async fn pushed_listeners_and_endpoints_take_effect() {
    let fleet = fleet(2).await;
    let folder = warmroute_fleet::process::workspace_root()
        .join("target/envoy-run")
        .join(format!("push-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for envoy in both() {
        let mut pool = PoolConfig::new("llm", Vec::new());
        let (lds, eds) = (folder.join("lds.json"), folder.join("eds.json"));
        pool.eds_path = Some(eds.clone());
        write_atomically(&eds, &pool.endpoints_file(&fleet.addresses()[..1])).unwrap();
        let mut config = EnvoyConfig::plain(pool.clone());
        config.lds_path = Some(lds.clone());
        write_atomically(&lds, &config.listeners_file()).unwrap();
        let process = started(&envoy, &config).await;
        let url = format!(
            "http://{}/v1/chat/completions",
            process.listener(LISTENER).unwrap()
        );
        let client = Client::new();
        assert_eq!(
            client.post(&url, &[], BODY).await.unwrap().header("x-replica"),
            Some("replica-0")
        );

        write_atomically(&eds, &pool.endpoints_file(&fleet.addresses()[1..])).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while client.post(&url, &[], BODY).await.unwrap().header("x-replica") != Some("replica-1") {
            assert!(Instant::now() < deadline, "{}", process.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }

        config.http1_trailers = true;
        write_atomically(&lds, &config.listeners_file()).unwrap();
        while process
            .stats("listener_manager.lds.update_success")
            .await
            .unwrap()
            .values()
            .sum::<u64>()
            < 2
        {
            assert!(Instant::now() < deadline, "{}", process.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
