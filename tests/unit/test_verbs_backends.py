# SPDX-License-Identifier: Apache-2.0
"""connectx, thor and pollara from Python, on a libibverbs made of software: what is said of NICs, and messages."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from uccl_ep import Communicator, SingleProcess, backends, errors, paths, rdma
from uccl_ep.bootstrap import LocalGroup

from .fake_sysfs import POLLARA, THOR2, FakeMachine
from .test_cli import uccl_ep_command

pytestmark = pytest.mark.required_in_ci


@pytest.fixture
def machine(fake_libibverbs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """What libibverbs sees FAKE_IBVERBS names; what the kernel shows a test adds."""
    made = FakeMachine(tmp_path / "sys", tmp_path / "dev")
    made.root.mkdir()
    monkeypatch.setenv("UCCL_EP_LIBIBVERBS", str(fake_libibverbs))
    monkeypatch.setenv("SYSFS_PATH", str(made.root))
    monkeypatch.setattr(rdma, "DEVICE_NODES", made.dev)
    monkeypatch.setenv("FAKE_IBVERBS", "")
    return made


def create(**options: Any) -> Communicator:
    return Communicator(SingleProcess(), **{"heap_bytes": 1 << 16, "backend": "connectx", **options})


# ------------------------------------------------------------------------------------------------------- what is said


def test_devices_and_doctor_agree(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """D1, L7: what cannot be used does not hide the others, and is no alarm."""
    machine.add("mlx5_0")
    machine.add("bnxt_re0", THOR2, firmware="237.1.137.0")
    machine.add("ionic_0", POLLARA)
    monkeypatch.setenv("FAKE_IBVERBS", "mlx5_0;bnxt_re0,open_errno=13")
    done = uccl_ep_command("devices", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    mine = {(one["backend"], one["name"]): one for one in answer["devices"] if one["for_this_backend"]}
    nics = {key: one["unusable"] for key, one in mine.items() if key[0] in ("connectx", "thor", "pollara")}
    assert set(nics) == {("connectx", "mlx5_0"), ("thor", "bnxt_re0")}
    assert nics["connectx", "mlx5_0"] == ""
    assert "errno 13" in nics["thor", "bnxt_re0"]
    connectx = mine["connectx", "mlx5_0"]
    assert (connectx["vendor"], connectx["model"], connectx["firmware"]) == ("NVIDIA", "ConnectX-7", "28.43.1014")
    assert (connectx["address"], connectx["numa_node"]) == ("0000:10:00.0", 0)
    assert {"atomic_add64", "order_write_atomic", "imm_needs_receive"} <= set(connectx["caps"]["names"])
    # Whoever asks for one backend sees all that it sees; else each NIC is shown once.
    every, one = (
        uccl_ep_command("devices", *chosen, COLUMNS="240").stdout for chosen in ((), ("--backend", "connectx"))
    )
    assert [text.count("cannot be used") for text in (every, one)] == [1, 1]
    assert "thor     " in every.partition("cannot be used")[0].splitlines()[-1]
    assert "connectx" in one.partition("cannot be used")[0].splitlines()[-1]
    done = uccl_ep_command("doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["backend connectx"]["found"].endswith("1 usable of 1 devices")
    assert checks["backend thor"]["level"] == "warning"
    assert "errno 13" in checks["thor on bnxt_re0"]["advice"]
    assert checks["backend pollara"]["level"] == "info"
    assert checks["device ionic_0"]["level"] == "warning"


def test_a_wrong_name_has_a_nearest_one(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """F11, M9."""
    monkeypatch.setenv("FAKE_IBVERBS", ";".join(f"mlx5_{index}" for index in range(12)))
    with pytest.raises(errors.NoDevice, match=r"mlx5_99.*mlx5_0 mlx5_1.*did you mean 'mlx5_9'"):
        create(device="mlx5_99")
    with pytest.raises(errors.NoDevice, match="did you mean 'mlx5_1'"):
        create(device="mlx51")
    with pytest.raises(errors.NoDevice, match="did you mean 'mlx5_1'"):
        create(device="mlx5_0+mlx51:1")
    with pytest.raises(errors.NoDevice) as caught:
        create(device="mlx5_3:2")
    assert "it has 1" in str(caught.value)
    assert "did you mean" not in str(caught.value)
    with create(device="mlx5_1") as comm:
        assert comm.info.device.name == "mlx5_1"


@pytest.mark.parametrize(
    ("devices", "options", "kind", "words"),
    [
        ("", {}, errors.NoDevice, "no RDMA device"),
        ("mlx5_0,state=1", {}, errors.NoDevice, "port 1 is down"),
        ("mlx5_0,open_errno=13", {}, errors.NoDevice, "/dev/infiniband"),
        ("odd0,vendor=0x1234", {}, errors.NoDevice, "does not know"),
        ("bnxt_re0", {}, errors.NoDevice, "take the backend thor"),
        ("mlx5_0,gids=v1/fe80::1", {}, errors.NoDevice, "ip addr"),
        ("mlx5_0,memlock=4096", {}, errors.RegistrationError, "errno 12"),
        ("mlx5_0", {"backend_options": "retry=7"}, errors.CommandError, "for ever"),
        ("mlx5_0", {"backend_options": "library=/nonexistent.so"}, errors.NoDevice, "install rdma-core"),
        ("ionic_0", {"backend": "pollara", "strategy": "ordered_atomic"}, errors.CapabilityError, "atomic"),
    ],
)
def test_refusals(
    devices: str, options: dict[str, Any], kind: type[Exception], words: str, machine: FakeMachine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each of its own kind, and with the remedy."""
    monkeypatch.setenv("FAKE_IBVERBS", devices)
    with pytest.raises(kind, match=words):
        create(**options)


