# SPDX-License-Identifier: Apache-2.0
"""Ranks that die, stop or leave: ERR-1, ERR-5, and that nothing remains of them."""

from __future__ import annotations

import contextlib
import os

from uccl_ep.conformance.bench import Bench
from uccl_ep.conformance.context import Context
from uccl_ep.conformance.registry import case
from uccl_ep.errors import BootstrapError, ChannelClosed, DeadlineExceeded, ForkedError, PeerLost, UcclEpError

from ._tools import Layout, message, neighbours

# What a command to a rank that is gone may fail with: lost, and once that is known, refused.
GONE = (PeerLost, ChannelClosed)


def _among(ctx: Context, b: Bench, ranks: list[int], slot: int, clause: str, n: int = 30) -> None:
    """The survivors exchange messages among themselves, and each arrives."""
    layout = Layout(b)
    before = b.comm.read_signal(slot)
    ctx.barrier(ranks)
    for k in range(n):
        for target in ranks:
            at = k * 256
            b.heap[layout.source(target) + at : layout.source(target) + at + 256] = message(
                ctx, 256, ctx.rank, target, k
            )
            b.channel().put_signal(target, layout.source(target) + at, layout.landing(ctx.rank) + at, 256, slot)
    try:
        b.comm.wait_signal(slot, before + n * len(ranks))
    except (DeadlineExceeded, PeerLost) as error:
        ctx.fail(clause, "survivors cannot go on among themselves", error=str(error), holds=b.comm.read_signal(slot))
    b.comm.quiet()
    ctx.barrier(ranks)
    for source in ranks:
        for k in range(n):
            b.compare(
                layout.landing(source) + k * 256,
                message(ctx, 256, source, ctx.rank, k),
                clause,
                "a message among survivors is wrong",
                source=source,
                k=k,
            )
    ctx.barrier(ranks)


@case(
    "err5.killed_in_traffic",
    clauses=("ERR-5", "ERR-1", "SIG-1"),
    ranks=(4, 8),
    needs=("kill",),
    timeout=60,
    comm={"channels": 2},
    weak=True,
    many_writers=True,
)
def killed_in_traffic(ctx: Context) -> None:
    """A rank is killed in full traffic: commands to it fail typed and in time, the others go on among themselves."""
    # Where only its silence tells that a rank is dead (its NIC has confirmed all, its proxy still owes an answer), that
    # takes peer_timeout, or more on a machine so slow that silence is forgiven: waits must not end before.
    patience = 2 * ctx.timeout
    b = ctx.open(shadow=False, timeout=patience)
    b.broken = True  # a rank is missing at the end
    victim = 2
    survivors = [r for r in range(ctx.size) if r != victim]
    layout = Layout(b)
    if ctx.rank == 0:
        pause = float(ctx.rng.random()) * 0.05
        ctx.spawn(lambda: (ctx.sleep(ctx.moment(pause)), ctx.kill(victim)))
    failure: UcclEpError | None = None
    sent = 0
    while failure is None or ctx.rank == victim:
        try:
            for target in range(ctx.size):
                # Bytes that are written again are complete by then: PUT-7.
                at = layout.landing(ctx.rank) + sent % 16 * 1024
                b.channel(sent % 2).put_signal(target, layout.source(target), at, 1024, 8 + ctx.rank)
            sent += 1
            if sent % 16 == 0:
                b.comm.quiet()
        except GONE as error:
            failure = error
        except UcclEpError as error:
            ctx.fail("ERR-5", "the loss of a rank shows as another error", error=f"{type(error).__name__}: {error}")
        if ctx.now() > ctx.deadline - 5:
            ctx.fail("ERR-1", "a rank is dead and posting and quiet to it still succeed", sent=sent)
    ctx.check(
        ctx.until(lambda: victim in b.comm.lost, patience),
        "ERR-5",
        "the dead rank is not among the lost ones",
        lost=sorted(b.comm.lost),
    )
    ctx.check_equal(sorted(b.comm.lost), [victim], "ERR-5", "others than the dead rank are counted as lost")
    ctx.refused("ERR-5", GONE, "a command to the dead rank", lambda: b.channel(0).signal(victim, 0))
    with ctx.raises("ERR-1", PeerLost, "a wait for a signal of the dead rank"):
        b.comm.wait_signal(50, 1, source=victim)
    with ctx.raises("ERR-1", PeerLost, "a wait for a signal of anybody"):
        b.comm.wait_signal(50, 1)
    told: UcclEpError | None = None
    try:
        b.comm.quiet()
    except UcclEpError as error:
        told = error
    # Commands that were complete before the death are none that failed.
    failed = sum(b.channel(c).stats()["failed"] for c in range(2))
    if failed:
        ctx.check(
            isinstance(told, PeerLost),
            "ERR-5",
            "a quiet over failed commands to the dead rank says something else",
            failed=failed,
            got=repr(told),
        )
    if told is not None:
        ctx.check_equal(told.record.peer, victim, "ERR-5", "the failure names another rank")
    # Commands to the living are executed although the channel has failed tickets.
    ctx.barrier(survivors)
    b.comm.exclude(victim)
    b.comm.quiet()
    _among(ctx, b, survivors, 1, "ERR-5")


