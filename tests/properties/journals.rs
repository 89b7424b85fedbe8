//! Any bytes → no journal, run, lease or merged journals, or ones within their bounds; and a pool that takes them over
//! keeps its own tallies and its memory.

use warmroute::config::{Config, PoolConfig};
use warmroute::host_table::{MAX_HOSTS, Slot};
use warmroute::journal::{
    Journal, JournalClaim, JournalsSeen, MAX_JOURNALS, MAX_KEYS, MAX_SILENCES, MAX_TALLIES, MERGED_BYTES,
    MERGED_RUN_BYTES, MergedJournals, Placement, PlacementKind, PlacementRun, Silence, Tallies, Tally,
    count_publication, merge_is_due,
};
use warmroute::lease::{Contender, Lease, LeaseStep, Priority, step};
use warmroute::pool::Pool;

use super::choices::{Choices, Seen, shown};
use super::host_table::{check_damage, sealed, table, tampered};

/// Checks everything on the journals or the bytes that the bytes stand for.
pub(crate) fn check(data: &[u8], seen: &mut Seen) {
    let mut choices = Choices::new(data);
    match choices.below(8) {
        0 => check_read(choices.rest(), seen),
        1 => {
            let magic = *choices.pick(&[b"WRJN", b"WRJM", b"WRPL", b"WRLS"]);
            let version = if choices.one_in(8) { choices.u16() } else { 1 };
            let blob = sealed(magic, version, choices.rest());
            check_read(&blob, seen);
            if version != 1 {
                assert!(Journal::decode(&blob).is_err(), "{}", shown(&blob));
                assert!(MergedJournals::decode(&blob).is_err(), "{}", shown(&blob));
                assert!(PlacementRun::decode(&blob).is_none(), "{}", shown(&blob));
                seen.note("other version");
            }
        }
        2 => check_journal(&mut choices, seen),
        3 => check_merged(&mut choices, seen),
        4 => check_lease(&mut choices, seen),
        5 => {
            let journal = journal(&mut choices);
            let merged = MergedJournals {
                merged_ms: journal.heartbeat_ms,
                counts: choices.take(16).to_vec(),
                journals: vec![(choices.byte() % MAX_JOURNALS, journal.clone())],
            };
            let blob = match choices.below(3) {
                0 => journal.encode(),
                1 => journal.placements.encode(journal.worker),
                _ => merged.encode().unwrap_or_default(),
            };
            if !blob.is_empty() {
                check_read(&tampered(&blob, &mut choices), seen);
            }
        }
        _ => check_pool(&mut choices, seen),
    }
}

fn check_read(blob: &[u8], seen: &mut Seen) {
    if let Ok(journal) = Journal::decode(blob) {
        seen.note("journal read");
        check_bounds(&journal, blob);
        assert_eq!(
            Journal::decode(&journal.encode()).as_ref(),
            Ok(&journal),
            "{}",
            shown(blob)
        );
        assert!(Journal::is_by(blob, journal.worker), "{}", shown(blob));
    }
    if let Ok(merged) = MergedJournals::decode(blob) {
        seen.note("merged journals read");
        assert!(blob.len() <= MERGED_BYTES, "{}", shown(blob));
        merged
            .journals
            .iter()
            .for_each(|(_, journal)| check_bounds(journal, blob));
    }
    if let Some((worker, run)) = PlacementRun::decode(blob) {
        seen.note("run read");
        check_run(&run, blob);
        assert_eq!(run.encode(worker), blob, "{}", shown(blob));
    }
    if let Ok(lease) = Lease::decode(blob) {
        seen.note("lease read");
        assert_eq!(Lease::decode(&lease.encode()), Ok(lease), "{}", shown(blob));
    }
    let _ = JournalClaim::judge(Some(blob), 1_700_000_000_000);
    let _ = merge_is_due(Some(blob), 1_700_000_000_000);
    // Counts that end inside a number are not what anybody writes; the broken one may be read as zero or as itself.
    let blob = &blob[..blob.len() / 4 * 4];
    let mut known = JournalsSeen::default();
    assert!(known.moved(blob, true).len() == usize::from(MAX_JOURNALS));
    let moved = known.moved(blob, false);
    known.saw_all(blob);
    moved.iter().for_each(|slot| known.saw(*slot, blob));
    assert_eq!(known.moved(blob, false), [0u8; 0], "{}", shown(blob));
    let mut counts = blob.to_vec();
    count_publication(&mut counts, 3);
    assert_eq!(known.moved(&counts, false), [3], "{}", shown(blob));
}

