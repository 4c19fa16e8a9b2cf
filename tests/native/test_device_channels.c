/* SPDX-License-Identifier: Apache-2.0
 *
 * test_device_channels.c: channels that kernels post to, and how all that they need may fail.
 */
#include "device_ranks.h"

/* ---------------------------------------------------------------------------------------------------------- traffic */

struct posts {
    const uccl_ep_device_comm *device;
    uint32_t channel, thread, peer;
    uint64_t rounds, last;
};

static void *post_many(void *argument) {
    struct posts *p = argument;
    const uint64_t local = 4096u * p->thread + 1024u * p->channel, remote = 32768u + local;
    for (uint64_t i = 0; i < p->rounds; i++) {
        kernel_post(p->device, p->channel, put_to(p->peer, local, remote, 512));
        p->last = kernel_post(p->device, p->channel, signal_to(p->peer, p->channel, 1));
    }
    return NULL;
}

#define THREADS 2u

static void traffic_rank(thread_rank *r, void *argument) {
    uccl_ep_config config = base_config("again=20,lazy=1,seed=1");
    config.first_ticket = *(const uint64_t *)argument;
    config.proxies = 2;
    uccl_ep_device_comm device;
    uccl_ep_comm *comm = open_comm(r, &config, &device);
    uccl_ep_comm_info info = {.size_of_struct = sizeof info};
    OK(uccl_ep_comm_query(comm, &info));
    CHECK(device.heap == info.heap && (const void *)device.signal_words == info.signal_words, "other addresses");
    CHECK(!strcmp(info.accelerator, "emulation"), "%s", info.accelerator);
    CHECK_EQ(info.device_channels, 2);
    CHECK_EQ(device.version, UCCL_EP_DEVICE_VERSION);
    CHECK_EQ(device.channels, 2);
    CHECK_EQ(device.rank, r->rank);
    CHECK_EQ(device.timeout_ticks, 20 * SECOND);
    CHECK_EQ(device.control->aborted | device.control->lost, 0);
    memset(info.heap, (int)r->rank + 7, 32768);
    thread_barrier(r);

    const uint64_t rounds = 1 + test_scaled(400);
    struct posts posts[2][THREADS];
    pthread_t threads[2][THREADS];
    for (uint32_t c = 0; c < 2; c++)
        for (uint32_t t = 0; t < THREADS; t++) {
            posts[c][t] = (struct posts){&device, c, t, 1 - r->rank, rounds, 0};
            CHECK_EQ(pthread_create(&threads[c][t], NULL, post_many, &posts[c][t]), 0);
        }
    for (uint64_t i = 0; i < rounds; i++) OK(uccl_ep_signal(comm, 2, 1 - r->rank, 2, 1, DEFAULT, NULL));
    for (uint32_t c = 0; c < 2; c++)
        for (uint32_t t = 0; t < THREADS; t++) {
            pthread_join(threads[c][t], NULL);
            OK(uccl_ep_wait(comm, c, posts[c][t].last, DEFAULT));
        }
    OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, DEFAULT));
    kernel_wait_signal(&device, 0, rounds * THREADS);
    kernel_wait_signal(&device, 1, rounds * THREADS);
    kernel_wait_signal(&device, 2, rounds);
    for (uint32_t c = 0; c < 2; c++)
        for (uint32_t t = 0; t < THREADS; t++)
            for (uint32_t i = 0; i < 512; i++)
                CHECK_EQ(((char *)info.heap)[32768 + 4096 * t + 1024 * c + i], (char)(1 - r->rank + 7));
    for (uint32_t c = 0; c < 2; c++) {
        uccl_ep_channel_stats stats;
        OK(uccl_ep_channel_query(comm, c, &stats));
        CHECK_EQ(stats.posted, rounds * THREADS * 2);
        CHECK_EQ(stats.complete, stats.posted);
        EXPECT(uccl_ep_wait(comm, c, config.first_ticket + stats.posted, 0), UCCL_EP_E_RANGE);
    }
    /* The host does not post where kernels do. */
    uint64_t ticket;
    const uccl_ep_command command = signal_to(0, 9, 1);
    const uccl_ep_words words = encoded(&command);
    EXPECT(uccl_ep_put(comm, 1, 0, 0, 0, 16, DEFAULT, &ticket), UCCL_EP_E_INVALID);
    CHECK_TEXT("channel 1 is posted to by kernels (0 to 1 are): the host posts on 2 to 2");
    CHECK_EQ(uccl_ep_last_error()->channel, 1);
    EXPECT(uccl_ep_signal(comm, 0, 0, 9, 1, 0, &ticket), UCCL_EP_E_INVALID);
    EXPECT(uccl_ep_put_signal(comm, 0, 0, 0, 0, 16, 9, 1, DEFAULT, &ticket), UCCL_EP_E_INVALID);
    EXPECT(uccl_ep_post_many(comm, 0, &command, 1, DEFAULT, &ticket), UCCL_EP_E_INVALID);
    EXPECT(uccl_ep_post_raw(comm, 0, &words, 1, DEFAULT, &ticket), UCCL_EP_E_INVALID);
    EXPECT(uccl_ep_signal(comm, 3, 0, 9, 1, 0, &ticket), UCCL_EP_E_RANGE);
    thread_barrier(r);
    CHECK_EQ(kernel_signal(&device, 9), 0);
    thread_barrier(r);
    uccl_ep_comm_destroy(comm);
}

