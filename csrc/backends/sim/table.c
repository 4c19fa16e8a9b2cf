/* SPDX-License-Identifier: Apache-2.0
 *
 * table.c: the virtual NIC as a backend. Options: "world=N,rank=R[,profile=P][,knob=value...]".
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "world.h"

#define MAX_NICS 16u
#define ADDRESS_MAGIC 0x53494d61u
#define REGION_MAGIC 0x53494d72u
#define CONVERT 32u /* operations that go to the NIC at a time */

struct uccl_ep_device {
    const uccl_ep_host *host;
    world *w;
    const vnic_profile *profile;
    vnic_knobs knobs;
    uint32_t rank, peers, n_nics;
    bool shared;
    vnic_nic *nic[MAX_NICS];
    vnic_region *region[UCCL_EP_REGIONS];
    uint16_t *imported[UCCL_EP_REGIONS]; /* [peers]: ids of regions; 0: none */
};

struct uccl_ep_endpoint {
    uccl_ep_device *device;
    vnic_endpoint *nic_endpoint;
    uint32_t settling; /* polls until new connections are established */
};

/* What travels. All of it is checked on arrival. */
struct address_blob {
    uint32_t magic, world, endpoint, rank;
};
struct region_blob {
    uint32_t magic, world, id, region;
    uint64_t key, bytes;
};

