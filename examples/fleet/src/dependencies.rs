//! `Cargo.lock` and what Cargo knows of the packages in it → who is linked into what, under which licence.
//!
//! In: the workspace. Out: the packages of a target's build, with version, licence, checksum and what each needs. Nothing is
//! fetched where the packages are on the machine already; what is missing, Cargo fetches, or it fails.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::process::{RunError, run};
use crate::toolchain::tool;

/// One package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Its licence, as an SPDX expression.
    pub licence: String,
    /// SHA-256 of the package as published, hex; `None` for those of the workspace.
    pub checksum: Option<String>,
    /// Names and versions of the packages that it links to.
    pub needs: Vec<(String, String)>,
}

/// Why there is no list.
#[derive(Debug)]
pub enum DependencyError {
    /// Cargo failed; it has said why.
    Cargo(RunError),
    /// `Cargo.lock` cannot be read.
    NoLock(std::io::Error),
    /// Cargo's answer is not what its documentation says.
    Unreadable(&'static str),
}

impl fmt::Display for DependencyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cargo(cause) => cause.fmt(f),
            Self::NoLock(cause) => write!(f, "cannot read Cargo.lock: {cause}"),
            Self::Unreadable(what) => write!(f, "cargo told no {what}"),
        }
    }
}

impl std::error::Error for DependencyError {}

/// The packages that a crate of the workspace links for a target, itself first, the others by name; what only runs while
/// it is built or tested does not count.
///
/// # Errors
/// When Cargo does not tell.
pub fn linked(root: &Path, crate_name: &str, target: &str) -> Result<Vec<Package>, DependencyError> {
    // The metadata have the features that all of the workspace asks for together; a tree has those of one crate.
    let text = cargo(
        root,
        &[
            "tree",
            "--locked",
            "--package",
            crate_name,
            "--edges",
            "normal,no-proc-macro",
            "--no-dedupe",
            "--target",
            target,
            "--prefix",
            "depth",
            "--format",
            " {p} |{l}",
        ],
    )?;
    let checksums = checksums(root)?;
    let mut packages: BTreeMap<(String, String), Package> = BTreeMap::new();
    let mut above: Vec<(String, String)> = Vec::new();
    for line in String::from_utf8_lossy(&text).lines() {
        let unreadable = || DependencyError::Unreadable("line of a tree");
        let (package, licence) = line.split_once('|').ok_or_else(unreadable)?;
        let mut words = package.split_whitespace();
        let depth: usize = words
            .next()
            .and_then(|depth| depth.parse().ok())
            .ok_or_else(unreadable)?;
        let name = words.next().ok_or_else(unreadable)?.to_owned();
        let version = words
            .next()
            .and_then(|word| word.strip_prefix('v'))
            .ok_or_else(unreadable)?
            .to_owned();
        let id = (name, version);
        above.truncate(depth);
        if let Some(parent) = above.last().and_then(|parent| packages.get_mut(parent))
            && !parent.needs.contains(&id)
        {
            parent.needs.push(id.clone());
        }
        above.push(id.clone());
        packages
            .entry(id)
            .or_insert_with_key(|id| Package::new(id, licence, &checksums));
    }
    let mut packages: Vec<Package> = packages.into_values().collect();
    packages.sort_by_key(|package| package.name != crate_name);
    Ok(packages)
}

/// Every package that any build of the workspace for a target takes part in, tests and build scripts included; who needs
/// whom is left out.
///
/// # Errors
/// When Cargo does not tell.
pub fn all(root: &Path, target: &str) -> Result<Vec<Package>, DependencyError> {
    let text = cargo(
        root,
        &[
            "metadata",
            "--format-version",
            "1",
            "--locked",
            "--filter-platform",
            target,
        ],
    )?;
    let metadata: Value = serde_json::from_slice(&text).map_err(|_| DependencyError::Unreadable("JSON"))?;
    let nodes = metadata["resolve"]["nodes"].as_array();
    let nodes = nodes.ok_or(DependencyError::Unreadable("nodes"))?;
    let built: BTreeSet<&str> = nodes.iter().filter_map(|node| node["id"].as_str()).collect();
    let known = metadata["packages"].as_array();
    let known = known.ok_or(DependencyError::Unreadable("packages"))?;
    let checksums = checksums(root)?;
    let text_of = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let built = known
        .iter()
        .filter(|package| package["id"].as_str().is_some_and(|id| built.contains(id)));
    Ok(built
        .map(|package| {
            let id = (text_of(&package["name"]), text_of(&package["version"]));
            Package::new(&id, &text_of(&package["license"]), &checksums)
        })
        .collect())
}

