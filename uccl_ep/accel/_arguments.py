# SPDX-License-Identifier: Apache-2.0
"""Kernel arguments: from Python's values to bytes, each of the size that the kernel's parameter has."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import CommandError


class Packed:
    """What a launch call takes: an array of pointers, one an argument. Valid as long as this object lives."""

    def __init__(self, arguments: Sequence[bytes]) -> None:
        # numpy's structures and ours may hold 16-byte vectors, which are read with aligned loads.
        offsets, end = [], 0
        for argument in arguments:
            offsets.append(end)
            end += -(-len(argument) // 16) * 16
        self._memory = ctypes.create_string_buffer(end + 16)
        base = -(-ctypes.addressof(self._memory) // 16) * 16
        for offset, argument in zip(offsets, arguments, strict=True):
            ctypes.memmove(base + offset, argument, len(argument))
        self._pointers = (ctypes.c_void_p * max(len(offsets), 1))(*(base + offset for offset in offsets))
        self.address = ctypes.addressof(self._pointers)


def as_bytes(value: Any) -> bytes:
    """One argument, by value; memory as its address."""
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, np.generic):
        return value.tobytes()  # bytes() of an integer would be that many zeros
    if isinstance(value, (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)):
        return bytes(value)
    if value is None:
        return bytes(8)
    address = getattr(value, "address", None)  # a Buffer
    if address is None and callable(pointer := getattr(value, "data_ptr", None)):  # a tensor of torch
        address = pointer()
    if isinstance(address, int):
        return address.to_bytes(8, "little")
    if isinstance(value, (bool, int, float)):
        raise CommandError(
            f"{value!r} has no size: say which, as numpy.uint32({value!r}) or ctypes.c_uint64({value!r}) do"
        )
    raise CommandError(
        f"a {type(value).__name__} is no kernel argument: a Buffer, None, a numpy or ctypes value, or bytes are"
    )


def pack(kernel: str, values: Sequence[Any], sizes: Sequence[int] | None) -> Packed:
    """`sizes` of the kernel's parameters; None where the driver does not tell them."""
    arguments = []
    for index, value in enumerate(values):
        try:
            arguments.append(as_bytes(value))
        except CommandError as error:
            raise CommandError(f"kernel {kernel}, argument {index}: {error.record.text}") from None
    if sizes is not None:
        if len(sizes) != len(arguments):
            raise CommandError(f"kernel {kernel} takes {len(sizes)} arguments, not {len(arguments)}")
        for index, (argument, size) in enumerate(zip(arguments, sizes, strict=True)):
            if len(argument) != size:
                raise CommandError(
                    f"kernel {kernel}, argument {index}: {size} bytes are wanted, and {type(values[index]).__name__} "
                    f"has {len(argument)}"
                )
    return Packed(arguments)
