# SPDX-License-Identifier: Apache-2.0
"""What is fetched from the distribution, or made of that, and kept: in a folder of this user alone, and whole."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_FETCH_SECONDS = 600.0
_LOCK_SECONDS = 900.0


class Missing(Exception):
    """The machine lacks something. One line, with the command that mends it."""


def cache_folder(part: str, purpose: str) -> Path:
    """Of this user alone: what lies there is run with the user's files in sight."""
    folder = os.environ.get("UCCL_EP_CACHE_DIR")
    if folder == "":
        raise Missing(f"UCCL_EP_CACHE_DIR is empty, and {purpose} needs a folder: unset it, or name one")
    if folder is None:
        from platformdirs import user_cache_dir

        folder = user_cache_dir("uccl_ep", appauthor=False)
    path = Path(folder).absolute() / part
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(path)
    except OSError as error:
        raise Missing(f"{path}, for {purpose}: {error.strerror}; UCCL_EP_CACHE_DIR names another place") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise Missing(f"{path} is not a folder of this user alone: chmod 700, or remove it")
    return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def locked(cache: Path, seconds: float = _LOCK_SECONDS) -> Iterator[None]:
    """One process at a time writes there; what one that died left half done goes."""
    with open(os.open(cache / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "rb") as lock:
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise Missing(f"{cache} is in use by another process for more than {seconds:g} s: end it") from None
                time.sleep(0.1)
        for path in cache.glob("partial-*"):
            shutil.rmtree(path, ignore_errors=True)
        yield


@contextmanager
def making(cache: Path, name: str) -> Iterator[Path]:
    """A folder to make something in, and to rename: it goes otherwise. Any number of processes at a time. What one that
    died left half done goes first; what is being made stays, since its maker holds a lock on it."""
    for path in cache.glob(f"{name}-partial-*"):
        with suppress(OSError), _held(path):
            shutil.rmtree(path, ignore_errors=True)
    while True:
        made = Path(tempfile.mkdtemp(prefix=f"{name}-partial-", dir=cache))
        with suppress(FileNotFoundError, BlockingIOError), ExitStack() as held:
            held.enter_context(_held(made))
            if made.exists():  # another process may have taken it for one of a dead one's, before it was locked
                held = held.pop_all()
                break
    with held:
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Its lock, which ends with the process at the latest. BlockingIOError: another has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def place(partial: Path, final: Path) -> None:
    """A folder that is whole takes its name; a damaged one of that name goes."""
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)


def run(command: list[str], folder: Path, remedy: str, shown: Callable[[str], str] = str) -> str:
    """What it printed. `shown`: of an error, what may be told."""
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_FETCH_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Missing(f"{' '.join(command)} did not end within {_FETCH_SECONDS:g} s") from None
    except OSError as error:
        raise Missing(f"{command[0]}: {error.strerror} (try: {remedy})") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith(("E:", "dpkg"))] or [done.stderr.strip()]
        raise Missing(shown(f"{' '.join(command)}: {errors[0]} (try: {remedy})"))
    return done.stdout
