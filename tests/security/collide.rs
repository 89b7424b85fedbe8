//! Texts that murmur3_x64_128 cannot tell apart, whatever stands before them and whatever the seed.
//!
//! The construction is the one that made hash tables change their hash: Jean-Philippe Aumasson, Daniel J. Bernstein and
//! Martin Boßlet, "Hash-flooding DoS reloaded" (2012). A difference that reaches only the top bit of the first lane
//! survives the additions and the multiplication by five, the second lane is made to cancel it, and the next block cancels
//! what is left of the first. Each step is undone exactly, so no state of the hash and no secret before the text matters.

use warmroute::strategy::Rng;

/// Two different ASCII texts (control characters among them, which JSON escapes) of 32 bytes that may stand for each other at any offset that is a multiple of 16 in what is
/// hashed.
pub(crate) fn colliding_pair(rng: &mut Rng) -> [[u8; 32]; 2] {
    let lanes = [
        pair(rng, scramble1, unscramble1, 1 << 36),
        pair(rng, scramble2, unscramble2, 1 << 32),
        pair(rng, scramble1, unscramble1, 1 << 63),
        pair(rng, scramble2, unscramble2, 0),
    ];
    [0, 1].map(|which| {
        let mut text = [0; 32];
        for (place, lane) in text.chunks_exact_mut(8).zip(&lanes) {
            place.copy_from_slice(&lane[which].to_le_bytes());
        }
        text
    })
}

/// Two ASCII words whose scrambled forms differ in these bits.
fn pair(rng: &mut Rng, scramble: fn(u64) -> u64, unscramble: fn(u64) -> u64, difference: u64) -> [u64; 2] {
    loop {
        let word = rng.next_u64() & !0x8080_8080_8080_8080;
        let other = unscramble(scramble(word) ^ difference);
        if other & 0x8080_8080_8080_8080 == 0 {
            return [word, other];
        }
    }
}

fn scramble1(lane: u64) -> u64 {
    lane.wrapping_mul(C1).rotate_left(31).wrapping_mul(C2)
}

fn unscramble1(lane: u64) -> u64 {
    lane.wrapping_mul(inverse(C2))
        .rotate_right(31)
        .wrapping_mul(inverse(C1))
}

fn scramble2(lane: u64) -> u64 {
    lane.wrapping_mul(C2).rotate_left(33).wrapping_mul(C1)
}

fn unscramble2(lane: u64) -> u64 {
    lane.wrapping_mul(inverse(C1))
        .rotate_right(33)
        .wrapping_mul(inverse(C2))
}

/// Of an odd number modulo 2⁶⁴, by Newton's iteration: each step doubles the bits that are right, of which there are three.
fn inverse(odd: u64) -> u64 {
    (0..5).fold(odd, |inverse, _| {
        inverse.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(inverse)))
    })
}

const C1: u64 = 0x87c3_7b91_1142_53d5;
const C2: u64 = 0x4cf5_ad43_2745_937f;
