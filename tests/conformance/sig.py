# SPDX-License-Identifier: Apache-2.0
"""Signals: SIG-1 to SIG-7, MEM-3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from uccl_ep.conformance.context import Context
from uccl_ep.conformance.registry import case
from uccl_ep.errors import CapabilityError, UcclEpError

from ._tools import FINE_SIZES, MASK, SIGNAL, SIZES, Layout, commands, message, neighbours, send_round

# Every one of the library, by what the NIC must promise for it: docs/architecture.md.
STRATEGIES = (
    "ordered_atomic",
    "fenced_atomic",
    "sequenced_immediate",
    "sender_hold",
    "sender_hold_sum",
    "sender_hold_mailbox",
)


@case("sig1.exact_sum", clauses=("SIG-1",), weak=True)
def exact_sum(ctx: Context) -> None:
    """Adds of any 64-bit value, through 2^64, sum up exactly."""
    b = ctx.bench
    to, source = neighbours(ctx)
    ch = b.channel()
    edges = [0, 1, 0xFFFFFFFF, 1 << 32, 1 << 63, MASK, MASK - 1, 0x0102030405060708, 8191, 8192]

    def values(rank: int) -> list[int]:
        rng = np.random.default_rng([ctx.seed, rank])
        return edges + [int(v) for v in rng.integers(0, 1 << 63, 90)]

    for i, value in enumerate(values(ctx.rank)):
        ch.signal(to, i % 5, value)
    ch.quiet()
    ctx.barrier()
    for i, value in enumerate(values(source)):
        b.expect_signal(i % 5, value)
    for slot in range(5):
        ctx.check_equal(b.comm.read_signal(slot), b.words[slot], "SIG-1", "a sum of 64-bit adds is wrong", slot=slot)


@case("sig1.add_of_zero", clauses=("SIG-1", "QUI-1"), ranks=(2,), weak=True)
def add_of_zero(ctx: Context) -> None:
    """An add of zero takes a ticket and changes nothing."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    ch = b.channel()
    before = ch.stats()["posted"]
    ch.signal(to, 4, 0)
    ch.put_signal(to, 0, 0, 0, 4, 0).wait()
    ctx.check_equal(ch.stats()["posted"] - before, 2, "SIG-1", "an add of zero does not take a ticket")
    ctx.barrier()
    ctx.check_equal(b.comm.read_signal(4), 0, "SIG-1", "an add of zero changed the word")


def _back_to_back(ctx: Context) -> None:
    b = ctx.bench
    to, _ = neighbours(ctx)
    ch = b.channel()
    for _ in range(64):
        ch.signal(to, 0)
    for _ in range(64):
        ch.put_signal(to, 0, 0, 0, 0)
    b.wait_signal(0, 128)
    ch.quiet()
    ctx.barrier()
    ctx.check_equal(b.comm.read_signal(0), 128, "SIG-1", "of 128 signals in a row some are lost, or counted twice")
    # The same in batches, to words that take turns, so that neighbours in the queue are alike and are not.
    for pattern in ((1, 1, 1, 1), (1, 2, 1, 2), (1, 1, 2, 2), (3, 2, 1, 1)):
        ch.post_many(commands([{"op": SIGNAL, "target": to, "slot": s, "add": 1} for s in pattern * 16]))
        for s in pattern * 16:
            b.expect_signal(s)
    b.expect_signal(0, 128)
    ch.quiet()
    ctx.barrier()
    for slot in range(4):
        ctx.check_equal(
            b.comm.read_signal(slot),
            b.words[slot],
            "SIG-1",
            "a batch of signals was not counted exactly once",
            slot=slot,
        )


@case("sig1.back_to_back", clauses=("SIG-1",), weak=True)
def back_to_back(ctx: Context) -> None:
    """64 signals and 64 put_signals of nothing in a row to one word all count."""
    _back_to_back(ctx)


