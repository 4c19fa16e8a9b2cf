# SPDX-License-Identifier: Apache-2.0
"""Make _core.c, the cffi extension over libuccl_ep, from the public headers.

The headers are the only place where anything is declared. The compiler's preprocessor expands them, this script keeps
what cffi understands (types, enumerations, exported functions, inline functions as prototypes, integer macros), and the
compiler checks every layout and value again when it compiles the result: cffi's API mode.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import cffi

HEADER = "uccl_ep/uccl_ep.h"

# Called by the library, implemented in uccl_ep/communicator.py.
CALLBACKS = """
extern "Python" int uccl_ep_py_allgather(void *context, const void *mine, uint32_t bytes, void *all,
                                         uint64_t timeout_ns, char *text);
extern "Python" void uccl_ep_py_log(void *context, uint32_t level, const char *text);
"""


def preprocess(cc: list[str], include: Path, source: str, *options: str) -> str:
    command = [*cc, "-std=gnu11", "-E", *options, "-I", str(include), "-x", "c", "-"]
    return subprocess.run(command, input=source, stdout=subprocess.PIPE, text=True, check=True).stdout


def own_text(expanded: str, include: Path) -> str:
    """The preprocessed lines that come from our headers, not from the system's."""
    kept: list[str] = []
    ours = False
    for line in expanded.splitlines():
        marker = re.match(r'# \d+ "([^"]*)"', line)
        if marker:
            ours = Path(marker[1]).is_relative_to(include)
        elif ours:
            kept.append(line)
    return "\n".join(kept)


def declarations(text: str) -> Iterator[str]:
    """Split at the ends of top-level declarations; a function keeps its body."""
    start = depth = 0
    for end, character in enumerate(text):
        if character in "{(":
            depth += 1
        elif character in "})":
            depth -= 1
        done = character == ";" or (character == "}" and "static inline" in text[start:end])
        if depth == 0 and done:
            yield " ".join(text[start : end + 1].split())
            start = end + 1


def for_cffi(declaration: str) -> str | None:
    if declaration.startswith("_Static_assert"):
        return None
    if declaration.startswith("static inline"):
        return declaration[: declaration.index("{")].rstrip() + ";"
    if declaration.startswith(("typedef", "enum", "struct")):
        return declaration
    exported = '__attribute__((visibility("default")))'
    if declaration.startswith(exported):
        return declaration[len(exported) :].strip()
    # What is left is what a backend exports, not the library.
    return None


def integer_macros(cc: list[str], include: Path) -> Iterator[str]:
    source = f'#include "{HEADER}"\n'
    defined = preprocess(cc, include, source, "-dM")
    names = sorted(re.findall(r"^#define (UCCL_EP_\w+) \S", defined, re.MULTILINE))
    expanded = preprocess(cc, include, source + "".join(f"@@{name} = {name}\n" for name in names), "-P")
    # The name itself is expanded too where it stands alone, so take the name by position, not from the text.
    values = re.findall(r"^@@.* = (.*)$", expanded, re.MULTILINE)
    if len(values) != len(names):
        raise SystemExit(f"build_core: {len(names)} macros, {len(values)} values")
    for name, value in zip(names, values, strict=True):
        if re.fullmatch(r"(0[xX][\da-fA-F]+|\d+|[uUlL]|UCCL_EP_\w+|\(uccl_ep_u\d+\)|[-+*~<>|&() ])+", value):
            yield f"#define {name} ..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cc", nargs="+", default=["cc"])
    parser.add_argument("--include", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    include: Path = options.include.resolve()
    text = own_text(preprocess(options.cc, include, f'#include "{HEADER}"\n'), include)
    kept = [cleaned for cleaned in map(for_cffi, declarations(text)) if cleaned]
    ffi = cffi.FFI()
    ffi.cdef("\n".join([*kept, *integer_macros(options.cc, include), CALLBACKS]))
    ffi.set_source("uccl_ep._core", f'#include "{HEADER}"\n')
    ffi.emit_c_code(str(options.output))


if __name__ == "__main__":
    main()
