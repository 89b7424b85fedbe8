#!/usr/bin/env bash
# Runs fuzz targets one after the other, each for so many seconds, and prints one line for each:
#   bash tests/fuzz/run.sh SECONDS [TARGET ...]
# Everything it makes lies in target/fuzz: corpora, which a later run goes on from, and the inputs of what it found.
set -euo pipefail
cd "$(dirname "$0")/../.."

seconds=${1:?seconds for each target}
shift
targets=("$@")
if [ ${#targets[@]} -eq 0 ]; then
    mapfile -t targets < <(basename -s .rs -a tests/fuzz/fuzz_targets/*.rs)
fi
for target in "${targets[@]}"; do
    if [ ! -f "tests/fuzz/fuzz_targets/$target.rs" ]; then
        echo "no target '$target'; there are: $(basename -s .rs -a tests/fuzz/fuzz_targets/*.rs | tr '\n' ' ')" >&2
        exit 2
    fi
done

toolchain=${WARMROUTE_FUZZ_TOOLCHAIN:-nightly}
if ! rustup run "$toolchain" rustc --version >/dev/null 2>&1; then
    echo "fuzzing needs a nightly toolchain, for its sanitizer: rustup toolchain install nightly --profile minimal" >&2
    exit 2
fi
export PATH="$PWD/target/tools/bin:$PATH"
if ! command -v cargo-fuzz >/dev/null; then
    cargo install cargo-fuzz --locked --root target/tools
fi

for target in "${targets[@]}"; do
    cargo "+$toolchain" fuzz build --fuzz-dir tests/fuzz --target-dir target/fuzz --codegen-units 16 "$target"
done
host=$(rustup run "$toolchain" rustc -vV | sed -n 's/^host: //p')

# Real inputs of targets that also take bytes as they come, behind the bytes that choose this form and nothing else.
seed() { # TARGET HEADER FILE
    local name
    name=target/fuzz/corpus/$1/seed-$(printf '%s%s' "$2" "${3##*/}" | tr -c 'A-Za-z0-9._\n' '-')
    { printf '%b' "$2"; cat "$3"; } >"$name"
}
seeds() { # TARGET
    local file at
    # A generator makes little of few bytes, and a fuzzer that begins with none is slow to add many.
    for at in 64 256 1024 4096; do
        for file in 1 2 3 4 5 6 7 8; do head -c "$at" /dev/urandom >"target/fuzz/corpus/$1/random-$at-$file"; done
    done
    case $1 in
    body)
        for file in tests/bodies/*.json tests/bodies/*.bin; do
            [ "$file" = tests/bodies/index.json ] && continue
            for at in 00 03 06 08 09 0c 0d 0e 0f 12 13; do
                seed body "\\x01\\x$at\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0" "$file"
            done
        done
        ;;
    metrics)
        for file in tests/fixtures/metrics/*.txt; do
            for at in 00 01 02 03 04; do seed metrics "\\x01\\x$at" "$file"; done
        done
        ;;
    admin) for file in tests/fixtures/clusters/*.txt; do seed admin "\\0\\x01" "$file"; done ;;
    esac
}

failed=0
summary=
for target in "${targets[@]}"; do
    corpus=target/fuzz/corpus/$target
    found=target/fuzz/artifacts/$target
    log=target/fuzz/$target.log
    mkdir -p "$corpus" "$found"
    seeds "$target"
    # The words of the generator help with bytes as they come.
    grep -ohE '"[A-Za-z0-9_:./-]{2,48}"' "tests/properties/$target.rs" | sort -u >"target/fuzz/$target.dict"
    before=$(find "$found" -type f | wc -l)
    started=$(date +%s)
    echo "== $target, $seconds s, log in $log"
    ok=0
    "target/fuzz/$host/release/$target" "$corpus" -dict="target/fuzz/$target.dict" -max_total_time="$seconds" \
        -max_len=16384 -len_control=0 -rss_limit_mb=2048 -malloc_limit_mb=256 -timeout=10 -report_slow_units=60 \
        -print_final_stats=1 -artifact_prefix="$found/" >"$log" 2>&1 || ok=$?
    took=$(($(date +%s) - started))
    executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    edges=$(grep -o 'cov: [0-9]*' "$log" | tail -1 | cut -d' ' -f2 || true)
    crashes=$(($(find "$found" -type f | wc -l) - before))
    if [ "$ok" -ne 0 ]; then
        failed=1
        grep -v '^#' "$log" | tail -40
    fi
    summary+=$(printf '%-11s executions %10s  seconds %6s  edges %6s  crashes %s' \
        "$target" "${executions:-?}" "$took" "${edges:-?}" "$crashes")$'\n'
done
printf '\n%s' "$summary"
exit $failed
