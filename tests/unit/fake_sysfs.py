# SPDX-License-Identifier: Apache-2.0
"""Machines that do not exist, as sysfs would show them: SYSFS_PATH points at a folder of a test's own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CONNECTX7 = (0x15B3, 0x1021, "mlx5_core")
THOR2 = (0x14E4, 0x1760, "bnxt_en")
POLLARA = (0x1DD8, 0x1002, "ionic")
EFA3 = (0x1D0F, 0xEFA3, "efa")
STRANGER = (0x1AF4, 0x10F1, "strange")

ROCE = (
    (0, "fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1", "eth0"),
    (1, "fe80:0000:0000:0000:0000:0000:0000:0001", "RoCE v2", "eth0"),
    (2, "0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1", "eth0"),
    (3, "0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2", "eth0"),
)


@dataclass
class Port:
    number: int = 1
    state: str = "4: ACTIVE"
    physical: str = "5: LinkUp"
    layer: str = "Ethernet"
    rate: str = "400 Gb/sec (4X NDR)"
    gids: Sequence[tuple[int, str, str, str]] = ROCE
    pkeys: Sequence[str] = ("0xffff",)


@dataclass
class FakeMachine:
    root: Path  # sysfs
    dev: Path  # /dev/infiniband
    devices: list[str] = field(default_factory=list)

    def write(self, path: str | Path, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")

    def add(
        self,
        name: str,
        kind: tuple[int, int, str] = CONNECTX7,
        *,
        node: str | None = "",
        address: str = "",
        numa: str = "0",
        guid: str = "b83f:d203:0012:3456",
        firmware: str = "28.43.1014",
        ports: Sequence[Port] = (Port(),),
        netdevs: Mapping[str, int] | None = None,
    ) -> None:
        """`node` "": the next uverbsN; None: the kernel shows none."""
        index = len(self.devices)
        self.devices.append(name)
        vendor, part, driver = kind
        address = address or f"0000:{0x10 + index:02x}:00.0"
        pci = Path("devices/pci0000:00") / address
        self.write(pci / "vendor", f"{vendor:#06x}")
        self.write(pci / "device", f"{part:#06x}")
        self.write(pci / "numa_node", numa)
        for netdev, mtu in ({"eth0": 9000} if netdevs is None else netdevs).items():
            self.write(pci / "net" / netdev / "mtu", str(mtu))
            self.write(pci / "net" / netdev / "operstate", "up")
        (self.root / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
        self.link(pci / "driver", Path("bus/pci/drivers") / driver)
        home = pci / "infiniband" / name
        self.write(home / "fw_ver", firmware)
        self.write(home / "node_guid", guid)
        self.write(home / "board_id", "MT_0000000838")
        self.link(home / "device", pci)
        self.link(Path("class/infiniband") / name, home)
        for port in ports:
            place = home / "ports" / str(port.number)
            for file, text in (
                ("state", port.state), ("phys_state", port.physical), ("link_layer", port.layer), ("rate", port.rate),
                ("lid", "0x0"),
            ):  # fmt: skip
                self.write(place / file, text)
            for at, gid, kind_of_gid, netdev in port.gids:
                self.write(place / "gids" / str(at), gid)
                self.write(place / "gid_attrs/types" / str(at), kind_of_gid)
                self.write(place / "gid_attrs/ndevs" / str(at), netdev)
            for at, key in enumerate(port.pkeys):
                self.write(place / "pkeys" / str(at), key)
        if node is not None:
            node = node or f"uverbs{index}"
            self.write(Path("class/infiniband_verbs") / node / "ibdev", name)
            # A device node that any user may make: the null device's.
            self.dev.mkdir(exist_ok=True)
            (self.dev / node).symlink_to("/dev/null")

    def link(self, path: Path, target: Path) -> None:
        """Relative and ending in the target's name, as the kernel makes them."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(Path(os.path.relpath(self.root / target.parent, place.parent)) / target.name)
