//! Every cache, journal, queue and buffer at its bound: filled to it, and one more. `docs/bounds.md` lists them.
//!
//! Where a bound is in bytes, an allocator counts what is really held.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::cast_possible_truncation,
    clippy::indexing_slicing,
    clippy::string_slice,
    clippy::unwrap_used,
    reason = "helpers of tests may fail as tests do"
)]

use std::collections::BTreeSet;

use serde_json::{Value, json};
use warmroute::candidate::{Fleet, FleetSettings};
use warmroute::chunk::{ChunkHash, PrefixKey, PrefixKeys};
use warmroute::config::{Config, PoolConfig};
use warmroute::discovery::{self, DiscoveryError, MAX_ANSWER_BYTES};
use warmroute::exchange::{Exchange, RequestHead, ResponseHead, Step};
use warmroute::host_table::{Host, HostTable, MAX_ADAPTERS, MAX_ADDRESS_BYTES, MAX_HOSTS, Slot};
use warmroute::index::{IndexSettings, MAX_MATCHES, NewPlacement, PrefixIndex};
use warmroute::journal::{
    ARCHIVED_RUNS, Journal, JournalError, MAX_JOURNALS, MAX_KEYS, MAX_SILENCES, MAX_TALLIES, MERGED_BYTES,
    MergedJournals, Placement, PlacementLog, RUN_BYTES, Silence, Tally,
};
use warmroute::late_fields::LateFields;
use warmroute::load::{self, MAX_METRICS_BYTES, MAX_METRICS_LINES, Preset};
use warmroute::poller::{Answer, Call, MAX_CALLS, MetricsConfig, Poller, PollerConfig};
use warmroute::pool::Pool;
use warmroute::prompt::{Api, BodyEnd, Prompt, PromptInput, PromptOptions, extract};
use warmroute::recent::{RecentPrefixes, RecentSettings, Traffic};
use warmroute::shared_keys::PoolKeys;
use warmroute::usage::{AnswerForm, AnswerTail, TAIL_BYTES};

#[path = "support/counting.rs"]
mod counting;

use counting::{Counting, measure};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const NOW_MS: u64 = 1_790_000_000_000;
const CHAT: &str = "/v1/chat/completions";

#[test]
fn the_index_takes_the_bytes_that_it_says_and_never_more() {
    for memory_bytes in [262_144, 1 << 20, 5_000_000] {
        let (mut index, empty, _) = measure(|| {
            let mut index = PrefixIndex::new(IndexSettings {
                memory_bytes,
                ..IndexSettings::default()
            });
            index.update_hosts(&table(8));
            index
        });
        assert!(empty < 200_000, "{empty} bytes before the first placement");
        let mut numbers = 0..;
        let mut place = |index: &mut PrefixIndex, count: usize| {
            for number in numbers.by_ref().take(count) {
                let placed = NewPlacement {
                    slot: Slot((number % 8) as u16),
                    uncached_tokens: 1000,
                    prompt_tokens: 2000,
                };
                index.place(&keys(number, 300), placed, NOW_MS + number);
            }
        };
        let ((), first, _) = measure(|| place(&mut index, 1));
        let ((), taken, peak) = measure(|| place(&mut index, 1000));
        assert_eq!((empty + first + taken).cast_unsigned(), index.memory_bytes());
        assert!(index.memory_bytes() <= memory_bytes as usize);
        assert!(peak - taken < 10_000, "{peak} at most, {taken} stay");
        let ((), grown, peak) = measure(|| place(&mut index, 1000));
        assert_eq!(grown, 0, "of {memory_bytes}");
        assert!(peak < 10_000, "{peak} in between");
    }
}

#[test]
fn the_counts_of_prefixes_take_the_bytes_that_they_say_and_never_more() {
    for memory_bytes in [16_384, 1 << 20, 3_000_000] {
        let settings = RecentSettings {
            memory_bytes,
            ..RecentSettings::default()
        };
        let (mut recent, taken, _) = measure(|| RecentPrefixes::new(settings));
        assert_eq!(taken.cast_unsigned(), recent.memory_bytes());
        assert!(recent.memory_bytes() <= memory_bytes as usize);
        let prompts: Vec<PrefixKeys> = (0..2000).map(|number| keys(number, 64)).collect();
        let traffic = Traffic {
            hosts: 8,
            in_flight: 100,
        };
        let ((), grown, peak) = measure(|| {
            for (at, prompt) in (0..).zip(&prompts) {
                recent.observe(prompt, traffic, NOW_MS + at);
            }
        });
        assert_eq!((grown, peak), (0, 0));
    }
}

