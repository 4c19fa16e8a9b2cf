/* SPDX-License-Identifier: Apache-2.0
 *
 * Endpoints: operations are executed where they are submitted, by the submitting thread, so order and visibility are
 * the CPU's and a completion is known at once. What is left is bounds, a ring of completions, and who is connected.
 * Only where one of two heaps is in device memory does a write take time: copies.c.
 */
#include "shm.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uccl_ep_status shm_endpoint_open(uccl_ep_device *device, const uccl_ep_endpoint_config *config,
                                 uccl_ep_endpoint **out) {
    const uccl_ep_host *host = device->host;
    *out = NULL;
    if (config->peers == 0 || config->rank >= config->peers || config->inflight > SHM_MAX_INFLIGHT) {
        return shm_fail(host, UCCL_EP_E_INVALID, 0,
                        "endpoint of rank %u of %u with %u operations in flight: at most %u", config->rank,
                        config->peers, config->inflight, SHM_MAX_INFLIGHT);
    }
    if (config->peers > SHM_MAX_PEERS) {
        return shm_fail(host, UCCL_EP_E_CAPABILITY, 0, "%u ranks: the shm backend takes at most %u, all on one machine",
                        config->peers, SHM_MAX_PEERS);
    }
    uint64_t slots = 64;
    while (slots < config->inflight) slots *= 2;
    uccl_ep_endpoint *endpoint = calloc(1, sizeof *endpoint + config->peers * sizeof endpoint->peers[0]);
    if (endpoint) endpoint->ring = calloc(slots, sizeof *endpoint->ring);
    if (!endpoint || !endpoint->ring) {
        free(endpoint);
        return shm_fail(host, UCCL_EP_E_NO_MEMORY, ENOMEM, "no memory for an endpoint with %" PRIu64 " completions",
                        slots);
    }
    endpoint->device = device;
    endpoint->index = config->index;
    endpoint->mask = slots - 1;

    pthread_mutex_lock(&device->lock);
    uccl_ep_status status = UCCL_EP_OK;
    if (device->slots == NULL) {
        status = shm_links_open(device, config->rank, config->peers);
    } else if (config->rank != device->rank || config->peers != device->peers) {
        status = shm_fail(host, UCCL_EP_E_INVALID, 0, "a device serves one rank, here %u of %u, and not also %u of %u",
                          device->rank, device->peers, config->rank, config->peers);
    }
    endpoint->ends_seen = atomic_load_explicit(&device->ends, memory_order_relaxed);
    pthread_mutex_unlock(&device->lock);
    if (status == UCCL_EP_OK && shm_accelerator(host)) status = shm_copies_open(endpoint, &endpoint->copies);
    if (status != UCCL_EP_OK) {
        free(endpoint->ring);
        free(endpoint);
        return status;
    }
    *out = endpoint;
    return UCCL_EP_OK;
}

void shm_endpoint_close(uccl_ep_endpoint *endpoint) {
    if (endpoint->copies) shm_copies_close(endpoint->copies);
    free(endpoint->ring);
    free(endpoint);
}

uccl_ep_status shm_endpoint_address(uccl_ep_endpoint *endpoint, void *blob, uint32_t *bytes) {
    const uccl_ep_device *device = endpoint->device;
    shm_address address = device->address;
    if (*bytes < sizeof address) {
        return shm_fail(device->host, UCCL_EP_E_INVALID, 0, "endpoint_address: %u bytes of room, %zu needed", *bytes,
                        sizeof address);
    }
    address.rank = device->rank;
    address.peers = device->peers;
    address.index = endpoint->index;
    memcpy(blob, &address, sizeof address);
    *bytes = sizeof address;
    return UCCL_EP_OK;
}

/* ------------------------------------------------------------------------------------------------------- connecting */

static uccl_ep_status shm_no_peer(const uccl_ep_endpoint *endpoint, uint32_t peer) {
    return shm_fail(endpoint->device->host, UCCL_EP_E_RANGE, 0, "rank %u: there are %u", peer, endpoint->device->peers);
}

/* All zero: /proc did not tell. */
static bool shm_known(const uint8_t id[SHM_ID_BYTES]) {
    static const uint8_t zero[SHM_ID_BYTES];
    return memcmp(id, zero, sizeof zero) != 0;
}

