//! Who of the candidates runs a pool's companion.
//!
//! In: the lease as it stands in shared data, the contender, the time. Out: write this lease (with the cas that came
//! with the old one), or follow. Shared data is untrusted: no panic, bytes of a fixed size.
//!
//! Payload, little endian: holder u64, build u32, generation u64, priority u8, heartbeat_ms u64. Later versions may only
//! append, so that builds of different age agree on who holds it; [`Lease::decode`] therefore reads them, too.

use std::cmp::Ordering;
use std::fmt;

use crate::blob::{BlobError, BlobReader, BlobWriter, heartbeat_is_stale};

/// Who runs the companion, as written to shared data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// Identity of the holder.
    pub holder: u64,
    /// Number of the holder's build; grows with releases.
    pub build: u32,
    /// When the holder's config arrived, ms since the Unix epoch.
    pub generation: u64,
    /// How well the holder is suited.
    pub priority: Priority,
    /// When the holder last renewed it, ms since the Unix epoch; 0 = released.
    pub heartbeat_ms: u64,
}

/// Who wants to run the companion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Contender {
    /// Identity, unique among the contenders of one process.
    pub id: u64,
    /// Number of its build.
    pub build: u32,
    /// Number of its config.
    pub generation: u64,
    /// How well it is suited, now.
    pub priority: Priority,
}

/// How well a contender is suited, worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// A root context whose VM serves requests.
    Serving,
    /// A root context whose VM has served no stream: the main thread's, or an idle worker's.
    Idle,
    /// The bootstrap service.
    Service,
}

/// What the contender has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseStep {
    /// Write this lease with the cas of the one that was read (create it if there was none). If the write succeeds,
    /// run the companion; if it fails, somebody else was faster: follow.
    Hold(Lease),
    /// The same, but another one held it last: whatever this one knows is older than what was published, so it begins
    /// anew with that.
    TakeOver(Lease),
    /// Another holds it.
    Follow,
}

/// Why bytes are not a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseError {
    /// The blob around the lease is damaged or something else.
    Blob(BlobError),
    /// No build ever wrote this version.
    UnsupportedVersion(u16),
    /// The priority is none that this version knows.
    UnknownPriority(u8),
}

/// One contender's step: renew an own lease; take an absent or stale one; preempt a holder of lower rank, where rank is
/// priority first, then build, then generation. Of equals, the holder stays. Generations less than
/// [`SAME_PUSH_MS`] apart are equals: one push reaches every thread at a time of its own.
pub fn step(current: Option<&Lease>, me: &Contender, now_ms: u64) -> LeaseStep {
    let mine = Lease {
        holder: me.id,
        build: me.build,
        generation: me.generation,
        priority: me.priority,
        heartbeat_ms: now_ms,
    };
    let Some(current) = current else {
        return LeaseStep::Hold(mine);
    };
    if current.holder == me.id {
        return LeaseStep::Hold(mine);
    }
    if current.is_stale(now_ms) || mine.outranks(current) {
        return LeaseStep::TakeOver(mine);
    }
    LeaseStep::Follow
}

/// How long a follower or holder waits until it looks again, ms: a heartbeat, less where the lease it follows may be
/// stale before.
pub fn wait_ms(current: Option<&Lease>, now_ms: u64) -> u64 {
    let stale_in_ms = current.map(|lease| {
        let stale_ms = lease.heartbeat_ms.saturating_add(LEASE_TTL_MS + 1);
        stale_ms.saturating_sub(now_ms).max(1)
    });
    stale_in_ms.map_or(LEASE_HEARTBEAT_MS, |wait_ms| wait_ms.min(LEASE_HEARTBEAT_MS))
}

