/* SPDX-License-Identifier: Apache-2.0
 *
 * test_emulation.c: what the emulation's accelerator has beside what test_accelerator.c asks of every one: copies that
 * are carried out later, handles that somebody forged, and its knobs.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "testing.h"
#include "uccl_ep/backend.h"

#define BYTES ((uint64_t)1 << 16)

static const uccl_ep_accelerator *accel;

#define CHECK_OK(call)                                                                                                 \
    do {                                                                                                               \
        const int check_status_ = (call);                                                                              \
        CHECK(check_status_ == UCCL_EP_OK, "status %d: %s", check_status_, accel->error_text());                       \
    } while (0)
#define CHECK_REFUSED(call, status, word)                                                                              \
    do {                                                                                                               \
        const int check_status_ = (call);                                                                              \
        CHECK_EQ(check_status_, status);                                                                               \
        CHECK(strstr(accel->error_text(), word), "the text is: %s", accel->error_text());                              \
    } while (0)

static uccl_ep_gpu *open_with(const char *knobs) {
    uccl_ep_gpu *gpu;
    setenv("UCCL_EP_EMULATION", knobs, 1);
    CHECK_OK(accel->open(0, &gpu));
    return gpu;
}

/* ----------------------------------------------------------------------------------------------------------- copies */

static uint64_t equal_bytes(const unsigned char *bytes, unsigned char value) {
    uint64_t n = 0;
    for (uint64_t i = 0; i < BYTES; i++) n += bytes[i] == value;
    return n;
}

/* Nothing of a copy is there before somebody looks at the marks; with `lazy`, a part may be, and the mark is not done.
 */
static void test_late_copies(void) {
    static unsigned char source[BYTES];
    memset(source, 9, sizeof source);
    uint64_t parts = 0;
    for (uint64_t round = 0; round < 40; round++) {
        char knobs[64];
        snprintf(knobs, sizeof knobs, round ? "lazy=2,seed=%" PRIu64 : "seed=%" PRIu64, test_seed_value + round);
        uccl_ep_gpu *gpu = open_with(knobs);
        void *memory;
        CHECK_OK(accel->device_alloc(gpu, BYTES, &memory));
        uccl_ep_copy_queue *queue;
        CHECK_OK(accel->queue_open(gpu, &queue));
        CHECK_OK(accel->copy_start(queue, memory, source, BYTES));
        uint64_t number, done = 0;
        CHECK_OK(accel->mark(queue, &number));
        CHECK_EQ(equal_bytes(memory, 9), 0);
        for (uint64_t looks = 0; done != number; looks++) {
            CHECK(looks < 10000, "the copy does not end");
            CHECK_OK(accel->marks_done(queue, &done));
            const uint64_t there = equal_bytes(memory, 9);
            if (done == number) CHECK_EQ(there, BYTES);
            if (!round) CHECK_EQ(done, number);
            parts += there && there < BYTES;
        }
        accel->queue_close(queue);
        accel->device_free(gpu, memory);
        accel->close(gpu);
    }
    CHECK(parts > 5, "only %" PRIu64 " looks saw a copy under way", parts);
    /* More than wait at a time: the oldest go first, and order stays. */
    uccl_ep_gpu *gpu = open_with("");
    uccl_ep_copy_queue *queue;
    CHECK_OK(accel->queue_open(gpu, &queue));
    uint64_t numbers[2] = {0, 0}, values[5000], number, done;
    for (uint64_t i = 0; i < 5000; i++) {
        values[i] = i;
        CHECK_OK(accel->copy_start(queue, &numbers[0], &values[i], sizeof *values));
        CHECK(numbers[0] <= i, "%" PRIu64 " in place of %" PRIu64, numbers[0], i);
    }
    CHECK_OK(accel->copy_start(queue, &numbers[1], &numbers[0], sizeof *values));
    CHECK_OK(accel->mark(queue, &number));
    CHECK_OK(accel->marks_done(queue, &done));
    CHECK_EQ(done, number);
    CHECK_EQ(numbers[1], 4999);
    accel->queue_close(queue);
    accel->close(gpu);
}

/* ------------------------------------------------------------------------------------------------------------- knobs
 */

