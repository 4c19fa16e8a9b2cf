# SPDX-License-Identifier: Apache-2.0
"""Puts: PUT-1 to PUT-7."""

from __future__ import annotations

import numpy as np

from uccl_ep.conformance import patterns
from uccl_ep.conformance.context import Context
from uccl_ep.conformance.registry import case
from uccl_ep.errors import CommandError, PeerLost, UcclEpError

from ._tools import FINE_SIZES, LARGEST, MASK, SIZES, Layout, commands, message, neighbours, put_command, send_round


@case("put1.sizes", clauses=("PUT-1", "PUT-4", "SIG-1", "SIG-3"), comm={"heap_bytes": 4 << 20}, weak=True)
def sizes(ctx: Context) -> None:
    """Every size around every MTU arrives whole, and not a byte beside it changes."""
    send_round(ctx, ctx.bench, SIZES)


@case(
    "put1.sizes_fine",
    clauses=("PUT-1", "PUT-4", "SIG-1", "SIG-3"),
    comm={"heap_bytes": 4 << 20, "granularity": 4},
    weak=True,
)
def sizes_fine(ctx: Context) -> None:
    """The same in granules of 4 bytes."""
    send_round(ctx, ctx.bench, FINE_SIZES)


@case(
    "put1.sizes_eight_ranks",
    clauses=("PUT-1", "SIG-1", "SIG-3"),
    ranks=(8,),
    level="full",
    comm={"heap_bytes": 8 << 20},
    timeout=30,
)
def sizes_eight_ranks(ctx: Context) -> None:
    """The same with 8 ranks."""
    send_round(ctx, ctx.bench, SIZES)


@case(
    "put1.small_operations",
    clauses=("PUT-1", "PUT-4", "SIG-1", "SIG-2"),
    weak=True,
    comm={"heap_bytes": 4 << 20, "max_message_bytes": 256, "max_inflight_peer": 3},
)
def small_operations(ctx: Context) -> None:
    """Puts longer than an operation of the NIC, with few operations allowed at a time, are cut and arrive whole."""
    send_round(ctx, ctx.bench, [s for s in SIZES if s <= 8208] + [65536], fused=False)


@case(
    "put1.cut_in_pieces",
    clauses=("PUT-1", "QUI-1"),
    weak=True,
    comm={"heap_bytes": 4 << 20, "max_message_bytes": 1024, "ring_log2": 6},
)
def cut_in_pieces(ctx: Context) -> None:
    """Every piece of a put that the NIC takes in pieces arrives, the last and shortest one too, without a signal."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    lengths = [1008, 1024, 1040, 2032, 2048, 2064, 16384 - 16, 16384 + 16, 65536 + 16]
    at, spans = 0, []
    for n in lengths * 2:
        spans.append((at, n))
        at += n + 32
    for k, (offset, n) in enumerate(spans):
        b.place(layout.source(to) + offset, message(ctx, n, ctx.rank, to, k))
    ctx.barrier()
    b.channel().post_many(
        commands(
            [put_command(to, layout.source(to) + offset, layout.landing(ctx.rank) + offset, n) for offset, n in spans]
        )
    )
    b.quiet(0)
    ctx.barrier()
    for k, (offset, n) in enumerate(spans):
        want = message(ctx, n, source, ctx.rank, k)
        b.compare(layout.landing(source) + offset, want, "PUT-1", "a piece of a put is missing", size=n)
        b.expect(layout.landing(source) + offset, want)


@case(
    "put1.few_bytes_in_flight",
    clauses=("PUT-1", "SIG-1", "SIG-2"),
    weak=True,
    comm={"heap_bytes": 4 << 20, "max_inflight_bytes": 4096, "max_inflight": 2},
)
def few_bytes_in_flight(ctx: Context) -> None:
    """Flow control by bytes, smaller than a put: slower, and nothing else."""
    send_round(ctx, ctx.bench, [*SIZES, *SIZES[:12]], fused=False)


@case("put1.neighbours", clauses=("PUT-1", "QUI-1"), weak=True)
def adjacent(ctx: Context) -> None:
    """Puts whose sources or targets touch, are swapped or leave one granule free stay apart."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    g, n = b.granularity, 24
    # (step of the source, step of the target) in granules of puts that are two granules long
    shapes = [(2, 2), (2, 3), (3, 2), (3, 3), (2, -2), (-2, 2), (-2, -2), (2, 4), (0, 2)]
    base = 0
    plan: list[tuple[int, int]] = []
    for local_step, remote_step in shapes:
        for i in range(n):
            local = (i * local_step if local_step >= 0 else (n - 1 - i) * -local_step) * g
            remote = (i * remote_step if remote_step >= 0 else (n - 1 - i) * -remote_step) * g
            plan.append((base + local, base + remote))
        base += 4 * n * g + 4 * g
    image = message(ctx, base, ctx.rank, to, 0)
    b.place(layout.source(to), image)
    ctx.barrier()
    ch.post_many(
        commands(
            [
                put_command(to, layout.source(to) + local, layout.landing(ctx.rank) + remote, 2 * g)
                for local, remote in plan
            ]
        )
    )
    b.quiet(0)
    ctx.barrier()
    theirs = message(ctx, base, source, ctx.rank, 0)
    want = b.canary(layout.landing(source), base).copy()
    for local, remote in plan:
        want[remote : remote + 2 * g] = theirs[local : local + 2 * g]
    b.compare(layout.landing(source), want, "PUT-1", "puts beside each other ran into one another")
    b.expect(layout.landing(source), want)


