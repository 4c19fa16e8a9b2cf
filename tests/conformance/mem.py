# SPDX-License-Identifier: Apache-2.0
"""Memory: MEM-1, MEM-2."""

from __future__ import annotations

import resource

from uccl_ep.conformance.context import Context
from uccl_ep.conformance.registry import case
from uccl_ep.errors import (
    BootstrapError,
    CommandError,
    OutOfMemory,
    RegistrationError,
    SystemError_,
    UcclEpError,
)

from ._tools import SIZES, Layout, message, neighbours, send_round

_NO_MEMORY = (OutOfMemory, RegistrationError, SystemError_, BootstrapError, CommandError)


@case("mem1.heap_too_large", clauses=("MEM-1",), ranks=(2,), needs=("heaps",))
def heap_too_large(ctx: Context) -> None:
    """A heap beyond what commands can address is refused with the limit; a fitting one then works."""
    for heap, granularity in (((64 << 30) + 4096, 16), ((16 << 30) + 4096, 4), (1 << 60, 16), (0, 16)):
        with ctx.raises("MEM-1", CommandError, f"a heap of {heap} bytes") as caught:
            ctx.open(heap_bytes=heap, granularity=granularity)
        ctx.check(
            any(c.isdigit() for c in str(caught[0])), "MEM-1", "the refusal does not tell the limit", got=str(caught[0])
        )
    send_after(ctx)


def send_after(ctx: Context) -> None:
    """What was refused left nothing in the way."""
    b = ctx.open()
    to, _ = neighbours(ctx)
    b.channel().signal(to, 0).wait()
    ctx.barrier()
    ctx.check_equal(
        b.comm.read_signal(0), 1, "MEM-1", "after a refused registration the next communicator does not work"
    )
    b.expect_signal(0)
    ctx.close(b)


@case("mem1.reached_by_all", clauses=("MEM-1", "QUI-1"), ranks=(2, 4))
def reached_by_all(ctx: Context) -> None:
    """Memory that was taken at the start is reached by every rank, its first and its last byte."""
    b = ctx.bench
    layout = Layout(b)
    g = b.granularity
    last = layout.room - g
    try:
        for target in range(ctx.size):
            b.place(layout.source(target), message(ctx, 2 * g, ctx.rank, target, 0))
            b.channel().put(target, layout.source(target), layout.landing(ctx.rank), g)
            b.channel().put(target, layout.source(target) + g, layout.landing(ctx.rank) + last, g)
            b.channel().signal(target, ctx.rank)
        b.comm.quiet()
    except UcclEpError as error:
        ctx.fail("MEM-1", "memory was registered, and a NIC cannot reach it", error=str(error))
    ctx.barrier()
    for source in range(ctx.size):
        want = message(ctx, 2 * g, source, ctx.rank, 0)
        for at, part in ((0, want[:g]), (last, want[g:])):
            b.compare(layout.landing(source) + at, part, "QUI-1", "quiet is over and a put is missing", source=source)
            b.expect(layout.landing(source) + at, part)
        b.expect_signal(source)
    ctx.barrier()


@case("mem1.no_address_space", clauses=("MEM-1", "ERR-1"), ranks=(3,), needs=("processes",))
def no_address_space(ctx: Context) -> None:
    """One rank cannot map its heap: it is told why, the others that it was this rank, and all may try again."""
    poor = 1
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if ctx.rank == poor:
        with open("/proc/self/statm", encoding="ascii") as statm:
            now = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (96 << 20), limits[1]))
    try:
        with ctx.raises("MEM-1", _NO_MEMORY, "a heap that one rank cannot map") as caught:
            ctx.open(heap_bytes=1 << 30, shadow=False)
    finally:
        if ctx.rank == poor:
            resource.setrlimit(resource.RLIMIT_AS, limits)
    text = str(caught[0])
    if ctx.rank == poor:
        ctx.check(len(text) > 30, "MEM-1", "the refusal has no reason", got=text)
    else:
        ctx.check(str(poor) in text, "MEM-1", "the others are not told which rank could not register", got=text)
    ctx.barrier()
    send_after(ctx)


