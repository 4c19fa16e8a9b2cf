# SPDX-License-Identifier: Apache-2.0
"""Broadcom Thor and Thor2, over libibverbs (bnxt_re)."""

from __future__ import annotations

from ._verbs import Vendor

VENDOR = Vendor(
    backend="thor",
    family="Thor",
    vendor_ids=(0x14E4,),
    parts=(range(0x1750, 0x1770), range(0x1806, 0x180A), range(0x1819, 0x181C)),
    drivers=("bnxt_en",),
    modules=("bnxt_en", "bnxt_re"),
    provider="bnxt_re",
    rdma_core=16,
    source="Broadcom's bnxt_re and libbnxt_re of one release",
    # Drivers and firmware below 235 are too old for Thor2's dmabufs and its queues (docs/verbs.md).
    oldest_firmware=(235,),
)
SUMMARY = "Broadcom Thor and Thor2: reliable connections over libibverbs"
library, doctor, owns = VENDOR.library, VENDOR.doctor, VENDOR.owns
