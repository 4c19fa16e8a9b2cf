/* SPDX-License-Identifier: Apache-2.0
 *
 * What a process of the same user sends to the socket at which a rank of the shm backend waits for its peers: any
 * packets, damaged greetings, and descriptors of any files. The rank neither crashes nor maps what it was not promised,
 * and goes on letting its peers in.
 */
#define _GNU_SOURCE /* memfd_create */
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "backends/shm/shm.h"
#include "fuzz.h"

#define PEERS 3u
#define SENDERS 3u

static uint64_t now;

static uint64_t host_now(void *context) {
    (void)context;
    return now += 10000000;
}
static void host_log(void *context, uccl_ep_log_level level, const char *text) {
    (void)context;
    (void)level;
    (void)text;
}
static uccl_ep_status host_fail(void *context, uccl_ep_status status, int32_t vendor_code, const char *text) {
    (void)context;
    (void)vendor_code;
    FUZZ_CHECK(text && text[0], "an error without words");
    return status;
}
static const uccl_ep_host host = {.size = sizeof host,
                                  .abi_major = UCCL_EP_BACKEND_ABI_MAJOR,
                                  .abi_minor = UCCL_EP_BACKEND_ABI_MINOR,
                                  .now_ns = host_now,
                                  .log = host_log,
                                  .fail = host_fail};

static int dial(const shm_address *address) {
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    /* As shm_socket_name makes it. */
    const int n = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "uccl_ep-");
    char *at = name.sun_path + 1 + n;
    for (unsigned i = 0; i < SHM_ID_BYTES; i++) at += snprintf(at, 3, "%02x", address->name[i]);
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    const socklen_t bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + (size_t)(at - name.sun_path));
    if (connect(fd, (struct sockaddr *)&name, bytes) == 0) return fd;
    close(fd);
    return -1;
}

static int some_file(fuzz_input *in) {
    const uint8_t how = fuzz_u8(in);
    if (how < 64) return open("/dev/null", O_RDWR | O_CLOEXEC);
    const int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return -1;
    if (ftruncate(fd, (off_t)(how % 4) * 4096)) errno = 0;
    if (how & 128) fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | (how & 64 ? F_SEAL_GROW | F_SEAL_SEAL : 0));
    return fd;
}

static void send_packet(int fd, const void *data, size_t bytes, const int *files, unsigned n) {
    union {
        char bytes[CMSG_SPACE(8 * sizeof(int))];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec part = {(void *)(uintptr_t)data, bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (n) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(n * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(n * sizeof(int));
        memcpy(CMSG_DATA(c), files, n * sizeof(int));
    }
    if (sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) errno = 0;
}

static void send_something(int fd, const shm_address *address, fuzz_input *in) {
    shm_message message = {.magic = SHM_MESSAGE_MAGIC,
                           .version = SHM_VERSION,
                           .kind = (uint16_t)(1 + fuzz_below(in, 4)),
                           .rank = fuzz_below(in, PEERS)};
    memcpy(message.proof, address->token, sizeof message.proof);
    message.name[0] = (uint8_t)(message.rank + 1);
    uint8_t raw[sizeof message + 32];
    const uint8_t how = fuzz_u8(in);
    int files[8];
    unsigned n = 0;
    for (unsigned i = 0; i < UCCL_EP_REGIONS && how & 1; i++) {
        const uint8_t what = fuzz_u8(in);
        if (what < 64) continue;
        message.regions[i] = (shm_region_record){.id = what, .bytes = 4096, .access = 0xf};
        if (what & 1) message.regions[i].bytes = fuzz_number(in);
        if (what & 2) message.regions[i].offset = fuzz_number(in);
        if (what & 4) message.regions[i].access = (uint32_t)fuzz_number(in);
        if (what & 8) message.regions[i].kind = what >> 6;
    }
    for (unsigned i = fuzz_u8(in) % 6; i && n < 8; i--)
        if ((files[n] = some_file(in)) >= 0) n++;
    size_t bytes = sizeof message;
    memcpy(raw, &message, sizeof message);
    memset(raw + sizeof message, 0, sizeof raw - sizeof message);
    if (how & 2)
        for (unsigned i = fuzz_u8(in) % 8; i; i--) {
            const uint8_t at = fuzz_u8(in);
            raw[at] = fuzz_u8(in);
        }
    if (how & 4) bytes = fuzz_u32(in) % (sizeof raw + 1);
    send_packet(fd, raw, bytes, files, n);
    while (n) close(files[--n]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = fuzz_begin(data, size);
    const uccl_ep_backend *b = uccl_ep_backend_entry();
    uccl_ep_device *device;
    uccl_ep_endpoint *endpoint;
    now = 0;
    uccl_ep_caps caps = {.size = sizeof caps};
    FUZZ_CHECK(b->device_open(&host, NULL, "", &device, &caps) == UCCL_EP_OK, "no device");
    void *memory;
    FUZZ_CHECK(b->memory_alloc(device, 4096, UCCL_EP_ALLOC_HUGE_OFF, &memory) == UCCL_EP_OK, "no memory");
    const uccl_ep_memory region = {
        .size = sizeof region, .base = memory, .bytes = 4096, .dmabuf_fd = -1, .access = UCCL_EP_ACCESS_REMOTE_WRITE};
    FUZZ_CHECK(b->region_register(device, UCCL_EP_REGION_HEAP, &region) == UCCL_EP_OK, "no region");
    const uint32_t rank = fuzz_below(&in, PEERS);
    const uccl_ep_endpoint_config config = {.size = sizeof config, .rank = rank, .peers = PEERS, .inflight = 64};
    FUZZ_CHECK(b->endpoint_open(device, &config, &endpoint) == UCCL_EP_OK, "no endpoint");
    shm_address address;
    uint32_t bytes = sizeof address;
    FUZZ_CHECK(b->endpoint_address(endpoint, &address, &bytes) == UCCL_EP_OK, "no address");
    int senders[SENDERS] = {-1, -1, -1};
    while (fuzz_left(&in)) {
        const uint8_t what = fuzz_u8(&in);
        const uint32_t i = what % SENDERS, peer = what / 8 % PEERS;
        uccl_ep_event event;
        if (what % 8 == 0) { /* the peer's address comes by the bootstrap: it is in order */
            shm_address theirs = address;
            theirs.rank = peer;
            memset(theirs.name, 0, sizeof theirs.name);
            theirs.name[0] = (uint8_t)(peer + 1);
            if (peer != rank) (void)b->connect(endpoint, peer, &theirs, sizeof theirs);
        } else if (what % 8 == 1) {
            (void)b->connect_poll(endpoint, peer);
        } else if (what % 8 == 2) {
            (void)b->events(endpoint, &event, 1);
        } else if (what % 8 == 3) {
            if (senders[i] >= 0) close(senders[i]);
            senders[i] = -1;
        } else {
            if (senders[i] < 0) senders[i] = dial(&address);
            FUZZ_CHECK(senders[i] >= 0 || errno == EAGAIN, "nobody listens any more: errno %d", errno);
            if (senders[i] >= 0) send_something(senders[i], &address, &in);
            (void)b->connect_poll(endpoint, peer);
            (void)b->events(endpoint, &event, 1);
        }
    }
    for (unsigned i = 0; i < SENDERS; i++)
        if (senders[i] >= 0) close(senders[i]);
    b->endpoint_close(endpoint);
    b->region_deregister(device, UCCL_EP_REGION_HEAP);
    b->memory_free(device, memory, 4096);
    b->device_close(device);
    return 0;
}
