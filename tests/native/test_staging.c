/* SPDX-License-Identifier: Apache-2.0
 *
 * test_staging.c: heaps that are staged, when copies fail, do not end, or end after what they were for: losses, resets,
 * records that nobody writes, and what is refused. That they work at all test_strategies.c shows.
 *
 * All ranks' memory is in this process, and so are the queues: a test holds one still and looks.
 */
#include <stdbool.h>

#include "balance.h"
#include "core/mailbox.h"
#include "core/staging.h"
#include "sim_ranks.h"

#define BALANCE UCCL_EP_TEST_LIBRARY_DIR "/libbalance_accelerator.so"
#define DEFAULT UCCL_EP_TIMEOUT_DEFAULT
#define HEAP ((uint64_t)1 << 16)
#define CHECK_TEXT(part) CHECK(strstr(uccl_ep_last_error()->text, part), "%s", uccl_ep_last_error()->text)

/* A NIC for each strategy that staging can use: numbers, and records one at a time. */
static const char *const profiles[] = {"efa", "strawman-min"};

/* ---------------------------------------------------------------------------------------------- a driver that obeys */

static balance *watched;
static uccl_ep_accelerator plain;
static const uccl_ep_copy_queue *held; /* nothing of it is carried out, before that time of the world */
static uint64_t held_until;
static uccl_ep_sim_world *held_world;
static uint64_t queue_calls, queue_fails; /* calls of a queue; the one that fails */
static const char *queue_failed;

static const char *error_text(void) {
    return queue_failed ? "the test wants it so" : plain.error_text();
}
static uccl_ep_status fails(const char *call) {
    if (++queue_calls != queue_fails) return UCCL_EP_OK;
    queue_failed = call;
    return UCCL_EP_E_SYSTEM;
}
static uccl_ep_status queue_open(uccl_ep_gpu *gpu, uccl_ep_copy_queue **queue) {
    const uccl_ep_status status = fails("queue_open");
    return status == UCCL_EP_OK ? plain.queue_open(gpu, queue) : status;
}
static uccl_ep_status copy_start(uccl_ep_copy_queue *queue, void *to, const void *from, uint64_t bytes) {
    const uccl_ep_status status = fails("copy_start");
    return status == UCCL_EP_OK ? plain.copy_start(queue, to, from, bytes) : status;
}
static uccl_ep_status mark(uccl_ep_copy_queue *queue, uint64_t *number) {
    const uccl_ep_status status = fails("mark");
    return status == UCCL_EP_OK ? plain.mark(queue, number) : status;
}
static uccl_ep_status marks_done(uccl_ep_copy_queue *queue, uint64_t *done) {
    const uccl_ep_status status = fails("marks_done");
    if (status != UCCL_EP_OK) return status;
    if (queue == held && SIM->now(held_world) < held_until) return UCCL_EP_OK;
    return plain.marks_done(queue, done);
}

static void hold(uccl_ep_sim_world *world, const struct copies *c, uint64_t ns) {
    held = c->queue;
    held_world = world;
    held_until = ns == UINT64_MAX ? ns : SIM->now(world) + ns;
}

/* ------------------------------------------------------------------------------------------------------------- ranks
 */

struct test {
    const char *profile;
    uint64_t fails;
    uint32_t meetings[16]; /* of ranks that are alive: a barrier wants all of them */
    char *heap[3];
    uccl_ep_comm *comm[3];
    bool failed, lost;
    uint64_t value;
};

static void meet(sim_rank *r, struct test *t, uint32_t meeting, uint32_t ranks) {
    t->meetings[meeting]++;
    while (t->meetings[meeting] < ranks) SIM->yield(r->group->world);
}

typedef struct life {
    uccl_ep_gpu *gpu;
    void *memory;
    uccl_ep_comm *comm;
    struct staging *staging;
    char *heap;
} life;

