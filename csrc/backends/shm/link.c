/* SPDX-License-Identifier: Apache-2.0
 *
 * Links: one connection between two devices, made by the lower rank.
 *
 *   caller    DIAL -> GREET (hello) -> AWAIT ----------------------------> UP
 *   listener  LISTEN or HEARD, whichever of address and hello came first -> GREET (welcome) -> UP
 *
 * Hello and welcome prove with the receiver's token that the sender has read the receiver's address, and carry the
 * descriptors of the sender's regions, which are mapped and closed at once. After that a link is silent: a goodbye
 * tells an orderly end, its end without one, or the end of the process (pidfd), a death. The pidfd is needed because a
 * forked child of the dead holds copies of its sockets open.
 *
 * Packets (SOCK_SEQPACKET) come whole or not at all, so there is no half a frame to wait for. Who connects and is not
 * of our uid, says nothing, or has no proof is a stranger: dropped, or kept among a bounded number of guests until it
 * speaks.
 */
#include "shm.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#define SHM_TAG_DOOR UINT32_MAX /* the listener and its guests; other tags are ranks */
#define SHM_DIALS 16u           /* a full guest list may drop us; more often, and it is something else */
#define SHM_LOOK_INTERVAL_NS 100000000u
#define SHM_LOOK_GAP_NS 2000000u /* of all links: many ranks are not to spend their time looking at each other */

static uint32_t shm_state(const shm_link *link) {
    return atomic_load_explicit(&link->state, memory_order_relaxed);
}
static void shm_set_state(shm_link *link, shm_link_state state) {
    atomic_store_explicit(&link->state, (uint32_t)state, memory_order_release);
}

/* ------------------------------------------------------------------------------------------------------ descriptors */

static int shm_watch(const uccl_ep_device *device, int fd, uint32_t tag) {
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = tag};
    if (epoll_ctl(device->epoll, EPOLL_CTL_ADD, fd, &event) == 0) return 0;
    if (errno == EEXIST && epoll_ctl(device->epoll, EPOLL_CTL_MOD, fd, &event) == 0) return 0;
    return errno;
}

/* close() alone does not end the watch while a forked child holds a copy. In such a child the watch is the parent's:
 * let be. */
static void shm_unwatch(const uccl_ep_device *device, int *fd) {
    if (*fd < 0) return;
    if (device->epoll >= 0 && device->pid == getpid()) (void)epoll_ctl(device->epoll, EPOLL_CTL_DEL, *fd, NULL);
    close(*fd);
    *fd = -1;
}

static void shm_close_all(const int *fds, unsigned n) {
    for (unsigned i = 0; i < n; i++) close(fds[i]);
}

static socklen_t shm_socket_name(const uint8_t name[SHM_ID_BYTES], struct sockaddr_un *out) {
    static const char prefix[] = "uccl_ep-";
    memset(out, 0, sizeof *out);
    out->sun_family = AF_UNIX;
    char *text = out->sun_path + 1; /* abstract: the first byte is zero */
    memcpy(text, prefix, sizeof prefix - 1);
    text += sizeof prefix - 1;
    for (unsigned i = 0; i < SHM_ID_BYTES; i++) {
        *text++ = "0123456789abcdef"[name[i] >> 4];
        *text++ = "0123456789abcdef"[name[i] & 15];
    }
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + (size_t)(text - out->sun_path));
}

static bool shm_same_user(int fd, pid_t *pid) {
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0 || peer.uid != geteuid()) return false;
    *pid = peer.pid;
    return true;
}

/* ---------------------------------------------------------------------------------------------------------- packets */

typedef enum shm_received { SHM_NOTHING, SHM_MESSAGE, SHM_END, SHM_JUNK, SHM_NO_ROOM, SHM_ERROR } shm_received;

