/* SPDX-License-Identifier: Apache-2.0
 *
 * shm_ranks.h: ranks of the shared-memory backend, driven through its table as the core does: in one process or in
 * many.
 *
 * From the backend's inside come only the shapes of what travels, for tests that forge them.
 */
#ifndef UCCL_EP_SHM_RANKS_H
#define UCCL_EP_SHM_RANKS_H

#include "backends/shm/shm.h"
#include "testing.h"
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#define MAX_RANKS 8u
#define PATIENCE_NS 60000000000ull
#define GUARD 4104u /* the heap does not start where its allocation does */
#define RIGHTS                                                                                                         \
    (UCCL_EP_ACCESS_LOCAL_READ | UCCL_EP_ACCESS_REMOTE_WRITE | UCCL_EP_ACCESS_REMOTE_ATOMIC |                          \
     UCCL_EP_ACCESS_REMOTE_READ)
#define KIB ((uint64_t)1024)
#define MIB (1024 * KIB)
#define GIB (1024 * MIB)

static const uccl_ep_backend *table;

#if defined(__has_feature)
#define HAS_FEATURE(x) __has_feature(x)
#else
#define HAS_FEATURE(x) 0
#endif
#if defined(__SANITIZE_THREAD__) || HAS_FEATURE(thread_sanitizer)
#define THREAD_SANITIZED 1
#else
#define THREAD_SANITIZED 0
#endif
/* Sanitizers need the whole address space, and make mlock do nothing. */
#if defined(__SANITIZE_ADDRESS__) || HAS_FEATURE(address_sanitizer) || THREAD_SANITIZED
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

/* Wait for `condition`, letting others run. */
#define UNTIL(condition, ...)                                                                                          \
    for (const uint64_t until_ = test_now_ns() + PATIENCE_NS; !(condition); sched_yield())                             \
    CHECK(test_now_ns() < until_, __VA_ARGS__)

/* --------------------------------------------------------------------------------------------------------- the host */

static _Thread_local char said[256];
static _Thread_local int said_code;

static inline uint64_t host_now(void *context) {
    (void)context;
    return test_now_ns();
}
static inline void host_log(void *context, uccl_ep_log_level level, const char *text) {
    (void)context;
    (void)level;
    (void)text;
}
static inline uccl_ep_status host_fail(void *context, uccl_ep_status status, int32_t code, const char *text) {
    (void)context;
    snprintf(said, sizeof(said), "%s", text);
    said_code = code;
    return status;
}
static uccl_ep_host host = {.size = sizeof(uccl_ep_host),
                            .abi_major = UCCL_EP_BACKEND_ABI_MAJOR,
                            .abi_minor = UCCL_EP_BACKEND_ABI_MINOR,
                            .now_ns = host_now,
                            .log = host_log,
                            .fail = host_fail};

#define CHECK_OK(call)                                                                                                 \
    do {                                                                                                               \
        const int check_status_ = (call);                                                                              \
        CHECK(check_status_ == UCCL_EP_OK, "status %d: %s", check_status_, said);                                      \
    } while (0)

/* It is refused with this status, and the text names the remedy. */
#define CHECK_REFUSED(call, status, word)                                                                              \
    do {                                                                                                               \
        said[0] = 0;                                                                                                   \
        const int check_status_ = (call);                                                                              \
        CHECK_EQ(check_status_, status);                                                                               \
        CHECK(strstr(said, word), "the text is: %s", said);                                                            \
    } while (0)

/* ------------------------------------------------------------------------------------------------------------ ranks */

typedef struct blob {
    uint32_t bytes;
    unsigned char data[UCCL_EP_MAX_BLOB_BYTES];
} blob;

typedef struct papers { /* what a rank tells the others */
    blob address[2], region[UCCL_EP_REGIONS];
} papers;

