//! Bytes, in pieces of any size → `murmur3_x64_128`, of which the low 64 bits are kept.
//!
//! In: a seed, then byte slices. Out: the same digest as hashing their concatenation at once, so that text goes from
//! the request body into the hash without a copy. It must never allocate, and it is not a cryptographic hash: it keeps
//! prompts apart, it authenticates nothing. Algorithm: MurmurHash3 by Austin Appleby (public domain), `MurmurHash3.cpp`.

use super::fill;

/// The running state of one digest.
#[derive(Debug, Clone, Copy)]
pub struct Murmur {
    h1: u64,
    h2: u64,
    tail: [u8; BLOCK_BYTES],
    tail_bytes: usize,
    total_bytes: u64,
}

impl Murmur {
    /// Starts a digest with `seed`.
    pub const fn new(seed: u32) -> Self {
        Self {
            h1: seed as u64,
            h2: seed as u64,
            tail: [0; BLOCK_BYTES],
            tail_bytes: 0,
            total_bytes: 0,
        }
    }

    /// Appends `bytes` to what is hashed.
    pub fn update(&mut self, bytes: &[u8]) {
        self.total_bytes = self.total_bytes.wrapping_add(bytes.len() as u64);
        let mut rest = bytes;
        if self.tail_bytes > 0 {
            rest = fill(&mut self.tail, &mut self.tail_bytes, rest);
            if self.tail_bytes < BLOCK_BYTES {
                return;
            }
            let block = self.tail;
            self.mix(&block);
            self.tail_bytes = 0;
        }
        let (blocks, left) = rest.as_chunks::<BLOCK_BYTES>();
        for block in blocks {
            self.mix(block);
        }
        fill(&mut self.tail, &mut self.tail_bytes, left);
    }

    /// Low 64 bits of the digest of everything appended so far.
    pub fn low64(mut self) -> u64 {
        for byte in self.tail.iter_mut().skip(self.tail_bytes) {
            *byte = 0;
        }
        // A zero lane mixes to zero, so padding with zeros equals the reference's switch over the tail length.
        let (k1, k2) = lanes(&self.tail);
        self.h2 ^= scramble2(k2);
        self.h1 ^= scramble1(k1);
        self.h1 ^= self.total_bytes;
        self.h2 ^= self.total_bytes;
        self.h1 = self.h1.wrapping_add(self.h2);
        self.h2 = self.h2.wrapping_add(self.h1);
        self.h1 = finalize(self.h1);
        self.h2 = finalize(self.h2);
        self.h1.wrapping_add(self.h2)
    }

    fn mix(&mut self, block: &[u8; BLOCK_BYTES]) {
        let (k1, k2) = lanes(block);
        self.h1 ^= scramble1(k1);
        self.h1 = self
            .h1
            .rotate_left(27)
            .wrapping_add(self.h2)
            .wrapping_mul(5)
            .wrapping_add(0x52dc_e729);
        self.h2 ^= scramble2(k2);
        self.h2 = self
            .h2
            .rotate_left(31)
            .wrapping_add(self.h1)
            .wrapping_mul(5)
            .wrapping_add(0x3849_5ab5);
    }
}

fn lanes(block: &[u8; BLOCK_BYTES]) -> (u64, u64) {
    let both = u128::from_le_bytes(*block);
    #[expect(clippy::cast_possible_truncation, reason = "the two halves of a block")]
    let halves = (both as u64, (both >> 64) as u64);
    halves
}

const fn scramble1(k1: u64) -> u64 {
    k1.wrapping_mul(C1).rotate_left(31).wrapping_mul(C2)
}

const fn scramble2(k2: u64) -> u64 {
    k2.wrapping_mul(C2).rotate_left(33).wrapping_mul(C1)
}

const fn finalize(mut k: u64) -> u64 {
    k ^= k >> 33;
    k = k.wrapping_mul(0xff51_afd7_ed55_8ccd);
    k ^= k >> 33;
    k = k.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    k ^ (k >> 33)
}

const BLOCK_BYTES: usize = 16;
const C1: u64 = 0x87c3_7b91_1142_53d5;
const C2: u64 = 0x4cf5_ad43_2745_937f;

#[cfg(test)]
mod tests {
    use super::*;

    fn oracle(bytes: &[u8], seed: u32) -> u64 {
        let mut source = std::io::Cursor::new(bytes);
        u64::try_from(murmur3::murmur3_x64_128(&mut source, seed).unwrap() & u128::from(u64::MAX)).unwrap()
    }

    fn bytes(len: usize) -> Vec<u8> {
        (0..len)
            .map(|i| u8::try_from((i * 131 + 7) % 251).unwrap())
            .collect()
    }

    #[test]
    fn one_piece_equals_the_reference_crate() {
        for len in (0..130).chain([255, 256, 1023, 4096, 4097]) {
            for seed in [0, 1, 0xdead_beef] {
                let data = bytes(len);
                let mut murmur = Murmur::new(seed);
                murmur.update(&data);
                assert_eq!(murmur.low64(), oracle(&data, seed), "length {len}, seed {seed}");
            }
        }
    }

    #[test]
    fn pieces_equal_the_whole() {
        let data = bytes(200);
        let want = oracle(&data, 9);
        for first in 0..data.len() {
            for piece in [1, 3, 16, 17, 64] {
                let mut murmur = Murmur::new(9);
                murmur.update(&data[..first]);
                for part in data[first..].chunks(piece) {
                    murmur.update(part);
                }
                assert_eq!(murmur.low64(), want, "first {first}, piece {piece}");
            }
        }
    }
}
