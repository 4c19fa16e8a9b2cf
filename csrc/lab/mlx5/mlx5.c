/* SPDX-License-Identifier: Apache-2.0
 *
 * mlx5.c: what a ConnectX answers to commands (rdma/mlx5-abi.h), and what it has.
 */
#include <errno.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/mlx5-abi.h>
#include <rdma/mlx5_user_ioctl_cmds.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "mlx5.h"

/* nics.md A1: ids of functions; firmware of the releases that its sources name. */
static const struct lab_variant variants[] = {
    {"cx7", "connectx", 0x02c9, 0x1021, 0, "28.43.2566", "pci:v000015B3d00001021sv000015B3sd00000023bc02sc07i00"},
    {"cx6", "connectx", 0x02c9, 0x101b, 0, "20.43.2566", "pci:v000015B3d0000101Bsv000015B3sd00000007bc02sc07i00"},
    {0}};

enum { MAX_SEND_ENTRY = 1024, MAX_RECEIVE_ENTRY = 512, MAX_BLOCKS = 32768, MAX_SHARED = 32767 };

static int query_device(lab_device *device, struct ib_uverbs_ex_query_device_resp *core, struct lab_call *call) {
    const struct mlx5_ib_query_device_resp reply = {.response_length = sizeof reply};
    (void)device;
    core->base.max_cq = 1u << 24;
    core->base.max_pd = 1u << 23;
    core->base.max_srq = 1u << 23;
    if (core->base.max_srq_wr > MAX_SHARED) core->base.max_srq_wr = MAX_SHARED;
    core->base.max_srq_sge = 31; /* its entries are powers of two, with one segment for the list */
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

/* Completions carry the program's own index (version 1), and queue pairs share its doorbell pages. What is not offered:
 * an adapter's clock, DEVX, ECE, inline scatter. */
static int open_context(lab_context *context, struct lab_call *call) {
    struct mlx5_ib_alloc_ucontext_req_v2 request;
    lab_request(call, &request, sizeof request);
    (void)context;
    if (request.flags || request.comp_mask) return EINVAL; /* DEVX: the library goes on without */
    const uint32_t pages = request.total_num_bfregs;
    if (!pages || pages > 1024 || pages % 2) return EINVAL;
    const struct mlx5_ib_alloc_ucontext_resp reply = {.qp_tab_size = 1u << 24,
                                                      .bf_reg_size = 512,
                                                      .tot_bfregs = pages,
                                                      .cache_line_size = 64,
                                                      .max_sq_desc_sz = MAX_SEND_ENTRY,
                                                      .max_rq_desc_sz = MAX_RECEIVE_ENTRY,
                                                      .max_send_wqebb = MAX_BLOCKS,
                                                      .max_recv_wr = MAX_BLOCKS,
                                                      .max_srq_recv_wr = MAX_SHARED,
                                                      .num_ports = 1,
                                                      .response_length = sizeof reply,
                                                      .cqe_version = request.max_cqe_version ? 1 : 0,
                                                      .cmds_supp_uhw = MLX5_USER_CMDS_SUPP_UHW_QUERY_DEVICE |
                                                                       MLX5_USER_CMDS_SUPP_UHW_CREATE_AH,
                                                      .eth_min_inline = MLX5_USER_INLINE_MODE_NONE,
                                                      .log_uar_size = 12,
                                                      .num_uars_per_page = 1,
                                                      .num_dyn_bfregs = 1024};
    if (!request.max_cqe_version) return lab_unsupported("a libmlx5 that knows only completions of version 0");
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

static int alloc_pd(lab_pd *pd, struct lab_call *call) {
    const struct mlx5_ib_alloc_pd_resp reply = {.pdn = pd->number};
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

static uint32_t power_of_two(uint32_t at_least) {
    uint32_t n = 1;
    while (n < at_least) n <<= 1;
    return n;
}

static int ring_check(uint64_t address, uint64_t bytes) {
    return address & 7 ? EINVAL : lab_memory_check(address, bytes, true);
}

static void *pointer(uint64_t address) {
    return (void *)(uintptr_t)address;
}

/* ------------------------------------------------------------------------------------------------------------- queues
 */

/* The library asks for one entry less than it has made room for: its ring is full only when one more is left. */
static int create_cq(lab_cq *lab, struct lab_call *call) {
    struct mlx5_ib_create_cq request;
    lab_request(call, &request, sizeof request);
    const struct mlx5_ib_create_cq_resp reply = {.cqn = lab->number};
    const uint32_t n = power_of_two(lab->entries + 1);
    if (request.cqe_size != 64 && request.cqe_size != 128) return EINVAL;
    if (request.cqe_comp_en) return lab_unsupported("compressed completions of a ConnectX");
    if (request.flags & ~(uint32_t)MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX)
        return lab_unsupported("flags 0x%x of a completion queue of a ConnectX", request.flags);
    if (ring_check(request.buf_addr, (uint64_t)n * request.cqe_size) || ring_check(request.db_addr, 8)) return EFAULT;
    struct mlx5_cq *cq = malloc(sizeof *cq);
    if (!cq) return ENOMEM;
    *cq = (struct mlx5_cq){.entries = pointer(request.buf_addr),
                           .doorbell = pointer(request.db_addr),
                           .n = n,
                           .size = request.cqe_size,
                           .arm = MLX5_NEVER,
                           .fired = 4};
    /* The first arming is a zero, as the record is: only another number tells them apart. The library never reads it.
     */
    __atomic_store_n(&cq->doorbell[1], MLX5_NEVER, __ATOMIC_RELEASE);
    lab->model_data = cq;
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

static int resize_cq(lab_cq *lab, uint32_t entries, struct lab_call *call) {
    struct mlx5_ib_resize_cq request;
    struct mlx5_cq *cq = lab->model_data;
    lab_request(call, &request, sizeof request);
    const uint32_t n = power_of_two(entries + 1);
    if (request.cqe_size != cq->size || ring_check(request.buf_addr, (uint64_t)n * cq->size)) return EFAULT;
    if (entries < mlx5_cq_used(lab)) return EINVAL;
    mlx5_move(cq, pointer(request.buf_addr), n);
    lab->entries = entries;
    return 0;
}

static void destroy_cq(lab_cq *cq) {
    free(cq->model_data);
}

static int create_srq(lab_srq *lab, struct lab_call *call) {
    struct mlx5_ib_create_srq request;
    lab_request(call, &request, sizeof request);
    const struct mlx5_ib_create_srq_resp reply = {.srqn = lab->number};
    if (request.flags) return lab_unsupported("signatures of work queue entries (MLX5_SRQ_SIGNATURE)");
    const uint32_t n = power_of_two(lab->max_wr + 1);
    const uint32_t stride = power_of_two((1 + lab->max_sge) * MLX5_UNIT < 32 ? 32 : (1 + lab->max_sge) * MLX5_UNIT);
    if (ring_check(request.buf_addr, (uint64_t)n * stride) || ring_check(request.db_addr, 8)) return EFAULT;
    struct mlx5_srq *srq = malloc(sizeof *srq);
    if (!srq) return ENOMEM;
    *srq = (struct mlx5_srq){.entries = pointer(request.buf_addr),
                             .doorbell = pointer(request.db_addr),
                             .n = n,
                             .shift = (uint32_t)__builtin_ctz(stride)};
    lab->model_data = srq;
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

static void destroy_srq(lab_srq *srq) {
    free(srq->model_data);
}

/* Receives come first in the memory of a queue pair, sends behind them. */
static int create_qp(lab_qp *lab, struct lab_call *call) {
    struct mlx5_ib_create_qp request;
    lab_request(call, &request, sizeof request);
    const struct mlx5_ib_create_qp_resp reply = {.bfreg_index = 1};
    const uint32_t harmless = MLX5_QP_FLAG_SCATTER_CQE | MLX5_QP_FLAG_ALLOW_SCATTER_CQE | MLX5_QP_FLAG_BFREG_INDEX |
                              MLX5_QP_FLAG_UAR_PAGE_INDEX;
    if (request.flags & MLX5_QP_FLAG_SIGNATURE)
        return lab_unsupported("signatures of work queue entries (MLX5_QP_SIGNATURE)");
    if (request.flags & ~harmless) return lab_unsupported("flags 0x%x of a queue pair of a ConnectX", request.flags);
    if (lab->type == LAB_SRD) return lab_unsupported("DC queue pairs of a ConnectX");
    const uint32_t receives = lab->srq ? 0 : request.rq_wqe_count, sends = request.sq_wqe_count;
    if (receives > MAX_BLOCKS || receives & (receives - 1) || sends > MAX_BLOCKS || sends & (sends - 1)) return EINVAL;
    if (receives && (request.rq_wqe_shift < 4 || request.rq_wqe_shift > 9)) return EINVAL;
    const uint64_t receive_bytes = (uint64_t)receives << request.rq_wqe_shift;
    if (ring_check(request.buf_addr, receive_bytes + (uint64_t)sends * MLX5_BLOCK) || ring_check(request.db_addr, 8))
        return EFAULT;
    struct mlx5_qp *qp = malloc(sizeof *qp);
    if (!qp) return ENOMEM;
    *qp = (struct mlx5_qp){.receives = pointer(request.buf_addr),
                           .sends = (uint8_t *)pointer(request.buf_addr) + receive_bytes,
                           .doorbell = pointer(request.db_addr),
                           .receive_n = receives,
                           .receive_shift = request.rq_wqe_shift,
                           .send_blocks = sends,
                           .index = request.uidx};
    lab->model_data = qp;
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

/* Both sides begin again at zero: the library clears the doorbell records once the command is through. */
static int modify_qp(lab_qp *lab, enum lab_qp_state from, struct lab_call *call) {
    struct mlx5_qp *qp = lab->model_data;
    (void)from, (void)call;
    if (lab->state == LAB_RESET) qp->received = qp->sent = 0;
    return 0;
}

static void destroy_qp(lab_qp *qp) {
    free(qp->model_data);
}

/* Every NIC of the lab has the MAC address that its GUID is made of. */
static int create_ah(lab_ah *ah, struct lab_call *call) {
    struct mlx5_ib_create_ah_resp reply = {.response_length = sizeof reply};
    static const uint8_t maker[5] = {0x02, 0x00, 0x00, 0x00, 0x00};
    memcpy(reply.dmac, maker, sizeof maker);
    reply.dmac[5] = ah->gid.s6_addr[15];
    lab_reply(call, &reply, sizeof reply);
    return 0;
}

/* ------------------------------------------------------------------------------------------------- pages and the rest
 */

/* Bits 8 to 15 of the page number are a command. Stores to doorbell pages go nowhere. */
static int map(lab_context *context, uint64_t offset, size_t bytes, int protection, void **address) {
    enum { REGULAR = 0, WRITE_COMBINED = 2, NOT_CACHED = 3, ALLOCATED = 6 };
    const unsigned command = (unsigned)(offset / (uint64_t)sysconf(_SC_PAGESIZE) >> 8 & 0xff);
    (void)context;
    if (command != REGULAR && command != WRITE_COMBINED && command != NOT_CACHED && command != ALLOCATED)
        return lab_unsupported("mmap() command %u of a ConnectX", command);
    if (bytes != (size_t)sysconf(_SC_PAGESIZE)) return EINVAL;
    *address = mmap(NULL, bytes, protection | PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return *address == MAP_FAILED ? errno : 0;
}

/* DEVX and doorbell pages on demand: libmlx5 asks whether they are there, and goes on without. */
static int method(lab_context *context, uint16_t object, uint16_t number, void *attributes) {
    (void)context, (void)attributes;
    if (object == UVERBS_OBJECT_DEVICE && number == UVERBS_METHOD_QUERY_CONTEXT)
        return lab_unsupported("a context of a ConnectX that is opened by a copy of its descriptor (import)");
    if (object == MLX5_IB_OBJECT_UAR || object == MLX5_IB_OBJECT_DEVX) return EOPNOTSUPP;
    return lab_unsupported("method 0x%x of object 0x%x of a ConnectX", number, object);
}

const struct lab_model lab_mlx5 = {.name = "connectx",
                                   .device_name = "mlx5_",
                                   .driver_id = RDMA_DRIVER_MLX5,
                                   .uverbs_abi = MLX5_IB_UVERBS_ABI_VERSION,
                                   .qpn_bits = 24,
                                   .variants = variants,
                                   .query_device = query_device,
                                   .open = open_context,
                                   .alloc_pd = alloc_pd,
                                   .create_cq = create_cq,
                                   .resize_cq = resize_cq,
                                   .destroy_cq = destroy_cq,
                                   .create_srq = create_srq,
                                   .destroy_srq = destroy_srq,
                                   .create_qp = create_qp,
                                   .modify_qp = modify_qp,
                                   .destroy_qp = destroy_qp,
                                   .create_ah = create_ah,
                                   .map = map,
                                   .method = method,
                                   .fetch = mlx5_fetch,
                                   .fetch_receive = mlx5_fetch_receive,
                                   .fetch_shared_receive = mlx5_fetch_shared_receive,
                                   .shared_receives = mlx5_shared_receives,
                                   .cq_used = mlx5_cq_used,
                                   .complete = mlx5_complete,
                                   .look = mlx5_look,
                                   .ring = mlx5_ring};
