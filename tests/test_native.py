# SPDX-License-Identifier: Apache-2.0
"""The native tests, each alone, in every lane: plain, under sanitizers, cross-built for aarch64 under qemu."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
TESTS = sorted(path.stem for path in (CHECKOUT / "tests/native").iterdir() if re.match(r"test_.*\.(c|cpp)$", path.name))


@dataclass(frozen=True)
class Lane:
    needs: tuple[str, ...] = ()  # programs; one of them may be written "this|or_that"
    cmake: tuple[str, ...] = ()
    # Amount of work, as testing.h takes it. Sanitizers and emulators are 10 to 50 times slower.
    environment: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


LANES = {
    "plain": Lane(),
    "sanitizer-address-undefined": Lane(
        cmake=("-DUCCL_EP_SANITIZE=address;undefined",),
        environment={"UCCL_EP_TEST_SCALE": "0.01", "UBSAN_OPTIONS": "print_stacktrace=1"},
        # It breaks device.h on purpose: what is in it runs here unbroken, as tests of their own.
        without=("test_device_faults",),
    ),
    "sanitizer-thread": Lane(
        cmake=("-DUCCL_EP_SANITIZE=thread",),
        environment={"UCCL_EP_TEST_SCALE": "0.01", "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1"},
        # Some kernels place libraries where ThreadSanitizer keeps its shadow: a fixed layout avoids it.
        prefix=("setarch", os.uname().machine, "-R"),
        # They have one thread; and one stands where the sanitizer does, before the functions of the C library.
        without=(
            "test_codec",
            "test_exhaustive",
            "test_fake_ibverbs",
            "test_fiber",
            "test_lab_bnxt",
            "test_lab_ionic",
            "test_lab_preload",
            "test_lab_wire",
            "test_ring_model",
            "test_verbs_adds",
            "test_verbs_efa",
            "test_verbs_memory",
            "test_verbs_names",
            "test_verbs_queues",
            "test_verbs_receives",
            "test_virtual_nic_messages",
            "test_weakmem",
        ),
    ),
    "aarch64": Lane(
        needs=("aarch64-linux-gnu-gcc", "aarch64-linux-gnu-g++", "qemu-aarch64|qemu-aarch64-static"),
        cmake=(f"-DCMAKE_TOOLCHAIN_FILE={CHECKOUT}/cmake/aarch64-linux-gnu.cmake",),
        environment={"UCCL_EP_TEST_SCALE": "0.01"},
        # One explores a model of memory, whatever the machine's own, one starts a test for each of its faults; under an
        # emulator they take minutes. One starts itself anew, which an emulator does not do for it.
        without=("test_device_faults", "test_lab_preload", "test_ring_model"),
    ),
}


def run(*command: str, environment: dict[str, str] | None = None, timeout: float = 900) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False,
        env={**os.environ, **(environment or {})}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-12000:]}", pytrace=False)


def require(*programs: str) -> None:
    for alternatives in programs:
        if not any(shutil.which(program) for program in alternatives.split("|")):
            pytest.skip(f"{alternatives} is not installed")


@functools.cache
def build(lane: str) -> Path:
    folder = CHECKOUT / "build" / "native" / lane
    run(
        "cmake", "-S", str(CHECKOUT), "-B", str(folder), "-DUCCL_EP_NATIVE_TESTS=ON", "-DUCCL_EP_WERROR=ON",
        *LANES[lane].cmake,
    )  # fmt: skip
    run("cmake", "--build", str(folder), "-j", str(len(os.sched_getaffinity(0))))
    return folder


@pytest.mark.required_in_ci
@pytest.mark.parametrize(
    ("lane", "name"), [(lane, name) for lane in LANES for name in TESTS if name not in LANES[lane].without]
)
def test_native(lane: str, name: str) -> None:
    require("cmake", "c++", *LANES[lane].needs)
    folder = build(lane)
    prefix = LANES[lane].prefix if shutil.which((*LANES[lane].prefix, "true")[0]) else ()
    run(
        *prefix, "ctest", "--test-dir", str(folder), "--output-on-failure", "-R", f"^{name}$", "--no-tests=error",
        environment=LANES[lane].environment,
    )  # fmt: skip


@pytest.mark.required_in_ci
def test_clang_finds_nothing(tmp_path: Path) -> None:
    """Another compiler's warnings, as errors. They come before anything is optimised."""
    require("cmake", "clang", "clang++")
    run("cmake", "-S", str(CHECKOUT), "-B", str(tmp_path), "-DUCCL_EP_NATIVE_TESTS=ON", "-DUCCL_EP_WERROR=ON",
        "-DCMAKE_C_COMPILER=clang", "-DCMAKE_CXX_COMPILER=clang++", "-DCMAKE_BUILD_TYPE=None")  # fmt: skip
    run("cmake", "--build", str(tmp_path), "-j", str(len(os.sched_getaffinity(0))))


@pytest.mark.required_in_ci
@pytest.mark.parametrize("source", ["headers.c", "headers.cpp"])
def test_the_public_headers_compile_together(source: str, tmp_path: Path) -> None:
    compiler, standard = ("cc", "c11") if source.endswith(".c") else ("c++", "c++17")
    require(compiler)
    program = tmp_path / "headers"
    options = ["-Wall", "-Wextra", "-Werror", f"-std={standard}", f"-I{CHECKOUT}/include"]
    if compiler == "cc":
        run(compiler, *options, "-c", str(CHECKOUT / "tests/native" / source), "-o", str(program))
    else:
        run(compiler, *options, str(CHECKOUT / "tests/native" / source), "-o", str(program))
        run(str(program))
