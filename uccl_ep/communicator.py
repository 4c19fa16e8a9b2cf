# SPDX-License-Identifier: Apache-2.0
"""A communicator: ranks with a heap each, signal words and channels. Posting is one-sided.

    with Communicator(bootstrap, heap_bytes=1 << 20) as comm:
        comm.heap[:4096] = 7
        ticket = comm.channel(0).put_signal(target, local=0, remote=4096, nbytes=4096, slot=0)
        ticket.wait()                       # the bytes and the signal are at the target (QUI-1)
        comm.wait_signal(0, 1)              # what a peer sent here is here (SIG-2)
        comm.quiet()
        comm.barrier()                      # before closing: a peer may still put to this rank (MEM-2)

Threads: any number may post and wait. Timeouts are seconds; None is the communicator's, 0 polls. Every blocking call
releases the GIL. A process that forks keeps its communicator; in the child every call raises ForkedError.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from . import _native, backends, commands, errors, info
from ._handle import BREATH, Handle
from ._heap import GivenHeap, HeapMapping, HeapView, given_heap
from ._native import NULL, ffi, lib
from .bootstrap import Bootstrap
from .errors import CommandError

_TRACE_ENTRIES = 1 << 16
_REPORT_BYTES = 1 << 16

# Silent until the program sets up logging.
_log = logging.getLogger("uccl_ep")
_log.addHandler(logging.NullHandler())
_LEVELS = {
    lib.UCCL_EP_LOG_ERROR: logging.ERROR,
    lib.UCCL_EP_LOG_WARN: logging.WARNING,
    lib.UCCL_EP_LOG_INFO: logging.INFO,
    lib.UCCL_EP_LOG_DEBUG: logging.DEBUG,
}


class _BootstrapCall:
    """The C view of a bootstrap during one create or reset, and what it raised."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        self.bootstrap = bootstrap
        self.raised: BaseException | None = None
        self._self = ffi.new_handle(self)
        self.struct = ffi.new("uccl_ep_bootstrap *")
        self.struct.size_of_struct = ffi.sizeof("uccl_ep_bootstrap")
        self.struct.rank, self.struct.size = bootstrap.rank, bootstrap.size
        self.struct.context = self._self
        self.struct.allgather = lib.uccl_ep_py_allgather

    def allgather(self, mine: bytes, timeout: float) -> bytes:
        parts = self.bootstrap.allgather(mine, timeout)
        if len(parts) != self.bootstrap.size:
            raise errors.BootstrapError(f"the bootstrap returned {len(parts)} parts for {self.bootstrap.size} ranks")
        for rank, part in enumerate(parts):
            if len(part) != len(mine):
                raise errors.BootstrapError(
                    f"rank {rank} sent {len(part)} bytes and this rank {len(mine)}: do all ranks run the same version "
                    "of uccl_ep, and the same program?",
                    rank=self.bootstrap.rank,
                    peer=rank,
                )
        return b"".join(parts)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """The library knows only that the exchange failed; what Python raised is the cause."""
        try:
            yield
        except errors.UcclEpError as error:
            if self.raised is not None and not isinstance(self.raised, Exception):
                raise self.raised from None  # KeyboardInterrupt, SystemExit
            raise error from self.raised


@ffi.def_extern(error=-1)  # type: ignore[untyped-decorator]
def uccl_ep_py_allgather(context: Any, mine: Any, size: int, everything: Any, timeout_ns: int, text: Any) -> int:
    call: _BootstrapCall = ffi.from_handle(context)
    try:
        gathered = call.allgather(bytes(ffi.buffer(mine, size)) if size else b"", timeout_ns / 1e9)
        ffi.memmove(everything, gathered, len(gathered))
        return 0
    except BaseException as error:
        # No exception passes through C: it is raised again when the call has returned.
        call.raised = error
        what = error.record.text if isinstance(error, errors.UcclEpError) else f"{type(error).__name__}: {error}"
        message = what.encode("utf-8", "replace")[:255]
        ffi.memmove(text, message + b"\0", len(message) + 1)
        return -1


@ffi.def_extern()  # type: ignore[untyped-decorator]
def uccl_ep_py_log(context: Any, level: int, text: Any) -> None:
    _log.log(_LEVELS.get(level, logging.DEBUG), "%s", _native.text(text))


