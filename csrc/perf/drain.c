/* SPDX-License-Identifier: Apache-2.0
 *
 * drain.c: see drain.h.
 *
 * Every command is compared with the one stamp that may come next from its producer, which costs a dozen instructions;
 * what is wrong with one that differs is looked at apart.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "drain.h"

#define SECOND 1000000000ull
#define ANSWER_NS (10 * SECOND) /* that a thread which runs may take for a pass */
#define IDLE_PASSES 1024u /* before the CPU is offered to others: on a machine with enough of them nobody takes it */
#define LINE __attribute__((aligned(128)))

struct ring {
    LINE drain_ring at;
    uint64_t taken;
    uint64_t first; /* taken when the drain was opened: what `echo` counts from */
    uint32_t index;
    uint32_t producers;
    uint32_t *next; /* [producers] sequence that each has to send, modulo 2^32 */
};

/* What a thread has seen of a run. */
struct books {
    uint64_t taken, batches, end;
    uint64_t faults[DRAIN_FAULTS];
    char text[200];
};

struct worker {
    LINE drain *owner;
    pthread_t thread;
    struct ring *rings;
    uint32_t n;
    uint64_t expect; /* commands of this run; the caller's, written before `epoch` */
    LINE struct books books;
    uint64_t target;           /* expect, of the run that it knows */
    LINE uint64_t known, done; /* epoch, and whether all of its run is there: the thread's */
    uint64_t answered;         /* the `ask` for which it left `shown` */
    struct books shown;
};

struct drain {
    drain_config config;
    struct ring *rings;
    struct worker *workers;
    uint32_t n, started;
    uint32_t *next;
    LINE uint64_t epoch, ask;
    uint32_t producers; /* of the epoch's run, all rings together */
    uint64_t sequence, commands, begin;
    bool stop;
};

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * SECOND + (uint64_t)now.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* -------------------------------------------------------------------------------------------------------- checking */

#define WORD0_FREE UCCL_EP_FIELD_MASK(LOCAL) /* what differs between the commands of a ring */
#define WORD1_FREE UCCL_EP_FIELD_MASK(REMOTE)

/* What is wrong with a command that is not the next one of its producer. It is then taken as it says it is. */
__attribute__((cold, noinline)) static void examine(struct worker *w, struct ring *r, uint64_t ticket,
                                                    uccl_ep_words words) {
    static const char *const names[] = {"malformed", "strange", "torn", "ahead of one that is missing", "doubled"};
    uccl_ep_command c;
    drain_fault fault;
    uint32_t sequence = 0, wanted = 0, producer = 0;
    if (uccl_ep_decode(words.word[0], words.word[1], &c) != UCCL_EP_OK) {
        fault = DRAIN_MALFORMED;
    } else {
        const uccl_ep_words base = perf_stamp(r->index, 0, 0);
        const uint64_t remote = UCCL_EP_FIELD_GET(words.word[1], REMOTE);
        sequence = (uint32_t)UCCL_EP_FIELD_GET(words.word[0], LOCAL);
        producer = (uint32_t)(remote >> PERF_SEQUENCE_BITS);
        if ((words.word[0] & ~WORD0_FREE) != base.word[0] || (words.word[1] & ~WORD1_FREE) != base.word[1] ||
            producer >= r->producers) {
            fault = DRAIN_STRANGE;
        } else if ((remote ^ sequence) & PERF_SEQUENCE_MASK) {
            fault = DRAIN_TORN;
        } else {
            wanted = r->next[producer];
            fault = (int32_t)(sequence - wanted) > 0 ? DRAIN_LOST : DRAIN_DOUBLED;
            if (fault == DRAIN_LOST) r->next[producer] = sequence + 1;
        }
    }
    struct books *b = &w->books;
    b->faults[fault] += fault == DRAIN_LOST ? sequence - wanted : 1;
    if (b->text[0]) return;
    snprintf(b->text, sizeof b->text,
             "ring %u, ticket %llu: words %016llx %016llx are %s: producer %u, number %u, and %u was to come", r->index,
             (unsigned long long)ticket, (unsigned long long)words.word[0], (unsigned long long)words.word[1],
             names[fault], producer, sequence, wanted);
}

