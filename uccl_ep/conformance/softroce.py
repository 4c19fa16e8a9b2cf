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
from dataclasses import replace
from pathlib import Path
from typing import Any

from uccl_ep.softroce import Guest, GuestDied, Missing, wire
from uccl_ep.softroce.guest import Limits

from . import runner
from .errors import SuiteError
from .remote import Listener, Teller, options_told, told_options
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


def run_in_guest(options: Options, progress: Progress | None = None) -> SuiteResult:
    """Boot a guest, run the suite in it. Raises SuiteError if the machine lacks what that takes."""
    options = runner.seeded(options)
    run = Listener(options, "softroce", "guest", progress)

    def died_once(death: GuestDied) -> None:
        run.forget()
        run.notes.append(f"{death}; the run was repeated. Last line: {(death.console.splitlines() or ['none'])[-1]}")

    limits = Limits(
        run=_RUN_SECONDS[options.level] * options.time_scale,
        silence=_SILENCE_SECONDS * options.time_scale,
    )
    try:
        guest = Guest()
        done = guest.run(
            _command(),
            limits,
            inputs={"options": told_options(options).encode()},
            outputs=("report",),
            on_line=run.hear,
            on_death=died_once,
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


def _command() -> str:
    """For the guest's shell: this Python, with what decides what it loads."""
    kept = {k: v for k, v in os.environ.items() if k in _ENVIRONMENT or k.startswith("UCCL_EP_")}
    words = " ".join(f"{k}={shlex.quote(v)}" for k, v in sorted(kept.items()) if k.isidentifier())
    return f"cd /; exec env {words} {shlex.quote(sys.executable)} -m {__name__}\n"


# ----------------------------------------------------------------------------------------------------- the guest's side


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
    options = options_told((_OUT / "options").read_text())
    with open(_LINES, "wb", buffering=0) as lines:

        def say(message: dict[str, Any]) -> None:
            left = memoryview(json.dumps(message, allow_nan=False).encode() + b"\n")
            while left:
                left = left[lines.write(left) :]

        teller = Teller(say, labels(options))
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
