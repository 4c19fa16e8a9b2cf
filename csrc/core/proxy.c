/* SPDX-License-Identifier: Apache-2.0
 *
 * proxy.c: one pass of a proxy. take -> check -> append | issue | poll -> retire | publish.
 *
 * What keeps its cost independent of the number of ranks: only peers with something to submit are visited, and idle
 * peers are met in housekeeping alone, 64 to a word, a few hundred times a second.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>

#include "internal.h"

/* ------------------------------------------------------------------------------------------------------------ taking
 * commands */

static void append(struct proxy *p, struct entry *e, uint32_t id, uint32_t target) {
    struct peer *q = &p->peers[target];
    e->next = NONE;
    if (q->tail == NONE) {
        q->head = id;
        q->progress_ns = p->now_ns;
        p->busy[target >> 6] |= 1ull << (target & 63);
    } else {
        entry_at(p, q->tail)->next = id;
    }
    q->tail = id;
    if (q->issue == NONE) q->issue = id;
    activate(p, target);
}

/* What is wrong with a command that was decoded, or NULL. */
static const char *check(const struct proxy *p, const struct channel *c, const uccl_ep_command *command) {
    if (uccl_ep_op_has_put(command->op)) {
        if (command->granularity != c->granularity) return "its granularity is not the channel's";
        if (command->local + command->bytes > p->heap_bytes) return "its source lies outside the heap";
        if (command->remote + command->bytes > p->heap_bytes) return "its target lies outside the heap";
    }
    if (uccl_ep_op_has_signal(command->op) && command->slot >= p->signals)
        return "its slot lies outside the signal array";
    return NULL;
}

/* A command that is not executed: its ticket retires, failed. */
static void refuse(struct proxy *p, struct channel *c, struct entry *e, uint64_t ticket, uint32_t target,
                   const char *why) {
    uccl_ep_comm *comm = p->comm;
    uccl_ep_error error;
    e->stage = STAGE_RETIRED;
    e->failed = 1;
    p->dirty |= 1ull << (c - p->channel);
    if (target < p->size && p->peers[target].closed >> e->channel & 1) why = NULL;
    if (!why) { /* (channel, target) is closed already, and why is on record */
        close_target(p, (uint32_t)(c - p->channel), target, ticket, 0);
        return;
    }
    fill_error(p, &error, UCCL_EP_E_MALFORMED, "ERR-4", target < p->size ? target : UCCL_EP_ANY_RANK);
    error.channel = c->index;
    error.ticket = ticket;
    error.op = e->op;
    if (target < p->size && !FAULT(malformed_kills_all)) {
        snprintf(
            error.text, sizeof error.text,
            "the command at ticket %llu of channel %u was refused: %s. Channel %u to rank %u is closed: correct the "
            "producer, then reset",
            (unsigned long long)ticket, c->index, why, c->index, target);
        close_target(p, (uint32_t)(c - p->channel), target, ticket, record_failure(comm, &error));
    } else {
        snprintf(
            error.text, sizeof error.text,
            "the command at ticket %llu of channel %u was refused: %s, and its target (%u of %u ranks) cannot be read. "
            "The channel is closed: correct the producer, then reset",
            (unsigned long long)ticket, c->index, why, target, p->size);
        close_channel(p, c, ticket, record_failure(comm, &error));
    }
}

