# SPDX-License-Identifier: Apache-2.0
"""NICs that are told to fail, to push back, to be late, to do things twice: for lanes with faults.

What a NIC may do without breaking a promise changes nothing (the first part); what fails is told to those whom it
concerns, and to nobody else (the second); and no call of the start-up that fails leaves anything behind (the third).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from uccl_ep.conformance.bench import Bench
from uccl_ep.conformance.context import Context
from uccl_ep.conformance.registry import case
from uccl_ep.errors import ChannelClosed, DeadlineExceeded, NicError, PeerLost, UcclEpError

from ._tools import SIGNAL, SIZES, Layout, commands, message, neighbours, put_command, send_round

FAULTY = ("faults",)


def _inject(ctx: Context, *faults: str) -> None:
    """By one rank, before anybody goes on."""
    ctx.barrier()
    if ctx.rank == 0:
        for fault in faults:
            ctx.inject(fault)
    ctx.barrier()


# ------------------------------------------------------------------------------------------- what changes nothing


def _storm(ctx: Context, threads: int, n: int) -> None:
    _inject(ctx, "again percent=50")
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    channels, size = int(b.comm.info.channels), 64
    assert threads * n * size <= layout.room
    for k in range(threads * n):
        b.place(layout.source(to) + k * size, message(ctx, size, ctx.rank, to, k))
    ctx.barrier()

    def post(t: int) -> None:
        ch = b.channel(t % channels)
        for k in range(t * n, t * n + n):
            ch.put_signal(to, layout.source(to) + k * size, layout.landing(ctx.rank) + k * size, size, t)

    ctx.join([ctx.spawn(post, t) for t in range(threads)])
    b.quiet(clause="PRG-3")
    for c in range(channels):
        stats = b.channel(c).stats()
        ctx.check_equal(stats["complete"], stats["posted"], "PRG-3", "after a quiet tickets are not retired", channel=c)
    ctx.barrier()
    for t in range(threads):
        b.expect_signal(t, n)
        ctx.check_equal(b.comm.read_signal(t), n, "SIG-1", "a NIC without room lost a signal, or doubled it", thread=t)
    for k in range(threads * n):
        want = message(ctx, size, source, ctx.rank, k)
        b.compare(layout.landing(source) + k * size, want, "PRG-3", "a NIC without room lost a put", k=k)
        b.expect(layout.landing(source) + k * size, want)


_STORM = {"channels": 4, "ring_log2": 5, "max_inflight_peer": 4, "heap_bytes": 4 << 20}


@case("prg3.storm_of_no_room", clauses=("PRG-3", "SIG-1"), ranks=(2,), needs=("faults", "threads"), comm=_STORM)
def storm_of_no_room(ctx: Context) -> None:
    """Half of all submits are told that there is no room, and four operations may be out: eight threads lose nothing.

    Row B1: an index that moves on before the NIC has taken the command.
    """
    _storm(ctx, 8, 60)


@case(
    "prg3.storm_of_no_room_long",
    clauses=("PRG-3", "SIG-1"),
    ranks=(2,),
    needs=("faults", "threads"),
    level="full",
    comm={**_STORM, "heap_bytes": 4 << 20},
    timeout=60,
)
def storm_of_no_room_long(ctx: Context) -> None:
    """The same for longer (row B1)."""
    _storm(ctx, 8, 1000)


def _harmless(name: str, *faults: str) -> None:
    @case(
        f"sig7.under_{name}",
        clauses=("SIG-7", "SIG-1", "SIG-2", "SIG-3"),
        needs=FAULTY,
        comm={"heap_bytes": 2 << 20, "ring_log2": 7},
        weak=True,
    )
    def under(ctx: Context) -> None:
        _inject(ctx, *faults)
        sizes = [size for size in SIZES if size <= 4112]
        send_round(ctx, ctx.bench, sizes * 3, fused=False)
        ctx.check_equal(ctx.bench.comm.errors(), [], "SIG-7", "a NIC that breaks no promise made errors", faults=faults)

    under.__doc__ = f"Nothing is lost, doubled or out of order under: {', '.join(faults)}."


for _name, _faults in {
    "partial_accepts": ("partial percent=50", "again percent=20"),
    "delays": ("delay percent=20 ns=200000",),
    "lost_doorbells": ("lost_doorbell percent=30",),
    "completions_twice": ("duplicate_completion percent=30",),
    "a_slow_peer": ("slow_peer peer=0 ns=300000",),
}.items():
    _harmless(_name, *_faults)


@case(
    "qui1.completions_twice",
    clauses=("QUI-1", "ERR-6"),
    needs=FAULTY,
    comm={"heap_bytes": 2 << 20, "ring_log2": 6, "max_inflight_peer": 8},
    weak=True,
)
def completions_twice(ctx: Context) -> None:
    """A completion that comes twice completes nothing that came later, in this incarnation or the next."""
    _inject(ctx, "duplicate_completion percent=40")
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    size = 2048
    for r in range(30):
        at = r * 4 * size % (layout.room - 4 * size) // size * size
        for k in range(4):
            b.place(layout.source(to) + at + k * size, message(ctx, size, ctx.rank, to, r * 4 + k))
            ch.put(to, layout.source(to) + at + k * size, layout.landing(ctx.rank) + at + k * size, size)
        ch.signal(to, 0)
        b.quiet(0)
        ctx.barrier()
        for k in range(4):
            want = message(ctx, size, source, ctx.rank, r * 4 + k)
            b.compare(layout.landing(source) + at + k * size, want, "QUI-1", "quiet is over and a put is missing", r=r)
            b.expect(layout.landing(source) + at + k * size, want)
        b.expect_signal(0)
        ctx.check_equal(b.comm.read_signal(0), b.words[0], "QUI-1", "quiet is over and a signal is missing", r=r)
        ctx.barrier()
        if r % 10 == 9:
            b.reset()


@case("prg2.one_slow_peer", clauses=("PRG-2", "QUI-3"), ranks=(3,), needs=FAULTY, comm={"channels": 2})
def one_slow_peer(ctx: Context) -> None:
    """A quiet towards a peer that takes two seconds for everything does not hold up another channel.

    Row B9; the time is the world's, so it says how much was waited for.
    """
    _inject(ctx, "slow_peer peer=2 ns=2000000000")
    b = ctx.open(timeout=30.0, peer_timeout=30.0)
    layout = Layout(b)
    if ctx.rank == 0:
        b.channel(0).put(2, layout.source(2), layout.landing(0), 4096)
        waiter = ctx.spawn(lambda: b.quiet(0))
        began = ctx.now()
        for _ in range(200):
            b.channel(1).put(1, layout.source(1), layout.landing(0), 1024)
            b.quiet(1, clause="PRG-2")
        took = ctx.now() - began
        ctx.check(took < 0.2, "PRG-2", "a slow peer delayed commands to another one", seconds=round(took, 3))
        waiter.join()
        ctx.check(ctx.now() - began > took, "QUI-3", "the slow peer was not slow")
    ctx.barrier()
    for source, size in ((0, 1024),) if ctx.rank == 1 else ((0, 4096),) if ctx.rank == 2 else ():
        b.loosen(layout.landing(source), size)


@case("qui3.posts_pass_a_wait", clauses=("QUI-3", "PRG-2", "SIG-1"), ranks=(3,), needs=FAULTY, comm={"channels": 2})
def posts_pass_a_wait(ctx: Context) -> None:
    """While a ticket of a put to a slow peer is waited for, what is posted behind it on its channel goes to others."""
    _inject(ctx, "slow_peer peer=2 ns=2000000000")
    b = ctx.open(timeout=30.0, peer_timeout=30.0)
    layout = Layout(b)
    n = 50
    began = ctx.now()
    if ctx.rank == 0:
        slow = b.channel(0).put(2, layout.source(2), layout.landing(0), 4096)
        waiter = ctx.spawn(slow.wait)
        b.wait_signal(1, 1)  # by then it waits
        for _ in range(n):
            b.channel(0).signal(1, 0)
        waiter.join()
        ctx.check(ctx.now() - began > 1.0, "QUI-3", "the slow peer was not slow")
    if ctx.rank == 1:
        b.channel(1).signal(0, 1)
        b.wait_signal(0, n, "QUI-3")
        took = ctx.now() - began
        ctx.check(took < 0.5, "QUI-3", "a wait held up what was posted behind its ticket", seconds=round(took, 3))
    ctx.barrier()
    if ctx.rank == 0:
        b.expect_signal(1)
    if ctx.rank == 1:
        b.expect_signal(0, n)
    if ctx.rank == 2:
        b.loosen(layout.landing(0), 4096)


@case("prg1.after_idle", clauses=("PRG-1", "SIG-1"), ranks=(2,), level="full", needs=FAULTY)
def after_idle(ctx: Context) -> None:
    """A put after five seconds, a minute, and more than two minutes in which nothing happened works as the first one.

    Row K17.
    """
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    for k, pause in enumerate((0, 5, 60, 130)):
        ctx.sleep(float(pause))
        ctx.deadline += pause
        b.place(layout.source(to) + k * 512, message(ctx, 512, ctx.rank, to, k))
        b.channel().put_signal(to, layout.source(to) + k * 512, layout.landing(ctx.rank) + k * 512, 512, 0).wait()
        b.wait_signal(0, k + 1, "PRG-1")
        want = message(ctx, 512, source, ctx.rank, k)
        b.compare(layout.landing(source) + k * 512, want, "PRG-1", "the first put after a pause is wrong", pause=pause)
        b.expect(layout.landing(source) + k * 512, want)
        b.expect_signal(0)
        ctx.barrier()
    ctx.check_equal(b.comm.errors(), [], "PRG-1", "a pause made an error")


@case("err1.clock_jumps", clauses=("ERR-1", "SIG-1"), ranks=(2,), needs=FAULTY, weak=True)
def clock_jumps(ctx: Context) -> None:
    """The clock jumps by a second again and again, as after a suspend: nobody is lost for it."""
    b = ctx.open(timeout=30.0, peer_timeout=10.0)
    to, _ = neighbours(ctx)
    for r in range(10):
        if ctx.rank == 0:
            ctx.inject("clock_jump ns=1000000000")
        for _ in range(20):
            b.channel().signal(to, 0)
            b.expect_signal(0)
        b.quiet(0, clause="ERR-1")
        b.wait_signal(0, 20 * (r + 1), "ERR-1")
        ctx.barrier()
    ctx.check_equal(sorted(b.comm.lost), [], "ERR-1", "a jump of the clock made a rank lost")
    ctx.close(b)


# ---------------------------------------------------------------------------------------------------- what fails


def _rounds(ctx: Context, fault: Callable[[int], Sequence[str]], rounds: int = 6) -> None:
    """Traffic in which something fails, checked from both ends, and a reset; then again."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    n, size = 60, 256
    told = 0
    for r in range(rounds):
        image = message(ctx, n * size, ctx.rank, to, r)
        b.place(layout.source(to), image)
        blank = message(ctx, n * size, source, ctx.rank, 1000 + r)
        b.heap[layout.landing(source) : layout.landing(source) + n * size] = blank
        _inject(ctx, *fault(r))
        failure: UcclEpError | None = None
        try:
            batch = []
            for k in range(n):
                at = k * size
                batch.append(put_command(to, layout.source(to) + at, layout.landing(ctx.rank) + at, size))
                batch.append({"op": SIGNAL, "target": to, "slot": 0, "add": 1})
            ch.post_many(commands(batch))
            ch.quiet()
        except DeadlineExceeded as error:
            ctx.fail("ERR-1", "what is behind a failure neither ends nor fails", error=str(error))
        except UcclEpError as error:
            failure = error
        ended = ctx.until(lambda: ch.stats()["complete"] == ch.stats()["posted"])
        ctx.check(ended, "ERR-1", "commands behind a failure neither end nor fail", report=b.comm.report())
        if failure is not None:
            told += 1
            ctx.check_equal(failure.record.peer, to, "ERR-2", "the failure names another rank", error=str(failure))
            ctx.check(bool(failure.record.text), "ERR-2", "the failure has no text", error=failure.name)
        failed = ctx.share(failure is not None)
        word = b.comm.read_signal(0)
        ctx.check(word <= n, "SIG-1", "more signals than were sent", got=word)
        if not failed[source]:
            ctx.check_equal(word, n, "ERR-2", "nobody reports a failure, and signals are missing")
        want = message(ctx, n * size, source, ctx.rank, r)[: word * size]
        b.compare(layout.landing(source), want, "ERR-3", "a signal vouches for a put that is not there", counter=word)
        ctx.barrier()
        b.reset()
        ctx.check_equal(b.comm.read_signal(0), 0, "ERR-6", "a word does not start at zero after a reset", round=r)
        ctx.check_equal(b.comm.errors(), [], "ERR-6", "a reset left records behind", round=r)
        # Behind what might be left of the old incarnation.
        mark = message(ctx, n * size, source, ctx.rank, 2000 + r)
        b.heap[layout.landing(source) : layout.landing(source) + n * size] = mark
        ctx.barrier()
        for _ in range(10):
            ch.signal(to, 4).wait()
        ctx.barrier()
        ctx.check_equal(b.comm.read_signal(0), 0, "ERR-6", "signals of before a reset were applied after it", round=r)
        ctx.check_equal(b.comm.read_signal(4), 10, "ERR-6", "after a reset signals are missing or doubled", round=r)
        b.compare(layout.landing(source), mark, "ERR-6", "puts of before a reset were executed after it", round=r)
        ctx.barrier()
        b.reset()
    b.loosen(layout.landing(source), n * size)
    everywhere = sum(ctx.share(told))
    ctx.check(everywhere > 0, "ERR-2", "operations failed, and nobody was told", faults=str(fault(0)))


