/* SPDX-License-Identifier: Apache-2.0
 *
 * test_shm.c: the shared-memory backend moves bytes and adds, and refuses what it must: between processes, between
 * devices of one process, from several threads.
 */
#include "shm_ranks.h"

/* -------------------------------------------------------------------------------------- writes and adds, all to all */

#define ZONE (192 * KIB)

static unsigned char pattern(uint32_t from, uint32_t to, uint64_t round, uint64_t i) {
    uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull ^ (round << 32 | from << 8 | to);
    return (unsigned char)((x ^ x >> 29) * 0xbf58476d1ce4e5b9ull >> 56);
}

/* What rank `from` sends to `to` in a round; both compute it. */
static void plan(uint32_t from, uint32_t to, uint64_t round, uint64_t *offset, uint32_t *length) {
    test_rng rng = test_rng_at(1000 * round + 10 * from + to);
    static const uint32_t ends[] = {0, 1, 7, 16, 4095, 4096, 4097, 65536};
    *length = test_below(&rng, 2) ? ends[test_below(&rng, 8)] : (uint32_t)test_below(&rng, ZONE);
    *offset = test_below(&rng, ZONE - *length + 1);
}

/* Heap: a zone a source, then a zone a target to send from. Round r is announced by the r-th add of r. */
static void all_to_all(board *b, uint32_t me) {
    const uint32_t n = b->ranks;
    rank r;
    rank_join(&r, b, me, 2 * n * ZONE);
    test_rng rng = test_rng_at(77 + me);
    const uint64_t rounds = test_scaled(100);
    unsigned char *shadow = calloc(n, ZONE); /* what the target zones must hold */
    CHECK(shadow, "out of memory");
    uint64_t cookie = 0, moved = 0;
    for (uint64_t round = 1; round <= rounds; round++) {
        uint64_t expected[2][4 * MAX_RANKS];
        unsigned n_expected[2] = {0, 0};
        for (uint32_t k = 0; k < n; k++) {
            const uint32_t to = (me + k + (uint32_t)round) % n;
            uint64_t offset;
            uint32_t length;
            plan(me, to, round, &offset, &length);
            unsigned char *source = r.base[UCCL_EP_REGION_HEAP] + (n + to) * ZONE + offset;
            for (uint32_t i = 0; i < length; i++) source[i] = pattern(me, to, round, i);
            /* In two pieces, the add right behind them, and some without a completion of their own. */
            const uint32_t cut = (uint32_t)test_below(&rng, length + 1ull);
            const uint64_t from = (n + to) * ZONE + offset, at = me * ZONE + offset;
            uccl_ep_operation ops[3] = {op_write(from, at, cut, 0), op_write(from + cut, at + cut, length - cut, 0),
                                        op_add(me, round, 0)};
            const unsigned e = (unsigned)test_below(&rng, 2);
            for (unsigned i = 0; i < 3; i++) {
                ops[i].cookie = ++cookie;
                if (test_below(&rng, 2))
                    ops[i].flags = 0;
                else
                    expected[e][n_expected[e]++] = cookie;
            }
            submit_all(&r, e, to, ops, 3);
            moved += length;
        }
        for (unsigned e = 0; e < 2; e++) {
            uccl_ep_completion done[64];
            CHECK_EQ(table->poll(r.endpoint[e], done, 64), n_expected[e]);
            for (unsigned i = 0; i < n_expected[e]; i++) {
                CHECK_EQ(done[i].cookie, expected[e][i]);
                CHECK_EQ(done[i].status, UCCL_EP_OK);
                CHECK_EQ(done[i].kind, UCCL_EP_COMPLETION_OPERATION);
            }
        }
        /* The add announces the bytes: no barrier between. */
        for (uint32_t from = 0; from < n; from++) {
            UNTIL(__atomic_load_n(word(&r, from), __ATOMIC_ACQUIRE) >= round * (round + 1) / 2,
                  "round %" PRIu64 " of rank %u did not come", round, from);
            uint64_t offset;
            uint32_t length;
            plan(from, me, round, &offset, &length);
            for (uint32_t i = 0; i < length; i++) shadow[from * ZONE + offset + i] = pattern(from, me, round, i);
            CHECK(memcmp(r.base[UCCL_EP_REGION_HEAP] + from * ZONE, shadow + from * ZONE, ZONE) == 0,
                  "round %" PRIu64 ": %u bytes of rank %u at %" PRIu64 ", or what lies beside them", round, length,
                  from, offset);
        }
        meet(b); /* the zones are written again */
    }
    for (uint32_t i = 0; i < 64; i++) CHECK_EQ(*word(&r, i), i < n ? rounds * (rounds + 1) / 2 : 0);
    for (unsigned e = 0; e < 2; e++) {
        uccl_ep_event event;
        CHECK_EQ(table->events(r.endpoint[e], &event, 1), 0);
    }
    if (me == 0) printf("  %u processes: %" PRIu64 " rounds, %" PRIu64 " KiB from rank 0\n", n, rounds, moved / KIB);
    meet(b);
    free(shadow);
    rank_close(&r);
}