/* Say at once what would otherwise be a connection that never comes. */
static uccl_ep_status shm_check_address(const uccl_ep_endpoint *endpoint, uint32_t peer, const void *blob,
                                        uint32_t bytes, shm_address *address) {
    const uccl_ep_device *device = endpoint->device;
    const uccl_ep_host *host = device->host;
    const shm_address *mine = &device->address;
    if (bytes == sizeof *address) memcpy(address, blob, sizeof *address);
    if (bytes != sizeof *address || address->magic != SHM_ADDRESS_MAGIC || address->version != SHM_VERSION ||
        address->bytes != sizeof *address) {
        return shm_fail(
            host, UCCL_EP_E_INVALID, 0,
            "rank %u sent %u bytes that are no address of this shm backend: do all ranks run one version, and "
            "all with the shm backend?",
            peer, bytes);
    }
    if (address->rank != peer || address->peers != device->peers || address->index != endpoint->index) {
        return shm_fail(host, UCCL_EP_E_INVALID, 0,
                        "the address of rank %u says rank %u of %u, endpoint %u, but there are %u ranks and this is "
                        "endpoint %u",
                        peer, address->rank, address->peers, address->index, device->peers, endpoint->index);
    }
    if (shm_known(address->boot) && shm_known(mine->boot) && memcmp(address->boot, mine->boot, SHM_ID_BYTES) != 0) {
        return shm_fail(host, UCCL_EP_E_BOOTSTRAP, 0,
                        "rank %u runs on another machine: shared memory does not reach it, take the backend of a NIC",
                        peer);
    }
    bool both = address->netns_inode && mine->netns_inode;
    if (both && (address->netns_inode != mine->netns_inode || address->netns_device != mine->netns_device)) {
        return shm_fail(
            host, UCCL_EP_E_BOOTSTRAP, 0,
            "rank %u runs in another network namespace (container?): start all ranks of a machine in one, for "
            "instance with the host's network",
            peer);
    }
    if (address->uid != mine->uid) {
        return shm_fail(host, UCCL_EP_E_BOOTSTRAP, EPERM,
                        "rank %u runs as user %u and this rank as user %u: start all as one", peer, address->uid,
                        mine->uid);
    }
    bool own = peer == device->rank;
    bool same = memcmp(address->name, mine->name, SHM_ID_BYTES) == 0;
    if (own != same || (own && memcmp(address->token, mine->token, SHM_ID_BYTES) != 0)) {
        return shm_fail(host, UCCL_EP_E_INVALID, 0, "the address of rank %u is %s", peer,
                        own ? "not this device's own" : "this rank's own");
    }
    return UCCL_EP_OK;
}

uccl_ep_status shm_connect(uccl_ep_endpoint *endpoint, uint32_t peer, const void *blob, uint32_t bytes) {
    uccl_ep_device *device = endpoint->device;
    if (peer >= device->peers) return shm_no_peer(endpoint, peer);
    shm_address address = {0};
    uccl_ep_status status = shm_check_address(endpoint, peer, blob, bytes, &address);
    if (status != UCCL_EP_OK) return status;
    if (endpoint->peers[peer].link || endpoint->peers[peer].connecting) {
        return shm_fail(device->host, UCCL_EP_E_INVALID, 0, "rank %u is connected already: disconnect first", peer);
    }
    if (peer != device->rank) {
        pthread_mutex_lock(&device->lock);
        status = shm_link_start(device, &address);
        pthread_mutex_unlock(&device->lock);
    }
    endpoint->peers[peer].connecting = status == UCCL_EP_OK;
    return status;
}

uccl_ep_status shm_connect_poll(uccl_ep_endpoint *endpoint, uint32_t peer) {
    uccl_ep_device *device = endpoint->device;
    if (peer >= device->peers) return shm_no_peer(endpoint, peer);
    shm_peer *at = &endpoint->peers[peer];
    if (at->link) return UCCL_EP_OK;
    if (!at->connecting)
        return shm_fail(device->host, UCCL_EP_E_INVALID, 0, "rank %u: connect_poll without connect", peer);
    uccl_ep_status status = UCCL_EP_OK;
    shm_link *link = &device->self;
    if (peer != device->rank) {
        pthread_mutex_lock(&device->lock);
        shm_links_pump(device);
        status = shm_link_advance(device, peer);
        link = device->slots[peer].current;
        pthread_mutex_unlock(&device->lock);
    }
    if (status == UCCL_EP_OK)
        *at = (shm_peer){.link = link};
    else if (status != UCCL_EP_IN_PROGRESS)
        at->connecting = false;
    return status;
}

