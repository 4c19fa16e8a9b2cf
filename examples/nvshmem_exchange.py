# SPDX-License-Identifier: Apache-2.0
"""Kernels in NVSHMEM's spelling, and with DeepEP's calls: every rank sends a row to every rank.

python nvshmem_exchange.py [cpu|cuda|hip] [ranks]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import uccl_ep.accel
from uccl_ep import Communicator, LocalBootstrap, LocalGroup

LENGTH = 1024  # floats of a row


def expected(source: int, target: int) -> np.ndarray:
    return (1000 * source + 100 * target + np.arange(LENGTH) % 64).astype(np.float32)


def rank_main(kind: str) -> None:
    bootstrap = LocalBootstrap.inherited()
    n = bootstrap.size
    source = Path(__file__).with_suffix(".cu")
    with (
        uccl_ep.accel.open(kind) as gpu,
        Communicator(bootstrap, heap_bytes=8 * n * LENGTH, accelerator=gpu, channels=2, device_channels=2) as comm,
    ):
        module = gpu.compile(source.read_text(), source.name)
        stream, counts, length = gpu.stream(), gpu.alloc(8 * n), np.uint64(LENGTH)
        received = comm.heap.view(np.float32)[n * LENGTH :].reshape(n, LENGTH)

        comm.barrier()  # all are ready to receive
        module.kernel("exchange").launch(stream, n, 64, [comm.device(), length])
        stream.synchronize(timeout=60)
        comm.check_device()  # raises what a kernel met
        for peer in range(n):
            assert (received[peer] == expected(peer, comm.rank)).all(), f"the row of rank {peer}"

        comm.barrier()  # all have read it
        module.kernel("exchange_tokens").launch(stream, 1, 128, [comm.device(), length, counts])
        stream.synchronize(timeout=60)
        comm.check_device()
        assert (counts.numpy(np.uint64) == LENGTH * 4 // 256).all()
        for peer in range(n):
            assert (received[peer] == expected(peer, comm.rank) + np.float32(0.5)).all(), f"the tokens of rank {peer}"
        # One write a line: ranks share the terminal.
        sys.stdout.write(f"rank {comm.rank}: {n} rows and {n} x {LENGTH * 4 // 256} tokens, as they were sent\n")
        comm.barrier()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_main(sys.argv[2])
    else:
        kind, ranks = sys.argv[1] if sys.argv[1:] else "cpu", int(sys.argv[2]) if sys.argv[2:] else 2
        with LocalGroup(ranks) as group:
            processes = [group.popen(rank, [sys.executable, __file__, "rank", kind]) for rank in range(ranks)]
            sys.exit(max(process.wait() for process in processes))
