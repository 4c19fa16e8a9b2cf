# SPDX-License-Identifier: Apache-2.0
"""What one rank does and sees in one communicator, written down for the model of the contract (docs/model.md).

A communicator of a case is a RecordedCommunicator and its heap a RecordedHeap: every post, wait, signal word, store and
read passes through here, with the interval of the lane's clock in which it happened. What is done must be complete, or
the model would see bytes that nobody wrote; so whatever cannot be written down faithfully makes the whole part one that
is not judged, and says why.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from uccl_ep import _native, commands
from uccl_ep._native import lib
from uccl_ep.communicator import Channel, Communicator, Ticket
from uccl_ep.errors import ErrorRecord, UcclEpError
from uccl_ep.explorer.model import ALL, EVENT_DTYPE, KINDS, NO_TICKET, OPS

from .patterns import Bytes

POST, WAIT, SIGNAL, READ, STORE = (KINDS[k] for k in ("post", "wait", "signal", "read", "store"))
FAILURE, EXCLUDE, RESET, BARRIER = (KINDS[k] for k in ("failure", "exclude", "reset", "barrier"))
# Not of the model: the part's own notes, which history.py turns into events.
CANARY, SWEEP = 101, 102  # the whole heap was filled with canaries; it was looked at as a whole

NEVER = (1 << 63) - 1  # of the lane's clock
# A call that has not come back, of a rank that died inside: it may have had its effect.
UNFINISHED = _native.status_value("E_DEADLINE")
# Ends of a wait that tell nothing of a command.
_NO_FAILURE = frozenset(map(_native.status_value, ("E_DEADLINE", "E_ABORTED", "E_FORKED", "E_INVALID", "E_CLOSED")))

MAX_EVENTS = 8192  # of one rank
MAX_BYTES = 2 << 20  # of stores and reads, of one rank
MAX_HEAP = 16 << 20
MAX_ZEROS = 256  # signal words

_MASK = (1 << 64) - 1
_OPS = frozenset(OPS.values())
Command = tuple[int, int, int, int, int, int, int]  # op, target, local, remote, bytes, slot, add
# A row is the model's event as it lies in memory: it costs little to make, and nothing to keep.
_FORMATS = {np.dtype("u4"): "I", np.dtype("i4"): "i", np.dtype("u8"): "Q"}
_row = struct.Struct("=" + "".join(_FORMATS[EVENT_DTYPE[name]] for name in EVENT_DTYPE.names or ())).pack


@dataclass
class Part:
    """One rank's part of the history of one communicator.

    Threads of the rank write at the same time: each adds its rows, and none looks at another's.
    """

    clock: Callable[[], int]
    members: tuple[int, ...]  # ranks of the case
    rank: int  # in the communicator, as all that follows
    seed: int
    name: str = ""  # of the canaries
    identity: tuple[int, ...] = ()  # the same for all members
    heap_bytes: int = 0
    signals: int = 0
    unjudged: str = ""
    canaries: Bytes | None = None  # with which the heap was filled
    seen: Bytes | None = None  # the whole heap in the end
    rows: list[bytes] = field(default_factory=list)
    data: dict[int, Bytes] = field(default_factory=dict)  # of stores and reads, by the value of their row
    _stored: int = 0
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _calls: dict[int, tuple[int, int, list[Command]]] = field(default_factory=dict)  # posts that are not over
    # Of what is polled the first sight and the last are kept; the last is held back until something else is seen.
    _last: dict[Any, Any] = field(default_factory=dict)
    _held: dict[Any, tuple[bytes, Bytes | None, int]] = field(default_factory=dict)
    _resets: int = 0
    _barriers: int = 0

    def spoil(self, reason: str) -> None:
        """This history cannot be judged."""
        self.unjudged = self.unjudged or reason
        self.canaries = self.seen = None
        for kept in (self.rows, self.data, self._last, self._held):
            kept.clear()

    def _keep(self, row: bytes, data: Bytes | None = None, number: int = 0) -> None:
        if self.unjudged:
            return
        if data is not None:
            self.data[number] = data
            self._stored += len(data)
        self.rows.append(row)
        if len(self.rows) > MAX_EVENTS:
            self.spoil(f"more than {MAX_EVENTS} events of a rank")
        elif self._stored > MAX_BYTES:
            self.spoil(f"more than {MAX_BYTES >> 20} MiB stored and read by a rank")

    def _add(
        self, kind: int, begin: int, *, status: int = 0, channel: int = 0, peer: int = 0, source: int = 0,
        ticket: int = 0, value: int = 0,
    ) -> None:  # fmt: skip
        end = self.clock()
        self._keep(_row(kind, self.rank, begin, end, status, channel, peer, 0, 0, source, ticket, 0, 0, 0, value))

    def finish(self) -> None:
        """Nothing more comes. Posts that never came back, of a rank that died, may have had their effect."""
        for call in list(self._calls):
            self.posted_in_vain(call, UNFINISHED)
        for held in list(self._held.values()):
            self._keep(*held)
        self._held.clear()

    # ------------------------------------------------------------------------------------------------------- memory

    def filled(self, begin: int, canaries: Bytes) -> None:
        """The whole heap is these canaries."""
        if not self.unjudged:
            self.canaries = canaries.copy()
            self._add(CANARY, begin)

    def swept(self, begin: int, seen: Bytes) -> None:
        """The whole heap was looked at. Nobody changes `seen` from now on."""
        if not self.unjudged:
            self.seen = seen
            self._add(SWEEP, begin)

    def stored(self, begin: int, local: int, data: Bytes) -> None:
        number = next(self._numbers)
        row = _row(STORE, self.rank, begin, self.clock(), 0, 0, 0, 0, 0, 0, 0, local, 0, len(data), number)
        self._keep(row, data, number)

    def read(self, begin: int, local: int, seen: Bytes) -> None:
        key, end, number = (local, len(seen)), self.clock(), next(self._numbers)
        last = self._last.get(key)
        row = _row(READ, self.rank, begin, end, 0, 0, 0, 0, 0, 0, 0, local, 0, len(seen), number)
        self._see(key, last is not None and np.array_equal(last, seen), seen, row, seen, number)

    def sight(self, begin: int, slot: int, value: int) -> None:
        """A value of a signal word."""
        if not self.unjudged:
            row = _row(SIGNAL, self.rank, begin, self.clock(), 0, 0, 0, 0, slot, 0, 0, 0, 0, 0, value)
            self._see(slot, self._last.get(slot) == value, value, row)

    def loose_sight(self, begin: int, slot: int, value: int) -> None:
        """One that orders nothing: as if it might have been seen at any time from now on."""
        self._keep(_row(SIGNAL, self.rank, begin, NEVER, 0, 0, 0, 0, slot, 0, 0, 0, 0, 0, value))

    def _see(self, key: Any, same: bool, seen: Any, row: bytes, data: Bytes | None = None, number: int = 0) -> None:
        if same:
            self._held[key] = row, data, number
            return
        before = self._held.pop(key, None)
        if before is not None:
            self._keep(*before)
        self._last[key] = seen
        self._keep(row, data, number)

    # -------------------------------------------------------------------------------------------- posting and waiting

    def posting(self, begin: int, channel: int, found: list[Command]) -> int:
        """Before the call: who dies inside may have posted. Returns the number of the call."""
        call = next(self._numbers)
        self._calls[call] = begin, channel, found
        return call

    def posted(self, call: int, last: int) -> None:
        """With success: the last of its commands has this ticket."""
        known = self._calls.pop(call, None)
        if known is not None:  # or it came back when all was over
            begin, channel, found = known
            if last + 1 < len(found):
                self.spoil(f"a batch of {len(found)} commands ends with ticket {last}")
            self._post(begin, channel, found, 0, last - len(found) + 1)

    def posted_in_vain(self, call: int, status: int) -> None:
        known = self._calls.pop(call, None)
        if known is not None:
            begin, channel, found = known
            possible = [command for c in found if (command := _plain(c, len(self.members))) is not None]
            self._post(begin, channel, possible, status, None)

    def _post(self, begin: int, channel: int, found: list[Command], status: int, first: int | None) -> None:
        if self.unjudged:
            return
        end, rank = self.clock(), self.rank
        for i, (op, target, local, remote, size, slot, add) in enumerate(found):
            ticket = NO_TICKET if first is None else first + i
            self._keep(
                _row(POST, rank, begin, end, status, channel, target, op, slot, 0, ticket, local, remote, size, add)
            )

    def waited(self, begin: int, channel: int, ticket: int, source: bool) -> None:
        """With success."""
        if not self.unjudged:
            self._keep(_row(WAIT, self.rank, begin, self.clock(), 0, channel, 0, 0, 0, source, ticket, 0, 0, 0, 0))

    def waited_in_vain(self, begin: int, channel: int, ticket: int, source: bool, error: UcclEpError) -> None:
        self._add(WAIT, begin, status=error.status, channel=channel, ticket=ticket, source=int(source))
        self.told(begin, error)

    def told(self, begin: int, error: UcclEpError) -> None:
        """A wait ended with this: it may be the record of a failure."""
        if error.status not in _NO_FAILURE:
            self.failed(begin, error.record)

    # ------------------------------------------------------------------------------------------------------- the rest

    def failed(self, begin: int, record: ErrorRecord) -> None:
        """The rank found a record of a failure."""
        if record.peer is None and record.ticket is None:
            return
        self._add(
            FAILURE,
            begin,
            status=record.status,
            channel=ALL if record.channel is None else record.channel,
            peer=ALL if record.peer is None else record.peer,
            ticket=NO_TICKET if record.ticket is None else record.ticket,
        )

    def excluded(self, begin: int, peer: int) -> None:
        self._add(EXCLUDE, begin, peer=peer)

    def reset(self, begin: int, status: int) -> None:
        self._resets += 1
        self._add(RESET, begin, value=self._resets, status=status)

    def met(self, begin: int, number: int | None = None) -> None:
        """The members met: at barrier `number` of the case, or at the communicator's own next one."""
        if number is None:
            self._barriers += 1
        self._add(BARRIER, begin, value=2 * self._barriers + 1 if number is None else 2 * number)


