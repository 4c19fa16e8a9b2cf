/* SPDX-License-Identifier: Apache-2.0
 *
 * test_lab_golden.c: the lab's NICs read what the vendors' libraries have written as the operations that were asked
 * for.
 *
 * The bytes are of files in tests/native/golden, of one version of one library each, made by tests/system/golden.py: no
 * library is needed here. Rows are put where they were, their doorbell is rung as it was, and what the model fetches is
 * compared with the table of golden.h. A file that lacks an operation fails, too.
 */
#include <rdma/mlx5-abi.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "bnxt/bnxt.h"
#include "efa/efa.h"
#include "golden.h"
#include "ionic/ionic.h"
#include "lab_plane.h"
#include "mlx5/mlx5.h"

enum queue { LIST, CALLS, SHARED, QUEUES };
static const char *const queue_names[] = {"list", "calls", "shared"};

static const struct file {
    const char *name, *nic;
    uint32_t queues; /* bits of those that it must have */
} files[] = {
    {"cx7-libmlx5-44", "connectx", 1 << LIST | 1 << CALLS | 1 << SHARED},
    {"cx7-libmlx5-65", "connectx", 1 << LIST | 1 << CALLS | 1 << SHARED},
    {"efa2-libefa-65", "efa", 1 << CALLS},
    {"efa3-libefa-65", "efa", 1 << CALLS},
    {"thor-libbnxt_re-44", "thor", 1 << LIST | 1 << SHARED},
    {"thor2-libbnxt_re-65", "thor", 1 << LIST | 1 << SHARED},
    {"pollara-libionic-65", "pollara", 1 << LIST},
    {"pollara-v2-libionic-65", "pollara", 1 << LIST},
};

/* ------------------------------------------------------------------------------------------------- one queue's state
 */

static struct {
    const char *file;
    unsigned line;
    char variant[16], library[32];
    uint32_t lkey, rkey;
    enum queue queue;
    struct {
        uint32_t number, bytes, unit; /* bytes 0: there is none */
        uint8_t *entries, *record;    /* record: NULL where doorbells are registers */
    } ring[2];
    uint32_t queue_pair, seen[QUEUES][GOLDEN_ROWS];
    lab_device *device;
    const struct lab_model *model;
    lab_context *context;
    lab_pd *pd;
    lab_qp *qp;
    lab_srq *srq;
    uint8_t *memory; /* receives, then sends; then doorbell records */
} g;

#define HERE "%s, line %u: "
#define AT g.file, g.line
#define PAGE 65536u

/* An object with the number that the entries and doorbells name. */
static void *object(enum lab_kind kind, uint32_t wanted) {
    void *made[64];
    for (uint32_t n = 0; n < 64; n++) {
        made[n] = lab_new(g.context, kind);
        CHECK(made[n], HERE "no object", AT);
        if (kind == LAB_QP && ((lab_qp *)made[n])->number != wanted) continue;
        if (kind == LAB_SRQ && ((lab_srq *)made[n])->handle != wanted) continue;
        for (uint32_t i = 0; i < n; i++) lab_free(g.context, kind, made[i]);
        return made[n];
    }
    CHECK(false, HERE "no object has the number %u", AT, wanted);
    return NULL;
}

static void create(int (*make)(void *object, struct lab_call *call), void *of, const void *request, size_t bytes) {
    uint8_t reply[256];
    struct lab_call call = {request, bytes, reply, sizeof reply, 0};
    const int error = make(of, &call);
    CHECK(!error, HERE "the model refuses the queue: %s", AT, strerror(error));
}

static int make_qp(void *qp, struct lab_call *call) {
    return g.model->create_qp(qp, call);
}

static int make_srq(void *srq, struct lab_call *call) {
    return g.model->create_srq(srq, call);
}

static struct ionic_ring ionic_ring_of(uint32_t kind) {
    const uint32_t n = g.ring[kind].bytes / g.ring[kind].unit;
    return (struct ionic_ring){.address = (uintptr_t)g.ring[kind].entries,
                               .bytes = g.ring[kind].bytes,
                               .mask = (uint16_t)(n - 1),
                               .depth_shift = (uint8_t)__builtin_ctz(n),
                               .stride_shift = (uint8_t)__builtin_ctz(g.ring[kind].unit)};
}

