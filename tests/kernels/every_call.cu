// SPDX-License-Identifier: Apache-2.0
//
// every_call.cu: every call of device.h, device_poster.h and nvshmem.h, for the compilers that meet them
// (test_kernels.py).
#include <uccl_ep/device.h>
#include <uccl_ep/nvshmem.h>

using namespace uccl_ep;

UCCL_EP_KERNEL void every_post(comm c, uccl_ep_words words, uccl_ep_command command, ticket *t) {
    t[0] = put(c, 0, 1, 0, 16, 32);
    t[1] = put_warp(c, 0, 1, 0, 16, 32);
    t[2] = put_block(c, 0, 1, 0, 16, 32);
    t[3] = signal(c, 0, 1, 2, 3);
    t[4] = signal_warp(c, 0, 1, 2, 3);
    t[5] = signal_block(c, 0, 1, 2, 3);
    t[6] = put_signal(c, 0, 1, 0, 16, 32, 2, 3);
    t[7] = put_signal_warp(c, 0, 1, 0, 16, 32, 2, 3);
    t[8] = put_signal_block(c, 0, 1, 0, 16, 32, 2, 3);
    t[9] = post(c, 0, words);
    t[10] = post_many_warp(c, 0, words, platform::lane() % 2 == 0);
    t[11] = post_many_warp(c, 0, command, true);
}

UCCL_EP_KERNEL void every_wait(comm c, ticket t, status *s, uccl_ep_u64 *seen) {
    s[0] = quiet(c, 0, t);
    s[1] = quiet_warp(c, 0, t);
    s[2] = quiet_block(c, 0, t);
    s[3] = quiet(c, 0);
    s[4] = quiet_warp(c, 0);
    s[5] = quiet_block(c, 0);
    s[6] = quiet_source(c, 0, t);
    s[7] = quiet_source_warp(c, 0, t);
    s[8] = quiet_source_block(c, 0, t);
    s[9] = quiet_source(c, 0);
    s[10] = quiet_source_warp(c, 0);
    s[11] = quiet_source_block(c, 0);
    s[12] = quiet_all(c);
    s[13] = quiet_all_warp(c);
    s[14] = quiet_all_block(c);
    s[15] = test(c, 0, t);
    s[16] = wait_signal(c, 0, 1, seen);
    s[17] = wait_signal_warp(c, 0, 1, seen);
    s[18] = wait_signal_block(c, 0, 1);
    s[19] = wait_signal(c, 0, 1, seen, 3);
    s[20] = wait_signal_block(c, 0, 1, nullptr, 3);
    *seen = read_signal(c, 0) + aborted(c);
}

UCCL_EP_KERNEL void every_poster_call(comm c, uccl_ep_words words, ticket *t) {
    UCCL_EP_SHARED poster p;
    p.init(0, 1);
    if (platform::thread() < platform::width()) {
        p.run(c);
    } else if (platform::lane() == 0) {
        p.post(c, words);
        p.post(c, words, t);
        p.put(c, 1, 0, 16, 32);
        p.signal(c, 1, 2, 3, t);
        p.put_signal(c, 1, 0, 16, 32, 2, 3);
        p.close();
    }
}

UCCL_EP_KERNEL void every_nvshmem_call(comm c, float *x, unsigned long *flag, unsigned long long *word) {
    nvshmemx_uccl_ep_bind(c);
    const int pe = (nvshmem_my_pe() + 1) % nvshmem_n_pes();
    nvshmem_putmem(x, x, 16, pe);
    nvshmemx_putmem_nbi_warp(x, x, 16, pe);
    nvshmemx_putmem_block(x, x, 16, pe);
    nvshmem_float_put_nbi(x, x, 4, pe);
    nvshmemx_float_put_nbi_block(x, x, 4, pe);
    nvshmem_put64_nbi(x, x, 2, pe);
    nvshmem_putmem_signal(x, x, 16, flag, 1, NVSHMEM_SIGNAL_ADD, pe);
    nvshmemx_putmem_signal_nbi_warp(x, x, 16, word, 1, NVSHMEM_SIGNAL_ADD, pe);
    nvshmemx_float_put_signal_nbi_block(x, x, 4, flag, 1, NVSHMEM_SIGNAL_ADD, pe);
    nvshmemx_signal_op(flag, 1, NVSHMEM_SIGNAL_ADD, pe);
    nvshmem_fence();
    nvshmem_quiet();
    nvshmem_uint64_wait_until(flag, NVSHMEM_CMP_GT, 0);
    x[0] = (float)(nvshmem_signal_fetch(flag) + nvshmem_signal_wait_until(word, NVSHMEM_CMP_GE, 1));
    nvshmemi_ibgda_put_nbi_warp((uccl_ep_u64)x, (uccl_ep_u64)x, 16, pe, 0, (int)platform::lane(), 0);
    nvshmemi_ibgda_put_nbi_warp<true>((uccl_ep_u64)x, (uccl_ep_u64)x, 16, pe, 0, (int)platform::lane(), 0);
    nvshmemi_ibgda_amo_nonfetch_add(flag, -1, pe, 0);
    nvshmemi_ibgda_quiet(pe, 0);
    if (nvshmem_ptr(x, pe) || nvshmemi_get_p2p_ptr((uccl_ep_u64)x, 0, pe)) x[1] = 0;
#ifdef UCCL_EP_NOT_HONOURED
    UCCL_EP_NOT_HONOURED;
#endif
}

/* The path of a push alone, for those who look at what it became. */
UCCL_EP_KERNEL void push(comm c, uccl_ep_words words) {
    post_many_warp(c, 0, words, true);
}
