/* SPDX-License-Identifier: Apache-2.0
 *
 * The shared-memory backend with heaps in device memory, through the emulation and a fake CUDA driver: both carry
 * copies out late, and the fake's device memory cannot be touched by a CPU at all.
 */
#define _GNU_SOURCE /* memfd_create */
#include "fake_driver.h"
#include "shm_ranks.h"

#define HEAP (64 * KIB)
#define SLOTS 8u
#define SLOT_BYTES 2048u
#define WORDS_EACH 8u /* of a source, at each target */

static const uccl_ep_accelerator *driver; /* the accelerator itself */
static uccl_ep_accelerator accel;         /* as the backend sees it: with the knobs below */
static fake_driver *fake;

static struct knobs {
    bool stalled;   /* nothing is ever done */
    bool lying;     /* everything is done at once */
    unsigned again; /* one mark in so many is refused; 0: none */
    int fail_copy, fail_marks;
    uint64_t random, given, copies;
} knobs;

static uccl_ep_status copy_start(uccl_ep_copy_queue *queue, void *to, const void *from, uint64_t bytes) {
    knobs.copies++;
    if (knobs.fail_copy) return UCCL_EP_E_SYSTEM;
    const int before = fake ? fake->unpinned : 0;
    const uccl_ep_status status = driver->copy_start(queue, to, from, bytes);
    if (fake) CHECK_EQ(fake->unpinned, before); /* it would copy in this thread */
    return status;
}
static uccl_ep_status mark(uccl_ep_copy_queue *queue, uint64_t *number) {
    test_rng rng = {knobs.random++};
    if (knobs.again && test_below(&rng, knobs.again) == 0) return UCCL_EP_E_AGAIN;
    const uccl_ep_status status = driver->mark(queue, number);
    if (status == UCCL_EP_OK) knobs.given = *number;
    return status;
}
static uccl_ep_status marks_done(uccl_ep_copy_queue *queue, uint64_t *done) {
    if (knobs.fail_marks) return UCCL_EP_E_SYSTEM;
    if (knobs.lying) *done = knobs.given;
    return knobs.stalled || knobs.lying ? UCCL_EP_OK : driver->marks_done(queue, done);
}

/* ------------------------------------------------------------------------------------------------------------ ranks */

static uccl_ep_memory_kind device_kind;
static unsigned host_heaps; /* bit a rank: its heap is host memory */

static bool on_device(const rank *r) {
    return (host_heaps >> r->rank & 1u) == 0;
}

static void gpu_open(void) {
    uccl_ep_gpu_info info = {.size = sizeof info};
    CHECK_EQ(driver->query(0, &info), UCCL_EP_OK);
    device_kind = info.memory_kind;
    CHECK_EQ(driver->open(0, &host.gpu), UCCL_EP_OK);
    accel = *driver;
    accel.copy_start = copy_start;
    accel.mark = mark;
    accel.marks_done = marks_done;
    host.accelerator = &accel;
    knobs = (struct knobs){.random = test_seed_value};
}

static void gpu_close(void) {
    driver->close(host.gpu);
    host.gpu = NULL;
    host.accelerator = NULL;
    if (!fake) return;
    CHECK_EQ(fake->allocations, 0);
    CHECK_EQ(fake->registrations, 0);
    CHECK_EQ(fake->streams, 0);
    CHECK_EQ(fake->events, 0);
    CHECK_EQ(fake->imports, 0);
    CHECK_EQ(fake->contexts, 0);
}

static void put_bytes(const rank *r, uint64_t at, const void *from, uint64_t n) {
    CHECK_EQ(driver->copy(host.gpu, r->base[UCCL_EP_REGION_HEAP] + at, from, n), UCCL_EP_OK);
}
static void get_bytes(const rank *r, uint64_t at, void *to, uint64_t n) {
    CHECK_EQ(driver->copy(host.gpu, to, r->base[UCCL_EP_REGION_HEAP] + at, n), UCCL_EP_OK);
}

static uccl_ep_memory heap_of(const rank *r) {
    return (uccl_ep_memory){.size = sizeof(uccl_ep_memory),
                            .kind = on_device(r) ? device_kind : UCCL_EP_MEMORY_HOST,
                            .base = r->base[UCCL_EP_REGION_HEAP],
                            .bytes = HEAP,
                            .dmabuf_fd = -1,
                            .access = RIGHTS};
}

