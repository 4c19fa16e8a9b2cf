/* SPDX-License-Identifier: Apache-2.0
 *
 * test_ring_model.c: ring.h itself, run in every way that the C11 memory model allows, for short programs.
 *
 * ring.h is included with its atomic builtins replaced by the explorer's (weakmem.h), so what is checked is the code
 * that is shipped. Beside it stands the producer of a GPU: a release fence and two relaxed stores in either order.
 *
 * Each command has its ticket, producer and sequence number in both words and a plain payload, written before the post
 * and read after the take. The payload lies in a place of its own for each ticket (`fresh`: what PUB-1 promises) or in
 * one for each slot (`reused`: that a slot given back by the tail is really free, also for what belongs to it). Found
 * are commands lost, doubled, torn, overwritten and out of order, data races on payloads, and waits that never end.
 *
 * Then ring.h is broken in each way of the table of mutants, which the explorer must find. Orders of the table that are
 * said to be redundant must survive everything. So the table says which orders ring.h needs, and for whom; "not needed"
 * holds for programs of this length.
 */
#include "weakmem.h"

static uint64_t model_load(const void *address, int order);
static void model_store(const void *address, uint64_t value, int order);

#define __atomic_load_n(address, order) model_load(address, order)
#define __atomic_store_n(address, value, order) model_store(address, value, order)
#define __atomic_fetch_add(address, value, order) wm_fetch_add(address, value, order)
#include <uccl_ep/ring.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define ALL 0x7fffffffffffffffull /* all bits of a word but the parity */

enum { MAX_SLOTS = 4, MAX_COMMANDS = 8, MAX_STEPS = 32 };

/* The memory of the program; the explorer holds the values, these are the addresses. */
static uccl_ep_slot slots[MAX_SLOTS];
static uccl_ep_ring_producer producer;
static uccl_ep_ring_counters counters;
static uint64_t payloads[MAX_COMMANDS];
static uint64_t lanes_told; /* stands for the barrier of a warp: batches that lanes may store, and their first ticket */
static uccl_ep_ring ring;

/* ---------------------------------------------------------------------------------------------------------- mutants */

typedef enum place { HEAD, TAIL, CACHE, WORD0, WORD1, LANES, NOWHERE } place;

typedef enum style { CPU, GPU_01, GPU_10, STYLES } style; /* the GPU's stores: word 0 first, or word 1 */
enum { ON_CPU = 1 << CPU, ON_GPU = 1 << GPU_01 | 1 << GPU_10, ON_ALL = ON_CPU | ON_GPU };

typedef enum fault {
    NONE,
    RELAX_LOAD,      /* of `where` */
    RELAX_STORE,     /* of `where` */
    NO_FENCE,        /* the GPU producer's */
    NO_PARITY,       /* in stores to `where` */
    SHORT_PARITY,    /* the parity changes every second lap */
    TEST_ONE_WORD,   /* take tests the parity of `where` only */
    NO_WAIT,         /* store without has_space */
    WAIT_FIRST_ONLY, /* for the first slot of a batch */
    WAIT_ONE_LESS,   /* space for n - 1 is taken for space for n */
    CACHE_AHEAD,     /* the cached tail is one further than the tail that was read */
    SPLIT_RESERVE,   /* a load and a store */
    TAIL_EARLY,      /* published before the slot is read */
    TAIL_AHEAD,      /* published one further than what was taken */
    TAIL_LATE        /* not published before the consumer waits again */
} fault;

typedef struct mutant {
    const char *name;
    fault fault;
    place where;
    unsigned applies, found; /* styles: where the fault can be made, and where it is one */
} mutant;

