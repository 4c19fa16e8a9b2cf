/* SPDX-License-Identifier: Apache-2.0
 *
 * test_lab_mlx5.c: the ConnectX of the lab reads and writes its queues as the hardware does.
 *
 * Entries are put together here by hand from the layouts of mlx5dv.h and wqe.h, not by the model's own code: decoding
 * of each operation, entries that run over the end of the ring, all that makes no sense; lists of receives; completions
 * with their owner bit over many laps, errors, arming, and a queue that is resized.
 */
#include <endian.h>
#include <fcntl.h>
#include <rdma/mlx5-abi.h>

#include "bytes.h"
#include "lab_plane.h"
#include "mlx5/mlx5.h"

#define SENDS 16u /* blocks */
#define RECEIVES 8u
#define ENTRIES 8u

static lab_device *device;
static struct {
    _Alignas(4096) uint8_t receives[RECEIVES * 32];
    uint8_t sends[SENDS * 64];
    _Alignas(64) uint32_t doorbell[16];
} queue;
static struct {
    _Alignas(4096) uint8_t entries[ENTRIES * 128];
    uint8_t more[4 * ENTRIES * 128];
    _Alignas(64) uint32_t doorbell[16];
} completions;
static struct {
    _Alignas(4096) uint8_t entries[16 * 64];
    _Alignas(64) uint32_t doorbell[16];
} shared;

static lab_qp qp;
static lab_cq cq;
static lab_srq srq;
static uint16_t posted;

static void open_queue(enum lab_qp_type type) {
    const struct mlx5_ib_create_qp request = {.buf_addr = (uintptr_t)queue.receives,
                                              .db_addr = (uintptr_t)queue.doorbell,
                                              .sq_wqe_count = SENDS,
                                              .rq_wqe_count = RECEIVES,
                                              .rq_wqe_shift = 5,
                                              .uidx = 0x77};
    struct mlx5_ib_create_qp_resp reply;
    struct lab_call call = {(const uint8_t *)&request, sizeof request, (uint8_t *)&reply, sizeof reply, 0};
    memset(&queue, 0, sizeof queue);
    static lab_context context;
    static lab_pd pd = {.context = &context};
    context.device = device;
    qp = (lab_qp){.pd = &pd, .number = 0x140003, .type = type};
    posted = 0;
    CHECK_EQ(lab_mlx5.create_qp(&qp, &call), 0);
    CHECK_EQ(call.out_bytes, sizeof reply);
}

/* An entry of n segments is copied into the ring where the next one belongs, and announced. */
static void post(uint8_t *entry, uint32_t segments) {
    put_be32(entry, (be32_at(entry) & 0xff0000ff) | (uint32_t)posted << 8);
    put_be32(entry + 4, qp.number << 8 | segments);
    for (uint32_t i = 0; i < segments; i++)
        memcpy(queue.sends + (posted * 64u + i * 16) % sizeof queue.sends, entry + i * 16, 16);
    posted = (uint16_t)(posted + (segments + 3) / 4);
    __atomic_store_n(&queue.doorbell[1], htobe32(posted), __ATOMIC_RELEASE);
}

static void segment(uint8_t *at, uint32_t length, uint32_t key, uint64_t address) {
    put_be32(at, length);
    put_be32(at + 4, key);
    put_be64(at + 8, address);
}

static struct lab_work fetched(void) {
    static struct lab_work work;
    memset(&work, 0xee, sizeof work); /* nothing of before may shine through */
    CHECK(lab_mlx5.fetch(&qp, &work), "no entry");
    return work;
}

/* -------------------------------------------------------------------------------------------------------------- sends
 */

