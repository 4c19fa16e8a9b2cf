/* SPDX-License-Identifier: Apache-2.0
 *
 * verbs.c: the control path: devices, domains, regions and queues, by the names that a program looks up.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "internal.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

/* The header wraps some of what a library exports. */
#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

#ifndef FAKE_OLD
#define FAKE_OLD 0 /* 1: before rdma-core 34, no dmabuf; 2: older than ibv_wr_*, the GID table and optional rights */
#endif

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
fake_device *fake_devices[FAKE_MAX_DEVICES];
fake_context *fake_contexts;
fake_qp *fake_qps;
fake_mr *fake_mrs;
fake_ah *fake_ahs;
fake_ibverbs_stats fake_stats;

/* ----------------------------------------------------------------------------------------------------------- events */

void fake_event(fake_device *device, enum ibv_event_type type, void *element) {
    struct ibv_async_event event = {.event_type = type};
    struct ibv_context *only = NULL;
    if (type == IBV_EVENT_SRQ_ERR) {
        event.element.srq = element;
        only = event.element.srq->context;
    } else if (type == IBV_EVENT_CQ_ERR) {
        event.element.cq = element;
        only = event.element.cq->context;
    } else if (type == IBV_EVENT_QP_FATAL || type == IBV_EVENT_QP_REQ_ERR || type == IBV_EVENT_QP_ACCESS_ERR ||
               type == IBV_EVENT_COMM_EST || type == IBV_EVENT_QP_LAST_WQE_REACHED) {
        fake_qp *qp = element;
        event.element.qp = &qp->base.qp_base;
        only = event.element.qp->context;
        qp->unacknowledged++;
    } else {
        event.element.port_num = element ? *(int *)element : 0;
    }
    for (fake_context *c = fake_contexts; c; c = c->next)
        if (c->device == device && (!only || only == &c->verbs.context)) {
            const ssize_t n = write(c->event_write, &event, sizeof(event));
            (void)n; /* nobody reads: what is too much is lost */
        }
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event) {
    ssize_t n;
    do n = read(context->async_fd, event, sizeof(*event));
    while (n < 0 && errno == EINTR);
    return n == (ssize_t)sizeof(*event) ? 0 : -1;
}

void ibv_ack_async_event(struct ibv_async_event *event) {
    LOCK();
    switch (event->event_type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
        event->element.qp->events_completed++;
        break;
    case IBV_EVENT_CQ_ERR:
        event->element.cq->async_events_completed++;
        break;
    default:
        break;
    }
    UNLOCK();
}

/* ---------------------------------------------------------------------------------------------------------- devices */

static void fake_context_ops(fake_context *c);

struct ibv_device **ibv_get_device_list(int *count) {
    LOCK();
    if (fake_fails("get_device_list")) return refuse(errno);
    const int status = fake_configure();
    if (status < 0) return refuse(-status);
    struct ibv_device **list = make((FAKE_MAX_DEVICES + 1) * sizeof(*list));
    int n = 0;
    for (unsigned i = 0; i < FAKE_MAX_DEVICES; i++)
        if (fake_devices[i] && fake_devices[i]->listed) list[n++] = &fake_devices[i]->base;
    if (count) *count = n;
    UNLOCK();
    return list;
}

void ibv_free_device_list(struct ibv_device **list) {
    free(list);
}
const char *ibv_get_device_name(struct ibv_device *device) {
    return device->name;
}
__be64 ibv_get_device_guid(struct ibv_device *device) {
    return ((fake_device *)(void *)device)->attr.node_guid;
}
int ibv_get_device_index(struct ibv_device *device) {
    return (int)((fake_device *)(void *)device)->index;
}
int ibv_fork_init(void) {
    return 0;
}
enum ibv_fork_status ibv_is_fork_initialized(void) {
    return IBV_FORK_UNNEEDED;
}

