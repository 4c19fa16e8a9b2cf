/* SPDX-License-Identifier: Apache-2.0
 *
 * issue.c: from a peer's order list to operations of the NIC.
 *
 * A walk from `issue` plans a batch within the limits and moves `issue` behind it. A NIC that takes less than all of it
 * has the walk taken back and done again for exactly what it took, so what it refused was never issued (B1: never
 * advance an index before the NIC has said yes).
 */
#include "staging.h"

void activate(struct proxy *p, struct peer *q) {
    if (q->active) return;
    q->active = 1;
    p->active[p->active_count++] = (uint16_t)(q - p->peers);
}

/*
 * Limits share what is left: a peer may hold as much as is still free for all others together. A stalled peer thus
 * never takes the last of it (PRG-2), and a peer alone still gets half. (Dynamic thresholds of shared-memory switches:
 * Choudhury and Hahne, 1998.)
 */
static uint32_t operations_allowed(const struct proxy *p, const struct peer *q) {
    const uint32_t left = p->max_inflight - p->inflight;
    const uint32_t mine = peer_inflight(q);
    uint32_t room = left > mine ? left - mine : 0;
    if (!room && !mine && left) room = 1;
    if (mine + room > p->max_inflight_peer) room = p->max_inflight_peer > mine ? p->max_inflight_peer - mine : 0;
    /* A batch ends where sequences wrap: within one, the next cookie is the last one + 1. */
    const uint32_t to_wrap = 0u - (q->seq_issued + 1);
    if (to_wrap && room > to_wrap) room = to_wrap;
    return room < p->max_batch ? room : p->max_batch;
}

static uint64_t bytes_allowed(const struct proxy *p, const struct peer *q) {
    const uint64_t used = p->inflight_bytes + q->inflight_bytes;
    return used < p->max_inflight_bytes ? (p->max_inflight_bytes - used) / 2 : 0;
}

/* More than its share of bytes, after `planned`? A put larger than all limits goes in one of these ways, too. */
static bool bytes_allowed_beyond(const struct proxy *p, const struct peer *q, uint64_t planned, uint32_t length) {
    const uint64_t total = p->inflight_bytes + planned;
    if (total <= p->max_inflight_bytes / 4) return true;
    /* What it has in flight comes back only once it submits more. */
    if (q->uncovered && !planned) return true;
    return !q->inflight_bytes && !planned && total + length <= p->max_inflight_bytes;
}

/* A batch in the making. */
typedef struct batch {
    uint32_t room, n; /* operations: at most, and planned */
    uint32_t holds, merged, flow_stops;
    bool copying;   /* it ends where a source is not in the mirror yet */
    uint64_t bytes; /* of the puts planned */
    uccl_ep_operation operations[BATCH_OPERATIONS];
} batch;

/* How signals are submitted. */
enum form {
    FORM_ADD,      /* an add right behind the puts */
    FORM_HOLD,     /* once all before it is visible */
    FORM_SEQUENCED /* as one more of the numbered writes */
};

/* Flags and the bank of an add are put in by dress(), where there are any. */
static inline void write_put(uccl_ep_operation *o, const struct entry *e, uint32_t begin, uint32_t length) {
    o->kind = UCCL_EP_OPERATION_WRITE;
    o->flags = 0;
    o->local_region = UCCL_EP_REGION_HEAP;
    o->remote_region = UCCL_EP_REGION_HEAP;
    o->length = length;
    o->local_offset = e->local + begin;
    o->remote_offset = e->remote + begin;
    o->value = 0;
}

static inline void write_add(uccl_ep_operation *o, uint32_t slot, uint64_t add) {
    o->kind = UCCL_EP_OPERATION_ADD64;
    o->flags = 0;
    o->local_region = 0;
    o->remote_region = UCCL_EP_REGION_SIGNALS;
    o->length = 8;
    o->local_offset = 0;
    o->remote_offset = (uint64_t)slot * 8;
    o->value = add;
}

