# SPDX-License-Identifier: Apache-2.0
"""Cases for kernels: many producers at a time, what other lanes publish, waits inside a kernel, deadlines there.

The kernels are csrc/device/cases.cu; the other cases' calls are made by kernels, too, in the lane that has a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from uccl_ep._native import NO_TICKET
from uccl_ep.conformance import gpu
from uccl_ep.conformance.bench import Bench
from uccl_ep.conformance.context import Context
from uccl_ep.conformance.gpu import Launch, Session
from uccl_ep.conformance.patterns import Bytes
from uccl_ep.conformance.registry import case
from uccl_ep.errors import Aborted, CommandError, DeadlineExceeded, UcclEpError

from ._tools import SIGNAL, commands, neighbours

BYTES = gpu.CASE_WORDS * 8  # of a message
HEAP = 2 << 20
SOON = 5.0  # milliseconds, where threads run when they can
TROUBLE = {
    1: "a post failed",
    2: "a wait failed",
    3: "the other blocks did not come",
    4: "tickets of a warp's batch are not consecutive, in the order of lanes",
    5: "a lane that posted nothing got a ticket",
    6: "the kernel saw other bytes than were put before the signal",
}


def _session(ctx: Context) -> Session:
    assert ctx.session is not None, "the case needs a device"
    return ctx.session


def _message(rank: int, number: int, seed: int) -> Bytes:
    """As cases.cu writes it."""
    words = (np.uint64((rank + 1) << 48 | number << 8) | np.arange(gpu.CASE_WORDS, dtype=np.uint64)) ^ np.uint64(seed)
    return words.view(np.uint8)


def _check(ctx: Context, b: Bench, out: Any, clauses: dict[int, str]) -> int:
    """Nothing went wrong in the kernel; how many messages there were."""
    bad = np.flatnonzero(out[:, 0])
    if len(bad):
        kind, what = (int(x) for x in out[bad[0], :2])
        record = ""
        try:
            b.comm.check_device()
        except UcclEpError as error:
            record = str(error)
        ctx.fail(
            clauses.get(kind, next(iter(clauses.values()))), TROUBLE[kind], thread=int(bad[0]), threads=len(bad),
            detail=hex(what), record=record,
        )  # fmt: skip
    ctx.checked()
    b.comm.check_device()
    return int(out[:, 2].sum())


def _finished(ctx: Context, launch: Launch, clause: str) -> Any:
    """What the kernel has to say. It ends, and what runs it finds nothing wrong with it."""
    try:
        return launch.finish(2 * ctx.timeout)
    except UcclEpError as error:
        ctx.fail(clause, "the kernel does not end as it should", error=str(error))


def _sent(form: int, blocks: int, threads: int, width: int, rounds: int) -> Iterator[int]:
    """The numbers of the messages that case_send posts."""
    warps = -(-threads // width)
    producers = {
        gpu.LANE: blocks * warps,
        gpu.WHOLE_WARP: blocks * warps,
        gpu.WHOLE_BLOCK: blocks,
        gpu.GRID: blocks - 1,
        gpu.APART: blocks * threads,
        gpu.MANY: blocks * threads,
    }.get(form, blocks * (warps - 1))
    for number in range(producers * rounds):
        producer, turn = divmod(number, rounds)
        if form != gpu.APART or (producer + turn) % 3:
            yield number


def _send(ctx: Context, b: Bench, form: int, clause: str, *, rounds: int, slot: int = 0, odd: int = 0) -> None:
    """Every rank's kernel sends to its neighbour; what came is looked at when it is quiet. `odd`: threads beyond whole
    warps."""
    session = _session(ctx)
    to, source = neighbours(ctx)
    width = session.width
    blocks, threads = 3, 3 * width + odd % width
    remote = b.heap.size // 2
    seed = int(ctx.shared_rng.integers(1 << 48))
    numbers = list(_sent(form, blocks, threads, width, rounds))
    assert (numbers[-1] + 1) * BYTES <= remote
    launch = session.start(
        b.comm, "case_send", blocks, threads, form=form, target=to, channels=b.comm.info.channels, slot=slot,
        rounds=rounds, local=0, remote=remote, seed=seed,
    )  # fmt: skip
    count = _check(ctx, b, _finished(ctx, launch, clause), {1: clause, 2: "QUI-1", 4: "PUB-2", 5: "PUB-2"})
    ctx.check_equal(count, len(numbers), clause, "the kernel posted another number of messages")
    b.wait_signal(slot, len(numbers))
    for number in numbers:
        b.expect(number * BYTES, _message(ctx.rank, number, seed))
        b.expect(remote + number * BYTES, _message(source, number, seed))
    b.expect_signal(slot, len(numbers))
    assert b.shadow is not None
    b.compare(remote, b.shadow[remote:], clause, "what a kernel wrote before it posted did not arrive")
    ctx.check_equal(
        b.comm.read_signal(slot), len(numbers), "SIG-1", "not every message's signal was applied exactly once"
    )
    ctx.barrier()


_FORMS: dict[str, tuple[int, str, str, int, int, int]] = {
    # id: form, clause, what, ring_log2, channels, rounds
    "pub1.lanes_write": (gpu.LANE, "PUB-1", "A warp's lanes write, they meet, one posts", 4, 1, 8),
    "pub1.warp_writes": (
        gpu.WHOLE_WARP,
        "PUB-1",
        "A warp writes and posts as a whole, which publishes all of it",
        4,
        2,
        8,
    ),
    "pub1.block_writes": (gpu.WHOLE_BLOCK, "PUB-1", "A block writes and posts as a whole", 2, 1, 24),
    "pub1.other_blocks_write": (gpu.GRID, "PUB-1", "Blocks write and hand over to another one, which posts", 3, 3, 16),
    "pub2.warps_on_two_slots": (gpu.MANY, "PUB-2", "Warps post together on a ring that holds two commands", 1, 1, 2),
    "pub2.warps_on_sixteen_slots": (gpu.MANY, "PUB-2", "Warps post together, across the end of short rings", 4, 2, 3),
    "thr1.divergent_threads": (
        gpu.APART,
        "THR-1",
        "Every thread posts, at its own times, on several channels",
        3,
        3,
        3,
    ),
    "thr1.poster": (gpu.THROUGH_POSTER, "THR-1", "Warps hand their commands to the warp that posts", 4, 2, 16),
    "thr1.poster_tickets": (
        gpu.POSTER_TICKETS,
        "THR-1",
        "The same, each with a ticket that it then waits for",
        2,
        1,
        8,
    ),
}


def _declare(id: str, form: int, clause: str, what: str, rounds: int, comm: dict[str, Any], level: str) -> None:
    clauses = tuple(dict.fromkeys((clause, "PUB-1", "PUB-2", "QUI-1", "SIG-1")))

    def send(ctx: Context) -> None:
        b = ctx.bench
        _send(ctx, b, form, clause, rounds=rounds)
        # Again, in blocks that end with a part of a warp: every form but those that count lanes takes them.
        if form not in (gpu.MANY, gpu.APART):
            other = ctx.open(name="odd")
            _send(ctx, other, form, clause, rounds=rounds, odd=5)

    send.__doc__ = what
    case(
        id, clauses=clauses, ranks=(1, 2, 4), needs=("device",), comm={"heap_bytes": HEAP, **comm}, level=level,
        timeout=40, weak=level == "core",
    )(send)  # fmt: skip


for _id, (_form, _clause, _what, _ring, _channels, _rounds) in _FORMS.items():
    _declare(_id, _form, _clause, _what, _rounds, {"ring_log2": _ring, "channels": _channels}, "core")
for _log2 in (32, 63):
    for _name, _form in (("threads", gpu.APART), ("warps", gpu.MANY), ("poster", gpu.POSTER_TICKETS)):
        _declare(
            f"lim1.kernels_{_name}_past_2_{_log2}",
            _form,
            "LIM-1",
            f"Tickets of kernels cross 2^{_log2}, and rings their end with them",
            2,
            {"ring_log2": 2, "channels": 2, "first_ticket": (1 << _log2) - 30},
            "full",
        )


@case("pub2.more_than_the_ring", clauses=("PUB-2",), ranks=(1, 2), needs=("device", "warps"), comm={"ring_log2": 1})
def more_than_the_ring(ctx: Context) -> None:
    """A warp that posts more commands together than the ring has slots is refused, and the ring is as it was."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    ch = b.channel()
    for n in (3, 17, 32):
        batch = commands([{"op": SIGNAL, "target": to, "slot": 0, "add": 1}] * n)
        with ctx.raises("PUB-2", CommandError, f"{n} commands together on 2 slots"):
            ch.post_many(batch)
        ctx.check_equal(ch.stats()["posted"], 0, "PUB-2", "a refused batch took tickets", n=n)
    ctx.check_equal(ch.signal(to, 1).value, 0, "PUB-2", "a refused batch took tickets")
    b.expect_signal(1)