/* One packet; *n descriptors are the caller's if it is a MESSAGE. With ERROR errno says which. */
static shm_received shm_receive(int fd, shm_message *message, int fds[UCCL_EP_REGIONS], unsigned *n) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(UCCL_EP_REGIONS * sizeof(int))];
    } control;
    struct iovec part = {.iov_base = message, .iov_len = sizeof *message};
    struct msghdr header;
    ssize_t got;
    /* A peer that closed with something unread gives one ECONNRESET before what it still had to say. */
    for (int resets = 0;;) {
        /* LEN and not SPACE: the kernel would fill the padding with one descriptor more. */
        header = (struct msghdr){.msg_iov = &part,
                                 .msg_iovlen = 1,
                                 .msg_control = &control,
                                 .msg_controllen = CMSG_LEN(UCCL_EP_REGIONS * sizeof(int))};
        got = recvmsg(fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (got >= 0 || (errno != EINTR && !(errno == ECONNRESET && resets++ == 0))) break;
    }
    *n = 0;
    if (got < 0) { /* short of memory, we are told again that there is something to read */
        if (errno == EAGAIN || errno == ENOMEM || errno == ENOBUFS) return SHM_NOTHING;
        return errno == ECONNRESET ? SHM_END : SHM_ERROR;
    }
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
        *n = (unsigned)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(fds, CMSG_DATA(c), *n * sizeof(int));
    }
    shm_received what = SHM_MESSAGE;
    if (got == 0)
        what = SHM_END;
    else if ((header.msg_flags & MSG_CTRUNC) && *n < UCCL_EP_REGIONS)
        what = SHM_NO_ROOM; /* to install them; with all of ours taken, somebody sent more than belong here */
    else if ((header.msg_flags & MSG_CTRUNC) || (header.msg_flags & MSG_TRUNC) || got != sizeof *message ||
             message->magic != SHM_MESSAGE_MAGIC || message->version != SHM_VERSION)
        what = SHM_JUNK;
    if (what != SHM_MESSAGE) {
        shm_close_all(fds, *n);
        *n = 0;
    }
    message->text[sizeof message->text - 1] = 0;
    return what;
}

static shm_message shm_message_of(const uccl_ep_device *device, shm_message_kind kind) {
    shm_message message = {
        .magic = SHM_MESSAGE_MAGIC, .version = SHM_VERSION, .kind = (uint16_t)kind, .rank = device->rank};
    memcpy(message.name, device->address.name, sizeof message.name);
    return message;
}

/* 0 or an errno. */
static int shm_send(int fd, const shm_message *message, const int *fds, unsigned n) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(UCCL_EP_REGIONS * sizeof(int))];
    } control;
    struct iovec part = {.iov_base = (void *)(uintptr_t)message, .iov_len = sizeof *message};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    if (n) {
        memset(&control, 0, sizeof control);
        header.msg_control = &control;
        header.msg_controllen = CMSG_SPACE(n * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&header);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(n * sizeof(int));
        memcpy(CMSG_DATA(c), fds, n * sizeof(int));
    }
    for (;;) {
        if (sendmsg(fd, &header, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) return 0;
        if (errno != EINTR) return errno;
    }
}

/* ------------------------------------------------------------------------------------------------------ link's life */

static shm_link *shm_link_new(uint32_t peer, const uint8_t name[SHM_ID_BYTES], shm_link_state state) {
    shm_link *link = calloc(1, sizeof *link);
    if (!link) return NULL;
    atomic_init(&link->state, (uint32_t)state);
    link->peer = peer;
    link->fd = link->pidfd = -1;
    memcpy(link->name, name, sizeof link->name);
    return link;
}

static void shm_hang_up(const uccl_ep_device *device, shm_link *link) {
    shm_unwatch(device, &link->fd);
    shm_unwatch(device, &link->pidfd);
}

static void shm_link_free(const uccl_ep_device *device, shm_link *link) {
    if (!link) return;
    shm_hang_up(device, link);
    bool mapped_here = device->pid == getpid(); /* MADV_DONTFORK */
    for (unsigned i = 0; i < UCCL_EP_REGIONS && mapped_here; i++) shm_target_close(device, &link->targets[i]);
    free(link);
}