/* Completions of an in-order NIC are told by sequence; of another by flight, whose cookie this gives. */
__attribute__((noinline)) static uint64_t count_outstanding(struct proxy *p, struct entry *e) {
    if (!FAULT(complete_at_submit)) e->outstanding++;
    e->group = 1;
    return flight_take(p, FLIGHT_COMMAND, (uint32_t)(e - p->entries), e->target);
}

/* The next operation of `e` has this cookie. `seq` counts operations to the peer, on any NIC. */
static inline uint64_t cookie_of(struct proxy *p, struct entry *e, uint64_t seq, bool in_order) {
    return in_order ? seq : count_outstanding(p, e);
}

/*
 * `o` carries the whole put of `first`. Let it carry what follows as long as channel, source and target go on where the
 * last one ended. Returns the last entry carried; no other of them has a signal.
 */
static struct entry *merge(const struct proxy *p, batch *b, uccl_ep_operation *o, struct entry *first, uint32_t seq,
                           uint64_t bytes_room) {
    struct entry *last = first;
    while (last->flags & ENTRY_FOLLOWED) {
        struct entry *next = last->next;
        if (next->channel != first->channel || next->stage != STAGE_TAKEN || !next->bytes || next->bytes > bytes_room ||
            (uint64_t)o->length + next->bytes > p->max_message_bytes)
            break;
        if (next->local != last->local + last->bytes && !FAULT(merge_across_gap)) break;
        bytes_room -= next->bytes;
        o->length += next->bytes;
        next->bytes_issued = next->bytes;
        last->last_seq = seq;
        if (!p->in_order) {
            next->outstanding++;
            first->group++;
        }
        b->merged++;
        last = next;
    }
    return last;
}

/* All operations of `e` are complete, and visible. */
static inline bool settled(const struct proxy *p, const struct peer *q, const struct entry *e) {
    if (!p->in_order) return !e->outstanding;
    const uint32_t visible = p->raise == RAISE_READ ? q->seq_visible : q->seq_completed;
    return (int32_t)(visible - e->last_seq) >= 0;
}

/*
 * Held signals go one at a time, so what waits behind the one that is due and adds to the same word goes along with it:
 * a sum is as good as its parts in a row (SIG-1, SIG-5). Only of its channel, for another signal of that one must come
 * in between, and only as far as all before is visible. Returns what they add; with `take`, they are done when it is.
 */
static uint64_t go_along(const struct proxy *p, const struct peer *q, const struct entry *end, bool take) {
    struct entry *const due = q->head;
    uint64_t sum = 0;
    uint32_t looked = 0;
    if (!has_signal(due)) return 0; /* a staged put, whose record is for its bytes alone */
    for (struct entry *e = due->next; e && e != end && looked < GO_ALONG; e = e->next, looked++) {
        if (!settled(p, q, e)) break;
        if (p->staging && staging_bytes(p, e)) break; /* its bytes are not in the target's heap yet */
        if (!has_signal(e) || e->stage != STAGE_HELD || e->channel != due->channel) continue;
        if (e->slot != due->slot) break;
        sum += e->add;
        if (!take) continue;
        e->stage = STAGE_TAKEN;
        e->flags |= ENTRY_SOURCE_DONE;
    }
    return sum;
}

/*
 * The signal that is due at the head, in the form of hold that is used: all of it, or what there is room for. With a
 * mailbox it may be two operations, of which a NIC takes the first alone; the record then stays as it went.
 */
__attribute__((noinline)) static uccl_ep_operation *plan_due(struct proxy *p, struct peer *q, uccl_ep_operation *o,
                                                             const uccl_ep_operation *end, uint64_t *seq) {
    struct entry *e = q->head;
    const uint32_t target = (uint32_t)(q - p->peers);
    const bool sent = e->flags & ENTRY_RECORD_SENT;
    const uint64_t add = sent ? 0 : e->add + go_along(p, q, q->issue, false);
    uccl_ep_operation due[2];
    uint32_t n = 1;
    if (p->adder == ADDER_TARGET)
        n = sent ? mailbox_wake(p, target, due) : mailbox_tagged(p, target, e, add, due);
    else if (p->adder == ADDER_SOURCE)
        mailbox_sum(p, target, e->slot, add, due);
    else
        write_add(due, e->slot, add);
    for (uint32_t i = 0; i < n; i++) {
        if (o == end) return o;
        *o = due[i];
        ++*seq;
        o++->cookie = cookie_of(p, e, *seq, p->in_order);
        e->last_seq = (uint32_t)*seq;
        if (i + 1 < n) e->flags |= ENTRY_RECORD_SENT;
    }
    e->stage = p->adder == ADDER_TARGET ? STAGE_APPLYING : STAGE_TAKEN;
    return o;
}

