# SPDX-License-Identifier: Apache-2.0
"""Programs of others on the lab's NICs, unmodified: what they see. What two do with each other: lab_pairs.py."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from uccl_ep import paths
from uccl_ep.lab import Lab, Missing, nics, root

pytestmark = [
    pytest.mark.required_in_ci,
    pytest.mark.skipif(
        not (paths.library_dir() / "libuccl_ep_lab.so").is_file(), reason="built without the kernel's headers"
    ),
]
SECONDS = 240.0  # for what takes a few: all of this shares two cores with other tests
_numbers = itertools.count()


@pytest.fixture(scope="module")
def libraries() -> root.Libraries:
    """New enough for all: the machine's, or fetched, which takes half a minute, once."""
    try:
        return root.setup()
    except Missing as missing:
        pytest.skip(str(missing))


def lab_of(nic: str, which: str = "auto", **options: int | str) -> Lab:
    """One that nobody else is in."""
    try:
        return Lab.of(nic, libraries=which, fabric=f"test-{os.getpid()}-{next(_numbers)}", **options)  # type: ignore[arg-type]
    except Missing as missing:
        pytest.skip(str(missing))


def run(lab: Lab, program: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    if lab.libraries.root is None and shutil.which(program) is None:
        pytest.skip(f"no {program} on this machine")
    command, told = lab.command(program, list(words)), lab.environment() | environment
    return subprocess.run(command, env=told, capture_output=True, text=True, timeout=SECONDS, check=False)


# ------------------------------------------------------------------------------------------------------- what they see


def built_in() -> list[str]:
    try:
        return list(dict.fromkeys(variant.nic for variant in nics.variants()))
    except Missing:
        return []


@pytest.mark.parametrize(
    ("nic", "which"), [*((nic, "root") for nic in built_in()), ("connectx", "machine"), ("thor", "machine")]
)
def test_a_library_sees_its_nics(libraries: root.Libraries, nic: str, which: str) -> None:
    lab = lab_of(nic, "auto" if which == "root" else which, count=2)
    done = run(lab, "ibv_devinfo", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    said = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert [line for line in said if line.startswith("hca_id")] == [f"hca_id: {found.name}" for found in lab.nics]
    assert said.count("state: PORT_ACTIVE (4)") == 2
    for found in lab.nics:
        assert f"vendor_id: {found.vendor:#06x}" in said
        assert f"vendor_part_id: {found.part}" in said
        assert f"fw_ver: {found.firmware}" in said
    assert sum(line.startswith("GID[") for line in said) == sum(len(found.gids) for found in lab.nics)


def test_libfabric_sees_them(libraries: root.Libraries) -> None:
    lab = lab_of("efa", count=2)
    done = run(lab, "fi_info", "-p", "efa")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("efa_0-rdm", "efa_1-rdm", "efa_0-dgrm"):
        assert f"domain: {name}" in done.stdout


def test_without_the_lab_nothing_of_it_is_there(libraries: root.Libraries) -> None:
    lab = lab_of("connectx")
    told = {name: value for name, value in lab.environment().items() if name != "UCCL_EP_LAB"}
    command = lab.command("ibv_devices", [])
    done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert "mlx5_0" not in done.stdout


def test_a_programs_exit_status_is_the_labs(libraries: root.Libraries, tmp_path: Path) -> None:
    lab = lab_of("connectx")
    script = tmp_path / "script"
    script.write_text('#!/bin/sh\necho "$1"; exit 7\n')
    script.chmod(0o755)
    done = run(lab, str(script), "told")
    assert (done.returncode, done.stdout) == (7, "told\n")
