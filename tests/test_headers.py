# SPDX-License-Identifier: Apache-2.0
"""Every public header compiles alone, with every compiler that meets it, without a warning."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from uccl_ep import paths

HEADERS = sorted(path.name for path in (paths.include_dir() / "uccl_ep").glob("*.h"))
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror"]
COMPILERS = {
    "gcc-c11": (["gcc", "-std=c11", *WARNINGS], "c"),
    "g++-c++17": (["g++", "-std=c++17", *WARNINGS], "cc"),
    "clang-c11": (["clang", "-std=c11", *WARNINGS], "c"),
    "clang++-c++17": (["clang++", "-std=c++17", *WARNINGS], "cc"),
}
C_HEADERS = [
    "accelerator.h", "backend.h", "command.h", "device_comm.h", "emulation.h", "ring.h", "status.h", "uccl_ep.h",
]  # fmt: skip
KERNEL_HEADERS = ["device.h", "device_platform.h", "nvshmem.h"]  # C++
PLATFORM_HEADERS = ["device_cuda.h", "device_emulation.h", "device_hip.h", "device_poster.h"]  # parts of those
# What a run-time compiler sees: the codec and the ring's layout, with no include path but ours.
DEVICE_HEADERS = ["status.h", "command.h", "ring.h", "device_comm.h"]


def compile_one(command: list[str], source: Path, text: str) -> None:
    source.write_text(text)
    done = subprocess.run([*command, f"-I{paths.include_dir()}", str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_list_is_complete() -> None:
    assert sorted([*C_HEADERS, *KERNEL_HEADERS, *PLATFORM_HEADERS]) == HEADERS


@pytest.mark.required_in_ci
@pytest.mark.parametrize(
    ("header", "compiler"),
    [(header, compiler) for header in [*C_HEADERS, *KERNEL_HEADERS] for compiler in COMPILERS
     if header in C_HEADERS or COMPILERS[compiler][1] == "cc"],
)  # fmt: skip
def test_alone(header: str, compiler: str, tmp_path: Path) -> None:
    command, suffix = COMPILERS[compiler]
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    compile_one([*command, "-fsyntax-only"], tmp_path / f"one.{suffix}", f"#include <uccl_ep/{header}>\n")


@pytest.mark.required_in_ci
@pytest.mark.parametrize("rtc", ["__CUDACC_RTC__", "__HIPCC_RTC__"])
def test_nothing_is_included_under_a_run_time_compiler(rtc: str, tmp_path: Path) -> None:
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    text = "".join(f"#include <uccl_ep/{header}>\n" for header in DEVICE_HEADERS)
    text += "unsigned long long parity() { return uccl_ep_ring_parity(4, 16); }\n"
    flags = ["-nostdinc", "-nostdinc++", f"-D{rtc}", "-D__host__=", "-D__device__="]
    compile_one(["g++", "-std=c++17", *WARNINGS, *flags, "-fsyntax-only"], tmp_path / "rtc.cc", text)


KERNEL = """
#include <uccl_ep/uccl_ep.h>
__global__ void codec(uccl_ep_command command, uccl_ep_words *words, int *status) {
    uccl_ep_command back;
    status[0] = uccl_ep_encode(&command, words);
    status[1] = uccl_ep_decode(words->word[0], words->word[1], &back);
    status[2] = (int)(uccl_ep_ring_parity(4, back.add) >> 63);
}
"""


def test_a_kernel_uses_the_codec(tmp_path: Path) -> None:
    """nvcc where it exists; no GPU is needed."""
    if not shutil.which("nvcc"):
        pytest.skip("nvcc is not installed: the CUDA toolkit brings it")
    compile_one(
        ["nvcc", "-arch=sm_90", "-std=c++17", "-Werror", "all-warnings", "-cubin", "-o", str(tmp_path / "codec.cubin")],
        tmp_path / "codec.cu",
        KERNEL,
    )
