# SPDX-License-Identifier: Apache-2.0
"""Progress, limits, threads: PRG-1 to PRG-3, LIM-1, THR-1."""

from __future__ import annotations

import itertools

import numpy as np

from uccl_ep.conformance.context import Context
from uccl_ep.conformance.registry import case
from uccl_ep.errors import Aborted, ChannelClosed, DeadlineExceeded, UcclEpError

from ._tools import SIGNAL, Layout, commands, message, neighbours, put_command

# Nothing moves but in calls of the rank itself.
CALLER = ("caller",)


@case("prg1.no_further_call", clauses=("PRG-1", "SIG-1"), weak=True)
def no_further_call(ctx: Context) -> None:
    """Who posts and then makes no call of the library at all is served; the reader polls memory alone."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    for k in range(20):
        b.place(layout.source(to) + k * 4096, message(ctx, 4096, ctx.rank, to, k))
        b.channel().put_signal(to, layout.source(to) + k * 4096, layout.landing(ctx.rank) + k * 4096, 4096, 0)
    want = message(ctx, 4096, source, ctx.rank, 19)
    at = layout.landing(source) + 19 * 4096
    # Reads of the heap are no calls of the library: its own threads must do the work.
    arrived = ctx.until(lambda: np.array_equal(b.heap[at : at + 4096], want))
    ctx.check(arrived, "PRG-1", "posted commands are executed only while somebody calls the library")
    b.wait_signal(0, 20)
    for k in range(20):
        b.expect(layout.landing(source) + k * 4096, message(ctx, 4096, source, ctx.rank, k))
    b.expect_signal(0, 20)


@case("prg1.counters", clauses=("PRG-1", "QUI-1"), ranks=(1, 2), comm={"channels": 2})
def counters(ctx: Context) -> None:
    """After 1000 commands every counter says 1000, and bytes and signals are as posted."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    size = 64
    b.place(layout.source(to), message(ctx, size, ctx.rank, to, 0))
    for k in range(1000):
        if k % 4:
            b.channel(1).put(to, layout.source(to), layout.landing(ctx.rank), size)
            b.channel(1).quiet()
        else:
            b.channel(1).signal(to, 0)
    b.quiet(1)
    stats = b.channel(1).stats()
    for name, want in (
        ("posted", 1000),
        ("taken", 1000),
        ("source", 1000),
        ("complete", 1000),
        ("failed", 0),
        ("bytes", 750 * size),
        ("signals", 250),
    ):
        ctx.check_equal(stats[name], want, "PRG-1", f"after 1000 commands the counter {name} is wrong")
    ctx.check_equal(b.channel(0).stats()["posted"], 0, "PRG-1", "commands were counted on another channel")
    ctx.barrier()
    b.expect(layout.landing(source), message(ctx, size, source, ctx.rank, 0))
    b.expect_signal(0, 250)


@case(
    "prg1.bytes_in_flight", clauses=("PRG-1", "SIG-1", "SIG-3"), ranks=(4, 8), comm={"heap_bytes": 32 << 20}, timeout=40
)
def bytes_in_flight(ctx: Context) -> None:
    """All ranks put megabytes to rank 0 at once with default settings: nothing fails, and the NIC's limit is kept.

    Row C11: what is beyond the limit of some NICs comes to nothing but exceeded retries.
    """
    b = ctx.bench
    layout = Layout(b)
    size = 32768
    n = layout.room // size
    if ctx.rank:
        for k in range(n):
            b.place(layout.source(0) + k * size, message(ctx, size, ctx.rank, 0, k))
        ctx.barrier()
        for k in range(n):
            b.channel().put_signal(0, layout.source(0) + k * size, layout.landing(ctx.rank) + k * size, size, ctx.rank)
        b.quiet(0, clause="PRG-1")
    else:
        ctx.barrier()
        for source in range(1, ctx.size):
            b.wait_signal(source, n)
            b.expect_signal(source, n)
            for k in range(n):
                want = message(ctx, size, source, 0, k)
                b.compare(layout.landing(source) + k * size, want, "SIG-3", "a put of an incast is missing", k=k)
                b.expect(layout.landing(source) + k * size, want)
    limit = ctx.caps["limits"]["max_inflight_bytes"]
    for proxy in b.comm.stats()["proxies"]:
        peak = proxy["inflight_bytes_peak"]
        ctx.check(
            not limit or peak <= limit, "PRG-1", "more bytes in flight than the NIC takes", peak=peak, limit=limit
        )
        ctx.check(not ctx.rank or peak > 0, "PRG-1", "the counter of bytes in flight does not move")


