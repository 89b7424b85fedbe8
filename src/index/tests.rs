//! The index against a naive oracle, at its bounds, and in the cases that it exists for.

use std::collections::BTreeMap;

use super::*;
use crate::blob::tests::Random;
use crate::chunk::ChunkHash;
use crate::host_table::{Host, Load};

const NOW_MS: u64 = 1_790_000_000_000;

fn mix64(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A prompt of texts (id, bytes), with keys at the spacing of the hash scheme and at the end of each text.
fn prompt(texts: &[(u64, u32)]) -> PrefixKeys {
    let (mut keys, mut chain, mut start) = (Vec::new(), 0, 0);
    for (id, bytes) in texts {
        let end = start + bytes;
        let mut at = start;
        while at < end {
            let step = match at {
                0..4096 => 256,
                4096..32_768 => 1024,
                _ => 4096,
            };
            at = (at / step * step + step).min(end);
            chain = mix64(chain ^ mix64(id << 24 | u64::from(at - start)));
            keys.push(PrefixKey {
                hash: ChunkHash(chain),
                end_bytes: at,
            });
        }
        start = end;
    }
    PrefixKeys {
        keys,
        prompt_bytes: start,
    }
}

fn host(slot: u16, epoch: u32, capacity_tokens: u64) -> Host {
    Host {
        slot: Slot(slot),
        epoch,
        address: format!("10.0.0.{slot}:80"),
        load: Load {
            kv_capacity_tokens: Some(capacity_tokens),
            ..Load::default()
        },
        ..Host::default()
    }
}

fn table(hosts: Vec<Host>) -> HostTable {
    HostTable {
        published_ms: NOW_MS,
        hosts,
    }
}

fn index_of(hosts: Vec<Host>) -> PrefixIndex {
    let mut index = PrefixIndex::new(IndexSettings::default());
    index.update_hosts(&table(hosts));
    index
}

fn eight() -> PrefixIndex {
    index_of((0..8).map(|slot| host(slot, 1, 400_000)).collect())
}

/// Places a prompt with what the index itself believes of it.
fn place(index: &mut PrefixIndex, slot: u16, keys: &PrefixKeys, now_ms: u64) -> Placement {
    let matched = index.lookup(keys, now_ms).bytes_at(Slot(slot));
    let new = NewPlacement {
        slot: Slot(slot),
        uncached_tokens: (keys.prompt_bytes - matched) / 4,
        prompt_tokens: keys.prompt_bytes / 4,
    };
    index.place(keys, new, now_ms).unwrap()
}

#[test]
fn a_placed_prompt_and_its_continuation_are_found_on_its_host_alone() {
    let mut index = eight();
    let first = prompt(&[(1, 6000), (2, 700)]);
    assert_eq!(index.lookup(&first, NOW_MS), Matches::NONE);
    place(&mut index, 3, &first, NOW_MS);
    assert_eq!(index.lookup(&first, NOW_MS).as_slice(), [(Slot(3), 6700)]);
    let next = prompt(&[(1, 6000), (2, 700), (3, 900), (4, 80)]);
    assert_eq!(index.lookup(&next, NOW_MS).as_slice(), [(Slot(3), 6700)]);
    let branch = prompt(&[(1, 6000), (5, 900)]);
    assert_eq!(index.lookup(&branch, NOW_MS).as_slice(), [(Slot(3), 6000)]);
}

#[test]
fn each_host_has_its_own_depth_deepest_first() {
    let mut index = eight();
    let texts = [(1, 3000), (2, 9000), (3, 40_000), (4, 500)];
    for (slot, len) in [(5, 1), (2, 2), (7, 3), (0, 4)] {
        place(&mut index, slot, &prompt(&texts[..len]), NOW_MS);
    }
    let found = index.lookup(&prompt(&texts), NOW_MS);
    let expected =
        [(0, 52_500), (7, 52_000), (2, 12_000), (5, 3000)].map(|(slot, bytes)| (Slot(slot), bytes));
    assert_eq!(found.as_slice(), expected);
}

#[test]
fn a_restarted_or_departed_host_is_forgotten_at_once_and_for_good() {
    let mut index = eight();
    let keys = prompt(&[(1, 6000)]);
    place(&mut index, 3, &keys, NOW_MS);
    place(&mut index, 4, &keys, NOW_MS);
    let mut hosts: Vec<Host> = (0..8).map(|slot| host(slot, 1, 400_000)).collect();
    hosts[3].epoch = 2;
    index.update_hosts(&table(hosts.clone()));
    assert_eq!(index.lookup(&keys, NOW_MS).as_slice(), [(Slot(4), 6000)]);
    hosts.remove(4);
    index.update_hosts(&table(hosts.clone()));
    assert_eq!(index.lookup(&keys, NOW_MS).as_slice(), []);
    hosts.insert(4, host(4, 2, 400_000));
    index.update_hosts(&table(hosts));
    assert_eq!(index.lookup(&keys, NOW_MS).as_slice(), []);
    place(&mut index, 3, &keys, NOW_MS);
    assert_eq!(index.lookup(&keys, NOW_MS).as_slice(), [(Slot(3), 6000)]);
}

#[test]
fn what_was_not_used_for_a_cache_size_of_uncached_tokens_is_forgotten() {
    let mut index = index_of(vec![host(0, 1, 100_000), host(1, 1, 0)]);
    let (old, kept) = (prompt(&[(1, 6000)]), prompt(&[(2, 6000)]));
    place(&mut index, 0, &old, NOW_MS);
    place(&mut index, 0, &kept, NOW_MS);
    for n in 0..60 {
        place(&mut index, 0, &prompt(&[(100 + n, 8000)]), NOW_MS);
        place(&mut index, 0, &kept, NOW_MS);
    }
    assert_eq!(index.lookup(&old, NOW_MS), Matches::NONE);
    assert_eq!(index.lookup(&kept, NOW_MS).as_slice(), [(Slot(0), 6000)]);
    // Hits do not turn the cache over.
    let last = prompt(&[(159, 8000)]);
    for _ in 0..1000 {
        place(&mut index, 0, &last, NOW_MS);
    }
    assert_eq!(index.lookup(&kept, NOW_MS).as_slice(), [(Slot(0), 6000)]);
    assert_eq!(
        index.capacity_tokens(Slot(1)),
        1_500_000,
        "an unknown size is assumed to be large"
    );
}

/// Everything that an index of unbounded memory would know, found by walking all keys.
#[derive(Default)]
struct Oracle {
    hosts: BTreeMap<u16, OracleHost>,
}

#[derive(Default)]
struct OracleHost {
    epoch: u32,
    /// In units of 64 tokens.
    capacity: u64,
    clock_tokens: u64,
    stamps: BTreeMap<u64, u64>,
}

impl OracleHost {
    /// Units since the stamp of a key that is believed.
    fn age(&self, key: u64) -> Option<u64> {
        let age = self.clock_tokens / 64 - self.stamps.get(&key)?;
        (age < self.capacity).then_some(age)
    }
}

impl Oracle {
    fn depths(&self, keys: &PrefixKeys) -> Vec<(u16, u32)> {
        let deepest = |host: &OracleHost| {
            let holds = |key: &&PrefixKey| host.age(key.hash.0).is_some();
            keys.keys.iter().rev().find(holds).map(|key| key.end_bytes)
        };
        let depths = self
            .hosts
            .iter()
            .map(|(slot, host)| Some((*slot, deepest(host)?)));
        depths.flatten().collect()
    }
}

#[test]
fn random_histories_agree_with_the_oracle() {
    for seed in 1..=20 {
        let mut random = Random::seeded(seed);
        let mut index = PrefixIndex::new(IndexSettings::default());
        let mut oracle = Oracle::default();
        for step in 0..1500u64 {
            // Hosts come, go, and restart.
            if step % 100 == 0 {
                let mut listed = BTreeMap::new();
                for slot in 0..12u16 {
                    let known = oracle.hosts.remove(&slot);
                    if random.below(8) == 0 && step > 0 {
                        continue;
                    }
                    let state = match known {
                        Some(state) if random.below(5) > 0 => state,
                        Some(_) | None => OracleHost {
                            epoch: u32::try_from(step).unwrap() + 1,
                            capacity: 125 << (2 * random.below(3)),
                            ..OracleHost::default()
                        },
                    };
                    listed.insert(slot, state);
                }
                oracle.hosts = listed;
                let hosts = oracle.hosts.iter();
                let hosts = hosts.map(|(slot, state)| host(*slot, state.epoch, state.capacity * 64));
                index.update_hosts(&table(hosts.collect()));
            }
            // A few system prompts, documents below them, and turns below those.
            let mut texts = vec![(
                random.below(3),
                200 + 900 * u32::try_from(random.below(4)).unwrap(),
            )];
            for level in 1..=random.below(5) {
                let id = level << 8 | random.below(4);
                texts.push((id, 100 + 640 * u32::try_from(id % 7).unwrap()));
            }
            let keys = prompt(&texts);
            let found = index.lookup(&keys, NOW_MS);
            let mut depths: Vec<(u16, u32)> = found.as_slice().iter().map(|m| (m.0.0, m.1)).collect();
            assert!(depths.is_sorted_by(|a, b| a.1 >= b.1));
            depths.sort_unstable();
            assert_eq!(depths, oracle.depths(&keys), "seed {seed}, step {step}");
            let slot = u16::try_from(random.below(12)).unwrap();
            let uncached_tokens = (keys.prompt_bytes - found.bytes_at(Slot(slot))) / 4;
            let new = NewPlacement {
                slot: Slot(slot),
                uncached_tokens,
                prompt_tokens: keys.prompt_bytes / 4,
            };
            let placed = index.place(&keys, new, NOW_MS);
            assert_eq!(placed.is_some(), oracle.hosts.contains_key(&slot));
            if let Some(host) = oracle.hosts.get_mut(&slot) {
                host.clock_tokens += u64::from(uncached_tokens);
                let stamp = host.clock_tokens / 64;
                for key in &keys.keys {
                    if host.age(key.hash.0).is_none_or(|age| age > host.capacity / 8) {
                        host.stamps.insert(key.hash.0, stamp);
                    }
                }
            }
        }
    }
}

#[test]
fn memory_is_exactly_what_was_configured_and_taken_as_keys_come() {
    for memory_bytes in [256 << 10, 1_000_000, 16 << 20] {
        let mut index = PrefixIndex::new(IndexSettings {
            memory_bytes,
            ..IndexSettings::default()
        });
        let bound = memory_bytes as usize;
        assert!(index.memory_bytes() <= bound && index.memory_bytes() + 320 > bound);
        assert_eq!(index.table.allocated_bytes(), 0);
        index.update_hosts(&table((0..1024).map(|slot| host(slot, 1, 400_000)).collect()));
        place(&mut index, 0, &prompt(&[(4000, 40_000)]), NOW_MS);
        // Of the largest here; a prompt has as many keys as the smaller ones have segments.
        let waits_for_all = index.table.allocated_bytes() > 2 << 20;
        assert!(!waits_for_all, "{}", index.table.allocated_bytes());
        for n in 0..4000 {
            let slot = u16::try_from(n % 1024).unwrap();
            place(&mut index, slot, &prompt(&[(n, 40_000)]), NOW_MS + n);
        }
        assert_eq!(index.table.allocated_bytes(), index.table.memory_bytes());
        let newest = prompt(&[(3999, 40_000)]);
        let found = index.lookup(&newest, NOW_MS);
        assert_eq!(found.as_slice(), [(Slot(3999 % 1024), 40_000)], "{memory_bytes}");
    }
}

#[test]
fn eight_hosts_of_1_5_million_tokens_fit_in_16_mib() {
    let mut index = index_of((0..8).map(|slot| host(slot, 1, 1_500_000)).collect());
    // At the closest spacing, with three more message ends: 19 keys for 1024 tokens.
    let keys_of = |n: u64| {
        prompt(&[
            (4 * n, 1000),
            (4 * n + 1, 1000),
            (4 * n + 2, 1000),
            (4 * n + 3, 1096),
        ])
    };
    let prompts = 8 * 1_500_000 / 1024;
    for n in 0..2 * prompts {
        place(&mut index, u16::try_from(n % 8).unwrap(), &keys_of(n), NOW_MS + n);
    }
    let now_ms = NOW_MS + 2 * prompts;
    let whole = (prompts..2 * prompts)
        .filter(|n| {
            index.lookup(&keys_of(*n), now_ms).as_slice() == [(Slot(u16::try_from(n % 8).unwrap()), 4096)]
        })
        .count() as u64;
    assert!(whole * 1000 >= prompts * 995, "{whole} of {prompts}");
    assert_eq!(
        index.lookup(&keys_of(7), now_ms),
        Matches::NONE,
        "what left the cache left the index"
    );
}

#[test]
fn eight_caches_full_of_chats_are_found_without_exception() {
    let mut index = index_of((0..8).map(|slot| host(slot, 1, 1_500_000)).collect());
    // 8192 tokens in sixteen messages of 2 KiB.
    let keys_of = |n: u64| {
        prompt(
            &(0..16)
                .map(|message| (16 * n + message, 2048))
                .collect::<Vec<_>>(),
        )
    };
    let prompts = 8 * 1_500_000 / 8192;
    for n in 0..2 * prompts {
        place(&mut index, u16::try_from(n % 8).unwrap(), &keys_of(n), NOW_MS + n);
    }
    assert!(index.memory_bytes() <= 16 << 20);
    for n in prompts..2 * prompts {
        let slot = Slot(u16::try_from(n % 8).unwrap());
        let found = index.lookup(&keys_of(n), NOW_MS + 2 * prompts);
        assert_eq!(found.as_slice(), [(slot, 32_768)], "{n}");
    }
}

#[test]
fn a_key_on_many_hosts_names_twenty_of_them() {
    let mut index = index_of((0..200).map(|slot| host(slot, 1, 400_000)).collect());
    let keys = prompt(&[(1, 2000)]);
    for slot in 0..12 {
        place(&mut index, slot, &keys, NOW_MS);
    }
    let mut slots: Vec<u16> = index
        .lookup(&keys, NOW_MS)
        .as_slice()
        .iter()
        .map(|m| m.0.0)
        .collect();
    slots.sort_unstable();
    assert_eq!(slots, (0..12).collect::<Vec<u16>>());
    for slot in 12..200 {
        place(&mut index, slot, &keys, NOW_MS);
    }
    let found = index.lookup(&keys, NOW_MS);
    assert_eq!(found.as_slice().len(), 20);
    assert!(found.as_slice().iter().all(|m| m.1 == 2000));
}

#[test]
fn a_part_that_is_used_often_for_its_holders_should_spread_until_it_is_cold_or_everywhere() {
    let mut index = eight();
    let keys_of = |n: u64| prompt(&[(1, 4000), (100 + n, 500)]);
    let mut spread = Vec::new();
    for n in 0..12 {
        spread.push(index.lookup(&keys_of(n), NOW_MS).spread_bytes);
        place(&mut index, 0, &keys_of(n), NOW_MS);
    }
    // One holder: six uses.
    assert_eq!(spread, [0, 0, 0, 0, 0, 0, 3840, 3840, 3840, 3840, 3840, 3840]);
    place(&mut index, 1, &keys_of(12), NOW_MS);
    place(&mut index, 2, &keys_of(13), NOW_MS);
    place(&mut index, 3, &keys_of(14), NOW_MS);
    assert_eq!(
        index.lookup(&keys_of(15), NOW_MS).spread_bytes,
        3840,
        "four holders: fifteen uses"
    );
    assert_eq!(
        index.lookup(&keys_of(15), NOW_MS + 20_000).spread_bytes,
        0,
        "half of them faded"
    );
    for slot in 4..8 {
        place(&mut index, slot, &keys_of(16), NOW_MS);
    }
    (0..40).for_each(|n| drop(place(&mut index, 0, &keys_of(n), NOW_MS)));
    assert_eq!(index.lookup(&keys_of(17), NOW_MS).spread_bytes, 0, "all have it");
}

#[test]
fn another_worker_that_replays_predicts_the_same_and_hears_only_news() {
    let (mut here, mut there) = (eight(), eight());
    let system = prompt(&[(1, 5000)]);
    let mut texts = vec![(1, 5000)];
    let first = place(&mut here, 2, &system, NOW_MS);
    assert!(there.replay(&first, NOW_MS));
    for turn in 0..20 {
        texts.push((50 + turn, 1500));
        let keys = prompt(&texts);
        let placement = place(&mut here, 2, &keys, NOW_MS);
        assert!(
            placement.keys.len() <= 4,
            "{} keys for a turn",
            placement.keys.len()
        );
        assert!(there.replay(&placement, NOW_MS));
        let (known, heard) = (here.lookup(&keys, NOW_MS), there.lookup(&keys, NOW_MS));
        assert_eq!(known.as_slice(), heard.as_slice());
    }
    let big = place(&mut here, 2, &prompt(&[(9, 500_000)]), NOW_MS);
    assert!(big.keys.len() <= crate::journal::MAX_KEYS);
    assert!(there.replay(&big, NOW_MS));
    assert_eq!(
        there.lookup(&prompt(&[(9, 500_000)]), NOW_MS).bytes_at(Slot(2)),
        500_000
    );
    let stale = Placement { epoch: 7, ..first };
    assert!(!there.replay(&stale, NOW_MS), "another epoch means another cache");
}

#[test]
fn keys_that_stay_in_use_are_renewed_for_the_others_before_they_die_there() {
    let hosts = || vec![host(0, 1, 64_000)];
    let (mut here, mut there) = (index_of(hosts()), index_of(hosts()));
    let kept = prompt(&[(1, 6000)]);
    let mut told = 0;
    for n in 0..400 {
        for keys in [kept.clone(), prompt(&[(10 + n, 2048)])] {
            let placement = place(&mut here, 0, &keys, NOW_MS);
            told += usize::from(keys == kept && !placement.keys.is_empty());
            there.replay(&placement, NOW_MS);
        }
        assert_eq!(there.lookup(&kept, NOW_MS).bytes_at(Slot(0)), 6000, "{n}");
    }
    assert!((20..60).contains(&told), "{told} renewals for 3.2 cache sizes");
}

#[test]
fn a_withdrawn_placement_leaves_what_was_there_before() {
    let mut index = eight();
    let old = prompt(&[(1, 3000)]);
    let new = prompt(&[(1, 3000), (2, 9000)]);
    place(&mut index, 1, &old, NOW_MS);
    let placement = place(&mut index, 1, &new, NOW_MS);
    let withdrawn = Placement {
        kind: PlacementKind::Withdrawn,
        ..placement
    };
    assert!(index.replay(&withdrawn, NOW_MS));
    let left = index.lookup(&new, NOW_MS).bytes_at(Slot(1));
    // Keys between two anchors are not told, and stay.
    assert!((3000..4000).contains(&left), "{left}");
    assert_eq!(index.lookup(&old, NOW_MS).bytes_at(Slot(1)), 3000);
}

/// One host that holds `true_tokens` and tells `told_tokens`; prompts of 2048 tokens in a loop that fits neither or both.
fn believed_after(told_tokens: u64, true_tokens: u64, loop_len: u64) -> u64 {
    let mut index = index_of(vec![host(0, 1, told_tokens)]);
    let mut cache: BTreeMap<u64, u64> = BTreeMap::new();
    let (mut queries, mut hits) = (0, 0);
    for n in 0..6000 {
        let id = n % loop_len;
        place(&mut index, 0, &prompt(&[(id, 8192)]), NOW_MS);
        queries += 2048;
        hits += if cache.contains_key(&id) { 2048 } else { 0 };
        cache.insert(id, n);
        while cache.len() as u64 * 2048 > true_tokens {
            let oldest = *cache.iter().min_by_key(|(_, used)| **used).unwrap().0;
            cache.remove(&oldest);
        }
        if n % 10 == 9 {
            let mut host = host(0, 1, told_tokens);
            host.load.prefix_queries = Some(queries);
            host.load.prefix_hits = Some(hits);
            index.update_hosts(&table(vec![host]));
        }
    }
    index.capacity_tokens(Slot(0))
}

#[test]
fn counters_shrink_a_size_that_is_told_too_large_and_leave_a_right_one() {
    // A loop of 400 000 tokens hits always in what is told, and never in what is there.
    let learned = believed_after(1_000_000, 100_000, 196);
    assert!(learned < 400_000, "{learned}");
    assert!(learned >= 1_000_000 / 16, "bounded");
    assert_eq!(believed_after(1_000_000, 1_000_000, 196), 1_000_000);
    // A loop of 400 000 tokens never hits in what is told, and always in what is there.
    let grown = believed_after(200_000, 1_000_000, 196);
    assert!(grown >= 350_000, "{grown}");
}

#[test]
fn answers_shrink_and_grow_a_size_without_any_counters() {
    let believed_after = |told_tokens: u64, true_tokens: u64, loop_len: u64| {
        let mut index = index_of(vec![host(0, 1, told_tokens)]);
        let mut used: BTreeMap<u64, u64> = BTreeMap::new();
        for n in 0..6000 {
            let id = n % loop_len;
            let keys = prompt(&[(id, 8192)]);
            let predicted = index.lookup(&keys, NOW_MS).bytes_at(Slot(0)) / 4;
            place(&mut index, 0, &keys, NOW_MS);
            let cached = if used.contains_key(&id) { 2047 } else { 0 };
            used.insert(id, n);
            while used.len() as u64 * 2048 > true_tokens {
                let oldest = *used.iter().min_by_key(|(_, last)| **last).unwrap().0;
                used.remove(&oldest);
            }
            index.answered(Slot(0), 1, predicted, cached, 2048);
        }
        index.capacity_tokens(Slot(0))
    };
    let learned = believed_after(1_000_000, 100_000, 196);
    assert!((1_000_000 / 16..400_000).contains(&learned), "{learned}");
    assert_eq!(believed_after(1_000_000, 1_000_000, 196), 1_000_000);
    let grown = believed_after(200_000, 1_000_000, 196);
    assert!((350_000..=800_000).contains(&grown), "{grown}");
}

#[test]
fn caches_filled_before_the_index_began_count_as_unseen_until_they_are_filled_again() {
    let mut first = host(0, 1, 100_000);
    first.load.prefix_queries = Some(1_000_000);
    first.load.prefix_hits = Some(400_000);
    let hosts = vec![first, host(1, 1, 100_000)];
    let mut index = index_of(hosts.clone());
    let keys = prompt(&[(1, 400)]);
    assert_eq!(index.lookup(&keys, NOW_MS).unseen_permille, 500);
    for n in 0..25 {
        place(&mut index, 0, &prompt(&[(10 + n, 8192)]), NOW_MS);
    }
    index.update_hosts(&table(hosts));
    let left = index.lookup(&keys, NOW_MS).unseen_permille;
    assert!((200..300).contains(&left), "{left}");
}

#[test]
fn clocks_that_go_backwards_and_slots_out_of_range_do_no_harm() {
    let mut index = index_of(vec![host(0, 1, 100_000), host(5000, 1, 100_000)]);
    let keys = prompt(&[(1, 4096)]);
    place(&mut index, 0, &keys, NOW_MS);
    place(&mut index, 0, &keys, 0);
    assert_eq!(index.lookup(&keys, NOW_MS / 2).as_slice(), [(Slot(0), 4096)]);
    let nowhere = NewPlacement {
        slot: Slot(5000),
        uncached_tokens: 1,
        prompt_tokens: 1,
    };
    assert_eq!(index.place(&keys, nowhere, NOW_MS), None);
    let mut hostile = Placement {
        slot: Slot(u16::MAX),
        epoch: 1,
        uncached_tokens: u32::MAX,
        keys: vec![u64::MAX; 64],
        ..Placement::default()
    };
    assert!(!index.replay(&hostile, NOW_MS));
    hostile.slot = Slot(0);
    assert!(index.replay(&hostile, u64::MAX));
}
