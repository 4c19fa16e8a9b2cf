# SPDX-License-Identifier: Apache-2.0
"""Bootstrap of processes on one machine: socket pairs inherited from the parent, a coordinator thread in the parent.

There is no address, port or file: whoever was not started by the parent cannot reach the group, and nothing is left
behind. Frames are fixed headers and bytes of a checked length; nothing received is evaluated.

A collective completes when every rank has asked for it. It fails for all of them, with the reason, as soon as one rank
is gone (its end of the pair is closed, which the kernel does however the process ends), when a rank asks for another
kind, or when the earliest deadline passes. Collectives are numbered, so a rank that comes late to a failed one is told,
and the next one is in step again; a rank's very first request joins whatever the others are at.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import BootstrapError, DeadlineExceeded

MAX_PART_BYTES = 64 << 20
ENVIRONMENT = "UCCL_EP_BOOTSTRAP"

_REQUEST = struct.Struct("<IIQQQ")  # kind, process id, sequence, timeout in ns, bytes of the part that follows
_REPLY = struct.Struct("<IIQQ")  # outcome, rank at fault, sequence, bytes that follow: lengths and parts, or a text
_ALLGATHER, _BARRIER = 1, 2
_KINDS = {_ALLGATHER: "allgather", _BARRIER: "barrier"}
_OK, _FAILED, _LATE = 0, 1, 2
_JOIN = 2**64 - 1  # sequence of a rank's first request: it learns the number from the reply
_NOBODY = 2**32 - 1
# The coordinator's deadline comes first, since it knows who is missing; a rank's own is for a coordinator that is gone.
_GRACE = 1.0


class LocalBootstrap:
    """A rank's end. From LocalGroup.endpoint() in the same or a forked process, or inherited() in a started one."""

    def __init__(self, sock: socket.socket, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._socket = sock
        self._sequence = _JOIN
        self._received = bytearray()
        self._lock = threading.Lock()
        self._broken = ""

    @classmethod
    def inherited(cls) -> LocalBootstrap:
        """The end that LocalGroup.popen() handed to this process."""
        spec = os.environ.pop(ENVIRONMENT, "")
        try:
            descriptor, rank, size = (int(field) for field in spec.split(":"))
            sock = socket.socket(fileno=descriptor)
        except (ValueError, OSError) as error:
            raise BootstrapError(
                f"{ENVIRONMENT} is {spec!r}: this process was not started by LocalGroup.popen"
            ) from error
        # A child of this rank that outlives it would otherwise hide its death.
        sock.set_inheritable(False)
        return cls(sock, rank, size)

    def allgather(self, data: bytes, timeout: float) -> list[bytes]:
        return self._collective(_ALLGATHER, bytes(data), timeout)

    def barrier(self, timeout: float) -> None:
        self._collective(_BARRIER, b"", timeout)

    def close(self) -> None:
        """Leave: collectives of the others fail from now on."""
        self._socket.close()

    def __enter__(self) -> LocalBootstrap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collective(self, kind: int, data: bytes, timeout: float) -> list[bytes]:
        if len(data) > MAX_PART_BYTES:
            raise BootstrapError(f"{len(data)} bytes are too many for a bootstrap exchange: {MAX_PART_BYTES} at most")
        if not timeout >= 0:
            raise ValueError(f"a timeout is not negative: {timeout!r} s")
        timeout = min(timeout, 1e9)
        deadline = time.monotonic() + timeout + _GRACE
        with self._lock:
            if self._broken:
                raise BootstrapError(self._broken, rank=self.rank)
            request = _REQUEST.pack(kind, os.getpid(), self._sequence, int(timeout * 1e9), len(data)) + data
            try:
                self._send(request, deadline)
                outcome, culprit, body = self._reply(deadline)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"{_KINDS[kind]} of the bootstrap: the process that started the ranks is silent for {timeout:g} s",
                    rank=self.rank,
                ) from None
            except OSError as error:
                self._broken = f"the process that started the ranks is gone ({error})"
                raise BootstrapError(self._broken, rank=self.rank) from error
        if outcome != _OK:
            kind_of_error = DeadlineExceeded if outcome == _LATE else BootstrapError
            peer = None if culprit == _NOBODY else culprit
            raise kind_of_error(body.decode("utf-8", "replace"), rank=self.rank, peer=peer)
        parts, at = [], 8 * self.size
        lengths = struct.unpack_from(f"<{self.size}Q", body) if len(body) >= at else ()
        if at + sum(lengths) != len(body):
            self._broken = "what the process that started the ranks said is no reply"
            raise BootstrapError(self._broken, rank=self.rank)
        for length in lengths:
            parts.append(body[at : at + length])
            at += length
        return parts

    def _send(self, request: bytes, deadline: float) -> None:
        self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
        try:
            self._socket.sendall(request)
        except TimeoutError:
            self._broken = "an earlier request could only be sent in part"
            raise

    def _reply(self, deadline: float) -> tuple[int, int, bytes]:
        while True:
            outcome, culprit, sequence, length = _REPLY.unpack(self._take(_REPLY.size, deadline))
            if outcome not in (_OK, _FAILED, _LATE) or sequence == _JOIN or length > self.size * (MAX_PART_BYTES + 8):
                raise ConnectionError("it said what is no reply")
            body = self._take(length, deadline)
            if self._sequence in (_JOIN, sequence):
                self._sequence = sequence + 1
                return outcome, culprit, body
            # Else of a collective that this rank stopped waiting for.

    def _take(self, size: int, deadline: float) -> bytes:
        """What was read stays in the buffer if the deadline comes: the next call goes on there."""
        while len(self._received) < size:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            chunk = self._socket.recv(1 << 20)
            if not chunk:
                raise ConnectionError("its end of the bootstrap is closed")
            self._received += chunk
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken


