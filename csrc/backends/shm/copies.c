/* SPDX-License-Identifier: Apache-2.0
 *
 * Heaps in a GPU's memory: a write is a copy on a queue of the GPU's driver, which carries out all of them in order and
 * on its own time. What a write promises holds once the mark behind it is done: then its completion is given, and not
 * before (QUI-1); and an add, which the CPU does in host memory, waits for the writes to its peer that came before it
 * (SIG-2).
 *
 * `works` is all that was accepted and is not done, in order. A work is done once the mark that it waits for is, and
 * all works before it are. An add with nothing before it to its peer does not wait for the others'.
 *
 * Marks are few. Where none is left copies go on without, and the next one covers them all.
 */
#include "shm.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

typedef struct shm_work {
    uint64_t mark;
    uint64_t cookie, value;
    unsigned char *there, *here;
    uint32_t peer, length;
    uint8_t kind;
    bool copy;      /* on the queue: nothing is left to do */
    bool signalled; /* and not dropped */
    bool dropped;
} shm_work;

typedef struct shm_copied_peer {
    uint64_t mark;    /* of the latest copy */
    uint32_t pending; /* works */
    uint32_t writes;  /* of those, writes that are the CPU's */
} shm_copied_peer;

struct shm_copies {
    uccl_ep_endpoint *endpoint;
    const uccl_ep_accelerator *accelerator;
    uccl_ep_copy_queue *queue;
    uint64_t given, done; /* marks; the first is 1 */
    bool unmarked;        /* copies were started since the last mark: the next one covers them */
    uint64_t head, tail, mask;
    shm_work *works;
    shm_copied_peer peers[];
};

uccl_ep_status shm_copies_open(uccl_ep_endpoint *endpoint, shm_copies **out) {
    const uccl_ep_device *device = endpoint->device;
    const uccl_ep_host *host = device->host;
    shm_copies *copies = calloc(1, sizeof *copies + device->peers * sizeof copies->peers[0]);
    if (copies) copies->works = calloc(endpoint->mask + 1, sizeof *copies->works);
    if (!copies || !copies->works) {
        free(copies);
        return shm_fail(host, UCCL_EP_E_NO_MEMORY, ENOMEM, "no memory for the copies of an endpoint");
    }
    copies->endpoint = endpoint;
    copies->accelerator = shm_accelerator(host);
    copies->mask = endpoint->mask;
    const uccl_ep_status status = copies->accelerator->queue_open(host->gpu, &copies->queue);
    if (status != UCCL_EP_OK) {
        free(copies->works);
        free(copies);
        return shm_accelerator_failed(host, status, "a queue for copies");
    }
    *out = copies;
    return UCCL_EP_OK;
}

void shm_copies_close(shm_copies *copies) {
    copies->accelerator->queue_close(copies->queue);
    free(copies->works);
    free(copies);
}

uint64_t shm_copies_pending(const shm_copies *copies) {
    return copies->tail - copies->head;
}

bool shm_copies_must_wait(const shm_copies *copies, uint32_t peer) {
    return copies->peers[peer].writes != 0;
}

static bool cpu_writes(const shm_work *work) {
    return !work->copy && work->kind != UCCL_EP_OPERATION_ADD64;
}

static void append(shm_copies *copies, const shm_work *work) {
    shm_copied_peer *at = &copies->peers[work->peer];
    copies->works[copies->tail++ & copies->mask] = *work;
    at->pending++;
    at->writes += cpu_writes(work);
}

uccl_ep_status shm_copies_start(shm_copies *copies, uint32_t peer, const uccl_ep_operation *operation,
                                unsigned char *to, const unsigned char *from, uint64_t length) {
    if (length) {
        const uccl_ep_status status = copies->accelerator->copy_start(copies->queue, to, from, length);
        if (status != UCCL_EP_OK)
            return shm_accelerator_failed(copies->endpoint->device->host, status, "starting a copy");
        copies->unmarked = true;
        copies->peers[peer].mark = copies->given + 1;
    }
    append(copies, &(shm_work){.mark = copies->peers[peer].mark,
                               .cookie = operation->cookie,
                               .peer = peer,
                               .copy = true,
                               .signalled = (operation->flags & UCCL_EP_OPERATION_SIGNALLED) != 0});
    return UCCL_EP_OK;
}

void shm_copies_then(shm_copies *copies, uint32_t peer, const uccl_ep_operation *operation, unsigned char *there,
                     unsigned char *here, uint64_t length) {
    const bool signalled = (operation->flags & UCCL_EP_OPERATION_SIGNALLED) != 0;
    const shm_copied_peer *at = &copies->peers[peer];
    if (at->pending == 0) {
        shm_carry_out(operation->kind, there, here, length, operation->value);
        if (signalled) shm_complete(copies->endpoint, peer, operation->cookie);
        return;
    }
    append(copies, &(shm_work){.mark = at->mark,
                               .cookie = operation->cookie,
                               .value = operation->value,
                               .there = there,
                               .here = here,
                               .peer = peer,
                               .length = (uint32_t)length,
                               .kind = operation->kind,
                               .signalled = signalled});
}

/* E_AGAIN is no error: what is done makes room. */
static uccl_ep_status give_mark(shm_copies *copies) {
    uint64_t number;
    const uccl_ep_host *host = copies->endpoint->device->host;
    const uccl_ep_status status = copies->accelerator->mark(copies->queue, &number);
    if (status == UCCL_EP_E_AGAIN) return UCCL_EP_OK;
    if (status != UCCL_EP_OK) return shm_accelerator_failed(host, status, "marking copies");
    if (number != copies->given + 1)
        return shm_fail(host, UCCL_EP_E_SYSTEM, 0, "the accelerator %s counts marks wrongly",
                        copies->accelerator->name);
    copies->given = number;
    copies->unmarked = false;
    return UCCL_EP_OK;
}

uccl_ep_status shm_copies_advance(shm_copies *copies) {
    uccl_ep_status status = UCCL_EP_OK;
    if (copies->unmarked) status = give_mark(copies);
    if (status == UCCL_EP_OK && copies->done != copies->given) {
        status = copies->accelerator->marks_done(copies->queue, &copies->done);
        if (status != UCCL_EP_OK) return shm_accelerator_failed(copies->endpoint->device->host, status, "copying");
    }
    for (; copies->head != copies->tail; copies->head++) {
        const shm_work *work = &copies->works[copies->head & copies->mask];
        if (work->mark > copies->done) break;
        shm_copied_peer *at = &copies->peers[work->peer];
        at->pending--;
        at->writes -= cpu_writes(work);
        if (work->dropped) continue;
        if (!work->copy) shm_carry_out(work->kind, work->there, work->here, work->length, work->value);
        if (work->signalled) shm_complete(copies->endpoint, work->peer, work->cookie);
    }
    return status;
}

bool shm_copies_drop(shm_copies *copies, uint32_t peer) {
    for (uint64_t i = copies->head; i != copies->tail && copies->peers[peer].pending; i++) {
        shm_work *work = &copies->works[i & copies->mask];
        if (work->peer == peer) work->dropped = true;
    }
    return copies->peers[peer].pending == 0;
}
