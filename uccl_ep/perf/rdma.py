# SPDX-License-Identifier: Apache-2.0
"""Puts between two processes over RDMA devices of this machine, beside the transport's own benchmarks (perftest): the
same devices, sizes, windows, machine and CPUs. Every byte of ours is checked at the target.

A turn is a measurement of each, one right after the other, in one order and then in the other: what a machine is like
changes from second to second, so that a ratio is one of neighbours, and the figure is the median of the turns' ratios.

Of ours everything counts: a call for each put, the ring, the proxy, the backend. ib_write_bw posts to the NIC itself.
It never sleeps, nor does the proxy of our rank 0 meanwhile; its server does, and so does that of our rank 1.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .. import backends
from . import bench
from .proxy import Say
from .shm import size_text

if TYPE_CHECKING:
    from rich.console import Console

SIZES = (64, 4096, 65536)
_COUNTS = {64: 40000, 4096: 16000}  # puts of a measurement; fewer of what is larger
_FEW = 1500
# As perftest's two do: the one that sends polls, and the one that is written to sleeps.
_WAITS: dict[str, Any] = {"spin": 1 << 20, "other_idle_sleep_ns": 10_000_000}
_LATENCY_TURNS = 5  # of many each
_SECONDS = 120.0
# What ours has to reach of ib_write_bw's message rate: where messages are so small that the proxy shows, and above.
MUST_SMALL, MUST = 0.8, 0.9


def must(size: int) -> float:
    return MUST if size >= 4096 else MUST_SMALL


def measure(
    say: Say,
    *,
    backend: str,
    devices: Sequence[str],
    nic_options: str,
    gid_index: int,
    window: int,
    repeats: int,
    scale: float = 1.0,
    sizes: Sequence[int] = SIZES,
    cpus: Sequence[Sequence[int]] = ((), ()),
) -> dict[str, Any]:
    """`devices`: of rank 0, which sends, and of rank 1. `scale`: of how many puts a measurement takes. `cpus`: that all
    threads of rank 0 may use, and those of rank 1; perftest's client and server the same. None: as this process.
    `operations` of a row: what the proxy of rank 0 did for all its puts. Reads are those that made bytes visible."""
    library = backends.find(backend).library
    missing = [name for name in ("ib_write_bw", "ib_write_lat", "ib_atomic_lat") if shutil.which(name) is None]
    if missing:
        raise bench.BenchError(f"not found: {', '.join(missing)}. On Debian: apt-get install perftest")
    more: dict[str, Any] = {"nic_options": nic_options} if nic_options else {}
    more |= {"device": devices[0], "other_device": devices[1], "rounds": 1}
    for name, each in zip(("cpus", "other_cpus"), cpus, strict=True):
        if missing_cpus := set(each) - os.sched_getaffinity(0):
            raise bench.BenchError(f"CPUs {sorted(missing_cpus)} are none that this process may use (taskset -p)")
        if each:
            more[name] = "+".join(map(str, each))
    rows = []
    latencies: dict[str, list[float]] = {}
    for size in sizes:
        count = max(64, int(_COUNTS.get(size, _FEW) * scale))
        ours: list[float] = []
        theirs: list[float] = []
        operations: dict[str, int] = dict.fromkeys(("submits", "completions", "reads", "sleeps"), 0)
        for turn in range(repeats):
            say(f"{size_text(size)}, {turn + 1} of {repeats}")
            for is_ours in (turn % 2 == 0, turn % 2 != 0):
                if is_ours:
                    puts: dict[str, Any] = {"bytes": size, "commands": count, "window": window, "latencies": 1}
                    lines = bench.run(library, "rdma", **puts, **_WAITS, **more)
                    (put,) = (line for line in lines if line["what"] == "put")
                    ours.append(1e9 / put["put_ns"])
                    for name in operations:
                        operations[name] += put[name]
                else:
                    words = ["-s", str(size), "-n", str(count), "-t", str(window)]
                    theirs.append(1e6 * _perftest("ib_write_bw", devices, gid_index, words, cpus)[4])
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        ratio = statistics.median(ratios)
        rows.append(
            {
                "bytes": size,
                "count": count,
                "puts_per_second": statistics.median(ours),
                "values": ours,
                "operations": operations,
                "ib_write_bw_per_second": statistics.median(theirs),
                "ib_write_bw_values": theirs,
                "ratio": ratio,
                "ratios": ratios,
                "must": must(size),
                "met": ratio >= must(size),
            }
        )
    few = max(64, min(2000, int(2000 * scale)))
    for turn in range(min(repeats, _LATENCY_TURNS)):
        say(f"latencies, {turn + 1} of {min(repeats, _LATENCY_TURNS)}")
        for line in bench.run(library, "rdma", bytes=16, commands=64, latencies=few, **more):
            if line["what"] != "put":
                latencies.setdefault(line["what"], []).append(line["ns"] / 1e3)
        for program, words in (("ib_write_lat", ["-s", "16"]), ("ib_atomic_lat", [])):
            found = _perftest(program, devices, gid_index, [*words, "-n", str(few)], cpus)
            latencies.setdefault(program, []).append(found[4])
    return {
        "backend": backend, "devices": list(devices), "cpus": [list(each) for each in cpus], "window": window,
        "repeats": repeats, "rates": rows,
        "latency_us": {name: {"median": statistics.median(each), "values": each} for name, each in latencies.items()},
    }  # fmt: skip


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextlib.contextmanager
def _on(cpus: Sequence[int]) -> Iterator[None]:
    """What this thread starts meanwhile may use these alone."""
    before = os.sched_getaffinity(0)
    try:
        if cpus:
            os.sched_setaffinity(0, cpus)
        yield
    finally:
        os.sched_setaffinity(0, before)


def _perftest(
    program: str, devices: Sequence[str], gid_index: int, words: list[str], cpus: Sequence[Sequence[int]]
) -> list[float]:
    """The numbers of its line of results, by column. The server is on the second device."""
    common = ["-x", str(gid_index), "-p", str(_free_port()), *words]
    end = time.monotonic() + _SECONDS
    with _on(cpus[1]):
        server = subprocess.Popen(
            [program, "-d", devices[1], *common], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    try:
        while True:
            # Until the server listens the client is refused.
            with _on(cpus[0]):
                done = subprocess.run(
                    [program, "-d", devices[0], *common, "127.0.0.1"], stdin=subprocess.DEVNULL, capture_output=True,
                    text=True, timeout=max(1.0, end - time.monotonic()), check=False,
                )  # fmt: skip
            found = numbers(done.stdout)
            if found:
                return found
            if server.poll() is not None or time.monotonic() >= end:
                said = (done.stderr or done.stdout).strip()
                raise bench.BenchError(f"{program} between {devices[0]} and {devices[1]}: {said[-400:] or 'no result'}")
            time.sleep(0.05)
    except subprocess.TimeoutExpired:
        raise bench.BenchError(f"{program} did not end within {_SECONDS:g} s") from None
    finally:
        server.kill()
        server.communicate()


def numbers(output: str) -> list[float]:
    """Of a table's first line: the first one that is five numbers or more, and nothing else."""
    for line in output.splitlines():
        words = line.split()
        try:
            found = [float(word) for word in words]
        except ValueError:
            continue
        if len(found) >= 5:
            return found
    return []


def show(console: Console, result: dict[str, Any]) -> None:
    from rich.table import Table

    title = f"Puts of {result['backend']} from {result['devices'][0]} to {result['devices'][1]}, beside ib_write_bw"
    table = Table(title=title, title_justify="left")
    for column in ("size", "puts/s", "ib_write_bw/s", "ratio", "of the turns", "has to be"):
        table.add_column(column, justify="right")
    for row in result["rates"]:
        table.add_row(
            size_text(row["bytes"]), f"{row['puts_per_second']:,.0f}", f"{row['ib_write_bw_per_second']:,.0f}",
            f"{row['ratio']:.2f}", f"{min(row['ratios']):.2f} .. {max(row['ratios']):.2f}",
            f"{row['must']:.1f}" + ("" if row["met"] else ": missed"),
        )  # fmt: skip
    console.print(table)
    of = {name: each["median"] for name, each in result["latency_us"].items()}
    console.print(f"a put of 16 B and its quiet {of['put_quiet']:.1f} us, ib_write_lat {of['ib_write_lat']:.1f} us")
    console.print(f"a signal from wait to wait {of['signal']:.1f} us, ib_atomic_lat {of['ib_atomic_lat']:.1f} us")
