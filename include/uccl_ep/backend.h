/* SPDX-License-Identifier: Apache-2.0
 *
 * backend.h: what a NIC vendor fills in. ABI 1.3, pure C.
 *
 * Purpose. A backend is encoding, queue management and polling of one kind of NIC, and nothing else: ordering of
 * signals, flow control, batching, deadlines, errors and retries are the core's. It is a shared library that exports
 * one symbol, uccl_ep_backend_entry, and includes this header (and status.h, accelerator.h) alone.
 *
 * Rules that hold for every function
 *  - Version. `size` comes first in every structure that may grow; fields are only appended; a reader takes what both
 * sides know (the smaller size) and zero for the rest. The core refuses a backend of another major or one that needs a
 * newer minor (ABI-1).
 *  - Capabilities are promises. Zero is "not promised" and gives the weakest NIC that the contract admits: reliable
 *    one-sided writes with a truthful completion. Promise at run time what the device at hand does, not what the family
 * can.
 *  - Errors are return values (uccl_ep_status) with a text through uccl_ep_host.fail; a backend never prints, exits,
 *    aborts or asserts on what a NIC, a peer or a user did.
 *  - Waiting. No function blocks. Connecting is started and then polled; the core owns deadlines, and time
 * (host->now_ns), so that a simulator can own them.
 *  - Threads. "control": called by one thread at a time for a device, never at the same time as another control call of
 *    it. "endpoint": called by the one thread that drives this endpoint. Endpoints of one device run in parallel with
 *    each other and with control calls for *other* objects.
 *  - Ownership. Strings and structures passed in are valid during the call. Handles belong to the backend from open to
 *    close. Regions outlive the endpoints' last operation; endpoints are closed before regions are deregistered, and
 *    regions before the device is closed.
 *  - Ranks are numbers 0 .. peers-1 of one communicator, the own rank among them: a NIC that cannot reach itself takes
 *    another way inside the backend (PUT-6).
 */
#ifndef UCCL_EP_BACKEND_H
#define UCCL_EP_BACKEND_H

#include <stddef.h>
#include <stdint.h>

#include "accelerator.h"
#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define UCCL_EP_BACKEND_ABI_MAJOR 1u
/* 1.1 added the promises from READ_FLUSHES on, OPERATION_VISIBLE, caps.adding_nics and
 * endpoint_config.receives_peer. 1.2 added host.accelerator and host.gpu, emulated device memory, FLUSH_LOCAL and
 * caps.max_receives. 1.3 added peer_address, opened, host.gpu_info,
 * host.heap_kind and DEVICE_SIGNALS. */
#define UCCL_EP_BACKEND_ABI_MINOR 3u
#define UCCL_EP_BACKEND_ENTRY "uccl_ep_backend_entry"

/* Opaque to the core. */
typedef struct uccl_ep_device uccl_ep_device;
typedef struct uccl_ep_endpoint uccl_ep_endpoint;

/* ---------------------------------------------------------------------------------------------- the core's services */

typedef enum uccl_ep_log_level {
    UCCL_EP_LOG_ERROR = 0,
    UCCL_EP_LOG_WARN = 1,
    UCCL_EP_LOG_INFO = 2,
    UCCL_EP_LOG_DEBUG = 3
} uccl_ep_log_level;

/* Services of the core, valid from device_open to device_close. Callable from any thread. */
typedef struct uccl_ep_host {
    uint32_t size;
    uint16_t abi_major, abi_minor;
    void *context; /* first argument of each function */
    /* Monotonic nanoseconds of the communicator's clock: real, or a simulator's. */
    uint64_t (*now_ns)(void *context);
    void (*log)(void *context, uccl_ep_log_level level, const char *text);
    /* Text for the error that the running call is about to return: what failed, with which errno or vendor code, and
     * what would make it work. Kept a thread; truncated at 255 bytes. Returns `status`. */
    uccl_ep_status (*fail)(void *context, uccl_ep_status status, int32_t vendor_code, const char *text);
    /* Whose memory the heap may be, and its opened device; NULL: there is none. What a device promises of visibility
     * (MEM-3) holds for the kernels of this GPU, its writes_ordering and flush_writes counted in. */
    const uccl_ep_accelerator *accelerator;
    uccl_ep_gpu *gpu;
    const uccl_ep_gpu_info *gpu_info; /* of `gpu`; where it lies, for the choice of a NIC near it */
    /* uccl_ep_memory_kind of the heap that NICs write: HOST also where one in device memory is to be staged. Of host
     * memory kernels read through the bus, what has arrived there: writes_ordering counts for the others. */
    uint32_t heap_kind;
} uccl_ep_host;

