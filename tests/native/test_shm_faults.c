/* SPDX-License-Identifier: Apache-2.0
 *
 * test_shm_faults.c: every system call that the shared-memory backend makes from open to close fails once, with every
 * errno that matters: two ranks either come up and work, or one of them says what failed; never a hang, a crash or a
 * leak.
 */
#include "shm_ranks.h"
#include <stdarg.h>
#include <sys/epoll.h>
#include <sys/random.h>

#if THREAD_SANITIZED /* which starts before anybody may stand in for mmap; there is one thread here anyhow */
int main(void) {
    printf("left out under ThreadSanitizer\n");
    return 0;
}
#else

/* ----------------------------------------------------------------------------- the C library, with one call failing */

static bool armed;
static unsigned calls, fails_at; /* 0: none */
static int fails_with;
static const char *failed, *always; /* `always`: the call that fails each time */

static bool fails(const char *name) {
    const bool refused = always && strcmp(always, name) == 0;
    if (!armed || (++calls != fails_at && !refused)) return false;
    failed = name;
    errno = fails_with;
    return true;
}

/* Each stands before the C library's function of its name. */
#define STAND_IN(type, name, parameters, arguments)                                                                    \
    __attribute__((visibility("default"))) type name parameters {                                                      \
        static type(*next) parameters;                                                                                 \
        if (!next) *(void **)&next = dlsym(RTLD_NEXT, #name);                                                          \
        return fails(#name) ? (type)-1 : next arguments;                                                               \
    }
STAND_IN(int, memfd_create, (const char *name, unsigned flags), (name, flags))
STAND_IN(int, ftruncate, (int fd, off_t bytes), (fd, bytes))
STAND_IN(void *, mmap, (void *at, size_t bytes, int rights, int flags, int fd, off_t offset),
         (at, bytes, rights, flags, fd, offset))
STAND_IN(int, madvise, (void *at, size_t bytes, int advice), (at, bytes, advice))
STAND_IN(ssize_t, getrandom, (void *to, size_t bytes, unsigned flags), (to, bytes, flags))
STAND_IN(int, socket, (int domain, int type, int protocol), (domain, type, protocol))
STAND_IN(int, bind, (int fd, const struct sockaddr *name, socklen_t bytes), (fd, name, bytes))
STAND_IN(int, listen, (int fd, int backlog), (fd, backlog))
STAND_IN(int, accept4, (int fd, struct sockaddr *name, socklen_t *bytes, int flags), (fd, name, bytes, flags))
STAND_IN(int, connect, (int fd, const struct sockaddr *name, socklen_t bytes), (fd, name, bytes))
STAND_IN(int, getsockopt, (int fd, int level, int option, void *value, socklen_t *bytes),
         (fd, level, option, value, bytes))
STAND_IN(ssize_t, sendmsg, (int fd, const struct msghdr *message, int flags), (fd, message, flags))
STAND_IN(ssize_t, recvmsg, (int fd, struct msghdr *message, int flags), (fd, message, flags))
STAND_IN(int, epoll_create1, (int flags), (flags))
STAND_IN(int, epoll_ctl, (int epoll, int what, int fd, struct epoll_event *event), (epoll, what, fd, event))
STAND_IN(int, epoll_wait, (int epoll, struct epoll_event *events, int max, int timeout), (epoll, events, max, timeout))

__attribute__((visibility("default"))) int fcntl(int fd, int what, ...) {
    static int (*next)(int, int, ...);
    if (!next) *(void **)&next = dlsym(RTLD_NEXT, "fcntl");
    va_list arguments;
    va_start(arguments, what);
    const long value = va_arg(arguments, long);
    va_end(arguments);
    return fails("fcntl") ? -1 : next(fd, what, value);
}

#if !SANITIZED /* they have their own */
void *__libc_calloc(size_t n, size_t bytes);
__attribute__((visibility("default"))) void *calloc(size_t n, size_t bytes) {
    return fails("calloc") ? NULL : __libc_calloc(n, bytes);
}
#endif

/* ------------------------------------------------------------------------------------------ two ranks that may fail */

typedef struct attempt {
    uccl_ep_device *device;
    uccl_ep_endpoint *endpoint;
    void *memory[UCCL_EP_REGIONS];
    bool registered[UCCL_EP_REGIONS];
    papers papers;
} attempt;

#define BYTES (64 * KIB)
#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        const int try_status_ = (call);                                                                                \
        if (try_status_ != UCCL_EP_OK) return try_status_;                                                             \
    } while (0)

static int attempt_open(attempt *a, uint32_t me) {
    uccl_ep_caps caps = {.size = sizeof(caps)};
    TRY(table->device_open(&host, NULL, "", &a->device, &caps));
    for (unsigned i = 0; i < UCCL_EP_REGIONS; i++) {
        TRY(table->memory_alloc(a->device, BYTES, UCCL_EP_ALLOC_HUGE_OFF, &a->memory[i]));
        const uccl_ep_memory memory = {
            .size = sizeof(memory), .base = a->memory[i], .bytes = BYTES, .dmabuf_fd = -1, .access = RIGHTS};
        TRY(table->region_register(a->device, (uccl_ep_region)i, &memory));
        a->registered[i] = true;
        a->papers.region[i].bytes = UCCL_EP_MAX_BLOB_BYTES;
        TRY(table->region_export(a->device, (uccl_ep_region)i, a->papers.region[i].data, &a->papers.region[i].bytes));
    }
    const uccl_ep_endpoint_config config = {.size = sizeof(config), .rank = me, .peers = 2, .inflight = 64};
    TRY(table->endpoint_open(a->device, &config, &a->endpoint));
    a->papers.address[0].bytes = UCCL_EP_MAX_BLOB_BYTES;
    return table->endpoint_address(a->endpoint, a->papers.address[0].data, &a->papers.address[0].bytes);
}

static int attempt_both(attempt a[2]) {
    for (uint32_t i = 0; i < 2; i++) TRY(attempt_open(&a[i], i));
    for (uint32_t i = 0; i < 2; i++)
        for (uint32_t k = 0; k < 2; k++)
            TRY(table->connect(a[i].endpoint, k, a[k].papers.address[0].data, a[k].papers.address[0].bytes));
    for (unsigned turn = 0, up = 0; up < 4; turn++) {
        CHECK(turn < 1000, "a hang after %s failed (call %u, %s)", failed, fails_at, strerror(fails_with));
        up = 0;
        for (uint32_t i = 0; i < 2; i++)
            for (uint32_t k = 0; k < 2; k++) {
                const int status = table->connect_poll(a[i].endpoint, k);
                if (status < 0) return status;
                up += status == UCCL_EP_OK;
            }
    }
    for (uint32_t i = 0; i < 2; i++)
        for (uint32_t k = 0; k < 2; k++)
            for (unsigned region = 0; region < UCCL_EP_REGIONS; region++)
                TRY(table->region_import(a[i].device, k, (uccl_ep_region)region, a[k].papers.region[region].data,
                                         a[k].papers.region[region].bytes));
    for (uint32_t i = 0; i < 2; i++) {
        memset(a[i].memory[0], (int)(0x20 + i), BYTES);
        const uccl_ep_operation ops[2] = {op_write(0, BYTES / 2, BYTES / 2, 0), op_add(1, 7, 0)};
        uint32_t accepted;
        TRY(table->submit(a[i].endpoint, 1 - i, ops, 2, 0, &accepted));
        CHECK_EQ(accepted, 2);
        CHECK_EQ(((unsigned char *)a[1 - i].memory[0])[BYTES - 1], 0x20 + i);
        CHECK_EQ(((uint64_t *)a[1 - i].memory[UCCL_EP_REGION_SIGNALS])[1], 7);
    }
    /* A failure to look says nothing about the peer. (One of reading its link does.) */
    for (uint32_t i = 0; i < 2; i++) {
        uccl_ep_event event;
        const int events = table->events(a[i].endpoint, &event, 1);
        CHECK(events == 0 || strcmp(failed, "recvmsg") == 0, "an event after %s failed: %s", failed, event.text);
    }
    return UCCL_EP_OK;
}

static void attempt_close(attempt *a) {
    if (a->endpoint) table->endpoint_close(a->endpoint);
    for (unsigned i = 0; i < UCCL_EP_REGIONS; i++) {
        if (a->registered[i]) table->region_deregister(a->device, (uccl_ep_region)i);
        if (a->memory[i]) table->memory_free(a->device, a->memory[i], BYTES);
    }
    if (a->device) table->device_close(a->device);
}

/* The status, after everything was closed and found gone. */
static int attempt_run(void) {
    static attempt a[2];
    memset(a, 0, sizeof(a));
    const unsigned fds = count_fds(), maps = count_maps();
    said[0] = 0;
    calls = 0;
    failed = NULL;
    armed = true;
    const int status = attempt_both(a);
    for (unsigned i = 0; i < 2; i++) attempt_close(&a[i]);
    armed = false;
    CHECK(status == UCCL_EP_OK || said[0], "status %d of %s without a text", status, failed);
    CHECK_EQ(count_fds(), fds);
    CHECK_EQ(count_maps(), maps);
    return status;
}

static void one_call_fails(void) {
    static const int errors[] = {ENOMEM, EPERM, EMFILE, EINTR, EAGAIN, ECONNRESET, EPIPE, ENOSPC};
    CHECK_EQ(attempt_run(), UCCL_EP_OK);
    for (unsigned e = 0; e < sizeof(errors) / sizeof(errors[0]); e++) {
        unsigned refused = 0, survived = 0;
        fails_with = errors[e];
        for (fails_at = 1;; fails_at++) {
            const int status = attempt_run();
            if (!failed) break; /* there are not so many calls */
            CHECK(status == UCCL_EP_OK || status <= UCCL_EP_E_INVALID, "status %d of %s", status, failed);
            if (status == UCCL_EP_OK)
                survived++;
            else
                refused++;
        }
        printf("  %s: of %u calls %u were fatal, and said so\n", strerror(errors[e]), fails_at - 1, refused);
        CHECK(refused > 10 && refused + survived == fails_at - 1, "%u, %u", refused, survived);
        fails_at = 0;
        CHECK_EQ(attempt_run(), UCCL_EP_OK);
    }
}

/* A sandbox that refuses a call for good: works without it, or the open names it. */
static void one_call_is_refused(void) {
    uccl_ep_device_info info = {.size = sizeof(info)};
    static const char *const needed[] = {"memfd_create", "fcntl", "getrandom"};
    fails_with = EPERM;
    for (unsigned i = 0; i < 3; i++) {
        always = needed[i];
        const int status = attempt_run();
        CHECK(status == UCCL_EP_E_SYSTEM && strstr(said, needed[i]), "%s refused: %d %s", needed[i], status, said);
        armed = true;
        CHECK_OK(table->query(&host, 0, &info));
        armed = false;
        CHECK((strstr(info.unusable, needed[i]) != NULL) == (i < 2), "unusable: %s", info.unusable);
    }
    always = "madvise";
    CHECK_EQ(attempt_run(), UCCL_EP_OK);
    always = NULL;
}

int main(int argc, char **argv) {
    static const shm_test tests[] = {{"one call fails", one_call_fails}, {"one call is refused", one_call_is_refused}};
    return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0]), 300);
}
#endif