/* rank_open, with the heap where it belongs; it does not begin where its allocation does. */
static void open_rank(rank *r, uint32_t me, uint32_t peers) {
    rank_open(r, me, peers, HEAP, 256);
    table->region_deregister(r->device, UCCL_EP_REGION_HEAP);
    void *memory = r->memory[UCCL_EP_REGION_HEAP], *there;
    if (on_device(r)) {
        CHECK_EQ(driver->device_alloc(host.gpu, HEAP + 2 * GUARD, &memory), UCCL_EP_OK);
        r->base[UCCL_EP_REGION_HEAP] = (unsigned char *)memory + GUARD;
    } else { /* as the core does */
        CHECK_EQ(driver->host_register(host.gpu, memory, (r->memory_bytes[UCCL_EP_REGION_HEAP] + 4095) / 4096 * 4096,
                                       &there),
                 UCCL_EP_OK);
    }
    const uccl_ep_memory region = heap_of(r);
    CHECK_OK(table->region_register(r->device, UCCL_EP_REGION_HEAP, &region));
}

static void close_rank(rank *r) {
    for (uint32_t e = 0; e < r->endpoints; e++) table->endpoint_close(r->endpoint[e]);
    for (unsigned i = 0; i < UCCL_EP_REGIONS; i++) table->region_deregister(r->device, (uccl_ep_region)i);
    if (on_device(r))
        driver->device_free(host.gpu, r->base[UCCL_EP_REGION_HEAP] - GUARD);
    else
        driver->host_unregister(host.gpu, r->memory[UCCL_EP_REGION_HEAP]);
    for (unsigned i = 0; i < UCCL_EP_REGIONS; i++) table->memory_free(r->device, r->memory[i], r->memory_bytes[i]);
    table->device_close(r->device);
}

static void open_mesh(rank *ranks, uint32_t n, papers *all) {
    for (uint32_t i = 0; i < n; i++) {
        open_rank(&ranks[i], i, n);
        all[i] = rank_papers(&ranks[i]);
    }
    for (uint32_t i = 0; i < n; i++) rank_start(&ranks[i], all);
    UNTIL(mesh_connected(ranks, n), "the ranks did not connect");
    for (uint32_t i = 0; i < n; i++) rank_import(&ranks[i], all);
}

/* --------------------------------------------------------------------------------------------------------- messages */

/*
 * From every rank to every rank, its own among them, on both endpoints: message k fills a slot of its own with bytes
 * that only it has, leaves its number in the mailbox (a write by the CPU, behind the copy), and adds to a word. Who
 * sees the word must find all of that. An acknowledgement is an add on the way back.
 */
typedef struct flow {
    uint64_t sent, completed, confirmed; /* by the source */
    uint64_t checked;                    /* by the target */
} flow;

enum { WORD_SENT, WORD_ACK = 4 };

static uint32_t message_bytes(uint32_t from, uint32_t to, uint64_t k) {
    test_rng rng = {from * 1000003u + to * 1009u + k * 7919u};
    return test_below(&rng, 8) == 0 ? 0 : (uint32_t)test_below(&rng, SLOT_BYTES) + 1;
}
static void message(uint32_t from, uint32_t to, uint64_t k, unsigned char *bytes) {
    test_rng rng = {from * 7u + to * 77u + k * 777777u};
    for (uint32_t i = 0; i < SLOT_BYTES; i++) bytes[i] = (unsigned char)test_random(&rng);
}
static uint64_t source_slot(uint32_t to, uint64_t k) {
    return ((uint64_t)to * 2 + k % 2) * SLOT_BYTES;
}
static uint64_t target_slot(uint32_t from, uint64_t k) {
    return HEAP / 2 + ((uint64_t)from * 4 + k % 4) * SLOT_BYTES;
}
static uint64_t own_number(uint32_t to, uint64_t k) {
    return (to * 2 + k % 2) * sizeof(uint64_t);
}
static uint64_t mailbox_slot(uint32_t from) {
    return 2 * KIB + from * sizeof(uint64_t);
}

