# SPDX-License-Identifier: Apache-2.0
"""`uccl-ep mutants`. Exit status: 0 all were killed, 1 not all were, 2 the run cannot be made, 130 it was
interrupted."""

from __future__ import annotations

import json as json_module
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ..cli.common import writable, write_report

if TYPE_CHECKING:
    from rich.table import Table

    from .registry import Mutant
    from .runner import Result, Verdict


def _refuse(message: str) -> NoReturn:
    print(f"uccl-ep mutants: {message}", file=sys.stderr)
    raise typer.Exit(2)


def mutants(
    json: Annotated[Path | None, typer.Option(help="Write the report there; - is the standard output.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Try each mutant on so many seeds, and kill it on all.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="The first of them; the others follow.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Only this mutant (repeatable).")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Mutants at a time.", show_default="one a CPU")] = None,
    list_mutants: Annotated[bool, typer.Option("--list", help="List the mutants and run nothing.")] = False,
) -> None:
    """Prove the suite: run it on NICs and cores that are broken on purpose. It must notice each, and nothing else."""
    from rich.console import Console
    from rich.live import Live
    from rich.markup import escape
    from rich.text import Text

    from . import runner

    to_stdout = json is not None and str(json) == "-"
    console = Console(stderr=to_stdout, highlight=False)
    chosen = _choose(only or [])
    if list_mutants:
        for m in chosen:  # no table: a name must stand whole, however narrow the terminal, to be copied
            console.print(Text.assemble((m.name, "bold"), f"  {m.clause}  {m.ground}"), soft_wrap=True)
            console.print(Text(f"    {m.what}"), soft_wrap=True)
        console.print(f"{len(chosen)} mutants")
        return
    if json is not None and not to_stdout:
        writable(json, "--json")
    reached = f"0 of {len(chosen)} mutants"
    try:
        with Live(console=console, refresh_per_second=4, transient=True) as live:

            def show(stage: str, done: int, total: int, verdict: Verdict | None) -> None:
                nonlocal reached
                reached = f"{done} of {total} {stage}"
                if verdict is not None:
                    live.console.print(_line(verdict), soft_wrap=True)
                live.update(Text(f"{stage}: {done} of {total}"))

            live.update(Text(f"mutants: 0 of {len(chosen)}"))
            workers = jobs if jobs is not None else len(os.sched_getaffinity(0))
            result = runner.run(chosen, range(seed, seed + seeds), jobs=workers, progress=show)
    except runner.MutantsError as error:
        _refuse(str(error))
    except KeyboardInterrupt:
        print(f"uccl-ep mutants: interrupted after {reached}; no report is written", file=sys.stderr)
        raise typer.Exit(130) from None
    console.print(_table(result))
    for name, why in result.left_out.items():
        console.print(f"left out  {name}: {escape(why)}", soft_wrap=True)
    console.print(_summary(result), soft_wrap=True)
    if json is not None:
        text = json_module.dumps(result.as_dict(), indent=2)
        write_report(json, text)
    if result.score < 1.0:
        raise typer.Exit(1)


def _choose(names: list[str]) -> list[Mutant]:
    from ..errors import nearest
    from .registry import MUTANTS, by_name

    if not names:
        return list(MUTANTS)
    chosen: list[Mutant] = []
    for name in names:
        found = by_name(name)
        if not found:
            _refuse(f"--only {name!r}: {nearest(name, [m.name for m in MUTANTS])}")
        chosen += [m for m in found if m not in chosen]
    return chosen


def _line(verdict: Verdict) -> str:
    from rich.markup import escape

    m = verdict.mutant
    if not verdict.why_not or verdict.why_not.startswith("not clean"):  # baselines come later
        return f"killed    {m.clause:6} {m.name:30} {verdict.seconds:5.1f} s  {_by(verdict)}"
    return f"[red]SURVIVED[/]  {m.clause:6} {m.name:30} {verdict.seconds:5.1f} s  {escape(verdict.why_not)}"


def _by(verdict: Verdict) -> str:
    return f"{', '.join(verdict.by)} ({', '.join(verdict.asserted)})"


def _table(result: Result) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(header_style="bold")
    for column in ("mutant", "clause", "what it does", "killed by", "asserted"):
        table.add_column(column, overflow="fold", no_wrap=column in ("mutant", "clause", "asserted"))
    for verdict in result.verdicts:
        m = verdict.mutant
        outcome = ", ".join(verdict.by) if verdict.killed else f"[red]{escape(verdict.why_not)}[/]"
        table.add_row(m.name, m.clause, m.what, outcome, "\n".join(verdict.asserted))
    return table


def _summary(result: Result) -> str:
    killed = sum(v.killed for v in result.verdicts)
    clauses = len({v.mutant.clause for v in result.verdicts})
    seeds = result.verdicts[0].seeds
    return (
        f"mutation score {result.score:.3f}: {killed} of {len(result.verdicts)} mutants of {clauses} clauses killed on "
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}, in {result.seconds:.0f} s"
    )
