# SPDX-License-Identifier: Apache-2.0
"""The lane `sim`: all ranks of a case are fibers of one world, in one forked process.

The fork contains a crash and a loop without end; inside it nothing waits for the machine. Deadlines are the world's:
one that must pass costs a few thousand turns. The same seed gives the same run, and the hash of it.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from uccl_ep.errors import BootstrapError, DeadlineExceeded
from uccl_ep.simulator import Meeting, World

from . import gpu, patterns
from .context import Context
from .errors import GroupError, Interrupted
from .group import GroupOutcome
from .history import conclude
from .judgement import Judgement
from .registry import Case
from .worker import ProcessLink, check_left_behind, held, judge, plain

TRACE_LINES = 60  # of a failure
# One thread at a time runs: a count tells what was before what.
_moments = itertools.count(1)


@dataclass(frozen=True)
class Setup:
    """What kind of world a run takes place in."""

    profile: str
    knobs: str = ""
    heap: str = "host"  # or "device": the emulation's, which no virtual NIC reaches

    def heaps(self) -> gpu.Heaps | None:
        if self.heap == "host":
            return None
        import uccl_ep.accel

        return gpu.Heaps(uccl_ep.accel.open("cpu"))


@dataclass
class Outcome:
    status: str = "pass"
    detail: dict[str, Any] = field(default_factory=dict)
    hash: str = ""
    virtual_seconds: float = 0.0


class SimLink:
    """context.Link for a fiber: the other ranks, time and death are the world's."""

    # A microsecond of a world is some turns, and costs more than one of the machine; seconds of silence cost nothing.
    pace = 0.02
    patience = 20.0
    clock = staticmethod(_moments.__next__)
    effort = 0.25
    economy = 1.0

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self._simulation, self._rank = simulation, rank
        self._world = simulation.world

    def _check(self) -> None:
        if self._simulation.first is not None:
            raise Interrupted("another rank failed")

    def allgather(
        self,
        data: bytes,
        ranks: Sequence[int],
        timeout: float,
        topic: str,
        meanwhile: Callable[[], bool] | None = None,  # the world runs all proxies
    ) -> list[bytes]:
        try:
            return self._simulation.meeting.allgather(topic, ranks, self._rank, data, timeout, self._check)
        except DeadlineExceeded as error:
            raise TimeoutError(error.record.text) from None
        except BootstrapError as error:
            raise GroupError(error.record.text) from None

    def kill(self, rank: int) -> None:
        self._simulation.killed(rank)
        self._world.kill(rank)

    def stop(self, rank: int, resume_after: float | None = None) -> None:
        self._world.pause(rank, resume_after)
        if rank == self._rank:
            self._world.turn()

    def resume(self, rank: int) -> None:
        self._world.resume(rank)

    def now(self) -> float:
        return self._world.now()

    def sleep(self, seconds: float) -> None:
        self._world.sleep(seconds)

    def spawn(self, function: Callable[[], None]) -> Callable[[float], bool]:
        return self._world.spawn(self._rank, function).join

    def inject(self, fault: str) -> None:
        self._world.inject(fault)

    def run_group(
        self, ctx: Context, size: int, function: Callable[[Context], None], deadline: float | None
    ) -> GroupOutcome:
        """A world inside: this one stands still meanwhile."""
        case = replace(ctx.case, function=function)
        inner = Simulation(
            case, size, seed=ctx.seed, setup=self._simulation.setup, backend=ctx.backend, time_scale=ctx.time_scale
        )
        began = time.monotonic()
        outcome = inner.run()
        first = inner.contexts[0]
        checks = sum(c.checks for c in inner.contexts)
        judgement = inner.conclude(outcome)
        return GroupOutcome(
            outcome.status,
            outcome.detail,
            inner.ranks,
            checks,
            first.caps,
            time.monotonic() - began,
            first.notes,
            outcome.hash,
            judgement=judgement,
        )


