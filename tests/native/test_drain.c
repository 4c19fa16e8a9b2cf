/* SPDX-License-Identifier: Apache-2.0
 *
 * test_drain.c: the consumer that `uccl-ep perf gpu` measures against, fed by threads of the CPU: it takes all that is
 * right, and says what is wrong.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>

#include "perf/drain.h"
#include "testing.h"

#define SECOND 1000000000ull
#define SHORT (SECOND / 20)
#define MAX_RINGS 8u

/* Rings whose producers are threads. */
struct world {
    uccl_ep_ring ring[MAX_RINGS];
    uccl_ep_ring_counters *counters;
    drain_ring view[MAX_RINGS];
    uint32_t n;
    drain *drain;
};

static void *zeroed(size_t bytes) {
    void *memory = aligned_alloc(128, (bytes + 127) / 128 * 128);
    CHECK(memory, "%zu bytes", bytes);
    return memset(memory, 0, bytes);
}

static struct world world_open(uint32_t n, uint32_t log2_slots, uint64_t first, drain_config config) {
    struct world w = {.n = n, .counters = zeroed(n * sizeof *w.counters)};
    for (uint32_t i = 0; i < n; i++) {
        uccl_ep_slot *slots = zeroed(sizeof *slots << log2_slots);
        uccl_ep_ring_producer *producer = zeroed(sizeof *producer);
        uccl_ep_ring_format(slots, log2_slots, first);
        producer->head = producer->tail_cache = first;
        w.counters[i] = (uccl_ep_ring_counters){.tail = first, .source = first, .complete = first};
        w.ring[i] = (uccl_ep_ring){.log2_slots = log2_slots,
                                   .first_ticket = first,
                                   .slots = slots,
                                   .producer = producer,
                                   .counters = &w.counters[i]};
        w.view[i] = (drain_ring){.slots = slots, .counters = &w.counters[i], .log2_slots = log2_slots};
    }
    CHECK_EQ(drain_open(&config, w.view, n, &w.drain), UCCL_EP_OK);
    return w;
}

static void world_close(struct world *w) {
    drain_close(w->drain);
    for (uint32_t i = 0; i < w->n; i++) {
        free(w->ring[i].slots);
        free(w->ring[i].producer);
    }
    free(w->counters);
}

static void post(const uccl_ep_ring *ring, uccl_ep_words words) {
    const uint64_t ticket = uccl_ep_ring_reserve(ring, 1), end = test_now_ns() + 60 * SECOND;
    while (!uccl_ep_ring_has_space(ring, ticket, 1)) {
        CHECK(test_now_ns() < end, "no space for ticket %" PRIu64, ticket);
        sched_yield();
    }
    uccl_ep_ring_store(ring, ticket, words);
}

/* --------------------------------------------------------------------------------------------------- what is right */

struct producer {
    struct world *world;
    uint32_t index;
    uint64_t sequence, commands;
};

static void *produce(void *argument) {
    const struct producer *p = argument;
    const uint32_t ring = p->index % p->world->n;
    for (uint64_t i = 0; i < p->commands; i++)
        post(&p->world->ring[ring], perf_stamp(ring, p->index / p->world->n, p->sequence + i));
    return NULL;
}

static void run(struct world *w, uint32_t producers, uint64_t sequence, uint64_t commands) {
    pthread_t threads[16];
    struct producer argument[16];
    CHECK_EQ(drain_expect(w->drain, producers, sequence, commands), UCCL_EP_OK);
    for (uint32_t i = 0; i < producers; i++) {
        argument[i] = (struct producer){w, i, sequence, commands};
        CHECK_EQ(pthread_create(&threads[i], NULL, produce, &argument[i]), 0);
    }
    drain_result result;
    const uccl_ep_status status = drain_finish(w->drain, 60 * SECOND, &result);
    CHECK(status == UCCL_EP_OK, "%s", result.text);
    for (uint32_t i = 0; i < producers; i++) pthread_join(threads[i], NULL);
    CHECK_EQ(result.commands, producers * commands);
    CHECK_EQ(result.missing, 0);
    CHECK(result.ns > 0 && result.batches > 0 && result.batches <= result.commands, "%" PRIu64 " ns", result.ns);
}