static void operations(void) {
    uint8_t e[64 * 4];
    struct lab_work w;
    open_queue(LAB_RC);
    CHECK(!lab_mlx5.fetch(&qp, &w), "an entry that was not posted");

    memset(e, 0, sizeof e); /* write, two pieces, signalled and fenced */
    e[3] = 0x08;
    e[11] = 8 | 4 << 5;
    put_be64(e + 16, 0x123456789abcdef0ull);
    put_be32(e + 24, 0xaabbccdd);
    segment(e + 32, 100, 0x4242, 0x1000);
    segment(e + 48, 200, 0x4343, 0x2000);
    post(e, 4);
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

    memset(e, 0, sizeof e); /* write with immediate, inline, solicited, not signalled */
    e[3] = 0x09;
    e[11] = 2;
    memcpy(e + 12, "\x01\x02\x03\x04", 4);
    put_be32(e + 32, 0x80000000u | 21);
    memcpy(e + 36, "twenty-one bytes here", 21);
    post(e, 4); /* 4 + 21 bytes are two segments */
    w = fetched();
    CHECK_EQ(w.opcode, LAB_WRITE_IMM);
    CHECK(!w.signalled && !w.fence && w.solicited, "flags");
    CHECK(!memcmp(&w.immediate, "\x01\x02\x03\x04", 4), "the immediate");
    CHECK_EQ(w.inline_bytes, 21);
    CHECK_EQ(w.sges, 0);
    CHECK(!memcmp(w.data, "twenty-one bytes here", 21), "inline data");

    memset(e, 0, sizeof e); /* fetch-and-add; "initiator small" is no fence */
    e[3] = 0x12;
    e[11] = 8 | 1 << 5;
    put_be64(e + 16, 0x8000);
    put_be32(e + 24, 7);
    put_be64(e + 32, 41);
    segment(e + 48, 8, 0x99, 0x3000);
    post(e, 4);
    w = fetched();
    CHECK_EQ(w.opcode, LAB_ADD);
    CHECK_EQ(w.add_or_swap, 41);
    CHECK(!w.fence, "a fence");
    CHECK_EQ(w.sge[0].lkey, 0x99);

    e[3] = 0x11; /* compare-and-swap */
    put_be64(e + 40, 17);
    post(e, 4);
    w = fetched();
    CHECK_EQ(w.opcode, LAB_SWAP);
    CHECK_EQ(w.add_or_swap, 41);
    CHECK_EQ(w.compare, 17);

    memset(e, 0, sizeof e); /* send, read, nothing */
    e[3] = 0x0a;
    segment(e + 16, 64, 5, 0x4000);
    post(e, 2);
    w = fetched();
    CHECK_EQ(w.opcode, LAB_SEND);
    CHECK_EQ(w.sges, 1);
    e[3] = 0x10;
    segment(e + 32, 64, 5, 0x4000);
    post(e, 3);
    CHECK_EQ(fetched().opcode, LAB_READ);
    e[3] = 0x00;
    post(e, 1);
    CHECK_EQ(fetched().opcode, LAB_NOTHING);
    CHECK(!lab_mlx5.fetch(&qp, &w), "one entry more than posted");
    lab_mlx5.destroy_qp(&qp);
}

static void datagrams(void) {
    uint8_t e[64 * 2] = {0};
    open_queue(LAB_UD);
    e[3] = 0x0b;
    put_be32(e + 16, 0x11111111);             /* queue key */
    put_be32(e + 24, 0x80000000u | 0x0c0012); /* queue pair, and the bit of extended addresses */
    segment(e + 64, 10, 3, 0x5000);
    post(e, 5);
    const struct lab_work w = fetched();
    CHECK_EQ(w.opcode, LAB_SEND_IMM);
    CHECK_EQ(w.qkey, 0x11111111);
    CHECK_EQ(w.ah, 0xffff); /* nobody has made a handle for that GID */
    CHECK_EQ(w.dest_qpn, 0x0c0012);
    CHECK_EQ(w.sge[0].address, 0x5000);
    lab_mlx5.destroy_qp(&qp);
}

/* Entries of 1 to 16 blocks, laps without end: each comes out as it went in. */
static void wraps(test_rng *rng) {
    const uint64_t rounds = test_scaled(200000);
    uint8_t e[1024];
    open_queue(LAB_RC);
    for (uint64_t i = 0; i < rounds; i++) {
        const uint32_t bytes = (uint32_t)test_below(rng, 700) + 1, segments = 2 + (4 + bytes + 15) / 16;
        memset(e, 0, sizeof e);
        e[3] = 0x08;
        e[11] = 8;
        put_be64(e + 16, i);
        put_be32(e + 32, 0x80000000u | bytes);
        for (uint32_t k = 0; k < bytes; k++) e[36 + k] = (uint8_t)(i + k);
        const uint16_t index = posted;
        post(e, segments);
        struct lab_work *w = &(struct lab_work){0};
        CHECK(lab_mlx5.fetch(&qp, w), "entry %" PRIu64 " is not seen", i);
        CHECK_EQ(w->opcode, LAB_WRITE);
        CHECK_EQ(w->remote_address, i);
        CHECK_EQ(w->inline_bytes, bytes);
        CHECK_EQ(w->cookie & 0xffff, index);
        CHECK(!memcmp(w->data, e + 36, bytes), "entry %" PRIu64 " is another one", i);
    }
    CHECK(!lab_mlx5.fetch(&qp, &(struct lab_work){0}), "one entry more");
    lab_mlx5.destroy_qp(&qp);
}

