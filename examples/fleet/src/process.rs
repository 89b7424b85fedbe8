//! Helper programs: a command goes in, its output comes out; an interrupt ends all of them.

use std::fmt;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Why a helper program gave no result.
#[derive(Debug)]
pub enum RunError {
    /// It could not be started.
    NotStarted {
        /// The program.
        program: String,
        /// Why not.
        cause: io::Error,
    },
    /// It ended with a failure.
    Failed {
        /// The program with its arguments.
        command: String,
        /// Its exit code, if it was not killed.
        code: Option<i32>,
    },
    /// [`interrupt`] was called while it ran.
    Interrupted,
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotStarted { program, cause } => write!(f, "cannot start `{program}`: {cause}"),
            Self::Failed {
                command,
                code: Some(code),
            } => write!(f, "`{command}` failed with exit code {code}"),
            Self::Failed { command, code: None } => write!(f, "`{command}` was killed"),
            Self::Interrupted => f.write_str("interrupted"),
        }
    }
}

impl std::error::Error for RunError {}

/// Runs a command to its end and returns what it wrote to standard output; its standard error goes to ours.
///
/// # Errors
/// When it cannot be started, fails, or is interrupted.
pub fn run(command: &mut Command) -> Result<Vec<u8>, RunError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|cause| RunError::NotStarted { program, cause })?;
    let mut stdout = child.stdout.take();
    let reader = thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(stdout) = &mut stdout {
            // A torn pipe means that the child died, which its exit code tells.
            let _ = stdout.read_to_end(&mut bytes);
        }
        bytes
    });
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if INTERRUPTED.load(Ordering::Relaxed) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(RunError::Interrupted);
            }
            Ok(None) => thread::sleep(POLL_INTERVAL),
            Err(cause) => {
                return Err(RunError::NotStarted {
                    program: describe(command),
                    cause,
                });
            }
        }
    };
    let bytes = reader.join().unwrap_or_default();
    if !status.success() {
        return Err(RunError::Failed {
            command: describe(command),
            code: status.code(),
        });
    }
    Ok(bytes)
}

/// Ends every helper program that runs, and every later one at once.
pub fn interrupt() {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// The program of that name in a folder of `PATH`.
pub fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}

/// Folder of the workspace that this crate was built from.
pub fn workspace_root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_owned()
}

fn describe(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    text
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Short against what helper programs take, long against what a look costs.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_comes_back_and_failures_name_the_command() {
        let output = run(Command::new("sh").args(["-c", "echo hello"])).unwrap();
        assert_eq!(output, b"hello\n");
        let failed = run(Command::new("sh").args(["-c", "exit 3"])).unwrap_err();
        assert_eq!(failed.to_string(), "`sh -c exit 3` failed with exit code 3");
        let missing = run(&mut Command::new("no-such-program-here")).unwrap_err();
        assert!(matches!(missing, RunError::NotStarted { .. }));
    }

    #[test]
    fn workspace_root_holds_the_root_manifest() {
        let manifest = std::fs::read_to_string(workspace_root().join("Cargo.toml")).unwrap();
        assert!(manifest.contains("[workspace]"));
    }
}
