# SPDX-License-Identifier: Apache-2.0
"""The control table of libuccl_ep_backend_sim.so, as csrc/backends/sim/sim.h declares it.

The header travels with the package and is read where it is used, so that there is one declaration. cffi's ABI mode: the
table is data of a library that is loaded at run time, and holds its own size and version.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import cffi

from .. import backends, errors, paths

VERSION = 2
_HEADER = "sim.h"


def header_text() -> str:
    """sim.h without what is not cffi's: comments, preprocessor lines, the C++ bracket, the entry function."""
    text = (paths.installed_dir() / "simulator" / _HEADER).read_text("utf-8")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    constants = re.findall(r"^#define (UCCL_EP_SIM_\w+) (\d+)u?\s*$", text, re.MULTILINE)
    text = re.sub(r"^#ifdef __cplusplus\n.*?^#endif\n", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    lines += [f"#define {name} {value}" for name, value in constants]
    # Its values are status.h's, which the extension module knows; here it is a number.
    return "typedef int uccl_ep_status;\n" + "\n".join(lines)


@functools.cache
def load() -> tuple[Any, Any, Any]:
    """(ffi, the table, the library, which must stay alive)."""
    ffi = cffi.FFI()
    ffi.cdef(header_text())
    path = backends.find("sim").library
    try:
        library = ffi.dlopen(str(path))
        table = library.uccl_ep_sim_entry()
    except (OSError, AttributeError) as error:
        raise errors.NotABackend(f"{path} is not the simulator: {error}") from error
    if table.version != VERSION or table.size < ffi.sizeof("uccl_ep_sim"):
        raise errors.AbiMismatch(
            f"{path} speaks version {table.version} of sim.h ({table.size} bytes), and this package version {VERSION} "
            f"({ffi.sizeof('uccl_ep_sim')} bytes): install both from one wheel"
        )
    return ffi, table, library


def text_of(value: Any) -> str:
    ffi, _, _ = load()
    return "" if value == ffi.NULL else ffi.string(value).decode("utf-8", "replace")