struct ibv_context *ibv_open_device(struct ibv_device *device) {
    fake_device *d = (fake_device *)(void *)device;
    LOCK();
    if (fake_fails("open_device")) return refuse(errno);
    if (d->open_errno || d->dead) return refuse(d->dead ? EIO : (int)d->open_errno);
    fake_context *c = make(sizeof(*c));
    int events[2];
    if (pipe2(events, O_CLOEXEC) < 0) {
        free(c);
        return refuse(errno);
    }
    fcntl(events[1], F_SETFL, O_NONBLOCK);
    c->device = d;
    c->event_write = events[1];
    struct ibv_context *context = &c->verbs.context;
    context->device = device;
    context->cmd_fd = -1;
    context->async_fd = events[0];
    context->num_comp_vectors = 1;
    context->abi_compat = __VERBS_ABI_IS_EXTENDED;
    c->verbs.sz = sizeof(c->verbs);
    pthread_mutex_init(&context->mutex, NULL);
    fake_context_ops(c);
    c->next = fake_contexts;
    fake_contexts = c;
    fake_stats.contexts++;
    UNLOCK();
    return context;
}

int ibv_close_device(struct ibv_context *context) {
    fake_context *c = fake_context_of(context);
    LOCK();
    if (c->users) FAKE_DIE("%u objects still live in the context", c->users);
    fake_context **at = &fake_contexts;
    while (*at != c) at = &(*at)->next;
    *at = c->next;
    close(context->async_fd);
    close(c->event_write);
    free(c);
    const bool last = !--fake_stats.contexts;
    UNLOCK();
    if (last) fake_leave();
    return 0;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr) {
    LOCK();
    if (fake_fails("query_device")) return refuse_int(errno);
    *attr = fake_context_of(context)->device->attr;
    UNLOCK();
    return 0;
}

static int query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                           struct ibv_device_attr_ex *attr, size_t size) {
    if (input && input->comp_mask) return EINVAL;
    struct ibv_device_attr_ex full = {.phys_port_cnt_ex = fake_context_of(context)->device->attr.phys_port_cnt};
    const int error = ibv_query_device(context, &full.orig_attr);
    if (!error) memcpy(attr, &full, size < sizeof(full) ? size : sizeof(full));
    return error;
}

static int query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t size) {
    const fake_device *d = fake_context_of(context)->device;
    LOCK();
    if (fake_fails("query_port")) return refuse_int(errno);
    if (!port || port > d->attr.phys_port_cnt) return refuse_int(EINVAL);
    memcpy(attr, &d->port[port - 1], size < sizeof(*attr) ? size : sizeof(*attr));
    UNLOCK();
    return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attr) {
    return query_port(context, port, (struct ibv_port_attr *)(void *)attr,
                      offsetof(struct ibv_port_attr, port_cap_flags2));
}

int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid) {
    const fake_device *d = fake_context_of(context)->device;
    LOCK();
    if (fake_fails("query_gid")) {
        refuse_int(errno);
        return -1;
    }
    const bool there = port && port <= d->attr.phys_port_cnt && index >= 0 && (uint32_t)index < d->gids;
    if (there) *gid = d->gid[index].gid;
    UNLOCK();
    if (!there) errno = EINVAL;
    return there ? 0 : -1;
}

#if FAKE_OLD < 2
static bool empty_gid(const union ibv_gid *gid) {
    return !gid->global.subnet_prefix && !gid->global.interface_id;
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
                      uint32_t flags, size_t size) {
    const fake_device *d = fake_context_of(context)->device;
    LOCK();
    if (fake_fails("query_gid_ex")) return refuse_int(errno);
    if (flags || !port || port > d->attr.phys_port_cnt || index >= d->gids || size < sizeof(*entry))
        return refuse_int(EINVAL);
    if (empty_gid(&d->gid[index].gid) || port < d->gid_port) return refuse_int(ENODATA);
    *entry = (struct ibv_gid_entry){d->gid[index].gid, index, port, d->gid[index].type, d->gid[index].ifindex};
    UNLOCK();
    return 0;
}

ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t max, uint32_t flags,
                             size_t size) {
    const fake_device *d = fake_context_of(context)->device;
    LOCK();
    if (fake_fails("query_gid_table")) return -refuse_int(errno);
    if (flags || size != sizeof(*entries)) return -refuse_int(EINVAL);
    size_t n = 0;
    for (uint32_t p = 1; p <= d->attr.phys_port_cnt; p++)
        for (uint32_t i = 0; i < d->gids; i++) {
            if (empty_gid(&d->gid[i].gid)) continue;
            if (n == max) return -refuse_int(EINVAL);
            entries[n++] = (struct ibv_gid_entry){d->gid[i].gid, i, p, d->gid[i].type, d->gid[i].ifindex};
        }
    UNLOCK();
    return (ssize_t)n;
}
#endif

