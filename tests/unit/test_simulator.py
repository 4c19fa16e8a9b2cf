# SPDX-License-Identifier: Apache-2.0
"""uccl_ep.simulator: ranks as fibers of one world."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

from uccl_ep import errors
from uccl_ep.communicator import Communicator
from uccl_ep.simulator import Meeting, World, WorldBootstrap, knobs, profiles, run
from uccl_ep.simulator._native import header_text

PROFILES = {
    "connectx",
    "connectx-ro",
    "efa",
    "efa3",
    "thor2",
    "pollara",
    "pollara-noatomic",
    "cxi",
    "strawman-min",
}


def ring(comm: Communicator) -> int:
    """A message to the right neighbour; what came from the left."""
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.heap[:4096] = comm.rank + 1
    comm.channel(0).put_signal(to, 0, 8192, 4096, 3)
    comm.wait_signal(3, 1, source=source)
    seen = np.unique(comm.heap[8192 : 8192 + 4096])
    assert seen.tolist() == [source + 1]
    return int(seen[0])


def test_profiles_and_knobs() -> None:
    assert set(profiles()) == PROFILES
    assert all(profiles().values())
    lines = knobs("efa").splitlines()
    assert any(line.startswith("place_order=blocks") for line in lines)
    with pytest.raises(errors.CommandError, match="did you mean 'efa3'"):
        knobs("efa33")


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_run(profile: str) -> None:
    assert run(ring, ranks=4, profile=profile, seed=3) == [4, 1, 2, 3]


def test_an_exception_of_a_rank_comes_out() -> None:
    def fails(comm: Communicator) -> None:
        if comm.rank == 1:
            raise LookupError("of rank 1")
        comm.wait_signal(0, 1)

    with pytest.raises(LookupError, match="of rank 1"):
        run(fails, ranks=3, timeout=0.5)


def test_a_deadline_costs_virtual_time_alone() -> None:
    def waits(comm: Communicator) -> float:
        with pytest.raises(errors.DeadlineExceeded):
            comm.wait_signal(0, 1, timeout=3600.0)
        return 1.0

    assert run(waits, ranks=2, profile="connectx") == [1.0, 1.0]


def life(world: World, log: list[tuple[int, int]]) -> None:
    """Traffic with more than one thread a rank, and what each saw, in the order in which it did."""
    meeting = Meeting(world)

    def rank(index: int) -> None:
        with Communicator(
            WorldBootstrap(meeting, index),
            heap_bytes=1 << 18,
            channels=2,
            backend="sim",
            backend_options=world.backend_options(index),
            driver=world.driver(index),
        ) as comm:
            peers = [p for p in range(comm.size) if p != index]

            def more() -> None:
                for k in range(20):
                    comm.channel(1).signal(peers[k % len(peers)], 1)
                comm.channel(1).quiet()

            other = world.spawn(index, more)
            for _ in range(20):
                for peer in peers:
                    comm.channel(0).put_signal(peer, 0, 4096 * (index + 1), 512, 0)
                log.append((index, comm.read_signal(0)))
            comm.wait_signal(0, 20 * len(peers))
            assert other.join(10.0)
            comm.quiet()
            comm.barrier()

    world.start([(index, lambda index=index: rank(index)) for index in range(world.ranks)])  # type: ignore[misc]
    assert world.join(60.0)


@pytest.mark.parametrize("profile", ["connectx", "efa", "cxi", "strawman-min"])
def test_the_same_seed_is_the_same_run(profile: str) -> None:
    runs: list[tuple[str, list[tuple[int, int]], list[int]]] = []
    for seed in (5, 5, 6):
        log: list[tuple[int, int]] = []
        with World(3, profile, seed=seed) as world:
            life(world, log)
            runs.append((world.hash, log, world.choices()))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]


def test_choices_of_a_run_make_it_again() -> None:
    log: list[tuple[int, int]] = []
    with World(3, "efa", seed=11) as world:
        life(world, log)
        made, wanted = world.choices(), world.hash
    again: list[tuple[int, int]] = []
    with World(3, "efa", seed=12, choices=made) as world:
        life(world, again)
        assert (world.hash, again) == (wanted, log)


def signal_for_ever(comm: Communicator, peer: int) -> None:
    while True:
        comm.channel(0).signal(peer, 0).wait()


def test_kill_pause_and_what_is_told() -> None:
    told: dict[int, Any] = {}
    with World(3, "connectx", seed=1, trace_lines=20) as world:
        meeting = Meeting(world)

        def rank(index: int) -> None:
            comm = Communicator(
                WorldBootstrap(meeting, index),
                heap_bytes=1 << 16,
                backend="sim",
                backend_options=world.backend_options(index),
                driver=world.driver(index),
                peer_timeout=2.0,
                timeout=20.0,
            )
            for peer in range(3):
                comm.channel(0).signal(peer, 0)
            comm.wait_signal(0, 3)
            comm.quiet()
            comm.barrier()
            if index == 0:
                world.pause(1, 0.5)
                before = world.now()
                comm.channel(0).signal(1, 1).wait()
                comm.wait_signal(2, 1)
                told["paused"] = world.now() - before
                meeting.gone.add(2)
                world.kill(2)
                with pytest.raises(errors.PeerLost):
                    signal_for_ever(comm, 2)
                told["lost"] = comm.lost
                comm.exclude(2)
                comm.channel(0).signal(1, 3).wait()
            elif index == 1:
                comm.wait_signal(1, 1)
                comm.channel(0).signal(0, 2)
                comm.wait_signal(3, 1, source=0)
            else:
                comm.wait_signal(9, 1)  # never returns: it is killed
            comm.close()

        world.start([(index, lambda index=index: rank(index)) for index in range(3)])  # type: ignore[misc]
        assert world.join(60.0)
        assert not world.alive(2)
        assert world.alive(1)
        assert told["paused"] >= 0.5
        assert told["lost"] == frozenset({2})
        assert 0 < len(world.trace()) <= 20
        stats = world.stats()
        assert stats["operations"] > 0
        assert stats["now_ns"] == world.now_ns()


def test_a_fiber_that_kills_its_own_rank_does_not_go_on() -> None:
    went_on: list[int] = []
    with World(2, "efa") as world:

        def rank(index: int) -> None:
            if index == 1:
                world.kill(1)
                went_on.append(index)
            world.sleep(0.001)

        world.start([(index, lambda index=index: rank(index)) for index in range(2)])  # type: ignore[misc]
        assert world.join(60.0)
        assert not world.alive(1)
    assert not went_on


def test_what_would_wait_for_ever_is_refused() -> None:
    """Who is no fiber has no turns, so that time would stand still."""
    with World(2, "efa") as world:
        with pytest.raises(errors.CommandError, match="fiber"):
            world.sleep(1.0)
        with pytest.raises(errors.CommandError, match="fiber"):
            Meeting(world).allgather("topic", [0, 1], 0, b"", 1.0)


def test_ranks_that_are_not_there() -> None:
    with World(2, "efa") as world:
        for call in (world.kill, world.pause, world.resume, world.alive, world.backend_options, world.driver):
            with pytest.raises(errors.CommandError, match="0 to 1"):
                call(2)
        with pytest.raises(errors.CommandError, match="0 to 1"):
            world.start([(2, lambda: None)])
        with pytest.raises(errors.CommandError, match="one fiber"):
            world.start([])
        for fault in ("drop rank=2", "slow_peer peer=2 ns=5", "peer_death rank=2"):
            with pytest.raises(errors.CommandError, match="of the world"):
                world.inject(fault)


def test_a_world_that_is_closed() -> None:
    world = World(2, "efa")
    world.close()
    world.close()
    for call in (world.now, world.stats, world.choices, world.trace, lambda: world.alive(0), lambda: world.hash):
        with pytest.raises(errors.CommandError, match="closed"):
            call()


def test_knobs_and_faults_as_python_writes_them() -> None:
    assert run(ring, ranks=2, profile="connectx", knobs={"relaxed": True, "srq": False}) == [2, 1]
    assert run(ring, ranks=2, profile="efa", faults="again percent=30;partial percent=30") == [2, 1]


@pytest.mark.parametrize("profile", sorted(PROFILES))
@pytest.mark.parametrize("start", [8, 4104])
def test_a_heap_within_an_allocation(profile: str, start: int) -> None:
    """Its first byte lies somewhere in memory of the caller's: what is around it stays as it is (case E1)."""
    size, guard = 65568, 0xA5
    offsets = (0, 8, 4104, size - 8)
    allocations = [np.full(start + size + 4096, guard, np.uint8) for _ in range(2)]

    def rank(comm: Communicator) -> None:
        mine, to = allocations[comm.rank], 1 - comm.rank
        assert comm.heap.ctypes.data == mine.ctypes.data + start
        assert comm.heap.size == size
        mine[start : start + size] = 0
        comm.barrier()
        for k, at in enumerate(offsets):
            comm.heap[16 : 16 + 8] = 16 * comm.rank + k + 1
            comm.channel(0).put_signal(to, 16, at, 8, k).wait()
        comm.wait_signal(len(offsets) - 1, 1)
        comm.barrier()

    with World(2, profile, seed=start) as world:
        meeting = Meeting(world)

        def life(index: int) -> None:
            with Communicator(
                WorldBootstrap(meeting, index), heap=allocations[index][start : start + size], granularity=4,
                backend="sim", device=profile, backend_options=world.backend_options(index),
                driver=world.driver(index),
            ) as comm:  # fmt: skip
                rank(comm)
                comm.quiet()
                comm.barrier()

        world.start([(index, lambda index=index: life(index)) for index in range(2)])  # type: ignore[misc]
        assert world.join(60.0)
    for index, memory in enumerate(allocations):
        want = np.full(memory.size, guard, np.uint8)
        want[start : start + size] = 0
        want[start + 16 : start + 24] = 16 * index + len(offsets)
        for k, at in enumerate(offsets):
            want[start + at : start + at + 8] = 16 * (1 - index) + k + 1
        assert np.flatnonzero(memory != want).tolist() == []


