/* SPDX-License-Identifier: Apache-2.0
 *
 * test_shm_limits.c: the shared-memory backend with too little of everything, and what it leaves behind.
 */
#include "shm_ranks.h"

/* -------------------------------------------------------------------------------------------- limits of the process */

static uccl_ep_device *plain_device(void) {
    uccl_ep_device *device;
    uccl_ep_caps caps = {.size = sizeof(caps)};
    CHECK_OK(table->device_open(&host, NULL, "", &device, &caps));
    return device;
}

static void limit(int resource, uint64_t value) {
    const struct rlimit both = {.rlim_cur = value, .rlim_max = value};
    CHECK(setrlimit((__rlimit_resource_t)resource, &both) == 0, "setrlimit: %s", strerror(errno));
}

/* One turn of connecting two ranks that may fail; keeps the first text. */
static void poll_pair(rank ranks[2], int status[2], char text[2][256]) {
    for (uint32_t i = 0; i < 2; i++) {
        if (status[i] != UCCL_EP_IN_PROGRESS) continue;
        status[i] = table->connect_poll(ranks[i].endpoint[0], 1 - i);
        if (status[i] < 0) snprintf(text[i], sizeof(text[i]), "%s", said);
    }
}

static void no_locked_memory(board *b, uint32_t me) {
    (void)b;
    (void)me;
    limit(RLIMIT_MEMLOCK, 64 * KIB);
    if (geteuid() == 0)
        CHECK(setresuid(65534, 65534, 65534) == 0, "setresuid: %s", strerror(errno)); /* root may lock */
    uccl_ep_device *device = plain_device();
    void *base;
    CHECK_REFUSED(table->memory_alloc(device, MIB, UCCL_EP_ALLOC_LOCK, &base), UCCL_EP_E_NO_MEMORY, "ulimit -l");
    CHECK(base == NULL, "memory and an error");
    CHECK(count_maps() == 0, "a mapping remains");
    CHECK_OK(table->memory_alloc(device, MIB, UCCL_EP_ALLOC_HUGE_OFF, &base));
    table->memory_free(device, base, MIB);
    CHECK_OK(table->memory_alloc(device, 16 * KIB, UCCL_EP_ALLOC_LOCK | UCCL_EP_ALLOC_HUGE_OFF, &base));
    CHECK(status_kib("VmLck:") >= 16, "not locked");
    table->memory_free(device, base, 16 * KIB);
    table->device_close(device);
}

