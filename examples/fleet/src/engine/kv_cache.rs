//! The engine's KV cache: names of prompt blocks go in, block numbers held by a request come out.
//!
//! Held blocks are never given away. Full blocks that nobody holds form one list by the time of their release, the tail of
//! a request before its head, and are given up from its old end; those with a name can be hit until then. Blocks that
//! were not filled are used again first. This is what vLLM 0.32 does (`BlockPool.free_blocks` in
//! `vllm/v1/core/block_pool.py`). It must never hold more than its capacity, and takes memory only for blocks that were
//! used at least once.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Number of a block, below the capacity.
pub(super) type BlockIndex = u32;

/// The cache.
#[derive(Debug)]
pub(super) struct KvCache {
    capacity_blocks: usize,
    /// Blocks used at least once.
    blocks: Vec<Block>,
    /// Blocks without content, preferred over idle ones.
    spare: Vec<BlockIndex>,
    by_name: HashMap<u64, BlockIndex, BuildHasherDefault<NameHasher>>,
    idle_oldest: BlockIndex,
    idle_newest: BlockIndex,
    idle: usize,
}

impl KvCache {
    pub(super) fn new(capacity_blocks: usize) -> Self {
        Self {
            capacity_blocks: capacity_blocks.min(NONE as usize),
            blocks: Vec::new(),
            spare: Vec::new(),
            by_name: HashMap::default(),
            idle_oldest: NONE,
            idle_newest: NONE,
            idle: 0,
        }
    }

    /// Finds the blocks of the longest known prefix of `names`, head first, and puts their numbers into `found`.
    pub(super) fn find(&self, names: &[u64], found: &mut Vec<BlockIndex>) {
        found.clear();
        found.extend(names.iter().map_while(|name| self.by_name.get(name).copied()));
    }

    /// How many of the first `names` are known.
    pub(super) fn known(&self, names: &[u64]) -> usize {
        names
            .iter()
            .take_while(|name| self.by_name.contains_key(name))
            .count()
    }

    /// Holds `found` if `fresh` more blocks could be taken afterwards; says whether it did.
    pub(super) fn hold_with_room(&mut self, found: &[BlockIndex], fresh: usize) -> bool {
        let idle_found = found
            .iter()
            .filter(|index| self.block(**index).holders == 0)
            .count();
        if idle_found + fresh > self.free_blocks() {
            return false;
        }
        for index in found {
            self.hold(*index);
        }
        true
    }

    /// Holds a block for new content, giving up the one released longest ago if need be; `None` when all are held.
    pub(super) fn take(&mut self) -> Option<BlockIndex> {
        if let Some(index) = self.spare.pop() {
            self.block_mut(index).holders = 1;
            return Some(index);
        }
        if self.blocks.len() < self.capacity_blocks {
            let index = self.blocks.len() as BlockIndex;
            self.blocks.push(Block {
                holders: 1,
                ..Block::EMPTY
            });
            return Some(index);
        }
        let index = self.idle_oldest;
        if index == NONE {
            return None;
        }
        self.unlink(index);
        let block = self.block_mut(index);
        block.holders = 1;
        if std::mem::take(&mut block.named) {
            let name = block.name;
            self.by_name.remove(&name);
        }
        Some(index)
    }

    /// Makes a held block hittable by a name. Where another block has that name already, that one is held instead.
    pub(super) fn publish(&mut self, index: &mut BlockIndex, name: u64) {
        if let Some(known) = self.by_name.get(&name).copied() {
            if known != *index {
                let block = self.block_mut(*index);
                block.holders = 0;
                self.spare.push(*index);
                self.hold(known);
                *index = known;
            }
            return;
        }
        self.by_name.insert(name, *index);
        let block = self.block_mut(*index);
        block.name = name;
        block.named = true;
    }

    /// Gives the blocks of a request (head first) back, its tail first; the first `full` of them were filled.
    pub(super) fn release(&mut self, held: &[BlockIndex], full: usize) {
        for (position, index) in held.iter().enumerate().rev() {
            let block = self.block_mut(*index);
            block.holders -= 1;
            match (block.holders, block.named || position < full) {
                (0, true) => self.link_newest(*index),
                (0, false) => self.spare.push(*index),
                (_, _) => {}
            }
        }
    }

    /// Blocks that could be taken now.
    pub(super) fn free_blocks(&self) -> usize {
        self.capacity_blocks - self.held_blocks()
    }

    /// Blocks that requests hold.
    pub(super) fn held_blocks(&self) -> usize {
        self.blocks.len() - self.spare.len() - self.idle
    }

    /// Blocks that a prompt could hit.
    pub(super) fn named_blocks(&self) -> usize {
        self.by_name.len()
    }

