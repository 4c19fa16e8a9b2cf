/* SPDX-License-Identifier: Apache-2.0
 *
 * world.h: what the files of the sim backend share: a world, who runs in it, and its devices.
 */
#ifndef UCCL_EP_SIM_WORLD_H
#define UCCL_EP_SIM_WORLD_H

#include <pthread.h>
#include <semaphore.h>
#include <stdbool.h>

#include "sim.h"
#include "uccl_ep/backend.h"
#include "virtual_nic/virtual_nic.h"

#define SPARE_ENTRIES 64u /* of a completion queue, for completions that come twice */
#define MAX_FIBERS 65536u

enum runner_kind { RUNNER_FIBER = 1, RUNNER_PROXY, RUNNER_ACTOR };

/* Something that the scheduler runs. */
struct runner {
    struct runner *next_of_rank;
    uint8_t kind;
    uint32_t rank;
    uint32_t ready; /* place in the list of those that are ready + 1; 0: it waits for something to happen */
    uccl_ep_status (*pass)(void *context, uint32_t proxy, uint32_t *worked);
    uint32_t (*step)(void *context);
    void *context;
    uint32_t proxy;
    sem_t turn;       /* fibers: posted when the baton comes */
    uint64_t entered; /* how many had entered before */
    bool dead;        /* of an incarnation of its rank that was killed */
};

struct rank {
    struct runner *runners;
    bool dead, paused, may_open;
    uint64_t paused_until;
    uint32_t devices; /* open */
};

struct uccl_ep_sim_world {
    vnic_fabric *fabric;
    const vnic_profile *profile;
    vnic_knobs knobs; /* of the profile, changed by the world's */
    uint32_t number, ranks;
    struct rank *rank;
    vnic_nic **shared_nics; /* knob ranks_per_nic: the NIC of ranks i * n .. */
    uint32_t *shared_users;
    struct runner **ready;
    uint32_t n_ready, room_ready;
    struct runner *running; /* the proxy or actor whose turn it is; it may remove itself */
    bool running_removed;
    uint64_t steps, jump_ns, woken_all_ns;
    uint32_t (*choose)(void *context, uint32_t kind, const uint64_t *names, uint32_t n);
    void *choose_context;
    uint32_t event_taken;
    uint32_t woken_here;
    bool actors_moved, fibers_moved;
    /* fibers: the baton, and who waits for it */
    pthread_mutex_t lock;
    struct runner *baton;
    struct runner **fibers; /* in order of entry */
    uint32_t n_fibers, room_fibers, ranks_entered;
    uint64_t entries;
    bool started, closing;
    uint32_t uses; /* the handle, fibers, devices: the last one frees it */
};
typedef struct uccl_ep_sim_world world;

/* world.c */
world *world_open(const uccl_ep_sim_config *config, char *text);
void world_close(world *w);
world *world_find(uint32_t number); /* NULL: there is none */
void world_use(world *w);
void world_release(world *w);
struct runner *runner_add(world *w, uint32_t rank, enum runner_kind kind);
void runner_remove(world *w, struct runner *r);
void make_ready(world *w, struct runner *r);
void not_ready(world *w, struct runner *r);
void wake_rank(world *w, uint32_t rank);
/* Run proxies, actors and events until it is a fiber's turn, and return it; with `once`, do one thing, and return NULL;
 * *idle: nothing but time is left to come. */
struct runner *schedule(world *w, bool once, bool *idle);
void rank_dies(world *w, uint32_t rank);
void rank_pauses(world *w, uint32_t rank, uint64_t ns);
void rank_resumes(world *w, uint32_t rank);

/* fiber.c */
void fiber_enter(world *w, uint32_t rank);
void fiber_leave(world *w);
void fiber_yield(void *w);
uint32_t fiber_count(const world *w);
void fibers_close(world *w);
/* If nobody holds the baton, and somebody may now run again, he gets it. */
void fibers_go_on(world *w);

/* promises.c */
void promises_of(const vnic_knobs *knobs, uccl_ep_caps *caps);

#endif
