/* SPDX-License-Identifier: Apache-2.0
 *
 * test_lab_preload.c: a device of the lab is a descriptor like others; and what is no device is left alone.
 *
 * Linked with the library, which then stands before the C library as LD_PRELOAD puts it; the program calls itself once
 * more with the environment that asks for two NICs.
 */
#include "testing.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <pthread.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/mlx5-abi.h>
#include <rdma/rdma_netlink.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <stdbool.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>

#define DEVICE "/dev/infiniband/uverbs0"
#define CHECK_FAILS(call, error)                                                                                       \
    do {                                                                                                               \
        errno = 0;                                                                                                     \
        CHECK((long)(call) == -1, "it does not fail");                                                                 \
        CHECK_EQ(errno, error);                                                                                        \
    } while (0)

static int get_context(int fd, int *async) {
    struct {
        struct ib_uverbs_cmd_hdr head;
        uint64_t response;
        struct mlx5_ib_alloc_ucontext_req_v2 vendor;
    } c = {.vendor = {.total_num_bfregs = 16, .max_cqe_version = 1}};
    uint32_t out[64];
    c.head = (struct ib_uverbs_cmd_hdr){IB_USER_VERBS_CMD_GET_CONTEXT, sizeof c / 4, sizeof out / 4};
    c.response = (uintptr_t)out;
    if (write(fd, &c, sizeof c) != sizeof c) return errno;
    *async = (int)out[0];
    return 0;
}

static int alloc_pd(int fd, uint32_t *handle) {
    struct {
        struct ib_uverbs_cmd_hdr head;
        uint64_t response;
    } c = {{IB_USER_VERBS_CMD_ALLOC_PD, sizeof c / 4, 2}, 0};
    uint32_t out[2];
    c.response = (uintptr_t)out;
    if (write(fd, &c, sizeof c) != sizeof c) return errno;
    *handle = out[0];
    return 0;
}

static int dealloc_pd(int fd, uint32_t handle) {
    const struct {
        struct ib_uverbs_cmd_hdr head;
        uint32_t handle;
    } c = {{IB_USER_VERBS_CMD_DEALLOC_PD, 3, 0}, handle};
    return write(fd, &c, sizeof c) == sizeof c ? 0 : errno;
}

static int open_device(int *async) {
    const int fd = open(DEVICE, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0, "%s", strerror(errno));
    CHECK_EQ(get_context(fd, async), 0);
    return fd;
}

static bool ended(int async) {
    char byte;
    fcntl(async, F_SETFL, O_NONBLOCK);
    return read(async, &byte, 1) == 0; /* nobody can write to it any more */
}

static void a_device(void) {
    struct stat about;
    int async;
    uint32_t pd;
    CHECK(!stat(DEVICE, &about) && S_ISCHR(about.st_mode) && about.st_rdev == makedev(231, 192), "stat");
    CHECK(!stat("/dev/infiniband/uverbs1", &about) && about.st_rdev == makedev(231, 193), "the second one");
    CHECK_FAILS(stat("/dev/infiniband/uverbs3", &about), ENOENT);
    CHECK_FAILS(open("/dev/infiniband/uverbs3", O_RDWR), ENOENT);
    CHECK_FAILS(open("/dev/infiniband/uverbs0x", O_RDWR), ENOENT);
    CHECK_EQ(access(DEVICE, R_OK | W_OK), 0);
    const int fd = open_device(&async);
    CHECK(!fstat(fd, &about) && S_ISCHR(about.st_mode) && about.st_rdev == makedev(231, 192), "fstat");
    CHECK(fcntl(fd, F_GETFD) == FD_CLOEXEC, "O_CLOEXEC is lost");
    CHECK_FAILS(write(fd, "too short", 4), EINVAL);
    CHECK_FAILS(ioctl(fd, 0x1b99, NULL), ENOTTY);
    CHECK_FAILS(ioctl(fd, RDMA_VERBS_IOCTL, NULL), EFAULT);
    CHECK_EQ(ioctl(fd, FIOCLEX), 0); /* the kernel's own, for every descriptor */
    volatile uint64_t *page = mmap(NULL, 4096, PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(page != MAP_FAILED, "the doorbell page: %s", strerror(errno));
    page[100] = 1;
    munmap((void *)(uintptr_t)page, 4096);
    CHECK_FAILS(mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 5 << 20), EOPNOTSUPP); /* the clock */
    CHECK_EQ(alloc_pd(fd, &pd), 0);
    CHECK_EQ(dealloc_pd(fd, pd), 0);
    CHECK_EQ(dealloc_pd(fd, pd), EINVAL);
    CHECK_EQ(close(fd), 0);
    CHECK(ended(async), "the context outlives its descriptor");
    CHECK_FAILS(write(fd, "gone", 4), EBADF);
    close(async);
}