/* Several runs on the same rings: numbers go on, laps pass, tickets and numbers wrap. */
static void all_that_is_right_is_taken(void) {
    test_rng rng = test_rng_at(0);
    for (uint32_t turn = 0; turn < 6; turn++) {
        const uint32_t n = 1 + (uint32_t)test_below(&rng, MAX_RINGS), threads = 1 + (uint32_t)test_below(&rng, n);
        const uint32_t producers = 1 + (uint32_t)test_below(&rng, 8), log2_slots = 1 + (uint32_t)test_below(&rng, 8);
        struct world w =
            world_open(n, log2_slots, turn % 2 ? -(uint64_t)100 : 0,
                       (drain_config){.threads = threads, .batch = 1 + (uint32_t)test_below(&rng, 64), .producers = 8});
        uint64_t sequence = turn % 2 ? (1ull << 32) - 50 : 0;
        for (uint32_t i = 0; i < 3; i++) {
            const uint64_t commands = test_scaled(3000);
            run(&w, producers, sequence, commands);
            sequence += commands;
        }
        world_close(&w);
    }
}

/* Time counts from the question on: a thread that comes late, and then finds all at once, does not look fast. */
static void what_lies_there_has_taken_its_time(void) {
    struct world w = world_open(1, 6, 0, (drain_config){.threads = 1, .batch = 64, .producers = 1});
    CHECK_EQ(drain_expect(w.drain, 1, 0, 64), UCCL_EP_OK);
    const uint64_t begin = test_now_ns();
    while (test_now_ns() - begin < 2000000) sched_yield();
    for (uint32_t i = 0; i < 64; i++) post(&w.ring[0], perf_stamp(0, 0, i));
    drain_result result;
    CHECK_EQ(drain_finish(w.drain, 60 * SECOND, &result), UCCL_EP_OK);
    CHECK(result.ns >= 2000000, "%" PRIu64 " ns", result.ns);
    world_close(&w);
}

static void a_slow_one_loses_nothing(void) {
    struct world w = world_open(1, 1, 0, (drain_config){.threads = 1, .batch = 1, .producers = 2, .pause_ns = 20000});
    const uint64_t begin = test_now_ns(), commands = test_scaled(1000);
    run(&w, 2, 0, commands);
    CHECK(test_now_ns() - begin >= (2 * commands - 1) * 20000, "a pause of 20 us after each");
    world_close(&w);
}

/* The stamp is a command like any other. */
static void a_stamp_is_legal(void) {
    uccl_ep_command c;
    const uccl_ep_words words = perf_stamp(31, 4095, 0xfedcba98);
    CHECK_EQ(uccl_ep_decode(words.word[0], words.word[1], &c), UCCL_EP_OK);
    CHECK_EQ(c.op, UCCL_EP_OP_PUT);
    CHECK_EQ(c.target, 31);
    CHECK_EQ(c.bytes, PERF_PAYLOAD);
    CHECK_EQ(c.local, 0xfedcba98ull * 16);
    CHECK_EQ(c.remote, ((4095ull << PERF_SEQUENCE_BITS) + (0xfedcba98 & PERF_SEQUENCE_MASK)) * 16);
    uccl_ep_words again;
    CHECK_EQ(uccl_ep_encode(&c, &again), UCCL_EP_OK);
    CHECK(again.word[0] == words.word[0] && again.word[1] == words.word[1], "the codec makes the same of it");
    const uccl_ep_words put = perf_put(4096);
    CHECK_EQ(uccl_ep_decode(put.word[0], put.word[1], &c), UCCL_EP_OK);
    CHECK(c.op == UCCL_EP_OP_PUT && !c.target && c.local == 4096 && c.remote == 4096 && c.bytes == PERF_PAYLOAD, "put");
}

/* --------------------------------------------------------------------------------------------------- what is wrong */

#define COMMANDS 10u

