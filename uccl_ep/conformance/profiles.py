# SPDX-License-Identifier: Apache-2.0
"""`--profile all`: the suite on every virtual NIC, some at a time, and one table of what came of it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .errors import SuiteError
from .judgement import Judgement
from .results import BAD, STATUSES

if TYPE_CHECKING:
    from rich.console import Console

    from .runner import Options

SCHEMA = "uccl_ep.conformance-profiles/1"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ProfileRun:
    """One profile's run, as its process told it."""

    report: dict[str, Any]  # as SuiteResult.as_dict()
    replay: str  # up to seed and case

    @property
    def profile(self) -> str:
        return str(self.report["profile"])

    @property
    def bad(self) -> list[dict[str, Any]]:
        return [case for case in self.report["cases"] if case["status"] in BAD]

    def replay_of(self, case: dict[str, Any]) -> str:
        return f"{self.replay} --seed {self.report['seed']} --case {case['id']}"


class _Child:
    """A fork that runs the suite on one profile and leaves its report in a nameless file."""

    def __init__(self, options: Options) -> None:
        self.profile = options.profile
        self._file = os.memfd_create(f"profile-{options.profile}", os.MFD_CLOEXEC)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
                if os.getppid() == parent:
                    code = self._main(options)
            except KeyboardInterrupt:
                code = 130
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)

    def _main(self, options: Options) -> int:
        from .runner import run_suite

        # The runner of a case ends its ranks when it is interrupted: let a death of the parent be an interrupt.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            result = run_suite(options)
            told: dict[str, Any] = {"report": result.as_dict(), "replay": result.replay}
        except SuiteError as error:
            told = {"error": str(error)}
        os.pwrite(self._file, json.dumps(told, allow_nan=False).encode(), 0)
        return 0

    def collect(self, status: int) -> ProfileRun:
        with open(self._file, "rb") as file:
            text = file.read()
        if status or not text:
            raise SuiteError(f"--profile {self.profile}: its process ended with status {status} and no report")
        told = json.loads(text)
        if "error" in told:
            raise SuiteError(f"--profile {self.profile}: {told['error']}")
        return ProfileRun(told["report"], told["replay"])


def run_profiles(
    options: Options, *, jobs: int | None = None, progress: Callable[[ProfileRun], None] | None = None
) -> list[ProfileRun]:
    """The suite on every profile with one seed. For a process of one thread, as run_suite."""
    from uccl_ep.simulator import profiles

    from .runner import seeded

    options = seeded(options)
    waiting = [replace(options, profile=name) for name in profiles()]
    order = [str(one.profile) for one in waiting]
    jobs = jobs if jobs is not None else len(os.sched_getaffinity(0))
    running: dict[int, _Child] = {}
    done: dict[str, ProfileRun] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                child = _Child(waiting.pop(0))
                running[child.pid] = child
            pid, status = os.wait()
            if pid not in running:
                continue
            run = running.pop(pid).collect(os.waitstatus_to_exitcode(status))
            done[run.profile] = run
            if progress is not None:
                progress(run)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGTERM)
        for pid in running:
            os.waitpid(pid, 0)
    return [done[name] for name in order]


def as_dict(runs: list[ProfileRun]) -> dict[str, Any]:
    return {"schema": SCHEMA, "profiles": [run.report for run in runs]}


def line_of(run: ProfileRun) -> str:
    summary = run.report["summary"]
    return f"{run.profile}: {summary['pass']} pass, {len(run.bad)} failed, {run.report['seconds']:.1f} s"


def show(console: Console, runs: list[ProfileRun]) -> None:
    """One row a profile; then what failed, with the command that repeats it."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(header_style="bold", pad_edge=False)
    table.add_column("profile", no_wrap=True)
    table.add_column("strategy", no_wrap=True)
    for name in ("pass", "fail", "not supported", "seconds"):
        table.add_column(name, justify="right", min_width=max(map(len, name.split())))
    for run in runs:
        summary = run.report["summary"]
        bad = len(run.bad)
        table.add_row(
            run.profile,
            run.report["strategy"],
            str(summary["pass"]),
            f"[bold red]{bad}[/]" if bad else "0",
            str(summary["not_supported"]),
            f"{run.report['seconds']:.1f}",
        )
    console.print(table)
    for run in runs:
        for case in run.bad:
            detail = case["detail"]
            clause = f"{detail['clause']}: " if "clause" in detail else ""
            console.print(
                f"[bold red]{case['status']}[/] {run.profile}: {case['id']}  {escape(case['title'])}", soft_wrap=True
            )
            console.print(f"  {escape(clause + str(detail.get('message', '')))}", highlight=False, soft_wrap=True)
            for name, value in (detail.get("values") or {}).items():
                console.print(f"    {escape(name)}: {escape(str(value))}", highlight=False, soft_wrap=True)
            console.print(f"  replay: {escape(run.replay_of(case))}", highlight=False, soft_wrap=True)
    told = Judgement()
    for run in runs:
        one = Judgement.from_dict(run.report["histories"])
        told.add(replace(one, remarks=[f"{run.profile}: {remark}" for remark in one.remarks]))
    console.print(escape(str(told)), highlight=False, soft_wrap=True)
    for remark in told.remarks:
        console.print(f"note: {escape(remark)}", highlight=False, soft_wrap=True)
    totals = {status: sum(run.report["summary"][status] for run in runs) for status in STATUSES}
    counts = ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in totals.items() if n)
    seeds = ", ".join(sorted({str(run.report["seed"]) for run in runs}))
    console.print(f"{len(runs)} profiles, level {runs[0].report['level']}, seed {seeds}: {counts}", highlight=False)
