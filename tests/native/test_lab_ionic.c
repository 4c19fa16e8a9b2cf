/* SPDX-License-Identifier: Apache-2.0
 *
 * test_lab_ionic.c: the Pollara of the lab reads and writes its queues as the hardware does.
 *
 * Entries are put together here by hand from the layouts of ionic_fw_types.h, not by the model's own code, and
 * completions are taken as libionic takes them: decoding of each operation in both versions, lists with lengths in
 * front, laps and their colours, all that makes no sense; message numbers over many laps, errors, arming, doorbells;
 * the responder resources of the whole device.
 */
#include <endian.h>
#include <fcntl.h>
#include <sys/mman.h>

#include "bytes.h"
#include "ionic/ionic.h"
#include "lab_plane.h"

#define PAGE 65536u /* of the largest pages that there are */
#define RING 64u    /* entries of a ring of work; of 64 bytes it is a page of 4096 */
#define ENTRIES 128u

static lab_device *devices; /* one of each version */
static lab_context *context;
static lab_pd *pd;
static lab_qp *qp;
static lab_cq *cq;
static bool second;

static struct {
    _Alignas(PAGE) uint8_t sends[PAGE];
    uint8_t receives[PAGE], completions[PAGE];
} memory;

/* The program's side. */
static struct {
    uint32_t posted, received, shift;
    bool colour;
} program;

static void ring_doorbell(uint32_t type, uint32_t number, uint64_t low) {
    lab_ionic.store(context, 0, type * 8, htole64((uint64_t)number << 24 | low), 8);
}

static struct ionic_ring ring_of(void *at, uint32_t entries, uint32_t shift) {
    return (struct ionic_ring){.address = (uintptr_t)at,
                               .bytes = entries << shift,
                               .mask = (uint16_t)(entries - 1),
                               .depth_shift = (uint8_t)__builtin_ctz(entries),
                               .stride_shift = (uint8_t)shift};
}

static void open_device(bool of_second) {
    struct ionic_context_reply reply;
    struct lab_call call = {.out = (uint8_t *)&reply, .out_room = sizeof reply};
    second = of_second;
    context = lab_context_new(&devices[second], -1);
    CHECK_EQ(lab_ionic.open(context, &call), 0);
    CHECK_EQ(call.out_bytes, 40);
    CHECK_EQ(reply.version, second ? 2 : 1);
    CHECK_EQ(1u << reply.page_shift, sysconf(_SC_PAGESIZE));
    CHECK(reply.operations >= 11 && reply.pipelines == 1 && !reply.express_strides && !reply.clock_offset, "the reply");
    pd = lab_new(context, LAB_PD);
    pd->context = context;
    lab_publish(context, LAB_PD, pd);
}

static void close_device(void) {
    lab_context_free(context);
    context = NULL;
}

static int make_qp(lab_qp *of, enum lab_qp_type type, uint32_t shift, uint8_t cmb) {
    const struct ionic_qp_request request = {.send = ring_of(memory.sends, RING, shift),
                                             .receive = ring_of(memory.receives, RING, shift),
                                             .send_spec = 16,
                                             .receive_spec = 16,
                                             .send_cmb = cmb,
                                             .pipeline_mask = 1};
    struct ionic_qp_reply reply;
    struct lab_call call = {(const uint8_t *)&request, sizeof request, (uint8_t *)&reply, sizeof reply, 0};
    of->pd = pd;
    of->type = type;
    of->max_send_wr = of->max_recv_wr = RING - 1;
    const int error = lab_ionic.create_qp(of, &call);
    if (error) return error;
    CHECK_EQ(call.out_bytes, 24);
    CHECK_EQ(reply.number, of->number);
    CHECK(!reply.send_cmb && !reply.receive_cmb && !reply.pipeline, "memory of the NIC's was granted");
    return 0;
}

static void open_queue(enum lab_qp_type type, uint32_t shift) {
    memset(memory.sends, 0, sizeof memory.sends);
    memset(memory.receives, 0, sizeof memory.receives);
    qp = lab_new(context, LAB_QP);
    CHECK_EQ(make_qp(qp, type, shift, 1 | 4), 0); /* the library asks for express doorbells if it may */
    CHECK_EQ(lab_flow_open(qp), 0);
    lab_publish(context, LAB_QP, qp);
    memset(&program, 0, sizeof program);
    program.shift = shift;
    program.colour = true;
}

static void destroy_qp(lab_qp *of) {
    lab_flow_close(of);
    lab_ionic.destroy_qp(of);
    lab_free(context, LAB_QP, of);
}

static void close_queue(void) {
    destroy_qp(qp);
    qp = NULL;
}

/* Operation of either version. */
static uint8_t operation(uint8_t v1, uint8_t v2) {
    return second ? v2 : v1;
}

/* The next entry of the ring, empty but for its head. */
static uint8_t *entry(uint8_t op, uint8_t pieces, uint32_t flags) {
    uint8_t *at = memory.sends + ((size_t)program.posted << program.shift);
    memset(at, 0, (size_t)1 << program.shift);
    put_le64(at, program.posted);
    at[8] = op;
    at[9] = pieces;
    put_be16(at + 10, (uint16_t)(flags | (program.colour ? IONIC_COLOUR : 0)));
    return at;
}

