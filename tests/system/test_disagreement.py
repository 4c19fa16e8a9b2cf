# SPDX-License-Identifier: Apache-2.0
"""Ranks that were started with different settings, and bootstraps that bring something else than what was sent."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest

from uccl_ep import Communicator, SingleProcess
from uccl_ep.errors import BootstrapError, CommandError, DeadlineExceeded, UcclEpError

from .ranks import Footprint, Member, Ranks, facts_of
from .traffic import Exchange, heap_bytes, make

SEED = int(os.environ.get("UCCL_EP_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
SIZE = 3

# What all ranks must agree on: the setting, rank 1's value, and both values as the message has them.
MUST_AGREE: tuple[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]], ...] = (
    ({}, {"heap_bytes": 1 << 22}, ("heap_bytes", str(1 << 22))),
    ({"signals": 1024}, {"signals": 2048}, ("signals", "1024", "2048")),
    ({"channels": 7}, {"channels": 5}, ("channels", "7", "5")),
    ({"channels": 8, "proxies": 7}, {"channels": 8, "proxies": 5}, ("proxies", "7", "5")),
    ({"granularity": 16}, {"granularity": 4}, ("granularity", "16", "4")),
    ({"strategy": "sender_hold"}, {"strategy": "ordered_atomic"}, ("sender_hold", "ordered_atomic")),
)
# What each may choose for itself.
MAY_DIFFER: tuple[dict[str, Any], ...] = (
    {"ring_log2": 4},
    {"first_ticket": 2**32 - 3},
    {"backend_options": "promise=unordered"},
    {"max_inflight": 2, "max_inflight_peer": 1},
    {"max_inflight_bytes": 4096},
    {"max_message_bytes": 64},
    {"merge": False},
    {"timeout": 11.0, "peer_timeout": 9.0, "bootstrap_timeout": 29.0},
    {"spin": 1, "idle_sleep": 1e-5},
    {"huge_pages": False},
    {"lock_memory": False},
)


def test_settings_that_all_ranks_must_share() -> None:
    """L9: refused on all ranks, and each is told the setting, both values and whose they are."""

    def program(member: Member) -> None:
        before = Footprint()
        for common, other, parts in MUST_AGREE:
            with pytest.raises(BootstrapError) as refused:
                make(member.bootstrap, **(other if member.rank == 1 else common))
            text = refused.value.record.text
            assert all(part in text for part in parts), text
            assert "rank 1" in text
            assert "all ranks must agree" in text
            assert refused.value.record.rank == member.rank
            assert not before.leaks(), before.leaks()
        make(member.bootstrap).close()

    with Ranks(SIZE, program) as ranks:
        ranks.join_well()


def test_settings_that_each_rank_chooses() -> None:
    def program(member: Member) -> None:
        before = Footprint()
        for other in MAY_DIFFER:
            comm = make(member.bootstrap, **(other if member.rank == 1 else {}))
            exchange = Exchange(member, comm)
            for _ in range(4):
                exchange.round()
            exchange.check_guards()
            member.say("strategy", of=sorted(other), name=comm.info.strategy)
            comm.quiet()
            comm.barrier()
            comm.close()
            assert not before.leaks(), before.leaks()

    with Ranks(SIZE, program) as ranks:
        children = ranks.join_well()
        chosen = {(tuple(one["of"]), one["name"]) for child in children.values() for one in child.all("strategy")}
        # Promises are weighed together: one NIC without order takes it from all.
        assert len(chosen) == len(MAY_DIFFER), chosen
        assert (("backend_options",), "sender_hold") in chosen


def test_one_rank_is_refused_and_all_are_told() -> None:
    """Whatever it is that only one rank does wrong: nobody waits for the deadline, and everybody hears it."""
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"heap_bytes": (64 << 30) + 1}, "E_RANGE"),
        ({"device": "shm7"}, "E_NO_DEVICE"),
        ({"backend_options": "speed=high"}, "E_INVALID"),
        ({"ring_log2": 20}, "E_RANGE"),
        ({"cpus": "4000"}, "E_INVALID"),
        ({"heap_bytes": -1}, "E_INVALID"),
        ({"backend": "smh"}, "E_NOT_A_BACKEND"),
        ({"backend": "/nowhere/libnic.so"}, "E_NOT_A_BACKEND"),
        ({"strategy": "hold"}, "E_INVALID"),
        ({"timeout": 0}, "E_INVALID"),
    )

    def program(member: Member) -> None:
        for settings, name in wrong * 2:  # nobody is out of step after a refusal
            begin = time.monotonic()
            with pytest.raises(UcclEpError) as refused:
                make(member.bootstrap, **(settings if member.rank == 2 else {}))
            assert time.monotonic() - begin < 15
            assert refused.value.name == name, refused.value
            assert member.rank == 2 or refused.value.record.text.startswith("rank 2: "), refused.value
            assert member.rank == 2 or refused.value.record.peer == 2
        make(member.bootstrap).close()

    with Ranks(SIZE, program) as ranks:
        ranks.join_well()


# --------------------------------------------------------------------------------------------------- wrong bootstraps


class Alone(SingleProcess):
    def __init__(self, answer: Any, rank: int = 0, size: int = 1) -> None:
        self.answer, self.rank, self.size = answer, rank, size  # type: ignore[misc]

    def allgather(self, data: bytes, timeout: float) -> list[bytes]:
        if isinstance(self.answer, Exception):
            raise self.answer
        answer: list[bytes] = self.answer
        return answer


@pytest.mark.parametrize(
    ("bootstrap", "kind", "part"),
    [
        (Alone(None), BootstrapError, "TypeError"),
        (Alone([]), BootstrapError, "0 parts for 1 ranks"),
        (Alone([b"x", b"y"]), BootstrapError, "2 parts for 1 ranks"),
        (Alone([b""]), BootstrapError, "0 bytes and this rank"),
        (Alone([b"x" * 488]), BootstrapError, "rank 0"),
        (Alone(KeyError("gone")), BootstrapError, "KeyError: 'gone'"),
        (Alone(DeadlineExceeded("too late")), BootstrapError, "too late"),
        (Alone([], rank=1), CommandError, "rank 1 of 1"),
        (Alone([], size=0), CommandError, "bootstrap"),
        (Alone([], size=4097), CommandError, "1 to 4096"),
        (Alone([], rank=-1), (CommandError, OverflowError), ""),
    ],
    ids=lambda value: None if isinstance(value, str) else "x",
)
def test_a_bootstrap_that_does_not_keep_its_word(bootstrap: Alone, kind: Any, part: str) -> None:
    before = Footprint()
    with pytest.raises(kind) as refused:
        Communicator(bootstrap, heap_bytes=4096)
    assert part in str(refused.value)
    assert not before.leaks(), before.leaks()


class Corrupting:
    """What this rank receives of the others differs in a few bits or bytes."""

    def __init__(self, inner: Any, draw: random.Random) -> None:
        self.inner, self.draw = inner, draw
        self.rank, self.size = inner.rank, inner.size
        self.done = 0

    def allgather(self, data: bytes, timeout: float) -> list[bytes]:
        parts = self.inner.allgather(data, timeout)
        others = [rank for rank in range(self.size) if rank != self.rank and parts[rank]]
        if others and self.draw.random() < 0.5:
            victim = self.draw.choice(others)
            part = bytearray(parts[victim])
            for _ in range(self.draw.choice((1, 1, 4, 32))):
                # Mostly where something is: the rest is room that nobody reads.
                used = [i for i, byte in enumerate(part) if byte] if self.draw.random() < 0.7 else range(len(part))
                at = self.draw.choice(list(used) or [0])
                part[at] = self.draw.choice((part[at] ^ 1 << self.draw.randrange(8), 0, 255, self.draw.randrange(256)))
            parts[victim] = bytes(part)
            self.done += 1
        return list(parts)

    def barrier(self, timeout: float) -> None:
        self.inner.barrier(timeout)


def corrupted(member: Member, rounds: int, seed: int) -> None:
    before = Footprint()
    outcomes: dict[str, int] = {}
    for number in range(rounds):
        draw = random.Random(f"{seed}/{number}/{member.rank}")
        # A group a round: who was deceived may leave early, and is then out of step with the others.
        bootstrap = member.bootstraps[1 + number]
        if number % SIZE == member.rank:
            bootstrap = Corrupting(bootstrap, draw)
        try:
            comm = make(bootstrap, heap_bytes=heap_bytes(3), bootstrap_timeout=0.8)
            outcome = "works"
            comm.close()
        except UcclEpError as error:
            outcome = error.name
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        member.bootstraps[0].barrier(20.0)
        leaks = before.leaks()
        assert not leaks, f"round {number}: {leaks}"
    comm = make(member.bootstrap)
    exchange = Exchange(member, comm)
    exchange.round()
    comm.quiet()
    comm.barrier()
    comm.close()
    member.say("outcomes", **outcomes)


def test_what_comes_through_the_bootstrap_is_not_believed() -> None:
    """One rank receives damaged parts: it starts all the same or is refused, and no rank crashes, hangs or leaks."""
    print(f"\nseed {SEED} (replay: UCCL_EP_SEED={SEED})")
    with Ranks(SIZE, corrupted, 45, SEED, groups=[[0, 1, 2]] * 45, seconds=100) as ranks:
        for child in ranks.join_well(seconds=100).values():
            print(child.rank, child.saw("outcomes"))


def test_a_rank_that_is_at_another_step() -> None:
    """Rank 1 asks for a barrier where the others make a communicator."""

    def program(member: Member) -> None:
        member.bootstrap.barrier(20.0)
        if member.rank == 1:
            with pytest.raises(BootstrapError, match="same order") as refused:
                member.bootstrap.barrier(10.0)
        else:
            with pytest.raises(BootstrapError, match="same order") as refused:
                make(member.bootstrap)
        member.say("refused", **facts_of(refused.value))
        make(member.bootstrap).close()

    with Ranks(SIZE, program) as ranks:
        ranks.join_well()
