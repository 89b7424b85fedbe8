//! Everything that one worker knows of one pool, and the decision made of it.
//!
//! In: bodies, the companion's table, the other workers' journals, what became of earlier requests. Out: a decision for
//! each request, this worker's journal. It outlives configurations: a config push changes settings and keeps hosts,
//! tallies, the counts of prefixes and the index. Bodies, tables and journals are untrusted: what cannot be read changes
//! nothing and is reported to the caller.

mod feedback;
mod journals;
mod peers;

use crate::candidate::{Charge, Fleet, FleetSettings, Work};
use crate::chunk::PrefixKeys;
use crate::config::PoolConfig;
use crate::decision::Decision;
use crate::hold::HoldLimit;
use crate::host_table::{HostTable, HostTableError, Slot};
use crate::index::{IndexSettings, NewPlacement, PrefixIndex};
use crate::journal::{Placement, PlacementKind, PlacementLog};
use crate::late_fields::LateFields;
use crate::prompt::{self, Api, BodyEnd, NoPrompt, PromptInput, SessionMode};
use crate::recent::{RecentPrefixes, RecentSettings};
use crate::strategy::{self, Query, Rng, StrategySettings};
use crate::usage::BytesPerToken;

pub use self::feedback::Expectation;
pub use self::journals::MERGED_TTL_MS;
pub use self::peers::{JournalNews, MergedNews};

use self::peers::Peers;

/// One pool as one worker knows it.
#[derive(Debug)]
pub struct Pool {
    config: PoolConfig,
    strategy: StrategySettings,
    fleet: Fleet,
    recent: RecentPrefixes,
    index: PrefixIndex,
    bytes_per_token: BytesPerToken,
    late_fields: LateFields,
    hold: HoldLimit,
    rng: Rng,
    worker: u64,
    journal_sequence: u32,
    placements: PlacementLog,
    peers: Peers,
}

/// A request as [`Pool::decide`] takes it.
#[derive(Debug, Clone, Copy)]
pub struct DecisionInput<'a> {
    /// Which API the path names.
    pub api: Api,
    /// `:path` with its query.
    pub path: &'a str,
    /// The bytes held of the body, and whether there will be more; `None` where the body cannot be read.
    pub body: Option<(&'a [u8], BodyEnd)>,
    /// `content-length`: all that is known of the size of a body that cannot be read.
    pub content_length: Option<u64>,
    /// Value of the tenant header.
    pub tenant: Option<&'a [u8]>,
    /// Value of the session header.
    pub session: Option<&'a [u8]>,
}

/// What came of it.
#[derive(Debug)]
pub struct Outcome {
    /// The choice, perhaps of no host.
    pub decision: Decision,
    /// Why no prefix key took part, if none did.
    pub unkeyed: Option<Unkeyed>,
    /// The client asked for a streamed answer, or might have.
    pub is_streaming: bool,
    /// What the index was told, for [`Pool::charge`].
    pub placement: Option<Box<Placement>>,
    /// What the answer can be compared with, where it will be read; for [`Pool::answered`].
    pub expectation: Option<Box<Expectation>>,
}

/// Why a request was decided without a prefix key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unkeyed {
    /// The body has none.
    Body(NoPrompt),
    /// The body is compressed, or not JSON by its content type.
    Unreadable,
    /// The client waits for a `100 Continue` or an upgrade that only the upstream can give.
    ExpectContinue,
    /// Envoy's filter configuration lacks `allow_on_headers_stop_iteration`, so there is no body to wait for.
    FlagMissing,
    /// The body was cut before its namespace was complete, and no earlier turn tells it.
    CutNamespace,
    /// Nothing of the body was readable when it had to be decided.
    NothingHeld,
}

impl Unkeyed {
    /// All of them, in the order of their metrics.
    pub const ALL: [Self; 5 + NoPrompt::ALL.len()] = {
        let mut all = [Self::Unreadable; 5 + NoPrompt::ALL.len()];
        let [_, expect, flag, cut, nothing, ..] = &mut all;
        *expect = Self::ExpectContinue;
        *flag = Self::FlagMissing;
        *cut = Self::CutNamespace;
        *nothing = Self::NothingHeld;
        let (_, bodies) = all.split_at_mut(5);
        let mut rest = bodies;
        let mut causes = NoPrompt::ALL.as_slice();
        while let ([place, places @ ..], [cause, more @ ..]) = (rest, causes) {
            *place = Self::Body(*cause);
            rest = places;
            causes = more;
        }
        all
    };

