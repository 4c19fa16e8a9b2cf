# SPDX-License-Identifier: Apache-2.0
"""RDMA devices of machines that do not exist: what the kernel shows, whose they are, what the doctor says of them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from uccl_ep import _libibverbs, _rdma_checks, backends, rdma
from uccl_ep.backends import connectx, pollara, thor
from uccl_ep.doctor import Check

from .fake_sysfs import CONNECTX7, POLLARA, ROCE, STRANGER, THOR2, FakeMachine, Port
from .test_cli import uccl_ep_command


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    made = FakeMachine(tmp_path / "sys", tmp_path / "dev")
    made.root.mkdir()
    monkeypatch.setenv("SYSFS_PATH", str(made.root))
    monkeypatch.setattr(rdma, "DEVICE_NODES", made.dev)
    return made


@pytest.fixture
def libibverbs(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What libibverbs says here: a test changes what it wants; devices: all that the machine has."""
    told: dict[str, Any] = {"path": "/usr/lib/libibverbs.so.1.14.61.0", "rdma_core": 61, "providers": None}

    def look(library: str) -> _libibverbs.Library:
        return _libibverbs.Library(**{"devices": tuple(machine.devices), **told})

    monkeypatch.setattr(_libibverbs, "look", look)
    return told


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def names(module: Any) -> list[str]:
    return [device.name for device in rdma.devices() or () if module.owns(device.name)]


# ----------------------------------------------------------------------------------------------------------- the kernel


def test_the_facts(machine: FakeMachine) -> None:
    machine.add("mlx5_0", netdevs={"eth0": 9000}, numa="1")
    (device,) = rdma.devices() or ()
    assert (device.name, device.driver, device.vendor_id, device.part_id) == ("mlx5_0", "mlx5_core", 0x15B3, 0x1021)
    assert (device.address, device.numa_node, device.firmware) == ("0000:10:00.0", 1, "28.43.1014")
    assert (device.node, device.node_problem) == (str(machine.dev / "uverbs0"), "")
    assert device.netdevs == (rdma.Netdev("eth0", "up", 9000),)
    (port,) = device.ports
    assert port.active
    assert (port.state, port.physical_state, port.link_layer, port.gigabits) == ("ACTIVE", "LinkUp", "Ethernet", 400.0)
    assert port.pkeys == (0xFFFF,)
    assert [(gid.index, gid.address, gid.type, gid.kind) for gid in port.gids] == [
        (0, "fe80::1", "RoCE v1", "link-local"),
        (1, "fe80::1", "RoCE v2", "link-local"),
        (2, "::ffff:10.0.0.1", "RoCE v1", "IPv4"),
        (3, "::ffff:10.0.0.1", "RoCE v2", "IPv4"),
    ]


def test_what_the_kernel_does_not_say_is_unknown(machine: FakeMachine) -> None:
    """F7: never a false fact."""
    (machine.root / "class/infiniband/rxe0/ports/1").mkdir(parents=True)
    (device,) = rdma.devices() or ()
    assert {device.driver, device.vendor_id, device.address, device.numa_node, device.firmware, device.node} == {None}
    (port,) = device.ports
    assert {port.active, port.state, port.link_layer, port.gigabits, port.lid} == {None}
    assert (port.gids, port.pkeys) == ((), ())
    assert _rdma_checks.describe(device) == "the kernel says nothing of it"
    assert _rdma_checks.describe_port(port) == "state unknown"


def test_empty_places_of_a_table_are_no_gids(machine: FakeMachine) -> None:
    nothing = (5, "0000:0000:0000:0000:0000:0000:0000:0000", "", "")
    rubbish = (6, "what is this", "RoCE v2", "eth0")
    machine.add("mlx5_0", ports=[Port(gids=[*ROCE, nothing, rubbish])])
    assert [gid.index for gid in (rdma.devices() or ())[0].ports[0].gids] == [0, 1, 2, 3]