@case("prg3.target_held", clauses=("PRG-3", "SIG-1", "SIG-3"), ranks=(3, 4), needs=("stop",), comm={"ring_log2": 8})
def target_held(ctx: Context) -> None:
    """The target does not run for a while and everybody goes on sending to it: nothing overruns there (row D3)."""
    b = ctx.bench
    layout = Layout(b)
    n, size = ctx.rounds(500, 300), 64  # more than a ring
    slots = layout.room // size
    if ctx.rank:
        for k in range(min(n, slots)):
            b.place(layout.source(0) + k * size, message(ctx, size, ctx.rank, 0, k))
    ctx.barrier()
    if ctx.rank == 1:
        ctx.stop(0, 0.2)
    if ctx.rank:
        for k in range(n):
            at = k * size
            b.channel().put_signal(0, layout.source(0) + at, layout.landing(ctx.rank) + at, size, ctx.rank)
        b.quiet(0, clause="PRG-3")
    ctx.barrier()
    if not ctx.rank:
        for source in range(1, ctx.size):
            ctx.check_equal(b.comm.read_signal(source), n, "SIG-1", "signals to a rank that stood still are missing")
            b.expect_signal(source, n)
            for k in range(n):
                want = message(ctx, size, source, 0, k)
                b.compare(layout.landing(source) + k * size, want, "SIG-3", "a put to it is missing", k=k)
                b.expect(layout.landing(source) + k * size, want)
    ctx.check_equal(sorted(b.comm.lost), [], "PRG-3", "a rank that stood still for a moment counts as lost")


