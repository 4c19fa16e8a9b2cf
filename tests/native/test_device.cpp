// SPDX-License-Identifier: Apache-2.0
//
// test_device.cpp: every call of device.h at every scope: what lands in the ring, who gets which ticket, what waits
// say.
#include "device_bench.h"

#include <chrono>

using namespace uccl_ep;
using platform::lane;
using platform::thread;
using platform::threads;
using platform::width;

enum scope { ONE, WARP, BLOCK };

// ------------------------------------------------------------------------------------------------------------ posting

// What a call stores: for each thread its ticket, and one marker in the heap's place of the caller.
UCCL_EP_KERNEL void call_put(comm c, int scope, int what, ticket *tickets) {
    const uccl_ep_u32 target = 5;
    ticket t = UCCL_EP_NO_TICKET;
    if (what == 0) {
        t = scope == ONE    ? put(c, 0, target, 16, 32, 48)
            : scope == WARP ? put_warp(c, 0, target, 16, 32, 48)
                            : put_block(c, 0, target, 16, 32, 48);
    } else if (what == 1) {
        t = scope == ONE    ? signal(c, 0, target, 7, 1ull << 40)
            : scope == WARP ? signal_warp(c, 0, target, 7, 1ull << 40)
                            : signal_block(c, 0, target, 7, 1ull << 40);
    } else {
        t = scope == ONE    ? put_signal(c, 0, target, 16, 32, 48, 7, 9)
            : scope == WARP ? put_signal_warp(c, 0, target, 16, 32, 48, 7, 9)
                            : put_signal_block(c, 0, target, 16, 32, 48, 7, 9);
    }
    tickets[platform::block() * threads() + thread()] = t;
}

static void check_scopes(uint32_t warp, uint32_t n_threads, uint64_t seed) {
    for (int scope = ONE; scope <= BLOCK; scope++) {
        for (int what = 0; what < 3; what++) {
            bench b(1, 9);
            std::vector<ticket> tickets(n_threads);
            RUN((shape{warp, 1, n_threads, seed}), call_put, b.c, scope, what, tickets.data());
            const uint64_t callers = scope == ONE ? n_threads : scope == WARP ? (n_threads + warp - 1) / warp : 1;
            CHECK_EQ(b.producers[0].head, callers);
            std::vector<int> seen(callers);
            for (uint32_t i = 0; i < n_threads; i++) {
                CHECK(tickets[i] < callers, "thread %u has ticket %" PRIu64, i, tickets[i]);
                seen[tickets[i]]++;
                // All threads of a warp, or of the block, get the ticket of the one that acted.
                if (scope == WARP && i % warp) CHECK_EQ(tickets[i], tickets[i - 1]);
            }
            for (uint64_t t = 0; t < callers; t++) {
                CHECK(scope != ONE || seen[t] == 1, "ticket %" PRIu64 " was given out %d times", t, seen[t]);
                const uccl_ep_command command = b.at(0, t);
                CHECK_EQ(command.target, 5);
                CHECK_EQ(command.op, what == 0   ? UCCL_EP_OP_PUT
                                     : what == 1 ? UCCL_EP_OP_SIGNAL
                                                 : UCCL_EP_OP_PUT_SIGNAL);
                if (what != 1) CHECK(command.local == 16 && command.remote == 32 && command.bytes == 48, "%d", what);
                if (what == 1) CHECK(command.slot == 7 && command.add == 1ull << 40, "%d", what);
                if (what == 2) CHECK(command.slot == 7 && command.add == 9, "%d", what);
            }
            CHECK_EQ(b.claim, 0);
        }
    }
}

UCCL_EP_KERNEL void call_long(comm c, uccl_ep_u64 bytes, int with_signal, uccl_ep_u32 slot, uccl_ep_u64 add,
                              ticket *t) {
    *t = with_signal ? put_signal(c, 0, 1, 16, 32, bytes, slot, add) : put(c, 0, 1, 16, 32, bytes);
}

