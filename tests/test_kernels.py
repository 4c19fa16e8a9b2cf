# SPDX-License-Identifier: Apache-2.0
"""Every device header and kernel compiles with every compiler that meets it, without a GPU; what a push becomes.

A compiler that is missing is a skip that says how to have it; in CI a failure.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import re
import shutil
import subprocess
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

import uccl_ep.accel
from uccl_ep import paths

pytestmark = pytest.mark.required_in_ci

CHECKOUT = Path(__file__).resolve().parents[1]
EVERY_CALL = CHECKOUT / "tests/kernels/every_call.cu"
KERNELS = sorted([*CHECKOUT.glob("csrc/device/*.cu"), *CHECKOUT.glob("examples/*.cu"), EVERY_CALL])
CUDA_ARCHITECTURE = "sm_90"
OTHER_CUDA_ARCHITECTURES = ["sm_80", "sm_100"]
HIP_ARCHITECTURE = "gfx90a"  # what the compiler of Debian 12 knows
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Werror"]  # headers, with more: test_headers.py

kernels = pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.stem)


@functools.cache
def nvcc() -> str:
    """On PATH, or of the packages nvidia-cuda-nvcc and the like (pip install 'uccl_ep[compilers]')."""
    packaged = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin/nvcc"
    found = str(packaged) if packaged.is_file() else shutil.which("nvcc")
    if not found:
        pytest.skip("nvcc is not installed: pip install 'uccl_ep[compilers]'")
    return found


def program(name: str) -> str:
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    return name


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, f"-I{paths.include_dir()}"], capture_output=True, text=True, check=False, timeout=600,
        stdin=subprocess.DEVNULL, env={**os.environ, **environment},
    )  # fmt: skip


def compiles(*command: str | Path, **environment: str) -> None:
    done = run(*command, **environment)
    assert done.returncode == 0, done.stderr[-8000:]


@kernels
@pytest.mark.parametrize(("compiler", "standard"), [("g++", "c++14"), ("g++", "c++17"), ("clang++", "c++17")])
def test_for_the_emulation(compiler: str, standard: str, kernel: Path) -> None:
    compiles(program(compiler), f"-std={standard}", *WARNINGS, "-fsyntax-only", "-x", "c++", kernel)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the slow compilers made: each thing once, whoever looks at it."""
    return tmp_path_factory.mktemp("built")


def ptx_of(kernel: Path, architecture: str, built: Path) -> str:
    folder = built / architecture
    folder.mkdir(exist_ok=True)
    ptx = folder / f"{kernel.stem}.ptx"
    if not ptx.exists():
        compiles(
            nvcc(), f"-arch={architecture}", "-std=c++17", "-Werror", "all-warnings", "-cubin", "-keep",
            f"-keep-dir={folder}", "-o", folder / f"{kernel.stem}.cubin", kernel,
        )  # fmt: skip
    return ptx.read_text()


def amd_assembly_of(kernel: Path, built: Path) -> str:
    assembly = built / f"{kernel.stem}.s"
    if not assembly.exists():
        compiles(
            program("hipcc"), f"--offload-arch={HIP_ARCHITECTURE}", "--cuda-device-only", "-O3", "-Wall", "-Werror",
            "-Wno-unused-command-line-argument", "-S", "-o", assembly, "-x", "hip", kernel, HIP_PLATFORM="amd",
        )  # fmt: skip
    return assembly.read_text()


@kernels
def test_nvcc(kernel: Path, built: Path) -> None:
    assert ".entry " in ptx_of(kernel, CUDA_ARCHITECTURE, built)


@pytest.mark.parametrize("architecture", OTHER_CUDA_ARCHITECTURES)
def test_nvcc_for_other_architectures(architecture: str, built: Path) -> None:
    """What may differ by architecture is our headers' instructions: all of them are in one file."""
    assert ".entry " in ptx_of(EVERY_CALL, architecture, built)


@kernels
def test_nvrtc(kernel: Path) -> None:
    if not find_spec("cuda"):
        pytest.skip("pip install 'uccl_ep[cuda]'")
    beside = {path.name: path.read_text() for path in kernel.parent.glob("*.h")}
    image = uccl_ep.accel.compile_for(
        "cuda", CUDA_ARCHITECTURE, kernel.read_text(), kernel.name, headers=beside, cache=False
    )
    assert image.startswith(b"\x7fELF")


@kernels
def test_hipcc(kernel: Path, built: Path) -> None:
    assert ".amdhsa_kernel " in amd_assembly_of(kernel, built)


@kernels
def test_hiprtc(kernel: Path) -> None:
    """Of the runtime itself: up to 5.4 hiprtc has no library of its own, which hip-python would look for."""
    try:
        library = ctypes.CDLL("libamdhip64.so.5")
    except OSError:
        pytest.skip("libamdhip64.so.5 is not installed (libamdhip64-5)")
    compiled = ctypes.c_void_p()
    source, name = kernel.read_bytes(), kernel.name.encode()
    assert library.hiprtcCreateProgram(ctypes.byref(compiled), source, name, 0, None, None) == 0
    options = [f"--offload-arch={HIP_ARCHITECTURE}", f"-I{paths.include_dir()}", f"-I{kernel.parent}", "-O3"]
    status = library.hiprtcCompileProgram(
        compiled, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options))
    )
    size = ctypes.c_size_t()
    assert library.hiprtcGetProgramLogSize(compiled, ctypes.byref(size)) == 0
    log = ctypes.create_string_buffer(size.value + 1)
    assert library.hiprtcGetProgramLog(compiled, log) == 0
    assert status == 0, log.value.decode(errors="replace")[-8000:]
    assert library.hiprtcGetCodeSize(compiled, ctypes.byref(size)) == 0
    assert size.value > 0