@case("mem1.kinds_of_pages", clauses=("MEM-1",), ranks=(2,))
def kinds_of_pages(ctx: Context) -> None:
    """Huge pages and locked memory are given as asked for, or refused with what would make it work."""
    to, source = neighbours(ctx)
    for wish in ({"huge_pages": True}, {"huge_pages": False}, {"lock_memory": True}):
        refused = ""
        try:
            b = ctx.open(heap_bytes=2 << 20, **wish)
        except UcclEpError as error:
            refused = str(error)
        outcomes = ctx.share(bool(refused))
        ctx.check_equal(
            len(set(outcomes)), 1, "MEM-1", "some ranks have a communicator and some were refused", wish=str(wish)
        )
        if refused:
            ctx.check(len(refused) > 60, "MEM-1", "the refusal does not say what would make it work", got=refused)
            continue
        half = b.heap.size // 2
        b.place(0, message(ctx, half, ctx.rank, to, 0))
        ctx.barrier()
        b.channel().put(to, 0, half, half).wait()
        ctx.barrier()
        want = message(ctx, half, source, ctx.rank, 0)
        b.compare(half, want, "MEM-1", "memory of this kind was registered and does not work", wish=str(wish))
        b.expect(half, want)
        ctx.close(b)


@case("mem1.no_descriptors", clauses=("MEM-1", "ERR-1"), ranks=(2,), needs=("processes",))
def no_descriptors(ctx: Context) -> None:
    """One rank has no descriptors left: an error that names the limit, and nothing remains open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if ctx.rank == 0:
        import os

        lowest = os.open("/dev/null", os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, limits[1]))
    try:
        ctx.open()
        refused = None
    except UcclEpError as error:
        refused = error
    finally:
        if ctx.rank == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    # A NIC may need none; whatever it is, all ranks come to the same.
    outcomes = ctx.share(refused is not None)
    ctx.check_equal(
        len(set(outcomes)), 1, "MEM-1", "some ranks have a communicator and some were refused", refused=outcomes
    )
    if refused is not None:
        ctx.check(len(str(refused)) > 30, "MEM-1", "the refusal has no reason", got=str(refused))
        send_after(ctx)


@case(
    "mem2.canaries_under_load",
    clauses=("MEM-2", "PUT-1", "SIG-1"),
    comm={"heap_bytes": 4 << 20, "channels": 2},
    weak=True,
    many_writers=True,
)
def canaries_under_load(ctx: Context) -> None:
    """Heavy traffic in one communicator changes nothing in another one of the same ranks: neither heap nor words."""
    bystander = ctx.open(heap_bytes=2 << 20, signals=256, name="bystander")
    b = ctx.bench
    send_round(ctx, b, SIZES)
    layout = Layout(b)
    b.comm.quiet()
    ctx.barrier()
    n = ctx.rounds(300)
    for k in range(n):
        for target in range(ctx.size):
            at = layout.landing(ctx.rank) + k % 2 * 512
            b.channel(k % 2).put_signal(target, layout.source(target), at, 512, 9)
        if k % 2:
            b.comm.quiet()  # the same bytes are written again (PUT-7)
    ctx.barrier()
    b.expect_signal(9, n * ctx.size)
    b.wait_signal(9, n * ctx.size)
    b.quiet()
    ctx.barrier()
    for source in range(ctx.size):
        b.loosen(layout.landing(source), 1024)
    assert bystander.shadow is not None
    bystander.compare(0, bystander.shadow, "MEM-2", "traffic of one communicator wrote into another's heap")
    for slot in range(bystander.signals):
        ctx.check_equal(
            bystander.comm.read_signal(slot),
            0,
            "MEM-2",
            "traffic of one communicator added to another's words",
            slot=slot,
        )


@case("mem2.groups_apart", clauses=("MEM-2", "SIG-1"), ranks=(4,))
def groups_apart(ctx: Context) -> None:
    """Communicators over ranks 0-3 and over 0 and 2, alive together: a signal changes the one that it was sent in."""
    everyone = ctx.bench
    pair = ctx.open([0, 2], name="pair") if ctx.rank in (0, 2) else None
    ctx.barrier()
    if ctx.rank == 0:
        everyone.channel().signal(2, 5, 100).wait()
    ctx.barrier()
    if pair is not None:
        ctx.check_equal(pair.comm.read_signal(5), 0, "MEM-2", "a signal in one communicator satisfied another")
    if ctx.rank == 2:
        everyone.expect_signal(5, 100)
        ctx.check_equal(everyone.comm.read_signal(5), 100, "SIG-1", "the signal did not reach its own communicator")
    ctx.barrier()
    if ctx.rank == 0:
        assert pair is not None
        pair.channel().signal(1, 5, 7).wait()  # rank 1 of the pair is rank 2 of all
    ctx.barrier()
    if ctx.rank == 2:
        assert pair is not None
        pair.expect_signal(5, 7)
        ctx.check_equal(pair.comm.read_signal(5), 7, "SIG-1", "the signal did not reach its own communicator")
    ctx.check_equal(
        everyone.comm.read_signal(5),
        100 if ctx.rank == 2 else 0,
        "MEM-2",
        "a signal in one communicator changed another's word",
    )
    if pair is not None:
        ctx.close(pair)


@case("mem2.close_beside_traffic", clauses=("MEM-2", "SIG-1", "SIG-3"), level="full", timeout=40)
def close_beside_traffic(ctx: Context) -> None:
    """Communicators that come and go beside one in use disturb nothing in it."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    for r in range(20):
        other = ctx.open(heap_bytes=256 << 10, name=f"guest{r}")
        for k in range(10):
            i = r * 10 + k
            b.place(layout.source(to) + i * 256, message(ctx, 256, ctx.rank, to, i))
            b.channel().put_signal(to, layout.source(to) + i * 256, layout.landing(ctx.rank) + i * 256, 256, 0)
            other.channel().signal(to, 1)
            other.expect_signal(1)
        ctx.close(other)
    b.wait_signal(0, 200)
    b.expect_signal(0, 200)
    for i in range(200):
        want = message(ctx, 256, source, ctx.rank, i)
        b.compare(
            layout.landing(source) + i * 256, want, "SIG-3", "a message beside closing communicators is missing", k=i
        )
        b.expect(layout.landing(source) + i * 256, want)


