# SPDX-License-Identifier: Apache-2.0
"""A run as a terminal shows it: one line that moves, or one a case where nobody watches; then what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .registry import CLAUSES, Case
from .results import CaseResult, SuiteResult
from .scorecard import _blamed, _values, clause_status

if TYPE_CHECKING:
    from types import TracebackType

_STYLE = {"pass": "green", "not_supported": "dim", "not supported": "dim", "not run": "dim", "waived": "yellow"}


def _style(status: str) -> str:
    return _STYLE.get(status, "bold red")


class ProgressLine:
    """Call it with each result. Refreshes by hand: a thread that refreshes would be forked with every rank."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = (
            Live("starting", console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        )
        self._bad = 0
        self.done = 0

    def __enter__(self) -> ProgressLine:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def _line(self, result: CaseResult) -> Text:
        line = Text.assemble((f"{result.status:14}", _style(result.status)), f"{result.id:36} {result.seconds:7.2f} s")
        if result.bad and result.message:
            clause = f"{result.broken_clause}: " if result.broken_clause else ""
            line.append(f"  {clause}{result.message}", style="red")
        return line

    def __call__(self, result: CaseResult, done: int, total: int) -> None:
        self._bad += result.bad
        self.done = done
        if self._live is None:
            self._console.print(self._line(result), soft_wrap=True, highlight=False)
            return
        if result.bad:
            self._live.console.print(self._line(result), soft_wrap=True, highlight=False)
        width = 24
        bar = "#" * (width * done // total)
        failed = f"  {self._bad} failed" if self._bad else ""
        self._live.update(Text(f"[{bar:{width}}] {done}/{total}{failed}  {result.id}"), refresh=True)


def heading(result: SuiteResult) -> Text:
    device = result.backend["device"]
    return Text(
        f"{result.backend['name']} {result.backend['version']} (interface {result.backend['abi']}), "
        f"device {device['name']}, strategy {result.strategy}: {result.strategy_reason}"
        + (f"\n{'; '.join(result.labels)}" if result.labels else "")
        + (f"\nheap in {result.heap}" if result.heap != "host memory" else "")
        + (f"\nposted by kernels: {result.kernels}" if result.kernels else "")
    )


def summary(console: Console, result: SuiteResult) -> None:
    blamed = _blamed(result)
    table = Table(title=None, header_style="bold", pad_edge=False)
    table.add_column("clause", no_wrap=True)
    table.add_column("what it says")
    table.add_column("cases", justify="right")
    table.add_column("result", no_wrap=True)
    for clause, about in CLAUSES.items():
        cases = blamed[clause]
        if result.partial and not cases:
            continue
        status = clause_status(cases)
        table.add_row(clause, about, str(len(cases)), Text(status.replace("_", " "), style=_style(status)))
    console.print(heading(result), soft_wrap=True)
    console.print(table)
    for case in result.cases:
        if not case.bad:
            continue
        console.print(Text.assemble((case.status, "bold red"), f" {case.id}  {case.title}"), soft_wrap=True)
        clause = f"{case.broken_clause}: " if case.broken_clause else ""
        console.print(f"  {escape(clause + case.message)}", highlight=False, soft_wrap=True)
        for name, value in _values(case):
            console.print(f"    {escape(name)}: {escape(value)}", highlight=False, soft_wrap=True)
        console.print(f"  replay: {escape(result.replay_of(case))}", highlight=False, soft_wrap=True)
    for note in result.notes:
        console.print(f"note: {escape(note)}", highlight=False)
    console.print(escape(str(result.histories)), highlight=False, soft_wrap=True)
    for remark in result.histories.remarks:
        console.print(f"note: {escape(remark)}", highlight=False, soft_wrap=True)
    counts = ", ".join(
        f"{n} {status.replace('_', ' ')}" for status, n in result.summary.items() if n or status == "pass"
    )
    style = "bold red" if result.failed else "bold green" if result.conclusive else "bold yellow"
    console.print(
        Text.assemble((result.verdict, style), f": {counts}; {result.seconds:.1f} s, seed {result.seed}"),
        highlight=False,
    )


def listing(console: Console, cases: list[Case]) -> None:
    """Two lines a case, never a table: an id must stand whole, however narrow the terminal, to be copied."""
    width = max((len(case.id) for case in cases), default=0)
    for case in cases:
        ranks = "/".join(map(str, case.ranks))
        console.print(
            Text.assemble((f"{case.id:{width}}", "bold"), f"  {case.level}  {ranks}  {' '.join(case.clauses)}"),
            soft_wrap=True,
        )
        console.print(Text(f"    {case.title}"), soft_wrap=True)
    again = sum(bool(case.variant) for case in cases)
    count = f"{len(cases) - again} cases" + (f", and {again} again on the weakest promises (@)" if again else "")
    console.print(Text(count), soft_wrap=True)
