/* SPDX-License-Identifier: Apache-2.0
 *
 * generate.c: random litmus programs that keep their duties and come to an end.
 *
 * Operations are drawn in one global order in which they could be carried out one after the other; each rank's part is
 * what it does in that order, and a rank only ever waits for what comes earlier in it. So no program deadlocks. Sources
 * change only behind a wait that frees them (PUT-3); a target is written again only by the rank that wrote it before,
 * once that put is complete (PUT-7), or by anybody behind a quiet of all and a barrier.
 */
#include <stdio.h>
#include <string.h>

#include "program.h"

#define REGIONS 14u
#define SOURCES 4u /* a rank */

typedef struct region {
    uint32_t bytes;
    uint8_t owner, target; /* who wrote it, and where; owner MAX_RANKS: nobody yet */
    uint16_t label;        /* of its last put */
    bool complete;         /* its owner knows that put to be complete */
    bool forwarded;        /* it is a source now: nobody may write it until all are quiet */
    uint8_t channel, slot; /* a signal behind it, if `signals` */
    uint32_t signals;      /* so many signals of (owner, channel) in (target, slot) say that it is there */
} region;

#define USERS 4u
typedef struct source {
    uint16_t users[USERS]; /* labels of puts that may still read it */
    uint32_t n, bytes;
} source;

typedef struct generator {
    program *p;
    litmus_rng r;
    region regions[REGIONS];
    source sources[MAX_RANKS][SOURCES];
    uint32_t signals[MAX_RANKS][MAX_SLOTS][MAX_RANKS][MAX_CHANNELS]; /* at target, slot: from rank, channel */
    uint32_t known[MAX_RANKS][MAX_SLOTS][MAX_RANKS][MAX_CHANNELS];   /* and as many it has waited for */
    uint32_t labels, slots;
    bool single_writer; /* each rank has a slot of its own */
} generator;

static const uint32_t sizes[] = {0, 16, 16, 32, 64, 64, 128, 256, 1024};

static litmus_op *append(generator *g, uint32_t rank, op_kind kind) {
    program *p = g->p;
    litmus_op *o = &p->ops[rank][p->n[rank]++];
    *o = (litmus_op){.kind = (uint8_t)kind, .label = NO_LABEL, .of_rank = ANY, .of_channel = ANY};
    return o;
}

static bool room(const generator *g, uint32_t rank, uint32_t n) {
    return g->p->n[rank] + n + 4 < MAX_OPS;
}

static uint16_t new_label(generator *g) {
    char name[12];
    snprintf(name, sizeof name, "p%u", g->labels++);
    return program_label(g->p, name);
}

static uint8_t source_buffer(const generator *g, uint32_t rank, uint32_t i) {
    char name[12];
    snprintf(name, sizeof name, "x%u%c", rank % 10, (char)('a' + i));
    return program_buffer(g->p, name, 0);
}

static uint8_t region_buffer(const generator *g, uint32_t i) {
    char name[12];
    snprintf(name, sizeof name, "t%u", i);
    return program_buffer(g->p, name, 0);
}

static void await_label(generator *g, uint32_t rank, op_kind kind, uint16_t label) {
    append(g, rank, kind)->label = label;
}

/* The rank knows that the put in the region has arrived: waits for its signal if it has not yet. */
static bool arrived(generator *g, uint32_t i) {
    region *x = &g->regions[i];
    if (x->owner == MAX_RANKS || !x->signals || !room(g, x->target, 1)) return false;
    uint32_t *known = &g->known[x->target][x->slot][x->owner][x->channel];
    if (*known >= x->signals) return true;
    *known = x->signals;
    litmus_op *o = append(g, x->target, OP_WAIT);
    o->slot = x->slot;
    o->value = x->signals;
    o->of_rank = x->owner;
    o->of_channel = x->channel;
    return true;
}

static void add_signal(generator *g, uint32_t rank, litmus_op *o, uint32_t target) {
    o->slot = (uint8_t)(g->single_writer ? rank : rng_below(&g->r, g->slots));
    g->signals[target][o->slot][rank][o->channel]++;
    /* All regions that this (rank, channel) wrote at the target are behind it now. */
    for (uint32_t i = 0; i < REGIONS; i++) {
        region *x = &g->regions[i];
        if (x->owner != rank || x->target != target || x->channel != o->channel || x->signals) continue;
        x->slot = o->slot;
        x->signals = g->signals[target][o->slot][rank][o->channel];
    }
}

