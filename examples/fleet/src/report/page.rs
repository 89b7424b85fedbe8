//! What the demo measured → one HTML page for people: charts, claims, table and the conditions of the measurement.
//!
//! The page holds all that it needs: no script, no font, no image and no link leads out of it. It states only what was
//! measured; sentences under charts take their numbers from the runs.

use std::fmt::Write;
use std::time::Duration;

use super::charts::{self, escape, seconds};
use super::words::{date, meaning, thousands};
use super::{Row, Run};
use crate::demo::claims::Claim;
use crate::load::LoadResult;
use crate::workload::{Traffic, Workload};

mod overflow;

/// What the page is about.
pub struct Page<'a> {
    /// What was sent.
    pub workload: &'a Workload,
    /// What each strategy gave.
    pub runs: &'a [Run],
    /// Rows of all phases, and of phase `all`.
    pub rows: &'a [Row],
    /// Promises and whether they hold.
    pub claims: &'a [Claim],
    /// Envoy's version.
    pub envoy: String,
    /// When it was written, since the Unix epoch.
    pub written: Duration,
    /// How long all of it took.
    pub took: Duration,
}

impl Page<'_> {
    /// The whole page.
    pub fn html(&self) -> String {
        let mut out = String::from(HEAD);
        self.opening(&mut out);
        self.overview(&mut out);
        self.first_token(&mut out);
        self.load(&mut out);
        self.hits(&mut out);
        self.overflow(&mut out);
        self.table(&mut out);
        self.measurement(&mut out);
        out.push_str("</main>\n</html>\n");
        out
    }

    /// Under what conditions it was measured, in plain text: whether the machine was fast enough to believe it.
    pub fn conditions(&self) -> String {
        let late_s = self.runs.iter().map(Run::late_p99_s).fold(0.0, f64::max);
        let mut text = format!(
            "The load generator sent 99 of 100 requests within {:.0} ms of their time",
            (late_s * 1000.0).ceil()
        );
        let busy = self.runs.iter().filter_map(|run| run.busy_cores);
        if let Some(busy) = busy.reduce(f64::max) {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let _ = write!(
                text,
                "; load generator, replicas and Envoy together kept {busy:.1} of {cores} cores busy"
            );
        }
        text.push('.');
        if self.machine_was_too_busy() {
            text.push_str(
                " This machine was too busy for these figures: what they show is partly its load, not routing.",
            );
        }
        text
    }

    /// Whether the load generator itself was late by a good part of what was to be measured.
    fn machine_was_too_busy(&self) -> bool {
        let late_s = self.runs.iter().map(Run::late_p99_s).fold(0.0, f64::max);
        let fastest_s = self.totals().map(|row| row.ttft_mean_s).fold(f64::MAX, f64::min);
        late_s > fastest_s * LATE_SHARE
    }

    fn opening(&self, out: &mut String) {
        let fleet = &self.workload.fleet;
        let sent = self.totals().map(|row| row.requests).max().unwrap_or_default();
        let _ = writeln!(
            out,
            "<header><h1>Warmroute: what routing to warm caches does</h1>\
             <p>The same {sent} LLM requests were sent through {} to {} simulated replicas, once under each of {} routing \
             strategies. A replica that has served a prompt's beginning before still has it in its <b>KV cache</b> and \
             skips that part of the work; any other replica computes it anew. What a user notices is the <b>time to \
             first token (TTFT)</b>: how long it takes until the answer begins.</p></header>",
            escape(&self.envoy),
            fleet.replicas,
            self.runs.len()
        );
    }

    fn overview(&self, out: &mut String) {
        out.push_str("<section><h2>In short</h2>\n<div class=\"bars\">");
        let most = self.totals().map(|row| row.ttft_mean_s).fold(0.0, f64::max);
        for row in self.totals() {
            let name = escape(&row.strategy);
            let _ = write!(
                out,
                "<div class=\"bar\"><span class=\"name\">{name}</span><span class=\"track\"><i class=\"b-{name}\" \
                 style=\"width:{:.1}%\"></i></span><span class=\"value\">{}</span><span class=\"what\">{}</span></div>",
                100.0 * row.ttft_mean_s / most.max(f64::MIN_POSITIVE),
                seconds(row.ttft_mean_s),
                meaning(&row.strategy)
            );
        }
        out.push_str(
            "</div>\n<p class=\"see\">Mean time to first token over all requests; shorter is better.",
        );
        let mean = |strategy: &str| self.total(strategy).map(|row| row.ttft_mean_s);
        if let (Some(hybrid), Some(other)) = (mean("hybrid"), mean("round_robin")) {
            let _ = write!(
                out,
                " Under <b>hybrid</b>, Warmroute’s default, an answer begins after {} on average, under <b>round_robin</b> \
                 after {}.",
                seconds(hybrid),
                seconds(other)
            );
        }
        out.push_str("</p>\n<h3>What is promised, and whether it held here</h3>\n<ul class=\"claims\">");
        for claim in self.claims {
            let (class, mark) = match claim.holds {
                Some(true) => ("yes", "✓ holds"),
                Some(false) => ("no", "✗ missed"),
                None => ("unknown", "– not run"),
            };
            let _ = write!(
                out,
                "<li class=\"{class}\"><b>{mark}</b><span>{}<br><small>{}</small></span></li>",
                escape(&claim.promise),
                escape(&claim.measured)
            );
        }
        let _ = writeln!(
            out,
            "</ul>\n<p class=\"{}\">{}</p></section>",
            if self.machine_was_too_busy() {
                "warn"
            } else {
                "see"
            },
            escape(&self.conditions())
        );
    }

    fn first_token(&self, out: &mut String) {
        out.push_str(
            "<section><h2>How long until the answer begins</h2>\n<p>Pale: all but the fastest and the slowest 1 % of the \
             requests. Solid: the middle half. Notch: the median. The scale is logarithmic: each labelled line is ten \
             times the one before.</p>\n<div class=\"panels aligned\">",
        );
        let range = charts::log_range(self.runs.iter().flat_map(|run| &run.phases));
        for (number, phase) in self.workload.phases.iter().enumerate() {
            let _ = write!(
                out,
                "<figure><h3>{}</h3><p class=\"about\">{}</p>{}<figcaption>",
                escape(&phase.title),
                escape(&phase.about),
                charts::ttft(&self.loads(number), range)
            );
            let row = |strategy: &str| self.row(strategy, &phase.name);
            match (row("hybrid"), row("round_robin"), row("prefix_hash")) {
                (Some(hybrid), _, Some(hash)) if matches!(phase.traffic, Traffic::HotPrompt(_)) => {
                    let _ = write!(
                        out,
                        "The slowest 1 % waited {} or longer under prefix_hash, which keeps the hot prompt on one \
                         replica, and {} under hybrid, which lets it spread.",
                        seconds(hash.ttft_p99_s),
                        seconds(hybrid.ttft_p99_s)
                    );
                }
                (Some(hybrid), Some(robin), _) => {
                    let _ = write!(
                        out,
                        "Further left is sooner: half of the answers began within {} under hybrid and within {} under \
                         round_robin.",
                        seconds(hybrid.ttft_p50_s),
                        seconds(robin.ttft_p50_s)
                    );
                }
                _ => out.push_str("Further left is sooner."),
            }
            out.push_str("</figcaption></figure>");
        }
        out.push_str("</div></section>\n");
    }

    fn load(&self, out: &mut String) {
        let replicas = self.workload.fleet.replicas;
        let lasts_s: Vec<f64> = (0..self.workload.phases.len())
            .map(|number| {
                let phases = self.runs.iter().filter_map(|run| run.phases.get(number));
                phases.map(|load| load.elapsed_s).fold(0.0, f64::max)
            })
            .collect();
        let most_of = |run: &Run| {
            let phases = run.phases.iter();
            phases
                .map(|load| charts::most_in_flight(load, replicas))
                .fold(0.0, f64::max)
        };
        let most = self.runs.iter().map(most_of).fold(1.0, f64::max);
        let names: Vec<&str> = self
            .workload
            .phases
            .iter()
            .map(|phase| phase.name.as_str())
            .collect();
        let _ = write!(
            out,
            "<section><h2>Which replica was busy when</h2>\n<p>One row a replica, time from left to right; the stronger \
             the colour, the more requests were waiting or running there.</p>{}\n<div class=\"panels\">",
            charts::load_legend(most)
        );
        for run in self.runs {
            let busiest = most_of(run);
            let drained = if run
                .phases
                .iter()
                .zip(&lasts_s)
                .any(|(load, lasts_s)| load.elapsed_s < lasts_s - 1.0)
            {
                " Empty ends of a phase: it was through sooner than the slowest strategy."
            } else {
                ""
            };
            let _ = write!(
                out,
                "<figure><h3>{}</h3>{}<figcaption>At most {busiest:.0} requests at one replica at a time.{drained}\
                 </figcaption></figure>",
                escape(&run.strategy),
                charts::load_over_time(&run.phases, &names, &lasts_s, replicas, most)
            );
        }
        out.push_str(
            "</div>\n<p class=\"see\">An even, faint picture is what you want. One strong row among faint ones is a replica \
             where requests queue while the others idle; all rows strong is a fleet that computes too much \
             anew.</p></section>\n",
        );
    }

    fn hits(&self, out: &mut String) {
        out.push_str(
            "<section><h2>How much of the prompts was already there</h2>\n<p>For each replica (columns), the percentage of \
             the prompt tokens sent to it that it found in its cache.</p>\n<div class=\"panels\">",
        );
        for (number, phase) in self.workload.phases.iter().enumerate() {
            let _ = write!(
                out,
                "<figure><h3>{}</h3>{}<figcaption>The stronger the colour, the warmer.",
                escape(&phase.title),
                charts::hit_shares(&self.loads(number), self.workload.fleet.replicas)
            );
            let share = |strategy: &str| self.row(strategy, &phase.name).map(|row| row.hit_share * 100.0);
            if let (Some(hybrid), Some(robin)) = (share("hybrid"), share("round_robin")) {
                let _ = write!(
                    out,
                    " Of all prompt tokens, hybrid found {hybrid:.0} % in a cache and round_robin {robin:.0} %; the rest \
                     had to be computed."
                );
            }
            out.push_str("</figcaption></figure>");
        }
        out.push_str("</div></section>\n");
    }

    fn table(&self, out: &mut String) {
        out.push_str(
            "<section><h2>All figures</h2>\n<div class=\"scroll\"><table><thead><tr><th>phase<th>strategy<th>requests\
             <th>errors<th>hit share<th>TTFT mean<th>median<th>p99<th>busiest ÷ mean<th>tokens saved</tr></thead>\n",
        );
        let mut phase = None;
        for row in self.rows {
            let starts = phase.replace(&row.phase) != Some(&row.phase);
            let _ = writeln!(
                out,
                "<tr{}><td>{}<td>{}<td>{}<td>{}<td>{:.1} %<td>{:.0} ms<td>{:.0} ms<td>{:.0} ms<td>{:.2}<td>{}</tr>",
                if starts { " class=\"first\"" } else { "" },
                escape(&row.phase),
                escape(&row.strategy),
                row.requests,
                row.errors,
                row.hit_share * 100.0,
                row.ttft_mean_s * 1000.0,
                row.ttft_p50_s * 1000.0,
                row.ttft_p99_s * 1000.0,
                row.max_mean_load,
                thousands(row.prefill_tokens_saved)
            );
        }
        out.push_str(
            "</table></div>\n<p class=\"see\">Hit share: prompt tokens found in a cache ÷ prompt tokens. Busiest ÷ mean: \
             requests of the replica that served most, against the mean of all; 1 is even. Tokens saved: what no replica \
             had to compute.</p></section>\n",
        );
    }

    fn measurement(&self, out: &mut String) {
        let (workload, model) = (self.workload, self.workload.engine());
        let times = model.times;
        let _ = write!(
            out,
            "<section><h2>How it was measured</h2>\n<p>{}</p><dl>",
            escape(&workload.about)
        );
        let mut fact = |name: &str, value: &str| {
            let _ = write!(out, "<dt>{name}</dt><dd>{}</dd>", escape(value));
        };
        fact(
            "replicas",
            &format!(
                "{}, simulated: their timing is a model, HTTP and Envoy are real",
                workload.fleet.replicas
            ),
        );
        fact("engine model", &workload.fleet.engine);
        fact(
            "KV cache of a replica",
            &format!(
                "{} tokens ({} blocks of {})",
                thousands(model.capacity_tokens() as u64),
                model.cache_blocks,
                model.block_tokens
            ),
        );
        fact(
            "time of an engine step",
            &format!(
                "{} µs + {} µs × prefill tokens + {} µs × prefill token pairs + {} µs × decoding requests + {} µs × their \
                 context tokens",
                times.base_us,
                times.prefill_token_us,
                times.prefill_pair_us,
                times.decode_us,
                times.decode_context_us
            ),
        );
        fact(
            "limits of a step",
            &format!("{} tokens, {} requests", model.step_tokens, model.max_running),
        );
        fact("speed factor", &format!("{} (1: in real time)", model.speed));
        fact("seed", &workload.seed.to_string());
        fact(
            "proxy",
            &format!(
                "{}, two workers, Warmroute’s filter and companion in it",
                self.envoy
            ),
        );
        fact(
            "arrivals",
            "open loop: requests are sent at their times whether or not earlier ones were answered",
        );
        fact(
            "run",
            &format!(
                "{}, {:.0} s for all strategies",
                date(self.written.as_secs()),
                self.took.as_secs_f64()
            ),
        );
        out.push_str("</dl>\n<h3>The machine during each run</h3>\n<div class=\"scroll\"><table><thead><tr><th>strategy\
             <th>cores busy<th>sent late by, p99</tr></thead>");
        for run in self.runs {
            let busy = run
                .busy_cores
                .map_or_else(|| "unknown".to_owned(), |cores| format!("{cores:.2}"));
            let _ = write!(
                out,
                "<tr><td>{}<td>{busy}<td>{:.1} ms</tr>",
                escape(&run.strategy),
                run.late_p99_s() * 1000.0
            );
        }
        let json = serde_json::to_string_pretty(workload).unwrap_or_default();
        let _ = writeln!(
            out,
            "</table></div>\n<details><summary>The workload as it was run</summary><pre>{}</pre></details></section>",
            escape(&json)
        );
    }

    fn totals(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| row.phase == ALL)
    }

    fn total(&self, strategy: &str) -> Option<&Row> {
        self.row(strategy, ALL)
    }

    fn row(&self, strategy: &str, phase: &str) -> Option<&Row> {
        self.rows
            .iter()
            .find(|row| row.strategy == strategy && row.phase == phase)
    }

    fn loads(&self, phase: usize) -> Vec<(&str, &LoadResult)> {
        self.runs
            .iter()
            .filter_map(|run| Some((run.strategy.as_str(), run.phases.get(phase)?)))
            .collect()
    }
}

