# SPDX-License-Identifier: Apache-2.0
"""What users of an accelerator hold: the accelerator, memory, streams, events, modules and kernels."""

from __future__ import annotations

import math
import mmap
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from .. import paths
from ..errors import ChannelClosed, CommandError, DeadlineExceeded, RegistrationError, UcclEpError, Unsupported, nearest
from . import _arguments, _cache, _sources
from ._driver import Dim3, Driver, Handle, Info, KernelAttributes

PAGE = 4096
TIMEOUT = 30.0  # seconds, of waits whose caller names none


def wait_until(done: Callable[[], bool], timeout: float | None, what: str) -> None:
    """Poll. No driver's own wait is used: none of them has a deadline."""
    timeout = TIMEOUT if timeout is None else timeout
    if not timeout >= 0:
        raise CommandError(f"a timeout is not negative: {timeout!r} s")
    begin = time.monotonic()
    pause = 0.0
    while not done():
        waited = time.monotonic() - begin
        if waited >= timeout:
            raise DeadlineExceeded(f"{what} is not finished after {timeout:g} s")
        # At first eagerly, since most waits are short; beyond that a part of what was waited, which costs little.
        pause = 0.0 if waited < 100e-6 else min(waited / 8, 1e-3)
        time.sleep(min(pause, max(timeout - waited, 0.0)))


_Some = TypeVar("_Some", bound="_Resource")


class _Resource:
    """Something of a driver that must be given back once: by close(), the end of `with`, or when nobody holds it."""

    def __init__(self, accelerator: Accelerator, release: Callable[[], None]) -> None:
        self.accelerator = accelerator
        driver = accelerator._driver

        def give_back() -> None:
            if not driver.closed:
                release()

        self._finalizer = weakref.finalize(self, give_back)
        self._finalizer.atexit = False  # type: ignore[misc]
        accelerator._resources.add(self)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        self._finalizer()

    def __enter__(self: _Some) -> _Some:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _alive(self) -> None:
        if self.closed:
            raise ChannelClosed(f"this {type(self).__name__.lower().lstrip('_')} is closed")


class _Memory(_Resource):
    """An allocation. Buffers are views of it."""


class Buffer:
    """Memory that kernels of an accelerator reach, or a part of it."""

    def __init__(self, memory: _Memory, address: int, nbytes: int, host: npt.NDArray[np.uint8] | None = None) -> None:
        self._memory, self._address, self._host = memory, address, host
        self.memory: Literal["device", "host"] = "device" if host is None else "host"
        self.nbytes = nbytes

    @property
    def address(self) -> int:
        """As kernels see it."""
        self._memory._alive()
        return self._address

    @property
    def accelerator(self) -> Accelerator:
        return self._memory.accelerator

    @property
    def closed(self) -> bool:
        return self._memory.closed

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """Host memory as the CPU sees it. A view that outlives the buffer is safe to use, and no kernel sees it."""
        self._memory._alive()
        if self._host is None:
            raise Unsupported("device memory has no view on the host: copy_to() and copy_from(), or pinned()")
        return self._host

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """torch.as_tensor(buffer, device="cuda"), cupy.asarray(buffer): without a copy."""
        if self.accelerator.kind != "cuda":
            raise AttributeError("only memory of cuda has a __cuda_array_interface__")
        return {
            "version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "stream": None
        }  # fmt: skip

    def slice(self, offset: int, nbytes: int | None = None) -> Buffer:
        """A part, of the same memory: it is gone when the whole is closed."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        self._inside(offset, nbytes)
        host = None if self._host is None else self._host[offset : offset + nbytes]
        return Buffer(self._memory, self._address + offset, nbytes, host)

    # Copies and zero() are done on return, and wait for no stream: synchronize what they need first.

    def copy_from(self, source: npt.ArrayLike | Buffer, offset: int = 0, timeout: float | None = None) -> None:
        """Bytes of an array (in C order), or of another buffer, to `offset`."""
        if isinstance(source, Buffer):
            self._inside(offset, source.nbytes)
            self.accelerator._copy(self.address + offset, source.address, source.nbytes, timeout)
            return
        array = np.ascontiguousarray(source)
        self._inside(offset, array.nbytes)
        self.accelerator._copy(self.address + offset, array.ctypes.data, array.nbytes, timeout)

    def copy_to(self, target: npt.NDArray[Any], offset: int = 0, timeout: float | None = None) -> None:
        if not (isinstance(target, np.ndarray) and target.flags.c_contiguous and target.flags.writeable):
            raise CommandError("copy_to() needs a writable numpy array in C order")
        self._inside(offset, target.nbytes)
        self.accelerator._copy(target.ctypes.data, self.address + offset, target.nbytes, timeout)

    def numpy(self, dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
        """A copy of it all."""
        size = np.dtype(dtype).itemsize
        if self.nbytes % size:
            raise CommandError(f"{self.nbytes} bytes are no whole number of {np.dtype(dtype)}")
        array = np.empty(self.nbytes // size, dtype)
        self.copy_to(array)
        return array

    def zero(self, timeout: float | None = None) -> None:
        self.accelerator._fill(self.address, 0, self.nbytes, timeout)

    def dmabuf(self) -> int:
        """A descriptor that a NIC registers; the caller closes it. Whole pages only."""
        if self.memory != "device":
            raise Unsupported("host memory has no dmabuf: register it by its address")
        if not self.accelerator.info.dmabuf:
            raise Unsupported(f"{self.accelerator.info.name} with this driver does not export dmabufs")
        if self.address % PAGE or self.nbytes % PAGE:
            raise CommandError(f"a dmabuf begins and ends at pages of {PAGE} bytes: {self!r}")
        return self.accelerator._driver.export_dmabuf(self.address, self.nbytes)

    def close(self) -> None:
        """Give the memory back, all of it: also that of a slice is gone."""
        self._memory.close()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return self.nbytes

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<Buffer {self.memory} {self._address:#x}, {self.nbytes} bytes{state}>"

    def _inside(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise CommandError(f"{nbytes} bytes at {offset} do not lie in {self.nbytes} bytes")


class Event(_Resource):
    """A point in a stream."""

    def __init__(self, accelerator: Accelerator, handle: Handle) -> None:
        driver = accelerator._driver
        super().__init__(accelerator, lambda: driver.event_destroy(handle))
        self.handle = handle

    def done(self) -> bool:
        self._alive()
        return self.accelerator._driver.event_done(self.handle)

    def synchronize(self, timeout: float | None = None) -> None:
        wait_until(self.done, timeout, "the work before an event")

    def seconds_since(self, begin: Event) -> float:
        """On the device's clock; both must be done."""
        if not (begin.done() and self.done()):
            raise CommandError("an event that is not done has no time: synchronize() first")
        return self.accelerator._driver.event_seconds(begin.handle, self.handle)


