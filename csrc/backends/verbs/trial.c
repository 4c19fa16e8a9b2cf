/* SPDX-License-Identifier: Apache-2.0
 *
 * trial.c: does a fetch-and-add add?
 *
 * A vendor's library may put the addend where its NIC does not look: what is added is what lies there, and the
 * completion is one of success (libbnxt_re before rdma-core 47). No version tells: distributions repair old releases,
 * and vendors have libraries of their own. So one is carried out, by the functions of an endpoint, on a queue pair that
 * is connected to itself and in memory of this device's, before adds are promised.
 */
#include "rc.h"

#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#define PATIENCE_NS 10000000000ull /* longer than all retries of a request: it ends by itself, well or not */
#define WORD 64u                   /* within the scratch page, whose first bytes take what was there before */

/* A queue pair of this endpoint to this endpoint. */
static uccl_ep_status join(uccl_ep_endpoint *e) {
    uint8_t blob[UCCL_EP_MAX_BLOB_BYTES];
    uint32_t bytes = sizeof blob, more;
    uccl_ep_status status = verbs_region_export(e->device, UCCL_EP_REGION_SIGNALS, blob, &bytes);
    if (status == UCCL_EP_OK) status = verbs_region_import(e->device, 0, UCCL_EP_REGION_SIGNALS, blob, bytes);
    bytes = sizeof blob;
    if (status == UCCL_EP_OK) status = verbs_endpoint_address(e, blob, &bytes);
    more = (uint32_t)sizeof blob - bytes;
    if (status == UCCL_EP_OK) status = verbs_peer_address(e, 0, blob + bytes, &more);
    return status == UCCL_EP_OK ? verbs_connect(e, 0, blob, bytes + more) : status;
}

/* Add to the word and wait for the end of it. text[] says what went wrong with it, if something did. */
static uccl_ep_status add(uccl_ep_endpoint *e, uint64_t value, char *text) {
    const uccl_ep_host *host = e->device->host;
    const uint64_t end = host->now_ns(host->context) + PATIENCE_NS;
    const uccl_ep_operation operation = {.kind = UCCL_EP_OPERATION_ADD64,
                                         .flags = UCCL_EP_OPERATION_SIGNALLED,
                                         .remote_region = UCCL_EP_REGION_SIGNALS,
                                         .value = value};
    uccl_ep_completion c;
    uint32_t accepted;
    const uccl_ep_status status = verbs_submit(e, 0, &operation, 1, 0, &accepted);
    if (status != UCCL_EP_OK) return status;
    int32_t n;
    while (!(n = verbs_poll(e, &c, 1)) && host->now_ns(host->context) < end) sched_yield();
    if (n < 0) return (uccl_ep_status)n;
    if (!n)
        snprintf(text, VERBS_TEXT, "no completion in %" PRIu64 " s", (uint64_t)(PATIENCE_NS / 1000000000));
    else if (c.status != UCCL_EP_OK)
        verbs_describe(e->device, c.status, c.vendor_code, text, VERBS_TEXT);
    return UCCL_EP_OK;
}

/* By the NIC of this number. The second one brings what the first one left: so the NIC itself is asked, whatever the
 * CPU sees by then. */
static uccl_ep_status try_one(uccl_ep_device *d, uint32_t nic, char *text) {
    const uint64_t before = 0x5bd1e995ull << 20, addend = 0x1000000000001ull;
    uint64_t *word = (uint64_t *)(void *)((char *)d->nic[0].scratch + WORD);
    const volatile uint64_t *old = d->nic[nic].scratch;
    const uccl_ep_endpoint_config config = {
        .size = sizeof config, .index = nic, .peers = 1, .inflight_peer = 1, .inflight = 1};
    uccl_ep_endpoint *e;
    __atomic_store_n(word, before, __ATOMIC_RELEASE);
    uccl_ep_status status = verbs_endpoint_open(d, &config, &e);
    if (status != UCCL_EP_OK) return status;
    status = join(e);
    if (status == UCCL_EP_OK) status = add(e, addend, text);
    if (status == UCCL_EP_OK && !text[0]) status = add(e, addend, text);
    if (status == UCCL_EP_OK && !text[0] && *old != before + addend)
        snprintf(text, VERBS_TEXT, "%#" PRIx64 " was to be added to %#" PRIx64 ", and there was %#" PRIx64, addend,
                 before, *old);
    verbs_endpoint_close(e);
    return status;
}

uccl_ep_status verbs_try_adds(uccl_ep_device *d, char *text) {
    const uccl_ep_memory memory = {.size = sizeof memory,
                                   .kind = UCCL_EP_MEMORY_HOST,
                                   .base = (char *)d->nic[0].scratch + WORD,
                                   .bytes = sizeof(uint64_t),
                                   .dmabuf_fd = -1,
                                   .access = UCCL_EP_ACCESS_REMOTE_ATOMIC};
    text[0] = 0;
    uccl_ep_status status = verbs_region_register(d, UCCL_EP_REGION_SIGNALS, &memory);
    if (status != UCCL_EP_OK) return status;
    for (uint32_t i = 0; i < d->nics && status == UCCL_EP_OK && !text[0]; i++) {
        char why[VERBS_TEXT] = "";
        status = try_one(d, i, why);
        if (why[0]) snprintf(text, VERBS_TEXT, "%.32s: %.180s", d->nic[i].found.name, why);
    }
    verbs_regions_forget(d);
    return status;
}