/* Broken on purpose (signal_not_held, two_sums_in_flight): the signal goes out behind its puts at once. */
static uccl_ep_operation *plan_unheld(struct proxy *p, struct peer *q, struct entry *e, uccl_ep_operation *o,
                                      uint64_t *seq) {
    const uint32_t target = (uint32_t)(q - p->peers);
    uint32_t n = 1;
    if (p->adder == ADDER_TARGET) {
        n = mailbox_tagged(p, target, e, e->add, o);
        p->links[target].records++;
    } else if (p->adder == ADDER_SOURCE) {
        mailbox_sum(p, target, e->slot, e->add, o);
        p->sums[(uint64_t)target * p->signals + e->slot] += e->add;
    } else {
        write_add(o, e->slot, e->add);
    }
    for (uint32_t i = 0; i < n; i++) o[i].cookie = cookie_of(p, e, ++*seq, p->in_order);
    return o + n;
}

/* Its record's place, or its source, is free: the one that had it a window ago is complete. */
static inline bool record_fits(const struct proxy *p, const struct peer *q, const struct entry *e, uint64_t number) {
    return q->head == e || (uint32_t)number - q->head->last_seq < p->window || FAULT(return_word_ignored);
}

/*
 * Fill a batch of up to b->room operations, and move `issue` behind what it carries. The form and the kind of NIC are
 * constants here, so that each has a loop without the questions of the others.
 */
