//! Figures → inline SVG for the page: one panel of fixed width each, coloured by the page's style sheet alone. Nothing in
//! it may come from outside the page, and every text is escaped.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::load::LoadResult;
use crate::report::{HostRow, in_flight, percentile, sorted_ttft_s};

/// Text made safe to stand in HTML, in attributes too.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            _ => out.push(letter),
        }
    }
    out
}

/// Milliseconds below a second, seconds above.
pub(super) fn seconds(value_s: f64) -> String {
    if value_s < 0.0995 {
        format!("{:.0} ms", value_s * 1000.0)
    } else if value_s < 0.9995 {
        format!("{:.0} ms", (value_s * 100.0).round() * 10.0)
    } else {
        format!("{value_s:.1} s")
    }
}

/// The axis that the distributions of all phases share: from and to, seconds, whole powers of ten.
pub(super) fn log_range<'a>(loads: impl Iterator<Item = &'a LoadResult>) -> (f64, f64) {
    let (mut least, mut most) = (f64::MAX, f64::MIN);
    for load in loads {
        let sorted = sorted_ttft_s(load);
        least = least.min(percentile(&sorted, 0.01));
        most = most.max(percentile(&sorted, 0.99));
    }
    if least > most {
        return (0.01, 10.0);
    }
    let decade = |value: f64| 10_f64.powf(value.max(0.001).log10().floor());
    (decade(least), (decade(most) * 10.0).max(decade(least) * 10.0))
}

/// Times to first token of one phase: for each strategy the span of 99 of 100, the middle half and the median.
pub(super) fn ttft(loads: &[(&str, &LoadResult)], (from_s, to_s): (f64, f64)) -> String {
    let x = |value_s: f64| {
        let share = (value_s.max(from_s) / from_s).ln() / (to_s / from_s).ln();
        4.0 + share.min(1.0) * (WIDTH - 8.0)
    };
    let height = loads.len() as f64 * TTFT_ROW + 20.0;
    let mut body = String::new();
    let mut decade_s = from_s;
    while decade_s <= to_s * 1.001 {
        for step in [1.0, 2.0, 5.0] {
            let (value_s, class) = (decade_s * step, if step == 1.0 { "grid" } else { "grid fine" });
            if value_s <= to_s * 1.001 {
                let at = x(value_s);
                let _ = write!(
                    body,
                    r#"<path class="{class}" d="M{at:.1} 4V{:.0}"/>"#,
                    height - 18.0
                );
            }
        }
        let at = x(decade_s);
        let anchor = match (decade_s <= from_s, decade_s * 1.001 >= to_s) {
            (true, _) => "start",
            (false, true) => "end",
            (false, false) => "middle",
        };
        let label = if decade_s < 0.999 {
            format!("{:.0} ms", decade_s * 1000.0)
        } else {
            format!("{decade_s:.0} s")
        };
        let _ = write!(
            body,
            r#"<text class="small" x="{at:.1}" y="{:.0}" text-anchor="{anchor}">{label}</text>"#,
            height - 5.0
        );
        decade_s *= 10.0;
    }
    for (row, (strategy, load)) in loads.iter().enumerate() {
        let sorted = sorted_ttft_s(load);
        let at = |share| x(percentile(&sorted, share));
        let (median_s, p99_s) = (percentile(&sorted, 0.5), percentile(&sorted, 0.99));
        let top = row as f64 * TTFT_ROW;
        let name = escape(strategy);
        let _ = write!(
            body,
            r#"<text class="halo" x="4" y="{:.0}">{name}</text><text class="small halo" x="{:.0}" y="{:.0}" text-anchor="end">median {}, p99 {}</text>"#,
            top + 14.0,
            WIDTH - 4.0,
            top + 14.0,
            seconds(median_s),
            seconds(p99_s)
        );
        let mut bar = |from: f64, to: f64, class: &str, inset: f64| {
            let _ = write!(
                body,
                r#"<rect class="{class} c-{name}" x="{from:.1}" y="{:.1}" width="{:.1}" height="{:.1}"/>"#,
                top + 19.0 + inset,
                (to - from).max(1.5),
                13.0 - 2.0 * inset
            );
        };
        bar(at(0.01), at(0.99), "pale", 3.0);
        bar(at(0.25), at(0.75), "", 0.0);
        let median = at(0.5);
        let _ = write!(
            body,
            r#"<path class="notch" d="M{median:.1} {:.0}v13"/>"#,
            top + 19.0
        );
    }
    svg(height, "time to first token by strategy, logarithmic", &body)
}

