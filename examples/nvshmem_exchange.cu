// SPDX-License-Identifier: Apache-2.0
//
// nvshmem_exchange.cu: an all-to-all of rows in NVSHMEM's spelling, and the same with the calls that DeepEP uses.
//
// The heap holds n rows to send, one for each rank, and behind them n rows to receive, one from each rank; a row is
// `length` floats. Signal 0 counts the rows that have come, signal 1 + r tells how many tokens rank r sent.
#include <uccl_ep/nvshmem.h>

using namespace uccl_ep::platform;

// One block for each rank: it fills its row, puts it and signals, in one command; and waits for all n.
UCCL_EP_KERNEL void exchange(uccl_ep_device_comm comm, uccl_ep_u64 length) {
    nvshmemx_uccl_ep_bind(comm);
    const int me = nvshmem_my_pe(), n = nvshmem_n_pes(), pe = (int)block();
    float *const send = (float *)comm.heap + pe * length;
    float *const receive = (float *)comm.heap + (n + me) * length;
    const uccl_ep_u64 *const come = comm.signal_words;
    for (uccl_ep_u64 i = thread(); i < length; i += threads())
        send[i] = (float)(1000 * me + 100 * pe) + (float)(i % 64);
    nvshmemx_float_put_signal_nbi_block(receive, send, length, come, 1, NVSHMEM_SIGNAL_ADD, pe);
    if (thread() == 0) nvshmem_signal_wait_until(come, NVSHMEM_CMP_GE, n);
    sync_block();
    // What was sent may be changed once it is away.
    if (thread() == 0) nvshmem_quiet();
}

// One warp for each rank: token by token as DeepEP sends them, then their number, which arrives behind them: one more
// than it is, so that none of them is told from not yet. (Where DeepEP adds to an int of its buffer, here are words for
// it.)
UCCL_EP_KERNEL void exchange_tokens(uccl_ep_device_comm comm, uccl_ep_u64 length, uccl_ep_u64 *counts) {
    nvshmemx_uccl_ep_bind(comm);
    const int me = nvshmem_my_pe(), n = nvshmem_n_pes();
    const uccl_ep_u64 bytes = length * sizeof(float), token = 256;
    const uccl_ep_u64 warp = thread() / width(), warps = (threads() + width() - 1) / width();
    const uccl_ep_u64 heap = (uccl_ep_u64)comm.heap;
    for (int pe = (int)warp; pe < n; pe += (int)warps) {
        const uccl_ep_u64 from = heap + pe * bytes, to = heap + (n + me) * bytes;
        float *const row = (float *)from;
        for (uccl_ep_u64 i = lane(); i < length; i += width()) row[i] = row[i] + 0.5f;
        for (uccl_ep_u64 at = 0; at < bytes; at += token)
            nvshmemi_ibgda_put_nbi_warp(to + at, from + at, token, pe, pe, (int)lane(), (int)(at / token));
        const int tokens = (int)(bytes / token);
        if (lane() == 0) nvshmemi_ibgda_amo_nonfetch_add(comm.signal_words + 1 + me, tokens + 1, pe, pe);
        sync_warp(present());
    }
    sync_block();
    for (int pe = (int)thread(); pe < n; pe += (int)threads())
        counts[pe] = nvshmem_signal_wait_until(comm.signal_words + 1 + pe, NVSHMEM_CMP_GE, 1) - 1;
    for (int pe = (int)thread(); pe < n; pe += (int)threads()) nvshmemi_ibgda_quiet(pe, pe);
}
