# SPDX-License-Identifier: Apache-2.0
"""What the backends over libibverbs share: whose a device is, where the library lies, and checks of NICs and ports.

What a NIC promises, its library asks the device itself (csrc/backends/verbs); here are the facts that show before
one is opened, and what mends what is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import _libibverbs, _rdma_checks, errors, paths, rdma
from ..doctor import Check


@dataclass(frozen=True)
class Vendor:
    """A family of NICs."""

    backend: str
    family: str
    vendor_ids: tuple[int, ...]  # PCI
    parts: tuple[range, ...]  # PCI device ids; empty: all of the vendor's
    drivers: tuple[str, ...]  # the kernel's, of the PCI device
    modules: tuple[str, ...]  # the kernel's, of its RDMA part
    provider: str  # the vendor's part of libibverbs
    rdma_core: int  # first release that has it
    source: str  # where the vendor's own packages come from
    oldest_firmware: tuple[int, ...] = ()  # below it NICs were seen to fail; see docs/verbs.md

    # ------------------------------------------------------------------------------ what a backend's module has to have

    def library(self) -> Path:
        path = paths.library_dir() / f"libuccl_ep_backend_{self.backend}.so"
        if not path.is_file():
            raise errors.MissingPackage(
                "built without libibverbs' headers: install libibverbs-dev (or rdma-core-devel) and reinstall uccl_ep"
            )
        return path

    def owns(self, device: str) -> bool | None:
        """Is this one of the family? A whole name: mlx5_1 is not mlx5_10. None: the kernel shows no such device."""
        return next((self.made(found) for found in rdma.devices() or () if found.name == device), None)

    def doctor(self) -> Iterator[Check]:
        found = [device for device in rdma.devices() or () if self.made(device)]
        if not found:
            return
        told = _libibverbs.look(_libibverbs.name())
        for device in found:
            yield self._device(device, told)
            yield from self._firmware(device)
            for port in device.ports:
                yield _port(device, port)

    # ------------------------------------------------------------------------------------------------------------ facts

    def made(self, device: rdma.Device) -> bool:
        if device.vendor_id is None:
            return device.driver in self.drivers
        mine = not self.parts or any(device.part_id in part for part in self.parts)
        return device.vendor_id in self.vendor_ids and mine

    def _device(self, device: rdma.Device, told: _libibverbs.Library) -> Check:
        name, facts = f"device {device.name}", f"{self.family}, {_rdma_checks.describe(device)}"
        if device.node_problem:
            return Check(name, "warning", facts, device.node_problem)
        if told.devices is not None and not told.problem and device.name not in told.devices:
            return Check(name, "warning", f"{facts}; libibverbs does not see it", self._provider_advice(told))
        if not device.ports:
            return Check(name, "warning", f"{facts}; it shows no port", f"dmesg | grep {self.modules[-1]}")
        return Check(name, "ok", f"{facts}, {device.node}")

    def _provider_advice(self, told: _libibverbs.Library) -> str:
        if told.rdma_core and told.rdma_core < self.rdma_core:
            return f"rdma-core {told.rdma_core} has no {self.provider}: {self.rdma_core} or newer has, or {self.source}"
        if told.providers is not None and self.provider not in told.providers:
            return f"its provider {self.provider} is missing: install ibverbs-providers, or {self.source}"
        return f"kernel and user space may be of different releases: install both of one, or {self.source}"

    def _firmware(self, device: rdma.Device) -> Iterator[Check]:
        if not self.oldest_firmware:
            return
        name = f"{device.name} firmware"
        numbers = tuple(map(int, re.findall(r"\d+", device.firmware or "")))
        wanted = ".".join(map(str, self.oldest_firmware))
        if not numbers:
            yield Check(name, "unknown", "the kernel does not say")
        elif numbers < self.oldest_firmware:
            yield Check(name, "warning", f"{device.firmware}", f"older than {wanted}: update it ({self.source})")
        else:
            yield Check(name, "ok", f"{device.firmware}")


def _port(device: rdma.Device, port: rdma.Port) -> Check:
    """Also what libibverbs' own choice of an address needs (csrc/backends/verbs/gid.c)."""
    name = f"{device.name} port {port.number}"
    facts = _rdma_checks.describe_port(port)
    netdevs = {gid.netdev for gid in port.gids if gid.netdev} or {netdev.name for netdev in device.netdevs}
    interface = sorted(netdevs)[0] if netdevs else "its interface"
    if port.active is None:
        return Check(name, "unknown", facts)
    if not port.active:
        if port.link_layer == "InfiniBand" and port.state in ("INIT", "ARMED"):
            return Check(
                name, "warning", facts, "no subnet manager has set it up: start opensm, or ask who runs the fabric"
            )
        mend = "ibportstate, and see to its cable" if port.link_layer == "InfiniBand" else f"ip link set {interface} up"
        return Check(name, "warning", facts, f"{mend}; a cable, a transceiver or the switch's port may be at fault")
    if port.link_layer == "Ethernet":
        good = [gid for gid in port.gids if gid.type == "RoCE v2" and gid.index]
        if not good:
            typed = any(gid.type for gid in port.gids)
            if port.gids and not typed:
                return Check(name, "unknown", f"{facts}; the kernel does not say of which RoCE version its GIDs are")
            advice = f"ip addr add ADDRESS/LENGTH dev {interface}: an address makes a GID of RoCE v2"
            return Check(name, "warning", f"{facts}; no GID of RoCE v2", advice)
        order = ("IPv4", "IPv6", "link-local")
        best = min(good, key=lambda gid: (order.index(gid.kind), gid.index))
        facts += f"; GID {best.index}, RoCE v2, {best.address}" + (f", {best.netdev}" if best.netdev else "")
        mtus = [netdev.mtu for netdev in device.netdevs if netdev.name == best.netdev and netdev.mtu]
        if mtus and mtus[0] < 4200:
            advice = (
                f"ip link set {best.netdev} mtu 9000 gives packets of 4096 bytes, if every switch on the way agrees"
            )
            return Check(name, "ok", f"{facts}, MTU {mtus[0]}", advice)
    elif port.pkeys and not any(key & 0x8000 for key in port.pkeys):
        listed = ", ".join(f"{key:#06x}" for key in port.pkeys)
        return Check(
            name, "warning", f"{facts}; member of no partition in full ({listed})", "ask the subnet manager for one"
        )
    return Check(name, "ok", facts)
