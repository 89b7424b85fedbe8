//! Prefix keys → which hosts hold how much of a prompt.
//!
//! In: a prompt's keys; what this and the other workers placed where; the hosts with their epochs and cache sizes; what
//! engines counted. Out: how deep each host's cache is believed to match. Memory is fixed by configuration and never
//! grows; a prompt probes at most [`MAX_KEYS`](crate::journal::MAX_KEYS) keys and 64 between them. Keys are hashes of
//! untrusted text and placements come from shared data: whatever they are, nothing panics. It must never say that a host
//! holds what its engine has forgotten: see `clock` for how it knows.
//!
//! # Looking up
//! A worker records every key of what it places, and tells the others the anchors of it (`anchors`). A lookup walks the
//! anchors from the deepest; where a host appears, it searches the keys up to the next anchor for that host from the deep
//! end. It stops where all hosts that hold the shallowest anchor were found: who holds more holds that. A binary search
//! would need fewer probes, but a single replaced key would mislead it.

mod anchors;
mod clock;
mod table;

use crate::chunk::{PrefixKey, PrefixKeys};
use crate::host_table::{HostTable, Slot};
use crate::journal::{Placement, PlacementKind};

pub use self::clock::Verdict;

use self::anchors::{Anchors, MAX_ANCHORS};
use self::clock::Clocks;
use self::table::{Held, Holder, ONE_USE, Table};

/// What the hosts of one pool hold, as one worker believes.
#[derive(Debug, Clone)]
pub struct PrefixIndex {
    settings: IndexSettings,
    table: Table,
    clocks: Clocks,
}

/// Bounds of the index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexSettings {
    /// Memory, bytes. Default 16 MiB: half a million keys, where eight hosts with caches of 1.5 M tokens hold 200 000
    /// chunks at the closest spacing.
    pub memory_bytes: u32,
    /// Cache size assumed of an engine that does not tell, tokens. Default 1.5 M, a 70B model on four H100. At 70 % load in
    /// the simulator, feedback included, ten times too much costs 18 % of mean TTFT, a third of it 12 %.
    pub default_capacity_tokens: u64,
}

impl Default for IndexSettings {
    fn default() -> Self {
        Self {
            memory_bytes: 16 << 20,
            default_capacity_tokens: 1_500_000,
        }
    }
}

/// How much of one prompt the hosts hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matches {
    hosts: [(Slot, u32); MAX_MATCHES],
    len: usize,
    /// End of the part that is used so often that it deserves a copy on another host.
    pub spread_bytes: u32,
    /// Share of the fleet's cache of which nothing is known, because it was filled before this index began, thousandths.
    pub unseen_permille: u32,
}

/// One request that is put on a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewPlacement {
    /// The host.
    pub slot: Slot,
    /// Prompt tokens that it is believed to have to compute.
    pub uncached_tokens: u32,
    /// Tokens of the whole prompt.
    pub prompt_tokens: u32,
}

impl PrefixIndex {
    /// An empty index; its memory is taken bit by bit as keys come.
    #[must_use]
    pub fn new(settings: IndexSettings) -> Self {
        let mut index = Self {
            table: Table::new(0),
            clocks: Clocks::new(settings.default_capacity_tokens),
            settings: IndexSettings::default(),
        };
        index.resize(settings);
        index
    }

    /// The settings in force.
    #[must_use]
    pub const fn settings(&self) -> &IndexSettings {
        &self.settings
    }

    /// Takes over other settings: the hosts stay, what they hold is forgotten.
    pub fn resize(&mut self, settings: IndexSettings) {
        let memory_bytes = settings.memory_bytes as usize;
        self.table = Table::new(memory_bytes.saturating_sub(Clocks::memory_bytes()));
        self.settings = settings;
    }

    /// Takes over the hosts of a table: what a host of an older epoch held is gone, and so is what departed hosts held.
    pub fn update_hosts(&mut self, table: &HostTable) {
        self.clocks.update(table);
    }

    /// Records that a prompt was placed; what the other workers need to know of it. `None` for a host that is not there.
    pub fn place(&mut self, keys: &PrefixKeys, new: NewPlacement, now_ms: u64) -> Option<Placement> {
        let epoch = self.clocks.epoch_of(new.slot)?;
        let holder = self
            .clocks
            .place(new.slot, new.uncached_tokens, new.prompt_tokens)?;
        let tick = tick_of(now_ms);
        let anchors = Anchors::of(&keys.keys);
        let mut next_anchors = anchors.as_slice().iter().map(|at| usize::from(*at)).peekable();
        let mut placement = Placement {
            kind: PlacementKind::Placed,
            slot: new.slot,
            epoch,
            uncached_tokens: new.uncached_tokens,
            prompt_tokens: new.prompt_tokens,
            renewed: 0,
            keys: Vec::new(),
        };
        for (at, key) in keys.keys.iter().enumerate() {
            let is_anchor = next_anchors.next_if_eq(&at).is_some();
            let held = self.table.hold(key.hash.0, holder, &self.clocks, tick, ONE_USE);
            if is_anchor && held != Held::Kept {
                placement.keys.push(key.hash.0);
                placement.renewed += u8::from(held == Held::Renewed);
            }
        }
        Some(placement)
    }

