# SPDX-License-Identifier: Apache-2.0
"""A communicator under test, with a record of what its memory must hold.

The whole heap starts as canary bytes and every signal word as zero. A case says what it expects to change; whatever
else changed at the end is a stray write or a stray signal (PUT-1, SIG-1), even where no assertion of the case looked.
What the rank does and sees here is written down for the model of the contract (recording.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import patterns
from .patterns import Bytes

if TYPE_CHECKING:
    from .context import Context
    from .recording import RecordedChannel, RecordedCommunicator

_MASK = (1 << 64) - 1
# A larger heap is not touched as a whole: it may be sparse, and must stay so.
SHADOWED_BYTES = 96 << 20


class Bench:
    def __init__(
        self, ctx: Context, comm: RecordedCommunicator, ranks: tuple[int, ...], *, shadow: bool, name: str
    ) -> None:
        from .recording import RecordedHeap

        self.ctx, self.comm, self.ranks, self.name = ctx, comm, ranks, name
        self.rank, self.size = comm.rank, comm.size
        self.part = comm.part
        self.heap = RecordedHeap(comm.raw_heap(), self.part)
        self.signals = int(comm.info.signals)
        self.granularity = int(comm.info.granularity)
        self.words = [0] * self.signals
        self._loose_words: set[int] = set()
        self._loose: list[tuple[int, int]] = []
        self.shadow: Bytes | None = None
        self.part.name = name
        self.closed = False
        self.broken = False  # aborted, or a peer is gone: no quiet and no barrier at the end
        if shadow and self.heap.size <= SHADOWED_BYTES:
            self.shadow = patterns.data(self.heap.size, ctx.seed, "canary", name, self.rank)
            begin = self.part.clock()
            self.heap.raw[:] = self.shadow
            self.part.filled(begin, self.shadow)

    def channel(self, i: int = 0) -> RecordedChannel:
        return self.comm.channel(i)

    # ------------------------------------------------------------------------------------ what memory must hold

    def place(self, offset: int, data: Bytes) -> None:
        """Store into the own heap: a source."""
        self.heap[offset : offset + data.size] = data
        self.expect(offset, data)

    def expect(self, offset: int, data: Bytes) -> None:
        """A peer's put makes this part of the own heap hold `data`."""
        if self.shadow is not None:
            self.shadow[offset : offset + data.size] = data

    def loosen(self, offset: int, nbytes: int) -> None:
        """What this part holds at the end is the case's own affair."""
        self._loose.append((offset, nbytes))

    def expect_signal(self, slot: int, add: int = 1) -> None:
        self.words[slot] = (self.words[slot] + add) & _MASK

    def loosen_signal(self, slot: int) -> None:
        self._loose_words.add(slot)

    def reset(self) -> None:
        """Collective: after it every word starts at zero again (ERR-6)."""
        self.comm.reset()
        self.words = [0] * self.signals
        self._loose_words.clear()
        self.ctx.barrier(self.ranks)

    def canary(self, offset: int, nbytes: int) -> Bytes:
        """What the canary of this part was at the start."""
        words = patterns.data(offset + nbytes, self.ctx.seed, "canary", self.name, self.rank)
        return words[offset:]

    def verify(self) -> None:
        """Everything that nobody announced is as it was."""
        for slot, (got, want) in enumerate(zip(self.comm.read_signals().tolist(), self.words, strict=True)):
            if got != want and slot not in self._loose_words:
                self.ctx.check(
                    False,
                    "SIG-1",
                    f"signal word {slot} holds another sum than was added to it",
                    communicator=self.name,
                    got=got,
                    want=want,
                )
        self.ctx.checked()
        if self.shadow is None:
            return
        for offset, nbytes in self._loose:
            self.shadow[offset : offset + nbytes] = self.heap.raw[offset : offset + nbytes]
        begin = self.part.clock()
        self._compare(self.heap.raw[:], 0, self.shadow, "PUT-1", "bytes of the heap changed that nobody was to change")
        self.part.swept(begin, self.shadow)

    def compare(self, offset: int, want: Bytes, clause: str, message: str, **values: Any) -> None:
        """The own heap holds `want` at `offset`."""
        self._compare(self.heap[offset : offset + want.size], offset, want, clause, message, **values)

    def _compare(self, got: Bytes, offset: int, want: Bytes, clause: str, message: str, **values: Any) -> None:
        if np.array_equal(got, want):
            self.ctx.checked()
            return
        # Look once more only to describe it: the verdict stands, since whoever promised these bytes did so before.
        got = self.heap.raw[offset : offset + want.size].copy()
        if np.array_equal(got, want):
            self.ctx.check(
                False,
                clause,
                f"{message} (the bytes arrived while they were compared)",
                communicator=self.name,
                offset=offset,
                **values,
            )
        before = self.canary(offset, want.size) if self.shadow is not None else None
        seen = patterns.difference(got, want, before)
        seen["first_at"] = offset + int(str(seen.pop("first")))
        seen["last_at"] = offset + int(str(seen.pop("last")))
        self.ctx.check(False, clause, message, communicator=self.name, **values, **seen)

    # --------------------------------------------------------------------------------- waits that cite a clause

    def wait_signal(self, slot: int, value: int, clause: str = "SIG-1", source: int | None = None) -> int:
        """Until the word is at or past `value`; a signal that does not come is a failure of `clause`."""
        from uccl_ep.errors import DeadlineExceeded

        try:
            seen = self.comm.wait_signal(slot, value, source=source)
        except DeadlineExceeded as error:
            self.ctx.check(
                False,
                clause,
                f"signal word {slot} did not reach {value} before the deadline",
                communicator=self.name,
                holds=self.comm.read_signal(slot),
                error=str(error),
            )
            raise AssertionError from error
        self.ctx.check(
            ((seen - value) & _MASK) < 1 << 63,
            clause,
            f"the wait for signal word {slot} ended too early",
            communicator=self.name,
            seen=seen,
            wanted=value,
        )
        return int(seen)

    def quiet(self, channel: int | None = None, clause: str = "QUI-1") -> None:
        from uccl_ep.errors import DeadlineExceeded

        try:
            if channel is None:
                self.comm.quiet()
            else:
                self.channel(channel).quiet()
        except DeadlineExceeded as error:
            self.ctx.check(
                False,
                clause,
                "quiet did not end before the deadline",
                communicator=self.name,
                channel=channel,
                error=str(error),
                report=self.comm.report(),
            )
        self.ctx.checked()
