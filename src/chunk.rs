//! Prompt segments → chained keys.
//!
//! In: the rendered messages of one prompt as byte pieces, with the places where a message ends. Out: [`ChainPoint`]s,
//! and with a namespace the [`PrefixKeys`] of the prompt. Equal prompt heads give equal points, and a prompt that is
//! continued keeps every point it had. It must never allocate more than the list of points, which is bounded.
//!
//! The scheme is a wire format between gateways and is versioned ([`SCHEME_VERSION`]); `tests/vectors/README.md` states
//! it in full beside the golden vectors. In short: the rendered bytes are cut at fixed offsets (every 256 bytes up to
//! 4 KiB, every KiB up to 32 KiB, every 4 KiB beyond) and after each of the first 256 messages. Every piece is hashed
//! together with the hash before it: `murmur3_x64_128(previous as u64 LE || piece, seed = SCHEME_VERSION)`, low 64 bits, or
//! SipHash-2-4 of the same bytes where the operator has a secret ([`HashKey`]).

mod keyed;
pub mod murmur;
pub mod siphash;

pub use keyed::HashKey;
pub(crate) use keyed::KeyedHash;
use murmur::Murmur;

/// Version of framing, spacing and hash; it seeds every hash, so keys of different versions never meet.
pub const SCHEME_VERSION: u32 = 1;

/// The chained hash of the prompt up to some point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkHash(pub u64);

/// One point of the chain: `hash` covers the first `end_bytes` bytes of the rendered messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChainPoint {
    /// Chained hash of everything up to `end_bytes`, before the namespace is mixed in.
    pub hash: ChunkHash,
    /// Bytes of message text (framing not counted) that the hash covers.
    pub end_bytes: u32,
}

/// The keys of one prompt, shallow to deep: `keys[i]` is `mix(namespace, chain[i])` and covers `end_bytes` of the
/// prompt, the namespace's own bytes (tools, system) included.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PrefixKeys {
    /// Keys in growing depth.
    pub keys: Vec<PrefixKey>,
    /// Bytes of the whole prompt as rendered for hashing, also beyond the last key.
    pub prompt_bytes: u32,
}

impl PrefixKeys {
    /// Mixes a namespace into a chain.
    ///
    /// `namespace_bytes` is the length of the prompt text inside the namespace (tools, system). Where there is some, the
    /// first key covers that text alone, so that requests with the same tools and system meet before their messages
    /// part. `chain_bytes` is the length of all messages.
    pub fn new(namespace: u64, namespace_bytes: u32, chain: &[ChainPoint], chain_bytes: u32) -> Self {
        let mut keys = Vec::with_capacity(chain.len().saturating_add(1));
        if namespace_bytes > 0 {
            keys.push(PrefixKey {
                hash: ChunkHash(mix(namespace, CHAIN_ROOT)),
                end_bytes: namespace_bytes,
            });
        }
        keys.extend(chain.iter().map(|point| PrefixKey {
            hash: ChunkHash(mix(namespace, point.hash.0)),
            end_bytes: namespace_bytes.saturating_add(point.end_bytes),
        }));
        Self {
            keys,
            prompt_bytes: namespace_bytes.saturating_add(chain_bytes),
        }
    }

    /// The one key of a request that is known by its session alone; it is taken to cover the whole prompt.
    pub fn of_session(session: u64, prompt_bytes: u32) -> Self {
        Self {
            keys: vec![PrefixKey {
                hash: ChunkHash(session),
                end_bytes: prompt_bytes,
            }],
            prompt_bytes,
        }
    }

    /// The deepest key.
    pub fn deepest(&self) -> Option<PrefixKey> {
        self.keys.last().copied()
    }
}

/// A key and the prompt bytes that it covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixKey {
    /// The key.
    pub hash: ChunkHash,
    /// Prompt bytes covered.
    pub end_bytes: u32,
}

/// Cuts rendered bytes into pieces and chains their hashes.
#[derive(Debug, Clone)]
pub struct Chain {
    points: Vec<ChainPoint>,
    key: HashKey,
    piece: KeyedHash,
    piece_is_empty: bool,
    /// Bytes left until the next fixed offset.
    left_bytes: u32,
    /// Offset of the last fixed offset passed, framing counted.
    offset_bytes: u32,
    max_prefix_bytes: u32,
    text_bytes: u32,
    spaced_points: usize,
    message_ends: usize,
    done: bool,
}

