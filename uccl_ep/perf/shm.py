# SPDX-License-Identifier: Apache-2.0
"""Puts between two processes over shared memory, beside memcpy of the same sizes and places in the same run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import backends
from . import bench
from .proxy import Say

if TYPE_CHECKING:
    from rich.console import Console


def measure(say: Say, *, rounds: int) -> dict[str, Any]:
    say("two processes over shared memory, every byte checked")
    return arrange(bench.run(backends.find("shm").library, "pair", rounds=rounds))


def arrange(lines: list[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {"put": [], "put_quiet": [], "signal": {}}
    for line in lines:
        what = line.pop("what")
        if what == "signal":
            result["signal"] = line
        else:
            result[what].append(line)
    for line in result["put"]:
        line["gigabytes_per_second"] = line["bytes"] / line["put_ns"]
        line["memcpy_gigabytes_per_second"] = line["bytes"] / line["memcpy_ns"]
        line["of_memcpy"] = line["memcpy_ns"] / line["put_ns"]
    return result


def size_text(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024 or unit == "MiB":
            return f"{count} {unit}"
        count //= 1024
    raise AssertionError


def show(console: Console, result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title="Puts over shared memory, every byte checked", title_justify="left")
    for column in ("size", "ns a put", "puts/s", "GB/s", "memcpy GB/s", "of memcpy"):
        table.add_column(column, justify="right")
    for row in result["put"]:
        table.add_row(
            size_text(row["bytes"]),
            f"{row['put_ns']:,.0f}",
            f"{1e9 / row['put_ns']:,.0f}",
            f"{row['gigabytes_per_second']:.2f}",
            f"{row['memcpy_gigabytes_per_second']:.2f}",
            f"{row['of_memcpy']:.2f}x",
        )
    console.print(table)
    latencies = ", ".join(f"{size_text(row['bytes'])} {row['ns'] / 1e3:.2f} us" for row in result["put_quiet"])
    console.print(f"a put and its quiet: {latencies}")
    console.print(f"a signal from one rank's wait to the other's: {result['signal']['ns'] / 1e3:.2f} us")
