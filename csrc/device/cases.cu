/* SPDX-License-Identifier: Apache-2.0
 *
 * cases.cu: kernels of the conformance suite's own cases for kernels. Sees device.h and cases.h alone.
 *
 * A word of a message says whose it is: the sender's rank, the message's number and the word's place.
 */
#include <uccl_ep/device.h>

#include "cases.h"

namespace {

namespace platform = uccl_ep::platform;
using uccl_ep::comm;

UCCL_EP_DEVICE uccl_ep_u32 warp() {
    return platform::thread() / platform::width();
}
UCCL_EP_DEVICE uccl_ep_u32 warps() {
    return (platform::threads() + platform::width() - 1) / platform::width();
}
UCCL_EP_DEVICE uccl_ep_u64 everywhere() {
    return (uccl_ep_u64)platform::block() * platform::threads() + platform::thread();
}

UCCL_EP_DEVICE uccl_ep_u64 word_of(const case_job &job, uccl_ep_u32 rank, uccl_ep_u64 m, uccl_ep_u32 i) {
    return ((uccl_ep_u64)(rank + 1) << 48 | m << 8 | i) ^ job.seed;
}
UCCL_EP_DEVICE uccl_ep_u64 *message(const comm &c, uccl_ep_u64 at, uccl_ep_u64 m) {
    return (uccl_ep_u64 *)((char *)c.heap + at) + m * CASE_WORDS;
}
UCCL_EP_DEVICE uccl_ep_u64 offset_of(uccl_ep_u64 at, uccl_ep_u64 m) {
    return at + m * CASE_WORDS * sizeof(uccl_ep_u64);
}
/* One of `n` writers. */
UCCL_EP_DEVICE void write(const comm &c, const case_job &job, uccl_ep_u64 m, uccl_ep_u32 writer, uccl_ep_u32 n) {
    uccl_ep_u64 *const words = message(c, job.local, m);
    for (uccl_ep_u32 i = writer; i < CASE_WORDS; i += n) words[i] = word_of(job, c.rank, m, i);
}
/* Words of the own heap that are not the source's. */
UCCL_EP_DEVICE uccl_ep_u64 wrong(const comm &c, const case_job &job, uccl_ep_u32 source, uccl_ep_u64 m,
                                 uccl_ep_u32 reader, uccl_ep_u32 n) {
    const uccl_ep_u64 *const words = message(c, job.remote, m);
    uccl_ep_u64 found = 0;
    for (uccl_ep_u32 i = reader; i < CASE_WORDS; i += n)
        found += platform::load_system(&words[i]) != word_of(job, source, m, i);
    return found;
}

struct report {
    uccl_ep_u64 trouble, what, messages;
    UCCL_EP_DEVICE bool note(bool bad, uccl_ep_u64 code, uccl_ep_u64 detail) {
        if (bad && !trouble) {
            trouble = code;
            what = detail;
        }
        return bad;
    }
    UCCL_EP_DEVICE bool posted(uccl_ep::ticket t, uccl_ep_u64 m) { return !note(t == UCCL_EP_NO_TICKET, 1, m); }
    UCCL_EP_DEVICE bool done(uccl_ep::status s) { return !note(s != UCCL_EP_OK, 2, (uccl_ep_u64)(long long)s); }
    UCCL_EP_DEVICE void write(const case_job &job) const {
        uccl_ep_u64 *const out = job.out + everywhere() * CASE_OUT;
        out[0] = trouble;
        out[1] = what;
        out[2] = messages;
    }
};

struct sender {
    const comm &c;
    const case_job &job;
    report r;

    UCCL_EP_DEVICE uccl_ep_u32 channel(uccl_ep_u64 producer) const {
        return job.first_channel + (uccl_ep_u32)(producer % job.channels);
    }
    UCCL_EP_DEVICE uccl_ep::ticket send(uccl_ep_u64 producer, uccl_ep_u64 m) const {
        return uccl_ep::put_signal(c, channel(producer), job.target, offset_of(job.local, m), offset_of(job.remote, m),
                                   CASE_WORDS * sizeof(uccl_ep_u64), job.slot, 1);
    }

    /* A producer is a warp. */
    UCCL_EP_DEVICE void by_warps() {
        const uccl_ep_u64 p = (uccl_ep_u64)platform::block() * warps() + warp();
        const uccl_ep_u32 lane = platform::lane(), lanes = platform::count_bits(platform::present());
        for (uccl_ep_u64 m = p * job.rounds; m < (p + 1) * job.rounds; m++) {
            write(c, job, m, lane, lanes);
            uccl_ep::ticket t = 0;
            if (job.form == CASE_WARP) {
                t = uccl_ep::put_signal_warp(c, channel(p), job.target, offset_of(job.local, m),
                                             offset_of(job.remote, m), CASE_WORDS * sizeof(uccl_ep_u64), job.slot, 1);
            } else {
                platform::sync_warp(platform::present());
                if (lane == 0) t = send(p, m);
                t = platform::shuffle(platform::present(), t, 0);
            }
            if (!r.posted(t, m)) return;
            if (lane == 0) r.messages++;
        }
        r.done(uccl_ep::quiet_warp(c, channel(p)));
    }