/* Adds of all ranks to one word count. */
static void adds(board *b, uint32_t me) {
    rank r;
    rank_join(&r, b, me, 64 * KIB);
    const uint64_t times = test_scaled(20000);
    for (uint64_t i = 0; i < times; i++)
        for (uint32_t to = 0; to < b->ranks; to++) {
            uccl_ep_operation op = op_add(63, me + 1 + (i == 0 ? 1ull << 63 : 0), i); /* wraps */
            op.flags = 0;
            submit_all(&r, 0, to, &op, 1);
        }
    meet(b);
    const uint64_t n = b->ranks;
    CHECK_EQ(__atomic_load_n(word(&r, 63), __ATOMIC_ACQUIRE), times * n * (n + 1) / 2 + (n << 63));
    meet(b);
    rank_close(&r);
}

/* ----------------------------------------------------------------------------------------------- refused operations */

static void refused_operations(void) {
    static rank ranks[2];
    static papers all[2];
    const uint64_t heap = 256 * KIB;
    mesh_open(ranks, 2, all, heap, 64);
    test_rng rng = test_rng_at(3);
    for (uint64_t i = 0; i < heap; i++) ranks[1].base[0][i] = (unsigned char)test_random(&rng);
    memset(ranks[0].base[0], 0x11, heap);
    unsigned char *before = malloc(heap);
    CHECK(before, "out of memory");
    memcpy(before, ranks[1].base[0], heap);

    struct bad {
        uccl_ep_operation op;
        uccl_ep_status status;
        const char *text;
    } bad[] = {
        {op_write(0, heap, 1, 0), UCCL_EP_E_RANGE, "the peer's region"},
        {op_write(0, heap - 7, 8, 0), UCCL_EP_E_RANGE, "the peer's region"},
        {op_write(0, UINT64_MAX, 1, 0), UCCL_EP_E_RANGE, "the peer's region"},
        {op_write(0, UINT64_MAX - 3, 8, 0), UCCL_EP_E_RANGE, "the peer's region"},
        {op_write(0, heap + 1, 0, 0), UCCL_EP_E_RANGE, "the peer's region"},
        {op_write(heap - 7, 0, 8, 0), UCCL_EP_E_RANGE, "the own region"},
        {op_write(UINT64_MAX - 3, 0, 8, 0), UCCL_EP_E_RANGE, "the own region"},
        {op_write(0, 0, UINT32_MAX, 0), UCCL_EP_E_RANGE, "at most"},
        {op_add(64, 1, 0), UCCL_EP_E_RANGE, "the peer's region"},
        {op_add(0, 1, 0), UCCL_EP_E_ALIGNMENT, "aligned to 8"},
        {op_write(0, 0, 8, 0), UCCL_EP_E_INVALID, "kind 0"},
        {op_write(0, 0, 8, 0), UCCL_EP_E_INVALID, "kind 255"},
        {op_write(0, 0, 8, 0), UCCL_EP_E_INVALID, "flags 0x80"},
        {op_write(0, 0, 8, 0), UCCL_EP_E_RANGE, "regions 0 and 3"},
        {op_write(0, 0, 8, 0), UCCL_EP_E_RANGE, "regions 255 and 0"},
        {op_write(0, 0, 8, 0), UCCL_EP_E_UNSUPPORTED, "immediate"},
    };
    bad[9].op.remote_offset = 4;
    bad[10].op.kind = 0;
    bad[11].op.kind = 255;
    bad[12].op.flags = 0x80;
    bad[13].op.remote_region = 3;
    bad[14].op.local_region = 255;
    bad[15].op.kind = UCCL_EP_OPERATION_WRITE_IMM;
    uccl_ep_completion done[8];
    for (unsigned i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        /* Between two good ones: the first is done, the bad one and the last are not. */
        const uccl_ep_operation ops[3] = {op_write(0, 100, 8, 1), bad[i].op, op_write(0, 200, 8, 3)};
        uint32_t accepted = 99;
        CHECK_REFUSED(table->submit(ranks[0].endpoint[0], 1, ops, 3, 0, &accepted), bad[i].status, bad[i].text);
        CHECK_EQ(accepted, 1);
        CHECK_EQ(table->poll(ranks[0].endpoint[0], done, 8), 1);
        CHECK_EQ(done[0].cookie, 1);
        memset(before + 100, 0x11, 8);
        CHECK(memcmp(before, ranks[1].base[0], heap) == 0, "operation %u wrote", i);
    }
    for (unsigned i = 0; i < 64; i++) CHECK_EQ(*word(&ranks[1], i), 0);
    uint32_t accepted;
    const uccl_ep_operation good = op_write(0, 0, 8, 0);
    CHECK_REFUSED(table->submit(ranks[0].endpoint[0], 2, &good, 1, 0, &accepted), UCCL_EP_E_RANGE, "rank 2");
    CHECK_EQ(accepted, 0);

    /* The last byte is in, a put of nothing at the end too, and a read brings back what is there. */
    submit_all(&ranks[0], 0, 1, (uccl_ep_operation[]){op_write(heap - 1, heap - 1, 1, 4), op_write(heap, heap, 0, 5)},
               2);
    before[heap - 1] = 0x11;
    uccl_ep_operation read = op_write(0, 0, (uint32_t)heap, 6);
    read.kind = UCCL_EP_OPERATION_READ;
    submit_all(&ranks[0], 0, 1, &read, 1);
    CHECK(memcmp(before, ranks[0].base[0], heap) == 0, "read");
    CHECK_EQ(table->poll(ranks[0].endpoint[0], done, 8), 3);

    /* After disconnect nothing is accepted nor completed; after connect it goes on. The other endpoint never noticed.
     */
    submit_all(&ranks[0], 0, 1, &good, 1);
    submit_all(&ranks[0], 0, 0, &(uccl_ep_operation){.kind = UCCL_EP_OPERATION_WRITE, .flags = 1, .cookie = 7}, 1);
    submit_all(&ranks[0], 0, 1, &good, 1);
    CHECK_OK(table->disconnect(ranks[0].endpoint[0], 1));
    CHECK_EQ(table->poll(ranks[0].endpoint[0], done, 8), 1);
    CHECK_EQ(done[0].cookie, 7);
    CHECK_EQ(done[0].peer, 0);
    CHECK_REFUSED(table->submit(ranks[0].endpoint[0], 1, &good, 1, 0, &accepted), UCCL_EP_E_INVALID, "not connected");
    submit_all(&ranks[0], 1, 1, &good, 1);
    CHECK_OK(table->connect(ranks[0].endpoint[0], 1, all[1].address[0].data, all[1].address[0].bytes));
    CHECK_OK(table->connect_poll(ranks[0].endpoint[0], 1));
    submit_all(&ranks[0], 0, 1, &good, 1);

    free(before);
    for (unsigned i = 0; i < 2; i++) rank_close(&ranks[i]);
}