uccl_ep_status shm_disconnect(uccl_ep_endpoint *endpoint, uint32_t peer) {
    if (peer >= endpoint->device->peers) return shm_no_peer(endpoint, peer);
    if (endpoint->copies && !shm_copies_drop(endpoint->copies, peer)) {
        const uccl_ep_status status = shm_copies_advance(endpoint->copies);
        if (status != UCCL_EP_OK) return status;
        if (!shm_copies_drop(endpoint->copies, peer)) return UCCL_EP_IN_PROGRESS;
    }
    endpoint->peers[peer] = (shm_peer){0};
    uint64_t to = endpoint->head;
    for (uint64_t from = endpoint->head; from != endpoint->tail; from++) {
        shm_done done = endpoint->ring[from & endpoint->mask];
        if (done.peer != peer) endpoint->ring[to++ & endpoint->mask] = done;
    }
    endpoint->tail = to;
    return UCCL_EP_OK;
}

/* ------------------------------------------------------------------------------------------------------- operations */

static bool shm_inside(uint64_t region_bytes, uint64_t offset, uint64_t bytes) {
    return offset <= region_bytes && bytes <= region_bytes - offset;
}

static uccl_ep_status shm_outside(const uccl_ep_host *host, const char *whose, uint64_t region_bytes, uint64_t offset,
                                  uint64_t bytes) {
    return shm_fail(host, UCCL_EP_E_RANGE, 0,
                    "%" PRIu64 " bytes at offset %" PRIu64 " of %s region of %" PRIu64 " bytes", bytes, offset, whose,
                    region_bytes);
}

static uccl_ep_status shm_no_right(const uccl_ep_host *host, const char *whose, uint32_t access, uint32_t needed) {
    return shm_fail(host, UCCL_EP_E_REGISTRATION, 0, "%s region was registered with access %#x and this needs %#x",
                    whose, access, needed);
}

/* A region that was not imported has no bytes and no rights. */
static const shm_target shm_nothing;

/* What a refused operation lacks, in words; out of line, for the way of all others is short. */
__attribute__((cold, noinline)) static uccl_ep_status shm_refusal(const uccl_ep_device *device, const shm_link *link,
                                                                  const uccl_ep_operation *operation,
                                                                  const shm_target *remote, uint32_t remote_right,
                                                                  uint64_t length) {
    const uccl_ep_host *host = device->host;
    if (operation->kind == UCCL_EP_OPERATION_WRITE_IMM) {
        return shm_fail(host, UCCL_EP_E_UNSUPPORTED, 0, "shared memory has no immediates (immediate_bits is 0)");
    }
    if (remote_right == 0 || (operation->flags & ~(UCCL_EP_OPERATION_SIGNALLED | UCCL_EP_OPERATION_FENCE)) != 0) {
        return shm_fail(host, UCCL_EP_E_INVALID, 0, "operation of kind %u with flags %#x: not defined",
                        (unsigned)operation->kind, (unsigned)operation->flags);
    }
    if (operation->remote_region >= UCCL_EP_REGIONS || operation->local_region >= UCCL_EP_REGIONS) {
        return shm_fail(host, UCCL_EP_E_RANGE, 0, "regions %u and %u: there are %u", (unsigned)operation->local_region,
                        (unsigned)operation->remote_region, (unsigned)UCCL_EP_REGIONS);
    }
    if (length > SHM_MAX_MESSAGE) {
        return shm_fail(host, UCCL_EP_E_RANGE, 0, "an operation of %" PRIu64 " bytes: at most %u", length,
                        SHM_MAX_MESSAGE);
    }
    if (remote == &shm_nothing) {
        return shm_fail(host, UCCL_EP_E_INVALID, 0, "region %u of rank %u was not imported",
                        (unsigned)operation->remote_region, link->peer);
    }
    if (!shm_inside(remote->bytes, operation->remote_offset, length)) {
        return shm_outside(host, "the peer's", remote->bytes, operation->remote_offset, length);
    }
    if ((remote->access & remote_right) == 0) return shm_no_right(host, "the peer's", remote->access, remote_right);
    if (operation->kind == UCCL_EP_OPERATION_ADD64) {
        return shm_fail(host, UCCL_EP_E_ALIGNMENT, 0, "an add at offset %" PRIu64 ": words are aligned to 8 bytes",
                        operation->remote_offset);
    }
    const shm_region *mine = &device->regions[operation->local_region];
    if (mine->record.id == 0) {
        return shm_fail(host, UCCL_EP_E_INVALID, 0, "the own region %u is not registered",
                        (unsigned)operation->local_region);
    }
    if (!shm_inside(mine->record.bytes, operation->local_offset, length)) {
        return shm_outside(host, "the own", mine->record.bytes, operation->local_offset, length);
    }
    return shm_no_right(host, "the own", mine->record.access, UCCL_EP_ACCESS_LOCAL_READ);
}

