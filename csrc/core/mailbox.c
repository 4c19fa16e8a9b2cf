/* SPDX-License-Identifier: Apache-2.0
 *
 * mailbox.c: what ranks tell each other besides commands, and the signals that a proxy adds for others.
 *
 * Two strategies use it. *Sequenced immediate*: writes are numbered by their immediates; here the receiving side keeps
 * which numbers are here, and once there is no gap below a signal's record, adds it. *Sender hold with a mailbox*: the
 * record comes when everything before it is visible, one at a time from a source; a byte, or an immediate, says whom to
 * look at. Both answer with a return word, which frees places, numbers and receives at the source and tells it that its
 * signals were added.
 *
 * Where heaps are staged, puts have records too, with the bytes that they are for; the target brings those to its heap
 * before it adds signals and counts them as come (staging.c).
 *
 * No order is asked of the NIC anywhere: a record is believed by its number or tag, the byte that wakes says only where
 * to look and is looked at until the record is there, and the greatest return word counts. Of return words and wake
 * bytes one is under way to a peer at a time, since the one that lands last stays.
 */
#include "mailbox.h"

#include <stdio.h>

#include "staging.h"

#define LINE 64u
#define STAGED_RECORD_BYTES (sizeof(struct record) + sizeof(struct extent))
#define WATCHED_AT_ONCE 256u

static bool tagged(const struct proxy *p) {
    return p->hold && p->adder == ADDER_TARGET;
}

static uint64_t line_up(uint64_t bytes) {
    return (bytes + LINE - 1) / LINE * LINE;
}

/* The same on all ranks: it depends on what they agreed on alone. */
static void layout(const uccl_ep_comm *comm, struct mailbox *m) {
    /* No command comes at a finer granularity than 16, so no NIC that is used asks for more alignment than that. */
    const uint32_t alignment = comm->agreed.caps.write_alignment;
    UCCL_EP_ASSERT(alignment <= sizeof(struct record));
    m->wake_bytes = alignment;
    m->return_bytes = alignment > sizeof(uint64_t) ? alignment : (uint32_t)sizeof(uint64_t);
    m->record_bytes = comm->staged ? STAGED_RECORD_BYTES : sizeof(struct record);
    const bool records = comm->adder != ADDER_NIC;
    m->slots = comm->window ? comm->window : records;
    m->returns = 0;
    m->records = records ? line_up((uint64_t)comm->size * m->return_bytes) : 0;
    m->wakes = m->records + line_up((uint64_t)comm->size * m->slots * m->record_bytes);
    m->read = m->wakes + (records ? line_up((uint64_t)comm->size * m->wake_bytes) : 0);
    m->box_bytes = m->read + LINE;
}

uint64_t mailbox_bytes(const uccl_ep_comm *comm) {
    struct mailbox m;
    if (comm->adder == ADDER_NIC && comm->raise != RAISE_READ) return 0;
    layout(comm, &m);
    return 2 * m.box_bytes * comm->config.proxies;
}

static uint64_t record_place(const struct mailbox *m, uint32_t rank, uint64_t number) {
    return m->records + ((uint64_t)rank * m->slots + number % m->slots) * m->record_bytes;
}

static uint64_t return_place(const struct mailbox *m, uint32_t rank) {
    return m->returns + (uint64_t)rank * m->return_bytes;
}

static uint64_t wake_place(const struct mailbox *m, uint32_t rank) {
    return m->wakes + (uint64_t)rank * m->wake_bytes;
}

static void *at(const struct mailbox *m, uint64_t box, uint64_t place) {
    return m->base + box + place;
}

/* Of a pair whose records are all zero: counts begin. Touches no more memory than it has to, for there are 4096. */
static void pair_begin(struct proxy *p, uint32_t target) {
    const uint64_t first = p->comm->config.first_sequence;
    struct link *l = &p->links[target];
    const bool return_due = l->return_due, watched = l->watched; /* it stays in the lists that it is in */
    *l = (struct link){.returned = first,
                       .expected = first + 1,
                       .control_seq = (uint32_t)first,
                       .return_due = return_due,
                       .watched = watched};
    if (tagged(p)) l->records = first;
    const struct mailbox *m = &p->mailbox;
    for (uint32_t box = 0; box < 2; box++) {
        const uint64_t base = box ? m->outbox : m->inbox;
        memcpy(at(m, base, return_place(m, target)), &first, sizeof first);
        *(uint8_t *)at(m, base, wake_place(m, target)) = (uint8_t)first;
    }
    /* Else the first record's byte may be the one that was seen last before. */
    if (p->wakes_seen) ((uint8_t *)p->wakes_seen)[(uint64_t)target * m->wake_bytes] = (uint8_t)first;
    /* Zeros are a record of the count whose tag is zero, and that may be the first one to come. */
    const struct record last_one = record_tagged(0, 0, first);
    const struct extent of_last = extent_of(0, 0, false, first);
    if (tagged(p) && record_is_tagged(&(struct record){{0, 0}}, first + 1)) {
        memcpy(at(m, m->inbox, record_place(m, target, 0)), &last_one, sizeof last_one);
        if (p->comm->staged)
            memcpy(at(m, m->inbox, record_place(m, target, 0) + sizeof last_one), &of_last, sizeof of_last);
    }
    staging_reset(p, target);
}

