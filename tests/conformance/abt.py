# SPDX-License-Identifier: Apache-2.0
"""Abort and close: ABT-1."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from uccl_ep.conformance.context import Context
from uccl_ep.conformance.registry import case
from uccl_ep.errors import Aborted, ChannelClosed, PeerLost, UcclEpError

from ._tools import neighbours

# Milliseconds, where threads run when they can. Well below the timeout that a wait without the abort would run into.
SOON = 5.0


@case("abt1.ends_waits", clauses=("ABT-1",), ranks=(2,), needs=("threads",), comm={"ring_log2": 4})
def ends_waits(ctx: Context) -> None:
    """Every kind of wait, in several threads, ends with Aborted soon after an abort from another thread."""
    b = ctx.bench
    began: list[float] = []

    def wait(kind: int) -> tuple[str, float]:
        try:
            if kind == 0:
                b.comm.wait_signal(1, 1)
            elif kind == 1:
                b.comm.wait_signal(1, 1, source=1 - ctx.rank)
            else:
                while True:
                    b.channel().signal(ctx.rank, 2)
                    b.comm.quiet()
        except UcclEpError as error:
            return type(error).__name__, ctx.now()
        return "returned", ctx.now()

    tasks = [ctx.spawn(wait, kind) for kind in (0, 1, 2, 2)]
    ctx.sleep(ctx.moment(0.02))  # so that they are inside; if not, they must find the abort on their way in
    began.append(ctx.now())
    b.comm.abort("the conformance suite says so")
    b.broken = True
    for kind, (name, ended) in enumerate(ctx.join(tasks)):
        ctx.check_equal(name, "Aborted", "ABT-1", "a wait did not end with Aborted", kind=kind)
        ctx.check(
            ended - began[0] < SOON * ctx.time_scale,
            "ABT-1",
            "a wait outlived the abort",
            kind=kind,
            seconds=round(ended - began[0], 3),
        )
    ctx.barrier()


@case("abt1.final", clauses=("ABT-1",), ranks=(2,))
def final(ctx: Context) -> None:
    """After an abort everything but close is refused with its reason; closing works, and a new start too."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    ticket = b.channel().signal(to, 0)
    ticket.wait()
    ctx.barrier()
    b.comm.abort("because of the weather")
    b.comm.abort("again")
    b.broken = True
    posts = {
        "put": lambda: b.channel().put(to, 0, 4096, 16),
        "signal": lambda: b.channel().signal(to, 0),
        "put_signal": lambda: b.channel().put_signal(to, 0, 8192, 16, 0),
    }
    for name, post in posts.items():
        caught = ctx.refused("ABT-1", Aborted, f"{name} after an abort", post)
        ctx.check(
            "weather" in str(caught[0]), "ABT-1", "the reason of the abort is not told", call=name, got=str(caught[0])
        )
    waits: dict[str, Callable[[], object]] = {
        "quiet": lambda: b.comm.quiet(),
        "quiet_source": lambda: b.comm.quiet_source(),
        "wait_signal": lambda: b.comm.wait_signal(9, 1),
    }
    for name, call in waits.items():
        with ctx.raises("ABT-1", Aborted, f"{name} after an abort") as caught:
            call()
        ctx.check(
            "weather" in str(caught[0]), "ABT-1", "the reason of the abort is not told", call=name, got=str(caught[0])
        )
    ctx.barrier()
    ctx.close(b)
    again = ctx.open()
    again.channel().signal(to, 0).wait()
    again.expect_signal(0)
    ctx.close(again)


@case("abt1.own_communicator", clauses=("ABT-1", "SIG-1"), ranks=(2, 3))
def own_communicator(ctx: Context) -> None:
    """An abort ends the communicator that it was called on, and no other one of the process."""
    kept = ctx.open(name="kept")
    ended = ctx.open(name="ended", shadow=False)
    ended.broken = True
    to, _ = neighbours(ctx)
    for _ in range(10):
        kept.channel().signal(to, 0)
    ctx.barrier()
    ended.comm.abort("only this one")
    for _ in range(10):
        kept.channel().signal(to, 0)
    kept.quiet(clause="ABT-1")
    kept.wait_signal(0, 20)
    kept.expect_signal(0, 20)
    ctx.refused("ABT-1", Aborted, "a post of the aborted one", lambda: ended.channel().signal(to, 0))
    with ctx.raises("ABT-1", Aborted, "a quiet of the aborted one"):
        ended.comm.quiet()
    ctx.close(ended)
    for _ in range(5):
        kept.channel().signal(to, 0)
    kept.wait_signal(0, 25)
    kept.expect_signal(0, 5)


@case("abt1.close_under_load", clauses=("ABT-1",), ranks=(2,), needs=("threads",), timeout=40)
def close_under_load(ctx: Context) -> None:
    """Close while eight threads post, fifteen times: they are told, nobody crashes, nothing remains."""
    for r in range(ctx.times(15)):
        b = ctx.open(shadow=False, channels=2, ring_log2=5)
        b.broken = True

        def post(t: int, b: object = b) -> str:
            comm = b.comm  # type: ignore[attr-defined]
            area = (1 << 19) + (ctx.rank * 8 + t) * (1 << 15)
            try:
                for k in itertools.count():
                    comm.channel(t % 2).put_signal(t % 2, 0, area + k % 128 * 256, 256, t)
                    # The rest at the end of their areas: the same bytes are written again (PUT-7).
                    if t % 3 == 0 or k % 128 == 127:
                        comm.quiet()
            except (Aborted, ChannelClosed, PeerLost) as error:
                return type(error).__name__

        tasks = [ctx.spawn(post, t) for t in range(8)]
        ctx.sleep(ctx.moment(float(ctx.rng.random()) * 0.01))
        ctx.close(b)
        for name in ctx.join(tasks):
            ctx.check(
                name in ("Aborted", "ChannelClosed", "PeerLost"),
                "ABT-1",
                "a poster was not told of the close",
                got=name,
                repeat=r,
            )
        with ctx.raises("ABT-1", UcclEpError, "a call on a closed communicator"):
            b.comm.quiet()
        ctx.barrier()


@case("abt1.peer_still_works", clauses=("ABT-1", "ERR-1"), ranks=(2,), timeout=30)
def peer_still_works(ctx: Context) -> None:
    """One rank closes while the other is in the middle of quiets to it: error or success, never a hang or a crash."""
    for _ in range(ctx.times(20)):
        # Where the closing is known by silence alone, each round takes this long. To be lost too early does no harm.
        b = ctx.open(shadow=False, peer_timeout=ctx.timeout / 40)
        b.broken = True
        if ctx.rank == 0:
            ctx.sleep(ctx.moment(float(ctx.rng.random()) * 0.004))
            ctx.close(b)
        else:
            try:
                for k in range(2000):
                    b.channel().put_signal(0, 0, 4096, 2048, k % 4)
                    b.comm.quiet()
            except (PeerLost, ChannelClosed):
                pass
            ctx.checked()
            ctx.close(b)
        ctx.barrier()
