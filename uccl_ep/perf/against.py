# SPDX-License-Identifier: Apache-2.0
"""UCCL-EP's FIFO benchmark beside ours, in one session, and what our figures have to reach of it.

The program is given by its path: nothing of it is here. It prints one line for each number of GPU threads,

    Threads:  128 | FIFO Size: 2048 | GPU Pushes:  73.00 Mops/s | Proxy Processed:  72.90 Mops/s ...

and with -l, which waits for each push, the time of a round trip on the same line. A line counts if its FIFO is as large
as our rings. What the host has popped is compared with what our threads have taken.
"""

from __future__ import annotations

import re
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .bench import BenchError

TIMEOUT = 300.0
_LINE = re.compile(
    r"Threads:\s*(?P<threads>\d+) \| FIFO Size:\s*(?P<size>\d+) \| GPU Pushes:\s*(?P<pushed>[\d.]+) Mops/s "
    r"\| Proxy Processed:\s*(?P<popped>[\d.]+) Mops/s"
    r"(?: \| RTT Latency \(ns\) - Avg: (?P<mean>[\d.]+), Min: (?P<min>[\d.]+), P99: (?P<p99>[\d.]+))?"
)


def run(program: Path, *, latency: bool) -> str:
    command = [str(program), *(["-l"] if latency else [])]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=TIMEOUT,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        raise BenchError(f"{program}: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise BenchError(f"{' '.join(command)} did not end within {TIMEOUT:g} s") from None
    if done.returncode:
        raise BenchError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout


def rates(output: str, size: int) -> dict[int, float]:
    """Millions popped a second, by threads."""
    return {int(line["threads"]): float(line["popped"]) for line in _lines(output, size)}


def round_trip(output: str, size: int) -> dict[str, float]:
    """Nanoseconds, of one thread."""
    for line in _lines(output, size):
        if int(line["threads"]) == 1 and line["mean"] is not None:
            return {name: float(line[name]) for name in ("mean", "min", "p99")}
    raise BenchError(f"the other benchmark says nothing of round trips of one thread with a FIFO of {size}")


def _lines(output: str, size: int) -> list[re.Match[str]]:
    found = [match for match in _LINE.finditer(output) if int(match["size"]) == size]
    if not found:
        raise BenchError(f"the other benchmark printed no line for a FIFO of {size} that is understood")
    return found


def summary(outputs: Sequence[Mapping[str, str]], size: int) -> dict[str, Any]:
    """Medians over its runs, and all values. `outputs`: what it printed, {"rates": ..., "latency": ...} a run."""
    by_run = [rates(one["rates"], size) for one in outputs]
    trips = [round_trip(one["latency"], size) for one in outputs]
    threads = sorted(set.intersection(*(set(one) for one in by_run)))
    return {
        "runs": len(outputs),
        "fifo_size": size,
        "rates": [
            {"threads": n, "mops": statistics.median(values), "values": values}
            for n in threads
            for values in [[one[n] for one in by_run]]
        ],
        "round_trip_ns": {
            name: {"median": statistics.median(values), "values": values}
            for name in ("mean", "min", "p99")
            for values in [[one[name] for one in trips]]
        },
    }


# -------------------------------------------------------------------------------------------------------------- budgets


@dataclass(frozen=True)
class Budget:
    what: str
    forms: tuple[str, ...]
    producers: int | None  # of ours, and threads of theirs; None: the best on both sides
    must: float
    aim: float | None


BUDGETS = (
    Budget("single commands, 32 warps, no poster", ("single",), 32, 1.0, None),
    Budget("single commands, 128 warps, best form", ("single", "poster", "poster4"), 128, 2.5, 4.0),
    Budget("single commands, 512 warps, best form", ("single", "poster", "poster4"), 512, 8.0, 12.0),
    Budget("batches of 8", ("batch8",), None, 6.0, 8.0),
    Budget("batches of 32", ("batch32",), None, 9.0, 14.0),
)
ROUND_TRIP_MUST, ROUND_TRIP_AIM = 0.75, 0.6


def judge(
    ours: Sequence[Mapping[str, Any]], round_trip_ns: float | None, theirs: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """`ours`: rows with form, producers and mops (the median). A budget whose figures were not taken is left open."""
    their_rates = {row["threads"]: row["mops"] for row in theirs["rates"]}
    best = max(their_rates.values())
    verdicts: list[dict[str, Any]] = []
    for budget in BUDGETS:
        rows = [row for row in ours if row["form"] in budget.forms and budget.producers in (None, row["producers"])]
        other = best if budget.producers is None else their_rates.get(budget.producers)
        row = max(rows, key=lambda one: one["mops"], default=None)
        entry: dict[str, Any] = {
            "what": budget.what,
            "must": budget.must,
            "aim": budget.aim,
            "ratio": None,
            "met": None,
        }
        if row is not None and other:
            ratio = row["mops"] / other
            entry |= {
                "ours": row["mops"], "form": row["form"], "producers": row["producers"], "theirs": other,
                "ratio": ratio, "met": ratio >= budget.must, "of_their_best": row["mops"] / best,
                "aim_met": budget.aim is not None and ratio >= budget.aim,
            }  # fmt: skip
        verdicts.append(entry)
    mean = theirs["round_trip_ns"]["mean"]["median"]
    entry = {"what": "round trip, mean", "must": ROUND_TRIP_MUST, "aim": ROUND_TRIP_AIM, "ratio": None, "met": None}
    if round_trip_ns and mean:
        ratio = round_trip_ns / mean
        entry |= {
            "ours": round_trip_ns, "theirs": mean, "ratio": ratio, "met": ratio <= ROUND_TRIP_MUST,
            "aim_met": ratio <= ROUND_TRIP_AIM,
        }  # fmt: skip
    verdicts.append(entry)
    return verdicts