@case(
    "err5.others_unharmed",
    clauses=("ERR-5", "SIG-1", "ERR-1"),
    ranks=(3, 4),
    needs=("kill",),
    timeout=30,
    comm={"channels": 2},
)
def others_unharmed(ctx: Context) -> None:
    """Before anybody excludes the dead rank, signals to and from the living still arrive."""
    b = ctx.open(shadow=False)
    b.broken = True
    victim = ctx.size - 1
    survivors = list(range(victim))
    ctx.barrier()
    if ctx.rank == victim:
        ctx.kill(victim)
        ctx.sleep(ctx.timeout)
    ctx.check(ctx.until(lambda: _lost(b, victim)), "ERR-1", "nobody notices a dead rank while it is sent to")
    ctx.barrier(survivors)
    others = [r for r in survivors if r != ctx.rank]
    with ctx.raises("ERR-5", PeerLost, "a wait for a signal of the dead rank"):
        b.comm.wait_signal(9, 1, source=victim)
    with ctx.raises("ERR-5", DeadlineExceeded, "a wait for a signal that a living rank does not send"):
        b.comm.wait_signal(9, 1, source=others[0], timeout=ctx.moment(0.05))
    for target in others:
        for k in range(20):
            try:
                b.channel(k % 2).signal(target, 3)
            except UcclEpError as error:
                ctx.fail("ERR-5", "the loss of one rank closed the channel to another", target=target, error=str(error))
    for source in others:
        try:
            b.comm.wait_signal(3, 20 * len(others), source=source)
        except UcclEpError as error:
            ctx.fail("ERR-5", "a wait for the living ends with the dead", source=source, error=str(error))
    ctx.check_equal(b.comm.read_signal(3), 20 * len(others), "SIG-1", "signals of the living are lost or doubled")
    ctx.barrier(survivors)
    b.comm.exclude(victim)
    _among(ctx, b, survivors, 1, "ERR-5")


def _lost(b: Bench, victim: int) -> bool:
    with contextlib.suppress(*GONE):
        b.channel(0).signal(victim, 60)
    return victim in b.comm.lost


@case(
    "err5.killed_at_any_moment",
    clauses=("ERR-5", "ERR-1", "SIG-1"),
    ranks=(3,),
    needs=("kill", "nested"),
    level="full",
    timeout=90,
)
def killed_at_any_moment(ctx: Context) -> None:
    """A rank dies at random moments of its life, the start and the end among them, fifteen times: nobody hangs."""
    if ctx.rank:
        return ctx.barrier()
    for k in range(15):
        delay = float(ctx.rng.random()) * 0.06

        def life(sub: Context, delay: float = delay) -> None:
            if sub.rank == 1:
                sub.spawn(lambda: (sub.sleep(sub.moment(delay)), sub.kill(1)))
            try:
                b = sub.open(shadow=False, settle=False, bootstrap_timeout=2 * sub.time_scale)
                b.broken = True
                for r in range(100000):
                    for target in range(sub.size):
                        b.channel().signal(target, r % 8)
                    if r % 8 == 7:
                        b.comm.quiet()
            except (BootstrapError, DeadlineExceeded, *GONE):  # in time, and typed
                sub.checked()
            if sub.rank != 1:
                _rest(sub)

        outcome = ctx.run_group(3, life, deadline=ctx.timeout * 2)
        ctx.check_equal(
            outcome.status,
            "pass",
            "ERR-1",
            "a rank died and another did not end well",
            moment=delay,
            repeat=k,
            detail=str(outcome.detail)[:2000],
        )
    ctx.barrier()


def _rest(sub: Context) -> None:
    """The two that are left meet once more, so that none ends before both have seen the loss."""
    sub.barrier([0, 2])


