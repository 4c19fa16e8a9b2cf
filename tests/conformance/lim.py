# SPDX-License-Identifier: Apache-2.0
"""Wrapping counters: LIM-1. Every channel starts shortly before a wrap, so that it is crossed at once."""

from __future__ import annotations

from uccl_ep.conformance.context import Context
from uccl_ep.conformance.registry import case

from ._tools import MASK, SIGNAL, Layout, commands, message, neighbours, put_command


def _across(ctx: Context, wrap: int, log2: int, lead: int) -> None:
    """Traffic of every kind from `lead` tickets before `wrap` to well behind it."""
    b = ctx.open(first_ticket=wrap - lead, ring_log2=log2, channels=2)
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel(0)
    slots = 1 << log2
    n, size = 3 * slots + 40, 48
    for k in range(n):
        b.place(layout.source(to) + k * 64, message(ctx, size, ctx.rank, to, k))
    ctx.barrier()
    k = 0
    signals = 0
    first = True
    while k < n:
        batch = min(n - k, 1 + k % slots)
        ticket = ch.post_many(
            commands(
                [
                    put_command(to, layout.source(to) + i * 64, layout.landing(ctx.rank) + i * 64, size)
                    for i in range(k, k + batch)
                ]
            )
        )
        if first:
            ctx.check_equal(ticket.value, wrap - lead + batch - 1, "LIM-1", "the first ticket is not the one asked for")
            first = False
        k += batch
        signal = ch.signal(to, 0)
        signals += 1
        if signals % 2:
            signal.wait()
            ctx.check(
                signal.done() and signal.source_done(),
                "LIM-1",
                "a ticket that was waited for is not done",
                ticket=signal.value,
            )
        else:
            ctx.check(ctx.until(signal.done), "LIM-1", "a ticket beside a wrap never became done", ticket=signal.value)
        complete = ch.stats()["complete"]
        ctx.check(
            complete >= k + signals, "LIM-1", "a ticket is done before its command is complete", complete=complete
        )
        ch.quiet_source()
    b.quiet(clause="LIM-1")
    b.wait_signal(0, signals, "LIM-1")
    ctx.check_equal(ch.stats()["complete"], n + signals, "LIM-1", "the counters lost track of commands beside a wrap")
    ctx.barrier()
    for k in range(n):
        want = message(ctx, size, source, ctx.rank, k)
        b.compare(layout.landing(source) + k * 64, want, "LIM-1", "a command beside a wrap was lost", k=k)
        b.expect(layout.landing(source) + k * 64, want)
    b.expect_signal(0, signals)
    ctx.close(b)


def _wraps(bits: int) -> None:
    @case(f"lim1.tickets_2_{bits}", clauses=("LIM-1", "QUI-1"), ranks=(2,), weak=bits in (16, 32))
    def across(ctx: Context) -> None:
        _across(ctx, 1 << bits, 4, 21)
        _across(ctx, 1 << bits, 6, 64)

    across.__doc__ = f"Tickets across 2^{bits}, in the middle of a lap and at its end."


for _bits in (8, 16, 24, 31, 32, 63):
    _wraps(_bits)


@case("lim1.batch_across_wrap", clauses=("LIM-1", "SIG-1", "QUI-1"), ranks=(2,), weak=True)
def batch_across_wrap(ctx: Context) -> None:
    """A batch as large as the ring that lies across 2^32, at every place of the lap."""
    to, _ = neighbours(ctx)
    for lead in (1, 3, 8, 15, 16):
        b = ctx.open(first_ticket=(1 << 32) - lead, ring_log2=4)
        for r in range(3):
            last = b.channel().post_many(
                commands([{"op": SIGNAL, "target": to, "slot": k, "add": 1} for k in range(16)])
            )
            ctx.check_equal(last.value, (1 << 32) - lead + 16 * (r + 1) - 1, "LIM-1", "tickets across 2^32 are wrong")
        last.wait()
        for k in range(16):
            b.wait_signal(k, 3, "LIM-1")
            b.expect_signal(k, 3)
        ctx.close(b)


@case("lim1.lap_parity", clauses=("LIM-1", "SIG-1", "QUI-1"), ranks=(2,), weak=True)
def lap_parity(ctx: Context) -> None:
    """Rings that start in an odd and in an even lap, at any slot of it."""
    to, _ = neighbours(ctx)
    for log2, start in ((1, 0), (1, 1), (1, 2), (1, 3), (3, 8), (3, 15), (3, 7), (5, 33), (5, 63), (7, 128), (7, 255)):
        b = ctx.open(first_ticket=start, ring_log2=log2)
        n = 5 * (1 << log2) + 3
        for _ in range(n):
            b.channel().signal(to, 2)
        b.quiet(0, clause="LIM-1")
        b.wait_signal(2, n, "LIM-1")
        b.expect_signal(2, n)
        ctx.close(b)