static uccl_ep_status fail(const uccl_ep_host *host, uccl_ep_status status, int32_t code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static uccl_ep_status fail(const uccl_ep_host *host, uccl_ep_status status, int32_t code, const char *format, ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return host->fail(host->context, status, code, text);
}

/* The K-th of these calls fails, if somebody injected that. */
static uccl_ep_status control_call(const uccl_ep_device *d, const char *entry) {
    if (!vnic_fault_strikes(d->w->fabric, VNIC_FAULT_CALL_FAIL, d->rank, VNIC_ANY, NULL)) return UCCL_EP_OK;
    return fail(d->host, UCCL_EP_E_NIC, 0, "%s failed: the fault call_fail was injected", entry);
}

static bool no_memory(const uccl_ep_device *d) {
    return vnic_fault_strikes(d->w->fabric, VNIC_FAULT_MEMORY_PRESSURE, d->rank, VNIC_ANY, NULL);
}

/* ---------------------------------------------------------------------------------------------------------- devices */

static uccl_ep_status sim_query(const uccl_ep_host *host, uint32_t index, uccl_ep_device_info *info) {
    const vnic_profile *p = vnic_profile_at(index);
    if (!p) return fail(host, UCCL_EP_E_NO_DEVICE, 0, "there is no virtual NIC number %u", index);
    uccl_ep_device_info mine = {.size = sizeof mine, .numa_node = -1};
    snprintf(mine.name, sizeof mine.name, "%s", p->name);
    snprintf(mine.vendor, sizeof mine.vendor, "%s", p->vendor);
    snprintf(mine.model, sizeof mine.model, "%s (virtual)", p->model);
    snprintf(mine.firmware, sizeof mine.firmware, "%s", p->firmware);
    promises_of(&p->knobs, &mine.caps);
    const uint32_t size = info->size < sizeof mine ? info->size : (uint32_t)sizeof mine;
    memcpy(info, &mine, size);
    info->size = size;
    return UCCL_EP_OK;
}

/* First pass over the options: what is no knob. */
struct wanted {
    uint64_t world, rank;
    bool has_world, has_rank;
    const vnic_profile *profile;
};

static int take_option(void *context, const char *key, const char *value, char *text) {
    struct wanted *wanted = context;
    if (!strcmp(key, "profile")) {
        wanted->profile = vnic_profile_named(value);
        if (wanted->profile) return 1;
        size_t used = (size_t)snprintf(text, 256, "no profile '%.40s'; there are:", value);
        for (uint32_t i = 0; vnic_profile_at(i) && used < 256; i++)
            used += (size_t)snprintf(text + used, 256 - used, " %s", vnic_profile_at(i)->name);
        return -1;
    }
    const bool is_world = !strcmp(key, "world");
    if (!is_world && strcmp(key, "rank")) return 0;
    char *end;
    errno = 0;
    const uint64_t n = strtoull(value, &end, 10);
    if (errno || *end || *value < '0' || *value > '9' || n > UINT32_MAX) {
        snprintf(text, 256, "%s=%.40s is no number", key, value);
        return -1;
    }
    *(is_world ? &wanted->world : &wanted->rank) = n;
    *(is_world ? &wanted->has_world : &wanted->has_rank) = true;
    return 1;
}

static uccl_ep_status parse_options(const uccl_ep_host *host, const char *name, const char *options,
                                    uccl_ep_device *d) {
    struct wanted wanted = {0};
    char text[256];
    /* Against any profile, for the keys; then against the right one. */
    vnic_knobs any = vnic_profile_at(0)->knobs;
    if (vnic_knobs_parse(&any, options, take_option, &wanted, text)) {
        const bool combination = wanted.has_world;
        if (!combination) return fail(host, UCCL_EP_E_INVALID, 0, "options '%.60s': %.180s", options, text);
    }
    if (!wanted.has_world)
        return fail(host, UCCL_EP_E_UNSUPPORTED, 0,
                    "ranks on virtual NICs live in one process, in a world: uccl_ep.simulator.run(function) and "
                    "`uccl-ep conformance --backend sim` make one, from C world_open() of sim.h; then options are "
                    "world=N,rank=R");
    d->w = world_find((uint32_t)wanted.world);
    if (!d->w)
        return fail(host, UCCL_EP_E_INVALID, 0, "world=%llu: no such world is open in this process",
                    (unsigned long long)wanted.world);
    if (!wanted.has_rank || wanted.rank >= d->w->ranks)
        return fail(host, UCCL_EP_E_INVALID, 0, "rank= is needed, 0 to %u in this world", d->w->ranks - 1);
    d->rank = (uint32_t)wanted.rank;
    const vnic_profile *named = name ? vnic_profile_named(name) : NULL;
    if (name && !named) return fail(host, UCCL_EP_E_NO_DEVICE, 0, "there is no virtual NIC '%.64s'", name);
    d->profile = wanted.profile ? wanted.profile : named ? named : d->w->profile;
    /* The world's own profile comes with the world's changes. */
    d->knobs = d->profile == d->w->profile ? d->w->knobs : d->profile->knobs;
    if (vnic_knobs_parse(&d->knobs, options, take_option, &wanted, text))
        return fail(host, UCCL_EP_E_INVALID, 0, "options '%.60s': %.180s", options, text);
    vnic_knobs *k = &d->knobs;
    const vnic_knobs *world_knobs = &d->w->knobs;
    if (d->profile == d->w->profile &&
        (k->schedule != world_knobs->schedule || k->choose_run != world_knobs->choose_run ||
         k->step_ns != world_knobs->step_ns || k->fibers != world_knobs->fibers))
        return fail(host, UCCL_EP_E_INVALID, 0,
                    "schedule, choose_run, step_ns and fibers are the world's: give them to world_open");
    return UCCL_EP_OK;
}

static uccl_ep_status open_nics(uccl_ep_device *d) {
    world *w = d->w;
    if (d->knobs.ranks_per_nic > 1) {
        const uint32_t group = d->rank / (uint32_t)d->knobs.ranks_per_nic;
        if (!w->shared_nics[group]) w->shared_nics[group] = vnic_nic_open(w->fabric, &d->knobs);
        if (!w->shared_nics[group]) return UCCL_EP_E_NO_MEMORY;
        w->shared_users[group]++;
        d->shared = true;
        d->nic[0] = w->shared_nics[group];
        d->n_nics = 1;
        return UCCL_EP_OK;
    }
    const uint32_t n = d->knobs.nics > 1 ? (uint32_t)d->knobs.nics : 1;
    for (; d->n_nics < n; d->n_nics++)
        if (!(d->nic[d->n_nics] = vnic_nic_open(w->fabric, &d->knobs))) return UCCL_EP_E_NO_MEMORY;
    return UCCL_EP_OK;
}

static void sim_device_close(uccl_ep_device *d) {
    for (uint32_t i = 0; i < UCCL_EP_REGIONS; i++) {
        if (d->region[i]) vnic_region_remove(d->w->fabric, d->region[i]);
        free(d->imported[i]);
    }
    if (d->shared) {
        const uint32_t group = d->rank / (uint32_t)d->knobs.ranks_per_nic;
        if (!--d->w->shared_users[group]) {
            vnic_nic_close(d->nic[0]);
            d->w->shared_nics[group] = NULL;
        }
    } else {
        for (uint32_t i = 0; i < d->n_nics; i++) vnic_nic_close(d->nic[i]);
    }
    world *w = d->w;
    free(d);
    world_release(w);
}

static uccl_ep_status sim_device_open(const uccl_ep_host *host, const char *name, const char *options,
                                      uccl_ep_device **out, uccl_ep_caps *caps) {
    *out = NULL;
    uccl_ep_device *d = calloc(1, sizeof *d);
    if (!d) return fail(host, UCCL_EP_E_NO_MEMORY, 0, "no memory for a device");
    d->host = host;
    uccl_ep_status status = parse_options(host, name, options, d);
    if (status != UCCL_EP_OK) {
        free(d);
        return status;
    }
    struct rank *rank = &d->w->rank[d->rank];
    if (!rank->may_open) {
        free(d);
        return fail(host, UCCL_EP_E_NO_DEVICE, 0,
                    "this rank is dead: inject \"peer_return rank=...\" before it returns");
    }
    world_use(d->w);
    status = control_call(d, "device_open");
    if (status == UCCL_EP_OK && no_memory(d)) status = UCCL_EP_E_NO_MEMORY;
    if (status == UCCL_EP_OK) status = open_nics(d);
    if (status != UCCL_EP_OK) {
        if (status == UCCL_EP_E_NO_MEMORY) fail(host, status, 0, "no memory for a NIC");
        sim_device_close(d);
        return status;
    }
    rank->dead = false; /* it returned */
    uccl_ep_caps mine;
    promises_of(&d->knobs, &mine);
    const uint32_t size = caps->size && caps->size < sizeof mine ? caps->size : (uint32_t)sizeof mine;
    memcpy(caps, &mine, size);
    caps->size = size;
    *out = d;
    return UCCL_EP_OK;
}

/* ----------------------------------------------------------------------------------------------------------- memory */

static uccl_ep_status sim_memory_alloc(uccl_ep_device *d, uint64_t bytes, uint32_t flags, void **base) {
    *base = NULL;
    const uccl_ep_status status = control_call(d, "memory_alloc");
    if (status != UCCL_EP_OK) return status;
    if ((flags & 3u) == UCCL_EP_ALLOC_HUGE_ON)
        return fail(d->host, UCCL_EP_E_NO_MEMORY, 0, "virtual NICs have no huge pages: leave them to auto or off");
    void *mapped = MAP_FAILED;
    if (!no_memory(d))
        mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED)
        return fail(d->host, UCCL_EP_E_NO_MEMORY, ENOMEM, "%llu bytes are not to be had: ask for less",
                    (unsigned long long)bytes);
    if (flags & UCCL_EP_ALLOC_LOCK && mlock(mapped, bytes)) {
        munmap(mapped, bytes);
        return fail(d->host, UCCL_EP_E_NO_MEMORY, errno,
                    "%llu bytes cannot be locked: raise the limit of locked memory (ulimit -l)",
                    (unsigned long long)bytes);
    }
    *base = mapped;
    return UCCL_EP_OK;
}

