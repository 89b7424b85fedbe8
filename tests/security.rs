//! What docs/security.md says that clients, tenants and engines cannot do, on the core alone: no Envoy, driven time.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "helpers of tests may fail as tests do"
)]

#[path = "security/collide.rs"]
mod collide;
#[path = "security/liar.rs"]
mod liar;

use std::collections::BTreeSet;
use std::path::Path;

use collide::colliding_pair;
use serde_json::{Value, json};
use warmroute::chunk::{ChunkHash, PrefixKey, PrefixKeys};
use warmroute::config::Config;
use warmroute::host_table::{Host, HostTable, Load, Slot};
use warmroute::index::{IndexSettings, NewPlacement, PrefixIndex};
use warmroute::late_fields::LateFields;
use warmroute::load::{Preset, parse};
use warmroute::pool::{DecisionInput, Outcome, Pool};
use warmroute::prompt::{Api, BodyEnd, PromptInput, PromptOptions, extract};
use warmroute::recent::{RecentPrefixes, RecentSettings, Traffic};
use warmroute::strategy::Rng;
use warmroute::usage::{AnswerForm, AnswerTail, Usage};

const NOW_MS: u64 = 1_790_000_000_000;
const PATH: &str = "/v1/chat/completions";

fn pool(settings: &Value, hosts: u16) -> Pool {
    let mut config = json!({"pools": {"llm": {"discovery": {"admin_cluster": "admin"}}}});
    for (key, value) in settings.as_object().unwrap() {
        config[key] = value.clone();
    }
    let config = Config::parse(config.to_string().as_bytes()).unwrap();
    let mut pool = Pool::new(config.pools[0].clone(), 1);
    pool.apply_table(&table(hosts).encode(), NOW_MS).unwrap();
    pool
}

fn table(hosts: u16) -> HostTable {
    let host = |slot: u16| Host {
        slot: Slot(slot),
        epoch: 1,
        address: format!("10.0.0.{slot}:8000"),
        weight: 1,
        sampled_ms: NOW_MS,
        ..Host::default()
    };
    HostTable {
        published_ms: NOW_MS,
        hosts: (0..hosts).map(host).collect(),
    }
}

fn body(text: &str, more: &Value) -> String {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": text}]});
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body.to_string()
}

fn input<'a>(body: &'a str, tenant: Option<&'a str>) -> DecisionInput<'a> {
    DecisionInput {
        api: Api::OpenAiChat,
        path: PATH,
        body: Some((body.as_bytes(), BodyEnd::EndOfStream)),
        content_length: None,
        tenant: tenant.map(str::as_bytes),
        session: None,
    }
}

fn ask(pool: &mut Pool, body: &str, tenant: Option<&str>) -> Outcome {
    pool.decide(&input(body, tenant), NOW_MS)
}

/// The keys of a chat of one message.
fn keys_of(text: &str, secret: &str, tenant: Option<&str>) -> Vec<u64> {
    let body = body(text, &json!({}));
    let options = PromptOptions {
        secret: secret.into(),
        ..PromptOptions::default()
    };
    let input = PromptInput {
        api: Api::OpenAiChat,
        path: PATH,
        body: body.as_bytes(),
        end: BodyEnd::EndOfStream,
        tenant: tenant.map(str::as_bytes),
        session_header: None,
    };
    let prompt = extract(&input, &options).prompt.unwrap();
    let keys = prompt.keys(&prompt.namespace).keys;
    keys.iter().map(|key| key.hash.0).collect()
}

/// Two chats of the same length that differ in every piece of 256 bytes and share all keys where nothing is secret. The
/// text begins where the hash begins a block: 8 bytes of the hash before, 8 of framing.
fn colliding_texts(rng: &mut Rng, pieces: usize) -> [String; 2] {
    let mut texts = [String::new(), String::new()];
    for piece in 0..pieces {
        let pair = colliding_pair(rng);
        for (text, block) in texts.iter_mut().zip(pair) {
            // The first piece has as many bytes of framing instead.
            text.push_str(if piece == 0 { "" } else { "12345678" });
            text.push_str(std::str::from_utf8(&block).unwrap());
            text.push_str(&"x".repeat(256 - 8 - 32));
        }
    }
    texts
}

