//! Waiting for what nobody outside can see: a time in, that much of the machine's own time out.

use std::time::Duration;

use tokio::time::sleep;

/// Lets everything else run for this long. A machine that stalls gives nobody this time, so it is waited for in steps of
/// 10 ms, of which a stall takes one.
pub async fn let_run(time: Duration) {
    for _ in 0..time.as_millis().div_ceil(STEP.as_millis()) {
        sleep(STEP).await;
    }
}

const STEP: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stall_counts_as_one_step() {
        let stall = Duration::from_millis(100);
        let start = tokio::time::Instant::now();
        // Nothing else of this thread runs meanwhile.
        tokio::join!(let_run(stall), async { std::thread::sleep(stall) });
        assert!(start.elapsed() >= stall + stall - STEP, "{:?}", start.elapsed());
    }
}
