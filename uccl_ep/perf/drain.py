# SPDX-License-Identifier: Apache-2.0
"""libuccl_ep_perf.so (csrc/perf/): rings that kernels post to, and the threads that empty them and check every command.

The structures are those of rings.h, drain.h and device/perf.h.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _native, paths
from .._native import ffi
from .bench import BenchError

PAYLOAD = 128  # PERF_PAYLOAD
_TEXT_BYTES = 512
_TIMEOUT = 30.0  # of a kernel's waits


class _RingsConfig(ctypes.Structure):
    _fields_ = (
        ("accelerator", ctypes.c_char_p),
        ("device", ctypes.c_uint32),
        ("rings", ctypes.c_uint32),
        ("log2_slots", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("heap_bytes", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
    )


class _Words(ctypes.Structure):
    _fields_ = (
        ("signal", ctypes.c_void_p),
        ("answer", ctypes.c_void_p),
        ("echo", ctypes.c_void_p),
        ("answer_there", ctypes.c_void_p),
        ("echo_there", ctypes.c_void_p),
    )


class _Ring(ctypes.Structure):
    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("echo", ctypes.c_void_p),
        ("log2_slots", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class _DrainConfig(ctypes.Structure):
    _fields_ = (
        ("threads", ctypes.c_uint32),
        ("batch", ctypes.c_uint32),
        ("producers", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("pause_ns", ctypes.c_uint64),
        ("cpus", ctypes.POINTER(ctypes.c_int32)),
    )


FAULTS = ("malformed", "strange", "torn", "lost", "doubled", "too_many")


class _Result(ctypes.Structure):
    _fields_ = (
        ("commands", ctypes.c_uint64),
        ("missing", ctypes.c_uint64),
        ("ns", ctypes.c_uint64),
        ("batches", ctypes.c_uint64),
        ("faults", ctypes.c_uint64 * len(FAULTS)),
        ("text", ctypes.c_char * 256),
    )


_WITH_STATUS = (
    "rings_open", "rings_check_taken", "rings_error", "drain_open", "drain_expect", "drain_finish", "drain_ping"
)  # fmt: skip


@functools.cache
def _library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(paths.library_dir() / "libuccl_ep_perf.so"))
    pointer, u32, u64, text = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_char_p
    signatures: dict[str, tuple[Any, ...]] = {
        "rings_open": (ctypes.POINTER(_RingsConfig), ctypes.POINTER(pointer), text, u64),
        "rings_close": (pointer,),
        "rings_comm": (pointer, pointer),
        "rings_host": (pointer, pointer),
        "rings_get_words": (pointer, ctypes.POINTER(_Words)),
        "rings_check_taken": (pointer, text, u64),
        "rings_error": (pointer, text, u64),
        "drain_open": (ctypes.POINTER(_DrainConfig), pointer, u32, ctypes.POINTER(pointer)),
        "drain_close": (pointer,),
        "drain_expect": (pointer, u32, u64, u64),
        "drain_finish": (pointer, u64, ctypes.POINTER(_Result)),
        "drain_ping": (pointer, pointer, u64, u64, pointer),
    }
    for name, arguments in signatures.items():
        function = getattr(loaded, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int if name in _WITH_STATUS else None
    return loaded


@dataclass(frozen=True)
class Run:
    """What the threads saw of one run: all commands, each as it was to be."""

    commands: int
    seconds: float  # from before the launch to the pass that took the last
    batches: int


@dataclass(frozen=True)
class Words:
    """In host memory; `_there`: addresses of kernels."""

    signal: int
    answer: int
    echo: int
    answer_there: int
    echo_there: int


def job(
    *, payload: int, commands: int, producers: int, rings: int, batch: int = 1, sequence: int = 0, result: int = 0,
    word: int = 0, stamped: bool = True, heap_offset: int = 0,
) -> bytes:  # fmt: skip
    """A perf_job of device/perf.h."""
    longs = np.array([payload, result, sequence, commands, word], np.uint64)
    words = np.array([producers, rings, batch, stamped], np.uint32)
    return b"".join((longs.tobytes(), words.tobytes(), np.uint64(heap_offset).tobytes()))


class Drained:
    """Rings of a device, and `threads` that drain them."""

    def __init__(
        self,
        library: Path,
        device: int,
        *,
        rings: int,
        log2_slots: int,
        threads: int,
        producers: int,
        heap_bytes: int,
        batch: int = 128,
        pause: float = 0.0,
        cpus: Sequence[int] = (),
        timeout: float = _TIMEOUT,
    ) -> None:
        """`producers`: of a ring, at most. `cpus`: one for each thread, or none."""
        self._drain = self._rings = ctypes.c_void_p()
        self.rings, self.threads = rings, threads
        self.sequence = 0
        lib = _library()
        config = _RingsConfig(
            accelerator=str(library).encode(), device=device, rings=rings, log2_slots=log2_slots,
            heap_bytes=heap_bytes, timeout_ns=_native.nanoseconds(timeout),
        )  # fmt: skip
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        made = ctypes.c_void_p()
        _check(lib.rings_open(ctypes.byref(config), ctypes.byref(made), text, _TEXT_BYTES), "rings", text.value)
        self._rings = made
        try:
            views = (_Ring * rings)()
            lib.rings_host(made, views)
            array = (ctypes.c_int32 * len(cpus))(*cpus) if cpus else None
            settings = _DrainConfig(
                threads=threads, batch=batch, producers=producers, pause_ns=_native.nanoseconds(pause), cpus=array
            )
            drain = ctypes.c_void_p()
            status = lib.drain_open(ctypes.byref(settings), views, rings, ctypes.byref(drain))
            _check(status, f"{threads} threads for {rings} rings on CPUs {list(cpus)}", b"")
            self._drain = drain
        except BaseException:
            self.close()
            raise
        comm = ffi.new("uccl_ep_device_comm *")
        lib.rings_comm(made, int(ffi.cast("uintptr_t", comm)))
        self.comm = bytes(ffi.buffer(comm))  # what kernels are given
        self.heap = int(ffi.cast("uintptr_t", comm.heap))
        words = _Words()
        lib.rings_get_words(made, ctypes.byref(words))
        self.words = Words(*(getattr(words, name) for name, *_ in _Words._fields_))

    def run(self, launch: Callable[[int], None], producers: int, commands: int, timeout: float) -> Run:
        """`launch(sequence)` starts producers that each post `commands`, and returns when they have ended."""
        lib, text = _library(), ctypes.create_string_buffer(_TEXT_BYTES)
        status = lib.drain_expect(self._drain, producers, self.sequence, commands)
        _check(status, f"{producers} producers on {self.rings} rings", b"")
        launch(self.sequence)
        self.sequence += commands
        self.check_kernel()
        result = _Result()
        status = lib.drain_finish(self._drain, _native.nanoseconds(timeout), ctypes.byref(result))
        if status:
            found = {name: count for name, count in zip(FAULTS, result.faults, strict=True) if count}
            raise BenchError(f"DATA CHECK FAILED: {result.text.decode()} {found or ''}".rstrip())
        _check(lib.rings_check_taken(self._rings, text, _TEXT_BYTES), "tickets", text.value)
        return Run(result.commands, result.ns / 1e9, result.batches)

    def check_kernel(self) -> None:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        _check(_library().rings_error(self._rings, text, _TEXT_BYTES), "kernel", text.value)

    def ping(self, count: int, timeout: float) -> npt.NDArray[np.uint64]:
        """Nanoseconds from each add to signal word 0 to a kernel's answer."""
        samples = np.zeros(count, np.uint64)
        status = _library().drain_ping(
            self.words.signal, self.words.answer, count, _native.nanoseconds(timeout), samples.ctypes.data
        )
        _check(status, "a signal's answer", b"the kernel did not answer in time")
        return samples

    def close(self) -> None:
        lib = _library()
        if self._drain:
            lib.drain_close(self._drain)
        if self._rings:
            lib.rings_close(self._rings)
        self._drain = self._rings = ctypes.c_void_p()

    def __enter__(self) -> Drained:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _check(status: int, what: str, text: bytes) -> None:
    if status:
        name = _native.status_name(status)
        raise BenchError(f"{what}: {text.decode(errors='replace') or _native.status_text(status)} ({name})")


def near(numa_node: int | None) -> list[int]:
    """The CPUs of a NUMA node that this process may use; all that it may use, where none is known."""
    allowed = os.sched_getaffinity(0)
    if numa_node is None:
        return sorted(allowed)
    try:
        text = Path(f"/sys/devices/system/node/node{numa_node}/cpulist").read_text()
    except OSError:
        return sorted(allowed)
    there: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            there.update(range(int(first), int(last or first) + 1))
    return sorted(allowed & there) or sorted(allowed)


def cpus_for(threads: int, numa_node: int | None) -> list[int]:
    """One each; none where there are not enough for them and for who launches kernels."""
    found = near(numa_node)
    return found[1 : threads + 1] if len(found) > threads else []
