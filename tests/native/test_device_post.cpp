// SPDX-License-Identifier: Apache-2.0
//
// test_device_post.cpp: many blocks post to a few rings, and a proxy takes: nothing lost, doubled, torn or reordered,
// and every payload is there when its command is. Then rings that are full, closed or aborted.
//
// An actor is who posts by itself: a thread, a warp or a block, by the form. Its commands are numbered; a command's
// payload is a row that all threads of the actor wrote, and that they write again once quiet_source said that they may.
// Rows are plain memory: ThreadSanitizer sees whether posting orders them.
#include "device_bench.h"

using uccl_ep::ticket;

#define ROW 64u // words
#define ROWS 4u // of an actor, in turn

enum form { SINGLE, BY_WARP, BY_BLOCK, MANY, DIVERGENT, POSTER, POSTER_TICKETS, FORMS };

struct work {
    int form;
    uccl_ep_u64 commands; // of an actor
    uccl_ep_u64 seed;
    uccl_ep_u64 *rows;    // [actors][n_rows][ROW]
    uccl_ep_u64 n_rows;   // of an actor
    uccl_ep_u64 *refused; // calls that failed
};

inline uccl_ep_u64 mix(uccl_ep_u64 a, uccl_ep_u64 b) {
    uccl_ep_u64 z = a * 0x9e3779b97f4a7c15ull + b * 0xd1342543de82ef95ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    return z ^ (z >> 29);
}

inline uccl_ep_u64 offset_of_row(const work &w, uccl_ep_u64 actor, uccl_ep_u64 sequence) {
    return (actor * w.n_rows + sequence % w.n_rows) * ROW * sizeof(uccl_ep_u64);
}

inline void write_word(const work &w, uccl_ep_u64 actor, uccl_ep_u64 sequence, uccl_ep_u32 i) {
    w.rows[offset_of_row(w, actor, sequence) / sizeof(uccl_ep_u64) + i] = mix(actor << 32 | sequence, i);
}

