# SPDX-License-Identifier: Apache-2.0
"""The suite posted from kernels, on the CPU's emulation of a GPU: warps of every width, heaps of both kinds.

Level full is a night's (tools/nightly.sh), and a real GPU's is tests/gpu/test_conformance_gpu.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from uccl_ep.conformance import registry, runner
from uccl_ep.conformance.errors import SuiteError
from uccl_ep.conformance.runner import Options

if TYPE_CHECKING:
    from conftest import Conformance

LANE = ("--backend", "shm", "--lane", "gpu", "--accel", "cpu", "--ranks", "2")
SECONDS = 300.0
# What the lane has no means for, and all that needs it is left out.
LACKS = frozenset(registry.NEEDS) - {
    "threads", "standstill", "kill", "stop", "heaps", "gigabytes", "warps", "device"
}  # fmt: skip


def _check(report: dict[str, Any], said: str, heap: str, warp_size: int) -> None:
    assert report["summary"]["pass"] == len(report["cases"]), said[-6000:]
    assert report["lane"] == "gpu"
    device = report["accelerator"]
    assert (device["kind"], device["heap"], device["warp_size"]) == ("cpu", heap, warp_size)
    assert device["name"] in said
    assert report["histories"]["remarks"] == []


@pytest.mark.required_in_ci
def test_level_core(conformance: Conformance) -> None:
    status, report, said = conformance(*LANE, timeout=2 * SECONDS)
    assert status == 0, said[-6000:]
    _check(report, said, "host", 32)
    assert len(report["cases"]) >= 100
    without = {case.id for case in registry.load() if case.needs & LACKS and case.level == "core"}
    assert {name.partition("@")[0] for name in report["not_in_lane"]} == without


@pytest.mark.required_in_ci
@pytest.mark.parametrize(
    ("warp_size", "heap", "variant"), [(1, "host", ""), (64, "device", ""), (32, "device", "@unordered")]
)
def test_other_warps_and_heaps(conformance: Conformance, warp_size: int, heap: str, variant: str) -> None:
    """What looks at lanes and at memory: posting, and what a signal shows, with the cases of kernels' own; and that
    against the weakest promises."""
    globs = ["pub?.*", "thr1.*", "put1.*", "put2.*", "qui5.*", *([] if variant else ["abt1.kernel*"])]
    chosen = [word for glob in globs for word in ("--case", glob + variant)]
    level = "full" if variant else "core"
    status, report, said = conformance(
        *LANE, *chosen, "--warp-size", str(warp_size), "--heap", heap, "--level", level, timeout=SECONDS
    )
    assert status == 0, said[-6000:]
    _check(report, said, heap, warp_size)
    assert len(report["cases"]) >= 20
    if not variant:
        assert ("pub2.more_than_the_ring" in report["not_in_lane"]) == (warp_size == 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lane": "gpu"}, "--accel is missing"),
        ({"lane": "gpu", "accel": "vulkan"}, "--accel 'vulkan'"),
        ({"lane": "gpu", "accel": "cpu", "heap": "shared"}, "--heap 'shared'"),
        ({"lane": "gpu", "accel": "cpu", "warp_size": 16}, "--warp-size 16"),
        ({"lane": "gpu", "accel": "cuda", "warp_size": 32}, "--warp-size"),
        ({"accel": "cpu"}, "add --lane gpu"),
        ({"heap": "device"}, "add --lane gpu"),
        ({"warp_size": 1}, "add --lane gpu"),
        ({"lane": "gpu", "accel": "cpu", "backend": "sim"}, "go together"),
    ],
)
def test_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(SuiteError, match=said):
        runner.check(Options(**options))  # type: ignore[arg-type]


def test_cases_for_kernels_are_in_no_other_lane() -> None:
    """They need a device, and are listed as such."""
    options = Options()
    able, rest = runner.plan(options, runner.check(options), "ordered_atomic")
    mine = {case.id for case in registry.load() if "device" in case.needs and case.level == "core"}
    assert mine
    assert mine <= set(rest)
    assert not mine & {case.id for case in able}
