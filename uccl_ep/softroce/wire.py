# SPDX-License-Identifier: Apache-2.0
"""In the guest: two rxe devices with a wire between them, faults on it, and what they did.

Two devices in one namespace, each on an end of a veth pair: packets from one to the other cross the pair, since rxe
looks up routes by the device that sends and `accept_local` lets the other end take them. Between two queue pairs of one
device, and on `lo`, rxe loops packets back inside, and nothing that is done to the wire is seen.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEVICES = ("rxe0", "rxe1")
ENDS = ("v0", "v1")
ADDRESSES = ("10.9.0.1", "10.9.0.2")
GID_INDEX = 1  # of the IPv4 address; 0 is the link-local one
# Room for RoCE's MTU of 4096 and its headers.
_MTU = 4200
# Of what each end sends: one loses requests and the other acknowledgements. A message is given up when more of its
# packets were lost, or overtaken, than there are retries (6, since 7 is for ever): so few that megabytes come through.
IMPAIRMENT = ("loss", "0.1%", "delay", "200us", "reorder", "0.1%")
_SECONDS = 30.0


class WireError(Exception):
    """The devices could not be made. This is the guest's fault, not that of what is tested on them."""


def _run(*command: str, text: str = "") -> str:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise WireError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise WireError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def lay(impairment: Sequence[str] = ()) -> None:
    """Make the devices, and wait until both are up. `impairment`: netem's words, for both ends."""
    commands = [f"link add {ENDS[0]} mtu {_MTU} type veth peer name {ENDS[1]} mtu {_MTU}"]
    for end, address in zip(ENDS, ADDRESSES, strict=True):
        commands += [f"addr add {address}/24 dev {end}", f"link set {end} up"]
    _run("ip", "-batch", "-", text="\n".join(commands))
    for name in ("all", *ENDS):
        configuration = Path("/proc/sys/net/ipv4/conf") / name
        (configuration / "accept_local").write_text("1")
        (configuration / "rp_filter").write_text("0")
    for device, end in zip(DEVICES, ENDS, strict=True):
        _run("rdma", "link", "add", device, "type", "rxe", "netdev", end)
    if impairment:
        impair(impairment)
    end_of_wait = time.monotonic() + _SECONDS
    while not all(_is_up(device) for device in DEVICES):
        if time.monotonic() >= end_of_wait:
            raise WireError(f"{', '.join(DEVICES)} were not up within {_SECONDS:g} s")
        time.sleep(0.01)


def impair(impairment: Sequence[str]) -> None:
    words = " ".join(impairment)
    _run("tc", "-batch", "-", text="".join(f"qdisc add dev {end} root netem {words}\n" for end in ENDS))


def _is_up(device: str) -> bool:
    port = Path("/sys/class/infiniband") / device / "ports/1"
    try:
        gid = (port / f"gids/{GID_INDEX}").read_text().strip()
        return "ACTIVE" in (port / "state").read_text() and gid.strip(":0") != ""
    except OSError:
        return False


def counted() -> dict[str, Any]:
    """What went over the wire so far, and what became of it: {"v0": of the interface, "rxe0": of the device, ...}."""
    found: dict[str, Any] = {}
    queues = {entry["dev"]: entry for entry in json.loads(_run("tc", "-s", "-j", "qdisc", "show")) if entry.get("root")}
    for end in ENDS:
        numbers = Path("/sys/class/net") / end / "statistics"
        found[end] = {name: int((numbers / name).read_text()) for name in ("tx_packets", "tx_bytes")}
        queue = queues.get(end, {})
        found[end] |= {"queue": queue.get("kind"), "dropped": int(queue.get("drops", 0))}
    for device in DEVICES:
        counters = Path("/sys/class/infiniband") / device / "ports/1/hw_counters"
        names = sorted(path.name for path in counters.iterdir() if path.name != "lifespan")
        found[device] = {name: int((counters / name).read_text()) for name in names}
    return found


def bitten(counts: dict[str, Any]) -> bool:
    """Whether the impairment did anything to RDMA: packets were lost, and rxe sent some again."""
    again = ("completer_retry_err", "duplicate_request", "out_of_seq_request")
    noticed = sum(int(counts[device].get(name, 0)) for device in DEVICES for name in again)
    return noticed > 0 and sum(int(counts[end]["dropped"]) for end in ENDS) > 0
