# SPDX-License-Identifier: Apache-2.0
"""`uccl-ep perf`. Exit status: 0 figures were taken, 1 a measurement or data check failed, 2 a wrong command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..cli.common import json_text, pick, writable, write_report

_GPU = "perf gpu"


def perf(
    context: typer.Context,
    what: Annotated[str, typer.Argument(help="proxy, shm, all (these two), or gpu.")] = "all",
    instructions: Annotated[
        bool, typer.Option("--instructions", help="Count the proxy's instructions with valgrind: minutes.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, max=100000, help="Repetitions; figures are medians.")] = 21,
    json: Annotated[Path | None, typer.Option(help="Write the figures there; - is the standard output.")] = None,
    accel: Annotated[str, typer.Option(help="cuda, hip, or cpu, the emulation.", rich_help_panel=_GPU)] = "cuda",
    device: Annotated[int, typer.Option(min=0, help="Its index.", rich_help_panel=_GPU)] = 0,
    forms: Annotated[str, typer.Option(help="Ways to post, by commas [all].", rich_help_panel=_GPU)] = "",
    producers: Annotated[
        str, typer.Option(help="Warps that post, by commas [32,128,512,1024,2048; cpu: 4,8].", rich_help_panel=_GPU)
    ] = "",
    rings: Annotated[int, typer.Option(min=1, max=64, help="At most so many.", rich_help_panel=_GPU)] = 32,
    threads: Annotated[int, typer.Option(min=1, max=64, help="That drain them.", rich_help_panel=_GPU)] = 4,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Of one run [0.3; cpu: 0.01].", rich_help_panel=_GPU, show_default=False)
    ] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each point.", rich_help_panel=_GPU)] = 5,
    commands: Annotated[
        int, typer.Option(min=0, help="Also check so many commands in all forms together.", rich_help_panel=_GPU)
    ] = 0,
    against: Annotated[
        Path | None, typer.Option(help="UCCL-EP's FIFO benchmark, built: run beside ours.", rich_help_panel=_GPU)
    ] = None,
    against_runs: Annotated[int, typer.Option(min=1, max=1000, help="How often.", rich_help_panel=_GPU)] = 3,
) -> None:
    """Measure the proxy on a NIC that does nothing, and puts over shared memory beside memcpy; or, with gpu, how fast
    kernels hand commands over."""
    from rich.console import Console

    from . import bench, gpu_tables, proxy, shm
    from .conditions import conditions

    pick(what, ("proxy", "shm", "all", "gpu"), "WHAT")
    _only_for(what, context)
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
            if what == "gpu":
                from . import gpu_campaign

                document["gpu"] = gpu_campaign.measure(
                    say, accel=accel, device=device, forms=forms, producers=producers, rings=rings, threads=threads,
                    seconds=seconds, repeats=repeats, commands=commands, against=against, against_runs=against_runs,
                )  # fmt: skip
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
    if "gpu" in document:
        gpu_tables.show(console, document["gpu"])
    if json is not None:
        write_report(json, json_text("uccl_ep.perf/1", **document))


def _only_for(what: str, context: typer.Context) -> None:
    """An option that would not be looked at is a mistake of the caller's."""
    of_gpu = {one.name for one in context.command.params if getattr(one, "rich_help_panel", None) == _GPU}
    others = {"instructions", "rounds"}
    for name in sorted(others if what == "gpu" else of_gpu):
        source = None if name is None else context.get_parameter_source(name)
        if name is not None and source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"not for {what}", param_hint=f"--{name.replace('_', '-')}")


def _quiet(text: str) -> None:
    pass
