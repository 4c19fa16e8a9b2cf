/* SPDX-License-Identifier: Apache-2.0
 *
 * device.c: which NICs libibverbs sees, and what each is good for.
 *
 * A device that cannot be used is listed with the reason; one of another vendor too, since a user who finds his NIC in
 * no list does not know why.
 */
#include "verbs.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* --------------------------------------------------------------------------------------------------------- sysfs */

/* As libibverbs itself; tests lay out machines there that do not exist. */
static const char *sysfs_root(void) {
    const char *root = getenv("SYSFS_PATH");
    return root && root[0] ? root : "/sys";
}

static void read_sysfs(verbs_found *found) {
    char path[PATH_MAX], target[PATH_MAX];
    found->numa_node = -1;
    snprintf(path, sizeof path, "%s/class/infiniband/%.63s/device/numa_node", sysfs_root(), found->name);
    FILE *file = fopen(path, "re");
    if (file) {
        int node;
        if (fscanf(file, "%d", &node) == 1 && node >= 0) found->numa_node = node;
        fclose(file);
    }
    snprintf(path, sizeof path, "%s/class/infiniband/%.63s/device/vendor", sysfs_root(), found->name);
    file = fopen(path, "re");
    if (file) {
        if (fscanf(file, "%x", &found->pci_vendor) != 1) found->pci_vendor = 0;
        fclose(file);
    }
    snprintf(path, sizeof path, "%s/class/infiniband/%.63s/device", sysfs_root(), found->name);
    const ssize_t n = readlink(path, target, sizeof target - 1);
    if (n <= 0) return;
    target[n] = 0;
    const char *slash = strrchr(target, '/');
    snprintf(found->address, sizeof found->address, "%.63s", slash ? slash + 1 : target);
}

/* Bridges on the way from one PCI device to another; -1 where that is not known. */
static int pci_distance(const char *one, const char *other) {
    char path[PATH_MAX], a[PATH_MAX], b[PATH_MAX], lower[64];
    size_t n = 0;
    for (; one[n] && n + 1 < sizeof lower; n++) lower[n] = (char)tolower((unsigned char)one[n]);
    lower[n] = 0;
    snprintf(path, sizeof path, "%s/bus/pci/devices/%s", sysfs_root(), lower);
    if (!one[0] || !realpath(path, a)) return -1;
    snprintf(path, sizeof path, "%s/bus/pci/devices/%s", sysfs_root(), other);
    if (!other[0] || !realpath(path, b)) return -1;
    size_t common = 0;
    for (size_t i = 0; a[i] && a[i] == b[i]; i++)
        if (a[i] == '/') common = i;
    int steps = 0;
    for (const char *p = a + common + 1; *p; p++) steps += *p == '/';
    for (const char *p = b + common + 1; *p; p++) steps += *p == '/';
    return steps;
}

uint32_t verbs_distance(const uccl_ep_host *host, const verbs_found *found) {
    const bool gpu = host->size >= offsetof(uccl_ep_host, gpu_info) + sizeof host->gpu_info && host->gpu_info;
    if (gpu) {
        const int steps = pci_distance(host->gpu_info->address, found->address);
        if (steps >= 0) return (uint32_t)steps;
    }
    unsigned cpu, node;
    int32_t here = gpu ? host->gpu_info->numa_node : -1;
    if (here < 0 && !getcpu(&cpu, &node)) here = (int32_t)node;
    return found->numa_node < 0 || here < 0 ? 1001 : found->numa_node == here ? 1000 : 1002;
}

/* --------------------------------------------------------------------------------------------------------- a device */

const char *verbs_model_name(const struct ibv_device_attr *attributes, char text[64]) {
    for (const verbs_model *m = verbs_this_vendor.models; m->name; m++)
        if (m->part == attributes->vendor_part_id) return m->name;
    snprintf(text, 64, "part %#x", attributes->vendor_part_id);
    return text;
}

/* By who made the card, or its chip. */
static bool ours(const verbs_found *found) {
    for (const uint32_t *id = verbs_this_vendor.ids; *id; id++)
        if (*id == found->attributes.vendor_id) return true;
    return found->pci_vendor == verbs_this_vendor.pci;
}

static uint32_t positive(int value) {
    return value > 0 ? (uint32_t)value : 0;
}