/* The link is over. The end of one that was in use is an event. */
__attribute__((format(printf, 5, 6))) static void shm_lose(uccl_ep_device *device, shm_link *link,
                                                           uccl_ep_status status, int error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(link->text, sizeof link->text, format, arguments);
    va_end(arguments);
    link->status = status;
    link->vendor_code = error;
    shm_hang_up(device, link);
    shm_set_state(link, SHM_LINK_LOST);
    if (link->was_up) atomic_fetch_add_explicit(&device->ends, 1, memory_order_release);
}

static void shm_depart(uccl_ep_device *device, shm_link *link) {
    snprintf(link->text, sizeof link->text, "rank %u has closed its communicator", link->peer);
    link->status = UCCL_EP_E_PEER_LOST;
    shm_hang_up(device, link);
    shm_set_state(link, SHM_LINK_DEPARTED);
    if (link->was_up) atomic_fetch_add_explicit(&device->ends, 1, memory_order_release);
}

static void shm_up(uccl_ep_device *device, shm_link *link) {
    if (link->pid > 0 && link->pid != device->pid) {
        link->pidfd = (int)syscall(SYS_pidfd_open, link->pid, 0);
        if (link->pidfd >= 0 && shm_watch(device, link->pidfd, link->peer) != 0) shm_unwatch(device, &link->pidfd);
        if (link->pidfd < 0) device->unwatched = true; /* not in this kernel or sandbox */
    }
    link->was_up = true;
    shm_set_state(link, SHM_LINK_UP);
}

/* The connection ended, and no goodbye came. */
static void shm_ended(uccl_ep_device *device, shm_link *link) {
    uint32_t state = shm_state(link);
    if (link->caller && (state == SHM_LINK_GREET || state == SHM_LINK_AWAIT)) {
        shm_hang_up(device, link);
        if (++link->tries < SHM_DIALS) {
            shm_set_state(link, SHM_LINK_DIAL); /* if it has died, dialling finds out */
        } else {
            shm_lose(device, link, UCCL_EP_E_BOOTSTRAP, ECONNRESET,
                     "rank %u closes every connection before it answers: is it one of this job?", link->peer);
        }
        return;
    }
    shm_lose(device, link, UCCL_EP_E_PEER_LOST, 0, "rank %u (process %d) died: its connection ended without a goodbye",
             link->peer, (int)link->pid);
}

/* Host memory travels as a descriptor; device memory is opened when it is imported. */
static bool shm_has_file(const shm_region_record *record) {
    return record->id != 0 && record->kind == UCCL_EP_MEMORY_HOST;
}

/* Map the memory that a hello or welcome carries. Takes the descriptors. */
static uccl_ep_status shm_take_memory(shm_link *link, const shm_message *message, int *fds, unsigned n, int *error,
                                      char *text, size_t room) {
    unsigned used = 0;
    uccl_ep_status status = UCCL_EP_OK;
    *error = 0;
    for (unsigned i = 0; i < UCCL_EP_REGIONS && status == UCCL_EP_OK; i++) {
        link->records[i] = message->regions[i];
        if (i != UCCL_EP_REGION_HEAP && link->records[i].id && !shm_has_file(&link->records[i])) {
            snprintf(text, room, "a region that has to be host memory is none");
            status = UCCL_EP_E_REGISTRATION;
        }
        if (status != UCCL_EP_OK || !shm_has_file(&link->records[i])) continue;
        if (used == n) break;
        status = shm_map_target(&link->records[i], fds[used++], &link->targets[i], error, text, room);
    }
    unsigned said = 0;
    for (unsigned i = 0; i < UCCL_EP_REGIONS; i++) said += shm_has_file(&message->regions[i]);
    if (status == UCCL_EP_OK && said != n) {
        snprintf(text, room, "%u regions came with %u descriptors", said, n);
        status = UCCL_EP_E_REGISTRATION;
    }
    shm_close_all(fds, n);
    return status;
}

