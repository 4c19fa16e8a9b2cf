/* SPDX-License-Identifier: Apache-2.0
 *
 * device_poster.h: one warp posts for its block. Included by device.h.
 *
 * Purpose. A single command costs a system fence, and the fence is paid by the warp, whatever it covers. So the other
 * warps hand their commands to one that does nothing else: it posts what is there, up to a command a lane, behind one
 * fence. Handing in is a handshake in shared memory, and no fence at all.
 *
 *   UCCL_EP_KERNEL void send(uccl_ep::comm c, ...) {
 *       UCCL_EP_SHARED uccl_ep::poster p;
 *       p.init(0, warps - 1);                       // all threads: channel 0, and how many times it will be closed
 *       if (warp == 0) {
 *           p.run(c);                               // all lanes of one warp; returns when all have closed it
 *       } else {
 *           for (...) if (lane == 0) p.put(c, target, local, remote, bytes);
 *           if (lane == 0) p.close();               // each of the others once
 *       }
 *   }
 *
 * Tickets. Commands handed in have none yet, and a quiet of the channel does not cover them before run() has posted
 * them. Who wants a ticket passes a place for it and waits until the command is posted. Otherwise: a quiet after run()
 * has returned and the block has met.
 *
 * The queue. Position p lies in place p mod `places`. A place's turn says whose it is: 4p it is free for position p; 4p
 * + 1 its command is there; 4p + 2 the same, and its ticket is wanted; 4p + 3 the ticket is there. So each place is
 * handed round by one word that one side writes at a time. Producers release their words with it and so do not publish
 * anything themselves: the poster's lane acquires the turn and then fences for the system, and what it synchronised
 * with is published with what it did (PUB-1). Lanes that hand in together reserve together and wait together, as in
 * post_lanes.
 *
 * Gathering. A fence holds up what the other warps do in memory, and with it the commands that they are about to hand
 * in. A poster that fenced for the first that came found one or two each time, and stayed so: on an H200 the same
 * program made 1000 M/s in one run and 15 M/s in the next. So it waits for a whole warp's worth of commands: for one of
 * each producer that has not closed, and then as long as more keep coming; some microseconds at most.
 *
 * Failure. Who gives up, poster or producer, fails the poster: all others of the block learn why, and the channel is
 * closed, since commands that were handed in may never be posted (PRG-3). run() waits for producers at most as long as
 * any wait.
 */
#ifndef UCCL_EP_DEVICE_POSTER_H
#define UCCL_EP_DEVICE_POSTER_H

#ifndef UCCL_EP_DEVICE_H
#error "include device.h"
#endif

namespace uccl_ep {

struct poster {
    enum : uccl_ep_u32 { places = 64 }; /* no fewer than the widest warp's lanes */
    /* Looks, some tens of nanoseconds each. */
    enum : uccl_ep_u32 { gathers = 32, gathers_in_vain = 8 };

    uccl_ep_u64 word0[places], word1[places]; /* the ticket takes the place of word 0 */
    uccl_ep_u32 turn[places];                 /* modulo 2^32 */
    uccl_ep_u32 head;                         /* next position * 2, modulo 2^32; odd once nothing more is taken */
    uccl_ep_u32 end;                          /* `head` at the end; even as long as it is open */
    uccl_ep_u32 closings;
    uccl_ep_u32 failure; /* status */
    uccl_ep_u32 channel, closers;

    /* All threads of the block, before anything else. close() will be called `closers` times. */
    UCCL_EP_DEVICE void init(uccl_ep_u32 on_channel, uccl_ep_u32 expected_closers) {
        platform::sync_block(); /* a use before this one is over */
        for (uccl_ep_u32 i = platform::thread(); i < places; i += platform::threads()) turn[i] = 4 * i;
        if (platform::thread() == 0) {
            head = end = closings = failure = 0;
            channel = on_channel;
            closers = expected_closers;
        }
        platform::sync_block();
    }