UCCL_EP_KERNEL void produce(uccl_ep::comm c, work w) {
    using namespace uccl_ep;
    using namespace uccl_ep::platform;
    UCCL_EP_SHARED poster p;
    const uccl_ep_u64 me = static_cast<uccl_ep_u64>(block()) * threads() + thread();
    const uccl_ep_u32 warps = (threads() + width() - 1) / width();
    const uccl_ep_u32 warp = block() * warps + thread() / width();
    ticket posted[ROWS] = {};
    const bool by_poster = w.form == POSTER || w.form == POSTER_TICKETS;
    if (by_poster) {
        p.init(block() % c.channels, threads() - width());
        if (thread() < width()) {
            if (p.run(c) != UCCL_EP_OK && lane() == 0) add_device(w.refused, 1);
            return;
        }
    }
    uccl_ep_u64 turn = 0;
    for (uccl_ep_u64 sequence = 0;; turn++) {
        const bool left = sequence < w.commands;
        bool mine = left;
        if (w.form == MANY) {
            if (!ballot(present(), left)) break;
            // No more lanes than the ring has slots.
            const uccl_ep_u64 groups = (width() >> c.rings[0].log2_slots) + 1;
            mine = left && lane() % groups == turn % groups && mix(w.seed + me, turn) % 3;
        } else if (!left) {
            break;
        }
        const uccl_ep_u64 actor = w.form == BY_WARP ? warp : w.form == BY_BLOCK ? block() : me;
        // Lanes of a warp post to different channels; one actor to one, so that its order can be seen.
        const uccl_ep_u32 channel = (w.form == MANY ? warp : static_cast<uccl_ep_u32>(actor * 7 / 3)) % c.channels;
        const bool again = mine && sequence >= w.n_rows;
        if (again && w.form != POSTER &&
            quiet_source(c, by_poster ? p.channel : channel, posted[sequence % ROWS]) != UCCL_EP_OK) {
            add_device(w.refused, 1);
            break;
        }
        const uccl_ep_u32 target = static_cast<uccl_ep_u32>(actor);
        const uccl_ep_u64 local = offset_of_row(w, actor, sequence), bytes = ROW * sizeof(uccl_ep_u64);
        const uccl_ep_u64 remote = sequence * 16;
        ticket t = 0;
        if (w.form == BY_WARP) {
            write_word(w, actor, sequence, lane());
            t = put_warp(c, channel, target, local, remote, bytes);
        } else if (w.form == BY_BLOCK) {
            if (thread() < ROW) write_word(w, actor, sequence, thread());
            t = put_block(c, channel, target, local, remote, bytes);
        } else {
            if (mine) write_word(w, actor, sequence, 0);
            uccl_ep_command command = {};
            command.op = UCCL_EP_OP_PUT;
            command.target = target;
            command.local = local;
            command.remote = remote;
            command.bytes = static_cast<uccl_ep_u32>(bytes);
            command.granularity = c.granularity;
            if (w.form == MANY) {
                t = post_many_warp(c, channel, command, mine);
            } else if (w.form == POSTER) {
                t = p.put(c, target, local, remote, bytes) == UCCL_EP_OK ? 0 : UCCL_EP_NO_TICKET;
            } else if (w.form == POSTER_TICKETS) {
                if (p.put(c, target, local, remote, bytes, &t) != UCCL_EP_OK) t = UCCL_EP_NO_TICKET;
            } else if (w.form == DIVERGENT && mix(w.seed + me, sequence) % 3 == 0) {
                for (uccl_ep_u32 i = 0; i < lane() % 3; i++) relax();
                t = put(c, channel, target, local, remote, bytes);
            } else if (w.form == DIVERGENT && lane() % 2) {
                uccl_ep_words words = {};
                uccl_ep_encode(&command, &words);
                t = post(c, channel, words);
            } else {
                t = put(c, channel, target, local, remote, bytes);
            }
        }
        if (!mine) continue;
        if (t == UCCL_EP_NO_TICKET) {
            add_device(w.refused, 1);
            break;
        }
        posted[sequence % ROWS] = t;
        sequence++;
    }
    if (by_poster) p.close();
}

static void run_producers(int form, const shape &s, uint32_t channels, uint32_t log2_slots, uint64_t first_ticket,
                          uint64_t commands) {
    const uint64_t warps = (s.threads + s.warp - 1) / s.warp;
    const uint64_t actors = s.blocks * (form == BY_WARP ? warps : form == BY_BLOCK ? 1 : s.threads);
    if (first_ticket > 1ull << 63) first_ticket -= actors * commands; // the last tickets there are
    bench b(channels, log2_slots, first_ticket);
    work w = {form, commands, test_seed_value + s.seed, nullptr, form == POSTER ? commands : ROWS, nullptr};
    std::vector<uccl_ep_u64> rows(actors * w.n_rows * ROW);
    uccl_ep_u64 refused = 0;
    w.rows = rows.data();
    w.refused = &refused;
    std::vector<uint64_t> next(actors);
    {
        proxy p(b, [&](uccl_ep_u32, uccl_ep_u64, const uccl_ep_command &command) {
            const uint64_t actor = command.target, sequence = command.remote / 16;
            CHECK(command.op == UCCL_EP_OP_PUT && actor < actors, "target %" PRIu64, actor);
            CHECK(sequence == next[actor], "actor %" PRIu64 ": command %" PRIu64 " after %" PRIu64, actor, sequence,
                  next[actor] - 1);
            next[actor]++;
            CHECK_EQ(command.local, offset_of_row(w, actor, sequence));
            const uint64_t left = s.threads - actor % warps * s.warp;
            const uint64_t n = form == BY_WARP    ? (left < s.warp ? left : s.warp)
                               : form == BY_BLOCK ? (s.threads < ROW ? s.threads : ROW)
                                                  : 1;
            for (uint64_t i = 0; i < n; i++) CHECK_EQ(rows[command.local / 8 + i], mix(actor << 32 | sequence, i));
        });
        RUN(s, produce, b.c, w);
    }
    CHECK_EQ(refused, 0);
    CHECK_EQ(b.failed(), 0);
    for (uint64_t actor = 0; actor < actors; actor++) {
        const bool posts = (form != POSTER && form != POSTER_TICKETS) || actor % s.threads >= s.warp;
        CHECK_EQ(next[actor], posts ? commands : 0);
    }
}