_FAILING = {"heap_bytes": 2 << 20, "ring_log2": 8}


def _failing(name: str, text: str, fault: Callable[[Context, int], Sequence[str]]) -> None:
    @case(
        f"err3.{name}",
        clauses=("ERR-3", "ERR-2", "ERR-6", "ERR-1", "SIG-1"),
        needs=FAULTY,
        comm=_FAILING,
        timeout=60,
        weak=True,
    )
    def failing(ctx: Context) -> None:
        # Drawn once, by all alike: what is injected in a round is told in the failure too.
        chosen = [fault(ctx, r) for r in range(6)]
        _rounds(ctx, lambda r: chosen[r])

    failing.__doc__ = text


_failing(
    "one_operation_fails",
    "One operation of each round fails, anywhere in it: no signal vouches for it, and a reset makes all new.",
    lambda ctx, r: [f"drop rank={r % ctx.size} nth={int(ctx.shared_rng.integers(1, 40))}"],
)
_failing(
    "a_batch_fails_in_its_middle",
    "A batch fails in its middle: what is behind is not taken for done.",
    lambda ctx, r: [f"error_in_batch rank={r % ctx.size} nth={int(ctx.shared_rng.integers(1, 4))}"],
)
_failing(
    "a_queue_fails",
    "The queue to a peer goes into the error state and is flushed: everything in it fails, once.",
    lambda ctx, r: [
        f"queue_error rank={r % ctx.size} peer={(r + 1) % ctx.size} nth={int(ctx.shared_rng.integers(1, 30))}"
    ],
)


