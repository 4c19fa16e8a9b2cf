/* SPDX-License-Identifier: Apache-2.0
 *
 * nvshmem.h: kernels written for NVSHMEM, or with DeepEP's nvshmemi_ibgda_ calls, over device.h.
 *
 * Purpose. What of that spelling the contract can honour is here with the same names and arguments. What it cannot does
 * not compile, and the compiler's message says what to use instead: no call means less than its name.
 *
 *   UCCL_EP_KERNEL void ring(uccl_ep_device_comm comm, float *out, const float *in, uint64_t *flag) {
 *       nvshmemx_uccl_ep_bind(comm);           // first, by all threads of the block: there is no library that is
 * global const int next = (nvshmem_my_pe() + 1) % nvshmem_n_pes(); nvshmemx_float_put_signal_nbi_block(out, in, 1024,
 * flag, 1, NVSHMEM_SIGNAL_ADD, next); if (thread == 0) nvshmem_signal_wait_until(flag, NVSHMEM_CMP_GE, 1);
 *   }
 *
 * Addresses. Symmetric data lie in the communicator's heap: an own address stands for the same offset of another rank's
 * heap. Sources lie there too (in NVSHMEM they need not). Signals are words of comm.signal_words, of bank 0 whatever
 * the number of banks: they are read by the calls below, not by loads. An address that is neither is refused at run
 * time (E_RANGE), as is one that is not aligned to the granularity (E_ALIGNMENT): the first failure is in comm.error,
 * since these calls return nothing.
 *
 * Channels. Calls with a qp_id post to channel qp_id mod comm.channels, all others to channel (block of the grid) mod
 * comm.channels. A signal is behind all puts of its channel to its target (SIG-2), which no NVSHMEM call promises
 * without a fence.
 *
 * nvshmem_fence orders everything that the block's channel posted before against what it posts next, by waiting until
 * it is complete: puts are not ordered among themselves (PUT-5). Before a signal it is not needed. nvshmem_quiet waits
 * for all channels of the rank, whoever posted to them.
 */
#ifndef UCCL_EP_NVSHMEM_H
#define UCCL_EP_NVSHMEM_H

#include "device.h"

/* ------------------------------------------------------------------------------------------------------- the kernel's
 */