/* Take up to a batch from one ring. Returns how many. */
static uint32_t drain(struct proxy *p, struct channel *c) {
    const uint64_t mask = (1ull << p->window_log2) - 1;
    const uint32_t base = (uint32_t)(c - p->channel) << p->window_log2;
    uint64_t ticket = c->taken;
    const uint64_t free_slots = mask + 1 - (ticket - c->complete);
    const uint32_t limit = free_slots < BATCH_OPERATIONS ? (uint32_t)free_slots : BATCH_OPERATIONS;
    uint64_t trace_at = atomic_load_explicit(&p->trace_next, memory_order_relaxed);
    uint32_t n = 0;
    for (; n < limit && !c->closed; n++, ticket++) {
        uccl_ep_words words;
        uccl_ep_command command;
        if (!uccl_ep_ring_take(c->slots, p->ring_log2, ticket, &words)) break;

        uccl_ep_trace_entry *record = &p->trace[trace_at++ & (TRACE_ENTRIES - 1)];
        record->time_ns = p->now_ns;
        record->ticket = ticket;
        record->words = words;
        record->channel = c->index;

        const uint32_t id = base + (uint32_t)(ticket & mask);
        struct entry *e = entry_at(p, id);
        UCCL_EP_ASSERT(e->stage == STAGE_FREE);
        const uccl_ep_status decoded = uccl_ep_decode(words.word[0], words.word[1], &command);
        e->ticket_low = (uint32_t)ticket;
        e->channel = (uint8_t)(c - p->channel);
        e->op = (uint8_t)command.op;
        e->target = (uint16_t)command.target;
        e->outstanding = 0;
        e->bytes_issued = 0;
        e->group = 1;
        e->source_done = e->failed = e->counted = 0;
        /* tickets of this pass are behind c->taken for ticket_of() only once it moves */
        c->taken = ticket + 1;
        const char *why = decoded == UCCL_EP_OK ? NULL : "no encoder produces it";
        if (UNLIKELY(command.target >= p->size)) why = why ? why : "there is no such rank";
        if (LIKELY(!why) && !FAULT(no_range_check)) why = check(p, c, &command);
        if (UNLIKELY(why != NULL)) {
            refuse(p, c, e, ticket, command.target, why);
            continue;
        }
        if (UNLIKELY(p->peers[command.target].closed >> e->channel & 1) && !FAULT(no_incarnation)) {
            refuse(p, c, e, ticket, command.target, NULL);
            continue;
        }
        e->local = command.local;
        e->remote = command.remote;
        e->bytes = command.bytes;
        e->add = command.add;
        e->slot = command.slot;
        e->stage = STAGE_QUEUED;
        c->bytes += command.bytes;
        c->signals += uccl_ep_op_has_signal(command.op);
        append(p, e, id, command.target);
    }
    if (n) {
        atomic_store_explicit(&p->trace_next, trace_at, memory_order_release);
        /* The slots may be written again: a release, for the reads above come before. */
        __atomic_store_n(&c->counters->tail, c->taken, __ATOMIC_RELEASE);
        p->stats.commands += n;
        if (FAULT(source_at_take)) p->dirty |= 1ull << (c - p->channel);
    }
    return n;
}

/* ---------------------------------------------------------------------------------------------------------------
 * housekeeping */

static void peer_lost(struct proxy *p, uint32_t target, const char *why) {
    uccl_ep_error error;
    fill_error(p, &error, UCCL_EP_E_PEER_LOST, "ERR-5", target);
    const struct peer *q = &p->peers[target];
    if (q->head != NONE) {
        const struct entry *e = entry_at(p, q->head);
        error.channel = p->channel[e->channel].index;
        error.ticket = ticket_of(&p->channel[e->channel], e);
        error.op = e->op;
    }
    snprintf(error.text, sizeof error.text, "rank %u is lost: %s. exclude(%u) to go on without it", target, why,
             target);
    peer_fail(p, target, &error);
}

static void look_at_events(struct proxy *p) {
    uccl_ep_event events[8];
    if (!p->comm->backend->events || p->endpoint_broken) return;
    const int32_t n = p->comm->backend->events(p->endpoint, events, 8);
    for (int32_t i = 0; i < n && i < 8; i++) {
        events[i].text[sizeof events[i].text - 1] = 0;
        if (events[i].kind == UCCL_EP_EVENT_PEER_LOST && events[i].peer < p->size)
            peer_lost(p, events[i].peer, events[i].text);
        else if (events[i].kind == UCCL_EP_EVENT_PEER_CLOSED && events[i].peer < p->size)
            atomic_fetch_or_explicit(&p->comm->departed[events[i].peer >> 6], 1ull << (events[i].peer & 63),
                                     memory_order_acq_rel);
        else if (events[i].kind == UCCL_EP_EVENT_DEVICE_LOST)
            for (uint32_t target = 0; target < p->size; target++) peer_lost(p, target, events[i].text);
    }
}

static void look_at_deadlines(struct proxy *p) {
    const uint64_t timeout = p->comm->config.peer_timeout_ns;
    for (uint32_t w = 0; w < (p->size + 63) / 64; w++) {
        for (uint64_t bits = p->busy[w]; bits; bits &= bits - 1) {
            const uint32_t target = w * 64 + (uint32_t)__builtin_ctzll(bits);
            struct peer *q = &p->peers[target];
            if (q->state != PEER_UP || p->now_ns - q->progress_ns <= timeout) continue;
            if (!q->inflight && q->limited) continue; /* it waits for our own limits: others hold them, not this peer */
            char why[120];
            snprintf(why, sizeof why, "no completion for %llu ms (peer_timeout)",
                     (unsigned long long)(timeout / 1000000));
            peer_lost(p, target, why);
        }
    }
}