static void check_producers() {
    test_rng rng = test_rng_at(5);
    for (const uint32_t warp : warp_widths) {
        for (int form = 0; form < FORMS; form++) {
            for (const uint32_t log2_slots : {1u, 4u, 7u}) {
                // A ring of two slots costs a turn of the proxy for two commands: it gets fewer.
                const bool tiny = log2_slots == 1;
                const uint32_t n = warp == 1 ? 5
                                   : tiny    ? warp + 7
                                             : warp * 2 + static_cast<uint32_t>(test_below(&rng, warp));
                const uint64_t seed = test_below(&rng, 2) ? test_random(&rng) | 1 : 0;
                const uint64_t first[] = {0, test_below(&rng, 1000), (1ull << 32) - 20, ~0ull - 1};
                const uint32_t channels = 1 + static_cast<uint32_t>(test_below(&rng, 3));
                const uint64_t most = tiny ? 5 : form == BY_BLOCK || warp == 1 ? 60 : 12;
                const uint64_t commands = 3 + test_scaled(most);
                run_producers(form, {warp, 3, n, seed}, channels, log2_slots, first[test_below(&rng, 4)], commands);
            }
        }
    }
}

// ------------------------------------------------------------------------------------- rings that do not take any more

enum way_out { BY_DEADLINE, BY_ABORT, BY_CLOSE };

UCCL_EP_KERNEL void fill(uccl_ep::comm c, int form, ticket *tickets, uccl_ep_status *waited) {
    using namespace uccl_ep;
    using namespace uccl_ep::platform;
    const uccl_ep_u32 me = thread();
    if (form == SINGLE) {
        tickets[me] = signal(c, 0, 0, 0, me);
    } else if (form == BY_WARP) {
        for (uccl_ep_u32 i = 0; i < 5; i++) tickets[me] = signal_warp(c, 0, 0, 0, i);
    } else if (form == BY_BLOCK) {
        for (uccl_ep_u32 i = 0; i < 5; i++) tickets[me] = signal_block(c, 0, 0, 0, i);
    } else if (form == MANY) {
        uccl_ep_command command = {};
        command.op = UCCL_EP_OP_SIGNAL;
        command.add = me;
        for (uccl_ep_u32 i = 0; i < 5; i++) tickets[me] = post_many_warp(c, 0, command, lane() < 3);
    } else {
        UCCL_EP_SHARED poster p;
        p.init(0, threads() - width());
        tickets[me] = UCCL_EP_NO_TICKET;
        if (me < width()) {
            waited[me] = p.run(c);
            return;
        }
        // More than the queue holds: those that are not posted wait for a place, and then for their ticket.
        for (uccl_ep_u32 i = 0; i < 200; i++)
            if (p.signal(c, 0, 0, me, form == POSTER ? nullptr : &tickets[me]) != UCCL_EP_OK) break;
        p.close();
    }
    // Who has a ticket would wait for it, and could be the first to fail.
    if (tickets[me] == UCCL_EP_NO_TICKET) waited[me] = quiet(c, 0, tickets[me]);
}

