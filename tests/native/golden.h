/* SPDX-License-Identifier: Apache-2.0
 *
 * golden.h: the operations whose queue entries are kept (tests/native/golden): the program that has a vendor's library
 * write them (tests/system/golden.c) and the test of what the lab reads in them (test_lab_golden.c) share this table.
 *
 * Addresses are chosen, and those of every row and piece are others, so that one that is mistaken for another shows.
 */
#ifndef UCCL_EP_GOLDEN_H
#define UCCL_EP_GOLDEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define GOLDEN_MEMORY 0x210000000000ull          /* what is sent; where nothing else is mapped */
#define GOLDEN_SINK (GOLDEN_MEMORY + (1u << 20)) /* what is received, read or fetched */
#define GOLDEN_REMOTE (GOLDEN_MEMORY + (2u << 20))
#define GOLDEN_BYTES (3u << 20)
#define GOLDEN_PIECES 6u
#define GOLDEN_ADDEND 0x0123456789abcdefull /* and the row's number */
#define GOLDEN_COMPARE 0xfedcba9876543210ull
#define GOLDEN_QKEY 0x11111u

enum golden_kind {
    GOLDEN_WRITE,
    GOLDEN_WRITE_IMM,
    GOLDEN_READ,
    GOLDEN_ADD,
    GOLDEN_SWAP,
    GOLDEN_SEND,
    GOLDEN_SEND_IMM,
    GOLDEN_RECEIVE
};

enum golden_flags {
    GOLDEN_INLINE = 1,
    GOLDEN_QUIET = 2, /* no completion */
    GOLDEN_FENCE = 4,
    GOLDEN_SOLICITED = 8,
    GOLDEN_EFA3 = 16 /* of EFAs, those from the third generation on; the rest of the flags is of no EFA's */
};

struct golden {
    const char *name;
    enum golden_kind kind;
    uint32_t flags;
    uint32_t length[GOLDEN_PIECES]; /* of pieces; of one that is inline: of all */
};

static const struct golden golden_table[] = {
    {"write-1", GOLDEN_WRITE, 0, {1}},
    {"write-8", GOLDEN_WRITE, 0, {8}},
    {"write-4096", GOLDEN_WRITE, 0, {4096}},
    {"write-262144", GOLDEN_WRITE, 0, {262144}},
    {"write-pieces-2", GOLDEN_WRITE, 0, {100, 200}},
    {"write-pieces-6", GOLDEN_WRITE, 0, {1, 20, 300, 4000, 5, 60}},
    {"write-inline-1", GOLDEN_WRITE, GOLDEN_INLINE | GOLDEN_EFA3, {1}},
    {"write-inline-12", GOLDEN_WRITE, GOLDEN_INLINE | GOLDEN_EFA3, {12}},
    {"write-inline-13", GOLDEN_WRITE, GOLDEN_INLINE | GOLDEN_EFA3, {13}},
    {"write-inline-80", GOLDEN_WRITE, GOLDEN_INLINE | GOLDEN_EFA3, {80}},
    {"write-inline-96", GOLDEN_WRITE, GOLDEN_INLINE, {96}},
    {"write-quiet", GOLDEN_WRITE, GOLDEN_QUIET, {64}},
    {"write-fence", GOLDEN_WRITE, GOLDEN_FENCE, {64}},
    {"write-imm", GOLDEN_WRITE_IMM, 0, {512}},
    {"write-imm-solicited", GOLDEN_WRITE_IMM, GOLDEN_SOLICITED, {512}},
    {"write-imm-inline", GOLDEN_WRITE_IMM, GOLDEN_INLINE | GOLDEN_EFA3, {16}},
    {"write-imm-quiet-fence", GOLDEN_WRITE_IMM, GOLDEN_QUIET | GOLDEN_FENCE, {8}},
    {"read-8", GOLDEN_READ, 0, {8}},
    {"read-65536", GOLDEN_READ, 0, {65536}},
    {"read-pieces-2", GOLDEN_READ, 0, {24, 1000}},
    {"read-quiet-fence", GOLDEN_READ, GOLDEN_QUIET | GOLDEN_FENCE, {128}},
    {"add", GOLDEN_ADD, 0, {8}},
    {"add-quiet", GOLDEN_ADD, GOLDEN_QUIET, {8}},
    {"add-fence", GOLDEN_ADD, GOLDEN_FENCE, {8}},
    {"swap", GOLDEN_SWAP, 0, {8}},
    {"swap-quiet", GOLDEN_SWAP, GOLDEN_QUIET, {8}},
    {"send-16", GOLDEN_SEND, 0, {16}},
    {"send-4096", GOLDEN_SEND, 0, {4096}},
    {"send-pieces-2", GOLDEN_SEND, 0, {17, 31}},
    {"send-inline-32", GOLDEN_SEND, GOLDEN_INLINE, {32}},
    {"send-solicited-quiet", GOLDEN_SEND, GOLDEN_SOLICITED | GOLDEN_QUIET, {64}},
    {"send-imm", GOLDEN_SEND_IMM, 0, {256}},
    {"send-imm-inline", GOLDEN_SEND_IMM, GOLDEN_INLINE, {5}},
    {"receive", GOLDEN_RECEIVE, 0, {8192}},
    {"receive-pieces-2", GOLDEN_RECEIVE, 0, {4096, 4096}},
    {"receive-pieces-4", GOLDEN_RECEIVE, 0, {1000, 2000, 3000, 4000}},
};
#define GOLDEN_ROWS (sizeof golden_table / sizeof *golden_table)

