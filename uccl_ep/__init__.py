# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel communication through any NIC.

Start at `Communicator` (uccl_ep/communicator.py) and `uccl_ep.bootstrap`. docs/contract.md says what may be relied on.

Names are loaded when they are first used: importing the package costs next to nothing, so that a pytest plugin, or a
command line that only wants the version, does not load numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors
    from .bootstrap import (
        Bootstrap,
        LocalBootstrap,
        LocalGroup,
        MpiBootstrap,
        SingleProcess,
        TorchGroupBootstrap,
        TorchStoreBootstrap,
    )
    from .commands import COMMAND_DTYPE, Op, decode, encode
    from .communicator import Channel, Communicator, Ticket
    from .errors import UcclEpError

    __version__: str

__all__ = [
    "COMMAND_DTYPE",
    "Bootstrap",
    "Channel",
    "Communicator",
    "LocalBootstrap",
    "LocalGroup",
    "MpiBootstrap",
    "Op",
    "SingleProcess",
    "Ticket",
    "TorchGroupBootstrap",
    "TorchStoreBootstrap",
    "UcclEpError",
    "__version__",
    "decode",
    "encode",
    "errors",
]

_HOMES = {
    "bootstrap": (
        "Bootstrap",
        "LocalBootstrap",
        "LocalGroup",
        "MpiBootstrap",
        "SingleProcess",
        "TorchGroupBootstrap",
        "TorchStoreBootstrap",
    ),
    "commands": ("COMMAND_DTYPE", "Op", "decode", "encode"),
    "communicator": ("Channel", "Communicator", "Ticket"),
    "errors": ("UcclEpError",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("uccl_ep")
    elif name == "errors":
        return importlib.import_module(".errors", __name__)
    elif name in _HOME:
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