def test_faults_are_reached_by_name() -> None:
    with World(2, "efa") as world:
        world.inject("again percent=50")
        with pytest.raises(errors.CommandError, match="drop"):
            world.inject("no_such_fault")
        with pytest.raises(errors.CommandError, match="percent"):
            world.inject("again per_cent=5")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"ranks": 0, "profile": "efa"}, "ranks"),
        ({"ranks": 2, "profile": "efa4"}, "efa"),
        ({"ranks": 2, "profile": "efa", "knobs": "no_such=1"}, "no_such"),
        ({"ranks": 2, "profile": "efa", "knobs": "max_seg=1"}, "did you mean max_sge"),
        ({"ranks": 2, "profile": "efa", "knobs": "relaxed=True"}, "0 and 1 are possible"),
        ({"ranks": 2, "profile": "efa", "knobs": "dup_write=x"}, "0 to 100 are possible"),
        ({"ranks": 2, "profile": "efa", "knobs": "nics=2,ranks_per_nic=2"}, "nics and ranks_per_nic"),
        ({"ranks": 2, "profile": "efa", "seed": -1}, "seed"),
    ],
)
def test_what_is_wrong_is_told(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.CommandError, match=text):
        World(**arguments)


def test_without_a_world_the_backend_says_where_to_go() -> None:
    from uccl_ep import SingleProcess

    with pytest.raises(errors.UcclEpError, match=r"uccl_ep\.simulator\.run"):
        Communicator(SingleProcess(), heap_bytes=1 << 16, backend="sim")


