# SPDX-License-Identifier: Apache-2.0
"""The suite on the backends over libibverbs: ranks are processes, NICs are software with the limits of each vendor's.

What a real kernel adds is the lane softroce's. Here limits are kept that it does not have: bytes in flight, lists of
requests, no shared receive queue, no atomics; and a queue that overruns, or a receive that is missing, is an error.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Conformance


# Thor's strategies are ConnectX's: what its limits could change.
MOVES = [part for glob in ("pub", "put", "sig", "prg", "lim", "thr") for part in ("--case", f"{glob}*")]


@pytest.mark.required_in_ci
@pytest.mark.parametrize(
    ("backend", "device", "strategy", "cases"),
    [
        ("connectx", "mlx5_0", "ordered_atomic", []),
        ("thor", "bnxt_re0,max_post=64,inflight=1572864", "ordered_atomic", MOVES),
        ("pollara", "ionic_0,inflight=2097152", "sequenced_immediate", []),
    ],
)
def test_the_suite(
    backend: str, device: str, strategy: str, cases: list[str], conformance: Conformance, fake_libibverbs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Level core; all cases of these and of efa, at level full, are a night's (tools/nightly.sh)."""
    monkeypatch.setenv("UCCL_EP_LIBIBVERBS", str(fake_libibverbs))
    monkeypatch.setenv("FAKE_IBVERBS", device)
    monkeypatch.setenv("FAKE_IBVERBS_WIRE", f"{backend}-{os.getpid()}")
    status, report, said = conformance("--backend", backend, "--ranks", "2", "--level", "core", *cases)
    assert status == 0, said[-6000:]
    assert report["strategy"] == strategy
    assert report["summary"]["pass"] > 120