static void shm_refuse(uccl_ep_device *device, shm_link *link, uccl_ep_status status, int error, const char *text) {
    shm_message reject = shm_message_of(device, SHM_REJECT);
    reject.status = status;
    snprintf(reject.text, sizeof reject.text, "%s", text);
    (void)shm_send(link->fd, &reject, NULL, 0);
    shm_lose(device, link, status, error, "memory of rank %u cannot be mapped: %s", link->peer, text);
}

static void shm_handle(uccl_ep_device *device, shm_link *link, const shm_message *message, int *fds, unsigned n) {
    if (n && message->kind != SHM_WELCOME) {
        shm_close_all(fds, n);
        n = 0;
    }
    uint32_t state = shm_state(link);
    if (message->kind == SHM_GOODBYE) {
        shm_depart(device, link);
    } else if (message->kind == SHM_REJECT && state == SHM_LINK_AWAIT) {
        bool known = message->status <= UCCL_EP_E_INVALID && message->status >= UCCL_EP_E_UNSUPPORTED;
        uccl_ep_status status = known ? (uccl_ep_status)message->status : UCCL_EP_E_BOOTSTRAP;
        shm_lose(device, link, status, 0, "rank %u cannot map our memory: %s", link->peer, message->text);
    } else if (message->kind == SHM_WELCOME && state == SHM_LINK_AWAIT && message->rank == link->peer &&
               memcmp(message->name, link->name, SHM_ID_BYTES) == 0 &&
               memcmp(message->proof, device->address.token, SHM_ID_BYTES) == 0) {
        char text[112];
        int error;
        uccl_ep_status status = shm_take_memory(link, message, fds, n, &error, text, sizeof text);
        if (status == UCCL_EP_OK)
            shm_up(device, link);
        else
            shm_lose(device, link, status, error, "memory of rank %u cannot be mapped: %s", link->peer, text);
    } else {
        shm_close_all(fds, n);
        shm_lose(device, link, UCCL_EP_E_BOOTSTRAP, 0,
                 "rank %u sent what does not belong here: do all ranks run one version?", link->peer);
    }
}

static void shm_drain(uccl_ep_device *device, shm_link *link) {
    while (link->fd >= 0) {
        shm_message message;
        int fds[UCCL_EP_REGIONS];
        unsigned n;
        switch (shm_receive(link->fd, &message, fds, &n)) {
        case SHM_NOTHING:
            return;
        case SHM_MESSAGE:
            shm_handle(device, link, &message, fds, n);
            break;
        case SHM_END:
            shm_ended(device, link);
            return;
        case SHM_NO_ROOM:
            shm_lose(device, link, UCCL_EP_E_SYSTEM, EMFILE,
                     "no descriptor left for the memory of rank %u: raise ulimit -n", link->peer);
            return;
        case SHM_ERROR:
            shm_lose(device, link, UCCL_EP_E_SYSTEM, errno, "recvmsg from rank %u: %s", link->peer, strerror(errno));
            return;
        case SHM_JUNK:
            shm_lose(device, link, UCCL_EP_E_BOOTSTRAP, 0,
                     "rank %u sent no message of uccl_ep: do all ranks run one version?", link->peer);
            return;
        }
    }
}

/* Something happened to this peer, or may have. A goodbye counts before the end of the process behind it. */
static void shm_service(uccl_ep_device *device, shm_link *link) {
    if (!link) return;
    shm_drain(device, link);
    struct pollfd process = {.fd = link->pidfd, .events = POLLIN};
    if (link->pidfd >= 0 && poll(&process, 1, 0) == 1 && process.revents) {
        shm_drain(device, link); /* what it said between our look at the socket and its end */
        if (link->pidfd < 0) return;
        shm_lose(device, link, UCCL_EP_E_PEER_LOST, 0, "rank %u died: its process %d ended", link->peer,
                 (int)link->pid);
    }
}

/* --------------------------------------------------------------------------------------------------------- the door */

static void shm_stranger(uccl_ep_device *device) {
    if (device->stranger_seen) return;
    device->stranger_seen = true;
    shm_log(device->host, UCCL_EP_LOG_INFO, "shm: dropped a connection that is not of this job (told once)");
}