impl Chain {
    /// An empty chain that stops at `max_prefix_bytes` of rendered bytes.
    pub fn new(max_prefix_bytes: u32, key: HashKey) -> Self {
        let first = spacing_bytes(0);
        Self {
            points: Vec::new(),
            key,
            piece: start_piece(key, CHAIN_ROOT),
            piece_is_empty: true,
            left_bytes: first,
            offset_bytes: 0,
            max_prefix_bytes,
            text_bytes: 0,
            spaced_points: 0,
            message_ends: 0,
            done: first > max_prefix_bytes,
        }
    }

    /// Appends framing, which no length counts.
    pub fn frame(&mut self, bytes: &[u8]) {
        self.append(bytes, 0);
    }

    /// Appends prompt text.
    pub fn text(&mut self, bytes: &[u8]) {
        self.append(bytes, 1);
    }

    /// Counts prompt text that is not hashed.
    pub fn skip(&mut self, len_bytes: u32) {
        self.text_bytes = self.text_bytes.saturating_add(len_bytes);
    }

    /// Ends a message: a point of its own, for as many messages as the bound allows.
    pub fn message_end(&mut self) {
        if self.done || self.piece_is_empty || self.message_ends >= MAX_MESSAGE_ENDS {
            return;
        }
        self.message_ends += 1;
        self.close_piece();
    }

    /// Text appended so far, also beyond the last point.
    pub const fn text_bytes(&self) -> u32 {
        self.text_bytes
    }

    /// The points in growing depth.
    pub fn into_points(self) -> Vec<ChainPoint> {
        self.points
    }

    fn append(&mut self, bytes: &[u8], text: u32) {
        let mut rest = bytes;
        while !self.done && !rest.is_empty() {
            let Some((piece, after)) = rest.split_at_checked(self.left_bytes as usize) else {
                self.piece.update(rest);
                self.piece_is_empty = false;
                let len_bytes = len_u32(rest.len());
                self.left_bytes -= len_bytes;
                self.text_bytes = self.text_bytes.saturating_add(len_bytes * text);
                return;
            };
            self.piece.update(piece);
            self.piece_is_empty = false;
            self.text_bytes = self
                .text_bytes
                .saturating_add(self.left_bytes.saturating_mul(text));
            self.pass_offset();
            rest = after;
        }
        self.text_bytes = self
            .text_bytes
            .saturating_add(len_u32(rest.len()).saturating_mul(text));
    }

    fn pass_offset(&mut self) {
        self.offset_bytes = self.offset_bytes.saturating_add(self.spacing());
        self.spaced_points += 1;
        self.close_piece();
        self.left_bytes = self.spacing();
        self.done = self.spaced_points >= MAX_SPACED_POINTS
            || self.offset_bytes.saturating_add(self.left_bytes) > self.max_prefix_bytes;
    }

    fn close_piece(&mut self) {
        let hash = self.piece.finish();
        self.points.push(ChainPoint {
            hash: ChunkHash(hash),
            end_bytes: self.text_bytes,
        });
        self.piece = start_piece(self.key, hash);
        self.piece_is_empty = true;
    }

    const fn spacing(&self) -> u32 {
        spacing_bytes(self.offset_bytes)
    }
}

/// Distance from a fixed offset to the next: about 64 tokens where most prompts part, a thousand where few do.
const fn spacing_bytes(offset_bytes: u32) -> u32 {
    if offset_bytes < 4096 {
        256
    } else if offset_bytes < 32_768 {
        1024
    } else {
        4096
    }
}

fn start_piece(key: HashKey, previous: u64) -> KeyedHash {
    let mut piece = key.start();
    piece.update(&previous.to_le_bytes());
    piece
}

/// Copies into a block, of which so many bytes are taken, as much as fits, and returns the rest.
fn fill<'a, const BLOCK_BYTES: usize>(
    block: &mut [u8; BLOCK_BYTES],
    taken_bytes: &mut usize,
    bytes: &'a [u8],
) -> &'a [u8] {
    let Some(room) = block.get_mut(*taken_bytes..) else {
        return bytes;
    };
    let fitting = room.len().min(bytes.len());
    for (to, from) in room.iter_mut().zip(bytes) {
        *to = *from;
    }
    *taken_bytes += fitting;
    bytes.get(fitting..).unwrap_or_default()
}

/// Hash of a pair of hashes, order kept. Not keyed: under a secret what it is given is.
pub fn mix(first: u64, second: u64) -> u64 {
    let mut pair = Murmur::new(SCHEME_VERSION);
    pair.update(&first.to_le_bytes());
    pair.update(&second.to_le_bytes());
    pair.low64()
}