static void sim_memory_free(uccl_ep_device *d, void *base, uint64_t bytes) {
    (void)d;
    munmap(base, bytes);
}

static uint64_t pages_of(uintptr_t base, uint64_t bytes) {
    return bytes ? ((base + bytes - 1) >> 12) - (base >> 12) + 1 : 0;
}

static uccl_ep_status sim_region_register(uccl_ep_device *d, uccl_ep_region region, const uccl_ep_memory *memory) {
    const uccl_ep_status status = control_call(d, "region_register");
    if (status != UCCL_EP_OK) return status;
    if (region >= UCCL_EP_REGIONS || d->region[region])
        return fail(d->host, UCCL_EP_E_INVALID, 0, "region %d is unknown, or registered already", (int)region);
    if (memory->kind != UCCL_EP_MEMORY_HOST || memory->dmabuf_fd >= 0)
        return fail(d->host, UCCL_EP_E_REGISTRATION, 0, "virtual NICs reach host memory only: register that");
    if (memory->access & UCCL_EP_ACCESS_REMOTE_ATOMIC && !d->knobs.atomics)
        return fail(d->host, UCCL_EP_E_REGISTRATION, EINVAL,
                    "the NIC has no atomics and refuses the right to them: register without REMOTE_ATOMIC");
    if (vnic_fault_strikes(d->w->fabric, VNIC_FAULT_REGISTER_FAIL, d->rank, VNIC_ANY, NULL))
        return fail(d->host, UCCL_EP_E_REGISTRATION, ENOMEM,
                    "%llu bytes need more pages than the NIC's table has left (fault register_fail): register less, or "
                    "larger pages",
                    (unsigned long long)memory->bytes);
    const uint64_t pages = pages_of((uintptr_t)memory->base, memory->bytes);
    uint64_t taken = 0;
    for (uint32_t i = 0; i < UCCL_EP_REGIONS; i++)
        if (d->region[i]) taken += pages_of((uintptr_t)d->region[i]->base, d->region[i]->bytes);
    if (d->knobs.max_pages && taken + pages > d->knobs.max_pages)
        return fail(
            d->host, UCCL_EP_E_REGISTRATION, ENOMEM,
            "%llu bytes are %llu pages of 4 KiB, and of the NIC's %llu are %llu taken: register less, or memory "
            "in huge pages where the NIC knows them",
            (unsigned long long)memory->bytes, (unsigned long long)pages, (unsigned long long)d->knobs.max_pages,
            (unsigned long long)taken);
    d->region[region] =
        vnic_region_add(d->w->fabric, &d->knobs, d->rank, (uint32_t)region, memory->base, memory->bytes);
    if (!d->region[region])
        return fail(d->host, UCCL_EP_E_REGISTRATION, 0,
                    "a world takes %u registrations, and no more fit, or no memory is left: open a new world",
                    VNIC_MAX_REGIONS);
    d->region[region]->strict = region != UCCL_EP_REGION_HEAP; /* backend.h: so they are to be registered */
    d->region[region]->polled = region == UCCL_EP_REGION_MAILBOX;
    return UCCL_EP_OK;
}

