//! Endpoints of a cluster, from Envoy's admin `/clusters?format=json` or from the config.
//!
//! In: the admin's answer and the names of the clusters wanted, or a static list. Out: endpoints with address, health and
//! weight. The answer is untrusted: no panic, it is pulled through the parser without a tree, clusters that are not
//! wanted are skipped as they come, and at most [`MAX_HOSTS`](crate::host_table::MAX_HOSTS) endpoints are kept.
//!
//! Format: `envoy/admin/v3/clusters.proto` as JSON. Zero-valued fields are left out, counters and gauges are strings,
//! and an unknown cluster gives `{}`.

mod status;

use std::fmt;
use std::net::SocketAddr;

use serde::de::DeserializeSeed;

use crate::host_table::{Health, Role};

/// One endpoint of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// `ip:port`, IPv6 in brackets.
    pub address: String,
    /// What Envoy, or the config, says of it.
    pub health: Health,
    /// What it is used for; the admin interface does not tell, so a discovered one does everything.
    pub role: Role,
    /// Load-balancing weight, 1 by default.
    pub weight: u32,
    /// Requests that this Envoy has open on it.
    pub rq_active: u64,
    /// Its host name, if it was found by one.
    pub hostname: String,
    /// Its priority, 0 = best.
    pub priority: u32,
}

/// What an admin answer told.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Discovered {
    /// Endpoints in growing address order, each address once.
    pub endpoints: Vec<Endpoint>,
    /// How many of the wanted clusters the answer named; 0 = Envoy does not know them.
    pub clusters_found: u32,
    /// Addresses that no header can name: pipes, internal listeners, unresolved names.
    pub skipped_addresses: u32,
    /// Endpoints beyond [`MAX_HOSTS`](crate::host_table::MAX_HOSTS), which are not in `endpoints`.
    pub over_limit: u32,
}

/// Why an admin answer could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiscoveryError {
    /// It is larger than [`MAX_ANSWER_BYTES`].
    TooLarge,
    /// It is not the JSON of `/clusters?format=json`; line and column of the first fault.
    InvalidJson {
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
    },
}

/// The endpoints of `clusters` in an admin answer, which may hold other clusters, too. An address in several of them, or
/// at several priorities, is taken as it comes first.
///
/// # Errors
/// When the answer is too large or is not such JSON.
pub fn endpoints(body: &[u8], clusters: &[&str]) -> Result<Discovered, DiscoveryError> {
    if body.len() > MAX_ANSWER_BYTES {
        return Err(DiscoveryError::TooLarge);
    }
    let mut found = Discovered::default();
    let mut json = serde_json::Deserializer::from_slice(body);
    let read = status::ClustersSeed {
        clusters,
        found: &mut found,
    }
    .deserialize(&mut json);
    if let Err(error) = read.and_then(|()| json.end()) {
        return Err(DiscoveryError::InvalidJson {
            line: error.line(),
            column: error.column(),
        });
    }
    put_in_order(&mut found.endpoints);
    Ok(found)
}

/// Brings endpoints into the order of their addresses; of several with one address the first stays.
pub(crate) fn put_in_order(endpoints: &mut Vec<Endpoint>) {
    endpoints.sort_by(|left, right| left.address.cmp(&right.address));
    endpoints.dedup_by(|next, kept| next.address == kept.address);
}

/// Path of the admin request for `clusters`. With `envoy_has_filter` it asks for these alone: `filter=` is a regular
/// expression, known from Envoy 1.38 and ignored before.
pub fn request_path(envoy_has_filter: bool, clusters: &[&str]) -> String {
    let mut path = String::from("/clusters?format=json");
    if !envoy_has_filter || clusters.is_empty() {
        return path;
    }
    path.push_str("&filter=");
    push_encoded(&mut path, b"^(");
    for (index, cluster) in clusters.iter().enumerate() {
        if index > 0 {
            push_encoded(&mut path, b"|");
        }
        for byte in cluster.bytes() {
            // As RE2's QuoteMeta: everything but word characters and bytes of multi-byte characters.
            if byte.is_ascii() && !byte.is_ascii_alphanumeric() && byte != b'_' {
                push_encoded(&mut path, b"\\");
            }
            push_encoded(&mut path, &[byte]);
        }
    }
    push_encoded(&mut path, b")$");
    path
}

/// A host that the config names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticHost {
    address: String,
    role: Role,
}

/// Why a static host's address is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressError;

impl StaticHost {
    /// A host at `address`, which is brought into the spelling of Envoy's host map.
    ///
    /// # Errors
    /// When the address is not `ip:port` or `[ipv6]:port` with a port above 0.
    pub fn new(address: &str, role: Role) -> Result<Self, AddressError> {
        match address.parse::<SocketAddr>() {
            Ok(parsed) if parsed.port() > 0 => Ok(Self {
                address: parsed.to_string(),
                role,
            }),
            Ok(_) | Err(_) => Err(AddressError),
        }
    }

    /// Its address, `ip:port`, IPv6 in brackets.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// What it is used for.
    pub const fn role(&self) -> Role {
        self.role
    }
}

impl Endpoint {
    /// The endpoint that a static host stands for: healthy, weight 1.
    pub fn of_static(host: &StaticHost) -> Self {
        Self {
            address: host.address.clone(),
            health: Health::Healthy,
            role: host.role,
            weight: 1,
            rq_active: 0,
            hostname: String::new(),
            priority: 0,
        }
    }
}

impl fmt::Display for DiscoveryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge => write!(f, "admin answer is larger than {MAX_ANSWER_BYTES} bytes"),
            Self::InvalidJson { line, column } => {
                write!(
                    f,
                    "admin answer is not cluster JSON at line {line} column {column}"
                )
            }
        }
    }
}

impl std::error::Error for DiscoveryError {}

impl fmt::Display for AddressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("address is not ip:port or [ipv6]:port")
    }
}

impl std::error::Error for AddressError {}

fn push_encoded(path: &mut String, bytes: &[u8]) {
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            path.push(char::from(byte));
            continue;
        }
        path.push('%');
        for nibble in [byte >> 4, byte & 15] {
            let digit = char::from_digit(u32::from(nibble), 16).unwrap_or('0');
            path.push(digit.to_ascii_uppercase());
        }
    }
}

/// Bytes of an admin answer that are read: 1 000 hosts are 744 kB, and an Envoy before 1.38 sends all its clusters.
pub const MAX_ANSWER_BYTES: usize = 32 * 1024 * 1024;

#[cfg(test)]
mod tests;