impl Lease {
    /// The lease as a sealed blob.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = BlobWriter::new(MAGIC, VERSION, PAYLOAD_BYTES);
        writer.put_u64(self.holder);
        writer.put_u32(self.build);
        writer.put_u64(self.generation);
        writer.put_u8(self.priority.code());
        writer.put_u64(self.heartbeat_ms);
        writer.seal()
    }

    /// The lease in `bytes`; of a later version, the part that this one knows.
    ///
    /// # Errors
    /// Damaged bytes, version 0, an unknown priority. Treat such a lease as absent, but write with its cas.
    pub fn decode(bytes: &[u8]) -> Result<Self, LeaseError> {
        let (version, mut reader) = BlobReader::open(MAGIC, bytes)?;
        if version < VERSION {
            return Err(LeaseError::UnsupportedVersion(version));
        }
        let (holder, build, generation) = (reader.u64()?, reader.u32()?, reader.u64()?);
        let code = reader.u8()?;
        let priority = Priority::from_code(code).ok_or(LeaseError::UnknownPriority(code))?;
        let heartbeat_ms = reader.u64()?;
        if version == VERSION && !reader.is_empty() {
            return Err(LeaseError::Blob(BlobError::WrongLength));
        }
        Ok(Self {
            holder,
            build,
            generation,
            priority,
            heartbeat_ms,
        })
    }

    /// The lease as its holder leaves it behind: anybody may take it at once.
    pub fn released(self) -> Self {
        Self {
            heartbeat_ms: 0,
            ..self
        }
    }

    /// True when the holder missed five heartbeats, or its heartbeat lies further than that in the future.
    pub fn is_stale(&self, now_ms: u64) -> bool {
        heartbeat_is_stale(self.heartbeat_ms, now_ms, LEASE_TTL_MS)
    }

    fn outranks(&self, other: &Self) -> bool {
        let rank = |lease: &Self| (lease.priority.code(), lease.build);
        match rank(self).cmp(&rank(other)) {
            Ordering::Greater => true,
            Ordering::Less => false,
            Ordering::Equal => self.generation.saturating_sub(other.generation) >= SAME_PUSH_MS,
        }
    }
}

impl Priority {
    const fn code(self) -> u8 {
        match self {
            Self::Serving => 0,
            Self::Idle => 1,
            Self::Service => 2,
        }
    }

    const fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::Serving),
            1 => Some(Self::Idle),
            2 => Some(Self::Service),
            _ => None,
        }
    }
}

impl From<BlobError> for LeaseError {
    fn from(error: BlobError) -> Self {
        Self::Blob(error)
    }
}

impl fmt::Display for LeaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blob(error) => write!(f, "lease: {error}"),
            Self::UnsupportedVersion(version) => {
                write!(f, "lease has version {version}, this build writes {VERSION}")
            }
            Self::UnknownPriority(code) => write!(f, "lease has unknown priority {code}"),
        }
    }
}

impl std::error::Error for LeaseError {}

/// How often the holder renews, and the others look.
pub const LEASE_HEARTBEAT_MS: u64 = 500;

/// Configs that arrived within this are taken for one push.
pub const SAME_PUSH_MS: u64 = 10_000;

/// A holder that missed five heartbeats is gone: a stall of a busy worker must not move the companion, and the next one
/// still publishes before the last table of the old one stops being believed.
pub const LEASE_TTL_MS: u64 = 5 * LEASE_HEARTBEAT_MS;

const MAGIC: [u8; 4] = *b"WRLS";
/// Version of the layout above; later ones only append.
const VERSION: u16 = 1;
const PAYLOAD_BYTES: usize = 29;

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "random values of every width")]
mod tests {
    use super::*;
    use crate::blob::tests::{Random, assert_damage_is_refused};

    const NOW_MS: u64 = 1_700_000_000_000;

    fn contender(id: u64, priority: Priority) -> Contender {
        Contender {
            id,
            build: 10,
            generation: 100,
            priority,
        }
    }

    fn lease_of(me: &Contender, heartbeat_ms: u64) -> Lease {
        Lease {
            holder: me.id,
            build: me.build,
            generation: me.generation,
            priority: me.priority,
            heartbeat_ms,
        }
    }

    #[test]
    fn leases_round_trip_and_damage_is_refused() {
        let mut random = Random::seeded(6);
        for priority in [Priority::Serving, Priority::Idle, Priority::Service] {
            let lease = Lease {
                holder: random.next(),
                build: random.next() as u32,
                generation: random.next(),
                priority,
                heartbeat_ms: random.next(),
            };
            assert_eq!(Lease::decode(&lease.encode()), Ok(lease));
        }
        let bytes = lease_of(&contender(1, Priority::Idle), NOW_MS).encode();
        assert_damage_is_refused(&bytes, |bytes| Lease::decode(bytes).is_err());
    }

