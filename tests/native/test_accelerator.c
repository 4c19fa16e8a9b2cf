/* SPDX-License-Identifier: Apache-2.0
 *
 * What accelerator.h says, of every accelerator: on fake drivers and on the emulation by default, or on a real device:
 *
 *   test_accelerator PATH_OF_LIBRARY [seed]
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "fake_driver.h"
#include "testing.h"
#include "uccl_ep/accelerator.h"
#include "uccl_ep/backend.h"

#define PAGE ((uint64_t)4096)
#define PATIENCE_NS 60000000000ull
#define LIBRARIES UCCL_EP_TEST_LIBRARY_DIR

static const uccl_ep_accelerator *accel;
static const char *accelerator_path;
static const char *driver_path; /* of the fake one; "": the machine's */
static fake_driver *fake;       /* NULL: a real one, or the emulation */

#define CHECK_OK(call)                                                                                                 \
    do {                                                                                                               \
        const int check_status_ = (call);                                                                              \
        CHECK(check_status_ == UCCL_EP_OK, "status %d: %s", check_status_, accel->error_text());                       \
    } while (0)

/* Refused with this status, and in words. */
#define CHECK_REFUSED(call, status, word)                                                                              \
    do {                                                                                                               \
        const int check_status_ = (call);                                                                              \
        CHECK_EQ(check_status_, status);                                                                               \
        CHECK(strstr(accel->error_text(), word), "the text is: %s", accel->error_text());                              \
    } while (0)

#define UNTIL(condition, ...)                                                                                          \
    for (const uint64_t until_ = test_now_ns() + PATIENCE_NS; !(condition);) CHECK(test_now_ns() < until_, __VA_ARGS__)

static uccl_ep_gpu *open_gpu(void) {
    uccl_ep_gpu *gpu;
    CHECK_OK(accel->open(0, &gpu));
    return gpu;
}

static uccl_ep_gpu_info describe(void) {
    uccl_ep_gpu_info info = {.size = sizeof info};
    CHECK_OK(accel->query(0, &info));
    return info;
}

static unsigned char *pages(uint64_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED, "mmap: %s", strerror(errno));
    return memory;
}

static void fill(unsigned char *at, uint64_t bytes, uint64_t stream) {
    test_rng rng = test_rng_at(stream);
    for (uint64_t i = 0; i < bytes; i++) at[i] = (unsigned char)test_random(&rng);
}

/* ---------------------------------------------------------------------------------------------------------- devices */

static void test_devices(void) {
    CHECK_EQ(accel->abi_major, UCCL_EP_ACCELERATOR_ABI_MAJOR);
    CHECK(accel->size >= sizeof(uccl_ep_accelerator), "a table of %u bytes", accel->size);
    const uccl_ep_gpu_info info = describe();
    CHECK_EQ(info.size, sizeof info);
    CHECK(info.name[0] && info.architecture[0], "it says who it is");
    CHECK(!info.unusable[0], "%s", info.unusable);
    CHECK(info.memory_kind != UCCL_EP_MEMORY_HOST && info.memory_bytes && info.clock_hz, "it says what it has");
    CHECK(info.warp_size && info.warp_size <= 64 && info.multiprocessors, "%u lanes", info.warp_size);
    printf("  %s, %s, %s, %s, ordering %u, flush %u, dmabuf %u, ipc %u, host atomics %u\n", info.name,
           info.architecture, info.driver, info.address, info.writes_ordering, info.can_flush, info.dmabuf, info.ipc,
           info.host_atomics);
    /* A caller that knows less gets less, and nothing is written behind that. */
    union {
        uccl_ep_gpu_info info;
        unsigned char bytes[sizeof(uccl_ep_gpu_info)];
    } less;
    memset(&less, 0x5a, sizeof less);
    less.info.size = offsetof(uccl_ep_gpu_info, name);
    CHECK_OK(accel->query(0, &less.info));
    CHECK_EQ(less.info.memory_bytes, info.memory_bytes);
    for (size_t i = offsetof(uccl_ep_gpu_info, name); i < sizeof less; i++) CHECK_EQ(less.bytes[i], 0x5a);

    uccl_ep_gpu_info none = {.size = sizeof none};
    CHECK_REFUSED(accel->query(4711, &none), UCCL_EP_E_NO_DEVICE, "4711");
    uccl_ep_gpu *gpu = NULL;
    CHECK_REFUSED(accel->open(4711, &gpu), UCCL_EP_E_NO_DEVICE, "4711");
    CHECK(!gpu, "no device is none");
    /* Twice in one process: two ranks share it. */
    uccl_ep_gpu *one = open_gpu(), *two = open_gpu();
    accel->close(one);
    void *memory;
    CHECK_OK(accel->device_alloc(two, PAGE, &memory));
    accel->device_free(two, memory);
    accel->close(two);
}

/* ----------------------------------------------------------------------------------------------------------- memory */