static void copies(void) {
    int async, other_async;
    uint32_t pd;
    const int fd = open_device(&async), copy = dup(fd), third = fcntl(fd, F_DUPFD_CLOEXEC, 100);
    CHECK(copy >= 0 && third >= 100, "dup");
    CHECK_EQ(alloc_pd(fd, &pd), 0);
    CHECK_EQ(close(fd), 0);
    CHECK_EQ(dealloc_pd(copy, pd), 0); /* the same context */
    CHECK_EQ(close(copy), 0);
    CHECK(!ended(async), "a copy is open still");
    /* Another device in its place: the last one of the first is closed by that. */
    const int other = open_device(&other_async);
    CHECK_EQ(dup2(other, third), third);
    CHECK(ended(async), "dup2 closes what was there");
    CHECK_EQ(close(other), 0);
    CHECK_EQ(alloc_pd(third, &pd), 0);
    CHECK_EQ(close(third), 0);
    CHECK(ended(other_async), "the last copy");
    close(async);
    close(other_async);
    /* Closed behind our back, and the number given to another file. */
    const int hidden = open_device(&async);
    syscall(SYS_close, hidden);
    const int file = memfd_create("file", MFD_CLOEXEC);
    CHECK_EQ(file, hidden);
    struct stat about;
    CHECK(!fstat(file, &about) && S_ISREG(about.st_mode), "a file is a file");
    CHECK_EQ(write(file, "text", 4), 4);
    CHECK(ended(async), "the context of what was closed");
    close(file);
    close(async);
}

static int in_child(int fd) {
    int async;
    uint32_t pd;
    if (alloc_pd(fd, &pd) != EIO) return 1; /* the parent's */
    if (mmap(NULL, 4096, PROT_WRITE, MAP_SHARED, fd, 0) != MAP_FAILED || errno != EIO) return 2;
    if (close(fd)) return 3;
    fd = open(DEVICE, O_RDWR | O_CLOEXEC);
    if (fd < 0 || get_context(fd, &async) || alloc_pd(fd, &pd) || dealloc_pd(fd, pd) || close(fd)) return 4;
    return 0;
}

/* It closes all that it has, as daemons do, without the C library's close(); the numbers are those of other files then,
 * some of them the lab's own. */
static int in_daemon(const int *fds) {
    int async, none, file;
    uint32_t pd;
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* it may wait for itself, with signals blocked */
    for (uint32_t i = 0; i < 3; i++) syscall(SYS_close, fds[i]);
    const int fd = open(DEVICE, O_RDWR | O_CLOEXEC);
    if (fd != fds[0] || get_context(fd, &async) || async != fds[1]) return 1;
    if (alloc_pd(fd, &pd) || dealloc_pd(fd, pd)) return 2;
    file = memfd_create("file", MFD_CLOEXEC);
    if (file != fds[2] || write(file, "text", 4) != 4) return 3;
    if ((none = dup(file)) < 0 || write(none, "text", 4) != 4 || close(none) || close(file)) return 4;
    return close(fd) || close(async) ? 5 : 0;
}

static void children(char **argv) {
    int async, status;
    uint32_t pd;
    const int fd = open_device(&async);
    pid_t child = fork();
    if (!child) _exit(in_child(fd));
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status), "fork: 0x%x", status);
    const int fds[3] = {fd, open(DEVICE, O_RDWR | O_CLOEXEC), open(DEVICE, O_RDWR | O_CLOEXEC)};
    CHECK(fds[1] >= 0 && fds[2] >= 0, "open");
    child = fork();
    if (!child) _exit(in_daemon(fds));
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status), "daemon: 0x%x", status);
    CHECK(!close(fds[1]) && !close(fds[2]), "close");
    CHECK_EQ(alloc_pd(fd, &pd), 0);
    /* A child that has our memory closes it: its own descriptor, nothing of ours. */
    child = vfork();
    if (!child) {
        close(fd);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && !status, "vfork: 0x%x", status);
    CHECK_EQ(dealloc_pd(fd, pd), 0);
    child = fork();
    if (!child) {
        execl(argv[0], argv[0], "open", NULL);
        _exit(9);
    }
    CHECK(waitpid(child, &status, 0) == child && !status, "exec: 0x%x", status);
    CHECK_EQ(close(fd), 0);
    close(async);
}

