/* SPDX-License-Identifier: Apache-2.0
 *
 * preload.c: the functions of the C library that a program uses on a device, before the C library's own.
 *
 * A device that is open is a descriptor of a sealed, empty memory file: a real one, so that dup(), fcntl(), poll() and
 * exec() do with it what they do. A table by descriptor says which are ours; everything else goes to the next
 * definition of the function unchanged: one load more, no lock, no allocation. The table is believed only if the
 * descriptor is still that file, since system calls that do not come through here (close_range, an io_uring) may have
 * put another in its place.
 *
 * After fork() a device is the parent's: in the child its descriptors answer EIO. A child that shares the parent's
 * memory (vfork) may close them, which then says nothing about the parent's.
 */
#undef _FORTIFY_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "behind.h"
#include "control.h"

/* ---------------------------------------------------------------------------------------------- what comes behind us
 */

void *lab_behind(_Atomic(void *) *slot, const char *name) {
    void *function = atomic_load_explicit(slot, memory_order_acquire);
    if (function) return function;
    function = dlsym(RTLD_NEXT, name);
    if (!function) lab_die("there is no %s() behind the lab's", name);
    atomic_store_explicit(slot, function, memory_order_release);
    return function;
}

NEXT_(open)
NEXT_(openat)
NEXT_(write)
NEXT_(ioctl)
NEXT_(mmap)
NEXT_(munmap)
NEXT_(close)
NEXT_(dup)
NEXT_(dup2)
NEXT_(dup3)
NEXT_(fcntl)
NEXT_(access)
NEXT_(faccessat)
NEXT_(sigaction)
NEXT_(signal)
NEXT_(sigprocmask)
NEXT_(pthread_sigmask)

/* ------------------------------------------------------------------------------------------------------ descriptors */

enum kind { OTHER, DEVICE, DEAD };

static _Atomic uint8_t kind[LAB_MAX_FDS];
static struct device_fd {
    lab_context *context;
    dev_t device;
    ino_t file;
} opened[LAB_MAX_FDS];
static uint32_t fds_top;    /* above it there is none */
static _Atomic pid_t owner; /* of what the table says */

static pid_t process(void) {
    return (pid_t)syscall(SYS_getpid);
}

static int raw_fstat(int fd, struct stat *about) {
    return (int)syscall(SYS_newfstatat, fd, "", about, AT_EMPTY_PATH);
}

static inline bool ours(int fd) {
    return __builtin_expect(
        fd >= 0 && fd < (int)LAB_MAX_FDS && atomic_load_explicit(&kind[fd], memory_order_relaxed) != OTHER, 0);
}

struct guard {
    sigset_t signals;
    int cancellation;
};

/* A handler that closes a device must not find its own thread inside. Faults stay: doorbells may be among them. */
static void enter(struct guard *g) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT};
    sigset_t all;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&all, faults[i]);
    pthread_sigmask(SIG_BLOCK, &all, &g->signals);
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &g->cancellation);
    lab_enter();
}

static void leave(const struct guard *g) {
    const int error = errno;
    lab_leave();
    pthread_setcancelstate(g->cancellation, NULL);
    pthread_sigmask(SIG_SETMASK, &g->signals, NULL);
    errno = error;
}

static void put(int fd, enum kind what, const struct device_fd *is) {
    opened[fd] = *is;
    if ((uint32_t)fd >= fds_top) fds_top = (uint32_t)fd + 1;
    atomic_store_explicit(&kind[fd], (uint8_t)what, memory_order_release);
}

/* With the lock. The context ends with its last descriptor. */
static void drop(int fd) {
    lab_context *context = opened[fd].context;
    opened[fd] = (struct device_fd){0};
    atomic_store_explicit(&kind[fd], OTHER, memory_order_release);
    if (!context) return;
    for (uint32_t i = 0; i < fds_top; i++)
        if (opened[i].context == context) return;
    lab_context_free(context);
}

static bool still(int fd) {
    struct stat about;
    return !raw_fstat(fd, &about) && about.st_ino == opened[fd].file && about.st_dev == opened[fd].device;
}

