/* SPDX-License-Identifier: Apache-2.0
 *
 * mailbox.h: what ranks write into each other's mailboxes, as pure functions over words.
 *
 * Everything here comes from another rank, so it is checked before it is believed. Writes are atomic in aligned 8-byte
 * words and in nothing larger, they may land in any order, and until their completion a NIC may place them once more
 * (PUT-7): each format says how it stands that.
 */
#ifndef UCCL_EP_CORE_MAILBOX_H
#define UCCL_EP_CORE_MAILBOX_H

#include <stdbool.h>
#include <stdint.h>

#define SLOT_BITS 24u /* of a signal's number: config.c allows no more signals */
#define SLOT_MASK ((1ull << SLOT_BITS) - 1)

struct record {
    uint64_t word[2];
};

/* Where heaps are staged, a record goes on: which bytes of the mirror are to be brought to the heap (staging.c). */
struct extent {
    uint64_t word[2]; /* offset; length and, in bit 0, whether the record has a signal */
};

/*
 * Numbered record: a signal among numbered operations (sequenced immediate). Read only once its own immediate is here,
 * so both words are; the number tells it from what an earlier lap left in its place. 40 bits of it: a stale record
 * would be taken for a new one after 2^40 operations in which no record came to its place, and then only if a duplicate
 * had brought it back after it was wiped.
 */
#define RECORD_NUMBER_BITS 40u

/* By words: where a NIC places payloads twice (PUT-7), it may write a record once more that was taken already. Its
 * number is then an old one. */
static inline struct record record_read(const struct record *place) {
    return (struct record){
        {__atomic_load_n(&place->word[0], __ATOMIC_RELAXED), __atomic_load_n(&place->word[1], __ATOMIC_RELAXED)}};
}

static inline void record_clear(struct record *place) {
    __atomic_store_n(&place->word[0], 0, __ATOMIC_RELAXED);
    __atomic_store_n(&place->word[1], 0, __ATOMIC_RELAXED);
}

static inline struct record record_numbered(uint64_t add, uint32_t slot, uint64_t number) {
    return (struct record){{add, number << SLOT_BITS | slot}};
}

static inline bool record_is_numbered(const struct record *r, uint64_t number) {
    return r->word[1] >> SLOT_BITS == (number & ((1ull << RECORD_NUMBER_BITS) - 1));
}

static inline uint32_t record_slot(const struct record *r) {
    return (uint32_t)(r->word[1] & SLOT_MASK);
}

/*
 * Tagged record: one signal at a time (sender hold), found by polling, so its words may be seen one by one. Both carry
 * the low 20 bits of its count; the add's 64 bits are split 44 and 20.
 */
#define TAG_BITS 20u
#define TAG_MASK ((1ull << TAG_BITS) - 1)
#define ADD_LOW_BITS (64u - TAG_BITS)

static inline struct record record_tagged(uint64_t add, uint32_t slot, uint64_t count) {
    const uint64_t tag = count & TAG_MASK;
    return (struct record){
        {add << TAG_BITS | tag, add >> ADD_LOW_BITS << (SLOT_BITS + TAG_BITS) | (uint64_t)slot << TAG_BITS | tag}};
}

static inline bool record_is_tagged(const struct record *r, uint64_t count) {
    const uint64_t tag = count & TAG_MASK;
    return (r->word[0] & TAG_MASK) == tag && (r->word[1] & TAG_MASK) == tag;
}

static inline uint64_t record_tagged_add(const struct record *r) {
    return r->word[0] >> TAG_BITS | r->word[1] >> (SLOT_BITS + TAG_BITS) << ADD_LOW_BITS;
}

static inline uint32_t record_tagged_slot(const struct record *r) {
    return (uint32_t)(r->word[1] >> TAG_BITS & SLOT_MASK);
}

/* Of either form of record: both words carry the low bits of its number, or count, and leave 44 for what they say. */
static inline struct extent extent_of(uint64_t offset, uint64_t bytes, bool signal, uint64_t number) {
    const uint64_t tag = number & TAG_MASK;
    return (struct extent){{offset << TAG_BITS | tag, bytes << (TAG_BITS + 1) | (uint64_t)signal << TAG_BITS | tag}};
}

static inline bool extent_is_of(const struct extent *x, uint64_t number) {
    const uint64_t tag = number & TAG_MASK;
    return (x->word[0] & TAG_MASK) == tag && (x->word[1] & TAG_MASK) == tag;
}

static inline uint64_t extent_offset(const struct extent *x) {
    return x->word[0] >> TAG_BITS;
}

static inline uint64_t extent_bytes(const struct extent *x) {
    return x->word[1] >> (TAG_BITS + 1);
}

static inline bool extent_signals(const struct extent *x) {
    return x->word[1] >> TAG_BITS & 1;
}

/*
 * Return word: how far the peer has come with what we sent, a count that only grows. An older one may land late, so the
 * greatest counts; one beyond what was sent is no return word. Returns whether *returned moved.
 */
static inline bool return_take(uint64_t word, uint64_t issued, uint64_t *returned) {
    const uint64_t forward = word - *returned, possible = issued - *returned;
    if (!forward || forward > possible) return false;
    *returned = word;
    return true;
}

/*
 * An immediate of `bits` low bits of a number: how far it lies ahead of `expected`, or UINT32_MAX if not within
 * `window`, which is then one that was counted already, or none of ours.
 */
static inline uint32_t immediate_ahead(uint64_t immediate, uint64_t expected, uint32_t bits, uint32_t window) {
    const uint64_t mask = bits < 64 ? (1ull << bits) - 1 : UINT64_MAX;
    const uint64_t ahead = (immediate - expected) & mask;
    return immediate <= mask && ahead < window ? (uint32_t)ahead : UINT32_MAX;
}

#endif
