//! A rendered prompt → token count and block names.
//!
//! Prompts are untrusted: any bytes give a value, in memory proportional to them.

use std::sync::Arc;

/// Tokens in a block, as in vLLM's default on GPUs.
pub const BLOCK_TOKENS: usize = 16;
/// Bytes that count as one token: about what English text takes in common vocabularies.
pub const TOKEN_BYTES: usize = 4;

/// A prompt as the engine sees it: tokens, and a name for each full block of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// `blocks[i]` names block `i` together with everything before it: equal names, equal prefixes.
    pub(super) blocks: Arc<[u64]>,
    pub(super) tokens: usize,
}

impl Prompt {
    /// Cuts a rendered prompt into tokens of [`TOKEN_BYTES`] and blocks of [`BLOCK_TOKENS`].
    pub fn new(rendered: &[u8]) -> Self {
        Self::from_text(rendered, &[], BLOCK_TOKENS)
    }

    /// Cuts a rendered prompt into blocks of `block_tokens`; prompts with different salts share none.
    pub fn from_text(rendered: &[u8], salt: &[u8], block_tokens: usize) -> Self {
        let blocks = rendered.chunks_exact(block_tokens.max(1) * TOKEN_BYTES);
        Self {
            blocks: block_names(salt, blocks),
            tokens: rendered.len().div_ceil(TOKEN_BYTES).max(1),
        }
    }

    /// Takes a prompt whose tokens are known, in blocks of `block_tokens`.
    pub fn from_token_ids(token_ids: &[u32], block_tokens: usize) -> Self {
        let bytes: Vec<u8> = token_ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        Self {
            blocks: block_names(&[], bytes.chunks_exact(block_tokens.max(1) * size_of::<u32>())),
            tokens: token_ids.len().max(1),
        }
    }

    /// Takes names of full blocks as they are: name `i` must stand for block `i` and everything before it. Names beyond
    /// the full blocks of that many tokens are never looked at.
    pub fn from_blocks(blocks: impl Into<Arc<[u64]>>, tokens: usize) -> Self {
        Self {
            blocks: blocks.into(),
            tokens: tokens.max(1),
        }
    }

    /// Tokens, a last partial one counted.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Names of the full blocks, head first.
    pub fn blocks(&self) -> &[u64] {
        &self.blocks
    }
}

/// Chained hashes: name `i` covers the salt and the blocks `0..=i`.
fn block_names<'a>(salt: &[u8], blocks: impl Iterator<Item = &'a [u8]>) -> Arc<[u64]> {
    let mut chain = extend(FNV_OFFSET, salt);
    blocks
        .map(|block| {
            chain = extend(chain, block);
            chain
        })
        .collect()
}

fn extend(chain: u64, bytes: &[u8]) -> u64 {
    let over_bytes = bytes.iter().fold(chain, |chain, byte| {
        (chain ^ u64::from(*byte)).wrapping_mul(FNV_PRIME)
    });
    // A round over the length keeps a block of zeros from being a fixed point of the chain.
    (over_bytes ^ bytes.len() as u64).wrapping_mul(FNV_PRIME)
}

/// FNV-1a, 64 bits: <http://www.isthe.com/chongo/tech/comp/fnv/>.
const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0000_0100_0000_01b3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cover_full_blocks_only_and_chain() {
        let a = Prompt::new(&[b'x'; 64 * 3 + 63]);
        assert_eq!((a.blocks().len(), a.tokens()), (3, 64));
        assert_ne!(a.blocks()[0], a.blocks()[1]);
        let mut other = [b'x'; 64 * 3];
        other[0] = b'y';
        let b = Prompt::new(&other);
        assert!(
            a.blocks().iter().zip(b.blocks()).all(|(x, y)| x != y),
            "a change in the head changes every block behind it"
        );
    }

    #[test]
    fn token_ids_are_cut_by_the_block_size_asked_for() {
        let ids: Vec<u32> = (0..100).collect();
        let prompt = Prompt::from_token_ids(&ids, 32);
        assert_eq!((prompt.blocks().len(), prompt.tokens()), (3, 100));
        assert_eq!(
            prompt.blocks()[..2],
            Prompt::from_token_ids(&ids[..64], 32).blocks()[..]
        );
    }

    #[test]
    fn a_salt_changes_every_name() {
        let names = |salt: &str| Prompt::from_text(&[b'x'; 300], salt.as_bytes(), 16).blocks;
        assert_eq!(names("a"), names("a"));
        assert!(names("a").iter().zip(&*names("b")).all(|(a, b)| a != b));
    }

    #[test]
    fn an_empty_prompt_is_one_token() {
        assert_eq!(Prompt::new(b"").tokens(), 1);
        assert_eq!(Prompt::from_blocks([], 0).tokens(), 1);
    }
}