/* What hardware would end in a local operation error. None of it hangs the queue, or reads outside it. */
static void nonsense(test_rng *rng) {
    uint8_t e[1024] = {0};
    struct lab_work *w = &(struct lab_work){0};
    static const struct {
        uint8_t opcode;
        uint32_t segments, at, word;
    } bad[] = {
        {0x77, 2, 0, 0},                  /* an operation that does not exist */
        {0x14, 4, 0, 0},                  /* one that is not offered */
        {0x08, 1, 0, 0},                  /* a write without an address */
        {0x12, 3, 0, 0},                  /* an atomic without its result */
        {0x12, 4, 48, 16},                /* of another size */
        {0x08, 3, 32, 0x80000000u | 100}, /* more inline bytes than the entry has */
        {0x10, 3, 32, 0x80000000u | 8},   /* a read into the entry itself */
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        open_queue(LAB_RC);
        memset(e, 0, sizeof e);
        e[3] = bad[i].opcode;
        if (bad[i].at) put_be32(e + bad[i].at, bad[i].word);
        post(e, bad[i].segments);
        CHECK(lab_mlx5.fetch(&qp, w), "nothing was fetched");
        CHECK(w->opcode == LAB_BAD, "row %zu is taken for an operation", i);
        CHECK(!lab_mlx5.fetch(&qp, w), "and a second time");
        lab_mlx5.destroy_qp(&qp);
    }
    for (uint32_t way = 0; way < 4;
         way++) { /* a length of none, beyond the doorbell, of another place, of another queue */
        open_queue(LAB_RC);
        memset(e, 0, sizeof e);
        e[3] = 0x0a;
        post(e, 2);
        uint8_t *in = queue.sends;
        if (way == 0) in[7] = 0;
        if (way == 1) in[7] = 63;
        if (way == 2) in[2] = 9;
        if (way == 3) in[6] ^= 1;
        CHECK(lab_mlx5.fetch(&qp, w) && w->opcode == LAB_BAD, "way %u", way);
        CHECK(!lab_mlx5.fetch(&qp, w), "and a second time");
        lab_mlx5.destroy_qp(&qp);
    }
    const int said = dup(STDERR_FILENO), nowhere = open("/dev/null", O_WRONLY);
    CHECK(said >= 0 && nowhere >= 0 && dup2(nowhere, STDERR_FILENO) >= 0,
          "dup"); /* "not implemented", thousands of times */
    uint64_t rounds = test_scaled(20000), stuck = 0;
    open_queue(LAB_RC);
    while (rounds--) {
        for (size_t k = 0; k < sizeof queue.sends; k++) queue.sends[k] = (uint8_t)test_random(rng);
        posted = (uint16_t)(posted + 1 + test_below(rng, SENDS));
        queue.doorbell[1] = htobe32(posted);
        uint32_t n = 0;
        while (lab_mlx5.fetch(&qp, w) && n++ <= SENDS) continue;
        stuck += n > SENDS;
    }
    dup2(said, STDERR_FILENO);
    close(said);
    close(nowhere);
    CHECK_EQ(stuck, 0);
    lab_mlx5.destroy_qp(&qp);
}

/* ----------------------------------------------------------------------------------------------------------- receives
 */

static void receives(void) {
    struct lab_receive r;
    open_queue(LAB_RC);
    CHECK(!lab_mlx5.fetch_receive(&qp, &r), "a receive that was not posted");
    for (uint32_t i = 0; i < 70000; i++) { /* more than the counter's 16 bits */
        uint8_t *at = queue.receives + i % RECEIVES * 32;
        segment(at, 10 + i, 5, 0x1000);
        segment(at + 16, i % 2 ? 7 : 0, i % 2 ? 6 : MLX5_NO_KEY, i);
        queue.doorbell[0] = htobe32((i + 1) & 0xffff);
        CHECK(lab_mlx5.fetch_receive(&qp, &r), "receive %u is not seen", i);
        CHECK_EQ(r.cookie, i & 0xffff);
        CHECK_EQ(r.sges, 1 + i % 2);
        CHECK_EQ(r.sge[0].length, 10 + i);
        CHECK(!lab_mlx5.fetch_receive(&qp, &r), "receive %u twice", i);
    }
    /* After a reset both sides begin at zero. */
    qp.state = LAB_RESET;
    CHECK_EQ(lab_mlx5.modify_qp(&qp, LAB_RTS, NULL), 0);
    queue.doorbell[0] = htobe32(1);
    CHECK(lab_mlx5.fetch_receive(&qp, &r) && r.cookie == 0, "the first one after a reset");
    lab_mlx5.destroy_qp(&qp);
}

