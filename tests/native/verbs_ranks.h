/* SPDX-License-Identifier: Apache-2.0
 *
 * verbs_ranks.h: ranks as threads on the backends over libibverbs, and the fake libibverbs below them.
 */
#ifndef UCCL_EP_VERBS_RANKS_H
#define UCCL_EP_VERBS_RANKS_H

#include <dlfcn.h>

#include "fake_ibverbs/fake_ibverbs.h"
#include "thread_ranks.h"

#define FAKE_LIBRARY UCCL_EP_TEST_LIBRARY_DIR "/fake_verbs/libibverbs.so.1"
#define BACKEND(name) UCCL_EP_TEST_LIBRARY_DIR "/libuccl_ep_backend_" name ".so"
#define SECOND 1000000000ull

/* A function of the fake library by its name. */
static inline void *fake_function(const char *name) {
    void *library = dlopen(FAKE_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    CHECK(library, "%s", dlerror());
    void *function = dlsym(library, name);
    CHECK(function, "%s", name);
    return function;
}
#define FAKE(name) (*(__typeof__(&name))fake_function(#name))

/* The machine that the next open sees. */
static inline void fake_machine(const char *devices) {
    CHECK(!setenv("FAKE_IBVERBS", devices, 1) && !setenv("UCCL_EP_LIBIBVERBS", FAKE_LIBRARY, 1), "setenv");
}

static inline fake_ibverbs_stats fake_stats(void) {
    fake_ibverbs_stats stats;
    FAKE(fake_ibverbs_get_stats)(&stats);
    return stats;
}

/* Nothing that was opened is left. */
static inline void check_nothing_left(void) {
    const fake_ibverbs_stats s = fake_stats();
    CHECK(!s.contexts && !s.pds && !s.mrs && !s.cqs && !s.srqs && !s.qps && !s.channels && !s.handles,
          "%" PRIu64 " contexts, %" PRIu64 " domains, %" PRIu64 " regions, %" PRIu64 " completion queues, %" PRIu64
          " receive queues, %" PRIu64 " queue pairs, %" PRIu64 " address handles",
          s.contexts, s.pds, s.mrs, s.cqs, s.srqs, s.qps, s.handles);
}

static inline uccl_ep_config verbs_config(const char *library, const char *device, const char *options) {
    return (uccl_ep_config){.size = sizeof(uccl_ep_config),
                            .backend = library,
                            .device = device,
                            .backend_options = options,
                            .heap_bytes = 1 << 20,
                            .signals = 64,
                            .channels = 2,
                            .timeout_ns = 20 * SECOND,
                            .peer_timeout_ns = 20 * SECOND,
                            .bootstrap_timeout_ns = 20 * SECOND};
}

#endif
