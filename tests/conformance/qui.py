# SPDX-License-Identifier: Apache-2.0
"""Quiet and tickets: QUI-0 to QUI-5."""

from __future__ import annotations

import numpy as np

from uccl_ep.conformance.context import Context
from uccl_ep.conformance.registry import case
from uccl_ep.errors import DeadlineExceeded, UcclEpError

from ._tools import SIGNAL, Layout, commands, driven, message, neighbours, put_command


@case("qui0.source_reuse", clauses=("QUI-0", "PUT-3", "QUI-1"), comm={"heap_bytes": 16 << 20}, weak=True)
def source_reuse(ctx: Context) -> None:
    """Sources are overwritten right after quiet_source; the targets still get the old bytes."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    sizes = [layout.room // 2 // 16 * 16, 65536, 4096, 64]
    for r in range(3):
        at = 0
        for i, n in enumerate(sizes):
            b.place(layout.source(to) + at, message(ctx, n, ctx.rank, to, r * 10 + i))
            ch.put(to, layout.source(to) + at, layout.landing(ctx.rank) + at, n)
            at += n
        ch.quiet_source()
        b.place(layout.source(to), np.full(at, 0xFF, np.uint8))
        ch.quiet()
        ctx.barrier()
        at = 0
        for i, n in enumerate(sizes):
            want = message(ctx, n, source, ctx.rank, r * 10 + i)
            b.compare(
                layout.landing(source) + at,
                want,
                "QUI-0",
                "a source was read after quiet_source had given it back",
                round=r,
                size=n,
            )
            b.expect(layout.landing(source) + at, want)
            at += n
        ctx.barrier()


@case("qui0.large_batch", clauses=("QUI-0", "QUI-1", "PUT-3"), ranks=(2,), comm={"heap_bytes": 17 << 20}, weak=True)
def large_batch(ctx: Context) -> None:
    """The sources of a batch of 8 MiB are overwritten right after quiet_source: more than a NIC takes at once."""
    b = ctx.bench
    to, source = neighbours(ctx)
    n, size, half = 8, 1 << 20, b.heap.size // 2
    for r in range(2):
        b.place(0, message(ctx, n * size, ctx.rank, to, r))
        ctx.barrier()
        b.channel().post_many(commands([put_command(to, k * size, half + k * size, size) for k in range(n)]))
        b.channel().quiet_source()
        # From the last, which is read last.
        for k in reversed(range(n)):
            b.heap[k * size : (k + 1) * size] = 0xFF
        b.expect(0, np.full(n * size, 0xFF, np.uint8))
        b.quiet(0)
        ctx.barrier()
        want = message(ctx, n * size, source, ctx.rank, r)
        b.compare(half, want, "QUI-0", "a source was read after quiet_source had given it back", round=r)
        b.expect(half, want)
        ctx.barrier()


@case(
    "qui0.between_posted_and_complete", clauses=("QUI-0", "QUI-1"), ranks=(2,), comm={"heap_bytes": 8 << 20}, weak=True
)
def between(ctx: Context) -> None:
    """The counters keep their order: complete <= source <= taken <= posted, and none goes back."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    size = layout.room // 16 // 16 * 16
    for k in range(16):
        b.place(layout.source(to) + k * size, message(ctx, size, ctx.rank, to, k))
    last = {"posted": 0, "taken": 0, "source": 0, "complete": 0}
    for k in range(16):
        ch.put_signal(to, layout.source(to) + k * size, layout.landing(ctx.rank) + k * size, size, 0)
        for _ in range(ctx.rounds(20)):
            now = ch.stats()
            ctx.check(
                now["complete"] <= now["source"] <= now["taken"] <= now["posted"],
                "QUI-0",
                "the counters of a channel are out of order",
                **{n: now[n] for n in last},
            )
            for name in last:
                ctx.check(now[name] >= last[name], "QUI-1", "a counter of a channel went back", counter=name)
                last[name] = now[name]
    b.quiet(0)
    ctx.barrier()
    for k in range(16):
        b.expect(layout.landing(source) + k * size, message(ctx, size, source, ctx.rank, k))
    b.expect_signal(0, 16)


