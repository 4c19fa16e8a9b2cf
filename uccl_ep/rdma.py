# SPDX-License-Identifier: Apache-2.0
"""The RDMA devices of this machine as the kernel shows them, without opening one and without a tool.

Everything is read from sysfs (below SYSFS_PATH, as libibverbs does, or /sys) and /dev/infiniband. None, or an empty
tuple, is "the kernel does not say", never "there is none".
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path

DEVICE_NODES = Path("/dev/infiniband")


def sysfs() -> Path:
    return Path(os.environ.get("SYSFS_PATH") or "/sys")


@dataclass(frozen=True)
class Gid:
    index: int
    address: str  # "::ffff:10.0.0.1", as IPv6 is written
    type: str | None  # "RoCE v2", "RoCE v1" or "IB"
    netdev: str | None

    @property
    def kind(self) -> str:
        """ "IPv4", "IPv6" or "link-local"."""
        address = IPv6Address(self.address)
        return "IPv4" if address.ipv4_mapped else "link-local" if address.is_link_local else "IPv6"


@dataclass(frozen=True)
class Netdev:
    """A network interface of the device."""

    name: str
    state: str | None  # "up", "down"
    mtu: int | None


@dataclass(frozen=True)
class Port:
    number: int
    state: str | None  # "ACTIVE", "DOWN", "INIT", "ARMED"
    physical_state: str | None  # "LinkUp", "Disabled", "Polling"
    link_layer: str | None  # "Ethernet" or "InfiniBand"
    gigabits: float | None
    rate: str | None  # as the kernel words it: "400 Gb/sec (4X NDR)"
    lid: int | None
    gids: tuple[Gid, ...]
    pkeys: tuple[int, ...]

    @property
    def active(self) -> bool | None:
        return None if self.state is None else self.state == "ACTIVE"


@dataclass(frozen=True)
class Device:
    name: str
    driver: str | None  # of the kernel: "mlx5_core"
    vendor_id: int | None  # PCI
    part_id: int | None  # PCI device
    address: str | None  # PCI: "0000:3b:00.0"
    numa_node: int | None
    firmware: str | None
    board: str | None
    node_guid: str | None
    node: str | None  # /dev/infiniband/uverbsN: by the kernel's mapping, not by the name
    node_problem: str  # why that cannot be opened, "" if it can
    netdevs: tuple[Netdev, ...]
    ports: tuple[Port, ...]

    @property
    def active_ports(self) -> tuple[Port, ...]:
        return tuple(port for port in self.ports if port.active)


def _text(path: Path) -> str | None:
    """What the file says; None also where reading fails, as the kernel does for empty places of a table."""
    try:
        return path.read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _number(path: Path) -> int | None:
    with contextlib.suppress(ValueError, TypeError):
        return int(_text(path) or "", 0)
    return None


def _entries(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir(), key=lambda entry: [*map(int, re.findall(r"\d+", entry.name)), 0])
    except OSError:
        return []


def _numbered(path: Path) -> list[Path]:
    return [entry for entry in _entries(path) if entry.name.isdigit()]


def _after_colon(text: str | None) -> str | None:
    """ "4: ACTIVE" -> "ACTIVE"."""
    return text.partition(":")[2].strip() or None if text else None


def _gids(port: Path) -> tuple[Gid, ...]:
    found = []
    for entry in _numbered(port / "gids"):
        with contextlib.suppress(ValueError):
            address = IPv6Address(_text(entry) or "::")
            if not int(address):
                continue
            kind = _text(port / "gid_attrs/types" / entry.name)
            # The kernel's word for version 1 is that of InfiniBand, too.
            if kind == "IB/RoCE v1":
                kind = "RoCE v1" if _text(port / "link_layer") == "Ethernet" else "IB"
            mapped = address.ipv4_mapped
            text = f"::ffff:{mapped}" if mapped else str(address)
            found.append(Gid(int(entry.name), text, kind, _text(port / "gid_attrs/ndevs" / entry.name)))
    return tuple(found)


def _port(path: Path) -> Port:
    rate = _text(path / "rate")
    speed = re.match(r"[\d.]+", rate or "")
    pkeys = (_number(entry) for entry in _numbered(path / "pkeys"))
    return Port(
        number=int(path.name),
        state=_after_colon(_text(path / "state")),
        physical_state=_after_colon(_text(path / "phys_state")),
        link_layer=_text(path / "link_layer"),
        gigabits=float(speed.group()) if speed else None,
        rate=rate,
        lid=_number(path / "lid"),
        gids=_gids(path),
        pkeys=tuple(key for key in pkeys if key),
    )


def _nodes(root: Path) -> dict[str, str]:
    """Device -> "uverbs3", whatever either is called."""
    found = {}
    for entry in _entries(root / "class/infiniband_verbs"):
        name = _text(entry / "ibdev")
        if name:
            found[name] = entry.name
    return found


def _node_problem(node: Path) -> str:
    try:
        mode = os.stat(node).st_mode
    except FileNotFoundError:
        return f"{node} is not there: load ib_uverbs, or give it to the container (--device={node})"
    except OSError as error:
        return f"{node}: {error.strerror}"
    if not stat.S_ISCHR(mode):
        return f"{node} is no device node"
    if not os.access(node, os.R_OK | os.W_OK):
        return f"{node} may not be opened by this user: chmod 666 {node}, or a udev rule that does it"
    return ""


def _netdevs(pci: Path) -> tuple[Netdev, ...]:
    return tuple(
        Netdev(entry.name, _text(entry / "operstate"), _number(entry / "mtu")) for entry in _entries(pci / "net")
    )


def _hex(path: Path) -> int | None:
    with contextlib.suppress(ValueError, TypeError):
        return int(_text(path) or "", 16)
    return None


def _link_name(path: Path) -> str | None:
    """The last part of what a link points at: the driver's name, a PCI address."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return None


def _device(path: Path, nodes: dict[str, str]) -> Device:
    pci = path / "device"  # a software device has none
    node = nodes.get(path.name)
    numa = _number(pci / "numa_node")
    return Device(
        name=path.name,
        driver=_link_name(pci / "driver"),
        vendor_id=_hex(pci / "vendor"),
        part_id=_hex(pci / "device"),
        address=_link_name(pci),
        numa_node=numa if numa is not None and numa >= 0 else None,
        firmware=_text(path / "fw_ver"),
        board=_text(path / "board_id"),
        node_guid=_text(path / "node_guid"),
        node=str(DEVICE_NODES / node) if node else None,
        node_problem=_node_problem(DEVICE_NODES / node)
        if node
        else "the kernel shows no device node for it: load ib_uverbs",
        netdevs=_netdevs(pci),
        ports=tuple(_port(port) for port in _numbered(path / "ports")),
    )


def devices() -> Sequence[Device] | None:
    """Every RDMA device, sorted by name as people count; None: the kernel does not let us look."""
    root = sysfs()
    folder = root / "class/infiniband"
    try:
        names = sorted(os.listdir(folder), key=lambda name: [int(s) if s.isdigit() else s for s in _split(name)])
    except FileNotFoundError:
        return ()
    except OSError:
        return None
    nodes = _nodes(root)
    return tuple(_device(folder / name, nodes) for name in names)


def _split(name: str) -> list[str]:
    return re.split(r"(\d+)", name)


def module_loaded(*names: str) -> str | None:
    """The first of these kernel modules that is there, loaded or built in."""
    return next((name for name in names if (sysfs() / "module" / name).is_dir()), None)
