# SPDX-License-Identifier: Apache-2.0
"""The libraries export what their headers declare, and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from uccl_ep import paths

pytestmark = pytest.mark.required_in_ci


def exported(library: Path) -> set[str]:
    if not shutil.which("nm"):
        pytest.skip("nm is not installed (binutils)")
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    # "address kind name@@version"; A is the version's own name.
    return {line.split()[2].split("@")[0] for line in listed if line.split()[1] != "A"}


def declared() -> set[str]:
    text = (paths.include_dir() / "uccl_ep/uccl_ep.h").read_text()
    return set(re.findall(r"^UCCL_EP_API\b[^;(]*?(\w+)\(", text, re.M))


@pytest.mark.parametrize(
    "library", [paths.core_library(), paths.mutation_dir() / "libuccl_ep.so.0"], ids=["core", "mutation"]
)
def test_the_core_exports_its_header(library: Path) -> None:
    assert len(declared()) > 25
    assert exported(library) == declared()


@pytest.mark.parametrize(
    "library", sorted(paths.library_dir().glob("libuccl_ep_backend_*.so")), ids=lambda path: path.stem
)
def test_a_backend_exports_its_entry(library: Path) -> None:
    # sim has a second one, for programs that make the world its NICs live in.
    world = {"uccl_ep_sim_entry"} if library.stem == "libuccl_ep_backend_sim" else set()
    assert exported(library) == {"uccl_ep_backend_entry"} | world


@pytest.mark.parametrize("name", ["cuda", "hip", "emulation"])
def test_an_accelerator_exports_its_entry(name: str) -> None:
    assert exported(paths.library_dir() / f"libuccl_ep_{name}.so") == {"uccl_ep_accelerator_entry"}


def test_the_emulation_exports_its_header() -> None:
    text = (paths.include_dir() / "uccl_ep/emulation.h").read_text()
    names = set(re.findall(r"\b(uccl_ep_emulation_\w+)\(", text))
    assert len(names) > 8
    assert exported(paths.library_dir() / "libuccl_ep_emulation_device.so") == names


def test_backends_were_built() -> None:
    assert (paths.library_dir() / "libuccl_ep_backend_shm.so").is_file()


def test_another_core_can_take_its_place() -> None:
    """RUNPATH, since LD_LIBRARY_PATH comes after RPATH."""
    if not shutil.which("readelf"):
        pytest.skip("readelf is not installed (binutils)")
    from uccl_ep import _core

    dynamic = subprocess.run(["readelf", "-d", _core.__file__], capture_output=True, text=True, check=True).stdout
    assert "[$ORIGIN/lib]" in dynamic
    assert "(RUNPATH)" in dynamic
    assert "(RPATH)" not in dynamic
    assert "[libuccl_ep.so.0]" in dynamic
