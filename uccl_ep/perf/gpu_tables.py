# SPDX-License-Identifier: Apache-2.0
"""What gpu.py measured, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console


def show(console: Console, result: Mapping[str, Any]) -> None:
    device = result["device"]
    cpus = f"CPUs {device['cpus']}" if device["cpus"] else "CPUs that the scheduler chose"
    console.print(
        f"{device['name']} ({device['architecture']}), driver {device['driver'] or 'none'}, clocks {device['clocks']}, "
        f"{device['multiprocessors']} multiprocessors; draining threads on {cpus}",
        soft_wrap=True,
        markup=False,
    )
    _rates(console, result)
    _latencies(console, result)
    _fewer(console, result)
    _slow(console, result)
    for row in result.get("soak", ()):
        console.print(
            f"{row['form']}, {row['producers']} warps: {row['commands']:,} commands in {row['seconds']:.1f} s: none "
            "torn, lost, doubled or out of order"
        )
    _proxies(console, result)
    if "against" in result:
        _against(console, result)
    console.print(f"all that took {result['seconds']:.0f} s")


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("form", "budget", "") else "right")
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _range(row: Mapping[str, Any]) -> str:
    return f"{_number(row['mops'])} ({_number(row['min'])}..{_number(row['max'])})"


def _rates(console: Console, result: Mapping[str, Any]) -> None:
    rows = result["rates"]
    producers = sorted({row["producers"] for row in rows})
    table = _table(
        f"Commands taken, M/s: median (min..max). {result['payload_bytes']} bytes written before each, every command "
        f"checked. Up to {max(row['rings'] for row in rows)} rings of {result['ring_slots']} slots, "
        f"{max(row['threads'] for row in rows)} threads",
        "form", *(f"{n} warps" for n in producers),
    )  # fmt: skip
    for form in dict.fromkeys(row["form"] for row in rows):
        by_producers = {row["producers"]: row for row in rows if row["form"] == form}
        table.add_row(form, *(_range(by_producers[n]) if n in by_producers else "" for n in producers))
    console.print(table)


def _latencies(console: Console, result: Mapping[str, Any]) -> None:
    table = _table("One warp, one by one, ns: medians over the runs", "", "mean", "min", "median", "p99", "samples")
    for name, row in result["latency_ns"].items():
        table.add_row(name, *(f"{row[key]:,.0f}" for key in ("mean", "min", "median", "p99")), f"{row['samples']:,}")
    console.print(table)


def _fewer(console: Console, result: Mapping[str, Any]) -> None:
    table = _table("Fewer rings and one thread, M/s", "form", "warps", "rings", "threads", "M/s")
    for row in result["fewer_threads"]:
        table.add_row(row["form"], str(row["producers"]), str(row["rings"]), str(row["threads"]), _range(row))
    console.print(table)


def _slow(console: Console, result: Mapping[str, Any]) -> None:
    table = _table(
        "A consumer that is too slow: nothing lost", "form", "warps", "rings", "slots", "M/s", "it takes M/s"
    )
    for row in result["slow_consumer"]:
        table.add_row(
            row["form"], str(row["producers"]), str(row["rings"]), str(row["slots"]), _number(row["mops"]),
            _number(row["consumer_mops"]),
        )  # fmt: skip
    console.print(table)


def _proxies(console: Console, result: Mapping[str, Any]) -> None:
    table = _table(
        "The core's proxies, on a NIC that does nothing, until all is complete, M/s",
        "form", "warps", "channels", "proxies", "M/s",
    )  # fmt: skip
    for row in result["proxies"]:
        table.add_row(row["form"], str(row["producers"]), str(row["rings"]), str(row["proxies"]), _range(row))
    console.print(table)


def _against(console: Console, result: Mapping[str, Any]) -> None:
    theirs = result["against"]
    rates = ", ".join(f"{row['threads']}: {row['mops']:.1f}" for row in theirs["rates"])
    trip = theirs["round_trip_ns"]
    console.print(
        f"{theirs['program']}, {theirs['runs']} runs in the order {' '.join(result['order'])}: M/s popped by threads "
        f"{rates}; round trip {trip['mean']['median']:,.0f} ns (min {trip['min']['median']:,.0f}, "
        f"p99 {trip['p99']['median']:,.0f})",
        soft_wrap=True,
    )
    table = _table("Budgets", "budget", "ours", "theirs", "ratio", "must", "aim", "")
    for row in result["budgets"]:
        must, aim = f"{row['must']:g}x", "" if row["aim"] is None else f"{row['aim']:g}x"
        if row["ratio"] is None:
            table.add_row(row["what"], "", "", "", must, aim, "not measured")
            continue
        verdict = "aim met" if row["aim_met"] else "met" if row["met"] else "missed"
        table.add_row(
            row["what"], f"{row['ours']:,.1f}", f"{row['theirs']:,.1f}", f"{row['ratio']:.2f}x", must, aim, verdict
        )
    console.print(table)