static void sim_region_deregister(uccl_ep_device *d, uccl_ep_region region) {
    if (region >= UCCL_EP_REGIONS || !d->region[region]) return;
    vnic_region_remove(d->w->fabric, d->region[region]);
    d->region[region] = NULL;
}

static uccl_ep_status sim_region_export(uccl_ep_device *d, uccl_ep_region region, void *blob, uint32_t *bytes) {
    const uccl_ep_status status = control_call(d, "region_export");
    if (status != UCCL_EP_OK) return status;
    if (region >= UCCL_EP_REGIONS || !d->region[region] || *bytes < sizeof(struct region_blob))
        return fail(d->host, UCCL_EP_E_INVALID, 0, "region %d is not registered, or no room for its blob", (int)region);
    const vnic_region *r = d->region[region];
    const struct region_blob mine = {.magic = REGION_MAGIC,
                                     .world = d->w->number,
                                     .id = r->id,
                                     .region = (uint32_t)region,
                                     .key = r->key,
                                     .bytes = r->bytes};
    memcpy(blob, &mine, sizeof mine);
    *bytes = sizeof mine;
    return UCCL_EP_OK;
}

static uccl_ep_status sim_region_import(uccl_ep_device *d, uint32_t peer, uccl_ep_region region, const void *blob,
                                        uint32_t bytes) {
    const uccl_ep_status status = control_call(d, "region_import");
    if (status != UCCL_EP_OK) return status;
    struct region_blob theirs;
    if (region >= UCCL_EP_REGIONS || peer >= d->peers || bytes != sizeof theirs)
        return fail(d->host, UCCL_EP_E_INVALID, 0, "peer %u, region %d, %u bytes: not a region of a peer of ours", peer,
                    (int)region, bytes);
    memcpy(&theirs, blob, sizeof theirs);
    const vnic_region *r = theirs.id <= VNIC_MAX_REGIONS ? vnic_region_of(d->w->fabric, theirs.id) : NULL;
    if (theirs.magic != REGION_MAGIC || theirs.world != d->w->number || theirs.region != (uint32_t)region || !r ||
        r->tag != (uint32_t)region || r->key != theirs.key || r->bytes != theirs.bytes)
        return fail(d->host, UCCL_EP_E_INVALID, 0, "what rank %u sent is no region of this world", peer);
    if (!d->imported[region]) d->imported[region] = calloc(d->peers, sizeof *d->imported[region]);
    if (!d->imported[region]) return fail(d->host, UCCL_EP_E_NO_MEMORY, 0, "no memory for %u peers", d->peers);
    d->imported[region][peer] = (uint16_t)theirs.id;
    return UCCL_EP_OK;
}