int ibv_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey) {
    const fake_device *d = fake_context_of(context)->device;
    if (!port || port > d->attr.phys_port_cnt || index < 0 || (uint32_t)index >= d->pkeys) return -1;
    *pkey = htobe16(d->pkey[index]);
    return 0;
}

/* ------------------------------------------------------------------------------------------------ domains and regions
 */

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) {
    LOCK();
    if (fake_fails("alloc_pd")) return refuse(errno);
    fake_pd *pd = make(sizeof(*pd));
    pd->base.context = context;
    fake_context_of(context)->users++;
    fake_stats.pds++;
    UNLOCK();
    return &pd->base;
}

int ibv_dealloc_pd(struct ibv_pd *base) {
    fake_pd *pd = (fake_pd *)(void *)base;
    LOCK();
    if (pd->users) return refuse_int(EBUSY);
    fake_context_of(base->context)->users--;
    fake_stats.pds--;
    free(pd);
    UNLOCK();
    return 0;
}

/* As pinning would: every page must be there, and may be read, and written where the NIC is to write. A mapping that
 * nobody may touch is a device's memory: what a module for peer memory lends. NULL: EFAULT. */
static char *pin(char *address, uint64_t bytes, bool write, bool peer, char **map, uint64_t *map_bytes) {
    FILE *maps = fopen("/proc/self/maps", "re");
    if (!maps) return NULL; /* no descriptor is left */
    uintptr_t next = (uintptr_t)address;
    const uintptr_t end = next + bytes;
    char line[512], *found = address;
    bool good = false;
    while (!good && fgets(line, sizeof(line), maps)) {
        unsigned long from, to, offset, inode;
        unsigned major_number, minor_number;
        char rights[5];
        if (sscanf(line, "%lx-%lx %4s %lx %x:%x %lu", &from, &to, rights, &offset, &major_number, &minor_number,
                   &inode) != 7)
            continue;
        if (to <= next) continue;
        if (from > next) break;
        if (rights[0] != 'r' && peer && inode && end <= to && map) {
            for (int fd = 0; fd < 1024 && !good; fd++) {
                struct stat s;
                if (fstat(fd, &s) < 0 || s.st_ino != inode || major(s.st_dev) != major_number ||
                    minor(s.st_dev) != minor_number)
                    continue;
                char *whole = mmap(NULL, to - from, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);
                if (whole == MAP_FAILED) continue;
                *map = whole;
                *map_bytes = to - from;
                found = whole + (next - from);
                good = true;
            }
            break;
        }
        if (rights[0] != 'r' || (write && rights[1] != 'w')) break;
        next = to;
        good = next >= end;
    }
    fclose(maps);
    return good ? found : NULL;
}

