# SPDX-License-Identifier: Apache-2.0
"""`uccl-ep perf gpu`: from what was typed to a plan, and the device and conditions that its figures belong to."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from .. import accel as accelerators
from ..cli.common import pick
from . import gpu
from .drain import cpus_for
from .proxy import Say

_MOST_PRODUCERS = 4096


def measure(
    say: Say, *, accel: str, device: int, forms: str, producers: str, rings: int, threads: int, seconds: float,
    repeats: int, commands: int, against: Path | None, against_runs: int,
) -> dict[str, Any]:  # fmt: skip
    pick(accel, accelerators.KINDS, "--accel")
    emulated = accel == "cpu"
    plan = gpu.Plan(
        forms=[pick(one, gpu.FORMS, "--forms") for one in _listed(forms)] or list(gpu.FORMS),
        producers=_numbers(producers) or ([4, 8] if emulated else [32, 128, 512, 1024, 2048]),
        rings=rings,
        threads=min(threads, rings),
        # The emulation shows that all is right; its figures are the CPU's.
        seconds=seconds or (0.01 if emulated else 0.3),
        repeats=repeats,
        start=1000 if emulated else 200_000,
        pings=200 if emulated else 20_000,
        soak=commands,
        against=against,
        against_runs=against_runs,
    )
    if against is not None and not against.is_file():
        raise typer.BadParameter(f"no such file: {against}", param_hint="--against")
    with accelerators.open(accel, device) as opened:
        result = gpu.measure(say, opened, plan)
        info = opened.info
    result["device"] = {
        "kind": info.kind, "index": info.index, "name": info.name, "architecture": info.architecture,
        "driver": info.driver, "multiprocessors": info.multiprocessors, "warp_size": info.warp_size,
        "numa_node": info.numa_node, "address": info.address, "clocks": clocks(info.kind, info.address),
        "cpus": cpus_for(plan.threads, info.numa_node),
    }  # fmt: skip
    return result


def _listed(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def _numbers(text: str) -> list[int]:
    found = []
    for one in _listed(text):
        if not one.isdecimal() or not 1 <= int(one) <= _MOST_PRODUCERS:
            raise typer.BadParameter(f"{one!r} is no number from 1 to {_MOST_PRODUCERS}", param_hint="--producers")
        found.append(int(one))
    return found


def clocks(kind: str, address: str) -> str:
    """As the driver's tool tells them just after the runs, while the device is still awake."""
    program = shutil.which("nvidia-smi")
    if kind != "cuda" or program is None:
        return "unknown"
    fields = ("clocks.sm", "clocks.max.sm", "clocks.mem", "pcie.link.gen.current", "pcie.link.width.current")
    return _smi([program, f"--id={address}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"], fields)


def _smi(command: list[str], fields: Iterable[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=20, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    values = done.stdout.strip().split(", ")
    names = list(fields)
    if done.returncode or len(values) != len(names):
        return "unknown"
    return ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
