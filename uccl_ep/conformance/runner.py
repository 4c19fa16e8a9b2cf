# SPDX-License-Identifier: Apache-2.0
"""Run the suite: `run_suite(Options(...))` gives a SuiteResult. The command line, pytest and mutants all call this.

The calling process should have one thread: every rank of every case is a fork of it, or one fork holds them all (sim).
"""

from __future__ import annotations

import datetime
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import gpu, registry, waivers
from .capabilities import NAMES, promised
from .errors import SuiteError
from .group import Group, GroupOutcome
from .lanes import LANES, VARIANT, Lane, lane_of
from .registry import LEVELS, MAX_RANKS, Case
from .results import CaseResult, SuiteResult

# Of the machine's time, for a case whose deadlines are virtual: so that one without an end does not stop the run.
GUARD_SECONDS = 120.0
ALL_PROFILES = "all"
STAGING = ("auto", "off", "on")


@dataclass(frozen=True)
class Options:
    backend: str = "shm"
    library: Path | None = None  # a backend by path instead of by name
    lane: str | None = None  # None: the backend's
    accel: str | None = None  # of the lane gpu: whose kernels
    heap: str = "host"  # or device memory
    staging: str = "auto"  # may a heap in device memory go through host memory
    warp_size: int | None = None  # of the CPU's emulation
    profile: str | None = None
    provider: str | None = None
    ranks: int = 4
    level: str = "core"
    seed: int | None = None  # None: drawn, and printed
    cases: Sequence[str] = ()  # globs
    clauses: Sequence[str] = ()
    waivers: Path | None = None
    backend_options: str = ""
    strategy: str = "auto"
    impair: bool = False  # of the lane softroce: faults on the wire
    variant: str | None = None  # of the lane provider: the NIC's generation,
    knobs: str = ""  # what of its profile is otherwise,
    libraries: str = "auto"  # whose libraries drive it,
    devices: Sequence[str] = ()  # and its names: rank i opens the i-th, modulo their number
    variants: bool = True  # run the cases that ask for it against the weakest promises too
    time_scale: float = 1.0  # more for sanitizers, emulators and machines under load
    stop_at_failure: bool = False
    cases_dir: Path | None = None


Progress = Callable[[CaseResult, int, int], None]


