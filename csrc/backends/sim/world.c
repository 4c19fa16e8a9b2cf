/* SPDX-License-Identifier: Apache-2.0
 *
 * world.c: worlds, and who runs next in one.
 *
 * A runner (fiber, proxy, actor) that found nothing to do waits until something happened that may concern it: bytes in
 * its rank's memory, a completion, work of its rank's others. So 4096 idle ranks cost nothing. Time passes in small
 * steps while there is work, and jumps to the next event when there is none. With neither, it jumps further and
 * further, and everybody looks again: that is how deadlines come.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "world.h"

#define FIRST_JUMP_NS 20000ull     /* longer than what a NIC's events are apart */
#define LONGEST_JUMP_NS 5000000ull /* deadlines of 10 s: some 2000 turns */
#define LOOK_AGAIN_NS 2000ull      /* fibers look at what no event tells them of */
#define HOUSEKEEPING_NS 1000000ull /* so do proxies */

/* --------------------------------------------------------------------------------------------------------- registry */

#define MAX_WORLDS 1024u
static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static world *registry[MAX_WORLDS];
static uint32_t worlds_opened;

world *world_find(uint32_t number) {
    world *found = NULL;
    pthread_mutex_lock(&registry_lock);
    for (uint32_t i = 0; i < MAX_WORLDS && !found; i++)
        if (registry[i] && registry[i]->number == number) found = registry[i];
    pthread_mutex_unlock(&registry_lock);
    return found;
}

static bool register_world(world *w) {
    bool done = false;
    pthread_mutex_lock(&registry_lock);
    for (uint32_t i = 0; i < MAX_WORLDS && !done; i++) {
        if (registry[i]) continue;
        registry[i] = w;
        w->number = ++worlds_opened;
        done = true;
    }
    pthread_mutex_unlock(&registry_lock);
    return done;
}

static void unregister_world(const world *w) {
    pthread_mutex_lock(&registry_lock);
    for (uint32_t i = 0; i < MAX_WORLDS; i++)
        if (registry[i] == w) registry[i] = NULL;
    pthread_mutex_unlock(&registry_lock);
}

/* --------------------------------------------------------------------------------------------------- who is ready */

void make_ready(world *w, struct runner *r) {
    if (r->ready || r->dead || w->rank[r->rank].paused) return;
    if (w->n_ready == w->room_ready) {
        const uint32_t room = w->room_ready ? 2 * w->room_ready : 64;
        struct runner **grown = realloc(w->ready, room * sizeof(*grown));
        if (!grown) {
            fputs("sim: out of memory for the list of who runs next\n", stderr);
            abort();
        }
        w->ready = grown;
        w->room_ready = room;
    }
    w->ready[w->n_ready++] = r;
    r->ready = w->n_ready;
}

void not_ready(world *w, struct runner *r) {
    if (!r->ready) return;
    const uint32_t i = r->ready - 1;
    r->ready = 0;
    w->n_ready--;
    if (w->knobs.schedule == VNIC_SCHEDULE_CHOICE) {
        /* Round robin: the order of the others stays. */
        for (uint32_t k = i; k < w->n_ready; k++) {
            w->ready[k] = w->ready[k + 1];
            w->ready[k]->ready = k + 1;
        }
    } else if (i < w->n_ready) {
        w->ready[i] = w->ready[w->n_ready];
        w->ready[i]->ready = i + 1;
    }
}

void wake_rank(world *w, uint32_t rank) {
    for (struct runner *r = w->rank[rank].runners; r; r = r->next_of_rank) make_ready(w, r);
}

static void wake_from_fabric(void *context, uint32_t rank) {
    wake_rank(context, rank);
}

static void wake_all(world *w, enum runner_kind only) {
    for (uint32_t i = 0; i < w->ranks; i++)
        for (struct runner *r = w->rank[i].runners; r; r = r->next_of_rank)
            if (!only || r->kind == only) make_ready(w, r);
}

struct runner *runner_add(world *w, uint32_t rank, enum runner_kind kind) {
    struct runner *r = calloc(1, sizeof *r);
    if (!r) return NULL;
    r->kind = (uint8_t)kind;
    r->rank = rank;
    r->dead = w->rank[rank].dead && !w->rank[rank].may_open;
    /* At the end, so that order is that of adding. */
    struct runner **link = &w->rank[rank].runners;
    while (*link) link = &(*link)->next_of_rank;
    *link = r;
    if (kind != RUNNER_FIBER) make_ready(w, r);
    return r;
}