static void shared_receives(void) {
    const struct mlx5_ib_create_srq request = {.buf_addr = (uintptr_t)shared.entries,
                                               .db_addr = (uintptr_t)shared.doorbell};
    struct mlx5_ib_create_srq_resp reply;
    struct lab_call call = {(const uint8_t *)&request, sizeof request, (uint8_t *)&reply, sizeof reply, 0};
    static const uint8_t order[] = {0, 5, 2, 9, 15, 1}; /* the program gives entries back in any order */
    struct lab_receive r;
    srq = (lab_srq){.number = 9, .max_wr = 15, .max_sge = 3};
    CHECK_EQ(lab_mlx5.create_srq(&srq, &call), 0);
    CHECK_EQ(reply.srqn, 9);
    for (uint32_t i = 0; i < sizeof order; i++) {
        uint8_t *at = shared.entries + order[i] * 64;
        at[3] = i + 1 < sizeof order ? order[i + 1] : 0;
        segment(at + 16, i, 5, 0x1000);
        segment(at + 32, 0, MLX5_NO_KEY, 0);
    }
    shared.doorbell[0] = htobe32(sizeof order);
    for (uint32_t i = 0; i < sizeof order; i++) {
        CHECK_EQ(lab_mlx5.shared_receives(&srq), sizeof order - i);
        CHECK(lab_mlx5.fetch_shared_receive(&srq, &r), "receive %u is not seen", i);
        CHECK_EQ(r.cookie, order[i]);
        CHECK_EQ(r.sges, 1);
        CHECK_EQ(r.sge[0].length, i);
    }
    CHECK(!lab_mlx5.fetch_shared_receive(&srq, &r), "one more than posted");
    lab_mlx5.destroy_srq(&srq);
}

/* -------------------------------------------------------------------------------------------------------- completions
 */

static void open_completions(uint32_t size) {
    const struct mlx5_ib_create_cq request = {
        .buf_addr = (uintptr_t)completions.entries, .db_addr = (uintptr_t)completions.doorbell, .cqe_size = size};
    struct mlx5_ib_create_cq_resp reply;
    struct lab_call call = {(const uint8_t *)&request, sizeof request, (uint8_t *)&reply, sizeof reply, 0};
    memset(&completions, 0, sizeof completions);
    for (uint32_t i = 0; i < ENTRIES; i++) completions.entries[i * size + size - 1] = 15 << 4; /* as the library does */
    cq = (lab_cq){.number = 3, .entries = ENTRIES - 1};
    CHECK_EQ(lab_mlx5.create_cq(&cq, &call), 0);
    CHECK_EQ(reply.cqn, 3);
}

static struct lab_done done_of(bool receive, vnic_status status) {
    return (struct lab_done){
        .qp = &qp, .receive = receive, .signalled = true, .cookie = 0x080001, .bytes = 500, .status = status};
}

/* The next entry as the library takes it; NULL: the hardware's still. */
static const uint8_t *next_entry(const uint8_t *ring, uint32_t n, uint32_t size, uint32_t at) {
    const uint8_t *entry = ring + at % n * size + (size - 64);
    const bool lap = at / n & 1;
    return entry[63] >> 4 == 15 || (entry[63] & 1) != lap ? NULL : entry;
}

