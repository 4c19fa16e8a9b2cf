/* SPDX-License-Identifier: Apache-2.0
 *
 * perf.cu: the kernels of `uccl-ep perf gpu`. Sees device.h and perf.h alone.
 *
 * A producer is a warp. Before each command it writes PERF_PAYLOAD bytes to device memory, all its lanes together, and
 * then the command is posted in the order that the contract asks for (PUB-1): what is measured is what a kernel that
 * sends data does. A kernel ends early when a post or a wait fails; comm.error says why.
 */
#include <uccl_ep/device.h>

#include "perf.h"

namespace {

namespace platform = uccl_ep::platform;

/* One producer's place, and what it posts. */
struct producer {
    const perf_job &job;
    uccl_ep_u32 index, ring, of_ring; /* of all, and of its ring */

    UCCL_EP_DEVICE uccl_ep_u64 place(uccl_ep_u64 k) const {
        return ((uccl_ep_u64)index * job.batch + k) * PERF_PAYLOAD;
    }

    /* The payload of commands `first` to `first` + count - 1; then every lane's is every other's to publish. */
    UCCL_EP_DEVICE void write(uccl_ep_u64 first, uccl_ep_u32 count) const {
        uccl_ep_u64 *const payload = job.payload + place(0) / sizeof(uccl_ep_u64);
        const uccl_ep_u32 words = count * (PERF_PAYLOAD / (uccl_ep_u32)sizeof(uccl_ep_u64));
        for (uccl_ep_u32 i = platform::lane(); i < words; i += platform::width()) payload[i] = first + i;
        platform::sync_warp(platform::present());
    }

    UCCL_EP_DEVICE uccl_ep_words command(uccl_ep_u64 sequence, uccl_ep_u32 k) const {
        if (job.stamped) return perf_stamp(ring, of_ring, sequence + k);
        return perf_put(job.heap_offset + place(k));
    }
};

UCCL_EP_DEVICE uccl_ep_u32 warp() {
    return platform::thread() / platform::width();
}
UCCL_EP_DEVICE uccl_ep_u32 warps() {
    return (platform::threads() + platform::width() - 1) / platform::width();
}

UCCL_EP_DEVICE producer producer_at(const perf_job &job, uccl_ep_u32 index) {
    return producer{job, index, index % job.rings, index / job.rings};
}
UCCL_EP_DEVICE producer producer_here(const perf_job &job) {
    return producer_at(job, platform::block() * warps() + warp());
}

/* Of a communicator whose proxies run, all is complete when the kernel ends. A drain is asked by the host. */
UCCL_EP_DEVICE void finish(const uccl_ep::comm &c, const perf_job &job, uccl_ep_u32 ring) {
    if (!job.stamped) uccl_ep::quiet_warp(c, ring);
}

/* Until `word` counts `value`. */
UCCL_EP_DEVICE uccl_ep::status await(const uccl_ep::comm &c, const uccl_ep_u64 *word, uccl_ep_u64 value) {
    const uccl_ep_u64 begin = platform::clock();
    for (uccl_ep_u32 turn = 1; platform::load_acquire_system(word) < value; turn++) {
        platform::relax();
        if (turn % 64 == 0 && platform::clock() - begin > c.timeout_ticks) return UCCL_EP_E_DEADLINE;
    }
    return UCCL_EP_OK;
}

/* Repeats an operation of one warp, which lane 0 ends, and times each. */
template <typename Operation> UCCL_EP_DEVICE void repeat(const perf_job &job, Operation operation) {
    perf_result *const result = (perf_result *)job.result;
    uccl_ep_u64 *const samples = (uccl_ep_u64 *)(result + 1);
    const uccl_ep_u64 clock = platform::clock(), cycles = platform::cycles();
    uccl_ep_u64 n = 0, status = UCCL_EP_OK;
    for (; n < job.commands; n++) {
        const uccl_ep_u64 begin = platform::cycles();
        status = (uccl_ep_u64)operation(n);
        if (platform::lane() == 0) samples[n] = platform::cycles() - begin;
        if (platform::ballot(platform::present(), status != UCCL_EP_OK)) break;
    }
    if (platform::lane() != 0) return;
    result->cycles = platform::cycles() - cycles;
    result->clock = platform::clock() - clock;
    result->samples = n;
    result->status = status;
}

} // namespace

/* ----------------------------------------------------------------------------------------------------------- rates */