class Stream(_Resource):
    """Work in order. Its own one waits for no other; one from outside is only borrowed."""

    def __init__(self, accelerator: Accelerator, handle: Handle, external: Any = None) -> None:
        driver = accelerator._driver
        owned = external is None
        super().__init__(accelerator, (lambda: driver.stream_destroy(handle)) if owned else (lambda: None))
        self.handle = handle
        self._external = external

    def __cuda_stream__(self) -> tuple[int, int]:
        if self.accelerator.kind == "cpu":
            raise Unsupported("a stream of the CPU is none of CUDA")
        return 0, int(self.handle)

    def done(self) -> bool:
        """Whether all its work is over. Raises what went wrong."""
        self._alive()
        return self.accelerator._driver.stream_done(self.handle)

    def synchronize(self, timeout: float | None = None) -> None:
        wait_until(self.done, timeout, "the work of a stream")

    def record(self) -> Event:
        self._alive()
        return Event(self.accelerator, self.accelerator._driver.event_record(self.handle))

    def wait(self, event: Event) -> None:
        """What follows on this stream comes after the event."""
        self._alive()
        event._alive()
        self.accelerator._driver.stream_wait(self.handle, event.handle)


class Module(_Resource):
    """Compiled code, loaded."""

    def __init__(self, accelerator: Accelerator, handle: Handle, name: str) -> None:
        driver = accelerator._driver
        super().__init__(accelerator, lambda: driver.unload(handle))
        self.handle, self.name = handle, name

    @property
    def kernels(self) -> Sequence[str] | None:
        """Names; None where the driver cannot tell."""
        self._alive()
        return self.accelerator._driver.names(self.handle)

    def kernel(self, name: str) -> Kernel:
        self._alive()
        function = self.accelerator._driver.function(self.handle, name)
        if function is None:
            known = self.kernels
            hint = "" if known is None else f"; {nearest(name, known)}"
            raise CommandError(
                f"{self.name} has no kernel {name!r}{hint} (a kernel is `UCCL_EP_KERNEL void {name}(...)`)"
            )
        return Kernel(self, name, function)


