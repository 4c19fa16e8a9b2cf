# SPDX-License-Identifier: Apache-2.0
"""Campaigns: which runs are made, and what is said of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import tool
from .tool import CHUNK, Job, Progress, Told

if TYPE_CHECKING:
    from rich.table import Table

# As uccl_ep.h numbers them.
STRATEGIES = (
    "auto",
    "ordered_atomic",
    "sender_hold",
    "fenced_atomic",
    "sequenced_immediate",
    "sender_hold_mailbox",
    "sender_hold_sum",
)
# Exhaustive exploration is for programs of this size; others are left out unless they are asked for by name.
MOST_RANKS = 3
MOST_OPERATIONS = 6


@dataclass(frozen=True)
class Drawn:
    """What seeds draw besides programs and schedules."""

    faults: bool = False
    any_nic: bool = False
    knobs: str | None = None  # added to what is drawn

    def options(self) -> dict[str, Any]:
        return {"faults": int(self.faults), "nic": int(self.any_nic), "knobs": self.knobs}

    def replay_line(self, told: Told) -> str:
        words = ["uccl-ep explore", "--profile", told["profile"], "--seed", str(told["seed"])]
        words += ["--faults"] * self.faults + ["--any-nic"] * self.any_nic
        words += ["--knobs", self.knobs] if self.knobs else []
        return " ".join(words)


@dataclass
class Report:
    mode: str
    rows: list[Told] = field(default_factory=list)
    seconds: float = 0.0
    begun: float = field(default_factory=time.monotonic)

    @property
    def good(self) -> bool:
        return all(row["good"] for row in self.rows)

    def end(self) -> Report:
        self.seconds = time.monotonic() - self.begun
        return self

    def as_dict(self) -> dict[str, Any]:
        return {"mode": self.mode, "good": self.good, "seconds": round(self.seconds, 3), "results": self.rows}

    def tables(self) -> list[Table]:
        if self.mode == "random":
            return [_random_table(self.rows)]
        if self.mode == "exhaustive":
            return [_exhaustive_table(self.rows)]
        return [_wrong_table(self.rows)] if self.mode == "wrong" else []

    def summary(self) -> str:
        bad = sum(not row["good"] for row in self.rows)
        if self.mode == "random":
            runs = sum(row["seeds"] for row in self.rows)
            operations = sum(row["operations"] for row in self.rows)
            found = f"{bad} of {len(self.rows)} profiles have a finding" if bad else "no forbidden outcome"
            return f"{found}: {runs} runs, {operations} operations of NICs, in {self.seconds:.0f} s"
        if self.mode == "exhaustive":
            runs = sum(row["runs"] for row in self.rows)
            complete = sum(row["complete"] for row in self.rows)
            found = f"{bad} findings" if bad else "no forbidden outcome"
            bounds = self.rows[0] if self.rows else {"duplicates": 0, "lost_doorbells": 0}
            return (
                f"{found}: {len(self.rows)} programs and profiles, {complete} of them in all schedules, {runs} runs, "
                f"in {self.seconds:.0f} s; of each run at most {bounds['duplicates']} pieces landed twice and "
                f"{bounds['lost_doorbells']} doorbells were lost"
            )
        return (
            f"{len(self.rows) - bad} of {len(self.rows)} as expected: caught where the NIC breaks the program, and "
            f"otherwise nothing that the contract forbids, in {self.seconds:.0f} s"
        )


def _or_any(programs: list[str]) -> list[str | None]:
    """None: whatever the seed draws."""
    return [*programs] or [None]


def random(
    profiles: list[str], programs: list[str], seeds: int, first: int, workers: int, progress: Progress,
    finding: Callable[[Told], None], drawn: Drawn,
) -> Report:  # fmt: skip
    """Seeds first .. first + seeds - 1 of every profile, in shares of CHUNK."""
    report = Report("random")
    jobs = []
    for profile in profiles:
        for program in _or_any(programs):
            for at in range(first, first + seeds, CHUNK):
                share = min(CHUNK, first + seeds - at)
                jobs.append(
                    Job.of("random", share, profile=profile, program=program, seed=at, seeds=share, **drawn.options())
                )
    rows: dict[str, Told] = {
        p: {"profile": p, "seeds": 0, "operations": 0, "steps": 0, "near_wrap": 0, "faulted": 0, "resets": 0,
            "refused": 0, "seconds": 0.0, "strategies": {}, "findings": [], "good": True}
        for p in profiles
    }  # fmt: skip
    given_up: set[str] = set()
    pending = list(jobs)
    while pending:
        batch = [job for job in pending if dict(job.options)["profile"] not in given_up]
        pending = []
        for job, told in tool.run_all(batch, workers, progress, lambda t: t["type"] == "finding"):
            row = rows[told["profile"]]
            batch.remove(job)
            if told["type"] == "finding":
                if told["profile"] in given_up:
                    continue
                row["findings"].append(told)
                row["good"] = False
                given_up.add(told["profile"])
                finding(told)
                continue
            for key in ("seeds", "operations", "steps", "near_wrap", "faulted", "resets", "refused", "seconds"):
                row[key] += told[key]
            for name, count in zip(STRATEGIES, told["strategies"], strict=False):
                if count:
                    row["strategies"][name] = row["strategies"].get(name, 0) + count
        # A finding stops its own profile; what the others have left goes on.
        pending = batch
    report.rows = [rows[p] for p in profiles]
    return report.end()


def replay(
    profiles: list[str], seed: int, programs: list[str], drawn: Drawn, *, choices: str | None,
    say: Callable[[Told], None],
) -> Report:  # fmt: skip
    report = Report("replay")
    for profile in profiles:
        for program in _or_any(programs):
            told = tool.run(
                Job.of("replay", profile=profile, seed=seed, program=program, choices=choices, **drawn.options())
            )
            told["good"] = told["outcome"] == "allowed" or told["no_strategy"]
            report.rows.append(told)
            say(told)
    return report.end()


def small_programs(known: Told) -> list[str]:
    return [
        p["name"]
        for p in known["programs"]
        if not p["wrong"] and p["ranks"] <= MOST_RANKS and p["operations"] <= MOST_OPERATIONS
    ]


def exhaust(
    profiles: list[str], programs: list[str], known: Told, runs: int, workers: int, progress: Progress,
    say: Callable[[Told], None], *, events: bool = False, knobs: str | None = None, duplicates: int = 0,
    lost_doorbells: int = 0,
) -> Report:  # fmt: skip
    report = Report("exhaustive")
    jobs = [
        Job.of(
            "exhaustive",
            profile=profile,
            program=program,
            runs=runs,
            choose_run=int(not events),
            knobs=knobs,
            duplicates=duplicates,
            lost=lost_doorbells,
        )
        for profile in profiles
        for program in programs or small_programs(known)
    ]
    for _, told in tool.run_all(jobs, workers, progress, lambda t: False):
        told["good"] = "finding" not in told
        report.rows.append(told)
        say(told)
    report.rows.sort(key=lambda row: (profiles.index(row["profile"]), row["name"]))
    return report.end()


def wrong(
    profiles: list[str], programs: list[str], known: Told, seeds: int, first: int, workers: int, progress: Progress,
    *, knobs: str | None = None,
) -> Report:  # fmt: skip
    """A wrong program is as expected if it is caught on the profiles that it names, and if on every profile nothing
    worse than its own claim fails."""
    report = Report("wrong")
    names = [p["name"] for p in known["programs"] if p["wrong"] and (not programs or p["name"] in programs)]
    jobs = [
        Job.of("wrong", profile=profile, program=name, seeds=seeds, seed=first, knobs=knobs)
        for name in names
        for profile in profiles
    ]
    for _, told in tool.run_all(jobs, workers, progress, lambda t: False):
        must = told["profile"] in told["breaks_on"].split()
        told["must"] = must
        told["good"] = told["outcome"] in ("allowed", "claim") and (not must or told["caught"] > 0)
        report.rows.append(told)
    report.rows.sort(key=lambda row: (names.index(row["name"]), profiles.index(row["profile"])))
    return report.end()


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _random_table(rows: list[Told]) -> Table:
    table = _table("profile", "strategy", "runs", "near a wrap", "with a fault", "reset", "no strategy", "finding")
    for row in rows:
        found = ", ".join(f"[red]{f['outcome']} {f['clause']}, seed {f['seed']}[/]" for f in row["findings"]) or "none"
        table.add_row(
            row["profile"], ", ".join(row["strategies"]), str(row["seeds"]), str(row["near_wrap"]), str(row["faulted"]),
            str(row["resets"]), str(row["refused"]), found,
        )  # fmt: skip
    return table


def _exhaustive_table(rows: list[Told]) -> Table:
    table = _table("profile", "program", "runs", "outcomes", "schedules", "finding")
    for row in rows:
        found = row.get("finding")
        looked_at = "all" if row["complete"] else f"{row['reversed']} reversed"
        table.add_row(
            row["profile"], row["name"] or "file", str(row["runs"]), str(row["outcomes"]), looked_at,
            f"[red]{found['outcome']} {found['clause']}[/]" if found else "none",
        )  # fmt: skip
    return table


def _wrong_table(rows: list[Told]) -> Table:
    profiles = list(dict.fromkeys(row["profile"] for row in rows))
    table = _table("program", "duty", *profiles)
    for name in dict.fromkeys(row["name"] for row in rows):
        cells = []
        for profile in profiles:
            row = next(r for r in rows if r["name"] == name and r["profile"] == profile)
            cell = f"caught {row['caught']}" if row["caught"] else "holds"
            if row["outcome"] not in ("allowed", "claim"):
                cell = f"{row['outcome']} {row['clause']}"
            cells.append(cell if row["good"] else f"[red]{cell}[/]")
        table.add_row(name, next(r["duty"] for r in rows if r["name"] == name), *cells)
    return table