@case("qui1.visible_and_applied", clauses=("QUI-1",), comm={"heap_bytes": 4 << 20}, weak=True)
def visible_and_applied(ctx: Context) -> None:
    """What quiet covers is there at once, for a target that learns of it some other way."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    rng = np.random.default_rng([ctx.seed, 1])
    for r in range(20):
        sizes = [int(n) * 16 for n in rng.integers(0, 1024, 6)]
        offsets = np.cumsum([0, *sizes[:-1]])
        for i, (n, at) in enumerate(zip(sizes, offsets, strict=True)):
            b.place(layout.source(to) + int(at), message(ctx, n, ctx.rank, to, r * 10 + i))
            ch.put(to, layout.source(to) + int(at), layout.landing(ctx.rank) + int(at), n)
        ch.signal(to, 1)
        b.quiet(0)
        ctx.barrier()
        for i, (n, at) in enumerate(zip(sizes, offsets, strict=True)):
            want = message(ctx, n, source, ctx.rank, r * 10 + i)
            b.compare(
                layout.landing(source) + int(at),
                want,
                "QUI-1",
                "quiet returned before the bytes were visible",
                round=r,
                put=i,
            )
            b.expect(layout.landing(source) + int(at), want)
        b.expect_signal(1)
        ctx.check_equal(b.comm.read_signal(1), r + 1, "QUI-1", "quiet returned before the signal was applied", round=r)
        ctx.barrier()


@case("qui1.ticket_covers_earlier", clauses=("QUI-1", "QUI-3"), comm={"heap_bytes": 2 << 20}, weak=True)
def ticket_covers_earlier(ctx: Context) -> None:
    """A ticket that is complete stands for all before it, to every target."""
    b = ctx.bench
    layout = Layout(b)
    ch = b.channel()
    n, size = 30, 4096
    for k in range(n):
        ticket = None
        for target in range(ctx.size):
            local = layout.source(target) + k * size
            b.place(local, message(ctx, size, ctx.rank, target, k))
            ticket = ch.put(target, local, layout.landing(ctx.rank) + k * size, size)
        assert ticket is not None
        if k % 3 == 0:
            if k % 2:
                ticket.wait()
            elif not ctx.until(ticket.done):
                ctx.fail("QUI-3", "a ticket never became done")
            ctx.barrier()
            for source in range(ctx.size):
                for i in range(max(0, k - 2), k + 1):
                    want = message(ctx, size, source, ctx.rank, i)
                    b.compare(
                        layout.landing(source) + i * size,
                        want,
                        "QUI-1",
                        "a ticket is complete and a put before it is not visible",
                        source=source,
                        k=i,
                    )
    b.quiet(0)
    ctx.barrier()
    for source in range(ctx.size):
        for i in range(n):
            b.expect(layout.landing(source) + i * size, message(ctx, size, source, ctx.rank, i))


def _all_channels(ctx: Context, size: int) -> None:
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    channels = int(b.comm.info.channels)
    for r in range(3):
        for c in range(channels):
            b.place(layout.source(to) + c * size, message(ctx, size, ctx.rank, to, r * 100 + c))
        ctx.barrier()
        for c in range(channels):
            b.channel(c).put(to, layout.source(to) + c * size, layout.landing(ctx.rank) + c * size, size)
        b.quiet(clause="QUI-2")
        b.place(layout.source(to), np.full(channels * size, 0xFF, np.uint8))
        ctx.barrier()
        for c in range(channels):
            want = message(ctx, size, source, ctx.rank, r * 100 + c)
            b.compare(
                layout.landing(source) + c * size,
                want,
                "QUI-2",
                "quiet over all channels left one out",
                channel=c,
                round=r,
            )
            b.expect(layout.landing(source) + c * size, want)


@case(
    "qui2.all_32_channels",
    clauses=("QUI-2", "QUI-0"),
    ranks=(2,),
    comm={"channels": 32, "heap_bytes": 9 << 20},
    weak=True,
)
def all_channels(ctx: Context) -> None:
    """One put of 64 KiB on each of 32 channels: quiet covers every one."""
    _all_channels(ctx, 65536)


@case(
    "qui2.two_proxies",
    clauses=("QUI-2", "QUI-0"),
    ranks=(2,),
    comm={"channels": 6, "proxies": 3, "heap_bytes": 4 << 20},
)
def all_proxies(ctx: Context) -> None:
    """The same where channels belong to several proxies."""
    _all_channels(ctx, 131072)


@case(
    "qui2.source_over_all",
    clauses=("QUI-2", "QUI-0", "QUI-1"),
    ranks=(2,),
    comm={"channels": 8, "heap_bytes": 9 << 20},
    weak=True,
)
def source_over_all(ctx: Context) -> None:
    """quiet_source over all channels gives every source back."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    size = layout.room // 8 // 16 * 16
    for c in range(8):
        b.place(layout.source(to) + c * size, message(ctx, size, ctx.rank, to, c))
    for c in range(8):
        b.channel(c).put(to, layout.source(to) + c * size, layout.landing(ctx.rank) + c * size, size)
    b.comm.quiet_source()
    b.place(layout.source(to), np.zeros(8 * size, np.uint8))
    b.quiet()
    ctx.barrier()
    for c in range(8):
        want = message(ctx, size, source, ctx.rank, c)
        b.compare(
            layout.landing(source) + c * size, want, "QUI-2", "quiet_source over all channels left one out", channel=c
        )
        b.expect(layout.landing(source) + c * size, want)


