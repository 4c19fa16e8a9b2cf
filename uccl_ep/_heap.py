# SPDX-License-Identifier: Apache-2.0
"""The memory under numpy views of a heap.

numpy cannot be told that memory has gone, and peers must see the end of a communicator at once: its memory goes at
close, whoever still looks at it. So views look through a mapping of their own of the same pages, which the last of them
takes along. Memory that cannot be mapped twice (private to the process) is viewed directly, and is gone after close.
"""

from __future__ import annotations

import ctypes
import weakref

_MREMAP_MAYMOVE = 1
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class HeapMapping:
    """Bytes at `address`, there as long as this object where `owned`."""

    def __init__(self, address: int, size: int) -> None:
        self.size = size
        # An old size of 0 asks for a second mapping of shared pages, with the first one's flags (locked, not in forks).
        again = _libc.mremap(address, 0, size, _MREMAP_MAYMOVE)
        self.owned = again != _MAP_FAILED
        self.address: int = again if self.owned else address
        if self.owned:
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