    /// Takes over what another worker placed or withdrew; false for a host that is not there in that epoch.
    pub fn replay(&mut self, placement: &Placement, now_ms: u64) -> bool {
        if self.clocks.epoch_of(placement.slot) != Some(placement.epoch) {
            return false;
        }
        match placement.kind {
            PlacementKind::Placed => {
                let holder =
                    self.clocks
                        .place(placement.slot, placement.uncached_tokens, placement.prompt_tokens);
                let Some(holder) = holder else {
                    return false;
                };
                let tick = tick_of(now_ms);
                for key in placement.keys.iter().take(MAX_ANCHORS) {
                    self.table.hold(*key, holder, &self.clocks, tick, 0);
                }
            }
            PlacementKind::Withdrawn => {
                let new_keys = placement.keys.iter().skip(placement.renewed.into());
                new_keys.for_each(|key| self.table.forget(*key, placement.slot.0));
            }
        }
        true
    }

    /// What the hosts hold of a prompt.
    #[must_use]
    pub fn lookup(&self, keys: &PrefixKeys, now_ms: u64) -> Matches {
        let mut search = Search {
            index: self,
            tick: tick_of(now_ms),
            found: [0; FOUND_WORDS],
            at_root: [0; FOUND_WORDS],
            left_at_root: None,
            may_spread: true,
            matches: Matches {
                unseen_permille: self.clocks.unseen_permille(),
                ..Matches::NONE
            },
        };
        let keys = keys.keys.as_slice();
        if let Some(root) = keys.first() {
            search.look_at_root(root);
        }
        let mut probes_left = MAX_GAP_PROBES;
        let mut above = keys.len();
        for at in Anchors::of(keys).deepest_first() {
            let Some(anchor) = keys.get(at) else { break };
            if search.has_unfound(anchor) {
                let gap = keys.get(at + 1..above).unwrap_or(&[]);
                for key in gap.iter().rev().take(probes_left) {
                    search.take(key);
                }
                probes_left = probes_left.saturating_sub(gap.len());
                search.take(anchor);
            }
            if search.is_over() {
                break;
            }
            above = at;
        }
        search.matches
    }

    /// Takes over what an answer told of its own prompt, in tokens: how much of it was predicted to be cached and was, and
    /// all of it. What is to be made of the prompt's entries is for the caller to tell all workers.
    pub fn answered(
        &mut self,
        slot: Slot,
        epoch: u32,
        predicted_tokens: u32,
        cached_tokens: u32,
        prompt_tokens: u32,
    ) -> Verdict {
        if self.clocks.epoch_of(slot) != Some(epoch) {
            return Verdict::default();
        }
        self.clocks
            .answered(slot, predicted_tokens, cached_tokens, prompt_tokens)
    }

    /// The keys of a prompt that workers tell each other of, shallow to deep.
    pub fn anchors(keys: &PrefixKeys) -> Vec<PrefixKey> {
        let anchors = Anchors::of(&keys.keys);
        let at = anchors.as_slice().iter();
        at.filter_map(|at| keys.keys.get(usize::from(*at)).copied())
            .collect()
    }

    /// Cache size believed of a host, tokens.
    #[must_use]
    pub fn capacity_tokens(&self, slot: Slot) -> u64 {
        self.clocks.capacity_tokens(slot)
    }

    /// The epoch of a host that is known.
    #[must_use]
    pub fn epoch_of(&self, slot: Slot) -> Option<u32> {
        self.clocks.epoch_of(slot)
    }

    /// Bytes of memory that the index takes: fixed for life, and never above the configured bound.
    #[must_use]
    pub const fn memory_bytes(&self) -> usize {
        self.table.memory_bytes() + Clocks::memory_bytes()
    }
}

impl Matches {
    /// No host holds anything.
    pub const NONE: Self = Self {
        hosts: [(Slot(0), 0); MAX_MATCHES],
        len: 0,
        spread_bytes: 0,
        unseen_permille: 0,
    };

    /// The hosts that hold something and the end of it in bytes, deepest first.
    #[must_use]
    pub fn as_slice(&self) -> &[(Slot, u32)] {
        self.hosts.get(..self.len).unwrap_or(&[])
    }

    /// Prompt bytes that a host holds.
    #[must_use]
    pub fn bytes_at(&self, slot: Slot) -> u32 {
        let found = self.as_slice().iter().find(|found| found.0 == slot);
        found.map_or(0, |found| found.1)
    }