namespace uccl_ep {
namespace nvshmem {

/* Those that are honoured are types of their own: which one is meant must be known when a kernel is compiled. */
struct signal_add {};
struct signal_set {};
struct compare_ge {};
struct compare_gt {};
template <int Which> struct compare_other {};

UCCL_EP_DEVICE comm &bound() {
    UCCL_EP_SHARED comm c;
    return c;
}

UCCL_EP_DEVICE uccl_ep_u32 own_channel() {
    return platform::block() % bound().channels;
}
UCCL_EP_DEVICE uccl_ep_u32 channel_of(int qp_id) {
    return (uccl_ep_u32)qp_id % bound().channels;
}

/* An offset that no heap has, if it is no address of the heap. */
UCCL_EP_DEVICE uccl_ep_u64 offset_of(const void *address) {
    const uccl_ep_u64 offset = (uccl_ep_u64)address - (uccl_ep_u64)bound().heap;
    return bound().heap && offset <= bound().heap_bytes ? offset : ~(uccl_ep_u64)(UCCL_EP_GRANULARITY_COARSE - 1);
}

template <typename Word> struct is_signal {
    enum : bool { value = sizeof(Word) == 8 && (Word)-1 > (Word)0 };
};
template <> struct is_signal<void> {
    enum : bool { value = false };
};

/* A slot that there is not, if it is no signal's address. */
template <typename Word> UCCL_EP_DEVICE uccl_ep_u32 slot_of(const Word *address) {
    static_assert(is_signal<Word>::value,
                  "uccl_ep: a signal is an unsigned 64-bit word of comm.signal_words; narrower or signed words are not "
                  "added to: use one of those");
    const uccl_ep_u64 offset = (uccl_ep_u64)address - (uccl_ep_u64)bound().signal_words;
    return offset % 8 == 0 && offset / 8 < bound().signals ? (uccl_ep_u32)(offset / 8) : ~0u;
}

UCCL_EP_DEVICE uccl_ep_u32 rank_of(int pe) {
    return (uccl_ep_u32)pe; /* a negative one is beyond all ranks */
}

/* The source may be changed when a call without _nbi returns. */
UCCL_EP_DEVICE void blocking(ticket t) {
    quiet_source(bound(), own_channel(), t);
}
UCCL_EP_DEVICE void blocking_warp(ticket t) {
    quiet_source_warp(bound(), own_channel(), t);
}
UCCL_EP_DEVICE void blocking_block(ticket t) {
    quiet_source_block(bound(), own_channel(), t);
}

UCCL_EP_DEVICE ticket put_at(void *dest, const void *source, uccl_ep_u64 bytes, int pe) {
    return put(bound(), own_channel(), rank_of(pe), offset_of(source), offset_of(dest), bytes);
}
UCCL_EP_DEVICE ticket put_at_warp(void *dest, const void *source, uccl_ep_u64 bytes, int pe) {
    return put_warp(bound(), own_channel(), rank_of(pe), offset_of(source), offset_of(dest), bytes);
}
UCCL_EP_DEVICE ticket put_at_block(void *dest, const void *source, uccl_ep_u64 bytes, int pe) {
    return put_block(bound(), own_channel(), rank_of(pe), offset_of(source), offset_of(dest), bytes);
}

template <typename Word>
UCCL_EP_DEVICE ticket put_signal_at(void *dest, const void *source, uccl_ep_u64 bytes, Word *signal, uccl_ep_u64 add,
                                    int pe) {
    return put_signal(bound(), own_channel(), rank_of(pe), offset_of(source), offset_of(dest), bytes, slot_of(signal),
                      add);
}
template <typename Word>
UCCL_EP_DEVICE ticket put_signal_at_warp(void *dest, const void *source, uccl_ep_u64 bytes, Word *signal,
                                         uccl_ep_u64 add, int pe) {
    return put_signal_warp(bound(), own_channel(), rank_of(pe), offset_of(source), offset_of(dest), bytes,
                           slot_of(signal), add);
}
template <typename Word>
UCCL_EP_DEVICE ticket put_signal_at_block(void *dest, const void *source, uccl_ep_u64 bytes, Word *signal,
                                          uccl_ep_u64 add, int pe) {
    return put_signal_block(bound(), own_channel(), rank_of(pe), offset_of(source), offset_of(dest), bytes,
                            slot_of(signal), add);
}

template <typename...> struct never {
    enum : bool { value = false };
};

} // namespace nvshmem
} // namespace uccl_ep

#define NVSHMEM_SIGNAL_ADD (uccl_ep::nvshmem::signal_add())
#define NVSHMEM_SIGNAL_SET (uccl_ep::nvshmem::signal_set())
#define NVSHMEM_CMP_GE (uccl_ep::nvshmem::compare_ge())
#define NVSHMEM_CMP_GT (uccl_ep::nvshmem::compare_gt())
#define NVSHMEM_CMP_EQ (uccl_ep::nvshmem::compare_other<0>())
#define NVSHMEM_CMP_NE (uccl_ep::nvshmem::compare_other<1>())
#define NVSHMEM_CMP_LE (uccl_ep::nvshmem::compare_other<2>())
#define NVSHMEM_CMP_LT (uccl_ep::nvshmem::compare_other<3>())

/* All threads of the block, before any other call of this header. */
UCCL_EP_DEVICE void nvshmemx_uccl_ep_bind(const uccl_ep_device_comm &comm) {
    uccl_ep::platform::sync_block();
    if (uccl_ep::platform::thread() == 0) uccl_ep::nvshmem::bound() = comm;
    uccl_ep::platform::sync_block();
}

UCCL_EP_DEVICE int nvshmem_my_pe() {
    return (int)uccl_ep::nvshmem::bound().rank;
}
UCCL_EP_DEVICE int nvshmem_n_pes() {
    return (int)uccl_ep::nvshmem::bound().size;
}

/* Direct loads and stores reach the own heap alone. */
UCCL_EP_DEVICE void *nvshmem_ptr(const void *dest, int pe) {
    return pe == nvshmem_my_pe() ? const_cast<void *>(dest) : nullptr;
}

