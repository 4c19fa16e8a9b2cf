/* SPDX-License-Identifier: Apache-2.0
 *
 * run.c: one run.
 *
 * Every moment in which a rank does or sees something is an event with a number of its own as time; in between, only
 * the world moves. Ranks never block: what would wait asks again in a later step.
 */
#include "run.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coop.h"

#define GUARD 4096u /* bytes before and behind every heap, which nothing may touch (MEM-2) */
#define SAMPLE_WORDS 64u
#define ARENA_BYTES (MAX_BYTES + 2 * GUARD)

typedef struct actor {
    runner *r;
    uint32_t rank;
    uccl_ep_comm *comm;
    uccl_ep_status created;
    char why[256];
    uint64_t *heap;
    uint32_t at;              /* next operation */
    uint32_t seen_errors;     /* records taken into the history */
    uint64_t seen[MAX_SLOTS]; /* last recorded value of a word */
    bool seen_any[MAX_SLOTS];
    uint32_t barriers, state;
    uint64_t barrier_began;
    bool gave_up; /* after a failure: waits for nobody any more */
} actor;

enum { ACTOR_RUNS = 0, ACTOR_QUIETS, ACTOR_MEETS, ACTOR_DONE };

typedef struct label_state {
    bool posted;
    uint32_t rank, channel;
    uint64_t ticket;
    uint32_t bytes;
    uint64_t sample[SAMPLE_WORDS]; /* the first words of its source when it was posted */
} label_state;

struct runner {
    void *library;
    const uccl_ep_sim *sim;
    char backend[512];
    coop *coop;
    uccl_ep_model *model;
    char *arenas;
    run_watch watch;
    void *watch_context;
    /* of the run at hand */
    const program *p;
    const run_options *o;
    run_result *result;
    uccl_ep_sim_world *world;
    uint32_t number;
    uint32_t heap_bytes;
    actor actors[MAX_RANKS];
    label_state labels[MAX_LABELS];
    uint64_t now; /* of the history */
    uint32_t stamps;
    uint64_t history_hash;
    bool signalled[MAX_RANKS][MAX_SLOTS]; /* somebody added to that word, or may have */
    bool ended;
    uint64_t state[RUN_PARTS]; /* what touched each rank, its NIC and the history: see exhaustive.c */
    uint64_t flushes_seen;
    bool ran; /* a rank or a proxy had its turn in this step */
    uint64_t events_seen;
    uint64_t progress; /* turns in which something was done */
    /* kept of the last one */
    uccl_ep_sim_choice *choices;
    uint32_t n_choices, room_choices;
    char history[RUN_HISTORY], trace[RUN_HISTORY];
    uccl_ep_model_verdict verdict;
};

const char *run_outcome_name(uint32_t outcome) {
    static const char *const names[] = {"allowed", "forbidden", "stuck",   "error",
                                        "claim",   "refused",   "endless", "broken"};
    return outcome < sizeof names / sizeof *names ? names[outcome] : "?";
}

