//! A running Envoy: binary and config go in, a ready proxy with known ports comes out; dropping it ends it.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::client::{Answer, Client, ClientError};
use crate::envoy::Envoy;
use crate::odd::free_port;
use crate::process::workspace_root;

/// Stands in a config for the admin port, wherever it is needed: a free port takes its place at the start.
///
/// A cluster that points to the admin interface has to name its port in the config, so Envoy cannot choose it.
pub const ADMIN_PORT_PLACEHOLDER: &str = "@ADMIN_PORT@";

/// How to run an Envoy.
#[derive(Debug, Clone)]
pub struct EnvoyOptions {
    /// Worker threads.
    pub concurrency: u32,
    /// Log level, as in `-l`.
    pub log_level: String,
    /// Levels of single components, as in `--component-log-level`; filters log as `wasm`.
    pub component_log_level: String,
    /// More arguments.
    pub extra_args: Vec<String>,
    /// Environment variables besides our own.
    pub variables: Vec<(String, String)>,
    /// How long to wait for the proxy to be ready.
    pub deadline: Duration,
}

impl Default for EnvoyOptions {
    fn default() -> Self {
        Self {
            concurrency: 2,
            log_level: "warning".to_owned(),
            component_log_level: "wasm:info".to_owned(),
            extra_args: Vec::new(),
            variables: Vec::new(),
            deadline: Duration::from_secs(60),
        }
    }
}

/// A running Envoy.
#[derive(Debug)]
pub struct EnvoyProcess {
    child: Child,
    folder: PathBuf,
    admin: SocketAddr,
    listeners: BTreeMap<String, SocketAddr>,
    client: Client,
}

impl EnvoyProcess {
    /// Starts an Envoy and waits until it is live and listens.
    ///
    /// [`ADMIN_PORT_PLACEHOLDER`] in the config becomes a free port; listeners may ask for port 0.
    ///
    /// # Errors
    /// When Envoy cannot be started, refuses the config, or is not ready within the deadline.
    pub async fn start(envoy: &Envoy, config: &str, options: &EnvoyOptions) -> Result<Self, StartError> {
        let mut attempt = 1;
        loop {
            match Self::start_once(envoy, config, options).await {
                // Between choosing the admin port and binding it, somebody else took it.
                Err(StartError::Exited { log, .. })
                    if attempt < MAX_ATTEMPTS && log.contains("ddress already in use") =>
                {
                    attempt += 1;
                }
                result => return result,
            }
        }
    }

    /// Gets a path of the admin interface.
    ///
    /// # Errors
    /// When the exchange fails.
    pub async fn admin_get(&self, path: &str) -> Result<Answer, ClientError> {
        self.client.get(&format!("http://{}{path}", self.admin)).await
    }

    /// Posts to a path of the admin interface.
    ///
    /// # Errors
    /// When the exchange fails.
    pub async fn admin_post(&self, path: &str) -> Result<Answer, ClientError> {
        self.client
            .post(&format!("http://{}{path}", self.admin), &[], "")
            .await
    }

    /// Counters and gauges whose names begin with `prefix`.
    ///
    /// # Errors
    /// When the exchange fails.
    pub async fn stats(&self, prefix: &str) -> Result<BTreeMap<String, u64>, ClientError> {
        let text = self.admin_get("/stats").await?.text();
        let stats = text.lines().filter_map(|line| {
            let (name, value) = line.split_once(": ")?;
            Some((name.to_owned(), value.parse().ok()?))
        });
        Ok(stats
            .filter(|(name, _): &(String, u64)| name.starts_with(prefix))
            .collect())
    }

    /// All counters and gauges of the filter, by their names without Envoy's prefix.
    ///
    /// # Errors
    /// When the exchange fails.
    pub async fn filter_stats(&self) -> Result<BTreeMap<String, u64>, ClientError> {
        let stats = self.stats(FILTER_STATS).await?;
        let short = |(name, value): (String, u64)| (name.trim_start_matches(FILTER_STATS).to_owned(), value);
        Ok(stats.into_iter().map(short).collect())
    }

    /// Reads the listeners' ports again, after a config push.
    ///
    /// # Errors
    /// When the exchange fails.
    pub async fn refresh_listeners(&mut self) -> Result<(), ClientError> {
        self.listeners = parse_listeners(&self.admin_get("/listeners?format=json").await?);
        Ok(())
    }

    /// Where the admin interface listens.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// Where the listener of that name listens.
    pub fn listener(&self, name: &str) -> Option<SocketAddr> {
        self.listeners.get(name).copied()
    }

    /// URL of the first listener, in order of their names, without a slash at its end.
    pub fn url(&self) -> String {
        self.listeners
            .values()
            .next()
            .map(|address| format!("http://{address}"))
            .unwrap_or_default()
    }

