# SPDX-License-Identifier: Apache-2.0
"""Under what conditions figures were taken. What cannot be read is "unknown", never a guess."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any


def conditions() -> dict[str, Any]:
    from .. import __version__

    return {
        "version": __version__,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "load_average": os.getloadavg()[0],
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "hypervisor": "yes" if " hypervisor " in f" {_field('flags')} " else "none seen",
        "clock": f"CLOCK_MONOTONIC ({_read('/sys/devices/system/clocksource/clocksource0/current_clocksource')})",
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def _field(name: str) -> str:
    """Of the first CPU in /proc/cpuinfo."""
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _cpu() -> str:
    """x86 names its models; aarch64 gives numbers."""
    name = _field("model name")
    if name != "unknown":
        return f"{name}, family {_field('cpu family')} model {_field('model')}"
    return f"implementer {_field('CPU implementer')} part {_field('CPU part')}"
