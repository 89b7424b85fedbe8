//! How many requests an engine gets by lying in its metrics: a fleet of equal hosts, prompts that nobody has seen before,
//! gateways that know of each other only what engines say.

use super::*;

const HOSTS: u16 = 8;
/// Each host computes that many requests a second, two at a time.
const SERVICE_MS: u64 = 400;
const AT_A_TIME: usize = 2;
const STEP_MS: u64 = 10;
const POLL_MS: u64 = 500;
const REQUESTS: u64 = 4000;

/// What host 0 shows.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Claim {
    /// Its queue.
    Truth,
    /// Nothing waits and nothing runs, ever.
    Idle,
    /// A thousand wait.
    Busy,
}

/// Of a thousand requests at `load_percent` of what the fleet can compute, those that host 0 gets.
pub(crate) fn share_of_host_0(gateways: u64, load_percent: u64, claim: Claim) -> u64 {
    let mut pools: Vec<Pool> = (0..gateways).map(|_| pool(&json!({}), HOSTS)).collect();
    let mut rng = Rng::new(11);
    // Running and waiting requests of each host: when each ends, and who has to be told.
    let mut queues: Vec<Vec<(usize, warmroute::candidate::Charge, u64)>> =
        (0..HOSTS).map(|_| Vec::new()).collect();
    let per_second = u64::from(HOSTS) * AT_A_TIME as u64 * 1000 / SERVICE_MS * load_percent / 100;
    let (mut sent, mut at_0, mut owed_milli, mut now_ms) = (0, 0, 0, NOW_MS);
    while sent < REQUESTS {
        now_ms += STEP_MS;
        for queue in &mut queues {
            for (running, (gateway, charge, left_ms)) in queue.iter_mut().enumerate() {
                if running < AT_A_TIME {
                    *left_ms = left_ms.saturating_sub(STEP_MS);
                    if *left_ms == 0 {
                        pools[*gateway].first_token(charge, now_ms);
                        pools[*gateway].finish(charge, now_ms);
                    }
                }
            }
            queue.retain(|(_, _, left_ms)| *left_ms > 0);
        }
        if now_ms.is_multiple_of(POLL_MS) {
            let mut shown = table(HOSTS);
            shown.published_ms = now_ms;
            for (host, queue) in shown.hosts.iter_mut().zip(&queues) {
                let running = queue.len().min(AT_A_TIME);
                let (waiting, running) = match claim {
                    Claim::Idle if host.slot == Slot(0) => (0, 0),
                    Claim::Busy if host.slot == Slot(0) => (1000, 1000),
                    Claim::Truth | Claim::Idle | Claim::Busy => (queue.len() - running, running),
                };
                host.sampled_ms = now_ms;
                host.load = Load {
                    waiting: u32::try_from(waiting).ok(),
                    running: u32::try_from(running).ok(),
                    kv_usage_permille: Some(0),
                    ..Load::default()
                };
            }
            for pool in &mut pools {
                pool.apply_table(&shown.encode(), now_ms).unwrap();
            }
        }
        owed_milli += per_second * STEP_MS;
        while owed_milli >= 1000 {
            owed_milli -= 1000;
            sent += 1;
            let gateway = rng.below(pools.len());
            let text = body(&format!("new {sent} ").repeat(600), &json!({"stream": true}));
            let mut outcome = pools[gateway].decide(&input(&text, None), now_ms);
            let charge = pools[gateway].charge(&mut outcome, now_ms).unwrap();
            let host = usize::from(charge.slot.0);
            at_0 += u64::from(host == 0);
            queues[host].push((gateway, charge, SERVICE_MS));
        }
    }
    at_0 * 1000 / REQUESTS
}
