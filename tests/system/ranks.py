# SPDX-License-Identifier: Apache-2.0
"""Ranks as real processes, forked from the test's own, which has everything imported: tens of milliseconds a group.

Each says what it does over a pipe ({"event": ..., ...}), so that a test acts on what has happened and not on time. A
rank that hangs prints where, and ends; whatever happens to the test, no rank outlives it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uccl_ep import errors
from uccl_ep.bootstrap import LocalGroup

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


# ------------------------------------------------------------------------------------------------- the side of the rank


class Member:
    """What a rank's function gets."""

    def __init__(self, rank: int, groups: list[Any], pipe: int) -> None:
        self.rank = rank
        self.bootstraps = groups
        self._pipe = pipe

    @property
    def bootstrap(self) -> Any:
        return self.bootstraps[0]

    def say(self, event: str, **facts: Any) -> None:
        line = json.dumps({"event": event, "at": time.monotonic_ns(), **facts}).encode() + b"\n"
        # A pipe takes up to 4096 bytes whole: a rank that is killed in between has said a line or nothing.
        assert len(line) <= 4096, line
        os.write(self._pipe, line)


def facts_of(error: errors.UcclEpError) -> dict[str, Any]:
    record = error.record
    return {
        "kind": type(error).__name__,
        "name": error.name,
        "peer": record.peer,
        "channel": record.channel,
        "clause": record.clause,
        "text": record.text,
    }


