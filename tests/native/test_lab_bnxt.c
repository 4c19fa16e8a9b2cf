/* SPDX-License-Identifier: Apache-2.0
 *
 * test_lab_bnxt.c: the Thor of the lab reads and writes its rings as the hardware does.
 *
 * Entries are put together here by hand from the layouts of bnxt_re-abi.h, not by the model's own code, and completions
 * are taken as the library takes them: by phase, cumulative, with what it has consumed told now and then. Decoding of
 * each operation, rings that wrap, all that makes no sense; receives, shared ones and their limit; laps of completions,
 * errors, what is told before and behind them, arming, overrun; doorbells that are refused.
 */
#include <fcntl.h>
#include <sys/mman.h>

#include "bnxt/bnxt.h"
#include "lab_plane.h"

#define SEND_WR 20u
#define SENDS 256u  /* a power of two that has room for SEND_WR, one more, and 128 that nobody fills */
#define RECEIVES 8u /* of 7 asked for */
#define ENTRIES 16u /* completions, of 11 asked for */
#define HANDLE 0xfedcba9876543210ull
#define DOORBELL_VALID (1ull << 58) /* of newer libraries */

static lab_device *device;
static lab_context *context;
static lab_cq *cq;
static lab_srq *srq;
static lab_qp *qp;
static struct {
    _Alignas(4096) uint8_t sends[SENDS * 128];
    uint8_t receives[RECEIVES * 128], shared[RECEIVES * 128], completions[ENTRIES * 32];
} rings;

static void put32(uint8_t *at, uint32_t v) {
    memcpy(at, &v, 4);
}

static void put64(uint8_t *at, uint64_t v) {
    memcpy(at, &v, 8);
}

static uint32_t get32(const uint8_t *at) {
    uint32_t v;
    memcpy(&v, at, 4);
    return v;
}

static uint64_t get64(const uint8_t *at) {
    uint64_t v;
    memcpy(&v, at, 8);
    return v;
}

/* A command with a vendor's part on both sides; `response` is where core structures have it. */
static int command(uint32_t number, void *core, size_t core_bytes, const void *vendor, size_t vendor_bytes, void *out,
                   size_t out_bytes, size_t vendor_out_bytes) {
    put64(core, (uintptr_t)out);
    const struct plane_command c = {.number = number,
                                    .core = core,
                                    .core_bytes = core_bytes,
                                    .vendor = vendor,
                                    .vendor_bytes = vendor_bytes,
                                    .out = out,
                                    .out_bytes = out_bytes,
                                    .vendor_out_bytes = vendor_out_bytes};
    return plane_errno(plane_write(context, &c));
}

static void ring(uint32_t type, uint32_t number, uint32_t index) {
    lab_bnxt.store(context, 0, 0, (uint64_t)type << 60 | DOORBELL_VALID | (uint64_t)number << 32 | index, 8);
}

static uint32_t refused(void) {
    return ((struct bnxt_context *)context->model_data)->said;
}

/* ------------------------------------------------------------------------------------------------------- objects */

static uint32_t pd;

static void open_all(void) {
    uint8_t out[256] = {0};
    struct ib_uverbs_get_context get = {0};
    const uint64_t wishes = 3; /* rings of any size, entries of any size: neither is granted */
    context = lab_context_new(device, 1000);
    const size_t core = sizeof(struct ib_uverbs_get_context_resp);
    CHECK_EQ(command(IB_USER_VERBS_CMD_GET_CONTEXT, &get, sizeof get, &wishes, 8, out, core, 48), 0);
    CHECK_EQ(get32(out + core), device->variant->part_id);
    CHECK_EQ(get32(out + core + 12), 32);                                              /* bytes of a completion */
    CHECK_EQ(get64(out + core + 24), device->variant->part_id == 0x1760 ? 0x43 : 0x3); /* chip, mode, MSN table */
    CHECK_EQ(get32(out + core + 32) & 0xffff, device->variant->part_id);
    CHECK_EQ(get32(out + core + 40), 0); /* entries of one size */

    struct ib_uverbs_alloc_pd alloc = {0};
    CHECK_EQ(command(IB_USER_VERBS_CMD_ALLOC_PD, &alloc, sizeof alloc, NULL, 0, out, 4, 16), 0);
    pd = get32(out);
    CHECK(get32(out + 4) && get32(out + 8) && get64(out + 12), "number, page and offset of the doorbell");
}

