# SPDX-License-Identifier: Apache-2.0
"""tools/setup.sh on a machine where it may not install anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = [
    "sh",
    "awk",
    "cat",
    "cut",
    "grep",
    "head",
    "tr",
    "test",
    "cc",
    "nm",
    "cmake",
    "c++",
    "dirname",
    "mkdir",
    "uname",
]


NOBODY = {"id": "echo 1000", "sudo": "exit 1", "apt-get": "echo must not be called >&2; exit 99"}
ROOT = {"id": "echo 0", "env": 'shift; exec "$@"', "apt-get": 'echo "apt-get $*"'}


def setup(
    goal: str, checkout: Path, folder: Path, *without: str, who: dict[str, str] = NOBODY
) -> subprocess.CompletedProcess[str]:
    """Run it as somebody, with only these programs on PATH."""
    programs = folder / "bin"
    programs.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        if found is not None and name not in without:
            (programs / name).symlink_to(found)
    for name, answer in who.items():
        (programs / name).write_text(f"#!/bin/sh\n{answer}\n")
        (programs / name).chmod(0o755)
    shutil.copytree(checkout / "tools", folder / "tools")
    return start(goal, folder, PATH=str(programs))


def start(goal: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    venv = str(Path(sys.executable).parents[1])
    return subprocess.run(
        ["sh", "tools/setup.sh", goal],
        env={**os.environ, "PYTHON": sys.executable, "VENV": venv, **environment},
        cwd=folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_without_root_it_names_the_lanes_that_are_left_out(checkout: Path, tmp_path: Path) -> None:
    done = setup("test", checkout, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "gcc-aarch64-linux-gnu: without it, the aarch64 lane is missing" in done.stdout
    assert "qemu-user" in done.stdout
    assert "must not be called" not in done.stderr


def test_as_root_it_says_what_it_installs_and_installs_that(checkout: Path, tmp_path: Path) -> None:
    done = setup("test", checkout, tmp_path, who=ROOT)
    assert done.returncode == 0, done.stderr
    said = next(line for line in done.stdout.splitlines() if line.startswith("setup: installing"))
    packages = said.split(": ")[-1].split()
    assert {"gcc-aarch64-linux-gnu", "qemu-user"} <= set(packages)
    assert f"apt-get -q install -y --no-install-recommends {' '.join(packages)}" in done.stdout


def test_to_run_nothing_of_that_is_needed(checkout: Path, tmp_path: Path) -> None:
    done = setup("run", checkout, tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_without_a_compiler_it_says_so(checkout: Path, tmp_path: Path) -> None:
    done = setup("run", checkout, tmp_path, "cc")
    assert done.returncode == 1
    assert "no C compiler" in done.stdout


@pytest.mark.parametrize("goal", ["run", "test"])
def test_it_is_silent_when_there_is_nothing_to_do(goal: str, checkout: Path) -> None:
    if goal == "test" and not shutil.which("qemu-aarch64"):
        pytest.skip("this machine has not everything")
    done = start(goal, checkout)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