    fn hold(&mut self, index: BlockIndex) {
        if self.block(index).holders == 0 {
            self.unlink(index);
        }
        self.block_mut(index).holders += 1;
    }

    fn link_newest(&mut self, index: BlockIndex) {
        let older = std::mem::replace(&mut self.idle_newest, index);
        let block = self.block_mut(index);
        block.older = older;
        block.newer = NONE;
        if older == NONE {
            self.idle_oldest = index;
        } else {
            self.block_mut(older).newer = index;
        }
        self.idle += 1;
    }

    fn unlink(&mut self, index: BlockIndex) {
        let Block { older, newer, .. } = *self.block(index);
        if older == NONE {
            self.idle_oldest = newer;
        } else {
            self.block_mut(older).newer = newer;
        }
        if newer == NONE {
            self.idle_newest = older;
        } else {
            self.block_mut(newer).older = older;
        }
        self.idle -= 1;
    }

    fn block(&self, index: BlockIndex) -> &Block {
        &self.blocks[index as usize]
    }

    fn block_mut(&mut self, index: BlockIndex) -> &mut Block {
        &mut self.blocks[index as usize]
    }
}

#[derive(Debug, Clone, Copy)]
struct Block {
    /// Meaningful while `named`.
    name: u64,
    holders: u32,
    /// Neighbours in the list of idle blocks while nobody holds it.
    older: BlockIndex,
    newer: BlockIndex,
    named: bool,
}

impl Block {
    const EMPTY: Self = Self {
        name: 0,
        holders: 0,
        older: NONE,
        newer: NONE,
        named: false,
    };
}

/// No block.
const NONE: BlockIndex = BlockIndex::MAX;

/// Folds a block's name, which may be a hash or a small number, with one multiplication.
#[derive(Debug, Default)]
struct NameHasher(u64);

impl Hasher for NameHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        let product = u128::from(value ^ self.0 ^ GOLDEN_RATIO).wrapping_mul(u128::from(FOLD_FACTOR));
        self.0 = (product >> 64) as u64 ^ product as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// 2⁶⁴ ÷ golden ratio.
const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;
/// An odd number with even bits, from PCG (<https://www.pcg-random.org>).
const FOLD_FACTOR: u64 = 6_364_136_223_846_793_005;

#[cfg(test)]
mod tests {
    use super::*;

    /// The same rules over plain lists, slow and obvious.
    #[derive(Default)]
    struct Naive {
        capacity: usize,
        /// Contents that somebody holds, with their count.
        held: Vec<(Content, usize)>,
        /// Contents that nobody holds, oldest release first.
        idle: Vec<Content>,
        unnamed: u64,
    }

    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Content {
        Named(u64),
        Unnamed(u64),
    }

    impl Naive {
        fn knows(&self, name: u64) -> bool {
            let content = Content::Named(name);
            self.idle.contains(&content) || self.held.iter().any(|(held, _)| *held == content)
        }

        fn admit(&mut self, names: &[u64], total: usize) -> Option<(Vec<Content>, usize)> {
            let hits = names.iter().take_while(|name| self.knows(**name)).count();
            let found: Vec<_> = names[..hits].iter().map(|name| Content::Named(*name)).collect();
            let idle_found = found.iter().filter(|content| self.idle.contains(content)).count();
            if self.held.len() + idle_found + total - hits > self.capacity {
                return None;
            }
            for content in &found {
                self.hold(*content);
            }
            let mut lease = found;
            for _ in hits..total {
                if self.held.len() + self.idle.len() == self.capacity {
                    self.idle.remove(0);
                }
                self.unnamed += 1;
                self.held.push((Content::Unnamed(self.unnamed), 1));
                lease.push(Content::Unnamed(self.unnamed));
            }
            for (content, name) in lease.iter_mut().zip(names).skip(hits) {
                // `names` of one request differ, and a miss before means that none behind it is held by a prefix.
                let position = self.held.iter().position(|(held, _)| held == content).unwrap();
                if self.knows(*name) {
                    self.held.remove(position);
                    self.hold(Content::Named(*name));
                } else {
                    self.held[position].0 = Content::Named(*name);
                }
                *content = Content::Named(*name);
            }
            Some((lease, hits))
        }

        fn hold(&mut self, content: Content) {
            if let Some(position) = self.idle.iter().position(|idle| *idle == content) {
                self.idle.remove(position);
                self.held.push((content, 1));
            } else {
                let held = self.held.iter_mut().find(|(held, _)| *held == content).unwrap();
                held.1 += 1;
            }
        }

