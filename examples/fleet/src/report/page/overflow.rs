//! The page's section on homes: how many requests left theirs, for which reason, and where they went.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::Page;
use crate::report::charts::{self, escape};
use crate::report::words::explained;
use crate::report::{HostRow, Run};
use crate::workload::{Phase, Traffic};

impl Page<'_> {
    /// Reasons by strategy and phase, and where the requests of the hot phase went.
    pub(super) fn overflow(&self, out: &mut String) {
        let homed: Vec<&Run> = self
            .runs
            .iter()
            .filter(|run| {
                run.phases
                    .iter()
                    .flat_map(|load| &load.outcomes)
                    .any(|outcome| outcome.debug_header("reason") == Some("home"))
            })
            .collect();
        if homed.is_empty() {
            return;
        }
        out.push_str(
            "<section><h2>When requests left their home</h2>\n<p>Except under round_robin and least_outstanding, each \
             prompt’s beginning names one replica as its <b>home</b>, where it is sent unless another one promises to \
             be sooner.</p>\n",
        );
        let mut present: BTreeSet<&str> = BTreeSet::new();
        let mut panels = String::new();
        for phase in &self.workload.phases {
            let rows: Vec<(&str, &BTreeMap<String, usize>)> = homed
                .iter()
                .filter_map(|run| self.row(&run.strategy, &phase.name))
                .map(|row| (row.strategy.as_str(), &row.reasons))
                .collect();
            present.extend(
                rows.iter()
                    .flat_map(|(_, reasons)| reasons.keys())
                    .map(String::as_str),
            );
            let _ = write!(
                panels,
                "<figure><h3>{}</h3>{}<figcaption>{}</figcaption></figure>",
                escape(&phase.title),
                charts::reasons(&rows),
                self.left_home(&phase.name)
            );
        }
        out.push_str("<p class=\"legend\">");
        for reason in present {
            let _ = write!(
                out,
                "<span><i class=\"chip {}\"></i><b>{}</b> {}</span>",
                charts::reason_class(reason),
                escape(reason),
                escape(explained(reason))
            );
        }
        let _ = write!(out, "</p>\n<div class=\"panels\">{panels}</div>\n");
        self.landing(out, &homed);
        out.push_str("</section>\n");
    }

    /// Where the requests of the hot phase ended up, host by host.
    fn landing(&self, out: &mut String, homed: &[&Run]) {
        let is_hot = |(_, phase): &(usize, &Phase)| matches!(phase.traffic, Traffic::HotPrompt(_));
        let Some((number, phase)) = self.workload.phases.iter().enumerate().find(is_hot) else {
            return;
        };
        let replicas = self.workload.fleet.replicas;
        let hosts: Vec<(&str, Vec<HostRow>)> = homed
            .iter()
            .filter_map(|run| {
                Some((
                    run.strategy.as_str(),
                    HostRow::of(run.phases.get(number)?, replicas),
                ))
            })
            .collect();
        let counts = hosts
            .iter()
            .flat_map(|(_, hosts)| hosts)
            .map(|host| host.requests);
        let most = counts.max().unwrap_or_default();
        let _ = write!(
            out,
            "<h3>Where they went: {}</h3>\n<p>Requests that each replica served, by the reason that brought them \
             there.</p>\n<div class=\"panels\">",
            escape(&phase.title)
        );
        for (strategy, hosts) in hosts {
            let busiest = hosts.iter().map(|host| host.requests).max().unwrap_or_default();
            let all: usize = hosts.iter().map(|host| host.requests).sum();
            let taken: usize = all
                - hosts
                    .iter()
                    .filter_map(|host| host.reasons.get("home"))
                    .sum::<usize>();
            let _ = write!(
                out,
                "<figure><h3>{}</h3>{}<figcaption>The busiest replica served {busiest} of {all} requests; {} were \
                 taken over from other homes.</figcaption></figure>",
                escape(strategy),
                charts::host_reasons(&hosts, most),
                if taken == 0 {
                    "none".to_owned()
                } else {
                    taken.to_string()
                }
            );
        }
        out.push_str("</div>\n");
    }

    /// How many requests left their home, in a sentence.
    fn left_home(&self, phase: &str) -> String {
        let told = |strategy: &str| {
            let row = self.row(strategy, phase)?;
            let total: usize = row.reasons.values().sum();
            let home = row.reasons.get("home").copied().unwrap_or_default();
            let share = 100.0 * (total - home) as f64 / total.max(1) as f64;
            Some(format!(
                "{share:.0} % of hybrid’s requests left their home; even so, {:.0} % of all prompt tokens were found in a \
                 cache.",
                row.hit_share * 100.0
            ))
        };
        told("hybrid").unwrap_or_else(|| "Parts of all requests, by reason.".to_owned())
    }
}