/* As many of the pieces as are taken, in order: the rest waits for the next turn. */
static void send_some(const rank *r, uint32_t to, flow *f, uint32_t *piece, uint64_t until) {
    const uint32_t e = to % r->endpoints;
    /* Message k - 2 has left its source, and message k - 4 its target. */
    while (f->sent < until && f->sent - f->confirmed < 2 && f->completed + 3 >= 3 * f->sent) {
        const uint64_t k = f->sent;
        const uint32_t bytes = message_bytes(r->rank, to, k);
        if (*piece == 0) {
            unsigned char content[SLOT_BYTES];
            message(r->rank, to, k, content);
            if (bytes) put_bytes(r, source_slot(to, k), content, bytes);
            /* What goes to the mailbox comes out of the own one. */
            memcpy(r->base[UCCL_EP_REGION_MAILBOX] + own_number(to, k), &k, sizeof k);
        }
        uccl_ep_operation operations[3] = {op_write(source_slot(to, k), target_slot(r->rank, k), bytes, k * 4),
                                           {.kind = UCCL_EP_OPERATION_WRITE,
                                            .flags = UCCL_EP_OPERATION_SIGNALLED,
                                            .local_region = UCCL_EP_REGION_MAILBOX,
                                            .remote_region = UCCL_EP_REGION_MAILBOX,
                                            .length = sizeof k,
                                            .local_offset = own_number(to, k),
                                            .remote_offset = mailbox_slot(r->rank),
                                            .cookie = k * 4 + 1},
                                           op_add(r->rank * WORDS_EACH + WORD_SENT, 1, k * 4 + 2)};
        uint32_t accepted;
        CHECK_OK(table->submit(r->endpoint[e], to, operations + *piece, 3 - *piece, 0, &accepted));
        *piece += accepted;
        if (*piece < 3) return;
        *piece = 0;
        f->sent++;
    }
}

static void check_arrived(const rank *r, uint32_t from, flow *f) {
    const uint64_t seen = __atomic_load_n(word(r, from * WORDS_EACH + WORD_SENT), __ATOMIC_ACQUIRE);
    while (f->checked < seen) {
        const uint64_t k = f->checked;
        unsigned char expected[SLOT_BYTES], found[SLOT_BYTES];
        const uint32_t bytes = message_bytes(from, r->rank, k);
        message(from, r->rank, k, expected);
        if (bytes) {
            get_bytes(r, target_slot(from, k), found, bytes);
            CHECK(memcmp(found, expected, bytes) == 0, "message %" PRIu64 " of rank %u to %u: the word came first", k,
                  from, r->rank);
        }
        uint64_t number;
        memcpy(&number, r->base[UCCL_EP_REGION_MAILBOX] + mailbox_slot(from), sizeof number);
        CHECK(number >= k, "the mailbox has number %" PRIu64 ", the word %" PRIu64, number, seen);
        f->checked++;
        const uccl_ep_operation ack = op_add(r->rank * WORDS_EACH + WORD_ACK, 1, UINT64_MAX);
        uint32_t accepted = 0;
        for (const uint64_t until = test_now_ns() + PATIENCE_NS; !accepted;) {
            CHECK_OK(table->submit(r->endpoint[from % r->endpoints], from, &ack, 1, 0, &accepted));
            uccl_ep_completion none[1];
            if (!accepted) CHECK(table->poll(r->endpoint[from % r->endpoints], none, 0) == 0, "%s", said);
            CHECK(test_now_ns() < until, "no room for an add");
        }
    }
}

/* Completions of one peer come in order, and what is complete is there: the source is free. */
static void take_completions(const rank *r, flow *flows) {
    uccl_ep_completion done[16];
    for (uint32_t e = 0; e < r->endpoints; e++) {
        const int n = table->poll(r->endpoint[e], done, 16);
        CHECK(n >= 0, "poll gave %d: %s", n, said);
        for (int i = 0; i < n; i++) {
            if (done[i].cookie == UINT64_MAX) continue;
            flow *f = &flows[done[i].peer];
            CHECK_EQ(done[i].status, UCCL_EP_OK);
            CHECK_EQ(done[i].cookie, f->completed / 3 * 4 + f->completed % 3);
            f->completed++;
        }
    }
}

typedef struct talker {
    flow out[MAX_RANKS], in[MAX_RANKS];
    uint32_t piece[MAX_RANKS];
} talker;

