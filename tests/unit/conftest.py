# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from uccl_ep.bootstrap import LocalGroup

PRELUDE = """
import os, signal, sys, threading, time
import numpy as np
import uccl_ep
from uccl_ep import Communicator, LocalBootstrap, errors
bootstrap = LocalBootstrap.inherited()
rank, size = bootstrap.rank, bootstrap.size
"""


@dataclass(frozen=True)
class Ended:
    code: int
    output: str
    seconds: float


RunRanks = Callable[..., list[Ended]]


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """Run a program as `size` ranks, each a process; none outlives the deadline."""

    def run(program: str, size: int, *, deadline: float = 60, expect: int | None = 0) -> list[Ended]:
        script = tmp_path / "rank.py"
        script.write_text(PRELUDE + program)
        outputs = [tmp_path / f"output.{rank}" for rank in range(size)]
        begin = time.monotonic()
        with LocalGroup(size) as group:
            processes = []
            for rank in range(size):
                with outputs[rank].open("w") as output:
                    processes.append(
                        group.popen(
                            rank, [sys.executable, str(script)], stdout=output, stderr=subprocess.STDOUT, cwd=tmp_path
                        )
                    )
            ended = []
            try:
                for process, output in zip(processes, outputs, strict=True):
                    process.wait(max(begin + deadline - time.monotonic(), 0.01))
                    ended.append(Ended(process.returncode, output.read_text(), time.monotonic() - begin))
            except subprocess.TimeoutExpired:
                pytest.fail("a rank hangs:\n" + "\n".join(output.read_text()[-2000:] for output in outputs))
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
        if expect is not None:
            for rank, one in enumerate(ended):
                assert one.code == expect, f"rank {rank} ended with {one.code}:\n{one.output}"
        return ended

    return run
