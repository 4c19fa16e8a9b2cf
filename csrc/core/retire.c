/* SPDX-License-Identifier: Apache-2.0
 *
 * retire.c: from completions of the NIC to the counters that waits look at, and what happens when something fails.
 *
 * A peer's list is popped from its head only, so an entry leaves in posting order. A channel's window then advances in
 * ticket order.
 */
#include <stdio.h>

#include "internal.h"

static void pop(struct proxy *p, struct peer *q, uint32_t target) {
    struct entry *e = entry_at(p, q->head);
    if (e->counted) {
        q->inflight_bytes -= e->bytes;
        p->inflight_bytes -= e->bytes;
    }
    e->stage = STAGE_RETIRED;
    p->dirty |= 1ull << e->channel;
    q->head = e->next;
    if (q->head == NONE) {
        q->tail = NONE;
        p->busy[target >> 6] &= ~(1ull << (target & 63));
    }
}

void retire_head(struct proxy *p, uint32_t target) {
    struct peer *q = &p->peers[target];
    while (q->head != NONE) {
        struct entry *e = entry_at(p, q->head);
        const bool done = p->in_order ? (int32_t)(q->seq_completed - e->last_seq) >= 0 : !e->outstanding;
        if (!done) break;
        if (e->stage == STAGE_HELD) {
            /* Its put is complete, and so is all before it: now the signal. */
            e->source_done = 1;
            p->dirty |= 1ull << e->channel;
            e->stage = STAGE_SIGNAL_DUE;
            activate(p, target);
            break;
        }
        if (e->stage != STAGE_ISSUED) break;
        pop(p, q, target);
        q->progress_ns = p->now_ns;
    }
}

/* Let a channel's counters follow its window. Called for dirty channels, at the end of a pass. */
void window_advance(struct proxy *p, struct channel *c) {
    const uint64_t mask = (1ull << p->window_log2) - 1;
    uint64_t complete = c->complete;
    const uint64_t before = complete;
    while (complete != c->taken) {
        struct entry *e = &c->window[complete & mask];
        if (e->stage != STAGE_RETIRED) break;
        e->stage = STAGE_FREE;
        complete++;
    }
    c->complete = complete;
    uint64_t source = (int64_t)(c->source - complete) > 0 ? c->source : complete;
    if (p->hold) {
        while (source != c->taken) {
            const struct entry *e = &c->window[source & mask];
            if (e->stage != STAGE_RETIRED && !e->source_done) break;
            source++;
        }
    }
    if (FAULT(source_at_take)) source = c->taken;
    if (source != c->source) {
        c->source = source;
        __atomic_store_n(&c->counters->source, source, __ATOMIC_RELEASE);
    }
    if (complete != before) {
        uint64_t published = complete;
        if (FAULT(window_of_16_bits)) published = (uint16_t)complete;
        __atomic_store_n(&c->counters->complete, published, __ATOMIC_RELEASE);
    }
}

/* ----------------------------------------------------------------------------------------------------------------
 * failures */

/* What a failed operation of the NIC looks like to a person. */
static void nic_error(struct proxy *p, uccl_ep_error *error, const struct entry *e, uint32_t target, int32_t status,
                      int32_t vendor_code) {
    char text[160] = "";
    fill_error(p, error, checked_status(status), "ERR-2", target);
    error->vendor_code = vendor_code;
    p->comm->backend->describe(p->comm->device, status, vendor_code, text, sizeof text);
    text[sizeof text - 1] = 0;
    if (e) {
        const struct channel *c = &p->channel[e->channel];
        error->channel = c->index;
        error->ticket = ticket_of(c, e);
        error->op = e->op;
    }
    snprintf(error->text, sizeof error->text, "%.100s failed towards rank %u: %s (%s, vendor code %d)", error->nic,
             target, text[0] ? text : "no text from the backend", uccl_ep_status_name(status), vendor_code);
}

/*
 * One entry failed and the NIC goes on (an error of the operation alone). Later entries of the same channel to this
 * target must not be seen as delivered by a signal (ERR-3): what is not submitted of them is not submitted any more.
 */