static struct ibv_mr *reg(struct ibv_pd *base, void *address, uint64_t length, uint64_t iova, int fd, uint64_t offset,
                          unsigned int access) {
    fake_pd *pd = (fake_pd *)(void *)base;
    fake_device *d = fake_context_of(base->context)->device;
    const bool dmabuf = fd >= 0;
    LOCK();
    if (fake_fails(dmabuf ? "reg_dmabuf_mr" : "reg_mr")) return refuse(errno);
    if (dmabuf && d->dmabuf_errno) return refuse((int)d->dmabuf_errno);
    if (!dmabuf && d->reg_errno) return refuse((int)d->reg_errno);
    const unsigned known = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                           IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_RELAXED_ORDERING;
    const bool writes = access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
    if (access & ~known || !length || (writes && !(access & IBV_ACCESS_LOCAL_WRITE))) return refuse(EINVAL);
    if (access & IBV_ACCESS_REMOTE_ATOMIC && d->attr.atomic_cap == IBV_ATOMIC_NONE && d->strict_atomic_flag)
        return refuse(EINVAL);
    if (length > d->attr.max_mr_size || (uint64_t)(uintptr_t)address + length < length || iova + length < length)
        return refuse(EINVAL);
    if (d->live_mrs == (uint32_t)d->attr.max_mr || (d->memlock && d->locked + length > d->memlock))
        return refuse(ENOMEM);
    char *map = NULL, *memory;
    uint64_t map_bytes = 0;
    if (dmabuf) {
        struct stat s;
        if ((offset ^ iova) % d->page) return refuse(EINVAL); /* they share the offset in a page */
        if (fstat(fd, &s) < 0) return refuse(EBADF);
        if ((uint64_t)s.st_size < offset + length) return refuse(EINVAL);
        map_bytes = (uint64_t)s.st_size;
        map = mmap(NULL, map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (map == MAP_FAILED) return refuse(EINVAL);
        memory = map + offset;
    } else {
        memory = pin(address, length, access & IBV_ACCESS_LOCAL_WRITE, d->peermem, &map, &map_bytes);
        if (!memory) return refuse(EFAULT);
    }
    fake_mr *mr = make(sizeof(*mr));
    static uint32_t keys = 0x1000;
    keys += 0x101;
    mr->base = (struct ibv_mr){.context = base->context,
                               .pd = base,
                               .addr = dmabuf ? (void *)(uintptr_t)offset : address,
                               .length = length,
                               .lkey = keys,
                               .rkey = keys ^ 0x5a5a0000u}; /* who takes one for the other finds nothing */
    mr->access = access;
    mr->iova = iova;
    mr->memory = memory;
    mr->map = map;
    mr->map_bytes = map_bytes;
    mr->next = fake_mrs;
    fake_mrs = mr;
    pd->users++;
    d->live_mrs++;
    d->locked += length;
    fake_stats.mrs++;
    UNLOCK();
    return &mr->base;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access) {
    if (access & (int)IBV_ACCESS_OPTIONAL_RANGE) {
        errno = EINVAL; /* they go through ibv_reg_mr_iova2 */
        return NULL;
    }
    return reg(pd, address, length, (uint64_t)(uintptr_t)address, -1, 0, (unsigned)access);
}
#if FAKE_OLD < 2
struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, int access) {
    if (((uint64_t)(uintptr_t)address ^ iova) % 4096) {
        errno = EINVAL;
        return NULL;
    }
    return reg(pd, address, length, iova, -1, 0, (unsigned)access);
}
struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned int access) {
    const fake_device *d = fake_context_of(pd->context)->device;
    if (!d->relaxed) access &= ~(unsigned)IBV_ACCESS_OPTIONAL_RANGE; /* rights that may be ignored */
    if (((uint64_t)(uintptr_t)address ^ iova) % 4096) {
        errno = EINVAL;
        return NULL;
    }
    return reg(pd, address, length, iova, -1, 0, access);
}
#endif
#if FAKE_OLD < 1
struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
    if (fd < 0) {
        errno = EBADF;
        return NULL;
    }
    return reg(pd, NULL, length, iova, fd, offset, (unsigned)access);
}
#endif

