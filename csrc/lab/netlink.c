/* SPDX-License-Identifier: Apache-2.0
 *
 * netlink.c: the kernel's answers about RDMA devices (NETLINK_RDMA), by which libibverbs finds them before it looks
 * into sysfs: only there is a driver's number, which some providers go by, and there the machine's own devices would
 * show.
 *
 * Such a socket is one end of a pair: what the program sends is answered at once through the other end, as one
 * datagram, so that poll() and close() need no help. Addresses are made up, for libnl looks at them. A descriptor is
 * believed to be ours only if it is still that socket. Requests: Linux, include/uapi/rdma/rdma_netlink.h.
 */
#undef _FORTIFY_SOURCE
#include <errno.h>
#include <linux/netlink.h>
#include <rdma/rdma_netlink.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <unistd.h>

#include "behind.h"
#include "lab.h"

#define NODE_CA 1u /* enum rdma_node_type; sysfs shows it */
#define NODE_UNSPECIFIED 7u
#define HEAD sizeof(struct nlattr)
#define ALIGNED(bytes) (((bytes) + 3u) & ~(size_t)3)
#define SOCKETS 16
#define REQUEST_BYTES 4096u
#define REPLY_BYTES 16384u

NEXT_(socket)
NEXT_(bind)
NEXT_(getsockname)
NEXT_(setsockopt)
NEXT_(send)
NEXT_(sendto)
NEXT_(sendmsg)
NEXT_(recv)
NEXT_(recvfrom)
NEXT_(recvmsg)
NEXT_(close)

/* ---------------------------------------------------------------------------------------------------------- sockets */

static struct socket {
    _Atomic int fd; /* 0: free; so that 0 is never ours */
    int other;
    dev_t device;
    ino_t file;
    uint32_t port;
} sockets[SOCKETS];
static pthread_mutex_t sockets_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic pid_t owner; /* of what the table says */

static bool still(const struct socket *s, int fd) {
    struct stat about;
    return !fstat(fd, &about) && about.st_ino == s->file && about.st_dev == s->device;
}

static struct socket *find(int fd) {
    if (fd <= 0) return NULL;
    for (uint32_t i = 0; i < SOCKETS; i++)
        if (atomic_load_explicit(&sockets[i].fd, memory_order_acquire) == fd)
            return still(&sockets[i], fd) ? &sockets[i] : NULL;
    return NULL;
}

/* A child of fork() has copies of the sockets, and a table of its own. Another thread of the parent's may have held the
 * lock: what it was about to enter is not there yet. */
static void in_child(void) {
    pthread_mutex_init(&sockets_lock, NULL);
    atomic_store(&owner, (pid_t)syscall(SYS_getpid));
}

static void begin_once(void) {
    atomic_store(&owner, (pid_t)syscall(SYS_getpid));
    if (pthread_atfork(NULL, NULL, in_child)) lab_die("no memory for what fork() must do");
}

static int open_socket(int flags) {
    int ends[2];
    struct stat about;
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, begin_once);
    if (socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | flags, 0, ends)) return -1;
    pthread_mutex_lock(&sockets_lock);
    struct socket *s = NULL;
    for (uint32_t i = 0; i < SOCKETS && !s; i++) {
        const int old = sockets[i].fd;
        if (!old) {
            s = &sockets[i];
        } else if (old == ends[0] || !still(&sockets[i], old)) { /* it was closed behind our back */
            real_close()(sockets[i].other);
            s = &sockets[i];
        }
    }
    if (s && fstat(ends[0], &about)) s = NULL;
    if (s && ends[0]) {
        s->other = ends[1];
        s->device = about.st_dev;
        s->file = about.st_ino;
        s->port = (uint32_t)getpid();
        atomic_store_explicit(&s->fd, ends[0], memory_order_release);
    }
    pthread_mutex_unlock(&sockets_lock);
    if (s && ends[0]) return ends[0];
    real_close()(ends[0]);
    real_close()(ends[1]);
    errno = ENFILE;
    return -1;
}