def test_no_rdma(machine: FakeMachine) -> None:
    assert rdma.devices() == ()
    checks = by_name(_rdma_checks.checks())
    assert checks["RDMA devices"].level == "info"
    assert not any(check.level in ("warning", "error") for check in checks.values())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read(machine: FakeMachine) -> None:
    (machine.root / "class/infiniband").mkdir(parents=True)
    (machine.root / "class/infiniband").chmod(0)
    assert rdma.devices() is None


def test_a_folder_that_cannot_be_read_is_unknown_not_none(machine: FakeMachine) -> None:
    machine.write("class/infiniband", "no folder")
    assert rdma.devices() is None
    assert by_name(_rdma_checks.checks())["RDMA devices"].level == "unknown"


def test_names_are_whole_names(machine: FakeMachine) -> None:
    """F11: mlx5_1 is not mlx5_10; and people count 2 before 10."""
    for index in range(12):
        machine.add(f"mlx5_{index}", THOR2 if index == 1 else CONNECTX7)
    assert [device.name for device in rdma.devices() or ()] == [f"mlx5_{index}" for index in range(12)]
    assert names(thor) == ["mlx5_1"]
    assert names(connectx) == [f"mlx5_{index}" for index in range(12) if index != 1]
    assert connectx.owns("mlx5_") is None
    assert connectx.owns("mlx5_99") is None
    assert connectx.owns("mlx5_1") is False


@pytest.mark.parametrize("name", ["rocep1s0f0", "ibp12s0", "mlx5_bond_0", "anything"])
def test_device_nodes_are_found_by_the_kernels_mapping(name: str, machine: FakeMachine) -> None:
    """F13."""
    machine.add("mlx5_3", node="uverbs0")
    machine.add(name, node="uverbs7")
    nodes = {device.name: device.node for device in rdma.devices() or ()}
    assert nodes == {"mlx5_3": str(machine.dev / "uverbs0"), name: str(machine.dev / "uverbs7")}
    assert set(names(connectx)) == {"mlx5_3", name}


def test_two_ports_that_are_two_devices(machine: FakeMachine, libibverbs: dict[str, Any]) -> None:
    """F15: one GUID, both port 1; what tells them apart is the PCI function and the interface."""
    machine.add("mlx5_0", address="0000:3b:00.0", netdevs={"eth0": 9000})
    other = [(at, gid, kind, "eth1") for at, gid, kind, _ in ROCE]
    machine.add("mlx5_1", address="0000:3b:00.1", netdevs={"eth1": 9000}, ports=[Port(gids=other)])
    found = rdma.devices() or ()
    assert len({device.node_guid for device in found}) == 1
    assert [(one.name, one.address, one.ports[0].gids[3].netdev) for one in found] == [
        ("mlx5_0", "0000:3b:00.0", "eth0"),
        ("mlx5_1", "0000:3b:00.1", "eth1"),
    ]
    checks = by_name(connectx.doctor())
    assert "0000:3b:00.1" in checks["device mlx5_1"].found
    assert "eth1" in checks["mlx5_1 port 1"].found


# ---------------------------------------------------------------------------------------------------------- the vendors


def test_each_vendor_has_its_own(machine: FakeMachine) -> None:
    machine.add("mlx5_0", CONNECTX7)
    machine.add("rocep59s0", THOR2)
    machine.add("ionic_0", POLLARA)
    machine.add("odd0", STRANGER)
    assert [names(module) for module in (connectx, thor, pollara)] == [["mlx5_0"], ["rocep59s0"], ["ionic_0"]]
    assert backends.owners("rocep59s0") == ["thor"]
    assert backends.owners("odd0") == []
    checks = by_name(_rdma_checks.checks())
    assert "no installed backend is for this vendor" in checks["device odd0"].found
    assert "1af4:10f1" in checks["device odd0"].found
    assert "device mlx5_0" not in checks