int ibv_dereg_mr(struct ibv_mr *base) {
    fake_mr *mr = (fake_mr *)(void *)base;
    fake_device *d = fake_context_of(base->context)->device;
    LOCK();
    fake_mr **at = &fake_mrs;
    while (*at && *at != mr) at = &(*at)->next;
    if (!*at) FAKE_DIE("not a region");
    *at = mr->next;
    ((fake_pd *)(void *)base->pd)->users--;
    d->live_mrs--;
    d->locked -= base->length;
    fake_stats.mrs--;
    if (mr->map) munmap(mr->map, mr->map_bytes);
    free(mr);
    UNLOCK();
    return 0;
}

/* ----------------------------------------------------------------------------------------------- completion queues */

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context) {
    LOCK();
    if (fake_fails("create_comp_channel")) return refuse(errno);
    fake_channel *channel = make(sizeof(*channel));
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0) {
        free(channel);
        return refuse(errno);
    }
    channel->base.context = context;
    channel->base.fd = ends[0];
    channel->write = ends[1];
    fake_context_of(context)->users++;
    fake_stats.channels++;
    UNLOCK();
    return &channel->base;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *base) {
    fake_channel *channel = (fake_channel *)(void *)base;
    LOCK();
    if (base->refcnt) return refuse_int(EBUSY);
    fake_context_of(base->context)->users--;
    close(base->fd);
    close(channel->write);
    free(channel);
    fake_stats.channels--;
    UNLOCK();
    return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context) {
    if (read(channel->fd, cq, sizeof(*cq)) != (ssize_t)sizeof(*cq)) return -1;
    *cq_context = (*cq)->cq_context;
    return 0;
}

void ibv_ack_cq_events(struct ibv_cq *base, unsigned int n) {
    LOCK();
    fake_cq *cq = (fake_cq *)(void *)base;
    if (n > cq->unacknowledged) FAKE_DIE("more acknowledged than there were");
    cq->unacknowledged -= n;
    UNLOCK();
}

static fake_cq *create_cq(struct ibv_context *context, uint32_t entries, void *cq_context,
                          struct ibv_comp_channel *channel, uint32_t vector, bool ex, uint64_t wc_flags) {
    fake_device *d = fake_context_of(context)->device;
    LOCK();
    if (fake_fails("create_cq")) return refuse(errno);
    if (!entries || entries > (uint32_t)d->attr.max_cqe || vector >= (uint32_t)context->num_comp_vectors)
        return refuse(EINVAL);
    if (d->live_cqs == (uint32_t)d->attr.max_cq) return refuse(ENOMEM);
    fake_cq *cq = make(sizeof(*cq));
    cq->base.context = context;
    cq->base.channel = channel;
    cq->base.cq_context = cq_context;
    cq->base.cqe = (int)entries; /* no entry more than asked for */
    cq->capacity = entries;
    cq->ring = make(entries * sizeof(fake_cqe));
    cq->ex = ex;
    cq->wc_flags = wc_flags;
    fake_cq_ops(cq);
    if (channel) channel->refcnt++;
    d->live_cqs++;
    fake_context_of(context)->users++;
    fake_stats.cqs++;
    UNLOCK();
    return cq;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *cq_context,
                             struct ibv_comp_channel *channel, int vector) {
    fake_cq *cq = create_cq(context, (uint32_t)entries, cq_context, channel, (uint32_t)vector, false, 0);
    return cq ? (struct ibv_cq *)(void *)&cq->base : NULL;
}

static struct ibv_cq_ex *create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *a) {
    if (!fake_context_of(context)->device->cq_ex) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    const uint64_t known = IBV_WC_STANDARD_FLAGS;
    if (a->comp_mask & ~(uint32_t)IBV_CQ_INIT_ATTR_MASK_FLAGS || a->wc_flags & ~known ||
        (a->comp_mask && a->flags & ~(uint32_t)IBV_CREATE_CQ_ATTR_SINGLE_THREADED)) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    fake_cq *cq = create_cq(context, a->cqe, a->cq_context, a->channel, a->comp_vector, true, a->wc_flags);
    return cq ? &cq->base : NULL;
}