lab_context *lab_context_of_fd(int fd) {
    if (!ours(fd) || atomic_load(&kind[fd]) != DEVICE || atomic_load(&owner) != process()) return NULL;
    return still(fd) ? opened[fd].context : NULL;
}

/* With the lock: the context to act on; else an errno. 0: the descriptor is something else by now. */
static lab_context *context_for(int fd, int *error) {
    *error = 0;
    const uint8_t what = atomic_load(&kind[fd]);
    const bool mine = atomic_load(&owner) == process();
    if (what == OTHER) return NULL;
    if (!still(fd)) {
        if (mine) drop(fd);
        return NULL;
    }
    if (what == DEAD || !mine) {
        static _Atomic bool said;
        if (!atomic_exchange(&said, true))
            lab_say("a device that was open before fork() is the parent's: the child must open it itself");
        *error = EIO;
        return NULL;
    }
    return opened[fd].context;
}

/* ------------------------------------------------------------------------------------------------------------- open */

static const char folder[] = "/dev/infiniband/uverbs";

/* The device of a path; NULL: it is none of ours. */
static lab_device *device_at(const char *path) {
    if (!path || strncmp(path, folder, sizeof folder - 1)) return NULL;
    uint32_t n, index = 0;
    lab_device *devices = lab_devices(&n);
    const char *at = path + sizeof folder - 1;
    if (!*at || strlen(at) > 3) return NULL;
    for (; *at; at++) {
        if (*at < '0' || *at > '9') return NULL;
        index = index * 10 + (uint32_t)(*at - '0');
    }
    return index < n ? &devices[index] : NULL;
}

static int open_device(lab_device *device, int flags) {
    struct guard g;
    struct stat about;
    int fd = memfd_create(device->name, MFD_ALLOW_SEALING | (flags & O_CLOEXEC ? MFD_CLOEXEC : 0));
    if (fd < 0) return -1;
    /* A process that gets it by other ways, without us, finds that nothing can be written or mapped. */
    if (real_fcntl()(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) ||
        raw_fstat(fd, &about) || fd >= (int)LAB_MAX_FDS) {
        const int error = fd >= (int)LAB_MAX_FDS ? EMFILE : errno;
        real_close()(fd);
        errno = error;
        return -1;
    }
    enter(&g);
    if (atomic_load(&kind[fd]) == DEVICE) drop(fd);
    lab_context *context = lab_context_new(device, fd);
    if (context) put(fd, DEVICE, &(struct device_fd){context, about.st_dev, about.st_ino});
    leave(&g);
    if (context) return fd;
    real_close()(fd);
    errno = ENOMEM;
    return -1;
}

static bool has_mode(int flags) {
    return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE;
}

#define OPEN_(name, parameters, next_call)                                                                             \
    EXPORT int name parameters {                                                                                       \
        mode_t mode = 0;                                                                                               \
        if (has_mode(flags)) {                                                                                         \
            va_list list;                                                                                              \
            va_start(list, flags);                                                                                     \
            mode = va_arg(list, mode_t);                                                                               \
            va_end(list);                                                                                              \
        }                                                                                                              \
        lab_device *device = device_at(path);                                                                          \
        return device ? open_device(device, flags) : next_call;                                                        \
    }
OPEN_(open, (const char *path, int flags, ...), real_open()(path, flags, mode))
OPEN_(open64, (const char *path, int flags, ...), real_open()(path, flags | O_LARGEFILE, mode))
OPEN_(openat, (int at, const char *path, int flags, ...), real_openat()(at, path, flags, mode))
OPEN_(openat64, (int at, const char *path, int flags, ...), real_openat()(at, path, flags | O_LARGEFILE, mode))
#undef OPEN_

/* What a compiler makes of open() with _FORTIFY_SOURCE. */
int __open_2(const char *path, int flags);
int __open64_2(const char *path, int flags);
int __openat_2(int at, const char *path, int flags);
int __openat64_2(int at, const char *path, int flags);
EXPORT int __open_2(const char *path, int flags) {
    if (has_mode(flags)) abort();
    return open(path, flags);
}
EXPORT int __open64_2(const char *path, int flags) {
    if (has_mode(flags)) abort();
    return open64(path, flags);
}
EXPORT int __openat_2(int at, const char *path, int flags) {
    if (has_mode(flags)) abort();
    return openat(at, path, flags);
}
EXPORT int __openat64_2(int at, const char *path, int flags) {
    if (has_mode(flags)) abort();
    return openat64(at, path, flags);
}

