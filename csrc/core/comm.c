/* SPDX-License-Identifier: Apache-2.0
 *
 * comm.c: a communicator from create to destroy.
 *
 * create is a sequence of collective steps (exchange.c): open and register, connect, import, start. A rank on which a
 * step failed still goes to the end of that step, so that all ranks leave together, each with the reason.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

/* --------------------------------------------------------------------------------------- what ranks tell each other */

/* Step 1: do we want the same thing, and what does each NIC promise? */
typedef struct hello {
    uint64_t heap_bytes, first_ticket;
    uint64_t first_sequence;
    uint32_t signals, channels, ring_log2, granularity, proxies, strategy, heap_kind, backend_abi, single_writer,
        signals_kind;
    uint32_t functions;       /* HAS_* */
    uint32_t staging, stages; /* the setting; this rank wants it */
    char backend[64];
    uccl_ep_caps caps;
} hello;

static uccl_ep_status same(const hello *mine, const hello *other, uint32_t my_rank, uint32_t rank) {
#define SAME(field, what)                                                                                              \
    if (mine->field != other->field)                                                                                   \
        return fail_local(UCCL_EP_E_BOOTSTRAP, "", "rank %u has %s %llu and rank %u has %llu: all ranks must agree",   \
                          my_rank, what, (unsigned long long)mine->field, rank, (unsigned long long)other->field);
    if (strncmp(mine->backend, other->backend, sizeof mine->backend))
        return fail_local(UCCL_EP_E_BOOTSTRAP, "",
                          "rank %u uses the backend %.64s and rank %u %.64s: all ranks must agree", my_rank,
                          mine->backend, rank, other->backend);
    SAME(heap_bytes, "heap_bytes")
    SAME(signals, "signals")
    SAME(channels, "channels")
    SAME(proxies, "proxies")
    SAME(granularity, "granularity")
    SAME(single_writer, "single_writer")
    SAME(staging, "staging")
    /* Which strategies can be follows from it. */
    if (!mine->signals_kind != !other->signals_kind)
        return fail_local(UCCL_EP_E_BOOTSTRAP, "MEM-3",
                          "rank %u has its signal words in %s memory and rank %u in %s memory: all ranks must agree",
                          my_rank, mine->signals_kind ? "device" : "host", rank,
                          other->signals_kind ? "device" : "host");
    SAME(backend_abi, "a backend of interface version (major << 16 | minor)")
    SAME(first_sequence, "first_sequence")
#undef SAME
    if (mine->strategy != other->strategy)
        return fail_local(UCCL_EP_E_BOOTSTRAP, "",
                          "rank %u asks for the strategy %s and rank %u for %s: all ranks must agree", my_rank,
                          strategy_name(mine->strategy), rank, strategy_name(other->strategy));
    /* Mailboxes are laid out by it. */
    const uint32_t alignment = other->caps.write_alignment;
    if (alignment > mine->granularity || alignment & (alignment - 1))
        return fail_local(
            UCCL_EP_E_CAPABILITY, "PUT-4",
            "the NIC of rank %u writes at multiples of %u bytes, and commands come at a granularity of %u", rank,
            alignment, mine->granularity);
    return UCCL_EP_OK;
}

/* One rank's wish is enough: a put needs both ends. */
static uccl_ep_status agree_on_staging(uccl_ep_comm *comm, const hello *all) {
    uint32_t first = 0;
    while (first < comm->size && !all[first].stages) first++;
    if (first == comm->size) return UCCL_EP_OK;
    for (uint32_t rank = 0; rank < comm->size; rank++)
        if (all[rank].heap_kind == UCCL_EP_MEMORY_HOST)
            return fail_local(UCCL_EP_E_CAPABILITY, "MEM-1",
                              "the heap of rank %u is staged through host memory, and that of rank %u lies there: take "
                              "heaps of one kind on all ranks",
                              first, rank);
    if (comm->config.signals_kind != UCCL_EP_MEMORY_HOST)
        return fail_local(
            UCCL_EP_E_CAPABILITY, "MEM-3",
            "the heap of rank %u is staged through host memory, where the CPU adds signals: take signals in "
            "host memory, or a NIC that reaches the heap",
            first);
    if (!comm->staged_reason[0]) snprintf(comm->staged_reason, sizeof comm->staged_reason, "rank %u needs it", first);
    comm->staged = true;
    return UCCL_EP_OK;
}

static void tell_of_staging(const uccl_ep_comm *comm) {
    const uccl_ep_config *c = &comm->config;
    if (!comm->staged || !c->log) return;
    char text[sizeof comm->staged_reason + 80];
    snprintf(text, sizeof text, "the heap in device memory is staged through host memory: %s", comm->staged_reason);
    c->log(c->log_context, UCCL_EP_LOG_INFO, text);
}

static uint64_t smaller_of(uint64_t a, uint64_t b) {
    return !a ? b : !b ? a : a < b ? a : b;
}

