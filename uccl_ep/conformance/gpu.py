# SPDX-License-Identifier: Apache-2.0
"""The lane `gpu`: what cases post and wait for is done by kernels (csrc/device/lane.cu), one call each.

Every call of the C API that posts, waits or reads a signal is replaced by a launch of a kernel that makes the same call
of device.h: by a thread, a warp, a block, or through a block's poster, as the seed draws it. All else is the host's, so
cases do not know. A channel is the device's as a whole: all of them are.

Ranks may share a GPU, which then runs one process's kernels at a time. So a kernel that waits does it for a moment,
ends, and is launched again; what it says before the time of the call is over is not recorded.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from uccl_ep import _native, communicator, paths
from uccl_ep._handle import Handle
from uccl_ep._native import ffi, lib
from uccl_ep.errors import ErrorRecord, UcclEpError, from_record

from .errors import SuiteError
from .patterns import Bytes
from .recording import Part, RecordedCommunicator

if TYPE_CHECKING:
    from uccl_ep.accel import Accelerator, Buffer, Module

KINDS = ("cuda", "hip", "cpu")
HEAPS = ("host", "device")

# lane.h
NOTHING, PUT, SIGNAL, PUT_SIGNAL, COMMANDS, WORDS = 0, 1, 2, 3, 4, 5
QUIET, QUIET_SOURCE, TEST, WAIT_SIGNAL, READ_SIGNAL = 6, 7, 8, 9, 10
THREAD, WARP, BLOCK, POSTER = 0, 1, 2, 3
_SCOPES = {
    **dict.fromkeys((NOTHING, TEST, READ_SIGNAL), (THREAD,)),
    **dict.fromkeys((PUT, SIGNAL, PUT_SIGNAL), (THREAD, WARP, BLOCK, POSTER)),
    **dict.fromkeys((COMMANDS, WORDS), (WARP,)),  # a whole one, so that as many as can be are posted together
    **dict.fromkeys((QUIET, QUIET_SOURCE, WAIT_SIGNAL), (THREAD, WARP, BLOCK)),
}
_JOB = struct.Struct("=6I9Q")
_RESULT = np.dtype([("called", "u8"), ("status", "i8"), ("ticket", "u8"), ("seen", "u8")])
_ALL = 0xFFFFFFFF
ANY_RANK = _native.ANY_RANK  # the target of a wait for a signal that any rank may send

# cases.h
LANE, WHOLE_WARP, WHOLE_BLOCK, GRID, APART, MANY, THROUGH_POSTER, POSTER_TICKETS = range(8)
CASE_WORDS = 32
_CASE_FIELDS = (
    "form", "target", "source", "reserved", "first_channel", "channels", "slot", "rounds", "local", "remote", "seed",
)  # fmt: skip
_CASE = struct.Struct("=8I5Q")

_DEADLINE = _native.status_value("E_DEADLINE")
_IN_PROGRESS = _native.status_value("IN_PROGRESS")
_NO_ERROR_PLACE = 256  # in a desk's own memory: behind the record nobody reads
_ROOM = 16 << 10  # for commands of one call
_CALL_SECONDS = 20.0
_GRACE = 10.0  # seconds beyond its own deadline after which a kernel is given up

# Of mutants (uccl_ep.mutants): device.h with this fault of its own on.
DEVICE_FAULT = "UCCL_EP_DEVICE_FAULT"
_BROKEN = """
constexpr bool same(const char *a, const char *b) {{ return *a == *b && (!*a || same(a + 1, b + 1)); }}
#define UCCL_EP_DEVICE_FAULT(name) same(#name, "{fault}")
"""


@dataclass(frozen=True)
class Setup:
    """On what kernels run."""

    accel: str
    heap: str = "host"
    warp_size: int = 32  # of the CPU's emulation

    def preload(self) -> None:
        """Once, what every rank would otherwise load for itself. Touches no device: that does not survive a fork."""
        importlib.import_module("uccl_ep.accel")
        importlib.import_module(f"uccl_ep.accel.{self.accel}")


class _Desk:
    """What one call at a time uses: a stream, and memory for what it is asked and says."""

    def __init__(self, gpu: Accelerator, threads: int) -> None:
        self._gpu = gpu
        self.stream = gpu.stream()
        self.results = gpu.pinned(threads * _RESULT.itemsize)
        self.table: npt.NDArray[Any] = self.results.array[: threads * _RESULT.itemsize].view(_RESULT)
        self.room = gpu.pinned(_ROOM)
        # A record of an error that is nobody's: its claim is taken.
        self.nowhere = gpu.alloc(4096)
        self.nowhere.copy_from(np.ones(1024, np.uint32))

    def room_for(self, data: bytes) -> int:
        """Where kernels find it."""
        if len(data) > self.room.nbytes:
            self.room.close()
            self.room = self._gpu.pinned(len(data))
        self.room.array[: len(data)] = np.frombuffer(data, np.uint8)
        return self.room.address

    def close(self) -> None:
        for each in (self.stream, self.results, self.room, self.nowhere):
            each.close()


class Heaps:
    """Device memory of a rank's communicators."""

    def __init__(self, gpu: Accelerator) -> None:
        self.gpu = gpu
        self._kept: list[Buffer] = []

    def take(self, nbytes: int) -> Buffer:
        self._kept.append(self.gpu.alloc(nbytes))
        return self._kept[-1]

    def rest(self) -> None:
        """No communicator is open."""
        while self._kept:
            self._kept.pop().close()


