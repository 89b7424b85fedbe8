//! Another Wasm plugin under the same `vm_id`, which reads and writes whatever key of the shared data it is told.
//!
//! It answers for a listener of its own: a POST writes its body to the key that a header names, with an empty answer; a POST
//! to `/read` answers with what is there.

use std::net::SocketAddr;
use std::path::Path;

use serde_json::{Value, json};

use crate::client::{Answer, Client, ClientError};
use crate::envoy_config::named_filter;

/// Name of its listener.
pub const LISTENER: &str = "saboteur";

/// The module's bytes.
///
/// # Errors
/// When its text is not accepted, which no input causes.
pub fn module() -> Result<Vec<u8>, wat::Error> {
    wat::parse_str(TEXT)
}

/// Its listener, on an ephemeral port, as an Envoy config; the module is at `wasm`.
pub fn listener(wasm: &Path, vm_id: &str) -> Value {
    let code = json!({"local": {"filename": wasm}});
    let config = json!({
        "name": LISTENER,
        "root_id": LISTENER,
        "allow_on_headers_stop_iteration": true,
        "vm_config": {"vm_id": vm_id, "runtime": "envoy.wasm.runtime.v8", "code": code},
    });
    let manager = json!({
        "@type": HCM,
        "stat_prefix": LISTENER,
        "http_filters": [
            named_filter(LISTENER, "wasm", "Wasm", json!({"config": config})),
            named_filter("envoy.filters.http.router", "router", "Router", json!({})),
        ],
        "route_config": {"virtual_hosts": [{
            "name": LISTENER,
            "domains": ["*"],
            "routes": [{"match": {"prefix": "/"}, "direct_response": {"status": 500}}],
        }]},
    });
    json!({
        "name": LISTENER,
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
        "per_connection_buffer_limit_bytes": 64 << 20,
        "filter_chains": [{"filters": [{
            "name": "envoy.filters.network.http_connection_manager",
            "typed_config": manager,
        }]}],
    })
}

/// Writes a key.
///
/// # Errors
/// When the exchange fails.
pub async fn write(
    client: &Client,
    address: SocketAddr,
    key: &str,
    value: Vec<u8>,
) -> Result<Answer, ClientError> {
    // An empty body would have no end of its own.
    let url = format!(
        "http://{address}{}",
        if value.is_empty() { "/empty" } else { "/write" }
    );
    let body = if value.is_empty() { vec![0] } else { value };
    client.post(&url, &[(KEY_HEADER, key)], body).await
}

/// Reads a key; `None` where it does not exist.
///
/// # Errors
/// When the exchange fails.
pub async fn read(client: &Client, address: SocketAddr, key: &str) -> Result<Option<Vec<u8>>, ClientError> {
    let url = format!("http://{address}/read");
    let answer = client.post(&url, &[(KEY_HEADER, key)], "x").await?;
    Ok((answer.status == 200).then(|| answer.body.to_vec()))
}

const KEY_HEADER: &str = "x-key";
const HCM: &str =
    "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";

/// Everything happens at the end of the body: `/r…` reads, `/e…` writes nothing, any other path writes the body. Memory is
/// given out from 4096 on and taken back with each request.
const TEXT: &str = r#"(module
  (import "env" "proxy_get_header_map_value"
    (func $header (param i32 i32 i32 i32 i32) (result i32)))
  (import "env" "proxy_get_buffer_bytes"
    (func $buffer (param i32 i32 i32 i32 i32) (result i32)))
  (import "env" "proxy_get_shared_data"
    (func $get (param i32 i32 i32 i32 i32) (result i32)))
  (import "env" "proxy_set_shared_data"
    (func $set (param i32 i32 i32 i32 i32) (result i32)))
  (import "env" "proxy_send_local_response"
    (func $answer (param i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 64) "x-key")
  (data (i32.const 80) ":path")
  (global $top (mut i32) (i32.const 4096))
  (func (export "proxy_abi_version_0_2_1"))
  (func (export "proxy_on_vm_start") (param i32 i32) (result i32) (i32.const 1))
  (func (export "proxy_on_configure") (param i32 i32) (result i32) (i32.const 1))
  (func (export "proxy_on_context_create") (param i32 i32))
  (func (export "proxy_on_memory_allocate") (param $size i32) (result i32) (local $at i32) (local $pages i32)
    (local.set $at (global.get $top))
    (global.set $top (i32.and (i32.add (i32.add (local.get $at) (local.get $size)) (i32.const 15)) (i32.const -16)))
    (local.set $pages (i32.add (i32.shr_u (global.get $top) (i32.const 16)) (i32.const 1)))
    (if (i32.gt_u (local.get $pages) (memory.size))
      (then (drop (memory.grow (i32.sub (local.get $pages) (memory.size))))))
    (local.get $at))
  (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
    (i32.const 1))
  ;; 0: key, 4: its length, 8: path, 12: its length, 16: value, 20: its length, 24: its number
  (func (export "proxy_on_request_body") (param $context i32) (param $size i32) (param $end i32) (result i32)
    (local $status i32) (local $kind i32)
    (if (i32.eqz (local.get $end)) (then (return (i32.const 1))))
    (global.set $top (i32.const 4096))
    (drop (call $header (i32.const 0) (i32.const 64) (i32.const 5) (i32.const 0) (i32.const 4)))
    (drop (call $header (i32.const 0) (i32.const 80) (i32.const 5) (i32.const 8) (i32.const 12)))
    (i32.store (i32.const 16) (i32.const 4096))
    (i32.store (i32.const 20) (i32.const 0))
    (local.set $kind (i32.load8_u offset=1 (i32.load (i32.const 8))))
    (if (i32.eq (local.get $kind) (i32.const 114))
      (then
        (local.set $status (call $get (i32.load (i32.const 0)) (i32.load (i32.const 4))
          (i32.const 16) (i32.const 20) (i32.const 24))))
      (else
        (if (i32.ne (local.get $kind) (i32.const 101))
          (then (drop (call $buffer (i32.const 0) (i32.const 0) (local.get $size) (i32.const 16) (i32.const 20)))))
        (local.set $status (call $set (i32.load (i32.const 0)) (i32.load (i32.const 4))
          (i32.load (i32.const 16)) (i32.load (i32.const 20)) (i32.const 0)))
        (i32.store (i32.const 20) (i32.const 0))))
    (drop (call $answer
      (select (i32.const 404) (i32.const 200) (local.get $status))
      (i32.const 0) (i32.const 0)
      (i32.load (i32.const 16)) (i32.load (i32.const 20))
      (i32.const 0) (i32.const 0) (i32.const -1)))
    (i32.const 1))
)"#;

#[cfg(test)]
mod tests {
    #[test]
    fn the_module_is_one() {
        assert!(super::module().unwrap().starts_with(b"\0asm"));
    }
}