#[test]
fn without_a_secret_prompts_that_share_every_key_are_easy_to_make() {
    let mut rng = Rng::new(1);
    let [one, other] = colliding_texts(&mut rng, 40);
    assert_ne!(one, other);
    assert_eq!(one.len(), other.len());
    for tenant in [None, Some("a tenant's name is no secret")] {
        let keys = keys_of(&one, "", tenant);
        // 16 pieces of 256 bytes, then one point each KiB, and the end of the message.
        assert!(keys.len() > 20);
        assert_eq!(keys, keys_of(&other, "", tenant));
    }
}

#[test]
fn under_a_secret_made_prompts_share_no_key() {
    let mut rng = Rng::new(2);
    for secret in ["k", "a secret of many letters", &"s".repeat(256)] {
        for _ in 0..20 {
            let [one, other] = colliding_texts(&mut rng, 40);
            assert_eq!(keys_of(&one, "", None), keys_of(&other, "", None));
            let (one, other) = (keys_of(&one, secret, None), keys_of(&other, secret, None));
            assert_eq!(one.len(), other.len());
            let one: BTreeSet<u64> = one.into_iter().collect();
            assert!(other.iter().all(|key| !one.contains(key)), "secret {secret}");
        }
    }
}

#[test]
fn a_secret_changes_every_key_and_gateways_with_the_same_one_agree() {
    let text = "When is the reading room open? ".repeat(100);
    let secrets = ["", "a", "b", "ab", "a\0", "\0a"];
    let mut seen = BTreeSet::new();
    for secret in secrets {
        let keys = keys_of(&text, secret, None);
        assert_eq!(keys, keys_of(&text, secret, None));
        for key in keys {
            assert!(seen.insert(key), "two secrets give one key");
        }
    }
}

#[test]
fn a_made_match_is_found_out_by_the_first_answers() {
    let [one, other] = colliding_texts(&mut Rng::new(3), 80).map(|text| body(&text, &json!({})));
    let mut pool = pool(&json!({}), 8);
    let placed = ask(&mut pool, &one, None);
    assert_eq!(placed.decision.matched_bytes, 0);
    let fooled = ask(&mut pool, &other, None);
    assert_eq!(fooled.decision.hosts.first(), placed.decision.hosts.first());
    assert_eq!(fooled.decision.matched_bytes, fooled.decision.prompt_bytes);
    assert_eq!(
        fooled.decision.uncached_tokens, 0,
        "the prompt is taken to be for free"
    );
    // The engine knows better: after two false hits the host is believed to hold none of what answers do not show.
    let mut false_hits = 0;
    for _ in 0..6 {
        let outcome = ask(&mut pool, &other, None);
        if outcome.decision.matched_bytes == 0 {
            break;
        }
        let usage = Usage {
            prompt_tokens: outcome.decision.prompt_bytes / 4,
            cached_tokens: Some(0),
        };
        let served = outcome.decision.hosts.first();
        false_hits += u32::from(pool.answered(outcome.expectation.as_ref().unwrap(), usage, served, NOW_MS));
    }
    assert_eq!(false_hits, 2);
}

#[test]
fn tenants_share_no_key_and_see_no_match_of_each_other() {
    let text = "All tenants ask the same. ".repeat(400);
    for (settings, salts) in [
        (json!({"prefix": {"tenant_header": "x-tenant"}}), false),
        (
            json!({"prefix": {"tenant_header": "x-tenant", "secret": "s3cret"}}),
            false,
        ),
        (json!({}), true),
    ] {
        let mut pool = pool(&settings, 4);
        let names = ["a", "b", "ab", "a,b", ",b", ""];
        let mut keys = BTreeSet::new();
        for name in names {
            let (body, tenant) = if salts {
                (body(&text, &json!({"cache_salt": name})), None)
            } else {
                (
                    body(&text, &json!({})),
                    Some(name).filter(|name| !name.is_empty()),
                )
            };
            let first = ask(&mut pool, &body, tenant).decision;
            assert_eq!(
                first.matched_bytes, 0,
                "{name} sees another's prompt in {settings}"
            );
            assert!(
                keys.insert(first.key.unwrap()),
                "{name} shares a key in {settings}"
            );
            let again = ask(&mut pool, &body, tenant).decision;
            assert_eq!(
                again.matched_bytes, again.prompt_bytes,
                "{name} does not see its own"
            );
            assert_eq!(again.key, first.key);
        }
    }
}