# efa_io_defs.h: lengths, bad request, bad address, RNR, unresponsive, unknown peer, unreachable.
_CODES = (1, 7, 8, 9, 10, 13, 14, 15)


@case("err2.vendor_codes", clauses=("ERR-2", "ERR-6"), ranks=(2,), needs=FAULTY)
def vendor_codes(ctx: Context) -> None:
    """The vendor's number of a failure and its text reach the record, each as it is; closing reports none (row D7)."""
    b = ctx.bench
    texts = set()
    for code in _CODES:
        _inject(ctx, f"drop rank=0 nth=1 code={code}")
        if ctx.rank == 0:
            with ctx.raises("ERR-2", UcclEpError, f"an operation that the NIC fails with code {code}") as caught:
                b.channel().put(1, 0, 4096, 64).wait()
            record = caught[0].record
            ctx.check_equal(record.vendor_code, code, "ERR-2", "the record has another code than the NIC gave")
            ctx.check(bool(record.nic), "ERR-2", "the record does not name the NIC", record=str(record))
            texts.add(record.text.replace(str(code), ""))
        ctx.barrier()
        b.reset()
    if ctx.rank == 0 and b.comm.info.device.vendor == "Amazon":
        ctx.check_equal(len(texts), len(_CODES), "ERR-2", "codes of the NIC share a text", texts=sorted(texts))
    ctx.check_equal(b.comm.errors(), [], "ERR-6", "a reset left records behind")
    b.loosen(4096, 64)


