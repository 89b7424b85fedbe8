//! How far the demo is → lines on standard output: on a terminal one bar a strategy, redrawn in place; elsewhere plain
//! lines now and then.

use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::load::Progress;

/// The bars of all strategies.
pub(super) struct Bars {
    terminal: bool,
    drawn: bool,
    bars: Vec<Bar>,
}

/// The bar of one strategy.
#[derive(Debug, Clone, Default)]
struct Bar {
    strategy: String,
    total: usize,
    state: State,
    progress: Arc<Progress>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum State {
    #[default]
    Waiting,
    Starting,
    Phase(String),
    Done,
}

impl Bars {
    /// Bars for strategies that will send `total` requests each.
    pub(super) fn new(strategies: &[String], total: usize) -> Self {
        let bar = |strategy: &String| Bar {
            strategy: strategy.clone(),
            total,
            ..Bar::default()
        };
        Self {
            terminal: io::stdout().is_terminal(),
            drawn: false,
            bars: strategies.iter().map(bar).collect(),
        }
    }

    /// How often to call [`Bars::show`].
    pub(super) fn interval(&self) -> Duration {
        if self.terminal {
            TERMINAL_INTERVAL
        } else {
            LINE_INTERVAL
        }
    }

    /// A strategy's set-up is being started.
    pub(super) fn starting(&mut self, strategy: usize) {
        self.enter(strategy, State::Starting);
    }

    /// A strategy begins a phase; returns where to count its requests.
    pub(super) fn phase(&mut self, strategy: usize, name: &str) -> Arc<Progress> {
        self.enter(strategy, State::Phase(name.to_owned()));
        self.bars
            .get(strategy)
            .map(|bar| Arc::clone(&bar.progress))
            .unwrap_or_default()
    }

    /// A strategy is through.
    pub(super) fn done(&mut self, strategy: usize) {
        self.enter(strategy, State::Done);
        if !self.terminal {
            self.show(strategy);
        }
    }

    /// Shows how far a strategy is.
    pub(super) fn show(&mut self, strategy: usize) {
        if !self.terminal {
            let line = self.bars.get(strategy).map(Bar::line).unwrap_or_default();
            return say(&format!("{line}\n"));
        }
        // Lines that a narrow terminal wrapped could not be drawn over: it cuts them meanwhile.
        let mut text = "\x1b[?7l".to_owned();
        if self.drawn {
            text.push_str(&format!("\x1b[{}A", self.bars.len()));
        }
        for bar in &self.bars {
            text.push_str(&format!("\r\x1b[K{}\n", bar.line()));
        }
        text.push_str("\x1b[?7h");
        self.drawn = true;
        say(&text);
    }

    fn enter(&mut self, strategy: usize, state: State) {
        if let Some(bar) = self.bars.get_mut(strategy) {
            bar.state = state;
        }
        if self.terminal {
            self.show(strategy);
        }
    }
}

impl Bar {
    fn line(&self) -> String {
        let done = self.progress.done.load(Ordering::Relaxed);
        let sent = self.progress.sent.load(Ordering::Relaxed);
        let errors = self.progress.errors.load(Ordering::Relaxed);
        let filled = (done * BAR_WIDTH / self.total.max(1)).min(BAR_WIDTH);
        let bar = format!("{}{}", "#".repeat(filled), "-".repeat(BAR_WIDTH - filled));
        let head = format!("{:<18} [{bar}]", self.strategy);
        let state = match &self.state {
            State::Waiting => return format!("{head} waiting"),
            State::Starting => return format!("{head} starting Envoy"),
            State::Phase(name) => name,
            State::Done => "done",
        };
        let answered = done.saturating_sub(errors).max(1) as u64;
        let mean_ms = self.progress.ttft_us.load(Ordering::Relaxed) / answered / 1000;
        format!(
            "{head} {done:>4}/{} answered, {:>3} in flight, {errors} errors, TTFT {mean_ms:>5} ms, {state}",
            self.total,
            sent.saturating_sub(done),
        )
    }
}

/// Writes to standard output; a closed pipe must not end a run whose report is still to be written.
pub(super) fn say(text: &str) {
    let mut out = io::stdout();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

const TERMINAL_INTERVAL: Duration = Duration::from_millis(200);
const LINE_INTERVAL: Duration = Duration::from_secs(5);
const BAR_WIDTH: usize = 24;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_fills_and_tells_the_mean() {
        let mut bars = Bars::new(&["hybrid".to_owned()], 40);
        bars.terminal = false;
        assert_eq!(
            bars.bars[0].line(),
            format!("{:<18} [{}] waiting", "hybrid", "-".repeat(24))
        );
        let progress = bars.phase(0, "chat");
        progress.sent.store(25, Ordering::Relaxed);
        progress.done.store(20, Ordering::Relaxed);
        progress.ttft_us.store(20 * 42_000, Ordering::Relaxed);
        let line = bars.bars[0].line();
        assert!(
            line.contains(&format!("[{}{}]", "#".repeat(12), "-".repeat(12))),
            "{line}"
        );
        assert!(
            line.ends_with("20/40 answered,   5 in flight, 0 errors, TTFT    42 ms, chat"),
            "{line}"
        );
        assert!(line.chars().count() <= 120, "{line}");
    }
}