@case("prg1.caller_drives", clauses=("PRG-1", "SIG-1"), ranks=(1, 2), needs=CALLER, comm={"progress": "caller"})
def caller_drives(ctx: Context) -> None:
    """Without threads of the library's own, its progress call and its waits move everything."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    for k in range(50):
        b.place(layout.source(to) + k * 256, message(ctx, 256, ctx.rank, to, k))
        ticket = ch.put_signal(to, layout.source(to) + k * 256, layout.landing(ctx.rank) + k * 256, 256, 0)
        if k % 2:
            ticket.wait()
        else:
            ctx.check(
                ctx.until(lambda t=ticket: b.comm.progress() is not None and t.done()),
                "PRG-1",  # type: ignore[misc]
                "progress calls do not complete a command",
            )
    ctx.barrier()
    b.wait_signal(0, 50)
    for k in range(50):
        want = message(ctx, 256, source, ctx.rank, k)
        b.compare(layout.landing(source) + k * 256, want, "PRG-1", "a command was not executed", k=k)
        b.expect(layout.landing(source) + k * 256, want)
    b.expect_signal(0, 50)


def _starvation(ctx: Context, busy: tuple[int, ...], quiet_one: int, same_target: bool) -> None:
    """The rings are filled before anything is executed: what comes first is the engine's choice, not the machine's.

    Measured in commands: how many of the others' are executed before a single one is.
    """
    b = ctx.bench
    layout = Layout(b)
    target = 1
    other = target if same_target else 2
    slots, size = 1 << int(b.comm.info.ring_log2), 64
    bound = slots // 4
    if ctx.rank == 0:
        b.place(layout.source(target), message(ctx, size, 0, target, 0))
        for r in range(4):
            for c in busy:
                batch = [put_command(target, layout.source(target), layout.landing(0) + c * 4096, size)] * slots
                b.channel(c).post_many(commands(batch), timeout=0)
            before = {c: int(b.channel(c).stats()["complete"]) for c in busy}
            ticket = b.channel(quiet_one).signal(other, 0, timeout=0)
            while not ticket.done():
                b.comm.progress()
                ahead = max(int(b.channel(c).stats()["complete"]) - before[c] for c in busy)
                # One pass may find both done, and what came first is not to be seen then.
                ctx.check(
                    ahead <= bound or ticket.done(),
                    "PRG-2",
                    "full channels were served far ahead of a single command of another",
                    commands=ahead,
                    bound=bound,
                    round=r,
                )
                ctx.check(ctx.now() < ctx.deadline - 2, "PRG-2", "a command beside full channels is not executed")
            b.quiet()
    ctx.barrier()
    if ctx.rank == target:
        for c in busy:
            want = message(ctx, size, 0, target, 0)
            b.compare(
                layout.landing(0) + c * 4096, want, "PRG-2", "the full channels' own puts did not arrive", channel=c
            )
            b.expect(layout.landing(0) + c * 4096, want)
    if ctx.rank == other:
        b.expect_signal(0, 4)


# Rings longer than what a proxy may have outstanding of one: they are empty only once most of it has been executed.
@case(
    "prg2.last_channel",
    clauses=("PRG-2",),
    ranks=(3,),
    needs=("caller",),
    comm={"progress": "caller", "channels": 3, "ring_log2": 13},
)
def last_channel(ctx: Context) -> None:
    """With all others full, a command on the last channel to another rank is served within a quarter of a lap."""
    _starvation(ctx, (0, 1), 2, same_target=False)


@case(
    "prg2.first_channel",
    clauses=("PRG-2",),
    ranks=(2,),
    needs=("caller",),
    # What a NIC has outstanding to the same rank nobody overtakes, so that is bounded by what _starvation allows: a
    # quarter of a ring. Who starves the first channel executes all of the others' rings before it, four times as much.
    comm={"progress": "caller", "channels": 3, "ring_log2": 11, "max_inflight_peer": 512},
)
def first_channel(ctx: Context) -> None:
    """The same for the first channel, to the rank that the others fill up."""
    _starvation(ctx, (1, 2), 0, same_target=True)


@case(
    "prg2.middle_channel",
    clauses=("PRG-2",),
    ranks=(2,),
    needs=("caller",),
    comm={"progress": "caller", "channels": 16, "ring_log2": 11},
)
def middle_channel(ctx: Context) -> None:
    """The same for one of sixteen, which are full all but this one."""
    _starvation(ctx, (*range(9), *range(10, 16)), 9, same_target=True)


@case("prg2.stopped_target", clauses=("PRG-2", "SIG-1"), ranks=(3, 4), needs=("stop",), comm={"channels": 2})
def stopped_target(ctx: Context) -> None:
    """A stopped rank delays commands to itself at most: the others' go on among themselves."""
    b = ctx.bench
    stopped = ctx.size - 1
    others = list(range(stopped))
    ctx.barrier()
    if ctx.rank == stopped:
        ctx.barrier()
        for source in others:
            b.expect_signal(source, 50)
        return
    if ctx.rank == 0:
        ctx.stop(stopped)
    ctx.barrier(others)
    to = others[(ctx.rank + 1) % len(others)]
    for k in range(50):
        b.channel(0).signal(stopped, ctx.rank)
        b.channel(k % 2).signal(to, 9)
    b.wait_signal(9, 50, "PRG-2")
    b.expect_signal(9, 50)
    ctx.barrier(others)
    if ctx.rank == 0:
        ctx.resume(stopped)
    ctx.barrier()


