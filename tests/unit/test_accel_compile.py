# SPDX-License-Identifier: Apache-2.0
"""Kernels compile where there is no GPU: NVRTC, hiprtc, the machine's C++ compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import uccl_ep.accel
from uccl_ep import errors, paths
from uccl_ep.accel import _entries

# Most of device.h, with our headers by content alone.
KERNEL = """
#include <uccl_ep/device.h>
#include "shapes/mine.h"
UCCL_EP_KERNEL void encode(uccl_ep_device_comm comm, uccl_ep_command command, uccl_ep_u64 *seen) {
    command.target = comm.rank + MINE;
    uccl_ep::post_many_warp(comm, 0, command, true);
    uccl_ep::put_signal_block(comm, 0, 0, 0, 0, 16, 0, 1);
    uccl_ep::quiet_all_block(comm);
    uccl_ep::wait_signal_warp(comm, 0, 1, seen);
}
"""
HEADERS = {"shapes/mine.h": "#define MINE 1u\n"}
needs_nvrtc = [
    pytest.mark.required_in_ci,
    pytest.mark.skipif(not find_spec("cuda"), reason="pip install 'uccl_ep[cuda]'"),
]
nvrtc = pytest.param("cuda", "sm_90", marks=needs_nvrtc)


@pytest.mark.required_in_ci
@pytest.mark.skipif(not find_spec("cuda"), reason="pip install 'uccl_ep[cuda]'")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_90a"])
def test_nvrtc_makes_a_cubin(architecture: str) -> None:
    image = uccl_ep.accel.compile_for("cuda", architecture, KERNEL, "k.cu", headers=HEADERS, cache=False)
    assert image.startswith(b"\x7fELF")
    assert b"encode" in image


@pytest.mark.parametrize(("kind", "architecture"), [nvrtc, ("cpu", "any")])
def test_an_error_names_file_and_line_and_shows_it(kind: str, architecture: str) -> None:
    source = "#define A 1\n\nint a = A;\nint b = undeclared_thing;\n"
    with pytest.raises(errors.CompileError) as caught:
        uccl_ep.accel.compile_for(kind, architecture, source, "some.cu", cache=False)
    text = str(caught.value)
    assert "some.cu(4)" in text or "some.cu:4" in text
    assert "int b = undeclared_thing;" in text
    assert "/tmp" not in text


@pytest.mark.parametrize(("kind", "architecture"), [nvrtc, ("cpu", "any")])
def test_an_option_reaches_the_compiler(kind: str, architecture: str) -> None:
    source = "#ifndef WANTED\n#error not wanted\n#endif\n"
    with pytest.raises(errors.CompileError, match="not wanted"):
        uccl_ep.accel.compile_for(kind, architecture, source, "k.cu", cache=False)
    uccl_ep.accel.compile_for(kind, architecture, source, "k.cu", ["-DWANTED"], cache=False)


@pytest.mark.required_in_ci
@pytest.mark.skipif(not find_spec("cuda"), reason="pip install 'uccl_ep[cuda]'")
def test_an_architecture_that_nvrtc_does_not_know() -> None:
    with pytest.raises(errors.UnsupportedArchitecture, match=r"sm_20.*knows.*sm_90"):
        uccl_ep.accel.compile_for("cuda", "sm_20", KERNEL, "k.cu", cache=False)


@pytest.mark.required_in_ci
@pytest.mark.skipif(not find_spec("cuda"), reason="pip install 'uccl_ep[cuda]'")
def test_the_architecture_for_a_device() -> None:
    from uccl_ep.accel.cuda import Nvrtc

    nvrtc = Nvrtc()
    assert nvrtc.architecture(9, 0) == "sm_90"
    assert nvrtc.architecture(8, 0) == "sm_80"
    nvrtc.architectures = ["sm_75", "sm_80", "sm_86"]
    assert nvrtc.architecture(8, 9) == "sm_86"
    assert nvrtc.architecture(8, 5) == "sm_80"
    for major, minor in ((7, 0), (9, 0)):
        with pytest.raises(errors.UnsupportedArchitecture, match=rf"{major}\.{minor}.*sm_75, sm_80, sm_86"):
            nvrtc.architecture(major, minor)


HIPRTC = """
import uccl_ep.accel
from uccl_ep import errors
source, headers = open("k.cu").read(), {"shapes/mine.h": open("mine.h").read()}
image = uccl_ep.accel.compile_for("hip", "gfx90a", source, "k.cu", headers=headers, cache=False)
print(image[:4] == b"\\x7fELF", b"encode" in image)
try:
    uccl_ep.accel.compile_for("hip", "gfx90a", "int b = undeclared_thing;", "some.cu", cache=False)
except errors.CompileError as error:
    print("some.cu:1" in str(error) and "int b = undeclared_thing;" in str(error))
folder = uccl_ep.paths.kernels_dir()
headers = {path.name: path.read_text() for path in folder.glob("*.h")}
for path in folder.glob("*.cu"):
    image = uccl_ep.accel.compile_for("hip", "gfx90a", path.read_text(), path.name, headers=headers, cache=False)
    print(image[:4] == b"\\x7fELF")
"""


@pytest.mark.required_in_ci
def test_hiprtc(tmp_path: Path) -> None:
    """Debian's HIP 5.2 has hiprtc inside the runtime; hip-python looks for it in a library of its own, as newer ones
    have it."""
    if not find_spec("hip"):
        pytest.skip("pip install 'uccl_ep[hip]'")
    runtime = [path for path in Path("/usr/lib").glob("*/libamdhip64.so.*") if path.is_symlink()]
    if not runtime:
        pytest.skip("libamdhip64 is not installed: apt-get install libamdhip64-5")
    for name in ("libamdhip64.so", "libhiprtc.so"):
        (tmp_path / name).symlink_to(runtime[0])
    (tmp_path / "k.cu").write_text(KERNEL)
    (tmp_path / "mine.h").write_text(HEADERS["shapes/mine.h"])
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", HIPRTC], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    ours = list(paths.kernels_dir().glob("*.cu"))
    assert ours
    assert (done.returncode, done.stdout) == (0, "True True\nTrue\n" + "True\n" * len(ours)), done.stderr


def test_a_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler --fast")
    with pytest.raises(errors.MissingCompiler, match=r"no-such-compiler.*install g\+\+"):
        uccl_ep.accel.compile_for("cpu", "any", KERNEL, "k.cu", cache=uccl_ep.accel.Cache(tmp_path / "kernels"))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(errors.MissingCompiler, match="false --version"):
        uccl_ep.accel.compile_for("cpu", "any", KERNEL, "k.cu", cache=uccl_ep.accel.Cache(tmp_path / "kernels"))


def test_the_kernels_of_a_source() -> None:
    source = """
    // UCCL_EP_KERNEL void not_this(
    /* UCCL_EP_KERNEL void nor_this( */
    const char *text = "UCCL_EP_KERNEL void nor_that(";
    UCCL_EP_KERNEL void one(int a);
    UCCL_EP_KERNEL void two() {}
    UCCL_EP_KERNEL
        __launch_bounds__(max(1, 2), (3)) void three(
    UCCL_EP_KERNEL void __launch_bounds__(256) four(int x) {}
    UCCL_EP_KERNEL void one(int a) {}
    template <int N> __global__ void not_by_name() {}
    UCCL_EP_DEVICE void helper() {}
    UCCL_EP_EMULATION_ENTRY(two)
    """
    assert _entries.kernel_names(source) == (["one", "two", "three", "four"], ["two"])