/// A journal that is read fits the memory that its blob has, some times over.
fn check_bounds(journal: &Journal, blob: &[u8]) {
    assert!(journal.tallies.len() <= MAX_TALLIES, "{}", shown(blob));
    assert!(journal.silences.len() <= MAX_SILENCES, "{}", shown(blob));
    check_run(&journal.placements, blob);
}

fn check_run(run: &PlacementRun, blob: &[u8]) {
    assert!(run.placements.len() * 17 <= blob.len(), "{}", shown(blob));
    for placement in &run.placements {
        assert!(placement.keys.len() <= MAX_KEYS, "{}", shown(blob));
        assert!(
            usize::from(placement.renewed) <= placement.keys.len(),
            "{}",
            shown(blob)
        );
    }
}

fn check_journal(choices: &mut Choices<'_>, seen: &mut Seen) {
    let journal = journal(choices);
    let blob = journal.encode();
    let mut expected = journal.clone();
    expected.tallies.truncate(MAX_TALLIES);
    expected.silences.truncate(MAX_SILENCES);
    assert_eq!(Journal::decode(&blob).as_ref(), Ok(&expected), "{journal:?}");
    seen.note("journal written");
    check_damage(&blob, choices, seen, |bytes| Journal::decode(bytes).is_err());
    let run = &journal.placements;
    let archived = run.encode(journal.worker);
    assert_eq!(
        PlacementRun::decode(&archived).as_ref(),
        Some(&(journal.worker, run.clone())),
        "{journal:?}"
    );
    check_damage(&archived, choices, seen, |bytes| {
        PlacementRun::decode(bytes).is_none()
    });
    let others = [journal.clone(), journal.clone()];
    let sums = Tallies::sum(&others, journal.worker ^ 1, journal.heartbeat_ms);
    let mut last = None;
    for tally in sums.iter() {
        assert!(last < Some((tally.slot, tally.epoch)), "{journal:?}");
        last = Some((tally.slot, tally.epoch));
        assert_eq!(sums.of(tally.slot, tally.epoch), *tally, "{journal:?}");
    }
    assert_eq!(
        Tallies::sum(&others, journal.worker, journal.heartbeat_ms)
            .iter()
            .count(),
        0
    );
}

fn check_merged(choices: &mut Choices<'_>, seen: &mut Seen) {
    let now_ms = 1_700_000_000_000;
    let mut blobs: Vec<(u8, Vec<u8>)> = Vec::new();
    for slot in 0..u8::try_from(choices.below(12)).unwrap_or(0) {
        let mut journal = journal(choices);
        if !choices.one_in(4) {
            journal.heartbeat_ms = now_ms;
        }
        let mut blob = journal.encode();
        if choices.one_in(8) {
            blob.truncate(choices.below(blob.len()));
        }
        blobs.push((slot, blob));
    }
    let counts = choices.take(40).to_vec();
    let merged = MergedJournals::of(
        blobs.iter().map(|(slot, blob)| (*slot, blob.as_slice())),
        &counts,
        now_ms,
    );
    let mut run_bytes = 0;
    for (slot, journal) in &merged.journals {
        let original = blobs.iter().find(|(other, _)| other == slot).expect("its slot");
        let original = Journal::decode(&original.1).expect("a journal");
        let (kept, all) = (&journal.placements.placements, &original.placements.placements);
        assert!(all.ends_with(kept), "{journal:?} of {original:?}");
        assert_eq!(
            journal.placements.next_sequence(),
            original.placements.next_sequence()
        );
        assert_eq!(journal.tallies, original.tallies);
        assert!(!journal.is_stale(now_ms), "{journal:?}");
        run_bytes += kept
            .iter()
            .map(|placement| 17 + 8 * placement.keys.len())
            .sum::<usize>();
    }
    assert!(run_bytes <= MERGED_RUN_BYTES, "{run_bytes} bytes of placements");
    seen.note_if("merged journals", merged.journals.len() > 1);
    let Some(blob) = merged.encode() else { return };
    assert!(blob.len() <= MERGED_BYTES);
    assert_eq!(MergedJournals::decode(&blob).as_ref(), Ok(&merged));
    check_damage(&blob, choices, seen, |bytes| {
        MergedJournals::decode(bytes).is_err()
    });
}