static void check_ways_out() {
    for (const uint32_t warp : warp_widths) {
        for (const int form : {SINGLE, BY_WARP, BY_BLOCK, MANY, POSTER, POSTER_TICKETS}) {
            for (int way = BY_DEADLINE; way <= BY_CLOSE; way++) {
                bench b(1, 2, 40);
                if (way == BY_DEADLINE) b.c.timeout_ticks = second / 50;
                const uint32_t n = warp + 6;
                std::vector<ticket> tickets(n);
                std::vector<uccl_ep_status> waited(n);
                std::thread host([&] {
                    // Once the ring is full.
                    while (__atomic_load_n(&b.producers[0].head, __ATOMIC_RELAXED) <= 44) sched_yield();
                    if (way == BY_ABORT) __atomic_store_n(&b.control.aborted, 1, __ATOMIC_RELEASE);
                    if (way == BY_CLOSE)
                        __atomic_store_n(&b.counters[0].status, UCCL_EP_CHANNEL_CLOSED, __ATOMIC_RELEASE);
                });
                RUN((shape{warp, 1, n}), fill, b.c, form, tickets.data(), waited.data());
                host.join();
                const uccl_ep_status expected[] = {UCCL_EP_E_DEADLINE, UCCL_EP_E_ABORTED, UCCL_EP_E_CLOSED};
                CHECK_EQ(b.failed(), expected[way]);
                CHECK_EQ(b.error.what, UCCL_EP_DEVICE_POST);
                CHECK_EQ(b.error.channel, 0);
                CHECK_EQ(b.gave_up[0], 1); // PRG-3
                for (uint32_t i = 0; i < n; i++)
                    if (tickets[i] == UCCL_EP_NO_TICKET) CHECK(waited[i] < 0, "thread %u: %d", i, waited[i]);
                const bool by_poster = form == POSTER || form == POSTER_TICKETS;
                if (!by_poster) {
                    CHECK(b.error.ticket > 42 && b.error.ticket < b.producers[0].head, "%" PRIu64, b.error.ticket);
                    CHECK_EQ(b.error.seen, b.counters[0].tail);
                    for (const ticket t : tickets) CHECK(t == UCCL_EP_NO_TICKET || t < 44, "%" PRIu64, t);
                }
            }
        }
    }
}

UCCL_EP_KERNEL void post_once(uccl_ep::comm c, ticket *t) {
    *t = uccl_ep::signal(c, 0, 0, 0, 1);
}

// The cached tail: read again when it shows no room, kept when it does.
static void check_tail_cache() {
    bench b(1, 1, 10);
    ticket t;
    for (int i = 0; i < 2; i++) RUN((shape{1, 1, 1}), post_once, b.c, &t);
    CHECK_EQ(b.producers[0].tail_cache, 10);
    b.publish(0, 12);
    RUN((shape{1, 1, 1}), post_once, b.c, &t);
    CHECK_EQ(b.producers[0].tail_cache, 12);
    b.publish(0, 13);
    RUN((shape{1, 1, 1}), post_once, b.c, &t);
    CHECK_EQ(b.producers[0].tail_cache, 12);
    CHECK_EQ(t, 13);
}

// What lands in memory, word by word: the parity of each lap in both words.
static void check_parity() {
    test_rng rng = test_rng_at(6);
    for (uint64_t i = test_scaled(200); i; i--) {
        const uint32_t log2_slots = 1 + static_cast<uint32_t>(test_below(&rng, 8));
        const uint64_t first = test_random(&rng) >> test_below(&rng, 64);
        bench b(1, log2_slots, first);
        ticket t = 0;
        RUN((shape{1, 1, 1}), post_once, b.c, &t);
        CHECK_EQ(t, first);
        const uccl_ep_slot &slot = b.slots[0][first & ((1ull << log2_slots) - 1)];
        const uint64_t odd = first >> log2_slots & 1;
        CHECK_EQ(slot.word[0] >> 63, !odd);
        CHECK_EQ(slot.word[1] >> 63, !odd);
        for (const uccl_ep_slot &other : b.slots[0])
            if (&other != &slot) CHECK_EQ(other.word[0] & ~UCCL_EP_PARITY_BIT, 0);
    }
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 500);
    check_tail_cache();
    check_parity();
    check_ways_out();
    check_producers();
    return test_end();
}
