/* SPDX-License-Identifier: Apache-2.0
 *
 * test_lab_commands.c: commands of the lab's devices: lengths, handles, children, states, replies that are cut.
 */
#ifdef __clang__
/* The kernel's structures end in the vendor's part, of no length; here it has one. */
#pragma clang diagnostic ignored "-Wgnu-variable-sized-type-not-at-end"
#endif

#include "lab_plane.h"

#include <fcntl.h>
#include <poll.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/mlx5-abi.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

static lab_device *devices;
static _Alignas(4096) uint8_t memory[1 << 16]; /* regions and rings */
#define RING (memory + 4096)
#define RECORD (memory + 2048)

static lab_context *open_device(void) {
    struct ib_uverbs_get_context in = {0};
    struct {
        struct ib_uverbs_get_context_resp core;
        struct mlx5_ib_alloc_ucontext_resp vendor;
    } out = {{0}, {0}};
    const struct mlx5_ib_alloc_ucontext_req_v2 vendor = {.total_num_bfregs = 16, .max_cqe_version = 1};
    lab_context *context = lab_context_new(&devices[0], 1000);
    in.response = (uintptr_t)&out;
    const struct plane_command c = {.number = IB_USER_VERBS_CMD_GET_CONTEXT,
                                    .core = &in,
                                    .core_bytes = sizeof in,
                                    .vendor = &vendor,
                                    .vendor_bytes = sizeof vendor,
                                    .out = &out,
                                    .out_bytes = sizeof out.core,
                                    .vendor_out_bytes = sizeof out.vendor};
    CHECK(plane_write(context, &c) > 0, "no context");
    CHECK_EQ(out.core.num_comp_vectors, 1);
    CHECK_EQ((int)out.core.async_fd, context->async_read);
    CHECK_EQ(out.vendor.tot_bfregs, 16);
    CHECK_EQ(plane_errno(plane_write(context, &c)), EINVAL); /* a second time */
    return context;
}

static uint32_t make_pd(lab_context *context) {
    struct ib_uverbs_alloc_pd in = {0};
    struct ib_uverbs_alloc_pd_resp out;
    CHECK_EQ(PLANE_CALL(context, ALLOC_PD, &in, &out), 0);
    return out.pd_handle;
}

static int make_cq(lab_context *context, uint32_t entries, int channel, uint32_t *handle) {
    struct ib_uverbs_create_cq in = {.user_handle = 77, .cqe = entries, .comp_channel = channel};
    struct {
        struct ib_uverbs_create_cq_resp core;
        struct mlx5_ib_create_cq_resp vendor;
    } out = {{0}, {0}};
    const struct mlx5_ib_create_cq vendor = {.buf_addr = (uintptr_t)RING, .db_addr = (uintptr_t)RECORD, .cqe_size = 64};
    in.response = (uintptr_t)&out;
    const int error = plane_errno(plane_write(context, &(struct plane_command){.number = IB_USER_VERBS_CMD_CREATE_CQ,
                                                                               .core = &in,
                                                                               .core_bytes = sizeof in,
                                                                               .vendor = &vendor,
                                                                               .vendor_bytes = sizeof vendor,
                                                                               .out = &out,
                                                                               .out_bytes = sizeof out.core,
                                                                               .vendor_out_bytes = sizeof out.vendor}));
    if (!error) {
        CHECK_EQ(out.core.cqe, entries);
        CHECK(out.vendor.cqn != 0, "the vendor's part is missing");
    }
    *handle = out.core.cq_handle;
    return error;
}

static struct mlx5_ib_create_qp qp_memory(void) {
    return (struct mlx5_ib_create_qp){.buf_addr = (uintptr_t)RING,
                                      .db_addr = (uintptr_t)RECORD,
                                      .sq_wqe_count = 16,
                                      .rq_wqe_count = 8,
                                      .rq_wqe_shift = 4};
}

static int make_qp(lab_context *context, struct ib_uverbs_create_qp *in, uint32_t *handle, uint32_t *number) {
    struct {
        struct ib_uverbs_create_qp_resp core;
        struct mlx5_ib_create_qp_resp vendor;
    } out = {{0}, {0}};
    const struct mlx5_ib_create_qp vendor = qp_memory();
    in->response = (uintptr_t)&out;
    const int error = plane_errno(plane_write(context, &(struct plane_command){.number = IB_USER_VERBS_CMD_CREATE_QP,
                                                                               .core = in,
                                                                               .core_bytes = sizeof *in,
                                                                               .vendor = &vendor,
                                                                               .vendor_bytes = sizeof vendor,
                                                                               .out = &out,
                                                                               .out_bytes = sizeof out.core,
                                                                               .vendor_out_bytes = sizeof out.vendor}));
    *handle = out.core.qp_handle;
    if (number) *number = out.core.qpn;
    return error;
}

static int destroy_pd(lab_context *context, uint32_t handle) {
    struct ib_uverbs_dealloc_pd in = {.pd_handle = handle};
    return PLANE_TELL(context, DEALLOC_PD, &in);
}

static int destroy_cq(lab_context *context, uint32_t handle, struct ib_uverbs_destroy_cq_resp *out) {
    struct ib_uverbs_destroy_cq in = {.cq_handle = handle};
    return PLANE_CALL(context, DESTROY_CQ, &in, out);
}

static int destroy_qp(lab_context *context, uint32_t handle) {
    struct ib_uverbs_destroy_qp in = {.qp_handle = handle};
    struct ib_uverbs_destroy_qp_resp out;
    return PLANE_CALL(context, DESTROY_QP, &in, &out);
}