@case("sig1.back_to_back_in_ones", clauses=("SIG-1",), ranks=(2,), comm={"max_inflight_peer": 1}, weak=True)
def back_to_back_in_ones(ctx: Context) -> None:
    """The same with one operation outstanding at a time."""
    _back_to_back(ctx)


@case(
    "sig1.back_to_back_in_twos",
    clauses=("SIG-1",),
    ranks=(2,),
    comm={"max_inflight_peer": 2, "ring_log2": 6},
    weak=True,
)
def back_to_back_in_twos(ctx: Context) -> None:
    """The same with two operations outstanding and a short ring."""
    _back_to_back(ctx)


@case("sig1.wide", clauses=("SIG-1", "PUT-4", "SIG-3"), ranks=(2,), comm={"signals": 70000}, weak=True)
def wide(ctx: Context) -> None:
    """Slots and adds that do not fit a PUT_SIGNAL command are not cut."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    pairs = [(16383, 8191), (16384, 1), (0, 8192), (69999, 1 << 63), (65536, 0x1234567890), (16384 + 5, 8192), (5, 1)]
    for k, (slot, add) in enumerate(pairs):
        b.place(layout.source(to) + k * 64, message(ctx, 64, ctx.rank, to, k))
        ticket = ch.put_signal(to, layout.source(to) + k * 64, layout.landing(ctx.rank) + k * 64, 64, slot, add)
        b.expect_signal(slot, add)
        ticket.wait()
        ctx.barrier()
        ctx.check_equal(
            b.comm.read_signal(slot),
            b.words[slot],
            "SIG-1",
            "a wide put_signal added something else",
            slot=slot,
            add=add,
        )
        ctx.barrier()
        want = message(ctx, 64, source, ctx.rank, k)
        b.compare(
            layout.landing(source) + k * 64, want, "SIG-3", "a wide put_signal did not bring its bytes", slot=slot
        )
        b.expect(layout.landing(source) + k * 64, want)
        ch.signal(to, slot, 3)
        b.expect_signal(slot, 3)
    ch.quiet()
    ctx.barrier()


def _first_act(ctx: Context, repeat: int) -> None:
    b = ctx.open(settle=False)
    for peer in ctx.others:
        b.channel().signal(peer, 0)
        b.expect_signal(0)
    b.wait_signal(0, ctx.size - 1)
    ctx.check_equal(b.comm.read_signal(0), ctx.size - 1, "SIG-1", "an early signal is lost or doubled", repeat=repeat)
    ctx.close(b)


@case("sig1.first_act", clauses=("SIG-1", "SIG-4"), ranks=(4,), needs=("stop",), timeout=40)
def first_act(ctx: Context) -> None:
    """A signal that a quick peer sends as its first act is not wiped by a slower one's start."""
    for repeat in range(ctx.rounds(12, 2)):
        if ctx.rank == 3 and repeat % 4 == 1:
            # In the middle of the others' construction, long enough that they are done first where that can be.
            ctx.spawn(lambda: ctx.stop(3, 0.15))
        _first_act(ctx, repeat)


@case("sig1.first_act_often", clauses=("SIG-1", "SIG-4"), ranks=(4,), level="full", timeout=120)
def first_act_often(ctx: Context) -> None:
    """The same, a hundred times without a pause."""
    for repeat in range(100):
        _first_act(ctx, repeat)


@case("sig2.sizes", clauses=("SIG-2", "SIG-1"), comm={"heap_bytes": 4 << 20}, weak=True)
def strong_sizes(ctx: Context) -> None:
    """A put and then a signal, every size: the signal shows the whole put."""
    send_round(ctx, ctx.bench, SIZES, fused=False)


@case(
    "sig2.sizes_fine", clauses=("SIG-2", "SIG-1"), ranks=(2,), comm={"heap_bytes": 4 << 20, "granularity": 4}, weak=True
)
def strong_sizes_fine(ctx: Context) -> None:
    """The same in granules of 4 bytes."""
    send_round(ctx, ctx.bench, FINE_SIZES, fused=False)


