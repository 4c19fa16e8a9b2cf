/* SPDX-License-Identifier: Apache-2.0
 *
 * flight.c: operations in flight on a NIC whose completions come in any order.
 *
 * A place is taken when an operation is planned and free again when its completion is here or its peer was given up;
 * each time, its generation changes. Places are used in turn, so a generation comes back only after 2^32 uses of one
 * place: no completion is that late.
 */
#include <stdlib.h>

#include "internal.h"

uccl_ep_status flights_open(struct proxy *p) {
    uint32_t places = 1;
    while (places < p->max_inflight) places *= 2;
    p->flights = calloc(places, sizeof *p->flights);
    p->free_flights = calloc(places, sizeof *p->free_flights);
    if (!p->flights || !p->free_flights)
        return fail_local(UCCL_EP_E_NO_MEMORY, "", "no memory for %u operations in flight", places);
    p->free_mask = places - 1;
    p->free_last = places;
    for (uint32_t i = 0; i < places; i++) p->free_flights[i] = i;
    return UCCL_EP_OK;
}

/* The caller has seen that there is room: p->inflight is below max_inflight, also with what it plans. */
uint64_t flight_take(struct proxy *p, enum flight_kind kind, uint32_t entry, uint32_t peer) {
    UCCL_EP_ASSERT(p->free_first != p->free_last);
    const uint32_t place = p->free_flights[p->free_first++ & p->free_mask];
    struct flight *f = &p->flights[place];
    f->entry = entry;
    f->peer = (uint16_t)peer;
    f->kind = (uint16_t)kind;
    return (uint64_t)f->generation << 32 | place;
}

/* The last n that were taken were not submitted. */
void flights_untake(struct proxy *p, uint32_t n) {
    while (n--) p->flights[p->free_flights[--p->free_first & p->free_mask]].kind = FLIGHT_NONE;
}

static void give_back(struct proxy *p, uint32_t place) {
    p->flights[place].kind = FLIGHT_NONE;
    p->flights[place].generation++;
    p->free_flights[p->free_last++ & p->free_mask] = place;
    p->inflight--;
}

/* The flight of a completion, which ends with it; NULL if it is none's. Valid until the next one is taken. */
struct flight *flight_end(struct proxy *p, uint64_t cookie, enum flight_kind *kind) {
    const uint32_t place = (uint32_t)cookie;
    if (UNLIKELY(place > p->free_mask)) return NULL;
    struct flight *f = &p->flights[place];
    if (UNLIKELY(f->kind == FLIGHT_NONE || f->generation != cookie >> 32)) return NULL;
    *kind = f->kind;
    give_back(p, place);
    return f;
}

/* The NIC has let go of a peer: no completion will come for these. */
void flights_drop(struct proxy *p, uint32_t peer) {
    for (uint32_t place = 0; place <= p->free_mask; place++)
        if (p->flights[place].kind != FLIGHT_NONE && p->flights[place].peer == peer) give_back(p, place);
}