static int register_memory(lab_context *context, uint32_t pd, uint64_t start, uint64_t iova, uint64_t length,
                           uint32_t access, struct ib_uverbs_reg_mr_resp *out) {
    struct ib_uverbs_reg_mr in = {
        .start = start, .length = length, .hca_va = iova, .pd_handle = pd, .access_flags = access};
    return PLANE_CALL(context, REG_MR, &in, out);
}

/* ------------------------------------------------------------------------------------------------------------ parsing
 */

static int raw(lab_context *context, const void *bytes, size_t n) {
    return plane_errno(lab_uverbs_write(context, bytes, n));
}

static void bad_lengths(lab_context *context) {
    struct {
        struct ib_uverbs_cmd_hdr head;
        struct ib_uverbs_query_port in;
    } c = {{IB_USER_VERBS_CMD_QUERY_PORT, sizeof c / 4, sizeof(struct ib_uverbs_query_port_resp) / 4}, {.port_num = 1}};
    struct ib_uverbs_query_port_resp out;
    c.in.response = (uintptr_t)&out;
    CHECK_EQ(raw(context, &c, sizeof c), 0);
    CHECK_EQ(out.gid_tbl_len, 2);
    for (size_t n = 0; n < sizeof c; n++) CHECK_EQ(raw(context, &c, n), EINVAL);
    /* The header says less than there is, and a core structure that is cut. */
    c.head.in_words--;
    CHECK_EQ(raw(context, &c, sizeof c), EINVAL);
    CHECK_EQ(raw(context, &c, sizeof c - 4), EINVAL);
    c.head.in_words++;
    c.head.out_words--;
    memset(&out, 0xee, sizeof out);
    CHECK_EQ(raw(context, &c, sizeof c), ENOSPC);
    CHECK_EQ(out.gid_tbl_len, 0xeeeeeeee); /* and nothing was written */
    c.head.out_words++;
    c.in.response = 0;
    CHECK_EQ(raw(context, &c, sizeof c), EFAULT);
    c.in.response = (uintptr_t)&out;
    c.in.port_num = 2;
    CHECK_EQ(raw(context, &c, sizeof c), EINVAL);
    c.head.command |= 1u << 30; /* a flag that does not exist */
    CHECK_EQ(raw(context, &c, sizeof c), EINVAL);
    c.head.command = 200;
    CHECK_EQ(raw(context, &c, sizeof c), EOPNOTSUPP);
    c.head.command = IB_USER_VERBS_CMD_ALLOC_MW;
    CHECK_EQ(raw(context, &c, sizeof c), EOPNOTSUPP);
}

static void extended(lab_context *context) {
    struct {
        struct ib_uverbs_cmd_hdr head;
        struct ib_uverbs_ex_cmd_hdr more;
        struct ib_uverbs_ex_query_device in;
        uint64_t behind[2];
    } c = {.head = {IB_USER_VERBS_CMD_QUERY_DEVICE | IB_USER_VERBS_CMD_FLAG_EXTENDED, 1, 0}};
    struct {
        struct ib_uverbs_ex_query_device_resp core;
        uint64_t vendor[8];
    } out;
    const size_t short_form = offsetof(__typeof__(c), behind);
    c.more.response = (uintptr_t)&out;
    c.head.out_words = sizeof out.core / 8;
    c.more.provider_out_words = 2;
    memset(&out, 0xee, sizeof out);
    CHECK_EQ(raw(context, &c, short_form), 0);
    CHECK_EQ(out.core.base.vendor_id, 0x02c9);
    CHECK_EQ(out.core.base.max_sge, 30);
    CHECK_EQ(out.core.response_length, sizeof out.core);
    CHECK_EQ(out.vendor[1], 0); /* the vendor's part, and no more of it than there was room for */
    CHECK_EQ(out.vendor[2], 0xeeeeeeeeeeeeeeeeull);
    /* A reply for an older library ends early. */
    memset(&out, 0xee, sizeof out);
    c.head.out_words = 4;
    c.more.provider_out_words = 0;
    CHECK_EQ(raw(context, &c, short_form), 0);
    CHECK_EQ(out.core.base.max_mr_size, UINT64_MAX);
    CHECK_EQ(out.core.base.vendor_id, 0xeeeeeeee);
    /* A core structure that is longer than ours must go on with zeroes. */
    c.head.in_words = 3;
    CHECK_EQ(raw(context, &c, sizeof c), 0);
    c.behind[1] = 1;
    CHECK_EQ(raw(context, &c, sizeof c), EOPNOTSUPP);
    c.behind[1] = 0;
    c.more.cmd_hdr_reserved = 1;
    CHECK_EQ(raw(context, &c, sizeof c), EINVAL);
    c.more.cmd_hdr_reserved = 0;
    for (size_t n = 0; n < sizeof c; n++) CHECK_EQ(raw(context, &c, n), EINVAL);
    c.more.response = 0;
    CHECK_EQ(raw(context, &c, sizeof c), EFAULT);
    c.head.command = 200u | IB_USER_VERBS_CMD_FLAG_EXTENDED;
    CHECK_EQ(raw(context, &c, sizeof c), EOPNOTSUPP);
}

static void context_comes_first(void) {
    lab_context *context = lab_context_new(&devices[0], 1001);
    struct ib_uverbs_alloc_pd in = {0};
    struct ib_uverbs_alloc_pd_resp out;
    CHECK_EQ(PLANE_CALL(context, ALLOC_PD, &in, &out), EINVAL);
    lab_context_free(context);
}

/* ------------------------------------------------------------------------------------------------------------- objects
 */