@case("sig2.many_puts_one_signal", clauses=("SIG-2", "SIG-1"), comm={"heap_bytes": 4 << 20}, weak=True)
def many_puts(ctx: Context) -> None:
    """One signal shows all of 64 puts of mixed sizes, and of the rounds before."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    rounds, puts, cell = 3, 64, 2048

    def plan(sender: int, r: int) -> list[int]:
        rng = np.random.default_rng([ctx.seed, sender, r])
        return [int(n) * 16 for n in rng.integers(0, cell // 16, puts)]

    assert rounds * puts * cell <= layout.room
    for r in range(rounds):
        for i, n in enumerate(plan(ctx.rank, r)):
            at = (r * puts + i) * cell
            b.place(layout.source(to) + at, message(ctx, n, ctx.rank, to, r * puts + i))
            ch.put(to, layout.source(to) + at, layout.landing(ctx.rank) + at, n)
        ch.signal(to, 0)
    for r in range(rounds):
        b.wait_signal(0, r + 1)
        for i, n in enumerate(plan(source, r)):
            at = layout.landing(source) + (r * puts + i) * cell
            want = message(ctx, n, source, ctx.rank, r * puts + i)
            b.compare(at, want, "SIG-2", "a signal is visible and a put before it is not", round=r, put=i)
            b.expect(at, want)
        b.expect_signal(0)


@case("sig2.chunks_in_order", clauses=("SIG-2", "SIG-5", "SIG-1"), comm={"heap_bytes": 2 << 20}, weak=True)
def chunks(ctx: Context) -> None:
    """A counter at k shows chunks 0 to k - 1, whatever came by then."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    n, cell = 64, 2048
    for k in range(n):
        size = cell - k % 3 * 16
        b.place(layout.source(to) + k * cell, message(ctx, size, ctx.rank, to, k))
        ch.put_signal(to, layout.source(to) + k * cell, layout.landing(ctx.rank) + k * cell, size, 6)
    shown = 0
    while shown < n:
        now = min(b.wait_signal(6, shown + 1), n)
        for k in range(shown, now):
            want = message(ctx, cell - k % 3 * 16, source, ctx.rank, k)
            b.compare(
                layout.landing(source) + k * cell,
                want,
                "SIG-2",
                "the counter passed a chunk that is not there",
                k=k,
                counter=now,
            )
            b.expect(layout.landing(source) + k * cell, want)
        shown = now
    b.expect_signal(6, n)


def _large(ctx: Context, clause: str, what: str, lengths: Sequence[int], *, fused: bool) -> None:
    b = ctx.bench
    to, source = neighbours(ctx)
    half = b.heap.size // 2
    for r, n in enumerate(lengths):
        b.place(0, message(ctx, n, ctx.rank, to, r))
        want = message(ctx, n, source, ctx.rank, r)
        ctx.barrier()
        if fused:
            b.channel().put_signal(to, 0, half, n, 0)
        else:
            b.channel().put(to, 0, half, n)
            b.channel().signal(to, 0)
        b.wait_signal(0, r + 1)
        # The end first: it is the last to arrive.
        b.compare(half + n - 65536, want[-65536:], clause, f"{what} overtook the end of its put", round=r)
        b.compare(half, want, clause, f"{what} overtook a part of its put", round=r)
        b.expect(half, want)
        b.expect_signal(0)
        b.quiet(0)
        ctx.barrier()


@case("sig2.large_then_signal", clauses=("SIG-2", "SIG-1"), ranks=(2,), comm={"heap_bytes": 26 << 20}, weak=True)
def large_then_signal(ctx: Context) -> None:
    """A signal right behind 4 MiB, then 12 MiB, does not overtake their last byte."""
    _large(ctx, "SIG-2", "a signal", (4 << 20, 12 << 20, 4 << 20, 12 << 20), fused=False)


