# SPDX-License-Identifier: Apache-2.0
"""`uccl-ep perf gpu` on a GPU: a short run of everything, with every check."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import uccl_ep.accel
from uccl_ep import errors
from uccl_ep.perf import gpu

PROGRAM = Path(sys.executable).with_name("uccl-ep")


@pytest.fixture(scope="module")
def kind() -> str:
    reasons = []
    for one in ("cuda", "hip"):
        try:
            with uccl_ep.accel.open(one):
                return one
        except (errors.UcclEpError, ImportError) as error:
            reasons.append(f"{one}: {error}")
    pytest.skip("no GPU: " + "; ".join(reasons))


def test_short_runs_of_everything(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    done = subprocess.run(
        [PROGRAM, "perf", "gpu", "--accel", kind, "--repeats", "1", "--seconds", "0.02", "--commands", "10000000",
         "--json", str(path)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())["gpu"]
    assert result["device"]["kind"] == kind
    assert len(result["rates"]) == 5 * len(gpu.FORMS)
    assert sum(row["commands"] for row in result["soak"]) >= 10_000_000
    for row in result["latency_ns"].values():
        assert 0 < row["min"] <= row["median"] <= row["p99"]