    /// Prompt bytes that some host holds.
    #[must_use]
    pub fn deepest_bytes(&self) -> u32 {
        self.as_slice().first().map_or(0, |found| found.1)
    }

    /// Adds a host, if there is room.
    pub fn push(&mut self, slot: Slot, bytes: u32) {
        if let Some(place) = self.hosts.get_mut(self.len) {
            *place = (slot, bytes);
            self.len += 1;
        }
    }
}

/// One walk over a prompt's keys.
struct Search<'a> {
    index: &'a PrefixIndex,
    tick: u32,
    /// Slots that are in `matches`, a bit each.
    found: [u64; FOUND_WORDS],
    /// Slots that hold the shallowest anchor, a bit each, and how many of them were not found yet; `None` where nobody
    /// holds it.
    at_root: [u64; FOUND_WORDS],
    left_at_root: Option<u32>,
    /// Whether the shallowest anchor is used often enough for one holder; no deeper one is used more often.
    may_spread: bool,
    matches: Matches,
}

impl Search<'_> {
    fn look_at_root(&mut self, root: &PrefixKey) {
        let (mut holders, mut uses_16ths) = (0, 0);
        for (uses, places) in self.index.table.ways(root.hash.0) {
            uses_16ths += uses.decayed_16ths(self.tick);
            for place in places {
                if self.index.clocks.age(*place).is_some() {
                    holders += 1;
                    set_bit(&mut self.at_root, place.slot());
                }
            }
        }
        self.left_at_root = (holders > 0).then_some(holders);
        self.may_spread = holders == 0 || uses_16ths >= 2 * SPREAD_USES_PER_HOLDER * ONE_USE;
    }

    /// Whether a host that was not found deeper holds this anchor; also sees whether it is used so often that it should
    /// spread.
    fn has_unfound(&mut self, anchor: &PrefixKey) -> bool {
        let clocks = &self.index.clocks;
        let (mut unfound, mut holders, mut uses_16ths) = (false, 0, 0);
        for (uses, places) in self.index.table.ways(anchor.hash.0) {
            uses_16ths += uses.decayed_16ths(self.tick);
            for place in places.iter().filter(|place| clocks.age(**place).is_some()) {
                holders += 1;
                unfound |= !self.is_found(*place);
            }
        }
        if self.matches.spread_bytes == 0
            && (1..clocks.present()).contains(&holders)
            && uses_16ths >= SPREAD_USES_PER_HOLDER * ONE_USE * (holders + 1)
        {
            self.matches.spread_bytes = anchor.end_bytes;
        }
        unfound
    }

    /// Adds the hosts that hold a key and were not found deeper.
    fn take(&mut self, key: &PrefixKey) {
        for (_, places) in self.index.table.ways(key.hash.0) {
            for place in places {
                if self.index.clocks.age(*place).is_none() || self.is_found(*place) {
                    continue;
                }
                let slot = place.slot();
                set_bit(&mut self.found, slot);
                if let (true, Some(left)) = (has_bit(&self.at_root, slot), &mut self.left_at_root) {
                    *left = left.saturating_sub(1);
                }
                self.matches.push(Slot(slot), key.end_bytes);
            }
        }
    }

    fn is_found(&self, holder: Holder) -> bool {
        has_bit(&self.found, holder.slot())
    }

    fn is_over(&self) -> bool {
        let all = self.matches.len as u64 >= u64::from(self.index.clocks.present());
        let no_spread = !self.may_spread || self.matches.spread_bytes > 0;
        all || self.matches.len >= MAX_MATCHES || (self.left_at_root == Some(0) && no_spread)
    }
}

fn set_bit(words: &mut [u64; FOUND_WORDS], slot: u16) {
    if let Some(word) = words.get_mut(usize::from(slot / 64)) {
        *word |= 1 << (slot % 64);
    }
}

fn has_bit(words: &[u64; FOUND_WORDS], slot: u16) -> bool {
    let word = words.get(usize::from(slot / 64));
    word.is_some_and(|word| word >> (slot % 64) & 1 == 1)
}

/// The time as the table keeps it; it wraps.
fn tick_of(now_ms: u64) -> u32 {
    u32::try_from((now_ms >> TICK_SHIFT) & u64::from(u32::MAX)).unwrap_or(0)
}

/// Hosts that a lookup names at most.
pub const MAX_MATCHES: usize = 24;
/// Slots have 10 bits in the table.
const FOUND_WORDS: usize = 16;
/// Keys probed between anchors for one prompt.
const MAX_GAP_PROBES: usize = 64;
/// A tick is 512 ms.
const TICK_SHIFT: u32 = 9;
/// Uses in 30 s for each host that holds a key, and one more, that make another copy worth it (rule D of the prototype).
const SPREAD_USES_PER_HOLDER: u32 = 3;

#[cfg(test)]
mod tests;
