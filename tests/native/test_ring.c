/* SPDX-License-Identifier: Apache-2.0
 *
 * test_ring.c: many producers, one consumer, real threads: nothing lost, doubled, reordered or torn, at any ticket.
 *
 * Real threads meet the orders that this machine shows. Those that the language allows are in test_ring_model.c.
 *
 * A command here is its producer and sequence number in word 0 and a hash of word 0 in word 1, so that words of two
 * commands are never taken for one. Beside each slot lies a plain word, written before the store and read before the
 * tail moves on: ThreadSanitizer sees by it whether posting, taking and reuse of a slot are ordered as ring.h says.
 */
#include "testing.h"
#include <pthread.h>
#include <sched.h>
#include <uccl_ep/ring.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define ALL 0x7fffffffffffffffull /* all bits of a word but the parity */
#define MAX_PRODUCERS 32u
#define PATIENCE_NS 60000000000ull /* no wait without a deadline; far above any scheduling delay */

typedef struct fixture {
    uccl_ep_ring ring;
    uccl_ep_ring_producer producer;
    uint64_t gave_up;
    uccl_ep_ring_counters counters;
    uccl_ep_slot *slots;
    uint64_t *beside; /* one plain word a slot */
} fixture;

static fixture *ring_open(uint32_t log2_slots, uint64_t first_ticket) {
    fixture *f = calloc(1, sizeof(*f));
    CHECK(f, "out of memory");
    const size_t slots = (size_t)1 << log2_slots;
    f->slots = malloc(slots * sizeof(*f->slots));
    f->beside = calloc(slots, sizeof(*f->beside));
    CHECK(f->slots && f->beside, "out of memory");
    memset(f->slots, 0x5a, slots * sizeof(*f->slots)); /* format must not count on zeros */
    uccl_ep_ring_format(f->slots, log2_slots, first_ticket);
    f->producer.head = f->producer.tail_cache = f->counters.tail = first_ticket;
    f->counters.failed = UCCL_EP_NO_TICKET;
    f->ring = (uccl_ep_ring){.codec_version = UCCL_EP_CODEC_VERSION,
                             .log2_slots = log2_slots,
                             .granularity = UCCL_EP_GRANULARITY_COARSE,
                             .first_ticket = first_ticket,
                             .slots = f->slots,
                             .producer = &f->producer,
                             .gave_up = &f->gave_up,
                             .counters = &f->counters};
    return f;
}

static void ring_close(fixture *f) {
    free(f->slots);
    free(f->beside);
    free(f);
}

static uint64_t slot_of(const fixture *f, uint64_t ticket) {
    return ticket & (uccl_ep_ring_slots(&f->ring) - 1);
}

static uccl_ep_words words_of(uint64_t who, uint64_t sequence) {
    const uint64_t word0 = who << 56 | sequence;
    return (uccl_ep_words){{word0, (word0 * 0x9e3779b97f4a7c15ull ^ word0 >> 7) & ALL}};
}

static void put(fixture *f, uint64_t ticket, uint64_t who, uint64_t sequence) {
    f->beside[slot_of(f, ticket)] = ticket ^ who << 56;
    uccl_ep_ring_store(&f->ring, ticket, words_of(who, sequence));
}

/* 1 and the command if `ticket` is there. Checks both words against each other, the parity and the word beside. */
static int take(fixture *f, uint64_t ticket, uint64_t *who, uint64_t *sequence) {
    uccl_ep_words words;
    if (!uccl_ep_ring_take(f->slots, f->ring.log2_slots, ticket, &words)) return 0;
    const uint64_t parity = uccl_ep_ring_parity(f->ring.log2_slots, ticket);
    *who = (words.word[0] & ALL) >> 56;
    *sequence = words.word[0] & ((1ull << 56) - 1);
    const uccl_ep_words expected = words_of(*who, *sequence);
    CHECK(words.word[0] == (expected.word[0] | parity) && words.word[1] == (expected.word[1] | parity),
          "ticket %" PRIu64 " is torn: %016" PRIx64 " %016" PRIx64, ticket, words.word[0], words.word[1]);
    CHECK_EQ(f->beside[slot_of(f, ticket)], ticket ^ *who << 56);
    return 1;
}

