# SPDX-License-Identifier: Apache-2.0
"""What a command costs the proxy, on a NIC that does nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import bench

if TYPE_CHECKING:
    from rich.console import Console

Say = Callable[[str], None]

BUDGET_INSTRUCTIONS = 120
BUDGET_RATE = 20e6
# The budget is for one operation of the NIC a command.
BUDGETED = ("put, 1 target", "put, 1 target, adjacent", "signal, 1 target")

# Name and options of a mix. 64 ranks, 14336 bytes a put, unless it says otherwise.
MIXES: dict[str, dict[str, Any]] = {
    "put, 1 target": {"mix": "put"},
    "put, 1 target, adjacent": {"mix": "put_adjacent"},
    "signal, 1 target": {"mix": "signal"},
    "put_signal, 1 target": {"mix": "put_signal"},
    "put_signal, 8 targets": {"mix": "put_signal", "targets": 8},
    "put_signal, 64 targets": {"mix": "put_signal", "targets": 64},
    "put_signal, 8 targets, sender hold": {"mix": "put_signal", "targets": 8, "strategy": "sender_hold"},
    "put_signal, 8 targets, a completion each": {"mix": "put_signal", "targets": 8, "complete": "each"},
}
LIVE: dict[str, dict[str, Any]] = {
    "1 producer, one by one": {"producers": 1},
    "2 producers, one by one": {"producers": 2},
    "4 producers, one by one": {"producers": 4},
    "1 producer, 32 together": {"producers": 1, "batch": 32},
    "4 producers, 32 together": {"producers": 4, "batch": 32},
}
IDLE_RANKS = (8, 4096)
_COUNTED_ROUNDS = 10
_COUNTED_PASSES = 2048


def measure(say: Say, *, rounds: int, instructions: bool) -> dict[str, Any]:
    backend = bench.noop_backend()
    result: dict[str, Any] = {"prefilled": [], "live": [], "idle": []}
    for name, options in MIXES.items():
        say(f"prefilled ring: {name}")
        (figures,) = bench.run(backend, "prefilled", rounds=rounds, **options)
        result["prefilled"].append({"name": name, **figures})
    for name, options in LIVE.items():
        say(f"live: {name}")
        (figures,) = bench.run(backend, "live", mix="put", **options)
        result["live"].append({"name": name, **figures})
    for ranks in IDLE_RANKS:
        say(f"idle, {ranks} ranks")
        (figures,) = bench.run(backend, "idle", ranks=ranks)
        result["idle"].append(figures)
    if instructions:
        result["instructions"] = count(say)
    return result


def count(say: Say) -> dict[str, Any]:
    """Instructions a command and an idle pass: the same on every machine with the same compiler.

    The clock stands still meanwhile: housekeeping, a few hundred times a second, would come by chance.
    """
    missing = bench.missing_valgrind()
    if missing:
        say(missing)
        return {"skipped": missing}
    backend = bench.noop_backend()
    commands = []
    for name, options in MIXES.items():
        say(f"counting instructions: {name}")
        figures, by_library = bench.count_instructions(backend, "prefilled", rounds=_COUNTED_ROUNDS, still=1, **options)
        commands.append({"name": name, **_each(by_library, figures["commands"])})
    idle = []
    for ranks in IDLE_RANKS:
        say(f"counting instructions: idle, {ranks} ranks")
        few, many = (
            sum(bench.count_instructions(backend, "idle", ranks=ranks, passes=passes, still=1)[1].values())
            for passes in (_COUNTED_PASSES, 2 * _COUNTED_PASSES)
        )
        # The difference: what the first pass does once is not what a pass costs.
        idle.append({"ranks": ranks, "instructions": (many - few) / _COUNTED_PASSES})
    return {"commands": commands, "idle": idle}


def _each(by_library: dict[str, int], count: int) -> dict[str, float]:
    backend = sum(cost for name, cost in by_library.items() if "backend" in name)
    total = sum(by_library.values())
    return {"instructions": total / count, "of_which_backend": backend / count}


def show(console: Console, result: dict[str, Any]) -> None:
    from rich.table import Table

    counted = result.get("instructions", {})
    per_command = {row["name"]: row["instructions"] for row in counted.get("commands", ())}
    table = Table(title="The proxy, from a full ring to a NIC that does nothing", title_justify="left")
    for column in ("command", "ns", "M/s", *(("instructions",) if per_command else ()), "budget"):
        table.add_column(column, justify="left" if column in ("command", "budget") else "right")
    for row in result["prefilled"]:
        cells = [row["name"], f"{row['ns_per_command']:.1f}", f"{1e3 / row['ns_per_command']:.1f}"]
        if per_command:
            cells.append(f"{per_command[row['name']]:.0f}")
        if row["name"] in BUDGETED:
            cells.append(f"{BUDGET_INSTRUCTIONS} instructions, {BUDGET_RATE / 1e6:.0f} M/s")
        table.add_row(*cells)
    console.print(table)
    if "skipped" in counted:
        console.print(counted["skipped"])

    table = Table(title="Live producers, put", title_justify="left")
    for column in ("", "ns a command", "M/s"):
        table.add_column(column, justify="left" if not column else "right")
    for row in result["live"]:
        table.add_row(row["name"], f"{row['ns_per_command']:.1f}", f"{1e3 / row['ns_per_command']:.1f}")
    console.print(table)

    idle = {row["ranks"]: row["instructions"] for row in counted.get("idle", ())}
    for row in result["idle"]:
        line = f"an idle pass, {row['ranks']} ranks: {row['ns_per_pass']:.1f} ns"
        console.print(line + (f", {idle[row['ranks']]:.1f} instructions" if idle else ""))
