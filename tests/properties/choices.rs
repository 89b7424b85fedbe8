//! Bytes → the choices of a generator, and counts of what the generated inputs came to.
//!
//! A fuzzer's input or the bytes of a seeded generator, read front to back; when they run out, every choice is the first.
//! One generator thus serves both, and what a fuzzer found can be replayed from its bytes.

use std::collections::BTreeMap;

/// The choices that bytes stand for.
#[derive(Debug, Clone)]
pub(crate) struct Choices<'a> {
    rest: &'a [u8],
}

impl<'a> Choices<'a> {
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// True when all bytes are used up, and what is generated from here on would be the same for ever.
    pub(crate) const fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// What is left.
    pub(crate) const fn rest(&self) -> &'a [u8] {
        self.rest
    }

    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.rest.split_first() else {
            return 0;
        };
        self.rest = rest;
        *first
    }

    pub(crate) fn u64(&mut self) -> u64 {
        (0..8).fold(0, |value, _| value << 8 | u64::from(self.byte()))
    }

    pub(crate) fn u32(&mut self) -> u32 {
        (0..4).fold(0, |value, _| value << 8 | u32::from(self.byte()))
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from(self.byte()) << 8 | u16::from(self.byte())
    }

    /// A number below `bound`, which is at least 1; small bounds take one byte.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        let number = if bound <= 256 {
            usize::from(self.byte())
        } else {
            self.u32() as usize
        };
        number % bound
    }

    /// True once in `times`; false when the bytes have run out.
    pub(crate) fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == times - 1
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// A number that breaks arithmetic if any does, or any number.
    pub(crate) fn odd_u64(&mut self) -> u64 {
        const ODD: [u64; 8] = [0, 1, 2, 255, 65_535, u32::MAX as u64, u64::MAX - 1, u64::MAX];
        match self.below(3) {
            0 => u64::from(self.byte()),
            1 => self.pick(&ODD),
            _ => self.u64(),
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "any number will do")]
    pub(crate) fn odd_u32(&mut self) -> u32 {
        self.odd_u64() as u32
    }

    #[expect(clippy::cast_possible_truncation, reason = "any number will do")]
    pub(crate) fn odd_u16(&mut self) -> u16 {
        self.odd_u64() as u16
    }

    /// So many bytes, fewer where they run out.
    pub(crate) fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.rest.split_at(count.min(self.rest.len()));
        self.rest = rest;
        taken
    }

    /// The ends of pieces into which `length` bytes are split, the last being `length`; some are empty.
    pub(crate) fn splits(&mut self, length: usize) -> Vec<usize> {
        let mut ends: Vec<usize> = (0..self.below(9)).map(|_| self.below(length + 1)).collect();
        ends.sort_unstable();
        ends.push(length);
        ends
    }
}

/// How often each outcome was reached.
#[derive(Debug, Default)]
pub(crate) struct Seen(BTreeMap<&'static str, u64>);

impl Seen {
    pub(crate) fn note(&mut self, outcome: &'static str) {
        *self.0.entry(outcome).or_default() += 1;
    }

    pub(crate) fn note_if(&mut self, outcome: &'static str, is_reached: bool) {
        if is_reached {
            self.note(outcome);
        }
    }

    #[allow(
        dead_code,
        reason = "only the normal run asks; a fuzzer measures coverage itself"
    )]
    pub(crate) fn count(&self, outcome: &str) -> u64 {
        self.0.get(outcome).copied().unwrap_or(0)
    }
}

/// Bytes for a failure's report, cut where they are many; they are always generated ones.
pub(crate) fn shown(bytes: &[u8]) -> String {
    let head = &bytes[..bytes.len().min(MAX_SHOWN_BYTES)];
    format!("{} bytes: {}", bytes.len(), head.escape_ascii())
}

const MAX_SHOWN_BYTES: usize = 4096;