#[test]
fn late_fields_take_no_more_than_their_bound_while_they_turn_over() {
    let prompts: Vec<Prompt> = (0..3000).map(prompt).collect();
    // Bounds of which the entries fill their tables well and badly.
    for bound_bytes in [4096u32, 100_000, 262_144, 300_000, 1 << 20] {
        let ((late, ()), held, peak) = measure(|| {
            let mut late = LateFields::of_bytes(bound_bytes);
            assert_eq!(late.memory_bytes(), 0, "an idle worker holds nothing");
            let () = prompts.iter().for_each(|prompt| late.remember(prompt));
            (late, ())
        });
        assert_eq!(held.cast_unsigned(), late.memory_bytes(), "of {bound_bytes}");
        assert!(peak <= bound_bytes as isize, "{peak} of {bound_bytes}");
        assert!(
            late.entry_count() >= bound_bytes as usize / 512,
            "{} entries",
            late.entry_count()
        );
    }
}

#[test]
fn a_worker_that_has_seen_everything_holds_no_more() {
    let settings = json!({
        "index": {"memory_bytes": 262_144},
        "prefix": {"memory_bytes": 16_384},
        "late_field_bytes": 4096,
    });
    let bodies: Vec<String> = (0..64).map(|number| chat(number, 20_000)).collect();
    let mut now_ms = NOW_MS;
    let (mut pool, _, _) = measure(|| Pool::new(config(&settings), 1));
    let mut serve = |pool: &mut Pool, rounds: u64| {
        for round in 0..rounds {
            // Other hosts each time, as many as there can be, with all that one can have.
            let mut table = table(MAX_HOSTS as u16);
            for host in &mut table.hosts {
                host.epoch = round as u32;
                host.address = format!(
                    "10.{}.{}.{}:8000",
                    round % 200,
                    host.slot.0 / 250,
                    host.slot.0 % 250
                );
                host.load.adapters = (0..MAX_ADAPTERS as u64).collect();
            }
            pool.apply_table(&table.encode(), now_ms).unwrap();
            for body in &bodies {
                now_ms += 10;
                let (mut exchange, _) = Exchange::start(pool, Api::OpenAiChat, head(), true, now_ms);
                exchange.decide(pool, body.as_bytes(), BodyEnd::EndOfStream, now_ms);
                exchange.on_end(pool, now_ms);
            }
            pool.take_closed_runs();
            pool.journal(now_ms);
        }
    };
    serve(&mut pool, 3);
    let ((), grown, _) = measure(|| serve(&mut pool, 20));
    assert!(grown.abs() < 20_000, "{grown} bytes more");
}

#[test]
fn a_host_remembers_256_open_prefills_and_sums_the_rest() {
    let mut fleet = Fleet::new(FleetSettings::default());
    fleet.update(&table(1), NOW_MS);
    let charge = |fleet: &mut Fleet| fleet.charge(Slot(0), 10, NOW_MS);
    let (mut charges, to_the_bound, _) = measure(|| (0..256).map(|_| charge(&mut fleet)).collect::<Vec<_>>());
    let list_bytes = (charges.capacity() * size_of_val(&charges[0])).cast_signed();
    assert!(
        to_the_bound - list_bytes <= 256 * 12 + 64,
        "{to_the_bound}, {list_bytes} of it the test's"
    );
    charges.reserve_exact(1000);
    let ((), beyond, _) = measure(|| charges.extend((0..1000).map(|_| charge(&mut fleet))));
    assert_eq!(beyond, 0);
    assert_eq!(fleet.own_tallies(NOW_MS).next(), Some((Slot(0), 1, 1256, 12_560)));
    charges.iter_mut().for_each(|charge| fleet.finish(charge, NOW_MS));
    assert!(fleet.is_idle() && fleet.own_tallies(NOW_MS).next().is_none());
}

