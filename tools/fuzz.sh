#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# fuzz.sh SECONDS [TARGET...]   fuzz each target (all of tests/fuzz) for so long, from the inputs in tests/fuzz/corpus and
#                               what earlier runs found. Exit status 1 if a fault was found; its input is kept and named.
# fuzz.sh --keep [TARGET...]    add to tests/fuzz/corpus what earlier runs found, as far as it reaches code that nothing
#                               there reaches.
#
# Everything but the corpus lies in build/fuzz. Needs clang with its run-time libraries (Debian: clang, libclang-rt-dev).
set -eu

cd "$(dirname "$0")/.."
work=build/fuzz
say() { printf 'fuzz: %s\n' "$*"; }

case ${1:-} in
--keep) keep=yes ;;
'' | *[!0-9]*)
    sed -n '4,9s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
*) keep=no seconds=$1 ;;
esac
shift

mkdir -p "$work"
cmake -S . -B "$work" -DCMAKE_C_COMPILER=clang -DUCCL_EP_FUZZ=ON '-DUCCL_EP_SANITIZE=address;undefined' >"$work.log" 2>&1 || {
    cat "$work.log"
    exit 2
}
if ! grep -q 'UCCL_EP_LIBFUZZER:INTERNAL=1' "$work/CMakeCache.txt"; then
    say "clang here has no libFuzzer: apt-get install libclang-rt-dev"
    exit 2
fi
cmake --build "$work" --target fuzz_targets -j "$(nproc)" >"$work.log" 2>&1 || {
    tail -40 "$work.log"
    exit 2
}

# shellcheck disable=SC2046
[ $# -gt 0 ] || set -- $(ls "$work/fuzz" | sed 's/^fuzz_//')
faults=0
for target in "$@"; do
    program=$work/fuzz/fuzz_$target corpus=tests/fuzz/corpus/$target found=$work/found/$target
    [ -x "$program" ] || {
        say "no target '$target'; there are: $(ls "$work/fuzz" | sed 's/^fuzz_//' | tr '\n' ' ')"
        exit 2
    }
    mkdir -p "$corpus" "$found"
    log=$work/$target.log
    if [ $keep = yes ]; then
        # By lines of code, not by how often: a few dozen inputs a target, and not thousands.
        "$program" -set_cover_merge=1 -use_counters=0 "$corpus" "$found" >"$log" 2>&1
        say "$target: $(ls "$corpus" | wc -l) inputs"
        continue
    fi
    if "$program" -max_total_time="$seconds" -timeout=25 -max_len=1024 -len_control=10 -print_final_stats=1 \
        -artifact_prefix="$work/$target-" "$found" "$corpus" >"$log" 2>&1; then
        say "$target: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") runs, no fault"
    else
        faults=$((faults + 1))
        say "$target: a FAULT, see $log; again by: $program $(sed -n 's/.*Test unit written to //p' "$log" | tail -1)"
        grep -E 'not true|broken invariant|ERROR: |runtime error' "$log" | head -3 || true
    fi
done
[ $faults = 0 ]
