# SPDX-License-Identifier: Apache-2.0
"""AMD Pensando Pollara 400, over libibverbs (ionic)."""

from __future__ import annotations

from ._verbs import Vendor

VENDOR = Vendor(
    backend="pollara",
    family="Pollara",
    vendor_ids=(0x1DD8,),
    parts=(),
    drivers=("ionic",),
    modules=("ionic", "ionic_rdma"),
    provider="ionic",
    rdma_core=61,
    source="AMD's AINIC bundle: driver, libionic and firmware of one release",
)
SUMMARY = "AMD Pensando Pollara: reliable connections over libibverbs"
library, doctor, owns = VENDOR.library, VENDOR.doctor, VENDOR.owns
