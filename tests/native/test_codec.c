/* SPDX-License-Identifier: Apache-2.0
 *
 * test_codec.c: the 16-byte command never changes its meaning on the way, and nothing else is taken for a command.
 *
 * The layout, the limits and the statuses are written here a second time, as numbers: the test does not use the tables
 * that it checks, and a change of the wire format fails it (raise UCCL_EP_CODEC_VERSION then).
 */
#include "testing.h"
#include <stddef.h>
#include <uccl_ep/command.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define ALL 0x7fffffffffffffffull /* all bits of a word but the parity */

/* Words that hold no command's bits: a refused encode must leave them. */
static const uccl_ep_words untouched = {{0xa5a5a5a5a5a5a5a5ull, 0x5a5a5a5a5a5a5a5aull}};

/* The bits that a field occupies in both words. */
typedef struct bits {
    uint64_t word[2];
} bits;

typedef struct field {
    const char *name;
    size_t offset, size; /* in uccl_ep_command */
    int in_granules;
    uint64_t max; /* in units of the wire */
    bits mask;
} field;

#define FIELD(name, in_granules, max, mask0, mask1)                                                                    \
    {                                                                                                                  \
#name, offsetof(uccl_ep_command, name), sizeof(((uccl_ep_command *)0)->name), in_granules, max, {              \
            { (mask0), (mask1) }                                                                                       \
        }                                                                                                              \
    }

static const field put_signal_fields[] = {
    FIELD(target, 0, 4095, 0, 0x7ff8000000000000ull),       FIELD(local, 1, 0xffffffff, 0x0000000ffffffff0ull, 0),
    FIELD(remote, 1, 0xffffffff, 0, 0x00000000ffffffffull), FIELD(bytes, 1, 0x7ffff, 0, 0x0007ffff00000000ull),
    FIELD(slot, 0, 0x3fff, 0x0003fff000000000ull, 0),       FIELD(add, 0, 0x1fff, 0x7ffc000000000000ull, 0)};
static const field put_fields[] = {
    FIELD(target, 0, 4095, 0, 0x7ff8000000000000ull), FIELD(local, 1, 0xffffffff, 0x0000000ffffffff0ull, 0),
    FIELD(remote, 1, 0xffffffff, 0, 0x00000000ffffffffull), FIELD(bytes, 1, 0x7ffff, 0, 0x0007ffff00000000ull)};
static const field signal_fields[] = {FIELD(target, 0, 4095, 0, 0x7ff8000000000000ull),
                                      FIELD(slot, 0, 0xffffffff, 0x000ffff000000000ull, 0x0000ffff00000000ull),
                                      FIELD(add, 0, UINT64_MAX, 0x0000000ffffffff0ull, 0x00000000ffffffffull)};
static const field flush_fields[] = {FIELD(target, 0, 4095, 0, 0x7ff8000000000000ull)};

/* Every field there is, to set one that an operation has not. */
static const field any_fields[] = {
    FIELD(target, 0, 0, 0, 0), FIELD(local, 0, 0, 0, 0), FIELD(remote, 0, 0, 0, 0),      FIELD(bytes, 0, 0, 0, 0),
    FIELD(slot, 0, 0, 0, 0),   FIELD(add, 0, 0, 0, 0),   FIELD(granularity, 0, 0, 0, 0), FIELD(reserved, 0, 0, 0, 0)};

typedef struct operation {
    uint32_t op;
    int has_put;
    const field *fields;
    size_t count;
} operation;

static const operation operations[] = {{1, 1, put_fields, COUNT(put_fields)},
                                       {2, 0, signal_fields, COUNT(signal_fields)},
                                       {3, 1, put_signal_fields, COUNT(put_signal_fields)},
                                       {4, 0, flush_fields, COUNT(flush_fields)}};
static const uint32_t granularities[] = {16, 4};

static uint64_t get(const uccl_ep_command *command, const field *f) {
    if (f->size == 8) {
        uint64_t value;
        memcpy(&value, (const char *)command + f->offset, 8);
        return value;
    }
    uint32_t value;
    memcpy(&value, (const char *)command + f->offset, 4);
    return value;
}

