# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import multiprocessing
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from uccl_ep import _local_group
from uccl_ep.bootstrap import Bootstrap, LocalBootstrap, LocalGroup, SingleProcess, TorchStoreBootstrap
from uccl_ep.errors import BootstrapError, DeadlineExceeded

if TYPE_CHECKING:
    from conftest import RunRanks


def in_threads(bootstraps: list[Any], function: Any) -> list[Any]:
    """function(bootstrap) of all ranks at once: results, or what they raised."""

    def caught(bootstrap: Any) -> Any:
        try:
            return function(bootstrap)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(bootstraps)) as pool:
        return list(pool.map(caught, bootstraps))


def test_single_process() -> None:
    alone = SingleProcess()
    assert isinstance(alone, Bootstrap)
    assert alone.allgather(b"x", 1) == [b"x"]
    alone.barrier(1)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_local_allgather(size: int) -> None:
    with LocalGroup(size) as group:
        ends = [group.endpoint(rank) for rank in range(size)]
        assert all(isinstance(end, Bootstrap) for end in ends)
        for length in (0, 1, 100_000, 3_000_000):
            wanted = [bytes([rank]) * (length * (rank + 1) // size) for rank in range(size)]
            for got in in_threads(ends, lambda end, parts=wanted: end.allgather(parts[end.rank], 30)):
                assert got == wanted
        assert in_threads(ends, lambda end: end.barrier(10)) == [None] * size


def test_a_missing_rank_is_named_at_the_deadline_and_the_next_collective_works() -> None:
    with LocalGroup(3) as group:
        ends: list[LocalBootstrap] = [group.endpoint(rank) for rank in range(3)]
        in_threads(ends, lambda end: end.barrier(10))
        begin = time.monotonic()
        for error in in_threads(ends[:2], lambda end: end.allgather(b"", 0.2)):
            assert isinstance(error, DeadlineExceeded)
            assert "[2]" in str(error)
            assert error.record.peer == 2
        assert 0.2 <= time.monotonic() - begin < 5
        with pytest.raises(DeadlineExceeded):  # the late rank is told
            ends[2].allgather(b"", 10)
        assert in_threads(ends, lambda end: end.allgather(b"", 10)) == [[b""] * 3] * 3


def test_a_rank_that_leaves_fails_the_others_at_once() -> None:
    with LocalGroup(3) as group:
        ends = [group.endpoint(rank) for rank in range(3)]
        in_threads(ends, lambda end: end.barrier(10))
        ends[1].close()
        for error in in_threads([ends[0], ends[2]], lambda end: end.barrier(60)):
            assert isinstance(error, BootstrapError)
            assert error.record.peer == 1
        # And it may be replaced by another process.
        group.replace(1)
        ends[1] = group.endpoint(1)
        assert in_threads(ends, lambda end: end.allgather(b"", 10)) == [[b""] * 3] * 3


def test_ranks_that_disagree_are_told_apart() -> None:
    with LocalGroup(2) as group:
        ends = [group.endpoint(rank) for rank in range(2)]
        results = in_threads(ends, lambda end: end.barrier(10) if end.rank else end.allgather(b"", 10))
        for error in results:
            assert isinstance(error, BootstrapError)
            assert "same order" in str(error)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100),
        struct.pack("<IIQQQ", 1, 0, 0, 10**9, 1 << 40),  # a part of a terabyte
        struct.pack("<IIQQQ", 99, 0, 0, 10**9, 0),
    ],
)
def test_nonsense_from_a_rank_is_its_end_and_not_the_coordinators(garbage: bytes) -> None:
    with LocalGroup(2) as group:
        good = group.endpoint(0)
        bad = group.endpoint(1)
        bad._socket.sendall(garbage)
        with pytest.raises(BootstrapError, match="gone"):
            good.barrier(30)


def test_too_much_is_refused_where_it_is_sent() -> None:
    with LocalGroup(1) as group, pytest.raises(BootstrapError, match="too many"):
        group.endpoint(0).allgather(bytes(_local_group.MAX_PART_BYTES + 1), 1)


def test_a_coordinator_that_is_gone_ends_the_wait() -> None:
    mine, theirs = socket.socketpair()
    end = LocalBootstrap(mine, 0, 2)
    threading.Thread(target=lambda: (theirs.recv(1), theirs.close())).start()
    with pytest.raises(BootstrapError, match="gone"):
        end.barrier(30)


def test_a_silent_coordinator_ends_the_wait_at_the_deadline() -> None:
    mine, theirs = socket.socketpair()
    with theirs, pytest.raises(DeadlineExceeded, match="silent"):
        LocalBootstrap(mine, 0, 2).barrier(0.1)


def test_processes(run_ranks: RunRanks) -> None:
    run_ranks("assert bootstrap.allgather(bytes([rank]), 30) == [bytes([r]) for r in range(size)]", 4)


