# SPDX-License-Identifier: Apache-2.0
"""Lanes: on what the suite runs, what a case may ask of it, and what it cannot prove."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Lane:
    name: str
    title: str
    provides: frozenset[str]  # what cases may need
    cannot_prove: tuple[str, ...]
    # By backend: what makes its NIC promise as little as the contract admits. Others get the strategy that needs least.
    weakest: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def weakest_options(self, backend: str) -> Mapping[str, Any]:
        return self.weakest.get(backend, {"strategy": "sender_hold"})


LANES: Mapping[str, Lane] = {
    "shm": Lane(
        name="shm",
        title="real processes on one machine",
        provides=frozenset({"threads", "caller", "kill", "stop", "nested", "processes", "batches", "heaps", "warps"}),
        cannot_prove=(
            "Performance: times here are those of this machine's CPU and its load.",
            "What a NIC's firmware does, and anything on a wire: loss, retransmission, reordering between hosts.",
            "Visibility in device memory (PCIe ordering, GPU caches): memory here is the CPU's, coherent.",
            "Orderings that this CPU never shows: the weak-memory check of the ring and virtual NICs are for those.",
        ),
        weakest={"shm": {"backend_options": "promise=unordered"}},
    ),
    "sim": Lane(
        name="sim",
        title="virtual NICs: all ranks in one process, one virtual clock, one seed",
        # Threads of a rank are fibers, death and stops are the world's.
        provides=frozenset({"threads", "kill", "stop", "nested", "faults", "batches", "heaps", "warps"}),
        cannot_prove=(
            "Performance: time is virtual, and the costs in it are made up.",
            "That a real NIC is like its profile: profiles come from documents, drivers and others' measurements.",
            "Races of real threads: one thread runs at a time, and changes places only in calls of the library.",
            "What is left when a real process dies: descriptors, mappings, files.",
        ),
    ),
    "gpu": Lane(
        name="gpu",
        title="kernels post and wait: real processes, a device each or one for all",
        # A process with a device open cannot fork, and a kernel that waits moves nothing itself.
        provides=frozenset({"threads", "kill", "stop", "heaps", "warps", "device"}),
        cannot_prove=(
            "Performance: each call is a launch of a kernel of its own.",
            "With --accel cpu: orderings of a GPU, its caches and PCIe; lanes are fibers, and memory is the CPU's.",
            "On one GPU: what holds between GPUs, and between hosts.",
            "What a NIC's firmware does, and anything on a wire.",
        ),
        weakest={"shm": {"backend_options": "promise=unordered"}},
    ),
}
DEFAULT_LANE = "shm"
VARIANT = "unordered"


def lane_of(backend: str, library: object, lane: str | None) -> str:
    """The lane asked for, or the one that the backend needs."""
    if lane is not None:
        return lane
    return "sim" if backend == "sim" and library is None else DEFAULT_LANE
