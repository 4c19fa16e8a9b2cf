/* SPDX-License-Identifier: Apache-2.0
 *
 * staging.h: heaps in device memory whose bytes the NIC finds in host memory (staging.c).
 */
#ifndef UCCL_EP_CORE_STAGING_H
#define UCCL_EP_CORE_STAGING_H

#include "internal.h"

/* A queue of the accelerator's driver. Copies of a queue end in order; marks tell how far it is. */
struct copies {
    uccl_ep_copy_queue *queue; /* NULL: nothing is copied */
    char *to;                  /* of the copy that is not started yet: what adjoins goes along */
    const char *from;
    uint64_t bytes;
    uint64_t given, done; /* marks; the first is 1 */
    bool unmarked;        /* something was started since the last mark, or will be before the next */
};

/* Of an entry. */
struct staged {
    uint64_t mark; /* of the copy of its source; 0: there is none */
    uint32_t cut;  /* bytes at its beginning that cut_off() took off it */
};

/* Of a source: its records from link.expected up to here are taken, and the copies for them started. */
struct landing {
    uint64_t end;
    uint64_t mark; /* of the last of these copies; 0: there was none yet */
};

struct staging {
    struct copies out, in;    /* to and from the mirror */
    struct staged *entries;   /* [channels << window_log2], as the proxy's */
    struct landing *landings; /* [size] */
    uint32_t progress;        /* when a mark was last done, or nothing was under way: the proxy's tick */
    bool broken;              /* of a copy under way nothing is known any more */
};

static inline bool copies_done(const struct copies *c, uint64_t mark) {
    return mark <= c->done;
}

/* The source of `e` is in the mirror. */
static inline bool staging_copied(const struct proxy *p, const struct entry *e) {
    return copies_done(&p->staging->out, p->staging->entries[e - p->entries].mark) || FAULT(sent_before_copied);
}

/* What `e` puts, with what was cut off it, maybe all; and where that begins at the target. */
static inline uint64_t staging_bytes(const struct proxy *p, const struct entry *e) {
    return (uint64_t)e->bytes + p->staging->entries[e - p->entries].cut;
}
static inline uint64_t staging_offset(const struct proxy *p, const struct entry *e) {
    return e->remote - p->staging->entries[e - p->entries].cut;
}

#endif
