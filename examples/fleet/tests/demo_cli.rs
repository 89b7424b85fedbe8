//! The demo as its user starts and stops it.

#![cfg(target_os = "linux")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const DEMO: &str = env!("CARGO_BIN_EXE_demo");

fn output(arguments: &[&str]) -> Output {
    Command::new(DEMO).args(arguments).output().unwrap()
}

#[test]
fn help_is_printed_and_unknown_arguments_are_refused() {
    let help = output(&["--help"]);
    assert!(help.status.success());
    assert!(String::from_utf8_lossy(&help.stdout).contains("--keep"));
    let refused = output(&["--fast"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).starts_with("unknown argument `--fast`\n"));
}

#[test]
fn a_file_that_is_no_workload_is_refused_before_anything_starts() {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    for (file, needle) in [("/no/such/file.json", "No such file"), (manifest, "line 1")] {
        let refused = output(&["--workload", file]);
        let error = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{error}");
        assert!(error.starts_with(file) && error.contains(needle), "{error}");
        assert!(refused.stdout.is_empty());
    }
}

#[test]
fn an_interrupt_ends_envoy_too() {
    // Once as soon as an Envoy runs, and once when traffic does.
    for (signal, code, word) in [("-INT", 130, "simulated replicas"), ("-TERM", 143, "answered")] {
        let mut demo = Running::start();
        demo.read_until(word);
        let children = demo.children();
        let sent = Command::new("kill")
            .args([signal, &demo.child.id().to_string()])
            .status()
            .unwrap();
        assert!(sent.success());
        assert_eq!(demo.wait(), Some(code));
        for child in children {
            assert!(!is_running(child), "process {child} outlived the demo");
        }
    }
}

/// A demo that is killed when a test fails.
struct Running {
    child: Child,
}

impl Running {
    fn start() -> Self {
        let child = Command::new(DEMO)
            .args(["--strategy", "plain_envoy"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self { child }
    }

    fn read_until(&mut self, word: &str) {
        let lines = BufReader::new(self.child.stdout.as_mut().unwrap()).lines();
        let found = lines.map_while(Result::ok).any(|line| line.contains(word));
        assert!(found, "the demo never printed `{word}`");
    }

    fn children(&self) -> Vec<u32> {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let children = children_of(self.child.id());
            if !children.is_empty() {
                return children;
            }
            assert!(Instant::now() < deadline, "no Envoy runs");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn wait(&mut self) -> Option<i32> {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "the demo does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Processes that a process started, as Linux lists them.
fn children_of(parent: u32) -> Vec<u32> {
    let listed = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let processes = listed.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    processes
        .filter(|process| status_field(*process, "PPid:").is_some_and(|id| id == parent.to_string()))
        .collect()
}

fn is_running(process: u32) -> bool {
    status_field(process, "State:").is_some_and(|state| !state.starts_with('Z'))
}

fn status_field(process: u32, field: &str) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    Some(
        status
            .lines()
            .find_map(|line| line.strip_prefix(field))?
            .trim()
            .to_owned(),
    )
}
