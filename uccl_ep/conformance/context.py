# SPDX-License-Identifier: Apache-2.0
"""What a case is given: its rank, its data, its communicators, its fellow ranks, and the ways to say what is wrong.

Whatever waits goes through here (`barrier`, `sleep`, `until`, `spawn`, the communicators' own timeouts), so that
another lane can run the same functions under a clock of its own. No case may depend on how long something takes.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from uccl_ep.errors import UcclEpError

from . import patterns
from .bench import Bench
from .errors import CheckFailed, Interrupted, NotSupported, OutOfTime
from .registry import IMPLICIT_CLAUSES, Case

if TYPE_CHECKING:
    from uccl_ep import Ticket

    from .gpu import Heaps, Session
    from .group import GroupOutcome
    from .judgement import Judgement
    from .recording import Part, RecordedCommunicator

# Small, so that its canaries cost nothing. Cases that need more say so.
DEFAULT_HEAP = 1 << 20
DEFAULT_SIGNALS = 64


class Link(Protocol):
    """How a rank reaches the others, out of band: what a lane provides."""

    pace: float  # how long a moment is, against one of a machine
    patience: float  # how much longer a case may take
    effort: float  # how often what is done many times is done
    economy: float  # and how often what any lane but an emulated machine does as often

    def allgather(
        self,
        data: bytes,
        ranks: Sequence[int],
        timeout: float,
        topic: str,
        meanwhile: Callable[[], bool] | None = None,  # called until all came; True: something moved, again at once
    ) -> list[bytes]: ...
    def kill(self, rank: int) -> None: ...
    def stop(self, rank: int, resume_after: float | None = None) -> None: ...
    def resume(self, rank: int) -> None: ...
    def now(self) -> float: ...
    def clock(self) -> int: ...  # for histories: one for all ranks, that never goes back
    def sleep(self, seconds: float) -> None: ...
    def spawn(self, function: Callable[[], None]) -> Callable[[float], bool]: ...
    def inject(self, fault: str) -> None: ...
    def run_group(
        self, ctx: Context, size: int, function: Callable[[Context], None], deadline: float | None
    ) -> GroupOutcome: ...


class GroupBootstrap:
    """The bootstrap of one communicator: an allgather of bytes among its members."""

    def __init__(self, link: Link, ranks: Sequence[int], rank: int, attempt: int = 0) -> None:
        self._link, self._ranks, self._attempt = link, tuple(ranks), attempt
        self.rank, self.size = self._ranks.index(rank), len(self._ranks)
        # Of the latest exchange, the number of each rank's attempt: no two communicators have the same.
        self.identity: tuple[int, ...] = ()

    def allgather(self, data: bytes, timeout: float) -> list[bytes]:
        mine = self._attempt.to_bytes(8, "little") + bytes(data)
        parts = self._link.allgather(mine, self._ranks, timeout, "bootstrap")
        self.identity = tuple(int.from_bytes(part[:8], "little") for part in parts)
        return [part[8:] for part in parts]

    def barrier(self, timeout: float) -> None:
        self.allgather(b"", timeout)


class Task:
    """A thread of a case. Its exception is raised where it is joined."""

    def __init__(self, ctx: Context, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.error: BaseException | None = None
        self.result: Any = None
        self._ctx, self._function, self._args = ctx, function, args
        self._join = ctx.link.spawn(self._run)

    def _run(self) -> None:
        try:
            self.result = self._function(*self._args)
        except BaseException as error:
            self.error = error

    def join(self) -> Any:
        if not self._join(self._ctx.deadline - self._ctx.now()):
            raise OutOfTime(f"{self._function.__name__} did not end before the case's deadline")
        if self.error is not None:
            raise self.error
        return self.result


class Context:
    def __init__(
        self, case: Case, rank: int, size: int, link: Link, *, seed: int, backend: dict[str, Any], time_scale: float,
        session: Session | None = None, heaps: Heaps | None = None,
    ) -> None:  # fmt: skip
        self.case, self.rank, self.size, self.link, self.seed = case, rank, size, link, seed
        self.rng = np.random.default_rng(patterns.key_of((seed, case.id, rank)))
        # The same on every rank: for choices that all must make alike.
        self.shared_rng = np.random.default_rng(patterns.key_of((seed, case.id, "shared")))
        self.timeout = 10.0 * time_scale
        self.deadline = link.now() + case.timeout * time_scale * link.patience
        self.time_scale = time_scale
        self.checks = 0
        self._check_lock = threading.Lock()
        self.backend = backend
        self.session = session  # of the device whose kernels post, in a lane that has one
        self._heaps = heaps  # in device memory, where the host posts
        self._benches: list[Bench] = []
        self._driven: list[Bench] = []  # of them, those whose proxies run in calls of the rank alone
        self._bench: Bench | None = None
        self._attempts = 0  # to make a communicator
        self._meetings: dict[tuple[int, ...], int] = {}
        self.parts: list[Part] = []  # of the histories of its communicators
        self.judged: list[Judgement] = []  # of groups inside
        self.caps: dict[str, Any] = {}
        self.notes: dict[str, Any] = {}  # goes with the result (rank 0's)
        self.stage = "start"

    # -------------------------------------------------------------------------------------------- communicators

    @property
    def bench(self) -> Bench:
        """The case's communicator over all ranks, made at first use (by all ranks)."""
        if self._bench is None:
            self._bench = self.open()
        return self._bench

    @property
    def others(self) -> list[int]:
        return [r for r in range(self.size) if r != self.rank]

    def options(self, **overrides: Any) -> dict[str, Any]:
        """The options of a communicator of this case."""
        merged: dict[str, Any] = {
            "heap_bytes": DEFAULT_HEAP,
            "signals": DEFAULT_SIGNALS,
            "timeout": self.timeout,
            "peer_timeout": self.timeout,
            "bootstrap_timeout": 2 * self.timeout,
            **self.backend,
            **self.case.comm,
            **overrides,
        }
        if merged.get("backend_options") and self.backend.get("backend_options"):
            own, given = merged["backend_options"], self.backend["backend_options"]
            if own != given:
                merged["backend_options"] = f"{given},{own}"
        return merged

    def bootstrap(self, ranks: Sequence[int] | None = None) -> GroupBootstrap:
        self._attempts += 1
        return GroupBootstrap(self.link, range(self.size) if ranks is None else ranks, self.rank, self._attempts)

    def open(
        self,
        ranks: Sequence[int] | None = None,
        *,
        shadow: bool = True,
        settle: bool = True,
        name: str = "",
        **overrides: Any,
    ) -> Bench:
        """Make a communicator over `ranks` (all). `settle`: a barrier once every canary is in place; without it peers
        may signal at once, and there are no canaries."""
        from .recording import Part

        members = tuple(range(self.size)) if ranks is None else tuple(ranks)
        self.stage = "making a communicator"
        part = Part(self.link.clock, members, members.index(self.rank), self.seed)
        bootstrap = self.bootstrap(members)
        options = self.options(**overrides)
        comm = self._communicator(part, bootstrap, options)
        part.identity = bootstrap.identity
        self.parts.append(part)
        self.stage = "running"
        bench = Bench(self, comm, members, shadow=shadow and settle, name=name or f"comm{len(self._benches)}")
        self._benches.append(bench)
        if options.get("progress") == "caller":
            self._driven.append(bench)
        if not self.caps:
            from .capabilities import describe

            self.caps = describe(comm.info)
        if settle:
            self.barrier(members)
        return bench

    def _communicator(self, part: Part, bootstrap: GroupBootstrap, options: dict[str, Any]) -> RecordedCommunicator:
        if self.session is not None:
            from .gpu import KernelCommunicator

            return KernelCommunicator(self.session, part, bootstrap, **options)
        if self._heaps is not None:
            from .gpu import DeviceHeapCommunicator

            return DeviceHeapCommunicator(self._heaps, part, bootstrap, **options)
        from .recording import RecordedCommunicator

        return RecordedCommunicator(part, bootstrap, **options)

    def close(self, bench: Bench) -> None:
        """Quiet everywhere, barrier, look at the memory, barrier, close (MEM-2)."""
        if bench.closed:
            return
        if not bench.broken:
            bench.quiet()
            self.barrier(bench.ranks)
            bench.verify()
            self.barrier(bench.ranks)
        bench.closed = True
        bench.comm.close()

    def finish(self) -> None:
        self.stage = "checking canaries and closing"
        for bench in self._benches:
            self.close(bench)
        if self.session is not None:
            self.session.rest()
        if self._heaps is not None:
            self._heaps.rest()

    def report(self) -> str:
        """What the open communicators say of themselves: for a person who looks at a case that hangs."""
        parts = [f"rank {self.rank}, {self.stage}"]
        for bench in self._benches:
            if not bench.closed:
                parts.append(f"{bench.name}: {bench.comm.report().strip()}")
                trace = list(bench.comm.trace())[-8:]
                parts.extend(f"  took {entry}" for entry in trace)
        return "\n".join(parts)

    def recorded(self) -> list[str]:
        """The first failure that each open communicator has a record of: what comes later may name its effect alone."""
        failures = [bench.comm.errors() for bench in self._benches if not bench.closed]
        return [records[0].text for records in failures if records]

    # ------------------------------------------------------------------------------------------- the other ranks

    def allgather(self, data: bytes, ranks: Sequence[int] | None = None, *, drive: bool = True) -> list[bytes]:
        """`drive=False`: communicators without threads of their own stand still meanwhile."""
        members = tuple(range(self.size) if ranks is None else ranks)
        begin = self.link.clock()
        try:
            gathered = self.link.allgather(
                data, members, self.deadline - self.now(), "case", self._drive if drive and self._driven else None
            )
        except TimeoutError as error:
            raise OutOfTime(str(error)) from error
        number = self._meetings[members] = self._meetings.get(members, 0) + 1
        for bench in self._benches:
            if bench.ranks == members and not bench.closed:
                bench.part.met(begin, number)
        return gathered

    def _drive(self) -> bool:
        """One pass for the communicators without threads of their own.

        PRG-1 holds while the proxies of both ranks are scheduled: a target's raises signals and returns credits, so
        a rank that waits for the others still owes them its progress calls.
        """
        moved = False
        for comm in [bench.comm for bench in self._driven if not bench.closed]:
            # What is wrong with it is for the case's own calls to say.
            with contextlib.suppress(UcclEpError):
                moved |= comm.progress()
        return moved

    def barrier(self, ranks: Sequence[int] | None = None) -> None:
        self.allgather(b"", ranks)

    def share(self, value: Any, ranks: Sequence[int] | None = None, *, drive: bool = True) -> list[Any]:
        """Every rank's `value` (plain JSON types), in the order of the ranks."""
        return [json.loads(d) for d in self.allgather(json.dumps(value).encode(), ranks, drive=drive)]

    def kill(self, rank: int) -> None:
        """SIGKILL; returns once the rank is dead (unless it is the own one)."""
        self.link.kill(rank)

    def stop(self, rank: int, resume_after: float | None = None) -> None:
        self.link.stop(rank, resume_after)

    def resume(self, rank: int) -> None:
        self.link.resume(rank)

    def run_group(
        self, size: int, function: Callable[[Context], None], *, deadline: float | None = None
    ) -> GroupOutcome:
        """Fresh ranks of their own, as a run inside this rank: for cases in which all ranks die."""
        outcome = self.link.run_group(self, size, function, deadline)
        self.judged.append(outcome.judgement)
        return outcome

    def inject(self, fault: str) -> None:
        """Make the NICs fail: "name key=value ..." of docs/simulator.md. For cases that need "faults"."""
        self.link.inject(fault)

    def in_child(self, function: Callable[[], Any]) -> Any:
        """What `function` returns in a fork of this rank."""
        from .worker import in_child

        return in_child(function, self.timeout)

    # ------------------------------------------------------------------------------------------------ time, threads

    def now(self) -> float:
        return self.link.now()

    def sleep(self, seconds: float) -> None:
        self.link.sleep(seconds)

    def moment(self, seconds: float) -> float:
        """So long on a machine, as this lane's clock counts it: for something to happen in the middle of traffic."""
        return seconds * self.link.pace

    def times(self, n: int) -> int:
        """`n`, or fewer where each costs more: for cases that do the same very often."""
        return max(1, int(n * self.link.effort))

    def rounds(self, n: int, least: int = 1) -> int:
        """`n`, or fewer, but `least`, where every instruction is slow: an emulated machine."""
        return max(least, int(n * self.link.economy))

    def until(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Ask until it is true or time is over; what it came to."""
        end = min(self.now() + (self.timeout if timeout is None else timeout), self.deadline)
        while not condition():
            if self.now() >= end:
                return condition()
            self.sleep(0.0002)
        return True

    def take(self, queue: deque[Any]) -> Any:
        """What another thread of this rank appended, oldest first."""
        if not self.until(lambda: bool(queue)):
            raise OutOfTime("nothing came from another thread of the rank")
        return queue.popleft()

    def spawn(self, function: Callable[..., Any], *args: Any) -> Task:
        return Task(self, function, args)

    def join(self, tasks: Iterable[Task]) -> list[Any]:
        """Wait for all; the first that failed raises."""
        failed: BaseException | None = None
        results = []
        for task in tasks:
            try:
                results.append(task.join())
            except BaseException as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return results

    # ---------------------------------------------------------------------------------------------------- verdicts

    def checked(self) -> None:
        """Count an assertion that held: a case that asserts nothing is an error of the suite."""
        with self._check_lock:
            self.checks += 1

    def check(self, condition: bool, clause: str, message: str, **values: Any) -> None:
        if clause not in self.case.clauses and clause not in IMPLICIT_CLAUSES:
            raise AssertionError(f"{self.case.id} asserts {clause}, which it does not declare")
        if not condition:
            raise CheckFailed(clause, message, values)
        self.checked()

    def check_equal(self, got: Any, want: Any, clause: str, message: str, **values: Any) -> None:
        self.check(got == want, clause, message, got=got, want=want, **values)

    def fail(self, clause: str, message: str, **values: Any) -> NoReturn:
        self.check(False, clause, message, **values)
        raise AssertionError

    @contextlib.contextmanager
    def raises(
        self, clause: str, kinds: type[Exception] | tuple[type[Exception], ...], what: str
    ) -> Iterator[list[Any]]:
        """The body raises one of `kinds`; the exception is the only element of the list that is given."""
        caught: list[Any] = []
        try:
            yield caught
        except (CheckFailed, Interrupted, NotSupported, AssertionError):
            raise
        except kinds as error:
            caught.append(error)
            self.check(bool(str(error).strip()), clause, f"{what}: the error says nothing")
            return
        except Exception as error:
            self.fail(
                clause,
                f"{what}: another error than expected",
                got=f"{type(error).__name__}: {error}",
                want=_names(kinds),
            )
        self.fail(clause, f"{what}: it was not refused", want=_names(kinds))

    def refused(
        self, clause: str, kinds: type[Exception] | tuple[type[Exception], ...], what: str, post: Callable[[], Ticket]
    ) -> list[Any]:
        """A command is refused: one of the CPU by the call, one of a kernel, which does not look, by the wait for it;
        that raises the failure by which things were closed."""
        if self.session is not None:
            kinds = UcclEpError
        with self.raises(clause, kinds, what) as caught:
            ticket = post()
            if self.session is not None:
                ticket.wait()
        return caught

    def not_supported(self, capability: str, reason: str) -> NoReturn:
        raise NotSupported(capability, reason)


def _names(kinds: type[Exception] | tuple[type[Exception], ...]) -> str:
    return " or ".join(k.__name__ for k in (kinds if isinstance(kinds, tuple) else (kinds,)))
