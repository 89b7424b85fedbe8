//! Root contexts: configuration, timer, and the companion's calls, for both roles.

use core::time::Duration;
use std::rc::Rc;

use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::ContextType;

use super::companion::Companion;
use super::filter::Filter;
use super::host::{self, Buffer};
use super::vm::with_vm;
use crate::config::{CompanionMode, Config};

/// A root context: one for each plugin configuration on each thread.
pub(super) struct Root {
    context_id: u32,
    role: Role,
    config: Option<Rc<Config>>,
    companions: Vec<Companion>,
    /// All pools of this configuration are with a newer one.
    is_idle: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Filter,
    Service,
}

impl Root {
    pub(super) fn new(context_id: u32) -> Self {
        Self {
            context_id,
            role: Role::Filter,
            config: None,
            companions: Vec::new(),
            is_idle: false,
        }
    }

    fn tick_filter(&mut self, now_ms: u64) {
        let owns_any = with_vm(|vm| {
            vm.tick(self.context_id, now_ms);
            vm.owns_any(self.context_id)
        });
        // Envoy keeps the context of an old configuration for the drain time. Its pools are with a newer one then, but
        // may come back when that one's listener goes.
        let is_idle = owns_any == Some(false);
        if core::mem::replace(&mut self.is_idle, is_idle) != is_idle {
            host::set_tick_period(if is_idle { IDLE_TICK } else { TICK });
        }
        self.let_overdue_requests_go(now_ms);
    }

    /// Requests that wait for a body which never comes: see `allow_on_headers_stop_iteration` in the README.
    fn let_overdue_requests_go(&self, now_ms: u64) {
        let overdue = with_vm(|vm| vm.overdue(now_ms)).unwrap_or_default();
        for waiting in &overdue {
            if host::set_effective_context(waiting.context).is_err() {
                continue;
            }
            let has_undelivered_body = waiting.has_undelivered_body();
            if with_vm(|vm| vm.lets_go(waiting, has_undelivered_body)) == Some(true) {
                // Envoy goes on with the request as soon as this tick returns.
                let _ = host::resume_request();
            }
        }
        if !overdue.is_empty() {
            let _ = host::set_effective_context(self.context_id);
        }
    }
}

impl Context for Root {
    fn on_http_call_response(&mut self, token: u32, headers: usize, body_bytes: usize, _trailers: usize) {
        let now_ms = host::now_ms();
        for companion in &mut self.companions {
            if companion.on_call_response(token, headers, body_bytes, now_ms) {
                return;
            }
        }
    }
}

impl RootContext for Root {
    fn on_configure(&mut self, _size: usize) -> bool {
        let root_id = host::property(b"plugin_root_id").unwrap_or_default();
        self.role = match root_id.as_slice() {
            b"warmroute_service" => Role::Service,
            b"warmroute" | b"" => Role::Filter,
            _ => {
                log::error!("configuration refused: root_id: expected warmroute or warmroute_service");
                return false;
            }
        };
        let text = host::buffer(Buffer::PluginConfiguration, 0, usize::MAX).unwrap_or_default();
        let config = match Config::parse(&text) {
            Ok(config) => Rc::new(config),
            Err(error) => {
                log::error!("configuration refused: {error}");
                return false;
            }
        };
        let now_ms = host::now_ms();
        if self.role == Role::Filter {
            with_vm(|vm| vm.configure(self.context_id, &config.pools));
        }
        // This also runs in a throw-away VM that only checks the configuration: nothing is claimed before the first tick.
        let (service, patient) = (
            self.role == Role::Service,
            self.role == Role::Filter && config.companion == CompanionMode::Service,
        );
        self.companions = config
            .pools
            .iter()
            .map(|pool| Companion::new(pool, service, patient, now_ms))
            .collect();
        self.config = Some(config);
        host::set_tick_period(TICK);
        true
    }

    fn on_tick(&mut self) {
        let now_ms = host::now_ms();
        if self.role == Role::Filter {
            self.tick_filter(now_ms);
        }
        for companion in &mut self.companions {
            let polls = self.role == Role::Service
                || with_vm(|vm| vm.owns(self.context_id, companion.pool())) == Some(true);
            if polls {
                companion.tick(now_ms);
            } else {
                companion.release(now_ms);
            }
        }
        with_vm(|vm| vm.stats.flush());
    }

    fn create_http_context(&self, context_id: u32) -> Option<Box<dyn HttpContext>> {
        Some(Box::new(Filter::new(context_id, self.config.clone())))
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        with_vm(|vm| {
            vm.forget_root(self.context_id);
            vm.stats.flush();
        });
    }
}

/// An empty tick of 100 ms costs about 0.04 % of a core per VM; it paces the scrapes and flushes tallies that changed.
const TICK: Duration = Duration::from_millis(100);
/// For a context without pools.
const IDLE_TICK: Duration = Duration::from_millis(1000);
