/* SPDX-License-Identifier: Apache-2.0
 *
 * What each fault does. One is on at a time, and each is as small as its description: the rest of the contract stays as
 * it is, so that a case that notices has noticed this.
 */
#include <stdio.h>
#include <string.h>

#include "mutant.h"

/* Long enough for a reader on a busy machine to look in between: the first one that does ends the case. */
#define SOON_NS 50000000ull
#define LATE_NS 20000000ull
#define OLD_NS 500000000ull /* until the next put to the same bytes has been posted */

static const char *const names[] = {"none",
#define NAME(name, clause, text) #name,
                                    UCCL_EP_MUTANT_FAULT_TABLE(NAME)
#undef NAME
};

enum fault fault_by_name(const char *name, size_t length) {
    for (unsigned i = 0; i < FAULT_COUNT; i++)
        if (strlen(names[i]) == length && !strncmp(names[i], name, length)) return (enum fault)i;
    return FAULT_COUNT;
}

static size_t alike(const char *a, const char *b) {
    size_t n = 0;
    while (a[n] && a[n] == b[n]) n++;
    return n;
}

void fault_names(const char *wrong, char *text, size_t bytes) {
    size_t used = 0, most = 0;
    text[0] = 0;
    for (unsigned i = 1; i < FAULT_COUNT; i++)
        if (alike(names[i], wrong) > most) most = alike(names[i], wrong);
    for (unsigned i = 1; i < FAULT_COUNT && used < bytes; i++)
        if (alike(names[i], wrong) == most)
            used += (size_t)snprintf(text + used, bytes - used, "%s%s", used ? ", " : "", names[i]);
}

bool fault_needs_scratch(enum fault fault) {
    return fault == FAULT_stale_source || fault == FAULT_acknowledged_not_visible || fault == FAULT_late_duplicate ||
           fault == FAULT_older_put_wins;
}

static bool is_write(const uccl_ep_operation *o) {
    return o->kind == UCCL_EP_OPERATION_WRITE;
}
static bool is_add(const uccl_ep_operation *o) {
    return o->kind == UCCL_EP_OPERATION_ADD64;
}
static struct pending *waiting_add(uccl_ep_endpoint *e, uint32_t peer, uint64_t at) {
    if (at == e->queues[peer].taken) return NULL;
    struct pending *p = pending_at(e, peer, at);
    return p->stage == WAITING && is_add(&p->operation) ? p : NULL;
}

static void owe(struct queue *q, const uccl_ep_operation *operation, uint64_t at, uint64_t due_ns) {
    q->debt = (struct debt){.operation = *operation, .due_ns = due_ns, .at = at};
}

/* ------------------------------------------------------------------------------------------------------- kept bytes */

static uint64_t scratch_offset(const uccl_ep_endpoint *e, uint32_t peer) {
    return (uint64_t)((e->index * e->peers + peer) % SCRATCH_PEERS) * SCRATCH_BYTES;
}

/* A cache that is filled once and never asks whether the source has changed. */
static void cached_source(uccl_ep_endpoint *e, uccl_ep_operation *o) {
    const uint64_t index = o->local_offset / 64 % CACHE_LINES;
    struct line *line = &e->cached[index];
    if (o->length > LINE_BYTES) return;
    if (line->length == o->length && line->offset == o->local_offset) {
        o->local_region = UCCL_EP_REGION_MAILBOX;
        o->local_offset = index * LINE_BYTES;
    } else if (!line->length) {
        *line = (struct line){o->local_offset, o->length};
        memcpy(e->device->scratch + index * LINE_BYTES, e->device->heap + o->local_offset, o->length);
    }
}

/* Keep the bytes of a put as they are now, on the wire so to say. False: there are too many. */
static bool capture(uccl_ep_endpoint *e, uint32_t peer, uccl_ep_operation *o) {
    if (!o->length || o->length > SCRATCH_BYTES) return false;
    memcpy(e->device->scratch + scratch_offset(e, peer), e->device->heap + o->local_offset, o->length);
    o->local_region = UCCL_EP_REGION_MAILBOX;
    o->local_offset = scratch_offset(e, peer);
    return true;
}

/* ------------------------------------------------------------------------------------------ damage when it is taken */

