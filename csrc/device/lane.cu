/* SPDX-License-Identifier: Apache-2.0
 *
 * lane.cu: one call of the API, as the conformance suite's lane `gpu` asks for it: the suite's cases, posted from
 * kernels. Sees device.h and lane.h alone.
 *
 * What a call gives is written down by each thread that made it: all of a warp or block get the same.
 */
#include <uccl_ep/device.h>

#include "lane.h"

namespace {

namespace platform = uccl_ep::platform;

UCCL_EP_DEVICE uccl_ep_u32 warp() {
    return platform::thread() / platform::width();
}
UCCL_EP_DEVICE uccl_ep_u32 warps() {
    return (platform::threads() + platform::width() - 1) / platform::width();
}

UCCL_EP_DEVICE lane_result posted(uccl_ep::ticket t) {
    return lane_result{1, t == UCCL_EP_NO_TICKET ? (uccl_ep_u64)UCCL_EP_E_INVALID : 0, t, 0};
}
UCCL_EP_DEVICE lane_result waited(uccl_ep::status s, uccl_ep_u64 seen) {
    return lane_result{1, (uccl_ep_u64)(long long)s, UCCL_EP_NO_TICKET, seen};
}

/* All lanes of a warp; more commands than it has lanes take several turns, which are not posted together. */
UCCL_EP_DEVICE uccl_ep::ticket post_batch(const uccl_ep::comm &c, const lane_job &job) {
    const uccl_ep_u64 all = platform::present();
    const uccl_ep_u32 lanes = platform::count_bits(all);
    uccl_ep::ticket last = UCCL_EP_NO_TICKET;
    for (uccl_ep_u64 at = 0; at < job.count; at += lanes) {
        const uccl_ep_u64 left = job.count - at;
        const uccl_ep_u32 n = left < lanes ? (uccl_ep_u32)left : lanes;
        const bool active = platform::lane() < n;
        const uccl_ep_u64 index = at + (active ? platform::lane() : 0);
        uccl_ep::ticket t;
        if (job.op == LANE_COMMANDS) {
            const uccl_ep_command command = ((const uccl_ep_command *)job.commands)[index];
            t = uccl_ep::post_many_warp(c, job.channel, command, active);
        } else {
            const uccl_ep_words words = ((const uccl_ep_words *)job.commands)[index];
            t = uccl_ep::post_many_warp(c, job.channel, words, active);
        }
        last = platform::shuffle(all, t, n - 1);
        if (last == UCCL_EP_NO_TICKET) break;
    }
    return last;
}

UCCL_EP_DEVICE lane_result by_thread(const uccl_ep::comm &c, const lane_job &job) {
    using namespace uccl_ep;
    uccl_ep_u64 seen = 0;
    switch (job.op) {
    case LANE_PUT:
        return posted(put(c, job.channel, job.target, job.local, job.remote, job.bytes));
    case LANE_SIGNAL:
        return posted(signal(c, job.channel, job.target, job.slot, job.add));
    case LANE_PUT_SIGNAL:
        return posted(put_signal(c, job.channel, job.target, job.local, job.remote, job.bytes, job.slot, job.add));
    case LANE_WORDS: {
        ticket last = UCCL_EP_NO_TICKET;
        for (uccl_ep_u64 i = 0; i < job.count; i++) {
            last = post(c, job.channel, ((const uccl_ep_words *)job.commands)[i]);
            if (last == UCCL_EP_NO_TICKET) break;
        }
        return posted(last);
    }
    case LANE_QUIET:
        if (job.channel == ~0u) return waited(quiet_all(c), 0);
        if (job.ticket == UCCL_EP_NO_TICKET) return waited(quiet(c, job.channel), 0);
        return waited(quiet(c, job.channel, job.ticket), 0);
    case LANE_QUIET_SOURCE:
        if (job.ticket == UCCL_EP_NO_TICKET) return waited(quiet_source(c, job.channel), 0);
        return waited(quiet_source(c, job.channel, job.ticket), 0);
    case LANE_TEST:
        return waited(test(c, job.channel, job.ticket), 0);
    case LANE_WAIT_SIGNAL: {
        const status result = wait_signal(c, job.slot, job.value, &seen, job.target);
        return waited(result, seen);
    }
    case LANE_READ_SIGNAL:
        return waited(UCCL_EP_OK, read_signal(c, job.slot));
    default:
        return lane_result{1, 0, 0, 0};
    }
}

UCCL_EP_DEVICE lane_result by_warp(const uccl_ep::comm &c, const lane_job &job) {
    using namespace uccl_ep;
    uccl_ep_u64 seen = 0;
    switch (job.op) {
    case LANE_PUT:
        return posted(put_warp(c, job.channel, job.target, job.local, job.remote, job.bytes));
    case LANE_SIGNAL:
        return posted(signal_warp(c, job.channel, job.target, job.slot, job.add));
    case LANE_PUT_SIGNAL:
        return posted(put_signal_warp(c, job.channel, job.target, job.local, job.remote, job.bytes, job.slot, job.add));
    case LANE_COMMANDS:
    case LANE_WORDS:
        return posted(post_batch(c, job));
    case LANE_QUIET:
        if (job.channel == ~0u) return waited(quiet_all_warp(c), 0);
        if (job.ticket == UCCL_EP_NO_TICKET) return waited(quiet_warp(c, job.channel), 0);
        return waited(quiet_warp(c, job.channel, job.ticket), 0);
    case LANE_QUIET_SOURCE:
        if (job.ticket == UCCL_EP_NO_TICKET) return waited(quiet_source_warp(c, job.channel), 0);
        return waited(quiet_source_warp(c, job.channel, job.ticket), 0);
    case LANE_WAIT_SIGNAL: {
        const status result = wait_signal_warp(c, job.slot, job.value, &seen, job.target);
        return waited(result, seen);
    }
    default:
        return lane_result{0, 0, 0, 0};
    }
}

UCCL_EP_DEVICE lane_result by_block(const uccl_ep::comm &c, const lane_job &job) {
    using namespace uccl_ep;
    uccl_ep_u64 seen = 0;
    switch (job.op) {
    case LANE_PUT:
        return posted(put_block(c, job.channel, job.target, job.local, job.remote, job.bytes));
    case LANE_SIGNAL:
        return posted(signal_block(c, job.channel, job.target, job.slot, job.add));
    case LANE_PUT_SIGNAL:
        return posted(
            put_signal_block(c, job.channel, job.target, job.local, job.remote, job.bytes, job.slot, job.add));
    case LANE_QUIET:
        if (job.channel == ~0u) return waited(quiet_all_block(c), 0);
        if (job.ticket == UCCL_EP_NO_TICKET) return waited(quiet_block(c, job.channel), 0);
        return waited(quiet_block(c, job.channel, job.ticket), 0);
    case LANE_QUIET_SOURCE:
        if (job.ticket == UCCL_EP_NO_TICKET) return waited(quiet_source_block(c, job.channel), 0);
        return waited(quiet_source_block(c, job.channel, job.ticket), 0);
    case LANE_WAIT_SIGNAL: {
        const status result = wait_signal_block(c, job.slot, job.value, &seen, job.target);
        return waited(result, seen);
    }
    default:
        return lane_result{0, 0, 0, 0};
    }
}

/* Warp 0 posts; thread `caller` of another warp hands in, and asks for the ticket. */
UCCL_EP_DEVICE lane_result by_poster(const uccl_ep::comm &c, const lane_job &job) {
    UCCL_EP_SHARED uccl_ep::poster p;
    p.init(job.channel, warps() - 1);
    lane_result mine = {0, 0, UCCL_EP_NO_TICKET, 0};
    if (warp() == 0) {
        p.run(c);
        return mine;
    }
    if (platform::thread() == job.caller) {
        uccl_ep::status s = UCCL_EP_E_INVALID;
        if (job.op == LANE_PUT) {
            s = p.put(c, job.target, job.local, job.remote, job.bytes, &mine.ticket);
        } else if (job.op == LANE_SIGNAL) {
            s = p.signal(c, job.target, job.slot, job.add, &mine.ticket);
        } else if (job.op == LANE_PUT_SIGNAL) {
            s = p.put_signal(c, job.target, job.local, job.remote, job.bytes, job.slot, job.add, &mine.ticket);
        }
        mine.called = 1;
        mine.status = (uccl_ep_u64)(long long)s;
    }
    platform::sync_warp(platform::present());
    if (platform::lane() == 0) p.close();
    return mine;
}

} // namespace

UCCL_EP_KERNEL void lane_call(uccl_ep::comm c, lane_job job) {
    lane_result mine = {0, 0, 0, 0};
    if (job.scope == LANE_THREAD) {
        if (platform::thread() == job.caller) mine = by_thread(c, job);
    } else if (job.scope == LANE_WARP) {
        if (warp() == job.caller) mine = by_warp(c, job);
    } else if (job.scope == LANE_BLOCK) {
        mine = by_block(c, job);
    } else {
        mine = by_poster(c, job);
    }
    job.results[platform::thread()] = mine;
}