static bool talk(const rank *r, talker *t, uint64_t messages) {
    bool all = true;
    for (uint32_t peer = 0; peer < r->peers; peer++) {
        flow *f = &t->out[peer];
        f->confirmed = __atomic_load_n(word(r, peer * WORDS_EACH + WORD_ACK), __ATOMIC_ACQUIRE);
        send_some(r, peer, f, &t->piece[peer], messages);
        check_arrived(r, peer, &t->in[peer]);
        all = all && f->confirmed == messages && f->completed == 3 * messages && t->in[peer].checked == messages;
    }
    take_completions(r, t->out);
    return all;
}

static void mesh_talks(uint32_t n, unsigned hosts, uint64_t messages) {
    host_heaps = hosts;
    rank ranks[MAX_RANKS];
    papers all[MAX_RANKS];
    static talker talkers[MAX_RANKS];
    memset(talkers, 0, sizeof talkers);
    open_mesh(ranks, n, all);
    CHECK(knobs.copies == 0, "copies before anything was sent");
    const uint64_t until = test_now_ns() + PATIENCE_NS;
    for (bool done = false; !done;) {
        done = true;
        for (uint32_t i = 0; i < n; i++) done = talk(&ranks[i], &talkers[i], messages) && done;
        CHECK(test_now_ns() < until, "the messages did not arrive");
    }
    CHECK(knobs.copies > 0, "no copy was needed");
    for (uint32_t i = 0; i < n; i++) close_rank(&ranks[i]);
    knobs.copies = 0;
}

static void test_one_process(void) {
    gpu_open();
    const uint64_t messages = test_scaled(200);
    mesh_talks(1, 0, messages);
    mesh_talks(2, 0, messages);
    mesh_talks(4, 0, messages);
    mesh_talks(4, 0xa, messages); /* some heaps in host memory */
    knobs.again = 2;              /* few marks */
    mesh_talks(4, 0x1, messages);
    gpu_close();
}

static void talk_as_process(board *b, uint32_t me) {
    gpu_open();
    rank r;
    talker t = {.piece = {0}};
    open_rank(&r, me, b->ranks);
    b->papers[me] = rank_papers(&r);
    meet(b);
    rank_start(&r, b->papers);
    UNTIL(rank_connected(&r), "rank %u did not get all its connections", me);
    rank_import(&r, b->papers);
    rank_import(&r, b->papers); /* again: nothing is opened twice */
    if (fake) CHECK_EQ(fake->imports, (int)(b->ranks - 1) - __builtin_popcount(host_heaps & ~(1u << me)));
    meet(b);
    UNTIL(talk(&r, &t, test_scaled(200)), "rank %u: the messages did not arrive", me);
    meet(b);
    close_rank(&r);
    meet(b); /* whose memory is open elsewhere frees it last */
    gpu_close();
}

static void test_processes(void) {
    host_heaps = 0;
    run_ranks(talk_as_process, 2);
    run_ranks(talk_as_process, 4);
    host_heaps = 0x6;
    run_ranks(talk_as_process, 4);
}

/* The check above can fail: with completions before their copies it does. */
static int lies; /* what it says */

static void lie(board *b, uint32_t me) {
    (void)b, (void)me;
    CHECK(dup2(lies, STDERR_FILENO) >= 0, "dup2: %s", strerror(errno));
    gpu_open();
    knobs.lying = true;
    mesh_talks(2, 0, 200);
}

static void test_mutant(void) {
    board *b = board_open(1);
    lies = memfd_create("lies", MFD_CLOEXEC);
    CHECK(lies >= 0, "memfd_create: %s", strerror(errno));
    const pid_t pid = spawn(lie, b, 0);
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status), "status %#x", (unsigned)status);
    CHECK_EQ(WEXITSTATUS(status), 1);
    char text[1024];
    const ssize_t n = pread(lies, text, sizeof text - 1, 0);
    CHECK(n > 0, "nothing was said");
    text[n] = 0;
    CHECK(strstr(text, "the word came first"), "the text is: %s", text);
    close(lies);
    munmap(b, sizeof(*b));
}

/* ----------------------------------------------------------------------------------------------------------- trouble
 */

static uccl_ep_completion completions[256];

