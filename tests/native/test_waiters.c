/* SPDX-License-Identifier: Apache-2.0
 *
 * test_waiters.c: a report names the threads that wait for signals, whatever their number, while waits come and go.
 */
#define _GNU_SOURCE /* pthread_setname_np */
#include "thread_ranks.h"

#define LIBRARY UCCL_EP_TEST_LIBRARY_DIR "/libloop_backend.so"
#define SECOND 1000000000ull
#define TOLD 64 /* places in the core's table */
#define MORE 3

static uccl_ep_comm *open_comm(thread_rank *r, void (*idle)(void *)) {
    const uccl_ep_config config = {.size = sizeof config,
                                   .backend = LIBRARY,
                                   .heap_bytes = 1 << 20,
                                   .signals = 128,
                                   .timeout_ns = 60 * SECOND,
                                   .bootstrap_timeout_ns = 60 * SECOND,
                                   .progress = idle ? UCCL_EP_PROGRESS_CALLER : UCCL_EP_PROGRESS_THREADS,
                                   .idle = idle,
                                   .idle_context = r};
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    uccl_ep_comm *comm;
    OK(uccl_ep_comm_create(&config, &bootstrap, &comm));
    return comm;
}

static const char *report(uccl_ep_comm *comm) {
    static _Thread_local char text[1 << 16];
    OK(uccl_ep_report(comm, text, sizeof text));
    return text;
}

static uint32_t count(const char *text, const char *what) {
    uint32_t n = 0;
    for (const char *at = strstr(text, what); at; at = strstr(at + 1, what)) n++;
    return n;
}

struct waiter {
    uccl_ep_comm *comm;
    uint32_t slot, source;
    uint64_t value;
    char name[16];
};

