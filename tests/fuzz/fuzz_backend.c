/* SPDX-License-Identifier: Apache-2.0
 *
 * A backend's table, called with any options, device name, address and region, in any order that backend.h allows. It
 * never crashes; it gives OK, IN_PROGRESS or a typed error, and never connects to what is no address.
 */
#include <sys/mman.h>

#include "fuzz_backends.h"
#include "uccl_ep/backend.h"

#define PEERS 3u
#define REGION_BYTES 8192u

static uint64_t now;
static char told[256];

static uint64_t host_now(void *context) {
    (void)context;
    return now += 1000000;
}
static void host_log(void *context, uccl_ep_log_level level, const char *text) {
    (void)context;
    FUZZ_CHECK(level <= UCCL_EP_LOG_DEBUG && text[0], "log level %d", (int)level);
}
static uccl_ep_status host_fail(void *context, uccl_ep_status status, int32_t vendor_code, const char *text) {
    (void)context;
    (void)vendor_code;
    FUZZ_CHECK(text && text[0], "an error without words");
    snprintf(told, sizeof told, "%s", text);
    return status;
}
static const uccl_ep_host host = {.size = sizeof host,
                                  .abi_major = UCCL_EP_BACKEND_ABI_MAJOR,
                                  .abi_minor = UCCL_EP_BACKEND_ABI_MINOR,
                                  .now_ns = host_now,
                                  .log = host_log,
                                  .fail = host_fail};

static uccl_ep_status checked(uccl_ep_status status) {
    FUZZ_CHECK(status <= UCCL_EP_IN_PROGRESS && strcmp(uccl_ep_status_name(status), "unknown") != 0, "status %d",
               status);
    return status;
}

struct opened {
    const uccl_ep_backend *b;
    uccl_ep_device *device;
    uccl_ep_endpoint *endpoint;
    void *memory[UCCL_EP_REGIONS];
    uint32_t rank;
    /* What connect() gets: an address and, where there is one, what is for this rank alone. */
    uint8_t address[UCCL_EP_MAX_BLOB_BYTES + UCCL_EP_MAX_PEER_BLOB_BYTES],
        regions[UCCL_EP_REGIONS][UCCL_EP_MAX_BLOB_BYTES];
    uint32_t address_bytes, region_bytes[UCCL_EP_REGIONS];
    bool connecting[PEERS], connected[PEERS];
};

/* Of the own kind, more or less damaged, or anything. Of its exact size, so that a byte too many is seen. */
static uint8_t *blob(fuzz_input *in, const uint8_t *own, uint32_t own_bytes, uint32_t *bytes) {
    uint8_t image[UCCL_EP_MAX_BLOB_BYTES + UCCL_EP_MAX_PEER_BLOB_BYTES] = {0};
    const uint8_t how = fuzz_u8(in);
    if (how < 64) {
        *bytes = (uint32_t)fuzz_some(in, image, sizeof image);
    } else {
        memcpy(image, own, own_bytes);
        *bytes = own_bytes;
        for (uint8_t n = how % 8; n; n--) {
            const uint8_t at = fuzz_u8(in);
            if (at < own_bytes) image[at] = fuzz_u8(in);
        }
        if (how >= 240) *bytes = fuzz_u8(in) % (own_bytes + 1);
    }
    uint8_t *exact = malloc(*bytes ? *bytes : 1);
    FUZZ_CHECK(exact, "no memory");
    memcpy(exact, image, *bytes);
    return exact;
}

static bool open_all(struct opened *o, fuzz_input *in) {
    char options[256], name[64];
    const bool named = fuzz_u8(in) == 255;
    if (named) fuzz_string(in, name, sizeof name);
    const uint8_t how = fuzz_u8(in) % 4;
    int used = 0;
    if (how) used = snprintf(options, sizeof options, "%s%s", fuzz_options(o->rank), how == 1 ? "," : "");
    if (how < 2) fuzz_string(in, options + used, sizeof options - (size_t)used);
    uccl_ep_caps caps = {.size = sizeof caps};
    if (checked(o->b->device_open(&host, named ? name : NULL, options, &o->device, &caps)) != UCCL_EP_OK) return false;
    FUZZ_CHECK(o->device && caps.completion_level <= UCCL_EP_COMPLETION_VISIBLE, "level %u", caps.completion_level);
    for (uint32_t i = 0; i < UCCL_EP_REGIONS; i++) {
        if (o->b->memory_alloc) {
            if (checked(o->b->memory_alloc(o->device, REGION_BYTES, UCCL_EP_ALLOC_HUGE_OFF, &o->memory[i])))
                return false;
        } else if (posix_memalign(&o->memory[i], 4096, REGION_BYTES)) {
            return false;
        }
        const uccl_ep_memory memory = {.size = sizeof memory,
                                       .base = o->memory[i],
                                       .bytes = REGION_BYTES,
                                       .dmabuf_fd = -1,
                                       .access = UCCL_EP_ACCESS_LOCAL_READ | UCCL_EP_ACCESS_REMOTE_WRITE |
                                                 UCCL_EP_ACCESS_REMOTE_ATOMIC | UCCL_EP_ACCESS_REMOTE_READ};
        if (checked(o->b->region_register(o->device, (uccl_ep_region)i, &memory))) return false;
        o->region_bytes[i] = sizeof o->regions[i];
        if (checked(o->b->region_export(o->device, (uccl_ep_region)i, o->regions[i], &o->region_bytes[i])))
            return false;
    }
    const uccl_ep_endpoint_config config = {.size = sizeof config,
                                            .rank = o->rank,
                                            .peers = PEERS,
                                            .inflight_peer = 16,
                                            .inflight = 64,
                                            .receives_peer = 16};
    if (checked(o->b->endpoint_open(o->device, &config, &o->endpoint)) != UCCL_EP_OK) return false;
    o->address_bytes = UCCL_EP_MAX_BLOB_BYTES;
    if (checked(o->b->endpoint_address(o->endpoint, o->address, &o->address_bytes)) != UCCL_EP_OK) return false;
    uint32_t pair_bytes = UCCL_EP_MAX_PEER_BLOB_BYTES;
    if (!o->b->peer_address) return true;
    if (checked(o->b->peer_address(o->endpoint, o->rank, o->address + o->address_bytes, &pair_bytes)) != UCCL_EP_OK)
        return false;
    FUZZ_CHECK(pair_bytes <= UCCL_EP_MAX_PEER_BLOB_BYTES, "%u bytes for one peer", pair_bytes);
    o->address_bytes += pair_bytes;
    return true;
}

