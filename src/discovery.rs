//! Endpoints of a cluster, from Envoy's admin `/clusters` or from the config.
//!
//! In: the admin's answer and the name of the cluster, or a static list. Out: endpoints with address, health, weight and
//! priority. The answer is untrusted: no panic, it is read line by line, other clusters are passed over as they come, and at
//! most [`MAX_HOSTS`] endpoints are kept.
//!
//! Format: lines of `cluster::address::name::value` (Envoy's operations guide, "Administration interface"); of a host
//! come its `health_flags`, then its `weight`, then its `priority`. Lines that speak of the cluster itself have another word
//! in place of the address. The JSON of the same page takes Envoy four times as long to write: 8–9 ms against 2 ms for 1 000
//! hosts.

use std::fmt;
use std::net::SocketAddr;

use memchr::memchr;

use crate::host_table::{Health, MAX_HOSTS, Role};

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
    /// Envoy's priority, 0 by default: hosts of a higher number stand by while those of lower ones suffice.
    pub priority: u8,
}

/// What an admin answer told.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Discovered {
    /// Endpoints in growing address order, each address once.
    pub endpoints: Vec<Endpoint>,
    /// Whether Envoy knows the cluster, with endpoints or without.
    pub is_known: bool,
    /// Addresses that no header can name: pipes, internal listeners, unresolved names.
    pub skipped_addresses: u32,
    /// Endpoints beyond [`MAX_HOSTS`], which are not in `endpoints`.
    pub over_limit: u32,
}

/// Why an admin answer could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiscoveryError {
    /// It is larger than [`MAX_ANSWER_BYTES`].
    TooLarge,
    /// It does not begin as the text of `/clusters` does.
    NotClusters,
}

/// The endpoints of `cluster` in an admin answer, which may hold other clusters, too. An address at several priorities is
/// taken as it comes first.
///
/// # Errors
/// When the answer is too large or is not such text.
pub fn endpoints(body: &[u8], cluster: &str) -> Result<Discovered, DiscoveryError> {
    if body.len() > MAX_ANSWER_BYTES {
        return Err(DiscoveryError::TooLarge);
    }
    let mut found = Discovered::default();
    let mut rest = body;
    while !rest.is_empty() {
        let (line, after) = match memchr(b'\n', rest).and_then(|end| rest.split_at_checked(end)) {
            Some((line, after)) => (line, after.get(1..).unwrap_or_default()),
            None => (rest, [].as_slice()),
        };
        if rest.len() == body.len() && double_colon(line).is_none() {
            return Err(DiscoveryError::NotClusters);
        }
        rest = after;
        let of_cluster = line
            .strip_prefix(cluster.as_bytes())
            .and_then(|line| line.strip_prefix(b"::"));
        if let Some(line) = of_cluster {
            found.read_line(line);
        }
    }
    put_in_order(&mut found.endpoints);
    Ok(found)
}

impl Discovered {
    /// Reads a line of the cluster wanted, from behind its name.
    fn read_line(&mut self, line: &[u8]) {
        // No IP address has two colons after one another outside brackets.
        let bracket = memchr(b']', line).filter(|_| line.first() == Some(&b'['));
        let from = bracket.unwrap_or(0);
        let at = line.get(from..).and_then(double_colon);
        let Some((subject, told)) = at.and_then(|at| line.split_at_checked(from.saturating_add(at))) else {
            return;
        };
        if subject == b"added_via_api" {
            self.is_known = true;
        } else if let Some(flags) = told.strip_prefix(b"::health_flags::") {
            self.is_known = true;
            self.add(subject, health(flags));
        } else if let Some(weight) = told.strip_prefix(b"::weight::")
            && let Some(last) = self.last_at(subject)
        {
            last.weight = number(weight).max(1);
        } else if let Some(priority) = told.strip_prefix(b"::priority::")
            && let Some(last) = self.last_at(subject)
        {
            last.priority = u8::try_from(number(priority)).unwrap_or(u8::MAX);
        }
    }

    /// The endpoint that came last, if it is this one.
    fn last_at(&mut self, address: &[u8]) -> Option<&mut Endpoint> {
        self.endpoints
            .last_mut()
            .filter(|last| last.address.as_bytes() == address)
    }