static int make_cq(uint32_t entries, const uint8_t *memory, uint64_t comp_mask) {
    struct ib_uverbs_create_cq in = {.cqe = entries, .comp_channel = -1, .user_handle = 5};
    const uint64_t vendor[3] = {(uintptr_t)memory, 0x1234, comp_mask};
    uint8_t out[64] = {0};
    const int error = command(IB_USER_VERBS_CMD_CREATE_CQ, &in, sizeof in, vendor, sizeof vendor, out, 8, 24);
    if (error) return error;
    cq = lab_find_cq(context, get32(out));
    CHECK_EQ(get32(out + 8 + 8), 1);  /* phase of the first lap */
    CHECK_EQ(get64(out + 8 + 16), 0); /* no page of toggles */
    CHECK_EQ(get32(out + 4), cq->entries);
    CHECK(lab_find_cq(context, get32(out + 8)) == cq, "doorbells find it by that number");
    return 0;
}

static void qp_wanted(struct ib_uverbs_create_qp *in, uint8_t type) {
    *in = (struct ib_uverbs_create_qp){.user_handle = 6,
                                       .pd_handle = pd,
                                       .send_cq_handle = cq->handle,
                                       .recv_cq_handle = cq->handle,
                                       .max_send_wr = SEND_WR,
                                       .max_recv_wr = RECEIVES - 1,
                                       .max_send_sge = 6,
                                       .max_recv_sge = 6,
                                       .max_inline_data = 96,
                                       .qp_type = type};
}

static int make_qp(struct ib_uverbs_create_qp *in, const uint64_t *vendor, size_t bytes) {
    uint8_t out[64] = {0};
    const size_t core = sizeof(struct ib_uverbs_create_qp_resp);
    const int error = command(IB_USER_VERBS_CMD_CREATE_QP, in, sizeof *in, vendor, bytes, out, core, 8);
    if (error) return error;
    qp = lab_find_qp(context, get32(out));
    CHECK_EQ(get32(out + core), qp->number); /* completions name it like that, and so do doorbells */
    return 0;
}

static void open_queue(uint8_t type, bool shared) {
    memset(&rings, 0, sizeof rings);
    open_all();
    CHECK_EQ(make_cq(ENTRIES - 5, rings.completions, 0), 0);
    CHECK_EQ(cq->entries, ENTRIES);
    struct ib_uverbs_create_qp in;
    qp_wanted(&in, type);
    if (shared) {
        struct ib_uverbs_create_srq wanted = {.user_handle = 7, .pd_handle = pd, .max_wr = RECEIVES - 1, .max_sge = 6};
        const uint64_t vendor[2] = {(uintptr_t)rings.shared, 0x4321};
        uint8_t out[64] = {0};
        const size_t core = sizeof(struct ib_uverbs_create_srq_resp);
        CHECK_EQ(command(IB_USER_VERBS_CMD_CREATE_SRQ, &wanted, sizeof wanted, vendor, sizeof vendor, out, core, 16),
                 0);
        srq = lab_find_srq(context, get32(out));
        CHECK(lab_find_srq(context, get32(out + core)) == srq, "doorbells find it by that number");
        in.is_srq = 1;
        in.srq_handle = srq->handle;
    }
    const uint64_t vendor[5] = {(uintptr_t)rings.sends, shared ? 0 : (uintptr_t)rings.receives, HANDLE};
    CHECK_EQ(make_qp(&in, vendor, sizeof vendor), 0);
}

static void close_queue(void) {
    lab_context_free(context);
}

static uint32_t events(enum lab_event event) {
    struct ib_uverbs_async_event_desc e;
    uint32_t n = 0;
    fcntl(context->async_read, F_SETFL, O_NONBLOCK);
    while (read(context->async_read, &e, sizeof e) == (ssize_t)sizeof e) {
        CHECK_EQ(e.event_type, event);
        n++;
    }
    return n;
}

/* --------------------------------------------------------------------------------------------------------- sends */

static uint32_t posted; /* index of the next entry */

static uint8_t *entry_of(uint8_t operation, uint8_t flags, uint8_t slots) {
    uint8_t *e = rings.sends + posted * 128;
    memset(e, 0xa5, 128); /* what a library does not write is of the lap before */
    e[0] = operation;
    e[1] = flags;
    e[2] = slots;
    e[3] = 0;
    return e;
}

static void piece(uint8_t *e, uint32_t i, uint64_t address, uint32_t key, uint32_t length) {
    put64(e + 32 + 16 * i, address);
    put32(e + 40 + 16 * i, key);
    put32(e + 44 + 16 * i, length);
}

static void post(void) {
    posted = (posted + 1) % SENDS;
    ring(0, qp->number, posted);
}

static struct lab_work fetched(void) {
    static struct lab_work work;
    memset(&work, 0xee, sizeof work); /* nothing of before may shine through */
    CHECK(lab_bnxt.fetch(qp, &work), "no entry");
    return work;
}

