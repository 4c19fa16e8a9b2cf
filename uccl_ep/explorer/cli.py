# SPDX-License-Identifier: Apache-2.0
"""`uccl-ep explore`. Exit status: 0 nothing was found, 1 something was, 2 the run cannot be made, 130 it was
interrupted."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ..cli.common import json_text, pick, writable, write_report

if TYPE_CHECKING:
    from rich.console import Console

    from .explore import Report

SCHEMA = "uccl_ep.explore/1"


def _refuse(message: str) -> NoReturn:
    print(f"uccl-ep explore: {message}", file=sys.stderr)
    raise typer.Exit(2)


def explore(
    profile: Annotated[list[str] | None, typer.Option(help="NIC profile (repeatable), or all.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="So many seeds a profile.", show_default="1000")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The first seed; without --seeds it is replayed.")] = None,
    program: Annotated[
        list[str] | None, typer.Option(help="A litmus program by name, or a file with one (repeatable).")
    ] = None,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="All schedules of small programs.")] = False,
    events: Annotated[
        bool, typer.Option("--events", help="Of --exhaustive: all orders of the NICs' events; ranks are prompt.")
    ] = False,
    wrong: Annotated[
        bool, typer.Option("--wrong", help="Programs that break a duty: where each is caught, where it gets away.")
    ] = False,
    faults: Annotated[bool, typer.Option("--faults", help="Let one seed in four meet faults of the NIC.")] = False,
    any_nic: Annotated[
        bool, typer.Option("--any-nic", help="NICs of no vendor: let every knob of a profile change, and its promises.")
    ] = False,
    duplicates: Annotated[
        int, typer.Option(min=0, help="Of --exhaustive: at most so many pieces land twice in a run.")
    ] = 0,
    lost_doorbells: Annotated[
        int, typer.Option(min=0, help="Of --exhaustive: at most so many doorbells are lost in a run.")
    ] = 0,
    runs: Annotated[
        int | None,
        typer.Option(min=1, help="Of --exhaustive: at most so many schedules a program.", show_default="20000"),
    ] = None,
    knobs: Annotated[
        str | None, typer.Option(help="NAME=VALUE,...: knobs of the NIC, added to what a seed draws.")
    ] = None,
    choices: Annotated[
        str | None, typer.Option(help="Of a replay: a script of choices, as a finding prints it.")
    ] = None,
    hash: Annotated[
        bool, typer.Option("--hash", help="Of a replay: print the hashes of run and memory alone.")
    ] = False,
    list_programs: Annotated[bool, typer.Option("--list", help="List programs and profiles and run nothing.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes at a time.", show_default="one a CPU")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report there; - is the standard output.")] = None,
) -> None:
    """Run litmus programs on virtual NICs and let the model of the contract judge what every rank saw."""
    from rich.console import Console

    from . import explore as explorer
    from . import tool

    to_stdout = json is not None and str(json) == "-"
    console = Console(stderr=to_stdout, highlight=False)
    if json is not None and not to_stdout:
        writable(json, "--json")
    try:
        known = tool.listing()
        profiles = _profiles(profile, known)
        programs = [_program(name, known) for name in program or []]
        if list_programs:
            _list(console, known)
            return
        workers = jobs if jobs is not None else len(os.sched_getaffinity(0))
        replays = seed is not None and seeds is None and not exhaustive and not wrong
        drawn = explorer.Drawn(faults=faults, any_nic=any_nic, knobs=knobs)
        _check_meaning(
            {"--choices": choices is not None, "--hash": hash}, replays, "of a replay: --seed without --seeds"
        )
        _check_meaning(
            {"--events": events, "--runs": runs is not None, "--duplicates": duplicates > 0,
             "--lost-doorbells": lost_doorbells > 0},
            exhaustive, "of --exhaustive",
        )  # fmt: skip
        _check_meaning({"--faults": faults, "--any-nic": any_nic}, not (exhaustive or wrong), "of random programs")
        _check_meaning({"--wrong": wrong}, not exhaustive, "not of --exhaustive")
        if replays:
            assert seed is not None
            report = explorer.replay(
                profiles, seed, programs, drawn, choices=choices, say=lambda told: _show_run(console, told, hash)
            )
        else:
            report = _campaign(console, explorer, profiles, programs, known, seeds, seed, workers, drawn,
                               exhaustive=exhaustive, events=events, wrong=wrong, runs=runs or 20000,
                               duplicates=duplicates, lost_doorbells=lost_doorbells)  # fmt: skip
    except tool.ExplorerError as error:
        _refuse(str(error))
    except KeyboardInterrupt:
        print("uccl-ep explore: interrupted; no report is written", file=sys.stderr)
        raise typer.Exit(130) from None
    if json is not None:
        write_report(json, json_text(SCHEMA, **report.as_dict()))
    if not report.good:
        raise typer.Exit(1)


def _check_meaning(given: dict[str, bool], meant: bool, of: str) -> None:
    """An option that would be ignored is refused."""
    for name, there in given.items():
        if there and not meant:
            _refuse(f"{name} is {of}")


def _campaign(
    console: Console, explorer: Any, profiles: list[str], programs: list[str], known: dict[str, Any],
    seeds: int | None, seed: int | None, workers: int, drawn: Any, *, exhaustive: bool, events: bool,
    wrong: bool, runs: int, duplicates: int, lost_doorbells: int,
) -> Report:  # fmt: skip
    from rich.live import Live
    from rich.text import Text

    first = 1 if seed is None else seed
    with Live(console=console, refresh_per_second=4, transient=True) as live:

        def show(done: int, total: int) -> None:
            live.update(Text(f"{done} of {total}"))

        say = live.console.print
        if exhaustive:
            report = explorer.exhaust(
                profiles, programs, known, runs, workers, show, lambda t: _show_exhausted(say, t), events=events,
                knobs=drawn.knobs, duplicates=duplicates, lost_doorbells=lost_doorbells,
            )  # fmt: skip
        elif wrong:
            report = explorer.wrong(profiles, programs, known, seeds or 200, first, workers, show, knobs=drawn.knobs)
        else:
            report = explorer.random(
                profiles, programs, seeds or 1000, first, workers, show, lambda t: _show_finding(say, t, drawn), drawn
            )
    for line in report.tables():
        console.print(line)
    console.print(report.summary(), soft_wrap=True)
    return report  # type: ignore[no-any-return]


def _profiles(asked: list[str] | None, known: dict[str, Any]) -> list[str]:
    names = [p["name"] for p in known["profiles"]]
    if not asked or "all" in asked:
        return names
    return [pick(name, [*names, "all"], "--profile") for name in asked]


def _program(name: str, known: dict[str, Any]) -> str:
    names = [p["name"] for p in known["programs"]]
    if name in names:
        return name
    path = Path(name)
    if path.is_file():
        try:
            return path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            _refuse(f"--program {name}: {error}")
    return pick(name, names, "--program")


def _list(console: Console, known: dict[str, Any]) -> None:
    from rich.text import Text

    for p in known["programs"]:
        breaks = f"  breaks {p['wrong']}; caught on {p['breaks_on']}" if p["wrong"] else ""
        console.print(Text.assemble((p["name"], "bold"), f"  {p['about']}{breaks}"), soft_wrap=True)
    for p in known["profiles"]:
        console.print(Text.assemble((p["name"], "bold"), f"  {p['about']}"), soft_wrap=True)


def _show_run(console: Console, told: dict[str, Any], only_hash: bool) -> None:
    from rich.text import Text

    if only_hash:
        console.print(Text(f"{told['profile']} {told['seed']} run {told['hash']} memory {told['memory_hash']}"))
        return
    text = (
        f"profile {told['profile']}, seed {told['seed']}, knobs {told['knobs'] or 'the profile'}"
        f"{', fault ' + told['faults'] if told['faults'] else ''}\n{told['program']}{told['history']}"
        f"{told['trace']}{told['outcome']} {told['clause']} {told['text']}\n"
        f"hash {told['hash']}, memory {told['memory_hash']}: {told['steps']} steps, {told['operations']} operations"
    )
    console.print(Text(text), soft_wrap=True)


def _show_finding(say: Any, told: dict[str, Any], drawn: Any) -> None:
    from rich.text import Text

    shown = told.get("shrunk", told)
    text = f"{told['outcome'].upper()} {told['clause']} on {told['profile']}, seed {told['seed']}: {told['text']}\n"
    text += f"  again: {drawn.replay_line(told)}\n"
    if "shrunk" in told:
        choices = ",".join(map(str, shown["choices"]))
        text += f"  shrunk: seed {shown['seed']}, {shown['deviations']} choices that are not the first"
        text += f"\n  choices {choices}\n" if choices else "\n"
    text += f"{shown['program']}{shown['history']}"
    say(Text(text), soft_wrap=True)


def _show_exhausted(say: Any, told: dict[str, Any]) -> None:
    from rich.text import Text

    finding = told.get("finding")
    if finding:
        choices = ",".join(map(str, finding["choices"]))
        say(
            Text(
                f"{finding['outcome'].upper()} {finding['clause']} on {told['profile']}, program {told['name']}: "
                f"{finding['text']}\n  knobs {told['knobs']}\n  choices {choices}\n"
                f"{finding['program']}{finding['history']}"
            ),
            soft_wrap=True,
        )
