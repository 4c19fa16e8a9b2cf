/* SPDX-License-Identifier: Apache-2.0
 *
 * What a program says to a device of the lab: commands that are written and attributes of ioctl(), of any bytes, by two
 * contexts of one NIC. Nothing of one context is changed by the other, nor does an object name one of the other's.
 *
 * Addresses that a command has its reply put at are good, with the room that it says and no byte more: those that are
 * not end in SIGSEGV, here as in the lab. Rings and records may be anywhere; some are where there is memory.
 */
#include <errno.h>
#include <pthread.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/mlx5-abi.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <unistd.h>

#include "fuzz.h"
#include "lab/control.h"

/* ------------------------------------------------------------------------------------------ the NIC's thread: none */

uint32_t lab_wanted;
static uint32_t regions, flows;

int lab_nic_open(lab_device *device) {
    device->nic = (vnic_nic *)&regions;
    return 0;
}

void lab_nic_wake(void) {}

uint32_t lab_slot(void) {
    return 1;
}

int lab_region_add(lab_mr *mr) {
    mr->region = (struct vnic_region *)&regions;
    regions++;
    return 0;
}

void lab_region_remove(lab_mr *mr) {
    FUZZ_CHECK(mr->region, "a region that was not added");
    mr->region = NULL;
    regions--;
}

int lab_flow_open(lab_qp *qp) {
    qp->flow = (struct lab_flow *)&flows;
    flows++;
    return 0;
}

int lab_flow_modify(lab_qp *qp, enum lab_qp_state from) {
    (void)from;
    FUZZ_CHECK(qp->flow, "a flow that was not opened");
    return 0;
}

void lab_flow_close(lab_qp *qp) {
    FUZZ_CHECK(qp->flow, "a flow that was not opened");
    qp->flow = NULL;
    flows--;
}

/* By the linker (--wrap): what is not implemented is most of what comes, and nobody reads it. */
int __wrap_lab_unsupported(const char *format, ...);
int __wrap_lab_unsupported(const char *format, ...) {
    (void)format;
    return EOPNOTSUPP;
}

void __wrap_lab_say(const char *format, ...);
void __wrap_lab_say(const char *format, ...) {
    (void)format;
}

/* ----------------------------------------------------------------------------------------------------------- objects
 */

enum { CONTEXTS = 2, HANDLES = 64, FDS = 32, BUFFERS = 128, MEMORY = 1 << 18 };

static _Alignas(65536) uint8_t memory[MEMORY]; /* rings and records */
static lab_context *contexts[CONTEXTS];
static int channels[FDS];
static uint32_t channels_n;
static void *buffers[BUFFERS];
static uint32_t buffers_n;

struct seen {
    void *object;
    uint32_t users, kind;
};

static void look(lab_context *context, struct seen *seen) {
    memset(seen, 0, HANDLES * sizeof *seen);
    for (uint32_t h = 0; h < HANDLES; h++)
        for (uint32_t kind = LAB_PD; kind <= LAB_AH; kind++) {
            void *object = lab_find(context, (enum lab_kind)kind, h);
            if (object) seen[h] = (struct seen){object, lab_users(context, h), kind};
        }
}

static void check_own(const lab_context *context, const struct seen *seen) {
    for (uint32_t h = 0; h < HANDLES; h++) {
        const lab_qp *qp = seen[h].object;
        switch (seen[h].kind) {
        case LAB_PD:
            FUZZ_CHECK(((const lab_pd *)seen[h].object)->context == context, "protection domain %u", h);
            break;
        case LAB_MR:
            FUZZ_CHECK(((const lab_mr *)seen[h].object)->pd->context == context, "region %u", h);
            break;
        case LAB_CQ:
            FUZZ_CHECK(((const lab_cq *)seen[h].object)->context == context, "completion queue %u", h);
            break;
        case LAB_SRQ:
            FUZZ_CHECK(((const lab_srq *)seen[h].object)->pd->context == context, "shared receives %u", h);
            break;
        case LAB_AH:
            FUZZ_CHECK(((const lab_ah *)seen[h].object)->pd->context == context, "address handle %u", h);
            break;
        case LAB_QP:
            FUZZ_CHECK(qp->pd->context == context && qp->send_cq->context == context &&
                           qp->recv_cq->context == context && (!qp->srq || qp->srq->pd == qp->pd),
                       "queue pair %u", h);
            break;
        default:
            break;
        }
    }
}

/* Exactly as long as it is said to be. */
static uint64_t buffer(size_t bytes) {
    if (buffers_n == BUFFERS) return 0;
    void *made = malloc(bytes ? bytes : 1);
    if (!made) abort();
    buffers[buffers_n++] = made;
    return (uintptr_t)made;
}