static void operations(void) {
    uint8_t *e;
    struct lab_work w;
    open_queue(LAB_RC, false);
    posted = 0;
    e = entry_of(0x04, 0x01 | 0x04, 4); /* write, two pieces, signalled, fenced */
    CHECK(!lab_bnxt.fetch(qp, &w), "an entry that was not posted");
    put64(e + 8, 300);
    put64(e + 16, 0x123456789abcdef0ull);
    put32(e + 24, 0xaabbccdd);
    piece(e, 0, 0x1000, 0x4242, 100);
    piece(e, 1, 0x2000, 0x4343, 200);
    post();
    w = fetched();
    CHECK_EQ(w.opcode, LAB_WRITE);
    CHECK(w.signalled && w.fence && !w.solicited, "flags");
    CHECK_EQ(w.remote_address, 0x123456789abcdef0ull);
    CHECK_EQ(w.rkey, 0xaabbccdd);
    CHECK_EQ(w.sges, 2);
    CHECK_EQ(w.inline_bytes, 0);
    CHECK_EQ(w.sge[1].length, 200);
    CHECK_EQ(w.sge[1].lkey, 0x4343);
    CHECK_EQ(w.sge[0].address, 0x1000);
    CHECK_EQ(w.cookie, 0);

    e = entry_of(0x05, 0x10 | 0x08, 4); /* write with immediate, inline, solicited, not signalled */
    put32(e + 4, 0x01020304);           /* a number here, big-endian on the wire */
    put64(e + 8, 21);
    memcpy(e + 32, "twenty-one bytes here", 21);
    post();
    w = fetched();
    CHECK_EQ(w.opcode, LAB_WRITE_IMM);
    CHECK(!w.signalled && !w.fence && w.solicited, "flags");
    CHECK(!memcmp(&w.immediate, "\x01\x02\x03\x04", 4), "the immediate");
    CHECK_EQ(w.inline_bytes, 21);
    CHECK_EQ(w.sges, 0);
    CHECK(!memcmp(w.data, "twenty-one bytes here", 21), "inline data");

    e = entry_of(0x0b, 0x02, 3); /* fetch-and-add, behind reads */
    put32(e + 4, 7);
    put64(e + 8, 0x8000);
    put64(e + 16, 41);
    piece(e, 0, 0x3000, 0x99, 8);
    post();
    w = fetched();
    CHECK_EQ(w.opcode, LAB_ADD);
    CHECK_EQ(w.add_or_swap, 41);
    CHECK_EQ(w.rkey, 7);
    CHECK_EQ(w.remote_address, 0x8000);
    CHECK(w.fence, "no fence");
    CHECK_EQ(w.sge[0].lkey, 0x99);

    e = entry_of(0x08, 0x01, 3); /* compare-and-swap */
    put32(e + 4, 7);
    put64(e + 8, 0x8000);
    put64(e + 16, 41);
    put64(e + 24, 17);
    piece(e, 0, 0x3000, 0x99, 8);
    post();
    w = fetched();
    CHECK_EQ(w.opcode, LAB_SWAP);
    CHECK_EQ(w.add_or_swap, 41);
    CHECK_EQ(w.compare, 17);

    e = entry_of(0x01, 0x01, 8); /* a message of six pieces, with an immediate */
    put32(e + 4, 5);
    put64(e + 8, 6);
    for (uint32_t i = 0; i < 6; i++) piece(e, i, i, i, 1);
    post();
    w = fetched();
    CHECK_EQ(w.opcode, LAB_SEND_IMM);
    CHECK_EQ(w.sges, 6);
    CHECK_EQ(w.sge[5].lkey, 5);
    e = entry_of(0x00, 0x01, 2); /* of none */
    put64(e + 8, 0);
    post();
    w = fetched();
    CHECK_EQ(w.opcode, LAB_SEND);
    CHECK_EQ(w.sges, 0);
    e = entry_of(0x06, 0x01, 3);
    put64(e + 8, 64);
    piece(e, 0, 0x4000, 5, 64);
    post();
    CHECK_EQ(fetched().opcode, LAB_READ);
    CHECK(!lab_bnxt.fetch(qp, &w), "one entry more than posted");
    CHECK_EQ(refused(), 0);
    close_queue();
}

/* Emulators of a process have no second mapping of the same pages (mremap(2) with an old size of zero). */
static bool pages_are_doubled(void) {
    const size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
    void *one = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(one != MAP_FAILED, "no memory");
    void *other = mremap(one, 0, bytes, MREMAP_MAYMOVE);
    if (other != MAP_FAILED) munmap(other, bytes);
    munmap(one, bytes);
    return other != MAP_FAILED;
}

