/* SPDX-License-Identifier: Apache-2.0
 *
 * NICs of the lab in several processes, with the fake vendor: traffic both ways at once, a process that is killed, and
 * one that speaks nonsense.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <sys/mman.h>

#include "lab/nic.h"
#include "lab_sides.h"

#define MEMBERS 4u

/* What a program exchanges before it communicates, and where its processes wait for each other. */
static struct shared {
    char fabric[40];
    uint32_t entered[64];
    struct member {
        uint32_t slot, qpn[MEMBERS], key; /* qpn[i]: of the queue pair towards i */
        uint64_t start;
        uint32_t value;
    } member[MEMBERS];
} * shared;

static uint32_t me, members;
static struct side side[MEMBERS]; /* towards each; one memory and one pair of completion queues */

static void meet(uint32_t stage) {
    __atomic_fetch_add(&shared->entered[stage], 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(&shared->entered[stage], __ATOMIC_ACQUIRE) < members) sched_yield();
}

static pid_t start(uint32_t number, void (*run)(void)) {
    fflush(NULL);
    const pid_t parent = getpid(), child = fork();
    CHECK(child >= 0, "fork");
    if (child) return child;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    test_deadline(100);
    me = number;
    run();
    fflush(NULL);
    _exit(0);
}

static void ended(pid_t child) {
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child, "waitpid");
    CHECK(WIFEXITED(status) && !WEXITSTATUS(status), "process %d ended with 0x%x", (int)child, (unsigned)status);
}

static void new_lab(const char *name, uint32_t n) {
    memset(shared, 0, sizeof *shared);
    snprintf(shared->fabric, sizeof shared->fabric, "test-%d-%s", (int)getpid(), name);
    members = n;
}

static void together(const char *name, uint32_t n, void (*run)(void)) {
    pid_t child[MEMBERS];
    new_lab(name, n);
    for (uint32_t i = 0; i < n; i++) child[i] = start(i, run);
    for (uint32_t i = 0; i < n; i++) ended(child[i]);
}

static void join(const char *profile, const char *knobs, enum lab_qp_type type) {
    lab_device *device = fake_device(shared->fabric, profile, knobs);
    lab_pd *pd = fake_pd(device);
    side[0] = side_on(pd, type, FAKE_DEPTH * MEMBERS, calloc(1, SIDE_BYTES));
    struct member *m = &shared->member[me];
    for (uint32_t i = 0; i < members; i++) {
        if (i) {
            side[i] = side[0];
            side[i].qp = fake_qp(pd, type, side[0].sends, side[0].receives, NULL);
        }
        m->qpn[i] = side[i].qp->number;
    }
    m->slot = lab_slot();
    m->start = side[0].mr->start;
    m->key = side[0].mr->key;
    fake_ah(pd, &device->gid[0]);
    meet(0);
    for (uint32_t i = 0; i < members; i++) fake_connect(side[i].qp, shared->member[i].qpn[me]);
    meet(1);
}

static struct lab_work work_to(uint32_t peer, enum lab_opcode opcode, uint64_t from, uint32_t bytes, uint64_t to) {
    struct lab_work w = side_work(&side[peer], opcode, from, bytes, NULL, 0);
    w.remote_address = shared->member[peer].start + to;
    w.rkey = shared->member[peer].key;
    w.dest_qpn = shared->member[peer].qpn[me];
    w.ah = 1;
    return w;
}

/* --------------------------------------------------------------------------------------------------------- both ways
 */

/* Everybody fills a part of everybody's memory with long and short writes, adds to a word and reads back, all at once.
 */