/* A doorbell that is taken store by store, wherever it is rung: a store where SIGSEGV is blocked would end the process.
 */
static volatile uint64_t *doorbell;
static const uint64_t nobodys = 4ull << 60 | 12345ull << 32; /* entries of a queue that there is not */

static bool faults_are_blocked(void) {
    sigset_t now;
    CHECK_EQ(pthread_sigmask(SIG_BLOCK, NULL, &now), 0);
    return sigismember(&now, SIGSEGV);
}

static void in_handler(int number) {
    (void)number;
    *doorbell = nobodys;
}

static void *quiet(void *none) {
    sigset_t all;
    sigfillset(&all);
    CHECK_EQ(pthread_sigmask(SIG_BLOCK, &all, NULL), 0);
    CHECK(!faults_are_blocked(), "pthread_sigmask");
    *doorbell = nobodys;
    return none;
}

static void doorbells(char **argv) {
    int async, status;
    sigset_t all, before;
    pthread_t thread;
    const int fd = open("/dev/infiniband/uverbs2", O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0 && !get_context(fd, &async), "a Thor");
    doorbell = mmap(NULL, (size_t)sysconf(_SC_PAGESIZE), PROT_WRITE, MAP_SHARED, fd, 0x10000);
    CHECK(doorbell != MAP_FAILED, "its doorbell: %s", strerror(errno));
    CHECK_EQ(pthread_create(&thread, NULL, quiet, NULL), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    sigfillset(&all);
    CHECK(!sigprocmask(SIG_SETMASK, &all, &before) && !faults_are_blocked(), "sigprocmask");
    *doorbell = nobodys;
    CHECK_EQ(sigprocmask(SIG_SETMASK, &before, NULL), 0);
    struct sigaction action = {.sa_handler = in_handler, .sa_mask = all}, old;
    CHECK(!sigaction(SIGUSR1, &action, &old) && !raise(SIGUSR1), "a handler that blocks all");
    CHECK_EQ(sigaction(SIGUSR1, &old, &action), 0);
    CHECK(action.sa_handler == in_handler && sigismember(&action.sa_mask, SIGUSR2), "what was set is read");
    /* A program that is started so. */
    const pid_t child = fork();
    if (!child) {
        syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, NULL, 8);
        execl(argv[0], argv[0], "quiet", NULL);
        _exit(9);
    }
    CHECK(waitpid(child, &status, 0) == child && !status, "exec: 0x%x", status);
    CHECK(!close(fd) && !close(async), "close");
    munmap((void *)(uintptr_t)doorbell, (size_t)sysconf(_SC_PAGESIZE));
}

/* ---------------------------------------------------------------------------------------------------------- netlink */

static bool answers(int fd) {
    struct nlmsghdr ask = {.nlmsg_len = sizeof ask,
                           .nlmsg_type = RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_SYS_GET),
                           .nlmsg_flags = NLM_F_REQUEST},
                    told;
    return send(fd, &ask, sizeof ask, 0) == sizeof ask && recv(fd, &told, sizeof told, MSG_DONTWAIT) == sizeof told;
}

static _Atomic bool enough;

static void *again_and_again(void *none) {
    while (!enough) {
        const int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_RDMA);
        CHECK(fd >= 0 && answers(fd) && !close(fd), "netlink: %s", strerror(errno));
    }
    return none;
}

static void netlink(void) {
    int status;
    pthread_t thread;
    const int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_RDMA);
    CHECK(fd >= 0 && answers(fd), "netlink: %s", strerror(errno));
    /* A child that has our memory closes its own. */
    pid_t child = vfork();
    if (!child) {
        close(fd);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && !status, "vfork: 0x%x", status);
    CHECK(answers(fd), "a vfork() child has closed it");
    /* A child of fork(), beside a thread that may be in the middle of something, has one of its own. */
    CHECK_EQ(pthread_create(&thread, NULL, again_and_again, NULL), 0);
    for (uint32_t i = 0; i < 20; i++) {
        child = fork();
        if (!child) {
            prctl(PR_SET_PDEATHSIG, SIGKILL); /* it may wait for ever */
            _exit(!answers(fd) || close(fd));
        }
        CHECK(waitpid(child, &status, 0) == child && !status, "fork: 0x%x", status);
    }
    enough = true;
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK(answers(fd) && !close(fd), "the parent's own");
}

