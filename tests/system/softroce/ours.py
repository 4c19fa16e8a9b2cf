# SPDX-License-Identifier: Apache-2.0
"""Rank 0 of two, of which the other is peer.py: `ours.py OUTPUT BACKEND...`, in a guest. It tells OUTPUT all."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from uccl_ep import Communicator, UcclEpError
from uccl_ep.softroce import wire

COUNT, SIZE, STRIDE, BASE = 120, 208, 256, 4096


class Peer:
    """The other rank, and the bootstrap that it and this one share."""

    rank, size = 0, 2

    def __init__(self, *words: str) -> None:
        program = Path(__file__).with_name("peer.py")
        self.process = subprocess.Popen(
            ["/usr/bin/python3", str(program), "rxe1", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def tell(self, kind: bytes, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(struct.pack("=Ic", len(data), kind) + data)
        self.process.stdin.flush()

    def hear(self) -> bytes:
        assert self.process.stdout is not None
        (length,) = struct.unpack("=I", self.process.stdout.read(4))
        return self.process.stdout.read(length)

    def allgather(self, data: bytes, timeout: float) -> list[bytes]:
        self.tell(b"E", data)
        return [data, self.hear()]

    def barrier(self, timeout: float) -> None:
        self.allgather(b"", timeout)

    def start(self, do: str, **arguments: Any) -> None:
        self.tell(b"J", json.dumps({"do": do, **arguments}).encode())

    def ask(self, do: str, **arguments: Any) -> Any:
        self.start(do, **arguments)
        return json.loads(self.hear())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)


def pattern(k: int, size: int) -> bytes:
    return bytes((k * 31 + i * 7 + 1) & 255 for i in range(size))


def communicator(peer: Peer, backend: str, options: str = "") -> Communicator:
    words = ",".join(filter(None, ("limits_only=1", options)))
    return Communicator(
        peer, backend=backend, device="rxe0", backend_options=words, heap_bytes=1 << 20, signals=16, channels=2,
        timeout=30.0, peer_timeout=30.0, strategy="ordered_atomic",
    )  # fmt: skip


def traffic(backend: str) -> dict[str, Any]:
    """Puts and signals to the other, which watches; then its own to here."""
    peer = Peer()
    layout = {"slot": 3, "count": COUNT, "size": SIZE, "stride": STRIDE, "base": BASE}
    with communicator(peer, backend) as comm:
        peer.start("watch", **layout)
        channel = comm.channel(0)
        for k in range(COUNT):
            at = BASE + k * STRIDE
            comm.heap[at : at + SIZE] = list(pattern(k, SIZE))
            if k % 2:
                channel.put_signal(1, at, at, SIZE, 3)
            else:
                channel.put(1, at, at, SIZE)
                channel.signal(1, 3)
        comm.quiet()
        watched = json.loads(peer.hear())
        comm.heap[:] = 0
        put = {**layout, "slot": 5}
        peer.start("put", **put)
        wrong = []
        for k in range(COUNT):
            comm.wait_signal(5, k + 1)
            if bytes(comm.heap[BASE + k * STRIDE : BASE + k * STRIDE + SIZE]) != pattern(k, SIZE):
                wrong.append(k)
        theirs = json.loads(peer.hear())
        word = comm.read_signal(5)
    peer.close()
    return {"watched": watched, "theirs": theirs, "wrong": wrong, "word": word}


def failure(backend: str, how: str) -> dict[str, Any]:
    """A put that the transport cannot carry out: which error, and how soon."""
    peer = Peer(*(["bad-key"] if how == "bad-key" else []))
    with communicator(peer, backend, "timeout=12,retry=3") as comm:
        if how == "silent":
            peer.ask("stop_answering")
        elif how == "killed":
            peer.process.send_signal(signal.SIGKILL)
            peer.process.wait()
        began = time.monotonic()
        told: dict[str, Any] = {"error": "", "text": "nothing was raised"}
        try:
            comm.channel(0).put_signal(1, 0, 0, 64, 0).wait()
        except UcclEpError as error:
            record = error.record
            told = {
                "error": type(error).__name__, "text": str(error), "vendor_code": record.vendor_code,
                "peer": record.peer, "nic": record.nic, "clause": record.clause,
            }  # fmt: skip
        told["seconds"] = time.monotonic() - began
        # The own rank is not harmed (ERR-5).
        comm.channel(1).put_signal(0, 64, 128, 64, 7).wait()
        told["own_rank"] = comm.read_signal(7)
    peer.close()
    return told


def main() -> None:
    output, *backends = sys.argv[1:]
    wire.lay()
    found: dict[str, Any] = {}
    for backend in backends:
        found[backend] = {"traffic": traffic(backend)}
        found[backend]["failures"] = {how: failure(backend, how) for how in ("bad-key", "silent", "killed")}
    wire.impair(
        ("loss", "2%", "delay", "200us", "reorder", "3%")
    )  # the messages are small: more than the suite can stand
    for _ in range(5):  # until something was lost: rarely more than once
        found["impaired"] = {"traffic": traffic(backends[0]), "wire": wire.counted()}
        if wire.bitten(found["impaired"]["wire"]):
            break
    Path(output).write_text(json.dumps(found))


main()
