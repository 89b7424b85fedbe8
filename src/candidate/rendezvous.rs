//! Key and host → rank: rendezvous (highest random weight) hashing and bounded selection.
//!
//! In: a prefix key and the hash of a host's address. Out: a score, lower is better, equal in every worker and every
//! Envoy that knows the host, whatever slot number it has there. It must never look at slots, load or time: a key
//! moves only when its best host leaves or a better one joins.

use crate::chunk::murmur::Murmur;

/// Hashes a host's address for [`score`]: low half of `murmur3_x64_128`, seed 0.
pub(crate) fn address_hash(address: &str) -> u64 {
    let mut hash = Murmur::new(0);
    hash.update(address.as_bytes());
    hash.low64()
}

/// Mixes 64 bits: the finaliser of MurmurHash3 (`fmix64`, Austin Appleby, public domain).
pub(crate) const fn mix64(mut x: u64) -> u64 {
    x ^= x >> 33;
    x = x.wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^= x >> 33;
    x = x.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

/// Score of a host for a key; the host with the lowest score is the key's home.
///
/// The score is −log2(u) ÷ weight, where u in (0, 1] is the mixed hash: a host of weight w is home to w times as many
/// keys as one of weight 1, and giving one host another weight moves only the keys that it gains or loses.
pub(crate) const fn score(key: u64, address_hash: u64, weight: u32) -> u64 {
    let mixed = mix64(key ^ address_hash);
    if weight <= 1 {
        neg_log2_q57(mixed)
    } else {
        neg_log2_q57(mixed) / weight as u64
    }
}

/// Orders hosts of one weight as [`score`] does, without its logarithm.
pub(crate) const fn unweighted_score(key: u64, address_hash: u64) -> u64 {
    !mix64(key ^ address_hash)
}

/// −log2((x + 1) / 2⁶⁴) in units of 2⁻⁵⁷, by a quadratic between powers of two.
///
/// The approximation is monotone, and a constant factor (10 % at most) off where x is large, which is where winners
/// are: ranks among hosts and shares between weights depend on nothing more.
const fn neg_log2_q57(x: u64) -> u64 {
    let zeros = x.leading_zeros();
    if zeros >= 64 {
        return u64::MAX;
    }
    // Distance of the mantissa (1 ≤ m < 2) from 2, as a fraction of 2⁶³ scaled down to 57 bits.
    let gap_q57 = (u64::MAX >> 1).wrapping_sub((x << zeros) & (u64::MAX >> 1)) >> 6;
    // −log2(m / 2) ≈ gap · (0.6535 + 0.3465 · gap): 0 at gap 0, 1 at gap 1.
    let gap_q28 = gap_q57 >> 29;
    let slope_q28 = 175_422_150 + ((93_013_306 * gap_q28) >> 28);
    let fraction_q57 = (gap_q57 >> 28) * slope_q28 + (((gap_q57 & ((1 << 28) - 1)) * slope_q28) >> 28);
    ((zeros as u64) << 57) + fraction_q57
}

/// The `N` lowest entries of a stream, in growing order, without allocation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lowest<const N: usize> {
    entries: [Entry; N],
    len: usize,
    /// No entry with a higher score and tie is kept.
    limit: (u64, u32),
}

/// What [`Lowest`] holds: compared by score, then by tie.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Entry {
    pub(crate) score: u64,
    pub(crate) tie: u32,
    /// Index of the host in the fleet.
    pub(crate) host: u16,
}

impl<const N: usize> Lowest<N> {
    pub(crate) fn new() -> Self {
        Self {
            entries: [Entry::default(); N],
            len: 0,
            limit: (u64::MAX, u32::MAX),
        }
    }

    /// Keeps `entry` if it is among the lowest so far.
    #[inline]
    pub(crate) fn offer(&mut self, entry: Entry) {
        self.offer_with(entry.score, entry.host, || entry.tie);
    }

    /// The same, with a tie that is computed only where the score leaves it open.
    #[inline]
    pub(crate) fn offer_with(&mut self, score: u64, host: u16, tie: impl FnOnce() -> u32) {
        // Most hosts of a large fleet end here.
        if score > self.limit.0 {
            return;
        }
        let tie = tie();
        if (score, tie) <= self.limit {
            self.insert(Entry { score, tie, host });
        }
    }