int ibv_destroy_cq(struct ibv_cq *base) {
    fake_cq *cq = (fake_cq *)(void *)base;
    LOCK();
    if (cq->users) return refuse_int(EBUSY);
    if (cq->unacknowledged || (cq->overrun && !base->async_events_completed))
        FAKE_DIE("events that nobody acknowledged: the real call would wait for ever");
    if (base->channel) base->channel->refcnt--;
    fake_context *c = fake_context_of(base->context);
    c->users--;
    c->device->live_cqs--;
    fake_stats.cqs--;
    free(cq->ring);
    free(cq);
    UNLOCK();
    return 0;
}

/* --------------------------------------------------------------------------------------- queues of receives, queue
 * pairs */

struct ibv_srq *ibv_create_srq(struct ibv_pd *base, struct ibv_srq_init_attr *a) {
    fake_pd *pd = (fake_pd *)(void *)base;
    fake_device *d = fake_context_of(base->context)->device;
    LOCK();
    if (fake_fails("create_srq")) return refuse(errno);
    if (!d->srq) return refuse(EOPNOTSUPP);
    if (!a->attr.max_wr || a->attr.max_wr > (uint32_t)d->attr.max_srq_wr || a->attr.max_sge > 4) return refuse(EINVAL);
    if (d->live_srqs == (uint32_t)d->attr.max_srq) return refuse(ENOMEM);
    fake_srq *srq = make(sizeof(*srq));
    srq->base.context = base->context;
    srq->base.pd = base;
    srq->base.srq_context = a->srq_context;
    srq->queue = (fake_rq){make(a->attr.max_wr * sizeof(fake_recv)), a->attr.max_wr, a->attr.max_sge, 0, 0, 0};
    pd->users++;
    d->live_srqs++;
    fake_stats.srqs++;
    UNLOCK();
    return &srq->base;
}

int ibv_query_srq(struct ibv_srq *base, struct ibv_srq_attr *attr) {
    const fake_srq *srq = (fake_srq *)(void *)base;
    *attr = (struct ibv_srq_attr){srq->queue.capacity, srq->queue.max_sge, srq->limit};
    return 0;
}

int ibv_modify_srq(struct ibv_srq *base, struct ibv_srq_attr *attr, int mask) {
    if (mask != IBV_SRQ_LIMIT) return EOPNOTSUPP;
    ((fake_srq *)(void *)base)->limit = attr->srq_limit;
    return 0;
}

int ibv_destroy_srq(struct ibv_srq *base) {
    fake_srq *srq = (fake_srq *)(void *)base;
    LOCK();
    if (srq->users) return refuse_int(EBUSY);
    ((fake_pd *)(void *)base->pd)->users--;
    fake_context_of(base->context)->device->live_srqs--;
    fake_stats.srqs--;
    free(srq->queue.ring);
    free(srq);
    UNLOCK();
    return 0;
}

static uint32_t new_qp_num(const fake_device *d) {
    static uint32_t last = 0x100;
    uint32_t reused = 0x10;
    for (;;) {
        const uint32_t n = fake_qp_numbers(d->reuse_qpn || d->own_numbers ? &reused : &last);
        bool used = false;
        for (const fake_qp *qp = fake_qps; qp; qp = qp->next)
            used = used || (qp->base.qp_base.qp_num == n && (!d->own_numbers || qp->device == d));
        if (!used) return n;
    }
}

