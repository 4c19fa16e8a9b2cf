# SPDX-License-Identifier: Apache-2.0
"""What cases do and see is written down whole, and the model of the contract judges it: it lets pass what is allowed,
and finds a lie that no assertion of the case looks at."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from uccl_ep import COMMAND_DTYPE
from uccl_ep.communicator import Channel, Communicator
from uccl_ep.conformance import Options, history, patterns, recording, runner
from uccl_ep.conformance.context import Context
from uccl_ep.conformance.judgement import Judgement
from uccl_ep.conformance.recording import RecordedHeap
from uccl_ep.conformance.registry import Case
from uccl_ep.conformance.results import CaseResult
from uccl_ep.conformance.simulation import Setup, Simulation
from uccl_ep.errors import CommandError, UcclEpError
from uccl_ep.explorer.model import EVENT_DTYPE, KINDS, OPS

LANES = ("shm", "sim")


def go(lane: str, function: Callable[[Context], None], *clauses: str, ranks: int = 2, **comm: Any) -> CaseResult:
    """Run it as a case, as the runner does."""
    case = Case("put1.test", function, clauses or ("PUT-1",), ranks=(ranks,), comm=comm)
    options = Options(backend=lane, profile="efa" if lane == "sim" else None, ranks=ranks)
    return runner.run_case(case, options, 3, runner.probe(options)["capabilities"])


def parts_of(function: Callable[[Context], None], ranks: int = 2, **comm: Any) -> list[recording.Part]:
    """What the ranks of a case in a world wrote down."""
    case = Case("put1.test", function, ("PUT-1", "ERR-4", "PUT-4"), ranks=(ranks,), comm=comm)
    simulation = Simulation(case, ranks, seed=3, setup=Setup("efa"), backend={"backend": "sim"}, time_scale=1.0)
    outcome = simulation.run()
    assert outcome.status == "pass", outcome.detail
    parts = [part for ctx in simulation.contexts for part in ctx.parts]
    for part in parts:
        part.finish()
    return parts


def events_of(part: recording.Part) -> np.ndarray[Any, Any]:
    return np.frombuffer(b"".join(part.rows), EVENT_DTYPE)


def message(ctx: Context) -> None:
    """A put and a signal; the case asserts nothing of what came."""
    b = ctx.bench
    if ctx.rank == 0:
        b.place(0, patterns.data(512, 1))
        b.channel().put_signal(1, 0, 4096, 512, 3).wait()
    ctx.barrier()
    if ctx.rank == 1:
        b.comm.read_signal(3)
        _ = b.heap[4096 : 4096 + 512]
    b.loosen(4096, 512)
    b.loosen_signal(3)
    ctx.barrier()


# ----------------------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize("lane", LANES)
def test_what_is_allowed_passes_and_is_counted(lane: str) -> None:
    result = go(lane, message)
    assert (result.status, result.histories.judged, result.histories.remarks) == ("pass", 1, []), result.detail
    assert result.histories.words == 64
    assert result.histories.signals >= 1
    assert json.loads(json.dumps(result.as_dict()))["histories"]["judged"] == 1


@pytest.mark.parametrize("lane", LANES)
def test_bytes_that_never_came_are_found_though_nobody_asserts(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true = Channel.put_signal

    def lie(self: Any, target: int, local: int, remote: int, nbytes: int, slot: int, add: int, **rest: Any) -> Any:
        return true(self, target, local, remote, nbytes // 2, slot, add, **rest)

    monkeypatch.setattr(Channel, "put_signal", lie)
    result = go(lane, message, "ABT-1")
    assert (result.status, result.broken_clause) == ("fail", "QUI-1"), result.detail
    assert result.message.startswith("the model of the contract: ")
    told = " / ".join(result.detail["values"].values())
    assert re.search(
        "rank 0 put_signal ch0 ->1 512 bytes from 0 to 4096.* waited for completion.* read 512 bytes", told
    )


@pytest.mark.parametrize("lane", LANES)
def test_a_signal_that_counts_twice_is_found(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true = Communicator.read_signal
    monkeypatch.setattr(Communicator, "read_signal", lambda self, slot: 2 * true(self, slot))
    result = go(lane, message, "ABT-1")
    assert (result.status, result.broken_clause) == ("fail", "SIG-1"), result.detail
    assert "applied more than once" in result.message


def test_a_stray_byte_is_found_where_the_case_let_it_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that the case calls its own affair are not compared with anything but the contract."""

    def stray(ctx: Context) -> None:
        message(ctx)
        b = ctx.bench
        b.heap.raw[8192] ^= 0xFF  # nobody's store
        _ = b.heap[8192 : 8192 + 64]
        b.loosen(8192, 64)

    result = go("sim", stray, "ABT-1")
    assert (result.status, result.broken_clause) == ("fail", "MEM-2"), result.detail


