# SPDX-License-Identifier: Apache-2.0
"""Callers that are wrong: each relies on an order that the contract does not give, in a way that works on some NICs.

Each is written twice, in one function: wrong, and right. On the profile of its mutant the wrong one must be caught and
the right one must pass; otherwise the NIC would be a friendlier one than the contract admits, or the suite blind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..conformance import patterns
from ..conformance.context import Context
from ..conformance.registry import Case

_SIZE = 2048
_ROUNDS = 60


def _data(ctx: Context, source: int, r: int) -> patterns.Bytes:
    return patterns.data(_SIZE, ctx.seed, "program", source, r)


def flag_after_data(ctx: Context, wrong: bool) -> None:
    """A put of data, then a put of a flag behind it; the reader polls the flag. Right: a signal."""
    b = ctx.bench
    flag = 64 << 10
    for r in range(_ROUNDS):
        if ctx.rank == 0:
            b.place(0, _data(ctx, 0, r))
            b.place(flag, patterns.data(16, ctx.seed, "flag", r))
            b.channel().put(1, 0, 4096, _SIZE)
            if wrong:
                b.channel().put(1, flag, flag + 64, 16)
            else:
                b.channel().signal(1, 0)
            b.quiet()
        else:
            want = patterns.data(16, ctx.seed, "flag", r)
            if wrong:
                while not (b.heap[flag + 64 : flag + 80] == want).all() and ctx.now() < ctx.deadline:
                    ctx.sleep(0.0)
            else:
                b.wait_signal(0, r + 1)
                b.expect_signal(0)
            b.compare(4096, _data(ctx, 0, r), "PUT-5", "a flag is there and the data put before it is not", round=r)
        ctx.barrier()
    b.loosen(0, 1 << 20)


def source_changed_early(ctx: Context, wrong: bool) -> None:
    """The source is stored to again once the target says, by other ways, that it has it. Right: after quiet_source."""
    b = ctx.bench
    for r in range(4 * _ROUNDS):
        if ctx.rank == 0:
            b.place(0, _data(ctx, 0, r))
            ticket = b.channel().put_signal(1, 0, 4096, _SIZE, 0)
            ctx.barrier()  # the reader has seen it
            if not wrong:
                ticket.wait_source()
            b.place(0, patterns.data(_SIZE, ctx.seed, "later", r))
            b.quiet()
        else:
            b.wait_signal(0, r + 1)
            b.expect_signal(0)
            ctx.barrier()
        ctx.barrier()
        if ctx.rank == 1:
            message = "a source was read after it was changed without quiet_source"
            b.compare(4096, _data(ctx, 0, r), "PUT-3", message, round=r)
        ctx.barrier()
    b.loosen(0, 1 << 20)


def target_rewritten_early(ctx: Context, wrong: bool) -> None:
    """The reader stores into the slot as soon as it has read it. Right: once the put is complete at its sender."""
    b = ctx.bench
    for r in range(4 * _ROUNDS):
        if ctx.rank == 0:
            b.place(0, _data(ctx, 0, r))
            ticket = b.channel().put_signal(1, 0, 4096, _SIZE, 0)
            if not wrong:
                ticket.wait()
                b.channel().signal(1, 2)
            b.quiet()
        else:
            b.wait_signal(0, r + 1)
            b.expect_signal(0)
            if not wrong:
                b.wait_signal(2, r + 1)
                b.expect_signal(2)
            b.heap[4096 : 4096 + _SIZE] = patterns.data(_SIZE, ctx.seed, "own", r)
        ctx.barrier()
        if ctx.rank == 1:
            own = patterns.data(_SIZE, ctx.seed, "own", r)
            b.compare(4096, own, "PUT-7", "a slot that was rewritten before its put was complete changed back", round=r)
        ctx.barrier()
    b.loosen(0, 1 << 20)


PROGRAMS: dict[str, tuple[str, Callable[[Context, bool], None]]] = {
    "flag_after_data": ("PUT-5", flag_after_data),
    "source_changed_early": ("PUT-3", source_changed_early),
    "target_rewritten_early": ("PUT-7", target_rewritten_early),
}


def case_of(name: str, *, wrong: bool) -> Case:
    clause, function = PROGRAMS[name]

    def body(ctx: Context) -> None:
        function(ctx, wrong)

    body.__doc__ = function.__doc__
    options: dict[str, Any] = {"heap_bytes": 1 << 20}
    return Case(f"program.{name}", body, (clause,), ranks=(2,), comm=options)
