// SPDX-License-Identifier: Apache-2.0
//
// test_device_poster.cpp: what the poster promises beside what test_device_post.cpp shows of all forms: tickets,
// closing, and ends that are not the usual one.
#include "device_bench.h"

using uccl_ep::ticket;

struct poster_results {
    uccl_ep_status ran;
    uccl_ep_u64 accepted; // calls of post that said OK
    uccl_ep_u64 closed;   // that said E_CLOSED
    uccl_ep_u64 other;
    ticket tickets[4096];
};

// One producer thread a warp, and its lanes together if `together`; each hands in n commands. The first to have handed
// in `close_after` closes, whatever the others do.
UCCL_EP_KERNEL void hand_in(uccl_ep::comm c, uccl_ep_u64 n, int together, uccl_ep_u64 close_after, poster_results *r) {
    using namespace uccl_ep;
    using namespace uccl_ep::platform;
    UCCL_EP_SHARED poster p;
    p.init(0, 1);
    if (thread() < width()) {
        const status ran = p.run(c);
        if (lane() == 0) r->ran = ran;
        return;
    }
    if (!together && lane()) return;
    for (uccl_ep_u64 i = 0; i < n; i++) {
        const uccl_ep_u64 id = (thread() - width()) * n + i;
        ticket t = UCCL_EP_NO_TICKET;
        // Every third wants its ticket: neighbours that came together differ.
        const bool wanted = (thread() + i) % 3 == 0;
        const status s = p.signal(c, 1, 2, id, wanted ? &t : nullptr);
        add_device(s == UCCL_EP_OK ? &r->accepted : s == UCCL_EP_E_CLOSED ? &r->closed : &r->other, 1);
        r->tickets[id] = s == UCCL_EP_OK && wanted ? t : UCCL_EP_NO_TICKET;
        if (wanted && s == UCCL_EP_OK && t == UCCL_EP_NO_TICKET) add_device(&r->other, 1);
        if (i + 1 == close_after && thread() == width()) p.close();
    }
    if (close_after > n && thread() == width()) p.close();
}

// Commands beyond the queue; who closes early leaves the others refused, and what was accepted is posted, once.
static void check_closing(uint32_t warp, uint64_t n, int together, uint64_t close_after, uint64_t seed) {
    bench b(1, 5);
    auto r = std::make_unique<poster_results>();
    r->ran = UCCL_EP_E_INVALID;
    const uint32_t producers = warp == 1 ? 3 : 2 * warp;
    std::vector<ticket> ticket_of(producers * n, UCCL_EP_NO_TICKET);
    uint64_t taken = 0;
    {
        proxy p(b, [&](uccl_ep_u32, uccl_ep_u64 t, const uccl_ep_command &command) {
            CHECK(command.op == UCCL_EP_OP_SIGNAL && command.add < ticket_of.size(), "%" PRIu64, command.add);
            CHECK_EQ(ticket_of[command.add], UCCL_EP_NO_TICKET);
            ticket_of[command.add] = t;
            taken++;
        });
        RUN((shape{warp, 1, warp + producers, seed}), hand_in, b.c, n, together, close_after, r.get());
    }
    CHECK_EQ(r->ran, UCCL_EP_OK);
    CHECK_EQ(r->other, 0);
    CHECK_EQ(taken, r->accepted);
    CHECK_EQ(b.producers[0].head, r->accepted);
    const uint64_t calls = (together ? producers : (producers + warp - 1) / warp) * n;
    CHECK_EQ(r->accepted + r->closed, calls);
    CHECK_EQ(b.failed(), r->closed ? UCCL_EP_E_CLOSED : 0);
    CHECK_EQ(b.gave_up[0], 0);
    // The tickets that were given are those of the commands.
    for (uint64_t id = 0; id < ticket_of.size(); id++)
        if (r->tickets[id] != UCCL_EP_NO_TICKET && (together || id / n % warp == 0))
            CHECK_EQ(r->tickets[id], ticket_of[id]);
    if (close_after == 0) CHECK_EQ(r->accepted, 0);
}

