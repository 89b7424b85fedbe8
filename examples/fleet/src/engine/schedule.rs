//! What a step holds and what comes of it: the part of the engine that follows vLLM's scheduler
//! (`Scheduler.schedule` in `vllm/v1/core/sched/scheduler.py`).

use super::request::Stage;
use super::{Engine, EngineEvent, EventKind, Step, StepLoad};

impl Engine {
    /// Fills a step: running requests in order, then, unless one of them was preempted, the queue.
    pub(super) fn start_step(&mut self, at_us: u64, events: &mut Vec<EngineEvent>) {
        let mut load = StepLoad::default();
        let preemptions = self.counters.preemptions;
        let mut position = 0;
        while position < self.running.len() && load.tokens() < self.model.step_tokens {
            if self.grow(position, at_us, events) {
                self.schedule(position, &mut load);
                position += 1;
            }
        }
        if self.counters.preemptions == preemptions {
            while load.tokens() < self.model.step_tokens && self.admit_head(at_us) {
                self.schedule(self.running.len() - 1, &mut load);
            }
        }
        let lasts_us = self.scaled_us(self.model.times.step_us(&load)).round() as u64;
        let prefill_us = self.scaled_us(self.model.times.prefill_us(&load)).round() as u64;
        self.counters.steps += 1;
        self.counters.busy_us += lasts_us;
        self.counters.prefill_busy_us += prefill_us;
        self.counters.computed_prefill_tokens += load.prefill_tokens as u64;
        self.step = Some(Step {
            starts_us: at_us,
            ends_us: at_us.saturating_add(lasts_us),
            load,
        });
    }

    /// Sees that the running request at `position` has a block for its next token, taking those of the youngest where
    /// there is none; false when it was itself the youngest.
    fn grow(&mut self, position: usize, at_us: u64, events: &mut Vec<EngineEvent>) -> bool {
        let block_tokens = self.model.block_tokens;
        loop {
            let Some(request) = self.running.get_mut(position) else {
                return false;
            };
            // The blocks of a prompt are all taken when it starts: only output grows.
            if request.held.len() * block_tokens > request.computed_tokens {
                return true;
            }
            if let Some(index) = self.cache.take() {
                request.held.push(index);
                return true;
            }
            let Some(mut youngest) = self.running.pop() else {
                return false;
            };
            self.cache
                .release(&youngest.held, youngest.full_blocks(block_tokens));
            youngest.held.clear();
            youngest.named_blocks = 0;
            youngest.computed_tokens = 0;
            events.push(EngineEvent {
                id: youngest.id,
                at_us,
                kind: EventKind::Preempted,
            });
            self.waiting.push_front(youngest);
            self.head_is_stuck = false;
            self.counters.preemptions += 1;
        }
    }

    /// Starts the head of the queue if it has arrived and its whole prompt fits; says whether it did.
    fn admit_head(&mut self, at_us: u64) -> bool {
        if self.head_is_stuck || self.running.len() >= self.model.max_running {
            return false;
        }
        let block_tokens = self.model.block_tokens;
        let Some(head) = self.waiting.front() else {
            return false;
        };
        if head.submitted_us > at_us {
            return false;
        }
        let known_tokens = head.known_tokens();
        let usable = self.usable_blocks(&head.prompt, known_tokens);
        let mut held = Vec::with_capacity(known_tokens.div_ceil(block_tokens) + 1);
        self.cache.find(&head.prompt.blocks[..usable], &mut held);
        let hits = held.len();
        let fresh = known_tokens.div_ceil(block_tokens) - hits;
        if !self.cache.hold_with_room(&held, fresh) {
            self.head_is_stuck = true;
            return false;
        }
        let Some(mut request) = self.waiting.pop_front() else {
            return false;
        };
        held.extend((0..fresh).map_while(|_| self.cache.take()));
        request.held = held;
        request.named_blocks = hits;
        request.computed_tokens = hits * block_tokens;
        if request.cached_tokens.is_none() {
            request.cached_tokens = Some(request.computed_tokens);
            self.counters.prefix_query_tokens += request.prompt.tokens as u64;
            self.counters.prefix_hit_tokens += request.computed_tokens as u64;
        }
        self.running.push(request);
        true
    }

    /// Puts what the budget allows of a running request into the step, and names the prompt blocks that this fills.
    fn schedule(&mut self, position: usize, load: &mut StepLoad) {
        let Some(request) = self.running.get_mut(position) else {
            return;
        };
        let tokens = request
            .missing_tokens()
            .min(self.model.step_tokens - load.tokens());
        match request.stage() {
            Stage::Prefill => load.add_prefill(tokens, request.computed_tokens),
            Stage::Decode => load.add_decode(request.computed_tokens + tokens),
        }
        request.scheduled_tokens = tokens;
        let filled = (request.computed_tokens + tokens) / self.model.block_tokens;
        let prompt_blocks = request
            .prompt
            .blocks
            .len()
            .min(request.prompt.tokens / self.model.block_tokens);
        while request.named_blocks < filled.min(prompt_blocks) {
            let block = request.named_blocks;
            self.cache
                .publish(&mut request.held[block], request.prompt.blocks[block]);
            request.named_blocks += 1;
            self.head_is_stuck = false;
        }
    }

    /// Takes in what a step has computed.
    pub(super) fn end_step(&mut self, at_us: u64, events: &mut Vec<EngineEvent>) {
        let mut any_finished = false;
        for request in &mut self.running {
            if request.scheduled_tokens == 0 {
                continue;
            }
            request.computed_tokens += std::mem::take(&mut request.scheduled_tokens);
            if request.missing_tokens() > 0 {
                continue;
            }
            let mut push = |kind| {
                events.push(EngineEvent {
                    id: request.id,
                    at_us,
                    kind,
                });
            };
            request.output_tokens += 1;
            self.counters.generation_tokens += 1;
            if request.output_tokens == 1 {
                self.counters.prompt_tokens += request.prompt.tokens as u64;
                push(EventKind::Prefilled {
                    cached_tokens: request.cached_tokens.unwrap_or(0),
                });
            } else if self.token_events {
                push(EventKind::Token);
            }
            if request.is_done() {
                push(EventKind::Finished);
                self.counters.finished += 1;
                any_finished = true;
            }
        }
        if any_finished {
            self.running.retain(|request| {
                if request.is_done() {
                    let full = request.full_blocks(self.model.block_tokens);
                    self.cache.release(&request.held, full);
                }
                !request.is_done()
            });
            self.head_is_stuck = false;
        }
    }
}