/* The number of an address handle is read from a page that both see. */
static void numbers_of_handles(void) {
    void *page = NULL;
    CHECK_EQ(lab_bnxt.map(context, 0, (size_t)sysconf(_SC_PAGESIZE), PROT_READ | PROT_WRITE, &page), 0);
    struct ib_uverbs_create_ah in = {.pd_handle = pd,
                                     .attr = {.is_global = 1, .port_num = 1, .grh = {.sgid_index = 1}}};
    uint32_t out;
    for (uint32_t i = 0; i < 3; i++) {
        CHECK_EQ(command(IB_USER_VERBS_CMD_CREATE_AH, &in, sizeof in, NULL, 0, &out, sizeof out, 0), 0);
        CHECK(lab_ah_numbered(device, get32((uint8_t *)page + 0x10)) == lab_find_ah(context, out), "another handle");
    }
    munmap(page, (size_t)sysconf(_SC_PAGESIZE)); /* the NIC's own stays */
    CHECK_EQ(command(IB_USER_VERBS_CMD_CREATE_AH, &in, sizeof in, NULL, 0, &out, sizeof out, 0), 0);
}

/* More entries than one doorbell may cover: the first of them that is too much is none that the NIC understands. */
static void batches(void) {
    struct lab_work w;
    open_queue(LAB_RC, false);
    posted = 0;
    const uint64_t as_it_was = context->device->knobs.max_batch;
    CHECK_EQ(as_it_was, 64);
    context->device->knobs.max_batch = 4;
    for (uint32_t lap = 0; lap < 2 * SENDS; lap += 4) { /* as many as it takes, round and round */
        for (uint32_t i = 0; i < 4; i++, posted = (posted + 1) % SENDS) put64(entry_of(0x00, 0x01, 2) + 8, 0);
        ring(0, qp->number, posted);
        for (uint32_t i = 0; i < 4; i++) CHECK_EQ(fetched().opcode, LAB_SEND);
    }
    for (uint32_t i = 0; i < 7; i++, posted = (posted + 1) % SENDS) put64(entry_of(0x00, 0x01, 2) + 8, 0);
    ring(0, qp->number, posted);
    for (uint32_t i = 0; i < 7; i++) CHECK_EQ(fetched().opcode, i == 4 ? LAB_BAD : LAB_SEND);
    CHECK(!lab_bnxt.fetch(qp, &w), "one entry more than posted");
    for (uint32_t lap = 0; lap < SENDS; lap++) { /* and the next lap is another one */
        put64(entry_of(0x00, 0x01, 2) + 8, 0);
        post();
        CHECK_EQ(fetched().opcode, LAB_SEND);
    }
    context->device->knobs.max_batch = as_it_was;
    close_queue();
}

static void datagrams(void) {
    open_queue(LAB_UD, false);
    posted = 0;
    uint8_t *e = entry_of(0x01, 0x01, 3);
    put32(e + 4, 0x0a);
    put32(e + 8, 10);          /* bytes */
    put32(e + 12, 0x11111111); /* queue key */
    put32(e + 16, 0x0c0012);
    put32(e + 20, 0x00345);
    piece(e, 0, 0x5000, 3, 10);
    post();
    const struct lab_work w = fetched();
    CHECK_EQ(w.opcode, LAB_SEND_IMM);
    CHECK_EQ(w.qkey, 0x11111111);
    CHECK_EQ(w.ah, 0x345);
    CHECK_EQ(w.dest_qpn, 0x0c0012);
    CHECK_EQ(w.sge[0].address, 0x5000);

    if (pages_are_doubled()) numbers_of_handles();
    void *page = NULL;
    CHECK_EQ(lab_bnxt.map(context, 4096, 4096, PROT_READ, &page), EINVAL);
    CHECK_EQ(lab_bnxt.map(context, 0, 1, PROT_READ, &page), EINVAL);
    close_queue();
}

/* Batches without end: each entry comes out as it went in. */
static void wraps(test_rng *rng) {
    uint64_t in = 0, out = 0;
    const uint64_t rounds = test_scaled(100000);
    open_queue(LAB_RC, false);
    posted = 0;
    struct lab_work *w = &(struct lab_work){0};
    while (out < rounds) {
        for (uint64_t n = test_below(rng, SEND_WR); n && in - out < SEND_WR; n--, in++) {
            const uint32_t bytes = (uint32_t)test_below(rng, 97);
            uint8_t *e = entry_of(0x04, 0x10, (uint8_t)(2 + (bytes + 15) / 16));
            put64(e + 8, bytes);
            put64(e + 16, in);
            for (uint32_t k = 0; k < bytes; k++) e[32 + k] = (uint8_t)(in + k);
            posted = (posted + 1) % SENDS;
        }
        ring(0, qp->number, posted | (uint32_t)(in / SENDS & 1) << 24); /* the epoch is not looked at */
        for (uint64_t n = test_below(rng, SEND_WR); n && lab_bnxt.fetch(qp, w); n--, out++) {
            CHECK(out < in, "an entry that was not posted");
            CHECK_EQ(w->opcode, LAB_WRITE);
            CHECK_EQ(w->remote_address, out);
            CHECK_EQ(w->cookie, out % SENDS);
            for (uint32_t k = 0; k < w->inline_bytes; k++) CHECK_EQ(w->data[k], (uint8_t)(out + k));
        }
    }
    CHECK_EQ(refused(), 0);
    close_queue();
}