@case("err1.stopped_peer", clauses=("ERR-1", "SIG-1"), ranks=(2, 3), needs=("stop",))
def stopped_peer(ctx: Context) -> None:
    """A wait for a rank that is stopped ends at its deadline; once it goes on, so does everything."""
    b = ctx.bench
    stopped = ctx.size - 1
    others = list(range(stopped))
    ctx.barrier()
    if ctx.rank == 0:
        ctx.stop(stopped)
    if ctx.rank != stopped:
        ctx.barrier(others)
        with ctx.raises("ERR-1", DeadlineExceeded, "a wait for a stopped rank"):
            b.comm.wait_signal(4, 1, timeout=0.3, source=stopped)
        ctx.barrier(others)
    if ctx.rank == 0:
        ctx.resume(stopped)
    ctx.barrier()  # or the stopped rank might have signalled before it was stopped
    if ctx.rank == stopped:
        for target in others:
            b.channel().signal(target, 4)
    else:
        b.wait_signal(4, 1, "ERR-1", source=stopped)
        b.expect_signal(4)
    ctx.barrier()
    ctx.check_equal(sorted(b.comm.lost), [], "ERR-1", "a rank that was stopped for a moment counts as lost")


@case("err1.slow_peer", clauses=("ERR-1", "SIG-2", "SIG-1"), ranks=(2, 4), needs=("stop",), weak=True)
def slow_peer(ctx: Context) -> None:
    """Ranks that pause again and again, as on a machine under load: everything comes later, and nothing is lost."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    rounds, size = 60, 2048
    pauses = set(ctx.rng.choice(rounds, 4, replace=False).tolist())
    for k in range(rounds):
        if k in pauses:
            ctx.stop(ctx.rank, 0.03)
        at = k * size % layout.room
        b.place(layout.source(to) + at, message(ctx, size, ctx.rank, to, k))
        b.channel().put_signal(to, layout.source(to) + at, layout.landing(ctx.rank) + at, size, 0)
        b.wait_signal(0, k + 1, source=source)
        want = message(ctx, size, source, ctx.rank, k)
        b.compare(layout.landing(source) + at, want, "SIG-2", "a message of a slow rank is wrong", k=k)
        b.expect(layout.landing(source) + at, want)
        b.channel().signal(source, 1)  # it may write there again
        b.wait_signal(1, k + 1, source=to)
    b.expect_signal(0, rounds)
    b.expect_signal(1, rounds)
    ctx.check_equal(sorted(b.comm.lost), [], "ERR-1", "a slow rank counts as lost")


@case("err1.missing_at_the_start", clauses=("ERR-1",), ranks=(3,), comm={"bootstrap_timeout": 0.7})
def missing_at_the_start(ctx: Context) -> None:
    """One rank never starts: the others are told within the bootstrap's deadline, and nothing of theirs remains."""
    if ctx.rank != 2:
        with ctx.raises("ERR-1", BootstrapError, "a communicator one of whose ranks never starts"):
            ctx.open()
    ctx.barrier()
    b = ctx.open(bootstrap_timeout=2 * ctx.timeout)
    to, _ = neighbours(ctx)
    b.channel().signal(to, 0).wait()
    b.expect_signal(0)


@case("err1.dies_at_the_start", clauses=("ERR-1",), ranks=(3,), needs=("kill",))
def dies_at_the_start(ctx: Context) -> None:
    """One rank dies while the communicator is made: the others get an error, not a hang."""
    ctx.barrier()
    if ctx.rank == 2:
        ctx.kill(2)
        ctx.sleep(ctx.timeout)
    with ctx.raises(
        "ERR-1", (BootstrapError, PeerLost, DeadlineExceeded), "a communicator one of whose ranks has died"
    ):
        ctx.open()
    ctx.barrier([0, 1])


@case("err1.leaves_without_goodbye", clauses=("ERR-1", "ERR-5", "SIG-1"), ranks=(3, 4), needs=("kill",), timeout=30)
def leaves_without_goodbye(ctx: Context) -> None:
    """A rank is gone; the others close what they had and make a new communicator among themselves."""
    old = ctx.open(shadow=False)
    old.broken = True
    leaver = ctx.size - 1
    rest = list(range(leaver))
    ctx.barrier()
    if ctx.rank == leaver:
        ctx.kill(leaver)
        ctx.sleep(ctx.timeout)
    ctx.check(ctx.until(lambda: _lost_any(old, leaver)), "ERR-1", "nobody notices that a rank left")
    ctx.close(old)
    new = ctx.open(rest)
    for target in range(new.size):
        new.channel().signal(target, 0)
        new.expect_signal(0)
    new.wait_signal(0, new.size, "ERR-5")
    ctx.close(new)


def _lost_any(b: Bench, rank: int) -> bool:
    with contextlib.suppress(*GONE):
        b.channel().signal(rank, 61)
    return rank in b.comm.lost