static void memory_regions(lab_context *context) {
    const uint32_t pd = make_pd(context);
    const uint64_t at = (uintptr_t)memory;
    struct ib_uverbs_reg_mr_resp out;
    CHECK_EQ(register_memory(context, pd, at, at, 4096, 0xf, &out), 0);
    CHECK_EQ(out.lkey, out.rkey);
    CHECK(lab_mr_keyed(&devices[0], out.lkey), "a key that nobody has");
    CHECK(!lab_mr_keyed(&devices[0], out.lkey ^ 1), "a key that is off by one");
    CHECK(!lab_mr_keyed(&devices[1], out.lkey), "a key of another NIC");
    CHECK_EQ(destroy_pd(context, pd), EBUSY);
    const uint32_t handle = out.mr_handle, key = out.lkey;

    CHECK_EQ(register_memory(context, pd + 100, at, at, 4096, 0xf, &out), EINVAL);
    CHECK_EQ(register_memory(context, handle, at, at, 4096, 0xf, &out), EINVAL); /* a handle, but of a region */
    CHECK_EQ(register_memory(context, pd, at, at, 0, 0xf, &out), EINVAL);
    CHECK_EQ(register_memory(context, pd, at, at, UINT64_MAX - 4096, 0xf, &out), EINVAL);
    CHECK_EQ(register_memory(context, pd, at, at + 8, 4096, 0xf, &out), EINVAL); /* other place in the page */
    CHECK_EQ(register_memory(context, pd, at, at, 4096, 2, &out), EINVAL);       /* remote writes need local ones */
    CHECK_EQ(register_memory(context, pd, at, at, 4096, 0x40, &out), EOPNOTSUPP);
    CHECK_EQ(register_memory(context, pd, at, at, 4096, 1u << 12, &out), EINVAL);
    plane.fail_region = ENOMEM;
    CHECK_EQ(register_memory(context, pd, at, at, 4096, 0xf, &out), ENOMEM);
    CHECK_EQ(plane.regions, 1);

    /* Memory that is not there, that ends too early, that may only be read. */
    uint8_t *hole = mmap(NULL, 3 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(!munmap(hole + 4096, 4096) && !mprotect(hole + 8192, 4096, PROT_READ), "mmap");
    const uint64_t h = (uintptr_t)hole;
    CHECK_EQ(register_memory(context, pd, h, h, 4096, 1, &out), 0);
    struct ib_uverbs_dereg_mr dereg = {.mr_handle = out.mr_handle};
    CHECK(out.lkey != key, "two regions of one key");
    CHECK_EQ(PLANE_TELL(context, DEREG_MR, &dereg), 0);
    CHECK_EQ(PLANE_TELL(context, DEREG_MR, &dereg), EINVAL);
    CHECK_EQ(register_memory(context, pd, h, h, 4097, 1, &out), EFAULT);
    CHECK_EQ(register_memory(context, pd, h + 4096, h + 4096, 1, 1, &out), EFAULT);
    CHECK_EQ(register_memory(context, pd, h + 8192, h + 8192, 8, 1, &out), EFAULT);
    CHECK_EQ(register_memory(context, pd, h + 8192, h + 8192, 8, 4, &out), 0);
    dereg.mr_handle = out.mr_handle;
    CHECK_EQ(PLANE_TELL(context, DEREG_MR, &dereg), 0);
    munmap(hole, 3 * 4096);

    dereg.mr_handle = handle;
    CHECK_EQ(PLANE_TELL(context, DEREG_MR, &dereg), 0);
    CHECK_EQ(destroy_pd(context, pd), 0);
    CHECK_EQ(destroy_pd(context, pd), EINVAL);
    CHECK_EQ(plane.regions, 0);
}

static void children_and_parents(lab_context *context) {
    lab_context *other = open_device();
    uint32_t cq, second, qp, number, foreign, later;
    const uint32_t pd = make_pd(context);
    struct ib_uverbs_destroy_cq_resp counts;
    CHECK_EQ(make_cq(context, 0, -1, &cq), EINVAL);
    CHECK_EQ(make_cq(context, 1u << 30, -1, &cq), EINVAL);
    CHECK_EQ(make_cq(context, 15, 0, &cq), EINVAL); /* a descriptor, but of no channel */
    CHECK_EQ(make_cq(context, 15, -1, &cq), 0);
    CHECK_EQ(make_cq(context, 15, -1, &second), 0);
    CHECK_EQ(make_cq(other, 15, -1, &foreign), 0);
    struct ib_uverbs_create_qp in = {.pd_handle = pd,
                                     .send_cq_handle = cq,
                                     .recv_cq_handle = second,
                                     .max_send_wr = 16,
                                     .max_recv_wr = 8,
                                     .max_send_sge = 1,
                                     .max_recv_sge = 1,
                                     .qp_type = 2};
    CHECK_EQ(make_qp(context, &in, &qp, &number), 0);
    CHECK_EQ(number >> lab_qp_bits(&devices[0]), lab_slot());
    CHECK(lab_qp_numbered(number) == lab_find_qp(context, qp), "the queue pair is not found by its number");
    CHECK(!lab_qp_numbered(number + 1), "a queue pair that was not made");
    CHECK_EQ(destroy_cq(context, cq, &counts), EBUSY);
    CHECK_EQ(destroy_cq(context, second, &counts), EBUSY);
    CHECK_EQ(destroy_pd(context, pd), EBUSY);
    /* Handles of another context, of another kind, of nothing. */
    in.send_cq_handle = 12345;
    CHECK_EQ(make_qp(context, &in, &later, NULL), EINVAL);
    in.send_cq_handle = pd;
    CHECK_EQ(make_qp(context, &in, &later, NULL), EINVAL);
    in.send_cq_handle = cq;
    CHECK_EQ(make_qp(other, &in, &later, NULL), EINVAL);
    CHECK_EQ(destroy_qp(context, cq), EINVAL);
    /* Beyond the NIC, and kinds that the lab has not. */
    in.max_send_sge = 31;
    CHECK_EQ(make_qp(context, &in, &later, NULL), EINVAL);
    in.max_send_sge = 1;
    in.max_send_wr = 32769;
    CHECK_EQ(make_qp(context, &in, &later, NULL), EINVAL);
    in.max_send_wr = 16;
    in.qp_type = 9;
    CHECK_EQ(make_qp(context, &in, &later, NULL), EOPNOTSUPP);
    in.qp_type = 2;
    plane.fail_flow = ENOMEM;
    CHECK_EQ(make_qp(context, &in, &later, NULL), ENOMEM);
    CHECK_EQ(plane.flows, 1);
    /* As many as the NIC has, and no more; what one gives back another has. */
    uint32_t last;
    const uint64_t as_it_was = context->device->knobs.max_qp;
    CHECK_EQ(context->device->queue_pairs, 1);
    context->device->knobs.max_qp = 2;
    CHECK_EQ(make_qp(context, &in, &last, NULL), 0);
    CHECK_EQ(make_qp(context, &in, &later, NULL), ENOMEM);
    CHECK_EQ(destroy_qp(context, last), 0);
    CHECK_EQ(make_qp(context, &in, &last, NULL), 0);
    CHECK_EQ(destroy_qp(context, last), 0);
    context->device->knobs.max_qp = as_it_was;
    /* A shared receive queue of another protection domain. */
    in.is_srq = 1;
    in.srq_handle = 999;
    CHECK_EQ(make_qp(context, &in, &later, NULL), EINVAL);
    in.is_srq = 0;
    /* A number just given back is not given again at once. */
    uint32_t again;
    CHECK_EQ(destroy_qp(context, qp), 0);
    CHECK(!lab_qp_numbered(number), "a queue pair that is gone");
    CHECK_EQ(make_qp(context, &in, &qp, &again), 0);
    CHECK(again != number, "a number is used again at once");
    lab_context_free(other); /* takes what it has with it */
    CHECK_EQ(plane.flows, 1);
    CHECK_EQ(destroy_qp(context, qp), 0);
    CHECK_EQ(destroy_cq(context, cq, &counts), 0);
    CHECK_EQ(counts.comp_events_reported, 0);
    CHECK_EQ(destroy_cq(context, second, &counts), 0);
    CHECK_EQ(destroy_pd(context, pd), 0);
    CHECK_EQ(plane.flows, 0);
}

static void shared_receives(lab_context *context) {
    const uint32_t pd = make_pd(context), stranger = make_pd(context);
    uint32_t cq, qp;
    CHECK_EQ(make_cq(context, 15, -1, &cq), 0);
    struct ib_uverbs_create_srq in = {.pd_handle = pd, .max_wr = 31, .max_sge = 1, .srq_limit = 4 /* not looked at */};
    struct {
        struct ib_uverbs_create_srq_resp core;
        struct mlx5_ib_create_srq_resp vendor;
    } out = {{0}, {0}};
    const struct mlx5_ib_create_srq vendor = {.buf_addr = (uintptr_t)RING, .db_addr = (uintptr_t)RECORD};
    const struct plane_command c = {.number = IB_USER_VERBS_CMD_CREATE_SRQ,
                                    .core = &in,
                                    .core_bytes = sizeof in,
                                    .vendor = &vendor,
                                    .vendor_bytes = sizeof vendor,
                                    .out = &out,
                                    .out_bytes = sizeof out.core,
                                    .vendor_out_bytes = sizeof out.vendor};
    in.response = (uintptr_t)&out;
    CHECK_EQ(plane_errno(plane_write(context, &c)), 0);
    struct ib_uverbs_query_srq query = {.srq_handle = out.core.srq_handle};
    struct ib_uverbs_query_srq_resp is;
    CHECK_EQ(PLANE_CALL(context, QUERY_SRQ, &query, &is), 0);
    CHECK_EQ(is.max_wr, 31);
    CHECK_EQ(is.srq_limit, 0);
    __atomic_store_n((uint32_t *)(void *)RECORD, htobe32(20), __ATOMIC_RELEASE); /* receives that are posted */
    struct ib_uverbs_modify_srq change = {.srq_handle = out.core.srq_handle, .attr_mask = 2, .srq_limit = 9};
    CHECK_EQ(PLANE_TELL(context, MODIFY_SRQ, &change), 0);
    CHECK_EQ(PLANE_CALL(context, QUERY_SRQ, &query, &is), 0);
    CHECK_EQ(is.srq_limit, 9);
    /* Of more than there are it tells at once, and once. */
    struct ib_uverbs_async_event_desc event;
    change.srq_limit = 21;
    CHECK_EQ(PLANE_TELL(context, MODIFY_SRQ, &change), 0);
    CHECK_EQ(read(context->async_read, &event, sizeof event), sizeof event);
    CHECK_EQ(event.event_type, LAB_EVENT_SRQ_LIMIT);
    CHECK_EQ(PLANE_CALL(context, QUERY_SRQ, &query, &is), 0);
    CHECK_EQ(is.srq_limit, 0);
    change.srq_limit = 32;
    CHECK_EQ(PLANE_TELL(context, MODIFY_SRQ, &change), EINVAL);
    change.attr_mask = 1;
    CHECK_EQ(PLANE_TELL(context, MODIFY_SRQ, &change), EOPNOTSUPP);
    struct ib_uverbs_create_qp of = {.pd_handle = stranger,
                                     .send_cq_handle = cq,
                                     .recv_cq_handle = cq,
                                     .srq_handle = out.core.srq_handle,
                                     .max_send_wr = 16,
                                     .max_send_sge = 1,
                                     .qp_type = 2,
                                     .is_srq = 1};
    CHECK_EQ(make_qp(context, &of, &qp, NULL), EINVAL); /* its protection domain is another one */
    of.pd_handle = pd;
    CHECK_EQ(make_qp(context, &of, &qp, NULL), 0);
    struct ib_uverbs_destroy_srq end = {.srq_handle = out.core.srq_handle};
    struct ib_uverbs_destroy_srq_resp counts;
    CHECK_EQ(PLANE_CALL(context, DESTROY_SRQ, &end, &counts), EBUSY);
    CHECK_EQ(destroy_qp(context, qp), 0);
    pthread_mutex_lock(&lab_lock);
    lab_async_event(context, LAB_EVENT_SRQ_LIMIT, 0);
    pthread_mutex_unlock(&lab_lock);
    CHECK_EQ(read(context->async_read, &event, sizeof event), sizeof event);
    CHECK_EQ(event.event_type, LAB_EVENT_SRQ_LIMIT);
    /* One that nobody reads goes with it; one of the device stays. */
    pthread_mutex_lock(&lab_lock);
    lab_async_event(context, LAB_EVENT_SRQ_LIMIT, 0);
    lab_async_event(context, LAB_EVENT_DEVICE_FATAL, 0);
    pthread_mutex_unlock(&lab_lock);
    CHECK_EQ(PLANE_CALL(context, DESTROY_SRQ, &end, &counts), 0);
    CHECK_EQ(counts.events_reported, 2);
    CHECK_EQ(read(context->async_read, &event, sizeof event), sizeof event);
    CHECK_EQ(event.event_type, LAB_EVENT_DEVICE_FATAL);
    struct ib_uverbs_destroy_cq_resp cq_counts;
    CHECK_EQ(destroy_cq(context, cq, &cq_counts), 0);
    CHECK_EQ(destroy_pd(context, pd), 0);
    CHECK_EQ(destroy_pd(context, stranger), 0);
}

/* -------------------------------------------------------------------------------------------------------------- states
 */

enum {
    RESET_TO_INIT = 1 | 1 << 4 | 1 << 5 | 1 << 3,
    INIT_TO_RTR = 1 | 1 << 7 | 1 << 8 | 1 << 20 | 1 << 12 | 1 << 17 | 1 << 15,
    RTR_TO_RTS = 1 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 16 | 1 << 13
};

static int change(lab_context *context, struct ib_uverbs_modify_qp *in, uint32_t mask, uint8_t state) {
    in->attr_mask = mask;
    in->qp_state = state;
    return PLANE_TELL(context, MODIFY_QP, in);
}

static void states(lab_context *context) {
    const uint32_t pd = make_pd(context);
    uint32_t cq, qp;
    CHECK_EQ(make_cq(context, 15, -1, &cq), 0);
    struct ib_uverbs_create_qp of = {.pd_handle = pd,
                                     .send_cq_handle = cq,
                                     .recv_cq_handle = cq,
                                     .max_send_wr = 16,
                                     .max_recv_wr = 8,
                                     .max_send_sge = 2,
                                     .max_recv_sge = 1,
                                     .max_inline_data = 60,
                                     .sq_sig_all = 1,
                                     .qp_type = 2};
    CHECK_EQ(make_qp(context, &of, &qp, NULL), 0);
    struct ib_uverbs_modify_qp in = {
        .qp_handle = qp,
        .dest =
            {.sgid_index = 1, .is_global = 1, .port_num = 1, .hop_limit = 64, .traffic_class = 8, .dgid = {1, 2, 3}},
        .port_num = 1,
        .path_mtu = 5,
        .dest_qp_num = 0x123456,
        .rq_psn = 7,
        .sq_psn = 8,
        .max_dest_rd_atomic = 16,
        .max_rd_atomic = 15,
        .min_rnr_timer = 12,
        .timeout = 14,
        .retry_cnt = 6,
        .rnr_retry = 5,
        .qp_access_flags = 0xe};
    CHECK_EQ(change(context, &in, INIT_TO_RTR, LAB_RTR), EINVAL); /* not yet */
    CHECK_EQ(change(context, &in, RESET_TO_INIT & ~(1 << 3), LAB_INIT), EINVAL);
    CHECK_EQ(change(context, &in, RESET_TO_INIT | 1 << 20, LAB_INIT), EINVAL);
    CHECK_EQ(change(context, &in, RESET_TO_INIT, LAB_INIT), 0);
    CHECK_EQ(plane.from, LAB_RESET);
    CHECK_EQ(change(context, &in, RTR_TO_RTS, LAB_RTS), EINVAL); /* RTR is left out */
    for (uint32_t bit = 3; bit < 21; bit++)                      /* each attribute that is needed is needed */
        if (INIT_TO_RTR & 1u << bit) CHECK_EQ(change(context, &in, INIT_TO_RTR & ~(1u << bit), LAB_RTR), EINVAL);
    in.dest.sgid_index = 2;
    CHECK_EQ(change(context, &in, INIT_TO_RTR, LAB_RTR), EINVAL);
    in.dest.sgid_index = 1;
    in.dest.is_global = 0;
    CHECK_EQ(change(context, &in, INIT_TO_RTR, LAB_RTR), EINVAL);
    in.dest.is_global = 1;
    in.max_dest_rd_atomic = 17; /* responder resources of the NIC: 16 */
    CHECK_EQ(change(context, &in, INIT_TO_RTR, LAB_RTR), EINVAL);
    in.max_dest_rd_atomic = 16;
    in.path_mtu = 6;
    CHECK_EQ(change(context, &in, INIT_TO_RTR, LAB_RTR), EINVAL);
    in.path_mtu = 5;
    CHECK_EQ(change(context, &in, INIT_TO_RTR | 1 << 14, LAB_RTR), EOPNOTSUPP); /* a second path */
    CHECK_EQ(change(context, &in, INIT_TO_RTR, LAB_RTR), 0);
    CHECK_EQ(change(context, &in, RTR_TO_RTS, LAB_RTS), 0);
    CHECK_EQ(change(context, &in, 1, LAB_SQD), EOPNOTSUPP);
    CHECK_EQ(change(context, &in, 1, 9), EINVAL);

    struct ib_uverbs_query_qp query = {.qp_handle = qp};
    struct ib_uverbs_query_qp_resp is;
    CHECK_EQ(PLANE_CALL(context, QUERY_QP, &query, &is), 0);
    CHECK_EQ(is.qp_state, LAB_RTS);
    CHECK_EQ(is.dest_qp_num, 0x123456);
    CHECK_EQ(is.rq_psn, 7);
    CHECK_EQ(is.sq_psn, 8);
    CHECK_EQ(is.max_rd_atomic, 15);
    CHECK_EQ(is.max_dest_rd_atomic, 16);
    CHECK_EQ(is.timeout, 14);
    CHECK_EQ(is.retry_cnt, 6);
    CHECK_EQ(is.rnr_retry, 5);
    CHECK_EQ(is.min_rnr_timer, 12);
    CHECK_EQ(is.path_mtu, 5);
    CHECK_EQ(is.qp_access_flags, 0xe);
    CHECK_EQ(is.dest.hop_limit, 64);
    CHECK_EQ(is.dest.traffic_class, 8);
    CHECK_EQ(is.dest.dgid[1], 2);
    CHECK_EQ(is.sq_sig_all, 1);
    CHECK_EQ(is.max_send_sge, 2);
    CHECK_EQ(change(context, &in, 1, LAB_ERR), 0);
    CHECK_EQ(plane.from, LAB_RTS);
    CHECK_EQ(change(context, &in, RTR_TO_RTS, LAB_RTS), EINVAL);
    CHECK_EQ(change(context, &in, 1, LAB_RESET), 0);
    in.qp_handle = qp + 7;
    CHECK_EQ(change(context, &in, 1, LAB_ERR), EINVAL);
    CHECK_EQ(destroy_qp(context, qp), 0);
    struct ib_uverbs_destroy_cq_resp counts;
    CHECK_EQ(destroy_cq(context, cq, &counts), 0);
    CHECK_EQ(destroy_pd(context, pd), 0);
}

/* -------------------------------------------------------------------------------------------------------------- events
 */

static bool readable(int fd) {
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, 0) == 1;
}