#[test]
fn placements_that_nobody_takes_fill_their_runs_and_the_oldest_go() {
    let mut log = PlacementLog::default();
    let placement = || Placement {
        keys: vec![7; MAX_KEYS],
        ..Placement::default()
    };
    let fill = |log: &mut PlacementLog, count: u32| (0..count).for_each(|_| log.push(placement(), 1));
    let ((), held, _) = measure(|| fill(&mut log, 2000));
    // Closed runs are blobs; the open one is kept as it is, which takes a little more.
    let bound_bytes = (usize::from(ARCHIVED_RUNS) + 2) * (RUN_BYTES + 64);
    assert!(held.cast_unsigned() <= bound_bytes, "{held} of {bound_bytes}");
    let ((), grown, _) = measure(|| fill(&mut log, 20_000));
    assert!(grown.cast_unsigned() < RUN_BYTES, "{grown}");
    let open = log.lend();
    let closed = log.take_closed();
    assert_eq!(closed.len(), usize::from(ARCHIVED_RUNS));
    assert!(
        closed
            .iter()
            .all(|run| run.place < ARCHIVED_RUNS && run.blob.len() <= RUN_BYTES + 26)
    );
    assert!(open.encode(1).len() <= RUN_BYTES + 26);
    assert_eq!(open.next_sequence(), 22_000, "what was lost is counted");
}

#[test]
fn a_journal_has_a_tally_for_each_host_and_64_silences_and_no_more() {
    let journal = |tallies: u16, silences: u16| Journal {
        worker: 1,
        heartbeat_ms: NOW_MS,
        silences: (0..silences)
            .map(|slot| Silence {
                slot: Slot(slot),
                ..Silence::default()
            })
            .collect(),
        tallies: (0..tallies)
            .map(|slot| Tally {
                slot: Slot(slot),
                requests: 1,
                ..Tally::default()
            })
            .collect(),
        ..Journal::default()
    };
    let (tallies, silences) = (MAX_TALLIES as u16, MAX_SILENCES as u16);
    let at_bound = journal(tallies, silences);
    assert_eq!(Journal::decode(&at_bound.encode()), Ok(at_bound.clone()));
    let beyond = journal(tallies + 1, silences + 1);
    assert_eq!(Journal::decode(&beyond.encode()), Ok(at_bound));
}

#[test]
fn merged_journals_are_of_64_slots_and_256_kib() {
    let journal = |tallies: u16| {
        let tallies = (0..tallies).map(|slot| Tally {
            slot: Slot(slot),
            ..Tally::default()
        });
        Journal {
            worker: 1,
            heartbeat_ms: NOW_MS,
            tallies: tallies.collect(),
            ..Journal::default()
        }
    };
    let merged = |slots: u8, tallies: u16| MergedJournals {
        merged_ms: NOW_MS,
        counts: vec![0; 256],
        journals: (0..slots).map(|slot| (slot, journal(tallies))).collect(),
    };
    let fits = merged(MAX_JOURNALS, 220).encode().unwrap();
    assert!(
        fits.len() <= MERGED_BYTES && fits.len() > MERGED_BYTES - 10_000,
        "{}",
        fits.len()
    );
    assert_eq!(MergedJournals::decode(&fits).unwrap().journals.len(), 64);
    assert_eq!(
        merged(MAX_JOURNALS, 240).encode(),
        None,
        "everybody reads the journals themselves then"
    );

    // A slot that no worker can claim would be remembered for ever.
    let beyond = merged(MAX_JOURNALS + 1, 1).encode().unwrap();
    assert_eq!(
        MergedJournals::decode(&beyond),
        Err(JournalError::InvalidSlot(64))
    );
    let mut pool = Pool::new(config(&json!({})), 9);
    assert!(pool.apply_merged(&beyond, NOW_MS).is_err());
    let blob = journal(MAX_TALLIES as u16).encode();
    let read = |pool: &mut Pool, slots: core::ops::Range<u8>| {
        measure(|| {
            slots.for_each(|slot| {
                pool.apply_journal(slot, &blob, Vec::new, NOW_MS).unwrap();
            })
        })
        .1
    };
    let known = read(&mut pool, 0..MAX_JOURNALS);
    assert!(
        known <= 64 * (MAX_TALLIES as isize * 24 + 128) + 16_384,
        "{known}"
    );
    assert_eq!(read(&mut pool, MAX_JOURNALS..255), 0, "slots that there are not");
    assert_eq!(read(&mut pool, 0..MAX_JOURNALS), 0, "the same again");
}

