/* SPDX-License-Identifier: Apache-2.0
 *
 * NVIDIA ConnectX and BlueField (mlx5).
 *
 * Sources: rdma-core providers/mlx5 (device table, mlx5dv.h for syndromes); ibv_devinfo -v of a ConnectX-7 in openucx
 * issue 10325. Requests of a reliable connection are executed, and seen, in order: the vendor's default without relaxed
 * ordering, without MLX5DV_QP_CREATE_OOO_DP (which is not asked for) and without adaptive routing on the service level.
 */
#include "../verbs/verbs.h"

#define WORTH_INLINE 220u /* larger requests make every place of the queue larger */

static const verbs_model models[] = {
    {0x1013, "ConnectX-4"},  {0x1015, "ConnectX-4 Lx"}, {0x1017, "ConnectX-5"},  {0x1019, "ConnectX-5 Ex"},
    {0x101b, "ConnectX-6"},  {0x101d, "ConnectX-6 Dx"}, {0x101e, "ConnectX VF"}, {0x101f, "ConnectX-6 Lx"},
    {0x1021, "ConnectX-7"},  {0x1023, "ConnectX-8"},    {0x1025, "ConnectX-9"},  {0x1027, "ConnectX-10"},
    {0xa2d6, "BlueField-2"}, {0xa2dc, "BlueField-3"},   {0xa2df, "BlueField-4"}, {0, NULL},
};

static void limit(const struct ibv_device_attr *attributes, verbs_limits *l) {
    (void)attributes;
    l->inline_bytes = WORTH_INLINE;
    l->ordered = true;
}

static const char *describe(uint32_t vendor_error) {
    switch (vendor_error) {
    case 0x81:
        return "retries exceeded";
    case 0x88:
        return "key or rights";
    case 0x93:
        return "page fault";
    default:
        return NULL;
    }
}

const char verbs_backend_name[] = "connectx";

const verbs_vendor verbs_this_vendor = {
    .vendor = "NVIDIA",
    .family = "ConnectX",
    .ids = {0x02c9, 0x15b3, 0x119f /* an OEM's */, 0},
    .pci = 0x15b3,
    .first_part = 0x1013, /* those before have other drivers (mlx4, Connect-IB) */
    .models = models,
    .limit = limit,
    .describe = describe,
};