static void configure(sim_rank *r, const struct test *t, life *l, sim_comm_config *c) {
    OK(watched->table.open(0, &l->gpu));
    OK(watched->table.device_alloc(l->gpu, 2 * HEAP, &l->memory));
    sim_configure(c, r->group->world, r->rank, t->profile, "");
    c->config.heap = l->memory;
    c->config.heap_kind = UCCL_EP_MEMORY_EMULATED;
    c->config.heap_bytes = HEAP;
    c->config.accelerator = BALANCE;
    c->config.ring_log2 = 4;
}

static void begin(sim_rank *r, struct test *t, life *l, uint64_t peer_timeout_ns) {
    sim_comm_config c;
    configure(r, t, l, &c);
    c.config.peer_timeout_ns = peer_timeout_ns;
    const uccl_ep_bootstrap bootstrap = sim_bootstrap(r);
    OK(uccl_ep_comm_create(&c.config, &bootstrap, &l->comm));
    sim_proxies(r->group->world, r->rank, l->comm, 1);
    l->staging = l->comm->proxies[0].staging;
    CHECK(l->staging, "%s: not staged", t->profile);
    t->heap[r->rank] = l->heap = l->memory;
    t->comm[r->rank] = l->comm;
    sim_barrier(r);
}

static void end(sim_rank *r, life *l) {
    if (l->comm) sim_destroy(r->group->world, l->comm, 1);
    watched->table.device_free(l->gpu, l->memory);
    watched->table.close(l->gpu);
}

static void turns(sim_rank *r, uint32_t n) {
    while (n--) SIM->yield(r->group->world);
}

static void bytes_are(const char *heap, uint64_t at, int value, const char *when) {
    for (uint64_t i = 0; i < 64; i++)
        CHECK(heap[at + i] == value, "byte %" PRIu64 " is %d and not %d %s", at + i, heap[at + i], value, when);
}

static void run(void (*body)(sim_rank *, void *), struct test *t, uint32_t ranks, uint64_t killed) {
    held = NULL;
    queue_calls = 0;
    uccl_ep_sim_world *world = sim_open(t->profile, "", ranks, test_seed_value);
    sim_run_killing(world, ranks, body, t, killed);
    if (!killed) SIM->world_close(world);
    CHECK(!watched->opened && !watched->memory && !watched->host,
          "%s: %" PRId64 " devices, %" PRId64 " allocations and %" PRId64 " registrations are left", t->profile,
          watched->opened, watched->memory, watched->host);
    queue_fails = 0;
    queue_failed = NULL;
}

/* ---------------------------------------------------------------------------------------------------- copies that fail
 */

/* Whichever call of a queue fails: waits end with that, what was signalled is there, and nothing is left. */
static void failing_rank(sim_rank *r, void *argument) {
    struct test *t = argument;
    life l;
    begin(r, t, &l, SECOND);
    if (r->rank == 0) queue_calls = 0, queue_fails = t->fails;
    sim_barrier(r);
    const uint32_t peer = 1 - r->rank;
    for (int round = 1; round <= 3; round++) {
        memset(l.heap, round, 64);
        int status = uccl_ep_put_signal(l.comm, 0, peer, 0, 4096, 64, 1, 1, DEFAULT, NULL);
        if (!status) status = uccl_ep_wait_signal(l.comm, 1, (uint64_t)round, peer, 5 * SECOND, NULL);
        uint64_t word = 0;
        OK(uccl_ep_read_signal(l.comm, 1, &word));
        if (word >= (uint64_t)round && !t->failed) bytes_are(l.heap, 4096, round, "behind its signal (SIG-2)");
        const int quiet = uccl_ep_quiet(l.comm, UCCL_EP_NO_CHANNEL, 5 * SECOND);
        if (!status && !quiet) bytes_are(t->heap[peer], 4096, round, "after quiet (QUI-1)");
        if (status || quiet) {
            t->failed = true;
            uint32_t records = 0;
            OK(uccl_ep_errors(l.comm, NULL, 0, &records));
            if (l.staging->broken) {
                uccl_ep_error error;
                CHECK(records, "%s: a queue failed and left no record", t->profile);
                OK(uccl_ep_errors(l.comm, &error, 1, &records));
                CHECK(error.status == UCCL_EP_E_SYSTEM && strstr(error.text, "the heap is staged") &&
                          strstr(error.text, "the test wants it so"),
                      "%s: %s", t->profile, error.text);
            } else {
                CHECK(quiet == UCCL_EP_OK || quiet == UCCL_EP_E_PEER_LOST, "%s: %s", t->profile,
                      uccl_ep_status_name(quiet));
            }
            break;
        }
        if (t->failed) break;
        meet(r, t, (uint32_t)round, t->failed ? 1 : 2);
    }
    for (uint32_t i = 0; i < 16; i++) t->meetings[i] = 2; /* nobody waits for one that failed */
    meet(r, t, 0, 2);
    sim_barrier(r);
    end(r, &l);
}

