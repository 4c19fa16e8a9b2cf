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

#include "staging.h"

/* -------------------------------------------------------------------------------------------------- taking commands */

static inline void append(struct proxy *p, struct peer *q, struct entry *e) {
    e->next = NULL;
    if (LIKELY(q->issue != NULL)) { /* others wait in line, and it behind them */
        struct entry *const tail = q->tail;
        tail->next = e;
        if (UNLIKELY(e->remote == tail->remote + tail->bytes) && tail->op == UCCL_EP_OP_PUT)
            tail->flags |= ENTRY_FOLLOWED;
    } else {
        if (q->tail) {
            q->tail->next = e;
        } else {
            const uint32_t target = (uint32_t)(q - p->peers);
            q->head = e;
            q->progress = p->tick;
            p->busy[target >> 6] |= 1ull << (target & 63);
            p->busy_count++;
        }
        q->issue = e;
        activate(p, q);
    }
    q->tail = e;
}

/* A command that is not executed: its ticket retires, failed. */
__attribute__((cold, noinline)) static void refuse(struct proxy *p, struct channel *c, uint64_t ticket,
                                                   const struct entry *e, const char *why) {
    uccl_ep_comm *comm = p->comm;
    uccl_ep_error error;
    const uint32_t index = (uint32_t)(c - p->channel), target = e->target;
    /* Its entry stays free: for the window it is complete. */
    p->moved = true;
    if (target >= p->size)
        why = "there is no such rank";
    else if (!(p->peers[target].open >> index & 1))
        why = NULL;
    if (!why) { /* (channel, target) is closed already, and why is on record */
        close_target(p, index, target, ticket, 0);
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
        close_target(p, index, target, ticket, record_failure(comm, &error));
    } else {
        snprintf(
            error.text, sizeof error.text,
            "the command at ticket %llu of channel %u was refused: %s, and its target (%u of %u ranks) cannot be read. "
            "The channel is closed: correct the producer, then reset",
            (unsigned long long)ticket, c->index, why, target, p->size);
        close_channel(p, c, ticket, record_failure(comm, &error));
    }
}

/* The operation's bits tell what a command has (see has_put() and has_signal() in internal.h). */
#define OP_BIT_PUT ((uint64_t)UCCL_EP_OP_PUT << UCCL_EP_OP_SHIFT)
#define OP_BIT_SIGNAL ((uint64_t)UCCL_EP_OP_SIGNAL << UCCL_EP_OP_SHIFT)
#define OP_BIT_OTHER (UCCL_EP_FIELD_MASK(OP) & ~(OP_BIT_PUT | OP_BIT_SIGNAL)) /* zero in all that have a put */

static const char malformed[] = "no encoder produces it";

/* The signal of a command goes into its entry. What is wrong with it, or NULL. */
static inline const char *keep_signal(const struct proxy *p, struct channel *c, struct entry *e,
                                      const uccl_ep_command *command) {
    if (UNLIKELY(command->slot >= p->signals) && !FAULT(no_range_check))
        return "its slot lies outside the signal array";
    e->slot = command->slot;
    e->add = command->add;
    c->signals++;
    return NULL;
}

/*
 * Take up to `limit` commands from consecutive slots into consecutive entries. Ends at a slot that is not written, or
 * when the channel closes. `fine` tells the channel's granularity; it is a constant here, since shifts by a variable
 * would cost more than all else.
 */
