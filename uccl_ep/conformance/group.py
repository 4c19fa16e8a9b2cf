# SPDX-License-Identifier: Apache-2.0
"""The parent's side of one case: fork its ranks, serve what they need out of band, end them, and say how it went.

One thread, one loop, one deadline. Every rank is a fresh process that talks JSON lines over a socket pair; nothing that
it sends is executed. When `run` returns no process of the group is left, whatever it did.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import faulthandler
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .judgement import Judgement

MAX_LINE = 16 << 20
OUTPUT_KEPT = 3000  # bytes, of the start and of the end
REPORT_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)

RankMain = Callable[[int, socket.socket], None]


@dataclass
class GroupOutcome:
    """How a group of ranks ended. `status`: pass, fail, crash, timeout, not_supported or internal_error."""

    status: str
    detail: dict[str, Any]
    ranks: list[str]
    checks: int
    caps: dict[str, Any]
    seconds: float
    notes: dict[str, Any]  # what rank 0 noted down, for whoever asked for the run
    hash: str = ""  # of a simulated run: equal hashes, equal runs
    parts: list[dict[str, Any]] = field(default_factory=list)  # of histories, as the ranks told them
    judgement: Judgement = field(default_factory=Judgement)


@dataclass
class _Rank:
    index: int
    pid: int
    sock: socket.socket
    output: int
    pidfd: int = -1
    received: bytearray = field(default_factory=bytearray)
    result: dict[str, Any] | None = None
    exit: int | None = None  # as waitpid gives it
    condemned: bool = False  # the case asked for its death
    stopped: bool = False
    report: str = ""

    @property
    def alive(self) -> bool:
        return self.exit is None


class Group:
    def __init__(self, size: int, main: RankMain, *, deadline: float, grace: float = 1.0) -> None:
        """`deadline`: seconds for all of it; `grace`: seconds that the others get once one rank failed."""
        self._size, self._main, self._limit, self._grace = size, main, deadline, grace
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        # (topic, members) -> what each has handed in: a meeting of one topic is never taken for one of another.
        self._gathers: dict[tuple[str, tuple[int, ...]], dict[int, deque[tuple[int, str]]]] = {}
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._first: tuple[str, dict[str, Any], int] | None = None  # status, detail, whose process
        self._failed_at: float | None = None
        self._late = False  # a rank has told that time is over: its clock may be ahead of ours

    # ------------------------------------------------------------------------------------------------------ the loop

    def run(self) -> GroupOutcome:
        began = time.monotonic()
        try:
            # An interrupt comes before the first rank or after the last: each of them is known then.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            try:
                self._fork_all(before)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            end = began + self._limit
            while not self._finished():
                now = time.monotonic()
                if now >= end or self._late:
                    self._expire()
                    break
                if self._failed_at is not None and now >= self._failed_at + self._grace:
                    break
                self._turn(end)
            return self._outcome(time.monotonic() - began)
        finally:
            self._end_all()

    def _turn(self, end: float) -> None:
        now = time.monotonic()
        due = [end] + [t for t, _ in self._timers]
        if self._failed_at is not None:
            due.append(self._failed_at + self._grace)
        wait = max(0.0, min(due) - now)
        if any(r.alive and r.pidfd < 0 for r in self._ranks):
            wait = min(wait, 0.02)
        ready = {key.data for key, _ in self._selector.select(wait)}
        # What a rank said before it died comes first.
        for kind, index in sorted(ready, key=lambda d: d[0] != "socket"):
            rank = self._ranks[index]
            self._read(rank) if kind == "socket" else self._reap(rank)
        for rank in self._ranks:
            if rank.alive and rank.pidfd < 0:
                self._reap(rank)
        now = time.monotonic()
        for timer in [t for t in self._timers if t[0] <= now]:
            self._timers.remove(timer)
            timer[1]()

    def _turn_until(self, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            self._turn(min(end, time.monotonic() + 0.02))

    def _finished(self) -> bool:
        return bool(self._ranks) and all(r.result is not None or not r.alive for r in self._ranks)

    # ------------------------------------------------------------------------------------------------- life and death

    def _fork_all(self, mask: set[int | signal.Signals]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        for index in range(self._size):
            ours, theirs = socket.socketpair()
            output = os.memfd_create(f"rank{index}", os.MFD_CLOEXEC)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a nested group forks beside a reader thread, which holds no lock
                pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                self._child(index, parent, ours, theirs, output)
            theirs.close()
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            rank = _Rank(index, pid, ours, output)
            self._ranks.append(rank)
            # A rank that reads nothing (stopped, or stuck) must not stop the runner; recv is told not to wait.
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 5, 0))
            self._selector.register(ours, selectors.EVENT_READ, ("socket", index))
            with contextlib.suppress(OSError):
                rank.pidfd = os.pidfd_open(pid)
                self._selector.register(rank.pidfd, selectors.EVENT_READ, ("process", index))

    def _child(self, index: int, parent: int, ours: socket.socket, theirs: socket.socket, output: int) -> None:
        code = 70
        try:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(code)
            os.setpgid(0, 0)
            ours.close()
            for sibling in self._ranks:
                sibling.sock.close()
                os.close(sibling.output)
                if sibling.pidfd >= 0:
                    os.close(sibling.pidfd)
            self._selector.close()
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            # A test runner may have put other objects here, which would hold on to what the dying rank has to say.
            sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            faulthandler.enable(file=2)
            faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
            self._main(index, theirs)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self, rank: _Rank) -> None:
        if rank.alive and os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self._bury(rank)

    def _bury(self, rank: _Rank) -> None:
        """Wait for the end of a rank, and end what it forked: its process group, while the number is still its own."""
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.pid, signal.SIGKILL)
        self._gone(rank, os.waitpid(rank.pid, 0)[1])

    def _gone(self, rank: _Rank, status: int) -> None:
        self._read(rank)  # what is left in the socket
        rank.exit = status
        if rank.pidfd >= 0:
            self._selector.unregister(rank.pidfd)
            os.close(rank.pidfd)
            rank.pidfd = -1
        if rank.result is None and not rank.condemned:
            how = (
                f"signal {signal.Signals(os.WTERMSIG(status)).name}"
                if os.WIFSIGNALED(status)
                else (f"exit status {os.WEXITSTATUS(status)}")
            )
            self._fail(
                "crash", {"message": f"rank {rank.index} died of {how}", "rank": rank.index, "died_of": how}, rank.index
            )
        self._serve_gathers()

    def _fail(self, status: str, detail: dict[str, Any], process: int) -> None:
        if self._first is None:
            self._first = (status, detail, process)
        if self._failed_at is None:
            self._failed_at = time.monotonic()
            self._serve_gathers()

    def _expire(self) -> None:
        """The deadline passed: let the living say where they are, then it is over."""
        waiting = [r for r in self._ranks if r.alive and r.result is None]
        for rank in waiting:
            if rank.stopped:
                os.kill(rank.pid, signal.SIGCONT)
            self._send(rank, {"op": "report"})
        self._turn_until(lambda: not any(r.alive and not r.report for r in waiting), REPORT_SECONDS)
        # One that holds the interpreter's lock cannot answer; the signal's handler needs no lock.
        mute = [r for r in waiting if r.alive and not r.report]
        for rank in mute:
            os.kill(rank.pid, signal.SIGUSR1)
        self._turn_until(lambda: all(not r.alive or self._output(r) for r in mute), REPORT_SECONDS / 2)
        names = ", ".join(str(r.index) for r in waiting)
        if self._first is None:
            message = f"not finished after {self._limit:g} s: rank {names}"
            self._first = ("timeout", {"message": message, "rank": waiting[0].index}, waiting[0].index)
        if self._first[0] == "timeout" and waiting:
            self._first[1]["report"] = {str(r.index): r.report for r in waiting if r.report}
            self._first[1]["stacks"] = {str(r.index): self._output(r) for r in waiting}

    def _end_all(self) -> None:
        for rank in self._ranks:
            if rank.alive and rank.result is not None:
                self._send(rank, {"op": "exit"})
        end = time.monotonic() + 1.0
        while any(r.alive and r.result is not None for r in self._ranks) and time.monotonic() < end:
            self._turn(end)
        # A rank that has not said how it went will not be asked.
        for rank in self._ranks:
            if rank.alive:
                os.kill(rank.pid, signal.SIGKILL)
                rank.condemned = True
                self._bury(rank)
            rank.sock.close()
            os.close(rank.output)
        self._selector.close()

    def _output(self, rank: _Rank) -> str:
        """What the rank printed: the first words and the last ones."""
        size = os.fstat(rank.output).st_size
        data = os.pread(rank.output, OUTPUT_KEPT, 0)
        if size > 2 * OUTPUT_KEPT:
            data += b"\n[...]\n"
        if size > OUTPUT_KEPT:
            data += os.pread(rank.output, OUTPUT_KEPT, max(OUTPUT_KEPT, size - OUTPUT_KEPT))
        return data.decode("utf-8", "replace").strip()

    # ------------------------------------------------------------------------------------------------- what ranks ask

    def _send(self, rank: _Rank, message: dict[str, Any]) -> None:
        # A rank that is gone is noticed by its process, not here.
        with contextlib.suppress(OSError):
            rank.sock.sendall(json.dumps(message).encode() + b"\n")

    def _read(self, rank: _Rank) -> None:
        if rank.sock.fileno() < 0:
            return
        whole = False
        while True:
            try:
                data = rank.sock.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(rank.sock)
                break
            rank.received += data
            whole = whole or b"\n" in data
        if not whole and len(rank.received) <= MAX_LINE:
            return
        *lines, rest = bytes(rank.received).split(b"\n")
        rank.received = bytearray(rest)
        if len(rest) > MAX_LINE:
            self._fail(
                "internal_error",
                {"message": f"rank {rank.index} sent a line without end", "rank": rank.index},
                rank.index,
            )
            return
        for line in lines:
            self._handle(rank, json.loads(line))

    def _handle(self, rank: _Rank, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "gather":
            members = tuple(int(m) for m in message["ranks"])
            queues = self._gathers.setdefault((message["topic"], members), {m: deque() for m in members})
            queues[rank.index].append((message["id"], message["data"]))
            self._serve_gathers()
        elif op == "cancel":
            for queues in self._gathers.values():
                queue = queues.get(rank.index)
                if queue is not None:
                    for entry in [e for e in queue if e[0] == message["cancelled"]]:
                        queue.remove(entry)
        elif op in ("kill", "stop", "resume"):
            self._signal(rank, op, message)
        elif op == "report":
            rank.report = message["text"]
        elif op == "result":
            rank.result = message
            if message["status"] not in ("pass", "interrupted"):
                # A process that holds a whole world says which of its ranks it was.
                self._fail(message["status"], {"rank": rank.index, **message["detail"]}, rank.index)
                self._late = self._late or message["status"] == "timeout"
            self._serve_gathers()
        else:
            self._fail(
                "internal_error", {"message": f"rank {rank.index} asked for {op!r}", "rank": rank.index}, rank.index
            )

    def _signal(self, asker: _Rank, op: str, message: dict[str, Any]) -> None:
        target = self._ranks[message["rank"]]
        if target.alive:
            if op == "kill":
                target.condemned = True
                os.kill(target.pid, signal.SIGKILL)
                self._bury(target)
            elif op == "stop":
                os.kill(target.pid, signal.SIGSTOP)
                state = os.waitid(os.P_PID, target.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
                if state is not None and state.si_code in (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED):
                    self._bury(target)
                else:
                    target.stopped = True
                    if message["resume_after"] is not None:
                        self._timers.append((time.monotonic() + message["resume_after"], lambda: self._resume(target)))
            else:
                self._resume(target)
        self._send(asker, {"id": message["id"]})

    def _resume(self, rank: _Rank) -> None:
        if rank.alive and rank.stopped:
            rank.stopped = False
            os.kill(rank.pid, signal.SIGCONT)

    def _serve_gathers(self) -> None:
        """Answer every allgather whose members have all come, and those that can no longer be."""
        for (_, members), queues in self._gathers.items():
            while all(queues.values()):
                entries = [queues[m].popleft() for m in members]
                for member, (number, _) in zip(members, entries, strict=True):
                    self._send(self._ranks[member], {"id": number, "data": [data for _, data in entries]})
            if self._failed_at is not None:
                error: dict[str, Any] = {"error": "interrupted"}
            else:
                # One that ended, well or not, will not come to a meeting that it has not announced.
                absent = [
                    m
                    for m in members
                    if not queues[m] and (not self._ranks[m].alive or self._ranks[m].result is not None)
                ]
                if not absent:
                    continue
                error = {"error": "absent", "ranks": absent}
            for member, queue in queues.items():
                while queue:
                    self._send(self._ranks[member], {"id": queue.popleft()[0], **error})

    # ----------------------------------------------------------------------------------------------------- how it went

    def _outcome(self, seconds: float) -> GroupOutcome:
        ranks: list[str] = []
        checks = 0
        caps: dict[str, Any] = {}
        first = self._ranks[0].result
        notes: dict[str, Any] = first["notes"] if first is not None else {}
        run = str(first.get("hash", "")) if first is not None else ""
        parts: list[dict[str, Any]] = []
        judgement = Judgement()
        for rank in self._ranks:
            if rank.result is not None:
                ranks += map(str, rank.result.get("ranks", [rank.result["status"]]))
                checks += int(rank.result["checks"])
                caps = caps or rank.result["caps"]
                parts += rank.result["parts"]
                for told in rank.result["judged"]:
                    judgement.add(Judgement.from_dict(told))
            else:
                ranks.append("killed" if rank.condemned else "died" if not rank.alive else "running")
        if self._first is None:
            return GroupOutcome("pass", {}, ranks, checks, caps, seconds, notes, run, parts, judgement)
        status, detail, process = self._first
        output = self._output(self._ranks[process])
        if output and "stacks" not in detail:
            detail["output"] = output
        return GroupOutcome(status, detail, ranks, checks, caps, seconds, notes, run, parts, judgement)


def decode_gathered(data: Sequence[str]) -> list[bytes]:
    return [base64.b64decode(d, validate=True) for d in data]


def encode_gathered(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