/* A ring whose entries and records are where the model has been told, or, of an EFA's, where it says. */
static void open_queue(void) {
    const uint32_t receives = g.ring[LAB_RING_RECEIVES].bytes, sends = g.ring[LAB_RING_SENDS].bytes;
    const uint32_t n[2] = {sends ? sends / g.ring[0].unit : 0, receives / g.ring[1].unit};
    uint8_t *records = g.memory + 8 * PAGE;
    CHECK(receives <= 4 * PAGE && sends <= 4 * PAGE, HERE "long rings", AT);
    memset(g.memory, 0, 9 * PAGE);
    g.ring[LAB_RING_RECEIVES].entries = g.memory;
    g.ring[LAB_RING_SENDS].entries = g.memory + (g.model == &lab_mlx5 ? receives : 4 * PAGE);
    g.ring[0].record = g.ring[1].record = NULL;
    g.srq = NULL;
    if (g.queue == SHARED) {
        g.srq = object(LAB_SRQ, g.model == &lab_mlx5 ? 1 : g.ring[1].number);
        g.srq->pd = g.pd;
        g.srq->max_wr = n[1] - 1;
        if (g.model == &lab_mlx5) {
            const struct mlx5_ib_create_srq request = {.buf_addr = (uintptr_t)g.memory, .db_addr = (uintptr_t)records};
            g.srq->max_sge = g.ring[1].unit / 16 - 1;
            g.ring[1].record = records;
            create(make_srq, g.srq, &request, sizeof request);
        } else {
            const struct bnxt_srq_request request = {.ring = (uintptr_t)g.memory};
            create(make_srq, g.srq, &request, sizeof request);
        }
        lab_publish(g.context, LAB_SRQ, g.srq);
        return;
    }
    g.qp = object(LAB_QP, g.queue_pair);
    g.qp->pd = g.pd;
    g.qp->type = g.model == &lab_efa ? LAB_SRD : LAB_RC;
    g.qp->max_send_wr = n[0] - 1;
    g.qp->max_recv_wr = n[1] - 1;
    if (g.model == &lab_mlx5) {
        const struct mlx5_ib_create_qp request = {.buf_addr = (uintptr_t)g.memory,
                                                  .db_addr = (uintptr_t)records,
                                                  .sq_wqe_count = n[0],
                                                  .rq_wqe_count = n[1],
                                                  .rq_wqe_shift = (uint32_t)__builtin_ctz(g.ring[1].unit)};
        create(make_qp, g.qp, &request, sizeof request);
        g.ring[LAB_RING_RECEIVES].record = records;
        g.ring[LAB_RING_SENDS].record = records + 4;
    } else if (g.model == &lab_efa) {
        const struct efa_qp_request request = {.rq_bytes = receives, .sq_bytes = sends};
        g.qp->max_send_wr = n[0];
        create(make_qp, g.qp, &request, sizeof request);
        const struct efa_qp *of = g.qp->model_data;
        g.ring[LAB_RING_SENDS].entries = of->requests->base;
        g.ring[LAB_RING_RECEIVES].entries = of->receives->base;
        g.ring[LAB_RING_SENDS].record = of->sq_doorbell->base;
        g.ring[LAB_RING_RECEIVES].record = of->rq_doorbell->base;
    } else if (g.model == &lab_bnxt) {
        const struct bnxt_qp_request request = {.sends = (uintptr_t)g.ring[0].entries,
                                                .receives = (uintptr_t)g.ring[1].entries};
        g.qp->max_send_wr = n[0] - 1 - BNXT_RESERVED;
        create(make_qp, g.qp, &request, sizeof request);
    } else {
        const struct ionic_qp_request request = {
            .send = ionic_ring_of(0), .receive = ionic_ring_of(1), .pipeline_mask = 1};
        create(make_qp, g.qp, &request, sizeof request);
    }
    lab_publish(g.context, LAB_QP, g.qp);
}