/* No room for completions, or too much to copy at once: fewer are taken, at least one. */
static void bounded_submit(void) {
    static rank ranks[2];
    static papers all[2];
    mesh_open(ranks, 2, all, 16 * MIB, 64);
    uccl_ep_operation ops[100];
    for (unsigned i = 0; i < 100; i++) ops[i] = op_write(0, 0, 8, i);
    uint32_t accepted, taken = 0;
    CHECK_OK(table->submit(ranks[0].endpoint[0], 1, ops, 100, 0, &accepted));
    CHECK_EQ(accepted, 64);
    CHECK_OK(table->submit(ranks[0].endpoint[0], 1, ops + 64, 36, 0, &accepted));
    CHECK_EQ(accepted, 0);
    uccl_ep_completion done[100];
    CHECK_EQ(table->poll(ranks[0].endpoint[0], done, 10), 10);
    CHECK_OK(table->submit(ranks[0].endpoint[0], 1, ops + 64, 36, 0, &accepted));
    CHECK_EQ(accepted, 10);
    CHECK_EQ(table->poll(ranks[0].endpoint[0], done, 100), 64);
    for (unsigned i = 0; i < 64; i++) CHECK_EQ(done[i].cookie, i + 10);

    const uint32_t longest = (uint32_t)ranks[0].caps.max_message_bytes;
    for (unsigned i = 0; i < 10; i++) ops[i] = op_write(0, 4 * MIB, longest - i % 2, i);
    for (unsigned calls = 0; taken < 10; calls++, taken += accepted) {
        CHECK(calls < 10, "no progress");
        CHECK_OK(table->submit(ranks[0].endpoint[0], 1, ops + taken, 10 - taken, 0, &accepted));
        CHECK_EQ(accepted, 1);
    }
    for (unsigned i = 0; i < 2; i++) rank_close(&ranks[i]);
}

