/* SPDX-License-Identifier: Apache-2.0
 *
 * fabric.c: time, events, choices, and the record of what happened.
 *
 * Two sets of events: a heap by time, and a list of alternatives from which a choice takes one (schedule=choice).
 * There, timers (retries that run out, calls of the owner) stay in the heap, and come once no alternative is left.
 */
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

/* ----------------------------------------------------------------------------------------------------------- memory */

void *must(void *memory) {
    if (!memory) {
        fputs("virtual NIC: out of memory in the middle of an event: nothing can be undone\n", stderr);
        abort();
    }
    return memory;
}

struct pool_chunk {
    struct pool_chunk *next;
};
#define CHUNK_BYTES (64u << 10)
#define CHUNK_HEAD 64u

void *pool_take(struct pool *pool) {
    if (!pool->free) {
        const size_t bytes =
            CHUNK_HEAD + (pool->size > CHUNK_BYTES ? pool->size : CHUNK_BYTES / pool->size * pool->size);
        struct pool_chunk *chunk = malloc(bytes);
        if (!chunk) return NULL;
        chunk->next = pool->chunks;
        pool->chunks = chunk;
        char *things = (char *)chunk + CHUNK_HEAD;
        for (size_t at = 0; at + pool->size <= bytes - CHUNK_HEAD; at += pool->size) {
            void **link = (void **)(void *)(things + at);
            *link = pool->free;
            pool->free = link;
        }
    }
    void **thing = pool->free;
    pool->free = *thing;
    return memset(thing, 0, pool->size);
}

void pool_give(struct pool *pool, void *thing) {
    void **link = thing;
    *link = pool->free;
    pool->free = link;
}

void pool_end(struct pool *pool) {
    for (struct pool_chunk *chunk = pool->chunks, *next; chunk; chunk = next) {
        next = chunk->next;
        free(chunk);
    }
    pool->chunks = NULL;
    pool->free = NULL;
}

char *data_take(struct vnic_fabric *f, uint32_t bytes, uint32_t *class_out) {
    uint32_t class = 0;
    while (class < DATA_CLASSES && (64ull << class) < bytes) class ++;
    *class_out = class;
    /* Larger than any class (2 MiB): rare, and such a message costs more than an allocation. */
    if (class == DATA_CLASSES) return must(malloc(bytes));
    void **link = f->data[class].free;
    if (!link) {
        char *thing = must(pool_take(&f->data[class]));
        return thing;
    }
    f->data[class].free = *link;
    return (char *)link;
}

void data_give(struct vnic_fabric *f, char *data, uint32_t data_class) {
    if (data_class == DATA_CLASSES)
        free(data);
    else
        pool_give(&f->data[data_class], data);
}

/* ---------------------------------------------------------------------------------------------------------- choices */

static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

/* SplitMix64. */
static uint64_t next_random(struct vnic_fabric *f) {
    return mix(f->rng += 0x9e3779b97f4a7c15ull);
}

void vnic_hash_mix(struct vnic_fabric *f, uint64_t what) {
    f->hash = (f->hash ^ what) * 0x9fb21c651e98df25ull;
    f->hash ^= f->hash >> 29;
}

static uint32_t decide(struct vnic_fabric *f, vnic_choice_kind kind, uint32_t rank, uint32_t n, uint32_t percent) {
    uint32_t taken;
    if (f->next_taken != NO_CHOICE)
        taken = f->next_taken % n;
    else if (f->config.decide)
        taken = f->config.decide(f->config.context, kind, n) % n;
    else if (f->made < f->config.n_choices)
        taken = f->script[f->made] % n;
    else if (f->config.first_later)
        taken = 0;
    else if (percent != UINT32_MAX)
        taken = (uint32_t)((next_random(f) >> 32) * 100 >> 32) < percent;
    else
        taken = (uint32_t)((next_random(f) >> 32) * n >> 32);
    f->next_taken = NO_CHOICE;
    f->made++;
    if (f->choices < VNIC_CHOICES_KEPT) {
        if (f->choices == f->log_room) {
            const uint32_t room = f->log_room ? 2 * f->log_room : 1024;
            f->log = must(realloc(f->log, room * sizeof *f->log));
            f->log_room = room;
        }
        f->log[f->choices++] = (vnic_choice){taken, n, (uint32_t)kind, rank};
    }
    vnic_hash_mix(f, (uint64_t)taken << 32 | n << 8 | (uint32_t)kind);
    return taken;
}

