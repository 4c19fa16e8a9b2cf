#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# nightly.sh [FIRST_SEED] [FOLDER]: what takes hours, on an installed uccl-ep. Prints where reports are; exit status 1 if
# anything was found. Seeds begin at today's date unless told otherwise, so that every night looks at other runs; what a
# night finds names the seed that replays it.
set -u
first=${1:-$(date +%Y%m%d)00000}
folder=${2:-build/nightly}
mkdir -p "$folder" || exit 2
bad=0

step() { # name, then a command
    name=$1
    shift
    printf 'nightly: %s\n' "$*"
    "$@" >"$folder/$name.txt" 2>&1 || { bad=1; printf 'nightly: FAILED: see %s\n' "$folder/$name.txt"; tail -40 "$folder/$name.txt"; }
}

# 10^5 seeds a profile, as many with faults in one of four, and as many on NICs of no vendor.
step random uccl-ep explore --profile all --seeds 100000 --seed "$first" --json "$folder/random.json"
step faults uccl-ep explore --profile all --seeds 100000 --seed "$first" --faults --json "$folder/faults.json"
step any-nic uccl-ep explore --profile all --seeds 100000 --seed "$first" --faults --any-nic --json "$folder/any-nic.json"
# All schedules of the small programs: every order of the NICs' events, and, as far as so many runs go, of ranks too.
step events uccl-ep explore --profile all --exhaustive --events --runs 200000 --json "$folder/events.json"
step exhaustive uccl-ep explore --profile all --exhaustive --runs 200000 --json "$folder/exhaustive.json"
step wrong uccl-ep explore --profile all --wrong --seeds 1000 --seed "$first" --json "$folder/wrong.json"
step suite uccl-ep conformance --backend sim --profile all --level full --seed "$first" --json "$folder/suite.json"
exit $bad
