# SPDX-License-Identifier: Apache-2.0
"""Report files: whole or not there. A run that is interrupted leaves no half of one, and keeps the one of before."""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from pathlib import Path

# The folder takes no new file, or the file is a mount point: then it can only be written in place.
_IN_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


def check_writable(path: Path) -> None:
    """Raises OSError now, and not after minutes of work. Changes nothing."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.is_file():
        with open(path, "ab"):
            pass
    elif not path.exists():
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass


def write(path: Path, data: bytes) -> None:
    if path.exists() and not path.is_file():  # a device or a pipe, which a rename would replace
        path.write_bytes(data)
        return
    path = path.resolve()  # a link stays one
    beside = path.parent / f".uccl_ep-{secrets.token_hex(8)}.tmp"
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
            if path.exists():
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            file.write(data)
        beside.replace(path)
    except OSError as error:
        if error.errno not in _IN_PLACE:
            raise
        path.write_bytes(data)
    finally:
        beside.unlink(missing_ok=True)
