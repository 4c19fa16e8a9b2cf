# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk, one file each, named by the hash of all that went into it.

Where: $UCCL_EP_CACHE_DIR, else the user's cache folder; an empty UCCL_EP_CACHE_DIR turns it off. What is stored runs in
this process, so the folder must be this user's alone (0700): another one is left aside. A cache never makes anything
fail: what cannot be read is compiled again, and what cannot be written is not kept (a warning in the log says so).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
from pathlib import Path

LIMIT_BYTES = 256 << 20

_log = logging.getLogger("uccl_ep.accel")
# Of what follows the content. Behind it, so that an entry that was cut short never looks whole.
_MAGIC = b"uccl_ep kernel 1"
_SUFFIX = ".kernel"
_DIGEST = hashlib.sha256


def key(*parts: str | bytes) -> str:
    """Of everything that decides what comes out; no two lists of parts have the same."""
    digest = _DIGEST()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def default() -> Cache | None:
    folder = os.environ.get("UCCL_EP_CACHE_DIR")
    if folder == "":
        return None
    if folder is None:
        from platformdirs import user_cache_dir

        folder = user_cache_dir("uccl_ep", appauthor=False)
    return Cache(Path(folder) / "kernels")


class Cache:
    """Entries in `folder`; above `limit` bytes the longest unused go. Any number of processes may share it."""

    def __init__(self, folder: Path, limit: int = LIMIT_BYTES) -> None:
        self.folder, self.limit = folder, limit

    def get(self, name: str) -> bytes | None:
        path = self._path(name)
        try:
            self._check()
            data = path.read_bytes()
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                _log.warning("the cache of kernels is not used: %s", error)
            return None
        trailer = len(_MAGIC) + _DIGEST().digest_size
        content, digest = data[:-trailer], data[-trailer : -len(_MAGIC)]
        if not data.endswith(_MAGIC) or _DIGEST(content).digest() != digest:
            _log.warning("%s is damaged: compiling again", path)
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):  # evicted by another process meanwhile
            os.utime(path)
        return content

    def put(self, name: str, content: bytes) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check()
            # Renamed into place when it is whole: a reader finds all of it or nothing.
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as file:
                try:
                    file.write(content + _DIGEST(content).digest() + _MAGIC)
                    file.flush()
                    os.replace(file.name, self._path(name))
                except OSError:
                    os.unlink(file.name)
                    raise
            self._evict()
        except OSError as error:
            _log.warning("a compiled kernel is not kept: %s", error)

    def _path(self, name: str) -> Path:
        return self.folder / (name + _SUFFIX)

    def _check(self) -> None:
        found = os.lstat(self.folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{self.folder} is not a folder of this user alone: chmod 700, or remove it")

    def _evict(self) -> None:
        entries = []
        for path in self.folder.iterdir():
            if path.suffix not in (_SUFFIX, ".part"):
                continue
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                entries.append((found.st_mtime_ns, found.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.limit:
                break
            # What another process is writing has just been touched, so it comes last; if it does go, its rename fails
            # and it keeps what it compiled for itself.
            path.unlink(missing_ok=True)
            total -= size
