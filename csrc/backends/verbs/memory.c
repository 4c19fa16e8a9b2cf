/* SPDX-License-Identifier: Apache-2.0
 *
 * memory.c: registration, and what peers are told of it.
 *
 * Device memory: as a dmabuf where there is one (no module of its own is needed), else by its address, which works
 * where the kernel has a peer-memory module; if neither does, each try is named with its errno (MEM-1).
 *
 * A region larger than the NIC registers at once is registered in pieces of a power of two; submit.c cuts what crosses
 * from one to the next.
 */
#include "verbs.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "wire.h"

#define LEAST_PIECE 4096u /* the smallest page of any machine */

static const char *const region_names[UCCL_EP_REGIONS] = {"heap", "signal words", "mailbox"};

const char *verbs_registration_remedy(int error, uint32_t kind) {
    static const char *const none = "";
    struct rlimit limit;
    if (kind != UCCL_EP_MEMORY_HOST) return none;
    if (error == ENOMEM && !getrlimit(RLIMIT_MEMLOCK, &limit) && limit.rlim_cur != RLIM_INFINITY)
        return ": raise the limit of locked memory (ulimit -l unlimited, or the container's)";
    if (error == ENOMEM) return ": the NIC or the machine has no room for its pages: register less, or take huge pages";
    if (error == EFAULT) return ": the memory is no plain memory (a hole, a device's, or read-only)";
    if (error == EINVAL) return ": the NIC refuses a right, or the length";
    return none;
}

/* What an address and an offset of a dmabuf have to share, and pieces begin at: some kernels have pages of 64 KiB. */
static uint64_t page(void) {
    const long bytes = sysconf(_SC_PAGESIZE);
    return bytes > 0 ? (uint64_t)bytes : LEAST_PIECE;
}

static int access_of(const uccl_ep_device *d, uccl_ep_region region, uint32_t access) {
    int rights = 0;
    if (access & UCCL_EP_ACCESS_REMOTE_WRITE) rights |= IBV_ACCESS_REMOTE_WRITE;
    if (access & UCCL_EP_ACCESS_REMOTE_ATOMIC) rights |= IBV_ACCESS_REMOTE_ATOMIC;
    if (access & UCCL_EP_ACCESS_REMOTE_READ) rights |= IBV_ACCESS_REMOTE_READ;
    /* ibv_reg_mr(3): what others may write, this side must be allowed to. */
    if (access & (UCCL_EP_ACCESS_REMOTE_WRITE | UCCL_EP_ACCESS_REMOTE_ATOMIC | UCCL_EP_ACCESS_LOCAL_WRITE))
        rights |= IBV_ACCESS_LOCAL_WRITE;
    /* Never signal words and mailboxes: what is written there second has to stay (MEM-3). */
    if (d->options.relaxed && region == UCCL_EP_REGION_HEAP) rights |= IBV_ACCESS_RELAXED_ORDERING;
    return rights;
}

/* One piece by one NIC. Otherwise text[] has each try with its errno, and the last errno is returned. */
static int register_piece(const uccl_ep_device *d, const verbs_nic *nic, const uccl_ep_memory *memory, uint64_t begin,
                          uint64_t bytes, uint64_t iova, int rights, struct ibv_mr **mr, char *text) {
    const verbs_library *l = &d->library;
    size_t used = 0;
    int error = 0;
    text[0] = 0;
    if (memory->dmabuf_fd >= 0 && d->options.dmabuf) {
        if (l->ibv_reg_dmabuf_mr) {
            errno = 0;
            *mr = l->ibv_reg_dmabuf_mr(nic->pd, memory->dmabuf_offset + begin, bytes, iova, memory->dmabuf_fd, rights);
            if (*mr) return 0;
            error = errno ? errno : EIO;
            used = (size_t)snprintf(text, VERBS_TEXT,
                                    "as a dmabuf: %s (errno %d; the NIC's driver or the kernel, 5.12 or newer, must "
                                    "take them); ",
                                    strerror(error), error);
        } else {
            used =
                (size_t)snprintf(text, VERBS_TEXT, "as a dmabuf: libibverbs has no ibv_reg_dmabuf_mr (rdma-core 34); ");
        }
    }
    errno = 0;
    void *address = (char *)memory->base + begin;
    /* Device memory by address keeps the address that the dmabuf would have had. */
    if (rights & IBV_ACCESS_RELAXED_ORDERING || iova != (uintptr_t)address)
        *mr = l->ibv_reg_mr_iova2 ? l->ibv_reg_mr_iova2(nic->pd, address, bytes, iova, (unsigned)rights) : NULL;
    else
        *mr = l->ibv_reg_mr(nic->pd, address, bytes, rights);
    if (*mr) return 0;
    error = errno ? errno : EIO;
    snprintf(text + used, VERBS_TEXT - used, "by its address: %s (errno %d%s)%s", strerror(error), error,
             memory->kind == UCCL_EP_MEMORY_CUDA   ? "; needs the module nvidia_peermem"
             : memory->kind == UCCL_EP_MEMORY_ROCM ? "; needs amdgpu with peer memory"
                                                   : "",
             verbs_registration_remedy(error, memory->kind));
    return error;
}