def _nearest(value: str, valid: Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(value, valid, n=1, cutoff=0.5)
    return f"valid: {', '.join(valid)}" + (f"; did you mean {close[0]!r}?" if close else "")


def check(options: Options) -> Lane:
    """Refuse what cannot be run, before anything is. Returns the lane."""
    name = lane_of(options.backend, options.library, options.lane)
    if name not in LANES:
        raise SuiteError(f"--lane {name!r}: {_nearest(name, sorted(LANES))}")
    if (name == "sim") != (options.backend == "sim" and options.library is None):
        raise SuiteError(f"--lane {name!r}: the lane 'sim' and the backend 'sim' go together")
    if options.level not in LEVELS:
        raise SuiteError(f"--level {options.level!r}: {_nearest(options.level, LEVELS)}")
    if not 1 <= options.ranks <= MAX_RANKS:
        raise SuiteError(f"--ranks {options.ranks}: valid: 1 to {MAX_RANKS}")
    if options.seed is not None and not 0 <= options.seed < 1 << 63:
        raise SuiteError(f"--seed {options.seed}: valid: 0 to 2^63 - 1")
    if not 0.1 <= options.time_scale <= 1000:
        raise SuiteError(f"--time-scale {options.time_scale:g}: valid: 0.1 to 1000")
    _check_accelerator(name, options)
    if name == "sim":
        _check_profile(options)
    elif name == "provider":
        from . import provider

        provider.lab_of(options)
    elif options.profile is not None:
        raise SuiteError(f"--profile {options.profile!r}: lane {name!r} has no profiles; leave it out")
    if name == "softroce" and options.library is None and options.backend == "shm":
        raise SuiteError(
            "--lane 'softroce': the backend 'shm' opens no RDMA device; give --backend connectx or another"
        )
    if name != "provider":
        for option, given in (
            ("--variant", options.variant), ("--knobs", options.knobs),
            ("--libraries", options.libraries if options.libraries != "auto" else ""),
        ):  # fmt: skip
            if given:
                raise SuiteError(f"{option} {given}: of the vendors' libraries on virtual NICs: add --lane provider")
    if options.impair and name != "softroce":
        raise SuiteError("--impair: faults on the wire of Soft-RoCE: add --lane softroce")
    if options.provider is not None:
        raise SuiteError(f"--provider {options.provider!r}: lane {name!r} has no providers; leave it out")
    for clause in options.clauses:
        if clause not in registry.CLAUSES:
            raise SuiteError(f"--clause {clause!r}: {_nearest(clause.upper(), list(registry.CLAUSES))}")
    if options.library is not None and not options.library.is_file():
        raise SuiteError(f"--library {options.library}: no such file; give the path of a backend's shared library")
    return LANES[name]


def _setup(options: Options) -> gpu.Setup | None:
    if options.accel is None:
        return None
    return gpu.Setup(options.accel, options.heap, 32 if options.warp_size is None else options.warp_size)


def _check_accelerator(lane: str, options: Options) -> None:
    if options.staging not in STAGING:
        raise SuiteError(f"--staging {options.staging!r}: {_nearest(options.staging, STAGING)}")
    if options.heap not in gpu.HEAPS:
        raise SuiteError(f"--heap {options.heap!r}: {_nearest(options.heap, gpu.HEAPS)}")
    if options.staging != "auto" and options.heap == "host":
        raise SuiteError(f"--staging {options.staging}: of heaps in device memory: add --heap device")
    if lane == "gpu":
        if options.accel is None:
            raise SuiteError(f"--accel is missing: whose kernels post: {', '.join(gpu.KINDS)}")
        if options.warp_size is not None and options.accel != "cpu":
            raise SuiteError(f"--warp-size: the warps of {options.accel!r} are as they are; it is for --accel cpu")
        setup = _setup(options)
        assert setup is not None
        gpu.check(setup)
        return
    for option, value, default in (
        ("--accel", options.accel, None),
        ("--heap", options.heap, "host" if lane != "sim" else options.heap),
        ("--warp-size", options.warp_size, None),
    ):
        if value != default:
            raise SuiteError(f"{option} {value}: of kernels that post: add --lane gpu")


def _check_profile(options: Options) -> None:
    from uccl_ep.errors import UcclEpError
    from uccl_ep.simulator import World, profiles

    known = list(profiles())
    if options.profile not in known:
        given = f"{options.profile!r}" if options.profile is not None else "is missing"
        raise SuiteError(f"--profile {given}: {_nearest(options.profile or '', [*known, ALL_PROFILES])}")
    try:
        World(1, options.profile, knobs=options.backend_options).close()
    except UcclEpError as error:
        raise SuiteError(f"--backend-options {options.backend_options}: {error.record.text}") from error


def check_all_profiles(options: Options) -> None:
    """As check(), for a run of every profile."""
    if not _simulated(options):
        raise SuiteError(f"--profile {ALL_PROFILES}: of virtual NICs: add --backend sim")
    from uccl_ep.simulator import profiles

    for name in profiles():
        check(replace(options, profile=name))


def _simulated(options: Options) -> bool:
    return lane_of(options.backend, options.library, options.lane) == "sim"


def backend_arguments(options: Options) -> dict[str, Any]:
    """What goes to every Communicator of a run. Also loads, once, what every rank would otherwise load for itself."""
    import numpy.random  # noqa: F401

    import uccl_ep.communicator  # noqa: F401
    from uccl_ep import backends
    from uccl_ep.errors import UcclEpError

    try:
        library = backends.find(options.library if options.library is not None else options.backend).library
    except UcclEpError as error:
        raise SuiteError(f"--backend {options.backend}: {error.record.text}") from error
    arguments: dict[str, Any] = {"backend": library}
    if options.backend_options and not _simulated(options):  # there they are the world's knobs
        arguments["backend_options"] = options.backend_options
    if options.staging != "auto":
        arguments["staging"] = options.staging
    if options.strategy != "auto":
        arguments["strategy"] = options.strategy
        if options.strategy == _SUMS:
            arguments["single_writer"] = True
    return arguments


def probe(options: Options) -> dict[str, Any]:
    """Who the backend is and what it promises: one rank, in a process of its own, since the library is a stranger's."""

    def look(ctx: Any) -> None:
        bench = ctx.open(shadow=False)
        info = bench.comm.info
        device = info.device
        ctx.notes = {
            "name": info.backend,
            "version": info.backend_version,
            "library": str(info.library),
            "abi": ".".join(map(str, info.backend_abi)),
            "strategy": str(info.strategy),
            "strategy_reason": info.strategy_reason,
            "heap": f"{info.heap_kind} memory"
            + (f", staged through host memory: {info.staged_reason}" if info.staged else ""),
            "accelerator": None if ctx.session is None else ctx.session.facts(),
            "device": {k: str(getattr(device, k)) for k in ("name", "vendor", "model", "firmware", "address")},
        }
        ctx.checked()

    case = Case("probe", look, ("ABI-1",), ranks=(1,))
    outcome = _run_group(case, 1, options, seed=0)
    who = options.library if options.library is not None else options.backend
    if outcome.status == "pass":
        return {**outcome.notes, "capabilities": outcome.caps}
    message = str(outcome.detail.get("message", outcome.status)).removeprefix("unexpected ")
    if outcome.status == "crash":
        message = f"its library ended the process while a communicator was made ({outcome.detail.get('died_of')})"
    raise SuiteError(f"backend {who}: {message}")


def _run_group(case: Case, size: int, options: Options, *, seed: int) -> GroupOutcome:
    from . import bench  # noqa: F401
    from .history import judged
    from .worker import run_rank

    arguments = backend_arguments(options)
    if _simulated(options):
        return _run_simulated(case, size, options, arguments, seed)

    lane = LANES[lane_of(options.backend, options.library, options.lane)]
    if options.devices:
        lane = replace(lane, devices=tuple(options.devices))

    def main(rank: int, sock: Any) -> None:
        run_rank(
            case, rank, size, sock, seed=seed, backend=arguments, time_scale=options.time_scale, setup=_setup(options),
            lane=lane,
        )  # fmt: skip

    return judged(Group(size, main, deadline=case.timeout * options.time_scale * lane.patience).run())


def _run_simulated(case: Case, size: int, options: Options, arguments: dict[str, Any], seed: int) -> GroupOutcome:
    from .simulation import Setup, run_world, warm_up

    assert options.profile is not None
    warm_up(Setup(options.profile, heap=options.heap), arguments["backend"])
    setup = Setup(options.profile, options.backend_options, options.heap)

    def main(_: int, sock: Any) -> None:
        run_world(case, size, sock, seed=seed, setup=setup, backend=arguments, time_scale=options.time_scale)

    return Group(1, main, deadline=GUARD_SECONDS * max(1.0, options.time_scale)).run()


def _hint(options: Options, wanted: Sequence[Case]) -> str:
    """Why nothing is selected, and what would be."""
    import difflib

    if registry.select(wanted, globs=options.cases, clauses=options.clauses):
        return "what matches is of --level full"
    if not options.cases:
        return "no case cites these clauses"
    if registry.select(wanted, globs=options.cases):
        return "what --case matches cites none of these clauses"
    ids = [c.id for c in wanted]
    glob = options.cases[0]
    if any(i.startswith(f"{glob.rstrip('.')}.") for i in ids):
        return f"no id is {glob!r}; try '{glob.rstrip('.')}.*'"
    if any(i.startswith(glob) for i in ids):
        return f"no id is {glob!r}; try '{glob}*'"
    close = difflib.get_close_matches(glob, [*ids, *dict.fromkeys(f"{i.partition('.')[0]}.*" for i in ids)], n=3)
    meant = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"no id matches {glob!r}; {meant}--list --level full shows all"


def _select(cases: Sequence[Case], options: Options, lane: Lane, strategy: str, others: Sequence[str]) -> list[Case]:
    """The cases that the options ask for, variants among them. `others`: strategies to run the weak ones with again."""
    wanted: list[Case] = []
    for c in cases:
        wanted.append(c)
        if not c.weak or not options.variants or options.strategy != "auto":
            continue
        if lane.name == "sim":
            wanted += [v for v in (_with_strategy(c, other) for other in others if other != strategy) if v is not None]
        # On a NIC that promises that little anyway there is nothing else to be seen.
        elif (weakest := lane.weakest_options(options.backend if options.library is None else "")) and (
            strategy != "sender_hold"
        ):
            again = c.as_variant(VARIANT, weakest)
            # The strategy is the proxies' matter: kernels post the same. An emulated machine has no time for it.
            wanted.append(replace(again, level="full") if lane.name in ("gpu", "softroce") else again)
    chosen = registry.select(wanted, level=options.level, globs=options.cases, clauses=options.clauses)
    if not chosen:
        raise SuiteError(f"no case is selected: {_hint(options, wanted)}")
    return chosen


# Its signal words have one rank that adds to them, which not every case can say of its own.
_SUMS = "sender_hold_sum"


def _with_strategy(case: Case, strategy: str) -> Case | None:
    if strategy != _SUMS:
        return replace(case.as_variant(strategy, {"strategy": strategy}), level="full")
    if case.many_writers:
        return None
    return replace(case.as_variant(strategy, {"strategy": strategy, "single_writer": True}), level="full")


def strategies() -> list[str]:
    """The names of all signal strategies that the library knows."""
    from uccl_ep import _native

    names = _native.enum_names("uccl_ep_strategy", "UCCL_EP_STRATEGY_").values()
    return [name.lower() for name in names if name != "AUTO"]


def admitted(options: Options, names: Sequence[str] = ()) -> list[str]:
    """The strategies (all, or of these) that this NIC can be made to use: each is asked for once."""

    def look(ctx: Any) -> None:
        ctx.open(shadow=False, single_writer=True)
        ctx.checked()

    found = []
    for name in names or strategies():
        case = Case("probe", look, ("SIG-7",), ranks=(2,))
        if _run_group(case, 2, replace(options, strategy=name), seed=0).status == "pass":
            found.append(name)
    return found


def listed(options: Options) -> list[Case]:
    """What would run on a NIC that promises order, which nobody is asked for: the backend is not loaded."""
    lane = check(options)
    # In virtual NICs every strategy runs somewhere.
    others = strategies() if lane.name == "sim" else []
    return _select(registry.load(options.cases_dir), options, lane, options.strategy, others)


def plan(
    options: Options, lane: Lane, strategy: str, others: Sequence[str] | None = None
) -> tuple[list[Case], list[str]]:
    """The cases to run, variants among them, and the ids of those that this lane has no means for."""
    cases = registry.load(options.cases_dir)
    for c in cases:
        unknown = [r for r in c.requires if r not in NAMES]
        if unknown:
            raise registry.RegistryError(f"case {c.id} requires {unknown}, which no NIC can promise")
    # Options of the user's may take from the NIC what the weakest strategy needs; or it has no adds itself.
    lacks = bool(options.backend_options) or strategy == "sequenced_immediate"
    if lane.name != "sim" and lacks and options.library is None:
        weakest = lane.weakest_options(options.backend).get("strategy")
        if weakest is not None and options.variants and not admitted(options, [weakest]):
            options = replace(options, variants=False)
    if others is None:
        wanted = lane.name == "sim" and options.level == "full" and options.variants and options.strategy == "auto"
        others = admitted(options) if wanted else []
    chosen = _select(cases, options, lane, strategy, others)
    provides = lane.provides
    if options.warp_size == 1:
        provides -= {"warps"}
    if options.heap == "device":
        provides -= {"heaps"}
    if options.heap == "device" and options.accel in (None, "cpu"):
        provides -= {"gigabytes"}  # emulated device memory is zeroed as a GPU's is: all of it is touched
    able = [c for c in chosen if c.needs <= provides]
    return able, [c.id for c in chosen if not c.needs <= provides]


def unrun(case: Case, options: Options) -> CaseResult:
    """A result that stands until there is one."""
    size = case.ranks_for(options.ranks)
    return CaseResult(case.id, case.title, case.clauses, case.level, "internal_error", 0.0, {}, size)


def run_case(case: Case, options: Options, seed: int, capabilities: dict[str, Any]) -> CaseResult:
    """Run one case and judge it."""
    result = unrun(case, options)
    size = result.ranks
    lacking = [r for r in case.requires if not promised(capabilities, r)]
    if lacking:
        result.status = "not_supported"
        result.detail = {"capability": lacking[0], "message": f"the NIC does not promise {', '.join(lacking)}"}
        return result
    outcome = _run_group(case, size, options, seed=seed)
    result.status, result.detail, result.checks = outcome.status, outcome.detail, outcome.checks
    result.seconds, result.hash, result.histories = outcome.seconds, outcome.hash, outcome.judgement
    if outcome.status == "pass" and not outcome.checks:
        result.status, result.detail = "internal_error", {"message": "the case asserted nothing"}
    elif outcome.status == "not_supported":
        capability = str(outcome.detail.get("capability"))
        if capability not in NAMES:
            result.status = "internal_error"
            result.detail["message"] = f"the case asks for {capability}, which no NIC can promise"
        elif promised(outcome.caps or capabilities, capability):
            # Declared and not shown: the skip that lets a suite rot.
            result.status = "fail"
            result.detail["clause"] = case.clauses[0]
            result.detail["message"] = f"{capability} is promised, but refused: {result.detail.get('message', '')}"
    return result


class Watcher:
    """Told of a run as it goes, beside each result."""

    def started(self, result: SuiteResult) -> None:
        """What will be run is known; there are no results yet."""

    def begins(self, case: CaseResult) -> None:
        """A case, before anything of it has happened."""


def run_suite(options: Options, progress: Progress | None = None) -> SuiteResult:
    """Run every selected case; nothing of it remains running. Raises SuiteError if the run cannot start."""
    lane = check(options).name
    if lane == "softroce":
        from . import softroce

        return softroce.run_in_guest(options, progress)
    if lane == "provider":
        from . import provider

        return provider.run_on_lab(options, progress)
    return run_here(options, progress)


def run_here(options: Options, progress: Progress | None = None, watcher: Watcher | None = None) -> SuiteResult:
    """The same, on this machine, whatever the lane."""
    lane = check(options)
    known = waivers.read(options.waivers) if options.waivers is not None else []
    seed = options.seed if options.seed is not None else secrets.randbelow(1 << 32)
    began = time.monotonic()
    identity = probe(options)
    capabilities, accelerator = identity.pop("capabilities"), identity.pop("accelerator")
    strategy, reason = identity.pop("strategy"), identity.pop("strategy_reason")
    chosen, not_in_lane = plan(options, lane, strategy)
    result = SuiteResult(
        backend=identity,
        lane=lane.name,
        profile=options.profile,
        accelerator=accelerator,
        knobs=options.backend_options if lane.name == "sim" else "",
        provider=options.provider,
        capabilities=capabilities,
        strategy=strategy,
        strategy_reason=reason,
        heap=identity.pop("heap"),
        seed=seed,
        level=options.level,
        ranks=options.ranks,
        partial=bool(options.cases or options.clauses),
        cannot_prove=lane.cannot_prove,
        environment=environment(),
        replay=replay(options),
        not_in_lane=not_in_lane,
        waivers=[w.as_dict() for w in known],
    )
    today = datetime.date.today()
    used = set()
    watcher = watcher if watcher is not None else Watcher()
    watcher.started(result)
    for i, case in enumerate(chosen):
        watcher.begins(unrun(case, options))
        outcome = run_case(case, options, seed, capabilities)
        if outcome.bad:
            for waiver in known:
                if waiver.covers(case.id):
                    used.add(waiver)
                    if waiver.expiry < today:
                        outcome.detail["waiver"] = (
                            f"expired on {waiver.expiry} and counts for nothing: {waiver.owner}, {waiver.link}"
                        )
                    else:
                        outcome.detail["waived_status"], outcome.status = outcome.status, "waived"
                        outcome.detail["waiver"] = waiver.as_dict()
                        break
        result.cases.append(outcome)
        if progress is not None:
            progress(outcome, i + 1, len(chosen))
        if outcome.bad and options.stop_at_failure:
            result.partial = True
            break
    for waiver in known:
        ends = [f"expired on {waiver.expiry}"] if waiver.expiry < today else []
        ends += ["matched no failure"] if waiver not in used else []
        if ends:
            result.notes.append(f"waiver for {waiver.case} ({waiver.owner}) {' and '.join(ends)}")
    result.seconds = time.monotonic() - began
    return result


def replay(options: Options) -> str:
    """The command line of this run, but for the case and the seed."""
    words = ["uccl-ep conformance"]
    words += [f"--library {options.library}"] if options.library is not None else [f"--backend {options.backend}"]
    if options.accel is not None:
        words += [f"--lane gpu --accel {options.accel} --heap {options.heap}"]
        words += [f"--warp-size {options.warp_size}"] if options.warp_size is not None else []
    elif options.heap != "host":
        words.append(f"--heap {options.heap}")
    if options.lane == "provider":
        # The backend says which NIC also if its library is another.
        words += [f"--backend {options.backend}"] if options.library is not None else []
        words += [f"--variant {options.variant}"] if options.variant is not None else []
        words += [f"--knobs {options.knobs}"] if options.knobs else []
        words += [f"--libraries {options.libraries}"] if options.libraries != "auto" else []
    words += [f"--lane {options.lane}"] if options.lane in ("softroce", "provider") else []
    words += ["--impair"] if options.impair else []
    words += [f"--staging {options.staging}"] if options.staging != "auto" else []
    words += [f"--profile {options.profile}"] if options.profile is not None else []
    defaults: Mapping[str, Any] = {"ranks": 4, "backend_options": "", "strategy": "auto", "time_scale": 1.0}
    words.append("--level full")
    for name, default in defaults.items():
        value = getattr(options, name)
        if value != default:
            words.append(f"--{name.replace('_', '-')} {value}")
    return " ".join(words)


def environment() -> dict[str, Any]:
    import numpy

    import uccl_ep

    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.lower().startswith(("model name", "cpu model")):
                    cpu = line.split(":", 1)[1].strip()
                    break
    except OSError:
        pass
    return {
        "uccl_ep": uccl_ep.__version__,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": cpu,
        "cpus": len(os.sched_getaffinity(0)),
        "libc": " ".join(platform.libc_ver()),
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def seeded(options: Options) -> Options:
    """The same options with a seed that stays."""
    return options if options.seed is not None else replace(options, seed=secrets.randbelow(1 << 32))