static void set(uccl_ep_command *command, const field *f, uint64_t value) {
    const uint32_t low = (uint32_t)value;
    memcpy((char *)command + f->offset, f->size == 8 ? (const void *)&value : (const void *)&low, f->size);
}

static uint64_t unit_of(const uccl_ep_command *command, const field *f) {
    return f->in_granules ? command->granularity : 1;
}

static const operation *operation_of(uint32_t op) {
    for (size_t i = 0; i < COUNT(operations); i++) {
        if (operations[i].op == op) return &operations[i];
    }
    return NULL;
}

static int has_field(const operation *o, const field *f) {
    for (size_t i = 0; i < o->count; i++) {
        if (o->fields[i].offset == f->offset) return 1;
    }
    return 0;
}

/* What encode must say, from the header's words. Bit i set: status -7000 - i is a right answer; 0: it must be OK. */
static unsigned refusals(const uccl_ep_command *command) {
    const unsigned invalid = 1u << 1, range = 1u << 2, alignment = 1u << 3;
    unsigned answers = command->target > 4095 ? range : 0;
    const operation *o = operation_of(command->op);
    if (!o) return answers | invalid;
    for (size_t i = 0; i < COUNT(any_fields); i++) {
        const field *f = &any_fields[i];
        const int granularity = f->offset == offsetof(uccl_ep_command, granularity);
        if (granularity && o->has_put) continue;
        if (!has_field(o, f) && get(command, f)) answers |= invalid;
    }
    if (o->has_put && command->granularity != 16 && command->granularity != 4) return answers | invalid;
    for (size_t i = 0; i < o->count; i++) {
        const field *f = &o->fields[i];
        const uint64_t unit = unit_of(command, f), value = get(command, f);
        if (value % unit) answers |= alignment;
        if (value / unit > f->max) answers |= range;
    }
    return answers;
}

static int same(const uccl_ep_command *a, const uccl_ep_command *b) {
    return memcmp(a, b, sizeof(*a)) == 0;
}

/* Decode into memory that held other things before: every member is written, whatever comes. */
static uccl_ep_status decode(uint64_t word0, uint64_t word1, uccl_ep_command *command) {
    uccl_ep_command other;
    memset(command, 0x00, sizeof(*command));
    memset(&other, 0xff, sizeof(other));
    const uccl_ep_status status = uccl_ep_decode(word0, word1, command);
    CHECK_EQ(uccl_ep_decode(word0, word1, &other), status);
    CHECK(same(command, &other), "decode of %016" PRIx64 " %016" PRIx64 " leaves members as they were", word0, word1);
    CHECK_EQ(command->op, word0 & 7);
    CHECK_EQ(command->target, (word1 >> 51) & 4095);
    CHECK_EQ(uccl_ep_decode_target(word1), command->target);
    return status;
}

#define SHOW                                                                                                           \
    "op %u target %u local %" PRIu64 " remote %" PRIu64 " add %" PRIu64 " bytes %u slot %u granularity %u reserved %u"
#define SHOWN(c)                                                                                                       \
    (c)->op, (c)->target, (c)->local, (c)->remote, (c)->add, (c)->bytes, (c)->slot, (c)->granularity, (c)->reserved