EXPORT int access(const char *path, int mode) {
    return device_at(path) ? 0 : real_access()(path, mode);
}

EXPORT int faccessat(int at, const char *path, int mode, int flags) {
    return device_at(path) ? 0 : real_faccessat()(at, path, mode, flags);
}

/* ------------------------------------------------------------------------------------------------------------- stat */

static void fill_stat(const lab_device *device, struct stat *about) {
    *about = (struct stat){.st_mode = S_IFCHR | 0666,
                           .st_nlink = 1,
                           .st_ino = 1 + device->index,
                           .st_uid = getuid(),
                           .st_gid = getgid(),
                           .st_blksize = 4096,
                           .st_rdev = makedev(LAB_DEVICE_MAJOR, LAB_DEVICE_MINOR + device->index)};
}

static const lab_device *device_of_fd(int fd) {
    if (!ours(fd) || !still(fd)) return NULL;
    const lab_context *context = opened[fd].context;
    return context ? context->device : NULL;
}

/* On machines of 64 bits both sizes of files are one struct, and the kernel fills it in as it is. */
_Static_assert(sizeof(long) == 8, "the lab runs on machines of 64 bits");

static int stat_at(int at, const char *path, struct stat *about, int flags) {
    const lab_device *device = device_at(path);
    if (!device && flags & AT_EMPTY_PATH && path && !*path) device = device_of_fd(at);
    if (!device) return (int)syscall(SYS_newfstatat, at, path, about, flags);
    fill_stat(device, about);
    return 0;
}

static int stat_fd(int fd, struct stat *about) {
    const lab_device *device = device_of_fd(fd);
    if (!device) return raw_fstat(fd, about);
    fill_stat(device, about);
    return 0;
}

/* Older programs call these; they are in no header any more. */
int __xstat(int version, const char *path, struct stat *about);
int __lxstat(int version, const char *path, struct stat *about);
int __fxstat(int version, int fd, struct stat *about);
int __xstat64(int version, const char *path, struct stat64 *about);
int __lxstat64(int version, const char *path, struct stat64 *about);
int __fxstat64(int version, int fd, struct stat64 *about);

#define STATS_(suffix, type)                                                                                           \
    EXPORT int stat##suffix(const char *path, type *about) {                                                           \
        return stat_at(AT_FDCWD, path, (struct stat *)about, 0);                                                       \
    }                                                                                                                  \
    EXPORT int lstat##suffix(const char *path, type *about) {                                                          \
        return stat_at(AT_FDCWD, path, (struct stat *)about, AT_SYMLINK_NOFOLLOW);                                     \
    }                                                                                                                  \
    EXPORT int fstat##suffix(int fd, type *about) {                                                                    \
        return stat_fd(fd, (struct stat *)about);                                                                      \
    }                                                                                                                  \
    EXPORT int fstatat##suffix(int at, const char *path, type *about, int flags) {                                     \
        return stat_at(at, path, (struct stat *)about, flags);                                                         \
    }                                                                                                                  \
    EXPORT int __xstat##suffix(int version, const char *path, type *about) {                                           \
        (void)version;                                                                                                 \
        return stat_at(AT_FDCWD, path, (struct stat *)about, 0);                                                       \
    }                                                                                                                  \
    EXPORT int __lxstat##suffix(int version, const char *path, type *about) {                                          \
        (void)version;                                                                                                 \
        return stat_at(AT_FDCWD, path, (struct stat *)about, AT_SYMLINK_NOFOLLOW);                                     \
    }                                                                                                                  \
    EXPORT int __fxstat##suffix(int version, int fd, type *about) {                                                    \
        (void)version;                                                                                                 \
        return stat_fd(fd, (struct stat *)about);                                                                      \
    }