class Kernel:
    def __init__(self, module: Module, name: str, function: Handle) -> None:
        self.module, self.name, self._function = module, name, function
        driver = module.accelerator._driver
        self.attributes: KernelAttributes = driver.attributes(function)
        self._sizes = driver.parameter_sizes(function)
        self._shared_allowed = max(48 << 10, self.attributes.shared_bytes) - self.attributes.shared_bytes

    def launch(
        self,
        stream: Stream,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any] = (),
        *,
        shared: int = 0,
        cooperative: bool = False,
    ) -> None:
        """Start it; returns at once. Arguments: Buffer (its address), None, numpy or ctypes values, bytes (a structure
        by value)."""
        self.module._alive()
        stream._alive()
        if stream.accelerator is not self.module.accelerator:
            raise CommandError("the stream belongs to another accelerator than the kernel")
        blocks, threads = self._dimensions("grid", grid), self._dimensions("block", block)
        size = math.prod(threads)
        if size > self.attributes.max_threads:
            raise CommandError(
                f"kernel {self.name} runs in blocks of up to {self.attributes.max_threads} threads "
                f"({self.attributes.registers} registers each), not {size}"
            )
        self._allow_shared(shared)
        if cooperative:
            self._check_cooperative(math.prod(blocks), size, shared)
        packed = _arguments.pack(self.name, args, self._sizes)
        self.module.accelerator._driver.launch(
            self._function, stream.handle, blocks, threads, packed, shared, cooperative
        )

    def blocks_per_multiprocessor(self, block: int | Sequence[int], shared: int = 0) -> int:
        """How many blocks of this size run at the same time on one multiprocessor."""
        self.module._alive()
        self._allow_shared(shared)
        threads = math.prod(self._dimensions("block", block))
        return self.module.accelerator._driver.blocks_per_multiprocessor(self._function, threads, shared)

    def _dimensions(self, what: str, given: int | Sequence[int]) -> Dim3:
        sizes = list(given) if isinstance(given, Sequence) else [given]
        if not 1 <= len(sizes) <= 3 or not all(isinstance(one, (int, np.integer)) and one >= 1 for one in sizes):
            raise CommandError(f"kernel {self.name}: a {what} is one to three numbers above 0, not {given!r}")
        x, y, z = (*(int(one) for one in sizes), 1, 1)[:3]
        return x, y, z

    def _allow_shared(self, nbytes: int) -> None:
        if nbytes <= self._shared_allowed:
            return
        most = self.module.accelerator.info.shared_bytes - self.attributes.shared_bytes
        if nbytes > most:
            raise CommandError(
                f"kernel {self.name}: at most {most} bytes of shared memory can be asked for, not {nbytes}"
            )
        self.module.accelerator._driver.allow_shared(self._function, nbytes)
        self._shared_allowed = nbytes

    def _check_cooperative(self, blocks: int, threads: int, shared: int) -> None:
        info = self.module.accelerator.info
        if not info.cooperative:
            raise Unsupported(f"{info.name} does not launch cooperatively")
        fit = self.blocks_per_multiprocessor(threads, shared) * info.multiprocessors
        if blocks > fit:
            raise CommandError(
                f"kernel {self.name}: {blocks} blocks of {threads} threads cannot all run at once, {fit} can: with "
                "more, one that waits for another never ends"
            )


