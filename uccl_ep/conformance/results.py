# SPDX-License-Identifier: Apache-2.0
"""What a run came to, as data and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .judgement import Judgement
from .registry import CLAUSES

SCHEMA = "uccl_ep.conformance/1"
STATUSES = ("pass", "fail", "crash", "timeout", "not_supported", "waived", "internal_error")
BAD = frozenset({"fail", "crash", "timeout", "internal_error"})


@dataclass
class CaseResult:
    id: str
    title: str
    clauses: tuple[str, ...]
    level: str
    status: str
    seconds: float
    detail: dict[str, Any]
    ranks: int
    checks: int = 0
    hash: str = ""  # of a simulated run: equal hashes, equal runs
    histories: Judgement = field(default_factory=Judgement)

    @property
    def bad(self) -> bool:
        return self.status in BAD

    @property
    def broken_clause(self) -> str | None:
        """The clause that the failing assertion cites."""
        clause = self.detail.get("clause")
        return str(clause) if clause is not None else None

    @property
    def message(self) -> str:
        return str(self.detail.get("message", ""))

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "title": self.title,
            "clauses": list(self.clauses),
            "level": self.level,
            "status": self.status,
            "seconds": round(self.seconds, 4),
            "ranks": self.ranks,
            "checks": self.checks,
            "detail": self.detail,
            "histories": self.histories.as_dict(),
            **({"hash": self.hash} if self.hash else {}),
        }

    @staticmethod
    def from_dict(told: dict[str, Any]) -> CaseResult:
        histories = Judgement.from_dict(told["histories"])
        return CaseResult(**{**told, "clauses": tuple(told["clauses"]), "histories": histories})


@dataclass
class SuiteResult:
    backend: dict[str, Any]  # name, version, abi, library, device
    lane: str
    profile: str | None
    provider: str | None
    capabilities: dict[str, Any]
    strategy: str
    strategy_reason: str
    seed: int
    level: str
    ranks: int
    partial: bool  # cases were picked by name or clause
    cannot_prove: Sequence[str]
    environment: dict[str, Any]
    replay: str  # command line up to the case
    cases: list[CaseResult] = field(default_factory=list)
    not_in_lane: list[str] = field(default_factory=list)
    waivers: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    heap: str = "host memory"  # where heaps lie, and whether they are staged
    accelerator: dict[str, Any] | None = None  # of the lane gpu: kind, name, heap and so on
    labels: list[str] = field(default_factory=list)  # what must be known to read this result, in a few words each
    wire: dict[str, Any] | None = None  # of the lane softroce: its guest, and what was counted on its devices
    lab: dict[str, Any] | None = None  # of the lane provider: the NICs, and whose libraries drove them
    knobs: str = ""  # of a virtual NIC, that differ from its profile
    seconds: float = 0.0
    mutation: dict[str, Any] | None = None

    @property
    def summary(self) -> dict[str, int]:
        counts = Counter(c.status for c in self.cases)
        return {status: counts[status] for status in STATUSES}

    @property
    def histories(self) -> Judgement:
        total = Judgement()
        for case in self.cases:
            told = case.histories
            total.add(replace(told, remarks=[f"{case.id}: {remark}" for remark in told.remarks]))
        return total

    @property
    def failed(self) -> bool:
        return any(c.bad for c in self.cases) or not self.cases

    @property
    def not_run(self) -> list[str]:
        """The clauses that no case of this run cites."""
        return [clause for clause, cases in self.by_clause().items() if not cases]

    @property
    def conclusive(self) -> bool:
        """Whether enough was run to say that the backend conforms. That it does not, one failure says."""
        return not self.partial and not self.not_run

    @property
    def verdict(self) -> str:
        if self.failed:
            return "does not conform"
        missing = f"{len(self.not_run)} clause{'s' if len(self.not_run) != 1 else ''}"
        if self.partial:
            return "no verdict: only some cases were run" + (f", and {missing} not at all" if self.not_run else "")
        if self.not_run:
            return f"no verdict: {missing} {'have' if len(self.not_run) != 1 else 'has'} no case"
        waived = ", with waivers" if self.summary["waived"] else ""
        return f"conforms at level {self.level}{waived}"

    @property
    def kernels(self) -> str:
        """Whose kernels posted, in words; none: nothing."""
        if self.accelerator is None:
            return ""
        of = self.accelerator
        what = f"{of['kind']}, {of['architecture']}, warps of {of['warp_size']}"
        return f"{of['name']} ({what}), heaps in {of['heap']} memory"

    def by_clause(self) -> dict[str, list[CaseResult]]:
        """The cases that check a clause; also those that were found to break it while they checked others."""
        return {c: [case for case in self.cases if c in case.clauses or c == case.broken_clause] for c in CLAUSES}

    def replay_of(self, case: CaseResult) -> str:
        return f"{self.replay} --seed {self.seed} --case {case.id}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "backend": self.backend["name"],
            "lane": self.lane,
            "profile": self.profile,
            "knobs": self.knobs,
            "provider": self.provider,
            "accelerator": self.accelerator,
            "labels": self.labels,
            "wire": self.wire,
            "lab": self.lab,
            "identity": self.backend,
            "capabilities": self.capabilities,
            "strategy": self.strategy,
            "strategy_reason": self.strategy_reason,
            "heap": self.heap,
            "seed": self.seed,
            "level": self.level,
            "ranks": self.ranks,
            "verdict": self.verdict,
            "partial": self.partial,
            "seconds": round(self.seconds, 3),
            "cases": [c.as_dict() for c in self.cases],
            "not_in_lane": self.not_in_lane,
            "summary": self.summary,
            "histories": self.histories.as_dict(),
            "waivers": self.waivers,
            "notes": self.notes,
            "cannot_prove": list(self.cannot_prove),
            "mutation": self.mutation,
            "environment": self.environment,
        }

    @staticmethod
    def from_dict(report: dict[str, Any], replay: str) -> SuiteResult:
        """What as_dict() gave in another process."""
        told = {k: v for k, v in report.items() if k not in ("schema", "verdict", "summary", "histories", "identity")}
        cases = [CaseResult.from_dict(case) for case in told.pop("cases")]
        return SuiteResult(**{**told, "backend": report["identity"]}, cases=cases, replay=replay)

    def json_text(self) -> str:
        # NaN and infinity are no JSON: better to fail here than in the reader's hands.
        return json.dumps(self.as_dict(), indent=1, allow_nan=False)
