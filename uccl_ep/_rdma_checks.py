# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of RDMA as a whole: devices, libibverbs, ways into GPU memory. Vendors add checks."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Sequence

from . import _libibverbs, backends, rdma
from .doctor import Check, read_text

PEER_MODULES = {"nvidia": ("nvidia_peermem", "nv_peer_mem"), "amdgpu": ("amdgpu_peermem", "ib_peer_mem")}


def describe(device: rdma.Device) -> str:
    """Facts in a line, without what is not known."""
    identity = f"{device.vendor_id:04x}:{device.part_id:04x}" if device.vendor_id and device.part_id else None
    numa = f"NUMA node {device.numa_node}" if device.numa_node is not None else None
    firmware = f"firmware {device.firmware}" if device.firmware else None
    facts = (device.driver, identity, firmware, device.address, numa)
    return ", ".join(fact for fact in facts if fact) or "the kernel says nothing of it"


def describe_port(port: rdma.Port) -> str:
    state = port.state or "state unknown"
    if port.physical_state and not port.active:
        state += f" ({port.physical_state})"
    return ", ".join(fact for fact in (state, port.link_layer, port.rate) if fact)


def devices(found: Sequence[rdma.Device] | None) -> Iterator[Check]:
    if found is None:
        yield Check("RDMA devices", "unknown", f"{rdma.sysfs() / 'class/infiniband'} may not be read")
    elif not found:
        yield Check("RDMA devices", "info", "none: this kernel shows no RDMA device")
    else:
        yield Check("RDMA devices", "info", ", ".join(device.name for device in found))


def libibverbs(found: Sequence[rdma.Device] | None) -> Check:
    name = "libibverbs"
    told = _libibverbs.look(_libibverbs.name())
    if told.problem:
        # Without a device nobody misses it.
        return Check(name, "warning" if found else "info", "cannot be used", told.problem)
    if told.devices is None and found:
        return Check(
            name, "warning", f"{told.path} lists no device", "modprobe ib_uverbs; in a container: give it /sys"
        )
    release = f"rdma-core {told.rdma_core}" if told.rdma_core else "release unknown"
    lacks = f"too old for {'; '.join(told.lacks)} or newer" if told.lacks else ""
    return Check(name, "warning" if lacks and found else "ok", f"{release}, {told.path}", lacks)


def _linux() -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(match[1]), int(match[2])) if match else (0, 0)


def peer_memory() -> Iterator[Check]:
    """How NICs may reach GPU memory: dmabuf, or a module that lends it. What a GPU itself exports its driver says."""
    drivers = [name for name in PEER_MODULES if rdma.module_loaded(name)]
    if not drivers:
        yield Check("peer memory", "info", "no GPU's driver is loaded: heaps lie in host memory")
    for driver in drivers:
        module = rdma.module_loaded(*PEER_MODULES[driver])
        version = read_text(str(rdma.sysfs() / "module" / driver / "version"))
        kernel = "can register dmabufs" if _linux() >= (5, 12) else "is too old for dmabufs (Linux 5.12)"
        found = f"{driver} {version or '(version unknown)'}; this kernel {kernel}; "
        found += f"{module} is loaded" if module else f"no {' or '.join(PEER_MODULES[driver])}"
        advice = ""
        if not module and _linux() < (5, 12):
            advice = f"modprobe {PEER_MODULES[driver][0]}, or a newer kernel; else heaps lie in host memory"
        yield Check(f"peer memory of {driver}", "warning" if advice else "ok", found, advice)


def checks() -> Iterator[Check]:
    found = rdma.devices()
    yield from devices(found)
    yield libibverbs(found)
    if found:
        yield from peer_memory()
    for device in found or ():
        if not backends.owners(device.name):
            yield Check(
                f"device {device.name}",
                "info",
                f"{describe(device)}: no installed backend is for this vendor",
                '`uccl-ep backends` lists them; with backend_options="limits_only=1" the backends over libibverbs '
                "take any reliable connection, for tests",
            )
