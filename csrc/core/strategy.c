/* SPDX-License-Identifier: Apache-2.0
 *
 * strategy.c: how signals keep their order on the NIC at hand, chosen from its promises.
 *
 * A strategy is a set of needs and what issue.c, retire.c and mailbox.c do with a signal. It knows no vendor. All ranks
 * of a communicator use the same one, so the choice is made on the promises that every rank's NIC gives.
 *
 * All of them retire commands on completions, and what is complete must be visible (QUI-1, MEM-3). A NIC whose
 * completions say less has them raised: it is asked to (VISIBLE_ON_REQUEST), or a read behind the writes does it
 * (READ_FLUSHES), or, where the target's proxy counts what it receives, its return word does.
 */
#include <stdarg.h>
#include <stdio.h>

#include "internal.h"

/* Below that many bits a number could not be told from one a window away with room to spare (LIM-1). */
#define MIN_IMMEDIATE_BITS 24u

static const struct promise {
    uint64_t flag;
    const char *text;
} promises[] = {
    {UCCL_EP_CAP_ATOMIC_ADD64, "64-bit adds"},
    {UCCL_EP_CAP_ORDER_WRITE_ATOMIC, "adds in order behind writes"},
    {UCCL_EP_CAP_ERROR_STOPS, "that an error stops the queue (ERR-3)"},
    {UCCL_EP_CAP_SIGNALS_STRICT, "strict order of payload and words (MEM-3)"},
    {UCCL_EP_CAP_FENCE_DELIVERED, "a fence for visible writes that cancels behind a failure (ERR-3)"},
};

/* Needs that are not a promise by itself. */
#define NEEDS_RAISE (1u << 0)      /* completions that are visible, or can be raised without the target */
#define NEEDS_RESPONDERS (1u << 1) /* the target's NIC takes an add from every queue at a time */
#define NEEDS_NUMBERS (1u << 2)    /* immediates wide enough for numbers, and visible bytes behind them */
#define NEEDS_ONE_WRITER (1u << 3) /* the caller's word for it */

static const struct strategy {
    uint32_t id;
    const char *name;
    uint64_t promises;
    uint32_t needs;
    enum adder adder;
    bool hold;
} strategies[] = {
    /* The best first: auto takes the first one whose needs are met. */
    {UCCL_EP_STRATEGY_ORDERED_ATOMIC, "ordered_atomic",
     UCCL_EP_CAP_ATOMIC_ADD64 | UCCL_EP_CAP_ORDER_WRITE_ATOMIC | UCCL_EP_CAP_ERROR_STOPS | UCCL_EP_CAP_SIGNALS_STRICT,
     NEEDS_RAISE | NEEDS_RESPONDERS, ADDER_NIC, false},
    {UCCL_EP_STRATEGY_FENCED_ATOMIC, "fenced_atomic", UCCL_EP_CAP_ATOMIC_ADD64 | UCCL_EP_CAP_FENCE_DELIVERED,
     NEEDS_RAISE | NEEDS_RESPONDERS, ADDER_NIC, false},
    {UCCL_EP_STRATEGY_SEQUENCED_IMMEDIATE, "sequenced_immediate", 0, NEEDS_NUMBERS, ADDER_TARGET, false},
    {UCCL_EP_STRATEGY_SENDER_HOLD, "sender_hold", UCCL_EP_CAP_ATOMIC_ADD64, NEEDS_RAISE | NEEDS_RESPONDERS, ADDER_NIC,
     true},
    {UCCL_EP_STRATEGY_SENDER_HOLD_SUM, "sender_hold_sum", 0, NEEDS_RAISE | NEEDS_ONE_WRITER, ADDER_SOURCE, true},
    {UCCL_EP_STRATEGY_SENDER_HOLD_MAILBOX, "sender_hold_mailbox", 0, NEEDS_RAISE, ADDER_TARGET, true},
};
#define STRATEGIES (sizeof strategies / sizeof *strategies)

const char *strategy_name(uint32_t id) {
    for (size_t i = 0; i < STRATEGIES; i++)
        if (strategies[i].id == id) return strategies[i].name;
    return "auto";
}

typedef struct list {
    char text[208];
    size_t used;
} list;

__attribute__((format(printf, 2, 3))) static void say(list *l, const char *format, ...) {
    if (l->used) l->used += (size_t)snprintf(l->text + l->used, sizeof l->text - l->used, ", ");
    if (l->used >= sizeof l->text) return;
    va_list arguments;
    va_start(arguments, format);
    const int n = vsnprintf(l->text + l->used, sizeof l->text - l->used, format, arguments);
    va_end(arguments);
    l->used += n > 0 ? (size_t)n : 0;
    if (l->used >= sizeof l->text) l->used = sizeof l->text - 1;
}

