# SPDX-License-Identifier: Apache-2.0
"""The CPU as an accelerator: kernels are compiled as C++ and run by the emulation, lanes as fibers, blocks as threads.

Its memory is that of libuccl_ep_emulation.so, which a Communicator uses, too; a stream is a thread.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import shlex
import subprocess
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import _native, errors, paths
from .._native import ffi
from ._arguments import Packed
from ._driver import Compiler, Dim3, Driver, Handle, Info, KernelAttributes
from ._entries import entries

WARP_SIZES = (1, 32, 64)
_COMPILE_SECONDS = 300.0
_TEXT_BYTES = 1 << 12


def library() -> Path:
    return paths.library_dir() / "libuccl_ep_emulation.so"


# ------------------------------------------------------------------------------------------------------ the compiler
class HostCompiler(Compiler):
    """$CXX, or c++."""

    kind = "cpu"

    @functools.cached_property
    def _command(self) -> list[str]:
        return shlex.split(os.environ.get("CXX", "")) or ["c++"]

    def _run(self, *arguments: str, folder: str | None = None) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [*self._command, *arguments], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                errors="replace", check=False, timeout=_COMPILE_SECONDS,
            )  # fmt: skip
        except OSError as error:
            raise errors.MissingCompiler(
                f"{self._command[0]}, the C++ compiler that kernels for the CPU need, does not start "
                f"({error.strerror}): install g++ or clang++, or set CXX"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise errors.CompileError(f"{self._command[0]} did not end within {error.timeout:g} s") from error

    @functools.cached_property
    def _version(self) -> str:
        done = self._run("--version")
        if done.returncode:
            raise errors.MissingCompiler(f"{shlex.join(self._command)} --version fails: {done.stderr.strip()}")
        return f"{shlex.join(self._command)}: {done.stdout}"

    def version(self) -> str:
        return self._version

    def compile(
        self, source: str, name: str, architecture: str, options: Sequence[str], headers: Mapping[str, str]
    ) -> bytes:
        with tempfile.TemporaryDirectory(prefix="uccl_ep_") as folder:
            for header, text in headers.items():
                path = Path(folder, "include", header)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            # In the folder, by its plain name, so that messages say it and show the line.
            Path(folder, name).write_text(source + entries(source))
            # Symbolic: a kernel with a name of libc's, as "send", is to be the kernel. Hidden: what inline functions of
            # two modules have under one name would be one for both.
            flags = ["-std=c++17", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-Bsymbolic"]
            flags += ["-Iinclude", f"-ffile-prefix-map={folder}=."]
            done = self._run(*flags, *options, "-x", "c++", name, "-o", "image.so", folder=folder)
            if done.returncode:
                raise errors.CompileError(f"{name} does not compile:\n{done.stderr.rstrip() or done.stdout.rstrip()}")
            return Path(folder, "image.so").read_bytes()


# --------------------------------------------------------------------------------------------------------- streams
class _Event:
    def __init__(self) -> None:
        self.passed = threading.Event()
        self.time = 0.0

    def __call__(self) -> None:
        self.time = time.monotonic()
        self.passed.set()


class _Worker:
    """A stream: one thread, its work in order. After a failure the rest is dropped, but for what is to be done
    `always`, and everyone who asks is told."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._work: deque[tuple[Callable[[], None], bool]] = deque()
        self._running = self._closing = self._ended = False
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, name="uccl_ep stream", daemon=True).start()

    def add(self, work: Callable[[], None], always: bool = False) -> bool:
        """False: it has ended."""
        with self._change:
            if not self._ended:
                self._work.append((work, always))
                self._change.notify()
            return not self._ended

    def close(self) -> None:
        with self._change:
            self._closing = True
            self._change.notify()

    def idle(self) -> bool:
        with self._change:
            return not (self._running or self._work)

    def done(self) -> bool:
        if self._failure is not None:
            raise self._failure
        return self.idle()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except BaseException as error:
                self._failure = self._failure or error

    def _next(self) -> Callable[[], None] | None:
        with self._change:
            while True:
                self._running = False
                while not self._work and not self._closing:
                    self._change.wait()
                if not self._work:
                    self._ended = True
                    return None
                work, always = self._work.popleft()
                if always or self._failure is None:
                    self._running = True
                    return work