/* The promises that hold on both ends. A duty (IMM_NEEDS_RECEIVE) holds if either end has it. */
static void weaken(uccl_ep_caps *w, const uccl_ep_caps *other) {
    const uint64_t duties = UCCL_EP_CAP_IMM_NEEDS_RECEIVE;
    w->flags = ((w->flags & other->flags) & ~duties) | ((w->flags | other->flags) & duties);
    if (other->completion_level < w->completion_level) w->completion_level = other->completion_level;
    if (other->immediate_bits < w->immediate_bits) w->immediate_bits = other->immediate_bits;
    if (other->write_alignment > w->write_alignment) w->write_alignment = other->write_alignment;
    w->max_message_bytes = smaller_of(w->max_message_bytes, other->max_message_bytes);
    w->responder_atomics = (uint32_t)smaller_of(w->responder_atomics, other->responder_atomics);
    w->max_receives = (uint32_t)smaller_of(w->max_receives, other->max_receives);
    if (other->adding_nics > w->adding_nics) w->adding_nics = other->adding_nics;
}

/* ----------------------------------------------------------------------------------------------------------- memory */

static uint64_t page_up(uint64_t bytes) {
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

uccl_ep_status backend_failed(uccl_ep_comm *comm, uccl_ep_status status, const char *clause, const char *what) {
    const char *why = host_fail_text();
    const uccl_ep_status checked = checked_status(status);
    if (checked != status)
        fail_local(checked, clause, "%s: %s gave %d (%s), which is no error: report it to the backend's author",
                   comm->backend->name, what, status, uccl_ep_status_name(status));
    else
        fail_local(status, clause, "%s: %s failed: %.180s", comm->backend->name, what,
                   why[0] ? why : uccl_ep_status_text(status));
    last_error_slot()->vendor_code = host_fail_code();
    snprintf(last_error_slot()->nic, sizeof last_error_slot()->nic, "%s", comm->device_info.name);
    return checked;
}

/* It said OK and gave nothing, or nothing of use. */
static uccl_ep_status backend_gave(const uccl_ep_comm *comm, const char *what) {
    return fail_local(UCCL_EP_E_BACKEND, "", "%s said OK and gave %s: report it to the backend's author",
                      comm->backend->name, what);
}

static uccl_ep_status allocate(uccl_ep_comm *comm, uint64_t bytes, void **base) {
    const uint32_t flags = (comm->config.flags & UCCL_EP_CONFIG_HUGE_PAGES_ON    ? UCCL_EP_ALLOC_HUGE_ON
                            : comm->config.flags & UCCL_EP_CONFIG_HUGE_PAGES_OFF ? UCCL_EP_ALLOC_HUGE_OFF
                                                                                 : UCCL_EP_ALLOC_HUGE_AUTO) |
                           (comm->config.flags & UCCL_EP_CONFIG_LOCK_MEMORY ? UCCL_EP_ALLOC_LOCK : 0);
    *base = NULL;
    host_fail_clear();
    if (comm->caps.flags & UCCL_EP_CAP_OWN_MEMORY && comm->backend->memory_alloc) {
        const uccl_ep_status status = comm->backend->memory_alloc(comm->device, bytes, flags, base);
        if (status != UCCL_EP_OK) {
            *base = NULL;
            return backend_failed(comm, status, "MEM-1", "allocating memory");
        }
        if (*base && (uintptr_t)*base % (uintptr_t)sysconf(_SC_PAGESIZE) == 0) return UCCL_EP_OK;
        *base = NULL;
        return backend_gave(comm, "no memory that starts at a page");
    }
    void *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED)
        return fail_local(
            UCCL_EP_E_NO_MEMORY, "MEM-1",
            "mmap of %llu bytes failed: ask for a smaller heap, or raise the limit of address space (ulimit -v)",
            (unsigned long long)bytes);
    if (flags & UCCL_EP_ALLOC_LOCK && mlock(mapped, bytes)) {
        munmap(mapped, bytes);
        return fail_local(UCCL_EP_E_NO_MEMORY, "MEM-1",
                          "%llu bytes cannot be locked: raise the limit of locked memory (ulimit -l)",
                          (unsigned long long)bytes);
    }
    *base = mapped;
    return UCCL_EP_OK;
}

static void release(uccl_ep_comm *comm, void *base, uint64_t bytes) {
    if (!base) return;
    if (comm->caps.flags & UCCL_EP_CAP_OWN_MEMORY && comm->backend->memory_free)
        comm->backend->memory_free(comm->device, base, bytes);
    else
        munmap(base, bytes);
}