/* -------------------------------------------------------------------------------------------------------- bad blobs */

static void bad_blobs(void) {
    static rank ranks[2];
    static papers all[2];
    mesh_open(ranks, 2, all, 64 * KIB, 64);
    test_rng rng = test_rng_at(5);
    const uint64_t rounds = test_scaled(20000);
    for (uint64_t round = 0; round < rounds; round++) {
        const uint32_t region = (uint32_t)test_below(&rng, UCCL_EP_REGIONS), peer = (uint32_t)test_below(&rng, 2);
        blob bad = all[peer].region[region];
        if (test_below(&rng, 8) == 0)
            bad.bytes = (uint32_t)test_below(&rng, UCCL_EP_MAX_BLOB_BYTES + 1);
        else
            bad.data[test_below(&rng, bad.bytes)] ^= (unsigned char)(1 + test_below(&rng, 255));
        if (bad.bytes == all[peer].region[region].bytes && memcmp(&bad, &all[peer].region[region], sizeof(bad)) == 0)
            continue;
        CHECK_REFUSED(table->region_import(ranks[0].device, peer, (uccl_ep_region)region, bad.data, bad.bytes),
                      UCCL_EP_E_INVALID, "rank");
    }
    CHECK_REFUSED(table->region_import(ranks[0].device, 2, UCCL_EP_REGION_HEAP, "", 0), UCCL_EP_E_RANGE, "rank 2");
    CHECK_REFUSED(table->region_import(ranks[0].device, 1, (uccl_ep_region)3, "", 0), UCCL_EP_E_RANGE, "region 3");

    /* An address with a changed byte is refused, or leads nowhere; it never connects. */
    uint64_t refused = 0, led_nowhere = 0;
    for (uint64_t round = 0; round < rounds; round++) {
        rank *r = &ranks[test_below(&rng, 2)];
        const uint32_t peer = (uint32_t)test_below(&rng, 2);
        blob bad = all[peer].address[0];
        if (test_below(&rng, 8) == 0)
            bad.bytes = (uint32_t)test_below(&rng, bad.bytes);
        else
            bad.data[test_below(&rng, bad.bytes)] ^= (unsigned char)(1 + test_below(&rng, 255));
        CHECK_OK(table->disconnect(r->endpoint[0], peer));
        int status = table->connect(r->endpoint[0], peer, bad.data, bad.bytes);
        if (status != UCCL_EP_OK) {
            refused++;
        } else {
            shm_address was, is;
            memcpy(&was, all[peer].address[0].data, sizeof(was));
            memcpy(&is, bad.data, sizeof(is));
            /* The link to the named device exists, so the token is not needed again. */
            if (memcmp(was.name, is.name, sizeof(was.name)) == 0) {
                CHECK(memcmp(was.token, is.token, sizeof(was.token)) != 0, "an unknown difference was accepted");
                CHECK_OK(table->connect_poll(r->endpoint[0], peer));
                continue;
            }
            led_nowhere++;
            status = table->connect_poll(r->endpoint[0], peer);
            CHECK_EQ(status, r->rank < peer ? UCCL_EP_E_PEER_LOST : UCCL_EP_IN_PROGRESS);
            /* It has cut the link to the former incarnation: start afresh. */
            for (unsigned i = 0; i < 2; i++) rank_close(&ranks[i]);
            mesh_open(ranks, 2, all, 64 * KIB, 64);
        }
    }
    printf("  %" PRIu64 " region blobs refused; of addresses %" PRIu64 " refused, %" PRIu64 " led nowhere\n", rounds,
           refused, led_nowhere);
    for (unsigned i = 0; i < 2; i++) rank_close(&ranks[i]);

    /* Another machine, network, user: said at once. */
    static rank alone;
    rank_open(&alone, 0, 2, 64 * KIB, 64);
    const papers mine = rank_papers(&alone);
    shm_address address;
    struct {
        size_t at;
        const char *text;
    } places[] = {{offsetof(shm_address, boot), "another machine"},
                  {offsetof(shm_address, netns_inode), "network namespace"},
                  {offsetof(shm_address, uid), "start all as one"},
                  {offsetof(shm_address, version), "one version"},
                  {offsetof(shm_address, peers), "ranks"}};
    for (unsigned i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        memcpy(&address, mine.address[0].data, sizeof(address));
        address.rank = 1;
        address.name[0] ^= 1;
        ((unsigned char *)&address)[places[i].at] ^= 1;
        said[0] = 0;
        CHECK(table->connect(alone.endpoint[0], 1, &address, sizeof(address)) < 0, "accepted: %s", places[i].text);
        CHECK(strstr(said, places[i].text), "the text is: %s", said);
    }
    rank_close(&alone);
}