@case(
    "sig2.beside_busy_channels",
    clauses=("SIG-2", "SIG-1"),
    ranks=(2, 3),
    weak=True,
    timeout=30,
    comm={"channels": 4, "heap_bytes": 4 << 20},
)
def beside_busy_channels(ctx: Context) -> None:
    """Signals show the puts of their channel while other channels pour data at the same target."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    room = layout.room // 4 // 4096 * 4096
    rounds, cell = 25, 4096
    bulk = room
    for c in range(4):
        b.place(layout.source(to) + c * room, message(ctx, bulk, ctx.rank, to, 1000 + c))
    for r in range(rounds):
        # Channel 0 carries the messages; the others repeat their bulk, the same bytes to the same place.
        for c in (1, 2, 3):
            b.channel(c).put(to, layout.source(to) + c * room, layout.landing(ctx.rank) + c * room, bulk)
        b.place(layout.source(to) + r * cell, message(ctx, cell, ctx.rank, to, r))
        b.channel(0).put(to, layout.source(to) + r * cell, layout.landing(ctx.rank) + r * cell, cell - 16)
        b.channel(0).put(
            to, layout.source(to) + r * cell + cell - 16, layout.landing(ctx.rank) + (r + 1) * cell - 16, 16
        )
        b.channel(0).signal(to, 0)
        b.channel(1 + r % 3).signal(to, 1 + r % 3)
        # The next round writes these landing bytes again: only once they are complete (PUT-7).
        for c in (1, 2, 3):
            b.channel(c).quiet()
    for r in range(rounds):
        b.wait_signal(0, r + 1)
        want = message(ctx, cell, source, ctx.rank, r)
        b.compare(layout.landing(source) + r * cell, want, "SIG-2", "a signal overtook a put of its channel", round=r)
        b.expect(layout.landing(source) + r * cell, want)
        b.expect_signal(0)
    for c in (1, 2, 3):
        count = len([r for r in range(rounds) if 1 + r % 3 == c])
        b.wait_signal(c, count)
        b.expect_signal(c, count)
        want = message(ctx, bulk, source, ctx.rank, 1000 + c)
        b.compare(layout.landing(source) + c * room, want, "SIG-2", "a signal overtook a put of its channel", channel=c)
        b.expect(layout.landing(source) + c * room, want)


@case("sig2.seen_at_once", clauses=("SIG-2", "MEM-3", "SIG-1"), ranks=(2,), weak=True)
def seen_at_once(ctx: Context) -> None:
    """A reader that looks at the word without a pause finds the bytes in the moment it changes."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    size, rounds = 1024, 100
    for k in range(rounds):
        local = layout.source(to) + k * size
        b.place(local, message(ctx, size, ctx.rank, to, k))
        want = message(ctx, size, source, ctx.rank, k)
        at = layout.landing(source) + k * size
        ch.put_signal(to, local, layout.landing(ctx.rank) + k * size, size, 0)
        if not ctx.until(lambda k=k: b.comm.read_signal(0) > k):  # type: ignore[misc]
            ctx.fail("SIG-1", "a signal did not come", k=k)
        b.compare(at, want, "MEM-3", "the word was visible before the bytes", k=k)
        b.expect(at, want)
        b.expect_signal(0)


