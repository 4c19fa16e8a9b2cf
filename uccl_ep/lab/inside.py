# SPDX-License-Identifier: Apache-2.0
"""What of a process in the lab is its NIC's, which lives there with the program."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

_ROOM = 512  # more than a NIC has links


@functools.cache
def _held() -> Callable[..., int] | None:
    try:
        call: Any = ctypes.CDLL(None).uccl_ep_lab_held
    except AttributeError:
        return None  # nothing is preloaded
    call.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint32)]
    call.restype = ctypes.c_uint32
    return call  # type: ignore[no-any-return]


def held() -> tuple[int, frozenset[int]]:
    """Threads and descriptors of this process that are the NIC's: none outside the lab. They come with the first device
    that is opened, and with each process that is reached, and stay."""
    call = _held()
    if call is None:
        return 0, frozenset()
    threads, descriptors = ctypes.c_uint32(), (ctypes.c_int * _ROOM)()
    found = call(descriptors, _ROOM, ctypes.byref(threads))
    assert found <= _ROOM
    return threads.value, frozenset(descriptors[:found])
