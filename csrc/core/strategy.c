/* SPDX-License-Identifier: Apache-2.0
 *
 * strategy.c: how signals keep their order on the NIC at hand, chosen from its promises.
 *
 * A strategy is a set of needs and what issue.c and retire.c do with a signal. It knows no vendor. All ranks of a
 * communicator use the same one, so the choice is made on the promises that every rank's NIC gives.
 */
#include <stdio.h>

#include "internal.h"

static const struct promise {
    uint64_t flag;
    const char *text;
} promises[] = {
    {UCCL_EP_CAP_ATOMIC_ADD64, "64-bit adds"},
    {UCCL_EP_CAP_ORDER_WRITE_ATOMIC, "adds ordered behind earlier writes"},
    {UCCL_EP_CAP_ERROR_STOPS, "that an error stops the queue (ERR-3)"},
    {UCCL_EP_CAP_SIGNALS_STRICT, "strict order of payload and signal words in one device's memory (MEM-3)"},
};

static const struct strategy {
    uint32_t id;
    const char *name;
    uint64_t needs;
} strategies[] = {
    /* The best first: auto takes the first one whose needs are met. */
    {UCCL_EP_STRATEGY_ORDERED_ATOMIC, "ordered_atomic",
     UCCL_EP_CAP_ATOMIC_ADD64 | UCCL_EP_CAP_ORDER_WRITE_ATOMIC | UCCL_EP_CAP_ERROR_STOPS | UCCL_EP_CAP_SIGNALS_STRICT},
    {UCCL_EP_STRATEGY_SENDER_HOLD, "sender_hold", UCCL_EP_CAP_ATOMIC_ADD64},
};

const char *strategy_name(uint32_t id) {
    for (size_t i = 0; i < sizeof strategies / sizeof *strategies; i++)
        if (strategies[i].id == id) return strategies[i].name;
    return "auto";
}

static void missing_text(uint64_t missing, char *text, size_t bytes) {
    size_t used = 0;
    text[0] = 0;
    for (size_t i = 0; i < sizeof promises / sizeof *promises; i++)
        if (missing & promises[i].flag && used < bytes)
            used += (size_t)snprintf(text + used, bytes - used, "%s%s", used ? ", " : "", promises[i].text);
}

uccl_ep_status strategy_choose(uccl_ep_comm *comm, const uccl_ep_caps *weakest) {
    char missing[160] = "";
    /* Every strategy retires commands on completions, and what is complete must be visible (QUI-1, MEM-3). */
    if (weakest->completion_level < UCCL_EP_COMPLETION_VISIBLE)
        return fail_local(
            UCCL_EP_E_CAPABILITY, "MEM-3",
            "the NIC's completions do not promise visibility, and raising them by a flush is not supported "
            "by this version: a backend must promise UCCL_EP_COMPLETION_VISIBLE");
    for (size_t i = 0; i < sizeof strategies / sizeof *strategies; i++) {
        const struct strategy *s = &strategies[i];
        const uint64_t lacks = FAULT(strategy_unchecked) ? 0 : s->needs & ~weakest->flags;
        if (comm->config.strategy == s->id) {
            if (!lacks) {
                comm->strategy = s->id;
                snprintf(comm->strategy_reason, sizeof comm->strategy_reason,
                         "asked for, and the NIC promises all it needs");
                return UCCL_EP_OK;
            }
            missing_text(lacks, missing, sizeof missing);
            return fail_local(UCCL_EP_E_CAPABILITY, "SIG-7",
                              "the strategy %s was asked for, but the NIC does not promise %s: choose another, or auto",
                              s->name, missing);
        }
        if (comm->config.strategy != UCCL_EP_STRATEGY_AUTO) continue;
        if (!lacks) {
            comm->strategy = s->id;
            if (i)
                snprintf(comm->strategy_reason, sizeof comm->strategy_reason, "%s lacks: %s", strategies[i - 1].name,
                         missing);
            else
                snprintf(comm->strategy_reason, sizeof comm->strategy_reason, "the NIC promises all it needs");
            return UCCL_EP_OK;
        }
        missing_text(lacks, missing, sizeof missing);
    }
    return fail_local(
        UCCL_EP_E_CAPABILITY, "SIG-7",
        "no signal strategy works on this NIC: it does not promise %s, which all that this version has need", missing);
}
