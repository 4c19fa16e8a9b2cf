/* SPDX-License-Identifier: Apache-2.0
 *
 * command.h: the 16-byte command that a producer (a GPU lane or a CPU thread) hands to a proxy.
 *
 * Purpose. One codec for every compiler that meets a command: C11, C++17, CUDA, HIP, NVRTC and hiprtc. It includes
 * nothing but the integer types, and nothing at all under a run-time compiler.
 *
 * Layout. Two 64-bit words. Bit 63 of *both* is the lap parity of ring.h; the other 126 bits hold the fields of the
 * tables below. Every field lies inside one word, none is split but the two halves of SIGNAL's wide fields, so encoding
 * is shifts and encoding mistakes show as a failed static check. All bits that an operation does not use must be zero:
 * a consumer refuses a command in which they are not, which is how random bytes are told from commands.
 *
 *   PUT         op granularity local remote length target
 *   PUT_SIGNAL  the same and slot, add
 *   SIGNAL      op target, 64-bit add, 32-bit slot
 *   FLUSH       op target: takes a ticket and moves nothing. It completes when everything posted before it on the
 *               channel is complete, and makes the proxy submit what it gathers for the target without waiting.
 *
 * Units. On the wire `local`, `remote` and `length` count granules of 16 bytes (granularity 0) or 4 bytes (1); in
 * uccl_ep_command they are bytes. `slot` counts 64-bit signal words.
 *
 * Why 19 bits of length and 13 of add (the draft had 20 and 12): with these widths both words are full and no field
 * is split. The largest command moves 8 MiB less one granule, and an add of up to 8191 covers the token counts that
 * expert-parallel kernels put into a signal. What does not fit is split by the API (uccl_ep.h).
 *
 * Threads: pure functions. Errors: encode and decode return a uccl_ep_status.
 */
#ifndef UCCL_EP_COMMAND_H
#define UCCL_EP_COMMAND_H

#include "status.h"

#if defined(__CUDACC_RTC__) || defined(__HIPCC_RTC__)
typedef unsigned int uccl_ep_u32;
typedef unsigned long long uccl_ep_u64;
#else
#include <stdint.h>
typedef uint32_t uccl_ep_u32;
typedef uint64_t uccl_ep_u64;
#endif

#if defined(__CUDACC__) || defined(__HIPCC__) || defined(__CUDACC_RTC__) || defined(__HIPCC_RTC__)
#define UCCL_EP_FN static __host__ __device__ inline __attribute__((always_inline))
#else
#define UCCL_EP_FN static inline
#endif

#ifdef __cplusplus
#define UCCL_EP_STATIC_ASSERT_(condition, text) static_assert(condition, text)
#else
#define UCCL_EP_STATIC_ASSERT_(condition, text) _Static_assert(condition, text)
#endif

/* Raised when the meaning of any bit changes; stored in every ring and compared by both sides. */
#define UCCL_EP_CODEC_VERSION 1u

/* The one table of field widths: X(name, word, shift, width). */
#define UCCL_EP_FIELDS_PUT(X)                                                                                          \
    X(OP, 0, 0, 3)                                                                                                     \
    X(GRANULARITY, 0, 3, 1)                                                                                            \
    X(LOCAL, 0, 4, 32)                                                                                                 \
    X(SLOT, 0, 36, 14)                                                                                                 \
    X(ADD, 0, 50, 13)                                                                                                  \
    X(REMOTE, 1, 0, 32)                                                                                                \
    X(LENGTH, 1, 32, 19)                                                                                               \
    X(TARGET, 1, 51, 12)
/* SIGNAL shares OP and TARGET with the table above. */
#define UCCL_EP_FIELDS_SIGNAL(X)                                                                                       \
    X(ADD_LOW, 0, 4, 32)                                                                                               \
    X(SLOT_LOW, 0, 36, 16)                                                                                             \
    X(ADD_HIGH, 1, 0, 32)                                                                                              \
    X(SLOT_HIGH, 1, 32, 16)