static void run_everybody(void) {
    join("connectx", "", LAB_RC);
    CHECK_EQ(side[0].qp->number >> lab_qp_bits(lab_devices(&(uint32_t){0})), lab_slot());
    const uint32_t part = 150000, at = 1024 + me * part, rounds = 10 + (uint32_t)test_scaled(200);
    char *memory = side[0].memory;
    uint32_t posted = 0, done = 0;
    test_rng rng = test_rng_at(me);
    for (uint32_t i = 0; i < part; i++) memory[at + i] = (char)(me * 7 + i * 13);
    for (uint32_t r = 0; r < rounds; r++)
        for (uint32_t peer = 0; peer < members; peer++) {
            const uint32_t from = (uint32_t)test_below(&rng, part), n = 1 + (uint32_t)test_below(&rng, part - from);
            const bool whole = r + 1 == rounds;
            struct lab_work w[2] = {whole ? work_to(peer, LAB_WRITE, at, part, at)
                                          : work_to(peer, LAB_WRITE, at + from, r % 8 ? n % 256 + 1 : n, at + from),
                                    work_to(peer, LAB_ADD, 64 + 8 * peer, 8, 0)};
            if (!whole && from + w[0].sge[0].length > part) w[0].sge[0].length = part - from;
            w[1].add_or_swap = me + 1;
            for (uint32_t i = 0; i < 2; i++, posted++)
                while (!fake_post(side[peer].qp, &w[i])) sched_yield();
            struct lab_done d;
            while (posted - done > 300) {
                if (!fake_poll(side[0].sends, &d)) {
                    sched_yield();
                    continue;
                }
                CHECK_EQ(d.status, VNIC_OK);
                done++;
            }
        }
    for (; done < posted; done++) CHECK_EQ(side_wait(side[0].sends).status, VNIC_OK);
    /* What one's completion says is placed is visible to a read. */
    for (uint32_t peer = 0; peer < members; peer++) {
        const struct lab_work w = work_to(peer, LAB_READ, 700000, part, at);
        CHECK_EQ(side_do(&side[peer], &w).status, VNIC_OK);
        CHECK(!memcmp(memory + 700000, memory + at, part), "what is at %u", peer);
    }
    meet(2);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < members; i++) sum += (uint64_t)rounds * (i + 1);
    CHECK_EQ(__atomic_load_n((uint64_t *)(void *)memory, __ATOMIC_ACQUIRE), sum);
    meet(3);
}

static void run_many(enum lab_qp_type type, const char *profile) {
    join(profile, "", type);
    const uint64_t amount = test_scaled(100000), began = test_now_ns();
    const uint32_t peer = 1 - me;
    uint64_t posted = 0, done = 0, sum = 0;
    struct lab_work w = work_to(peer, LAB_WRITE, 0, 64, 4096);
    while (done < amount) {
        for (; posted < amount && posted - done < 400; posted++) {
            w.cookie = (uint32_t)posted;
            if (!fake_post(side[peer].qp, &w)) break;
        }
        struct lab_done d;
        bool any = false;
        for (; fake_poll(side[0].sends, &d); done++, any = true) {
            CHECK_EQ(d.status, VNIC_OK);
            sum += d.cookie;
        }
        if (!any) sched_yield();
    }
    CHECK_EQ(sum, amount * (amount - 1) / 2);
    const double seconds = (double)(test_now_ns() - began) * 1e-9;
    if (!me)
        printf("%s, both ways between two processes: %.0f thousand operations/s each\n", profile,
               (double)amount / seconds / 1e3);
    meet(2);
}

static void run_many_connectx(void) {
    run_many(LAB_RC, "connectx");
}
static void run_many_efa(void) {
    run_many(LAB_SRD, "efa");
}

/* ------------------------------------------------------------------------------------------------------------- deaths
 */

/* Waits to be killed, in the middle of taking writes. */
static void run_victim(void) {
    join("connectx", "", LAB_RC);
    for (;;) pause();
}

