/* SPDX-License-Identifier: Apache-2.0
 *
 * device_channel.c: what producers, proxies and kernels share, and channels that kernels post to.
 *
 * One block of host memory, pages of its own, holds what both sides look at; with a device it is registered as a whole.
 * Every word of it has one writing side: kernels write the slots and gave_up of device channels and the error record,
 * the CPU all else.
 *
 *   control | error | counters [channels] | gone [ranks, bits] | of each channel: slots, gave_up
 *
 * What is the producers' alone, the next ticket foremost, lies in device memory, where the CPU does not look: it is
 * written before the first kernel, and read and written again in a reset, by the driver's copy. What the host needs to
 * know in between, how far the kernels have posted, the slots tell.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

#define LINES 128u /* two cache lines: what one side writes, prefetchers of the other leave alone */

/* ---------------------------------------------------------------------------------------------------------- the block
 */

static uint64_t lines(uint64_t bytes) {
    return (bytes + LINES - 1) / LINES * LINES;
}

/* The odd line behind the slots keeps the slots of two channels from falling on the same sets of a cache. */
static uint64_t channel_bytes(const uccl_ep_comm *comm) {
    return lines(sizeof(uccl_ep_slot) << comm->config.ring_log2) + LINES;
}

static uint64_t gone_begin(const uccl_ep_comm *comm) {
    return 2 * LINES + lines(comm->channels * sizeof *comm->counters);
}

static uint64_t channels_begin(const uccl_ep_comm *comm) {
    return gone_begin(comm) + lines((comm->size + 63) / 64 * sizeof *comm->gone);
}

uccl_ep_status shared_open(uccl_ep_comm *comm) {
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t bytes = channels_begin(comm) + comm->channels * channel_bytes(comm);
    bytes = (bytes + page - 1) / page * page;
    /* Shared: of private pages, after a fork, the parent's next store makes a copy, and the device keeps the old one.
     */
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory for the rings of %u channels", comm->channels);
    comm->shared = base;
    comm->shared_bytes = bytes;
    comm->control = base;
    comm->device_error = (void *)(comm->shared + LINES);
    comm->counters = (void *)(comm->shared + 2 * LINES);
    comm->gone = (void *)(comm->shared + gone_begin(comm));
    return UCCL_EP_OK;
}

void shared_close(uccl_ep_comm *comm) {
    if (comm->shared) munmap(comm->shared, comm->shared_bytes);
    comm->shared = NULL;
}

uccl_ep_slot *shared_slots(const uccl_ep_comm *comm, uint32_t channel, uint64_t **gave_up) {
    char *slots = comm->shared + channels_begin(comm) + channel * channel_bytes(comm);
    *gave_up = (void *)(slots + channel_bytes(comm) - LINES);
    return (void *)slots;
}

static void *on_device(const uccl_ep_comm *comm, const void *shared) {
    return (char *)comm->shared_reach.device_address + ((const char *)shared - comm->shared);
}

/* -------------------------------------------------------------------------------------------------- in device memory
 */

/* claim of the error record | producers [device_channels] | rings [device_channels] */
static uccl_ep_ring_producer *device_producer(const uccl_ep_comm *comm, uint32_t channel) {
    return (uccl_ep_ring_producer *)(void *)(comm->device_side + LINES) + channel;
}
static uccl_ep_ring *device_rings(const uccl_ep_comm *comm) {
    return (uccl_ep_ring *)(void *)device_producer(comm, comm->device_channels);
}

static uccl_ep_status copy_failed(uccl_ep_comm *comm, uccl_ep_status status) {
    return accelerator_failed(comm, status, "", "copying what kernels are given");
}

/* Before the first kernel, with the rings as they begin. */
uccl_ep_status device_channels_open(uccl_ep_comm *comm) {
    if (!comm->gpu) return UCCL_EP_OK;
    const uint32_t n = comm->device_channels;
    uccl_ep_status status = reach_memory(comm, comm->shared, comm->shared_bytes, &comm->shared_reach);
    if (status != UCCL_EP_OK) return status;
    const uint64_t bytes = LINES + n * (sizeof(uccl_ep_ring_producer) + sizeof(uccl_ep_ring));
    void *memory = NULL;
    status = comm->accelerator->device_alloc(comm->gpu, bytes, &memory);
    if (status != UCCL_EP_OK) return accelerator_failed(comm, status, "", "allocating the rings' device memory");
    comm->device_side = memory;
    if (!n) return UCCL_EP_OK;
    char *image = calloc(1, bytes);
    if (!image) return fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory for what %u device channels begin with", n);
    const uint64_t first = comm->config.first_ticket;
    for (uint32_t i = 0; i < n; i++) {
        uccl_ep_ring *ring = &comm->rings[i];
        ring->slots = on_device(comm, ring->slots);
        ring->gave_up = on_device(comm, ring->gave_up);
        ring->counters = on_device(comm, ring->counters);
        ring->producer = device_producer(comm, i);
        const uccl_ep_ring_producer start = {.head = first, .tail_cache = first};
        memcpy(image + ((char *)ring->producer - comm->device_side), &start, sizeof start);
    }
    memcpy(image + ((char *)device_rings(comm) - comm->device_side), comm->rings, n * sizeof *comm->rings);
    status = comm->accelerator->copy(comm->gpu, comm->device_side, image, bytes);
    free(image);
    return status == UCCL_EP_OK ? status : copy_failed(comm, status);
}