#[test]
fn a_table_has_1024_hosts_of_64_adapters() {
    let mut full = table(MAX_HOSTS as u16);
    for host in &mut full.hosts {
        host.address = "a".repeat(MAX_ADDRESS_BYTES);
        host.load.adapters = vec![7; MAX_ADAPTERS];
    }
    let blob = full.encode();
    assert_eq!(HostTable::decode(&blob), Ok(full.clone()));
    assert!(blob.len() <= TABLE_BYTES, "{}", blob.len());
    full.hosts.push(host(MAX_HOSTS as u16));
    full.hosts[0].load.adapters.push(8);
    assert_eq!(full.encode(), blob, "what is beyond is left out");
    full.hosts[0].address.push('a');
    assert_eq!(
        HostTable::decode(&full.encode()).unwrap().hosts.len(),
        MAX_HOSTS,
        "the next takes its place"
    );
}

#[test]
fn discovery_keeps_1024_endpoints_and_refuses_answers_beyond_32_mib() {
    let answer = |hosts: usize| {
        let mut lines = String::from("llm::added_via_api::false\n");
        for number in 0..hosts {
            let (address, hostname) = (address(number), "h".repeat(10_000));
            lines.push_str(&format!(
                "llm::{address}::hostname::{hostname}\nllm::{address}::health_flags::healthy\n"
            ));
        }
        lines
    };
    let at_bound = discovery::endpoints(answer(MAX_HOSTS).as_bytes(), "llm").unwrap();
    assert_eq!((at_bound.endpoints.len(), at_bound.over_limit), (MAX_HOSTS, 0));
    let text = answer(MAX_HOSTS + 1);
    let (beyond, held, _) = measure(|| discovery::endpoints(text.as_bytes(), "llm").unwrap());
    assert_eq!((beyond.endpoints.len(), beyond.over_limit), (MAX_HOSTS, 1));
    assert!(held < 1 << 20, "{held}: long host names are not kept");

    let mut large = answer(1).into_bytes();
    large.resize(MAX_ANSWER_BYTES, b'\n');
    assert!(discovery::endpoints(&large, "llm").is_ok());
    large.push(b'\n');
    assert_eq!(discovery::endpoints(&large, "llm"), Err(DiscoveryError::TooLarge));
}

#[test]
fn metrics_are_read_up_to_4_mib_and_100000_lines_and_64_adapters() {
    let last = "vllm:num_requests_waiting 3\n";
    let read = |body: &str| load::parse(&Preset::Vllm, body.as_bytes());
    for (padding, most) in [
        ("#\n", 2 * (MAX_METRICS_LINES - 1)),
        (LONG_LINE, MAX_METRICS_BYTES - last.len()),
    ] {
        let lines = most / padding.len();
        let mut body =
            padding.repeat(lines) + &"#".repeat(most - lines * padding.len()).replace('#', "\n") + last;
        assert_eq!(read(&body).map(|load| load.waiting), Ok(Some(3)), "at the bound");
        body.insert(0, '\n');
        assert!(read(&body).is_err(), "one more");
    }
    let names: Vec<String> = (0..=MAX_ADAPTERS)
        .map(|number| format!("adapter-{number}"))
        .collect();
    let body = format!(
        "vllm:lora_requests_info{{running_lora_adapters=\"{}\"}} 1\n{last}",
        names.join(",")
    );
    let (load, held, peak) = measure(|| read(&body).unwrap());
    assert_eq!(load.adapters.len(), MAX_ADAPTERS);
    assert!(held <= 1024 && peak < 16_384, "{held} {peak}");
}

#[test]
fn ten_thousand_pods_leave_a_companion_with_1024_slots_and_16_hosts() {
    let mut companion = Companion::new();
    let mut seen = BTreeSet::new();
    let mut rounds = 0..10_000 / 16;
    let mut churn = |companion: &mut Companion, count: usize| {
        for round in rounds.by_ref().take(count) {
            companion.replace_all(round * 16, 16);
            let table = companion.poller.table(companion.now_ms).clone();
            assert_eq!(table.hosts.len(), 16);
            for host in &table.hosts {
                assert!(usize::from(host.slot.0) < MAX_HOSTS);
                assert!(
                    seen.insert((host.slot, host.epoch)),
                    "a slot and epoch that meant another host"
                );
            }
            assert!(table.encode().len() < 2000);
        }
    };
    churn(&mut companion, 200);
    let before = measure(|| ()).1;
    let ((), grown, _) = measure(|| churn(&mut companion, 425));
    // The set of what was seen is the test's.
    let of_test = 425 * 16 * 40;
    assert!(grown - before < of_test, "{grown} bytes more");
    assert_eq!(seen.len(), 10_000);
}

