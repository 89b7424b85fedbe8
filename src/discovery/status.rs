//! The admin's cluster JSON, pulled through serde visitors: one struct a message of `clusters.proto`, each reading only
//! the fields that discovery needs and passing over the rest.

use std::fmt;
use std::net::IpAddr;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::{Discovered, Endpoint};
use crate::host_table::{Health, MAX_HOSTS, Role};

/// `envoy.admin.v3.Clusters`.
pub(super) struct ClustersSeed<'a> {
    pub(super) clusters: &'a [&'a str],
    pub(super) found: &'a mut Discovered,
}

impl<'de> DeserializeSeed<'de> for ClustersSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for ClustersSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the clusters object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(Key(key)) = map.next_key_seed(KeySeed(&["cluster_statuses"]))? {
            match key {
                Some(_) => map.next_value_seed(StatusesSeed {
                    clusters: self.clusters,
                    found: self.found,
                })?,
                None => skip(&mut map)?,
            }
        }
        Ok(())
    }
}

struct StatusesSeed<'a> {
    clusters: &'a [&'a str],
    found: &'a mut Discovered,
}

impl<'de> DeserializeSeed<'de> for StatusesSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for StatusesSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of clusters")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq
            .next_element_seed(StatusSeed {
                clusters: self.clusters,
                found: self.found,
            })?
            .is_some()
        {}
        Ok(())
    }
}

/// `ClusterStatus`. The name comes first in what Envoy writes today; hosts that come before it are read and dropped
/// again if the name turns out to be another.
struct StatusSeed<'a> {
    clusters: &'a [&'a str],
    found: &'a mut Discovered,
}

impl<'de> DeserializeSeed<'de> for StatusSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for StatusSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a cluster object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Self { clusters, found } = self;
        let before = (found.endpoints.len(), found.skipped_addresses, found.over_limit);
        let mut wanted: Option<bool> = None;
        while let Some(Key(key)) = map.next_key_seed(KeySeed(&["name", "host_statuses"]))? {
            match (key, wanted) {
                (Some(0), _) => {
                    let Text(name) = map.next_value_seed(TextSeed)?;
                    wanted = Some(clusters.contains(&name.as_str()));
                }
                (Some(_), None | Some(true)) => map.next_value_seed(HostsSeed { found: &mut *found })?,
                (Some(_), Some(false)) | (None, _) => skip(&mut map)?,
            }
        }
        if wanted == Some(true) {
            found.clusters_found = found.clusters_found.saturating_add(1);
        } else {
            found.endpoints.truncate(before.0);
            (found.skipped_addresses, found.over_limit) = (before.1, before.2);
        }
        Ok(())
    }
}

struct HostsSeed<'a> {
    found: &'a mut Discovered,
}

impl<'de> DeserializeSeed<'de> for HostsSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for HostsSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of hosts")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(endpoint) = seq.next_element_seed(HostSeed)? {
            match endpoint {
                None => self.found.skipped_addresses = self.found.skipped_addresses.saturating_add(1),
                Some(endpoint) if self.found.endpoints.len() < MAX_HOSTS => {
                    self.found.endpoints.push(endpoint)
                }
                Some(_) => self.found.over_limit = self.found.over_limit.saturating_add(1),
            }
        }
        Ok(())
    }
}

/// `HostStatus`; `None` when its address is not an IP address and port.
struct HostSeed;

impl<'de> DeserializeSeed<'de> for HostSeed {
    type Value = Option<Endpoint>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HostSeed {
    type Value = Option<Endpoint>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a host object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut address: Option<String> = None;
        let mut endpoint = Endpoint {
            address: String::new(),
            health: Health::Healthy,
            role: Role::Both,
            weight: 1,
            rq_active: 0,
            hostname: String::new(),
            priority: 0,
        };
        const KEYS: &[&str] = &[
            "address",
            "stats",
            "health_status",
            "weight",
            "hostname",
            "priority",
        ];
        while let Some(Key(key)) = map.next_key_seed(KeySeed(KEYS))? {
            match key {
                Some(0) => address = map.next_value_seed(AddressSeed)?,
                Some(1) => endpoint.rq_active = map.next_value_seed(StatsSeed)?,
                Some(2) => endpoint.health = map.next_value_seed(HealthSeed)?,
                Some(3) => endpoint.weight = number_u32(&mut map)?.max(1),
                Some(4) => {
                    let Text(mut hostname) = map.next_value_seed(TextSeed)?;
                    if hostname.len() > MAX_HOSTNAME_BYTES {
                        hostname = String::new();
                    }
                    endpoint.hostname = hostname;
                }
                Some(5) => endpoint.priority = number_u32(&mut map)?,
                Some(_) | None => skip(&mut map)?,
            }
        }
        Ok(address.map(|address| Endpoint { address, ..endpoint }))
    }
}

/// `envoy.config.core.v3.Address`: `socket_address`, `pipe` or `envoy_internal_address`.
struct AddressSeed;

impl<'de> DeserializeSeed<'de> for AddressSeed {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for AddressSeed {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an address object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut address = None;
        while let Some(Key(key)) = map.next_key_seed(KeySeed(&["socket_address"]))? {
            match key {
                Some(_) => address = map.next_value_seed(SocketAddressSeed)?,
                None => skip(&mut map)?,
            }
        }
        Ok(address)
    }
}

struct SocketAddressSeed;