static struct ibv_qp *create_any(struct ibv_context *context, struct ibv_qp_init_attr_ex *a,
                                 const struct efadv_qp_init_attr *own) {
    fake_device *d = fake_context_of(context)->device;
    LOCK();
    if (fake_fails("create_qp")) return refuse(errno);
    const uint32_t masks = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    const bool ops = a->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    if (a->comp_mask & ~masks || !(a->comp_mask & IBV_QP_INIT_ATTR_PD) || (ops && !d->wr_api))
        return refuse(EOPNOTSUPP);
    if (a->qp_type != (own ? IBV_QPT_DRIVER : IBV_QPT_RC) || d->efa != (own != NULL)) return refuse(EOPNOTSUPP);
    const struct ibv_qp_cap *cap = &a->cap;
    if (own && !fake_srd_allows(d, a, own)) return refuse(errno);
    if (!a->pd || !a->send_cq || !a->recv_cq || (!cap->max_send_wr && !cap->max_recv_wr) ||
        cap->max_send_wr > (uint32_t)d->attr.max_qp_wr || cap->max_recv_wr > (uint32_t)d->attr.max_qp_wr ||
        cap->max_send_sge > (uint32_t)d->attr.max_sge || cap->max_recv_sge > (a->srq ? UINT32_MAX : 4u))
        return refuse(EINVAL);
    if (cap->max_inline_data > d->max_inline && d->inline_grant == UINT32_MAX) return refuse((int)d->inline_errno);
    if (a->srq && !d->srq) return refuse(EINVAL);
    if (d->live_qps == (uint32_t)d->attr.max_qp) return refuse(ENOMEM);
    if (fake_join()) return refuse(errno);
    fake_qp *qp = make(sizeof(*qp));
    struct ibv_qp *base = &qp->base.qp_base;
    base->context = context;
    base->qp_context = a->qp_context;
    base->pd = a->pd;
    base->send_cq = a->send_cq;
    base->recv_cq = a->recv_cq;
    base->srq = a->srq;
    base->qp_num = new_qp_num(d);
    base->state = IBV_QPS_RESET;
    base->qp_type = a->qp_type;
    qp->device = d;
    qp->sig_all = a->sq_sig_all;
    qp->break_status = -1;
    qp->cap = *cap;
    qp->cap.max_send_wr += d->max_send_wr_pad;
    qp->srd = own != NULL;
    qp->unsolicited = own && own->flags & 1;
    qp->inline_write = own && own->flags & 2;
    if (own) { /* as libefa rounds them */
        if (qp->cap.max_send_wr < d->min_sq_wr) qp->cap.max_send_wr = d->min_sq_wr;
        while (qp->cap.max_send_wr & (qp->cap.max_send_wr - 1)) qp->cap.max_send_wr++;
        uint32_t **lists[] = {&qp->unused, &qp->waiting, &qp->away_slots};
        for (unsigned i = 0; i < 3; i++) *lists[i] = make(qp->cap.max_send_wr * sizeof(uint32_t));
        for (uint32_t i = 0; i < qp->cap.max_send_wr; i++) qp->unused[qp->n_unused++] = qp->cap.max_send_wr - 1 - i;
    }
    if (d->inline_grant != UINT32_MAX) qp->cap.max_inline_data = d->inline_grant;
    if (a->srq) qp->cap.max_recv_wr = qp->cap.max_recv_sge = 0;
    a->cap = qp->cap;
    qp->ring = make((qp->cap.max_send_wr ? qp->cap.max_send_wr : 1) * sizeof(fake_send));
    qp->queue = (fake_rq){make((qp->cap.max_recv_wr ? qp->cap.max_recv_wr : 1) * sizeof(fake_recv)),
                          qp->cap.max_recv_wr,
                          qp->cap.max_recv_sge,
                          0,
                          0,
                          0};
    qp->has_ops = ops;
    qp->ops = ops ? a->send_ops_flags : 0;
    if (ops) {
        qp->batch = make((qp->cap.max_send_wr ? qp->cap.max_send_wr : 1) * sizeof(fake_send));
        fake_qp_ops(qp);
    }
    ((fake_pd *)(void *)a->pd)->users++;
    ((fake_cq *)(void *)a->send_cq)->users++;
    ((fake_cq *)(void *)a->recv_cq)->users++;
    if (a->srq) ((fake_srq *)(void *)a->srq)->users++;
    d->live_qps++;
    fake_stats.qps++;
    fake_qp **at = &fake_qps;
    while (*at) at = &(*at)->next;
    *at = qp;
    UNLOCK();
    return base;
}

