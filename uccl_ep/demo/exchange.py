# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of one rank: one put_signal a row each way, and epochs instead of resets.

Rows for rank d are numbered 0, 1, ... in the order of their experts: the row's slot. Row s from rank r to rank d
arrives in `arrived[r, s]` of d, its result leaves from `results[r, s]` of d and comes back to `returned[d, s]` of r. As
d learns how many rows each expert gets, the slots tell all that there is to know about a row, and no header travels.

Signal words, E = experts, counted up for ever (SIG-6):
  [0, E)    at d: rows that arrived, by (local expert, source). Each put_signal of dispatch adds 1.
  [E, 2E)   at r: results that came back, by expert. Each put_signal of combine adds 1.
  [2E, 3E)  at d: announcements, by (local expert, source). One signal an iteration adds rows + 1, so that "none" is
            told from "not yet". It is posted behind the rows on the same channel: whoever sees it sees them (SIG-2).

Memory is there twice, for even and for odd iterations. A rank starts iteration i + 1 when all its results of i are
back, so by i + 2 whatever it wrote in i has been read; and its own tickets of i are waited for before their targets and
sources are written again (PUT-7, PUT-3).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import COMMAND_DTYPE, Channel, Communicator, Op, Ticket
from .tokens import Bf16, apply_experts, combine

SIGNALS_PER_EXPERT = 3


@dataclass(frozen=True)
class Shape:
    ranks: int
    experts: int
    hidden: int
    tokens: int  # most that a rank has
    slots: int  # most rows between two ranks

    @property
    def row_bytes(self) -> int:
        return 2 * self.hidden

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks

    @property
    def heap_bytes(self) -> int:
        return 2 * self.row_bytes * (max(self.tokens, 1) + 3 * self.ranks * max(self.slots, 1))


class SignalOrderBroken(Exception):
    """The announcement of rows was seen before their own signals."""