static void damage_write(uccl_ep_endpoint *e, struct queue *q, uccl_ep_operation *o) {
    const uint32_t granule = o->length % 16 ? 4 : 16;
    switch (e->device->knobs.fault) {
    case FAULT_stale_source:
        cached_source(e, o);
        break;
    case FAULT_put_short:
        if (++q->writes % 7 == 0) o->length -= granule;
        break;
    case FAULT_put_stray:
        if (++q->writes % 7 == 0 && o->local_offset + o->length < e->device->heap_bytes &&
            o->remote_offset + o->length < e->device->heap_bytes)
            o->length++;
        break;
    case FAULT_offset_32_bits:
        o->remote_offset &= UINT32_MAX;
        break;
    case FAULT_length_16_bits:
        o->length &= UINT16_MAX;
        break;
    default:
        break;
    }
}

static void damage_add(uccl_ep_endpoint *e, struct queue *q, uccl_ep_operation *o) {
    switch (e->device->knobs.fault) {
    case FAULT_signal_32_bits:
        o->value &= UINT32_MAX;
        break;
    case FAULT_signal_beside:
        if (++q->adds % 31 == 0) o->remote_offset ^= 8;
        break;
    default:
        break;
    }
}

void fault_taken(uccl_ep_endpoint *e, uint32_t peer, struct pending *p) {
    uccl_ep_operation *o = &p->operation;
    if (is_write(o) && o->length) damage_write(e, &e->queues[peer], o);
    if (is_add(o)) damage_add(e, &e->queues[peer], o);
}

void fault_submitted(uccl_ep_endpoint *e, uint32_t peer) {
    const enum fault fault = e->device->knobs.fault;
    const struct queue *q = &e->queues[peer];
    if (fault != FAULT_signal_overtakes && !(fault == FAULT_self_unordered && peer == e->rank)) return;
    for (uint64_t at = q->first; at != q->taken && !q->stopped; at++)
        if (waiting_add(e, peer, at)) hand(e, peer, at, &pending_at(e, peer, at)->operation);
}

/* -------------------------------------------------------------------------------------------- damage when it is due */

static pthread_mutex_t devices_lock = PTHREAD_MUTEX_INITIALIZER;
static uccl_ep_device *devices;

/* Place the bytes also in another communicator's memory. Without a completion the shared-memory
 * backend keeps no books, so another thread's endpoint can be used for that. */
static void place_elsewhere(uccl_ep_endpoint *e, uint32_t peer, uccl_ep_operation o) {
    o.flags = 0;
    pthread_mutex_lock(&devices_lock);
    for (uccl_ep_device *d = devices; d; d = d->next) {
        const uccl_ep_endpoint *other = d->endpoints;
        if (d == e->device || !other || peer >= other->peers || !other->queues[peer].ring || o.length > d->heap_bytes)
            continue;
        o.local_offset %= d->heap_bytes - o.length + 1;
        o.remote_offset %= d->heap_bytes - o.length + 1;
        uint32_t accepted;
        d->real->submit(other->inner, peer, &o, 1, 0, &accepted);
        break;
    }
    pthread_mutex_unlock(&devices_lock);
}

/* All but the second half, which comes later. */
static enum turn tear(uccl_ep_endpoint *e, uint32_t peer, uint64_t at, uint64_t now) {
    struct pending *p = pending_at(e, peer, at);
    struct queue *q = &e->queues[peer];
    const uint32_t half = p->operation.length / 2;
    uccl_ep_operation first = p->operation, second = p->operation;
    if (q->debt.due_ns || half < 4 || p->number % 3) return HONEST;
    first.length = half;
    second.length -= half;
    second.local_offset += half;
    second.remote_offset += half;
    if (!hand(e, peer, at, &first)) return NOT_YET;
    if (p->stage == ENDED) return DAMAGED; /* it failed */
    p->parts++;
    owe(q, &second, at, now + SOON_NS);
    return DAMAGED;
}

/* `at` comes after the add right behind it, if there is one. */
static enum turn swap(uccl_ep_endpoint *e, uint32_t peer, uint64_t at, uint64_t now) {
    struct pending *p = pending_at(e, peer, at);
    struct queue *q = &e->queues[peer];
    const struct pending *behind = waiting_add(e, peer, at + 1);
    if (q->debt.due_ns || !behind) return HONEST;
    if (!hand(e, peer, at + 1, &behind->operation)) return NOT_YET;
    p->stage = HANDED;
    p->parts = 1;
    owe(q, &p->operation, at, now + SOON_NS);
    return DAMAGED;
}

static bool overlap(const uccl_ep_operation *a, const uccl_ep_operation *b) {
    return a->remote_region == b->remote_region && a->remote_offset < b->remote_offset + b->length &&
           b->remote_offset < a->remote_offset + a->length;
}

