// SPDX-License-Identifier: Apache-2.0
//
// test_nvshmem.cpp: each call of nvshmem.h posts the command that its name says, on the channel that it belongs to.
// (That the others do not compile is tested in tests/test_kernels.py; that bytes arrive, by
// examples/nvshmem_exchange.py.)
#include "device_bench.h"

#include <uccl_ep/nvshmem.h>

using namespace uccl_ep::platform;

struct call_arguments {
    float *heap;
    unsigned long *signals;    // uint64_t of one kind
    unsigned long long *words; // and of the other
    int which;
    uccl_ep_u64 result;
};

UCCL_EP_KERNEL void call_one(uccl_ep::comm c, call_arguments *a) {
    nvshmemx_uccl_ep_bind(c);
    float *const to = a->heap + 64, *const from = a->heap + 8;
    const bool one = thread() == 0;
    const uccl_ep_u64 rptr = reinterpret_cast<uccl_ep_u64>(to), lptr = reinterpret_cast<uccl_ep_u64>(from);
    switch (a->which) {
    case 0:
        if (one) nvshmem_putmem_nbi(to, from, 32, 3);
        break;
    case 1:
        nvshmemx_putmem_nbi_warp(to, from, 32, 3);
        break;
    case 2:
        nvshmemx_putmem_nbi_block(to, from, 32, 3);
        break;
    case 3:
        if (one) nvshmem_float_put_nbi(to, from, 8, 3);
        break;
    case 4:
        nvshmemx_float_put_nbi_warp(to, from, 8, 3);
        break;
    case 5:
        nvshmemx_put64_nbi_block(to, from, 4, 3);
        break;
    case 6:
        if (one) nvshmem_put128_nbi(to, from, 2, 3);
        break;
    case 7:
        if (one) nvshmem_putmem_signal_nbi(to, from, 32, a->signals + 5, 7, NVSHMEM_SIGNAL_ADD, 3);
        break;
    case 8:
        nvshmemx_float_put_signal_nbi_warp(to, from, 8, a->words + 5, 7, NVSHMEM_SIGNAL_ADD, 3);
        break;
    case 9:
        nvshmemx_putmem_signal_nbi_block(to, from, 32, a->signals + 5, 7, NVSHMEM_SIGNAL_ADD, 3);
        break;
    case 10:
        if (one) nvshmemx_signal_op(a->signals + 5, 7, NVSHMEM_SIGNAL_ADD, 3);
        break;
    case 11:
        nvshmemi_ibgda_put_nbi_warp(rptr, lptr, 32, 3, 5, static_cast<int>(lane()), 0);
        break;
    case 12:
        nvshmemi_ibgda_put_nbi_warp<true>(rptr, lptr, 32, 3, 4, static_cast<int>(lane()), 0);
        break;
    case 13:
        if (one) nvshmemi_ibgda_amo_nonfetch_add(a->words + 5, -7, 3, 5);
        break;
    case 14:
        if (one) nvshmem_putmem(to, from, 32, 3);
        break; // waits for the source
    case 15:
        nvshmemx_int_put_block(reinterpret_cast<int *>(to), reinterpret_cast<int *>(from), 8, 3);
        break;
    default:
        break;
    }
}

static void check_posts() {
    struct {
        uccl_ep_op op;
        uccl_ep_u64 add;
        uccl_ep_u32 channel;
    } expected[] = {
        {UCCL_EP_OP_PUT, 0, 0},        {UCCL_EP_OP_PUT, 0, 0},        {UCCL_EP_OP_PUT, 0, 0},
        {UCCL_EP_OP_PUT, 0, 0},        {UCCL_EP_OP_PUT, 0, 0},        {UCCL_EP_OP_PUT, 0, 0},
        {UCCL_EP_OP_PUT, 0, 0},        {UCCL_EP_OP_PUT_SIGNAL, 7, 0}, {UCCL_EP_OP_PUT_SIGNAL, 7, 0},
        {UCCL_EP_OP_PUT_SIGNAL, 7, 0}, {UCCL_EP_OP_SIGNAL, 7, 0},     {UCCL_EP_OP_PUT, 0, 1},
        {UCCL_EP_OP_PUT, 0, 0},        {UCCL_EP_OP_SIGNAL, -7ull, 1}, {UCCL_EP_OP_PUT, 0, 0},
        {UCCL_EP_OP_PUT, 0, 0},
    };
    for (const uint32_t warp : warp_widths) {
        int which = 0;
        for (const auto &e : expected) {
            bench b(2, 4);
            std::vector<float> heap(1024);
            b.c.heap = heap.data();
            b.c.heap_bytes = heap.size() * sizeof(float);
            call_arguments a = {heap.data(), reinterpret_cast<unsigned long *>(b.words.data()),
                                reinterpret_cast<unsigned long long *>(b.words.data()), which, 0};
            uint64_t n = 0;
            {
                proxy p(b, [&](uccl_ep_u32 channel, uccl_ep_u64, const uccl_ep_command &command) {
                    n++;
                    CHECK_EQ(channel, e.channel);
                    CHECK_EQ(command.op, e.op);
                    CHECK_EQ(command.target, 3);
                    if (uccl_ep_op_has_put(command.op))
                        CHECK(command.local == 32 && command.remote == 256 && command.bytes == 32, "call %d", which);
                    if (uccl_ep_op_has_signal(command.op))
                        CHECK(command.slot == 5 && command.add == e.add, "call %d", which);
                });
                RUN((shape{warp, 1, warp}), call_one, b.c, &a);
            }
            CHECK_EQ(b.failed(), 0);
            CHECK_EQ(n, 1);
            which++;
        }
    }
}

