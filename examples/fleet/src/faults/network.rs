//! Faults of the network between Envoy and engines: packets are lost, and TCP sends them again later.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::load::{Load, LoadPlan};
use super::stand::{POOL, Stand};
use super::{FaultError, Scenario, Seen};
use crate::engine::EngineConfig;
use crate::envoy_config::PoolConfig;
use crate::workload::Rng;

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        Scenario::new(PART, "packets of all engines are lost now and then", |stand| {
            Box::pin(lossy(stand, ENGINES, 50))
        }),
        Scenario::new(PART, "every fifth packet of one engine is lost", |stand| {
            Box::pin(lossy(stand, 1, 5))
        }),
    ]
}

/// The links of the first so many engines lose one piece in `one_in`.
async fn lossy(stand: &Stand, links: usize, one_in: usize) -> Result<Seen, FaultError> {
    let fleet = stand.fleet(ENGINES, EngineConfig::default()).await?;
    let mut endpoints = fleet.addresses();
    let mut relays = Vec::new();
    for endpoint in endpoints.iter_mut().take(links) {
        let relay = Link::to(*endpoint, one_in).await?;
        *endpoint = relay.address;
        relays.push(relay);
    }
    let behind: Vec<&str> = fleet.replicas[..links]
        .iter()
        .map(|replica| replica.name())
        .collect();
    let config = stand.config(PoolConfig::new(POOL, endpoints), &stand.settings());
    let gateway = stand.ready(&config, ENGINES).await?;
    let load = Load::start(&gateway, LoadPlan::default());
    tokio::time::sleep(Duration::from_secs(8)).await;
    let mut seen = Seen::of(load.stop().await);
    let there = seen
        .sent
        .iter()
        .filter(|sent| sent.replica.as_deref().is_some_and(|name| behind.contains(&name)));
    let share = there.count() * 100 / seen.sent.len().max(1);
    let mean = seen.sent.iter().map(|sent| sent.took).sum::<Duration>() / seen.sent.len().max(1) as u32;
    seen.check(share > 0, "nothing went over a link that loses packets");
    seen.note = format!(
        "{share} % of the requests went over such links, mean time {} ms",
        mean.as_millis()
    );
    Ok(seen)
}

/// A port that leads to an engine. A piece that is lost holds up all that follows on its connection and way until it is sent
/// again, after the least timeout of Linux or, when that one is lost as well, three times as long.
struct Link {
    address: SocketAddr,
    accepting: JoinHandle<()>,
}

impl Link {
    async fn to(target: SocketAddr, one_in: usize) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let accepting = tokio::spawn(async move {
            let mut seed = u64::from(target.port());
            while let Ok((near, _)) = listener.accept().await {
                seed += 2;
                tokio::spawn(async move {
                    let Ok(far) = TcpStream::connect(target).await else {
                        return;
                    };
                    let ((near_read, near_write), (far_read, far_write)) =
                        (near.into_split(), far.into_split());
                    // An error is a side that went away; the other one hears of it.
                    let _ = tokio::join!(
                        carry(near_read, far_write, one_in, seed),
                        carry(far_read, near_write, one_in, seed + 1),
                    );
                });
            }
        });
        Ok(Self { address, accepting })
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn carry(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    one_in: usize,
    seed: u64,
) -> io::Result<()> {
    let mut chance = Rng::new(seed);
    let mut piece = vec![0; 16 << 10];
    loop {
        let read = from.read(&mut piece).await?;
        if read == 0 {
            return to.shutdown().await;
        }
        let mut again = RETRANSMISSION;
        while chance.below(one_in) == 0 {
            tokio::time::sleep(again).await;
            again *= 2;
        }
        to.write_all(&piece[..read]).await?;
    }
}

const PART: &str = "network";
const ENGINES: usize = 4;
/// `TCP_RTO_MIN` of Linux.
const RETRANSMISSION: Duration = Duration::from_millis(200);
