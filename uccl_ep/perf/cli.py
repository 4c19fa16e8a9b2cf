# SPDX-License-Identifier: Apache-2.0
"""`uccl-ep perf`. Exit status: 0 figures were taken, 1 a measurement or data check failed, 2 a wrong command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..cli.common import json_text, pick, writable, write_report


def perf(
    what: Annotated[str, typer.Argument(help="proxy, shm or all.")] = "all",
    instructions: Annotated[
        bool, typer.Option("--instructions", help="Count the proxy's instructions with valgrind: minutes.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, max=100000, help="Repetitions; figures are medians.")] = 21,
    json: Annotated[Path | None, typer.Option(help="Write the figures there; - is the standard output.")] = None,
) -> None:
    """Measure the proxy on a NIC that does nothing, and puts over shared memory beside memcpy."""
    from rich.console import Console

    from . import bench, proxy, shm
    from .conditions import conditions

    pick(what, ("proxy", "shm", "all"), "WHAT")
    to_stdout = json is not None and str(json) == "-"
    console = Console(stderr=to_stdout, highlight=False)
    document: dict[str, Any] = {"conditions": conditions()}
    if json is not None and not to_stdout:
        writable(json, "--json")
    try:
        with console.status("measuring") as status:
            say = status.update if console.is_terminal else _quiet
            if what in ("proxy", "all"):
                document["proxy"] = proxy.measure(say, rounds=10 * rounds, instructions=instructions)
            if what in ("shm", "all"):
                document["shm"] = shm.measure(say, rounds=rounds)
    except bench.BenchError as error:
        print(f"uccl-ep perf: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    measured = document["conditions"]
    console.print(
        f"{measured['cpu']}, {measured['cpus']} CPUs, load {measured['load_average']:.1f}, {measured['kernel']}",
        soft_wrap=True,
        markup=False,
    )
    if "proxy" in document:
        proxy.show(console, document["proxy"])
    if "shm" in document:
        shm.show(console, document["shm"])
    if json is not None:
        write_report(json, json_text("uccl_ep.perf/1", **document))


def _quiet(text: str) -> None:
    pass