    /// Name in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Body(cause) => cause.as_str(),
            Self::Unreadable => "unreadable",
            Self::ExpectContinue => "expect_continue",
            Self::FlagMissing => "flag_missing",
            Self::CutNamespace => "cut_namespace",
            Self::NothingHeld => "nothing_held",
        }
    }
}

/// A request's keys, as far as its body told them.
struct Keyed {
    keys: PrefixKeys,
    adapter: Option<u64>,
    unkeyed: Option<Unkeyed>,
    is_streaming: bool,
    /// All of the prompt was read, so that its bytes can be compared with its tokens.
    is_whole: bool,
}

impl Pool {
    /// A pool without hosts. `worker` tells this worker's journal from the others' and seeds its choices between equals.
    #[must_use]
    pub fn new(config: PoolConfig, worker: u64) -> Self {
        Self {
            strategy: strategy_settings(&config),
            fleet: Fleet::new(fleet_settings(&config)),
            recent: RecentPrefixes::new(recent_settings(&config)),
            index: PrefixIndex::new(index_settings(&config)),
            bytes_per_token: BytesPerToken::new(config.bytes_per_token),
            late_fields: LateFields::of_bytes(config.late_field_bytes),
            hold: HoldLimit::new(config.max_buffer_bytes, config.stream_buffer_bytes),
            rng: Rng::new(worker),
            worker,
            journal_sequence: 0,
            placements: PlacementLog::default(),
            peers: Peers::default(),
            config,
        }
    }

    /// Takes over a new configuration and keeps everything that was learned.
    pub fn reconfigure(&mut self, config: PoolConfig) {
        self.strategy = strategy_settings(&config);
        self.fleet.reconfigure(fleet_settings(&config));
        if recent_settings(&config) != recent_settings(&self.config) {
            self.recent = RecentPrefixes::new(recent_settings(&config));
        }
        if index_settings(&config) != *self.index.settings() {
            self.index.resize(index_settings(&config));
        }
        if config.bytes_per_token != self.config.bytes_per_token {
            self.bytes_per_token = BytesPerToken::new(config.bytes_per_token);
        }
        if config.late_field_bytes != self.config.late_field_bytes {
            self.late_fields = LateFields::of_bytes(config.late_field_bytes);
        }
        self.hold
            .reconfigure(config.max_buffer_bytes, config.stream_buffer_bytes);
        self.config = config;
    }

    /// Takes over the companion's table.
    ///
    /// # Errors
    /// When the blob is not a table; what was known stays.
    pub fn apply_table(&mut self, blob: &[u8], now_ms: u64) -> Result<(), HostTableError> {
        let table = HostTable::decode(blob)?;
        self.fleet.update(&table, now_ms);
        self.index.update_hosts(&table);
        self.fleet
            .believe_capacities(|slot| self.index.capacity_tokens(slot));
        Ok(())
    }

    /// Chooses hosts for one request. It always returns; a decision may name no host, and Envoy's fallback then chooses.
    pub fn decide(&mut self, input: &DecisionInput<'_>, now_ms: u64) -> Outcome {
        let keyed = self.keys_of(input);
        let outcome = self.decide_keyed(&keyed.keys, keyed.adapter, now_ms);
        Outcome {
            unkeyed: keyed.unkeyed,
            is_streaming: keyed.is_streaming,
            expectation: self.expectation(&keyed, &outcome.decision),
            ..outcome
        }
    }

    /// Chooses hosts for a streamed request whose keys are known already; without keys, `prompt_bytes` is what it costs.
    pub fn decide_keyed(&mut self, keys: &PrefixKeys, adapter: Option<u64>, now_ms: u64) -> Outcome {
        let homes = self.recent.observe(keys, self.fleet.traffic(), now_ms);
        let query = Query {
            millibytes_per_token: self.bytes_per_token.millibytes(),
            adapter,
            matches: self.index.lookup(keys, now_ms),
            ..Query::new(homes, keys.prompt_bytes, now_ms)
        };
        let mut decision = strategy::decide(&self.strategy, &mut self.fleet, &query, &mut self.rng);
        decision.key = keys.deepest().map(|key| key.hash.0);
        let placement = match decision.hosts.first() {
            Some(slot) if !self.config.dry_run => {
                let placed = NewPlacement {
                    slot,
                    uncached_tokens: decision.uncached_tokens,
                    prompt_tokens: query.prompt_tokens(),
                };
                self.index.place(keys, placed, now_ms)
            }
            Some(_) | None => None,
        };
        if let Some(placement) = &placement {
            self.placements.push(placement.clone(), self.worker);
        }
        Outcome {
            expectation: None,
            decision,
            unkeyed: None,
            is_streaming: true,
            placement: placement.map(Box::new),
        }
    }

