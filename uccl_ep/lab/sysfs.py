# SPDX-License-Identifier: Apache-2.0
"""A machine with these NICs, as its sysfs would show them: a folder for SYSFS_PATH.

libibverbs reads there which devices there are, who makes them, their ports, GIDs and partitions; it looks at nothing of
the machine's own. A folder's name is the hash of what is in it: it is made once, and any number of runs share it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from ipaddress import IPv6Address
from pathlib import Path

from .._fetched import making
from .nics import Nic

MAJOR, FIRST_MINOR = 231, 192  # of uverbs devices (Linux, drivers/infiniband/core/uverbs_main.c)
CORE_ABI = 6
_DRIVERS = {"connectx": "mlx5_core", "efa": "efa", "thor": "bnxt_en", "pollara": "ionic"}
_RATE = "400 Gb/sec (4X NDR)"


def files(nics: Iterable[Nic]) -> tuple[dict[str, str], dict[str, str]]:
    """(content by path, target by path of a link)"""
    content = {"class/infiniband_verbs/abi_version": str(CORE_ABI)}
    links: dict[str, str] = {}
    for index, nic in enumerate(nics):
        address = f"0000:{0x10 + index:02x}:00.0"
        pci = f"devices/pci0000:00/{address}"
        driver = f"bus/pci/drivers/{_DRIVERS[nic.nic]}"
        home, verbs = f"{pci}/infiniband/{nic.name}", f"{pci}/infiniband_verbs/uverbs{index}"
        efa = nic.nic == "efa"
        vendor, part = nic.pci
        guid = ":".join(nic.guid[at : at + 4] for at in range(0, 16, 4))
        content |= {
            f"{driver}/module": _DRIVERS[nic.nic],
            f"{pci}/vendor": f"{vendor:#06x}",
            f"{pci}/device": f"{part:#06x}",
            f"{pci}/subsystem_vendor": f"{vendor:#06x}",
            f"{pci}/subsystem_device": "0x0000",
            f"{pci}/class": "0x020000",
            f"{pci}/numa_node": "0",
            f"{pci}/modalias": nic.modalias,
            f"{home}/fw_ver": nic.firmware,
            f"{home}/node_guid": guid,
            f"{home}/sys_image_guid": guid,
            f"{home}/node_type": "7: unspecified" if efa else "1: CA",
            f"{home}/node_desc": "uccl_ep lab",
            f"{home}/hca_type": nic.variant,
            f"{home}/board_id": f"LAB_{nic.variant}",
            f"{verbs}/abi_version": str(nic.abi),
            f"{verbs}/dev": f"{MAJOR}:{FIRST_MINOR + index}",
            f"{verbs}/ibdev": nic.name,
        }
        port = f"{home}/ports/1"
        content |= {
            f"{port}/state": "4: ACTIVE",
            f"{port}/phys_state": "5: LinkUp",
            f"{port}/link_layer": "Unspecified" if efa else "Ethernet",
            f"{port}/rate": _RATE,
            f"{port}/lid": "0x0",
            f"{port}/lid_mask_count": "0",
            f"{port}/sm_lid": "0x0",
            f"{port}/sm_sl": "0",
            f"{port}/cap_mask": "0x04010000",
            f"{port}/pkeys/0": "0xffff",
        }
        for at, gid in enumerate(nic.gids):
            content[f"{port}/gids/{at}"] = IPv6Address(gid).exploded
            if not efa:
                content[f"{port}/gid_attrs/types/{at}"] = "RoCE v2"
        links |= {
            f"{pci}/driver": driver,
            f"{home}/device": pci,
            f"{verbs}/device": pci,
            f"class/infiniband/{nic.name}": home,
            f"class/infiniband_verbs/uverbs{index}": verbs,
            f"bus/pci/devices/{address}": pci,
            f"dev/char/{MAJOR}:{FIRST_MINOR + index}": verbs,
        }
    return content, links


def lay_out(nics: Iterable[Nic], cache: Path) -> Path:
    """The folder. Those that are there are whole: each got its name last."""
    content, links = files(nics)
    name = hashlib.sha256(json.dumps([content, links]).encode()).hexdigest()[:16]
    folder = cache / f"sysfs-{name}"
    if folder.is_dir():
        return folder
    with making(cache, "sysfs") as made:
        try:
            for path, text in content.items():
                (made / path).parent.mkdir(parents=True, exist_ok=True)
                (made / path).write_text(text + "\n")
            for path, target in links.items():
                (made / path).parent.mkdir(parents=True, exist_ok=True)
                (made / path).symlink_to(Path(*[".."] * path.count("/"), target))
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    return folder