static void close_all(struct opened *o) {
    if (o->endpoint) o->b->endpoint_close(o->endpoint);
    for (uint32_t i = 0; i < UCCL_EP_REGIONS && o->device; i++) {
        if (o->region_bytes[i]) o->b->region_deregister(o->device, (uccl_ep_region)i);
        if (o->memory[i] && o->b->memory_alloc) o->b->memory_free(o->device, o->memory[i], REGION_BYTES);
        if (o->memory[i] && !o->b->memory_alloc) free(o->memory[i]);
    }
    if (o->device) o->b->device_close(o->device);
}

static void call_one(struct opened *o, fuzz_input *in) {
    const uccl_ep_backend *b = o->b;
    const uint8_t what = fuzz_u8(in) % 8;
    const uint32_t peer = fuzz_below(in, PEERS);
    uint32_t bytes;
    if (what == 0 && !o->connecting[peer]) {
        uint8_t *address = blob(in, o->address, o->address_bytes, &bytes);
        o->connecting[peer] = checked(b->connect(o->endpoint, peer, address, bytes)) == UCCL_EP_OK;
        free(address);
    } else if (what == 1 && o->connecting[peer] && !o->connected[peer]) {
        const uccl_ep_status status = checked(b->connect_poll(o->endpoint, peer));
        o->connected[peer] = status == UCCL_EP_OK;
        if (status < 0) o->connecting[peer] = false;
        /* Only this rank exists. */
        FUZZ_CHECK(FUZZ_CONNECTS_TO_NOBODY || !o->connected[peer] || peer == o->rank,
                   "rank %u is connected, and there is none", peer);
    } else if (what == 2 || what == 3) {
        const uint32_t region = fuzz_below(in, UCCL_EP_REGIONS);
        uint8_t *image = blob(in, o->regions[region], o->region_bytes[region], &bytes);
        checked(b->region_import(o->device, peer, (uccl_ep_region)region, image, bytes));
        free(image);
    } else if (what == 4) {
        const uccl_ep_status status = checked(b->disconnect(o->endpoint, peer));
        if (status == UCCL_EP_OK) o->connecting[peer] = o->connected[peer] = false;
    } else if (what == 5 && o->connected[peer]) {
        uint32_t accepted = 0;
        uccl_ep_operation operation;
        fuzz_fill(in, &operation, sizeof operation);
        if (fuzz_u8(in) % 2) {
            operation.kind = (uint8_t)(1 + operation.kind % 4);
            operation.flags &= UCCL_EP_OPERATION_SIGNALLED;
            operation.local_region %= UCCL_EP_REGIONS;
            operation.remote_region %= UCCL_EP_REGIONS;
            operation.length %= 64;
            operation.local_offset %= REGION_BYTES + 64;
            operation.remote_offset %= REGION_BYTES + 64;
        }
        checked(b->submit(o->endpoint, peer, &operation, 1, 0, &accepted));
        FUZZ_CHECK(accepted <= 1, "%u of 1 accepted", accepted);
    } else if (what == 6) {
        uccl_ep_completion completions[4];
        const int32_t n = b->poll(o->endpoint, completions, 4);
        FUZZ_CHECK(n <= 4, "%d of 4 completions", n);
        for (int32_t i = 0; i < n; i++) {
            char text[64];
            FUZZ_CHECK(completions[i].peer < PEERS, "peer %u", completions[i].peer);
            b->describe(o->device, completions[i].status, completions[i].vendor_code, text, sizeof text);
            FUZZ_CHECK(memchr(text, 0, sizeof text), "a text without end");
        }
    } else if (what == 7 && b->events) {
        uccl_ep_event events[4];
        const int32_t n = b->events(o->endpoint, events, 4);
        for (int32_t i = 0; i < n; i++) FUZZ_CHECK(events[i].peer < PEERS, "peer %u", events[i].peer);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = fuzz_begin(data, size);
    struct opened o = {.b = uccl_ep_backend_entry()};
    o.rank = fuzz_below(&in, PEERS);
    now = 0;
    fuzz_around_open(&in, PEERS);
    if (open_all(&o, &in)) {
        while (fuzz_left(&in)) {
            call_one(&o, &in);
            fuzz_around_turn();
        }
    }
    close_all(&o);
    fuzz_around_close();
    return 0;
}