/* How what is complete becomes visible without the target's help; UINT32_MAX: not at all. */
static uint32_t raise_by(const promised *all) {
    const uint64_t flags = all->caps.flags;
    const uint64_t reads = UCCL_EP_CAP_READ_FLUSHES | UCCL_EP_CAP_COMPLETES_IN_ORDER | UCCL_EP_CAP_ERROR_STOPS;
    if (FAULT(transmit_is_visible)) return RAISE_NONE;
    if (all->caps.completion_level >= UCCL_EP_COMPLETION_VISIBLE) return RAISE_NONE;
    if (flags & UCCL_EP_CAP_VISIBLE_ON_REQUEST) return RAISE_REQUEST;
    return (flags & reads) == reads ? RAISE_READ : UINT32_MAX;
}

/* Does every target see the bytes of an immediate once it has it, or can make itself see them? */
static bool immediates_show(const promised *all) {
    return all->caps.flags & UCCL_EP_CAP_IMM_VISIBLE || all->functions & HAS_FLUSH_LOCAL;
}

/* Is it known of a write when it has landed, so that the next one to the same place may go? */
static bool landing_known(const promised *all) {
    return all->caps.completion_level > UCCL_EP_COMPLETION_TRANSMITTED ||
           all->caps.flags & UCCL_EP_CAP_VISIBLE_ON_REQUEST;
}

/* Immediates that every peer may have outstanding towards an endpoint. */
static uint32_t receives_a_peer(const uccl_ep_comm *comm, const promised *all) {
    return all->caps.max_receives ? all->caps.max_receives / comm->size : UINT32_MAX;
}

static bool receives_return(const promised *all) {
    return !(all->caps.flags & UCCL_EP_CAP_IMM_NEEDS_RECEIVE) || all->functions & HAS_REPLENISH;
}

static void missing(const uccl_ep_comm *comm, const promised *all, const struct strategy *s, list *l) {
    if (FAULT(strategy_unchecked)) return;
    for (size_t i = 0; i < sizeof promises / sizeof *promises; i++)
        if (s->promises & ~all->caps.flags & promises[i].flag) say(l, "%s", promises[i].text);
    if (s->needs & NEEDS_RAISE && raise_by(all) == UINT32_MAX)
        say(l, "completions that are, or can be made, visible (MEM-3)");
    if (comm->staged && s->adder != ADDER_TARGET) say(l, "a part for the target's proxy (heaps are staged)");
    const uint64_t queues = (uint64_t)comm->size * comm->config.proxies;
    if (s->needs & NEEDS_RESPONDERS && all->caps.responder_atomics && all->caps.responder_atomics < queues)
        say(l, "to take adds of %llu queues at a time (it takes %u)", (unsigned long long)queues,
            all->caps.responder_atomics);
    if (s->needs & NEEDS_NUMBERS) {
        if (all->caps.immediate_bits < MIN_IMMEDIATE_BITS)
            say(l, "immediates of %u bits (it has %u)", MIN_IMMEDIATE_BITS, all->caps.immediate_bits);
        else if (!immediates_show(all))
            say(l, "that what an immediate tells of is visible, or a flush that makes it so (MEM-3)");
        else if (!receives_return(all))
            say(l, "a way to give receives back");
        else if (!landing_known(all))
            say(l, "completions that say that a write has arrived, or can be made to");
        else if (!receives_a_peer(comm, all))
            say(l, "to take an immediate of each of %u ranks at a time (it takes %u)", comm->size,
                all->caps.max_receives);
    }
    if (s->adder == ADDER_TARGET && comm->config.signals_kind != UCCL_EP_MEMORY_HOST)
        say(l, "signals in host memory, since the target's CPU adds them");
    if (s->needs & NEEDS_ONE_WRITER && all->caps.write_alignment > sizeof(uint64_t))
        say(l, "writes of 8 bytes (they are multiples of %u)", all->caps.write_alignment);
    if (s->needs & NEEDS_ONE_WRITER && !(comm->config.flags & UCCL_EP_CONFIG_SINGLE_WRITER))
        say(l, "the caller's word that every signal has a single writer (single_writer)");
}

/* What follows from the strategy for the whole communicator. */
static void take(uccl_ep_comm *comm, const promised *all, const struct strategy *s) {
    const bool sequenced = s->adder == ADDER_TARGET && !s->hold;
    const uint32_t proxies = comm->config.proxies, size = comm->size;
    comm->strategy = s->id;
    comm->adder = s->adder;
    comm->hold = s->hold;
    comm->raise = sequenced ? RAISE_RETURN : raise_by(all);
    if (comm->raise == UINT32_MAX) comm->raise = RAISE_NONE; /* strategy_unchecked */
    const uint32_t adders = s->adder == ADDER_NIC ? all->caps.adding_nics : s->adder == ADDER_SOURCE ? proxies : 1;
    comm->banks = adders < 2 ? 1 : adders < proxies ? adders : proxies;
    if (FAULT(one_bank)) comm->banks = 1;
    comm->window = 0;
    if (sequenced) {
        /* Numbers under way from one peer; all together so many that receives and mailboxes stay within a few MiB. */
        uint32_t share = (1u << 16) / size;
        if (share < MIN_WINDOW) share = MIN_WINDOW;
        if (share > MAX_WINDOW) share = MAX_WINDOW;
        if (share > receives_a_peer(comm, all)) share = receives_a_peer(comm, all);
        if (!share) share = 1;                            /* strategy_unchecked */
        comm->window = 1u << (31 - __builtin_clz(share)); /* a power of two: places go on where numbers wrap */
    }
    comm->immediate_bits = 0;
    const bool wakes = s->adder == ADDER_TARGET && s->hold && immediates_show(all) && receives_return(all) &&
                       receives_a_peer(comm, all);
    if (wakes || sequenced) comm->immediate_bits = all->caps.immediate_bits;
    comm->flush_arrivals = !(all->caps.flags & UCCL_EP_CAP_IMM_VISIBLE) && all->functions & HAS_FLUSH_LOCAL;
    comm->replenish = comm->caps.flags & UCCL_EP_CAP_IMM_NEEDS_RECEIVE && comm->backend->replenish;
}