typedef struct rank {
    uint32_t rank, peers, endpoints;
    uccl_ep_device *device;
    uccl_ep_caps caps;
    uccl_ep_endpoint *endpoint[2];
    unsigned char *base[UCCL_EP_REGIONS];
    uint64_t bytes[UCCL_EP_REGIONS];
    unsigned char *memory[UCCL_EP_REGIONS];
    uint64_t memory_bytes[UCCL_EP_REGIONS];
} rank;

static inline void rank_open(rank *r, uint32_t me, uint32_t peers, uint64_t heap_bytes, uint32_t inflight) {
    *r = (rank){.rank = me, .peers = peers, .endpoints = 2, .caps = {.size = sizeof(uccl_ep_caps)}};
    CHECK_OK(table->device_open(&host, NULL, "", &r->device, &r->caps));
    const uint64_t wanted[UCCL_EP_REGIONS] = {heap_bytes, 64 * sizeof(uint64_t), 4 * KIB};
    for (unsigned i = 0; i < UCCL_EP_REGIONS; i++) {
        void *memory;
        r->memory_bytes[i] = wanted[i] + 2 * GUARD;
        CHECK_OK(table->memory_alloc(r->device, r->memory_bytes[i], UCCL_EP_ALLOC_HUGE_AUTO, &memory));
        r->memory[i] = memory;
        CHECK_EQ((uintptr_t)memory % 4096, 0);
        r->bytes[i] = wanted[i];
        r->base[i] = r->memory[i] + GUARD;
        memset(r->memory[i], 0xa5, GUARD);
        memset(r->base[i] + wanted[i], 0xa5, GUARD);
        const uccl_ep_memory region = {.size = sizeof(region),
                                       .kind = UCCL_EP_MEMORY_HOST,
                                       .base = r->base[i],
                                       .bytes = wanted[i],
                                       .dmabuf_fd = -1,
                                       .access = RIGHTS};
        CHECK_OK(table->region_register(r->device, (uccl_ep_region)i, &region));
    }
    for (uint32_t e = 0; e < r->endpoints; e++) {
        const uccl_ep_endpoint_config config = {.size = sizeof(config),
                                                .index = e,
                                                .rank = me,
                                                .peers = peers,
                                                .inflight_peer = inflight,
                                                .inflight = inflight};
        CHECK_OK(table->endpoint_open(r->device, &config, &r->endpoint[e]));
    }
}

static inline papers rank_papers(const rank *r) {
    papers p;
    memset(&p, 0, sizeof(p));
    for (uint32_t e = 0; e < r->endpoints; e++) {
        p.address[e].bytes = UCCL_EP_MAX_BLOB_BYTES;
        CHECK_OK(table->endpoint_address(r->endpoint[e], p.address[e].data, &p.address[e].bytes));
    }
    for (unsigned i = 0; i < UCCL_EP_REGIONS; i++) {
        p.region[i].bytes = UCCL_EP_MAX_BLOB_BYTES;
        CHECK_OK(table->region_export(r->device, (uccl_ep_region)i, p.region[i].data, &p.region[i].bytes));
    }
    return p;
}

static inline void rank_start(rank *r, const papers *all) {
    for (uint32_t e = 0; e < r->endpoints; e++)
        for (uint32_t peer = 0; peer < r->peers; peer++)
            CHECK_OK(table->connect(r->endpoint[e], peer, all[peer].address[e].data, all[peer].address[e].bytes));
}

/* Takes turns among all peers; true once all are connected. */
static inline bool rank_connected(rank *r) {
    bool all = true;
    for (uint32_t e = 0; e < r->endpoints; e++)
        for (uint32_t peer = 0; peer < r->peers; peer++) {
            const int status = table->connect_poll(r->endpoint[e], peer);
            CHECK(status == UCCL_EP_OK || status == UCCL_EP_IN_PROGRESS, "rank %u to %u: %d: %s", r->rank, peer, status,
                  said);
            all = all && status == UCCL_EP_OK;
        }
    return all;
}

