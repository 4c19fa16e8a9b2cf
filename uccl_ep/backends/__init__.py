# SPDX-License-Identifier: Apache-2.0
"""Which NICs this installation can drive: the entry-point group `uccl_ep.backends`, or any shared library by its path.

A package that brings a backend names a module in that group. The module has `SUMMARY`, one line; `library()`, the path
of the shared library; and `doctor()`, its checks of this machine (see uccl_ep.doctor). It must import without its NIC.
Where a library lists NICs that are another backend's, the module also has `owns(name)`: is this one for it? None: the
kernel does not know it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from .. import _apart, errors

if TYPE_CHECKING:
    from ..doctor import Check
    from ..info import BackendInfo, DeviceInfo

GROUP = "uccl_ep.backends"
_PROBE_SECONDS = 20.0


class BackendModule(Protocol):
    SUMMARY: str

    def library(self) -> Path: ...

    def doctor(self) -> Sequence[Check]: ...


@dataclass(frozen=True)
class Backend:
    name: str  # of the entry point, or of the file
    library: Path
    summary: str = ""
    module: BackendModule | None = None  # None: given by path

    def owns(self, device: DeviceInfo) -> bool:
        """Is this NIC one of those that the backend is for? All are, unless its module knows better."""
        owns = getattr(self.module, "owns", None)
        return owns is None or not device.unusable or owns(device.name) is not False


@functools.cache
def _registered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def names() -> list[str]:
    return sorted(_registered())


def find(spec: str | os.PathLike[str]) -> Backend:
    """By name, or by path: a Path, or a text with a slash or ending in .so."""
    text = os.fspath(spec)
    if not isinstance(spec, str) or os.sep in text or text.endswith(".so"):
        path = Path(text).absolute()
        if not path.is_file():
            raise errors.NotABackend(f"no such file: {path}")
        return Backend(path.name, path)
    entry = _registered().get(text)
    if entry is None:
        raise errors.NotABackend(
            f"no backend named {text!r}; {errors.nearest(text, names())} (or give the path of a shared library)"
        )
    try:
        module = cast(BackendModule, entry.load())
        return Backend(text, module.library(), module.SUMMARY, module)
    except errors.UcclEpError:
        raise
    except Exception as error:
        raise errors.NotABackend(f"backend {text!r} ({entry.value}) cannot be loaded: {error}") from error


def owners(device: str) -> list[str]:
    """The installed backends that claim this RDMA device."""
    found = []
    for name, entry in sorted(_registered().items()):
        with contextlib.suppress(Exception):  # one that does not import says so elsewhere
            owns = getattr(entry.load(), "owns", None)
            if owns is not None and owns(device) is True:
                found.append(name)
    return found


def probe(library: str | os.PathLike[str]) -> BackendInfo:
    """Ask a library who it is and which NICs it sees, in this process."""
    from .. import _native, info
    from .._native import ffi, lib

    name, version = ffi.new("char[64]"), ffi.new("char[64]")
    room = 0
    while True:
        devices = ffi.new("uccl_ep_device_info[]", max(room, 1))
        for device in devices:
            device.size = ffi.sizeof("uccl_ep_device_info")
        count = ffi.new("uint32_t *", room)
        status = lib.uccl_ep_backend_probe(os.fsencode(library), name, version, devices, count)
        if status < 0:
            raise info.last_error(status)
        if count[0] <= room:
            break
        room = count[0]
    found = tuple(info.device_from(devices[index]) for index in range(count[0]))
    return info.BackendInfo(_native.text(name), _native.text(version), Path(library), found)


def probe_apart(library: str | os.PathLike[str]) -> BackendInfo:
    """The same in a process of its own: a library that crashes or hangs must not hide the others."""
    from .. import info

    answer = _apart.ask(__name__, "probe_json", library, _PROBE_SECONDS)
    if "error" in answer:
        raise errors.from_record(errors.ErrorRecord(**answer["error"]))
    devices = tuple(info.DeviceInfo(**{**device, "caps": info.Caps(**device["caps"])}) for device in answer["devices"])
    return info.BackendInfo(answer["name"], answer["version"], Path(library), devices)


def probe_json(library: str) -> str:
    """What the other process of probe_apart prints."""
    try:
        found = probe(library)
    except errors.UcclEpError as error:
        return json.dumps({"error": asdict(error.record)})
    return json.dumps({"name": found.name, "version": found.version, "devices": [asdict(one) for one in found.devices]})
