/* SPDX-License-Identifier: Apache-2.0
 *
 * config.c: defaults and limits of a configuration. Everything is refused here, before anything is opened.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

#define DEFAULT_SIGNALS 1024u
#define DEFAULT_RING_LOG2 11u
/* With the one more that a queue pair is made for, a power of two, as NICs round up to. Many ranks share what a proxy
 * may have in flight in all: a queue for each need not hold much more than its part. */
#define DEFAULT_INFLIGHT_PEER 1023u
#define LEAST_INFLIGHT_PEER 31u
#define DEFAULT_INFLIGHT 8192u
#define DEFAULT_INFLIGHT_BYTES (64ull << 20)
#define DEFAULT_TIMEOUT_NS 30000000000ull
#define DEFAULT_PEER_TIMEOUT_NS 10000000000ull
#define DEFAULT_SPIN 256u
#define DEFAULT_IDLE_SLEEP_NS 100000u
#define LARGEST_CONTROL 16u    /* bytes of an operation that moves no put */
#define MAX_SIGNALS (1u << 24) /* 128 MiB of words */

static bool copy_string(char *to, size_t room, const char *from) {
    const int n = snprintf(to, room, "%s", from ? from : "");
    return n >= 0 && (size_t)n < room;
}

/* Digits alone: strtol would take signs and spaces, too. */
static bool cpu_number(const char **at, uint32_t *value) {
    if (**at < '0' || **at > '9') return false;
    for (*value = 0; **at >= '0' && **at <= '9'; ++*at)
        if ((*value = *value * 10 + (uint32_t)(**at - '0')) >= CPU_SETSIZE) return false;
    return true;
}

/* Element `index` of "2,5-7": the CPU it names, or an error, also for what is wrong behind it. */
uccl_ep_status parse_cpus(const char *text, uint32_t index, int *cpu) {
    uint32_t seen = 0, first, last;
    bool found = false;
    for (const char *at = text;; at++) {
        bool good = cpu_number(&at, &first);
        last = first;
        if (good && *at == '-') {
            at++;
            good = cpu_number(&at, &last) && last >= first;
        }
        if (!good || (*at && *at != ','))
            return fail_local(UCCL_EP_E_INVALID, "", "cpus '%s' is no list such as 2,5-7", text);
        if (!found && index - seen <= last - first) {
            *cpu = (int)(first + (index - seen));
            found = true;
        }
        seen += last - first + 1;
        if (!*at) break;
    }
    if (found) return UCCL_EP_OK;
    return fail_local(UCCL_EP_E_INVALID, "", "cpus '%s' names %u CPUs and proxy %u needs one", text, seen, index);
}

static uccl_ep_status check_cpus(const uccl_ep_config *config) {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return UCCL_EP_OK; /* more CPUs than the set holds */
    for (uint32_t i = 0; i < config->proxies; i++) {
        int cpu = 0;
        const uccl_ep_status status = parse_cpus(config->cpus, i, &cpu);
        if (status != UCCL_EP_OK) return status;
        if (!CPU_ISSET((size_t)cpu, &allowed))
            return fail_local(
                UCCL_EP_E_INVALID, "",
                "CPU %d of cpus '%s' is outside the set this process may use: see taskset -p, or the cpuset of "
                "the container",
                cpu, config->cpus);
    }
    return UCCL_EP_OK;
}

#define DEFAULT(field, value)                                                                                          \
    if (!c->field) c->field = (value)