@case(
    "qui2.one_channel_outstanding",
    clauses=("QUI-2", "QUI-0", "QUI-1"),
    ranks=(2,),
    level="full",
    needs=("standstill",),
    comm={"progress": "caller", "channels": 5},
)
def one_channel_outstanding(ctx: Context) -> None:
    """While nobody executes what one channel alone has posted, a quiet over all has to wait, whichever it is."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    size = 256
    for c in range(5):
        at = c * size
        b.place(layout.source(to) + at, message(ctx, size, ctx.rank, to, c))
        ticket = b.channel(c).put(to, layout.source(to) + at, layout.landing(ctx.rank) + at, size)
        with ctx.raises("QUI-2", DeadlineExceeded, f"a quiet over all, with a put of channel {c} not executed"):
            b.comm.quiet(timeout=0)
        with ctx.raises("QUI-2", DeadlineExceeded, f"a quiet_source over all, with a put of channel {c} not executed"):
            b.comm.quiet_source(timeout=0)
        ctx.check(driven(ctx, b, ticket.done), "QUI-1", "progress calls do not complete a put", channel=c)
        b.comm.quiet(timeout=0)
        b.comm.quiet_source(timeout=0)
    ctx.barrier()
    for c in range(5):
        want = message(ctx, size, source, ctx.rank, c)
        b.compare(layout.landing(source) + c * size, want, "QUI-2", "quiet over all channels left one out", channel=c)
        b.expect(layout.landing(source) + c * size, want)


@case("qui3.wait_poll_drop", clauses=("QUI-3", "SIG-1"), comm={"ring_log2": 5}, weak=True)
def wait_poll_drop(ctx: Context) -> None:
    """Tickets may be waited for in any order and twice, polled, or forgotten."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    ch = b.channel()
    n = 200
    tickets = [ch.signal(to, 0) for _ in range(n)]
    kept = [tickets[i] for i in ctx.rng.permutation(n)[:60]]
    del tickets
    for i, ticket in enumerate(kept):
        if i % 3 == 0:
            ticket.wait()
            ticket.wait(timeout=0)
        elif i % 3 == 1:
            ticket.wait_source()
            ctx.check(ctx.until(ticket.done), "QUI-3", "a ticket that is waited for by polling never became done")
        ctx.check(not ticket.done() or ticket.source_done(), "QUI-3", "a ticket is complete and its source is not free")
    b.wait_signal(0, n)
    b.expect_signal(0, n)