UCCL_EP_KERNEL void call_waits(uccl_ep::comm c, call_arguments *a) {
    nvshmemx_uccl_ep_bind(c);
    if (a->which == 0) a->result = nvshmem_signal_wait_until(a->signals + 5, NVSHMEM_CMP_GE, 7);
    if (a->which == 1) a->result = nvshmem_signal_wait_until(a->words + 5, NVSHMEM_CMP_GT, 6);
    if (a->which == 2) nvshmem_uint64_wait_until(a->signals + 5, NVSHMEM_CMP_GE, 7), a->result = 9;
    if (a->which == 3) a->result = nvshmem_signal_fetch(a->words + 5);
    if (a->which == 4) nvshmem_quiet();
    if (a->which == 5) nvshmem_fence();
    if (a->which == 6) nvshmemi_ibgda_quiet(0, 5);
    if (a->which == 7)
        a->result = static_cast<uccl_ep_u64>(nvshmem_my_pe()) << 32 | static_cast<uccl_ep_u64>(nvshmem_n_pes());
    if (a->which == 8) a->result = nvshmem_ptr(a->heap, 2) == a->heap && !nvshmem_ptr(a->heap, 3);
    if (a->which == 9) a->result = nvshmemi_get_p2p_ptr(77, 2, 2) + nvshmemi_get_p2p_ptr(77, 2, 3);
    // What has no place in heap or signals, and what is not aligned.
    if (a->which == 10) nvshmem_putmem_nbi(&a->which, a->heap, 16, 3);
    if (a->which == 11) nvshmem_putmem_nbi(a->heap, a->heap - 4, 16, 3);
    if (a->which == 12) nvshmem_putmem_nbi(a->heap, a->heap, 16, -1);
    if (a->which == 13) nvshmemx_signal_op(&a->result, 1, NVSHMEM_SIGNAL_ADD, 3);
    if (a->which == 14) nvshmemx_signal_op(a->words + 64, 1, NVSHMEM_SIGNAL_ADD, 3); // of the second bank
    if (a->which == 15) nvshmem_signal_wait_until(&a->result, NVSHMEM_CMP_GE, 1);
    if (a->which == 16) nvshmem_putmem_nbi(a->heap + 1, a->heap, 16, 3);
}

static void check_waits() {
    const uccl_ep_u64 results[] = {9, 9, 9, 9, 0, 0, 0, 2ull << 32 | 4096, 1, 77};
    for (int which = 0; which <= 16; which++) {
        bench b(2, 4, 0, 2);
        std::vector<float> heap(1024);
        b.c.heap = heap.data();
        b.c.heap_bytes = heap.size() * sizeof(float);
        b.c.rank = 2;
        b.words[5] = 4;
        b.words[64 + 5] = 5;
        // quiet: all channels; fence: the block's own; with a queue's number: that one's.
        b.producers[0].head = b.producers[1].head = 1;
        if (which != 6) b.publish(0, 1);
        if (which != 5) b.publish(1, 1);
        call_arguments a = {heap.data(), reinterpret_cast<unsigned long *>(b.words.data()),
                            reinterpret_cast<unsigned long long *>(b.words.data()), which, 0};
        RUN((shape{1, 1, 1}), call_waits, b.c, &a);
        CHECK_EQ(b.failed(), which < 10 ? UCCL_EP_OK : which < 16 ? UCCL_EP_E_RANGE : UCCL_EP_E_ALIGNMENT);
        if (which < 10) CHECK_EQ(a.result, results[which]);
        CHECK_EQ(b.producers[0].head + b.producers[1].head, 2);
    }
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 120);
    check_posts();
    check_waits();
    return test_end();
}
