/* SPDX-License-Identifier: Apache-2.0
 *
 * wait.c: every wait of the host. Each has a deadline, obeys abort, and fails with the record of what it covers.
 */
#include <sched.h>
#include <stdio.h>
#include <time.h>

#include "internal.h"

#define WAIT_YIELDS 400u
#define WAIT_TOLD_AFTER 200u /* turns: by then, to be in a report is no cost */

uint64_t comm_now(const uccl_ep_comm *comm) {
    if (comm->config.clock) return comm->config.clock(comm->config.clock_context);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

/* One turn of waiting for a proxy. */
void backoff_wait(uccl_ep_comm *comm, backoff *b) {
    if (comm->config.progress == UCCL_EP_PROGRESS_CALLER && !comm->config.idle) {
        for (uint32_t i = 0; i < comm->config.proxies; i++) proxy_pass(&comm->proxies[i]);
        if (++b->turns > WAIT_YIELDS) sched_yield();
        return;
    }
    backoff_pause(comm, b);
}

/* One turn of waiting: short while it may be soon, and cheap for the others on the machine when it is not. */
void backoff_pause(uccl_ep_comm *comm, backoff *b) {
    if (comm->config.idle) {
        comm->config.idle(comm->config.idle_context);
        return;
    }
    b->turns++;
    if (b->turns < WAIT_SPINS) {
        cpu_relax();
    } else if (b->turns < WAIT_YIELDS && !b->nap_ns) {
        sched_yield();
    } else {
        nanosleep(&(struct timespec){0, (long)(b->nap_ns ? b->nap_ns : WAIT_NAP_NS)}, NULL);
    }
}

uint64_t deadline_of(const uccl_ep_comm *comm, uint64_t timeout_ns) {
    if (timeout_ns == UCCL_EP_TIMEOUT_DEFAULT) timeout_ns = comm->config.timeout_ns;
    const uint64_t now = comm_now(comm);
    return now + timeout_ns < now ? UINT64_MAX : now + timeout_ns;
}

static uccl_ep_status channel_deadline(uccl_ep_comm *comm, uint32_t channel_index, uint64_t ticket, const char *what,
                                       uint64_t timeout_ns) {
    const uccl_ep_ring_counters *k = comm->channel_of[channel_index]->counters;
    const uccl_ep_status status =
        fail_local(UCCL_EP_E_DEADLINE, "ERR-1",
                   "ticket %llu of channel %u was not %s within %.3f s: taken below %llu, sources free below %llu, "
                   "complete below %llu. See "
                   "report() for whom it waits",
                   (unsigned long long)ticket, channel_index, what,
                   (double)(timeout_ns == UCCL_EP_TIMEOUT_DEFAULT ? comm->config.timeout_ns : timeout_ns) / 1e9,
                   (unsigned long long)__atomic_load_n(&k->tail, __ATOMIC_RELAXED),
                   (unsigned long long)__atomic_load_n(&k->source, __ATOMIC_RELAXED),
                   (unsigned long long)__atomic_load_n(&k->complete, __ATOMIC_RELAXED));
    last_error_slot()->channel = channel_index;
    last_error_slot()->ticket = ticket;
    last_error_slot()->rank = comm->rank;
    return status;
}

static uccl_ep_status wait_counter(uccl_ep_comm *comm, uint32_t channel_index, uint64_t ticket, bool source,
                                   uint64_t timeout_ns) {
    uccl_ep_status status = check_usable(comm);
    if (status != UCCL_EP_OK) return status;
    if (channel_index >= comm->channels)
        return fail_local(UCCL_EP_E_RANGE, "QUI-1", "channel %u of %u", channel_index, comm->channels);
    const struct channel *c = comm->channel_of[channel_index];
    const uccl_ep_ring_counters *k = c->counters;
    const uint64_t posted = channel_posted(comm, c);
    /* Who gave up on a device holds a ticket that is in no slot: the loop below says that the channel is closed. */
    const bool given_up = !c->producer && __atomic_load_n(c->gave_up, __ATOMIC_ACQUIRE);
    if (ticket < comm->config.first_ticket || ((int64_t)(posted - ticket) <= 0 && !given_up))
        return fail_local(UCCL_EP_E_RANGE, "QUI-1", "ticket %llu of channel %u was never given out (next is %llu)",
                          (unsigned long long)ticket, channel_index, (unsigned long long)posted);
    const uint64_t *counter = source ? &k->source : &k->complete;
    uint64_t deadline = 0;
    backoff b = {0};
    for (;;) {
        /* The counter first: a failure is published before the counter passes its ticket (ERR-2). */
        const uint64_t value = __atomic_load_n(counter, __ATOMIC_ACQUIRE);
        const uint64_t failed = __atomic_load_n(&k->failed, __ATOMIC_ACQUIRE);
        if (UNLIKELY(failed <= ticket)) {
            status = wait_failure(comm, channel_index, ticket);
            if (status != UCCL_EP_OK) return status;
        }
        const bool passed =
            FAULT(ticket_of_32_bits) ? (uint32_t)value > (uint32_t)ticket : (int64_t)(value - ticket) > 0;
        if (passed && !(FAULT(poll_never_done) && !timeout_ns)) return UCCL_EP_OK;
        if ((status = check_usable(comm)) != UCCL_EP_OK) return status;
        if (__atomic_load_n(&k->status, __ATOMIC_ACQUIRE) == UCCL_EP_CHANNEL_CLOSED &&
            (int64_t)(ticket - __atomic_load_n(&k->tail, __ATOMIC_ACQUIRE)) >= 0) {
            /* It may be behind the one that closed the channel, or behind a hole. */
            if (__atomic_load_n(&k->failed, __ATOMIC_ACQUIRE) <= ticket) continue;
            fail_local(UCCL_EP_E_CLOSED, "PRG-3",
                       "channel %u was closed before ticket %llu was taken: see errors(), then reset", channel_index,
                       (unsigned long long)ticket);
            last_error_slot()->channel = channel_index;
            last_error_slot()->ticket = ticket;
            return UCCL_EP_E_CLOSED;
        }
        if (!deadline) deadline = deadline_of(comm, timeout_ns);
        if (comm_now(comm) >= deadline && !FAULT(deadline_ignored)) {
            if (!timeout_ns) return UCCL_EP_IN_PROGRESS;
            return channel_deadline(comm, channel_index, ticket, source ? "free at its source" : "complete",
                                    timeout_ns);
        }
        backoff_wait(comm, &b);
    }
}

uccl_ep_status uccl_ep_wait(uccl_ep_comm *comm, uint32_t channel, uint64_t ticket, uint64_t timeout_ns) {
    if (FAULT(wait_holds_ring) && channel < comm->channels) fault_hold(comm->channel_of[channel], ticket);
    const uccl_ep_status status = wait_counter(comm, channel, ticket, false, timeout_ns);
    if (FAULT(wait_holds_ring)) fault_hold(NULL, 0);
    return status;
}

uccl_ep_status uccl_ep_wait_source(uccl_ep_comm *comm, uint32_t channel, uint64_t ticket, uint64_t timeout_ns) {
    return wait_counter(comm, channel, ticket, true, timeout_ns);
}

static uccl_ep_status quiet(uccl_ep_comm *comm, uint32_t channel_index, bool source, uint64_t timeout_ns) {
    uccl_ep_status status = check_usable(comm);
    if (status != UCCL_EP_OK) return status;
    if (channel_index != UCCL_EP_NO_CHANNEL && channel_index >= comm->channels)
        return fail_local(UCCL_EP_E_RANGE, "QUI-2", "channel %u of %u", channel_index, comm->channels);
    const uint64_t begin = comm_now(comm);
    const bool all = channel_index == UCCL_EP_NO_CHANNEL;
    if (timeout_ns == UCCL_EP_TIMEOUT_DEFAULT) timeout_ns = comm->config.timeout_ns;
    for (uint32_t i = all ? 0 : channel_index; i < (all ? comm->channels : channel_index + 1); i++) {
        if (FAULT(quiet_one_channel) && i) break;
        if (FAULT(idle_quiet_waits) && !timeout_ns) return UCCL_EP_IN_PROGRESS;
        const uint64_t posted = channel_posted(comm, comm->channel_of[i]);
        if (posted == comm->config.first_ticket) continue;
        /* One deadline for all channels. */
        const uint64_t spent = comm_now(comm) - begin;
        status = wait_counter(comm, i, posted - 1, source, timeout_ns > spent ? timeout_ns - spent : 0);
        if (status == UCCL_EP_IN_PROGRESS && timeout_ns)
            return channel_deadline(comm, i, posted - 1, source ? "free at its source" : "complete", timeout_ns);
        if (status != UCCL_EP_OK) return status;
    }
    return UCCL_EP_OK;
}

uccl_ep_status uccl_ep_quiet(uccl_ep_comm *comm, uint32_t channel, uint64_t timeout_ns) {
    return quiet(comm, channel, false, timeout_ns);
}

uccl_ep_status uccl_ep_quiet_source(uccl_ep_comm *comm, uint32_t channel, uint64_t timeout_ns) {
    return quiet(comm, channel, true, timeout_ns);
}

/* The sum over what its adding agents hold (SIG-6). Each part only grows, so what one look saw no later one misses. */
static uint64_t signal_value(const uccl_ep_comm *comm, uint32_t slot) {
    uint64_t sum = 0;
    for (uint32_t bank = 0; bank < comm->banks; bank++)
        sum += __atomic_load_n(&comm->signal_words[(uint64_t)bank * comm->config.signals + slot], __ATOMIC_ACQUIRE);
    return sum;
}

uccl_ep_status uccl_ep_read_signal(uccl_ep_comm *comm, uint32_t slot, uint64_t *value) {
    const uccl_ep_status status = check_usable(comm);
    if (status != UCCL_EP_OK) return status;
    if (!value || slot >= comm->config.signals)
        return fail_local(UCCL_EP_E_RANGE, "SIG-1", "slot %u of %u signals", slot, comm->config.signals);
    if (UNLIKELY(!comm->signal_words))
        return fail_local(UCCL_EP_E_UNSUPPORTED, "MEM-3",
                          "the signal words lie in device memory, which the CPU does not read: have a kernel wait "
                          "(device.h), or take signals in host memory");
    *value = signal_value(comm, slot);
    return UCCL_EP_OK;
}

/* The lowest rank that will send nothing more and that nobody excluded, or NONE. */
uint32_t lost_rank(uccl_ep_comm *comm, uint32_t source) {
    if (source != UCCL_EP_ANY_RANK)
        return bitmap_test(comm->lost, source) || bitmap_test(comm->departed, source) ? source : NONE;
    for (uint32_t w = 0; w < (comm->size + 63) / 64; w++) {
        const uint64_t bits = (atomic_load_explicit(&comm->lost[w], memory_order_acquire) |
                               atomic_load_explicit(&comm->departed[w], memory_order_acquire)) &
                              ~atomic_load_explicit(&comm->excluded[w], memory_order_acquire);
        if (bits) return w * 64 + (uint32_t)__builtin_ctzll(bits);
    }
    return NONE;
}

static bool reached(uint64_t word, uint64_t value) {
    if (FAULT(value_not_distance)) return word >= value;
    return (int64_t)(word - value) >= 0;
}

/* *place: that of the wait in the table of those that last, or NONE. */
static uccl_ep_status wait_signal(uccl_ep_comm *comm, uint32_t slot, uint64_t value, uint32_t source,
                                  uint64_t timeout_ns, uint64_t *seen, uint32_t *place) {
    uint64_t word = 0;
    uccl_ep_status status = uccl_ep_read_signal(comm, slot, &word);
    if (status != UCCL_EP_OK) return status;
    if (source != UCCL_EP_ANY_RANK && source >= comm->size)
        return fail_local(UCCL_EP_E_RANGE, "SIG-1", "rank %u of %u", source, comm->size);
    uint64_t deadline = 0;
    /* Where somebody else keeps the time, nothing may happen between two turns. */
    uint32_t turns_untold = comm->config.idle ? 1 : WAIT_TOLD_AFTER;
    backoff b = {0};
    for (;;) {
        if (reached(word, value)) {
            if (seen) *seen = word;
            if (FAULT(wait_consumes)) __atomic_fetch_sub(&comm->signal_words[slot], value, __ATOMIC_RELAXED);
            return UCCL_EP_OK;
        }
        const uint32_t lost = lost_rank(comm, source);
        /* What the lost rank had sent is there, or will never be: one more look after it was known to be lost. */
        word = signal_value(comm, slot);
        if (reached(word, value)) continue;
        if (seen) *seen = word;
        if (lost != NONE) {
            const char *how = bitmap_test(comm->lost, lost) ? "was lost" : "closed its communicator";
            mark_lost(comm, lost);
            fail_local(
                UCCL_EP_E_PEER_LOST, "ERR-5",
                "rank %u %s while signal %u was at %llu and %llu was waited for: exclude(%u) to go on without it", lost,
                how, slot, (unsigned long long)word, (unsigned long long)value, lost);
            last_error_slot()->peer = lost;
            last_error_slot()->rank = comm->rank;
            return UCCL_EP_E_PEER_LOST;
        }
        if ((status = check_usable(comm)) != UCCL_EP_OK) return status;
        if (!deadline) deadline = deadline_of(comm, timeout_ns);
        if (comm_now(comm) >= deadline && !FAULT(deadline_ignored)) {
            if (!timeout_ns) return UCCL_EP_IN_PROGRESS;
            fail_local(UCCL_EP_E_DEADLINE, "ERR-1", "signal %u is at %llu and did not reach %llu within %.3f s", slot,
                       (unsigned long long)word, (unsigned long long)value,
                       (double)(timeout_ns == UCCL_EP_TIMEOUT_DEFAULT ? comm->config.timeout_ns : timeout_ns) / 1e9);
            last_error_slot()->rank = comm->rank;
            last_error_slot()->peer = source;
            return UCCL_EP_E_DEADLINE;
        }
        if (turns_untold && !--turns_untold) *place = waiter_begin(comm, slot, value, source);
        backoff_wait(comm, &b);
    }
}

uccl_ep_status uccl_ep_wait_signal(uccl_ep_comm *comm, uint32_t slot, uint64_t value, uint32_t source,
                                   uint64_t timeout_ns, uint64_t *seen) {
    uint32_t place = NONE;
    const uccl_ep_status status = wait_signal(comm, slot, value, source, timeout_ns, seen, &place);
    if (UNLIKELY(place != NONE)) waiter_end(comm, place);
    return status;
}

uccl_ep_status uccl_ep_progress(uccl_ep_comm *comm, uint32_t *worked) {
    const uccl_ep_status status = check_usable(comm);
    if (status != UCCL_EP_OK) return status;
    if (comm->config.progress != UCCL_EP_PROGRESS_CALLER)
        return fail_local(UCCL_EP_E_INVALID, "PRG-1", "the communicator has threads of its own: progress is theirs");
    uint32_t any = 0;
    for (uint32_t i = 0; i < comm->config.proxies; i++) any |= proxy_pass(&comm->proxies[i]);
    if (worked) *worked = any;
    return UCCL_EP_OK;
}

uccl_ep_status uccl_ep_progress_proxy(uccl_ep_comm *comm, uint32_t proxy, uint32_t *worked) {
    if (worked) *worked = 0;
    const uccl_ep_status status = check_usable(comm);
    if (status != UCCL_EP_OK) return status;
    if (comm->config.progress != UCCL_EP_PROGRESS_CALLER || proxy >= comm->config.proxies)
        return fail_local(UCCL_EP_E_INVALID, "PRG-1", "proxy %u of %u, and progress must be the caller's", proxy,
                          comm->config.proxies);
    if (!comm->running) return UCCL_EP_OK;
    const uint32_t any = proxy_pass(&comm->proxies[proxy]);
    if (worked) *worked = any;
    return UCCL_EP_OK;
}
