//! Prompt segments → chained keys.

/// Low 64 bits of a chained murmur3_x64_128 over the prompt up to some point.
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

/// The keys of one prompt, shallow to deep: `keys[i]` = mix(namespace, chain[i]) and covers `end_bytes` of the
/// prompt, the namespace's own bytes (tools, system) included.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PrefixKeys {
    /// Keys in growing depth.
    pub keys: Vec<PrefixKey>,
    /// Bytes of the whole prompt as rendered for hashing, also beyond the last key.
    pub prompt_bytes: u32,
}

/// A key and the prompt bytes that it covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixKey {
    /// The key.
    pub hash: ChunkHash,
    /// Prompt bytes covered.
    pub end_bytes: u32,
}