def test_a_library_that_was_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paths, "library_dir", lambda: tmp_path)
    with pytest.raises(errors.MissingPackage, match="libibverbs-dev"):
        backends.find("connectx")


# ----------------------------------------------------------------------------------------------------------- messages


def exchange(comm: Communicator, rounds: int) -> None:
    """All to all; whoever sees a signal sees the bytes before it (SIG-2)."""
    info = comm.info
    for number in range(1, rounds + 1):
        for peer in range(info.size):
            comm.heap[peer * 1024 : (peer + 1) * 1024] = (number * 7 + info.rank * 31 + peer) % 251
            target = (8 + info.rank) * 1024
            comm.channel(0).put(peer, peer * 1024, target, 512)
            comm.channel(0).put_signal(peer, peer * 1024 + 512, target + 512, 512, slot=info.rank)
        for peer in range(info.size):
            comm.wait_signal(peer, number)
            got = np.array(comm.heap[(8 + peer) * 1024 : (9 + peer) * 1024])
            assert (got == (number * 7 + peer * 31 + info.rank) % 251).all()
        comm.quiet()
        comm.barrier()


@pytest.mark.parametrize(
    ("backend", "devices", "strategy"),
    [
        ("connectx", "mlx5_0", "ordered_atomic"),
        ("thor", "bnxt_re0", "ordered_atomic"),
        ("pollara", "ionic_0", "sequenced_immediate"),
    ],
)
def test_three_ranks_as_threads(
    backend: str, devices: str, strategy: str, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_IBVERBS", devices)
    failures: list[BaseException] = []

    def rank(end: Any) -> None:
        try:
            with Communicator(end, heap_bytes=1 << 16, signals=16, backend=backend, timeout=20) as comm:
                assert comm.info.strategy == strategy
                exchange(comm, 20)
        except BaseException as failure:
            failures.append(failure)
            end.close()

    with LocalGroup(3) as group:
        threads = [threading.Thread(target=rank, args=(group.endpoint(index),)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
