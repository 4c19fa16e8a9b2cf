/* SPDX-License-Identifier: Apache-2.0
 *
 * verbs_table.h: the backends over libibverbs through their tables, as the core drives them, in one thread; the fake
 * libibverbs below.
 */
#ifndef UCCL_EP_VERBS_TABLE_H
#define UCCL_EP_VERBS_TABLE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdbool.h>
#include <sys/mman.h>

#include "fake_ibverbs/fake_ibverbs.h"
#include "testing.h"
#include "uccl_ep/backend.h"
#include "verbs_ranks.h"

static char said[256]; /* by the last call that failed */
static int32_t said_code;
static char logged[256]; /* the last line of a log */

static uint64_t host_skew; /* time passes as the test says, too */

static inline uint64_t host_now(void *context) {
    (void)context;
    return test_now_ns() + host_skew;
}
static inline void host_log(void *context, uccl_ep_log_level level, const char *text) {
    (void)context;
    (void)level;
    snprintf(logged, sizeof(logged), "%s", text);
}
static inline uccl_ep_status host_fail(void *context, uccl_ep_status status, int32_t code, const char *text) {
    (void)context;
    snprintf(said, sizeof(said), "%s", text);
    said_code = code;
    return status;
}
static const uccl_ep_host host = {.size = sizeof(uccl_ep_host),
                                  .abi_major = UCCL_EP_BACKEND_ABI_MAJOR,
                                  .abi_minor = UCCL_EP_BACKEND_ABI_MINOR,
                                  .now_ns = host_now,
                                  .log = host_log,
                                  .fail = host_fail};

#define WORKS(call)                                                                                                    \
    do {                                                                                                               \
        said[0] = 0;                                                                                                   \
        const int works_ = (call);                                                                                     \
        CHECK(works_ == UCCL_EP_OK, "status %d: %s", works_, said);                                                    \
    } while (0)