void mailbox_open(uccl_ep_comm *comm, struct proxy *p) {
    layout(comm, &p->mailbox);
    struct mailbox *m = &p->mailbox;
    m->base = comm->mailbox;
    m->inbox = 2 * m->box_bytes * p->index;
    m->outbox = m->inbox + m->box_bytes;
    for (uint32_t target = 0; target < p->size && p->links; target++) pair_begin(p, target);
}

/* Both ends of a pair start as after create. Nothing is under way between them. */
void mailbox_reset(struct proxy *p, uint32_t target) {
    if (!p->links) return;
    const struct mailbox *m = &p->mailbox;
    for (uint32_t box = 0; box < 2; box++)
        memset(at(m, box ? m->outbox : m->inbox, record_place(m, target, 0)), 0, m->slots * m->record_bytes);
    pair_begin(p, target);
}

/* --------------------------------------------------------------------------------------------------------- sending */

static inline void mailbox_write(const struct proxy *p, uccl_ep_operation *o, uint64_t local, uint64_t remote,
                                 uint32_t bytes) {
    *o = (uccl_ep_operation){.kind = UCCL_EP_OPERATION_WRITE,
                             .flags = UCCL_EP_OPERATION_SIGNALLED | p->put_flags,
                             .local_region = UCCL_EP_REGION_MAILBOX,
                             .remote_region = UCCL_EP_REGION_MAILBOX,
                             .length = bytes,
                             .local_offset = p->mailbox.outbox + local,
                             .remote_offset = p->mailbox.inbox + remote};
}

/* Behind a record in the outbox: what it is to bring. */
static void add_extent(const struct proxy *p, const struct entry *e, uint64_t place, uint64_t number) {
    if (!p->staging) return;
    const uint64_t bytes = staging_bytes(p, e);
    const struct extent x = extent_of(bytes ? staging_offset(p, e) : 0, bytes, has_signal(e), number);
    memcpy(at(&p->mailbox, p->mailbox.outbox, place + sizeof(struct record)), &x, sizeof x);
}

/* Sequenced: the record of operation `number`. */
void mailbox_numbered(const struct proxy *p, uint32_t target, const struct entry *e, uint64_t number,
                      uccl_ep_operation *o) {
    const struct mailbox *m = &p->mailbox;
    const uint64_t local = record_place(m, target, number), remote = record_place(m, p->comm->rank, number);
    const struct record r = record_numbered(e->add, e->slot, number);
    memcpy(at(m, m->outbox, local), &r, sizeof r);
    add_extent(p, e, local, number);
    mailbox_write(p, o, local, remote, m->record_bytes);
    o->kind = UCCL_EP_OPERATION_WRITE_IMM;
}

/* Sender hold: what wakes the target, whose record is on its way. Returns how many operations. */
uint32_t mailbox_wake(struct proxy *p, uint32_t target, uccl_ep_operation *o) {
    const struct mailbox *m = &p->mailbox;
    *(uint8_t *)at(m, m->outbox, wake_place(m, target)) = (uint8_t)(p->links[target].records + 1);
    mailbox_write(p, o, wake_place(m, target), wake_place(m, p->comm->rank), m->wake_bytes);
    return 1;
}

/* Sender hold: the record of `e`, which is due and adds `add`, and what wakes its target. Returns how many operations.
 */
