# SPDX-License-Identifier: Apache-2.0
"""All-to-all traffic in epochs, every byte checked, that goes on without ranks that are lost (ERR-5).

In epoch e every rank puts a block to every other one and signals; it then waits for the others' signals and compares. A
block lies in one of two places by the epoch's parity: who is in epoch e + 2 has seen that all had read epoch e (PUT-7).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from uccl_ep import Communicator
from uccl_ep.errors import DeadlineExceeded, PeerLost

from .ranks import Member, facts_of

BLOCK = 96 << 10
GUARD = 64
CANARY = 0xA7
# How a loss must be noticed, and how long nothing may hang.
PEER_TIMEOUT = 10.0
TIMEOUT = 20.0

_ramp = np.arange(BLOCK, dtype=np.uint8)


def heap_bytes(size: int) -> int:
    # Two places to send from and two to receive into for every rank, each with a guard in front; one guard at the end.
    return 4 * size * (BLOCK + GUARD) + GUARD


def make(bootstrap: Any, **settings: Any) -> Communicator:
    defaults: dict[str, Any] = {
        "heap_bytes": heap_bytes(bootstrap.size),
        "signals": 64,
        "timeout": TIMEOUT,
        "peer_timeout": PEER_TIMEOUT,
        "bootstrap_timeout": 30.0,
    }
    return Communicator(bootstrap, **{**defaults, **settings})


def pattern(source: int, target: int, epoch: int) -> Any:
    return _ramp + np.uint8((source * 131 + target * 31 + epoch * 7) & 0xFF)


class Exchange:
    def __init__(self, member: Member, comm: Communicator, victim: int | None = None) -> None:
        self.member, self.comm, self.victim = member, comm, victim
        self.rank, self.size = comm.rank, comm.size
        self.epoch = 0
        self.excluded: set[int] = set()
        self.since_loss = 0  # epochs finished since then
        # Peers may be in epoch 1 already: only what nobody ever writes is painted.
        for guard in self._guards():
            guard[...] = CANARY

    def _at(self, receive: bool, other: int, epoch: int) -> int:
        place = ((2 if receive else 0) + epoch % 2) * self.size + other
        return place * (BLOCK + GUARD) + GUARD

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank and rank not in self.excluded]

    def guarded(self, step: Callable[[], Any], what: str) -> bool:
        """False: the victim is lost, and from now on excluded. Any other failure is the test's."""
        try:
            step()
            return True
        except PeerLost as error:
            lost = error
        record = lost.record
        assert record.peer == self.victim, f"lost {record.peer}, not {self.victim}: {lost}"
        assert record.rank in (self.rank, None)
        assert record.clause in ("ERR-5", "ERR-6", "ERR-2"), lost
        assert f"rank {self.victim}" in record.text, lost
        self.member.say("lost", where=what, epoch=self.epoch, **facts_of(lost))
        self.exclude(record.peer)
        return False

    def exclude(self, rank: int) -> None:
        assert rank not in self.excluded, "an excluded rank ends no wait"
        self.comm.exclude(rank)
        self.excluded.add(rank)
        assert rank not in {one.peer for one in self.comm.errors()}
        assert self.comm.lost <= {self.victim}

    def send(self, target: int, pieces: int = 3) -> None:
        channel = self.comm.channel(self.epoch % self.comm.info.channels)
        source, place = self._at(False, target, self.epoch), self._at(True, self.rank, self.epoch)
        block = pattern(self.rank, target, self.epoch)
        block[:4].view("<u4")[0] = self.epoch
        block[4:8].view("<u4")[0] = self.since_loss
        self.comm.heap[source : source + BLOCK] = block
        step = BLOCK // pieces // 16 * 16
        for piece in range(pieces - 1):
            channel.put(target, source + piece * step, place + piece * step, step)
        at = (pieces - 1) * step
        channel.put_signal(target, source + at, place + at, BLOCK - at, slot=self.rank)

    def receive(self, source: int) -> int:
        """Waits for its block and compares; returns its `since_loss`."""
        self.comm.wait_signal(source, self.epoch, source=source)
        place = self._at(True, source, self.epoch)
        block = self.comm.heap[place : place + BLOCK].copy()
        epoch, since = (int(block[i : i + 4].view("<u4")[0]) for i in (0, 4))
        assert epoch == self.epoch, f"rank {source}: the signal of epoch {self.epoch} and the data of {epoch}"
        expected = pattern(source, self.rank, self.epoch)
        assert np.array_equal(block[8:], expected[8:]), f"rank {source}, epoch {epoch}: wrong bytes"
        return since

    def round(self, before_quiet: Callable[[], None] | None = None) -> int:
        """One epoch. Returns the least `since_loss` of all that are alive: the same number on each of them."""
        self.epoch += 1
        for target in self.others:
            self.guarded(lambda target=target: self.send(target), "put")
        if before_quiet:
            before_quiet()
        while not self.guarded(self.comm.quiet, "quiet"):
            pass
        least = self.since_loss if self.excluded else 0
        for source in self.others:
            seen: list[int] = []
            self.guarded(lambda source=source, seen=seen: seen.append(self.receive(source)), "wait_signal")
            if seen and source != self.victim:
                least = min(least, seen[0])
        if self.excluded:
            self.since_loss += 1
        return least

    def run_until_lost(self, further: int = 3, seconds: float = 45.0) -> None:
        """Until all survivors have noticed the loss and gone on for `further` epochs."""
        end = time.monotonic() + seconds
        while self.round() < further:
            if time.monotonic() > end:
                raise DeadlineExceeded(f"nobody was lost in {seconds} s; {self.comm.report()}")

    def _guards(self) -> tuple[Any, Any]:
        places = 4 * self.size
        heap = self.comm.heap[: heap_bytes(self.size)]
        split = places * (BLOCK + GUARD)
        return heap[:split].reshape(places, BLOCK + GUARD)[:, :GUARD], heap[split:]

    def check_guards(self) -> None:
        """Nothing was written outside of the blocks."""
        for guard in self._guards():
            assert (guard == CANARY).all(), "a guard was overwritten"