static uccl_ep_status register_region(uccl_ep_comm *comm, uccl_ep_region region, void *base, uint64_t bytes) {
    uccl_ep_memory memory = {.size = sizeof memory, .base = base, .bytes = bytes, .dmabuf_fd = -1};
    if (comm->caps.max_region_bytes && bytes > comm->caps.max_region_bytes)
        return fail_local(UCCL_EP_E_REGISTRATION, "MEM-1", "a region of %llu bytes: %s registers at most %llu",
                          (unsigned long long)bytes, comm->device_info.name,
                          (unsigned long long)comm->caps.max_region_bytes);
    if (region == UCCL_EP_REGION_HEAP) {
        memory.kind = comm->staged ? UCCL_EP_MEMORY_HOST : comm->config.heap_kind;
        memory.access = UCCL_EP_ACCESS_LOCAL_READ | UCCL_EP_ACCESS_REMOTE_WRITE;
        if (comm->config.heap_dmabuf_fd && !comm->staged) memory.dmabuf_fd = comm->config.heap_dmabuf_fd - 1;
        const uccl_ep_status described = device_memory_describe(comm, &memory);
        if (described != UCCL_EP_OK) return described;
        if (comm->raise == RAISE_READ) memory.access |= UCCL_EP_ACCESS_REMOTE_READ;
    } else if (region == UCCL_EP_REGION_SIGNALS) {
        if (comm->adder == ADDER_TARGET) return UCCL_EP_OK; /* no NIC touches them */
        memory.access = comm->adder == ADDER_NIC ? UCCL_EP_ACCESS_REMOTE_ATOMIC : UCCL_EP_ACCESS_REMOTE_WRITE;
        memory.kind = comm->config.signals_kind;
        const uccl_ep_status described = device_memory_describe(comm, &memory);
        if (described != UCCL_EP_OK) return described;
    } else {
        memory.access = UCCL_EP_ACCESS_LOCAL_READ | UCCL_EP_ACCESS_REMOTE_WRITE;
        if (comm->raise == RAISE_READ) memory.access |= UCCL_EP_ACCESS_LOCAL_WRITE;
    }
    host_fail_clear();
    const uccl_ep_status status = comm->backend->region_register(comm->device, region, &memory);
    if (memory.dmabuf_fd >= 0 && memory.dmabuf_fd != comm->config.heap_dmabuf_fd - 1) close(memory.dmabuf_fd);
    if (status != UCCL_EP_OK)
        return backend_failed(comm, status, "MEM-1",
                              region == UCCL_EP_REGION_HEAP      ? "registering the heap"
                              : region == UCCL_EP_REGION_SIGNALS ? "registering the signal words"
                                                                 : "registering the mailbox");
    comm->registered[region] = true;
    return UCCL_EP_OK;
}

/* ------------------------------------------------------------------------------------------------ rings and proxies */

static void *zeroed(size_t bytes) {
    void *memory = NULL;
    if (posix_memalign(&memory, 64, bytes ? bytes : 64)) return NULL;
    return memset(memory, 0, bytes);
}

/* Room for any target that a command can name; pages behind the last rank are never touched. */
#define PEERS_BYTES (UCCL_EP_MAX_RANKS * sizeof(struct peer))

static uint32_t channels_of(const uccl_ep_comm *comm, uint32_t proxy_index) {
    const uint32_t n = comm->channels, proxies = comm->config.proxies;
    return n / proxies + (proxy_index < n % proxies);
}

static uccl_ep_status make_proxy(uccl_ep_comm *comm, uint32_t index, uint32_t first_counter) {
    const uccl_ep_config *config = &comm->config;
    struct proxy *p = &comm->proxies[index];
    p->comm = comm;
    p->index = index;
    p->channels = channels_of(comm, index);
    p->size = comm->size;
    p->ring_log2 = config->ring_log2;
    /* Twice the ring, so that a stalled target can hold a ring's worth and the others still flow; in cache, so not
     * more. */
    p->window_log2 = config->ring_log2 + 1 < 6 ? 6 : config->ring_log2 + 1 > 12 ? 12 : config->ring_log2 + 1;
    p->channel = zeroed(p->channels * sizeof *p->channel);
    p->entries = zeroed(((size_t)p->channels << p->window_log2) * sizeof *p->entries);
    p->peers = mmap(NULL, PEERS_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p->peers == MAP_FAILED) p->peers = NULL;
    p->active = zeroed(comm->size * sizeof *p->active);
    p->busy = zeroed((comm->size + 63) / 64 * sizeof *p->busy);
    p->trace = zeroed(TRACE_ENTRIES * sizeof *p->trace);
    p->trace_slots = zeroed(TRACE_ENTRIES * sizeof *p->trace_slots);
    if (!p->channel || !p->entries || !p->peers || !p->active || !p->busy || !p->trace || !p->trace_slots)
        return fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory for proxy %u", index);
    for (uint32_t target = 0; target < comm->size; target++) {
        struct peer *q = &p->peers[target];
        q->open = UINT64_MAX;
        q->seq_issued = q->seq_completed = q->seq_read = q->seq_visible = (uint32_t)config->first_sequence;
    }
    for (uint32_t i = 0; i < p->channels; i++) {
        struct channel *c = &p->channel[i];
        c->index = index + i * config->proxies;
        const bool host = c->index >= comm->device_channels;
        c->granularity = config->granularity;
        c->window = &p->entries[(size_t)i << p->window_log2];
        c->window_mask = (1ull << p->window_log2) - 1;
        for (uint64_t k = 0; k <= c->window_mask; k++) c->window[k].channel = (uint8_t)i;
        c->counters = &comm->counters[first_counter + i];
        c->slots = shared_slots(comm, c->index, &c->gave_up);
        if (host) c->producer = zeroed(sizeof *c->producer);
        if (host && !c->producer) return fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory for the ring of a channel");
        const uint64_t first = config->first_ticket;
        uccl_ep_ring_format(c->slots, config->ring_log2, first);
        c->taken = c->source = c->complete = first;
        if (host) c->producer->head = c->producer->tail_cache = first;
        *c->counters =
            (uccl_ep_ring_counters){.tail = first, .source = first, .complete = first, .failed = UCCL_EP_NO_TICKET};
        comm->channel_of[c->index] = c;
        comm->rings[c->index] = (uccl_ep_ring){.codec_version = UCCL_EP_CODEC_VERSION,
                                               .log2_slots = config->ring_log2,
                                               .granularity = config->granularity,
                                               .channel = c->index,
                                               .first_ticket = first,
                                               .slots = c->slots,
                                               .producer = c->producer,
                                               .gave_up = c->gave_up,
                                               .counters = c->counters};
    }
    return UCCL_EP_OK;
}

