# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of GPUs: the drivers, each device, and what it can do together with NICs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from .accel import inventory, library
from .doctor import Check, Level, bytes_text, read_text

VENDORS = ("cuda", "hip")


def look() -> dict[str, inventory.Probed]:
    """Every kind of accelerator, the emulation among them."""
    return {kind: inventory.probe_apart(library(kind)) for kind in (*VENDORS, "cpu")}


def _writes(gpu: inventory.Gpu) -> tuple[Level, str, str]:
    """What has to come between a NIC's data and its signal (MEM-3)."""
    if gpu.writes_ordering == "ordered_all":
        return "ok", "ordered for all GPUs: no flush is needed", ""
    if gpu.writes_ordering == "ordered":
        return "ok", "ordered for its own kernels: no flush is needed", ""
    if gpu.can_flush:
        return "ok", "unordered: they are flushed before a signal, which its driver can", ""
    advice = "with a NIC that writes to GPU memory keep the heap in host memory"
    return "warning", "unordered, and its driver has no flush", advice


def _loaded(module: str) -> bool:
    return any(line.split()[0] == module for line in (read_text("/proc/modules") or "").splitlines())


def _peer_access(kind: str, gpu: inventory.Gpu) -> tuple[Level, str, str]:
    """How a NIC may reach its memory."""
    ways = ["dmabuf"] if gpu.dmabuf else []
    if kind == "cuda" and _loaded("nvidia_peermem"):
        ways.append("nvidia_peermem")
    if ways:
        return "ok", " and ".join(ways), ""
    advice = "the open kernel modules of a newer driver export dmabuf (Linux 5.12 or newer)"
    if kind == "cuda":
        advice += ", or load nvidia_peermem; without, heaps of NICs lie in host memory"
    return "warning", "none: no dmabuf" + (", nvidia_peermem is not loaded" if kind == "cuda" else ""), advice


def _device(kind: str, gpu: inventory.Gpu) -> Iterator[Check]:
    name = f"gpu {kind}:{gpu.index}"
    where = f"{gpu.address}, NUMA node {'unknown' if gpu.numa_node is None else gpu.numa_node}"
    found = (
        f"{gpu.name}, {gpu.architecture}, {bytes_text(gpu.memory_bytes)}, {gpu.multiprocessors} multiprocessors, "
        f"{gpu.driver}, {where}"
    )
    if gpu.unusable:
        yield Check(name, "warning", f"{found}: cannot be used", gpu.unusable)
        return
    yield Check(name, "ok", found)
    yield Check(f"{name}: what NICs write", *_writes(gpu))
    yield Check(f"{name}: for NICs", *_peer_access(kind, gpu))
    if gpu.ipc:
        yield Check(f"{name}: other processes", "ok", "can open its memory: heaps of ranks of one host")
    else:
        yield Check(
            f"{name}: other processes",
            "warning",
            "cannot open its memory",
            "without a NIC only ranks of one process can have heaps there",
        )
    atomics = "are" if gpu.host_atomics else "are not"
    yield Check(f"{name}: host atomics", "info", f"its atomics on host memory {atomics} atomic against the CPU's")


def checks(found: dict[str, inventory.Probed]) -> Iterator[Check]:
    for kind in VENDORS:
        probed = found[kind]
        for gpu in probed.gpus:
            yield from _device(kind, gpu)
        if not probed.gpus:
            problem, _, remedy = probed.problem.partition("; ")
            yield Check(f"gpus of {kind}", "info", f"none: {problem}", remedy)
    if not any(found[kind].gpus for kind in VENDORS):
        files = sorted(path.name for pattern in ("nvidia[0-9]*", "kfd") for path in Path("/dev").glob(pattern))
        there = f", though /dev has {', '.join(files)}" if files else ""
        yield Check("gpus", "info", f"none{there}: heaps lie in host memory, and kernels run on the CPU's emulation")
    emulation = found["cpu"]
    yield Check("gpu emulation", "ok" if emulation.gpus else "error", emulation.problem or emulation.gpus[0].name)


def as_json(found: dict[str, inventory.Probed]) -> Sequence[dict[str, object]]:
    from dataclasses import asdict

    return [{"kind": kind, **asdict(probed)} for kind, probed in found.items()]