void runner_remove(world *w, struct runner *r) {
    not_ready(w, r);
    struct runner **link = &w->rank[r->rank].runners;
    while (*link && *link != r) link = &(*link)->next_of_rank;
    if (*link) *link = r->next_of_rank;
    if (w->running == r) w->running_removed = true;
    free(r);
}

/* --------------------------------------------------------------------------------------------------- what comes next
 */

/* One turn of a proxy or an actor. */
static void run(world *w, struct runner *r) {
    uint32_t worked = 0;
    w->running = r;
    w->running_removed = false;
    const uint32_t rank = r->rank;
    const bool actor = r->kind == RUNNER_ACTOR;
    /* A pass that fails (a communicator that was aborted) has nothing more to do. */
    if (actor)
        worked = r->step(r->context);
    else if (r->pass(r->context, r->proxy, &worked) != UCCL_EP_OK)
        worked = 0;
    w->running = NULL;
    w->steps++;
    if (!worked) {
        if (!w->running_removed) not_ready(w, r);
        return;
    }
    w->jump_ns = FIRST_JUMP_NS;
    w->woken_here = 0;
    wake_rank(w, rank);
    if (actor) w->actors_moved = true;
    if (w->knobs.schedule == VNIC_SCHEDULE_CHOICE && !w->running_removed) {
        not_ready(w, r); /* to the end of the line */
        make_ready(w, r);
    }
}

static void run_event(world *w) {
    w->jump_ns = FIRST_JUMP_NS;
    vnic_run_due(w->fabric);
    w->steps++;
    w->woken_here = 0;
}

/* Nothing can be done at this moment as far as we know. Whatever was said between ranks outside of their memory may
 * have changed something for others: they look again, twice at most before something else happens, and not at every
 * event. */
static bool look_again(world *w) {
    const uint64_t now = vnic_now(w->fabric);
    if (w->actors_moved) {
        w->actors_moved = false;
        wake_all(w, RUNNER_ACTOR);
        if (w->n_ready) return true;
    }
    if (!w->fibers_moved || w->woken_here >= 2) return false;
    const bool choice = w->knobs.schedule == VNIC_SCHEDULE_CHOICE;
    if (!choice && vnic_next(w->fabric) != UINT64_MAX && w->woken_all_ns && now - w->woken_all_ns < LOOK_AGAIN_NS)
        return false;
    w->fibers_moved = false;
    w->woken_here++;
    w->woken_all_ns = now;
    wake_all(w, RUNNER_FIBER);
    return w->n_ready != 0;
}

static void pass_time(world *w, bool *idle) {
    const uint64_t now = vnic_now(w->fabric), next = vnic_next(w->fabric);
    w->woken_here = 0;
    *idle = next == UINT64_MAX;
    if (next <= now + w->jump_ns) {
        vnic_set_now(w->fabric, next);
        if (next / HOUSEKEEPING_NS != now / HOUSEKEEPING_NS) wake_all(w, (enum runner_kind)0);
        return;
    }
    /* It is silent for a while: what nobody is told of, a doorbell that was lost or a deadline, is looked after. */
    vnic_set_now(w->fabric, now + w->jump_ns);
    if (w->jump_ns < LONGEST_JUMP_NS) w->jump_ns *= 2;
    wake_all(w, (enum runner_kind)0);
}

/* Who asks to be asked: with names, and also where there is one alternative alone. */
#define MOST_NAMES 256u

static uint32_t ask(world *w, uint32_t ready, bool events) {
    uint64_t names[MOST_NAMES] = {0};
    uint32_t n = 0;
    for (; n < ready && n < MOST_NAMES; n++) {
        const struct runner *r = w->ready[n];
        names[n] = (uint64_t)r->rank << 32 | r->proxy << 8 | (uint32_t)r->kind << 4 | UCCL_EP_SIM_NAME_TURN;
    }
    if (events) n += vnic_names(w->fabric, names + n, MOST_NAMES - n);
    if (n > MOST_NAMES) n = MOST_NAMES;
    for (uint32_t i = ready; i < n; i++) names[i] &= ~UCCL_EP_SIM_NAME_TURN;
    const uint32_t taken = w->choose(w->choose_context, VNIC_CHOICE_RUN, names, n) % n;
    if (taken < ready) return taken;
    w->event_taken = taken - ready;
    return ready;
}

