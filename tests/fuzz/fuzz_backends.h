/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_backends.h: what stands around the backend that a target is built with: nothing around shared memory, a world
 * around virtual NICs, an RDMA library of software below those that need one.
 */
#ifndef UCCL_EP_FUZZ_BACKENDS_H
#define UCCL_EP_FUZZ_BACKENDS_H

#include "fuzz_core.h"

#if FUZZ_ON_SIM
#include "backends/sim/sim.h"

/* A fabric connects to any number that it is given, as real ones do; who is not there does not answer. */
#define FUZZ_CONNECTS_TO_NOBODY 1

static uccl_ep_sim_world *fuzz_world;

/* A world with any of the profiles. */
static inline void fuzz_around_open(fuzz_input *in, uint32_t ranks) {
    const uccl_ep_sim *sim = uccl_ep_sim_entry();
    uint32_t profiles = 0;
    const char *line;
    char text[256] = "";
    while (sim->profile(profiles, &line)) profiles++;
    const uccl_ep_sim_config config = {.size = sizeof config,
                                       .ranks = ranks,
                                       .profile = sim->profile(fuzz_below(in, profiles), &line),
                                       .seed = fuzz_u8(in)};
    fuzz_world = sim->world_open(&config, text);
    FUZZ_CHECK(fuzz_world, "%s", text);
}

static inline void fuzz_around_close(void) {
    uccl_ep_sim_entry()->world_close(fuzz_world);
}

/* Options that are in order, of one length whatever the world's number: the input begins behind them. */
static inline const char *fuzz_options(uint32_t rank) {
    static char options[64];
    snprintf(options, sizeof options, "world=%010u,rank=%u", uccl_ep_sim_entry()->world_number(fuzz_world), rank);
    return options;
}

/* Time and turns are the world's, which one thread uses. */
static inline void fuzz_around_configure(uccl_ep_config *config) {
    const uccl_ep_sim *sim = uccl_ep_sim_entry();
    config->size = sizeof *config;
    config->progress = UCCL_EP_PROGRESS_CALLER;
    config->clock = sim->now;
    config->clock_context = fuzz_world;
    config->idle = sim->yield;
    config->idle_context = fuzz_world;
}

static inline void fuzz_around_turn(void) {
    uccl_ep_sim_entry()->step(fuzz_world);
}

#else
#if FUZZ_ON_CONNECTX
/* A queue pair connects to any number; who is not there does not answer. */
#define FUZZ_CONNECTS_TO_NOBODY 1

/* A machine with one of several NICs, or none. */
static inline void fuzz_around_open(fuzz_input *in, uint32_t ranks) {
    static const char *const machines[] = {"mlx5_0",
                                           "mlx5_0,layer=ib,lid=7",
                                           "mlx5_0,max_mr_size=4096",
                                           "mlx5_0,atomic=0",
                                           "mlx5_0,srq=0,max_srq=0,wr=0",
                                           "mlx5_0,max_cqe=64",
                                           "rxe0;mlx5_1",
                                           ""};
    (void)ranks;
    setenv("FAKE_IBVERBS", machines[fuzz_u8(in) % 8], 1);
    setenv("UCCL_EP_LIBIBVERBS", FUZZ_LIBIBVERBS, 1);
}
#else
#define FUZZ_CONNECTS_TO_NOBODY 0

static inline void fuzz_around_open(fuzz_input *in, uint32_t ranks) {
    (void)in;
    (void)ranks;
}
#endif
static inline void fuzz_around_close(void) {}
static inline const char *fuzz_options(uint32_t rank) {
    (void)rank;
    return "";
}
static inline void fuzz_around_configure(uccl_ep_config *config) {
    (void)config;
}
static inline void fuzz_around_turn(void) {}
#endif

#endif