fn check_lease(choices: &mut Choices<'_>, seen: &mut Seen) {
    let priority =
        |choices: &mut Choices<'_>| choices.pick(&[Priority::Serving, Priority::Idle, Priority::Service]);
    let lease = Lease {
        holder: choices.odd_u64(),
        build: choices.odd_u32(),
        generation: choices.odd_u64(),
        priority: priority(choices),
        heartbeat_ms: choices.odd_u64(),
    };
    assert_eq!(Lease::decode(&lease.encode()), Ok(lease));
    check_damage(&lease.encode(), choices, seen, |bytes| {
        Lease::decode(bytes).is_err()
    });
    let me = Contender {
        id: choices.odd_u64(),
        build: choices.odd_u32(),
        generation: choices.odd_u64(),
        priority: priority(choices),
    };
    let now_ms = choices.odd_u64();
    match step(Some(&lease), &me, now_ms) {
        LeaseStep::Hold(mine) => {
            assert_eq!((mine.holder, mine.heartbeat_ms), (me.id, now_ms));
            assert_eq!(lease.holder, me.id, "{lease:?} {me:?} at {now_ms}");
        }
        LeaseStep::TakeOver(mine) => {
            seen.note("lease taken");
            assert_ne!(lease.holder, me.id, "{lease:?} {me:?} at {now_ms}");
            assert_eq!((mine.holder, mine.heartbeat_ms), (me.id, now_ms));
            // Who was preempted does not take it back at once: two would poll in turn for ever.
            let other = Contender {
                id: lease.holder,
                build: lease.build,
                generation: lease.generation,
                priority: lease.priority,
            };
            if !lease.is_stale(now_ms) {
                assert_eq!(
                    step(Some(&mine), &other, now_ms),
                    LeaseStep::Follow,
                    "{lease:?} {me:?} at {now_ms}"
                );
            }
        }
        LeaseStep::Follow => {
            seen.note("lease left");
            assert!(
                me.id != lease.holder && !lease.is_stale(now_ms),
                "{lease:?} {me:?} at {now_ms}"
            );
        }
    }
}