static void channels(lab_context *context) {
    struct ib_uverbs_create_comp_channel in = {0};
    struct ib_uverbs_create_comp_channel_resp out;
    CHECK_EQ(PLANE_CALL(context, CREATE_COMP_CHANNEL, &in, &out), 0);
    const int fd = (int)out.fd;
    uint32_t handle;
    CHECK_EQ(make_cq(context, 15, fd, &handle), 0);
    lab_cq *cq = lab_find_cq(context, handle);
    lab_cq_notify(cq, true);
    CHECK(!readable(fd), "an event of a queue that was not armed");
    struct ib_uverbs_req_notify_cq arm = {.cq_handle = handle, .solicited_only = 1};
    CHECK_EQ(PLANE_TELL(context, REQ_NOTIFY_CQ, &arm), 0);
    lab_cq_notify(cq, false);
    CHECK(!readable(fd), "an event that was not solicited");
    lab_cq_notify(cq, true);
    struct ib_uverbs_comp_event_desc event;
    CHECK_EQ(read(fd, &event, sizeof event), sizeof event);
    CHECK_EQ(event.cq_handle, 77);
    lab_cq_notify(cq, true);
    CHECK(!readable(fd), "a second event of one arming");
    /* What is not read is withdrawn when the queue ends, and another's stays. */
    uint32_t later;
    struct ib_uverbs_destroy_cq_resp counts;
    CHECK_EQ(make_cq(context, 15, fd, &later), 0);
    lab_find_cq(context, later)->user_handle = 78;
    CHECK_EQ(PLANE_TELL(context, REQ_NOTIFY_CQ, &arm), 0);
    lab_cq_notify(cq, true);
    arm.cq_handle = later;
    CHECK_EQ(PLANE_TELL(context, REQ_NOTIFY_CQ, &arm), 0);
    lab_cq_notify(lab_find_cq(context, later), true);
    CHECK_EQ(destroy_cq(context, handle, &counts), 0);
    CHECK_EQ(counts.comp_events_reported, 1);
    CHECK_EQ(read(fd, &event, sizeof event), sizeof event);
    CHECK_EQ(event.cq_handle, 78);
    CHECK(!readable(fd), "an event of a queue that is gone");
    /* The program closes its end: nobody is told, and nobody dies of it. */
    CHECK_EQ(PLANE_TELL(context, REQ_NOTIFY_CQ, &arm), 0);
    close(fd);
    lab_cq_notify(lab_find_cq(context, later), true);
    CHECK_EQ(make_cq(context, 15, fd, &handle), EINVAL);
    CHECK_EQ(destroy_cq(context, later, &counts), 0);
    /* A channel that the program has closed costs no descriptor any more when the next is made; one that a queue names
     * stays. */
    int its = -1, named;
    for (uint32_t i = 0; i < 100; i++) {
        CHECK_EQ(PLANE_CALL(context, CREATE_COMP_CHANNEL, &in, &out), 0);
        named = lab_channel_of_fd(context, (int)out.fd)->write;
        CHECK(!i || named == its, "channel %u has another descriptor than the last", i);
        its = named;
        if (i == 99) CHECK_EQ(make_cq(context, 15, (int)out.fd, &handle), 0);
        close((int)out.fd);
    }
    CHECK_EQ(PLANE_CALL(context, CREATE_COMP_CHANNEL, &in, &out), 0);
    CHECK(lab_channel_of_fd(context, (int)out.fd)->write != named, "a queue's channel is gone");
    close((int)out.fd);
    CHECK_EQ(destroy_cq(context, handle, &counts), 0);
    CHECK_EQ(PLANE_CALL(context, CREATE_COMP_CHANNEL, &in, &out), 0);
    CHECK_EQ(lab_channel_of_fd(context, (int)out.fd)->write, named);
    close((int)out.fd);
    /* The number of the events' descriptor is another pipe's by now: what is in there is nobody's of ours. */
    int other[2], waiting = 0;
    char text[64] = "what another part of the program has written";
    struct ib_uverbs_async_event_desc event_of;
    const int kept = dup(context->async_read);
    CHECK(kept >= 0 && !pipe(other) && write(other[1], text, sizeof text) == sizeof text, "pipe");
    CHECK_EQ(dup2(other[0], context->async_read), context->async_read);
    CHECK_EQ(make_cq(context, 15, -1, &handle), 0);
    lab_async_event(context, LAB_EVENT_CQ_ERR, 77);
    CHECK_EQ(destroy_cq(context, handle, &counts), 0);
    CHECK_EQ(counts.async_events_reported, 1);
    CHECK(!ioctl(other[0], FIONREAD, &waiting) && waiting == sizeof text, "%d bytes are left", waiting);
    CHECK_EQ(dup2(kept, context->async_read), context->async_read);
    CHECK_EQ(read(kept, &event_of, sizeof event_of), sizeof event_of);
    CHECK(!close(kept) && !close(other[0]) && !close(other[1]), "close");
}