static void post(void) {
    program.posted = (program.posted + 1) % RING;
    if (!program.posted) program.colour = !program.colour;
    ring_doorbell(IONIC_TYPE_SEND, qp->number, program.posted);
}

static void piece(uint8_t *at, uint64_t address, uint32_t length, uint32_t key) {
    put_be64(at, address);
    put_be32(at + 8, length);
    put_be32(at + 12, key);
}

static const struct lab_work *fetched(void) {
    static struct lab_work work;
    memset(&work, 0xee, sizeof work); /* nothing of before may shine through */
    CHECK(lab_ionic.fetch(qp, &work), "no entry");
    return &work;
}

static int silence(void) {
    const int said = dup(STDERR_FILENO), nowhere = open("/dev/null", O_WRONLY);
    CHECK(said >= 0 && nowhere >= 0 && dup2(nowhere, STDERR_FILENO) >= 0, "dup");
    close(nowhere);
    return said;
}

static void speak(int said) {
    dup2(said, STDERR_FILENO);
    close(said);
}

/* -------------------------------------------------------------------------------------------------------------- sends
 */

static void operations(void) {
    struct lab_work none;
    open_queue(LAB_RC, 7);
    CHECK(!lab_ionic.fetch(qp, &none), "an entry that was not posted");

    uint8_t *e = entry(operation(0x04, 0x21), 2, IONIC_SIGNALLED | IONIC_FENCE); /* write of two pieces */
    put_be64(e + 16, 0x123456789abcdef0ull);
    put_be32(e + 24, 0xaabbccdd);
    put_be32(e + 28, 300);
    piece(e + 32, 0x1000, 100, 0x4242);
    piece(e + 48, 0x2000, 200, 0x4343);
    CHECK(!lab_ionic.fetch(qp, &none), "an entry before its doorbell");
    post();
    const struct lab_work *w = fetched();
    CHECK_EQ(w->opcode, LAB_WRITE);
    CHECK(w->signalled && w->fence && !w->solicited, "flags");
    CHECK_EQ(w->remote_address, 0x123456789abcdef0ull);
    CHECK_EQ(w->rkey, 0xaabbccdd);
    CHECK_EQ(w->sges, 2);
    CHECK_EQ(w->inline_bytes, 0);
    CHECK_EQ(w->sge[1].length, 200);
    CHECK_EQ(w->sge[1].lkey, 0x4343);
    CHECK_EQ(w->sge[0].address, 0x1000);
    CHECK_EQ(w->cookie, IONIC_NUMBERED);

    e = entry(operation(0x05, 0x61), 0, IONIC_SOLICITED | IONIC_INLINE); /* write with immediate, inline */
    memcpy(e + 12, "\x01\x02\x03\x04", 4);
    put_be32(e + 28, 96);
    memset(e + 32, 0x5a, 96);
    post();
    w = fetched();
    CHECK_EQ(w->opcode, LAB_WRITE_IMM);
    CHECK(!w->signalled && !w->fence && w->solicited, "flags");
    CHECK(!memcmp(&w->immediate, "\x01\x02\x03\x04", 4), "the immediate");
    CHECK_EQ(w->inline_bytes, 96);
    CHECK_EQ(w->sges, 0);
    CHECK(!memcmp(w->data, e + 32, 96), "inline data");
    CHECK_EQ(w->cookie, IONIC_NUMBERED | 1);

    e = entry(operation(0x07, 0x05), 1, IONIC_SIGNALLED); /* fetch-and-add */
    put_be64(e + 16, 0x8000);
    put_be32(e + 24, 7);
    put_be64(e + 28, 0x4100000029ull);
    if (second) {
        put_be32(e + 44, 0x99);
        put_be64(e + 48, 0x3000);
    } else {
        piece(e + 48, 0x3000, 8, 0x99);
    }
    post();
    w = fetched();
    CHECK_EQ(w->opcode, LAB_ADD);
    CHECK_EQ(w->add_or_swap, 0x4100000029ull);
    CHECK_EQ(w->sges, 1);
    CHECK_EQ(w->sge[0].lkey, 0x99);
    CHECK_EQ(w->sge[0].address, 0x3000);
    CHECK_EQ(w->sge[0].length, 8);
    CHECK_EQ(w->inline_bytes, 0);

    uint8_t *swap = entry(operation(0x06, 0x04), 1, IONIC_SIGNALLED); /* compare-and-swap */
    memcpy(swap + 16, e + 16, 48);
    put_be64(swap + 36, 0x1700000011ull);
    post();
    w = fetched();
    CHECK_EQ(w->opcode, LAB_SWAP);
    CHECK_EQ(w->add_or_swap, 0x4100000029ull);
    CHECK_EQ(w->compare, 0x1700000011ull);

    e = entry(operation(0x00, 0x20), 1, 0); /* send, send with immediate, read, a write of nothing */
    put_be32(e + 28, 64);
    piece(e + 32, 0x4000, 64, 5);
    post();
    CHECK_EQ(fetched()->opcode, LAB_SEND);
    e = entry(operation(0x02, 0x60), 0, 0);
    memcpy(e + 12, "abcd", 4);
    post();
    w = fetched();
    CHECK_EQ(w->opcode, LAB_SEND_IMM);
    CHECK_EQ(w->sges, 0);
    CHECK(!memcmp(&w->immediate, "abcd", 4), "the immediate");
    e = entry(operation(0x03, 0x02), 1, 0);
    put_be32(e + 28, 64);
    piece(e + 32, 0x4000, 64, 5);
    post();
    CHECK_EQ(fetched()->opcode, LAB_READ);
    entry(operation(0x04, 0x21), 0, IONIC_INLINE);
    post();
    w = fetched();
    CHECK_EQ(w->opcode, LAB_WRITE);
    CHECK_EQ(w->inline_bytes + w->sges, 0);
    CHECK(!lab_ionic.fetch(qp, &none), "one entry more than posted");
    close_queue();
}

