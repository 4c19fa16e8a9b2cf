/* SPDX-License-Identifier: Apache-2.0
 *
 * The command codec, both ways. Whatever is decoded encodes to the same words again, and whatever is encoded decodes to
 * the same command: so there is one spelling of each command, and random bits are told from commands (ERR-4).
 */
#include "fuzz.h"
#include "uccl_ep/command.h"

static void check_same(const uccl_ep_command *a, const uccl_ep_command *b) {
    FUZZ_CHECK(a->op == b->op && a->target == b->target && a->local == b->local && a->remote == b->remote &&
                   a->add == b->add && a->bytes == b->bytes && a->slot == b->slot && a->granularity == b->granularity &&
                   a->reserved == b->reserved,
               "operation %u to rank %u", a->op, a->target);
}

static void decode_first(uint64_t word0, uint64_t word1) {
    uccl_ep_command command;
    memset(&command, 0xa5, sizeof command);
    const uccl_ep_status status = uccl_ep_decode(word0, word1, &command);
    FUZZ_CHECK(command.op <= UCCL_EP_OP_EXT && command.target < UCCL_EP_MAX_RANKS, "%u to %u", command.op,
               command.target);
    FUZZ_CHECK(command.target == uccl_ep_decode_target(word1), "%u", command.target);
    uccl_ep_words words = {{1, 2}};
    if (status != UCCL_EP_OK) {
        FUZZ_CHECK(status == UCCL_EP_E_MALFORMED, "%d", status);
        return;
    }
    FUZZ_CHECK(uccl_ep_encode(&command, &words) == UCCL_EP_OK, "operation %u", command.op);
    FUZZ_CHECK(words.word[0] == (word0 & ~UCCL_EP_PARITY_BIT) && words.word[1] == (word1 & ~UCCL_EP_PARITY_BIT),
               "%016" PRIx64 " %016" PRIx64, words.word[0], words.word[1]);
    if (uccl_ep_op_has_put(command.op)) {
        FUZZ_CHECK(command.local < UCCL_EP_MAX_HEAP_BYTES(command.granularity) &&
                       command.remote < UCCL_EP_MAX_HEAP_BYTES(command.granularity) &&
                       command.bytes <= UCCL_EP_MAX_COMMAND_BYTES(command.granularity),
                   "granularity %u", command.granularity);
        FUZZ_CHECK(!((command.local | command.remote | command.bytes) % command.granularity), "granularity %u",
                   command.granularity);
    }
    /* The parts that a consumer uses one by one agree with the whole. */
    uccl_ep_command parts = {.op = command.op, .target = command.target};
    if (uccl_ep_op_has_put(command.op))
        uccl_ep_decode_put(word0, word1, (uccl_ep_u32)UCCL_EP_FIELD_GET(word0, GRANULARITY), &parts);
    if (command.op == UCCL_EP_OP_PUT_SIGNAL) uccl_ep_decode_put_signal(word0, &parts);
    if (command.op == UCCL_EP_OP_SIGNAL)
        FUZZ_CHECK(uccl_ep_decode_signal(word0, word1, &parts) == UCCL_EP_OK, "signal");
    check_same(&command, &parts);
}

static void encode_first(const uccl_ep_command *command) {
    uccl_ep_words words = {{11, 22}};
    const uccl_ep_status status = uccl_ep_encode(command, &words);
    if (status != UCCL_EP_OK) {
        FUZZ_CHECK(status == UCCL_EP_E_INVALID || status == UCCL_EP_E_ALIGNMENT || status == UCCL_EP_E_RANGE, "%d",
                   status);
        FUZZ_CHECK(words.word[0] == 11 && words.word[1] == 22, "an error wrote words");
        return;
    }
    FUZZ_CHECK(!((words.word[0] | words.word[1]) & UCCL_EP_PARITY_BIT), "the ring's bit is set");
    uccl_ep_command back;
    FUZZ_CHECK(uccl_ep_decode(words.word[0], words.word[1], &back) == UCCL_EP_OK, "operation %u", command->op);
    check_same(command, &back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = fuzz_begin(data, size);
    const uint8_t how = fuzz_u8(&in);
    if (how % 2) {
        const uint64_t word0 = fuzz_u64(&in), word1 = fuzz_u64(&in);
        decode_first(word0, word1);
    } else if (how % 4) {
        uccl_ep_command command;
        fuzz_fill(&in, &command, sizeof command);
        encode_first(&command);
    } else {
        /* Field by field, mostly what can be encoded. */
        const uint32_t granularity = how & 4 ? 16 : 4;
        uccl_ep_command command = {.op = fuzz_below(&in, 8), .target = (uint32_t)fuzz_number(&in)};
        if (how & 8) {
            command.granularity = granularity;
            command.local = fuzz_number(&in) * granularity;
            command.remote = fuzz_number(&in) * granularity;
            command.bytes = (uint32_t)(fuzz_number(&in) * granularity);
        }
        if (how & 16) {
            command.add = fuzz_number(&in);
            command.slot = (uint32_t)fuzz_number(&in);
        }
        encode_first(&command);
    }
    return 0;
}
