//! The way of a request through the server's front end, before the engine has it.
//!
//! One process parses, tokenises and hands over, one request after the other. Where it shares a core with the engine, the
//! two take turns: what the front end works while a step runs makes that step longer, and is itself done half as fast.
//! Presets have no front end; a calibration finds one.

/// What the front end costs a request.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct FrontEnd {
    /// Work for every request, microseconds.
    pub request_us: f64,
    /// Work for each token of the prompt, cached or not, microseconds.
    pub prompt_token_us: f64,
    /// Whether it runs on the core that the engine runs on.
    pub shares_core: bool,
}

impl FrontEnd {
    /// Work for a prompt of that many tokens, microseconds.
    pub fn work_us(&self, prompt_tokens: usize) -> f64 {
        self.request_us + self.prompt_token_us * prompt_tokens as f64
    }
}

/// The front end of one engine, and when it is free again.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Desk {
    pub(super) front_end: FrontEnd,
    free_us: u64,
}

impl Desk {
    pub(super) fn new(front_end: FrontEnd) -> Self {
        Self {
            front_end,
            free_us: 0,
        }
    }

    /// Takes a request in; says when the engine has it, and how much longer the step that runs takes for it.
    pub(super) fn take_in(&mut self, now_us: u64, work_us: f64, step_runs: bool) -> TakenIn {
        let work_us = work_us.max(0.0).round() as u64;
        let contended = step_runs && self.front_end.shares_core;
        let lasts_us = if contended { 2 * work_us } else { work_us };
        self.free_us = self.free_us.max(now_us).saturating_add(lasts_us);
        TakenIn {
            ready_us: self.free_us,
            delay_us: if contended { work_us } else { 0 },
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct TakenIn {
    pub(super) ready_us: u64,
    pub(super) delay_us: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_pass_one_after_the_other() {
        let mut desk = Desk::new(FrontEnd::default());
        let mut ready = |now_us, work_us| desk.take_in(now_us, work_us, true).ready_us;
        assert_eq!([ready(10, 5.0), ready(11, 5.0), ready(50, 5.0)], [15, 20, 55]);
    }

    #[test]
    fn a_shared_core_is_shared_only_while_a_step_runs() {
        let mut desk = Desk::new(FrontEnd {
            shares_core: true,
            ..FrontEnd::default()
        });
        let idle = desk.take_in(0, 7.0, false);
        assert_eq!((idle.ready_us, idle.delay_us), (7, 0));
        let busy = desk.take_in(100, 7.0, true);
        assert_eq!((busy.ready_us, busy.delay_us), (114, 7));
    }

    #[test]
    fn work_grows_with_the_prompt() {
        let front_end = FrontEnd {
            request_us: 4_000.0,
            prompt_token_us: 2.0,
            shares_core: false,
        };
        assert_eq!(front_end.work_us(500), 5_000.0);
    }
}
