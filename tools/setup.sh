#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# setup.sh run|test: make this machine able to `make run` or `make test`, saying what it installs.
#
# Debian packages are installed only as root or with sudo that asks nothing; without either, what is missing is named with
# the lanes that are left out, and only what nothing can work without is an error. Python packages go into .venv alone.
set -eu

goal=${1:-test}
python=${PYTHON:-python3}
venv=${VENV:-.venv}

say() { printf 'setup: %s\n' "$*"; }
have() { command -v "$1" >/dev/null 2>&1; }

# ------------------------------------------------------------------------------------------------- Debian packages
# Package | how to see that it is not needed | what is lost without it
wanted() {
    cat <<END
gcc|have cc|everything: it is the compiler
libc6-dev|printf '#include <stdio.h>\n' | cc -E - | grep -q printf|everything: it holds the C headers
python3-venv|"$python" -c 'import ensurepip'|nothing where pip or virtualenv is there
python3-dev|test -f "\$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"|everything: it holds Python.h
libibverbs-dev|test -f /usr/include/infiniband/verbs.h|the backends of RDMA NICs: it holds the header of the verbs
END
    [ "$goal" = test ] || return 0
    cat <<END
binutils|have nm|the check of exported symbols
g++|have c++|the checks that the headers are C++, and native tests: kernels are
clang|have clang|the check by another compiler, and fuzzing
libclang-rt-dev|ls "\$(clang -print-resource-dir)"/lib/linux/libclang_rt.fuzzer-*.a|fuzzing: it holds libFuzzer
gcc-aarch64-linux-gnu|have aarch64-linux-gnu-gcc|the aarch64 lane
g++-aarch64-linux-gnu|have aarch64-linux-gnu-g++|the aarch64 lane
libc6-dev-arm64-cross|test -f /usr/aarch64-linux-gnu/include/stdio.h|the aarch64 lane
hipcc|have hipcc|the check that kernels compile for AMD GPUs
libamdhip64-5|ldconfig -p | grep -q libamdhip64.so|the check that kernels compile with hiprtc
qemu-user|have qemu-aarch64 || have qemu-aarch64-static|the aarch64 lane
qemu-system-x86|have qemu-system-x86_64|the lane softroce: RDMA devices of a guest kernel
busybox-static|have busybox && ! ldd "\$(command -v busybox)"|the lane softroce
ibverbs-providers|ls /usr/lib/*/libibverbs/librxe-*.so|the lane softroce
iproute2|have ip && have rdma|the lane softroce
ibverbs-utils|have ibv_devinfo|tests of that lane
perftest|have ib_write_bw|what puts over RDMA are compared with
python3-pyverbs|/usr/bin/python3 -c 'import pyverbs'|a peer that is not ours, in that lane
END
}

missing=$(wanted | while IFS= read -r line; do
    package=${line%%|*}
    lost=${line##*|}
    rest=${line#*|}
    probe=${rest%|*}
    eval "{ $probe; } >/dev/null 2>&1" || printf '%s|%s\n' "$package" "$lost"
done)

if [ -n "$missing" ]; then
    packages=$(printf '%s\n' "$missing" | cut -d'|' -f1 | tr '\n' ' ')
    if ! have apt-get; then
        runner=none
    elif [ "$(id -u)" = 0 ]; then
        runner=
    elif have sudo && sudo -n true 2>/dev/null; then
        runner=sudo
    else
        runner=none
    fi
    if [ "$runner" = none ]; then
        say "cannot install Debian packages here (not root, and no sudo that asks nothing). Left out:"
        printf '%s\n' "$missing" | while IFS='|' read -r package lost; do say "  $package: without it, $lost is missing"; done
    else
        say "installing Debian packages: $packages"
        # A list that cannot be refreshed may still serve.
        $runner apt-get -q update </dev/null || say "apt-get update failed; trying with the lists as they are"
        # shellcheck disable=SC2086
        $runner env DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends $packages </dev/null
    fi
fi

have cc || { say "no C compiler (cc): install gcc, or run this as root"; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    { say "$python is older than 3.10: set PYTHON=... to a newer one"; exit 1; }

# -------------------------------------------------------------------------------------------- the virtual environment
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "creating the virtual environment $venv"
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv --clear "$venv"
    elif "$python" -m virtualenv --version >/dev/null 2>&1; then
        "$python" -m virtualenv --clear "$venv"
    elif "$python" -m pip --version >/dev/null 2>&1; then
        say "python3-venv is missing: using virtualenv, installed into build/virtualenv"
        "$python" -m pip install -q --target build/virtualenv virtualenv
        PYTHONPATH=build/virtualenv "$python" -m virtualenv --clear "$venv"
    else
        say "neither venv, virtualenv nor pip is there: apt-get install python3-venv"
        exit 1
    fi
fi

# The wheel's build brings its own CMake where needed; the native tests take the one on PATH, .venv/bin first.
cmake_ok() { "$1" --version 2>/dev/null | awk 'NR == 1 { split($3, v, "."); exit !(v[1] > 3 || (v[1] == 3 && v[2] >= 20)) }'; }
if [ "$goal" = test ] && ! cmake_ok cmake && ! cmake_ok "$venv/bin/cmake"; then
    say "no CMake >= 3.20: installing cmake into $venv"
    "$venv/bin/python" -m pip install -q cmake
fi