static void draw_put(generator *g, uint32_t rank) {
    program *p = g->p;
    if (!room(g, rank, 10)) return;
    const uint32_t target = rng_below(&g->r, p->ranks), i = rng_below(&g->r, REGIONS);
    region *x = &g->regions[i];
    if (x->owner != MAX_RANKS && (x->owner != rank || x->target != target || x->forwarded)) return;
    uint32_t bytes = sizes[rng_below(&g->r, sizeof sizes / sizeof *sizes)];
    if (p->granularity == 4 && bytes && rng_chance(&g->r, 50)) bytes -= 8;
    uint8_t from = 0;
    uint32_t from_at = 0;
    bool forward = false;
    source *s = NULL;
    if (rng_chance(&g->r, 20)) { /* from where something arrived */
        for (uint32_t k = 0; k < REGIONS && !forward; k++) {
            region *y = &g->regions[k];
            if (k == i || y->target != rank || y->owner == MAX_RANKS || y->bytes < bytes || !bytes) continue;
            if (!arrived(g, k)) continue;
            y->forwarded = forward = true;
            from = region_buffer(g, k);
        }
    }
    if (!forward) {
        const uint32_t k = rng_below(&g->r, SOURCES);
        s = &g->sources[rank][k];
        from = source_buffer(g, rank, k);
        if (s->n && (rng_chance(&g->r, 50) || s->bytes < bytes || s->n == USERS)) {
            const op_kind how = rng_chance(&g->r, 70) ? OP_FREE : OP_COMPLETE;
            while (s->n) await_label(g, rank, how, s->users[--s->n]);
        }
        if (!s->n && bytes) {
            litmus_op *o = append(g, rank, OP_STORE);
            o->to = from;
            o->bytes = bytes;
            s->bytes = bytes;
        }
    }
    if (x->owner != MAX_RANKS && !x->complete) await_label(g, rank, OP_COMPLETE, x->label);
    const bool signal = rng_chance(&g->r, 50);
    litmus_op *o = append(g, rank, signal ? OP_PUT_SIGNAL : OP_PUT);
    o->channel = (uint8_t)rng_below(&g->r, p->channels);
    o->target = (uint8_t)target;
    o->to = region_buffer(g, i);
    o->from = from;
    o->from_at = from_at;
    o->bytes = bytes;
    o->label = new_label(g);
    if (bytes > p->buffers[o->to].bytes) p->buffers[o->to].bytes = bytes;
    if (bytes > p->buffers[from].bytes) p->buffers[from].bytes = bytes;
    if (s && bytes) s->users[s->n++] = o->label;
    if (bytes) {
        *x = (region){.bytes = bytes,
                      .owner = (uint8_t)rank,
                      .target = (uint8_t)target,
                      .label = o->label,
                      .channel = o->channel};
    }
    if (signal) add_signal(g, rank, o, target);
}

static void draw_signal(generator *g, uint32_t rank) {
    if (!room(g, rank, 1)) return;
    litmus_op *o = append(g, rank, rng_chance(&g->r, 90) ? OP_SIGNAL : OP_FLUSH);
    o->channel = (uint8_t)rng_below(&g->r, g->p->channels);
    o->target = (uint8_t)rng_below(&g->r, g->p->ranks);
    if (o->kind == OP_SIGNAL) add_signal(g, rank, o, o->target);
}

/* The rank looks: at a region, with or without waiting for it, or at a word. */
static void draw_look(generator *g, uint32_t rank) {
    if (!room(g, rank, 2)) return;
    if (rng_chance(&g->r, 25)) {
        append(g, rank, OP_SEE)->slot = (uint8_t)rng_below(&g->r, g->slots);
        return;
    }
    const uint32_t i = rng_below(&g->r, REGIONS);
    const region *x = &g->regions[i];
    if (x->owner == MAX_RANKS || x->target != rank) return;
    if (rng_chance(&g->r, 75)) arrived(g, i);
    litmus_op *o = append(g, rank, OP_READ);
    o->to = region_buffer(g, i);
    o->bytes = x->bytes;
}

/* A rank makes sure of what it sent. */
static void draw_wait(generator *g, uint32_t rank) {
    if (!room(g, rank, 1)) return;
    const uint32_t what = rng_below(&g->r, 4);
    if (what < 2) {
        const bool all = rng_chance(&g->r, 50);
        const uint8_t channel = all ? UINT8_MAX : (uint8_t)rng_below(&g->r, g->p->channels);
        append(g, rank, what ? OP_QUIET : OP_SOURCE)->channel = channel;
        if (!all) return;
        for (uint32_t k = 0; k < SOURCES; k++) g->sources[rank][k].n = 0;
        for (uint32_t i = 0; i < REGIONS && what; i++)
            if (g->regions[i].owner == rank) g->regions[i].complete = true;
        return;
    }
    const uint32_t i = rng_below(&g->r, REGIONS);
    if (g->regions[i].owner != rank) return;
    await_label(g, rank, OP_COMPLETE, g->regions[i].label);
    g->regions[i].complete = true;
}

