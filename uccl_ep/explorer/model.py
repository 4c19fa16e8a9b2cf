# SPDX-License-Identifier: Apache-2.0
"""The executable model of the contract (csrc/model, docs/model.md), for histories recorded from Python.

    history = History(ranks=2, heap_bytes=1 << 20, signals=64)
    history.store(0, begin, end, offset=0, words=values)
    history.post(0, begin, end, op="put", channel=0, target=1, ticket=0, local=0, remote=4096, size=64)
    history.read(1, begin, end, offset=4096, words=seen)
    verdict = history.judge()
    if verdict.forbidden: ...

Times are of one clock for all ranks: CLOCK_MONOTONIC (`time.monotonic_ns`) does within a machine. Record everything
that is done; of what is seen, as much as is wanted. Ranks that are processes record tuples and hand them to `add`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import paths

ALL = 0xFFFFFFFF
NO_TICKET = 0xFFFFFFFFFFFFFFFF

# As in csrc/model/model.h; a test compares them.
DECLARATIONS = """
typedef struct uccl_ep_model_event {
    uint32_t kind;
    uint32_t rank;
    uint64_t begin, end;
    int32_t status;
    uint32_t channel;
    uint32_t peer;
    uint32_t op;
    uint32_t slot;
    uint32_t source;
    uint64_t ticket;
    uint64_t local, remote, bytes;
    uint64_t value;
} uccl_ep_model_event;
typedef struct uccl_ep_model_verdict {
    uint32_t outcome;
    uint32_t n_events;
    uint32_t events[8];
    char clause[8];
    char text[512];
    uint64_t words_judged, signals_judged;
    uint64_t undecided;
} uccl_ep_model_verdict;
typedef struct uccl_ep_model uccl_ep_model;
uccl_ep_model *uccl_ep_model_new(uint32_t ranks, uint64_t heap_bytes, uint32_t signals);
void uccl_ep_model_free(uccl_ep_model *model);
void uccl_ep_model_clear(uccl_ep_model *model);
int uccl_ep_model_add(uccl_ep_model *model, const uccl_ep_model_event *event, const uint64_t *words);
int uccl_ep_model_add_all(uccl_ep_model *model, const uccl_ep_model_event *events, uint32_t n,
                          const uint64_t *words, const uint64_t *first);