STATS_(, struct stat)
STATS_(64, struct stat64)
#undef STATS_

/* ------------------------------------------------------------------------------------------------- write, ioctl, mmap
 */

EXPORT ssize_t write(int fd, const void *bytes, size_t n) {
    if (!ours(fd)) return real_write()(fd, bytes, n);
    struct guard g;
    int error;
    ssize_t result = 0;
    enter(&g);
    lab_context *context = context_for(fd, &error);
    if (context) result = lab_uverbs_write(context, bytes, n);
    leave(&g);
    if (!context && !error) return real_write()(fd, bytes, n);
    if (error) result = -error;
    if (result >= 0) return result;
    errno = (int)-result;
    return -1;
}

EXPORT int ioctl(int fd, unsigned long request, ...) {
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);
    /* Others than a driver's own are the kernel's for every descriptor (FIOCLEX, FIONBIO). */
    if (!ours(fd) || _IOC_TYPE(request) != 0x1b) return real_ioctl()(fd, request, argument);
    struct guard g;
    int error, result = 0;
    enter(&g);
    lab_context *context = context_for(fd, &error);
    if (context) result = lab_uverbs_ioctl(context, request, argument);
    leave(&g);
    if (!context && !error) return real_ioctl()(fd, request, argument);
    if (error) result = -error;
    if (result >= 0) return result;
    errno = -result;
    return -1;
}

static void *map_device(lab_context *context, void *at, size_t bytes, int protection, int flags, off_t offset) {
    void *address = NULL;
    int error;
    if (flags & MAP_FIXED && at)
        error = lab_unsupported("mmap() of a device at an address that the program chooses");
    else if (!context->device->model->map)
        error = lab_unsupported("mmap() of a device of nic=%s", context->device->model->name);
    else
        error = context->device->model->map(context, (uint64_t)offset, bytes, protection, &address);
    if (!error) return address;
    errno = error;
    return MAP_FAILED;
}

EXPORT void *mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    if (flags & MAP_ANONYMOUS || !ours(fd)) return real_mmap()(at, bytes, protection, flags, fd, offset);
    struct guard g;
    int error;
    void *address = MAP_FAILED;
    enter(&g);
    lab_context *context = context_for(fd, &error);
    if (context) address = map_device(context, at, bytes, protection, flags, offset);
    leave(&g);
    if (!context && !error) return real_mmap()(at, bytes, protection, flags, fd, offset);
    if (error) errno = error;
    return address;
}

EXPORT void *mmap64(void *at, size_t bytes, int protection, int flags, int fd, off64_t offset) {
    return mmap(at, bytes, protection, flags, fd, offset);
}

EXPORT int munmap(void *at, size_t bytes) {
    if (lab_trapping()) lab_trap_unmapped((uintptr_t)at, bytes);
    return real_munmap()(at, bytes);
}

/* ------------------------------------------------------------------------------------------------------ close and dup
 */

/* Before the number is free to be given again. */
static void forget(int fd) {
    struct guard g;
    if (atomic_load(&owner) != process()) return; /* a vfork() child: its table is the parent's */
    enter(&g);
    if (atomic_load(&kind[fd]) != OTHER) drop(fd);
    leave(&g);
}

EXPORT int close(int fd) {
    if (lab_netlink_close) lab_netlink_close(fd);
    if (ours(fd)) forget(fd);
    return real_close()(fd);
}

/* The copy is the same context, or as dead. */
static int copied(int fd, int copy) {
    struct guard g;
    if (copy < 0 || copy == fd) return copy;
    if (ours(copy)) forget(copy); /* what it was is closed by now */
    if (!ours(fd)) return copy;
    if (copy >= (int)LAB_MAX_FDS) {
        real_close()(copy);
        errno = EMFILE;
        return -1;
    }
    enter(&g);
    if (ours(fd) && still(fd)) put(copy, (enum kind)atomic_load(&kind[fd]), &opened[fd]);
    leave(&g);
    return copy;
}

EXPORT int dup(int fd) {
    return copied(fd, real_dup()(fd));
}

EXPORT int dup2(int fd, int copy) {
    return copied(fd, real_dup2()(fd, copy));
}

