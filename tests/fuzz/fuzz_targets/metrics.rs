#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| warmroute_fuzz::check("metrics", data));
