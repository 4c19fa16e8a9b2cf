# SPDX-License-Identifier: Apache-2.0
"""The one door to libuccl_ep.so: loading it, and turning its values into Python's."""

from __future__ import annotations

import functools
import math
from typing import Any

from . import paths

try:
    from ._core import ffi as ffi
    from ._core import lib as lib
except ImportError as error:
    if error.name == "_cffi_backend":
        raise ImportError("uccl_ep needs cffi, which is not installed: pip install cffi") from error
    paths.installed_dir()  # says what to do if _core was never built
    raise

NULL: Any = ffi.NULL
ANY_RANK: int = lib.UCCL_EP_ANY_RANK
NO_CHANNEL: int = lib.UCCL_EP_NO_CHANNEL
NO_TICKET: int = lib.UCCL_EP_NO_TICKET
DEFAULT_TIMEOUT: int = lib.UCCL_EP_TIMEOUT_DEFAULT
OK: int = lib.UCCL_EP_OK


def text(pointer: Any) -> str:
    """A C string. The library's own texts are ASCII; a backend's may be anything."""
    return "" if pointer == NULL else ffi.string(pointer).decode("utf-8", "replace")


@functools.cache
def enum_names(type_name: str, prefix: str) -> dict[int, str]:
    """Of a C enumeration: {1: "PUT", ...} for ("uccl_ep_op", "UCCL_EP_OP_")."""
    elements: dict[int, str] = ffi.typeof(type_name).elements
    return {value: name.removeprefix(prefix) for value, name in elements.items()}


@functools.cache
def macro_names(prefix: str) -> dict[int, str]:
    """Of a family of integer macros: {1: "ORDER_WRITE_WRITE", ...} for "UCCL_EP_CAP_"."""
    return {getattr(lib, name): name.removeprefix(prefix) for name in dir(lib) if name.startswith(prefix)}


def status_name(status: int) -> str:
    return enum_names("uccl_ep_status", "UCCL_EP_").get(status, f"status {status}")


def status_value(name: str) -> int:
    value: int = getattr(lib, f"UCCL_EP_{name}")
    return value


def status_text(status: int) -> str:
    return text(lib.uccl_ep_status_text(status))


def nanoseconds(seconds: float | None) -> int:
    """A timeout. None: the configured one."""
    if seconds is None:
        return DEFAULT_TIMEOUT
    if not seconds >= 0:
        from .errors import CommandError  # which needs this module

        raise CommandError(f"a timeout is not negative: {seconds!r} s")
    # Everything waits for a bounded time; a century is what infinity gets.
    return 100 * 365 * 86400 * 10**9 if math.isinf(seconds) else min(int(seconds * 1e9), DEFAULT_TIMEOUT - 1)


def struct_dict(struct: Any) -> dict[str, int]:
    """The plain number fields of a C structure."""
    return {
        name: getattr(struct, name)
        for name, field in ffi.typeof(struct).fields
        if field.type.kind == "primitive" and not name.startswith("pad")
    }
