//! What an answer tells of its own prompt → bytes per token, cache sizes, and entries that proved false.
//!
//! In: what a decision expected of the chosen host, and the engine's own count. Out: a better mean of bytes per token, a
//! host's cache size corrected, and the index of every worker rid of what is not there. It must learn nothing of a host
//! from an answer that another host gave, nor of tokens from a prompt that was not read whole.

use super::{Keyed, Pool};
use crate::chunk::PrefixKey;
use crate::decision::Decision;
use crate::host_table::Slot;
use crate::index::PrefixIndex;
use crate::journal::{Placement, PlacementKind};
use crate::usage::Usage;

/// What a decision expected of the host that it chose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expectation {
    /// The host and its epoch; `None` where none was chosen, or where nobody follows the choice.
    host: Option<(Slot, u32)>,
    /// Bytes of the prompt, and whether that is all of it.
    prompt_bytes: u32,
    is_whole: bool,
    /// Bytes of it believed to be cached.
    matched_bytes: u32,
    /// The keys that the workers tell each other of.
    anchors: Vec<PrefixKey>,
}

impl Pool {
    /// The engine's own count for a request that `served` answered; true when it was a false hit: much less was cached
    /// than predicted.
    pub fn answered(
        &mut self,
        expected: &Expectation,
        usage: Usage,
        served: Option<Slot>,
        now_ms: u64,
    ) -> bool {
        if expected.is_whole {
            self.bytes_per_token
                .learn(expected.prompt_bytes, usage.prompt_tokens);
        }
        let (Some(cached_tokens), Some((slot, epoch))) = (usage.cached_tokens, expected.host) else {
            return false;
        };
        if served != Some(slot) {
            return false;
        }
        let predicted_tokens = self.tokens_in(expected.matched_bytes, expected, usage);
        let verdict = self
            .index
            .answered(slot, epoch, predicted_tokens, cached_tokens, usage.prompt_tokens);
        if !verdict.is_false && !verdict.in_doubt {
            return false;
        }
        let not_cached = |key: &&PrefixKey| self.tokens_in(key.end_bytes, expected, usage) > cached_tokens;
        let is_false = |key: &&PrefixKey| verdict.in_doubt || key.end_bytes <= expected.matched_bytes;
        let anchors = expected.anchors.iter().filter(not_cached).filter(is_false);
        let mut placement = Placement {
            kind: PlacementKind::Withdrawn,
            slot,
            epoch,
            keys: anchors.map(|key| key.hash.0).collect(),
            ..Placement::default()
        };
        if verdict.is_false && !verdict.in_doubt {
            self.enter(placement.clone(), now_ms);
            // The host has computed it since, and its cache turned over by so much more than was taken for granted.
            placement.kind = PlacementKind::Placed;
            placement.uncached_tokens = predicted_tokens.saturating_sub(cached_tokens);
        }
        self.enter(placement, now_ms);
        verdict.is_false
    }

    /// Thousandths of a byte that a token has, as learned so far.
    #[must_use]
    pub fn millibytes_per_token(&self) -> u32 {
        self.bytes_per_token.millibytes()
    }

    /// What an answer to this request can be compared with, if it is going to be read.
    pub(super) fn expectation(&self, keyed: &Keyed, decision: &Decision) -> Option<Box<Expectation>> {
        let is_read = self.config.usage_feedback.reads(keyed.is_streaming);
        if !is_read || keyed.keys.keys.is_empty() {
            return None;
        }
        let slot = decision.hosts.first().filter(|_| !self.config.dry_run);
        Some(Box::new(Expectation {
            host: slot.and_then(|slot| Some((slot, self.index.epoch_of(slot)?))),
            prompt_bytes: decision.prompt_bytes,
            is_whole: keyed.is_whole,
            matched_bytes: decision.matched_bytes,
            anchors: PrefixIndex::anchors(&keyed.keys),
        }))
    }

