# SPDX-License-Identifier: Apache-2.0
"""The demo posted from kernels of a real GPU, which four ranks share."""

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


@pytest.mark.parametrize("heap", ["host", "device"])
@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_results_are_exact(kind: str, heap: str, tmp_path: Path) -> None:
    # In a process of its own: this one is not to hold a device.
    found = subprocess.run([sys.executable, "-c", FOUND, kind], capture_output=True, text=True, check=False, timeout=60)
    if found.returncode:
        pytest.skip(found.stderr.strip().splitlines()[-1])
    path = tmp_path / "demo.json"
    done = subprocess.run(
        [PROGRAM, "demo", "--accel", kind, "--heap", heap, "--channels", "2", "--routing", "zipf", "--json", str(path)],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(path.read_text())["results"] == "exact"