static void publish_tail(fixture *f, uint64_t tail) {
    __atomic_store_n(&f->counters.tail, tail, __ATOMIC_RELEASE);
}

/* Back off until the deadline: spin a little, then give the core away. */
typedef struct patience {
    uint64_t deadline;
    uint32_t turns;
} patience;

static void be_patient(patience *p, const char *what, uint64_t ticket) {
    if (++p->turns < 64) return;
    sched_yield();
    if (p->turns % 1024) return;
    const uint64_t now = test_now_ns();
    if (!p->deadline) p->deadline = now + PATIENCE_NS;
    CHECK(now < p->deadline, "%s ticket %" PRIu64 ": no progress", what, ticket);
}

/* ----------------------------------------------------------------------------------------------------- many threads */

typedef struct load {
    fixture *f;
    uint64_t who, commands, largest_batch;
    test_rng rng;
} load;

static void *produce(void *argument) {
    load *l = argument;
    const uint64_t slots = uccl_ep_ring_slots(&l->f->ring);
    const uint64_t usual = slots < 32 ? slots : 32;
    for (uint64_t sequence = 0; sequence < l->commands;) {
        uint64_t n = 1;
        const uint64_t kind = test_below(&l->rng, 1024);
        if (kind == 0)
            n = slots;
        else if (kind < 512)
            n = 2 + test_below(&l->rng, usual - 1);
        if (n > l->commands - sequence) n = l->commands - sequence;
        if (n > l->largest_batch) l->largest_batch = n;
        const uint64_t first = uccl_ep_ring_reserve(&l->f->ring, n);
        patience p = {0, 0};
        while (!uccl_ep_ring_has_space(&l->f->ring, first, n)) be_patient(&p, "waiting for space for", first);
        for (uint64_t i = 0; i < n; i++) put(l->f, first + i, l->who, sequence++);
    }
    return NULL;
}

static void run_threads(uint32_t log2_slots, uint64_t first_ticket, uint64_t producers, uint64_t commands, int say) {
    fixture *f = ring_open(log2_slots, first_ticket);
    pthread_t threads[MAX_PRODUCERS];
    load loads[MAX_PRODUCERS];
    uint64_t next[MAX_PRODUCERS] = {0};
    test_rng rng = test_rng_at(1000);
    CHECK(producers <= MAX_PRODUCERS, "too many producers");
    const uint64_t start = test_now_ns();
    for (uint64_t i = 0; i < producers; i++) {
        const uint64_t share = commands / producers + (i < commands % producers);
        loads[i] = (load){f, i, share, 0, test_rng_at(i)};
        CHECK_EQ(pthread_create(&threads[i], NULL, produce, &loads[i]), 0);
    }

    /* The proxy's way: a bounded drain, then one store of the tail; what was taken is published before it idles. */
    uint64_t published = first_ticket, ticket = first_ticket, drains = 0;
    while (ticket - first_ticket < commands) {
        const uint64_t budget = 1 + test_below(&rng, uccl_ep_ring_slots(&f->ring));
        patience p = {0, 0};
        uint64_t who, sequence;
        while (ticket - published < budget) {
            if (!take(f, ticket, &who, &sequence)) {
                if (ticket != published) break;
                be_patient(&p, "waiting for the post of", ticket);
                continue;
            }
            CHECK(who < producers, "producer %" PRIu64 " is none", who);
            CHECK_EQ(sequence, next[who]); /* neither lost, doubled nor overtaken */
            next[who]++;
            ticket++;
        }
        publish_tail(f, published = ticket);
        drains++;
    }
    const uint64_t ns = test_now_ns() - start;

    uint64_t largest = 0, who, sequence;
    for (uint64_t i = 0; i < producers; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
        CHECK_EQ(next[i], loads[i].commands);
        if (loads[i].largest_batch > largest) largest = loads[i].largest_batch;
    }
    CHECK_EQ(f->producer.head, first_ticket + commands);
    CHECK(!take(f, ticket, &who, &sequence), "a command that nobody posted");
    if (say) {
        printf("%" PRIu64 " commands, %" PRIu64 " producers, %" PRIu64
               " slots: %.2f s, %.1f M/s; largest batch %" PRIu64 ", %.1f commands a drain\n",
               commands, producers, uccl_ep_ring_slots(&f->ring), (double)ns / 1e9, (double)commands * 1e3 / (double)ns,
               largest, (double)commands / (double)drains);
    }
    ring_close(f);
}

