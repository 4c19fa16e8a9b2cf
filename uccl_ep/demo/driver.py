# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks, follows them, and makes one result of what they say."""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..accel import KINDS
from ..bootstrap import LocalGroup
from ..errors import nearest
from .exchange import Shape
from .routing import Router, RoutingError, rows_between

WARMUP = 2
TOKENS, TOPK = "128", 8
MAX_RANKS = 64
MAX_BYTES = 1 << 36  # 32-bit offsets in granules of 16 bytes
_GRANULE = 16
# The folder where the command was typed is no place to import from: it may hold another uccl_ep.
_SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()
_PHASES = ("dispatch", "dispatch_post", "combine", "combine_post", "prepare", "experts", "reduce")


class DemoError(Exception):
    """A rank ended without a result."""


@dataclass(frozen=True)
class Options:
    ranks: int = 4
    tokens: str | None = None  # one number, or one a rank: "128,0,64,7"; None: the file's, or TOKENS
    hidden: int = 7168
    experts: int = 256
    topk: int | None = None  # the file's, or TOPK
    dtype: str = "bf16"
    routing: str = "uniform"
    iterations: int = 10
    seed: int = 0
    backend: str = "shm"
    strategy: str = "auto"
    channels: int = 1
    timeout: float = 60.0
    accel: str | None = None  # whose kernels post and wait; None: the CPU does
    heap: str = "host"  # or "device"


