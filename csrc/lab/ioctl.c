/* SPDX-License-Identifier: Apache-2.0
 *
 * ioctl.c: methods that are called by ioctl() with attributes (rdma/rdma_user_ioctl_cmds.h, ib_user_ioctl_cmds.h).
 *
 * libibverbs asks by ioctl first and, told EPROTONOSUPPORT, writes the command instead: what has a written form is
 * therefore refused so, without a word. Here is what has none.
 */
#include <errno.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <string.h>
#include <sys/ioctl.h>

#include "uverbs.h"

#define MAX_ATTRIBUTES 64u

/* -------------------------------------------------------------------------------------------------------- attributes
 */

const struct ib_uverbs_attr *lab_attribute(const void *attributes, uint16_t id) {
    const struct ib_uverbs_ioctl_hdr *head = attributes;
    for (uint32_t i = 0; i < head->num_attrs; i++)
        if (head->attrs[i].attr_id == id) return &head->attrs[i];
    return NULL;
}

/* A value of `bytes`, as numbers are passed: zero-extended from what there is. */
static int number_in(const void *attributes, uint16_t id, uint64_t *value) {
    const struct ib_uverbs_attr *a = lab_attribute(attributes, id);
    if (!a) return EINVAL;
    if (a->len > sizeof *value) return EINVAL;
    *value = a->data;
    if (a->len && a->len < sizeof *value) *value &= (1ull << 8 * a->len) - 1;
    return 0;
}

static int handle_in(const void *attributes, uint16_t id, uint32_t *handle) {
    const struct ib_uverbs_attr *a = lab_attribute(attributes, id);
    if (!a || a->len || a->data > UINT32_MAX) return EINVAL;
    *handle = (uint32_t)a->data;
    return 0;
}

static void handle_out(void *attributes, uint16_t id, uint32_t handle) {
    struct ib_uverbs_ioctl_hdr *head = attributes;
    for (uint32_t i = 0; i < head->num_attrs; i++)
        if (head->attrs[i].attr_id == id) head->attrs[i].data = handle;
}

/* Cut to the room. An attribute that is not there is not wanted. */
static int bytes_out(void *attributes, uint16_t id, const void *bytes, size_t n) {
    struct ib_uverbs_ioctl_hdr *head = attributes;
    for (uint32_t i = 0; i < head->num_attrs; i++) {
        struct ib_uverbs_attr *a = &head->attrs[i];
        if (a->attr_id != id) continue;
        if (!a->data) return EFAULT;
        memcpy((void *)(uintptr_t)a->data, bytes, n < a->len ? n : a->len);
        a->flags |= UVERBS_ATTR_F_VALID_OUTPUT;
    }
    return 0;
}

/* The vendor's attributes as a call. */
static struct lab_call vendor(const void *attributes) {
    const struct ib_uverbs_attr *in = lab_attribute(attributes, UVERBS_ATTR_UHW_IN),
                                *out = lab_attribute(attributes, UVERBS_ATTR_UHW_OUT);
    struct lab_call call = {0};
    if (in) {
        call.in_bytes = in->len;
        call.in = in->len <= sizeof in->data ? (const uint8_t *)&in->data : (const uint8_t *)(uintptr_t)in->data;
    }
    if (out) {
        call.out = (uint8_t *)(uintptr_t)out->data;
        call.out_room = out->len;
    }
    return call;
}

/* ------------------------------------------------------------------------------------------------------------- device
 */

static int query_port(lab_context *context, void *attributes) {
    struct ib_uverbs_query_port_resp_ex reply = {0};
    uint64_t port;
    if (number_in(attributes, UVERBS_ATTR_QUERY_PORT_PORT_NUM, &port) || port > 255) return EINVAL;
    const int error = lab_query_port(context, (uint32_t)port, &reply.legacy_resp);
    return error ? error : bytes_out(attributes, UVERBS_ATTR_QUERY_PORT_RESP, &reply, sizeof reply);
}

/* RoCE v2 is what the lab speaks; a NIC that is no RoCE has one GID of its own kind. */
static struct ib_uverbs_gid_entry gid_entry(const lab_device *device, uint32_t index) {
    struct ib_uverbs_query_port_resp port = {.link_layer = 2};
    if (device->model->query_port) device->model->query_port(device, &port);
    struct ib_uverbs_gid_entry entry = {.gid_index = index,
                                        .port_num = 1,
                                        .gid_type =
                                            port.link_layer == 2 ? IB_UVERBS_GID_TYPE_ROCE_V2 : IB_UVERBS_GID_TYPE_IB};
    memcpy(entry.gid, &device->gid[index], sizeof device->gid[index]);
    return entry;
}

