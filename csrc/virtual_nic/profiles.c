/* SPDX-License-Identifier: Apache-2.0
 *
 * profiles.c: the NICs that we know, as settings of the knobs.
 *
 * Each profile names its sources. "chosen" marks a number that no public source gives: it is there so that the limit
 * exists and is met, not because the device is known to have it. docs/simulator.md has the same table for people.
 * What no source says a NIC guarantees is not set here, also where the device at hand may well do it.
 */
#include "knobs.h"

#include <stddef.h>
#include <string.h>

#define MICROSECONDS 1000ull
#define MILLISECONDS 1000000ull

/* How long things take, alike for all: chosen so that each order of events is likely at small scales. */
#define TIMES                                                                                                          \
    .delay = 2 * MICROSECONDS, .pieces = 4, .step_ns = 20, .visible_delay = 3 * MICROSECONDS, .inline_percent = 25
/* Reliable connections: a queue pair a peer, retries that run out, an error that stops the queue. */
#define RELIABLE_CONNECTION                                                                                            \
    .per_peer_qp = 1, .completion_order = VNIC_COMPLETES_IN_ORDER, .completion_level = VNIC_LEVEL_ACK,                 \
    .unsignalled_ok = 1, .has_read = 1, .flush_local = 1, .imm_bits = 32, .imm_consumes_rq = 1, .rnr = VNIC_RNR_RETRY, \
    .rnr_retries = 7, .addr_mode = VNIC_ADDRESS_VIRTUAL, .key_bits = 32, .error_scope = VNIC_ERROR_QP,                 \
    .dead_peer = VNIC_SILENCE_TIMEOUT, .own_memory = 1
/* Executed at the responder in order, also on its PCIe side. */
#define IN_ORDER                                                                                                       \
    .place_order = VNIC_PLACE_STRICT, .order_write_write = 1, .order_write_atomic = 1, .order_write_imm = 1,           \
    .signals_strict = 1, .read_flushes = 1

/* Where no order is known: an acknowledged write is in the NIC, and the next one may be sooner in memory. */
#define UNORDERED .late_overwrite = 1

/* rdma-core v65 providers/mlx5 and mlx5dv.h; limits: ibv_devinfo -v of a ConnectX-7 in openucx issue 10325. */
#define CONNECTX                                                                                                       \
    RELIABLE_CONNECTION, TIMES, .fence_kind = VNIC_FENCE_ATOMICS, /* mlx5dv.h: waits for reads and atomics only */     \
        .max_inline = 220, .max_sge = 30, .max_msg = 1u << 30, .max_wr = 32768, .max_cqe = 4194303, .max_qp = 131072,  \
                                .srq = 1, .atomics = VNIC_ATOMICS_NIC /* atomic_cap ATOMIC_HCA */,                     \
                                .responder_atomics = 16 /* max_qp_rd_atom, of a queue */,                              \
                                .responder_scope = VNIC_SCOPE_QUEUE,                                                   \
                                .retry_ns = 500 * MILLISECONDS /* timeout 14, retry_cnt 7 */, .vendor = VNIC_NVIDIA

/* rdma-core v65 providers/efa, efa_io_defs.h; amzn-drivers SRD.txt; fi_efa(7). */
#define EFA                                                                                                            \
    TIMES, UNORDERED,                                                                                                  \
        .completion_order = VNIC_COMPLETES_ANY, .completion_level = VNIC_LEVEL_ACK /* SRD: responder accepted */,      \
        .has_read = 1, .flush_local = 1, .max_sge = 1, .max_msg = 1u << 30 /* max_rdma_size is queried; chosen */,     \
        .max_wr = 4096 /* LLQ of 512 KiB, 128-byte requests */, .max_cqe = 1u << 20 /* queried; chosen */,             \
        .max_qp = 256 /* libfabric issue 9356 */, .srq = 1 /* one receive queue of the one QP */, .imm_bits = 32,      \
        .rnr = VNIC_RNR_RETRY /* RNR_RETRY capability */, .rnr_retries = 7, .needs_target_ah = 1 /* fi_efa(7) */,      \
        .addr_mode = VNIC_ADDRESS_VIRTUAL, .key_bits = 32, .error_scope = VNIC_ERROR_WR /* the QP stays in RTS */,     \
        .dead_peer = VNIC_SILENCE_TIMEOUT, .retry_ns = 1000 * MILLISECONDS /* status 13; chosen */, .own_memory = 1,   \
        .vendor = VNIC_AMAZON