def _plain(command: Sequence[Any], ranks: int) -> Command | None:
    """Of a call that was refused, or did not come back; None: what no communicator would take."""
    try:
        op, target, local, remote, nbytes, slot, add = (int(x) & _MASK for x in command)
    except (TypeError, ValueError):
        return None
    return (op, target, local, remote, nbytes, slot & 0xFFFFFFFF, add) if op in _OPS and target < ranks else None


class RecordedHeap:
    """The own heap, by ranges: `heap[a:b] = data` is a store, and `heap[a:b]` a read, a copy of what was there.

    Nothing else reaches the memory, so that what it holds is known. `raw` is the Bench's, which answers for it.
    """

    def __init__(self, raw: Bytes, part: Part) -> None:
        self.raw, self._part = raw, part
        self.size, self.nbytes = raw.size, raw.nbytes

    def __len__(self) -> int:
        return int(self.size)

    def _range(self, key: Any) -> tuple[int, int] | None:
        if not isinstance(key, slice):
            return None
        start, stop, step = key.indices(self.size)
        return (start, max(stop - start, 0)) if step == 1 else None

    def __getitem__(self, key: Any) -> Any:
        part, span = self._part, self._range(key)
        if part.unjudged:
            seen = self.raw[key].view()
        else:
            begin = part.clock()
            seen = np.array(self.raw[key], copy=True)
            if span is not None:
                part.read(begin, span[0], seen)
        # What looks like the heap and is a copy must not be taken for it.
        seen.flags.writeable = False
        return seen

    def __setitem__(self, key: Any, value: Any) -> None:
        part, span = self._part, self._range(key)
        if span is None:
            part.spoil("a store that is no plain range")
        if span is None or part.unjudged:
            self.raw[key] = value
            return
        data = np.empty(span[1], np.uint8)
        data[:] = value
        begin = part.clock()
        self.raw[key] = data
        part.stored(begin, span[0], data)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        seen: npt.NDArray[Any] = self[:]
        return seen if dtype is None else seen.astype(dtype)