/* What hardware would end in a local operation error. None of it hangs the queue, or reads outside it. */
static void nonsense(test_rng *rng) {
    static const struct {
        uint8_t operation, flags, slots;
        uint32_t length;
    } bad[] = {
        {0x77, 0x01, 3, 8},  /* an operation that does not exist */
        {0x02, 0x01, 3, 8},  /* ones that are not offered: send and invalidate, */
        {0x0e, 0x01, 3, 8},  /* bind */
        {0x04, 0x01, 1, 0},  /* a head of less than a head */
        {0x04, 0x01, 9, 0},  /* more slots than an entry has */
        {0x04, 0x01, 3, 9},  /* another length than its pieces have */
        {0x05, 0x11, 3, 17}, /* more inline bytes than slots */
        {0x06, 0x11, 3, 8},  /* a read into the entry itself */
        {0x0b, 0x01, 2, 8},  /* an atomic without its result, */
        {0x0b, 0x11, 3, 8},  /* with an inline one, */
        {0x08, 0x01, 4, 8},  /* with two */
    };
    struct lab_work *w = &(struct lab_work){0};
    open_queue(LAB_RC, false);
    posted = 0;
    const int said = dup(STDERR_FILENO), nowhere = open("/dev/null", O_WRONLY);
    CHECK(said >= 0 && nowhere >= 0 && dup2(nowhere, STDERR_FILENO) >= 0, "dup"); /* "not implemented", many times */
    size_t taken = 0;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        uint8_t *e = entry_of(bad[i].operation, bad[i].flags, bad[i].slots);
        put64(e + 8, bad[i].length);
        for (uint32_t k = 0; k < 6; k++) piece(e, k, 0x1000, 1, k ? 0 : 8);
        post();
        taken += lab_bnxt.fetch(qp, w) && w->opcode == LAB_BAD && !lab_bnxt.fetch(qp, w);
    }
    uint64_t rounds = test_scaled(10000), stuck = 0;
    struct lab_receive *r = &(struct lab_receive){0};
    while (rounds--) {
        for (size_t k = 0; k < 512; k++) rings.sends[test_below(rng, sizeof rings.sends)] = (uint8_t)test_random(rng);
        for (size_t k = 0; k < 64; k++)
            rings.receives[test_below(rng, sizeof rings.receives)] = (uint8_t)test_random(rng);
        const uint64_t value = test_random(rng), queue = test_below(rng, 2) ? (uint64_t)qp->number : cq->handle;
        /* Half of them name a queue that there is, and an index near its ring. */
        if (test_below(rng, 2))
            lab_bnxt.store(context, 0, 0, value, 8);
        else
            lab_bnxt.store(context, 0, 0, (value & 15ull << 60) | queue << 32 | (value & 0x1ff), 8);
        uint32_t n = 0;
        while (lab_bnxt.fetch(qp, w) && n++ < SENDS) stuck += w->sges > LAB_MAX_SGES || w->inline_bytes > 96;
        stuck += n >= SENDS;
        for (n = 0; lab_bnxt.fetch_receive(qp, r) && n++ < RECEIVES;) stuck += r->sges > 6;
        stuck += n >= RECEIVES || lab_bnxt.cq_used(cq) > ENTRIES;
    }
    dup2(said, STDERR_FILENO);
    close(said);
    close(nowhere);
    CHECK_EQ(taken, sizeof bad / sizeof *bad);
    CHECK_EQ(stuck, 0);
    close_queue();
}

/* ------------------------------------------------------------------------------------------------------ receives */

static void write_receive(uint8_t *e, uint32_t tag, uint32_t n) {
    memset(e, 0, 128);
    e[0] = 0x80;
    e[2] = (uint8_t)(2 + (n ? n : 1)); /* hardware wants one piece at least: it has no bytes then */
    put32(e + 8, tag);
    for (uint32_t i = 0; i < n; i++) piece(e, i, 0x1000 + i, 5 + i, 10 + tag);
}

