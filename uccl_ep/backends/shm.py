# SPDX-License-Identifier: Apache-2.0
"""Shared memory: ranks are processes of one machine. Built in; needs no NIC."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from .. import paths
from ..doctor import Check, bytes_text

SUMMARY = "shared memory between processes of one machine"

# memory, signals and mailbox of a rank, and a socket and a process descriptor for each peer
_DESCRIPTORS_OF_EIGHT_RANKS = 64


def library() -> Path:
    return paths.library_dir() / "libuccl_ep_backend_shm.so"


def doctor() -> Iterator[Check]:
    yield _memory_files()
    yield _death_notice()
    yield _descriptors()
    yield _memory()


def _memory_files() -> Check:
    """Heaps live in nameless files of the kernel's; a sandbox may refuse the call."""
    try:
        descriptor = os.memfd_create("uccl_ep-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return Check("shm: memfd_create", "error", str(error), "the sandbox must allow memfd_create (Linux 3.17)")
    os.close(descriptor)
    return Check("shm: memfd_create", "ok", "allowed")


def _death_notice() -> Check:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        advice = "a dead peer is noticed a little later, by asking for it (Linux 5.3 has pidfd_open)"
        return Check("shm: pidfd_open", "warning", str(error), advice)
    return Check("shm: pidfd_open", "ok", "allowed")


def _descriptors() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft < _DESCRIPTORS_OF_EIGHT_RANKS
    advice = "raise `ulimit -n`: a rank needs two descriptors a peer" if few else ""
    return Check("shm: open files", "warning" if few else "ok", f"{soft} allowed", advice)


def _memory() -> Check:
    """The kernel grants a heap when it is first written, not when it is made: what is left matters."""
    left = []
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        left.append(limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                left.append(int(line.split()[1]) * 1024)
    if not left:
        return Check("shm: memory", "unknown", "neither /proc/meminfo nor the control group says what is left")
    return Check("shm: memory", "info", f"{bytes_text(min(left))} left for all heaps together")
