//! Writes what the filter's `.wasm` is made of as a CycloneDX 1.5 document, `target/reports/sbom.json`: every package that
//! is linked, with version, licence and the checksum of `Cargo.lock`, and the SHA-256 of the module itself.

use std::process::ExitCode;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use warmroute_fleet::dependencies::{Package, linked};
use warmroute_fleet::process::workspace_root;
use warmroute_fleet::wasm::{WASM_TARGET, build_wasm};

fn main() -> ExitCode {
    match write() {
        Ok(told) => {
            println!("{told}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("sbom: {error}");
            ExitCode::FAILURE
        }
    }
}

fn write() -> Result<String, Box<dyn std::error::Error>> {
    let root = workspace_root();
    let wasm = std::fs::read(build_wasm()?)?;
    let packages = linked(&root, "warmroute", WASM_TARGET)?;
    let (own, others) = packages.split_first().ok_or("no package is linked")?;
    let hash: String = Sha256::digest(&wasm)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let mut module = component(own);
    module["hashes"] = json!([{"alg": "SHA-256", "content": hash}]);
    let needs: Vec<Value> = packages
        .iter()
        .map(|package| {
            let needed = package.needs.iter().filter(|(name, version)| {
                packages
                    .iter()
                    .any(|other| (&other.name, &other.version) == (name, version))
            });
            let needed: Vec<String> = needed.map(|(name, version)| reference(name, version)).collect();
            json!({"ref": reference(&package.name, &package.version), "dependsOn": needed})
        })
        .collect();
    let document = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": module},
        "components": others.iter().map(component).collect::<Vec<_>>(),
        "dependencies": needs,
    });
    let path = root.join("target/reports/sbom.json");
    std::fs::create_dir_all(root.join("target/reports"))?;
    std::fs::write(&path, serde_json::to_string_pretty(&document)?)?;
    Ok(format!(
        "target/reports/sbom.json: {} packages in a module of {} bytes, sha256 {hash}",
        others.len(),
        wasm.len()
    ))
}

fn component(package: &Package) -> Value {
    let mut component = json!({
        "type": "library",
        "bom-ref": reference(&package.name, &package.version),
        "name": package.name,
        "version": package.version,
        "purl": reference(&package.name, &package.version),
        "licenses": [{"expression": package.licence}],
    });
    if let Some(checksum) = &package.checksum {
        component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
    }
    component
}

/// A package URL, by the `purl` specification.
fn reference(name: &str, version: &str) -> String {
    format!("pkg:cargo/{name}@{version}")
}
