/* SPDX-License-Identifier: Apache-2.0
 *
 * All that comes to a rank from its NIC and, through it, from its peers: immediates, completions, events, and any words
 * in its mailbox, while it posts commands, and words that are none. On any promises, so with every strategy. Nothing of
 * it may crash the rank, move a counter back, or make it leave its regions and the limits of its NIC.
 *
 * The NIC does what the input says. It keeps its promises: it takes no more than it said, completes what it took, once,
 * and in order where it promised that; the peers keep none.
 */
#include "fuzz_core.h"
#include "uccl_ep/backend.h"

#define RANKS 3u
#define QUEUE 256u
#define HEAP_BYTES 4096u

struct uccl_ep_device {
    const uccl_ep_host *host;
    struct {
        char *base;
        uint64_t bytes;
    } region[UCCL_EP_REGIONS];
};

static struct uccl_ep_device the_device;
static struct uccl_ep_endpoint {
    uccl_ep_operation queue[RANKS][QUEUE]; /* taken, not ended */
    uint32_t queued[RANKS], receives[RANKS];
    uccl_ep_completion due[QUEUE];
    uint32_t due_count;
    uccl_ep_event event;
    bool event_due, flush_fails;
} nic;

static uccl_ep_caps caps;
static bool can_flush;

static uccl_ep_status query(const uccl_ep_host *host, uint32_t index, uccl_ep_device_info *info) {
    if (index) return host->fail(host->context, UCCL_EP_E_NO_DEVICE, 0, "there is one device");
    snprintf(info->name, sizeof info->name, "input");
    info->caps = caps;
    return UCCL_EP_OK;
}

static uccl_ep_status device_open(const uccl_ep_host *host, const char *name, const char *options, uccl_ep_device **out,
                                  uccl_ep_caps *promised) {
    (void)name;
    (void)options;
    the_device = (struct uccl_ep_device){.host = host};
    *out = &the_device;
    *promised = caps;
    return UCCL_EP_OK;
}
static void device_close(uccl_ep_device *d) {
    (void)d;
}
static uccl_ep_status region_register(uccl_ep_device *d, uccl_ep_region region, const uccl_ep_memory *memory) {
    d->region[region].base = memory->base;
    d->region[region].bytes = memory->bytes;
    return UCCL_EP_OK;
}
static void region_deregister(uccl_ep_device *d, uccl_ep_region region) {
    d->region[region].base = NULL;
}
static uccl_ep_status region_export(uccl_ep_device *d, uccl_ep_region region, void *blob, uint32_t *bytes) {
    (void)d;
    (void)region;
    memset(blob, 0, 4);
    *bytes = 4;
    return UCCL_EP_OK;
}
static uccl_ep_status region_import(uccl_ep_device *d, uint32_t peer, uccl_ep_region region, const void *blob,
                                    uint32_t bytes) {
    (void)d;
    (void)peer;
    (void)region;
    (void)blob;
    (void)bytes;
    return UCCL_EP_OK;
}
static uccl_ep_status endpoint_open(uccl_ep_device *d, const uccl_ep_endpoint_config *config, uccl_ep_endpoint **out) {
    (void)d;
    (void)config;
    memset(&nic, 0, sizeof nic);
    *out = &nic;
    return UCCL_EP_OK;
}
static void endpoint_close(uccl_ep_endpoint *e) {
    (void)e;
}
static uccl_ep_status endpoint_address(uccl_ep_endpoint *e, void *blob, uint32_t *bytes) {
    (void)e;
    memset(blob, 0, 4);
    *bytes = 4;
    return UCCL_EP_OK;
}
static uccl_ep_status connect_peer(uccl_ep_endpoint *e, uint32_t peer, const void *blob, uint32_t bytes) {
    (void)e;
    (void)peer;
    (void)blob;
    (void)bytes;
    return UCCL_EP_OK;
}
static uccl_ep_status connect_poll(uccl_ep_endpoint *e, uint32_t peer) {
    (void)e;
    (void)peer;
    return UCCL_EP_OK;
}

