/* SPDX-License-Identifier: Apache-2.0
 *
 * test_model.c: the model of the contract. Of every rule a history that it must refuse, with the clause, and a near
 * miss that it must accept: the same history but for what makes it wrong.
 */
#include <stdbool.h>

#include "model/model.h"

#include "testing.h"
#include "uccl_ep/status.h"

#define HEAP 4096u
#define ALL UCCL_EP_MODEL_ALL
#define NO_TICKET UCCL_EP_MODEL_NO_TICKET

static uccl_ep_model *m;
static uint64_t now; /* every event at a time of its own: a total order, as in a simulator */
static uint64_t tickets[4][4];
static unsigned judged;

static void start(void) {
    if (m) uccl_ep_model_free(m);
    m = uccl_ep_model_new(4, HEAP, 16);
    CHECK(m, "no memory");
    now = 0;
    memset(tickets, 0, sizeof tickets);
}

static void add(uccl_ep_model_event e, const uint64_t *words) {
    if (!e.begin) e.begin = e.end = ++now;
    CHECK(!uccl_ep_model_add(m, &e, words), "%s", uccl_ep_model_error(m));
}

static uint64_t post(uint32_t rank, uint32_t channel, uint32_t target, uint32_t op, uint64_t local, uint64_t remote,
                     uint64_t bytes, uint32_t slot, uint64_t value) {
    const uint64_t ticket = tickets[rank][channel]++;
    add((uccl_ep_model_event){.kind = UCCL_EP_MODEL_POST,
                              .rank = rank,
                              .channel = channel,
                              .peer = target,
                              .op = op,
                              .local = local,
                              .remote = remote,
                              .bytes = bytes,
                              .slot = slot,
                              .value = value,
                              .ticket = ticket},
        NULL);
    return ticket;
}
static uint64_t put(uint32_t rank, uint32_t channel, uint32_t target, uint64_t local, uint64_t remote, uint64_t bytes) {
    return post(rank, channel, target, UCCL_EP_MODEL_PUT, local, remote, bytes, 0, 0);
}
static uint64_t sig(uint32_t rank, uint32_t channel, uint32_t target, uint32_t slot, uint64_t value) {
    return post(rank, channel, target, UCCL_EP_MODEL_ADD, 0, 0, 0, slot, value);
}
static uint64_t put_sig(uint32_t rank, uint32_t channel, uint32_t target, uint64_t local, uint64_t remote,
                        uint64_t bytes, uint32_t slot, uint64_t value) {
    return post(rank, channel, target, UCCL_EP_MODEL_PUT_ADD, local, remote, bytes, slot, value);
}
static void wait_for(uint32_t rank, uint32_t channel, uint64_t ticket, bool source, int32_t status) {
    add((uccl_ep_model_event){.kind = UCCL_EP_MODEL_WAIT,
                              .rank = rank,
                              .channel = channel,
                              .ticket = ticket,
                              .source = source,
                              .status = status},
        NULL);
}
static void saw(uint32_t rank, uint32_t slot, uint64_t value) {
    add((uccl_ep_model_event){.kind = UCCL_EP_MODEL_SIGNAL, .rank = rank, .slot = slot, .value = value}, NULL);
}
static void store(uint32_t rank, uint64_t offset, uint64_t bytes, uint32_t id) {
    add((uccl_ep_model_event){.kind = UCCL_EP_MODEL_STORE, .rank = rank, .local = offset, .bytes = bytes, .value = id},
        NULL);
}
static void reads_word(uint32_t rank, uint64_t offset, uint64_t word) {
    add((uccl_ep_model_event){.kind = UCCL_EP_MODEL_READ, .rank = rank, .local = offset, .bytes = 8}, &word);
}
/* Reads `bytes` and finds the stamps of store `id` from its word `first` on. */
static void reads(uint32_t rank, uint64_t offset, uint64_t bytes, uint32_t id, uint32_t first) {
    uint64_t words[64];
    for (uint32_t i = 0; i < bytes / 8; i++) words[i] = id ? uccl_ep_model_stamp(id, first + i) : 0;
    add((uccl_ep_model_event){.kind = UCCL_EP_MODEL_READ, .rank = rank, .local = offset, .bytes = bytes}, words);
}
static void failure(uint32_t rank, uint32_t channel, uint32_t peer, uint64_t ticket) {
    add((uccl_ep_model_event){.kind = UCCL_EP_MODEL_FAILURE,
                              .rank = rank,
                              .channel = channel,
                              .peer = peer,
                              .ticket = ticket,
                              .status = UCCL_EP_E_NIC},
        NULL);
}
static void reset_all(uint64_t number) {
    const uint64_t begin = ++now, end = now += 10;
    for (uint32_t r = 0; r < 4; r++)
        add((uccl_ep_model_event){.kind = UCCL_EP_MODEL_RESET, .rank = r, .begin = begin, .end = end, .value = number},
            NULL);
}