@case("err5.nic_is_lost", clauses=("ERR-5", "ERR-1", "ERR-2"), ranks=(3,), needs=FAULTY, timeout=60)
def nic_is_lost(ctx: Context) -> None:
    """One rank's NIC is gone in the middle of traffic: that rank is told, the others lose it alone and go on."""
    b = ctx.open(shadow=False)
    b.broken = True
    victim = ctx.size - 1
    others = [rank for rank in range(ctx.size) if rank not in (victim, ctx.rank)]
    for target in range(ctx.size):
        b.channel().signal(target, 1)
    b.quiet(0)
    _inject(ctx, f"device_lost rank={victim}")
    failure: UcclEpError | None = None
    while failure is None:
        try:
            for target in range(ctx.size) if ctx.rank == victim else (victim,):
                b.channel().signal(target, 2)
            b.comm.quiet()
        except (PeerLost, ChannelClosed, NicError, DeadlineExceeded) as error:
            failure = error
        ctx.check(ctx.now() < ctx.deadline - 5, "ERR-1", "a NIC is gone, and posting and quiet still succeed")
    ctx.check(bool(failure.record.text), "ERR-2", "the failure has no text", error=failure.name)
    ctx.barrier()
    if ctx.rank == victim:
        return ctx.barrier()
    b.comm.exclude(victim)
    for target in others:
        for _ in range(10):
            b.channel().signal(target, 3)
    for source in others:
        b.comm.wait_signal(3, 10 * len(others), source=source)
    b.comm.quiet()
    ctx.check_equal(b.comm.read_signal(3), 10 * len(others), "ERR-5", "signals among the others are lost or doubled")
    ctx.barrier()
    return None


