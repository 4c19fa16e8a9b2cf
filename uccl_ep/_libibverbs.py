# SPDX-License-Identifier: Apache-2.0
"""What libibverbs itself says: whether it is there, what it can, which devices its providers drive.

Asked in a process of its own (see _apart): a provider that crashes must not take the doctor with it. Where pyverbs is
installed (extra `verbs`) it also tells the devices' attributes.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import _apart, errors

_SECONDS = 20.0
_NEEDED = ("ibv_get_device_list", "ibv_open_device", "ibv_reg_mr", "ibv_create_qp", "ibv_modify_qp")
# What it is for | the release of rdma-core that brought it
_NEWER = {
    "_ibv_query_gid_ex": ("RoCE", 32),
    "ibv_reg_mr_iova2": ("relaxed ordering", 28),
    "ibv_reg_dmabuf_mr": ("dmabuf: device memory without a peer-memory module", 34),
}
_ATTRIBUTES = (
    "vendor_id", "vendor_part_id", "hw_ver", "max_mr_size", "max_qp", "max_qp_wr", "max_sge", "max_cq", "max_cqe",
    "max_mr", "max_qp_rd_atom", "max_qp_init_rd_atom", "max_res_rd_atom", "max_srq", "max_srq_wr", "atomic_caps",
    "phys_port_cnt",
)  # fmt: skip


@dataclass(frozen=True)
class Library:
    problem: str = ""  # not empty: it cannot be used, and why
    path: str = ""
    rdma_core: int | None = None  # release, from the file's name
    lacks: tuple[str, ...] = ()  # "dmabuf: ...: rdma-core 34"
    devices: tuple[str, ...] | None = ()  # None: it cannot list them, as on a machine without RDMA
    providers: tuple[str, ...] | None = None  # "mlx5"; None: not where they are looked for
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)  # by device; pyverbs alone tells


def name() -> str:
    """As the backends look for it."""
    return os.environ.get("UCCL_EP_LIBIBVERBS") or "libibverbs.so.1"


@functools.cache
def look(library: str) -> Library:
    try:
        answer = _apart.ask(__name__, "look_json", library, _SECONDS)
    except errors.UcclEpError as error:
        return Library(problem=error.record.text)
    tuples = {key: tuple(value) for key, value in answer.items() if isinstance(value, list)}
    return Library(**{**answer, **tuples})


def look_json(library: str) -> str:
    """What the other process of look() prints."""
    return json.dumps(asdict(_look(library)))


def _look(library: str) -> Library:
    try:
        loaded = ctypes.CDLL(library)
    except OSError as error:
        return Library(problem=f"{error}: install rdma-core (Debian: libibverbs1 ibverbs-providers)")
    path = _path_of(loaded)
    missing = [symbol for symbol in _NEEDED if not hasattr(loaded, symbol)]
    if missing:
        why = f"it lacks {', '.join(missing)}: it is no libibverbs, or too old: rdma-core 32 or newer is needed"
        return Library(problem=why, path=path)
    lacks = tuple(
        f"{what}: rdma-core {since}" for symbol, (what, since) in _NEWER.items() if not hasattr(loaded, symbol)
    )
    names = _devices(loaded)
    release = re.search(r"\.so\.1\.\d+\.(\d+)\.", os.path.basename(path))
    return Library(
        path=path,
        rdma_core=int(release[1]) if release else None,
        lacks=lacks,
        devices=names,
        providers=_providers(Path(path)),
        attributes={} if os.environ.get("UCCL_EP_LIBIBVERBS") else _attributes(names or ()),
    )


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("path", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("at", ctypes.c_void_p),
    )


def _path_of(loaded: Any) -> str:
    """Where the loader found it, symbolic links followed."""
    about = _DlInfo()
    symbol = ctypes.cast(getattr(loaded, "ibv_get_device_list", None) or loaded._handle, ctypes.c_void_p)
    if ctypes.CDLL(None).dladdr(symbol, ctypes.byref(about)) and about.path:
        return os.path.realpath(os.fsdecode(about.path))
    return str(loaded._name)


def _devices(loaded: Any) -> tuple[str, ...] | None:
    loaded.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    loaded.ibv_get_device_name.restype = ctypes.c_char_p
    count = ctypes.c_int()
    found = loaded.ibv_get_device_list(ctypes.byref(count))
    if not found:
        return None
    names = tuple(os.fsdecode(loaded.ibv_get_device_name(ctypes.c_void_p(found[i]))) for i in range(count.value))
    loaded.ibv_free_device_list(found)
    return names


def _providers(library: Path) -> tuple[str, ...] | None:
    """Names of the vendors' parts beside it. None: this build keeps them elsewhere, or within itself."""
    matches = (re.match(r"lib(\w+)-rdmav\d+\.so$", entry.name) for entry in library.parent.glob("libibverbs/*.so"))
    return tuple(sorted({match[1] for match in matches if match})) or None


def _attributes(names: tuple[str, ...]) -> dict[str, dict[str, int]]:
    try:
        from pyverbs.device import Context
    except Exception:  # not installed, or made for another libibverbs: then nothing is known, and nothing is wrong
        return {}
    found: dict[str, dict[str, int]] = {}
    for device in names:
        try:
            with Context(name=device) as context:
                told = context.query_device()
        except Exception:  # may not be opened: the backends say why
            continue
        found[device] = {key: int(getattr(told, key)) for key in _ATTRIBUTES if hasattr(told, key)}
    return found
