/* SPDX-License-Identifier: Apache-2.0
 *
 * observe.c: what can be seen of a running communicator. Reads of words that a proxy writes: each is whole, together
 * they are a moment that may never have been.
 */
#include <stdarg.h>
#include <stdio.h>

#include "internal.h"

/* These functions read words that a proxy writes plainly; a thread sanitizer is right about that, and it is meant. */
#define RACY_READ __attribute__((no_sanitize("thread")))

uccl_ep_status uccl_ep_comm_query(uccl_ep_comm *comm, uccl_ep_comm_info *info) {
    if (!comm || !info || info->size_of_struct < sizeof(uint32_t))
        return fail_local(UCCL_EP_E_INVALID, "", "info with size_of_struct = sizeof(uccl_ep_comm_info) is required");
    const uccl_ep_config *c = &comm->config;
    uccl_ep_comm_info all = {.size_of_struct = info->size_of_struct,
                             .rank = comm->rank,
                             .size = comm->size,
                             .channels = comm->channels,
                             .proxies = c->proxies,
                             .signals = c->signals,
                             .granularity = c->granularity,
                             .ring_log2 = c->ring_log2,
                             .strategy = comm->strategy,
                             .backend_abi = (uint32_t)comm->backend->abi_major << 16 | comm->backend->abi_minor,
                             .heap_bytes = c->heap_bytes,
                             .heap = c->heap,
                             .signal_words = comm->signal_words,
                             .signal_banks = comm->banks,
                             .window = comm->window,
                             .heap_kind = c->heap_kind,
                             .staged = comm->staged,
                             .device_channels = comm->device_channels,
                             .device = comm->device_info};
    snprintf(all.backend, sizeof all.backend, "%s", comm->backend->name);
    snprintf(all.backend_version, sizeof all.backend_version, "%s", comm->backend->version);
    snprintf(all.strategy_reason, sizeof all.strategy_reason, "%s", comm->strategy_reason);
    if (comm->staged) snprintf(all.staged_reason, sizeof all.staged_reason, "%s", comm->staged_reason);
    snprintf(all.library, sizeof all.library, "%s", comm->library);
    if (comm->accelerator) snprintf(all.accelerator, sizeof all.accelerator, "%s", comm->accelerator->name);
    memcpy(info, &all, info->size_of_struct < sizeof all ? info->size_of_struct : sizeof all);
    return UCCL_EP_OK;
}

RACY_READ uccl_ep_status uccl_ep_channel_query(uccl_ep_comm *comm, uint32_t channel_index,
                                               uccl_ep_channel_stats *stats) {
    if (!comm || !stats || channel_index >= comm->channels)
        return fail_local(UCCL_EP_E_RANGE, "", "stats of one of %u channels", comm ? comm->channels : 0);
    const struct channel *c = comm->channel_of[channel_index];
    const uint64_t first = comm->config.first_ticket;
    *stats = (uccl_ep_channel_stats){
        .posted = channel_posted(comm, c) - first,
        .taken = __atomic_load_n(&c->counters->tail, __ATOMIC_RELAXED) - first,
        .source = __atomic_load_n(&c->counters->source, __ATOMIC_RELAXED) - first,
        .complete = __atomic_load_n(&c->counters->complete, __ATOMIC_RELAXED) - first,
        .failed = atomic_load_explicit(&c->failures, memory_order_relaxed),
        .bytes = __atomic_load_n(&c->bytes, __ATOMIC_RELAXED),
        .signals = __atomic_load_n(&c->signals, __ATOMIC_RELAXED),
        .state = __atomic_load_n(&c->counters->status, __ATOMIC_RELAXED),
    };
    return UCCL_EP_OK;
}

RACY_READ uccl_ep_status uccl_ep_proxy_query(uccl_ep_comm *comm, uint32_t index, uccl_ep_proxy_stats *stats) {
    if (!comm || !stats || index >= comm->config.proxies)
        return fail_local(UCCL_EP_E_RANGE, "", "stats of one of %u proxies", comm ? comm->config.proxies : 0);
    const uint64_t *from = (const uint64_t *)&comm->proxies[index].stats;
    uint64_t *to = (uint64_t *)stats;
    _Static_assert(sizeof *stats % sizeof *from == 0, "statistics are words");
    for (size_t i = 0; i < sizeof *stats / sizeof *from; i++) to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
    return UCCL_EP_OK;
}

typedef struct text {
    char *at;
    size_t room;
} text;

__attribute__((format(printf, 2, 3))) static void add_line(text *t, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int n = vsnprintf(t->at, t->room, format, arguments);
    va_end(arguments);
    if (n <= 0) return;
    const size_t used = (size_t)n < t->room ? (size_t)n : t->room - 1;
    t->at += used;
    t->room -= used;
}

static const char *const state_names[] = {"up", "failing", "down"};