class Accelerator:
    """A device, opened. From uccl_ep.accel.open()."""

    def __init__(self, driver: Driver, cache: _cache.Cache | None, library: Path) -> None:
        self._driver = driver
        self._cache = cache
        self._resources: weakref.WeakSet[_Resource] = weakref.WeakSet()
        self.info: Info = driver.info
        self.library = library  # what a Communicator loads for the same device
        # Its own, so that copies pass kernels that spin on others.
        self._copies = driver.stream_create()
        self._finalizer = weakref.finalize(self, _close_driver, driver, self._copies)
        self._finalizer.atexit = False  # type: ignore[misc]

    @property
    def kind(self) -> str:
        return self.info.kind

    @property
    def device(self) -> int:
        return self.info.index

    def alloc(self, nbytes: int) -> Buffer:
        """Device memory: page aligned, zero."""
        driver = self._open(nbytes)
        whole = -(-nbytes // PAGE) * PAGE
        base = driver.alloc(whole)
        if base % PAGE:
            driver.free(base)
            base = driver.alloc(whole + PAGE)
        address = -(-base // PAGE) * PAGE
        memory = _Memory(self, lambda: driver.when_idle(lambda: driver.free(base)))
        buffer = Buffer(memory, address, nbytes)
        self._fill(address, 0, whole, None)
        return buffer

    def pinned(self, nbytes: int) -> Buffer:
        """Host memory that kernels reach, coherent, page aligned, zero: `array` is the CPU's view."""
        self._open(nbytes)
        # Not the driver's own host memory: that would be gone for views that outlive the buffer.
        pages = mmap.mmap(-1, -(-nbytes // PAGE) * PAGE)
        return self.register(np.frombuffer(pages, np.uint8)).slice(0, nbytes)

    def register(self, array: npt.NDArray[Any]) -> Buffer:
        """The same of host memory that is there: whole pages."""
        if not (isinstance(array, np.ndarray) and array.flags.c_contiguous and array.nbytes):
            raise CommandError("register() takes a numpy array in C order that is not empty")
        driver = self._open(array.nbytes)
        host = array.ctypes.data
        if host % PAGE or array.nbytes % PAGE:
            raise RegistrationError(
                f"{array.nbytes} bytes at {host:#x} are not whole pages of {PAGE} bytes: use pinned(), or take a slice "
                "that is aligned"
            )
        address = driver.host_register(host, array.nbytes)

        def release(keep: Any = array) -> None:
            driver.host_unregister(host)

        memory = _Memory(self, lambda: driver.when_idle(release))
        return Buffer(memory, address, array.nbytes, array.reshape(-1).view(np.uint8))

    def stream(self, external: Any = None) -> Stream:
        """A stream of its own; or one from outside: of torch, anything with __cuda_stream__, or a number."""
        self._open(1)
        if external is None:
            return Stream(self, self._driver.stream_create())
        if isinstance(external, Stream):
            if external.accelerator is not self:
                raise CommandError("the stream belongs to another accelerator")
            return Stream(self, external.handle, external)
        if self.kind == "cpu":
            raise Unsupported(f"the CPU has no streams but its own: {external!r} is none")
        return Stream(self, stream_handle(external), external)

    def compile(
        self, source: str, name: str, options: Sequence[str] = (), headers: Mapping[str, str] | None = None
    ) -> Module:
        """Compile (or take from the cache) and load. `name` stands in the compiler's messages; our own headers can be
        included as <uccl_ep/device.h>, `headers` are more of them, by name. Call it before kernels run that wait for
        others: loading may wait for the device."""
        self._open(1)
        image = _sources.compile_cached(
            self._driver.compiler, source, name, self.info.architecture, options, headers or {}, self._cache
        )
        return Module(self, self._driver.load(image, name), name)

    def own(self, name: str) -> Module:
        """A file of kernels that uccl_ep brings (uccl_ep.paths.kernels_dir()). On the CPU no compiler is needed."""
        self._open(1)
        folder = paths.kernels_dir()
        known = sorted(path.stem for path in folder.glob("*.cu"))
        if name not in known:
            raise CommandError(f"uccl_ep brings no kernels named {name!r}; {nearest(name, known)}")
        image = self._driver.prebuilt(name)
        if image is not None:
            return Module(self, self._driver.load(image, name), name)
        headers = {path.name: path.read_text() for path in folder.glob("*.h")}
        return self.compile((folder / f"{name}.cu").read_text(), f"{name}.cu", headers=headers)

    def _copy(self, to: int, source: int, nbytes: int, timeout: float | None) -> None:
        self._open(1)
        if nbytes:
            self._driver.copy(self._copies, to, source, nbytes)
            wait_until(lambda: self._driver.stream_done(self._copies), timeout, f"a copy of {nbytes} bytes")

    def _fill(self, address: int, value: int, nbytes: int, timeout: float | None) -> None:
        self._open(1)
        if nbytes:
            self._driver.fill(self._copies, address, value, nbytes)
            wait_until(lambda: self._driver.stream_done(self._copies), timeout, f"filling {nbytes} bytes")

    def _open(self, nbytes: int) -> Driver:
        if self._driver.closed:
            raise ChannelClosed(f"this accelerator ({self.kind} {self.device}) is closed")
        if not isinstance(nbytes, (int, np.integer)) or nbytes < 1:
            raise CommandError(f"a number of bytes above 0 is wanted, not {nbytes!r}")
        return self._driver

    def close(self) -> None:
        """Give back all that it gave out. A GPU's driver may wait for kernels that still run."""
        if self._driver.closed:
            return
        problem: UcclEpError | None = None
        for resource in list(self._resources):
            try:
                resource.close()
            except UcclEpError as error:  # the device is broken: give back what can be
                problem = problem or error
        self._finalizer()
        if problem is not None:
            raise problem

    def __enter__(self) -> Accelerator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Accelerator {self.kind} {self.device}: {self.info.name}, {self.info.architecture}>"


def _close_driver(driver: Driver, copies: Handle) -> None:
    try:
        driver.stream_destroy(copies)
    finally:
        driver.closed = True
        driver.close()


def stream_handle(external: Any) -> int:
    """The number of a stream of CUDA or HIP."""
    protocol = getattr(external, "__cuda_stream__", None)
    if protocol is not None:
        version, handle = protocol() if callable(protocol) else protocol
        if version != 0:
            raise Unsupported(f"version {version} of __cuda_stream__ is not known, only 0 is")
        return int(handle)
    if hasattr(external, "cuda_stream"):  # torch, where it is that of ROCm too
        return int(external.cuda_stream)
    if isinstance(external, (int, np.integer)) and not isinstance(external, bool) and external >= 0:
        return int(external)
    raise CommandError(
        f"{external!r} is no stream: one of torch, an object with __cuda_stream__, or its number is wanted"
    )