/* What the NIC's promises, the strategy and the limits make of a proxy. */
static void configure_proxy(uccl_ep_comm *comm, struct proxy *p) {
    const uccl_ep_caps *agreed = &comm->agreed.caps;
    const uccl_ep_config *config = &comm->config;
    p->max_inflight_peer = config->max_inflight_peer;
    p->max_inflight = config->max_inflight;
    p->max_inflight_bytes = config->max_inflight_bytes;
    p->max_message_bytes = config->max_message_bytes;
    if (agreed->max_message_bytes && agreed->max_message_bytes < p->max_message_bytes) /* the smallest NIC's */
        p->max_message_bytes = whole_pieces(config, agreed, agreed->max_message_bytes);
    p->max_batch =
        comm->caps.max_batch && comm->caps.max_batch < BATCH_OPERATIONS ? comm->caps.max_batch : BATCH_OPERATIONS;
    p->heap_bytes = config->heap_bytes;
    p->signals = config->signals;
    p->adder = (uint8_t)comm->adder;
    p->raise = (uint8_t)comm->raise;
    p->window = comm->window;
    p->bank_offset = (uint64_t)(p->index % comm->banks) * p->signals * sizeof(uint64_t);
    p->immediate_mask = comm->immediate_bits < 64 ? (1ull << comm->immediate_bits) - 1 : UINT64_MAX;
    p->hold = comm->hold;
    p->sequenced = comm->adder == ADDER_TARGET && !comm->hold;
    p->source_early = p->hold || p->sequenced;
    p->put_flags = p->raise == RAISE_REQUEST ? UCCL_EP_OPERATION_VISIBLE : 0;
    /* The next return word may go once this one has landed, or an older one would stay. */
    p->return_flags = agreed->completion_level == UCCL_EP_COMPLETION_TRANSMITTED ? UCCL_EP_OPERATION_VISIBLE : 0;
    p->signal_flags = p->put_flags;
    if (comm->strategy == UCCL_EP_STRATEGY_FENCED_ATOMIC) p->signal_flags |= UCCL_EP_OPERATION_FENCE;
    p->dresses = p->signal_flags || p->bank_offset || comm->staged;         /* which have those of puts */
    p->merge = !(config->flags & UCCL_EP_CONFIG_NO_MERGE) && !comm->staged; /* each has a record */
    /* A number that is missing, or a failed fence, holds up all that comes behind it to that peer. */
    const bool stops = agreed->flags & UCCL_EP_CAP_ERROR_STOPS;
    p->error_stops = stops || p->sequenced || comm->strategy == UCCL_EP_STRATEGY_FENCED_ATOMIC;
    p->in_order = agreed->flags & UCCL_EP_CAP_COMPLETES_IN_ORDER && stops && !p->sequenced;
    p->unsignalled = p->in_order && agreed->flags & UCCL_EP_CAP_UNSIGNALLED;
    /* What no completion covers yet, when a NIC took a part of a batch, holds room until more is submitted: over all
     * peers at most a quarter of it, so that there is always room for that more. */
    uint32_t every =
        p->max_inflight_peer < p->max_inflight / p->size ? p->max_inflight_peer : p->max_inflight / p->size;
    every /= 4;
    p->signal_every = every < 1 ? 1 : every > 32 ? 32 : every;
}

static size_t sums_bytes(const uccl_ep_comm *comm) {
    return (size_t)comm->size * comm->config.signals * sizeof(uint64_t);
}