/* -------------------------------------------------------------------------------------------- identity and promises */

/* What a successful completion of a write promises, from weakest to strongest. */
typedef enum uccl_ep_completion_level {
    UCCL_EP_COMPLETION_TRANSMITTED = 0, /* the source is reusable */
    UCCL_EP_COMPLETION_DELIVERED = 1,   /* and the target's NIC has the bytes (a responder's acknowledgement) */
    UCCL_EP_COMPLETION_VISIBLE = 2      /* and readers of the registered kind see them (MEM-3) */
} uccl_ep_completion_level;

/* Promises, as bits of uccl_ep_caps.flags. */
#define UCCL_EP_CAP_ORDER_WRITE_WRITE (1ull << 0)  /* writes to one peer become visible in order */
#define UCCL_EP_CAP_ORDER_WRITE_ATOMIC (1ull << 1) /* an atomic is applied once earlier writes are visible */
#define UCCL_EP_CAP_ORDER_WRITE_IMM (1ull << 2)    /* an immediate is received after earlier writes are visible */
#define UCCL_EP_CAP_ATOMIC_ADD64 (1ull << 3)       /* UCCL_EP_OPERATION_ADD64 exists */
#define UCCL_EP_CAP_ATOMIC_COHERENT (1ull << 4)    /* its adds are atomic against all NICs and CPUs of the target */
#define UCCL_EP_CAP_COMPLETES_IN_ORDER (1ull << 5) /* completions of one peer come in posting order */
#define UCCL_EP_CAP_UNSIGNALLED (1ull << 6)        /* without SIGNALLED no completion; the next one covers it */
/* Bytes are placed once. Without it they may be placed again until the completion is given; such a copy, too, lands
 * before what is posted afterwards. */
#define UCCL_EP_CAP_NO_DUPLICATES (1ull << 7)
/* Behind an operation that was not executed none to that peer is. (Where acknowledgements were lost, several may fail
 * that were executed, in order.) */
#define UCCL_EP_CAP_ERROR_STOPS (1ull << 8)
#define UCCL_EP_CAP_IMM_NEEDS_RECEIVE (1ull << 9) /* an immediate takes a receive credit (not a promise, a duty) */
#define UCCL_EP_CAP_HOST_MEMORY (1ull << 10)      /* can register host memory of the caller */
#define UCCL_EP_CAP_CUDA_MEMORY (1ull << 11)
#define UCCL_EP_CAP_ROCM_MEMORY (1ull << 12)
#define UCCL_EP_CAP_DMABUF (1ull << 13)
#define UCCL_EP_CAP_OWN_MEMORY (1ull << 14)        /* memory_alloc exists */
#define UCCL_EP_CAP_DEFERRED_DOORBELL (1ull << 15) /* after MORE the doorbell may wait for the next submit or poll */
#define UCCL_EP_CAP_PEER_EVENTS (1ull << 16)       /* events() reports peers that died, without traffic to them */
#define UCCL_EP_CAP_SIGNALS_STRICT (1ull << 17)    /* words and payload: one device's memory, strictly in order */
/* FENCE holds an operation back until every earlier write to the peer is visible; behind one that failed, it and every
 * fenced one after it fail too, until disconnect (ERR-3). The verbs fence, which waits for reads and atomics only, is
 * not this. */
#define UCCL_EP_CAP_FENCE_DELIVERED (1ull << 18)
/* READ exists, and once it is complete all that the endpoint submitted to the peer before it is visible there. Needs
 * COMPLETES_IN_ORDER. */
