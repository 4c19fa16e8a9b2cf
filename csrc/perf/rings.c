/* SPDX-License-Identifier: Apache-2.0
 *
 * rings.c: see rings.h.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "rings.h"
#include "uccl_ep/accelerator.h"

#define LINES 128u

/* In host memory: control | error | signal words | answer | echo | counters [rings] | of each ring: slots, gave_up */
enum {
    CONTROL = 0,
    ERROR = LINES,
    SIGNAL = 2 * LINES,
    ANSWER = 3 * LINES,
    ECHO = 4 * LINES,
    GONE = 5 * LINES,
    COUNTERS = 6 * LINES
};
_Static_assert(RINGS_SIGNALS * 8 <= LINES, "signal words fit");

struct rings {
    rings_config config;
    void *library;
    const uccl_ep_accelerator *accelerator;
    uccl_ep_gpu *gpu;
    uint64_t clock_hz;
    char *shared, *shared_there; /* as the CPU and as kernels see it */
    uint64_t shared_bytes;
    char *device; /* claim of the error | producers [rings] | rings [rings] */
    void *heap;
};

static uccl_ep_status failed(uccl_ep_status status, char *text, uint64_t bytes, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, bytes, format, arguments);
    va_end(arguments);
    return status;
}

static uint64_t round_up(uint64_t bytes, uint64_t to) {
    return (bytes + to - 1) / to * to;
}

static uint64_t slots_bytes(const rings *r) {
    return sizeof(uccl_ep_slot) << r->config.log2_slots;
}
static uint64_t slots_at(const rings *r, uint32_t ring) {
    const uint64_t counters = round_up(r->config.rings * sizeof(uccl_ep_ring_counters), LINES);
    return COUNTERS + counters + ring * (round_up(slots_bytes(r), LINES) + LINES);
}
static uint64_t gave_up_at(const rings *r, uint32_t ring) {
    return slots_at(r, ring) + round_up(slots_bytes(r), LINES);
}
static uint64_t counters_at(uint32_t ring) {
    return COUNTERS + ring * sizeof(uccl_ep_ring_counters);
}
static uint64_t producer_at(uint32_t ring) {
    return LINES + ring * sizeof(uccl_ep_ring_producer);
}
static uint64_t rings_at(const rings *r) {
    return producer_at(r->config.rings);
}

static uccl_ep_status load(rings *r, char *text, uint64_t bytes) {
    const char *path = r->config.accelerator;
    r->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!r->library) return failed(UCCL_EP_E_NO_DEVICE, text, bytes, "%s", dlerror());
    const uccl_ep_accelerator *(*entry)(void);
    *(void **)&entry = dlsym(r->library, UCCL_EP_ACCELERATOR_ENTRY);
    if (!entry) return failed(UCCL_EP_E_NOT_A_BACKEND, text, bytes, "%s is no accelerator of uccl_ep", path);
    r->accelerator = entry();
    if (r->accelerator->abi_major != UCCL_EP_ACCELERATOR_ABI_MAJOR)
        return failed(UCCL_EP_E_ABI, text, bytes, "%s has ABI %u, and this is %u", path, r->accelerator->abi_major,
                      UCCL_EP_ACCELERATOR_ABI_MAJOR);
    return UCCL_EP_OK;
}

static uccl_ep_status fill(rings *r) {
    const uint32_t n = r->config.rings;
    const uint64_t bytes = rings_at(r) + n * sizeof(uccl_ep_ring);
    char *image = calloc(1, bytes);
    if (!image) return UCCL_EP_E_NO_MEMORY;
    for (uint32_t i = 0; i < n; i++) {
        uccl_ep_ring_format((uccl_ep_slot *)(void *)(r->shared + slots_at(r, i)), r->config.log2_slots, 0);
        ((uccl_ep_ring_counters *)(void *)(r->shared + counters_at(i)))->failed = UCCL_EP_NO_TICKET;
        const uccl_ep_ring ring = {
            .codec_version = UCCL_EP_CODEC_VERSION,
            .log2_slots = r->config.log2_slots,
            .granularity = UCCL_EP_GRANULARITY_COARSE,
            .channel = i,
            .slots = (void *)(r->shared_there + slots_at(r, i)),
            .producer = (void *)(r->device + producer_at(i)),
            .gave_up = (void *)(r->shared_there + gave_up_at(r, i)),
            .counters = (void *)(r->shared_there + counters_at(i)),
        };
        memcpy(image + rings_at(r) + i * sizeof ring, &ring, sizeof ring);
    }
    const uccl_ep_status status = r->accelerator->copy(r->gpu, r->device, image, bytes);
    free(image);
    return status;
}