/// A pool that reads what any plugin may have written.
fn check_pool(choices: &mut Choices<'_>, seen: &mut Seen) {
    let config = small_pool_config("");
    let index_bytes = config.index_memory_bytes as usize;
    let mut pool = Pool::new(config, 7);
    let mut now_ms = 1_700_000_000_000;
    while !choices.is_empty() {
        now_ms += u64::from(choices.byte());
        // Some are none.
        let slot = choices.byte() % (MAX_JOURNALS + 4);
        match choices.below(6) {
            0 => {
                let mut table = table(choices);
                if !choices.one_in(4) {
                    table.published_ms = now_ms;
                }
                pool.apply_table(&table.encode(), now_ms).expect("its own blob");
                assert!(pool.fleet().len() <= MAX_HOSTS);
                seen.note("table applied");
            }
            1 => {
                let merged = MergedJournals {
                    merged_ms: now_ms,
                    counts: choices.take(16).to_vec(),
                    journals: (0..choices.below(5))
                        .map(|_| (choices.byte() % MAX_JOURNALS, journal(choices)))
                        .collect(),
                };
                if let Some(blob) = merged.encode() {
                    let news = pool.apply_merged(&blob, now_ms).expect("its own blob");
                    seen.note_if("merged journals applied", news.is_some());
                }
            }
            2 => {
                let noise = choices.take(40);
                let _ = pool.apply_journal(slot, noise, Vec::new, now_ms);
                let _ = pool.apply_merged(noise, now_ms);
                let _ = pool.apply_table(noise, now_ms);
            }
            _ => {
                let mut journal = journal(choices);
                if !choices.one_in(4) {
                    journal.heartbeat_ms = now_ms;
                }
                let archive: Vec<Vec<u8>> = (0..choices.below(3))
                    .map(|_| {
                        let mut run = journal.placements.clone();
                        run.first_sequence = run.first_sequence.wrapping_sub(choices.odd_u32());
                        run.encode(journal.worker)
                    })
                    .collect();
                let news = pool.apply_journal(slot, &journal.encode(), || archive, now_ms);
                seen.note_if("placements replayed", news.is_ok_and(|news| news.replayed > 0));
            }
        }
        pool.settle_journals(now_ms);
        assert!(pool.index().memory_bytes() <= index_bytes);
        assert_eq!(
            pool.fleet().own_tallies(now_ms).count(),
            0,
            "open work without a request"
        );
        let own = pool.journal(now_ms);
        assert_eq!(Journal::decode(&own.encode()).as_ref(), Ok(&own));
    }
}

/// A pool of the smallest bounds, with further settings.
pub(super) fn small_pool_config(settings: &str) -> PoolConfig {
    let text = format!(
        r#"{{"prefix":{{"memory_bytes":16384}},"index":{{"memory_bytes":262144}},"late_field_bytes":4096,
            "max_buffer_bytes":4096,{settings}"pools":{{"llm":{{"discovery":{{"admin_cluster":"admin"}}}}}}}}"#
    );
    Config::parse(text.as_bytes())
        .expect("a sound config")
        .pools
        .swap_remove(0)
}

pub(super) fn journal(choices: &mut Choices<'_>) -> Journal {
    let tallies = if choices.one_in(32) {
        MAX_TALLIES + 3
    } else {
        choices.below(8)
    };
    let placements = if choices.one_in(16) { 120 } else { choices.below(6) };
    Journal {
        worker: 8 + u64::from(choices.byte() % 4),
        sequence: choices.odd_u32(),
        heartbeat_ms: choices.odd_u64(),
        tallies: (0..tallies)
            .map(|_| Tally {
                slot: Slot(choices.odd_u16()),
                epoch: u32::from(choices.byte() % 4),
                requests: choices.odd_u32(),
                uncached_tokens: choices.odd_u64(),
            })
            .collect(),
        silences: (0..if choices.one_in(32) {
            MAX_SILENCES + 3
        } else {
            choices.below(4)
        })
            .map(|_| Silence {
                slot: Slot(choices.odd_u16()),
                epoch: u32::from(choices.byte() % 4),
                since_ms: choices.odd_u64(),
                owes_stream: choices.one_in(2),
            })
            .collect(),
        placements: PlacementRun {
            first_sequence: choices.odd_u32(),
            placements: (0..placements).map(|_| placement(choices)).collect(),
        },
    }
}

fn placement(choices: &mut Choices<'_>) -> Placement {
    let keys = if choices.one_in(8) {
        MAX_KEYS
    } else {
        choices.below(6)
    };
    Placement {
        kind: choices.pick(&[PlacementKind::Placed, PlacementKind::Withdrawn]),
        slot: Slot(u16::from(choices.byte() % 64)),
        epoch: choices.odd_u32(),
        uncached_tokens: choices.odd_u32(),
        prompt_tokens: choices.odd_u32(),
        renewed: u8::try_from(choices.below(keys + 1)).unwrap_or(0),
        keys: (0..keys).map(|_| choices.odd_u64()).collect(),
    }
}