uccl_ep_status config_fill(uccl_ep_comm *comm, const uccl_ep_config *config, const uccl_ep_bootstrap *bootstrap) {
    uccl_ep_config *c = &comm->config;
    if (!config || config->size < offsetof(uccl_ep_config, flags))
        return fail_local(UCCL_EP_E_INVALID, "", "config is required, with size = sizeof(uccl_ep_config)");
    /* No version of it ends within a word, and half of a pointer is none. */
    if (config->size % sizeof(void *))
        return fail_local(UCCL_EP_E_INVALID, "", "config says size %u, which is that of no uccl_ep_config",
                          config->size);
    memcpy(c, config, config->size < sizeof *c ? config->size : sizeof *c);
    if (c->refusal)
        return fail_local(c->refusal_status ? checked_status((uccl_ep_status)c->refusal_status) : UCCL_EP_E_INVALID, "",
                          "%s", c->refusal);
    if (!bootstrap || bootstrap->size_of_struct < sizeof *bootstrap || !bootstrap->allgather)
        return fail_local(UCCL_EP_E_INVALID, "", "a bootstrap with an allgather is required");
    if (!bootstrap->size || bootstrap->size > UCCL_EP_MAX_RANKS || bootstrap->rank >= bootstrap->size)
        return fail_local(UCCL_EP_E_RANGE, "", "rank %u of %u: 1 to %u ranks are possible", bootstrap->rank,
                          bootstrap->size, UCCL_EP_MAX_RANKS);
    if (!c->backend || !copy_string(comm->library, sizeof comm->library, c->backend))
        return fail_local(UCCL_EP_E_INVALID, "", "the path of a backend's library is required, at most 255 bytes");
    if (!copy_string(comm->device_name, sizeof comm->device_name, c->device) ||
        !copy_string(comm->backend_options, sizeof comm->backend_options, c->backend_options) ||
        !copy_string(comm->cpus, sizeof comm->cpus, c->cpus) ||
        !copy_string(comm->accelerator_library, sizeof comm->accelerator_library, c->accelerator))
        return fail_local(UCCL_EP_E_INVALID, "", "device, backend_options, cpus and accelerator take 255 bytes each");
    c->backend = comm->library;
    c->device = comm->device_name[0] ? comm->device_name : NULL;
    c->backend_options = comm->backend_options;
    c->cpus = comm->cpus[0] ? comm->cpus : NULL;
    c->accelerator = comm->accelerator_library[0] ? comm->accelerator_library : NULL;

    DEFAULT(signals, DEFAULT_SIGNALS);
    DEFAULT(channels, 1);
    DEFAULT(ring_log2, DEFAULT_RING_LOG2);
    DEFAULT(granularity, UCCL_EP_GRANULARITY_COARSE);
    DEFAULT(proxies, 1);
    DEFAULT(timeout_ns, DEFAULT_TIMEOUT_NS);
    DEFAULT(peer_timeout_ns, DEFAULT_PEER_TIMEOUT_NS);
    DEFAULT(bootstrap_timeout_ns, DEFAULT_BOOTSTRAP_TIMEOUT_NS);
    DEFAULT(spin, DEFAULT_SPIN);
    DEFAULT(idle_sleep_ns, DEFAULT_IDLE_SLEEP_NS);
    DEFAULT(first_sequence, FIRST_SEQUENCE);
    if (c->peer_timeout_ns > MAX_PEER_TIMEOUT_NS) c->peer_timeout_ns = MAX_PEER_TIMEOUT_NS;
    if (c->idle_sleep_ns >= 1000000000u) /* no nanosleep takes it, and the proxy would run all the time */
        return fail_local(UCCL_EP_E_RANGE, "", "idle_sleep of %u ns: it has to be less than a second",
                          c->idle_sleep_ns);
    if (c->granularity != UCCL_EP_GRANULARITY_COARSE && c->granularity != UCCL_EP_GRANULARITY_FINE)
        return fail_local(UCCL_EP_E_INVALID, "PUT-4", "granularity %u: 16 and 4 are possible", c->granularity);
    if (!c->heap_bytes || (c->heap_bytes > UCCL_EP_MAX_HEAP_BYTES(c->granularity) && !FAULT(heap_limit_unchecked)))
        return fail_local(
            UCCL_EP_E_RANGE, "PUT-4", "a heap of %llu bytes: 1 to %llu are addressable at granularity %u%s",
            (unsigned long long)c->heap_bytes, (unsigned long long)UCCL_EP_MAX_HEAP_BYTES(c->granularity),
            c->granularity, c->granularity == UCCL_EP_GRANULARITY_FINE ? " (16 reaches four times as far)" : "");
    if (c->heap && c->heap_bytes % c->granularity) /* one that is allocated is whole pages */
        return fail_local(UCCL_EP_E_ALIGNMENT, "PUT-4",
                          "a heap of the caller of %llu bytes: a multiple of %u is needed",
                          (unsigned long long)c->heap_bytes, c->granularity);
    if (c->signals > MAX_SIGNALS)
        return fail_local(UCCL_EP_E_RANGE, "", "%u signals: at most %u are possible", c->signals, MAX_SIGNALS);
    if (c->ring_log2 < UCCL_EP_RING_MIN_LOG2 || c->ring_log2 > UCCL_EP_RING_MAX_LOG2)
        return fail_local(UCCL_EP_E_RANGE, "", "ring_log2 %u: %u to %u are possible", c->ring_log2,
                          UCCL_EP_RING_MIN_LOG2, UCCL_EP_RING_MAX_LOG2);
    if (c->proxies > MAX_PROXIES || c->proxies > c->channels)
        return fail_local(UCCL_EP_E_RANGE, "", "%u proxies: at most %u, and no more than channels (%u)", c->proxies,
                          MAX_PROXIES, c->channels);
    if (c->channels > MAX_CHANNELS_PER_PROXY * c->proxies)
        return fail_local(UCCL_EP_E_RANGE, "", "%u channels on %u proxies: at most %u a proxy", c->channels, c->proxies,
                          MAX_CHANNELS_PER_PROXY);
    if (c->device_channels > c->channels)
        return fail_local(UCCL_EP_E_RANGE, "", "%u device channels of %u channels", c->device_channels, c->channels);
    if (c->heap_kind > UCCL_EP_MEMORY_EMULATED || (c->heap_kind != UCCL_EP_MEMORY_HOST && !c->heap))
        return fail_local(UCCL_EP_E_INVALID, "MEM-1", "a device heap must be given by the caller, with its kind");
    if (!c->accelerator && (c->heap_kind != UCCL_EP_MEMORY_HOST || c->device_channels))
        return fail_local(UCCL_EP_E_INVALID, "", "%s needs an accelerator: give the path of its library",
                          c->device_channels ? "a device channel" : "a heap in device memory");
    if (c->signals_kind != UCCL_EP_MEMORY_HOST && c->signals_kind != c->heap_kind)
        return fail_local(
            UCCL_EP_E_INVALID, "MEM-3",
            "signal words in device memory lie beside a heap there, of the same kind: give such a heap, or "
            "take signals in host memory");
    if (c->strategy > UCCL_EP_STRATEGY_SENDER_HOLD_SUM)
        return fail_local(UCCL_EP_E_INVALID, "", "strategy %u is unknown", c->strategy);
    if (c->staging > UCCL_EP_STAGING_ON) return fail_local(UCCL_EP_E_INVALID, "", "staging %u is unknown", c->staging);
    if (c->progress > UCCL_EP_PROGRESS_CALLER)
        return fail_local(UCCL_EP_E_INVALID, "", "progress mode %u is unknown", c->progress);
    if (c->idle && c->progress != UCCL_EP_PROGRESS_CALLER)
        return fail_local(UCCL_EP_E_INVALID, "", "idle is for progress by the caller");
    if (c->first_ticket > INT64_MAX) return fail_local(UCCL_EP_E_RANGE, "", "first_ticket may be 2^63 - 1 at most");
    if (c->cpus) {
        const uccl_ep_status status = check_cpus(c);
        if (status != UCCL_EP_OK) return status;
    }
    comm->rank = bootstrap->rank;
    comm->size = bootstrap->size;
    comm->channels = c->channels;
    comm->device_channels = c->device_channels;
    return UCCL_EP_OK;
}

