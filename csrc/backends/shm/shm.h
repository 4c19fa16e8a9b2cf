/* SPDX-License-Identifier: Apache-2.0
 *
 * The shared-memory backend, inside. Ranks are processes of one machine, and a put is a memcpy into the peer's memory.
 *
 *   table.c     who we are, options, the table
 *   memory.c    memory that can be shared (memfd), regions
 *   link.c      one connection a pair of devices: descriptors of memory travel over it, and its end tells of a death
 *   endpoint.c  submit and poll
 *   copies.c    what goes to or from a heap in a GPU's memory: copies on a queue of its driver
 *
 * Locking. Endpoints of several threads meet in the links and the regions: `lock` guards them, but what submit reads: a
 * link's `state`, `imported` and `targets`. The targets of a link are written once, before its state says UP or its bit
 * is set in `imported` (release), and stay mapped until the device is closed: no submit can meet a mapping that goes
 * away. So submit and poll take no lock.
 */
#ifndef UCCL_EP_SHM_H
#define UCCL_EP_SHM_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* memfd_create, accept4, seals */
#endif

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "uccl_ep/backend.h"

#define SHM_VERSION 1u
#define SHM_MAX_PEERS 512u
#define SHM_MAX_MESSAGE (4u << 20) /* also what one submit copies at most: a proxy is kept for about a millisecond */
#define SHM_MAX_INFLIGHT (1u << 20)
#define SHM_MAX_GUESTS 64u /* connections that have not said who they are */
#define SHM_ID_BYTES 16u

/* ------------------------------------------------------------------------------------------------------ on the wire */

/* Where a device is found and how it knows its peers. Ranks exchange it through the bootstrap, which strangers cannot
 * read. */
typedef struct shm_address {
    uint32_t magic;
    uint16_t version, bytes;
    uint32_t rank, peers, index;
    uint32_t uid;
    uint64_t netns_device, netns_inode; /* 0, 0: unknown */
    uint8_t boot[SHM_ID_BYTES];         /* which machine, since its start; 0: unknown */
    uint8_t name[SHM_ID_BYTES];         /* of the abstract socket; anybody can read it in /proc/net/unix */
    uint8_t token[SHM_ID_BYTES];        /* who knows it has read this address */
} shm_address;
#define SHM_ADDRESS_MAGIC 0x61736d75u /* "umsa" */

/* What a peer maps. */
typedef struct shm_region_record {
    uint64_t id; /* random, of one registration; 0: not registered */
    uint64_t bytes;
    uint64_t offset; /* in the file whose descriptor travels along; in the allocation, of device memory */
    uint32_t access;
    uint32_t kind; /* uccl_ep_memory_kind; without a descriptor if it is not host memory */
} shm_region_record;

typedef struct shm_region_blob {
    uint32_t magic;
    uint16_t version, region;
    uint8_t name[SHM_ID_BYTES]; /* of the device */
    shm_region_record record;
} shm_region_blob;
#define SHM_REGION_MAGIC 0x72736d75u /* "umsr" */

/* The heap in device memory: what it takes to reach the allocation. */
typedef struct shm_device_blob {
    shm_region_blob region;
    uint64_t address;   /* of the heap, for ranks of the same process */
    uint32_t shareable; /* `handle` is one; otherwise no other process can reach it */
    uint32_t reserved;
    uint8_t handle[UCCL_EP_GPU_IPC_BYTES];
} shm_device_blob;

/* All that passes over a link, one packet each. HELLO and WELCOME carry the descriptors of the registered regions. */
typedef enum shm_message_kind { SHM_HELLO = 1, SHM_WELCOME = 2, SHM_REJECT = 3, SHM_GOODBYE = 4 } shm_message_kind;
typedef struct shm_message {
    uint32_t magic;
    uint16_t version, kind;
    uint32_t rank;
    int32_t status;              /* REJECT */
    uint8_t name[SHM_ID_BYTES];  /* of the sender */
    uint8_t proof[SHM_ID_BYTES]; /* HELLO, WELCOME: the receiver's token */
    shm_region_record regions[UCCL_EP_REGIONS];
    char text[112]; /* REJECT */
} shm_message;
#define SHM_MESSAGE_MAGIC 0x6d736d75u /* "umsm" */

_Static_assert(sizeof(shm_address) == 88, "the same on all ABIs: no padding");
_Static_assert(sizeof(shm_region_blob) == 56, "the same on all ABIs: no padding");
_Static_assert(sizeof(shm_device_blob) == 200, "the same on all ABIs: no padding");
_Static_assert(sizeof(shm_message) == 256, "the same on all ABIs: no padding");
_Static_assert(sizeof(shm_address) <= UCCL_EP_MAX_BLOB_BYTES, "fits the core's room");

/* -------------------------------------------------------------------------------------------------------- in memory */