static void expect(uint32_t outcome, const char *clause, const char *what) {
    uccl_ep_model_verdict v;
    CHECK(uccl_ep_model_judge(m, &v) >= 0, "%s", uccl_ep_model_error(m));
    CHECK(v.outcome == outcome && !strcmp(v.clause, clause), "%s: outcome %u %s (%s), expected %u %s", what, v.outcome,
          v.clause, v.text, outcome, clause);
    CHECK(v.text[0], "%s: a verdict has a text", what);
    for (uint32_t i = 0; i < v.n_events; i++) CHECK(v.events[i] < uccl_ep_model_count(m), "%s", what);
    if (outcome != UCCL_EP_MODEL_ALLOWED) CHECK(v.n_events > 0, "%s: a verdict names events", what);
    judged++;
}
#define FORBIDDEN(clause, what) expect(UCCL_EP_MODEL_FORBIDDEN, clause, what)
#define ALLOWED(what) expect(UCCL_EP_MODEL_ALLOWED, "", what)
#define PROGRAM(clause, what) expect(UCCL_EP_MODEL_PROGRAM, clause, what)

/* ------------------------------------------------------------------------------------------------------------- puts */

static void test_put1(void) {
    for (int bad = 0; bad < 5; bad++) {
        start();
        store(0, 64, 32, 7);
        const uint64_t t = put(0, 0, 1, 64, 128, 32);
        wait_for(0, 0, t, false, 0);
        switch (bad) {
        case 0:
            reads(1, 128, 32, 7, 0);
            reads(1, 160, 8, 0, 0);
            ALLOWED("exactly its bytes");
            break;
        case 1:
            reads(1, 160, 8, 7, 3);
            FORBIDDEN("PUT-1", "one word too many");
            break;
        case 2:
            reads(1, 128, 8, 7, 1);
            FORBIDDEN("PUT-1", "its bytes in another order");
            break;
        case 3:
            reads_word(1, 136, 0xdeadbeef);
            FORBIDDEN("PUT-1", "foreign bytes within it");
            break;
        default:
            reads_word(1, 512, 0xdeadbeef);
            FORBIDDEN("MEM-2", "foreign bytes where no put goes");
        }
    }
    start();
    store(0, 0, 8, 7);
    reads(1, 0, 8, 7, 0);
    put(0, 0, 1, 0, 0, 8);
    FORBIDDEN("PUT-1", "bytes before they were posted");
    start();
    store(0, 0, 8, 7);
    store(0, 0, 8, 8);
    put(0, 0, 1, 0, 0, 8);
    reads(1, 0, 8, 7, 0);
    FORBIDDEN("PUB-1", "the source as it was before the store that came before the post");
    start();
    store(0, 0, 8, 7);
    store(0, 0, 8, 8);
    put(0, 0, 1, 0, 0, 8);
    reads(1, 0, 8, 8, 0);
    ALLOWED("the source as it was at the post");
}

static void test_guards(void) {
    start();
    reads_word(2, HEAP, 0);
    ALLOWED("a guard word that nobody touched");
    reads_word(2, HEAP + 8, 1);
    FORBIDDEN("MEM-2", "a guard word that somebody touched");
}