/* The address of the peer that said hello has come too: answer. */
static void shm_promote(const uccl_ep_device *device, shm_slot *slot, const uint8_t token[SHM_ID_BYTES]) {
    shm_link *link = slot->heard;
    memcpy(link->token, token, sizeof link->token);
    if (shm_state(link) == SHM_LINK_HEARD) shm_set_state(link, SHM_LINK_GREET);
    shm_link_free(device, slot->current);
    slot->current = link;
    slot->heard = NULL;
}

/* Takes the descriptors. True: the connection now is a link's. */
static bool shm_hello(uccl_ep_device *device, int fd, const shm_message *message, int *fds, unsigned n) {
    pid_t pid = 0;
    shm_link *link = NULL;
    if (message->kind == SHM_HELLO && message->rank < device->rank &&
        memcmp(message->proof, device->address.token, SHM_ID_BYTES) == 0 && shm_same_user(fd, &pid))
        link = shm_link_new(message->rank, message->name, SHM_LINK_HEARD);
    if (!link) {
        shm_close_all(fds, n);
        return false;
    }
    link->fd = fd;
    link->pid = pid;
    char text[112];
    int error;
    uccl_ep_status status = shm_take_memory(link, message, fds, n, &error, text, sizeof text);
    if (status != UCCL_EP_OK) {
        shm_refuse(device, link, status, error, text);
    } else if ((error = shm_watch(device, fd, link->peer)) != 0) {
        shm_lose(device, link, UCCL_EP_E_SYSTEM, error, "epoll_ctl: %s (fs.epoll.max_user_watches?)", strerror(error));
    }
    shm_slot *slot = &device->slots[link->peer];
    shm_link_free(device, slot->heard);
    slot->heard = link;
    shm_link *current = slot->current;
    if (current && shm_state(current) == SHM_LINK_LISTEN && memcmp(current->name, link->name, SHM_ID_BYTES) == 0) {
        uint8_t token[SHM_ID_BYTES];
        memcpy(token, current->token, sizeof token);
        shm_promote(device, slot, token);
    }
    return true;
}

/* Who comes in, and what the guests say. */
static void shm_door(uccl_ep_device *device) {
    device->door_error = 0;
    for (uint32_t i = 0; i < device->peers; i++) { /* one each would do: strangers get no more of our time than peers */
        int fd = accept4(device->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE) device->door_error = errno;
            break;
        }
        pid_t pid;
        if (!shm_same_user(fd, &pid) || shm_watch(device, fd, SHM_TAG_DOOR) != 0) {
            shm_stranger(device);
            close(fd);
            continue;
        }
        if (device->n_guests == SHM_MAX_GUESTS) {
            shm_stranger(device);
            shm_unwatch(device, &device->guests[0]);
            memmove(device->guests, device->guests + 1, (SHM_MAX_GUESTS - 1) * sizeof device->guests[0]);
            device->n_guests--;
        }
        device->guests[device->n_guests++] = fd;
    }
    uint32_t kept = 0;
    for (uint32_t i = 0; i < device->n_guests; i++) {
        shm_message message;
        int fds[UCCL_EP_REGIONS], fd = device->guests[i];
        unsigned n;
        shm_received what = shm_receive(fd, &message, fds, &n);
        if (what == SHM_NOTHING) {
            device->guests[kept++] = fd;
        } else if (what == SHM_NO_ROOM) {
            device->door_error = EMFILE;
            shm_unwatch(device, &fd);
        } else if (what == SHM_END) { /* somebody who looked whether we are here */
            shm_unwatch(device, &fd);
        } else if (what != SHM_MESSAGE || !shm_hello(device, fd, &message, fds, n)) {
            shm_stranger(device);
            shm_unwatch(device, &fd);
        }
    }
    device->n_guests = kept;
}