@pytest.mark.parametrize("lane", LANES)
def test_a_duty_that_the_case_breaks_is_a_remark(lane: str) -> None:
    def changed_early(ctx: Context) -> None:
        b = ctx.bench
        if ctx.rank == 0:
            b.place(0, patterns.data(512, 1))
            b.channel().put(1, 0, 4096, 512)
            b.place(0, patterns.data(512, 2))
        b.loosen(4096, 512)
        ctx.checked()

    result = go(lane, changed_early)
    assert result.status == "pass", result.detail
    (remark,) = result.histories.remarks
    assert "program PUT-3" in remark


def test_a_broken_clause_that_the_case_does_not_cite_counts() -> None:
    from uccl_ep.conformance.results import SuiteResult

    case = CaseResult("put1.x", "", ("PUT-1",), "core", "fail", 0.0, {"clause": "QUI-5"}, 2)
    fields = dict.fromkeys(("lane", "profile", "provider", "strategy", "strategy_reason", "level", "replay"), "")
    run = SuiteResult(
        backend={}, capabilities={}, seed=1, ranks=2, partial=False, cannot_prove=(), environment={}, **fields
    )
    run.cases.append(case)
    assert run.by_clause()["QUI-5"] == [case]
    assert run.by_clause()["QUI-1"] == []


# ------------------------------------------------------------------------------------------------ what is written down