# Bytes wait so long in the target's NIC, after the completion where the NIC's completions say no more than that.
_LATE = {"backend_options": "visible_delay=60000", "heap_bytes": 2 << 20}


@case("mem3.late_visibility", clauses=("MEM-3", "SIG-2", "SIG-1"), needs=("faults",), comm=_LATE, weak=True)
def late_visibility(ctx: Context) -> None:
    """A signal counts only once its payload is visible, on a NIC that holds delivered bytes back for long."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    n, size = 80, 1536
    for k in range(n):
        b.place(layout.source(to) + k * size, message(ctx, size, ctx.rank, to, k))
        if k % 2:
            ch.put_signal(to, layout.source(to) + k * size, layout.landing(ctx.rank) + k * size, size, 0)
        else:
            ch.put(to, layout.source(to) + k * size, layout.landing(ctx.rank) + k * size, size)
            ch.signal(to, 0)
    for k in range(n):
        b.wait_signal(0, k + 1)
        want = message(ctx, size, source, ctx.rank, k)
        b.compare(
            layout.landing(source) + k * size, want, "MEM-3", "a signal is applied and its bytes are not visible", k=k
        )
        b.expect(layout.landing(source) + k * size, want)
        b.expect_signal(0)


@case("mem3.complete_is_visible", clauses=("MEM-3", "QUI-1"), needs=("faults",), comm=_LATE, weak=True)
def complete_is_visible(ctx: Context) -> None:
    """What quiet covers is visible to a reader that learns of it out of band, on the same NIC."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    size = 2048
    for r in range(25):
        at = r * size
        b.place(layout.source(to) + at, message(ctx, size, ctx.rank, to, r))
        ch.put(to, layout.source(to) + at, layout.landing(ctx.rank) + at, size)
        if r % 3 == 0:
            ch.signal(to, 1)
            b.expect_signal(1)
        b.quiet(0)
        ctx.barrier()
        want = message(ctx, size, source, ctx.rank, r)
        b.compare(layout.landing(source) + at, want, "MEM-3", "an acknowledgement was taken for visibility", round=r)
        b.expect(layout.landing(source) + at, want)
        ctx.check_equal(b.comm.read_signal(1), b.words[1], "QUI-1", "quiet is over and a signal is missing", round=r)
        ctx.barrier()