/* Whether all threads of a process have ended. A zombie, not yet waited for by its parent, can still be signalled. */
static bool shm_process_ended(pid_t pid) {
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return kill(pid, 0) != 0 && errno == ESRCH;
    ssize_t bytes = read(fd, text, sizeof text - 1);
    close(fd);
    text[bytes > 0 ? bytes : 0] = 0;
    /* "pid (name) state ..." with any bytes in the name; state is field 3 and the number of threads field 20. */
    const char *at = strrchr(text, ')');
    char state;
    long threads;
    return at &&
           sscanf(at + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %ld", &state,
                  &threads) == 2 &&
           (state == 'Z' || state == 'X') && threads <= 1;
}

/* Where the kernel or a sandbox gives no pidfd. */
static void shm_look_for_dead(uccl_ep_device *device) {
    uint64_t now = device->host->now_ns(device->host->context);
    if (now - device->last_look_ns < SHM_LOOK_INTERVAL_NS) return;
    device->last_look_ns = now;
    for (uint32_t i = 0; i < device->peers; i++) {
        shm_link *link = device->slots[i].current;
        if (!link || shm_state(link) != SHM_LINK_UP || link->pidfd >= 0) continue;
        if (link->pid <= 0 || link->pid == device->pid || !shm_process_ended(link->pid)) continue;
        shm_drain(device, link);
        if (shm_state(link) == SHM_LINK_UP)
            shm_lose(device, link, UCCL_EP_E_PEER_LOST, 0, "rank %u died: its process %d ended", i, (int)link->pid);
    }
}

void shm_links_pump(uccl_ep_device *device) {
    if (device->epoll < 0) return;
    struct epoll_event events[64];
    int n = epoll_wait(device->epoll, events, 64, 0); /* level triggered: what is left comes next time */
    bool door = false;
    for (int i = 0; i < n; i++) {
        uint32_t tag = events[i].data.u32;
        if (tag == SHM_TAG_DOOR) {
            door = true;
        } else {
            shm_service(device, device->slots[tag].current);
            shm_service(device, device->slots[tag].heard);
        }
    }
    if (door) shm_door(device);
    if (device->unwatched) shm_look_for_dead(device);
}

/* ------------------------------------------------------------------------------------------------------------ calls */

uccl_ep_status shm_links_open(uccl_ep_device *device, uint32_t rank, uint32_t peers) {
    const uccl_ep_host *host = device->host;
    /* A link is a socket and a pidfd; the rest is ours and a reserve for what the process opens. */
    uint64_t needed = 2u * (uint64_t)(peers - 1) + 16u, limit = shm_soft_limit(RLIMIT_NOFILE);
    if (peers > 1 && needed > limit) {
        return shm_fail(host, UCCL_EP_E_SYSTEM, EMFILE,
                        "%u ranks on a machine need %llu descriptors each and the limit is %llu: raise it (ulimit -n)",
                        peers, (unsigned long long)needed, (unsigned long long)limit);
    }
    device->slots = calloc(peers, sizeof *device->slots);
    if (!device->slots) return shm_fail(host, UCCL_EP_E_NO_MEMORY, ENOMEM, "no memory for %u links", peers);
    device->rank = rank;
    device->peers = peers;
    atomic_store_explicit(&device->self.state, SHM_LINK_UP, memory_order_release);
    device->self.peer = rank;
    if (peers == 1) return UCCL_EP_OK; /* nobody will call */

    struct sockaddr_un name;
    socklen_t bytes = shm_socket_name(device->address.name, &name);
    const char *call = "epoll_create1";
    int error = 0;
    device->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (device->epoll >= 0) {
        call = "socket";
        device->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    }
    if (device->listener >= 0) {
        call = "bind";
        if (bind(device->listener, (struct sockaddr *)&name, bytes) == 0) {
            call = "listen";
            if (listen(device->listener, SOMAXCONN) == 0) {
                call = "epoll_ctl";
                error = shm_watch(device, device->listener, SHM_TAG_DOOR);
                if (error == 0) return UCCL_EP_OK;
            }
        }
    }
    if (error == 0) error = errno;
    shm_links_close(device);
    return shm_fail(host, UCCL_EP_E_SYSTEM, error, "%s for the links between ranks: %s%s", call, strerror(error),
                    error == EMFILE ? ": raise the limit of open files (ulimit -n)" : "");
}

