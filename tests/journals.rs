//! Many workers that tell each other what they place, through shared data as the filter uses it, without an Envoy.
//!
//! `cargo test --test journals -- --nocapture` prints how many bytes each synchronisation reads.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "helpers of tests may fail as tests do"
)]

use std::collections::BTreeMap;

use warmroute::config::Config;
use warmroute::host_table::{Host, HostTable, Slot};
use warmroute::journal::{
    ClosedRun, Journal, JournalsSeen, MAX_JOURNALS, MERGE_ABOVE, MERGED_BYTES, MERGED_RUN_BYTES,
    MergedJournals, Placement, PlacementRun, Tally, count_publication, merge_is_due,
};
use warmroute::pool::{DecisionInput, MERGED_TTL_MS, Outcome, Pool};
use warmroute::prompt::{Api, BodyEnd};
use warmroute::strategy::Rng;

const NOW_MS: u64 = 1_790_000_000_000;
const PATH: &str = "/v1/chat/completions";
const HOSTS: u16 = 8;

/// Envoy's shared data.
#[derive(Default)]
struct Shared {
    journals: BTreeMap<u8, Vec<u8>>,
    archives: BTreeMap<(u8, u8), Vec<u8>>,
    counts: Vec<u8>,
    merged: Option<Vec<u8>>,
    merge_began: Option<[u8; 8]>,
    merges: u32,
}

struct Worker {
    slot: u8,
    pool: Pool,
    seen: JournalsSeen,
    merges: bool,
    read_bytes: usize,
    archive_bytes: usize,
    reads: usize,
    syncs: usize,
    missed: u32,
    merged_reads: u32,
}

impl Worker {
    /// Workers of one slot choose alike where they know the same.
    fn new(slot: u8, merges: bool) -> Self {
        let config = br#"{"strategy": "cache_aware", "index": {"memory_bytes": 1048576}, "prefix": {"memory_bytes": 65536},
            "pools": {"llm": {"discovery": {"admin_cluster": "admin"}}}}"#;
        let config = Config::parse(config).unwrap();
        let mut pool = Pool::new(config.pools[0].clone(), u64::from(slot) + 1);
        let host = |slot: u16| Host {
            slot: Slot(slot),
            epoch: 1,
            address: format!("10.0.0.{slot}:8000"),
            weight: 1,
            ..Host::default()
        };
        let table = HostTable {
            published_ms: NOW_MS,
            hosts: (0..HOSTS).map(host).collect(),
        };
        pool.apply_table(&table.encode(), NOW_MS).unwrap();
        Self {
            slot,
            pool,
            seen: JournalsSeen::default(),
            merges,
            read_bytes: 0,
            archive_bytes: 0,
            reads: 0,
            syncs: 0,
            missed: 0,
            merged_reads: 0,
        }
    }

    fn publish(&mut self, shared: &mut Shared, now_ms: u64) {
        for ClosedRun { place, blob } in self.pool.take_closed_runs() {
            shared.archives.insert((self.slot, place), blob);
        }
        let journal = self.pool.journal(now_ms).encode();
        shared.journals.insert(self.slot, journal);
        count_publication(&mut shared.counts, self.slot);
    }

    /// As the shell does it.
    fn sync(&mut self, shared: &mut Shared, all: bool, now_ms: u64) {
        self.syncs += 1;
        self.note(shared.counts.len());
        let counts = shared.counts.clone();
        let mut slots = self.seen.moved(&counts, all);
        let mut is_merging = false;
        if self.merges && !all && slots.len() > MERGE_ABOVE {
            self.note(8);
            if merge_is_due(shared.merge_began.as_ref().map(|b| &b[..]), now_ms) {
                shared.merge_began = Some(now_ms.to_le_bytes());
                slots = (0..MAX_JOURNALS).collect();
                is_merging = true;
            } else if let Some(blob) = &shared.merged {
                self.note(blob.len());
                if let Some(merged) = self.pool.apply_merged(blob, now_ms).unwrap() {
                    self.missed += merged.news.missed;
                    self.merged_reads += 1;
                    self.seen.saw_all(&merged.counts);
                    slots = merged.behind;
                }
            }
        }
        for slot in slots {
            let Some(journal) = shared.journals.get(&slot) else {
                break;
            };
            self.note(journal.len());
            let mut archive_bytes = 0;
            let archive = || {
                let runs = shared.archives.range((slot, 0)..=(slot, u8::MAX));
                let runs: Vec<Vec<u8>> = runs.map(|(_, blob)| blob.clone()).collect();
                archive_bytes = runs.iter().map(Vec::len).sum();
                runs
            };
            self.missed += self
                .pool
                .apply_journal(slot, journal, archive, now_ms)
                .unwrap()
                .missed;
            if archive_bytes > 0 {
                self.note(archive_bytes);
                self.archive_bytes += archive_bytes;
            }
            self.seen.saw(slot, &counts);
        }
        if is_merging {
            let blobs = shared
                .journals
                .iter()
                .map(|(slot, blob)| (*slot, blob.as_slice()));
            shared.merged = MergedJournals::of(blobs, &counts, now_ms).encode();
            shared.merges += 1;
        }
        self.pool.settle_journals(now_ms);
    }

    fn note(&mut self, bytes: usize) {
        self.read_bytes += bytes;
        self.reads += 1;
    }
}

