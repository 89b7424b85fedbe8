//! Runs the core's golden vectors on wasm32-unknown-unknown, in node: the same hashes must come out as natively.
//!
//! Everything that is missing but node is added: the Rust target, and the test runner of exactly the `wasm-bindgen` that
//! `Cargo.lock` names (runner and library refuse each other otherwise). No test run at all is a failure.

use std::fmt;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};

use warmroute_fleet::process::{RunError, on_path, run, workspace_root};
use warmroute_fleet::toolchain::{TargetError, add_target, tool};

fn main() -> ExitCode {
    match run_vectors(&workspace_root()) {
        Ok(passed) => {
            println!("{passed} tests passed on {TARGET}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("wasm-tests: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Why the vectors are not proven.
#[derive(Debug)]
enum Failure {
    NoNode,
    NoTarget(TargetError),
    LockUnreadable(io::Error),
    NotInLock,
    RunnerNotInstalled { version: String, cause: RunError },
    RunnerMissing(PathBuf),
    NotStarted(io::Error),
    TestsFailed(ExitStatus),
    NoSummary,
    NothingRan,
    SomeFailed(u64),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoNode => f.write_str("node is not on PATH: install Node.js 18 or newer"),
            Self::NoTarget(cause) => cause.fmt(f),
            Self::LockUnreadable(cause) => write!(f, "Cargo.lock cannot be read: {cause}"),
            Self::NotInLock => f.write_str("Cargo.lock names no wasm-bindgen"),
            Self::RunnerNotInstalled { version, cause } => {
                write!(f, "wasm-bindgen-cli {version} could not be installed: {cause}")
            }
            Self::RunnerMissing(path) => {
                write!(f, "wasm-bindgen-cli was installed without {}", path.display())
            }
            Self::NotStarted(cause) => write!(f, "cargo could not be started: {cause}"),
            Self::TestsFailed(status) => write!(f, "the tests ended with {status}"),
            Self::NoSummary => f.write_str("the runner printed no summary"),
            Self::NothingRan => f.write_str("no test ran"),
            Self::SomeFailed(failed) => write!(f, "{failed} tests failed"),
        }
    }
}

/// Runs the tests and returns how many passed, at least one.
fn run_vectors(root: &Path) -> Result<u64, Failure> {
    if on_path("node").is_none() {
        return Err(Failure::NoNode);
    }
    add_target(root, TARGET).map_err(Failure::NoTarget)?;
    let lock = std::fs::read_to_string(root.join("Cargo.lock")).map_err(Failure::LockUnreadable)?;
    let version = locked_version(&lock, "wasm-bindgen").ok_or(Failure::NotInLock)?;
    let runner = runner(root, version)?;
    let output = test_output(root, &runner)?;
    let summary = summary(&output).ok_or(Failure::NoSummary)?;
    match summary {
        Summary { failed: 0, passed: 0 } => Err(Failure::NothingRan),
        Summary { failed: 0, passed } => Ok(passed),
        Summary { failed, .. } => Err(Failure::SomeFailed(failed)),
    }
}

/// The test runner of that version, installed under `target/tools` unless it is there.
fn runner(root: &Path, version: &str) -> Result<PathBuf, Failure> {
    let folder = root.join("target/tools").join(format!("wasm-bindgen-{version}"));
    let runner = folder
        .join("bin")
        .join(format!("{RUNNER}{}", std::env::consts::EXE_SUFFIX));
    if runner.is_file() {
        return Ok(runner);
    }
    eprintln!("installing wasm-bindgen-cli {version}, once …");
    // Not from the workspace: its toolchain file and its `.cargo/config.toml` are not meant for tools. Not `--locked`
    // either, because the lock file of the published package may name versions that have been withdrawn.
    run(Command::new(tool("CARGO", "cargo"))
        .args(["install", "--quiet", "--version", version, "--root"])
        .arg(&folder)
        .arg("wasm-bindgen-cli"))
    .map_err(|cause| Failure::RunnerNotInstalled {
        version: version.to_owned(),
        cause,
    })?;
    if runner.is_file() {
        Ok(runner)
    } else {
        Err(Failure::RunnerMissing(runner))
    }
}

/// Runs the tests, showing what they print while they print it.
fn test_output(root: &Path, runner: &Path) -> Result<String, Failure> {
    let mut child = Command::new(tool("CARGO", "cargo"))
        .current_dir(root)
        .args([
            "test",
            "--target",
            TARGET,
            "--package",
            "warmroute",
            "--test",
            "wasm_vectors",
        ])
        .env("CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_RUNNER", runner)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(Failure::NotStarted)?;
    let mut output = String::new();
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).split(b'\n') {
            let line = line.map_err(Failure::NotStarted)?;
            let line = String::from_utf8_lossy(&line);
            // Nobody may be reading; the exit code still tells.
            let _ = writeln!(io::stdout(), "{line}");
            output.push_str(&line);
            output.push('\n');
        }
    }
    let status = child.wait().map_err(Failure::NotStarted)?;
    if status.success() {
        Ok(output)
    } else {
        Err(Failure::TestsFailed(status))
    }
}

/// The version of a package in the text of a `Cargo.lock`.
fn locked_version<'a>(lock: &'a str, package: &str) -> Option<&'a str> {
    let name = format!("name = \"{package}\"");
    let mut lines = lock.lines().skip_while(|line| line.trim() != name);
    lines.next()?;
    lines
        .next()?
        .trim()
        .strip_prefix("version = \"")?
        .strip_suffix('"')
}

/// What a runner's last lines say.
#[derive(Debug, PartialEq, Eq)]
struct Summary {
    passed: u64,
    failed: u64,
}

/// Adds up the lines `test result: ok. 3 passed; 0 failed; 0 ignored; …`, of which there is one for each test binary.
fn summary(output: &str) -> Option<Summary> {
    let mut sum: Option<Summary> = None;
    for line in output.lines() {
        let Some(result) = line.trim().strip_prefix("test result: ") else {
            continue;
        };
        let counts = result.split_once(". ").map_or(result, |(_, counts)| counts);
        let count = |what: &str| -> Option<u64> {
            counts
                .split(';')
                .find_map(|part| part.trim().strip_suffix(what)?.trim().parse().ok())
        };
        let (passed, failed) = (count(" passed")?, count(" failed")?);
        let before = sum.unwrap_or(Summary { passed: 0, failed: 0 });
        sum = Some(Summary {
            passed: before.passed + passed,
            failed: before.failed + failed,
        });
    }
    sum
}

const TARGET: &str = "wasm32-unknown-unknown";
const RUNNER: &str = "wasm-bindgen-test-runner";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_locked_version_is_that_of_the_exact_name() {
        let lock = "[[package]]\nname = \"wasm-bindgen-test\"\nversion = \"0.3.80\"\n\n\
                    [[package]]\nname = \"wasm-bindgen\"\nversion = \"0.2.130\"\nsource = \"x\"\n";
        assert_eq!(locked_version(lock, "wasm-bindgen"), Some("0.2.130"));
        assert_eq!(locked_version(lock, "wasm"), None);
    }

    #[test]
    fn summaries_add_up_and_a_missing_one_is_noticed() {
        let output = "running 3 tests\ntest result: ok. 3 passed; 0 failed; 0 ignored; 0 filtered out\n\
                      test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured\n";
        assert_eq!(summary(output), Some(Summary { passed: 4, failed: 2 }));
        assert_eq!(summary("no tests to run!\n"), None);
    }
}