static void test_traffic(void) {
    static const uint64_t firsts[] = {0, 3, (1ull << 32) - 41, INT64_MAX - 37};
    for (size_t i = 0; i < sizeof firsts / sizeof *firsts; i++) {
        run_ranks(2, traffic_rank, (void *)(uintptr_t)&firsts[i]);
        CHECK_EQ(watched->opened | watched->memory | watched->host, 0);
    }
}

/* Only device channels, and only the library's own proxies behind them. */
static void all_rank(thread_rank *r, void *argument) {
    (void)argument;
    uccl_ep_config config = base_config("seed=1");
    config.device_channels = config.channels;
    uccl_ep_device_comm device;
    uccl_ep_comm *comm = open_comm(r, &config, &device);
    EXPECT(uccl_ep_signal(comm, 0, 0, 0, 1, DEFAULT, NULL), UCCL_EP_E_INVALID);
    CHECK_TEXT("all 3 channels are posted to by kernels");
    for (uint32_t c = 0; c < 3; c++) kernel_post(&device, c, signal_to(0, c, 1));
    for (uint32_t c = 0; c < 3; c++) kernel_wait_signal(&device, c, 1);
    uccl_ep_comm_destroy(comm);
}

/* ------------------------------------------------------------------------------- what has been posted, seen in slots
 */

static uint64_t posted_of(uccl_ep_comm *comm, uint32_t channel) {
    uccl_ep_channel_stats stats;
    OK(uccl_ep_channel_query(comm, channel, &stats));
    return stats.posted;
}

/* Tickets are stored in any order within the ring, and the proxy passes when it likes: against a list of what was. */
static void holes_rank(thread_rank *r, void *argument) {
    uccl_ep_config config = base_config("seed=1");
    config.first_ticket = *(const uint64_t *)argument;
    config.progress = UCCL_EP_PROGRESS_CALLER;
    config.ring_log2 = 3;
    uccl_ep_device_comm device;
    uccl_ep_comm *comm = open_comm(r, &config, &device);
    const uccl_ep_ring *ring = &device.rings[0];
    test_rng rng = test_rng_at(config.first_ticket);
    const uint64_t slots = uccl_ep_ring_slots(ring), first = config.first_ticket;
    const uccl_ep_command command = signal_to(0, 3, 1);
    bool stored[8] = {false}; /* of the tickets from `taken` on */
    uint64_t taken = 0, highest = 0, most = 50 + test_scaled(5000);
    CHECK_EQ(posted_of(comm, 0), 0);
    OK(uccl_ep_quiet(comm, 0, 0)); /* QUI-4 */
    while (taken < most) {
        const uint64_t at = test_below(&rng, slots);
        if (test_below(&rng, 3)) {
            if (!stored[at]) uccl_ep_ring_store(ring, first + taken + at, encoded(&command));
            stored[at] = true;
            if (taken + at + 1 > highest) highest = taken + at + 1;
        } else {
            OK(uccl_ep_progress(comm, NULL));
            const uint64_t tail = ring->counters->tail - first;
            CHECK(tail > taken || !stored[0], "ticket %" PRIu64 " was stored, and not taken", taken);
            while (taken < tail) {
                CHECK(stored[0], "ticket %" PRIu64 " was taken, and never stored", taken);
                memmove(stored, stored + 1, (slots - 1) * sizeof *stored);
                stored[slots - 1] = false;
                taken++;
            }
        }
        CHECK_EQ(posted_of(comm, 0), highest);
        if (highest > taken) CHECK_EQ(uccl_ep_quiet(comm, 0, 0), UCCL_EP_IN_PROGRESS);
        EXPECT(uccl_ep_wait(comm, 0, first + highest, 0), UCCL_EP_E_RANGE);
        CHECK_TEXT("was never given out");
        if (highest) CHECK(uccl_ep_wait(comm, 0, first + highest - 1, 0) >= 0, "%s", uccl_ep_last_error()->text);
    }
    for (uint64_t at = 0; at < slots; at++)
        if (!stored[at]) uccl_ep_ring_store(ring, first + taken + at, encoded(&command));
    OK(uccl_ep_quiet(comm, 0, DEFAULT));
    CHECK_EQ(posted_of(comm, 0), taken + slots);
    CHECK_EQ(kernel_signal(&device, 3), taken + slots);
    uccl_ep_comm_destroy(comm);
}

