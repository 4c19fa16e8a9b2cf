/* SPDX-License-Identifier: Apache-2.0
 *
 * connect.c: what ranks have to know of each other's endpoints and regions, and the connections made with it.
 *
 * A backend's addresses and regions are blobs of up to 512 bytes. On the way each has as much room as the longest of
 * any rank, not 512 bytes: at 4096 ranks every one of these bytes is 4096 bytes a rank.
 *
 * What an endpoint has for one peer alone (a queue pair's number) is a square of the ranks. It travels in steps of so
 * many peers that no rank holds more than STEP_BYTES of it, and of each step a rank keeps what is for it.
 */
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

/* The mailbox is registered last, and the signals and it not by every strategy: a region without has an empty blob. */
static const uccl_ep_region regions[] = {UCCL_EP_REGION_HEAP, UCCL_EP_REGION_SIGNALS, UCCL_EP_REGION_MAILBOX};
#define REGIONS (sizeof regions / sizeof *regions)

typedef struct blob {
    uint32_t bytes;
    uint8_t data[UCCL_EP_MAX_BLOB_BYTES];
} blob;

/* On the way: a length, then `room` bytes. */
static size_t room_of(uint32_t bytes) {
    return sizeof(uint32_t) + (bytes + 3u) / 4u * 4u;
}

static void pack(char *to, const blob *b) {
    memcpy(to, &b->bytes, sizeof b->bytes);
    memcpy(to + sizeof b->bytes, b->data, b->bytes);
}

/* Another rank's: its length may be anything. */
static bool unpack(const char *from, size_t room, const void **data, uint32_t *bytes) {
    memcpy(bytes, from, sizeof *bytes);
    *data = from + sizeof *bytes;
    return *bytes <= room - sizeof *bytes;
}

static uccl_ep_status too_long(const uccl_ep_comm *comm) {
    return fail_local(UCCL_EP_E_BACKEND, "", "%s wrote more than a blob holds", comm->backend->name);
}

#ifndef STEP_BYTES /* a test has many small steps */
#define STEP_BYTES (8u << 20)
#endif

/* What the own endpoints have for each peer alone, into pairs[size][proxies][*bytes], which is allocated here. */
static uccl_ep_status collect_pairs(uccl_ep_comm *comm, char **pairs, uint32_t *bytes) {
    const uint32_t proxies = comm->config.proxies;
    if (!comm->backend->peer_address) return UCCL_EP_OK;
    for (uint32_t k = 0; k < comm->size * proxies; k++) {
        uint8_t data[UCCL_EP_MAX_PEER_BLOB_BYTES];
        uint32_t used = sizeof data;
        host_fail_clear();
        const uccl_ep_status status =
            comm->backend->peer_address(comm->proxies[k % proxies].endpoint, k / proxies, data, &used);
        if (status != UCCL_EP_OK) {
            backend_failed(comm, status, "", "reading an endpoint's address for a peer");
            last_error_slot()->peer = k / proxies;
            return status;
        }
        if (!used || used > sizeof data || (k && used != *bytes))
            return fail_local(UCCL_EP_E_BACKEND, "",
                              "%s wrote %u bytes as its address for a peer: 1 to %zu, the same for all",
                              comm->backend->name, used, sizeof data);
        *bytes = used;
        if (!*pairs) *pairs = calloc((size_t)comm->size * proxies, used);
        if (!*pairs) return fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory to connect %u ranks", comm->size);
        memcpy(*pairs + (size_t)k * used, data, used);
    }
    return UCCL_EP_OK;
}

/* mine: [size][proxies]; c->pairs gets what the others' endpoints have for this rank. */
static uccl_ep_status gather_pairs(uccl_ep_comm *comm, const uccl_ep_bootstrap *bootstrap, const char *mine,
                                   struct contacts *c) {
    const size_t each = (size_t)comm->config.proxies * c->pair_bytes; /* for one peer */
    size_t peers = STEP_BYTES / each / comm->size;
    if (!peers) peers = 1;
    if (peers > comm->size) peers = comm->size;
    uccl_ep_status status = UCCL_EP_OK;
    c->pairs = malloc(comm->size * each);
    char *all = malloc(comm->size * peers * each);
    if (!c->pairs || !all) status = fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory to connect %u ranks", comm->size);
    for (uint32_t first = 0; first < comm->size; first += (uint32_t)peers) {
        const size_t n = comm->size - first < peers ? comm->size - first : peers, stride = n * each;
        /* Who failed goes through one step more, which tells all. */
        status = exchange(comm, bootstrap, "addresses of pairs", status, mine + first * each, (uint32_t)stride, all);
        if (status != UCCL_EP_OK) break;
        if (comm->rank < first || comm->rank >= first + n) continue;
        for (uint32_t rank = 0; rank < comm->size; rank++)
            memcpy(c->pairs + rank * each, all + rank * stride + (comm->rank - first) * each, each);
    }
    free(all);
    return status;
}

