//! The other workers' journals → what they have open, and their placements, each once.
//!
//! In: journals and archives by slot, as they are read. Out: placements replayed into this worker's index in the order of
//! their numbers, what was missed counted, and tallies to sum. At most one journal a slot is kept, without its placements.

use crate::index::PrefixIndex;
use crate::journal::{Journal, MAX_JOURNALS, PlacementRun, Silence, Tallies};

/// What reading a journal brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct JournalNews {
    /// Placements replayed.
    pub replayed: u32,
    /// Placements that were overwritten before they were read.
    pub missed: u32,
}

/// What reading all journals as one brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MergedNews {
    /// What was taken over.
    pub news: JournalNews,
    /// Publications that are known now, as they stand in shared data.
    pub counts: Vec<u8>,
    /// Slots whose journals must be read themselves.
    pub behind: Vec<u8>,
}

/// What is known of the other workers.
#[derive(Debug, Clone, Default)]
pub(super) struct Peers {
    /// `slots[i]` is journal slot i's.
    slots: Vec<Option<Peer>>,
}

#[derive(Debug, Clone)]
struct Peer {
    journal: Journal,
    /// Number of the next placement; `None` until its first ones were replayed.
    next_sequence: Option<u32>,
}

impl Peers {
    /// Takes over one journal; placements are replayed where there is an index.
    pub(super) fn take(
        &mut self,
        slot: u8,
        mut journal: Journal,
        index: Option<&mut PrefixIndex>,
        archive: impl FnOnce() -> Vec<Vec<u8>>,
        now_ms: u64,
    ) -> JournalNews {
        let at = usize::from(slot);
        if self.slots.len() <= at && slot < MAX_JOURNALS {
            self.slots.resize(at + 1, None);
        }
        let Some(place) = self.slots.get_mut(at) else {
            return JournalNews::default();
        };
        let mut next_sequence = match place {
            Some(peer) if peer.journal.worker == journal.worker => peer.next_sequence,
            Some(_) | None => None,
        };
        // What was merged may be older than what was read from the journal itself.
        let is_older = |peer: &Peer| {
            peer.journal.worker == journal.worker && distance(journal.sequence, peer.journal.sequence) < 0
        };
        if place.as_ref().is_some_and(is_older) {
            return JournalNews::default();
        }
        let run = core::mem::take(&mut journal.placements);
        let worker = journal.worker;
        let mut news = JournalNews::default();
        if let Some(index) = index
            && !run.placements.is_empty()
        {
            let is_behind = next_sequence.is_none_or(|next| distance(run.first_sequence, next) > 0);
            // A worker's first run follows nothing.
            if is_behind && run.first_sequence != 0 {
                for run in archived(archive(), worker, run.first_sequence) {
                    news.replay(&run, &mut next_sequence, index, now_ms);
                }
            }
            news.replay(&run, &mut next_sequence, index, now_ms);
        }
        *place = Some(Peer {
            journal,
            next_sequence,
        });
        news
    }

    /// Whether placements from before those of a merged journal are unknown, so that the journal itself must be read.
    pub(super) fn is_behind(&self, slot: u8, journal: &Journal) -> bool {
        let peer = self.slots.get(usize::from(slot)).and_then(Option::as_ref);
        let next = peer
            .filter(|peer| peer.journal.worker == journal.worker)
            .and_then(|peer| peer.next_sequence);
        let first = journal.placements.first_sequence;
        match next {
            Some(next) => distance(first, next) > 0,
            None => first != 0,
        }
    }

    /// Hosts that are silent towards any but `own_worker`, and since when; those whose heartbeat stopped tell nothing.
    pub(super) fn silences(&self, own_worker: u64, now_ms: u64) -> impl Iterator<Item = &Silence> {
        let journals = self.slots.iter().flatten().map(|peer| &peer.journal);
        journals
            .filter(move |journal| journal.worker != own_worker && !journal.is_stale(now_ms))
            .flat_map(|journal| &journal.silences)
    }

    /// What all but `own_worker` have open.
    pub(super) fn tallies(&self, own_worker: u64, now_ms: u64) -> Tallies {
        let journals = self.slots.iter().flatten().map(|peer| &peer.journal);
        Tallies::sum(journals, own_worker, now_ms)
    }
}

impl JournalNews {
    pub(super) fn add(&mut self, other: Self) {
        self.replayed = self.replayed.saturating_add(other.replayed);
        self.missed = self.missed.saturating_add(other.missed);
    }