def test_every_kind_of_call_is_written_down() -> None:
    def everything(ctx: Context) -> None:
        b = ctx.bench
        ch, to = b.channel(), 1 - ctx.rank
        b.place(0, patterns.data(256, ctx.rank))
        ch.put(to, 0, 4096, 64).wait_source()
        ch.signal(to, 1)
        ch.put_signal(to, 64, 4160, 64, 2, 5)
        batch = np.zeros(2, COMMAND_DTYPE)
        batch["op"], batch["target"], batch["granularity"] = [OPS["put"], OPS["flush"]], to, [16, 0]
        batch["local"][0], batch["remote"][0], batch["bytes"][0] = 128, 4224, 64
        assert ch.post_many(batch).value == 4
        with pytest.raises(CommandError):
            ch.put(to, 8, 0, 16)
        b.wait_signal(2, 5)
        b.comm.read_signal(1)
        b.quiet(0)
        b.comm.quiet_source()
        b.comm.quiet()
        b.comm.barrier()
        ctx.barrier()
        b.compare(4096, patterns.data(256, 1 - ctx.rank)[:192], "PUT-1", "")
        # A put whose bytes would lie outside, as an encoder of its own makes it.
        words = np.array([[OPS["put"], b.heap.size // 16 | 4 << 32 | to << 51]], np.uint64)
        with pytest.raises(UcclEpError):
            ch.post_raw(words).wait()
        assert b.comm.errors()
        ctx.barrier()
        b.reset()
        ctx.barrier()
        b.comm.exclude(to)
        b.loosen(4096, 192)
        b.broken = True  # nothing is sent to an excluded rank, so nobody is waited for

    parts = parts_of(everything)
    assert [part.unjudged for part in parts] == ["", ""]
    events = events_of(parts[0])
    names = {value: name for name, value in KINDS.items()} | {recording.CANARY: "canary"}
    found = Counter(names[kind] for kind in events["kind"].tolist())
    assert found.pop("barrier") >= 5
    assert found == {
        "canary": 1,
        "store": 1,
        "post": 7,  # five, one refused, one malformed
        "wait": 5,
        "signal": 2,
        "read": 1,
        "failure": 2,  # what the wait raised, and what errors() told
        "reset": 1,
        "exclude": 1,
    }
    posts = events[events["kind"] == KINDS["post"]]
    assert posts["op"].tolist() == [OPS[o] for o in ("put", "signal", "put_signal", "put", "flush", "put", "flush")]
    assert posts["ticket"].tolist()[:5] == [0, 1, 2, 3, 4]
    assert [status < 0 for status in posts["status"].tolist()] == [False] * 5 + [True, False]
    assert posts["bytes"].tolist() == [64, 0, 64, 64, 0, 16, 0]
    waits = events[events["kind"] == KINDS["wait"]]
    assert waits["source"].tolist() == [1, 0, 1, 0, 0]
    assert [status < 0 for status in waits["status"].tolist()] == [False] * 4 + [True]
    assert (events["begin"] < events["end"]).all()
    told = history.judge(parts)
    assert (told.judged, told.broken, told.remarks) == (1, None, [])


def test_parts_of_words_are_not_judged_and_whole_ones_are() -> None:
    def fine(ctx: Context) -> None:
        b = ctx.bench
        to = 1 - ctx.rank
        for k, (local, remote, n) in enumerate(((4, 4096, 60), (64, 8196, 20), (128, 12288, 64), (4096, 16384, 60))):
            if k < 3:
                b.place(local, patterns.data(n, ctx.rank, k))
            b.channel().put(to, local, remote, n).wait()
            ctx.barrier()  # the last one carries on what came with the first
        for remote, n in ((4096, 60), (8192, 24), (12288, 64), (16384, 60)):
            _ = b.heap[remote : remote + n]
            b.loosen(remote, n)
        ctx.checked()

    parts = parts_of(fine, granularity=4)
    told = history.judge(parts)
    assert (told.judged, told.broken) == (1, None)
    # Of each rank the third alone: the first and the last came shifted, and the second has but one whole word.
    assert told.words in (2 * 8, 2 * 9, 2 * 10)


def test_what_is_too_much_is_not_judged_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(function: Callable[[Context], None], **comm: Any) -> str:
        (why,) = go("sim", function, **comm).histories.not_judged
        return why

    def many(ctx: Context) -> None:
        for _ in range(recording.MAX_EVENTS // 2 + 1):
            ctx.bench.channel().signal(ctx.rank, 0).wait()
        ctx.bench.loosen_signal(0)
        ctx.checked()

    def much(ctx: Context) -> None:
        for _ in range(3):
            ctx.bench.place(0, patterns.data(1 << 20, 1))
        ctx.checked()

    def views(ctx: Context) -> None:
        ctx.bench.comm.heap[0] = ctx.bench.heap[0]
        ctx.checked()

    def strided(ctx: Context) -> None:
        ctx.bench.heap[::2] = ctx.bench.heap[::2]
        ctx.checked()

    monkeypatch.setattr(recording, "MAX_EVENTS", 400)
    assert reason(many) == "more than 400 events of a rank"
    assert reason(much) == "more than 2 MiB stored and read by a rank"
    assert reason(views) == "a case took the heap's memory itself"
    assert reason(strided) == "a store that is no plain range"
    assert reason(message, heap_bytes=17 << 20) == "a heap above 16 MiB"


def test_a_case_that_failed_and_ranks_that_died() -> None:
    def fails(ctx: Context) -> None:
        message(ctx)
        ctx.check(ctx.rank != 1, "PUT-1", "so it is")

    def dies(ctx: Context) -> None:
        b = ctx.bench
        b.broken = True
        b.channel().signal(0, 0).wait()
        ctx.barrier()
        ctx.checked()
        if ctx.rank == 1:
            ctx.kill(1)
            ctx.sleep(10)
        b.wait_signal(0, 2)

    for lane in LANES:
        result = go(lane, fails)
        assert (result.status, result.message) == ("fail", "so it is")
        assert dict(result.histories.not_judged) == {"a case that did not pass": 1}
    # In a world what a dead rank wrote down is still there.
    told = go("sim", dies, "SIG-1").histories
    assert (told.judged, dict(told.not_judged)) == (1, {})
    told = go("shm", dies, "SIG-1").histories
    assert told.judged == 0
    assert list(told.not_judged) == ["a rank that told nothing: it died, or never had the communicator"]


def test_a_rank_that_died_in_a_call_may_have_posted() -> None:
    part = recording.Part(iter(range(100)).__next__, (0, 1), 0, 1)
    part.posting(part.clock(), 0, [(OPS["signal"], 1, 0, 0, 0, 3, 1)])
    part.finish()
    (event,) = events_of(part)
    assert (event["kind"], event["status"]) == (KINDS["post"], recording.UNFINISHED)


def test_a_batch_with_tickets_that_it_cannot_have_is_not_judged() -> None:
    part = recording.Part(iter(range(100)).__next__, (0, 1), 0, 1)
    call = part.posting(part.clock(), 0, [(OPS["signal"], 1, 0, 0, 0, 3, 1)] * 4)
    part.posted(call, 1)
    assert part.unjudged == "a batch of 4 commands ends with ticket 1"


def test_polls_are_kept_as_the_first_and_the_last() -> None:
    part = recording.Part(iter(range(1000)).__next__, (0,), 0, 1)
    for value in [0] * 50 + [1] * 50:
        part.sight(part.clock(), 3, value)
    part.finish()
    seen = events_of(part)
    assert seen["value"].tolist() == [0, 0, 1, 1]
    assert seen["begin"].tolist() == [0, 98, 100, 198]


def test_a_heap_gives_copies_and_takes_ranges() -> None:
    part = recording.Part(iter(range(100)).__next__, (0,), 0, 1)
    heap = RecordedHeap(np.zeros(64, np.uint8), part)
    heap[8:16] = 7
    seen = heap[0:24]
    heap[8:16] = np.arange(8)
    assert seen.tolist() == [0] * 8 + [7] * 8 + [0] * 8
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 1
    assert (heap.size, len(heap), heap[-1]) == (64, 64, 0)
    assert events_of(part)["kind"].tolist() == [KINDS["store"], KINDS["read"], KINDS["store"]]
    assert [part.data[n].tolist() for n in (0, 2)] == [[7] * 8, list(range(8))]


def test_parts_come_whole_through_json() -> None:
    parts = parts_of(message)
    again = [history.decode(json.loads(json.dumps(history.encode(part)))) for part in parts]
    for old, new in zip(parts, again, strict=True):
        assert new.rows == old.rows
        assert (new.members, new.identity, new.heap_bytes, new.signals) == (
            old.members, old.identity, old.heap_bytes, old.signals,
        )  # fmt: skip
        assert {n: d.tolist() for n, d in new.data.items()} == {n: d.tolist() for n, d in old.data.items()}
        assert old.seen is not None
        assert new.seen is not None
        assert np.array_equal(new.seen, old.seen)
    one, other = history.judge(parts), history.judge(again)
    assert one.as_dict() == other.as_dict()
    assert one.judged == 1


def test_judgements_add_up() -> None:
    total = Judgement()
    for _ in range(2):
        total.add(Judgement(1, 10, 5, 1, Counter({"x": 2}), ["r"]))
    assert Judgement.from_dict({**total.as_dict(), "broken": None}) == total
    assert str(total) == (
        "2 histories judged by the model: 20 words, 10 signal values (2 of them only bounded); 4 not judged: 4 of x"
    )
