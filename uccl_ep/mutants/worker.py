# SPDX-License-Identifier: Apache-2.0
"""Run cases on one NIC and one core, and print each outcome as a line of JSON.

Started by the runner as a process of its own, since the core is chosen when Python loads it: by LD_LIBRARY_PATH and
UCCL_EP_FAULT_POINTS. The job comes as one JSON document on the standard input.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..conformance import runner
from ..conformance.registry import Case
from ..conformance.results import CaseResult
from ..lab import nics
from ..paths import library_dir, mutation_dir
from . import programs
from .registry import Ground

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    nic: str  # options of the mutant backend, but for the seed; with a profile: knobs
    seeds: tuple[int, ...]
    clause: str = ""  # run the cases that cite it, until one kills; "": look at the NIC, or run `cases`
    first: tuple[str, ...] = ()
    cases: tuple[tuple[str, int], ...] = ()  # (case, seed)
    hanging: bool = False  # an end that does not come counts
    time_scale: float = 1.0
    capabilities: dict[str, Any] | None = None  # as a look at the unbroken NIC found them
    strategy: str = ""
    profile: str = ""  # of a virtual NIC
    asked: str = "auto"  # the strategy to ask for
    kernels: bool = False  # cases are posted by kernels
    heap: str = "host"
    program: str = ""  # instead of cases: the wrong caller; in a baseline, the right one
    vendor: str = ""  # this process is in the lab
    says: str = ""

    @property
    def ground(self) -> Ground:
        return Ground(self.nic, self.profile, self.asked, self.kernels, self.heap, self.vendor)

    @staticmethod
    def from_json(text: str) -> Job:
        plain = json.loads(text)
        plain["cases"] = tuple((str(c), int(s)) for c, s in plain["cases"])
        return Job(**{**plain, "seeds": tuple(plain["seeds"]), "first": tuple(plain["first"])})


def is_kill(result: CaseResult, hanging: bool, says: str = "") -> bool:
    """An assertion of the case failed; or, where the clause is about that, something did not end. A crash is none.
    With `says` it is any failure that says so, or of which a communicator's record does."""
    if says:
        told = [result.message, *result.detail.get("recorded", [])]
        return result.status == "fail" and any(says in text for text in told)
    if result.status == "timeout":
        return hanging
    if result.status != "fail":
        return False
    # An error that the case did not ask for comes from a wait that was given up: not an assertion.
    return hanging or not result.message.startswith("unexpected ")


def lab_options(job: Job) -> runner.Options:
    """What the lab of such a job is made of."""
    backend, _, variant = job.vendor.partition(":")
    return runner.Options(backend=backend, lane="provider", variant=variant, seed=job.seeds[0], ranks=2)


def faulty(vendor: str) -> Path:
    """The backend with its faults."""
    return mutation_dir() / f"libuccl_ep_backend_{vendor.partition(':')[0]}_faults.so"


def _options(job: Job, seed: int) -> runner.Options:
    return replace(
        _ground(job, seed),
        level="full",
        seed=seed,
        clauses=(job.clause,) if job.clause else (),
        time_scale=job.time_scale,
    )


def _ground(job: Job, seed: int) -> runner.Options:
    """Where it runs."""
    if job.vendor:
        return replace(
            lab_options(job),
            library=faulty(job.vendor) if job.capabilities is not None else None,
            devices=[nic.name for nic in nics.describe(os.environ["UCCL_EP_LAB"])],
            backend_options=job.nic,
            variants=False,
        )
    if job.profile:
        return runner.Options(
            backend="sim",
            profile=job.profile,
            backend_options=job.nic,
            strategy=job.asked,
            heap=job.heap,
            variants=False,
        )
    return runner.Options(
        library=library_dir() / "libuccl_ep_backend_mutant.so",
        lane="gpu" if job.kernels else None,
        accel="cpu" if job.kernels else None,
        ranks=2 if job.kernels else 4,
        variants=not job.kernels,
        backend_options=",".join(filter(None, (job.nic, f"seed={seed}"))),
        strategy=job.asked,
    )


def _say(**content: Any) -> None:
    print(json.dumps(content, default=str), flush=True)


def _run(case: Case, job: Job, seed: int) -> bool:
    assert job.capabilities is not None
    result = runner.run_case(case, _options(job, seed), seed, job.capabilities)
    killed = is_kill(result, job.hanging, job.says)
    _say(
        case=case.id,
        seed=seed,
        status=result.status,
        killed=killed,
        asserted=result.broken_clause or "",
        message=result.message,
        seconds=round(result.seconds, 3),
    )
    return killed


def _cases(job: Job, seed: int) -> list[Case]:
    options = _options(job, seed)
    if job.program:
        return [programs.case_of(job.program, wrong=bool(job.clause))]
    return runner.plan(options, runner.check(options), job.strategy)[0]


def _hunt(job: Job) -> None:
    """For each seed, until a case kills: those that are expected to first, then those that did before."""
    cases = _cases(job, job.seeds[0])
    order = {name: i for i, name in enumerate(job.first)}
    for seed in job.seeds:
        for case in sorted(cases, key=lambda c: order.get(c.id, len(cases))):
            if _run(case, job, seed):
                order[case.id] = -1
                break


def _baseline(job: Job) -> None:
    cases = {c.id: c for c in _cases(replace(job, clause=""), job.seeds[0])}
    for name, seed in job.cases:
        _run(cases[name], job, seed)


def main() -> None:
    # With the runner's death, however it dies, comes ours, and with ours that of the ranks.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    job = Job.from_json(sys.stdin.read())
    if job.clause:
        _hunt(job)
    elif job.cases:
        _baseline(job)
    else:
        found = runner.probe(_options(job, job.seeds[0]))
        _say(capabilities=found["capabilities"], strategy=found["strategy"])


if __name__ == "__main__":
    main()
