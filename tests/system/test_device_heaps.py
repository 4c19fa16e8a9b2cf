# SPDX-License-Identifier: Apache-2.0
"""Heaps in device memory on the shm backend, through the whole library: ranks in processes and in one process, the
copies late and in pieces, on each way that signals take."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from uccl_ep.bootstrap import LocalGroup

from . import device_heaps

PROGRAM = Path(device_heaps.__file__)
WAYS = [("auto", ""), ("sender_hold", "promise=unordered"), ("sender_hold_mailbox", "")]


@pytest.mark.parametrize("lateness", ["lazy=0", "lazy=3,seed=11"])
@pytest.mark.parametrize(("strategy", "options"), WAYS)
@pytest.mark.parametrize(("ranks", "hosts"), [(2, ""), (4, ""), (4, "1,2")])
def test_processes(ranks: int, hosts: str, strategy: str, options: str, lateness: str) -> None:
    with LocalGroup(ranks) as group:
        running = [
            group.popen(
                rank,
                [sys.executable, str(PROGRAM), strategy, options, hosts],
                env={**os.environ, "UCCL_EP_EMULATION": lateness},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        said = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0] * ranks, "\n".join(said)
    assert all("strategy " + ("ordered_atomic" if strategy == "auto" else strategy) in one for one in said)


class Together:
    """A bootstrap of threads."""

    def __init__(self, rank: int, size: int, parts: list[bytes], turn: threading.Barrier) -> None:
        self.rank, self.size, self._parts, self._turn = rank, size, parts, turn

    def allgather(self, mine: bytes, timeout: float) -> list[bytes]:
        self._parts[self.rank] = mine
        self._turn.wait(timeout)
        everything = list(self._parts)
        self._turn.wait(timeout)
        return everything

    def barrier(self, timeout: float) -> None:
        self._turn.wait(timeout)


@pytest.mark.parametrize(("strategy", "options"), WAYS)
def test_ranks_of_one_process(strategy: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCCL_EP_EMULATION", "lazy=5")
    ranks = 4
    parts, turn = [b""] * ranks, threading.Barrier(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        running = [
            pool.submit(device_heaps.run, Together(rank, ranks, parts, turn), strategy, options)
            for rank in range(ranks)
        ]
        ways = {one.result(120) for one in running}
    assert len(ways) == 1