/* rdma-core v61 providers/ionic, kernel ionic_rdma. Multipath spraying: order at the responder is not documented, so
 * none is set; completions are in order (message sequence numbers). */
#define POLLARA                                                                                                        \
    RELIABLE_CONNECTION, TIMES, UNORDERED,                                                                             \
        .cqe_cumulative = 1 /* send-MSN completions */, .fence_kind = VNIC_FENCE_ATOMICS,                              \
        .max_inline = 32 /* 64-byte stride */, .max_sge = 8, .max_msg = 1u << 31, .max_wr = 65535, .max_cqe = 65435,   \
        .flush_by = VNIC_FLUSH_PROVIDER, .retry_exc_inflight_bytes = 2097152 /* UCCL_IB_MAX_INFLIGHT_BYTES */,         \
        .drop_rate = 1 /* shared doorbell page; chosen */, .retry_ns = 500 * MILLISECONDS, .vendor = VNIC_PENSANDO

static const vnic_profile profiles[] = {
    {"connectx",
     "NVIDIA ConnectX-7, reliable connections, strict ordering",
     "NVIDIA",
     "ConnectX-7 RC",
     "any",
     {CONNECTX, IN_ORDER}},
    {"connectx-ro",
     "ConnectX-7 with relaxed PCIe ordering or adaptive routing",
     "NVIDIA",
     "ConnectX-7 RC, relaxed ordering",
     "any",
     /* ibv_reg_mr(3): writes are no longer ordered, completions imply visibility of prior data; nccl issue 2210:
      * atomics are not taken to be ordered behind them. */
     {CONNECTX, UNORDERED, .relaxed = 1, .ro_atomic_ordered = 0, .place_order = VNIC_PLACE_NONE,
      .order_write_atomic = 1, .order_write_imm = 1, .imm_visible = 1}},
    {"efa",
     "AWS EFA, second generation (p5): SRD, no order at all, no atomics",
     "Amazon",
     "EFA efa2 SRD",
     "queried",
     /* ibv_query_qp_data_in_order: aligned 128-byte blocks. Immediates take receives. */
     {EFA, .place_order = VNIC_PLACE_BLOCKS, .imm_consumes_rq = 1}},
    {"efa3",
     "AWS EFA, third generation (p5en): payloads may land twice",
     "Amazon",
     "EFA efa3 SRD",
     "queried",
     /* aws-ofi-nccl platform-aws.cpp: no 128-byte guarantee, since a payload may be written twice. 128-byte requests:
      * inline 80 (rdma-core v63); unsolicited receives (v52). */
     {EFA, .place_order = VNIC_PLACE_NONE, .dup_write = 25, .max_inline = 80, .imm_consumes_rq = 1, .unsolicited = 1}},
    {"thor2",
     "Broadcom Thor2: reliable connections, retries run out above 1.5 MB in flight",
     "Broadcom",
     "BCM57608 Thor2 RC",
     "235.x",
     /* rdma-core v65 providers/bnxt_re; limits: uccl issue 250; batches: uccl issue 972, the number is chosen. */
     {RELIABLE_CONNECTION,
      TIMES,
      IN_ORDER,
      .cqe_cumulative = 1 /* up to con_idx */,
      .fence_kind = VNIC_FENCE_ATOMICS,
      .max_inline = 96,
      .max_sge = 6,
      .max_msg = 1u << 30,
      .max_wr = 4351,
      .max_cqe = 8388607,
      .max_qp = 131073,
      .max_batch = 64,
      .srq = 1,
      .atomics = VNIC_ATOMICS_NIC,
      .responder_atomics = 126,
      .responder_scope = VNIC_SCOPE_QUEUE,
      .flush_by = VNIC_FLUSH_PROVIDER,
      .retry_exc_inflight_bytes = 1572864 /* UCCL_IB_MAX_INFLIGHT_BYTES; uccl issues 250, 360, 617, 799 */,
      .drop_rate = 2 /* doorbells overflow under load (DBR pacing); the number is chosen */,
      .retry_ns = 500 * MILLISECONDS,
      .vendor = VNIC_BROADCOM}},
    {"pollara",
     "AMD Pensando Pollara 400: sprayed packets, 16 responder resources for the whole device",
     "AMD Pensando",
     "Pollara 400 RC",
     "1.117",
     {POLLARA, .atomics = VNIC_ATOMICS_NIC, .responder_atomics = 16 /* mooncake PR 3977 */,
      .responder_scope = VNIC_SCOPE_DEVICE, .responder_over = VNIC_OVER_FAIL}},
    {"pollara-noatomic",
     "Pollara as some stacks report it: atomic_cap NONE",
     "AMD Pensando",
     "Pollara 400 RC, no atomics",
     "1.117",
     /* mori issue 497 */
     {POLLARA}},
    {"cxi",
     "HPE Slingshot: completion at transmit, visible on request, 64-bit keys, offsets",
     "HPE",
     "Cassini RDM",
     "SHS",
     /* fi_cxi(7), libfabric prov/cxi; fence+delivery: chapel PR 24880, opt-in here by fence_kind=delivered. */
     {TIMES,
      UNORDERED,
      .place_order = VNIC_PLACE_NONE,
      .completion_order = VNIC_COMPLETES_ANY,
      .completion_level = VNIC_LEVEL_TX,
      .unsignalled_ok = 1,
      .visible_on_request = 1,
      .has_read = 1,
      .flush_local = 1,
      .max_inline = 192,
      .max_sge = 1,
      .max_msg = UINT32_MAX,
      .max_wr = 16384,
      .max_cqe = 131072,
      .max_qp = 128 /* ep_cnt */,
      .atomics = VNIC_ATOMICS_NIC,
      .addr_mode = VNIC_ADDRESS_OFFSET,
      .key_bits = 64 /* FI_MR_PROV_KEY */,
      .error_scope = VNIC_ERROR_WR,
      .backpressure = VNIC_FULL_AGAIN,
      .dead_peer = VNIC_SILENCE_TIMEOUT,
      .retry_ns = 1000 * MILLISECONDS,
      .own_memory = 1,
      .vendor = VNIC_HPE}},
    {"strawman-min",
     "reliable one-sided writes and a truthful completion: the least that the contract admits",
     "nobody",
     "strawman",
     "0",
     {TIMES, .place_order = VNIC_PLACE_NONE, .completion_order = VNIC_COMPLETES_ANY,
      .completion_level = VNIC_LEVEL_DELIVERY, .max_sge = 1, .max_msg = 65536, .max_wr = 64, .max_cqe = 4096,
      .addr_mode = VNIC_ADDRESS_OFFSET, .key_bits = 32, .error_scope = VNIC_ERROR_WR, .backpressure = VNIC_FULL_AGAIN,
      .dead_peer = VNIC_SILENCE_FOREVER, .vendor = VNIC_NOBODY}},
};

const vnic_profile *vnic_profile_at(uint32_t i) {
    return i < sizeof profiles / sizeof *profiles ? &profiles[i] : NULL;
}

const vnic_profile *vnic_profile_named(const char *name) {
    for (uint32_t i = 0; vnic_profile_at(i); i++)
        if (name && !strcmp(profiles[i].name, name)) return &profiles[i];
    return NULL;
}