class _Member:
    """The coordinator's side of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.socket, theirs = socket.socketpair()
        self.theirs: socket.socket | None = theirs
        self.socket.setblocking(False)
        self.received = bytearray()
        self.unsent = bytearray()
        self.gone = False

    def close(self) -> None:
        self.socket.close()
        self.release()

    def release(self) -> None:
        if self.theirs is not None:
            self.theirs.close()
            self.theirs = None


class LocalGroup:
    """`size` ranks that this process starts. Use as a context manager.

    with LocalGroup(4) as group:
        ranks = [group.popen(rank, [sys.executable, "rank.py"]) for rank in range(4)]
        # and in rank.py: bootstrap = LocalBootstrap.inherited()

    Or fork after endpoint(rank), use it in the child, and release(rank) in the parent; or use the endpoints in threads.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a group has at least one rank, not {size}")
        self.size = size
        self._pid = os.getpid()
        self._lock = threading.Lock()  # over everything below
        self._members = [_Member(rank) for rank in range(size)]
        self._sequence = 0
        self._failure = (_FAILED, _NOBODY, "")
        self._pending: dict[int, tuple[int, bytes]] = {}
        self._deadline = float("inf")
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread: threading.Thread | None = None
        for member in self._members:
            self._selector.register(member.socket, selectors.EVENT_READ, member)

    # ------------------------------------------------------------------------------------------ called by the parent

    def endpoint(self, rank: int) -> LocalBootstrap:
        """For a thread of this process, or for a child that is about to be forked."""
        member = self._members[rank]
        if member.theirs is None:
            raise BootstrapError("this rank's end was handed to another process", rank=rank)
        return _Endpoint(self, member.theirs, rank)

    def popen(
        self, rank: int, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process that is `rank`: subprocess.Popen, with the rank's end passed along."""
        end = self.endpoint(rank)._socket.fileno()
        environment = {**(os.environ if env is None else env), ENVIRONMENT: f"{end}:{rank}:{self.size}"}
        process = subprocess.Popen(argv, env=environment, pass_fds=[end, *options.pop("pass_fds", ())], **options)
        self.release(rank)
        return process

    def release(self, rank: int) -> None:
        """The rank's end lives in another process now: drop this one's copy, so that the other's death is seen."""
        self._start()
        self._members[rank].release()

    def replace(self, rank: int) -> None:
        """A new end for a rank whose process is gone. The other ranks stay as they are."""
        with self._lock:
            old = self._members[rank]
            self._forget(old)
            self._pending.pop(rank, None)
            old.close()
            self._members[rank] = member = _Member(rank)
            self._selector.register(member.socket, selectors.EVENT_READ, member)
        self._wake()

    def close(self) -> None:
        """Ends every collective. Does not wait for the ranks."""
        if self._pid != os.getpid():
            return self._close_in_child(None)
        with self._lock:
            already, self._closed = self._closed, True
        if already:
            return
        self._wake()
        if self._thread is not None:
            self._thread.join()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        for member in self._members:
            member.close()

    def __enter__(self) -> LocalGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_in_child(self, keep: int | None) -> None:
        """In a forked child: without this it would keep the other ranks' ends open, and their deaths unseen."""
        self._pid = os.getpid()
        self._closed = True
        # The coordinator's thread may have held it at the moment of the fork, and does not exist here.
        self._lock = threading.Lock()
        with contextlib.suppress(OSError):
            # The epoll descriptor is shared with the parent: closing it is fine, unregistering from it would not be.
            os.close(self._selector.fileno())
        os.close(self._wake_read)
        os.close(self._wake_write)
        for member in self._members:
            member.socket.close()
            if member.rank != keep:
                member.release()

    # ----------------------------------------------------------------------------------------- the coordinator's thread

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._serve, name="uccl_ep-bootstrap", daemon=True)
                self._thread.start()

    def _wake(self) -> None:
        os.write(self._wake_write, b"x")

    def _serve(self) -> None:
        while True:
            wait = self._deadline - time.monotonic()
            ready = self._selector.select(None if wait == float("inf") else max(wait, 0))
            with self._lock:
                if self._closed:
                    return
                for key, events in ready:
                    if key.data is None:
                        os.read(self._wake_read, 4096)
                    elif not key.data.gone:
                        self._turn(key.data, events)
                if self._pending and time.monotonic() >= self._deadline:
                    missing = [member.rank for member in self._members if member.rank not in self._pending]
                    kind = _KINDS[next(iter(self._pending.values()))[0]]
                    why = f"{kind} of the bootstrap: still waiting for ranks {missing} at the deadline"
                    self._fail(_LATE, missing[0], why)

    def _turn(self, member: _Member, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(member)
            if events & selectors.EVENT_READ:
                chunk = member.socket.recv(1 << 20)
                if not chunk:
                    raise ConnectionError("ended")
                member.received += chunk
                self._requests(member)
        except BlockingIOError:
            pass
        except OSError:
            self._lose(member)

    def _requests(self, member: _Member) -> None:
        while len(member.received) >= _REQUEST.size:
            kind, process, sequence, timeout, length = _REQUEST.unpack_from(member.received)
            if kind not in _KINDS or length > MAX_PART_BYTES:
                raise ConnectionError("not a request")
            end = _REQUEST.size + length
            if len(member.received) < end:
                return
            part = bytes(member.received[_REQUEST.size : end])
            del member.received[:end]
            if process != os.getpid():
                member.release()
            self._request(member, kind, sequence, timeout * 1e-9, part)

    def _request(self, member: _Member, kind: int, sequence: int, timeout: float, part: bytes) -> None:
        if sequence < self._sequence:
            outcome, culprit, why = self._failure
            self._send(member, _REPLY.pack(outcome, culprit, sequence, len(why.encode())) + why.encode())
            return
        if sequence not in (self._sequence, _JOIN) or member.rank in self._pending:
            raise ConnectionError("out of step")
        self._pending[member.rank] = (kind, part)
        self._deadline = min(self._deadline, time.monotonic() + timeout)
        gone = [other.rank for other in self._members if other.gone]
        first_rank, (first_kind, _) = next(iter(self._pending.items()))
        if gone:
            self._fail(_FAILED, gone[0], f"ranks {gone} are gone: their processes ended or left the bootstrap")
        elif kind != first_kind:
            self._fail(
                _FAILED,
                member.rank,
                f"rank {member.rank} asks for {_KINDS[kind]} where rank {first_rank} asks for {_KINDS[first_kind]}: "
                "all ranks must call collectives in the same order",
            )
        elif len(self._pending) == self.size:
            parts = [self._pending[rank][1] for rank in range(self.size)]
            body = struct.pack(f"<{self.size}Q", *map(len, parts)) + b"".join(parts)
            self._finish(_OK, _NOBODY, body)

    def _fail(self, outcome: int, culprit: int, why: str) -> None:
        self._failure = (outcome, culprit, why)
        self._finish(outcome, culprit, why.encode())

    def _finish(self, outcome: int, culprit: int, body: bytes) -> None:
        reply = _REPLY.pack(outcome, culprit, self._sequence, len(body)) + body
        pending, self._pending = self._pending, {}
        self._sequence += 1
        self._deadline = float("inf")
        for rank in pending:
            self._send(self._members[rank], reply)

    def _send(self, member: _Member, reply: bytes) -> None:
        member.unsent += reply
        try:
            self._flush(member)
        except BlockingIOError:
            pass
        except OSError:
            self._lose(member)

    def _flush(self, member: _Member) -> None:
        """A stopped rank does not stop the coordinator: what its socket does not take waits here."""
        try:
            while member.unsent:
                del member.unsent[: member.socket.send(member.unsent)]
        finally:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if member.unsent else 0)
            self._selector.modify(member.socket, events, member)

    def _lose(self, member: _Member) -> None:
        if member.gone:
            return
        self._forget(member)
        self._pending.pop(member.rank, None)
        if self._pending:
            self._fail(_FAILED, member.rank, f"rank {member.rank} is gone: its process ended or left the bootstrap")

    def _forget(self, member: _Member) -> None:
        if not member.gone:
            member.gone = True
            self._selector.unregister(member.socket)


class _Endpoint(LocalBootstrap):
    """An end in the process that holds the group, or in its forked child."""

    def __init__(self, group: LocalGroup, sock: socket.socket, rank: int) -> None:
        super().__init__(sock, rank, group.size)
        self._group = group

    def _collective(self, kind: int, data: bytes, timeout: float) -> list[bytes]:
        if self._group._pid == os.getpid():
            self._group._start()
        elif not self._group._closed:
            self._group._close_in_child(self.rank)
        return super()._collective(kind, data, timeout)
