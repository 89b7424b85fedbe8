//! Prompt keys → the few of them that every worker agrees to look at first.
//!
//! The anchors of a prompt are the first key in each cell of a grid over the depth, and the last key. Which keys are
//! anchors depends on depths alone, so prompts share the anchors of what they have in common.

use crate::chunk::PrefixKey;

/// Positions of a prompt's anchors in its list of keys, shallow to deep.
#[derive(Debug, Clone, Copy)]
pub(super) struct Anchors {
    at: [u16; MAX_ANCHORS],
    len: usize,
}

impl Anchors {
    pub(super) fn of(keys: &[PrefixKey]) -> Self {
        let mut anchors = Self {
            at: [0; MAX_ANCHORS],
            len: 0,
        };
        let mut cell_end = 0;
        let Some(last) = keys.len().checked_sub(1) else {
            return anchors;
        };
        for (at, key) in keys.iter().enumerate() {
            if at != last && (key.end_bytes < cell_end || anchors.len + 1 >= MAX_ANCHORS) {
                continue;
            }
            cell_end = cell_end_of(key.end_bytes);
            let (Some(place), Ok(at)) = (anchors.at.get_mut(anchors.len), u16::try_from(at)) else {
                break;
            };
            *place = at;
            anchors.len += 1;
        }
        anchors
    }

    /// Deep to shallow.
    pub(super) fn deepest_first(&self) -> impl Iterator<Item = usize> + '_ {
        self.as_slice().iter().rev().map(|at| usize::from(*at))
    }

    pub(super) fn as_slice(&self) -> &[u16] {
        self.at.get(..self.len).unwrap_or(&[])
    }
}

/// End of the cell of the grid that a depth lies in: cells are 256 B wide up to 4 KiB, 1 KiB up to 16 KiB, 2 KiB up to
/// 32 KiB, 8 KiB up to 128 KiB, 32 KiB up to 512 KiB, 1 MiB beyond.
const fn cell_end_of(end_bytes: u32) -> u32 {
    let width_bytes = match end_bytes {
        0..4096 => 1 << 8,
        4096..16_384 => 1 << 10,
        16_384..32_768 => 1 << 11,
        32_768..131_072 => 1 << 13,
        131_072..524_288 => 1 << 15,
        _ => 1 << 20,
    };
    (end_bytes & !(width_bytes - 1)).saturating_add(width_bytes)
}

/// The grid has 60 cells up to 512 KiB; a journal's placement holds as many keys.
pub(super) const MAX_ANCHORS: usize = crate::journal::MAX_KEYS;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::ChunkHash;

    fn keys(step_bytes: u32, count: u32) -> Vec<PrefixKey> {
        let key = |at: u32| PrefixKey {
            hash: ChunkHash(at.into()),
            end_bytes: at * step_bytes,
        };
        (1..=count).map(key).collect()
    }

    #[test]
    fn a_continued_prompt_keeps_its_anchors_but_the_last() {
        let long = keys(100, 600);
        for len in 1..600 {
            let short = Anchors::of(&long[..len]);
            let whole = Anchors::of(&long);
            let kept = short.as_slice().split_last().unwrap().1;
            assert_eq!(kept, &whole.as_slice()[..kept.len()]);
        }
    }

    #[test]
    fn anchors_are_bounded_and_end_with_the_last_key() {
        for (step, count) in [(64, 8192), (1 << 20, 700), (1, 10_000)] {
            let keys = keys(step, count);
            let anchors = Anchors::of(&keys);
            assert!(anchors.as_slice().len() <= MAX_ANCHORS);
            assert_eq!(anchors.deepest_first().next(), Some(keys.len() - 1));
        }
        assert_eq!(Anchors::of(&[]).deepest_first().next(), None);
    }
}