def test_a_good_nic(machine: FakeMachine, libibverbs: dict[str, Any]) -> None:
    machine.add("mlx5_0")
    checks = by_name(connectx.doctor())
    assert {check.level for check in checks.values()} == {"ok"}
    found = checks["device mlx5_0"].found
    assert all(part in found for part in ("ConnectX", "15b3:1021", "firmware 28", "0000:10:00.0", "NUMA node 0"))
    assert "GID 3, RoCE v2, ::ffff:10.0.0.1, eth0" in checks["mlx5_0 port 1"].found
    assert not list(thor.doctor())


def test_without_ipv4_a_global_address_comes_first(machine: FakeMachine, libibverbs: dict[str, Any]) -> None:
    """C1."""
    link_local = "fe80:0000:0000:0000:0000:0000:0000:0001"
    gids = [
        (0, link_local, "IB/RoCE v1", "eth0"),
        (1, link_local, "RoCE v2", "eth0"),
        (2, "fd93:0000:0000:0000:0000:0000:0000:0002", "RoCE v2", "eth0"),
    ]
    machine.add("bnxt_re0", THOR2, firmware="237.1.137.0", ports=[Port(gids=gids)])
    assert "GID 2, RoCE v2, fd93::2" in by_name(thor.doctor())["bnxt_re0 port 1"].found


@pytest.mark.parametrize(
    ("port", "level", "advice"),
    [
        (Port(state="1: DOWN", physical="3: Disabled"), "warning", "ip link set eth0 up"),
        (Port(state="1: DOWN", physical="2: Polling", layer="InfiniBand", gids=()), "warning", "cable"),
        (Port(state="2: INIT", layer="InfiniBand", gids=()), "warning", "opensm"),
        (Port(gids=ROCE[:1]), "warning", "ip addr add"),
        (Port(gids=()), "warning", "ip addr add"),
        (Port(gids=[(at, gid, "", "eth0") for at, gid, _, _ in ROCE]), "unknown", ""),
        (Port(layer="InfiniBand", gids=(), pkeys=("0x7fff",)), "warning", "subnet manager"),
        (Port(layer="InfiniBand", gids=(), pkeys=("0x7fff", "0x8001")), "ok", ""),
        (Port(state=""), "unknown", ""),
    ],
)
def test_ports(port: Port, level: str, advice: str, machine: FakeMachine, libibverbs: dict[str, Any]) -> None:
    machine.add("mlx5_0", ports=[port])
    check = by_name(connectx.doctor())["mlx5_0 port 1"]
    assert check.level == level
    assert advice in check.advice
    assert bool(advice) == bool(check.advice)


def test_a_small_mtu_is_a_hint(machine: FakeMachine, libibverbs: dict[str, Any]) -> None:
    machine.add("mlx5_0", netdevs={"eth0": 1500})
    check = by_name(connectx.doctor())["mlx5_0 port 1"]
    assert check.level == "ok"
    assert "MTU 1500" in check.found
    assert "mtu 9000" in check.advice


def test_no_device_node(machine: FakeMachine, libibverbs: dict[str, Any]) -> None:
    machine.add("mlx5_0", node=None)
    machine.add("mlx5_1")
    (machine.dev / "uverbs1").unlink()
    machine.add("mlx5_2")
    (machine.dev / "uverbs2").unlink()
    (machine.dev / "uverbs2").write_text("")
    checks = by_name(connectx.doctor())
    assert "ib_uverbs" in checks["device mlx5_0"].advice
    assert "--device=" in checks["device mlx5_1"].advice
    assert "no device node" in checks["device mlx5_2"].advice
    assert {checks[f"device mlx5_{index}"].level for index in range(3)} == {"warning"}


