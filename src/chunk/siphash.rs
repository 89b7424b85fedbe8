//! Bytes, in pieces of any size → SipHash-2-4 under a key of 128 bits.
//!
//! In: a key, then byte slices. Out: the same digest as hashing their concatenation at once. Who does not know the key can
//! neither compute a digest nor find two inputs that share one, other than by asking; murmur gives neither. It must never
//! allocate. Algorithm: Jean-Philippe Aumasson and Daniel J. Bernstein, "SipHash: a fast short-input PRF" (2012), whose
//! test vector is below.

use super::fill;

/// The running state of one digest.
#[derive(Debug, Clone, Copy)]
pub struct SipHash {
    state: [u64; 4],
    tail: [u8; WORD_BYTES],
    tail_bytes: usize,
    total_bytes: u64,
}

impl SipHash {
    /// Starts a digest under a key.
    pub const fn new(key: [u64; 2]) -> Self {
        let [k0, k1] = key;
        Self {
            state: [
                k0 ^ 0x736f_6d65_7073_6575,
                k1 ^ 0x646f_7261_6e64_6f6d,
                k0 ^ 0x6c79_6765_6e65_7261,
                k1 ^ 0x7465_6462_7974_6573,
            ],
            tail: [0; WORD_BYTES],
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
            if self.tail_bytes < WORD_BYTES {
                return;
            }
            self.compress(u64::from_le_bytes(self.tail));
            self.tail_bytes = 0;
        }
        let (words, left) = rest.as_chunks::<WORD_BYTES>();
        for word in words {
            self.compress(u64::from_le_bytes(*word));
        }
        fill(&mut self.tail, &mut self.tail_bytes, left);
    }

    /// The digest of everything appended so far.
    pub fn finish(mut self) -> u64 {
        for byte in self.tail.iter_mut().skip(self.tail_bytes) {
            *byte = 0;
        }
        self.compress(u64::from_le_bytes(self.tail) | self.total_bytes << 56);
        let [_, _, v2, _] = &mut self.state;
        *v2 ^= 0xff;
        for _ in 0..4 {
            self.round();
        }
        let [v0, v1, v2, v3] = self.state;
        v0 ^ v1 ^ v2 ^ v3
    }

    fn compress(&mut self, word: u64) {
        let [_, _, _, v3] = &mut self.state;
        *v3 ^= word;
        self.round();
        self.round();
        let [v0, ..] = &mut self.state;
        *v0 ^= word;
    }

    fn round(&mut self) {
        let [mut v0, mut v1, mut v2, mut v3] = self.state;
        v0 = v0.wrapping_add(v1);
        v1 = v1.rotate_left(13) ^ v0;
        v0 = v0.rotate_left(32);
        v2 = v2.wrapping_add(v3);
        v3 = v3.rotate_left(16) ^ v2;
        v0 = v0.wrapping_add(v3);
        v3 = v3.rotate_left(21) ^ v0;
        v2 = v2.wrapping_add(v1);
        v1 = v1.rotate_left(17) ^ v2;
        v2 = v2.rotate_left(32);
        self.state = [v0, v1, v2, v3];
    }
}

const WORD_BYTES: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    /// The key of the paper, bytes 00 to 0f.
    const KEY: [u64; 2] = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];

    fn digest(key: [u64; 2], pieces: &[&[u8]]) -> u64 {
        let mut hash = SipHash::new(key);
        pieces.iter().for_each(|piece| hash.update(piece));
        hash.finish()
    }

    #[test]
    fn the_papers_test_vector_is_met() {
        let input: Vec<u8> = (0..15).collect();
        assert_eq!(digest(KEY, &[&input]), 0xa129_ca61_49be_45e5);
    }

    #[test]
    fn every_split_equals_the_whole() {
        let input: Vec<u8> = (0..41).map(|i: u8| i.wrapping_mul(7)).collect();
        for len in 0..=input.len() {
            let input = &input[..len];
            let whole = digest(KEY, &[input]);
            for at in 0..=len {
                assert_eq!(digest(KEY, &[&input[..at], &input[at..]]), whole, "{len} at {at}");
            }
            let bytes: Vec<&[u8]> = input.chunks(1).collect();
            assert_eq!(digest(KEY, &bytes), whole, "{len} byte by byte");
        }
    }

    #[test]
    fn another_key_or_length_is_another_digest() {
        assert_ne!(digest(KEY, &[b"text"]), digest([KEY[0], KEY[1] ^ 1], &[b"text"]));
        assert_ne!(digest(KEY, &[b"text"]), digest([KEY[0] ^ 1, KEY[1]], &[b"text"]));
        assert_ne!(digest(KEY, &[b"text"]), digest(KEY, &[b"text\0"]));
        assert_ne!(digest(KEY, &[]), digest(KEY, &[b"\0"]));
    }
}