#[test]
fn a_body_cut_before_its_salt_may_match_a_salted_one_but_never_another_tenants() {
    let messages = "a document that two clients know ".repeat(600);
    let salted = body(&messages, &json!({"z_last": 0, "cache_salt": "only one knows"}));
    // Written with the salt last, and cut before it.
    let cut = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{messages}"}}]"#);
    let mut pool = pool(
        &json!({"max_buffer_bytes": 16_384, "prefix": {"tenant_header": "x-tenant"}}),
        2,
    );
    let whole = ask(&mut pool, &salted, Some("a")).decision;
    let probe = |pool: &mut Pool, tenant| {
        let input = DecisionInput {
            body: Some((cut.as_bytes(), BodyEnd::Limit)),
            ..input("", tenant)
        };
        pool.decide(&input, NOW_MS).decision
    };
    assert!(
        probe(&mut pool, Some("a")).matched_bytes > 0,
        "the bound that is documented"
    );
    let other = probe(&mut pool, Some("b"));
    assert_eq!(other.matched_bytes, 0);
    assert_ne!(other.key, whole.key);
}

/// Keys with these low bits and random others.
fn crafted(rng: &mut Rng, like: u64, mask: u64) -> u64 {
    (rng.next_u64() & !mask) | (like & mask)
}

fn keys(hashes: &[u64]) -> PrefixKeys {
    let keys = hashes.iter().zip(1u32..);
    PrefixKeys {
        keys: keys
            .map(|(hash, depth)| PrefixKey {
                hash: ChunkHash(*hash),
                end_bytes: 4096 * depth,
            })
            .collect(),
        prompt_bytes: 4096 * u32::try_from(hashes.len()).unwrap(),
    }
}

#[test]
fn keys_crafted_for_one_bucket_of_the_index_displace_no_more_than_that_bucket_holds() {
    let mut rng = Rng::new(5);
    let mut index = PrefixIndex::new(IndexSettings::default());
    index.update_hosts(&table(8));
    let memory_bytes = index.memory_bytes();
    let place = |index: &mut PrefixIndex, hash: u64, slot: u64| {
        let new = NewPlacement {
            slot: Slot(u16::try_from(slot % 8).unwrap()),
            uncached_tokens: 1,
            prompt_tokens: 1000,
        };
        index.place(&keys(&[hash]), new, NOW_MS).unwrap();
    };
    let others: Vec<u64> = (0..20_000).map(|_| rng.next_u64()).collect();
    for (number, hash) in others.iter().enumerate() {
        place(&mut index, *hash, number as u64);
    }
    let held = |index: &PrefixIndex| {
        let found = |hash: &&u64| index.lookup(&keys(&[**hash]), NOW_MS).deepest_bytes() > 0;
        others.iter().filter(found).count()
    };
    let before = held(&index);
    assert!(before > 19_900, "{before}");
    // A bucket is chosen by the low 32 bits.
    let target = others[0];
    for number in 0..200_000 {
        let hash = crafted(&mut rng, target, 0xffff_ffff);
        place(&mut index, hash, number);
    }
    let lost = before - held(&index);
    assert!((1..=8).contains(&lost), "{lost} of others' entries are gone");
    assert_eq!(index.memory_bytes(), memory_bytes);
}