/* -----------------------------------------------------------------------------------------------------------------
 * puts */

/* name, put of device.h's scope, and the element: dest and source are of its type, nelems counts it. */
#define UCCL_EP_NVSHMEM_PUT_(prefix, name, type, bytes, scope)                                                         \
    UCCL_EP_DEVICE void prefix##_##name##_nbi##scope(type *dest, const type *source, uccl_ep_u64 nelems, int pe) {     \
        uccl_ep::nvshmem::put_at##scope(dest, source, nelems *(bytes), pe);                                            \
    }                                                                                                                  \
    UCCL_EP_DEVICE void prefix##_##name##scope(type *dest, const type *source, uccl_ep_u64 nelems, int pe) {           \
        uccl_ep::nvshmem::blocking##scope(uccl_ep::nvshmem::put_at##scope(dest, source, nelems *(bytes), pe));         \
    }                                                                                                                  \
    template <typename Word>                                                                                           \
    UCCL_EP_DEVICE void prefix##_##name##_signal_nbi##scope(type *dest, const type *source, uccl_ep_u64 nelems,        \
                                                            Word *sig_addr, uccl_ep_u64 signal,                        \
                                                            uccl_ep::nvshmem::signal_add, int pe) {                    \
        uccl_ep::nvshmem::put_signal_at##scope(dest, source, nelems *(bytes), sig_addr, signal, pe);                   \
    }                                                                                                                  \
    template <typename Word>                                                                                           \
    UCCL_EP_DEVICE void prefix##_##name##_signal##scope(type *dest, const type *source, uccl_ep_u64 nelems,            \
                                                        Word *sig_addr, uccl_ep_u64 signal,                            \
                                                        uccl_ep::nvshmem::signal_add, int pe) {                        \
        uccl_ep::nvshmem::blocking##scope(                                                                             \
            uccl_ep::nvshmem::put_signal_at##scope(dest, source, nelems *(bytes), sig_addr, signal, pe));              \
    }                                                                                                                  \
    template <typename Word, typename Operation>                                                                       \
    UCCL_EP_DEVICE void prefix##_##name##_signal_nbi##scope(type *, const type *, uccl_ep_u64, Word *, uccl_ep_u64,    \
                                                            Operation, int) {                                          \
        UCCL_EP_NVSHMEM_ONLY_ADD_(Operation);                                                                          \
    }                                                                                                                  \
    template <typename Word, typename Operation>                                                                       \
    UCCL_EP_DEVICE void prefix##_##name##_signal##scope(type *, const type *, uccl_ep_u64, Word *, uccl_ep_u64,        \
                                                        Operation, int) {                                              \
        UCCL_EP_NVSHMEM_ONLY_ADD_(Operation);                                                                          \
    }
#define UCCL_EP_NVSHMEM_ONLY_ADD_(operation)                                                                           \
    static_assert(uccl_ep::nvshmem::never<operation>::value,                                                           \
                  "uccl_ep: signal words are shared by all ranks and only grow (SIG-1): use NVSHMEM_SIGNAL_ADD, "      \
                  "written where it is passed, and wait for a value that counts up")
#define UCCL_EP_NVSHMEM_PUTS_(name, type, bytes)                                                                       \
    UCCL_EP_NVSHMEM_PUT_(nvshmem, name, type, bytes, )                                                                 \
    UCCL_EP_NVSHMEM_PUT_(nvshmemx, name, type, bytes, _warp)                                                           \
    UCCL_EP_NVSHMEM_PUT_(nvshmemx, name, type, bytes, _block)

UCCL_EP_NVSHMEM_PUTS_(putmem, void, 1)
UCCL_EP_NVSHMEM_PUTS_(put8, void, 1)
UCCL_EP_NVSHMEM_PUTS_(put16, void, 2)
UCCL_EP_NVSHMEM_PUTS_(put32, void, 4)
UCCL_EP_NVSHMEM_PUTS_(put64, void, 8)
UCCL_EP_NVSHMEM_PUTS_(put128, void, 16)

