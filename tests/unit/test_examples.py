# SPDX-License-Identifier: Apache-2.0
"""What the documentation shows works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_two_ranks(checkout: Path) -> None:
    done = subprocess.run(
        [sys.executable, checkout / "examples/two_ranks.py"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line[:6] for line in done.stdout.splitlines()) == ["rank 0", "rank 1"]