static inline __attribute__((always_inline)) void plan_as(struct proxy *p, struct peer *q, batch *b, bool in_order,
                                                          enum form form) {
    /* Copies: for all that the compiler knows, the stores below could change what p and q point to. */
    const uint32_t max_message = p->max_message_bytes;
    static const struct entry_state fresh = {.stage = STAGE_TAKEN};
    uccl_ep_operation *o = b->operations, *const end = o + b->room;
    /* Of the last operation: one before the first, whose sequence may be 0. Numbers of a sequenced write have 64 bits.
     */
    uint64_t seq = form == FORM_SEQUENCED ? mailbox_issued(p, q)
                                          : ((uint64_t)q->incarnation << 32 | (uint32_t)(q->seq_issued + 1)) - 1;
    const uint64_t immediate_mask = p->immediate_mask;
    uint64_t granted = bytes_allowed(p, q), bytes_room = granted;
    const bool staged = form != FORM_ADD && p->staging; /* puts have records too */
    b->holds = b->merged = b->flow_stops = 0;
    b->copying = false;

    if (form == FORM_HOLD && signal_due(p, q)) o = plan_due(p, q, o, end, &seq);
    struct entry *e = q->issue;
    while (e) {
        if (UNLIKELY(staged) && !staging_copied(p, e)) {
            b->copying = true;
            goto full;
        }
        if (LIKELY(!memcmp(&e->state, &fresh, sizeof fresh))) {
            /* A put of one operation, as nearly all are; or none. */
            const uint64_t bytes = e->bytes;
            if (bytes) {
                if (o == end) goto full;
                if (UNLIKELY(bytes > max_message || bytes > bytes_room)) goto pieces;
                bytes_room -= bytes;
                write_put(o, e, 0, (uint32_t)bytes);
                ++seq;
                if (form == FORM_SEQUENCED) o->kind = UCCL_EP_OPERATION_WRITE_IMM, o->value = seq & immediate_mask;
                o++->cookie = cookie_of(p, e, seq, in_order);
                e->bytes_issued = (uint32_t)bytes;
            }
        } else {
            if (e->stage != STAGE_TAKEN) goto next; /* skipped */
        pieces:
            while (e->bytes_issued != e->bytes) {
                const uint32_t begin = e->bytes_issued, left = e->bytes - begin;
                const uint32_t length = left < max_message ? left : max_message;
                if (o == end) goto full;
                if (length > bytes_room) {
                    if (!bytes_allowed_beyond(p, q, granted - bytes_room, length)) {
                        b->flow_stops++;
                        goto full;
                    }
                    granted += length - bytes_room;
                    bytes_room = length;
                }
                bytes_room -= length;
                write_put(o, e, begin, length);
                ++seq;
                if (form == FORM_SEQUENCED) o->kind = UCCL_EP_OPERATION_WRITE_IMM, o->value = seq & immediate_mask;
                o->cookie = cookie_of(p, e, seq, in_order);
                if (FAULT(drop_split_tail) && begin && length == left) o->length = 0;
                e->bytes_issued = begin + length;
                if (e->flags & ENTRY_FOLLOWED && p->merge && !begin && length == left) {
                    e = merge(p, b, o, e, (uint32_t)seq, bytes_room);
                    bytes_room -= o->length - length;
                }
                o++;
            }
        }
        if (has_signal(e) || (staged && staging_bytes(p, e))) {
            if (form == FORM_HOLD && !FAULT(signal_not_held) && !FAULT(two_sums_in_flight)) {
                e->stage = STAGE_HELD;
                b->holds += has_signal(e);
            } else if (FAULT(signal_not_held) || FAULT(two_sums_in_flight)) {
                if (end - o < 2) goto full;
                o = plan_unheld(p, q, e, o, &seq);
            } else {
                if (o == end) goto full;
                if (form == FORM_SEQUENCED) {
                    if (!record_fits(p, q, e, seq + 1)) goto full;
                    mailbox_numbered(p, e->target, e, seq + 1, o);
                    o->value = (seq + 1) & immediate_mask;
                } else {
                    write_add(o, e->slot, e->add);
                }
                ++seq;
                o++->cookie = cookie_of(p, e, seq, in_order);
            }
        }
    next:
        e->last_seq = (uint32_t)seq;
        e = e->next;
    }
full:
    q->issue = e;
    b->n = (uint32_t)(o - b->operations);
    b->bytes = granted - bytes_room;
}

static void plan(struct proxy *p, struct peer *q, batch *b) {
    if (LIKELY(p->in_order && !p->hold))
        plan_as(p, q, b, true, FORM_ADD);
    else if (p->in_order)
        plan_as(p, q, b, true, FORM_HOLD);
    else if (p->hold)
        plan_as(p, q, b, false, FORM_HOLD);
    else if (p->sequenced)
        plan_as(p, q, b, false, FORM_SEQUENCED);
    else
        plan_as(p, q, b, false, FORM_ADD);
}

/* What a plan changes of the entries that it began with, to be able to undo it. */
struct before {
    struct entry *issue;
    struct entry_state issue_state, head_state;
    bool due;
};

static struct before look(const struct proxy *p, const struct peer *q) {
    struct before was = {.issue = q->issue, .due = signal_due(p, q)};
    if (q->issue) was.issue_state = q->issue->state;
    if (was.due) was.head_state = q->head->state;
    return was;
}

/* Undo a plan of n operations; what lay behind its beginning was untouched. */
static void take_back(struct proxy *p, struct peer *q, const struct before *was, uint32_t n) {
    for (struct entry *e = was->issue; e; e = e == q->issue ? NULL : e->next) {
        e->bytes_issued = 0;
        e->outstanding = 0;
        if (e->stage == STAGE_HELD) e->stage = STAGE_TAKEN;
    }
    if (was->issue) was->issue->state = was->issue_state;
    if (was->due) q->head->state = was->head_state;
    q->issue = was->issue;
    if (!p->in_order) flights_untake(p, n);
}