def test_no_permission(machine: FakeMachine, libibverbs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    machine.add("mlx5_0")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    check = by_name(connectx.doctor())["device mlx5_0"]
    assert check.level == "warning"
    assert "udev rule" in check.advice


@pytest.mark.parametrize(
    ("told", "advice"),
    [
        ({"rdma_core": 44}, "rdma-core 44 has no ionic: 61 or newer has"),
        ({"rdma_core": 65, "providers": ("mlx5",)}, "its provider ionic is missing"),
        ({"rdma_core": 65, "providers": ("ionic",)}, "different releases"),
        ({"rdma_core": None}, "different releases"),
    ],
)
def test_a_nic_that_libibverbs_does_not_see(
    told: dict[str, Any], advice: str, machine: FakeMachine, libibverbs: dict[str, Any]
) -> None:
    machine.add("ionic_0", POLLARA)
    libibverbs.update(told, devices=())
    check = by_name(pollara.doctor())["device ionic_0"]
    assert check.level == "warning"
    assert advice in check.advice
    assert "AINIC" in check.advice


@pytest.mark.parametrize(
    ("firmware", "level"), [("237.1.137.0", "ok"), ("231.2.5.0", "warning"), ("", "unknown"), ("235.0", "ok")]
)
def test_firmware(firmware: str, level: str, machine: FakeMachine, libibverbs: dict[str, Any]) -> None:
    machine.add("bnxt_re0", THOR2, firmware=firmware)
    assert by_name(thor.doctor())["bnxt_re0 firmware"].level == level


def test_a_library_that_was_not_built_is_no_alarm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("uccl_ep.paths.library_dir", lambda: tmp_path)
    with pytest.raises(uccl_ep_errors().MissingPackage, match="libibverbs-dev"):
        connectx.library()


def uccl_ep_errors() -> Any:
    return importlib.import_module("uccl_ep.errors")


# ----------------------------------------------------------------------------------------------------------- libibverbs


@pytest.mark.parametrize(
    ("told", "devices", "level", "word"),
    [
        ({"problem": "libibverbs.so.1: cannot open: install rdma-core"}, 0, "info", "install rdma-core"),
        ({"problem": "libibverbs.so.1: cannot open: install rdma-core"}, 1, "warning", "install rdma-core"),
        ({"lacks": ("dmabuf: rdma-core 34",)}, 1, "warning", "rdma-core 34"),
        ({"lacks": ("dmabuf: rdma-core 34",)}, 0, "ok", "rdma-core 34"),
        ({"devices": None}, 1, "warning", "modprobe ib_uverbs"),
        ({"devices": None}, 0, "ok", ""),
        ({}, 1, "ok", ""),
    ],
)
def test_libibverbs(
    told: dict[str, Any], devices: int, level: str, word: str, machine: FakeMachine, libibverbs: dict[str, Any]
) -> None:
    for index in range(devices):
        machine.add(f"mlx5_{index}")
    libibverbs.update(told)
    check = _rdma_checks.libibverbs(rdma.devices())
    assert check.level == level
    assert word in check.advice


def test_libibverbs_that_is_not_there() -> None:
    told = _libibverbs.look("/nonexistent/libibverbs.so.1")
    assert "install rdma-core" in told.problem
    assert _libibverbs.look("libc.so.6").problem.startswith("it lacks ibv_get_device_list")


def test_attributes_come_from_pyverbs(tmp_path: Path) -> None:
    """Where it is installed: here a package of that name, with its interface."""
    package = tmp_path / "pyverbs"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "device.py").write_text(
        "class Told:\n    max_qp, max_qp_wr, vendor_part_id = 7, 8, 4129\n"
        "class Context:\n"
        "    def __init__(self, name):\n        assert name != 'mlx5_1', 'no permission'\n"
        "    def __enter__(self):\n        return self\n"
        "    def __exit__(self, *_):\n        pass\n"
        "    def query_device(self):\n        return Told\n"
    )
    code = "from uccl_ep import _libibverbs as l; import json; print(json.dumps(l._attributes(('mlx5_0', 'mlx5_1'))))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout
    assert json.loads(said) == {"mlx5_0": {"max_qp": 7, "max_qp_wr": 8, "vendor_part_id": 4129}}


# ----------------------------------------------------------------------------------------------------------- GPU memory


