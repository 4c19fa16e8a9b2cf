# SPDX-License-Identifier: Apache-2.0
"""Two processes on this machine: each puts 4 KiB into the other's heap and signals it.

python two_ranks.py
"""

from __future__ import annotations

import sys

from uccl_ep import Communicator, LocalBootstrap, LocalGroup

BYTES, SLOT = 4096, 0


def rank_main() -> None:
    bootstrap = LocalBootstrap.inherited()
    with Communicator(bootstrap, heap_bytes=1 << 20) as comm:
        peer = 1 - comm.rank
        comm.heap[:BYTES] = comm.rank + 1
        ticket = comm.channel(0).put_signal(peer, local=0, remote=BYTES, nbytes=BYTES, slot=SLOT)
        comm.wait_signal(SLOT, 1, source=peer)  # the peer's bytes are here (SIG-2)
        assert (comm.heap[BYTES : 2 * BYTES] == peer + 1).all()
        ticket.wait()  # ours are there (QUI-1): the source may be changed
        # One write a line: ranks share the terminal.
        sys.stdout.write(f"rank {comm.rank}: {BYTES} bytes from rank {peer}, strategy {comm.info.strategy}\n")
        comm.barrier()  # before closing, since a peer may still put to this rank (MEM-2)


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        rank_main()
    else:
        with LocalGroup(2) as group:
            ranks = [group.popen(rank, [sys.executable, __file__, "rank"]) for rank in range(2)]
            sys.exit(max(rank.wait() for rank in ranks))