/* Up to `most` commands of one ring, and not beyond its last slot: parity is then the same for all. */
static inline uint32_t take(struct worker *w, struct ring *r, uint32_t most) {
    const uccl_ep_words base = perf_stamp(r->index, 0, 0);
    const uint32_t slots = 1u << r->at.log2_slots, at = (uint32_t)r->taken & (slots - 1), producers = r->producers;
    const uint64_t parity = uccl_ep_ring_parity(r->at.log2_slots, r->taken);
    const uccl_ep_slot *const begin = &r->at.slots[at];
    const uccl_ep_slot *const end = begin + (most < slots - at ? most : slots - at), *slot = begin;
    uint32_t *const next = r->next;
    for (; slot != end; slot++) {
        uccl_ep_words words;
        if (!uccl_ep_slot_take(slot, parity, &words)) break;
        const uint32_t sequence = (uint32_t)UCCL_EP_FIELD_GET(words.word[0], LOCAL);
        const uint32_t remote = (uint32_t)UCCL_EP_FIELD_GET(words.word[1], REMOTE);
        const uint32_t producer = remote >> PERF_SEQUENCE_BITS;
        const uint64_t differs = ((words.word[0] & ~WORD0_FREE) ^ base.word[0]) |
                                 ((words.word[1] & ~WORD1_FREE) ^ base.word[1]) |
                                 ((remote ^ sequence) & PERF_SEQUENCE_MASK);
        if (__builtin_expect(differs || producer >= producers || next[producer] != sequence, 0)) {
            examine(w, r, r->taken + (uint64_t)(slot - begin), words);
            continue;
        }
        next[producer] = sequence + 1;
    }
    const uint32_t n = (uint32_t)(slot - begin);
    const uint64_t ticket = r->taken + n;
    if (!n) return 0;
    r->taken = ticket;
    uccl_ep_ring_counters *const c = r->at.counters;
    __atomic_store_n(&c->source, ticket, __ATOMIC_RELEASE);
    __atomic_store_n(&c->complete, ticket, __ATOMIC_RELEASE);
    __atomic_store_n(&c->tail, ticket, __ATOMIC_RELEASE);
    if (r->at.echo) __atomic_store_n(r->at.echo, ticket - r->first, __ATOMIC_RELEASE);
    return n;
}

/* --------------------------------------------------------------------------------------------------------- threads */

/* How many of `producers` post to ring `index` of n. */
static uint32_t producers_of(uint32_t producers, uint32_t index, uint32_t n) {
    return producers / n + (index < producers % n);
}

static void begin_run(struct worker *w, uint64_t epoch) {
    const drain *d = w->owner;
    for (uint32_t i = 0; i < w->n; i++) {
        struct ring *r = &w->rings[i];
        r->producers = producers_of(d->producers, r->index, d->n);
        for (uint32_t p = 0; p < r->producers; p++) r->next[p] = (uint32_t)d->sequence;
    }
    memset(&w->books, 0, sizeof w->books);
    w->target = w->expect;
    __atomic_store_n(&w->done, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&w->known, epoch, __ATOMIC_RELEASE);
}

static void pause_for(const drain *d, uint64_t ns) {
    const uint64_t end = now_ns() + ns;
    while (now_ns() < end && !__atomic_load_n(&d->stop, __ATOMIC_RELAXED)) relax();
}

