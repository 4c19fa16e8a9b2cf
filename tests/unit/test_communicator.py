# SPDX-License-Identifier: Apache-2.0
"""The Python face of a communicator. What the clauses say is the suite's; here is that Python says the same."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from uccl_ep import COMMAND_DTYPE, Communicator, Op, SingleProcess, encode, errors, paths

if TYPE_CHECKING:
    from conftest import RunRanks


def make(**options: Any) -> Communicator:
    return Communicator(SingleProcess(), **{"heap_bytes": 1 << 16, **options})


@pytest.fixture
def comm() -> Iterator[Communicator]:
    with make(channels=2, signals=16) as made:
        yield made


def test_info_tells_what_was_agreed(comm: Communicator) -> None:
    info = comm.info
    assert (info.rank, info.size, info.channels, info.signals, info.granularity) == (0, 1, 2, 16, 16)
    assert info.heap_bytes == comm.heap.nbytes >= 1 << 16
    assert info.backend == "shm"
    assert info.strategy in ("ordered_atomic", "sender_hold")
    assert info.strategy_reason
    assert info.device.caps.flags
    assert "rank 0 of 1" in repr(comm)


def test_put_and_signal_to_oneself(comm: Communicator) -> None:
    comm.heap[:64] = np.arange(64, dtype=np.uint8)
    ticket = comm.channel(1).put_signal(0, 0, 4096, 64, 3, add=5)
    ticket.wait()
    ticket.wait_source()
    assert ticket.done()
    assert ticket.source_done()
    assert comm.wait_signal(3, 5) == 5 == comm.read_signal(3)
    np.testing.assert_array_equal(comm.heap[4096:4160], comm.heap[:64])
    second = comm.channel(1).signal(0, 3)
    assert second.value == ticket.value + 1
    comm.channel(1).quiet()
    comm.channel(1).quiet_source()
    comm.quiet()
    comm.quiet_source()
    assert comm.read_signal(3) == 6


def test_batches(comm: Communicator) -> None:
    batch = np.zeros(100, COMMAND_DTYPE)
    batch["op"], batch["add"], batch["slot"] = Op.SIGNAL, np.arange(100), 1
    assert comm.channel(0).post_many(batch).value == 99
    comm.channel(0).post_raw(encode(batch)).wait()
    assert comm.read_signal(1) == 2 * 4950
    stats = comm.stats()
    assert stats["channels"][0]["posted"] == stats["channels"][0]["complete"] == 200
    assert stats["proxies"][0]["commands"] == 200
    assert [entry.add for entry in comm.trace()][-100:] == list(range(100))
    assert comm.trace()[-1].op == "signal"
    assert "rank 0 of 1" in comm.report()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda c: c.channel(0).put(1, 0, 0, 16), "E_RANGE"),
        (lambda c: c.channel(0).put(0, 0, 1 << 40, 16), "E_RANGE"),
        (lambda c: c.channel(0).put(0, 8, 0, 16), "E_ALIGNMENT"),
        (lambda c: c.channel(0).put(-1, 0, 0, 16), "E_INVALID"),
        (lambda c: c.channel(0).put(0, 0, 0, 1 << 70), "E_INVALID"),
        (lambda c: c.channel(0).put(0, 0, 0, 1.5), "E_INVALID"),
        (lambda c: c.channel(0).signal(0, 1 << 20), "E_RANGE"),
        (lambda c: c.channel(2), "E_INVALID"),
        (lambda c: c.read_signal(16), "E_RANGE"),
        (lambda c: c.exclude(7), "E_RANGE"),
        (lambda c: c.progress(), "E_INVALID"),
    ],
)
def test_a_wrong_call_is_refused_and_changes_nothing(comm: Communicator, call: Any, name: str) -> None:
    with pytest.raises(errors.CommandError) as caught:
        call(comm)
    assert caught.value.name == name
    assert comm.stats()["channels"][0]["posted"] == 0
    assert comm.errors() == []


def test_a_malformed_command_fails_its_ticket_with_a_record(comm: Communicator) -> None:
    """ERR-4."""
    words = np.array([[7, 0]], np.uint64)
    with pytest.raises(errors.UcclEpError) as caught:
        comm.channel(0).post_raw(words).wait()
    assert caught.value.name == "E_MALFORMED"
    record = comm.errors()[0]
    assert (record.name, record.channel, record.ticket, record.rank) == ("E_MALFORMED", 0, 0, 0)
    assert record.clause == "ERR-4"


def on_mutant(options: dict[str, str], **others: Any) -> Communicator:
    """On a NIC with the manners that are asked for: csrc/mutation/mutant.h."""
    backend = paths.library_dir() / "libuccl_ep_backend_mutant.so"
    return make(backend=backend, backend_options=options, **others)


@pytest.mark.parametrize("what", ["quiet", "quiet_source"])
def test_quiet_does_not_wait_for_what_is_posted_after(what: str) -> None:
    """Another thread keeps the ring full. Also on a NIC so slow that the wait comes up for air."""
    with on_mutant({"lazy": "20000"}, channels=2, ring_log2=6, first_ticket=2**33) as comm:
        before = [comm.channel(1).signal(0, 0) for _ in range(60)][-1]
        stop = threading.Event()

        def post() -> None:
            while not stop.is_set():
                comm.channel(1).signal(0, 1)

        poster = threading.Thread(target=post)
        poster.start()
        try:
            getattr(comm, what)(timeout=25)
            assert before.done() if what == "quiet" else before.source_done()
            getattr(comm.channel(1), what)(timeout=25)
        finally:
            stop.set()
            poster.join(30)
        assert not poster.is_alive()


@pytest.mark.parametrize("timeout", [0, 0.1, 0.7])
def test_quiet_has_a_deadline(timeout: float) -> None:
    with on_mutant({"fault": "completions_stop"}, peer_timeout=60) as comm:
        for _ in range(20):
            comm.channel(0).signal(0, 0).wait()
        comm.channel(0).signal(0, 0)  # the one that is never completed
        begin = time.monotonic()
        for quiet in (comm.quiet, comm.channel(0).quiet):
            with pytest.raises(errors.DeadlineExceeded):
                quiet(timeout=timeout)
        assert 2 * timeout <= time.monotonic() - begin < 10


def test_waits_have_deadlines(comm: Communicator) -> None:
    begin = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded, match=r"within 0\.500 s"):
        comm.wait_signal(0, 1, timeout=0.5)
    assert 0.5 <= time.monotonic() - begin < 5
    with pytest.raises(errors.DeadlineExceeded):
        comm.wait_signal(0, 1, timeout=0)
    with pytest.raises(ValueError, match="not negative"):
        comm.quiet(timeout=-1)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"strategy": "nonsense"}, errors.CommandError, "known: auto"),
        ({"progress": "nonsense"}, errors.CommandError, "known: caller, threads"),
        ({"timeout": 0}, errors.CommandError, "timeout"),
        ({"peer_timeout": -1}, errors.CommandError, "peer_timeout"),
        ({"heap_bytes": -1}, errors.CommandError, "heap_bytes"),
        ({"heap_bytes": 0}, errors.CommandError, "heap"),
        ({"channels": 1 << 40}, errors.CommandError, "channels"),
        ({"granularity": 5}, errors.CommandError, "granularity"),
        ({"ring_log2": 40}, errors.CommandError, "ring"),
        ({"backend": "shn"}, errors.NotABackend, "did you mean 'shm'"),
        ({"backend": "/nonexistent.so"}, errors.NotABackend, "no such file"),
        ({"backend_options": {"nonsense": "1"}}, errors.CommandError, "nonsense"),
        ({"backend_options": {"a": "1,2"}}, errors.CommandError, "comma"),
        ({"device": "nonsense"}, errors.NoDevice, "nonsense"),
        ({"cpus": "9999"}, errors.CommandError, "9999"),
        ({"heap_bytes": 1 << 50}, errors.CommandError, "68719476736 are addressable"),
    ],
)
def test_a_wrong_option_is_refused_with_what_would_be_right(
    options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        make(**options)


@pytest.mark.parametrize("progress", ["threads", "caller"])
def test_who_makes_progress(progress: str) -> None:
    with make(progress=progress) as comm:
        ticket = comm.channel(0).signal(0, 0)
        if progress == "caller":
            while not ticket.done():
                comm.progress()
        ticket.wait()
        assert comm.read_signal(0) == 1


def test_tickets_start_where_they_are_told_to() -> None:
    with make(first_ticket=2**32 - 1) as comm:
        assert [comm.channel(0).signal(0, 0).value for _ in range(3)] == [2**32 - 1, 2**32, 2**32 + 1]
        comm.quiet()


def test_abort_ends_waits_and_is_final(comm: Communicator) -> None:
    """ABT-1."""
    threading.Timer(0.1, comm.abort, ["enough"]).start()
    with pytest.raises(errors.Aborted, match="enough"):
        comm.wait_signal(0, 1, timeout=30)
    with pytest.raises(errors.Aborted):
        comm.channel(0).signal(0, 0)


def test_a_closed_communicator_says_so() -> None:
    comm = make()
    channel = comm.channel(0)
    ticket = channel.signal(0, 0)
    ticket.wait()
    comm.close()
    comm.close()
    for call in (comm.quiet, ticket.wait, lambda: channel.signal(0, 0), lambda: comm.heap, comm.abort):
        with pytest.raises(errors.ChannelClosed, match="closed"):
            call()
    assert "closed" in repr(comm)


def test_a_view_left_after_close_is_safe() -> None:
    """And takes its memory along in the end."""

    def mappings() -> int:
        return sum("memfd:uccl_ep" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = mappings()
    with make() as comm:
        view = comm.heap
        comm.channel(0).put(0, 0, 4096, 16).wait()
        view[:16] = 7
        comm.channel(0).put(0, 0, 4096, 16).wait()
        assert comm.heap[4096:4112].tolist() == [7] * 16
        part = view[4096:4112]
    del view
    part[0] = 8
    assert part.tolist() == [8] + [7] * 15
    assert mappings() == before + 1
    del part, comm
    assert mappings() == before


def test_a_view_of_the_heap_keeps_the_communicator() -> None:
    comm = make()
    gone = weakref.ref(comm)
    view = comm.heap[16:32]
    del comm
    gc.collect()
    view[:] = 1
    assert gone() is not None
    del view
    # No cycle: it closes at once, not when the collector comes by.
    assert gone() is None


def test_what_the_bootstrap_raised_is_the_cause() -> None:
    class Broken(SingleProcess):
        def allgather(self, data: bytes, timeout: float) -> list[bytes]:
            raise OSError("the line is dead")

    with pytest.raises(errors.BootstrapError, match="the line is dead") as caught:
        Communicator(Broken(), heap_bytes=4096)
    assert isinstance(caught.value.__cause__, OSError)


def test_an_interrupt_in_the_bootstrap_is_an_interrupt() -> None:
    class Interrupted(SingleProcess):
        def allgather(self, data: bytes, timeout: float) -> list[bytes]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Communicator(Interrupted(), heap_bytes=4096)


def test_ranks_of_different_length_are_refused() -> None:
    class Other(SingleProcess):
        def allgather(self, data: bytes, timeout: float) -> list[bytes]:
            return [data + b"x"]

    with pytest.raises(errors.BootstrapError, match="same version"):
        Communicator(Other(), heap_bytes=4096)


def test_ranks_exchange(run_ranks: RunRanks) -> None:
    run_ranks(
        """