static uccl_ep_status disconnect(uccl_ep_endpoint *e, uint32_t peer) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < e->due_count; i++)
        if (e->due[i].peer != peer) e->due[kept++] = e->due[i];
    e->due_count = kept;
    e->queued[peer] = 0;
    return UCCL_EP_OK;
}

/* The core stays within regions and limits, whatever it was sent. */
static void check_operation(const uccl_ep_operation *o, uint32_t peer) {
    FUZZ_CHECK(peer < RANKS && o->kind >= UCCL_EP_OPERATION_WRITE && o->kind <= UCCL_EP_OPERATION_READ,
               "kind %u to rank %u", o->kind, peer);
    FUZZ_CHECK(o->local_region < UCCL_EP_REGIONS && o->remote_region < UCCL_EP_REGIONS, "regions %u %u",
               o->local_region, o->remote_region);
    const uint64_t length = o->kind == UCCL_EP_OPERATION_ADD64 ? 8 : o->length;
    const uint64_t local = the_device.region[o->local_region].bytes, remote = the_device.region[o->remote_region].bytes;
    FUZZ_CHECK(o->remote_offset <= remote && length <= remote - o->remote_offset, "%" PRIu64 " bytes to %" PRIu64,
               length, o->remote_offset);
    FUZZ_CHECK(o->kind == UCCL_EP_OPERATION_ADD64 || (o->local_offset <= local && length <= local - o->local_offset),
               "%" PRIu64 " bytes from %" PRIu64, length, o->local_offset);
    FUZZ_CHECK(o->kind != UCCL_EP_OPERATION_WRITE_IMM || caps.immediate_bits, "an immediate that was not promised");
    FUZZ_CHECK(o->kind != UCCL_EP_OPERATION_ADD64 || caps.flags & UCCL_EP_CAP_ATOMIC_ADD64,
               "an add that was not promised");
    FUZZ_CHECK(!caps.max_message_bytes || length <= caps.max_message_bytes || o->kind == UCCL_EP_OPERATION_ADD64,
               "%" PRIu64 " bytes", length);
}

static uccl_ep_status submit(uccl_ep_endpoint *e, uint32_t peer, const uccl_ep_operation *operations, uint32_t n,
                             uint32_t flags, uint32_t *accepted) {
    (void)flags;
    for (*accepted = 0; *accepted < n && e->queued[peer] < QUEUE / 4; ++*accepted) {
        check_operation(&operations[*accepted], peer);
        e->queue[peer][e->queued[peer]++] = operations[*accepted];
    }
    return UCCL_EP_OK;
}

static int32_t poll_completions(uccl_ep_endpoint *e, uccl_ep_completion *out, uint32_t max) {
    const uint32_t n = e->due_count < max ? e->due_count : max;
    memcpy(out, e->due, n * sizeof *out);
    memmove(e->due, e->due + n, (e->due_count - n) * sizeof *out);
    e->due_count -= n;
    return (int32_t)n;
}

static void describe(uccl_ep_device *d, int32_t status, int32_t vendor_code, char *text, uint32_t bytes) {
    (void)d;
    snprintf(text, bytes, "%d/%d", status, vendor_code);
}
static uccl_ep_status replenish(uccl_ep_endpoint *e, uint32_t peer, uint32_t n) {
    FUZZ_CHECK(peer < RANKS && n <= e->receives[peer], "%u receives of rank %u given back, %u were used", n, peer,
               e->receives[peer]);
    e->receives[peer] -= n;
    return UCCL_EP_OK;
}
static int32_t events(uccl_ep_endpoint *e, uccl_ep_event *out, uint32_t max) {
    if (!e->event_due || !max) return 0;
    *out = e->event;
    e->event_due = false;
    return 1;
}
static uccl_ep_status flush_local(uccl_ep_endpoint *e, uccl_ep_region region) {
    FUZZ_CHECK(region < UCCL_EP_REGIONS, "region %d", (int)region);
    return e->flush_fails ? the_device.host->fail(the_device.host->context, UCCL_EP_E_NIC, 7, "no flush") : UCCL_EP_OK;
}

