/* SPDX-License-Identifier: Apache-2.0
 *
 * lab_plane.h: a NIC's thread for tests of the lab's control path and models: none at all. What the thread would do is
 * done when the test says so, in this process, in order. And commands, written as a library writes them.
 *
 * Included once by a test that is linked with the lab without nic.c, flow.c, ghost.c, wire.c and preload.c.
 */
#ifndef UCCL_EP_LAB_PLANE_H
#define UCCL_EP_LAB_PLANE_H

#include <errno.h>
#include <rdma/ib_user_verbs.h>

#include "control.h"
#include "testing.h"

static struct {
    uint32_t regions, flows, woken, fail_region, fail_flow; /* fail: the errno of the next call */
    lab_qp *modified;
    enum lab_qp_state from;
} plane;

uint32_t lab_wanted;
static uint32_t plane_slot = 5;
static struct vnic_region *plane_region = (struct vnic_region *)&plane;

int lab_nic_open(lab_device *device) {
    device->nic = (vnic_nic *)&plane;
    return 0;
}

void lab_nic_wake(void) {
    __atomic_add_fetch(&plane.woken, 1, __ATOMIC_RELAXED);
}

uint32_t lab_slot(void) {
    return plane_slot;
}

int lab_region_add(lab_mr *mr) {
    const int error = (int)plane.fail_region;
    plane.fail_region = 0;
    if (error) return error;
    mr->region = plane_region;
    plane.regions++;
    return 0;
}

void lab_region_remove(lab_mr *mr) {
    CHECK(mr->region == plane_region, "a region that was not added");
    mr->region = NULL;
    plane.regions--;
}

int lab_flow_open(lab_qp *qp) {
    const int error = (int)plane.fail_flow;
    plane.fail_flow = 0;
    if (error) return error;
    qp->flow = (struct lab_flow *)&plane;
    plane.flows++;
    return 0;
}

int lab_flow_modify(lab_qp *qp, enum lab_qp_state from) {
    plane.modified = qp;
    plane.from = from;
    return 0;
}

void lab_flow_close(lab_qp *qp) {
    CHECK(qp->flow, "a flow that was not opened");
    qp->flow = NULL;
    plane.flows--;
}

/* ---------------------------------------------------------------------------------------------------------- commands
 */

/* What is written: 1 for the first form, else the extended one. Returns what write() would: bytes, or -errno. */
struct plane_command {
    uint32_t number;
    bool extended;
    const void *core, *vendor; /* the core structure without `response` in the extended form */
    size_t core_bytes, vendor_bytes;
    void *out;
    size_t out_bytes; /* core */
    size_t vendor_out_bytes;
};

static inline ssize_t plane_write(lab_context *context, const struct plane_command *c) {
    uint8_t bytes[1024] = {0};
    struct ib_uverbs_cmd_hdr head = {.command = c->number};
    size_t n = sizeof head;
    if (c->extended) {
        const struct ib_uverbs_ex_cmd_hdr more = {.response = (uintptr_t)c->out,
                                                  .provider_in_words = (uint16_t)(c->vendor_bytes / 8),
                                                  .provider_out_words = (uint16_t)(c->vendor_out_bytes / 8)};
        head.command |= IB_USER_VERBS_CMD_FLAG_EXTENDED;
        head.in_words = (uint16_t)(c->core_bytes / 8);
        head.out_words = (uint16_t)(c->out_bytes / 8);
        memcpy(bytes + n, &more, sizeof more);
        n += sizeof more;
    } else {
        head.in_words = (uint16_t)((n + c->core_bytes + c->vendor_bytes) / 4);
        head.out_words = (uint16_t)((c->out_bytes + c->vendor_out_bytes) / 4);
    }
    memcpy(bytes, &head, sizeof head);
    CHECK(n + c->core_bytes + c->vendor_bytes <= sizeof bytes, "a command of the test's is too long");
    if (c->core_bytes) memcpy(bytes + n, c->core, c->core_bytes);
    n += c->core_bytes;
    if (c->vendor_bytes) memcpy(bytes + n, c->vendor, c->vendor_bytes);
    n += c->vendor_bytes;
    pthread_mutex_lock(&lab_lock);
    const ssize_t result = lab_uverbs_write(context, bytes, n);
    pthread_mutex_unlock(&lab_lock);
    return result;
}

/* A command of the first form that says where its reply goes. 0 or an errno. */
#define PLANE_CALL(context, what, in, reply)                                                                           \
    ((in)->response = (uintptr_t)(reply),                                                                              \
     plane_errno(plane_write(context, &(struct plane_command){.number = IB_USER_VERBS_CMD_##what,                      \
                                                              .core = (in),                                            \
                                                              .core_bytes = sizeof *(in),                              \
                                                              .out = (reply),                                          \
                                                              .out_bytes = sizeof *(reply)})))
/* And one that has no reply. */
#define PLANE_TELL(context, what, in)                                                                                  \
    plane_errno(plane_write(                                                                                           \
        context,                                                                                                       \
        &(struct plane_command){.number = IB_USER_VERBS_CMD_##what, .core = (in), .core_bytes = sizeof *(in)}))

static inline int plane_errno(ssize_t result) {
    return result < 0 ? (int)-result : 0;
}

#endif
