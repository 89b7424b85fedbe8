//! The README against the code: every key, default, range, header, metric, reason and path that it states is what the
//! module does, and nothing that the module knows is left out of it.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "helpers of tests may fail as tests do"
)]

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};
use warmroute::config::{Config, ConfigError, StrategyName};
use warmroute::decision::Reason;
use warmroute::exchange::Unkeyed;
use warmroute::prompt::Api;

const README: &str = include_str!("../README.md");
const ENVOY_README: &str = include_str!("../envoy/README.md");

#[test]
fn every_json_snippet_is_a_configuration() {
    let mut count = 0;
    for snippet in [README, ENVOY_README]
        .iter()
        .flat_map(|text| fenced(text, "json"))
    {
        let parsed = Config::parse(snippet.as_bytes());
        assert!(parsed.is_ok(), "{}\n{snippet}", parsed.unwrap_err());
        count += 1;
    }
    assert!(count >= 3, "{count} snippets");
}

#[test]
fn the_table_lists_the_keys_that_the_parser_knows_and_no_other() {
    let listed: BTreeSet<String> = keys().into_iter().map(|row| row.path).collect();
    let mut known = BTreeSet::new();
    for level in LEVELS {
        let mut document = document_for(level);
        set(&mut document, level, "no_such_key", json!(1));
        let error = parse(&document).unwrap_err();
        assert!(error.path.ends_with("no_such_key"), "{error}");
        let names = error.problem.strip_prefix("unknown key; known here: ");
        let names = names.unwrap_or_else(|| panic!("{error}"));
        for name in names.split(", ") {
            let path = if level.is_empty() {
                name.to_owned()
            } else {
                format!("{level}.{name}")
            };
            // An object has rows for what is in it; only where it can be something else has it one of its own.
            let is_parent = LEVELS.iter().any(|level| level.trim_end_matches("[]") == path);
            if !is_parent || listed.contains(&path) {
                known.insert(path);
            }
        }
    }
    assert_eq!(listed, known);
}

#[test]
fn pools_take_the_keys_of_the_top_level() {
    let mut inside = Vec::new();
    for at_top in [true, false] {
        let mut document = document_for("");
        let object = match at_top {
            true => document.as_object_mut().unwrap(),
            false => document["pools"]["llm"].as_object_mut().unwrap(),
        };
        object.insert("no_such_key".to_owned(), json!(1));
        let error = parse(&document).unwrap_err();
        let names = error.problem.split(": ").nth(1).unwrap().split(", ");
        let shared = names.filter(|name| !matches!(*name, "pools" | "companion"));
        inside.push(shared.map(str::to_owned).collect::<BTreeSet<_>>());
    }
    assert_eq!(inside[0], inside[1]);
}

#[test]
fn stated_defaults_are_what_an_absent_key_means() {
    let mut count = 0;
    for row in keys() {
        let Some(default) = code(&row.default) else {
            assert!(
                ["—", "the pool's cluster"].contains(&row.default.as_str()),
                "{}: {}",
                row.path,
                row.default
            );
            continue;
        };
        let default: Value =
            serde_json::from_str(default).unwrap_or_else(|error| panic!("{}: {error}", row.path));
        let (level, key) = row.place();
        let without = document_for(level);
        let mut with = without.clone();
        set(&mut with, level, key, default);
        let (with, without) = (parse(&with), parse(&without));
        let with = with.unwrap_or_else(|error| panic!("{}: {error}", row.path));
        assert_eq!(
            format!("{with:?}"),
            format!("{:?}", without.unwrap()),
            "{}",
            row.path
        );
        count += 1;
    }
    assert!(count >= 25, "{count} defaults");
    let pool = |text: &str| Config::parse(text.as_bytes()).unwrap().pools.remove(0);
    let mut document = document_for("");
    assert_eq!(
        pool(&document.to_string()).metrics.cluster,
        "llm",
        "the pool's cluster"
    );
    set(&mut document, "metrics", "preset", json!("tensorrt_llm"));
    assert_eq!(pool(&document.to_string()).metrics.path, "/prometheus/metrics");
}