__attribute__((visibility("default"))) const uccl_ep_backend *uccl_ep_backend_entry(void) {
    static uccl_ep_backend table = {.size = sizeof table,
                                    .abi_major = UCCL_EP_BACKEND_ABI_MAJOR,
                                    .abi_minor = UCCL_EP_BACKEND_ABI_MINOR,
                                    .name = "input",
                                    .version = "1",
                                    .query = query,
                                    .device_open = device_open,
                                    .device_close = device_close,
                                    .region_register = region_register,
                                    .region_deregister = region_deregister,
                                    .region_export = region_export,
                                    .region_import = region_import,
                                    .endpoint_open = endpoint_open,
                                    .endpoint_close = endpoint_close,
                                    .endpoint_address = endpoint_address,
                                    .connect = connect_peer,
                                    .connect_poll = connect_poll,
                                    .disconnect = disconnect,
                                    .submit = submit,
                                    .poll = poll_completions,
                                    .describe = describe,
                                    .replenish = replenish,
                                    .events = events};
    table.flush_local = can_flush ? flush_local : NULL;
    return &table;
}

/* ------------------------------------------------------------------------------------------------ what the input does
 */

/* Promises that hold together. */
static void draw_caps(fuzz_input *in) {
    static const uint32_t immediates[] = {0, 0, 24, 32, 64};
    const uint64_t known = (UCCL_EP_CAP_IMM_VISIBLE * 2 - 1) | UCCL_EP_CAP_FLUSH_LOCAL;
    caps = (uccl_ep_caps){.size = sizeof caps, .completion_level = fuzz_below(in, 3)};
    caps.flags = (fuzz_u32(in) & known) | UCCL_EP_CAP_HOST_MEMORY;
    caps.flags &= ~(uint64_t)(UCCL_EP_CAP_OWN_MEMORY | UCCL_EP_CAP_DMABUF);
    /* Without order there is no "all before it". */
    if (!(caps.flags & UCCL_EP_CAP_COMPLETES_IN_ORDER)) caps.flags &= ~(uint64_t)UCCL_EP_CAP_UNSIGNALLED;
    caps.immediate_bits = immediates[fuzz_below(in, 5)];
    caps.max_inflight_peer = 1 + fuzz_below(in, QUEUE / 4);
    caps.max_message_bytes = fuzz_u8(in) % 4 ? 0 : 64;
    can_flush = fuzz_u8(in) % 2;
}

static void complete(uint32_t peer, uint32_t at, int32_t status) {
    struct uccl_ep_endpoint *e = &nic;
    if (at >= e->queued[peer] || e->due_count == QUEUE) return;
    const bool in_order = caps.flags & UCCL_EP_CAP_COMPLETES_IN_ORDER;
    const bool covers = caps.flags & UCCL_EP_CAP_UNSIGNALLED;
    if (in_order && !covers) at = 0;
    const uccl_ep_operation o = e->queue[peer][at];
    const uint32_t gone = in_order ? at + 1 : 1, from = in_order ? 0 : at;
    if (o.flags & UCCL_EP_OPERATION_SIGNALLED || status != UCCL_EP_OK || !covers)
        e->due[e->due_count++] = (uccl_ep_completion){.cookie = o.cookie, .peer = peer, .status = status};
    else
        return; /* what covers it is to come */
    memmove(&e->queue[peer][from], &e->queue[peer][from + gone],
            (e->queued[peer] - from - gone) * sizeof e->queue[peer][0]);
    e->queued[peer] -= gone;
}

/* As a device might: any bits, or a command that is in order but for one of them. */
static uccl_ep_status post_any_words(uccl_ep_comm *comm, uint32_t channel, fuzz_input *in, uint64_t *ticket) {
    uccl_ep_command command = {.op = 1 + fuzz_below(in, 4), .target = fuzz_below(in, RANKS)};
    uccl_ep_words words = {{fuzz_u64(in) & ~UCCL_EP_PARITY_BIT, fuzz_u64(in) & ~UCCL_EP_PARITY_BIT}};
    const uint8_t how = fuzz_u8(in);
    if (uccl_ep_op_has_put(command.op)) command.granularity = 16, command.bytes = 16u * (how % 8);
    if (uccl_ep_op_has_signal(command.op)) command.slot = how % 8;
    if (how & 64 && uccl_ep_encode(&command, &words) == UCCL_EP_OK && how & 128)
        words.word[how & 1] ^= 1ull << fuzz_u8(in) % 63;
    return uccl_ep_post_raw(comm, channel, &words, 1, 0, ticket);
}