# -------------------------------------------------------------------------------------------------------- the driver
class _Launch(ctypes.Structure):
    """uccl_ep_emulation_launch of emulation.h."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("warp_size", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("cooperative", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("kernel", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("seed", ctypes.c_uint64),
    )


@functools.cache
def _emulation() -> Any:
    """What runs kernels. Global: kernels' libraries are linked to nothing, and find it."""
    loaded = ctypes.CDLL(str(paths.library_dir() / "libuccl_ep_emulation_device.so"), mode=ctypes.RTLD_GLOBAL)
    launch = loaded.uccl_ep_emulation_launch
    launch.restype = ctypes.c_int
    launch.argtypes = (ctypes.POINTER(_Launch), ctypes.c_char_p, ctypes.c_uint64)
    return launch


@functools.cache
def _table() -> Any:
    """The emulation's driver table, as accelerator.h says."""
    entry = ctypes.CDLL(str(library())).uccl_ep_accelerator_entry
    entry.restype = ctypes.c_void_p
    return ffi.cast("const uccl_ep_accelerator *", entry())


class _Library:
    """A compiled module. Never unloaded: a kernel may still be on its way out of it."""

    def __init__(self, image: bytes, name: str) -> None:
        _emulation()
        with tempfile.TemporaryDirectory(prefix="uccl_ep_") as folder:
            path = Path(folder, name + ".so")
            path.write_bytes(image)
            try:
                self.code = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL | os.RTLD_NOW)
            except OSError as error:
                raise errors.CompileError(f"{name} does not link: {error}") from error
        names = self.code.uccl_ep_kernels
        names.restype = ctypes.POINTER(ctypes.c_char_p)
        self.names = [name.decode() for name in itertools.takewhile(bool, names())]


class _Function:
    def __init__(self, library: _Library, name: str) -> None:
        self.call = ctypes.cast(getattr(library.code, f"uccl_ep_call_{name}"), ctypes.c_void_p).value
        sizes = getattr(library.code, f"uccl_ep_sizes_{name}")
        sizes.restype = ctypes.POINTER(ctypes.c_uint)
        self.sizes = list(itertools.takewhile(bool, sizes()))
        self.name = name