/* What the NIC and the strategy need besides: flights, links, lists, the mailbox. */
static uccl_ep_status open_links(uccl_ep_comm *comm, struct proxy *p) {
    if (!p->in_order) {
        const uccl_ep_status status = flights_open(p);
        if (status != UCCL_EP_OK) return status;
    }
    if (!comm->mailbox_bytes) return UCCL_EP_OK;
    const size_t size = comm->size;
    if (p->adder == ADDER_TARGET) {
        const bool wakes = p->hold && !comm->immediate_bits;
        p->links = zeroed(size * sizeof *p->links);
        p->returns_due = zeroed(size * sizeof *p->returns_due);
        p->watched = zeroed(size * sizeof *p->watched);
        if (wakes) p->wakes_seen = zeroed((size * comm->agreed.caps.write_alignment + 63) / 64 * 64);
        if (!p->links || !p->returns_due || !p->watched || (wakes && !p->wakes_seen))
            return fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory for the links of proxy %u", p->index);
    }
    p->controls = p->in_order && (p->links || p->raise == RAISE_READ);
    if (p->adder == ADDER_SOURCE) {
        p->sums =
            mmap(NULL, sums_bytes(comm), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p->sums == MAP_FAILED) p->sums = NULL;
        if (!p->sums) return fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory for the sums of proxy %u", p->index);
    }
    mailbox_open(comm, p);
    return comm->staged ? staging_open(comm, p) : UCCL_EP_OK;
}

static uccl_ep_status open_endpoint(uccl_ep_comm *comm, struct proxy *p) {
    const uccl_ep_endpoint_config config = {.size = sizeof config,
                                            .index = p->index,
                                            .rank = comm->rank,
                                            .peers = comm->size,
                                            .inflight_peer = comm->config.max_inflight_peer,
                                            .inflight = comm->config.max_inflight,
                                            .max_message_bytes_used = comm->config.max_message_bytes,
                                            .receives_peer = comm->window           ? comm->window
                                                             : comm->immediate_bits ? 1
                                                                                    : 0};
    host_fail_clear();
    const uccl_ep_status status = comm->backend->endpoint_open(comm->device, &config, &p->endpoint);
    if (status != UCCL_EP_OK) {
        p->endpoint = NULL;
        return backend_failed(comm, status, "", "opening an endpoint");
    }
    return p->endpoint ? UCCL_EP_OK : backend_gave(comm, "no endpoint");
}

/* ----------------------------------------------------------------------------------------------------------- create */

/* Who the NIC is, for records and scorecards: as it says, else the device of that name, or the first usable one. */
static void device_identify(uccl_ep_comm *comm) {
    const char *name = comm->config.device;
    for (uint32_t i = 0; i < 1024; i++) {
        uccl_ep_device_info info;
        const bool told = comm->backend->opened;
        if (device_describe(comm->backend, &comm->host, told ? comm->device : NULL, i, &info) != UCCL_EP_OK) break;
        if (!told && (name ? strncmp(info.name, name, sizeof info.name) : info.unusable[0])) continue;
        comm->device_info = info;
        break;
    }
}