#[test]
fn stated_ranges_are_accepted_to_their_ends_and_refused_beyond() {
    let mut count = 0;
    for row in keys() {
        let (level, key) = row.place();
        let try_value = |value: Value| {
            let mut document = document_for(level);
            set(&mut document, level, key, value);
            parse(&document)
        };
        let refuses = |value: Value, needle: &str| {
            let error = try_value(value.clone()).expect_err(&format!("{}: {value}", row.path));
            let path = row.path.replace("[]", "[0]");
            assert!(
                error.path == path || error.path == format!("{path}[0]"),
                "{error}"
            );
            assert!(error.problem.contains(needle), "{error}");
        };
        if row.kind.starts_with("integer") {
            let (least, most) = range(&row);
            for value in [least, most] {
                assert!(try_value(json!(value)).is_ok(), "{}: {value}", row.path);
            }
            for value in [json!(most + 1), json!(-1), json!(1.5), json!("1"), json!(true)] {
                refuses(value, &format!("from {least} to {most}"));
            }
            if least > 0 {
                refuses(json!(least - 1), &format!("from {least} to {most}"));
            }
        } else if row.kind.starts_with("number") || row.kind == "`\"auto\"` or number" {
            let (least, most) = range(&row);
            let (least, most) = (least as f64, most as f64);
            for value in [least, f64::midpoint(least, most), most] {
                assert!(try_value(json!(value)).is_ok(), "{}: {value}", row.path);
            }
            for value in [json!(least - 0.1), json!(most + 0.1), json!("0.5")] {
                refuses(value, &format!("from {least} to {most}"));
            }
            if row.kind.contains("auto") {
                assert!(try_value(json!("auto")).is_ok(), "{}", row.path);
            }
        } else if row.kind == "boolean" {
            for value in [true, false] {
                assert!(try_value(json!(value)).is_ok(), "{}: {value}", row.path);
            }
            for value in [json!(0), json!("true")] {
                refuses(value, "true or false");
            }
        } else if row.kind == "one of" || row.kind == "list of" {
            let wrap = |word: &str| {
                if row.kind == "one of" {
                    json!(word)
                } else {
                    json!([word])
                }
            };
            let words: Vec<&str> = codes(&row.range).collect();
            assert!(words.len() >= 2, "{}", row.path);
            for word in &words {
                assert!(try_value(wrap(word)).is_ok(), "{}: {word}", row.path);
            }
            refuses(wrap("no_such_word"), &format!("one of {}, got", words.join(", ")));
        } else if row.range == "1–256 bytes" || row.range == "0–256 bytes" {
            let (least, most) = range(&row);
            refuses(json!("x".repeat(257)), &format!("{least} to {most} bytes"));
            refuses(json!(1), "expected a string");
            if least > 0 {
                refuses(json!(""), &format!("{least} to {most} bytes"));
            }
        } else {
            assert!(
                [
                    "pools",
                    "overflow",
                    "discovery.hosts",
                    "metrics.names",
                    "prefix.volatile_heads",
                    "session.headers"
                ]
                .contains(&row.path.as_str()),
                "{} has a range that nothing checks",
                row.path
            );
            continue;
        }
        count += 1;
    }
    assert!(count >= 35, "{count} ranges");
}

#[test]
fn lists_and_counts_end_where_the_table_says() {
    let refused = |level: &str, key: &str, value: Value, needle: &str| {
        let mut document = document_for(level);
        set(&mut document, level, key, value);
        let error = parse(&document).unwrap_err();
        assert!(error.problem.contains(needle), "{error}");
    };
    let accepted = |level: &str, key: &str, value: Value| {
        let mut document = document_for(level);
        set(&mut document, level, key, value);
        assert!(parse(&document).is_ok(), "{level}.{key}");
    };
    let hosts = |count: usize| -> Value {
        (0..count)
            .map(|i| json!({"address": format!("10.0.{}.{}:1", i / 256, i % 256)}))
            .collect()
    };
    assert_eq!(row("discovery.hosts").range, "1–1024");
    accepted("discovery.hosts[]", "role", json!("both"));
    for (count, is_accepted) in [(1024, true), (1025, false), (0, false)] {
        let document = json!({"pools": {"llm": {"discovery": {"hosts": hosts(count)}}}});
        assert_eq!(parse(&document).is_ok(), is_accepted, "{count} hosts");
    }
    for key in ["volatile_heads", "headers"] {
        let (level, path) = if key == "headers" {
            ("session", "session.headers")
        } else {
            ("prefix", "prefix.volatile_heads")
        };
        assert_eq!(row(path).range, "up to 32 of 1–256 bytes");
        accepted(level, key, vec!["x-a"; 32].into());
        accepted(level, key, json!(["x".repeat(256)]));
        refused(level, key, vec!["x-a"; 33].into(), "at most 32 items, got 33");
        refused(level, key, json!(["x".repeat(257)]), "1 to 256 bytes");
        refused(level, key, json!([""]), "1 to 256 bytes");
        refused(level, key, json!("x-a"), "expected a list");
    }
    assert_eq!(row("pools").range, "1–64 pools");
    for (count, is_accepted) in [(1, true), (64, true), (65, false), (0, false)] {
        let pools: Map<String, Value> = (0..count).map(|i| (format!("p{i}"), json!({}))).collect();
        let document = json!({"discovery": {"admin_cluster": "a"}, "pools": pools});
        assert_eq!(parse(&document).is_ok(), is_accepted, "{count} pools");
    }
}

