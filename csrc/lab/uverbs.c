/* SPDX-License-Identifier: Apache-2.0
 *
 * uverbs.c: commands that are written to the device (rdma/ib_user_verbs.h).
 *
 * A command is a header, a core structure and what the vendor's library adds; its reply likewise, at the address that
 * it names. In the first form the header counts words of 4 bytes and the core structure has its size; in the extended
 * one words of 8 bytes, and the core structure may be shorter (zeroes follow) or longer (only zeroes may) than ours. A
 * reply is cut to the room that there is.
 */
#include "uverbs.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "raw.h"

/* ------------------------------------------------------------------------------------------------------ the vendor's
 */

void lab_reply(struct lab_call *call, const void *reply, size_t bytes) {
    const size_t n = bytes < call->out_room ? bytes : call->out_room;
    if (n) memcpy(call->out, reply, n);
    call->out_bytes = n;
}

void lab_request(const struct lab_call *call, void *request, size_t bytes) {
    const size_t n = bytes < call->in_bytes ? bytes : call->in_bytes;
    memset(request, 0, bytes);
    if (n) memcpy(request, call->in, n);
}

/* ---------------------------------------------------------------------------------------------------- device and port
 */

int lab_nic_ready(lab_context *context) {
    return context->device->nic ? 0 : lab_nic_open(context->device);
}

/* "28.43.2566": 16 bits each, the first one highest. */
static uint64_t firmware_number(const char *text) {
    unsigned long long n = 0;
    for (unsigned i = 0; i < 3; i++) {
        char *end;
        n = n << 16 | (strtoul(text, &end, 10) & 0xffff);
        text = *end ? end + 1 : end;
    }
    return n;
}

int lab_query_device(lab_device *device, struct ib_uverbs_ex_query_device_resp *core, struct lab_call *call) {
    const vnic_knobs *k = &device->knobs;
    const uint64_t guid = __builtin_bswap64(device->guid); /* big-endian where it is read; x86-64 and aarch64 are not */
    *core = (struct ib_uverbs_ex_query_device_resp){
        .base = {.fw_ver = firmware_number(device->variant->firmware),
                 .node_guid = guid,
                 .sys_image_guid = guid,
                 .max_mr_size = UINT64_MAX,
                 .page_size_cap = 0xfffffffffffff000ull,
                 .vendor_id = device->variant->vendor_id,
                 .vendor_part_id = device->variant->part_id,
                 .hw_ver = device->variant->hw_version,
                 .max_qp = (uint32_t)(k->max_qp ? k->max_qp : 1u << lab_qp_bits(device)),
                 .max_qp_wr = (uint32_t)k->max_wr,
                 .max_sge = (uint32_t)k->max_sge,
                 .max_sge_rd = (uint32_t)k->max_sge,
                 .max_cq = 65536,
                 .max_cqe = (uint32_t)k->max_cqe,
                 .max_mr = VNIC_MAX_REGIONS,
                 .max_pd = 65536,
                 .max_qp_rd_atom = 16,
                 .max_qp_init_rd_atom = 16,
                 .max_res_rd_atom = 2097152,
                 .atomic_cap = k->atomics == VNIC_ATOMICS_COHERENT ? 2 : k->atomics != VNIC_ATOMICS_NONE,
                 .max_ah = 65534,
                 .max_pkeys = 1,
                 .phys_port_cnt = 1,
                 .local_ca_ack_delay = 16},
        .response_length = sizeof *core};
    if (k->srq) {
        core->base.max_srq = 65536;
        core->base.max_srq_wr = (uint32_t)k->max_wr - 1;
        core->base.max_srq_sge = (uint32_t)k->max_sge;
    }
    return device->model->query_device ? device->model->query_device(device, core, call) : 0;
}

static int query_device(struct lab_command *c) {
    struct ib_uverbs_ex_query_device_resp core;
    struct lab_call nobody = {0};
    const int error = lab_query_device(c->context->device, &core, &nobody);
    memcpy(c->out, &core.base, sizeof core.base);
    return error;
}

static int ex_query_device(struct lab_command *c) {
    const struct ib_uverbs_ex_query_device *in = (const void *)c->in;
    if (in->comp_mask || in->reserved) return EINVAL;
    return lab_query_device(c->context->device, (void *)c->out, &c->call);
}