    fn insert(&mut self, entry: Entry) {
        let at = self.as_slice().iter().take_while(|kept| **kept < entry).count();
        let len = (self.len + 1).min(N);
        // Shifts what is behind it by one; the last of a full list falls out.
        let mut next = entry;
        for kept in self.entries.get_mut(at..len).unwrap_or(&mut []) {
            next = std::mem::replace(kept, next);
        }
        self.len = len;
        if let (true, Some(worst)) = (len == N, self.entries.last()) {
            self.limit = (worst.score, worst.tie);
        }
    }

    pub(crate) fn as_slice(&self) -> &[Entry] {
        self.entries.get(..self.len).unwrap_or(&[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neg_log2_is_monotone_and_close() {
        let mut last = u64::MAX;
        let steps = 20_000u64;
        for i in 1..=steps {
            let x = (u64::MAX / steps) * i;
            let got = neg_log2_q57(x);
            assert!(got <= last, "not monotone at {x}");
            last = got;
            let exact = -((x as f64 + 1.0) / 2f64.powi(64)).log2();
            assert!(
                (got as f64 / 2f64.powi(57) - exact).abs() < 0.01,
                "{x}: {got} against {exact}"
            );
        }
        assert_eq!(neg_log2_q57(u64::MAX), 0);
        assert!(neg_log2_q57(u64::MAX - (1 << 40)) > 0);
        assert_eq!(neg_log2_q57(0), u64::MAX);
        assert_eq!(neg_log2_q57(1), (63 << 57) + neg_log2_q57(1 << 63));
    }

    #[test]
    fn without_weights_the_order_is_the_same() {
        let hosts: Vec<u64> = (0..64).map(|i| address_hash(&format!("10.0.0.{i}:80"))).collect();
        for key in 0..500u64 {
            for weight in [1, 7] {
                let mut weighted = hosts.clone();
                weighted.sort_by_key(|host| (score(mix64(key + 1), *host, weight), *host));
                let mut unweighted = hosts.clone();
                unweighted.sort_by_key(|host| (unweighted_score(mix64(key + 1), *host), *host));
                assert_eq!(weighted, unweighted);
            }
        }
    }

    #[test]
    fn weight_gives_a_proportional_share_of_keys() {
        let hosts: Vec<(u64, u32)> = [1u32, 1, 2, 4]
            .iter()
            .enumerate()
            .map(|(i, w)| (address_hash(&format!("10.0.0.{i}:80")), *w))
            .collect();
        let mut won = [0u32; 4];
        for key in 0..80_000u64 {
            let best = (0..4)
                .min_by_key(|i| score(mix64(key + 1), hosts[*i].0, hosts[*i].1))
                .unwrap();
            won[best] += 1;
        }
        for (count, weight) in won.iter().zip([1u32, 1, 2, 4]) {
            let want = 10_000 * weight;
            assert!(
                count.abs_diff(want) < want / 12,
                "weight {weight}: {count} of {want}"
            );
        }
    }

    #[test]
    fn address_hash_is_the_low_half_of_murmur3_x64_128() {
        // Independent value: `mmh3.hash64("10.0.0.1:8000", 0, signed=False)[0]`, Python mmh3.
        assert_eq!(address_hash("10.0.0.1:8000"), GOLDEN_ADDRESS_HASH);
    }

    #[test]
    fn lowest_equals_a_sort() {
        let mut x = 7u64;
        for n in 0..40u16 {
            let entries: Vec<Entry> = (0..n)
                .map(|host| {
                    x = mix64(x + 1);
                    Entry {
                        score: x % 9,
                        tie: (x >> 40) as u32 % 3,
                        host,
                    }
                })
                .collect();
            let mut lowest = Lowest::<8>::new();
            entries.iter().for_each(|e| lowest.offer(*e));
            let mut sorted = entries;
            sorted.sort();
            sorted.truncate(8);
            assert_eq!(lowest.as_slice(), sorted.as_slice());
        }
    }

    const GOLDEN_ADDRESS_HASH: u64 = 161_504_588_077_288_436;
}
