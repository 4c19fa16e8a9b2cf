/* SPDX-License-Identifier: Apache-2.0
 *
 * objects.c: what the program has made, by handle, number and key.
 */
#include "control.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "raw.h"

struct entry {
    void *object; /* NULL: free */
    uint32_t users, events;
    uint8_t kind;
    bool published;
};

struct context {
    lab_context base; /* first: a lab_context is one of these */
    struct context *next;
    struct entry *entry; /* by handle */
    uint32_t entries, searched;
};

/* An index of objects of the whole process: queue pairs by number, regions by key, address handles by number. An index
 * just given back is the last to be given again, so that what is late for the old one does not meet a new one. */
struct numbers {
    void **object;
    uint32_t room, last, rounds; /* rounds: how often all of them were gone through */
};

static struct context *contexts;
static struct numbers qps, mrs, ahs;
static uint32_t pds, cqs, srqs; /* numbers given so far */

static struct context *of(lab_context *context) {
    return (struct context *)context;
}

/* ---------------------------------------------------------------------------------------------------------- numbers */

static bool number_free(const struct numbers *n, uint32_t i) {
    return i >= n->room || !n->object[i];
}

/* From 1 to limit - 1; 0: none left. */
static uint32_t number_take(struct numbers *n, uint32_t limit, void *object) {
    for (uint32_t tries = 0; tries < limit - 1; tries++) {
        const uint32_t i = (n->last + tries) % (limit - 1) + 1;
        if (!number_free(n, i)) continue;
        if (i >= n->room) {
            const uint32_t room = i < 64 ? 64 : 2 * i;
            void **more = realloc(n->object, room * sizeof *more);
            if (!more) return 0;
            memset(more + n->room, 0, (room - n->room) * sizeof *more);
            n->object = more;
            n->room = room;
        }
        n->object[i] = object;
        n->rounds += i <= n->last;
        n->last = i;
        return i;
    }
    return 0;
}

static void *number_find(const struct numbers *n, uint32_t i) {
    return i < n->room ? n->object[i] : NULL;
}

static void number_drop(struct numbers *n, uint32_t i, const void *object) {
    if (i < n->room && n->object[i] == object) n->object[i] = NULL;
}

/* --------------------------------------------------------------------------------------------------------- contexts */

lab_context *lab_context_new(lab_device *device, int fd) {
    struct context *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->base = (lab_context){.device = device, .fd = fd, .async_read = -1, .async_write = -1};
    c->next = contexts;
    contexts = c;
    return &c->base;
}

/* In this order nothing has users when its turn comes. */
static const enum lab_kind users_first[] = {LAB_AH, LAB_QP, LAB_SRQ, LAB_CQ, LAB_MR, LAB_PD};

void lab_context_free(lab_context *context) {
    struct context *c = of(context);
    for (size_t k = 0; k < sizeof users_first / sizeof *users_first; k++)
        for (uint32_t h = 0; h < c->entries; h++)
            if (c->entry[h].object && c->entry[h].published && c->entry[h].kind == users_first[k])
                lab_destroy(context, users_first[k], h);
    lab_untrap(context);
    if (context->async_read >= 0 && context->device->model->close) context->device->model->close(context);
    lab_channels_free(context);
    if (context->async_write >= 0) raw_close(context->async_write);
    for (struct context **at = &contexts; *at; at = &(*at)->next)
        if (*at == c) {
            *at = c->next;
            break;
        }
    free(c->entry);
    free(c);
}

void lab_objects_forget(void) {
    contexts = NULL; /* the parent's memory, of which a model or the NIC's thread may have been in the middle */
    qps = mrs = ahs = (struct numbers){0};
    uint32_t n;
    lab_device *devices = lab_devices(&n);
    for (uint32_t i = 0; i < n; i++) devices[i].queue_pairs = 0;
}

/* --------------------------------------------------------------------------------------------------------- the table
 */

static struct entry *entry_of(lab_context *context, uint32_t handle) {
    struct context *c = of(context);
    return handle < c->entries && c->entry[handle].object ? &c->entry[handle] : NULL;
}