#[test]
fn a_companion_has_16_scrapes_in_flight_and_8_through_the_pools_cluster() {
    for (cluster, most) in [("engines", 16), ("llm", 8)] {
        let mut companion = Companion::with(MetricsConfig {
            max_in_flight: u16::MAX,
            ..MetricsConfig::of_cluster(cluster)
        });
        companion.replace_all(0, MAX_HOSTS + 1);
        assert_eq!(companion.poller.table(NOW_MS).hosts.len(), MAX_HOSTS);
        assert_eq!(companion.poller.counters().hosts_over_limit, 1);
        let mut scrapes = 0;
        for _ in 0..50 {
            companion.now_ms += 20;
            scrapes += companion
                .tick()
                .iter()
                .filter(|call| call.cluster == cluster)
                .count();
        }
        assert_eq!(scrapes, most, "unanswered ones hold their places");
    }
}

#[test]
fn of_an_answer_to_a_companion_only_what_will_be_read_is_wanted() {
    let mut companion = Companion::new();
    let calls = companion.tick();
    let list = calls.iter().find(|call| call.cluster == "admin").unwrap();
    assert_eq!(
        companion.poller.wanted_bytes(list.token, 200),
        MAX_ANSWER_BYTES + 1
    );
    assert_eq!(companion.poller.wanted_bytes(list.token, 404), 0, "an error page");
    companion.answer_list(list, 0, 4);
    companion.now_ms += 1000;
    let calls = companion.tick();
    let scrape = calls.iter().find(|call| call.cluster == "engines").unwrap();
    assert_eq!(
        companion.poller.wanted_bytes(scrape.token, 200),
        MAX_METRICS_BYTES
    );
    assert_eq!(companion.poller.wanted_bytes(scrape.token, 503), 512, "why");
    assert_eq!(
        companion.poller.wanted_bytes(scrape.token, 404),
        0,
        "an error page"
    );
    companion.poller.on_failure(scrape.token, companion.now_ms);
    assert_eq!(
        companion.poller.wanted_bytes(scrape.token, 200),
        0,
        "an answer that came too late"
    );
}

#[test]
fn a_pool_has_a_fixed_set_of_keys_in_shared_data() {
    let keys = PoolKeys::new("llm");
    let all: BTreeSet<String> = keys.all().collect();
    assert_eq!(all.len(), 6 + 64 + 64 * 15);
    assert!(all.iter().all(|key| key.starts_with("warmroute/1/llm/")));
    for slot in [0, 63, 64, 255] {
        assert!(all.contains(&keys.journal(slot)));
        for place in [0, 14, 15, 255] {
            assert!(all.contains(&keys.archived_run(slot, place)));
        }
    }
    let other: BTreeSet<String> = PoolKeys::new("llm-2").all().collect();
    assert!(all.is_disjoint(&other));
}

#[test]
fn a_prompt_has_at_most_769_keys_of_which_64_are_told() {
    let options = PromptOptions {
        max_prefix_bytes: 4 << 20,
        ..PromptOptions::default()
    };
    let messages: Vec<Value> = (0..4000)
        .map(|number| json!({"role": "user", "content": format!("{number:1000}")}))
        .collect();
    let body = json!({"model": "m", "messages": messages, "tools": [{"a": 1}]}).to_string();
    let extraction = extract(&input(body.as_bytes()), &options);
    let prompt = extraction.prompt.unwrap();
    let keys = prompt.keys(&prompt.namespace);
    assert_eq!(keys.keys.len(), 512 + 256 + 1);
    for count in [64, 768, 20_000] {
        let told = PrefixIndex::anchors(&self::keys(7, count)).len();
        assert!(
            told <= MAX_KEYS && (count < 20_000 || told == MAX_KEYS),
            "{told} of {count}"
        );
    }
}