/* What the core keeps outstanding at most: the caller's wish, else our default, never more than the NIC takes. */
static uint64_t smaller_limit(uint64_t wish, uint64_t otherwise, uint64_t nic) {
    const uint64_t value = wish ? wish : otherwise;
    return nic && nic < value ? nic : value;
}

/* The largest multiple, within `largest`, of what the NIC and the granule want: pieces of a put stay aligned to both.
 */
uint32_t whole_pieces(const uccl_ep_config *c, const uccl_ep_caps *caps, uint64_t largest) {
    const uint64_t multiple = caps->write_alignment > c->granularity ? caps->write_alignment : c->granularity;
    return (uint32_t)(largest < multiple ? multiple : largest / multiple * multiple);
}

void config_limits(uccl_ep_comm *comm) {
    uccl_ep_config *c = &comm->config;
    const uccl_ep_caps *caps = &comm->caps;
    uint32_t a_peer = 8 * DEFAULT_INFLIGHT / comm->size; /* a power of two up from one of ranks */
    a_peer = (1u << (31 - __builtin_clz(a_peer))) - 1;
    if (a_peer > DEFAULT_INFLIGHT_PEER) a_peer = DEFAULT_INFLIGHT_PEER;
    if (a_peer < LEAST_INFLIGHT_PEER) a_peer = LEAST_INFLIGHT_PEER;
    c->max_inflight_peer = (uint32_t)smaller_limit(c->max_inflight_peer, a_peer, caps->max_inflight_peer);
    c->max_inflight = (uint32_t)smaller_limit(c->max_inflight, DEFAULT_INFLIGHT, caps->max_inflight_endpoint);
    /* A NIC's limit is a hard one: past it, retries fail. Its proxies share it. Three quarters are dealt out to puts;
     * one piece may come on top, of an eighth; the last eighth is for what is not counted in bytes: adds, records,
     * return words. */
    const uint32_t nics = caps->adding_nics ? caps->adding_nics : 1, sharing = (c->proxies + nics - 1) / nics;
    uint64_t limit = FAULT(inflight_unlimited) ? 0 : caps->max_inflight_bytes;
    if (limit) limit = limit > sharing ? limit / sharing : 1;
    c->max_inflight_bytes = smaller_limit(c->max_inflight_bytes, DEFAULT_INFLIGHT_BYTES, limit / 4 * 3);
    if (c->max_inflight_bytes > MAX_INFLIGHT_BYTES) c->max_inflight_bytes = MAX_INFLIGHT_BYTES;
    uint64_t largest = smaller_limit(c->max_message_bytes, 1ull << 31, caps->max_message_bytes);
    if (limit && largest > limit / 8) largest = limit / 8;
    const uint64_t small = limit / 8 / LARGEST_CONTROL;
    if (limit && c->max_inflight > small) c->max_inflight = small ? (uint32_t)small : 1;
    c->max_message_bytes = whole_pieces(c, caps, largest);
}
