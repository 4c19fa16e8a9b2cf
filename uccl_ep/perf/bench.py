# SPDX-License-Identifier: Apache-2.0
"""Runs uccl-ep-bench (csrc/perf/), alone or under callgrind."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ..paths import library_dir

TIMEOUT = 600.0


class BenchError(Exception):
    """The benchmark gave no figures; the text says why."""


def noop_backend() -> Path:
    """The NIC that does nothing. Not listed as a backend: it moves no bytes."""
    return library_dir() / "libuccl_ep_backend_noop.so"


def run(backend: Path, mode: str, *, prefix: tuple[str, ...] = (), **options: Any) -> list[dict[str, Any]]:
    """The objects that it prints."""
    program = library_dir() / "uccl-ep-bench"
    command = [*prefix, str(program), str(backend), mode, *(f"{key}={value}" for key, value in options.items())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise BenchError(f"{' '.join(command)} did not end within {TIMEOUT:g} s") from None
    except OSError as error:
        raise BenchError(f"{program}: {error.strerror}") from error
    if done.returncode:
        raise BenchError(done.stderr.strip() or f"{program.name} ended with {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def missing_valgrind() -> str:
    """Empty, or why instructions cannot be counted."""
    if shutil.which("valgrind") is None:
        return "valgrind is not installed (Debian: apt install valgrind): instructions are not counted"
    return ""


def count_instructions(backend: Path, mode: str, **options: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """What it printed, and the instructions inside uccl_ep_progress by library."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        prefix = (
            "valgrind",
            "--quiet",
            "--tool=callgrind",
            "--toggle-collect=uccl_ep_progress",
            f"--callgrind-out-file={out}",
        )
        (printed,) = run(backend, mode, prefix=prefix, **options)
        return printed, by_library(out.read_text())


def by_library(callgrind_out: str) -> dict[str, int]:
    """Self cost by object file. The format: valgrind's manual, "Callgrind Format Specification"."""
    names: dict[str, str] = {}
    costs: dict[str, int] = {}
    library = "?"
    inclusive = False
    for line in callgrind_out.splitlines():
        if line.startswith(("ob=", "cob=")):
            match = re.fullmatch(r"c?ob=(\(\d+\))(?: (.*))?", line)
            if match is None:
                raise BenchError(f"callgrind wrote a line that is not understood: {line!r}")
            if match[2] is not None:
                names[match[1]] = Path(match[2]).name
            if line.startswith("ob="):
                library = names[match[1]]
        elif line.startswith("calls="):
            inclusive = True  # of the next line: what was called counts where it is
        elif line[:1] in "0123456789+-*" and line:
            if not inclusive:
                costs[library] = costs.get(library, 0) + int(line.split()[1])
            inclusive = False
    total = re.search(r"^(?:totals|summary): (\d+)", callgrind_out, re.MULTILINE)
    if total is None or sum(costs.values()) != int(total[1]):
        raise BenchError(f"callgrind counts {total and total[1]} instructions, and its lines {sum(costs.values())}")
    return costs