/* More entries than one doorbell may cover (knob max_batch): the first that is too much is not understood. */
static void batches(void) {
    open_queue(LAB_RC, 6);
    context->device->knobs.max_batch = 3;
    for (uint32_t lap = 0; lap < 100; lap++) {
        const uint32_t n = lap == 50 ? 5 : 1 + lap % 3;
        for (uint32_t i = 0; i < n; i++) {
            put_be32(entry(operation(0x00, 0x20), 0, IONIC_SIGNALLED) + 28, 0);
            program.posted = (program.posted + 1) % RING;
            if (!program.posted) program.colour = !program.colour;
        }
        ring_doorbell(IONIC_TYPE_SEND, qp->number, program.posted);
        for (uint32_t i = 0; i < n; i++) CHECK_EQ(fetched()->opcode, i == 3 ? LAB_BAD : LAB_SEND);
    }
    context->device->knobs.max_batch = 0;
    close_queue();
}

static void datagrams(void) {
    open_queue(LAB_UD, 6);
    uint8_t *e = entry(operation(0x02, 0x60), 1, 0);
    put_be32(e + 16, 17);         /* address handle */
    put_be32(e + 20, 0x0c0012);   /* queue pair */
    put_be32(e + 24, 0x11111111); /* queue key */
    put_be32(e + 28, 10);
    piece(e + 32, 0x5000, 10, 3);
    post();
    const struct lab_work *w = fetched();
    CHECK_EQ(w->opcode, LAB_SEND_IMM);
    CHECK_EQ(w->ah, 17);
    CHECK_EQ(w->dest_qpn, 0x0c0012);
    CHECK_EQ(w->qkey, 0x11111111);
    CHECK_EQ(w->sge[0].address, 0x5000);
    CHECK_EQ(w->cookie, 0); /* no message's number */
    CHECK(w->signalled, "without a number each has an entry");
    entry(operation(0x04, 0x21), 0, 0);
    post();
    CHECK_EQ(fetched()->opcode, LAB_BAD);
    close_queue();
}

/* Lists as long as they get, with lengths in front where there are more than two pieces. */
static void lists(void) {
    for (uint32_t n = 0; n <= 16; n++)
        for (uint32_t with_spec = 0; with_spec < 2; with_spec++) {
            const bool spec = with_spec && n > 2;
            const uint32_t room = n * 16 + 32 + (spec ? 32 : 0);
            uint32_t shift = 6, sum = 0;
            while (1u << shift < room) shift++;
            open_queue(LAB_RC, shift);
            uint8_t *e = entry(operation(0x04, 0x21), (uint8_t)n, !spec ? 0 : n > 8 ? IONIC_SPEC16 : IONIC_SPEC32);
            uint8_t *list = e + 32 + (spec ? 32 : 0), *receive = memory.receives;
            for (uint32_t i = 0; i < n; i++) {
                piece(list + 16 * i, 0x1000 * i, 100 + i, 7 + i);
                if (spec && n > 8) put_be16(e + 32 + 2 * i, (uint16_t)(100 + i));
                if (spec && n <= 8) put_be32(e + 32 + 4 * i, 100 + i);
                sum += 100 + i;
            }
            put_be32(e + 28, sum);
            post();
            const struct lab_work *w = fetched();
            CHECK(w->opcode == LAB_WRITE, "%u pieces, spec %u", n, with_spec);
            CHECK_EQ(w->sges, n);
            for (uint32_t i = 0; i < n; i++)
                CHECK(w->sge[i].address == 0x1000 * i && w->sge[i].length == 100 + i && w->sge[i].lkey == 7 + i,
                      "piece %u of %u", i, n);

            if (spec) { /* lengths in front that are not the list's */
                uint8_t *wrong = entry(e[8], e[9], n > 8 ? IONIC_SPEC16 : IONIC_SPEC32);
                memcpy(wrong + 12, e + 12, ((size_t)1 << shift) - 12);
                wrong[33 + 2 * (n > 8 ? n - 1 : 2 * n - 1)] ^= 1;
                post();
                CHECK_EQ(fetched()->opcode, LAB_BAD);
            }

            memcpy(receive, e, (size_t)1 << shift); /* receives are the same, but for the sum */
            put_le64(receive, 41);
            put_be32(receive + 28, 0);
            ring_doorbell(IONIC_TYPE_RECEIVE, qp->number, 1);
            struct lab_receive r;
            CHECK(lab_ionic.fetch_receive(qp, &r), "no receive");
            CHECK_EQ(r.cookie, 41); /* the library's name, whatever the place is */
            CHECK_EQ(r.sges, n);
            CHECK(!n || (r.sge[n - 1].length == 99 + n && r.sge[n - 1].lkey == 6 + n), "the last piece of %u", n);
            close_queue();
        }
}