static void test_disconnect(void) {
    gpu_open();
    host_heaps = 0;
    rank ranks[2];
    papers all[2];
    open_mesh(ranks, 2, all);
    uccl_ep_endpoint *endpoint = ranks[0].endpoint[0];
    const uccl_ep_operation work[] = {op_write(0, 0, 512, 1), op_add(0, 1, 2)};
    knobs.stalled = true;
    for (int i = 0; i < 20; i++) submit_all(&ranks[0], 0, 1, work, 2);
    submit_all(&ranks[0], 0, 0, work, 2); /* to itself: not concerned */
    CHECK_EQ(table->poll(endpoint, completions, 256), 0);
    CHECK_EQ(*word(&ranks[1], 0), 0);
    for (int i = 0; i < 5; i++) {
        CHECK_EQ(table->disconnect(endpoint, 1), UCCL_EP_IN_PROGRESS);
        CHECK_EQ(table->poll(endpoint, completions, 256), 0);
    }
    knobs.stalled = false;
    UNTIL(table->disconnect(endpoint, 1) == UCCL_EP_OK, "the copies did not end");
    int n = 0;
    UNTIL((n += table->poll(endpoint, completions + n, 256)) == 2, "the others' completions did not come");
    CHECK(completions[0].peer == 0 && completions[1].peer == 0, "of a peer that was let go");
    CHECK_EQ(*word(&ranks[1], 0), 0); /* behind a failure none is executed */
    CHECK_EQ(*word(&ranks[0], 0), 1);
    /* And again. */
    CHECK_OK(table->connect(endpoint, 1, all[1].address[0].data, all[1].address[0].bytes));
    UNTIL(table->connect_poll(endpoint, 1) == UCCL_EP_OK, "connecting again");
    submit_all(&ranks[0], 0, 1, work, 2);
    n = 0;
    UNTIL((n += table->poll(endpoint, completions + n, 256)) == 2, "the completions did not come");
    CHECK_EQ(*word(&ranks[1], 0), 1);
    for (int i = 0; i < 2; i++) close_rank(&ranks[i]);
    gpu_close();
}

/* What is not taken is not lost, and nothing overtakes. */
static void test_room(void) {
    gpu_open();
    host_heaps = 0;
    rank ranks[2];
    papers all[2];
    open_mesh(ranks, 2, all);
    uccl_ep_operation many[300];
    for (uint32_t i = 0; i < 300; i++)
        many[i] = i % 2 ? op_add(i % 8, 1, i) : op_write(i * 16, i * 16, 16 * (i % 5), i);
    knobs.stalled = true;
    uint32_t accepted = 0, more;
    CHECK_OK(table->submit(ranks[0].endpoint[0], 1, many, 300, 0, &accepted));
    CHECK_EQ(accepted, 256); /* `inflight` */
    CHECK_OK(table->submit(ranks[0].endpoint[0], 1, many + accepted, 300 - accepted, 0, &more));
    CHECK_EQ(more, 0);
    knobs.stalled = false;
    uint64_t seen = 0;
    const uint64_t until = test_now_ns() + PATIENCE_NS;
    while (seen < 300) {
        CHECK(test_now_ns() < until, "only %" PRIu64 " completions came", seen);
        const int n = table->poll(ranks[0].endpoint[0], completions, 256);
        for (int i = 0; i < n; i++) CHECK_EQ(completions[i].cookie, seen++);
        CHECK_OK(table->submit(ranks[0].endpoint[0], 1, many + accepted, 300 - accepted, 0, &more));
        accepted += more;
    }
    for (int i = 0; i < 2; i++) close_rank(&ranks[i]);
    gpu_close();
}

/* Writes become visible in order: a copy does not overtake a write that the CPU does behind another copy. */
static void test_order(void) {
    gpu_open();
    host_heaps = 0;
    rank ranks[2];
    papers all[2];
    open_mesh(ranks, 2, all);
    uccl_ep_operation number = op_write(0, 64, 8, 2);
    number.local_region = number.remote_region = UCCL_EP_REGION_MAILBOX;
    const uccl_ep_operation work[] = {op_write(0, 0, 512, 1), number, op_write(1024, 1024, 512, 3)};
    knobs.stalled = true;
    uint32_t accepted;
    CHECK_OK(table->submit(ranks[0].endpoint[0], 1, work, 3, 0, &accepted));
    CHECK_EQ(accepted, 2);
    CHECK_OK(table->submit(ranks[0].endpoint[0], 1, work + 2, 1, 0, &accepted));
    CHECK_EQ(accepted, 0);
    submit_all(&ranks[0], 0, 0, work + 2, 1); /* to another rank */
    knobs.stalled = false;
    int n = 0;
    UNTIL((n += table->poll(ranks[0].endpoint[0], completions + n, 256)) == 3, "the completions did not come");
    submit_all(&ranks[0], 0, 1, work + 2, 1);
    for (int i = 0; i < 2; i++) close_rank(&ranks[i]);
    gpu_close();
}