/* The one before, which was told to be complete, is placed behind this one if they meet. */
static enum turn older_wins(uccl_ep_endpoint *e, uint32_t peer, uint64_t at, uint64_t now) {
    const struct pending *p = pending_at(e, peer, at);
    struct debt *older = &e->queues[peer].debt;
    uccl_ep_operation o = p->operation;
    if (older->due_ns) {
        if (!overlap(&older->operation, &o)) return HONEST;
        if (!hand(e, peer, at, &o)) return NOT_YET;
        if (hand(e, peer, NOBODY, &older->operation)) older->due_ns = 0;
        return DAMAGED;
    }
    if (p->number % 2 || !capture(e, peer, &o)) return HONEST;
    owe(&e->queues[peer], &o, NOBODY, now + OLD_NS);
    end(e, peer, at, UCCL_EP_OK, 0);
    return DAMAGED;
}

/* 'T': stopped by a signal, 't': by a debugger. Field 3, behind a name that may hold anything. */
static bool is_stopped(int32_t process) {
    char path[32], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)process);
    FILE *file = fopen(path, "re");
    if (!file) return false;
    const size_t bytes = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[bytes] = 0;
    const char *state = strrchr(text, ')');
    return state && (state[1] == ' ') && (state[2] == 'T' || state[2] == 't');
}

/* A put to bytes that an earlier one wrote: the earlier one, long complete, arrives once more. */
static enum turn duplicate(uccl_ep_endpoint *e, uint32_t peer, uint64_t at) {
    const uccl_ep_operation *o = &pending_at(e, peer, at)->operation;
    struct debt *late = &e->queues[peer].debt;
    if (!late->due_ns || !overlap(&late->operation, o)) return HONEST;
    if (!hand(e, peer, at, o)) return NOT_YET;
    if (hand(e, peer, NOBODY, &late->operation)) late->due_ns = 0;
    return DAMAGED;
}

static enum turn turn_of_write(uccl_ep_endpoint *e, uint32_t peer, uint64_t at, uint64_t now) {
    struct pending *p = pending_at(e, peer, at);
    struct queue *q = &e->queues[peer];
    uccl_ep_operation o = p->operation;
    switch (e->device->knobs.fault) {
    case FAULT_put_torn:
        return tear(e, peer, at, now);
    case FAULT_signal_between:
        return p->number % 3 ? HONEST : swap(e, peer, at, now);
    case FAULT_signal_overtakes:
    case FAULT_self_unordered:
        /* Signals went ahead when they were submitted: keep some puts back until such can be seen. */
        if (e->device->knobs.fault == FAULT_self_unordered && peer != e->rank) return HONEST;
        return p->number % 4 || now - p->taken_ns >= SOON_NS ? HONEST : NOT_YET;
    case FAULT_word_before_bytes:
        if (q->debt.due_ns) return NOT_YET;
        p->stage = HANDED;
        p->parts = 1;
        owe(q, &o, at, now + SOON_NS);
        return DAMAGED;
    case FAULT_late_duplicate:
        return duplicate(e, peer, at);
    case FAULT_older_put_wins:
        return older_wins(e, peer, at, now);
    case FAULT_target_must_run:
        return is_stopped(q->process) ? NOT_YET : HONEST;
    case FAULT_acknowledged_not_visible:
        if (p->number % 2 || !capture(e, peer, &o)) return HONEST;
        owe(q, &o, NOBODY, now + LATE_NS);
        end(e, peer, at, UCCL_EP_OK, 0);
        return DAMAGED;
    case FAULT_source_read_late:
        owe(q, &o, NOBODY, now + LATE_NS);
        end(e, peer, at, UCCL_EP_OK, 0);
        return DAMAGED;
    case FAULT_other_memory:
        if (++q->writes % 9 == 0) place_elsewhere(e, peer, o);
        return HONEST;
    default:
        return HONEST;
    }
}

static enum turn turn_of_add(uccl_ep_endpoint *e, uint32_t peer, uint64_t at, uint64_t now) {
    const struct pending *p = pending_at(e, peer, at);
    struct queue *q = &e->queues[peer];
    switch (e->device->knobs.fault) {
    case FAULT_signal_lost:
        if (++q->adds % 31) return HONEST;
        end(e, peer, at, UCCL_EP_OK, 0);
        return DAMAGED;
    case FAULT_signal_doubled:
        if (++q->adds % 31 == 0) hand(e, peer, NOBODY, &p->operation);
        return HONEST;
    case FAULT_signals_swapped:
        return p->number % 3 ? HONEST : swap(e, peer, at, now);
    default:
        return HONEST;
    }
}

