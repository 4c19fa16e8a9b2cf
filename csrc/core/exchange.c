/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange.c: one collective step. Every rank says whether it got so far; if one did not, all of them fail with its
 * reason.
 */
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

/* What travels before the payload. Fixed layout: all ranks run the same library version, which `magic` makes sure of.
 */
typedef struct header {
    uint32_t magic;
    uint32_t bytes;
    int32_t status;
    char step[20];
    char clause[8];
    char text[256];
} header;

#define EXCHANGE_MAGIC                                                                                                 \
    (0x75636570u ^ (UCCL_EP_VERSION_MAJOR << 16 | UCCL_EP_VERSION_MINOR << 8 | UCCL_EP_VERSION_PATCH))

/* What a rank sees of another's trouble, and not the trouble. */
static bool symptom(int32_t status) {
    return status == UCCL_EP_E_DEADLINE || status == UCCL_EP_E_PEER_LOST || status == UCCL_EP_E_BOOTSTRAP;
}

uccl_ep_status exchange(uccl_ep_comm *comm, const uccl_ep_bootstrap *bootstrap, const char *step, uccl_ep_status mine,
                        const void *payload, uint32_t bytes, void *all) {
    const uint32_t stride = (uint32_t)sizeof(header) + (bytes + 7u) / 8u * 8u;
    const uint32_t size = bootstrap->size;
    char *send = calloc(1, stride);
    char *received = calloc(size, stride);
    if (!send || !received) {
        /* Nobody can be told without memory to tell it with: the others run into the bootstrap's deadline. */
        free(send);
        free(received);
        return fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory to exchange %u bytes with %u ranks", stride, size);
    }
    header *h = (header *)send;
    h->magic = EXCHANGE_MAGIC;
    h->bytes = bytes;
    h->status = mine;
    snprintf(h->step, sizeof h->step, "%s", step);
    if (mine != UCCL_EP_OK) {
        snprintf(h->clause, sizeof h->clause, "%s", uccl_ep_last_error()->clause);
        snprintf(h->text, sizeof h->text, "%s", uccl_ep_last_error()->text);
    } else if (bytes) {
        memcpy(send + sizeof(header), payload, bytes);
    }
    char why[256] = "";
    uccl_ep_status status = mine;
    if (bootstrap->allgather(bootstrap->context, send, stride, received, comm->config.bootstrap_timeout_ns, why)) {
        why[sizeof why - 1] = 0;
        if (mine == UCCL_EP_OK)
            status =
                fail_local(UCCL_EP_E_BOOTSTRAP, "ERR-1", "the ranks did not come together for '%s': %s", step, why);
    } else {
        const header *told = NULL; /* the failure to tell of: a cause before its symptoms */
        uint32_t culprit = 0;
        for (uint32_t rank = 0; rank < size; rank++) {
            header *r = (header *)(received + (size_t)rank * stride);
            r->step[sizeof r->step - 1] = r->text[sizeof r->text - 1] = r->clause[sizeof r->clause - 1] = 0;
            if (r->magic != EXCHANGE_MAGIC || r->bytes != bytes || strcmp(r->step, h->step)) {
                r->status = UCCL_EP_E_BOOTSTRAP;
                snprintf(r->clause, sizeof r->clause, "ERR-1");
                snprintf(r->text, sizeof r->text, "at another step than '%s', or another version of uccl_ep", step);
            }
            if (r->status == UCCL_EP_OK) {
                if (bytes && all) memcpy((char *)all + (size_t)rank * bytes, r + 1, bytes); /* none: no memory here */
            } else if (!told || (symptom(told->status) && !symptom(r->status))) {
                told = r;
                culprit = rank;
            }
        }
        if (told && (mine == UCCL_EP_OK || (symptom(mine) && !symptom(told->status)))) {
            const uccl_ep_status known = checked_status((uccl_ep_status)told->status);
            status = fail_local(known == told->status ? known : UCCL_EP_E_BOOTSTRAP, told->clause, "rank %u: %.230s",
                                culprit, told->text);
            last_error_slot()->peer = culprit;
        }
    }
    free(send);
    free(received);
    return status;
}