/* ------------------------------------------------------------------------------------------------------ connections */

static uccl_ep_status sim_endpoint_open(uccl_ep_device *d, const uccl_ep_endpoint_config *given,
                                        uccl_ep_endpoint **out) {
    *out = NULL;
    const uccl_ep_status status = control_call(d, "endpoint_open");
    if (status != UCCL_EP_OK) return status;
    uccl_ep_endpoint_config config = {0};
    memcpy(&config, given, given->size < sizeof config ? given->size : sizeof config);
    if (!config.peers || config.rank >= config.peers || config.peers > UCCL_EP_SIM_MAX_RANKS ||
        (d->peers && d->peers != config.peers))
        return fail(d->host, UCCL_EP_E_INVALID, 0, "rank %u of %u peers", config.rank, config.peers);
    const uint64_t inflight = config.inflight ? config.inflight : d->knobs.max_wr;
    const uint64_t entries = inflight + (uint64_t)config.receives_peer * config.peers + SPARE_ENTRIES;
    if (entries > d->knobs.max_cqe)
        return fail(d->host, UCCL_EP_E_CAPABILITY, 0,
                    "a completion queue of %llu entries is needed (%llu in flight, %u immediates from each of %u "
                    "peers, %u to spare), and %llu are available: a smaller max_inflight, or a NIC with more",
                    (unsigned long long)entries, (unsigned long long)inflight, config.receives_peer, config.peers,
                    SPARE_ENTRIES, (unsigned long long)d->knobs.max_cqe);
    uccl_ep_endpoint *e = no_memory(d) ? NULL : calloc(1, sizeof *e);
    if (!e) return fail(d->host, UCCL_EP_E_NO_MEMORY, 0, "no memory for an endpoint");
    const vnic_endpoint_config mine = {.rank = d->rank,
                                       .self = config.rank,
                                       .peers = config.peers,
                                       .cq_entries = (uint32_t)entries,
                                       .receives_peer = config.receives_peer};
    char text[256];
    e->device = d;
    e->nic_endpoint = vnic_endpoint_open(d->nic[config.index % d->n_nics], &mine, text);
    if (!e->nic_endpoint) {
        free(e);
        return fail(d->host, UCCL_EP_E_CAPABILITY, 0, "%s", text);
    }
    d->peers = config.peers;
    *out = e;
    return UCCL_EP_OK;
}