uint32_t vnic_choose(struct vnic_fabric *f, vnic_choice_kind kind, uint32_t rank, uint32_t n) {
    if (n > 1) return decide(f, kind, rank, n, UINT32_MAX);
    f->next_taken = NO_CHOICE; /* there was nothing to choose */
    return 0;
}

void vnic_choose_next(struct vnic_fabric *f, uint32_t taken) {
    f->next_taken = taken;
}

bool vnic_chance(struct vnic_fabric *f, vnic_choice_kind kind, uint32_t rank, uint32_t percent) {
    if (percent == 0 || percent >= 100) return percent != 0;
    return decide(f, kind, rank, 2, percent) == 1;
}

const vnic_choice *vnic_choices(const struct vnic_fabric *f, uint32_t *n) {
    *n = f->choices;
    return f->log;
}

/* Eight steps: a few events come at once, most within `longest`, one in eight much later, so that it is overtaken by
 * many. */
uint64_t draw_delay(struct vnic_fabric *f, uint32_t rank, uint64_t longest) {
    static const uint8_t eighths[8] = {0, 1, 2, 3, 4, 6, 8, 32};
    if (!longest || f->config.choice_schedule) return 0;
    return longest * eighths[vnic_choose(f, VNIC_CHOICE_NIC, rank, 8)] / 8;
}

/* ----------------------------------------------------------------------------------------------------------- events */

static bool earlier(const struct event *a, const struct event *b) {
    return a->due != b->due ? a->due < b->due : a->order < b->order;
}

static void room_for_one(struct event_set *s) {
    if (s->n < s->room) return;
    s->room = s->room ? 2 * s->room : 256;
    s->at = must(realloc(s->at, s->room * sizeof(*s->at)));
}

static void put_at(struct event_set *s, uint32_t i, struct event *e) {
    s->at[i] = e;
    e->index = i;
}

static void sift_up(struct event_set *s, uint32_t i) {
    struct event *e = s->at[i];
    while (i && earlier(e, s->at[(i - 1) / 2])) {
        put_at(s, i, s->at[(i - 1) / 2]);
        i = (i - 1) / 2;
    }
    put_at(s, i, e);
}

static void sift_down(struct event_set *s, uint32_t i) {
    struct event *e = s->at[i];
    for (;;) {
        uint32_t child = 2 * i + 1;
        if (child >= s->n) break;
        if (child + 1 < s->n && earlier(s->at[child + 1], s->at[child])) child++;
        if (!earlier(s->at[child], e)) break;
        put_at(s, i, s->at[child]);
        i = child;
    }
    put_at(s, i, e);
}

static void heap_remove(struct event_set *s, uint32_t i) {
    struct event *last = s->at[--s->n];
    if (i == s->n) return;
    put_at(s, i, last);
    sift_up(s, i);
    sift_down(s, last->index);
}

/* The order of alternatives is that of their becoming possible, so that a script keeps its meaning. */
static void alternative_remove(struct event_set *s, uint32_t i) {
    s->n--;
    for (; i < s->n; i++) put_at(s, i, s->at[i + 1]);
}