@case(
    "sig2.step_by_step",
    clauses=("SIG-2", "SIG-1", "SIG-3", "SIG-5", "QUI-0", "QUI-1", "PUT-3", "MEM-3"),
    ranks=(2,),
    level="full",
    needs=("standstill",),
    comm={"progress": "caller"},
    weak=True,
)
def step_by_step(ctx: Context) -> None:
    """All stands still after each progress call, and the ranks look: what is shown, complete or given back is so."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    n, size = 12, 512
    posted = []
    for k in range(n):
        local, remote = layout.source(to) + k * size, layout.landing(ctx.rank) + k * size
        b.place(local, message(ctx, size, ctx.rank, to, k))
        if k % 3:
            posted.append(ch.put_signal(to, local, remote, size, 0))
        else:
            ch.put(to, local, remote, size)
            posted.append(ch.signal(to, 0))
        for word in (1, 2, 3):  # of these a later one is never ahead
            last = ch.signal(to, word)
    given_back = complete = shown = 0
    while True:
        b.comm.progress()
        while complete < n and posted[complete].done():
            complete += 1
        while given_back < n and posted[given_back].source_done():
            b.place(layout.source(to) + given_back * size, np.full(size, 0xFF, np.uint8))
            given_back += 1
        told, over = zip(*ctx.share([complete, last.done()], drive=False), strict=True)
        words = [b.comm.read_signal(word) for word in (3, 2, 1, 0)][::-1]
        ctx.check(words[0] >= told[source], "QUI-1", "a signal is complete and not applied", words=words, told=told)
        ctx.check(words[0] <= n, "SIG-1", "a word holds more than was added", words=words)
        ctx.check(sorted(words, reverse=True) == words, "SIG-5", "a signal is ahead of an earlier one", words=words)
        while shown < words[0]:
            want = message(ctx, size, source, ctx.rank, shown)
            b.compare(
                layout.landing(source) + shown * size, want, "SIG-2", "a signal is visible, and its put is not", k=shown
            )
            b.expect(layout.landing(source) + shown * size, want)
            shown += 1
        ctx.allgather(b"", drive=False)  # all have looked
        if all(over):
            break
        ctx.check(ctx.now() < ctx.deadline - 1, "SIG-1", "progress calls do not complete it", words=words, told=told)
    for word in (0, 1, 2, 3):
        b.expect_signal(word, n)


@case("sig3.large", clauses=("SIG-3", "SIG-1"), ranks=(2,), comm={"heap_bytes": 10 << 20}, weak=True)
def large(ctx: Context) -> None:
    """The signal of a put_signal of 4 MiB does not overtake its end."""
    _large(ctx, "SIG-3", "the signal of a put_signal", (4 << 20,) * 5, fused=True)


@case("sig3.own_bytes", clauses=("SIG-3", "SIG-1"), comm={"heap_bytes": 4 << 20}, weak=True)
def own_bytes(ctx: Context) -> None:
    """The signal of a put_signal shows its own bytes, every size."""
    send_round(ctx, ctx.bench, SIZES[::-1])


def _many_to_one(ctx: Context) -> None:
    b = ctx.bench
    channels = int(b.comm.info.channels)
    n = 60
    rng = np.random.default_rng([ctx.seed, ctx.rank])
    adds = [int(v) for v in rng.integers(0, 1 << 62, n)]
    for i, add in enumerate(adds):
        for target in range(ctx.size):
            b.channel(i % channels).signal(target, 3, add)
    b.quiet()
    total = sum(int(v) for v in ctx.share(sum(adds)))
    b.expect_signal(3, total)
    ctx.check_equal(
        b.comm.read_signal(3), total & MASK, "SIG-4", "adds of some rank or channel to one word are missing"
    )


@case("sig4.many_to_one", clauses=("SIG-4", "SIG-1"), comm={"channels": 4}, weak=True, many_writers=True)
def many_to_one(ctx: Context) -> None:
    """All ranks, over all their channels, add to one word of every rank."""
    _many_to_one(ctx)


@case(
    "sig4.many_to_one_eight_ranks",
    clauses=("SIG-4", "SIG-1"),
    ranks=(8,),
    level="full",
    comm={"channels": 4},
    timeout=30,
)
def many_to_one_eight(ctx: Context) -> None:
    """The same with 8 ranks."""
    _many_to_one(ctx)


@case("sig4.two_proxies", clauses=("SIG-4", "SIG-1", "QUI-2"), comm={"channels": 4, "proxies": 2})
def two_proxies(ctx: Context) -> None:
    """The same with two proxies a rank."""
    _many_to_one(ctx)


@case(
    "sig4.many_proxies",
    clauses=("SIG-4", "SIG-6", "SIG-1"),
    ranks=(2, 4),
    comm={"channels": 4, "proxies": 4},
    weak=True,
    many_writers=True,
)
def many_proxies(ctx: Context) -> None:
    """Every rank adds to one word of every other by four proxies at once: by whichever NIC they come, all count."""
    b = ctx.bench
    rounds, n = 8, 12
    for r in range(rounds):
        for _ in range(n):
            for c in range(4):
                for target in ctx.others:
                    b.channel(c).signal(target, 2, r + 1)
        b.expect_signal(2, 4 * n * (r + 1) * (ctx.size - 1))
        b.quiet()
        ctx.barrier()
        ctx.check_equal(b.comm.read_signal(2), b.words[2], "SIG-4", "adds of several proxies to a word are missing")
        ctx.barrier()
    b.wait_signal(2, b.words[2], "SIG-6")


@case("sig5.in_posting_order", clauses=("SIG-5", "SIG-1"), weak=True)
def in_posting_order(ctx: Context) -> None:
    """Of words that are signalled in turn, a later one is never ahead of an earlier one."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    ch = b.channel()
    rounds, words = 400, 4
    batch = commands([{"op": SIGNAL, "target": to, "slot": s, "add": 1} for s in range(words)])
    done = 0
    posted = 0
    while done < rounds or posted < rounds:
        for _ in range(min(20, rounds - posted)):
            ch.post_many(batch)
            posted += 1
        before = done
        # Read from the last to the first: what is seen of a later word must be there in the earlier ones.
        seen = [0] * words
        for s in reversed(range(words)):
            seen[s] = b.comm.read_signal(s)
        for s in range(words - 1):
            ctx.check(
                seen[s] >= seen[s + 1],
                "SIG-5",
                "a signal became visible before one that was posted earlier",
                word=s,
                seen=seen,
            )
        done = seen[words - 1]
        if done == before and posted == rounds and done < rounds:
            b.wait_signal(words - 1, done + 1)
    for s in range(words):
        b.expect_signal(s, rounds)