enum turn fault_turn(uccl_ep_endpoint *e, uint32_t peer, uint64_t at, uint64_t now) {
    const struct pending *p = pending_at(e, peer, at);
    const struct queue *q = &e->queues[peer];
    const enum fault fault = e->device->knobs.fault;
    switch (fault) {
    case FAULT_NONE:
        return HONEST;
    case FAULT_doorbell_forgotten:
        if (at + 1 == q->taken) return NOT_YET;
        break;
    case FAULT_complete_at_submit:
        if (now - p->taken_ns < LATE_NS) return NOT_YET;
        break;
    case FAULT_sequence_16_bits:
        if ((p->number & UINT16_MAX) != UINT16_MAX) break;
        end(e, peer, at, UCCL_EP_OK, 0);
        return DAMAGED;
    case FAULT_acknowledged_not_visible:
    case FAULT_source_read_late:
        if (q->debt.due_ns) return NOT_YET; /* the order stays */
        break;
    default:
        break;
    }
    if (is_write(&p->operation) && p->operation.length) return turn_of_write(e, peer, at, now);
    return is_add(&p->operation) ? turn_of_add(e, peer, at, now) : HONEST;
}

void fault_debt(uccl_ep_endpoint *e, uint32_t peer, uint64_t now) {
    struct queue *q = &e->queues[peer];
    if (now < q->debt.due_ns) return;
    const struct debt debt = q->debt;
    if (debt.at != NOBODY) pending_at(e, peer, debt.at)->parts--; /* the debt stood for a part; hand() counts its own */
    if (hand(e, peer, debt.at, &debt.operation))
        q->debt.due_ns = 0;
    else if (debt.at != NOBODY)
        pending_at(e, peer, debt.at)->parts++;
}

/* ------------------------------------------------------------------------------------------------------ completions */

bool fault_early(const uccl_ep_endpoint *e, const struct pending *p) {
    (void)p;
    return e->device->knobs.fault == FAULT_complete_at_submit;
}

void fault_ended(uccl_ep_endpoint *e, uint32_t peer, const struct pending *p) {
    struct queue *q = &e->queues[peer];
    uccl_ep_operation again = p->operation;
    if (e->device->knobs.fault == FAULT_source_read_again && is_write(&again)) {
        /* Once more when the next one has ended: whoever waits for each in turn has changed the source by then. */
        if (q->debt.due_ns)
            q->debt.due_ns = 1;
        else if (p->number % 3 == 0)
            owe(q, &again, NOBODY, UINT64_MAX);
        return;
    }
    if (e->device->knobs.fault != FAULT_late_duplicate || q->debt.due_ns || !is_write(&again) || p->number % 5) return;
    if (capture(e, peer, &again)) owe(q, &again, NOBODY, UINT64_MAX);
}

bool fault_give(uccl_ep_endpoint *e, uint32_t peer) {
    struct queue *q = &e->queues[peer];
    q->completions++;
    switch (e->device->knobs.fault) {
    case FAULT_completions_stop:
        return q->completions <= 20;
    case FAULT_completion_lost:
        return q->completions % 61 != 0;
    default:
        return true;
    }
}

/* ------------------------------------------------------------------------------------------- devices of the process */

void fault_device_opened(uccl_ep_device *device) {
    pthread_mutex_lock(&devices_lock);
    device->next = devices;
    devices = device;
    pthread_mutex_unlock(&devices_lock);
}

void fault_device_closed(uccl_ep_device *device) {
    pthread_mutex_lock(&devices_lock);
    uccl_ep_device **at = &devices;
    while (*at != device) at = &(*at)->next;
    *at = device->next;
    pthread_mutex_unlock(&devices_lock);
}

void fault_endpoint_opened(uccl_ep_endpoint *e) {
    pthread_mutex_lock(&devices_lock);
    e->next = e->device->endpoints;
    e->device->endpoints = e;
    pthread_mutex_unlock(&devices_lock);
}

void fault_endpoint_closed(uccl_ep_endpoint *e) {
    pthread_mutex_lock(&devices_lock);
    uccl_ep_endpoint **at = &e->device->endpoints;
    while (*at != e) at = &(*at)->next;
    *at = e->next;
    pthread_mutex_unlock(&devices_lock);
}