#[test]
fn keys_crafted_for_one_bucket_of_recent_prefixes_make_no_other_bucket_forget() {
    let mut rng = Rng::new(6);
    let mut recent = RecentPrefixes::new(RecentSettings::default());
    let busy = Traffic {
        hosts: 8,
        in_flight: 200,
    };
    let (hot, tail) = (rng.next_u64(), rng.next_u64());
    let is_split = |recent: &mut RecentPrefixes, rng: &mut Rng| {
        let homes = recent.observe(&keys(&[hot, rng.next_u64()]), busy, NOW_MS);
        homes.home.unwrap().key != hot
    };
    for _ in 0..50 {
        is_split(&mut recent, &mut rng);
    }
    assert!(is_split(&mut recent, &mut rng), "the prefix is hot");
    let memory_bytes = recent.memory_bytes();
    // All in the bucket of one key that is not the hot one; a share that leaves the hot one hot.
    for round in 0..20_000 {
        recent.observe(&keys(&[crafted(&mut rng, tail, !0 << 33)]), busy, NOW_MS);
        if round % 2 == 0 {
            assert!(is_split(&mut recent, &mut rng), "forgotten in round {round}");
        }
    }
    assert_eq!(recent.memory_bytes(), memory_bytes);
}

#[test]
fn late_fields_hold_no_more_heads_than_configured() {
    let mut late = LateFields::new(256);
    for number in 0..20_000 {
        let text = format!("{number} {}", "head ".repeat(400));
        let body = body(&text, &json!({"model": format!("m{number}")}));
        let input = PromptInput {
            api: Api::OpenAiChat,
            path: PATH,
            body: body.as_bytes(),
            end: BodyEnd::EndOfStream,
            tenant: None,
            session_header: None,
        };
        late.remember(&extract(&input, &PromptOptions::default()).prompt.unwrap());
        assert!(late.entry_count() <= 256);
    }
    assert!(late.entry_count() > 100);
}

#[test]
fn absurd_metrics_give_no_load_or_one_within_bounds() {
    let values = [
        "NaN",
        "+Inf",
        "-Inf",
        "Inf",
        "-1",
        "-1e308",
        "1e308",
        "1e309",
        "1e-308",
        "18446744073709551616",
        "99999999999999999999999999999999999999",
        "0x10",
        "1e",
        "",
        "--1",
        "1_000",
        "1e+",
        "\u{661}",
        "4294967296",
    ];
    for value in values {
        let text = format!(
            "vllm:num_requests_waiting {value}\nvllm:num_requests_running {value}\nvllm:kv_cache_usage_perc {value}\n\
             vllm:prefix_cache_queries_total 5\nvllm:prefix_cache_hits_total {value}\n\
             process_start_time_seconds {value}\n\
             vllm:num_requests_waiting{{engine=\"1\"}} {value}\nvllm:num_requests_waiting{{engine=\"2\"}} {value}\n"
        );
        if let Ok(load) = parse(&Preset::from_name("vllm").unwrap(), text.as_bytes()) {
            assert!(load.kv_usage_permille.unwrap_or(0) <= 1000, "{value}: {load:?}");
            let table = with_load(load);
            let bytes = table.encode();
            assert_eq!(HostTable::decode(&bytes).unwrap().hosts.len(), 8, "{value}");
            let mut pool = pool(&json!({}), 8);
            pool.apply_table(&bytes, NOW_MS).unwrap();
            let placed = ask(&mut pool, &body("hello", &json!({})), None);
            assert!(placed.decision.hosts.first().is_some(), "{value}");
        }
    }
}

fn with_load(load: Load) -> HostTable {
    let mut table = table(8);
    table.hosts[3].load = load;
    table
}

#[test]
fn whatever_one_engine_shows_others_keep_their_hits_and_every_request_finds_a_host() {
    let mut rng = Rng::new(7);
    let mut pool = pool(&json!({}), 8);
    let texts: Vec<String> = (0..64)
        .map(|number| body(&format!("prompt {number} ").repeat(800), &json!({})))
        .collect();
    for text in &texts {
        ask(&mut pool, text, None);
    }
    let extreme = [0, 1, u64::MAX / 2, u64::MAX];
    for round in 0..2000u64 {
        let mut any = || extreme[rng.below(4)];
        let count = |value: u64| Some(u32::try_from(value).unwrap_or(u32::MAX));
        let mut table = with_load(Load {
            waiting: count(any()),
            running: count(any()),
            kv_usage_permille: u16::try_from(any() % 1001).ok(),
            kv_capacity_tokens: Some(any()),
            prefix_queries: Some(any()),
            prefix_hits: Some(any()),
            started_ms: Some(any()),
            adapters: Vec::new(),
        });
        // It also seems to restart at each poll.
        table.hosts[3].epoch = 1 + u32::try_from(round).unwrap();
        table.published_ms = NOW_MS + round;
        for host in &mut table.hosts {
            host.sampled_ms = NOW_MS + round;
        }
        pool.apply_table(&table.encode(), NOW_MS + round).unwrap();
        let text = &texts[rng.below(64)];
        let outcome = pool.decide(&input(text, None), NOW_MS + round);
        let host = outcome.decision.hosts.first().unwrap();
        if host != Slot(3) {
            assert_eq!(
                outcome.decision.matched_bytes, outcome.decision.prompt_bytes,
                "round {round}: an honest host's warm prompt is forgotten"
            );
        }
    }
}

