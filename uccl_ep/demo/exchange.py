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

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import COMMAND_DTYPE, Communicator, Op
from .tokens import Bf16, apply_experts, combine
from .traffic import Batch, Commands, Traffic, Wait

SIGNALS_PER_EXPERT = 3


@dataclass(frozen=True)
class Shape:
    ranks: int
    experts: int
    hidden: int
    tokens: int  # most that a rank has
    topk: int
    slots: int  # most rows between two ranks

    @property
    def row_bytes(self) -> int:
        return 2 * self.hidden

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks

    @property
    def commands(self) -> int:
        """Most that a rank posts at a time."""
        return max(self.tokens * self.topk, self.ranks * self.slots) + self.experts

    @property
    def waits(self) -> int:
        """Most signals that it waits for at a time."""
        return self.experts

    @property
    def heap_bytes(self) -> int:
        return 2 * self.row_bytes * (max(self.tokens, 1) + 3 * self.ranks * max(self.slots, 1))


class SignalOrderBroken(Exception):
    """The announcement of rows was seen before their own signals."""


class Exchange:
    def __init__(self, comm: Communicator, shape: Shape, traffic: Traffic) -> None:
        self._comm, self._shape, self._traffic = comm, shape, traffic
        self._next = self._parity = 0
        self._x = self._region((max(shape.tokens, 1),))
        self._arrived = self._region((shape.ranks, max(shape.slots, 1)))
        self._results = self._region((shape.ranks, max(shape.slots, 1)))
        self._returned = self._region((shape.ranks, max(shape.slots, 1)))
        self._seen = np.zeros((SIGNALS_PER_EXPERT, shape.experts), np.int64)
        self.rows_sent = self.rows_received = 0

    def _region(self, shape: tuple[int, ...]) -> _Region:
        region = _Region(self._traffic, self._next, shape, self._shape.hidden)
        self._next += region.nbytes
        return region

    def begin(self, iteration: int, x: Bf16, topk_idx: npt.NDArray[np.int64]) -> None:
        """Put the tokens into the heap and prepare the commands of dispatch."""
        shape, rank = self._shape, self._comm.rank
        self._parity = iteration % 2
        self._traffic.release(self._parity)
        rows = self._x.load(self._parity)
        rows[: len(x)] = x
        self._x.store(self._parity, rows)

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

        puts = self._commands(len(self._token), Op.PUT_SIGNAL)
        puts["target"] = self._target
        puts["local"] = self._x.offset(self._parity, self._token)
        puts["remote"] = self._arrived.offset(self._parity, rank, self._slot)
        puts["slot"] = (self._expert % shape.local_experts) * shape.ranks + rank
        announcements = self._commands(shape.experts, Op.SIGNAL)
        experts = np.arange(shape.experts)
        announcements["target"] = experts // shape.local_experts
        announcements["slot"] = 2 * shape.experts + (experts % shape.local_experts) * shape.ranks + rank
        announcements["add"] = self._counts + 1
        # What an expert gets goes over one channel, so that its announcement comes behind its rows.
        self._dispatch = self._by_channel((self._expert, puts), (experts, announcements))
        self.rows_sent = len(puts)

    def dispatch(self) -> tuple[float, float]:
        """Send, and wait until all that is sent here has arrived. Seconds: posting, and all."""
        shape = self._shape
        words = [
            expert * shape.ranks + source for source in self._others_first() for expert in range(shape.local_experts)
        ]
        waits = [Wait(2 * shape.experts + w, int(self._seen[2, w]) + 1, w % shape.ranks) for w in words]
        done = self._traffic.exchange(self._parity, self._dispatch, waits)
        arrivals = np.zeros(shape.local_experts * shape.ranks, np.int64)
        now = done.seen.astype(np.int64)
        arrivals[words] = now - self._seen[2, words] - 1
        self._seen[2, words] = now
        self._arrivals = arrivals.reshape(shape.local_experts, shape.ranks)
        return done.posted, done.all

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
        arrived, results = self._arrived.load(self._parity), self._results.load(self._parity)
        for source in range(shape.ranks):
            expert = np.repeat(local, self._arrivals[:, source])
            results[source, : len(expert)] = apply_experts(arrived[source, : len(expert)], expert)
            slot = np.arange(len(expert))
            commands = self._commands(len(expert), Op.PUT_SIGNAL)
            commands["target"] = source
            commands["local"] = self._results.offset(self._parity, source, slot)
            commands["remote"] = self._returned.offset(self._parity, rank, slot)
            commands["slot"] = shape.experts + expert
            batches.append((slot, expert, commands))
        self._results.store(self._parity, results)
        self.rows_received = sum(len(commands) for _, _, commands in batches)
        # Sources take turns, so that none waits for the whole of another.
        turn = np.argsort(np.concatenate([slot for slot, _, _ in batches]), kind="stable")
        expert = np.concatenate([expert for _, expert, _ in batches])[turn]
        commands = np.concatenate([commands for _, _, commands in batches])[turn]
        self._combine = self._by_channel((expert, commands), (expert[:0], commands[:0]))

    def combine(self) -> tuple[float, float]:
        """Send results, and wait until all of this rank's are back. Seconds: posting, and all."""
        shape = self._shape
        mine = np.flatnonzero(self._counts)
        self._seen[1, mine] += self._counts[mine]
        waits = [
            Wait(shape.experts + expert, int(self._seen[1, expert]), expert // shape.local_experts)
            for expert in mine.tolist()
        ]
        done = self._traffic.exchange(self._parity, self._combine, waits)
        return done.posted, done.all

    def reduce(self, topk_weights: npt.NDArray[np.float32]) -> Bf16:
        """The weighted sum of what came back."""
        rows = self._returned.load(self._parity)
        where = np.full(self._topk_idx.shape, -1)
        where[self._token, self._k] = self._target * rows.shape[1] + self._slot
        return combine(rows.reshape(-1, self._shape.hidden), where, topk_weights)

    def finish(self) -> None:
        for parity in (0, 1):
            self._traffic.release(parity)

    # ------------------------------------------------------------------------------------------------------- commands

    def _commands(self, count: int, op: Op) -> Commands:
        commands = np.zeros(count, COMMAND_DTYPE)
        commands["op"] = op
        if op == Op.PUT_SIGNAL:
            commands["bytes"] = self._shape.row_bytes
            commands["granularity"] = self._comm.info.granularity
            commands["add"] = 1
        return commands

    def _by_channel(
        self, rows: tuple[npt.NDArray[np.int64], Commands], behind: tuple[npt.NDArray[np.int64], Commands]
    ) -> list[Batch]:
        """Each with the expert of each command, which says its channel."""
        count = self._comm.info.channels
        return [
            Batch(*(commands[expert % count == channel] for expert, commands in (rows, behind)))
            for channel in range(count)
        ]

    def _others_first(self) -> list[int]:
        """The own rows come at once: look at them last."""
        ranks, rank = self._shape.ranks, self._comm.rank
        return [(rank + distance) % ranks for distance in range(1, ranks + 1)]


class _Region:
    """Rows of the heap, for even and odd iterations: [2, *shape, hidden]."""

    def __init__(self, traffic: Traffic, begin: int, shape: tuple[int, ...], hidden: int) -> None:
        self._traffic, self._begin, self._row_bytes = traffic, begin, 2 * hidden
        self._shape = (2, *shape)
        self.nbytes = int(np.prod(self._shape)) * self._row_bytes

    def load(self, parity: int) -> Bf16:
        """[*shape, hidden]: the heap itself, or a copy that store() brings back."""
        half = self.nbytes // 2
        data = self._traffic.load(self._begin + parity * half, half)
        return data.view(np.uint16).reshape(*self._shape[1:], -1)

    def store(self, parity: int, rows: Bf16) -> None:
        self._traffic.store(self._begin + parity * (self.nbytes // 2), rows.reshape(-1).view(np.uint8))

    def offset(self, *index: Any) -> npt.NDArray[np.uint64]:
        row = np.ravel_multi_index(np.broadcast_arrays(*index), self._shape)
        return np.asarray(self._begin + row * self._row_bytes, np.uint64)
