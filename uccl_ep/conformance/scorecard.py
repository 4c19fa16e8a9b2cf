# SPDX-License-Identifier: Apache-2.0
"""A run as one HTML page that a person can read, print and send: nothing outside the file, no scripts."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import files
from .capabilities import FLAGS
from .errors import SuiteError
from .registry import CLAUSES
from .results import BAD, CaseResult, SuiteResult

GROUPS = {
    "PUB": "Posting",
    "PUT": "Put",
    "SIG": "Signal",
    "QUI": "Quiet",
    "MEM": "Memory",
    "PRG": "Progress",
    "LIM": "Limits",
    "THR": "Threads",
    "ERR": "Failure",
    "ABT": "Abort",
    "ABI": "Interface",
}


def read_mutants(path: Path) -> dict[str, Any]:
    """The JSON of `uccl-ep mutants`, checked: {"score", "killed", "total", "survivors"}."""
    try:
        data = json.loads(path.read_text("utf-8"))
        mutants = data["mutants"]
        if data["schema"] != "uccl_ep.mutants/1":
            raise ValueError(f"schema {data['schema']!r}")
        score = float(data["score"])
        if not 0 <= score <= 1:
            raise ValueError(f"score {score}")
        return {
            "score": score,
            "total": len(mutants),
            "killed": sum(bool(m["killed"]) for m in mutants),
            "survivors": [{"name": str(m["name"]), "clause": str(m["clause"])} for m in mutants if not m["killed"]],
        }
    except OSError as error:
        raise SuiteError(f"--mutants-json {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise SuiteError(f"--mutants-json {path}: not a report of `uccl-ep mutants`: {error}") from error


def clause_status(cases: list[CaseResult]) -> str:
    """One word for a clause: the worst that happened to a case of it."""
    if not cases:
        return "not run"
    statuses = {c.status for c in cases}
    # A case of several clauses that failed on one of them says nothing bad of the others.
    for status in ("fail", "crash", "timeout", "internal_error", "waived"):
        if status in statuses:
            return status
    return "not supported" if statuses == {"not_supported"} else "pass"


def _blamed(result: SuiteResult) -> dict[str, list[CaseResult]]:
    """Per clause, the cases that count for it: a failed case counts for the clause that it cites, if it cites one."""
    table = {}
    for clause, cases in result.by_clause().items():
        table[clause] = [c for c in cases if not (c.status in BAD and c.broken_clause not in (None, clause))]
    return table


def _replay(result: SuiteResult, case: CaseResult) -> str:
    return result.replay_of(case)


def _values(case: CaseResult) -> list[tuple[str, str]]:
    rows = [(k, str(v)) for k, v in (case.detail.get("values") or {}).items()]
    rows += [(k, str(case.detail[k])) for k in ("rank", "at", "died_of", "capability") if k in case.detail]
    # One that holds is told elsewhere; one that has expired is why a known failure counts again.
    if isinstance(case.detail.get("waiver"), str):
        rows.append(("waiver", case.detail["waiver"]))
    return rows


def _texts(case: CaseResult) -> list[tuple[str, str]]:
    """Longer parts of a detail: what the ranks printed, where they hung."""
    found = []
    for name in ("output", "trace", "report", "stacks"):
        value = case.detail.get(name)
        if isinstance(value, dict):
            found += [(f"{name}, rank {k}", str(v)) for k, v in value.items() if v]
        elif value:
            found.append((name, str(value)))
    return found


@dataclass(frozen=True)
class Chip:
    """A case and its variants, as one thing to look at."""

    id: str
    title: str
    runs: list[CaseResult]

    @property
    def worst(self) -> str:
        return next((c.status for c in self.runs if c.bad), self.runs[0].status)


def _chips(clause: str, cases: list[CaseResult]) -> tuple[list[Chip], list[Chip]]:
    """The cases about this clause, and those that check it beside something else. What failed is always shown."""
    chips: dict[str, Chip] = {}
    for c in cases:
        name = c.id.partition("@")[0]
        chips.setdefault(name, Chip(name, c.title, [])).runs.append(c)
    prefix = clause.replace("-", "").lower() + "."
    shown = [chip for chip in chips.values() if chip.id.startswith(prefix) or chip.worst in BAD]
    more = [chip for chip in chips.values() if chip not in shown]
    return (shown, more) if shown else (more, [])


def render(result: SuiteResult) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("uccl_ep.conformance", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    blamed = _blamed(result)
    groups = [
        (
            title,
            [(c, CLAUSES[c], clause_status(blamed[c]), *_chips(c, blamed[c])) for c in CLAUSES if c.startswith(prefix)],
        )
        for prefix, title in GROUPS.items()
    ]
    ran = [c for c in result.cases if c.status != "not_supported"]
    return environment.get_template("scorecard.html.j2").render(
        result=result,
        groups=groups,
        promised=[(name, text) for _, name, text in FLAGS if result.capabilities["flags"][name]],
        not_promised=[name for _, name, _ in FLAGS if not result.capabilities["flags"][name]],
        limits={k: v for k, v in result.capabilities["limits"].items() if v},
        failures=[c for c in result.cases if c.bad],
        waived=[c for c in result.cases if c.status == "waived"],
        unsupported=[c for c in result.cases if c.status == "not_supported"],
        clauses_shown=sum(clause_status(cases) == "pass" for cases in blamed.values()),
        clauses_total=len(CLAUSES),
        checks=sum(c.checks for c in ran),
        replay=_replay,
        values=_values,
        texts=_texts,
        command=shlex.join(result.environment["command"]),
    )


def write(result: SuiteResult, path: Path) -> None:
    files.write(path, render(result).encode())