impl Package {
    fn new(id: &(String, String), licence: &str, checksums: &BTreeMap<(String, String), String>) -> Self {
        Self {
            name: id.0.clone(),
            version: id.1.clone(),
            // Some old packages write OR as a slash.
            licence: licence.replace(" / ", "/").replace('/', " OR "),
            checksum: checksums.get(id).cloned(),
            needs: Vec::new(),
        }
    }
}

/// What Cargo answers without the network; with it where something is missing on this machine.
fn cargo(root: &Path, arguments: &[&str]) -> Result<Vec<u8>, DependencyError> {
    let ask = |offline: &[&str]| {
        run(Command::new(tool("CARGO", "cargo"))
            .current_dir(root)
            .args(arguments)
            .args(offline))
    };
    ask(&["--offline"])
        .or_else(|_| ask(&[]))
        .map_err(DependencyError::Cargo)
}

/// Checksums by name and version, from `Cargo.lock`.
fn checksums(root: &Path) -> Result<BTreeMap<(String, String), String>, DependencyError> {
    let lock = std::fs::read_to_string(root.join("Cargo.lock")).map_err(DependencyError::NoLock)?;
    let value = |block: &str, key: &str| {
        let line = block.lines().find_map(|line| line.strip_prefix(key));
        line.map(|line| line.trim_start_matches(" = ").trim_matches('"').to_owned())
    };
    let blocks = lock.split("[[package]]");
    Ok(blocks
        .filter_map(|block| {
            Some((
                (value(block, "name")?, value(block, "version")?),
                value(block, "checksum")?,
            ))
        })
        .collect())
}

/// Whether an SPDX expression can be met with these licences alone. An exception only adds permissions, so the licence
/// before a `WITH` decides. What is not understood is not met.
#[must_use]
pub fn is_met(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ");
    let mut words: Vec<&str> = spaced.split_whitespace().rev().collect();
    either(&mut words, allowed) && words.is_empty()
}

/// `a OR b`; takes the words from the end of the list.
fn either(words: &mut Vec<&str>, allowed: &BTreeSet<String>) -> bool {
    let mut met = both(words, allowed);
    while words.last() == Some(&"OR") {
        words.pop();
        met |= both(words, allowed);
    }
    met
}

/// `a AND b`.
fn both(words: &mut Vec<&str>, allowed: &BTreeSet<String>) -> bool {
    let mut met = one(words, allowed);
    while words.last() == Some(&"AND") {
        words.pop();
        met &= one(words, allowed);
    }
    met
}

/// A licence, or an expression in brackets.
fn one(words: &mut Vec<&str>, allowed: &BTreeSet<String>) -> bool {
    match words.pop() {
        Some("(") => {
            let met = either(words, allowed);
            met & (words.pop() == Some(")"))
        }
        Some(licence) => {
            if words.last() == Some(&"WITH") {
                words.truncate(words.len().saturating_sub(2));
            }
            allowed.contains(licence)
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_met_as_spdx_says() {
        let allowed = BTreeSet::from(["MIT", "Zlib"].map(str::to_owned));
        for met in [
            "MIT",
            "GPL-3.0 OR MIT",
            "MIT AND Zlib",
            "(GPL-3.0 OR MIT) AND Zlib",
            "MIT WITH an-exception OR X",
        ] {
            assert!(is_met(met, &allowed), "{met}");
        }
        for unmet in [
            "",
            "GPL-3.0",
            "MIT AND GPL-3.0",
            "(MIT",
            "MIT Zlib",
            "X OR (Zlib AND Y)",
            "X WITH MIT",
        ] {
            assert!(!is_met(unmet, &allowed), "{unmet}");
        }
    }
}