static void receives(void) {
    struct lab_receive r;
    open_queue(LAB_RC, false);
    CHECK(!lab_bnxt.fetch_receive(qp, &r), "a receive that was not posted");
    for (uint32_t i = 0; i < 1003; i++) {
        write_receive(rings.receives + i % RECEIVES * 128, i % RECEIVES, i % 7);
        ring(1, qp->number, (i + 1) % RECEIVES);
        CHECK(lab_bnxt.fetch_receive(qp, &r), "receive %u is not seen", i);
        CHECK_EQ(r.sges, i % 7 ? i % 7 : 1);
        CHECK_EQ(r.sge[0].length, i % 7 ? 10 + i % RECEIVES : 0);
        CHECK(!lab_bnxt.fetch_receive(qp, &r), "receive %u twice", i);
    }
    /* After a reset both sides begin at zero, and what nobody asked about before is nothing any more. */
    struct lab_done d = {.qp = qp, .opcode = LAB_WRITE, .cookie = 5};
    lab_bnxt.complete(cq, &d);
    ring(0, qp->number, 3);
    qp->state = LAB_RESET;
    CHECK_EQ(lab_bnxt.modify_qp(qp, LAB_RTS, NULL), 0);
    CHECK(!lab_bnxt.fetch(qp, &(struct lab_work){0}), "what was posted before");
    write_receive(rings.receives, 77, 1);
    ring(1, qp->number, 1);
    CHECK(lab_bnxt.fetch_receive(qp, &r) && r.sge[0].length == 87, "the first one after a reset");
    d.cookie = 0;
    d.status = VNIC_REMOTE_ACCESS;
    lab_bnxt.complete(cq, &d);
    CHECK_EQ(get32(rings.completions + 24), 1 | 7 << 8);
    close_queue();
}

static void shared_receives(void) {
    static const uint32_t tags[] = {0, 5, 2, 7, 3, 1}; /* the program gives places back in any order */
    struct lab_receive r;
    open_queue(LAB_RC, true);
    for (uint32_t i = 0; i < 6; i++) write_receive(rings.shared + i * 128, tags[i], 1);
    ring(2, srq->handle, 6);
    ring(3, srq->handle, 4); /* an event when fewer than four are left */
    for (uint32_t i = 0; i < 6; i++) {
        CHECK(lab_bnxt.fetch_shared_receive(srq, &r), "receive %u is not seen", i);
        CHECK_EQ(r.cookie, tags[i]);
        lab_srq_look(srq);
        CHECK_EQ(events(LAB_EVENT_SRQ_LIMIT), i == 2); /* once */
    }
    CHECK(!lab_bnxt.fetch_shared_receive(srq, &r), "one more than posted");
    const struct lab_done d = {.qp = qp, .receive = true, .signalled = true, .cookie = 5, .bytes = 3};
    lab_bnxt.complete(cq, &d);
    CHECK_EQ(get32(rings.completions + 28), 5);                    /* the tag comes back, */
    CHECK_EQ(get32(rings.completions + 24), 1 | 1 << 1 | 1 << 16); /* for a shared receive */
    close_queue();
}

/* --------------------------------------------------------------------------------------------------- completions */

/* The library's side: what it has taken, and what it has told of that. */
static struct { uint32_t head, phase, hidden, last; /* last: of its requests */ } library;

static const uint8_t *next_completion(void) {
    const uint8_t *e = rings.completions + library.head * 32;
    return (get32(e + 24) & 1) == library.phase ? e : NULL;
}

static void take(void) {
    if (++library.head == ENTRIES) {
        library.head = 0;
        library.phase ^= 1;
    }
    if (++library.hidden < ENTRIES / 2) return;
    library.hidden = 0;
    ring(4, cq->handle, library.head);
}

static void begin(uint8_t type, bool shared) {
    open_queue(type, shared);
    library.head = library.hidden = library.last = 0;
    library.phase = 1;
}

static struct lab_done done_of(uint32_t index, bool signalled, vnic_status status) {
    return (struct lab_done){.qp = qp, .signalled = signalled, .opcode = LAB_WRITE, .cookie = index, .status = status};
}

/* The queue pair is in error: what is said to each of its queues. */
static void end(void) {
    struct lab_done d = {.qp = qp, .rest = true, .status = VNIC_FLUSHED};
    lab_bnxt.complete(cq, &d);
    d.receive = true;
    lab_bnxt.complete(cq, &d);
}

/* Many laps, of requests of which few are asked for, and receives in between. */
static void laps(test_rng *rng) {
    uint32_t index = 0, waiting = 0;
    begin(LAB_RC, false);
    for (uint64_t round = test_scaled(20000); round; round--) {
        CHECK(!next_completion(), "an entry that nobody wrote");
        if (test_below(rng, 2)) {
            const bool is_write = test_below(rng, 2), immediate = is_write || test_below(rng, 2);
            struct lab_done d = {.qp = qp, .receive = true, .signalled = true, .bytes = index};
            d.is_write = is_write;
            d.has_immediate = immediate;
            memcpy(&d.immediate, "\x01\x02\x03\x04", 4);
            lab_bnxt.complete(cq, &d);
            const uint8_t *e = next_completion();
            CHECK(e, "no receive");
            CHECK_EQ(get32(e + 24) >> 1, 1u | (immediate ? 2u << 15 : 0) | (is_write ? 8u << 15 : 0));
            CHECK_EQ(get32(e), index);
            CHECK_EQ(get32(e + 4), 0x01020304);
            CHECK_EQ(get64(e + 8), HANDLE);
            take();
            continue;
        }
        const bool signalled = waiting == SEND_WR || !test_below(rng, 4);
        const struct lab_done d = done_of(index, signalled, VNIC_OK);
        lab_bnxt.complete(cq, &d);
        index = (index + 1) % SENDS;
        waiting++;
        CHECK_EQ(next_completion() != NULL, signalled);
        if (!signalled) continue;
        const uint8_t *e = next_completion();
        CHECK_EQ(get32(e + 24) >> 1, 0);
        CHECK_EQ(get64(e), HANDLE);
        CHECK_EQ((get32(e + 8) + SENDS - library.last) % SENDS, waiting); /* all of them, and no more */
        library.last = get32(e + 8);
        waiting = 0;
        take();
    }
    CHECK_EQ(refused(), 0);
    CHECK(lab_bnxt.cq_used(cq) < ENTRIES / 2, "what was taken is not known");
    close_queue();
}