static void test_broken_queue(void) {
    gpu_open();
    host_heaps = 0;
    rank ranks[2];
    papers all[2];
    open_mesh(ranks, 2, all);
    const uccl_ep_operation work[] = {op_write(0, 0, 512, 1), op_add(0, 1, 2)};
    uint32_t accepted;
    knobs.fail_copy = 1;
    CHECK_EQ(table->submit(ranks[0].endpoint[0], 1, work, 2, 0, &accepted), UCCL_EP_E_SYSTEM);
    CHECK_EQ(accepted, 0);
    knobs.fail_copy = 0;
    knobs.stalled = true;
    submit_all(&ranks[0], 1, 1, work, 2);
    knobs.stalled = false;
    knobs.fail_marks = 1;
    CHECK_EQ(table->poll(ranks[0].endpoint[1], completions, 256), UCCL_EP_E_SYSTEM);
    CHECK(strstr(said, "copying"), "the text is: %s", said);
    CHECK_EQ(table->disconnect(ranks[0].endpoint[1], 1), UCCL_EP_E_SYSTEM);
    CHECK_EQ(*word(&ranks[1], 0), 0);
    for (int i = 0; i < 2; i++) close_rank(&ranks[i]);
    gpu_close();
}

/* A peer that dies while copies to it are under way. */
static void die_or_watch(board *b, uint32_t me) {
    gpu_open();
    rank r;
    open_rank(&r, me, b->ranks);
    b->papers[me] = rank_papers(&r);
    meet(b);
    rank_start(&r, b->papers);
    UNTIL(rank_connected(&r), "rank %u did not get all its connections", me);
    rank_import(&r, b->papers);
    meet(b);
    if (me == 1) {
        atomic_store(&b->notes[1], 1);
        UNTIL(atomic_load(&b->notes[0]) == 1, "nothing was started");
        raise(SIGKILL);
    }
    const uccl_ep_operation work[] = {op_write(0, 0, 2048, 1), op_add(0, 1, 2)};
    knobs.stalled = true;
    for (int i = 0; i < 30; i++) submit_all(&r, 0, 1, work, 2);
    atomic_store(&b->notes[0], 1);
    uccl_ep_event event = {.kind = 0};
    UNTIL(table->events(r.endpoint[0], &event, 1) == 1, "nobody noticed");
    CHECK_EQ(event.kind, UCCL_EP_EVENT_PEER_LOST);
    uint32_t accepted;
    CHECK_REFUSED(table->submit(r.endpoint[0], 1, work, 2, 0, &accepted), UCCL_EP_E_PEER_LOST, "died");
    CHECK_EQ(table->disconnect(r.endpoint[0], 1), UCCL_EP_IN_PROGRESS);
    knobs.stalled = false;
    UNTIL(table->disconnect(r.endpoint[0], 1) == UCCL_EP_OK, "the copies did not end");
    CHECK_EQ(table->poll(r.endpoint[0], completions, 256), 0);
    submit_all(&r, 0, 0, work, 2); /* the rest goes on */
    int n = 0;
    UNTIL((n += table->poll(r.endpoint[0], completions + n, 256)) == 2, "the completions did not come");
    close_rank(&r);
    gpu_close();
}

static void test_death(void) {
    host_heaps = 0;
    board *b = board_open(2);
    const pid_t survivor = spawn(die_or_watch, b, 0), victim = spawn(die_or_watch, b, 1);
    reap(victim, SIGKILL);
    reap(survivor, 0);
    munmap(b, sizeof(*b));
}

/* --------------------------------------------------------------------------------------------------------- refusals */

