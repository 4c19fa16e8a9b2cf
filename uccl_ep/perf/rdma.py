# SPDX-License-Identifier: Apache-2.0
"""Puts between two processes over RDMA devices of this machine, beside the transport's own benchmarks (perftest): the
same devices, sizes, windows and machine, taken in turn; medians. Every byte of ours is checked at the target.

Of ours everything counts: a call for each put, the ring, the proxy, the backend. ib_write_bw posts to the NIC itself.
"""

from __future__ import annotations

import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import backends
from . import bench
from .proxy import Say
from .shm import size_text

if TYPE_CHECKING:
    from rich.console import Console

SIZES = (64, 4096, 65536)
_COUNTS = {64: 20000, 4096: 8000}  # puts of a measurement; fewer of what is larger
_FEW = 1000
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
) -> dict[str, Any]:
    """`devices`: of rank 0, which sends, and of rank 1. `scale`: of how many puts a measurement takes. `operations` of
    a row: what the proxy of rank 0 did for all its puts. Reads are those that made bytes visible."""
    library = backends.find(backend).library
    missing = [name for name in ("ib_write_bw", "ib_write_lat", "ib_atomic_lat") if shutil.which(name) is None]
    if missing:
        raise bench.BenchError(f"not found: {', '.join(missing)}. On Debian: apt-get install perftest")
    more: dict[str, Any] = {"nic_options": nic_options} if nic_options else {}
    more |= {"device": devices[0], "other_device": devices[1], "rounds": 1}
    rows = []
    latencies: dict[str, list[float]] = {}
    for size in sizes:
        count = max(64, int(_COUNTS.get(size, _FEW) * scale))
        ours, theirs = [], []
        operations: dict[str, int] = dict.fromkeys(("submits", "completions", "reads", "sleeps"), 0)
        for turn in range(repeats):
            say(f"{size_text(size)}, {turn + 1} of {repeats}")
            lines = bench.run(library, "rdma", bytes=size, commands=count, window=window, latencies=1, **more)
            (put,) = (line for line in lines if line["what"] == "put")
            ours.append(1e9 / put["put_ns"])
            for name in operations:
                operations[name] += put[name]
            words = ["-s", str(size), "-n", str(count), "-t", str(window)]
            theirs.append(1e6 * _perftest("ib_write_bw", devices, gid_index, words)[4])
        ratio = statistics.median(ours) / statistics.median(theirs)
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
                "must": must(size),
                "met": ratio >= must(size),
            }
        )
    few = max(64, min(2000, int(2000 * scale)))
    for turn in range(repeats):
        say(f"latencies, {turn + 1} of {repeats}")
        for line in bench.run(library, "rdma", bytes=16, commands=64, latencies=few, **more):
            if line["what"] != "put":
                latencies.setdefault(line["what"], []).append(line["ns"] / 1e3)
        for program, words in (("ib_write_lat", ["-s", "16"]), ("ib_atomic_lat", [])):
            found = _perftest(program, devices, gid_index, [*words, "-n", str(few)])
            latencies.setdefault(program, []).append(found[4])
    return {
        "backend": backend, "devices": list(devices), "window": window, "repeats": repeats, "rates": rows,
        "latency_us": {name: {"median": statistics.median(each), "values": each} for name, each in latencies.items()},
    }  # fmt: skip


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _perftest(program: str, devices: Sequence[str], gid_index: int, words: list[str]) -> list[float]:
    """The numbers of its line of results, by column. The server is on the second device."""
    common = ["-x", str(gid_index), "-p", str(_free_port()), *words]
    end = time.monotonic() + _SECONDS
    server = subprocess.Popen(
        [program, "-d", devices[1], *common], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        while True:
            # Until the server listens the client is refused.
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
    for column in ("size", "puts/s", "ib_write_bw/s", "ratio", "has to be"):
        table.add_column(column, justify="right")
    for row in result["rates"]:
        table.add_row(
            size_text(row["bytes"]), f"{row['puts_per_second']:,.0f}", f"{row['ib_write_bw_per_second']:,.0f}",
            f"{row['ratio']:.2f}", f"{row['must']:.1f}" + ("" if row["met"] else ": missed"),
        )  # fmt: skip
    console.print(table)
    of = {name: each["median"] for name, each in result["latency_us"].items()}
    console.print(f"a put of 16 B and its quiet {of['put_quiet']:.1f} us, ib_write_lat {of['ib_write_lat']:.1f} us")
    console.print(f"a signal from wait to wait {of['signal']:.1f} us, ib_atomic_lat {of['ib_atomic_lat']:.1f} us")