static uint32_t smaller(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

verbs_limits verbs_common_limits(const verbs_options *options, const verbs_found *found) {
    const struct ibv_device_attr *a = &found->attributes;
    verbs_limits limits = (verbs_limits){
        .max_qp = positive(a->max_qp),
        .max_qp_wr = positive(a->max_qp_wr),
        .max_cqe = positive(a->max_cqe),
        .max_sge = positive(a->max_sge),
        .max_srq_wr = a->max_srq > 0 ? positive(a->max_srq_wr) : 0,
        .initiator_depth = positive(a->max_qp_init_rd_atom),
        .responder_depth = positive(a->max_qp_rd_atom),
        .max_message = found->port.max_message,
        .max_region = a->max_mr_size,
        .atomics = a->atomic_cap != IBV_ATOMIC_NONE,
    };
    verbs_limits *l = &limits;
    verbs_this_vendor.limit(a, l);
    if (options->rd_atomic != VERBS_UNSET) {
        l->initiator_depth = smaller(l->initiator_depth, (uint32_t)options->rd_atomic);
        l->responder_depth = smaller(l->responder_depth, (uint32_t)options->rd_atomic);
    }
    if (options->inline_bytes != VERBS_UNSET) l->inline_bytes = (uint32_t)options->inline_bytes;
    if (options->srq == 0) l->max_srq_wr = 0;
    if (options->atomics == 0 || !l->initiator_depth || !l->responder_depth) l->atomics = false;
    return limits;
}

static const char *other_backend(uint32_t vendor_id) {
    switch (vendor_id) {
    case 0x02c9:
    case 0x15b3:
        return "connectx";
    case 0x14e4:
        return "thor";
    case 0x1dd8:
        return "pollara";
    case 0x1d0f:
        return "efa";
    default:
        return NULL;
    }
}

static void not_ours(verbs_found *found) {
    const char *other = other_backend(found->attributes.vendor_id);
    if (!other) other = other_backend(found->pci_vendor);
    if (other)
        snprintf(found->unusable, sizeof found->unusable, "made by vendor %#x: no %s; take the backend %s",
                 found->attributes.vendor_id, verbs_this_vendor.family, other);
    else
        snprintf(found->unusable, sizeof found->unusable,
                 "made by vendor %#x, which uccl_ep does not know: no %s. The option limits_only=1 tries it as one",
                 found->attributes.vendor_id, verbs_this_vendor.family);
}

static void look_open(const verbs_library *library, const verbs_options *options, struct ibv_device *device,
                      struct ibv_context *context, verbs_found *found) {
    int error = library->ibv_query_device(context, &found->attributes);
    if (error) {
        snprintf(found->unusable, sizeof found->unusable, "it does not answer: %s (errno %d)", strerror(error), error);
        return;
    }
    found->attributes.fw_ver[sizeof found->attributes.fw_ver - 1] = 0;
    if (!ours(found) && !options->limits_only) {
        not_ours(found);
        return;
    }
    if (found->attributes.vendor_part_id < verbs_this_vendor.first_part && !options->limits_only) {
        char text[64];
        snprintf(found->unusable, sizeof found->unusable, "older than any that is known to work: %s, the first is %s",
                 verbs_model_name(&found->attributes, text), verbs_this_vendor.models[0].name);
        return;
    }
    char text[VERBS_TEXT];
    if (!verbs_this_transport.look(library, options, device, context, found, text)) {
        snprintf(found->unusable, sizeof found->unusable, "%s", text);
        return;
    }
    if (options->atomics == 1 && found->attributes.atomic_cap == IBV_ATOMIC_NONE)
        snprintf(found->unusable, sizeof found->unusable, "atomics=1, and it has none (atomic_cap NONE)");
    else if (options->srq == 1 && !found->limits.max_srq_wr)
        snprintf(found->unusable, sizeof found->unusable, "srq=1, and it has no shared receive queues");
}

void verbs_look(const verbs_library *library, const verbs_options *options, struct ibv_device *device,
                verbs_found *found, struct ibv_context **context) {
    memset(found, 0, sizeof *found);
    const char *name = library->ibv_get_device_name(device);
    snprintf(found->name, sizeof found->name, "%.63s", name ? name : "");
    read_sysfs(found);
    errno = 0;
    struct ibv_context *opened = library->ibv_open_device(device);
    if (!opened) {
        const int error = errno;
        snprintf(found->unusable, sizeof found->unusable, "it cannot be opened: %s (errno %d)%s",
                 error ? strerror(error) : "no reason given", error,
                 error == EMFILE || error == ENFILE ? ": raise the limit of open files (ulimit -n)"
                 : error == EACCES || error == EPERM
                     ? ": this user, or the container, needs /dev/infiniband/uverbs* (a group, --device)"
                     : ": is the provider library of this NIC installed (ibverbs-providers)?");
        return;
    }
    look_open(library, options, device, opened, found);
    if (context && !found->unusable[0])
        *context = opened;
    else
        library->ibv_close_device(opened);
}

static void tell(const verbs_found *found, uccl_ep_device_info *info) {
    const bool known = ours(found);
    char text[64];
    *info = (uccl_ep_device_info){.size = sizeof *info, .numa_node = found->numa_node};
    memcpy(info->name, found->name, sizeof info->name);
    memcpy(info->address, found->address, sizeof info->address);
    memcpy(info->unusable, found->unusable, sizeof info->unusable);
    snprintf(info->firmware, sizeof info->firmware, "%.63s", found->attributes.fw_ver);
    if (known) {
        snprintf(info->vendor, sizeof info->vendor, "%s", verbs_this_vendor.vendor);
        snprintf(info->model, sizeof info->model, "%s", verbs_model_name(&found->attributes, text));
    } else {
        snprintf(info->vendor, sizeof info->vendor, "%#x", found->attributes.vendor_id);
        snprintf(info->model, sizeof info->model, "part %#x", found->attributes.vendor_part_id);
    }
}

static void give(const uccl_ep_device_info *mine, uccl_ep_device_info *info) {
    const uint32_t size = info->size < sizeof *mine ? info->size : (uint32_t)sizeof *mine;
    memcpy(info, mine, size);
    info->size = size;
}

uccl_ep_status verbs_query(const uccl_ep_host *host, uint32_t index, uccl_ep_device_info *info) {
    verbs_library library;
    verbs_options options;
    uccl_ep_status status = verbs_options_parse(host, "", &options);
    if (status == UCCL_EP_OK) status = verbs_library_open(host, &options, &library);
    if (status != UCCL_EP_OK) return status;
    int count = 0;
    errno = 0;
    struct ibv_device **list = library.ibv_get_device_list(&count);
    if (!list)
        return verbs_fail(host, UCCL_EP_E_NO_DEVICE, errno, "libibverbs lists no devices: %s (errno %d)",
                          strerror(errno), errno);
    if (count <= 0 || index >= (uint32_t)count) {
        library.ibv_free_device_list(list);
        return verbs_fail(host, UCCL_EP_E_NO_DEVICE, 0,
                          "libibverbs sees %d RDMA devices, and no number %u (rdma link; is the kernel driver loaded?)",
                          count, index);
    }
    verbs_found found;
    verbs_look(&library, &options, list[index], &found, NULL);
    library.ibv_free_device_list(list);

    uccl_ep_device_info mine;
    tell(&found, &mine);
    if (!found.unusable[0]) {
        verbs_capabilities(&library, &options, &found, 1, host, &mine.caps);
        /* What is promised only after a trial, opening tells. */
        uccl_ep_device *device;
        uccl_ep_caps opened = {.size = sizeof opened};
        if (verbs_this_vendor.adds && mine.caps.flags & UCCL_EP_CAP_ATOMIC_ADD64) {
            if (verbs_device_open(host, found.name, "", &device, &opened) == UCCL_EP_OK) {
                mine.caps = opened;
                verbs_device_close(device);
            } else {
                mine.caps.flags &= ~(uint64_t)(UCCL_EP_CAP_ATOMIC_ADD64 | UCCL_EP_CAP_ATOMIC_COHERENT);
            }
        }
    }
    give(&mine, info);
    return UCCL_EP_OK;
}

/* All of its NICs by their names; the rest is the first one's. */
uccl_ep_status verbs_opened(uccl_ep_device *d, uccl_ep_device_info *info) {
    uccl_ep_device_info mine;
    tell(&d->nic[0].found, &mine);
    for (uint32_t i = 1; i < d->nics; i++) {
        const size_t used = strlen(mine.name);
        snprintf(mine.name + used, sizeof mine.name - used, "+%s", d->nic[i].found.name);
    }
    mine.caps = d->caps;
    give(&mine, info);
    return UCCL_EP_OK;
}