@case("sig5.mixed_sizes", clauses=("SIG-5", "SIG-1"), ranks=(2,), comm={"heap_bytes": 8 << 20}, weak=True)
def mixed_sizes(ctx: Context) -> None:
    """A small put_signal does not overtake a large one before it."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    sizes = [1 << 20, 16, 0, 256 << 10, 0, 16, 64 << 10, 0]
    places = [sum(sizes[:i]) for i in range(len(sizes))]
    last = len(sizes) - 1

    def arrived(r: int) -> bool:
        return b.comm.read_signal(last) > r

    for r in range(12):
        b.place(layout.source(to), message(ctx, sum(sizes), ctx.rank, to, r))
        for i, (n, at) in enumerate(zip(sizes, places, strict=True)):
            ch.put_signal(to, layout.source(to) + at, layout.landing(ctx.rank) + at, n, i)
        if not ctx.until(lambda r=r: arrived(r)):  # type: ignore[misc]
            ctx.fail("SIG-1", "a signal did not come", round=r)
        for i in range(last):
            ctx.check(b.comm.read_signal(i) > r, "SIG-5", "a later signal is visible and an earlier one is not", word=i)
        ch.quiet()
        ctx.barrier()
    want = message(ctx, sum(sizes), source, ctx.rank, 11)
    b.expect(layout.landing(source), want)
    for i in range(len(sizes)):
        b.expect_signal(i, 12)


@case("sig6.never_reset", clauses=("SIG-6", "SIG-1"), comm={"channels": 2}, weak=True)
def never_reset(ctx: Context) -> None:
    """Words only count: through waits, reads, quiets and barriers the sum stays."""
    b = ctx.bench
    to, source = neighbours(ctx)
    epochs = ctx.rounds(200)
    for epoch in range(1, epochs + 1):
        b.channel(epoch % 2).signal(to, 5, epoch)
        total = epoch * (epoch + 1) // 2
        b.wait_signal(5, total)
        ctx.check_equal(b.comm.read_signal(5), total, "SIG-6", "a word is not the sum of its epochs", epoch=epoch)
        if epoch % 10 == 0:
            b.comm.wait_signal(5, total)
            b.quiet()
        if epoch % 50 == 0:
            b.comm.barrier()
        ch = b.channel((epoch + 1) % 2)
        ch.signal(source, 6)  # its sender may go on
        b.wait_signal(6, epoch)
    b.expect_signal(5, epochs * (epochs + 1) // 2)
    b.expect_signal(6, epochs)


@case("sig6.equal_is_enough", clauses=("SIG-6", "SIG-1"), ranks=(2,))
def equal_is_enough(ctx: Context) -> None:
    """A wait ends at the value, past it, and at once for values that were reached before."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    b.channel().signal(to, 8, 1000)
    for value in (1000, 999, 1, 0):
        ctx.check_equal(
            b.wait_signal(8, value), 1000, "SIG-6", "a wait gave another value than the word's", value=value
        )
    b.expect_signal(8, 1000)


