# SPDX-License-Identifier: Apache-2.0
"""Failures without a dead rank: ERR-1 to ERR-4, ERR-6."""

from __future__ import annotations

import numpy as np

from uccl_ep.conformance import patterns
from uccl_ep.conformance.bench import Bench
from uccl_ep.conformance.context import Context
from uccl_ep.conformance.registry import case
from uccl_ep.errors import ChannelClosed, CommandError, DeadlineExceeded, PeerLost, UcclEpError

from ._tools import Layout, message, neighbours, put_words, raw, send_round, signal_words

REFUSED = (ChannelClosed, PeerLost)


def _bad_put(b: Bench, target: int) -> tuple[int, int]:
    """A command that can be read, and whose bytes would lie outside the target's heap."""
    return put_words(target, 0, b.heap.size, 64)


@case("err1.deadlines", clauses=("ERR-1", "SIG-1"), ranks=(2,))
def deadlines(ctx: Context) -> None:
    """A wait for what never comes ends at its deadline, or at once if it may not wait; afterwards all goes on."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    for timeout in (0, 1e-6, 0.02, 0.3):
        with ctx.raises("ERR-1", DeadlineExceeded, f"a wait of {timeout} s for a signal that never comes"):
            b.comm.wait_signal(3, 1, timeout=timeout)
        with ctx.raises("ERR-1", DeadlineExceeded, f"a wait of {timeout} s for a signal of one rank"):
            b.comm.wait_signal(3, 1, timeout=timeout, source=to)
    short = ctx.open(timeout=0.2)
    with ctx.raises("ERR-1", DeadlineExceeded, "a wait with the configured deadline"):
        short.comm.wait_signal(0, 1)
    ctx.close(short)
    b.channel().signal(to, 3).wait()
    b.wait_signal(3, 1)
    b.expect_signal(3)


@case("err1.never_taken", clauses=("ERR-1", "QUI-1"), ranks=(2,), needs=("caller",), comm={"progress": "caller"})
def never_taken(ctx: Context) -> None:
    """Polls of a ticket that nobody executes say so; a ticket that was never given out is refused."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    ch = b.channel()
    ticket = ch.signal(to, 0)
    for _ in range(100):
        ctx.check(not ticket.done(), "QUI-1", "a ticket is done that nobody has taken")
        ctx.check(not ticket.source_done(), "QUI-1", "a source is free that nobody has taken")
    with ctx.raises("ERR-1", DeadlineExceeded, "a poll of quiet"):
        ch.quiet(timeout=0)
    report = b.comm.report()
    ctx.check(
        "0" in report and bool(report.strip()), "ERR-1", "the report of a stuck communicator says nothing", got=report
    )
    ticket.wait()
    b.wait_signal(0, 1, "QUI-1")
    b.expect_signal(0)


