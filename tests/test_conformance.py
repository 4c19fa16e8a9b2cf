# SPDX-License-Identifier: Apache-2.0
"""The suite on the embedded backend: nothing fails, nothing is left out, and it takes no longer than it may."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Conformance

SUITE = [str(Path(sys.executable).parent / "uccl-ep"), "conformance", "--backend", "shm"]
SECONDS = 300.0  # for level full with 4 ranks on 2 cores


@pytest.mark.required_in_ci
def test_level_full(conformance: Conformance, tmp_path: Path) -> None:
    page = tmp_path / "scorecard.html"
    arguments = ("--backend", "shm", "--ranks", "4", "--level", "full", "--html", str(page))
    status, report, said = conformance(*arguments, timeout=2 * SECONDS)
    assert status == 0, said[-6000:]
    counts = report["summary"]
    assert counts["pass"] == len(report["cases"]) >= 45, said[-6000:]
    # Real processes on memory: all runs but what asks a NIC to fail, as virtual NICs do, and what kernels do.
    from uccl_ep.conformance import registry

    others = {case.id for case in registry.load() if case.needs & {"faults", "device"}}
    assert {name.partition("@")[0] for name in report["not_in_lane"]} == others
    assert report["verdict"] == "conforms at level full"
    assert report["seconds"] <= SECONDS, f"{report['seconds']} s, seed {report['seed']}"
    assert report["verdict"] in page.read_text()
    # What the cases did is also what the contract allows as a whole; most of it is small enough to be judged.
    told = report["histories"]
    assert told["remarks"] == [], told
    assert told["judged"] > 5 * sum(told["not_judged"].values()), told
    assert told["words"] > 1_000_000
    assert told["signals"] > 5_000
    assert f"{told['judged']} histories judged" in said
    assert f"{told['judged']:,} histories" in page.read_text()


@pytest.mark.required_in_ci
def test_two_ranks_and_the_other_strategy(conformance: Conformance) -> None:
    arguments = ("--backend", "shm", "--ranks", "2", "--strategy", "sender_hold")
    status, report, said = conformance(*arguments, timeout=SECONDS)
    assert status == 0, said[-6000:]
    assert report["strategy"] == "sender_hold"
    assert not any("@" in case["id"] for case in report["cases"]), "there is no weaker promise to run them against"


def _descendants(pid: int) -> list[int]:
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            children += [int(child) for child in task.read_text().split()]
    return children + [d for child in children for d in _descendants(child)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_outlives_the_runner(tmp_path: Path, how: signal.Signals) -> None:
    """However the command ends, its ranks end too, the stopped ones among them."""
    process = subprocess.Popen(
        [*SUITE, "--case", "*stopped*", "--case", "sig1.*", "--level", "full"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while len(ranks := _descendants(process.pid)) < 2:
            assert process.poll() is None, "it ended before there were ranks"
            assert time.monotonic() < end
            time.sleep(0.002)
        process.send_signal(how)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in said
    while alive := [pid for pid in ranks if _alive(pid)]:
        assert time.monotonic() < end, f"still there: {alive}"
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_progress_on_a_terminal(tmp_path: Path) -> None:
    """One line that moves; what failed and the verdict stay."""
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.environ.update(TERM="xterm", COLUMNS="100")
        os.execv(SUITE[0], [*SUITE, "--case", "sig6.*", "--seed", "1"])
    text = b""
    while True:
        try:
            chunk = os.read(terminal, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        text += chunk
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    said = text.decode()
    assert os.waitstatus_to_exitcode(status) == 0, said
    assert "/3  " in said
    assert "no verdict: only some cases were run" in said
    assert "seed 1" in said