/// Hash of a name (model, adapter), for comparing names without keeping them.
pub fn name_hash(name: &[u8]) -> u64 {
    let mut hash = Murmur::new(SCHEME_VERSION);
    hash.update(name);
    hash.low64()
}

/// A length as 32 bits; more than 4 GiB is never held.
pub(crate) fn len_u32(len_bytes: usize) -> u32 {
    u32::try_from(len_bytes).unwrap_or(u32::MAX)
}

/// The hash of no messages at all.
const CHAIN_ROOT: u64 = 0;
/// Reaches 1.5 MiB; the default `max_prefix_bytes` of 512 KiB uses 164.
const MAX_SPACED_POINTS: usize = 512;
/// Conversations are continued at message ends; beyond this many only the fixed offsets count.
const MAX_MESSAGE_ENDS: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: u32 = 512 * 1024;

    fn points(pieces: &[&[u8]]) -> Vec<ChainPoint> {
        let mut chain = Chain::new(MAX, HashKey::OPEN);
        for piece in pieces {
            chain.text(piece);
        }
        chain.into_points()
    }

    fn text(len: usize) -> Vec<u8> {
        (0..len).map(|i| b'a' + u8::try_from(i % 23).unwrap()).collect()
    }

    #[test]
    fn piece_sizes_do_not_matter() {
        let data = text(70_000);
        let whole = points(&[&data]);
        for size in [1, 7, 255, 256, 257, 5000] {
            let pieces: Vec<&[u8]> = data.chunks(size).collect();
            assert_eq!(points(&pieces), whole, "pieces of {size}");
        }
    }

    #[test]
    fn spacing_grows_with_depth() {
        let ends: Vec<u32> = points(&[&text(50_000)])
            .iter()
            .map(|point| point.end_bytes)
            .collect();
        assert_eq!(ends[..3], [256, 512, 768]);
        assert_eq!(ends[15..18], [4096, 5120, 6144]);
        assert_eq!(ends[43..], [32_768, 36_864, 40_960, 45_056, 49_152]);
    }

    #[test]
    fn a_longer_prompt_keeps_every_point() {
        let data = text(40_000);
        let long = points(&[&data]);
        for len in [0, 1, 255, 256, 300, 4096, 33_000] {
            let short = points(&[&data[..len]]);
            assert_eq!(short[..], long[..short.len()], "length {len}");
        }
    }

    #[test]
    fn a_message_end_is_a_point_and_shifts_no_fixed_offset() {
        let mut chain = Chain::new(MAX, HashKey::OPEN);
        chain.text(&text(100));
        chain.message_end();
        chain.text(&text(400));
        chain.message_end();
        let ends: Vec<u32> = chain.into_points().iter().map(|point| point.end_bytes).collect();
        assert_eq!(ends, [100, 256, 500]);
    }

    #[test]
    fn points_are_bounded() {
        let mut chain = Chain::new(u32::MAX, HashKey::OPEN);
        let data = text(64 * 1024);
        for _ in 0..64 {
            chain.text(&data);
        }
        assert_eq!(chain.into_points().len(), MAX_SPACED_POINTS);

        let mut chain = Chain::new(MAX, HashKey::OPEN);
        for _ in 0..1000 {
            chain.text(b"x");
            chain.message_end();
        }
        assert_eq!(chain.text_bytes(), 1000);
        // The message that ends at 256 needs no point beside the fixed one; 512 and 768 fall between message ends.
        assert_eq!(chain.into_points().len(), MAX_MESSAGE_ENDS + 3);
    }

    #[test]
    fn hashing_stops_at_the_prefix_bound_and_counting_does_not() {
        let mut chain = Chain::new(1000, HashKey::OPEN);
        chain.text(&text(5000));
        chain.message_end();
        assert_eq!(chain.text_bytes(), 5000);
        assert_eq!(chain.into_points().last().map(|point| point.end_bytes), Some(768));
    }

    #[test]
    fn namespace_text_gets_a_key_of_its_own() {
        let chain = points(&[&text(300)]);
        let keys = PrefixKeys::new(7, 1000, &chain, 300);
        let ends: Vec<u32> = keys.keys.iter().map(|key| key.end_bytes).collect();
        assert_eq!(ends, [1000, 1256]);
        assert_eq!(keys.prompt_bytes, 1300);
        assert_eq!(PrefixKeys::new(7, 0, &chain, 300).keys.len(), 1);
        assert_ne!(
            PrefixKeys::new(8, 0, &chain, 300).keys,
            PrefixKeys::new(7, 0, &chain, 300).keys
        );
    }
}