static void *work(void *argument) {
    struct worker *w = argument;
    drain *d = w->owner;
    struct books *b = &w->books;
    const uint32_t most = d->config.batch;
    const uint64_t pause = d->config.pause_ns;
    uint64_t epoch = 0, answered = 0;
    uint32_t idle = 0;
    while (!__atomic_load_n(&d->stop, __ATOMIC_RELAXED)) {
        const uint64_t now = __atomic_load_n(&d->epoch, __ATOMIC_ACQUIRE);
        const uint64_t ask = __atomic_load_n(&d->ask, __ATOMIC_ACQUIRE);
        if (now != epoch) begin_run(w, epoch = now);
        uint64_t got = 0;
        for (uint32_t i = 0; i < w->n; i++) {
            const uint32_t n = take(w, &w->rings[i], most);
            got += n;
            b->batches += n > 0;
            if (n && pause) pause_for(d, pause);
        }
        if (got) {
            idle = 0;
            const bool before = b->taken < w->target;
            b->taken += got;
            if (before && b->taken >= w->target) {
                b->end = now_ns();
                __atomic_store_n(&w->done, 1, __ATOMIC_RELEASE);
            }
        } else if (++idle % IDLE_PASSES == 0) {
            sched_yield();
        } else {
            relax();
        }
        /* After a pass that began behind the question: what lay in the rings then is in the answer. */
        if (ask != answered) {
            w->shown = *b;
            __atomic_store_n(&w->answered, answered = ask, __ATOMIC_RELEASE);
        }
    }
    return NULL;
}

/* -------------------------------------------------------------------------------------------------- what is called */

static uccl_ep_status start(struct worker *w, const int32_t *cpu) {
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes)) return UCCL_EP_E_NO_MEMORY;
    int bad = 0;
    if (cpu) {
        cpu_set_t set;
        CPU_ZERO(&set);
        if (*cpu < 0 || *cpu >= CPU_SETSIZE)
            bad = 1;
        else
            CPU_SET((unsigned)*cpu, &set), bad = pthread_attr_setaffinity_np(&attributes, sizeof set, &set);
    }
    if (!bad) bad = pthread_create(&w->thread, &attributes, work, w);
    pthread_attr_destroy(&attributes);
    return bad ? UCCL_EP_E_SYSTEM : UCCL_EP_OK;
}

uccl_ep_status drain_open(const drain_config *config, const drain_ring *rings, uint32_t n, drain **out) {
    *out = NULL;
    if (!n || n > DRAIN_MAX_RINGS || !config->threads || config->threads > DRAIN_MAX_THREADS || config->threads > n ||
        !config->batch || !config->producers || config->producers > DRAIN_MAX_PRODUCERS)
        return UCCL_EP_E_RANGE;
    drain *d = aligned_alloc(128, sizeof *d);
    if (!d) return UCCL_EP_E_NO_MEMORY;
    *d = (drain){.config = *config, .n = n};
    d->rings = aligned_alloc(128, n * sizeof *d->rings);
    d->workers = aligned_alloc(128, config->threads * sizeof *d->workers);
    /* Whole lines a ring: two threads count in them at the same time. */
    const size_t line = ((size_t)config->producers + 31) / 32 * 32;
    d->next = aligned_alloc(128, n * line * sizeof *d->next);
    if (!d->rings || !d->workers || !d->next) {
        drain_close(d);
        return UCCL_EP_E_NO_MEMORY;
    }
    memset(d->workers, 0, config->threads * sizeof *d->workers);
    for (uint32_t i = 0; i < n; i++) {
        const uint64_t first = rings[i].counters->tail;
        d->rings[i] =
            (struct ring){.at = rings[i], .taken = first, .first = first, .index = i, .next = d->next + i * line};
    }
    for (uint32_t i = 0, at = 0; i < config->threads; i++) {
        struct worker *w = &d->workers[i];
        w->owner = d;
        w->rings = &d->rings[at];
        w->n = producers_of(n, i, config->threads);
        at += w->n;
        const uccl_ep_status status = start(w, config->cpus ? &config->cpus[i] : NULL);
        if (status != UCCL_EP_OK) {
            drain_close(d);
            return status;
        }
        d->started++;
    }
    d->config.cpus = NULL;
    *out = d;
    return UCCL_EP_OK;
}

void drain_close(drain *d) {
    if (!d) return;
    __atomic_store_n(&d->stop, true, __ATOMIC_RELAXED);
    for (uint32_t i = 0; i < d->started; i++) pthread_join(d->workers[i].thread, NULL);
    free(d->rings);
    free(d->workers);
    free(d->next);
    free(d);
}

static bool wait_for(const uint64_t *word, uint64_t value, uint64_t end) {
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) != value) {
        if (now_ns() > end) return false;
        sched_yield();
    }
    return true;
}