static int query_gid_entry(lab_context *context, void *attributes) {
    uint64_t port, index, flags;
    if (number_in(attributes, UVERBS_ATTR_QUERY_GID_ENTRY_PORT, &port) ||
        number_in(attributes, UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX, &index) ||
        number_in(attributes, UVERBS_ATTR_QUERY_GID_ENTRY_FLAGS, &flags) || flags || port != 1)
        return EINVAL;
    if (index >= context->device->gids) return ENODATA;
    const struct ib_uverbs_gid_entry entry = gid_entry(context->device, (uint32_t)index);
    return bytes_out(attributes, UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY, &entry, sizeof entry);
}

static int query_gid_table(lab_context *context, void *attributes) {
    const lab_device *device = context->device;
    const struct ib_uverbs_attr *list = lab_attribute(attributes, UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES);
    uint64_t size, flags;
    if (number_in(attributes, UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE, &size) ||
        number_in(attributes, UVERBS_ATTR_QUERY_GID_TABLE_FLAGS, &flags) || flags || !list || !list->data || !size)
        return EINVAL;
    uint64_t n = 0;
    for (; n < device->gids && (n + 1) * size <= list->len; n++) {
        const struct ib_uverbs_gid_entry entry = gid_entry(device, (uint32_t)n);
        uint8_t *at = (uint8_t *)(uintptr_t)list->data + n * size;
        memset(at, 0, size);
        memcpy(at, &entry, size < sizeof entry ? size : sizeof entry);
    }
    if (n < device->gids) return EINVAL; /* as the kernel: there must be room for all */
    return bytes_out(attributes, UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, &n, sizeof n);
}

/* ---------------------------------------------------------------------------------------------------------------
 * memory */

static int reg_dmabuf_mr(lab_context *context, void *attributes) {
    struct lab_registration wanted = {0};
    const struct ib_uverbs_attr *fd = lab_attribute(attributes, UVERBS_ATTR_REG_DMABUF_MR_FD);
    uint64_t access;
    if (handle_in(attributes, UVERBS_ATTR_REG_DMABUF_MR_PD_HANDLE, &wanted.pd) ||
        number_in(attributes, UVERBS_ATTR_REG_DMABUF_MR_OFFSET, &wanted.start) ||
        number_in(attributes, UVERBS_ATTR_REG_DMABUF_MR_LENGTH, &wanted.length) ||
        number_in(attributes, UVERBS_ATTR_REG_DMABUF_MR_IOVA, &wanted.iova) ||
        number_in(attributes, UVERBS_ATTR_REG_DMABUF_MR_ACCESS_FLAGS, &access) || access > UINT32_MAX || !fd)
        return EINVAL;
    wanted.access = (uint32_t)access;
    wanted.dmabuf = (int)fd->data_s64;
    if (wanted.dmabuf < 0) return EBADF;
    struct lab_call call = vendor(attributes);
    lab_mr *mr;
    int error = lab_register(context, &wanted, &call, &mr);
    if (error) return error;
    handle_out(attributes, UVERBS_ATTR_REG_DMABUF_MR_HANDLE, mr->handle);
    error = bytes_out(attributes, UVERBS_ATTR_REG_DMABUF_MR_RESP_LKEY, &mr->key, sizeof mr->key);
    if (!error) error = bytes_out(attributes, UVERBS_ATTR_REG_DMABUF_MR_RESP_RKEY, &mr->key, sizeof mr->key);
    if (error) lab_destroy(context, LAB_MR, mr->handle);
    return error;
}

static int query_mr(lab_context *context, void *attributes) {
    uint32_t handle;
    if (handle_in(attributes, UVERBS_ATTR_QUERY_MR_HANDLE, &handle)) return EINVAL;
    const lab_mr *mr = lab_find_mr(context, handle);
    if (!mr) return ENOENT;
    int error = bytes_out(attributes, UVERBS_ATTR_QUERY_MR_RESP_LKEY, &mr->key, sizeof mr->key);
    if (!error) error = bytes_out(attributes, UVERBS_ATTR_QUERY_MR_RESP_RKEY, &mr->key, sizeof mr->key);
    if (!error) error = bytes_out(attributes, UVERBS_ATTR_QUERY_MR_RESP_LENGTH, &mr->length, sizeof mr->length);
    if (!error) error = bytes_out(attributes, UVERBS_ATTR_QUERY_MR_RESP_IOVA, &mr->iova, sizeof mr->iova);
    return error;
}

