# SPDX-License-Identifier: Apache-2.0
"""The lane `softroce`: the same suite, run by the same runner, inside a guest with RDMA devices (uccl_ep.softroce).

run_in_guest() is the caller's side: it boots, hands the options over, passes results on as they come, and makes one
result of a run whose guest hung or died. `python -m uccl_ep.conformance.softroce` is the guest's: it makes the devices,
runs the suite, which imports once and forks a process for every rank, and counts what went over the wire.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from uccl_ep.softroce import Guest, GuestDied, Missing, wire
from uccl_ep.softroce.guest import Limits

from . import capabilities, runner
from .errors import SuiteError
from .lanes import LANES
from .results import CaseResult, SuiteResult
from .runner import Options, Progress

# Backends of vendors whose device this is not: they take it for theirs, with that vendor's limits, if they are told.
LIMITS_ONLY = {"connectx": "limits_only=1", "thor": "limits_only=1", "pollara": "limits_only=1"}
_RUN_SECONDS = {"core": 1800.0, "full": 4 * 3600.0}
_SILENCE_SECONDS = 600.0
_LINES = "/dev/ttyS1"
_OUT = Path("/out")
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "LANG", "LC_ALL")


# ---------------------------------------------------------------------------------------------------- the caller's side


class _Run:
    """What has been heard of a run."""

    def __init__(self, options: Options, progress: Progress | None) -> None:
        self._options, self._progress = options, progress
        self.notes: list[str] = []
        self._forget()

    def _forget(self) -> None:
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

    def died_once(self, death: GuestDied) -> None:
        self._forget()
        self.notes.append(f"{death}; the run was repeated. Last line: {(death.console.splitlines() or ['none'])[-1]}")

    def outcome_of(self, message: str, console: str) -> SuiteResult:
        """As far as it came. The case that ran when the guest was lost carries what is known of that."""
        result = self._started if self._started is not None else _bare(self._options)
        lost = self._running
        if lost is None:
            lost = CaseResult("softroce.guest", "The guest boots, and runs the suite", (), "core", "", 0.0, {}, 0)
        lost.status, lost.detail = "internal_error", {"message": message, "output": console}
        result.cases = [*self._ended, lost]
        if self._progress is not None:
            self._progress(lost, len(result.cases), len(result.cases))
        result.partial = True
        result.notes.append("the guest was lost: what had not run by then was not run")
        return result


def _bare(options: Options) -> SuiteResult:
    """Of a run of which nothing was heard."""
    unknown = "unknown"
    return SuiteResult(
        backend={
            "name": str(options.library or options.backend), "version": unknown, "abi": unknown, "library": unknown,
            "device": dict.fromkeys(("name", "vendor", "model", "firmware", "address"), unknown),
        },
        lane="softroce", profile=None, provider=None,
        capabilities={
            "completion_level": capabilities.COMPLETION_LEVELS[0],
            "flags": {name: False for _, name, _ in capabilities.FLAGS},
            "limits": dict.fromkeys(capabilities.LIMITS, 0),
        },
        strategy=unknown, strategy_reason="", seed=options.seed or 0, level=options.level, ranks=options.ranks,
        partial=True, cannot_prove=LANES["softroce"].cannot_prove, environment=runner.environment(),
        replay=runner.replay(options),
    )  # fmt: skip


def run_in_guest(options: Options, progress: Progress | None = None) -> SuiteResult:
    """Boot a guest, run the suite in it. Raises SuiteError if the machine lacks what that takes."""
    options = runner.seeded(options)
    run = _Run(options, progress)
    limits = Limits(
        run=_RUN_SECONDS[options.level] * options.time_scale,
        silence=_SILENCE_SECONDS * options.time_scale,
    )
    try:
        guest = Guest()
        done = guest.run(
            _command(),
            limits,
            inputs={"options": json.dumps(_plain(options)).encode()},
            outputs=("report",),
            on_line=run.hear,
            on_death=run.died_once,
        )
    except Missing as missing:
        raise SuiteError(f"--lane softroce: {missing}") from missing
    except GuestDied as death:
        result = run.outcome_of(str(death), death.console)
    else:
        if run.error is not None:
            raise SuiteError(run.error)
        if "report" in done.files:
            result = SuiteResult.from_dict(json.loads(done.files["report"]), runner.replay(options))
            assert result.wire is not None
            result.wire |= {"boot_seconds": round(done.boot_seconds, 2), "guest_seconds": round(done.seconds, 2)}
        else:
            said = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}".strip()
            result = run.outcome_of(f"the suite ended in the guest with {done.status} and no report", said)
    result.environment["command"] = [Path(sys.argv[0]).name, *sys.argv[1:]]
    result.notes += run.notes
    return result


def _plain(options: Options) -> dict[str, Any]:
    """For JSON. Paths are absolute: the guest sees the same files, from another folder."""
    return {k: str(v.absolute()) if isinstance(v, Path) else v for k, v in asdict(options).items()}


def _command() -> str:
    """For the guest's shell: this Python, with what decides what it loads."""
    kept = {k: v for k, v in os.environ.items() if k in _ENVIRONMENT or k.startswith("UCCL_EP_")}
    words = " ".join(f"{k}={shlex.quote(v)}" for k, v in sorted(kept.items()) if k.isidentifier())
    return f"cd /; exec env {words} {shlex.quote(sys.executable)} -m {__name__}\n"