// A put that is longer than a command holds, and a signal that does not fit beside it (PUT-4, SIG-3).
static void check_splitting() {
    const uint64_t most = UCCL_EP_MAX_COMMAND_BYTES(16);
    struct {
        uint64_t bytes;
        int signal;
        uint32_t slot;
        uint64_t add;
        uint64_t commands;
    } cases[] = {{0, 0, 0, 0, 1},        {most, 0, 0, 0, 1},        {most + 16, 0, 0, 0, 2},
                 {3 * most, 0, 0, 0, 3}, {3 * most, 1, 3, 8191, 3}, {3 * most, 1, 3, 8192, 4},
                 {0, 1, 3, 1, 1},        {16, 1, 20000, 1, 2},      {16, 1, 16383, ~0ull, 2}};
    for (const auto &k : cases) {
        bench b(1, 3);
        b.c.signals = 30000;
        ticket t = 0;
        RUN((shape{1, 1, 1}), call_long, b.c, k.bytes, k.signal, k.slot, k.add, &t);
        CHECK_EQ(b.producers[0].head, k.commands);
        CHECK_EQ(t, k.commands - 1);
        uint64_t at = 0;
        for (uint64_t i = 0; i < k.commands; i++) {
            const uccl_ep_command command = b.at(0, i);
            const bool last = i + 1 == k.commands;
            if (uccl_ep_op_has_put(command.op)) {
                CHECK_EQ(command.local, 16 + at);
                CHECK_EQ(command.remote, 32 + at);
                at += command.bytes;
            }
            CHECK_EQ(uccl_ep_op_has_signal(command.op) != 0, last && k.signal);
            if (last && k.signal) CHECK(command.slot == k.slot && command.add == k.add, "%u", command.slot);
        }
        CHECK_EQ(at, k.bytes);
    }
}

struct bad_call {
    uccl_ep_u32 channel, target;
    uccl_ep_u64 local, remote, bytes;
    uccl_ep_u32 slot;
    uccl_ep_status status;
};

UCCL_EP_KERNEL void call_bad(comm c, bad_call k, int form, ticket *t, uccl_ep_status *waited) {
    if (form == 0) *t = put_signal(c, k.channel, k.target, k.local, k.remote, k.bytes, k.slot, 1);
    if (form == 1) *t = put_signal_warp(c, k.channel, k.target, k.local, k.remote, k.bytes, k.slot, 1);
    if (form == 2) *t = put_signal_block(c, k.channel, k.target, k.local, k.remote, k.bytes, k.slot, 1);
    if (form == 3) {
        uccl_ep_command command = {};
        command.op = UCCL_EP_OP_PUT_SIGNAL;
        command.target = k.target;
        command.local = k.local;
        command.remote = k.remote;
        command.bytes = static_cast<uccl_ep_u32>(k.bytes);
        command.slot = k.slot;
        command.granularity = c.granularity;
        *t = post_many_warp(c, k.channel, command, true);
    }
    const uccl_ep_status first = quiet(c, k.channel, *t);
    if (thread() == 0) *waited = first;
}