uint32_t mailbox_tagged(struct proxy *p, uint32_t target, const struct entry *e, uint64_t add, uccl_ep_operation *o) {
    const struct mailbox *m = &p->mailbox;
    const uint64_t count = p->links[target].records + 1;
    const struct record r = record_tagged(add, e->slot, count);
    memcpy(at(m, m->outbox, record_place(m, target, 0)), &r, sizeof r);
    add_extent(p, e, record_place(m, target, 0), count);
    mailbox_write(p, o, record_place(m, target, 0), record_place(m, p->comm->rank, 0), m->record_bytes);
    if (!p->comm->immediate_bits) return 1 + mailbox_wake(p, target, o + 1);
    o->kind = UCCL_EP_OPERATION_WRITE_IMM;
    return 1;
}

/* Sender hold: the new sum of a word whose only writer this rank is. */
void mailbox_sum(struct proxy *p, uint32_t target, uint32_t slot, uint64_t add, uccl_ep_operation *o) {
    const struct mailbox *m = &p->mailbox;
    const uint64_t local = record_place(m, target, 0), sum = p->sums[(uint64_t)target * p->signals + slot] + add;
    memcpy(at(m, m->outbox, local), &sum, sizeof sum);
    mailbox_write(p, o, local, 0, sizeof sum);
    o->remote_region = UCCL_EP_REGION_SIGNALS;
    o->remote_offset = p->bank_offset + slot * sizeof sum;
}

/* What the peer is told by a return word: the last of its numbers, or records, behind which there is no gap. */
static uint64_t return_value(const struct link *l) {
    return l->expected - 1;
}

static void owe_return(struct proxy *p, uint32_t target) {
    struct link *l = &p->links[target];
    if (l->return_due) return;
    l->return_due = true;
    p->returns_due[p->returns_count++] = (uint16_t)target;
}

/* A return word that was under way has arrived. */
void mailbox_return_done(struct proxy *p, uint32_t target) {
    struct link *l = &p->links[target];
    uint64_t sent;
    memcpy(&sent, at(&p->mailbox, p->mailbox.outbox, return_place(&p->mailbox, target)), sizeof sent);
    l->returning = false;
    if (sent != return_value(l)) owe_return(p, target);
}

/* Returns false if it has to be tried again. */
static bool send_return(struct proxy *p, uint32_t target) {
    struct peer *q = &p->peers[target];
    struct link *l = &p->links[target];
    const struct mailbox *m = &p->mailbox;
    if (q->state != PEER_UP || l->returning)
        return true; /* who is given up gets none; else mailbox_return_done() looks again */
    if (p->inflight >= p->max_inflight) return false;
    uccl_ep_operation o;
    const uint64_t local = return_place(m, target), value = return_value(l);
    memcpy(at(m, m->outbox, local), &value, sizeof value);
    mailbox_write(p, &o, local, return_place(m, p->comm->rank), m->return_bytes);
    o.flags |= p->return_flags;
    if (p->in_order)
        o.cookie = (uint64_t)q->incarnation << 32 | (uint32_t)(q->seq_issued + 1);
    else
        o.cookie = flight_take(p, FLIGHT_RETURN, 0, target);
    if (!submit_control(p, target, &o)) {
        if (!p->in_order) flights_untake(p, 1);
        return q->state != PEER_UP;
    }
    l->returning = true;
    if (p->in_order) {
        l->control_seq = ++q->seq_issued;
        q->uncovered = 0;
    }
    p->inflight++;
    p->stats.returns++;
    return true;
}

static bool send_returns(struct proxy *p) {
    const uint32_t n = p->returns_count;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t target = p->returns_due[i];
        p->links[target].return_due = false;
        if (send_return(p, target)) continue;
        p->links[target].return_due = true;
        p->returns_due[kept++] = (uint16_t)target;
    }
    /* A peer that fails meanwhile owes and is owed nothing, so none was added behind these. */
    UCCL_EP_ASSERT(p->returns_count == n);
    p->returns_count = kept;
    return kept != n;
}

/* -------------------------------------------------------------------------------------------------------- receiving */

/* Who is watched is looked at in this pass, and in later ones as long as something is to come. */
static void watch(struct proxy *p, uint32_t source) {
    struct link *l = &p->links[source];
    if (l->watched) return;
    l->watched = true;
    p->watched[p->watched_count++] = (uint16_t)source;
}

static void add(struct proxy *p, uint32_t slot, uint64_t value) {
    uccl_ep_comm *comm = p->comm;
    /* A release: the payload is visible before (flushed, or by the completion that told of it). Proxies of this rank
     * may add to one word together. */
    __atomic_fetch_add(&comm->signal_words[slot], value, __ATOMIC_RELEASE);
    p->stats.applied++;
}

