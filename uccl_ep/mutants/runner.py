# SPDX-License-Identifier: Apache-2.0
"""Run the mutants: each on every seed until a case kills it, then those cases on the same NIC without the fault.

A mutant is killed if on every seed an assertion of a case that cites its clause failed, and that case is clean on the
unbroken NIC and core with the same disturbance and seed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from typing import Any

from ..conformance import provider
from ..conformance.errors import SuiteError
from ..conformance.gpu import DEVICE_FAULT
from ..paths import library_dir, mutation_dir
from .registry import ABOUT_HANGING, PROMPT, Ground, Mutant
from .worker import Job, faulty, lab_options

SCHEMA = "uccl_ep.mutants/1"
FAULT_POINTS = "UCCL_EP_FAULT_POINTS"
BACKEND_FAULT = "UCCL_EP_BACKEND_FAULT"
# Nothing here takes so long; a case has a deadline of its own.
WORKER_SECONDS = 900.0
# Not from the current folder, which may be a source tree.
_START = """
import sys
sys.path = [path for path in sys.path if path]
from uccl_ep.mutants.worker import main
main()
"""


class MutantsError(Exception):
    """The run cannot go on: something is not installed, or a worker broke. One line for a person."""


@dataclass
class Kill:
    seed: int
    case: str
    asserted: str  # the clause that the failing assertion cites
    message: str
    clean: bool = False  # the baseline


@dataclass
class Verdict:
    mutant: Mutant
    seeds: tuple[int, ...]
    kills: list[Kill] = field(default_factory=list)
    others: dict[str, int] = field(default_factory=dict)  # how cases ended that did not kill
    seconds: float = 0.0
    problem: str = ""

    @property
    def killed(self) -> bool:
        return not self.problem and {k.seed for k in self.kills if k.clean} == set(self.seeds)

    @property
    def by(self) -> list[str]:
        return sorted({k.case for k in self.kills})

    @property
    def asserted(self) -> list[str]:
        """Clauses that the failing assertions cite; where nothing ended, there was no assertion."""
        return sorted({k.asserted or "no end" for k in self.kills})

    @property
    def why_not(self) -> str:
        if self.problem:
            return self.problem
        missing = sorted(set(self.seeds) - {k.seed for k in self.kills})
        if missing:
            ended = ", ".join(f"{n} {status}" for status, n in sorted(self.others.items())) or "no case"
            return f"survived on seed {', '.join(map(str, missing))} ({ended})"
        dirty = [f"{k.case} on seed {k.seed}" for k in self.kills if not k.clean]
        return f"not clean without the fault: {', '.join(dirty)}" if dirty else ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.mutant.name,
            "clause": self.mutant.clause,
            "killed": self.killed,
            "by": self.by,
            "what": self.mutant.what,
            "nic": self.mutant.nic,
            "profile": self.mutant.profile or None,
            "seeds": list(self.seeds),
            "seconds": round(self.seconds, 2),
            "kills": [asdict(k) for k in self.kills],
            "why_not": self.why_not,
        }


@dataclass
class Result:
    verdicts: list[Verdict]
    seconds: float = 0.0
    left_out: dict[str, str] = field(default_factory=dict)  # mutants, and why they cannot be run here

    @property
    def score(self) -> float:
        return sum(v.killed for v in self.verdicts) / len(self.verdicts)

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "mutants": [v.as_dict() for v in self.verdicts],
            "score": self.score,
            "seconds": round(self.seconds, 1),
            "left_out": self.left_out,
        }


# What is told while it runs: the stage, how much of it is done, how much there is, and the mutant that was finished.
Progress = Callable[[str, int, int, Verdict | None], None]


class _Workers:
    """Processes at work; ended, all of them, when this is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._over = False

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over = True
            for process in self._running:
                # Its ranks are in groups of their own and die with it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def run(
        self, job: Job, fault_point: str | None, device_fault: str = "", backend_fault: str = ""
    ) -> Iterator[dict[str, Any]]:
        """What the worker says. `fault_point`: run the mutation core, with that point on; "" leaves all off.
        `device_fault`: of device.h. `backend_fault`: of a backend over libibverbs."""
        python, surrounding = sys.executable, dict(os.environ)
        if job.vendor:
            lab = provider.lab_of(lab_options(job))
            python, surrounding = str(lab.libraries.python()), provider.environment(lab)
        faults = (FAULT_POINTS, DEVICE_FAULT, BACKEND_FAULT)
        environment = {k: v for k, v in surrounding.items() if k not in faults}
        if device_fault:
            environment[DEVICE_FAULT] = device_fault
        if backend_fault:
            environment[BACKEND_FAULT] = backend_fault
        if fault_point is not None:
            paths = [str(mutation_dir()), environment.get("LD_LIBRARY_PATH", "")]
            environment["LD_LIBRARY_PATH"] = ":".join(filter(None, paths))
            if fault_point:
                environment[FAULT_POINTS] = fault_point
        with self._lock:
            if self._over:
                raise MutantsError("the run was ended")
            process = subprocess.Popen(
                [python, "-c", _START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                start_new_session=True,
            )
            self._running.add(process)
        try:
            out, err = process.communicate(json.dumps(asdict(job)), timeout=WORKER_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise MutantsError(
                f"a worker did not end within {WORKER_SECONDS:g} s: {job.ground}, {job.clause}"
            ) from None
        finally:
            with self._lock:
                self._running.discard(process)
        if process.returncode:
            last = err.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
            raise MutantsError(f"a worker broke ({job.ground}, fault point {fault_point!r}): {last[0]}")
        for line in out.splitlines():
            yield json.loads(line)


@dataclass(frozen=True)
class _Surroundings:
    """What a mutant and its baseline have in common."""

    ground: Ground
    core: bool  # the mutation core
    time_scale: float
    program: str

    @staticmethod
    def of(mutant: Mutant) -> _Surroundings:
        program = mutant.fault if mutant.place == "program" else ""
        return _Surroundings(mutant.ground, mutant.place == "core", mutant.time_scale, program)


def _check_installed() -> None:
    for path in (library_dir() / "libuccl_ep_backend_mutant.so", mutation_dir() / "libuccl_ep.so.0"):
        if not path.is_file():
            raise MutantsError(f"{path} is missing: install uccl_ep with its mutation libraries (pip install uccl_ep)")


def left_out(mutants: Sequence[Mutant]) -> dict[str, str]:
    """Those whose vendor's library, or the backend that it drives, is not here: name, and the reason with a remedy."""
    why: dict[str, str] = {}
    for vendor in sorted({m.vendor for m in mutants if m.vendor}):
        try:
            if not faulty(vendor).is_file():
                raise SuiteError(f"{faulty(vendor)} is missing: built without libibverbs' headers")
            provider.lab_of(lab_options(Job(PROMPT, (0,), vendor=vendor)))
        except SuiteError as error:
            why |= {m.name: str(error) for m in mutants if m.vendor == vendor}
    return why


def run(mutants: Sequence[Mutant], seeds: Sequence[int], *, jobs: int, progress: Progress) -> Result:
    """Raises MutantsError if the run cannot be made; a mutant that survives is a result."""
    _check_installed()
    absent = left_out(mutants)
    mutants = [m for m in mutants if m.name not in absent]
    if not mutants:
        raise MutantsError("; ".join(sorted(set(absent.values()))))
    began = time.monotonic()
    verdicts = {m.name: Verdict(m, tuple(seeds)) for m in mutants}
    # The workers end first, or the pool would wait for them.
    with ThreadPoolExecutor(jobs) as pool, _Workers() as workers:
        nics = _look(workers, pool, sorted({m.ground for m in mutants}), seeds[0])

        def hunt(mutant: Mutant) -> Verdict:
            verdict = verdicts[mutant.name]
            start = time.monotonic()
            _hunt(workers, verdict, nics[mutant.ground])
            verdict.seconds = time.monotonic() - start
            return verdict

        for i, future in enumerate(as_completed([pool.submit(hunt, m) for m in mutants]), 1):
            progress("mutants", i, len(mutants), future.result())
        _baselines(workers, pool, list(verdicts.values()), nics, jobs, progress)
    return Result(list(verdicts.values()), time.monotonic() - began, absent)


def _look(
    workers: _Workers, pool: ThreadPoolExecutor, grounds: Sequence[Ground], seed: int
) -> dict[Ground, tuple[dict[str, Any], str]]:
    """Promises and strategy of each unbroken NIC: what cases may ask for must not depend on what is broken."""

    def look(ground: Ground) -> tuple[dict[str, Any], str]:
        job = Job(
            ground.nic, (seed,), profile=ground.profile, asked=ground.strategy, kernels=ground.kernels,
            heap=ground.heap, vendor=ground.vendor,
        )  # fmt: skip
        (found,) = workers.run(job, None)
        return found["capabilities"], found["strategy"]

    return dict(zip(grounds, pool.map(look, grounds), strict=True))


def _hunt(workers: _Workers, verdict: Verdict, nic: tuple[dict[str, Any], str]) -> None:
    mutant = verdict.mutant
    # Of a virtual NIC, one that is broken is a knob.
    key = "broken" if mutant.profile else "fault"
    broken = ",".join(filter(None, (mutant.nic, f"{key}={mutant.fault}"))) if mutant.place == "nic" else mutant.nic
    job = Job(
        broken,
        verdict.seeds,
        mutant.clause,
        mutant.first,
        hanging=mutant.clause in ABOUT_HANGING,
        time_scale=mutant.time_scale,
        capabilities=nic[0],
        strategy=nic[1],
        profile=mutant.profile,
        asked=mutant.strategy,
        kernels=mutant.ground.kernels,
        heap=mutant.ground.heap,
        program=mutant.fault if mutant.place == "program" else "",
        vendor=mutant.vendor,
        says=mutant.says,
    )
    faults = {mutant.place: mutant.fault}
    try:
        for line in workers.run(job, faults.get("core"), faults.get("device", ""), faults.get("vendor", "")):
            if line["killed"]:
                verdict.kills.append(Kill(line["seed"], line["case"], line["asserted"], line["message"]))
            else:
                verdict.others[line["status"]] = verdict.others.get(line["status"], 0) + 1
    except MutantsError as error:
        verdict.problem = str(error)


def _baselines(
    workers: _Workers,
    pool: ThreadPoolExecutor,
    verdicts: Sequence[Verdict],
    nics: dict[Ground, tuple[dict[str, Any], str]],
    jobs: int,
    progress: Progress,
) -> None:
    """Each case that killed, once for all mutants with the same surroundings, without any fault."""
    wanted: dict[_Surroundings, dict[tuple[str, int], list[Kill]]] = {}
    for verdict in verdicts:
        for kill in verdict.kills:
            runs = wanted.setdefault(_Surroundings.of(verdict.mutant), {})
            runs.setdefault((kill.case, kill.seed), []).append(kill)
    # In parts, so that none of the jobs is left with most of the work.
    parts = [
        (where, keys[at : at + 12])
        for where, runs in wanted.items()
        for keys in [sorted(runs)]
        for at in range(0, len(keys), 12)
    ]
    total = sum(len(keys) for _, keys in parts)

    def check(part: tuple[_Surroundings, list[tuple[str, int]]]) -> int:
        where, keys = part
        capabilities, strategy = nics[where.ground]
        seeds = tuple(sorted({seed for _, seed in keys}))
        job = Job(
            where.ground.nic,
            seeds,
            cases=tuple(keys),
            time_scale=where.time_scale,
            capabilities=capabilities,
            strategy=strategy,
            profile=where.ground.profile,
            asked=where.ground.strategy,
            kernels=where.ground.kernels,
            heap=where.ground.heap,
            program=where.program,
            vendor=where.ground.vendor,
        )
        for line in workers.run(job, "" if where.core else None):
            for kill in wanted[where][line["case"], line["seed"]]:
                kill.clean = line["status"] == "pass"
        return len(keys)

    done = 0
    for n in pool.map(check, parts):
        done += n
        progress("baselines", done, total, None)
