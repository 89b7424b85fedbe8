//! Sealed byte blobs for Envoy's shared data: a payload with magic, version, length and checksum around it.
//!
//! In: a payload and its kind, or bytes somebody else wrote. Out: sealed bytes, or the payload of intact ones. The bytes
//! are untrusted (shared data is one namespace for all plugins of a process): no panic, and nothing is allocated here
//! beyond the blob itself.
//!
//! Layout, little endian: magic (4 bytes), version (u16), payload length (u32), checksum of the payload (u64, the low
//! half of murmur3_x64_128, seeded with the version), payload. Nothing follows it.

use std::fmt;

use crate::chunk::murmur::Murmur;

/// Why bytes are not an intact blob of the expected kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlobError {
    /// The bytes end before the header or the stated length does.
    Truncated,
    /// The first four bytes belong to something else.
    WrongMagic,
    /// The stated payload length is not the number of bytes that follow.
    WrongLength,
    /// Some byte of the version or the payload changed.
    WrongChecksum,
}

impl fmt::Display for BlobError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Truncated => "blob is truncated",
            Self::WrongMagic => "blob has the wrong magic",
            Self::WrongLength => "blob length does not match its header",
            Self::WrongChecksum => "blob checksum does not match",
        })
    }
}

impl std::error::Error for BlobError {}

/// Writes one payload; the header is filled in by [`BlobWriter::seal`].
pub(crate) struct BlobWriter {
    version: u16,
    bytes: Vec<u8>,
}

impl BlobWriter {
    /// Starts a blob of the given kind with room for `payload_bytes`.
    pub(crate) fn new(magic: [u8; 4], version: u16, payload_bytes: usize) -> Self {
        let mut bytes = Vec::with_capacity(HEADER_BYTES.saturating_add(payload_bytes));
        bytes.extend_from_slice(&magic);
        bytes.extend_from_slice(&version.to_le_bytes());
        bytes.extend_from_slice(&[0; LENGTH_BYTES + CHECKSUM_BYTES]);
        Self { version, bytes }
    }

    pub(crate) fn put_u8(&mut self, value: u8) {
        self.bytes.push(value);
    }

    pub(crate) fn put_u16(&mut self, value: u16) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn put_u32(&mut self, value: u32) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn put_u64(&mut self, value: u64) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn put_bytes(&mut self, value: &[u8]) {
        self.bytes.extend_from_slice(value);
    }

    /// Fills in length and checksum and gives the finished blob.
    pub(crate) fn seal(mut self) -> Vec<u8> {
        let (length, sum) = match self.bytes.get(HEADER_BYTES..) {
            Some(payload) => (
                u32::try_from(payload.len()).unwrap_or(u32::MAX),
                checksum(self.version, payload),
            ),
            None => (0, 0),
        };
        if let Some(slot) = self.bytes.get_mut(LENGTH_AT..CHECKSUM_AT) {
            slot.copy_from_slice(&length.to_le_bytes());
        }
        if let Some(slot) = self.bytes.get_mut(CHECKSUM_AT..HEADER_BYTES) {
            slot.copy_from_slice(&sum.to_le_bytes());
        }
        self.bytes
    }
}

/// Reads a payload front to back; every read past its end is [`BlobError::Truncated`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlobReader<'a> {
    rest: &'a [u8],
}

impl<'a> BlobReader<'a> {
    /// Checks magic, length and checksum; gives the version and a reader at the start of the payload.
    pub(crate) fn open(magic: [u8; 4], bytes: &'a [u8]) -> Result<(u16, Self), BlobError> {
        let mut header = BlobReader { rest: bytes };
        if header.take(magic.len())? != magic {
            return Err(BlobError::WrongMagic);
        }
        let version = header.u16()?;
        let length = header.u32()?;
        let sum = header.u64()?;
        let payload = header.rest;
        if u32::try_from(payload.len()) != Ok(length) {
            let cut = (payload.len() as u64) < u64::from(length);
            return Err(if cut {
                BlobError::Truncated
            } else {
                BlobError::WrongLength
            });
        }
        if checksum(version, payload) != sum {
            return Err(BlobError::WrongChecksum);
        }
        Ok((version, header))
    }

    pub(crate) fn take(&mut self, length: usize) -> Result<&'a [u8], BlobError> {
        let (head, tail) = self.rest.split_at_checked(length).ok_or(BlobError::Truncated)?;
        self.rest = tail;
        Ok(head)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, BlobError> {
        self.array().map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, BlobError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, BlobError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, BlobError> {
        self.array().map(u64::from_le_bytes)
    }

    /// Splits off a reader over the next `length` bytes.
    pub(crate) fn section(&mut self, length: usize) -> Result<BlobReader<'a>, BlobError> {
        self.take(length).map(|rest| BlobReader { rest })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], BlobError> {
        let (head, tail) = self.rest.split_first_chunk::<N>().ok_or(BlobError::Truncated)?;
        self.rest = tail;
        Ok(*head)
    }
}

