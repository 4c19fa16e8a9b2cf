# SPDX-License-Identifier: Apache-2.0
"""AWS Elastic Fabric Adapter, over libibverbs and libefa (scalable reliable datagrams)."""

from __future__ import annotations

from collections.abc import Iterator

from .. import _libibverbs, rdma
from ..doctor import Check
from ._verbs import Vendor

VENDOR = Vendor(
    backend="efa",
    family="EFA",
    vendor_ids=(0x1D0F,),
    parts=(range(0xEFA0, 0xEFB0),),
    drivers=("efa",),
    modules=("efa",),
    provider="efa",
    rdma_core=46,
    source="AWS's EFA installer",
)
SUMMARY = "AWS EFA: scalable reliable datagrams over libibverbs and libefa"
library, owns = VENDOR.library, VENDOR.owns


def doctor() -> Iterator[Check]:
    yield from VENDOR.doctor()
    mine = [device for device in rdma.devices() or () if VENDOR.made(device)]
    told = _libibverbs.look(_libibverbs.name())
    if not mine or told.rdma_core is None:
        return
    name = "EFA in user space"
    if told.rdma_core < VENDOR.rdma_core:
        advice = f"it has no RDMA write: {VENDOR.rdma_core} or newer, or {VENDOR.source}"
        yield Check(name, "warning", f"rdma-core {told.rdma_core}", advice)
    elif told.rdma_core < 52:
        advice = f"immediates take receives, which costs a little: 52 or newer has them without, or {VENDOR.source}"
        yield Check(name, "ok", f"rdma-core {told.rdma_core}", advice)
    else:
        yield Check(name, "ok", f"rdma-core {told.rdma_core}")