static void others(void) {
    int ends[2];
    char text[8] = "";
    struct stat about;
    CHECK_FAILS(write(-1, "x", 1), EBADF);
    CHECK_FAILS(write(70000, "x", 1), EBADF);
    CHECK_FAILS(close(-1), EBADF);
    CHECK_FAILS(open("/nowhere/at/all", O_RDONLY), ENOENT);
    CHECK_FAILS(stat("/nowhere/at/all", &about), ENOENT);
    CHECK_FAILS(access("/nowhere/at/all", R_OK), ENOENT);
    CHECK_FAILS(fstat(-1, &about), EBADF);
    CHECK_FAILS(fstat(70000, &about), EBADF);
    CHECK_FAILS(dup2(-1, 5), EBADF);
    CHECK_FAILS(ioctl(-1, RDMA_VERBS_IOCTL, text), EBADF);
    CHECK_FAILS(mmap(NULL, 4096, PROT_READ, MAP_SHARED, -1, 0), EBADF);
    CHECK(!pipe(ends), "pipe");
    CHECK_EQ(write(ends[1], "through", 8), 8);
    CHECK_EQ(read(ends[0], text, sizeof text), 8);
    CHECK(!strcmp(text, "through"), "%s", text);
    CHECK_EQ(fcntl(ends[1], F_GETFL) & O_ACCMODE, O_WRONLY);
    CHECK(!fcntl(ends[1], F_SETFL, O_NONBLOCK) && fcntl(ends[1], F_GETFL) & O_NONBLOCK, "F_SETFL");
    close(ends[0]);
    close(ends[1]);
    char path[] = "/tmp/uccl-ep-lab-XXXXXX";
    CHECK(mkdtemp(path), "mkdtemp");
    const mode_t mask = umask(0);
    const int folder = open(path, O_RDONLY | O_DIRECTORY);
    const int file = openat(folder, "file", O_CREAT | O_WRONLY | O_CLOEXEC, 0640);
    CHECK(file >= 0 && !fstat(file, &about), "openat");
    CHECK_EQ(about.st_mode & 0777, 0640); /* the third argument has come through */
    CHECK(!fstatat(folder, "file", &about, 0) && S_ISREG(about.st_mode), "fstatat");
    umask(mask);
    close(file);
    CHECK(!unlinkat(folder, "file", 0) && !close(folder) && !rmdir(path), "clean up");
}

static void *many(void *argument) {
    const int fd = *(int *)argument;
    for (uint64_t i = 0; i < test_scaled(500); i++) {
        uint32_t pd = 0;
        int async = -1;
        CHECK_EQ(alloc_pd(fd, &pd), 0);
        CHECK_EQ(dealloc_pd(fd, pd), 0);
        const int own = open_device(&async);
        CHECK_EQ(alloc_pd(own, &pd), 0);
        CHECK(!close(own) && !close(async), "close");
    }
    return NULL;
}

static void threads(void) {
    pthread_t t[4];
    int async, fd = open_device(&async);
    for (size_t i = 0; i < 4; i++) CHECK_EQ(pthread_create(&t[i], NULL, many, &fd), 0);
    for (size_t i = 0; i < 4; i++) CHECK_EQ(pthread_join(t[i], NULL), 0);
    CHECK(!close(fd) && ended(async), "the context");
    close(async);
}

int main(int argc, char **argv) {
    if (!getenv("UCCL_EP_LAB")) {
        setenv("UCCL_EP_LAB", "nic=connectx,count=2,fabric=test-lab-preload;nic=thor", 1);
        execv("/proc/self/exe", argv);
        perror("exec");
        return 1;
    }
    if (argc > 1 && !strcmp(argv[1], "open")) {
        int async;
        const int fd = open(DEVICE, O_RDWR);
        return fd < 0 || get_context(fd, &async);
    }
    if (argc > 1 && !strcmp(argv[1], "quiet")) return faults_are_blocked();
    test_begin(argc, argv, 120);
    others();
    a_device();
    copies();
    children(argv);
    doorbells(argv);
    netlink();
    threads();
    return test_end();
}