/* Broken on purpose; see fault_point.h. */
static void damage(uccl_ep_operation *operations, uint32_t n) {
    for (uint32_t i = 0; i + 1 < n; i++) {
        uccl_ep_operation *a = &operations[i], *b = &operations[i + 1];
        const bool put_signal = a->kind == UCCL_EP_OPERATION_WRITE && b->kind == UCCL_EP_OPERATION_ADD64;
        const bool two_signals = a->kind == UCCL_EP_OPERATION_ADD64 && b->kind == UCCL_EP_OPERATION_ADD64;
        if ((FAULT(signal_before_put) && put_signal) || (FAULT(signals_reordered) && two_signals)) {
            const uccl_ep_operation swap = *a;
            *a = *b;
            *b = swap;
            const uint64_t cookie = a->cookie;
            const uint8_t flags = a->flags;
            a->cookie = b->cookie, b->cookie = cookie;
            a->flags = b->flags, b->flags = flags;
            i++;
        }
        if (FAULT(signal_lost_in_batch) && two_signals && a->remote_offset == b->remote_offset) b->value = 0;
    }
}

/* What a NIC or a strategy wants of every operation besides: behind the loop that plans, for most want nothing. */
static void dress(const struct proxy *p, batch *b) {
    for (uint32_t i = 0; i < b->n; i++) {
        uccl_ep_operation *o = &b->operations[i];
        o->flags |= o->kind == UCCL_EP_OPERATION_ADD64 ? p->signal_flags : p->put_flags;
        if (o->kind == UCCL_EP_OPERATION_ADD64) o->remote_offset += p->bank_offset;
        if (p->staging && o->local_region == UCCL_EP_REGION_HEAP) o->local_offset += p->heap_bytes; /* sending half */
    }
}

/*
 * Say which operations give a completion: the last one, and some before it, for a NIC that takes only a part; of
 * large puts each, so that a window of them opens by one, not by megabytes. If the last one taken has none, nothing
 * tells of what came before it until more is submitted; so the first of the next batch has one.
 */
static void mark_signalled(const struct proxy *p, const struct peer *q, batch *b) {
    const bool large = b->bytes >= (uint64_t)b->n * LARGE_BYTES;
    const uint32_t every = p->unsignalled && !large ? p->signal_every : 1;
    for (uint32_t i = every - 1; i < b->n; i += every) b->operations[i].flags |= UCCL_EP_OPERATION_SIGNALLED;
    b->operations[b->n - 1].flags |= UCCL_EP_OPERATION_SIGNALLED;
    if (q->uncovered) b->operations[0].flags |= UCCL_EP_OPERATION_SIGNALLED;
}

/* Hand over to the NIC. Returns how many it took; *status says why not all. */
static uint32_t submit(struct proxy *p, uint32_t target, const uccl_ep_operation *operations, uint32_t n,
                       uccl_ep_status *status) {
    uint32_t accepted = 0;
    host_fail_clear();
    *status = p->comm->backend->submit(p->endpoint, target, operations, n, 0, &accepted);
    p->stats.submits++;
    if (UNLIKELY(accepted > n)) {
        accepted = 0;
        *status = UCCL_EP_E_BACKEND;
    }
    if (UNLIKELY(accepted < n && (*status == UCCL_EP_OK || *status == UCCL_EP_E_AGAIN))) {
        p->stats.backpressure++;
        *status = UCCL_EP_OK;
    }
    return accepted;
}

/* A write of the core's own, with its cookie. Returns whether the NIC took it. */
bool submit_control(struct proxy *p, uint32_t target, const uccl_ep_operation *operation) {
    uccl_ep_status status;
    const bool taken = submit(p, target, operation, 1, &status);
    if (UNLIKELY(status != UCCL_EP_OK)) control_refused(p, target, status);
    return taken;
}

/* Something was submitted since the last read, and one may go: reads do not overtake, so one at a time covers all. */
bool flush_due(const struct peer *q) {
    return q->head && !q->reading && q->seq_read != q->seq_issued;
}