/* Laps without end: each entry comes out as it went in. */
static void wraps(test_rng *rng) {
    const uint64_t rounds = test_scaled(200000);
    open_queue(LAB_RC, 8);
    for (uint64_t i = 0; i < rounds;) {
        const uint64_t some = 1 + test_below(rng, RING - 1); /* a ring has room for one less than it has places */
        for (uint64_t k = i; k < i + some; k++) {
            uint8_t *e = entry(operation(0x04, 0x21), 0, IONIC_INLINE);
            put_be64(e + 16, k);
            put_be32(e + 28, 1 + (uint32_t)k % 224);
            memset(e + 32, (int)(k & 0xff), 1 + k % 224);
            program.posted = (program.posted + 1) % RING;
            if (!program.posted) program.colour = !program.colour;
        }
        ring_doorbell(IONIC_TYPE_SEND, qp->number, program.posted);
        for (struct lab_work *w = &(struct lab_work){0}; lab_ionic.fetch(qp, w); i++) {
            CHECK(w->opcode == LAB_WRITE, "entry %" PRIu64 " is refused", i);
            CHECK_EQ(w->remote_address, i);
            CHECK_EQ(w->inline_bytes, 1 + i % 224);
            CHECK_EQ(w->cookie & 0xffff, i % RING);
            CHECK(w->data[0] == (uint8_t)i && w->data[i % 224] == (uint8_t)i, "entry %" PRIu64 " is another one", i);
        }
        CHECK_EQ(i % RING, program.posted);
    }
    close_queue();
}

/* What hardware would end in a local operation error. None of it hangs the queue, or reads outside it. */
static void nonsense(test_rng *rng) {
    static const struct {
        uint8_t v1, v2, pieces;
        uint32_t flags, at, word;
    } bad[] = {
        {0x77, 0x77, 0, 0, 0, 0},                           /* an operation that does not exist */
        {0x01, 0xa0, 0, 0, 0, 0},                           /* invalidation, registration, windows */
        {0x09, 0x07, 0, 0, 0, 0},                           /* are not offered */
        {0x0a, 0x08, 0, 0, 0, 0},                           /* */
        {0x04, 0x21, 3, 0, 0, 0},                           /* more pieces than an entry has room for */
        {0x04, 0x21, 255, 0, 0, 0},                         /* */
        {0x04, 0x21, 1, 0, 28, 8},                          /* a sum that is not the pieces' */
        {0x04, 0x21, 1, 0, 40, 8},                          /* */
        {0x04, 0x21, 0, IONIC_INLINE, 28, 33},              /* more inline bytes than there are */
        {0x04, 0x21, 0, IONIC_INLINE, 28, 0xffffffff},      /* */
        {0x04, 0x21, 1, IONIC_INLINE, 28, 8},               /* inline and pieces */
        {0x03, 0x02, 0, IONIC_INLINE, 28, 8},               /* a read into the entry itself */
        {0x07, 0x05, 0, 0, 56, 8},                          /* an atomic without its result */
        {0x07, 0x77, 1, 0, 56, 16},                         /* of another size */
        {0x07, 0x05, 2, 0, 56, 8},                          /* with two */
        {0x07, 0x05, 1, IONIC_INLINE, 56, 8},               /* */
        {0x04, 0x21, 1, IONIC_SPEC32, 0, 0},                /* lengths in front of a list that is short */
        {0x04, 0x21, 0, IONIC_SPEC32 | IONIC_SPEC16, 0, 0}, /* in two forms */
        {0x04, 0x21, 0, 0x4000, 0, 0},                      /* in one that is not there */
    };
    struct lab_work *w = &(struct lab_work){0};
    int said = silence();
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        open_queue(LAB_RC, 6);
        uint8_t *e = entry(operation(bad[i].v1, bad[i].v2), bad[i].pieces, bad[i].flags);
        if (bad[i].at) put_be32(e + bad[i].at, bad[i].word);
        post();
        const bool there = lab_ionic.fetch(qp, w);
        if (!there || w->opcode != LAB_BAD) speak(said);
        CHECK(there && w->opcode == LAB_BAD, "row %zu is taken for an operation", i);
        CHECK(!lab_ionic.fetch(qp, w), "and a second time");
        close_queue();
    }
    speak(said);
    for (uint32_t way = 0; way < 3; way++) { /* the entry of another place, of the lap before, and one never written */
        open_queue(LAB_RC, 6);
        for (uint32_t i = 0; i < RING + 5; i++) {
            uint8_t *e = entry(operation(0x04, 0x21), 0, 0);
            const bool wrong = i == RING + 4;
            if (wrong && way == 0) e[0] ^= 1;
            if (wrong && way == 1) e[11] ^= IONIC_COLOUR;
            if (wrong && way == 2) memset(e, 0, 64), put_le64(e, 9);
            post();
            CHECK(lab_ionic.fetch(qp, w), "entry %u", i);
            CHECK_EQ(w->opcode, wrong ? LAB_BAD : LAB_WRITE);
        }
        close_queue();
    }
    uint64_t rounds = test_scaled(20000), stuck = 0;
    struct lab_receive r;
    open_queue(LAB_RC, 9);
    said = silence(); /* "not implemented", thousands of times */
    while (rounds--) {
        const uint32_t sends = (uint32_t)test_below(rng, RING), receives = (uint32_t)test_below(rng, RING);
        for (uint32_t k = 0; k < 64; k++) {
            const size_t at = test_below(rng, sizeof memory.sends);
            memory.sends[at / 2] = (uint8_t)test_random(rng);
            memory.receives[at / 2] = (uint8_t)test_random(rng);
        }
        ring_doorbell(IONIC_TYPE_SEND, qp->number, sends);
        ring_doorbell(IONIC_TYPE_RECEIVE, qp->number, receives);
        lab_ionic.store(context, 0, (uint32_t)test_below(rng, 5) * 8, test_random(rng), 8);
        uint32_t n = 0, m = 0;
        while (n <= RING && lab_ionic.fetch(qp, w)) n++;
        while (m <= RING && lab_ionic.fetch_receive(qp, &r)) m++;
        stuck += n >= RING || m >= RING;
    }
    speak(said);
    CHECK_EQ(stuck, 0);
    close_queue();
}