UCCL_EP_KERNEL void bad_calls(uccl_ep::comm c, uccl_ep_status *s, ticket *t) {
    using namespace uccl_ep;
    using namespace uccl_ep::platform;
    UCCL_EP_SHARED poster p;
    p.init(0, 1);
    if (thread() < width()) {
        const status ran = p.run(c);
        if (lane() == 0) s[0] = ran;
        return;
    }
    if (lane()) return;
    s[1] = p.put(c, 4096, 0, 0, 16, &t[0]);
    s[2] = p.put(c, 0, 8, 0, 16, &t[1]);
    s[3] = p.put_signal(c, 0, 0, 0, 16, 64, 1, &t[2]);
    // Longer than a command: two commands, and the ticket of the second.
    s[4] = p.put_signal(c, 0, 0, 0, UCCL_EP_MAX_COMMAND_BYTES(16) + 16, 3, 1, &t[3]);
    p.close();
}

static void check_requests() {
    bench b(1, 4);
    uccl_ep_status s[5] = {};
    ticket t[4] = {};
    RUN((shape{32, 1, 64}), bad_calls, b.c, s, t);
    CHECK_EQ(s[0], UCCL_EP_OK);
    CHECK_EQ(s[1], UCCL_EP_E_RANGE);
    CHECK_EQ(s[2], UCCL_EP_E_ALIGNMENT);
    CHECK_EQ(s[3], UCCL_EP_E_RANGE);
    CHECK_EQ(s[4], UCCL_EP_OK);
    for (int i = 0; i < 3; i++) CHECK_EQ(t[i], UCCL_EP_NO_TICKET);
    CHECK_EQ(t[3], 1);
    CHECK_EQ(b.failed(), UCCL_EP_E_RANGE);
    CHECK_EQ(b.producers[0].head, 2);
    CHECK_EQ(b.at(0, 0).op, UCCL_EP_OP_PUT);
    CHECK_EQ(b.at(0, 1).op, UCCL_EP_OP_PUT_SIGNAL);
}

// Nobody closes it, and nothing comes: it waits no longer than any wait, and says so.
UCCL_EP_KERNEL void forgotten(uccl_ep::comm c, uccl_ep_u32 channel, uccl_ep_status *ran, uccl_ep_status *late) {
    using namespace uccl_ep;
    using namespace uccl_ep::platform;
    UCCL_EP_SHARED poster p;
    p.init(channel, 1);
    if (thread() < width()) ran[thread()] = p.run(c);
    sync_block();
    // A producer of a poster that failed learns it.
    if (thread() == width()) *late = p.signal(c, 0, 0, 1, nullptr);
    if (thread() == width() && *late == UCCL_EP_OK) {
        for (uccl_ep_u32 i = 0; i < 2 * poster::places && *late == UCCL_EP_OK; i++) *late = p.signal(c, 0, 0, 1);
    }
}

static void check_forgotten(uint32_t warp) {
    const auto run_it = [&](bench &b, uccl_ep_u32 channel, uccl_ep_status expected) {
        std::vector<uccl_ep_status> ran(warp);
        uccl_ep_status late = UCCL_EP_OK;
        RUN((shape{warp, 1, warp + 1}), forgotten, b.c, channel, ran.data(), &late);
        for (const uccl_ep_status s : ran) CHECK_EQ(s, expected);
        CHECK_EQ(late, expected);
        CHECK_EQ(b.failed(), expected);
        CHECK_EQ(b.error.channel, channel);
    };
    bench dead(1, 2);
    dead.c.timeout_ticks = second / 50;
    run_it(dead, 0, UCCL_EP_E_DEADLINE);
    CHECK_EQ(dead.gave_up[0], 1);
    bench aborted(1, 2);
    aborted.control.aborted = 1;
    run_it(aborted, 0, UCCL_EP_E_ABORTED);
    bench range(1, 2);
    run_it(range, 1, UCCL_EP_E_RANGE);
    CHECK_EQ(range.gave_up[0], 0);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 300);
    for (const uint32_t warp : warp_widths) {
        for (const uint64_t seed : {uint64_t{0}, test_seed_value}) {
            for (const int together : {0, 1}) {
                const uint64_t n = together ? 4 : 30;
                check_closing(warp, n, together, n, seed);
                check_closing(warp, n, together, n / 2, seed);
                check_closing(warp, 100 / warp + 1, together, 1000, seed);
            }
        }
        check_forgotten(warp);
    }
    check_requests();
    return test_end();
}