def open_files() -> dict[str, str]:
    """The own descriptors and what they are."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    listing = [name for name, what in found.items() if what == f"/proc/{os.getpid()}/fd"]
    return {name: what for name, what in found.items() if name not in listing}


def belongings() -> list[str]:
    """What of this process others could see by name: abstract sockets, files of /dev/shm that it has open or mapped."""
    files = set(open_files().values())
    inodes = {what[8:-1] for what in files if what.startswith("socket:[")}
    mapped = {line.split(None, 5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    names = {path for inode, path in unix_sockets() if inode in inodes and path.startswith("@")}
    return sorted(names | {name for name in files | mapped if name.startswith("/dev/shm/")})


def still_there(names: set[str]) -> set[str]:
    sockets = {path for _, path in unix_sockets()}
    return {name for name in names if name in sockets or Path(name.removesuffix(" (deleted)")).exists()}


def unix_sockets() -> Iterator[tuple[str, str]]:
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]:
        fields = line.split(None, 7)
        if len(fields) == 8:
            yield fields[6], fields[7]


class Footprint:
    """Descriptors, threads and mappings of this process now; `check` says what came since and did not go."""

    def __init__(self) -> None:
        gc.collect()
        self.files = open_files()
        self.threads = set(os.listdir("/proc/self/task"))

    def leaks(self, seconds: float = 10.0) -> list[str]:
        """What has not gone after a while: a joined thread is listed until the kernel has taken it away."""
        end = time.monotonic() + seconds
        while (left := self._left()) and time.monotonic() < end:
            time.sleep(0.01)
        return left

    def _left(self) -> list[str]:
        gc.collect()
        left = [f"descriptor {n}: {what}" for n, what in open_files().items() if self.files.get(n) != what]
        left += [f"thread {n}" for n in set(os.listdir("/proc/self/task")) - self.threads]
        maps = Path("/proc/self/maps").read_text().splitlines()
        return left + [f"mapping {line}" for line in maps if "memfd:uccl_ep" in line]


# ------------------------------------------------------------------------------------------------- the side of the test


@dataclass
class Child:
    rank: int
    pid: int
    pipe: int
    events: list[dict[str, Any]] = field(default_factory=list)
    received: bytes = b""
    ended: int | None = None  # as os.waitpid tells: an exit code, or minus a signal

    def saw(self, event: str) -> dict[str, Any] | None:
        return next((one for one in self.events if one["event"] == event), None)

    def all(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.events if one["event"] == event]


class Ranks:
    """`size` forked processes that run function(member, *arguments). A context manager: at its end none is left."""

    def __init__(
        self,
        size: int,
        function: Callable[..., None],
        *arguments: Any,
        groups: list[list[int]] | None = None,
        absent: tuple[int, ...] = (),
        seconds: float = 60.0,
        environment: Callable[[int], None] | None = None,
    ) -> None:
        """`groups`: further bootstraps, each over the listed ranks. `absent` ranks are never started.
        `environment(rank)` runs in the child first."""
        self.seconds = seconds
        self.groups = [LocalGroup(size)]
        members = [list(range(size))]
        for ranks in groups or []:
            self.groups.append(LocalGroup(len(ranks)))
            members.append(ranks)
        self._function, self._arguments, self._environment = function, arguments, environment
        self.children: dict[int, Child] = {}
        self._selector = selectors.DefaultSelector()
        sys.stdout.flush()
        sys.stderr.flush()
        # All are forked before a group starts its thread: a child of a process with one thread is a plain thing.
        present = [rank for rank in range(size) if rank not in absent]
        pairs = list(zip(self.groups, members, strict=True))
        for rank in present:
            self._fork(rank, [group.endpoint(ranks.index(rank)) if rank in ranks else None for group, ranks in pairs])
        for group, ranks in pairs:
            for rank in set(ranks) & set(present):
                group.release(ranks.index(rank))

    def _fork(self, rank: int, endpoints: list[Any]) -> None:
        ours, theirs = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            for child in self.children.values():
                os.close(child.pipe)
            self._run(rank, endpoints, theirs, parent)
        os.close(theirs)
        os.set_blocking(ours, False)
        self.children[rank] = child = Child(rank, pid, ours)
        self._selector.register(ours, selectors.EVENT_READ, child)

    def _run(self, rank: int, endpoints: list[Any], pipe: int, parent: int) -> None:
        code = 1
        try:
            gc.freeze()  # what the parent made is not looked at again, and so its pages are not copied
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            faulthandler.dump_traceback_later(self.seconds, exit=True, file=sys.__stderr__)
            for group, endpoint in zip(self.groups, endpoints, strict=False):
                if endpoint is None:
                    group.close()  # of others: its copies here would hide their deaths
            member = Member(rank, endpoints, pipe)
            try:
                if self._environment:
                    self._environment(rank)
                self._function(member, *self._arguments)
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                member.say("raised", traceback=traceback.format_exc()[-3500:])
        finally:
            os._exit(code)

    def replace(self, rank: int, function: Callable[..., None], *arguments: Any) -> None:
        """A new process for a rank that has ended."""
        assert self.children[rank].ended is not None
        self._drop(self.children[rank])
        self.groups[0].replace(rank)
        self._function, self._arguments = function, arguments
        self._fork(rank, [self.groups[0].endpoint(rank)])
        self.groups[0].release(rank)

    def wait_for(self, rank: int, event: str, seconds: float = 30.0) -> dict[str, Any]:
        child = self.children[rank]
        deadline = time.monotonic() + seconds
        while (seen := child.saw(event)) is None:
            if child.ended is not None or time.monotonic() > deadline:
                why = f"ended with {child.ended}" if child.ended is not None else f"is silent for {seconds} s"
                raise AssertionError(f"rank {rank} {why} and has not said {event!r}:\n{self.story()}")
            self._listen(min(0.5, max(deadline - time.monotonic(), 0)))
        return seen

    def signal(self, rank: int, number: int) -> int:
        """Returns when, in ns. The process is ours and not waited for yet, so its id is still its own."""
        child = self.children[rank]
        assert child.ended is None, f"rank {rank} has ended before it was to be killed:\n{self.story()}"
        os.kill(child.pid, number)
        return time.monotonic_ns()

    def reap(self, rank: int) -> int:
        """Until it has ended, also if a child of it lives on and holds its end of the pipe."""
        child = self.children[rank]
        if child.ended is None:
            self._selector.unregister(child.pipe)
            child.ended = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        return child.ended

    def join(self, seconds: float = 60.0, but: tuple[int, ...] = ()) -> dict[int, Child]:
        """Until all have ended."""
        deadline = time.monotonic() + seconds
        while running := [c.rank for c in self.children.values() if c.ended is None and c.rank not in but]:
            if time.monotonic() > deadline:
                raise AssertionError(f"ranks {running} have not ended after {seconds} s:\n{self.story()}")
            self._listen(min(0.5, max(deadline - time.monotonic(), 0)))
        return self.children

    def join_well(self, *but: int, seconds: float = 60.0) -> dict[int, Child]:
        """Until all have ended, with code 0 except those."""
        ended = {child.rank: child.ended for child in self.join(seconds).values() if child.rank not in but}
        bad = {rank: code for rank, code in ended.items() if code != 0}
        assert not bad, f"ranks ended with {bad}:\n{self.story()}"
        return self.children

    def belongings(self) -> set[str]:
        """What the ranks said that they have."""
        return {name for child in self.children.values() for one in child.all("has") for name in one["names"]}

    def story(self) -> str:
        return "\n".join(
            f"rank {child.rank} ({'runs' if child.ended is None else child.ended}): "
            + "; ".join(
                one["traceback"] if "traceback" in one else str({k: v for k, v in one.items() if k != "at"})
                for one in child.events
            )
            for child in self.children.values()
        )

    def _listen(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            child: Child = key.data
            chunk = os.read(child.pipe, 1 << 16)
            if chunk:
                *lines, child.received = (child.received + chunk).split(b"\n")
                child.events += [json.loads(line) for line in lines]
                continue
            # Its pipe is closed: it has ended, or is about to (only the rank has that end).
            self._selector.unregister(child.pipe)
            child.ended = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])

    def _drop(self, child: Child) -> None:
        os.close(child.pipe)
        del self.children[child.rank]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children.values():
            if child.ended is None:
                os.kill(child.pid, signal.SIGKILL)
        self.join()
        for child in list(self.children.values()):
            self._drop(child)
        self._selector.close()
        for group in self.groups:
            group.close()