static void test_put3(void) {
    for (int bad = 0; bad < 3; bad++) {
        start();
        store(0, 0, 16, 1);
        const uint64_t t = put(0, 0, 1, 0, 256, 16);
        if (bad < 2) wait_for(0, 0, t, true, 0);
        store(0, 0, 16, 2);
        reads(1, 256, 16, bad ? 2 : 1, 0);
        if (!bad)
            ALLOWED("the old bytes after the source was free");
        else if (bad == 1)
            FORBIDDEN("QUI-0", "new bytes of a source that had been reported free");
        else
            PROGRAM("PUT-3", "a program that changes its source too early may see either");
    }
    /* A torn word where the program broke its duty is nobody else's fault. */
    start();
    store(0, 0, 8, 0x01010101);
    put(0, 0, 1, 0, 256, 8);
    store(0, 0, 8, 0x02020202);
    reads_word(1, 256, 0x0102010200000000);
    PROGRAM("PUT-3", "torn between two stores");
}

static void test_put5(void) {
    for (int bad = 0; bad < 3; bad++) {
        start();
        store(0, 0, 8, 1);
        store(0, 8, 8, 2);
        const uint64_t first = put(0, 0, 1, 0, 256, 8);
        if (bad < 2) wait_for(0, 0, first, false, 0);
        const uint64_t second = put(0, 1, 1, 8, 256, 8);
        wait_for(0, 1, second, false, 0);
        reads(1, 256, 8, bad ? 1 : 2, 0);
        if (!bad)
            ALLOWED("the second put, posted after the first was complete");
        else if (bad == 1)
            FORBIDDEN("PUT-5", "the first put, though the second was posted after it was complete");
        else
            PROGRAM("PUT-7", "two puts to one place at once end in either way");
    }
    /* A signal does not order later puts behind itself. */
    start();
    store(0, 0, 8, 1);
    sig(0, 0, 1, 0, 1);
    put(0, 0, 1, 0, 256, 8);
    reads(1, 256, 8, 1, 0);
    saw(1, 0, 0);
    ALLOWED("a put is visible before an earlier signal");
    /* Nor puts among themselves. */
    start();
    store(0, 0, 8, 1);
    store(0, 8, 8, 2);
    put(0, 0, 1, 0, 256, 8);
    put(0, 0, 1, 8, 264, 8);
    reads(1, 264, 8, 2, 0);
    reads(1, 256, 8, 0, 0);
    ALLOWED("the second of two puts comes first");
}

static void test_put7(void) {
    for (int bad = 0; bad < 4; bad++) {
        start();
        store(0, 0, 8, 1);
        store(0, 8, 8, 2);
        const uint64_t first = put(0, 0, 1, 0, 256, 8);
        sig(0, 0, 1, 0, 1);
        saw(1, 0, 1);
        reads(1, 256, 8, 1, 0);
        if (bad != 3) wait_for(0, 0, first, false, 0);
        const uint64_t second = put(0, 0, 1, 8, 256, 8);
        sig(0, 0, 1, 0, 1);
        saw(1, 0, 2);
        reads(1, 256, 8, 2, 0);
        if (bad) reads(1, 256, 8, 1, 0);
        if (bad == 2) wait_for(0, 0, second, false, 0);
        if (!bad)
            ALLOWED("two epochs in one slot");
        else if (bad < 3)
            FORBIDDEN("PUT-7", "the first epoch is placed again after it was complete");
        else
            PROGRAM("PUT-7", "the slot was reused before its first use was complete");
    }
    /* A store of the target's own over a put that is not complete. */
    for (int complete = 0; complete < 2; complete++) {
        start();
        store(0, 0, 8, 1);
        const uint64_t t = put_sig(0, 0, 1, 0, 256, 8, 0, 1);
        saw(1, 0, 1);
        if (complete) wait_for(0, 0, t, false, 0);
        store(1, 256, 8, 9);
        reads(1, 256, 8, 1, 0);
        if (complete)
            FORBIDDEN("PUT-7", "a complete put comes again over a store");
        else
            PROGRAM("PUT-7", "a store to a target before the put is complete");
    }
}

/* ---------------------------------------------------------------------------------------------------------- signals */