/* blobs: [proxies] addresses, then [REGIONS]. */
static uccl_ep_status collect(uccl_ep_comm *comm, blob *blobs) {
    const uint32_t proxies = comm->config.proxies;
    for (uint32_t i = 0; i < proxies; i++) {
        blobs[i].bytes = sizeof blobs[i].data;
        host_fail_clear();
        const uccl_ep_status status =
            comm->backend->endpoint_address(comm->proxies[i].endpoint, blobs[i].data, &blobs[i].bytes);
        if (status != UCCL_EP_OK) return backend_failed(comm, status, "", "reading an endpoint's address");
        if (blobs[i].bytes > sizeof blobs[i].data) return too_long(comm);
    }
    for (size_t i = 0; i < REGIONS; i++) {
        blob *b = &blobs[proxies + i];
        b->bytes = 0;
        if (!comm->registered[regions[i]]) continue;
        b->bytes = sizeof b->data;
        host_fail_clear();
        const uccl_ep_status status = comm->backend->region_export(comm->device, regions[i], b->data, &b->bytes);
        if (status != UCCL_EP_OK) return backend_failed(comm, status, "MEM-1", "exporting a region");
        if (b->bytes > sizeof b->data) return too_long(comm);
    }
    return UCCL_EP_OK;
}

/* Collective steps: how long the blobs are, then the blobs, then what is for one peer alone. `status`: how this rank
 * got so far. */
uccl_ep_status contacts_gather(uccl_ep_comm *comm, const uccl_ep_bootstrap *bootstrap, const char *step,
                               uccl_ep_status status, struct contacts *c) {
    const uint32_t proxies = comm->config.proxies, n = proxies + (uint32_t)REGIONS;
    uint32_t longest[3] = {0, 0, 0}; /* of addresses, of regions, for one peer alone */
    char *mine = NULL, *pairs = NULL;
    *c = (struct contacts){0};
    blob *blobs = calloc(n, sizeof *blobs);
    uint32_t *all = calloc(comm->size, sizeof longest);
    if (status == UCCL_EP_OK && (!blobs || !all))
        status = fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory to connect %u ranks", comm->size);
    if (status == UCCL_EP_OK) status = collect(comm, blobs);
    if (status == UCCL_EP_OK) status = collect_pairs(comm, &pairs, &longest[2]);
    for (uint32_t i = 0; i < n && status == UCCL_EP_OK; i++)
        if (blobs[i].bytes > longest[i >= proxies]) longest[i >= proxies] = blobs[i].bytes;
    char name[20];
    snprintf(name, sizeof name, "%.14s size", step);
    status = exchange(comm, bootstrap, name, status, longest, sizeof longest, all);
    if (status == UCCL_EP_OK) {
        bool one_length = true; /* everybody sees whether all wrote the same */
        for (uint32_t rank = 0; rank < comm->size; rank++) {
            for (uint32_t k = 0; k < 2; k++)
                if (all[3 * rank + k] > longest[k]) longest[k] = all[3 * rank + k];
            one_length &= all[3 * rank + 2] == all[2];
        }
        c->pair_bytes = longest[2];
        c->address_room = room_of(longest[0]);
        c->region_room = room_of(longest[1]);
        c->stride = proxies * c->address_room + REGIONS * c->region_room;
        if (!one_length || longest[2] > UCCL_EP_MAX_PEER_BLOB_BYTES) {
            status = fail_local(UCCL_EP_E_BOOTSTRAP, "",
                                "addresses for one peer of different lengths: do all ranks run "
                                "the same version of the backend?");
        } else if (longest[0] > UCCL_EP_MAX_BLOB_BYTES || longest[1] > UCCL_EP_MAX_BLOB_BYTES) {
            /* Everybody sees the same lengths. */
            status = fail_local(UCCL_EP_E_BOOTSTRAP, "", "blobs of %u and %u bytes: at most %u", longest[0], longest[1],
                                UCCL_EP_MAX_BLOB_BYTES);
        } else {
            mine = calloc(1, c->stride);
            c->all = calloc(comm->size, c->stride);
            if (!mine || !c->all)
                status = fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory to connect %u ranks", comm->size);
            for (uint32_t i = 0; i < n && status == UCCL_EP_OK; i++)
                pack(i < proxies ? mine + i * c->address_room
                                 : mine + proxies * c->address_room + (i - proxies) * c->region_room,
                     &blobs[i]);
            status = exchange(comm, bootstrap, step, status, mine, (uint32_t)c->stride, c->all);
            if (status == UCCL_EP_OK && c->pair_bytes) status = gather_pairs(comm, bootstrap, pairs, c);
        }
    }
    free(pairs);
    free(mine);
    free(all);
    free(blobs);
    return status;
}

