//! Simulated fleet.