static void receives(void) {
    struct lab_receive r;
    open_queue(LAB_RC, 6);
    CHECK(!lab_ionic.fetch_receive(qp, &r), "a receive that was not posted");
    for (uint32_t i = 0; i < 10 * RING; i++) {
        uint8_t *at = memory.receives + i % RING * 64;
        memset(at, 0, 64);
        put_le64(at, i * 7 % RING);
        at[9] = (uint8_t)(1 + i % 2);
        piece(at + 32, 0x1000, 10 + i, 5);
        piece(at + 48, i, 7, 6);
        ring_doorbell(IONIC_TYPE_RECEIVE, qp->number, (i + 1) % RING);
        CHECK(lab_ionic.fetch_receive(qp, &r), "receive %u is not seen", i);
        CHECK_EQ(r.cookie, i * 7 % RING);
        CHECK_EQ(r.sges, 1 + i % 2);
        CHECK_EQ(r.sge[0].length, 10 + i);
        CHECK(!lab_ionic.fetch_receive(qp, &r), "receive %u twice", i);
    }
    memory.receives[9] = 3; /* three pieces in an entry of 64 bytes: no room for anything */
    ring_doorbell(IONIC_TYPE_RECEIVE, qp->number, 1);
    CHECK(lab_ionic.fetch_receive(qp, &r), "the broken one");
    CHECK_EQ(r.sges, 0);
    /* After a reset both sides begin at zero; the library may begin with either colour. */
    for (uint32_t i = 0; i < 3; i++) {
        qp->state = LAB_RESET;
        CHECK_EQ(lab_ionic.modify_qp(qp, LAB_RTS, NULL), 0);
        CHECK(!lab_ionic.fetch_receive(qp, &r), "one of before");
        program.posted = 0;
        program.colour = i == 2;
        for (uint32_t k = 0; k < RING + 3; k++) {
            entry(operation(0x04, 0x21), 0, 0);
            post();
            CHECK_EQ(fetched()->opcode, LAB_WRITE);
        }
    }
    ring_doorbell(IONIC_TYPE_RECEIVE, qp->number, 1);
    CHECK(lab_ionic.fetch_receive(qp, &r), "the first one after a reset");
    close_queue();
}

/* -------------------------------------------------------------------------------------------------------- completions
 */

static int make_cq(lab_cq *of, uint32_t entries, uint32_t ring, uint8_t pipelines) {
    const struct ionic_cq_request request = {.ring = {ring_of(memory.completions, ring, 5)},
                                             .pipeline_mask = pipelines};
    struct ionic_cq_reply reply;
    struct lab_call call = {(const uint8_t *)&request, sizeof request, (uint8_t *)&reply, sizeof reply, 0};
    of->context = context;
    of->entries = entries;
    const int error = lab_ionic.create_cq(of, &call);
    if (error) return error;
    CHECK_EQ(reply.pipeline_mask, 1);
    CHECK_EQ(reply.number[0], of->handle);
    return 0;
}

static void open_completions(uint32_t entries) {
    memset(memory.completions, 0, sizeof memory.completions);
    cq = lab_new(context, LAB_CQ);
    CHECK_EQ(make_cq(cq, entries, ENTRIES, 1), 0);
    lab_publish(context, LAB_CQ, cq);
}

static void close_completions(void) {
    lab_ionic.destroy_cq(cq);
    lab_free(context, LAB_CQ, cq);
}

static struct lab_done done_of(bool receive, vnic_status status) {
    return (struct lab_done){.qp = qp, .receive = receive, .signalled = true, .bytes = 500, .status = status};
}

/* The next entry as the library takes it; NULL: it is of the lap before. */
static const uint8_t *next_entry(uint32_t at) {
    const uint8_t *e = memory.completions + at % ENTRIES * 32;
    return (be32_at(e + 28) & 1) == !(at / ENTRIES & 1) ? e : NULL;
}

static void consume(uint32_t at) {
    ring_doorbell(IONIC_TYPE_COMPLETION, cq->handle, at % ENTRIES);
}

