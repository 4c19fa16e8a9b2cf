# SPDX-License-Identifier: Apache-2.0
"""Format, lint and types of everything that is written by hand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def tracked(*patterns: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=CHECKOUT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.splitlines() if (CHECKOUT / name).is_file()]


def tool(name: str, *arguments: str) -> None:
    program = BIN / name
    if not program.exists():
        pytest.skip(f"{name} is not in {BIN}: pip install '.[test]'")
    done = subprocess.run([program, *arguments], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{name} {' '.join(arguments)[:200]}:\n{done.stdout[-8000:]}{done.stderr[-8000:]}", pytrace=False)


@pytest.mark.required_in_ci
def test_ruff() -> None:
    tool("ruff", "check", ".")


@pytest.mark.required_in_ci
def test_ruff_format() -> None:
    tool("ruff", "format", "--check", ".")


@pytest.mark.required_in_ci
def test_mypy() -> None:
    tool("mypy")


@pytest.mark.required_in_ci
def test_clang_format() -> None:
    tool("clang-format", "--dry-run", "--Werror", *tracked("*.c", "*.h", "*.cpp", "*.cu"))


@pytest.mark.required_in_ci
def test_every_source_names_its_licence() -> None:
    sources = tracked(
        "*.c", "*.h", "*.cpp", "*.cu", "*.py", "*.pyi", "*.sh", "*.cmake", "*.map", "CMakeLists.txt", "Makefile"
    )
    assert sources
    without = [name for name in sources if "SPDX-License-Identifier: Apache-2.0" not in head(name)]
    assert not without


@pytest.mark.required_in_ci
def test_files_stay_short() -> None:
    """One idea a file: under 900 lines."""
    long = {name: count for name in tracked("*.c", "*.h", "*.cpp", "*.cu", "*.py") if (count := lines(name)) >= 900}
    assert not long


@pytest.mark.required_in_ci
def test_vendors_stay_out_of_the_core() -> None:
    """Which NIC it is is known at run time: the core and the headers have no #if for a vendor."""
    vendor = re.compile(r"^\s*#\s*(if|elif|ifdef|ifndef)\b.*(mlx|efa|bnxt|ionic|cxi|connectx|verbs)", re.I | re.M)
    guilty = [
        name for name in tracked("csrc/core/*", "include/uccl_ep/*") if vendor.search((CHECKOUT / name).read_text())
    ]
    assert not guilty


@pytest.mark.required_in_ci
def test_what_verbs_vendors_share_is_shared() -> None:
    """Their folders together are smaller than what is common, and none has an #if for a vendor."""
    shared = sum(map(lines, tracked("csrc/backends/verbs/*.[ch]")))
    own = tracked("csrc/backends/connectx/*.[ch]", "csrc/backends/thor/*.[ch]", "csrc/backends/pollara/*.[ch]")
    assert len(own) >= 3
    assert sum(map(lines, own)) < shared
    condition = re.compile(r"^\s*#\s*(if|elif|ifdef|ifndef)\b(?!.*(_H|_GNU_SOURCE|UCCL_EP_FAULT_POINTS)\b)", re.M)
    guilty = [
        name for name in [*own, *tracked("csrc/backends/verbs/*")] if condition.search((CHECKOUT / name).read_text())
    ]
    assert not guilty


def head(name: str) -> str:
    return "\n".join((CHECKOUT / name).read_text().splitlines()[:3])


def lines(name: str) -> int:
    return len((CHECKOUT / name).read_text().splitlines())