/* ---------------------------------------------------------------------------- registration, identity, sparse memory */

static void registration(void) {
    static rank r;
    rank_open(&r, 0, 1, 64 * KIB, 64);
    table->region_deregister(r.device, UCCL_EP_REGION_HEAP);
    static uint64_t foreign[512];
    uccl_ep_memory memory = {
        .size = sizeof(memory), .base = foreign, .bytes = sizeof(foreign), .dmabuf_fd = -1, .access = RIGHTS};
    CHECK_REFUSED(table->region_register(r.device, UCCL_EP_REGION_HEAP, &memory), UCCL_EP_E_REGISTRATION,
                  "let the library allocate");
    memory.base = r.memory[0];
    memory.bytes = r.memory_bytes[0] + 8192;
    CHECK_REFUSED(table->region_register(r.device, UCCL_EP_REGION_HEAP, &memory), UCCL_EP_E_REGISTRATION,
                  "let the library allocate");
    memory.bytes = UINT64_MAX;
    CHECK_REFUSED(table->region_register(r.device, UCCL_EP_REGION_HEAP, &memory), UCCL_EP_E_REGISTRATION,
                  "let the library allocate");
    memory.bytes = 4096;
    memory.kind = UCCL_EP_MEMORY_CUDA;
    CHECK_REFUSED(table->region_register(r.device, UCCL_EP_REGION_HEAP, &memory), UCCL_EP_E_REGISTRATION,
                  "device memory");
    memory.kind = UCCL_EP_MEMORY_HOST;
    memory.base = r.memory[0] + 4;
    CHECK_REFUSED(table->region_register(r.device, UCCL_EP_REGION_HEAP, &memory), UCCL_EP_E_REGISTRATION, "8 bytes");
    memory.base = r.memory[1];
    CHECK_REFUSED(table->region_register(r.device, UCCL_EP_REGION_SIGNALS, &memory), UCCL_EP_E_INVALID,
                  "registered already");
    blob room = {.bytes = 8};
    CHECK_REFUSED(table->region_export(r.device, UCCL_EP_REGION_SIGNALS, room.data, &room.bytes), UCCL_EP_E_INVALID,
                  "room");
    room.bytes = sizeof(room.data);
    CHECK_REFUSED(table->region_export(r.device, UCCL_EP_REGION_HEAP, room.data, &room.bytes), UCCL_EP_E_INVALID,
                  "not registered");
    CHECK_EQ(r.base[0][0], 0); /* zeroed */
    rank_close(&r);

    uccl_ep_device *device;
    uccl_ep_caps caps = {.size = sizeof(caps)};
    CHECK_REFUSED(table->device_open(&host, "mlx5_0", "", &device, &caps), UCCL_EP_E_NO_DEVICE, "shm0");
    CHECK_REFUSED(table->device_open(&host, NULL, "promise=unordered,colour=red", &device, &caps), UCCL_EP_E_INVALID,
                  "promise=unordered");
    CHECK_OK(table->device_open(&host, "shm0", "promise=unordered", &device, &caps));
    CHECK_EQ(caps.flags & (UCCL_EP_CAP_ORDER_WRITE_ATOMIC | UCCL_EP_CAP_ORDER_WRITE_WRITE), 0);
    CHECK(caps.flags & UCCL_EP_CAP_ATOMIC_ADD64, "flags %#" PRIx64, caps.flags);
    table->device_close(device);
    uccl_ep_device_info info = {.size = sizeof(info)};
    CHECK_OK(table->query(&host, 0, &info));
    CHECK(strcmp(info.name, "shm0") == 0 && info.unusable[0] == 0, "%s: %s", info.name, info.unusable);
    CHECK_REFUSED(table->query(&host, 1, &info), UCCL_EP_E_NO_DEVICE, "number 1");
    char text[32];
    table->describe(NULL, UCCL_EP_E_SYSTEM, ENOENT, text, sizeof(text));
    CHECK(strcmp(text, strerror(ENOENT)) == 0, "%s", text);
}