@case("err2.record", clauses=("ERR-2", "ERR-4", "QUI-1"), ranks=(2, 3))
def record(ctx: Context) -> None:
    """A failed command makes one record that names it; the waits that cover it fail with that, no earlier one does."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    ch = b.channel()
    good = [ch.signal(to, 0) for _ in range(5)]
    bad = ch.post_raw(raw([_bad_put(b, to)]))
    for ticket in good:
        ticket.wait()
    with ctx.raises("ERR-2", UcclEpError, "a wait for the failed ticket") as direct:
        bad.wait()
    with ctx.raises("ERR-2", UcclEpError, "a quiet of the channel"):
        ch.quiet()
    with ctx.raises("ERR-2", UcclEpError, "a quiet over all channels"):
        b.comm.quiet()
    with ctx.raises("ERR-2", UcclEpError, "a wait for the failed ticket's source"):
        bad.wait_source()
    with ctx.raises("ERR-2", UcclEpError, "a poll of the failed ticket"):
        ctx.until(bad.done)
    found = direct[0].record
    want = {"rank": ctx.rank, "peer": to, "channel": 0, "ticket": bad.value, "op": "put", "clause": "ERR-4"}
    for name, value in want.items():
        ctx.check_equal(getattr(found, name), value, "ERR-2", f"the record's {name} is wrong", record=str(found))
    ctx.check(bool(found.text) and found.time_ns > 0, "ERR-2", "the record has no text or no time", record=str(found))
    kept = [r for r in b.comm.errors() if r.ticket == bad.value]
    ctx.check_equal(len(kept), 1, "ERR-2", "one failure did not make one record")
    for ticket in good:
        ticket.wait()
        ctx.check(ticket.done(), "ERR-2", "a ticket before the failed one fails with it")
    ctx.barrier()
    b.wait_signal(0, 5, "QUI-1")
    b.reset()
    send_round_after_reset(ctx, b)


def send_round_after_reset(ctx: Context, b: Bench) -> None:
    """Everything works again."""
    ctx.check_equal(b.comm.errors(), [], b.ctx.case.clauses[0], "a reset left records behind")
    to, _ = neighbours(ctx)
    for _ in range(3):
        b.channel().signal(to, 1)
    b.quiet(0, clause=ctx.case.clauses[0])
    b.wait_signal(1, 3, ctx.case.clauses[0])
    b.expect_signal(1, 3)
    ctx.barrier()


@case("err2.before_the_counter", clauses=("ERR-2",), ranks=(1,), comm={"channels": 16})
def before_the_counter(ctx: Context) -> None:
    """Whoever polls a failing ticket sees the failure, never a success, however the moment falls."""
    b = ctx.bench
    for _ in range(8):
        for c in range(16):
            ch = b.channel(c)
            ticket = ch.post_raw(raw([_bad_put(b, 0)]))
            outcome = ""
            while not outcome and ctx.now() < ctx.deadline:
                try:
                    if ticket.done():
                        outcome = "success"
                except UcclEpError as error:
                    outcome = error.name
                    found = error.record
            ctx.check(outcome not in ("", "success"), "ERR-2", "a failed ticket was reported as complete", got=outcome)
            ctx.check_equal(
                (found.ticket, found.channel), (ticket.value, c), "ERR-2", "the record is of another command"
            )
        b.reset()


@case("err2.drop", clauses=("ERR-2", "QUI-3", "SIG-1"), ranks=(2, 3))
def drop(ctx: Context) -> None:
    """A failure that nobody waits for still shows in the records and in the next quiet, and does not hold up others."""
    b = ctx.bench
    to, source = neighbours(ctx)
    ch = b.channel()
    ch.post_raw(raw([_bad_put(b, to)]))
    if ctx.size > 2:
        other = ch.signal(source, 2)
        with ctx.raises("ERR-2", UcclEpError, "a wait that covers an earlier failure"):
            other.wait()
    ctx.check(ctx.until(lambda: bool(b.comm.errors())), "ERR-2", "a failure nobody waited for left no record")
    ctx.check(ctx.until(lambda: ch.stats()["failed"] == 1), "ERR-2", "a failure nobody waited for was not counted")
    with ctx.raises("ERR-2", UcclEpError, "the next quiet"):
        b.comm.quiet()
    ctx.barrier()
    if ctx.size > 2:
        b.wait_signal(2, 1)
    b.reset()
    send_round_after_reset(ctx, b)


@case("err3.no_false_signal", clauses=("ERR-3", "ERR-4"), ranks=(2, 4))
def no_false_signal(ctx: Context) -> None:
    """After a failed put no later signal on its channel to its target is applied; other channels' and targets' are."""
    b = ctx.open(channels=2)
    to, source = neighbours(ctx)
    layout = Layout(b)
    b.place(layout.source(to), message(ctx, 256, ctx.rank, to, 0))
    words = [
        put_words(to, layout.source(to), layout.landing(ctx.rank), 256),
        _bad_put(b, to),
        signal_words(to, 4, 1),
        put_words(to, layout.source(to), layout.landing(ctx.rank) + 512, 256),
        put_words(to, layout.source(to), layout.landing(ctx.rank) + 1024, 256, op=3, slot=5, add=1),
        signal_words(to, 6, 1),
    ]
    ch = b.channel(0)
    ticket = ch.post_raw(raw(words))
    b.channel(1).signal(to, 7).wait()
    with ctx.raises("ERR-3", UcclEpError, "a wait that covers the failed put"):
        ticket.wait()
    for _ in range(20):
        for post in (lambda: ch.signal(to, 4), lambda: ch.put_signal(to, 0, layout.landing(ctx.rank), 16, 5)):
            ctx.refused("ERR-3", REFUSED, "a post to the closed target", post)
    ctx.barrier()
    b.wait_signal(7, 1, "ERR-3")
    for slot in (4, 5, 6):
        ctx.check_equal(b.comm.read_signal(slot), 0, "ERR-3", "a signal behind a failed put was applied", slot=slot)
    b.loosen(layout.landing(source), 2048)  # what was posted may have taken effect or not (ERR-2)
    b.expect_signal(7)
    ctx.barrier()
    b.reset()
    ctx.close(b)


@case("err3.signal_implies_data", clauses=("ERR-3", "SIG-1"), comm={"heap_bytes": 2 << 20}, weak=True)
def signal_implies_data(ctx: Context) -> None:
    """Whatever fails on the way, a word at k shows messages 0 to k - 1; without an error it is at the end of all."""
    b = ctx.bench
    to, source = neighbours(ctx)
    layout = Layout(b)
    ch = b.channel()
    n, size = ctx.rounds(200), 320
    failed = ""
    for k in range(n):
        b.place(layout.source(to) + k * size, message(ctx, size, ctx.rank, to, k))
    ctx.barrier()
    try:
        for k in range(n):
            at = k * size
            ch.put(to, layout.source(to) + at, layout.landing(ctx.rank) + at, size // 2)
            ch.put_signal(
                to, layout.source(to) + at + size // 2, layout.landing(ctx.rank) + at + size // 2, size // 2, 0
            )
        ch.quiet()
    except UcclEpError as error:
        failed = error.name  # a NIC may fail: what then counts is what the other side is made to believe
    troubles = ctx.share(failed)
    word = b.comm.read_signal(0)
    if not troubles[source]:
        ctx.check_equal(word, n, "SIG-1", "nobody reports a failure, and signals are missing")
    ctx.check(word <= n, "SIG-1", "more signals than were sent", got=word)
    for k in range(word):
        want = message(ctx, size, source, ctx.rank, k)
        b.compare(
            layout.landing(source) + k * size,
            want,
            "ERR-3",
            "a signal vouches for a message that is not there",
            k=k,
            counter=word,
            sender=troubles[source],
        )
    b.loosen(layout.landing(source), n * size)
    b.expect_signal(0, word)
    b.broken = any(troubles)


@case("err4.only_this_target", clauses=("ERR-4", "ERR-6", "SIG-1", "SIG-2"), ranks=(3, 4), comm={"channels": 2})
def only_this_target(ctx: Context) -> None:
    """A malformed command with a readable target costs (channel, target): other targets and channels go on."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    ch = b.channel(0)
    bad = ch.post_raw(raw([_bad_put(b, to)]))
    with ctx.raises("ERR-4", CommandError, "a wait for the malformed command") as caught:
        bad.wait()
    ctx.check_equal(caught[0].name, "E_MALFORMED", "ERR-4", "a malformed command is told another reason")
    ctx.refused("ERR-6", REFUSED, "a post to the closed target", lambda: ch.signal(to, 0))
    others = [r for r in range(ctx.size) if r != to]
    for target in others:
        try:
            for _ in range(10):
                ch.signal(target, 1)
        except UcclEpError as error:
            ctx.fail(
                "ERR-4",
                "a malformed command to one rank closed the channel to another",
                target=target,
                error=str(error),
            )
    for _ in range(10):
        b.channel(1).signal(to, 2)
    b.quiet(1, clause="ERR-4")
    b.wait_signal(1, 10 * (ctx.size - 1), "ERR-4")
    b.wait_signal(2, 10, "ERR-4")
    ctx.check_equal(
        ch.stats()["state"] in (0, "open"), True, "ERR-4", "a malformed command with a target closed the channel"
    )
    ctx.barrier()
    b.reset()
    send_round(ctx, b, (0, 16, 4096), fused=False)