/* RoCE v2 on 4 lanes of 50 Gbit/s, and GIDs that are IP addresses. */
int lab_query_port(const lab_context *context, uint32_t port, struct ib_uverbs_query_port_resp *reply) {
    const lab_device *d = context->device;
    if (port != 1) return EINVAL;
    *reply = (struct ib_uverbs_query_port_resp){.port_cap_flags = 1u << 26 | 1u << 16,
                                                .max_msg_sz = (uint32_t)d->knobs.max_msg,
                                                .gid_tbl_len = d->gids,
                                                .pkey_tbl_len = 1,
                                                .state = 4,
                                                .max_mtu = 5,
                                                .active_mtu = (uint8_t)d->active_mtu,
                                                .max_vl_num = 1,
                                                .active_width = 2,
                                                .active_speed = 64,
                                                .phys_state = 5,
                                                .link_layer = 2};
    if (d->model->query_port) d->model->query_port(d, reply);
    return 0;
}

static int query_port(struct lab_command *c) {
    const struct ib_uverbs_query_port *in = (const void *)c->in;
    return lab_query_port(c->context, in->port_num, (void *)c->out);
}

static int get_context(struct lab_command *c) {
    struct ib_uverbs_get_context_resp *out = (void *)c->out;
    lab_context *context = c->context;
    int ends[2];
    if (context->async_read >= 0) return EINVAL; /* it has been got */
    int error = context->device->model->open ? context->device->model->open(context, &c->call) : 0;
    if (error) return error;
    error = lab_pipe(ends);
    if (error) {
        if (context->device->model->close) context->device->model->close(context);
        return error;
    }
    context->async_read = ends[0];
    context->async_write = ends[1];
    out->async_fd = (uint32_t)ends[0];
    out->num_comp_vectors = 1;
    return 0;
}

/* -------------------------------------------------------------------------------------- protection domains and memory
 */

static int alloc_pd(struct lab_command *c) {
    struct ib_uverbs_alloc_pd_resp *out = (void *)c->out;
    lab_pd *pd = lab_new(c->context, LAB_PD);
    if (!pd) return ENOMEM;
    pd->context = c->context;
    const int error = c->context->device->model->alloc_pd ? c->context->device->model->alloc_pd(pd, &c->call) : 0;
    if (error) {
        lab_free(c->context, LAB_PD, pd);
        return error;
    }
    lab_publish(c->context, LAB_PD, pd);
    out->pd_handle = pd->handle;
    return 0;
}

static int dealloc_pd(struct lab_command *c) {
    return lab_destroy(c->context, LAB_PD, ((const struct ib_uverbs_dealloc_pd *)c->in)->pd_handle);
}

/* enum ib_uverbs_access_flags */
enum {
    LOCAL_WRITE = 1,
    REMOTE_WRITE = 2,
    REMOTE_READ = 4,
    REMOTE_ATOMIC = 8,
    MW_BIND = 0x10,
    ZERO_BASED = 0x20,
    ON_DEMAND = 0x40,
    HUGETLB = 0x80,
    OPTIONAL = 0x3ff00000
};

static int access_check(const lab_device *device, uint32_t access) {
    if (access & ~(uint32_t)(OPTIONAL | 0xff)) return EINVAL;
    if (access & ON_DEMAND) return lab_unsupported("registration on demand (IBV_ACCESS_ON_DEMAND)");
    if (access & ZERO_BASED) return lab_unsupported("addresses from zero (IBV_ACCESS_ZERO_BASED)");
    if (access & MW_BIND) return lab_unsupported("memory windows (IBV_ACCESS_MW_BIND)");
    if (access & (REMOTE_WRITE | REMOTE_ATOMIC) && !(access & LOCAL_WRITE)) return EINVAL;
    if (access & REMOTE_ATOMIC && device->knobs.atomics == VNIC_ATOMICS_NONE) return EINVAL;
    return 0;
}

static int map_dmabuf(const struct lab_registration *wanted, lab_mr *mr) {
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), skip = wanted->start % page;
    const int protection = PROT_READ | (wanted->access & LOCAL_WRITE ? PROT_WRITE : 0);
    if (!wanted->length || wanted->start + wanted->length < wanted->start) return EINVAL;
    const off_t size = lseek(wanted->dmabuf, 0, SEEK_END);
    if (size < 0) return EINVAL;
    if (wanted->start + wanted->length > (uint64_t)size) return EINVAL;
    mr->mapped = wanted->length + skip;
    mr->mapping = raw_mmap(mr->mapped, protection, MAP_SHARED, wanted->dmabuf, (off_t)(wanted->start - skip));
    if (mr->mapping == MAP_FAILED) {
        mr->mapping = NULL;
        lab_unsupported("a dmabuf that cannot be mapped (%s): memory of a real GPU", strerror(errno));
        return EOPNOTSUPP;
    }
    mr->start = (uint64_t)(uintptr_t)mr->mapping + skip;
    return 0;
}