/* While the proxy takes and slots are stored again: what was stored before a look is never missed. */
static void *post_and_tell(void *argument) {
    struct posts *p = argument;
    for (uint64_t i = 0; i < p->rounds; i++) {
        const uint64_t ticket = kernel_post(p->device, 0, signal_to(0, 3, 1));
        __atomic_store_n(&p->last, ticket + 1, __ATOMIC_RELEASE);
    }
    return NULL;
}

static void racing_rank(thread_rank *r, void *argument) {
    (void)argument;
    uccl_ep_config config = base_config("seed=1");
    config.ring_log2 = 2;
    uccl_ep_device_comm device;
    uccl_ep_comm *comm = open_comm(r, &config, &device);
    struct posts posts = {.device = &device, .rounds = 1 + test_scaled(30000)};
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, post_and_tell, &posts), 0);
    uint64_t seen = 0;
    while (seen < posts.rounds) {
        const uint64_t before = __atomic_load_n(&posts.last, __ATOMIC_ACQUIRE);
        seen = posted_of(comm, 0);
        CHECK(seen >= before, "%" PRIu64 " were posted, and %" PRIu64 " seen", before, seen);
        CHECK(seen <= posts.rounds, "%" PRIu64 " of %" PRIu64, seen, posts.rounds);
        if (before % 16 == 0) OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, DEFAULT));
    }
    pthread_join(thread, NULL);
    OK(uccl_ep_quiet(comm, 0, DEFAULT));
    CHECK_EQ(kernel_signal(&device, 3), posts.rounds);
    uccl_ep_comm_destroy(comm);
}

/* -------------------------------------------------------------------------------------------------------- failures */

/* A producer gives up after it has reserved: the channel closes, waits end, and a reset begins behind its tickets. */
static void give_up_rank(thread_rank *r, void *argument) {
    (void)argument;
    uccl_ep_config config = base_config("seed=1");
    config.first_ticket = 29;
    uccl_ep_device_comm device;
    uccl_ep_comm *comm = open_comm(r, &config, &device);
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    for (uint64_t again = 0; again < 3; again++) {
        const uint64_t good = kernel_post(&device, 0, signal_to(0, 3, 1));
        const uint64_t lost = uccl_ep_ring_reserve(&device.rings[0], 5);
        const uint64_t behind = kernel_post(&device, 0, signal_to(0, 3, 1));
        CHECK_EQ(behind, lost + 5);
        EXPECT(uccl_ep_wait(comm, 0, lost, 0), UCCL_EP_IN_PROGRESS);
        OK(uccl_ep_wait(comm, 0, good, DEFAULT)); /* what is not taken when the channel closes is not executed */
        __atomic_store_n(device.rings[0].gave_up, 1, __ATOMIC_RELEASE);
        EXPECT(uccl_ep_wait(comm, 0, lost + 4, DEFAULT), UCCL_EP_E_CLOSED);
        EXPECT(uccl_ep_quiet(comm, 0, DEFAULT), UCCL_EP_E_CLOSED);
        OK(uccl_ep_wait(comm, 0, good, DEFAULT));
        CHECK_EQ(device.rings[0].counters->status, UCCL_EP_CHANNEL_CLOSED);
        OK(uccl_ep_wait(comm, 1, kernel_post(&device, 1, signal_to(0, 4, 1)), DEFAULT));
        uccl_ep_error record = {.size = sizeof record};
        uint32_t total;
        OK(uccl_ep_errors(comm, &record, 1, &total));
        CHECK_EQ(total, 1);
        CHECK(!strcmp(record.clause, "PRG-3"), "%s", record.text);
        OK(uccl_ep_reset(comm, &bootstrap));
        CHECK_EQ(*device.rings[0].gave_up, 0);
        CHECK_EQ(kernel_signal(&device, 3), 0);
        const uint64_t next = kernel_post(&device, 0, signal_to(0, 3, 1));
        CHECK_EQ(next, behind + 1);
        OK(uccl_ep_wait(comm, 0, next, DEFAULT));
        for (uint32_t i = 0; i < 40; i++) kernel_post(&device, 0, signal_to(0, 3, 1));
        OK(uccl_ep_quiet(comm, 0, DEFAULT));
        CHECK_EQ(kernel_signal(&device, 3), 41);
    }
    uccl_ep_comm_destroy(comm);
}

