//! Every strategy through one table of cases, seeded properties, and a queueing simulation that compares them.
//!
//! `WARMROUTE_SEED=<n>` replays a property with the seed that its failure printed.

#[cfg(test)]
#[path = "strategies/cases.rs"]
mod cases;
#[cfg(test)]
#[path = "strategies/fixture.rs"]
mod fixture;
#[cfg(test)]
#[path = "strategies/properties.rs"]
mod properties;
#[cfg(test)]
#[path = "strategies/queueing.rs"]
mod queueing;
#[cfg(test)]
#[path = "strategies/worked_example.rs"]
mod worked_example;