static void received_laps(void) {
    open_completions(20);
    open_queue(LAB_RC, 6);
    for (uint32_t i = 0; i < 10 * ENTRIES; i++) {
        CHECK(!next_entry(i), "entry %u is there too early", i);
        struct lab_done d = done_of(true, VNIC_OK);
        d.cookie = i % RING;
        d.has_immediate = i % 3;
        d.is_write = i % 3 == 2;
        d.immediate = 0x04030201;
        d.source_qpn = 0x123456;
        lab_ionic.complete(cq, &d);
        const uint8_t *e = next_entry(i);
        CHECK(e, "entry %u is not there", i);
        CHECK_EQ(le64_at(e), i % RING);
        CHECK_EQ(be32_at(e + 8), (i % 3 ? i % 3 + 1 : 0) << 24 | 0x123456);
        CHECK(!memcmp(e + 20, &d.immediate, 4), "the immediate");
        CHECK_EQ(be32_at(e + 24), 500);
        CHECK_EQ(be32_at(e + 28) & ~1u, qp->number << 8 | 1 << 5);
        if (i % 64 == 63) consume(i + 1);
    }
    /* The ring has 127 places in use at most, of which two are kept for one that fails, and 20 were asked for. */
    for (uint32_t i = 0; i < 126; i++) {
        CHECK_EQ(lab_ionic.cq_used(cq), i > 106 ? i - 106 : 0);
        const struct lab_done d = done_of(true, VNIC_OK);
        lab_ionic.complete(cq, &d);
    }
    CHECK_EQ(lab_ionic.cq_used(cq), 20);
    consume(3); /* the program has seen three of them */
    CHECK_EQ(lab_ionic.cq_used(cq), 17);
    consume(ENTRIES - 1); /* it cannot have seen what is not there */
    CHECK_EQ(lab_ionic.cq_used(cq), 17);
    consume(126);
    CHECK_EQ(lab_ionic.cq_used(cq), 0);
    close_queue();
    close_completions();
}

/* As libionic counts: messages by their number in a ring as long as that of entries. Every completion says something
 * new, and nothing is said that has not been done. */
static void messages(test_rng *rng) {
    const uint64_t rounds = test_scaled(200000);
    uint32_t known = 0, done = 0, at = 0, silent = 0;
    open_completions(ENTRIES - 3);
    open_queue(LAB_RC, 6);
    for (uint64_t i = 0; i < rounds; i++) {
        struct lab_done d = done_of(false, VNIC_OK);
        d.cookie = IONIC_NUMBERED | (uint32_t)(i % RING);
        d.signalled = silent == RING - 2 || test_below(rng, 4) == 0;
        lab_ionic.complete(cq, &d);
        done++;
        silent = d.signalled ? 0 : silent + 1;
        const uint8_t *e = next_entry(at);
        CHECK(!e == !d.signalled, "message %u: an entry where none is wanted, or none", done);
        if (!e) continue;
        at++;
        consume(at);
        CHECK_EQ(be32_at(e + 28) & ~1u, qp->number << 8 | 2 << 5);
        CHECK_EQ(be32_at(e + 24), 0);
        const uint32_t more = (be32_at(e + 4) - known) & (RING - 1);
        CHECK_EQ(be32_at(e + 4), done);
        CHECK(more && more <= done - known, "a message's number that was known");
        known = done;
    }
    close_queue();
    close_completions();
}