@case(
    "qui3.a_wait_delays_nobody",
    clauses=("QUI-3", "PRG-2", "SIG-1"),
    ranks=(2,),
    needs=("threads",),
    comm={"channels": 2, "heap_bytes": 8 << 20},
)
def a_wait_delays_nobody(ctx: Context) -> None:
    """While a thread waits on one channel, commands posted later, there and elsewhere, go on."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    size = layout.room // 2 // 16 * 16
    b.place(layout.source(to), message(ctx, size, ctx.rank, to, 0))

    def wait_for_long() -> None:
        # A signal that is sent only when all else is done.
        b.comm.wait_signal(9, 1)

    waiter = ctx.spawn(wait_for_long)
    quiets = ctx.spawn(
        lambda: [b.channel(0).put(to, layout.source(to), layout.landing(ctx.rank), size).wait() for _ in range(5)]
    )
    for k in range(100):
        b.channel(1).signal(to, 1).wait()
        b.channel(0).signal(to, 2)
        if k % 10 == 0:
            b.channel(1).quiet()
    b.wait_signal(1, 100, "QUI-3")
    b.wait_signal(2, 100, "QUI-3")
    quiets.join()
    ctx.barrier()
    b.channel(1).signal(to, 9)
    waiter.join()
    b.expect(layout.landing(source), message(ctx, size, source, ctx.rank, 0))
    for slot, n in ((1, 100), (2, 100), (9, 1)):
        b.expect_signal(slot, n)


@case("qui4.nothing_outstanding", clauses=("QUI-4",), comm={"channels": 3}, weak=True)
def nothing_outstanding(ctx: Context) -> None:
    """With nothing outstanding a quiet that may not wait succeeds, and gives the NIC nothing to do."""
    b = ctx.bench
    to, _ = neighbours(ctx)

    def operations() -> int:
        return sum(int(p["operations"]) for p in b.comm.stats()["proxies"])

    def all_quiets() -> None:
        try:
            for c in range(3):
                b.channel(c).quiet(timeout=0)
                b.channel(c).quiet_source(timeout=0)
            b.comm.quiet(timeout=0)
            b.comm.quiet_source(timeout=0)
        except DeadlineExceeded as error:
            ctx.fail("QUI-4", "a quiet with nothing outstanding had to wait", error=str(error))
        ctx.checked()

    all_quiets()  # on a fresh communicator
    ctx.barrier()
    for k in range(20):
        ticket = b.channel(k % 3).signal(to, k % 3)
        ticket.wait()
        b.expect_signal(k % 3)
        before = operations()
        all_quiets()
        ticket.wait(timeout=0)
        ctx.check_equal(operations(), before, "QUI-4", "a quiet with nothing outstanding made a round trip")


@case("qui4.peers_stopped", clauses=("QUI-4",), needs=("stop",), ranks=(2,))
def peers_stopped(ctx: Context) -> None:
    """The same while the peer is stopped: there is nobody to make a round trip to."""
    b = ctx.bench
    if ctx.rank == 0:
        b.channel().signal(1, 0).wait()
    else:
        b.expect_signal(0)
    ctx.barrier()
    if ctx.rank == 0:
        ctx.stop(1)
        try:
            for _ in range(100):
                b.channel().quiet(timeout=0)
                b.comm.quiet(timeout=0)
                b.comm.quiet_source(timeout=0)
        except UcclEpError as error:
            ctx.fail("QUI-4", "a quiet with nothing outstanding needed a peer that is stopped", error=str(error))
        finally:
            ctx.resume(1)
        ctx.checked()
    ctx.barrier()


@case("qui5.third_rank", clauses=("QUI-5", "SIG-1"), ranks=(3,), comm={"channels": 2}, weak=True)
def third_rank(ctx: Context) -> None:
    """A quiets puts to B and signals C, C signals B: B sees A's puts."""
    b = ctx.bench
    layout = Layout(b)
    rounds, size = 60, 1024
    # Every rank is A, B and C in turn, so that all three pairs of links are used.
    for r in range(rounds):
        first, second, third = r % 3, (r + 1) % 3, (r + 2) % 3
        at = r // 3 * size
        if ctx.rank == first:
            b.place(layout.source(second) + at, message(ctx, size, first, second, r))
            b.channel(r % 2).put(second, layout.source(second) + at, layout.landing(first) + at, size)
            b.quiet()
            b.channel((r + 1) % 2).signal(third, 0)
        elif ctx.rank == third:
            b.wait_signal(0, r // 3 + 1)
            b.channel(0).signal(second, 1)
            b.expect_signal(0)
        else:
            b.wait_signal(1, r // 3 + 1)
            want = message(ctx, size, first, second, r)
            b.compare(
                layout.landing(first) + at,
                want,
                "QUI-5",
                "a third rank's signal is visible and the puts that were quieted before it are not",
                round=r,
            )
            b.expect(layout.landing(first) + at, want)
            b.expect_signal(1)


@case("qui5.long_chain", clauses=("QUI-5", "SIG-1"), ranks=(4, 8), level="full", comm={"channels": 2}, weak=True)
def long_chain(ctx: Context) -> None:
    """A signal that goes around all ranks carries the puts of everyone before: each rank sees all of them."""
    b = ctx.bench
    layout = Layout(b)
    to, _ = neighbours(ctx)
    rounds, size = 25, 256
    for r in range(rounds):
        if ctx.rank == 0:
            _put_to_all(ctx, r, size)
            b.channel(1).signal(to, 0)
            b.wait_signal(0, r + 1)
        else:
            b.wait_signal(0, r + 1)
        seen = range(ctx.rank) if ctx.rank else range(1, ctx.size)
        for source in seen:
            want = message(ctx, size, source, ctx.rank, r)
            b.compare(
                layout.landing(source) + r * size,
                want,
                "QUI-5",
                "the puts of a rank earlier in the chain are missing",
                source=source,
                round=r,
            )
        if ctx.rank:
            _put_to_all(ctx, r, size)
            b.channel(1).signal(to, 0)
        b.expect_signal(0)
    for source in range(ctx.size):
        for r in range(rounds):
            b.expect(layout.landing(source) + r * size, message(ctx, size, source, ctx.rank, r))


def _put_to_all(ctx: Context, r: int, size: int) -> None:
    b = ctx.bench
    layout = Layout(b)
    for target in range(ctx.size):
        b.place(layout.source(target) + r * size, message(ctx, size, ctx.rank, target, r))
        b.channel(0).put(target, layout.source(target) + r * size, layout.landing(ctx.rank) + r * size, size)
    b.quiet()


@case("qui1.signals_of_a_batch", clauses=("QUI-1", "SIG-1"), comm={"ring_log2": 8}, weak=True)
def signals_of_a_batch(ctx: Context) -> None:
    """Quiet after a batch of signals to all ranks: each word has its sum."""
    b = ctx.bench
    ch = b.channel()
    for r in range(10):
        ch.post_many(
            commands(
                [
                    {"op": SIGNAL, "target": target, "slot": ctx.rank, "add": k + 1}
                    for k in range(8)
                    for target in range(ctx.size)
                ]
            )
        )
        b.quiet(0)
        ctx.barrier()
        for source in range(ctx.size):
            b.expect_signal(source, 36)
            ctx.check_equal(
                b.comm.read_signal(source),
                b.words[source],
                "QUI-1",
                "quiet returned before signals were applied",
                source=source,
                round=r,
            )
        ctx.barrier()


@case("qui1.small_puts", clauses=("QUI-1", "PUT-4"), ranks=(2,), comm={"granularity": 4}, weak=True)
def small_puts(ctx: Context) -> None:
    """Puts of 4 to 300 bytes, each alone and then quiet: those that a NIC takes along in the command count too (E5)."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    for k, n in enumerate(range(4, 301, 4)):
        at = k * 512
        b.place(layout.source(to) + at, message(ctx, n, ctx.rank, to, k))
        b.channel().put(to, layout.source(to) + at, layout.landing(ctx.rank) + at, n)
        b.quiet(0)
        ctx.barrier()
        want = message(ctx, n, source, ctx.rank, k)
        b.compare(layout.landing(source) + at, want, "QUI-1", "quiet is over and a small put is not there", size=n)
        b.expect(layout.landing(source) + at, want)


@case("qui1.epochs_and_barriers", clauses=("QUI-1", "PUT-5"), ranks=(4, 8), weak=True)
def epochs_and_barriers(ctx: Context) -> None:
    """Put the epoch to the right neighbour, quiet, the library's barrier: the own cell is current (row A11)."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    for epoch in range(ctx.rounds(100)):
        b.place(layout.source(to), message(ctx, 16, ctx.rank, to, epoch))
        b.channel().put(to, layout.source(to), layout.landing(ctx.rank), 16)
        b.quiet()
        b.comm.barrier()
        want = message(ctx, 16, source, ctx.rank, epoch)
        b.compare(layout.landing(source), want, "QUI-1", "behind a barrier the cell is not current", epoch=epoch)
        b.expect(layout.landing(source), want)
        b.comm.barrier()
