# SPDX-License-Identifier: Apache-2.0
"""GPUs from Python: memory, streams, kernels compiled when they are needed; and the CPU in a GPU's place.

    import uccl_ep.accel
    with uccl_ep.accel.open("cpu") as gpu:                # or "cuda", "hip"
        memory = gpu.alloc(4096)
        module = gpu.compile(source, "fill.cu")
        stream = gpu.stream()
        module.kernel("fill").launch(stream, 4, 256, [memory, numpy.uint32(7)])
        stream.synchronize(timeout=10)
        print(memory.numpy(numpy.uint32))

Nothing of a vendor is imported before open() or compile() asks for it: `cuda` needs cuda-python (pip install
'uccl_ep[cuda]'), `hip` hip-python (pip install 'uccl_ep[hip]'), `cpu` a C++ compiler for kernels of your own.

Every wait has a deadline (30 s, where none is given) and polls: no call of a driver that waits is made while kernels
run. What may make a driver wait, alloc, pinned, register, compile, close and the first use of a size of shared memory,
is to be called before kernels run that wait for somebody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import CommandError, nearest
from . import _cache, _sources
from ._cache import Cache
from ._driver import Compiler, Driver, Info, KernelAttributes
from ._objects import Accelerator, Buffer, Event, Kernel, Module, Stream

__all__ = [
    "KINDS",
    "Accelerator",
    "Buffer",
    "Cache",
    "Event",
    "Info",
    "Kernel",
    "KernelAttributes",
    "Module",
    "Stream",
    "compile_for",
    "library",
    "open",
]

KINDS = ("cuda", "hip", "cpu")
_LIBRARIES = {"cuda": "cuda", "hip": "hip", "cpu": "emulation"}


def open(kind: str, device: int = 0, *, warp_size: int = 32, seed: int = 0, cache: Cache | bool = True) -> Accelerator:
    """Open a device. `cpu` only: `warp_size` 1, 32 or 64; `seed`, the order in which lanes run (0: theirs). `cache`
    is where compiled kernels are kept: False for nowhere, True for the user's folder (docs/accelerators.md)."""
    _known(kind)
    if kind != "cpu" and (warp_size, seed) != (32, 0):
        raise CommandError(f"warp_size and seed are the emulation's: {kind} has its own")
    driver: Driver
    if kind == "cuda":
        from .cuda import Cuda

        driver = Cuda(device)
    elif kind == "hip":
        from .hip import Hip

        driver = Hip(device)
    else:
        from .cpu import Cpu

        driver = Cpu(device, warp_size, seed)
    return Accelerator(driver, _kept(cache), library(kind))


def compile_for(
    kind: str,
    architecture: str,
    source: str,
    name: str,
    options: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    *,
    cache: Cache | bool = True,
) -> bytes:
    """What Accelerator.compile() loads, for a device that need not be here: "sm_90", "gfx90a". To build ahead, and to
    check that kernels compile where there is no GPU."""
    _known(kind)
    compiler: Compiler
    if kind == "cuda":
        from .cuda import Nvrtc

        compiler = Nvrtc()
    elif kind == "hip":
        from .hip import Hiprtc

        compiler = Hiprtc()
    else:
        from .cpu import HostCompiler

        compiler = HostCompiler()
    return _sources.compile_cached(compiler, source, name, architecture, options, headers or {}, _kept(cache))


def library(kind: str) -> Path:
    """What a Communicator loads for this kind of device (accelerator.h)."""
    from .. import paths

    _known(kind)
    return paths.library_dir() / f"libuccl_ep_{_LIBRARIES[kind]}.so"


def _known(kind: str) -> None:
    if kind not in KINDS:
        raise CommandError(f"no kind of accelerator named {kind!r}; {nearest(str(kind), KINDS)}")


def _kept(cache: Cache | bool) -> Cache | None:
    if isinstance(cache, bool):
        return _cache.default() if cache else None
    return cache