    /// Charges the first host of a decision; `None` where it names none or only reports.
    pub fn charge(&mut self, outcome: &mut Outcome, now_ms: u64) -> Option<Charge> {
        if self.config.dry_run {
            return None;
        }
        let decision = &outcome.decision;
        let slot = decision.hosts.first()?;
        let work = Work {
            uncached_tokens: decision.uncached_tokens,
            prefill_tokens: decision.prefill_tokens,
        };
        let mut charge = if outcome.is_streaming {
            self.fleet.charge(slot, work, now_ms)
        } else {
            self.fleet.charge_unstreamed(slot, work, now_ms)
        };
        charge.placement = outcome.placement.take();
        Some(charge)
    }

    /// The first body byte of a streamed answer: the prefill is done, and its time tells the host's rate.
    pub fn first_token(&mut self, charge: &mut Charge, now_ms: u64) {
        charge.placement = None;
        self.fleet.heard(charge, now_ms);
        self.fleet.learn_prefill(charge, now_ms);
        self.fleet.prefill_done(charge, now_ms);
        self.fleet.succeeded(charge.slot, now_ms);
    }

    /// The first body byte of an answer that is no event stream: the prefill is done, but when it was is not known.
    pub fn answer_began(&mut self, charge: &mut Charge, now_ms: u64) {
        charge.placement = None;
        self.fleet.heard(charge, now_ms);
        self.fleet.prefill_done(charge, now_ms);
        self.fleet.succeeded(charge.slot, now_ms);
    }

    /// The answer began with what the engine sends before it computes anything, so nothing tells when it has.
    pub fn answer_opened(&mut self, charge: &mut Charge) {
        self.fleet.end_wait(charge);
    }

    /// The host refused the request, or it never came there: nothing of it is computed or cached.
    pub fn prefill_over(&mut self, charge: &mut Charge, now_ms: u64) {
        if let Some(placement) = charge.placement.take() {
            self.enter(
                Placement {
                    kind: PlacementKind::Withdrawn,
                    ..*placement
                },
                now_ms,
            );
        }
        self.fleet.prefill_done(charge, now_ms);
    }

    /// The request is over.
    pub fn finish(&mut self, charge: &mut Charge, now_ms: u64) {
        self.fleet.finish(charge, now_ms);
    }

    /// Another host serves the request.
    pub fn move_charge(&mut self, charge: &mut Charge, to: Slot, now_ms: u64) {
        if charge.slot != to
            && let Some(placement) = charge.placement.take()
        {
            let moved = self.index.epoch_of(to).map(|epoch| Placement {
                slot: to,
                epoch,
                ..(*placement).clone()
            });
            self.enter(
                Placement {
                    kind: PlacementKind::Withdrawn,
                    ..*placement
                },
                now_ms,
            );
            if let Some(moved) = moved {
                self.enter(moved.clone(), now_ms);
                charge.placement = Some(Box::new(moved));
            }
        }
        self.fleet.move_charge(charge, to, now_ms);
    }

    /// A host failed an attempt.
    pub fn host_failed(&mut self, slot: Slot, now_ms: u64) {
        self.fleet.failed(slot, now_ms);
    }

    /// The host with that address.
    #[must_use]
    pub fn slot_of(&self, address: &str) -> Option<Slot> {
        self.fleet.slot_of(address)
    }

    /// Bytes to hold of a body before deciding.
    #[must_use]
    pub fn hold_bytes(&self, content_length: Option<u64>) -> u32 {
        self.hold.bytes_for(content_length)
    }

    /// Envoy refused a body of which `held_bytes` were held, up to `threshold_bytes`; true when this lowered the threshold.
    pub fn hold_refused(&mut self, held_bytes: u32, threshold_bytes: u32) -> bool {
        self.hold.refused(held_bytes, threshold_bytes)
    }

    /// Value of the steering header: the decision's hosts, best first.
    #[must_use]
    pub fn steering_value(&self, decision: &Decision) -> String {
        let mut value = String::new();
        decision.write_header(&self.fleet, &mut value);
        value
    }