static void test_refusals(void) {
    gpu_open();
    host_heaps = 0;
    uccl_ep_device *device;
    uccl_ep_caps caps = {.size = sizeof caps};
    CHECK_OK(table->device_open(&host, NULL, "promise=unordered", &device, &caps));
    const uint64_t kinds = UCCL_EP_CAP_CUDA_MEMORY | UCCL_EP_CAP_ROCM_MEMORY | UCCL_EP_CAP_EMULATED_MEMORY;
    CHECK_EQ(caps.flags & kinds, fake ? UCCL_EP_CAP_CUDA_MEMORY : UCCL_EP_CAP_EMULATED_MEMORY);
    void *memory;
    CHECK_EQ(driver->device_alloc(host.gpu, HEAP, &memory), UCCL_EP_OK);
    uccl_ep_memory region = {
        .size = sizeof region, .kind = device_kind, .base = memory, .bytes = HEAP, .dmabuf_fd = -1, .access = RIGHTS};
    CHECK_REFUSED(table->region_register(device, UCCL_EP_REGION_SIGNALS, &region), UCCL_EP_E_REGISTRATION, "host");
    CHECK_REFUSED(table->region_register(device, UCCL_EP_REGION_MAILBOX, &region), UCCL_EP_E_REGISTRATION, "host");
    region.base = (char *)memory + 4096;
    CHECK_REFUSED(table->region_register(device, UCCL_EP_REGION_HEAP, &region), UCCL_EP_E_REGISTRATION, "ends behind");
    region.base = &region;
    CHECK_REFUSED(table->region_register(device, UCCL_EP_REGION_HEAP, &region), UCCL_EP_E_REGISTRATION, "memory");
    region.base = memory;
    CHECK_OK(table->region_register(device, UCCL_EP_REGION_HEAP, &region));
    blob out = {.bytes = 100};
    CHECK_REFUSED(table->region_export(device, UCCL_EP_REGION_HEAP, out.data, &out.bytes), UCCL_EP_E_INVALID, "200");
    table->region_deregister(device, UCCL_EP_REGION_HEAP);
    driver->device_free(host.gpu, memory);
    table->device_close(device);

    /* Without an accelerator: what a host of interface 1.1 knows. */
    const uint32_t size = host.size;
    host.size = offsetof(uccl_ep_host, accelerator);
    CHECK_OK(table->device_open(&host, NULL, "", &device, &caps));
    CHECK_EQ(caps.flags & kinds, 0);
    CHECK_REFUSED(table->region_register(device, UCCL_EP_REGION_HEAP, &region), UCCL_EP_E_REGISTRATION, "accelerator");
    table->device_close(device);
    host.size = size;
    gpu_close();
}

/* One rank without an accelerator, and one whose memory cannot be shared. */
static void meet_stranger(board *b, uint32_t me) {
    const bool unshareable = b->notes[7] == 1;
    if (unshareable) setenv("UCCL_EP_EMULATION", "ipc=0", 1);
    gpu_open();
    host_heaps = unshareable ? 0 : 2;
    rank r;
    if (me == 1 && !unshareable) {
        host.gpu = NULL;
        rank_open(&r, me, b->ranks, HEAP, 256);
    } else {
        open_rank(&r, me, b->ranks);
    }
    b->papers[me] = rank_papers(&r);
    meet(b);
    rank_start(&r, b->papers);
    UNTIL(rank_connected(&r), "rank %u did not get all its connections", me);
    const blob *heap = &b->papers[1 - me].region[UCCL_EP_REGION_HEAP];
    const int status = table->region_import(r.device, 1 - me, UCCL_EP_REGION_HEAP, heap->data, heap->bytes);
    if (me == 1 || unshareable) {
        CHECK_EQ(status, UCCL_EP_E_REGISTRATION);
        CHECK(strstr(said, unshareable ? "share" : "accelerator"), "the text is: %s", said);
        const uccl_ep_operation operation = op_write(0, 0, 16, 1);
        uint32_t accepted;
        CHECK_REFUSED(table->submit(r.endpoint[0], 1 - me, &operation, 1, 0, &accepted), UCCL_EP_E_INVALID, "imported");
    } else {
        CHECK_EQ(status, UCCL_EP_OK);
    }
    meet(b);
    _exit(0);
}

static void test_strangers(void) {
    run_ranks(meet_stranger, 2);
    if (fake) return;
    board *b = board_open(2);
    b->notes[7] = 1;
    const pid_t pids[2] = {spawn(meet_stranger, b, 0), spawn(meet_stranger, b, 1)};
    for (int i = 0; i < 2; i++) reap(pids[i], 0);
    munmap(b, sizeof(*b));
}

