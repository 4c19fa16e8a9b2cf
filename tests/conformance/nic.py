# SPDX-License-Identifier: Apache-2.0
"""Operations that the NIC itself fails: ERR-2, ERR-3, ERR-6.

No case can make a NIC fail, so these ask for nothing of the kind. On one that does not fail they see that all goes
well; on one that does, in a fabric or because a lane lets it, that nobody is told otherwise.
"""

from __future__ import annotations

from uccl_ep.conformance.context import Context
from uccl_ep.conformance.registry import case
from uccl_ep.errors import UcclEpError

from ._tools import SIGNAL, Layout, commands, message, neighbours, put_command


@case("err2.success_means_done", clauses=("ERR-2", "QUI-1"), comm={"heap_bytes": 2 << 20}, weak=True)
def success_means_done(ctx: Context) -> None:
    """Whatever the NIC fails, a ticket whose wait succeeded is done; one that failed has a record, and so has quiet."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    n, size = ctx.rounds(200), 512
    for k in range(n):
        b.place(layout.source(to) + k * size, message(ctx, size, ctx.rank, to, k))
    ctx.barrier()
    done = 0
    failure: UcclEpError | None = None
    while done < n and failure is None:
        at = done * size
        try:
            ch.put(to, layout.source(to) + at, layout.landing(ctx.rank) + at, size).wait()
            done += 1
        except UcclEpError as error:
            failure = error
    if failure is not None:
        ctx.check_equal(failure.record.peer, to, "ERR-2", "the failure names another rank", error=str(failure))
        ctx.check(bool(failure.record.text), "ERR-2", "the failure has no text", error=failure.name)
        records = [r for r in b.comm.errors() if r.peer == to]
        ctx.check(bool(records), "ERR-2", "a command failed and left no record", error=str(failure))
        with ctx.raises("ERR-2", UcclEpError, "a quiet that covers the failed put"):
            ch.quiet()
    # With what the sender believes, and not before: the target then looks at exactly that much.
    believed = ctx.share(done)[source]
    for k in range(believed):
        want = message(ctx, size, source, ctx.rank, k)
        b.compare(layout.landing(source) + k * size, want, "ERR-2", "a wait succeeded and its put is not there", k=k)
    b.loosen(layout.landing(source), n * size)
    b.broken = any(ctx.share(failure is not None))


@case(
    "err3.behind_a_failure",
    clauses=("ERR-3", "SIG-1", "ERR-1"),
    comm={"heap_bytes": 2 << 20, "ring_log2": 8},
    weak=True,
)
def behind_a_failure(ctx: Context) -> None:
    """Puts and signals in large batches, so that much is queued behind what fails: no signal vouches for lost bytes."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    batches, n, size = 4, 100, 256
    image = message(ctx, batches * n * size, ctx.rank, to, 0)
    b.place(layout.source(to), image)
    ctx.barrier()
    failed = False
    try:
        for r in range(batches):
            batch = []
            for k in range(r * n, r * n + n):
                batch.append(put_command(to, layout.source(to) + k * size, layout.landing(ctx.rank) + k * size, size))
                batch.append({"op": SIGNAL, "target": to, "slot": 0, "add": 1})
            ch.post_many(commands(batch))
        ch.quiet()
    except UcclEpError:
        failed = True
    # What is behind a failure ends too, before anybody looks.
    ended = ctx.until(lambda: ch.stats()["complete"] == ch.stats()["posted"])
    ctx.check(ended, "ERR-1", "commands behind a failure neither end nor fail", report=b.comm.report())
    troubles = ctx.share(failed)
    word = b.comm.read_signal(0)
    ctx.check(word <= batches * n, "SIG-1", "more signals than were sent", got=word)
    if not troubles[source]:
        ctx.check_equal(word, batches * n, "SIG-1", "nobody reports a failure, and signals are missing")
    want = message(ctx, word * size, source, ctx.rank, 0)
    b.compare(layout.landing(source), want, "ERR-3", "a signal vouches for a put that is not there", counter=word)
    b.loosen(layout.landing(source), batches * n * size)
    b.expect_signal(0, word)
    b.broken = any(troubles)


@case(
    "err6.after_failures",
    clauses=("ERR-6", "SIG-1"),
    comm={"heap_bytes": 2 << 20, "ring_log2": 8},
    timeout=40,
    weak=True,
)
def after_failures(ctx: Context) -> None:
    """Rounds of traffic that may fail, each followed by a reset: nothing of before it is applied after it."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    n, size = 100, 256
    b.place(layout.source(to), message(ctx, n * size, ctx.rank, to, 0))
    batch = []
    for k in range(n):
        at = k * size
        batch.append(put_command(to, layout.source(to) + at, layout.landing(ctx.rank) + at, size))
        batch.append({"op": SIGNAL, "target": to, "slot": 3, "add": 1})
    ctx.barrier()
    for r in range(6):
        try:
            ch.post_many(commands(batch))
            ch.quiet()
        except UcclEpError:
            ctx.checked()  # it may fail; what counts is what a new incarnation sees of it
        ctx.barrier()
        b.reset()
        ctx.check_equal(b.comm.errors(), [], "ERR-6", "a reset left records behind", round=r)
        mark = message(ctx, n * size, source, ctx.rank, r + 1)
        b.heap[layout.landing(source) : layout.landing(source) + n * size] = mark
        ctx.barrier()
        try:
            # Behind what might be left of the old: it would be executed first.
            for _ in range(20):
                ch.signal(to, 4).wait()
        except UcclEpError:
            ctx.checked()
        ctx.barrier()
        ctx.check_equal(b.comm.read_signal(3), 0, "ERR-6", "signals of before a reset were applied after it", round=r)
        b.compare(layout.landing(source), mark, "ERR-6", "puts of before a reset were executed after it", round=r)
        ctx.barrier()
        b.reset()
    b.loosen(layout.landing(source), n * size)


@case("err6.closed_without_quiet", clauses=("ERR-6", "SIG-1"), ranks=(2, 3), weak=True)
def closed_without_quiet(ctx: Context) -> None:
    """A communicator is closed in the middle of its traffic and another made: it sees nothing of the first (row D5)."""
    to, source = neighbours(ctx)
    for r in range(6):
        b = ctx.open(shadow=False)
        b.broken = True
        layout = Layout(b)
        mark = message(ctx, layout.room, source, ctx.rank, r)
        b.heap[layout.landing(source) : layout.landing(source) + layout.room] = mark
        ctx.barrier()
        if r % 2:
            # Nothing was sent in this one: what is here comes from the one before.
            for _ in range(20):
                b.channel().signal(to, 1).wait()
            ctx.barrier()
            ctx.check_equal(b.comm.read_signal(1), 20, "SIG-1", "signals of a new communicator are missing", round=r)
            ctx.check_equal(b.comm.read_signal(0), 0, "ERR-6", "signals of a closed communicator came here", round=r)
            b.compare(layout.landing(source), mark, "ERR-6", "puts of a closed communicator came here", round=r)
        else:
            for k in range(150):
                at = k * 512 % layout.room
                b.channel().put_signal(to, layout.source(to) + at, layout.landing(ctx.rank) + at, 512, 0)
            ctx.checked()
        ctx.barrier()
        ctx.close(b)