static int fill_mr(lab_context *context, const struct lab_registration *wanted, struct lab_call *call, lab_mr *mr) {
    *mr = (lab_mr){.pd = lab_find_pd(context, wanted->pd),
                   .handle = mr->handle,
                   .key = mr->key,
                   .access = wanted->access,
                   .start = wanted->start,
                   .iova = wanted->iova,
                   .length = wanted->length};
    int error = wanted->dmabuf >= 0 ? map_dmabuf(wanted, mr)
                                    : lab_memory_check(wanted->start, wanted->length, wanted->access & LOCAL_WRITE);
    if (!error) error = lab_region_add(mr);
    if (error) return error;
    if (context->device->model->reg_mr) error = context->device->model->reg_mr(mr, call);
    if (error) lab_region_remove(mr);
    return error;
}

int lab_register(lab_context *context, const struct lab_registration *wanted, struct lab_call *call, lab_mr **out) {
    if (!lab_find_pd(context, wanted->pd)) return EINVAL;
    /* The NIC's pages and ours are of one size and must begin together. */
    if ((wanted->start ^ wanted->iova) & 4095) return EINVAL;
    int error = access_check(context->device, wanted->access);
    if (!error) error = lab_nic_ready(context);
    if (error) return error;
    lab_mr *mr = lab_new(context, LAB_MR);
    if (!mr) return ENOMEM;
    error = fill_mr(context, wanted, call, mr);
    if (error) {
        if (mr->mapping) munmap(mr->mapping, mr->mapped);
        lab_free(context, LAB_MR, mr);
        return error;
    }
    lab_use(context, mr->pd->handle, 1);
    lab_publish(context, LAB_MR, mr);
    *out = mr;
    return 0;
}

static int reg_mr(struct lab_command *c) {
    const struct ib_uverbs_reg_mr *in = (const void *)c->in;
    struct ib_uverbs_reg_mr_resp *out = (void *)c->out;
    const struct lab_registration wanted = {in->pd_handle, in->access_flags, in->start, in->hca_va, in->length, -1};
    lab_mr *mr;
    const int error = lab_register(c->context, &wanted, &c->call, &mr);
    if (error) return error;
    out->mr_handle = mr->handle;
    out->lkey = out->rkey = mr->key;
    return 0;
}

static int dereg_mr(struct lab_command *c) {
    return lab_destroy(c->context, LAB_MR, ((const struct ib_uverbs_dereg_mr *)c->in)->mr_handle);
}

/* ------------------------------------------------------------------------------------------------- completion queues
 */

static int create_channel(struct lab_command *c) {
    struct ib_uverbs_create_comp_channel_resp *out = (void *)c->out;
    const lab_channel *channel = lab_channel_new(c->context);
    if (!channel) return errno;
    out->fd = (uint32_t)channel->read;
    return 0;
}

struct cq_wanted {
    uint64_t user_handle;
    uint32_t entries, vector;
    int32_t channel;
};

static int make_cq(struct lab_command *c, const struct cq_wanted *wanted, struct ib_uverbs_create_cq_resp *out) {
    lab_context *context = c->context;
    lab_channel *channel = NULL;
    if (!wanted->entries || wanted->entries > context->device->knobs.max_cqe || wanted->vector) return EINVAL;
    if (wanted->channel >= 0 && !(channel = lab_channel_of_fd(context, wanted->channel))) return EINVAL;
    lab_cq *cq = lab_new(context, LAB_CQ);
    if (!cq) return ENOMEM;
    cq->context = context;
    cq->user_handle = wanted->user_handle;
    cq->entries = wanted->entries;
    cq->channel = channel;
    const int error = context->device->model->create_cq ? context->device->model->create_cq(cq, &c->call) : 0;
    if (error) {
        lab_free(context, LAB_CQ, cq);
        return error;
    }
    if (channel) channel->queues++;
    lab_publish(context, LAB_CQ, cq);
    out->cq_handle = cq->handle;
    out->cqe = cq->entries;
    return 0;
}