class RecordedCommunicator(Communicator):
    def __init__(self, part: Part, bootstrap: Any, *, memory: Any = None, **options: Any) -> None:
        """`memory`: of the lane, for the heap; nothing else reaches it."""
        super().__init__(bootstrap, **({"heap": memory} if memory is not None else {}), **options)
        self.part = part
        part.heap_bytes, part.signals = int(self.info.heap_bytes), int(self.info.signals)
        if part.heap_bytes > MAX_HEAP:
            part.spoil(f"a heap above {MAX_HEAP >> 20} MiB")
        if options.get("heap") is not None:
            part.spoil("a heap in memory of the caller's own")

    @property
    def heap(self) -> Bytes:
        self.part.spoil("a case took the heap's memory itself")
        memory: Bytes = self.raw_heap()
        return memory

    def raw_heap(self) -> Any:
        """For a RecordedHeap."""
        return super().heap

    def device(self) -> bytes:
        self.part.spoil("kernels may post by themselves")
        return super().device()

    def channel(self, i: int) -> RecordedChannel:
        return RecordedChannel(self, super().channel(i).index)

    def read_signal(self, slot: int) -> int:
        begin = self.part.clock()
        value = super().read_signal(slot)
        self.part.sight(begin, slot, value)
        return value

    def read_signals(self) -> npt.NDArray[np.uint64]:
        begin = self.part.clock()
        words = super().read_signals()
        # Of many the zeros say little.
        slots = np.flatnonzero(words) if len(words) > MAX_ZEROS else np.arange(len(words))
        for slot in slots.tolist():
            self.part.loose_sight(begin, slot, int(words[slot]))
        return words

    def wait_signal(self, slot: int, value: int, *, timeout: float | None = None, source: int | None = None) -> int:
        begin = self.part.clock()
        try:
            seen = super().wait_signal(slot, value, timeout=timeout, source=source)
        except UcclEpError as error:
            self.part.told(begin, error)
            raise
        self.part.sight(begin, slot, seen)
        return seen

    def _quiet(self, quiet: Any, wait: Any, index: int, timeout: float | None) -> None:
        begin, channel = self.part.clock(), ALL if index == _native.NO_CHANNEL else index
        source = quiet is lib.uccl_ep_quiet_source
        try:
            super()._quiet(quiet, wait, index, timeout)
        except UcclEpError as error:
            self.part.waited_in_vain(begin, channel, NO_TICKET, source, error)
            raise
        self.part.waited(begin, channel, NO_TICKET, source)

    def barrier(self, timeout: float | None = None) -> None:
        begin = self.part.clock()
        super().barrier(timeout)
        self.part.met(begin)

    def exclude(self, rank: int) -> None:
        begin = self.part.clock()
        try:
            super().exclude(rank)
        finally:
            self.part.excluded(begin, int(rank))

    def reset(self, bootstrap: Any = None) -> None:
        begin, status = self.part.clock(), UNFINISHED
        try:
            super().reset(bootstrap)
            status = 0
        except UcclEpError as error:
            status = error.status
            raise
        finally:
            self.part.reset(begin, status)

    def errors(self) -> list[ErrorRecord]:
        begin = self.part.clock()
        records = super().errors()
        for record in records:
            self.part.failed(begin, record)
        return records


