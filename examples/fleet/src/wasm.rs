//! The filter's `.wasm`: built from the workspace on demand, so that a stale one can never be measured.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

use crate::process::{RunError, run, workspace_root};
use crate::toolchain::{TargetError, add_target, tool};

/// Target triple that Envoy's V8 runs.
pub const WASM_TARGET: &str = "wasm32-wasip1";

/// Why there is no `.wasm`.
#[derive(Debug)]
pub enum BuildError {
    /// There is no standard library for [`WASM_TARGET`].
    NoTarget(TargetError),
    /// The build failed; the compiler has said why.
    BuildFailed(RunError),
    /// The build succeeded without naming a `.wasm`.
    NoArtifact,
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoTarget(cause) => cause.fmt(f),
            Self::BuildFailed(cause) => write!(f, "the filter could not be built: {cause}"),
            Self::NoArtifact => f.write_str("the build named no .wasm file"),
        }
    }
}

impl std::error::Error for BuildError {}

/// Builds the filter once per process and returns the path of its `.wasm`; adds the Rust target where it is missing.
///
/// Several processes may do this at once: cargo's own lock makes them take turns.
///
/// # Errors
/// When toolchain or build fail; the same failure is returned to every caller in this process.
pub fn build_wasm() -> Result<PathBuf, &'static BuildError> {
    static BUILT: OnceLock<Result<PathBuf, BuildError>> = OnceLock::new();
    match BUILT.get_or_init(|| build(&workspace_root())) {
        Ok(path) => Ok(path.clone()),
        Err(error) => Err(error),
    }
}

fn build(root: &Path) -> Result<PathBuf, BuildError> {
    add_target(root, WASM_TARGET).map_err(BuildError::NoTarget)?;
    eprintln!("building the filter for {WASM_TARGET} …");
    let output = run(Command::new(tool("CARGO", "cargo")).current_dir(root).args([
        "rustc",
        "--release",
        "--package",
        "warmroute",
        "--lib",
        "--target",
        WASM_TARGET,
        "--crate-type",
        "cdylib",
        "--message-format",
        "json-render-diagnostics",
    ]))
    .map_err(BuildError::BuildFailed)?;
    artifact(&String::from_utf8_lossy(&output)).ok_or(BuildError::NoArtifact)
}

/// The `.wasm` that cargo's JSON messages name last: dependencies come first.
fn artifact(messages: &str) -> Option<PathBuf> {
    messages
        .lines()
        .rev()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message["reason"] == "compiler-artifact")
        .find_map(|message| {
            let files = message["filenames"].as_array()?;
            files
                .iter()
                .filter_map(Value::as_str)
                .find(|file| file.ends_with(".wasm"))
                .map(PathBuf::from)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn artifact_is_the_last_wasm_file_named() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","filenames":["/t/libserde.rlib"]}"#,
            "\n",
            r#"{"reason":"compiler-artifact","filenames":["/t/warmroute.wasm","/t/warmroute.d"]}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
        );
        assert_eq!(artifact(messages), Some(PathBuf::from("/t/warmroute.wasm")));
        assert_eq!(artifact(""), None);
    }

    #[test]
    fn the_filter_builds_and_is_a_wasm_module() {
        let path = build_wasm().expect("the filter builds");
        let bytes = std::fs::read(path).expect("the artifact exists");
        assert_eq!(bytes.get(..4), Some(&b"\0asm"[..]));
    }
}