@case("err4.no_target", clauses=("ERR-4", "ERR-6", "SIG-1"), ranks=(2,), comm={"channels": 3})
def no_target(ctx: Context) -> None:
    """A malformed command whose target is no rank closes its channel, and no other one."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    ch = b.channel(1)
    before = [ch.signal(to, 1) for _ in range(3)]
    bad = ch.post_raw(raw([put_words(4095, 0, 0, 16)]))
    for ticket in before:
        ticket.wait()
    with ctx.raises("ERR-4", UcclEpError, "a wait for a command to no rank"):
        bad.wait()
    closed = ctx.until(lambda: ch.stats()["state"] not in (0, "open"))
    ctx.check(closed, "ERR-4", "a command whose target cannot be read did not close its channel")
    for target in range(ctx.size):
        ctx.refused("ERR-6", ChannelClosed, "a post to the closed channel", lambda t=target: ch.signal(t, 0))
    for c in (0, 2):
        b.channel(c).signal(to, 2)
        b.quiet(c, clause="ERR-4")
    b.wait_signal(2, 2, "ERR-4")
    b.wait_signal(1, 3)
    ctx.barrier()
    b.reset()
    send_round_after_reset(ctx, b)


def _malformed(b: Bench, target: int, granularity: int = 16) -> dict[str, tuple[int, int]]:
    """Every way in which a command to `target` can be wrong."""
    end = b.heap.size
    found = {
        "put: source past the end": put_words(target, end, 0, 16),
        "put: source runs over the end": put_words(target, end - 16, 0, 32),
        "put: target past the end": put_words(target, 0, end, 16),
        "put: target runs over the end": put_words(target, 0, end - 16, 32),
        "put: largest offset": put_words(target, 0, ((1 << 32) - 1) * 16, 16),
        "put: largest length": put_words(target, 0, 0, ((1 << 19) - 1) * 16),
        "put: the other granularity": put_words(target, 0, 0, 16, granularity=4 if granularity == 16 else 16),
        "put with a slot": put_words(target, 0, 0, 16, slot=1),
        "put with an add": put_words(target, 0, 0, 16, add=1),
        "put_signal: slot past the end": put_words(target, 0, 0, 16, op=3, slot=b.signals, add=1),
        "put_signal: largest slot": put_words(target, 0, 0, 16, op=3, slot=(1 << 14) - 1, add=1),
        "put_signal: target past the end": put_words(target, 0, end, 16, op=3, slot=0, add=1),
        "signal: slot past the end": signal_words(target, b.signals, 1),
        "signal: largest slot": signal_words(target, (1 << 32) - 1, 1),
    }
    for op in (0, 5, 6, 7):
        w0, w1 = signal_words(target, 0, 1)
        found[f"operation {op}"] = (w0 & ~7 | op, w1)
    w0, w1 = signal_words(target, 1, 1)
    for bit in (3, *range(52, 63)):
        found[f"signal: unused bit {bit} of word 0"] = (w0 | 1 << bit, w1)
    for bit in (48, 49, 50):
        found[f"signal: unused bit {bit} of word 1"] = (w0, w1 | 1 << bit)
    for bit in (3, 4, 20, 36, 50, 62):
        found[f"flush: unused bit {bit} of word 0"] = (4 | 1 << bit, target << 51)
    for bit in (0, 31, 32, 50):
        found[f"flush: unused bit {bit} of word 1"] = (4, target << 51 | 1 << bit)
    return found


@case("err4.every_kind", clauses=("ERR-4", "ERR-6"), ranks=(2,), comm={"channels": 48})
def every_kind(ctx: Context) -> None:
    """Each way to be malformed is refused before a byte moves or a word changes."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    kinds = list(_malformed(b, to).items())
    assert len(kinds) <= 48, len(kinds)
    # A few well-formed relatives first, so that the encoder of this test is known to be right.
    layout = Layout(b)
    b.place(layout.source(to), message(ctx, 64, ctx.rank, to, 0))
    b.channel(0).post_raw(
        raw(
            [
                put_words(to, layout.source(to), layout.landing(ctx.rank), 64),
                signal_words(to, 1, (1 << 63) | 5),
                (4, to << 51),
                put_words(to, layout.source(to), layout.landing(ctx.rank) + 64, 64, op=3, slot=2, add=8191),
            ]
        )
    ).wait()
    ctx.barrier()
    source = neighbours(ctx)[1]
    b.compare(
        layout.landing(source), message(ctx, 64, source, ctx.rank, 0), "ERR-4", "a well-formed raw put is not executed"
    )
    ctx.check_equal(
        (b.comm.read_signal(1), b.comm.read_signal(2)),
        ((1 << 63) | 5, 8191),
        "ERR-4",
        "well-formed raw signals are not executed",
    )
    for c, (what, words) in enumerate(kinds):
        ticket = b.channel(c).post_raw(raw([words]))
        with ctx.raises("ERR-4", UcclEpError, f"a malformed command ({what})"):
            ticket.wait()
    ctx.barrier()
    ctx.check_equal(
        (b.comm.read_signal(1), b.comm.read_signal(2)),
        ((1 << 63) | 5, 8191),
        "ERR-4",
        "a malformed command changed a signal word",
    )
    for at in (0, 64):
        b.expect(layout.landing(source) + at, message(ctx, 64, source, ctx.rank, 0))
    if b.shadow is not None:
        b.compare(0, b.shadow, "ERR-4", "a malformed command moved bytes")
    ctx.barrier()
    b.reset()