#[test]
fn every_reason_and_cause_is_explained_and_no_other() {
    let rows = |header: &str| -> BTreeSet<String> { column(README, header).into_iter().collect() };
    let names = |names: &mut dyn Iterator<Item = &'static str>| -> BTreeSet<String> {
        names.map(str::to_owned).collect()
    };
    assert_eq!(
        rows("| reason |"),
        names(&mut Reason::ALL.iter().map(|reason| reason.as_str()))
    );
    assert_eq!(
        rows("| cause |"),
        names(&mut Unkeyed::ALL.iter().map(|cause| cause.as_str()))
    );
    assert_eq!(
        rows("| `strategy` |"),
        names(&mut StrategyName::ALL.iter().map(|name| name.as_str()))
    );
}

#[test]
fn every_metric_is_listed_with_its_labels_and_no_other() {
    let source = include_str!("../src/proxy/stats.rs");
    let table = section("## Metrics");
    let mut in_code = BTreeSet::new();
    for literal in literals(source).filter(|literal| literal.starts_with("warmroute_")) {
        let mut words = literal.split('.');
        let name = words.next().unwrap();
        in_code.insert(name.to_owned());
        let line = table
            .lines()
            .find(|line| line.starts_with(&format!("| `{name}` |")));
        let line = line.unwrap_or_else(|| panic!("{name} is not listed"));
        for word in words.filter(|word| !word.contains('{')) {
            assert!(
                codes(line).any(|code| code == word),
                "`{word}` is missing: {line}"
            );
        }
    }
    // The companion's gauges get their only label where they are defined.
    let (_, gauges) = source.split_once("impl PoolGauges").unwrap();
    assert!(gauges.contains("\"{name}.pool.{}\""));
    for name in literals(gauges).filter(|literal| literal.starts_with("warmroute_")) {
        let line = table
            .lines()
            .find(|line| line.starts_with(&format!("| `{name}` |")))
            .unwrap();
        assert!(codes(line).any(|code| code == "pool"), "{line}");
    }
    assert_eq!(in_code, column(README, "| metric |").into_iter().collect());
}

#[test]
fn every_label_of_a_metric_has_its_tag() {
    let tags: Vec<&str> = ENVOY_README
        .lines()
        .filter(|line| line.contains("tag_name: "))
        .collect();
    let source = include_str!("../src/proxy/stats.rs");
    let tails = literals(source).filter(|literal| literal.contains('.') && !literal.contains(' '));
    let labels: BTreeSet<&str> = tails
        .flat_map(|tail| tail.split('.').skip(1).step_by(2))
        .collect();
    assert!(labels.len() >= 4, "{labels:?}");
    for label in &labels {
        let tag = format!("tag_name: {label}, regex: \"^wasmcustom\\\\.warmroute_.*?(\\\\.{label}\\\\.(");
        assert!(tags.iter().any(|line| line.contains(&tag)), "{tag}");
    }
    assert_eq!(tags.len(), labels.len());
    let shipped = include_str!("../envoy/envoy.yaml");
    for line in shipped.lines().filter(|line| line.contains("tag_name: ")) {
        assert!(tags.contains(&line), "{line}");
    }
}

#[test]
fn every_response_header_is_listed_and_no_other() {
    let source = include_str!("../src/proxy/filter.rs");
    let in_code: BTreeSet<String> = literals(source)
        .filter(|literal| literal.starts_with("x-warmroute-"))
        .map(str::to_owned)
        .collect();
    assert!(in_code.len() >= 5, "{in_code:?}");
    assert_eq!(in_code, column(README, "| header |").into_iter().collect());
    assert!(
        include_str!("../src/proxy/companion.rs").contains("\"x-served-by\"")
            && README.contains("`x-served-by`")
    );
}

#[test]
fn every_path_that_is_listed_is_one_and_none_is_left_out() {
    let listed: BTreeSet<&str> = table(README, "| API |")
        .into_iter()
        .flat_map(|line| codes(line).filter(|code| code.starts_with('/')))
        .collect();
    assert!(listed.len() >= 20, "{listed:?}");
    for path in &listed {
        assert!(Api::from_path(path).is_some(), "{path}");
    }
    let source = include_str!("../src/prompt/path.rs");
    let code = source.split("#[cfg(test)]").next().unwrap();
    for literal in literals(code).filter(|literal| Api::from_path(literal).is_some()) {
        assert!(listed.contains(literal), "{literal} is not listed");
    }
}

