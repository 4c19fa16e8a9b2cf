# SPDX-License-Identifier: Apache-2.0
"""From what the ranks of a case wrote down (recording.py) to a verdict of the model of the contract (docs/model.md).

The model sees whole words. A word of which a put or a store touched a part is not judged, nor is what a put carries
from it. Canaries that nobody was to touch are compared by the bench; the model is told of those alone that somebody
wrote over, took as a source or read.
"""

from __future__ import annotations

import base64
import traceback
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from uccl_ep.explorer.model import EVENT_DTYPE, NO_WORDS, OPS, History, Verdict

from . import patterns
from .judgement import Judgement
from .patterns import Bytes
from .recording import CANARY, POST, READ, SIGNAL, STORE, SWEEP, WAIT, Part

if TYPE_CHECKING:
    from .group import GroupOutcome

MAX_EVENTS = 20000  # of all ranks together: judging takes a few hundred nanoseconds for each pair that meets
NOT_PASSED = "a case that did not pass"
_PAGE_WORDS = 512
_MASK = (1 << 64) - 1

Mask = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]
Events = npt.NDArray[np.void]
Span = tuple[int, int]  # of words: the first, and the one behind the last
_CARRIES = (OPS["put"], OPS["put_signal"])


def judge(parts: Iterable[Part]) -> Judgement:
    """Every communicator that the parts are of."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Part]] = {}
    for part in parts:
        found.setdefault((part.members, part.identity), []).append(part)
    total = Judgement()
    for group in found.values():
        total.add(_judge_one(group))
    return total


def conclude(
    judgement: Judgement, parts: Sequence[Part], status: str, detail: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Judge the histories of a case that ended so; how it ended then. `judgement`: of groups inside it, added to."""
    if status != "pass":
        # What broke it is known; the ranks ended where they were.
        others = len({(part.members, part.identity) for part in parts})
        if others:
            judgement.not_judged[NOT_PASSED] += others
        return status, detail
    try:
        judgement.add(judge(parts))
    except Exception as error:
        # What was written down is no history: not the backend's fault.
        message = f"the histories cannot be judged: {type(error).__name__}: {error}"
        return "internal_error", {"message": message, "trace": traceback.format_exc()}
    return (status, detail) if judgement.broken is None else ("fail", judgement.broken)


def judged(outcome: GroupOutcome) -> GroupOutcome:
    """The outcome of a group of processes, with its histories judged."""
    parts = [decode(part) for part in outcome.parts]
    outcome.status, outcome.detail = conclude(outcome.judgement, parts, outcome.status, outcome.detail)
    outcome.parts = []
    return outcome


def _judge_one(parts: Sequence[Part]) -> Judgement:
    told = Judgement()
    members = parts[0].members
    if {part.rank for part in parts} != set(range(len(members))):
        told.not_judged["a rank that told nothing: it died, or never had the communicator"] = 1
        return told
    spoilt = [part.unjudged for part in parts if part.unjudged]
    if not spoilt and sum(len(part.rows) for part in parts) > MAX_EVENTS:
        spoilt = [f"more than {MAX_EVENTS} events"]
    if spoilt:
        told.not_judged[spoilt[0]] = 1
        return told
    verdict = Assembly(sorted(parts, key=lambda part: part.rank)).history().judge()
    told.judged, told.words = 1, verdict.words_judged
    told.signals, told.undecided = verdict.signals_judged, verdict.undecided
    if verdict.forbidden:
        told.broken = _detail(verdict, parts[0])
    elif verdict.outcome != "allowed":
        told.remarks.append(f"{parts[0].name}: {verdict}")
    return told


def _detail(verdict: Verdict, part: Part) -> dict[str, Any]:
    return {
        "clause": verdict.clause,
        "message": f"the model of the contract: {verdict.text}",
        "values": {"communicator": part.name, **{f"event {i}": e for i, e in enumerate(verdict.events)}},
    }


def runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Where the runs of true elements begin and end."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).view(np.int8))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