// What is wrong is refused, never cut to size, and says so once (PUT-4).
static void check_refusals() {
    const uint64_t heap = 1ull << 36;
    const bad_call cases[] = {
        {1, 0, 0, 0, 16, 0, UCCL_EP_E_RANGE},         {~0u, 0, 0, 0, 16, 0, UCCL_EP_E_RANGE},
        {0, 4096, 0, 0, 16, 0, UCCL_EP_E_RANGE},      {0, 0, heap, 0, 16, 0, UCCL_EP_E_RANGE},
        {0, 0, 0, heap - 16, 32, 0, UCCL_EP_E_RANGE}, {0, 0, ~15ull, 0, 16, 0, UCCL_EP_E_RANGE}, // the sum wraps
        {0, 0, 8, 0, 16, 0, UCCL_EP_E_ALIGNMENT},     {0, 0, 0, 4, 16, 0, UCCL_EP_E_ALIGNMENT},
        {0, 0, 0, 0, 12, 0, UCCL_EP_E_ALIGNMENT},     {0, 0, 0, 0, 16, 64, UCCL_EP_E_RANGE},
    };
    for (const bad_call &k : cases) {
        for (int form = 0; form < 4; form++) {
            bench b(1, 3);
            ticket t = 0;
            uccl_ep_status waited = UCCL_EP_OK;
            RUN((shape{1, 1, 1}), call_bad, b.c, k, form, &t, &waited);
            CHECK_EQ(t, UCCL_EP_NO_TICKET);
            CHECK_EQ(waited, k.status); // a wait for what was not posted fails at once, with the reason
            CHECK_EQ(b.failed(), k.status);
            CHECK_EQ(b.error.what, UCCL_EP_DEVICE_POST);
            CHECK_EQ(b.error.channel, k.channel);
            CHECK_EQ(b.error.ticket, UCCL_EP_NO_TICKET);
            CHECK_EQ(b.producers[0].head, 0);
            CHECK_EQ(b.gave_up[0], 0);
        }
    }
    bench b(1, 3);
    b.c.version++;
    ticket t = 0;
    uccl_ep_status waited = UCCL_EP_OK;
    RUN((shape{1, 1, 1}), call_bad, b.c, bad_call{0, 0, 0, 0, 16, 0, UCCL_EP_OK}, 0, &t, &waited);
    CHECK_EQ(b.failed(), UCCL_EP_E_ABI);
}

UCCL_EP_KERNEL void call_many(comm c, uccl_ep_u64 who, ticket *tickets) {
    uccl_ep_command command = {};
    command.op = UCCL_EP_OP_SIGNAL;
    command.add = thread();
    tickets[thread()] = post_many_warp(c, 0, command, who >> lane() & 1);
}