    fn replay(&mut self, run: &PlacementRun, next: &mut Option<u32>, index: &mut PrefixIndex, now_ms: u64) {
        let expected = next.unwrap_or(run.first_sequence);
        let ahead = distance(run.first_sequence, expected);
        let missed = u32::try_from(ahead).unwrap_or(0);
        self.missed = self.missed.saturating_add(missed);
        let known = usize::try_from(ahead.saturating_neg()).unwrap_or(0);
        for placement in run.placements.iter().skip(known) {
            self.replayed = self.replayed.saturating_add(1);
            index.replay(placement, now_ms);
        }
        if known < run.placements.len() {
            *next = Some(run.next_sequence());
        }
    }
}

/// The archived runs of a worker that come before `open`, oldest first.
fn archived(blobs: Vec<Vec<u8>>, worker: u64, open: u32) -> Vec<PlacementRun> {
    let decoded = blobs.iter().filter_map(|blob| PlacementRun::decode(blob));
    let mut runs: Vec<PlacementRun> = Vec::new();
    for (writer, run) in decoded {
        let before_open = distance(run.first_sequence, open);
        if writer == worker && before_open < 0 {
            // Fifteen at most: a sort would be more code than work.
            let is_later = |other: &PlacementRun| distance(other.first_sequence, open) > before_open;
            let at = runs.iter().position(is_later).unwrap_or(runs.len());
            runs.insert(at, run);
        }
    }
    runs
}

