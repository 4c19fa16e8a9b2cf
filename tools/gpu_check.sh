#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# gpu_check.sh: all that has to hold on a real GPU, in one go; one line of verdict each, and what was measured as JSON.
#
#   tools/gpu_check.sh [--accel cuda|hip|cpu] [--against FIFO] [--out FOLDER] [--part NAME]... [--stretch N] [--short]
#
# Needs an installed uccl_ep with the kind's packages (uccl_ep[cuda]: cuda-bindings, NVRTC), pytest, and this checkout;
# PYTHON names the interpreter. --against is UCCL-EP's FIFO benchmark, built, for the budgets; compute-sanitizer is taken
# from PATH. Parts: doctor errors suite-host suite-device pushes budgets demo-host demo-device memcheck tests. Each has a
# limit in seconds, which --stretch multiplies. --short makes them small, to try the script: what was shortened is "open".
# Every line is pass, FAIL, or open with the reason; exit status 0 all passed, 1 something failed, 3 something is open.
set -u
accel=cuda out=build/gpu_check against='' parts='' stretch=1 short=
here=$(cd "$(dirname "$0")/.." && pwd) || exit 2
python=${PYTHON:-python3}
usage() {
    sed -n '3,15s/^# \{0,1\}//p' "$0"
    exit "$1"
}
while [ $# -gt 0 ]; do
    case $1 in
    --accel | --against | --out | --part | --stretch) [ $# -gt 1 ] || usage 2 ;;
    esac
    case $1 in
    --accel) accel=$2 && shift ;;
    --against) against=$(cd "$(dirname "$2")" && pwd)/$(basename "$2") && shift ;;
    --out) out=$2 && shift ;;
    --part) parts="$parts $2" && shift ;;
    --stretch) stretch=$2 && shift ;;
    --short) short=1 ;;
    --help | -h) usage 0 ;;
    *) usage 2 ;;
    esac
    shift
done
case $accel in cuda | hip | cpu) ;; *) usage 2 ;; esac
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
# What is tested is what is installed, wherever this is typed.
work=$(mktemp -d) && cd "$work" || exit 2
trap 'rm -rf "$work"' EXIT
rm -f "$out"/*.json "$out"/*.txt "$out"/*.end

"$python" -c 'import uccl_ep' 2>"$out/import.txt" || { cat "$out/import.txt" && echo "gpu_check: install uccl_ep for $python" && exit 2; }
cli="$python -m uccl_ep"

part() { # name, limit in seconds, then a command; its output, and how it ended, go into the folder
    name=$1 limit=$(($2 * stretch))
    shift 2
    case "$parts " in ' ' | *" $name "*) ;; *) return ;; esac
    printf 'gpu_check: %s, at most %s s: %s\n' "$name" "$limit" "$*"
    began=$(date +%s)
    timeout -k 20 "$limit" "$@" >"$out/$name.txt" 2>&1
    echo "$? $(($(date +%s) - began)) $limit" >"$out/$name.end"
}

suite="$cli conformance --backend shm --lane gpu --accel $accel --ranks 4 --seed 1"
perf="$cli perf gpu --accel $accel"
level=full commands=1000000000 repeats=5 runs=3 demo=
[ "$short" ] && level=core commands=3000 repeats=1 runs=1 demo='--hidden 64 --iterations 1'
# Lane and posting kernels, of which no grid waits for another one that is launched behind it.
single="--case put1.* --case sig1.* --case qui1.* --case pub1.* --case pub2.* --case thr1.*"
[ "$short" ] && single='--case pub1.lanes_write'

part doctor 120 $cli doctor --json "$out/doctor.json"
part errors 120 "$python" "$here/tests/gpu/refusals.py" "$accel" "$out/errors.json"
part suite-host 1800 $suite --heap host --level $level --json "$out/suite-host.json"
part suite-device 1800 $suite --heap device --level $level --json "$out/suite-device.json"
part pushes 900 $perf --repeats 1 --seconds 0.02 --commands $commands --json "$out/pushes.json"
if [ "$against" ]; then
    part budgets 1200 $perf --repeats $repeats --against "$against" --against-runs $runs --json "$out/budgets.json"
else
    part budgets 900 $perf --repeats $repeats --json "$out/budgets.json"
fi
for heap in host device; do
    part demo-$heap 300 $cli demo --accel $accel --heap $heap --channels 2 $demo --json "$out/demo-$heap.json"
done
if [ "$accel" = cuda ] && command -v compute-sanitizer >/dev/null; then
    # Calls of the driver that fail are exceptions already, but for one: how many parameters a kernel has is found by
    # asking past the last one.
    part memcheck 1800 compute-sanitizer --tool memcheck --report-api-errors no --target-processes all --error-exitcode 97 \
        $cli conformance --backend shm --lane gpu --accel cuda --heap device --ranks 2 --seed 1 --time-scale 20 $single \
        --json "$out/memcheck.json"
elif [ "$accel" = cpu ]; then
    # The same cases, to see that they are there.
    part memcheck 600 $suite --heap device $single --json "$out/memcheck.json"
fi
part tests 1200 "$python" -m pytest -q -rs -p no:cacheprovider --junit-xml "$out/tests.xml" "$here/tests/gpu" \
    -k 'not level_full'

"$python" "$here/tools/gpu_summary.py" "$out" "$accel" "$short"