/* --------------------------------------------------------------------------------------------------------- attributes
 */

struct attributes {
    struct ib_uverbs_ioctl_hdr head;
    struct ib_uverbs_attr attr[12];
};

static struct attributes method(uint16_t object, uint16_t number) {
    return (struct attributes){.head = {.length = sizeof(struct ib_uverbs_ioctl_hdr),
                                        .object_id = object,
                                        .method_id = number,
                                        .driver_id = RDMA_DRIVER_MLX5}};
}

static void add(struct attributes *a, uint16_t id, uint16_t len, uint64_t data) {
    a->attr[a->head.num_attrs++] = (struct ib_uverbs_attr){.attr_id = id, .len = len, .data = data};
    a->head.length = (uint16_t)(a->head.length + sizeof *a->attr);
}

static int call(lab_context *context, struct attributes *a) {
    return -lab_uverbs_ioctl(context, RDMA_VERBS_IOCTL, a);
}

static struct attributes dmabuf(uint32_t pd, int fd, uint64_t offset, uint64_t length, uint32_t *keys) {
    struct attributes a = method(UVERBS_OBJECT_MR, UVERBS_METHOD_REG_DMABUF_MR);
    add(&a, UVERBS_ATTR_REG_DMABUF_MR_HANDLE, 0, 0);
    add(&a, UVERBS_ATTR_REG_DMABUF_MR_PD_HANDLE, 0, pd);
    add(&a, UVERBS_ATTR_REG_DMABUF_MR_OFFSET, 8, offset);
    add(&a, UVERBS_ATTR_REG_DMABUF_MR_LENGTH, 8, length);
    add(&a, UVERBS_ATTR_REG_DMABUF_MR_IOVA, 8, 0x7000000 + offset % 4096);
    add(&a, UVERBS_ATTR_REG_DMABUF_MR_FD, 0, (uint64_t)(int64_t)fd);
    add(&a, UVERBS_ATTR_REG_DMABUF_MR_ACCESS_FLAGS, 4, 7);
    add(&a, UVERBS_ATTR_REG_DMABUF_MR_RESP_LKEY, 4, (uintptr_t)&keys[0]);
    add(&a, UVERBS_ATTR_REG_DMABUF_MR_RESP_RKEY, 4, (uintptr_t)&keys[1]);
    return a;
}