static void test_knobs(void) {
    static const char *const wrong[] = {"lazy", "lazy=", "lazy=-1", "lazy=x", "lazy=1x", "what=1", "writes_ordering=2"};
    uccl_ep_gpu_info info = {.size = sizeof info};
    uccl_ep_gpu *gpu = NULL;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        setenv("UCCL_EP_EMULATION", wrong[i], 1);
        CHECK_REFUSED(accel->query(0, &info), UCCL_EP_E_INVALID, "UCCL_EP_EMULATION");
        CHECK_REFUSED(accel->open(0, &gpu), UCCL_EP_E_INVALID, "UCCL_EP_EMULATION");
    }
    setenv("UCCL_EP_EMULATION", "devices=3,warp_size=64,writes_ordering=unordered,dmabuf=0", 1);
    CHECK_OK(accel->query(2, &info));
    CHECK_EQ(info.warp_size, 64);
    CHECK_EQ(info.writes_ordering, UCCL_EP_WRITES_UNORDERED);
    CHECK_EQ(info.can_flush, 1);
    CHECK_EQ(info.dmabuf, 0);
    CHECK(!strcmp(info.address, "cpu2"), "%s", info.address);
    CHECK_REFUSED(accel->query(3, &info), UCCL_EP_E_NO_DEVICE, "3");
    /* Each call of a device in turn. */
    setenv("UCCL_EP_EMULATION", "fail=1", 1);
    CHECK_REFUSED(accel->open(0, &gpu), UCCL_EP_E_SYSTEM, "open is call 1");
    gpu = open_with("fail=2");
    void *memory;
    CHECK_REFUSED(accel->device_alloc(gpu, BYTES, &memory), UCCL_EP_E_SYSTEM, "device_alloc is call 2");
    CHECK_OK(accel->device_alloc(gpu, BYTES, &memory));
    accel->close(gpu); /* takes what is left along */
    /* A queue that failed stays so. */
    gpu = open_with("fail=4");
    uccl_ep_copy_queue *queue;
    uint64_t number;
    CHECK_OK(accel->queue_open(gpu, &queue));
    CHECK_OK(accel->mark(queue, &number));
    CHECK_REFUSED(accel->marks_done(queue, &number), UCCL_EP_E_SYSTEM, "call 4");
    CHECK_REFUSED(accel->copy_start(queue, &number, &number, 8), UCCL_EP_E_SYSTEM, "failed before");
    accel->queue_close(queue);
    accel->close(gpu);
    unsetenv("UCCL_EP_EMULATION");
}

/* ----------------------------------------------------------------------------------------------------------- handles
 */

/* As emulation.c lays it out, for forging. */
typedef struct handle {
    uint64_t magic;
    int64_t process, fd;
    uint64_t device, inode, bytes;
} handle;

static void name_file(handle *h, int fd) {
    struct stat file;
    CHECK(fstat(fd, &file) == 0, "fstat: %s", strerror(errno));
    *h = (handle){h->magic, getpid(), fd, file.st_dev, file.st_ino, (uint64_t)file.st_size};
}

static void refuse(uccl_ep_gpu *gpu, const handle *h) {
    uint8_t bytes[UCCL_EP_GPU_IPC_BYTES] = {0};
    memcpy(bytes, h, sizeof *h);
    void *there = NULL;
    const int status = accel->ipc_open(gpu, bytes, &there);
    CHECK(status < 0 && !there, "status %d", status);
    CHECK(accel->error_text()[0], "without words");
}