# ------------------------------------------------------------------------------------------------- what a push becomes
def body(ptx: str, name: str) -> str:
    found = re.search(rf"\.entry {name}\((?:.*?)\n\{{\n(.*?)\n\}}", ptx, re.DOTALL)
    assert found, f"no kernel {name}"
    return found[1]


def test_a_push_is_one_store_behind_one_fence(built: Path) -> None:
    """A command is one 16-byte store, and a warp's commands are behind one fence; a second one is on the way of those
    that waited for space. The other stores to the system are a failure's: its record, and gave_up."""
    push = body(ptx_of(EVERY_CALL, CUDA_ARCHITECTURE, built), "push")
    stores = [line.strip() for line in push.splitlines() if re.search(r"\bst\.\w+\.sys\b", line)]
    commands = [line for line in stores if re.match(r"st\.relaxed\.sys\.global\.(v2\.b64|b128) ", line)]
    assert len(commands) == 1, stores
    assert push.count("fence.acq_rel.sys") == 2
    assert push.index("fence.acq_rel.sys") < push.index(commands[0])
    others = {line.split()[0] for line in stores if line not in commands}
    assert others == {"st.relaxed.sys.global.b64", "st.release.sys.global.b64"}, others
    # A ring's words are not in shared memory, and the compiler knows.
    assert set(re.findall(r"\batom\.\S+", push)) == {
        "atom.relaxed.gpu.global.add.u64",
        "atom.relaxed.gpu.global.exch.b32",
    }
    assert "fence.sc" not in push
    assert "trap" not in push
    assert "vprintf" not in push


def test_a_push_on_amd_is_two_stores_behind_a_wait(built: Path) -> None:
    """There is no 16-byte store that is atomic: word 0 and word 1, behind a fence that waits for all stores before."""
    found = re.search(r"\npush:(.*?)\.Lfunc_end", amd_assembly_of(EVERY_CALL, built), re.DOTALL)
    assert found
    last_fence = found[1].rindex("buffer_wbl2")
    behind = found[1][last_fence:]
    assert "s_waitcnt vmcnt(0)" in behind[: behind.index("_store_dwordx2")]
    assert len(re.findall(r"_store_dwordx2 ", behind)) == 2, behind


# ------------------------------------------------------------------------------------------------- what is not honoured
NOT_HONOURED = {
    "nvshmemx_signal_op(flag, 1, NVSHMEM_SIGNAL_SET, pe)": "use NVSHMEM_SIGNAL_ADD",
    "nvshmemx_putmem_signal_nbi_block(x, x, 16, flag, 1, 9, pe)": "use NVSHMEM_SIGNAL_ADD",
    "nvshmem_signal_wait_until(flag, NVSHMEM_CMP_EQ, 1)": "wait with NVSHMEM_CMP_GE",
    "nvshmemi_ibgda_amo_nonfetch_add((int *)x, 1, pe, 0)": "unsigned 64-bit word of comm.signal_words",
    "nvshmemi_ibgda_amo_nonfetch_add((void *)x, 1, pe, 0)": "unsigned 64-bit word of comm.signal_words",
    "nvshmem_putmem_signal_nbi(x, x, 16, x, 1, NVSHMEM_SIGNAL_ADD, pe)": "unsigned 64-bit word of comm.signal_words",
    "nvshmem_int_atomic_add((int *)x, 1, pe)": "use nvshmemx_signal_op",
    "nvshmem_uint64_atomic_add(flag, 1, pe)": "use nvshmemx_signal_op",
    "nvshmem_uint64_atomic_fetch_add(flag, 1, pe)": "nothing comes back from a target",
    "nvshmem_ulonglong_atomic_compare_swap(word, 1, 2, pe)": "nothing comes back from a target",
    "nvshmem_getmem_nbi(x, x, 16, pe)": "have the owner put it",
    "nvshmem_float_g(x, pe)": "have the owner put it",
    "nvshmem_int_p((int *)x, 1, pe)": "store the value there and use nvshmem_putmem_nbi",
    "nvshmemi_ibgda_rma_p((int *)x, 1, pe, 0)": "store the value there and use nvshmem_putmem_nbi",
    "nvshmem_barrier_all()": "signal all ranks and wait for them",
}


# NVRTC, which is slow, sees one call of each text.
@pytest.mark.parametrize(
    ("compiler", "call"),
    [*itertools.product(["g++", "clang++"], NOT_HONOURED),
     *(("nvrtc", call) for call in {text: call for call, text in NOT_HONOURED.items()}.values())],
)  # fmt: skip
def test_what_is_not_honoured_does_not_compile(call: str, compiler: str) -> None:
    if compiler == "nvrtc":
        if not find_spec("cuda"):
            pytest.skip("pip install 'uccl_ep[cuda]'")
        source = EVERY_CALL.read_text()
        with pytest.raises(uccl_ep.errors.CompileError) as caught:
            uccl_ep.accel.compile_for(
                "cuda", CUDA_ARCHITECTURE, source, EVERY_CALL.name, [f"-DUCCL_EP_NOT_HONOURED={call}"], cache=False
            )
        text = str(caught.value)
    else:
        done = run(
            program(compiler), "-std=c++17", "-fsyntax-only", f"-DUCCL_EP_NOT_HONOURED={call}", "-x", "c++", EVERY_CALL
        )
        assert done.returncode != 0
        text = done.stderr
    # Clang breaks no lines; others say the whole text once.
    assert "uccl_ep: " in text
    assert NOT_HONOURED[call] in text, text
