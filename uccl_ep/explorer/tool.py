# SPDX-License-Identifier: Apache-2.0
"""Runs uccl-ep-explore (csrc/explorer): several processes at a time, each with its share of the seeds."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..paths import library_dir

Told = dict[str, Any]
Progress = Callable[[int, int], None]

CHUNK = 1000  # seeds a process: a finding in one of them stops the others early


class ExplorerError(Exception):
    """The explorer gave no answer; the text says why."""


def simulator() -> Path:
    return library_dir() / "libuccl_ep_backend_sim.so"


@dataclass(frozen=True)
class Job:
    mode: str
    options: tuple[tuple[str, Any], ...]
    weight: int = 1  # seeds, for progress

    @classmethod
    def of(cls, mode: str, weight: int = 1, **options: Any) -> Job:
        return cls(mode, tuple((k, v) for k, v in options.items() if v is not None), weight)

    def command(self) -> list[str]:
        program = library_dir() / "uccl-ep-explore"
        return [str(program), str(simulator()), self.mode, *(f"{key}={value}" for key, value in self.options)]


def run(job: Job, on_progress: Callable[[int], None] | None = None, started: list[Any] | None = None) -> Told:
    """The last object that it prints."""
    last: Told | None = None
    try:
        process = subprocess.Popen(job.command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        raise ExplorerError(f"{job.command()[0]}: {error.strerror}") from error
    if started is not None:
        started.append(process)
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            told = json.loads(line)
            if told["type"] != "progress":
                last = told
            elif on_progress is not None:
                on_progress(told["done"])
        text = process.stderr.read()
    if process.returncode not in (0, 1) or last is None:
        why = text.strip().removeprefix("uccl-ep-explore: ")
        raise ExplorerError(why or f"uccl-ep-explore ended with {process.returncode}: {' '.join(job.command())}")
    return last


def run_all(
    jobs: Sequence[Job], workers: int, progress: Progress, stop: Callable[[Told], bool]
) -> Iterator[tuple[Job, Told]]:
    """Results as they come. Once `stop` says so of one, no further jobs are begun."""
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    results: queue.SimpleQueue[tuple[Job, Told | BaseException]] = queue.SimpleQueue()
    total = sum(job.weight for job in jobs)
    done: dict[Job, int] = dict.fromkeys(jobs, 0)
    ended = threading.Event()
    started: list[Any] = []

    def work() -> None:
        while not ended.is_set():
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return

            def note(n: int, job: Job = job) -> None:
                done[job] = n
                progress(sum(done.values()), total)

            try:
                results.put((job, run(job, note, started)))
                note(job.weight)
            except BaseException as error:
                results.put((job, error))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(max(1, min(workers, len(jobs))))]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads) or not results.empty():
            try:
                job, result = results.get(timeout=0.1)
            except queue.Empty:
                continue
            if isinstance(result, BaseException):
                raise result
            if stop(result):
                ended.set()
            yield job, result
    finally:
        ended.set()
        for process in started:
            if process.poll() is None:
                process.kill()


def listing() -> Told:
    return run(Job.of("list"))