/* Where an operation leads; false, and shm_refusal says why. */
static inline bool shm_resolve(const uccl_ep_device *device, const uccl_ep_operation *operation,
                               const shm_target *remote, uint32_t remote_right, uint64_t length, unsigned char **there,
                               unsigned char **here) {
    if (operation->flags & ~(UCCL_EP_OPERATION_SIGNALLED | UCCL_EP_OPERATION_FENCE)) return false;
    if (length > SHM_MAX_MESSAGE || (remote->access & remote_right) == 0) return false;
    if (!shm_inside(remote->bytes, operation->remote_offset, length)) return false;
    *there = remote->base + operation->remote_offset;
    *here = NULL;
    if (operation->kind == UCCL_EP_OPERATION_ADD64) return operation->remote_offset % sizeof(uint64_t) == 0;
    if (operation->local_region >= UCCL_EP_REGIONS) return false;
    const shm_region *mine = &device->regions[operation->local_region];
    if (mine->record.id == 0 || !shm_inside(mine->record.bytes, operation->local_offset, length)) return false;
    *here = mine->base + operation->local_offset;
    return operation->kind == UCCL_EP_OPERATION_READ || (mine->record.access & UCCL_EP_ACCESS_LOCAL_READ) != 0;
}

static inline void shm_do(uint8_t kind, unsigned char *there, unsigned char *here, uint64_t length, uint64_t value) {
    if (kind == UCCL_EP_OPERATION_ADD64) {
        /* Release: who reads the sum with acquire sees the writes before it. */
        __atomic_fetch_add((uint64_t *)(void *)there, value, __ATOMIC_ACQ_REL);
    } else if (kind == UCCL_EP_OPERATION_READ) {
        if (length) memmove(here, there, length);
    } else {
        /* Move: the own rank's source and target may overlap. */
        if (length) memmove(there, here, length);
        /* The next write must not become visible before this one. */
        atomic_thread_fence(memory_order_release);
    }
}

void shm_carry_out(uint8_t kind, unsigned char *there, unsigned char *here, uint64_t length, uint64_t value) {
    shm_do(kind, there, here, length, value);
}

static const uint32_t shm_rights[UCCL_EP_OPERATION_READ + 1] = {
    [UCCL_EP_OPERATION_WRITE] = UCCL_EP_ACCESS_REMOTE_WRITE,
    [UCCL_EP_OPERATION_ADD64] = UCCL_EP_ACCESS_REMOTE_ATOMIC,
    [UCCL_EP_OPERATION_READ] = UCCL_EP_ACCESS_REMOTE_READ,
};

static inline const shm_target *shm_target_of(const shm_link *link, uint32_t imported,
                                              const uccl_ep_operation *operation) {
    const uint32_t region = operation->remote_region;
    return region < UCCL_EP_REGIONS && (imported >> region & 1u) ? &link->targets[region] : &shm_nothing;
}

static inline uint64_t shm_length(const uccl_ep_operation *operation) {
    return operation->kind == UCCL_EP_OPERATION_ADD64 ? sizeof(uint64_t) : operation->length;
}

static inline uint32_t shm_right(const uccl_ep_operation *operation) {
    return operation->kind <= UCCL_EP_OPERATION_READ ? shm_rights[operation->kind] : 0;
}

/* One of the two heaps is in device memory. */
static uccl_ep_status shm_submit_copies(uccl_ep_endpoint *endpoint, uint32_t peer, const shm_link *link,
                                        uint32_t imported, const uccl_ep_operation *operations, uint32_t n,
                                        uint32_t *accepted) {
    const uccl_ep_device *device = endpoint->device;
    shm_copies *copies = endpoint->copies;
    for (; *accepted < n; ++*accepted) {
        const uccl_ep_operation *operation = &operations[*accepted];
        if (endpoint->tail - endpoint->head + shm_copies_pending(copies) > endpoint->mask) break;
        const uint64_t length = shm_length(operation);
        const shm_target *remote = shm_target_of(link, imported, operation);
        const uint32_t right = shm_right(operation);
        unsigned char *there, *here;
        if (!shm_resolve(device, operation, remote, right, length, &there, &here))
            return shm_refusal(device, link, operation, remote, right, length);
        const bool heap = operation->kind != UCCL_EP_OPERATION_ADD64 &&
                          (remote->device || device->regions[operation->local_region].shared);
        if (!heap) {
            shm_copies_then(copies, peer, operation, there, here, length);
            continue;
        }
        if (shm_copies_must_wait(copies, peer)) break;
        const bool read = operation->kind == UCCL_EP_OPERATION_READ;
        const uccl_ep_status status =
            shm_copies_start(copies, peer, operation, read ? here : there, read ? there : here, length);
        if (status != UCCL_EP_OK) return status;
    }
    return shm_copies_advance(copies);
}