static void close_queue(void) {
    if (g.srq) {
        g.model->destroy_srq(g.srq);
        lab_free(g.context, LAB_SRQ, g.srq);
    }
    if (g.qp) {
        g.model->destroy_qp(g.qp);
        lab_free(g.context, LAB_QP, g.qp);
    }
    g.srq = NULL;
    g.qp = NULL;
    memset(g.ring, 0, sizeof g.ring);
}

/* ------------------------------------------------------------------------------------------------------------- a row
 */

#define SAME(got, expected)                                                                                            \
    do {                                                                                                               \
        const uint64_t got_ = (uint64_t)(got), expected_ = (uint64_t)(expected);                                       \
        CHECK(got_ == expected_, HERE "%s: %s is 0x%llx, asked for was 0x%llx", AT, row->name, #got,                   \
              (unsigned long long)got_, (unsigned long long)expected_);                                                \
    } while (0)

static void check_pieces(const struct golden *row, uint32_t n, const struct lab_sge *sge) {
    SAME(n, golden_pieces(row));
    for (uint32_t i = 0; i < n; i++) {
        SAME(sge[i].address, golden_address(row, i));
        SAME(sge[i].length, row->length[i]);
        SAME(sge[i].lkey, g.lkey);
    }
}

static void check_send(const struct golden *row, const struct lab_work *w) {
    static const enum lab_opcode opcodes[] = {
        [GOLDEN_WRITE] = LAB_WRITE,      [GOLDEN_WRITE_IMM] = LAB_WRITE_IMM, [GOLDEN_READ] = LAB_READ,
        [GOLDEN_ADD] = LAB_ADD,          [GOLDEN_SWAP] = LAB_SWAP,           [GOLDEN_SEND] = LAB_SEND,
        [GOLDEN_SEND_IMM] = LAB_SEND_IMM};
    const bool immediate = row->kind == GOLDEN_WRITE_IMM || row->kind == GOLDEN_SEND_IMM;
    const uint64_t number = golden_number(row);
    SAME(w->opcode, opcodes[row->kind]);
    SAME(w->signalled, !(row->flags & GOLDEN_QUIET));
    SAME(w->fence, !!(row->flags & GOLDEN_FENCE));
    SAME(w->solicited, !!(row->flags & GOLDEN_SOLICITED));
    if (row->flags & GOLDEN_INLINE) {
        SAME(w->sges, 0);
        SAME(w->inline_bytes, row->length[0]);
        for (uint32_t i = 0; i < w->inline_bytes; i++) SAME(w->data[i], golden_byte(golden_address(row, 0) + i));
    } else {
        SAME(w->inline_bytes, 0);
        check_pieces(row, w->sges, w->sge);
    }
    if (immediate) {
        uint32_t asked;
        golden_immediate(row, (uint8_t *)&asked);
        if (g.model == &lab_efa)
            asked = __builtin_bswap32(asked); /* a number in its entries, and back in completions */
        SAME(w->immediate, asked);
    }
    if (row->kind != GOLDEN_SEND && row->kind != GOLDEN_SEND_IMM) {
        SAME(w->remote_address, golden_remote(row));
        SAME(w->rkey, g.rkey);
    }
    if (row->kind == GOLDEN_SWAP) {
        SAME(w->compare, GOLDEN_COMPARE + number);
        SAME(w->add_or_swap, GOLDEN_ADDEND + number);
    }
    /* bnxt.h: where libraries before rdma-core 47 put what is to be added. */
    if (row->kind == GOLDEN_ADD && !strcmp(g.library, "libbnxt_re-44"))
        SAME(w->compare, GOLDEN_ADDEND + number);
    else if (row->kind == GOLDEN_ADD)
        SAME(w->add_or_swap, GOLDEN_ADDEND + number);
    if (g.qp->type != LAB_SRD) return;
    SAME(w->ah, 1); /* the first that there was */
    SAME(w->dest_qpn, g.queue_pair);
    SAME(w->qkey, GOLDEN_QKEY);
}