class _Memory:
    """The words of a rank's heap: of which the model is told, and about which it must not be asked."""

    def __init__(self, nbytes: int) -> None:
        self.words = nbytes // 8
        self.partial: Mask = np.zeros(self.words, np.bool_)
        self.has_partial = False

    def cut(self, offset: Words, nbytes: Words) -> None:
        """The words at the ends of these ranges of which only a part lies inside."""
        for at in (offset, offset + nbytes):
            self._taint((at // 8)[(at % 8 != 0) & (nbytes != 0)])

    def _taint(self, words: Words) -> None:
        if len(words):
            self.partial[words[words < self.words]] = True
            self.has_partial = True

    def shatter(self, offset: int, nbytes: int) -> None:
        """No word of this range is one."""
        self._taint(np.arange(offset // 8, -(-(offset + nbytes) // 8), dtype=np.uint64))

    def whole(self, spans: list[Span]) -> list[Span]:
        """Without the words of which somebody wrote a part."""
        if not self.has_partial:
            return spans
        wanted: Mask = np.zeros(self.words, np.bool_)
        for begin, end in spans:
            wanted[begin:end] = True
        return runs(wanted & ~self.partial)


class _Part:
    """A part with its rows as a table: an event each, and its bytes."""

    def __init__(self, part: Part) -> None:
        self.rank, self.heap_bytes = part.rank, part.heap_bytes
        part.finish()
        self.events: Events = np.frombuffer(bytearray().join(part.rows), EVENT_DTYPE)
        kind = self.events["kind"]
        self.data = part.data
        self.memory = _Memory(part.heap_bytes)
        self.canaries, self.seen = part.canaries, part.seen
        carries = (kind == POST) & np.isin(self.events["op"], _CARRIES)
        far, size = np.maximum(self.events["local"], self.events["remote"]), self.events["bytes"]
        inside = (far <= part.heap_bytes) & (size <= part.heap_bytes) & (far + size <= part.heap_bytes)
        # What reaches beyond the heap was refused; of what moves nothing only the signal is left.
        size[(kind == POST) & ~(carries & inside)] = 0
        self.puts = self.events[carries & (self.events["bytes"] != 0)]
        self.stores, self.reads = self.events[kind == STORE], self.events[kind == READ]


class Assembly:
    """The parts of one communicator, by rank, as one history."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._signals = max(part.signals for part in parts)
        self._parts = [_Part(part) for part in parts]
        self._puts = _joined([part.puts for part in self._parts])
        self._events: list[Events] = []
        self._words: list[Words] = []
        self._first: list[Words] = []
        self._n_words = 0

    def history(self) -> History:
        self._find_partial()
        for part in self._parts:
            self._tell(part)
        history = History(len(self._parts), self._parts[0].heap_bytes, self._signals)
        words = np.concatenate([*self._words, np.zeros(1, np.uint64)])
        history.add_all(_joined(self._events), words, np.concatenate(self._first))
        return history

    # ---------------------------------------------------------------------------------------- words that are not whole

    def _find_partial(self) -> None:
        crossed = (self._puts["local"] - self._puts["remote"]) % 8 != 0
        for part in self._parts:
            memory, here = part.memory, self._puts["peer"] == part.rank
            memory.cut(part.stores["local"], part.stores["bytes"])
            straight, across = self._puts[here & ~crossed], self._puts[here & crossed]
            memory.cut(straight["remote"], straight["bytes"])
            for put in across:
                memory.shatter(int(put["remote"]), int(put["bytes"]))
        self._spread(self._puts[~crossed])

    def _spread(self, puts: Events) -> None:
        """What a put carries from a word that is not judged is not judged either."""
        changed = any(part.memory.has_partial for part in self._parts)
        while changed:
            changed = False
            for rank, peer, local, remote, size in puts[["rank", "peer", "local", "remote", "bytes"]].tolist():
                source, target = self._parts[rank].memory, self._parts[peer].memory
                if not source.has_partial:
                    continue
                (first, n), (to, _) = _inside(local, size), _inside(remote, size)
                there = target.partial[to : to + n]
                new = source.partial[first : first + n] & ~there
                if new.any():
                    there |= new
                    target.has_partial = changed = True

    # ---------------------------------------------------------------------------------------------------- the events

    def _add(self, events: Events, data: Sequence[Words] | None = None) -> None:
        first = np.full(len(events), NO_WORDS, np.uint64)
        if data is not None and len(data):
            ends = np.cumsum([len(words) for words in data], dtype=np.uint64) + np.uint64(self._n_words)
            first[0], first[1:] = self._n_words, ends[:-1]
            self._n_words = int(ends[-1])
            self._words += data
        self._events.append(events)
        self._first.append(first)

    def _tell(self, part: _Part) -> None:
        events = part.events
        kind = events["kind"]
        self._add(_whole_puts(events[kind == POST]))
        # A word to which nobody adds says nothing as long as it is zero.
        adds = self._puts_to(part)
        self._add(events[(kind == SIGNAL) & ((events["value"] != 0) | np.isin(events["slot"], adds))])
        self._add(events[(kind > READ) & (kind != STORE) & (kind < CANARY)])
        self._add(events[kind == WAIT])
        self._tell_bytes(part, np.flatnonzero((kind == STORE) | (kind == READ)))
        if part.canaries is None:
            return
        here = self._puts[self._puts["peer"] == part.rank]
        touched = [
            (part.stores["local"], part.stores["bytes"]),
            (part.puts["local"], part.puts["bytes"]),
            (here["remote"], here["bytes"]),
        ]
        for note in events[kind == CANARY]:
            spans = _spans([*touched, (part.reads["local"], part.reads["bytes"])])
            self._tell_whole(part, note, STORE, part.canaries, spans)
        for note in events[kind == SWEEP]:
            assert part.seen is not None
            # Where puts went and the case never looked: the rest has been judged as it looked.
            spans = _spans([(here["remote"], here["bytes"])], (part.reads["local"], part.reads["bytes"]))
            self._tell_whole(part, note, READ, part.seen, spans)

    def _puts_to(self, part: _Part) -> Events:
        slots = [
            other.events["slot"][(other.events["kind"] == POST) & (other.events["peer"] == part.rank)]
            for other in self._parts
        ]
        return np.unique(np.concatenate(slots))

    def _tell_bytes(self, part: _Part, rows: npt.NDArray[np.intp]) -> None:
        """Stores and reads: those of their words that are whole."""
        memory = part.memory
        local, size = part.events["local"][rows], part.events["bytes"][rows]
        plain = ((local | size) % 8 == 0) & (size != 0)
        if memory.has_partial:
            plain &= False
        events = part.events[rows]
        self._add(events[plain], [part.data[number].view(np.uint64) for number in events["value"][plain].tolist()])
        for row in rows[~plain].tolist():
            event = part.events[row : row + 1]
            at, n = int(event["local"][0]), int(event["bytes"][0])
            first, words = _inside(at, n)
            data = np.ascontiguousarray(part.data[int(event["value"][0])][first * 8 - at :][: words * 8]).view(
                np.uint64
            )
            self._tell_spans(event, data, first, runs(~memory.partial[first : first + words]))

    def _tell_spans(self, event: Events, words: Words, first: int, spans: list[Span]) -> None:
        found = [
            # In pages, so that who looks for the writers of a word need not look at all of them.
            (at, min(at + _PAGE_WORDS, end))
            for begin, end in spans
            for at in range(begin, end, _PAGE_WORDS)
        ]
        if not found:
            return
        span = np.array(found, np.uint64)
        events = np.repeat(event, len(found))
        events["local"], events["bytes"] = (span[:, 0] + np.uint64(first)) * 8, (span[:, 1] - span[:, 0]) * 8
        self._add(events, [words[begin:end] for begin, end in found])

    def _tell_whole(self, part: _Part, note: np.void, kind: int, heap: Bytes, spans: list[Span]) -> None:
        """Of the whole heap these words."""
        event = np.array([note], EVENT_DTYPE)
        event["kind"] = kind
        self._tell_spans(event, heap[: part.memory.words * 8].view(np.uint64), 0, part.memory.whole(spans))


def _spans(ranges: list[tuple[Words, Words]], without: tuple[Words, Words] | None = None) -> list[Span]:
    """The words in any of these ranges of bytes (offsets and lengths), but for those in `without`."""
    points: list[Words] = []
    steps: list[npt.NDArray[np.int64]] = []
    weighed = [(offset, nbytes, 1) for offset, nbytes in ranges]
    if without is not None:
        weighed.append((*without, -1 << 32))
    for offset, nbytes, weight in weighed:
        some = nbytes != 0
        for at, step in ((offset[some], weight), ((offset + nbytes + 7)[some], -weight)):
            points.append(at // 8)
            steps.append(np.full(len(at), step, np.int64))
    edges = np.concatenate(points)
    if not len(edges):
        return []
    order = np.argsort(edges)
    edges, inside = edges[order], np.cumsum(np.concatenate(steps)[order]) > 0
    begin, end = edges[:-1][inside[:-1]], edges[1:][inside[:-1]]
    some = begin < end
    begin, end = begin[some], end[some]
    fresh = np.ones(len(begin), np.bool_)
    fresh[1:] = begin[1:] != end[:-1]
    last = np.ones(len(begin), np.bool_)
    last[:-1] = fresh[1:]
    return list(zip(begin[fresh].tolist(), end[last].tolist(), strict=True))


def _joined(events: Sequence[Events]) -> Events:
    # As bytes: numpy would compare the types of the fields first, of every array.
    return np.frombuffer(b"".join(array.tobytes() for array in events), EVENT_DTYPE)


def _inside(offset: int, nbytes: int) -> tuple[int, int]:
    """The whole words in a range of bytes: the first one, and how many."""
    first, end = -(-offset // 8), (offset + nbytes) // 8
    return first, max(end - first, 0)


def _whole_puts(posts: Events) -> Events:
    """Without the parts of words at the ends of a put; without bytes where no word stays one."""
    posts = posts.copy()
    local, remote, size = posts["local"], posts["remote"], posts["bytes"]
    lead = -local % 8
    inner = np.where(size > lead, (size - np.minimum(lead, size)) // 8 * 8, 0)
    inner[(local - remote) % 8 != 0] = 0
    posts["bytes"] = inner
    posts["local"], posts["remote"] = np.where(inner, local + lead, 0), np.where(inner, remote + lead, 0)
    return posts


# ------------------------------------------------------------------------------------- from one process to another

_FIELDS = ("members", "rank", "seed", "name", "identity", "heap_bytes", "signals", "unjudged")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def encode(part: Part) -> dict[str, Any]:
    """As JSON types."""
    part.finish()
    difference = b""
    if part.seen is not None and part.canaries is not None:
        difference = zlib.compress((part.seen ^ part.canaries).tobytes(), 1)  # mostly zeros
    return {
        **{name: getattr(part, name) for name in _FIELDS},
        "rows": _text(b"".join(part.rows)),
        "numbers": {number: len(data) for number, data in part.data.items()},
        "data": _text(b"".join(data.tobytes() for data in part.data.values())),
        "filled": part.canaries is not None,
        "seen": _text(difference),
    }


def decode(told: dict[str, Any]) -> Part:
    plain: dict[str, Any] = {name: tuple(v) if isinstance(v := told[name], list) else v for name in _FIELDS}
    part = Part(clock=lambda: 0, **plain)
    rows = _bytes(told["rows"])
    part.rows += [rows[at : at + EVENT_DTYPE.itemsize] for at in range(0, len(rows), EVENT_DTYPE.itemsize)]
    blob, at = _bytes(told["data"]), 0
    for number, length in told["numbers"].items():
        part.data[int(number)] = np.frombuffer(bytearray(blob[at : at + length]), np.uint8)
        at += length
    if told["filled"]:
        part.canaries = patterns.data(part.heap_bytes, part.seed, "canary", part.name, part.rank)
        if told["seen"]:
            difference = np.frombuffer(zlib.decompress(_bytes(told["seen"])), np.uint8)
            part.seen = difference ^ part.canaries
    return part
