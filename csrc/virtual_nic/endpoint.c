/* SPDX-License-Identifier: Apache-2.0
 *
 * endpoint.c: NICs, endpoints, connections and completion queues.
 *
 * A connection is made of two numbers until something is posted to it: 4096 ranks may be connected in pairs without
 * 16 million structures.
 */
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

void wake(struct vnic_fabric *f, uint32_t rank) {
    if (f->config.wake) f->config.wake(f->config.context, rank);
}

/* ------------------------------------------------------------------------------------------------------------- NICs */

vnic_nic *vnic_nic_open(struct vnic_fabric *f, const vnic_knobs *knobs) {
    if (f->n_nics == f->room_nics) {
        const uint32_t room = f->room_nics ? 2 * f->room_nics : 16;
        vnic_nic **grown = realloc(f->nics, room * sizeof(*grown));
        if (!grown) return NULL;
        f->nics = grown;
        f->room_nics = room;
    }
    vnic_nic *nic = calloc(1, sizeof *nic);
    if (!nic) return NULL;
    nic->fabric = f;
    nic->knobs = *knobs;
    if (!nic->knobs.pieces) nic->knobs.pieces = 1;
    f->nics[f->n_nics++] = nic;
    return nic;
}

void vnic_nic_close(vnic_nic *nic) {
    struct vnic_fabric *f = nic->fabric;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < f->n_nics; i++)
        if (f->nics[i] != nic) f->nics[kept++] = f->nics[i];
    f->n_nics = kept;
    free(nic);
}

const vnic_knobs *vnic_nic_knobs(const vnic_nic *nic) {
    return &nic->knobs;
}

uint32_t vnic_nic_queues(const vnic_nic *nic) {
    return (uint32_t)nic->queues;
}

/* ------------------------------------------------------------------------------------------------------ connections */

static uint32_t slot_of(const struct vnic_endpoint *e, uint32_t peer) {
    uint32_t i = peer * 0x9e3779b1u & (e->table_size - 1);
    while (e->table[i].conn && e->table[i].peer != peer) i = (i + 1) & (e->table_size - 1);
    return i;
}

struct conn *conn_find(const struct vnic_endpoint *e, uint32_t peer) {
    return e->table_size ? e->table[slot_of(e, peer)].conn : NULL;
}

struct conn *conn_get(struct vnic_endpoint *e, uint32_t peer) {
    struct conn *conn = conn_find(e, peer);
    if (conn) return conn;
    if (2 * (e->table_used + 1) > e->table_size) {
        const uint32_t old_size = e->table_size;
        struct conn_slot *old = e->table;
        e->table_size = old_size ? 2 * old_size : 8;
        e->table = must(calloc(e->table_size, sizeof *e->table));
        for (uint32_t i = 0; i < old_size; i++)
            if (old[i].conn) e->table[slot_of(e, old[i].peer)] = old[i];
        free(old);
    }
    conn = must(pool_take(&e->fabric->conns));
    conn->endpoint = e;
    conn->peer = peer;
    conn->remote = e->remote[peer];
    conn->state = CONN_UP;
    conn->receives = e->receives_peer;
    e->table[slot_of(e, peer)] = (struct conn_slot){peer, conn};
    e->table_used++;
    return conn;
}

struct vnic_endpoint *endpoint_of(const struct vnic_fabric *f, uint32_t id) {
    struct vnic_endpoint *e = f->room_endpoints ? f->endpoints[id & (f->room_endpoints - 1)] : NULL;
    return e && e->id == id && !e->dead ? e : NULL;
}

bool vnic_endpoint_exists(const struct vnic_fabric *f, uint32_t id) {
    return endpoint_of(f, id) != NULL;
}

void vnic_connect(struct vnic_endpoint *e, uint32_t peer, uint32_t remote_endpoint) {
    struct vnic_fabric *f = e->fabric;
    note(f, NOTE_CONNECT, e->rank, peer, remote_endpoint, 0, 0);
    vnic_hash_mix(f, (uint64_t)e->id << 40 ^ (uint64_t)peer << 20 ^ remote_endpoint);
    e->remote[peer] = remote_endpoint;
    struct conn *conn = conn_find(e, peer);
    if (!conn) return;
    conn_drop(conn);
    conn->remote = remote_endpoint;
    conn->state = CONN_UP;
    conn->fence_broken = false;
    /* What the peer took before and nobody gave back is there again, in a shared queue, too. */
    e->shared_receives += e->receives_peer - conn->receives;
    conn->receives = e->receives_peer;
    if (conn->stray) {
        /* The old completion comes when the new connection is at work. */
        event_timer(f, EVENT_STRAY, e->nic->knobs.delay, NULL, conn);
        conn->stray = false;
    }
}

