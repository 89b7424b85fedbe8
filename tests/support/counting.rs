//! An allocator that counts what each thread holds, so that a test can say to the byte what a value takes.

#![expect(
    unsafe_code,
    reason = "an allocator cannot be written without; it only counts and hands on to the system's"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Counts by thread: tests that run side by side do not disturb each other.
pub(crate) struct Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// Calls `f`; bytes that are held more than before when it returns, and the most that were while it ran.
pub(crate) fn measure<R>(f: impl FnOnce() -> R) -> (R, isize, isize) {
    let before = HELD.get();
    PEAK.set(before);
    let result = f();
    (result, HELD.get() - before, PEAK.get() - before)
}

fn count(bytes: isize) {
    let held = HELD.get() + bytes;
    HELD.set(held);
    PEAK.set(PEAK.get().max(held));
}

// SAFETY: all calls go to the system's allocator as they are.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed());
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // While bytes move, both are there.
        count(new_size.cast_signed());
        count(-layout.size().cast_signed());
        unsafe { System.realloc(at, layout, new_size) }
    }
}
