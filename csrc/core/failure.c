/* SPDX-License-Identifier: Apache-2.0
 *
 * failure.c: records of failures, closed (channel, target) pairs, lost ranks, and what waits make of them.
 *
 * The order that ERR-2 wants: record, then closure, then counters.failed, then (in retire.c) the counter that passes
 * the ticket.
 */
#include <stdio.h>

#include "internal.h"

void fill_error(const struct proxy *p, uccl_ep_error *error, int32_t status, const char *clause, uint32_t target) {
    *error = (uccl_ep_error){.size = sizeof *error,
                             .status = status,
                             .rank = p->comm->rank,
                             .peer = target,
                             .channel = UCCL_EP_NO_CHANNEL,
                             .ticket = UCCL_EP_NO_TICKET,
                             .time_ns = p->now_ns,
                             .incarnation = target < p->size ? p->peers[target].incarnation : 0};
    snprintf(error->clause, sizeof error->clause, "%s", clause);
    snprintf(error->nic, sizeof error->nic, "%s", p->comm->device_info.name);
}

/* Keeps a record; returns its number + 1, which is 0 if there was no room. */
uint32_t record_failure(uccl_ep_comm *comm, const uccl_ep_error *error) {
    pthread_mutex_lock(&comm->failure_lock);
    uint32_t number = 0;
    if (comm->record_count < MAX_RECORDS && !FAULT(record_missing)) {
        comm->records[comm->record_count] = *error;
        number = ++comm->record_count;
    } else {
        comm->record_dropped++;
    }
    pthread_mutex_unlock(&comm->failure_lock);
    if (comm->config.log && error->status != UCCL_EP_E_ABORTED)
        comm->config.log(comm->config.log_context, UCCL_EP_LOG_WARN, error->text);
    return number;
}

/* The lowest ticket that a wait has to report on this channel. */
static uint64_t lowest_failed(const uccl_ep_comm *comm, uint32_t channel) {
    uint64_t lowest = UCCL_EP_NO_TICKET;
    for (uint32_t target = 0; target < comm->size; target++) {
        const closure *k = &comm->closures[(size_t)channel * comm->size + target];
        if (k->lowest && k->lowest - 1 < lowest) lowest = k->lowest - 1;
    }
    const uint64_t closed = comm->channel_of[channel]->closed_ticket;
    return closed && closed - 1 < lowest ? closed - 1 : lowest;
}

void publish_failed(uccl_ep_comm *comm, uint32_t channel) {
    __atomic_store_n(&comm->channel_of[channel]->counters->failed, lowest_failed(comm, channel), __ATOMIC_RELEASE);
}

/* Close (channel, target), and if `ticket` is one, let the waits that cover it fail. `channel` is the proxy's. */
void close_target(struct proxy *p, uint32_t channel_of_proxy, uint32_t target, uint64_t ticket, uint32_t record) {
    uccl_ep_comm *comm = p->comm;
    struct channel *c = &p->channel[channel_of_proxy];
    p->peers[target].open &= ~(1ull << channel_of_proxy);
    pthread_mutex_lock(&comm->failure_lock);
    closure *k = &comm->closures[(size_t)c->index * comm->size + target];
    if (!k->record) k->record = record;
    if (ticket != UCCL_EP_NO_TICKET) {
        atomic_fetch_add_explicit(&c->failures, 1, memory_order_relaxed);
        if (ticket >= k->acknowledged && (!k->lowest || ticket + 1 < k->lowest) && !FAULT(error_swallowed)) {
            k->lowest = ticket + 1;
            /* Only ever lower here, so no scan: acknowledging is what scans. */
            uccl_ep_ring_counters *counters = c->counters;
            if (ticket < counters->failed) __atomic_store_n(&counters->failed, ticket, __ATOMIC_RELEASE);
        }
    }
    atomic_store_explicit(&k->closed, 1, memory_order_release);
    pthread_mutex_unlock(&comm->failure_lock);
}

void close_channel(struct proxy *p, struct channel *c, uint64_t ticket, uint32_t record) {
    uccl_ep_comm *comm = p->comm;
    pthread_mutex_lock(&comm->failure_lock);
    c->closed = true;
    c->closed_record = record;
    if (ticket != UCCL_EP_NO_TICKET) {
        c->closed_ticket = ticket + 1;
        atomic_fetch_add_explicit(&c->failures, 1, memory_order_relaxed);
    }
    publish_failed(comm, c->index);
    pthread_mutex_unlock(&comm->failure_lock);
}

