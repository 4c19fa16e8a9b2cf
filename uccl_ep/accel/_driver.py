# SPDX-License-Identifier: Apache-2.0
"""What a kind of accelerator provides, one method a call of its driver. What users see is made of it in _objects.py.

Handles (of streams, events, modules, functions) are whatever the driver likes; addresses are integers. Any thread may
call. No method waits for a kernel: what may last is started, and then asked for.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ._arguments import Packed

Handle = Any
Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class Info:
    """One device, as its driver describes it."""

    kind: str
    index: int
    name: str
    architecture: str  # what kernels are compiled for: "sm_90", "gfx90a"
    warp_size: int
    multiprocessors: int
    memory_bytes: int
    max_threads: int  # of a block
    shared_bytes: int  # of a block, at most
    clock_hz: int  # ticks a second of the clock that device.h reads
    # When what a NIC wrote to its memory is visible to its kernels: "unordered" means only after a flush (MEM-3).
    writes_ordering: Literal["unordered", "ordered", "ordered_all"]
    can_flush: bool
    dmabuf: bool  # device memory can be exported
    host_atomics: bool  # its atomics on host memory are atomic against the CPU's
    cooperative: bool
    numa_node: int | None
    address: str  # on the bus
    driver: str


@dataclass(frozen=True)
class KernelAttributes:
    max_threads: int  # of a block of this kernel
    registers: int
    shared_bytes: int  # that it declares
    local_bytes: int  # of a thread: spilled registers, arrays


class Compiler(Protocol):
    """Source to what `Driver.load` takes. Needs no device."""

    kind: str

    def version(self) -> str:
        """All that what it makes depends on, besides its arguments."""
        ...

    def compile(
        self, source: str, name: str, architecture: str, options: Sequence[str], headers: Mapping[str, str]
    ) -> bytes: ...


class Driver(abc.ABC):
    info: Info
    compiler: Compiler
    closed = False

    def when_idle(self, release: Callable[[], None]) -> None:
        """Give memory back once no kernel that was launched uses it. GPUs' drivers see to that themselves."""
        release()

    # Memory. Device memory is not cleared here.
    @abc.abstractmethod
    def alloc(self, nbytes: int) -> int: ...
    @abc.abstractmethod
    def free(self, address: int) -> None: ...
    @abc.abstractmethod
    def host_register(self, address: int, nbytes: int) -> int:
        """Let kernels reach host memory (whole pages), coherent: its address on the device. Again is no error: each is
        taken back by one host_unregister."""

    @abc.abstractmethod
    def host_unregister(self, address: int) -> None: ...
    @abc.abstractmethod
    def copy(self, stream: Handle, to: int, source: int, nbytes: int) -> None:
        """Between any two of host and device."""

    @abc.abstractmethod
    def fill(self, stream: Handle, address: int, value: int, nbytes: int) -> None: ...
    @abc.abstractmethod
    def export_dmabuf(self, address: int, nbytes: int) -> int: ...

    # Streams and events.
    @abc.abstractmethod
    def stream_create(self) -> Handle:
        """One that waits for no other."""

    @abc.abstractmethod
    def stream_destroy(self, stream: Handle) -> None: ...
    @abc.abstractmethod
    def stream_done(self, stream: Handle) -> bool:
        """Whether all that was started is over. Raises what went wrong."""

    @abc.abstractmethod
    def stream_wait(self, stream: Handle, event: Handle) -> None: ...
    @abc.abstractmethod
    def event_record(self, stream: Handle) -> Handle:
        """A new one, behind all that was started on the stream."""

    @abc.abstractmethod
    def event_destroy(self, event: Handle) -> None: ...
    @abc.abstractmethod
    def event_done(self, event: Handle) -> bool: ...
    @abc.abstractmethod
    def event_seconds(self, begin: Handle, end: Handle) -> float:
        """Between two events that are done."""

    # Code.
    def prebuilt(self, name: str) -> bytes | None:
        """What load() takes of a kernel file of ours, where the wheel brings it."""
        return None

    @abc.abstractmethod
    def load(self, image: bytes, name: str) -> Handle:
        """All of it: no later lookup or launch of one of its kernels has to wait for the device."""

    @abc.abstractmethod
    def unload(self, module: Handle) -> None: ...
    @abc.abstractmethod
    def function(self, module: Handle, name: str) -> Handle | None:
        """None: the module has no such kernel."""

    @abc.abstractmethod
    def names(self, module: Handle) -> Sequence[str] | None:
        """Of its kernels; None where the driver cannot tell."""

    @abc.abstractmethod
    def parameter_sizes(self, function: Handle) -> Sequence[int] | None: ...
    @abc.abstractmethod
    def attributes(self, function: Handle) -> KernelAttributes: ...
    @abc.abstractmethod
    def allow_shared(self, function: Handle, nbytes: int) -> None:
        """More dynamic shared memory than a kernel gets unasked."""

    @abc.abstractmethod
    def blocks_per_multiprocessor(self, function: Handle, threads: int, shared: int) -> int: ...
    @abc.abstractmethod
    def launch(
        self, function: Handle, stream: Handle, grid: Dim3, block: Dim3, packed: Packed, shared: int, cooperative: bool
    ) -> None: ...

    @abc.abstractmethod
    def close(self) -> None: ...