static void no_address_space(board *b, uint32_t me) {
    (void)b;
    (void)me;
    limit(RLIMIT_AS, 256 * MIB);
    void *probe = mmap(NULL, GIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (probe != MAP_FAILED) {
        printf("  left out: an emulator does not limit the address space\n");
        return;
    }
    uccl_ep_device *device = plain_device();
    void *base;
    CHECK_REFUSED(table->memory_alloc(device, GIB, 0, &base), UCCL_EP_E_NO_MEMORY, "ulimit -v");
    CHECK(strstr(said, "1073741824") && strstr(said, "268435456"), "the text is: %s", said);
    table->device_close(device);
    /* And the peer's memory, which is mapped when it connects. */
    static rank ranks[2];
    static papers all[2];
    for (uint32_t i = 0; i < 2; i++) {
        rank_open(&ranks[i], i, 2, 100 * MIB, 64);
        all[i] = rank_papers(&ranks[i]);
    }
    for (uint32_t i = 0; i < 2; i++) rank_start(&ranks[i], all);
    int status[2] = {UCCL_EP_IN_PROGRESS, UCCL_EP_IN_PROGRESS};
    char text[2][256];
    UNTIL((poll_pair(ranks, status, text), status[0] < 0 && status[1] < 0), "statuses %d and %d", status[0], status[1]);
    for (uint32_t i = 0; i < 2; i++) {
        CHECK_EQ(status[i], UCCL_EP_E_NO_MEMORY);
        CHECK(strstr(text[i], "ulimit -v"), "the text is: %s", text[i]);
        rank_close(&ranks[i]);
    }
}

static void no_long_files(board *b, uint32_t me) {
    (void)b;
    (void)me;
    uccl_ep_device *device = plain_device();
    void *base;
    CHECK_REFUSED(table->memory_alloc(device, UINT64_MAX, 0, &base), UCCL_EP_E_NO_MEMORY, "bytes");
    CHECK_REFUSED(table->memory_alloc(device, 1ull << 62, 0, &base), UCCL_EP_E_NO_MEMORY, "bytes");
    CHECK_REFUSED(table->memory_alloc(device, 1ull << 50, 0, &base), UCCL_EP_E_NO_MEMORY, "smaller heap");
    CHECK_REFUSED(table->memory_alloc(device, 0, 0, &base), UCCL_EP_E_INVALID, "not defined");
    CHECK_REFUSED(table->memory_alloc(device, 4096, 8, &base), UCCL_EP_E_INVALID, "not defined");
    const int huge = table->memory_alloc(device, 1ull << 40, UCCL_EP_ALLOC_HUGE_ON, &base);
    CHECK(huge == UCCL_EP_E_NO_MEMORY && strstr(said, "vm.nr_hugepages"), "status %d: %s", huge, said);
    limit(RLIMIT_FSIZE, MIB); /* SIGXFSZ would end us */
    CHECK_REFUSED(table->memory_alloc(device, 2 * MIB, 0, &base), UCCL_EP_E_NO_MEMORY, "ulimit -f");
    table->device_close(device);
}

static void huge_pages(board *b, uint32_t me) {
    (void)b;
    (void)me;
    uccl_ep_device *device = plain_device();
    void *base;
    const int status = table->memory_alloc(device, 3 * MIB, UCCL_EP_ALLOC_HUGE_ON, &base);
    if (status == UCCL_EP_OK) {
        memset(base, 1, 3 * MIB); /* they are there, or this is SIGBUS */
        table->memory_free(device, base, 3 * MIB);
    } else {
        CHECK(status == UCCL_EP_E_NO_MEMORY && strstr(said, "vm.nr_hugepages"), "status %d: %s", status, said);
        printf("  left out: %s\n", said);
    }
    CHECK_OK(table->memory_alloc(device, 3 * MIB, UCCL_EP_ALLOC_HUGE_AUTO, &base));
    memset(base, 1, 3 * MIB);
    table->memory_free(device, base, 3 * MIB);
    table->device_close(device);
}

static void no_descriptors(board *b, uint32_t me) {
    (void)b;
    (void)me;
    uccl_ep_device *device = plain_device();
    uccl_ep_endpoint *endpoint;
    uccl_ep_endpoint_config config = {.size = sizeof(config), .peers = SHM_MAX_PEERS, .inflight = 64};
    limit(RLIMIT_NOFILE, 256);
    CHECK_REFUSED(table->endpoint_open(device, &config, &endpoint), UCCL_EP_E_SYSTEM, "ulimit -n");
    config.peers = SHM_MAX_PEERS + 1;
    CHECK_REFUSED(table->endpoint_open(device, &config, &endpoint), UCCL_EP_E_CAPABILITY, "at most 512");
    config.peers = 2;
    config.rank = 2;
    CHECK_REFUSED(table->endpoint_open(device, &config, &endpoint), UCCL_EP_E_INVALID, "rank 2 of 2");
    table->device_close(device);

    /* All ways to run out of them while two devices connect: an error that names the limit, or success; never a hang.
     */
    unsigned refused = 0, worked = 0;
    for (unsigned spare = 0; spare < 40 && worked < 3; spare++) {
        static rank ranks[2];
        static papers all[2];
        for (uint32_t i = 0; i < 2; i++) {
            rank_open(&ranks[i], i, 2, 64 * KIB, 64);
            all[i] = rank_papers(&ranks[i]);
        }
        for (uint32_t i = 0; i < 2; i++) rank_start(&ranks[i], all);
        int taken[256];
        unsigned n = 0;
        while ((taken[n] = dup(0)) >= 0) n++;
        for (unsigned k = 0; k < spare && n; k++) close(taken[--n]);
        int status[2] = {UCCL_EP_IN_PROGRESS, UCCL_EP_IN_PROGRESS};
        char text[2][256];
        UNTIL((poll_pair(ranks, status, text), status[0] < 0 || status[1] < 0 || status[0] + status[1] == 0),
              "spare %u: a hang", spare);
        for (uint32_t k = 0; k < 2; k++)
            if (status[k] < 0) CHECK(strstr(text[k], "ulimit -n"), "spare %u: %d: %s", spare, status[k], text[k]);
        if (status[0] == 0 && status[1] == 0)
            worked++;
        else
            refused++;
        while (n) close(taken[--n]);
        for (uint32_t i = 0; i < 2; i++) rank_close(&ranks[i]);
    }
    CHECK(refused >= 2 && worked == 3, "%u refused, %u worked", refused, worked);
}

static void limits(void) {
    if (SANITIZED) {
        printf("  left out under this sanitizer: locked memory, address space\n");
    } else {
        run_ranks(no_locked_memory, 1);
        run_ranks(no_address_space, 1);
    }
    run_ranks(huge_pages, 1);
    run_ranks(no_long_files, 1);
    run_ranks(no_descriptors, 1);
}

static void leaks(void) {
    static rank ranks[3];
    static papers all[3];
    const unsigned fds = count_fds(), maps = count_maps();
    for (unsigned round = 0; round < 100; round++) {
        mesh_open(ranks, 3, all, 64 * KIB, 64);
        CHECK(count_maps() > maps, "no memory is seen");
        for (unsigned i = 0; i < 3; i++) rank_close(&ranks[(i + round) % 3]);
        CHECK_EQ(count_fds(), fds);
        CHECK_EQ(count_maps(), maps);
    }
    /* Torn down in the middle of connecting. */
    for (unsigned round = 0; round < 100; round++) {
        for (uint32_t i = 0; i < 3; i++) {
            rank_open(&ranks[i], i, 3, 64 * KIB, 64);
            all[i] = rank_papers(&ranks[i]);
        }
        for (uint32_t i = 0; i < 3; i++) rank_start(&ranks[i], all);
        for (unsigned k = 0; k < round; k++)
            (void)table->connect_poll(ranks[k % 3].endpoint[0], (k % 3 + 1 + k / 3 % 2) % 3);
        for (unsigned i = 0; i < 3; i++) rank_close(&ranks[(i + round) % 3]);
        CHECK_EQ(count_fds(), fds);
        CHECK_EQ(count_maps(), maps);
    }
}

int main(int argc, char **argv) {
    static const shm_test tests[] = {{"limits of the process", limits}, {"leaks", leaks}};
    return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0]), 300);
}