    fn add(&mut self, address: &[u8], health: Health) {
        let parsed = std::str::from_utf8(address)
            .ok()
            .filter(|address| is_address(address));
        let Some(address) = parsed else {
            self.skipped_addresses = self.skipped_addresses.saturating_add(1);
            return;
        };
        if self.endpoints.len() == MAX_HOSTS {
            self.over_limit = self.over_limit.saturating_add(1);
            return;
        }
        self.endpoints.push(Endpoint {
            address: address.to_owned(),
            health,
            role: Role::Both,
            weight: 1,
            priority: 0,
        });
    }
}

fn double_colon(line: &[u8]) -> Option<usize> {
    line.windows(2).position(|pair| pair == b"::")
}

/// Whether the text is the address of a host that can be named in a header. It is kept as Envoy spells it, because that is
/// what Envoy compares the header with.
fn is_address(text: &str) -> bool {
    text.parse::<SocketAddr>().is_ok_and(|parsed| parsed.port() > 0)
}

/// What `/flag/flag`, or `healthy`, amounts to. A host that failed any check, that waits for its first one, or that EDS
/// calls UNHEALTHY or TIMEOUT, is unhealthy; else one that EDS drains or that left discovery is draining; else degraded
/// or healthy.
fn health(flags: &[u8]) -> Health {
    let mut worst = Health::Healthy;
    for flag in flags.split(|byte| *byte == b'/') {
        let told = match flag {
            b"failed_active_hc"
            | b"failed_outlier_check"
            | b"failed_eds_health"
            | b"pending_active_hc"
            | b"excluded_via_immediate_hc_fail"
            | b"active_hc_timeout" => return Health::Unhealthy,
            b"pending_dynamic_removal" | b"eds_status_draining" => Health::Draining,
            b"degraded_active_hc" | b"degraded_eds_health" if worst == Health::Healthy => Health::Degraded,
            _ => continue,
        };
        worst = told;
    }
    worst
}

/// A whole number; what is too large is the largest, anything else is 0.
fn number(text: &[u8]) -> u32 {
    let value = std::str::from_utf8(text)
        .ok()
        .and_then(|text| text.parse::<u64>().ok());
    u32::try_from(value.unwrap_or(0)).unwrap_or(u32::MAX)
}

/// Brings endpoints into the order of their addresses; of several with one address the first stays.
pub(crate) fn put_in_order(endpoints: &mut Vec<Endpoint>) {
    endpoints.sort_by(|left, right| left.address.cmp(&right.address));
    endpoints.dedup_by(|next, kept| next.address == kept.address);
}

/// Path of the admin request for `cluster`. With `envoy_has_filter` it asks for this one alone: `filter=` is a regular
/// expression, known from Envoy 1.38 and ignored before.
pub fn request_path(envoy_has_filter: bool, cluster: &str) -> String {
    let mut path = String::from("/clusters");
    if !envoy_has_filter {
        return path;
    }
    path.push_str("?filter=");
    push_encoded(&mut path, b"^");
    for byte in cluster.bytes() {
        // As RE2's QuoteMeta: everything but word characters and bytes of multi-byte characters.
        if byte.is_ascii() && !byte.is_ascii_alphanumeric() && byte != b'_' {
            push_encoded(&mut path, b"\\");
        }
        push_encoded(&mut path, &[byte]);
    }
    push_encoded(&mut path, b"$");
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
    /// The endpoint that a static host stands for: healthy, weight 1, priority 0.
    pub fn of_static(host: &StaticHost) -> Self {
        Self {
            address: host.address.clone(),
            health: Health::Healthy,
            role: host.role,
            weight: 1,
            priority: 0,
        }
    }
}

impl fmt::Display for DiscoveryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge => write!(f, "admin answer is larger than {MAX_ANSWER_BYTES} bytes"),
            Self::NotClusters => f.write_str("admin answer is not the text of /clusters"),
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

/// Bytes of an admin answer that are read: 1 000 hosts are 721 kB, and an Envoy before 1.38 sends all its clusters.
pub const MAX_ANSWER_BYTES: usize = 32 * 1024 * 1024;

#[cfg(test)]
mod tests;
