//! The host calls of proxy-wasm ABI 0.2.1 that Warmroute uses, as functions that cannot panic.
//!
//! The SDK's own wrappers panic on any status that they do not expect, and a panic kills the VM with every request in
//! it. Here a status other than "ok" is an `Err` or a `None`, decided once, in this file. Calls that only make sense
//! together with the SDK's bookkeeping (`dispatch_http_call`) go through [`dispatch`], which checks what would make it
//! panic.
#![expect(
    unsafe_code,
    reason = "foreign functions of the proxy-wasm ABI; nothing else in the crate is unsafe"
)]

use core::time::Duration;

/// A status code of the ABI other than 0 (ok).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HostError(pub(super) i32);

/// `CasMismatch`: somebody else wrote the key since it was read.
pub(super) const CAS_MISMATCH: HostError = HostError(8);
/// A compare-and-swap value that no key can have: with it, `set_shared_data` creates a key only if it does not exist.
pub(super) const CAS_CREATE: u32 = u32::MAX;

/// Header maps.
#[derive(Debug, Clone, Copy)]
#[repr(i32)]
pub(super) enum Map {
    Request = 0,
    Response = 2,
    CallResponse = 6,
}

/// Buffers.
#[derive(Debug, Clone, Copy)]
#[repr(i32)]
pub(super) enum Buffer {
    RequestBody = 0,
    ResponseBody = 1,
    CallResponseBody = 4,
    PluginConfiguration = 7,
}

/// Metric types.
#[derive(Debug, Clone, Copy)]
#[repr(i32)]
pub(super) enum MetricKind {
    Counter = 0,
    Gauge = 1,
    Histogram = 2,
}

/// Wall-clock time, ns since the Unix epoch; 0 should the host refuse to tell.
pub(super) fn now_ns() -> u64 {
    let mut nanoseconds = 0u64;
    // SAFETY: the pointer is valid for the call and the host writes eight bytes.
    unsafe { proxy_get_current_time_nanoseconds(&raw mut nanoseconds) };
    nanoseconds
}

/// Wall-clock time, ms since the Unix epoch.
pub(super) fn now_ms() -> u64 {
    now_ns() / 1_000_000
}

/// Sets the timer of the current root context; zero stops it.
pub(super) fn set_tick_period(period: Duration) {
    let milliseconds = u32::try_from(period.as_millis()).unwrap_or(u32::MAX);
    // SAFETY: takes a number.
    unsafe { proxy_set_tick_period_milliseconds(milliseconds) };
}

/// Bytes `start..start + max_bytes` of a buffer, fewer if it is shorter, `None` if it does not exist.
pub(super) fn buffer(kind: Buffer, start: usize, max_bytes: usize) -> Option<Vec<u8>> {
    // SAFETY: the out-pointers are valid for the call.
    returned(|data, size| unsafe { proxy_get_buffer_bytes(kind as i32, start, max_bytes, data, size) }).ok()
}

/// The first value of a header.
pub(super) fn header(map: Map, name: &str) -> Option<Vec<u8>> {
    // SAFETY: name and out-pointers are valid for the call.
    returned(|data, size| unsafe {
        proxy_get_header_map_value(map as i32, name.as_ptr(), name.len(), data, size)
    })
    .ok()
}

/// All headers of a map in the ABI's serialised form; see [`Headers`].
pub(super) fn headers(map: Map) -> Headers {
    // SAFETY: the out-pointers are valid for the call.
    Headers(
        returned(|data, size| unsafe { proxy_get_header_map_pairs(map as i32, data, size) })
            .unwrap_or_default(),
    )
}

/// Replaces all values of a header by one.
///
/// # Errors
/// When the map is gone, as after the headers were forwarded.
pub(super) fn set_header(map: Map, name: &str, value: &[u8]) -> Result<(), HostError> {
    // SAFETY: name and value are valid for the call.
    status(unsafe {
        proxy_replace_header_map_value(map as i32, name.as_ptr(), name.len(), value.as_ptr(), value.len())
    })
}