/* X(name, type): the standard names of element types. */
#define UCCL_EP_NVSHMEM_TYPES_(X)                                                                                      \
    X(char, char)                                                                                                      \
    X(schar, signed char)                                                                                              \
    X(uchar, unsigned char)                                                                                            \
    X(short, short)                                                                                                    \
    X(ushort, unsigned short)                                                                                          \
    X(int, int)                                                                                                        \
    X(uint, unsigned int)                                                                                              \
    X(long, long)                                                                                                      \
    X(ulong, unsigned long)                                                                                            \
    X(longlong, long long)                                                                                             \
    X(ulonglong, unsigned long long)                                                                                   \
    X(float, float)                                                                                                    \
    X(double, double)                                                                                                  \
    X(int8, signed char)                                                                                               \
    X(uint8, unsigned char)                                                                                            \
    X(int16, short)                                                                                                    \
    X(uint16, unsigned short)                                                                                          \
    X(int32, int)                                                                                                      \
    X(uint32, unsigned int)                                                                                            \
    X(int64, long)                                                                                                     \
    X(uint64, unsigned long)
#define UCCL_EP_NVSHMEM_TYPED_PUTS_(name, type) UCCL_EP_NVSHMEM_PUTS_(name##_put, type, sizeof(type))
UCCL_EP_NVSHMEM_TYPES_(UCCL_EP_NVSHMEM_TYPED_PUTS_)

/* ------------------------------------------------------------------------------------------------------------- signals
 */

/* One thread. Behind all that its block's channel has put to `pe` (SIG-2). */
template <typename Word>
UCCL_EP_DEVICE void nvshmemx_signal_op(Word *sig_addr, uccl_ep_u64 signal, uccl_ep::nvshmem::signal_add, int pe) {
    using namespace uccl_ep::nvshmem;
    uccl_ep::signal(bound(), own_channel(), rank_of(pe), slot_of(sig_addr), signal);
}
template <typename Word, typename Operation>
UCCL_EP_DEVICE void nvshmemx_signal_op(Word *, uccl_ep_u64, Operation, int) {
    UCCL_EP_NVSHMEM_ONLY_ADD_(Operation);
}

template <typename Word> UCCL_EP_DEVICE uccl_ep_u64 nvshmem_signal_fetch(const Word *sig_addr) {
    using namespace uccl_ep::nvshmem;
    return uccl_ep::read_signal(bound(), slot_of(sig_addr));
}

/* The value that ended the wait; if that failed, the value at its end, and comm.error says why. At or past: as a
 * distance, so that words may wrap (SIG-6). */
template <typename Word>
UCCL_EP_DEVICE uccl_ep_u64 nvshmem_signal_wait_until(const Word *sig_addr, uccl_ep::nvshmem::compare_ge,
                                                     uccl_ep_u64 value) {
    using namespace uccl_ep::nvshmem;
    uccl_ep_u64 seen = 0;
    uccl_ep::wait_signal(bound(), slot_of(sig_addr), value, &seen);
    return seen;
}
template <typename Word>
UCCL_EP_DEVICE uccl_ep_u64 nvshmem_signal_wait_until(const Word *sig_addr, uccl_ep::nvshmem::compare_gt,
                                                     uccl_ep_u64 value) {
    return nvshmem_signal_wait_until(sig_addr, NVSHMEM_CMP_GE, value + 1);
}
template <typename Word, typename Comparison>
UCCL_EP_DEVICE uccl_ep_u64 nvshmem_signal_wait_until(const Word *, Comparison, uccl_ep_u64) {
    static_assert(uccl_ep::nvshmem::never<Comparison>::value,
                  "uccl_ep: signal words only grow, and may pass a value unseen: wait with NVSHMEM_CMP_GE or "
                  "NVSHMEM_CMP_GT, written where it is passed");
    return 0;
}
#define UCCL_EP_NVSHMEM_WAIT_(name)                                                                                    \
    template <typename Word, typename Comparison>                                                                      \
    UCCL_EP_DEVICE void nvshmem_##name##_wait_until(const Word *ivar, Comparison comparison, uccl_ep_u64 value) {      \
        nvshmem_signal_wait_until(ivar, comparison, value);                                                            \
    }