static inline void rank_import(rank *r, const papers *all) {
    for (uint32_t peer = 0; peer < r->peers; peer++)
        for (unsigned i = 0; i < UCCL_EP_REGIONS; i++)
            CHECK_OK(table->region_import(r->device, peer, (uccl_ep_region)i, all[peer].region[i].data,
                                          all[peer].region[i].bytes));
}

static inline void rank_close(rank *r) {
    for (unsigned i = 0; i < UCCL_EP_REGIONS; i++)
        for (unsigned k = 0; k < GUARD; k++)
            CHECK(r->memory[i][k] == 0xa5 && r->base[i][r->bytes[i] + k] == 0xa5,
                  "byte %u beside region %u was written", k, i);
    for (uint32_t e = 0; e < r->endpoints; e++) table->endpoint_close(r->endpoint[e]);
    for (unsigned i = 0; i < UCCL_EP_REGIONS; i++) {
        table->region_deregister(r->device, (uccl_ep_region)i);
        table->memory_free(r->device, r->memory[i], r->memory_bytes[i]);
    }
    table->device_close(r->device);
}

/* One turn for each. */
static inline bool mesh_connected(rank *ranks, uint32_t n) {
    bool all = true;
    for (uint32_t i = 0; i < n; i++) all = rank_connected(&ranks[i]) && all;
    return all;
}

/* All ranks in this process, one thread: so nothing may wait for anything. */
static inline void mesh_open(rank *ranks, uint32_t n, papers *all, uint64_t heap_bytes, uint32_t inflight) {
    for (uint32_t i = 0; i < n; i++) {
        rank_open(&ranks[i], i, n, heap_bytes, inflight);
        all[i] = rank_papers(&ranks[i]);
    }
    for (uint32_t i = 0; i < n; i++) rank_start(&ranks[i], all);
    UNTIL(mesh_connected(ranks, n), "the ranks did not connect");
    for (uint32_t i = 0; i < n; i++) rank_import(&ranks[i], all);
}

static inline uint64_t *word(const rank *r, unsigned slot) {
    return (uint64_t *)(void *)r->base[UCCL_EP_REGION_SIGNALS] + slot;
}

static inline uccl_ep_operation op_write(uint64_t local, uint64_t remote, uint32_t length, uint64_t cookie) {
    return (uccl_ep_operation){.kind = UCCL_EP_OPERATION_WRITE,
                               .flags = UCCL_EP_OPERATION_SIGNALLED,
                               .length = length,
                               .local_offset = local,
                               .remote_offset = remote,
                               .cookie = cookie};
}
static inline uccl_ep_operation op_add(unsigned slot, uint64_t value, uint64_t cookie) {
    return (uccl_ep_operation){.kind = UCCL_EP_OPERATION_ADD64,
                               .flags = UCCL_EP_OPERATION_SIGNALLED,
                               .remote_region = UCCL_EP_REGION_SIGNALS,
                               .remote_offset = slot * sizeof(uint64_t),
                               .value = value,
                               .cookie = cookie};
}
static inline void submit_all(const rank *r, unsigned e, uint32_t peer, const uccl_ep_operation *operations,
                              uint32_t n) {
    uint32_t accepted;
    CHECK_OK(table->submit(r->endpoint[e], peer, operations, n, 0, &accepted));
    CHECK_EQ(accepted, n);
}

/* ---------------------------------------------------------------------------------------------- processes that meet */

/* Shared before the fork: a barrier, and what the ranks tell each other. */
typedef struct board {
    _Atomic uint32_t arrived;
    uint32_t ranks;
    papers papers[MAX_RANKS];
    _Atomic uint64_t notes[MAX_RANKS];
} board;