def _lacks(caps: dict[str, Any], ranks: int, strategy: str, single_writer: bool) -> bool | None:
    """Whether a promise is missing without which `strategy` cannot keep the clauses; None: these promises do not tell.

    Written from the table of needs, not from the library's.
    """
    if caps["staged"] and strategy not in ("sequenced_immediate", "sender_hold_mailbox"):
        return True  # the target's proxy has to take part
    flags, limits = caps["flags"], caps["limits"]
    by_read = flags["read_flushes"] and flags["completes_in_order"] and flags["error_stops"]
    visible = caps["completion_level"] == "visible" or flags["visible_on_request"] or by_read
    responders = limits["responder_atomics"] == 0 or limits["responder_atomics"] >= ranks
    adds = flags["atomic_add64"] and visible and responders
    if strategy == "ordered_atomic":
        return not (adds and flags["order_write_atomic"] and flags["error_stops"] and flags["signals_strict"])
    if strategy == "fenced_atomic":
        return not (adds and flags["fence_delivered"])
    if strategy == "sender_hold":
        return not adds
    if strategy == "sender_hold_sum":
        return not (visible and single_writer)
    if strategy == "sender_hold_mailbox":
        return not visible
    if limits["immediate_bits"] < 24:
        return True
    return False if flags["imm_visible"] and not flags["imm_needs_receive"] else None


@case("sig7.strategy", clauses=("SIG-7", "SIG-1"), ranks=(2,), timeout=40)
def strategy(ctx: Context) -> None:
    """A strategy is chosen for a reason that is told; one whose needs are not promised is refused with the reason."""
    try:
        b = ctx.bench
    except UcclEpError as error:
        ctx.fail("SIG-7", "with the strategy that was chosen no communicator can be made", error=str(error))
    chosen, reason = str(b.comm.info.strategy), b.comm.info.strategy_reason
    ctx.check(chosen in STRATEGIES, "SIG-7", "the communicator names no strategy", got=chosen)
    ctx.check(bool(reason), "SIG-7", "no reason is told for the strategy", strategy=chosen)
    lacking = _lacks(ctx.caps, ctx.size, chosen, single_writer=False)
    ctx.check(not lacking, "SIG-7", "a strategy was chosen whose needs the NIC does not promise", strategy=chosen)
    to, _ = neighbours(ctx)
    for name in STRATEGIES:
        for single_writer in (False, True):
            lacking = _lacks(ctx.caps, ctx.size, name, single_writer)
            try:
                other = ctx.open(strategy=name, single_writer=single_writer)
            except CapabilityError as error:
                ctx.check(lacking is not False, "SIG-7", "a strategy was refused that the NIC admits", strategy=name)
                ctx.check(name in str(error), "SIG-7", "the refusal does not name the strategy", got=str(error))
                ctx.check(len(error.record.text) > 60, "SIG-7", "the refusal has no reason", got=str(error))
                continue
            ctx.check(not lacking, "SIG-7", "a strategy was taken whose needs the NIC does not promise", strategy=name)
            ctx.check_equal(str(other.comm.info.strategy), name, "SIG-7", "the strategy asked for was not taken")
            other.channel().signal(to, 0)
            other.wait_signal(0, 1)
            other.expect_signal(0)
            ctx.close(other)