@pytest.mark.parametrize(
    ("strategy", "profile", "text"),
    [
        ("ordered_atomic", "efa", r"take auto, or another than ordered_atomic: .*visible \(MEM-3\) \["),
        ("sender_hold_sum", "cxi", "it needs the caller's word .*single_writer"),
        ("sequenced_immediate", "strawman-min", "immediates of 24 bits"),
    ],
)
def test_a_strategy_that_is_refused_says_what_to_do(strategy: str, profile: str, text: str) -> None:
    with pytest.raises(errors.CapabilityError, match=text):
        run(ring, ranks=2, profile=profile, strategy=strategy)


def test_polling_lets_time_pass() -> None:
    """A program that asks again and again, and never waits, gets its answer."""

    def polls(comm: Communicator) -> int:
        ticket = comm.channel(0).signal((comm.rank + 1) % comm.size, 0)
        asked = 0
        while not ticket.done():
            asked += 1
        while comm.read_signal(0) < 1:
            asked += 1
        return asked

    assert all(asked > 0 for asked in run(polls, ranks=2, profile="cxi"))


def test_closed_worlds_leave_nothing() -> None:
    before = threading.active_count()  # threads of ranks that other tests killed
    run(ring, ranks=3, profile="efa")
    gc.collect()
    assert threading.active_count() == before


def test_the_header_is_read_whole() -> None:
    text = header_text()
    assert "uccl_ep_sim_config" in text
    assert "#ifdef" not in text
    assert "/*" not in text