static uccl_ep_status open_all(uccl_ep_comm *comm, const uccl_ep_config *config, const uccl_ep_bootstrap *bootstrap) {
    uccl_ep_status status = config_fill(comm, config, bootstrap);
    if (status != UCCL_EP_OK) return status;
    uccl_ep_config *c = &comm->config;
    if ((status = backend_load(c->backend, &comm->backend)) != UCCL_EP_OK) return status;

    if ((status = accelerator_open(comm)) != UCCL_EP_OK) return status;

    host_init(&comm->host, comm);
    comm->host.accelerator = comm->accelerator;
    comm->host.gpu = comm->gpu;
    comm->host.gpu_info = comm->gpu ? &comm->gpu_info : NULL;
    comm->host.heap_kind = c->staging == UCCL_EP_STAGING_ON ? UCCL_EP_MEMORY_HOST : c->heap_kind;
    comm->caps.size = sizeof comm->caps;
    host_fail_clear();
    status = comm->backend->device_open(&comm->host, c->device, c->backend_options, &comm->device, &comm->caps);
    if (status != UCCL_EP_OK) {
        comm->device = NULL;
        return backend_failed(comm, status, "MEM-1", "opening the NIC");
    }
    if (!comm->device) return backend_gave(comm, "no device");
    device_identify(comm);
    comm->device_info.caps = comm->caps;
    config_limits(comm);
    if (comm->caps.max_peers && comm->size > comm->caps.max_peers)
        return fail_local(UCCL_EP_E_CAPABILITY, "", "%u ranks, and an endpoint of %s reaches %u", comm->size,
                          comm->device_info.name, comm->caps.max_peers);
    if (comm->caps.write_alignment > c->granularity)
        return fail_local(UCCL_EP_E_CAPABILITY, "PUT-4",
                          "%s writes at multiples of %u bytes, and commands come at a granularity of %u%s",
                          comm->device_info.name, comm->caps.write_alignment, c->granularity,
                          comm->caps.write_alignment <= UCCL_EP_GRANULARITY_COARSE ? ": take granularity 16"
                                                                                   : ": it cannot be used");
    if (comm->caps.max_endpoints && c->proxies > comm->caps.max_endpoints)
        return fail_local(UCCL_EP_E_CAPABILITY, "", "%u proxies, and %s has %u endpoints", c->proxies,
                          comm->device_info.name, comm->caps.max_endpoints);

    if ((status = device_heap_check(comm)) != UCCL_EP_OK) return status;
    if ((status = device_signals_check(comm)) != UCCL_EP_OK) return status;
    if (!c->heap) {
        c->heap_bytes = page_up(c->heap_bytes);
        if ((status = allocate(comm, c->heap_bytes, &c->heap)) != UCCL_EP_OK) return status;
        comm->heap_owned = true;
    }
    const size_t words64 = (comm->size + 63) / 64;
    comm->rings = zeroed(comm->channels * sizeof *comm->rings);
    comm->channel_of = zeroed(comm->channels * sizeof *comm->channel_of);
    comm->proxies = zeroed(c->proxies * sizeof *comm->proxies);
    comm->closures = calloc((size_t)comm->channels * comm->size, sizeof *comm->closures);
    comm->records = zeroed(MAX_RECORDS * sizeof *comm->records);
    comm->lost = zeroed(words64 * sizeof *comm->lost);
    comm->departed = zeroed(words64 * sizeof *comm->departed);
    comm->excluded = zeroed(words64 * sizeof *comm->excluded);
    if (!comm->rings || !comm->channel_of || !comm->proxies || !comm->closures || !comm->records || !comm->lost ||
        !comm->departed || !comm->excluded)
        return fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory for %u channels and %u ranks", comm->channels,
                          comm->size);
    if ((status = shared_open(comm)) != UCCL_EP_OK) return status;
    uint32_t counter = 0;
    for (uint32_t i = 0; i < c->proxies; i++) {
        if ((status = make_proxy(comm, i, counter)) != UCCL_EP_OK) return status;
        counter += comm->proxies[i].channels;
    }
    return device_channels_open(comm);
}

static uccl_ep_status say_hello(uccl_ep_comm *comm, const uccl_ep_bootstrap *bootstrap, uccl_ep_status so_far) {
    const uccl_ep_config *c = &comm->config;
    hello mine = {.heap_bytes = c->heap_bytes,
                  .first_ticket = c->first_ticket,
                  .first_sequence = c->first_sequence,
                  .signals = c->signals,
                  .channels = c->channels,
                  .ring_log2 = c->ring_log2,
                  .granularity = c->granularity,
                  .proxies = c->proxies,
                  .strategy = c->strategy,
                  .heap_kind = c->heap_kind,
                  .signals_kind = c->signals_kind,
                  .staging = c->staging,
                  .stages = comm->staged_reason[0] != 0,
                  .single_writer = (c->flags & UCCL_EP_CONFIG_SINGLE_WRITER) != 0,
                  .caps = comm->caps};
    if (so_far == UCCL_EP_OK) {
        snprintf(mine.backend, sizeof mine.backend, "%s", comm->backend->name);
        mine.backend_abi = (uint32_t)comm->backend->abi_major << 16 | comm->backend->abi_minor;
        const bool flushes = comm->backend->flush_local && comm->caps.flags & UCCL_EP_CAP_FLUSH_LOCAL;
        mine.functions = (flushes ? HAS_FLUSH_LOCAL : 0) | (comm->backend->replenish ? HAS_REPLENISH : 0);
    }
    hello *all = calloc(bootstrap->size, sizeof *all);
    promised *each = calloc(bootstrap->size, sizeof *each);
    if ((!all || !each) && so_far == UCCL_EP_OK)
        so_far = fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory for the first exchange");
    uccl_ep_status status = exchange(comm, bootstrap, "open", so_far, &mine, sizeof mine, all);
    if (status == UCCL_EP_OK) {
        comm->agreed = (promised){comm->caps, mine.functions};
        if (!comm->agreed.caps.write_alignment) comm->agreed.caps.write_alignment = 1;
        for (uint32_t rank = 0; rank < comm->size && status == UCCL_EP_OK; rank++) {
            status = same(&mine, &all[rank], comm->rank, rank);
            each[rank] = (promised){all[rank].caps, all[rank].functions};
            weaken(&comm->agreed.caps, &all[rank].caps);
            comm->agreed.functions &= all[rank].functions;
        }
        /* Everybody compared the same things, so everybody comes to the same answer here: no exchange is owed. */
        if (status == UCCL_EP_OK) status = agree_on_staging(comm, all);
        if (status == UCCL_EP_OK) status = strategy_choose(comm, &comm->agreed, each);
    }
    free(each);
    free(all);
    return status;
}

