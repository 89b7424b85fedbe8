//! What one replica knows: its engine, who listens to which request, and what tests want it to show.

use std::collections::HashMap;

use tokio::sync::mpsc;

use super::{MetricOverrides, OddMetrics, RequestRecord, VecDeque, unix_now};
use crate::engine::{Engine, EngineEvent, EngineModel, EventKind, RequestId};

/// The state behind a replica's lock.
#[derive(Debug)]
pub(super) struct State {
    pub(super) engine: Engine,
    /// Counts the lives of the replica, so that a request of an earlier one cannot cancel one of this.
    pub(super) life: u64,
    pub(super) listeners: HashMap<RequestId, mpsc::UnboundedSender<EngineEvent>>,
    pub(super) started_s: f64,
    pub(super) overrides: MetricOverrides,
    pub(super) odd_metrics: Option<OddMetrics>,
    pub(super) adapters: Vec<String>,
    pub(super) sends_trailers: bool,
    pub(super) records: VecDeque<RequestRecord>,
    pub(super) posts: u64,
    pub(super) metrics_reads: u64,
}

impl State {
    pub(super) fn new(model: EngineModel) -> Self {
        Self {
            engine: Engine::new(model),
            life: 0,
            listeners: HashMap::new(),
            started_s: unix_now().as_secs_f64(),
            overrides: MetricOverrides::default(),
            odd_metrics: None,
            adapters: Vec::new(),
            sends_trailers: false,
            records: VecDeque::new(),
            posts: 0,
            metrics_reads: 0,
        }
    }

    /// Loses cache, queue and counters, as a new process would.
    pub(super) fn restart(&mut self) {
        self.engine.restart();
        self.listeners.clear();
        self.life += 1;
        self.started_s = unix_now().as_secs_f64();
    }

    /// Lets the engine work up to now and tells the requests what happened to them.
    pub(super) fn advance(&mut self, now_us: u64) {
        for event in self.engine.advance(now_us) {
            if event.kind == EventKind::Finished {
                if let Some(listener) = self.listeners.remove(&event.id) {
                    let _ = listener.send(event);
                }
            } else if let Some(listener) = self.listeners.get(&event.id) {
                let _ = listener.send(event);
            }
        }
    }

    /// Forgets a request of the given life that its client no longer waits for.
    pub(super) fn cancel(&mut self, now_us: u64, life: u64, id: RequestId) {
        self.advance(now_us);
        if life == self.life && self.listeners.remove(&id).is_some() {
            self.engine.cancel(id);
        }
    }
}