/* By the program's close(), before it. */
void lab_netlink_close(int fd) {
    struct socket *s = find(fd);
    if (!s || atomic_load(&owner) != (pid_t)syscall(SYS_getpid))
        return; /* a vfork() child: the table is the parent's */
    pthread_mutex_lock(&sockets_lock);
    real_close()(s->other);
    atomic_store_explicit(&s->fd, 0, memory_order_release);
    pthread_mutex_unlock(&sockets_lock);
}

/* ---------------------------------------------------------------------------------------------------------- replies */

struct reply {
    uint8_t bytes[REPLY_BYTES] __attribute__((aligned(8)));
    size_t used, message; /* message: where the last one begins */
};

static void *room(struct reply *r, size_t bytes) {
    const size_t all = ALIGNED(bytes);
    if (all > sizeof r->bytes - r->used) lab_die("a netlink reply of more than %u bytes", REPLY_BYTES);
    void *at = r->bytes + r->used;
    memset(at, 0, all);
    r->used += all;
    return at;
}

static void end(struct reply *r) {
    const struct nlmsghdr length = {.nlmsg_len = (uint32_t)(r->used - r->message)};
    memcpy(r->bytes + r->message, &length.nlmsg_len, sizeof length.nlmsg_len);
}

static void begin(struct reply *r, const struct nlmsghdr *request, uint16_t type, uint16_t flags, uint32_t port) {
    r->message = r->used;
    const struct nlmsghdr head = {sizeof head, type, flags, request->nlmsg_seq, port};
    memcpy(room(r, sizeof head), &head, sizeof head);
    end(r);
}

static void attribute(struct reply *r, uint16_t type, const void *value, size_t bytes) {
    const struct nlattr head = {(uint16_t)(HEAD + bytes), type};
    uint8_t *at = room(r, HEAD + bytes);
    memcpy(at, &head, sizeof head);
    memcpy(at + HEAD, value, bytes);
    end(r);
}

#define ATTRIBUTE(reply, type, ctype, value)                                                                           \
    do {                                                                                                               \
        const ctype value_ = (value);                                                                                  \
        attribute(reply, type, &value_, sizeof value_);                                                                \
    } while (0)

static void error(struct reply *r, const struct nlmsghdr *request, uint32_t port, int code) {
    begin(r, request, NLMSG_ERROR, 0, port);
    const struct nlmsgerr text = {.error = -code, .msg = *request};
    memcpy(room(r, sizeof text), &text, sizeof text);
    end(r);
}

static void device_attributes(struct reply *r, const lab_device *d) {
    const bool efa = !strcmp(d->model->name, "efa");
    ATTRIBUTE(r, RDMA_NLDEV_ATTR_DEV_INDEX, uint32_t, d->index);
    attribute(r, RDMA_NLDEV_ATTR_DEV_NAME, d->name, strlen(d->name) + 1);
    ATTRIBUTE(r, RDMA_NLDEV_ATTR_PORT_INDEX, uint32_t, 1); /* how many */
    ATTRIBUTE(r, RDMA_NLDEV_ATTR_CAP_FLAGS, uint64_t, 0);
    attribute(r, RDMA_NLDEV_ATTR_FW_VERSION, d->variant->firmware, strlen(d->variant->firmware) + 1);
    ATTRIBUTE(r, RDMA_NLDEV_ATTR_NODE_GUID, uint64_t, d->guid);
    ATTRIBUTE(r, RDMA_NLDEV_ATTR_SYS_IMAGE_GUID, uint64_t, d->guid);
    ATTRIBUTE(r, RDMA_NLDEV_ATTR_DEV_NODE_TYPE, uint8_t, efa ? NODE_UNSPECIFIED : NODE_CA);
    const char *protocol = efa ? "" : "roce";
    attribute(r, RDMA_NLDEV_ATTR_DEV_PROTOCOL, protocol, strlen(protocol) + 1);
}

