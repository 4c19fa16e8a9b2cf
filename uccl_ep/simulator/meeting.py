# SPDX-License-Identifier: Apache-2.0
"""Where fibers of one world meet: an allgather of bytes, out of band."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ..errors import BootstrapError, CommandError, DeadlineExceeded
from .world import World

Topic = tuple[str, tuple[int, ...]]


class _Part:
    """What one rank brings to one meeting, and what it takes away."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.gathered: list[bytes] | None = None


class Meeting:
    def __init__(self, world: World) -> None:
        self.world = world
        # A rank is gone once it was killed, or has ended and announced no further meeting.
        self.gone: set[int] = set()
        self._queues: dict[Topic, dict[int, deque[_Part]]] = {}

    def allgather(
        self,
        topic: str,
        members: Sequence[int],
        rank: int,
        data: bytes,
        timeout: float,
        check: Callable[[], None] = lambda: None,
    ) -> list[bytes]:
        """`check` is called in every turn: what it raises ends the wait."""
        if not self.world.in_fiber():
            raise CommandError("only fibers meet in a world: start() them")
        key = (topic, tuple(members))
        queues = self._queues.setdefault(key, {member: deque() for member in members})
        mine = _Part(data)
        queues[rank].append(mine)
        if all(queues.values()):
            parts = [queues[member].popleft() for member in members]
            everything = [part.data for part in parts]
            for part in parts:
                part.gathered = everything
        end = self.world.now() + timeout
        try:
            while mine.gathered is None:
                check()
                absent = [m for m in members if m in self.gone and not queues[m]]
                if absent:
                    names = ", ".join(map(str, absent))
                    raise BootstrapError(f"rank {names} is gone", rank=rank, peer=absent[0])
                if self.world.now() >= end:
                    names = ", ".join(str(m) for m in members if not queues[m])
                    raise DeadlineExceeded(f"rank {names} did not come within {timeout:g} s", rank=rank)
                self.world.turn()
        except BaseException:
            queues[rank].remove(mine)
            raise
        return list(mine.gathered)


class WorldBootstrap:
    """uccl_ep.bootstrap.Bootstrap among all fibers' ranks of a world."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank, self.size = rank, meeting.world.ranks

    def allgather(self, data: bytes, timeout: float) -> list[bytes]:
        return self._meeting.allgather("bootstrap", range(self.size), self.rank, bytes(data), timeout)

    def barrier(self, timeout: float) -> None:
        self.allgather(b"", timeout)