class Exchange:
    def __init__(self, comm: Communicator, shape: Shape, timeout: float) -> None:
        self._comm, self._shape, self._timeout = comm, shape, timeout
        self._channels = [comm.channel(index) for index in range(comm.info.channels)]
        self._batch = 1 << comm.info.ring_log2
        self._next = self._parity = 0
        self._x = self._region((max(shape.tokens, 1),))
        self._arrived = self._region((shape.ranks, max(shape.slots, 1)))
        self._results = self._region((shape.ranks, max(shape.slots, 1)))
        self._returned = self._region((shape.ranks, max(shape.slots, 1)))
        self._seen = np.zeros((SIGNALS_PER_EXPERT, shape.experts), np.int64)
        # Tickets of dispatch and combine, of even and odd iterations.
        self._tickets: list[list[Ticket]] = [[], []]
        self.rows_sent = self.rows_received = 0

    def _region(self, shape: tuple[int, ...]) -> _Region:
        region = _Region(self._comm, self._next, shape, self._shape.hidden)
        self._next += region.nbytes
        return region

    def begin(self, iteration: int, x: Bf16, topk_idx: npt.NDArray[np.int64]) -> None:
        """Put the tokens into the heap and prepare the commands of dispatch."""
        shape, rank = self._shape, self._comm.rank
        self._parity = iteration % 2
        for ticket in self._tickets[self._parity]:
            ticket.wait(self._timeout)
        self._tickets[self._parity] = []
        self._x.rows[self._parity][: len(x)] = x

        self._token, self._k = np.nonzero(topk_idx >= 0)
        self._topk_idx = topk_idx
        self._expert = topk_idx[self._token, self._k]
        self._target = self._expert // shape.local_experts
        self._counts = np.bincount(self._expert, minlength=shape.experts)
        # A row's slot: its place among the rows for the same rank, by expert.
        order = np.argsort(self._expert, kind="stable")
        before = np.concatenate(([0], np.cumsum(self._counts)))[:: shape.local_experts]
        self._slot = np.empty(len(order), np.int64)
        self._slot[order] = np.arange(len(order)) - before[self._target[order]]

        rows = self._commands(len(self._token), Op.PUT_SIGNAL)
        rows["target"] = self._target
        rows["local"] = self._x.offset(self._parity, self._token)
        rows["remote"] = self._arrived.offset(self._parity, rank, self._slot)
        rows["slot"] = (self._expert % shape.local_experts) * shape.ranks + rank
        announcements = self._commands(shape.experts, Op.SIGNAL)
        experts = np.arange(shape.experts)
        announcements["target"] = experts // shape.local_experts
        announcements["slot"] = 2 * shape.experts + (experts % shape.local_experts) * shape.ranks + rank
        announcements["add"] = self._counts + 1
        # What an expert gets goes over one channel, so that its announcement comes behind its rows.
        self._dispatch = self._by_channel([(self._expert, rows), (experts, announcements)])
        self.rows_sent = len(rows)

    def dispatch(self) -> tuple[float, float]:
        """Send, and wait until all that is sent here has arrived. Seconds: posting, and all."""
        shape, comm = self._shape, self._comm
        start = time.perf_counter()
        self._post(self._dispatch)
        posted = time.perf_counter()
        arrivals = np.zeros((shape.local_experts, shape.ranks), np.int64)
        for source in self._others_first():
            for expert in range(shape.local_experts):
                word = expert * shape.ranks + source
                seen = int(self._seen[2, word])
                now = comm.wait_signal(2 * shape.experts + word, seen + 1, timeout=self._timeout, source=source)
                arrivals[expert, source] = now - seen - 1
                self._seen[2, word] = now
        end = time.perf_counter()
        self._arrivals = arrivals
        return posted - start, end - start

    def check_arrivals(self) -> None:
        """Each row's own signal came before the announcement (SIG-5): there is no wait, and one right number."""
        shape = self._shape
        for word, rows in enumerate(self._arrivals.ravel()):
            expected = int(self._seen[0, word] + rows)
            found = self._comm.read_signal(word)
            if found != expected:
                raise SignalOrderBroken(
                    f"local expert {word // shape.ranks} of rank {self._comm.rank} was told of {rows} rows from rank "
                    f"{word % shape.ranks}, and the word that counts them is at {found}, not {expected}"
                )
            self._seen[0, word] = expected

    def experts(self) -> None:
        """Compute results, and prepare the commands of combine."""
        shape, rank = self._shape, self._comm.rank
        local = np.arange(shape.local_experts) + rank * shape.local_experts
        batches = []
        for source in range(shape.ranks):
            expert = np.repeat(local, self._arrivals[:, source])
            rows = self._arrived.rows[self._parity, source][: len(expert)]
            self._results.rows[self._parity, source][: len(expert)] = apply_experts(rows, expert)
            slot = np.arange(len(expert))
            commands = self._commands(len(expert), Op.PUT_SIGNAL)
            commands["target"] = source
            commands["local"] = self._results.offset(self._parity, source, slot)
            commands["remote"] = self._returned.offset(self._parity, rank, slot)
            commands["slot"] = shape.experts + expert
            batches.append((slot, expert, commands))
        self.rows_received = sum(len(commands) for _, _, commands in batches)
        # Sources take turns, so that none waits for the whole of another.
        turn = np.argsort(np.concatenate([slot for slot, _, _ in batches]), kind="stable")
        expert = np.concatenate([expert for _, expert, _ in batches])[turn]
        self._combine = self._by_channel([(expert, np.concatenate([commands for _, _, commands in batches])[turn])])

    def combine(self) -> tuple[float, float]:
        """Send results, and wait until all of this rank's are back. Seconds: posting, and all."""
        shape, comm = self._shape, self._comm
        start = time.perf_counter()
        self._post(self._combine)
        posted = time.perf_counter()
        for expert in np.flatnonzero(self._counts):
            self._seen[1, expert] += self._counts[expert]
            comm.wait_signal(
                shape.experts + int(expert),
                int(self._seen[1, expert]),
                timeout=self._timeout,
                source=int(expert) // shape.local_experts,
            )
        return posted - start, time.perf_counter() - start

    def reduce(self, topk_weights: npt.NDArray[np.float32]) -> Bf16:
        """The weighted sum of what came back."""
        rows = self._returned.rows[self._parity]
        where = np.full(self._topk_idx.shape, -1)
        where[self._token, self._k] = self._target * rows.shape[1] + self._slot
        return combine(rows.reshape(-1, self._shape.hidden), where, topk_weights)

    def finish(self) -> None:
        self._comm.quiet(self._timeout)

    # ------------------------------------------------------------------------------------------------------- commands

    def _commands(self, count: int, op: Op) -> npt.NDArray[Any]:
        commands = np.zeros(count, COMMAND_DTYPE)
        commands["op"] = op
        if op == Op.PUT_SIGNAL:
            commands["bytes"] = self._shape.row_bytes
            commands["granularity"] = self._comm.info.granularity
            commands["add"] = 1
        return commands

    def _by_channel(
        self, parts: list[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]
    ) -> list[tuple[Channel, npt.NDArray[Any]]]:
        count = len(self._channels)
        return [
            (channel, np.concatenate([commands[expert % count == channel.index] for expert, commands in parts]))
            for channel in self._channels
        ]

    def _post(self, work: list[tuple[Channel, npt.NDArray[Any]]]) -> None:
        """In batches as large as a ring, the channels in turn."""
        longest = max(len(commands) for _, commands in work)
        last: dict[int, Ticket] = {}
        for begin in range(0, longest, self._batch):
            for channel, commands in work:
                batch = commands[begin : begin + self._batch]
                if len(batch):
                    last[channel.index] = channel.post_many(batch, timeout=self._timeout)
        self._tickets[self._parity].extend(last.values())

    def _others_first(self) -> list[int]:
        """The own rows come at once: look at them last."""
        ranks, rank = self._shape.ranks, self._comm.rank
        return [(rank + distance) % ranks for distance in range(1, ranks + 1)]


class _Region:
    """Rows of the heap, for even and odd iterations: [2, *shape, hidden]."""

    def __init__(self, comm: Communicator, begin: int, shape: tuple[int, ...], hidden: int) -> None:
        self._begin, self._row_bytes = begin, 2 * hidden
        self._shape = (2, *shape)
        self.nbytes = int(np.prod(self._shape)) * self._row_bytes
        self.rows: Bf16 = comm.heap[begin : begin + self.nbytes].view(np.uint16).reshape(*self._shape, hidden)

    def offset(self, *index: Any) -> npt.NDArray[np.uint64]:
        row = np.ravel_multi_index(np.broadcast_arrays(*index), self._shape)
        return np.asarray(self._begin + row * self._row_bytes, np.uint64)