static struct event *add(struct vnic_fabric *f, enum event_kind kind, uint64_t delay, struct op *op, struct conn *conn,
                         bool timer) {
    struct event *e = must(pool_take(&f->events));
    e->kind = (uint8_t)kind;
    e->due = f->now + delay;
    e->order = f->order++;
    e->op = op;
    e->conn = conn;
    e->timer = timer || !f->config.choice_schedule;
    if (op) op->refs++;
    if (conn) conn->events++, conn->endpoint->events++;
    struct event_set *s = e->timer ? &f->heap : &f->alternatives;
    room_for_one(s);
    put_at(s, s->n++, e);
    if (e->timer) sift_up(s, e->index);
    return e;
}

struct event *event_add(struct vnic_fabric *f, enum event_kind kind, uint64_t delay, struct op *op, struct conn *conn) {
    return add(f, kind, delay, op, conn, false);
}

struct event *event_timer(struct vnic_fabric *f, enum event_kind kind, uint64_t delay, struct op *op,
                          struct conn *conn) {
    return add(f, kind, delay, op, conn, true);
}

static void unlink_event(struct vnic_fabric *f, struct event *e) {
    if (e->timer)
        heap_remove(&f->heap, e->index);
    else
        alternative_remove(&f->alternatives, e->index);
    if (e->conn) e->conn->events--, e->conn->endpoint->events--;
}

void event_remove(struct vnic_fabric *f, struct event *e) {
    unlink_event(f, e);
    struct op *op = e->op;
    pool_give(&f->events, e);
    if (op) op_release(op);
}

static void remove_of(struct vnic_fabric *f, struct event_set *s, const struct conn *conn) {
    if (!conn->events) return;
    /* First found, then removed: a removal moves others. */
    struct event **found = must(malloc(conn->events * sizeof(*found)));
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n && n < conn->events; i++)
        if (s->at[i]->conn == conn) found[n++] = s->at[i];
    while (n) {
        /* An add between its halves keeps the others of its NIC waiting. */
        const bool half = found[--n]->kind == EVENT_ADD_STORE;
        event_remove(f, found[n]);
        if (half) next_add(conn->target);
    }
    free(found);
}

void events_remove_of(struct vnic_fabric *f, const struct conn *conn) {
    remove_of(f, &f->alternatives, conn);
    remove_of(f, &f->heap, conn);
}

uint64_t vnic_now(const struct vnic_fabric *f) {
    return f->now;
}

void vnic_set_now(struct vnic_fabric *f, uint64_t now_ns) {
    if (now_ns > f->now) f->now = now_ns;
}

uint32_t vnic_due(const struct vnic_fabric *f) {
    if (f->heap.n && f->heap.at[0]->due <= f->now) return f->alternatives.n + 1;
    return f->alternatives.n;
}

uint64_t vnic_next(const struct vnic_fabric *f) {
    if (f->alternatives.n) return f->now;
    return f->heap.n ? f->heap.at[0]->due : UINT64_MAX;
}

/* ------------------------------------------------------------------------------------------------- what meets what */

static void widen(uintptr_t *from, uintptr_t *to, uintptr_t begin, uint64_t bytes) {
    if (!bytes) return;
    if (*from == *to || begin < *from) *from = begin;
    if (begin + bytes > *to) *to = begin + bytes;
}

void met_memory(struct vnic_fabric *f, const struct vnic_region *region, uint64_t offset, uint32_t bytes, bool add) {
    if (!region->strict) {
        widen(&f->met.written_from, &f->met.written_to, (uintptr_t)region->base + offset, bytes);
        return;
    }
    if (region->polled) f->met.control |= rank_bit(region->rank);
    if (!add) widen(&f->met.stored_from, &f->met.stored_to, (uintptr_t)region->base + offset, bytes);
}

/* A source that was copied when it was the caller's is not met again. */
void met_source(struct op *op, uint32_t at, uint32_t bytes) {
    struct vnic_met *met = &op->endpoint->fabric->met;
    for (uint32_t i = 0; i < op->sges && bytes && !op->copy; i++) {
        const vnic_sge *s = &op->sge[i];
        if (at >= s->length) {
            at -= s->length;
            continue;
        }
        const uint32_t here = s->length - at < bytes ? s->length - at : bytes;
        if (!s->region->strict)
            widen(&met->read_from, &met->read_to, (uintptr_t)s->region->base + s->offset + at, here);
        bytes -= here;
        at = 0;
    }
}