/* All quiet, all meet: every region is anybody's again. */
static void draw_barrier(generator *g) {
    for (uint32_t r = 0; r < g->p->ranks; r++)
        if (!room(g, r, 2)) return;
    for (uint32_t r = 0; r < g->p->ranks; r++) {
        append(g, r, OP_QUIET)->channel = UINT8_MAX;
        append(g, r, OP_BARRIER);
        for (uint32_t k = 0; k < SOURCES; k++) g->sources[r][k].n = 0;
    }
    for (uint32_t i = 0; i < REGIONS; i++) g->regions[i].owner = MAX_RANKS;
}

static uint64_t near_a_wrap(litmus_rng *r) {
    static const uint64_t wraps[] = {1ull << 8, 1ull << 16, 1ull << 24, 1ull << 32, 1ull << 40, 1ull << 48};
    return wraps[rng_below(r, sizeof wraps / sizeof *wraps)] - 1 - rng_below(r, 12);
}

/* What the library is told to keep in flight at most: now and then next to nothing. */
static void draw_flow(program *p, litmus_rng *r) {
    static const uint32_t operations[] = {1, 1, 2, 3, 5, 16}, bytes[] = {16, 64, 200, 1024, 4096};
    if (rng_chance(r, 15)) p->inflight = operations[rng_below(r, 6)];
    if (rng_chance(r, 15)) p->inflight_peer = operations[rng_below(r, 6)];
    if (rng_chance(r, 15)) p->inflight_bytes = bytes[rng_below(r, 5)];
    if (rng_chance(r, 10)) p->message = p->granularity;
}

void program_generate(program *p, uint64_t seed) {
    memset(p, 0, sizeof *p);
    generator g = {.p = p, .r = {seed * 0x9e3779b97f4a7c15ull ^ 0x6c62272e07bb0142ull}};
    snprintf(p->name, sizeof p->name, "random");
    p->ranks = 2 + rng_below(&g.r, MAX_RANKS - 1);
    p->channels = 1 + rng_below(&g.r, MAX_CHANNELS);
    p->proxies = 1 + rng_below(&g.r, p->channels);
    p->ring_log2 = 1 + rng_below(&g.r, 5);
    p->granularity = rng_chance(&g.r, 25) ? 4 : 16;
    if (rng_chance(&g.r, 30)) p->message = 64u << rng_below(&g.r, 4);
    if (rng_chance(&g.r, 40)) p->first_ticket = near_a_wrap(&g.r);
    if (rng_chance(&g.r, 40))
        p->first_sequence = rng_chance(&g.r, 20) ? UINT64_MAX - rng_below(&g.r, 12) : near_a_wrap(&g.r);
    g.slots = 1 + rng_below(&g.r, 4);
    litmus_rng other = {seed ^ 0x2545f4914f6cdd1dull};
    draw_flow(p, &other);
    p->single_writer = g.single_writer = rng_chance(&other, 20);
    if (g.single_writer) g.slots = p->ranks;
    for (uint32_t i = 0; i < REGIONS; i++) {
        g.regions[i].owner = MAX_RANKS;
        region_buffer(&g, i);
    }
    for (uint32_t r = 0; r < p->ranks; r++)
        for (uint32_t k = 0; k < SOURCES; k++) source_buffer(&g, r, k);
    const uint32_t operations = 4 + rng_below(&g.r, rng_chance(&g.r, 20) ? 100 : 32);
    for (uint32_t i = 0; i < operations && g.labels + 1 < MAX_LABELS; i++) {
        const uint32_t rank = rng_below(&g.r, p->ranks), what = rng_below(&g.r, 100);
        if (what < 40)
            draw_put(&g, rank);
        else if (what < 52)
            draw_signal(&g, rank);
        else if (what < 86)
            draw_look(&g, rank);
        else if (what < 97)
            draw_wait(&g, rank);
        else
            draw_barrier(&g);
    }
    char error[256];
    if (program_lay_out(p, error)) /* too many signals for the fields of one word: a shorter one */
        program_generate(p, seed + 0x100000001b3ull);
}