static int create_cq(struct lab_command *c) {
    const struct ib_uverbs_create_cq *in = (const void *)c->in;
    const struct cq_wanted wanted = {in->user_handle, in->cqe, in->comp_vector, in->comp_channel};
    return make_cq(c, &wanted, (void *)c->out);
}

static int ex_create_cq(struct lab_command *c) {
    const struct ib_uverbs_ex_create_cq *in = (const void *)c->in;
    struct ib_uverbs_ex_create_cq_resp *out = (void *)c->out;
    const struct cq_wanted wanted = {in->user_handle, in->cqe, in->comp_vector, in->comp_channel};
    if (in->comp_mask || in->reserved) return EINVAL;
    if (in->flags & IB_UVERBS_CQ_FLAGS_TIMESTAMP_COMPLETION) return lab_unsupported("completion timestamps");
    if (in->flags) return lab_unsupported("flags 0x%x of a completion queue", in->flags);
    out->response_length = sizeof *out;
    return make_cq(c, &wanted, &out->base);
}

static int resize_cq(struct lab_command *c) {
    const struct ib_uverbs_resize_cq *in = (const void *)c->in;
    struct ib_uverbs_resize_cq_resp *out = (void *)c->out;
    lab_cq *cq = lab_find_cq(c->context, in->cq_handle);
    if (!cq || !in->cqe || in->cqe > c->context->device->knobs.max_cqe) return EINVAL;
    if (!c->context->device->model->resize_cq)
        return lab_unsupported("resizing a completion queue of nic=%s", c->context->device->model->name);
    const int error = c->context->device->model->resize_cq(cq, in->cqe, &c->call);
    out->cqe = cq->entries;
    return error;
}

static int req_notify_cq(struct lab_command *c) {
    const struct ib_uverbs_req_notify_cq *in = (const void *)c->in;
    lab_cq *cq = lab_find_cq(c->context, in->cq_handle);
    if (!cq) return EINVAL;
    cq->armed = true;
    cq->solicited_only = in->solicited_only;
    return 0;
}

static int destroy_cq(struct lab_command *c) {
    const struct ib_uverbs_destroy_cq *in = (const void *)c->in;
    struct ib_uverbs_destroy_cq_resp *out = (void *)c->out;
    lab_cq *cq = lab_find_cq(c->context, in->cq_handle);
    if (!cq) return EINVAL;
    if (lab_users(c->context, in->cq_handle)) return EBUSY;
    out->comp_events_reported = lab_cq_events(cq);
    out->async_events_reported = lab_events(c->context, in->cq_handle);
    return lab_destroy(c->context, LAB_CQ, in->cq_handle);
}

/* ------------------------------------------------------------------------------------------------------ shared
 * receives */

struct srq_wanted {
    uint64_t user_handle;
    uint32_t pd, max_wr, max_sge; /* a limit is set once there are receives */
};

static int make_srq(struct lab_command *c, const struct srq_wanted *wanted, struct ib_uverbs_create_srq_resp *out) {
    lab_context *context = c->context;
    const vnic_knobs *k = &context->device->knobs;
    lab_pd *pd = lab_find_pd(context, wanted->pd);
    if (!pd || !wanted->max_wr || wanted->max_wr > k->max_wr || wanted->max_sge > k->max_sge) return EINVAL;
    if (!k->srq || !context->device->model->create_srq) return EOPNOTSUPP; /* as this NIC says in query_device */
    lab_srq *srq = lab_new(context, LAB_SRQ);
    if (!srq) return ENOMEM;
    srq->pd = pd;
    srq->user_handle = wanted->user_handle;
    srq->max_wr = wanted->max_wr;
    srq->max_sge = wanted->max_sge;
    const int error = context->device->model->create_srq(srq, &c->call);
    if (error) {
        lab_free(context, LAB_SRQ, srq);
        return error;
    }
    lab_use(context, pd->handle, 1);
    lab_publish(context, LAB_SRQ, srq);
    *out = (struct ib_uverbs_create_srq_resp){
        .srq_handle = srq->handle, .max_wr = srq->max_wr, .max_sge = srq->max_sge, .srqn = srq->number};
    return 0;
}

static int create_srq(struct lab_command *c) {
    const struct ib_uverbs_create_srq *in = (const void *)c->in;
    const struct srq_wanted wanted = {in->user_handle, in->pd_handle, in->max_wr, in->max_sge};
    return make_srq(c, &wanted, (void *)c->out);
}