static void test_memory(void) {
    uccl_ep_gpu *gpu = open_gpu();
    static const uint64_t sizes[] = {1, 8, 4095, 4096, 65537, 1 << 20};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        const uint64_t n = sizes[k];
        void *one, *two, *base;
        uint64_t bytes;
        unsigned char *out = malloc(n), *in = malloc(n);
        CHECK(out && in, "malloc");
        CHECK_OK(accel->device_alloc(gpu, n, &one));
        CHECK_OK(accel->device_alloc(gpu, n, &two));
        memset(in, 0x77, n);
        CHECK_OK(accel->copy(gpu, in, one, n));
        for (uint64_t i = 0; i < n; i++) CHECK(in[i] == 0, "byte %" PRIu64 " of %" PRIu64 " is not zero", i, n);
        fill(out, n, k);
        CHECK_OK(accel->copy(gpu, one, out, n));
        CHECK_OK(accel->copy(gpu, two, one, n));
        CHECK_OK(accel->copy(gpu, in, two, n));
        CHECK(memcmp(in, out, n) == 0, "%" PRIu64 " bytes through the device", n);
        CHECK_OK(accel->copy(gpu, in, two, 0));

        for (uint64_t at = 0; at < n; at += n / 3 + 1) {
            CHECK_OK(accel->allocation(gpu, (unsigned char *)two + at, &base, &bytes));
            const uintptr_t first = (uintptr_t)base, mine = (uintptr_t)two;
            CHECK(first <= mine && mine + n <= first + bytes, "%" PRIu64 " bytes at %p lie in its %" PRIu64 " at %p", n,
                  two, bytes, base);
        }
        accel->device_free(gpu, one);
        accel->device_free(gpu, two);
        free(in);
        free(out);
    }
    void *none = NULL, *base;
    uint64_t bytes;
    CHECK(accel->device_alloc(gpu, 0, &none) != UCCL_EP_OK, "nothing was allocated");
    CHECK_REFUSED(accel->device_alloc(gpu, 1ull << 50, &none), UCCL_EP_E_NO_MEMORY, "1125899906842624");
    CHECK(!none, "nothing was allocated");
    int on_stack = 0;
    CHECK(accel->allocation(gpu, &on_stack, &base, &bytes) != UCCL_EP_OK, "a stack is no device memory");
    CHECK(strstr(accel->error_text(), "memory"), "the text is: %s", accel->error_text());
    accel->close(gpu);
}

static void test_registering(void) {
    uccl_ep_gpu *gpu = open_gpu();
    unsigned char *host = pages(8 * PAGE);
    void *there;
    CHECK_OK(accel->host_register(gpu, host, 8 * PAGE, &there));
    CHECK(there, "kernels have an address for it");
    void *device;
    CHECK_OK(accel->device_alloc(gpu, 8 * PAGE, &device));
    fill(host, 8 * PAGE, 3);
    CHECK_OK(accel->copy(gpu, device, host, 8 * PAGE));
    memset(host, 0, 8 * PAGE);
    CHECK_OK(accel->copy(gpu, host, device, 8 * PAGE));
    unsigned char *expected = malloc(8 * PAGE);
    CHECK(expected, "malloc");
    fill(expected, 8 * PAGE, 3);
    CHECK(memcmp(host, expected, 8 * PAGE) == 0, "there and back");
    free(expected);
    /* What is reachable is counted, a part of it, too. */
    void *again;
    CHECK_OK(accel->host_register(gpu, host, 8 * PAGE, &again));
    CHECK(again == there, "another address");
    CHECK_OK(accel->host_register(gpu, host + 2 * PAGE, PAGE, &again));
    CHECK(again == (char *)there + 2 * PAGE, "not in the whole");
    accel->host_unregister(gpu, host);
    accel->host_unregister(gpu, host + 2 * PAGE);
    if (fake) CHECK_EQ(fake->registrations, 1);
    accel->host_unregister(gpu, host);
    if (fake) CHECK_EQ(fake->registrations, 0);
    CHECK_OK(accel->host_register(gpu, host, 8 * PAGE, &there)); /* afresh */
    accel->host_unregister(gpu, host);
    CHECK_REFUSED(accel->host_register(gpu, host + 8, PAGE, &there), UCCL_EP_E_REGISTRATION, "page");
    CHECK_REFUSED(accel->host_register(gpu, host, PAGE - 1, &there), UCCL_EP_E_REGISTRATION, "page");
    CHECK_REFUSED(accel->host_register(gpu, host, 0, &there), UCCL_EP_E_REGISTRATION, "page");
    munmap(host, 8 * PAGE);
    accel->device_free(gpu, device);
    accel->close(gpu);
}