impl<'de> DeserializeSeed<'de> for SocketAddressSeed {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for SocketAddressSeed {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a socket address object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut ip: Option<IpAddr> = None;
        let mut port = 0;
        while let Some(Key(key)) = map.next_key_seed(KeySeed(&["address", "port_value"]))? {
            match key {
                Some(0) => {
                    let Text(text) = map.next_value_seed(TextSeed)?;
                    ip = text.parse().ok();
                }
                Some(_) => port = number_u32(&mut map)?,
                None => skip(&mut map)?,
            }
        }
        let port = u16::try_from(port).ok().filter(|port| *port > 0);
        Ok(ip
            .zip(port)
            .map(|(ip, port)| std::net::SocketAddr::new(ip, port).to_string()))
    }
}

/// `HostHealthStatus`. A host that failed any check, that waits for its first one, or that EDS calls UNHEALTHY or
/// TIMEOUT, is unhealthy; else one that EDS drains or that left discovery is draining; else degraded or healthy.
struct HealthSeed;

impl<'de> DeserializeSeed<'de> for HealthSeed {
    type Value = Health;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Health, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HealthSeed {
    type Value = Health;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a health status object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Health, A::Error> {
        const KEYS: &[&str] = &[
            "eds_health_status",
            "failed_active_health_check",
            "failed_outlier_check",
            "pending_active_hc",
            "excluded_via_immediate_hc_fail",
            "active_hc_timeout",
            "pending_dynamic_removal",
            "failed_active_degraded_check",
        ];
        let (mut unhealthy, mut draining, mut degraded) = (false, false, false);
        while let Some(Key(key)) = map.next_key_seed(KeySeed(KEYS))? {
            match key {
                Some(0) => {
                    let Text(status) = map.next_value_seed(TextSeed)?;
                    unhealthy |= matches!(status.as_str(), "UNHEALTHY" | "TIMEOUT");
                    draining |= status == "DRAINING";
                    degraded |= status == "DEGRADED";
                }
                Some(1..=5) => unhealthy |= map.next_value::<bool>()?,
                Some(6) => draining |= map.next_value::<bool>()?,
                Some(_) => degraded |= map.next_value::<bool>()?,
                None => skip(&mut map)?,
            }
        }
        Ok(match (unhealthy, draining, degraded) {
            (true, _, _) => Health::Unhealthy,
            (false, true, _) => Health::Draining,
            (false, false, true) => Health::Degraded,
            (false, false, false) => Health::Healthy,
        })
    }
}

/// The list of `SimpleMetric`; gives the value of `rq_active`, 0 when it is left out.
struct StatsSeed;

impl<'de> DeserializeSeed<'de> for StatsSeed {
    type Value = u64;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<u64, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for StatsSeed {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of stats")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<u64, A::Error> {
        let mut rq_active = 0;
        while let Some(value) = seq.next_element_seed(StatSeed)? {
            rq_active = value.unwrap_or(rq_active);
        }
        Ok(rq_active)
    }
}

struct StatSeed;

impl<'de> DeserializeSeed<'de> for StatSeed {
    type Value = Option<u64>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for StatSeed {
    type Value = Option<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a stat object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut is_rq_active, mut value) = (false, 0);
        while let Some(Key(key)) = map.next_key_seed(KeySeed(&["name", "value"]))? {
            match key {
                Some(0) => is_rq_active = map.next_value_seed(KeySeed(&["rq_active"]))?.0.is_some(),
                Some(_) => value = map.next_value_seed(NumberSeed)?,
                None => skip(&mut map)?,
            }
        }
        Ok(is_rq_active.then_some(value))
    }
}

/// A string's position in a list of known ones, `None` for any other; never copies it.
struct KeySeed<'a>(&'a [&'a str]);

struct Key(Option<usize>);

impl<'de> DeserializeSeed<'de> for KeySeed<'_> {
    type Value = Key;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Key, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for KeySeed<'_> {
    type Value = Key;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E>(self, text: &str) -> Result<Key, E> {
        Ok(Key(self.0.iter().position(|known| *known == text)))
    }
}

struct TextSeed;

struct Text(String);

impl<'de> DeserializeSeed<'de> for TextSeed {
    type Value = Text;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Text, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for TextSeed {
    type Value = Text;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E>(self, text: &str) -> Result<Text, E> {
        Ok(Text(text.to_owned()))
    }
}

/// A whole number, as JSON number or as string (64-bit ones are strings in proto JSON); anything else counts as 0.
struct NumberSeed;

impl<'de> DeserializeSeed<'de> for NumberSeed {
    type Value = u64;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<u64, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Visitor<'_> for NumberSeed {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number or a string")
    }

    fn visit_u64<E>(self, value: u64) -> Result<u64, E> {
        Ok(value)
    }

    fn visit_i64<E>(self, value: i64) -> Result<u64, E> {
        Ok(u64::try_from(value).unwrap_or(0))
    }

    fn visit_f64<E>(self, _value: f64) -> Result<u64, E> {
        Ok(0)
    }

    fn visit_str<E>(self, text: &str) -> Result<u64, E> {
        Ok(text.parse().unwrap_or(0))
    }
}

fn number_u32<'de, A: MapAccess<'de>>(map: &mut A) -> Result<u32, A::Error> {
    let value = map.next_value_seed(NumberSeed)?;
    Ok(u32::try_from(value).unwrap_or(u32::MAX))
}

fn skip<'de, A: MapAccess<'de>>(map: &mut A) -> Result<(), A::Error> {
    map.next_value::<IgnoredAny>().map(|_| ())
}

/// Longest DNS name; a longer one is not kept.
const MAX_HOSTNAME_BYTES: usize = 253;
