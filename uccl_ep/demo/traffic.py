# SPDX-License-Identifier: Apache-2.0
"""Who posts an exchange's commands and waits for its signals: the CPU, or a kernel; and where the heap lies.

exchange.py says what is sent; it does not know who sends it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .. import COMMAND_DTYPE, Communicator, Ticket

if TYPE_CHECKING:
    from ..accel import Accelerator, Buffer

Commands = npt.NDArray[Any]  # of COMMAND_DTYPE

# demo.h
_BATCH = np.dtype([("begin", "u8"), ("rows_end", "u8"), ("end", "u8")])
_WAIT = np.dtype([("value", "u8"), ("slot", "u4"), ("source", "u4")])
_TIMES = np.dtype([("begin", "u8"), ("posted", "u8"), ("end", "u8")])
_WARPS = 8  # of a block


class Batch(NamedTuple):
    """What one channel posts: rows in any order, then what announces them."""

    rows: Commands
    behind: Commands


class Wait(NamedTuple):
    slot: int
    value: int
    source: int


@dataclass
class Done:
    seen: npt.NDArray[np.uint64]  # what each signal was
    posted: float  # seconds
    all: float


class Traffic(Protocol):
    def release(self, parity: int) -> None:
        """Until what was posted in the last iteration of this parity is complete."""
        ...

    def exchange(self, parity: int, batches: Sequence[Batch], waits: Sequence[Wait]) -> Done: ...

    def load(self, begin: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """A part of the heap, to look at."""
        ...

    def store(self, begin: int, data: npt.NDArray[np.uint8]) -> None:
        """The other way; load()'s own array need not be moved."""
        ...


class HostTraffic:
    """The CPU posts and waits; the heap is the library's."""

    def __init__(self, comm: Communicator, timeout: float) -> None:
        self._comm, self._timeout = comm, timeout
        self._channels = [comm.channel(index) for index in range(comm.info.channels)]
        self._batch = 1 << comm.info.ring_log2
        # Tickets of dispatch and combine, of even and odd iterations.
        self._tickets: list[list[Ticket]] = [[], []]

    def release(self, parity: int) -> None:
        for ticket in self._tickets[parity]:
            ticket.wait(self._timeout)
        self._tickets[parity] = []

    def exchange(self, parity: int, batches: Sequence[Batch], waits: Sequence[Wait]) -> Done:
        start = time.perf_counter()
        self._post(parity, [np.concatenate(batch) for batch in batches])
        posted = time.perf_counter()
        seen = [self._comm.wait_signal(w.slot, w.value, timeout=self._timeout, source=w.source) for w in waits]
        return Done(np.array(seen, np.uint64), posted - start, time.perf_counter() - start)

    def _post(self, parity: int, work: list[Commands]) -> None:
        """In batches as large as a ring, the channels in turn."""
        last: dict[int, Ticket] = {}
        for begin in range(0, max(map(len, work)), self._batch):
            for channel, commands in zip(self._channels, work, strict=True):
                batch = commands[begin : begin + self._batch]
                if len(batch):
                    last[channel.index] = channel.post_many(batch, timeout=self._timeout)
        self._tickets[parity].extend(last.values())

    def load(self, begin: int, nbytes: int) -> npt.NDArray[np.uint8]:
        return self._comm.heap[begin : begin + nbytes]

    def store(self, begin: int, data: npt.NDArray[np.uint8]) -> None:
        pass  # it is the heap


class KernelTraffic:
    """A kernel (demo.cu) posts and waits, a block a channel. `heap`: device memory, which the CPU reaches by copies;
    None: the library's, in host memory."""

    def __init__(
        self, comm: Communicator, gpu: Accelerator, heap: Buffer | None, commands: int, waits: int, timeout: float
    ) -> None:
        self._comm, self._gpu, self._heap, self._timeout = comm, gpu, heap, timeout
        channels = comm.info.channels
        # All that a driver may make wait comes before the first kernel.
        self._kernel = gpu.own("demo").kernel("demo_exchange")
        self._stream = gpu.stream()
        self._commands = gpu.pinned(max(commands, 1) * COMMAND_DTYPE.itemsize)
        self._batches = gpu.pinned(channels * _BATCH.itemsize)
        self._waits = gpu.pinned(max(waits, 1) * _WAIT.itemsize)
        self._seen = gpu.pinned(max(waits, 1) * 8)
        self._times = gpu.pinned(channels * _TIMES.itemsize)

    def release(self, parity: int) -> None:
        self._comm.quiet(self._timeout)

    def exchange(self, parity: int, batches: Sequence[Batch], waits: Sequence[Wait]) -> Done:
        commands = self._view(self._commands, COMMAND_DTYPE)
        table = self._view(self._batches, _BATCH)
        at = 0
        for channel, batch in enumerate(batches):
            rows_end = at + len(batch.rows)
            end = rows_end + len(batch.behind)
            commands[at:rows_end], commands[rows_end:end] = batch
            table[channel] = at, rows_end, end
            at = end
        self._view(self._waits, _WAIT)[: len(waits)] = [(w.value, w.slot, w.source) for w in waits]
        width, clock = self._gpu.info.warp_size, self._gpu.info.clock_hz
        job = np.array(
            [
                *(each.address for each in (self._commands, self._batches, self._waits, self._seen, self._times)),
                len(waits),
                min(width, 1 << self._comm.info.ring_log2),
            ],
            np.uint64,
        )
        self._kernel.launch(self._stream, len(batches), _WARPS * width, [self._comm.device(), job.tobytes()])
        # Every wait of the kernel has this deadline, one after the other.
        self._stream.synchronize(timeout=2 * self._timeout + 10)
        self._comm.check_device()
        times = self._view(self._times, _TIMES)[: len(batches)]
        begin = int(times["begin"].min())
        posted, end = (int(times[name].max()) - begin for name in ("posted", "end"))
        return Done(self._view(self._seen, np.dtype(np.uint64))[: len(waits)].copy(), posted / clock, end / clock)

    @staticmethod
    def _view(memory: Buffer, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        return memory.array[: memory.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)

    def load(self, begin: int, nbytes: int) -> npt.NDArray[np.uint8]:
        if self._heap is None:
            return self._comm.heap[begin : begin + nbytes]
        data = np.empty(nbytes, np.uint8)
        self._heap.slice(begin, nbytes).copy_to(data)
        return data

    def store(self, begin: int, data: npt.NDArray[np.uint8]) -> None:
        if self._heap is not None:
            self._heap.copy_from(data, begin)


@contextlib.contextmanager
def opened(accel: str | None) -> Iterator[Accelerator | None]:
    """The accelerator asked for. Nothing of a vendor is imported before it is."""
    if accel is None:
        yield None
        return
    from .. import accel as accelerators

    with accelerators.open(accel) as gpu:
        gpu.own("demo")  # one that cannot run it says so before ranks meet
        yield gpu