static void test_dmabuf(void) {
    uccl_ep_gpu *gpu = open_gpu();
    const uccl_ep_gpu_info info = describe();
    void *memory;
    int32_t fd = -1;
    const uint64_t bytes = 2 << 20;
    CHECK_OK(accel->device_alloc(gpu, bytes, &memory));
    const int status = accel->export_dmabuf(gpu, memory, bytes, &fd);
    if (info.dmabuf) {
        CHECK(status == UCCL_EP_OK, "status %d: %s", status, accel->error_text());
        CHECK(fcntl(fd, F_GETFD) >= 0, "a descriptor");
        close(fd);
        CHECK(accel->export_dmabuf(gpu, (char *)memory + 8, PAGE, &fd) != UCCL_EP_OK, "not whole pages");
    } else {
        CHECK_EQ(status, UCCL_EP_E_UNSUPPORTED);
        CHECK(strstr(accel->error_text(), "dmabuf"), "the text is: %s", accel->error_text());
    }
    CHECK(status == UCCL_EP_OK || fd == -1, "no descriptor comes with an error");
    accel->device_free(gpu, memory);
    accel->close(gpu);
}

static void test_flush(void) {
    uccl_ep_gpu *gpu = open_gpu();
    if (describe().can_flush)
        CHECK_OK(accel->flush_writes(gpu));
    else if (fake)
        CHECK_REFUSED(accel->flush_writes(gpu), UCCL_EP_E_UNSUPPORTED, "flush");
    accel->close(gpu);
}

/* ----------------------------------------------------------------------------------------------------------- queues */

static uint64_t marks_done(uccl_ep_copy_queue *queue) {
    uint64_t done = 0;
    CHECK_OK(accel->marks_done(queue, &done));
    return done;
}

/* Copies that build on each other, among host and device memory; a mark that is done means that what was copied before
 * it is there. */
static void copies_in_order(uccl_ep_gpu *gpu, uint64_t stream, uint64_t rounds) {
    enum { BUFFERS = 4, SLOT = 256, SLOTS = 16, MARKS = 4096 };
    test_rng rng = test_rng_at(stream);
    uccl_ep_copy_queue *queue;
    CHECK_OK(accel->queue_open(gpu, &queue));
    unsigned char *host = pages(2 * PAGE), *model = calloc(BUFFERS, SLOTS * SLOT), *buffers[BUFFERS];
    uint64_t *counter = (void *)pages(PAGE), *marked_counter = calloc(MARKS, sizeof *marked_counter);
    CHECK(model && marked_counter, "malloc");
    void *there, *device[2], *word;
    CHECK_OK(accel->host_register(gpu, host, 2 * PAGE, &there));
    CHECK_OK(accel->host_register(gpu, counter, PAGE, &there));
    CHECK_OK(accel->device_alloc(gpu, PAGE, &word));
    for (int i = 0; i < 2; i++) {
        buffers[i] = host + (uint64_t)i * PAGE;
        fill(model + i * SLOTS * SLOT, SLOTS * SLOT, stream + 100u + (unsigned)i);
        memcpy(buffers[i], model + i * SLOTS * SLOT, SLOTS * SLOT);
        CHECK_OK(accel->device_alloc(gpu, SLOTS * SLOT, &device[i]));
        buffers[2 + i] = device[i];
    }
    uint64_t first = 0, marks = 0, seen = 0, counted = 0;
    for (uint64_t round = 0; round < rounds; round++) {
        for (uint64_t n = test_below(&rng, 4); n; n--) {
            const uint64_t from = test_below(&rng, BUFFERS), to = (from + 1 + test_below(&rng, BUFFERS - 1)) % BUFFERS;
            const uint64_t bytes = 1 + test_below(&rng, SLOT), at = test_below(&rng, SLOTS * SLOT - bytes + 1);
            const uint64_t source = test_below(&rng, SLOTS * SLOT - bytes + 1);
            CHECK_OK(accel->copy_start(queue, buffers[to] + at, buffers[from] + source, bytes));
            memcpy(model + to * SLOTS * SLOT + at, model + from * SLOTS * SLOT + source, bytes);
        }
        /* counter[k] goes through the device to counter[0]: it tells how far the queue has come. */
        if (counted + 1 < PAGE / sizeof *counter) {
            counted++;
            counter[counted] = counted;
            CHECK_OK(accel->copy_start(queue, word, &counter[counted], sizeof *counter));
            CHECK_OK(accel->copy_start(queue, &counter[0], word, sizeof *counter));
        }
        uint64_t number;
        const int status = accel->mark(queue, &number);
        if (status == UCCL_EP_OK) {
            if (marks == 0) first = number;
            CHECK_EQ(number, first + marks);
            marked_counter[marks++ % MARKS] = counted;
        } else {
            CHECK_REFUSED(status, UCCL_EP_E_AGAIN, "256");
            CHECK(marks - seen >= UCCL_EP_COPY_MARKS, "refused with %" PRIu64 " outstanding", marks - seen);
        }
        if (test_below(&rng, 3) == 0 || status != UCCL_EP_OK) {
            const uint64_t done = marks_done(queue);
            CHECK(done + 1 >= first && done < first + marks, "mark %" PRIu64 " of %" PRIu64, done, first + marks);
            CHECK(done + 1 - first >= seen, "a mark is done for good");
            seen = done + 1 - first;
            const uint64_t shown = __atomic_load_n(&counter[0], __ATOMIC_ACQUIRE);
            if (seen)
                CHECK(shown >= marked_counter[(seen - 1) % MARKS],
                      "mark %" PRIu64 " is done, and %" PRIu64 " is there, not %" PRIu64, done, shown,
                      marked_counter[(seen - 1) % MARKS]);
        }
    }
    UNTIL(marks_done(queue) + 1 == first + marks, "the copies did not end");
    accel->queue_close(queue); /* waits for what came behind the last mark */
    CHECK_EQ(counter[0], counted);
    unsigned char *now = malloc(SLOTS * SLOT);
    CHECK(now, "malloc");
    for (int i = 0; i < BUFFERS; i++) {
        CHECK_OK(accel->copy(gpu, now, buffers[i], SLOTS * SLOT));
        CHECK(memcmp(now, model + i * SLOTS * SLOT, SLOTS * SLOT) == 0, "buffer %d", i);
    }
    free(now);
    free(model);
    free(marked_counter);
    for (int i = 0; i < 2; i++) accel->device_free(gpu, device[i]);
    accel->device_free(gpu, word);
    accel->host_unregister(gpu, host);
    accel->host_unregister(gpu, counter);
    munmap(host, 2 * PAGE);
    munmap(counter, PAGE);
}

