# SPDX-License-Identifier: Apache-2.0
"""Posting: PUB-1, PUB-2."""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np

from uccl_ep.conformance.context import Context
from uccl_ep.conformance.registry import case
from uccl_ep.errors import CommandError, UcclEpError

from ._tools import SIGNAL, Layout, commands, message, neighbours, put_command


@case("pub1.stores_before_post", clauses=("PUB-1", "SIG-1"), weak=True)
def stores_before_post(ctx: Context) -> None:
    """A source stored right before the post arrives as it was stored."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    n, size = ctx.rounds(250), 256
    for k in range(n):
        b.place(layout.source(to) + k * size, message(ctx, size, ctx.rank, to, k))
        ch.put_signal(to, layout.source(to) + k * size, layout.landing(ctx.rank) + k * size, size, 0)
    for k in range(n):
        b.wait_signal(0, k + 1)
        want = message(ctx, size, source, ctx.rank, k)
        b.compare(layout.landing(source) + k * size, want, "PUB-1", "bytes stored before the post did not arrive", k=k)
        b.expect(layout.landing(source) + k * size, want)
        b.expect_signal(0)


@case("pub1.handed_to_another_thread", clauses=("PUB-1", "SIG-1"), needs=("threads",))
def handed_to_another_thread(ctx: Context) -> None:
    """One thread stores, another one that synchronised with it posts."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    n, size = ctx.rounds(250, 70), 512
    handed: deque[int] = deque()
    freed: deque[bool] = deque()  # False: the thread has ended

    def post() -> None:
        ch = b.channel()
        k = 0
        try:
            for _ in range(n):
                k = ctx.take(handed)
                ch.put_signal(to, layout.source(to) + k % 64 * size, layout.landing(ctx.rank) + k % 64 * size, size, 1)
                if k % 64 == 63:
                    # The source is stored again by the other thread after this.
                    ch.quiet()
                    freed.append(True)
        except UcclEpError as error:
            ctx.fail("PUB-1", "a command that another thread handed over could not be posted", k=k, error=str(error))
        finally:
            freed.append(False)  # nothing more comes: who waits finds out why by joining

    task = ctx.spawn(post)
    for k in range(n):
        b.place(layout.source(to) + k % 64 * size, message(ctx, size, ctx.rank, to, k))
        handed.append(k)
        if k % 64 == 63:
            if not ctx.take(freed):
                task.join()
            # Both sides have finished this lap of landing slots before they are written again (PUT-7).
            b.wait_signal(1, k + 1)
            ctx.barrier()
            for i in range(k - 63, k + 1):
                b.compare(
                    layout.landing(source) + i % 64 * size,
                    message(ctx, size, source, ctx.rank, i),
                    "PUB-1",
                    "what another thread stored before the post did not arrive",
                    k=i,
                )
            ctx.barrier()
    task.join()
    b.wait_signal(1, n)
    for i in range(64):
        k = n - 1 - (n - 1 - i) % 64
        b.expect(layout.landing(source) + i * size, message(ctx, size, source, ctx.rank, k))
    b.expect_signal(1, n)


@case("pub1.tickets_count_up", clauses=("PUB-1", "PUB-2"), ranks=(1, 2))
def tickets_count_up(ctx: Context) -> None:
    """Each command takes the next ticket, a batch as many as it has commands."""
    b = ctx.bench
    to, source = neighbours(ctx)
    ch = b.channel()
    last = ch.signal(to, 0).value
    sent = 1
    for n in [int(x) for x in ctx.rng.integers(1, 40, ctx.rounds(60))]:
        if n % 3:
            ticket = ch.post_many(commands([{"op": SIGNAL, "target": to, "slot": 0, "add": 1}] * n)).value
            ctx.check_equal(ticket - last, n, "PUB-2", "a batch did not take consecutive tickets", n=n)
            sent += n
        else:
            ticket = ch.put(to, 0, 0, 0).value
            ctx.check_equal(ticket - last, 1, "PUB-1", "the next command did not get the next ticket")
        last = ticket
    b.expect_signal(0, ctx.share(sent)[source])