static inline board *board_open(uint32_t ranks) {
    board *b = mmap(NULL, sizeof(*b), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(b != MAP_FAILED, "mmap: %s", strerror(errno));
    b->ranks = ranks;
    return b;
}

static inline void meet(board *b) {
    const uint32_t before = atomic_fetch_add(&b->arrived, 1);
    const uint32_t target = (before / b->ranks + 1) * b->ranks;
    UNTIL(atomic_load(&b->arrived) >= target, "the other ranks did not come");
}

static inline void rank_join(rank *r, board *b, uint32_t me, uint64_t heap_bytes) {
    rank_open(r, me, b->ranks, heap_bytes, 256);
    b->papers[me] = rank_papers(r);
    meet(b);
    rank_start(r, b->papers);
    UNTIL(rank_connected(r), "rank %u did not get all its connections", me);
    rank_import(r, b->papers);
    meet(b);
}

static inline pid_t spawn(void (*body)(board *, uint32_t), board *b, uint32_t me) {
    fflush(NULL);
    const pid_t pid = fork();
    CHECK(pid >= 0, "fork: %s", strerror(errno));
    if (pid > 0) return pid;
    test_deadline(120);
    body(b, me);
    fflush(NULL);
    _exit(0); /* nothing of the parent's is ours to end */
}

static inline void reap(pid_t pid, int expected_signal) {
    int status;
    CHECK(waitpid(pid, &status, 0) == pid, "waitpid: %s", strerror(errno));
    if (expected_signal)
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == expected_signal, "status %#x", (unsigned)status);
    else
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a rank failed: status %#x", (unsigned)status);
}

static inline void run_ranks(void (*body)(board *, uint32_t), uint32_t n) {
    board *b = board_open(n);
    pid_t pids[MAX_RANKS];
    for (uint32_t i = 0; i < n; i++) pids[i] = spawn(body, b, i);
    for (uint32_t i = 0; i < n; i++) reap(pids[i], 0);
    munmap(b, sizeof(*b));
}

/* ------------------------------------------------------------------------------------------- what the process holds */

static inline unsigned count_fds(void) {
    unsigned n = 0;
    DIR *directory = opendir("/proc/self/fd");
    CHECK(directory, "opendir: %s", strerror(errno));
    while (readdir(directory)) n++;
    closedir(directory);
    return n;
}

static inline unsigned count_maps(void) {
    unsigned n = 0;
    char line[512];
    FILE *file = fopen("/proc/self/maps", "re");
    CHECK(file, "maps: %s", strerror(errno));
    while (fgets(line, sizeof(line), file)) n += strstr(line, "memfd:uccl_ep") != NULL;
    fclose(file);
    return n;
}

static inline uint64_t status_kib(const char *key) {
    char line[256];
    uint64_t kib = UINT64_MAX;
    FILE *file = fopen("/proc/self/status", "re");
    CHECK(file, "status: %s", strerror(errno));
    while (fgets(line, sizeof(line), file))
        if (strncmp(line, key, strlen(key)) == 0) kib = strtoull(line + strlen(key), NULL, 10);
    fclose(file);
    CHECK(kib != UINT64_MAX, "no %s", key);
    return kib;
}

/* ---------------------------------------------------------------------------------------------------------- running */

typedef struct shm_test {
    const char *name;
    void (*run)(void);
} shm_test;

static inline int run_tests(int argc, char **argv, const shm_test *tests, size_t n, unsigned seconds) {
    test_begin(argc, argv, seconds);
    void *library = dlopen(UCCL_EP_TEST_LIBRARY_DIR "/libuccl_ep_backend_shm.so", RTLD_NOW | RTLD_LOCAL);
    CHECK(library, "dlopen: %s", dlerror());
    const uccl_ep_backend *(*entry)(void);
    *(void **)&entry = dlsym(library, UCCL_EP_BACKEND_ENTRY);
    CHECK(entry, "dlsym: %s", dlerror());
    table = entry();
    CHECK_EQ(table->abi_major, UCCL_EP_BACKEND_ABI_MAJOR);
    CHECK_EQ(table->size, sizeof(uccl_ep_backend));
    for (size_t i = 0; i < n; i++) {
        const uint64_t start = test_now_ns();
        printf("%s\n", tests[i].name);
        tests[i].run();
        printf("  ok, %.2f s\n", (double)(test_now_ns() - start) / 1e9);
    }
    return test_end();
}

#endif