static void chardev_attributes(struct reply *r, const lab_device *d) {
    char name[24] = "uverbs0";
    name[6] = (char)('0' + d->index);
    attribute(r, RDMA_NLDEV_ATTR_CHARDEV_NAME, name, strlen(name) + 1);
    ATTRIBUTE(r, RDMA_NLDEV_ATTR_CHARDEV_ABI, uint64_t, d->model->uverbs_abi);
    ATTRIBUTE(r, RDMA_NLDEV_ATTR_CHARDEV, uint64_t, makedev(231, 192 + d->index)); /* as sysfs.py has it */
    ATTRIBUTE(r, RDMA_NLDEV_ATTR_UVERBS_DRIVER_ID, uint32_t, d->model->driver_id);
}

/* The value of an attribute of at least so many bytes; NULL: it is not there. */
static const uint8_t *find_attribute(const uint8_t *at, size_t bytes, uint16_t type, size_t least) {
    while (bytes >= HEAD) {
        struct nlattr head;
        memcpy(&head, at, sizeof head);
        if (head.nla_len < HEAD || head.nla_len > bytes) return NULL;
        if ((head.nla_type & NLA_TYPE_MASK) == type) return head.nla_len - HEAD >= least ? at + HEAD : NULL;
        const size_t all = ALIGNED(head.nla_len);
        if (all >= bytes) return NULL;
        at += all;
        bytes -= all;
    }
    return NULL;
}

static bool is_uverbs(const uint8_t *at, size_t bytes) {
    static const char wanted[] = "uverbs";
    const uint8_t *type = find_attribute(at, bytes, RDMA_NLDEV_ATTR_CHARDEV_TYPE, sizeof wanted - 1);
    return type && !memcmp(type, wanted, sizeof wanted - 1);
}

/* One message of the program's; `body`: its attributes. */
static void answer(struct reply *r, const struct nlmsghdr *request, const uint8_t *body, size_t bytes, uint32_t port) {
    uint32_t n;
    const lab_device *devices = lab_devices(&n);
    const uint16_t type = request->nlmsg_type;
    const bool dump = (request->nlmsg_flags & NLM_F_DUMP) == NLM_F_DUMP;
    const uint8_t *index = find_attribute(body, bytes, RDMA_NLDEV_ATTR_DEV_INDEX, 4);
    uint32_t i = n;
    if (index) memcpy(&i, index, sizeof i);
    switch (type) {
    case RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_GET):
        if (dump) {
            for (i = 0; i < n; i++) {
                begin(r, request, type, NLM_F_MULTI, port);
                device_attributes(r, &devices[i]);
            }
            begin(r, request, NLMSG_DONE, NLM_F_MULTI, port);
            room(r, sizeof(int));
            end(r);
            return;
        }
        if (i >= n) return error(r, request, port, index ? ENODEV : EINVAL);
        begin(r, request, type, 0, port);
        device_attributes(r, &devices[i]);
        break;
    case RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_GET_CHARDEV):
        /* Without an index: of any device's, such as the connection manager's, which is not here. */
        if (i >= n || !is_uverbs(body, bytes)) return error(r, request, port, index ? ENODEV : ENOENT);
        begin(r, request, type, 0, port);
        chardev_attributes(r, &devices[i]);
        break;
    case RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_SYS_GET):
        begin(r, request, type, 0, port);
        ATTRIBUTE(r, RDMA_NLDEV_SYS_ATTR_NETNS_MODE, uint8_t, 1);
        ATTRIBUTE(r, RDMA_NLDEV_SYS_ATTR_COPY_ON_FORK, uint8_t, 1); /* since Linux 5.12 */
        break;
    default:
        return error(r, request, port, lab_unsupported("netlink request %#x about RDMA devices", type));
    }
    if (request->nlmsg_flags & NLM_F_ACK) error(r, request, port, 0);
}