UCCL_EP_NVSHMEM_WAIT_(uint64)
UCCL_EP_NVSHMEM_WAIT_(ulong)
UCCL_EP_NVSHMEM_WAIT_(ulonglong)

UCCL_EP_DEVICE void nvshmem_fence() {
    using namespace uccl_ep::nvshmem;
    uccl_ep::quiet(bound(), own_channel());
}
UCCL_EP_DEVICE void nvshmem_quiet() {
    uccl_ep::quiet_all(uccl_ep::nvshmem::bound());
}

/* ------------------------------------------------------------------------------------------------------ DeepEP's calls
 */

/* All lanes of the warp. The template's argument, the lane and the index of the message tell a NIC's doorbell apart,
 * which is the proxy's business here. */
template <bool kAlwaysDoPostSend = false>
UCCL_EP_DEVICE void nvshmemi_ibgda_put_nbi_warp(uccl_ep_u64 req_rptr, uccl_ep_u64 req_lptr, uccl_ep_u64 bytes,
                                                int dst_pe, int qp_id, int lane_id, int message_idx) {
    using namespace uccl_ep::nvshmem;
    (void)lane_id;
    (void)message_idx;
    uccl_ep::put_warp(bound(), channel_of(qp_id), rank_of(dst_pe), offset_of((const void *)req_lptr),
                      offset_of((const void *)req_rptr), bytes);
}

/* One thread. `value` is taken with its sign, modulo 2^64. An add to the own rank goes the same way as any other. */
template <typename Word>
UCCL_EP_DEVICE void nvshmemi_ibgda_amo_nonfetch_add(Word *rptr, const int &value, int pe, int qp_id,
                                                    bool is_local_copy = false) {
    using namespace uccl_ep::nvshmem;
    (void)is_local_copy;
    uccl_ep::signal(bound(), channel_of(qp_id), rank_of(pe), slot_of(rptr), (uccl_ep_u64)(long long)value);
}
UCCL_EP_DEVICE void nvshmemi_ibgda_quiet(int dst_pe, int qp_id) {
    using namespace uccl_ep::nvshmem;
    (void)dst_pe; /* of a channel all targets are waited for */
    uccl_ep::quiet(bound(), channel_of(qp_id));
}

/* 0: there is no direct way. */
UCCL_EP_DEVICE uccl_ep_u64 nvshmemi_get_p2p_ptr(uccl_ep_u64 ptr, int rank, int dst_rank) {
    return rank == dst_rank ? ptr : 0;
}

/* ------------------------------------------------------------------------------------------------- what is not
 * honoured */

