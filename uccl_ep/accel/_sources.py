# SPDX-License-Identifier: Apache-2.0
"""Source code of kernels: our headers and kernels, and from source to what a driver loads, through the cache."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import paths
from ..errors import CommandError
from ._cache import Cache, key
from ._driver import Compiler

_FILE = r"\w[\w.+-]*"


@functools.cache
def own_headers() -> Mapping[str, str]:
    """All of include/uccl_ep, as kernels name them: "uccl_ep/device.h"."""
    folder = paths.include_dir()
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.glob("uccl_ep/*.h"))}


def compile_cached(
    compiler: Compiler,
    source: str,
    name: str,
    architecture: str,
    options: Sequence[str],
    headers: Mapping[str, str],
    cache: Cache | None,
) -> bytes:
    if not re.fullmatch(_FILE, name):
        raise CommandError(f"{name!r} is no file's name: the compiler's messages need one, as 'kernel.cu'")
    if isinstance(options, str):
        raise CommandError(f"options are a list of strings, not {options!r}")
    ours = own_headers()
    if taken := sorted(ours.keys() & headers.keys()):
        raise CommandError(f"{taken[0]} is a header of uccl_ep: give yours another name")
    for header in headers:
        if not re.fullmatch(rf"({_FILE}/)*{_FILE}", header):
            raise CommandError(f"{header!r} is no header's name, as 'mine.h' or 'mine/shapes.h' are")
    everything = {**ours, **headers}
    if cache is None:
        return compiler.compile(source, name, architecture, options, everything)
    parts = [compiler.kind, compiler.version(), architecture, name, source, *options, "", *_flat(everything)]
    entry = key(_how(type(compiler).__module__), *parts)
    image = cache.get(entry)
    if image is None:
        image = compiler.compile(source, name, architecture, options, everything)
        cache.put(entry, image)
    return image


@functools.cache
def _how(module: str) -> bytes:
    """What we make of source and compiler ourselves, flags and all: the code that does it."""
    files = [Path(sys.modules[module].__file__ or ""), *Path(__file__).parent.glob("_*.py")]
    return b"".join(path.read_bytes() for path in sorted(files))


def _flat(headers: Mapping[str, str]) -> Sequence[str]:
    return [text for item in sorted(headers.items()) for text in item]