static uccl_ep_status check_memory(const uccl_ep_device *d, uccl_ep_region region, const uccl_ep_memory *memory) {
    if ((uint32_t)region >= UCCL_EP_REGIONS || d->region[region].bytes)
        return verbs_fail(d->host, UCCL_EP_E_INVALID, 0, "region %d is unknown, or registered already", (int)region);
    if (!memory->bytes || (!memory->base && memory->dmabuf_fd < 0) ||
        memory->bytes > UINT64_MAX - (uintptr_t)memory->base)
        return verbs_fail(d->host, UCCL_EP_E_REGISTRATION, 0, "%s: %" PRIu64 " bytes at %p are no memory",
                          region_names[region], memory->bytes, memory->base);
    if (memory->access & UCCL_EP_ACCESS_REMOTE_ATOMIC && !(d->caps.flags & UCCL_EP_CAP_ATOMIC_ADD64))
        return verbs_fail(d->host, UCCL_EP_E_REGISTRATION, 0,
                          "%s: the NIC has no atomics (atomic_cap NONE) and refuses the right to them",
                          region_names[region]);
    return UCCL_EP_OK;
}

uccl_ep_status verbs_region_register(uccl_ep_device *d, uccl_ep_region region, const uccl_ep_memory *memory) {
    uccl_ep_status status = check_memory(d, region, memory);
    if (status != UCCL_EP_OK) return status;
    uint64_t largest = UINT64_MAX;
    for (uint32_t i = 0; i < d->nics; i++)
        if (d->nic[i].found.limits.max_region && d->nic[i].found.limits.max_region < largest)
            largest = d->nic[i].found.limits.max_region;
    uint64_t chunk = 1ull << 62;
    if (largest < memory->bytes)
        for (chunk = page(); chunk * 2 <= largest; chunk *= 2) {
        }
    const uint64_t chunks = (memory->bytes + chunk - 1) / chunk;
    if ((chunk >> 62 == 0 && largest < chunk) || chunks > verbs_this_transport.max_chunks ||
        VERBS_BLOB_HEAD + d->nics * chunks * sizeof(uint32_t) > UCCL_EP_MAX_BLOB_BYTES)
        return verbs_fail(d->host, UCCL_EP_E_REGISTRATION, 0,
                          "%s: %" PRIu64 " bytes, and %s registers %" PRIu64 " at a time: register less",
                          region_names[region], memory->bytes, d->nic[0].found.name, largest);
    verbs_region *r = &d->region[region];
    *r = (verbs_region){.bytes = memory->bytes,
                        .address = (uintptr_t)memory->base,
                        .chunk = chunk,
                        .chunk_log2 = (uint32_t)__builtin_ctzll(chunk),
                        .chunks = (uint32_t)chunks,
                        .access = memory->access,
                        .kind = memory->kind};
    /* ibv_reg_dmabuf_mr(3): address and offset lie alike in their pages. Where they do not, the offset is the address.
     */
    if (memory->dmabuf_fd >= 0 && d->options.dmabuf && (r->address - memory->dmabuf_offset) % page())
        r->address = memory->dmabuf_offset;
    const int rights = access_of(d, region, memory->access);
    for (uint32_t i = 0; i < d->nics; i++) {
        for (uint32_t k = 0; k < chunks; k++) {
            char text[VERBS_TEXT];
            verbs_keys *keys = &r->keys[i];
            const uint64_t begin = k * chunk, left = memory->bytes - begin, bytes = left < chunk ? left : chunk;
            const int error =
                register_piece(d, &d->nic[i], memory, begin, bytes, r->address + begin, rights, &keys->mr[k], text);
            if (error) {
                verbs_region_deregister(d, region);
                return verbs_fail(d->host, UCCL_EP_E_REGISTRATION, error, "%s, %" PRIu64 " bytes with %.32s: %.190s",
                                  region_names[region], memory->bytes, d->nic[i].found.name, text);
            }
            keys->lkey[k] = keys->mr[k]->lkey;
            keys->rkey[k] = keys->mr[k]->rkey;
        }
    }
    return UCCL_EP_OK;
}

