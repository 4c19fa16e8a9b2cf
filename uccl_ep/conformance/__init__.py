# SPDX-License-Identifier: Apache-2.0
"""The conformance suite: one registry of cases, run by a command line, by pytest or from Python.

    from uccl_ep.conformance import Options, run_suite
    result = run_suite(Options(backend="shm", ranks=4, level="full", seed=1))

Importing this package loads nothing else: pytest does so in every project on the machine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .context import Context
    from .registry import case
    from .results import CaseResult, SuiteResult
    from .runner import Options, run_suite

__all__ = ["CaseResult", "Context", "Options", "SuiteResult", "case", "run_suite"]

_HOME = {
    "Context": "context",
    "case": "registry",
    "CaseResult": "results",
    "SuiteResult": "results",
    "Options": "runner",
    "run_suite": "runner",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