#[test]
fn links_lead_to_files_of_the_project() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    for (text, folder) in [(README, root.to_owned()), (ENVOY_README, root.join("envoy"))] {
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            match target.strip_prefix('#') {
                Some(anchor) => {
                    let is_it = |line: &str| {
                        line.starts_with('#')
                            && line
                                .trim_start_matches(['#', ' '])
                                .to_lowercase()
                                .replace(' ', "-")
                                == anchor
                    };
                    assert!(text.lines().any(is_it), "#{anchor}");
                }
                None if target.starts_with("https://") => {}
                None => {
                    let file = target.split('#').next().unwrap();
                    assert!(folder.join(file).exists(), "{target}");
                }
            }
        }
    }
}

/// Objects of the configuration, by the path of their keys in the table.
const LEVELS: [&str; 10] = [
    "",
    "companion",
    "overflow",
    "prefix",
    "index",
    "session",
    "discovery",
    "discovery.hosts[]",
    "metrics",
    "metrics.names",
];

/// One row of the table of keys.
struct Row {
    path: String,
    kind: String,
    range: String,
    default: String,
}

impl Row {
    /// The object that the key stands in, and its name there.
    fn place(&self) -> (&str, &str) {
        self.path.rsplit_once('.').unwrap_or(("", &self.path))
    }
}

fn keys() -> Vec<Row> {
    let rows: Vec<Row> = table(README, "| key |")
        .into_iter()
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let [path, kind, range, default, _] = cells[..] else {
                panic!("{} cells: {line}", cells.len())
            };
            Row {
                path: code(path).unwrap_or_else(|| panic!("{line}")).to_owned(),
                kind: kind.to_owned(),
                range: range.to_owned(),
                default: default.to_owned(),
            }
        })
        .collect();
    assert!(rows.len() >= 40, "{} keys", rows.len());
    rows
}

fn row(path: &str) -> Row {
    keys()
        .into_iter()
        .find(|row| row.path == path)
        .unwrap_or_else(|| panic!("{path}"))
}

/// The numbers of a range such as `1–256 bytes`.
fn range(row: &Row) -> (u64, u64) {
    let numbers = row.range.split(' ').next().unwrap().split_once('–');
    let (least, most) = numbers.unwrap_or_else(|| panic!("{}: {}", row.path, row.range));
    (least.parse().unwrap(), most.parse().unwrap())
}

/// The least document in which the keys of an object can be set.
fn document_for(level: &str) -> Value {
    let mut document = json!({"discovery": {"admin_cluster": "envoy_admin"}, "pools": {"llm": {}}});
    match level {
        "discovery.hosts[]" => document["discovery"] = json!({"hosts": [{"address": "10.0.0.7:8000"}]}),
        // Samples may not be stale before the next ones come.
        "metrics" => document["table_fresh_ms"] = json!(60_000),
        "metrics.names" => document["metrics"] = json!({"names": {"running": "r"}}),
        "overflow" => document["overflow"] = json!({}),
        _ => {}
    }
    document
}

fn set(document: &mut Value, level: &str, key: &str, value: Value) {
    let object = match level {
        "" => document,
        "discovery.hosts[]" => &mut document["discovery"]["hosts"][0],
        _ => level.split('.').fold(document, |object, name| &mut object[name]),
    };
    object[key] = value;
}

fn parse(document: &Value) -> Result<Config, ConfigError> {
    Config::parse(document.to_string().as_bytes())
}

/// The body rows of the first table whose header begins so.
fn table<'a>(text: &'a str, header: &str) -> Vec<&'a str> {
    let mut lines = text.lines().skip_while(|line| !line.starts_with(header));
    assert!(lines.next().is_some(), "no table {header}");
    lines.skip(1).take_while(|line| line.starts_with('|')).collect()
}

/// The first cells of a table, all of them code.
fn column(text: &str, header: &str) -> Vec<String> {
    let cells = table(text, header)
        .into_iter()
        .map(|line| line.split('|').nth(1).unwrap().trim());
    cells
        .map(|cell| code(cell).unwrap_or_else(|| panic!("{cell}")).to_owned())
        .collect()
}

fn section(heading: &str) -> &'static str {
    let (_, rest) = README
        .split_once(&format!("\n{heading}\n"))
        .unwrap_or_else(|| panic!("{heading}"));
    rest.split("\n## ").next().unwrap()
}

/// What a cell that is code as a whole says.
fn code(cell: &str) -> Option<&str> {
    cell.strip_prefix('`')?.strip_suffix('`')
}

/// All code spans.
fn codes(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The fenced blocks of a language.
fn fenced<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    let open = format!("```{language}\n");
    text.split(&open)
        .skip(1)
        .filter_map(|rest| rest.split("```").next())
        .collect()
}

/// The string literals of Rust source, as far as they have no escaped quotes.
fn literals(source: &str) -> impl Iterator<Item = &str> {
    let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    code.flat_map(|line| line.split('"').skip(1).step_by(2))
}