static void test_order(void) {
    uccl_ep_gpu *gpu = open_gpu();
    for (uint64_t i = 0; i < 4; i++) copies_in_order(gpu, 10 + i, test_scaled(1000));
    accel->close(gpu);
}

/* No copy is taken back by a full table of marks, and it empties. */
static void test_marks(void) {
    uccl_ep_gpu *gpu = open_gpu();
    uccl_ep_copy_queue *queue;
    CHECK_OK(accel->queue_open(gpu, &queue));
    CHECK_OK(accel->copy_start(queue, NULL, NULL, 0)); /* nothing, and legal */
    uint64_t first, number, n = 1;
    CHECK_OK(accel->mark(queue, &first));
    int status;
    while ((status = accel->mark(queue, &number)) == UCCL_EP_OK) {
        CHECK_EQ(number, first + n);
        CHECK(++n <= UCCL_EP_COPY_MARKS, "no limit");
    }
    CHECK_REFUSED(status, UCCL_EP_E_AGAIN, "marks");
    CHECK_EQ(n, UCCL_EP_COPY_MARKS);
    for (int round = 0; round < 3; round++) {
        UNTIL(marks_done(queue) == first + n - 1, "the marks did not end");
        for (uint64_t k = 0; k < UCCL_EP_COPY_MARKS; k++, n++) {
            CHECK_OK(accel->mark(queue, &number));
            CHECK_EQ(number, first + n);
        }
    }
    accel->queue_close(queue);
    accel->close(gpu);
}

static void *drive(void *argument) {
    uccl_ep_gpu *gpu = open_gpu();
    copies_in_order(gpu, 50 + (uint64_t)(uintptr_t)argument, test_scaled(500));
    accel->close(gpu);
    return NULL;
}

static void test_threads(void) {
    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++) CHECK_EQ(pthread_create(&threads[i], NULL, drive, (void *)i), 0);
    for (int i = 0; i < 4; i++) CHECK_EQ(pthread_join(threads[i], NULL), 0);
}

/* ---------------------------------------------------------------------------------------------------- two processes */

#define SHARED_BYTES ((uint64_t)(3 << 20) + 17)
#define SHARED_OFFSET 12345

static void load(void);

/* The other process. It is there before a driver is opened, since those of real devices do not survive a fork. */
static pid_t other_process;
static int to_other; /* takes one handle */

/* Change every byte of what the handle names. */
static void change_shared(int handles) {
    uint8_t handle[UCCL_EP_GPU_IPC_BYTES];
    const ssize_t got = read(handles, handle, sizeof handle);
    if (got == 0) return; /* nothing can be shared */
    CHECK_EQ(got, sizeof handle);
    load();
    uccl_ep_gpu *gpu = open_gpu();
    void *there;
    CHECK_OK(accel->ipc_open(gpu, handle, &there));
    const uint64_t n = SHARED_BYTES - SHARED_OFFSET;
    unsigned char *bytes = malloc(n), *expected = malloc(SHARED_BYTES);
    CHECK(bytes && expected, "malloc");
    fill(expected, SHARED_BYTES, 7);
    CHECK_OK(accel->copy(gpu, bytes, (char *)there + SHARED_OFFSET, n));
    CHECK(memcmp(bytes, expected + SHARED_OFFSET, n) == 0, "what the other process wrote");
    for (uint64_t i = 0; i < n; i++) bytes[i] ^= 0xff;
    CHECK_OK(accel->copy(gpu, (char *)there + SHARED_OFFSET, bytes, n));
    accel->ipc_close(gpu, there);
    accel->close(gpu);
    free(bytes);
    free(expected);
    if (fake) CHECK_EQ(fake->imports, 0);
}