const char *uccl_ep_model_error(const uccl_ep_model *model);
uint32_t uccl_ep_model_count(const uccl_ep_model *model);
uint32_t uccl_ep_model_describe(const uccl_ep_model *model, uint32_t index, char *text, uint32_t bytes);
int uccl_ep_model_judge(uccl_ep_model *model, uccl_ep_model_verdict *verdict);
uint64_t uccl_ep_model_stamp(uint32_t id, uint32_t index);
"""

KINDS = {
    "post": 1,
    "wait": 2,
    "signal": 3,
    "read": 4,
    "store": 5,
    "failure": 6,
    "exclude": 7,
    "reset": 8,
    "barrier": 9,
}
OPS = {"put": 1, "signal": 2, "put_signal": 3, "flush": 4}
OUTCOMES = ("allowed", "forbidden", "program", "invalid")

# uccl_ep_model_event, for add_all().
EVENT_DTYPE = np.dtype(
    [
        *((name, "u4") for name in ("kind", "rank")),
        *((name, "u8") for name in ("begin", "end")),
        ("status", "i4"),
        *((name, "u4") for name in ("channel", "peer", "op", "slot", "source")),
        *((name, "u8") for name in ("ticket", "local", "remote", "bytes", "value")),
    ]
)
NO_WORDS = 0xFFFFFFFFFFFFFFFF
_POINTERS = ("uccl_ep_model_event *", "uint64_t *", "uint64_t *")

Words = NDArray[np.uint64]


@functools.cache
def _library() -> tuple[Any, Any]:
    from cffi import FFI

    ffi = FFI()
    ffi.cdef(DECLARATIONS)
    return ffi, ffi.dlopen(str(paths.library_dir() / "libuccl_ep_model.so"))


def stamp(id: int, index: int) -> int:
    """The word `index` of a store of stamp `id`."""
    return int(_library()[1].uccl_ep_model_stamp(id, index))


@dataclass(frozen=True)
class Verdict:
    """What the contract says of a history. `events` are descriptions, the cause first and the sight last."""

    outcome: str  # "allowed", "forbidden", "program" (it broke its own duty), "invalid" (the history cannot be)
    clause: str
    text: str
    events: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    words_judged: int = 0
    signals_judged: int = 0
    undecided: int = 0

    @property
    def forbidden(self) -> bool:
        return self.outcome == "forbidden"

    def __str__(self) -> str:
        head = f"{self.outcome}{' ' + self.clause if self.clause else ''}: {self.text}"
        return "\n".join([head, *(f"  {line}" for line in self.events)])


class History:
    """What ranks did and saw. Every event has the interval [begin, end] in which it happened."""

    def __init__(self, ranks: int, heap_bytes: int, signals: int = 1024) -> None:
        ffi, lib = _library()
        handle = lib.uccl_ep_model_new(ranks, heap_bytes, signals)
        if handle == ffi.NULL:
            raise ValueError(f"a history of {ranks} ranks: 1 to 4096 are possible")
        self._model = ffi.gc(handle, lib.uccl_ep_model_free)

    def __len__(self) -> int:
        return int(_library()[1].uccl_ep_model_count(self._model))

    def add(
        self, kind: str, rank: int, begin: int, end: int, words: Sequence[int] | Words | None = None, **fields: int
    ) -> int:
        """Any event by its fields (csrc/model/model.h). Returns its number."""
        ffi, lib = _library()
        event = ffi.new(
            "uccl_ep_model_event *", {"kind": KINDS[kind], "rank": rank, "begin": begin, "end": end, **fields}
        )
        buffer = ffi.NULL
        if words is not None:
            array = np.ascontiguousarray(words, dtype=np.uint64)
            event.bytes = array.nbytes
            buffer = ffi.from_buffer("uint64_t[]", array) if array.nbytes else ffi.new("uint64_t[1]")
        if lib.uccl_ep_model_add(self._model, event, buffer):
            raise ValueError(ffi.string(lib.uccl_ep_model_error(self._model)).decode())
        return len(self) - 1

    def add_all(self, events: NDArray[np.void], words: Words, first: Words) -> None:
        """Many at once, of EVENT_DTYPE. The words of event i begin at words[first[i]]; NO_WORDS: it has none."""
        ffi, lib = _library()
        if len(events) != len(first):
            raise ValueError(f"{len(events)} events and places of words for {len(first)}")
        arrays = [
            np.ascontiguousarray(array, dtype)
            for array, dtype in ((events, EVENT_DTYPE), (words, np.uint64), (first, np.uint64))
        ]
        pointers = [ffi.cast(type_name, array.ctypes.data) for type_name, array in zip(_POINTERS, arrays, strict=True)]
        if lib.uccl_ep_model_add_all(self._model, pointers[0], len(events), pointers[1], pointers[2]):
            raise ValueError(ffi.string(lib.uccl_ep_model_error(self._model)).decode())

    def post(
        self, rank: int, begin: int, end: int, *, op: str, channel: int, target: int, ticket: int, local: int = 0,
        remote: int = 0, size: int = 0, slot: int = 0, add: int = 0, status: int = 0,
    ) -> int:  # fmt: skip
        return self.add(
            "post", rank, begin, end, op=OPS[op], channel=channel, peer=target, ticket=ticket, local=local,
            remote=remote, bytes=size, slot=slot, value=add, status=status,
        )  # fmt: skip

    def wait(
        self, rank: int, begin: int, end: int, *, channel: int | None = None, ticket: int | None = None,
        source: bool = False, status: int = 0,
    ) -> int:  # fmt: skip
        """A wait or quiet that ended with `status`. No channel: all; no ticket: all that was posted before it."""
        return self.add(
            "wait", rank, begin, end, channel=ALL if channel is None else channel,
            ticket=NO_TICKET if ticket is None else ticket, source=int(source), status=status,
        )  # fmt: skip

    def signal(self, rank: int, begin: int, end: int, *, slot: int, value: int) -> int:
        """The rank saw `value` in its own word `slot`."""
        return self.add("signal", rank, begin, end, slot=slot, value=value)

    def read(self, rank: int, begin: int, end: int, *, offset: int, words: Sequence[int] | Words) -> int:
        return self.add("read", rank, begin, end, words, local=offset)

    def store(
        self, rank: int, begin: int, end: int, *, offset: int, words: Sequence[int] | Words | None = None,
        id: int = 0, size: int = 0,
    ) -> int:  # fmt: skip
        """The rank itself wrote `words`, or stamps of `id` into `size` bytes."""
        if words is not None:
            return self.add("store", rank, begin, end, words, local=offset)
        return self.add("store", rank, begin, end, local=offset, bytes=size, value=id)

    def failure(
        self, rank: int, begin: int, end: int, *, status: int, channel: int | None = None, peer: int | None = None,
        ticket: int | None = None,
    ) -> int:  # fmt: skip
        """The rank found a record of failure."""
        return self.add(
            "failure", rank, begin, end, status=status, channel=ALL if channel is None else channel,
            peer=ALL if peer is None else peer, ticket=NO_TICKET if ticket is None else ticket,
        )  # fmt: skip

    def exclude(self, rank: int, begin: int, end: int, *, peer: int) -> int:
        return self.add("exclude", rank, begin, end, peer=peer)

    def reset(self, rank: int, begin: int, end: int, *, number: int, status: int = 0) -> int:
        return self.add("reset", rank, begin, end, value=number, status=status)

    def barrier(self, rank: int, begin: int, end: int, *, number: int) -> int:
        """Checks that the ranks' clocks are one clock: of no two of them may the intervals fail to meet."""
        return self.add("barrier", rank, begin, end, value=number)

    def describe(self, number: int) -> str:
        ffi, lib = _library()
        text = ffi.new("char[512]")
        lib.uccl_ep_model_describe(self._model, number, text, 512)
        return str(ffi.string(text).decode())

    def judge(self) -> Verdict:
        ffi, lib = _library()
        v = ffi.new("uccl_ep_model_verdict *")
        if lib.uccl_ep_model_judge(self._model, v) < 0:
            raise MemoryError(ffi.string(lib.uccl_ep_model_error(self._model)).decode())
        numbers = tuple(v.events[0 : v.n_events])
        return Verdict(
            outcome=OUTCOMES[v.outcome],
            clause=ffi.string(v.clause).decode(),
            text=ffi.string(v.text).decode(),
            events=tuple(self.describe(i) for i in numbers),
            numbers=numbers,
            words_judged=v.words_judged,
            signals_judged=v.signals_judged,
            undecided=v.undecided,
        )