static void errors(void) {
    static const struct {
        vnic_status status;
        uint8_t request, receive;
    } rows[] = {{VNIC_LOCAL_LENGTH, 0x2, 2},   {VNIC_LOCAL_OPERATION, 0x3, 4}, {VNIC_LOCAL_ACCESS, 0x4, 3},
                {VNIC_REMOTE_INVALID, 0x6, 6}, {VNIC_REMOTE_ACCESS, 0x7, 4},   {VNIC_REMOTE_OPERATION, 0x8, 4},
                {VNIC_RNR_EXCEEDED, 0x9, 4},   {VNIC_RETRY_EXCEEDED, 0xa, 4},  {VNIC_UNREACHABLE, 0xa, 4}};
    for (uint32_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        begin(LAB_RC, false);
        struct lab_done d = done_of(0, false, VNIC_OK); /* nobody asked about the first two */
        lab_bnxt.complete(cq, &d);
        d.cookie = 1;
        lab_bnxt.complete(cq, &d);
        CHECK(!next_completion(), "told without being asked");
        d = done_of(2, false, rows[i].status);
        lab_bnxt.complete(cq, &d);
        const uint8_t *e = next_completion(); /* the library would take the error for the first one's */
        CHECK(e && get32(e + 24) >> 1 == 0 && get32(e + 8) == 2, "those before it");
        take();
        e = next_completion();
        CHECK(e, "no error");
        CHECK_EQ(get32(e + 24) >> 1, (uint32_t)rows[i].request << 7);
        CHECK_EQ(get32(e + 8), 3);
        take();
        d.receive = true;
        lab_bnxt.complete(cq, &d);
        e = next_completion();
        CHECK_EQ(get32(e + 24) >> 1, 1u | (uint32_t)rows[i].receive << 7);
        take();
        end();
        e = next_completion();
        CHECK(e && get32(e + 24) >> 1 == 14 && get64(e) == HANDLE, "no terminal completion");
        take();
        CHECK(!next_completion(), "one more");
        close_queue();
    }
    /* The program itself puts it into error: what was done before is told first. */
    begin(LAB_RC, false);
    const struct lab_done d = done_of(0, false, VNIC_OK);
    lab_bnxt.complete(cq, &d);
    end();
    CHECK(next_completion() && get32(next_completion() + 8) == 1, "what was done");
    take();
    CHECK(next_completion() && get32(next_completion() + 24) >> 1 == 14, "no terminal completion");
    close_queue();
}

static void datagrams_received(void) {
    begin(LAB_UD, false);
    const struct lab_done d = {.qp = qp, .receive = true, .signalled = true, .bytes = 140, .source_qpn = 0xa1234};
    lab_bnxt.complete(cq, &d);
    const uint8_t *e = next_completion();
    CHECK_EQ(get32(e + 24) >> 1, 2);
    CHECK_EQ(get32(e), 140);
    CHECK_EQ(get64(e + 16) >> 48, 0x1234);
    CHECK_EQ(get32(e + 28) >> 24, 0xa);
    close_queue();
}

/* A ring that is full takes nothing more, and the program hears of it once. */
static void overrun(void) {
    begin(LAB_RC, false);
    for (uint32_t i = 0; i < ENTRIES; i++) {
        CHECK(lab_bnxt.cq_used(cq) < cq->entries, "full with %u", i);
        const struct lab_done d = done_of(i, true, VNIC_OK);
        lab_bnxt.complete(cq, &d);
    }
    CHECK_EQ(lab_bnxt.cq_used(cq), cq->entries);
    CHECK(!cq->overrun, "too early");
    const uint32_t first = get32(rings.completions + 8);
    for (uint32_t i = 0; i < 2; i++) end();
    CHECK(cq->overrun, "the terminal completion had no room");
    CHECK_EQ(get32(rings.completions + 8), first);
    CHECK_EQ(events(LAB_EVENT_CQ_ERR), 1);
    close_queue();
}