// Lanes post together on consecutive tickets in their order, across the lap, and all or none (PUB-2).
static void check_many(uint32_t warp) {
    test_rng rng = test_rng_at(warp);
    for (uint32_t log2_slots = 1; log2_slots <= 6; log2_slots++) {
        for (uint64_t round = test_scaled(20); round; round--) {
            const uint32_t n_threads = 1 + static_cast<uint32_t>(test_below(&rng, warp));
            const uint64_t mask = n_threads < 64 ? (1ull << n_threads) - 1 : ~0ull;
            uint64_t who = test_random(&rng) & mask;
            for (uint64_t k = test_below(&rng, 6); k; k--) who &= test_random(&rng);
            const uint64_t n = static_cast<uint64_t>(__builtin_popcountll(who));
            const uint64_t start = test_below(&rng, 200);
            bench b(1, log2_slots, start);
            std::vector<ticket> tickets(n_threads);
            RUN((shape{warp, 1, n_threads, test_random(&rng)}), call_many, b.c, who, tickets.data());
            const bool fits = n <= 1ull << log2_slots;
            CHECK_EQ(b.failed(), fits ? UCCL_EP_OK : UCCL_EP_E_RANGE);
            CHECK_EQ(b.producers[0].head, start + (fits ? n : 0));
            uint64_t next = start;
            for (uint32_t i = 0; i < n_threads; i++) {
                const bool posted = fits && (who >> i & 1);
                CHECK_EQ(tickets[i], posted ? next : UCCL_EP_NO_TICKET);
                if (posted) CHECK_EQ(b.at(0, next++).add, i);
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------------------ waiting

struct wait_results {
    uccl_ep_status status[1024];
    uccl_ep_u64 seen[1024];
};

enum wait_kind { QUIET, QUIET_ALL_TICKETS, SOURCE, SOURCE_ALL_TICKETS, EVERYTHING, SIGNAL, SIGNAL_OF_ONE, KINDS };

UCCL_EP_KERNEL void call_wait(comm c, int kind, int scope, ticket t, wait_results *r) {
    uccl_ep_status s = UCCL_EP_E_INVALID;
    uccl_ep_u64 seen = 0;
#define WAIT_AT(name, ...)                                                                                             \
    s = scope == ONE ? name(__VA_ARGS__) : scope == WARP ? name##_warp(__VA_ARGS__) : name##_block(__VA_ARGS__)
    if (kind == QUIET) WAIT_AT(quiet, c, 0, t);
    if (kind == QUIET_ALL_TICKETS) WAIT_AT(quiet, c, 0);
    if (kind == SOURCE) WAIT_AT(quiet_source, c, 0, t);
    if (kind == SOURCE_ALL_TICKETS) WAIT_AT(quiet_source, c, 0);
    if (kind == EVERYTHING) WAIT_AT(quiet_all, c);
    if (kind == SIGNAL) WAIT_AT(wait_signal, c, 3, t, &seen);
    if (kind == SIGNAL_OF_ONE) WAIT_AT(wait_signal, c, 3, t, &seen, 70);
    r->status[thread()] = s;
    r->seen[thread()] = seen;
}

typedef std::function<void(bench &)> change;

// How long a wait is looked at before what it waits for happens: where one is known to come back too early, until it
// has had the time to.
static unsigned early_ms;

// A wait of each kind and scope: all callers get `expected` once `then` has happened, and none of them before.
static void wait_until(int kind, uint32_t warp, ticket t, const change &before, const change &then,
                       uccl_ep_status expected, uccl_ep_u64 timeout = bench_timeout) {
    const bool signal = kind == SIGNAL || kind == SIGNAL_OF_ONE;
    for (int scope = ONE; scope <= BLOCK; scope++) {
        bench b(2, 4, 100, 2);
        b.c.timeout_ticks = timeout;
        b.producers[0].head = 108; // tickets 100 to 107 are given out
        before(b);
        auto results = std::make_unique<wait_results>();
        const uint32_t n_threads = warp + 1;
        std::atomic<bool> returned{false};
        std::thread kernel([&] {
            RUN((shape{warp, 1, n_threads, test_seed_value}), call_wait, b.c, kind, scope, t, results.get());
            returned.store(true);
        });
        if (then) {
            const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(early_ms);
            for (int i = 0; !returned.load() && (i < 20 || std::chrono::steady_clock::now() < until); i++)
                sched_yield();
            CHECK(!returned.load(), "kind %d came back too early", kind);
            then(b);
        }
        kernel.join();
        for (uint32_t i = 0; i < n_threads; i++) CHECK_EQ(results->status[i], expected);
        if (signal && expected == UCCL_EP_OK)
            for (uint32_t i = 0; i < n_threads; i++) CHECK_EQ(results->seen[i], t);
        CHECK_EQ(b.failed(), expected == UCCL_EP_OK ? 0 : expected);
        if (expected != UCCL_EP_OK) {
            CHECK_EQ(b.error.what, signal                                         ? UCCL_EP_DEVICE_WAIT_SIGNAL
                                   : kind == SOURCE || kind == SOURCE_ALL_TICKETS ? UCCL_EP_DEVICE_QUIET_SOURCE
                                                                                  : UCCL_EP_DEVICE_QUIET);
            CHECK_EQ(b.error.channel, signal ? ~0ull : 0);
            CHECK_EQ(b.error.slot, signal ? 3 : ~0ull);
            CHECK_EQ(b.error.source, kind == SIGNAL_OF_ONE ? 70 : UCCL_EP_ANY_RANK);
            CHECK_EQ(b.claim, 1);
        }
    }
}

static void check_waits(uint32_t warp) {
    const change nothing = [](bench &) {};
    for (int kind = 0; kind < KINDS; kind++) {
        const bool source = kind == SOURCE || kind == SOURCE_ALL_TICKETS;
        const bool ticket_given = kind == QUIET || kind == SOURCE;
        const bool signal = kind == SIGNAL || kind == SIGNAL_OF_ONE;
        const ticket t = ticket_given ? 103 : signal ? 12 : 0;
        const uint64_t last = ticket_given ? 103 : 107;
        const change done = [=](bench &b) {
            if (signal) {
                __atomic_store_n(&b.words[3], 5, __ATOMIC_RELEASE);
                __atomic_store_n(&b.words[64 + 3], 7, __ATOMIC_RELEASE);
            } else {
                __atomic_store_n(source ? &b.counters[0].source : &b.counters[0].complete, last + 1, __ATOMIC_RELEASE);
            }
        };
        const change not_yet = [=](bench &b) {
            if (signal)
                b.words[3] = 5, b.words[64 + 3] = 6;
            else if (source)
                b.counters[0].complete = 200, b.counters[0].source = last; // the other counter says nothing
            else
                b.counters[0].source = 200, b.counters[0].complete = last;
        };
        wait_until(kind, warp, t, done, nullptr, UCCL_EP_OK);
        // ERR-1, ABT-1: each ends by its deadline, and by abort.
        wait_until(kind, warp, t, not_yet, nullptr, UCCL_EP_E_DEADLINE, second / 100);
        wait_until(kind, warp, t, not_yet, done, UCCL_EP_OK);
        wait_until(
            kind, warp, t, not_yet, [](bench &b) { __atomic_store_n(&b.control.aborted, 1, __ATOMIC_RELEASE); },
            UCCL_EP_E_ABORTED);
        if (kind == SIGNAL) {
            wait_until(
                kind, warp, t, not_yet, [](bench &b) { __atomic_store_n(&b.control.lost, 1, __ATOMIC_RELEASE); },
                UCCL_EP_E_PEER_LOST);
            continue;
        }
        if (kind == SIGNAL_OF_ONE) {
            // ERR-5: its loss ends it, whoever was excluded; that of others, and of its neighbours in the bitmap, does
            // not.
            wait_until(
                kind, warp, t, not_yet, [](bench &b) { __atomic_store_n(&b.gone[1], 1ull << 6, __ATOMIC_RELEASE); },
                UCCL_EP_E_PEER_LOST);
            const change others = [=](bench &b) {
                not_yet(b);
                b.control.lost = 127;
                b.gone[0] = ~0ull;
                b.gone[1] = ~(1ull << 6);
            };
            wait_until(kind, warp, t, others, nullptr, UCCL_EP_E_DEADLINE, second / 100);
            wait_until(kind, warp, t, others, done, UCCL_EP_OK);
            continue;
        }
        // ERR-2: a covered failure ends it, before and after the counter passes it; one above does not.
        wait_until(
            kind, warp, t, not_yet, [](bench &b) { __atomic_store_n(&b.counters[0].failed, 102, __ATOMIC_RELEASE); },
            UCCL_EP_E_CLOSED);
        wait_until(
            kind, warp, t,
            [&](bench &b) {
                done(b);
                b.counters[0].failed = last;
            },
            nullptr, UCCL_EP_E_CLOSED);
        wait_until(
            kind, warp, t,
            [&](bench &b) {
                done(b);
                b.counters[0].failed = last + 1;
            },
            nullptr, UCCL_EP_OK);
        // PRG-3: a closed channel ends it for what was not taken; what was taken still completes.
        wait_until(
            kind, warp, t, not_yet,
            [](bench &b) { __atomic_store_n(&b.counters[0].status, UCCL_EP_CHANNEL_CLOSED, __ATOMIC_RELEASE); },
            UCCL_EP_E_CLOSED);
        wait_until(
            kind, warp, t,
            [&](bench &b) {
                not_yet(b);
                b.counters[0].tail = 108;
                b.counters[0].status = UCCL_EP_CHANNEL_CLOSED;
            },
            done, UCCL_EP_OK);
    }
    // QUI-4, QUI-2: nothing outstanding; and every channel counts.
    const change unused = [](bench &b) { b.producers[0].head = 100; };
    wait_until(QUIET_ALL_TICKETS, warp, 0, unused, nullptr, UCCL_EP_OK);
    wait_until(EVERYTHING, warp, 0, unused, nullptr, UCCL_EP_OK);
    wait_until(
        EVERYTHING, warp, 0,
        [](bench &b) {
            b.counters[0].complete = 108;
            b.producers[1].head = 101;
        },
        [](bench &b) { __atomic_store_n(&b.counters[1].complete, 101, __ATOMIC_RELEASE); }, UCCL_EP_OK);
    // Tickets that were never given out.
    wait_until(QUIET, warp, 108, nothing, nullptr, UCCL_EP_E_RANGE);
    wait_until(QUIET, warp, 99, nothing, nullptr, UCCL_EP_E_RANGE);
    wait_until(SOURCE, warp, ~0ull - 1, nothing, nullptr, UCCL_EP_E_RANGE);
}

UCCL_EP_KERNEL void call_test(comm c, ticket t, uccl_ep_status *s) {
    *s = test(c, 0, t);
}

static void check_test() {
    struct {
        uccl_ep_u64 complete, failed, tail, state, aborted;
        ticket t;
        uccl_ep_status expected;
    } cases[] = {
        {100, ~0ull, 100, 0, 0, 100, UCCL_EP_IN_PROGRESS},
        {101, ~0ull, 100, 0, 0, 100, UCCL_EP_OK},
        {101, 100, 100, 0, 0, 100, UCCL_EP_E_CLOSED},
        {100, 100, 100, 0, 0, 103, UCCL_EP_E_CLOSED},
        {101, 101, 100, 0, 0, 100, UCCL_EP_OK},
        {100, ~0ull, 100, UCCL_EP_CHANNEL_CLOSED, 0, 100, UCCL_EP_E_CLOSED},
        {100, ~0ull, 101, UCCL_EP_CHANNEL_CLOSED, 0, 100, UCCL_EP_IN_PROGRESS},
        {100, ~0ull, 100, UCCL_EP_CHANNEL_ABORTED, 0, 100, UCCL_EP_E_ABORTED},
        {100, ~0ull, 100, 0, 1, 100, UCCL_EP_E_ABORTED},
        {100, ~0ull, 100, 0, 0, 108, UCCL_EP_E_RANGE},
        {100, ~0ull, 100, 0, 0, ~0ull, UCCL_EP_E_INVALID}, // nothing failed that it could name
    };
    for (const auto &k : cases) {
        bench b(1, 4, 100);
        b.producers[0].head = 108;
        b.counters[0].complete = k.complete;
        b.counters[0].failed = k.failed;
        b.counters[0].tail = k.tail;
        b.counters[0].status = k.state;
        b.control.aborted = k.aborted;
        uccl_ep_status s = UCCL_EP_OK;
        RUN((shape{1, 1, 1}), call_test, b.c, k.t, &s);
        CHECK_EQ(s, k.expected);
    }
}

struct signal_results {
    uccl_ep_u64 value, beyond, seen;
    uccl_ep_status waited, refused;
};

UCCL_EP_KERNEL void call_signals(comm c, uccl_ep_u64 value, signal_results *r) {
    r->value = read_signal(c, 3);
    r->waited = wait_signal(c, 3, value, &r->seen);
    r->beyond = read_signal(c, 64);
    r->refused = wait_signal(c, 64, 0);
}

// SIG-6, LIM-1: a value is the sum over the banks, and a comparison a distance.
static void check_signal_values() {
    test_rng rng = test_rng_at(77);
    for (uint64_t i = test_scaled(200); i; i--) {
        bench b(1, 2, 0, 4);
        uint64_t sum = 0;
        for (uint32_t bank = 0; bank < 4; bank++) sum += b.words[64 * bank + 3] = test_random(&rng);
        // Also just past, and just before, the place where it wraps.
        const uint64_t near_wrap = test_below(&rng, 10) - 5;
        if (i % 2) b.words[3] += near_wrap - sum, sum = near_wrap;
        // Anything up to 2^63 - 1 behind is reached, also where the difference wraps; what is ahead is not.
        const uint64_t behind = test_random(&rng) >> (1 + test_below(&rng, 63));
        signal_results r = {};
        RUN((shape{1, 1, 1}), call_signals, b.c, sum - behind, &r);
        CHECK_EQ(r.value, sum);
        CHECK_EQ(r.seen, sum);
        CHECK_EQ(r.waited, UCCL_EP_OK);
        CHECK_EQ(r.beyond, 0);
        CHECK_EQ(r.refused, UCCL_EP_E_RANGE);
        CHECK_EQ(b.failed(), UCCL_EP_E_RANGE);
        CHECK_EQ(b.error.slot, 64);
        b.c.timeout_ticks = 0;
        RUN((shape{1, 1, 1}), call_signals, b.c, sum + 1 + behind, &r);
        CHECK_EQ(r.waited, behind == ~0ull >> 1 ? UCCL_EP_OK : UCCL_EP_E_DEADLINE);
    }
}

UCCL_EP_KERNEL void call_fail_by_all(comm c, uccl_ep_status *s) {
    s[platform::block() * threads() + thread()] = wait_signal(c, 64 + platform::block() * threads() + thread(), 0);
}

// Many fail, one record, and it is all of one of them; the next one is written after the host has taken it.
static void check_first_error_wins() {
    for (uint64_t round = test_scaled(20); round; round--) {
        bench b(1, 2);
        std::vector<uccl_ep_status> s(4 * 48);
        RUN((shape{32, 4, 48, test_seed_value + round}), call_fail_by_all, b.c, s.data());
        for (const uccl_ep_status each : s) CHECK_EQ(each, UCCL_EP_E_RANGE);
        CHECK_EQ(b.failed(), UCCL_EP_E_RANGE);
        const uint64_t who = b.error.thread;
        CHECK_EQ(b.error.slot, 64 + (who >> 32) * 48 + (who & 0xffffffff));
        const uccl_ep_device_error first = b.error;
        RUN((shape{32, 4, 48}), call_fail_by_all, b.c, s.data());
        CHECK(!memcmp(&first, &b.error, sizeof first), "a later failure took the place of the first, %" PRIu64, round);
    }
}

UCCL_EP_KERNEL void call_aborted(comm c, int *yes) {
    *yes = aborted(c);
}

static void check_aborted() {
    bench b(1, 2);
    int yes = 2;
    RUN((shape{1, 1, 1}), call_aborted, b.c, &yes);
    CHECK_EQ(yes, 0);
    b.control.aborted = 1;
    RUN((shape{1, 1, 1}), call_aborted, b.c, &yes);
    CHECK_EQ(yes, 1);
}

UCCL_EP_KERNEL void be_patient(comm c, uccl_ep_u32 period, uccl_ep_u32 *n, uccl_ep_status *s) {
    detail::patience p(period);
    for (*n = 0, *s = UCCL_EP_OK; *s == UCCL_EP_OK; ++*n) *s = p.turn(c);
}

// Whatever a wait polls, it looks at the clock after so many turns, and then again: the deadline does not depend on how
// many turns it has had (LIM-1), and the longest one is none that has passed.
static void check_patience() {
    bench b(1, 2);
    for (const uccl_ep_u32 period : {uccl_ep_u32{platform::turns_host}, uccl_ep_u32{platform::turns_device},
                                     uccl_ep_u32{platform::turns_shared}}) {
        uccl_ep_u32 n = 0;
        uccl_ep_status s = UCCL_EP_OK;
        b.c.timeout_ticks = 0;
        RUN((shape{1, 1, 1}), be_patient, b.c, period, &n, &s);
        CHECK_EQ(s, UCCL_EP_E_DEADLINE);
        CHECK_EQ(n, period);
        b.c.timeout_ticks = 2000000; // ns: some looks, whose number is the machine's affair
        RUN((shape{1, 1, 1}), be_patient, b.c, period, &n, &s);
        CHECK_EQ(s, UCCL_EP_E_DEADLINE);
        CHECK_EQ(n % period, 0);
        CHECK(n > period, "%u turns", n);
        b.c.timeout_ticks = ~0ull;
        b.control.aborted = 1;
        RUN((shape{1, 1, 1}), be_patient, b.c, period, &n, &s);
        CHECK_EQ(s, UCCL_EP_E_ABORTED);
        CHECK_EQ(n, period);
        b.control.aborted = 0;
    }
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 300);
    for (const uint32_t warp : warp_widths) {
        for (const uint32_t n_threads : {1u, 7u, 32u, 33u, 100u})
            for (const uint64_t seed : {uint64_t{0}, test_seed_value}) check_scopes(warp, n_threads, seed);
        check_many(warp);
        check_waits(warp);
    }
    check_splitting();
    check_refusals();
    check_test();
    check_signal_values();
    check_first_error_wins();
    check_aborted();
    check_patience();
    return test_end();
}