static void run_survivor(void) {
    join("connectx", "", LAB_RC);
    struct lab_work w = work_to(1, LAB_WRITE, 0, 4096, 0);
    struct lab_done d;
    uint32_t posted = 0, done = 0, good = 0, exceeded = 0;
    bool told = false;
    while (!exceeded) {
        if (fake_post(side[1].qp, &w)) posted++;
        while (fake_poll(side[0].sends, &d)) {
            done++;
            good += d.status == VNIC_OK;
            exceeded += d.status == VNIC_RETRY_EXCEEDED;
            CHECK(d.status == VNIC_OK || d.status == VNIC_RETRY_EXCEEDED || exceeded, "status %d", d.status);
        }
        if (good > 100 && !told) { /* now */
            told = true;
            __atomic_store_n(&shared->member[0].value, 1, __ATOMIC_RELEASE);
        }
    }
    for (; done < posted; done++) CHECK_EQ(side_wait(side[0].sends).status, VNIC_FLUSHED);
    CHECK_EQ(exceeded, 1);
    CHECK_EQ(fake_qp_state_now(side[1].qp), LAB_ERR);
    /* The other queue pairs go on. */
    w = work_to(0, LAB_WRITE, 0, 64, 64);
    CHECK_EQ(side_do(&side[0], &w).status, VNIC_OK);
    /* A process that comes later has its slot, and is reached in it. */
    __atomic_store_n(&shared->member[0].value, 2, __ATOMIC_RELEASE);
    while (__atomic_load_n(&shared->member[2].value, __ATOMIC_ACQUIRE) != 1) sched_yield();
    CHECK_EQ(shared->member[2].slot, shared->member[1].slot);
    lab_qp *fresh = fake_qp(side[0].pd, LAB_RC, side[0].sends, side[0].receives, NULL);
    shared->member[0].qpn[2] = fresh->number;
    __atomic_store_n(&shared->member[0].value, 3, __ATOMIC_RELEASE);
    fake_connect(fresh, shared->member[2].qpn[0]);
    w = work_to(1, LAB_WRITE, 0, 64, 0);
    w.remote_address = shared->member[2].start;
    w.rkey = shared->member[2].key;
    lab_enter();
    fresh->timeout = 20; /* the other process comes to it when it comes */
    lab_leave();
    CHECK(fake_post(fresh, &w), "room"); /* it may be made ready later: the first tries are in vain */
    CHECK_EQ(side_wait(side[0].sends).status, VNIC_OK);
    __atomic_store_n(&shared->member[0].value, 4, __ATOMIC_RELEASE);
}

static void run_latecomer(void) {
    lab_device *device = fake_device(shared->fabric, "connectx", "");
    side[0] = side_new(device, LAB_RC);
    struct member *m = &shared->member[2];
    m->slot = lab_slot();
    m->qpn[0] = side[0].qp->number;
    m->start = side[0].mr->start;
    m->key = side[0].mr->key;
    __atomic_store_n(&m->value, 1, __ATOMIC_RELEASE);
    while (__atomic_load_n(&shared->member[0].value, __ATOMIC_ACQUIRE) != 3) sched_yield();
    fake_connect(side[0].qp, shared->member[0].qpn[2]);
    while (__atomic_load_n(&shared->member[0].value, __ATOMIC_ACQUIRE) != 4) sched_yield();
}

static void await(uint32_t value) {
    while (__atomic_load_n(&shared->member[0].value, __ATOMIC_ACQUIRE) != value) sched_yield();
}

static void test_death(void) {
    new_lab("death", 2);
    const pid_t survivor = start(0, run_survivor), victim = start(1, run_victim);
    await(1);
    CHECK(!kill(victim, SIGKILL) && waitpid(victim, NULL, 0) == victim, "killed");
    await(2);
    const pid_t latecomer = start(2, run_latecomer);
    ended(survivor);
    ended(latecomer);
}

/* ----------------------------------------------------------------------------------------------------------- nonsense
 */

static const char *no_frame(void *context, struct wire_link *link, const void *bytes, uint32_t n) {
    (void)context;
    (void)link;
    (void)bytes;
    (void)n;
    return NULL;
}

