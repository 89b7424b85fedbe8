//! The Rust toolchain of the workspace: its programs, and the targets that it lacks.

use std::ffi::OsString;
use std::fmt;
use std::path::Path;
use std::process::Command;

use crate::process::{RunError, on_path, run};

/// Why a target's standard library is not there.
#[derive(Debug)]
pub enum TargetError {
    /// It is missing and there is no `rustup` to add it.
    NoRustup(&'static str),
    /// `rustup target add` failed.
    NotAdded(&'static str, RunError),
    /// `rustc` did not say where its libraries are.
    NoRustc(RunError),
}

impl fmt::Display for TargetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRustup(target) => write!(
                f,
                "the Rust target {target} is missing and rustup was not found: install rustup, or add the target's \
                 standard library to your toolchain"
            ),
            Self::NotAdded(target, cause) => {
                write!(f, "the Rust target {target} could not be added: {cause}")
            }
            Self::NoRustc(cause) => write!(f, "rustc does not answer: {cause}"),
        }
    }
}

impl std::error::Error for TargetError {}

/// Adds the target's standard library when the toolchain of the workspace lacks it.
///
/// # Errors
/// When it is missing and cannot be added.
pub fn add_target(root: &Path, target: &'static str) -> Result<(), TargetError> {
    let print = ["--print", "target-libdir", "--target", target];
    let libraries = run(Command::new(tool("RUSTC", "rustc")).current_dir(root).args(print))
        .map_err(TargetError::NoRustc)?;
    if Path::new(String::from_utf8_lossy(&libraries).trim()).is_dir() {
        return Ok(());
    }
    let rustup = on_path("rustup").ok_or(TargetError::NoRustup(target))?;
    eprintln!("adding the Rust target {target} …");
    run(Command::new(rustup)
        .current_dir(root)
        .args(["target", "add", target]))
    .map(|_| ())
    .map_err(|cause| TargetError::NotAdded(target, cause))
}

/// The program that an environment variable names, or the usual one.
#[must_use]
pub fn tool(variable: &str, default: &str) -> OsString {
    std::env::var_os(variable).unwrap_or_else(|| default.into())
}