/* Tell it. Whoever sees the status has to find `tail` and `failed` as they stay: what was taken before still ends well.
 */
void publish_closed(struct proxy *p, struct channel *c) {
    pthread_mutex_lock(&p->comm->failure_lock);
    if (c->counters->status == UCCL_EP_CHANNEL_OPEN)
        __atomic_store_n(&c->counters->status, UCCL_EP_CHANNEL_CLOSED, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&p->comm->failure_lock);
}

void mark_lost(uccl_ep_comm *comm, uint32_t rank) {
    atomic_fetch_or_explicit(&comm->lost[rank >> 6], 1ull << (rank & 63), memory_order_acq_rel);
    publish_lost(comm);
}

void publish_lost(uccl_ep_comm *comm) {
    uint64_t n = 0;
    pthread_mutex_lock(&comm->failure_lock); /* of two counts the later one stays */
    for (uint32_t w = 0; w < (comm->size + 63) / 64; w++) {
        const uint64_t gone = atomic_load_explicit(&comm->lost[w], memory_order_acquire) |
                              atomic_load_explicit(&comm->departed[w], memory_order_acquire);
        __atomic_store_n(&comm->gone[w], gone, __ATOMIC_RELEASE);
        n += (uint64_t)__builtin_popcountll(gone & ~atomic_load_explicit(&comm->excluded[w], memory_order_acquire));
    }
    __atomic_store_n(&comm->control->lost, n, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&comm->failure_lock);
}

static void no_record(uccl_ep_comm *comm, uccl_ep_error *error, uint32_t channel, uint64_t ticket, uint32_t peer) {
    *error = (uccl_ep_error){.size = sizeof *error,
                             .status = UCCL_EP_E_CLOSED,
                             .rank = comm->rank,
                             .peer = peer,
                             .channel = channel,
                             .ticket = ticket,
                             .clause = "ERR-6"};
    snprintf(error->text, sizeof error->text,
             "a command failed, and there was no room for its record (%u are kept): exclude or reset the peers of the "
             "earlier "
             "ones",
             MAX_RECORDS);
}

/* A wait for `ticket` covers a failed one: its record becomes the thread's last error. Returns the status. */
uccl_ep_status wait_failure(uccl_ep_comm *comm, uint32_t channel, uint64_t ticket) {
    uccl_ep_error found;
    uint64_t lowest = UCCL_EP_NO_TICKET;
    pthread_mutex_lock(&comm->failure_lock);
    uint32_t record = 0, peer = UCCL_EP_ANY_RANK;
    for (uint32_t target = 0; target < comm->size; target++) {
        const closure *k = &comm->closures[(size_t)channel * comm->size + target];
        if (k->lowest && k->lowest - 1 < lowest) lowest = k->lowest - 1, record = k->record, peer = target;
    }
    const struct channel *c = comm->channel_of[channel];
    if (c->closed_ticket && c->closed_ticket - 1 < lowest)
        lowest = c->closed_ticket - 1, record = c->closed_record, peer = UCCL_EP_ANY_RANK;
    if (record)
        found = comm->records[record - 1];
    else
        no_record(comm, &found, channel, lowest, peer);
    pthread_mutex_unlock(&comm->failure_lock);
    if (lowest == UCCL_EP_NO_TICKET || lowest > ticket) return UCCL_EP_OK; /* acknowledged meanwhile */
    /* The record tells of the failure that closed the target; the wait is told of the ticket it covers. */
    if (found.channel == UCCL_EP_NO_CHANNEL) found.channel = channel;
    if (found.ticket == UCCL_EP_NO_TICKET) found.ticket = lowest;
    fail_with_record(&found);
    return (uccl_ep_status)found.status;
}

