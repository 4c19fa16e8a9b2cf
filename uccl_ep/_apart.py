# SPDX-License-Identifier: Apache-2.0
"""Asking a library something in a process of its own: one that crashes or hangs must not take others with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from . import errors

# Not from the current folder, which may hold anything, also a source tree of uccl_ep. The answer is the last line: a
# library may print when it is loaded.
_PROGRAM = """
import importlib, sys
sys.path = [path for path in sys.path if path]
print("\\n" + getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(sys.argv[3]))
"""


def ask(module: str, function: str, library: str | os.PathLike[str], seconds: float) -> Any:
    """module.function(library) returns a JSON text; what it says, here."""
    command = [sys.executable, "-c", _PROGRAM, module, function, os.fspath(library)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise errors.BackendFault(f"{library} did not answer within {seconds:g} s") from None
    except (ValueError, IndexError):
        how = f"was killed by signal {-done.returncode}" if done.returncode < 0 else f"ended with {done.returncode}"
        said = done.stderr.decode(errors="replace").strip().splitlines()
        last = f": {said[-1]}" if said else ""
        raise errors.BackendFault(f"loading {library} ended the process that did it: it {how}{last}") from None
