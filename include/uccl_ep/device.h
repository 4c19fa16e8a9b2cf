/* SPDX-License-Identifier: Apache-2.0
 *
 * device.h: what a kernel calls to communicate. C++14: CUDA, HIP, their run-time compilers, and the CPU's emulation.
 *
 * Names. Without a suffix one thread calls, whatever its mates do: lanes that call together are gathered, and cost
 * little more than one. X_warp: all lanes that the warp has call with the same arguments; X_block: all threads of the
 * block. One of them acts for all, after what all of them did before the call, and each gets the result.
 *
 *   put, signal, put_signal       one operation (a put that is longer than a command holds is split)
 *   post, post_many_warp          commands that were encoded before (command.h)
 *   poster                        collects the commands of a block's warps: the fast form for single commands
 *                                 (device_poster.h, included at the end)
 *   quiet, quiet_source, test     waits for tickets; quiet_all: for all channels
 *   wait_signal, read_signal      what others have signalled
 *   aborted
 *
 * Results. A post returns its ticket, or UCCL_EP_NO_TICKET; a wait returns a status. The first failure of a device
 * fills comm.error, which the host reads (uccl_ep_comm_device_error): nothing is printed, nothing traps, the kernel
 * ends as it likes. A wait for UCCL_EP_NO_TICKET fails at once, so a kernel may post, wait, and look at one result.
 *
 * Waits. Each ends with what it waits for, or with E_DEADLINE after comm.timeout_ticks, E_ABORTED, E_CLOSED (a covered
 * ticket failed, or the channel is closed: the host's record says why) or, for signals, E_PEER_LOST (ERR-5: of any
 * rank that nobody excluded, or of the one named). Who gives up after
 * reserving tickets closes the channel (PRG-3). That a channel is closed, or the communicator aborted, is seen where
 * host memory is looked at: by waits, and by posts that find the ring full.
 *
 * Ordering, by clause:
 *   PUB-1  A command is stored behind a system-scope fence by the thread that stores it: what it did, or synchronised
 *          with, comes before what the command does. _warp and _block forms synchronise first, and so cover the stores
 *          of all callers. A fence is dear and covers any number of stores: many commands behind one is the whole
 *          difference between the forms.
 *   PUB-2  Lanes that post together reserve together, by one addition; one of them waits until all their slots are
 * free, and none waits for its own: in lockstep a lane that waits holds up those that would make room. PRG-3  The
 * consumer's tail is acquired before a slot is stored to, and the lane that acquired it hands that on to those that
 * store through sync_warp. QUI-1  The counter is acquired, and `failed` is read no earlier than the counter (ERR-2).
 *   SIG-2  Signal words are read with acquire: what was put before the signal is visible to whoever saw it.
 */
#ifndef UCCL_EP_DEVICE_H
#define UCCL_EP_DEVICE_H

#include "device_platform.h"

/* Tests break this header on purpose: FAULT(name) is then theirs. */
#ifndef UCCL_EP_DEVICE_FAULT
#define UCCL_EP_DEVICE_FAULT(name) false
#endif

namespace uccl_ep {

typedef uccl_ep_device_comm comm;
typedef uccl_ep_u64 ticket;
typedef uccl_ep_status status;

namespace detail {

/* Lanes that act together, and which of them the caller is. */
struct lanes {
    uccl_ep_u64 mask;
    uccl_ep_u32 count, index, leader;
    UCCL_EP_DEVICE bool leads() const { return index == 0; }
};

UCCL_EP_DEVICE lanes lanes_of(uccl_ep_u64 mask) {
    const uccl_ep_u64 below = (1ull << platform::lane()) - 1;
    return lanes{mask, platform::count_bits(mask), platform::count_bits(mask & below), platform::lowest_bit(mask)};
}

#define UCCL_EP_NOWHERE_ (~0ull) /* no channel, no slot */

/* Tell the host, if this is the first failure since it last asked. The claim makes this thread the record's only
 * writer; `status` is released last, so that the host never reads half a record. */
UCCL_EP_DEVICE status fail(const comm &c, status result, uccl_ep_device_what what, uccl_ep_u64 channel, ticket t,
                           uccl_ep_u64 slot, uccl_ep_u64 wanted, uccl_ep_u64 seen,
                           uccl_ep_u32 source = UCCL_EP_ANY_RANK) {
    if (platform::exchange_device(c.error_claim, 1) == 0 || UCCL_EP_DEVICE_FAULT(last_error_wins)) {
        platform::store_system(&c.error->what, what);
        platform::store_system(&c.error->channel, channel);
        platform::store_system(&c.error->ticket, t);
        platform::store_system(&c.error->slot, slot);
        platform::store_system(&c.error->wanted, wanted);
        platform::store_system(&c.error->seen, seen);
        platform::store_system(&c.error->source, (uccl_ep_u64)source);
        platform::store_system(&c.error->thread, (uccl_ep_u64)platform::block() << 32 | platform::thread());
        platform::store_release_system(&c.error->status, (uccl_ep_u64)result);
    }
    return result;
}

UCCL_EP_DEVICE ticket refuse(const comm &c, status result, uccl_ep_u64 channel, uccl_ep_u64 slot, uccl_ep_u64 wanted) {
    fail(c, result, UCCL_EP_DEVICE_POST, channel, UCCL_EP_NO_TICKET, slot, wanted, 0);
    return UCCL_EP_NO_TICKET;
}

/* What ends a wait, besides what it waits for. It is looked at rarely (platform::turns): each look is a read of host
 * memory and of the clock that all multiprocessors share. With a look every 10 us the 1024 warps that waited for space
 * on an H200 slowed those reads so far that rings with room for all stayed full: 45 M commands/s instead of 1100. */
struct patience {
    uccl_ep_u64 end; /* 0: not known yet */
    uccl_ep_u32 period, turns;
    bool looked; /* in this turn: the caller may look at more */