static void dmabufs(lab_context *context) {
    const uint32_t pd = make_pd(context);
    const int fd = memfd_create("dmabuf", MFD_CLOEXEC);
    uint32_t keys[2] = {0};
    CHECK(fd >= 0 && !ftruncate(fd, 3 * 4096), "memfd");
    struct attributes a = dmabuf(pd, fd, 4096 + 64, 4096, keys);
    CHECK_EQ(call(context, &a), 0);
    CHECK_EQ(keys[0], keys[1]);
    lab_mr *mr = lab_mr_keyed(&devices[0], keys[0]);
    CHECK(mr && mr->iova == 0x7000000 + 64 && mr->length == 4096, "the region");
    CHECK_EQ(a.attr[0].data, mr->handle);
    memcpy((void *)(uintptr_t)mr->start, "there", 6);
    char seen[6];
    CHECK_EQ(pread(fd, seen, sizeof seen, 4096 + 64), 6);
    CHECK(!strcmp(seen, "there"), "the region is not the buffer");
    struct ib_uverbs_dereg_mr dereg = {.mr_handle = mr->handle};
    CHECK_EQ(PLANE_TELL(context, DEREG_MR, &dereg), 0);

    a = dmabuf(pd, fd, 4096, 2 * 4096 + 1, keys); /* longer than it is */
    CHECK_EQ(call(context, &a), EINVAL);
    a = dmabuf(pd, fd, UINT64_MAX - 4095, 4096, keys);
    CHECK_EQ(call(context, &a), EINVAL);
    a = dmabuf(pd + 50, fd, 0, 4096, keys);
    CHECK_EQ(call(context, &a), EINVAL);
    a = dmabuf(pd, -1, 0, 4096, keys);
    CHECK_EQ(call(context, &a), EBADF);
    a = dmabuf(pd, context->async_read, 0, 4096, keys); /* a descriptor, but of no memory */
    CHECK(call(context, &a) != 0, "a pipe was registered");
    a = dmabuf(pd, fd, 0, 4096, keys);
    a.attr[7].data = 0; /* nowhere to put the key */
    CHECK_EQ(call(context, &a), EFAULT);
    for (uint32_t missing = 1; missing < 7; missing++) {
        a = dmabuf(pd, fd, 0, 4096, keys);
        a.attr[missing].attr_id = 900;
        CHECK_EQ(call(context, &a), EINVAL);
    }
    CHECK_EQ(plane.regions, 0);
    CHECK_EQ(destroy_pd(context, pd), 0);
    close(fd);
}

