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


@case("mem1.heap_too_large", clauses=("MEM-1",), ranks=(2,))
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
)
def canaries_under_load(ctx: Context) -> None:
    """Heavy traffic in one communicator changes nothing in another one of the same ranks: neither heap nor words."""
    bystander = ctx.open(heap_bytes=2 << 20, signals=256, name="bystander")
    b = ctx.bench
    send_round(ctx, b, SIZES)
    layout = Layout(b)
    for k in range(300):
        for target in range(ctx.size):
            b.channel(k % 2).put_signal(target, layout.source(target), layout.landing(ctx.rank), 512, 9)
            if k % 2:
                b.channel(k % 2).quiet()
    ctx.barrier()
    b.expect_signal(9, 300 * ctx.size)
    b.wait_signal(9, 300 * ctx.size)
    b.quiet()
    ctx.barrier()
    for source in range(ctx.size):
        b.loosen(layout.landing(source), 512)
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
