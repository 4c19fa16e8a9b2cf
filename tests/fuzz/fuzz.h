/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz.h: what every fuzz target shares: bytes taken from an input, checks.
 *
 * A target is one function, LLVMFuzzerTestOneInput, and its file: clang links it with libFuzzer, any other compiler
 * with replay.c. A target is a function of its input: no time, no seed, nothing kept from one input to the next that
 * could change what the next one does.
 */
#ifndef UCCL_EP_FUZZ_H
#define UCCL_EP_FUZZ_H

#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define FUZZ_CHECK(condition, ...)                                                                                     \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s: not true: %s: ", __FILE__, __LINE__, __func__, #condition);                    \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fputc('\n', stderr);                                                                                       \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

/* Past its end an input goes on with zeros. */
typedef struct fuzz_input {
    const uint8_t *at, *end;
} fuzz_input;

static inline fuzz_input fuzz_begin(const uint8_t *data, size_t size) {
    return (fuzz_input){data, data + size};
}

static inline size_t fuzz_left(const fuzz_input *in) {
    return (size_t)(in->end - in->at);
}

static inline void fuzz_fill(fuzz_input *in, void *out, size_t bytes) {
    const size_t n = bytes < fuzz_left(in) ? bytes : fuzz_left(in);
    memset(out, 0, bytes);
    if (n) memcpy(out, in->at, n);
    in->at += n;
}

static inline uint64_t fuzz_u64(fuzz_input *in) {
    uint64_t value;
    fuzz_fill(in, &value, sizeof value);
    return value;
}
static inline uint32_t fuzz_u32(fuzz_input *in) {
    uint32_t value;
    fuzz_fill(in, &value, sizeof value);
    return value;
}
static inline uint8_t fuzz_u8(fuzz_input *in) {
    uint8_t value;
    fuzz_fill(in, &value, sizeof value);
    return value;
}
static inline uint32_t fuzz_below(fuzz_input *in, uint32_t limit) {
    return limit <= 256 ? fuzz_u8(in) % limit : fuzz_u32(in) % limit;
}

/* A number of any size, small ones and those around powers of two more often than chance would have them. */
static inline uint64_t fuzz_number(fuzz_input *in) {
    const uint8_t how = fuzz_u8(in);
    if (how < 128) return how % 32;
    if (how < 192) return (1ull << how % 64) + fuzz_u8(in) - 128u;
    return fuzz_u64(in);
}

/* Some bytes: their number comes first. */
static inline size_t fuzz_some(fuzz_input *in, void *out, size_t room) {
    size_t n = fuzz_u8(in) | (size_t)fuzz_u8(in) << 8;
    if (n > room) n %= room + 1;
    fuzz_fill(in, out, n);
    return n;
}

/* A string of less than `room` bytes. */
static inline const char *fuzz_string(fuzz_input *in, char *out, size_t room) {
    size_t n = fuzz_u8(in) | (size_t)fuzz_u8(in) << 8;
    if (n >= room) n %= room;
    if (n > fuzz_left(in)) n = fuzz_left(in);
    fuzz_fill(in, out, n);
    out[n] = 0;
    return out;
}

#endif