    /// Tokens in the first `bytes` of an answered prompt: by its own count where all of it was read, else by the mean.
    fn tokens_in(&self, bytes: u32, expected: &Expectation, usage: Usage) -> u32 {
        let (bytes, all_tokens) = (u64::from(bytes), u64::from(usage.prompt_tokens));
        let tokens = if expected.is_whole {
            bytes
                .saturating_mul(all_tokens)
                .checked_div(expected.prompt_bytes.into())
        } else {
            bytes
                .saturating_mul(1000)
                .checked_div(self.millibytes_per_token().into())
        };
        u32::try_from(tokens.unwrap_or(0).min(all_tokens)).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::host_table::{Host, HostTable};
    use crate::pool::{DecisionInput, Outcome};
    use crate::prompt::{Api, BodyEnd};

    const NOW_MS: u64 = 1_790_000_000_000;
    const PATH: &str = "/v1/chat/completions";

    fn pool_with(worker: u64, settings: &str) -> Pool {
        let config = format!(
            r#"{{"strategy": "cache_aware", {settings} "pools": {{"llm": {{"discovery": {{"admin_cluster": "a"}}}}}}}}"#
        );
        let config = Config::parse(config.as_bytes()).unwrap();
        let mut pool = Pool::new(config.pools[0].clone(), worker);
        let host = |slot: u16| Host {
            slot: Slot(slot),
            epoch: 1,
            address: format!("10.0.0.{slot}:8000"),
            weight: 1,
            ..Host::default()
        };
        let table = HostTable {
            published_ms: NOW_MS,
            hosts: (0..4).map(host).collect(),
        };
        pool.apply_table(&table.encode(), NOW_MS).unwrap();
        pool
    }

    fn pool(worker: u64) -> Pool {
        pool_with(worker, "")
    }

    fn body(text: &str, rest: &str) -> String {
        format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{text}"}}]{rest}}}"#)
    }

    fn input(body: &str) -> DecisionInput<'_> {
        DecisionInput {
            api: Api::from_path(PATH).unwrap(),
            path: PATH,
            body: Some((body.as_bytes(), BodyEnd::EndOfStream)),
            content_length: None,
            tenant: None,
            session: None,
        }
    }

    fn ask_text(pool: &mut Pool, text: &str, rest: &str) -> Outcome {
        pool.decide(&input(&body(text, rest)), NOW_MS)
    }

    /// 20 000 bytes.
    fn text_of(id: u32) -> String {
        format!("prompt {id:013}").repeat(1000)
    }

    fn ask(pool: &mut Pool, id: u32) -> Outcome {
        ask_text(pool, &text_of(id), "")
    }

    /// Bytes of a prompt that a host is believed to hold.
    fn held(pool: &mut Pool, id: u32, slot: Slot) -> u32 {
        let text = text_of(id);
        let keys = pool.keys_of(&input(&body(&text, ""))).keys;
        pool.index.lookup(&keys, NOW_MS).bytes_at(slot)
    }

    fn host_of(outcome: &Outcome) -> Slot {
        outcome.decision.hosts.first().unwrap()
    }

    fn usage(prompt_tokens: u32, cached_tokens: u32) -> Usage {
        Usage {
            prompt_tokens,
            cached_tokens: Some(cached_tokens),
        }
    }

    /// The chosen host answers that so many of 5000 tokens were cached.
    fn answer(pool: &mut Pool, outcome: &Outcome, cached_tokens: u32) -> bool {
        let served = Some(host_of(outcome));
        let expected = outcome.expectation.as_ref().unwrap();
        pool.answered(expected, usage(5000, cached_tokens), served, NOW_MS)
    }

    fn tell(from: &mut Pool, to: &mut Pool) {
        let journal = from.journal(NOW_MS).encode();
        to.apply_journal(0, &journal, Vec::new, NOW_MS).unwrap();
    }

    #[test]
    fn bytes_per_token_are_learned_from_whole_prompts_and_used() {
        let mut pool = pool(1);
        let text = "\u{6587}".repeat(3000);
        let before = ask_text(&mut pool, &text, "").decision.uncached_tokens;
        assert_eq!(before, 9000 / 4);
        for number in 0..60 {
            let outcome = ask_text(&mut pool, &format!("{text}{number}"), "");
            let expected = outcome.expectation.as_ref().unwrap();
            let told = Usage {
                prompt_tokens: 4500,
                cached_tokens: None,
            };
            assert!(!pool.answered(expected, told, None, NOW_MS));
        }
        let mean = pool.millibytes_per_token();
        assert!((1950..2100).contains(&mean), "{mean}");
        let after = ask_text(&mut pool, &"\u{8a9e}".repeat(3000), "");
        assert!(after.decision.uncached_tokens > 4250);

        let config = pool.config().clone();
        pool.reconfigure(config.clone());
        assert_eq!(pool.millibytes_per_token(), mean, "a push keeps what was learned");
        pool.reconfigure(crate::config::PoolConfig {
            bytes_per_token: 3,
            ..config
        });
        assert_eq!(pool.millibytes_per_token(), 3000, "unless it says otherwise");
    }

