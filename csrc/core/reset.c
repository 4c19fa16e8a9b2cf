/* SPDX-License-Identifier: Apache-2.0
 *
 * reset.c: a new incarnation of what failed (ERR-6).
 *
 * All ranks take part. First everything that is posted ends, one way or the other; then, between two barriers in which
 * nothing is in flight anywhere, failed connections are made anew and all signal words start at zero again; then the
 * proxies go on.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "internal.h"

/*
 * Let everything end: healthy peers complete, failing ones let go or run into the deadline. The proxies go on passing,
 * here and until all ranks have come so far: another rank's commands may need this one's return words.
 */
static uccl_ep_status finish(uccl_ep_comm *comm) {
    const uint64_t deadline = deadline_of(comm, comm->config.peer_timeout_ns * 2 + comm->config.timeout_ns);
    uccl_ep_status status = UCCL_EP_OK;
    backoff b = {0};
    for (uint32_t i = 0; i < comm->config.proxies; i++) atomic_store(&comm->proxies[i].idle, false);
    atomic_store(&comm->quiescing, true);
    for (bool idle = false; !idle && status == UCCL_EP_OK;) {
        idle = true;
        for (uint32_t i = 0; i < comm->config.proxies; i++)
            idle &= atomic_load_explicit(&comm->proxies[i].idle, memory_order_acquire);
        if (idle) break;
        if (atomic_load(&comm->aborted))
            status = check_usable(comm);
        else if (comm_now(comm) >= deadline)
            status = fail_local(UCCL_EP_E_DEADLINE, "ERR-6", "what was posted before the reset did not end in time");
        else
            backoff_wait(comm, &b);
    }
    atomic_store(&comm->quiescing, false);
    return status;
}

/* A channel that had closed starts behind all tickets that were given out. */
static uccl_ep_status reopen(uccl_ep_comm *comm, struct channel *c) {
    if (!c->closed) return UCCL_EP_OK;
    uint64_t next;
    const uccl_ep_status status = channel_rebase(comm, c, &next);
    if (status != UCCL_EP_OK) return status;
    uccl_ep_ring_format(c->slots, comm->config.ring_log2, next);
    c->taken = c->source = c->complete = next;
    *c->gave_up = 0;
    c->counters->tail = c->counters->source = next;
    __atomic_store_n(&c->counters->complete, next, __ATOMIC_RELEASE);
    return UCCL_EP_OK;
}

static bool down(const uccl_ep_comm *comm, uint32_t target) {
    for (uint32_t i = 0; i < comm->config.proxies; i++)
        if (comm->proxies[i].peers[target].state != PEER_UP) return true;
    return false;
}

static uccl_ep_status disconnect_pair(uccl_ep_comm *comm, uint32_t target) {
    const uint64_t deadline = deadline_of(comm, comm->config.peer_timeout_ns);
    for (uint32_t i = 0; i < comm->config.proxies; i++) {
        struct proxy *p = &comm->proxies[i];
        backoff b = {0};
        for (;;) {
            if (p->peers[target].state == PEER_DOWN) break; /* it was disconnected when it failed */
            host_fail_clear();
            const uccl_ep_status status = comm->backend->disconnect(p->endpoint, target);
            if (status == UCCL_EP_OK) break;
            if (status != UCCL_EP_IN_PROGRESS)
                return fail_local(checked_status(status), "ERR-6", "disconnecting from rank %u failed: %.150s", target,
                                  host_fail_text());
            if (comm_now(comm) >= deadline)
                return fail_local(UCCL_EP_E_DEADLINE, "ERR-6", "the NIC did not let go of rank %u", target);
            backoff_pause(comm, &b);
        }
    }
    return UCCL_EP_OK;
}