static const mutant mutants[] = {
    {"store of word 1 relaxed", RELAX_STORE, WORD1, ON_CPU, ON_CPU},
    {"GPU producer without its release fence", NO_FENCE, NOWHERE, ON_GPU, ON_GPU},
    {"load of word 1 relaxed", RELAX_LOAD, WORD1, ON_ALL, ON_ALL},
    {"store of the tail relaxed", RELAX_STORE, TAIL, ON_ALL, ON_ALL},
    {"load of the tail relaxed", RELAX_LOAD, TAIL, ON_ALL, ON_ALL},
    {"store of the cached tail relaxed", RELAX_STORE, CACHE, ON_ALL, ON_ALL},
    {"load of the cached tail relaxed", RELAX_LOAD, CACHE, ON_ALL, ON_ALL},
    {"word 0 without parity", NO_PARITY, WORD0, ON_CPU, ON_CPU},
    {"word 1 without parity", NO_PARITY, WORD1, ON_CPU, ON_CPU},
    {"parity of every second lap", SHORT_PARITY, NOWHERE, ON_ALL, ON_ALL},
    {"take tests word 1 only", TEST_ONE_WORD, WORD1, ON_ALL, ON_GPU},
    {"take tests word 0 only", TEST_ONE_WORD, WORD0, ON_ALL, ON_ALL},
    {"no wait for space", NO_WAIT, NOWHERE, ON_ALL, ON_ALL},
    {"wait for the first slot of a batch only", WAIT_FIRST_ONLY, NOWHERE, ON_ALL, ON_ALL},
    {"wait for one slot less", WAIT_ONE_LESS, NOWHERE, ON_ALL, ON_ALL},
    {"cached tail ahead of the tail", CACHE_AHEAD, NOWHERE, ON_ALL, ON_ALL},
    {"reservation by load and store", SPLIT_RESERVE, NOWHERE, ON_ALL, ON_ALL},
    {"tail published before the slot is read", TAIL_EARLY, NOWHERE, ON_ALL, ON_ALL},
    {"tail published ahead", TAIL_AHEAD, NOWHERE, ON_ALL, ON_ALL},
    {"consumer waits with a tail unpublished", TAIL_LATE, NOWHERE, ON_ALL, ON_ALL},
    {"lanes told of the space without release", RELAX_STORE, LANES, ON_ALL, ON_ALL},
    {"lanes told of the space without acquire", RELAX_LOAD, LANES, ON_ALL, ON_ALL},
};

static const char *const style_names[STYLES] = {"CPU", "GPU 0-1", "GPU 1-0"};
static const mutant real = {"ring.h as it is", NONE, NOWHERE, ON_ALL, 0};
static const mutant *broken = &real;

static place place_of(const void *address) {
    if (address == &producer.head) return HEAD;
    if (address == &producer.tail_cache) return CACHE;
    if (address == &counters.tail) return TAIL;
    if (address == &lanes_told) return LANES;
    const size_t word = (size_t)((const uint64_t *)address - &slots[0].word[0]);
    CHECK(word < 2 * COUNT(slots), "ring.h reaches memory that it should not");
    return word % 2 ? WORD1 : WORD0;
}

static int is_broken(fault kind, const void *address) {
    if (broken->fault != kind) return 0;
    const place where = place_of(address);
    return where == broken->where;
}

static uint64_t model_load(const void *address, int order) {
    return wm_load(address, is_broken(RELAX_LOAD, address) ? __ATOMIC_RELAXED : order);
}

static void model_store(const void *address, uint64_t value, int order) {
    if (is_broken(NO_PARITY, address)) value &= ALL;
    if (broken->fault == CACHE_AHEAD && place_of(address) == CACHE) value++;
    wm_store(address, value, is_broken(RELAX_STORE, address) ? __ATOMIC_RELAXED : order);
}

/* -------------------------------------------------------------------------------------------------------- producers */

typedef struct config {
    const char *name;
    uint32_t log2_slots;
    uint64_t first_ticket;
    const char *batches[3]; /* of each producer: one digit a post, its number of commands */
    int lanes;              /* producer 1 is a lane that stores the second commands of producer 0's batches */
    enum { FULL, MUTANTS, BRIEF } when; /* run with ring.h as it is; with mutants too; in slow builds too */
} config;