static uint32_t cut_off;

static void no_more(void *context, struct wire_link *link) {
    (void)context;
    (void)link;
    cut_off++;
}

/* It greets as it should, and then asks for what there is not. */
static void run_nonsense(void) {
    const uint32_t hello[4] = {LAB_PROTOCOL, sizeof(struct lab_request), sizeof(struct lab_reply), LAB_WINDOW};
    const struct wire_config config = {.name = "uccl_ep-lab",
                                       .fabric = shared->fabric,
                                       .slots = LAB_MAX_PROCESSES,
                                       .max_frame = 1u << 20,
                                       .max_waiting = 1u << 30,
                                       .hello = hello,
                                       .hello_bytes = sizeof hello,
                                       .frame = no_frame,
                                       .gone = no_more};
    struct wire *wire;
    CHECK_EQ(wire_open(&wire, &config), 0);
    meet(4);
    test_rng rng = test_rng_at(77);
    const uint32_t wanted = 20 + (uint32_t)test_scaled(300);
    struct wire_link *link;
    for (uint64_t frames = 0; cut_off < wanted; frames++) {
        CHECK_EQ(wire_reach(wire, shared->member[0].slot, &link), 0);
        struct lab_request r;
        for (size_t i = 0; i < sizeof r; i++) ((uint8_t *)&r)[i] = (uint8_t)test_random(&rng);
        r.frame = (uint32_t)test_below(&rng, 4);
        r.opcode = (uint8_t)test_below(&rng, 10);
        const uint8_t types[4] = {LAB_RC, LAB_UD, LAB_SRD, 0};
        r.type = types[test_below(&rng, 4)];
        r.length = (uint32_t)test_below(&rng, 3) * 40;
        if (test_below(&rng, 2)) r.source_qpn = 5u << 18 | 3, r.incarnation = 1;
        if (test_below(&rng, 2)) r.dest_qpn = shared->member[0].qpn[test_below(&rng, 2)];
        if (test_below(&rng, 2)) r.rkey = shared->member[0].key, r.remote_address = shared->member[0].start;
        if (test_below(&rng, 2)) r.patience_ns = test_below(&rng, 1000000);
        r.dest_gid = (struct in6_addr){.s6_addr = {0xfe, [15] = 1}}; /* as fake_device has it */
        char data[128] = {0};
        const uint32_t body = test_below(&rng, 8) ? r.length : (uint32_t)test_below(&rng, sizeof data);
        const struct iovec parts[2] = {{&r, test_below(&rng, 20) ? sizeof r : test_below(&rng, sizeof r)},
                                       {data, body}};
        if (parts[0].iov_len + body) wire_send(link, parts, 2);
        for (uint32_t i = 0; i < 4; i++) wire_turn(wire);
        if (frames % 64 == 0) sched_yield();
    }
    wire_close(wire);
    meet(5);
}

static void run_sane(void) {
    members = 2;
    join("connectx", "", LAB_RC);
    members = 3;
    meet(4);
    uint64_t rounds = 0;
    while (__atomic_load_n(&shared->entered[5], __ATOMIC_ACQUIRE) < 1 || rounds < 100) {
        const struct lab_work w = work_to(1 - me, LAB_WRITE, 0, 256, 512);
        CHECK_EQ(side_do(&side[1 - me], &w).status, VNIC_OK);
        rounds++;
    }
    meet(5);
}

static void test_nonsense(void) {
    new_lab("nonsense", 3);
    const pid_t one = start(0, run_sane), two = start(1, run_sane), bad = start(2, run_nonsense);
    ended(bad);
    ended(one);
    ended(two);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 240);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED, "mmap");
    together("everybody", 4, run_everybody);
    together("connectx", 2, run_many_connectx);
    together("efa", 2, run_many_efa);
    test_death();
    test_nonsense();
    return test_end();
}
