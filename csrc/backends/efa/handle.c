/* SPDX-License-Identifier: Apache-2.0
 *
 * handle.c: address handles, one for each NIC that peers are on, whichever endpoints of this NIC use it.
 *
 * A NIC has one number for a GID and a protection domain, however many handles are made of them. Whoever destroys one
 * of several ends all of them unless the kernel counts, and what was posted through the others is aborted (libfabric
 * pull request 11013; Linux counts since efa_ah_cache). So it is counted here.
 *
 * Threads: the endpoints of a device; connecting and disconnecting take a lock, posting does not come here.
 */
#include "efa.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct efa_handle {
    struct efa_handle *next;
    struct ibv_ah *ah;
    uint32_t users;
    uint16_t number;
    uint8_t gid[16];
};

static uccl_ep_status make(const uccl_ep_endpoint *e, uint32_t peer, struct efa_handle *h) {
    const verbs_library *l = &e->device->library;
    const verbs_nic *nic = e->nic;
    struct ibv_ah_attr a = {.is_global = 1, .port_num = nic->found.port.number};
    struct efadv_ah_attr own = {0};
    memcpy(a.grh.dgid.raw, h->gid, sizeof a.grh.dgid.raw);
    errno = 0;
    h->ah = l->ibv_create_ah(nic->pd, &a);
    if (!h->ah)
        return verbs_fail(e->device->host, errno == ENOMEM ? UCCL_EP_E_NO_MEMORY : UCCL_EP_E_NIC, errno,
                          "%.32s: no address handle for rank %u: %s (errno %d)%s", nic->found.name, peer,
                          strerror(errno), errno, errno == ENOMEM ? ": the NIC has no room for more of them" : "");
    const int error = ((efadv_query_ah_function)l->own[EFA_QUERY_AH])(h->ah, &own, sizeof own);
    if (!error) {
        h->number = own.ahn;
        return UCCL_EP_OK;
    }
    l->ibv_destroy_ah(h->ah);
    return verbs_fail(e->device->host, UCCL_EP_E_NIC, error, "%.32s: the address handle of rank %u has no number: %s",
                      nic->found.name, peer, strerror(error));
}

static uccl_ep_status take(const uccl_ep_endpoint *e, uint32_t peer, struct efa_handle **out) {
    const efa_peer *p = &e->peer[peer];
    struct efa_handle *h = *out = e->nic->handles;
    while (h && memcmp(h->gid, p->gid, sizeof h->gid)) h = h->next;
    if (!h) {
        h = calloc(1, sizeof *h);
        if (!h) return verbs_fail(e->device->host, UCCL_EP_E_NO_MEMORY, ENOMEM, "no memory for rank %u", peer);
        memcpy(h->gid, p->gid, sizeof h->gid);
        const uccl_ep_status status = make(e, peer, h);
        if (status != UCCL_EP_OK) {
            free(h);
            return status;
        }
        h->next = e->nic->handles;
        e->nic->handles = h;
    }
    h->users++;
    *out = h;
    return UCCL_EP_OK;
}

uccl_ep_status efa_make_handle(uccl_ep_endpoint *e, uint32_t peer) {
    efa_peer *p = &e->peer[peer];
    pthread_mutex_lock(&e->nic->handles_lock);
    const uccl_ep_status status = take(e, peer, &p->shared);
    pthread_mutex_unlock(&e->nic->handles_lock);
    if (status != UCCL_EP_OK) {
        p->shared = NULL;
        return status;
    }
    p->ah = p->shared->ah;
    p->handle = p->shared->number;
    p->next = e->by_handle[p->handle];
    e->by_handle[p->handle] = (uint16_t)(peer + 1);
    return UCCL_EP_OK;
}

void efa_drop_handle(uccl_ep_endpoint *e, uint32_t peer) {
    efa_peer *p = &e->peer[peer];
    struct efa_handle *h = p->shared;
    if (!h) return;
    uint16_t *at = &e->by_handle[p->handle];
    while (*at && *at != peer + 1) at = &e->peer[*at - 1].next;
    if (*at) *at = p->next;
    p->next = 0;
    p->ah = NULL;
    p->shared = NULL;
    p->state = EFA_IDLE;
    pthread_mutex_lock(&e->nic->handles_lock);
    if (!--h->users) {
        struct efa_handle **from = &e->nic->handles;
        while (*from != h) from = &(*from)->next;
        *from = h->next;
        e->device->library.ibv_destroy_ah(h->ah);
        free(h);
    }
    pthread_mutex_unlock(&e->nic->handles_lock);
}