/* Some words of a command become addresses of memory that is there. */
static void place_rings(fuzz_input *in, uint8_t *bytes, size_t n) {
    for (uint32_t i = fuzz_u8(in) % 5; i; i--) {
        const size_t at = fuzz_u8(in) * 4u;
        const uint64_t address = (uintptr_t)memory + fuzz_below(in, 32) * 4096u + (fuzz_u8(in) & 7u) * 8;
        if (at + sizeof address <= n) memcpy(bytes + at, &address, sizeof address);
    }
}

/* ---------------------------------------------------------------------------------------------------------- commands
 */

static bool has_no_reply(uint32_t number) {
    return number == IB_USER_VERBS_CMD_DEALLOC_PD || number == IB_USER_VERBS_CMD_DESTROY_AH ||
           number == IB_USER_VERBS_CMD_DEREG_MR || number == IB_USER_VERBS_CMD_REQ_NOTIFY_CQ ||
           number == IB_USER_VERBS_CMD_MODIFY_QP || number == IB_USER_VERBS_CMD_MODIFY_SRQ;
}

static void written(fuzz_input *in, lab_context *context) {
    uint8_t bytes[1024] = {0};
    const uint8_t how = fuzz_u8(in);
    const bool extended = how & 1, honest = !(how & 2);
    const size_t head = sizeof(struct ib_uverbs_cmd_hdr) + (extended ? sizeof(struct ib_uverbs_ex_cmd_hdr) : 0);
    struct ib_uverbs_cmd_hdr first = {.command = fuzz_u8(in) % 64u, .out_words = fuzz_u8(in)};
    struct ib_uverbs_ex_cmd_hdr more = {.provider_out_words = fuzz_u8(in)};
    const uint32_t number = first.command;
    size_t n = fuzz_some(in, bytes + head, 512) & ~(size_t)7;
    place_rings(in, bytes + head, n);
    uint64_t reply = 0;
    if (extended) {
        first.command |= IB_USER_VERBS_CMD_FLAG_EXTENDED;
        more.provider_in_words = (uint16_t)(n / 8 ? fuzz_u8(in) % (n / 8 + 1) : 0);
        first.in_words = (uint16_t)(n / 8 - more.provider_in_words);
        more.response = reply = buffer((first.out_words + more.provider_out_words) * 8u);
    } else {
        first.in_words = (uint16_t)((head + n) / 4);
        if (n >= 8 && !has_no_reply(number)) {
            reply = buffer(first.out_words * 4u);
            memcpy(bytes + head, &reply, sizeof reply);
        }
    }
    if (!honest) {
        first.command |= fuzz_u32(in) & 0xffffff00;
        first.in_words = (uint16_t)(first.in_words + fuzz_u8(in) - 128u);
        n = fuzz_u8(in) % (n + 1);
    }
    memcpy(bytes, &first, sizeof first);
    if (extended) memcpy(bytes + sizeof first, &more, sizeof more);
    uint8_t *exact = malloc(head + n);
    if (!exact) abort();
    memcpy(exact, bytes, head + n);
    const ssize_t result = lab_uverbs_write(context, exact, head + n);
    free(exact);
    FUZZ_CHECK(result == (ssize_t)(head + n) || (result < 0 && result > -4096), "write() returned %zd", result);
    if (result < 0 || extended || number != IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL) return;
    int fd;
    memcpy(&fd, (void *)(uintptr_t)reply, sizeof fd);
    if (channels_n == FDS) abort();
    channels[channels_n++] = fd;
}

/* Attributes that the answer goes to. */
static bool is_out(uint16_t object, uint16_t method, uint16_t id) {
    if (id == UVERBS_ATTR_UHW_OUT) return true;
    if (object == UVERBS_OBJECT_DEVICE && method == UVERBS_METHOD_QUERY_PORT) return id == UVERBS_ATTR_QUERY_PORT_RESP;
    if (object == UVERBS_OBJECT_DEVICE && method == UVERBS_METHOD_QUERY_GID_TABLE)
        return id == UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES || id == UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES;
    if (object == UVERBS_OBJECT_DEVICE && method == UVERBS_METHOD_QUERY_GID_ENTRY)
        return id == UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY;
    if (object == UVERBS_OBJECT_DEVICE && method == UVERBS_METHOD_QUERY_CONTEXT)
        return id == UVERBS_ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS || id == UVERBS_ATTR_QUERY_CONTEXT_CORE_SUPPORT;
    if (object == UVERBS_OBJECT_MR && method == UVERBS_METHOD_REG_DMABUF_MR)
        return id == UVERBS_ATTR_REG_DMABUF_MR_RESP_LKEY || id == UVERBS_ATTR_REG_DMABUF_MR_RESP_RKEY;
    if (object == UVERBS_OBJECT_MR && method == UVERBS_METHOD_QUERY_MR)
        return id == UVERBS_ATTR_QUERY_MR_RESP_LKEY || id == UVERBS_ATTR_QUERY_MR_RESP_RKEY ||
               id == UVERBS_ATTR_QUERY_MR_RESP_LENGTH || id == UVERBS_ATTR_QUERY_MR_RESP_IOVA;
    return false;
}