/* One producer of ring 1 of 2, which is to post numbers 0 .. 9; `posts` are what it posts. */
static drain_result wrong(const uccl_ep_words *posts, uint32_t n, uccl_ep_status expected) {
    struct world w = world_open(2, 6, 0, (drain_config){.threads = 2, .batch = 64, .producers = 2});
    CHECK_EQ(drain_expect(w.drain, 2, 0, COMMANDS), UCCL_EP_OK);
    for (uint32_t i = 0; i < COMMANDS; i++) post(&w.ring[0], perf_stamp(0, 0, i));
    for (uint32_t i = 0; i < n; i++) post(&w.ring[1], posts[i]);
    drain_result result;
    CHECK_EQ(drain_finish(w.drain, SHORT, &result), expected);
    world_close(&w);
    return result;
}

static void numbers(uccl_ep_words *posts) {
    for (uint32_t i = 0; i < COMMANDS; i++) posts[i] = perf_stamp(1, 0, i);
}

static void all_that_is_wrong_is_named(void) {
    uccl_ep_words posts[COMMANDS + 1];
    numbers(posts);
    CHECK_EQ(wrong(posts, COMMANDS, UCCL_EP_OK).commands, 2 * COMMANDS);

    posts[4].word[1] = posts[3].word[1];
    drain_result r = wrong(posts, COMMANDS, UCCL_EP_E_MALFORMED);
    CHECK(r.faults[DRAIN_TORN] == 1 && strstr(r.text, "torn") && strstr(r.text, "ring 1, ticket 4"), "%s", r.text);

    numbers(posts);
    posts[4] = posts[3];
    r = wrong(posts, COMMANDS, UCCL_EP_E_MALFORMED);
    CHECK(r.faults[DRAIN_DOUBLED] == 1 && strstr(r.text, "doubled"), "%s", r.text);
    CHECK_EQ(r.faults[DRAIN_LOST], 1);

    numbers(posts);
    for (uint32_t i = 4; i + 1 < COMMANDS; i++) posts[i] = posts[i + 1];
    r = wrong(posts, COMMANDS - 1, UCCL_EP_E_MALFORMED);
    CHECK(r.faults[DRAIN_LOST] == 1 && r.missing == 1 && strstr(r.text, "missing"), "%s", r.text);
    CHECK_EQ(r.faults[DRAIN_DOUBLED], 0);

    numbers(posts);
    const uccl_ep_words third = posts[3];
    posts[3] = posts[4], posts[4] = third;
    r = wrong(posts, COMMANDS, UCCL_EP_E_MALFORMED);
    CHECK(r.faults[DRAIN_LOST] == 1 && r.faults[DRAIN_DOUBLED] == 1, "%s", r.text);

    numbers(posts);
    posts[4].word[0] = 0;
    r = wrong(posts, COMMANDS, UCCL_EP_E_MALFORMED);
    CHECK(r.faults[DRAIN_MALFORMED] == 1 && strstr(r.text, "malformed"), "%s", r.text);

    numbers(posts);
    posts[4] = perf_stamp(0, 0, 4);
    r = wrong(posts, COMMANDS, UCCL_EP_E_MALFORMED);
    CHECK(r.faults[DRAIN_STRANGE] == 1 && strstr(r.text, "strange"), "%s", r.text);

    numbers(posts);
    posts[4] = perf_stamp(1, 1, 4);
    CHECK_EQ(wrong(posts, COMMANDS, UCCL_EP_E_MALFORMED).faults[DRAIN_STRANGE], 1);

    numbers(posts);
    posts[COMMANDS] = perf_stamp(1, 0, COMMANDS);
    r = wrong(posts, COMMANDS + 1, UCCL_EP_E_MALFORMED);
    CHECK(r.faults[DRAIN_TOO_MANY] == 1 && r.missing == 0, "%s", r.text);

    numbers(posts);
    r = wrong(posts, COMMANDS - 2, UCCL_EP_E_DEADLINE);
    CHECK(r.missing == 2 && strstr(r.text, "2 of 20 commands"), "%s", r.text);
    CHECK_EQ(r.ns, 0);
}