/// The phase of rows over all phases.
pub const ALL: &str = "all";

/// Above this part of the shortest mean TTFT, what the load generator is late by spoils the figures.
const LATE_SHARE: f64 = 0.25;
/// Title and style sheet.
const HEAD: &str = include_str!("page_head.html");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::args::STRATEGIES;
    use crate::demo::claims;
    use crate::load::Outcome;
    use crate::workload::{DEMO, Workload};

    fn load() -> LoadResult {
        let outcome = |number: u32| Outcome {
            ttft_s: f64::from(number) / 100.0,
            total_s: 0.5,
            prompt_tokens: 100,
            cached_tokens: 50,
            replica: format!("replica-{}", number % 8),
            debug_headers: vec![(
                "reason".to_owned(),
                ["home", "overflow_cost"][number as usize % 2].to_owned(),
            )],
            ..Outcome::default()
        };
        LoadResult {
            outcomes: (1..=100).map(outcome).collect(),
            elapsed_s: 2.5,
        }
    }

    fn page_of(workload: &Workload) -> String {
        let run = |strategy: &str| Run {
            strategy: strategy.to_owned(),
            phases: vec![load(); workload.phases.len()],
            busy_cores: Some(0.5),
        };
        let runs = STRATEGIES.map(run);
        let names = workload
            .phases
            .iter()
            .map(|phase| phase.name.as_str())
            .chain([ALL]);
        let rows: Vec<Row> = names
            .flat_map(|phase| STRATEGIES.map(|strategy| Row::new(strategy, phase, &load(), 8)))
            .collect();
        let claims = claims::check(&rows[rows.len() - 5..], &rows[..5]);
        Page {
            workload,
            runs: &runs,
            rows: &rows,
            claims: &claims,
            envoy: "Envoy 1.40.0".to_owned(),
            written: Duration::from_secs(1_796_004_000),
            took: Duration::from_secs(170),
        }
        .html()
    }

    #[test]
    fn nothing_on_the_page_comes_from_elsewhere() {
        let html = page_of(&Workload::parse(DEMO).unwrap());
        for outside in [
            "http://", "https://", "src=", "href=", "url(", "@import", "<script", "<link",
        ] {
            assert!(!html.contains(outside), "{outside}");
        }
    }

    #[test]
    fn every_strategy_and_phase_is_there_and_every_figure() {
        let workload = Workload::parse(DEMO).unwrap();
        let html = page_of(&workload);
        for strategy in STRATEGIES {
            assert!(html.contains(&format!("<h3>{strategy}</h3>")), "{strategy}");
            assert!(
                HEAD.contains(&format!("--{strategy}:")),
                "{strategy} has no colour"
            );
        }
        for phase in &workload.phases {
            assert!(html.contains(&phase.title));
        }
        // Twenty rows of figures, five of the machine, two heads.
        assert_eq!(html.matches("<tr").count(), 4 * 5 + 5 + 2);
        for fact in [
            "seed</dt><dd>1<",
            "llama_8b_h100x1",
            "Envoy 1.40.0",
            "5800 µs",
            "speed factor",
        ] {
            assert!(html.contains(fact), "{fact}");
        }
    }

    #[test]
    fn texts_of_a_workload_cannot_become_markup() {
        let mut workload = Workload::parse(DEMO).unwrap();
        workload.about = "<script>alert(1)</script>".to_owned();
        workload.phases[0].title = "<b>&".to_owned();
        workload.phases[0].name = "<i>".to_owned();
        let html = page_of(&workload);
        assert!(!html.contains("<script") && !html.contains("<b>&<") && !html.contains("<i>"));
        assert!(html.contains("&lt;b&gt;&amp;"));
    }
}
