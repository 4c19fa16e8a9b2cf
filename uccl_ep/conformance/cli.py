# SPDX-License-Identifier: Apache-2.0
"""`uccl-ep conformance`. Exit status: 0 nothing failed, 1 something did, 2 the command line or the backend is wrong,
130 it was interrupted."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from . import files
from .errors import SuiteError
from .results import SuiteResult

if TYPE_CHECKING:
    from rich.console import Console

    from . import runner


def _refuse(message: str) -> NoReturn:
    print(f"uccl-ep conformance: {message}", file=sys.stderr)
    raise typer.Exit(2)


def _check_writable(path: Path, option: str) -> None:
    if str(path) == "-":
        return
    try:
        files.check_writable(path)
    except OSError as error:
        _refuse(f"{option} {path}: {error.strerror}; give a file that can be written")


def conformance(
    backend: Annotated[str, typer.Option(help="Backend by name; `uccl-ep backends` lists them.")] = "shm",
    library: Annotated[Path | None, typer.Option(help="A backend's shared library instead of a name.")] = None,
    lane: Annotated[str | None, typer.Option(help="On what it runs.", show_default="the backend's")] = None,
    accel: Annotated[str | None, typer.Option(help="Of the lane gpu: whose kernels post: cuda, hip, cpu.")] = None,
    heap: Annotated[str, typer.Option(help="Of the lanes gpu and sim: heaps in host or device memory.")] = "host",
    staging: Annotated[
        str, typer.Option(help="With --heap device: may heaps go through host memory: auto, on, off.")
    ] = "auto",
    warp_size: Annotated[int | None, typer.Option(help="Lanes of a warp, with --accel cpu [32].")] = None,
    impair: Annotated[
        bool, typer.Option("--impair", help="Of the lane softroce: loss, delay and reordering on the wire.")
    ] = False,
    profile: Annotated[
        str | None, typer.Option(help="Of virtual NICs (--backend sim, --lane provider): which; all of sim's.")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="Of the lane provider: the NIC's generation.")] = None,
    knobs: Annotated[str, typer.Option(help="Of the lane provider: KNOB=VALUE,... of its virtual NICs.")] = "",
    libraries: Annotated[
        str, typer.Option(help="Of the lane provider: whose drive the NICs: auto, machine, root (fetched ones).")
    ] = "auto",
    provider: Annotated[str | None, typer.Option(help="Provider of a lane that has them.")] = None,
    ranks: Annotated[int, typer.Option(help="Most ranks a case gets, unless it needs more.")] = 4,
    level: Annotated[str, typer.Option(help="core, or full, which takes longer.")] = "core",
    seed: Annotated[int | None, typer.Option(help="Replay a run.", show_default="drawn")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only cases like this (GLOB; repeatable).")] = None,
    clause: Annotated[list[str] | None, typer.Option(help="Only cases of this clause (repeatable).")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report there; - is the standard output.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML there.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the scorecard there.")] = None,
    mutants_json: Annotated[Path | None, typer.Option(help="Report of `uccl-ep mutants`, for the scorecard.")] = None,
    waivers: Annotated[Path | None, typer.Option(help="TOML file of known failures, with owner and expiry.")] = None,
    backend_options: Annotated[str, typer.Option(help="key=value,... for the backend.")] = "",
    strategy: Annotated[str, typer.Option(help="Signal strategy.")] = "auto",
    time_scale: Annotated[
        float, typer.Option(help="Stretch every deadline: sanitizers, emulators, loaded machines.")
    ] = 1.0,
    stop_at_failure: Annotated[bool, typer.Option(help="End at the first failure.")] = False,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases and run nothing.")] = False,
) -> None:
    """Prove a backend: run the shared suite on it and write its scorecard."""
    from rich.console import Console

    from . import junit as junit_xml
    from . import runner, scorecard
    from .console import ProgressLine, listing, summary

    to_stdout = json is not None and str(json) == "-"
    console = Console(stderr=to_stdout)
    options = runner.Options(
        backend=backend,
        library=library,
        lane=lane,
        accel=accel,
        heap=heap,
        staging=staging,
        warp_size=warp_size,
        impair=impair,
        profile=profile,
        variant=variant,
        knobs=knobs,
        libraries=libraries,
        provider=provider,
        ranks=ranks,
        level=level,
        seed=seed,
        cases=tuple(case or ()),
        clauses=tuple(c.upper() for c in clause or ()),
        waivers=waivers,
        backend_options=backend_options,
        strategy=strategy,
        time_scale=time_scale,
        stop_at_failure=stop_at_failure,
    )
    try:
        if list_cases:
            listing(console, runner.listed(options))
            return
        if profile == runner.ALL_PROFILES:
            _all_profiles(options, console, json, refused={"--junit": junit, "--html": html})
            return
        runner.check(options)
        mutation = scorecard.read_mutants(mutants_json) if mutants_json is not None else None
        for path, option in ((json, "--json"), (junit, "--junit"), (html, "--html")):
            if path is not None:
                _check_writable(path, option)
        line = ProgressLine(console)
        try:
            with line:
                result = runner.run_suite(options, line)
        except KeyboardInterrupt:
            count = f"{line.done} case{'s' if line.done != 1 else ''}"
            print(f"uccl-ep conformance: interrupted after {count}; no report is written", file=sys.stderr)
            raise typer.Exit(130) from None
    except SuiteError as error:
        _refuse(str(error))
    result.mutation = mutation
    summary(console, result)
    if json is not None:
        _write_json(result, json)
    if junit is not None:
        junit_xml.write(result, junit)
    if html is not None:
        scorecard.write(result, html)
        console.print(f"scorecard: {html}", highlight=False, soft_wrap=True)
    if result.failed:
        raise typer.Exit(1)


def _all_profiles(
    options: runner.Options, console: Console, json: Path | None, refused: dict[str, Path | None]
) -> None:
    from . import profiles, runner

    for option, path in refused.items():
        if path is not None:
            raise SuiteError(f"{option} is for one profile at a time")
    if json is not None:
        _check_writable(json, "--json")
    runner.check_all_profiles(options)
    try:
        # Told as they end: all of it takes a while.
        runs = profiles.run_profiles(
            options, progress=lambda run: console.print(profiles.line_of(run), highlight=False)
        )
    except KeyboardInterrupt:
        print("uccl-ep conformance: interrupted; no report is written", file=sys.stderr)
        raise typer.Exit(130) from None
    profiles.show(console, runs)
    if json is not None:
        text = json_module.dumps(profiles.as_dict(runs), indent=1, allow_nan=False)
        if str(json) == "-":
            print(text)
        else:
            files.write(json, f"{text}\n".encode())
    if any(run.bad or not run.report["cases"] for run in runs):
        raise typer.Exit(1)


def _write_json(result: SuiteResult, path: Path) -> None:
    if str(path) == "-":
        print(result.json_text())
    else:
        files.write(path, f"{result.json_text()}\n".encode())