/// Turns of many chats.
fn body(id: u64, turns: u64) -> String {
    let turn = |turn: u64| {
        let role = ["user", "assistant"][usize::try_from(turn % 2).unwrap()];
        let text = format!("{id} says {turn} ").repeat(60);
        format!(r#"{{"role":"{role}","content":"{text}"}}"#)
    };
    let messages: Vec<String> = (0..turns).map(turn).collect();
    format!(r#"{{"model":"m","messages":[{}]}}"#, messages.join(","))
}

fn ask(pool: &mut Pool, id: u64, turns: u64, now_ms: u64) -> Outcome {
    let body = body(id, turns);
    let input = DecisionInput {
        api: Api::from_path(PATH).unwrap(),
        path: PATH,
        body: Some((body.as_bytes(), BodyEnd::EndOfStream)),
        content_length: None,
        tenant: None,
        session: None,
    };
    pool.decide(&input, now_ms)
}

struct Run {
    workers: Vec<Worker>,
    /// One that only reads, merged journals where they help, and one that reads each.
    readers: [Worker; 2],
    shared: Shared,
}

/// Traffic of 1000 requests a second over so many workers for so many ms; each publishes and reads as the filter does.
fn run(workers: u8, merges: bool, run_ms: u64, seed: u64) -> Run {
    let mut shared = Shared::default();
    let mut all: Vec<Worker> = (0..workers).map(|slot| Worker::new(slot, merges)).collect();
    let mut readers = [Worker::new(MAX_JOURNALS, true), Worker::new(MAX_JOURNALS, false)];
    for worker in &mut all {
        worker.publish(&mut shared, NOW_MS);
    }
    let mut open = BTreeMap::new();
    let mut rng = Rng::new(seed);
    let mut synced = vec![0u64; usize::from(workers)];
    let mut published = vec![0u64; usize::from(workers)];
    for step in 0..run_ms {
        let now_ms = NOW_MS + step;
        let at = rng.below(usize::from(workers));
        let (id, turns) = (rng.next_u64() % 400, 1 + rng.next_u64() % 8);
        let worker = &mut all[at];
        if now_ms - synced[at] >= 20 {
            let all = synced[at] % 1000 > now_ms % 1000;
            synced[at] = now_ms;
            worker.sync(&mut shared, all, now_ms);
        }
        let mut outcome = ask(&mut worker.pool, id, turns, now_ms);
        let charge = worker.pool.charge(&mut outcome, now_ms);
        open.insert((step + 400, step), (at, charge));
        let mut changed = vec![at];
        while let Some(entry) = open.first_entry().filter(|entry| entry.key().0 <= step) {
            let (at, charge) = entry.remove();
            let worker = &mut all[at];
            if let Some(mut charge) = charge {
                worker.pool.answer_began(&mut charge, now_ms);
                worker.pool.finish(&mut charge, now_ms);
            }
            changed.push(at);
        }
        for at in changed {
            if now_ms - published[at] >= 10 {
                published[at] = now_ms;
                all[at].publish(&mut shared, now_ms);
            }
        }
        if merges && step % 20 == 0 {
            readers
                .iter_mut()
                .for_each(|reader| reader.sync(&mut shared, false, now_ms));
        }
    }
    Run {
        workers: all,
        readers,
        shared,
    }
}

#[test]
fn a_worker_that_reads_merged_journals_knows_what_one_knows_that_reads_each() {
    for workers in [16, 32] {
        let Run {
            workers: mut all,
            readers: [mut merged, mut single],
            mut shared,
        } = run(workers, true, 3000, 7);
        let reads: u32 = all.iter().map(|worker| worker.merged_reads).sum();
        assert!(shared.merges > 50 && reads > 500, "{} {reads}", shared.merges);
        assert!(merged.merged_reads > 50 && single.merged_reads == 0);
        let now_ms = NOW_MS + 3030;
        all.iter_mut()
            .for_each(|worker| worker.publish(&mut shared, now_ms));
        all[0].sync(&mut shared, false, now_ms);
        let reads = merged.merged_reads;
        merged.sync(&mut shared, false, now_ms);
        assert_eq!(merged.merged_reads, reads + 1);
        single.sync(&mut shared, false, now_ms);
        for worker in all.iter().chain([&merged, &single]) {
            assert_eq!(worker.missed, 0, "{workers}: placements were lost");
        }
        assert!(merged.pool.fleet().traffic().in_flight > 300);
        assert_eq!(merged.pool.fleet().traffic(), single.pool.fleet().traffic());
        let mut warm = 0;
        for id in 0..400 {
            let [a, b] = [&mut merged, &mut single].map(|reader| ask(&mut reader.pool, id, 9, now_ms));
            assert_eq!(a.decision, b.decision, "{workers}: {id}");
            warm += u32::from(a.decision.matched_bytes > 0);
        }
        assert!(warm > 300, "{warm}");
    }
}

#[test]
fn bytes_read_in_a_synchronisation() {
    let mut per_sync = BTreeMap::new();
    for workers in [4, 8, 16, 32] {
        for merges in [false, true] {
            let all = run(workers, merges, 4000, 3).workers;
            let syncs: usize = all.iter().map(|worker| worker.syncs).sum();
            let bytes: usize = all.iter().map(|worker| worker.read_bytes).sum();
            let reads: usize = all.iter().map(|worker| worker.reads).sum();
            let archives: usize = all.iter().map(|worker| worker.archive_bytes).sum();
            println!(
                "{workers} workers, merged {merges}: {} bytes ({} of archives) in {}.{} reads",
                bytes / syncs,
                archives / syncs,
                reads / syncs,
                reads * 10 / syncs % 10
            );
            per_sync.insert((workers, merges), bytes / syncs);
        }
    }
    assert_eq!(per_sync[&(4, true)], per_sync[&(4, false)]);
    assert_eq!(per_sync[&(8, true)], per_sync[&(8, false)]);
    assert!(per_sync[&(32, true)] * 2 < per_sync[&(32, false)], "{per_sync:?}");
}

fn journal(worker: u64, first_sequence: u32, placements: usize) -> Journal {
    let placement = Placement {
        keys: vec![worker; 4],
        ..Placement::default()
    };
    Journal {
        worker,
        sequence: 1,
        heartbeat_ms: NOW_MS,
        tallies: vec![Tally {
            requests: 1,
            ..Tally::default()
        }],
        silences: Vec::new(),
        placements: PlacementRun {
            first_sequence,
            placements: vec![placement; placements],
        },
    }
}

fn merge(journals: &[Journal], now_ms: u64) -> MergedJournals {
    let blobs: Vec<Vec<u8>> = journals.iter().map(Journal::encode).collect();
    let blobs = (0u8..).zip(blobs.iter().map(Vec::as_slice));
    MergedJournals::of(blobs, &[1, 2, 3, 4], now_ms)
}

#[test]
fn merged_journals_round_trip_and_damage_is_refused() {
    let merged = merge(&[journal(1, 0, 3), journal(2, 7, 0), journal(3, 9, 1)], NOW_MS);
    let blob = merged.encode().unwrap();
    assert_eq!(MergedJournals::decode(&blob), Ok(merged));
    for at in 0..blob.len() {
        assert!(MergedJournals::decode(&blob[..at]).is_err());
        let mut damaged = blob.clone();
        damaged[at] ^= 1 << (at % 8);
        assert!(MergedJournals::decode(&damaged).is_err(), "byte {at}");
    }
    assert!(MergedJournals::decode(&vec![0; MERGED_BYTES + 1]).is_err());
    assert!(MergedJournals::decode(&journal(1, 0, 1).encode()).is_err());
}

#[test]
fn the_newest_placements_of_all_are_kept_within_the_bound() {
    let journals: Vec<Journal> = (0..64)
        .map(|worker| journal(worker + 1, 100, if worker < 4 { 120 } else { 2 }))
        .collect();
    let merged = merge(&journals, NOW_MS);
    let blob = merged.encode().unwrap();
    assert!(blob.len() < MERGED_RUN_BYTES + 64 * 80, "{}", blob.len());
    let mut kept = Vec::new();
    for (_, journal) in &merged.journals {
        let run = &journal.placements;
        kept.push(run.placements.len());
        let all = if journal.worker <= 4 { 120 } else { 2 };
        assert_eq!(run.next_sequence(), 100 + all, "the newest");
    }
    assert!(kept[4..].iter().all(|count| *count == 2), "{kept:?}");
    assert!(kept[..4].iter().all(|count| (45..60).contains(count)), "{kept:?}");
}

#[test]
fn stopped_workers_and_what_is_no_journal_are_left_out() {
    let mut stopped = journal(2, 0, 1);
    stopped.heartbeat_ms = NOW_MS - 60_000;
    let merged = merge(&[journal(1, 0, 1), stopped], NOW_MS);
    assert_eq!(merged.journals.len(), 1);
    let merged = MergedJournals::of([(3, &b"damaged"[..])].into_iter(), &[], NOW_MS);
    assert_eq!(merged.journals, []);
}

#[test]
fn a_reader_that_lacks_earlier_placements_turns_to_the_journal() {
    let mut reader = Worker::new(9, true).pool;
    let blob = merge(&[journal(1, 0, 3), journal(2, 7, 3)], NOW_MS)
        .encode()
        .unwrap();
    let merged = reader.apply_merged(&blob, NOW_MS).unwrap().unwrap();
    assert_eq!((merged.news.replayed, merged.behind.as_slice()), (3, &[1][..]));
    let later = merge(&[journal(1, 2, 3), journal(2, 7, 3)], NOW_MS);
    let merged = reader
        .apply_merged(&later.encode().unwrap(), NOW_MS)
        .unwrap()
        .unwrap();
    assert_eq!(
        (merged.news.replayed, merged.news.missed),
        (2, 0),
        "each placement once"
    );
    let gap = merge(&[journal(1, 6, 3)], NOW_MS).encode().unwrap();
    assert_eq!(reader.apply_merged(&gap, NOW_MS).unwrap().unwrap().behind, [0]);
}

#[test]
fn merged_journals_that_are_old_or_older_than_what_is_known_change_nothing() {
    let mut reader = Worker::new(9, true).pool;
    let blob = merge(&[journal(1, 0, 3)], NOW_MS).encode().unwrap();
    let late_ms = NOW_MS + MERGED_TTL_MS + 1;
    assert_eq!(reader.apply_merged(&blob, late_ms), Ok(None));
    let mut newer = journal(1, 0, 4);
    newer.sequence = 2;
    newer.tallies.clear();
    reader
        .apply_journal(0, &newer.encode(), Vec::new, NOW_MS)
        .unwrap();
    let merged = reader.apply_merged(&blob, NOW_MS).unwrap().unwrap();
    assert_eq!(merged.news.replayed, 0);
    reader.settle_journals(NOW_MS);
    assert_eq!(reader.fleet().traffic().in_flight, 0, "the newer tallies stay");
}
