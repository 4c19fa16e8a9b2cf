# SPDX-License-Identifier: Apache-2.0
"""Endings in every order, forks, and local ranks however they are numbered."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from uccl_ep import SingleProcess
from uccl_ep.bootstrap import LocalGroup
from uccl_ep.errors import Aborted, ChannelClosed, ForkedError, PeerLost

from .ranks import Footprint, Member, Ranks, belongings, facts_of, still_there
from .test_kill import some_rounds
from .traffic import Exchange, make

# -------------------------------------------------------------------------------------------- leaving while others work


def leaves(member: Member, turn: int) -> None:
    """Rank 0 destroys and exits; rank 1 is putting, in quiet, or in destroy itself."""
    comm = make(member.bootstrap, signals=8)
    if member.rank == 0:
        comm.wait_signal(0, 1 + turn % 3, source=1)
        if turn % 2:
            comm.close()
        os._exit(0)
    channel = comm.channel(0)
    try:
        for _ in range(400):
            channel.put_signal(0, 0, 1 << 16, 1 << 16, slot=0)
            if turn % 4 > 1:
                comm.quiet(timeout=10)
        comm.quiet(timeout=10)
    except PeerLost as error:
        member.say("lost", **facts_of(error))
    comm.close()


def test_a_peer_destroys_while_the_other_is_in_quiet() -> None:
    """K5: no signal kills the one that stays; it returns or raises."""
    lost = 0
    for turn in range(200):
        with Ranks(2, leaves, turn) as ranks:
            children = ranks.join_well(seconds=30)
            for one in children[1].all("lost"):
                assert one["name"] == "E_PEER_LOST", one
                assert one["peer"] == 0
                lost += 1
    print(f"\nrank 1 was told of the loss in {lost} of 200 rounds")
    assert lost


def test_waiting_for_a_peer_that_closed_ends_at_once() -> None:
    """It left in good order, but what it was to send will never come: no reason to sit out the deadline."""

    def program(member: Member) -> None:
        comm = make(member.bootstrap, timeout=60.0)
        if member.rank == 0:
            comm.channel(0).signal(1, 0).wait()
            comm.close()
            return
        # What it had sent is there, before and after it is known to have left.
        assert comm.wait_signal(0, 1, source=0) == 1
        for source in (0, None):
            begin = time.monotonic()
            with pytest.raises(PeerLost, match=r"rank 0 (closed its communicator|was lost)") as lost:
                comm.wait_signal(0, 2, source=source)
            assert time.monotonic() - begin < 20
            assert lost.value.record.peer == 0
        assert comm.wait_signal(0, 1) == 1
        assert comm.lost == {0}
        comm.exclude(0)
        comm.channel(0).put(1, 0, 0, 16).wait()
        with pytest.raises(PeerLost):
            comm.channel(0).put(0, 0, 0, 16)
        comm.close()

    with Ranks(2, program) as ranks:
        ranks.join_well(seconds=50)


def test_destroy_while_threads_post() -> None:
    """K11: posters are told, nothing crashes, whatever they are in."""

    def program(member: Member) -> None:
        before = Footprint()
        told: set[str] = set()
        for turn in range(60):
            comm = make(SingleProcess(), channels=4, proxies=1 + turn % 2, ring_log2=3 + turn % 5, signals=8)
            started = threading.Barrier(9)

            def post(index: int, comm: Any = comm, started: Any = started) -> None:
                channel = comm.channel(index % 4)
                started.wait()
                try:
                    while True:
                        channel.put_signal(0, 64 * index, 4096 + 64 * index, 64, slot=index)
                        if index % 3 == 1:
                            comm.quiet()
                        if index % 3 == 2:
                            comm.wait_signal(index, comm.read_signal(index) + 1)
                except (ChannelClosed, Aborted) as error:
                    told.add(type(error).__name__)

            threads = [threading.Thread(target=post, args=(index,)) for index in range(8)]
            for thread in threads:
                thread.start()
            started.wait()
            # Not at a set time, but at a set amount of work: some rings are full, others empty.
            while comm.channel(0).stats()["taken"] < 40 * (turn % 7):
                pass
            comm.close()
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()
        member.say("told", kinds=sorted(told))
        assert not before.leaks(), before.leaks()

    with Ranks(1, program, seconds=100) as ranks:
        children = ranks.join_well(seconds=100)
        seen = children[0].saw("told")
        assert seen
        assert seen["kinds"] in (["Aborted", "ChannelClosed"], ["ChannelClosed"]), seen


# ------------------------------------------------------------------------------------------------- the end of a process

ENDINGS = {
    "off the end": "",
    "sys.exit": "sys.exit(0)",
    "a reference in a cycle": "cycle = [comm]; cycle.append(cycle); del comm",
    "a thread that waits": (
        "import threading; threading.Thread(target=lambda: waits(comm), daemon=True).start(); started.wait()"
    ),
    "bootstrap first": "bootstrap.close(); comm.close()",
    "bootstrap first, communicator never": "bootstrap.close()",
    "closed twice": "comm.close(); comm.close()",
    "heap view outlives": "view = comm.heap; comm.close(); del comm",
}
SCRIPT = """
import sys, threading
from uccl_ep import Communicator, LocalBootstrap, errors
bootstrap = LocalBootstrap.inherited()
comm = Communicator(bootstrap, heap_bytes=1 << 16, timeout=60)
started = threading.Event()
def waits(comm):
    started.set()
    try:
        comm.wait_signal(5, 1)
    except (errors.Aborted, errors.ChannelClosed, errors.PeerLost):
        pass
