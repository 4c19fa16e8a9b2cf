/* SPDX-License-Identifier: Apache-2.0
 *
 * run.c: one run: communicators come up, ranks have their turns (rank.c), the model judges what they saw.
 */
#include "run.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rank.h"

/* ------------------------------------------------------------------------------------------------------ up and down */

static uccl_ep_status pass(void *context, uint32_t proxy, uint32_t *worked) {
    actor *a = context;
    uint32_t any = 0;
    const uccl_ep_status status = uccl_ep_progress_proxy(a->comm, proxy, &any);
    a->r->ran = true;
    if (any) a->r->progress++;
    a->r->met = (footprint){.reads = CONTROL(a->rank), .writes = CORE(a->rank) | QUEUE(a->rank), .idle = !any};
    *worked = any;
    return status;
}

static uint64_t parts(uint64_t ranks, uint64_t of_rank_0) {
    return (ranks & ((1u << MAX_RANKS) - 1)) * of_rank_0;
}

static void ends_now(const runner *r, struct ends *e, uccl_ep_status status) {
    const bool now = status != UCCL_EP_IN_PROGRESS;
    if (now && !e->now) e->since = r->step;
    e->now = now;
}

/* What ranks would be told by their cores, if they asked: signals, and which waits would end. */
static void met_what_is_shown(runner *r) {
    for (uint32_t q = 0; q < r->p->ranks; q++) {
        uccl_ep_comm *comm = r->actors[q].comm;
        for (uint32_t s = 0; s < MAX_SLOTS; s++) {
            uint64_t value;
            if (!(r->slots[q] >> s & 1) || uccl_ep_read_signal(comm, s, &value) != UCCL_EP_OK) continue;
            if (value != r->word[q][s]) r->met.adds |= WORD(q, s);
            r->word[q][s] = value;
        }
        for (uint32_t c = 0; c < r->p->channels; c++) {
            ends_now(r, &r->channel_ends[q][c][0], uccl_ep_quiet(comm, c, 0));
            ends_now(r, &r->channel_ends[q][c][1], uccl_ep_quiet_source(comm, c, 0));
        }
    }
    for (uint32_t i = 0; i < r->p->n_labels; i++) {
        const label_state *l = &r->labels[i];
        if (!l->posted) continue;
        uccl_ep_comm *comm = r->actors[l->rank].comm;
        ends_now(r, &r->label_ends[i][0], uccl_ep_wait(comm, l->channel, l->ticket, 0));
        ends_now(r, &r->label_ends[i][1], uccl_ep_wait_source(comm, l->channel, l->ticket, 0));
    }
}

/* What the NICs did in this step, beside the turn that a rank or a proxy may have had. */
static void met_by_nics(runner *r) {
    footprint *f = &r->met;
    uccl_ep_sim_met met;
    uccl_ep_sim_stats stats;
    r->sim->met(r->world, &met);
    r->sim->stats(r->world, &stats);
    f->time = !r->ran && stats.events == r->events_seen;
    r->events_seen = stats.events;
    if (met.rung || met.anything) f->idle = false;
    if (f->time || met.anything) f->writes = EVERYTHING;
    f->adds |= parts(met.control, CONTROL(0)) | parts(met.buffer, BUFFER(0));
    f->writes |= parts(met.emptied, BUFFER(0)) | parts(met.order, ORDER(0)) | parts(met.queue, QUEUE(0));
    f->request = r->ran ? 0 : met.request;
    f->stored_from = met.stored_from;
    f->stored_to = met.stored_to;
    if (r->ran && met.read_to == met.read_from && met.written_to == met.written_from) return;
    /* A rank's own turn reads and stores itself, and moves nothing at the NIC; a proxy's may do the latter. */
    f->read_from = met.read_from;
    f->read_to = met.read_to;
    f->written_from = met.written_from;
    f->written_to = met.written_to;
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
                                   .device = r->o->profile,
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
                                   .max_inflight = p->inflight,
                                   .max_inflight_peer = p->inflight_peer,
                                   .max_inflight_bytes = p->inflight_bytes,
                                   .flags = p->single_writer ? UCCL_EP_CONFIG_SINGLE_WRITER : 0,
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
    } else if (v->outcome == UCCL_EP_MODEL_PROGRAM && !r->p->wrong[0] && (!r->o->faults || r->o->gentle)) {
        finish(r, RUN_BROKEN, v->clause, "%s", v->text);
    }
}

/* After a failure others may wait for what never comes: with faults that is no finding, once some rank has the record
 * of it. */
static bool stuck_is_allowed(runner *r) {
    if (!r->o->faults || r->o->gentle) return false;
    for (uint32_t q = 0; q < r->p->ranks; q++) record_failures(&r->actors[q]);
    return r->result->failures != 0;
}