@case("sig7.weakest_promises", clauses=("SIG-7", "SIG-2", "SIG-1"), comm={"heap_bytes": 4 << 20})
def weakest_promises(ctx: Context) -> None:
    """Under the strategies that ask the NIC for least the clauses hold, and signals are held back."""
    held = 0
    for name in ("sender_hold", "sender_hold_mailbox"):
        try:
            b = ctx.open(strategy=name)
        except CapabilityError:
            continue  # sig7.strategy looks at the reason
        send_round(ctx, b, SIZES, fused=False)
        ctx.check_equal(str(b.comm.info.strategy), name, "SIG-7", "the strategy asked for was not taken")
        ctx.close(b)
        held += 1
    if not held and str(ctx.bench.comm.info.strategy) != "sequenced_immediate":
        ctx.fail("SIG-7", "no strategy works that asks the NIC for little", caps=str(ctx.caps))
    ctx.checked()


@case(
    "sig7.mixed_with_puts",
    clauses=("SIG-7", "SIG-2", "SIG-5", "SIG-1"),
    comm={"channels": 2, "heap_bytes": 2 << 20},
    weak=True,
)
def mixed_with_puts(ctx: Context) -> None:
    """Puts, signals and put_signals in a random order on two channels to all ranks, against a model."""
    b = ctx.bench
    layout = Layout(b)
    n, cell = ctx.rounds(160), 512
    cells = layout.room // cell
    assert n <= cells

    def plan(rank: int) -> list[tuple[int, int, int, int]]:
        """(channel, kind, target, bytes) of each step; kind: 0 put, 1 signal, 2 put_signal."""
        rng = np.random.default_rng([ctx.seed, rank, 7])
        return [
            (int(c), int(k), int(t), int(s) * 16)
            for c, k, t, s in zip(
                rng.integers(0, 2, n),
                rng.choice([0, 0, 1, 2, 2], n),
                rng.integers(0, ctx.size, n),
                rng.integers(0, cell // 16, n),
                strict=True,
            )
        ]

    for i, (c, kind, target, size) in enumerate(plan(ctx.rank)):
        ch = b.channel(c)
        local, remote = layout.source(target) + i * cell, layout.landing(ctx.rank) + i * cell
        slot = ctx.rank * 2 + c
        if kind != 1:
            b.place(local, message(ctx, size, ctx.rank, target, i))
        if kind == 0:
            ch.put(target, local, remote, size)
        elif kind == 1:
            ch.signal(target, slot)
        else:
            ch.put_signal(target, local, remote, size, slot)
    # As each of a source's signals shows: everything before it on the channel.
    for source in range(ctx.size):
        for c in range(2):
            pending: list[tuple[int, int]] = []
            count = 0
            for i, (channel, kind, target, size) in enumerate(plan(source)):
                if channel != c or target != ctx.rank:
                    continue
                if kind != 1:
                    pending.append((i, size))
                if kind != 0:
                    count += 1
                    b.wait_signal(source * 2 + c, count)
                    for k, bytes_ in pending:
                        want = message(ctx, bytes_, source, ctx.rank, k)
                        b.compare(
                            layout.landing(source) + k * cell,
                            want,
                            "SIG-2",
                            "a signal is visible and a put before it is not",
                            source=source,
                            step=k,
                        )
                        b.expect(layout.landing(source) + k * cell, want)
                    pending.clear()
            b.expect_signal(source * 2 + c, count)
            for k, bytes_ in pending:  # no signal behind them: the end's quiet brings them
                b.expect(layout.landing(source) + k * cell, message(ctx, bytes_, source, ctx.rank, k))
