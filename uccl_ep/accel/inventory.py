# SPDX-License-Identifier: Apache-2.0
"""Which GPUs are here, as their drivers describe them: what the communicator will find (accelerator.h), without opening
any, and without a package of a vendor."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .. import _apart, errors

_PROBE_SECONDS = 60.0  # a driver that wakes its GPUs first takes a while
_MOST = 1024
ORDERINGS = ("unordered", "ordered", "ordered_all")


@dataclass(frozen=True)
class Gpu:
    """uccl_ep_gpu_info."""

    index: int
    name: str
    architecture: str
    address: str
    driver: str
    unusable: str  # not empty: why
    numa_node: int | None
    warp_size: int
    multiprocessors: int
    memory_bytes: int
    clock_hz: int
    writes_ordering: str  # of ORDERINGS
    can_flush: bool
    dmabuf: bool
    ipc: bool
    host_atomics: bool


@dataclass(frozen=True)
class Probed:
    gpus: Sequence[Gpu]
    problem: str  # why there is none


def probe(library: str | os.PathLike[str]) -> Probed:
    """Ask a driver, in this process."""
    from .._native import OK, ffi, text

    entry = ctypes.CDLL(os.fspath(library)).uccl_ep_accelerator_entry
    entry.restype = ctypes.c_void_p
    table = ffi.cast("const uccl_ep_accelerator *", entry())
    gpus: list[Gpu] = []
    for index in range(_MOST):
        info = ffi.new("uccl_ep_gpu_info *")
        info.size = ffi.sizeof("uccl_ep_gpu_info")
        if table.query(index, info) != OK:
            break
        gpus.append(
            Gpu(
                index=index,
                name=text(info.name),
                architecture=text(info.architecture),
                address=text(info.address),
                driver=text(info.driver),
                unusable=text(info.unusable),
                numa_node=None if info.numa_node < 0 else info.numa_node,
                warp_size=info.warp_size,
                multiprocessors=info.multiprocessors,
                memory_bytes=info.memory_bytes,
                clock_hz=info.clock_hz,
                writes_ordering=ORDERINGS[info.writes_ordering],
                can_flush=bool(info.can_flush),
                dmabuf=bool(info.dmabuf),
                ipc=bool(info.ipc),
                host_atomics=bool(info.host_atomics),
            )
        )
    return Probed(gpus, "" if gpus else text(table.error_text()))


def probe_json(library: str) -> str:
    return json.dumps(asdict(probe(library)))


def probe_apart(library: str | os.PathLike[str]) -> Probed:
    """The same in a process of its own: a driver that crashes or hangs must not hide the others."""
    try:
        answer = _apart.ask(__name__, "probe_json", library, _PROBE_SECONDS)
    except errors.BackendFault as error:
        return Probed([], error.record.text or str(error))
    return Probed([Gpu(**gpu) for gpu in answer["gpus"]], answer["problem"])