@case(
    "put1.scatter", clauses=("PUT-1", "QUI-2"), comm={"heap_bytes": 2 << 20, "channels": 3, "ring_log2": 5}, weak=True
)
def scatter(ctx: Context) -> None:
    """Random sizes from random places to random places of every rank, over several channels."""
    b = ctx.bench
    layout = Layout(b)
    g = b.granularity
    cell, cells = 2048, layout.room // 2048
    for target in range(ctx.size):
        b.place(layout.source(target), message(ctx, layout.room, ctx.rank, target, 0))
    ctx.barrier()

    def pieces(source: int, target: int) -> list[tuple[int, int, int]]:
        rng = np.random.default_rng(patterns.key_of((ctx.seed, "scatter", source, target)))
        found = []
        for c in rng.permutation(cells):
            lead, size = int(rng.integers(0, 16)) * g, int(rng.integers(0, 96)) * g
            found.append((int(rng.integers(0, (layout.room - size) // g)) * g, int(c) * cell + lead, size))
        return found

    for target in range(ctx.size):
        for i, (local, remote, size) in enumerate(pieces(ctx.rank, target)):
            b.channel(i % 3).put(target, layout.source(target) + local, layout.landing(ctx.rank) + remote, size)
    b.quiet(clause="QUI-2")
    ctx.barrier()
    for source in range(ctx.size):
        theirs = message(ctx, layout.room, source, ctx.rank, 0)
        want = b.canary(layout.landing(source), layout.room).copy()
        for local, remote, size in pieces(source, ctx.rank):
            want[remote : remote + size] = theirs[local : local + size]
        b.compare(
            layout.landing(source),
            want,
            "PUT-1",
            "scattered puts did not make the image that they describe",
            source=source,
        )
        b.expect(layout.landing(source), want)


@case("put2.idle_target", clauses=("PUT-2", "PRG-1"), ranks=(2,))
def idle_target(ctx: Context) -> None:
    """The target makes no call of the library while puts arrive."""
    b = ctx.bench
    layout = Layout(b)
    if ctx.rank == 0:
        for k in range(100):
            b.place(layout.source(1) + k * 512, message(ctx, 512, 0, 1, k))
            b.channel().put(1, layout.source(1) + k * 512, layout.landing(0) + k * 512, 512)
        b.quiet(0, clause="PRG-1")
    ctx.barrier()  # out of band: rank 1 does nothing else
    if ctx.rank == 1:
        for k in range(100):
            want = message(ctx, 512, 0, 1, k)
            b.compare(
                layout.landing(0) + k * 512, want, "PUT-2", "a put to an idle rank is complete but not there", k=k
            )
            b.expect(layout.landing(0) + k * 512, want)


@case(
    "put2.stopped_target",
    clauses=("PUT-2", "QUI-1"),
    ranks=(2, 4),
    needs=("stop",),
    requires=("completion_visible", "atomic_add64", "heap_reached"),
)
def stopped_target(ctx: Context) -> None:
    """Puts and signals to a process that is stopped complete; it finds them when it goes on."""
    b = ctx.bench
    layout = Layout(b)
    target, others = ctx.size - 1, list(range(ctx.size - 1))
    if ctx.rank == target:
        for source in others:
            for k in range(20):
                b.expect(layout.landing(source) + k * 4096, message(ctx, 4096, source, target, k))
            b.expect_signal(source, 1)
        ctx.barrier()
    else:
        ctx.barrier()
        if ctx.rank == 0:
            ctx.stop(target)
        ctx.barrier(others)
        for k in range(20):
            b.place(layout.source(target) + k * 4096, message(ctx, 4096, ctx.rank, target, k))
            b.channel().put(target, layout.source(target) + k * 4096, layout.landing(ctx.rank) + k * 4096, 4096)
        b.channel().signal(target, ctx.rank)
        try:
            b.quiet(0, clause="PUT-2")
        except PeerLost as error:
            ctx.fail("PUT-2", "puts to a process that is stopped do not complete", error=str(error))
        ctx.barrier(others)
        if ctx.rank == 0:
            ctx.resume(target)
    ctx.barrier()
    if ctx.rank == target:
        for source in others:
            for k in range(20):
                b.compare(
                    layout.landing(source) + k * 4096,
                    message(ctx, 4096, source, target, k),
                    "PUT-2",
                    "a put to a stopped process is complete but not there",
                    source=source,
                    k=k,
                )
            ctx.check_equal(
                b.comm.read_signal(source), 1, "QUI-1", "a signal to a stopped process is complete but not there"
            )


@case("put4.zero_length", clauses=("PUT-4", "SIG-1", "QUI-1"), weak=True)
def zero_length(ctx: Context) -> None:
    """A put of nothing takes a ticket and moves nothing, at any offset; with a signal it signals."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    ch = b.channel()
    before = ch.stats()["posted"]
    for offset in (0, b.granularity, b.heap.size // 2, b.heap.size):
        ch.put(to, offset, b.heap.size - offset, 0)
    last = ch.put_signal(to, 0, 0, 0, 7)
    ctx.check_equal(ch.stats()["posted"] - before, 5, "PUT-4", "a put of nothing does not take one ticket")
    last.wait()
    b.expect_signal(7)
    b.wait_signal(7, 1)


def _large(ctx: Context, granularity: int, lengths: list[int]) -> None:
    b = ctx.bench
    to, source = neighbours(ctx)
    half = b.heap.size // 2
    ch = b.channel()
    for k, n in enumerate(lengths):
        b.place(0, message(ctx, n, ctx.rank, to, k))
        ctx.barrier()
        before = ch.stats()["posted"]
        ticket = ch.put_signal(to, 0, half, n, 0)
        need = -(-n // LARGEST[granularity])
        ctx.check(
            ticket.value - before + 1 >= need, "PUT-4", "fewer commands than can hold the put", bytes=n, need=need
        )
        b.wait_signal(0, k + 1)
        want = message(ctx, n, source, ctx.rank, k)
        b.compare(half, want, "SIG-3", "the signal of a large put is visible before all of its bytes", bytes=n)
        b.expect(half, want)
        b.expect_signal(0)
        ticket.wait()
        ctx.check_equal(
            ch.stats()["complete"] - before,
            ticket.value - before + 1,
            "PUT-4",
            "the ticket of a put that was split is not the last one's",
            bytes=n,
        )
        ctx.barrier()


@case("put4.largest_command", clauses=("PUT-4", "SIG-1", "SIG-3"), ranks=(2,), comm={"heap_bytes": 18 << 20}, weak=True)
def largest_command(ctx: Context) -> None:
    """The largest command, and one granule more."""
    _large(ctx, 16, [LARGEST[16] - 16, LARGEST[16], LARGEST[16] + 16])


@case(
    "put4.beyond_the_largest",
    clauses=("PUT-4", "SIG-1", "SIG-3"),
    ranks=(2,),
    level="full",
    timeout=40,
    comm={"heap_bytes": 80 << 20},
    weak=True,
)
def beyond_the_largest(ctx: Context) -> None:
    """Puts of many commands: two full ones and a granule, and 37 MiB."""
    _large(ctx, 16, [2 * LARGEST[16], 2 * LARGEST[16] + 16, (37 << 20) + 48])


@case(
    "put4.largest_command_fine",
    clauses=("PUT-4", "SIG-1", "SIG-3"),
    ranks=(2,),
    comm={"heap_bytes": 14 << 20, "granularity": 4},
    weak=True,
)
def largest_command_fine(ctx: Context) -> None:
    """The largest command in granules of 4 bytes, and beyond it."""
    _large(ctx, 4, [LARGEST[4], LARGEST[4] + 4, 3 * LARGEST[4] + 4])


@case("put4.refused_where_posted", clauses=("PUT-4",), ranks=(2,), comm={"channels": 2})
def refused_where_posted(ctx: Context) -> None:
    """Misaligned, out of range, no such rank, slot or channel: refused by the call, with nothing posted."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    ch = b.channel()
    end = b.heap.size
    posted = ch.stats()["posted"]
    alignment = [(8, 0, 16), (0, 8, 16), (0, 0, 8), (4, 4, 4), (1, 0, 16), (0, end - 15, 15)]
    for local, remote, n in alignment:
        with ctx.raises("PUT-4", CommandError, f"put({local}, {remote}, {n})") as caught:
            ch.put(to, local, remote, n)
        ctx.check_equal(
            caught[0].name,
            "E_ALIGNMENT",
            "PUT-4",
            "a misaligned put is told another reason",
            local=local,
            remote=remote,
            bytes=n,
        )
    outside = [
        (end, 0, 16),
        (0, end, 16),
        (end - 16, 0, 32),
        (0, end - 16, 32),
        (0, 0, end + 16),
        (1 << 40, 0, 16),
        (0, 1 << 62, 16),
        (MASK - 15, 0, 16),
        (0, MASK - 15, 32),
        (16, 16, MASK - 15),
    ]
    for local, remote, n in outside:
        with ctx.raises("PUT-4", CommandError, f"put({local}, {remote}, {n})") as caught:
            ch.put(to, local, remote, n)
        ctx.check_equal(
            caught[0].name,
            "E_RANGE",
            "PUT-4",
            "a put out of range is told another reason",
            local=local,
            remote=remote,
            bytes=n,
        )
    for target in (ctx.size, 4095, 4096, 1 << 31):
        with ctx.raises("PUT-4", CommandError, f"a put to rank {target}"):
            ch.put(target, 0, 0, 16)
        with ctx.raises("PUT-4", CommandError, f"a signal to rank {target}"):
            ch.signal(target, 0)
    for slot in (b.signals, 1 << 14, (1 << 32) - 1):
        with ctx.raises("PUT-4", CommandError, f"a signal to slot {slot}"):
            ch.signal(to, slot)
        with ctx.raises("PUT-4", CommandError, f"a put_signal to slot {slot}"):
            ch.put_signal(to, 0, 0, 16, slot)
    for index in (2, 64):
        with ctx.raises("PUT-4", (CommandError, IndexError), f"channel {index}"):
            b.channel(index).put(to, 0, 0, 0)
    ctx.check_equal(ch.stats()["posted"], posted, "PUT-4", "a refused call took a ticket")


@case("put4.edges_of_the_heap", clauses=("PUT-4", "PUT-1", "QUI-1"), weak=True)
def edges(ctx: Context) -> None:
    """The first and the last granule of the heap, as source and as target."""
    b = ctx.bench
    to, source = neighbours(ctx)
    g, end = b.granularity, b.heap.size
    ch = b.channel()
    middle = end // 2
    b.place(0, message(ctx, g, ctx.rank, to, 0))
    b.place(end - g, message(ctx, g, ctx.rank, to, 1))
    b.place(middle, message(ctx, 2 * g, ctx.rank, to, 2))
    ctx.barrier()
    ch.put(to, 0, middle + 4 * g, g)
    ch.put(to, end - g, middle + 6 * g, g)
    b.quiet(0)
    ctx.barrier()
    ch.put(to, middle, 0, g)
    ch.put(to, middle + g, end - g, g)
    b.quiet(0)
    ctx.barrier()
    theirs = message(ctx, 2 * g, source, ctx.rank, 2)
    for offset, want in (
        (middle + 4 * g, message(ctx, g, source, ctx.rank, 0)),
        (0, theirs[:g]),
        (middle + 6 * g, message(ctx, g, source, ctx.rank, 1)),
        (end - g, theirs[g:]),
    ):
        b.compare(offset, want, "PUT-4", "a granule at an edge of the heap is wrong", at=offset)
        b.expect(offset, want)


@case(
    "put4.beyond_4_gib", clauses=("PUT-4", "PUT-1", "QUI-1"), ranks=(2,), needs=("gigabytes",),
    comm={"heap_bytes": 6 << 30}, timeout=40,
)  # fmt: skip
def beyond_4_gib(ctx: Context) -> None:
    """Offsets above 4 GiB in a sparse heap of 6 GiB, with canaries where 32 bits of them would point."""
    b = ctx.open(shadow=False)
    to, source = neighbours(ctx)
    four, end, n = 1 << 32, b.heap.size, 4096
    ch = b.channel()
    targets = [four + (12 << 10), end - n, four - n // 2, four]  # the third crosses
    guards = {
        at % four: patterns.data(n, ctx.seed, "guard", ctx.rank, at) for at in (targets[0], targets[1], targets[3])
    }
    for low, guard in guards.items():
        b.heap[low : low + n] = guard
    # A source offset that was cut would read zeros.
    sources = [four + (64 << 10) + i * n for i in range(len(targets))]
    for k, at in enumerate(sources):
        b.heap[at : at + n] = message(ctx, n, ctx.rank, to, k)
    ctx.barrier()
    for k, at in enumerate(targets[:2]):
        ch.put(to, sources[k], at, n)
    b.quiet(0)
    ctx.barrier()
    for k, at in enumerate(targets[:2]):
        b.compare(
            at, message(ctx, n, source, ctx.rank, k), "PUT-4", "bytes beyond 4 GiB are not where they were put", at=at
        )
    ctx.barrier()
    ch.put(to, sources[2], targets[2], n)
    b.quiet(0)
    ctx.barrier()
    b.compare(targets[2], message(ctx, n, source, ctx.rank, 2), "PUT-4", "a put across 4 GiB is wrong")
    ctx.barrier()
    ch.put(to, sources[3], targets[3], n)
    b.quiet(0)
    ctx.barrier()
    b.compare(targets[3], message(ctx, n, source, ctx.rank, 3), "PUT-4", "a put to 4 GiB exactly is wrong")
    for low, want in guards.items():
        b.compare(low, want, "PUT-1", "bytes at an offset modulo 4 GiB were overwritten", at=low)


@case("put5.complete_then_again", clauses=("PUT-5", "QUI-1"), comm={"channels": 2}, weak=True)
def complete_then_again(ctx: Context) -> None:
    """Two puts to the same bytes, the second posted once the first is complete: the second one stays."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    rounds, size = 60, 8192
    for k in range(rounds):
        ch = b.channel(k % 2)
        local = layout.source(to) + k % 2 * size
        b.place(local, message(ctx, size, ctx.rank, to, k))
        ch.put(to, local, layout.landing(ctx.rank), size).wait()
    ctx.barrier()
    want = message(ctx, size, source, ctx.rank, rounds - 1)
    b.compare(layout.landing(source), want, "PUT-5", "an earlier, complete put overwrote a later one")
    b.expect(layout.landing(source), want)


def _self_traffic(ctx: Context) -> None:
    b = ctx.bench
    me = ctx.rank
    layout = Layout(b)
    ch = b.channel()
    n = 40
    for k in range(n):
        data = message(ctx, 1024, me, me, k)
        b.place(layout.source(me) + k * 1024, data)
        if k % 2:
            ch.put_signal(me, layout.source(me) + k * 1024, layout.landing(me) + k * 1024, 1024, 2)
        else:
            ch.put(me, layout.source(me) + k * 1024, layout.landing(me) + k * 1024, 1024)
            ch.signal(me, 2, 1)
        b.wait_signal(2, k + 1, "PUT-6")
        b.compare(
            layout.landing(me) + k * 1024, data, "PUT-6", "a signal to the own rank is visible before its put", k=k
        )
        b.expect(layout.landing(me) + k * 1024, data)
        b.expect_signal(2)
    b.quiet(0, clause="PUT-6")


@case("put6.alone", clauses=("PUT-6",), ranks=(1,), weak=True)
def self_alone(ctx: Context) -> None:
    """A communicator of one rank: put, put_signal, signal and quiet to itself."""
    _self_traffic(ctx)


@case("put6.among_others", clauses=("PUT-6", "SIG-1"), ranks=(3,), weak=True, many_writers=True)
def self_among_others(ctx: Context) -> None:
    """The own rank as a target while the others are targets too."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    for _ in range(50):
        b.channel().signal(to, 9)
    _self_traffic(ctx)
    b.wait_signal(9, 50)
    b.expect_signal(9, 50)


def _two_epochs_back(ctx: Context, epochs: int) -> None:
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    size, slots = 2048, 2
    tickets = []
    for k in range(epochs):
        if k >= slots:
            tickets[k - slots].wait()
            b.wait_signal(1, k - slots + 1)  # the reader is done with that epoch
        local = layout.source(to) + k % slots * size
        b.place(local, message(ctx, size, ctx.rank, to, k))
        tickets.append(ch.put_signal(to, local, layout.landing(ctx.rank) + k % slots * size, size, 0))
        b.wait_signal(0, k + 1)
        want = message(ctx, size, source, ctx.rank, k)
        b.compare(
            layout.landing(source) + k % slots * size, want, "PUT-7", "an epoch was overwritten by an earlier put", k=k
        )
        b.expect(layout.landing(source) + k % slots * size, want)
        ch.signal(source, 1)
        b.expect_signal(0)
    b.expect_signal(1, epochs)


@case("put7.two_epochs_back", clauses=("PUT-7", "SIG-1", "SIG-3"), weak=True)
def two_epochs_back(ctx: Context) -> None:
    """A slot is written again once its put of two epochs before is complete and was read: each epoch is read whole."""
    _two_epochs_back(ctx, ctx.rounds(150))


# A NIC that may place a payload again, and reads it again for that, until it has given the completion.
_TWICE = {"backend_options": "dup_write=50"}


@case("put7.placed_twice", clauses=("PUT-7", "SIG-1", "SIG-3"), needs=("faults",), comm=_TWICE, weak=True)
def placed_twice(ctx: Context) -> None:
    """The same on a NIC that places every other payload twice."""
    _two_epochs_back(ctx, 100)


@case(
    "put7.complete_is_final",
    clauses=("PUT-7", "PUT-3", "QUI-1"),
    needs=("faults",),
    comm={**_TWICE, "heap_bytes": 2 << 20},
    weak=True,
)
def complete_is_final(ctx: Context) -> None:
    """After quiet neither a changed source nor bytes that the target has written since are seen to change back."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    size, n = 1024, 12
    for r in range(12):
        for k in range(n):
            b.place(layout.source(to) + k * size, message(ctx, size, ctx.rank, to, r * n + k))
            ch.put(to, layout.source(to) + k * size, layout.landing(ctx.rank) + k * size, size)
        b.quiet(0)
        for k in range(n):
            b.place(layout.source(to) + k * size, message(ctx, size, ctx.rank, to, -1))
        ctx.barrier()
        for k in range(n):
            at, want = layout.landing(source) + k * size, message(ctx, size, source, ctx.rank, r * n + k)
            b.compare(at, want, "QUI-1", "quiet is over and a put is not there", round=r, k=k)
            b.place(at, message(ctx, size, ctx.rank, ctx.rank, r))  # the slot is the reader's again
        # Traffic of others, for the NIC to have time in.
        for _ in range(4):
            ch.signal(to, 2).wait()
            b.expect_signal(2)
        for k in range(n):
            b.compare(
                layout.landing(source) + k * size,
                message(ctx, size, ctx.rank, ctx.rank, r),
                "PUT-7",
                "bytes of a put arrived again after it was complete",
                round=r,
                k=k,
            )
        ctx.barrier()


@case(
    "put3.not_read_after_quiet_source",
    clauses=("PUT-3", "QUI-0", "QUI-1"),
    weak=True,
    comm={"heap_bytes": 2 << 20, "channels": 2},
)
def not_read_after_quiet_source(ctx: Context) -> None:
    """A source that is overwritten right after its ticket's wait_source is not read any more."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    size = layout.room // 32 // 16 * 16
    for k in range(32):
        local = layout.source(to) + k * size
        b.place(local, message(ctx, size, ctx.rank, to, k))
        try:
            b.channel(k % 2).put(to, local, layout.landing(ctx.rank) + k * size, size).wait_source()
        except UcclEpError as error:
            ctx.fail("QUI-0", "wait_source failed", error=str(error))
        b.place(local, np.full(size, 0xFF, np.uint8))
    b.quiet()
    ctx.barrier()
    for k in range(32):
        want = message(ctx, size, source, ctx.rank, k)
        b.compare(
            layout.landing(source) + k * size, want, "PUT-3", "a source was read after it had been given back", k=k
        )
        b.expect(layout.landing(source) + k * size, want)