static ssize_t take(const struct socket *s, const struct iovec *pieces, size_t n) {
    uint8_t sent[REQUEST_BYTES] __attribute__((aligned(8)));
    size_t bytes = 0;
    for (size_t i = 0; i < n; i++) {
        if (pieces[i].iov_len > sizeof sent - bytes) {
            errno = EMSGSIZE;
            return -1;
        }
        if (pieces[i].iov_len) memcpy(sent + bytes, pieces[i].iov_base, pieces[i].iov_len);
        bytes += pieces[i].iov_len;
    }
    static struct reply r; /* guarded by the lock: too large for any thread's stack */
    pthread_mutex_lock(&sockets_lock);
    r.used = 0;
    for (size_t at = 0; bytes - at >= sizeof(struct nlmsghdr);) {
        struct nlmsghdr head;
        memcpy(&head, sent + at, sizeof head);
        if (head.nlmsg_len < sizeof head || head.nlmsg_len > bytes - at) break;
        if (head.nlmsg_flags & NLM_F_REQUEST)
            answer(&r, &head, sent + at + sizeof head, head.nlmsg_len - sizeof head, s->port);
        if (ALIGNED(head.nlmsg_len) >= bytes - at) break;
        at += ALIGNED(head.nlmsg_len);
    }
    const ssize_t told = r.used ? real_send()(s->other, r.bytes, r.used, MSG_NOSIGNAL | MSG_DONTWAIT) : 0;
    pthread_mutex_unlock(&sockets_lock);
    if (told < 0) errno = ENOBUFS; /* as where the program reads nothing */
    return told < 0 ? -1 : (ssize_t)bytes;
}

/* ------------------------------------------------------------------------------------- before the C library's
 * functions */

static void address(struct sockaddr *to, socklen_t *room_of, uint32_t port) {
    const struct sockaddr_nl from = {.nl_family = AF_NETLINK, .nl_pid = port};
    memcpy(to, &from, *room_of < sizeof from ? *room_of : sizeof from);
    *room_of = sizeof from;
}

EXPORT int socket(int domain, int type, int protocol) {
    uint32_t n;
    if (domain == AF_NETLINK && protocol == NETLINK_RDMA && lab_devices(&n)) return open_socket(type & SOCK_NONBLOCK);
    return real_socket()(domain, type, protocol);
}

EXPORT int bind(int fd, const struct sockaddr *to, socklen_t bytes) {
    struct socket *s = find(fd);
    if (!s) return real_bind()(fd, to, bytes);
    struct sockaddr_nl asked = {0};
    memcpy(&asked, to, bytes < sizeof asked ? bytes : sizeof asked);
    if (asked.nl_pid) s->port = asked.nl_pid;
    return 0;
}

EXPORT int getsockname(int fd, struct sockaddr *to, socklen_t *bytes) {
    const struct socket *s = find(fd);
    if (!s) return real_getsockname()(fd, to, bytes);
    address(to, bytes, s->port);
    return 0;
}

EXPORT int setsockopt(int fd, int level, int name, const void *value, socklen_t bytes) {
    return level == SOL_NETLINK && find(fd) ? 0 : real_setsockopt()(fd, level, name, value, bytes);
}

EXPORT ssize_t send(int fd, const void *bytes, size_t n, int flags) {
    const struct socket *s = find(fd);
    return s ? take(s, &(struct iovec){(void *)(uintptr_t)bytes, n}, 1) : real_send()(fd, bytes, n, flags);
}

EXPORT ssize_t sendto(int fd, const void *bytes, size_t n, int flags, const struct sockaddr *to, socklen_t room_of) {
    const struct socket *s = find(fd);
    return s ? take(s, &(struct iovec){(void *)(uintptr_t)bytes, n}, 1)
             : real_sendto()(fd, bytes, n, flags, to, room_of);
}

EXPORT ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    const struct socket *s = find(fd);
    return s ? take(s, message->msg_iov, message->msg_iovlen) : real_sendmsg()(fd, message, flags);
}

EXPORT ssize_t recvfrom(int fd, void *bytes, size_t n, int flags, struct sockaddr *from, socklen_t *room_of) {
    if (!from || !room_of || !find(fd)) return real_recvfrom()(fd, bytes, n, flags, from, room_of);
    const ssize_t got = real_recv()(fd, bytes, n, flags);
    if (got >= 0) address(from, room_of, 0);
    return got;
}

EXPORT ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    if (!message->msg_name || !find(fd)) return real_recvmsg()(fd, message, flags);
    const socklen_t room_of = message->msg_namelen;
    const ssize_t got = real_recvmsg()(fd, message, flags);
    message->msg_namelen = room_of;
    if (got >= 0) address(message->msg_name, &message->msg_namelen, 0);
    return got;
}