static void test_sig1(void) {
    start();
    sig(0, 0, 1, 3, 5);
    saw(1, 3, 0);
    saw(1, 3, 5);
    ALLOWED("before and after");
    saw(1, 3, 10);
    FORBIDDEN("SIG-1", "added twice");
    start();
    sig(0, 0, 1, 3, 5);
    saw(1, 3, 3);
    FORBIDDEN("SIG-1", "a part of it");
    start();
    sig(0, 0, 1, 3, 5);
    saw(1, 4, 5);
    FORBIDDEN("SIG-1", "in another word");
    start();
    sig(0, 0, 1, 3, 5);
    saw(1, 3, 5);
    saw(1, 3, 0);
    FORBIDDEN("SIG-1", "taken back");
    start();
    saw(1, 3, 5);
    sig(0, 0, 1, 3, 5);
    FORBIDDEN("SIG-1", "before it was posted");
    start();
    sig(0, 0, 1, 3, UINT64_MAX);
    sig(0, 0, 1, 3, 3);
    saw(1, 3, UINT64_MAX);
    saw(1, 3, 2);
    ALLOWED("modulo 2^64");
    /* Intervals: the read may have happened at any time within. */
    start();
    add((uccl_ep_model_event){.kind = UCCL_EP_MODEL_SIGNAL, .rank = 1, .slot = 3, .value = 5, .begin = 1, .end = 9},
        NULL);
    now = 4;
    sig(0, 0, 1, 3, 5);
    ALLOWED("a read that overlaps the post");
}

static void test_sig2(void) {
    for (int bad = 0; bad < 5; bad++) {
        start();
        store(0, 0, 16, 1);
        put(0, 0, 1, 0, 256, 16);
        sig(0, bad == 2 ? 1 : 0, bad == 3 ? 2 : 1, 0, 1);
        saw(bad == 3 ? 2 : 1, 0, bad == 4 ? 0 : 1);
        reads(1, 256, 16, bad ? 0 : 1, 0);
        if (!bad)
            ALLOWED("message passing");
        else if (bad == 1)
            FORBIDDEN("SIG-2", "the signal without the put");
        else
            ALLOWED("another channel, another target, no signal yet: nothing is promised");
    }
    /* Half of it is not all of it. */
    start();
    store(0, 0, 16, 1);
    put(0, 0, 1, 0, 256, 16);
    sig(0, 0, 1, 0, 1);
    saw(1, 0, 1);
    reads(1, 256, 8, 1, 0);
    reads(1, 264, 8, 0, 0);
    FORBIDDEN("SIG-2", "half of the put");
    /* Seen by way of a later signal to another word. */
    start();
    store(0, 0, 16, 1);
    put(0, 0, 1, 0, 256, 16);
    sig(0, 0, 1, 0, 1);
    sig(0, 0, 1, 1, 1);
    saw(1, 1, 1);
    reads(1, 256, 16, 0, 0);
    FORBIDDEN("SIG-2", "a later signal orders it too");
    /* A read that overlaps the sight is not after it. */
    start();
    store(0, 0, 8, 1);
    put(0, 0, 1, 0, 256, 8);
    sig(0, 0, 1, 0, 1);
    const uint64_t none = 0;
    add((uccl_ep_model_event){.kind = UCCL_EP_MODEL_SIGNAL, .rank = 1, .slot = 0, .value = 1, .begin = 10, .end = 20},
        NULL);
    add((uccl_ep_model_event){.kind = UCCL_EP_MODEL_READ, .rank = 1, .local = 256, .bytes = 8, .begin = 20, .end = 21},
        &none);
    ALLOWED("a read that overlaps the sight");
    add((uccl_ep_model_event){.kind = UCCL_EP_MODEL_READ, .rank = 1, .local = 256, .bytes = 8, .begin = 21, .end = 22},
        &none);
    FORBIDDEN("SIG-2", "a read behind the sight");
}

static void test_sig3(void) {
    for (int bad = 0; bad < 2; bad++) {
        start();
        store(0, 0, 16, 1);
        put_sig(0, 0, 1, 0, 256, 16, 0, 1);
        saw(1, 0, 1);
        reads(1, 256, 16, bad ? 0 : 1, 0);
        if (bad)
            FORBIDDEN("SIG-3", "a signal without its own put");
        else
            ALLOWED("a signal with its own put");
    }
}