/// True when a heartbeat says that its writer stopped: it is older than `ttl_ms`, or further ahead of `now_ms` than
/// that. A clock that jumped back would otherwise keep a dead writer alive for as long as the jump.
pub(crate) fn heartbeat_is_stale(heartbeat_ms: u64, now_ms: u64, ttl_ms: u64) -> bool {
    now_ms.abs_diff(heartbeat_ms) > ttl_ms
}

fn checksum(version: u16, payload: &[u8]) -> u64 {
    let mut hash = Murmur::new(u32::from(version));
    hash.update(payload);
    hash.low64()
}

const LENGTH_AT: usize = 6;
const LENGTH_BYTES: usize = 4;
const CHECKSUM_AT: usize = LENGTH_AT + LENGTH_BYTES;
const CHECKSUM_BYTES: usize = 8;
const HEADER_BYTES: usize = CHECKSUM_AT + CHECKSUM_BYTES;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Checks of damage that hold for every blob format: `refuses` says whether the format's decoder refuses bytes.
    pub(crate) fn assert_damage_is_refused(intact: &[u8], refuses: impl Fn(&[u8]) -> bool) {
        assert!(!refuses(intact), "the intact blob must be read");
        for cut in 0..intact.len() {
            assert!(refuses(&intact[..cut]), "cut at byte {cut} of {}", intact.len());
        }
        let mut longer = intact.to_vec();
        longer.push(0);
        assert!(refuses(&longer), "one byte more than the header says");
        let mut damaged = intact.to_vec();
        for bit in 0..intact.len() * 8 {
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(refuses(&damaged), "bit {bit} flipped");
            damaged[bit / 8] ^= 1 << (bit % 8);
        }
    }

    /// `bytes` as another version would have sealed them.
    pub(crate) fn with_version(bytes: &[u8], version: u16) -> Vec<u8> {
        let mut other = bytes.to_vec();
        other[4..6].copy_from_slice(&version.to_le_bytes());
        let sum = checksum(version, &other[HEADER_BYTES..]);
        other[CHECKSUM_AT..HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
        other
    }

    /// A seeded generator for random cases; the seed comes from `WARMROUTE_SEED` or is `default`.
    pub(crate) struct Random(u64);

    impl Random {
        pub(crate) fn seeded(default: u64) -> Self {
            let seed = std::env::var("WARMROUTE_SEED")
                .ok()
                .and_then(|text| text.parse().ok())
                .unwrap_or(default);
            println!("WARMROUTE_SEED={seed}");
            Self(seed)
        }

        /// The next number (splitmix64).
        pub(crate) fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        }

        /// A number below `bound`.
        pub(crate) fn below(&mut self, bound: u64) -> u64 {
            self.next() % bound
        }
    }

    #[test]
    fn empty_payload_round_trips() {
        let bytes = BlobWriter::new(*b"TEST", 7, 0).seal();
        let (version, reader) = BlobReader::open(*b"TEST", &bytes).unwrap();
        assert_eq!(version, 7);
        assert!(reader.is_empty());
    }

    #[test]
    fn each_kind_of_damage_has_its_own_error() {
        let mut writer = BlobWriter::new(*b"TEST", 1, 4);
        writer.put_u32(5);
        let bytes = writer.seal();
        let open = |bytes: &[u8]| BlobReader::open(*b"TEST", bytes).map(|_| ()).unwrap_err();
        assert_eq!(open(&bytes[..10]), BlobError::Truncated);
        assert_eq!(open(&bytes[..bytes.len() - 1]), BlobError::Truncated);
        assert_eq!(open(b"JUNK and more bytes than a header"), BlobError::WrongMagic);
        let mut longer = bytes.clone();
        longer.push(0);
        assert_eq!(open(&longer), BlobError::WrongLength);
        let mut damaged = bytes;
        *damaged.last_mut().unwrap() ^= 1;
        assert_eq!(open(&damaged), BlobError::WrongChecksum);
    }

    #[test]
    fn heartbeats_from_the_past_and_the_future_are_stale() {
        assert!(!heartbeat_is_stale(1_000, 4_000, 3_000));
        assert!(heartbeat_is_stale(1_000, 4_001, 3_000));
        assert!(!heartbeat_is_stale(4_000, 1_000, 3_000));
        assert!(heartbeat_is_stale(4_001, 1_000, 3_000));
        assert!(heartbeat_is_stale(u64::MAX, 0, 3_000));
    }
}