static void start_other(void) {
    int ends[2];
    CHECK_EQ(pipe(ends), 0);
    fflush(NULL);
    other_process = fork();
    CHECK(other_process >= 0, "fork: %s", strerror(errno));
    if (other_process == 0) {
        close(ends[1]);
        test_deadline(600);
        change_shared(ends[0]);
        fflush(NULL);
        _exit(0);
    }
    close(ends[0]);
    to_other = ends[1];
}

static void end_other(void) {
    int status;
    close(to_other);
    CHECK(waitpid(other_process, &status, 0) == other_process && WIFEXITED(status) && WEXITSTATUS(status) == 0,
          "status %#x", (unsigned)status);
}

static void test_ipc(void) {
    uccl_ep_gpu *gpu = open_gpu();
    void *memory, *there;
    uint8_t handle[UCCL_EP_GPU_IPC_BYTES];
    CHECK_OK(accel->device_alloc(gpu, SHARED_BYTES, &memory));
    if (!describe().ipc) {
        CHECK_REFUSED(accel->ipc_export(gpu, memory, handle), UCCL_EP_E_UNSUPPORTED, "process");
        end_other();
        accel->device_free(gpu, memory);
        accel->close(gpu);
        return;
    }
    unsigned char *bytes = malloc(SHARED_BYTES), *expected = malloc(SHARED_BYTES);
    CHECK(bytes && expected, "malloc");
    fill(expected, SHARED_BYTES, 7);
    CHECK_OK(accel->copy(gpu, memory, expected, SHARED_BYTES));
    CHECK_OK(accel->ipc_export(gpu, memory, handle));
    CHECK_EQ(write(to_other, handle, sizeof handle), sizeof handle);
    end_other();
    for (uint64_t i = SHARED_OFFSET; i < SHARED_BYTES; i++) expected[i] ^= 0xff;
    CHECK_OK(accel->copy(gpu, bytes, memory, SHARED_BYTES));
    CHECK(memcmp(bytes, expected, SHARED_BYTES) == 0, "what the other process changed");
    there = NULL;
    CHECK_REFUSED(accel->ipc_open(gpu, handle, &there), UCCL_EP_E_UNSUPPORTED, "this process");
    /* From outside: any bytes. */
    fill(handle, sizeof handle, 8);
    CHECK(accel->ipc_open(gpu, handle, &there) != UCCL_EP_OK, "no handle");
    CHECK(!there, "nothing was opened");
    CHECK(accel->error_text()[0], "without words");
    accel->device_free(gpu, memory);
    accel->close(gpu);
    free(bytes);
    free(expected);
}

/* ----------------------------------------------------------------------------------------------- of fake drivers only
 */

/* What a communicator does with one, whatever fails on the way: an error in words, and nothing is left. */
static int use_everything(void) {
    uccl_ep_gpu_info info = {.size = sizeof info};
    uccl_ep_gpu *gpu = NULL;
    uccl_ep_copy_queue *queue = NULL;
    void *device = NULL, *there = NULL, *base;
    uint64_t bytes, number, done;
    uint8_t handle[UCCL_EP_GPU_IPC_BYTES];
    int32_t fd = -1;
    unsigned char *host = pages(PAGE);
    int status = accel->query(0, &info);
    if (status == UCCL_EP_OK && info.unusable[0]) return UCCL_EP_E_UNSUPPORTED;
    if (status == UCCL_EP_OK) status = accel->open(0, &gpu);
    if (status == UCCL_EP_OK) status = accel->device_alloc(gpu, PAGE, &device);
    if (status == UCCL_EP_OK) status = accel->host_register(gpu, host, PAGE, &there);
    const int registered = status == UCCL_EP_OK && there;
    if (status == UCCL_EP_OK) status = accel->allocation(gpu, device, &base, &bytes);
    if (status == UCCL_EP_OK) status = accel->ipc_export(gpu, device, handle);
    if (status == UCCL_EP_OK) status = accel->export_dmabuf(gpu, device, PAGE, &fd);
    if (status == UCCL_EP_OK) status = accel->copy(gpu, device, host, PAGE);
    if (status == UCCL_EP_OK) status = accel->queue_open(gpu, &queue);
    if (status == UCCL_EP_OK) status = accel->copy_start(queue, device, host, PAGE);
    if (status == UCCL_EP_OK) status = accel->mark(queue, &number);
    done = 0;
    while (status == UCCL_EP_OK && done != number) status = accel->marks_done(queue, &done);
    if (status == UCCL_EP_OK && info.can_flush) status = accel->flush_writes(gpu);
    char said[256];
    snprintf(said, sizeof said, "%s", accel->error_text());
    if (queue) {
        if (status != UCCL_EP_OK && fake->fail_at == 0 && accel->mark(queue, &number) != UCCL_EP_OK)
            CHECK(accel->copy_start(queue, device, host, 8) != UCCL_EP_OK, "a queue that broke stays broken");
        accel->queue_close(queue);
    }
    if (fd >= 0) close(fd);
    if (registered) accel->host_unregister(gpu, host);
    if (device) accel->device_free(gpu, device);
    if (gpu) accel->close(gpu);
    munmap(host, PAGE);
    if (status != UCCL_EP_OK) CHECK(said[0], "an error without words");
    return status;
}