static void sim_endpoint_close(uccl_ep_endpoint *e) {
    vnic_endpoint_close(e->nic_endpoint);
    free(e);
}

static uccl_ep_status sim_endpoint_address(uccl_ep_endpoint *e, void *blob, uint32_t *bytes) {
    const uccl_ep_device *d = e->device;
    const uccl_ep_status status = control_call(d, "endpoint_address");
    if (status != UCCL_EP_OK) return status;
    const struct address_blob mine = {ADDRESS_MAGIC, d->w->number, vnic_endpoint_id(e->nic_endpoint), d->rank};
    if (*bytes < sizeof mine) return fail(d->host, UCCL_EP_E_INVALID, 0, "no room for an address");
    memcpy(blob, &mine, sizeof mine);
    *bytes = sizeof mine;
    return UCCL_EP_OK;
}

static uccl_ep_status sim_connect(uccl_ep_endpoint *e, uint32_t peer, const void *blob, uint32_t bytes) {
    const uccl_ep_device *d = e->device;
    const uccl_ep_status status = control_call(d, "connect");
    if (status != UCCL_EP_OK) return status;
    struct address_blob theirs = {0};
    if (bytes == sizeof theirs) memcpy(&theirs, blob, sizeof theirs);
    if (peer >= d->peers || theirs.magic != ADDRESS_MAGIC || theirs.world != d->w->number ||
        theirs.rank >= d->w->ranks || theirs.endpoint == VNIC_NO_ENDPOINT)
        return fail(d->host, UCCL_EP_E_INVALID, 0, "what rank %u sent is no address of this world", peer);
    vnic_connect(e->nic_endpoint, peer, theirs.endpoint);
    e->settling = 2;
    return UCCL_EP_OK;
}

static uccl_ep_status sim_connect_poll(uccl_ep_endpoint *e, uint32_t peer) {
    (void)peer;
    const uccl_ep_status status = control_call(e->device, "connect_poll");
    if (status != UCCL_EP_OK) return status;
    if (!e->settling) return UCCL_EP_OK;
    e->settling--;
    return UCCL_EP_IN_PROGRESS;
}

static uccl_ep_status sim_disconnect(uccl_ep_endpoint *e, uint32_t peer) {
    const uccl_ep_status status = control_call(e->device, "disconnect");
    if (status != UCCL_EP_OK) return status;
    return vnic_disconnect(e->nic_endpoint, peer) ? UCCL_EP_OK : UCCL_EP_IN_PROGRESS;
}

/* ------------------------------------------------------------------------------------------------------- operations */

static uccl_ep_status convert(const uccl_ep_device *d, uint32_t peer, const uccl_ep_operation *o, vnic_work *w) {
    if (o->local_region >= UCCL_EP_REGIONS || o->remote_region >= UCCL_EP_REGIONS || !d->imported[o->remote_region] ||
        !d->imported[o->remote_region][peer])
        return fail(d->host, UCCL_EP_E_INVALID, 0, "region %u of rank %u was not imported", o->remote_region, peer);
    const vnic_region *remote = vnic_region_of(d->w->fabric, d->imported[o->remote_region][peer]);
    *w = (vnic_work){.kind = o->kind,
                     .flags = (uint8_t)((o->flags & UCCL_EP_OPERATION_SIGNALLED ? VNIC_SIGNALLED : 0) |
                                        (o->flags & UCCL_EP_OPERATION_FENCE ? VNIC_FENCE : 0) |
                                        (o->flags & UCCL_EP_OPERATION_VISIBLE ? VNIC_VISIBLE : 0)),
                     .remote_address = (remote->by_address ? (uintptr_t)remote->base : 0) + o->remote_offset,
                     .remote_key = remote->key,
                     .value = o->value,
                     .cookie = o->cookie};
    if (d->knobs.broken == VNIC_BROKEN_KEY32) w->remote_key &= UINT32_MAX;
    if (o->kind == UCCL_EP_OPERATION_ADD64) return UCCL_EP_OK;
    w->sges = 1;
    w->sge[0] = (vnic_sge){d->region[o->local_region], o->local_offset, o->length};
    if (d->knobs.inline_percent && o->length && o->length <= d->knobs.max_inline && o->kind != UCCL_EP_OPERATION_READ &&
        d->w->knobs.schedule != VNIC_SCHEDULE_CHOICE &&
        vnic_chance(d->w->fabric, VNIC_CHOICE_NIC, d->rank, (uint32_t)d->knobs.inline_percent))
        w->flags |= VNIC_INLINE;
    return UCCL_EP_OK;
}