static const config configs[] = {
    {"2 slots, singles of 2 producers", 1, 0, {"111", "11"}, 0, MUTANTS},
    {"2 slots, batches of the whole ring, 2 producers", 1, 0, {"21", "12"}, 0, BRIEF},
    {"2 slots, batches stored by 2 lanes, and singles", 1, 1, {"22", "", "1"}, 1, BRIEF},
    {"2 slots, singles of 3 producers", 1, 0, {"11", "1", "1"}, 0, FULL},
    {"2 slots, 3 producers, over the wrap of 2^64", 1, UINT64_MAX - 2, {"1", "2", "11"}, 0, FULL},
    {"4 slots, batches over the lap, 2 producers", 2, 1, {"33", "2"}, 0, FULL},
    {"4 slots, batches of the whole ring, 2 producers", 2, 0, {"4", "31"}, 0, FULL},
};

static const config *now;
static style producing;
static int reused;

/* The argument of a producer's call: who, the sequence number of the batch's first command, n, and which of the n. */
typedef struct post {
    uint8_t who, sequence, n, index;
} post;

static uint64_t pack(post p) {
    return (uint64_t)p.who | (uint64_t)p.sequence << 8 | (uint64_t)p.n << 16 | (uint64_t)p.index << 24;
}
static post unpack(uint64_t a) {
    return (post){(uint8_t)a, (uint8_t)(a >> 8), (uint8_t)(a >> 16), (uint8_t)(a >> 24)};
}

static uint64_t *payload_of(uint64_t ticket) {
    return &payloads[reused ? ticket & (uccl_ep_ring_slots(&ring) - 1) : ticket - ring.first_ticket];
}

static uccl_ep_words words_of(uint64_t ticket, uint64_t who, uint64_t sequence) {
    const uint64_t id = (ticket & 0xffff) << 16 | who << 8 | sequence;
    return (uccl_ep_words){{id, id | 1ull << 40}};
}

static int reserve(uint64_t *reg, uint64_t argument) {
    const uint64_t n = unpack(argument).n;
    if (broken->fault == SPLIT_RESERVE) {
        reg[0] = wm_load(&producer.head, __ATOMIC_RELAXED);
        wm_store(&producer.head, reg[0] + n, __ATOMIC_RELAXED);
    } else {
        reg[0] = uccl_ep_ring_reserve(&ring, n);
    }
    return 1;
}

static int wait_for_space(uint64_t *reg, uint64_t argument) {
    const uint64_t n = unpack(argument).n;
    if (broken->fault == WAIT_FIRST_ONLY) return uccl_ep_ring_has_space(&ring, reg[0], 1);
    if (broken->fault == WAIT_ONE_LESS) return uccl_ep_ring_has_space(&ring, reg[0], n - 1);
    return uccl_ep_ring_has_space(&ring, reg[0], n);
}

static int store(uint64_t *reg, uint64_t argument) {
    const post p = unpack(argument);
    const uint64_t ticket = reg[0] + p.index;
    const uccl_ep_words words = words_of(ticket, p.who, (uint64_t)p.sequence + p.index);
    wm_write(payload_of(ticket), ticket);
    if (producing == CPU && broken->fault != SHORT_PARITY) {
        uccl_ep_ring_store(&ring, ticket, words);
        return 1;
    }
    const uint32_t lap = ring.log2_slots + (broken->fault == SHORT_PARITY);
    const uint64_t parity = uccl_ep_ring_parity(lap, ticket);
    uccl_ep_slot *slot = &slots[ticket & (uccl_ep_ring_slots(&ring) - 1)];
    const unsigned first = producing == GPU_10;
    if (broken->fault != NO_FENCE) wm_fence(__ATOMIC_RELEASE);
    model_store(&slot->word[first], words.word[first] | parity, __ATOMIC_RELAXED);
    model_store(&slot->word[!first], words.word[!first] | parity, __ATOMIC_RELAXED);
    return 1;
}

/* Lanes that post together (PUB-2): the leader hands on what it reserved once there is space for all. */
static int tell_lanes(uint64_t *reg, uint64_t argument) {
    model_store(&lanes_told, (argument << 32) | (reg[0] & UINT32_MAX), __ATOMIC_RELEASE);
    return 1;
}

static int hear_leader(uint64_t *reg, uint64_t argument) {
    const uint64_t told = model_load(&lanes_told, __ATOMIC_ACQUIRE);
    reg[0] = told & UINT32_MAX;
    return told >> 32 == argument;
}

