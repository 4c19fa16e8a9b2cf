# SPDX-License-Identifier: Apache-2.0
"""Commands as numpy sees them. The layout and the codec are those of command.h, asked from the compiled library."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _native, errors
from ._native import ffi, lib


class Op(enum.IntEnum):
    PUT = lib.UCCL_EP_OP_PUT
    SIGNAL = lib.UCCL_EP_OP_SIGNAL
    PUT_SIGNAL = lib.UCCL_EP_OP_PUT_SIGNAL
    FLUSH = lib.UCCL_EP_OP_FLUSH


def struct_dtype(type_name: str) -> np.dtype[np.void]:
    """The numpy dtype of a C structure of integers."""
    c_type = ffi.typeof(type_name)
    return np.dtype(
        {
            "names": [name for name, _ in c_type.fields],
            "formats": [f"u{ffi.sizeof(field.type)}" for _, field in c_type.fields],
            "offsets": [field.offset for _, field in c_type.fields],
            "itemsize": ffi.sizeof(c_type),
        }
    )


# op, target, local, remote, add, bytes, slot, granularity, reserved
COMMAND_DTYPE = struct_dtype("uccl_ep_command")


def checked_commands(commands: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if commands.dtype != COMMAND_DTYPE or commands.ndim != 1:
        raise errors.CommandError(
            f"commands must be an array of uccl_ep.COMMAND_DTYPE of shape [n], not {commands.dtype} of {commands.shape}"
        )
    return np.ascontiguousarray(commands)


def checked_words(words: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if words.dtype != np.uint64 or words.ndim != 2 or words.shape[1] != 2:
        raise errors.CommandError(
            f"words must be an array of uint64 of shape [n, 2], not {words.dtype} of {words.shape}"
        )
    return np.ascontiguousarray(words)


def encode(commands: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Words [n, 2], parity bits clear. Raises CommandError naming the first command that does not fit."""
    commands = checked_commands(commands)
    words = np.zeros((len(commands), 2), np.uint64)
    source = ffi.from_buffer("uccl_ep_command[]", commands)
    out = ffi.from_buffer("uccl_ep_words[]", words, require_writable=True)
    for index in range(len(commands)):
        status = lib.uccl_ep_encode(source + index, out + index)
        if status != _native.OK:
            raise errors.from_record(
                errors.ErrorRecord(status, text=f"command {index} cannot be encoded: {commands[index]}")
            )
    return words


def decode(words: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """The commands, and which of them are well formed; of a malformed one only op and target mean something."""
    words = checked_words(words)
    commands = np.zeros(len(words), COMMAND_DTYPE)
    well_formed = np.zeros(len(words), np.bool_)
    out = ffi.from_buffer("uccl_ep_command[]", commands, require_writable=True)
    for index, (first, second) in enumerate(words.tolist()):
        well_formed[index] = lib.uccl_ep_decode(first, second, out + index) == _native.OK
    return commands, well_formed