    /* One thread hands in an encoded command. OK: it will be posted, unless the poster fails. With `posted`: waits
     * until it is, and gives the ticket. */
    UCCL_EP_DEVICE status post(const comm &c, const uccl_ep_words &words, ticket *posted = nullptr) {
        if (posted) *posted = UCCL_EP_NO_TICKET;
        const detail::lanes g = detail::lanes_of(platform::active());
        uccl_ep_u32 first = 0;
        if (g.leads()) first = platform::add_block(&head, 2 * g.count);
        if (g.count > 1) first = (uccl_ep_u32)platform::shuffle(g.mask, first, g.leader);
        if (first & 1) {
            if (g.leads()) detail::refuse(c, UCCL_EP_E_CLOSED, channel, UCCL_EP_NOWHERE_, 0);
            return UCCL_EP_E_CLOSED;
        }
        const uccl_ep_u32 at = first / 2 + g.index;
        const uccl_ep_u32 place = at % places;
        status result = wait_for_turn(c, g, place, 4 * at);
        if (result != UCCL_EP_OK) return result;
        word0[place] = words.word[0];
        word1[place] = words.word[1];
        hand_over(place, 4 * at + (posted ? 2 : 1));
        if (!posted) return UCCL_EP_OK;
        /* Whether a ticket is wanted may differ among lanes that came together. */
        result = wait_for_turn(c, detail::lanes_of(platform::active()), place, 4 * at + 3);
        if (result != UCCL_EP_OK) return result;
        *posted = word0[place];
        hand_over(place, 4 * (at + places));
        return UCCL_EP_OK;
    }

    UCCL_EP_DEVICE status put(const comm &c, uccl_ep_u32 target, uccl_ep_u64 local, uccl_ep_u64 remote,
                              uccl_ep_u64 bytes, ticket *posted = nullptr) {
        return post(c, detail::request{target, true, false, local, remote, bytes, 0, 0}, posted);
    }
    UCCL_EP_DEVICE status signal(const comm &c, uccl_ep_u32 target, uccl_ep_u32 slot, uccl_ep_u64 add,
                                 ticket *posted = nullptr) {
        return post(c, detail::request{target, false, true, 0, 0, 0, slot, add}, posted);
    }
    UCCL_EP_DEVICE status put_signal(const comm &c, uccl_ep_u32 target, uccl_ep_u64 local, uccl_ep_u64 remote,
                                     uccl_ep_u64 bytes, uccl_ep_u32 slot, uccl_ep_u64 add, ticket *posted = nullptr) {
        return post(c, detail::request{target, true, true, local, remote, bytes, slot, add}, posted);
    }

    /* One thread. The last expected call ends the poster once it has posted all that was handed in; what is handed in
     * after it is refused. */
    UCCL_EP_DEVICE void close() {
        /* Each closer's commands come before its closing, and all closings before the last one closes. */
        platform::fence_block();
        const uccl_ep_u32 before = platform::add_block(&closings, 1);
        platform::fence_block();
        if (before + 1 == closers) platform::store_release_block(&end, platform::or_block(&head, 1) | 1);
    }

    /* All lanes of one warp. Posts until it is closed and empty; else why it ended. */
    UCCL_EP_DEVICE status run(const comm &c) {
        const detail::lanes all = detail::lanes_of(platform::present());
        status result = detail::check_channel(c, channel);
        if (result != UCCL_EP_OK) {
            if (all.leads()) detail::refuse(c, result, channel, UCCL_EP_NOWHERE_, 0);
            return fail_all(c, all, result);
        }
        const uccl_ep_ring ring = detail::ring_of(c, channel);
        const uccl_ep_u64 slots = uccl_ep_ring_slots(&ring);
        const uccl_ep_u64 most = all.count < slots ? all.count : slots;
        detail::patience idle(platform::turns_shared);
        uccl_ep_u64 had = 0;                /* commands that were there at the last look */
        uccl_ep_u32 looks = 0, in_vain = 0; /* since the first of them came, and since the last */
        for (uccl_ep_u32 tail = 0;;) {
            const uccl_ep_u32 at = tail + all.index;
            const uccl_ep_u32 place = at % places;
            const uccl_ep_u32 state = platform::load_acquire_block(&turn[place]) - 4 * at;
            const uccl_ep_u64 there = platform::ballot(all.mask, state == 1 || state == 2);
            const uccl_ep_u64 gaps = ~there;
            uccl_ep_u64 n = gaps ? platform::lowest_bit(gaps) : 64; /* that are there without a gap */
            if (n > most) n = most;
            const bool all_there = n >= closers - platform::load_acquire_block(&closings);
            if (n && n < most && looks < gathers && !(all_there && in_vain >= gathers_in_vain)) {
                looks++;
                in_vain = n > had ? 0 : in_vain + 1;
                had = n;
                platform::relax();
                continue;
            }
            had = looks = in_vain = 0;
            if (n) {
                const bool mine = all.index < n;
                ticket t = 0;
                if (mine) {
                    const uccl_ep_words words = {{word0[place], word1[place]}};
                    t = detail::post_lanes(c, ring, detail::lanes_of(n < 64 ? (1ull << n) - 1 : ~0ull), words);
                }
                if (platform::ballot(all.mask, t == UCCL_EP_NO_TICKET && mine))
                    return fail_all(c, all, detail::not_posted(c));
                if (mine && state == 2) {
                    word0[place] = t;
                    hand_over(place, 4 * at + 3);
                } else if (mine) {
                    hand_over(place, 4 * (at + places));
                }
                tail += (uccl_ep_u32)n;
                idle = detail::patience(platform::turns_shared);
                continue;
            }
            if (platform::ballot(all.mask, platform::load_acquire_block(&end) == (2 * tail | 1))) return UCCL_EP_OK;
            result = (status)(int)platform::load_acquire_block(&failure);
            if (result == UCCL_EP_OK) result = idle.turn(c);
            const uccl_ep_u64 over = platform::ballot(all.mask, result != UCCL_EP_OK);
            if (over) {
                result = (status)platform::shuffle(all.mask, (uccl_ep_u64)result, platform::lowest_bit(over));
                if (all.leads())
                    detail::fail(c, result, UCCL_EP_DEVICE_POST, channel, UCCL_EP_NO_TICKET, UCCL_EP_NOWHERE_,
                                 platform::load_acquire_block(&head) / 2, tail);
                return fail_all(c, all, result);
            }
        }
    }