static void post_one(uccl_ep_comm *comm, fuzz_input *in, uint64_t *last, bool *posted) {
    const uint8_t what = fuzz_u8(in);
    const uint32_t channel = what & 1, target = (what >> 1) % RANKS;
    const uint64_t local = fuzz_u8(in) * 16u % HEAP_BYTES, remote = fuzz_u8(in) * 16u % HEAP_BYTES;
    const uint64_t bytes = fuzz_u8(in) % 16 * 16u;
    uint64_t ticket;
    uccl_ep_status status;
    if (what < 96)
        status = uccl_ep_put(comm, channel, target, local, remote, bytes, 0, &ticket);
    else if (what < 160)
        status = uccl_ep_signal(comm, channel, target, fuzz_u8(in) % 8, fuzz_number(in), 0, &ticket);
    else if (what < 192)
        status = post_any_words(comm, channel, in, &ticket);
    else
        status = uccl_ep_put_signal(comm, channel, target, local, remote, bytes, fuzz_u8(in) % 8, 1, 0, &ticket);
    if (status == UCCL_EP_OK)
        last[channel] = ticket, posted[channel] = true;
    else
        fuzz_check_error(status);
}

static void check_counters(uccl_ep_comm *comm, uccl_ep_channel_stats before[2]) {
    for (uint32_t i = 0; i < 2; i++) {
        uccl_ep_channel_stats s;
        FUZZ_CHECK(uccl_ep_channel_query(comm, i, &s) == UCCL_EP_OK, "channel %u", i);
        FUZZ_CHECK(s.complete <= s.source && s.source <= s.taken && s.taken <= s.posted,
                   "channel %u: complete %" PRIu64 ", source %" PRIu64 ", taken %" PRIu64 ", posted %" PRIu64, i,
                   s.complete, s.source, s.taken, s.posted);
        FUZZ_CHECK(s.complete >= before[i].complete && s.source >= before[i].source && s.taken >= before[i].taken,
                   "a counter of channel %u went back", i);
        before[i] = s;
    }
}

/* An immediate takes a receive where one is needed, and then a peer has no more than it was given. */
static void immediate(uint32_t source, uint64_t value) {
    if (nic.due_count == QUEUE || !caps.immediate_bits) return;
    nic.receives[source]++;
    nic.due[nic.due_count++] =
        (uccl_ep_completion){.kind = UCCL_EP_COMPLETION_IMMEDIATE, .peer = source, .cookie = value};
}

/* From a rank that there may not be, whatever was promised of immediates. */
static void unexpected(uint32_t source, uint64_t value) {
    if (nic.due_count == QUEUE) return;
    if (source < RANKS) nic.receives[source]++;
    nic.due[nic.due_count++] =
        (uccl_ep_completion){.kind = UCCL_EP_COMPLETION_IMMEDIATE, .peer = source, .cookie = value};
}

