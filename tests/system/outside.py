# SPDX-License-Identifier: Apache-2.0
"""What somebody has who installed the package and is in another folder: the commands, the headers and a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "minimal_backend"
COMPILER = shutil.which(os.environ.get("CC", "cc"))
COMMAND = Path(sysconfig.get_path("scripts"), "uccl-ep")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


def run(folder: Path, *command: str | Path, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
    """In `folder`, with no variable that leads to the checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "UCCL_EP"))}
    return subprocess.run(
        [str(part) for part in command], cwd=folder, env=environment, text=True, capture_output=True, timeout=seconds
    )


def build(folder: Path, source: Path, name: str, *flags: str) -> Path:
    asked = run(folder, sys.executable, "-m", "uccl_ep", "--include-dir")
    assert asked.returncode == 0, asked.stderr
    headers = Path(asked.stdout.strip())
    assert (headers / "uccl_ep" / "backend.h").is_file()
    warnings = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror"]
    options = ["-O2", *warnings, "-shared", "-fPIC", f"-I{headers}", *flags]
    done = run(folder, COMPILER or "cc", *options, source, "-o", name)
    assert done.returncode == 0, done.stderr
    return folder / name