enum {
#define UCCL_EP_FIELD_ENUM_(name, word, shift, width)                                                                  \
    UCCL_EP_##name##_WORD = (word), UCCL_EP_##name##_SHIFT = (shift), UCCL_EP_##name##_WIDTH = (width),
    UCCL_EP_FIELDS_PUT(UCCL_EP_FIELD_ENUM_) UCCL_EP_FIELDS_SIGNAL(UCCL_EP_FIELD_ENUM_)
#undef UCCL_EP_FIELD_ENUM_
        UCCL_EP_PARITY_SHIFT = 63
};

#define UCCL_EP_FIELD_MAX(name) ((1ull << UCCL_EP_##name##_WIDTH) - 1ull)
#define UCCL_EP_FIELD_MASK(name) (UCCL_EP_FIELD_MAX(name) << UCCL_EP_##name##_SHIFT)
#define UCCL_EP_FIELD_GET(word, name) (((word) >> UCCL_EP_##name##_SHIFT) & UCCL_EP_FIELD_MAX(name))
#define UCCL_EP_PARITY_BIT (1ull << UCCL_EP_PARITY_SHIFT)

/* Fields of one word do not overlap and leave only the parity bit: sum of masks == or of masks == 2^63 - 1. */
#define UCCL_EP_SUM0_(name, word, shift, width) +((word) == 0 ? UCCL_EP_FIELD_MASK(name) : 0ull)
#define UCCL_EP_SUM1_(name, word, shift, width) +((word) == 1 ? UCCL_EP_FIELD_MASK(name) : 0ull)
#define UCCL_EP_OR0_(name, word, shift, width) | ((word) == 0 ? UCCL_EP_FIELD_MASK(name) : 0ull)
#define UCCL_EP_OR1_(name, word, shift, width) | ((word) == 1 ? UCCL_EP_FIELD_MASK(name) : 0ull)
#define UCCL_EP_PUT_WORD0_MASK (0ull UCCL_EP_FIELDS_PUT(UCCL_EP_OR0_))
#define UCCL_EP_PUT_WORD1_MASK (0ull UCCL_EP_FIELDS_PUT(UCCL_EP_OR1_))
#define UCCL_EP_SIGNAL_WORD0_MASK (UCCL_EP_FIELD_MASK(OP) UCCL_EP_FIELDS_SIGNAL(UCCL_EP_OR0_))
#define UCCL_EP_SIGNAL_WORD1_MASK (UCCL_EP_FIELD_MASK(TARGET) UCCL_EP_FIELDS_SIGNAL(UCCL_EP_OR1_))
UCCL_EP_STATIC_ASSERT_((0ull UCCL_EP_FIELDS_PUT(UCCL_EP_SUM0_)) == UCCL_EP_PARITY_BIT - 1ull, "put word 0 is full");
UCCL_EP_STATIC_ASSERT_((0ull UCCL_EP_FIELDS_PUT(UCCL_EP_SUM1_)) == UCCL_EP_PARITY_BIT - 1ull, "put word 1 is full");
UCCL_EP_STATIC_ASSERT_(UCCL_EP_PUT_WORD0_MASK == UCCL_EP_PARITY_BIT - 1ull, "put fields of word 0 do not overlap");
UCCL_EP_STATIC_ASSERT_(UCCL_EP_PUT_WORD1_MASK == UCCL_EP_PARITY_BIT - 1ull, "put fields of word 1 do not overlap");
UCCL_EP_STATIC_ASSERT_((UCCL_EP_FIELD_MASK(OP) UCCL_EP_FIELDS_SIGNAL(UCCL_EP_SUM0_)) == UCCL_EP_SIGNAL_WORD0_MASK,
                       "signal fields of word 0 do not overlap");
