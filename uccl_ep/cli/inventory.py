# SPDX-License-Identifier: Apache-2.0
"""`backends`, `devices`, `doctor`: what is here."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Annotated, Any

import typer

from .. import backends, errors
from ..info import BackendInfo
from .common import json_text, pick

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]


def _print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    Console(highlight=False).print(table)


def _look(name: str) -> tuple[BackendInfo | None, str, bool]:
    """What the backend says, or why it cannot be asked, and whether that is because this installation was built without
    it. One broken backend does not hide the others."""
    try:
        return backends.probe_apart(backends.find(name).library), "", False
    except errors.UcclEpError as error:
        return None, error.record.text or str(error), isinstance(error, errors.MissingPackage)


def _chosen(backend: str | None) -> list[str]:
    """One backend by name or path, or all that are installed."""
    if backend is None:
        return backends.names()
    if "/" not in backend and not backend.endswith(".so"):
        pick(backend, backends.names(), "--backend")
    return [backend]


def list_backends(json: Json = False) -> None:
    """Which backends are installed, where from, and whether they load."""
    found: list[dict[str, Any]] = []
    for name in backends.names():
        probed, problem, _ = _look(name)
        entry: dict[str, Any] = {"name": name, "problem": problem}
        if probed is not None:
            backend = backends.find(name)
            entry.update(
                summary=backend.summary,
                version=probed.version,
                library=str(probed.library),
                devices=len(probed.devices),
            )
        found.append(entry)
    if json:
        print(json_text("uccl_ep.backends/1", backends=found))
        return
    rows = [
        [one["name"], one.get("version", "-"), str(one.get("devices", "-")), one["problem"] or one["summary"]]
        for one in found
    ]
    _print_table("Backends", ["name", "version", "devices", "what it is, or why it does not load"], rows)


def list_devices(
    backend: Annotated[
        str | None, typer.Option("--backend", help="A backend's name, or the path of its library.")
    ] = None,
    json: Json = False,
) -> None:
    """Which NICs the backends see, and what they promise; and all RDMA devices as the kernel shows them."""
    devices: list[dict[str, Any]] = []
    problems: list[dict[str, str]] = []
    absent: list[dict[str, str]] = []
    for name in _chosen(backend):
        probed, problem, left_out = _look(name)
        if probed is None:
            # Built without it is worth a word to those who ask for it, not to all.
            (absent if left_out and backend is None else problems).append({"backend": name, "problem": problem})
            continue
        found = backends.find(name)
        for device in probed.devices:
            promises = {**asdict(device.caps), "names": device.caps.names, "completion": device.caps.completion}
            mine = found.owns(device)
            devices.append({"backend": name, **asdict(device), "caps": promises, "for_this_backend": mine})
    kernel = _rdma_devices()
    if json:
        content = {"devices": devices, "problems": problems, "absent": absent, "rdma": kernel}
        print(json_text("uccl_ep.devices/1", **content))
    else:
        rows = [
            [
                one["backend"],
                one["name"],
                " ".join(filter(None, (one["vendor"], one["model"], one["firmware"]))) or "-",
                "-" if one["numa_node"] is None else str(one["numa_node"]),
                f"cannot be used: {one['unusable']}"
                if one["unusable"]
                else f"completion {one['caps']['completion']}; {', '.join(one['caps']['names'])}",
            ]
            for one in devices
            # Each backend over libibverbs lists the NICs of the others, too.
            if one["for_this_backend"] or backend is not None
        ]
        rows += [[one["backend"], "-", "-", "-", f"cannot be asked: {one['problem']}"] for one in problems]
        _print_table("Devices", ["backend", "device", "what it is", "NUMA", "promises"], rows)
        if kernel:
            _print_rdma(kernel)
    if problems:
        raise typer.Exit(1)


def _rdma_devices() -> list[dict[str, Any]] | None:
    """None: the kernel does not let us look."""
    from .. import _libibverbs, rdma

    found = rdma.devices()
    if not found:
        return None if found is None else []
    told = _libibverbs.look(_libibverbs.name())
    return [
        {**asdict(device), "backends": backends.owners(device.name), "attributes": told.attributes.get(device.name)}
        for device in found
    ]


def _print_rdma(devices: list[dict[str, Any]]) -> None:
    """Which device is which interface, port and PCI function: two ports may be two devices of one GUID."""

    def port_text(port: dict[str, Any]) -> str:
        lines = [", ".join(filter(None, (port["state"] or "state unknown", port["link_layer"], port["rate"])))]
        for gid in port["gids"]:
            where = f" ({gid['netdev']})" if gid["netdev"] else ""
            lines.append(f"GID {gid['index']}: {gid['address']}, {gid['type'] or 'type unknown'}{where}")
        return f"port {port['number']}: " + "\n  ".join(lines)

    rows = [
        [
            one["name"],
            "\n".join(filter(None, (one["driver"], one["firmware"], one["address"]))) or "-",
            "-" if one["numa_node"] is None else str(one["numa_node"]),
            one["node_guid"] or "-",
            ", ".join(one["backends"]) or "-",
            "\n".join(map(port_text, one["ports"])) + (f"\n{one['node_problem']}" if one["node_problem"] else ""),
        ]
        for one in devices
    ]
    _print_table("RDMA devices", ["device", "driver, firmware, PCI", "NUMA", "GUID", "backend", "ports"], rows)


def doctor(json: Json = False) -> None:
    """What works on this machine, what is missing, and what to do. Exit code 1 if something does not work."""
    from ..doctor import examine

    found = examine()
    checks = found.checks
    counts = Counter(check.level for check in checks)
    if json:
        print(
            json_text(
                "uccl_ep.doctor/1", checks=[asdict(check) for check in checks], gpus=found.gpus, summary=dict(counts)
            )
        )
    else:
        rows = [
            [check.level, check.name, f"{check.found}\n-> {check.advice}" if check.advice else check.found]
            for check in checks
        ]
        _print_table("uccl-ep doctor", ["", "what", "found"], rows)
    if counts["error"]:
        raise typer.Exit(1)