#define UCCL_EP_CAP_READ_FLUSHES (1ull << 19)
/* OPERATION_VISIBLE raises the completion of that operation to COMPLETION_VISIBLE. */
#define UCCL_EP_CAP_VISIBLE_ON_REQUEST (1ull << 20)
/* Once an immediate is received, the bytes of its own write are visible to the registered readers. Without it the
 * target calls flush_local() first. */
#define UCCL_EP_CAP_IMM_VISIBLE (1ull << 21)
#define UCCL_EP_CAP_EMULATED_MEMORY (1ull << 22) /* as CUDA_MEMORY, of the CPU emulation */
#define UCCL_EP_CAP_FLUSH_LOCAL (1ull << 23)     /* flush_local() works on this device */
/* The words may lie in device memory of a kind that it registers, where the heap lies: adds and writes reach them
 * there, and payload and words are then strictly in order, as SIGNALS_STRICT says. */
#define UCCL_EP_CAP_DEVICE_SIGNALS (1ull << 24)

typedef struct uccl_ep_caps {
    uint32_t size;
    uint32_t completion_level;      /* uccl_ep_completion_level */
    uint64_t flags;                 /* UCCL_EP_CAP_* */
    uint64_t max_message_bytes;     /* largest length of one operation; 0: 2^31 */
    uint64_t max_inflight_bytes;    /* of a NIC, all endpoints on it together (adding_nics says on how many they lie);
                                     * more and the fabric drops or retries fail; 0: no limit known */
    uint64_t max_region_bytes;      /* largest region; 0: no limit known */
    uint32_t max_inflight_peer;     /* operations outstanding to one peer; 0: no limit known */
    uint32_t max_inflight_endpoint; /* operations outstanding on an endpoint; 0: no limit known */
    uint32_t max_batch;             /* operations that one submit takes at most; 0: no limit */
    uint32_t max_endpoints;         /* open on one device; 0: no limit known */
    uint32_t max_peers;             /* of an endpoint; 0: no limit known */
    uint32_t max_inline_bytes;
    uint32_t write_alignment;   /* of offsets and length; 0: 1 */
    uint32_t immediate_bits;    /* 0: no immediates */
    uint32_t responder_atomics; /* adds that the target's NIC takes at a time, all queues; 0: no limit known */
    uint32_t adding_nics;       /* NICs behind this device whose adds are not atomic against each other: endpoint i of
                                 * any rank adds at its peers through the i-th of them, modulo this; 0: 1 */
    uint32_t max_receives;      /* immediates outstanding towards an endpoint, of all its peers together: what its
                                 * receive and completion queues hold beside max_inflight_endpoint; 0: no limit known */
} uccl_ep_caps;

/* One NIC as `query` lists it. */
typedef struct uccl_ep_device_info {
    uint32_t size;
    int32_t numa_node; /* -1: unknown */
    char name[64];     /* what `device_open` takes: unique on the machine */
    char vendor[64];
    char model[64];
    char firmware[64];
    char address[64];   /* PCI address or the like */
    char unusable[256]; /* not empty: the device is there and cannot be used, and why */
    uccl_ep_caps caps;  /* what it would promise if opened without options */
} uccl_ep_device_info;

/* ----------------------------------------------------------------------------------------------------------- memory */

/* Regions of a rank. All ranks have the same regions, each of one size; an address on the wire is an offset into one.
 * SIGNALS and MAILBOX are to be registered strictly (no relaxed ordering, no spraying to them without order of
 * arrival): of two writes to the same bytes there, the second posted after the completion of the first, the second
 * stays. (After one that says DELIVERED at least, or was raised: of what is merely TRANSMITTED nothing is known.) */
typedef enum uccl_ep_region {
    UCCL_EP_REGION_HEAP = 0,    /* sources and targets of puts */
    UCCL_EP_REGION_SIGNALS = 1, /* 64-bit words; written by ADD64 and, where a strategy says so, by writes */
    UCCL_EP_REGION_MAILBOX = 2, /* the core's own records, host memory; registered where a strategy needs them */
    UCCL_EP_REGIONS = 3
} uccl_ep_region;

