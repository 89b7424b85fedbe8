//! Bytes → the hash of the scheme: murmur, or SipHash where the operator has a secret.
//!
//! In: a [`HashKey`], then byte slices. Out: 64 bits. Murmur has collisions that hold under every seed and prefix, made in
//! microseconds, so a secret that is only mixed in would not prevent them; as the key of SipHash it does.

use super::SCHEME_VERSION;
use super::murmur::Murmur;
use super::siphash::SipHash;

/// What text is hashed with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HashKey(Option<[u64; 2]>);

impl HashKey {
    /// Murmur: anyone can compute the hashes.
    pub const OPEN: Self = Self(None);

    /// SipHash under a key derived from the secret; without a secret, murmur.
    #[must_use]
    pub fn of_secret(secret: &[u8]) -> Self {
        if secret.is_empty() {
            return Self::OPEN;
        }
        let half = |number| {
            let mut hash = SipHash::new([u64::from(SCHEME_VERSION), number]);
            hash.update(secret);
            hash.finish()
        };
        Self(Some([half(0), half(1)]))
    }

    /// Starts a hash.
    pub(crate) fn start(self) -> KeyedHash {
        match self.0 {
            None => KeyedHash::Open(Murmur::new(SCHEME_VERSION)),
            Some(key) => KeyedHash::Keyed(SipHash::new(key)),
        }
    }
}

/// The running state of one hash.
#[derive(Debug, Clone, Copy)]
pub(crate) enum KeyedHash {
    /// No secret.
    Open(Murmur),
    /// Under a secret.
    Keyed(SipHash),
}

impl KeyedHash {
    /// Appends `bytes` to what is hashed.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Open(hash) => hash.update(bytes),
            Self::Keyed(hash) => hash.update(bytes),
        }
    }

    /// The hash of everything appended so far.
    pub(crate) fn finish(self) -> u64 {
        match self {
            Self::Open(hash) => hash.low64(),
            Self::Keyed(hash) => hash.finish(),
        }
    }
}