/* Half a command is none; and after a run that failed, its rest can still come. */
static void half_a_command_is_not_taken(void) {
    for (uint32_t half = 0; half < 2; half++) {
        struct world w = world_open(1, 4, 0, (drain_config){.threads = 1, .batch = 64, .producers = 1});
        CHECK_EQ(drain_expect(w.drain, 1, 0, 1), UCCL_EP_OK);
        const uint64_t ticket = uccl_ep_ring_reserve(&w.ring[0], 1), parity = uccl_ep_ring_parity(4, ticket);
        const uccl_ep_words words = perf_stamp(0, 0, 0);
        uccl_ep_slot *slot = &w.ring[0].slots[ticket];
        __atomic_store_n(&slot->word[half], words.word[half] | parity, __ATOMIC_RELEASE);
        drain_result result;
        CHECK_EQ(drain_finish(w.drain, SHORT, &result), UCCL_EP_E_DEADLINE);
        CHECK_EQ(result.commands, 0);
        __atomic_store_n(&slot->word[!half], words.word[!half] | parity, __ATOMIC_RELEASE);
        CHECK_EQ(drain_finish(w.drain, 60 * SECOND, &result), UCCL_EP_OK);
        world_close(&w);
    }
}

static void what_cannot_be_is_refused(void) {
    static uccl_ep_ring_counters counters;
    static uccl_ep_slot slots[2];
    const drain_ring ring = {.slots = slots, .counters = &counters, .log2_slots = 1};
    const int32_t nowhere = -1;
    const struct {
        drain_config config;
        uccl_ep_status status;
    } cases[] = {{{.threads = 0, .batch = 1, .producers = 1}, UCCL_EP_E_RANGE},
                 {{.threads = 2, .batch = 1, .producers = 1}, UCCL_EP_E_RANGE},
                 {{.threads = 1, .batch = 0, .producers = 1}, UCCL_EP_E_RANGE},
                 {{.threads = 1, .batch = 1, .producers = DRAIN_MAX_PRODUCERS + 1}, UCCL_EP_E_RANGE},
                 {{.threads = 1, .batch = 1, .producers = 1, .cpus = &nowhere}, UCCL_EP_E_SYSTEM}};
    drain *d;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_EQ(drain_open(&cases[i].config, &ring, 1, &d), cases[i].status);
        CHECK(!d, "case %zu", i);
    }
    CHECK_EQ(drain_open(&(drain_config){.threads = 1, .batch = 1, .producers = 1}, &ring, 1, &d), UCCL_EP_OK);
    CHECK_EQ(drain_expect(d, 2, 0, 1), UCCL_EP_E_RANGE);
    drain_close(d);
}

/* ------------------------------------------------------------------------------------------------------------ ping */

struct pair {
    uint64_t word, answer, until;
};

static void *answer(void *argument) {
    struct pair *p = argument;
    for (uint64_t i = 1; i <= p->until; i++) {
        const uint64_t end = test_now_ns() + 60 * SECOND;
        while (__atomic_load_n(&p->word, __ATOMIC_ACQUIRE) < i) {
            CHECK(test_now_ns() < end, "ping %" PRIu64 " did not come", i);
            sched_yield();
        }
        __atomic_store_n(&p->answer, i, __ATOMIC_RELEASE);
    }
    return NULL;
}

static void every_ping_is_answered_or_missed(void) {
    const uint64_t n = test_scaled(1000);
    struct pair p = {.until = n};
    uint64_t *samples = calloc(n, sizeof *samples);
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, answer, &p), 0);
    CHECK_EQ(drain_ping(&p.word, &p.answer, n, 60 * SECOND, samples), UCCL_EP_OK);
    pthread_join(thread, NULL);
    CHECK_EQ(p.word, n);
    for (uint64_t i = 0; i < n; i++) CHECK(samples[i] > 0, "sample %" PRIu64, i);
    CHECK_EQ(drain_ping(&p.word, &p.answer, 1, SHORT, samples), UCCL_EP_E_DEADLINE);
    free(samples);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 300);
    a_stamp_is_legal();
    all_that_is_right_is_taken();
    what_lies_there_has_taken_its_time();
    a_slow_one_loses_nothing();
    all_that_is_wrong_is_named();
    half_a_command_is_not_taken();
    what_cannot_be_is_refused();
    every_ping_is_answered_or_missed();
    return test_end();
}