static struct ibv_qp *create_qp(struct ibv_context *context, struct ibv_qp_init_attr_ex *a) {
    return create_any(context, a, NULL);
}

struct ibv_qp *fake_create_srd(struct ibv_context *context, struct ibv_qp_init_attr_ex *a,
                               const struct efadv_qp_init_attr *own) {
    return create_any(context, a, own);
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a) {
    struct ibv_qp_init_attr_ex ex = {.qp_context = a->qp_context,
                                     .send_cq = a->send_cq,
                                     .recv_cq = a->recv_cq,
                                     .srq = a->srq,
                                     .cap = a->cap,
                                     .qp_type = a->qp_type,
                                     .sq_sig_all = a->sq_sig_all,
                                     .comp_mask = IBV_QP_INIT_ATTR_PD,
                                     .pd = pd};
    struct ibv_qp *qp = create_qp(pd->context, &ex);
    if (qp) a->cap = ex.cap;
    return qp;
}

#if FAKE_OLD < 2
struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp) {
    return ((fake_qp *)(void *)qp)->has_ops ? (struct ibv_qp_ex *)(void *)qp : NULL;
}
#endif

int ibv_destroy_qp(struct ibv_qp *base) {
    fake_qp *qp = (fake_qp *)(void *)base;
    fake_device *d = qp->device;
    LOCK();
    if (fake_fails_alone("destroy_qp")) return refuse_int(errno);
    /* As the real one it waits for who has read an event; one that nobody reads would keep it for ever. */
    for (unsigned ms = 0; ms < 2000 && qp->unacknowledged > base->events_completed; ms++) {
        UNLOCK();
        usleep(1000);
        LOCK();
    }
    if (qp->unacknowledged > base->events_completed)
        FAKE_DIE("an event that nobody acknowledged: the real call would wait for ever");
    fake_call_back(qp);
    fake_forget(qp, d->cq_clean);
    d->rd_atom_used -= qp->dest_rd_atomic;
    fake_qp **at = &fake_qps;
    while (*at != qp) at = &(*at)->next;
    *at = qp->next;
    ((fake_pd *)(void *)base->pd)->users--;
    ((fake_cq *)(void *)base->send_cq)->users--;
    ((fake_cq *)(void *)base->recv_cq)->users--;
    if (base->srq) ((fake_srq *)(void *)base->srq)->users--;
    d->live_qps--;
    fake_stats.qps--;
    free(qp->ring);
    free(qp->batch);
    free(qp->unused);
    free(qp->waiting);
    free(qp->away_slots);
    free(qp->queue.ring);
    free(qp);
    UNLOCK();
    return 0;
}

int ibv_query_qp(struct ibv_qp *base, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init) {
    const fake_qp *qp = (fake_qp *)(void *)base;
    (void)mask;
    LOCK();
    if (fake_fails("query_qp")) return refuse_int(errno);
    *attr = qp->attr;
    attr->qp_state = attr->cur_qp_state = base->state;
    attr->cap = qp->cap;
    *init = (struct ibv_qp_init_attr){.qp_context = base->qp_context,
                                      .send_cq = base->send_cq,
                                      .recv_cq = base->recv_cq,
                                      .srq = base->srq,
                                      .cap = qp->cap,
                                      .qp_type = base->qp_type,
                                      .sq_sig_all = qp->sig_all};
    UNLOCK();
    return 0;
}

int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags) {
    (void)qp;
    (void)op;
    (void)flags;
    return 0;
}
int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece) {
    (void)qp;
    (void)ece;
    return EOPNOTSUPP;
}
int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece) {
    (void)qp;
    (void)ece;
    return EOPNOTSUPP;
}

static void fake_context_ops(fake_context *c) {
    c->verbs.query_port = query_port;
    c->verbs.query_device_ex = query_device_ex;
    c->verbs.create_qp_ex = create_qp;
    c->verbs.create_cq_ex = create_cq_ex;
    fake_wire_ops(&c->verbs.context);
}
