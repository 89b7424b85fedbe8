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

/// The document with these rows in its table: each in the place of the one of the same scenario, Envoy and policy, or behind
/// those of its part. `None` when it has no table.
pub fn with_rows(document: &str, rows: &str) -> Option<String> {
    let (_, rest) = document.split_once(BEGIN)?;
    let (old, _) = rest.split_once(END)?;
    let mut lines: Vec<&str> = old.trim().lines().collect();
    for row in rows.lines().skip(HEAD_LINES) {
        let is_same =
            |line: &&str, cells: usize| line.split(" | ").take(cells).eq(row.split(" | ").take(cells));
        if let Some(at) = lines.iter().position(|line| is_same(line, 4)) {
            lines[at] = row;
        } else {
            let behind = lines.iter().rposition(|line| is_same(line, 1));
            lines.insert(behind.map_or(lines.len(), |at| at + 1), row);
        }
    }
    in_document(document, &format!("{}\n", lines.join("\n")))
}

const HEAD_LINES: usize = 2;
/// Where the table begins.
const BEGIN: &str = "<!-- the fault matrix begins -->";
/// Where it ends.
const END: &str = "<!-- the fault matrix ends -->";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_take_the_places_of_those_of_the_same_scenario_envoy_and_policy() {
        let head = "| what | fault | Envoy | policy | sent | |\n|---|---|---|---|---|---|\n";
        let document = |rows: &[&str]| {
            let rows: String = rows.iter().map(|row| format!("{row}\n")).collect();
            format!("text\n{BEGIN}\n\n{head}{rows}\n{END}\nmore\n")
        };
        let before = document(&[
            "| engine | killed | 1.36.2 | shipped | 1 | |",
            "| engine | killed | 1.40.0 | shipped | 2 | |",
            "| admin | slow | 1.36.2 | shipped | 3 | |",
        ]);
        let rows = format!(
            "{head}| engine | killed | 1.40.0 | shipped | 20 | a \\| b |\n| engine | killed | 1.40.0 | FAIL_OPEN | 4 | |\n"
        );
        let after = document(&[
            "| engine | killed | 1.36.2 | shipped | 1 | |",
            "| engine | killed | 1.40.0 | shipped | 20 | a \\| b |",
            "| engine | killed | 1.40.0 | FAIL_OPEN | 4 | |",
            "| admin | slow | 1.36.2 | shipped | 3 | |",
        ]);
        assert_eq!(with_rows(&before, &rows), Some(after));
        assert_eq!(with_rows("no table", &rows), None);
    }
}
