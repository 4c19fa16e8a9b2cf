/* SPDX-License-Identifier: Apache-2.0
 *
 * demo.cu: dispatch, or combine, of one rank of the demo, as one kernel: posts the rows, then what announces them, and
 * waits for what comes from the others. Sees device.h and demo.h alone.
 */
#include <uccl_ep/device.h>

#include "demo.h"

namespace {

namespace platform = uccl_ep::platform;

/* All warps of the block, which are whole ones. False: a post failed, and the communicator's record says why. */
UCCL_EP_DEVICE bool post(const uccl_ep::comm &c, const demo_job &job, uccl_ep_u64 begin, uccl_ep_u64 end) {
    const uccl_ep_u64 warp = platform::thread() / platform::width(), warps = platform::threads() / platform::width();
    const uccl_ep_u32 lane = platform::lane();
    for (uccl_ep_u64 at = begin + warp * job.together; at < end; at += warps * job.together) {
        const bool active = lane < job.together && at + lane < end;
        const uccl_ep_command command = job.commands[active ? at + lane : at];
        const uccl_ep::ticket t = uccl_ep::post_many_warp(c, platform::block(), command, active);
        if (platform::ballot(platform::present(), active && t == UCCL_EP_NO_TICKET)) return false;
    }
    return true;
}

} // namespace

UCCL_EP_KERNEL void demo_exchange(uccl_ep::comm c, demo_job job) {
    const demo_batch batch = job.batches[platform::block()];
    demo_times *const times = &job.times[platform::block()];
    const bool first = platform::thread() == 0;
    if (first) times->begin = platform::clock();
    bool ok = post(c, job, batch.begin, batch.rows_end);
    platform::sync_block(); /* a smaller ticket is earlier: what announces rows comes behind them (SIG-2) */
    if (ok) ok = post(c, job, batch.rows_end, batch.end);
    platform::sync_block();
    if (first) times->posted = platform::clock();
    const uccl_ep_u64 threads = (uccl_ep_u64)platform::blocks() * platform::threads();
    for (uccl_ep_u64 i = (uccl_ep_u64)platform::block() * platform::threads() + platform::thread(); i < job.n_waits;
         i += threads) {
        const demo_wait wait = job.waits[i];
        if (uccl_ep::wait_signal(c, wait.slot, wait.value, &job.seen[i], wait.source) != UCCL_EP_OK) break;
    }
    platform::sync_block();
    if (first) times->end = platform::clock();
}