class Simulation:
    """One case in one world."""

    def __init__(
        self,
        case: Case,
        size: int,
        *,
        seed: int,
        setup: Setup,
        backend: dict[str, Any],
        time_scale: float,
    ) -> None:
        self.case, self.setup = case, setup
        self.world = World(
            size,
            setup.profile,
            seed=patterns.key_of((seed, case.id)),
            knobs=setup.knobs,
            trace_lines=TRACE_LINES,
        )
        self.meeting = Meeting(self.world)
        self.ranks = ["running"] * size
        self.first: Outcome | None = None
        self._done = threading.Event()
        self._heaps = [setup.heaps() for _ in range(size)]
        self.contexts = [
            Context(
                case,
                rank,
                size,
                SimLink(self, rank),
                seed=seed,
                backend={
                    **backend,
                    "device": setup.profile,
                    # Silence is found out before a wait runs into its own deadline: of two at one time either may win.
                    "peer_timeout": 5.0 * time_scale,
                    "backend_options": self.world.backend_options(rank),
                    "driver": self.world.driver(rank),
                },
                time_scale=time_scale,
                heaps=self._heaps[rank],
            )
            for rank in range(size)
        ]

    def run(self) -> Outcome:
        """Until every rank has ended or was killed, or the first of them failed."""
        self.world.start([(rank, lambda rank=rank: self._life(rank)) for rank in range(len(self.ranks))])  # type: ignore[misc]
        self._done.wait()
        if self.first is not None:
            return self.first
        if "killed" not in self.ranks:
            self.world.join()
            for heaps in self._heaps:
                if heaps is not None:
                    heaps.gpu.close()
        outcome = self._outcome("pass", {})
        self.world.close()
        return outcome

    def _outcome(self, status: str, detail: dict[str, Any]) -> Outcome:
        return Outcome(status, detail, self.world.hash, self.world.now())

    def conclude(self, outcome: Outcome) -> Judgement:
        """Judge the histories: the outcome may become another."""
        judgement = Judgement()
        for ctx in self.contexts:
            for inner in ctx.judged:
                judgement.add(inner)
        parts = [part for ctx in self.contexts for part in ctx.parts]
        outcome.status, outcome.detail = conclude(judgement, parts, outcome.status, outcome.detail)
        return judgement

    def _life(self, rank: int) -> None:
        ctx = self.contexts[rank]

        def body() -> None:
            self.case.function(ctx)
            ctx.finish()

        status, detail = judge(self.case, ctx, body)
        self.ranks[rank] = status
        if status not in ("pass", "interrupted") and self.first is None:
            detail |= {"rank": rank, "virtual_seconds": round(self.world.now(), 9), "events": self.world.trace()}
            # Taken here, while this fiber has the baton: the others go on until the process ends.
            self.first = self._outcome(status, detail)
            self._done.set()
        self._ended(rank)

    def killed(self, rank: int) -> None:
        if self.ranks[rank] == "running":
            self.ranks[rank] = "killed"
        self._ended(rank)

    def _ended(self, rank: int) -> None:
        # One that ended, well or not, will not come to a meeting that it has not announced.
        self.meeting.gone.add(rank)
        if "running" not in self.ranks:
            self._done.set()


@functools.cache
def warm_up(setup: Setup, library: Path) -> None:
    """Live a small life here, once: what is then loaded and made ready need not be again in the fork of every case."""

    def life(ctx: Context) -> None:
        b = ctx.bench
        b.place(0, patterns.data(64, 1))
        b.channel().put_signal(1 - ctx.rank, 0, 4096, 64, 0).wait()
        b.loosen(4096, 64)
        b.expect_signal(0)

    case = Case("warm.up", life, ("SIG-1",), ranks=(2,))
    backend = {"backend": library}
    simulation = Simulation(case, 2, seed=1, setup=setup, backend=backend, time_scale=1.0)
    simulation.conclude(simulation.run())


def run_world(
    case: Case,
    size: int,
    sock: socket.socket,
    *,
    seed: int,
    setup: Setup,
    backend: dict[str, Any],
    time_scale: float,
) -> None:
    """Run all ranks of a case in this (forked) process and send the result."""
    warnings.simplefilter("ignore", DeprecationWarning)
    link = ProcessLink(sock, 0)
    if setup.heap != "host":
        # Copies come late and in pieces: who does not wait for one is found out.
        os.environ.setdefault("UCCL_EP_EMULATION", f"lazy=6,seed={patterns.key_of((seed, case.id)) & (1 << 32) - 1}")
    threads, descriptors = held()
    simulation = Simulation(case, size, seed=seed, setup=setup, backend=backend, time_scale=time_scale)
    outcome = simulation.run()
    contexts = simulation.contexts
    # Threads of the dead stay where they were.
    if outcome.status == "pass" and not World.deaths:
        ctx = contexts[0]
        status, detail = judge(case, ctx, lambda: check_left_behind(ctx, threads, descriptors))
        if status != "pass":
            outcome.status, outcome.detail = status, detail
    judgement = simulation.conclude(outcome)
    link.send(
        {
            "op": "result",
            "status": outcome.status,
            "detail": outcome.detail,
            "ranks": simulation.ranks,
            "checks": sum(ctx.checks for ctx in contexts),
            "caps": next((ctx.caps for ctx in contexts if ctx.caps), {}),
            "notes": {**plain(contexts[0].notes), "virtual_seconds": outcome.virtual_seconds},
            "hash": outcome.hash,
            "parts": [],
            "judged": [judgement.told()],
        }
    )
    link.exit_asked.wait(10.0)
