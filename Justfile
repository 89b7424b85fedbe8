# The commands of the project by name; each is plain enough to paste. `just` lists them.

deny := "target/tools/cargo-deny/bin/cargo-deny"

_default:
    @just --list --unsorted

# The demo: a simulated fleet behind a real Envoy, every strategy in turn
demo *ARGS:
    cargo demo {{ARGS}}

# All tests, those with real Envoys included
test:
    cargo test

# The filter, into target/wasm32-wasip1/release/warmroute.wasm
wasm:
    rustup target add wasm32-wasip1
    cargo rustc --release --package warmroute --lib --target wasm32-wasip1 --crate-type cdylib

# The core's golden vectors on wasm32-unknown-unknown, in node
test-wasm:
    cargo run --quiet --package warmroute-fleet --bin wasm-tests

# Formatting, native and wasi lints
lint:
    cargo fmt --check
    cargo clippy --workspace --all-targets -- -D warnings
    cargo clippy --package warmroute --lib --target wasm32-wasip1 -- -D warnings

# The documentation, for the wasi target so that the shell is in it
doc:
    RUSTDOCFLAGS="-D warnings" cargo doc --package warmroute --no-deps --document-private-items --target wasm32-wasip1

# Plain Envoy against Envoy with the filter, in pairs, for bodies of 2, 16 and 64 KiB
bench-filter *ARGS:
    cargo run --release --package warmroute-fleet --bin bench-filter -- {{ARGS}}

# Fits the engine model to idle vLLM servers at the URLs given, and checks what it then predicts
calibrate *ARGS:
    cargo run --release --package warmroute-fleet --bin calibrate -- {{ARGS}}

# Strategies on simulated engines in virtual time; `--help` lists traces, fleets, events and policies
simulate *ARGS:
    cargo run --release --package warmroute-fleet --bin simulate -- {{ARGS}}

# What each strategy would have made of your own log of requests (`just replay LOG.jsonl`; `--help` tells its format)
replay *ARGS:
    cargo run --release --package warmroute-fleet --bin replay -- {{ARGS}}

# The default strategies against their bars, on simulated engines; needs the published traces (`--traces DIR`)
bars *ARGS:
    cargo run --release --package warmroute-fleet --bin bars -- {{ARGS}}

# The charts of docs/routing.md, measured anew; needs the published conversation trace (`--traces DIR`)
figures *ARGS:
    cargo run --release --package warmroute-fleet --bin figures -- {{ARGS}}

# The fault matrix: what breaks, with and without the filter, on real Envoys (`--help`)
faults *ARGS:
    cargo run --package warmroute-fleet --bin faults -- {{ARGS}}

# Hosts, clients and configurations come and go before a real Envoy (10 minutes; `--sizes`, `--pods` for bounds)
soak *ARGS:
    cargo run --release --package warmroute-fleet --bin soak -- {{ARGS}}

# A million generated requests with the filter and without: equal answers (`--requests N`)
million *ARGS:
    cargo run --release --package warmroute-fleet --bin soak -- --million {{ARGS}}

# Licences, duplicates and sources of all dependencies, without the network
licences: _cargo-deny
    {{deny}} --offline --locked check licenses bans sources

# Known advisories, from a git clone of an advisory database on this machine (`just advisories FOLDER`)
advisories DATABASE=env('WARMROUTE_ADVISORIES', ''): _cargo-deny
    @test -e "{{DATABASE}}/.git" || { echo "no advisory database: name a git clone of one (branch main), or set WARMROUTE_ADVISORIES" >&2; exit 2; }
    GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0="url.file://$(realpath "{{DATABASE}}").insteadOf" GIT_CONFIG_VALUE_0=https://advisories.invalid/db {{deny}} --locked fetch db
    {{deny}} --offline --locked check advisories

# What the filter's .wasm is made of, as CycloneDX: target/reports/sbom.json
sbom:
    cargo run --quiet --package warmroute-fleet --bin sbom

_cargo-deny:
    test -x {{deny}} || cargo install --quiet --locked --version 0.20.2 --root target/tools/cargo-deny cargo-deny

# Every fuzz target for 60 s; needs a nightly toolchain
fuzz-short:
    bash tests/fuzz/run.sh 60

# One fuzz target for longer (`just fuzz body 1800`)
fuzz TARGET SECONDS:
    bash tests/fuzz/run.sh {{SECONDS}} {{TARGET}}

# Exactly what CI runs
check:
    bash .ci/run