static void laps(uint32_t size) {
    open_completions(size);
    open_queue(LAB_RC);
    for (uint32_t i = 0; i < 1000; i++) {
        CHECK(!next_entry(completions.entries, ENTRIES, size, i), "entry %u is there too early", i);
        struct lab_done d = done_of(i % 3 == 0, VNIC_OK);
        d.cookie = 0x080000 | i;
        d.has_immediate = d.is_write = i % 2;
        d.immediate = 0x04030201;
        d.source_qpn = 0x123;
        lab_mlx5.complete(&cq, &d);
        const uint8_t *e = next_entry(completions.entries, ENTRIES, size, i);
        CHECK(e, "entry %u is not there", i);
        CHECK_EQ(e[63] >> 4, i % 3 ? 0 : i % 2 ? 1 : 2);
        CHECK_EQ(be32_at(e + 44), 500);
        CHECK_EQ(be32_at(e + 56), (i % 3 ? 0x08000000u : 0) | qp.number);
        CHECK_EQ(e[60] << 8 | e[61], i & 0xffff);
        CHECK_EQ(be32_at(e + 32), 0x77);
        CHECK(!memcmp(e + 36, "\x01\x02\x03\x04", 4), "the immediate");
        CHECK_EQ(lab_mlx5.cq_used(&cq), 1);
        completions.doorbell[0] = htobe32((i + 1) & 0xffffff);
        CHECK_EQ(lab_mlx5.cq_used(&cq), 0);
    }
    struct lab_done quiet = done_of(false, VNIC_OK);
    quiet.signalled = false;
    lab_mlx5.complete(&cq, &quiet);
    CHECK_EQ(lab_mlx5.cq_used(&cq), 0); /* not asked for */
    lab_mlx5.destroy_cq(&cq);
    lab_mlx5.destroy_qp(&qp);
}