static const char *raise_text(const promised *one) {
    const uint32_t by = raise_by(one);
    return by == RAISE_NONE      ? "by themselves"
           : by == RAISE_REQUEST ? "on request"
           : by == RAISE_READ    ? "by a read behind them"
                                 : "not at all";
}

/* Whose NIC keeps all from the strategy. One that lacks something while others do not can be changed for another; where
 * each would do alone, but not in the same way, they must be of one kind. */
static void blame(const uccl_ep_comm *comm, const promised *all, const promised *each, const struct strategy *s,
                  char *text, size_t bytes) {
    list lacks = {"", 0}, of_first = {"", 0};
    uint32_t lacking = 0, first = 0, other = 0;
    missing(comm, all, s, &lacks);
    for (uint32_t rank = 0; rank < comm->size; rank++) {
        list l = {"", 0};
        missing(comm, &each[rank], s, &l);
        if (!l.used) continue;
        if (!lacking++) first = rank, of_first = l;
    }
    while (other + 1 < comm->size && raise_by(&each[other]) == raise_by(&each[0])) other++;
    const bool by_cpu = s->adder == ADDER_TARGET && comm->config.signals_kind != UCCL_EP_MEMORY_HOST;
    const bool by_nic = s->adder != ADDER_TARGET && comm->staged;
    if (by_cpu || by_nic || (s->needs & NEEDS_ONE_WRITER && !(comm->config.flags & UCCL_EP_CONFIG_SINGLE_WRITER)))
        snprintf(text, bytes, "it needs %s", lacks.text);
    else if (lacking == comm->size)
        snprintf(text, bytes, "the NIC lacks %s", lacks.text);
    else if (lacking > 1)
        snprintf(text, bytes, "give rank %u, and %u more, another NIC (device): theirs lack %s", first, lacking - 1,
                 of_first.text);
    else if (lacking)
        snprintf(text, bytes, "give rank %u another NIC (device): unlike others' its own lacks %s", first,
                 of_first.text);
    else if (raise_by(&each[other]) != raise_by(&each[0]))
        snprintf(text, bytes,
                 "give all ranks NICs of one kind (device): completed writes become visible (MEM-3) %s at rank 0 and "
                 "%s at rank %u",
                 raise_text(&each[0]), raise_text(&each[other]), other);
    else
        snprintf(text, bytes, "give all ranks NICs of one kind (device): together they lack %s", lacks.text);
}

uccl_ep_status strategy_choose(uccl_ep_comm *comm, const promised *all, const promised *each) {
    char why[256];
    list best = {"", 0};
    for (size_t i = 0; i < STRATEGIES; i++) {
        const struct strategy *s = &strategies[i];
        list lacks = {"", 0};
        if (comm->config.strategy != UCCL_EP_STRATEGY_AUTO && comm->config.strategy != s->id) continue;
        missing(comm, all, s, &lacks);
        if (!lacks.used) {
            take(comm, all, s);
            if (comm->config.strategy == s->id)
                snprintf(comm->strategy_reason, sizeof comm->strategy_reason,
                         "asked for, and the NIC promises all it needs");
            else if (i)
                snprintf(comm->strategy_reason, sizeof comm->strategy_reason, "%s lacks: %s", strategies[0].name,
                         best.text);
            else
                snprintf(comm->strategy_reason, sizeof comm->strategy_reason, "the NIC promises all it needs");
            return UCCL_EP_OK;
        }
        /* The advice comes first: what is missing may be more than a text holds. */
        if (comm->config.strategy == s->id) {
            blame(comm, all, each, s, why, sizeof why);
            return fail_local(UCCL_EP_E_CAPABILITY, "SIG-7", "take auto, or another than %s: %s", s->name, why);
        }
        if (!i) best = lacks;
    }
    blame(comm, all, each, &strategies[STRATEGIES - 1], why, sizeof why);
    return fail_local(UCCL_EP_E_CAPABILITY, "SIG-7", "no signal strategy works, not even the one that needs least: %s",
                      why);
}