/* Bytes behind the largest memory file of this process. */
static uint64_t largest_file_holds(uint64_t at_least) {
    for (int fd = 0; fd < 1024; fd++) {
        struct stat file;
        if (fstat(fd, &file) == 0 && fcntl(fd, F_GET_SEALS) > 0 && (uint64_t)file.st_size >= at_least)
            return (uint64_t)file.st_blocks * 512;
    }
    CHECK(false, "no file of %" PRIu64 " bytes", at_least);
}

/* Offsets beyond 4 GiB, in a heap that is not there until it is touched. */
static void sparse(void) {
    static rank ranks[2];
    static papers all[2];
    const uint64_t heap = 6 * GIB, before = status_kib("RssShmem:");
    mesh_open(ranks, 2, all, heap, 64);
    memset(ranks[0].base[0], 0x77, 8);
    const uint64_t places[] = {heap - 8, 4 * GIB - 4, 4 * GIB, 5 * GIB + 3};
    for (unsigned i = 0; i < 4; i++) {
        const uccl_ep_operation op = op_write(0, places[i], 8, 0);
        submit_all(&ranks[0], 0, 1, &op, 1);
        for (unsigned k = 0; k < 8; k++) CHECK_EQ(ranks[1].base[0][places[i] + k], 0x77);
    }
    CHECK_EQ(ranks[1].base[0][places[0] - 4 * GIB], 0); /* not cut to 32 bits */
    CHECK(status_kib("RssShmem:") - before < 16 * KIB, "%" PRIu64 " KiB more are resident",
          status_kib("RssShmem:") - before);
    CHECK(largest_file_holds(heap) < MIB, "the heap holds %" PRIu64 " bytes", largest_file_holds(heap));
    for (unsigned i = 0; i < 2; i++) rank_close(&ranks[i]);
}

