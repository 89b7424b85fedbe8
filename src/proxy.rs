//! The shell: what Envoy calls, translated into calls of the core and back. Built for the wasi target only.
//!
//! One `.wasm` has two roles, told by the plugin's `root_id`: `warmroute` is the HTTP filter, `warmroute_service` the
//! companion as a bootstrap service. Nothing in here decides anything: it reads bytes, calls one function of the core
//! and performs the step that it returns. Host calls go through [`host`], which cannot panic.

mod companion;
mod filter;
mod host;
mod root;
mod shared;
mod stats;
mod vm;

use proxy_wasm::types::LogLevel;

/// Called by Envoy once in every VM, before any context exists.
#[unsafe(no_mangle)]
#[expect(unsafe_code, reason = "the exported entry point of the module")]
extern "C" fn _initialize() {
    proxy_wasm::set_log_level(LogLevel::Info);
    proxy_wasm::set_root_context(|context_id| Box::new(root::Root::new(context_id)));
}
