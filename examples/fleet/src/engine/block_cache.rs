//! The engine's KV cache: chained block hashes go in, leases on blocks come out.
//!
//! Running requests hold blocks; blocks that nobody holds stay hittable and are given up least recently used first, the
//! tail of a prompt before its head. It must never hold more than its capacity.

use std::collections::{BTreeMap, HashMap};

/// Tokens in a block, as in vLLM's default on GPUs.
pub const BLOCK_TOKENS: usize = 16;
/// Bytes that count as one token: about what English text takes in common vocabularies.
pub const TOKEN_BYTES: usize = 4;

/// Blocks held by one running request.
#[derive(Debug)]
pub(super) struct Lease {
    /// Hashes of the held blocks that are in the cache, head first.
    hashed: Vec<u64>,
    /// Held blocks without a hash: being computed, a partial tail, or output.
    anonymous: usize,
    hit_blocks: usize,
}

impl Lease {
    /// Blocks that were found in the cache.
    pub(super) fn hit_blocks(&self) -> usize {
        self.hit_blocks
    }
}

/// The cache.
#[derive(Debug)]
pub(super) struct BlockCache {
    capacity_blocks: usize,
    blocks: HashMap<u64, Block>,
    /// Blocks nobody holds, by the stamp of their release.
    idle: BTreeMap<u64, u64>,
    anonymous: usize,
    next_stamp: u64,
}

impl BlockCache {
    pub(super) fn new(capacity_blocks: usize) -> Self {
        Self {
            capacity_blocks,
            blocks: HashMap::new(),
            idle: BTreeMap::new(),
            anonymous: 0,
            next_stamp: 0,
        }
    }

    /// Holds `total_blocks`: as many of the first `usable` hashes as are cached, and empty blocks for the rest; `None`
    /// when running requests hold too much.
    pub(super) fn acquire(&mut self, hashes: &[u64], usable: usize, total_blocks: usize) -> Option<Lease> {
        let hits: Vec<u64> = hashes
            .iter()
            .take(usable)
            .take_while(|hash| self.blocks.contains_key(hash))
            .copied()
            .collect();
        let fresh = total_blocks.saturating_sub(hits.len());
        let idle_hits = hits
            .iter()
            .filter(|hash| self.blocks.get(hash).is_some_and(|b| b.holders == 0))
            .count();
        if self.held_blocks() + idle_hits + fresh > self.capacity_blocks {
            return None;
        }
        for hash in &hits {
            self.hold(*hash);
        }
        while self.blocks.len() + self.anonymous + fresh > self.capacity_blocks {
            let Some((_, hash)) = self.idle.pop_first() else {
                break;
            };
            self.blocks.remove(&hash);
        }
        self.anonymous += fresh;
        Some(Lease {
            hit_blocks: hits.len(),
            hashed: hits,
            anonymous: fresh,
        })
    }

    /// Makes the computed blocks of a lease hittable.
    pub(super) fn publish(&mut self, lease: &mut Lease, hashes: &[u64]) {
        for hash in hashes.iter().skip(lease.hashed.len()) {
            if lease.anonymous == 0 {
                return;
            }
            lease.anonymous -= 1;
            self.anonymous -= 1;
            self.hold(*hash);
            lease.hashed.push(*hash);
        }
    }

    /// Gives the blocks of a lease back.
    pub(super) fn release(&mut self, lease: Lease) {
        self.anonymous -= lease.anonymous;
        for hash in lease.hashed.into_iter().rev() {
            let Some(block) = self.blocks.get_mut(&hash) else {
                continue;
            };
            block.holders -= 1;
            if block.holders == 0 {
                block.idle_stamp = self.next_stamp;
                self.idle.insert(self.next_stamp, hash);
                self.next_stamp += 1;
            }
        }
    }

    /// Blocks that running requests hold.
    pub(super) fn held_blocks(&self) -> usize {
        self.blocks.len() - self.idle.len() + self.anonymous
    }

    /// Blocks that a prompt could hit.
    pub(super) fn cached_blocks(&self) -> usize {
        self.blocks.len()
    }

    fn hold(&mut self, hash: u64) {
        let block = self.blocks.entry(hash).or_default();
        if block.holders == 0 {
            self.idle.remove(&block.idle_stamp);
        }
        block.holders += 1;
        block.idle_stamp = u64::MAX;
    }
}

/// Chained hashes of the full blocks of a prompt: `hashes[i]` covers its bytes `0..(i + 1) * 64`.
pub(super) fn block_hashes(prompt: &[u8]) -> Vec<u64> {
    let mut chain = FNV_OFFSET;
    prompt
        .chunks_exact(BLOCK_TOKENS * TOKEN_BYTES)
        .map(|block| {
            for byte in block {
                chain = (chain ^ u64::from(*byte)).wrapping_mul(FNV_PRIME);
            }
            // A second round over the length keeps a block of zeros from being a fixed point of the chain.
            chain = (chain ^ block.len() as u64).wrapping_mul(FNV_PRIME);
            chain
        })
        .collect()
}

#[derive(Debug)]
struct Block {
    holders: usize,
    /// Key in `idle`, or `u64::MAX` while held.
    idle_stamp: u64,
}

impl Default for Block {
    fn default() -> Self {
        Self {
            holders: 0,
            idle_stamp: u64::MAX,
        }
    }
}

/// FNV-1a, 64 bits: <http://www.isthe.com/chongo/tech/comp/fnv/>.
const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0000_0100_0000_01b3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_cover_full_blocks_only_and_chain() {
        let a = block_hashes(&[b'x'; 64 * 3 + 63]);
        assert_eq!(a.len(), 3);
        assert_ne!(a[0], a[1]);
        let mut other = [b'x'; 64 * 3];
        other[0] = b'y';
        let b = block_hashes(&other);
        assert!(
            a.iter().zip(&b).all(|(x, y)| x != y),
            "a change in the head changes every block behind it"
        );
    }

    #[test]
    fn a_tail_is_given_up_before_its_head() {
        let mut cache = BlockCache::new(4);
        let hashes = [1, 2, 3, 4];
        let mut lease = cache.acquire(&hashes, 4, 4).unwrap();
        cache.publish(&mut lease, &hashes);
        cache.release(lease);
        let other = cache.acquire(&[9], 1, 1).unwrap();
        cache.release(other);
        let again = cache.acquire(&hashes, 4, 4).unwrap();
        assert_eq!(again.hit_blocks(), 3);
    }

    #[test]
    fn held_blocks_are_never_given_away() {
        let mut cache = BlockCache::new(4);
        let lease = cache.acquire(&[1, 2, 3], 3, 3).unwrap();
        assert!(cache.acquire(&[7, 8], 2, 2).is_none());
        assert_eq!(cache.held_blocks(), 3);
        cache.release(lease);
        assert_eq!(cache.held_blocks(), 0);
    }
}