  private:
    UCCL_EP_DEVICE status post(const comm &c, detail::request r, ticket *posted) {
        status result = detail::check_request(c, r);
        if (result != UCCL_EP_OK) {
            detail::refuse(c, result, channel, r.signal ? r.slot : UCCL_EP_NOWHERE_, r.target);
            if (posted) *posted = UCCL_EP_NO_TICKET;
            return result;
        }
        while (result == UCCL_EP_OK && (r.put || r.signal)) {
            const uccl_ep_words words = detail::next_command(c, &r);
            result = post(c, words, r.put || r.signal ? nullptr : posted);
        }
        return result;
    }

    /* The turn's next holder may write the place: what this thread read and wrote there comes first. */
    UCCL_EP_DEVICE void hand_over(uccl_ep_u32 place, uccl_ep_u32 next) {
        if (UCCL_EP_DEVICE_FAULT(poster_hands_over_early)) {
            platform::store_block(&turn[place], next);
        } else {
            platform::store_release_block(&turn[place], next);
        }
    }

    /* Until all lanes of g see the turn they wait for: none goes on alone. */
    UCCL_EP_DEVICE status wait_for_turn(const comm &c, const detail::lanes &g, uccl_ep_u32 place, uccl_ep_u32 value) {
        detail::patience p(platform::turns_shared);
        for (;;) {
            const bool mine = platform::load_acquire_block(&turn[place]) == value;
            if (platform::ballot(g.mask, mine) == g.mask) return UCCL_EP_OK;
            status result = (status)(int)platform::load_acquire_block(&failure);
            const bool told = result != UCCL_EP_OK;
            if (!told) result = p.turn(c);
            const uccl_ep_u64 over = platform::ballot(g.mask, result != UCCL_EP_OK);
            if (!over) continue;
            const uccl_ep_u32 who = platform::lowest_bit(over);
            result = (status)platform::shuffle(g.mask, (uccl_ep_u64)result, who);
            if (platform::lane() == who && !told) {
                detail::fail(c, result, UCCL_EP_DEVICE_POST, channel, UCCL_EP_NO_TICKET, UCCL_EP_NOWHERE_, value / 4,
                             platform::load_acquire_block(&turn[place]) / 4);
                give_up(c, result);
            }
            return result;
        }
    }

    UCCL_EP_DEVICE void give_up(const comm &c, status result) {
        platform::store_release_block(&failure, (uccl_ep_u32)result);
        if (channel < c.channels) platform::store_release_system(detail::ring_of(c, channel).gave_up, 1);
    }

    UCCL_EP_DEVICE status fail_all(const comm &c, const detail::lanes &all, status result) {
        if (all.leads()) give_up(c, result);
        platform::sync_warp(all.mask);
        return result;
    }
};

} // namespace uccl_ep

#endif