/* What a peer says of its heap may be anything: it is refused, or it lies within what the handle names. */
static void forge(board *b, uint32_t me) {
    gpu_open();
    rank r;
    open_rank(&r, me, b->ranks);
    b->papers[me] = rank_papers(&r);
    meet(b);
    rank_start(&r, b->papers);
    UNTIL(rank_connected(&r), "rank %u did not get all its connections", me);
    if (me == 0) {
        test_rng rng = test_rng_at(3);
        for (uint64_t i = test_scaled(2000); i; i--) {
            blob bad = b->papers[1].region[UCCL_EP_REGION_HEAP];
            CHECK_EQ(bad.bytes, sizeof(shm_device_blob));
            const uint64_t at = test_below(&rng, sizeof(shm_region_blob));
            const unsigned char change = (unsigned char)(1 + test_below(&rng, 255));
            bad.data[at] ^= change;
            if (test_below(&rng, 4) == 0) bad.bytes = (uint32_t)test_below(&rng, sizeof bad.data);
            said[0] = 0;
            CHECK(table->region_import(r.device, 1, UCCL_EP_REGION_HEAP, bad.data, bad.bytes) != UCCL_EP_OK,
                  "byte %" PRIu64 " may be anything", at);
            CHECK(said[0], "without words");
        }
        for (uint64_t i = test_scaled(2000); i; i--) {
            shm_device_blob bad;
            memcpy(&bad, b->papers[1].region[UCCL_EP_REGION_HEAP].data, sizeof bad);
            bad.handle[test_below(&rng, 40)] ^= (uint8_t)(1 + test_below(&rng, 255));
            table->region_import(r.device, 1, UCCL_EP_REGION_HEAP, &bad, sizeof bad);
        }
    }
    meet(b);
    close_rank(&r);
    meet(b);
    if (me == 1) gpu_close();
}

static void test_forged(void) {
    host_heaps = 0;
    run_ranks(forge, 2);
}

/* ---------------------------------------------------------------------------------------------------------- running */

static void use_driver(const char *accelerator, const char *fake_path) {
    fake = NULL;
    if (fake_path) {
        void *library = dlopen(fake_path, RTLD_NOW | RTLD_LOCAL);
        CHECK(library, "dlopen: %s", dlerror());
        fake_driver_control_function *control;
        *(void **)&control = dlsym(library, FAKE_DRIVER_CONTROL);
        CHECK(control, "dlsym: %s", dlerror());
        fake = control();
        fake->seed = test_seed_value;
    }
    void *library = dlopen(accelerator, RTLD_NOW | RTLD_LOCAL);
    CHECK(library, "dlopen: %s", dlerror());
    const uccl_ep_accelerator *(*entry)(void);
    *(void **)&entry = dlsym(library, UCCL_EP_ACCELERATOR_ENTRY);
    CHECK(entry, "dlsym: %s", dlerror());
    driver = entry();
}

static const shm_test cases[] = {
    {"ranks of one process", test_one_process},
    {"ranks of several processes", test_processes},
    {"a completion before its copy", test_mutant},
    {"disconnect waits for copies", test_disconnect},
    {"room", test_room},
    {"writes in order", test_order},
    {"a broken queue", test_broken_queue},
    {"a peer that dies", test_death},
    {"refusals", test_refusals},
    {"strangers", test_strangers},
    {"forged blobs", test_forged},
};

static void all_cases(void) {
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        printf("  %s\n", cases[i].name);
        cases[i].run();
    }
}

static void on_emulation(void) {
    static const char *const lateness[] = {"lazy=0", "lazy=3", "lazy=40"};
    for (size_t i = 0; i < sizeof lateness / sizeof *lateness; i++) {
        setenv("UCCL_EP_EMULATION", lateness[i], 1);
        printf(" %s\n", lateness[i]);
        use_driver(UCCL_EP_TEST_LIBRARY_DIR "/libuccl_ep_emulation.so", NULL);
        all_cases();
    }
}

static void on_cuda(void) {
    use_driver(UCCL_EP_TEST_LIBRARY_DIR "/libuccl_ep_cuda.so", UCCL_EP_TEST_LIBRARY_DIR "/fake/libcuda.so.1");
    all_cases();
}

int main(int argc, char **argv) {
    static const shm_test tests[] = {{"emulation", on_emulation}, {"fake CUDA", on_cuda}};
    return run_tests(argc, argv, tests, sizeof tests / sizeof *tests, 600);
}