static int handle_take(struct context *c, enum lab_kind kind, void *object, uint32_t *handle) {
    for (; c->searched < c->entries; c->searched++)
        if (!c->entry[c->searched].object) break;
    if (c->searched == c->entries) {
        if (c->entries == LAB_MAX_HANDLES) return ENOSPC;
        const uint32_t room = c->entries ? 2 * c->entries : 64;
        struct entry *more = realloc(c->entry, room * sizeof *more);
        if (!more) return ENOMEM;
        memset(more + c->entries, 0, (room - c->entries) * sizeof *more);
        c->entry = more;
        c->entries = room;
    }
    *handle = c->searched;
    c->entry[*handle] = (struct entry){.object = object, .kind = (uint8_t)kind};
    return 0;
}

static size_t size_of(enum lab_kind kind) {
    switch (kind) {
    case LAB_PD:
        return sizeof(lab_pd);
    case LAB_MR:
        return sizeof(lab_mr);
    case LAB_CQ:
        return sizeof(lab_cq);
    case LAB_SRQ:
        return sizeof(lab_srq);
    case LAB_QP:
        return sizeof(lab_qp);
    case LAB_AH:
        return sizeof(lab_ah);
    }
    abort();
}

static uint32_t handle_of(enum lab_kind kind, const void *object) {
    switch (kind) {
    case LAB_PD:
        return ((const lab_pd *)object)->handle;
    case LAB_MR:
        return ((const lab_mr *)object)->handle;
    case LAB_CQ:
        return ((const lab_cq *)object)->handle;
    case LAB_SRQ:
        return ((const lab_srq *)object)->handle;
    case LAB_QP:
        return ((const lab_qp *)object)->handle;
    case LAB_AH:
        return ((const lab_ah *)object)->handle;
    }
    abort();
}

/* Its name on the NIC. Keys have 8 bits below the index, as hardware's: a key that is off by one, or was the index's
 * before, is nobody's. */
static bool number_object(const lab_context *context, enum lab_kind kind, void *object, uint32_t handle) {
    uint32_t index;
    switch (kind) {
    case LAB_PD: {
        lab_pd *pd = object;
        pd->handle = handle;
        pd->number = ++pds;
        return true;
    }
    case LAB_MR: {
        lab_mr *mr = object;
        mr->handle = handle;
        index = number_take(&mrs, 1u << 16, object);
        mr->key = index << 8 | ((0x42 + mrs.rounds) & 0xff);
        return index != 0;
    }
    case LAB_CQ: {
        lab_cq *cq = object;
        cq->handle = handle;
        cq->number = ++cqs & 0xffffff;
        return true;
    }
    case LAB_SRQ: {
        lab_srq *srq = object;
        srq->handle = handle;
        srq->number = ++srqs & 0xffffff;
        return true;
    }
    case LAB_QP: {
        lab_qp *qp = object;
        lab_device *device = context->device;
        qp->handle = handle;
        if (device->knobs.max_qp && device->queue_pairs >= device->knobs.max_qp) return false;
        index = number_take(&qps, 1u << lab_qp_bits(context->device), object);
        qp->number = lab_slot() << lab_qp_bits(context->device) | index;
        device->queue_pairs += index != 0;
        return index != 0;
    }
    case LAB_AH: {
        lab_ah *ah = object;
        ah->handle = handle;
        ah->number = number_take(&ahs, 0xffff, object);
        return ah->number != 0;
    }
    }
    abort();
}

void *lab_new(lab_context *context, enum lab_kind kind) {
    struct context *c = of(context);
    void *object = calloc(1, size_of(kind));
    uint32_t handle;
    if (!object) return NULL;
    if (handle_take(c, kind, object, &handle)) {
        free(object);
        return NULL;
    }
    if (!number_object(context, kind, object, handle)) {
        c->entry[handle].object = NULL;
        free(object);
        return NULL;
    }
    return object;
}

void lab_publish(lab_context *context, enum lab_kind kind, void *object) {
    entry_of(context, handle_of(kind, object))->published = true;
}

/* The first of a number's handles is in the table. */
static void leave_number(const lab_ah *ah) {
    lab_ah *first = number_find(&ahs, ah->number);
    if (first == ah) {
        ahs.object[ah->number] = ah->next;
        return;
    }
    while (first && first->next != ah) first = first->next;
    if (first) first->next = ah->next;
}