@case("pub2.refused_whole", clauses=("PUB-2", "PUT-4"), ranks=(2,), needs=("warps",))
def refused_whole(ctx: Context) -> None:
    """A batch with one bad command, anywhere in it, posts nothing at all."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    ch = b.channel()
    ch.put(to, 0, 0, 0).wait()
    posted = ch.stats()["posted"]
    good = put_command(to, 0, b.heap.size // 2, 64)
    bad = {
        "source past the end": put_command(to, b.heap.size, 0, 16),
        "target past the end": put_command(to, 0, b.heap.size - 16, 32),
        "no such rank": put_command(ctx.size, 0, 0, 16),
        "misaligned": put_command(to, 8, 0, 16),
        "no such slot": {"op": SIGNAL, "target": to, "slot": b.signals, "add": 1},
        "no such operation": {"op": 6, "target": to},
        "other granularity": put_command(to, 0, 0, 16, granularity=4),
    }
    for what, command in bad.items():
        for place in (0, 3, 7):
            batch = [good] * 8
            batch[place] = command
            with ctx.raises("PUB-2", CommandError, f"a batch with {what} at {place}"):
                ch.post_many(commands(batch))
            ctx.check_equal(
                ch.stats()["posted"], posted, "PUB-2", "a refused batch took tickets", what=what, place=place
            )
    ch.quiet()


@case(
    "pub2.as_large_as_the_ring",
    clauses=("PUB-2", "PUT-1"),
    ranks=(2,),
    needs=("batches",),
    comm={"ring_log2": 6},
    weak=True,
)
def as_large_as_the_ring(ctx: Context) -> None:
    """A batch that fills the ring is posted whole, again and again; one more command is refused."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    slots, size = 64, 48
    with ctx.raises("PUB-2", CommandError, "a batch larger than the ring"):
        ch.post_many(commands([{"op": SIGNAL, "target": to, "slot": 0, "add": 1}] * (slots + 1)))
    laps = ctx.rounds(9, 3)
    for lap in range(laps):
        base = lap * slots * 64
        for k in range(slots):
            b.place(layout.source(to) + base + k * 64, message(ctx, size, ctx.rank, to, lap * slots + k))
        ch.post_many(
            commands(
                [
                    put_command(to, layout.source(to) + base + k * 64, layout.landing(ctx.rank) + base + k * 64, size)
                    for k in range(slots)
                ]
            )
        )
        if lap % 2:
            ch.signal(to, 0)  # the next batch then starts elsewhere in the ring
    b.quiet(0)
    ctx.barrier()
    for lap in range(laps):
        for k in range(slots):
            want = message(ctx, size, source, ctx.rank, lap * slots + k)
            offset = layout.landing(source) + lap * slots * 64 + k * 64
            b.compare(offset, want, "PUT-1", "a command of a batch as large as the ring was not executed", lap=lap, k=k)
            b.expect(offset, want)
    b.expect_signal(0, laps // 2)


@case("pub2.across_the_lap", clauses=("PUB-2", "LIM-1", "SIG-1"), comm={"ring_log2": 4}, weak=True)
def across_the_lap(ctx: Context) -> None:
    """Batches of every size that cross the end of the ring at every place."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    sizes = [n for n in range(1, 17) for _ in range(ctx.rounds(3))]
    ctx.shared_rng.shuffle(sizes)
    total = sum(sizes)
    for k in range(total):
        b.place(layout.source(to) + k * 32, message(ctx, 32, ctx.rank, to, k))
    k = 0
    for n in sizes:
        ch.post_many(
            commands(
                [
                    put_command(to, layout.source(to) + i * 32, layout.landing(ctx.rank) + i * 32, 32)
                    for i in range(k, k + n)
                ]
            )
        )
        k += n
    ch.signal(to, 3)
    b.wait_signal(3, 1)
    for i in range(total):
        want = message(ctx, 32, source, ctx.rank, i)
        b.compare(layout.landing(source) + i * 32, want, "PUB-2", "a command of a batch across the lap was lost", k=i)
        b.expect(layout.landing(source) + i * 32, want)
    b.expect_signal(3)


@case(
    "pub2.together",
    clauses=("PUB-2", "THR-1", "SIG-1"),
    ranks=(2,),
    needs=("threads", "warps"),
    comm={"ring_log2": 7},
)
def together(ctx: Context) -> None:
    """Batches that several threads post at once keep their tickets together."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    ch = b.channel()
    threads, rounds = 6, ctx.times(120)
    sizes = ctx.shared_rng.integers(1, 33, (threads, rounds))

    def post(t: int) -> list[int]:
        return [
            ch.post_many(commands([{"op": SIGNAL, "target": to, "slot": t, "add": 1}] * int(n))).value for n in sizes[t]
        ]

    lasts = ctx.join([ctx.spawn(post, t) for t in range(threads)])
    spans = sorted(
        (last - int(n) + 1, last)
        for mine, ns in zip(lasts, sizes, strict=True)
        for last, n in zip(mine, ns, strict=True)
    )
    for (_, end), (start, _) in itertools.pairwise(spans):
        ctx.check_equal(start, end + 1, "PUB-2", "tickets of two batches overlap, or some are missing")
    b.quiet(0)
    ctx.barrier()
    for t in range(threads):
        b.expect_signal(t, int(np.sum(sizes[t])))
        ctx.check_equal(
            b.comm.read_signal(t),
            int(np.sum(sizes[t])),
            "SIG-1",
            "signals of one thread's batches are missing",
            thread=t,
        )