bool vnic_disconnect(struct vnic_endpoint *e, uint32_t peer) {
    struct vnic_fabric *f = e->fabric;
    if (peer >= e->peers || e->remote[peer] == VNIC_NO_ENDPOINT) return true;
    struct conn *conn = conn_find(e, peer);
    if (!conn) {
        e->remote[peer] = VNIC_NO_ENDPOINT;
        return true;
    }
    if (conn->state != CONN_DRAINING && conn->state != CONN_DOWN) {
        note(f, NOTE_DISCONNECT, e->rank, peer, 0, 0, 0);
        conn->state = CONN_DRAINING;
        /* What is on the wire may still land; then no more. */
        event_add(f, EVENT_DRAINED, 2 * e->nic->knobs.delay, NULL, conn);
    }
    if (conn->state != CONN_DOWN) return false;
    e->remote[peer] = VNIC_NO_ENDPOINT;
    return true;
}

void vnic_replenish(struct vnic_endpoint *e, uint32_t peer, uint32_t n) {
    if (peer >= e->peers) return;
    e->shared_receives += n;
    conn_get(e, peer)->receives += n;
}

/* -------------------------------------------------------------------------------------------------------- endpoints */

static uint64_t queues_of(const vnic_nic *nic, uint32_t peers) {
    return nic->knobs.per_peer_qp ? peers : 1;
}

/* Ids are numbers that go on and on, so that one who comes later is not taken for one who has left: each has the place
 * in the table that its low bits name, and a number whose place is taken is left out. */
static bool has_id(struct vnic_fabric *f) {
    if (2 * (f->n_endpoints + 1) <= f->room_endpoints) return true;
    const uint32_t room = f->room_endpoints ? 2 * f->room_endpoints : 64;
    vnic_endpoint **wider = room ? calloc(room, sizeof(*wider)) : NULL;
    if (!wider) return false;
    for (uint32_t i = 0; i < f->room_endpoints; i++)
        if (f->endpoints[i]) wider[f->endpoints[i]->id & (room - 1)] = f->endpoints[i];
    free(f->endpoints);
    f->endpoints = wider;
    f->room_endpoints = room;
    return true;
}

static uint32_t take_id(struct vnic_fabric *f) {
    do f->last_endpoint++;
    while (f->last_endpoint == VNIC_NO_ENDPOINT || f->endpoints[f->last_endpoint & (f->room_endpoints - 1)]);
    return f->last_endpoint;
}

vnic_endpoint *vnic_endpoint_open(vnic_nic *nic, const vnic_endpoint_config *config, char *text) {
    struct vnic_fabric *f = nic->fabric;
    const vnic_knobs *k = &nic->knobs;
    const uint64_t needed = queues_of(nic, config->peers);
    if (k->max_qp && nic->queues + needed > k->max_qp && k->broken != VNIC_BROKEN_QUEUES) {
        snprintf(text, 256,
                 "the NIC has %llu queue pairs, %llu are taken and this endpoint needs %llu: use fewer ranks a NIC or "
                 "fewer proxies",
                 (unsigned long long)k->max_qp, (unsigned long long)nic->queues, (unsigned long long)needed);
        return NULL;
    }
    vnic_endpoint *e = has_id(f) ? calloc(1, sizeof *e) : NULL;
    if (e) e->remote = calloc(config->peers, sizeof *e->remote);
    if (!e || !e->remote) {
        free(e);
        snprintf(text, 256, "no memory for an endpoint with %u peers", config->peers);
        return NULL;
    }
    e->nic = nic;
    e->fabric = f;
    e->id = take_id(f);
    e->rank = config->rank;
    e->self = config->self;
    e->peers = config->peers;
    e->cq_entries = config->cq_entries;
    e->receives_peer = config->receives_peer;
    e->terms = config->terms ? *config->terms
                             : (vnic_terms){.rnr_retries = (uint32_t)k->rnr_retries,
                                            .rnr_ns = 8 * k->delay + 1000,
                                            .retry_ns = k->retry_ns};
    e->in_turn = config->in_turn;
    e->receive = config->receive;
    e->receive_context = config->receive_context;
    e->shared_receives = (uint64_t)config->receives_peer * config->peers;
    f->endpoints[e->id & (f->room_endpoints - 1)] = e;
    f->n_endpoints++;
    nic->queues += needed;
    return e;
}

