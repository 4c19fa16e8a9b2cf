# SPDX-License-Identifier: Apache-2.0
"""The memory of a heap: what a caller may give as one, and what is under numpy views of one.

numpy cannot be told that memory has gone, and peers must see the end of a communicator at once: its memory goes at
close, whoever still looks at it. So views look through a mapping of their own of the same pages, which the last of them
takes along. Memory that cannot be mapped twice (private to the process) is viewed directly, and is gone after close.
What the caller gave is viewed directly too, and its owner stays alive with the views.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import CommandError

_MREMAP_MAYMOVE = 1
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class HeapMapping:
    """Bytes at `address`, there as long as this object where `owned`."""

    def __init__(self, address: int, size: int, owner: object = None) -> None:
        self.size = size
        self.owner = owner  # who is to stay alive, and needs no second mapping
        self.address, self.owned = address, False
        if owner is not None:
            return
        # An old size of 0 asks for a second mapping of shared pages, with the first one's flags (locked, not in forks).
        again = _libc.mremap(address, 0, size, _MREMAP_MAYMOVE)
        if again != _MAP_FAILED:
            self.address, self.owned = again, True
            # Not at exit of the interpreter, when views may still be alive: the process takes it along.
            weakref.finalize(self, _libc.munmap, again, size).atexit = False  # type: ignore[misc]


class HeapView:
    """What numpy keeps alive for a view: the mapping, and the communicator."""

    def __init__(self, comm: object, mapping: HeapMapping) -> None:
        self._comm, self._mapping = comm, mapping
        self.__array_interface__ = {
            "version": 3,
            "data": (mapping.address, False),
            "shape": (mapping.size,),
            "typestr": "|u1",
        }


@dataclass(frozen=True)
class GivenHeap:
    """Memory of the caller: where the CPU, or for `device` memory the GPU, finds it, and who has to stay alive."""

    address: int
    nbytes: int
    device: bool
    owner: object


def given_heap(heap: Any, accelerator: Any) -> GivenHeap:
    """A Buffer of uccl_ep.accel, an array or tensor of any library, (address, nbytes), or any writable buffer."""
    if isinstance(heap, tuple):
        return _of_pair(heap, accelerator)
    if getattr(heap, "memory", None) in ("device", "host"):
        if heap.memory == "host":
            return _of_array(heap.array, heap)
        return GivenHeap(heap.address, heap.nbytes, True, heap)
    if hasattr(heap, "data_ptr"):  # torch
        if not heap.is_contiguous():
            raise CommandError("heap: the tensor has gaps or another order; it must be contiguous")
        if heap.device.type not in ("cpu", "cuda"):
            raise CommandError(f"heap: a tensor of {heap.device} is neither host memory nor a GPU's of CUDA or ROCm")
        return GivenHeap(heap.data_ptr(), heap.numel() * heap.element_size(), heap.device.type == "cuda", heap)
    if hasattr(heap, "__cuda_array_interface__"):
        facts = heap.__cuda_array_interface__
        address, read_only = facts["data"]
        if facts.get("strides") is not None or read_only:
            raise CommandError("heap: the device array must be writable and in C order")
        return GivenHeap(address, math.prod(facts["shape"]) * np.dtype(facts["typestr"]).itemsize, True, heap)
    try:
        array = heap if isinstance(heap, np.ndarray) else np.frombuffer(heap, np.uint8)
    except (TypeError, ValueError, BufferError, AttributeError) as error:
        raise CommandError(
            f"heap={type(heap).__name__}: a Buffer of uccl_ep.accel, an array or tensor, (address, nbytes) or a "
            f"writable buffer is needed ({error})"
        ) from None
    return _of_array(array, heap)


def _of_array(array: np.ndarray[Any, Any], owner: object) -> GivenHeap:
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise CommandError("heap: the array must be writable and in C order")
    return GivenHeap(array.ctypes.data, array.nbytes, False, owner)


def _of_pair(pair: tuple[Any, ...], accelerator: Any) -> GivenHeap:
    if len(pair) not in (2, 3) or not all(isinstance(number, int) for number in pair[:2]):
        raise CommandError(f'heap={pair!r}: (address, nbytes), and "host" or "device" as a third if both are possible')
    where = pair[2] if len(pair) == 3 else "host" if accelerator is None else None
    if where not in ("host", "device"):
        raise CommandError(f'heap={pair!r}: with an accelerator, say "host" or "device" as a third')
    return GivenHeap(pair[0], pair[1], where == "device", pair)
