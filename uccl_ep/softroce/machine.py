# SPDX-License-Identifier: Apache-2.0
"""What a guest needs of the machine, and how to get what is missing.

The guest sees the machine's files, so that the RDMA library and tools are looked for here, and run there.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import _fetched
from .._fetched import Missing

# Where Debian and others keep what only root runs; a user's PATH may lack them.
_SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")
_PROVIDERS = ("/usr/lib/*/libibverbs", "/usr/lib64/libibverbs", "/usr/lib/libibverbs")
_PT_INTERP = 3


@dataclass(frozen=True)
class Machine:
    qemu: Path
    busybox: Path


def program(name: str) -> Path | None:
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *_SBIN]))
    return Path(found).resolve() if found else None


def _is_static(path: Path) -> bool:
    """Whether an ELF program of 64 bits names no loader: in the initial file system there is none."""
    with open(path, "rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:5] != b"\x7fELF\x02":
            return False
        table, size = int.from_bytes(head[32:40], "little"), int.from_bytes(head[54:56], "little")
        for index in range(int.from_bytes(head[56:58], "little")):
            file.seek(table + index * size)
            if int.from_bytes(file.read(4), "little") == _PT_INTERP:
                return False
    return True


def _lacking() -> Iterator[tuple[str, str, str]]:
    """(what, for what, Debian's package)"""
    if program("qemu-system-x86_64") is None:
        yield "qemu-system-x86_64", "the machine that boots the guest", "qemu-system-x86"
    busybox = program("busybox")
    if busybox is None or not _is_static(busybox):
        yield "a statically linked busybox", "the guest's first program", "busybox-static"
    if not any(list(Path("/").glob(f"{folder[1:]}/librxe-*.so")) for folder in _PROVIDERS):
        yield "libibverbs' provider for rxe", "the guest's RDMA devices", "ibverbs-providers"
    if any(program(name) is None for name in ("ip", "tc", "rdma")):
        yield "ip, tc and rdma", "the wire between them", "iproute2"


def find() -> Machine:
    """Raises Missing, which names all that is."""
    if platform.machine() != "x86_64":
        raise Missing(f"Soft-RoCE guests are for x86-64 machines, and this one is {platform.machine()}")
    lacking = list(_lacking())
    if lacking:
        what = "; ".join(f"{name} ({purpose})" for name, purpose, _ in lacking)
        packages = " ".join(package for _, _, package in lacking)
        raise Missing(f"not found: {what}. On Debian and Ubuntu: apt-get install {packages}")
    qemu, busybox = program("qemu-system-x86_64"), program("busybox")
    assert qemu is not None
    assert busybox is not None
    return Machine(qemu, busybox)


def cache_folder() -> Path:
    return _fetched.cache_folder("softroce", "the guest's kernel")