EXPORT int dup3(int fd, int copy, int flags) {
    return copied(fd, real_dup3()(fd, copy, flags));
}

EXPORT int fcntl(int fd, int command, ...) {
    va_list list;
    va_start(list, command);
    void *argument = va_arg(list, void *);
    va_end(list);
    const int result = real_fcntl()(fd, command, argument);
    return command == F_DUPFD || command == F_DUPFD_CLOEXEC ? copied(fd, result) : result;
}

int fcntl64(int fd, int command, ...);
EXPORT int fcntl64(int fd, int command, ...) {
    va_list list;
    va_start(list, command);
    void *argument = va_arg(list, void *);
    va_end(list);
    return fcntl(fd, command, argument);
}

/* -------------------------------------------------------------------------------------------------- SIGSEGV is shared
 */

/* A store to a doorbell may come at any time, from any thread, also one that blocks all signals: where SIGSEGV is
 * blocked, the kernel ends the process. */
static const sigset_t *without_faults(const sigset_t *wanted, sigset_t *room) {
    uint32_t n;
    if (!wanted || !sigismember(wanted, SIGSEGV) || !lab_devices(&n)) return wanted;
    *room = *wanted;
    sigdelset(room, SIGSEGV);
    return room;
}

EXPORT int pthread_sigmask(int how, const sigset_t *wanted, sigset_t *old) {
    sigset_t room;
    return real_pthread_sigmask()(how, how == SIG_UNBLOCK ? wanted : without_faults(wanted, &room), old);
}

EXPORT int sigprocmask(int how, const sigset_t *wanted, sigset_t *old) {
    sigset_t room;
    return real_sigprocmask()(how, how == SIG_UNBLOCK ? wanted : without_faults(wanted, &room), old);
}

EXPORT int sigaction(int number, const struct sigaction *action, struct sigaction *old) {
    if (number == SIGSEGV && lab_trapping()) {
        lab_trap_chain(action, old);
        return 0;
    }
    if (!action) return real_sigaction()(number, NULL, old);
    sigset_t room;
    struct sigaction mild = *action;
    mild.sa_mask = *without_faults(&action->sa_mask, &room);
    return real_sigaction()(number, &mild, old);
}

EXPORT void (*signal(int number, void (*handler)(int)))(int) {
    if (number != SIGSEGV || !lab_trapping()) return real_signal()(number, handler);
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART}, old;
    sigemptyset(&action.sa_mask);
    lab_trap_chain(&action, &old);
    return old.sa_handler;
}

/* -------------------------------------------------------------------------------------------------------------- fork
 */

static void in_child(void) {
    uint32_t n;
    lab_device *devices = lab_devices(&n);
    atomic_store(&owner, process());
    for (uint32_t fd = 0; fd < fds_top; fd++) {
        if (atomic_load_explicit(&kind[fd], memory_order_relaxed) == OTHER) continue;
        opened[fd].context = NULL;
        atomic_store(&kind[fd], DEAD);
    }
    for (uint32_t i = 0; i < n; i++) devices[i].nic = NULL;
    lab_objects_forget();
    lab_channels_forget();
    lab_traps_forget();
    /* Another thread of the parent's may have held it; what it was doing is forgotten with the rest. */
    pthread_mutex_init(&lab_lock, NULL);
}

__attribute__((constructor)) static void begin(void) {
    uint32_t n;
    if (!lab_devices(&n)) return;
    atomic_store(&owner, process());
    /* What may be called in a signal handler is looked up here. */
    real_open(), real_openat(), real_write(), real_ioctl(), real_mmap(), real_munmap(), real_close();
    real_dup(), real_dup2(), real_dup3(), real_fcntl(), real_access(), real_faccessat(), real_sigaction(),
        real_signal(), real_sigprocmask(), real_pthread_sigmask();
    /* Blocked by whoever started the program. */
    sigset_t faults;
    sigemptyset(&faults);
    sigaddset(&faults, SIGSEGV);
    pthread_sigmask(SIG_UNBLOCK, &faults, NULL);
    pthread_atfork(NULL, NULL, in_child);
}