@dataclass
class Result:
    options: Options
    exact: bool
    problems: list[str]
    tokens: list[int]
    rows: int  # that travel each way in an iteration: median
    row_bytes: int
    seconds: dict[str, float]  # medians over iterations of the slowest rank
    total_seconds: float
    ranks: list[dict[str, Any]] = field(repr=False)

    @property
    def bytes_each_way(self) -> int:
        return self.rows * self.row_bytes

    @property
    def channels(self) -> list[dict[str, int]]:
        """The numbers of each channel, of all ranks together."""
        per_rank = [rank["stats"]["channels"] for rank in self.ranks]
        return [{key: sum(one[key] for one in same) for key in same[0]} for same in zip(*per_rank, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        first = self.ranks[0]
        return {
            "options": asdict(self.options),
            "backend": {key: first[key] for key in ("backend", "backend_version", "device")},
            "accelerator": first["accelerator"],
            "strategy": {"name": first["strategy"], "reason": first["strategy_reason"]},
            "results": "exact" if self.exact else "wrong",
            "problems": self.problems,
            "tokens": self.tokens,
            "rows": self.rows,
            "row_bytes": self.row_bytes,
            "bytes_each_way": self.bytes_each_way,
            "commands": sum(channel["posted"] for channel in self.channels),
            "seconds": self.seconds,
            "gigabytes_per_second": {phase: self.rate(phase) / 1e9 for phase in ("dispatch", "combine")},
            "rows_per_second": {phase: self.rate(phase) / self.row_bytes for phase in ("dispatch", "combine")},
            "total_seconds": self.total_seconds,
            "channels": self.channels,
            "ranks": self.ranks,
        }

    def rate(self, phase: str) -> float:
        """Bytes per second, over all ranks."""
        seconds = self.seconds[phase]
        return self.bytes_each_way / seconds if seconds else 0.0


def plan(options: Options) -> tuple[Shape, dict[str, Any]]:
    """Check the options, and see how much room their routing needs. Raises RoutingError."""
    if options.dtype != "bf16":
        raise RoutingError(f"--dtype {options.dtype}: this version has bf16")
    if not 1 <= options.ranks <= MAX_RANKS:
        raise RoutingError(f"--ranks {options.ranks}: 1 to {MAX_RANKS} processes are possible")
    if options.experts < 1 or options.experts % options.ranks:
        raise RoutingError(
            f"--experts {options.experts} cannot be dealt out evenly over --ranks {options.ranks}: give a multiple"
        )
    if 2 * options.experts > 1 << 14:
        raise RoutingError(
            f"--experts {options.experts}: at most {1 << 13}, since each needs two words that a put_signal reaches"
        )
    if options.hidden < 1 or 2 * options.hidden % _GRANULE:
        raise RoutingError(
            f"--hidden {options.hidden}: a row of bf16 must be a multiple of {_GRANULE} bytes, so of 8 values"
        )
    for name in ("topk", "iterations", "channels"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise RoutingError(f"--{name} must be at least 1")
    if options.accel is not None and options.accel not in KINDS:
        raise RoutingError(f"--accel {options.accel}: {nearest(options.accel, KINDS)}")
    if options.heap not in ("host", "device"):
        raise RoutingError(f"--heap {options.heap}: host or device")
    if options.heap == "device" and options.accel is None:
        raise RoutingError("--heap device: whose? add --accel cuda, hip or cpu")
    if options.seed < 0:
        raise RoutingError("--seed must not be negative")
    routing: dict[str, Any] = {
        "kind": options.routing,
        "ranks": options.ranks,
        "tokens": _tokens_of(options),
        "experts": options.experts,
        "topk": TOPK if options.topk is None else options.topk,
        "seed": options.seed,
    }
    _check_room(options, routing["tokens"])
    router = Router(**routing)
    for name, given, found in (
        ("tokens", options.tokens, router.tokens == routing["tokens"] or ",".join(map(str, router.tokens))),
        ("topk", options.topk, router.topk == routing["topk"] or router.topk),
    ):
        if given is not None and found is not True:
            raise RoutingError(f"--{name} {given}, but {options.routing} has {found}: leave --{name} out")
    routing.update(tokens=router.tokens, topk=router.topk)
    slots = 0
    for iteration in range(1 if router.kind == "file" else WARMUP + options.iterations):
        for rank in range(options.ranks):
            between = rows_between(router.routing(iteration, rank), options.ranks, options.experts)
            slots = max(slots, int(between.max(initial=0)))
    shape = Shape(options.ranks, options.experts, options.hidden, max(router.tokens), router.topk, slots)
    return shape, routing


def _check_room(options: Options, tokens: list[int]) -> None:
    """Before arrays of that size are made: a row for each token, and a number for each of its experts."""
    needed = max(tokens) * max(2 * options.hidden, 8 * options.experts)
    if needed > MAX_BYTES:
        raise RoutingError(
            f"--tokens {max(tokens)} need {needed >> 30} GiB in a rank, more than the {MAX_BYTES >> 30} GiB "
            "that a heap can have: give fewer"
        )


def _tokens_of(options: Options) -> list[int]:
    try:
        counts = [int(part) for part in (TOKENS if options.tokens is None else options.tokens).split(",")]
    except ValueError:
        counts = [-1]
    if len(counts) == 1:
        counts *= options.ranks
    if len(counts) != options.ranks or min(counts) < 0:
        raise RoutingError(
            f"--tokens {options.tokens}: one number, or one for each of {options.ranks} ranks: 128,0,64,7"
        )
    return counts


def run(options: Options, progress: Callable[[int, int], None] = lambda done, total: None) -> Result:
    """Raises RoutingError for options that cannot be, DemoError if a rank fails."""
    shape, routing = plan(options)
    tokens = options.tokens or (",".join(map(str, routing["tokens"])) if _is_file(options.routing) else TOKENS)
    options = replace(options, tokens=tokens, topk=routing["topk"])
    document = {
        "shape": asdict(shape),
        "routing": {
            **routing,
            "kind": str(Path(options.routing).resolve()) if _is_file(options.routing) else options.routing,
        },
        "warmup": WARMUP,
        **{
            name: getattr(options, name)
            for name in ("seed", "iterations", "backend", "strategy", "channels", "timeout", "accel", "heap")
        },
    }
    start = time.perf_counter()
    results = _run_ranks(options, json.dumps(document), progress)
    total = time.perf_counter() - start
    problems = [problem for rank in results for problem in rank["problems"]]
    samples = [rank["samples"] for rank in results]
    slowest = {phase: [max(rank[i][phase] for rank in samples) for i in range(options.iterations)] for phase in _PHASES}
    rows = [sum(rank[i]["rows_sent"] for rank in samples) for i in range(options.iterations)]
    if rows != [sum(rank[i]["rows_received"] for rank in samples) for i in range(options.iterations)]:
        problems.append("rows received are not the rows sent")
    return Result(
        options=options,
        exact=not problems,
        problems=problems,
        tokens=[rank["tokens"] for rank in results],
        rows=int(np.median(rows)),
        row_bytes=shape.row_bytes,
        seconds={phase: statistics.median(values) for phase, values in slowest.items()},
        total_seconds=total,
        ranks=results,
    )


def _is_file(routing: str) -> bool:
    return routing not in ("uniform", "zipf")


def _run_ranks(options: Options, document: str, progress: Callable[[int, int], None]) -> list[dict[str, Any]]:
    total = WARMUP + options.iterations
    with LocalGroup(options.ranks) as group, selectors.DefaultSelector() as selector:
        processes: list[subprocess.Popen[bytes]] = []
        ranks: list[_Rank] = []
        try:
            for number in range(options.ranks):
                with _without_interrupt():
                    process = group.popen(
                        number,
                        [sys.executable, *_SAFE_PATH, "-m", "uccl_ep.demo.worker"],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                    )
                    processes.append(process)
                ranks.append(_Rank(number, process))
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(document.encode())
                process.stdin.close()
                selector.register(process.stdout, selectors.EVENT_READ, ranks[-1])
            while selector.get_map():
                # The ranks' own deadlines come first; this one is for ranks that cannot even say so.
                ready = selector.select(2 * options.timeout + 60)
                if not ready:
                    raise DemoError(f"the ranks said nothing for {2 * options.timeout + 60:g} s")
                for key, _ in ready:
                    if not key.data.read():
                        selector.unregister(key.fileobj)
                progress(min(rank.iterations for rank in ranks), total)
            for process in processes:
                process.wait(30)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
                for stream in (process.stdin, process.stdout):
                    if stream is not None:
                        stream.close()
    failed = [rank for rank in ranks if rank.result is None]
    if failed:
        # What only follows from another rank's end explains nothing.
        failed.sort(key=lambda rank: not rank.primary)
        said: dict[str, list[int]] = {}
        for rank in failed:
            said.setdefault(rank.explain(), []).append(rank.number)
        raise DemoError("\n".join(f"{_ranks_text(numbers)}: {text}" for text, numbers in said.items()))
    return [rank.result for rank in ranks if rank.result is not None]


@contextlib.contextmanager
def _without_interrupt() -> Iterator[None]:
    """Ctrl-C goes to all processes of a terminal. A rank inherits that it is blocked, and is ended by the parent.

    The parent itself may still be interrupted meanwhile, through another thread: a rank that it then does not know
    finds its standard input empty.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ranks_text(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, sorted(numbers)))}"


class _Rank:
    """What a rank has said so far."""

    def __init__(self, number: int, process: subprocess.Popen[bytes]) -> None:
        self.number, self.process = number, process
        self.result: dict[str, Any] | None = None
        self.error, self.primary = "", False
        self.iterations = 0
        self._rest = b""

    def read(self) -> bool:
        """False at the end."""
        assert self.process.stdout is not None
        chunk = self.process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
        if not chunk:
            return False
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            document = json.loads(line)
            self.iterations += "iteration" in document
            self.result = document.get("result", self.result)
            self.error = document.get("error", self.error)
            self.primary = document.get("primary", self.primary)
        return True

    def explain(self) -> str:
        code = self.process.returncode
        ending = f"it was ended by signal {-code}" if code < 0 else f"it ended with {code}; see its own words above"
        # Which rank it is is said before: the same error of several ranks is one.
        return self.error.removesuffix(f" [rank {self.number}]") or ending