static int create_xsrq(struct lab_command *c) {
    const struct ib_uverbs_create_xsrq *in = (const void *)c->in;
    const struct srq_wanted wanted = {in->user_handle, in->pd_handle, in->max_wr, in->max_sge};
    if (in->srq_type) return lab_unsupported("a shared receive queue of type %u (XRC, tag matching)", in->srq_type);
    return make_srq(c, &wanted, (void *)c->out);
}

static int modify_srq(struct lab_command *c) {
    const struct ib_uverbs_modify_srq *in = (const void *)c->in;
    lab_srq *srq = lab_find_srq(c->context, in->srq_handle);
    if (!srq || in->attr_mask & ~3u) return EINVAL;
    if (in->attr_mask & 1) return lab_unsupported("resizing a shared receive queue");
    if (in->attr_mask & 2 && in->srq_limit > srq->max_wr) return EINVAL;
    if (in->attr_mask & 2) srq->limit = in->srq_limit;
    lab_srq_look(srq);
    return 0;
}

static int query_srq(struct lab_command *c) {
    const struct ib_uverbs_query_srq *in = (const void *)c->in;
    const lab_srq *srq = lab_find_srq(c->context, in->srq_handle);
    if (!srq) return EINVAL;
    const struct ib_uverbs_query_srq_resp reply = {
        .max_wr = srq->max_wr, .max_sge = srq->max_sge, .srq_limit = srq->limit};
    memcpy(c->out, &reply, sizeof reply);
    return 0;
}

static int destroy_srq(struct lab_command *c) {
    const struct ib_uverbs_destroy_srq *in = (const void *)c->in;
    struct ib_uverbs_destroy_srq_resp *out = (void *)c->out;
    if (!lab_find_srq(c->context, in->srq_handle)) return EINVAL;
    if (lab_users(c->context, in->srq_handle)) return EBUSY;
    out->events_reported = lab_events(c->context, in->srq_handle);
    return lab_destroy(c->context, LAB_SRQ, in->srq_handle);
}

/* -------------------------------------------------------------------------------------------------- address handles */

static int create_ah(struct lab_command *c) {
    const struct ib_uverbs_create_ah *in = (const void *)c->in;
    struct ib_uverbs_create_ah_resp *out = (void *)c->out;
    lab_context *context = c->context;
    lab_pd *pd = lab_find_pd(context, in->pd_handle);
    if (!pd || in->reserved || in->attr.port_num != 1) return EINVAL;
    if (!in->attr.is_global || in->attr.grh.sgid_index >= context->device->gids) return EINVAL;
    lab_ah *ah = lab_new(context, LAB_AH);
    if (!ah) return ENOMEM;
    ah->pd = pd;
    memcpy(&ah->gid, in->attr.grh.dgid, sizeof ah->gid);
    const int error = context->device->model->create_ah ? context->device->model->create_ah(ah, &c->call) : 0;
    if (error) {
        lab_free(context, LAB_AH, ah);
        return error;
    }
    lab_use(context, pd->handle, 1);
    lab_publish(context, LAB_AH, ah);
    out->ah_handle = ah->handle;
    return 0;
}

static int destroy_ah(struct lab_command *c) {
    return lab_destroy(c->context, LAB_AH, ((const struct ib_uverbs_destroy_ah *)c->in)->ah_handle);
}

/* ------------------------------------------------------------------------------------------------------- the commands
 */