static inline uint32_t golden_pieces(const struct golden *g) {
    uint32_t n = 0;
    while (n < GOLDEN_PIECES && g->length[n]) n++;
    return n;
}

/* Can a NIC of this kind do it? */
static inline bool golden_applies(const struct golden *g, const char *variant) {
    if (strncmp(variant, "efa", 3)) return true;
    if (g->kind == GOLDEN_ADD || g->kind == GOLDEN_SWAP || g->flags & (GOLDEN_QUIET | GOLDEN_FENCE | GOLDEN_SOLICITED))
        return false;
    if (g->flags & GOLDEN_EFA3) return variant[3] >= '3';
    if (g->flags & GOLDEN_INLINE) return g->kind == GOLDEN_SEND || g->kind == GOLDEN_SEND_IMM;
    if (g->kind == GOLDEN_SEND || g->kind == GOLDEN_SEND_IMM || g->kind == GOLDEN_RECEIVE) return golden_pieces(g) <= 2;
    return golden_pieces(g) == 1;
}

static inline bool golden_takes_receive(const struct golden *g) {
    return g->kind == GOLDEN_SEND || g->kind == GOLDEN_SEND_IMM || g->kind == GOLDEN_WRITE_IMM;
}

static inline uint64_t golden_number(const struct golden *g) {
    return (uint64_t)(g - golden_table);
}

static inline uint64_t golden_address(const struct golden *g, uint32_t piece) {
    const bool sink =
        g->kind == GOLDEN_RECEIVE || g->kind == GOLDEN_READ || g->kind == GOLDEN_ADD || g->kind == GOLDEN_SWAP;
    return (sink ? GOLDEN_SINK : GOLDEN_MEMORY) + piece * 16384u + golden_number(g) * 64 + 8;
}

static inline uint64_t golden_remote(const struct golden *g) {
    return GOLDEN_REMOTE + golden_number(g) * 8;
}

/* As it is handed to the library: in the order of the network. */
static inline void golden_immediate(const struct golden *g, uint8_t bytes[4]) {
    const uint8_t number = (uint8_t)golden_number(g);
    memcpy(bytes, (const uint8_t[4]){0xa1, 0xb2, number, (uint8_t)~number}, 4);
}

/* What is in the memory that is sent. */
static inline uint8_t golden_byte(uint64_t address) {
    return (uint8_t)(address * 7 + (address >> 8) * 13 + 1);
}

#endif
