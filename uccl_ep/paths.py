# SPDX-License-Identifier: Apache-2.0
"""Where the installed libraries and headers are. Answers without loading them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def installed_dir() -> Path:
    """The folder that holds _core, lib/ and include/: beside this file, or in site-packages of an editable install."""
    spec = find_spec("uccl_ep._core")
    if spec is None or spec.origin is None:
        raise ImportError(
            "uccl_ep._core is missing: this is the source tree, not an installation. Run `make build` and start "
            ".venv/bin/python from another folder, or install with `pip install .`"
        )
    return Path(spec.origin).parent


def library_dir() -> Path:
    return installed_dir() / "lib"


def include_dir() -> Path:
    """What to give to a compiler's -I: headers are included as <uccl_ep/backend.h>."""
    return installed_dir() / "include"


def kernels_dir() -> Path:
    """Source code of the kernels that uccl_ep brings."""
    return installed_dir() / "kernels"


def core_library() -> Path:
    return library_dir() / "libuccl_ep.so.0"


def mutation_dir() -> Path:
    """For LD_LIBRARY_PATH: a core of the same name with fault points."""
    return library_dir() / "mutation"