# ------------------------------------------------------------------------------------------------------- start-up


def _works(ctx: Context, b: Bench) -> None:
    to, _ = neighbours(ctx)
    b.channel().signal(to, 0).wait()
    b.wait_signal(0, 1, "ERR-1")
    b.expect_signal(0)
    ctx.close(b)


@case("err1.a_call_of_the_start_fails", clauses=("ERR-1", "MEM-1"), ranks=(2,), needs=FAULTY, timeout=120)
def a_call_of_the_start_fails(ctx: Context) -> None:
    """Each backend call of the start fails in turn on one rank: all ranks are told, none hangs, the next start works.

    Row K19.
    """
    refused = 0
    for nth in range(1, 81):
        _inject(ctx, f"call_fail rank={nth % 2} nth={nth}")
        b: Bench | None = None
        text = ""
        try:
            b = ctx.open(settle=False)
        except UcclEpError as error:
            text = str(error)
        outcomes = ctx.share(b is not None)
        ctx.check_equal(len(set(outcomes)), 1, "ERR-1", "some ranks have a communicator, others were refused", call=nth)
        if b is None:
            refused += 1
            ctx.check(len(text) > 30, "MEM-1", "the refusal has no reason", call=nth, got=text)
        else:
            # The start makes fewer calls than that.
            b.broken = True
            ctx.close(b)
            break
    ctx.check(refused >= 5, "ERR-1", "hardly any call of the start can fail", refused=refused)