other = 1 - comm.rank
comm.channel(0).put_signal(other, 0, 4096, 64, slot=0)
comm.wait_signal(0, 1)
comm.quiet()
comm.barrier()
{ending}
"""


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_however_it_leaves(ending: str) -> None:
    """K7: exit code 0 in less than 10 s, and not a word."""
    script = SCRIPT.format(ending=ENDINGS[ending])
    with LocalGroup(2) as group:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": "/"}
        processes = [group.popen(rank, [sys.executable, "-c", script], **pipes) for rank in range(2)]
        for process in processes:
            said, _ = process.communicate(timeout=10 + 20)
            assert process.returncode == 0, said.decode()
            assert not said, said.decode()


# ---------------------------------------------------------------------------------------------------------------- forks


def square(x: int) -> int:
    return int(np.square(np.int64(x)))


def forks(member: Member) -> None:
    comm = make(member.bootstrap)
    exchange = Exchange(member, comm)
    exchange.round()
    heap = comm.heap
    heap[-16:] = 42

    # A child of its own: every call raises, the heap can be read, and its end disturbs nobody.
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        verdict = "?"
        try:
            raised = []
            for call in (
                lambda: comm.channel(0).put(0, 0, 0, 16),
                lambda: comm.quiet(),
                lambda: comm.wait_signal(0, 99, timeout=0.1),
                lambda: comm.read_signal(0),
                lambda: comm.abort(),
                lambda: comm.stats(),
            ):
                try:
                    call()
                    raised.append("nothing")
                except ForkedError as error:
                    raised.append(error.name)
            verdict = f"{raised == ['E_FORKED'] * 6} {(heap[-16:] == 42).all()}"
            comm.close()
        finally:
            os.write(write, verdict.encode())
            os._exit(0)
    os.close(write)
    assert os.read(read, 100) == b"True True"
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0
    exchange.round()

    # What data loaders do: a pool of forked workers, and programs.
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert pool.map(square, range(100)) == [x * x for x in range(100)]
        exchange.round()
    assert subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True).stdout == b"42\n"
    channel = comm.channel(0)
    for number in range(1000):
        heap[:16] = number % 251
        channel.put((member.rank + 1) % comm.size, 0, heap.size // 16 * 16 - 16, 16).wait()
    comm.barrier()
    assert (heap[heap.size // 16 * 16 - 16 :][:16] == 999 % 251).all()
    comm.barrier()
    exchange.round()
    comm.quiet()
    comm.barrier()
    comm.close()


def test_fork_after_init() -> None:
    """K9."""
    with Ranks(3, forks) as ranks:
        ranks.join_well()


def test_a_forked_child_does_not_hide_the_death_of_its_parent() -> None:
    """It holds copies of all descriptors of the dead, and lives on."""

    def program(member: Member) -> None:
        comm = make(member.bootstrap)
        exchange = Exchange(member, comm, victim=1)
        exchange.round()
        if member.rank == 1:
            orphan = os.fork()
            if orphan == 0:
                while True:
                    signal.pause()
            member.say("forked", pid=orphan)
            os.kill(os.getpid(), signal.SIGKILL)
        exchange.run_until_lost()
        comm.close()

    with Ranks(3, program) as ranks:
        orphan = ranks.wait_for(1, "forked")["pid"]
        try:
            for rank in (0, 2):
                ranks.wait_for(rank, "lost")
            os.kill(orphan, 0)  # it did live
        finally:
            os.kill(orphan, signal.SIGKILL)
        ranks.join_well(1)


# ----------------------------------------------------------------------------------------------------- numbering, again


@pytest.mark.parametrize("value", [None, "0", "7"])
def test_local_ranks_are_not_guessed(value: str | None) -> None:
    """F1: eight processes of one machine, LOCAL_RANK absent, or the same in all of them."""

    def numbered(rank: int) -> None:
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        if value is not None:
            os.environ["LOCAL_RANK"] = value

    with Ranks(8, some_rounds, environment=numbered) as ranks:
        ranks.join_well()
        assert len(ranks.belongings()) == 8


def test_start_and_stop_back_to_back() -> None:
    """F9: nothing of the last run is in the way of the next; here in the same processes, 25 times."""

    def program(member: Member) -> None:
        before = Footprint()
        names: set[str] = set()
        for _ in range(25):
            comm = make(member.bootstrap)
            assert not names & set(belongings())
            names |= set(belongings())
            Exchange(member, comm).round()
            comm.quiet()
            comm.barrier()
            comm.close()
        assert not still_there(names)
        assert not before.leaks(), before.leaks()

    with Ranks(3, program) as ranks:
        ranks.join_well()