static void attributes(lab_context *context) {
    struct ib_uverbs_gid_entry entries[3];
    uint64_t n = 0;
    struct attributes a = method(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_GID_TABLE);
    add(&a, UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE, 8, sizeof *entries);
    add(&a, UVERBS_ATTR_QUERY_GID_TABLE_FLAGS, 4, 0);
    add(&a, UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES, sizeof entries, (uintptr_t)entries);
    add(&a, UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, 8, (uintptr_t)&n);
    CHECK_EQ(call(context, &a), 0);
    CHECK_EQ(n, 2);
    CHECK_EQ(entries[1].gid_type, IB_UVERBS_GID_TYPE_ROCE_V2);
    CHECK(!memcmp(entries[1].gid, &devices[0].gid[1], 16), "another GID");
    a.attr[2].len = sizeof *entries; /* no room for all */
    CHECK_EQ(call(context, &a), EINVAL);
    a.attr[2].len = sizeof entries;
    a.attr[0].data = 0;
    CHECK_EQ(call(context, &a), EINVAL);

    a = method(UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_CREATE); /* has a written form: without a word */
    CHECK_EQ(call(context, &a), EPROTONOSUPPORT);
    a = method(UVERBS_OBJECT_FLOW, 0);
    CHECK_EQ(call(context, &a), EOPNOTSUPP);
    a = method(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_GID_ENTRY);
    CHECK_EQ(call(context, &a), EINVAL); /* nothing is said */
    a.head.length++;
    CHECK_EQ(call(context, &a), EINVAL);
    a.head.length--;
    a.head.num_attrs = 65;
    CHECK_EQ(call(context, &a), EINVAL);
    a.head.num_attrs = 0;
    a.head.reserved1 = 1;
    CHECK_EQ(call(context, &a), EINVAL);
    a.head.reserved1 = 0;
    a.head.driver_id = RDMA_DRIVER_EFA;
    CHECK_EQ(call(context, &a), EINVAL);
    CHECK_EQ(lab_uverbs_ioctl(context, 0x1b02, &a), -ENOTTY);
    CHECK_EQ(lab_uverbs_ioctl(context, RDMA_VERBS_IOCTL, NULL), -EFAULT);
}