/* ---------------------------------------------------------------------------------------------------------- threads */

typedef struct driver {
    rank *r;
    const papers *all;
    unsigned endpoint;
    uint64_t rounds;
} driver;

/* One proxy: puts, polls, looks for events, and makes its connections anew as in a reset. */
static void *drive(void *argument) {
    const driver *d = argument;
    uccl_ep_endpoint *endpoint = d->r->endpoint[d->endpoint];
    for (uint64_t round = 0; round < d->rounds; round++) {
        for (uint32_t to = 0; to < d->r->peers; to++) {
            const uint64_t at = (2 * d->r->rank + d->endpoint) * KIB;
            const uccl_ep_operation ops[2] = {op_write(at, at, KIB, round), op_add(d->r->rank, 1, round)};
            submit_all(d->r, d->endpoint, to, ops, 2);
        }
        uccl_ep_completion done[2 * MAX_RANKS];
        CHECK_EQ(table->poll(endpoint, done, 2 * MAX_RANKS), 2 * d->r->peers);
        uccl_ep_event event;
        CHECK_EQ(table->events(endpoint, &event, 1), 0);
        if (round % 8 == 7)
            for (uint32_t to = 0; to < d->r->peers; to++) {
                const blob *address = &d->all[to].address[d->endpoint];
                CHECK_OK(table->disconnect(endpoint, to));
                CHECK_OK(table->connect(endpoint, to, address->data, address->bytes));
                CHECK_OK(table->connect_poll(endpoint, to));
            }
    }
    return NULL;
}

static void threads(void) {
    static rank ranks[3];
    static papers all[3];
    mesh_open(ranks, 3, all, 64 * KIB, 64);
    driver drivers[6];
    pthread_t ids[6];
    const uint64_t rounds = test_scaled(2000);
    for (unsigned i = 0; i < 6; i++) {
        drivers[i] = (driver){&ranks[i / 2], all, i % 2, rounds};
        CHECK(pthread_create(&ids[i], NULL, drive, &drivers[i]) == 0, "pthread_create");
    }
    for (unsigned i = 0; i < 6; i++) pthread_join(ids[i], NULL);
    for (unsigned i = 0; i < 3; i++) {
        for (unsigned from = 0; from < 3; from++) CHECK_EQ(*word(&ranks[i], from), 2 * rounds);
        rank_close(&ranks[i]);
    }
}

static void two_ranks(void) {
    run_ranks(all_to_all, 2);
}
static void four_ranks(void) {
    run_ranks(all_to_all, 4);
}
static void four_add(void) {
    run_ranks(adds, 4);
}

int main(int argc, char **argv) {
    static const shm_test tests[] = {{"two processes, all to all", two_ranks},
                                     {"four processes, all to all", four_ranks},
                                     {"four processes add to one word", four_add},
                                     {"refused operations, reads, disconnect", refused_operations},
                                     {"bounded submits", bounded_submit},
                                     {"bad blobs", bad_blobs},
                                     {"registration, options, identity", registration},
                                     {"sparse heap of 6 GiB", sparse},
                                     {"endpoints in parallel", threads}};
    return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0]), 300);
}