    /// Address of a host.
    #[must_use]
    pub fn address(&self, slot: Slot) -> Option<&str> {
        self.fleet.address(slot)
    }

    /// What tells this pool from every other one, also from an earlier one of the same name.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.worker
    }

    /// The configuration in force.
    #[must_use]
    pub fn config(&self) -> &PoolConfig {
        &self.config
    }

    /// The hosts, for display and tests.
    #[must_use]
    pub fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// The prefix index, for display and tests.
    #[must_use]
    pub fn index(&self) -> &PrefixIndex {
        &self.index
    }

    /// Tells the own index and the other workers.
    fn enter(&mut self, placement: Placement, now_ms: u64) {
        self.index.replay(&placement, now_ms);
        self.placements.push(placement, self.worker);
    }

    fn keys_of(&mut self, input: &DecisionInput<'_>) -> Keyed {
        let options = &self.config.prompt;
        let Some((body, end)) = input.body else {
            let session = prompt::session_key(options, input.tenant, input.session);
            // A guess at the request's cost, no larger than that of a body which was read and had no prompt.
            let length_bytes = u32::try_from(input.content_length.unwrap_or(0)).unwrap_or(u32::MAX);
            let prompt_bytes = length_bytes.min(self.config.max_buffer_bytes);
            let unkeyed_prompt = PrefixKeys {
                prompt_bytes,
                ..PrefixKeys::default()
            };
            return Keyed {
                keys: session.map_or(unkeyed_prompt, |key| PrefixKeys::of_session(key, prompt_bytes)),
                adapter: None,
                unkeyed: session.is_none().then_some(Unkeyed::Unreadable),
                is_streaming: true,
                is_whole: false,
            };
        };
        let prompt_input = PromptInput {
            api: input.api,
            path: input.path,
            body,
            end,
            tenant: input.tenant,
            session_header: input.session,
        };
        let extraction = prompt::extract(&prompt_input, options);
        let (mut keys, mut unkeyed) = match &extraction.prompt {
            // A conversation has to be large already to outgrow the threshold with its next turn.
            Ok(prompt)
                if prompt.namespace.complete && prompt.chain_bytes < self.config.max_buffer_bytes / 8 =>
            {
                (prompt.keys(&prompt.namespace), None)
            }
            Ok(prompt) => match self.late_fields.settle(prompt) {
                Some(namespace) => (prompt.keys(&namespace), None),
                None => (PrefixKeys::default(), Some(Unkeyed::CutNamespace)),
            },
            Err(cause) => (PrefixKeys::default(), Some(Unkeyed::Body(*cause))),
        };
        if keys.keys.is_empty() {
            // Nothing of the prompt is known; what the request costs is at least guessed by its size.
            keys.prompt_bytes = u32::try_from(body.len()).unwrap_or(u32::MAX);
            unkeyed = unkeyed.or(Some(Unkeyed::NothingHeld));
        }
        let mut is_whole =
            end == BodyEnd::EndOfStream && keys.prompt_bytes < options.max_prefix_bytes && unkeyed.is_none();
        let replaces = match options.session_mode {
            SessionMode::Off | SessionMode::Extend => false,
            SessionMode::Fallback => keys.keys.is_empty(),
            SessionMode::Replace => true,
        };
        if let Some(session) = extraction.session.filter(|_| replaces) {
            keys = PrefixKeys::of_session(session, keys.prompt_bytes);
            unkeyed = None;
            is_whole = false;
        }
        Keyed {
            keys,
            // vLLM serves an adapter as a model of its own.
            adapter: extraction.adapter.or(extraction.model_hash),
            unkeyed,
            is_streaming: extraction.stream,
            is_whole,
        }
    }
}

fn strategy_settings(config: &PoolConfig) -> StrategySettings {
    StrategySettings {
        overflow: config.overflow.clone(),
        recompute_weight: config.recompute_weight,
        ..StrategySettings::new(config.strategy)
    }
}

fn fleet_settings(config: &PoolConfig) -> FleetSettings {
    FleetSettings {
        fresh_ms: config.table_fresh_ms.into(),
        ..FleetSettings::default()
    }
}

fn index_settings(config: &PoolConfig) -> IndexSettings {
    IndexSettings {
        memory_bytes: config.index_memory_bytes,
        ..IndexSettings::default()
    }
}

fn recent_settings(config: &PoolConfig) -> RecentSettings {
    RecentSettings {
        memory_bytes: config.recent_prefix_bytes,
        home_bytes: config.home_bytes,
    }
}