/// Hit share of each host and of all: one row a strategy.
pub(super) fn hit_shares(loads: &[(&str, &LoadResult)], replicas: usize) -> String {
    let left = 112.0;
    let cell = (WIDTH - left - 4.0) / (replicas as f64 + 1.3);
    let mut body = String::new();
    let label = |body: &mut String, column: f64, text: &str| {
        let at = left + column * cell + cell / 2.0;
        let _ = write!(
            body,
            r#"<text class="small" x="{at:.1}" y="12" text-anchor="middle">{text}</text>"#
        );
    };
    for host in 0..replicas {
        label(&mut body, host as f64, &host.to_string());
    }
    label(&mut body, replicas as f64 + 0.3, "all");
    for (row, (strategy, load)) in loads.iter().enumerate() {
        let top = 18.0 + row as f64 * 24.0;
        let _ = write!(
            body,
            r#"<text x="0" y="{:.0}">{}</text>"#,
            top + 15.0,
            escape(strategy)
        );
        let hosts = HostRow::of(load, replicas);
        let mut all = HostRow::default();
        for host in &hosts {
            all.prompt_tokens += host.prompt_tokens;
            all.cached_tokens += host.cached_tokens;
        }
        let columns = (0..replicas)
            .map(|host| host as f64)
            .chain([replicas as f64 + 0.3]);
        for (column, host) in columns.zip(hosts.iter().chain([&all])) {
            let at = left + column * cell;
            let share = host.hit_share();
            let _ = write!(
                body,
                r#"<rect class="heat" fill-opacity="{:.2}" x="{at:.1}" y="{top:.0}" width="{:.1}" height="22"/>"#,
                share.unwrap_or_default(),
                cell - 2.0
            );
            let text = share.map_or_else(|| "–".to_owned(), |share| format!("{:.0}", share * 100.0));
            let _ = write!(
                body,
                r#"<text class="small strong" x="{:.1}" y="{:.0}" text-anchor="middle">{text}</text>"#,
                at + cell / 2.0 - 1.0,
                top + 15.0
            );
        }
    }
    let height = 20.0 + loads.len() as f64 * 24.0;
    svg(
        height,
        "share of prompt tokens found in each host's cache, percent",
        &body,
    )
}

/// Requests in flight at each host over time, all phases after one another; `lasts_s` says how long each phase may be,
/// `most` what the darkest colour stands for.
pub(super) fn load_over_time(
    loads: &[LoadResult],
    names: &[&str],
    lasts_s: &[f64],
    replicas: usize,
    most: f64,
) -> String {
    let left = 16.0;
    let gap = 6.0;
    let whole_s: f64 = lasts_s.iter().sum();
    let scale = (WIDTH - left - 4.0 - gap * lasts_s.len().saturating_sub(1) as f64) / whole_s.max(0.001);
    let bottom = 16.0 + replicas as f64 * HOST_ROW;
    let mut body = String::new();
    for host in 0..replicas {
        let _ = write!(
            body,
            r#"<text class="small" x="10" y="{:.0}" text-anchor="end">{host}</text>"#,
            16.0 + host as f64 * HOST_ROW + 10.0
        );
    }
    let mut paths: BTreeMap<usize, String> = BTreeMap::new();
    let mut begins = left;
    for ((load, name), lasts_s) in loads.iter().zip(names).zip(lasts_s) {
        let width = lasts_s * scale;
        let _ = write!(
            body,
            r#"<rect class="floor" x="{begins:.1}" y="16" width="{width:.1}" height="{:.0}"/><text class="small" x="{begins:.1}" y="11">{}</text>"#,
            bottom - 16.0,
            escape(name)
        );
        let step = BIN_S * scale;
        for (host, bins) in in_flight(load, replicas, BIN_S).iter().enumerate() {
            for (bin, value) in bins.iter().enumerate() {
                let level = level(*value, most);
                let at = bin as f64 * step;
                if level == 0 || at >= width {
                    continue;
                }
                let _ = write!(
                    paths.entry(level).or_default(),
                    "M{:.1} {:.0}h{:.1}v{:.0}H{:.1}z",
                    begins + at,
                    16.0 + host as f64 * HOST_ROW,
                    step.min(width - at) + 0.1,
                    HOST_ROW - 1.0,
                    begins + at
                );
            }
        }
        begins += width + gap;
    }
    for (level, path) in paths {
        let _ = write!(
            body,
            r#"<path class="busy" fill-opacity="{:.2}" d="{path}"/>"#,
            level as f64 / LEVELS as f64
        );
    }
    let end = format!("{whole_s:.0} s");
    let _ = write!(
        body,
        r#"<text class="small" x="{left}" y="{y:.0}">0 s</text><text class="small" x="{:.0}" y="{y:.0}" text-anchor="end">{end}</text>"#,
        WIDTH - 4.0,
        y = bottom + 12.0
    );
    svg(bottom + 16.0, "requests in flight at each host over time", &body)
}

