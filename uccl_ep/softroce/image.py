# SPDX-License-Identifier: Apache-2.0
"""What QEMU boots: the kernel, uncompressed where it can be, and an initial file system: init.sh, busybox, modules.

Kept in the cache, named by the kernel's version and the hash of all that went in. What was damaged there is made again.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
import struct
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .. import _fetched
from .._fetched import Missing
from . import kernel
from .machine import Machine

_INIT = Path(__file__).with_name("init.sh")
_KEPT = 3  # images; the longest unused go


@dataclass(frozen=True)
class Image:
    version: str  # of the kernel
    kernel: Path
    files: Path


def uncompressed(bz: bytes) -> bytes:
    """The ELF kernel inside a bzImage, which QEMU boots by PVH: uncompressing it emulated costs seconds. A compression
    that is not known here leaves it to the kernel. (Linux, Documentation/arch/x86/boot.rst: setup_sects at 0x1f1,
    payload_offset and payload_length at 0x248; behind a payload its uncompressed length.)"""
    if bz[0x202:0x206] < b"HdrS" or len(bz) < 0x250:
        return bz
    offset, length = struct.unpack_from("<II", bz, 0x248)
    payload = bz[(bz[0x1F1] + 1) * 512 + offset :][:length]
    try:
        if payload.startswith(b"\xfd7zXZ\0"):
            elf = lzma.LZMADecompressor().decompress(payload)
        elif payload.startswith(b"\x28\xb5\x2f\xfd"):
            elf = kernel.unzstd(payload[:-4], "the kernel")
        else:
            return bz
    except (lzma.LZMAError, Missing):
        return bz
    return elf if elf.startswith(b"\x7fELF") else bz


def archive(entries: Iterable[tuple[str, int, bytes]]) -> bytes:
    """A cpio archive as the kernel reads it (Linux, Documentation/driver-api/early-userspace/buffer-format.rst), of
    (name, mode, content)."""
    out = bytearray()
    for number, (name, mode, content) in enumerate((*entries, ("TRAILER!!!", 0, b"")), 1):
        path = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0)
        out += b"070701" + b"".join(b"%08X" % field for field in fields) + path
        out += bytes(-len(out) % 4)
        out += content
        out += bytes(-len(out) % 4)
    return bytes(out)


def _files(machine: Machine, modules: list[tuple[str, bytes]]) -> bytes:
    folders = ("bin", "m", "dev", "proc", "sys", "lower", "upper", "root")
    return archive(
        [
            *((name, 0o040755, b"") for name in folders),
            ("init", 0o100755, _INIT.read_bytes()),
            ("bin/busybox", 0o100755, machine.busybox.read_bytes()),
            ("order", 0o100644, "".join(f"{name}\n" for name, _ in modules).encode()),
            *((f"m/{name}", 0o100644, content) for name, content in modules),
        ]
    )


def prepare(machine: Machine, cache: Path) -> Image:
    """The image of this machine's kernel, made now unless it is there. Raises Missing."""
    found = kernel.find(cache)
    modules = [(path.name.partition(".ko")[0] + ".ko", kernel.module_bytes(path)) for path in found.modules]
    files = _files(machine, modules)
    compressed = found.image.read_bytes()
    name = f"image-{found.version}-{hashlib.sha256(hashlib.sha256(compressed).digest() + files).hexdigest()[:16]}"
    folder = cache / name
    if not _whole(folder):
        with _fetched.locked(cache):
            if not _whole(folder):
                _make(folder, uncompressed(compressed), files)
            _prune(cache, folder)
    return Image(found.version, folder / "kernel", folder / "files")


def _whole(folder: Path) -> bool:
    try:
        digests = json.loads((folder / "digests.json").read_text())
        return set(digests) == {"kernel", "files"} and all(
            _fetched.digest(folder / name) == value for name, value in digests.items()
        )
    except (OSError, ValueError, TypeError):
        return False


def _make(folder: Path, elf: bytes, files: bytes) -> None:
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
    try:
        (partial / "kernel").write_bytes(elf)
        (partial / "files").write_bytes(files)
        digests = {name: _fetched.digest(partial / name) for name in ("kernel", "files")}
        (partial / "digests.json").write_text(json.dumps(digests))
        _fetched.place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _prune(cache: Path, current: Path) -> None:
    others = sorted((path for path in cache.glob("image-*") if path != current), key=lambda path: path.stat().st_mtime)
    for path in others[: max(0, len(others) - (_KEPT - 1))]:
        shutil.rmtree(path, ignore_errors=True)