/* Events are read off cq->armed: lab_cq_notify clears it. */
static void arming(void) {
    begin(LAB_RC, false);
    struct lab_done d = {.qp = qp, .receive = true, .signalled = true};
    CHECK(!cq->armed, "armed before anybody asked");
    ring(6, cq->handle, 0);
    CHECK(cq->armed && !cq->solicited_only, "not armed");
    lab_bnxt.complete(cq, &d);
    lab_cq_notify(cq, false);
    ring(6, cq->handle, 0); /* the program has not seen the entry that is there */
    CHECK(!cq->armed, "an event at once");
    ring(6, cq->handle, 1);
    CHECK(cq->armed, "nothing new is there");
    CHECK_EQ(lab_bnxt.cq_used(cq), 0); /* arming says what was taken, too */
    ring(5, cq->handle, 1);
    CHECK(cq->armed && cq->solicited_only, "armed for solicited ones");
    lab_bnxt.complete(cq, &d);
    ring(5, cq->handle, 1);
    CHECK(cq->armed, "the entry was not solicited");
    d.solicited = true;
    lab_bnxt.complete(cq, &d);
    ring(5, cq->handle, 1);
    CHECK(!cq->armed, "the solicited entry is there");
    ring(5, cq->handle, 3);
    CHECK(cq->armed, "and has been taken");
    end();
    ring(5, cq->handle, 3);
    CHECK(!cq->armed, "an end is an event");
    CHECK_EQ(refused(), 0);
    close_queue();
}

/* ------------------------------------------------------------------------------------------------------ refusals */

static void refusals(void) {
    open_queue(LAB_RC, false);
    uint64_t vendor[5] = {(uintptr_t)rings.sends, (uintptr_t)rings.receives, HANDLE};
    struct ib_uverbs_create_qp in;
    qp_wanted(&in, LAB_UC);
    CHECK_EQ(make_qp(&in, vendor, sizeof vendor), EOPNOTSUPP);
    qp_wanted(&in, LAB_RC);
    in.max_inline_data = 97;
    CHECK_EQ(make_qp(&in, vendor, sizeof vendor), EINVAL);
    in.max_inline_data = 0;
    vendor[4] = 1024; /* entries of any size */
    CHECK_EQ(make_qp(&in, vendor, sizeof vendor), EOPNOTSUPP);
    vendor[4] = 0;
    vendor[0] = 0; /* rings that are not there, or not where a ring may begin */
    CHECK_EQ(make_qp(&in, vendor, sizeof vendor), EFAULT);
    vendor[0] = (uintptr_t)rings.sends + 8;
    CHECK_EQ(make_qp(&in, vendor, sizeof vendor), EFAULT);
    vendor[0] = (uintptr_t)rings.sends;
    vendor[1] = 0;
    CHECK_EQ(make_qp(&in, vendor, sizeof vendor), EFAULT);
    vendor[1] = (uintptr_t)rings.receives;
    CHECK_EQ(make_qp(&in, vendor, 24), 0); /* as an older library asks */
    CHECK_EQ(make_cq(11, NULL, 0), EFAULT);
    CHECK_EQ(make_cq(11, rings.completions, 1), EOPNOTSUPP);

    /* Doorbells: none of them changes anything, each is said once. */
    const uint32_t types[] = {7, 8, 9, 12, 13, 15};
    for (uint32_t i = 0; i < sizeof types / sizeof *types; i++) {
        ring(types[i], cq->handle, 0);
        CHECK(refused() >> types[i] & 1, "type %u is taken", types[i]);
    }
    uint32_t said = refused();
    lab_bnxt.store(context, 0, 8, 0, 8);
    CHECK(refused() != said, "a store beside the register");
    said = refused();
    ring(0, 0xfffff, 0);
    CHECK(refused() != said, "a queue that there is not");
    said = refused();
    ring(0, qp->number, SENDS);
    CHECK(refused() != said && !lab_bnxt.fetch(qp, &(struct lab_work){0}), "an index beyond its ring");
    ring(4, cq->handle, 1);
    CHECK_EQ(lab_bnxt.cq_used(cq), 0); /* what was not written cannot have been taken */
    close_queue();
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 120);
    static const char *const variants[] = {"nic=thor", "nic=thor,variant=thor"};
    test_rng rng = test_rng_at(0);
    for (uint32_t i = 0; i < 2; i++) {
        uint32_t n;
        char text[256];
        device = lab_devices_parse(variants[i], &n, text);
        CHECK(device && n == 1, "%s", text);
        open_queue(LAB_RC, false);
        close_queue();
        free(device);
    }
    uint32_t n;
    setenv("UCCL_EP_LAB", "nic=thor", 1);
    device = lab_devices(&n); /* the one in which queues are found by number */
    CHECK_EQ(n, 1);
    operations();
    batches();
    datagrams();
    wraps(&rng);
    nonsense(&rng);
    receives();
    shared_receives();
    laps(&rng);
    errors();
    datagrams_received();
    overrun();
    arming();
    refusals();
    return test_end();
}
