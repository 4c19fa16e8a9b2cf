# SPDX-License-Identifier: Apache-2.0
"""The suite notices every mutant: one seed here, more by `uccl-ep mutants`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from uccl_ep.lab import Missing, root

SEED = 1


@pytest.mark.required_in_ci
def test_every_mutant_is_killed(tmp_path: Path) -> None:
    with contextlib.suppress(Missing):  # told by what is left out
        root.setup()
    report = tmp_path / "mutants.json"
    command = [sys.executable, "-m", "uccl_ep", "mutants", "--seeds", "1", "--seed", str(SEED), "--json", str(report)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    assert report.is_file(), done.stdout + done.stderr
    found = json.loads(report.read_text())
    alive = [f"{m['name']} ({m['clause']}): {m['why_not']}" for m in found["mutants"] if not m["killed"]]
    assert not alive, "\n".join(alive)
    assert (found["schema"], found["score"], done.returncode) == ("uccl_ep.mutants/1", 1.0, 0), (
        done.stdout + done.stderr
    )
    if found["left_out"]:
        pytest.skip(str(found["left_out"]))