class Cpu(Driver):
    def __init__(self, index: int, warp_size: int, seed: int) -> None:
        if warp_size not in WARP_SIZES:
            raise errors.CommandError(f"warps of {warp_size} lanes are not emulated: {WARP_SIZES} are")
        self.compiler = HostCompiler()
        self._warp_size, self._seed = warp_size, seed
        self._workers: weakref.WeakSet[_Worker] = weakref.WeakSet()
        self._lock = threading.RLock()  # of what is given back, which the collector may do anywhere
        self._table = _table()
        found = ffi.new("uccl_ep_gpu_info *")
        found.size = ffi.sizeof("uccl_ep_gpu_info")
        self._check("query", self._table.query(index, found))
        gpu = ffi.new("uccl_ep_gpu **")
        self._check("open", self._table.open(index, gpu))
        self._gpu = gpu[0]
        orderings = _native.enum_names("uccl_ep_writes_ordering", "UCCL_EP_WRITES_")
        self.info = Info(
            kind="cpu",
            index=index,
            name=_native.text(found.name),
            architecture=_native.text(found.architecture),
            warp_size=warp_size,
            multiprocessors=found.multiprocessors,
            memory_bytes=found.memory_bytes,
            max_threads=1024,
            shared_bytes=1 << 20,
            clock_hz=found.clock_hz,
            writes_ordering=orderings[found.writes_ordering].lower(),  # type: ignore[arg-type]
            can_flush=bool(found.can_flush),
            dmabuf=bool(found.dmabuf),
            host_atomics=bool(found.host_atomics),
            cooperative=True,
            numa_node=found.numa_node if found.numa_node >= 0 else None,
            address=_native.text(found.address),
            driver=_native.text(found.driver),
        )

    def _check(self, call: str, status: int) -> None:
        if status != _native.OK:
            text = f"{call}: {_native.text(self._table.error_text())}"
            raise errors.from_record(errors.ErrorRecord(status=status, text=text))

    # Memory.
    def alloc(self, nbytes: int) -> int:
        address = ffi.new("void **")
        self._check("device_alloc", self._table.device_alloc(self._gpu, nbytes, address))
        return int(ffi.cast("uintptr_t", address[0]))

    def when_idle(self, release: Callable[[], None]) -> None:
        # A GPU's driver waits in free() for the kernels that run, which may use what is given back. Nothing waits here:
        # the last stream that has come so far does it.
        left = 1

        def pass_by() -> None:
            nonlocal left
            with self._lock:
                left -= 1
                last = not left
            if last:
                release()

        with self._lock:
            workers = list(self._workers)
        for worker in workers:
            if not worker.idle():
                with self._lock:
                    left += 1
                if not worker.add(pass_by, always=True):
                    pass_by()
        pass_by()

    def free(self, address: int) -> None:
        self._table.device_free(self._gpu, ffi.cast("void *", address))

    def host_register(self, address: int, nbytes: int) -> int:
        device = ffi.new("void **")
        self._check("host_register", self._table.host_register(self._gpu, ffi.cast("void *", address), nbytes, device))
        return int(ffi.cast("uintptr_t", device[0]))

    def host_unregister(self, address: int) -> None:
        self._table.host_unregister(self._gpu, ffi.cast("void *", address))

    def copy(self, stream: Handle, to: int, source: int, nbytes: int) -> None:
        target, begin = ffi.cast("void *", to), ffi.cast("void *", source)
        stream.add(lambda: self._check("copy", self._table.copy(self._gpu, target, begin, nbytes)))

    def fill(self, stream: Handle, address: int, value: int, nbytes: int) -> None:
        stream.add(lambda: ctypes.memset(address, value, nbytes) and None)

    def export_dmabuf(self, address: int, nbytes: int) -> int:
        descriptor = ffi.new("int32_t *")
        self._check(
            "export_dmabuf",
            self._table.export_dmabuf(self._gpu, ffi.cast("void *", address), nbytes, descriptor),
        )
        return int(descriptor[0])

    # Streams and events.
    def stream_create(self) -> Handle:
        worker = _Worker()
        with self._lock:
            self._workers.add(worker)
        return worker

    def stream_destroy(self, stream: Handle) -> None:
        stream.close()

    def stream_done(self, stream: Handle) -> bool:
        return bool(stream.done())

    def stream_wait(self, stream: Handle, event: Handle) -> None:
        # It passes: what is before it ends, or is dropped; and who waits for this stream has a deadline.
        stream.add(lambda: event.passed.wait() and None)

    def event_record(self, stream: Handle) -> Handle:
        event = _Event()
        stream.add(event, always=True)
        return event

    def event_destroy(self, event: Handle) -> None:
        """Nothing holds it any more."""

    def event_done(self, event: Handle) -> bool:
        return bool(event.passed.is_set())

    def event_seconds(self, begin: Handle, end: Handle) -> float:
        return float(end.time - begin.time)

    # Code.
    def prebuilt(self, name: str) -> bytes | None:
        path = paths.library_dir() / "kernels" / f"{name}.so"
        return path.read_bytes() if path.is_file() else None

    def load(self, image: bytes, name: str) -> Handle:
        return _Library(image, name)

    def unload(self, module: Handle) -> None:
        """See _Library."""

    def function(self, module: Handle, name: str) -> Handle | None:
        return _Function(module, name) if name in module.names else None

    def names(self, module: Handle) -> Sequence[str]:
        return list(module.names)

    def parameter_sizes(self, function: Handle) -> Sequence[int]:
        return list(function.sizes)

    def attributes(self, function: Handle) -> KernelAttributes:
        return KernelAttributes(max_threads=self.info.max_threads, registers=0, shared_bytes=0, local_bytes=0)

    def allow_shared(self, function: Handle, nbytes: int) -> None:
        """As much as there is."""

    def blocks_per_multiprocessor(self, function: Handle, threads: int, shared: int) -> int:
        return max(self.info.max_threads // threads, 1)

    def launch(
        self, function: Handle, stream: Handle, grid: Dim3, block: Dim3, packed: Packed, shared: int, cooperative: bool
    ) -> None:
        call = _Launch(
            size=ctypes.sizeof(_Launch),
            warp_size=self._warp_size,
            grid=grid,
            block=block,
            shared_bytes=shared,
            cooperative=cooperative,
            kernel=function.call,
            args=packed.address,
            seed=self._seed,
        )

        def run(keep: Packed = packed) -> None:
            text = ctypes.create_string_buffer(_TEXT_BYTES)
            status = _emulation()(ctypes.byref(call), text, _TEXT_BYTES)
            if status != _native.OK:
                what = f"kernel {function.name}: {text.value.decode('utf-8', 'replace')}"
                raise errors.from_record(errors.ErrorRecord(status=status, text=what))

        stream.add(run)

    def close(self) -> None:
        self.when_idle(lambda: self._table.close(self._gpu))