/* Ranks that the application excluded: give up on them here too. */
static void look_at_excluded(struct proxy *p) {
    for (uint32_t w = 0; w < (p->size + 63) / 64; w++) {
        for (uint64_t bits = atomic_load_explicit(&p->comm->excluded[w], memory_order_acquire); bits;
             bits &= bits - 1) {
            const uint32_t target = w * 64 + (uint32_t)__builtin_ctzll(bits);
            if (p->peers[target].state != PEER_UP) continue;
            uccl_ep_error error;
            fill_error(p, &error, UCCL_EP_E_CLOSED, "ERR-5", target);
            snprintf(error.text, sizeof error.text, "rank %u was excluded", target);
            peer_fail(p, target, &error);
        }
    }
}

static void look_at_abandoned(struct proxy *p) {
    for (uint32_t i = 0; i < p->channels; i++) {
        struct channel *c = &p->channel[i];
        if (c->closed || !__atomic_load_n(&c->producer->gave_up, __ATOMIC_ACQUIRE)) continue;
        uccl_ep_error error;
        fill_error(p, &error, UCCL_EP_E_CLOSED, "PRG-3", UCCL_EP_ANY_RANK);
        error.channel = c->index;
        snprintf(error.text, sizeof error.text,
                 "channel %u is closed: a producer gave up waiting for space after it had reserved tickets; see the "
                 "report for "
                 "whom the channel waited, then reset",
                 c->index);
        close_channel(p, c, UCCL_EP_NO_TICKET, record_failure(p->comm, &error));
    }
}

/*
 * This thread did not run for a while (a stopped process, a debugger, a starved CPU). What completed meanwhile is not
 * polled yet, so silence is ours, not the peers': their clocks start again.
 */
static void forgive_silence(struct proxy *p) {
    for (uint32_t w = 0; w < (p->size + 63) / 64; w++)
        for (uint64_t bits = p->busy[w]; bits; bits &= bits - 1)
            p->peers[w * 64 + (uint32_t)__builtin_ctzll(bits)].progress_ns = p->now_ns;
}

static void housekeeping(struct proxy *p) {
    p->housekeeping_ns = p->now_ns;
    p->stats.cpu = (uint64_t)(unsigned)sched_getcpu();
    look_at_events(p);
    look_at_excluded(p);
    look_at_deadlines(p);
    look_at_abandoned(p);
}

/* -------------------------------------------------------------------------------------------------------------------
 * one pass */

static bool drain_all(struct proxy *p) {
    uint32_t taken = 0;
    /* The first channel changes from pass to pass: when windows or limits are short, nobody is always last (PRG-2). */
    const uint32_t first = p->drain_first;
    for (uint32_t i = 0; i < p->channels; i++) {
        uint32_t k = first + i;
        if (k >= p->channels) k -= p->channels;
        if (FAULT(starve_last_channel) && k + 1 == p->channels && p->channels > 1) continue;
        taken += drain(p, &p->channel[k]);
    }
    if (FAULT(starve_last_channel) && !taken && p->channels > 1) taken += drain(p, &p->channel[p->channels - 1]);
    p->drain_first = first + 1 < p->channels ? first + 1 : 0;
    return taken != 0;
}

static bool issue_all(struct proxy *p) {
    const uint64_t before = p->stats.operations;
    /* Peers that stay active go to the end, behind those that become active meanwhile. */
    const uint32_t n = p->active_count;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t target = p->active[i];
        struct peer *q = &p->peers[target];
        if (q->state == PEER_UP) issue_peer(p, target);
        const bool more =
            q->state == PEER_UP &&
            (q->issue != NONE || (p->hold && q->head != NONE && entry_at(p, q->head)->stage == STAGE_SIGNAL_DUE));
        q->active = more;
        if (more) p->active[kept++] = (uint16_t)target;
    }
    UCCL_EP_ASSERT(p->active_count == n);
    p->active_count = kept;
    if (kept > 1) { /* rotate: the first in line was served first */
        const uint16_t head = p->active[0];
        memmove(p->active, p->active + 1, (kept - 1) * sizeof *p->active);
        p->active[kept - 1] = head;
    }
    return p->stats.operations != before;
}

