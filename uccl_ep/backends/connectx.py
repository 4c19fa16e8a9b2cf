# SPDX-License-Identifier: Apache-2.0
"""NVIDIA ConnectX and BlueField, over libibverbs (mlx5)."""

from __future__ import annotations

from ._verbs import Vendor

VENDOR = Vendor(
    backend="connectx",
    family="ConnectX",
    vendor_ids=(0x15B3,),
    # From ConnectX-4 on; what is older speaks mlx4.
    parts=(range(0x1013, 0x1100), range(0xA2D0, 0xA300)),
    drivers=("mlx5_core",),
    modules=("mlx5_core", "mlx5_ib"),
    provider="mlx5",
    rdma_core=1,
    source="DOCA-OFED",
)
SUMMARY = "NVIDIA ConnectX and BlueField: reliable connections over libibverbs"
library, doctor, owns = VENDOR.library, VENDOR.doctor, VENDOR.owns