static void *wait_for_it(void *argument) {
    const struct waiter *w = argument;
    CHECK_EQ(pthread_setname_np(pthread_self(), w->name), 0);
    OK(uccl_ep_wait_signal(w->comm, w->slot, w->value, w->source, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    return NULL;
}

/* As many as have a place are told with all that they wait for, the others are counted, and afterwards there is
 * nobody. */
static void crowd_rank(thread_rank *r, void *argument) {
    (void)argument;
    uccl_ep_comm *comm = open_comm(r, NULL);
    static struct waiter waiters[TOLD + MORE];
    pthread_t threads[TOLD + MORE];
    OK(uccl_ep_signal(comm, 0, 0, 1, 5, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    OK(uccl_ep_quiet(comm, 0, UCCL_EP_TIMEOUT_DEFAULT));
    CHECK(!strstr(report(comm), "waits for signal"), "%s", report(comm));
    for (uint32_t i = 0; i < TOLD + MORE; i++) {
        waiters[i] = (struct waiter){comm, i, i % 2 ? 0 : UCCL_EP_ANY_RANK, 7 + i, ""};
        snprintf(waiters[i].name, sizeof waiters[i].name, "waiter %u", i);
        CHECK_EQ(pthread_create(&threads[i], NULL, wait_for_it, &waiters[i]), 0);
    }
    char more[64];
    snprintf(more, sizeof more, "  %u more threads wait for signals\n", MORE);
    while (count(report(comm), ") waits for signal") < TOLD || !strstr(report(comm), more)) sched_yield();
    for (uint32_t i = 0; i < TOLD + MORE; i++) {
        char line[128];
        snprintf(line, sizeof line, "(waiter %u) waits for signal %u: it is at %u and has to reach %u; for ", i, i,
                 i == 1 ? 5u : 0u, 7 + i);
        const char *told = strstr(report(comm), line);
        if (!told) continue;
        const char *end = strchr(told, '\n');
        CHECK(end && strstr(told, i % 2 ? "ms, from rank 0\n" : "ms, from any rank\n") < end, "%s", told);
        waiters[i].comm = NULL; /* seen */
    }
    uint32_t unseen = 0;
    for (uint32_t i = 0; i < TOLD + MORE; i++) unseen += waiters[i].comm != NULL;
    CHECK_EQ(unseen, MORE);
    for (uint32_t i = 0; i < TOLD + MORE; i++) OK(uccl_ep_signal(comm, 0, 0, i, 1000, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    for (uint32_t i = 0; i < TOLD + MORE; i++) pthread_join(threads[i], NULL);
    CHECK(!strstr(report(comm), "wait for signal") && !strstr(report(comm), "waits for"), "%s", report(comm));
    uccl_ep_comm_destroy(comm);
}

/* Each thread waits for one slot by one value, so a line that mixes two waits shows. */
struct coming {
    uccl_ep_comm *comm;
    uint32_t slot;
    uint64_t rounds;
};

static void *come_and_go(void *argument) {
    const struct coming *c = argument;
    for (uint64_t i = 1; i <= c->rounds; i++)
        EXPECT(uccl_ep_wait_signal(c->comm, c->slot, (uint64_t)c->slot * 1000000 + i,
                                   c->slot % 2 ? 0 : UCCL_EP_ANY_RANK, 200000, NULL),
               UCCL_EP_E_DEADLINE);
    return NULL;
}

static void whole_lines_rank(thread_rank *r, void *argument) {
    (void)argument;
    uccl_ep_comm *comm = open_comm(r, NULL);
    pthread_t threads[8];
    struct coming coming[8];
    for (uint32_t i = 0; i < 8; i++) {
        coming[i] = (struct coming){comm, i + 1, 10 + test_scaled(1000)};
        CHECK_EQ(pthread_create(&threads[i], NULL, come_and_go, &coming[i]), 0);
    }
    for (uint64_t k = 0; k < 100 + test_scaled(20000); k++) {
        for (const char *at = strstr(report(comm), "waits for"); at; at = strstr(at + 1, "waits for")) {
            uint32_t slot;
            unsigned long long value, ms;
            char from[16];
            CHECK_EQ(sscanf(at, "waits for signal %u: it is at 0 and has to reach %llu; for %llu ms, from %15[a-z]",
                            &slot, &value, &ms, from),
                     4);
            CHECK(value / 1000000 == slot && !strcmp(from, slot % 2 ? "rank" : "any"), "%s", at);
        }
    }
    for (uint32_t i = 0; i < 8; i++) pthread_join(threads[i], NULL);
    uccl_ep_comm_destroy(comm);
}

/* Where turns of a wait are the caller's, a wait is told from its first turn, since there may be no second one. */
static uccl_ep_comm *under_idle;
static uint32_t told_in_idle;

static void look(void *context) {
    (void)context;
    uint32_t worked;
    if (!under_idle) {
        sched_yield();
        return;
    }
    told_in_idle += strstr(report(under_idle), "waits for signal 3: it is at 0 and has to reach 9") != NULL;
    OK(uccl_ep_signal(under_idle, 0, 0, 3, 9, 0, NULL));
    OK(uccl_ep_progress_proxy(under_idle, 0, &worked));
}

static void idle_rank(thread_rank *r, void *argument) {
    (void)argument;
    uccl_ep_comm *comm = open_comm(r, look);
    under_idle = comm;
    OK(uccl_ep_wait_signal(comm, 3, 9, UCCL_EP_ANY_RANK, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    under_idle = NULL;
    CHECK_EQ(told_in_idle, 1);
    uccl_ep_comm_destroy(comm);
}

/* A wait in pieces by one thread goes on counting: its time is that of the first piece. */
static uint64_t told_ms(uccl_ep_comm *comm) {
    unsigned long long ms = 0;
    const char *at = strstr(report(comm), "has to reach 4; for ");
    if (!at) return UINT64_MAX;
    CHECK_EQ(sscanf(at, "has to reach 4; for %llu ms", &ms), 1);
    return ms;
}

static void *in_pieces(void *argument) {
    uccl_ep_comm *comm = argument;
    while (uccl_ep_wait_signal(comm, 2, 4, UCCL_EP_ANY_RANK, 5000000, NULL) == UCCL_EP_E_DEADLINE) {
    }
    return NULL;
}

static void pieces_rank(thread_rank *r, void *argument) {
    (void)argument;
    uccl_ep_comm *comm = open_comm(r, NULL);
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, in_pieces, comm), 0);
    for (uint64_t ms = 0; ms == UINT64_MAX || ms < 30; ms = told_ms(comm)) sched_yield(); /* longer than any piece */
    OK(uccl_ep_signal(comm, 0, 0, 2, 4, UCCL_EP_TIMEOUT_DEFAULT, NULL));
    pthread_join(thread, NULL);
    uccl_ep_comm_destroy(comm);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 120);
    run_ranks(1, crowd_rank, NULL);
    run_ranks(1, whole_lines_rank, NULL);
    run_ranks(1, idle_rank, NULL);
    run_ranks(1, pieces_rank, NULL);
    return test_end();
}