class Session:
    """A rank's device, opened."""

    def __init__(self, setup: Setup, seed: Any) -> None:
        import uccl_ep.accel

        self.setup = setup
        self._rng = np.random.default_rng(seed)
        options: dict[str, Any] = {}
        if setup.accel == "cpu":
            options = {"warp_size": setup.warp_size, "seed": int(self._rng.integers(1, 1 << 32))}  # of the lanes' turns
        self.gpu = uccl_ep.accel.open(setup.accel, **options)
        self.width = self.gpu.info.warp_size
        # Loaded before any kernel runs: a driver may wait for those that do.
        self.kernel = self._own("lane").kernel("lane_call")
        self.cases = self._own("cases")
        self.slice = 0.001 if setup.accel == "cpu" else 0.0002  # seconds
        self._lock = threading.Lock()
        self._idle: list[_Desk] = []
        self._heaps = Heaps(self.gpu)
        with self.desk() as desk:  # what a driver starts at the first launch is not the case's
            self.launch(desk, bytes(ffi.sizeof("uccl_ep_device_comm")), NOTHING)
        self.rest()

    def _own(self, name: str) -> Module:
        fault = os.environ.get(DEVICE_FAULT)
        if not fault:
            return self.gpu.own(name)
        folder = paths.kernels_dir()
        headers = {path.name: path.read_text() for path in folder.glob("*.h")}
        source = _BROKEN.format(fault=fault) + (folder / f"{name}.cu").read_text()
        return self.gpu.compile(source, f"{name}.cu", headers=headers)

    @contextlib.contextmanager
    def desk(self) -> Iterator[_Desk]:
        with self._lock:
            desk = self._idle.pop() if self._idle else None
        if desk is None:
            desk = _Desk(self.gpu, 4 * self.width)
        try:
            yield desk
        finally:
            with self._lock:
                self._idle.append(desk)

    def rest(self) -> None:
        """No call is under way, and no communicator open: give back what they used."""
        while self._idle:
            self._idle.pop().close()
        self._heaps.rest()

    def facts(self) -> dict[str, Any]:
        info = self.gpu.info
        return {
            "kind": info.kind,
            "name": info.name,
            "architecture": info.architecture,
            "warp_size": info.warp_size,
            "driver": info.driver,
            "heap": self.setup.heap,
        }

    def heap(self, nbytes: int) -> Buffer | None:
        return self._heaps.take(nbytes) if self.setup.heap == "device" else None

    def _shape(self, op: int) -> tuple[int, int, int, slice]:
        """Scope, threads of the block, who calls, and whose results are wanted: drawn anew for each call."""
        with self._lock:
            draw: Callable[[int], int] = lambda n: int(self._rng.integers(n))  # noqa: E731
            scope = _SCOPES[op][draw(len(_SCOPES[op]))]
            width = self.width
            if scope == POSTER:
                threads = width * (2 + draw(2)) if width > 1 else 2 + draw(3)
                caller = width + draw(threads - width)
                return scope, threads, caller, slice(caller, caller + 1)
            threads = 1 + draw(2 * width) if width > 1 else 1 + draw(3)
            if op in (COMMANDS, WORDS):
                threads = width * (1 + draw(2))
            if scope == THREAD:
                caller = draw(threads)
                return scope, threads, caller, slice(caller, caller + 1)
            if scope == WARP:
                caller = draw(-(-threads // width))
                return scope, threads, caller, slice(caller * width, min((caller + 1) * width, threads))
            return scope, threads, 0, slice(0, threads)

    def mine(self, name: str) -> bool:
        """A descriptor of a driver, which opens some when it likes."""
        return self.setup.accel != "cpu" and name.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri", "anon_inode:"))

    def launch(
        self, desk: _Desk, comm: bytes, op: int, *, channel: int = 0, target: int = 0, slot: int = 0, count: int = 0,
        local: int = 0, remote: int = 0, nbytes: int = 0, add: int = 0, ticket: int = _native.NO_TICKET,
        value: int = 0, commands: int = 0, seconds: float = 0.0,
    ) -> tuple[int, int, int]:  # fmt: skip
        """Make one call: (status, ticket, what was seen)."""
        scope, threads, caller, callers = self._shape(op)
        try:
            job = _JOB.pack(
                op, scope, caller, channel, target, slot, count, local, remote, nbytes, add, ticket, value, commands,
                desk.results.address,
            )  # fmt: skip
        except struct.error as error:
            raise OverflowError(str(error)) from None
        desk.table[:] = (0, 0, 0, 0)
        self.kernel.launch(desk.stream, 1, threads, [comm, job])
        desk.stream.synchronize(timeout=seconds + _GRACE)
        called = desk.table["called"].astype(bool)
        answers = np.unique(desk.table[callers])
        if len(answers) != 1 or not called[callers].all() or called.sum() != callers.stop - callers.start:
            raise from_record(
                ErrorRecord(
                    status=_native.status_value("E_BACKEND"),
                    text=f"threads {callers} of {threads} made call {op} (scope {scope}) and got different answers: "
                    f"{answers.tolist()}, called by {np.flatnonzero(called).tolist()}",
                )
            )
        _, status, posted, seen = answers[0].tolist()
        return status, posted, seen

    def call(self, comm: communicator.Communicator, op: int, **job: Any) -> tuple[int, int, int]:
        """One call in one kernel, with the communicator's own deadline, recorded: (status, ticket, what was seen)."""
        with self.desk() as desk:
            return self.launch(desk, comm.device(), op, seconds=_CALL_SECONDS, **job)

    def start(self, comm: communicator.Communicator, name: str, blocks: int, threads: int, **job: int) -> Launch:
        """A kernel of cases.cu."""
        return Launch(self, comm, name, blocks, threads, job)


class Launch:
    """A kernel of cases.cu that runs."""

    def __init__(
        self,
        session: Session,
        comm: communicator.Communicator,
        name: str,
        blocks: int,
        threads: int,
        job: dict[str, int],
    ) -> None:
        gpu = session.gpu
        self._out = gpu.pinned(blocks * threads * 3 * 8)
        self._shared = gpu.alloc(blocks * 8)
        self._stream = gpu.stream()
        known = dict.fromkeys(_CASE_FIELDS, 0) | {"channels": 1}
        packed = _CASE.pack(
            *(known | job).values(),
            self._shared.address,
            self._out.address,  # in the order of cases.h
        )
        session.cases.kernel(name).launch(self._stream, blocks, threads, [comm.device(), packed])

    def finish(self, timeout: float) -> npt.NDArray[np.uint64]:
        """Of each thread: what went wrong, what of it, how many messages."""
        self._stream.synchronize(timeout=timeout)
        out: npt.NDArray[np.uint64] = self._out.array.view(np.uint64).reshape(-1, 3).copy()
        for each in (self._stream, self._out, self._shared):
            each.close()
        return out


_TIMEOUT_AT = ffi.offsetof("uccl_ep_device_comm", "timeout_ticks")
_ERROR_AT = ffi.offsetof("uccl_ep_device_comm", "error")
_CLAIM_AT = ffi.offsetof("uccl_ep_device_comm", "error_claim")


class KernelHandle(Handle):
    """Calls of the C API that kernels can make are made by one."""

    def __init__(self, driver: Any = None) -> None:
        super().__init__(driver)
        self._instead: dict[Any, Callable[..., int]] = {}

    def attend(self, session: Session, comm: bytes, timeout: float) -> None:
        """The communicator is made; kernels are given `comm`."""
        self._session, self._device, self._timeout = session, comm, timeout
        self._instead = {
            lib.uccl_ep_put: self._put,
            lib.uccl_ep_signal: self._signal,
            lib.uccl_ep_put_signal: self._put_signal,
            lib.uccl_ep_post_many: self._post_many,
            lib.uccl_ep_post_raw: self._post_raw,
            lib.uccl_ep_wait: self._wait,
            lib.uccl_ep_wait_source: self._wait_source,
            lib.uccl_ep_quiet: self._quiet,
            lib.uccl_ep_quiet_source: self._quiet_source,
            lib.uccl_ep_read_signal: self._read_signal,
            communicator._wait_signal: self._wait_signal,
        }

    def _checked(self, function: Callable[..., int], *arguments: Any) -> int:
        return super()._checked(self._instead.get(function, function), *arguments)

    def needs_breath(self, seconds: float) -> bool:
        return False  # it comes up for air after each slice

    # ------------------------------------------------------------------------------------------------------- running

    def _given(self, seconds: float, desk: _Desk, recorded: bool) -> bytes:
        """What the kernel is given of the communicator, with a deadline of its own."""
        comm = bytearray(self._device)
        ticks = min(int(seconds * self._session.gpu.info.clock_hz), 1 << 62)
        struct.pack_into("=Q", comm, _TIMEOUT_AT, ticks)
        if not recorded:
            struct.pack_into("=Q", comm, _ERROR_AT, desk.nowhere.address)
            struct.pack_into("=Q", comm, _CLAIM_AT, desk.nowhere.address + _NO_ERROR_PLACE)
        return bytes(comm)

    def _seconds(self, timeout_ns: int) -> float:
        return self._timeout if timeout_ns == _native.DEFAULT_TIMEOUT else timeout_ns / 1e9

    def _failed(self, pointer: Any, status: int, **record: Any) -> int:
        """The kernel's record says why; where another thread took it, the status alone."""
        found: int = lib.uccl_ep_comm_device_error(pointer, _native.NULL)
        if found < 0:
            return found
        raise from_record(
            ErrorRecord(status=status, text="a kernel's call failed, and another took the record", **record)
        )

    def _post(self, pointer: Any, op: int, timeout_ns: int, out: Any, data: Any = b"", **job: Any) -> int:
        seconds = self._seconds(timeout_ns)
        with self._session.desk() as desk:
            room = desk.room_for(data)
            status, ticket, _ = self._session.launch(
                desk, self._given(seconds, desk, True), op, commands=room, seconds=seconds, **job
            )
        if status < 0:
            return self._failed(pointer, status, channel=job["channel"])
        out[0] = ticket
        return _native.OK

    def _await(self, pointer: Any, op: int, timeout_ns: int, **job: Any) -> tuple[int, int]:
        """(status, what was seen). With a timeout of 0 it may be IN_PROGRESS."""
        session, total = self._session, self._seconds(timeout_ns)
        end = time.monotonic() + total
        with session.desk() as desk:
            while True:
                left = max(end - time.monotonic(), 0.0)
                last = total > 0 and left <= session.slice
                seconds = min(left, session.slice)
                status, _, seen = session.launch(desk, self._given(seconds, desk, last), op, seconds=seconds, **job)
                if status >= 0:
                    return status, seen
                if last:
                    break
                if status != _DEADLINE:
                    # Once more, for the record.
                    status, _, seen = session.launch(desk, self._given(left, desk, True), op, seconds=left, **job)
                    if status >= 0:
                        return status, seen
                    break
                if total == 0:
                    return _IN_PROGRESS, seen
        return self._failed(pointer, status), seen

    # ----------------------------------------------------------------------------- with the parameters of uccl_ep.h

    def _put(
        self, p: Any, channel: int, target: int, local: int, remote: int, nbytes: int, timeout: int, out: Any
    ) -> int:
        return self._post(
            p, PUT, timeout, out, channel=channel, target=target, local=local, remote=remote, nbytes=nbytes
        )

    def _signal(self, p: Any, channel: int, target: int, slot: int, add: int, timeout: int, out: Any) -> int:
        return self._post(p, SIGNAL, timeout, out, channel=channel, target=target, slot=slot, add=add)

    def _put_signal(
        self, p: Any, channel: int, target: int, local: int, remote: int, nbytes: int, slot: int, add: int,
        timeout: int, out: Any,
    ) -> int:  # fmt: skip
        return self._post(
            p, PUT_SIGNAL, timeout, out, channel=channel, target=target, local=local, remote=remote, nbytes=nbytes,
            slot=slot, add=add,
        )  # fmt: skip

    def _post_many(self, p: Any, channel: int, commands: Any, count: int, timeout: int, out: Any) -> int:
        return self._post_array(p, COMMANDS, channel, commands, count, timeout, out)

    def _post_raw(self, p: Any, channel: int, words: Any, count: int, timeout: int, out: Any) -> int:
        return self._post_array(p, WORDS, channel, words, count, timeout, out)

    def _post_array(self, p: Any, op: int, channel: int, array: Any, count: int, timeout: int, out: Any) -> int:
        if not count:
            function = lib.uccl_ep_post_many if op == COMMANDS else lib.uccl_ep_post_raw
            return int(function(p, channel, array, count, timeout, out))
        size = ffi.sizeof(ffi.typeof(array).item)
        data = bytes(ffi.buffer(array, size * count))
        return self._post(p, op, timeout, out, data, channel=channel, count=count)

    def _wait(self, p: Any, channel: int, ticket: int, timeout: int) -> int:
        op = TEST if timeout == 0 else QUIET
        return self._await(p, op, timeout, channel=channel, ticket=ticket)[0]

    def _wait_source(self, p: Any, channel: int, ticket: int, timeout: int) -> int:
        return self._await(p, QUIET_SOURCE, timeout, channel=channel, ticket=ticket)[0]

    def _quiet(self, p: Any, channel: int, timeout: int) -> int:
        return self._await(p, QUIET, timeout, channel=_ALL if channel == _native.NO_CHANNEL else channel)[0]

    def _quiet_source(self, p: Any, channel: int, timeout: int) -> int:
        if channel != _native.NO_CHANNEL:
            return self._await(p, QUIET_SOURCE, timeout, channel=channel)[0]
        end = time.monotonic() + self._seconds(timeout)
        for each in range(struct.unpack_from("=I", self._device, ffi.offsetof("uccl_ep_device_comm", "channels"))[0]):
            left = 0 if timeout == 0 else max(int((end - time.monotonic()) * 1e9), 1)
            status = self._await(p, QUIET_SOURCE, left, channel=each)[0]
            if status != _native.OK:
                return status
        return _native.OK

    def _wait_signal(self, p: Any, slot: int, value: int, source: int, seen: Any, timeout: int) -> int:
        status, seen[0] = self._await(p, WAIT_SIGNAL, timeout, slot=slot, value=value, target=source)
        return status

    def _read_signal(self, p: Any, slot: int, value: Any) -> int:
        with self._session.desk() as desk:
            _, _, value[0] = self._session.launch(desk, self._given(0, desk, True), READ_SIGNAL, slot=slot)
        return int(lib.uccl_ep_comm_device_error(p, _native.NULL)) if not value[0] else _native.OK


class DeviceHeap:
    """A heap in device memory, by copies: what is read is a copy, and what is stored is copied in."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.size = self.nbytes = buffer.nbytes

    def _range(self, key: Any) -> tuple[int, int]:
        if not isinstance(key, slice) or key.step not in (None, 1):
            raise TypeError(f"heap[{key!r}]: only plain ranges of a heap in device memory can be had")
        start, stop, _ = key.indices(self.size)
        return start, max(stop - start, 0)

    def __getitem__(self, key: Any) -> Bytes:
        start, nbytes = self._range(key)
        seen = np.empty(nbytes, np.uint8)
        self._buffer.slice(start, nbytes).copy_to(seen)
        return seen

    def __setitem__(self, key: Any, value: Any) -> None:
        start, nbytes = self._range(key)
        data = np.empty(nbytes, np.uint8)
        data[:] = value
        self._buffer.copy_from(data, start)


class DeviceHeapCommunicator(RecordedCommunicator):
    """A communicator whose heap lies in device memory, and to which the host posts."""

    def __init__(self, heaps: Heaps, part: Part, bootstrap: Any, **options: Any) -> None:
        self._memory = heaps.take(options["heap_bytes"]) if options.get("heap") is None else None
        super().__init__(part, bootstrap, memory=self._memory, accelerator=heaps.gpu, **options)

    def raw_heap(self) -> Any:
        return super().raw_heap() if self._memory is None else DeviceHeap(self._memory)


class KernelCommunicator(RecordedCommunicator):
    """A communicator to all of whose channels kernels post."""

    _handle_type = KernelHandle

    def __init__(self, session: Session, part: Part, bootstrap: Any, **options: Any) -> None:
        self._memory = session.heap(options["heap_bytes"]) if options.get("heap") is None else None
        super().__init__(
            part, bootstrap, memory=self._memory, accelerator=session.gpu,
            device_channels=options.get("channels", 1), **options,
        )  # fmt: skip
        assert isinstance(self._handle, KernelHandle)
        self._handle.attend(session, communicator.Communicator.device(self), options.get("timeout", 30.0))

    def raw_heap(self) -> Any:
        return super().raw_heap() if self._memory is None else DeviceHeap(self._memory)


def check(setup: Setup) -> None:
    """Refuse what cannot be."""
    from uccl_ep.accel.cpu import WARP_SIZES

    if setup.accel not in KINDS:
        raise SuiteError(f"--accel {setup.accel!r}: valid: {', '.join(KINDS)}")
    if setup.heap not in HEAPS:
        raise SuiteError(f"--heap {setup.heap!r}: valid: {', '.join(HEAPS)}")
    if setup.warp_size not in WARP_SIZES:
        raise SuiteError(f"--warp-size {setup.warp_size}: valid: {', '.join(map(str, WARP_SIZES))}")
    try:
        setup.preload()
    except (UcclEpError, ImportError) as error:
        raise SuiteError(f"--accel {setup.accel}: {error}") from error