void verbs_region_deregister(uccl_ep_device *d, uccl_ep_region region) {
    if ((uint32_t)region >= UCCL_EP_REGIONS) return;
    verbs_region *r = &d->region[region];
    for (uint32_t i = 0; i < d->nics; i++)
        for (uint32_t k = 0; k < r->chunks; k++)
            if (r->keys[i].mr[k]) d->library.ibv_dereg_mr(r->keys[i].mr[k]);
    memset(r, 0, sizeof *r);
}

uccl_ep_status verbs_region_export(uccl_ep_device *d, uccl_ep_region region, void *blob, uint32_t *bytes) {
    union {
        verbs_blob blob;
        uint8_t room[UCCL_EP_MAX_BLOB_BYTES];
    } mine;
    if ((uint32_t)region >= UCCL_EP_REGIONS || !d->region[region].bytes)
        return verbs_fail(d->host, UCCL_EP_E_INVALID, 0, "region %d is not registered", (int)region);
    const verbs_region *r = &d->region[region];
    const uint32_t used = (uint32_t)(VERBS_BLOB_HEAD + d->nics * r->chunks * sizeof(uint32_t));
    if (*bytes < used)
        return verbs_fail(d->host, UCCL_EP_E_INVALID, 0, "region_export: %u bytes of room, %u needed", *bytes, used);
    memset(&mine, 0, sizeof mine);
    mine.blob.magic = VERBS_REGION_MAGIC;
    mine.blob.nics = (uint16_t)d->nics;
    mine.blob.chunks = (uint16_t)r->chunks;
    mine.blob.bytes = r->bytes;
    mine.blob.address = r->address;
    mine.blob.chunk = r->chunk;
    mine.blob.region = (uint32_t)region;
    for (uint32_t i = 0; i < d->nics; i++)
        memcpy(mine.room + VERBS_BLOB_HEAD + (size_t)i * r->chunks * sizeof(uint32_t), r->keys[i].rkey,
               r->chunks * sizeof(uint32_t));
    memcpy(blob, &mine, used);
    *bytes = used;
    return UCCL_EP_OK;
}

uccl_ep_status verbs_region_import(uccl_ep_device *d, uint32_t peer, uccl_ep_region region, const void *blob,
                                   uint32_t bytes) {
    verbs_blob theirs;
    if ((uint32_t)region >= UCCL_EP_REGIONS || peer >= d->peers)
        return verbs_fail(d->host, UCCL_EP_E_RANGE, 0, "region %d of rank %u: there are %u ranks", (int)region, peer,
                          d->peers);
    if (bytes >= VERBS_BLOB_HEAD) memcpy(&theirs, blob, VERBS_BLOB_HEAD);
    if (bytes < VERBS_BLOB_HEAD || theirs.magic != VERBS_REGION_MAGIC || theirs.region != (uint32_t)region ||
        theirs.nics != d->nics || !theirs.chunks || theirs.chunks > verbs_this_transport.max_chunks ||
        bytes != VERBS_BLOB_HEAD + (size_t)theirs.nics * theirs.chunks * sizeof(uint32_t) || !theirs.bytes ||
        !theirs.chunk || theirs.chunk & (theirs.chunk - 1) || theirs.chunk < LEAST_PIECE || theirs.chunk > 1ull << 62 ||
        (theirs.bytes - 1) / theirs.chunk != theirs.chunks - 1u || theirs.bytes > UINT64_MAX - theirs.address)
        return verbs_fail(d->host, UCCL_EP_E_INVALID, 0,
                          "rank %u sent %u bytes that are no region of this backend, or of another number of NICs",
                          peer, bytes);
    if (!d->remote[region]) d->remote[region] = calloc(d->peers, sizeof **d->remote);
    const size_t keys = (size_t)theirs.nics * theirs.chunks;
    uint32_t *rkeys = malloc(keys * sizeof *rkeys);
    if (!d->remote[region] || !rkeys) {
        free(rkeys);
        return verbs_fail(d->host, UCCL_EP_E_NO_MEMORY, ENOMEM, "no memory for the regions of %u peers", d->peers);
    }
    memcpy(rkeys, (const char *)blob + VERBS_BLOB_HEAD, keys * sizeof *rkeys);
    verbs_remote *remote = &d->remote[region][peer];
    free(remote->rkeys);
    *remote = (verbs_remote){.bytes = theirs.bytes,
                             .address = theirs.address,
                             .chunk = theirs.chunk,
                             .chunk_log2 = (uint32_t)__builtin_ctzll(theirs.chunk),
                             .chunks = theirs.chunks,
                             .rkeys = rkeys};
    return UCCL_EP_OK;
}