def _random_words(rng: np.random.Generator, n: int, target: int | None) -> list[tuple[int, int]]:
    found = []
    for w0, w1 in rng.integers(0, 1 << 63, (n, 2), dtype=np.uint64):
        a, z = int(w0), int(w1)
        if target is not None:
            z = z & ~(0xFFF << 51) | target << 51
        found.append((a, z))
    return found


def _executable(b: Bench, words: tuple[int, int]) -> bool:
    """Whether random words happen to be a command that may be executed. From the field table alone."""
    w0, w1 = words
    op, fine = w0 & 7, w0 >> 3 & 1
    if op in (1, 3) and (16, 4)[fine] == b.granularity:
        length = (w1 >> 32 & 0x7FFFF) * b.granularity
        inside = (w0 >> 4 & 0xFFFFFFFF) * b.granularity + length <= b.heap.size
        inside = inside and (w1 & 0xFFFFFFFF) * b.granularity + length <= b.heap.size
        slot, add = w0 >> 36 & 0x3FFF, w0 >> 50 & 0x1FFF
        return inside and ((slot == 0 and add == 0) if op == 1 else slot < b.signals)
    if op == 2:
        slot = w0 >> 36 & 0xFFFF | (w1 >> 32 & 0xFFFF) << 16
        return not w0 >> 52 & 0x7FF and not fine and not w1 >> 48 & 7 and slot < b.signals
    return op == 4 and w0 >> 3 == 0 and w1 & ((1 << 51) - 1) == 0