/* Encode as the rules say: a round trip that changes nothing, or a right refusal that writes nothing. 1 if encoded. */
static int check_encode(const uccl_ep_command *command, uccl_ep_words *words) {
    uccl_ep_command copy = *command, back;
    *words = untouched;
    const uccl_ep_status status = uccl_ep_encode(&copy, words);
    CHECK(same(&copy, command), "encode changed its input: " SHOW, SHOWN(command));
    const unsigned answers = refusals(command);
    if (status != UCCL_EP_OK) {
        CHECK(status <= -7001 && status >= -7003 && (answers & (1u << (-7000 - status))),
              "status %d, right ones 0x%x: " SHOW, (int)status, answers, SHOWN(command));
        CHECK(words->word[0] == untouched.word[0] && words->word[1] == untouched.word[1],
              "refused with %d, yet wrote %016" PRIx64 " %016" PRIx64 ": " SHOW, (int)status, words->word[0],
              words->word[1], SHOWN(command));
        return 0;
    }
    CHECK(!answers, "encoded, but should be refused (0x%x): " SHOW, answers, SHOWN(command));
    CHECK(!((words->word[0] | words->word[1]) >> 63), "parity bits are the ring's: " SHOW, SHOWN(command));
    for (unsigned parity = 0; parity < 4; parity++) {
        const uint64_t p0 = (uint64_t)(parity & 1) << 63, p1 = (uint64_t)(parity >> 1) << 63;
        CHECK_EQ(decode(words->word[0] | p0, words->word[1] | p1, &back), UCCL_EP_OK);
        CHECK(same(&back, command), "came back as " SHOW, SHOWN(&back));
    }
    return 1;
}

/* Pins the wire format. */
static void test_golden(void) {
    static const struct {
        uccl_ep_command command; /* op target local remote add bytes slot granularity reserved */
        uint64_t word[2];
    } golden[] = {
        {{1, 0, 0, 0, 0, 0, 0, 16, 0}, {0x0000000000000001ull, 0x0000000000000000ull}},
        {{1, 0, 0, 0, 0, 0, 0, 4, 0}, {0x0000000000000009ull, 0x0000000000000000ull}},
        {{1, 1, 16, 32, 0, 48, 0, 16, 0}, {0x0000000000000011ull, 0x0008000300000002ull}},
        {{1, 4095, 0x3fffffffcull, 0x3fffffffcull, 0, 0x1ffffc, 0, 4, 0}, {0x0000000ffffffff9ull, ALL}},
        {{3, 5, 64, 128, 7, 256, 3, 16, 0}, {0x001c003000000043ull, 0x0028001000000008ull}},
        {{3, 4095, 0xffffffff0ull, 0xffffffff0ull, 8191, 0x7ffff0, 16383, 16, 0}, {0x7ffffffffffffff3ull, ALL}},
        {{2, 9, 0, 0, 0x0123456789abcdefull, 0, 0xfedcba98u, 0, 0}, {0x000ba9889abcdef2ull, 0x0048fedc01234567ull}},
        {{2, 4095, 0, 0, UINT64_MAX, 0, UINT32_MAX, 0, 0}, {0x000ffffffffffff2ull, 0x7ff8ffffffffffffull}},
        {{4, 2, 0, 0, 0, 0, 0, 0, 0}, {0x0000000000000004ull, 0x0010000000000000ull}},
    };
    for (size_t i = 0; i < COUNT(golden); i++) {
        uccl_ep_words words;
        CHECK(check_encode(&golden[i].command, &words), "golden command %zu is refused", i);
        CHECK_EQ(words.word[0], golden[i].word[0]);
        CHECK_EQ(words.word[1], golden[i].word[1]);
    }
    CHECK_EQ(UCCL_EP_CODEC_VERSION, 1);
    CHECK_EQ(UCCL_EP_MAX_COMMAND_BYTES(16), (8u << 20) - 16);
    CHECK_EQ(UCCL_EP_MAX_HEAP_BYTES(16), 64ull << 30);
    CHECK_EQ(UCCL_EP_MAX_HEAP_BYTES(4), 16ull << 30);
    CHECK_EQ(UCCL_EP_MAX_RANKS, 4096);
}

/* All fields at zero, at max, or anywhere legal. */
static uccl_ep_command background(const operation *o, uint32_t granularity, int kind, test_rng *rng) {
    uccl_ep_command command = {.op = o->op, .granularity = o->has_put ? granularity : 0};
    for (size_t i = 0; i < o->count && kind; i++) {
        const field *f = &o->fields[i];
        const uint64_t units = kind == 1 || f->max == UINT64_MAX ? f->max : test_below(rng, f->max + 1);
        set(&command, f, units * unit_of(&command, f));
    }
    return command;
}