vnic_met *vnic_met_since(struct vnic_fabric *f) {
    return &f->met;
}

static uint64_t name_of_op(const struct op *op) {
    return (uint64_t)op->endpoint->id << 40 ^ (uint64_t)op->seq << 8 ^ (uint64_t)op->peer << 52;
}

static uint64_t name_of(const struct event *e) {
    const struct op *op = e->op ? e->op : e->posted ? e->posted->op : NULL;
    const uint32_t piece = e->posted ? e->posted->piece | (e->posted->duplicate ? 192u : 128u) : e->piece;
    const uint64_t name = mix((op ? name_of_op(op) : 0) ^ piece ^ (uint64_t)e->kind << 32);
    return (name & ~VNIC_NAME_TWICE) | (e->kind == EVENT_DUPLICATE ? VNIC_NAME_TWICE : 0);
}

uint32_t vnic_names(const struct vnic_fabric *f, uint64_t *names, uint32_t room) {
    if (f->heap.n && f->heap.at[0]->due <= f->now) {
        if (room) names[0] = name_of(f->heap.at[0]);
        return 1;
    }
    for (uint32_t i = 0; i < f->alternatives.n && i < room; i++) names[i] = name_of(f->alternatives.at[i]);
    return f->alternatives.n;
}

void vnic_run_due(struct vnic_fabric *f) {
    struct event *e = NULL;
    if (f->heap.n && f->heap.at[0]->due <= f->now) {
        e = f->heap.at[0];
    } else if (f->alternatives.n) {
        const uint32_t n = f->alternatives.n;
        e = f->alternatives.at[vnic_choose(f, VNIC_CHOICE_EVENT, 0, n)];
    }
    f->next_taken = NO_CHOICE;
    if (!e) return;
    f->stats.events++;
    vnic_hash_mix(f, e->kind | (uint64_t)e->piece << 8 | (uint64_t)(e->op ? e->op->seq : 0) << 16);
    vnic_hash_mix(f, f->now ^ (uint64_t)(e->conn ? e->conn->endpoint->id : 0) << 48);
    const struct op *of = e->op ? e->op : e->posted ? e->posted->op : NULL;
    f->met.request = of ? name_of_op(of) : 0;
    unlink_event(f, e);
    run_event(f, e);
    struct op *op = e->op;
    pool_give(&f->events, e);
    if (op) op_release(op);
}

void vnic_call_at(struct vnic_fabric *f, uint64_t at_ns, void (*call)(void *context, uint64_t argument), void *context,
                  uint64_t argument) {
    struct event *e = add(f, EVENT_CALL, at_ns > f->now ? at_ns - f->now : 0, NULL, NULL, true);
    e->call = call;
    e->context = context;
    e->argument = argument;
}

/* ------------------------------------------------------------------------------------------------------------ trace */

static const char *const note_names[] = {
    [EVENT_PLACE] = "place",
    [EVENT_VISIBLE] = "visible",
    [EVENT_COMPLETE] = "complete",
    [EVENT_IMMEDIATE] = "immediate",
    [EVENT_DUPLICATE] = "duplicate",
    [EVENT_ADD_STORE] = "add stores",
    [EVENT_FAIL] = "fails",
    [EVENT_GIVE_UP] = "gives up",
    [EVENT_RNR_RETRY] = "receiver not ready",
    [EVENT_DRAINED] = "drained",
    [EVENT_STRAY] = "stray completion",
    [NOTE_POST] = "post",
    [NOTE_RING] = "ring",
    [NOTE_DOORBELL_LOST] = "doorbell lost",
    [NOTE_LAUNCH] = "launch",
    [NOTE_CONNECT] = "connect",
    [NOTE_DISCONNECT] = "disconnect",
    [NOTE_CLOSE] = "close",
    [NOTE_DEAD] = "rank dies",
    [NOTE_FLUSH] = "flush",
    [NOTE_FAULT] = "fault",
    [NOTE_ERROR] = "connection in error",
};