/// What the colours of [`load_over_time`] stand for.
pub(super) fn load_legend(most: f64) -> String {
    let mut out = String::from(r#"<p class="legend"><span>requests in flight:</span>"#);
    for count in [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0] {
        if count > most {
            break;
        }
        let opacity = level(count, most) as f64 / LEVELS as f64;
        let _ = write!(
            out,
            r#"<span><i class="chip busy-chip" style="opacity:{opacity:.2}"></i>{count:.0}</span>"#
        );
    }
    out.push_str("</p>");
    out
}

/// The most requests in flight at one host at a time of [`load_over_time`].
pub(super) fn most_in_flight(load: &LoadResult, replicas: usize) -> f64 {
    let hosts = in_flight(load, replicas, BIN_S);
    hosts.into_iter().flatten().fold(0.0, f64::max)
}

/// How many requests went where for which reason, as parts of a whole: one row a strategy.
pub(super) fn reasons(rows: &[(&str, &BTreeMap<String, usize>)]) -> String {
    let mut body = String::new();
    for (row, (strategy, reasons)) in rows.iter().enumerate() {
        let top = row as f64 * TTFT_ROW;
        let total: usize = reasons.values().sum();
        let home = reasons.get("home").copied().unwrap_or_default();
        let text = if home == total {
            "all at home".to_owned()
        } else {
            format!("{home} at home, {} elsewhere", total - home)
        };
        let _ = write!(
            body,
            r#"<text x="4" y="{:.0}">{}</text><text class="small" x="{:.0}" y="{:.0}" text-anchor="end">{text}</text>"#,
            top + 14.0,
            escape(strategy),
            WIDTH - 4.0,
            top + 14.0
        );
        stack(
            &mut body,
            reasons,
            4.0,
            top + 19.0,
            14.0,
            (WIDTH - 8.0) / total.max(1) as f64,
        );
    }
    svg(rows.len() as f64 * TTFT_ROW + 2.0, "requests by reason", &body)
}

/// Requests of each host by reason; `most` is as many as the whole width stands for.
pub(super) fn host_reasons(hosts: &[HostRow], most: usize) -> String {
    let mut body = String::new();
    for (number, host) in hosts.iter().enumerate() {
        let top = number as f64 * 18.0;
        let width = (WIDTH - 58.0) / most.max(1) as f64;
        let _ = write!(
            body,
            r#"<text class="small" x="10" y="{:.0}" text-anchor="end">{number}</text>"#,
            top + 12.0
        );
        stack(&mut body, &host.reasons, 16.0, top + 2.0, 13.0, width);
        let _ = write!(
            body,
            r#"<text class="small" x="{:.1}" y="{:.0}">{}</text>"#,
            20.0 + width * host.requests as f64,
            top + 12.0,
            host.requests
        );
    }
    svg(
        hosts.len() as f64 * 18.0 + 2.0,
        "requests of each host by reason",
        &body,
    )
}

/// The class that colours a reason.
pub(super) fn reason_class(reason: &str) -> &'static str {
    match reason {
        "home" => "r-home",
        "warm_host" => "r-warm",
        "overflow_cost" => "r-cost",
        reason if reason.starts_with("overflow_") => "r-over",
        _ => "r-other",
    }
}