static void write_mailbox(fuzz_input *in) {
    char *base = the_device.region[UCCL_EP_REGION_MAILBOX].base;
    const uint64_t words = the_device.region[UCCL_EP_REGION_MAILBOX].bytes / 8;
    const uint64_t at = fuzz_u32(in);
    const uint8_t how = fuzz_u8(in);
    if (!base || !words) return;
    uint64_t value = fuzz_number(in);
    if (how & 1) value = (how & 2 ? value << 24 : value << 20) | fuzz_u32(in) % (how & 4 ? 16 : 1u << 20);
    memcpy(base + at % words * 8, &value, how & 8 ? 1 : 8);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = fuzz_begin(data, size);
    draw_caps(&in);
    fuzz_bootstrap b = {.size = RANKS, .rank = 0, .in = &in};
    uccl_ep_bootstrap bootstrap = fuzz_bootstrap_of(&b);
    fuzz_clock clock = {.step_ns = 5000};
    const uint8_t options = fuzz_u8(&in);
    const uccl_ep_config config = {.size = sizeof config,
                                   .backend = THIS_PROGRAM,
                                   .heap_bytes = HEAP_BYTES,
                                   .signals = 8,
                                   .channels = 2,
                                   .ring_log2 = 4,
                                   .flags = (options & 1 ? UCCL_EP_CONFIG_SINGLE_WRITER : 0) |
                                            (options & 2 ? UCCL_EP_CONFIG_NO_MERGE : 0),
                                   .strategy = fuzz_below(&in, 7),
                                   .first_sequence = options & 4 ? fuzz_number(&in) : 0,
                                   .progress = UCCL_EP_PROGRESS_CALLER,
                                   .timeout_ns = 10000000,
                                   .peer_timeout_ns = 10000000,
                                   .bootstrap_timeout_ns = 10000000,
                                   .clock = fuzz_now,
                                   .clock_context = &clock};
    uccl_ep_comm *comm;
    uccl_ep_status status = uccl_ep_comm_create(&config, &bootstrap, &comm);
    if (status != UCCL_EP_OK) {
        fuzz_check_error(status);
        return 0;
    }
    uint64_t last[2] = {0, 0}, value, expected[RANKS] = {0};
    bool posted[2] = {false, false};
    uccl_ep_channel_stats before[2] = {{0}, {0}};
    while (fuzz_left(&in)) {
        uint32_t worked;
        const uint8_t what = fuzz_u8(&in);
        const uint32_t peer = what % RANKS;
        switch (what / 16) {
        case 0:
        case 1:
        case 2:
        case 3:
            post_one(comm, &in, last, posted);
            break;
        case 4:
        case 5:
            write_mailbox(&in);
            break;
        case 6:
            immediate(peer, fuzz_u64(&in));
            break;
        case 7: /* of those that may be right: near the first ones */
            immediate(peer, (config.first_sequence ? config.first_sequence : UINT32_MAX - 100u) + ++expected[peer] +
                                fuzz_u8(&in) % 4);
            break;
        case 8:
        case 9:
        case 10:
            complete(peer, fuzz_u8(&in) % (QUEUE / 4), UCCL_EP_OK);
            break;
        case 11:
            complete(peer, fuzz_u8(&in) % (QUEUE / 4),
                     what & 1   ? UCCL_EP_E_NIC
                     : what & 2 ? UCCL_EP_E_PEER_LOST
                                : (int32_t)fuzz_u32(&in) | INT32_MIN);
            break;
        case 12: /* nobody's */
            if (what & 1)
                unexpected((uint32_t)fuzz_number(&in), fuzz_u64(&in));
            else if (nic.due_count < QUEUE)
                nic.due[nic.due_count++] =
                    (uccl_ep_completion){.cookie = fuzz_u64(&in), .peer = (uint32_t)fuzz_number(&in)};
            break;
        case 13:
            clock.now_ns += fuzz_number(&in);
            nic.flush_fails = what == 13 * 16;
            break;
        case 14:
            if (what & 1) {
                nic.event = (uccl_ep_event){.kind = fuzz_below(&in, 5), .peer = (uint32_t)fuzz_number(&in)};
                fuzz_fill(&in, nic.event.text, 16);
                nic.event_due = true;
            } else if (posted[peer & 1]) {
                status = uccl_ep_wait(comm, peer & 1, last[peer & 1], 0);
                if (status < 0) fuzz_check_error(status);
            } else {
                status = uccl_ep_wait_signal(comm, what & 7, fuzz_number(&in), peer, 0, &value);
                if (status < 0) fuzz_check_error(status);
            }
            break;
        default:
            if (what == 255) {
                status = uccl_ep_exclude(comm, 1);
            } else if (what == 254) {
                status = uccl_ep_reset(comm, &bootstrap);
                memset(before, 0, sizeof before);
                for (uint32_t i = 0; i < RANKS; i++) expected[i] = 0;
            }
            break;
        }
        if (uccl_ep_progress(comm, &worked) != UCCL_EP_OK) break;
        check_counters(comm, before);
    }
    uccl_ep_comm_destroy(comm);
    return 0;
}