void entry_failed(struct proxy *p, uint32_t target, uint32_t id, const uccl_ep_error *error) {
    struct entry *failed = entry_at(p, id);
    const uint32_t channel_index = failed->channel;
    struct channel *c = &p->channel[channel_index];
    const uint32_t record = record_failure(p->comm, error);
    for (uint32_t at = id; at != NONE; at = entry_at(p, at)->next) {
        struct entry *e = entry_at(p, at);
        if (e->channel != channel_index || e->failed) continue;
        e->failed = 1;
        close_target(p, channel_index, target, ticket_of(c, e), record);
        if (FAULT(signal_after_failure) && at != id) continue;
        e->stage = STAGE_ISSUED;
    }
}

/*
 * The NIC, or the core, gives up on a peer: nothing more is submitted, every channel towards it closes, and what is
 * outstanding fails as soon as the NIC has let go of the sources.
 */
void peer_fail(struct proxy *p, uint32_t target, const uccl_ep_error *error) {
    struct peer *q = &p->peers[target];
    if (q->state != PEER_UP) return;
    __atomic_store_n(&q->state, PEER_FAILING, __ATOMIC_RELEASE);
    p->failing++;
    q->progress_ns = p->now_ns;
    q->failure = record_failure(p->comm, error);
    if (error->status == UCCL_EP_E_PEER_LOST) mark_lost(p->comm, target);
    for (uint32_t c = 0; c < p->channels; c++) close_target(p, c, target, UCCL_EP_NO_TICKET, q->failure);
    for (uint32_t at = q->head; at != NONE; at = entry_at(p, at)->next) {
        struct entry *e = entry_at(p, at);
        if (e->failed) continue;
        e->failed = 1;
        close_target(p, e->channel, target, ticket_of(&p->channel[e->channel], e), q->failure);
    }
    q->issue = NONE;
    if (FAULT(loss_closes_all))
        for (uint32_t other = 0; other < p->size; other++)
            if (other != target) peer_fail(p, other, error);
}

/* The endpoint itself cannot be used any more: close it, which stops all its DMA, and fail everybody. */
static void endpoint_fail(struct proxy *p, uccl_ep_status status, const char *why) {
    if (p->endpoint_broken) return;
    p->endpoint_broken = true;
    for (uint32_t target = 0; target < p->size; target++) {
        uccl_ep_error error;
        fill_error(p, &error, status, "ERR-1", target);
        error.vendor_code = host_fail_code();
        snprintf(error.text, sizeof error.text, "the endpoint of proxy %u was closed: %s", p->index, why);
        peer_fail(p, target, &error);
    }
    p->comm->backend->endpoint_close(p->endpoint);
    p->endpoint = NULL;
}

void endpoint_poll_failed(struct proxy *p, int32_t status) {
    char why[160];
    if (status < 0)
        snprintf(why, sizeof why, "poll() gave %s (%d)%s%.80s", uccl_ep_status_name(status), status,
                 host_fail_text()[0] ? ": " : "", host_fail_text());
    else
        snprintf(why, sizeof why, "poll() gave %d completions where %u have room: report it to the backend's author",
                 status, BATCH_OPERATIONS);
    endpoint_fail(p, checked_status(status), why);
}

/* Ask the NIC to let go; once it has, retire all that is on the list. */
void peer_failing_step(struct proxy *p, uint32_t target) {
    struct peer *q = &p->peers[target];
    if (!p->endpoint_broken) {
        host_fail_clear();
        const uccl_ep_status status = p->comm->backend->disconnect(p->endpoint, target);
        if (status == UCCL_EP_IN_PROGRESS && p->now_ns - q->progress_ns <= p->comm->config.peer_timeout_ns) return;
        if (status != UCCL_EP_OK) {
            char why[160];
            snprintf(why, sizeof why, "it did not let go of rank %u (%s %.80s)", target, uccl_ep_status_name(status),
                     host_fail_text());
            endpoint_fail(p, status == UCCL_EP_IN_PROGRESS ? UCCL_EP_E_NIC : checked_status(status), why);
        }
    }
    p->inflight -= q->inflight;
    q->inflight = 0;
    q->seq_completed = q->seq_issued;
    while (q->head != NONE) pop(p, q, target);
    p->failing--;
    __atomic_store_n(&q->state, PEER_DOWN, __ATOMIC_RELEASE);
}

