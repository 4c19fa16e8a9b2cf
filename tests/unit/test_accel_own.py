# SPDX-License-Identifier: Apache-2.0
"""The kernels that uccl_ep brings: as source for every GPU, and built for the CPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

import uccl_ep.accel
from uccl_ep import errors, paths
from uccl_ep.accel import _entries

NAMES = sorted(path.stem for path in (Path(__file__).parents[2] / "csrc/device").glob("*.cu"))


def test_all_of_them_are_installed() -> None:
    assert NAMES
    assert sorted(path.stem for path in paths.kernels_dir().glob("*.cu")) == NAMES
    assert sorted(path.stem for path in (paths.library_dir() / "kernels").glob("*.so")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_cpu_needs_no_compiler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with uccl_ep.accel.open("cpu", cache=False) as cpu:
        module = cpu.own(name)
        kernels, _ = _entries.kernel_names((paths.kernels_dir() / f"{name}.cu").read_text())
        assert module.kernels == kernels
        assert kernels
        for kernel in kernels:
            assert module.kernel(kernel).attributes.max_threads > 0


@pytest.mark.required_in_ci
@pytest.mark.skipif(not find_spec("cuda"), reason="pip install 'uccl_ep[cuda]'")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", NAMES)
def test_nvrtc_compiles_it(name: str, architecture: str) -> None:
    folder = paths.kernels_dir()
    headers = {path.name: path.read_text() for path in folder.glob("*.h")}
    source = (folder / f"{name}.cu").read_text()
    image = uccl_ep.accel.compile_for("cuda", architecture, source, f"{name}.cu", headers=headers, cache=False)
    for kernel in _entries.kernel_names(source)[0]:
        assert kernel.encode() in image


def test_others_are_not() -> None:
    with (
        uccl_ep.accel.open("cpu", cache=False) as cpu,
        pytest.raises(errors.CommandError, match="no kernels named 'no'"),
    ):
        cpu.own("no")