static int query_context(lab_context *context, void *attributes) {
    const uint32_t vectors = 1;
    const uint64_t support = 0;
    if (context->device->model->method) {
        const int error =
            context->device->model->method(context, UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_CONTEXT, attributes);
        if (error) return error;
    }
    const int error = bytes_out(attributes, UVERBS_ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS, &vectors, sizeof vectors);
    return error ? error : bytes_out(attributes, UVERBS_ATTR_QUERY_CONTEXT_CORE_SUPPORT, &support, sizeof support);
}

/* ---------------------------------------------------------------------------------------------------------- the
 * methods */

enum { NEWER_QUERY_PORT_SPEED = 7, NEWER_DEVICE_8 = 8, NEWER_REG_MR = 5 };

static const struct method {
    uint16_t object, method;
    int (*run)(lab_context *context, void *attributes); /* NULL: the command is written */
} methods[] = {
    {UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_PORT, query_port},
    {UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_GID_TABLE, query_gid_table},
    {UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_GID_ENTRY, query_gid_entry},
    {UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_CONTEXT, query_context},
    {UVERBS_OBJECT_MR, UVERBS_METHOD_REG_DMABUF_MR, reg_dmabuf_mr},
    {UVERBS_OBJECT_MR, UVERBS_METHOD_QUERY_MR, query_mr},
    {UVERBS_OBJECT_DEVICE, UVERBS_METHOD_INVOKE_WRITE, NULL},
    {UVERBS_OBJECT_DEVICE, UVERBS_METHOD_GET_CONTEXT, NULL},
    {UVERBS_OBJECT_ASYNC_EVENT, UVERBS_METHOD_ASYNC_EVENT_ALLOC, NULL},
    /* Newer than the headers that this is built with; libibverbs goes on without, as on an older kernel. */
    {UVERBS_OBJECT_DEVICE, NEWER_QUERY_PORT_SPEED, NULL},
    {UVERBS_OBJECT_DEVICE, NEWER_DEVICE_8, NULL},
    {UVERBS_OBJECT_MR, NEWER_REG_MR, NULL},
    {UVERBS_OBJECT_PD, UVERBS_METHOD_PD_DESTROY, NULL},
    {UVERBS_OBJECT_MR, UVERBS_METHOD_MR_DESTROY, NULL},
    {UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_CREATE, NULL},
    {UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_DESTROY, NULL},
    {UVERBS_OBJECT_QP, UVERBS_METHOD_QP_CREATE, NULL},
    {UVERBS_OBJECT_QP, UVERBS_METHOD_QP_DESTROY, NULL},
    {UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_CREATE, NULL},
    {UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_DESTROY, NULL},
    {UVERBS_OBJECT_AH, UVERBS_METHOD_AH_DESTROY, NULL},
};

static int call(lab_context *context, struct ib_uverbs_ioctl_hdr *head) {
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++) {
        const struct method *m = &methods[i];
        if (m->object != head->object_id || m->method != head->method_id) continue;
        if (!m->run) return EPROTONOSUPPORT;
        return context->async_read < 0 ? EINVAL : m->run(context, head);
    }
    if (context->device->model->method)
        return context->device->model->method(context, head->object_id, head->method_id, head);
    return lab_unsupported("method %u of object 0x%x of the device", head->method_id, head->object_id);
}

int lab_uverbs_ioctl(lab_context *context, unsigned long request, void *argument) {
    struct ib_uverbs_ioctl_hdr *head = argument;
    lab_trapped_all();
    if (request != RDMA_VERBS_IOCTL) return -ENOTTY;
    if (!head) return -EFAULT;
    if (head->num_attrs > MAX_ATTRIBUTES || head->length != sizeof *head + head->num_attrs * sizeof *head->attrs ||
        head->reserved1 || head->reserved2)
        return -EINVAL;
    if (head->driver_id != context->device->model->driver_id) return -EINVAL;
    return -call(context, head);
}