uccl_ep_status drain_expect(drain *d, uint32_t producers, uint64_t sequence, uint64_t commands) {
    if (!producers || !commands || producers_of(producers, 0, d->n) > d->config.producers) return UCCL_EP_E_RANGE;
    d->producers = producers;
    d->sequence = sequence;
    d->commands = commands;
    for (uint32_t i = 0; i < d->config.threads; i++) {
        struct worker *w = &d->workers[i];
        w->expect = 0;
        for (uint32_t k = 0; k < w->n; k++) w->expect += producers_of(producers, w->rings[k].index, d->n) * commands;
    }
    __atomic_store_n(&d->epoch, d->epoch + 1, __ATOMIC_RELEASE);
    for (uint32_t i = 0; i < d->config.threads; i++)
        if (!wait_for(&d->workers[i].known, d->epoch, now_ns() + ANSWER_NS)) return UCCL_EP_E_DEADLINE;
    d->begin = now_ns();
    return UCCL_EP_OK;
}

uccl_ep_status drain_finish(drain *d, uint64_t timeout_ns, drain_result *result) {
    const uint64_t end = now_ns() + timeout_ns;
    memset(result, 0, sizeof *result);
    bool all = true;
    for (uint32_t i = 0; i < d->config.threads; i++)
        if (d->workers[i].expect) all = wait_for(&d->workers[i].done, 1, end) && all;
    __atomic_store_n(&d->ask, d->ask + 1, __ATOMIC_RELEASE);
    uint64_t last = 0, expected = 0, wrong = 0;
    for (uint32_t i = 0; i < d->config.threads; i++) {
        const struct worker *w = &d->workers[i];
        if (!wait_for(&w->answered, d->ask, now_ns() + ANSWER_NS)) {
            snprintf(result->text, sizeof result->text, "thread %u does not answer", i);
            return UCCL_EP_E_DEADLINE;
        }
        const struct books *b = &w->shown;
        result->commands += b->taken;
        result->batches += b->batches;
        expected += w->expect;
        if (b->taken > w->expect) result->faults[DRAIN_TOO_MANY] += b->taken - w->expect;
        if (w->expect && b->end > last) last = b->end;
        for (uint32_t f = 0; f < DRAIN_FAULTS; f++) result->faults[f] += b->faults[f];
        if (b->text[0] && !result->text[0]) snprintf(result->text, sizeof result->text, "%s", b->text);
    }
    for (uint32_t f = 0; f < DRAIN_FAULTS; f++) wrong += result->faults[f];
    result->ns = all && last > d->begin ? last - d->begin : 0;
    result->missing = expected > result->commands ? expected - result->commands : 0;
    if (wrong) {
        if (!result->text[0])
            snprintf(result->text, sizeof result->text, "%llu commands more than were to come",
                     (unsigned long long)result->faults[DRAIN_TOO_MANY]);
        return UCCL_EP_E_MALFORMED;
    }
    if (all) return UCCL_EP_OK;
    snprintf(result->text, sizeof result->text, "%llu of %llu commands did not come within %.1f s",
             (unsigned long long)result->missing, (unsigned long long)expected, (double)timeout_ns / 1e9);
    return UCCL_EP_E_DEADLINE;
}

uccl_ep_status drain_ping(uint64_t *word, const uint64_t *answer, uint64_t n, uint64_t timeout_ns, uint64_t *samples) {
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t begin = now_ns();
        const uint64_t sent = __atomic_add_fetch(word, 1, __ATOMIC_ACQ_REL);
        uint64_t now = begin;
        for (uint32_t turns = 1; __atomic_load_n(answer, __ATOMIC_ACQUIRE) != sent; turns++) {
            if (turns % 64) {
                relax();
                continue;
            }
            now = now_ns();
            if (now - begin > timeout_ns) return UCCL_EP_E_DEADLINE;
            if (turns % IDLE_PASSES == 0) sched_yield();
        }
        samples[i] = now_ns() - begin;
    }
    return UCCL_EP_OK;
}
