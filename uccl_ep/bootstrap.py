# SPDX-License-Identifier: Apache-2.0
"""How ranks find each other before there is a network: an allgather of small byte strings.

Anything with `rank`, `size`, `allgather` and `barrier` is a bootstrap; these are the usual ones. All of them exchange
raw bytes with checked lengths, none pickles. torch and mpi4py are imported only by the classes that use them.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

from ._local_group import MAX_PART_BYTES, LocalBootstrap, LocalGroup
from .errors import BootstrapError, DeadlineExceeded

__all__ = [
    "Bootstrap",
    "LocalBootstrap",
    "LocalGroup",
    "MpiBootstrap",
    "SingleProcess",
    "TorchGroupBootstrap",
    "TorchStoreBootstrap",
]


@runtime_checkable
class Bootstrap(Protocol):
    """Collective calls, in the same order on all ranks. A call that cannot complete raises within `timeout` seconds."""

    rank: int
    size: int

    def allgather(self, data: bytes, timeout: float) -> list[bytes]:
        """Every rank's bytes, by rank. Lengths may differ."""
        ...

    def barrier(self, timeout: float) -> None: ...


class SingleProcess:
    """A communicator of one rank."""

    rank = 0
    size = 1

    def allgather(self, data: bytes, timeout: float) -> list[bytes]:
        return [bytes(data)]

    def barrier(self, timeout: float) -> None:
        return None


def _check_part(length: int, rank: int) -> None:
    if not 0 <= length <= MAX_PART_BYTES:
        raise BootstrapError(f"a part of {length} bytes in a bootstrap exchange: {MAX_PART_BYTES} at most", peer=rank)


class TorchStoreBootstrap:
    """Over a torch.distributed store (TCPStore, FileStore, HashStore, PrefixStore).

    A store knows nothing of who is alive: a dead rank is noticed at the timeout. Bootstraps over one store are told
    apart by `name` and by how many of that name a rank has made before.
    """

    def __init__(self, store: Any, rank: int, size: int, name: str = "default") -> None:
        self.rank, self.size = rank, size
        self._store = store
        instance = store.add(f"uccl_ep/{name}/made/{rank}", 1)
        self._prefix = f"uccl_ep/{name}/{instance}"
        self._sequence = 0

    def allgather(self, data: bytes, timeout: float) -> list[bytes]:
        _check_part(len(data), self.rank)
        sequence, self._sequence = self._sequence, self._sequence + 1
        deadline = time.monotonic() + timeout
        # A byte in front: some stores have no empty values.
        self._store.set(self._key(sequence, self.rank), b"\0" + bytes(data))
        parts = []
        for rank in range(self.size):
            key = self._key(sequence, rank)
            left = timedelta(seconds=max(deadline - time.monotonic(), 1e-3))
            try:
                self._store.wait([key], left)
            except RuntimeError as error:
                raise DeadlineExceeded(
                    f"bootstrap over the store: nothing from rank {rank} after {timeout:g} s ({error})",
                    rank=self.rank,
                    peer=rank,
                ) from error
            part = bytes(self._store.get(key))[1:]
            _check_part(len(part), rank)
            parts.append(part)
        # Everybody who is at `sequence` has read all of `sequence - 1`, so nobody reads what came before that.
        if sequence >= 2:
            self._delete(self._key(sequence - 2, self.rank))
        return parts

    def barrier(self, timeout: float) -> None:
        self.allgather(b"", timeout)

    def _key(self, sequence: int, rank: int) -> str:
        return f"{self._prefix}/{sequence}/{rank}"

    def _delete(self, key: str) -> None:
        try:
            self._store.delete_key(key)
        except (RuntimeError, NotImplementedError):
            # A store that cannot delete only keeps a few hundred bytes more.
            return


class TorchGroupBootstrap:
    """Over a torch.distributed process group, by all_gather of byte tensors on the device that its backend wants."""

    def __init__(self, group: Any = None) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._group = torch, dist, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise BootstrapError("this process is not in the torch process group")
        nccl = "nccl" in str(dist.get_backend(group))
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def allgather(self, data: bytes, timeout: float) -> list[bytes]:
        torch = self._torch
        _check_part(len(data), self.rank)
        deadline = time.monotonic() + timeout
        mine = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        lengths = [int(length.item()) for length in self._gather(mine, deadline)]
        for rank, length in enumerate(lengths):
            _check_part(length, rank)
        if not any(lengths):
            return [b""] * self.size
        padded = bytearray(data.ljust(max(lengths), b"\0"))
        part = torch.frombuffer(padded, dtype=torch.uint8).to(self._device)
        gathered = self._gather(part, deadline)
        return [bytes(one.cpu().numpy().tobytes()[:length]) for one, length in zip(gathered, lengths, strict=True)]

    def barrier(self, timeout: float) -> None:
        self.allgather(b"", timeout)

    def _gather(self, mine: Any, deadline: float) -> list[Any]:
        out = [self._torch.empty_like(mine) for _ in range(self.size)]
        try:
            work = self._dist.all_gather(out, mine, group=self._group, async_op=True)
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))
            if self._device.type == "cuda":
                self._torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            kind = DeadlineExceeded if time.monotonic() >= deadline else BootstrapError
            raise kind(f"bootstrap over the process group: {error}", rank=self.rank) from error
        return out


class MpiBootstrap:
    """Over an mpi4py communicator, by buffers (Iallgather, Iallgatherv). The communicator is duplicated."""

    def __init__(self, comm: Any = None) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def allgather(self, data: bytes, timeout: float) -> list[bytes]:
        from array import array

        _check_part(len(data), self.rank)
        deadline = time.monotonic() + timeout
        mine, lengths = array("q", [len(data)]), array("q", bytes(8 * self.size))
        self._finish(self._comm.Iallgather(mine, lengths), timeout, deadline)
        for rank, length in enumerate(lengths):
            _check_part(length, rank)
        gathered = bytearray(sum(lengths))
        request = self._comm.Iallgatherv(bytearray(data), [gathered, list(lengths), self._mpi.BYTE])
        self._finish(request, timeout, deadline)
        ends = [sum(lengths[: rank + 1]) for rank in range(self.size)]
        return [bytes(gathered[end - length : end]) for end, length in zip(ends, lengths, strict=True)]

    def barrier(self, timeout: float) -> None:
        self._finish(self._comm.Ibarrier(), timeout, time.monotonic() + timeout)

    def _finish(self, request: Any, timeout: float, deadline: float) -> None:
        # MPI has no wait with a deadline: test, and let the other ranks of this machine run in between.
        while not request.Test():
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"bootstrap over MPI: a rank has not come after {timeout:g} s", rank=self.rank)
            time.sleep(1e-4)