    UCCL_EP_DEVICE explicit patience(uccl_ep_u32 turns_a_look)
        : end(0), period(turns_a_look), turns(0), looked(false) {}

    /* One turn. UCCL_EP_OK: go on. */
    UCCL_EP_DEVICE status turn(const comm &c) {
        platform::relax();
        looked = ++turns == period;
        if (!looked) return UCCL_EP_OK;
        turns = 0;
        const uccl_ep_u64 now = platform::clock();
        if (!end) end = now + c.timeout_ticks < now ? ~0ull : now + c.timeout_ticks;
        if (now >= end && !UCCL_EP_DEVICE_FAULT(deadline_ignored)) return UCCL_EP_E_DEADLINE;
        if (platform::load_system(&c.control->aborted) && !UCCL_EP_DEVICE_FAULT(abort_ignored))
            return UCCL_EP_E_ABORTED;
        return UCCL_EP_OK;
    }
};

/* A ring's description does not change: it is read by loads that a compiler may keep from one call to the next, since
 * behind every acquire a plain load has to go to memory again. */
UCCL_EP_STATIC_ASSERT_(sizeof(uccl_ep_ring) == 56, "ring_of() reads all of it");
UCCL_EP_DEVICE uccl_ep_ring ring_of(const comm &c, uccl_ep_u32 channel) {
    /* A compiler may also load earlier than it is asked to, before the channel has been checked. */
    const uccl_ep_u64 *const words = (const uccl_ep_u64 *)&c.rings[channel < c.channels ? channel : 0];
    const uccl_ep_u64 codec_and_slots = platform::load_constant(words);
    const uccl_ep_u64 granularity_and_channel = platform::load_constant(words + 1);
    uccl_ep_ring ring = {};
    ring.codec_version = (uccl_ep_u32)codec_and_slots;
    ring.log2_slots = (uccl_ep_u32)(codec_and_slots >> 32);
    ring.granularity = (uccl_ep_u32)granularity_and_channel;
    ring.channel = (uccl_ep_u32)(granularity_and_channel >> 32);
    ring.first_ticket = platform::load_constant(words + 2);
    ring.slots = (uccl_ep_slot *)platform::load_constant(words + 3);
    ring.producer = (uccl_ep_ring_producer *)platform::load_constant(words + 4);
    ring.gave_up = (uccl_ep_u64 *)platform::load_constant(words + 5);
    ring.counters = (const uccl_ep_ring_counters *)platform::load_constant(words + 6);
    return ring;
}

UCCL_EP_DEVICE status check_channel(const comm &c, uccl_ep_u32 channel) {
    if (c.version != UCCL_EP_DEVICE_VERSION) return UCCL_EP_E_ABI;
    return channel < c.channels ? UCCL_EP_OK : UCCL_EP_E_RANGE;
}

/* ---------------------------------------------------------------------------------------------------------- posting */

/* Until the slots of tickets first .. first + n - 1 are free. */
UCCL_EP_DEVICE status wait_for_space(const comm &c, const uccl_ep_ring &ring, ticket first, uccl_ep_u64 n) {
    const uccl_ep_u64 slots = uccl_ep_ring_slots(&ring);
    uccl_ep_ring_producer *const producer = ring.producer;
    for (patience p(platform::turns_device);;) {
        uccl_ep_u64 tail = platform::load_acquire_device(&producer->tail_cache);
        /* One asks the host for all. Where every one of a full ring's producers did, the line of the counters was away
         * from the consumer most of the time, and it took a few commands a microsecond where it takes hundreds. Who
         * finds that another asks goes on reading: an exchange each turn would be a write each turn. */
        if (first + n - tail > slots && platform::load_device(&producer->asking) == 0 &&
            platform::exchange_device(&producer->asking, 1) == 0) {
            tail = platform::load_acquire_system(&ring.counters->tail);
            platform::store_release_device(&producer->tail_cache, tail);
            platform::exchange_device(&producer->asking, 0);
        }
        if (first + n - tail <= slots) return UCCL_EP_OK;
        status result = p.turn(c);
        if (p.looked && result == UCCL_EP_OK && platform::load_system(&ring.counters->status) == UCCL_EP_CHANNEL_CLOSED)
            result = UCCL_EP_E_CLOSED;
        if (result != UCCL_EP_OK) {
            /* Reserved and never stored: the ring cannot go past it. */
            if (!UCCL_EP_DEVICE_FAULT(give_up_unnoticed)) platform::store_release_system(ring.gave_up, 1);
            return fail(c, result, UCCL_EP_DEVICE_POST, ring.channel, first, UCCL_EP_NOWHERE_, first + n - slots, tail);
        }
    }
}

/*
 * The lanes of g, and no others, each with its command: consecutive tickets in the order of lanes. No more lanes than
 * the ring has slots. All get a ticket, or none.
 *
 * Each lane fences while the reservation and the cached tail are under way. The fence is the release of what comes
 * before the post (PUB-1), and the acquire of the cache, which every lane has read: who wrote it had acquired the tail.
 * A tail that one lane waits for is acquired by that lane, and sync_warp hands it on. Differences, not comparisons:
 * tickets may wrap.
 */
UCCL_EP_DEVICE ticket post_lanes(const comm &c, const uccl_ep_ring &ring, const lanes &g, const uccl_ep_words &words) {
    const bool alone = UCCL_EP_DEVICE_FAULT(lanes_wait_alone);
    const uccl_ep_u32 n = alone ? 1 : g.count;
    const uccl_ep_u64 slots = uccl_ep_ring_slots(&ring);
    const bool reserves = alone || g.leads();
    uccl_ep_u64 first = 0;
    if (reserves) first = platform::add_device(&ring.producer->head, n);
    const uccl_ep_u64 tail = platform::load_device(&ring.producer->tail_cache);
    if (!UCCL_EP_DEVICE_FAULT(no_fence)) platform::fence_system();
    if (g.count > 1 && !alone) first = platform::shuffle(g.mask, first, g.leader);
    const bool there = first + n - tail <= slots || UCCL_EP_DEVICE_FAULT(overwrite_full_ring);
    if (platform::ballot(g.mask, there) != g.mask) {
        uccl_ep_u64 ok = 1;
        if (reserves) ok = wait_for_space(c, ring, first, n) == UCCL_EP_OK;
        platform::sync_warp(g.mask);
        if (!alone) ok = platform::shuffle(g.mask, ok, g.leader);
        if (!ok) return UCCL_EP_NO_TICKET;
        if (!UCCL_EP_DEVICE_FAULT(no_fence)) platform::fence_system(); /* of what the meeting has told */
    }
    if (!alone) first += g.index;
    const uccl_ep_u64 parity = uccl_ep_ring_parity(ring.log2_slots, first);
    platform::store_command(&ring.slots[first & (slots - 1)],
                            words.word[0] | (UCCL_EP_DEVICE_FAULT(parity_in_one_word) ? 0 : parity),
                            words.word[1] | parity);
    return first;
}

/* One command of one thread. Lanes that come together and name the same channel post together, in parts that the ring
 * holds. The loop is the same for all of them: none leaves it while others still have to post. */
UCCL_EP_DEVICE ticket post_one(const comm &c, uccl_ep_u32 channel, const uccl_ep_words &words) {
    const lanes all = lanes_of(platform::active());
    const uccl_ep_ring ring = ring_of(c, channel);
    if (all.count == 1) return post_lanes(c, ring, all, words);
    ticket mine = UCCL_EP_NO_TICKET;
    for (uccl_ep_u64 left = all.mask; left;) {
        const uccl_ep_u32 leader = platform::lowest_bit(left);
        const uccl_ep_u32 theirs = (uccl_ep_u32)platform::shuffle(all.mask, channel, leader);
        const uccl_ep_u64 room = platform::shuffle(all.mask, uccl_ep_ring_slots(&ring), leader);
        const bool waits = left >> platform::lane() & 1 && channel == theirs;
        const uccl_ep_u64 alike = platform::ballot(all.mask, waits);
        const uccl_ep_u64 together = platform::ballot(all.mask, waits && lanes_of(alike).index < room);
        if (together >> platform::lane() & 1) mine = post_lanes(c, ring, lanes_of(together), words);
        left &= ~together;
    }
    return mine;
}

/* What put, signal and put_signal ask for. */
struct request {
    uccl_ep_u32 target;
    bool put, signal;
    uccl_ep_u64 local, remote, bytes; /* of the put */
    uccl_ep_u32 slot;                 /* of the signal */
    uccl_ep_u64 add;
};

UCCL_EP_DEVICE status check_request(const comm &c, const request &r) {
    if (r.target >= c.size) return UCCL_EP_E_RANGE;
    if (r.signal && r.slot >= c.signals) return UCCL_EP_E_RANGE;
    if (!r.put) return UCCL_EP_OK;
    if ((r.local | r.remote | r.bytes) & (c.granularity - 1)) return UCCL_EP_E_ALIGNMENT;
    const bool inside =
        r.bytes <= c.heap_bytes && r.local <= c.heap_bytes - r.bytes && r.remote <= c.heap_bytes - r.bytes;
    return inside ? UCCL_EP_OK : UCCL_EP_E_RANGE;
}

/* Take the next command off a request that was checked. Only the last one carries the signal, and one of its own if the
 * narrow fields of a put's do not hold it. */
UCCL_EP_DEVICE uccl_ep_words next_command(const comm &c, request *r) {
    uccl_ep_command command = {};
    command.target = r->target;
    if (r->put) {
        const uccl_ep_u64 largest = UCCL_EP_MAX_COMMAND_BYTES(c.granularity);
        const uccl_ep_u64 piece = r->bytes < largest ? r->bytes : largest;
        r->put = piece != r->bytes;
        const bool with_signal =
            r->signal && !r->put && r->add <= UCCL_EP_FIELD_MAX(ADD) && r->slot <= UCCL_EP_FIELD_MAX(SLOT);
        command.op = with_signal ? UCCL_EP_OP_PUT_SIGNAL : UCCL_EP_OP_PUT;
        command.local = r->local;
        command.remote = r->remote;
        command.bytes = (uccl_ep_u32)piece;
        command.granularity = c.granularity;
        r->local += piece;
        r->remote += piece;
        r->bytes -= piece;
    } else {
        command.op = UCCL_EP_OP_SIGNAL;
    }
    if (command.op != UCCL_EP_OP_PUT) {
        command.slot = r->slot;
        command.add = r->add;
        r->signal = false;
    }
    uccl_ep_words words = {};
    uccl_ep_encode(&command, &words);
    return words;
}

UCCL_EP_DEVICE ticket post_request(const comm &c, uccl_ep_u32 channel, request r) {
    status result = check_channel(c, channel);
    if (result == UCCL_EP_OK) result = check_request(c, r);
    if (result != UCCL_EP_OK) return refuse(c, result, channel, r.signal ? r.slot : UCCL_EP_NOWHERE_, r.target);
    ticket last = UCCL_EP_NO_TICKET;
    while (r.put || r.signal) {
        last = post_one(c, channel, next_command(c, &r));
        if (last == UCCL_EP_NO_TICKET) break;
    }
    return last;
}

/* ---------------------------------------------------------------------------------------------- one caller for many */

/* Results are tickets or statuses. */
template <typename Call> UCCL_EP_DEVICE auto once_a_warp(Call call) -> decltype(call()) {
    const lanes all = lanes_of(platform::present());
    uccl_ep_u64 result = 0;
    platform::sync_warp(all.mask); /* what all did comes before what one does for them */
    if (all.leads()) result = (uccl_ep_u64)call();
    platform::sync_warp(all.mask); /* and what it has seen before what all do next */
    return (decltype(call()))platform::shuffle(all.mask, result, all.leader);
}

UCCL_EP_DEVICE uccl_ep_u64 *block_word() {
    UCCL_EP_SHARED uccl_ep_u64 word;
    return &word;
}

/* The word is written again only behind the first barrier of a later call, when all have read it. */
template <typename Call> UCCL_EP_DEVICE auto once_a_block(Call call) -> decltype(call()) {
    platform::sync_block();
    if (platform::thread() == 0) *block_word() = (uccl_ep_u64)call();
    platform::sync_block();
    return (decltype(call()))*block_word();
}

} // namespace detail

/* ---------------------------------------------------------------------------------------------------------- posting */

/* Put `bytes` from offset `local` of the own heap to offset `remote` of the target's (PUT-1). */
UCCL_EP_DEVICE ticket put(const comm &c, uccl_ep_u32 channel, uccl_ep_u32 target, uccl_ep_u64 local, uccl_ep_u64 remote,
                          uccl_ep_u64 bytes) {
    return detail::post_request(c, channel, detail::request{target, true, false, local, remote, bytes, 0, 0});
}
UCCL_EP_DEVICE ticket put_warp(const comm &c, uccl_ep_u32 channel, uccl_ep_u32 target, uccl_ep_u64 local,
                               uccl_ep_u64 remote, uccl_ep_u64 bytes) {
    return detail::once_a_warp([&] { return put(c, channel, target, local, remote, bytes); });
}
UCCL_EP_DEVICE ticket put_block(const comm &c, uccl_ep_u32 channel, uccl_ep_u32 target, uccl_ep_u64 local,
                                uccl_ep_u64 remote, uccl_ep_u64 bytes) {
    return detail::once_a_block([&] { return put(c, channel, target, local, remote, bytes); });
}

/* Add to a signal word of the target, behind all that was put to it before on this channel (SIG-1, SIG-2). */
UCCL_EP_DEVICE ticket signal(const comm &c, uccl_ep_u32 channel, uccl_ep_u32 target, uccl_ep_u32 slot,
                             uccl_ep_u64 add) {
    return detail::post_request(c, channel, detail::request{target, false, true, 0, 0, 0, slot, add});
}
UCCL_EP_DEVICE ticket signal_warp(const comm &c, uccl_ep_u32 channel, uccl_ep_u32 target, uccl_ep_u32 slot,
                                  uccl_ep_u64 add) {
    return detail::once_a_warp([&] { return signal(c, channel, target, slot, add); });
}
UCCL_EP_DEVICE ticket signal_block(const comm &c, uccl_ep_u32 channel, uccl_ep_u32 target, uccl_ep_u32 slot,
                                   uccl_ep_u64 add) {
    return detail::once_a_block([&] { return signal(c, channel, target, slot, add); });
}

/* A put and then a signal (SIG-3): one command, if the bytes, the slot (14 bits) and the value (13 bits) fit. */
UCCL_EP_DEVICE ticket put_signal(const comm &c, uccl_ep_u32 channel, uccl_ep_u32 target, uccl_ep_u64 local,
                                 uccl_ep_u64 remote, uccl_ep_u64 bytes, uccl_ep_u32 slot, uccl_ep_u64 add) {
    return detail::post_request(c, channel, detail::request{target, true, true, local, remote, bytes, slot, add});
}
UCCL_EP_DEVICE ticket put_signal_warp(const comm &c, uccl_ep_u32 channel, uccl_ep_u32 target, uccl_ep_u64 local,
                                      uccl_ep_u64 remote, uccl_ep_u64 bytes, uccl_ep_u32 slot, uccl_ep_u64 add) {
    return detail::once_a_warp([&] { return put_signal(c, channel, target, local, remote, bytes, slot, add); });
}
UCCL_EP_DEVICE ticket put_signal_block(const comm &c, uccl_ep_u32 channel, uccl_ep_u32 target, uccl_ep_u64 local,
                                       uccl_ep_u64 remote, uccl_ep_u64 bytes, uccl_ep_u32 slot, uccl_ep_u64 add) {
    return detail::once_a_block([&] { return put_signal(c, channel, target, local, remote, bytes, slot, add); });
}

/* A command as uccl_ep_encode made it. Nothing of it is checked here; the proxy does (ERR-4). */
UCCL_EP_DEVICE ticket post(const comm &c, uccl_ep_u32 channel, const uccl_ep_words &words) {
    const status result = detail::check_channel(c, channel);
    if (result != UCCL_EP_OK) return detail::refuse(c, result, channel, UCCL_EP_NOWHERE_, 0);
    return detail::post_one(c, channel, words);
}

/* All lanes that the warp has call; those with `active` post, on consecutive tickets in the order of lanes, all or none
 * (PUB-2): more than the ring holds are refused. Each active lane gets the ticket of its command, others
 * UCCL_EP_NO_TICKET. A command covers what its own lane did or synchronised with. */
UCCL_EP_DEVICE ticket post_many_warp(const comm &c, uccl_ep_u32 channel, const uccl_ep_words &words, bool active) {
    const uccl_ep_u64 who = platform::ballot(platform::present(), active);
    status result = detail::check_channel(c, channel);
    uccl_ep_ring ring = {};
    if (result == UCCL_EP_OK) {
        ring = detail::ring_of(c, channel);
        if (platform::count_bits(who) > uccl_ep_ring_slots(&ring)) result = UCCL_EP_E_RANGE;
    }
    ticket mine = UCCL_EP_NO_TICKET;
    if (active) {
        const detail::lanes g = detail::lanes_of(who);
        if (result == UCCL_EP_OK) {
            mine = detail::post_lanes(c, ring, g, words);
        } else if (g.leads()) {
            detail::refuse(c, result, channel, UCCL_EP_NOWHERE_, g.count);
        }
    }
    platform::sync_warp(platform::present());
    return mine;
}

/* The same for commands in their plain form, checked as put and signal check theirs: if one is refused, all are. */
UCCL_EP_DEVICE ticket post_many_warp(const comm &c, uccl_ep_u32 channel, const uccl_ep_command &command, bool active) {
    uccl_ep_words words = {};
    status result = UCCL_EP_OK;
    if (active) {
        const detail::request r = {command.target,
                                   uccl_ep_op_has_put(command.op) != 0,
                                   uccl_ep_op_has_signal(command.op) != 0,
                                   command.local,
                                   command.remote,
                                   command.bytes,
                                   command.slot,
                                   command.add};
        result = detail::check_request(c, r);
        if (result == UCCL_EP_OK && r.put && command.granularity != c.granularity) result = UCCL_EP_E_INVALID;
        if (result == UCCL_EP_OK) result = uccl_ep_encode(&command, &words);
    }
    const uccl_ep_u64 bad = platform::ballot(platform::present(), result != UCCL_EP_OK);
    if (!bad) return post_many_warp(c, channel, words, active);
    if (platform::lane() == platform::lowest_bit(bad))
        detail::refuse(c, result, channel, UCCL_EP_NOWHERE_, command.target);
    platform::sync_warp(platform::present());
    return UCCL_EP_NO_TICKET;
}

/* ---------------------------------------------------------------------------------------------------------- waiting */

/* The host aborted the communicator (ABT-1). Reads host memory. */
UCCL_EP_DEVICE bool aborted(const comm &c) {
    return platform::load_system(&c.control->aborted) != 0;
}

namespace detail {

/* What a wait for a post that failed returns: why, if the record is of that, or of an earlier failure. */
UCCL_EP_DEVICE status not_posted(const comm &c) {
    const uccl_ep_u64 known = platform::load_acquire_system(&c.error->status);
    return known ? (status)known : UCCL_EP_E_INVALID;
}

enum class looking {
    soon,      /* at a command that has just been posted */
    again,     /* at the counters alone */
    everywhere /* also at what ends a wait without them */
};

/* One look at whether all up to t is complete, or its sources free. */
UCCL_EP_DEVICE status look(const comm &c, const uccl_ep_ring &ring, ticket t, bool source, looking how,
                           uccl_ep_u64 *seen) {
    const uccl_ep_ring_counters *k = ring.counters;
    uccl_ep_u64 failed, value;
    /* A look at once comes too early, and the next one a turn of the bus late: on an H200 a round trip is then 3.5 us
     * instead of 2.6. */
    if (how == looking::soon) platform::breath();
    if (source) {
        value = platform::load_acquire_system(&k->source);
        failed = platform::load_system(&k->failed);
    } else {
        value = platform::load_pair_system(&k->complete, &failed);
    }
    *seen = value;
    if (failed != UCCL_EP_NO_TICKET && (long long)(t - failed) >= 0 && !UCCL_EP_DEVICE_FAULT(failure_ignored))
        return UCCL_EP_E_CLOSED;
    if ((long long)(value - t) > 0) return UCCL_EP_OK;
    if (value == t && (source ? UCCL_EP_DEVICE_FAULT(quiet_source_early) : UCCL_EP_DEVICE_FAULT(quiet_early)))
        return UCCL_EP_OK;
    if (how != looking::everywhere) return UCCL_EP_IN_PROGRESS;
    /* The state first: what was taken before the channel closed is below the tail that is read then. */
    const uccl_ep_u64 state = platform::load_acquire_system(&k->status);
    if (state == UCCL_EP_CHANNEL_ABORTED || aborted(c)) return UCCL_EP_E_ABORTED;
    if (state == UCCL_EP_CHANNEL_CLOSED && (long long)(t - platform::load_system(&k->tail)) >= 0 &&
        !UCCL_EP_DEVICE_FAULT(closed_ignored))
        return UCCL_EP_E_CLOSED;
    return UCCL_EP_IN_PROGRESS;
}

UCCL_EP_DEVICE uccl_ep_device_what quiet_kind(bool source) {
    return source ? UCCL_EP_DEVICE_QUIET_SOURCE : UCCL_EP_DEVICE_QUIET;
}

UCCL_EP_DEVICE status wait_ticket(const comm &c, const uccl_ep_ring &ring, ticket t, bool source, patience *p) {
    for (;;) {
        uccl_ep_u64 seen;
        status result = look(c, ring, t, source, p->looked ? looking::everywhere : looking::again, &seen);
        if (result == UCCL_EP_OK) return result;
        if (result == UCCL_EP_IN_PROGRESS) result = p->turn(c);
        if (result != UCCL_EP_OK)
            return fail(c, result, quiet_kind(source), ring.channel, t, UCCL_EP_NOWHERE_, t + 1, seen);
    }
}

/* A ticket that was given out, when the head was here. */
UCCL_EP_DEVICE bool given_out(const uccl_ep_ring &ring, uccl_ep_u64 head, ticket t) {
    return (long long)(head - t) > 0 && (long long)(t - ring.first_ticket) >= 0;
}

UCCL_EP_DEVICE status quiet_ticket(const comm &c, uccl_ep_u32 channel, ticket t, bool source) {
    if (t == UCCL_EP_NO_TICKET) return not_posted(c);
    status result = check_channel(c, channel);
    uccl_ep_u64 seen = 0;
    if (result == UCCL_EP_OK) {
        const uccl_ep_ring ring = ring_of(c, channel);
        const uccl_ep_u64 head = platform::load_device(&ring.producer->head); /* arrives during the look */
        result = look(c, ring, t, source, looking::soon, &seen);
        if (!given_out(ring, head, t)) result = UCCL_EP_E_RANGE;
        if (result == UCCL_EP_OK) return result;
        if (result == UCCL_EP_IN_PROGRESS) {
            patience p(platform::turns_host);
            return wait_ticket(c, ring, t, source, &p);
        }
    }
    return fail(c, result, quiet_kind(source), channel, t, UCCL_EP_NOWHERE_, t + 1, seen);
}

/* All tickets that were given out before the call. Where none was, the counters stand behind the last one of them all
 * the same. */
UCCL_EP_DEVICE status quiet_channel(const comm &c, uccl_ep_u32 channel, bool source, patience *p) {
    const status result = check_channel(c, channel);
    if (result != UCCL_EP_OK)
        return fail(c, result, quiet_kind(source), channel, UCCL_EP_NO_TICKET, UCCL_EP_NOWHERE_, 0, 0);
    const uccl_ep_ring ring = ring_of(c, channel);
    const uccl_ep_u64 head = platform::load_device(&ring.producer->head);
    return wait_ticket(c, ring, head - 1, source, p);
}

} // namespace detail

/* Until the ticket, and all before it on its channel, are complete (QUI-1). */
UCCL_EP_DEVICE status quiet(const comm &c, uccl_ep_u32 channel, ticket t) {
    return detail::quiet_ticket(c, channel, t, false);
}
UCCL_EP_DEVICE status quiet_warp(const comm &c, uccl_ep_u32 channel, ticket t) {
    return detail::once_a_warp([&] { return quiet(c, channel, t); });
}
UCCL_EP_DEVICE status quiet_block(const comm &c, uccl_ep_u32 channel, ticket t) {
    return detail::once_a_block([&] { return quiet(c, channel, t); });
}

/* Until all tickets of the channel that were given out before the call are complete. */
UCCL_EP_DEVICE status quiet(const comm &c, uccl_ep_u32 channel) {
    detail::patience p(platform::turns_host);
    return detail::quiet_channel(c, channel, false, &p);
}
UCCL_EP_DEVICE status quiet_warp(const comm &c, uccl_ep_u32 channel) {
    return detail::once_a_warp([&] { return quiet(c, channel); });
}
UCCL_EP_DEVICE status quiet_block(const comm &c, uccl_ep_u32 channel) {
    return detail::once_a_block([&] { return quiet(c, channel); });
}

/* The same for sources (QUI-0): they may be changed, nothing is said about targets. */
UCCL_EP_DEVICE status quiet_source(const comm &c, uccl_ep_u32 channel, ticket t) {
    return detail::quiet_ticket(c, channel, t, true);
}
UCCL_EP_DEVICE status quiet_source_warp(const comm &c, uccl_ep_u32 channel, ticket t) {
    return detail::once_a_warp([&] { return quiet_source(c, channel, t); });
}
UCCL_EP_DEVICE status quiet_source_block(const comm &c, uccl_ep_u32 channel, ticket t) {
    return detail::once_a_block([&] { return quiet_source(c, channel, t); });
}
UCCL_EP_DEVICE status quiet_source(const comm &c, uccl_ep_u32 channel) {
    detail::patience p(platform::turns_host);
    return detail::quiet_channel(c, channel, true, &p);
}
UCCL_EP_DEVICE status quiet_source_warp(const comm &c, uccl_ep_u32 channel) {
    return detail::once_a_warp([&] { return quiet_source(c, channel); });
}
UCCL_EP_DEVICE status quiet_source_block(const comm &c, uccl_ep_u32 channel) {
    return detail::once_a_block([&] { return quiet_source(c, channel); });
}

/* quiet over all channels that a device posts to, with one deadline (QUI-2). */
UCCL_EP_DEVICE status quiet_all(const comm &c) {
    detail::patience p(platform::turns_host);
    const uccl_ep_u32 channels = UCCL_EP_DEVICE_FAULT(quiet_one_channel) ? 1 : c.channels;
    for (uccl_ep_u32 channel = 0; channel < channels; channel++) {
        const status result = detail::quiet_channel(c, channel, false, &p);
        if (result != UCCL_EP_OK) return result;
    }
    return UCCL_EP_OK;
}
UCCL_EP_DEVICE status quiet_all_warp(const comm &c) {
    return detail::once_a_warp([&] { return quiet_all(c); });
}
UCCL_EP_DEVICE status quiet_all_block(const comm &c) {
    return detail::once_a_block([&] { return quiet_all(c); });
}

/* One look: UCCL_EP_OK, UCCL_EP_IN_PROGRESS, or why it will not be (QUI-3). */
UCCL_EP_DEVICE status test(const comm &c, uccl_ep_u32 channel, ticket t) {
    if (t == UCCL_EP_NO_TICKET) return detail::not_posted(c);
    uccl_ep_u64 seen = 0;
    status result = detail::check_channel(c, channel);
    if (result == UCCL_EP_OK) {
        const uccl_ep_ring ring = detail::ring_of(c, channel);
        const uccl_ep_u64 head = platform::load_device(&ring.producer->head);
        result = detail::look(c, ring, t, false, detail::looking::everywhere, &seen);
        if (!detail::given_out(ring, head, t)) result = UCCL_EP_E_RANGE;
        if (result == UCCL_EP_OK && UCCL_EP_DEVICE_FAULT(poll_never_done)) result = UCCL_EP_IN_PROGRESS;
    }
    if (result < 0) detail::fail(c, result, UCCL_EP_DEVICE_QUIET, channel, t, UCCL_EP_NOWHERE_, t + 1, seen);
    return result;
}

namespace detail {

/* Each bank only grows, so what one look saw no later one misses (SIG-6). */
UCCL_EP_DEVICE uccl_ep_u64 signal_value(const comm &c, uccl_ep_u32 slot) {
    const uccl_ep_u32 banks = UCCL_EP_DEVICE_FAULT(first_bank_only) ? 1 : c.signal_banks;
    uccl_ep_u64 sum = 0;
    for (uccl_ep_u32 bank = 0; bank < banks; bank++)
        sum += platform::load_acquire_system(&c.signal_words[(uccl_ep_u64)bank * c.signals + slot]);
    return sum;
}

UCCL_EP_DEVICE status check_slot(const comm &c, uccl_ep_u32 slot) {
    if (c.version != UCCL_EP_DEVICE_VERSION) return UCCL_EP_E_ABI;
    return slot < c.signals ? UCCL_EP_OK : UCCL_EP_E_RANGE;
}

} // namespace detail

/* The value of a signal of the own rank; acquire. 0, with a record, for a slot that there is not. */
UCCL_EP_DEVICE uccl_ep_u64 read_signal(const comm &c, uccl_ep_u32 slot) {
    const status result = detail::check_slot(c, slot);
    if (result == UCCL_EP_OK) return detail::signal_value(c, slot);
    detail::fail(c, result, UCCL_EP_DEVICE_WAIT_SIGNAL, UCCL_EP_NOWHERE_, UCCL_EP_NO_TICKET, slot, 0, 0);
    return 0;
}

namespace detail {

/* A rank whose signals are waited for will send nothing more. */
UCCL_EP_DEVICE bool sender_gone(const comm &c, uccl_ep_u32 source) {
    if (source == UCCL_EP_ANY_RANK || UCCL_EP_DEVICE_FAULT(loss_of_any_ends))
        return platform::load_acquire_system(&c.control->lost) != 0;
    return platform::load_acquire_system(&c.gone[source / 64]) >> (source % 64) & 1;
}

} // namespace detail

/* Until the signal is at or past `value`, as a distance; *seen: what it was. `source`: the rank that signals, whose
 * loss alone ends the wait; UCCL_EP_ANY_RANK: the loss of any rank that was not excluded does. */
UCCL_EP_DEVICE status wait_signal(const comm &c, uccl_ep_u32 slot, uccl_ep_u64 value, uccl_ep_u64 *seen = nullptr,
                                  uccl_ep_u32 source = UCCL_EP_ANY_RANK) {
    status result = detail::check_slot(c, slot);
    if (result == UCCL_EP_OK && source != UCCL_EP_ANY_RANK && source >= c.size) result = UCCL_EP_E_RANGE;
    uccl_ep_u64 word = 0;
    bool lost = false;
    for (detail::patience p(platform::turns_host); result == UCCL_EP_OK;) {
        word = detail::signal_value(c, slot);
        const bool reached = UCCL_EP_DEVICE_FAULT(value_not_distance) ? word >= value : (long long)(word - value) >= 0;
        if (reached) break;
        /* What a lost rank had sent is there, or will never be: hence one more look after it was known to be lost. */
        if (lost) {
            result = UCCL_EP_E_PEER_LOST;
        } else {
            result = p.turn(c);
            if (p.looked) lost = detail::sender_gone(c, source) && !UCCL_EP_DEVICE_FAULT(loss_ignored);
        }
    }
    if (seen) *seen = word;
    if (result != UCCL_EP_OK)
        detail::fail(c, result, UCCL_EP_DEVICE_WAIT_SIGNAL, UCCL_EP_NOWHERE_, UCCL_EP_NO_TICKET, slot, value, word,
                     source);
    return result;
}
UCCL_EP_DEVICE status wait_signal_warp(const comm &c, uccl_ep_u32 slot, uccl_ep_u64 value, uccl_ep_u64 *seen = nullptr,
                                       uccl_ep_u32 source = UCCL_EP_ANY_RANK) {
    uccl_ep_u64 word = 0;
    const status result = detail::once_a_warp([&] { return wait_signal(c, slot, value, &word, source); });
    word = platform::shuffle(platform::present(), word, 0);
    if (seen) *seen = word;
    return result;
}
UCCL_EP_DEVICE status wait_signal_block(const comm &c, uccl_ep_u32 slot, uccl_ep_u64 value, uccl_ep_u64 *seen = nullptr,
                                        uccl_ep_u32 source = UCCL_EP_ANY_RANK) {
    uccl_ep_u64 word = 0;
    const status result = detail::once_a_block([&] { return wait_signal(c, slot, value, &word, source); });
    word = detail::once_a_block([&] { return word; });
    if (seen) *seen = word;
    return result;
}

} // namespace uccl_ep

#include "device_poster.h"

#endif
