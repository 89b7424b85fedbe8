# The commands of the project by name; each is plain enough to paste. `just` lists them.

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

# Every fuzz target for 60 s; needs a nightly toolchain
fuzz-short:
    bash tests/fuzz/run.sh 60

# One fuzz target for longer (`just fuzz body 1800`)
fuzz TARGET SECONDS:
    bash tests/fuzz/run.sh {{SECONDS}} {{TARGET}}

# Exactly what CI runs
check:
    bash .ci/run