/* A record that no encoder writes: whoever wrote it is not to be trusted with more. */
static void bad_record(struct proxy *p, uint32_t source, uint32_t slot) {
    uccl_ep_error error;
    fill_error(p, &error, UCCL_EP_E_MALFORMED, "ERR-4", source);
    snprintf(
        error.text, sizeof error.text,
        "rank %u wrote a record for signal %u, and there are %u: it is given up, since nothing that it says can be "
        "believed",
        source, slot, p->signals);
    peer_fail(p, source, &error);
}

/* Broken on purpose (mailbox_unsequenced): a record is believed when its own immediate comes, whatever is missing. */
static void apply_at_once(struct proxy *p, uint32_t source, uint64_t number) {
    struct record *const place = at(&p->mailbox, p->mailbox.inbox, record_place(&p->mailbox, source, number));
    const struct record r = record_read(place);
    if (!record_is_numbered(&r, number) || record_slot(&r) >= p->signals) return;
    const uint64_t value = r.word[0];
    const uint32_t slot = record_slot(&r);
    record_clear(place);
    add(p, slot, value);
}

void mailbox_immediate(struct proxy *p, uint32_t source, uint64_t immediate) {
    if (UNLIKELY(source >= p->size || !p->links || p->peers[source].state != PEER_UP)) {
        p->stats.stale++;
        return;
    }
    struct link *l = &p->links[source];
    uint64_t number = 0;
    if (p->sequenced) {
        const uint32_t ahead = immediate_ahead(immediate, l->expected, p->comm->immediate_bits, p->window);
        number = l->expected + ahead;
        const uint64_t place = number % MAX_WINDOW, bit = 1ull << (place & 63);
        if (UNLIKELY(ahead == UINT32_MAX || l->arrived[place >> 6] & bit)) {
            p->stats.stale++; /* a duplicate */
            return;
        }
        l->arrived[place >> 6] |= bit;
    }
    if (l->receives_used < UINT16_MAX) l->receives_used++;
    if (FAULT(mailbox_unsequenced) && p->sequenced) apply_at_once(p, source, number);
    watch(p, source);
}

/* How far `source` has come without a gap. */
static uint64_t gapless(const struct proxy *p, const struct link *l) {
    uint64_t number = l->expected;
    for (uint32_t n = 0; n < p->window; n++, number++)
        if (!(l->arrived[number % MAX_WINDOW >> 6] >> (number & 63) & 1)) break;
    return number;
}

/* Its numbers up to `end` are dealt with. */
static void forget(struct link *l, uint64_t end) {
    for (uint64_t number = l->expected; number != end; number++)
        l->arrived[number % MAX_WINDOW >> 6] &= ~(1ull << (number & 63));
}

/* Has the record of that number, which has come, a signal? */
static bool signals(const struct proxy *p, uint32_t source, uint64_t number) {
    if (!p->staging) return true;
    struct extent x;
    memcpy(&x, at(&p->mailbox, p->mailbox.inbox, record_place(&p->mailbox, source, number) + sizeof(struct record)),
           sizeof x);
    return extent_signals(&x);
}

static void apply_numbered(struct proxy *p, uint32_t source, uint64_t end) {
    struct link *l = &p->links[source];
    const struct mailbox *m = &p->mailbox;
    forget(l, end);
    for (; l->expected != end; l->expected++) {
        struct record *const place = at(m, m->inbox, record_place(m, source, l->expected));
        const struct record r = record_read(place);
        if (!record_is_numbered(&r, l->expected)) continue; /* that number was a put's */
        const uint32_t slot = record_slot(&r);
        const uint64_t value = r.word[0];
        record_clear(place);
        if (!signals(p, source, l->expected)) continue;
        if (UNLIKELY(slot >= p->signals)) {
            bad_record(p, source, slot);
            return;
        }
        add(p, slot, value);
    }
}

/* The record that is next, if it is there. */
static bool tagged_here(const struct proxy *p, uint32_t source, struct record *r) {
    const struct mailbox *m = &p->mailbox;
    const uint64_t place = record_place(m, source, 0), count = p->links[source].expected;
    const uint64_t *from = at(m, m->inbox, place);
    /* Word by word, each with its tag: they land as they like. */
    *r = (struct record){{__atomic_load_n(&from[0], __ATOMIC_ACQUIRE), __atomic_load_n(&from[1], __ATOMIC_ACQUIRE)}};
    if (!record_is_tagged(r, count)) return false;
    if (!p->staging) return true;
    const struct extent x = {
        {__atomic_load_n(&from[2], __ATOMIC_ACQUIRE), __atomic_load_n(&from[3], __ATOMIC_ACQUIRE)}};
    return extent_is_of(&x, count);
}