static void test_sig4(void) {
    for (int bad = 0; bad < 3; bad++) {
        start();
        const uint64_t a = sig(0, 0, 3, 0, 1), b = sig(1, 0, 3, 0, 16), c = sig(2, 0, 3, 0, 256);
        wait_for(0, 0, a, false, 0);
        wait_for(1, 0, b, false, 0);
        if (bad < 2) wait_for(2, 0, c, false, 0);
        saw(3, 0, bad ? 17 : 273);
        if (!bad)
            ALLOWED("all of them");
        else if (bad == 1)
            FORBIDDEN("SIG-4", "one of three was lost");
        else
            ALLOWED("one of three may still be on its way");
    }
    /* Late is not lost. */
    start();
    const uint64_t t = sig(0, 0, 3, 0, 1);
    wait_for(0, 0, t, false, 0);
    saw(3, 0, 0);
    saw(3, 0, 1);
    FORBIDDEN("QUI-1", "the signal comes after the wait said complete");
    /* What cannot be told apart is bounded: 40 ones of each of four, in words of 1. */
    start();
    for (uint32_t i = 0; i < 160; i++) sig(i % 4, 0, 3, 0, 1);
    saw(3, 0, 80);
    saw(3, 0, 160);
    ALLOWED("160 signals that look alike");
    saw(3, 0, 161);
    FORBIDDEN("SIG-1", "one more than there are");
}

static void test_sig5(void) {
    start();
    sig(0, 0, 1, 0, 1);
    sig(0, 0, 1, 1, 1);
    saw(1, 1, 1);
    saw(1, 0, 1);
    ALLOWED("two words in order");
    start();
    sig(0, 0, 1, 0, 1);
    sig(0, 0, 1, 1, 1);
    saw(1, 1, 1);
    saw(1, 0, 0);
    FORBIDDEN("SIG-5", "the later word first");
    start();
    sig(0, 0, 1, 0, 1);
    sig(0, 1, 1, 1, 1);
    saw(1, 1, 1);
    saw(1, 0, 0);
    ALLOWED("two channels are not ordered");
    start();
    sig(0, 0, 1, 0, 1);
    sig(0, 0, 1, 0, 16);
    saw(1, 0, 16);
    FORBIDDEN("SIG-5", "the later add without the earlier, in one word");
}

/* ------------------------------------------------------------------------------------------------------------ quiet */

static void test_qui(void) {
    for (int bad = 0; bad < 3; bad++) {
        start();
        store(0, 0, 8, 1);
        const uint64_t t = put(0, 0, 1, 0, 256, 8);
        wait_for(0, 0, t, bad == 2, 0);
        reads(1, 256, 8, bad ? 0 : 1, 0);
        if (bad == 1)
            FORBIDDEN("QUI-1", "complete and not visible");
        else
            ALLOWED("complete and visible; a source wait says nothing of targets");
    }
    for (int bad = 0; bad < 3; bad++) {
        start();
        store(0, 0, 8, 1);
        if (bad == 2) wait_for(0, ALL, NO_TICKET, false, 0);
        put(0, 0, 1, 0, 256, 8);
        put(0, 1, 1, 0, 264, 8);
        if (bad < 2) wait_for(0, ALL, NO_TICKET, false, 0);
        reads(1, 256, 8, 1, 0);
        reads(1, 264, 8, bad ? 0 : 1, 0);
        if (bad == 1)
            FORBIDDEN("QUI-2", "one of two channels was not complete");
        else
            ALLOWED("quiet over all channels covers what was posted before it");
    }
    for (int bad = 0; bad < 3; bad++) {
        start();
        store(0, 0, 8, 1);
        const uint64_t t = put(0, 0, 1, 0, 256, 8);
        if (bad < 2) wait_for(0, 0, t, false, 0);
        sig(0, 1, 2, 0, 1);
        saw(2, 0, 1);
        sig(2, 0, 1, 0, 1);
        saw(1, 0, 1);
        reads(1, 256, 8, bad ? 0 : 1, 0);
        if (bad == 1)
            FORBIDDEN("QUI-5", "told by a third rank, and not there");
        else
            ALLOWED("a chain over a third rank; without quiet it promises nothing");
    }
    /* A wait that failed proves nothing. */
    start();
    store(0, 0, 8, 1);
    const uint64_t t = put(0, 0, 1, 0, 256, 8);
    wait_for(0, 0, t, false, UCCL_EP_E_DEADLINE);
    reads(1, 256, 8, 0, 0);
    ALLOWED("a wait that ended at its deadline");
    /* A chain of copies: rank 1 forwards what it got from the place where it got it. */
    for (int bad = 0; bad < 2; bad++) {
        start();
        store(0, 0, 8, 1);
        put_sig(0, 0, 1, 0, 256, 8, 0, 1);
        saw(1, 0, 1);
        put_sig(1, 0, 2, 256, 512, 8, 0, 1);
        saw(2, 0, 1);
        reads(2, 512, 8, bad ? 0 : 1, 0);
        if (bad)
            FORBIDDEN("SIG-3", "forwarded before it was there");
        else
            ALLOWED("forwarded");
    }
}