static void test_failing(void) {
    for (size_t i = 0; i < 2; i++) {
        struct test t = {.profile = profiles[i]};
        for (t.failed = true; t.failed;) {
            t = (struct test){.profile = profiles[i], .fails = t.fails + 1};
            run(failing_rank, &t, 2, 0);
        }
        CHECK(t.fails > 12, "only %" PRIu64 " calls of queues can fail", t.fails);
    }
}

/* Copies that never end are found out, at the source as at the target, and waits end. */
static void stuck_rank(sim_rank *r, void *argument) {
    struct test *t = argument;
    life l;
    begin(r, t, &l, SECOND);
    uccl_ep_sim_world *world = r->group->world;
    if (r->rank == 0) {
        hold(world, &l.staging->out, UINT64_MAX);
        uint64_t ticket;
        OK(uccl_ep_put_signal(l.comm, 0, 1, 0, 4096, 64, 1, 1, DEFAULT, &ticket));
        EXPECT(uccl_ep_wait_source(l.comm, 0, ticket, SECOND / 4), UCCL_EP_E_DEADLINE);
        EXPECT(uccl_ep_wait(l.comm, 0, ticket, 10 * SECOND), UCCL_EP_E_DEADLINE);
        CHECK_TEXT("copies made no progress within peer_timeout");
        held = NULL;
        char report[4096];
        OK(uccl_ep_report(l.comm, report, sizeof report));
        CHECK(strstr(report, "heap staged through host memory"), "%s", report);
    }
    sim_barrier(r);
    uint64_t word = 0;
    OK(uccl_ep_read_signal(l.comm, 1, &word));
    CHECK_EQ(word, 0);
    sim_barrier(r);
    end(r, &l);
}

static void stuck_target_rank(sim_rank *r, void *argument) {
    struct test *t = argument;
    life l;
    begin(r, t, &l, SECOND);
    if (r->rank == 1) hold(r->group->world, &l.staging->in, UINT64_MAX);
    sim_barrier(r);
    if (r->rank == 0) {
        uint64_t ticket;
        OK(uccl_ep_put_signal(l.comm, 0, 1, 0, 4096, 64, 1, 1, DEFAULT, &ticket));
        EXPECT(uccl_ep_wait(l.comm, 0, ticket, 10 * SECOND), UCCL_EP_E_PEER_LOST);
    } else {
        while (!l.comm->proxies[0].endpoint_broken) SIM->yield(r->group->world);
        uint64_t word = 0;
        OK(uccl_ep_read_signal(l.comm, 1, &word));
        CHECK_EQ(word, 0);
        bytes_are(l.heap, 4096, 0, "where nothing was brought");
    }
    sim_barrier(r);
    held = NULL;
    end(r, &l);
}

/* ------------------------------------------------------------------------------------------- copies that end too late
 */

