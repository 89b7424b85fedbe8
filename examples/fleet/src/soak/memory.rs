//! A process → its resident memory, and the size of the linear memory of every Wasm VM in it.
//!
//! V8 reserves the whole address space of a memory at once and makes what the module has grown to accessible: such a
//! memory is a readable mapping followed, without a gap, by gigabytes that nothing may touch. So `/proc` tells the size
//! of each VM to the page, and the module needs no metric for it. Linear memory never shrinks: what it once took, it has.

use std::fmt;
use std::fs;
use std::io;

/// Memory of one process.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Memory {
    /// Resident memory, KiB.
    pub resident_kib: u64,
    /// Linear memory of each VM, KiB, smallest first.
    pub vms_kib: Vec<u64>,
}

impl Memory {
    /// Of a process that runs.
    ///
    /// # Errors
    /// When `/proc` does not tell.
    pub fn of(process: u32) -> io::Result<Self> {
        let status = fs::read_to_string(format!("/proc/{process}/status"))?;
        let maps = fs::read_to_string(format!("/proc/{process}/maps"))?;
        Ok(Self {
            resident_kib: resident_kib(&status).ok_or(io::ErrorKind::InvalidData)?,
            vms_kib: linear_memories_kib(&maps),
        })
    }

    /// Linear memory of all VMs, KiB.
    pub fn all_vms_kib(&self) -> u64 {
        self.vms_kib.iter().sum()
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} MiB resident, VMs", self.resident_kib as f64 / 1024.0)?;
        for vm_kib in &self.vms_kib {
            write!(f, " {:.1}", *vm_kib as f64 / 1024.0)?;
        }
        f.write_str(" MiB")
    }
}

fn resident_kib(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

/// Sizes of the readable mappings that a reservation follows.
fn linear_memories_kib(maps: &str) -> Vec<u64> {
    let mappings: Vec<Mapping> = maps.lines().filter_map(Mapping::of_line).collect();
    let mut sizes_kib: Vec<u64> = mappings
        .windows(2)
        .filter(|pair| {
            pair[0].is_writable && pair[0].end == pair[1].start && pair[1].is_reserved && {
                pair[1].end - pair[0].start >= LEAST_RESERVATION
            }
        })
        .map(|pair| (pair[0].end - pair[0].start) / 1024)
        .collect();
    sizes_kib.sort_unstable();
    sizes_kib
}

struct Mapping {
    start: u64,
    end: u64,
    is_writable: bool,
    is_reserved: bool,
}

impl Mapping {
    /// `start-end perms …`, see proc(5).
    fn of_line(line: &str) -> Option<Self> {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        Some(Self {
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
            is_writable: rest.starts_with("rw"),
            is_reserved: rest.starts_with("---"),
        })
    }
}

/// A 32-bit memory can grow to 4 GiB, so V8 reserves at least that.
const LEAST_RESERVATION: u64 = 4 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linear_memory_is_a_mapping_before_gigabytes_that_nothing_may_touch() {
        let maps = "\
7f0000000000-7f0000200000 rw-p 00000000 00:00 0\n\
7f0000200000-7f0280000000 ---p 00000000 00:00 0\n\
7f0300000000-7f0300010000 rw-p 00000000 00:00 0\n\
7f0300010000-7f0300020000 ---p 00000000 00:00 0\n\
7f0400000000-7f0400010000 r--p 00000000 00:00 0 /lib\n\
7f0500000000-7f0500110000 rw-p 00000000 00:00 0\n\
7f0500110000-7f0780000000 ---p 00000000 00:00 0 [anon:v8]\n";
        assert_eq!(linear_memories_kib(maps), [1088, 2048]);
    }

    #[test]
    fn resident_memory_is_read_from_the_status() {
        assert_eq!(resident_kib("Name:\tx\nVmRSS:\t   1234 kB\n"), Some(1234));
        assert_eq!(resident_kib("Name:\tx\n"), None);
        assert!(Memory::of(std::process::id()).unwrap().resident_kib > 0);
    }
}