def _enum_value(type_name: str, prefix: str, name: str, what: str) -> int:
    names = {label.lower(): value for value, label in _native.enum_names(type_name, prefix).items()}
    wanted = name.lower().replace("-", "_")
    if wanted not in names:
        raise CommandError(f"no {what} named {name!r}; {errors.nearest(name, names)}")
    return names[wanted]


def _options_text(options: Mapping[str, str] | str) -> str:
    if isinstance(options, str):
        return options
    for key, value in options.items():
        if "," in str(value) or "," in key or "=" in key:
            raise CommandError(f"backend option {key}={value}: a comma cannot be passed, nor '=' in a name")
    return ",".join(f"{key}={value}" for key, value in options.items())


def _positive_ns(seconds: float, what: str) -> int:
    if not seconds > 0:
        raise CommandError(f"{what} must be above 0 s, not {seconds!r}: every wait has a deadline (ERR-1)")
    return max(_native.nanoseconds(seconds), 1)


def _close(handle: Handle, *_owners: object) -> None:
    """The owners of memory outlive the communicator that uses it."""
    handle.close()


class Driver(Protocol):
    """Who owns time and turns instead of the library's threads: a simulator (uccl_ep.simulator.World.driver()).

    One thread at a time runs. `clock` and `idle` are addresses of C functions, `context` their argument: the library
    calls them in every wait. attach() and detach() are told when there are proxies to run, and when no longer.
    """

    clock: int  # uint64_t (*)(void *context): nanoseconds
    idle: int  # void (*)(void *context)
    context: int

    def now(self) -> float: ...
    def turn(self) -> None:
        """Let everything else run; returns when it is this thread's turn again."""
        ...

    def adopt(self, handle: Handle) -> None:
        """A communicator is about to be made: abandon() it if its rank dies."""
        ...

    def attach(self, comm: Any, proxies: int) -> None: ...
    def detach(self, comm: Any, proxies: int) -> None: ...


class Accelerator(Protocol):
    """What uccl_ep.accel.open() gives: a GPU, or the CPU in its place."""

    @property
    def kind(self) -> str:
        """ "cuda", "hip" or "cpu"."""
        ...

    @property
    def library(self) -> Path:
        """Of its driver's table (accelerator.h)."""
        ...

    @property
    def device(self) -> int: ...


_DEVICE_MEMORY = {
    "cuda": lib.UCCL_EP_MEMORY_CUDA,
    "hip": lib.UCCL_EP_MEMORY_ROCM,
    "cpu": lib.UCCL_EP_MEMORY_EMULATED,
}


def _heap_settings(heap: GivenHeap | None, heap_bytes: int | None, accelerator: Accelerator | None) -> dict[str, Any]:
    if heap is None:
        if heap_bytes is None:
            raise CommandError("heap_bytes, or a heap, is required")
        return {"heap_bytes": heap_bytes}
    if heap_bytes is not None and heap_bytes > heap.nbytes:
        raise CommandError(f"heap_bytes={heap_bytes}, and the heap that is given has {heap.nbytes}")
    if heap.device and accelerator is None:
        raise CommandError("a heap in device memory needs accelerator=, the device that it is of")
    return {
        "heap_bytes": heap.nbytes if heap_bytes is None else heap_bytes,
        "heap": ffi.cast("void *", heap.address),
        "heap_kind": _DEVICE_MEMORY[accelerator.kind] if heap.device and accelerator else lib.UCCL_EP_MEMORY_HOST,
    }


def _signals_kind(memory: str, accelerator: Accelerator | None) -> int:
    if memory not in ("host", "device"):
        raise CommandError(f"signals_memory={memory!r}: host or device")
    if memory == "host":
        return int(lib.UCCL_EP_MEMORY_HOST)
    if accelerator is None:
        raise CommandError("signals in device memory need accelerator=, the device that it is of")
    return int(_DEVICE_MEMORY[accelerator.kind])


def _wait_signal(pointer: Any, slot: int, value: int, source: int, seen: Any, timeout_ns: int) -> int:
    """With the timeout last, as Handle.wait() wants it."""
    status: int = lib.uccl_ep_wait_signal(pointer, slot, value, source, timeout_ns, seen)
    return status