static uint32_t decide(void *context, uint32_t kind, uint32_t alternatives) {
    const world *w = context;
    return w->choose(w->choose_context, kind, NULL, alternatives);
}

struct runner *schedule(world *w, bool once, bool *idle) {
    const bool choice = w->knobs.schedule == VNIC_SCHEDULE_CHOICE;
    *idle = false;
    for (;;) {
        const uint32_t due = vnic_due(w->fabric), ready = w->n_ready;
        if (!ready && !due && look_again(w)) continue;
        if (!w->n_ready && !due) {
            pass_time(w, idle);
            if (once) return NULL;
            continue;
        }
        if (!ready && choice && look_again(w)) continue;
        /* By choice, ranks go first: an event may stay away for any time, so nothing is lost. With choose_run that is
         * an alternative, too. */
        uint32_t alternatives = ready;
        if (due && (!choice || w->knobs.choose_run || !ready)) alternatives++;
        const bool asked = w->choose && alternatives && (w->knobs.choose_run || !ready);
        if (asked) vnic_choose_next(w->fabric, ask(w, ready, alternatives > ready));
        const uint32_t taken =
            choice && !w->knobs.choose_run ? 0 : vnic_choose(w->fabric, VNIC_CHOICE_RUN, 0, alternatives);
        if (taken >= ready) {
            if (asked) vnic_choose_next(w->fabric, w->event_taken);
            run_event(w);
            if (once) return NULL;
            continue;
        }
        struct runner *r = w->ready[taken];
        if (!choice) vnic_set_now(w->fabric, vnic_now(w->fabric) + w->knobs.step_ns);
        if (r->kind == RUNNER_FIBER) {
            w->steps++;
            return r;
        }
        run(w, r);
        if (once) return NULL;
    }
}

/* ------------------------------------------------------------------------------------------------------ life, death */

void rank_dies(world *w, uint32_t rank) {
    if (w->rank[rank].dead) return;
    w->rank[rank].dead = true;
    w->rank[rank].may_open = false;
    for (struct runner *r = w->rank[rank].runners; r; r = r->next_of_rank) {
        r->dead = true;
        not_ready(w, r);
    }
    vnic_rank_dies(w->fabric, rank);
}

static void wake_up(void *context, uint64_t rank) {
    world *w = context;
    if (w->rank[rank].paused && w->rank[rank].paused_until <= vnic_now(w->fabric)) rank_resumes(w, (uint32_t)rank);
}

void rank_pauses(world *w, uint32_t rank, uint64_t ns) {
    struct rank *k = &w->rank[rank];
    const uint64_t now = vnic_now(w->fabric);
    k->paused = true;
    k->paused_until = ns > UINT64_MAX - now ? UINT64_MAX : now + ns;
    for (struct runner *r = k->runners; r; r = r->next_of_rank) not_ready(w, r);
    vnic_hash_mix(w->fabric, 0x9a05eu ^ (uint64_t)rank << 32);
    if (k->paused_until != UINT64_MAX) vnic_call_at(w->fabric, k->paused_until, wake_up, w, rank);
}

void rank_resumes(world *w, uint32_t rank) {
    w->rank[rank].paused = false;
    wake_rank(w, rank);
}

static void carry_out(void *context, vnic_fault_id id, uint32_t rank, uint64_t parameter) {
    world *w = context;
    if (id == VNIC_FAULT_PEER_DEATH) rank_dies(w, rank);
    if (id == VNIC_FAULT_PEER_RETURN) w->rank[rank].may_open = true;
    if (id == VNIC_FAULT_DEVICE_LOST) vnic_device_lost(w->fabric, rank);
    if (id == VNIC_FAULT_CLOCK_JUMP) vnic_set_now(w->fabric, vnic_now(w->fabric) + parameter);
}

/* ---------------------------------------------------------------------------------------------------- open and close
 */

static void free_world(world *w) {
    for (uint32_t i = 0; w->rank && i < w->ranks; i++)
        while (w->rank[i].runners) {
            struct runner *r = w->rank[i].runners;
            w->rank[i].runners = r->next_of_rank;
            if (r->kind == RUNNER_FIBER) sem_destroy(&r->turn);
            free(r);
        }
    vnic_fabric_close(w->fabric);
    pthread_mutex_destroy(&w->lock);
    free(w->rank);
    free(w->shared_nics);
    free(w->shared_users);
    free(w->ready);
    free(w->fibers);
    free(w);
}