/* One field takes every value around every power of two; the other fields' bits must not move (case B3). */
static uint64_t test_each_field(test_rng *rng) {
    uint64_t done = 0;
    for (size_t i = 0; i < COUNT(operations); i++) {
        const operation *o = &operations[i];
        for (size_t g = 0; g < (o->has_put ? COUNT(granularities) : 1); g++) {
            for (int kind = 0; kind < 10; kind++) {
                const uccl_ep_command base = background(o, granularities[g], kind, rng);
                uccl_ep_words base_words, words;
                CHECK(check_encode(&base, &base_words), "legal, but refused: " SHOW, SHOWN(&base));
                for (size_t j = 0; j < COUNT(any_fields); j++) {
                    const field *f = &any_fields[j];
                    for (size_t k = 0; k < o->count; k++) {
                        if (o->fields[k].offset == f->offset) f = &o->fields[k];
                    }
                    for (unsigned k = 0; k < 64; k++) {
                        for (unsigned delta = 0; delta < 5; delta++) { /* 2^k - 2 .. 2^k + 2 */
                            for (int scaled = 0; scaled < 2; scaled++) {
                                uccl_ep_command command = base;
                                const uint64_t value = (1ull << k) + delta - 2;
                                set(&command, f, scaled ? value * unit_of(&base, f) : value);
                                done++;
                                if (!check_encode(&command, &words)) continue;
                                const bits change = {
                                    {words.word[0] ^ base_words.word[0], words.word[1] ^ base_words.word[1]}};
                                const int granularity = f->offset == offsetof(uccl_ep_command, granularity);
                                CHECK(granularity || (!(change.word[0] & ~f->mask.word[0]) &&
                                                      !(change.word[1] & ~f->mask.word[1])),
                                      "%s moved other bits, %016" PRIx64 " %016" PRIx64 ": " SHOW, f->name,
                                      change.word[0], change.word[1], SHOWN(&command));
                            }
                        }
                    }
                }
            }
        }
    }
    for (unsigned k = 0; k < 32; k++) {
        for (unsigned delta = 0; delta < 10; delta++) {
            const uccl_ep_command command = {.op = (1u << k) + delta - 2};
            uccl_ep_words words;
            const int encoded = check_encode(&command, &words);
            CHECK_EQ(encoded, command.op == 2 || command.op == 4); /* the others want a granularity, or are none */
            done++;
        }
    }
    return done;
}

/* Every bit that an operation does not use makes its words malformed; so does every operation that is none. */
static uint64_t test_reserved_bits(test_rng *rng) {
    uint64_t done = 0;
    for (size_t i = 0; i < COUNT(operations); i++) {
        const operation *o = &operations[i];
        bits used = {{o->has_put ? 15 : 7, 0}};
        for (size_t j = 0; j < o->count; j++) {
            used.word[0] |= o->fields[j].mask.word[0];
            used.word[1] |= o->fields[j].mask.word[1];
        }
        for (int kind = 0; kind < 50; kind++) {
            const uccl_ep_command base = background(o, granularities[kind & 1], kind, rng);
            uccl_ep_command command;
            uccl_ep_words words;
            CHECK(check_encode(&base, &words), "legal, but refused: " SHOW, SHOWN(&base));
            for (unsigned bit = 0; bit < 128; bit++) {
                uint64_t w[2] = {words.word[0], words.word[1]};
                const unsigned at = bit & 63;
                w[bit / 64] ^= 1ull << at;
                if (bit < 3 || at == 63) continue; /* the operation; the parity */
                const uccl_ep_status status = decode(w[0], w[1], &command);
                CHECK_EQ(status, used.word[bit / 64] >> at & 1 ? UCCL_EP_OK : UCCL_EP_E_MALFORMED);
                done++;
            }
            static const uint64_t no_op[] = {0, 5, 6, 7};
            for (size_t j = 0; j < COUNT(no_op); j++) {
                CHECK_EQ(decode((words.word[0] & ~7ull) | no_op[j], words.word[1], &command), UCCL_EP_E_MALFORMED);
                done++;
            }
        }
    }
    return done;
}