typedef enum uccl_ep_memory_kind {
    UCCL_EP_MEMORY_HOST = 0,
    UCCL_EP_MEMORY_CUDA = 1,
    UCCL_EP_MEMORY_ROCM = 2,
    UCCL_EP_MEMORY_EMULATED = 3 /* of the accelerator of the CPU emulation */
} uccl_ep_memory_kind;

#define UCCL_EP_ACCESS_LOCAL_READ (1u << 0)
#define UCCL_EP_ACCESS_REMOTE_WRITE (1u << 1)
#define UCCL_EP_ACCESS_REMOTE_ATOMIC (1u << 2)
#define UCCL_EP_ACCESS_REMOTE_READ (1u << 3)
#define UCCL_EP_ACCESS_LOCAL_WRITE (1u << 4) /* of what own reads bring */

typedef struct uccl_ep_memory {
    uint32_t size;
    uint32_t kind; /* uccl_ep_memory_kind */
    void *base;    /* CPU pointer, or device pointer */
    uint64_t bytes;
    int32_t dmabuf_fd; /* -1: none; valid during the call */
    uint32_t access;   /* UCCL_EP_ACCESS_* needed: ask the NIC for no more, some refuse a right that they lack */
    uint64_t dmabuf_offset;
} uccl_ep_memory;

#define UCCL_EP_ALLOC_HUGE_AUTO 0u /* huge pages if the machine has them to spare */
#define UCCL_EP_ALLOC_HUGE_ON 1u   /* or fail */
#define UCCL_EP_ALLOC_HUGE_OFF 2u
#define UCCL_EP_ALLOC_LOCK 4u /* lock into memory, or fail */

/* Longest blob of an exported region or an endpoint address. */
#define UCCL_EP_MAX_BLOB_BYTES 512u
/* Longest one that is for a single peer: there is one for each pair of ranks. */
#define UCCL_EP_MAX_PEER_BLOB_BYTES 16u

/* ------------------------------------------------------------------------------------------------------- operations */

typedef enum uccl_ep_operation_kind {
    UCCL_EP_OPERATION_WRITE = 1, /* `length` bytes from local to remote; 0 is legal and moves nothing. Aligned 8-byte
                                  * words appear whole; nothing larger has to */
    UCCL_EP_OPERATION_ADD64 = 2, /* add `value` to the 8-byte aligned word at remote, modulo 2^64, exactly once */
    UCCL_EP_OPERATION_WRITE_IMM = 3, /* a write, and `value` as an immediate to the target's endpoint */
    UCCL_EP_OPERATION_READ = 4       /* from remote to local: the core's flush */
} uccl_ep_operation_kind;

#define UCCL_EP_OPERATION_SIGNALLED (1u << 0) /* give a completion record */
#define UCCL_EP_OPERATION_FENCE (1u << 1)     /* see UCCL_EP_CAP_FENCE_DELIVERED */
#define UCCL_EP_OPERATION_VISIBLE (1u << 2)   /* see UCCL_EP_CAP_VISIBLE_ON_REQUEST */

typedef struct uccl_ep_operation {
    uint8_t kind;          /* uccl_ep_operation_kind */
    uint8_t flags;         /* UCCL_EP_OPERATION_* */
    uint8_t local_region;  /* uccl_ep_region of local_offset */
    uint8_t remote_region; /* uccl_ep_region of remote_offset */
    uint32_t length;       /* bytes */
    uint64_t local_offset; /* bytes into the own region */
    uint64_t remote_offset;
    uint64_t value;  /* ADD64: what is added; WRITE_IMM: the immediate */
    uint64_t cookie; /* comes back in the completion */
} uccl_ep_operation;

#define UCCL_EP_SUBMIT_MORE (1u << 0) /* another submit follows at once */

typedef enum uccl_ep_completion_kind {
    UCCL_EP_COMPLETION_OPERATION = 0, /* an operation of ours ended */
    UCCL_EP_COMPLETION_IMMEDIATE = 1  /* a peer's immediate arrived */
} uccl_ep_completion_kind;

typedef struct uccl_ep_completion {
    uint64_t cookie;     /* of the operation; an IMMEDIATE: the value received */
    uint32_t kind;       /* uccl_ep_completion_kind */
    int32_t status;      /* UCCL_EP_OK or why it failed */
    uint32_t peer;       /* target of the operation; source of the immediate */
    int32_t vendor_code; /* of the NIC, for describe() */
} uccl_ep_completion;