/// Removes all values of a header.
///
/// # Errors
/// When the map is gone.
pub(super) fn remove_header(map: Map, name: &str) -> Result<(), HostError> {
    // SAFETY: the name is valid for the call.
    status(unsafe { proxy_remove_header_map_value(map as i32, name.as_ptr(), name.len()) })
}

/// A property by its path, elements separated by NUL bytes (`b"upstream\0address"`).
pub(super) fn property(path: &[u8]) -> Option<Vec<u8>> {
    // SAFETY: path and out-pointers are valid for the call.
    returned(|data, size| unsafe { proxy_get_property(path.as_ptr(), path.len(), data, size) }).ok()
}

/// A property that is a number: eight bytes, little endian.
pub(super) fn number_property(path: &[u8]) -> Option<u64> {
    let bytes = property(path)?;
    bytes.as_slice().try_into().ok().map(u64::from_le_bytes)
}

/// A shared value with the number that a later compare-and-swap needs; `None` where the key does not exist.
pub(super) fn shared_data(key: &str) -> Option<(Vec<u8>, u32)> {
    let mut cas = 0u32;
    // SAFETY: key and out-pointers are valid for the call.
    let value = returned(|data, size| unsafe {
        proxy_get_shared_data(key.as_ptr(), key.len(), data, size, &raw mut cas)
    });
    value.ok().map(|value| (value, cas))
}

/// Writes a shared value; `cas` 0 writes in any case, [`CAS_CREATE`] only where the key is absent.
///
/// # Errors
/// [`CAS_MISMATCH`] when the value changed since `cas` was read.
pub(super) fn set_shared_data(key: &str, value: &[u8], cas: u32) -> Result<(), HostError> {
    // SAFETY: key and value are valid for the call.
    status(unsafe { proxy_set_shared_data(key.as_ptr(), key.len(), value.as_ptr(), value.len(), cas) })
}

/// Lets the paused request of the effective context go on.
///
/// # Errors
/// When there is no such request.
pub(super) fn resume_request() -> Result<(), HostError> {
    // SAFETY: takes a number; 0 is the request stream.
    status(unsafe { proxy_continue_stream(0) })
}

/// Makes later host calls act on another context.
///
/// # Errors
/// When no context has this id.
pub(super) fn set_effective_context(context_id: u32) -> Result<(), HostError> {
    // SAFETY: takes a number.
    status(unsafe { proxy_set_effective_context(context_id) })
}

/// Defines a metric, or finds it where it exists.
pub(super) fn define_metric(kind: MetricKind, name: &str) -> Option<u32> {
    let mut id = 0u32;
    // SAFETY: name and out-pointer are valid for the call.
    status(unsafe { proxy_define_metric(kind as i32, name.as_ptr(), name.len(), &raw mut id) })
        .ok()
        .map(|()| id)
}

/// Adds to a counter or gauge.
pub(super) fn increment_metric(id: u32, offset: i64) {
    // SAFETY: takes numbers; an unknown id is a status that has no remedy here.
    unsafe { proxy_increment_metric(id, offset) };
}

/// Sets a gauge or records a histogram value.
pub(super) fn record_metric(id: u32, value: u64) {
    // SAFETY: takes numbers; an unknown id is a status that has no remedy here.
    unsafe { proxy_record_metric(id, value) };
}

/// Starts an HTTP call; the answer comes to `on_http_call_response` of the current root context.
///
/// # Errors
/// When the cluster is unknown on this thread or has no host.
pub(super) fn dispatch(
    cluster: &str,
    headers: Vec<(&str, &str)>,
    timeout: Duration,
) -> Result<u32, HostError> {
    // The SDK keeps the tokens of calls in flight, hence its own wrapper; it returns the two statuses that Envoy gives.
    proxy_wasm::hostcalls::dispatch_http_call(cluster, headers, None, Vec::new(), timeout)
        .map_err(|status| HostError(status as i32))
}