static unsigned count_fds(void) {
    unsigned n = 0;
    for (int fd = 0; fd < 256; fd++) n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

static void test_forged_handles(void) {
    uccl_ep_gpu *gpu = open_with("");
    void *memory;
    CHECK_OK(accel->device_alloc(gpu, BYTES, &memory));
    uint8_t bytes[UCCL_EP_GPU_IPC_BYTES];
    CHECK_REFUSED(accel->ipc_export(gpu, (char *)memory + 4096, bytes), UCCL_EP_E_INVALID, "begins");
    CHECK_OK(accel->ipc_export(gpu, memory, bytes));
    handle good;
    memcpy(&good, bytes, sizeof good);
    /* Nobody but this user opens it. */
    struct stat file;
    CHECK(fstat((int)good.fd, &file) == 0 && (file.st_mode & 0777) == 0600, "mode %o", file.st_mode);

    const unsigned fds = count_fds();
    handle h = good;
    const int64_t fields[] = {0, -1, INT64_MIN, INT64_MAX, 1, 4711, (int64_t)1 << 40};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        h = good, h.process = fields[i], refuse(gpu, &h);
        h = good, h.fd = fields[i], h.inode++, refuse(gpu, &h);
        h = good, h.inode = (uint64_t)fields[i], refuse(gpu, &h);
        h = good, h.bytes = (uint64_t)fields[i], refuse(gpu, &h);
        h = good, h.magic = (uint64_t)fields[i], refuse(gpu, &h);
    }
    /* Descriptors of something else: nothing is opened that would do something, or could shrink. */
    int pipes[2];
    CHECK(pipe(pipes) == 0, "pipe: %s", strerror(errno));
    const int unsealed = memfd_create("uccl_ep_emulated", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(unsealed >= 0 && ftruncate(unsealed, 8192) == 0, "memfd: %s", strerror(errno));
    const int other = memfd_create("another", MFD_CLOEXEC);
    CHECK(other >= 0 && ftruncate(other, 8192) == 0, "memfd: %s", strerror(errno));
    const int described[] = {pipes[0], pipes[1], unsealed, other, STDIN_FILENO, STDERR_FILENO};
    for (size_t i = 0; i < sizeof described / sizeof *described; i++) {
        if (fcntl(described[i], F_GETFD) < 0) continue;
        h = good;
        name_file(&h, described[i]);
        refuse(gpu, &h);
    }
    close(pipes[0]), close(pipes[1]), close(unsealed), close(other);
    CHECK_EQ(count_fds(), fds);
    test_rng rng = test_rng_at(1);
    for (uint64_t i = test_scaled(2000); i; i--) {
        h = good;
        ((uint64_t *)&h)[test_below(&rng, sizeof h / 8)] ^= 1ull << test_below(&rng, 64);
        refuse(gpu, &h);
    }
    CHECK_EQ(count_fds(), fds);

    /* In another process: the good one opens, and once its memory is freed it does not. */
    int ready[2], again[2];
    CHECK(pipe(ready) == 0 && pipe(again) == 0, "pipe: %s", strerror(errno));
    fflush(NULL);
    const pid_t pid = fork();
    CHECK(pid >= 0, "fork: %s", strerror(errno));
    if (pid == 0) {
        char c;
        void *there = NULL, *base;
        uint64_t length;
        uccl_ep_gpu *mine = open_with("");
        /* A fork has the parent's list, too: another name for the same memory would be no news. */
        const int status = accel->ipc_open(mine, bytes, &there);
        CHECK(status == UCCL_EP_E_UNSUPPORTED, "status %d", status);
        accel->device_free(gpu, memory);
        CHECK_OK(accel->ipc_open(mine, bytes, &there));
        CHECK_OK(accel->allocation(mine, (char *)there + 4097, &base, &length));
        CHECK(base == there && length == BYTES, "%" PRIu64 " bytes", length);
        ((volatile unsigned char *)there)[7] = 88;
        CHECK(write(ready[1], "", 1) == 1 && read(again[0], &c, 1) == 1, "the parent is gone");
        ((volatile unsigned char *)there)[8] = 99; /* freed there, and still memory here */
        CHECK_REFUSED(accel->ipc_open(mine, bytes, &base), UCCL_EP_E_SYSTEM, "/proc/");
        accel->ipc_close(mine, there);
        accel->close(mine);
        fflush(NULL);
        _exit(0);
    }
    char c;
    CHECK(read(ready[0], &c, 1) == 1, "the child is gone");
    CHECK_EQ(((volatile unsigned char *)memory)[7], 88);
    accel->device_free(gpu, memory);
    CHECK(write(again[1], "", 1) == 1, "the child is gone");
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %#x",
          (unsigned)status);
    accel->close(gpu);
}

/* ------------------------------------------------------------------------------------------------------ registrations
 */

static void test_registrations(void) {
    uccl_ep_gpu *one = open_with(""), *two = open_with("");
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    char *pages = mmap(NULL, 8 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED, "mmap: %s", strerror(errno));
    void *at;
    CHECK_REFUSED(accel->host_register(one, pages + 8, page, &at), UCCL_EP_E_REGISTRATION, "whole pages");
    CHECK_REFUSED(accel->host_register(one, pages, page + 8, &at), UCCL_EP_E_REGISTRATION, "whole pages");
    CHECK_OK(accel->host_register(one, pages, 4 * page, &at));
    CHECK(at == pages, "%p", at);
    CHECK_OK(accel->host_register(two, pages + page, page, &at)); /* reachable already */
    CHECK_REFUSED(accel->host_register(two, pages + 3 * page, 2 * page, &at), UCCL_EP_E_REGISTRATION, "a part of");
    accel->host_unregister(one, pages);
    CHECK_OK(accel->host_register(two, pages + 3 * page, 2 * page, &at));
    accel->close(two); /* takes its own along */
    CHECK_OK(accel->host_register(one, pages, 8 * page, &at));
    accel->host_unregister(one, pages);
    accel->close(one);
    munmap(pages, 8 * page);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 120);
    void *library = dlopen(UCCL_EP_TEST_LIBRARY_DIR "/libuccl_ep_emulation.so", RTLD_NOW | RTLD_LOCAL);
    CHECK(library, "dlopen: %s", dlerror());
    const union {
        void *symbol;
        const uccl_ep_accelerator *(*function)(void);
    } entry = {.symbol = dlsym(library, UCCL_EP_ACCELERATOR_ENTRY)};
    CHECK(entry.symbol, "dlsym: %s", dlerror());
    accel = entry.function();
    test_late_copies();
    test_knobs();
    test_forged_handles();
    test_registrations();
    return test_end();
}