/* A region as submit reaches it. */
typedef struct shm_target {
    unsigned char *base;
    uint64_t bytes;
    uint32_t access;
    void *map; /* what to unmap; NULL: not ours */
    uint64_t map_bytes;
    void *opened;    /* device memory of another process, to be closed; NULL: not ours */
    bool registered; /* `map` is, with the accelerator */
    bool device;     /* `base` is an address in device memory */
} shm_target;

typedef enum shm_link_state {
    SHM_LINK_DIAL,     /* we are to connect */
    SHM_LINK_LISTEN,   /* the peer is to connect */
    SHM_LINK_HEARD,    /* the peer connected and said hello, and we do not have its address yet */
    SHM_LINK_GREET,    /* our hello or welcome is to be sent */
    SHM_LINK_AWAIT,    /* the welcome is to come */
    SHM_LINK_UP,       /* in use */
    SHM_LINK_DEPARTED, /* the peer closed its device and said so */
    SHM_LINK_LOST      /* it died, or the link could not be made: status, vendor_code and text say why */
} shm_link_state;

/* One connection to a peer's device, shared by the endpoints. Lives until the device is closed once it was UP. */
typedef struct shm_link {
    _Atomic uint32_t state;    /* shm_link_state */
    _Atomic uint32_t imported; /* bit a region */
    shm_target targets[UCCL_EP_REGIONS];
    shm_region_record records[UCCL_EP_REGIONS];
    uint8_t name[SHM_ID_BYTES], token[SHM_ID_BYTES]; /* of the peer */
    uint32_t peer;
    uint32_t tries;
    uint64_t look_ns; /* LISTEN: when it was last looked whether the peer is still there */
    bool caller;      /* we connected */
    bool was_up;
    int fd, pidfd;
    pid_t pid; /* 0: not visible from here */
    uccl_ep_status status;
    int32_t vendor_code;
    char text[160];
    struct shm_link *next; /* retired */
} shm_link;

typedef struct shm_slot {
    shm_link *current;
    shm_link *heard; /* a hello that came before the peer's address */
} shm_slot;

typedef struct shm_memory {
    unsigned char *base;
    uint64_t bytes; /* mapped */
    int fd;
    struct shm_memory *next;
} shm_memory;

typedef struct shm_region {
    shm_region_record record; /* id 0: free */
    unsigned char *base;
    int fd;                  /* of the shm_memory */
    shm_device_blob *shared; /* device memory: how others reach it; NULL: host memory */
} shm_region;

struct uccl_ep_device {
    const uccl_ep_host *host;
    pthread_mutex_t lock;
    uccl_ep_caps caps;
    pid_t pid; /* that opened it: a forked child must not speak for it */
    uint32_t rank, peers, endpoints;
    shm_address address;
    shm_memory *memories;
    shm_region regions[UCCL_EP_REGIONS];
    shm_link self;
    shm_slot *slots; /* [peers]; from the first endpoint_open on */
    shm_link *retired;
    int listener, epoll;
    int guests[SHM_MAX_GUESTS]; /* oldest first */
    uint32_t n_guests;
    int door_error;        /* errno of an accept that found no room; 0: none */
    bool stranger_seen;    /* logged once */
    bool unwatched;        /* some peer has no pidfd */
    uint64_t last_look_ns; /* when those were looked at */
    uint64_t door_look_ns; /* the latest look_ns of all links */
    _Atomic uint32_t ends; /* of links that were up */
};

typedef struct shm_copies shm_copies;

typedef struct shm_done {
    uint64_t cookie;
    uint32_t peer;
} shm_done;

typedef struct shm_peer {
    shm_link *link; /* NULL: not connected */
    bool connecting, reported;
} shm_peer;

struct uccl_ep_endpoint {
    uccl_ep_device *device;
    uint32_t index;
    uint32_t ends_seen;
    /* Completions that poll has not taken: [head, tail) of a ring. */
    uint64_t head, tail;
    uint64_t mask;
    shm_done *ring;
    shm_copies *copies; /* NULL: no accelerator, all memory is host memory */
    shm_peer peers[];
};

static inline void shm_complete(uccl_ep_endpoint *endpoint, uint32_t peer, uint64_t cookie) {
    endpoint->ring[endpoint->tail++ & endpoint->mask] = (shm_done){.cookie = cookie, .peer = peer};
}

/* The accelerator that the core has opened, or NULL. */
const uccl_ep_accelerator *shm_accelerator(const uccl_ep_host *host);
/* Its last error of this thread, as the error that is about to be returned. */
uccl_ep_status shm_accelerator_failed(const uccl_ep_host *host, uccl_ep_status status, const char *what);