# ----------------------------------------------------------------------------------------------------- the guest's side


class _Teller(runner.Watcher):
    def __init__(self, options: Options, say: Callable[[dict[str, Any]], None]) -> None:
        self._options, self._say = options, say

    def started(self, result: SuiteResult) -> None:
        result.labels += labels(self._options)
        self._say({"started": result.as_dict(), "replay": result.replay})

    def begins(self, case: CaseResult) -> None:
        self._say({"begins": case.as_dict()})

    def ended(self, case: CaseResult, done: int, total: int) -> None:
        self._say({"ended": case.as_dict(), "done": done, "total": total})


def labels(options: Options) -> list[str]:
    found = ["Soft-RoCE"]
    if _with_device_options(options) != options:
        found.append("limits only")
    if options.impair:
        found.append(f"impaired: {' '.join(wire.IMPAIRMENT)}")
    return found


def _with_device_options(options: Options) -> Options:
    own = LIMITS_ONLY.get(options.backend) if options.library is None else None
    if own is None or own.partition("=")[0] in options.backend_options:
        return options
    return replace(options, backend_options=",".join(filter(None, (own, options.backend_options))))


def _judge_wire(result: SuiteResult, options: Options) -> None:
    """Faults that nobody met prove nothing."""
    counts = wire.counted()
    result.wire = {
        "kernel": os.uname().release,
        "impairment": " ".join(wire.IMPAIRMENT) if options.impair else "",
        "counted": counts,
    }
    if not options.impair:
        return
    lost = sum(counts[end]["dropped"] for end in wire.ENDS)
    if wire.bitten(counts):
        result.notes.append(f"the wire lost {lost} packets, and the devices noticed: see `wire` in the report")
    elif result.partial:
        result.notes.append(f"the wire lost {lost} packets, and the devices noticed none: these cases send too little")
    else:
        missed = CaseResult("softroce.wire", "The wire's faults are met", (), "core", "internal_error", 0.0, {}, 0)
        missed.detail = {"message": f"the wire lost {lost} packets, and the devices noticed none", "values": counts}
        result.cases.append(missed)


def main() -> int:
    told = json.loads((_OUT / "options").read_text())
    paths = {k: Path(told[k]) for k in ("library", "waivers", "cases_dir") if told[k] is not None}
    options = Options(**{**told, **paths})
    with open(_LINES, "wb", buffering=0) as lines:

        def say(message: dict[str, Any]) -> None:
            left = memoryview(json.dumps(message, allow_nan=False).encode() + b"\n")
            while left:
                left = left[lines.write(left) :]

        teller = _Teller(options, say)
        try:
            wire.lay(wire.IMPAIRMENT if options.impair else ())
            result = runner.run_here(_with_device_options(options), teller.ended, teller)
        except SuiteError as error:
            say({"error": str(error)})
            return 2
        _judge_wire(result, options)
        (_OUT / "report").write_text(result.json_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
