# SPDX-License-Identifier: Apache-2.0
"""What handing commands from a device's kernels to the CPU costs: rates, round trips, signals, quiets, a slow consumer.

Producers are warps of csrc/device/perf.cu. Each writes its payload before each command, and every command is checked by
the thread that takes it (drain.py), or counted by the proxies that carry it out on the NIC that does nothing: no figure
without that.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import _native
from . import against as other
from . import bench
from .drain import PAYLOAD, Drained, Run, cpus_for, job
from .proxy import Say

if TYPE_CHECKING:
    from ..accel import Accelerator, Info, Kernel, Module, Stream

SLOTS_LOG2 = 11  # as large as the FIFOs of the other benchmark
SMALL_LOG2 = 4
SLOW_PAUSE = 20e-6
_TIMEOUT = 60.0  # of a run
_BATCH = 128  # that a thread takes of a ring before the next one's turn
_RESULT = 32  # bytes of perf_result


@dataclass(frozen=True)
class Form:
    """A way to post. `batch` commands together; with a poster, at least `block` producers a block."""

    kernel: str
    batch: int = 1
    block: int = 0  # 0: no poster


FORMS = {
    "single": Form("perf_single"),
    "batch4": Form("perf_batch", 4),
    "batch8": Form("perf_batch", 8),
    "batch32": Form("perf_batch", 32),
    "poster": Form("perf_poster", block=1),
    "poster4": Form("perf_poster", block=4),
}


@dataclass(frozen=True)
class Shape:
    """How producers lie over blocks and rings: every ring has the same number of them, and every block, too."""

    blocks: int
    warps: int  # of a block, the poster's included
    rings: int

    @staticmethod
    def of(form: Form, producers: int, info: Info, rings: int) -> Shape:
        """One block a multiprocessor at most, or as many as its warps need."""
        most = max(producers // max(form.block, 1), 1)
        blocks = _divisor(producers, min(most, info.multiprocessors))
        warps = info.max_threads // info.warp_size - bool(form.block)
        while producers // blocks > warps:
            blocks = next(n for n in range(blocks + 1, producers + 1) if producers % n == 0)
        return Shape(
            blocks, producers // blocks + bool(form.block), _divisor(blocks if form.block else producers, rings)
        )


def _divisor(number: int, most: int) -> int:
    """The largest divisor up to `most`."""
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)


@dataclass(frozen=True)
class Plan:
    """What to measure. `start`: commands of a first run, from which the length of the others follows."""

    forms: Sequence[str]
    producers: Sequence[int]
    rings: int
    threads: int
    seconds: float
    repeats: int
    start: int
    pings: int
    soak: int = 0
    against: Path | None = None
    against_runs: int = 3


class Session:
    """A device with the kernels, and rings of every shape that was asked for."""

    def __init__(self, gpu: Accelerator) -> None:
        self.gpu = gpu
        self.module: Module = gpu.own("perf")
        self.stream: Stream = gpu.stream()
        self._drained: dict[tuple[Any, ...], Drained] = {}
        self._kernels: dict[str, Kernel] = {}
        self.result = gpu.alloc(1 << 20)

    def kernel(self, name: str) -> Kernel:
        if name not in self._kernels:
            self._kernels[name] = self.module.kernel(name)
        return self._kernels[name]

    def drained(self, rings: int, threads: int, producers: int, heap_bytes: int, **more: Any) -> Drained:
        """One set of rings at a time: threads of another would take its CPUs."""
        key = (rings, threads, producers, heap_bytes, *sorted(more.items()))
        if key not in self._drained:
            self.rest()
            self._drained[key] = Drained(
                self.gpu.library, self.gpu.device, rings=rings, threads=min(threads, rings), producers=producers,
                heap_bytes=heap_bytes, cpus=cpus_for(min(threads, rings), self.gpu.info.numa_node),
                **{"log2_slots": SLOTS_LOG2, "batch": _BATCH, **more},
            )  # fmt: skip
        return self._drained[key]

    def rest(self) -> None:
        for one in self._drained.values():
            one.close()
        self._drained.clear()

    def launch(self, kernel: str, blocks: int, warps: int, comm: bytes, work: bytes) -> None:
        """Returns when it has ended."""
        self.kernel(kernel).launch(self.stream, blocks, warps * self.gpu.info.warp_size, [comm, work])
        self.stream.synchronize(_TIMEOUT)

    def run(self, drained: Drained, form: Form, shape: Shape, producers: int, commands: int) -> Run:
        """`commands` of each producer, checked."""

        def launch(sequence: int) -> None:
            work = job(
                payload=drained.heap, commands=commands, producers=producers, rings=shape.rings, batch=form.batch,
                sequence=sequence,
            )  # fmt: skip
            self.launch(form.kernel, shape.blocks, shape.warps, drained.comm, work)

        return drained.run(launch, producers, commands, _TIMEOUT)

    def samples(self, drained: Drained, kernel: str, count: int, **more: Any) -> npt.NDArray[np.float64]:
        """Nanoseconds of each of `count` operations of one warp, on rings that are new."""
        work = job(payload=drained.heap, result=self.result.address, commands=count, producers=1, rings=1, **more)
        self.launch(kernel, 1, 1, drained.comm, work)
        return self.read_samples(count, kernel)

    def read_samples(self, count: int, kernel: str) -> npt.NDArray[np.float64]:
        raw = self.result.numpy(np.uint64)
        status, clock, cycles, done = (int(value) for value in raw[:4])
        status -= (status >> 63) << 64
        if status or done != count:
            raise bench.BenchError(f"{kernel}: {done} of {count} operations, then {_native.status_name(status)}")
        # The fine counter's rate nobody promises: the coarse one, over the whole loop, tells it.
        scale = clock / cycles * 1e9 / self.gpu.info.clock_hz
        return raw[4 : 4 + count] * scale


# ---------------------------------------------------------------------------------------------------------------- rates


class Point:
    """One form with so many producers, on rings that threads drain."""

    def __init__(self, session: Session, name: str, producers: int, plan: Plan, rings: int, threads: int) -> None:
        self.session, self.name, self.producers = session, name, producers
        self.form = FORMS[name]
        self.shape = Shape.of(self.form, producers, session.gpu.info, rings)
        self.threads = min(threads, self.shape.rings)
        self.commands = self._whole(plan.start / producers)
        self.values: list[float] = []
        self._limit(plan)

    def _whole(self, commands: float) -> int:
        """Of each producer, in whole batches."""
        return max(math.ceil(commands / self.form.batch), 1) * self.form.batch

    def _limit(self, plan: Plan) -> None:
        """As many commands as last so long; the runs that find it warm up, too."""
        for _ in range(8):
            seconds = max(self.take().seconds, 1e-9)
            if seconds >= plan.seconds / 2:
                break
            self.commands = self._whole(self.commands * min(plan.seconds / seconds, 32.0))

    def drained(self) -> Drained:
        most = -(-max(4096, self.producers) // self.shape.rings)  # the same rings for every point that has as many
        return self.session.drained(
            self.shape.rings, self.threads, min(most, 4096), max(4096, self.producers) * 32 * PAYLOAD
        )

    def take(self, commands: int = 0) -> Run:
        count = self._whole(commands) if commands else self.commands
        return self.session.run(self.drained(), self.form, self.shape, self.producers, count)

    def repeat(self) -> None:
        run = self.take()
        self.values.append(run.commands / max(run.seconds, 1e-9) / 1e6)

    def row(self) -> dict[str, Any]:
        return {
            "form": self.name, "producers": self.producers, "rings": self.shape.rings, "threads": self.threads,
            "blocks": self.shape.blocks, "warps_a_block": self.shape.warps,
            "commands": self.commands * self.producers, **spread(self.values),
        }  # fmt: skip


def spread(values: Sequence[float]) -> dict[str, Any]:
    return {"mops": statistics.median(values), "min": min(values), "max": max(values), "values": list(values)}


def points(session: Session, say: Say, plan: Plan) -> list[Point]:
    made = []
    for producers in plan.producers:
        for name in plan.forms:
            say(f"{name}, {producers} producers: how many commands")
            made.append(Point(session, name, producers, plan, plan.rings, plan.threads))
    return made


def fewer_threads(session: Session, say: Say, plan: Plan) -> list[dict[str, Any]]:
    """The same with less to drain it: one thread, and one ring."""
    rows = []
    producers = plan.producers[min(1, len(plan.producers) - 1)]
    for rings, threads in ((max(plan.rings // plan.threads, 1), 1), (1, 1)):
        for name in plan.forms:
            say(f"{name}, {producers} producers, {rings} rings, one thread")
            point = Point(session, name, producers, plan, rings, threads)
            for _ in range(min(plan.repeats, 3)):
                point.repeat()
            rows.append(point.row())
    return rows


def soak(session: Session, say: Say, plan: Plan) -> list[dict[str, Any]]:
    """Many commands: nothing torn, lost or doubled among them."""
    rows = []
    producers = max(plan.producers)
    for name in plan.forms:
        point = Point(session, name, producers, plan, plan.rings, plan.threads)
        left = math.ceil(plan.soak / len(plan.forms) / producers)
        done, seconds = 0, 0.0
        while left > 0:
            say(f"{name}, {producers} producers: {done:,} commands checked")
            # Runs of some seconds: whatever form it is, none comes near its deadline.
            run = point.take(min(left, max(point.commands * 10, 1)))
            left -= run.commands // producers
            done, seconds = done + run.commands, seconds + run.seconds
        rows.append({"form": name, "producers": producers, "commands": done, "seconds": seconds})
    return rows


# ------------------------------------------------------------------------------------------------------------ latencies


def percentiles(samples: Sequence[npt.NDArray[np.float64]]) -> dict[str, Any]:
    """Each statistic: the median over the runs."""

    def over(function: Callable[[npt.NDArray[np.float64]], float]) -> float:
        return statistics.median(float(function(run)) for run in samples)

    return {
        "samples": sum(len(run) for run in samples),
        "mean": over(np.mean), "min": over(np.min), "median": over(np.median),
        "p99": over(lambda run: float(np.percentile(run, 99))),
        "means": [float(np.mean(run)) for run in samples],
    }  # fmt: skip


def latencies(session: Session, say: Say, plan: Plan) -> dict[str, Any]:
    found: dict[str, list[npt.NDArray[np.float64]]] = {}
    for repeat in range(plan.repeats):
        operations = list(_LATENCIES.items())
        for name, operation in operations if repeat % 2 == 0 else reversed(operations):
            say(f"{name}, {repeat + 1} of {plan.repeats}")
            session.rest()  # whoever counts commands from the first one needs new rings
            found.setdefault(name, []).append(operation(session, plan))
    return {name: percentiles(found[name]) for name in _LATENCIES}


def _one_ring(session: Session) -> Drained:
    return session.drained(1, 1, 1, 1 << 16)


def _round_trip(session: Session, plan: Plan, kernel: str = "perf_round_trip", **more: Any) -> npt.NDArray[np.float64]:
    drained = _one_ring(session)
    taken: list[npt.NDArray[np.float64]] = []

    def launch(sequence: int) -> None:
        taken.append(session.samples(drained, kernel, plan.pings, sequence=sequence, **more))

    drained.run(launch, 1, plan.pings, _TIMEOUT)
    return taken[0][plan.pings // 10 :]


def _round_trip_word(session: Session, plan: Plan) -> npt.NDArray[np.float64]:
    return _round_trip(session, plan, "perf_round_trip_word", word=_one_ring(session).words.echo_there)


def _quiet(session: Session, plan: Plan) -> npt.NDArray[np.float64]:
    drained = _one_ring(session)
    # Something has to have been posted, or a quiet need not look at all.
    drained.run(
        lambda sequence: _discard(session.samples(drained, "perf_round_trip", 1, sequence=sequence)), 1, 1, _TIMEOUT
    )
    return session.samples(drained, "perf_quiet", plan.pings)[plan.pings // 10 :]


def _discard(_: object) -> None:
    pass


def _signal(session: Session, plan: Plan) -> npt.NDArray[np.float64]:
    drained = _one_ring(session)
    work = job(
        payload=drained.heap, result=session.result.address, commands=plan.pings, producers=1, rings=1,
        word=drained.words.answer_there,
    )  # fmt: skip
    session.kernel("perf_answer").launch(session.stream, 1, session.gpu.info.warp_size, [drained.comm, work])
    samples = drained.ping(plan.pings, _TIMEOUT)
    session.stream.synchronize(_TIMEOUT)
    session.read_samples(plan.pings, "perf_answer")  # it says if a wait failed
    return samples[plan.pings // 10 :].astype(np.float64)


_LATENCIES: dict[str, Callable[[Session, Plan], npt.NDArray[np.float64]]] = {
    "command and quiet": _round_trip,
    "command and a word": _round_trip_word,
    "quiet, nothing outstanding": _quiet,
    "signal and answer": _signal,
}


# ------------------------------------------------------------------------------------------ a consumer that is too slow


def slow_consumer(session: Session, say: Say, plan: Plan) -> list[dict[str, Any]]:
    """Rings of 16 slots, and threads that pause after each command: producers wait, and nothing is lost (PRG-3)."""
    rows = []
    producers = plan.producers[0]
    for name in (form for form in plan.forms if FORMS[form].batch <= 1 << SMALL_LOG2):
        say(f"{name}, {producers} producers, a slow consumer")
        form = FORMS[name]
        shape = Shape.of(form, producers, session.gpu.info, min(plan.rings, 4))
        drained = session.drained(
            shape.rings,
            1,
            producers,
            producers * form.batch * PAYLOAD,
            log2_slots=SMALL_LOG2,
            batch=1,
            pause=SLOW_PAUSE,
        )
        wanted = plan.seconds / SLOW_PAUSE / producers / form.batch
        commands = max(math.ceil(wanted), 1) * form.batch

        run = session.run(drained, form, shape, producers, commands)
        rows.append(
            {
                "form": name, "producers": producers, "rings": shape.rings, "slots": 1 << SMALL_LOG2,
                "pause_us": SLOW_PAUSE * 1e6, "commands": run.commands, "mops": run.commands / run.seconds / 1e6,
                "consumer_mops": 1e-6 / SLOW_PAUSE,
            }
        )  # fmt: skip
    return rows


# --------------------------------------------------------------------------------------------------------- real proxies


def proxies(session: Session, say: Say, plan: Plan) -> list[dict[str, Any]]:
    """The core's own proxies, on the NIC that does nothing: from the first command until all are complete."""
    from ..bootstrap import SingleProcess
    from ..communicator import Communicator

    rows = []
    session.rest()
    gpu = session.gpu
    cpus = cpus_for(plan.threads, gpu.info.numa_node)
    for producers in plan.producers[: min(3, len(plan.producers))]:
        for name in plan.forms:
            say(f"{name}, {producers} producers, {plan.threads} proxies")
            form = FORMS[name]
            shape = Shape.of(form, producers, gpu.info, plan.rings)
            heap_bytes = max(producers * form.batch * PAYLOAD, 1 << 16)
            with (
                gpu.alloc(heap_bytes) as payload,
                Communicator(
                    SingleProcess(), backend=bench.noop_backend(), heap_bytes=heap_bytes, accelerator=gpu,
                    device_channels=shape.rings, channels=shape.rings, proxies=min(plan.threads, shape.rings),
                    ring_log2=SLOTS_LOG2, merge=False, cpus=",".join(map(str, cpus)) or None,
                ) as comm,
            ):  # fmt: skip
                rows.append(_proxies_point(session, plan, name, producers, shape, payload.address, comm))
    return rows