/* Commands whose fields lie anywhere, mostly near a limit, several of them wrong at a time. */
static uint64_t test_random_commands(test_rng *rng, uint64_t rounds) {
    uint64_t encoded = 0;
    for (uint64_t round = 0; round < rounds; round++) {
        const operation *o = &operations[test_below(rng, COUNT(operations))];
        uccl_ep_command command = background(o, granularities[test_below(rng, 2)], 2, rng);
        for (uint64_t faults = test_below(rng, 4); faults; faults--) {
            const field *f = &any_fields[test_below(rng, COUNT(any_fields))];
            const uint64_t near = (1ull << test_below(rng, 64)) + test_below(rng, 5) - 2;
            set(&command, f, test_below(rng, 2) ? near : near * 16);
        }
        if (test_below(rng, 64) == 0) command.op = (uint32_t)test_below(rng, 16);
        uccl_ep_words words;
        encoded += (uint64_t)check_encode(&command, &words);
    }
    CHECK(rounds < 1000 || (encoded > rounds / 8 && encoded < rounds - rounds / 8),
          "%" PRIu64 " of %" PRIu64 " encoded: the test sees one side only", encoded, rounds);
    return encoded;
}

/* What decodes has one encoding, the words themselves: no two words mean the same, and no bit is overlooked. */
static void test_random_words(test_rng *rng, uint64_t rounds) {
    uint64_t decoded[8] = {0};
    for (uint64_t round = 0; round < rounds; round++) {
        uint64_t w[2] = {test_random(rng), test_random(rng)};
        /* Half of the rounds thin out what SIGNAL and FLUSH do not use, else these decode next to never. */
        const uint64_t thin = test_below(rng, 8);
        if (thin < 2) w[0] &= 0x000ffffffffffff7ull, w[1] &= 0xfff8ffffffffffffull;
        if (thin == 2) w[0] &= 7, w[1] &= 0xfff8000000000000ull;
        if (thin == 3) w[test_below(rng, 2)] &= 7 | test_random(rng) >> test_below(rng, 64);
        uccl_ep_command command;
        uccl_ep_words words = untouched;
        const uccl_ep_status status = decode(w[0], w[1], &command);
        if (status == UCCL_EP_OK) {
            CHECK_EQ(uccl_ep_encode(&command, &words), UCCL_EP_OK);
            CHECK_EQ(words.word[0], w[0] & ALL);
            CHECK_EQ(words.word[1], w[1] & ALL);
            decoded[w[0] & 7]++;
        } else {
            CHECK_EQ(status, UCCL_EP_E_MALFORMED);
        }
    }
    for (unsigned op = 0; op < 8; op++) {
        CHECK(rounds < 1000 || !decoded[op] == !operation_of(op), "operation %u decoded %" PRIu64 " times", op,
              decoded[op]);
    }
    printf("random words: %" PRIu64 "; decoded put %" PRIu64 ", signal %" PRIu64 ", put_signal %" PRIu64
           ", flush %" PRIu64 "\n",
           rounds, decoded[1], decoded[2], decoded[3], decoded[4]);
}

/* The statuses are part of the ABI: consecutive, in the range of their own. */
static void test_statuses(void) {
    static const int values[] = {
#define VALUE(name, value, text) UCCL_EP_##name,
        UCCL_EP_STATUS_TABLE(VALUE)
#undef VALUE
    };
    CHECK_EQ(values[0], 0);
    CHECK_EQ(values[1], 1);
    for (size_t i = 2; i < COUNT(values); i++) CHECK_EQ(values[i], -7000 - (int)(i - 1));
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 120);
    test_rng rng = test_rng_at(0);
    test_statuses();
    test_golden();
    printf("one field at a time: %" PRIu64 " commands\n", test_each_field(&rng));
    printf("one bit at a time: %" PRIu64 " words\n", test_reserved_bits(&rng));
    const uint64_t rounds = test_scaled(10000000);
    printf("random commands: %" PRIu64 ", %" PRIu64 " of them legal\n", rounds, test_random_commands(&rng, rounds));
    test_random_words(&rng, rounds);
    return test_end();
}
