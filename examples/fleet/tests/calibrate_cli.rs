//! The calibration against engines whose coefficients are known.

use std::process::{Command, Stdio};

use warmroute_fleet::engine::EngineModel;
use warmroute_fleet::fleet::{Fleet, FleetOptions};

/// Times depend on how busy the machine is, so only what does not is asserted; the table is printed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hits_on_a_simulated_engine_are_predicted() {
    let speed: f64 = std::env::var("CALIBRATE_SPEED").map_or(40.0, |text| text.parse().unwrap());
    let fleet = Fleet::start(&FleetOptions {
        replicas: 2,
        engine_model: Some(EngineModel::cpu_small()),
        speed,
        ..FleetOptions::default()
    })
    .await
    .unwrap();
    let report = std::env::temp_dir().join(format!("warmroute-calibrate-{}.json", std::process::id()));
    let urls = fleet
        .addresses()
        .into_iter()
        .map(|address| format!("http://{address}"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_calibrate"));
    command
        .args(urls)
        .args([
            "--runs",
            "1",
            "--repetitions",
            "1",
            "--requests",
            "60",
            "--separate-front-end",
            "--report",
        ])
        .arg(&report)
        .args(["--rate", &speed.to_string()])
        .stdin(Stdio::null());
    let output = tokio::task::spawn_blocking(move || command.output())
        .await
        .unwrap()
        .unwrap();
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    println!("{text}");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&report).expect(&text)).unwrap();
    let run = &report["runs"][0];
    let number = |key: &str| run[key].as_f64().unwrap();
    assert!(number("hit_share_measured") > 20.0, "{text}");
    let error_points = number("hit_share_predicted") - number("hit_share_measured");
    assert!(error_points.abs() <= 3.0, "{text}");
    assert!(number("prefill_token_us") > 0.0, "{text}");
    assert_eq!(run["rows"].as_array().unwrap().len(), 120);
}