/// How far `to` is after `from`, for numbers that wrap around.
const fn distance(to: u32, from: u32) -> i32 {
    to.wrapping_sub(from).cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::candidate::Charge;
    use crate::config::Config;
    use crate::host_table::{Host, HostTable, Slot};
    use crate::journal::{ClosedRun, JOURNAL_TTL_MS, TALLY_TTL_MS};
    use crate::pool::{DecisionInput, Outcome, Pool};
    use crate::prompt::{Api, BodyEnd};

    const NOW_MS: u64 = 1_790_000_000_000;
    const PATH: &str = "/v1/chat/completions";

    fn pool(worker: u64) -> Pool {
        let config =
            br#"{"strategy": "cache_aware", "pools": {"llm": {"discovery": {"admin_cluster": "admin"}}}}"#;
        let config = Config::parse(config).unwrap();
        let mut pool = Pool::new(config.pools[0].clone(), worker);
        pool.apply_table(&table(1), NOW_MS).unwrap();
        pool
    }

    fn table(epoch_of_slot_0: u32) -> Vec<u8> {
        let host = |slot: u16| Host {
            slot: Slot(slot),
            epoch: if slot == 0 { epoch_of_slot_0 } else { 1 },
            address: format!("10.0.0.{slot}:8000"),
            weight: 1,
            ..Host::default()
        };
        HostTable {
            published_ms: NOW_MS,
            hosts: (0..8).map(host).collect(),
        }
        .encode()
    }

    /// A chat whose turns are told by `id`.
    fn body(id: u64, turns: u64) -> String {
        let turn = |turn: u64| {
            let role = if turn.is_multiple_of(2) {
                "user"
            } else {
                "assistant"
            };
            let text = format!("{id} says {turn} ").repeat(80);
            format!(r#"{{"role":"{role}","content":"{text}"}}"#)
        };
        let messages: Vec<String> = (0..turns).map(turn).collect();
        format!(r#"{{"model":"m","messages":[{}]}}"#, messages.join(","))
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

    fn ask(pool: &mut Pool, id: u64, turns: u64, now_ms: u64) -> Outcome {
        pool.decide(&input(&body(id, turns)), now_ms)
    }

    /// What a pool believes of a chat, host by host.
    fn depths(pool: &mut Pool, id: u64, turns: u64) -> Vec<(Slot, u32)> {
        let keys = pool.keys_of(&input(&body(id, turns))).keys;
        let mut depths = pool.index().lookup(&keys, NOW_MS).as_slice().to_vec();
        depths.sort_unstable();
        depths
    }

    /// A journal slot as it stands in shared data.
    #[derive(Default)]
    struct Shared {
        journal: Vec<u8>,
        archive: Vec<ClosedRun>,
    }

    impl Shared {
        fn publish(&mut self, pool: &mut Pool, now_ms: u64) {
            for run in pool.take_closed_runs() {
                self.archive.retain(|old| old.place != run.place);
                self.archive.push(run);
            }
            self.journal = pool.journal(now_ms).encode();
        }

        fn read(&self, by: &mut Pool, now_ms: u64) -> JournalNews {
            self.read_slot(1, by, now_ms)
        }

        fn read_slot(&self, slot: u8, by: &mut Pool, now_ms: u64) -> JournalNews {
            let archive = || self.archive.iter().map(|run| run.blob.clone()).collect();
            by.apply_journal(slot, &self.journal, archive, now_ms).unwrap()
        }
    }

    #[test]
    fn a_placement_on_one_worker_is_used_on_another_and_applied_once() {
        let (mut here, mut there) = (pool(1), pool(2));
        let mut shared = Shared::default();
        let placed = ask(&mut here, 7, 5, NOW_MS).decision;
        assert_eq!(placed.matched_bytes, 0);
        shared.publish(&mut here, NOW_MS);
        let news = shared.read(&mut there, NOW_MS);
        assert_eq!(
            news,
            JournalNews {
                replayed: 1,
                missed: 0
            }
        );
        assert_eq!(
            shared.read(&mut there, NOW_MS),
            JournalNews::default(),
            "the same journal again"
        );
        let next = ask(&mut there, 7, 7, NOW_MS).decision;
        assert_eq!(next.hosts.first(), placed.hosts.first());
        assert_eq!(next.matched_bytes, placed.prompt_bytes);
    }

    /// The host that a worker sent a chat to for a stream, or for a whole answer, and the charge, which is open.
    fn asked(here: &mut Pool, for_stream: bool) -> (Slot, Charge) {
        let mut placed = ask(here, 7, 5, NOW_MS);
        placed.is_streaming = for_stream;
        let home = placed.decision.hosts.first().unwrap();
        (home, here.charge(&mut placed, NOW_MS).unwrap())
    }

    /// Where another worker, which knows nothing else, sends the next turn of that chat after it read the journal.
    fn next_choice(shared: &Shared, now_ms: u64) -> Option<Slot> {
        let mut there = pool(2);
        shared.read(&mut there, now_ms);
        there.settle_journals(now_ms);
        ask(&mut there, 7, 7, now_ms).decision.hosts.first()
    }

    #[test]
    fn a_host_that_is_silent_towards_one_worker_is_left_by_all() {
        let mut here = pool(1);
        let mut shared = Shared::default();
        let (home, mut charge) = asked(&mut here, true);
        // What it takes to compute the prompt, four times, and a hiccup.
        let silent_ms = NOW_MS + 4_000;
        for (now_ms, is_left) in [(NOW_MS + 500, false), (silent_ms, true)] {
            shared.publish(&mut here, now_ms);
            let next = next_choice(&shared, now_ms);
            assert_eq!(next != Some(home), is_left, "{} ms", now_ms - NOW_MS);
        }
        // Nobody hears of the worker any more.
        assert_eq!(next_choice(&shared, silent_ms + TALLY_TTL_MS + 1), Some(home));
        // The host answers after all.
        shared.publish(&mut here, silent_ms + 2_000);
        assert_ne!(next_choice(&shared, silent_ms + 2_000), Some(home));
        here.answer_began(&mut charge, silent_ms + 2_100);
        here.finish(&mut charge, silent_ms + 2_200);
        shared.publish(&mut here, silent_ms + 2_200);
        assert_eq!(next_choice(&shared, silent_ms + 2_200), Some(home));
    }

    #[test]
    fn one_whole_answer_that_takes_long_is_nobody_elses_concern() {
        let mut here = pool(1);
        let mut shared = Shared::default();
        // One came soon, so that there is a usual time.
        let (home, mut charge) = asked(&mut here, false);
        here.answer_began(&mut charge, NOW_MS + 100);
        here.finish(&mut charge, NOW_MS + 100);
        let _open = asked(&mut here, false);
        let now_ms = NOW_MS + 9_000;
        shared.publish(&mut here, now_ms);
        assert_eq!(next_choice(&shared, now_ms), Some(home));
        let own = ask(&mut here, 7, 7, now_ms);
        assert_ne!(own.decision.hosts.first(), Some(home));

        // A second worker says the same.
        let mut there = pool(2);
        for worker in [1, 3] {
            let mut journal = Journal::decode(&shared.journal).unwrap();
            journal.worker = worker;
            shared.journal = journal.encode();
            shared.read_slot(u8::try_from(worker).unwrap(), &mut there, now_ms);
        }
        there.settle_journals(now_ms);
        let next = ask(&mut there, 7, 7, now_ms);
        assert_ne!(next.decision.hosts.first(), Some(home));
    }

    #[test]
    fn a_host_that_answers_a_worker_is_not_silent_to_it_whatever_it_owes_another() {
        let (mut here, mut there) = (pool(1), pool(2));
        let mut shared = Shared::default();
        let (home, _charge) = asked(&mut here, true);
        shared.publish(&mut here, NOW_MS);
        shared.read(&mut there, NOW_MS);
        let mut own = ask(&mut there, 7, 7, NOW_MS + 10);
        assert_eq!(own.decision.hosts.first(), Some(home));
        let mut own = there.charge(&mut own, NOW_MS + 10).unwrap();
        there.answer_began(&mut own, NOW_MS + 1_000);
        there.finish(&mut own, NOW_MS + 1_000);
        shared.publish(&mut here, NOW_MS + 4_000);
        assert_ne!(next_choice(&shared, NOW_MS + 4_000), Some(home));
        shared.read(&mut there, NOW_MS + 4_000);
        there.settle_journals(NOW_MS + 4_000);
        let next = ask(&mut there, 7, 9, NOW_MS + 4_000);
        assert_eq!(next.decision.hosts.first(), Some(home));
    }

    #[test]
    fn silences_of_another_epoch_or_from_the_future_cost_nothing() {
        let mut here = pool(1);
        let mut shared = Shared::default();
        let (home, _charge) = asked(&mut here, true);
        let now_ms = NOW_MS + 4_000;
        for (epoch, since_ms, is_left) in [
            (1, NOW_MS, true),
            (2, NOW_MS, false),
            (1, u64::MAX, false),
            (1, NOW_MS + 60_000, false),
        ] {
            let silence = Silence {
                slot: home,
                epoch,
                since_ms,
                owes_stream: true,
            };
            let journal = Journal {
                silences: vec![silence],
                ..here.journal(now_ms)
            };
            shared.journal = journal.encode();
            assert_eq!(next_choice(&shared, now_ms) != Some(home), is_left, "{silence:?}");
        }
    }

    #[test]
    fn workers_that_exchange_journals_come_to_predict_the_same() {
        let mut pools = [pool(1), pool(2), pool(3)];
        let mut shared = [Shared::default(), Shared::default(), Shared::default()];
        let exchange = |pools: &mut [Pool; 3], shared: &[Shared; 3], skipped: u64, now_ms| {
            for reader in 0..3u8 {
                for writer in (0..3u8).filter(|writer| *writer != reader) {
                    if u64::from(reader + writer) % 3 != skipped {
                        let news = shared[usize::from(writer)].read_slot(
                            writer,
                            &mut pools[usize::from(reader)],
                            now_ms,
                        );
                        assert_eq!(news.missed, 0);
                    }
                }
            }
        };
        let mut now_ms = NOW_MS;
        for round in 0..600u64 {
            for n in 0..3u64 {
                now_ms += 7;
                let at = usize::try_from(n).unwrap();
                let _ = ask(&mut pools[at], (round * 5 + n) % 17, 1 + round % 9, now_ms);
                shared[at].publish(&mut pools[at], now_ms);
            }
            // Not everyone reads every time.
            exchange(&mut pools, &shared, round % 3, now_ms);
        }
        assert!(
            shared.iter().all(|s| !s.archive.is_empty()),
            "too little for an archive"
        );
        exchange(&mut pools, &shared, 3, now_ms);
        for id in 0..17 {
            let [first, second, third] = pools.each_mut().map(|pool| depths(pool, id, 9));
            assert!(!first.is_empty());
            assert_eq!(first, second, "{id}");
            assert_eq!(first, third, "{id}");
        }
    }

    #[test]
    fn a_late_worker_catches_up_from_the_archive_and_counts_what_it_lost() {
        let (mut here, mut new, mut slow) = (pool(1), pool(2), pool(3));
        let mut shared = Shared::default();
        let _ = ask(&mut here, 0, 9, NOW_MS);
        shared.publish(&mut here, NOW_MS);
        shared.read(&mut slow, NOW_MS);
        for id in 1..60 {
            let _ = ask(&mut here, id, 9, NOW_MS);
            shared.publish(&mut here, NOW_MS);
        }
        // A new build reads what the old one left, although its heartbeat has stopped.
        let later_ms = NOW_MS + 10 * JOURNAL_TTL_MS;
        assert_eq!(
            shared.read(&mut new, later_ms),
            JournalNews {
                replayed: 60,
                missed: 0
            }
        );
        for id in 0..60 {
            assert_eq!(depths(&mut new, id, 9), depths(&mut here, id, 9), "{id}");
        }
        new.settle_journals(later_ms);
        assert_eq!(new.fleet().traffic().in_flight, 0);

        let lost = shared.archive.remove(0);
        let lost = PlacementRun::decode(&lost.blob).unwrap().1.placements.len();
        let news = shared.read(&mut slow, NOW_MS);
        assert_eq!(
            news.missed + 1,
            u32::try_from(lost).unwrap(),
            "the first was read before"
        );
        assert_eq!(news.replayed + news.missed, 59);
    }

    #[test]
    fn a_slot_that_another_worker_took_is_read_from_its_beginning() {
        let (mut first, mut second, mut reader) = (pool(1), pool(2), pool(3));
        let mut shared = Shared::default();
        for id in 0..5 {
            let _ = ask(&mut first, id, 3, NOW_MS);
        }
        shared.publish(&mut first, NOW_MS);
        assert_eq!(shared.read(&mut reader, NOW_MS).replayed, 5);
        let _ = ask(&mut second, 9, 3, NOW_MS);
        shared.publish(&mut second, NOW_MS);
        assert_eq!(
            shared.read(&mut reader, NOW_MS),
            JournalNews {
                replayed: 1,
                missed: 0
            }
        );
        assert_eq!(depths(&mut reader, 9, 3), depths(&mut second, 9, 3));
    }

    #[test]
    fn a_restarted_host_loses_its_predictions_and_placements_of_its_old_epoch_mean_nothing() {
        let (mut here, mut there) = (pool(1), pool(2));
        let mut shared = Shared::default();
        for id in 0..40 {
            let _ = ask(&mut here, id, 3, NOW_MS);
        }
        shared.publish(&mut here, NOW_MS);
        let on_slot_0 = |pool: &mut Pool| {
            let ids = (0..40).filter(|id| depths(pool, *id, 3).iter().any(|(slot, _)| *slot == Slot(0)));
            ids.count()
        };
        assert!(on_slot_0(&mut here) > 0);
        here.apply_table(&table(2), NOW_MS).unwrap();
        there.apply_table(&table(2), NOW_MS).unwrap();
        shared.read(&mut there, NOW_MS);
        assert_eq!((on_slot_0(&mut here), on_slot_0(&mut there)), (0, 0));
        assert!(!depths(&mut there, 1, 3).is_empty() || !depths(&mut there, 2, 3).is_empty());
    }

    #[test]
    fn a_refused_request_is_not_believed_cached_here_or_elsewhere() {
        let (mut here, mut there) = (pool(1), pool(2));
        let mut shared = Shared::default();
        let mut refused = ask(&mut here, 1, 3, NOW_MS);
        let mut charge = here.charge(&mut refused, NOW_MS).unwrap();
        here.prefill_over(&mut charge, NOW_MS);
        let mut moved = ask(&mut here, 2, 3, NOW_MS);
        let mut charge = here.charge(&mut moved, NOW_MS).unwrap();
        let to = Slot((charge.slot.0 + 1) % 8);
        here.move_charge(&mut charge, to, NOW_MS);
        shared.publish(&mut here, NOW_MS);
        shared.read(&mut there, NOW_MS);
        for pool in [&mut here, &mut there] {
            let depths_of = depths(pool, 1, 3);
            assert_eq!(depths_of, []);
            let slots: Vec<Slot> = depths(pool, 2, 3).iter().map(|found| found.0).collect();
            assert_eq!(slots, [to]);
        }
    }

    #[test]
    fn a_configuration_push_keeps_the_index() {
        let mut pool = pool(1);
        let placed = ask(&mut pool, 1, 5, NOW_MS).decision;
        let config = pool.config().clone();
        pool.reconfigure(config);
        assert_eq!(
            ask(&mut pool, 1, 5, NOW_MS).decision.matched_bytes,
            placed.prompt_bytes
        );
    }
}
