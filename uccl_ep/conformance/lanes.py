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
    effort: float = 1.0  # how often what cases do many times is done
    economy: float = 1.0  # and what they do often (Context.rounds)
    patience: float = 1.0  # how much longer a case may take
    devices: tuple[str, ...] = ()  # rank i opens the i-th of them, modulo their number
    # By backend: what makes its NIC promise as little as the contract admits; {}: it does so anyway. Others get the
    # strategy that needs least.
    weakest: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def weakest_options(self, backend: str) -> Mapping[str, Any]:
        return self.weakest.get(backend, {"strategy": "sender_hold"})


# Of ranks that are processes of a machine.
_PROCESSES = frozenset(
    {"threads", "caller", "standstill", "kill", "stop", "nested", "processes", "batches", "heaps", "warps"}
)

LANES: Mapping[str, Lane] = {
    "shm": Lane(
        name="shm",
        title="real processes on one machine",
        provides=_PROCESSES | {"gigabytes"},
        cannot_prove=(
            "Performance: times here are those of this machine's CPU and its load.",
            "What a NIC's firmware does, and anything on a wire: loss, retransmission, reordering between hosts.",
            "Visibility in device memory (PCIe ordering, GPU caches): memory here is the CPU's, coherent.",
            "Orderings that this CPU never shows: the weak-memory check of the ring and virtual NICs are for those.",
        ),
        weakest={"shm": {"backend_options": "promise=unordered"}, "pollara": {}, "efa": {}},
    ),
    "sim": Lane(
        name="sim",
        title="virtual NICs: all ranks in one process, one virtual clock, one seed",
        # Threads of a rank are fibers, death and stops are the world's.
        provides=frozenset({"threads", "kill", "stop", "nested", "faults", "batches", "heaps", "warps", "gigabytes"}),
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
        provides=frozenset({"threads", "standstill", "kill", "stop", "heaps", "warps", "device", "gigabytes"}),
        cannot_prove=(
            "Performance: each call is a launch of a kernel of its own.",
            "With --accel cpu: orderings of a GPU, its caches and PCIe; lanes are fibers, and memory is the CPU's.",
            "On one GPU: what holds between GPUs, and between hosts.",
            "What a NIC's firmware does, and anything on a wire.",
        ),
        effort=0.25,  # a launch for each call
        patience=3.0,
        weakest={"shm": {"backend_options": "promise=unordered"}},
    ),
    "softroce": Lane(
        name="softroce",
        title="RDMA devices of a real kernel (Soft-RoCE), in an emulated machine",
        provides=_PROCESSES,
        cannot_prove=(
            "Performance: the machine is emulated, and the NIC is a program of its kernel.",
            "What a vendor's NIC, firmware or provider does beyond the specification: the transport here is rxe's.",
            "Orderings that rxe never shows: it places what it receives in order. Virtual NICs are for others.",
            "Visibility in device memory, PCIe ordering, dmabuf and peer memory: memory here is the CPU's, coherent.",
            "That the port is fit for a fabric: switches, congestion control, priorities and several paths.",
        ),
        effort=0.1,
        economy=0.2,
        patience=6.0,
        weakest={"pollara": {}, "efa": {}},
        devices=("rxe0", "rxe1"),
    ),
    "provider": Lane(
        name="provider",
        title="the vendor's own library, on virtual NICs (the lab); real processes on one machine",
        provides=_PROCESSES,
        cannot_prove=(
            "Performance: the NIC is a thread of its program.",
            "What a NIC's firmware and its kernel driver do: both are models, made from the vendor's library.",
            "Freedoms and limits that the profile lacks: a profile is what is known of a NIC.",
            "Registration: pinning, translation, limits of a kernel; dmabuf and peer memory of a GPU.",
            "Visibility in device memory, PCIe ordering, write combining: memory here is the CPU's, coherent.",
            "Anything on a wire: loss, congestion, routes, several hosts. Here it is a socket of this machine.",
        ),
        effort=0.25,  # whoever waits for a NIC waits for a thread of another process
        economy=0.5,
        patience=3.0,
        weakest={"pollara": {}, "efa": {}},
    ),
}
DEFAULT_LANE = "shm"
VARIANT = "unordered"


def lane_of(backend: str, library: object, lane: str | None) -> str:
    """The lane asked for, or the one that the backend needs."""
    if lane is not None:
        return lane
    return "sim" if backend == "sim" and library is None else DEFAULT_LANE
