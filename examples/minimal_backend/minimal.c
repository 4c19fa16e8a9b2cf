/* SPDX-License-Identifier: Apache-2.0
 *
 * The smallest honest backend: a starting point for the author of a NIC's.
 *
 * Its "NIC" moves bytes between processes of one machine and promises the least that the contract admits: one-sided
 * writes, 64-bit adds, and a completion that means visible. No order, no batches, no events. The core makes the rest of
 * that: it holds signals back at the sender until what they order is complete.
 *
 * Where a real NIC differs: registering pins pages and gives a key; an endpoint is a queue pair for each peer; submit
 * writes work requests and rings a doorbell; poll reads a completion queue. What stays is who may call what and when,
 * and that everything from a peer is checked before it is used. uccl_ep/backend.h is the reference.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <uccl_ep/backend.h>

#define DEVICE_NAME "minimal0"
#define PAGE 4096u

/* What a peer needs to reach a region: the file behind it, and which it is, since a process's number may come again. */
typedef struct region_blob {
    uint64_t bytes, inode;
    int32_t process, fd;
} region_blob;

/* Memory of a rank. One page more than asked for lies behind it, whose first word its owner sets when it leaves. */
typedef struct memory {
    unsigned char *base;
    uint64_t bytes;
    int fd; /* -1: a peer's */
} memory;

struct uccl_ep_device {
    const uccl_ep_host *host;
    memory own[UCCL_EP_REGIONS]; /* allocated; which region each will be is known when it is registered */
    memory *region[UCCL_EP_REGIONS];
    memory (*peers)[UCCL_EP_REGIONS]; /* [n_peers] */
    uint32_t n_peers;
};

struct uccl_ep_endpoint {
    uccl_ep_device *device;
    int *process;             /* [n_peers]: pidfd; -1: not connected */
    uccl_ep_completion *done; /* [room]: a ring, first come, first served */
    uint64_t head, tail;
    uint32_t room;
};

static uccl_ep_status fail(const uccl_ep_device *device, uccl_ep_status status, const char *text) {
    return device->host->fail(device->host->context, status, 0, text);
}

static uccl_ep_status fail_call(const uccl_ep_device *device, uccl_ep_status status, const char *call) {
    char text[160];
    snprintf(text, sizeof text, "%s: %s", call, strerror(errno));
    return device->host->fail(device->host->context, status, errno, text);
}

/* ----------------------------------------------------------------------------------------------------------- device */

static uccl_ep_caps promises(void) {
    return (uccl_ep_caps){.size = sizeof(uccl_ep_caps),
                          .completion_level = UCCL_EP_COMPLETION_VISIBLE,
                          .flags = UCCL_EP_CAP_ATOMIC_ADD64 | UCCL_EP_CAP_ATOMIC_COHERENT | UCCL_EP_CAP_OWN_MEMORY,
                          .max_message_bytes = 1u << 20}; /* a submit keeps the proxy no longer than that takes */
}

static uccl_ep_status query(const uccl_ep_host *host, uint32_t index, uccl_ep_device_info *info) {
    if (index) return host->fail(host->context, UCCL_EP_E_NO_DEVICE, 0, "there is one device, " DEVICE_NAME);
    uccl_ep_device_info mine = {
        .size = sizeof mine, .numa_node = -1, .name = DEVICE_NAME, .vendor = "example", .caps = promises()};
    memcpy(info, &mine, info->size < sizeof mine ? info->size : sizeof mine);
    return UCCL_EP_OK;
}

static uccl_ep_status device_open(const uccl_ep_host *host, const char *name, const char *options, uccl_ep_device **out,
                                  uccl_ep_caps *caps) {
    if (name && strcmp(name, DEVICE_NAME))
        return host->fail(host->context, UCCL_EP_E_NO_DEVICE, 0, "there is one device, " DEVICE_NAME);
    if (options && options[0]) return host->fail(host->context, UCCL_EP_E_INVALID, 0, "this backend has no options");
    uccl_ep_device *device = calloc(1, sizeof *device);
    if (!device) return host->fail(host->context, UCCL_EP_E_NO_MEMORY, 0, "no memory for a device");
    device->host = host;
    const uccl_ep_caps mine = promises();
    memcpy(caps, &mine, caps->size < sizeof mine ? caps->size : sizeof mine);
    *out = device;
    return UCCL_EP_OK;
}