@case(
    "lim1.many_laps", clauses=("LIM-1", "SIG-1"), ranks=(2,), comm={"ring_log2": 3}, level="full", timeout=40, weak=True
)
def many_laps(ctx: Context) -> None:
    """70,000 commands through a ring of 8 slots: more than 2^13 laps and 2^16 tickets from zero."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    ch = b.channel()
    batch = commands([{"op": SIGNAL, "target": to, "slot": k % 3, "add": 1} for k in range(7)])
    for _ in range(10000):
        ch.post_many(batch)
    for slot, n in ((0, 30000), (1, 20000), (2, 20000)):
        b.wait_signal(slot, n)
        b.expect_signal(slot, n)


@case("lim1.signal_words", clauses=("LIM-1", "SIG-1"), ranks=(2,), weak=True)
def signal_words(ctx: Context) -> None:
    """Words pass 2^32, 2^63 and 2^64; waits for values behind the wrap end when those are reached."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    ch = b.channel()
    for slot, wrap in enumerate((1 << 8, 1 << 16, 1 << 31, 1 << 32, 1 << 63, 1 << 64)):
        if wrap > 1 << 62:
            # A wait compares distances below 2^63, so the way there is made in two steps.
            ch.signal(to, slot, wrap // 2 - 10)
            b.wait_signal(slot, 1, "LIM-1")
            ctx.barrier()
            ch.signal(to, slot, wrap // 2 - 10)
        else:
            ch.signal(to, slot, wrap - 20)
        ch.quiet()
        ctx.barrier()
        ctx.check_equal(
            b.comm.read_signal(slot), wrap - 20, "LIM-1", "a word before a wrap holds another sum", wrap=wrap
        )
        ctx.barrier()
        for k in range(40):
            ch.signal(to, slot)
            b.wait_signal(slot, (wrap - 19 + k) & MASK, "LIM-1")
        ch.quiet()
        ctx.barrier()
        ctx.check_equal(
            b.comm.read_signal(slot), (wrap + 20) & MASK, "LIM-1", "a word behind a wrap holds another sum", wrap=wrap
        )
        # Reached for good, also where the word is the smaller number by now: whoever is late waits for nothing.
        b.wait_signal(slot, wrap - 1, "LIM-1")
        b.expect_signal(slot, wrap + 20)


@case(
    "lim1.operations_16_bits",
    clauses=("LIM-1", "QUI-1"),
    ranks=(2,),
    level="full",
    timeout=60,
    comm={"ring_log2": 10},
    weak=True,
)
def operations_16_bits(ctx: Context) -> None:
    """More than 2^17 operations to one peer and to the own rank, in batches: sequences of 16 bits would wrap."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    ch = b.channel()
    mixed = commands(
        [{"op": SIGNAL, "target": (to, ctx.rank)[k % 8 == 7], "slot": k % 8, "add": 1} for k in range(1024)]
    )
    rounds = 140
    for _ in range(rounds):
        ch.post_many(mixed)
    b.quiet(0)
    ctx.barrier()
    for k in range(8):
        b.expect_signal(k, rounds * 128)
        ctx.check_equal(b.comm.read_signal(k), rounds * 128, "LIM-1", "operations are missing after many", slot=k)


def _sequences(name: str, first: int, n: int, level: str) -> None:
    @case(
        f"lim1.sequences_{name}",
        clauses=("LIM-1", "SIG-1", "SIG-2", "QUI-1"),
        ranks=(2,),
        level=level,
        timeout=60,
        comm={"first_sequence": first, "ring_log2": 6, "heap_bytes": 4 << 20},
        weak=True,
    )
    def across(ctx: Context) -> None:
        b = ctx.bench
        to, _ = neighbours(ctx)
        layout = Layout(b)
        ch = b.channel()
        size, cells, total = 128, 512, ctx.rounds(n, 300)
        tickets = []
        for k in range(total):
            at = k % cells * size
            if k >= cells:
                tickets[k - cells].wait()  # its slot is written again (PUT-7)
                b.wait_signal(1, k - cells + 1, "LIM-1")
            b.place(layout.source(to) + at, message(ctx, size, ctx.rank, to, k))
            tickets.append(ch.put_signal(to, layout.source(to) + at, layout.landing(ctx.rank) + at, size, 0))
            if k % 5 == 4:
                ch.signal(ctx.rank, 2)
                b.expect_signal(2)
            # The reader keeps up, half a lap behind.
            if k >= cells // 2:
                _read(ctx, k - cells // 2)
        for k in range(max(0, total - cells // 2), total):
            _read(ctx, k)
        b.quiet(0, clause="LIM-1")
        b.wait_signal(2, total // 5, "LIM-1")
        b.wait_signal(1, total, "LIM-1")
        b.expect_signal(0, total)
        b.expect_signal(1, total)

    def _read(ctx: Context, k: int) -> None:
        b = ctx.bench
        _, source = neighbours(ctx)
        at = Layout(b).landing(source) + k % 512 * 128
        b.wait_signal(0, k + 1, "LIM-1")
        want = message(ctx, 128, source, ctx.rank, k)
        b.compare(at, want, "SIG-2", "beside a wrap a signal vouches for a put that is not there", k=k)
        b.expect(at, want)
        b.channel().signal(source, 1)

    across.__doc__ = f"Numbers of operations to a peer cross 2^{name.rpartition('_')[2]}, return words and credits too."


# Row B7: a short sequence that meets its own past. 2^8 and 2^16 are crossed by counting from zero.
for _bits in (16, 24, 32, 63, 64):
    _sequences(f"2_{_bits}", (1 << _bits) - 150, 600, "core" if _bits in (24, 32, 64) else "full")
_sequences("long_from_2_24", (1 << 24) - 1000, 6000, "full")