        fn release(&mut self, lease: &[Content], full: usize) {
            for (number, content) in lease.iter().enumerate().rev() {
                let position = self.held.iter().position(|(held, _)| held == content).unwrap();
                self.held[position].1 -= 1;
                if self.held[position].1 == 0 {
                    let content = self.held.remove(position).0;
                    if number < full || matches!(content, Content::Named(_)) {
                        self.idle.push(content);
                    }
                }
            }
        }
    }

    fn admit(cache: &mut KvCache, names: &[u64], total: usize) -> Option<(Vec<BlockIndex>, usize)> {
        let mut lease = Vec::new();
        cache.find(names, &mut lease);
        let hits = lease.len();
        cache.hold_with_room(&lease, total - hits).then(|| {
            lease.extend((hits..total).map(|_| cache.take().unwrap()));
            for (index, name) in lease.iter_mut().zip(names).skip(hits) {
                cache.publish(index, *name);
            }
            (lease, hits)
        })
    }

    #[test]
    fn agrees_with_a_naive_model_on_random_requests() {
        for seed in 1..=40_u64 {
            let mut state = seed;
            let mut random = move |below: u64| {
                state = state.wrapping_mul(FOLD_FACTOR).wrapping_add(GOLDEN_RATIO);
                (state >> 33) % below
            };
            let capacity = 5 + random(40) as usize;
            let (mut cache, mut naive) = (
                KvCache::new(capacity),
                Naive {
                    capacity,
                    ..Naive::default()
                },
            );
            let mut leases = Vec::new();
            for round in 0..600 {
                if random(3) == 0 && !leases.is_empty() {
                    let (ours, theirs): (Vec<_>, Vec<_>) =
                        leases.swap_remove(random(leases.len() as u64) as usize);
                    let full = ours.len() - random(2) as usize;
                    cache.release(&ours, full);
                    naive.release(&theirs, full);
                } else {
                    let (family, shared, own) = (random(4), random(8), random(6));
                    let names: Vec<u64> = (0..shared)
                        .map(|depth| family * 100 + depth)
                        .chain((0..own).map(|depth| 1_000 + 100 * random(6) + 10 * family + depth))
                        .collect();
                    let total = names.len() + random(3) as usize + usize::from(names.is_empty());
                    match (admit(&mut cache, &names, total), naive.admit(&names, total)) {
                        (None, None) => {}
                        (Some((ours, our_hits)), Some((theirs, their_hits))) => {
                            assert_eq!(our_hits, their_hits, "seed {seed} round {round}");
                            leases.push((ours, theirs));
                        }
                        (ours, theirs) => panic!("seed {seed} round {round}: {ours:?} against {theirs:?}"),
                    }
                }
                assert_eq!(cache.held_blocks(), naive.held.len(), "seed {seed} round {round}");
                let named = |content: &Content| matches!(content, Content::Named(_));
                let named = naive.idle.iter().filter(|content| named(content)).count()
                    + naive.held.iter().filter(|(content, _)| named(content)).count();
                assert_eq!(cache.named_blocks(), named, "seed {seed} round {round}");
                assert!(cache.blocks.len() <= capacity);
            }
        }
    }

    #[test]
    fn a_tail_is_given_up_before_its_head() {
        let mut cache = KvCache::new(4);
        let names = [1, 2, 3, 4];
        let (lease, _) = admit(&mut cache, &names, 4).unwrap();
        cache.release(&lease, 4);
        let (other, _) = admit(&mut cache, &[9], 1).unwrap();
        cache.release(&other, 1);
        assert_eq!(cache.known(&names), 3);
    }

    #[test]
    fn a_block_that_was_not_filled_is_used_again_first() {
        let mut cache = KvCache::new(4);
        let (lease, _) = admit(&mut cache, &[1, 2], 3).unwrap();
        cache.release(&lease, 2);
        assert_eq!(cache.take(), Some(lease[2]));
    }

    #[test]
    fn held_blocks_are_never_given_away() {
        let mut cache = KvCache::new(4);
        let (lease, _) = admit(&mut cache, &[1, 2, 3], 3).unwrap();
        assert!(admit(&mut cache, &[7, 8], 2).is_none());
        assert_eq!(cache.held_blocks(), 3);
        let tail = cache.take().unwrap();
        assert_eq!(cache.take(), None);
        cache.release(&[tail], 0);
        cache.release(&lease, 3);
        assert_eq!((cache.held_blocks(), cache.known(&[1, 2, 3])), (0, 3));
    }

    #[test]
    fn memory_is_taken_only_for_blocks_that_were_used() {
        let mut cache = KvCache::new(usize::MAX);
        let (lease, _) = admit(&mut cache, &[1, 2], 3).unwrap();
        assert_eq!(cache.blocks.len(), 3);
        cache.release(&lease, 3);
        assert!(cache.free_blocks() > 1 << 30);
    }
}