@case(
    "err4.random_bytes",
    clauses=("ERR-4", "ERR-6", "SIG-1"),
    ranks=(2, 4),
    comm={"channels": 64, "signals": 16},
    timeout=40,
)
def random_bytes(ctx: Context) -> None:
    """500 random 16-byte values in the rings: none moves a byte, and each costs no more than its channel or target."""
    b = ctx.bench
    rng = np.random.default_rng(patterns.key_of((ctx.seed, "fuzz", ctx.rank)))
    posted = 0
    for r in range(3):
        # In three rounds of 64 channels: readable targets on most of them, anything on the rest.
        for c in range(62):
            ch = b.channel(c)
            targets = range(ctx.size) if c % 8 else [None]
            for target in targets:
                words = [w for w in _random_words(rng, 1, target) if not _executable(b, w)]
                if not words:
                    continue
                posted += 1
                try:
                    ticket = ch.post_raw(raw(words))
                    ticket.wait()
                    ctx.fail("ERR-4", "random bytes were executed", words=[hex(w) for w in words[0]])
                except UcclEpError:
                    ctx.checked()
            if c % 8:
                ctx.check(
                    ch.stats()["state"] in (0, "open"), "ERR-4", "readable targets closed the whole channel", channel=c
                )
        # The rest goes on: two channels that nobody put anything into.
        to, _ = neighbours(ctx)
        b.channel(62 + r % 2).signal(to, 1)
        b.quiet(62 + r % 2, clause="ERR-4")
        b.wait_signal(1, 1, "ERR-4")
        b.expect_signal(1)
        ctx.barrier()
        for slot in range(b.signals):
            ctx.check_equal(
                b.comm.read_signal(slot), b.words[slot], "ERR-4", "random bytes changed a signal word", slot=slot
            )
        if b.shadow is not None:
            b.compare(0, b.shadow, "ERR-4", "random bytes moved bytes of a heap")
        ctx.barrier()
        b.reset()
    ctx.check(posted >= 150, "ERR-4", "too few random values were tried", posted=posted)