    #[test]
    fn garbage_is_refused() {
        let mut random = Random::seeded(7);
        for length in 0..120 {
            let bytes: Vec<u8> = (0..length).map(|_| random.next() as u8).collect();
            assert!(Lease::decode(&bytes).is_err());
        }
    }

    #[test]
    fn a_later_version_is_read_and_version_0_is_not() {
        let lease = lease_of(&contender(1, Priority::Idle), NOW_MS);
        let sealed = |version, priority| {
            let mut writer = BlobWriter::new(MAGIC, version, 0);
            writer.put_u64(lease.holder);
            writer.put_u32(lease.build);
            writer.put_u64(lease.generation);
            writer.put_u8(priority);
            writer.put_u64(lease.heartbeat_ms);
            writer.put_bytes(b"appended");
            Lease::decode(&writer.seal())
        };
        assert_eq!(sealed(2, 1), Ok(lease));
        assert_eq!(sealed(0, 1), Err(LeaseError::UnsupportedVersion(0)));
        assert_eq!(sealed(1, 1), Err(LeaseError::Blob(BlobError::WrongLength)));
        assert_eq!(sealed(2, 3), Err(LeaseError::UnknownPriority(3)));
    }

    /// The bytes of version 1, laid out by hand; the checksum came from the Python package mmh3 5.3.1:
    /// `mmh3.hash64(payload, 1, signed=False)[0]`.
    #[test]
    fn version_1_has_its_golden_bytes() {
        let lease = Lease {
            holder: 1,
            build: 2,
            generation: 3,
            priority: Priority::Service,
            heartbeat_ms: 4,
        };
        let hex: String = lease.encode().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, GOLDEN_1);
    }

    const GOLDEN_1: &str =
        "57524c5301001d0000006abbbcabfaa834740100000000000000020000000300000000000000020400000000000000";

    #[test]
    fn an_absent_lease_is_taken() {
        let me = contender(1, Priority::Serving);
        assert_eq!(step(None, &me, NOW_MS), LeaseStep::Hold(lease_of(&me, NOW_MS)));
    }

    #[test]
    fn the_holder_renews_also_with_a_priority_that_fell() {
        let held = lease_of(&contender(1, Priority::Idle), NOW_MS);
        let me = contender(1, Priority::Serving);
        assert_eq!(
            step(Some(&held), &me, NOW_MS + 1_000),
            LeaseStep::Hold(lease_of(&me, NOW_MS + 1_000))
        );
    }

    #[test]
    fn a_dead_holder_is_replaced_after_its_time() {
        let held = lease_of(&contender(1, Priority::Service), NOW_MS);
        let me = contender(2, Priority::Serving);
        assert_eq!(step(Some(&held), &me, NOW_MS + LEASE_TTL_MS), LeaseStep::Follow);
        assert_eq!(
            step(Some(&held), &me, NOW_MS + LEASE_TTL_MS + 1),
            LeaseStep::TakeOver(lease_of(&me, NOW_MS + LEASE_TTL_MS + 1))
        );
    }

    #[test]
    fn a_dead_holder_from_the_future_is_replaced() {
        let held = lease_of(&contender(1, Priority::Service), NOW_MS);
        let me = contender(2, Priority::Serving);
        assert_eq!(step(Some(&held), &me, NOW_MS - LEASE_TTL_MS), LeaseStep::Follow);
        assert_ne!(
            step(Some(&held), &me, NOW_MS - LEASE_TTL_MS - 1),
            LeaseStep::Follow
        );
    }

    #[test]
    fn a_released_lease_is_free_at_once() {
        let held = lease_of(&contender(1, Priority::Service), NOW_MS).released();
        assert_ne!(
            step(Some(&held), &contender(2, Priority::Serving), NOW_MS),
            LeaseStep::Follow
        );
    }

    #[test]
    fn rank_decides_between_the_living() {
        use Priority::{Idle, Service, Serving};
        let with = |priority, build, generation| Contender {
            id: 1,
            build,
            generation,
            priority,
        };
        let cases = [
            // holder, challenger, challenger preempts
            (with(Serving, 10, 100), with(Idle, 1, 1), true),
            (with(Idle, 10, 100), with(Service, 1, 1), true),
            (with(Service, 1, 1), with(Idle, 99, 999), false),
            (with(Idle, 1, 1), with(Serving, 99, 999), false),
            (with(Idle, 10, 100), with(Idle, 10, 100), false),
            (with(Idle, 10, 100), with(Idle, 11, 1), true),
            (with(Idle, 10, 100), with(Idle, 9, 99_999), false),
            (with(Idle, 10, 100), with(Idle, 10, 100 + SAME_PUSH_MS), true),
            (with(Idle, 10, 100), with(Idle, 10, 99 + SAME_PUSH_MS), false),
            (with(Idle, 10, 100), with(Idle, 10, 99), false),
        ];
        for (holder, challenger, preempts) in cases {
            let challenger = Contender { id: 2, ..challenger };
            let got = step(Some(&lease_of(&holder, NOW_MS)), &challenger, NOW_MS);
            assert_eq!(
                got != LeaseStep::Follow,
                preempts,
                "{holder:?} against {challenger:?}"
            );
        }
    }

    /// The service stalled, a filter took over and published meanwhile: what the service remembers must not come back.
    #[test]
    fn a_holder_that_was_replaced_begins_anew_and_one_that_was_not_goes_on() {
        let service = contender(1, Priority::Service);
        let meanwhile = lease_of(&contender(2, Priority::Serving), NOW_MS);
        let mine = lease_of(&service, NOW_MS + 1);
        assert_eq!(
            step(Some(&meanwhile), &service, NOW_MS + 1),
            LeaseStep::TakeOver(mine)
        );
        assert_eq!(
            step(Some(&lease_of(&service, NOW_MS)), &service, NOW_MS + 1),
            LeaseStep::Hold(mine)
        );
    }

    /// A root looks at ticks of 100 ms, when its wait is over.
    #[test]
    fn a_dead_holder_is_replaced_within_a_tick_of_its_time_whenever_others_looked_last() {
        let held = lease_of(&contender(1, Priority::Service), NOW_MS);
        let me = contender(2, Priority::Serving);
        for phase_ms in 0..LEASE_HEARTBEAT_MS {
            let (mut now_ms, mut looks_ms) = (NOW_MS + phase_ms, NOW_MS + phase_ms);
            let taken_ms = loop {
                if now_ms >= looks_ms {
                    if step(Some(&held), &me, now_ms) != LeaseStep::Follow {
                        break now_ms;
                    }
                    looks_ms = now_ms + wait_ms(Some(&held), now_ms);
                }
                now_ms += 100;
            };
            assert!(taken_ms - NOW_MS <= LEASE_TTL_MS + 101, "{}", taken_ms - NOW_MS);
        }
        assert_eq!(wait_ms(None, NOW_MS), LEASE_HEARTBEAT_MS);
        assert_eq!(
            wait_ms(Some(&lease_of(&me, u64::MAX)), NOW_MS),
            LEASE_HEARTBEAT_MS
        );
        assert_eq!(wait_ms(Some(&lease_of(&me, 0)), NOW_MS), 1);
    }

    /// Five roots tick over shared data with cas semantics: the idle one ends up holding, one holder at a time.
    #[test]
    fn contenders_settle_on_the_best_and_take_over_when_it_dies() {
        let mut stored: Option<Lease> = None;
        let mut holders = Vec::new();
        let mut roots: Vec<Contender> = (0..5).map(|id| contender(id, Priority::Serving)).collect();
        roots[3].priority = Priority::Idle;
        for tick in 0..60u64 {
            let now_ms = NOW_MS + tick * LEASE_HEARTBEAT_MS;
            for root in &roots {
                let dead = root.id == 3 && tick >= 20;
                let taken = match step(stored.as_ref(), root, now_ms) {
                    LeaseStep::Hold(lease) | LeaseStep::TakeOver(lease) => Some(lease),
                    LeaseStep::Follow => None,
                };
                stored = taken.filter(|_| !dead).or(stored);
            }
            holders.push(stored.unwrap().holder);
        }
        assert!(holders[1..20].iter().all(|&holder| holder == 3), "{holders:?}");
        assert_eq!(holders[19..26], [3, 3, 3, 3, 3, 3, 0], "{holders:?}");
        assert!(
            holders[25..].iter().all(|&holder| holder == holders[25]),
            "no thrash: {holders:?}"
        );
    }
}