RACY_READ static void report_peer(text *t, const struct proxy *p, uint32_t target, uint64_t now) {
    const struct peer *q = &p->peers[target];
    const struct entry *e = __atomic_load_n(&q->head, __ATOMIC_RELAXED); /* entries live as long as the proxy */
    const uint8_t state = __atomic_load_n(&q->state, __ATOMIC_RELAXED);
    if (!e && state == PEER_UP) return;
    add_line(t, "  proxy %u -> rank %u: %s, %u operations and %llu bytes in flight", p->index, target,
             state_names[state % 3],
             __atomic_load_n(&q->seq_issued, __ATOMIC_RELAXED) - __atomic_load_n(&q->seq_completed, __ATOMIC_RELAXED),
             (unsigned long long)__atomic_load_n(&q->inflight_bytes, __ATOMIC_RELAXED));
    if (e) {
        const uint8_t c = __atomic_load_n(&e->channel, __ATOMIC_RELAXED);
        static const char *const ops[] = {"invalid", "put", "signal", "put_signal", "flush"};
        const uint8_t op = __atomic_load_n(&e->op, __ATOMIC_RELAXED);
        const uint32_t progress = __atomic_load_n(&q->progress, __ATOMIC_RELAXED);
        if (c < p->channels) {
            const struct channel *channel = &p->channel[c];
            /* As ticket_of(), from what is published. */
            const uint64_t complete = __atomic_load_n(&channel->counters->complete, __ATOMIC_RELAXED);
            const uint64_t ticket = complete + (((uint64_t)(e - channel->window) - complete) & channel->window_mask);
            add_line(
                t, "; oldest: %s, ticket %llu on channel %u, for %llu ms", ops[op < 5 ? op : 0],
                (unsigned long long)ticket, channel->index,
                (unsigned long long)(((uint64_t)((uint32_t)(now >> TICK_LOG2) - progress) << TICK_LOG2) / 1000000));
        }
    }
    add_line(t, "\n");
}

static void report_waiters(text *t, uccl_ep_comm *comm, uint64_t now) {
    if (atomic_load(&comm->aborted)) return; /* no wait lasts longer than a moment */
    for (uint32_t i = 0; i < MAX_WAITERS; i++) {
        struct waiting w;
        uint64_t word;
        if (!waiter_read(comm, i, &w) || uccl_ep_read_signal(comm, w.slot, &word) != UCCL_EP_OK) continue;
        add_line(t, "  thread %llu (%s) waits for signal %u: it is at %llu and has to reach %llu; for %llu ms",
                 (unsigned long long)w.thread, w.name, w.slot, (unsigned long long)word, (unsigned long long)w.value,
                 (unsigned long long)(now > w.begin_ns ? (now - w.begin_ns) / 1000000 : 0));
        if (w.source == UCCL_EP_ANY_RANK)
            add_line(t, ", from any rank\n");
        else
            add_line(t, ", from rank %u\n", w.source);
    }
    const uint32_t untold = atomic_load_explicit(&comm->waiters_untold, memory_order_relaxed);
    if (untold) add_line(t, "  %u more threads wait for signals\n", untold);
}

uccl_ep_status uccl_ep_report(uccl_ep_comm *comm, char *out, uint32_t bytes) {
    if (!comm || !out || !bytes) return fail_local(UCCL_EP_E_INVALID, "", "room for the text is required");
    text t = {out, bytes};
    const uint64_t now = comm_now(comm);
    out[0] = 0;
    add_line(&t, "rank %u of %u, backend %s, device %s, strategy %s%s\n", comm->rank, comm->size, comm->backend->name,
             comm->device_info.name, strategy_name(comm->strategy), atomic_load(&comm->aborted) ? ", ABORTED" : "");
    if (comm->staged) add_line(&t, "  heap staged through host memory: %s\n", comm->staged_reason);
    for (uint32_t i = 0; i < comm->channels; i++) {
        uccl_ep_channel_stats s;
        uccl_ep_channel_query(comm, i, &s);
        if (s.posted == s.complete && !s.failed && !s.state) continue;
        add_line(&t, "  channel %u%s: posted %llu, taken %llu, source free %llu, complete %llu, failed %llu%s\n", i,
                 i < comm->device_channels ? " (of kernels)" : "", (unsigned long long)s.posted,
                 (unsigned long long)s.taken, (unsigned long long)s.source, (unsigned long long)s.complete,
                 (unsigned long long)s.failed, s.state ? ", closed" : "");
    }
    for (uint32_t i = 0; i < comm->config.proxies; i++)
        for (uint32_t target = 0; target < comm->size; target++) report_peer(&t, &comm->proxies[i], target, now);
    report_waiters(&t, comm, now);
    for (uint32_t target = 0; target < comm->size; target++)
        if (bitmap_test(comm->lost, target))
            add_line(&t, "  rank %u is lost%s\n", target, bitmap_test(comm->excluded, target) ? " and excluded" : "");
    return UCCL_EP_OK;
}
