/* SPDX-License-Identifier: Apache-2.0
 *
 * coop.c: stacks that take turns.
 *
 * Sanitizers must be told of a change of stack, or they take the other one for an overflow (address) or for a race
 * (thread).
 */
#define _GNU_SOURCE
#include "coop.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#if defined(__SANITIZE_ADDRESS__)
#define COOP_ASAN 1
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#define COOP_TSAN 1
#include <sanitizer/tsan_interface.h>
#endif
#if defined(__has_feature)
#if __has_feature(address_sanitizer) && !defined(COOP_ASAN)
#define COOP_ASAN 1
#include <sanitizer/common_interface_defs.h>
#endif
#if __has_feature(thread_sanitizer) && !defined(COOP_TSAN)
#define COOP_TSAN 1
#include <sanitizer/tsan_interface.h>
#endif
#endif

typedef struct member {
    ucontext_t context;
    coop *group;
    uint32_t rank;
    bool running, done;
    uint64_t round; /* allgathers that it has taken part in */
    void *fake_stack, *fiber;
} member;

struct coop {
    uint32_t most, n;
    size_t stack_bytes;
    char *stacks;
    member *members;
    member *current; /* NULL: the caller's own stack */
    ucontext_t caller;
    void *caller_fake_stack, *caller_fiber;
    const void *caller_bottom;
    size_t caller_bytes;
    void (*body)(void *context, uint32_t rank);
    void *context;
    /* the allgather at hand, and the one before it, which not all may have read yet */
    char *data[2];
    uint32_t arrived[2], bytes[2], left[2];
};

coop *coop_new(uint32_t most, size_t stack_bytes) {
    coop *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->most = most;
    c->stack_bytes = (stack_bytes + 4095) / 4096 * 4096;
    c->members = calloc(most, sizeof *c->members);
    void *stacks = mmap(NULL, most * c->stack_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    c->stacks = stacks == MAP_FAILED ? NULL : stacks;
    if (!c->members || !c->stacks) {
        coop_free(c);
        return NULL;
    }
#ifdef COOP_TSAN
    for (uint32_t i = 0; i < most; i++) c->members[i].fiber = __tsan_create_fiber(0);
#endif
    return c;
}

void coop_free(coop *c) {
    if (!c) return;
#ifdef COOP_TSAN
    for (uint32_t i = 0; c->members && i < c->most; i++)
        if (c->members[i].fiber) __tsan_destroy_fiber(c->members[i].fiber);
#endif
    if (c->stacks) munmap(c->stacks, c->most * c->stack_bytes);
    free(c->members);
    free(c->data[0]);
    free(c->data[1]);
    free(c);
}

bool coop_inside(const coop *c) {
    return c->current != NULL;
}

static void to_member(coop *c, member *m) {
    c->current = m;
#ifdef COOP_ASAN
    __sanitizer_start_switch_fiber(&c->caller_fake_stack, c->stacks + m->rank * c->stack_bytes, c->stack_bytes);
#endif
#ifdef COOP_TSAN
    c->caller_fiber = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(m->fiber, 0);
#endif
    swapcontext(&c->caller, &m->context);
#ifdef COOP_ASAN
    __sanitizer_finish_switch_fiber(c->caller_fake_stack, NULL, NULL);
#endif
    c->current = NULL;
}

static void to_caller(coop *c, member *m) {
#ifdef COOP_ASAN
    __sanitizer_start_switch_fiber(m->done ? NULL : &m->fake_stack, c->caller_bottom, c->caller_bytes);
#endif
#ifdef COOP_TSAN
    __tsan_switch_to_fiber(c->caller_fiber, 0);
#endif
    swapcontext(&m->context, &c->caller);
#ifdef COOP_ASAN
    __sanitizer_finish_switch_fiber(m->fake_stack, &c->caller_bottom, &c->caller_bytes);
#endif
}

/* makecontext passes ints alone: the address comes in two halves. */
static void enter(unsigned high, unsigned low) {
    member *m = (member *)(((uintptr_t)high << 16 << 16) | low);
    coop *c = m->group;
#ifdef COOP_ASAN
    __sanitizer_finish_switch_fiber(NULL, &c->caller_bottom, &c->caller_bytes);
#endif
    c->body(c->context, m->rank);
    m->done = true;
    to_caller(c, m);
}

void coop_pass(coop *c) {
    to_caller(c, c->current);
}

/* A stack that begins in enter(). */
static void prepare(coop *c, uint32_t rank) {
    member *m = &c->members[rank];
    void *fiber = m->fiber;
    memset(m, 0, sizeof *m);
    m->fiber = fiber;
    m->group = c;
    m->rank = rank;
    getcontext(&m->context);
    m->context.uc_stack.ss_sp = c->stacks + rank * c->stack_bytes;
    m->context.uc_stack.ss_size = c->stack_bytes;
    m->context.uc_link = NULL;
    makecontext(&m->context, (void (*)(void))(uintptr_t)enter, 2, (unsigned)((uintptr_t)m >> 16 >> 16),
                (unsigned)(uintptr_t)m);
}

void coop_run(coop *c, uint32_t n, void (*body)(void *context, uint32_t rank), void (*between)(void *context),
              void *context) {
    c->n = n < c->most ? n : c->most;
    c->body = body;
    c->context = context;
    for (int i = 0; i < 2; i++) c->arrived[i] = c->left[i] = 0;
    for (uint32_t i = 0; i < c->n; i++) prepare(c, i);
    for (uint32_t left = c->n; left;) {
        for (uint32_t i = 0; i < c->n; i++) {
            member *m = &c->members[i];
            if (m->done) continue;
            to_member(c, m);
            left -= m->done;
        }
        if (left) between(context);
    }
}

/* All come, and the last one opens the round for all. Who leaves early must not overwrite what others still read: hence
 * two tables in turn. */
static int allgather(void *context, const void *mine, uint32_t bytes, void *all, uint64_t timeout_ns, char *text) {
    (void)timeout_ns;
    member *m = context;
    coop *c = m->group;
    const unsigned turn = m->round++ & 1;
    if (!c->arrived[turn]) {
        free(c->data[turn]);
        c->data[turn] = malloc((size_t)c->n * bytes + 1);
        c->bytes[turn] = bytes;
        c->left[turn] = c->n;
    }
    if (!c->data[turn] || c->bytes[turn] != bytes) {
        snprintf(text, 256, "rank %u came with %u bytes and another with %u", m->rank, bytes, c->bytes[turn]);
        return -1;
    }
    memcpy(c->data[turn] + (size_t)m->rank * bytes, mine, bytes);
    c->arrived[turn]++;
    while (c->arrived[turn] < c->n) {
        coop_pass(c);
        /* A rank that ended without coming will not come. */
        uint32_t ended = 0;
        for (uint32_t i = 0; i < c->n; i++) ended += c->members[i].done;
        if (ended && c->arrived[turn] < c->n) {
            snprintf(text, 256, "%u of %u ranks ended before this step", ended, c->n);
            return -1;
        }
    }
    memcpy(all, c->data[turn], (size_t)c->n * bytes);
    if (!--c->left[turn]) c->arrived[turn] = 0;
    return 0;
}

uccl_ep_bootstrap coop_bootstrap(coop *c, uint32_t rank, uint32_t size) {
    return (uccl_ep_bootstrap){sizeof(uccl_ep_bootstrap), rank, size, &c->members[rank], allgather};
}