/* The target dies while a source is being copied: nothing is told of the source before the copy has ended (ERR-2). */
static void dead_target_rank(sim_rank *r, void *argument) {
    struct test *t = argument;
    life l;
    begin(r, t, &l, SECOND);
    uccl_ep_sim_world *world = r->group->world;
    if (r->rank == 1) {
        while (!t->lost) SIM->yield(world); /* it dies here, and goes on when the world ends */
        end(r, &l);
        return;
    }
    hold(world, &l.staging->out, SECOND / 2);
    uint64_t ticket;
    OK(uccl_ep_put_signal(l.comm, 0, 1, 0, 4096, 64, 1, 1, DEFAULT, &ticket));
    turns(r, 50);
    SIM->kill(world, 1);
    t->lost = true;
    EXPECT(uccl_ep_exclude(l.comm, 1), UCCL_EP_OK);
    CHECK(SIM->now(world) >= held_until, "%s: let go of while its source is read", t->profile);
    uccl_ep_channel_stats stats;
    OK(uccl_ep_channel_query(l.comm, 0, &stats));
    CHECK_EQ(stats.complete, 1);
    t->value = 1;
    end(r, &l);
}

/* The source dies while its bytes are being copied: once it is excluded, nothing of it lands any more. */
static void dead_source_rank(sim_rank *r, void *argument) {
    struct test *t = argument;
    life l;
    begin(r, t, &l, SECOND);
    uccl_ep_sim_world *world = r->group->world;
    if (r->rank == 1) {
        while (!t->lost) SIM->yield(world);
        memset(l.heap, 9, 64);
        (void)!uccl_ep_put_signal(l.comm, 0, 0, 0, 4096, 64, 1, 1, DEFAULT, NULL);
        while (!t->value) SIM->yield(world); /* it dies here, and goes on when the world ends */
        end(r, &l);
        return;
    }
    hold(world, &l.staging->in, SECOND / 2);
    t->lost = true;
    while (!staging_lands(&l.comm->proxies[0], 1)) SIM->yield(world);
    SIM->kill(world, 1);
    OK(uccl_ep_exclude(l.comm, 1));
    CHECK(SIM->now(world) >= held_until, "%s: let go of while its bytes may land", t->profile);
    memset(l.heap + 4096, 5, 64);
    turns(r, 2000);
    bytes_are(l.heap, 4096, 5, "of a rank that was excluded");
    uint64_t word = 0;
    OK(uccl_ep_read_signal(l.comm, 1, &word));
    CHECK_EQ(word, 0);
    t->value = 1;
    end(r, &l);
}

/* A source gives up on a target whose copies are late. After the reset nothing of before lands (ERR-6). */
static void reset_rank(sim_rank *r, void *argument) {
    struct test *t = argument;
    life l;
    begin(r, t, &l, r->rank ? 20 * SECOND : SECOND);
    uccl_ep_sim_world *world = r->group->world;
    const uccl_ep_bootstrap bootstrap = sim_bootstrap(r);
    if (r->rank == 1) hold(world, &l.staging->in, 4 * SECOND);
    sim_barrier(r);
    memset(l.heap, 9, 64);
    if (r->rank == 0) {
        OK(uccl_ep_put_signal(l.comm, 0, 1, 0, 4096, 64, 1, 1, DEFAULT, NULL));
        EXPECT(uccl_ep_quiet(l.comm, 0, 10 * SECOND), UCCL_EP_E_PEER_LOST);
    }
    sim_barrier(r);
    OK(uccl_ep_reset(l.comm, &bootstrap));
    CHECK(SIM->now(world) >= held_until, "%s: a reset went on while copies were under way", t->profile);
    memset(l.heap + 4096, 5, 64);
    sim_barrier(r);
    turns(r, 500);
    bytes_are(l.heap, 4096, 5, "after a reset");
    uint64_t word = 0;
    OK(uccl_ep_read_signal(l.comm, 1, &word));
    CHECK_EQ(word, 0);
    sim_barrier(r);
    const uint32_t peer = 1 - r->rank;
    for (int round = 1; round <= 20; round++) {
        memset(l.heap, round, 64);
        OK(uccl_ep_put_signal(l.comm, 0, peer, 0, 4096, 64, 1, 1, DEFAULT, NULL));
        OK(uccl_ep_wait_signal(l.comm, 1, (uint64_t)round, peer, DEFAULT, NULL));
        bytes_are(l.heap, 4096, round, "in a new incarnation");
        OK(uccl_ep_quiet(l.comm, 0, DEFAULT));
        sim_barrier(r);
    }
    end(r, &l);
}