#[test]
fn absurd_usage_is_no_usage_or_within_the_bounds_of_a_prompt() {
    let usage = |text: &[u8]| {
        let mut tail = AnswerTail::new(AnswerForm::Whole, Some(text.len() as u64));
        for chunk in text.chunks(65_536) {
            let wanted = tail.pass(chunk.len());
            tail.push(&chunk[chunk.len() - wanted..]);
        }
        tail.usage()
    };
    let answer = |prompt: &str, cached: &str| {
        format!(
            r#"{{"usage":{{"prompt_tokens":{prompt},"prompt_tokens_details":{{"cached_tokens":{cached}}}}}}}"#
        )
    };
    assert_eq!(
        usage(answer("100", "40").as_bytes()),
        Some(Usage {
            prompt_tokens: 100,
            cached_tokens: Some(40)
        })
    );
    let numbers = [
        "-1",
        "1e300",
        "-1e300",
        "NaN",
        "4294967296",
        "99999999999999999999",
        "0.5",
        "\"7\"",
        "[1]",
        "{}",
        "true",
        "null",
    ];
    for number in numbers {
        for (prompt, cached) in [(number, "1"), ("100", number), (number, number), ("0", number)] {
            if let Some(usage) = usage(answer(prompt, cached).as_bytes()) {
                let cached = usage.cached_tokens.unwrap_or(0);
                assert!(cached <= usage.prompt_tokens, "{prompt} {cached}: {usage:?}");
            }
        }
    }
    let deep = format!("{}{}", r#"{"usage":"#.repeat(2_000_000), "}".repeat(2_000_000));
    assert!(deep.len() > 10 << 20);
    assert_eq!(usage(deep.as_bytes()), None);
    let mut nested = AnswerTail::new(AnswerForm::Events, None);
    nested.push(deep.as_bytes());
    assert_eq!(nested.usage(), None);
}

#[test]
fn an_engine_that_lies_of_its_answers_moves_only_its_own_prompts_and_the_mean_within_its_bounds() {
    let mut pool = pool(&json!({}), 4);
    let texts: Vec<String> = (0..200)
        .map(|number| body(&format!("prompt {number} ").repeat(400), &json!({})))
        .collect();
    let homes: Vec<Slot> = texts
        .iter()
        .map(|text| ask(&mut pool, text, None).decision.hosts.first().unwrap())
        .collect();
    let liar = homes[0];
    let lies = [
        (1, Some(0)),
        (u32::MAX, Some(u32::MAX)),
        (u32::MAX, Some(0)),
        (1, Some(u32::MAX)),
        (0, Some(0)),
        (0, None),
    ];
    for round in 0..40 {
        for (text, _) in texts.iter().zip(&homes).filter(|(_, home)| **home == liar) {
            let outcome = ask(&mut pool, text, None);
            let (prompt_tokens, cached_tokens) = lies[round % lies.len()];
            let usage = Usage {
                prompt_tokens,
                cached_tokens,
            };
            if let Some(expected) = outcome.expectation.as_ref() {
                pool.answered(expected, usage, outcome.decision.hosts.first(), NOW_MS);
            }
        }
        let mean = pool.millibytes_per_token();
        assert!((500..=16_000).contains(&mean), "{mean}");
    }
    for (text, home) in texts.iter().zip(&homes).filter(|(_, home)| **home != liar) {
        let outcome = ask(&mut pool, text, None).decision;
        assert_eq!(outcome.hosts.first(), Some(*home));
        assert_eq!(outcome.matched_bytes, outcome.prompt_bytes);
    }
}

#[test]
fn an_engine_that_always_claims_to_be_idle_gains_a_bounded_share() {
    for gateways in [1, 4] {
        for load in [40, 80] {
            let honest = liar::share_of_host_0(gateways, load, liar::Claim::Truth);
            let idle = liar::share_of_host_0(gateways, load, liar::Claim::Idle);
            let busy = liar::share_of_host_0(gateways, load, liar::Claim::Busy);
            eprintln!(
                "{gateways} gateways at {load} %: of 1000 requests, host 0 of 8 gets {honest} when honest, {idle} \
                 claiming to be idle, {busy} claiming to be overloaded"
            );
            assert!((70..190).contains(&honest), "{honest}");
            assert!(idle <= 3 * honest, "{idle} instead of {honest}");
            assert!(busy <= honest + 30, "{busy} instead of {honest}");
        }
    }
}

#[test]
fn deep_nesting_and_giant_names_give_a_reason_and_no_key() {
    let nest = |levels: usize| {
        format!(
            r#"{{"model":"m","tools":{}1{},"messages":[{{"role":"user","content":"hi"}}]}}"#,
            "[".repeat(levels),
            "]".repeat(levels)
        )
    };
    let mut pool = pool(&json!({}), 2);
    assert_eq!(ask(&mut pool, &nest(100), None).unkeyed, None);
    for levels in [128, 1000, 300_000] {
        let outcome = ask(&mut pool, &nest(levels), None);
        assert_eq!(outcome.unkeyed.unwrap().as_str(), "too_deep");
        assert!(outcome.decision.hosts.first().is_some());
    }
    let giant = "g".repeat(4 << 20);
    for text in [
        format!(r#"{{"{giant}":1,"model":"m","messages":[{{"role":"user","content":"hi"}}]}}"#),
        format!(r#"{{"model":"{giant}","messages":[{{"role":"user","content":"hi"}}]}}"#),
        format!(r#"{{"model":"m","messages":[{{"role":"{giant}","content":"hi"}}]}}"#),
        format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{giant}"}}]}}"#),
    ] {
        let outcome = pool.decide(&input(&text, Some(&giant)), NOW_MS);
        assert!(outcome.decision.hosts.first().is_some());
        assert!(outcome.decision.key.is_some());
    }
}

/// Tests are named as `file::test` in back quotes; `src::module::tests::test` names those inside the core.
#[test]
fn every_test_that_the_security_page_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("docs/security.md")).unwrap();
    let names: BTreeSet<&str> = page
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|code| {
            code.contains("::")
                && code
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"_:".contains(&byte))
        })
        .collect();
    assert!(names.len() > 20, "{names:?}");
    for name in names {
        let (file, test) = name.rsplit_once("::").unwrap();
        let path = match file.strip_prefix("src::") {
            Some(module) => format!("src/{}.rs", module.trim_end_matches("::tests").replace("::", "/")),
            None => format!("tests/{file}.rs"),
        };
        let mut source =
            std::fs::read_to_string(root.join(&path)).unwrap_or_else(|error| panic!("{path}: {error}"));
        if let Ok(more) = std::fs::read_to_string(root.join(path.replace(".rs", "/tests.rs"))) {
            source.push_str(&more);
        }
        let is_there = source.lines().collect::<Vec<_>>().windows(4).any(|lines| {
            let is_test =
                |line: &&str| line.trim().starts_with("#[test]") || line.trim().starts_with("#[tokio::test");
            lines[3].contains(&format!("fn {test}()")) && lines[..3].iter().any(is_test)
        });
        // Or one that a macro makes a test of, once for each Envoy.
        let is_listed = source.contains(&format!("fn {test}(requirement: Requirement)"))
            && source.contains(&format!("    {test},\n"));
        let is_there = is_there || is_listed;
        assert!(
            is_there,
            "docs/security.md names {name}, which is no test of {path}"
        );
    }
}