    UCCL_EP_DEVICE void by_blocks() {
        const uccl_ep_u64 p = platform::block();
        for (uccl_ep_u64 m = p * job.rounds; m < (p + 1) * job.rounds; m++) {
            write(c, job, m, platform::thread(), platform::threads());
            const uccl_ep::ticket t =
                uccl_ep::put_signal_block(c, channel(p), job.target, offset_of(job.local, m), offset_of(job.remote, m),
                                          CASE_WORDS * sizeof(uccl_ep_u64), job.slot, 1);
            if (!r.posted(t, m)) return;
            if (platform::thread() == 0) r.messages++;
        }
        r.done(uccl_ep::quiet_block(c, channel(p)));
    }

    /* Block 0 posts what the others have written and then released to it. */
    UCCL_EP_DEVICE void by_grid() {
        const uccl_ep_u32 others = platform::blocks() - 1;
        for (uccl_ep_u64 round = 0; round < job.rounds; round++) {
            if (platform::block() != 0) {
                const uccl_ep_u64 m = (platform::block() - 1) * (uccl_ep_u64)job.rounds + round;
                write(c, job, m, platform::thread(), platform::threads());
                platform::sync_block();
                if (platform::thread() == 0) platform::store_release_device(&job.shared[platform::block()], round + 1);
                continue;
            }
            for (uccl_ep_u32 b = platform::thread(); b < others; b += platform::threads()) {
                const uccl_ep_u64 begin = platform::clock();
                while (platform::load_acquire_device(&job.shared[b + 1]) <= round) {
                    platform::relax();
                    if (r.note(platform::clock() - begin > c.timeout_ticks, 3, b)) return;
                }
                const uccl_ep_u64 m = b * (uccl_ep_u64)job.rounds + round;
                if (!r.posted(send(b, m), m)) return;
                r.messages++;
            }
        }
        if (platform::block() == 0) r.done(uccl_ep::quiet_all(c));
    }

    /* Threads that post now and then, and not the same times: lanes meet in ever other groups. */
    UCCL_EP_DEVICE void by_threads() {
        const uccl_ep_u64 p = everywhere();
        uccl_ep::ticket last = UCCL_EP_NO_TICKET;
        for (uccl_ep_u32 round = 0; round < job.rounds; round++) {
            if ((p + round) % 3 == 0) continue;
            const uccl_ep_u64 m = p * job.rounds + round;
            write(c, job, m, 0, 1);
            const uccl_ep::ticket t = send(p + (round & 1), m);
            if (!r.posted(t, m)) return;
            r.messages++;
            if (round % 2 == 0) last = t;
        }
        if (last != UCCL_EP_NO_TICKET) r.done(uccl_ep::quiet(c, channel(p), last));
        r.done(uccl_ep::quiet_all(c));
    }

    UCCL_EP_DEVICE void together() {
        const uccl_ep_u64 p = everywhere(), of_warp = (uccl_ep_u64)platform::block() * warps() + warp();
        const uccl_ep_u64 all = platform::present();
        const uccl_ep_u32 room = 1u << c.rings[channel(of_warp)].log2_slots;
        const uccl_ep_u32 lanes = platform::count_bits(all);
        const uccl_ep_u32 n = room < lanes ? room : lanes; /* more are refused */
        for (uccl_ep_u32 round = 0; round < job.rounds; round++) {
            const uccl_ep_u64 m = p * job.rounds + round;
            write(c, job, m, 0, 1);
            /* Every lane's turn comes: a window of lanes that moves. */
            for (uccl_ep_u32 at = 0; at < lanes; at += n) {
                const bool active = platform::lane() >= at && platform::lane() < at + n;
                uccl_ep_command command = {};
                command.op = UCCL_EP_OP_PUT_SIGNAL;
                command.target = job.target;
                command.local = offset_of(job.local, m);
                command.remote = offset_of(job.remote, m);
                command.bytes = CASE_WORDS * (uccl_ep_u32)sizeof(uccl_ep_u64);
                command.granularity = c.granularity;
                command.slot = job.slot;
                command.add = 1;
                const uccl_ep::ticket t = uccl_ep::post_many_warp(c, channel(of_warp), command, active);
                /* Consecutive, in the order of lanes. */
                const uccl_ep::ticket first = platform::shuffle(all, t, at);
                if (active && r.posted(t, m)) {
                    r.messages++;
                    r.note(t != first + (platform::lane() - at), 4, t);
                }
                r.note(!active && t != UCCL_EP_NO_TICKET, 5, t);
            }
            if (platform::ballot(all, r.trouble != 0)) return;
        }
        r.done(uccl_ep::quiet_warp(c, channel(of_warp)));
    }