/* Commands of chance: nothing may break, and in the end everything can be given back. */
static void noise(lab_context *context, test_rng *rng) {
    const uint64_t rounds = test_scaled(20000);
    uint64_t bytes[40], out[64], wrong = 0;
    /* What is not implemented is said, thousands of times here. */
    const int said = dup(STDERR_FILENO), nowhere = open("/dev/null", O_WRONLY);
    CHECK(said >= 0 && nowhere >= 0 && dup2(nowhere, STDERR_FILENO) >= 0, "dup");
    for (uint64_t i = 0; i < rounds; i++) {
        const bool ex = test_below(rng, 2);
        const size_t words = test_below(rng, 36) + 3;
        for (size_t k = 0; k < words; k++) bytes[k] = test_below(rng, 3) ? test_below(rng, 64) : test_random(rng);
        struct ib_uverbs_cmd_hdr head = {(uint32_t)test_below(rng, 42) | (ex ? IB_USER_VERBS_CMD_FLAG_EXTENDED : 0), 0,
                                         (uint16_t)(ex ? 16 : 32)};
        /* Get-context would make descriptors by the thousand; the rest may not write anywhere but to `out`. */
        if (head.command == IB_USER_VERBS_CMD_GET_CONTEXT) continue;
        head.in_words = (uint16_t)(ex ? words - 3 : words * 2);
        memcpy(bytes, &head, sizeof head);
        bytes[1] = (uintptr_t)out;
        if (ex) {
            const struct ib_uverbs_ex_cmd_hdr more = {.response = (uintptr_t)out};
            memcpy(&bytes[1], &more, sizeof more);
        }
        const ssize_t result = lab_uverbs_write(context, bytes, words * 8);
        wrong += result != (ssize_t)(words * 8) && result >= 0;
    }
    dup2(said, STDERR_FILENO);
    close(said);
    close(nowhere);
    CHECK_EQ(wrong, 0);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 120);
    uint32_t n;
    setenv("UCCL_EP_LAB", "nic=connectx,count=2", 1);
    devices = lab_devices(&n);
    CHECK_EQ(n, 2);
    context_comes_first();
    lab_context *context = open_device();
    bad_lengths(context);
    extended(context);
    memory_regions(context);
    children_and_parents(context);
    shared_receives(context);
    states(context);
    channels(context);
    dmabufs(context);
    attributes(context);
    lab_context_free(context);
    test_rng rng = test_rng_at(0);
    context = open_device();
    noise(context, &rng);
    lab_context_free(context);
    CHECK_EQ(plane.flows, 0);
    CHECK_EQ(plane.regions, 0);
    return test_end();
}