/* --------------------------------------------------------------------------------------------------------- consumer */

static int take(uint64_t *reg, uint64_t argument) {
    const uint64_t ticket = ring.first_ticket + argument;
    const uint64_t parity = uccl_ep_ring_parity(ring.log2_slots, ticket);
    uccl_ep_words words;
    if (broken->fault == TEST_ONE_WORD) {
        const uccl_ep_slot *slot = &slots[ticket & (uccl_ep_ring_slots(&ring) - 1)];
        for (int i = 1; i >= 0; i--) {
            words.word[i] = model_load(&slot->word[i], __ATOMIC_ACQUIRE);
            if (broken->where == (i ? WORD1 : WORD0) && ((words.word[i] ^ parity) & UCCL_EP_PARITY_BIT)) return 0;
        }
    } else if (!uccl_ep_ring_take(slots, ring.log2_slots, ticket, &words)) {
        return 0;
    }
    /* The next sequence number of each producer, a byte each, lies in register 0. */
    const uint64_t who = words.word[0] >> 8 & 3, sequence = reg[0] >> 8 * who & 0xff;
    const uccl_ep_words expected = words_of(ticket, who, sequence);
    for (unsigned i = 0; i < 2; i++) {
        if ((words.word[i] & ALL) != expected.word[i])
            wm_fail(i ? "word 1" : "word 0", words.word[i] & ALL, expected.word[i]);
    }
    reg[0] += 1ull << 8 * who;
    const uint64_t payload = wm_read(payload_of(ticket));
    if (payload != ticket) wm_fail("payload", payload, ticket);
    return 1;
}

static int publish(uint64_t *reg, uint64_t argument) {
    (void)reg;
    const uint64_t tail = ring.first_ticket + argument + (broken->fault == TAIL_AHEAD);
    model_store(&counters.tail, tail, __ATOMIC_RELEASE);
    return 1;
}

/* ---------------------------------------------------------------------------------------------------------- programs
 */

static wm_step steps[WM_THREADS][MAX_STEPS];
static unsigned length[WM_THREADS];

static void append(unsigned thread, int (*call)(uint64_t *, uint64_t), uint64_t argument, unsigned retries) {
    CHECK(length[thread] < MAX_STEPS, "raise MAX_STEPS");
    steps[thread][length[thread]++] = (wm_step){call, argument, retries};
}

/* The program of `now` into the explorer; its number of commands. */
static unsigned declare(void) {
    static const char *const word_names[] = {"slot0.w0", "slot0.w1", "slot1.w0", "slot1.w1",
                                             "slot2.w0", "slot2.w1", "slot3.w0", "slot3.w1"};
    wm_begin();
    ring = (uccl_ep_ring){.codec_version = UCCL_EP_CODEC_VERSION,
                          .log2_slots = now->log2_slots,
                          .granularity = UCCL_EP_GRANULARITY_COARSE,
                          .first_ticket = now->first_ticket,
                          .slots = slots,
                          .producer = &producer,
                          .counters = &counters};
    uccl_ep_ring_format(slots, now->log2_slots, now->first_ticket);
    wm_atomic(&producer.head, now->first_ticket, "head");
    wm_atomic(&producer.tail_cache, now->first_ticket, "cache");
    wm_atomic(&counters.tail, now->first_ticket, "tail");
    for (unsigned i = 0; i < 2u << now->log2_slots; i++)
        wm_atomic(&slots[i / 2].word[i % 2], slots[i / 2].word[i % 2], word_names[i]);

    if (now->lanes) wm_atomic(&lanes_told, 0, "lanes");

    memset(length, 0, sizeof(length));
    unsigned commands = 0, producers = 0;
    for (unsigned p = 0; p < COUNT(now->batches) && now->batches[p]; p++, producers++) {
        uint8_t sequence = 0;
        unsigned told = 0;
        for (const char *batch = now->batches[p]; *batch; batch++) {
            post next = {(uint8_t)p, sequence, (uint8_t)(*batch - '0'), 0};
            const int with_lane = now->lanes && p == 0 && next.n == 2;
            append(p, reserve, pack(next), 0);
            /* One try that fails is followed, since it stores the cached tail. */
            if (broken->fault != NO_WAIT) append(p, wait_for_space, pack(next), 1);
            if (with_lane) {
                append(p, tell_lanes, ++told, 0);
                append(1, hear_leader, told, 0);
            }
            for (; next.index < next.n; next.index++) append(with_lane ? next.index : p, store, pack(next), 0);
            sequence = (uint8_t)(sequence + next.n);
        }
        commands += sequence;
    }
    CHECK(commands <= MAX_COMMANDS, "raise MAX_COMMANDS");
    for (unsigned i = 0; i < (reused ? 1u << now->log2_slots : commands); i++) wm_nonatomic(&payloads[i]);
    const unsigned consumer = producers;
    for (unsigned i = 0; i < commands; i++) {
        if (broken->fault == TAIL_EARLY) append(consumer, publish, i + 1, 0);
        append(consumer, take, i, 0);
        if (broken->fault != TAIL_EARLY && (broken->fault != TAIL_LATE || i % 2)) append(consumer, publish, i + 1, 0);
    }
    for (unsigned t = 0; t <= consumer; t++) wm_spawn(steps[t], length[t]);
    return commands;
}