static void check_nothing_left(void) {
    CHECK_EQ(fake->contexts, 0);
    CHECK_EQ(fake->current, 0);
    CHECK_EQ(fake->allocations, 0);
    CHECK_EQ(fake->registrations, 0);
    CHECK_EQ(fake->streams, 0);
    CHECK_EQ(fake->events, 0);
    CHECK_EQ(fake->imports, 0);
}

static void in_a_child(void (*body)(int), int argument) {
    fflush(NULL);
    const pid_t pid = fork();
    CHECK(pid >= 0, "fork: %s", strerror(errno));
    if (pid == 0) {
        test_deadline(120);
        body(argument);
        fflush(NULL);
        _exit(0);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0, "child of %d: status %#x",
          argument, (unsigned)status);
}

static void fail_one(int n) {
    load();
    fake->fail_at = n;
    const int status = use_everything();
    /* Drivers do not know what is newer than they are: what an attribute would tell is then not there. */
    CHECK(status != UCCL_EP_OK || fake->attributes_failed, "call %d failed and nobody noticed", n);
    check_nothing_left();
}

static void count_calls(int descriptor) {
    load();
    CHECK_OK(use_everything());
    check_nothing_left();
    CHECK_EQ(write(descriptor, &fake->calls, sizeof fake->calls), sizeof fake->calls);
}

/* Each call in turn. The driver is opened once a process, so each in a process of its own. */
static void test_failures(int unused) {
    (void)unused;
    int ends[2], calls = 0;
    CHECK_EQ(pipe(ends), 0);
    in_a_child(count_calls, ends[1]);
    CHECK_EQ(read(ends[0], &calls, sizeof calls), sizeof calls);
    close(ends[0]);
    close(ends[1]);
    printf("  %d calls\n", calls);
    CHECK(calls > (int)UCCL_EP_COPY_MARKS, "all that a queue needs");
    /* The queue's 256 events are alike. How late copies are decides where the calls end: all but the last are met. */
    for (int n = 1; n < calls - 4; n++) {
        const int in_events = n > 80 && n < calls - 60;
        if (!in_events || n % 50 == 0) in_a_child(fail_one, n);
    }
}

static void broken_copies(int unused) {
    (void)unused;
    load();
    uccl_ep_gpu *gpu = open_gpu();
    uccl_ep_copy_queue *queue, *other;
    void *device;
    uint64_t number, done = 0;
    char said[256];
    CHECK_OK(accel->queue_open(gpu, &queue));
    CHECK_OK(accel->queue_open(gpu, &other));
    CHECK_OK(accel->device_alloc(gpu, PAGE, &device));
    fake->break_copies = 719;
    CHECK_OK(accel->copy_start(queue, device, (char *)device + 2048, 8));
    CHECK_OK(accel->mark(queue, &number));
    int status;
    UNTIL((status = accel->marks_done(queue, &done)) != UCCL_EP_OK, "the queue does not break");
    CHECK(strstr(accel->error_text(), "719"), "the text is: %s", accel->error_text());
    CHECK(done < number, "what failed is not done");
    snprintf(said, sizeof said, "%s", accel->error_text());
    CHECK_EQ(accel->marks_done(queue, &done), status);
    CHECK(strcmp(said, accel->error_text()) == 0, "another reason: %s", accel->error_text());
    CHECK_EQ(accel->copy_start(queue, device, (char *)device + 2048, 8), status);
    CHECK_EQ(accel->mark(queue, &number), status);
    CHECK_OK(accel->copy_start(other, device, (char *)device + 2048, 8));
    accel->queue_close(queue);
    accel->queue_close(other);
    accel->device_free(gpu, device);
    accel->close(gpu);
    check_nothing_left();
}

/* Threads that capture a graph elsewhere are not disturbed. */
static void while_capturing(int unused) {
    (void)unused;
    load();
    fake->capturing = 1;
    CHECK_OK(use_everything());
    CHECK_EQ(fake->disturbed, 0);
    CHECK_EQ(fake->unpinned, 0);
    check_nothing_left();
}

