/* SPDX-License-Identifier: Apache-2.0
 *
 * control.c: the table of sim.h.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "world.h"

_Static_assert((int)UCCL_EP_SIM_CHOICE_RUN == (int)VNIC_CHOICE_RUN &&
                   (int)UCCL_EP_SIM_CHOICE_EVENT == (int)VNIC_CHOICE_EVENT &&
                   (int)UCCL_EP_SIM_CHOICE_FAULT == (int)VNIC_CHOICE_FAULT &&
                   (int)UCCL_EP_SIM_CHOICE_NIC == (int)VNIC_CHOICE_NIC &&
                   sizeof(uccl_ep_sim_choice) == sizeof(vnic_choice) &&
                   offsetof(uccl_ep_sim_choice, rank) == offsetof(vnic_choice, rank),
               "choices are handed out as the engine keeps them");
_Static_assert(sizeof(uccl_ep_sim_met) == sizeof(vnic_met) && UCCL_EP_SIM_NAME_TWICE == VNIC_NAME_TWICE &&
                   offsetof(uccl_ep_sim_met, anything) == offsetof(vnic_met, anything),
               "and so is what was met");

static const char *control_profile(uint32_t index, const char **text) {
    const vnic_profile *p = vnic_profile_at(index);
    if (p && text) *text = p->text;
    return p ? p->name : NULL;
}

static uint32_t control_knobs(const char *name, char *text, uint32_t bytes) {
    const vnic_profile *p = vnic_profile_named(name);
    if (bytes) text[0] = 0;
    return p ? vnic_knobs_text(&p->knobs, text, bytes) : 0;
}

static uint32_t control_fault(uint32_t index, const char **name, const char **keys, const char **text) {
    const char *a_text, *a_keys, *a_name = vnic_fault_name(index, &a_text, &a_keys);
    if (!a_name) return 0;
    if (name) *name = a_name;
    if (keys) *keys = a_keys;
    if (text) *text = a_text;
    return 1;
}

static uccl_ep_sim_world *control_world_open(const uccl_ep_sim_config *config, char *text) {
    char unread[256];
    if (!text) text = unread;
    text[0] = 0;
    if (!config || config->size < offsetof(uccl_ep_sim_config, seed)) {
        snprintf(text, 256, "config is required, with size = sizeof(uccl_ep_sim_config)");
        return NULL;
    }
    return world_open(config, text);
}

static void control_world_close(uccl_ep_sim_world *w) {
    if (w) world_close(w);
}

static uint32_t control_number(const uccl_ep_sim_world *w) {
    return w->number;
}

static uint64_t control_now(void *context) {
    return vnic_now(((const world *)context)->fabric);
}

static void control_enter(uccl_ep_sim_world *w, uint32_t rank) {
    if (rank >= w->ranks) {
        fprintf(stderr, "sim: rank %u enters a world of %u\n", rank, w->ranks);
        abort();
    }
    fiber_enter(w, rank);
}

static void control_proxy_add(uccl_ep_sim_world *w, uint32_t rank,
                              uccl_ep_status (*pass)(void *context, uint32_t proxy, uint32_t *worked), void *context,
                              uint32_t proxy) {
    struct runner *r = rank < w->ranks ? runner_add(w, rank, RUNNER_PROXY) : NULL;
    if (!r) {
        fprintf(stderr, "sim: a proxy of rank %u cannot be added to a world of %u\n", rank, w->ranks);
        abort();
    }
    r->pass = pass;
    r->context = context;
    r->proxy = proxy;
}

static void remove_runner(world *w, enum runner_kind kind, const void *context, uint32_t proxy) {
    for (uint32_t i = 0; i < w->ranks; i++) {
        for (struct runner *r = w->rank[i].runners; r; r = r->next_of_rank) {
            if (r->kind != kind || r->context != context || r->proxy != proxy) continue;
            runner_remove(w, r);
            return;
        }
    }
}

static void control_proxy_remove(uccl_ep_sim_world *w, void *context, uint32_t proxy) {
    remove_runner(w, RUNNER_PROXY, context, proxy);
}

static void control_actor_add(uccl_ep_sim_world *w, uint32_t rank, uint32_t (*step)(void *context), void *context) {
    struct runner *r = rank < w->ranks ? runner_add(w, rank, RUNNER_ACTOR) : NULL;
    if (!r) {
        fprintf(stderr, "sim: an actor of rank %u cannot be added to a world of %u\n", rank, w->ranks);
        abort();
    }
    r->step = step;
    r->context = context;
}

static void control_actor_remove(uccl_ep_sim_world *w, void *context) {
    remove_runner(w, RUNNER_ACTOR, context, 0);
}

static uint32_t control_step(uccl_ep_sim_world *w) {
    bool idle = false;
    schedule(w, true, &idle);
    return !idle;
}

static int control_inject(uccl_ep_sim_world *w, const char *fault, char *text) {
    char unread[256];
    if (!text) text = unread;
    text[0] = 0;
    if (!fault) {
        snprintf(text, 256, "no fault is given");
        return -1;
    }
    return vnic_fault_add(w->fabric, fault, text);
}

static void control_kill(uccl_ep_sim_world *w, uint32_t rank) {
    if (rank < w->ranks) rank_dies(w, rank);
}

static void control_pause(uccl_ep_sim_world *w, uint32_t rank, uint64_t ns) {
    if (rank < w->ranks) rank_pauses(w, rank, ns);
}

static void control_resume(uccl_ep_sim_world *w, uint32_t rank) {
    if (rank >= w->ranks) return;
    rank_resumes(w, rank);
    fibers_go_on(w);
}

static int control_alive(const uccl_ep_sim_world *w, uint32_t rank) {
    return rank < w->ranks && !w->rank[rank].dead;
}

static void control_stats(const uccl_ep_sim_world *w, uccl_ep_sim_stats *stats) {
    const vnic_stats *s = vnic_fabric_stats(w->fabric);
    *stats = (uccl_ep_sim_stats){.now_ns = vnic_now(w->fabric),
                                 .steps = w->steps,
                                 .events = s->events,
                                 .operations = s->operations,
                                 .completions = s->completions,
                                 .duplicates = s->duplicates,
                                 .immediates = s->immediates,
                                 .flushes = s->flushes,
                                 .backpressure = s->backpressure,
                                 .rnr = s->rnr,
                                 .faults = s->faults,
                                 .errors = s->errors,
                                 .inflight_bytes_peak = s->inflight_bytes_peak,
                                 .hash = vnic_hash(w->fabric)};
}

static const uccl_ep_sim_choice *control_choices(const uccl_ep_sim_world *w, uint32_t *n) {
    return (const uccl_ep_sim_choice *)(const void *)vnic_choices(w->fabric, n);
}

static uint32_t control_trace(const uccl_ep_sim_world *w, char *text, uint32_t bytes) {
    return vnic_trace(w->fabric, text, bytes);
}

static void control_met(uccl_ep_sim_world *w, uccl_ep_sim_met *met) {
    vnic_met *since = vnic_met_since(w->fabric);
    memcpy(met, since, sizeof *met);
    memset(since, 0, sizeof *since);
}

static const uccl_ep_sim table = {
    .size = sizeof(uccl_ep_sim),
    .version = UCCL_EP_SIM_VERSION,
    .profile = control_profile,
    .knobs = control_knobs,
    .world_open = control_world_open,
    .world_close = control_world_close,
    .world_number = control_number,
    .now = control_now,
    .yield = fiber_yield,
    .enter = control_enter,
    .leave = fiber_leave,
    .proxy_add = control_proxy_add,
    .proxy_remove = control_proxy_remove,
    .actor_add = control_actor_add,
    .actor_remove = control_actor_remove,
    .step = control_step,
    .inject = control_inject,
    .kill = control_kill,
    .pause = control_pause,
    .resume = control_resume,
    .alive = control_alive,
    .stats = control_stats,
    .choices = control_choices,
    .trace = control_trace,
    .fibers = fiber_count,
    .fault = control_fault,
    .met = control_met,
};

__attribute__((visibility("default"))) const uccl_ep_sim *uccl_ep_sim_entry(void) {
    return &table;
}