static bool next_receive(struct lab_receive *receive) {
    memset(receive, 0xee, sizeof *receive); /* nothing of before may shine through */
    return g.srq ? g.model->fetch_shared_receive(g.srq, receive) : g.model->fetch_receive(g.qp, receive);
}

static void fetch(const struct golden *row, enum lab_ring_kind kind) {
    static struct lab_work work;
    struct lab_receive receive;
    CHECK((row->kind == GOLDEN_RECEIVE) == (kind == LAB_RING_RECEIVES), HERE "%s: of another ring", AT, row->name);
    if (kind == LAB_RING_RECEIVES) {
        CHECK(next_receive(&receive), HERE "%s: no entry", AT, row->name);
        check_pieces(row, receive.sges, receive.sge);
        CHECK(!next_receive(&receive), HERE "%s: one more entry", AT, row->name);
        return;
    }
    memset(&work, 0xee, sizeof work);
    CHECK(g.model->fetch(g.qp, &work), HERE "%s: no entry", AT, row->name);
    check_send(row, &work);
    CHECK(!g.model->fetch(g.qp, &work), HERE "%s: one more entry", AT, row->name);
}

static size_t from_hex(const char *text, uint8_t *bytes, size_t room) {
    size_t n = 0;
    for (; text[2 * n] && text[2 * n] != '"' && n < room; n++) {
        unsigned value;
        CHECK(sscanf(text + 2 * n, "%2x", &value) == 1, HERE "no hexadecimal numbers", AT);
        bytes[n] = (uint8_t)value;
    }
    return n;
}

static void ring_doorbell(enum lab_ring_kind kind, const uint8_t *doorbell, size_t bytes) {
    if (g.ring[kind].record) {
        CHECK_EQ(bytes, 4);
        memcpy(g.ring[kind].record, doorbell, 4);
        return;
    }
    uint64_t value;
    const uint32_t type = kind == LAB_RING_SENDS ? IONIC_TYPE_SEND : IONIC_TYPE_RECEIVE;
    CHECK_EQ(bytes, 8);
    memcpy(&value, doorbell, 8);
    g.model->store(g.context, 0, g.model == &lab_ionic ? type * 8 : 0, value, 8);
}

static void operation_row(const char *line) {
    static uint8_t entry[4096];
    char name[32], ring[8], hex[32];
    uint8_t doorbell[8];
    uint32_t at, length;
    int end = 0;
    sscanf(line,
           "{\"operation\": \"%31[^\"]\", \"ring\": \"%7[^\"]\", \"at\": %u, \"length\": %u, \"doorbell\": "
           "\"%31[^\"]\", \"entry\": \"%n",
           name, ring, &at, &length, hex, &end);
    CHECK(end, HERE "what is this: %.60s", AT, line);
    const struct golden *row = NULL;
    for (size_t i = 0; i < GOLDEN_ROWS && !row; i++)
        if (!strcmp(golden_table[i].name, name)) row = &golden_table[i];
    CHECK(row, HERE "an operation %s", AT, name);
    const enum lab_ring_kind kind = !strcmp(ring, "send") ? LAB_RING_SENDS : LAB_RING_RECEIVES;
    if (!g.qp && !g.srq) open_queue();
    memset(entry, 0, sizeof entry);
    const size_t bytes = from_hex(line + end, entry, sizeof entry); /* without the zeros at its end */
    CHECK(bytes && bytes <= length && length <= sizeof entry && at < g.ring[kind].bytes, HERE "%s: not of the ring", AT,
          name);
    for (size_t i = 0; i < length; i++) g.ring[kind].entries[(at + i) % g.ring[kind].bytes] = entry[i];
    ring_doorbell(kind, doorbell, from_hex(hex, doorbell, sizeof doorbell));
    fetch(row, kind);
    g.seen[g.queue][row - golden_table]++;
}