static inline __attribute__((always_inline)) uint32_t take_run(struct proxy *p, struct channel *c, uint64_t ticket,
                                                               uint64_t limit, uint32_t fine) {
    static const struct entry_state taken = {.stage = STAGE_TAKEN};
    const uint64_t channel_bit = 1ull << (c - p->channel), granularity = (uint64_t)fine << UCCL_EP_GRANULARITY_SHIFT;
    const uint64_t parity = uccl_ep_ring_parity(p->ring_log2, ticket);
    const uccl_ep_slot *const begin = &c->slots[ticket & ((1ull << p->ring_log2) - 1)], *const end = begin + limit;
    const uccl_ep_slot *slot = begin;
    struct entry *e = &c->window[ticket & c->window_mask];
    for (; slot != end; slot++, e++) {
        uccl_ep_words words;
        if (!uccl_ep_slot_take(slot, parity, &words)) break;
        const uint64_t word0 = words.word[0], word1 = words.word[1];
        /* Fields are kept as soon as they are known: an entry of a refused command stays free, whatever it holds. */
        e->op = (uint8_t)UCCL_EP_FIELD_GET(word0, OP);
        e->target = (uint16_t)uccl_ep_decode_target(word1);
        struct peer *const q = &p->peers[e->target];
        uccl_ep_command command;
        const char *why = NULL;
        /* Closed by an earlier failure, or no such rank. */
        if (UNLIKELY(!(q->open & channel_bit)) && !(FAULT(no_incarnation) && e->target < p->size)) goto refused;
        if (LIKELY(word0 & OP_BIT_PUT)) {
            if (UNLIKELY((word0 & (OP_BIT_OTHER | UCCL_EP_FIELD_MASK(GRANULARITY))) != granularity)) {
                why = word0 & OP_BIT_OTHER ? malformed : "its granularity is not the channel's";
                goto refused;
            }
            uccl_ep_decode_put(word0, word1, fine, &command);
            why = "its source lies outside the heap";
            if (UNLIKELY(command.local + command.bytes > p->heap_bytes) && !FAULT(no_range_check)) goto refused;
            why = "its target lies outside the heap";
            if (UNLIKELY(command.remote + command.bytes > p->heap_bytes) && !FAULT(no_range_check)) goto refused;
            e->local = command.local;
            e->remote = command.remote;
            e->bytes = command.bytes;
            if (word0 & OP_BIT_SIGNAL) {
                uccl_ep_decode_put_signal(word0, &command);
                why = keep_signal(p, c, e, &command);
                if (UNLIKELY(why != NULL)) goto refused;
            } else if (UNLIKELY(word0 & UCCL_EP_PUT_UNUSED)) {
                why = malformed;
                goto refused;
            }
            c->bytes += command.bytes;
        } else {
            why = malformed;
            e->remote = UINT64_MAX; /* right behind nothing */
            e->bytes = 0;
            if (e->op == UCCL_EP_OP_SIGNAL) {
                if (UNLIKELY(uccl_ep_decode_signal(word0, word1, &command) != UCCL_EP_OK)) goto refused;
                why = keep_signal(p, c, e, &command);
                if (UNLIKELY(why != NULL)) goto refused;
            } else if (e->op != UCCL_EP_OP_FLUSH || uccl_ep_decode_flush(word0, word1) != UCCL_EP_OK) {
                goto refused;
            }
        }
        memcpy(&e->state, &taken, sizeof taken);
        append(p, q, e);
        continue;
    refused:
        refuse(p, c, ticket + (uint64_t)(slot - begin), e, why);
        if (!c->closed) continue;
        slot++;
        break;
    }
    return (uint32_t)(slot - begin);
}

__attribute__((noinline)) static uint32_t take_coarse(struct proxy *p, struct channel *c, uint64_t ticket,
                                                      uint64_t limit) {
    return take_run(p, c, ticket, limit, 0);
}

__attribute__((noinline)) static uint32_t take_fine(struct proxy *p, struct channel *c, uint64_t ticket,
                                                    uint64_t limit) {
    return take_run(p, c, ticket, limit, 1);
}

/* Take up to TAKE_COMMANDS from one ring, or up to where it or the window wraps. Returns how many. */
static uint32_t drain(struct proxy *p, struct channel *c) {
    const uint64_t ticket = c->taken;
    uccl_ep_words first;
    if (FAULT(wait_holds_ring) && fault_holds(c, ticket)) return 0;
    /* An idle channel costs no more than this. */
    if (!uccl_ep_ring_take(c->slots, p->ring_log2, ticket, &first) || UNLIKELY(c->closed)) return 0;
    const uint64_t ring_mask = (1ull << p->ring_log2) - 1;
    const uint64_t shorter = ring_mask & c->window_mask; /* both are powers of two */
    uint64_t limit = c->window_mask + 1 - (ticket - c->complete);
    if (limit > shorter + 1 - (ticket & shorter)) limit = shorter + 1 - (ticket & shorter);
    if (limit > TAKE_COMMANDS) limit = TAKE_COMMANDS;
    /* Between `taken` and `complete`, a window on, all entries are free: so are the two ends of what may be taken. */
    if (limit) {
        UCCL_EP_ASSERT(c->window[ticket & c->window_mask].stage == STAGE_FREE);
        UCCL_EP_ASSERT(c->window[(ticket + limit - 1) & c->window_mask].stage == STAGE_FREE);
    }
    const uint32_t n = c->granularity == UCCL_EP_GRANULARITY_COARSE ? take_coarse(p, c, ticket, limit)
                                                                    : take_fine(p, c, ticket, limit);
    if (!n) return 0;
    if (UNLIKELY(p->staging != NULL)) staging_take(p, c, ticket, n);
    trace_record(p, c, ticket, n);
    c->taken = ticket + n;
    /* The slots may be written again: a release, for the reads above come before. */
    __atomic_store_n(&c->counters->tail, ticket + n, __ATOMIC_RELEASE);
    if (UNLIKELY(c->closed)) publish_closed(p, c);
    p->stats.commands += n;
    if (FAULT(source_at_take)) p->moved = true;
    return n;
}

/* ----------------------------------------------------------------------------------------------------- housekeeping */

static void peer_lost(struct proxy *p, uint32_t target, const char *why) {
    uccl_ep_error error;
    fill_error(p, &error, UCCL_EP_E_PEER_LOST, "ERR-5", target);
    const struct peer *q = &p->peers[target];
    if (q->head) {
        const struct entry *e = q->head;
        error.channel = p->channel[e->channel].index;
        error.ticket = ticket_of(&p->channel[e->channel], e);
        error.op = e->op;
    }
    snprintf(error.text, sizeof error.text, "rank %u is lost: %s. exclude(%u) to go on without it", target, why,
             target);
    peer_fail(p, target, &error);
}