void lab_free(lab_context *context, enum lab_kind kind, void *object) {
    struct context *c = of(context);
    const uint32_t handle = handle_of(kind, object);
    if (kind == LAB_MR) number_drop(&mrs, ((lab_mr *)object)->key >> 8, object);
    if (kind == LAB_AH) leave_number(object);
    if (kind == LAB_QP) {
        const uint32_t bits = lab_qp_bits(context->device);
        number_drop(&qps, ((lab_qp *)object)->number & ((1u << bits) - 1), object);
        context->device->queue_pairs--;
    }
    c->entry[handle] = (struct entry){0};
    if (handle < c->searched) c->searched = handle;
    free(object);
}

void *lab_find(lab_context *context, enum lab_kind kind, uint32_t handle) {
    const struct entry *e = entry_of(context, handle);
    return e && e->published && e->kind == kind ? e->object : NULL;
}

lab_pd *lab_find_pd(lab_context *context, uint32_t handle) {
    return lab_find(context, LAB_PD, handle);
}

lab_cq *lab_find_cq(lab_context *context, uint32_t handle) {
    return lab_find(context, LAB_CQ, handle);
}

lab_srq *lab_find_srq(lab_context *context, uint32_t handle) {
    return lab_find(context, LAB_SRQ, handle);
}

lab_qp *lab_find_qp(lab_context *context, uint32_t handle) {
    return lab_find(context, LAB_QP, handle);
}

lab_mr *lab_find_mr(lab_context *context, uint32_t handle) {
    return lab_find(context, LAB_MR, handle);
}

lab_ah *lab_find_ah(lab_context *context, uint32_t handle) {
    return lab_find(context, LAB_AH, handle);
}

uint32_t lab_users(lab_context *context, uint32_t handle) {
    return entry_of(context, handle)->users;
}

void lab_use(lab_context *context, uint32_t handle, int change) {
    struct entry *e = entry_of(context, handle);
    if (!e || (change < 0 && !e->users)) lab_die("handle %u: uses are miscounted", handle);
    e->users += (uint32_t)change;
}

static uint64_t user_handle(enum lab_kind kind, const void *object) {
    switch (kind) {
    case LAB_CQ:
        return ((const lab_cq *)object)->user_handle;
    case LAB_SRQ:
        return ((const lab_srq *)object)->user_handle;
    case LAB_QP:
        return ((const lab_qp *)object)->user_handle;
    default:
        abort();
    }
}

bool lab_event_count(lab_context *context, enum lab_kind kind, uint64_t element) {
    struct context *c = of(context);
    for (uint32_t h = 0; h < c->entries; h++) {
        struct entry *e = &c->entry[h];
        if (!e->object || e->kind != kind || user_handle(kind, e->object) != element) continue;
        e->events++;
        return true;
    }
    return false;
}

uint32_t lab_events(lab_context *context, uint32_t handle) {
    struct entry *e = entry_of(context, handle);
    if (e->events) e->events -= lab_async_withdraw(context, e->kind, user_handle(e->kind, e->object));
    return e->events;
}

/* ------------------------------------------------------------------------------------------- by number, for the NIC */

lab_qp *lab_qp_numbered(uint32_t number) {
    uint32_t n;
    lab_device *devices = lab_devices(&n);
    for (uint32_t i = 0; i < n; i++) {
        lab_qp *qp = number_find(&qps, number & ((1u << lab_qp_bits(&devices[i])) - 1));
        if (qp && qp->number == number && lab_find_qp(qp->pd->context, qp->handle) == qp) return qp;
    }
    return NULL;
}

lab_mr *lab_mr_keyed(const lab_device *device, uint32_t key) {
    lab_mr *mr = number_find(&mrs, key >> 8);
    return mr && mr->key == key && mr->pd && mr->pd->context->device == device &&
                   lab_find_mr(mr->pd->context, mr->handle) == mr
               ? mr
               : NULL;
}

lab_ah *lab_ah_numbered(const lab_device *device, uint32_t number) {
    lab_ah *ah = number_find(&ahs, number);
    return ah && ah->pd && ah->pd->context->device == device ? ah : NULL;
}