@case("put2.kernel_waits", clauses=("PUT-2", "SIG-2", "SIG-1", "QUI-1"), ranks=(1, 2, 4), needs=("device",),
      comm={"channels": 2, "ring_log2": 3}, timeout=40, weak=True)  # fmt: skip
def kernel_waits(ctx: Context) -> None:
    """A kernel that runs all the while sees signals come, and in the same moment the bytes put before them."""
    b = ctx.bench
    session = _session(ctx)
    to, source = neighbours(ctx)
    rounds, remote, seed = 24, b.heap.size // 2, int(ctx.shared_rng.integers(1 << 48))
    launch = session.start(
        b.comm, "case_exchange", 2, 2 * session.width, target=to, source=source, channels=2, slot=4, rounds=rounds,
        local=0, remote=remote, seed=seed,
    )  # fmt: skip
    out = _finished(ctx, launch, "PUT-2")
    ctx.check_equal(
        _check(ctx, b, out, {1: "PUT-2", 2: "SIG-1", 6: "SIG-2"}), 2 * rounds, "PUT-2", "a round is missing"
    )
    for number in range(rounds):
        b.expect(number * BYTES, _message(ctx.rank, number, seed))
        b.expect(remote + number * BYTES, _message(source, number, seed))
    for slot in (4, 5):
        b.expect_signal(slot, rounds // 2)


@case(
    "qui5.kernels",
    clauses=("QUI-5", "QUI-1", "SIG-1"),
    ranks=(3,),
    needs=("device",),
    comm={"channels": 2},
    timeout=40,
    weak=True,
)
def relay(ctx: Context) -> None:
    """A kernel's quiet, then its signal to a third rank, whose kernel signals on: the bytes are there."""
    b = ctx.bench
    session = _session(ctx)
    rounds, remote, seed = 16, b.heap.size // 2, int(ctx.shared_rng.integers(1 << 48))
    launch = session.start(
        b.comm, "case_relay", 1, 2 * session.width, channels=2, slot=7, rounds=rounds, local=0, remote=remote, seed=seed
    )
    out = _finished(ctx, launch, "QUI-5")
    ctx.check_equal(_check(ctx, b, out, {1: "QUI-5", 2: "QUI-1", 6: "QUI-5"}), rounds, "QUI-5", "a round is missing")
    for number in range(rounds):
        if ctx.rank == 0:
            b.expect(number * BYTES, _message(0, number, seed))
        if ctx.rank == 1:
            b.expect(remote + number * BYTES, _message(0, number, seed))
    if ctx.rank:
        b.expect_signal(7, rounds)


# ---------------------------------------------------------------------------------------------- deadlines and aborts


def _ends(
    ctx: Context, b: Bench, clause: str, what: str, call: Callable[[], tuple[int, int, int]], **named: int
) -> None:
    """The kernel ends with a deadline, the host is told what it waited for, and the next kernel works."""
    began = ctx.now()
    status = call()[0]
    seconds = ctx.now() - began
    ctx.check(status < 0, clause, f"{what}: the kernel's call succeeded", status=status)
    ctx.check(seconds < ctx.timeout, clause, f"{what}: the kernel did not end in time", seconds=round(seconds, 3))
    with ctx.raises(clause, DeadlineExceeded, what) as caught:
        b.comm.check_device()
    record = caught[0].record
    for name, value in named.items():
        ctx.check_equal(
            getattr(record, name), value, clause, f"{what}: the error names another {name}", text=str(caught[0])
        )
    b.comm.check_device()  # it is taken


@case("err1.kernel_misses_a_signal", clauses=("ERR-1", "SIG-1"), ranks=(1, 2), needs=("device",))
def misses_a_signal(ctx: Context) -> None:
    """A kernel whose signal does not come ends at its deadline, which names slot and values; the next kernel works."""
    b = ctx.open(timeout=0.3)
    session = _session(ctx)
    to, _ = neighbours(ctx)
    for _ in range(3):
        _ends(
            ctx,
            b,
            "ERR-1",
            "a signal that nobody sends",
            lambda: session.call(b.comm, gpu.WAIT_SIGNAL, slot=9, value=1, target=gpu.ANY_RANK),
        )
    ctx.barrier()
    b.channel().signal(to, 9).wait()
    b.expect_signal(9)
    b.wait_signal(9, 1)


@case("err1.kernel_without_a_proxy", clauses=("ERR-1", "PRG-3", "QUI-1"), ranks=(1, 2), needs=("device",),
      comm={"channels": 2, "ring_log2": 1, "progress": "caller"})  # fmt: skip
def without_a_proxy(ctx: Context) -> None:
    """Nobody takes what a kernel posts: its quiet, and its post on a full ring, end at their deadlines; others go on.

    They name channel and ticket.
    """
    b = ctx.open(timeout=0.3)
    session = _session(ctx)
    to, _ = neighbours(ctx)
    ticket = b.channel(1).signal(to, 3).value
    _ends(
        ctx, b, "ERR-1", "a quiet over what nobody takes",
        lambda: session.call(b.comm, gpu.QUIET, channel=1, ticket=ticket), channel=1, ticket=ticket,
    )  # fmt: skip
    full = [b.channel(0).signal(to, 3).value for _ in range(2)]
    _ends(
        ctx, b, "PRG-3", "a post on a full ring",
        lambda: session.call(b.comm, gpu.SIGNAL, channel=0, target=to, slot=3, add=1), channel=0, ticket=full[-1] + 1,
    )  # fmt: skip
    closed = ctx.until(lambda: not b.comm.progress() and b.channel(0).stats()["state"] not in (0, "open"))
    ctx.check(closed, "PRG-3", "a kernel gave up a ticket that it had reserved, and its channel stays open")
    moved = ctx.until(lambda: not b.comm.progress() and b.channel(1).stats()["complete"] == 1)
    ctx.check(moved, "ERR-1", "after the deadlines nothing goes on", stats=b.channel(1).stats())
    status, _, _ = session.call(b.comm, gpu.QUIET, channel=1, ticket=ticket)
    ctx.check_equal(status, 0, "QUI-1", "the next kernel's quiet does not work")
    b.broken = True  # channel 0 is closed
    ctx.barrier()


@case("abt1.kernel_spins", clauses=("ABT-1",), ranks=(2,), needs=("device", "threads"), comm={"ring_log2": 1})
def spins(ctx: Context) -> None:
    """An abort ends kernels that wait: for a signal, for a quiet, for room in the ring."""
    session = _session(ctx)
    to, _ = neighbours(ctx)

    def in_vain(b: Bench, op: int, job: dict[str, int]) -> tuple[int, float]:
        status = session.call(b.comm, op, **job)[0]
        return status, ctx.now()

    waits: dict[str, tuple[int, dict[str, int]]] = {
        "wait_signal": (gpu.WAIT_SIGNAL, {"slot": 9, "value": 1, "target": gpu.ANY_RANK}),
        "quiet": (gpu.QUIET, {"ticket": NO_TICKET}),
        "post": (gpu.SIGNAL, {"target": to, "slot": 1, "add": 1}),
    }
    for what, (op, job) in waits.items():
        b = ctx.open(name=what, shadow=False, progress="caller")
        for _ in range(2):
            b.channel().signal(to, 1)
        task = ctx.spawn(in_vain, b, op, job)
        ctx.sleep(ctx.moment(0.02))
        began = ctx.now()
        b.comm.abort("the conformance suite says so")
        b.broken = True
        status, ended = task.join()
        ctx.check(status < 0, "ABT-1", "a kernel's wait succeeded that cannot", what=what)
        ctx.check(
            ended - began < SOON * ctx.time_scale, "ABT-1", "a kernel outlived the abort", what=what,
            seconds=round(ended - began, 3),
        )  # fmt: skip
        with ctx.raises("ABT-1", Aborted, f"{what} of a kernel") as caught:
            b.comm.check_device()
        ctx.check("suite says so" in str(caught[0]), "ABT-1", "the reason is not told", what=what, got=str(caught[0]))
        ctx.barrier()
        ctx.close(b)
    again = ctx.open()  # the device lives on
    again.channel().signal(to, 0).wait()
    again.expect_signal(0)


@case("err2.kernel_waits_for_a_failure", clauses=("ERR-2",), ranks=(2,), needs=("device",), comm={"channels": 2})
def waits_for_a_failure(ctx: Context) -> None:
    """A command that fails ends the kernel's quiet at once, with its own error; the other channel goes on."""
    b = ctx.bench
    session = _session(ctx)
    to, _ = neighbours(ctx)
    words = np.array([[0, to << 51]], np.uint64)  # no such operation
    ticket = b.channel(0).post_raw(words).value
    status = session.call(b.comm, gpu.QUIET, channel=0, ticket=ticket)[0]
    ctx.check(status < 0, "ERR-2", "a kernel's quiet covers a failure, and succeeds")
    with ctx.raises("ERR-2", UcclEpError, "a quiet over a failure") as caught:
        b.comm.check_device()
    ctx.check_equal(caught[0].name, "E_MALFORMED", "ERR-2", "a kernel's quiet tells another error", text=str(caught[0]))
    ctx.check_equal(caught[0].record.ticket, ticket, "ERR-2", "it names another ticket", text=str(caught[0]))
    b.channel(1).signal(to, 2).wait()
    b.wait_signal(2, 1, "SIG-1")
    ctx.barrier()
    b.reset()