    #[test]
    fn a_prompt_that_was_not_read_whole_tells_nothing_of_tokens() {
        let mut pool = pool_with(1, r#""prefix": {"max_bytes": 4096},"#);
        let outcome = ask(&mut pool, 1);
        answer(&mut pool, &outcome, 0);
        assert_eq!(pool.millibytes_per_token(), 4000);
    }

    #[test]
    fn one_false_hit_is_an_eviction_and_the_prompt_is_there_again() {
        let (mut here, mut there) = (pool(1), pool(2));
        let placed = ask(&mut here, 1);
        assert!(!answer(&mut here, &placed, 0), "nothing was predicted");
        let again = ask(&mut here, 1);
        assert_eq!(again.decision.matched_bytes, 20_000);
        assert!(answer(&mut here, &again, 0));
        tell(&mut here, &mut there);
        for pool in [&mut here, &mut there] {
            let next = ask(pool, 1);
            assert_eq!(next.decision.matched_bytes, 20_000);
            assert_eq!(host_of(&next), host_of(&placed));
        }
        let right = ask(&mut here, 1);
        assert!(!answer(&mut here, &right, 4900), "blocks end where they end");
    }

    #[test]
    fn a_host_that_keeps_nothing_is_believed_to_hold_nothing_until_it_shows_a_hit() {
        let (mut here, mut there) = (pool(1), pool(2));
        let placed = ask(&mut here, 1);
        let slot = host_of(&placed);
        answer(&mut here, &placed, 0);
        let mut false_hits = 0;
        for _ in 0..2 {
            let outcome = ask(&mut here, 1);
            assert_eq!(outcome.decision.matched_bytes, 20_000);
            false_hits += u32::from(answer(&mut here, &outcome, 0));
        }
        assert_eq!(false_hits, 2);
        tell(&mut here, &mut there);
        for pool in [&mut here, &mut there] {
            let next = ask(pool, 1);
            let at_slot = held(pool, 1, slot);
            if host_of(&next) != slot {
                assert_eq!(at_slot, 0);
            }
            assert_eq!(next.decision.matched_bytes, 0, "not sent there for nothing");
        }

        // What is new there is not believed either.
        let mut id = 100;
        let new = loop {
            let outcome = ask(&mut here, id);
            if host_of(&outcome) == slot {
                break outcome;
            }
            id += 1;
        };
        assert!(!answer(&mut here, &new, 0));
        assert_eq!(held(&mut here, id, slot), 0);

        // Until an answer shows a hit.
        let hit = loop {
            let outcome = ask(&mut here, id);
            if host_of(&outcome) == slot {
                break outcome;
            }
            id += 1;
        };
        assert!(!answer(&mut here, &hit, 4000));
        assert_eq!(held(&mut here, id, slot), 20_000);
    }

    #[test]
    fn what_was_cached_stays_and_only_the_rest_is_forgotten() {
        let mut pool = pool(1);
        let placed = ask(&mut pool, 1);
        let slot = host_of(&placed);
        for _ in 0..2 {
            let outcome = ask(&mut pool, 1);
            answer(&mut pool, &outcome, 2500);
        }
        assert_eq!(
            ask(&mut pool, 1).decision.matched_bytes,
            20_000,
            "an answer with a hit puts nothing in doubt"
        );
        for cached_tokens in [0, 200] {
            let outcome = ask(&mut pool, 1);
            assert!(answer(&mut pool, &outcome, cached_tokens));
        }
        let left = held(&mut pool, 1, slot);
        assert!((1..=800).contains(&left), "{left}");
    }

    #[test]
    fn an_answer_of_another_host_or_epoch_tells_nothing_of_this_one() {
        let mut pool = pool(1);
        ask(&mut pool, 1);
        for _ in 0..4 {
            let outcome = ask(&mut pool, 1);
            let expected = outcome.expectation.as_ref().unwrap();
            let other = Slot((host_of(&outcome).0 + 1) % 4);
            assert!(!pool.answered(expected, usage(5000, 0), Some(other), NOW_MS));
            assert!(!pool.answered(expected, usage(5000, 0), None, NOW_MS));
            let mut old = expected.clone();
            old.host = old.host.map(|(slot, epoch)| (slot, epoch + 1));
            assert!(!pool.answered(&old, usage(5000, 0), Some(host_of(&outcome)), NOW_MS));
            assert_eq!(outcome.decision.matched_bytes, 20_000);
        }
    }

    #[test]
    fn only_answers_that_will_be_read_are_expected() {
        for (settings, whole, streamed) in [
            (r#""usage_feedback": "off","#, false, false),
            ("", true, false),
            (r#""usage_feedback": "streams","#, true, true),
        ] {
            let mut pool = pool_with(1, settings);
            assert_eq!(
                ask_text(&mut pool, "text", "").expectation.is_some(),
                whole,
                "{settings}"
            );
            let stream = ask_text(&mut pool, "text", r#","stream":true"#);
            assert_eq!(stream.expectation.is_some(), streamed, "{settings}");
        }
        let mut reports = pool_with(1, r#""dry_run": true,"#);
        let outcome = ask(&mut reports, 1);
        let expected = outcome.expectation.as_ref().unwrap();
        assert_eq!(expected.host, None);
        reports.answered(expected, usage(10_000, 0), None, NOW_MS);
        assert!(reports.millibytes_per_token() < 4000, "tokens are learned anyway");
    }
}