void note(struct vnic_fabric *f, uint8_t what, uint32_t rank, uint32_t peer, uint32_t a, uint32_t b, uint64_t cookie) {
    if (!f->trace) return;
    f->trace[f->traced++ % f->config.trace_lines] = (struct trace_line){f->now, cookie, rank, peer, a, b, what};
}

uint32_t vnic_trace(const struct vnic_fabric *f, char *text, uint32_t bytes) {
    uint32_t used = 0;
    if (bytes) text[0] = 0;
    const uint64_t lines = f->config.trace_lines;
    for (uint64_t i = f->traced > lines ? f->traced - lines : 0; f->trace && i < f->traced; i++) {
        const struct trace_line *t = &f->trace[i % lines];
        char line[160];
        const int n =
            snprintf(line, sizeof line, "%10llu ns  rank %u -> %u  %s #%u.%u cookie %llx\n", (unsigned long long)t->now,
                     t->rank, t->peer, note_names[t->what], t->a, t->b, (unsigned long long)t->cookie);
        if (used < bytes) snprintf(text + used, bytes - used, "%s", line);
        used += (uint32_t)n;
    }
    return used + 1;
}

/* ----------------------------------------------------------------------------------------------------- open and close
 */

const vnic_stats *vnic_fabric_stats(const struct vnic_fabric *f) {
    return &f->stats;
}

uint64_t vnic_hash(const struct vnic_fabric *f) {
    return f->hash;
}

void vnic_fabric_close(struct vnic_fabric *f) {
    if (!f) return;
    for (uint32_t i = 0; i < f->room_endpoints; i++)
        if (f->endpoints[i]) vnic_endpoint_close(f->endpoints[i]);
    for (uint32_t i = 0; i < f->n_nics; i++) free(f->nics[i]);
    for (uint32_t i = 0; i < f->n_regions; i++) free(f->regions[i]);
    pool_end(&f->events);
    pool_end(&f->ops);
    pool_end(&f->conns);
    pool_end(&f->posted);
    pool_end(&f->records);
    for (uint32_t i = 0; i < DATA_CLASSES; i++) pool_end(&f->data[i]);
    free(f->heap.at);
    free(f->alternatives.at);
    free(f->script);
    free(f->log);
    free(f->endpoints);
    free(f->regions);
    free(f->nics);
    free(f->trace);
    free(f);
}

struct vnic_fabric *vnic_fabric_open(const vnic_fabric_config *config) {
    struct vnic_fabric *f = calloc(1, sizeof *f);
    if (!f) return NULL;
    f->config = *config;
    f->rng = mix(config->seed ^ 0x2545f4914f6cdd1dull);
    f->hash = 0xcbf29ce484222325ull;
    f->next_taken = NO_CHOICE;
    f->events.size = sizeof(struct event);
    f->ops.size = sizeof(struct op);
    f->conns.size = sizeof(struct conn);
    f->posted.size = sizeof(struct posted);
    f->records.size = sizeof(struct record);
    for (uint32_t i = 0; i < DATA_CLASSES; i++) f->data[i].size = (size_t)64 << i;
    f->script = malloc((config->n_choices ? config->n_choices : 1) * sizeof *f->script);
    if (config->trace_lines) f->trace = calloc(config->trace_lines, sizeof *f->trace);
    if (!f->script || (config->trace_lines && !f->trace)) {
        vnic_fabric_close(f);
        return NULL;
    }
    if (config->n_choices) memcpy(f->script, config->choices, config->n_choices * sizeof *f->script);
    f->config.choices = f->script;
    return f;
}