static uccl_ep_status make(rings *r, char *text, uint64_t bytes) {
    uccl_ep_status status = load(r, text, bytes);
    if (status != UCCL_EP_OK) return status;
    const uccl_ep_accelerator *a = r->accelerator;
    const rings_config *c = &r->config;
    uccl_ep_gpu_info info = {.size = sizeof info};
    const char *what = "looking for the device";
    status = a->query(c->device, &info);
    if (status == UCCL_EP_OK && info.unusable[0])
        return failed(UCCL_EP_E_NO_DEVICE, text, bytes, "%s cannot be used: %s", info.name, info.unusable);
    if (status == UCCL_EP_OK) what = "opening the device", status = a->open(c->device, &r->gpu);
    r->clock_hz = info.clock_hz;
    r->shared_bytes = round_up(slots_at(r, c->rings), (uint64_t)sysconf(_SC_PAGESIZE));
    if (status == UCCL_EP_OK) {
        void *base = mmap(NULL, r->shared_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (base == MAP_FAILED) return failed(UCCL_EP_E_NO_MEMORY, text, bytes, "no memory for %u rings", c->rings);
        r->shared = base;
        void *there = NULL;
        what = "registering host memory";
        status = a->host_register(r->gpu, base, r->shared_bytes, &there);
        r->shared_there = there;
    }
    void *memory = NULL;
    if (status == UCCL_EP_OK) {
        what = "allocating device memory";
        status = a->device_alloc(r->gpu, rings_at(r) + c->rings * sizeof(uccl_ep_ring), &memory);
        r->device = memory;
    }
    if (status == UCCL_EP_OK) status = a->device_alloc(r->gpu, c->heap_bytes, &r->heap);
    if (status == UCCL_EP_OK) what = "copying to the device", status = fill(r);
    if (status == UCCL_EP_OK) return status;
    return failed(status, text, bytes, "%s: %s: %s", a->name, what, a->error_text());
}

uccl_ep_status rings_open(const rings_config *config, rings **out, char *text, uint64_t text_bytes) {
    *out = NULL;
    if (!config->rings || config->rings > DRAIN_MAX_RINGS || config->log2_slots < UCCL_EP_RING_MIN_LOG2 ||
        config->log2_slots > UCCL_EP_RING_MAX_LOG2 || !config->heap_bytes)
        return failed(UCCL_EP_E_RANGE, text, text_bytes, "1 to %u rings of 2^%u to 2^%u slots", DRAIN_MAX_RINGS,
                      UCCL_EP_RING_MIN_LOG2, UCCL_EP_RING_MAX_LOG2);
    rings *r = calloc(1, sizeof *r);
    if (!r) return failed(UCCL_EP_E_NO_MEMORY, text, text_bytes, "no memory");
    r->config = *config;
    const uccl_ep_status status = make(r, text, text_bytes);
    if (status == UCCL_EP_OK)
        *out = r;
    else
        rings_close(r);
    return status;
}

void rings_close(rings *r) {
    if (!r) return;
    const uccl_ep_accelerator *a = r->accelerator;
    if (r->heap) a->device_free(r->gpu, r->heap);
    if (r->device) a->device_free(r->gpu, r->device);
    if (r->shared_there) a->host_unregister(r->gpu, r->shared);
    if (r->shared) munmap(r->shared, r->shared_bytes);
    if (r->gpu) a->close(r->gpu);
    /* The driver's library keeps threads and handlers of its own: what was loaded stays. */
    free(r);
}

void rings_comm(const rings *r, uccl_ep_device_comm *out) {
    *out = (uccl_ep_device_comm){
        .version = UCCL_EP_DEVICE_VERSION,
        .size = 1,
        .channels = r->config.rings,
        .signals = RINGS_SIGNALS,
        .signal_banks = 1,
        .granularity = UCCL_EP_GRANULARITY_COARSE,
        .heap_bytes = r->config.heap_bytes,
        .heap = r->heap,
        .signal_words = (void *)(r->shared_there + SIGNAL),
        .rings = (void *)(r->device + rings_at(r)),
        .control = (void *)(r->shared_there + CONTROL),
        .gone = (void *)(r->shared_there + GONE),
        .error = (void *)(r->shared_there + ERROR),
        .error_claim = (void *)r->device,
        .timeout_ticks = (uint64_t)((double)r->config.timeout_ns / 1e9 * (double)r->clock_hz),
    };
}

void rings_host(const rings *r, drain_ring *out) {
    for (uint32_t i = 0; i < r->config.rings; i++)
        out[i] = (drain_ring){
            .slots = (void *)(r->shared + slots_at(r, i)),
            .counters = (void *)(r->shared + counters_at(i)),
            .echo = i ? NULL : (void *)(r->shared + ECHO),
            .log2_slots = r->config.log2_slots,
        };
}

void rings_get_words(const rings *r, rings_words *out) {
    *out = (rings_words){
        .signal = (void *)(r->shared + SIGNAL),
        .answer = (void *)(r->shared + ANSWER),
        .echo = (void *)(r->shared + ECHO),
        .answer_there = (void *)(r->shared_there + ANSWER),
        .echo_there = (void *)(r->shared_there + ECHO),
    };
}

uccl_ep_status rings_check_taken(const rings *r, char *text, uint64_t text_bytes) {
    for (uint32_t i = 0; i < r->config.rings; i++) {
        uccl_ep_ring_producer producer;
        const uccl_ep_status status =
            r->accelerator->copy(r->gpu, &producer, r->device + producer_at(i), sizeof producer);
        if (status != UCCL_EP_OK) return failed(status, text, text_bytes, "%s", r->accelerator->error_text());
        const uccl_ep_ring_counters *c = (const void *)(r->shared + counters_at(i));
        const uint64_t tail = __atomic_load_n(&c->tail, __ATOMIC_ACQUIRE);
        if (producer.head != tail)
            return failed(UCCL_EP_E_BACKEND, text, text_bytes, "ring %u gave out %llu tickets, and %llu were taken", i,
                          (unsigned long long)producer.head, (unsigned long long)tail);
    }
    return UCCL_EP_OK;
}

uccl_ep_status rings_error(const rings *r, char *text, uint64_t text_bytes) {
    const uccl_ep_device_error *e = (const void *)(r->shared + ERROR);
    const uint64_t status = __atomic_load_n(&e->status, __ATOMIC_ACQUIRE);
    if (!status) return UCCL_EP_OK;
    return failed((uccl_ep_status)(int64_t)status, text, text_bytes,
                  "a kernel failed: status %lld, what %llu, ring %lld, ticket %lld, wanted %llu, seen %llu",
                  (long long)status, (unsigned long long)e->what, (long long)e->channel, (long long)e->ticket,
                  (unsigned long long)e->wanted, (unsigned long long)e->seen);
}
