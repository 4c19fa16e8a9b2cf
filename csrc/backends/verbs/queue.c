/* SPDX-License-Identifier: Apache-2.0
 *
 * queue.c: see queue.h.
 */
#include "queue.h"

#include <errno.h>
#include <sys/mman.h>

void *verbs_reserve(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

void verbs_release(void *memory, size_t bytes) {
    if (memory) munmap(memory, bytes);
}

uccl_ep_status verbs_queue_open(verbs_queue *q, uccl_ep_device *d, verbs_nic *nic, uint32_t entries,
                                uint32_t outstanding) {
    q->device = d;
    q->nic = nic;
    q->found = verbs_reserve((size_t)outstanding * sizeof *q->found);
    if (!q->found) return verbs_fail(d->host, UCCL_EP_E_NO_MEMORY, errno, "no memory for %u completions", outstanding);
    q->found_room = outstanding;
    errno = 0;
    q->cq = d->library.ibv_create_cq(nic->context, (int)entries, q, NULL, 0);
    if (q->cq) return UCCL_EP_OK;
    return verbs_fail(d->host, errno == ENOMEM ? UCCL_EP_E_NO_MEMORY : UCCL_EP_E_NIC, errno,
                      "%s: no completion queue of %u entries: %s (errno %d)%s", nic->found.name, entries,
                      strerror(errno), errno, errno == ENOMEM ? ": raise ulimit -l, or lower max_inflight" : "");
}

void verbs_queue_close(verbs_queue *q) {
    if (q->cq) q->device->library.ibv_destroy_cq(q->cq);
    verbs_release(q->found, (size_t)q->found_room * sizeof *q->found);
}

void verbs_queue_forget(verbs_queue *q, uint32_t peer) {
    uint32_t to = q->found_head;
    for (uint32_t from = q->found_head; from != q->found_tail; from++)
        if (q->found[from].peer != peer) q->found[to++] = q->found[from];
    q->found_tail = to;
}

uccl_ep_status verbs_queue_broken(const verbs_queue *q, int error) {
    return verbs_fail(q->device->host, UCCL_EP_E_NIC, error, "%s: its completion queue cannot be read (%d)",
                      q->nic->found.name, error);
}

uccl_ep_status verbs_queue_lost(const verbs_queue *q, const char *what) {
    return verbs_fail(q->device->host, UCCL_EP_E_NIC, 0, "%.40s: %s", q->nic->found.name, what);
}