static void unmap(memory *m) {
    if (m->base) munmap(m->base, m->bytes + PAGE);
    *m = (memory){.fd = -1};
}

static void device_close(uccl_ep_device *device) {
    for (uint32_t i = 0; i < device->n_peers * UCCL_EP_REGIONS; i++) unmap(&device->peers[0][i]);
    free(device->peers);
    free(device);
}

/* ----------------------------------------------------------------------------------------------------------- memory */

static uint32_t *gone(const memory *m) {
    return (uint32_t *)(void *)(m->base + m->bytes);
}

static uccl_ep_status memory_alloc(uccl_ep_device *device, uint64_t bytes, uint32_t flags, void **base) {
    if ((flags & 3u) == UCCL_EP_ALLOC_HUGE_ON)
        return fail(device, UCCL_EP_E_UNSUPPORTED, "huge pages: ask for ordinary ones");
    memory *m = device->own;
    while (m < device->own + UCCL_EP_REGIONS && m->base) m++;
    if (m == device->own + UCCL_EP_REGIONS)
        return fail(device, UCCL_EP_E_INVALID, "more memory than there are regions");
    const int fd = memfd_create("minimal", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return fail_call(device, UCCL_EP_E_SYSTEM, "memfd_create");
    void *map = MAP_FAILED;
    /* Sealed: a file that shrinks under a mapping kills whoever touches it. */
    if (ftruncate(fd, (off_t)(bytes + PAGE)) == 0 &&
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        map = mmap(NULL, bytes + PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED || (flags & UCCL_EP_ALLOC_LOCK && mlock(map, bytes))) {
        const uccl_ep_status status =
            fail_call(device, UCCL_EP_E_NO_MEMORY, "memory (see ulimit -v and -l, or take a smaller heap)");
        if (map != MAP_FAILED) munmap(map, bytes + PAGE);
        close(fd);
        return status;
    }
    *m = (memory){.base = map, .bytes = bytes, .fd = fd};
    *base = map;
    return UCCL_EP_OK;
}

static void memory_free(uccl_ep_device *device, void *base, uint64_t bytes) {
    (void)bytes;
    for (memory *m = device->own; m < device->own + UCCL_EP_REGIONS; m++) {
        if (m->base != base) continue;
        close(m->fd);
        unmap(m);
    }
}

static uccl_ep_status region_register(uccl_ep_device *device, uccl_ep_region region, const uccl_ep_memory *want) {
    for (memory *m = device->own; m < device->own + UCCL_EP_REGIONS; m++) {
        if (!m->base || m->base != want->base || m->bytes != want->bytes) continue;
        device->region[region] = m;
        return UCCL_EP_OK;
    }
    return fail(device, UCCL_EP_E_REGISTRATION,
                "only memory that this backend allocated can be reached by peers: give no heap");
}

static void region_deregister(uccl_ep_device *device, uccl_ep_region region) {
    /* From here on peers that still put get an error, and not a success that nobody sees. */
    __atomic_store_n(gone(device->region[region]), 1, __ATOMIC_RELEASE);
    device->region[region] = NULL;
}

static uccl_ep_status region_export(uccl_ep_device *device, uccl_ep_region region, void *blob, uint32_t *bytes) {
    const memory *m = device->region[region];
    struct stat file;
    if (!m || fstat(m->fd, &file)) return fail(device, UCCL_EP_E_INVALID, "the region is not registered");
    const region_blob mine = {.bytes = m->bytes, .inode = file.st_ino, .process = getpid(), .fd = m->fd};
    memcpy(blob, &mine, sizeof mine);
    *bytes = sizeof mine;
    return UCCL_EP_OK;
}

static uccl_ep_status region_import(uccl_ep_device *device, uint32_t peer, uccl_ep_region region, const void *blob,
                                    uint32_t bytes) {
    region_blob theirs;
    if (peer >= device->n_peers || bytes != sizeof theirs)
        return fail(device, UCCL_EP_E_INVALID, "not a region of this backend: do all ranks run the same one?");
    memcpy(&theirs, blob, sizeof theirs);
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", theirs.process, theirs.fd);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return fail_call(device, UCCL_EP_E_PEER_LOST,
                         "the peer's memory (all ranks must be one user's, on one machine)");
    struct stat file;
    const int seals = fcntl(fd, F_GET_SEALS);
    void *map = MAP_FAILED;
    if (seals >= 0 && seals & F_SEAL_SHRINK && !fstat(fd, &file) && file.st_ino == theirs.inode &&
        theirs.bytes % PAGE == 0 && (uint64_t)file.st_size == theirs.bytes + PAGE)
        map = mmap(NULL, theirs.bytes + PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (map == MAP_FAILED)
        return fail(device, UCCL_EP_E_REGISTRATION,
                    "the peer's memory is not as it describes it, or there is no room for it");
    unmap(&device->peers[peer][region]);
    device->peers[peer][region] = (memory){.base = map, .bytes = theirs.bytes, .fd = -1};
    return UCCL_EP_OK;
}

/* --------------------------------------------------------------------------------------------------------- endpoint */

static void endpoint_close(uccl_ep_endpoint *endpoint) {
    for (uint32_t i = 0; endpoint->process && i < endpoint->device->n_peers; i++)
        if (endpoint->process[i] >= 0) close(endpoint->process[i]);
    free(endpoint->process);
    free(endpoint->done);
    free(endpoint);
}

static uccl_ep_status endpoint_open(uccl_ep_device *device, const uccl_ep_endpoint_config *config,
                                    uccl_ep_endpoint **out) {
    if (!device->peers) {
        device->peers = calloc(config->peers, sizeof *device->peers);
        device->n_peers = device->peers ? config->peers : 0;
    }
    uccl_ep_endpoint *endpoint = calloc(1, sizeof *endpoint);
    if (endpoint) {
        endpoint->device = device;
        endpoint->room = config->inflight;
        endpoint->done = calloc(config->inflight, sizeof *endpoint->done);
        endpoint->process = malloc(config->peers * sizeof *endpoint->process);
        for (uint32_t i = 0; endpoint->process && i < config->peers; i++) endpoint->process[i] = -1;
    }
    if (device->peers && endpoint && endpoint->done && endpoint->process) {
        *out = endpoint;
        return UCCL_EP_OK;
    }
    if (endpoint) endpoint_close(endpoint);
    return fail(device, UCCL_EP_E_NO_MEMORY, "no memory for an endpoint");
}

static uccl_ep_status endpoint_address(uccl_ep_endpoint *endpoint, void *blob, uint32_t *bytes) {
    (void)endpoint;
    const int32_t process = getpid();
    memcpy(blob, &process, sizeof process);
    *bytes = sizeof process;
    return UCCL_EP_OK;
}

static uccl_ep_status start_connect(uccl_ep_endpoint *endpoint, uint32_t peer, const void *blob, uint32_t bytes) {
    int32_t process;
    if (peer >= endpoint->device->n_peers || bytes != sizeof process)
        return fail(endpoint->device, UCCL_EP_E_INVALID,
                    "not an address of this backend: do all ranks run the same one?");
    memcpy(&process, blob, sizeof process);
    endpoint->process[peer] = (int)syscall(SYS_pidfd_open, process, 0);
    return endpoint->process[peer] >= 0 ? UCCL_EP_OK
                                        : fail_call(endpoint->device, UCCL_EP_E_PEER_LOST, "the peer's process");
}

static uccl_ep_status connect_poll(uccl_ep_endpoint *endpoint, uint32_t peer) {
    return endpoint->process[peer] >= 0 ? UCCL_EP_OK : fail(endpoint->device, UCCL_EP_E_INVALID, "connect first");
}

static uccl_ep_status disconnect(uccl_ep_endpoint *endpoint, uint32_t peer) {
    /* Operations end within submit, so nothing reads a source any more; what is left are completions nobody wants. */
    uint64_t kept = endpoint->head;
    for (uint64_t i = endpoint->head; i != endpoint->tail; i++)
        if (endpoint->done[i % endpoint->room].peer != peer)
            endpoint->done[kept++ % endpoint->room] = endpoint->done[i % endpoint->room];
    endpoint->tail = kept;
    if (endpoint->process[peer] >= 0) close(endpoint->process[peer]);
    endpoint->process[peer] = -1;
    return UCCL_EP_OK;
}

static bool inside(const memory *m, uint64_t offset, uint64_t bytes) {
    return m && m->base && offset <= m->bytes && bytes <= m->bytes - offset;
}

static uccl_ep_status execute(const uccl_ep_device *device, uint32_t peer, const uccl_ep_operation *o) {
    const memory *there = o->remote_region < UCCL_EP_REGIONS ? &device->peers[peer][o->remote_region] : NULL;
    const memory *here = o->local_region < UCCL_EP_REGIONS ? device->region[o->local_region] : NULL;
    if (there && there->base && __atomic_load_n(gone(there), __ATOMIC_ACQUIRE))
        return fail(device, UCCL_EP_E_PEER_LOST, "the peer has closed its communicator");
    if (o->kind == UCCL_EP_OPERATION_WRITE && inside(there, o->remote_offset, o->length) &&
        inside(here, o->local_offset, o->length)) {
        if (o->length) memmove(there->base + o->remote_offset, here->base + o->local_offset, o->length);
        return UCCL_EP_OK;
    }
    if (o->kind == UCCL_EP_OPERATION_ADD64 && o->remote_offset % 8 == 0 && inside(there, o->remote_offset, 8)) {
        __atomic_fetch_add((uint64_t *)(void *)(there->base + o->remote_offset), o->value, __ATOMIC_ACQ_REL);
        return UCCL_EP_OK;
    }
    return fail(device, UCCL_EP_E_RANGE, "an operation outside of a region, or of a kind that was not promised");
}

static uccl_ep_status submit(uccl_ep_endpoint *endpoint, uint32_t peer, const uccl_ep_operation *operations, uint32_t n,
                             uint32_t flags, uint32_t *accepted) {
    (void)flags;
    *accepted = 0;
    if (peer >= endpoint->device->n_peers || endpoint->process[peer] < 0)
        return fail(endpoint->device, UCCL_EP_E_INVALID, "the peer is not connected");
    struct pollfd process = {.fd = endpoint->process[peer], .events = POLLIN};
    if (poll(&process, 1, 0) == 1) return fail(endpoint->device, UCCL_EP_E_PEER_LOST, "the peer's process has ended");
    /* Fewer than n with OK means: no room now. The core comes back. */
    while (*accepted < n && endpoint->tail - endpoint->head < endpoint->room) {
        const uccl_ep_operation *o = &operations[*accepted];
        const uccl_ep_status status = execute(endpoint->device, peer, o);
        if (status != UCCL_EP_OK) return status;
        endpoint->done[endpoint->tail++ % endpoint->room] = (uccl_ep_completion){.cookie = o->cookie, .peer = peer};
        ++*accepted;
    }
    return UCCL_EP_OK;
}

static int32_t poll_completions(uccl_ep_endpoint *endpoint, uccl_ep_completion *completions, uint32_t max) {
    uint32_t n = 0;
    while (n < max && endpoint->head != endpoint->tail)
        completions[n++] = endpoint->done[endpoint->head++ % endpoint->room];
    return (int32_t)n;
}

static void describe(uccl_ep_device *device, int32_t status, int32_t vendor_code, char *text, uint32_t bytes) {
    (void)device, (void)status;
    snprintf(text, bytes, "errno %d", vendor_code);
}

static const uccl_ep_backend table = {.size = sizeof table,
                                      .abi_major = UCCL_EP_BACKEND_ABI_MAJOR,
                                      .abi_minor = 0,
                                      .name = "minimal",
                                      .version = "1",
                                      .query = query,
                                      .device_open = device_open,
                                      .device_close = device_close,
                                      .memory_alloc = memory_alloc,
                                      .memory_free = memory_free,
                                      .region_register = region_register,
                                      .region_deregister = region_deregister,
                                      .region_export = region_export,
                                      .region_import = region_import,
                                      .endpoint_open = endpoint_open,
                                      .endpoint_close = endpoint_close,
                                      .endpoint_address = endpoint_address,
                                      .connect = start_connect,
                                      .connect_poll = connect_poll,
                                      .disconnect = disconnect,
                                      .submit = submit,
                                      .poll = poll_completions,
                                      .describe = describe};

const uccl_ep_backend *uccl_ep_backend_entry(void) {
    return &table;
}