static void errors(void) {
    static const struct {
        vnic_status status;
        uint32_t code;
        bool here;
    } rows[] = {{VNIC_LOCAL_LENGTH, 1, true},       {VNIC_LOCAL_OPERATION, 2, true},  {VNIC_LOCAL_ACCESS, 3, true},
                {VNIC_FLUSHED, 4, false},           {VNIC_REMOTE_INVALID, 8, false},  {VNIC_REMOTE_ACCESS, 9, false},
                {VNIC_REMOTE_OPERATION, 10, false}, {VNIC_RETRY_EXCEEDED, 11, false}, {VNIC_RNR_EXCEEDED, 12, false},
                {VNIC_UNREACHABLE, 11, false}};
    for (uint32_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (uint32_t before = 0; before < 3; before++) { /* messages that nobody wanted to hear of */
            open_completions(20);
            open_queue(LAB_RC, 6);
            struct lab_done quiet = done_of(false, VNIC_OK), d = done_of(false, rows[i].status);
            quiet.signalled = d.signalled = false; /* errors come unasked */
            quiet.cookie = d.cookie = IONIC_NUMBERED | 9;
            for (uint32_t k = 0; k < before; k++) lab_ionic.complete(cq, &quiet);
            lab_ionic.complete(cq, &d);
            uint32_t at = 0;
            if (rows[i].here && before) { /* the library looks at them in order */
                const uint8_t *e = next_entry(at++);
                CHECK(e && be32_at(e + 4) == before, "those before it");
                CHECK_EQ(be32_at(e + 28) & 0xff, 2 << 5 | 1);
            }
            const uint8_t *e = next_entry(at++);
            CHECK(e, "no entry");
            CHECK_EQ(be32_at(e + 24), rows[i].code);
            CHECK_EQ(be32_at(e + 28) & 0xff, (rows[i].here ? 3 : 2) << 5 | 2 | 1);
            if (rows[i].here)
                CHECK_EQ(le64_at(e + 16), 9);
            else
                CHECK_EQ(be32_at(e + 4), before + 1);
            struct lab_done r = done_of(true, rows[i].status), rest = {.qp = qp, .rest = true, .status = VNIC_FLUSHED};
            r.cookie = 5;
            lab_ionic.complete(cq, &r);
            e = next_entry(at++);
            CHECK(e && le64_at(e) == 5, "the receive");
            CHECK_EQ(be32_at(e + 24), rows[i].code);
            CHECK_EQ(be32_at(e + 28) & 0xff, 1 << 5 | 2 | 1);
            /* What the library flushes: one for each queue. */
            for (uint32_t receive = 0; receive < 2; receive++) {
                rest.receive = receive;
                lab_ionic.complete(cq, &rest);
                e = next_entry(at++);
                CHECK(e && be32_at(e + 24) == 4, "the rest");
                CHECK_EQ(be32_at(e + 28), qp->number << 8 | (receive ? 1u : 3u) << 5 | 2 | 1);
            }
            CHECK(!next_entry(at), "one entry more");
            close_queue();
            close_completions();
        }
    open_completions(20); /* datagrams have no number */
    open_queue(LAB_UD, 6);
    struct lab_done d = done_of(false, VNIC_OK);
    d.cookie = 33;
    lab_ionic.complete(cq, &d);
    const uint8_t *e = next_entry(0);
    CHECK(e && le64_at(e + 16) == 33, "a datagram");
    CHECK_EQ(be32_at(e + 28) & 0xff, 3 << 5 | 1);
    close_queue();
    close_completions();
}

/* Events are read off cq.armed: lab_cq_notify clears it. */
static void arm(bool solicited_only) {
    static uint32_t turn; /* the library counts its wishes where indices are: it means nothing here */
    ring_doorbell(IONIC_TYPE_COMPLETION, cq->handle,
                  (solicited_only ? IONIC_DOORBELL_ARM_SOLICITED : IONIC_DOORBELL_ARM) | (++turn % ENTRIES));
}

static void arming(void) {
    open_completions(20);
    open_queue(LAB_RC, 6);
    struct lab_done d = done_of(true, VNIC_OK);
    CHECK(!cq->armed, "armed before anybody asked");
    arm(false);
    CHECK(cq->armed && !cq->solicited_only, "nothing is there");
    lab_ionic.complete(cq, &d);
    lab_cq_notify(cq, false);
    CHECK(!cq->armed, "an event");
    arm(false); /* the program has not seen the entry that is there */
    CHECK(!cq->armed, "an event at once");
    consume(1);
    arm(true);
    CHECK(cq->armed && cq->solicited_only, "armed for solicited ones");
    lab_ionic.complete(cq, &d);
    arm(true);
    CHECK(cq->armed, "the entry is not solicited");
    arm(false); /* another wish, before the event */
    CHECK(!cq->armed, "and the entry is there");
    consume(2);
    arm(false);
    arm(true);
    CHECK(cq->armed && !cq->solicited_only, "a queue that is armed for all stays so");
    lab_cq_notify(cq, false);
    d.solicited = true;
    lab_ionic.complete(cq, &d);
    arm(true);
    CHECK(!cq->armed, "a solicited one is there");
    d = done_of(false, VNIC_LOCAL_ACCESS);
    consume(3);
    arm(true);
    CHECK(cq->armed, "it is seen");
    lab_ionic.complete(cq, &d);
    arm(true);
    CHECK(!cq->armed, "an error is an event for all");
    close_queue();
    close_completions();
}

/* ---------------------------------------------------------------------------------------------------------- doorbells
 */

static void doorbells(void) {
    struct lab_work w;
    open_completions(20);
    open_queue(LAB_RC, 6);
    entry(operation(0x04, 0x21), 0, 0);
    lab_context *other = lab_context_new(&devices[second], -1);
    lab_ionic.store(other, 0, 8 * IONIC_TYPE_SEND, htole64((uint64_t)qp->number << 24 | 1), 8);
    CHECK(!lab_ionic.fetch(qp, &w), "another context's page");
    ring_doorbell(IONIC_TYPE_SEND, qp->number + 1, 1);
    ring_doorbell(IONIC_TYPE_COMPLETION, cq->handle + 1, 1);
    ring_doorbell(IONIC_TYPE_COMPLETION, qp->handle, 1);
    const int said = silence();
    ring_doorbell(IONIC_TYPE_SEND, qp->number, RING);
    ring_doorbell(7, qp->number, 1);
    lab_ionic.store(context, 0, 8 * IONIC_TYPE_SEND, htole64((uint64_t)qp->number << 24 | 1), 4);
    lab_ionic.store(context, 0, 8 * IONIC_TYPE_SEND + 4, htole64((uint64_t)qp->number << 24 | 1), 8);
    speak(said);
    CHECK(!lab_ionic.fetch(qp, &w), "a doorbell of nobody's");
    void *page = NULL;
    const size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
    CHECK_EQ(lab_ionic.map(context, IONIC_DOORBELL_OFFSET + bytes, bytes, PROT_WRITE, &page), EINVAL);
    CHECK_EQ(lab_ionic.map(context, IONIC_DOORBELL_OFFSET, 2 * bytes, PROT_WRITE, &page), EINVAL);
    const int error = lab_ionic.map(context, IONIC_DOORBELL_OFFSET, bytes, PROT_WRITE, &page);
    if (error != ENOTSUP) { /* a store as the library does it */
        CHECK_EQ(error, 0);
        ((volatile uint64_t *)page)[IONIC_TYPE_SEND] = htole64((uint64_t)qp->number << 24 | 1);
        CHECK(!lab_ionic.fetch(qp, &w), "the thread has not looked");
        /* A command meets what was rung before it. */
        qp->state = LAB_ERR;
        CHECK_EQ(lab_ionic.modify_qp(qp, LAB_RTS, NULL), 0);
        CHECK(lab_ionic.fetch(qp, &w), "the doorbell is lost");
        munmap(page, bytes);
    }
    lab_context_free(other);
    close_queue();
    close_completions();
}

/* ------------------------------------------------------------------------------------------------------------ commands
 */

static int to_rtr(lab_qp *of, uint32_t resources) {
    of->state = LAB_RTR;
    of->max_dest_rd_atomic = resources;
    return lab_ionic.modify_qp(of, LAB_INIT, NULL);
}

static void responders(void) {
    lab_qp *three[3];
    for (uint32_t i = 0; i < 3; i++) {
        three[i] = lab_new(context, LAB_QP);
        CHECK_EQ(make_qp(three[i], LAB_RC, 6, 0), 0);
        CHECK_EQ(lab_flow_open(three[i]), 0);
        lab_publish(context, LAB_QP, three[i]);
    }
    const int said = silence();
    CHECK_EQ(to_rtr(three[0], 16), 0);
    CHECK_EQ(to_rtr(three[1], 1), EINVAL); /* of the whole device */
    CHECK_EQ(to_rtr(three[1], 0), 0);
    three[0]->state = LAB_ERR; /* it keeps them */
    CHECK_EQ(lab_ionic.modify_qp(three[0], LAB_RTR, NULL), 0);
    CHECK_EQ(to_rtr(three[1], 1), EINVAL);
    three[0]->state = LAB_RESET;
    CHECK_EQ(lab_ionic.modify_qp(three[0], LAB_ERR, NULL), 0);
    CHECK_EQ(to_rtr(three[1], 10), 0);
    CHECK_EQ(to_rtr(three[2], 7), EINVAL);
    CHECK_EQ(to_rtr(three[2], 6), 0);
    destroy_qp(three[1]);
    CHECK_EQ(to_rtr(three[0], 11), EINVAL);
    CHECK_EQ(to_rtr(three[0], 10), 0);
    destroy_qp(three[0]);
    destroy_qp(three[2]);
    speak(said);
}

static void refusals(void) {
    struct ionic_qp_request request = {
        .send = ring_of(memory.sends, RING, 6), .receive = ring_of(memory.receives, RING, 6), .pipeline_mask = 1};
    const struct ionic_qp_request good = request;
    struct lab_call call = {(const uint8_t *)&request, sizeof request, NULL, 0, 0};
    lab_qp none = {.pd = pd, .type = LAB_RC, .max_send_wr = RING - 1, .max_recv_wr = RING - 1};
#define REFUSED(expected, ...)                                                                                         \
    do {                                                                                                               \
        request = good;                                                                                                \
        __VA_ARGS__;                                                                                                   \
        CHECK_EQ(lab_ionic.create_qp(&none, &call), expected);                                                         \
    } while (0)
    REFUSED(EINVAL, request.send.mask = RING - 2);
    REFUSED(EINVAL, request.send.mask = 2 * RING - 1);
    REFUSED(EINVAL, request.send.depth_shift = 40);
    REFUSED(EINVAL, request.send.stride_shift = 5);
    REFUSED(EINVAL, request.receive = ring_of(memory.receives, RING, 10));
    REFUSED(EINVAL, request.receive.stride_shift = 200);
    REFUSED(EINVAL, request.receive.bytes *= 2);
    REFUSED(EINVAL, request.send.address += 64); /* rings are pages */
    REFUSED(EFAULT, request.send.address = 0);   /* that are there */
    REFUSED(EINVAL, request.pipeline_mask = 2);
    REFUSED(EINVAL, none.max_send_wr = RING); /* one place is always free */
    none.max_send_wr = RING - 1;
    const int said = silence();
    REFUSED(EOPNOTSUPP, request.send_cmb = 1 | IONIC_CMB_REQUIRE);
    REFUSED(EOPNOTSUPP, request.receive_cmb = 1 | IONIC_CMB_REQUIRE);
    speak(said);
    REFUSED(EOPNOTSUPP, none.type = LAB_UC);
    CHECK(!none.model_data, "something is left");
    lab_cq completions = {.context = context};
    CHECK_EQ(make_cq(&completions, 20, ENTRIES, 3), EINVAL);
    CHECK_EQ(make_cq(&completions, ENTRIES - 2, ENTRIES, 1), EINVAL);
    CHECK_EQ(make_cq(&completions, 20, 1u << 17, 1), EINVAL);
    CHECK(!completions.model_data, "something is left");

    struct ib_uverbs_ex_query_device_resp core = {.base.max_cqe = 1 << 20};
    CHECK_EQ(lab_ionic.query_device(&devices[second], &core, &call), 0);
    CHECK_EQ(core.base.max_cqe, 65435);
    CHECK_EQ(core.base.max_res_rd_atom, 16);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 120);
    uint32_t n;
    setenv("UCCL_EP_LAB", "nic=pollara;nic=pollara,variant=pollara-v2", 1);
    devices = lab_devices(&n);
    CHECK_EQ(n, 2);
    test_rng rng = test_rng_at(0);
    for (uint32_t version = 1; version <= 2; version++) {
        open_device(version == 2);
        operations();
        batches();
        datagrams();
        lists();
        wraps(&rng);
        nonsense(&rng);
        receives();
        received_laps();
        messages(&rng);
        errors();
        arming();
        doorbells();
        responders();
        refusals();
        close_device();
    }
    CHECK_EQ(plane.flows, 0);
    return test_end();
}