/* ------------------------------------------------------------------------------------ first tickets near every wrap */

/* One thread plays both sides, so that every step can be looked at: before, after, and the slots of others. */
static void walk(uint32_t log2_slots, uint64_t first_ticket, uint64_t laps, test_rng *rng) {
    fixture *f = ring_open(log2_slots, first_ticket);
    const uint64_t slots = uccl_ep_ring_slots(&f->ring), end = first_ticket + laps * slots;
    uint64_t head = first_ticket, tail = first_ticket, who, sequence;
    for (uint64_t i = 0; i < slots; i++)
        CHECK(!take(f, first_ticket + i, &who, &sequence), "ticket %" PRIu64 " is taken before it was stored",
              first_ticket + i);
    while (tail != end) {
        const uint64_t room = slots - (head - tail), left = end - head;
        if (left && test_below(rng, 2)) {
            /* Ask for anything up to the whole ring: there is space exactly if it fits. */
            const uint64_t most = left < slots ? left : slots, n = 1 + test_below(rng, most);
            CHECK_EQ(uccl_ep_ring_has_space(&f->ring, head, n), n <= room);
            if (n > room) continue;
            CHECK_EQ(uccl_ep_ring_reserve(&f->ring, n), head);
            /* Stored in any order: lanes do not take turns. */
            const uint64_t turn = test_below(rng, n);
            for (uint64_t i = 0; i < n; i++) {
                const uint64_t ticket = head + (i + turn) % n;
                CHECK(!take(f, ticket, &who, &sequence), "ticket %" PRIu64 " is taken before it was stored", ticket);
                put(f, ticket, 1, ticket & 0xffffff);
                CHECK(take(f, ticket, &who, &sequence), "ticket %" PRIu64 " is stored and not seen", ticket);
                CHECK(!take(f, ticket + slots, &who, &sequence), "ticket %" PRIu64 " is seen a lap early",
                      ticket + slots);
            }
            head += n;
        } else if (head != tail) {
            for (uint64_t n = 1 + test_below(rng, head - tail); n; n--, tail++) {
                CHECK(take(f, tail, &who, &sequence), "ticket %" PRIu64 " is lost", tail);
                CHECK_EQ(sequence, tail & 0xffffff);
            }
            publish_tail(f, tail);
        }
    }
    CHECK_EQ(f->producer.head, end);
    ring_close(f);
}

static void test_wraps(test_rng *rng) {
    static const uint32_t sizes[] = {1, 2, 4, 11};
    static const uint64_t wraps[] = {0, 1ull << 8, 1ull << 16, 1ull << 24, 1ull << 32, 1ull << 63}; /* 0: 2^64 */
    uint64_t walks = 0, runs = 0;
    for (size_t s = 0; s < COUNT(sizes); s++) {
        const uint64_t slots = 1ull << sizes[s];
        for (size_t w = 0; w < COUNT(wraps); w++) {
            /* Before, at and after the wrap, aligned with a lap and not, in odd and even laps. */
            const uint64_t before[] = {0, 1, 2, slots - 1, slots, slots + 1, 2 * slots - 1, 2 * slots, 2 * slots + 1,
                                       5};
            for (size_t b = 0; b < COUNT(before); b++, walks++) walk(sizes[s], wraps[w] - before[b], 6, rng);
            run_threads(sizes[s], wraps[w] - 3 * slots / 2, 3, test_scaled(sizes[s] < 11 ? 20000 : 200000), 0);
            runs++;
        }
    }
    printf("first tickets around 2^8, 2^16, 2^24, 2^32, 2^63, 2^64: %" PRIu64 " walks, %" PRIu64
           " runs of 3 producers\n",
           walks, runs);
}

/* ----------------------------------------------------------------------------------------------- the consumer stops */

typedef struct impatient {
    fixture *f;
    uint64_t who, polls, stored, given_up;
    test_rng rng;
} impatient;

