# SPDX-License-Identifier: Apache-2.0
"""The rank's side of one case: run the function, look for what it left behind, say how it went."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..lab import inside
from . import gpu, history, patterns
from .context import Context
from .errors import CheckFailed, GroupError, Interrupted, NotSupported, OutOfTime
from .group import Group, GroupOutcome, decode_gathered, encode_gathered
from .history import judged
from .lanes import Lane
from .registry import Case

# Between two looks at whether a rank without threads of its own has something to do, while it waits for the others.
DRIVING_NAP = 0.0005


class ProcessLink:
    """The way from a rank to the parent and through it to the other ranks. A thread reads, so that a rank that hangs
    can still be asked for a report."""

    pace = patience = effort = economy = 1.0
    clock = staticmethod(time.monotonic_ns)

    def __init__(self, sock: socket.socket, rank: int, lane: Lane | None = None) -> None:
        self._sock, self._rank, self._lane = sock, rank, lane
        if lane is not None:
            self.effort, self.patience, self.economy = lane.effort, lane.patience, lane.economy
        self._numbers = itertools.count()
        self._answers: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._send_lock = threading.Lock()
        self._closed = False
        self.exit_asked = threading.Event()
        self.report: Callable[[], str] = lambda: ""
        self._reader = threading.Thread(target=self._read, name="link", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._sock.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if "id" in message:
                    with self._changed:
                        self._answers[message["id"]] = message
                        self._changed.notify_all()
                elif message["op"] == "report":
                    faulthandler.dump_traceback(file=2, all_threads=True)
                    try:
                        text = self.report()
                    except Exception as error:
                        text = f"no report: {type(error).__name__}: {error}"
                    self.send({"op": "report", "text": text})
                elif message["op"] == "exit":
                    self.exit_asked.set()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.exit_asked.set()

    def send(self, message: dict[str, Any]) -> None:
        with self._send_lock:
            self._sock.sendall(json.dumps(message).encode() + b"\n")

    def _ask(
        self, message: dict[str, Any], timeout: float, meanwhile: Callable[[], bool] | None = None
    ) -> dict[str, Any]:
        number = next(self._numbers)
        self.send({**message, "id": number})
        end = self.now() + timeout

        def there() -> bool:
            return number in self._answers or self._closed

        came = False
        while meanwhile is not None and not came and self.now() < end:
            nap = 0.0 if meanwhile() else DRIVING_NAP
            with self._changed:
                came = self._changed.wait_for(there, nap)
        with self._changed:
            came = self._changed.wait_for(there, max(0.0, end - self.now()))
            answer = self._answers.pop(number, None)
        if answer is not None:
            return answer
        if came:
            raise GroupError("the runner is gone")
        self.send({"op": "cancel", "id": next(self._numbers), "cancelled": number})
        raise TimeoutError(f"rank {self._rank} waited {timeout:.3g} s out of band for the others")

    def allgather(
        self,
        data: bytes,
        ranks: Sequence[int],
        timeout: float,
        topic: str,
        meanwhile: Callable[[], bool] | None = None,
    ) -> list[bytes]:
        message = {"op": "gather", "topic": topic, "ranks": list(ranks), "data": encode_gathered(data)}
        answer = self._ask(message, timeout, meanwhile)
        if answer.get("error") == "interrupted":
            raise Interrupted("another rank failed")
        if "error" in answer:
            raise GroupError(f"rank {', '.join(map(str, answer['ranks']))} is gone")
        return decode_gathered(answer["data"])

    def kill(self, rank: int) -> None:
        self._ask({"op": "kill", "rank": rank}, 10.0)

    def stop(self, rank: int, resume_after: float | None = None) -> None:
        self._ask({"op": "stop", "rank": rank, "resume_after": resume_after}, 10.0)

    def resume(self, rank: int) -> None:
        self._ask({"op": "resume", "rank": rank}, 10.0)

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def spawn(self, function: Callable[[], None]) -> Callable[[float], bool]:
        thread = threading.Thread(target=function, daemon=True)
        thread.start()

        def join(timeout: float) -> bool:
            thread.join(max(0.0, timeout))
            return not thread.is_alive()

        return join

    def inject(self, fault: str) -> None:
        raise RuntimeError("no lane of processes can make a NIC fail: the case needs 'faults'")

    def run_group(
        self, ctx: Context, size: int, function: Callable[[Context], None], deadline: float | None
    ) -> GroupOutcome:
        limit = ctx.deadline - ctx.now() - 1.0 if deadline is None else deadline
        case = replace(ctx.case, function=function)

        def main(rank: int, sock: socket.socket) -> None:
            run_rank(
                case, rank, size, sock, seed=ctx.seed, backend=ctx.backend, time_scale=ctx.time_scale, lane=self._lane
            )

        return judged(Group(size, main, deadline=max(limit, 0.1)).run())


def held() -> tuple[int, dict[int, str]]:
    """Threads and descriptors of this process, but for those of a NIC that lives in it."""
    nic_threads, nic_descriptors = inside.held()
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the listing's own
    for fd in nic_descriptors:
        descriptors.pop(fd, None)
    return len(os.listdir("/proc/self/task")) - nic_threads, descriptors


def check_left_behind(ctx: Context, threads: int, descriptors: dict[int, str]) -> None:
    # A thread that was joined may still be on its way out of the kernel's list.
    end = time.monotonic() + 2.0
    while held()[0] > threads and time.monotonic() < end:
        time.sleep(0.0002)
    after = held()[0]
    ctx.check(
        after <= threads, "ABT-1", "threads remain after every communicator was closed", before=threads, after=after
    )
    new = {fd: name for fd, name in held()[1].items() if descriptors.get(fd) != name}
    if ctx.session is not None:
        new = {fd: name for fd, name in new.items() if not ctx.session.mine(name)}
    ctx.check(
        not new,
        "ABT-1",
        "descriptors remain open after every communicator was closed",
        descriptors={str(fd): name for fd, name in new.items()},
    )
    ctx.checks -= 2  # not an assertion of the case


def judge(case: Case, ctx: Context, body: Callable[[], None]) -> tuple[str, dict[str, Any]]:
    """Run a rank's part of a case: (status, detail)."""
    from uccl_ep import UcclEpError

    try:
        body()
    except CheckFailed as error:
        detail = {"clause": error.clause, "message": error.message, "values": plain(error.values), "at": _where(error)}
        return "fail", detail
    except Interrupted:
        return "interrupted", {}
    except NotSupported as error:
        return "not_supported", {"capability": error.capability, "message": error.reason}
    except UcclEpError as error:
        # An error that the case did not ask for breaks what the case is about.
        return "fail", {
            "clause": case.clauses[0],
            "message": f"unexpected {type(error).__name__}: {error}",
            "at": _where(error),
            "stage": ctx.stage,
            "recorded": ctx.recorded(),
        }
    except OutOfTime as error:
        return "timeout", {"message": str(error), "at": _where(error), "stage": ctx.stage}
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
        return "internal_error", {"message": message, "at": _where(error), "trace": traceback.format_exc()}
    return "pass", {}


