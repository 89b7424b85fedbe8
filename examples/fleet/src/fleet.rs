//! Several replicas in one process: options go in, a running fleet comes out; dropping it stops it.

use std::io;
use std::net::SocketAddr;

use crate::engine::{EngineConfig, EngineModel};
use crate::replica::{Replica, ReplicaOptions};

/// What a fleet consists of.
#[derive(Debug, Clone)]
pub struct FleetOptions {
    /// How many replicas.
    pub replicas: usize,
    /// Name of the model they serve.
    pub model: String,
    /// What each engine can do, by its rates alone.
    pub engine: EngineConfig,
    /// What each engine can do in full; when given, it stands in place of `engine`.
    pub engine_model: Option<EngineModel>,
    /// How many times as fast as the model says.
    pub speed: f64,
    /// Ports, one a replica; ephemeral ones where the list ends.
    pub ports: Vec<u16>,
    /// Replica names are this and a number from 0 on.
    pub name_prefix: String,
}

impl Default for FleetOptions {
    fn default() -> Self {
        Self {
            replicas: 4,
            model: "sim".to_owned(),
            engine: EngineConfig::default(),
            engine_model: None,
            speed: 1.0,
            ports: Vec::new(),
            name_prefix: "replica-".to_owned(),
        }
    }
}

/// A running fleet.
#[derive(Debug)]
pub struct Fleet {
    /// The replicas, in order of their numbers.
    pub replicas: Vec<Replica>,
}

impl Fleet {
    /// Starts all replicas on 127.0.0.1, on the current tokio runtime.
    ///
    /// # Errors
    /// When a port cannot be bound.
    pub async fn start(options: &FleetOptions) -> io::Result<Self> {
        let model = options.engine_model.clone();
        let model = model.unwrap_or_else(|| options.engine.clone().into());
        let speed = model.speed * options.speed;
        let model = model.at_speed(speed);
        let mut replicas = Vec::with_capacity(options.replicas);
        for number in 0..options.replicas {
            replicas.push(
                Replica::start(ReplicaOptions {
                    name: format!("{}{number}", options.name_prefix),
                    model: options.model.clone(),
                    engine: model.clone(),
                    port: options.ports.get(number).copied().unwrap_or(0),
                })
                .await?,
            );
        }
        Ok(Self { replicas })
    }

    /// Addresses of all replicas, in order.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.replicas.iter().map(Replica::address).collect()
    }

    /// The replica of that name (as in answer header `x-replica`) or address.
    pub fn replica(&self, name_or_address: &str) -> Option<&Replica> {
        self.replicas.iter().find(|replica| {
            replica.name() == name_or_address || replica.address().to_string() == name_or_address
        })
    }
}
