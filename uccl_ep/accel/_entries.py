# SPDX-License-Identifier: Apache-2.0
"""How the emulation finds kernels: what is put behind a source that is compiled for the CPU.

Run as a program it does that to a file: the build, too, compiles kernels. So it needs nothing but Python.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_ENTRY = re.compile(r"UCCL_EP_EMULATION_ENTRY\s*\(\s*(\w+)\s*\)")
_BOUNDS = r"(?:__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*)?"
_KERNEL = re.compile(rf"\bUCCL_EP_KERNEL\s+{_BOUNDS}void\s+{_BOUNDS}(\w+)\s*\(")


def kernel_names(source: str) -> tuple[list[str], list[str]]:
    """What is written `UCCL_EP_KERNEL void name(`, in order; and which of them the source makes known to the emulation
    itself."""
    bare = _COMMENT_OR_STRING.sub(" ", source)
    entries = list(dict.fromkeys(_ENTRY.findall(bare)))
    return list(dict.fromkeys([*_KERNEL.findall(bare), *entries])), entries


def entries(source: str) -> str:
    """How the emulation calls a kernel, and their names, behind the source."""
    kernels, known = kernel_names(source)
    made = "".join(f"UCCL_EP_EMULATION_ENTRY({name})\n" for name in kernels if name not in known)
    names = "".join(f'"{name}", ' for name in kernels)
    return (
        '\n#line 1 "entries of kernels"\n#include <uccl_ep/device_platform.h>\n'
        f'{made}extern "C" __attribute__((visibility("default"))) const char *const *uccl_ep_kernels() {{\n'
        f"    static const char *const names[] = {{{names}0}};\n    return names;\n}}\n"
    )


if __name__ == "__main__":
    given, target = (Path(argument) for argument in sys.argv[1:])
    text = given.read_text()
    target.write_text(f'#line 1 "{given.name}"\n{text}{entries(text)}')