def run_rank(
    case: Case, rank: int, size: int, sock: socket.socket, *, seed: int, backend: dict[str, Any], time_scale: float,
    setup: gpu.Setup | None = None, lane: Lane | None = None,
) -> None:  # fmt: skip
    """Run one rank of a case in this (forked) process and send the result."""
    warnings.simplefilter("ignore", DeprecationWarning)  # forking beside proxies is what some cases are about
    link = ProcessLink(sock, rank, lane)
    if lane is not None and lane.devices:
        # Silence is found out before a wait runs into its own deadline: of two at one time either may win.
        backend = {
            **backend, "device": lane.devices[rank % len(lane.devices)], "peer_timeout": 5.0 * time_scale,
        }  # fmt: skip
    ctx = Context(case, rank, size, link, seed=seed, backend=backend, time_scale=time_scale)
    link.report = ctx.report

    def body() -> None:
        if setup is not None:
            ctx.stage = "opening the accelerator"
            ctx.session = gpu.Session(setup, patterns.key_of((seed, case.id, rank, "scopes")))
        threads, descriptors = held()
        case.function(ctx)
        ctx.finish()
        check_left_behind(ctx, threads, descriptors)

    status, detail = judge(case, ctx, body)
    if status != "pass":
        for part in ctx.parts:
            part.spoil(history.NOT_PASSED)
    link.send(
        {
            "op": "result",
            "status": status,
            "detail": detail,
            "checks": ctx.checks,
            "caps": ctx.caps,
            "notes": plain(ctx.notes),
            "parts": [history.encode(part) for part in ctx.parts],
            "judged": [judgement.told() for judgement in ctx.judged],
        }
    )
    # The communicators of a failed rank stay as they are until all have been heard: closing one would make others fail.
    link.exit_asked.wait(10.0)


def in_child(function: Callable[[], Any], timeout: float) -> Any:
    """Run `function` in a fork of this rank and give back what it returns (plain JSON types)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            os.write(writer, json.dumps(function()).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    end = time.monotonic() + timeout
    with open(reader, "rb") as pipe:
        os.set_blocking(pipe.fileno(), False)
        text = b""
        while time.monotonic() < end:
            chunk = pipe.read()
            if chunk:
                text += chunk
            elif chunk == b"":
                break
            else:
                time.sleep(0.002)
    done, status = os.waitpid(pid, os.WNOHANG)
    while not done and time.monotonic() < end:
        time.sleep(0.002)
        done, status = os.waitpid(pid, os.WNOHANG)
    if not done:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        raise TimeoutError("a forked child did not end")
    if status:
        return {"died": os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)}
    return json.loads(text)


_HERE = os.path.dirname(__file__)
_MACHINERY = (_HERE, os.path.dirname(_HERE), os.path.dirname(contextlib.__file__))


def _where(error: BaseException) -> str:
    """The line of the case that was running: the innermost frame that is not ours, the library's or Python's."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if os.path.dirname(frame.filename) not in _MACHINERY:
            return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}: {frame.line}"
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "?"


def plain(value: Any) -> Any:
    """Anything as JSON types."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    try:
        return int(value)
    except (TypeError, ValueError):
        return str(value)
