# SPDX-License-Identifier: Apache-2.0
"""The suite run in another process: options go there, what happens comes back in lines of JSON.

Listener is the caller's side, Teller the other one. So a run that is lost on its way still has what had been told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import capabilities, runner
from .lanes import LANES
from .results import CaseResult, SuiteResult
from .runner import Options, Progress


def told_options(options: Options) -> str:
    """As JSON. Paths are absolute: the other side may be in another folder."""
    return json.dumps({k: str(v.absolute()) if isinstance(v, Path) else v for k, v in asdict(options).items()})


def options_told(text: str) -> Options:
    told = json.loads(text)
    paths = {k: Path(told[k]) for k in ("library", "waivers", "cases_dir") if told[k] is not None}
    return Options(**{**told, **paths})


class Listener:
    """What has been heard of a run."""

    def __init__(self, options: Options, lane: str, what: str, progress: Progress | None) -> None:
        """`what` carries the suite there: "guest", say."""
        self._options, self._lane, self._what, self._progress = options, lane, what, progress
        self.notes: list[str] = []
        self.forget()

    def forget(self) -> None:
        self.error: str | None = None
        self._started: SuiteResult | None = None
        self._running: CaseResult | None = None
        self._ended: list[CaseResult] = []

    def hear(self, line: bytes) -> None:
        told = json.loads(line)
        if "error" in told:
            self.error = str(told["error"])
        elif "started" in told:
            self._started = SuiteResult.from_dict(told["started"], told["replay"])
        elif "begins" in told:
            self._running = CaseResult.from_dict(told["begins"])
        else:
            result = CaseResult.from_dict(told["ended"])
            self._running = None
            self._ended.append(result)
            if self._progress is not None:
                self._progress(result, told["done"], told["total"])

    def outcome_of(self, message: str, output: str) -> SuiteResult:
        """As far as it came. The case that ran when the other side was lost carries what is known of that."""
        result = self._started if self._started is not None else self._bare()
        lost = self._running
        if lost is None:
            title = f"The {self._what} starts, and runs the suite"
            lost = CaseResult(f"{self._lane}.{self._what}", title, (), "core", "", 0.0, {}, 0)
        lost.status, lost.detail = "internal_error", {"message": message, "output": output}
        result.cases = [*self._ended, lost]
        if self._progress is not None:
            self._progress(lost, len(result.cases), len(result.cases))
        result.partial = True
        result.notes.append(f"the {self._what} was lost: what had not run by then was not run")
        return result

    def _bare(self) -> SuiteResult:
        """Of a run of which nothing was heard."""
        options, unknown = self._options, "unknown"
        return SuiteResult(
            backend={
                "name": str(options.library or options.backend), "version": unknown, "abi": unknown, "library": unknown,
                "device": dict.fromkeys(("name", "vendor", "model", "firmware", "address"), unknown),
            },
            lane=self._lane, profile=options.profile, provider=None,
            capabilities={
                "completion_level": capabilities.COMPLETION_LEVELS[0],
                "flags": {name: False for _, name, _ in capabilities.FLAGS},
                "limits": dict.fromkeys(capabilities.LIMITS, 0),
            },
            strategy=unknown, strategy_reason="", seed=options.seed or 0, level=options.level, ranks=options.ranks,
            partial=True, cannot_prove=LANES[self._lane].cannot_prove, environment=runner.environment(),
            replay=runner.replay(options),
        )  # fmt: skip


class Teller(runner.Watcher):
    def __init__(self, say: Callable[[dict[str, Any]], None], labels: Sequence[str]) -> None:
        self._say, self._labels = say, labels

    def started(self, result: SuiteResult) -> None:
        result.labels += self._labels
        self._say({"started": result.as_dict(), "replay": result.replay})

    def begins(self, case: CaseResult) -> None:
        self._say({"begins": case.as_dict()})

    def ended(self, case: CaseResult, done: int, total: int) -> None:
        self._say({"ended": case.as_dict(), "done": done, "total": total})