static void errors(void) {
    static const struct {
        vnic_status status;
        uint8_t syndrome, vendor;
    } rows[] = {{VNIC_LOCAL_LENGTH, 0x01, 0},     {VNIC_LOCAL_OPERATION, 0x02, 0},   {VNIC_LOCAL_ACCESS, 0x04, 0},
                {VNIC_FLUSHED, 0x05, 0},          {VNIC_REMOTE_INVALID, 0x12, 0},    {VNIC_REMOTE_ACCESS, 0x13, 0x88},
                {VNIC_REMOTE_OPERATION, 0x14, 0}, {VNIC_RETRY_EXCEEDED, 0x15, 0x81}, {VNIC_RNR_EXCEEDED, 0x16, 0},
                {VNIC_UNREACHABLE, 0x15, 0x81}};
    open_completions(64);
    open_queue(LAB_RC);
    for (uint32_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (uint32_t receive = 0; receive < 2; receive++) {
            struct lab_done d = done_of(receive, rows[i].status);
            d.signalled = false; /* errors come unasked */
            lab_mlx5.complete(&cq, &d);
            const uint8_t *e = next_entry(completions.entries, ENTRIES, 64, 2 * i + receive);
            CHECK(e, "no entry");
            CHECK_EQ(e[63] >> 4, receive ? 14 : 13);
            CHECK_EQ(e[55], rows[i].syndrome);
            CHECK_EQ(e[54], rows[i].vendor);
            completions.doorbell[0] = htobe32(2 * i + receive + 1);
        }
    lab_mlx5.destroy_cq(&cq);
    lab_mlx5.destroy_qp(&qp);
}

/* Events are read off cq.armed: lab_cq_notify clears it. */
static void arm(uint32_t number, bool solicited_only, uint32_t consumed) {
    completions.doorbell[1] = htobe32(number << 28 | (uint32_t)solicited_only << 24 | consumed);
    lab_mlx5.look(&cq);
}

static void arming(void) {
    open_completions(64);
    open_queue(LAB_RC);
    struct lab_done d = done_of(true, VNIC_OK);
    lab_mlx5.look(&cq);
    CHECK(!cq.armed, "armed before anybody asked");
    arm(0, false, 0); /* all zero, as the record was made */
    CHECK(cq.armed, "the first arming is not seen");
    lab_mlx5.complete(&cq, &d);
    lab_cq_notify(&cq, false);
    CHECK(!cq.armed, "no event");
    lab_mlx5.look(&cq);
    CHECK(!cq.armed, "an arming counts once");
    arm(0, false, 1); /* its number has had its event */
    CHECK(!cq.armed, "an arming of an old number");
    arm(1, false, 0); /* the program has not seen the entry that is there */
    CHECK(!cq.armed, "an event at once");
    completions.doorbell[0] = htobe32(1);
    arm(2, false, 1);
    CHECK(cq.armed, "nothing new is there");
    lab_mlx5.complete(&cq, &d);
    lab_cq_notify(&cq, false);
    completions.doorbell[0] = htobe32(2);
    arm(3, true, 2);
    CHECK(cq.armed && cq.solicited_only, "armed for solicited ones");
    lab_mlx5.complete(&cq, &d);
    lab_mlx5.look(&cq);
    CHECK(cq.armed, "the entry was not solicited");
    arm(3, false, 2); /* another wish, before the event */
    CHECK(!cq.armed, "and the entry is there");
    arm(0, true, 2); /* numbers go round; that entry is unsolicited still */
    CHECK(cq.armed, "armed again");
    d.solicited = true;
    lab_mlx5.complete(&cq, &d);
    CHECK(completions.entries[3 * 64 + 63] & 2, "the solicited bit");
    lab_mlx5.look(&cq);
    CHECK(!cq.armed, "the solicited entry is there");
    lab_mlx5.destroy_cq(&cq);
    lab_mlx5.destroy_qp(&qp);
}

static void resize(void) {
    const struct mlx5_ib_resize_cq request = {.buf_addr = (uintptr_t)completions.more, .cqe_size = 64};
    struct lab_call call = {(const uint8_t *)&request, sizeof request, NULL, 0, 0};
    open_completions(64);
    open_queue(LAB_RC);
    const struct lab_done d = done_of(false, VNIC_OK);
    for (uint32_t i = 0; i < 3; i++) lab_mlx5.complete(&cq, &d);
    CHECK_EQ(lab_mlx5.resize_cq(&cq, 2, &call), EINVAL); /* three are waiting */
    CHECK_EQ(lab_mlx5.resize_cq(&cq, 4 * ENTRIES - 1, &call), 0);
    CHECK_EQ(cq.entries, 4 * ENTRIES - 1);
    CHECK_EQ(next_entry(completions.entries, ENTRIES, 64, 3)[63] >> 4, 5); /* the old ring ends here */
    lab_mlx5.complete(&cq, &d);
    CHECK(next_entry(completions.more, 4 * ENTRIES, 64, 4), "the next one is in the new ring");
    lab_mlx5.destroy_cq(&cq);
    lab_mlx5.destroy_qp(&qp);
}

static void refusals(void) {
    struct mlx5_ib_create_qp request = {.buf_addr = (uintptr_t)queue.receives,
                                        .db_addr = (uintptr_t)queue.doorbell,
                                        .sq_wqe_count = SENDS,
                                        .rq_wqe_count = RECEIVES,
                                        .rq_wqe_shift = 5};
    struct lab_call call = {(const uint8_t *)&request, sizeof request, NULL, 0, 0};
    qp = (lab_qp){.type = LAB_RC};
    request.sq_wqe_count = 15; /* no power of two */
    CHECK_EQ(lab_mlx5.create_qp(&qp, &call), EINVAL);
    request.sq_wqe_count = 1u << 16;
    CHECK_EQ(lab_mlx5.create_qp(&qp, &call), EINVAL);
    request.sq_wqe_count = SENDS;
    request.rq_wqe_shift = 60;
    CHECK_EQ(lab_mlx5.create_qp(&qp, &call), EINVAL);
    request.rq_wqe_shift = 5;
    request.buf_addr = 0; /* rings that are not there */
    CHECK(lab_mlx5.create_qp(&qp, &call) != 0, "a ring at NULL");
    request.buf_addr = (uintptr_t)queue.receives;
    request.db_addr = 4096;
    CHECK(lab_mlx5.create_qp(&qp, &call) != 0, "a record at no address");
    request.db_addr = (uintptr_t)queue.doorbell;
    request.flags = MLX5_QP_FLAG_SIGNATURE;
    CHECK_EQ(lab_mlx5.create_qp(&qp, &call), EOPNOTSUPP);
    qp.type = LAB_SRD;
    request.flags = 0;
    CHECK_EQ(lab_mlx5.create_qp(&qp, &call), EOPNOTSUPP);
    CHECK(!qp.model_data, "something is left");
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 120);
    uint32_t n;
    setenv("UCCL_EP_LAB", "nic=connectx", 1);
    device = lab_devices(&n);
    CHECK_EQ(n, 1);
    test_rng rng = test_rng_at(0);
    operations();
    datagrams();
    wraps(&rng);
    nonsense(&rng);
    receives();
    shared_receives();
    laps(64);
    laps(128);
    errors();
    arming();
    resize();
    refusals();
    return test_end();
}