static void peer_departed(uccl_ep_comm *comm, uint32_t target) {
    atomic_fetch_or_explicit(&comm->departed[target >> 6], 1ull << (target & 63), memory_order_acq_rel);
    publish_lost(comm);
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
            peer_departed(p->comm, events[i].peer);
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
            if (q->state != PEER_UP || silence_ns(p, q) <= timeout) continue;
            if (q->limited && !peer_inflight(q) && !mailbox_awaits(p, target))
                continue; /* it waits for our own limits: others hold them, not this peer */
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

/*
 * Who closed in good order adds no signals any more, and answers nothing. Looked at before new events are, so that a
 * return word that came before the goodbye has been seen.
 */
static void look_at_departed(struct proxy *p) {
    if (!p->links) return;
    for (uint32_t w = 0; w < (p->size + 63) / 64; w++) {
        uint64_t bits = p->busy[w] & atomic_load_explicit(&p->comm->departed[w], memory_order_acquire);
        for (; bits; bits &= bits - 1) {
            const uint32_t target = w * 64 + (uint32_t)__builtin_ctzll(bits);
            if (p->peers[target].state == PEER_UP) peer_lost(p, target, "it closed its communicator");
        }
    }
}

static void look_at_abandoned(struct proxy *p) {
    for (uint32_t i = 0; i < p->channels; i++) {
        struct channel *c = &p->channel[i];
        if (c->closed || !__atomic_load_n(c->gave_up, __ATOMIC_ACQUIRE)) continue;
        uccl_ep_error error;
        fill_error(p, &error, UCCL_EP_E_CLOSED, "PRG-3", UCCL_EP_ANY_RANK);
        error.channel = c->index;
        snprintf(error.text, sizeof error.text,
                 "channel %u is closed: a producer gave up waiting for space after it had reserved tickets; see the "
                 "report for "
                 "whom the channel waited, then reset",
                 c->index);
        close_channel(p, c, UCCL_EP_NO_TICKET, record_failure(p->comm, &error));
        publish_closed(p, c);
    }
}

/*
 * This thread did not run for a while (a stopped process, a debugger, a starved CPU). What completed meanwhile is not
 * polled yet, so silence is ours, not the peers': their clocks start again.
 */
static void forgive_silence(struct proxy *p) {
    if (p->staging) p->staging->progress = p->tick;
    for (uint32_t w = 0; w < (p->size + 63) / 64; w++)
        for (uint64_t bits = p->busy[w]; bits; bits &= bits - 1)
            p->peers[w * 64 + (uint32_t)__builtin_ctzll(bits)].progress = p->tick;
}

static void housekeeping(struct proxy *p) {
    p->housekeeping_ns = p->now_ns;
    p->stats.cpu = (uint64_t)(unsigned)sched_getcpu();
    look_at_departed(p);
    look_at_events(p);
    look_at_excluded(p);
    look_at_deadlines(p);
    look_at_abandoned(p);
}

/* --------------------------------------------------------------------------------------------------------- one pass */

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
            q->state == PEER_UP && (q->issue || signal_due(p, q) || (p->raise == RAISE_READ && flush_due(q)));
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
    p->tick = (uint32_t)(now >> TICK_LOG2);
    if (UNLIKELY(gap > p->stats.longest_gap_ns) && p->stats.passes) p->stats.longest_gap_ns = gap;
    if (UNLIKELY(gap > p->comm->config.peer_timeout_ns / 4)) forgive_silence(p);
    p->stats.passes++;
    if (UNLIKELY(atomic_load_explicit(&p->comm->aborted, memory_order_acquire))) return false;

    bool worked = drain_all(p);
    if (UNLIKELY(p->staging != NULL)) worked |= staging_pass(p);
    if (p->active_count) worked |= issue_all(p);
    worked |= poll_all(p);
    if (p->links) worked |= mailbox_pass(p);
    if (UNLIKELY(p->failing)) failing_all(p);
    if (UNLIKELY(now - p->housekeeping_ns >= HOUSEKEEPING_NS)) housekeeping(p);
    if (p->moved) {
        for (uint32_t i = 0; i < p->channels; i++)
            if (p->channel[i].complete != p->channel[i].taken) window_advance(p, &p->channel[i]);
        p->moved = false;
        worked = true;
    }
    if (UNLIKELY(atomic_load_explicit(&p->comm->quiescing, memory_order_relaxed)))
        atomic_store_explicit(&p->idle, proxy_idle(p), memory_order_release);
    if (!worked) p->stats.idle_passes++;
    return worked;
}

/* Nothing taken is outstanding, and nothing is left to take. */
bool proxy_idle(const struct proxy *p) {
    for (uint32_t i = 0; i < p->channels; i++) {
        const struct channel *c = &p->channel[i];
        if (c->complete != c->taken) return false;
        if (!c->closed && c->taken != channel_posted(p->comm, c)) return false;
    }
    return !p->failing;
}

/* ------------------------------------------------------------------------------------------------------- the thread */

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