/* Refused with this status, and the text has all of these words, separated by |. */
static inline void check_words(const char *text, const char *words, const char *what) {
    char copy[256], *rest = NULL;
    snprintf(copy, sizeof(copy), "%s", words);
    for (char *word = strtok_r(copy, "|", &rest); word; word = strtok_r(NULL, "|", &rest))
        CHECK(strstr(text, word), "%s: \"%s\" is not in: %s", what, word, text);
}
#define REFUSED(call, status, words)                                                                                   \
    do {                                                                                                               \
        said[0] = 0;                                                                                                   \
        const int refused_ = (call);                                                                                   \
        CHECK(refused_ == (status), "%s: status %d: %s", #call, refused_, said);                                       \
        check_words(said, words, #call);                                                                               \
    } while (0)

static inline const uccl_ep_backend *backend(const char *name) {
    char path[512];
    snprintf(path, sizeof(path), UCCL_EP_TEST_LIBRARY_DIR "/libuccl_ep_backend_%s.so", name);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK(library, "%s", dlerror());
    const uccl_ep_backend *(*entry)(void);
    *(void **)(void *)&entry = dlsym(library, UCCL_EP_BACKEND_ENTRY);
    CHECK(entry, "no entry");
    return entry();
}

/* ------------------------------------------------------------------------------------------------------------- nodes
 */

#define NODE_RIGHTS                                                                                                    \
    (UCCL_EP_ACCESS_LOCAL_READ | UCCL_EP_ACCESS_LOCAL_WRITE | UCCL_EP_ACCESS_REMOTE_WRITE | UCCL_EP_ACCESS_REMOTE_READ)

/* One rank of two, with a heap and one endpoint. */
typedef struct node {
    const uccl_ep_backend *table;
    uccl_ep_device *device;
    uccl_ep_caps caps;
    uccl_ep_endpoint *endpoint;
    uint32_t rank;
} node;

static inline void node_open(node *n, uint32_t rank, const char *name, const char *device, const char *options) {
    *n = (node){.table = backend(name), .rank = rank, .caps = {.size = sizeof(uccl_ep_caps)}};
    WORKS(n->table->device_open(&host, device, options, &n->device, &n->caps));
}

static inline uccl_ep_memory host_memory(void *base, uint64_t bytes) {
    return (uccl_ep_memory){.size = sizeof(uccl_ep_memory),
                            .kind = UCCL_EP_MEMORY_HOST,
                            .base = base,
                            .bytes = bytes,
                            .dmabuf_fd = -1,
                            .access = NODE_RIGHTS};
}

static inline void node_endpoint(node *n) {
    const uccl_ep_endpoint_config config = {
        .size = sizeof(config), .rank = n->rank, .peers = 2, .inflight_peer = 16, .inflight = 32, .receives_peer = 8};
    WORKS(n->table->endpoint_open(n->device, &config, &n->endpoint));
}

/* What rank `to` needs to connect to `from`. */
static inline uint32_t address_for(const node *from, uint32_t to, unsigned char blob[UCCL_EP_MAX_BLOB_BYTES]) {
    uint32_t bytes = UCCL_EP_MAX_BLOB_BYTES, more;
    WORKS(from->table->endpoint_address(from->endpoint, blob, &bytes));
    more = UCCL_EP_MAX_BLOB_BYTES - bytes;
    WORKS(from->table->peer_address(from->endpoint, to, blob + bytes, &more));
    return bytes + more;
}

static inline void node_connect(node *n, const node *other) {
    unsigned char blob[UCCL_EP_MAX_BLOB_BYTES];
    const uint32_t bytes = address_for(other, n->rank, blob);
    WORKS(n->table->connect(n->endpoint, other->rank, blob, bytes));
    int status;
    do status = n->table->connect_poll(n->endpoint, other->rank);
    while (status == UCCL_EP_IN_PROGRESS);
    CHECK(status == UCCL_EP_OK, "%d: %s", status, said);
}

static inline void nodes_join(node *a, node *b) {
    node_connect(a, b);
    node_connect(b, a);
    node *both[2] = {a, b};
    for (unsigned i = 0; i < 2; i++) {
        unsigned char blob[UCCL_EP_MAX_BLOB_BYTES];
        uint32_t bytes = sizeof(blob);
        WORKS(both[i]->table->region_export(both[i]->device, UCCL_EP_REGION_HEAP, blob, &bytes));
        node *other = both[1 - i];
        WORKS(other->table->region_import(other->device, both[i]->rank, UCCL_EP_REGION_HEAP, blob, bytes));
    }
}

/* Submit and wait for its completion. */
static inline uccl_ep_completion node_write(node *n, uint32_t peer, uint64_t local, uint64_t remote, uint32_t length) {
    const uccl_ep_operation operation = {.kind = UCCL_EP_OPERATION_WRITE,
                                         .flags = UCCL_EP_OPERATION_SIGNALLED,
                                         .length = length,
                                         .local_offset = local,
                                         .remote_offset = remote,
                                         .cookie = 77};
    uint32_t accepted = 0;
    WORKS(n->table->submit(n->endpoint, peer, &operation, 1, 0, &accepted));
    CHECK_EQ(accepted, 1);
    uccl_ep_completion completion;
    for (unsigned turn = 0; turn < 100000; turn++) {
        const int32_t got = n->table->poll(n->endpoint, &completion, 1);
        CHECK(got >= 0, "%d: %s", got, said);
        if (got) {
            CHECK_EQ(completion.cookie, 77);
            return completion;
        }
    }
    CHECK(false, "no completion came");
    return completion;
}

/* Submit an immediate, and wait until it has been carried out. */
static inline void node_immediate(node *n, uint32_t peer, uint32_t value) {
    const uccl_ep_operation operation = {
        .kind = UCCL_EP_OPERATION_WRITE_IMM, .flags = UCCL_EP_OPERATION_SIGNALLED, .value = value, .cookie = 78};
    uint32_t accepted = 0;
    WORKS(n->table->submit(n->endpoint, peer, &operation, 1, 0, &accepted));
    CHECK_EQ(accepted, 1);
    uccl_ep_completion completion;
    int32_t got = 0;
    for (unsigned turn = 0; turn < 100000 && !got; turn++) got = n->table->poll(n->endpoint, &completion, 1);
    CHECK(got == 1 && completion.cookie == 78 && !completion.status, "%d, status %d", got, completion.status);
}

/* Turns until it is done, a millisecond apart by the host's clock. */
static inline uccl_ep_status node_disconnect(node *n, uint32_t peer) {
    uccl_ep_status status = UCCL_EP_IN_PROGRESS;
    for (unsigned turn = 0; turn < 10000 && status == UCCL_EP_IN_PROGRESS; turn++) {
        status = n->table->disconnect(n->endpoint, peer);
        host_skew += 1000000;
    }
    return status;
}

static inline void node_close(node *n) {
    if (n->endpoint) n->table->endpoint_close(n->endpoint);
    n->table->region_deregister(n->device, UCCL_EP_REGION_HEAP);
    n->table->device_close(n->device);
}

/* What the queue pair that was made as the `index`th was given on its way to `state`. */
static inline struct ibv_qp_attr attr_of(uint32_t index, int state) {
    struct ibv_qp_attr attr;
    int mask;
    const uint32_t number = FAKE(fake_ibverbs_qp_num)(index);
    CHECK(number, "there is no queue pair %u", index);
    CHECK(!FAKE(fake_ibverbs_last_attr)(number, state, &attr, &mask), "queue pair %u never was in state %d", index,
          state);
    return attr;
}

#endif
