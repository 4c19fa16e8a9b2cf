#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# nightly.sh [FIRST_SEED] [FOLDER]: what takes hours, on an installed uccl-ep. Prints where reports are; exit status 1 if
# anything was found. Seeds begin at today's date unless told otherwise, so that every night looks at other runs; what a
# night finds names the seed that replays it. PERCENT=1 makes every campaign a hundredth as long, for trying it out.
set -u
percent=${PERCENT:-100}
first=${1:-$(date +%Y%m%d)00000}
folder=${2:-build/nightly}
mkdir -p "$folder" || exit 2
bad=0

of() { # so much of it, and at least 1
    n=$(($1 * percent / 100))
    echo $((n > 0 ? n : 1))
}

step() { # name, then a command
    name=$1
    shift
    printf 'nightly: %s\n' "$*"
    began=$(date +%s)
    "$@" >"$folder/$name.txt" 2>&1 || { bad=1; printf 'nightly: FAILED: see %s\n' "$folder/$name.txt"; tail -40 "$folder/$name.txt"; }
    printf 'nightly: %s took %s s\n' "$name" "$(($(date +%s) - began))"
}

# 10^5 seeds a profile, as many with faults in one of four, and as many on NICs of no vendor.
step random uccl-ep explore --profile all --seeds "$(of 100000)" --seed "$first" --json "$folder/random.json"
step faults uccl-ep explore --profile all --seeds "$(of 100000)" --seed "$first" --faults --json "$folder/faults.json"
step any-nic uccl-ep explore --profile all --seeds "$(of 100000)" --seed "$first" --faults --any-nic \
    --json "$folder/any-nic.json"
# All schedules of the small programs, or as many as lie near the first ones: of ranks that are prompt, and of slow ones;
# and with a piece that lands twice and a doorbell that is lost.
step events uccl-ep explore --profile all --exhaustive --events --runs "$(of 30000)" --json "$folder/events.json"
step exhaustive uccl-ep explore --profile all --exhaustive --runs "$(of 20000)" --json "$folder/exhaustive.json"
step twice uccl-ep explore --profile efa3 --profile thor2 --profile pollara --exhaustive --duplicates 1 --lost-doorbells 1 \
    --runs "$(of 5000)" --json "$folder/twice.json"
step wrong uccl-ep explore --profile all --wrong --seeds "$(of 1000)" --seed "$first" --json "$folder/wrong.json"
step lab-setup uccl-ep lab setup # for the vendors' mutants, and for what follows
step mutants uccl-ep mutants --seeds "$(of 3)" --json "$folder/mutants.json"
step suite uccl-ep conformance --backend sim --profile all --level full --seed "$first" --json "$folder/suite.json"
step staged uccl-ep conformance --backend sim --profile all --heap device --level full --seed "$first" --json "$folder/staged.json"
for warp in 1 32 64; do
    step "gpu-$warp" uccl-ep conformance --lane gpu --accel cpu --warp-size $warp --level full --seed "$first" --json "$folder/gpu-$warp.json"
done
step gpu-device uccl-ep conformance --lane gpu --accel cpu --heap device --level full --seed "$first" --json "$folder/gpu-device.json"
step gpu-staged uccl-ep conformance --lane gpu --accel cpu --heap device --staging on --level full --seed "$first" \
    --json "$folder/gpu-staged.json"
# RDMA devices of a guest kernel: at level full, on a wire that loses, and with the limits of other vendors.
step softroce uccl-ep conformance --backend connectx --lane softroce --level full --seed "$first" --json "$folder/softroce.json"
step softroce-impair uccl-ep conformance --backend connectx --lane softroce --impair --ranks 2 --level full --seed "$first" \
    --json "$folder/softroce-impair.json"
for backend in thor pollara; do
    step softroce-$backend uccl-ep conformance --backend $backend --lane softroce --ranks 2 --level full --seed "$first" \
        --json "$folder/softroce-$backend.json"
done
# The backends over libibverbs, on one made of software with each vendor's limits: tests/test_conformance_verbs.py, whole.
fake=$(realpath "$folder")/libibverbs.so.1
step fake-libibverbs cc -std=gnu11 -O2 -fPIC -shared -pthread "$(dirname "$0")"/../tests/native/fake_ibverbs/*.c -o "$fake"
step fake-libefa cc -std=gnu11 -O2 -fPIC -shared "$(dirname "$0")"/../tests/native/fake_ibverbs/libefa/libefa.c -ldl \
    -o "$(dirname "$fake")/libefa.so.1"
for device in efa:efa0 connectx:mlx5_0 thor:bnxt_re0,max_post=64,inflight=1572864 pollara:ionic_0,inflight=2097152; do
    name=${device%%:*}
    step "verbs-$name" env UCCL_EP_LIBIBVERBS="$fake" FAKE_IBVERBS="${device#*:}" FAKE_IBVERBS_WIRE="nightly-$name-$$" \
        uccl-ep conformance --backend "$name" --level full --seed "$first" --json "$folder/verbs-$name.json"
done
# The vendors' own libraries on the lab's NICs: this machine's and fetched ones, the profiles, and queues that are small.
lane() { # name, then options
    name=$1
    shift
    step "provider-$name" uccl-ep conformance --lane provider --level full --seed "$first" --json "$folder/provider-$name.json" "$@"
}
lane connectx-machine --backend connectx --libraries machine
lane connectx --backend connectx
lane connectx-ro --backend connectx --profile connectx-ro --backend-options relaxed=1
lane connectx-small --backend connectx --knobs max_wr=64,max_cqe=1024,responder_atomics=2
lane thor --backend thor
lane thor-machine --backend thor --libraries machine # Debian 12's: no adds
lane pollara --backend pollara
lane pollara-noatomic --backend pollara --profile pollara-noatomic
lane efa --backend efa
lane efa3 --backend efa --variant efa3
lane efa-small --backend efa --variant efa3 --knobs max_wr=64,max_cqe=1024
exit $bad