    /* A block's poster posts to one channel. */
    UCCL_EP_DEVICE void by_poster() {
        UCCL_EP_SHARED uccl_ep::poster poster;
        const uccl_ep_u32 producers = warps() - 1, lanes = platform::count_bits(platform::present());
        poster.init(channel(platform::block()), producers);
        if (warp() == 0) {
            r.done(poster.run(c));
        } else {
            const uccl_ep_u64 p = (uccl_ep_u64)platform::block() * producers + warp() - 1;
            uccl_ep::status s = UCCL_EP_OK;
            for (uccl_ep_u64 m = p * job.rounds; s == UCCL_EP_OK && m < (p + 1) * job.rounds; m++) {
                write(c, job, m, platform::lane(), lanes);
                platform::sync_warp(platform::present());
                if (platform::lane() == 0) {
                    uccl_ep::ticket t = 0;
                    s = poster.put_signal(c, job.target, offset_of(job.local, m), offset_of(job.remote, m),
                                          CASE_WORDS * sizeof(uccl_ep_u64), job.slot, 1,
                                          job.form == CASE_POSTER_TICKETS ? &t : nullptr);
                    if (r.done(s) && job.form == CASE_POSTER_TICKETS && (m & 3) == 0)
                        r.done(uccl_ep::quiet(c, channel(platform::block()), t));
                    r.messages++;
                }
                s = (uccl_ep::status)(long long)platform::shuffle(platform::present(), (uccl_ep_u64)(long long)s, 0);
            }
            if (platform::lane() == 0) poster.close();
        }
        platform::sync_block();
        if (warp() == 0) r.done(uccl_ep::quiet_warp(c, channel(platform::block())));
    }
};

} // namespace

/* Messages to one target, posted in every form there is. */
UCCL_EP_KERNEL void case_send(comm c, case_job job) {
    sender s = {c, job, {0, 0, 0}};
    switch (job.form) {
    case CASE_LANE:
    case CASE_WARP:
        s.by_warps();
        break;
    case CASE_BLOCK:
        s.by_blocks();
        break;
    case CASE_GRID:
        s.by_grid();
        break;
    case CASE_APART:
        s.by_threads();
        break;
    case CASE_MANY:
        s.together();
        break;
    default:
        s.by_poster();
    }
    s.r.write(job);
}

/* Block 0 sends, and block 1 looks, in the kernel, at what came: both in one kernel that runs all the while. */
UCCL_EP_KERNEL void case_exchange(comm c, case_job job) {
    report r = {0, 0, 0};
    for (uccl_ep_u32 m = 0; m < job.rounds; m++) {
        if (platform::block() == 0) {
            write(c, job, m, platform::thread(), platform::threads());
            const uccl_ep_u32 channel = job.first_channel + m % job.channels;
            const uccl_ep::ticket t =
                uccl_ep::put_signal_block(c, channel, job.target, offset_of(job.local, m), offset_of(job.remote, m),
                                          CASE_WORDS * sizeof(uccl_ep_u64), job.slot + m % job.channels, 1);
            if (!r.posted(t, m)) break;
        } else {
            const uccl_ep_u32 slot = job.slot + m % job.channels;
            if (!r.done(uccl_ep::wait_signal_block(c, slot, m / job.channels + 1))) break;
            const uccl_ep_u64 bad = wrong(c, job, job.source, m, platform::thread(), platform::threads());
            r.note(bad != 0, 6, (uccl_ep_u64)m << 32 | bad);
        }
        if (platform::thread() == 0) r.messages++;
    }
    if (platform::block() == 0) r.done(uccl_ep::quiet_all_block(c));
    r.write(job);
}

/* QUI-5: rank 0 puts to rank 1, is quiet, and signals to rank 2, which signals to rank 1: it then sees the bytes. */
UCCL_EP_KERNEL void case_relay(comm c, case_job job) {
    report r = {0, 0, 0};
    const uccl_ep_u32 put_on = job.first_channel, signal_on = job.first_channel + job.channels - 1;
    for (uccl_ep_u32 m = 0; m < job.rounds; m++) {
        if (c.rank == 0) {
            write(c, job, m, platform::thread(), platform::threads());
            const uccl_ep::ticket t = uccl_ep::put_block(c, put_on, 1, offset_of(job.local, m),
                                                         offset_of(job.remote, m), CASE_WORDS * sizeof(uccl_ep_u64));
            if (!r.posted(t, m) || !r.done(uccl_ep::quiet_block(c, put_on, t))) break;
            if (!r.posted(uccl_ep::signal_block(c, signal_on, 2, job.slot, 1), m)) break;
        } else if (c.rank == 2) {
            if (!r.done(uccl_ep::wait_signal_block(c, job.slot, m + 1))) break;
            if (!r.posted(uccl_ep::signal_block(c, signal_on, 1, job.slot, 1), m)) break;
        } else {
            if (!r.done(uccl_ep::wait_signal_block(c, job.slot, m + 1))) break;
            const uccl_ep_u64 bad = wrong(c, job, 0, m, platform::thread(), platform::threads());
            r.note(bad != 0, 6, (uccl_ep_u64)m << 32 | bad);
        }
        if (platform::thread() == 0) r.messages++;
    }
    r.done(uccl_ep::quiet_all_block(c));
    r.write(job);
}