/* Posts until there is no space for `polls` looks, and then gives up the tickets that it had reserved. */
static void *produce_until_full(void *argument) {
    impatient *p = argument;
    while (!p->given_up) {
        const uint64_t n = 1 + test_below(&p->rng, uccl_ep_ring_slots(&p->f->ring) < 3 ? 2 : 3);
        const uint64_t first = uccl_ep_ring_reserve(&p->f->ring, n);
        uint64_t polls = 0;
        while (polls < p->polls && !uccl_ep_ring_has_space(&p->f->ring, first, n)) polls++;
        if (polls == p->polls) {
            p->given_up = n;
            __atomic_store_n(p->f->ring.gave_up, 1, __ATOMIC_RELEASE);
            break;
        }
        for (uint64_t i = 0; i < n; i++) put(p->f, first + i, p->who, p->stored++);
    }
    return NULL;
}

/* PRG-3: nothing is overwritten however often producers try, and what is stored before the hole can all be taken. */
static void test_stopped_consumer(uint32_t log2_slots, uint64_t first_ticket) {
    enum { PRODUCERS = 4 };
    fixture *f = ring_open(log2_slots, first_ticket);
    const uint64_t slots = uccl_ep_ring_slots(&f->ring);
    pthread_t threads[PRODUCERS];
    impatient producers[PRODUCERS];
    uint64_t next[PRODUCERS] = {0}, stored = 0, given_up = 0, who, sequence;
    for (uint64_t i = 0; i < PRODUCERS; i++) {
        producers[i] = (impatient){f, i, test_scaled(100000), 0, 0, test_rng_at(i)};
        CHECK_EQ(pthread_create(&threads[i], NULL, produce_until_full, &producers[i]), 0);
    }
    for (uint64_t i = 0; i < PRODUCERS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
        CHECK(producers[i].given_up, "producer %" PRIu64 " found space in a full ring", i);
        stored += producers[i].stored;
        given_up += producers[i].given_up;
    }
    /* Batches are posted whole or not at all, so up to two slots may have been left. */
    CHECK(stored <= slots && stored + 2 >= slots, "%" PRIu64 " stored in %" PRIu64 " slots", stored, slots);
    CHECK_EQ(f->producer.head, first_ticket + stored + given_up);
    CHECK_EQ(f->gave_up, 1);

    /* Later tickets find no space past the hole, so the stored ones are a prefix: each is there, once, in order. */
    for (uint64_t i = 0; i < stored; i++) {
        CHECK(take(f, first_ticket + i, &who, &sequence), "ticket %" PRIu64 " was overwritten", first_ticket + i);
        CHECK(who < PRODUCERS, "producer %" PRIu64 " is none", who);
        CHECK_EQ(sequence, next[who]);
        next[who]++;
    }
    const uint64_t hole = first_ticket + stored;
    publish_tail(f, hole);
    CHECK(!take(f, hole, &who, &sequence), "a ticket that was given up is taken");

    /* Whoever had not heard of it posts behind the hole, up to a ring's length: the hole stays one, also laps later. */
    uint64_t behind = uccl_ep_ring_reserve(&f->ring, 1);
    for (; behind - hole < slots; behind = uccl_ep_ring_reserve(&f->ring, 1)) {
        CHECK(uccl_ep_ring_has_space(&f->ring, behind, 1), "ticket %" PRIu64, behind);
        put(f, behind, 7, 0);
        CHECK(!take(f, hole, &who, &sequence), "ticket %" PRIu64 " is taken for %" PRIu64, behind, hole);
    }
    for (uint64_t i = 0; i < 3 * slots; i++)
        CHECK(!uccl_ep_ring_has_space(&f->ring, behind + i, 1), "space behind a hole, %" PRIu64, behind + i);
    CHECK(!take(f, hole, &who, &sequence), "a ticket that was given up is taken");
    ring_close(f);
}

