# SPDX-License-Identifier: Apache-2.0
"""What works on this machine, what is missing, and what to do.

Facts come from /proc, /sys and the kernel, not from tools that may not be installed; what cannot be read is "unknown",
never a guess. Backends add checks of their own.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from . import backends, errors

Level = Literal["ok", "info", "warning", "error", "unknown"]


@dataclass(frozen=True)
class Check:
    """`warning`: works with less. `error`: does not work. `info`: a fact, neither good nor bad."""

    name: str
    level: Level
    found: str
    advice: str = ""


def bytes_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def read_text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


_CAP_IPC_LOCK = 14


def _exempt_from_memory_lock() -> bool:
    status = read_text("/proc/self/status") or ""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return bool(int(fields.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1)


def memory_lock() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("locked memory", "ok", "unlimited")
    if _exempt_from_memory_lock():
        return Check("locked memory", "ok", f"the limit of {bytes_text(soft)} does not apply (CAP_IPC_LOCK)")
    limit = "unlimited" if hard == resource.RLIM_INFINITY else bytes_text(hard)
    advice = "lock_memory=True and most NICs need more than that: raise `ulimit -l` (or memlock of the container)"
    level: Level = "warning" if soft < 64 << 20 else "ok"
    return Check(
        "locked memory", level, f"{bytes_text(soft)} (may be raised to {limit})", advice if level != "ok" else ""
    )


def huge_pages() -> Check:
    text = read_text("/proc/meminfo")
    fields = dict(line.split(":", 1) for line in text.splitlines()) if text else {}
    free = fields.get("HugePages_Free")
    if free is None:
        return Check("huge pages", "unknown", "/proc/meminfo does not say")
    size = fields.get("Hugepagesize", "?").strip()
    advice = "" if int(free) else "none reserved; the heap then uses normal pages (sysctl vm.nr_hugepages to reserve)"
    return Check("huge pages", "info", f"{int(free)} free of {size}", advice)


def processors() -> Check:
    allowed = len(os.sched_getaffinity(0))
    quota = read_text("/sys/fs/cgroup/cpu.max")
    found = f"{allowed} of {os.cpu_count()} usable"
    if quota and not quota.startswith("max"):
        limit, period = (int(field) for field in quota.split())
        found += f", limited to {limit / period:g} by the control group"
    advice = "a proxy thread and the program share one core: latency suffers" if allowed < 2 else ""
    return Check("processors", "warning" if advice else "ok", found, advice)


def optional_packages() -> Check:
    found = [f"{name}: {'there' if find_spec(name) else 'not installed'}" for name in ("torch", "mpi4py", "pyverbs")]
    return Check("optional packages", "info", "; ".join(found))


def library() -> Check:
    from . import _native, paths
    from ._native import lib

    abi = lib.uccl_ep_backend_abi()
    version = _native.text(lib.uccl_ep_version())
    return Check("library", "ok", f"{version}, backend interface {abi >> 16}.{abi & 0xFFFF}, {paths.core_library()}")


def backend_checks(backend: backends.Backend) -> Iterator[Check]:
    try:
        probed = backends.probe_apart(backend.library)
    except errors.UcclEpError as error:
        yield Check(f"backend {backend.name}", "error", error.record.text or error.name, error.advice)
        return
    mine = [device for device in probed.devices if backend.owns(device)]
    usable = [device for device in mine if not device.unusable]
    found = f"{probed.name} {probed.version}, {len(usable)} usable of {len(mine)} devices"
    # Most machines have no NIC of most vendors.
    level: Level = "ok" if usable else "warning" if mine else "info"
    yield Check(f"backend {backend.name}", level, found)
    for device in mine:
        if device.unusable:
            yield Check(f"{backend.name} on {device.name}", "warning", "cannot be used", device.unusable)
    if backend.module is not None:
        yield from backend.module.doctor()


@dataclass(frozen=True)
class Examination:
    checks: Sequence[Check]
    gpus: Sequence[dict[str, object]]  # as their drivers describe them, by kind


def examine() -> Examination:
    """All checks; none raises."""
    from . import _gpu_checks, _rdma_checks

    system = Check(
        "system", "ok", f"{platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}"
    )
    if sys.platform != "linux":
        system = Check("system", "error", sys.platform, "uccl_ep runs on Linux")
    checks = [system, library(), processors(), memory_lock(), huge_pages()]
    gpus = _gpu_checks.look()
    checks += [*_gpu_checks.checks(gpus), *_rdma_checks.checks(), optional_packages()]
    for name in backends.names():
        try:
            checks += backend_checks(backends.find(name))
        except errors.MissingPackage as error:  # was left out when this installation was built
            checks.append(Check(f"backend {name}", "info", "not in this installation", error.record.text))
        except errors.UcclEpError as error:
            checks.append(Check(f"backend {name}", "error", error.record.text, error.advice))
    return Examination(checks, _gpu_checks.as_json(gpus))
