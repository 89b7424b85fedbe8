//! Rules of `tests/bodies/index.json` → the bodies that stand in no file.

use serde_json::Value;

/// A body made by the rules that the index states.
pub(crate) fn generated(rules: &Value) -> Vec<u8> {
    let mut body = String::new();
    for rule in rules.as_array().unwrap() {
        let text = |at: usize| rule[at].as_str().unwrap();
        let count = |at: usize| usize::try_from(rule[at].as_u64().unwrap()).unwrap();
        match text(0) {
            "lit" => body.push_str(text(1)),
            "repeat" => body.push_str(&text(1).repeat(count(2))),
            "count" => {
                let part = |i: usize| text(1).replace("{i}", &i.to_string());
                body.push_str(&(0..count(3)).map(part).collect::<Vec<_>>().join(text(2)));
            }
            other => panic!("rule {other}"),
        }
    }
    body.into_bytes()
}