/* --------------------------------------------------------------------------------------------------------- failures */

static void test_err2(void) {
    for (int bad = 0; bad < 5; bad++) {
        start();
        store(0, 0, 8, 1);
        const uint64_t lost = put(0, 0, 1, 0, 256, 8), later = put(0, 0, 2, 0, 256, 8);
        if (bad != 2) failure(0, 0, 1, lost);
        if (bad == 3) add((uccl_ep_model_event){.kind = UCCL_EP_MODEL_EXCLUDE, .rank = 0, .peer = 1}, NULL);
        wait_for(0, 0, later, bad == 4, bad ? 0 : UCCL_EP_E_NIC);
        if (!bad || bad == 3)
            ALLOWED("covering waits fail until the peer is excluded");
        else if (bad == 2)
            ALLOWED("nothing failed");
        else
            FORBIDDEN("ERR-2", "a wait that covers a failed ticket succeeds");
    }
    start();
    store(0, 0, 8, 1);
    const uint64_t t = put(0, 0, 1, 0, 256, 8);
    wait_for(0, 0, t, true, 0);
    failure(0, 0, 1, t);
    ALLOWED("a source that was free before its command failed");
    wait_for(0, 0, t, false, 0);
    FORBIDDEN("ERR-2", "complete and failed");
}

static void test_err3(void) {
    for (int bad = 0; bad < 3; bad++) {
        start();
        store(0, 0, 8, 1);
        const uint64_t lost = put(0, 0, 1, 0, 256, 8);
        sig(0, 0, 1, 0, 1);
        failure(0, 0, 1, lost);
        saw(1, 0, bad == 2 ? 0 : 1);
        reads(1, 256, 8, bad ? 0 : 1, 0);
        if (bad == 1)
            FORBIDDEN("ERR-3", "a signal makes lost data look delivered");
        else
            ALLOWED("failed, and all of it there; or none of it");
    }
}

static void test_err6(void) {
    for (int bad = 0; bad < 4; bad++) {
        start();
        store(0, 0, 8, 1);
        store(0, 8, 8, 2);
        const uint64_t lost = put(0, 0, 1, 0, 256, 8);
        if (bad != 3) failure(0, 0, 1, lost);
        put(0, 0, 1, 8, 512, 8);
        sig(0, 0, 1, 0, 4);
        if (bad == 1 || bad == 3) reads(1, 512, 8, 2, 0);
        if (bad == 2) saw(1, 0, 4);
        if (bad == 1 || bad == 2)
            FORBIDDEN("ERR-6", "a command takes effect after its target was closed");
        else
            ALLOWED("commands after the closure have none");
    }
    /* A wait that succeeds behind an exclude or a reset says nothing of what had failed before. */
    for (int how = 0; how < 3; how++) {
        start();
        store(0, 0, 8, 1);
        const uint64_t lost = put(0, 0, 1, 0, 256, 8);
        if (how < 2) failure(0, 0, 1, lost);
        if (how == 0) add((uccl_ep_model_event){.kind = UCCL_EP_MODEL_EXCLUDE, .rank = 0, .peer = 1}, NULL);
        if (how == 1) reset_all(1);
        const uint64_t later = put(0, 0, 2, 0, 256, 8);
        wait_for(0, 0, later, false, 0);
        reads(2, 256, 8, 1, 0);
        reads(1, 256, 8, 0, 0);
        if (how < 2)
            ALLOWED("what failed need not be there");
        else
            FORBIDDEN("QUI-1", "what did not fail must be");
    }
    for (int bad = 0; bad < 5; bad++) {
        start();
        store(0, 0, 8, 1);
        const uint64_t lost = put(0, 0, 1, 0, 256, 8);
        sig(0, 0, 1, 0, 4);
        failure(0, 0, 1, lost);
        reset_all(1);
        store(1, 256, 8, 9);
        if (bad == 1) saw(1, 0, 4);
        if (bad == 2) reads(1, 256, 8, 9, 0);
        if (bad == 2) reads(1, 256, 8, 1, 0);
        sig(0, 0, 1, 0, 16);
        if (bad == 3) saw(1, 0, 20);
        if (!bad || bad == 4) saw(1, 0, 16);
        if (!bad) reads(1, 256, 8, 9, 0);
        if (bad && bad < 4)
            FORBIDDEN("ERR-6", "something of the old incarnation comes after the reset");
        else
            ALLOWED("words start again at zero");
    }
}