uccl_ep_status uccl_ep_reset(uccl_ep_comm *comm, const uccl_ep_bootstrap *bootstrap) {
    uccl_ep_status status = check_usable(comm);
    if (status != UCCL_EP_OK) return status;
    if (!bootstrap || bootstrap->size != comm->size || bootstrap->rank != comm->rank)
        return fail_local(UCCL_EP_E_INVALID, "ERR-6", "reset is collective over the ranks of create");
    const uint32_t size = comm->size, proxies = comm->config.proxies;
    bool *mine = calloc(size, sizeof *mine), *wanted = calloc(size, sizeof *wanted);
    bool *all = calloc((size_t)size * size, sizeof *all);
    struct contacts contacts = {0};
    if (!mine || !wanted || !all) status = fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory to reset %u ranks", size);

    for (uint32_t i = 0; i < proxies && status == UCCL_EP_OK; i++)
        if (comm->proxies[i].endpoint_broken)
            status = fail_local(UCCL_EP_E_NIC, "ERR-6",
                                "the endpoint of proxy %u is closed: only a new communicator helps", i);
    if (status == UCCL_EP_OK) status = finish(comm);
    /* A caller that drives progress now waits in the bootstrap; others' commands may still need its return words. */
    if (status == UCCL_EP_OK && comm->config.progress == UCCL_EP_PROGRESS_CALLER && !comm->config.idle)
        status = start_threads(comm);
    status = exchange(comm, bootstrap, "reset finish", status, NULL, 0, NULL);
    stop_proxies(comm);

    /* No command is in flight from here to the last exchange. A pair is made anew if either end wants it. */
    if (status == UCCL_EP_OK) {
        for (uint32_t target = 0; target < size; target++) mine[target] = down(comm, target);
        status = exchange(comm, bootstrap, "reset", staging_drain(comm), mine, size * (uint32_t)sizeof *mine, all);
    }
    if (status == UCCL_EP_OK) {
        for (uint32_t target = 0; target < size; target++)
            wanted[target] = mine[target] || all[(size_t)target * size + comm->rank];
        for (uint32_t target = 0; target < size && status == UCCL_EP_OK; target++)
            if (wanted[target]) status = disconnect_pair(comm, target);
        status = contacts_gather(comm, bootstrap, "reset addresses", status, &contacts);
    }
    if (status == UCCL_EP_OK) {
        /* All have disconnected, nobody has connected: nothing writes into the mailboxes of these pairs. */
        for (uint32_t target = 0; target < size; target++) {
            for (uint32_t i = 0; i < proxies && wanted[target]; i++) {
                struct proxy *p = &comm->proxies[i];
                peer_let_go(p, target);
                struct peer *q = &p->peers[target];
                q->seq_issued = q->seq_completed = q->seq_read = q->seq_visible = (uint32_t)comm->config.first_sequence;
                q->reading = false;
                mailbox_reset(p, target);
            }
        }
        status = connect_peers(comm, &contacts, wanted);
        if (status == UCCL_EP_OK) status = import_peers(comm, &contacts, wanted);
        for (uint32_t i = 0; i < proxies && status == UCCL_EP_OK; i++) {
            struct proxy *p = &comm->proxies[i];
            if (p->sums) madvise(p->sums, (size_t)size * p->signals * sizeof *p->sums, MADV_DONTNEED); /* all zero */
            for (uint32_t target = 0; target < size; target++) {
                struct peer *q = &p->peers[target];
                q->open = UINT64_MAX;
                if (!wanted[target]) continue;
                q->incarnation++;
                q->failure = 0;
                q->state = PEER_UP;
                atomic_fetch_and(&comm->departed[target >> 6], ~(1ull << (target & 63)));
            }
            for (uint32_t k = 0; k < p->channels && status == UCCL_EP_OK; k++) status = reopen(comm, &p->channel[k]);
        }
        if (status == UCCL_EP_OK) {
            failures_clear(comm);
            if (comm->device_signals)
                status = device_signals_zero(comm);
            else if (!FAULT(words_kept))
                memset(comm->signal_words, 0, comm->signal_bytes);
        }
        status = exchange(comm, bootstrap, "reset connect", status, NULL, 0, NULL);
    }
    if (status == UCCL_EP_OK) status = exchange(comm, bootstrap, "reset start", start_proxies(comm), NULL, 0, NULL);
    free(mine);
    free(wanted);
    free(all);
    contacts_free(&contacts);
    if (status != UCCL_EP_OK) {
        /* Half a reset is no state to go on from. */
        const uccl_ep_error kept = *uccl_ep_last_error();
        uccl_ep_abort(comm, "a reset failed");
        fail_with_record(&kept);
    }
    return status;
}
