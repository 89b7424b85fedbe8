//! Rows → the table of `docs/reliability.md`.

use super::Row;

/// The rows as a Markdown table, one line each.
pub fn table(rows: &[Row]) -> String {
    let mut text = String::from(
        "| what | fault | Envoy | policy | sent | answered | failed without the filter | failed because of us | \
         worst added delay | recovered | |\n|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let (major, minor, patch) = row.envoy;
        let recovered = match &row.recovery {
            Some(recovery) => match recovery.took {
                Some(took) => format!("{} ms until {}", took.as_millis(), recovery.until),
                None => format!("**never**: {}", recovery.until),
            },
            None => "–".to_owned(),
        };
        let mut note = row.note.clone();
        if !row.broken.is_empty() {
            note = format!("**does not hold: {}** {note}", row.broken.join("; "));
        }
        text.push_str(&format!(
            "| {} | {} | {major}.{minor}.{patch} | {} | {} | {} | {} | {} | {} ms | {recovered} | {} |\n",
            row.part,
            row.fault,
            row.policy,
            row.sent,
            row.answered,
            row.failed_plain,
            row.because_of_us,
            row.worst_added.as_millis(),
            note.replace('|', "\\|").replace('\n', " "),
        ));
    }
    text
}

/// The document with this table in the place of its table; `None` when it has none.
pub fn in_document(document: &str, table: &str) -> Option<String> {
    let (before, rest) = document.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n\n{table}\n{END}{after}"))
}

/// Where the table begins.
const BEGIN: &str = "<!-- the fault matrix begins -->";
/// Where it ends.
const END: &str = "<!-- the fault matrix ends -->";
