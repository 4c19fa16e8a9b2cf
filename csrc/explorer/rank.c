/* SPDX-License-Identifier: Apache-2.0
 *
 * rank.c: what a rank of a litmus program does in its turn, and what becomes of it in the history.
 *
 * Every moment in which a rank does or sees something is an event with a number of its own as time; in between, only
 * the world moves. Ranks never block: what would wait asks again in a later step.
 */
#include "rank.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *run_outcome_name(uint32_t outcome) {
    static const char *const names[] = {"allowed", "forbidden", "stuck",   "error",
                                        "claim",   "refused",   "endless", "broken"};
    return outcome < sizeof names / sizeof *names ? names[outcome] : "?";
}

void finish(runner *r, run_outcome outcome, const char *clause, const char *format, ...) {
    if (r->ended) return; /* what came first is the cause */
    r->ended = true;
    r->result->outcome = outcome;
    snprintf(r->result->clause, sizeof r->result->clause, "%.7s", clause);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(r->result->text, sizeof r->result->text, format, arguments);
    va_end(arguments);
}

uint64_t mix(uint64_t h, uint64_t what) {
    h = (h ^ what) * 0x9fb21c651e98df25ull;
    return h ^ h >> 32;
}

/* ---------------------------------------------------------------------------------------------------------- history */

void record(runner *r, uccl_ep_model_event e, const uint64_t *words) {
    e.end = ++r->now;
    if (!e.begin) e.begin = e.end;
    r->history_hash =
        mix(mix(r->history_hash, e.kind << 8 | e.rank), mix(e.value, e.ticket ^ (uint64_t)e.status << 32));
    for (uint64_t i = 0; words && i < e.bytes / 8; i++) r->history_hash = mix(r->history_hash, words[i]);
    uint64_t *seen = &r->actors[e.rank].seen_hash;
    *seen = mix(mix(*seen, e.kind), mix(e.value, e.ticket ^ (uint64_t)e.status << 32));
    for (uint64_t i = 0; words && i < e.bytes / 8; i++) *seen = mix(*seen, words[i]);
    if (uccl_ep_model_add(r->model, &e, words))
        finish(r, RUN_BROKEN, "", "the model takes no such event: %s", uccl_ep_model_error(r->model));
}

static uint32_t offset_of(const runner *r, uint8_t which, uint32_t at) {
    return r->p->buffers[which].offset + at;
}

void record_read(actor *a, uint32_t offset, uint32_t bytes) {
    record(a->r, (uccl_ep_model_event){.kind = UCCL_EP_MODEL_READ, .rank = a->rank, .local = offset, .bytes = bytes},
           &a->heap[offset / 8]);
}

void record_signal(actor *a, uint32_t slot, uint64_t value) {
    a->seen[slot] = value;
    a->seen_any[slot] = true;
    record(a->r, (uccl_ep_model_event){.kind = UCCL_EP_MODEL_SIGNAL, .rank = a->rank, .slot = slot, .value = value},
           NULL);
}

/* Records that the library has made since the last look. */
void record_failures(actor *a) {
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
    if (r->o->faults && !r->o->gentle) return;
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

/* A wait for completion or, `source`, for sources: of one ticket, of a channel, or of all. It meets in the history only
 * if more is known behind it than before. */
static void meets_of_wait(const actor *a, const litmus_op *o, footprint *f) {
    const runner *r = a->r;
    const bool source = o && (o->kind == OP_SOURCE || o->kind == OP_FREE);
    if (o && (o->kind == OP_COMPLETE || o->kind == OP_FREE)) {
        f->adds = HISTORY;
        f->needs[f->n_needs++] = r->label_ends[o->label][source].since;
        return;
    }
    for (uint32_t c = 0; c < r->p->channels; c++) {
        if (o && o->channel != UINT8_MAX && o->channel != c) continue;
        if (a->posted[c]) f->needs[f->n_needs++] = r->channel_ends[a->rank][c][source].since;
        if (a->posted[c] != a->waited[source][c]) f->adds = HISTORY;
    }
}

/* What an operation meets. What the model is told meets in the history: a wait that succeeded says something of all
 * that is seen behind it, by whomever. Waits among themselves, and sights, commute. Posts and stores of a program that
 * keeps its duties are behind what they follow by their own rank's order or by what it saw. */
static footprint meets(const actor *a, const litmus_op *o) {
    const runner *r = a->r;
    const uint32_t self = a->rank;
    const uintptr_t at = o ? (uintptr_t)&a->heap[offset_of(r, o->to, o->at) / 8] : 0;
    footprint f = {.writes = ACTOR(self)};
    switch (o ? o->kind : OP_QUIET) {
    case OP_PUT:
    case OP_SIGNAL:
    case OP_PUT_SIGNAL:
    case OP_FLUSH:
        f.writes |= CORE(self);
        break;
    case OP_STORE:
        f.written_from = at;
        f.written_to = at + o->bytes;
        break;
    case OP_READ:
        f.read_from = at;
        f.read_to = at + o->bytes;
        f.reads = HISTORY;
        break;
    case OP_SEE:
    case OP_WAIT:
        f.reads = WORD(self, o->slot) | HISTORY;
        break;
    case OP_QUIET:
    case OP_SOURCE:
    case OP_COMPLETE:
    case OP_FREE:
        meets_of_wait(a, o, &f);
        break;
    case OP_BARRIER:
        f.writes |= ACTORS | HISTORY;
        break;
    default: /* what a label stands for is the other rank's to say */
        f.reads = ACTORS;
        f.writes |= HISTORY;
        f.read_from = at;
        f.read_to = at + r->labels[o->label].bytes;
    }
    if (r->p->wrong[0] || r->o->faults) f.writes |= HISTORY;
    if (a->gave_up) f.writes = EVERYTHING;
    return f;
}

/* Of this rank's posts and waits: how many, and what is known of them. */
static void keep_count(actor *a, const litmus_op *o) {
    const uint32_t kind = o ? o->kind : OP_QUIET;
    if (kind <= OP_FLUSH)
        a->posted[o->channel]++;
    else if (kind == OP_QUIET || kind == OP_SOURCE)
        for (uint32_t c = 0; c < a->r->p->channels; c++)
            if (!o || o->channel == UINT8_MAX || o->channel == c) {
                a->waited[1][c] = a->posted[c];
                if (kind == OP_QUIET) a->waited[0][c] = a->posted[c];
            }
}

/* One step of a rank: one operation, and in the end quiet. */
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
        a->state = ACTOR_DONE;
        return 1;
    default:
        return 0;
    }
}

uint32_t actor_step(void *context) {
    actor *a = context;
    runner *r = a->r;
    const uint64_t before = r->now;
    const uint32_t state = a->state;
    const litmus_op *o = state == ACTOR_RUNS && a->at < r->p->n[a->rank] ? &r->p->ops[a->rank][a->at] : NULL;
    const uint32_t worked = rank_step(a);
    r->ran = true;
    if (!worked && r->now == before) {
        r->met.idle = true;
        return 0;
    }
    r->progress++;
    if (o || state == ACTOR_QUIETS || a->gave_up)
        r->met = meets(a, o);
    else
        r->met = (footprint){.writes = ACTOR(a->rank)};
    if (worked && (o || state == ACTOR_QUIETS)) keep_count(a, o);
    return worked;
}
