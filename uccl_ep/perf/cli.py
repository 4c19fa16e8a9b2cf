# SPDX-License-Identifier: Apache-2.0
"""`uccl-ep perf`. Exit status: 0 figures were taken, 1 a measurement or data check failed, 2 a wrong command line,
3 a ratio was missed that was required."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..cli.common import json_text, pick, writable, write_report

_GPU = "perf gpu"
_RDMA = "perf rdma"
_PANELS = {"gpu": _GPU, "rdma": _RDMA}


def perf(
    context: typer.Context,
    what: Annotated[str, typer.Argument(help="proxy, shm, all (these two), gpu, or rdma.")] = "all",
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
    backend: Annotated[str, typer.Option(help="Backend by name.", rich_help_panel=_RDMA)] = "connectx",
    devices: Annotated[
        str, typer.Option(help="Of rank 0 and of rank 1: two names, by a comma.", rich_help_panel=_RDMA)
    ] = "",
    backend_options: Annotated[str, typer.Option(help="key=value,... of both.", rich_help_panel=_RDMA)] = "",
    gid_index: Annotated[int, typer.Option(min=0, help="Of perftest (-x).", rich_help_panel=_RDMA)] = 3,
    window: Annotated[
        int, typer.Option(min=1, max=65536, help="Operations under way at most.", rich_help_panel=_RDMA)
    ] = 128,
    cpus: Annotated[
        str,
        typer.Option(help="That rank 0 and rank 1 may use, and perftest's two: 0,1 or 0+2,1+3.", rich_help_panel=_RDMA),
    ] = "",
    turns: Annotated[int, typer.Option(min=1, max=1000, help="Measurements of each.", rich_help_panel=_RDMA)] = 9,
    scale: Annotated[float, typer.Option(min=0.001, max=1000, help="Of puts in each.", rich_help_panel=_RDMA)] = 1.0,
    require: Annotated[
        bool, typer.Option("--require", help="Exit status 3 if a ratio is missed.", rich_help_panel=_RDMA)
    ] = False,
) -> None:
    """Measure the proxy on a NIC that does nothing, and puts over shared memory beside memcpy; or, with gpu, how fast
    kernels hand commands over; or, with rdma, puts between two RDMA devices beside perftest."""
    from rich.console import Console

    from . import bench, gpu_tables, proxy, rdma, shm
    from .conditions import conditions

    pick(what, ("proxy", "shm", "all", "gpu", "rdma"), "WHAT")
    _only_for(what, context)
    named = [name for name in devices.split(",") if name]
    if what == "rdma" and len(named) != 2:
        raise typer.BadParameter("two names of RDMA devices, by a comma", param_hint="--devices")
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
            if what == "rdma":
                document["rdma"] = rdma.measure(
                    say, backend=backend, devices=named, nic_options=backend_options, gid_index=gid_index,
                    window=window, repeats=turns, scale=scale, cpus=_cpus(cpus),
                )  # fmt: skip
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
    if "rdma" in document:
        rdma.show(console, document["rdma"])
    if "gpu" in document:
        gpu_tables.show(console, document["gpu"])
    if json is not None:
        write_report(json, json_text("uccl_ep.perf/1", **document))
    if require and not all(row["met"] for row in document["rdma"]["rates"]):
        raise typer.Exit(3)


def _cpus(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of "0+2,1": those of rank 0, those of rank 1."""
    if not text:
        return (), ()
    try:
        one, other = (tuple(int(number) for number in part.split("+")) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not two sets of CPUs such as 0+2,1", param_hint="--cpus") from None
    return one, other


def _only_for(what: str, context: typer.Context) -> None:
    """An option that would not be looked at is a mistake of the caller's."""
    panels = {what: {"instructions", "rounds"} for what in ("proxy", "shm", "all")}
    for kind, panel in _PANELS.items():
        panels[kind] = {str(one.name) for one in context.command.params if getattr(one, "rich_help_panel", "") == panel}
    for name in sorted(set().union(*panels.values()) - panels[what]):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"not for {what}", param_hint=f"--{name.replace('_', '-')}")


def _quiet(text: str) -> None:
    pass
