# SPDX-License-Identifier: Apache-2.0
"""A rank with its heap in device memory; test_device_heaps.py starts it.

Each round every rank puts a row to every rank, its own among them, with a signal behind it; who sees the signal must
find the row. The heap begins in the middle of its allocation, and rows land at another offset each time.
"""

from __future__ import annotations

import sys

import numpy as np

import uccl_ep.accel
from uccl_ep import Communicator, LocalBootstrap
from uccl_ep.bootstrap import Bootstrap

HEAP, OFFSET, ROW, ROUNDS = 1 << 18, 4096, 3984, 30
ARRIVED, READ = 0, 16  # signals: + source


def row(source: int, target: int, number: int) -> np.ndarray:
    return np.random.default_rng((source, target, number)).integers(0, 256, ROW, dtype=np.uint8)


def run(bootstrap: Bootstrap, strategy: str, options: str, host: bool = False) -> str:
    """`host`: this rank's heap is host memory, the others' may not be."""
    with uccl_ep.accel.open("cpu") as gpu:
        memory = None if host else gpu.alloc(HEAP + 2 * OFFSET)
        with Communicator(
            bootstrap,
            heap=None if memory is None else memory.slice(OFFSET, HEAP),
            heap_bytes=HEAP,
            accelerator=gpu,
            strategy=strategy,
            backend_options=options,
            channels=2,
        ) as comm:

            def write(at: int, data: np.ndarray) -> None:
                if memory is None:
                    comm.heap[at : at + data.size] = data
                else:
                    memory.slice(OFFSET + at, data.size).copy_from(data)

            def read(at: int) -> np.ndarray:
                if memory is None:
                    return np.array(comm.heap[at : at + ROW])
                return memory.slice(OFFSET + at, ROW).numpy(np.uint8)

            ranks, me = range(comm.size), comm.rank
            for number in range(ROUNDS):
                for target in ranks:
                    write(target * 4096, row(me, target, number))
                    landing = HEAP // 2 + me * 4096 + number % 7 * 16
                    comm.channel(target % 2).put_signal(target, target * 4096, landing, ROW, ARRIVED + me)
                for source in ranks:
                    comm.wait_signal(ARRIVED + source, number + 1, source=source)
                    found = read(HEAP // 2 + source * 4096 + number % 7 * 16)
                    assert (found == row(source, me, number)).all(), f"round {number}: a signal of {source} came first"
                for index in range(2):
                    comm.channel(index).quiet()
                for source in ranks:
                    comm.channel(0).signal(source, READ + me)
                for source in ranks:
                    comm.wait_signal(READ + source, number + 1, source=source)
            comm.barrier()
            return str(comm.info.strategy)


if __name__ == "__main__":
    bootstrap = LocalBootstrap.inherited()
    hosts = [int(rank) for rank in sys.argv[3].split(",") if rank]
    print("strategy", run(bootstrap, sys.argv[1], sys.argv[2], bootstrap.rank in hosts))