def _proxies_point(
    session: Session, plan: Plan, name: str, producers: int, shape: Shape, payload: int, comm: Any
) -> dict[str, Any]:
    form = FORMS[name]
    device = comm.device()
    posted = 0

    def run(each: int) -> float:
        nonlocal posted
        work = job(
            payload=payload, commands=each, producers=producers, rings=shape.rings, batch=form.batch, stamped=False
        )
        begin = session.stream.record()
        session.kernel(form.kernel).launch(
            session.stream, shape.blocks, shape.warps * session.gpu.info.warp_size, [device, work]
        )
        end = session.stream.record()
        session.stream.synchronize(_TIMEOUT)
        comm.check_device()
        posted += each * producers
        stats = comm.stats()
        taken = sum(one["commands"] for one in stats["proxies"])
        complete = sum(one["complete"] for one in stats["channels"])
        failed = sum(one["failed"] for one in stats["channels"])
        if (taken, complete, failed) != (posted, posted, 0):
            raise bench.BenchError(
                f"DATA CHECK FAILED: {name}: posted {posted}, taken {taken}, complete {complete}, failed {failed}"
            )
        return max(end.seconds_since(begin), 1e-9)

    each = max(math.ceil(plan.start / producers / form.batch), 1) * form.batch
    for _ in range(8):
        seconds = run(each)
        if seconds >= plan.seconds / 2:
            break
        each = math.ceil(each * min(plan.seconds / seconds, 32.0) / form.batch) * form.batch
    values = [each * producers / run(each) / 1e6 for _ in range(min(plan.repeats, 3))]
    return {
        "form": name, "producers": producers, "rings": shape.rings, "proxies": min(plan.threads, shape.rings),
        "commands": each * producers, **spread(values),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ all of it


def measure(say: Say, gpu: Accelerator, plan: Plan) -> dict[str, Any]:
    begin = time.monotonic()
    with ExitStack() as stack:
        session = Session(gpu)
        stack.callback(session.rest)
        result: dict[str, Any] = {"ring_slots": 1 << SLOTS_LOG2, "payload_bytes": PAYLOAD}
        grid = points(session, say, plan)
        outputs: list[dict[str, str]] = []
        with_other = _spread_over(plan.repeats, plan.against_runs) if plan.against else set()
        order: list[str] = []
        for repeat in range(plan.repeats):
            turn: list[Callable[[], None]] = [lambda at=repeat: _repeat_grid(say, grid, at, plan.repeats)]  # type: ignore[misc]
            names = ["ours"]
            if repeat in with_other:
                turn.append(lambda: outputs.append(_other(session, say, plan, len(outputs))))
                names.append("theirs")
                if len(outputs) % 2:
                    turn.reverse()
                    names.reverse()
            for one in turn:
                one()
            order += names
        result["rates"] = [point.row() for point in grid]
        result["order"] = order
        result["latency_ns"] = latencies(session, say, plan)
        result["fewer_threads"] = fewer_threads(session, say, plan)
        result["slow_consumer"] = slow_consumer(session, say, plan)
        if plan.soak:
            result["soak"] = soak(session, say, plan)
        result["proxies"] = proxies(session, say, plan)
        if plan.against:
            theirs = other.summary(outputs, 1 << SLOTS_LOG2)
            result["against"] = {"program": plan.against.name, **theirs}
            trip = result["latency_ns"]["command and quiet"]["mean"]
            result["budgets"] = other.judge(result["rates"], trip, theirs)
    result["seconds"] = time.monotonic() - begin
    return result


def _repeat_grid(say: Say, grid: Sequence[Point], repeat: int, repeats: int) -> None:
    for point in grid if repeat % 2 == 0 else reversed(grid):
        say(f"{point.name}, {point.producers} producers, {repeat + 1} of {repeats}")
        point.repeat()


def _other(session: Session, say: Say, plan: Plan, index: int) -> dict[str, str]:
    assert plan.against is not None
    session.rest()  # its threads get the CPUs
    outputs: dict[str, str] = {}
    for latency in (False, True) if index % 2 == 0 else (True, False):
        say(f"the other benchmark, {'latency' if latency else 'rates'}, {index + 1} of {plan.against_runs}")
        outputs["latency" if latency else "rates"] = other.run(plan.against, latency=latency)
    return outputs


def _spread_over(repeats: int, runs: int) -> set[int]:
    """Which of our repeats the other's runs stand beside, at even distances."""
    runs = min(runs, repeats)
    return {round(i * (repeats - 1) / max(runs - 1, 1)) for i in range(runs)}
