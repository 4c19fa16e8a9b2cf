/* SPDX-License-Identifier: Apache-2.0
 *
 * wire.h: how processes of one lab find each other and exchange frames. It knows nothing of NICs.
 *
 * Places. A process has a slot of its fabric; the slot is the name of its socket in the abstract namespace, taken by
 * bind(), which one process alone can do. The kernel gives it back when the process ends, however it ends.
 *
 * Links. A link goes one way: who made it asks, the other one answers on it. Two processes that ask each other have
 * two. The link to oneself has no socket and is otherwise the same.
 *
 * Waiting. Nothing here waits. Frames to be sent are kept until the peer takes them; what the two sides have agreed on
 * bounds how many these can be, and beyond `max_waiting` the peer is cut off: it takes no answers and asks on.
 *
 * Trust. Both ends must be of this user (SO_PEERCRED). The first frame each way says who speaks, in which version; a
 * peer that says anything else, or a length beyond max_frame, is cut off with a text, as it is by the owner's word.
 *
 * Threads: one at a time. Errors: an errno.
 */
#ifndef UCCL_EP_LAB_WIRE_H
#define UCCL_EP_LAB_WIRE_H

#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define WIRE_MAX_SLOTS 255u
#define WIRE_MAX_LINKS 256u
#define WIRE_MAX_HELLO 64u

struct wire;
struct wire_link;

struct wire_config {
    const char *name, *fabric; /* of the sockets: NAME/UID/FABRIC/SLOT, 100 bytes at most; copied */
    uint32_t slots;
    uint32_t max_frame;   /* bytes */
    uint64_t max_waiting; /* bytes to be sent on one link */
    const void *hello;    /* version and geometry of what the owner speaks; the peer's must be the same; copied */
    uint32_t hello_bytes;
    /* A frame of 1 to max_frame bytes, at an address that is a multiple of 8, for the length of the call. Not NULL: why
     * the peer is cut off. */
    const char *(*frame)(void *context, struct wire_link *link, const void *frame, uint32_t bytes);
    /* The link has ended: the peer's process is gone, or was cut off. It must not be used any more. */
    void (*gone)(void *context, struct wire_link *link);
    void (*say)(void *context, const char *text); /* a peer is refused or cut off */
    void *context;
};

/* Takes the lowest slot that is free. ENOSPC: none is. */
int wire_open(struct wire **wire, const struct wire_config *config);
uint32_t wire_slot(const struct wire *wire);
/* No frame comes any more and nobody hears of it. Also in a child after fork(), where the parent goes on. */
void wire_close(struct wire *wire);

/* Our link to that slot, made now if need be. ECONNREFUSED: nobody has the slot; EAGAIN: later. */
int wire_reach(struct wire *wire, uint32_t slot, struct wire_link **link);
struct wire_link *wire_known(const struct wire *wire, uint32_t slot); /* the same if it was made already; or NULL */
bool wire_is_ours(const struct wire_link *link);                      /* we ask; otherwise we answer */
uint32_t wire_peer(const struct wire_link *link);
void **wire_user(struct wire_link *link); /* the owner's */
/* All parts as one frame. False: the link has ended, or ends now. */
bool wire_send(struct wire_link *link, const struct iovec *parts, uint32_t n);

/* One turn: take in, hand on, send what goes. Returns how many frames came and sends went. */
uint32_t wire_turn(struct wire *wire);
/* Send what goes, and no more than that. */
void wire_push(struct wire *wire);
/* What to wait for; returns how many. `fds` has room for WIRE_MAX_LINKS + 1. */
uint32_t wire_waits(struct wire *wire, struct pollfd *fds);

#endif