/* ----------------------------------------------------------------------------------------- what nobody is to believe
 */

/* A record for bytes beyond the heap: nothing is written there, and who wrote it is given up (MEM-2, ERR-4). */
static void stranger_rank(sim_rank *r, void *argument) {
    struct test *t = argument;
    life l;
    begin(r, t, &l, 5 * SECOND);
    memset(l.heap + HEAP, 77, HEAP);
    if (r->rank == 0) {
        const struct proxy *p = &l.comm->proxies[0];
        const struct mailbox *m = &p->mailbox;
        const uint64_t count = p->links[1].expected;
        const struct record record = record_tagged(1, 2, count);
        const struct extent beyond = extent_of(HEAP - 16, t->value, true, count);
        char *place = m->base + m->inbox + m->records + m->slots * m->record_bytes;
        memcpy(place, &record, sizeof record);
        memcpy(place + sizeof record, &beyond, sizeof beyond);
        *(uint8_t *)(m->base + m->inbox + m->wakes + m->wake_bytes) = (uint8_t)count;
        while (p->peers[1].state == PEER_UP) SIM->yield(r->group->world);
        uccl_ep_error error;
        uint32_t n = 0;
        OK(uccl_ep_errors(l.comm, &error, 1, &n));
        CHECK(n == 1 && error.status == UCCL_EP_E_MALFORMED && error.peer == 1 &&
                  strstr(error.text, "nothing that it says can be believed"),
              "%u records: %s", n, error.text);
        turns(r, 500);
        bytes_are(l.heap, HEAP, 77, "behind the heap");
        uint64_t word = 0;
        OK(uccl_ep_read_signal(l.comm, 2, &word));
        CHECK_EQ(word, 0);
    }
    sim_barrier(r);
    end(r, &l);
}

/* ------------------------------------------------------------------------------------------------- what is refused */

struct refusal {
    const char *said;
    uccl_ep_status status;
    uint32_t staging[2], strategy;
    bool host[2];
};
static const struct refusal refusals[] = {
    {"staging 3 is unknown", UCCL_EP_E_INVALID, {3, 3}, 0, {0}},
    {"registers no emulated memory, nor dmabuf; and staging is off", UCCL_EP_E_CAPABILITY, {1, 1}, 0, {0}},
    {" has staging ", UCCL_EP_E_BOOTSTRAP, {0, 2}, 0, {0}},
    {"take heaps of one kind on all ranks", UCCL_EP_E_CAPABILITY, {0, 0}, 0, {false, true}},
    {"it needs a part for the target's proxy (heaps are staged)",
     UCCL_EP_E_CAPABILITY,
     {2, 2},
     UCCL_EP_STRATEGY_SENDER_HOLD_SUM,
     {0}},
};

static void refused_rank(sim_rank *r, void *argument) {
    struct test *t = argument;
    const struct refusal *of = &refusals[t->value];
    life l;
    sim_comm_config c;
    configure(r, t, &l, &c);
    l.comm = NULL;
    c.config.staging = of->staging[r->rank];
    c.config.strategy = of->strategy;
    c.config.flags = UCCL_EP_CONFIG_SINGLE_WRITER;
    if (of->host[r->rank]) c.config.heap = NULL, c.config.heap_kind = UCCL_EP_MEMORY_HOST;
    const uccl_ep_bootstrap bootstrap = sim_bootstrap(r);
    EXPECT(uccl_ep_comm_create(&c.config, &bootstrap, &l.comm), of->status);
    CHECK_TEXT(of->said);
    end(r, &l);
}

