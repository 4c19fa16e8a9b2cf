# SPDX-License-Identifier: Apache-2.0
"""The suite posted from kernels of a real GPU: four ranks on one, heaps in host and in device memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).with_name("uccl-ep")
FOUND = """
import sys, uccl_ep.accel
uccl_ep.accel.open(sys.argv[1]).close()
"""


@pytest.fixture(scope="module")
def kind() -> str:
    reasons = []
    for one in ("cuda", "hip"):
        # In a process of its own: this one is not to hold a device.
        done = subprocess.run(
            [sys.executable, "-c", FOUND, one], capture_output=True, text=True, check=False, timeout=60
        )
        if done.returncode == 0:
            return one
        reasons.append(f"{one}: {done.stderr.strip().splitlines()[-1]}")
    pytest.skip("no GPU: " + "; ".join(reasons))


@pytest.mark.parametrize("heap", ["host", "device"])
def test_level_full(kind: str, heap: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = subprocess.run(
        [PROGRAM, "conformance", "--backend", "shm", "--lane", "gpu", "--accel", kind, "--heap", heap, "--ranks", "4",
         "--level", "full", "--json", str(path)],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    report = json.loads(path.read_text())
    assert report["summary"]["pass"] == len(report["cases"]) >= 150
    assert report["accelerator"]["heap"] == heap