void shm_links_close(uccl_ep_device *device) {
    bool ours = device->pid == getpid(); /* a forked child closes its copies and says nothing */
    for (uint32_t i = 0; i < device->peers; i++) {
        shm_link *links[2] = {device->slots[i].current, device->slots[i].heard};
        for (unsigned j = 0; j < 2; j++) {
            if (!links[j]) continue;
            if (ours && links[j]->fd >= 0) {
                shm_message goodbye = shm_message_of(device, SHM_GOODBYE);
                (void)shm_send(links[j]->fd, &goodbye, NULL, 0);
            }
            shm_link_free(device, links[j]);
        }
    }
    while (device->retired) {
        shm_link *link = device->retired;
        device->retired = link->next;
        shm_link_free(device, link);
    }
    for (uint32_t i = 0; i < device->n_guests; i++) shm_unwatch(device, &device->guests[i]);
    device->n_guests = 0;
    shm_unwatch(device, &device->listener);
    if (device->epoll >= 0) close(device->epoll);
    device->epoll = -1;
    free(device->slots);
    device->slots = NULL;
    device->peers = 0;
}

uccl_ep_status shm_link_start(uccl_ep_device *device, const shm_address *address) {
    const uccl_ep_host *host = device->host;
    shm_slot *slot = &device->slots[address->rank];
    shm_link *current = slot->current;
    if (current && memcmp(current->name, address->name, SHM_ID_BYTES) == 0) {
        uint32_t state = shm_state(current);
        if (state != SHM_LINK_LOST && state != SHM_LINK_DEPARTED) return UCCL_EP_OK;
        if (current->was_up) return shm_fail(host, UCCL_EP_E_PEER_LOST, current->vendor_code, "%s", current->text);
    }
    if (current) { /* another incarnation of the peer, or an attempt that failed */
        slot->current = NULL;
        if (current->was_up) { /* a submit may be looking at it */
            shm_hang_up(device, current);
            if (shm_state(current) == SHM_LINK_UP) {
                snprintf(current->text, sizeof current->text, "rank %u was replaced by a new process", current->peer);
                current->status = UCCL_EP_E_PEER_LOST;
                shm_set_state(current, SHM_LINK_LOST);
            }
            current->next = device->retired;
            device->retired = current;
        } else {
            shm_link_free(device, current);
        }
    }
    if (slot->heard && memcmp(slot->heard->name, address->name, SHM_ID_BYTES) == 0) {
        shm_promote(device, slot, address->token);
        return UCCL_EP_OK;
    }
    bool caller = device->rank < address->rank;
    slot->current = shm_link_new(address->rank, address->name, caller ? SHM_LINK_DIAL : SHM_LINK_LISTEN);
    if (!slot->current) return shm_fail(host, UCCL_EP_E_NO_MEMORY, ENOMEM, "no memory for a link");
    slot->current->caller = caller;
    memcpy(slot->current->token, address->token, sizeof address->token);
    return UCCL_EP_OK;
}

static void shm_dial(uccl_ep_device *device, shm_link *link) {
    struct sockaddr_un name;
    socklen_t bytes = shm_socket_name(link->name, &name);
    if (link->fd < 0) link->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int error = link->fd < 0 || connect(link->fd, (struct sockaddr *)&name, bytes) != 0 ? errno : 0;
    if (error == EAGAIN || error == EINTR) return; /* its door is crowded */
    if (error == EMFILE || error == ENFILE) {
        shm_lose(device, link, UCCL_EP_E_SYSTEM, error, "no descriptor left to connect to rank %u: raise ulimit -n",
                 link->peer);
    } else if (error == ECONNREFUSED) {
        shm_lose(device, link, UCCL_EP_E_PEER_LOST, error, "rank %u is gone: nobody listens at its address",
                 link->peer);
    } else if (error) {
        shm_lose(device, link, UCCL_EP_E_SYSTEM, error, "connect to rank %u: %s", link->peer, strerror(error));
    } else if (!shm_same_user(link->fd, &link->pid)) {
        shm_lose(device, link, UCCL_EP_E_BOOTSTRAP, EPERM,
                 "at the address of rank %u listens a process of another user", link->peer);
    } else if ((error = shm_watch(device, link->fd, link->peer)) != 0) {
        shm_lose(device, link, UCCL_EP_E_SYSTEM, error, "epoll_ctl: %s (fs.epoll.max_user_watches?)", strerror(error));
    } else {
        shm_set_state(link, SHM_LINK_GREET);
    }
}