/* What the record of that number, which has come, is to bring. Returns whether there is such a record. */
bool mailbox_extent(const struct proxy *p, uint32_t source, uint64_t number, uint64_t *offset, uint64_t *bytes) {
    const struct mailbox *m = &p->mailbox;
    const char *from = at(m, m->inbox, record_place(m, source, number));
    struct record r;
    struct extent x;
    memcpy(&r, from, sizeof r);
    memcpy(&x, from + sizeof r, sizeof x);
    if (p->sequenced && !record_is_numbered(&r, number)) return false;
    *offset = extent_offset(&x);
    *bytes = extent_is_of(&x, number) ? extent_bytes(&x) : UINT64_MAX; /* no encoder writes it */
    return true;
}

static void apply_tagged(struct proxy *p, uint32_t source, const struct record *r) {
    struct link *l = &p->links[source];
    const uint32_t slot = record_tagged_slot(r);
    const bool signal = signals(p, source, l->expected++);
    if (UNLIKELY(slot >= p->signals))
        bad_record(p, source, slot);
    else if (signal)
        add(p, slot, record_tagged_add(r));
}

/* Bytes that wake: a line of them, 64 sources, and another in the next pass: idling costs the same with any number. */
static void look_at_wakes(struct proxy *p) {
    const struct mailbox *m = &p->mailbox;
    const uint32_t first = p->wake_line * LINE;
    const uint64_t *line = at(m, m->inbox, m->wakes + first);
    for (uint32_t w = 0; w < LINE / 8; w++) {
        uint64_t changed = __atomic_load_n(&line[w], __ATOMIC_ACQUIRE) ^ p->wakes_seen[p->wake_line * (LINE / 8) + w];
        p->wakes_seen[p->wake_line * (LINE / 8) + w] ^= changed;
        while (UNLIKELY(changed)) {
            const uint32_t byte = (uint32_t)__builtin_ctzll(changed) / 8,
                           source = (first + w * 8 + byte) / m->wake_bytes;
            changed &= ~(0xffull << byte * 8);
            if (source < p->size) watch(p, source);
        }
    }
    p->wake_line = first + LINE < p->size * m->wake_bytes ? p->wake_line + 1 : 0;
}

/* More is to come from this source: its byte counts one that is not here yet. */
static bool awaited(const struct proxy *p, uint32_t source) {
    const struct mailbox *m = &p->mailbox;
    if (p->comm->immediate_bits) return false; /* they tell of it, and of nothing that is not here */
    const uint8_t count = __atomic_load_n((uint8_t *)at(m, m->inbox, wake_place(m, source)), __ATOMIC_ACQUIRE);
    return (int8_t)(count - (uint8_t)return_value(&p->links[source])) > 0;
}

/* Bytes that immediates told of may still be on their way to those who read them (MEM-3). */
static bool flush(struct proxy *p) {
    static const uccl_ep_region regions[] = {UCCL_EP_REGION_HEAP, UCCL_EP_REGION_MAILBOX};
    if (!p->comm->flush_arrivals || FAULT(flush_skipped)) return true;
    p->stats.flushes++;
    for (size_t i = 0; i < sizeof regions / sizeof *regions; i++) {
        host_fail_clear();
        const uccl_ep_status status = p->comm->backend->flush_local(p->endpoint, regions[i]);
        if (LIKELY(status == UCCL_EP_OK)) continue;
        char why[160];
        snprintf(why, sizeof why, "flush_local() gave %s %.100s", uccl_ep_status_name(status), host_fail_text());
        endpoint_fail(p, checked_status(status), why);
        return false;
    }
    return true;
}

/* Receives go back before the return word, which lets the source use them. */
static void replenish(struct proxy *p, uint32_t source) {
    struct link *l = &p->links[source];
    const uint32_t n = l->receives_used;
    l->receives_used = 0;
    if (!n || !p->comm->replenish) return;
    host_fail_clear();
    const uccl_ep_status status = p->comm->backend->replenish(p->endpoint, source, n);
    if (UNLIKELY(status != UCCL_EP_OK)) control_refused(p, source, status);
}

/* A record, or several, and their bytes, and then their signals. Returns whether more is to be looked for. */
static bool receive_numbered(struct proxy *p, uint32_t source, uint64_t end) {
    if (p->staging && !staging_landed(p, source, &end)) return true;
    apply_numbered(p, source, end);
    return p->staging && gapless(p, &p->links[source]) != end; /* what came while bytes were brought */
}