@case(
    "prg3.two_slots",
    clauses=("PRG-3", "THR-1", "SIG-1"),
    ranks=(2,),
    needs=("threads",),
    comm={"ring_log2": 1},
    weak=True,
)
def two_slots(ctx: Context) -> None:
    """A ring of two slots with four producers: they wait for each other, and nothing is lost."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    threads, n, size = 4, ctx.rounds(150), 64

    def post(t: int) -> None:
        ch = b.channel()
        for k in range(n):
            at = (t * n + k) * size
            ch.put_signal(to, layout.source(to) + at, layout.landing(ctx.rank) + at, size, t)

    for k in range(threads * n):
        b.place(layout.source(to) + k * size, message(ctx, size, ctx.rank, to, k))
    ctx.barrier()
    ctx.join([ctx.spawn(post, t) for t in range(threads)])
    for t in range(threads):
        b.wait_signal(t, n, "PRG-3")
        b.expect_signal(t, n)
    for k in range(threads * n):
        want = message(ctx, size, source, ctx.rank, k)
        b.compare(
            layout.landing(source) + k * size, want, "PRG-3", "a command was lost or overwritten in a full ring", k=k
        )
        b.expect(layout.landing(source) + k * size, want)
    ctx.check_equal(b.channel().stats()["posted"], threads * n, "PRG-3", "more or fewer commands than were posted")


@case(
    "prg3.full_ring",
    clauses=("PRG-3", "SIG-1", "PUB-2"),
    ranks=(2,),
    needs=("caller",),
    comm={"progress": "caller", "ring_log2": 4},
)
def full_ring(ctx: Context) -> None:
    """A full ring refuses who may not wait, takes nothing from it, and goes on once there is space."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    ch = b.channel()
    for lap in range(5):
        for k in range(16):
            ch.signal(to, k, timeout=0)
        for what in range(3):
            with ctx.raises("PRG-3", UcclEpError, "a post to a full ring that may not wait"):
                if what == 2:
                    ch.post_many(commands([{"op": SIGNAL, "target": to, "slot": 0, "add": 1}] * 2), timeout=0)
                else:
                    ch.signal(to, 20, timeout=0)
        ctx.check_equal(ch.stats()["posted"], 16 * (lap + 1), "PRG-3", "a refused post took a ticket")
        if lap % 2:
            ch.quiet()
        elif not ctx.until(lambda lap=lap: b.comm.progress() is not None and ch.stats()["taken"] == 16 * (lap + 1)):  # type: ignore[misc]
            ctx.fail("PRG-3", "a full ring is not drained")
    ch.quiet()
    ctx.barrier()
    for k in range(16):
        b.wait_signal(k, 5)
        b.expect_signal(k, 5)