/* ------------------------------------------------------------------------------------------- histories that cannot be
 */

static void test_invalid(void) {
    start();
    add((uccl_ep_model_event){.kind = UCCL_EP_MODEL_BARRIER, .rank = 0, .value = 1, .begin = 1, .end = 4}, NULL);
    add((uccl_ep_model_event){.kind = UCCL_EP_MODEL_BARRIER, .rank = 1, .value = 1, .begin = 3, .end = 5}, NULL);
    ALLOWED("a barrier");
    add((uccl_ep_model_event){.kind = UCCL_EP_MODEL_BARRIER, .rank = 2, .value = 1, .begin = 5, .end = 6}, NULL);
    expect(UCCL_EP_MODEL_INVALID, "", "a barrier that one left before another came");
    start();
    sig(0, 0, 1, 0, 1);
    tickets[0][0] = 0;
    sig(0, 0, 1, 0, 1);
    FORBIDDEN("PUB-1", "a ticket given out twice");
    start();
    tickets[0][0] = 5;
    sig(0, 0, 1, 0, 1);
    tickets[0][0] = 4;
    sig(0, 0, 1, 0, 1);
    FORBIDDEN("PUB-1", "a smaller ticket later");
    start();
    CHECK(uccl_ep_model_add(m, &(uccl_ep_model_event){.kind = UCCL_EP_MODEL_SIGNAL, .rank = 4}, NULL), "rank 4 of 4");
    CHECK(uccl_ep_model_add(m, &(uccl_ep_model_event){.kind = 99}, NULL), "no such kind");
    CHECK(uccl_ep_model_add(m, &(uccl_ep_model_event){.kind = UCCL_EP_MODEL_STORE, .bytes = 4}, NULL), "half a word");
    CHECK(uccl_ep_model_add(m, &(uccl_ep_model_event){.kind = UCCL_EP_MODEL_READ, .bytes = 8}, NULL), "no words");
    CHECK(strlen(uccl_ep_model_error(m)), "an error says why");
    CHECK(!uccl_ep_model_new(0, HEAP, 1), "no ranks");
}

/* A sequential machine that keeps the contract to the letter, in a random order: the model must accept every history of
 * it. This is the guard against false alarms. */
typedef struct pending {
    uint32_t rank, channel, target, op, slot;
    uint64_t local, remote, bytes, value, ticket;
    uint64_t taken[8]; /* source at the post: programs here leave sources alone */
    bool placed, applied, complete;
} pending;