/* Behind the batch a read that makes it visible, if there is room for it. */
static bool plan_read(struct proxy *p, const struct peer *q, batch *b, uint32_t room) {
    if (b->n == room || q->reading || (!b->n && !flush_due(q))) return false;
    const uint32_t seq = q->seq_issued + b->n + 1;
    b->operations[b->n++] = (uccl_ep_operation){.kind = UCCL_EP_OPERATION_READ,
                                                .local_region = UCCL_EP_REGION_MAILBOX,
                                                .remote_region = UCCL_EP_REGION_HEAP,
                                                .length = 8,
                                                .local_offset = p->mailbox.outbox + p->mailbox.read,
                                                .cookie = (uint64_t)q->incarnation << 32 | seq};
    return true;
}

/* Of the signal that was due, its first operation went out, or all of it. */
static void due_submitted(struct proxy *p, uint32_t target, const struct before *was) {
    struct peer *q = &p->peers[target];
    struct entry *const e = q->head;
    const bool whole = e->stage != STAGE_SIGNAL_DUE;
    if (!(was->head_state.flags & ENTRY_RECORD_SENT) && (whole || e->flags & ENTRY_RECORD_SENT)) {
        const uint64_t along = go_along(p, q, was->issue, true);
        if (p->adder == ADDER_SOURCE) p->sums[(uint64_t)target * p->signals + e->slot] += e->add + along;
    }
    if (whole && p->adder == ADDER_TARGET) p->links[target].records++;
}

void issue_peer(struct proxy *p, uint32_t target) {
    struct peer *q = &p->peers[target];
    const struct before was = look(p, q);
    const uint32_t allowed = operations_allowed(p, q);
    batch b;
    const uint32_t numbers = p->sequenced ? mailbox_window(p, q) : allowed;
    const uint32_t room = numbers < allowed ? numbers : allowed;
    /* The read that makes others complete keeps its place: a backlog would fill it time after time, and nothing of it
     * would complete before all of it has been issued (PRG-2). */
    const bool place = p->raise == RAISE_READ && !q->reading && (room > 1 || (room && flush_due(q)));
    b.room = room - place;
    uint32_t accepted = 0;
    uccl_ep_status status = UCCL_EP_OK;
    plan(p, q, &b);
    bool read = p->raise == RAISE_READ && plan_read(p, q, &b, room);
    q->limited = !b.n && (!allowed || b.flow_stops || b.copying);
    if (!room) p->stats.flow_stops++;
    if (b.n) {
        if (p->dresses) dress(p, &b);
        mark_signalled(p, q, &b);
        damage(b.operations, b.n);
        accepted = submit(p, target, b.operations, b.n, &status);
        const bool covered = accepted && b.operations[accepted - 1].flags & UCCL_EP_OPERATION_SIGNALLED;
        if (UNLIKELY(accepted < b.n)) {
            take_back(p, q, &was, b.n);
            b.room = accepted;
            read = false;
            plan(p, q, &b);
            UCCL_EP_ASSERT(b.n == accepted);
        }
        if (accepted) q->uncovered = !covered; /* only now: the plan goes by it, also the second time */
    }
    q->seq_issued += b.n;
    q->inflight_bytes += (uint32_t)b.bytes;
    p->inflight += b.n;
    p->inflight_bytes += b.bytes;
    p->stats.operations += b.n - read;
    p->stats.merged += b.merged;
    p->stats.holds += b.holds;
    p->stats.flow_stops += b.flow_stops;
    if (p->inflight > p->stats.inflight_peak) p->stats.inflight_peak = p->inflight;
    if (p->inflight_bytes > p->stats.inflight_bytes_peak) p->stats.inflight_bytes_peak = p->inflight_bytes;
    if (read) {
        q->reading = true;
        q->seq_read = q->seq_issued;
        p->stats.flushes++;
    }
    if (was.due) due_submitted(p, target, &was);
    if (FAULT(complete_at_submit) && accepted && p->in_order) {
        const uccl_ep_completion early = {.cookie = (uint64_t)q->incarnation << 32 | q->seq_issued, .peer = target};
        retire_completion(p, &early);
        return;
    }
    if (UNLIKELY(status != UCCL_EP_OK)) {
        issue_refused(p, target, status);
        return;
    }
    retire_head(p, target); /* commands that need no operation */
}