/* No proxy runs, and no kernel. */
void device_channels_close(uccl_ep_comm *comm) {
    if (comm->device_side) comm->accelerator->device_free(comm->gpu, comm->device_side);
    comm->device_side = NULL;
    unreach_memory(comm, &comm->shared_reach);
}

/*
 * The highest ticket that lies in the slots. What was stored before this call is found: it lies in the ring that begins
 * at the first `tail`, or it was taken meanwhile, and then the second one is above it.
 */
uint64_t device_channel_posted(const uccl_ep_comm *comm, const struct channel *c) {
    const uint32_t log2_slots = comm->config.ring_log2;
    const uint64_t first = __atomic_load_n(&c->counters->tail, __ATOMIC_ACQUIRE);
    uint64_t posted = first + (1ull << log2_slots);
    uccl_ep_words words;
    while (posted != first && !uccl_ep_ring_take(c->slots, log2_slots, posted - 1, &words)) posted--;
    const uint64_t tail = __atomic_load_n(&c->counters->tail, __ATOMIC_ACQUIRE);
    return (int64_t)(tail - posted) > 0 ? tail : posted;
}

/* Behind all tickets that were given out: the channel begins anew at *next. No proxy runs, and no kernel. */
uccl_ep_status channel_rebase(uccl_ep_comm *comm, const struct channel *c, uint64_t *next) {
    if (c->producer) {
        *next = c->producer->head;
        c->producer->tail_cache = *next;
        return UCCL_EP_OK;
    }
    uccl_ep_ring_producer producer;
    uccl_ep_ring_producer *const there = device_producer(comm, c->index);
    uccl_ep_status status = comm->accelerator->copy(comm->gpu, &producer, there, sizeof producer);
    if (status != UCCL_EP_OK) return copy_failed(comm, status);
    producer.tail_cache = *next = producer.head;
    status = comm->accelerator->copy(comm->gpu, there, &producer, sizeof producer);
    return status == UCCL_EP_OK ? status : copy_failed(comm, status);
}

/* ------------------------------------------------------------------------------------------- what the application asks
 */

static uccl_ep_status no_accelerator(void) {
    return fail_local(UCCL_EP_E_INVALID, "", "the communicator has no accelerator: give one to create");
}

uccl_ep_status uccl_ep_comm_device(uccl_ep_comm *comm, uccl_ep_device_comm *out) {
    const uccl_ep_status status = check_usable(comm);
    if (status != UCCL_EP_OK) return status;
    if (!out) return fail_local(UCCL_EP_E_INVALID, "", "room for a uccl_ep_device_comm is required");
    if (!comm->gpu) return no_accelerator();
    const uccl_ep_config *c = &comm->config;
    __extension__ typedef unsigned __int128 wide;
    const wide ticks = (wide)c->timeout_ns * comm->gpu_info.clock_hz / 1000000000u;
    *out = (uccl_ep_device_comm){
        .version = UCCL_EP_DEVICE_VERSION,
        .rank = comm->rank,
        .size = comm->size,
        .channels = comm->device_channels,
        .signals = c->signals,
        .signal_banks = comm->banks,
        .granularity = c->granularity,
        .heap_bytes = c->heap_bytes,
        .heap = c->heap_kind == UCCL_EP_MEMORY_HOST ? comm->heap_reach.device_address : c->heap,
        .signal_words = comm->device_signals ? comm->device_signals : comm->signals_reach.device_address,
        .rings = device_rings(comm),
        .control = on_device(comm, comm->control),
        .gone = on_device(comm, comm->gone),
        .error = on_device(comm, comm->device_error),
        .error_claim = (uint32_t *)(void *)comm->device_side,
        .timeout_ticks = ticks > UINT64_MAX ? UINT64_MAX : (uint64_t)ticks,
    };
    return UCCL_EP_OK;
}

