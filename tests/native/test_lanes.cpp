// SPDX-License-Identifier: Apache-2.0
//
// test_lanes.cpp: lanes part and meet as on hardware, blocks run together, and what cannot go on is reported.
#include "device_bench.h"

using namespace uccl_ep::platform;

// -------------------------------------------------------------------------------------------------------- who is where

struct identity {
    uccl_ep_u32 lane, width, thread, threads, block, blocks;
    uccl_ep_u64 present;
};

UCCL_EP_KERNEL void identify(identity *all) {
    all[block() * threads() + thread()] = {lane(), width(), thread(), threads(), block(), blocks(), present()};
}

static void check_identity() {
    for (const uint32_t warp : warp_widths) {
        for (const uint32_t n : {1u, 31u, 32u, 70u, static_cast<uint32_t>(test_scaled(1024))}) {
            std::vector<identity> all(3 * n);
            RUN((shape{warp, 3, n}), identify, all.data());
            for (uint32_t i = 0; i < 3 * n; i++) {
                const uint32_t t = i % n, left = n - t / warp * warp;
                CHECK(all[i].thread == t && all[i].lane == t % warp && all[i].width == warp, "%u", i);
                CHECK(all[i].threads == n && all[i].block == i / n && all[i].blocks == 3, "%u", i);
                CHECK_EQ(all[i].present, left >= warp ? ~0ull >> (64 - warp) : (1ull << left) - 1);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------- meeting and
// parting

// Lanes go through a tree of branches; on every branch they vote, exchange and order memory with those who took it.
UCCL_EP_KERNEL void branch(uccl_ep_u64 *bad) {
    UCCL_EP_SHARED uccl_ep_u64 written[1024];
    const uccl_ep_u64 own = 1ull << lane();
    for (uccl_ep_u32 modulus = 2; modulus < 7; modulus++) {
        const uccl_ep_u32 way = lane() % modulus;
        uccl_ep_u64 mask = 0;
        for (uccl_ep_u32 i = 0; i < width(); i++)
            if (present() >> i & 1 && i % modulus == way) mask |= 1ull << i;
        // Ways of different lengths: whoever is early waits.
        for (uccl_ep_u32 turn = 0; turn <= way; turn++) {
            const uccl_ep_u64 votes = ballot(mask, (lane() / modulus + turn) % 2);
            for (uccl_ep_u32 i = 0; i < width(); i++)
                if (mask >> i & 1 && (votes >> i & 1) != (i / modulus + turn) % 2) add_device(bad, 1);
            if (votes & ~mask) add_device(bad, 1);
            written[thread()] = turn * 100 + lane();
            sync_warp(mask);
            const uccl_ep_u32 next = (lane() + modulus) % width();
            const uccl_ep_u32 from = mask >> next & 1 ? next : lane();
            if (written[thread() - lane() + from] != turn * 100 + from) add_device(bad, 1);
            if (shuffle(mask, turn * 1000 + lane(), from) != turn * 1000 + from) add_device(bad, 1);
            sync_warp(mask);
        }
        if (!(present() & own)) add_device(bad, 1);
        sync_warp(present()); // all are together again
    }
}

// Who is in active() goes on together: each lane of the mask has the same one, on the branch that it took.
UCCL_EP_KERNEL void gather(uccl_ep_u64 *bad, uccl_ep_u64 *whole) {
    UCCL_EP_SHARED uccl_ep_u64 masks[1024];
    const bool left = lane() % 3 == 0;
    uccl_ep_u64 mask = 0; // two calls that no compiler makes one of
    if (left) {
        mask = active();
        __asm__ volatile("nop" : "+r"(mask));
    } else {
        mask = active();
        __asm__ volatile("nop\nnop" : "+r"(mask));
    }
    masks[thread()] = mask;
    sync_warp(present());
    for (uccl_ep_u32 i = 0; i < width(); i++) {
        if (!(mask >> i & 1)) continue;
        if (masks[thread() - lane() + i] != mask) add_device(bad, 1);
        if ((i % 3 == 0) != left) add_device(bad, 1);
    }
    if (!(mask >> lane() & 1)) add_device(bad, 1);
    const uccl_ep_u64 side = ballot(present(), left);
    if (mask == (left ? side : present() & ~side)) add_device(whole, 1);
}

static void check_branches() {
    for (const uint32_t warp : warp_widths) {
        for (const uint32_t n : {1u, 5u, 64u, 90u}) {
            uint64_t split = 0;
            for (uint64_t seed = 0; seed < 8; seed++) {
                uccl_ep_u64 bad = 0, whole = 0;
                const shape s = {warp, 2, n, seed ? test_seed_value + seed : 0};
                RUN(s, branch, &bad);
                RUN(s, gather, &bad, &whole);
                CHECK_EQ(bad, 0);
                if (!seed) CHECK_EQ(whole, 2 * n); // in order, all of a branch are together
                split += whole != 2 * n;
            }
            if (warp > 1 && n == 64) CHECK(split, "no seed split lanes at active()");
        }
    }
}

// A lane that waits for a mate's store, while mates wait for it in turn, needs them to take turns.
UCCL_EP_KERNEL void relay(uccl_ep_u64 *baton, uccl_ep_u64 rounds) {
    for (uccl_ep_u64 i = 0; i < rounds; i++) {
        while (load_acquire_device(baton) % threads() != thread()) relax();
        store_release_device(baton, load_acquire_device(baton) + 1);
    }
}

UCCL_EP_KERNEL void barriers(uccl_ep_u64 *bad, uccl_ep_u64 *sum) {
    UCCL_EP_SHARED uccl_ep_u64 fixed[1024];
    uccl_ep_u64 *asked = static_cast<uccl_ep_u64 *>(dynamic_shared());
    for (uccl_ep_u64 round = 0; round < 5; round++) {
        fixed[thread()] = round + thread() + block();
        asked[thread()] = round * thread();
        sync_block();
        const uccl_ep_u32 other = (thread() * 7 + 3) % threads();
        if (fixed[other] != round + other + block() || asked[other] != round * other) add_device(bad, 1);
        sync_block();
    }
    // Those that have returned are not waited for.
    if (thread() % 3 == 1) return;
    sync_block();
    add_device(sum, 1);
}

// All blocks at once: each waits for all.
UCCL_EP_KERNEL void grid_barrier(uccl_ep_u64 *count, uccl_ep_u64 *bad) {
    for (uccl_ep_u64 round = 1; round <= 3; round++) {
        sync_block();
        if (thread() == 0) {
            fence_system();
            add_device(count, 1);
            while (load_acquire_device(count) < round * blocks()) relax();
        }
        sync_block();
        if (load_device(count) < round * blocks()) add_device(bad, 1);
    }
}

static void check_together() {
    for (const uint32_t warp : warp_widths) {
        uccl_ep_u64 baton = 0, bad = 0, sum = 0;
        RUN((shape{warp, 1, 65}), relay, &baton, uccl_ep_u64{3});
        CHECK_EQ(baton, 3 * 65);
        const shape s = {warp, 3, 100, test_seed_value, 100 * sizeof(uccl_ep_u64)};
        RUN(s, barriers, &bad, &sum);
        CHECK_EQ(bad, 0);
        CHECK_EQ(sum, 3 * 67);
        uccl_ep_u64 count = 0;
        shape all = {warp, static_cast<uint32_t>(test_scaled(200)), 2};
        all.cooperative = 1;
        RUN(all, grid_barrier, &count, &bad);
        CHECK_EQ(bad, 0);
    }
}

// --------------------------------------------------------------------------------------------------------- what is
// found

enum mistake { APART, MASKS_DIFFER, MATE_GONE, FROM_NOBODY, NOT_IN_MASK, UNFENCED, FENCED_TOO_EARLY, DEEP, MISTAKES };

__attribute__((noinline)) static int overrun() {
    volatile char big[270000];
    for (size_t i = 0; i < sizeof big; i += 8) big[i] = 1;
    return big[1000];
}

UCCL_EP_KERNEL void err(int what, uccl_ep_slot *slot, int *ignored) {
    const uccl_ep_u64 all = present();
    if (what == APART) {
        if (lane() < 4)
            sync_block();
        else
            sync_warp(all);
    } else if (what == MASKS_DIFFER) {
        ballot(lane() < 4 ? all : all & ~1ull, true);
    } else if (what == MATE_GONE) {
        if (lane() == 0) return;
        sync_warp(all);                    // fine: who has returned is not waited for
        (void)shuffle(all, 1, lane() % 2); // lanes 2, 4, ... read from lane 0
    } else if (what == FROM_NOBODY) {
        (void)shuffle(all, 1, 100);
    } else if (what == NOT_IN_MASK) {
        sync_warp(all & ~(1ull << lane()));
    } else if (what == UNFENCED) {
        store_command(slot, 0, 0);
    } else if (what == FENCED_TOO_EARLY) {
        fence_system();
        sync_warp(all); // what mates did is now known, and not fenced
        store_command(slot, 0, 0);
    } else if (thread() == 1) {
        *ignored = overrun();
    }
}

static void check_mistakes() {
    const char *const expected[MISTAKES] = {
        "lanes that can never meet: warp 0: lanes 0-3: sync_block",
        "lanes that can never meet: warp 0: lanes 0-3: ballot(mask 0x",
        "shuffles from a lane that takes no part",
        "shuffles from a lane that takes no part",
        "is not in the mask that it waits with",
        "stores a command without a fence",
        "stores a command without a fence",
        "thread 1 (lane 1) ran over its stack",
    };
    for (const uint32_t warp : {32u, 64u}) {
        for (int what = 0; what < MISTAKES; what++) {
            uccl_ep_slot slot = {};
            int ignored = 0;
            // The other blocks end, too.
            const uccl_ep_status status = run<err>({warp, 3, warp}, what, &slot, &ignored);
            CHECK_EQ(status, UCCL_EP_E_INVALID);
            CHECK(strstr(launch_text, expected[what]), "%d: %s", what, launch_text);
        }
    }
    CHECK_EQ(run<err>({32, 1, 32}, int{APART}, static_cast<uccl_ep_slot *>(nullptr), static_cast<int *>(nullptr)),
             UCCL_EP_E_INVALID);
    CHECK(strstr(launch_text, "lanes 4-31: sync_warp(mask 0xffffffff) at err+0x"), "who waits where: %s", launch_text);
}

UCCL_EP_KERNEL void one_block_fails(uccl_ep_u64 *flag) {
    if (block() == 1) sync_warp(0);
    while (!load_acquire_device(flag)) relax();
}

UCCL_EP_KERNEL void nothing(int) {}

static void check_launches() {
    uccl_ep_u64 flag = 0;
    CHECK_EQ((run<one_block_fails>({1, 4, 3}, &flag)), UCCL_EP_E_INVALID); // it ends those that wait for nothing
    struct {
        shape s;
        uccl_ep_status status;
        const char *text;
    } cases[] = {{{16, 1, 1}, UCCL_EP_E_INVALID, "warps of 16 lanes"},
                 {{0, 1, 1}, UCCL_EP_E_INVALID, "warps of 0"},
                 {{32, 0, 1}, UCCL_EP_E_INVALID, "a grid of 0"},
                 {{32, 1, 0}, UCCL_EP_E_INVALID, "a block of 0"},
                 {{32, 1, 1025}, UCCL_EP_E_INVALID, "a block of 1025"},
                 {{32, 1, 1, 0, 2u << 20}, UCCL_EP_E_INVALID, "shared memory"},
                 {{32, 513, 1, 0, 0, 1}, UCCL_EP_E_UNSUPPORTED, "cooperative launch of 513"},
                 {{32, 600, 1}, UCCL_EP_OK, ""}};
    for (const auto &k : cases) {
        CHECK_EQ(run<nothing>(k.s, 0), k.status);
        CHECK(strstr(launch_text, k.text), "%s", launch_text);
    }
    CHECK_EQ(uccl_ep_emulation_launch(nullptr, nullptr, 0), UCCL_EP_E_INVALID);
    uccl_ep_emulation_launch_params launch = {};
    CHECK_EQ(uccl_ep_emulation_launch(&launch, launch_text, 10), UCCL_EP_E_INVALID);
    CHECK_EQ(strlen(launch_text), 9);
    launch.size = offsetof(uccl_ep_emulation_launch_params, seed); // the first version
    launch.warp_size = 1;
    for (int i = 0; i < 3; i++) launch.grid[i] = launch.block[i] = 1;
    CHECK_EQ(uccl_ep_emulation_launch(&launch, launch_text, sizeof launch_text), UCCL_EP_E_INVALID);
    CHECK(strstr(launch_text, "no kernel"), "%s", launch_text);
}

// Launches of several threads do not know of each other.
static void check_launches_together() {
    std::vector<std::thread> launchers;
    for (uint32_t i = 0; i < 6; i++)
        launchers.emplace_back([i] {
            uccl_ep_u64 baton = 0;
            void *args[] = {nullptr, nullptr};
            uccl_ep_u64 *address = &baton, rounds = 4;
            args[0] = &address;
            args[1] = &rounds;
            uccl_ep_emulation_launch_params launch = {};
            launch.size = sizeof launch;
            launch.warp_size = warp_widths[i % 3];
            launch.grid[0] = launch.grid[1] = launch.grid[2] = 1;
            launch.block[0] = 3;
            launch.block[1] = 5;
            launch.block[2] = 2;
            launch.kernel = entry<decltype(&relay), &relay>::call;
            launch.args = args;
            char text[256];
            CHECK(uccl_ep_emulation_launch(&launch, text, sizeof text) == UCCL_EP_OK, "%s", text);
            CHECK_EQ(baton, 4 * 30);
        });
    for (std::thread &t : launchers) t.join();
}

UCCL_EP_KERNEL void arguments(const int a, uccl_ep_u64 b, identity c, uccl_ep_u64 *sum) {
    *sum = static_cast<uccl_ep_u64>(a) + b + c.present;
}
UCCL_EP_EMULATION_ENTRY(arguments)

static void check_entry() {
    const unsigned *sizes = uccl_ep_sizes_arguments();
    const unsigned expected[] = {sizeof(int), 8, sizeof(identity), 8, 0};
    CHECK(!memcmp(sizes, expected, sizeof expected), "%u", sizes[0]);
    uccl_ep_u64 sum = 0;
    identity c = {};
    c.present = 7;
    RUN((shape{1, 1, 1}), arguments, 5, 1ull << 40, c, &sum);
    CHECK_EQ(sum, 12 + (1ull << 40));
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 300);
    check_identity();
    check_branches();
    check_together();
    check_mistakes();
    check_launches();
    check_launches_together();
    check_entry();
    return test_end();
}
