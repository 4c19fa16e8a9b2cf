# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of GPUs, there or not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from uccl_ep import _gpu_checks, doctor, paths
from uccl_ep.accel import inventory, library
from uccl_ep.accel.inventory import Gpu, Probed
from uccl_ep.doctor import Check

from .test_cli import uccl_ep_command

BIG = Gpu(
    index=0,
    name="Big GPU",
    architecture="sm_90",
    address="0000:05:00.0",
    driver="CUDA 13.0",
    unusable="",
    numa_node=1,
    warp_size=32,
    multiprocessors=132,
    memory_bytes=139 << 30,
    clock_hz=10**9,
    writes_ordering="ordered",
    can_flush=True,
    dmabuf=True,
    ipc=True,
    host_atomics=False,
)
NOTHING = Probed([], "libcuda.so.1: cannot open shared object file; install an NVIDIA driver")
EMULATION = Probed([replace(BIG, name="CPU emulation", architecture="cpu")], "")


def said(cuda: Probed, hip: Probed = NOTHING) -> dict[str, Check]:
    return {check.name: check for check in _gpu_checks.checks({"cuda": cuda, "hip": hip, "cpu": EMULATION})}


def test_a_gpu_that_can_all() -> None:
    checks = said(Probed([BIG, replace(BIG, index=1, numa_node=None)], ""))
    found = checks["gpu cuda:0"].found
    assert all(part in found for part in ("Big GPU", "sm_90", "139 GiB", "132", "CUDA 13.0", "0000:05:00.0", "node 1"))
    assert "NUMA node unknown" in checks["gpu cuda:1"].found
    assert "no flush is needed" in checks["gpu cuda:0: what NICs write"].found
    assert checks["gpu cuda:0: for NICs"].found.startswith("dmabuf")
    assert "are not atomic" in checks["gpu cuda:0: host atomics"].found
    assert "gpus" not in checks
    assert {check.level for name, check in checks.items() if name.startswith("gpu ")} <= {"ok", "info"}


@pytest.mark.parametrize(
    ("ordering", "flush", "level", "word"),
    [
        ("ordered_all", False, "ok", "all GPUs"),
        ("ordered", False, "ok", "its own kernels"),
        ("unordered", True, "ok", "flushed"),
        ("unordered", False, "warning", "no flush"),
    ],
)
def test_the_order_of_what_nics_write(ordering: str, flush: bool, level: str, word: str) -> None:
    check = said(Probed([replace(BIG, writes_ordering=ordering, can_flush=flush)], ""))["gpu cuda:0: what NICs write"]
    assert (check.level, word in check.found) == (level, True)
    assert bool(check.advice) == (level == "warning")


def test_how_nics_reach_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Probed([replace(BIG, dmabuf=False)], "")
    modules = "nvidia_uvm 4096 0 - Live 0x0\n"
    monkeypatch.setattr(_gpu_checks, "read_text", lambda path: modules)
    check = said(gpu)["gpu cuda:0: for NICs"]
    assert check.level == "warning"
    assert "load nvidia_peermem" in check.advice
    assert "nvidia" not in said(NOTHING, gpu)["gpu hip:0: for NICs"].found
    modules = "nvidia_peermem 16384 0 - Live 0x0\n" + modules
    assert (said(gpu)["gpu cuda:0: for NICs"].level, said(gpu)["gpu cuda:0: for NICs"].found) == (
        "ok",
        "nvidia_peermem",
    )


def test_one_that_cannot_be_used_or_shared() -> None:
    checks = said(Probed([replace(BIG, unusable="architecture sm_61: sm_70 or newer is needed")], ""))
    assert (checks["gpu cuda:0"].level, "sm_70" in checks["gpu cuda:0"].advice) == ("warning", True)
    assert "gpu cuda:0: for NICs" not in checks
    assert said(Probed([replace(BIG, ipc=False)], ""))["gpu cuda:0: other processes"].level == "warning"


def test_none_says_what_would_be_needed() -> None:
    checks = said(NOTHING)
    assert checks["gpus of cuda"].found.startswith("none: libcuda.so.1")
    assert checks["gpus of cuda"].advice == "install an NVIDIA driver"
    assert "host memory" in checks["gpus"].found


def test_a_library_that_is_none() -> None:
    for bad in (paths.core_library(), Path("/nowhere/at/all.so")):
        probed = inventory.probe_apart(bad)
        assert not probed.gpus
        assert probed.problem


def test_the_emulation_is_a_device() -> None:
    (gpu,) = inventory.probe_apart(library("cpu")).gpus
    assert (gpu.architecture, gpu.unusable) == ("cpu", "")
    assert gpu == inventory.probe(library("cpu")).gpus[0]


def test_the_command_tells_and_has_it_as_json() -> None:
    answer = json.loads(uccl_ep_command("doctor", "--json").stdout)
    assert [one["kind"] for one in answer["gpus"]] == ["cuda", "hip", "cpu"]
    for one in answer["gpus"]:
        assert bool(one["gpus"]) != bool(one["problem"])
    names = {check["name"] for check in answer["checks"]}
    assert "gpu emulation" in names
    assert {check.name for check in doctor.examine().checks} == names