/* Each command by itself. */
UCCL_EP_KERNEL void perf_single(uccl_ep::comm c, perf_job job) {
    const producer p = producer_here(job);
    for (uccl_ep_u64 i = 0; i < job.commands; i++) {
        p.write(i, 1);
        uccl_ep::ticket posted = 0;
        if (platform::lane() == 0) posted = uccl_ep::post(c, p.ring, p.command(job.sequence + i, 0));
        if (platform::ballot(platform::present(), posted == UCCL_EP_NO_TICKET)) return;
    }
    finish(c, job, p.ring);
}

/* `batch` commands behind one reservation, a lane each; a warp with fewer lanes takes several turns. */
UCCL_EP_KERNEL void perf_batch(uccl_ep::comm c, perf_job job) {
    const producer p = producer_here(job);
    for (uccl_ep_u64 i = 0; i < job.commands; i += job.batch) {
        p.write(i, job.batch);
        for (uccl_ep_u32 at = 0; at < job.batch; at += platform::width()) {
            const uccl_ep_u32 k = at + platform::lane();
            const bool active = k < job.batch;
            const uccl_ep::ticket posted =
                uccl_ep::post_many_warp(c, p.ring, p.command(job.sequence + i, active ? k : 0), active);
            if (platform::ballot(platform::present(), active && posted == UCCL_EP_NO_TICKET)) return;
        }
    }
    finish(c, job, p.ring);
}

/* Each command by itself, through the block's poster: warp 0, which is no producer. One ring a block, and a block's
 * producers are those of that ring, so blocks are a multiple of rings. */
UCCL_EP_KERNEL void perf_poster(uccl_ep::comm c, perf_job job) {
    UCCL_EP_SHARED uccl_ep::poster poster;
    const uccl_ep_u32 ring = platform::block() % job.rings;
    poster.init(ring, warps() - 1);
    if (warp() == 0) {
        poster.run(c);
    } else {
        const producer p = producer_at(job, platform::block() + platform::blocks() * (warp() - 1));
        for (uccl_ep_u64 i = 0; i < job.commands; i++) {
            p.write(i, 1);
            uccl_ep::status status = UCCL_EP_OK;
            if (platform::lane() == 0) status = poster.post(c, p.command(job.sequence + i, 0));
            if (platform::ballot(platform::present(), status != UCCL_EP_OK)) break;
        }
        if (platform::lane() == 0) poster.close();
    }
    platform::sync_block();
    if (warp() == 0) finish(c, job, ring);
}

/* -------------------------------------------------------------------------------------------- one warp, one by one */

/* A command, and its quiet: there and back. */
UCCL_EP_KERNEL void perf_round_trip(uccl_ep::comm c, perf_job job) {
    const producer p = producer_at(job, 0);
    repeat(job, [&](uccl_ep_u64 i) -> uccl_ep::status {
        p.write(i, 1);
        if (platform::lane() != 0) return UCCL_EP_OK;
        return uccl_ep::quiet(c, p.ring, uccl_ep::post(c, p.ring, p.command(job.sequence + i, 0)));
    });
}

/* A command, until whoever took it has written a word. */
UCCL_EP_KERNEL void perf_round_trip_word(uccl_ep::comm c, perf_job job) {
    const producer p = producer_at(job, 0);
    repeat(job, [&](uccl_ep_u64 i) -> uccl_ep::status {
        p.write(i, 1);
        if (platform::lane() != 0) return UCCL_EP_OK;
        if (uccl_ep::post(c, p.ring, p.command(job.sequence + i, 0)) == UCCL_EP_NO_TICKET) return UCCL_EP_E_CLOSED;
        return await(c, job.word, job.sequence + i + 1);
    });
}

/* A quiet with nothing outstanding. */
UCCL_EP_KERNEL void perf_quiet(uccl_ep::comm c, perf_job job) {
    const producer p = producer_at(job, 0);
    repeat(job, [&](uccl_ep_u64) -> uccl_ep::status {
        return platform::lane() == 0 ? uccl_ep::quiet(c, p.ring) : UCCL_EP_OK;
    });
}

/* Wait for a signal, and answer. */
UCCL_EP_KERNEL void perf_answer(uccl_ep::comm c, perf_job job) {
    repeat(job, [&](uccl_ep_u64 i) -> uccl_ep::status {
        if (platform::lane() != 0) return UCCL_EP_OK;
        const uccl_ep::status status = uccl_ep::wait_signal(c, 0, job.sequence + i + 1);
        if (status == UCCL_EP_OK) platform::store_release_system(job.word, job.sequence + i + 1);
        return status;
    });
}