UCCL_EP_STATIC_ASSERT_((UCCL_EP_FIELD_MASK(TARGET) UCCL_EP_FIELDS_SIGNAL(UCCL_EP_SUM1_)) == UCCL_EP_SIGNAL_WORD1_MASK,
                       "signal fields of word 1 do not overlap");

typedef enum uccl_ep_op {
    UCCL_EP_OP_INVALID = 0,
    UCCL_EP_OP_PUT = 1,
    UCCL_EP_OP_SIGNAL = 2,
    UCCL_EP_OP_PUT_SIGNAL = 3,
    UCCL_EP_OP_FLUSH = 4,
    UCCL_EP_OP_EXT = 7 /* reserved: the next slot continues this command; refused by codec version 1 */
} uccl_ep_op;

#define UCCL_EP_MAX_RANKS (1u << UCCL_EP_TARGET_WIDTH)
#define UCCL_EP_MAX_GRANULES_PER_COMMAND ((uccl_ep_u32)UCCL_EP_FIELD_MAX(LENGTH))
#define UCCL_EP_GRANULARITY_COARSE 16u
#define UCCL_EP_GRANULARITY_FINE 4u
/* Bytes that a command at this granularity can address or move. */
#define UCCL_EP_MAX_HEAP_BYTES(granularity) ((1ull << UCCL_EP_LOCAL_WIDTH) * (granularity))
#define UCCL_EP_MAX_COMMAND_BYTES(granularity) ((uccl_ep_u64)UCCL_EP_MAX_GRANULES_PER_COMMAND * (granularity))

/* A command in its plain form. */
typedef struct uccl_ep_command {
    uccl_ep_u32 op;          /* uccl_ep_op */
    uccl_ep_u32 target;      /* rank */
    uccl_ep_u64 local;       /* PUT*: bytes from the start of the own heap */
    uccl_ep_u64 remote;      /* PUT*: bytes from the start of the target's heap */
    uccl_ep_u64 add;         /* *SIGNAL: added modulo 2^64 to the signal word */
    uccl_ep_u32 bytes;       /* PUT*: 0 .. UCCL_EP_MAX_COMMAND_BYTES */
    uccl_ep_u32 slot;        /* *SIGNAL: index of the signal word */
    uccl_ep_u32 granularity; /* PUT*: 16 or 4, the unit of local, remote and bytes */
    uccl_ep_u32 reserved;    /* zero */
} uccl_ep_command;
UCCL_EP_STATIC_ASSERT_(sizeof(uccl_ep_command) == 48, "uccl_ep_command is part of the ABI");

typedef struct uccl_ep_words {
    uccl_ep_u64 word[2]; /* parity bits clear */
} uccl_ep_words;

UCCL_EP_FN uccl_ep_u32 uccl_ep_op_has_put(uccl_ep_u32 op) {
    return op == UCCL_EP_OP_PUT || op == UCCL_EP_OP_PUT_SIGNAL;
}
UCCL_EP_FN uccl_ep_u32 uccl_ep_op_has_signal(uccl_ep_u32 op) {
    return op == UCCL_EP_OP_SIGNAL || op == UCCL_EP_OP_PUT_SIGNAL;
}

/*
 * Encode `command`. Returns OK, E_INVALID (operation, granularity, a field set that the operation has not), E_ALIGNMENT
 * or E_RANGE (a field is too small). On an error *words is not written: a value is never truncated.
 */