/* Each call of the driver that can fail in create does: nothing is left. */
static void create_rank(sim_rank *r, void *argument) {
    struct test *t = argument;
    life l;
    sim_comm_config c;
    configure(r, t, &l, &c);
    const uccl_ep_bootstrap bootstrap = sim_bootstrap(r);
    uccl_ep_status status = UCCL_EP_E_SYSTEM;
    uint64_t n = 0;
    while (status != UCCL_EP_OK) {
        watched->calls = 0;
        watched->fail = ++n;
        status = uccl_ep_comm_create(&c.config, &bootstrap, &l.comm);
        if (status == UCCL_EP_OK) break;
        CHECK_EQ(status, UCCL_EP_E_SYSTEM);
        CHECK(watched->opened == 1 && watched->memory == 1 && !watched->host, "call %" PRIu64 " (%s) left something", n,
              watched->failed);
    }
    watched->fail = 0;
    CHECK(n > 6, "only %" PRIu64 " calls can fail", n);
    uccl_ep_comm_destroy(l.comm);
    for (queue_fails = 1; queue_fails <= 2; queue_fails++) {
        queue_calls = 0;
        EXPECT(uccl_ep_comm_create(&c.config, &bootstrap, &l.comm), UCCL_EP_E_SYSTEM);
        CHECK_TEXT("opening a queue for copies failed: the test wants it so");
        CHECK(watched->opened == 1 && watched->memory == 1 && !watched->host, "a queue that failed left something");
    }
    queue_fails = 0;
    OK(uccl_ep_comm_create(&c.config, &bootstrap, &l.comm));
    sim_proxies(r->group->world, 0, l.comm, 1);
    end(r, &l);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 300);
    void *library = dlopen(BALANCE, RTLD_NOW | RTLD_LOCAL);
    CHECK(library, "dlopen: %s", dlerror());
    watched = dlsym(library, "balance_state");
    const union {
        void *symbol;
        const uccl_ep_accelerator *(*function)(void);
    } entry = {.symbol = dlsym(library, UCCL_EP_ACCELERATOR_ENTRY)};
    CHECK(watched && entry.symbol, "dlsym: %s", dlerror());
    plain = *entry.function();
    watched->table.error_text = error_text;
    watched->table.queue_open = queue_open;
    watched->table.copy_start = copy_start;
    watched->table.mark = mark;
    watched->table.marks_done = marks_done;

    test_failing();
    for (size_t i = 0; i < 2; i++) {
        struct test t = {.profile = profiles[i]};
        run(stuck_rank, &t, 2, 0);
        run(stuck_target_rank, &t, 2, 0);
        t = (struct test){.profile = profiles[i]};
        run(dead_target_rank, &t, 2, 1 << 1);
        CHECK_EQ(t.value, 1);
        t = (struct test){.profile = profiles[i]};
        run(dead_source_rank, &t, 2, 1 << 1);
        CHECK_EQ(t.value, 1);
        t = (struct test){.profile = profiles[i]};
        run(reset_rank, &t, 2, 0);
    }
    static const uint64_t lengths[] = {32, HEAP, UINT64_MAX >> (TAG_BITS + 1)};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        struct test t = {.profile = "strawman-min", .value = lengths[i]};
        run(stranger_rank, &t, 2, 0);
    }
    for (uint64_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        struct test t = {.profile = "strawman-min", .value = i};
        run(refused_rank, &t, 2, 0);
    }
    struct test t = {.profile = "efa"};
    run(create_rank, &t, 1, 0);
    return test_end();
}