/* What a kernel wrote, as a text. Any numbers may stand there. */
static uccl_ep_status tell(uccl_ep_comm *comm, const uccl_ep_device_error *e) {
    const int64_t raw = (int64_t)e->status;
    const uccl_ep_status status =
        raw >= INT32_MIN && raw <= INT32_MAX ? checked_status((uccl_ep_status)raw) : UCCL_EP_E_BACKEND;
    const bool late = status == UCCL_EP_E_DEADLINE;
    const unsigned long long channel = e->channel, ticket = e->ticket, seen = e->seen, wanted = e->wanted;
    const double seconds = (double)comm->config.timeout_ns / 1e9;
    const uint32_t source = e->source < comm->size ? (uint32_t)e->source : UCCL_EP_ANY_RANK;
    const uint32_t lost = lost_rank(comm, source);
    char what[200], when[40] = "";
    if (late) snprintf(when, sizeof when, " within %.3f s", seconds);
    switch (e->what) {
    case UCCL_EP_DEVICE_POST:
        if (e->ticket != UCCL_EP_NO_TICKET)
            snprintf(what, sizeof what,
                     "found no room for ticket %llu in the ring of channel %llu%s (taken below %llu), and the channel "
                     "closes: see report() for whom it waits, then reset",
                     ticket, channel, when, seen);
        else
            snprintf(what, sizeof what, "could not post on channel %llu (%s): %s", channel, uccl_ep_status_name(status),
                     uccl_ep_status_text(status));
        break;
    case UCCL_EP_DEVICE_QUIET:
    case UCCL_EP_DEVICE_QUIET_SOURCE:
        snprintf(what, sizeof what, "ticket %llu of channel %llu did not become %s%s (%s below %llu): see report()",
                 ticket, channel, e->what == UCCL_EP_DEVICE_QUIET ? "complete" : "free at its source", when,
                 e->what == UCCL_EP_DEVICE_QUIET ? "complete" : "free", seen);
        break;
    case UCCL_EP_DEVICE_WAIT_SIGNAL:
        if (status == UCCL_EP_E_PEER_LOST && lost != NONE)
            snprintf(what, sizeof what,
                     "signal %llu is at %llu and was to reach %llu, and rank %u is lost or has closed: exclude(%u) to "
                     "go on without it",
                     (unsigned long long)e->slot, seen, wanted, lost, lost);
        else
            snprintf(what, sizeof what, "signal %llu is at %llu and did not reach %llu%s: see report()",
                     (unsigned long long)e->slot, seen, wanted, when);
        break;
    default:
        snprintf(what, sizeof what, "left a record that device.h does not write: what %llu, status %lld",
                 (unsigned long long)e->what, (long long)raw);
    }
    static const char *const clauses[] = {
        [UCCL_EP_DEVICE_POST] = "PRG-3",
        [UCCL_EP_DEVICE_QUIET] = "ERR-1",
        [UCCL_EP_DEVICE_QUIET_SOURCE] = "ERR-1",
        [UCCL_EP_DEVICE_WAIT_SIGNAL] = "ERR-1",
    };
    const bool known = e->what >= UCCL_EP_DEVICE_POST && e->what <= UCCL_EP_DEVICE_WAIT_SIGNAL;
    const bool aborted = status == UCCL_EP_E_ABORTED;
    fail_local(status,
               aborted ? "ABT-1"
               : known ? clauses[e->what]
                       : "",
               "kernel (%u:%u): %s%s%s", (unsigned)(e->thread >> 32), (unsigned)e->thread, what,
               aborted ? "; the communicator was aborted: " : "", aborted ? comm->abort_reason : "");
    uccl_ep_error *error = last_error_slot();
    error->rank = comm->rank;
    if (e->channel < comm->channels) error->channel = (uint32_t)e->channel;
    error->ticket = e->ticket;
    if (e->what == UCCL_EP_DEVICE_WAIT_SIGNAL && status == UCCL_EP_E_PEER_LOST && lost != NONE) error->peer = lost;
    return status;
}

uccl_ep_status uccl_ep_comm_device_error(uccl_ep_comm *comm, uccl_ep_device_error *out) {
    if (out) *out = (uccl_ep_device_error){0};
    /* Also after an abort: what it ended is told. */
    if (!comm) return fail_local(UCCL_EP_E_INVALID, "", "the communicator is NULL");
    if (comm->fork_generation != current_fork_generation()) return check_usable(comm);
    if (!comm->gpu) return no_accelerator();
    pthread_mutex_lock(&comm->failure_lock); /* one of several who look takes it */
    uccl_ep_device_error e = {.status = __atomic_load_n(&comm->device_error->status, __ATOMIC_ACQUIRE)};
    if (e.status) {
        e = *comm->device_error;
        /* Before the claim goes back: whoever has it then writes here. */
        __atomic_store_n(&comm->device_error->status, 0, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&comm->failure_lock);
    if (!e.status) return UCCL_EP_OK;
    if (out) *out = e;
    const uint32_t free_again = 0;
    uccl_ep_status status = comm->accelerator->copy(comm->gpu, comm->device_side, &free_again, sizeof free_again);
    if (status != UCCL_EP_OK) return copy_failed(comm, status);
    status = tell(comm, &e);
    const bool has_ticket = e.channel < comm->device_channels && e.ticket != UCCL_EP_NO_TICKET;
    const uccl_ep_error told = *last_error_slot();
    if (has_ticket && status != UCCL_EP_E_ABORTED) {
        const uccl_ep_status recorded = wait_failure(comm, (uint32_t)e.channel, e.ticket);
        if (recorded != UCCL_EP_OK) return recorded;
        fail_with_record(&told);
    }
    return status;
}