static const struct command {
    uint8_t number;
    bool extended, replies; /* replies: a first form that begins with the address for its reply */
    uint16_t in, out;       /* bytes of the core structures; `in` without that address in the extended form */
    int (*run)(struct lab_command *c);
    const char *name;
} commands[] = {
#define ROW_(number, ex, replies, in, out, run)                                                                        \
    { IB_USER_VERBS_CMD_##number, ex, replies, in, out, run, #number }
#define PLAIN_(number, in, out, run) ROW_(number, false, true, sizeof(struct in), sizeof(struct out), run)
#define QUIET_(number, in, run) ROW_(number, false, false, sizeof(struct in), 0, run)
#define EXTENDED_(number, in, out, run) ROW_(number, true, true, sizeof(struct in), sizeof(struct out), run)
#define NONE_(number) ROW_(number, false, false, 0, 0, NULL)
    PLAIN_(GET_CONTEXT, ib_uverbs_get_context, ib_uverbs_get_context_resp, get_context),
    PLAIN_(QUERY_DEVICE, ib_uverbs_query_device, ib_uverbs_query_device_resp, query_device),
    PLAIN_(QUERY_PORT, ib_uverbs_query_port, ib_uverbs_query_port_resp, query_port),
    PLAIN_(ALLOC_PD, ib_uverbs_alloc_pd, ib_uverbs_alloc_pd_resp, alloc_pd),
    QUIET_(DEALLOC_PD, ib_uverbs_dealloc_pd, dealloc_pd),
    PLAIN_(CREATE_AH, ib_uverbs_create_ah, ib_uverbs_create_ah_resp, create_ah),
    QUIET_(DESTROY_AH, ib_uverbs_destroy_ah, destroy_ah),
    PLAIN_(REG_MR, ib_uverbs_reg_mr, ib_uverbs_reg_mr_resp, reg_mr), QUIET_(DEREG_MR, ib_uverbs_dereg_mr, dereg_mr),
    PLAIN_(CREATE_COMP_CHANNEL, ib_uverbs_create_comp_channel, ib_uverbs_create_comp_channel_resp, create_channel),
    PLAIN_(CREATE_CQ, ib_uverbs_create_cq, ib_uverbs_create_cq_resp, create_cq),
    PLAIN_(RESIZE_CQ, ib_uverbs_resize_cq, ib_uverbs_resize_cq_resp, resize_cq),
    QUIET_(REQ_NOTIFY_CQ, ib_uverbs_req_notify_cq, req_notify_cq),
    PLAIN_(DESTROY_CQ, ib_uverbs_destroy_cq, ib_uverbs_destroy_cq_resp, destroy_cq),
    PLAIN_(CREATE_QP, ib_uverbs_create_qp, ib_uverbs_create_qp_resp, lab_create_qp),
    PLAIN_(QUERY_QP, ib_uverbs_query_qp, ib_uverbs_query_qp_resp, lab_query_qp),
    QUIET_(MODIFY_QP, ib_uverbs_modify_qp, lab_modify_qp),
    PLAIN_(DESTROY_QP, ib_uverbs_destroy_qp, ib_uverbs_destroy_qp_resp, lab_destroy_qp),
    PLAIN_(CREATE_SRQ, ib_uverbs_create_srq, ib_uverbs_create_srq_resp, create_srq),
    PLAIN_(CREATE_XSRQ, ib_uverbs_create_xsrq, ib_uverbs_create_srq_resp, create_xsrq),
    QUIET_(MODIFY_SRQ, ib_uverbs_modify_srq, modify_srq),
    PLAIN_(QUERY_SRQ, ib_uverbs_query_srq, ib_uverbs_query_srq_resp, query_srq),
    PLAIN_(DESTROY_SRQ, ib_uverbs_destroy_srq, ib_uverbs_destroy_srq_resp, destroy_srq),
    EXTENDED_(QUERY_DEVICE, ib_uverbs_ex_query_device, ib_uverbs_ex_query_device_resp, ex_query_device),
    EXTENDED_(CREATE_CQ, ib_uverbs_ex_create_cq, ib_uverbs_ex_create_cq_resp, ex_create_cq),
    EXTENDED_(CREATE_QP, ib_uverbs_ex_create_qp, ib_uverbs_ex_create_qp_resp, lab_ex_create_qp),
    EXTENDED_(MODIFY_QP, ib_uverbs_ex_modify_qp, ib_uverbs_ex_modify_qp_resp, lab_ex_modify_qp),
    /* What the lab lacks, by name. */
    NONE_(MODIFY_AH), NONE_(QUERY_AH), NONE_(REG_SMR), NONE_(REREG_MR), NONE_(QUERY_MR), NONE_(ALLOC_MW),
    NONE_(BIND_MW), NONE_(DEALLOC_MW), NONE_(POLL_CQ), NONE_(PEEK_CQ), NONE_(POST_SEND), NONE_(POST_RECV),
    NONE_(ATTACH_MCAST), NONE_(DETACH_MCAST), NONE_(POST_SRQ_RECV), NONE_(OPEN_XRCD), NONE_(CLOSE_XRCD),
    NONE_(OPEN_QP)};

static const struct command *command_of(uint32_t number, bool extended) {
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (commands[i].number == number && commands[i].extended == extended) return &commands[i];
    return NULL;
}

_Static_assert(sizeof(struct ib_uverbs_ex_create_qp) <= LAB_CORE_BYTES &&
                   sizeof(struct ib_uverbs_query_qp_resp) <= LAB_CORE_BYTES &&
                   sizeof(struct ib_uverbs_ex_query_device_resp) <= LAB_CORE_BYTES,
               "core structures fit");

static bool zeroes(const uint8_t *bytes, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (bytes[i]) return false;
    return true;
}

static int run(const struct command *what, struct lab_command *c, uint8_t *response, size_t room) {
    const int error = what->run(c);
    if (error) return error;
    const size_t n = what->out < room ? what->out : room;
    if (n) memcpy(response, c->out, n);
    return 0;
}

static int run_plain(const struct command *what, struct lab_command *c, const uint8_t *bytes, size_t n, size_t room) {
    uint64_t response = 0;
    if (n < what->in) return EINVAL;
    memcpy(c->in, bytes, what->in);
    if (what->replies) memcpy(&response, bytes, sizeof response);
    /* A reply that has no room for the core structure is refused; the vendor's part may be cut. */
    if (what->replies && room < what->out) return ENOSPC;
    if (what->replies && !response) return EFAULT;
    uint8_t *out = (uint8_t *)(uintptr_t)response;
    c->call = (struct lab_call){.in = bytes + what->in, .in_bytes = n - what->in};
    if (what->replies && room > what->out) {
        c->call.out = out + what->out;
        c->call.out_room = room - what->out;
    }
    return run(what, c, out, room);
}

static int run_extended(const struct command *what, struct lab_command *c, const uint8_t *bytes,
                        const struct ib_uverbs_cmd_hdr *head, const struct ib_uverbs_ex_cmd_hdr *more) {
    const size_t core = head->in_words * 8u, vendor = more->provider_in_words * 8u, room = head->out_words * 8u;
    const size_t known = core < what->in ? core : what->in;
    if (more->cmd_hdr_reserved) return EINVAL;
    if (core > what->in && !zeroes(bytes + what->in, core - what->in)) return EOPNOTSUPP;
    memcpy(c->in, bytes, known);
    if ((room || more->provider_out_words) && !more->response) return EFAULT;
    uint8_t *out = (uint8_t *)(uintptr_t)more->response;
    c->call = (struct lab_call){.in = bytes + core,
                                .in_bytes = vendor,
                                .out = out ? out + room : NULL,
                                .out_room = more->provider_out_words * 8u};
    return run(what, c, out, room);
}

static int parse(lab_context *context, const uint8_t *bytes, size_t n) {
    struct ib_uverbs_cmd_hdr head;
    struct ib_uverbs_ex_cmd_hdr more = {0};
    if (n < sizeof head) return EINVAL;
    memcpy(&head, bytes, sizeof head);
    const bool extended = head.command & IB_USER_VERBS_CMD_FLAG_EXTENDED;
    const uint32_t number = head.command & IB_USER_VERBS_CMD_COMMAND_MASK;
    if (head.command & ~(uint32_t)(IB_USER_VERBS_CMD_FLAG_EXTENDED | IB_USER_VERBS_CMD_COMMAND_MASK)) return EINVAL;
    if (extended) {
        if (n < sizeof head + sizeof more) return EINVAL;
        memcpy(&more, bytes + sizeof head, sizeof more);
        if ((head.in_words + more.provider_in_words) * 8u != n - sizeof head - sizeof more) return EINVAL;
    } else if (head.in_words * 4u != n) {
        return EINVAL;
    }
    const struct command *what = command_of(number, extended);
    if (!what) return lab_unsupported("%scommand %u of the device", extended ? "extended " : "", number);
    if (!what->run) return lab_unsupported("command %s of the device", what->name);
    if (context->async_read < 0 && what->run != get_context) return EINVAL; /* a context is got first */
    struct lab_command c = {.context = context};
    if (extended) return run_extended(what, &c, bytes + sizeof head + sizeof more, &head, &more);
    return run_plain(what, &c, bytes + sizeof head, n - sizeof head, head.out_words * 4u);
}

ssize_t lab_uverbs_write(lab_context *context, const void *bytes, size_t n) {
    lab_trapped_all();
    const int error = parse(context, bytes, n);
    return error ? -error : (ssize_t)n;
}