def test_a_killed_process_fails_the_others_at_once(run_ranks: RunRanks) -> None:
    ended = run_ranks(
        """
bootstrap.barrier(30)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    bootstrap.barrier(60)
except errors.BootstrapError as error:
    assert error.record.peer == 1
    sys.exit(7)
""",
        3,
        expect=None,
        deadline=30,
    )
    assert [one.code for one in ended] == [7, -9, 7]


def test_a_process_that_never_joins_fails_the_others_at_the_deadline(run_ranks: RunRanks) -> None:
    """K13."""
    ended = run_ranks(
        """
if rank == 2:
    sys.exit(0)
Communicator(bootstrap, heap_bytes=4096, bootstrap_timeout=1)
""",
        3,
        expect=None,
        deadline=30,
    )
    assert [one.code for one in ended] == [1, 1, 0]
    assert "E_BOOTSTRAP" in ended[0].output


def _forked(end: LocalBootstrap, leaves: bool) -> None:
    assert end.allgather(b"f", 30) == [b"f"] * end.size
    if leaves:
        os._exit(0)
    try:
        end.barrier(30)
    except BootstrapError:
        os._exit(5)


def test_forked_processes() -> None:
    with LocalGroup(3) as group:
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=_forked, args=(group.endpoint(rank), rank == 1)) for rank in range(3)]
        for process in ranks:
            process.start()
        for rank in range(3):
            group.release(rank)
        for process in ranks:
            process.join(30)
        assert [process.exitcode for process in ranks] == [5, 0, 5]


def test_a_process_that_was_not_started_by_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in (None, "", "x", "1:2", "99999:0:1"):
        if spec is not None:
            monkeypatch.setenv(_local_group.ENVIRONMENT, spec)
        with pytest.raises(BootstrapError, match="LocalGroup"):
            LocalBootstrap.inherited()


# ---------------------------------------------------------------------------------------------------------------- torch


class FakeStore:
    """The part of torch.distributed.Store that is used: for machines without torch."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def add(self, key: str, amount: int) -> int:
        with self.changed:
            value = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(value).encode()
            return value

    def set(self, key: str, value: bytes) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def wait(self, keys: list[str], timeout: Any) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: all(key in self.values for key in keys), timeout.total_seconds()):
                raise RuntimeError("wait timeout")

    def get(self, key: str) -> bytes:
        return self.values[key]

    def delete_key(self, key: str) -> bool:
        with self.changed:
            return self.values.pop(key, None) is not None


def check_store(store: Any) -> None:
    size = 3
    for generation in range(2):  # a second one over the same store, as after a restart
        ends = [TorchStoreBootstrap(store, rank, size, name="t") for rank in range(size)]
        for round_ in range(5):
            wanted = [bytes([rank, round_, generation]) * rank for rank in range(size)]
            assert in_threads(ends, lambda end, parts=wanted: end.allgather(parts[end.rank], 20)) == [wanted] * size
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        ends[0].allgather(b"", 0.3)
    assert caught.value.record.peer == 1
    assert time.monotonic() - begin < 10


def test_store_as_torch_has_it() -> None:
    store = FakeStore()
    check_store(store)
    # Old keys are dropped: two generations of counters, and what the last two exchanges left.
    assert len(store.values) < 20


def test_torch_store(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    check_store(torch.distributed.HashStore())


def test_torch_group(run_ranks: RunRanks, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run_ranks(
        f"""
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{tmp_path}/torch", rank=rank, world_size=size)
end = uccl_ep.TorchGroupBootstrap()
assert end.allgather(bytes([rank]) * rank, 30) == [bytes([r]) * r for r in range(size)]
end.barrier(30)
with Communicator(end, heap_bytes=4096) as comm:
    comm.channel(0).signal((rank + 1) % size, 0).wait()
    assert comm.wait_signal(0, 1) == 1
    comm.barrier()
dist.destroy_process_group()
""",
        2,
    )


def test_mpi_alone() -> None:
    pytest.importorskip("mpi4py")
    from uccl_ep.bootstrap import MpiBootstrap

    end = MpiBootstrap()
    assert end.allgather(b"abc", 10) == [b"abc"] * end.size
    end.barrier(10)


def test_a_rank_forked_while_the_coordinator_is_busy() -> None:
    """The coordinator holds its lock at the moment of the fork: the child must not wait for a thread it has not."""
    with LocalGroup(2) as group:
        mine, theirs = group.endpoint(1), group.endpoint(0)
        group._lock.acquire()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                theirs.barrier(20.0)
                theirs.barrier(20.0)
                status = 0
            finally:
                os._exit(status)
        group._lock.release()
        mine.barrier(20.0)
        mine.barrier(20.0)
        assert os.waitpid(pid, 0)[1] == 0