uccl_ep_status shm_submit(uccl_ep_endpoint *endpoint, uint32_t peer, const uccl_ep_operation *operations, uint32_t n,
                          uint32_t flags, uint32_t *accepted) {
    (void)flags; /* there is no doorbell */
    const uccl_ep_device *device = endpoint->device;
    *accepted = 0;
    if (peer >= device->peers) return shm_no_peer(endpoint, peer);
    const shm_link *link = endpoint->peers[peer].link;
    if (!link) return shm_fail(device->host, UCCL_EP_E_INVALID, 0, "rank %u is not connected", peer);
    if (atomic_load_explicit(&link->state, memory_order_acquire) != SHM_LINK_UP) {
        /* Its memory is still mapped and nobody will read it. Final for this connection: an error stops the queue. */
        return shm_fail(device->host, UCCL_EP_E_PEER_LOST, link->vendor_code, "%s", link->text);
    }
    uint32_t imported = atomic_load_explicit(&link->imported, memory_order_acquire);
    if (endpoint->copies && (device->regions[UCCL_EP_REGION_HEAP].shared ||
                             ((imported >> UCCL_EP_REGION_HEAP & 1u) && link->targets[UCCL_EP_REGION_HEAP].device)))
        return shm_submit_copies(endpoint, peer, link, imported, operations, n, accepted);
    uint64_t copied = 0;
    uint32_t i = 0;
    for (; i < n; i++) {
        const uccl_ep_operation *operation = &operations[i];
        bool signalled = (operation->flags & UCCL_EP_OPERATION_SIGNALLED) != 0;
        if (signalled && endpoint->tail - endpoint->head > endpoint->mask) break;
        uint64_t length = shm_length(operation);
        /* A submit holds up all that the proxy serves: what is left waits for the next. */
        copied += length;
        if (copied > SHM_MAX_MESSAGE && i > 0 && length <= SHM_MAX_MESSAGE) break;

        const uint32_t right = shm_right(operation);
        const shm_target *remote = shm_target_of(link, imported, operation);
        unsigned char *there, *here;
        if (!shm_resolve(device, operation, remote, right, length, &there, &here)) {
            *accepted = i;
            return shm_refusal(device, link, operation, remote, right, length);
        }
        shm_do(operation->kind, there, here, length, operation->value);
        if (signalled) shm_complete(endpoint, peer, operation->cookie);
    }
    *accepted = i;
    return UCCL_EP_OK;
}

int32_t shm_poll(uccl_ep_endpoint *endpoint, uccl_ep_completion *completions, uint32_t max) {
    if (endpoint->copies) {
        const uccl_ep_status status = shm_copies_advance(endpoint->copies);
        if (status != UCCL_EP_OK) return status;
    }
    uint32_t n = 0;
    for (; n < max && n < INT32_MAX && endpoint->head != endpoint->tail; n++) {
        shm_done done = endpoint->ring[endpoint->head++ & endpoint->mask];
        completions[n] = (uccl_ep_completion){.cookie = done.cookie, .peer = done.peer};
    }
    return (int32_t)n;
}

int32_t shm_events(uccl_ep_endpoint *endpoint, uccl_ep_event *events, uint32_t max) {
    uccl_ep_device *device = endpoint->device;
    if (pthread_mutex_trylock(&device->lock) != 0) return 0; /* somebody else looks: next time */
    shm_links_pump(device);
    uint32_t ends = atomic_load_explicit(&device->ends, memory_order_relaxed), n = 0;
    bool all = true;
    for (uint32_t i = 0; ends != endpoint->ends_seen && i < device->peers; i++) {
        shm_peer *peer = &endpoint->peers[i];
        if (!peer->link || peer->reported) continue;
        uint32_t state = atomic_load_explicit(&peer->link->state, memory_order_relaxed);
        if (state != SHM_LINK_LOST && state != SHM_LINK_DEPARTED) continue;
        if (n == max) {
            all = false;
            break;
        }
        peer->reported = true;
        uint32_t kind = state == SHM_LINK_LOST ? UCCL_EP_EVENT_PEER_LOST : UCCL_EP_EVENT_PEER_CLOSED;
        events[n] = (uccl_ep_event){.kind = kind, .peer = i};
        snprintf(events[n++].text, sizeof events[0].text, "%.*s", (int)sizeof events[0].text - 1, peer->link->text);
    }
    if (all) endpoint->ends_seen = ends;
    pthread_mutex_unlock(&device->lock);
    return (int32_t)n;
}
