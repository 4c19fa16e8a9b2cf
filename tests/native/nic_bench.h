/* SPDX-License-Identifier: Apache-2.0
 *
 * nic_bench.h: a few virtual NICs side by side, a memory behind each, and small programs on them.
 *
 * Most tests run one small program over many seeds and look at the target's memory after each event. Where a knob
 * allows something, some seed must show it; where it does not, none may.
 */
#ifndef UCCL_EP_NIC_BENCH_H
#define UCCL_EP_NIC_BENCH_H

#include <stdbool.h>
#include <stdlib.h>

#include "testing.h"
#include "virtual_nic/virtual_nic.h"

#define RANKS 3u
#define BYTES 4096u
#define NONE UINT64_MAX

struct side {
    vnic_nic *nic[2];
    vnic_endpoint *endpoint[2];
    vnic_region *region;
    _Alignas(128) uint64_t memory[BYTES / 8]; /* blocks of NICs lie at multiples of 128 */
};

static struct bench {
    vnic_fabric *fabric;
    vnic_knobs knobs;
    struct side side[RANKS];
    vnic_completion done[1024]; /* polled, by endpoint 0 of rank 0 */
    uint32_t n_done;
} b;

static inline uint8_t *bytes_of(uint32_t rank) {
    return (uint8_t *)b.side[rank].memory;
}

static inline vnic_endpoint *endpoint(uint32_t rank) {
    return b.side[rank].endpoint[0];
}

static inline void open_bench_with(const char *profile, const char *knobs, uint64_t seed, bool by_choice,
                                   const uint32_t *choices, uint32_t n_choices, uint32_t cq_entries,
                                   uint32_t receives) {
    char text[256] = "";
    memset(&b, 0, sizeof b);
    const vnic_profile *p = vnic_profile_named(profile);
    CHECK(p, "no profile %s", profile);
    b.knobs = p->knobs;
    CHECK(!vnic_knobs_parse(&b.knobs, knobs, NULL, NULL, text), "%s", text);
    const vnic_fabric_config config = {.seed = seed,
                                       .ranks = RANKS,
                                       .choice_schedule = by_choice,
                                       .choices = choices,
                                       .n_choices = n_choices,
                                       .first_later = by_choice,
                                       .trace_lines = 32};
    b.fabric = vnic_fabric_open(&config);
    CHECK(b.fabric, "no memory");
    const uint32_t nics = b.knobs.nics > 1 ? 2 : 1;
    for (uint32_t r = 0; r < RANKS; r++) {
        struct side *s = &b.side[r];
        s->region = vnic_region_add(b.fabric, &b.knobs, r, 0, s->memory, BYTES);
        for (uint32_t i = 0; i < nics; i++) {
            s->nic[i] = vnic_nic_open(b.fabric, &b.knobs);
            const vnic_endpoint_config e = {
                .rank = r, .self = r, .peers = RANKS, .cq_entries = cq_entries, .receives_peer = receives};
            s->endpoint[i] = vnic_endpoint_open(s->nic[i], &e, text);
            CHECK(s->endpoint[i], "%s", text);
        }
    }
    for (uint32_t i = 0; i < nics; i++)
        for (uint32_t r = 0; r < RANKS; r++)
            for (uint32_t peer = 0; peer < RANKS; peer++)
                vnic_connect(b.side[r].endpoint[i], peer, vnic_endpoint_id(b.side[peer].endpoint[i]));
}

static inline void open_bench(const char *profile, const char *knobs, uint64_t seed) {
    open_bench_with(profile, knobs, seed, false, NULL, 0, 512, 64);
}

static inline void close_bench(void) {
    vnic_fabric_close(b.fabric);
}

static inline uint64_t address(uint32_t rank, uint64_t offset) {
    return (b.side[rank].region->by_address ? (uintptr_t)b.side[rank].memory : 0) + offset;
}

static inline vnic_work make_write(uint32_t from, uint32_t to, uint64_t local, uint64_t remote, uint32_t length) {
    return (vnic_work){.kind = VNIC_WRITE,
                       .flags = VNIC_SIGNALLED,
                       .sges = 1,
                       .sge = {{b.side[from].region, local, length}},
                       .remote_address = address(to, remote),
                       .remote_key = b.side[to].region->key};
}

static inline vnic_work make_add(uint32_t to, uint64_t remote, uint64_t value) {
    return (vnic_work){.kind = VNIC_ADD,
                       .flags = VNIC_SIGNALLED,
                       .remote_address = address(to, remote),
                       .remote_key = b.side[to].region->key,
                       .value = value};
}

static inline vnic_refusal try_post(vnic_endpoint *e, uint32_t peer, vnic_work w, uint64_t cookie) {
    char text[256];
    uint32_t taken;
    w.cookie = cookie;
    const vnic_refusal refusal = vnic_post(e, peer, &w, 1, false, &taken, text);
    CHECK_EQ(taken, refusal == VNIC_TAKEN);
    return refusal;
}

static inline void post(uint32_t from, uint32_t to, vnic_work w, uint64_t cookie) {
    CHECK_EQ(try_post(endpoint(from), to, w, cookie), VNIC_TAKEN);
}

/* One event, at its time. False: nothing is left to come. */
static inline bool step(void) {
    if (!vnic_due(b.fabric)) {
        const uint64_t next = vnic_next(b.fabric);
        if (next == UINT64_MAX) return false;
        vnic_set_now(b.fabric, next);
    }
    vnic_run_due(b.fabric);
    return true;
}

static inline uint32_t collect(uint32_t rank) {
    const uint32_t n = vnic_poll(endpoint(rank), b.done + b.n_done, 1024 - b.n_done);
    b.n_done += n;
    return n;
}

static inline void settle(void) {
    while (step()) {
    }
}

/* Position of the completion with that cookie; NONE: it did not come. */
static inline uint64_t came(uint64_t cookie) {
    for (uint32_t i = 0; i < b.n_done; i++)
        if (!b.done[i].immediate && b.done[i].cookie == cookie) return i;
    return NONE;
}

#define SEEDS 120u
#define FOR_SEEDS(seed) for (uint64_t seed = test_seed_value * 1000, end_ = seed + SEEDS; seed < end_; seed++)

static inline void fill(uint32_t rank, uint32_t from, uint32_t n, uint8_t value) {
    memset(bytes_of(rank) + from, value, n);
}

static inline uint32_t count(uint32_t rank, uint32_t from, uint32_t n, uint8_t value) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < n; i++) found += bytes_of(rank)[from + i] == value;
    return found;
}

#endif
