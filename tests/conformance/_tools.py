# SPDX-License-Identifier: Apache-2.0
"""What the cases share: where data lies in a heap, messages that identify themselves, commands in both forms.

The encoder here is a second one, written from the field table of command.h alone: a mistake in the library's own codec
shows as a difference instead of cancelling out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from uccl_ep.conformance import patterns
from uccl_ep.conformance.bench import Bench
from uccl_ep.conformance.context import Context
from uccl_ep.conformance.patterns import Bytes

PUT, SIGNAL, PUT_SIGNAL, FLUSH = 1, 2, 3, 4
MASK = (1 << 64) - 1

# 0, 1, 2 granules; every MTU less one, exact, and one more; a page; 64 KiB.
SIZES = tuple(
    sorted({0, 16, 32, 48} | {m + d for m in (256, 512, 1024, 2048, 4096, 8192, 65536) for d in (-16, 0, 16)})
)
FINE_SIZES = tuple(
    sorted({0, 4, 8, 12, 20, 60} | {m + d for m in (256, 512, 1024, 2048, 4096, 65536) for d in (-4, 0, 4)})
)
# Largest command: 2^19 - 1 granules.
LARGEST = {16: ((1 << 19) - 1) * 16, 4: ((1 << 19) - 1) * 4}


def message(ctx: Context, nbytes: int, source: int, target: int, sequence: int) -> Bytes:
    """What rank `source` sends to `target` as its message number `sequence`."""
    return patterns.data(nbytes, ctx.seed, "message", source, target, sequence)


class Layout:
    """Every rank's heap in the same way: a part of sources for each target, a part to land in for each source."""

    def __init__(self, bench: Bench) -> None:
        self.ranks = bench.size
        self.room = bench.heap.size // 2 // self.ranks // 4096 * 4096

    def source(self, target: int) -> int:
        return target * self.room

    def landing(self, source: int) -> int:
        return (self.ranks + source) * self.room


def neighbours(ctx: Context) -> tuple[int, int]:
    """(whom this rank sends to, from whom it receives): one ring over all ranks."""
    return (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size


def driven(ctx: Context, b: Bench, condition: Callable[[], bool]) -> bool:
    """Call progress until `condition` holds: for communicators in which nothing moves otherwise; what it came to."""

    def turn() -> bool:
        b.comm.progress()
        return condition()

    return ctx.until(turn)


def commands(entries: Sequence[dict[str, Any]]) -> npt.NDArray[Any]:
    """Commands in their plain form, for post_many."""
    from uccl_ep import COMMAND_DTYPE

    array = np.zeros(len(entries), dtype=COMMAND_DTYPE)
    for i, entry in enumerate(entries):
        for name, value in entry.items():
            array[i][name] = value
    return array


def put_command(target: int, local: int, remote: int, nbytes: int, granularity: int = 16) -> dict[str, Any]:
    return {"op": PUT, "target": target, "local": local, "remote": remote, "bytes": nbytes, "granularity": granularity}


def put_words(
    target: int,
    local: int,
    remote: int,
    nbytes: int,
    *,
    op: int = PUT,
    slot: int = 0,
    add: int = 0,
    granularity: int = 16,
) -> tuple[int, int]:
    """The two words of PUT or PUT_SIGNAL; values that do not fit are the caller's own fault."""
    fine = int(granularity == 4)
    return (
        op | fine << 3 | local // granularity << 4 | slot << 36 | add << 50,
        remote // granularity | nbytes // granularity << 32 | target << 51,
    )


def signal_words(target: int, slot: int, add: int) -> tuple[int, int]:
    low, high = add & 0xFFFFFFFF, add >> 32
    return SIGNAL | low << 4 | (slot & 0xFFFF) << 36, high | slot >> 16 << 32 | target << 51


def raw(words: Sequence[tuple[int, int]]) -> npt.NDArray[np.uint64]:
    return np.array(words, dtype=np.uint64).reshape(-1, 2)


def send_round(
    ctx: Context, b: Bench, sizes: Sequence[int], *, channel: int = 0, slot: int = 0, fused: bool = True
) -> None:
    """Send a message of each size around the ring of ranks, all posted at once; look at each as its signal shows it."""
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel(channel)
    step = b.granularity
    at = 0
    spans = []
    for size in sizes:
        spans.append((at, size))
        at += (size + 2 * step) // step * step  # a gap of one granule or two: a byte too many is seen
    assert at <= layout.room, f"{at} bytes do not fit {layout.room}"
    for sequence, (offset, size) in enumerate(spans):
        b.place(layout.source(to) + offset, message(ctx, size, ctx.rank, to, sequence))
    ctx.barrier()
    first = b.comm.read_signal(slot)
    ctx.barrier()
    for offset, size in spans:
        if fused:
            ch.put_signal(to, layout.source(to) + offset, layout.landing(ctx.rank) + offset, size, slot)
        else:
            ch.put(to, layout.source(to) + offset, layout.landing(ctx.rank) + offset, size)
            ch.signal(to, slot)
    clause = "SIG-3" if fused and "SIG-3" in ctx.case.clauses else "SIG-2" if "SIG-2" in ctx.case.clauses else "PUT-1"
    for sequence, (offset, size) in enumerate(spans):
        b.wait_signal(slot, first + sequence + 1, "SIG-1")
        want = message(ctx, size, source, ctx.rank, sequence)
        b.compare(
            layout.landing(source) + offset,
            want,
            clause,
            "a signal is visible and the bytes before it are not",
            sequence=sequence,
            size=size,
        )
        b.expect(layout.landing(source) + offset, want)
        b.expect_signal(slot)
