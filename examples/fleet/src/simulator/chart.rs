//! Rows of figures → one page that needs nothing else.

use std::fmt::Write as _;

use super::outcome::Summary;

/// A page with a chart for each of some figures, and all figures in a table.
pub fn page(title: &str, facts: &str, rows: &[(String, Summary)]) -> String {
    let mut html = format!(
        "<!doctype html><meta charset=\"utf-8\"><title>{0}</title>\n<style>body{{font:15px system-ui;margin:2rem auto;\
         max-width:60rem;padding:0 1rem;color:#1d2733;background:#fff}}td,th{{text-align:right;padding:.2rem .7rem}}\
         td:first-child,th:first-child{{text-align:left}}svg text{{font:13px system-ui}}table{{border-collapse:collapse}}\
         tr+tr{{border-top:1px solid #dde3ea}}</style>\n<h1>{0}</h1>\n<p>{1}</p>\n",
        escaped(title),
        escaped(facts)
    );
    let figures: [(&str, Figure); 4] = [
        ("Mean time to first token, ms", |row| row.mean_ms),
        ("99th percentile of time to first token, ms", |row| row.p99_ms),
        ("Prompt tokens found in caches, %", |row| row.hit_share * 100.0),
        ("Uncached work of the busiest host ÷ mean", |row| {
            row.max_mean_work
        }),
    ];
    for (name, of) in figures {
        bars(&mut html, name, rows, of);
    }
    html.push_str("<table><tr><th>policy");
    for name in COLUMNS {
        let _ = write!(html, "<th>{name}");
    }
    for (policy, row) in rows {
        let _ = write!(html, "<tr><td>{}", escaped(policy));
        for cell in cells(row) {
            let _ = write!(html, "<td>{cell}");
        }
    }
    html.push_str("</table>\n");
    html
}

type Figure = fn(&Summary) -> f64;

/// Names of the columns of a table of figures.
pub const COLUMNS: [&str; 11] = [
    "mean ms",
    "p50 ms",
    "p90 ms",
    "p99 ms",
    "excess ms",
    "hits %",
    "predicted %",
    "max/mean",
    "overflow %",
    "prefill %",
    "failed",
];

/// The figures of a row, as text.
pub fn cells(row: &Summary) -> [String; 11] {
    let percent = |share: f64| format!("{:.1}", share * 100.0);
    let ms = |time: f64| format!("{time:.0}");
    [
        ms(row.mean_ms),
        ms(row.p50_ms),
        ms(row.p90_ms),
        ms(row.p99_ms),
        ms(row.excess_ms),
        percent(row.hit_share),
        percent(row.predicted_share),
        format!("{:.2}", row.max_mean_work),
        percent(row.overflow_share),
        percent(row.prefill_share),
        row.failed.to_string(),
    ]
}

/// The same as a table for a terminal.
pub fn table(rows: &[(String, Summary)]) -> String {
    let width = rows.iter().map(|row| row.0.len()).max().unwrap_or(0).max(8);
    let mut text = format!("{:width$}", "policy");
    COLUMNS.iter().for_each(|name| _ = write!(text, " {name:>11}"));
    for (policy, row) in rows {
        let _ = write!(text, "\n{policy:width$}");
        cells(row).iter().for_each(|cell| _ = write!(text, " {cell:>11}"));
    }
    text.push('\n');
    text
}

/// The same as comma-separated values.
pub fn csv(rows: &[(String, Summary)]) -> String {
    let mut text = format!(
        "policy,{}\n",
        COLUMNS.map(|name| name.replace([' ', '/'], "_")).join(",")
    );
    for (policy, row) in rows {
        let _ = writeln!(text, "{policy},{}", cells(row).join(","));
    }
    text
}

fn bars(html: &mut String, name: &str, rows: &[(String, Summary)], of: Figure) {
    let most = rows
        .iter()
        .map(|row| of(&row.1))
        .fold(f64::MIN_POSITIVE, f64::max);
    let _ = write!(
        html,
        "<h2>{name}</h2>\n<svg role=\"img\" width=\"100%\" viewBox=\"0 0 800 {}\">",
        rows.len() * 26
    );
    for (at, (policy, row)) in rows.iter().enumerate() {
        let (y, width) = (at * 26, of(row) / most * 520.0);
        let _ = write!(
            html,
            "<text x=\"150\" y=\"{}\" text-anchor=\"end\">{}</text><rect x=\"160\" y=\"{}\" width=\"{width:.1}\" \
             height=\"18\" fill=\"#2f6f9f\"/><text x=\"{:.1}\" y=\"{}\">{}</text>",
            y + 16,
            escaped(policy),
            y + 2,
            width + 166.0,
            y + 16,
            Shown(of(row)),
        );
    }
    html.push_str("</svg>\n");
}

/// Four digits, no more.
struct Shown(f64);

impl std::fmt::Display for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0 >= 100.0 {
            write!(f, "{:.0}", self.0)
        } else {
            write!(f, "{:.2}", self.0)
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
