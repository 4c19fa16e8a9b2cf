/* SPDX-License-Identifier: Apache-2.0
 *
 * One collective step in which the others' headers are any bytes: it ends with success, or with an error that has a
 * name and words, and what it gives as payload is what a rank with a header in order sent.
 */
#include "core/internal.h"
#include "fuzz_core.h"

static void others(fuzz_bootstrap *b, uint8_t *block, uint32_t bytes, uint32_t rank) {
    (void)rank;
    if (fuzz_u8(b->in) & 1)
        fuzz_fill(b->in, block, bytes);
    else
        fuzz_damage(b->in, block, bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = fuzz_begin(data, size);
    static uccl_ep_comm comm; /* zero: exchange looks at nothing but a timeout */
    fuzz_bootstrap b = {.size = 1 + fuzz_below(&in, 6), .in = &in, .others = others};
    b.rank = fuzz_below(&in, b.size);
    const uccl_ep_bootstrap bootstrap = fuzz_bootstrap_of(&b);
    uint8_t payload[256], *all = calloc(b.size, sizeof payload);
    FUZZ_CHECK(all, "no memory");
    const uint32_t bytes = fuzz_below(&in, sizeof payload);
    fuzz_fill(&in, payload, bytes);
    static const char *const steps[] = {"open", "connect", "reset addresses", "a step with a name that is too long"};
    uccl_ep_status mine = UCCL_EP_OK;
    if (fuzz_u8(&in) % 4 == 0) mine = fail_local(UCCL_EP_E_NIC, "ERR-2", "this rank has a reason of its own");
    const char *step = steps[fuzz_below(&in, 4)];
    const uccl_ep_status status = exchange(&comm, &bootstrap, step, mine, payload, bytes, all);
    if (status == UCCL_EP_OK) {
        FUZZ_CHECK(mine == UCCL_EP_OK && (!bytes || !memcmp(all + (size_t)b.rank * bytes, payload, bytes)),
                   "the own part is another");
    } else {
        FUZZ_CHECK(uccl_ep_last_error()->peer == UCCL_EP_ANY_RANK || uccl_ep_last_error()->peer < b.size, "rank %u",
                   uccl_ep_last_error()->peer);
        fuzz_check_error(status);
    }
    free(all);
    return 0;
}