#define UCCL_EP_NVSHMEM_NOT_(name, text)                                                                               \
    template <typename... Argument> UCCL_EP_DEVICE int name(Argument...) {                                             \
        static_assert(uccl_ep::nvshmem::never<Argument...>::value, "uccl_ep: " #name ": " text);                       \
        return 0;                                                                                                      \
    }
#define UCCL_EP_NVSHMEM_ATOMIC_TEXT_                                                                                   \
    "only signals are added to, 64-bit words of comm.signal_words: use nvshmemx_signal_op with NVSHMEM_SIGNAL_ADD"
#define UCCL_EP_NVSHMEM_FETCH_TEXT_                                                                                    \
    "nothing comes back from a target: have it add to a signal of yours (nvshmemx_signal_op), or put the value"
#define UCCL_EP_NVSHMEM_GET_TEXT_ "there are no gets: have the owner put it (nvshmem_putmem_signal_nbi) and wait"
#define UCCL_EP_NVSHMEM_P_TEXT_                                                                                        \
    "a put has its source in the heap: store the value there and use nvshmem_putmem_nbi, or count with a signal"
#define UCCL_EP_NVSHMEM_GLOBAL_TEXT_                                                                                   \
    "collectives are not for kernels: signal all ranks and wait for them, or meet on the host"

#define UCCL_EP_NVSHMEM_NOT_TYPED_(name, type)                                                                         \
    UCCL_EP_NVSHMEM_NOT_(nvshmem_##name##_p, UCCL_EP_NVSHMEM_P_TEXT_)                                                  \
    UCCL_EP_NVSHMEM_NOT_(nvshmem_##name##_g, UCCL_EP_NVSHMEM_GET_TEXT_)                                                \
    UCCL_EP_NVSHMEM_NOT_(nvshmem_##name##_get, UCCL_EP_NVSHMEM_GET_TEXT_)                                              \
    UCCL_EP_NVSHMEM_NOT_(nvshmem_##name##_get_nbi, UCCL_EP_NVSHMEM_GET_TEXT_)                                          \
    UCCL_EP_NVSHMEM_NOT_(nvshmemx_##name##_get_nbi_warp, UCCL_EP_NVSHMEM_GET_TEXT_)                                    \
    UCCL_EP_NVSHMEM_NOT_(nvshmemx_##name##_get_nbi_block, UCCL_EP_NVSHMEM_GET_TEXT_)                                   \
    UCCL_EP_NVSHMEM_NOT_(nvshmem_##name##_atomic_add, UCCL_EP_NVSHMEM_ATOMIC_TEXT_)                                    \
    UCCL_EP_NVSHMEM_NOT_(nvshmem_##name##_atomic_inc, UCCL_EP_NVSHMEM_ATOMIC_TEXT_)                                    \
    UCCL_EP_NVSHMEM_NOT_(nvshmem_##name##_atomic_set, UCCL_EP_NVSHMEM_ATOMIC_TEXT_)                                    \
    UCCL_EP_NVSHMEM_NOT_(nvshmem_##name##_atomic_and, UCCL_EP_NVSHMEM_ATOMIC_TEXT_)                                    \
    UCCL_EP_NVSHMEM_NOT_(nvshmem_##name##_atomic_or, UCCL_EP_NVSHMEM_ATOMIC_TEXT_)                                     \
    UCCL_EP_NVSHMEM_NOT_(nvshmem_##name##_atomic_xor, UCCL_EP_NVSHMEM_ATOMIC_TEXT_)                                    \
    UCCL_EP_NVSHMEM_NOT_(nvshmem_##name##_atomic_fetch, UCCL_EP_NVSHMEM_FETCH_TEXT_)                                   \
    UCCL_EP_NVSHMEM_NOT_(nvshmem_##name##_atomic_fetch_add, UCCL_EP_NVSHMEM_FETCH_TEXT_)                               \
    UCCL_EP_NVSHMEM_NOT_(nvshmem_##name##_atomic_fetch_inc, UCCL_EP_NVSHMEM_FETCH_TEXT_)                               \
    UCCL_EP_NVSHMEM_NOT_(nvshmem_##name##_atomic_swap, UCCL_EP_NVSHMEM_FETCH_TEXT_)                                    \
    UCCL_EP_NVSHMEM_NOT_(nvshmem_##name##_atomic_compare_swap, UCCL_EP_NVSHMEM_FETCH_TEXT_)
UCCL_EP_NVSHMEM_TYPES_(UCCL_EP_NVSHMEM_NOT_TYPED_)
UCCL_EP_NVSHMEM_NOT_(nvshmem_getmem, UCCL_EP_NVSHMEM_GET_TEXT_)
UCCL_EP_NVSHMEM_NOT_(nvshmem_getmem_nbi, UCCL_EP_NVSHMEM_GET_TEXT_)
UCCL_EP_NVSHMEM_NOT_(nvshmemx_getmem_nbi_warp, UCCL_EP_NVSHMEM_GET_TEXT_)
UCCL_EP_NVSHMEM_NOT_(nvshmemx_getmem_nbi_block, UCCL_EP_NVSHMEM_GET_TEXT_)
UCCL_EP_NVSHMEM_NOT_(nvshmem_barrier_all, UCCL_EP_NVSHMEM_GLOBAL_TEXT_)
UCCL_EP_NVSHMEM_NOT_(nvshmem_sync_all, UCCL_EP_NVSHMEM_GLOBAL_TEXT_)
UCCL_EP_NVSHMEM_NOT_(nvshmemi_ibgda_rma_p, UCCL_EP_NVSHMEM_P_TEXT_)

#endif
