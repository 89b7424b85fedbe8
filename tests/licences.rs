//! What is linked into the module, and under which licences all that is built is: read from what Cargo knows, offline.

#![cfg(not(target_family = "wasm"))]
#![expect(clippy::unwrap_used, reason = "helpers of tests may fail as tests do")]

use std::collections::BTreeSet;

use warmroute_fleet::dependencies::{all, is_met, linked};
use warmroute_fleet::process::workspace_root;
use warmroute_fleet::wasm::WASM_TARGET;

/// The licences that deny.toml allows.
fn allowed() -> BTreeSet<String> {
    let text = std::fs::read_to_string(workspace_root().join("deny.toml")).unwrap();
    let list = text.split("allow = [").nth(1).unwrap().split(']').next().unwrap();
    let names: BTreeSet<String> = list.split('"').skip(1).step_by(2).map(str::to_owned).collect();
    assert!(names.contains("MIT") && names.len() < 10, "{names:?}");
    names
}

#[test]
fn every_dependency_has_a_licence_that_is_allowed() {
    let allowed = allowed();
    let host = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let packages = all(&workspace_root(), &host).unwrap();
    assert!(packages.len() > 30, "{}", packages.len());
    for package in packages {
        let (name, licence) = (&package.name, &package.licence);
        assert!(is_met(licence, &allowed), "{name} {}: {licence}", package.version);
        let is_ours = name.starts_with("warmroute");
        assert_eq!(
            package.checksum.is_none(),
            is_ours,
            "{name} comes from no registry"
        );
    }
    assert!(!is_met("GPL-3.0-only", &allowed));
}

#[test]
fn the_module_is_made_of_the_packages_of_the_committed_list() {
    let root = workspace_root();
    let packages = linked(&root, "warmroute", WASM_TARGET).unwrap();
    assert_eq!(packages[0].name, "warmroute");
    let linked: Vec<String> = packages[1..]
        .iter()
        .map(|package| format!("{} {}", package.name, package.licence))
        .collect();
    let list = std::fs::read_to_string(root.join("tests/golden/packages.txt")).unwrap();
    let listed: Vec<&str> = list.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(
        linked, listed,
        "a package came or went: tests/golden/packages.txt"
    );
}