/* What the agreement asks for: memory for the signals and the mailbox, endpoints. This rank's own trouble. */
static uccl_ep_status open_agreed(uccl_ep_comm *comm) {
    const uccl_ep_config *c = &comm->config;
    comm->signal_bytes = page_up((uint64_t)comm->banks * c->signals * sizeof(uint64_t));
    void *words = NULL;
    uccl_ep_status status;
    if (c->signals_kind != UCCL_EP_MEMORY_HOST) {
        if ((status = device_signals_open(comm)) != UCCL_EP_OK) return status;
        words = comm->device_signals;
    } else {
        if ((status = allocate(comm, comm->signal_bytes, &words)) != UCCL_EP_OK) return status;
        comm->signal_words = words;
        status = reach_memory(comm, words, comm->signal_bytes, &comm->signals_reach);
    }
    if (status == UCCL_EP_OK && c->heap_kind == UCCL_EP_MEMORY_HOST)
        status = reach_memory(comm, c->heap, c->heap_bytes, &comm->heap_reach);
    if (status == UCCL_EP_OK && comm->staged) {
        status = allocate(comm, page_up(2 * c->heap_bytes), &comm->mirror);
        if (status == UCCL_EP_OK) status = reach_memory(comm, comm->mirror, 2 * c->heap_bytes, &comm->heap_reach);
    }
    if (status != UCCL_EP_OK) return status;
    status = comm->staged ? register_region(comm, UCCL_EP_REGION_HEAP, comm->mirror, 2 * c->heap_bytes)
                          : register_region(comm, UCCL_EP_REGION_HEAP, c->heap, c->heap_bytes);
    if (status != UCCL_EP_OK) return status;
    status = register_region(comm, UCCL_EP_REGION_SIGNALS, words, comm->signal_bytes);
    comm->mailbox_bytes = page_up(mailbox_bytes(comm));
    if (status == UCCL_EP_OK && comm->mailbox_bytes) {
        status = allocate(comm, comm->mailbox_bytes, &comm->mailbox);
        if (status == UCCL_EP_OK)
            status = register_region(comm, UCCL_EP_REGION_MAILBOX, comm->mailbox, comm->mailbox_bytes);
    }
    for (uint32_t i = 0; i < c->proxies && status == UCCL_EP_OK; i++) {
        struct proxy *p = &comm->proxies[i];
        configure_proxy(comm, p);
        status = open_links(comm, p);
        if (status == UCCL_EP_OK) status = open_endpoint(comm, p);
    }
    return status;
}

/* Endpoints, then memory, then the device. No proxy runs. Again: nothing. */
static void close_nic(uccl_ep_comm *comm) {
    for (uint32_t i = 0; comm->proxies && i < comm->config.proxies; i++) {
        if (comm->proxies[i].endpoint) comm->backend->endpoint_close(comm->proxies[i].endpoint);
        comm->proxies[i].endpoint = NULL;
        staging_close(&comm->proxies[i]);
    }
    if (!comm->device) return;
    unreach_memory(comm, &comm->heap_reach);
    unreach_memory(comm, &comm->signals_reach);
    for (uint32_t region = 0; region < UCCL_EP_REGIONS; region++)
        if (comm->registered[region]) comm->backend->region_deregister(comm->device, (uccl_ep_region)region);
    if (comm->heap_owned) release(comm, comm->config.heap, comm->config.heap_bytes);
    release(comm, comm->signal_words, comm->signal_bytes);
    if (comm->device_signals) comm->accelerator->device_free(comm->gpu, comm->device_signals);
    comm->device_signals = NULL;
    release(comm, comm->mailbox, comm->mailbox_bytes);
    release(comm, comm->mirror, page_up(2 * comm->config.heap_bytes));
    comm->backend->device_close(comm->device);
    comm->device = NULL;
}

static uccl_ep_status join(uccl_ep_comm *comm, const uccl_ep_bootstrap *bootstrap) {
    struct contacts contacts;
    uccl_ep_status status = contacts_gather(comm, bootstrap, "addresses", open_agreed(comm), &contacts);
    if (status != UCCL_EP_OK) {
        contacts_free(&contacts);
        return status;
    }
    status = connect_peers(comm, &contacts, NULL);
    if (status == UCCL_EP_OK) status = import_peers(comm, &contacts, NULL);
    contacts_free(&contacts); /* before all ranks wait for the last one with theirs */
    /* Those who still try to connect to us are not to wait for their deadline: they hear the reason in the exchange. */
    if (status != UCCL_EP_OK) close_nic(comm);
    /* Nobody may send before everybody can receive. */
    return exchange(comm, bootstrap, "connect", status, NULL, 0, NULL);
}

uccl_ep_status start_proxies(uccl_ep_comm *comm) {
    comm->running = true;
    return comm->config.progress == UCCL_EP_PROGRESS_CALLER ? UCCL_EP_OK : start_threads(comm);
}