with Communicator(bootstrap, heap_bytes=1 << 16, channels=2) as comm:
    right = (rank + 1) % size
    for epoch in range(1, 201):
        comm.heap[:1024] = (rank + epoch) % 251
        comm.channel(epoch % 2).put_signal(right, 0, 4096 + 1024 * (epoch % 8), 1024, slot=epoch % 4).wait_source()
        comm.wait_signal(epoch % 4, (epoch + 3) // 4 if epoch % 4 else epoch // 4, source=(rank - 1) % size)
        assert (comm.heap[4096 + 1024 * (epoch % 8):][:1024] == ((rank - 1) % size + epoch) % 251).all()
        if epoch % 4 == 0:
            comm.quiet()
            comm.barrier()
    assert comm.lost == frozenset()
""",
        3,
    )


def test_a_rank_that_cannot_come_fails_all(run_ranks: RunRanks) -> None:
    """L9: all are told which rank and why."""
    for one in run_ranks(
        """
try:
    Communicator(bootstrap, heap_bytes=1 << (16 + rank), bootstrap_timeout=20)
except errors.UcclEpError as error:
    assert "heap" in str(error), error
    sys.exit(7)
""",
        2,
        expect=7,
    ):
        assert one.seconds < 20


def test_a_killed_rank_is_lost_and_the_others_go_on(run_ranks: RunRanks) -> None:
    """ERR-5, K1."""
    run_ranks(
        """
comm = Communicator(bootstrap, heap_bytes=1 << 16, peer_timeout=5)
comm.barrier()
if rank == 2:
    sys.exit(0) if os.fork() else os.kill(os.getppid(), signal.SIGKILL)
try:
    comm.wait_signal(0, 1, source=2, timeout=30)
    raise SystemExit("nobody signalled")
except errors.PeerLost as error:
    assert error.record.peer == 2
    assert isinstance(error, ConnectionError)
comm.exclude(2)
assert comm.lost == {2}
other = 1 - rank
comm.channel(0).signal(other, 1).wait()
assert comm.wait_signal(1, 1, source=other) == 1
comm.close()
""",
        3,
        expect=None,
    )