typedef enum uccl_ep_event_kind {
    UCCL_EP_EVENT_PEER_LOST = 1,   /* the peer's process or host is gone: nothing posted to it will be executed */
    UCCL_EP_EVENT_DEVICE_LOST = 2, /* the NIC is gone: every operation on it will fail */
    UCCL_EP_EVENT_PEER_CLOSED =
        3 /* the peer closed its device in good order: it sends nothing more, and takes nothing */
} uccl_ep_event_kind;

typedef struct uccl_ep_event {
    uint32_t kind; /* uccl_ep_event_kind */
    uint32_t peer;
    char text[120];
} uccl_ep_event;

typedef struct uccl_ep_endpoint_config {
    uint32_t size;
    uint32_t index; /* of the endpoint on this rank: endpoint i of one rank talks to endpoint i of the others */
    uint32_t rank, peers;
    uint32_t inflight_peer;          /* operations that the core keeps outstanding at most: to one peer */
    uint32_t inflight;               /* and in all */
    uint32_t max_message_bytes_used; /* longest operation that the core will submit; 0: 2^31 */
    uint32_t receives_peer;          /* immediates that each peer has outstanding towards this endpoint at most: where
                                      * one takes a receive (IMM_NEEDS_RECEIVE), so many are ready from connect on,
                                      * also if the peer took some before and replenish() did not give them back */
} uccl_ep_endpoint_config;

/* -------------------------------------------------------------------------------------------------------- the table */

/*
 * NULL is allowed only where it says "optional". Each function returns UCCL_EP_OK or an error unless it says otherwise.
 */