@case(
    "err6.closed_until_reset",
    clauses=("ERR-6", "SIG-1", "SIG-2"),
    ranks=(2, 3),
    comm={"channels": 2, "heap_bytes": 2 << 20},
)
def closed_until_reset(ctx: Context) -> None:
    """What failed stays refused until a collective reset; then words start at zero, tickets go on, all works."""
    b = ctx.bench
    to, source = neighbours(ctx)
    send_round(ctx, b, (64, 4096))
    ch = b.channel(0)
    highest = ch.post_raw(raw([_bad_put(b, to)])).value
    for repeat in range(10):
        with ctx.raises("ERR-6", UcclEpError, "a quiet over the failure"):
            ch.quiet()
        for post in (
            lambda: ch.put(to, 0, 0, 16),
            lambda: ch.signal(to, 0),
            lambda: ch.put_signal(to, 0, 0, 16, 0),
        ):
            ctx.refused("ERR-6", UcclEpError, f"a command to what is closed, attempt {repeat}", post)
        # Also a raw command, which nothing looks at before the consumer does.
        with ctx.raises("ERR-6", UcclEpError, f"a raw command to what is closed, attempt {repeat}"):
            ch.post_raw(raw([signal_words(to, 0, 1)])).wait()
    b.channel(1).signal(to, 1).wait()
    ctx.barrier()
    ctx.check_equal(b.comm.read_signal(0), 2, "ERR-6", "a command was executed to what is closed")
    highest = max(highest, ch.stats()["posted"] - 1)
    ctx.barrier()
    b.reset()
    for slot in range(b.signals):
        ctx.check_equal(b.comm.read_signal(slot), 0, "ERR-6", "a word does not start at zero after a reset", slot=slot)
    ctx.barrier()
    ticket = ch.signal(to, 5)
    ctx.check(ticket.value > highest, "ERR-6", "a ticket was given out twice", got=ticket.value, highest=highest)
    ticket.wait()
    b.wait_signal(5, 1, "ERR-6")
    b.expect_signal(5)
    for c in range(2):
        b.channel(c).put(to, 0, Layout(b).landing(ctx.rank), 64).wait()
    b.loosen(Layout(b).landing(source), 64)
    ctx.barrier()


@case("err6.one_rank_failed", clauses=("ERR-6", "SIG-1"), ranks=(3, 4))
def one_rank_failed(ctx: Context) -> None:
    """The failure was on one rank alone; the reset is everybody's, with traffic of the others under way before."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    for k in range(40):
        b.channel().signal(to, k % 8, k)
    b.quiet()
    if ctx.rank == 1:
        with ctx.raises("ERR-6", UcclEpError, "a wait for the malformed command"):
            b.channel().post_raw(raw([_bad_put(b, 0)])).wait()
    ctx.barrier()
    b.reset()
    for slot in range(8):
        ctx.check_equal(b.comm.read_signal(slot), 0, "ERR-6", "a word does not start at zero after a reset", slot=slot)
    ctx.barrier()
    for target in range(ctx.size):
        b.channel().signal(target, 2)
    b.quiet(0, clause="ERR-6")
    b.wait_signal(2, ctx.size, "ERR-6")
    b.expect_signal(2, ctx.size)


@case(
    "err6.others_still_send",
    clauses=("ERR-6", "PRG-1"),
    ranks=(2, 3),
    needs=("caller",),
    comm={"progress": "caller", "ring_log2": 12},
    timeout=30,
)
def others_still_send(ctx: Context) -> None:
    """Who has nothing left to do in a reset still serves those who have: receives and credits go back to them."""
    b = ctx.bench
    last = ctx.size - 1
    for _ in range(2):
        if ctx.rank == last:
            for k in range(3000):
                b.channel().signal(k % last, k % 4)
        b.reset()
        failed = b.channel().stats()["failed"]
        ctx.check_equal(failed, 0, "ERR-6", "commands of a healthy rank failed in a reset that others had reached")
        for slot in range(4):
            ctx.check_equal(b.comm.read_signal(slot), 0, "ERR-6", "a word does not start at zero", slot=slot)
        ctx.barrier()
        b.channel().signal((ctx.rank + 1) % ctx.size, 5).wait()
        b.wait_signal(5, 1, "ERR-6")
        ctx.barrier()
        b.expect_signal(5)


@case(
    "err6.nothing_of_the_old",
    clauses=("ERR-6", "SIG-1"),
    ranks=(2, 3),
    comm={"channels": 2, "ring_log2": 6},
    timeout=30,
)
def nothing_of_the_old(ctx: Context) -> None:
    """What was queued behind a failure is given up: after the reset none of it is applied, fifteen times over."""
    b = ctx.bench
    to, _ = neighbours(ctx)
    for _ in range(15):
        late = [signal_words(to, 3, 1)] * 30
        ticket = b.channel(0).post_raw(raw([_bad_put(b, to), *late]))
        with ctx.raises("ERR-6", UcclEpError, "a wait behind the failure"):
            ticket.wait()
        ctx.barrier()
        b.reset()
        b.channel(1).signal(to, 4).wait()
        b.channel(0).signal(to, 5).wait()
        ctx.barrier()
        ctx.check_equal(
            (b.comm.read_signal(3), b.comm.read_signal(4), b.comm.read_signal(5)),
            (0, 1, 1),
            "ERR-6",
            "commands of before a reset were applied after it, or those after it were not",
        )
        ctx.barrier()
        b.expect_signal(4)
        b.expect_signal(5)