#[test]
fn reading_a_body_takes_a_small_multiple_of_it_whatever_it_holds() {
    let options = PromptOptions::default();
    let bytes = 768 << 10;
    let text = |unit: &str| unit.repeat(bytes / unit.len());
    let message =
        |content: &str| format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{content}"}}]}}"#);
    for (name, body, end) in [
        ("plain text", message(&text("words ")), BodyEnd::EndOfStream),
        ("escapes", message(&text("\\n")), BodyEnd::EndOfStream),
        (
            "surrogates",
            message(&text("\\ud83d\\ude00")),
            BodyEnd::EndOfStream,
        ),
        (
            "cut in escapes",
            message(&text("\\u00e9"))[..bytes - 3].to_owned(),
            BodyEnd::Limit,
        ),
        (
            "one role",
            format!(r#"{{"messages":[{{"role":"{}"}}]}}"#, text("\\n")),
            BodyEnd::EndOfStream,
        ),
        (
            "content before role",
            format!(
                r#"{{"messages":[{{"content":"{}","role":"user"}}]}}"#,
                text("\\n")
            ),
            BodyEnd::EndOfStream,
        ),
        (
            "messages",
            format!(
                r#"{{"messages":[{}{{}}]}}"#,
                text(r#"{"role":"user","content":"a"},"#)
            ),
            BodyEnd::EndOfStream,
        ),
        (
            "parts",
            format!(
                r#"{{"messages":[{{"content":[{}{{}}]}}]}}"#,
                text(r#"{"type":"text","text":"a"},"#)
            ),
            BodyEnd::EndOfStream,
        ),
        (
            "keys",
            format!(r#"{{{}"prompt":"x"}}"#, text("\"\\u0061\":1,")),
            BodyEnd::EndOfStream,
        ),
        (
            "tool arguments",
            format!(
                r#"{{"messages":[{{"role":"assistant","tool_calls":[{{"function":{{"name":"f","arguments":"{}"}}}}]}}]}}"#,
                text("\\\"")
            ),
            BodyEnd::EndOfStream,
        ),
        (
            "template arguments",
            format!(
                r#"{{"chat_template_kwargs":{{{}"z":1}},"messages":[]}}"#,
                text("\"a\\u0062\":[1],")
            ),
            BodyEnd::EndOfStream,
        ),
        (
            "numbers",
            format!(r#"{{"prompt":[{}1]}}"#, text("1,")),
            BodyEnd::EndOfStream,
        ),
        (
            "batches",
            format!(r#"{{"prompt":[{}"a"]}}"#, text("\"b\",")),
            BodyEnd::EndOfStream,
        ),
        ("brackets", text("["), BodyEnd::EndOfStream),
        (
            "model name",
            format!(r#"{{"model":"{}"}}"#, text("\\n")),
            BodyEnd::EndOfStream,
        ),
        (
            "adapters",
            format!(r#"{{"text":"a","lora_path":[{}"a"]}}"#, text("\"b\",")),
            BodyEnd::EndOfStream,
        ),
    ] {
        for api in [Api::OpenAiChat, Api::OpenAiCompletions, Api::Generate] {
            let given = PromptInput {
                api,
                end,
                ..input(body.as_bytes())
            };
            let (extraction, held, peak) = measure(|| extract(&given, &options));
            assert!(held < 32 << 10, "{name}: {held} bytes are kept");
            assert!(
                peak <= 3 * body.len() as isize + (64 << 10),
                "{name}: {peak} of {} bytes",
                body.len()
            );
            drop(extraction);
        }
    }
}

#[test]
fn a_request_in_flight_keeps_8_kib_whatever_its_headers_and_its_answer() {
    let mut pool = Pool::new(config(&json!({"prefix": {"tenant_header": "x-tenant"}})), 1);
    pool.apply_table(&table(8).encode(), NOW_MS).unwrap();
    let long = "v".repeat(60 << 10);
    let head = RequestHead {
        path: format!("{CHAT}?{long}"),
        tenant: Some(long.clone().into_bytes()),
        session: Some(long.into_bytes()),
        ..head()
    };
    let body = chat(1, 700_000);
    let serve = |pool: &mut Pool, head: &RequestHead| {
        let (mut exchange, _) = Exchange::start(pool, Api::OpenAiChat, head.clone(), true, NOW_MS);
        exchange.decide(pool, body.as_bytes(), BodyEnd::EndOfStream, NOW_MS);
        let answer = ResponseHead {
            status: 200,
            via_upstream: true,
            attempts: 1,
            served_by: Some("10.0.0.1:8000"),
            ..ResponseHead::default()
        };
        exchange.on_response_headers(pool, &answer, NOW_MS);
        let chunk = vec![b'x'; 100_000];
        for _ in 0..50 {
            let wanted = exchange.wants_answer_bytes(chunk.len());
            exchange.on_answer_bytes(&chunk[chunk.len() - wanted..]);
        }
        exchange
    };
    // The index and the queues of the pool are taken with the first.
    let first = serve(&mut pool, &head);
    let (second, held, _) = measure(|| serve(&mut pool, &head));
    assert!(held <= (8 << 10) + 4096, "{held} bytes");
    drop((first, second));
}

#[test]
fn the_end_of_an_answer_is_kept_and_no_more() {
    let mut tail = AnswerTail::new(AnswerForm::Events, None);
    let ((), held, _) = measure(|| {
        for chunk_bytes in [1, 4095, 4096, 4097, 100_000, 3] {
            let chunk = vec![b'x'; chunk_bytes];
            let wanted = tail.pass(chunk_bytes);
            assert!(wanted <= TAIL_BYTES);
            tail.push(&chunk[chunk_bytes - wanted..]);
        }
    });
    assert!(held <= 2 * TAIL_BYTES as isize, "{held}");
}

#[test]
fn no_more_of_a_body_is_read_than_may_be_held_whatever_its_first_chunk_is() {
    let mut pool = Pool::new(config(&json!({"max_buffer_bytes": 65_536})), 1);
    let read = |pool: &mut Pool, chunk_bytes, is_last| {
        let (mut exchange, _) = Exchange::start(pool, Api::OpenAiChat, head(), true, NOW_MS);
        match exchange.on_body(pool, chunk_bytes, is_last) {
            Step::Read { max_bytes, end } => (max_bytes, end),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(read(&mut pool, 10 << 20, false), (65_536, BodyEnd::Limit));
    // After a refusal the first chunk has to do, and Envoy may have read as much as its connection's buffer takes.
    assert!(pool.hold_refused(60_000, 65_536));
    assert_eq!(read(&mut pool, 10 << 20, false), (65_536, BodyEnd::Limit));
    assert_eq!(read(&mut pool, 10 << 20, true), (65_536, BodyEnd::Limit));
    assert_eq!(read(&mut pool, 65_536, true), (65_536, BodyEnd::EndOfStream));
}

#[test]
fn the_page_of_bounds_states_what_the_code_has() {
    let page = include_str!("../docs/bounds.md");
    let keys = PoolKeys::new("llm").all().count();
    for stated in [
        format!(
            "| hosts | {MAX_HOSTS} of the table, addresses of {MAX_ADDRESS_BYTES} bytes, {MAX_ADAPTERS} adapters each |"
        ),
        format!("in slots 0–{} that", MAX_HOSTS - 1),
        format!("{MAX_JOURNALS} slots, {MAX_TALLIES} tallies each (24 bytes) and {MAX_SILENCES} silences"),
        format!("open run of {} KiB, {ARCHIVED_RUNS} closed ones", RUN_BYTES >> 10),
        format!("| keys told to other workers | {MAX_KEYS} |"),
        format!("at most {MAX_MATCHES} matches"),
        format!("the last {} KiB of an answer", TAIL_BYTES >> 10),
        format!(
            "| answer of the admin interface | {} MiB |",
            MAX_ANSWER_BYTES >> 20
        ),
        format!(
            "| answer of an engine | {} MiB, 100 000 lines",
            MAX_METRICS_BYTES >> 20
        ),
        format!("| calls remembered | {MAX_CALLS} |"),
        format!("| keys in shared data | one for identities, and {keys} for each pool name"),
        format!("| merged journals | {} KiB;", MERGED_BYTES >> 10),
    ] {
        assert!(page.contains(&stated), "{stated}");
    }
    assert_eq!(MAX_METRICS_LINES, 100_000);
    let journal_bytes = 56 + MAX_TALLIES * 18 + MAX_SILENCES * 15 + RUN_BYTES;
    assert!(
        page.contains(&format!("| journal | {} kB", journal_bytes.div_ceil(1000))),
        "{journal_bytes}"
    );
}

/// The address of a host by number.
fn address(number: usize) -> String {
    format!(
        "10.{}.{}.{}:80",
        number / 62_500,
        number / 250 % 250,
        number % 250
    )
}

/// A companion with an admin interface that lists what it is told to.
struct Companion {
    poller: Poller,
    now_ms: u64,
}

impl Companion {
    fn new() -> Self {
        Self::with(MetricsConfig::of_cluster("engines"))
    }

    fn with(metrics: MetricsConfig) -> Self {
        Self {
            poller: Poller::new(PollerConfig {
                cluster: "llm".to_owned(),
                discovery: warmroute::poller::Discovery::Admin {
                    cluster: "admin".to_owned(),
                    interval_ms: 500,
                },
                metrics,
                steering_header: "x-steer".to_owned(),
            }),
            now_ms: NOW_MS,
        }
    }

    fn tick(&mut self) -> Vec<Call> {
        self.poller.tick(self.now_ms)
    }

    fn answer_list(&mut self, call: &Call, first: usize, count: usize) {
        let mut body = String::from("llm::added_via_api::false\n");
        for number in first..first + count {
            body.push_str(&format!("llm::{}::health_flags::healthy\n", address(number)));
        }
        let answer = Answer {
            status: 200,
            served_by: None,
            body: body.as_bytes(),
        };
        self.poller.on_answer(call.token, self.now_ms, answer);
    }

    /// Half a second in which all endpoints become others, and every scrape fails.
    fn replace_all(&mut self, first: usize, count: usize) {
        self.now_ms += 500;
        for call in self.tick() {
            if call.cluster == "admin" {
                self.answer_list(&call, first, count);
            } else {
                self.poller.on_failure(call.token, self.now_ms);
            }
        }
        self.poller.take_publishable(self.now_ms);
    }
}

fn config(settings: &Value) -> PoolConfig {
    let mut document = settings.clone();
    document["pools"] = json!({"llm": {"discovery": {"admin_cluster": "admin"}}});
    Config::parse(document.to_string().as_bytes())
        .unwrap()
        .pools
        .remove(0)
}

fn host(slot: u16) -> Host {
    Host {
        slot: Slot(slot),
        epoch: 1,
        address: format!("10.0.{}.{}:8000", slot / 250, slot % 250),
        weight: 1,
        ..Host::default()
    }
}

fn table(hosts: u16) -> HostTable {
    HostTable {
        published_ms: NOW_MS,
        hosts: (0..hosts).map(host).collect(),
    }
}

/// Keys that no other number has.
fn keys(number: u64, count: u32) -> PrefixKeys {
    let key = |at: u32| PrefixKey {
        hash: ChunkHash((number * 1_000_003 + u64::from(at) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
        end_bytes: (at + 1) * 256,
    };
    PrefixKeys {
        keys: (0..count).map(key).collect(),
        prompt_bytes: count * 256,
    }
}

fn head() -> RequestHead {
    RequestHead {
        path: CHAT.to_owned(),
        content_type: Some("application/json".to_owned()),
        ..RequestHead::default()
    }
}

fn input(body: &[u8]) -> PromptInput<'_> {
    PromptInput {
        api: Api::OpenAiChat,
        path: CHAT,
        body,
        end: BodyEnd::EndOfStream,
        tenant: None,
        session_header: None,
    }
}

fn chat(number: u64, text_bytes: usize) -> String {
    let text = format!("{number} says that ").repeat(text_bytes / 12 + 1);
    json!({"model": "m", "messages": [{"role": "user", "content": &text[..text_bytes]}]}).to_string()
}

/// A prompt with heads of its own.
fn prompt(number: u64) -> Prompt {
    let body = chat(number, 6000);
    extract(&input(body.as_bytes()), &PromptOptions::default())
        .prompt
        .unwrap()
}

const LONG_LINE: &str =
    "# a line of a hundred bytes, as they are in what engines tell of themselves, all labels included ....\n";
/// A table of as many hosts as there can be, each with all that it can have.
const TABLE_BYTES: usize = 660_000;