@case("err1.restart_after_kill", clauses=("ERR-1",), ranks=(1,), needs=("kill", "nested"), timeout=60)
def restart_after_kill(ctx: Context) -> None:
    """All ranks are killed in traffic, six times: the next start works, and no file, mapping or process remains."""
    shared = "/dev/shm"
    before = set(os.listdir(shared)) if os.path.isdir(shared) else set()
    theirs = "uccl_ep_conformance_foreign_"  # of this run, and of others on this machine
    foreign = os.path.join(shared, f"{theirs}{os.getpid()}")
    if os.path.isdir(shared):
        with open(foreign, "x") as f:
            f.write("not yours")
    try:
        for k in range(6):

            def traffic(sub: Context) -> None:
                b = sub.open(shadow=False)
                b.broken = True
                sub.checked()
                sub.barrier()
                if sub.rank == 0:
                    sub.spawn(lambda: (sub.sleep(sub.moment(0.02)), [sub.kill(r) for r in (3, 1, 2, 0)]))
                while True:
                    try:
                        for target in range(sub.size):
                            b.channel().signal(target, 0)
                        b.comm.quiet()
                    except UcclEpError:
                        sub.sleep(10.0)

            outcome = ctx.run_group(4, traffic, deadline=ctx.timeout * 2)
            ctx.check_equal(
                outcome.ranks,
                ["killed"] * 4,
                "ERR-1",
                "ranks that were killed did not all start and die",
                repeat=k,
                status=outcome.status,
                detail=str(outcome.detail)[:2000],
            )
            if os.path.isdir(shared):
                # Other programs may come and go there meanwhile: only what bears our name counts.
                new = sorted(n for n in set(os.listdir(shared)) - before if "uccl" in n and not n.startswith(theirs))
                ctx.check_equal(new, [], "ERR-1", "files remain of ranks that were killed", repeat=k)
                with open(foreign) as f:
                    ctx.check_equal(f.read(), "not yours", "ERR-1", "a foreign file was touched")
    finally:
        if os.path.exists(foreign):
            os.unlink(foreign)

    def works(sub: Context) -> None:
        b = sub.bench
        b.channel().signal((sub.rank + 1) % sub.size, 0)
        b.wait_signal(0, 1, "ERR-1")
        b.expect_signal(0)

    outcome = ctx.run_group(4, works, deadline=ctx.timeout * 2)
    ctx.check_equal(
        outcome.status,
        "pass",
        "ERR-1",
        "after ranks were killed a new start does not work",
        detail=str(outcome.detail)[:2000],
    )


@case("err1.fork_after_start", clauses=("ERR-1", "SIG-1"), ranks=(2,), needs=("processes",))
def fork_after_start(ctx: Context) -> None:
    """A process forks with a communicator open: the child is refused, the parent is not disturbed."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()

    def child() -> list[str]:
        said = []
        for attempt in (
            lambda: ch.signal(to, 40),
            lambda: ch.put(to, 0, 0, 16),
            lambda: b.comm.quiet(timeout=0),
            lambda: b.comm.wait_signal(40, 1, timeout=0.1),
            lambda: b.comm.read_signal(0),
        ):
            try:
                attempt()
                said.append("allowed")
            except ForkedError:
                said.append("refused")
            except UcclEpError as error:
                said.append(f"{type(error).__name__}: {error}")
        b.comm.close()
        return said

    n, size = 200, 256
    for k in range(n):
        b.place(layout.source(to) + k * size, message(ctx, size, ctx.rank, to, k))
        ch.put_signal(to, layout.source(to) + k * size, layout.landing(ctx.rank) + k * size, size, 0)
        if k % 66 == 3:
            said = ctx.in_child(child)
            ctx.check_equal(
                said, ["refused"] * 5, "ERR-1", "a forked child may use its parent's communicator, or dies of it"
            )
    for k in range(n):
        b.wait_signal(0, k + 1)
        want = message(ctx, size, source, ctx.rank, k)
        b.compare(layout.landing(source) + k * size, want, "ERR-1", "the parent's data is wrong after a fork", k=k)
        b.expect(layout.landing(source) + k * size, want)
    b.expect_signal(0, n)


@case("err1.ranks_disagree", clauses=("ERR-1",), ranks=(2, 3))
def ranks_disagree(ctx: Context) -> None:
    """Ranks that ask for different heaps, signals, granules or channels are all refused; the same ranks then agree."""
    for name, values in (
        ("heap_bytes", (1 << 20, 2 << 20)),
        ("signals", (64, 128)),
        ("granularity", (16, 4)),
        ("channels", (1, 2)),
    ):
        with ctx.raises("ERR-1", UcclEpError, f"ranks with different {name}") as caught:
            ctx.open(**{name: values[ctx.rank == ctx.size - 1]})
        ctx.check(
            any(c.isdigit() for c in str(caught[0])),
            "ERR-1",
            "the refusal tells neither rank nor values",
            got=str(caught[0]),
            option=name,
        )
    b = ctx.bench
    to, _ = neighbours(ctx)
    b.channel().signal(to, 0).wait()
    b.expect_signal(0)