_Static_assert((int)UCCL_EP_OPERATION_WRITE == (int)VNIC_WRITE && (int)UCCL_EP_OPERATION_ADD64 == (int)VNIC_ADD &&
                   (int)UCCL_EP_OPERATION_WRITE_IMM == (int)VNIC_WRITE_IMM &&
                   (int)UCCL_EP_OPERATION_READ == (int)VNIC_READ,
               "kinds are passed through");

static uccl_ep_status sim_submit(uccl_ep_endpoint *e, uint32_t peer, const uccl_ep_operation *operations, uint32_t n,
                                 uint32_t flags, uint32_t *accepted) {
    const uccl_ep_device *d = e->device;
    *accepted = 0;
    if (peer >= d->peers) return fail(d->host, UCCL_EP_E_INVALID, 0, "peer %u of %u", peer, d->peers);
    const uint32_t most = d->knobs.max_batch && d->knobs.max_batch < n ? (uint32_t)d->knobs.max_batch : n;
    while (*accepted < most) {
        vnic_work work[CONVERT];
        uint32_t m = most - *accepted < CONVERT ? most - *accepted : CONVERT;
        uccl_ep_status bad = UCCL_EP_OK;
        for (uint32_t i = 0; i < m && bad == UCCL_EP_OK; i++) {
            bad = convert(d, peer, &operations[*accepted + i], &work[i]);
            if (bad != UCCL_EP_OK) m = i;
        }
        const bool more = flags & UCCL_EP_SUBMIT_MORE || *accepted + m < most;
        char text[256];
        uint32_t taken;
        const vnic_refusal refusal = vnic_post(e->nic_endpoint, peer, work, m, more && bad == UCCL_EP_OK, &taken, text);
        *accepted += taken;
        switch (refusal) {
        case VNIC_TAKEN:
            break;
        case VNIC_NO_ROOM:
            if (more) vnic_ring(e->nic_endpoint); /* the doorbell that was to come with the rest */
            return d->knobs.backpressure == VNIC_FULL_AGAIN && !*accepted ? UCCL_EP_E_AGAIN : UCCL_EP_OK;
        case VNIC_UNSUPPORTED:
            return fail(d->host, UCCL_EP_E_UNSUPPORTED, 0, "%s", text);
        case VNIC_TOO_LONG:
            return fail(d->host, UCCL_EP_E_RANGE, 0, "%s", text);
        default:
            return fail(d->host, UCCL_EP_E_NIC, 0, "%s", text);
        }
        if (bad != UCCL_EP_OK) return bad;
    }
    return UCCL_EP_OK;
}

static int32_t status_of(uint32_t status) {
    switch (status) {
    case VNIC_OK:
        return UCCL_EP_OK;
    case VNIC_RETRY_EXCEEDED:
    case VNIC_UNREACHABLE:
        return UCCL_EP_E_PEER_LOST;
    case VNIC_FLUSHED:
    case VNIC_ABORTED:
        return UCCL_EP_E_CLOSED;
    default:
        return UCCL_EP_E_NIC;
    }
}