void vnic_endpoint_close(vnic_endpoint *e) {
    struct vnic_fabric *f = e->fabric;
    note(f, NOTE_CLOSE, e->rank, e->rank, e->id, 0, 0);
    vnic_hash_mix(f, 0xc105eu ^ (uint64_t)e->id << 32);
    for (uint32_t i = 0; i < e->table_size; i++) {
        struct conn *conn = e->table[i].conn;
        if (!conn) continue;
        conn_drop(conn);
        pool_give(&f->conns, conn);
    }
    for (struct record *r = e->first, *next; r; r = next) {
        next = r->next;
        pool_give(&f->records, r);
    }
    f->endpoints[e->id & (f->room_endpoints - 1)] = NULL;
    f->n_endpoints--;
    e->nic->queues -= queues_of(e->nic, e->peers);
    free(e->table);
    free(e->remote);
    free(e);
}

uint32_t vnic_endpoint_id(const vnic_endpoint *e) {
    return e->id;
}

const char *vnic_endpoint_broken(const vnic_endpoint *e) {
    if (e->nic->lost) return "the NIC is gone";
    if (e->dead) return "the process of this rank is gone";
    return e->broken;
}

/* ------------------------------------------------------------------------------------------------ completion queues */

void cq_push(struct vnic_endpoint *e, const struct record *given, bool may_cover) {
    struct vnic_fabric *f = e->fabric;
    /* One entry may stand for several requests of a connection: then it takes no entry of its own. */
    const bool covered = may_cover && e->nic->knobs.cqe_cumulative && e->last && !e->last->immediate &&
                         e->last->peer == given->peer && e->last->status == VNIC_OK && given->status == VNIC_OK;
    if (!covered && e->cq_used >= e->cq_entries) {
        f->stats.errors++;
        if (e->nic->knobs.cq_overrun == VNIC_OVERRUN_FATAL) e->broken = "its completion queue overran";
        return;
    }
    struct record *r = must(pool_take(&f->records));
    *r = *given;
    r->next = NULL;
    r->entry = !covered;
    e->cq_used += r->entry;
    if (e->last)
        e->last->next = r;
    else
        e->first = r;
    e->last = r;
    f->met.queue |= rank_bit(e->rank);
    wake(f, e->rank);
}

uint32_t vnic_poll(struct vnic_endpoint *e, vnic_completion *completions, uint32_t max) {
    uint32_t n = 0;
    for (; n < max && e->first; n++) {
        struct record *r = e->first;
        completions[n] = (vnic_completion){.cookie = r->cookie,
                                           .peer = r->peer,
                                           .status = r->status,
                                           .vendor_code = r->vendor_code,
                                           .immediate = r->immediate,
                                           .consumed_receive = r->consumed};
        e->first = r->next;
        if (!e->first) e->last = NULL;
        e->cq_used -= r->entry;
        pool_give(&e->fabric->records, r);
    }
    return n;
}

/* ------------------------------------------------------------------------------------------------------------ deaths
 */

void vnic_rank_dies(struct vnic_fabric *f, uint32_t rank) {
    note(f, NOTE_DEAD, rank, rank, 0, 0, 0);
    vnic_hash_mix(f, 0xdeadu ^ (uint64_t)rank << 32);
    for (uint32_t i = 0; i < f->room_endpoints; i++) {
        struct vnic_endpoint *e = f->endpoints[i];
        if (!e || e->rank != rank || e->dead) continue;
        e->dead = true;
        /* What it has on the wire may land or not. */
        for (uint32_t k = 0; k < e->table_size; k++) {
            struct conn *conn = e->table[k].conn;
            if (!conn) continue;
            if (vnic_choose(f, VNIC_CHOICE_FAULT, rank, 2))
                conn_drop(conn);
            else
                conn_detach(conn);
        }
    }
    for (uint32_t i = 0; i < f->n_regions; i++)
        if (f->regions[i] && f->regions[i]->rank == rank) f->regions[i]->alive = false;
    for (uint32_t i = 0; i < f->n_nics; i++) posted_drop_rank(f->nics[i], rank);
}

void vnic_device_lost(struct vnic_fabric *f, uint32_t rank) {
    for (uint32_t i = 0; i < f->room_endpoints; i++) {
        struct vnic_endpoint *e = f->endpoints[i];
        if (!e || e->rank != rank) continue;
        e->nic->lost = true;
        for (uint32_t k = 0; k < e->table_size; k++)
            if (e->table[k].conn) conn_drop(e->table[k].conn);
    }
    wake(f, rank);
}

void vnic_queue_error(struct vnic_fabric *f, uint32_t rank, uint32_t peer) {
    for (uint32_t i = 0; i < f->room_endpoints; i++) {
        struct vnic_endpoint *e = f->endpoints[i];
        if (!e || e->rank != rank || peer >= e->peers || e->remote[peer] == VNIC_NO_ENDPOINT) continue;
        conn_error(conn_get(e, peer));
    }
}