typedef struct uccl_ep_backend {
    uint32_t size;                 /* sizeof(uccl_ep_backend) of the header that the backend was built with */
    uint16_t abi_major, abi_minor; /* the major that it speaks and the lowest minor that it needs of the core */
    const char *name;              /* as in `--backend NAME` */
    const char *version;

    /* control. Describe device `index` (0, 1, ...); E_NO_DEVICE past the last one. A device that is there and cannot be
     * used is listed, with the reason in `unusable`: one such must not hide the others. Opens nothing for longer than
     * the call. */
    uccl_ep_status (*query)(const uccl_ep_host *host, uint32_t index, uccl_ep_device_info *info);

    /* control. `name` NULL: the first usable one. `options`: "key=value,key=value" or "", the backend's own; an unknown
     * key is E_INVALID. *caps is what this opened device promises. `host` stays valid until device_close. */
    uccl_ep_status (*device_open)(const uccl_ep_host *host, const char *name, const char *options,
                                  uccl_ep_device **device, uccl_ep_caps *caps);
    void (*device_close)(uccl_ep_device *device);

    /* control, optional (UCCL_EP_CAP_OWN_MEMORY). Host memory that this device can register, zeroed, page aligned. */
    uccl_ep_status (*memory_alloc)(uccl_ep_device *device, uint64_t bytes, uint32_t flags, void **base);
    void (*memory_free)(uccl_ep_device *device, void *base, uint64_t bytes);

    /* control. Register memory as `region`; refused here or never (MEM-1), the text naming what would make it work. */
    uccl_ep_status (*region_register)(uccl_ep_device *device, uccl_ep_region region, const uccl_ep_memory *memory);
    void (*region_deregister)(uccl_ep_device *device, uccl_ep_region region);
    /* control. What a peer needs to reach the region: *bytes in: room (UCCL_EP_MAX_BLOB_BYTES), out: used. */
    uccl_ep_status (*region_export)(uccl_ep_device *device, uccl_ep_region region, void *blob, uint32_t *bytes);
    /* control. Take a peer's blob; the blob is untrusted, check it. After all endpoints of the device connected to the
     * peer. A second import replaces the first (a new incarnation of the peer). */
    uccl_ep_status (*region_import)(uccl_ep_device *device, uint32_t peer, uccl_ep_region region, const void *blob,
                                    uint32_t bytes);

    /* control. */
    uccl_ep_status (*endpoint_open)(uccl_ep_device *device, const uccl_ep_endpoint_config *config,
                                    uccl_ep_endpoint **endpoint);
    void (*endpoint_close)(uccl_ep_endpoint *endpoint);
    uccl_ep_status (*endpoint_address)(uccl_ep_endpoint *endpoint, void *blob, uint32_t *bytes);

    /* control, or endpoint during a reset. Start to connect; the own rank too. Then call connect_poll until it is no
     * longer IN_PROGRESS, taking turns among all peers: no peer may have to finish for another to. The blob is
     * untrusted. */
    uccl_ep_status (*connect)(uccl_ep_endpoint *endpoint, uint32_t peer, const void *blob, uint32_t bytes);
    uccl_ep_status (*connect_poll)(uccl_ep_endpoint *endpoint, uint32_t peer);
    /* endpoint. Once it returns OK the NIC reads no source and writes nothing at this peer for operations submitted
     * before, and gives no completions for them; IN_PROGRESS: call again (the core gives up on it at a deadline and
     * closes the endpoint). connect() may follow. */
    uccl_ep_status (*disconnect)(uccl_ep_endpoint *endpoint, uint32_t peer);

    /* endpoint. Hand over operations to `peer`, in order. *accepted of them were taken (always written); fewer than n
     * with OK: no room now. The array is the caller's again on return. An error refuses operation *accepted and leaves
     * the rest. */
    uccl_ep_status (*submit)(uccl_ep_endpoint *endpoint, uint32_t peer, const uccl_ep_operation *operations, uint32_t n,
                             uint32_t flags, uint32_t *accepted);
    /* endpoint. Up to `max` completion records; returns how many, or a negative uccl_ep_status if the endpoint is
     * broken. Must be called for progress of providers that need it, also when nothing is outstanding. */
    int32_t (*poll)(uccl_ep_endpoint *endpoint, uccl_ep_completion *completions, uint32_t max);

    /* any thread. One line for a vendor code of this backend, into text[bytes]. */
    void (*describe)(uccl_ep_device *device, int32_t status, int32_t vendor_code, char *text, uint32_t bytes);

    /* endpoint, optional. Give back `n` receive credits of `peer` that immediates have taken. */
    uccl_ep_status (*replenish)(uccl_ep_endpoint *endpoint, uint32_t peer, uint32_t n);
    /* endpoint, optional (UCCL_EP_CAP_PEER_EVENTS). Up to `max` events; returns how many. May make system calls: the
     * core asks a few hundred times a second. */
    int32_t (*events)(uccl_ep_endpoint *endpoint, uccl_ep_event *events, uint32_t max);
    /* endpoint, optional (UCCL_EP_CAP_FLUSH_LOCAL). Make bytes that the NIC has placed in the own `region` visible to
     * its registered readers. */
    uccl_ep_status (*flush_local)(uccl_ep_endpoint *endpoint, uccl_ep_region region);
    /* endpoint, optional. A descriptor that becomes readable when poll() has something, or -1. */
    int32_t (*wait_fd)(uccl_ep_endpoint *endpoint);
    /* control, or endpoint during a reset, optional. What `peer` alone needs to know of this endpoint, where one
     * address for all is not enough: the queue pair that is for it. *bytes in: room (UCCL_EP_MAX_PEER_BLOB_BYTES), out:
     * used, the same number for all peers. Asked for every peer, the own rank too, before each round of connect(),
     * whose blob is then the peer's address followed by what the peer gave for this rank. */
    uccl_ep_status (*peer_address)(uccl_ep_endpoint *endpoint, uint32_t peer, void *blob, uint32_t *bytes);
    /* control, optional. Describe the opened device, as query() does, where a name is not enough to find it there: it
     * was chosen, or is several NICs. */
    uccl_ep_status (*opened)(uccl_ep_device *device, uccl_ep_device_info *info);
} uccl_ep_backend;

/* The one symbol that a backend exports. The table lives as long as the library is loaded. Called once, before anything
 * else; must have no side effect. */
const uccl_ep_backend *uccl_ep_backend_entry(void);

#ifdef __cplusplus
}
#endif
#endif