static bool poll_all(struct proxy *p) {
    uccl_ep_completion completions[BATCH_OPERATIONS];
    if (UNLIKELY(p->endpoint_broken)) return false;
    const int32_t n = p->comm->backend->poll(p->endpoint, completions, BATCH_OPERATIONS);
    if (UNLIKELY(n < 0 || n > (int32_t)BATCH_OPERATIONS)) {
        endpoint_poll_failed(p, n);
        return true;
    }
    for (int32_t i = 0; i < n; i++) retire_completion(p, &completions[i]);
    return n != 0;
}

static void failing_all(struct proxy *p) {
    for (uint32_t target = 0; target < p->size && p->failing; target++)
        if (p->peers[target].state == PEER_FAILING) peer_failing_step(p, target);
}

bool proxy_pass(struct proxy *p) {
    const uint64_t now = comm_now(p->comm);
    const uint64_t gap = now - p->now_ns;
    p->now_ns = now;
    if (UNLIKELY(gap > p->stats.longest_gap_ns) && p->stats.passes) p->stats.longest_gap_ns = gap;
    if (UNLIKELY(gap > p->comm->config.peer_timeout_ns / 4)) forgive_silence(p);
    p->stats.passes++;
    if (UNLIKELY(atomic_load_explicit(&p->comm->aborted, memory_order_acquire))) return false;

    bool worked = drain_all(p);
    if (p->active_count) worked |= issue_all(p);
    worked |= poll_all(p);
    if (UNLIKELY(p->failing)) failing_all(p);
    if (UNLIKELY(now - p->housekeeping_ns >= HOUSEKEEPING_NS)) housekeeping(p);
    if (p->dirty) {
        for (uint64_t bits = p->dirty; bits; bits &= bits - 1) window_advance(p, &p->channel[__builtin_ctzll(bits)]);
        p->dirty = 0;
        worked = true;
    }
    if (!worked) p->stats.idle_passes++;
    return worked;
}

/* Nothing taken is outstanding, and nothing is left to take. */
bool proxy_idle(const struct proxy *p) {
    for (uint32_t i = 0; i < p->channels; i++) {
        const struct channel *c = &p->channel[i];
        if (c->complete != c->taken) return false;
        if (!c->closed && c->taken != __atomic_load_n(&c->producer->head, __ATOMIC_ACQUIRE)) return false;
    }
    return !p->failing;
}

/* ----------------------------------------------------------------------------------------------------------------- the
 * thread */

static void pin(const struct proxy *p) {
    const uccl_ep_config *config = &p->comm->config;
    int cpu = 0;
    if (!config->cpus || parse_cpus(config->cpus, p->index, &cpu) != UCCL_EP_OK) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)cpu, &set);
    /* It was allowed when the configuration was checked; a set that shrank since then is the operator's doing. */
    if (pthread_setaffinity_np(pthread_self(), sizeof set, &set) && config->log)
        config->log(config->log_context, UCCL_EP_LOG_WARN,
                    "a proxy could not be pinned: the allowed CPUs have changed");
}

void *proxy_main(void *argument) {
    struct proxy *p = argument;
    char name[16];
    snprintf(name, sizeof name, "uccl_ep/%u", p->index);
    prctl(PR_SET_NAME, name);
    prctl(PR_SET_TIMERSLACK, 1000ul); /* sleeps of microseconds are meant as such */
    pin(p);
    uint32_t idle = 0;
    uint32_t sleep_ns = 1000;
    while (!atomic_load_explicit(&p->stop, memory_order_acquire)) {
        if (proxy_pass(p)) {
            idle = 0;
            sleep_ns = 1000;
            continue;
        }
        idle++;
        if (idle < p->comm->config.spin) {
            cpu_relax();
        } else if (idle < 2 * p->comm->config.spin) {
            sched_yield();
        } else {
            const struct timespec nap = {0, (long)sleep_ns};
            p->stats.sleeps++;
            nanosleep(&nap, NULL);
            if (sleep_ns < p->comm->config.idle_sleep_ns) sleep_ns *= 2;
            if (sleep_ns > p->comm->config.idle_sleep_ns) sleep_ns = p->comm->config.idle_sleep_ns;
        }
    }
    return NULL;
}
