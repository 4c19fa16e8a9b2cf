/* SPDX-License-Identifier: Apache-2.0
 *
 * What another rank writes into this one's mailbox: records, return words, immediates, as words of any value.
 */
#include "core/mailbox.h"
#include "fuzz.h"

static void check_records(fuzz_input *in) {
    struct record r;
    fuzz_fill(in, &r, sizeof r);
    const uint64_t count = fuzz_number(in), number = fuzz_number(in), add = fuzz_number(in);
    const uint32_t slot = (uint32_t)(fuzz_number(in) & SLOT_MASK);

    /* What is believed is what an encoder writes, bit by bit: nothing else means the same. */
    if (record_is_tagged(&r, count)) {
        const struct record again = record_tagged(record_tagged_add(&r), record_tagged_slot(&r), count);
        FUZZ_CHECK(!memcmp(&r, &again, sizeof r), "tagged %" PRIx64, count);
    }
    if (record_is_numbered(&r, number)) {
        const struct record again = record_numbered(r.word[0], record_slot(&r), number);
        FUZZ_CHECK(!memcmp(&r, &again, sizeof r), "numbered %" PRIx64, number);
    }
    const struct record tagged = record_tagged(add, slot, count), numbered = record_numbered(add, slot, number);
    FUZZ_CHECK(record_is_tagged(&tagged, count) && record_tagged_add(&tagged) == add &&
                   record_tagged_slot(&tagged) == slot,
               "tagged %" PRIx64 " to %u", add, slot);
    FUZZ_CHECK(record_is_numbered(&numbered, number) && numbered.word[0] == add && record_slot(&numbered) == slot,
               "numbered %" PRIx64 " to %u", number, slot);
    /* One that is not this one, as far as its tag or number tells. */
    FUZZ_CHECK(record_is_tagged(&tagged, number) == !((number ^ count) & TAG_MASK), "%" PRIx64 " %" PRIx64, count,
               number);
    FUZZ_CHECK(record_is_numbered(&numbered, count) == !((number ^ count) << (64 - RECORD_NUMBER_BITS)),
               "%" PRIx64 " %" PRIx64, count, number);
    struct extent x;
    fuzz_fill(in, &x, sizeof x);
    if (extent_is_of(&x, count)) {
        const struct extent again = extent_of(extent_offset(&x), extent_bytes(&x), extent_signals(&x), count);
        FUZZ_CHECK(!memcmp(&x, &again, sizeof x), "extent %" PRIx64, count);
    }
    const uint64_t offset = add >> TAG_BITS, bytes = number >> (TAG_BITS + 1);
    const struct extent made = extent_of(offset, bytes, slot & 1, count);
    FUZZ_CHECK(extent_is_of(&made, count) && extent_offset(&made) == offset && extent_bytes(&made) == bytes &&
                   extent_signals(&made) == (slot & 1),
               "extent of %" PRIx64 " bytes at %" PRIx64, bytes, offset);
    /* Half of one and half of another, as a reader may see it while it lands. */
    const struct record torn = {{tagged.word[0], r.word[1]}};
    if (record_is_tagged(&torn, count))
        FUZZ_CHECK((r.word[1] & TAG_MASK) == (count & TAG_MASK), "half a record was believed");
}

/* Whatever comes, the count moves forward only, and never beyond what was sent; what is new and possible is taken. */
static void check_returns(fuzz_input *in) {
    uint64_t issued = fuzz_number(in), returned = issued;
    while (fuzz_left(in)) {
        const uint8_t how = fuzz_u8(in);
        if (how < 64) issued += how;
        const uint64_t word = how < 128 ? returned + how - 32 : how < 224 ? issued - (how - 160u) : fuzz_u64(in);
        const uint64_t before = returned;
        const bool possible = word - before <= issued - before, moved = return_take(word, issued, &returned);
        FUZZ_CHECK(moved == (word != before && possible), "word %" PRIu64 " at %" PRIu64 " of %" PRIu64, word, before,
                   issued);
        FUZZ_CHECK(returned == (moved ? word : before) && returned - before <= issued - before, "%" PRIu64, returned);
    }
}

static void check_immediate(fuzz_input *in) {
    const uint64_t immediate = fuzz_number(in), expected = fuzz_number(in);
    const uint32_t bits = 24 + fuzz_below(in, 41), window = 1 + fuzz_below(in, 256), ahead = fuzz_below(in, 512);
    const uint64_t mask = bits < 64 ? (1ull << bits) - 1 : UINT64_MAX;
    FUZZ_CHECK(immediate_ahead((expected + ahead) & mask, expected, bits, window) ==
                   (ahead < window ? ahead : UINT32_MAX),
               "%u ahead, window %u, %u bits", ahead, window, bits);
    const uint32_t got = immediate_ahead(immediate, expected, bits, window);
    if (got != UINT32_MAX) FUZZ_CHECK(got < window && ((expected + got) & mask) == immediate, "%u ahead", got);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = fuzz_begin(data, size);
    const uint8_t what = fuzz_u8(&in) % 3;
    if (what == 0) check_records(&in);
    if (what == 1) check_returns(&in);
    if (what == 2) check_immediate(&in);
    return 0;
}