/* submit() refused the next operation to `target`. */
void issue_refused(struct proxy *p, uint32_t target, uccl_ep_status status) {
    struct peer *q = &p->peers[target];
    uccl_ep_error error;
    /* In a hold the signal due at the head goes first, otherwise what comes next. */
    uint32_t id = p->hold && q->head != NONE && entry_at(p, q->head)->stage == STAGE_SIGNAL_DUE ? q->head : q->issue;
    nic_error(p, &error, id == NONE ? NULL : entry_at(p, id), target, status, host_fail_code());
    if (host_fail_text()[0])
        snprintf(error.text, sizeof error.text, "%.60s refused an operation towards rank %u: %.150s", error.nic, target,
                 host_fail_text());
    if (p->error_stops || status == UCCL_EP_E_PEER_LOST || id == NONE)
        peer_fail(p, target, &error);
    else
        entry_failed(p, target, id, &error);
    retire_head(p, target);
}

/* ---------------------------------------------------------------------------------------------------------------
 * completions */

static void completion_in_order(struct proxy *p, const uccl_ep_completion *completion) {
    if (UNLIKELY(completion->peer >= p->size)) {
        p->stats.stale++;
        return;
    }
    struct peer *q = &p->peers[completion->peer];
    uint32_t seq = (uint32_t)completion->cookie;
    if (UNLIKELY(q->state != PEER_UP || completion->cookie >> 32 != q->incarnation ||
                 (int32_t)(seq - q->seq_completed) <= 0 || (int32_t)(q->seq_issued - seq) < 0)) {
        p->stats.stale++;
        return;
    }
    const bool failed = completion->status != UCCL_EP_OK && !FAULT(error_swallowed);
    if (UNLIKELY(failed)) seq--; /* all before the failed one was executed */
    const uint32_t done = seq - q->seq_completed;
    q->seq_completed = seq;
    q->inflight -= done;
    p->inflight -= done;
    retire_head(p, completion->peer);
    if (UNLIKELY(failed)) {
        uccl_ep_error error;
        nic_error(p, &error, q->head == NONE ? NULL : entry_at(p, q->head), completion->peer, completion->status,
                  completion->vendor_code);
        peer_fail(p, completion->peer, &error);
    }
}

static void completion_any_order(struct proxy *p, const uccl_ep_completion *completion) {
    const uint32_t id = (uint32_t)completion->cookie;
    if (UNLIKELY(id >= p->channels << p->window_log2)) {
        p->stats.stale++;
        return;
    }
    struct entry *e = entry_at(p, id);
    if (UNLIKELY(e->ticket_low != completion->cookie >> 32 || !e->outstanding || e->stage == STAGE_FREE ||
                 e->stage == STAGE_RETIRED)) {
        p->stats.stale++;
        return;
    }
    const uint32_t target = e->target;
    struct peer *q = &p->peers[target];
    q->inflight--;
    p->inflight--;
    uint32_t at = id;
    for (uint32_t k = e->group; k; k--, at = entry_at(p, at)->next) entry_at(p, at)->outstanding--;
    if (UNLIKELY(completion->status != UCCL_EP_OK) && !FAULT(error_swallowed) && q->state == PEER_UP) {
        uccl_ep_error error;
        nic_error(p, &error, e, target, completion->status, completion->vendor_code);
        if (p->error_stops || completion->status == UCCL_EP_E_PEER_LOST)
            peer_fail(p, target, &error);
        else
            entry_failed(p, target, id, &error);
    }
    if (q->state == PEER_UP) retire_head(p, target);
}

void retire_completion(struct proxy *p, const uccl_ep_completion *completion) {
    p->stats.completions++;
    if (completion->kind != UCCL_EP_COMPLETION_OPERATION) {
        p->stats.stale++; /* no strategy of this version sends immediates */
        return;
    }
    if (p->in_order)
        completion_in_order(p, completion);
    else
        completion_any_order(p, completion);
}