@case("mem1.registration_fails", clauses=("MEM-1", "ERR-1"), ranks=(2, 3), needs=FAULTY)
def registration_fails(ctx: Context) -> None:
    """A NIC that cannot register a region says so when the communicator is made, to all ranks, with the reason (E3)."""
    for nth in (1, 2):
        _inject(ctx, f"register_fail rank={ctx.size - 1} nth={nth}")
        with ctx.raises("MEM-1", UcclEpError, "a communicator whose memory cannot be registered") as caught:
            ctx.open()
        text = str(caught[0])
        ctx.check(len(text) > 30, "MEM-1", "the refusal has no reason", got=text)
        if ctx.rank != ctx.size - 1:
            ctx.check(str(ctx.size - 1) in text, "MEM-1", "the refusal does not say which rank could not", got=text)
        _works(ctx, ctx.open())


@case(
    "mem1.queues_of_a_nic",
    clauses=("MEM-1", "ERR-1"),
    ranks=(4,),
    needs=FAULTY,
    comm={"backend_options": "ranks_per_nic=4,max_qp=6,per_peer_qp=0", "proxies": 2, "channels": 2},
)
def queues_of_a_nic(ctx: Context) -> None:
    """Ranks that share a NIC and want more queues than it has: refused when they start, with both numbers (row D9)."""
    with ctx.raises("MEM-1", UcclEpError, "eight queues of a NIC that has six") as caught:
        ctx.open()
    text = str(caught[0])
    numbers = [word for word in text.replace(",", " ").split() if word.isdigit()]
    ctx.check(len(numbers) >= 2, "MEM-1", "the refusal does not name what is needed and what there is", got=text)
    one = ctx.open(proxies=1, channels=1)
    to, _ = neighbours(ctx)
    one.channel().signal(to, 0)
    one.wait_signal(0, 1)
    one.expect_signal(0)
    ctx.close(one)


@case(
    "mem1.pages_of_a_nic",
    clauses=("MEM-1", "ERR-1"),
    ranks=(2,),
    needs=FAULTY,
    comm={"backend_options": "max_pages=1000"},
)
def pages_of_a_nic(ctx: Context) -> None:
    """A heap of more pages than the NIC's table holds: refused when it is registered, with both numbers and what would
    make it work (row D11); a smaller one works."""
    with ctx.raises("MEM-1", UcclEpError, "16 MiB in pages of 4 KiB, of which the NIC takes 1000") as caught:
        ctx.open(heap_bytes=16 << 20)
    text = str(caught[0])
    for said in ("4096", "1000", "huge pages"):
        ctx.check(said in text, "MEM-1", f"the refusal does not say {said}", got=text)
    _works(ctx, ctx.open(heap_bytes=1 << 20))


@case("mem1.no_memory_in_the_nic", clauses=("MEM-1", "ERR-1"), ranks=(2,), needs=FAULTY)
def no_memory_in_the_nic(ctx: Context) -> None:
    """The backend cannot get memory while a communicator is made: an error on all ranks; the next start works."""
    _inject(ctx, "memory_pressure rank=1 nth=1")
    with ctx.raises("MEM-1", UcclEpError, "a communicator for which there is no memory"):
        ctx.open()
    _works(ctx, ctx.open())