@pytest.mark.parametrize(
    ("modules", "linux", "level", "words"),
    [
        ((), "6.1", "info", ("no GPU's driver",)),
        (("nvidia", "nvidia_peermem"), "5.4", "ok", ("550.54", "nvidia_peermem is loaded", "too old for dmabufs")),
        (("nvidia",), "6.1", "ok", ("can register dmabufs", "no nvidia_peermem")),
        (("nvidia",), "5.4.0-generic", "warning", ("modprobe nvidia_peermem",)),
        (("amdgpu",), "6.1", "ok", ("can register dmabufs",)),
        (("amdgpu", "ib_peer_mem"), "4.18", "ok", ("ib_peer_mem is loaded",)),
    ],
)
def test_ways_into_gpu_memory(
    modules: tuple[str, ...], linux: str, level: str, words: tuple[str, ...], machine: FakeMachine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for module in modules:
        machine.write(f"module/{module}/version", "550.54.15")
    monkeypatch.setattr("platform.release", lambda: linux)
    (check,) = _rdma_checks.peer_memory()
    assert check.level == level
    for word in words:
        assert word in check.found + check.advice


# ---------------------------------------------------------------------------------------------------------- the command


def test_devices_shows_the_map(machine: FakeMachine) -> None:
    machine.add("mlx5_0")
    machine.add("bnxt_re0", THOR2, ports=[Port(state="1: DOWN")])
    done = uccl_ep_command("devices", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    shown = {one["name"]: one for one in json.loads(done.stdout)["rdma"]}
    assert [one["backends"] for one in shown.values()] == [["thor"], ["connectx"]]
    assert shown["mlx5_0"]["ports"][0]["gids"][3]["address"] == "::ffff:10.0.0.1"
    assert shown["bnxt_re0"]["ports"][0]["state"] == "DOWN"
    text = uccl_ep_command("devices", COLUMNS="220").stdout
    for word in ("mlx5_0", "bnxt_re0", "0000:10:00.0", "GID 3: ::ffff:10.0.0.1, RoCE v2 (eth0)", "DOWN", "thor"):
        assert word in text


def test_the_findings_need_no_tools(machine: FakeMachine, tmp_path: Path) -> None:
    """F7: no ip, ibv_devinfo, nvidia-smi or numactl."""
    machine.add("mlx5_0")
    (tmp_path / "bin").mkdir()
    for command in ("devices", "doctor"):
        usual, bare = (
            json.loads(uccl_ep_command(command, "--json", **environment).stdout)
            for environment in ({}, {"PATH": str(tmp_path / "bin")})
        )
        for answer in (usual, bare):
            answer["checks"] = [one for one in answer.get("checks", []) if one["name"] != "shm: memory"]
        assert usual == bare


def test_a_machine_without_anything(tmp_path: Path) -> None:
    """J5, L7: no RDMA, no libibverbs, no driver of a GPU: nothing alarming, and what is missing is listed."""
    nothing = {"SYSFS_PATH": str(tmp_path), "UCCL_EP_LIBIBVERBS": str(tmp_path / "libibverbs.so.1")}
    done = uccl_ep_command("doctor", "--json", **nothing)
    assert (done.returncode, done.stderr) == (0, "")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["RDMA devices"]["level"] == checks["libibverbs"]["level"] == "info"
    assert "install rdma-core" in checks["libibverbs"]["advice"]
    for backend in ("connectx", "thor", "pollara"):
        assert checks[f"backend {backend}"]["level"] == "info"
    code = "import uccl_ep, sys; assert not {'pyverbs', 'torch', 'ctypes.util'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **nothing})
    assert uccl_ep_command("--help", **nothing).returncode == 0


@pytest.mark.parametrize("command", ["devices", "conformance"])
def test_a_wrong_backend_has_a_nearest_one(command: str) -> None:
    """M9."""
    done = uccl_ep_command(command, "--backend", "conectx", COLUMNS="200")
    assert done.returncode == 2
    assert "known: connectx, efa, pollara, shm, sim, thor; did you mean 'connectx'?" in done.stderr