static void shm_greet(uccl_ep_device *device, shm_link *link) {
    shm_message message = shm_message_of(device, link->caller ? SHM_HELLO : SHM_WELCOME);
    memcpy(message.proof, link->token, sizeof message.proof);
    int fds[UCCL_EP_REGIONS];
    unsigned n = 0;
    for (unsigned i = 0; i < UCCL_EP_REGIONS; i++) {
        message.regions[i] = device->regions[i].record;
        if (shm_has_file(&message.regions[i])) fds[n++] = device->regions[i].fd;
    }
    int error = shm_send(link->fd, &message, fds, n);
    /* Descriptors that nobody has received yet are counted for a user: others' receiving makes room. */
    if (error == EAGAIN || error == ENOBUFS || error == ETOOMANYREFS) return;
    if (error == EPIPE || error == ECONNRESET) {
        shm_drain(device, link); /* it may have said why */
        if (link->fd >= 0) shm_ended(device, link);
    } else if (error) {
        shm_lose(device, link, UCCL_EP_E_SYSTEM, error, "sending descriptors to rank %u: %s", link->peer,
                 strerror(error));
    } else if (link->caller) {
        shm_set_state(link, SHM_LINK_AWAIT);
    } else {
        shm_up(device, link);
    }
}

/* We wait for its call. Who has died or given up will make none: nobody listens at its address any more. */
static bool shm_gone_before_calling(uccl_ep_device *device, shm_link *link) {
    uint64_t now = device->host->now_ns(device->host->context);
    if (link->look_ns == 0) link->look_ns = now; /* most calls come at once */
    if (now - link->look_ns < SHM_LOOK_INTERVAL_NS || now - device->door_look_ns < SHM_LOOK_GAP_NS) return false;
    link->look_ns = device->door_look_ns = now;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return false;
    struct sockaddr_un name;
    socklen_t bytes = shm_socket_name(link->name, &name);
    bool gone = connect(fd, (struct sockaddr *)&name, bytes) != 0 && errno == ECONNREFUSED;
    close(fd);
    return gone;
}

uccl_ep_status shm_link_advance(uccl_ep_device *device, uint32_t peer) {
    shm_link *link = device->slots[peer].current;
    if (!link) return shm_fail(device->host, UCCL_EP_E_INVALID, 0, "rank %u: poll without connect", peer);
    if (shm_state(link) == SHM_LINK_DIAL) shm_dial(device, link);
    if (shm_state(link) == SHM_LINK_GREET) shm_greet(device, link);
    if (shm_state(link) == SHM_LINK_LISTEN && shm_gone_before_calling(device, link))
        shm_lose(device, link, UCCL_EP_E_PEER_LOST, ECONNREFUSED, "rank %u is gone: nobody listens at its address",
                 peer);
    switch ((shm_link_state)shm_state(link)) {
    case SHM_LINK_UP:
        return UCCL_EP_OK;
    case SHM_LINK_DEPARTED:
    case SHM_LINK_LOST:
        return shm_fail(device->host, link->status, link->vendor_code, "%s", link->text);
    case SHM_LINK_LISTEN:
        if (device->door_error) {
            int error = device->door_error;
            device->door_error = 0;
            return shm_fail(device->host, UCCL_EP_E_SYSTEM, error,
                            "rank %u cannot be let in: %s; raise ulimit -n (now %llu)", peer, strerror(error),
                            (unsigned long long)shm_soft_limit(RLIMIT_NOFILE));
        }
        return UCCL_EP_IN_PROGRESS;
    default:
        return UCCL_EP_IN_PROGRESS;
    }
}
