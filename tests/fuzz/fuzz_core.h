/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_core.h: communicators under a fuzz target. The backend is linked into the program, so that its coverage is seen:
 * the empty path names the program itself to the loader.
 */
#ifndef UCCL_EP_FUZZ_CORE_H
#define UCCL_EP_FUZZ_CORE_H

#include "fuzz.h"
#include "uccl_ep/uccl_ep.h"

#define THIS_PROGRAM ""

/* Time stands still but for what a target, and every look at it, adds: a deadline is as near as one likes. */
typedef struct fuzz_clock {
    uint64_t now_ns, step_ns;
} fuzz_clock;

static inline uint64_t fuzz_now(void *context) {
    fuzz_clock *clock = context;
    return clock->now_ns += clock->step_ns;
}

/* An error has a known name, a text that ends, and is what the call returned. */
static inline void fuzz_check_error(uccl_ep_status status) {
    const uccl_ep_error *error = uccl_ep_last_error();
    FUZZ_CHECK(status < 0 && strcmp(uccl_ep_status_name(status), "unknown") != 0, "status %d", status);
    FUZZ_CHECK(error->status == status, "returned %d, recorded %d: %s", status, error->status, error->text);
    FUZZ_CHECK(memchr(error->text, 0, sizeof error->text) && error->text[0], "an error without words");
    FUZZ_CHECK(memchr(error->clause, 0, sizeof error->clause), "a clause without end");
}

/* A bootstrap of `size` ranks whose others say what `others` makes of what we said: [size] blocks of `bytes`. */
typedef struct fuzz_bootstrap {
    uint32_t rank, size, step;
    fuzz_input *in;
    void (*others)(struct fuzz_bootstrap *b, uint8_t *block, uint32_t bytes, uint32_t rank);
} fuzz_bootstrap;

static inline int fuzz_allgather(void *context, const void *mine, uint32_t bytes, void *all, uint64_t timeout_ns,
                                 char *text) {
    fuzz_bootstrap *b = context;
    (void)timeout_ns;
    (void)text;
    for (uint32_t rank = 0; rank < b->size; rank++) {
        uint8_t *block = (uint8_t *)all + (size_t)rank * bytes;
        memcpy(block, mine, bytes);
        if (rank != b->rank && b->others) b->others(b, block, bytes, rank);
    }
    b->step++;
    return 0;
}

static inline uccl_ep_bootstrap fuzz_bootstrap_of(fuzz_bootstrap *b) {
    return (uccl_ep_bootstrap){sizeof(uccl_ep_bootstrap), b->rank, b->size, b, fuzz_allgather};
}

/* Changes of a block: some bytes, words, or a stretch of it. */
static inline void fuzz_damage(fuzz_input *in, uint8_t *block, uint32_t bytes) {
    for (uint8_t n = fuzz_u8(in) % 8; n && bytes; n--) {
        const uint32_t at = fuzz_u32(in) % bytes;
        const uint8_t how = fuzz_u8(in);
        if (how % 4 == 0) {
            block[at] = fuzz_u8(in);
        } else if (how % 4 == 1) {
            block[at] ^= (uint8_t)(1u << fuzz_u8(in) % 8);
        } else if (how % 4 == 2) {
            const uint64_t value = fuzz_number(in);
            const uint32_t word = at / 4 * 4;
            memcpy(block + word, &value, bytes - word < 8 ? bytes - word : how & 4 ? 8 : 4);
        } else {
            uint8_t stretch[64];
            const size_t some = fuzz_some(in, stretch, sizeof stretch);
            memcpy(block + at, stretch, bytes - at < some ? bytes - at : some);
        }
    }
}

#endif