static void queue_row(const char *line) {
    char name[8], ring[8];
    uint32_t queue_pair, number, bytes, unit;
    const int n = sscanf(line,
                         "{\"queue\": \"%7[^\"]\", \"ring\": \"%7[^\"]\", \"queue_pair\": %u, \"number\": %u, "
                         "\"bytes\": %u, \"unit\": %u}",
                         name, ring, &queue_pair, &number, &bytes, &unit);
    CHECK(n == 6 && unit && !(unit & (unit - 1)) && bytes && bytes % unit == 0, HERE "what is this: %.60s", AT, line);
    if (g.qp || g.srq) close_queue();
    for (g.queue = 0; g.queue < QUEUES && strcmp(queue_names[g.queue], name); g.queue++) continue;
    CHECK(g.queue < QUEUES, HERE "a queue %s", AT, name);
    const enum lab_ring_kind kind = !strcmp(ring, "send") ? LAB_RING_SENDS : LAB_RING_RECEIVES;
    g.queue_pair = queue_pair;
    g.ring[kind].number = number;
    g.ring[kind].bytes = bytes;
    g.ring[kind].unit = unit;
}

/* ------------------------------------------------------------------------------------------------------------- files
 */

static void open_device(const struct file *file) {
    char spec[64];
    uint32_t n;
    snprintf(spec, sizeof spec, "nic=%s,variant=%s", file->nic, g.variant);
    setenv("UCCL_EP_LAB", spec, 1);
    g.device = lab_devices(&n);
    CHECK(g.device, "no NIC: %s", spec);
    g.model = g.device->model;
    g.context = lab_context_new(g.device, -1);
    create((int (*)(void *, struct lab_call *))g.model->open, g.context,
           &(struct mlx5_ib_alloc_ucontext_req_v2){.total_num_bfregs = 16, .max_cqe_version = 1},
           sizeof(struct mlx5_ib_alloc_ucontext_req_v2));
    g.pd = object(LAB_PD, 0);
    g.pd->context = g.context;
}

static void all_there(const struct file *file) {
    for (enum queue q = 0; q < QUEUES; q++)
        for (size_t i = 0; i < GOLDEN_ROWS && file->queues >> q & 1; i++) {
            const struct golden *row = &golden_table[i];
            const bool receive = row->kind == GOLDEN_RECEIVE;
            if (!golden_applies(row, g.variant) || (receive ? q != SHARED : q == SHARED)) continue;
            CHECK(g.seen[q][i] >= (receive ? 1 : 2), "%s: %s is not %sin queue %s", file->name, row->name,
                  receive ? "" : "twice ", queue_names[q]);
        }
}

static void read_file(const struct file *file) {
    static char line[16384];
    char path[512];
    uint8_t *memory = g.memory;
    memset(&g, 0, sizeof g);
    g.memory = memory;
    g.file = file->name;
    snprintf(path, sizeof path, "%s/%s.json", UCCL_EP_TEST_GOLDEN, file->name);
    FILE *from = fopen(path, "r");
    CHECK(from, "%s: %s", path, strerror(errno));
    while (fgets(line, sizeof line, from)) {
        g.line++;
        if (g.line == 1) {
            const int n = sscanf(line,
                                 "{\"variant\": \"%15[^\"]\", \"library\": \"%31[^\"]\", \"lkey\": %u, \"rkey\": %u, "
                                 "\"rows\": [",
                                 g.variant, g.library, &g.lkey, &g.rkey);
            CHECK(n == 4, HERE "what is this: %.60s", AT, line);
            open_device(file);
        } else if (!strncmp(line, "{\"queue\"", 8)) {
            queue_row(line);
        } else if (strcmp(line, "]}\n") != 0) {
            operation_row(line);
        }
    }
    fclose(from);
    close_queue();
    all_there(file);
    lab_free(g.context, LAB_PD, g.pd);
    if (g.model->close) g.model->close(g.context);
    lab_context_free(g.context);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 60);
    plane_slot = 0; /* as it was of the programs that made the files */
    g.memory = mmap(NULL, 9 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(g.memory != MAP_FAILED, "no memory");
    /* A process for each, since queue pairs are numbered from 1 on in each. */
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        const pid_t child = fork();
        CHECK(child >= 0, "fork: %s", strerror(errno));
        if (!child) {
            read_file(&files[i]);
            exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && !status, "%s", files[i].name);
    }
    munmap(g.memory, 9 * PAGE);
    return test_end();
}