/* Copies that stand still: nothing waits for them, and only closing would. */
static void stalled(int unused) {
    (void)unused;
    load();
    uccl_ep_gpu *gpu = open_gpu();
    uccl_ep_copy_queue *queue;
    void *device;
    uint64_t number, done = 1;
    CHECK_OK(accel->queue_open(gpu, &queue));
    CHECK_OK(accel->device_alloc(gpu, PAGE, &device));
    fake->stalled = 1;
    CHECK_OK(accel->copy_start(queue, device, (char *)device + 2048, 8));
    for (int i = 0; i < 100; i++) {
        if (i < 50) CHECK_OK(accel->mark(queue, &number));
        CHECK_OK(accel->marks_done(queue, &done));
        CHECK(done < number - (uint64_t)(i < 50 ? i : 49), "done before it was carried out");
    }
    fake->stalled = 0;
    UNTIL(marks_done(queue) == number, "the copies did not end");
    accel->queue_close(queue);
    accel->device_free(gpu, device);
    accel->close(gpu);
    check_nothing_left();
}

static void refuse_open(int unused) {
    (void)unused;
    load();
    uccl_ep_gpu *gpu;
    uccl_ep_gpu_info info = {.size = sizeof info};
    const int cuda = strcmp(accel->name, "cuda") == 0;
    if (cuda) {
        fake->architecture = 61;
        CHECK_OK(accel->query(0, &info));
        CHECK(strstr(info.unusable, "sm_61"), "it is: %s", info.unusable);
        CHECK_REFUSED(accel->open(0, &gpu), UCCL_EP_E_UNSUPPORTED, "sm_70");
        fake->architecture = 90;
        static const struct {
            int native;
            uint32_t ours;
        } orders[] = {{0, UCCL_EP_WRITES_UNORDERED}, {100, UCCL_EP_WRITES_ORDERED}, {200, UCCL_EP_WRITES_ORDERED_ALL}};
        for (int i = 0; i < 3; i++) {
            fake->writes_ordering = orders[i].native;
            fake->flush_options = i == 0 ? 1 : 2; /* 2: by the GPU's own stream only */
            info = describe();
            CHECK_EQ(info.writes_ordering, orders[i].ours);
            CHECK_EQ(info.can_flush, i == 0);
        }
    }
    /* Memory of another device, and host memory that is registered. */
    uccl_ep_gpu *other;
    void *device, *base, *there;
    uint64_t bytes;
    CHECK_OK(accel->open(0, &gpu));
    CHECK_OK(accel->open(1, &other));
    CHECK_OK(accel->device_alloc(other, PAGE, &device));
    CHECK_REFUSED(accel->allocation(gpu, device, &base, &bytes), UCCL_EP_E_REGISTRATION, "device 1");
    CHECK_OK(accel->allocation(other, device, &base, &bytes));
    unsigned char *host = pages(PAGE);
    CHECK_OK(accel->host_register(gpu, host, PAGE, &there));
    if (cuda) CHECK_REFUSED(accel->allocation(gpu, host, &base, &bytes), UCCL_EP_E_REGISTRATION, "no device memory");
    accel->host_unregister(gpu, host);
    munmap(host, PAGE);
    /* What the program has registered itself is taken as it is, and left to it. A part of that is not enough. */
    host = pages(4 * PAGE);
    CHECK_EQ(fake->register_host(host, 3 * PAGE, 3), 0);
    CHECK_OK(accel->host_register(gpu, host + PAGE, PAGE, &there));
    CHECK(there == host + PAGE, "its address");
    CHECK_REFUSED(accel->host_register(gpu, host + 2 * PAGE, 2 * PAGE, &there), UCCL_EP_E_REGISTRATION, "712");
    accel->host_unregister(gpu, host + PAGE);
    CHECK_EQ(fake->registrations, 1);
    CHECK_EQ(fake->unregister_host(host), 0);
    munmap(host, 4 * PAGE);
    CHECK_REFUSED(accel->ipc_export(gpu, (char *)device + 8, (uint8_t[UCCL_EP_GPU_IPC_BYTES]){0}),
                  UCCL_EP_E_UNSUPPORTED, "pools");
    accel->device_free(other, device);
    accel->close(gpu);
    accel->close(other);
    check_nothing_left();
}

static void no_devices(int unused) {
    (void)unused;
    load();
    fake->devices = 0;
    uccl_ep_gpu_info info = {.size = sizeof info};
    CHECK_REFUSED(accel->query(0, &info), UCCL_EP_E_NO_DEVICE, "no device");
    fake->devices = 2;
    CHECK_REFUSED(accel->query(0, &info), UCCL_EP_E_NO_DEVICE, "no device"); /* once a process */
}

