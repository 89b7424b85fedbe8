//! A library to preload: the wall clock of a process, shifted and coarsened by what sixteen bytes of a file say.
//!
//! `WARMROUTE_CLOCK` names the file, with two signed 64-bit numbers of this machine: nanoseconds to add, and nanoseconds of
//! a step, of which a second has a whole number (0 for none). It is read anew at each look at the clock, so writing it makes
//! the clock jump. Built by the fault matrix with `rustc` alone.

#![no_std]

use core::ffi::{c_char, c_int, c_long, c_void};
use core::ptr;
use core::sync::atomic::{AtomicI64, AtomicPtr, Ordering};

static SETTINGS: AtomicPtr<[AtomicI64; 2]> = AtomicPtr::new(ptr::null_mut());

/// Seconds and nanoseconds, or seconds and microseconds.
#[repr(C)]
pub struct Time {
    seconds: i64,
    rest: i64,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: c_int, time: *mut Time) -> c_int {
    // SAFETY: the caller's pointer, as with the function that this one stands in for.
    let result = unsafe { syscall(CLOCK_GETTIME, c_long::from(clock), time) };
    if result == 0 && (clock == REALTIME || clock == REALTIME_COARSE) {
        unsafe { shift(&mut *time) };
    }
    result as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn gettimeofday(time: *mut Time, _zone: *mut c_void) -> c_int {
    let now = now();
    if !time.is_null() {
        // SAFETY: the caller's pointer.
        unsafe { *time = Time { seconds: now.seconds, rest: now.rest / 1000 } };
    }
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn time(seconds: *mut i64) -> i64 {
    let now = now();
    if !seconds.is_null() {
        // SAFETY: the caller's pointer.
        unsafe { *seconds = now.seconds };
    }
    now.seconds
}

fn now() -> Time {
    let mut now = Time { seconds: 0, rest: 0 };
    // SAFETY: a pointer to what lives longer than the call.
    unsafe { clock_gettime(REALTIME, &raw mut now) };
    now
}

fn shift(time: &mut Time) {
    let Some([offset, step]) = settings() else { return };
    let offset = offset.load(Ordering::Relaxed);
    let rest = time.rest + offset % SECOND;
    time.seconds += offset / SECOND + rest.div_euclid(SECOND);
    time.rest = rest.rem_euclid(SECOND);
    let step = step.load(Ordering::Relaxed).clamp(1, SECOND);
    time.rest -= time.rest % step;
}

fn settings() -> Option<&'static [AtomicI64; 2]> {
    let mut settings = SETTINGS.load(Ordering::Acquire);
    if settings.is_null() {
        // SAFETY: C strings; the mapping is never taken back.
        unsafe {
            let path = getenv(c"WARMROUTE_CLOCK".as_ptr());
            if path.is_null() {
                return None;
            }
            let file = open(path, 0);
            let mapped = mmap(ptr::null_mut(), 16, READABLE, SHARED, file, 0);
            if file < 0 || mapped.addr() == usize::MAX {
                return None;
            }
            settings = mapped.cast();
        }
        SETTINGS.store(settings, Ordering::Release);
    }
    // SAFETY: sixteen aligned bytes of a mapping that stays.
    Some(unsafe { &*settings })
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
    fn getenv(name: *const c_char) -> *const c_char;
    fn open(path: *const c_char, flags: c_int, ...) -> c_int;
    fn mmap(
        address: *mut c_void,
        length: usize,
        protection: c_int,
        flags: c_int,
        file: c_int,
        offset: i64,
    ) -> *mut c_void;
}

const SECOND: i64 = 1_000_000_000;
const REALTIME: c_int = 0;
const REALTIME_COARSE: c_int = 5;
const READABLE: c_int = 1;
const SHARED: c_int = 1;
#[cfg(target_arch = "x86_64")]
const CLOCK_GETTIME: c_long = 228;
#[cfg(target_arch = "aarch64")]
const CLOCK_GETTIME: c_long = 113;