/* A hole that nobody owns up to keeps a reset from coming to rest; it says so, and nothing hangs. */
static void hole_rank(thread_rank *r, void *argument) {
    (void)argument;
    uccl_ep_config config = base_config("seed=1");
    config.timeout_ns = config.peer_timeout_ns = SECOND / 20;
    uccl_ep_device_comm device;
    uccl_ep_comm *comm = open_comm(r, &config, &device);
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    uccl_ep_ring_reserve(&device.rings[0], 1);
    kernel_post(&device, 0, signal_to(0, 3, 1));
    EXPECT(uccl_ep_quiet(comm, 0, DEFAULT), UCCL_EP_E_DEADLINE);
    EXPECT(uccl_ep_reset(comm, &bootstrap), UCCL_EP_E_DEADLINE);
    CHECK_EQ(device.control->aborted, 1); /* half a reset is no state to go on from */
    uccl_ep_comm_destroy(comm);
}

static void abort_rank(thread_rank *r, void *argument) {
    (void)argument;
    uccl_ep_config config = base_config("seed=1");
    uccl_ep_device_comm device;
    uccl_ep_comm *comm = open_comm(r, &config, &device);
    OK(uccl_ep_abort(comm, "enough"));
    CHECK_EQ(__atomic_load_n(&device.control->aborted, __ATOMIC_ACQUIRE), 1);
    for (uint32_t c = 0; c < 2; c++) CHECK_EQ(device.rings[c].counters->status, UCCL_EP_CHANNEL_ABORTED);
    /* What a kernel then writes is told although everything else says that the communicator was aborted. */
    CHECK(kernel_error(&device, (uccl_ep_device_error){.status = (uint64_t)(int64_t)UCCL_EP_E_ABORTED,
                                                       .what = UCCL_EP_DEVICE_QUIET,
                                                       .channel = 1,
                                                       .ticket = 0}),
          "no claim");
    EXPECT(uccl_ep_comm_device_error(comm, NULL), UCCL_EP_E_ABORTED);
    CHECK_TEXT("ticket 0 of channel 1");
    uccl_ep_comm_destroy(comm);
}

static void until_lost(const uccl_ep_device_comm *device, uint64_t n) {
    const uint64_t until = test_now_ns() + 60 * SECOND;
    while (__atomic_load_n(&device->control->lost, __ATOMIC_ACQUIRE) != n) {
        CHECK(test_now_ns() < until, "%" PRIu64 " ranks are lost, not %" PRIu64, device->control->lost, n);
        sched_yield();
    }
}

/* A silent rank is lost, then excluded, then all are well again; tickets from before are acknowledged. */
static void stall_rank(thread_rank *r, void *argument) {
    (void)argument;
    uccl_ep_config config = base_config("stall=1,seed=1");
    config.peer_timeout_ns = SECOND / 4;
    uccl_ep_device_comm device;
    uccl_ep_comm *comm = open_comm(r, &config, &device);
    const uccl_ep_bootstrap bootstrap = thread_bootstrap(r);
    if (r->rank == 0) {
        const uint64_t bad = kernel_post(&device, 0, put_to(1, 0, 4096, 64));
        until_lost(&device, 1);
        EXPECT(uccl_ep_wait(comm, 0, bad, DEFAULT), UCCL_EP_E_PEER_LOST);
        /* What a kernel says of it, and what is on record. */
        CHECK(kernel_error(&device, (uccl_ep_device_error){.status = (uint64_t)(int64_t)UCCL_EP_E_CLOSED,
                                                           .what = UCCL_EP_DEVICE_QUIET,
                                                           .channel = 0,
                                                           .ticket = bad}),
              "no claim");
        uccl_ep_device_error raw;
        EXPECT(uccl_ep_comm_device_error(comm, &raw), UCCL_EP_E_PEER_LOST);
        CHECK_EQ((int64_t)raw.status, UCCL_EP_E_CLOSED);
        CHECK_EQ(uccl_ep_last_error()->peer, 1);
        CHECK_EQ(uccl_ep_last_error()->ticket, bad);
        CHECK(kernel_error(&device, (uccl_ep_device_error){.status = (uint64_t)(int64_t)UCCL_EP_E_PEER_LOST,
                                                           .what = UCCL_EP_DEVICE_WAIT_SIGNAL,
                                                           .channel = UINT64_MAX,
                                                           .ticket = UCCL_EP_NO_TICKET,
                                                           .slot = 5,
                                                           .wanted = 9,
                                                           .seen = 2,
                                                           .source = UCCL_EP_ANY_RANK}),
              "no claim");
        EXPECT(uccl_ep_comm_device_error(comm, &raw), UCCL_EP_E_PEER_LOST);
        CHECK_EQ(uccl_ep_last_error()->peer, 1);
        CHECK_TEXT("signal 5 is at 2 and was to reach 9, and rank 1 is lost");
        CHECK_EQ(*device.gone, 1u << 1);
        /* Posted before, taken after or before: no wait fails because of it any more. */
        const uint64_t later = kernel_post(&device, 0, put_to(1, 0, 4096, 64));
        OK(uccl_ep_exclude(comm, 1));
        until_lost(&device, 0);
        /* Whoever waits for its signals alone is told of it all the same (ERR-5). */
        CHECK_EQ(*device.gone, 1u << 1);
        CHECK(kernel_error(&device, (uccl_ep_device_error){.status = (uint64_t)(int64_t)UCCL_EP_E_PEER_LOST,
                                                           .what = UCCL_EP_DEVICE_WAIT_SIGNAL,
                                                           .channel = UINT64_MAX,
                                                           .ticket = UCCL_EP_NO_TICKET,
                                                           .source = 1}),
              "no claim");
        EXPECT(uccl_ep_comm_device_error(comm, &raw), UCCL_EP_E_PEER_LOST);
        CHECK_EQ(uccl_ep_last_error()->peer, 1);
        OK(uccl_ep_wait(comm, 0, later, DEFAULT));
        OK(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, DEFAULT));
        CHECK_EQ(__atomic_load_n(&device.rings[0].counters->failed, __ATOMIC_ACQUIRE), UCCL_EP_NO_TICKET);
        OK(uccl_ep_wait(comm, 0, kernel_post(&device, 0, signal_to(2, 3, 1)), DEFAULT));
    }
    thread_barrier(r);
    OK(uccl_ep_reset(comm, &bootstrap));
    CHECK_EQ(device.control->lost, 0);
    CHECK_EQ(*device.gone, 0);
    thread_barrier(r);
    uccl_ep_comm_destroy(comm);
}