/// A serialised header map: a count, then the sizes of each name and value, then their bytes, each ended by a NUL.
#[derive(Debug, Clone, Default)]
pub(super) struct Headers(Vec<u8>);

impl Headers {
    /// Names and values in order; ends early where the bytes are not what the ABI says.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let bytes = self.0.as_slice();
        let count = u32_at(bytes, 0).unwrap_or(0) as usize;
        let mut next_byte = count.saturating_mul(8).saturating_add(4);
        (0..count).map_while(move |i| {
            let sizes_at = i.saturating_mul(8).saturating_add(4);
            let name_len = u32_at(bytes, sizes_at)? as usize;
            let value_len = u32_at(bytes, sizes_at.saturating_add(4))? as usize;
            let name = bytes.get(next_byte..next_byte.checked_add(name_len)?)?;
            let value_at = next_byte.checked_add(name_len)?.checked_add(1)?;
            let value = bytes.get(value_at..value_at.checked_add(value_len)?)?;
            next_byte = value_at.checked_add(value_len)?.checked_add(1)?;
            Some((name, value))
        })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let four = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(four.try_into().ok()?))
}

fn status(code: i32) -> Result<(), HostError> {
    if code == 0 { Ok(()) } else { Err(HostError(code)) }
}

/// Calls the host with two out-pointers and takes over the bytes that it allocated in this VM.
fn returned(call: impl FnOnce(*mut *mut u8, *mut usize) -> i32) -> Result<Vec<u8>, HostError> {
    let mut data: *mut u8 = core::ptr::null_mut();
    let mut size = 0usize;
    status(call(&raw mut data, &raw mut size))?;
    if data.is_null() {
        return Ok(Vec::new());
    }
    // SAFETY: the host allocated `size` bytes with the SDK's exported allocator, which hands out a `Vec<u8>` of exactly
    // this capacity, filled them, and gave them to us.
    Ok(unsafe { Vec::from_raw_parts(data, size, size) })
}

unsafe extern "C" {
    fn proxy_get_current_time_nanoseconds(time: *mut u64) -> i32;
    fn proxy_set_tick_period_milliseconds(period: u32) -> i32;
    fn proxy_get_buffer_bytes(
        kind: i32,
        start: usize,
        max: usize,
        data: *mut *mut u8,
        size: *mut usize,
    ) -> i32;
    fn proxy_get_header_map_pairs(map: i32, data: *mut *mut u8, size: *mut usize) -> i32;
    fn proxy_get_header_map_value(
        map: i32,
        name: *const u8,
        name_len: usize,
        data: *mut *mut u8,
        size: *mut usize,
    ) -> i32;
    fn proxy_replace_header_map_value(
        map: i32,
        name: *const u8,
        name_len: usize,
        value: *const u8,
        value_len: usize,
    ) -> i32;
    fn proxy_remove_header_map_value(map: i32, name: *const u8, name_len: usize) -> i32;
    fn proxy_get_property(path: *const u8, path_len: usize, data: *mut *mut u8, size: *mut usize) -> i32;
    fn proxy_get_shared_data(
        key: *const u8,
        key_len: usize,
        data: *mut *mut u8,
        size: *mut usize,
        cas: *mut u32,
    ) -> i32;
    fn proxy_set_shared_data(
        key: *const u8,
        key_len: usize,
        value: *const u8,
        value_len: usize,
        cas: u32,
    ) -> i32;
    fn proxy_continue_stream(stream: i32) -> i32;
    fn proxy_set_effective_context(context_id: u32) -> i32;
    fn proxy_define_metric(kind: i32, name: *const u8, name_len: usize, id: *mut u32) -> i32;
    fn proxy_increment_metric(id: u32, offset: i64) -> i32;
    fn proxy_record_metric(id: u32, value: u64) -> i32;
}
