# SPDX-License-Identifier: Apache-2.0
"""uccl_ep.accel where nothing of a vendor is installed: it imports, and says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def python(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_nothing_of_a_vendor(tmp_path: Path) -> None:
    code = """
import sys
import uccl_ep.accel
print([name for name in ("cuda", "hip", "rocm", "torch", "platformdirs", "uccl_ep.accel.cpu") if name in sys.modules])
"""
    assert python(code, tmp_path) == "[]"


@pytest.mark.parametrize(("kind", "package"), [("cuda", "cuda"), ("hip", "hip")])
@pytest.mark.parametrize("use", ["open(kind)", "compile_for(kind, 'sm_90', '', 'k.cu')"])
def test_a_missing_package_names_the_extra(kind: str, package: str, use: str, tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules[{package!r}] = None
import uccl_ep.accel
from uccl_ep import errors
kind = {kind!r}
try:
    uccl_ep.accel.{use}
except errors.MissingPackage as error:
    print(isinstance(error, errors.Unsupported), error)
"""
    said = python(code, tmp_path)
    assert said.startswith("True E_UNSUPPORTED")
    assert said.endswith(f"pip install 'uccl_ep[{kind}]'")


def test_a_missing_library_is_no_missing_package(tmp_path: Path) -> None:
    """NVRTC's bindings without NVRTC; the driver's without the driver."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="pip install 'uccl_ep[cuda]'")
    code = """
import cuda.bindings.nvrtc as nvrtc
def missing(*given):
    raise RuntimeError("Failed to dlopen libnvrtc.so.13")
nvrtc.nvrtcVersion = missing
import uccl_ep.accel
from uccl_ep import errors
try:
    uccl_ep.accel.compile_for("cuda", "sm_90", "", "k.cu")
except errors.MissingCompiler as error:
    print(error)
"""
    said = python(code, tmp_path)
    assert "Failed to dlopen libnvrtc.so.13" in said
    assert "pip install nvidia-cuda-nvrtc" in said
