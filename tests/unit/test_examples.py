# SPDX-License-Identifier: Apache-2.0
"""What the documentation shows works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def test_two_ranks(checkout: Path) -> None:
    done = subprocess.run(
        [sys.executable, checkout / "examples/two_ranks.py"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line[:6] for line in done.stdout.splitlines()) == ["rank 0", "rank 1"]


def test_a_kernel_puts(checkout: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, checkout / "examples/kernel_put.py"],
        env={**os.environ, "UCCL_EP_CACHE_DIR": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "4096 bytes, put and signalled by a kernel" in done.stdout


def test_kernels_in_the_spelling_of_nvshmem(checkout: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, checkout / "examples/nvshmem_exchange.py", "cpu", "3"],
        env={**os.environ, "UCCL_EP_CACHE_DIR": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank}: 3 rows and 3 x 16 tokens, as they were sent" for rank in range(3)
    ]


def test_the_kernel_of_the_documentation(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UCCL_EP_CACHE_DIR", str(tmp_path))
    (program,) = re.findall(r"```python\n(.*?)```", (checkout / "docs/accelerators.md").read_text(), re.DOTALL)
    exec(compile(program, "accelerators.md", "exec"), {})
    assert capsys.readouterr().out == "1998.0\n"