/// Parts beside each other, `home` first, then `warm_host`, then by name.
fn stack(body: &mut String, reasons: &BTreeMap<String, usize>, x: f64, y: f64, height: f64, scale: f64) {
    let mut order: Vec<(&String, &usize)> = reasons.iter().collect();
    order.sort_by_key(|(reason, _)| match reason.as_str() {
        "home" => 0,
        "warm_host" => 1,
        _ => 2,
    });
    let mut at = x;
    for (reason, count) in order {
        let width = *count as f64 * scale;
        let _ = write!(
            body,
            r#"<rect class="{}" x="{at:.1}" y="{y:.0}" width="{:.1}" height="{height:.0}"><title>{}: {count}</title></rect>"#,
            reason_class(reason),
            (width - 1.0).max(0.5),
            escape(reason)
        );
        at += width;
    }
}

/// 0 for nothing, up to [`LEVELS`] for `most`; in between by the logarithm, so that 1 and 2 differ as 10 and 20 do.
fn level(value: f64, most: f64) -> usize {
    if value < 0.05 {
        return 0;
    }
    let share = (1.0 + value).ln() / (1.0 + most.max(1.0)).ln();
    ((share * LEVELS as f64).ceil() as usize).clamp(1, LEVELS)
}

fn svg(height: f64, label: &str, body: &str) -> String {
    format!(r#"<svg viewBox="0 0 {WIDTH:.0} {height:.0}" role="img" aria-label="{label}">{body}</svg>"#)
}

/// Width of every panel: what a phone shows without making letters smaller.
const WIDTH: f64 = 360.0;
const TTFT_ROW: f64 = 38.0;
const HOST_ROW: f64 = 13.0;
/// Fine enough for a queue to show as it grows.
const BIN_S: f64 = 0.25;
const LEVELS: usize = 12;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Outcome;

    fn load() -> LoadResult {
        let outcome = |number: u32| Outcome {
            ttft_s: f64::from(number) / 100.0,
            total_s: 0.5,
            at_s: f64::from(number) / 50.0,
            prompt_tokens: 100,
            cached_tokens: 50,
            replica: "replica-1".to_owned(),
            ..Outcome::default()
        };
        LoadResult {
            outcomes: (1..=100).map(outcome).collect(),
            elapsed_s: 2.5,
        }
    }

    #[test]
    fn texts_are_escaped() {
        assert_eq!(escape("<a b='c'>&\""), "&lt;a b=&#39;c&#39;&gt;&amp;&quot;");
        let load = load();
        assert!(ttft(&[("<b>", &load)], (0.01, 1.0)).contains("&lt;b&gt;"));
        let reasons_of = BTreeMap::from([("<i>".to_owned(), 3)]);
        assert!(!reasons(&[("<b>", &reasons_of)]).contains("<i>"));
    }

    #[test]
    fn the_axis_spans_whole_decades_around_what_was_measured() {
        let load = load();
        let (from_s, to_s) = log_range([&load].into_iter());
        assert!(
            (from_s - 0.01).abs() < 1e-9 && (to_s - 1.0).abs() < 1e-9,
            "{from_s} {to_s}"
        );
        assert_eq!(log_range([&LoadResult::default()].into_iter()).0, 0.001);
    }

    #[test]
    fn cells_say_what_was_hit_and_where_nothing_was() {
        let load = load();
        let text = hit_shares(&[("hybrid", &load)], 2);
        assert!(
            text.contains(">–<") && text.matches(">50<").count() == 2,
            "{text}"
        );
    }

    #[test]
    fn colours_get_darker_with_load() {
        let levels: Vec<usize> = [0.0, 0.1, 1.0, 5.0, 20.0, 80.0]
            .iter()
            .map(|value| level(*value, 80.0))
            .collect();
        assert!(levels.windows(2).all(|pair| pair[0] < pair[1]), "{levels:?}");
        assert_eq!((levels[0], levels[5]), (0, LEVELS));
        assert!((most_in_flight(&load(), 2) - 25.0).abs() < 1.0);
    }

    #[test]
    fn times_are_told_in_the_unit_that_fits() {
        assert_eq!(
            [0.0044, 0.0514, 0.2345, 3.21].map(seconds),
            ["4 ms", "51 ms", "230 ms", "3.2 s"]
        );
    }
}
