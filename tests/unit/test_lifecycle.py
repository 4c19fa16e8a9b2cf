# SPDX-License-Identifier: Apache-2.0
"""Ends, orderly and not: fork, exit without close, close under load, signals (K7, K9, K11)."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from uccl_ep import Communicator, SingleProcess, errors

MAKE = "comm = Communicator(SingleProcess(), heap_bytes=1 << 16)\n"
IMPORTS = "import os, signal, sys, threading, time\nfrom uccl_ep import Communicator, SingleProcess, errors\n"


def program(code: str, folder: Path, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    # Python 3.12 warns of every fork beside threads, the proxy's too. What happens then is what is tested here.
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", IMPORTS + code],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=folder,
    )


def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    done = program(
        MAKE
        + """
for _ in range(50):
    comm.channel(0).signal(0, 0)
child = os.fork()
if not child:
    refused = 0
    channel = comm.channel(0)
    for call in (comm.quiet, comm.abort, lambda: channel.signal(0, 0), lambda: comm.read_signal(0), lambda: comm.lost):
        try:
            call()
        except errors.ForkedError:
            refused += 1
    comm.close()
    del comm
    # A communicator of its own is what a child may have.
    with Communicator(SingleProcess(), heap_bytes=4096) as own:
        own.channel(0).signal(0, 0).wait()
    sys.exit(refused)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 5, status
for _ in range(1000):
    comm.channel(0).signal(0, 0)
comm.quiet()
assert comm.read_signal(0) == 1050
""",
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_pools_and_subprocesses_beside_it(tmp_path: Path) -> None:
    done = program(
        MAKE
        + """
import multiprocessing, subprocess
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(abs, range(-20, 0)) == list(range(20, 0, -1))
assert subprocess.run(["true"]).returncode == 0
comm.channel(0).signal(0, 0).wait()
""",
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "sys.exit(0)",
        "keep = comm.heap; del comm",
        "ticket = comm.channel(0).signal(0, 0); del comm",
        "import atexit; atexit.register(lambda: comm.quiet())",
        "threading.Thread(target=lambda: wait(comm), daemon=True).start(); time.sleep(0.2)",
        "[threading.Thread(target=post, args=(comm,), daemon=True).start() for _ in range(3)]; time.sleep(0.2)",
        "more = [Communicator(SingleProcess(), heap_bytes=4096) for _ in range(3)]",
    ],
)
def test_the_interpreter_ends_without_close(ending: str, tmp_path: Path) -> None:
    """K7: within seconds, with code 0 and nothing on stderr."""
    begin = time.monotonic()
    done = program(
        """
def wait(comm):
    try:
        comm.wait_signal(0, 1, timeout=600)
    except errors.UcclEpError:
        pass
def post(comm):
    try:
        while True:
            comm.channel(0).signal(0, 0)
    except errors.UcclEpError:
        pass
"""
        + MAKE
        + ending,
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - begin < 10


def test_close_under_load() -> None:
    """K11: posters get a typed end; the process lives."""
    for _ in range(30):
        comm = Communicator(SingleProcess(), heap_bytes=1 << 16, channels=2, ring_log2=4)
        started, ends = threading.Barrier(9), []

        def post(
            index: int, comm: Communicator = comm, started: threading.Barrier = started, ends: list[str] = ends
        ) -> None:
            channel = comm.channel(index % 2)
            started.wait()
            try:
                while True:
                    channel.put_signal(0, 0, 4096, 16, 0)
            except (errors.Aborted, errors.ChannelClosed) as error:
                ends.append(error.name)

        threads = [threading.Thread(target=post, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        started.wait()
        comm.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert len(ends) == 8


def test_a_reset_waits_for_calls_to_end() -> None:
    with Communicator(SingleProcess(), heap_bytes=4096, bootstrap_timeout=0.3) as comm:
        ends: list[str] = []

        def wait() -> None:
            try:
                comm.wait_signal(0, 1)
            except errors.UcclEpError as error:
                ends.append(error.name)

        waiter = threading.Thread(target=wait)
        waiter.start()
        while not comm._handle._inside:
            time.sleep(0.001)
        with pytest.raises(errors.DeadlineExceeded, match="other calls"):
            comm.reset()
        comm.abort()
        waiter.join(20)
        assert ends == ["E_ABORTED"]


def test_reset_gives_signals_a_new_start() -> None:
    with Communicator(SingleProcess(), heap_bytes=4096) as comm:
        comm.channel(0).signal(0, 0).wait()
        comm.reset()
        assert comm.read_signal(0) == 0
        comm.channel(0).signal(0, 0).wait()
        assert comm.read_signal(0) == 1


def test_an_interrupt_reaches_a_waiting_main_thread(tmp_path: Path) -> None:
    done = program(
        MAKE
        + """
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
begin = time.monotonic()
try:
    comm.wait_signal(0, 1, timeout=600)
except KeyboardInterrupt:
    assert time.monotonic() - begin < 20
    sys.exit(7)
""",
        tmp_path,
    )
    assert done.returncode == 7, done.stderr


def test_nothing_remains_of_a_failed_start(tmp_path: Path) -> None:
    """K19 in small: descriptors and threads are as before."""
    done = program(
        """
def look():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
Communicator(SingleProcess(), heap_bytes=4096).close()
before = look()
for options in ({"device": "nonsense"}, {"heap_bytes": 1 << 50}, {"cpus": "9999"}, {"backend_options": "x=1"}) * 5:
    try:
        Communicator(SingleProcess(), **{"heap_bytes": 4096, **options})
        raise SystemExit(f"{options} worked")
    except errors.UcclEpError:
        pass
assert look() == before, (before, look())
""",
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