class RecordedChannel(Channel):
    def __init__(self, comm: RecordedCommunicator, index: int) -> None:
        super().__init__(comm, index)
        self._part, self._size = comm.part, comm.size
        self._info = comm.info

    def put(self, target: int, local: int, remote: int, nbytes: int, *, timeout: float | None = None) -> Ticket:
        found = [(OPS["put"], target, local, remote, nbytes, 0, 0)]
        return self._posted(found, lambda: Channel.put(self, target, local, remote, nbytes, timeout=timeout))

    def signal(self, target: int, slot: int, add: int = 1, *, timeout: float | None = None) -> Ticket:
        found = [(OPS["signal"], target, 0, 0, 0, slot, add)]
        return self._posted(found, lambda: Channel.signal(self, target, slot, add, timeout=timeout))

    def put_signal(
        self,
        target: int,
        local: int,
        remote: int,
        nbytes: int,
        slot: int,
        add: int = 1,
        *,
        timeout: float | None = None,
    ) -> Ticket:
        found = [(OPS["put_signal"], target, local, remote, nbytes, slot, add)]
        return self._posted(
            found, lambda: Channel.put_signal(self, target, local, remote, nbytes, slot, add, timeout=timeout)
        )

    def post_many(self, batch: npt.NDArray[Any], *, timeout: float | None = None) -> Ticket:
        batch = commands.checked_commands(batch)
        found = self._commands(batch) if not self._part.unjudged else []
        return self._posted(found, lambda: Channel.post_many(self, batch, timeout=timeout))

    def post_raw(self, words: npt.NDArray[Any], *, timeout: float | None = None) -> Ticket:
        words = commands.checked_words(words)
        found: list[Command] = []
        if not self._part.unjudged:
            decoded, well_formed = commands.decode(words)
            found = self._commands(decoded)
            for i, command in enumerate(found):
                # One that is malformed is refused by the proxy before a byte moves (ERR-4): it takes a ticket, no more.
                if not well_formed[i] or not self._possible(command, int(decoded[i]["granularity"])):
                    found[i] = (OPS["flush"], self._known(int(decoded[i]["target"])), 0, 0, 0, 0, 0)
        return self._posted(found, lambda: Channel.post_raw(self, words, timeout=timeout))

    @staticmethod
    def _commands(batch: npt.NDArray[Any]) -> list[Command]:
        names = ("op", "target", "local", "remote", "bytes", "slot", "add")
        return list(zip(*(batch[name].tolist() for name in names), strict=True))

    def _known(self, target: int) -> int:
        return target if target < self._size else 0

    def _possible(self, command: Command, granularity: int) -> bool:
        op, target, local, remote, nbytes, slot, _ = command
        if target >= self._size:
            return False
        if op in (OPS["put"], OPS["put_signal"]):
            end = self._part.heap_bytes
            if granularity != self._info.granularity or max(local, remote) + nbytes > end:
                return False
        return op not in (OPS["signal"], OPS["put_signal"]) or slot < self._part.signals

    def _posted(self, found: list[Command], post: Callable[[], Ticket]) -> Ticket:
        part = self._part
        call = part.posting(part.clock(), self.index, found)
        try:
            ticket = post()
        except BaseException as error:
            part.posted_in_vain(call, error.status if isinstance(error, UcclEpError) else UNFINISHED)
            raise
        part.posted(call, ticket.value)
        return RecordedTicket(self, ticket.value)


class RecordedTicket(Ticket):
    __slots__ = ()

    def _poll(self, function: Any, timeout: float | None) -> bool:
        assert isinstance(self.channel, RecordedChannel)
        part, index, source = self.channel._part, self.channel.index, function is lib.uccl_ep_wait_source
        begin = part.clock()
        try:
            done = super()._poll(function, timeout)
        except UcclEpError as error:
            part.waited_in_vain(begin, index, self.value, source, error)
            raise
        if done:
            part.waited(begin, index, self.value, source)
        return done