/* Explore one program. 1 if there is no error in any of its executions. */
static int run(const mutant *m, const config *c, style s, int payloads_reused, int say) {
    const uint64_t start = test_now_ns();
    broken = m;
    now = c;
    producing = s;
    reused = payloads_reused;
    const unsigned commands = declare();
    const double executions = wm_run();
    if (say) {
        printf("%-50s %-7s %u threads, %u commands, %u laps: %7" PRIu64 " states, %8" PRIu64
               " steps, %.1e executions, %.1f s\n",
               c->name, style_names[s], wm.threads, commands, (commands - 1) / (1u << c->log2_slots) + 1, wm.states,
               wm.steps_taken, executions, (double)(test_now_ns() - start) / 1e9);
    }
    return !wm.error[0];
}

/* CPU and GPU, both kinds of payload: is the fault found exactly where it is one? Briefly: where it first applies. */
static void check_mutant(const mutant *m, int brief) {
    int styles = 0;
    printf("%-42s", m->name);
    for (style s = CPU; s < STYLES; s++) {
        if (s == GPU_01 || !(m->applies >> s & 1) || (brief && styles++)) continue;
        printf(" %s:", style_names[s]);
        for (int r = brief; r < 2; r++) {
            int clean = 1;
            for (size_t c = 0; c < COUNT(configs) && clean; c++) {
                if (configs[c].when >= (brief ? BRIEF : MUTANTS)) clean = run(m, &configs[c], s, r, 0);
            }
            printf(" %.*s", clean ? 5 : (int)strcspn(wm.error, ":"), clean ? "clean" : wm.error);
            const int expected = !(m->found >> s & 1);
            if (clean != expected) putchar('\n');
            CHECK(clean == expected, "%s, %s producers: %s", m->name, style_names[s],
                  clean ? "not found" : "said to be harmless");
        }
    }
    putchar('\n');
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 600);
    const int brief = test_scaled(100) < 100; /* slow builds: the small programs, one style */
    uint64_t states = 0, steps_taken = 0;
    for (size_t c = 0; c < COUNT(configs); c++) {
        if (brief && configs[c].when != BRIEF) continue;
        for (style s = CPU; s < (brief ? 1 : STYLES); s++) {
            const int clean = run(&real, &configs[c], s, 1, 1);
            if (!clean) wm_print_trace();
            CHECK(clean, "%s", wm.error);
            states += wm.states;
            steps_taken += wm.steps_taken;
        }
    }
    printf("ring.h: no error in %" PRIu64 " states, %" PRIu64 " steps\n\n", states, steps_taken);
    printf("mutants, and what is found with %s payloads\n", brief ? "reused" : "fresh and with reused");
    for (size_t i = 0; i < COUNT(mutants); i++) check_mutant(&mutants[i], brief);
    return test_end();
}