def _with_nearest(error: errors.UcclEpError, backend: str | Path, device: str | None) -> errors.UcclEpError:
    """To a wrong name of a NIC the nearest one that the backend has."""
    if device is None or not isinstance(error, errors.NoDevice):
        return error
    names: list[str] = []
    with contextlib.suppress(errors.UcclEpError):
        names = [found.name for found in backends.probe(backends.find(backend).library).devices]
    # "mlx5_0:2": a port; "mlx5_0+mlx5_1": two.
    wrong = [part for part in (word.partition(":")[0] for word in device.split("+")) if part not in names]
    close = difflib.get_close_matches(wrong[0], names, n=1) if wrong else []
    if not close:
        return error
    return error.retold(error.record.text, f"{error.record.text}; did you mean {close[0]!r}?")


class Communicator:
    """Made by all ranks together. Close it, or leave a `with` block; at exit of the interpreter it closes itself."""

    _handle_type = Handle

    def __init__(
        self,
        bootstrap: Bootstrap,
        *,
        heap_bytes: int | None = None,
        heap: Any = None,
        signals: int = 1024,
        channels: int = 1,
        accelerator: Accelerator | None = None,
        device_channels: int = 0,
        signals_memory: str = "host",
        staging: str = "auto",
        backend: str | Path = "shm",
        device: str | None = None,
        backend_options: Mapping[str, str] | str = "",
        ring_log2: int = 11,
        granularity: int = 16,
        proxies: int = 1,
        strategy: str = "auto",
        timeout: float = 30.0,
        peer_timeout: float = 10.0,
        bootstrap_timeout: float = 60.0,
        max_inflight_peer: int = 0,
        max_inflight: int = 0,
        max_inflight_bytes: int = 0,
        max_message_bytes: int = 0,
        first_ticket: int = 0,
        first_sequence: int = 0,
        single_writer: bool = False,
        cpus: str | None = None,
        spin: int = 0,
        idle_sleep: float = 0.0,
        huge_pages: bool | None = None,
        lock_memory: bool = False,
        merge: bool = True,
        progress: str = "threads",
        driver: Driver | None = None,
    ) -> None:
        """Zero takes the library's default where uccl_ep_config says so; see there for the meaning of each.

        `heap`: memory of the caller in place of heap_bytes of the library's: a Buffer of uccl_ep.accel, an array or
        tensor, (address, nbytes[, "host" | "device"]). It stays alive as long as the communicator and views of it.
        `accelerator`: whose kernels post to channels 0 .. device_channels - 1, and wait (device()).
        `signals_memory`: "device" has the signal words beside a heap in device memory, where kernels alone read them;
        for NICs that add to them there, in order behind the payload (MEM-3).
        `staging`: may a heap in device memory go through host memory: "auto", where the NIC does not reach it, "on" or
        "off" (docs/python.md); info.staged says whether it does.
        `driver`: who runs the proxies and owns the clock, whatever `progress` says.
        """
        self._bootstrap = bootstrap
        self._timeout = timeout
        self._bootstrap_timeout = bootstrap_timeout
        self._first_ticket = first_ticket
        self._handle = handle = self._handle_type(driver)
        given: GivenHeap | None = None

        config = ffi.new("uccl_ep_config *")
        strings: list[Any] = []  # alive until create has returned

        def string(value: str | None) -> Any:
            if value is None:
                return NULL
            strings.append(ffi.new("char[]", value.encode()))
            return strings[-1]

        flags = 0
        if huge_pages is not None:
            flags |= lib.UCCL_EP_CONFIG_HUGE_PAGES_ON if huge_pages else lib.UCCL_EP_CONFIG_HUGE_PAGES_OFF
        if lock_memory:
            flags |= lib.UCCL_EP_CONFIG_LOCK_MEMORY
        if not merge:
            flags |= lib.UCCL_EP_CONFIG_NO_MERGE
        if single_writer:
            flags |= lib.UCCL_EP_CONFIG_SINGLE_WRITER
        if driver is not None:
            progress = "caller"
        refused: Exception | None = None
        try:
            given = None if heap is None else given_heap(heap, accelerator)
            settings: dict[str, Any] = {
                **_heap_settings(given, heap_bytes, accelerator),
                "size": ffi.sizeof("uccl_ep_config"),
                "flags": flags,
                "backend": string(str(backends.find(backend).library)),
                "device": string(device),
                "backend_options": string(_options_text(backend_options)),
                "signals": signals,
                "channels": channels,
                "device_channels": device_channels,
                "signals_kind": _signals_kind(signals_memory, accelerator),
                "ring_log2": ring_log2,
                "granularity": granularity,
                "proxies": proxies,
                "staging": _enum_value("uccl_ep_staging", "UCCL_EP_STAGING_", staging, "staging"),
                "strategy": _enum_value("uccl_ep_strategy", "UCCL_EP_STRATEGY_", strategy, "strategy"),
                "progress": _enum_value("uccl_ep_progress_mode", "UCCL_EP_PROGRESS_", progress, "progress mode"),
                "max_inflight_peer": max_inflight_peer,
                "max_inflight": max_inflight,
                "max_inflight_bytes": max_inflight_bytes,
                "max_message_bytes": max_message_bytes,
                "timeout_ns": _positive_ns(timeout, "timeout"),
                "peer_timeout_ns": _positive_ns(peer_timeout, "peer_timeout"),
                "bootstrap_timeout_ns": _positive_ns(bootstrap_timeout, "bootstrap_timeout"),
                "first_ticket": first_ticket,
                "first_sequence": first_sequence,
                "cpus": string(cpus),
                "spin": spin,
                "idle_sleep_ns": min(_native.nanoseconds(idle_sleep), 2**32 - 1),  # which is refused with its reason
                "log": lib.uccl_ep_py_log,
            }
            if accelerator is not None:
                settings["accelerator"] = string(str(accelerator.library))
                settings["accelerator_device"] = accelerator.device
            if driver is not None:
                settings["clock"] = ffi.cast("uint64_t (*)(void *)", driver.clock)
                settings["idle"] = ffi.cast("void (*)(void *)", driver.idle)
                settings["clock_context"] = settings["idle_context"] = ffi.cast("void *", driver.context)
            for name, value in settings.items():
                try:
                    setattr(config, name, value)
                except (OverflowError, TypeError) as error:
                    raise CommandError(f"{name}={value!r} is not valid: {error}") from None
        except Exception as error:
            # The others are in create, or will be: this rank takes part to tell them why it does not.
            refused = error
            record = error.record if isinstance(error, errors.UcclEpError) else None
            text = record.text if record else f"{type(error).__name__}: {error}"
            config = ffi.new("uccl_ep_config *")
            config.size = ffi.sizeof("uccl_ep_config")
            config.refusal = string(text)
            config.refusal_status = record.status if record else _native.status_value("E_INVALID")

        call = _BootstrapCall(bootstrap)
        out = ffi.new("uccl_ep_comm **")
        with call.explained():
            status = lib.uccl_ep_comm_create(config, call.struct, out)
            if refused is not None:
                raise refused
            if status < 0:
                raise _with_nearest(info.last_error(status), backend, device)
        handle.driven(out[0], proxies)
        self._heap_owner = given.owner if given else None
        # Also at exit of the interpreter, while threads can still be joined (K7). Holds the handle and its memory, not
        # this object.
        self._finalizer = weakref.finalize(self, _close, handle, self._heap_owner, accelerator)

        queried = ffi.new("uccl_ep_comm_info *")
        queried.size_of_struct = ffi.sizeof("uccl_ep_comm_info")
        handle.call(lib.uccl_ep_comm_query, queried)
        self.info = info.comm_from(queried[0])
        self.rank, self.size = self.info.rank, self.info.size
        self._heap_address = int(ffi.cast("uintptr_t", queried.heap))
        self._heap_mapping: HeapMapping | None = None
        shape = (self.info.signal_banks, self.info.signals)
        self._signal_words: npt.NDArray[np.uint64] | None = None
        if queried.signal_words != NULL:
            raw = ffi.buffer(queried.signal_words, 8 * shape[0] * shape[1])
            self._signal_words = np.frombuffer(raw, dtype=np.uint64).reshape(shape)

    def __repr__(self) -> str:
        state = " closed" if self._handle.closed else ""
        return f"<uccl_ep.Communicator rank {self.rank} of {self.size} on {self.info.backend}{state}>"

    # ------------------------------------------------------------------------------------------- posting and waiting

    @property
    def heap(self) -> npt.NDArray[np.uint8]:
        """The own heap as bytes, writable. After close() a view that is left shows bytes that mean nothing.

        On a backend whose memory is private to the process (not shm) they are gone: drop the views before close().
        A heap in device memory has no view: its owner copies.
        """
        if self.info.heap_kind != "host":
            raise errors.Unsupported(
                f"the heap is {self.info.heap_kind} device memory, which the CPU does not read: copy it through the "
                "Buffer or tensor that was given as heap="
            )
        self._handle.call(self._map_heap)
        assert self._heap_mapping is not None
        return np.asarray(HeapView(self, self._heap_mapping))

    def _map_heap(self, pointer: Any) -> int:
        """Inside the handle: the memory cannot go meanwhile."""
        if self._heap_mapping is None:
            self._heap_mapping = HeapMapping(self._heap_address, self.info.heap_bytes, self._heap_owner)
        return _native.OK

    def device(self) -> bytes:
        """What kernels are given: a uccl_ep_device_comm (device_comm.h), an argument by value. Valid until close()."""
        comm = ffi.new("uccl_ep_device_comm *")
        self._handle.call(lib.uccl_ep_comm_device, comm)
        return bytes(ffi.buffer(comm))

    def channel(self, i: int) -> Channel:
        if not 0 <= i < self.info.channels:
            raise CommandError(f"channel {i} of {self.info.channels}: make the communicator with more channels")
        return Channel(self, i)

    def read_signal(self, slot: int) -> int:
        """The word now, with acquire: what it orders can be read."""
        value = ffi.new("uint64_t *")
        self._handle.call(lib.uccl_ep_read_signal, slot, value)
        return int(value[0])

    def read_signals(self) -> npt.NDArray[np.uint64]:
        """All words, each as it is now: for looking at them when nothing is under way. It orders nothing."""
        self._handle.call(self._map_heap)
        if self._signal_words is None:
            raise errors.Unsupported(
                "the signal words lie in device memory, which the CPU does not read: have a kernel read them"
            )
        words: npt.NDArray[np.uint64] = self._signal_words.sum(axis=0, dtype=np.uint64)
        return words

    def wait_signal(self, slot: int, value: int, *, timeout: float | None = None, source: int | None = None) -> int:
        """Until the word is at or past `value`; returns the word. Losing `source` (None: anybody) ends the wait.

        With timeout 0 a word that is not there yet raises DeadlineExceeded; read_signal() is the poll.
        """
        seen = ffi.new("uint64_t *")
        rank = _native.ANY_RANK if source is None else source
        if not self._handle.wait(_wait_signal, slot, value, rank, seen, timeout=timeout, default=self._timeout):
            raise errors.DeadlineExceeded(
                f"signal {slot} is at {seen[0]}, not yet at {value}", rank=self.rank, peer=source, clause="ERR-1"
            )
        return int(seen[0])

    def quiet(self, timeout: float | None = None) -> None:
        """Until everything posted before on all channels is complete (QUI-2)."""
        self._quiet(lib.uccl_ep_quiet, lib.uccl_ep_wait, _native.NO_CHANNEL, timeout)

    def quiet_source(self, timeout: float | None = None) -> None:
        """Until the sources of everything posted before may be changed (QUI-0)."""
        self._quiet(lib.uccl_ep_quiet_source, lib.uccl_ep_wait_source, _native.NO_CHANNEL, timeout)

    def _quiet(self, quiet: Any, wait: Any, index: int, timeout: float | None) -> None:
        handle, total = self._handle, self._timeout if timeout is None else timeout
        end = time.monotonic() + total
        breathes = handle.needs_breath(total)
        # A second quiet would also wait for what was posted since the first: a long one goes on with the tickets.
        last = self._last_tickets(index) if breathes else {}
        try:
            done = handle.call(quiet, index, _native.nanoseconds(BREATH if breathes else total)) == _native.OK
        except errors.DeadlineExceeded:
            if not breathes:
                raise
            done = all(
                handle.wait(wait, channel, ticket, timeout=max(end - time.monotonic(), 0), default=total)
                for channel, ticket in last.items()
            )
        if not done:
            raise errors.DeadlineExceeded("not everything that was posted is complete yet", rank=self.rank)

    def _last_tickets(self, index: int) -> dict[int, int]:
        channels = range(self.info.channels) if index == _native.NO_CHANNEL else (index,)
        posted = {channel: self.channel(channel).stats()["posted"] for channel in channels}
        return {channel: self._first_ticket + count - 1 for channel, count in posted.items() if count}

    def barrier(self, timeout: float | None = None) -> None:
        """Of the ranks, out of band through the bootstrap. It says nothing about puts: quiet first."""
        self._bootstrap.barrier(self._timeout if timeout is None else timeout)

    def progress(self) -> bool:
        """One pass of every proxy, for progress="caller". True: something moved."""
        worked = ffi.new("uint32_t *")
        self._handle.call(lib.uccl_ep_progress, worked)
        return bool(worked[0])

    # ------------------------------------------------------------------------------------------------------ failures

    def check_device(self) -> None:
        """Raise the first failure that a kernel met since the last look, if there was one.

        Where the failed command left a record, that is what is raised. It may wait for kernels that run.
        """
        self._handle.call(lib.uccl_ep_comm_device_error, NULL)

    def abort(self, reason: str = "") -> None:
        """Final: every wait of this rank ends with Aborted within milliseconds. Only close() is left (ABT-1)."""
        self._handle.call(lib.uccl_ep_abort, reason.encode())

    def exclude(self, rank: int) -> None:
        """Go on without `rank` (ERR-5)."""
        self._handle.call(lib.uccl_ep_exclude, rank)

    def reset(self, bootstrap: Bootstrap | None = None) -> None:
        """Collective over all ranks: what a failure closed works again, signal words start at zero (ERR-6).

        All ranks must be alive. Another bootstrap serves where the connections of the first one are broken.
        """
        if bootstrap is not None:
            self._bootstrap = bootstrap
        call = _BootstrapCall(self._bootstrap)
        with call.explained():
            self._handle.call_alone(lib.uccl_ep_reset, call.struct, timeout=self._bootstrap_timeout)

    @property
    def lost(self) -> frozenset[int]:
        """Ranks that died or stopped answering."""
        words = (self.size + 63) // 64
        bitmap = ffi.new("uint64_t[]", words)
        self._handle.call(lib.uccl_ep_lost, bitmap, words)
        return frozenset(rank for rank in range(self.size) if bitmap[rank // 64] >> rank % 64 & 1)

    def errors(self) -> list[errors.ErrorRecord]:
        """What failed, oldest first, until its peer is excluded or reset."""
        total = ffi.new("uint32_t *")
        self._handle.call(lib.uccl_ep_errors, NULL, 0, total)
        room = total[0]
        records = ffi.new("uccl_ep_error[]", max(room, 1))
        for record in records:
            record.size = ffi.sizeof("uccl_ep_error")
        self._handle.call(lib.uccl_ep_errors, records, room, total)
        return [info.error_record_from(records[index]) for index in range(min(room, total[0]))]

    def close(self) -> None:
        """Local. Other threads' waits end with Aborted. Peers that still put to this rank see it as lost (MEM-2)."""
        self._finalizer()
        self._heap_mapping = None  # views that are left hold it

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------------- observing

    def stats(self) -> dict[str, list[dict[str, int]]]:
        """Counters: {"channels": [...], "proxies": [...]}, named as in uccl_ep.h."""
        proxies = []
        for index in range(self.info.proxies):
            struct = ffi.new("uccl_ep_proxy_stats *")
            self._handle.call(lib.uccl_ep_proxy_query, index, struct)
            proxies.append(_native.struct_dict(struct[0]))
        return {"channels": [self.channel(i).stats() for i in range(self.info.channels)], "proxies": proxies}

    def trace(self, proxy: int = 0) -> list[info.TraceEntry]:
        """The last commands that a proxy took, oldest first."""
        entries = ffi.new("uccl_ep_trace_entry[]", _TRACE_ENTRIES)
        count = ffi.new("uint32_t *", _TRACE_ENTRIES)
        self._handle.call(lib.uccl_ep_trace, proxy, entries, count)
        return [info.trace_from(entries[index]) for index in range(count[0])]

    def report(self) -> str:
        """What waits on whom, for a person."""
        buffer = ffi.new("char[]", _REPORT_BYTES)
        self._handle.call(lib.uccl_ep_report, buffer, _REPORT_BYTES)
        return _native.text(buffer)


class Channel:
    """One command ring: the unit of ordering (SIG-2, SIG-5). From Communicator.channel()."""

    def __init__(self, comm: Communicator, index: int) -> None:
        # A channel keeps its communicator alive, and not the other way round: a cycle would leave the closing of a
        # forgotten communicator to the garbage collector.
        self._comm = comm
        self._handle = comm._handle
        self._timeout = comm._timeout
        self.index = index

    def __repr__(self) -> str:
        return f"<uccl_ep.Channel {self.index}>"

    def put(self, target: int, local: int, remote: int, nbytes: int, *, timeout: float | None = None) -> Ticket:
        """Copy nbytes from `local` of the own heap to `remote` of the target's. The timeout is for room in the ring."""
        return self._post(lib.uccl_ep_put, target, local, remote, nbytes, _native.nanoseconds(timeout))

    def signal(self, target: int, slot: int, add: int = 1, *, timeout: float | None = None) -> Ticket:
        """Add to a signal word of the target, after all earlier puts of this channel to it are visible."""
        return self._post(lib.uccl_ep_signal, target, slot, add, _native.nanoseconds(timeout))

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
        return self._post(
            lib.uccl_ep_put_signal, target, local, remote, nbytes, slot, add, _native.nanoseconds(timeout)
        )

    def post_many(self, batch: npt.NDArray[Any], *, timeout: float | None = None) -> Ticket:
        """Post an array of uccl_ep.COMMAND_DTYPE on consecutive tickets, all or none (PUB-2). The last one's ticket."""
        batch = commands.checked_commands(batch)
        pointer = ffi.from_buffer("uccl_ep_command[]", batch)
        return self._post(lib.uccl_ep_post_many, pointer, len(batch), _native.nanoseconds(timeout))

    def post_raw(self, words: npt.NDArray[Any], *, timeout: float | None = None) -> Ticket:
        """Post words [n, 2] of an encoder of your own, unchecked: the proxy refuses malformed ones (ERR-4)."""
        words = commands.checked_words(words)
        pointer = ffi.from_buffer("uccl_ep_words[]", words)
        return self._post(lib.uccl_ep_post_raw, pointer, len(words), _native.nanoseconds(timeout))

    def _post(self, function: Any, *arguments: Any) -> Ticket:
        ticket = ffi.new("uint64_t *")
        self._handle.call(function, self.index, *arguments, ticket)
        return Ticket(self, ticket[0])

    def quiet(self, timeout: float | None = None) -> None:
        """Until everything posted before on this channel is complete (QUI-1)."""
        self._comm._quiet(lib.uccl_ep_quiet, lib.uccl_ep_wait, self.index, timeout)

    def quiet_source(self, timeout: float | None = None) -> None:
        self._comm._quiet(lib.uccl_ep_quiet_source, lib.uccl_ep_wait_source, self.index, timeout)

    def stats(self) -> dict[str, int]:
        struct = ffi.new("uccl_ep_channel_stats *")
        self._handle.call(lib.uccl_ep_channel_query, self.index, struct)
        return _native.struct_dict(struct[0])


class Ticket:
    """The position of a command on its channel. Wait for it, poll it, or drop it (QUI-3)."""

    __slots__ = ("channel", "value")

    def __init__(self, channel: Channel, value: int) -> None:
        self.channel, self.value = channel, value

    def __repr__(self) -> str:
        return f"<uccl_ep.Ticket {self.value} of channel {self.channel.index}>"

    def wait(self, timeout: float | None = None) -> None:
        """Until it and all before it on the channel are complete. Raises its failure."""
        self._wait(lib.uccl_ep_wait, timeout, "complete")

    def wait_source(self, timeout: float | None = None) -> None:
        """Until their sources may be changed."""
        self._wait(lib.uccl_ep_wait_source, timeout, "free at its source")

    def done(self) -> bool:
        return self._poll(lib.uccl_ep_wait, 0)

    def source_done(self) -> bool:
        return self._poll(lib.uccl_ep_wait_source, 0)

    def _wait(self, function: Any, timeout: float | None, what: str) -> None:
        if not self._poll(function, timeout):
            raise errors.DeadlineExceeded(f"not {what} yet", channel=self.channel.index, ticket=self.value)

    def _poll(self, function: Any, timeout: float | None) -> bool:
        channel = self.channel
        return channel._handle.wait(function, channel.index, self.value, timeout=timeout, default=channel._timeout)