static int32_t sim_poll(uccl_ep_endpoint *e, uccl_ep_completion *completions, uint32_t max) {
    const uccl_ep_device *d = e->device;
    const char *broken = vnic_endpoint_broken(e->nic_endpoint);
    if (broken) return fail(d->host, UCCL_EP_E_NIC, 0, "the endpoint is broken: %s", broken);
    /* A doorbell may have been lost: a later one, of the same producer index, does no harm. */
    vnic_ring(e->nic_endpoint);
    uint32_t n = 0;
    while (n < max) {
        vnic_completion done[CONVERT];
        const uint32_t room = max - n < CONVERT ? max - n : CONVERT;
        const uint32_t got = vnic_poll(e->nic_endpoint, done, room);
        for (uint32_t i = 0; i < got; i++)
            completions[n++] = (uccl_ep_completion){.cookie = done[i].cookie,
                                                    .kind = done[i].immediate ? UCCL_EP_COMPLETION_IMMEDIATE
                                                                              : UCCL_EP_COMPLETION_OPERATION,
                                                    .status = status_of(done[i].status),
                                                    .peer = done[i].peer,
                                                    .vendor_code = done[i].vendor_code};
        if (got < room) break;
    }
    return (int32_t)n;
}

static void sim_describe(uccl_ep_device *d, int32_t status, int32_t vendor_code, char *text, uint32_t bytes) {
    (void)status;
    if (bytes)
        snprintf(text, bytes, "%s: %s", d->profile->name, vnic_vendor_text((vnic_vendor)d->knobs.vendor, vendor_code));
}

static uccl_ep_status sim_replenish(uccl_ep_endpoint *e, uint32_t peer, uint32_t n) {
    const uccl_ep_device *d = e->device;
    if (peer >= d->peers) return fail(d->host, UCCL_EP_E_INVALID, 0, "peer %u of %u", peer, d->peers);
    vnic_replenish(e->nic_endpoint, peer, n);
    return UCCL_EP_OK;
}

static uccl_ep_status sim_flush_local(uccl_ep_endpoint *e, uccl_ep_region region) {
    const uccl_ep_device *d = e->device;
    if (!d->knobs.flush_local) return fail(d->host, UCCL_EP_E_UNSUPPORTED, 0, "this NIC cannot be flushed by its host");
    if (region >= UCCL_EP_REGIONS || !d->region[region])
        return fail(d->host, UCCL_EP_E_INVALID, 0, "region %d is not registered", (int)region);
    vnic_flush_local(e->nic_endpoint, d->region[region]);
    return UCCL_EP_OK;
}

static const uccl_ep_backend sim_table = {
    .size = sizeof(uccl_ep_backend),
    .abi_major = UCCL_EP_BACKEND_ABI_MAJOR,
    .abi_minor = 1,
    .name = "sim",
    .version = "0.1.0",
    .query = sim_query,
    .device_open = sim_device_open,
    .device_close = sim_device_close,
    .memory_alloc = sim_memory_alloc,
    .memory_free = sim_memory_free,
    .region_register = sim_region_register,
    .region_deregister = sim_region_deregister,
    .region_export = sim_region_export,
    .region_import = sim_region_import,
    .endpoint_open = sim_endpoint_open,
    .endpoint_close = sim_endpoint_close,
    .endpoint_address = sim_endpoint_address,
    .connect = sim_connect,
    .connect_poll = sim_connect_poll,
    .disconnect = sim_disconnect,
    .submit = sim_submit,
    .poll = sim_poll,
    .describe = sim_describe,
    .replenish = sim_replenish,
    .flush_local = sim_flush_local,
};

__attribute__((visibility("default"))) const uccl_ep_backend *uccl_ep_backend_entry(void) {
    return &sim_table;
}