static void report_stuck(runner *r) {
    char waits[200] = "";
    for (uint32_t q = 0; q < r->p->ranks; q++) {
        const actor *a = &r->actors[q];
        if (a->state >= ACTOR_DONE) continue;
        const size_t used = strlen(waits);
        if (a->state == ACTOR_QUIETS)
            snprintf(waits + used, sizeof waits - used, " rank %u in its last quiet;", q);
        else
            snprintf(waits + used, sizeof waits - used, " rank %u at operation %u;", q, a->at + 1);
    }
    char report[256] = "";
    for (uint32_t q = 0; q < r->p->ranks && !report[0]; q++)
        if (r->actors[q].state < ACTOR_DONE) uccl_ep_report(r->actors[q].comm, report, sizeof report);
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
#define IDLE_JUMPS_FAULTS 200u /* of a storm of faults any number may strike in a row */

/* Returns false if the guide ends the run. */
static bool look(runner *r, bool ended) {
    if (!r->guide) return true;
    r->met.number = ++r->step;
    met_by_nics(r);
    met_what_is_shown(r);
    return r->guide->watch(r->guide->context, &r->met, ended);
}

static void run_world(runner *r) {
    const uint64_t most = r->o->max_steps ? r->o->max_steps : 1000000;
    const uint64_t most_jumps = r->o->faults ? IDLE_JUMPS_FAULTS : IDLE_JUMPS;
    uint64_t steps = 0, idle_jumps = 0;
    r->progress = 0;
    while (!r->ended && !all_done(r)) {
        const uint64_t before = r->progress;
        r->ran = false;
        r->met = (footprint){0};
        if (!r->sim->step(r->world) && ++idle_jumps > most_jumps) {
            if (stuck_is_allowed(r)) break;
            report_stuck(r);
            return;
        }
        if (r->progress != before) idle_jumps = 0;
        if (!look(r, false)) {
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
    for (steps = 0; !r->ended && steps < most / 10; steps++) {
        r->ran = false;
        r->met = (footprint){0};
        if (!r->sim->step(r->world)) break;
        if (look(r, true)) continue;
        r->ended = true;
        r->result->outcome = RUN_ALLOWED;
    }
}

/* A collective call of all ranks. It fails on all of them or on none; and it may fail if a fault makes it. Returns
 * whether it was done. */
static bool together(runner *r, void (*call)(void *context, uint32_t rank), run_outcome outcome, const char *what) {
    const program *p = r->p;
    uint32_t failed = 0, first = 0;
    coop_run(r->coop, p->ranks, call, between, r);
    for (uint32_t q = p->ranks; q--;)
        if (r->actors[q].created != UCCL_EP_OK) failed++, first = q;
    if (!failed) return true;
    const actor *a = &r->actors[first];
    r->result->refused_by = a->created;
    if (failed != p->ranks)
        finish(r, RUN_ERROR, "ERR-1", "%s failed on %u of %u ranks: rank %u: %s: %s", what, failed, p->ranks, first,
               uccl_ep_status_name(a->created), a->why);
    else if (!r->o->calls_fail || a->created == UCCL_EP_E_CAPABILITY)
        finish(r, outcome, outcome == RUN_ERROR ? "ERR-6" : "", "rank %u, %s: %s: %s", first, what,
               uccl_ep_status_name(a->created), a->why);
    return false;
}

/* A failure closed something: a collective reset, and the program once more from its start (ERR-6). */
static void run_again(runner *r) {
    const uint32_t failures = r->result->failures;
    for (uint32_t q = 0; q < r->p->ranks; q++) r->actors[q].state = ACTOR_DONE;
    if (!together(r, reset, RUN_ERROR, "reset")) return; /* only closing is left */
    for (uint32_t q = 0; q < r->p->ranks; q++) {
        actor *a = &r->actors[q];
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

/* What was met while communicators came up is no step of the program's. */
static void start_guide(runner *r) {
    uccl_ep_sim_met met;
    uccl_ep_sim_stats stats;
    r->sim->met(r->world, &met);
    r->sim->stats(r->world, &stats);
    r->events_seen = stats.events;
    memset(r->slots, 0, sizeof r->slots);
    for (uint32_t q = 0; q < r->p->ranks; q++)
        for (uint32_t i = 0; i < r->p->n[q]; i++) {
            const litmus_op *o = &r->p->ops[q][i];
            if (o->kind == OP_SIGNAL || o->kind == OP_PUT_SIGNAL) r->slots[o->target] |= 1u << o->slot;
        }
    r->step = 0;
    memset(r->word, 0, sizeof r->word);
    memset(r->channel_ends, 0, sizeof r->channel_ends);
    memset(r->label_ends, 0, sizeof r->label_ends);
    if (r->guide) met_what_is_shown(r);
    r->began = true;
}

void run_program(runner *r, const program *p, const run_options *o, run_result *result) {
    memset(result, 0, sizeof *result);
    r->p = p;
    r->o = o;
    r->result = result;
    r->now = r->history_hash = r->stamps = 0;
    r->ended = false;
    r->n_choices = 0;
    r->began = false;
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
                                       .trace_lines = o->trace_lines,
                                       .choose = r->guide ? r->guide->choose : NULL,
                                       .choose_context = r->guide ? r->guide->context : NULL};
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
    bool up = together(r, create, RUN_REFUSED, "create");
    if (!up && !r->ended) { /* once: the next one does better, and finds nothing left of the first */
        result->retries++;
        run_options calm = *o;
        calm.calls_fail = false;
        r->o = &calm;
        up = together(r, create, RUN_REFUSED, "create, again");
        r->o = o;
    }
    if (up) {
        uccl_ep_comm_info info = {.size_of_struct = sizeof info};
        uccl_ep_comm_query(r->actors[0].comm, &info);
        result->strategy = info.strategy;
        for (uint32_t q = 0; q < p->ranks; q++) {
            r->sim->actor_add(r->world, q, actor_step, &r->actors[q]);
            for (uint32_t k = 0; k < p->proxies; k++) r->sim->proxy_add(r->world, q, pass, &r->actors[q], k);
        }
        r->sim->choices(r->world, &result->start_choices);
        start_guide(r);
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
    result->seen_hash = mix(result->memory_hash, result->outcome);
    for (uint32_t q = 0; q < p->ranks; q++) result->seen_hash = mix(result->seen_hash, r->actors[q].seen_hash);
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

bool run_began(const runner *r) {
    return r->began;
}

const uccl_ep_sim *runner_sim(const runner *r) {
    return r->sim;
}

void runner_guide(runner *r, const run_guide *guide) {
    r->guide = guide;
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