static void attributes(fuzz_input *in, lab_context *context) {
    enum { MOST = 8 };
    struct ib_uverbs_ioctl_hdr *head;
    const uint32_t n = fuzz_u8(in) % (MOST + 1);
    const size_t bytes = sizeof *head + n * sizeof *head->attrs;
    head = malloc(bytes);
    if (!head) abort();
    memset(head, 0, bytes);
    const uint8_t how = fuzz_u8(in);
    head->object_id = how & 1 ? (how & 2 ? UVERBS_OBJECT_MR : UVERBS_OBJECT_DEVICE) : (uint16_t)fuzz_number(in);
    head->method_id = how & 4 ? (uint16_t)fuzz_number(in) : how >> 4 & 7;
    head->num_attrs = (uint16_t)n;
    head->length = (uint16_t)(how & 8 ? fuzz_number(in) : bytes);
    head->driver_id = how & 128 ? (uint32_t)fuzz_number(in) : context->device->model->driver_id;
    for (uint32_t i = 0; i < n; i++) {
        struct ib_uverbs_attr *a = &head->attrs[i];
        const uint8_t what = fuzz_u8(in);
        a->attr_id = what & 1 ? (uint16_t)fuzz_number(in) : what >> 1 & 7;
        a->len = (uint16_t)(what & 16 ? fuzz_number(in) : what & 32 ? 8 : 0);
        a->data = fuzz_number(in);
        if (a->len > sizeof a->data || is_out(head->object_id, head->method_id, a->attr_id)) {
            a->data = what & 64 ? 0 : buffer(a->len);
            if (a->data && !is_out(head->object_id, head->method_id, a->attr_id))
                fuzz_fill(in, (void *)(uintptr_t)a->data, a->len);
        }
    }
    const int result = lab_uverbs_ioctl(context, how & 64 ? fuzz_u64(in) : RDMA_VERBS_IOCTL, head);
    FUZZ_CHECK(result <= 0 && result > -4096, "ioctl() returned %d", result);
    free(head);
}

/* As a library begins. */
static void get_context(lab_context *context) {
    struct {
        struct ib_uverbs_cmd_hdr head;
        uint64_t response;                           /* all of ib_uverbs_get_context */
        struct mlx5_ib_alloc_ucontext_req_v2 vendor; /* the others look at none of it */
    } in = {.head = {.command = IB_USER_VERBS_CMD_GET_CONTEXT, .in_words = sizeof in / 4, .out_words = 64},
            .response = buffer(256),
            .vendor = {.total_num_bfregs = 16, .max_cqe_version = 1}};
    const ssize_t result = lab_uverbs_write(context, &in, sizeof in);
    FUZZ_CHECK(result == sizeof in, "a context: %zd", result);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = fuzz_begin(data, size);
    struct seen before[CONTEXTS][HANDLES], after[HANDLES];
    uint32_t devices;
    setenv("UCCL_EP_LAB", "nic=connectx;nic=efa,variant=efa3;nic=thor;nic=pollara;nic=pollara,variant=pollara-v2", 0);
    lab_device *device = lab_devices(&devices);
    FUZZ_CHECK(device, "no NICs");
    const uint8_t start = fuzz_u8(&in);
    device += (start & 127) % devices;
    pthread_mutex_lock(&lab_lock);
    for (uint32_t i = 0; i < CONTEXTS; i++) {
        contexts[i] = lab_context_new(device, -1);
        if (!(start & 128)) get_context(contexts[i]);
        look(contexts[i], before[i]);
    }
    for (uint32_t steps = 0; steps < 24 && fuzz_left(&in); steps++) {
        const uint8_t what = fuzz_u8(&in);
        const uint32_t who = what & 1, other = !who;
        if (what & 6)
            written(&in, contexts[who]);
        else
            attributes(&in, contexts[who]);
        look(contexts[other], after);
        FUZZ_CHECK(!memcmp(after, before[other], sizeof after), "the other context has changed");
        look(contexts[who], before[who]);
        check_own(contexts[who], before[who]);
    }
    for (uint32_t i = 0; i < CONTEXTS; i++) {
        const int async = contexts[i]->async_read;
        lab_context_free(contexts[i]);
        if (async >= 0) close(async);
    }
    for (; channels_n; channels_n--) close(channels[channels_n - 1]);
    FUZZ_CHECK(!regions && !flows, "%u regions and %u flows are left", regions, flows);
    device->nic = NULL;
    pthread_mutex_unlock(&lab_lock);
    for (; buffers_n; buffers_n--) free(buffers[buffers_n - 1]);
    return 0;
}