static void test_random_machine(uint64_t stream) {
    enum { RANKS = 3, CHANNELS = 2, WORDS = 32, POSTS = 24 };
    test_rng rng = test_rng_at(stream);
    start();
    uint64_t heap[RANKS][WORDS] = {{0}}, word[RANKS][4] = {{0}};
    pending posts[POSTS];
    uint32_t n = 0, id = 1, used[RANKS] = {0};
    const uint32_t shift[RANKS][CHANNELS] = {{0, 8}, {16, 24}, {32, 40}};
    for (int step = 0; step < 200; step++) {
        const uint32_t r = (uint32_t)test_below(&rng, RANKS);
        switch (test_below(&rng, 6)) {
        case 0: { /* a post, from a source of its own to a target of its own */
            if (n == POSTS) break;
            pending *p = &posts[n];
            *p = (pending){.rank = r, .channel = (uint32_t)test_below(&rng, CHANNELS)};
            p->target = (uint32_t)test_below(&rng, RANKS);
            p->op = 1 + (uint32_t)test_below(&rng, 3);
            p->slot = (uint32_t)test_below(&rng, 4);
            p->value = 1ull << shift[r][p->channel];
            if (p->op != UCCL_EP_MODEL_ADD) {
                if (used[r] + 2 > WORDS / 2 || used[p->target] + 4 > WORDS) break;
                p->bytes = 8 * (1 + test_below(&rng, 2));
                p->local = 8 * used[r];
                used[r] += 2;
                p->remote = 8 * used[p->target];
                used[p->target] += 2;
                store(r, p->local, p->bytes, id);
                for (uint32_t i = 0; i < p->bytes / 8; i++)
                    heap[r][p->local / 8 + i] = p->taken[i] = uccl_ep_model_stamp(id, i);
                id++;
            }
            p->ticket = post(r, p->channel, p->target, p->op, p->local, p->remote, p->bytes, p->slot, p->value);
            n++;
            break;
        }
        case 1: /* some put is placed */
            for (uint32_t i = 0, k = n ? (uint32_t)test_below(&rng, n) : 0; i < n; i++) {
                pending *p = &posts[(i + k) % n];
                if (p->placed || p->op == UCCL_EP_MODEL_ADD) continue;
                memcpy(&heap[p->target][p->remote / 8], p->taken, p->bytes);
                p->placed = true;
                break;
            }
            break;
        case 2: /* some signal that may is applied */
            for (uint32_t i = 0, k = n ? (uint32_t)test_below(&rng, n) : 0; i < n; i++) {
                pending *p = &posts[(i + k) % n];
                bool may = !p->applied && p->op != UCCL_EP_MODEL_PUT && (p->op == UCCL_EP_MODEL_ADD || p->placed);
                for (uint32_t j = 0; j < n && may; j++) {
                    const pending *q = &posts[j];
                    if (q->rank != p->rank || q->channel != p->channel || q->target != p->target ||
                        q->ticket >= p->ticket)
                        continue;
                    may = (q->op == UCCL_EP_MODEL_ADD || q->placed) && (q->op == UCCL_EP_MODEL_PUT || q->applied);
                }
                if (!may) continue;
                word[p->target][p->slot] += p->value;
                p->applied = true;
                break;
            }
            break;
        case 3: /* a wait succeeds where it may */
            for (uint32_t i = n; i-- > 0;) {
                pending *p = &posts[i];
                if (p->rank != r || p->complete) continue;
                bool done = true;
                for (uint32_t j = 0; j < n; j++) {
                    const pending *q = &posts[j];
                    if (q->rank != r || q->channel != p->channel || q->ticket > p->ticket) continue;
                    done &= (q->op == UCCL_EP_MODEL_ADD || q->placed) && (q->op == UCCL_EP_MODEL_PUT || q->applied);
                }
                if (!done) continue;
                wait_for(r, p->channel, p->ticket, test_below(&rng, 3) == 0, 0);
                p->complete = true;
                break;
            }
            break;
        case 4:
            for (uint32_t s = 0; s < 4; s++) saw(r, s, word[r][s]);
            break;
        default: {
            add((uccl_ep_model_event){.kind = UCCL_EP_MODEL_READ, .rank = r, .local = 0, .bytes = sizeof heap[r]},
                heap[r]);
        }
        }
    }
    uccl_ep_model_verdict v;
    uccl_ep_model_judge(m, &v);
    if (v.outcome == UCCL_EP_MODEL_ALLOWED) return;
    for (uint32_t i = 0; i < uccl_ep_model_count(m); i++) {
        char line[256];
        uccl_ep_model_describe(m, i, line, sizeof line);
        fprintf(stderr, "%4u %s\n", i, line);
    }
    CHECK(0, "stream %llu: a false alarm: %s %s", (unsigned long long)stream, v.clause, v.text);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 120);
    test_put1();
    test_guards();
    test_put3();
    test_put5();
    test_put7();
    test_sig1();
    test_sig2();
    test_sig3();
    test_sig4();
    test_sig5();
    test_qui();
    test_err2();
    test_err3();
    test_err6();
    test_invalid();
    const uint64_t machines = test_scaled(3000);
    for (uint64_t i = 0; i < machines; i++) test_random_machine(i);
    printf("%u histories with a clause, %llu of a random machine\n", judged, (unsigned long long)machines);
    uccl_ep_model_free(m);
    return test_end();
}