    /// What Envoy has logged so far.
    pub fn log(&self) -> String {
        read_log(&self.folder)
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// How Envoy ended, if it did.
    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    async fn start_once(envoy: &Envoy, config: &str, options: &EnvoyOptions) -> Result<Self, StartError> {
        let folder = scratch_folder()?;
        let port = free_port()?;
        let config_path = folder.join("envoy.yaml");
        let address_path = folder.join("admin-address");
        fs::write(
            &config_path,
            config.replace(ADMIN_PORT_PLACEHOLDER, &port.to_string()),
        )?;
        let log = File::create(folder.join(LOG_NAME))?;
        let child = Command::new(&envoy.path)
            .arg("--config-path")
            .arg(&config_path)
            .arg("--admin-address-path")
            .arg(&address_path)
            .args([
                "--use-dynamic-base-id",
                "--concurrency",
                &options.concurrency.to_string(),
            ])
            .args(["--log-level", &options.log_level])
            .args(["--component-log-level", &options.component_log_level])
            .args(&options.extra_args)
            .envs(options.variables.iter().map(|(name, value)| (name, value)))
            .current_dir(workspace_root())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        // From here on dropping `process` ends the child, whatever happens to this future.
        let mut process = Self {
            child,
            folder,
            admin: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            listeners: BTreeMap::new(),
            client: Client::new().with_deadline(ADMIN_DEADLINE),
        };
        let deadline = Instant::now() + options.deadline;
        while !process.is_ready(&address_path).await {
            if let Some(status) = process.exit_status() {
                return Err(StartError::Exited {
                    status,
                    log: process.log(),
                });
            }
            if Instant::now() > deadline {
                return Err(StartError::NotReady {
                    deadline: options.deadline,
                    log: process.log(),
                });
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(process)
    }

    async fn is_ready(&mut self, address_path: &Path) -> bool {
        let Some(admin) = fs::read_to_string(address_path)
            .ok()
            .and_then(|text| text.trim().parse().ok())
        else {
            return false;
        };
        self.admin = admin;
        let live = self
            .admin_get("/ready")
            .await
            .is_ok_and(|answer| answer.text().trim() == "LIVE");
        live && self.refresh_listeners().await.is_ok() && !self.listeners.is_empty()
    }
}

impl Drop for EnvoyProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if !std::thread::panicking() {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

/// Why an Envoy is not running.
#[derive(Debug)]
pub enum StartError {
    /// A file or the process could not be made.
    Io(io::Error),
    /// It ended by itself.
    Exited {
        /// How.
        status: ExitStatus,
        /// What it logged.
        log: String,
    },
    /// It was not ready in time.
    NotReady {
        /// How long it had.
        deadline: Duration,
        /// What it logged.
        log: String,
    },
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(cause) => write!(f, "envoy could not be started: {cause}"),
            Self::Exited { status, log } => {
                write!(f, "envoy ended with {status}; its log ends with\n{}", tail(log))
            }
            Self::NotReady { deadline, log } => {
                write!(
                    f,
                    "envoy was not ready within {deadline:?}; its log ends with\n{}",
                    tail(log)
                )
            }
        }
    }
}

impl std::error::Error for StartError {}

impl From<io::Error> for StartError {
    fn from(cause: io::Error) -> Self {
        Self::Io(cause)
    }
}

/// Asks an Envoy whether it would take a config; the error is its log.
///
/// # Errors
/// When Envoy refuses the config or cannot be started.
pub fn validate(envoy: &Envoy, config: &str) -> Result<(), StartError> {
    let folder = scratch_folder()?;
    let config_path = folder.join("envoy.yaml");
    fs::write(&config_path, config.replace(ADMIN_PORT_PLACEHOLDER, "1"))?;
    let output = Command::new(&envoy.path)
        .args([
            "--mode",
            "validate",
            "--use-dynamic-base-id",
            "--log-level",
            "warning",
            "--config-path",
        ])
        .arg(&config_path)
        .current_dir(workspace_root())
        .stdin(Stdio::null())
        .output();
    let _ = fs::remove_dir_all(&folder);
    let output = output?;
    if output.status.success() {
        return Ok(());
    }
    let log = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Err(StartError::Exited {
        status: output.status,
        log,
    })
}

/// A folder for files that are pushed to an Envoy; gone when it is dropped.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// An empty one.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new() -> io::Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = workspace_root()
            .join("target/envoy-run")
            .join(format!("pushed-{}-{number}", std::process::id()));
        fs::create_dir_all(&path)?;
        Ok(Self(path))
    }

    /// Path of a file in it.
    pub fn file(&self, name: impl AsRef<Path>) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Replaces a file by renaming a new one over it: Envoy watches for moves and would miss a write in place.
///
/// # Errors
/// When the folder cannot be written.
pub fn write_atomically(path: &Path, text: &str) -> io::Result<()> {
    let mut scratch = path.as_os_str().to_owned();
    scratch.push(".new");
    fs::write(&scratch, text)?;
    fs::rename(&scratch, path)
}

fn parse_listeners(answer: &Answer) -> BTreeMap<String, SocketAddr> {
    let json = answer.json();
    let statuses = json["listener_statuses"].as_array().cloned().unwrap_or_default();
    let parsed = statuses.iter().filter_map(|status| {
        let socket = &status["local_address"]["socket_address"];
        let ip = socket["address"].as_str()?.parse().ok()?;
        let port = u16::try_from(socket["port_value"].as_u64()?)
            .ok()
            .filter(|port| *port != 0)?;
        Some((status["name"].as_str()?.to_owned(), SocketAddr::new(ip, port)))
    });
    parsed.collect()
}

/// A folder of our own under `target/`, where files are that somebody may want to see after a failure.
fn scratch_folder() -> io::Result<PathBuf> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let folder = workspace_root()
        .join("target/envoy-run")
        .join(format!("{}-{number}", std::process::id()));
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    Ok(folder)
}

fn read_log(folder: &Path) -> String {
    fs::read(folder.join(LOG_NAME))
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .unwrap_or_default()
}

fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

/// What Envoy puts before the names of metrics that a Wasm module defines.
const FILTER_STATS: &str = "wasmcustom.";
const LOG_NAME: &str = "envoy.log";
/// Enough for Envoy's last words with a stack trace.
const TAIL_LINES: usize = 40;
/// Starts that lose a race for the admin port.
const MAX_ATTEMPTS: u32 = 5;
/// Longest answer of the admin interface; main-thread stalls while a module compiles are part of it.
const ADMIN_DEADLINE: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