/* Text and errno for the error that is about to be returned; gives `status`. */
uccl_ep_status shm_fail(const uccl_ep_host *host, uccl_ep_status status, int error, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
void shm_log(const uccl_ep_host *host, uccl_ep_log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
uccl_ep_status shm_random(const uccl_ep_host *host, void *bytes, size_t n);
uint64_t shm_soft_limit(int resource); /* UINT64_MAX: none */

/* memory.c */
/* errno of a memfd that could not be made and sealed, or 0; *call names the system call. */
int shm_memory_probe(const char **call);
uccl_ep_status shm_memory_alloc(uccl_ep_device *device, uint64_t bytes, uint32_t flags, void **base);
void shm_memory_free(uccl_ep_device *device, void *base, uint64_t bytes);
void shm_memory_free_all(uccl_ep_device *device);
uccl_ep_status shm_region_register(uccl_ep_device *device, uccl_ep_region region, const uccl_ep_memory *memory);
void shm_region_deregister(uccl_ep_device *device, uccl_ep_region region);
uccl_ep_status shm_region_export(uccl_ep_device *device, uccl_ep_region region, void *blob, uint32_t *bytes);
uccl_ep_status shm_region_import(uccl_ep_device *device, uint32_t peer, uccl_ep_region region, const void *blob,
                                 uint32_t bytes);
/* Map what `record` says of the file `fd`, both from a peer. On an error *error is an errno and text[n] says more. */
uccl_ep_status shm_map_target(const shm_region_record *record, int fd, shm_target *target, int *error, char *text,
                              size_t n);

/* Let go of what a link reaches; in the process that opened the device. */
void shm_target_close(const uccl_ep_device *device, shm_target *target);

/* link.c; the caller holds the lock. */
uccl_ep_status shm_links_open(uccl_ep_device *device, uint32_t rank, uint32_t peers);
void shm_links_close(uccl_ep_device *device);
uccl_ep_status shm_link_start(uccl_ep_device *device, const shm_address *address);
/* Take what has come in on all links. Never blocks. */
void shm_links_pump(uccl_ep_device *device);
/* Move the link to `peer` on: OK once it is up. */
uccl_ep_status shm_link_advance(uccl_ep_device *device, uint32_t peer);

/* copies.c; the endpoint's thread. */
uccl_ep_status shm_copies_open(uccl_ep_endpoint *endpoint, shm_copies **copies);
void shm_copies_close(shm_copies *copies);
/* How many operations it holds; their completions have a place in the endpoint's ring. */
uint64_t shm_copies_pending(const shm_copies *copies);
/* Would the peer see this write before an earlier one? Then it has to wait. */
bool shm_copies_must_wait(const shm_copies *copies, uint32_t peer);
/* `operation` is `length` bytes between `from` and `to`, one of them device memory. */
uccl_ep_status shm_copies_start(shm_copies *copies, uint32_t peer, const uccl_ep_operation *operation,
                                unsigned char *to, const unsigned char *from, uint64_t length);
/* `operation` is the CPU's to carry out, once all copies to the peer that came before are done. */
void shm_copies_then(shm_copies *copies, uint32_t peer, const uccl_ep_operation *operation, unsigned char *there,
                     unsigned char *here, uint64_t length);
/* Give completions for what is done, and carry out what waited for it. An error is final. */
uccl_ep_status shm_copies_advance(shm_copies *copies);
/* Nothing of what is under way to the peer is completed or carried out any more. True once all its copies have ended.
 */
bool shm_copies_drop(shm_copies *copies, uint32_t peer);

/* endpoint.c */
/* An operation on host memory. */
void shm_carry_out(uint8_t kind, unsigned char *there, unsigned char *here, uint64_t length, uint64_t value);
uccl_ep_status shm_endpoint_open(uccl_ep_device *device, const uccl_ep_endpoint_config *config,
                                 uccl_ep_endpoint **endpoint);
void shm_endpoint_close(uccl_ep_endpoint *endpoint);
uccl_ep_status shm_endpoint_address(uccl_ep_endpoint *endpoint, void *blob, uint32_t *bytes);
uccl_ep_status shm_connect(uccl_ep_endpoint *endpoint, uint32_t peer, const void *blob, uint32_t bytes);
uccl_ep_status shm_connect_poll(uccl_ep_endpoint *endpoint, uint32_t peer);
uccl_ep_status shm_disconnect(uccl_ep_endpoint *endpoint, uint32_t peer);
uccl_ep_status shm_submit(uccl_ep_endpoint *endpoint, uint32_t peer, const uccl_ep_operation *operations, uint32_t n,
                          uint32_t flags, uint32_t *accepted);
int32_t shm_poll(uccl_ep_endpoint *endpoint, uccl_ep_completion *completions, uint32_t max);
int32_t shm_events(uccl_ep_endpoint *endpoint, uccl_ep_event *events, uint32_t max);

#endif