uccl_ep_status start_threads(uccl_ep_comm *comm) {
    for (uint32_t i = 0; i < comm->config.proxies; i++) {
        struct proxy *p = &comm->proxies[i];
        atomic_store(&p->stop, false);
        const int error = pthread_create(&p->thread, NULL, proxy_main, p);
        if (error)
            return fail_local(UCCL_EP_E_SYSTEM, "", "the thread of proxy %u cannot be made (errno %d): see ulimit -u",
                              i, error);
        p->thread_runs = true;
    }
    return UCCL_EP_OK;
}

void stop_proxies(uccl_ep_comm *comm) {
    comm->running = false;
    if (!comm->proxies) return;
    for (uint32_t i = 0; i < comm->config.proxies; i++)
        atomic_store_explicit(&comm->proxies[i].stop, true, memory_order_release);
    for (uint32_t i = 0; i < comm->config.proxies; i++) {
        if (!comm->proxies[i].thread_runs) continue;
        pthread_join(comm->proxies[i].thread, NULL);
        comm->proxies[i].thread_runs = false;
    }
}

static void free_all(uccl_ep_comm *comm) {
    stop_proxies(comm);
    close_nic(comm);
    device_channels_close(comm);
    accelerator_close(comm);
    for (uint32_t i = 0; comm->proxies && i < comm->config.proxies; i++) {
        struct proxy *p = &comm->proxies[i];
        for (uint32_t k = 0; p->channel && k < p->channels; k++) free(p->channel[k].producer);
        free(p->channel);
        free(p->entries);
        if (p->peers) munmap(p->peers, PEERS_BYTES);
        free(p->active);
        free(p->busy);
        free(p->flights);
        free(p->free_flights);
        free(p->links);
        free(p->returns_due);
        free(p->watched);
        free(p->wakes_seen);
        if (p->sums) munmap(p->sums, sums_bytes(comm));
        free(p->trace);
        free(p->trace_slots);
    }
    free(comm->proxies);
    free(comm->rings);
    free(comm->channel_of);
    shared_close(comm);
    free(comm->closures);
    free(comm->records);
    free((void *)comm->lost);
    free((void *)comm->departed);
    free((void *)comm->excluded);
    free((void *)comm->backend);
    pthread_mutex_destroy(&comm->failure_lock);
    free(comm);
}

uccl_ep_status uccl_ep_comm_create(const uccl_ep_config *config, const uccl_ep_bootstrap *bootstrap,
                                   uccl_ep_comm **out) {
    if (!out) return fail_local(UCCL_EP_E_INVALID, "", "the address of a handle is required");
    *out = NULL;
    if (!bootstrap || bootstrap->size_of_struct < sizeof *bootstrap || !bootstrap->allgather || !bootstrap->size)
        return fail_local(UCCL_EP_E_INVALID, "", "a bootstrap with an allgather is required");
    uccl_ep_comm *comm = zeroed(sizeof *comm);
    if (!comm) return fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory for a communicator");
    pthread_mutex_init(&comm->failure_lock, NULL);
    comm->fork_generation = current_fork_generation();

    uccl_ep_status status = open_all(comm, config, bootstrap);
    if (!comm->config.bootstrap_timeout_ns) comm->config.bootstrap_timeout_ns = DEFAULT_BOOTSTRAP_TIMEOUT_NS;
    status = say_hello(comm, bootstrap, status);
    if (status == UCCL_EP_OK) status = join(comm, bootstrap);
    if (status == UCCL_EP_OK) status = exchange(comm, bootstrap, "start", start_proxies(comm), NULL, 0, NULL);
    if (status != UCCL_EP_OK) {
        const uccl_ep_error kept = *uccl_ep_last_error();
        free_all(comm);
        fail_with_record(&kept);
        last_error_slot()->rank = bootstrap->rank;
        return status;
    }
    tell_of_staging(comm);
    *out = comm;
    return UCCL_EP_OK;
}

uccl_ep_status uccl_ep_abort(uccl_ep_comm *comm, const char *reason) {
    if (!comm) return fail_local(UCCL_EP_E_INVALID, "", "the communicator is NULL");
    pthread_mutex_lock(&comm->failure_lock);
    if (!atomic_load(&comm->aborted)) {
        snprintf(comm->abort_reason, sizeof comm->abort_reason, "%s", reason && reason[0] ? reason : "no reason given");
        atomic_store_explicit(&comm->aborted, true, memory_order_release);
        /* For waits on a device, which look at the status word. */
        for (uint32_t i = 0; i < comm->channels; i++)
            __atomic_store_n(&comm->channel_of[i]->counters->status, UCCL_EP_CHANNEL_ABORTED, __ATOMIC_RELEASE);
        __atomic_store_n(&comm->control->aborted, 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&comm->failure_lock);
    return UCCL_EP_OK;
}

void uccl_ep_comm_destroy(uccl_ep_comm *comm) {
    if (!comm) return;
    /* In a child of fork the threads do not exist and the mappings are the parent's. */
    if (comm->fork_generation != current_fork_generation()) return;
    uccl_ep_abort(comm, "the communicator was closed");
    free_all(comm);
}