/* After a reset: nothing has failed. No proxy runs. */
void failures_clear(uccl_ep_comm *comm) {
    pthread_mutex_lock(&comm->failure_lock);
    for (uint32_t i = 0; i < comm->channels; i++) {
        struct channel *c = comm->channel_of[i];
        for (uint32_t target = 0; target < comm->size; target++) {
            closure *k = &comm->closures[(size_t)i * comm->size + target];
            if (atomic_load_explicit(&k->closed, memory_order_relaxed)) memset(k, 0, sizeof *k);
        }
        c->closed = false;
        c->closed_ticket = 0;
        c->closed_record = 0;
        c->counters->failed = UCCL_EP_NO_TICKET;
        c->counters->status = UCCL_EP_CHANNEL_OPEN;
    }
    comm->record_count = 0;
    for (uint32_t w = 0; w < (comm->size + 63) / 64; w++) {
        atomic_store(&comm->lost[w], 0);
        atomic_store(&comm->excluded[w], 0);
    }
    pthread_mutex_unlock(&comm->failure_lock);
    publish_lost(comm);
}

/* ----------------------------------------------------------------------------------------------------- public calls */

uccl_ep_status uccl_ep_errors(uccl_ep_comm *comm, uccl_ep_error *errors, uint32_t max, uint32_t *total) {
    if (!comm || !total || (max && !errors))
        return fail_local(UCCL_EP_E_INVALID, "", "comm, errors and total are required");
    pthread_mutex_lock(&comm->failure_lock);
    uint32_t n = 0;
    for (uint32_t i = 0; i < comm->record_count; i++) {
        const uint32_t peer = comm->records[i].peer;
        if (peer < comm->size && bitmap_test(comm->excluded, peer)) continue;
        if (n < max) errors[n] = comm->records[i];
        n++;
    }
    *total = n;
    pthread_mutex_unlock(&comm->failure_lock);
    return UCCL_EP_OK;
}

uccl_ep_status uccl_ep_lost(uccl_ep_comm *comm, uint64_t *bitmap, uint32_t words) {
    if (!comm || !bitmap || words < (comm->size + 63) / 64)
        return fail_local(UCCL_EP_E_INVALID, "", "a bitmap of (size + 63) / 64 words is required");
    for (uint32_t w = 0; w < (comm->size + 63) / 64; w++)
        bitmap[w] = atomic_load_explicit(&comm->lost[w], memory_order_acquire);
    return UCCL_EP_OK;
}

uccl_ep_status uccl_ep_exclude(uccl_ep_comm *comm, uint32_t rank) {
    uccl_ep_status status = check_usable(comm);
    if (status != UCCL_EP_OK) return status;
    if (rank >= comm->size || rank == comm->rank)
        return fail_local(UCCL_EP_E_RANGE, "ERR-5", "rank %u cannot be excluded by rank %u of %u", rank, comm->rank,
                          comm->size);
    if (bitmap_test(comm->excluded, rank)) return UCCL_EP_OK;
    /* First no post may start, then the proxies give up what they have, then what failed so far is acknowledged. */
    for (uint32_t i = 0; i < comm->channels; i++)
        atomic_store_explicit(&comm->closures[(size_t)i * comm->size + rank].closed, 1, memory_order_release);
    atomic_fetch_or_explicit(&comm->excluded[rank >> 6], 1ull << (rank & 63), memory_order_acq_rel);
    const uint64_t deadline = comm_now(comm) + comm->config.timeout_ns;
    backoff b = {0};
    for (uint32_t i = 0; i < comm->config.proxies; i++) {
        while (__atomic_load_n(&comm->proxies[i].peers[rank].state, __ATOMIC_ACQUIRE) != PEER_DOWN) {
            if (atomic_load(&comm->aborted)) return check_usable(comm);
            if (comm_now(comm) > deadline)
                return fail_local(UCCL_EP_E_DEADLINE, "ERR-5", "the NIC did not let go of rank %u in time", rank);
            backoff_wait(comm, &b);
        }
    }
    pthread_mutex_lock(&comm->failure_lock);
    for (uint32_t i = 0; i < comm->channels; i++) {
        closure *k = &comm->closures[(size_t)i * comm->size + rank];
        /* Tickets that were posted before this call may be taken, and refused, after it: they are acknowledged too. */
        k->acknowledged = channel_posted(comm, comm->channel_of[i]);
        k->lowest = 0;
        publish_failed(comm, i);
    }
    pthread_mutex_unlock(&comm->failure_lock);
    publish_lost(comm);
    return UCCL_EP_OK;
}
