//! Processor time of another process, and the core that it runs on.

use std::fs;
use std::process::{Command, Stdio};

/// Keeps all threads of a process on one core; false where that does not work.
pub(super) fn pin(process: u32, core: &str) -> bool {
    let status = Command::new("taskset")
        .args(["--all-tasks", "--cpu-list", "--pid", core, &process.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    status.is_ok_and(|status| status.success())
}

/// User and system time of a process so far, in steps of 10 ms.
pub(super) fn cpu_us(process: u32) -> Option<f64> {
    let ticks = cpu_ticks(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?)?;
    Some(ticks as f64 * 1e6 / TICKS_PER_SECOND)
}

/// `utime` + `stime` (proc(5), fields 14 and 15); the name in brackets may hold anything.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ').skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// `USER_HZ`, which Linux fixes for user space on every architecture that Envoy runs on.
const TICKS_PER_SECOND: f64 = 100.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_found_behind_a_name_with_brackets() {
        let stat = "42 (a) b) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0";
        assert_eq!(cpu_ticks(stat), Some(300));
        assert_eq!(cpu_ticks("42"), None);
    }
}