@case(
    "prg3.gives_up",
    clauses=("PRG-3", "ERR-1"),
    ranks=(2,),
    needs=("caller",),
    comm={"progress": "caller", "ring_log2": 4},
)
def gives_up(ctx: Context) -> None:
    """A producer that gives up waiting closes its channel with an error; what was posted before is not overwritten."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    ch = b.channel()
    before = [ch.signal(to, k) for k in range(16)]
    with ctx.raises("PRG-3", DeadlineExceeded, "a wait for space that ends at its deadline"):
        ch.signal(to, 20, timeout=1e-9)
    closed = ctx.until(lambda: b.comm.progress() is not None and ch.stats()["state"] not in (0, "open"))
    ctx.check(
        closed, "PRG-3", "a producer gave up its tickets and the channel stays open", state=str(ch.stats()["state"])
    )
    with ctx.raises("PRG-3", ChannelClosed, "a post to the closed channel"):
        ch.signal(to, 21)
    with ctx.raises("PRG-3", UcclEpError, "a quiet over the tickets that were given up"):
        ch.quiet()
    records = [r for r in b.comm.errors() if r.clause == "PRG-3"]
    ctx.check(bool(records) and records[0].channel == 0, "PRG-3", "no record tells that a producer gave up")
    ctx.barrier()
    for k in range(16):
        b.wait_signal(k, 1, "PRG-3")  # posted before: neither lost nor overwritten
        b.expect_signal(k)
    for slot in (20, 21):
        ctx.check_equal(b.comm.read_signal(slot), 0, "PRG-3", "a command that was given up was executed", slot=slot)
    # In a reset's own meetings nobody makes progress for others: all of this rank's is complete before.
    for ticket in before:
        ticket.wait()
    ctx.barrier()
    b.reset()
    ch.signal(to, 3).wait()
    b.wait_signal(3, 1, "PRG-3")
    b.expect_signal(3)


@case(
    "prg3.abort_ends_the_wait",
    clauses=("PRG-3", "ABT-1"),
    ranks=(1,),
    needs=("threads", "caller"),
    comm={"progress": "caller", "ring_log2": 2},
)
def abort_ends_the_wait(ctx: Context) -> None:
    """A producer that waits for space is woken by abort."""
    b = ctx.bench
    for _ in range(4):
        b.channel().signal(0, 0)
    b.comm.abort("test")
    b.broken = True
    with ctx.raises("PRG-3", Aborted, "a post after abort"):
        b.channel().signal(0, 0)
    with ctx.raises("ABT-1", Aborted, "a wait after abort"):
        b.channel().quiet()


def _producers(ctx: Context, threads: int, n: int) -> None:
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    size = 64
    assert threads * n * size <= layout.room
    for k in range(threads * n):
        b.place(layout.source(to) + k * size, message(ctx, size, ctx.rank, to, k))
    ctx.barrier()

    def post(t: int) -> list[int]:
        ch = b.channel()
        mine = []
        for k in range(n):
            at = (t * n + k) * size
            mine.append(ch.put_signal(to, layout.source(to) + at, layout.landing(ctx.rank) + at, size, t).value)
        return mine

    tickets = ctx.join([ctx.spawn(post, t) for t in range(threads)])
    for mine in tickets:
        ctx.check(
            all(a < z for a, z in itertools.pairwise(mine)),
            "THR-1",
            "tickets of one thread are not in order",
        )
    flat = sorted(t for mine in tickets for t in mine)
    ctx.check_equal(len(set(flat)), threads * n, "THR-1", "two commands got the same ticket")
    ctx.check_equal(flat[-1] - flat[0] + 1, threads * n, "THR-1", "tickets are missing")
    for t in range(threads):
        b.wait_signal(t, n)
        b.expect_signal(t, n)
    for k in range(threads * n):
        want = message(ctx, size, source, ctx.rank, k)
        b.compare(
            layout.landing(source) + k * size, want, "THR-1", "a command of one of many producers was lost or torn", k=k
        )
        b.expect(layout.landing(source) + k * size, want)


@case(
    "thr1.eight_producers",
    clauses=("THR-1", "SIG-1"),
    ranks=(2,),
    needs=("threads",),
    comm={"ring_log2": 5, "heap_bytes": 2 << 20},
    weak=True,
)
def eight_producers(ctx: Context) -> None:
    """Eight threads post to one channel with a short ring."""
    _producers(ctx, 8, ctx.times(200))


@case(
    "thr1.eight_producers_each",
    clauses=("THR-1", "SIG-1"),
    ranks=(4,),
    needs=("threads",),
    level="full",
    timeout=40,
    comm={"ring_log2": 8, "heap_bytes": 8 << 20},
)
def eight_producers_each(ctx: Context) -> None:
    """The same on four ranks at once."""
    _producers(ctx, 8, ctx.times(400))


@case(
    "thr1.post_wait_and_read", clauses=("THR-1", "SIG-1", "QUI-1"), ranks=(2,), needs=("threads",), comm={"channels": 2}
)
def post_wait_and_read(ctx: Context) -> None:
    """Threads that post, wait for tickets, for signals and for quiet at the same time do not disturb each other."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    n = 150

    def post(t: int) -> None:
        for k in range(n):
            ticket = b.channel(t % 2).signal(to, t)
            if k % 7 == 0:
                ticket.wait()
            if k % 50 == 0:
                b.channel(t % 2).quiet()

    def read(t: int) -> None:
        for k in range(1, n + 1, 10):
            b.wait_signal(t, k)

    def quiet() -> None:
        for _ in range(20):
            b.quiet()
            b.comm.quiet_source()

    ctx.join([ctx.spawn(post, t) for t in range(3)] + [ctx.spawn(read, t) for t in range(3)] + [ctx.spawn(quiet)])
    b.quiet()
    ctx.barrier()
    for t in range(3):
        ctx.check_equal(b.comm.read_signal(t), n, "THR-1", "signals of concurrent threads are missing", thread=t)
        b.expect_signal(t, n)