UCCL_EP_FN uccl_ep_status uccl_ep_encode(const uccl_ep_command *command, uccl_ep_words *words) {
    const uccl_ep_u32 op = command->op;
    if (command->target > UCCL_EP_FIELD_MAX(TARGET)) return UCCL_EP_E_RANGE;
    if (command->reserved) return UCCL_EP_E_INVALID;
    uccl_ep_u64 w0 = (uccl_ep_u64)op << UCCL_EP_OP_SHIFT;
    uccl_ep_u64 w1 = (uccl_ep_u64)command->target << UCCL_EP_TARGET_SHIFT;
    if (!uccl_ep_op_has_signal(op) && (command->add || command->slot)) return UCCL_EP_E_INVALID;
    if (uccl_ep_op_has_put(op)) {
        const uccl_ep_u32 granularity = command->granularity;
        if (granularity != UCCL_EP_GRANULARITY_COARSE && granularity != UCCL_EP_GRANULARITY_FINE)
            return UCCL_EP_E_INVALID;
        if ((command->local | command->remote | command->bytes) & (granularity - 1u)) return UCCL_EP_E_ALIGNMENT;
        const uccl_ep_u64 local = command->local / granularity;
        const uccl_ep_u64 remote = command->remote / granularity;
        const uccl_ep_u64 length = command->bytes / granularity;
        if (local > UCCL_EP_FIELD_MAX(LOCAL) || remote > UCCL_EP_FIELD_MAX(REMOTE) ||
            length > UCCL_EP_FIELD_MAX(LENGTH) || command->add > UCCL_EP_FIELD_MAX(ADD) ||
            command->slot > UCCL_EP_FIELD_MAX(SLOT))
            return UCCL_EP_E_RANGE;
        w0 |= (uccl_ep_u64)(granularity == UCCL_EP_GRANULARITY_FINE) << UCCL_EP_GRANULARITY_SHIFT;
        w0 |= local << UCCL_EP_LOCAL_SHIFT;
        w0 |= (uccl_ep_u64)command->slot << UCCL_EP_SLOT_SHIFT;
        w0 |= command->add << UCCL_EP_ADD_SHIFT;
        w1 |= remote << UCCL_EP_REMOTE_SHIFT;
        w1 |= length << UCCL_EP_LENGTH_SHIFT;
    } else {
        if (command->local || command->remote || command->bytes || command->granularity) return UCCL_EP_E_INVALID;
        if (op == UCCL_EP_OP_SIGNAL) {
            w0 |= (command->add & UCCL_EP_FIELD_MAX(ADD_LOW)) << UCCL_EP_ADD_LOW_SHIFT;
            w1 |= (command->add >> UCCL_EP_ADD_LOW_WIDTH) << UCCL_EP_ADD_HIGH_SHIFT;
            w0 |= (command->slot & UCCL_EP_FIELD_MAX(SLOT_LOW)) << UCCL_EP_SLOT_LOW_SHIFT;
            w1 |= ((uccl_ep_u64)command->slot >> UCCL_EP_SLOT_LOW_WIDTH) << UCCL_EP_SLOT_HIGH_SHIFT;
        } else if (op != UCCL_EP_OP_FLUSH) {
            return UCCL_EP_E_INVALID;
        }
    }
    words->word[0] = w0;
    words->word[1] = w1;
    return UCCL_EP_OK;
}

/* The target of any two words, also of malformed ones: a refusal then costs (channel, target) only (ERR-4). */
UCCL_EP_FN uccl_ep_u32 uccl_ep_decode_target(uccl_ep_u64 word1) {
    return (uccl_ep_u32)UCCL_EP_FIELD_GET(word1, TARGET);
}

/*
 * Decode two words, whose parity bits are ignored. Returns OK or E_MALFORMED (an unknown operation, or a bit set that
 * the operation does not use); the command is written in both cases, with `op` and `target` valid. Nothing is known yet
 * about offsets and slots: the consumer compares them with the heap and the signal array.
 *
 * The functions before it are its parts, for a consumer that has looked at the operation and, of a put, at the
 * granularity field `fine`: shifts by constants are cheaper. Each writes what it is named after and leaves the rest as
 * it was.
 */