/* The single steps of a full ring: only the published tail makes space, one slot for each ticket that it passes. */
static void test_full_ring(uint32_t log2_slots, uint64_t first_ticket) {
    fixture *f = ring_open(log2_slots, first_ticket);
    const uint64_t slots = uccl_ep_ring_slots(&f->ring);
    uint64_t who, sequence;
    CHECK(!uccl_ep_ring_has_space(&f->ring, first_ticket, slots + 1), "more than the ring holds");
    CHECK_EQ(uccl_ep_ring_reserve(&f->ring, slots), first_ticket);
    CHECK(uccl_ep_ring_has_space(&f->ring, first_ticket, slots), "an empty ring takes as many as it has slots");
    for (uint64_t i = 0; i < slots; i++) put(f, first_ticket + i, 1, i);
    const uint64_t waiting = uccl_ep_ring_reserve(&f->ring, slots);
    CHECK_EQ(waiting, first_ticket + slots);
    for (uint64_t taken = 0; taken < slots; taken++) {
        CHECK(!uccl_ep_ring_has_space(&f->ring, waiting, taken + 1), "space before ticket %" PRIu64 " is taken", taken);
        CHECK(take(f, first_ticket + taken, &who, &sequence), "ticket %" PRIu64, taken);
        CHECK_EQ(sequence, taken);
        CHECK(!uccl_ep_ring_has_space(&f->ring, waiting, taken + 1), "space before the tail passed %" PRIu64, taken);
        publish_tail(f, first_ticket + taken + 1);
        CHECK(uccl_ep_ring_has_space(&f->ring, waiting, taken + 1), "no space for %" PRIu64, taken + 1);
        CHECK(!uccl_ep_ring_has_space(&f->ring, waiting, taken + 2), "space for %" PRIu64, taken + 2);
    }
    /* An old tail in the cache, which a slow producer may put there, costs another look and gives nothing away. */
    f->producer.tail_cache = first_ticket;
    CHECK(!uccl_ep_ring_has_space(&f->ring, waiting, slots + 1), "more than the ring holds");
    f->producer.tail_cache = first_ticket;
    CHECK(uccl_ep_ring_has_space(&f->ring, waiting, slots), "an old cached tail hides space");
    CHECK_EQ(f->producer.tail_cache, waiting);
    ring_close(f);
}

/* Whichever word of a slot arrives first, in whichever lap: a command is taken when both are there. */
static void test_half_written(void) {
    for (int first = 0; first < 2; first++) {
        fixture *f = ring_open(1, 0);
        for (uint64_t ticket = 0; ticket < 8; ticket++) {
            const uint64_t parity = uccl_ep_ring_parity(1, ticket);
            const uccl_ep_words words = words_of(3, ticket);
            uint64_t who, sequence;
            f->beside[slot_of(f, ticket)] = ticket ^ 3ull << 56;
            f->slots[slot_of(f, ticket)].word[first] = words.word[first] | parity;
            CHECK(!take(f, ticket, &who, &sequence), "ticket %" PRIu64 " is taken with word %d alone", ticket, first);
            f->slots[slot_of(f, ticket)].word[!first] = words.word[!first] | parity;
            CHECK(take(f, ticket, &who, &sequence), "ticket %" PRIu64 " is lost", ticket);
            CHECK_EQ(sequence, ticket);
        }
        ring_close(f);
    }
}

/* Slots of zeroed memory say "not written" in the first lap: formatting from ticket 0 on writes only zeros. */
static void test_zeroed_memory(void) {
    fixture *f = ring_open(3, 0);
    for (uint64_t i = 0; i < 8; i++) CHECK_EQ(f->slots[i].word[0] | f->slots[i].word[1], 0);
    ring_close(f);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 240);
    test_zeroed_memory();
    test_half_written();
    test_rng rng = test_rng_at(2000);
    for (uint32_t log2_slots = UCCL_EP_RING_MIN_LOG2; log2_slots <= UCCL_EP_RING_MAX_LOG2; log2_slots++) {
        test_full_ring(log2_slots, test_random(&rng));
        test_stopped_consumer(log2_slots, test_random(&rng));
    }
    printf("full rings of 2 to 65536 slots\n");
    test_wraps(&rng);
    run_threads(1, 0, 4, test_scaled(1000000), 1);
    run_threads(2, 0, 6, test_scaled(1000000), 1);
    run_threads(4, 0, 18, test_scaled(1000000), 1);
    run_threads(11, 0, 4, test_scaled(100000000), 1);
    return test_end();
}