static bool receive_tagged(struct proxy *p, uint32_t source) {
    /* Looked at once: what comes after this look has not been brought. */
    struct record r;
    if (!tagged_here(p, source, &r)) return awaited(p, source);
    uint64_t end = p->links[source].expected + 1;
    if (!p->staging || staging_landed(p, source, &end)) apply_tagged(p, source, &r);
    return true;
}

static bool look_at_watched(struct proxy *p) {
    const uint32_t n = p->watched_count;
    uint32_t kept = 0;
    bool worked = false;
    if (!n) return false;
    uint64_t ends[WATCHED_AT_ONCE] = {0};
    for (uint32_t begin = 0; begin < n;) {
        const uint32_t some = n - begin < WATCHED_AT_ONCE ? n - begin : WATCHED_AT_ONCE;
        /* First how far each has come, then one flush for all of that, then the signals (MEM-3). */
        if (p->sequenced) {
            bool any = false;
            for (uint32_t i = 0; i < some; i++) {
                const uint32_t source = p->watched[begin + i];
                const struct link *l = &p->links[source];
                const bool lands = p->staging && staging_lands(p, source); /* the next group waits for it */
                ends[i] = lands ? l->expected : gapless(p, l);
                any |= ends[i] != l->expected;
            }
            if (any && !flush(p)) return true;
        } else if (p->comm->immediate_bits && !flush(p)) {
            return true;
        }
        for (uint32_t i = 0; i < some; i++) {
            const uint32_t source = p->watched[begin + i];
            struct link *l = &p->links[source];
            const uint64_t before = l->expected;
            bool more = false;
            if (p->peers[source].state == PEER_UP) {
                more = p->sequenced ? receive_numbered(p, source, ends[i]) : receive_tagged(p, source);
                if (p->peers[source].state == PEER_UP) replenish(p, source);
            }
            if (l->expected != before && p->peers[source].state == PEER_UP) {
                worked = true;
                if (!l->returning) owe_return(p, source);
            }
            if (more)
                p->watched[kept++] = (uint16_t)source;
            else
                l->watched = false;
        }
        begin += some;
    }
    p->watched_count = kept;
    return worked;
}

/* --------------------------------------------------------------------------------------------------- the sending side
 */

/* Number of the last operation that was submitted to the peer. */
uint64_t mailbox_issued(const struct proxy *p, const struct peer *q) {
    const struct link *l = link_of(p, q);
    if (tagged(p)) return l->records;
    return l->returned + (uint32_t)(q->seq_issued - (uint32_t)l->returned);
}

/* The peer owes a return word. */
bool mailbox_awaits(const struct proxy *p, uint32_t target) {
    return p->links && mailbox_issued(p, &p->peers[target]) != p->links[target].returned;
}

/* How many numbers may be used before the peer returns some. */
uint32_t mailbox_window(const struct proxy *p, const struct peer *q) {
    const uint32_t used = (uint32_t)(mailbox_issued(p, q) - link_of(p, q)->returned);
    return used < p->window ? p->window - used : 0;
}

/* Return words of peers with something outstanding. */
static bool look_at_returns(struct proxy *p) {
    const struct mailbox *m = &p->mailbox;
    bool worked = false;
    for (uint32_t w = 0; w < (p->size + 63) / 64; w++) {
        for (uint64_t bits = p->busy[w]; bits; bits &= bits - 1) {
            const uint32_t target = w * 64 + (uint32_t)__builtin_ctzll(bits);
            struct peer *q = &p->peers[target];
            if (q->state != PEER_UP) continue;
            struct link *l = &p->links[target];
            const uint64_t *from = at(m, m->inbox, return_place(m, target));
            const uint64_t issued = mailbox_issued(p, q);
            const uint64_t word = FAULT(return_word_ignored) ? issued : __atomic_load_n(from, __ATOMIC_ACQUIRE);
            if (!return_take(word, issued, &l->returned)) continue;
            worked = true;
            q->progress = p->tick;
            retire_head(p, target);
        }
    }
    return worked;
}

bool mailbox_pass(struct proxy *p) {
    bool worked = false;
    if (p->busy_count) worked |= look_at_returns(p);
    if (UNLIKELY(p->endpoint_broken)) return worked;
    if (p->wakes_seen) look_at_wakes(p);
    if (p->watched_count) worked |= look_at_watched(p);
    if (p->returns_count) worked |= send_returns(p);
    return worked;
}