lab_ah *lab_ah_of_gid(const lab_device *device, const struct in6_addr *gid) {
    for (uint32_t i = 0; i < ahs.room; i++) {
        lab_ah *ah = lab_ah_numbered(device, i);
        if (ah && !memcmp(&ah->gid, gid, sizeof *gid)) return ah;
    }
    return NULL;
}

lab_ah *lab_ah_in(const lab_pd *pd, const struct in6_addr *gid) {
    for (uint32_t i = 0; i < ahs.room; i++) {
        lab_ah *ah = ahs.object[i];
        if (ah && ah->pd == pd && !memcmp(&ah->gid, gid, sizeof *gid)) return ah;
    }
    return NULL;
}

void lab_ah_join(lab_ah *ah) {
    for (uint32_t i = 0; i < ahs.room; i++) {
        lab_ah *other = ahs.object[i];
        if (!other || other == ah || other->pd != ah->pd || memcmp(&other->gid, &ah->gid, sizeof ah->gid)) continue;
        number_drop(&ahs, ah->number, ah);
        ah->number = other->number;
        ah->next = other->next;
        other->next = ah;
        return;
    }
}

/* ----------------------------------------------------------------------------------------------------------- the end
 */

static void end_mr(lab_context *context, lab_mr *mr) {
    lab_region_remove(mr);
    lab_use(context, mr->pd->handle, -1);
    if (mr->mapping) munmap(mr->mapping, mr->mapped);
}

static void end_cq(lab_context *context, lab_cq *cq) {
    if (context->device->model->destroy_cq) context->device->model->destroy_cq(cq);
    if (cq->channel) cq->channel->queues--;
}

static void end_srq(lab_context *context, lab_srq *srq) {
    if (context->device->model->destroy_srq) context->device->model->destroy_srq(srq);
    lab_use(context, srq->pd->handle, -1);
}

static void end_qp(lab_context *context, lab_qp *qp) {
    lab_flow_close(qp);
    if (context->device->model->destroy_qp) context->device->model->destroy_qp(qp);
    lab_use(context, qp->pd->handle, -1);
    lab_use(context, qp->send_cq->handle, -1);
    lab_use(context, qp->recv_cq->handle, -1);
    if (qp->srq) lab_use(context, qp->srq->handle, -1);
}

int lab_destroy(lab_context *context, enum lab_kind kind, uint32_t handle) {
    void *object = lab_find(context, kind, handle);
    if (!object) return EINVAL;
    if (lab_users(context, handle)) return EBUSY;
    switch (kind) {
    case LAB_PD:
        break;
    case LAB_MR:
        end_mr(context, object);
        break;
    case LAB_CQ:
        end_cq(context, object);
        break;
    case LAB_SRQ:
        end_srq(context, object);
        break;
    case LAB_QP:
        end_qp(context, object);
        break;
    case LAB_AH:
        lab_use(context, ((lab_ah *)object)->pd->handle, -1);
        break;
    }
    lab_free(context, kind, object);
    return 0;
}

/* ----------------------------------------------------------------------------------------------------------- memory */

/* A registration pins its pages: memory that is not there is refused when it is made, not found out by the NIC's
 * thread. /proc says what is mapped, and how, without touching it. */
int lab_memory_check(uint64_t start, uint64_t length, bool writable) {
    if (!length || start + length < start) return EINVAL;
    FILE *maps = fopen("/proc/self/maps", "re");
    if (!maps) return errno;
    char line[512], rights[5];
    uint64_t have = start; /* what lies below is there */
    while (have < start + length && fgets(line, sizeof line, maps)) {
        unsigned long long from, to;
        const bool whole = strchr(line, '\n');
        if (sscanf(line, "%llx-%llx %4s", &from, &to, rights) != 3) break;
        if (!whole)
            for (int c = fgetc(maps); c != '\n' && c != EOF;) c = fgetc(maps);
        if (to <= have) continue;
        if (from > have || rights[0] != 'r' || (writable && rights[1] != 'w')) break;
        have = to;
    }
    fclose(maps);
    return have >= start + length ? 0 : EFAULT;
}