/* A rank that closes in good order is lost to kernels that wait for signals, until it is excluded. */
static void depart_rank(thread_rank *r, void *argument) {
    (void)argument;
    uccl_ep_config config = base_config(NULL);
    config.backend = SHM;
    uccl_ep_device_comm device;
    uccl_ep_comm *comm = open_comm(r, &config, &device);
    thread_barrier(r);
    if (r->rank) {
        uccl_ep_comm_destroy(comm);
        return;
    }
    until_lost(&device, 2);
    OK(uccl_ep_exclude(comm, 2));
    until_lost(&device, 1);
    OK(uccl_ep_exclude(comm, 1));
    until_lost(&device, 0);
    CHECK_EQ(*device.gone, 6);
    uccl_ep_comm_destroy(comm);
}

/* -------------------------------------------------------------------------------------------------- kernels' failures
 */

static void error_rank(thread_rank *r, void *argument) {
    (void)argument;
    uccl_ep_config config = base_config("poison=4096,seed=1");
    uccl_ep_device_comm device;
    uccl_ep_comm *comm = open_comm(r, &config, &device);
    uccl_ep_device_error raw;
    OK(uccl_ep_comm_device_error(comm, &raw));
    CHECK_EQ(raw.status, 0);
    static const struct {
        uccl_ep_device_error error;
        uccl_ep_status status;
        uint32_t channel;
        const char *clause, *said[3];
    } cases[] = {
#define STATUS(s) .status = (uint64_t)(int64_t)UCCL_EP_##s
        {{STATUS(E_DEADLINE), UCCL_EP_DEVICE_POST, 1, 77, ~0ull, 0, 13, 5ull << 32 | 9},
         UCCL_EP_E_DEADLINE,
         1,
         "PRG-3",
         {"kernel (5:9)", "no room for ticket 77 in the ring of channel 1 within 20.000 s (taken below 13)", "reset"}},
        {{STATUS(E_RANGE), UCCL_EP_DEVICE_POST, 1, UCCL_EP_NO_TICKET, ~0ull, 0, 0, 0, UCCL_EP_ANY_RANK},
         UCCL_EP_E_RANGE,
         1,
         "PRG-3",
         {"could not post on channel 1 (E_RANGE)", "outside", ""}},
        {{STATUS(E_DEADLINE), UCCL_EP_DEVICE_QUIET, 0, 3, ~0ull, 0, 2, 0, UCCL_EP_ANY_RANK},
         UCCL_EP_E_DEADLINE,
         0,
         "ERR-1",
         {"ticket 3 of channel 0 did not become complete within", "complete below 2", "report()"}},
        {{STATUS(E_CLOSED), UCCL_EP_DEVICE_QUIET_SOURCE, 0, 3, ~0ull, 0, 2, 0, UCCL_EP_ANY_RANK},
         UCCL_EP_E_CLOSED,
         0,
         "ERR-1",
         {"free at its source (free below 2)", "", ""}},
        {{STATUS(E_DEADLINE), UCCL_EP_DEVICE_WAIT_SIGNAL, ~0ull, UCCL_EP_NO_TICKET, 6, 9, 4, 0, UCCL_EP_ANY_RANK},
         UCCL_EP_E_DEADLINE,
         UCCL_EP_NO_CHANNEL,
         "ERR-1",
         {"signal 6 is at 4 and did not reach 9 within 20.000 s", "", ""}},
        /* Any bytes, from a kernel that writes where it should not. */
        {{~0ull >> 1, ~0ull, ~0ull - 1, 4, 1, 1, 1, ~0ull, UCCL_EP_ANY_RANK},
         UCCL_EP_E_BACKEND,
         UCCL_EP_NO_CHANNEL,
         "",
         {"a record that device.h does not write", "", ""}},
        {{1, UCCL_EP_DEVICE_QUIET, 1ull << 32, 0, 0, 0, 0, 0, UCCL_EP_ANY_RANK},
         UCCL_EP_E_BACKEND,
         UCCL_EP_NO_CHANNEL,
         "ERR-1",
         {"channel 4294967296", "", ""}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK(kernel_error(&device, cases[i].error), "no claim in case %zu", i);
        CHECK(!kernel_error(&device, cases[0].error), "a second claim in case %zu", i);
        EXPECT(uccl_ep_comm_device_error(comm, &raw), cases[i].status);
        CHECK(!memcmp(&raw, &cases[i].error, sizeof raw), "case %zu: other bytes", i);
        CHECK_EQ(uccl_ep_last_error()->channel, cases[i].channel);
        CHECK_EQ(uccl_ep_last_error()->ticket, cases[i].error.ticket);
        CHECK(!strcmp(uccl_ep_last_error()->clause, cases[i].clause), "%s", uccl_ep_last_error()->clause);
        for (size_t k = 0; k < 3; k++) CHECK_TEXT(cases[i].said[k]);
        OK(uccl_ep_comm_device_error(comm, NULL)); /* once */
    }
    /* Any words at all, small ones among them: an error with a text, whatever they are. */
    test_rng rng = test_rng_at(3);
    for (uint64_t n = test_scaled(5000); n; n--) {
        uccl_ep_device_error any;
        uint64_t *words = (uint64_t *)&any;
        for (size_t i = 0; i < sizeof any / sizeof *words; i++)
            words[i] = test_below(&rng, 3) ? test_below(&rng, 6) : test_random(&rng) >> test_below(&rng, 64);
        if (test_below(&rng, 2)) any.status = (uint64_t)(-7000 - (int64_t)test_below(&rng, 24));
        if (!any.status) continue;
        CHECK(kernel_error(&device, any), "no claim");
        CHECK(uccl_ep_comm_device_error(comm, NULL) < 0, "taken for a success");
        CHECK(strstr(uccl_ep_last_error()->text, "kernel ("), "%s", uccl_ep_last_error()->text);
    }
    /* The record of the failed command is preferred. */
    const uint64_t bad = kernel_post(&device, 1, put_to(0, 0, 4096, 64));
    EXPECT(uccl_ep_wait(comm, 1, bad, DEFAULT), UCCL_EP_E_NIC);
    CHECK(kernel_error(&device, (uccl_ep_device_error){STATUS(E_CLOSED), .what = UCCL_EP_DEVICE_QUIET, .channel = 1,
                                                       .ticket = bad}),
          "no claim");
    EXPECT(uccl_ep_comm_device_error(comm, NULL), UCCL_EP_E_NIC);
    CHECK_EQ(uccl_ep_last_error()->vendor_code, 42);
    CHECK_EQ(uccl_ep_last_error()->ticket, bad);
    uccl_ep_comm_destroy(comm);
}

/* ----------------------------------------------------------------------------------- everything that can fail in
 * create */

static void test_failing_calls(void) {
    static const char *const options[] = {"seed=1", "device=1,seed=1", "dmabuf=1,seed=1",
                                          "dmabuf=1,device_signals=1,seed=1"};
    const uccl_ep_accelerator *emulation = &watched->table;
    uccl_ep_gpu *gpu;
    OK(emulation->open(0, &gpu));
    void *memory;
    OK(emulation->device_alloc(gpu, 2 * HEAP, &memory));
    for (size_t i = 0; i < 4; i++) {
        uccl_ep_config config = base_config(options[i]);
        if (i) {
            config.heap = (char *)memory + 4096;
            config.heap_kind = UCCL_EP_MEMORY_EMULATED;
        }
        if (i == 3) config.signals_kind = UCCL_EP_MEMORY_EMULATED;
        uccl_ep_status status = UCCL_EP_E_SYSTEM;
        uint64_t fails = 0;
        while (status != UCCL_EP_OK) {
            watched->calls = 0;
            watched->fail = ++fails;
            uccl_ep_comm *comm;
            status = create_alone(&config, &comm);
            if (status == UCCL_EP_OK) {
                uccl_ep_comm_destroy(comm);
            } else {
                CHECK_EQ(status, UCCL_EP_E_SYSTEM);
                CHECK_TEXT("emulation: ");
                CHECK_TEXT("the test wants it so");
            }
            CHECK(watched->opened == 1 && watched->memory == 1 && !watched->host,
                  "after call %" PRIu64 " (%s) failed %" PRId64 " devices, %" PRId64 " allocations and %" PRId64
                  " registrations are left",
                  fails, watched->failed, watched->opened, watched->memory, watched->host);
        }
        watched->fail = 0;
        /* query, open, the block, device memory, its copy; then signals and heap, or what a device heap needs. */
        CHECK(fails > 7, "only %" PRIu64 " calls can fail", fails);
    }
    /* One that fails in a reset: the communicator is aborted, and closes. */
    for (uint64_t fails = 1; fails <= 2; fails++) {
        thread_group group = {.size = 1, .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
        thread_rank rank = {&group, 0};
        const uccl_ep_bootstrap bootstrap = thread_bootstrap(&rank);
        const uccl_ep_config config = base_config("seed=1");
        uccl_ep_device_comm device;
        uccl_ep_comm *comm = open_comm(&rank, &config, &device);
        __atomic_store_n(device.rings[0].gave_up, 1, __ATOMIC_RELEASE);
        EXPECT(uccl_ep_wait(comm, 0, uccl_ep_ring_reserve(&device.rings[0], 1), DEFAULT), UCCL_EP_E_CLOSED);
        watched->calls = 0;
        watched->fail = fails;
        EXPECT(uccl_ep_reset(comm, &bootstrap), UCCL_EP_E_SYSTEM);
        CHECK_TEXT("copying what kernels are given failed");
        watched->fail = 0;
        CHECK_EQ(device.control->aborted, 1);
        uccl_ep_comm_destroy(comm);
    }
    /* And in taking a kernel's error: it is told which call it was. */
    {
        thread_group group = {.size = 1, .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
        thread_rank rank = {&group, 0};
        const uccl_ep_config config = base_config("seed=1");
        uccl_ep_device_comm device;
        uccl_ep_comm *comm = open_comm(&rank, &config, &device);
        CHECK(kernel_error(&device, (uccl_ep_device_error){STATUS(E_DEADLINE), .what = UCCL_EP_DEVICE_QUIET}), "claim");
        watched->calls = 0;
        watched->fail = 1;
        EXPECT(uccl_ep_comm_device_error(comm, NULL), UCCL_EP_E_SYSTEM);
        watched->fail = 0;
        uccl_ep_comm_destroy(comm);
    }
    emulation->device_free(gpu, memory);
    emulation->close(gpu);
    CHECK_EQ(watched->opened | watched->memory | watched->host, 0);
}

static void test_refusals(void) {
    uccl_ep_config config = base_config("seed=1");
    config.device_channels = 4;
    refused(&config, UCCL_EP_E_RANGE, "4 device channels of 3");
    config = base_config("seed=1");
    config.accelerator = NULL;
    refused(&config, UCCL_EP_E_INVALID, "a device channel needs an accelerator");
    config = base_config("seed=1");
    config.accelerator_device = 7;
    refused(&config, UCCL_EP_E_NO_DEVICE, "device 7");
    /* What is no accelerator. */
    config = base_config("seed=1");
    config.accelerator = "/nonexistent/libuccl_ep_cuda.so";
    refused(&config, UCCL_EP_E_NOT_A_BACKEND, "cannot load the accelerator /nonexistent");
    config.accelerator = LOOP;
    refused(&config, UCCL_EP_E_NOT_A_BACKEND, "does not export uccl_ep_accelerator_entry");
    config = base_config("seed=1");
    const uccl_ep_accelerator good = watched->table;
    uccl_ep_accelerator *bad = &watched->table;
    bad->abi_minor = UCCL_EP_ACCELERATOR_ABI_MINOR + 1;
    refused(&config, UCCL_EP_E_ABI, "install a newer uccl_ep");
    bad->abi_minor = 0;
    bad->abi_major = UCCL_EP_ACCELERATOR_ABI_MAJOR - 1;
    refused(&config, UCCL_EP_E_ABI, "rebuild the accelerator");
    *bad = good;
    bad->size = sizeof *bad - 8;
    refused(&config, UCCL_EP_E_NOT_A_BACKEND, "are needed");
    *bad = good;
    bad->copy = NULL;
    refused(&config, UCCL_EP_E_NOT_A_BACKEND, "lacks the required function copy");
    *bad = good;
    bad->name = "";
    refused(&config, UCCL_EP_E_NOT_A_BACKEND, "no name");
    *bad = good;
    watched->clock_hz = 1;
    refused(&config, UCCL_EP_E_BACKEND, "no clock");
    watched->clock_hz = 0;
    watched->unusable = 1;
    refused(&config, UCCL_EP_E_NO_DEVICE, "its driver is too old");
    watched->unusable = 0;
    /* Heaps. */
    const uccl_ep_accelerator *emulation = &watched->table;
    uccl_ep_gpu *gpu;
    OK(emulation->open(0, &gpu));
    void *memory;
    OK(emulation->device_alloc(gpu, HEAP, &memory));
    config = base_config("device=1,seed=1");
    config.heap_kind = UCCL_EP_MEMORY_EMULATED;
    refused(&config, UCCL_EP_E_INVALID, "given by the caller");
    config.heap = memory;
    config.heap_kind = UCCL_EP_MEMORY_CUDA;
    refused(&config, UCCL_EP_E_INVALID, "a heap of CUDA memory, and the accelerator emulation has emulated memory");
    config.heap_kind = UCCL_EP_MEMORY_EMULATED + 1;
    refused(&config, UCCL_EP_E_INVALID, "with its kind");
    config.heap_kind = UCCL_EP_MEMORY_EMULATED;
    config.heap = (char *)memory + 16;
    refused(&config, UCCL_EP_E_REGISTRATION, "lies in one allocation");
    config.heap_bytes = HEAP - 8;
    refused(&config, UCCL_EP_E_ALIGNMENT, "a multiple of 16 is needed");
    config.heap_bytes = HEAP;
    config.heap = &config;
    refused(&config, UCCL_EP_E_INVALID, "lies in no device memory");
    config.heap = memory;
    config.backend_options = "seed=1";
    config.staging = UCCL_EP_STAGING_OFF;
    refused(&config, UCCL_EP_E_CAPABILITY, "loop0 of the backend loop registers no emulated memory, nor dmabuf");
    config.accelerator = NULL;
    config.device_channels = 0;
    refused(&config, UCCL_EP_E_INVALID, "a heap in device memory needs an accelerator");
    emulation->device_free(gpu, memory);
    emulation->close(gpu);
    /* Its last page is somebody else's, too, who has registered a part of what this heap needs. */
    OK(emulation->open(0, &gpu));
    char *pages = aligned_alloc(4096, 2 * HEAP);
    CHECK(pages, "memory");
    void *there;
    OK(emulation->host_register(gpu, pages + HEAP, HEAP, &there));
    config = base_config("seed=1");
    config.heap = pages + 64;
    uccl_ep_comm *none;
    EXPECT(create_alone(&config, &none), UCCL_EP_E_REGISTRATION);
    CHECK_TEXT("let it begin and end at pages");
    emulation->host_unregister(gpu, pages + HEAP);
    emulation->close(gpu);
    free(pages);
    /* A NIC that takes dmabufs alone, and a driver that has none. */
    setenv("UCCL_EP_EMULATION", "dmabuf=0", 1);
    OK(emulation->open(0, &gpu));
    OK(emulation->device_alloc(gpu, HEAP, &memory));
    config = base_config("dmabuf=1,seed=1");
    config.heap = memory;
    config.heap_kind = UCCL_EP_MEMORY_EMULATED;
    config.staging = UCCL_EP_STAGING_OFF;
    refused(&config, UCCL_EP_E_CAPABILITY, "as a dmabuf alone");
    emulation->device_free(gpu, memory);
    emulation->close(gpu);
    unsetenv("UCCL_EP_EMULATION");
    /* Calls that ask for a device where there is none. */
    config = base_config("seed=1");
    config.accelerator = NULL;
    config.device_channels = 0;
    uccl_ep_comm *comm;
    OK(create_alone(&config, &comm));
    uccl_ep_device_comm device;
    EXPECT(uccl_ep_comm_device(comm, &device), UCCL_EP_E_INVALID);
    CHECK_TEXT("no accelerator");
    EXPECT(uccl_ep_comm_device_error(comm, NULL), UCCL_EP_E_INVALID);
    uccl_ep_comm_destroy(comm);
    CHECK_EQ(watched->opened | watched->memory | watched->host, 0);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 300);
    watch_accelerator();
    test_traffic();
    run_ranks(1, all_rank, NULL);
    static const uint64_t firsts[] = {0, 5, (1ull << 32) - 20, INT64_MAX - 30};
    for (size_t i = 0; i < sizeof firsts / sizeof *firsts; i++) run_ranks(1, holes_rank, (void *)(uintptr_t)&firsts[i]);
    run_ranks(1, racing_rank, NULL);
    run_ranks(1, give_up_rank, NULL);
    run_ranks(1, hole_rank, NULL);
    run_ranks(1, abort_rank, NULL);
    run_ranks(3, stall_rank, NULL);
    run_ranks(3, depart_rank, NULL);
    run_ranks(1, error_rank, NULL);
    test_failing_calls();
    test_refusals();
    return test_end();
}