/* A driver that lacks what newer ones have: the rest works, and what lacks is named. */
static void old_driver(int unused) {
    (void)unused;
    driver_path = LIBRARIES "/fake_old/libcuda.so.1";
    load();
    uccl_ep_gpu *gpu = open_gpu();
    void *device;
    int32_t fd;
    CHECK_EQ(describe().dmabuf, 0);
    CHECK_EQ(describe().can_flush, 0);
    CHECK_OK(accel->device_alloc(gpu, PAGE, &device));
    CHECK_REFUSED(accel->export_dmabuf(gpu, device, PAGE, &fd), UCCL_EP_E_UNSUPPORTED, "too old");
    CHECK_REFUSED(accel->flush_writes(gpu), UCCL_EP_E_UNSUPPORTED, "flush");
    accel->device_free(gpu, device);
    copies_in_order(gpu, 90, test_scaled(100));
    accel->close(gpu);
    check_nothing_left();
}

static void ancient_driver(int unused) {
    (void)unused;
    driver_path = LIBRARIES "/fake_ancient/libcuda.so.1";
    load();
    uccl_ep_gpu_info info = {.size = sizeof info};
    CHECK_REFUSED(accel->query(0, &info), UCCL_EP_E_NO_DEVICE, "too old");
    uccl_ep_gpu *gpu;
    CHECK_REFUSED(accel->open(0, &gpu), UCCL_EP_E_NO_DEVICE, "cuDriverGetVersion");
}

/* Where the machine has a driver this says nothing. */
static void no_driver(int unused) {
    (void)unused;
    driver_path = "";
    load();
    uccl_ep_gpu_info info = {.size = sizeof info};
    if (accel->query(0, &info) == UCCL_EP_OK) return;
    CHECK_REFUSED(accel->query(0, &info), UCCL_EP_E_NO_DEVICE, "install");
}

/* ---------------------------------------------------------------------------------------------------------- running */

static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    CHECK(found, "dlsym: %s", dlerror());
    return found;
}

/* The fake driver first: who asks for it by its name gets the one that is there. */
static void load(void) {
    fake = NULL;
    if (driver_path[0]) {
        void *library = dlopen(driver_path, RTLD_NOW | RTLD_LOCAL);
        CHECK(library, "dlopen: %s", dlerror());
        fake_driver_control_function *control;
        *(void **)&control = symbol(library, FAKE_DRIVER_CONTROL);
        fake = control();
        fake->seed = test_seed_value;
    }
    void *library = dlopen(accelerator_path, RTLD_NOW | RTLD_LOCAL);
    CHECK(library, "dlopen: %s", dlerror());
    const uccl_ep_accelerator *(*entry)(void);
    *(void **)&entry = symbol(library, UCCL_EP_ACCELERATOR_ENTRY);
    accel = entry();
}

static void conformance(int unused) {
    (void)unused;
    start_other();
    load();
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {{"devices", test_devices}, {"memory", test_memory},   {"registering", test_registering},
                 {"dmabuf", test_dmabuf},   {"flush", test_flush},     {"order", test_order},
                 {"marks", test_marks},     {"threads", test_threads}, {"ipc", test_ipc}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        printf("  %s\n", cases[i].name);
        cases[i].run();
        if (fake) {
            check_nothing_left();
            CHECK_EQ(fake->disturbed, 0);
        }
    }
}

int main(int argc, char **argv) {
    const int by_hand = argc > 1 && strchr(argv[1], '/');
    char *arguments[] = {argv[0], by_hand ? argv[2] : argv[1], NULL};
    test_begin(argc - by_hand, arguments, 600);
    if (by_hand) {
        accelerator_path = argv[1];
        driver_path = "";
        conformance(0);
        return test_end();
    }
    static const struct {
        const char *accelerator, *driver;
    } all[] = {{LIBRARIES "/libuccl_ep_cuda.so", LIBRARIES "/fake/libcuda.so.1"},
               {LIBRARIES "/libuccl_ep_hip.so", LIBRARIES "/fake/libamdhip64.so.6"}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        accelerator_path = all[i].accelerator;
        driver_path = all[i].driver;
        printf("%s\n", accelerator_path);
        in_a_child(conformance, 0);
        test_failures(0);
        in_a_child(broken_copies, 0);
        in_a_child(while_capturing, 0);
        in_a_child(stalled, 0);
        in_a_child(refuse_open, 0);
        in_a_child(no_devices, 0);
        in_a_child(no_driver, 0);
    }
    accelerator_path = LIBRARIES "/libuccl_ep_emulation.so";
    driver_path = "";
    static const char *const knobs[] = {"", "lazy=3", "lazy=40,warp_size=64", "dmabuf=0,ipc=0"};
    for (size_t i = 0; i < sizeof knobs / sizeof *knobs; i++) {
        printf("%s, %s\n", accelerator_path, knobs[i]);
        setenv("UCCL_EP_EMULATION", knobs[i], 1);
        in_a_child(conformance, 0);
    }
    accelerator_path = all[0].accelerator;
    in_a_child(old_driver, 0);
    in_a_child(ancient_driver, 0);
    return test_end();
}