static void finish(runner *r, run_outcome outcome, const char *clause, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static void finish(runner *r, run_outcome outcome, const char *clause, const char *format, ...) {
    if (r->ended) return; /* what came first is the cause */
    r->ended = true;
    r->result->outcome = outcome;
    snprintf(r->result->clause, sizeof r->result->clause, "%.7s", clause);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(r->result->text, sizeof r->result->text, format, arguments);
    va_end(arguments);
}

static uint64_t mix(uint64_t h, uint64_t what) {
    h = (h ^ what) * 0x9fb21c651e98df25ull;
    return h ^ h >> 32;
}

/* ---------------------------------------------------------------------------------------------------------- history */

static void record(runner *r, uccl_ep_model_event e, const uint64_t *words) {
    e.end = ++r->now;
    if (!e.begin) e.begin = e.end;
    r->history_hash =
        mix(mix(r->history_hash, e.kind << 8 | e.rank), mix(e.value, e.ticket ^ (uint64_t)e.status << 32));
    for (uint64_t i = 0; words && i < e.bytes / 8; i++) r->history_hash = mix(r->history_hash, words[i]);
    if (uccl_ep_model_add(r->model, &e, words))
        finish(r, RUN_BROKEN, "", "the model takes no such event: %s", uccl_ep_model_error(r->model));
}

static uint32_t offset_of(const runner *r, uint8_t which, uint32_t at) {
    return r->p->buffers[which].offset + at;
}

static void record_read(actor *a, uint32_t offset, uint32_t bytes) {
    record(a->r, (uccl_ep_model_event){.kind = UCCL_EP_MODEL_READ, .rank = a->rank, .local = offset, .bytes = bytes},
           &a->heap[offset / 8]);
}

static void record_signal(actor *a, uint32_t slot, uint64_t value) {
    a->seen[slot] = value;
    a->seen_any[slot] = true;
    record(a->r, (uccl_ep_model_event){.kind = UCCL_EP_MODEL_SIGNAL, .rank = a->rank, .slot = slot, .value = value},
           NULL);
}

/* Records that the library has made since the last look. */
static void record_failures(actor *a) {
    uccl_ep_error errors[16];
    uint32_t total = 0;
    memset(errors, 0, sizeof errors);
    for (uint32_t i = 0; i < 16; i++) errors[i].size = sizeof errors[i];
    if (uccl_ep_errors(a->comm, errors, 16, &total) != UCCL_EP_OK) return;
    for (uint32_t i = a->seen_errors; i < total && i < 16; i++) {
        const uccl_ep_error *e = &errors[i];
        record(a->r,
               (uccl_ep_model_event){.kind = UCCL_EP_MODEL_FAILURE,
                                     .rank = a->rank,
                                     .channel = e->channel,
                                     .peer = e->peer,
                                     .ticket = e->ticket,
                                     .status = e->status},
               NULL);
        a->r->result->failures++;
    }
    a->seen_errors = total;
}

/* A call failed. Without faults that is a finding; with them the rank notes it and goes on. */
static void failed(actor *a, uccl_ep_status status, const char *what) {
    runner *r = a->r;
    const uccl_ep_error *e = uccl_ep_last_error();
    char clause[8], text[256];
    snprintf(clause, sizeof clause, "%s", e->clause[0] ? e->clause : "ERR-1");
    snprintf(text, sizeof text, "%s", e->text);
    record_failures(a);
    a->gave_up = true;
    if (r->o->faults) return;
    finish(r, RUN_ERROR, clause, "rank %u, %s: %s: %s", a->rank, what, uccl_ep_status_name(status), text);
}

/* ---------------------------------------------------------------------------------------------------- one operation */

/* Returns whether it is done; if not, it is asked again. */
static bool do_post(actor *a, const litmus_op *o) {
    runner *r = a->r;
    const program *p = r->p;
    const bool puts = o->kind == OP_PUT || o->kind == OP_PUT_SIGNAL, signals = o->kind != OP_PUT && o->kind != OP_FLUSH;
    const uint64_t local = puts ? offset_of(r, o->from, o->from_at) : 0, remote = puts ? offset_of(r, o->to, o->at) : 0,
                   add = !signals          ? 0
                         : o->explicit_add ? o->value
                                           : 1ull << p->shift[o->target][o->slot][a->rank][o->channel];
    uint64_t ticket = UCCL_EP_MODEL_NO_TICKET;
    uccl_ep_status status;
    switch (o->kind) {
    case OP_PUT:
        status = uccl_ep_put(a->comm, o->channel, o->target, local, remote, o->bytes, 0, &ticket);
        break;
    case OP_SIGNAL:
        status = uccl_ep_signal(a->comm, o->channel, o->target, o->slot, add, 0, &ticket);
        break;
    case OP_PUT_SIGNAL:
        status = uccl_ep_put_signal(a->comm, o->channel, o->target, local, remote, o->bytes, o->slot, add, 0, &ticket);
        break;
    default: {
        const uccl_ep_command flush = {.op = UCCL_EP_OP_FLUSH, .target = o->target};
        status = uccl_ep_post_many(a->comm, o->channel, &flush, 1, 0, &ticket);
    }
    }
    if (status == UCCL_EP_E_AGAIN) return false;
    r->signalled[o->target][o->slot] |= signals;
    record(r,
           (uccl_ep_model_event){.kind = UCCL_EP_MODEL_POST,
                                 .rank = a->rank,
                                 .channel = o->channel,
                                 .peer = o->target,
                                 .op = o->kind,
                                 .status = status,
                                 .ticket = ticket,
                                 .local = local,
                                 .remote = remote,
                                 .bytes = o->bytes,
                                 .slot = o->slot,
                                 .value = add},
           NULL);
    if (status != UCCL_EP_OK) {
        failed(a, status, "posting");
        return true;
    }
    if (o->label != NO_LABEL) {
        label_state *l = &r->labels[o->label];
        *l = (label_state){.posted = true, .rank = a->rank, .channel = o->channel, .ticket = ticket, .bytes = o->bytes};
        if (p->wrong[0])
            memcpy(l->sample, &a->heap[local / 8], o->bytes < sizeof l->sample ? o->bytes : sizeof l->sample);
    }
    return true;
}

static bool do_wait(actor *a, uint32_t channel, uint64_t ticket, bool source) {
    runner *r = a->r;
    const bool all = ticket == UCCL_EP_MODEL_NO_TICKET;
    const uint32_t which = channel == UINT8_MAX ? UCCL_EP_NO_CHANNEL : channel;
    const uccl_ep_status status = all && source ? uccl_ep_quiet_source(a->comm, which, 0)
                                  : all         ? uccl_ep_quiet(a->comm, which, 0)
                                  : source      ? uccl_ep_wait_source(a->comm, which, ticket, 0)
                                                : uccl_ep_wait(a->comm, which, ticket, 0);
    if (status == UCCL_EP_IN_PROGRESS) return false;
    /* As it was at the moment of success: a failure that is recorded behind it must not look like one before it. */
    record(r,
           (uccl_ep_model_event){.kind = UCCL_EP_MODEL_WAIT,
                                 .rank = a->rank,
                                 .channel = channel == UINT8_MAX ? UCCL_EP_MODEL_ALL : channel,
                                 .ticket = ticket,
                                 .source = source,
                                 .status = status},
           NULL);
    if (status != UCCL_EP_OK) failed(a, status, "waiting for what it posted");
    return true;
}

/* How many signals of (of_rank, of_channel) the value of a word holds, by its fields. */
static uint64_t count_signals(const program *p, uint32_t rank, const litmus_op *o, uint64_t value) {
    const uint32_t width = p->width[rank][o->slot];
    uint64_t sum = 0;
    if (!width || width == 64) return value;
    bool used[64] = {false};
    for (uint32_t q = 0; q < p->ranks; q++)
        for (uint32_t c = 0; c < p->channels; c++) {
            if ((o->of_rank != ANY && o->of_rank != q) || (o->of_channel != ANY && o->of_channel != c)) continue;
            const uint32_t shift = p->shift[rank][o->slot][q][c];
            bool posts = false;
            for (uint32_t i = 0; i < p->n[q] && !posts; i++) {
                const litmus_op *s = &p->ops[q][i];
                posts = (s->kind == OP_SIGNAL || s->kind == OP_PUT_SIGNAL) && s->target == rank && s->slot == o->slot &&
                        s->channel == c;
            }
            if (!posts || used[shift]) continue;
            used[shift] = true;
            sum += value >> shift & ((1ull << width) - 1);
        }
    return sum;
}

static bool do_wait_signal(actor *a, const litmus_op *o) {
    uint64_t value = 0;
    uccl_ep_status status;
    if (o->explicit_add)
        status = uccl_ep_wait_signal(a->comm, o->slot, o->value, UCCL_EP_ANY_RANK, 0, &value);
    else
        status = uccl_ep_read_signal(a->comm, o->slot, &value);
    if (status == UCCL_EP_OK && !o->explicit_add && count_signals(a->r->p, a->rank, o, value) < o->value)
        status = UCCL_EP_IN_PROGRESS;
    if (status < 0) {
        failed(a, status, "waiting for a signal");
        return true;
    }
    if (status == UCCL_EP_OK || !a->seen_any[o->slot] || a->seen[o->slot] != value) record_signal(a, o->slot, value);
    return status == UCCL_EP_OK;
}

static bool do_until(actor *a, const litmus_op *o) {
    const label_state *l = &a->r->labels[o->label];
    if (!l->posted || !l->bytes) return false;
    const uint32_t last = l->bytes / 8 - 1, offset = offset_of(a->r, o->to, o->at);
    if (last >= SAMPLE_WORDS || a->heap[offset / 8 + last] != l->sample[last]) return false;
    record_read(a, offset + 8 * last, 8);
    return true;
}

static void do_claim(actor *a, const litmus_op *o) {
    const label_state *l = &a->r->labels[o->label];
    const uint32_t offset = offset_of(a->r, o->to, o->at);
    const uint32_t bytes = l->bytes < sizeof l->sample ? l->bytes : (uint32_t)sizeof l->sample;
    record_read(a, offset, bytes);
    for (uint32_t i = 0; i < bytes / 8; i++) {
        const uint64_t got = a->heap[offset / 8 + i];
        if (got == l->sample[i]) continue;
        finish(a->r, RUN_CLAIM, a->r->p->wrong,
               "rank %u claims that %s holds what %s carries; word %u is 0x%016" PRIx64 " and not 0x%016" PRIx64,
               a->rank, a->r->p->buffers[o->to].name, a->r->p->labels[o->label], i, got, l->sample[i]);
        return;
    }
}

static void do_store(actor *a, const litmus_op *o) {
    runner *r = a->r;
    const uint32_t offset = offset_of(r, o->to, o->at), id = ++r->stamps;
    for (uint32_t i = 0; i < o->bytes / 8; i++) a->heap[offset / 8 + i] = uccl_ep_model_stamp(id, i);
    record(r,
           (uccl_ep_model_event){
               .kind = UCCL_EP_MODEL_STORE, .rank = a->rank, .local = offset, .bytes = o->bytes, .value = id},
           NULL);
}

/* All ranks come, then all leave. */
static bool do_barrier(actor *a) {
    runner *r = a->r;
    if (!a->barrier_began) {
        a->barrier_began = ++r->now;
        a->barriers++;
    }
    for (uint32_t q = 0; q < r->p->ranks; q++)
        if (r->actors[q].barriers < a->barriers && !r->actors[q].gave_up) return false;
    record(r,
           (uccl_ep_model_event){
               .kind = UCCL_EP_MODEL_BARRIER, .rank = a->rank, .begin = a->barrier_began, .value = a->barriers},
           NULL);
    a->barrier_began = 0;
    return true;
}

static bool do_op(actor *a, const litmus_op *o) {
    runner *r = a->r;
    uint64_t value;
    switch (o->kind) {
    case OP_PUT:
    case OP_SIGNAL:
    case OP_PUT_SIGNAL:
    case OP_FLUSH:
        return do_post(a, o);
    case OP_STORE:
        do_store(a, o);
        return true;
    case OP_READ:
        record_read(a, offset_of(r, o->to, o->at), o->bytes);
        return true;
    case OP_SEE:
        if (uccl_ep_read_signal(a->comm, o->slot, &value) == UCCL_EP_OK) record_signal(a, o->slot, value);
        return true;
    case OP_WAIT:
        return do_wait_signal(a, o);
    case OP_QUIET:
    case OP_SOURCE:
        return do_wait(a, o->channel, UCCL_EP_MODEL_NO_TICKET, o->kind == OP_SOURCE);
    case OP_COMPLETE:
    case OP_FREE: {
        const label_state *l = &r->labels[o->label];
        return !l->posted || do_wait(a, l->channel, l->ticket, o->kind == OP_FREE);
    }
    case OP_BARRIER:
        return do_barrier(a);
    case OP_UNTIL:
        return do_until(a, o);
    default:
        do_claim(a, o);
        return true;
    }
}

/* What the model is told of meets in the history: a wait that
 * succeeded says something of all that is seen behind it, by whomever, so waits and sights are kept in their order;
 * sights among themselves are not. Posts and stores of a program that keeps its duties are behind what they follow by
 * their own rank's order or by what it saw. */
enum told { TOLD_NOTHING = 0, TOLD_SIGHT, TOLD_WAIT };

static enum told tells(const litmus_op *o) {
    if (!o) return TOLD_WAIT; /* the last quiet */
    switch (o->kind) {
    case OP_READ:
    case OP_SEE:
    case OP_WAIT:
        return TOLD_SIGHT;
    case OP_PUT:
    case OP_SIGNAL:
    case OP_PUT_SIGNAL:
    case OP_FLUSH:
    case OP_STORE:
        return TOLD_NOTHING;
    default:
        return TOLD_WAIT;
    }
}

#define RANK(i) (1u << (i))
#define NIC(i) (1u << (MAX_RANKS + (i)))
#define EVERYTHING ((1u << (2 * MAX_RANKS)) - 1) /* but bytes and history */
#define HISTORY (3u << (2 * MAX_RANKS))
#define SIGHTS (2 * MAX_RANKS + 1)
#define BYTES_AT(i) (2 * MAX_RANKS + 2 + (i))

/* A step named `label` touched these of the world's parts. */
static void touch(runner *r, uint64_t label, uint32_t parts) {
    uint64_t h = label;
    for (uint32_t i = 0; i < RUN_PARTS; i++)
        if (parts >> i & 1) h = mix(h ^ i, r->state[i]);
    for (uint32_t i = 0; i < RUN_PARTS; i++)
        if (parts >> i & 1) r->state[i] = h ^ i;
}

/* Sights are summed up, in whatever order, until a wait takes the sum into the history. */
static void sight(runner *r, uint64_t label, uint32_t rank, bool of_bytes) {
    uint64_t h = mix(mix(label, r->state[rank]), r->state[2 * MAX_RANKS]);
    if (of_bytes) h = mix(h, r->state[BYTES_AT(rank)]);
    r->state[rank] = h;
    r->state[SIGHTS] += mix(h, 0x5167);
}

/* So are pieces of payload, until the rank looks, or its NIC is flushed. */
static void bytes_seen(runner *r, uint32_t rank) {
    r->state[rank] = mix(r->state[rank], r->state[BYTES_AT(rank)]);
}

uint32_t run_state(const runner *r, const uint64_t **hashes) {
    *hashes = r->state;
    return RUN_PARTS;
}

/* One step of a rank: one operation, then quiet, then all meet. */
static uint32_t rank_step(actor *a) {
    runner *r = a->r;
    if (r->ended) return 0;
    switch (a->state) {
    case ACTOR_RUNS:
        if (a->gave_up || a->at == r->p->n[a->rank]) {
            a->state = ACTOR_QUIETS;
            return 1;
        }
        if (!do_op(a, &r->p->ops[a->rank][a->at])) return 0;
        a->at++;
        return 1;
    case ACTOR_QUIETS:
        if (!do_wait(a, UINT8_MAX, UCCL_EP_MODEL_NO_TICKET, false)) return 0;
        a->state = ACTOR_MEETS;
        return 1;
    case ACTOR_MEETS:
        for (uint32_t q = 0; q < r->p->ranks; q++)
            if (r->actors[q].state < ACTOR_MEETS) return 0;
        a->state = ACTOR_DONE;
        return 1;
    default:
        return 0;
    }
}

static uint32_t actor_step(void *context) {
    actor *a = context;
    runner *r = a->r;
    const uint64_t before = r->now;
    const litmus_op *o = a->state == ACTOR_RUNS && a->at < r->p->n[a->rank] ? &r->p->ops[a->rank][a->at] : NULL;
    const bool meets = a->state == ACTOR_MEETS || (o && o->kind >= OP_BARRIER);
    const uint32_t worked = rank_step(a);
    r->ran = true;
    if (!worked && r->now == before) return 0;
    r->progress++;
    if (meets) /* it looked at others' progress */
        touch(r, 0xa11 + a->rank, EVERYTHING | HISTORY);
    else if (r->now == before)
        touch(r, 0xac7 + a->rank, RANK(a->rank));
    else if (tells(o) == TOLD_SIGHT)
        sight(r, 0xac7 + a->rank, a->rank, o->kind == OP_READ);
    else
        touch(r, 0xac7 + a->rank,
              RANK(a->rank) | (tells(o) == TOLD_WAIT || r->p->wrong[0] || r->o->faults ? HISTORY : 0));
    return worked;
}

/* ------------------------------------------------------------------------------------------------------ up and down */

static uccl_ep_status pass(void *context, uint32_t proxy, uint32_t *worked) {
    actor *a = context;
    uint32_t any = 0;
    const uccl_ep_status status = uccl_ep_progress_proxy(a->comm, proxy, &any);
    a->r->ran = true;
    if (any) {
        a->r->progress++;
        if (a->r->watch) {
            uccl_ep_sim_stats stats;
            a->r->sim->stats(a->r->world, &stats);
            if (stats.flushes != a->r->flushes_seen) bytes_seen(a->r, a->rank);
            a->r->flushes_seen = stats.flushes;
        }
        touch(a->r, 0xb00 + proxy, RANK(a->rank) | NIC(a->rank));
    }
    *worked = any;
    return status;
}

/* What the world did in this step, if it was no rank's turn: an event of a NIC, or time. */
static void touch_world(runner *r) {
    if (r->ran) return;
    uccl_ep_sim_event event = {0};
    r->sim->last_event(r->world, &event);
    if (event.count == r->events_seen) {
        touch(r, 0x71e, EVERYTHING);
    } else if (event.rank >= r->p->ranks || event.peer >= r->p->ranks) {
        touch(r, mix(0xe7e, event.label), EVERYTHING);
    } else if (r->p->wrong[0] || r->o->faults) {
        /* Sources and targets that change under the NIC, errors: whatever it does may meet anything of both ranks. */
        touch(r, mix(0xe7e, event.label), NIC(event.rank) | RANK(event.rank) | RANK(event.peer));
    } else if (event.at & UCCL_EP_SIM_AT_BYTES) {
        r->state[BYTES_AT(event.peer)] += mix(0xe7e, event.label);
    } else {
        if (event.at & UCCL_EP_SIM_AT_INITIATOR && event.at & UCCL_EP_SIM_AT_TARGET) bytes_seen(r, event.peer);
        touch(r, mix(0xe7e, event.label),
              (event.at & UCCL_EP_SIM_AT_INITIATOR ? RANK(event.rank) : 0) |
                  (event.at & UCCL_EP_SIM_AT_TARGET ? RANK(event.peer) : 0));
    }
    r->events_seen = event.count;
}

static void idle(void *context) {
    runner *r = context;
    if (coop_inside(r->coop))
        coop_pass(r->coop);
    else
        r->sim->step(r->world);
}

static void between(void *context) {
    runner *r = context;
    r->sim->step(r->world);
}

static void create(void *context, uint32_t rank) {
    runner *r = context;
    const program *p = r->p;
    actor *a = &r->actors[rank];
    char options[64];
    snprintf(options, sizeof options, "world=%u,rank=%u", r->number, rank);
    const uccl_ep_config config = {.size = sizeof config,
                                   .backend = r->backend,
                                   .backend_options = options,
                                   .heap_bytes = r->heap_bytes,
                                   .heap = a->heap,
                                   .signals = MAX_SLOTS,
                                   .channels = p->channels,
                                   .proxies = p->proxies,
                                   .ring_log2 = p->ring_log2,
                                   .granularity = p->granularity,
                                   .strategy = r->o->strategy,
                                   .progress = UCCL_EP_PROGRESS_CALLER,
                                   .max_message_bytes = p->message,
                                   .first_ticket = p->first_ticket,
                                   .first_sequence = p->first_sequence,
                                   .clock = r->sim->now,
                                   .clock_context = r->world,
                                   .idle = idle,
                                   .idle_context = r};
    const uccl_ep_bootstrap bootstrap = coop_bootstrap(r->coop, rank, p->ranks);
    a->created = uccl_ep_comm_create(&config, &bootstrap, &a->comm);
    if (a->created != UCCL_EP_OK) snprintf(a->why, sizeof a->why, "%s", uccl_ep_last_error()->text);
}

static void reset(void *context, uint32_t rank) {
    runner *r = context;
    actor *a = &r->actors[rank];
    const uccl_ep_bootstrap bootstrap = coop_bootstrap(r->coop, rank, r->p->ranks);
    const uint64_t begin = ++r->now;
    a->created = uccl_ep_reset(a->comm, &bootstrap);
    if (a->created != UCCL_EP_OK) snprintf(a->why, sizeof a->why, "%s", uccl_ep_last_error()->text);
    record(r,
           (uccl_ep_model_event){
               .kind = UCCL_EP_MODEL_RESET, .rank = rank, .begin = begin, .value = 1, .status = a->created},
           NULL);
}

static void destroy_all(runner *r) {
    for (uint32_t i = 0; i < r->p->ranks; i++) {
        actor *a = &r->actors[i];
        if (!a->comm) continue;
        r->sim->actor_remove(r->world, a);
        for (uint32_t k = 0; k < r->p->proxies; k++) r->sim->proxy_remove(r->world, a, k);
    }
    for (uint32_t i = 0; i < r->p->ranks; i++) uccl_ep_comm_destroy(r->actors[i].comm);
}

/* ----------------------------------------------------------------------------------------------------------- judging
 */

/* What is there in the end: every word that any program writes, every other word that is not what it was, all signals.
 */
static void look_at_everything(runner *r) {
    const program *p = r->p;
    for (uint32_t q = 0; q < p->ranks; q++) {
        actor *a = &r->actors[q];
        const uint32_t used = program_heap(p);
        for (uint32_t i = 0; i < p->n_buffers; i++)
            if (p->buffers[i].bytes) record_read(a, p->buffers[i].offset, (p->buffers[i].bytes + 7) / 8 * 8);
        for (uint32_t i = 0; i < p->n_buffers; i++) { /* the gap behind it */
            const uint32_t from = p->buffers[i].offset + (p->buffers[i].bytes + 7) / 8 * 8,
                           to = i + 1 < p->n_buffers ? p->buffers[i + 1].offset : used;
            for (uint32_t k = from; k < to; k += 8)
                if (a->heap[k / 8]) record_read(a, k, 8);
        }
        for (uint32_t k = used; k < r->heap_bytes + GUARD; k += 8)
            if (a->heap[k / 8]) record_read(a, k, 8);
        /* Before the heap: offsets behind the guard that follows it, for the model. */
        const uint64_t *before = a->heap - GUARD / 8;
        for (uint32_t k = 0; k < GUARD; k += 8)
            if (before[k / 8])
                record(r,
                       (uccl_ep_model_event){
                           .kind = UCCL_EP_MODEL_READ, .rank = q, .local = r->heap_bytes + GUARD + k, .bytes = 8},
                       &before[k / 8]);
        for (uint32_t s = 0; s < MAX_SLOTS; s++) {
            uint64_t value;
            if (uccl_ep_read_signal(a->comm, s, &value) == UCCL_EP_OK && (value || r->signalled[q][s]))
                record_signal(a, s, value);
        }
    }
}

static void hash_memory(runner *r) {
    uint64_t h = 0;
    for (uint32_t q = 0; q < r->p->ranks; q++) {
        const uint64_t *arena = r->actors[q].heap - GUARD / 8;
        for (uint32_t i = 0; i < (r->heap_bytes + 2 * GUARD) / 8; i++)
            if (arena[i]) h = mix(h ^ i, arena[i]);
        for (uint32_t s = 0; s < MAX_SLOTS; s++) {
            uint64_t value = 0;
            uccl_ep_read_signal(r->actors[q].comm, s, &value);
            h = mix(h, value);
        }
    }
    r->result->memory_hash = h;
}

static void judge(runner *r) {
    if (uccl_ep_model_judge(r->model, &r->verdict) < 0) {
        finish(r, RUN_BROKEN, "", "%s", uccl_ep_model_error(r->model));
        return;
    }
    const uccl_ep_model_verdict *v = &r->verdict;
    r->result->program_breach = v->outcome == UCCL_EP_MODEL_PROGRAM;
    if (v->outcome == UCCL_EP_MODEL_FORBIDDEN) {
        r->ended = false; /* it beats a claim that failed, whose cause it is */
        finish(r, RUN_FORBIDDEN, v->clause, "%s", v->text);
    } else if (v->outcome == UCCL_EP_MODEL_INVALID) {
        finish(r, RUN_BROKEN, "", "%s", v->text);
    } else if (v->outcome == UCCL_EP_MODEL_PROGRAM && !r->p->wrong[0] && !r->o->faults) {
        finish(r, RUN_BROKEN, v->clause, "%s", v->text);
    }
}

/* After a failure others may wait for what never comes: with faults that is no finding, once some rank has the record
 * of it. */
static bool stuck_is_allowed(runner *r) {
    if (!r->o->faults) return false;
    for (uint32_t q = 0; q < r->p->ranks; q++) record_failures(&r->actors[q]);
    return r->result->failures != 0;
}

static void report_stuck(runner *r) {
    char waits[200] = "";
    for (uint32_t q = 0; q < r->p->ranks; q++) {
        const actor *a = &r->actors[q];
        if (a->state >= ACTOR_MEETS) continue;
        const size_t used = strlen(waits);
        if (a->state == ACTOR_QUIETS)
            snprintf(waits + used, sizeof waits - used, " rank %u in its last quiet;", q);
        else
            snprintf(waits + used, sizeof waits - used, " rank %u at operation %u;", q, a->at + 1);
    }
    char report[256] = "";
    for (uint32_t q = 0; q < r->p->ranks && !report[0]; q++)
        if (r->actors[q].state < ACTOR_MEETS) uccl_ep_report(r->actors[q].comm, report, sizeof report);
    for (char *c = report; *c; c++)
        if (*c == '\n') *c = ' ';
    finish(r, RUN_STUCK, "PRG-1", "nothing moves any more:%s %s", waits, report);
}

static void keep_choices(runner *r) {
    uint32_t n = 0;
    const uccl_ep_sim_choice *all = r->sim->choices(r->world, &n);
    if (n > r->room_choices) {
        free(r->choices);
        r->choices = malloc(n * sizeof *r->choices);
        r->room_choices = r->choices ? n : 0;
    }
    r->n_choices = n <= r->room_choices ? n : 0;
    if (r->n_choices) memcpy(r->choices, all, n * sizeof *all);
    r->result->n_choices = r->n_choices;
}

static bool all_done(const runner *r) {
    for (uint32_t q = 0; q < r->p->ranks; q++)
        if (r->actors[q].state != ACTOR_DONE) return false;
    return true;
}

/* Until all ranks are done, or nothing moves. Time jumps where there is nothing else to do, and then all look again: a
 * few jumps, past the proxies' housekeeping, are needed to know that nobody finds anything any more. */
#define IDLE_JUMPS 12u

static void run_world(runner *r) {
    const uint64_t most = r->o->max_steps ? r->o->max_steps : 1000000;
    uint64_t steps = 0, idle_jumps = 0;
    r->progress = 0;
    while (!r->ended && !all_done(r)) {
        const uint64_t before = r->progress;
        r->ran = false;
        if (!r->sim->step(r->world) && ++idle_jumps > IDLE_JUMPS) {
            if (stuck_is_allowed(r)) break;
            report_stuck(r);
            return;
        }
        if (r->progress != before) idle_jumps = 0;
        if (r->watch) touch_world(r);
        if (r->watch && !r->watch(r->watch_context, r)) {
            r->ended = true;
            r->result->outcome = RUN_ALLOWED;
            r->sim->choices(r->world, &r->result->end_choices);
            return;
        }
        if (++steps > most) finish(r, RUN_ENDLESS, "PRG-1", "not done after %" PRIu64 " steps", steps);
    }
    r->sim->choices(r->world, &r->result->end_choices);
    /* What is still on its way arrives: a NIC may do until then what it likes, and nothing of it may change what is
     * complete. */
    for (steps = 0; !r->ended && steps < most / 10 && r->sim->step(r->world); steps++) {
    }
}

/* A failure closed something: a collective reset, and the program once more from its start (ERR-6). */
static void run_again(runner *r) {
    const uint32_t failures = r->result->failures;
    for (uint32_t q = 0; q < r->p->ranks; q++) r->actors[q].state = ACTOR_DONE;
    coop_run(r->coop, r->p->ranks, reset, between, r);
    for (uint32_t q = 0; q < r->p->ranks; q++) {
        actor *a = &r->actors[q];
        if (a->created != UCCL_EP_OK) {
            finish(r, RUN_ERROR, "ERR-6", "rank %u, reset: %s: %s", q, uccl_ep_status_name(a->created), a->why);
            return;
        }
        /* Numbers of barriers are not given out twice. */
        *a = (actor){.r = r, .rank = q, .comm = a->comm, .heap = a->heap, .barriers = 1000};
    }
    memset(r->labels, 0, r->p->n_labels * sizeof *r->labels);
    r->result->resets++;
    run_world(r);
    /* What failed is behind it; a second failure is one too many for one fault. */
    if (!r->ended && r->result->failures != failures)
        finish(r, RUN_ERROR, "ERR-6", "a command failed after the reset, and there was one fault");
}

void run_program(runner *r, const program *p, const run_options *o, run_result *result) {
    memset(result, 0, sizeof *result);
    r->p = p;
    r->o = o;
    r->result = result;
    r->now = r->history_hash = r->stamps = 0;
    r->ended = false;
    r->n_choices = 0;
    r->history[0] = r->trace[0] = 0;
    memset(&r->verdict, 0, sizeof r->verdict);
    memset(r->labels, 0, p->n_labels * sizeof *r->labels);
    memset(r->signalled, 0, sizeof r->signalled);
    r->heap_bytes = (program_heap(p) + 4095) / 4096 * 4096;
    if (!r->heap_bytes) r->heap_bytes = 4096;
    uccl_ep_model_free(r->model);
    r->model = uccl_ep_model_new(p->ranks, r->heap_bytes, MAX_SLOTS);
    char text[256] = "";
    const uccl_ep_sim_config config = {.size = sizeof config,
                                       .ranks = p->ranks,
                                       .profile = o->profile,
                                       .knobs = o->knobs,
                                       .faults = o->faults,
                                       .seed = o->seed,
                                       .choices = o->choices,
                                       .n_choices = o->n_choices,
                                       .first_later = o->first_later,
                                       .trace_lines = o->trace_lines};
    r->world = r->model ? r->sim->world_open(&config, text) : NULL;
    if (!r->world) {
        finish(r, RUN_REFUSED, "", "%s", text[0] ? text : "no memory");
        return;
    }
    r->number = r->sim->world_number(r->world);
    for (uint32_t q = 0; q < p->ranks; q++) {
        char *arena = r->arenas + (size_t)q * ARENA_BYTES;
        memset(arena, 0, r->heap_bytes + 2 * GUARD);
        r->actors[q] = (actor){.r = r, .rank = q, .heap = (uint64_t *)(void *)(arena + GUARD)};
    }
    coop_run(r->coop, p->ranks, create, between, r);
    for (uint32_t q = 0; q < p->ranks; q++)
        if (r->actors[q].created != UCCL_EP_OK)
            finish(r, RUN_REFUSED, "", "rank %u: %s: %s", q, uccl_ep_status_name(r->actors[q].created),
                   r->actors[q].why);
    if (!r->ended) {
        uccl_ep_comm_info info = {.size_of_struct = sizeof info};
        uccl_ep_comm_query(r->actors[0].comm, &info);
        result->strategy = info.strategy;
        for (uint32_t q = 0; q < p->ranks; q++) {
            r->sim->actor_add(r->world, q, actor_step, &r->actors[q]);
            for (uint32_t k = 0; k < p->proxies; k++) r->sim->proxy_add(r->world, q, pass, &r->actors[q], k);
        }
        r->sim->choices(r->world, &result->start_choices);
        memset(r->state, 0, sizeof r->state);
        r->flushes_seen = 0;
        run_world(r);
        if (!r->ended && result->failures) run_again(r);
        const bool claim = r->ended && result->outcome == RUN_CLAIM;
        if (!r->ended || claim || result->outcome == RUN_STUCK || result->outcome == RUN_ERROR) {
            if (!claim) look_at_everything(r);
            judge(r);
        }
        hash_memory(r);
    }
    uccl_ep_sim_stats stats;
    r->sim->stats(r->world, &stats);
    result->steps = stats.steps;
    result->events = stats.events;
    result->operations = stats.operations;
    result->now_ns = stats.now_ns;
    result->hash = mix(mix(stats.hash, r->history_hash), result->memory_hash);
    keep_choices(r);
    if (o->trace_lines) r->sim->trace(r->world, r->trace, sizeof r->trace);
    destroy_all(r);
    r->sim->world_close(r->world);
    r->world = NULL;
}

/* ------------------------------------------------------------------------------------------------------------ runner
 */

const char *run_history(runner *r) {
    uint32_t used = 0;
    r->history[0] = 0;
    for (uint32_t i = 0; r->model && i < uccl_ep_model_count(r->model) && used + 320 < sizeof r->history; i++) {
        char line[256];
        bool marked = false;
        for (uint32_t k = 0; k < r->verdict.n_events; k++) marked |= r->verdict.events[k] == i;
        uccl_ep_model_describe(r->model, i, line, sizeof line);
        used += (uint32_t)snprintf(r->history + used, sizeof r->history - used, "%s %s\n", marked ? "*" : " ", line);
    }
    return r->history;
}

const char *run_trace(runner *r) {
    return r->trace;
}

const uccl_ep_sim_choice *run_choices(const runner *r, uint32_t *n) {
    *n = r->n_choices;
    return r->choices;
}

const uccl_ep_sim_choice *run_choices_now(const runner *r, uint32_t *n) {
    return r->sim->choices(r->world, n);
}

const uccl_ep_sim *runner_sim(const runner *r) {
    return r->sim;
}

void runner_watch(runner *r, run_watch watch, void *context) {
    r->watch = watch;
    r->watch_context = context;
}

runner *runner_new(const char *backend, char *text) {
    runner *r = calloc(1, sizeof *r);
    if (!r) return NULL;
    snprintf(r->backend, sizeof r->backend, "%s", backend);
    r->library = dlopen(backend, RTLD_NOW | RTLD_LOCAL);
    if (!r->library) {
        snprintf(text, 256, "%s", dlerror());
        runner_free(r);
        return NULL;
    }
    const uccl_ep_sim *(*entry)(void) = NULL;
    void *symbol = dlsym(r->library, UCCL_EP_SIM_ENTRY);
    memcpy(&entry, &symbol, sizeof entry);
    r->sim = entry ? entry() : NULL;
    if (!r->sim || r->sim->version != UCCL_EP_SIM_VERSION || r->sim->size < sizeof *r->sim) {
        snprintf(text, 256, "%s is not the simulator of this version", backend);
        runner_free(r);
        return NULL;
    }
    r->coop = coop_new(MAX_RANKS, 512u << 10);
    if (posix_memalign((void **)&r->arenas, 4096, (size_t)MAX_RANKS * ARENA_BYTES)) r->arenas = NULL;
    if (!r->coop || !r->arenas) {
        snprintf(text, 256, "no memory");
        runner_free(r);
        return NULL;
    }
    return r;
}

void runner_free(runner *r) {
    if (!r) return;
    uccl_ep_model_free(r->model);
    coop_free(r->coop);
    free(r->arenas);
    free(r->choices);
    if (r->library) dlclose(r->library);
    free(r);
}
