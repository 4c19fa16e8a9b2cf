# SPDX-License-Identifier: Apache-2.0
"""What commands share."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from .. import errors
from ..conformance import files


def pick(value: str, valid: Iterable[str], option: str) -> str:
    """`value` if it is valid; else exit code 2, the valid ones and the nearest match (M9)."""
    names = list(valid)
    if value not in names:
        raise typer.BadParameter(f"{value!r}; {errors.nearest(value, names)}", param_hint=option)
    return value


def writable(path: Path, option: str) -> None:
    """Exit code 2 now, rather than an error after all the work. Changes nothing."""
    try:
        files.check_writable(path)
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint=option) from None


def write_report(path: Path, text: str) -> None:
    """Whole or not at all; `-` is the standard output."""
    if str(path) == "-":
        print(text)
    else:
        files.write(path, f"{text}\n".encode())


def json_text(schema: str, **content: Any) -> str:
    """One JSON document with its schema named. NaN and infinity, which JSON has not, become null."""
    return json.dumps({"schema": schema, **_finite(content)}, indent=2, default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