void world_use(world *w) {
    pthread_mutex_lock(&w->lock);
    w->uses++;
    pthread_mutex_unlock(&w->lock);
}

void world_release(world *w) {
    pthread_mutex_lock(&w->lock);
    const bool last = !--w->uses;
    pthread_mutex_unlock(&w->lock);
    if (last) free_world(w);
}

void world_close(world *w) {
    unregister_world(w);
    fibers_close(w);
    world_release(w);
}

static int each_fault(world *w, const char *faults, char *text) {
    while (faults && *faults) {
        char one[256];
        const size_t length = strcspn(faults, ";");
        if (length >= sizeof one) {
            snprintf(text, 256, "a fault takes 255 characters");
            return -1;
        }
        memcpy(one, faults, length);
        one[length] = 0;
        faults += length + (faults[length] == ';');
        if (one[strspn(one, " ")] && vnic_fault_add(w->fabric, one, text)) return -1;
    }
    return 0;
}

static void list_profiles(char *text, size_t used) {
    for (uint32_t i = 0; vnic_profile_at(i) && used < 256; i++)
        used += (size_t)snprintf(text + used, 256 - used, " %s", vnic_profile_at(i)->name);
}

world *world_open(const uccl_ep_sim_config *given, char *text) {
    uccl_ep_sim_config config = {0};
    memcpy(&config, given, given->size < sizeof config ? given->size : sizeof config);
    const vnic_profile *profile = vnic_profile_named(config.profile);
    if (!profile) {
        list_profiles(
            text, (size_t)snprintf(text, 256, "no profile '%.40s'; there are:", config.profile ? config.profile : ""));
        return NULL;
    }
    if (!config.ranks || config.ranks > UCCL_EP_SIM_MAX_RANKS) {
        snprintf(text, 256, "%u ranks: 1 to %u are possible", config.ranks, UCCL_EP_SIM_MAX_RANKS);
        return NULL;
    }
    if (config.n_choices && !config.choices) {
        snprintf(text, 256, "n_choices without choices");
        return NULL;
    }
    world *w = calloc(1, sizeof *w);
    if (!w) {
        snprintf(text, 256, "no memory for a world");
        return NULL;
    }
    pthread_mutex_init(&w->lock, NULL);
    w->uses = 1;
    w->profile = profile;
    w->knobs = profile->knobs;
    w->ranks = config.ranks;
    w->jump_ns = FIRST_JUMP_NS;
    if (vnic_knobs_parse(&w->knobs, config.knobs, NULL, NULL, text)) {
        free_world(w);
        return NULL;
    }
    if (config.choose && w->knobs.schedule != VNIC_SCHEDULE_CHOICE) {
        snprintf(text, 256, "choose() needs schedule=choice");
        free_world(w);
        return NULL;
    }
    const vnic_fabric_config fabric = {.seed = config.seed,
                                       .choices = config.choices,
                                       .n_choices = config.n_choices,
                                       .first_later = config.first_later,
                                       .choice_schedule = w->knobs.schedule == VNIC_SCHEDULE_CHOICE,
                                       .trace_lines = config.trace_lines,
                                       .ranks = config.ranks,
                                       .decide = config.choose ? decide : NULL,
                                       .wake = wake_from_fabric,
                                       .context = w};
    w->choose = config.choose;
    w->choose_context = config.choose_context;
    w->fabric = vnic_fabric_open(&fabric);
    w->rank = calloc(config.ranks, sizeof *w->rank);
    w->shared_nics = calloc(config.ranks, sizeof(*w->shared_nics));
    w->shared_users = calloc(config.ranks, sizeof *w->shared_users);
    if (!w->fabric || !w->rank || !w->shared_nics || !w->shared_users) {
        snprintf(text, 256, "no memory for a world of %u ranks", config.ranks);
        free_world(w);
        return NULL;
    }
    for (uint32_t i = 0; i < config.ranks; i++) w->rank[i].may_open = true;
    vnic_on_fault(w->fabric, carry_out, w);
    if (each_fault(w, config.faults, text)) {
        free_world(w);
        return NULL;
    }
    if (!register_world(w)) {
        snprintf(text, 256, "%u worlds are open at a time at most", MAX_WORLDS);
        free_world(w);
        return NULL;
    }
    return w;
}