void contacts_free(struct contacts *c) {
    free(c->all);
    free(c->pairs);
    c->all = c->pairs = NULL;
}

/* What a backend is to connect endpoint i to `target` with. */
static uccl_ep_status connect_one(uccl_ep_comm *comm, const struct contacts *c, uint32_t i, uint32_t target) {
    char whole[UCCL_EP_MAX_BLOB_BYTES + UCCL_EP_MAX_PEER_BLOB_BYTES];
    const void *data;
    uint32_t bytes;
    if (!unpack(c->all + target * c->stride + i * c->address_room, c->address_room, &data, &bytes))
        return fail_local(UCCL_EP_E_BOOTSTRAP, "", "the address of rank %u is not one", target);
    if (c->pair_bytes) {
        memcpy(whole, data, bytes);
        memcpy(whole + bytes, c->pairs + ((size_t)target * comm->config.proxies + i) * c->pair_bytes, c->pair_bytes);
        data = whole;
        bytes += c->pair_bytes;
    }
    const uccl_ep_status status = comm->backend->connect(comm->proxies[i].endpoint, target, data, bytes);
    return status == UCCL_EP_OK ? status : backend_failed(comm, status, "ERR-1", "connecting");
}

/*
 * Connect every endpoint to the peers in `wanted` (NULL: all), all of them at once. Within most of the bootstrap
 * timeout: those who are connected wait that long in the next exchange, and are to be told who could not, not to run
 * out of patience first.
 */
uccl_ep_status connect_peers(uccl_ep_comm *comm, const struct contacts *c, const bool *wanted) {
    const uccl_ep_backend *backend = comm->backend;
    const uint32_t proxies = comm->config.proxies;
    bool *waiting = calloc((size_t)comm->size * proxies, sizeof *waiting);
    if (!waiting) return fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory to connect");
    uccl_ep_status status = UCCL_EP_OK;
    size_t left = 0;
    host_fail_clear();
    for (uint32_t target = 0; target < comm->size && status == UCCL_EP_OK; target++) {
        if (wanted && !wanted[target]) continue;
        for (uint32_t i = 0; i < proxies && status == UCCL_EP_OK; i++) {
            status = connect_one(comm, c, i, target);
            if (status == UCCL_EP_OK)
                waiting[(size_t)target * proxies + i] = true, left++;
            else
                last_error_slot()->peer = target;
        }
    }
    const uint64_t deadline = deadline_of(comm, comm->config.bootstrap_timeout_ns / 4 * 3);
    backoff b = {.turns = 0};
    while (left && status == UCCL_EP_OK) {
        const size_t before = left;
        for (uint32_t k = 0; k < comm->size * proxies && status == UCCL_EP_OK; k++) {
            if (!waiting[k]) continue;
            host_fail_clear();
            const uccl_ep_status got = backend->connect_poll(comm->proxies[k % proxies].endpoint, k / proxies);
            if (got == UCCL_EP_IN_PROGRESS) {
                if (comm_now(comm) < deadline) continue;
                status = fail_local(UCCL_EP_E_DEADLINE, "ERR-1", "rank %u did not connect within the bootstrap timeout",
                                    k / proxies);
            } else if (got != UCCL_EP_OK) {
                status = backend_failed(comm, got, "ERR-1", "connecting");
            }
            if (status != UCCL_EP_OK) last_error_slot()->peer = k / proxies;
            waiting[k] = false, left--;
        }
        if (left == before) backoff_pause(comm, &b);
    }
    free(waiting);
    return status;
}

/* After connect_peers: a backend may need the connection to look at a region. */
uccl_ep_status import_peers(uccl_ep_comm *comm, const struct contacts *c, const bool *wanted) {
    const size_t addresses = comm->config.proxies * c->address_room;
    for (uint32_t target = 0; target < comm->size; target++) {
        if (wanted && !wanted[target]) continue;
        for (size_t i = 0; i < REGIONS; i++) {
            if (!comm->registered[regions[i]]) continue;
            const void *data;
            uint32_t bytes;
            host_fail_clear();
            uccl_ep_status status = UCCL_EP_E_BOOTSTRAP;
            if (unpack(c->all + target * c->stride + addresses + i * c->region_room, c->region_room, &data, &bytes))
                status = comm->backend->region_import(comm->device, target, regions[i], data, bytes);
            if (status == UCCL_EP_OK) continue;
            status = backend_failed(comm, status, "MEM-1", "reaching the memory of a peer");
            last_error_slot()->peer = target;
            return status;
        }
    }
    return UCCL_EP_OK;
}