UCCL_EP_FN void uccl_ep_decode_put(uccl_ep_u64 word0, uccl_ep_u64 word1, uccl_ep_u32 fine, uccl_ep_command *command) {
    const uccl_ep_u32 shift = fine ? 2u : 4u;
    command->local = UCCL_EP_FIELD_GET(word0, LOCAL) << shift;
    command->remote = UCCL_EP_FIELD_GET(word1, REMOTE) << shift;
    command->bytes = (uccl_ep_u32)UCCL_EP_FIELD_GET(word1, LENGTH) << shift;
    command->granularity = 1u << shift;
}

/* Of a PUT_SIGNAL. In a PUT, UCCL_EP_PUT_UNUSED tells bits that must be zero. */
UCCL_EP_FN void uccl_ep_decode_put_signal(uccl_ep_u64 word0, uccl_ep_command *command) {
    command->slot = (uccl_ep_u32)UCCL_EP_FIELD_GET(word0, SLOT);
    command->add = UCCL_EP_FIELD_GET(word0, ADD);
}
#define UCCL_EP_PUT_UNUSED (UCCL_EP_FIELD_MASK(SLOT) | UCCL_EP_FIELD_MASK(ADD)) /* of word 0 */

UCCL_EP_FN uccl_ep_status uccl_ep_decode_signal(uccl_ep_u64 word0, uccl_ep_u64 word1, uccl_ep_command *command) {
    const uccl_ep_u64 unused0 = ~(UCCL_EP_SIGNAL_WORD0_MASK | UCCL_EP_PARITY_BIT);
    const uccl_ep_u64 unused1 = ~(UCCL_EP_SIGNAL_WORD1_MASK | UCCL_EP_PARITY_BIT);
    command->add = UCCL_EP_FIELD_GET(word0, ADD_LOW) | UCCL_EP_FIELD_GET(word1, ADD_HIGH) << UCCL_EP_ADD_LOW_WIDTH;
    command->slot = (uccl_ep_u32)(UCCL_EP_FIELD_GET(word0, SLOT_LOW) | UCCL_EP_FIELD_GET(word1, SLOT_HIGH)
                                                                           << UCCL_EP_SLOT_LOW_WIDTH);
    return (word0 & unused0) || (word1 & unused1) ? UCCL_EP_E_MALFORMED : UCCL_EP_OK;
}

UCCL_EP_FN uccl_ep_status uccl_ep_decode_flush(uccl_ep_u64 word0, uccl_ep_u64 word1) {
    const uccl_ep_u64 unused0 = ~(UCCL_EP_FIELD_MASK(OP) | UCCL_EP_PARITY_BIT);
    const uccl_ep_u64 unused1 = ~(UCCL_EP_FIELD_MASK(TARGET) | UCCL_EP_PARITY_BIT);
    return (word0 & unused0) || (word1 & unused1) ? UCCL_EP_E_MALFORMED : UCCL_EP_OK;
}

UCCL_EP_FN uccl_ep_status uccl_ep_decode(uccl_ep_u64 word0, uccl_ep_u64 word1, uccl_ep_command *command) {
    const uccl_ep_u32 op = (uccl_ep_u32)UCCL_EP_FIELD_GET(word0, OP);
    const uccl_ep_u32 fine = (uccl_ep_u32)UCCL_EP_FIELD_GET(word0, GRANULARITY);
    command->op = op;
    command->target = uccl_ep_decode_target(word1);
    command->local = command->remote = command->add = 0;
    command->bytes = command->slot = command->granularity = command->reserved = 0;
    if (uccl_ep_op_has_put(op)) {
        uccl_ep_decode_put(word0, word1, fine, command);
        uccl_ep_decode_put_signal(word0, command);
        return op == UCCL_EP_OP_PUT && word0 & UCCL_EP_PUT_UNUSED ? UCCL_EP_E_MALFORMED : UCCL_EP_OK;
    }
    if (op == UCCL_EP_OP_SIGNAL) return uccl_ep_decode_signal(word0, word1, command);
    if (op == UCCL_EP_OP_FLUSH) return uccl_ep_decode_flush(word0, word1);
    return UCCL_EP_E_MALFORMED;
}

#endif
