/* SPDX-License-Identifier: Apache-2.0
 *
 * device_bench.h: kernels on the CPU against rings, counters and signal words of the test's own. C++.
 *
 *   bench b(2, 4);                                  // 2 channels of 16 slots
 *   proxy p(b, on_command);                         // a thread that takes commands, until it goes out of scope
 *   CHECK_EQ(run<kernel>({.warp = 32, .blocks = 2, .threads = 64}, b.c, 5), UCCL_EP_OK);
 */
#ifndef UCCL_EP_DEVICE_BENCH_H
#define UCCL_EP_DEVICE_BENCH_H

#include "testing.h"

#include <atomic>
#include <functional>
#include <memory>
#include <sched.h>
#include <thread>
#include <vector>

#include <uccl_ep/device.h>

static const uccl_ep_u64 second = 1000000000ull;

/* Of every wait of a kernel, unless its test sets its own: nothing that works comes near it. */
static uccl_ep_u64 bench_timeout = 120 * second;

/* What uccl_ep_comm_device would fill. */
struct bench {
    uccl_ep_device_comm c = {};
    std::vector<uccl_ep_ring> rings;
    std::vector<std::vector<uccl_ep_slot>> slots;
    std::vector<uccl_ep_ring_producer> producers;
    std::vector<uccl_ep_u64> gave_up;
    std::vector<uccl_ep_ring_counters> counters;
    std::vector<uccl_ep_u64> words; /* of signals */
    uccl_ep_device_control control = {};
    std::vector<uccl_ep_u64> gone = std::vector<uccl_ep_u64>(64);
    uccl_ep_device_error error = {};
    uccl_ep_u32 claim = 0;

    explicit bench(uccl_ep_u32 channels, uccl_ep_u32 log2_slots, uccl_ep_u64 first_ticket = 0, uccl_ep_u32 banks = 1)
        : rings(channels), slots(channels), producers(channels), gave_up(channels), counters(channels),
          words(64ull * banks) {
        for (uccl_ep_u32 i = 0; i < channels; i++) {
            slots[i].resize(1ull << log2_slots);
            uccl_ep_ring_format(slots[i].data(), log2_slots, first_ticket);
            producers[i].head = producers[i].tail_cache = first_ticket;
            counters[i].tail = counters[i].source = counters[i].complete = first_ticket;
            counters[i].failed = UCCL_EP_NO_TICKET;
            uccl_ep_ring &r = rings[i];
            r.codec_version = UCCL_EP_CODEC_VERSION;
            r.log2_slots = log2_slots;
            r.granularity = UCCL_EP_GRANULARITY_COARSE;
            r.channel = i;
            r.first_ticket = first_ticket;
            r.slots = slots[i].data();
            r.producer = &producers[i];
            r.gave_up = &gave_up[i];
            r.counters = &counters[i];
        }
        c.version = UCCL_EP_DEVICE_VERSION;
        c.size = 4096;
        c.channels = channels;
        c.signals = 64;
        c.signal_banks = banks;
        c.granularity = UCCL_EP_GRANULARITY_COARSE;
        c.heap_bytes = 1ull << 36;
        c.signal_words = words.data();
        c.rings = rings.data();
        c.control = &control;
        c.gone = gone.data();
        c.error = &error;
        c.error_claim = &claim;
        c.timeout_ticks = bench_timeout;
    }
    bench(const bench &) = delete;
    bench &operator=(const bench &) = delete;

    uccl_ep_status failed() const { return static_cast<uccl_ep_status>(static_cast<int64_t>(error.status)); }

    /* The command at `ticket`, which must be there and whole. */
    uccl_ep_command at(uccl_ep_u32 channel, uccl_ep_u64 ticket) const {
        uccl_ep_words taken;
        CHECK(uccl_ep_ring_take(slots[channel].data(), rings[channel].log2_slots, ticket, &taken),
              "nothing at ticket %" PRIu64, ticket);
        uccl_ep_command command;
        CHECK_EQ(uccl_ep_decode(taken.word[0], taken.word[1], &command), UCCL_EP_OK);
        return command;
    }

    /* A proxy's publication: all below `ticket` is taken, free at its source, complete. */
    void publish(uccl_ep_u32 channel, uccl_ep_u64 ticket) {
        __atomic_store_n(&counters[channel].tail, ticket, __ATOMIC_RELEASE);
        __atomic_store_n(&counters[channel].source, ticket, __ATOMIC_RELEASE);
        __atomic_store_n(&counters[channel].complete, ticket, __ATOMIC_RELEASE);
    }
};

/* A thread that takes the commands of all channels, as a proxy does: a bounded drain, then the counters. */
class proxy {
  public:
    typedef std::function<void(uccl_ep_u32 channel, uccl_ep_u64 ticket, const uccl_ep_command &command)> handler;
    proxy(bench &for_bench, handler on) : b(for_bench), on_command(std::move(on)), thread([this] { main(); }) {}
    ~proxy() { stop(); }
    /* All that was posted has been taken when it returns. */
    void stop() {
        if (!thread.joinable()) return;
        over.store(true);
        thread.join();
    }

  private:
    void main() {
        std::vector<uccl_ep_u64> next;
        for (const uccl_ep_ring &r : b.rings) next.push_back(r.first_ticket);
        for (bool last = false;;) {
            bool any = false;
            for (uccl_ep_u32 i = 0; i < b.c.channels; i++) {
                uccl_ep_u32 n = 0;
                for (uccl_ep_words taken; n < 64; n++) {
                    if (!uccl_ep_ring_take(b.slots[i].data(), b.rings[i].log2_slots, next[i], &taken)) break;
                    uccl_ep_command command;
                    CHECK_EQ(uccl_ep_decode(taken.word[0], taken.word[1], &command), UCCL_EP_OK);
                    on_command(i, next[i]++, command);
                }
                if (n) b.publish(i, next[i]);
                any |= n != 0;
            }
            if (any) continue;
            if (last) return;
            last = over.load();
            sched_yield();
        }
    }
    bench &b;
    handler on_command;
    std::atomic<bool> over{false};
    std::thread thread;
};

struct shape {
    uint32_t warp, blocks, threads;
    uint64_t seed = 0;
    uint64_t shared = 0;
    uint32_t cooperative = 0;
};

static char launch_text[4096];

template <auto kernel, typename... Argument> static uccl_ep_status run(const shape &s, Argument... argument) {
    void *args[] = {static_cast<void *>(&argument)..., nullptr};
    uccl_ep_emulation_launch_params launch = {};
    launch.size = sizeof launch;
    launch.warp_size = s.warp;
    launch.grid[0] = s.blocks;
    launch.block[0] = s.threads;
    launch.grid[1] = launch.grid[2] = launch.block[1] = launch.block[2] = 1;
    launch.shared_bytes = s.shared;
    launch.cooperative = s.cooperative;
    launch.kernel = uccl_ep::platform::entry<decltype(kernel), kernel>::call;
    launch.args = args;
    launch.seed = s.seed;
    return uccl_ep_emulation_launch(&launch, launch_text, sizeof launch_text);
}

/* A launch that must succeed; its text says why it did not. */
#define RUN(shape, kernel, ...)                                                                                        \
    do {                                                                                                               \
        const uccl_ep_status status_ = run<kernel>(shape, __VA_ARGS__);                                                \
        CHECK(status_ == UCCL_EP_OK, "%d: %s", status_, launch_text);                                                  \
    } while (0)

static const uint32_t warp_widths[] = {1, 32, 64};

#endif
