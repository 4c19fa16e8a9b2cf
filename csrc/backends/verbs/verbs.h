/* SPDX-License-Identifier: Apache-2.0
 *
 * NICs over libibverbs: what the backends connectx, thor, pollara and efa share.
 *
 *   library.c   libibverbs, opened at run time: a table of its functions
 *   options.c   "key=value,..." of device_open
 *   device.c    which NICs there are, and what is known of each: vendor, port, limits
 *   open.c      opening one or several of them; from limits to promises
 *   memory.c    registration: host memory, dmabufs, device memory by its address
 *   operation.h which operations are carried out
 *   queue.c     the completion queue of an endpoint
 *   status.c    statuses of completions
 *   events.c    events of the device
 *   wire.h      what ranks tell each other
 *   table.c     the table
 *
 * How bytes travel is a transport: one verbs_transport, and the functions of the table that are about endpoints. There
 * are two. Reliable connections, of connectx, thor and pollara (rc.h):
 *
 *   rc.c        what a device has to have, and what is promised
 *   gid.c       the address of a port: GID or LID, partition key
 *   trial.c     does an atomic add add?
 *   endpoint.c  receives, a queue pair for each peer
 *   connect.c   addresses, and a queue pair from INIT to RTS and back
 *   submit.c    operations to work requests
 *   complete.c  completions
 *
 * And scalable reliable datagrams, of efa (../efa).
 *
 * A backend of a vendor is one file with a verbs_vendor: what it makes of the device at hand, decided at run time.
 *
 * Threads. Control calls of a device and calls of its endpoints touch what is written before the endpoints open and
 * read-only afterwards, besides: `imported`, which is written before the peer is written to, `qp_peer` (each endpoint
 * its own elements), the device's list of lost NICs (atomic), and address handles (under a lock).
 */
#ifndef UCCL_EP_VERBS_H
#define UCCL_EP_VERBS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "uccl_ep/backend.h"

#define VERBS_VERSION "0.1.0"
#define VERBS_MAX_NICS 8u     /* of one rank */
#define VERBS_MAX_CHUNKS 64u  /* pieces that a region is registered in, for a NIC's largest region */
#define VERBS_MAX_PEERS 4096u /* ranks: 12 bits of a command */
#define VERBS_PARTS 3u        /* work requests that one operation becomes at most */
#define VERBS_TEXT 256u       /* longest text of an error */
#define VERBS_BATCH 256u      /* work requests of one doorbell at most */
#define VERBS_OWN 3u          /* functions of a vendor's own library */

/* ------------------------------------------------------------------------------------------------------- library.c */

/* X(return type, name, arguments, needed): every function that is called by name. The others are the context's own
 * (poll_cq, post_send, ...), which verbs.h reaches through it. */
#define VERBS_FUNCTIONS(X)                                                                                             \
    X(struct ibv_device **, ibv_get_device_list, (int *), 1)                                                           \
    X(void, ibv_free_device_list, (struct ibv_device **), 1)                                                           \
    X(const char *, ibv_get_device_name, (struct ibv_device *), 1)                                                     \
    X(struct ibv_context *, ibv_open_device, (struct ibv_device *), 1)                                                 \
    X(int, ibv_close_device, (struct ibv_context *), 1)                                                                \
    X(int, ibv_query_device, (struct ibv_context *, struct ibv_device_attr *), 1)                                      \
    X(int, ibv_query_port, (struct ibv_context *, uint8_t, struct _compat_ibv_port_attr *), 1)                         \
    X(int, ibv_query_gid, (struct ibv_context *, uint8_t, int, union ibv_gid *), 1)                                    \
    X(int, ibv_query_pkey, (struct ibv_context *, uint8_t, int, __be16 *), 1)                                          \
    X(struct ibv_pd *, ibv_alloc_pd, (struct ibv_context *), 1)                                                        \
    X(int, ibv_dealloc_pd, (struct ibv_pd *), 1)                                                                       \
    X(struct ibv_mr *, ibv_reg_mr, (struct ibv_pd *, void *, size_t, int), 1)                                          \
    X(int, ibv_dereg_mr, (struct ibv_mr *), 1)                                                                         \
    X(struct ibv_cq *, ibv_create_cq, (struct ibv_context *, int, void *, struct ibv_comp_channel *, int), 1)          \
    X(int, ibv_destroy_cq, (struct ibv_cq *), 1)                                                                       \
    X(struct ibv_srq *, ibv_create_srq, (struct ibv_pd *, struct ibv_srq_init_attr *), 1)                              \
    X(int, ibv_destroy_srq, (struct ibv_srq *), 1)                                                                     \
    X(struct ibv_qp *, ibv_create_qp, (struct ibv_pd *, struct ibv_qp_init_attr *), 1)                                 \
    X(int, ibv_destroy_qp, (struct ibv_qp *), 1)                                                                       \
    X(int, ibv_modify_qp, (struct ibv_qp *, struct ibv_qp_attr *, int), 1)                                             \
    X(struct ibv_ah *, ibv_create_ah, (struct ibv_pd *, struct ibv_ah_attr *), 1)                                      \
    X(int, ibv_destroy_ah, (struct ibv_ah *), 1)                                                                       \
    X(int, ibv_get_async_event, (struct ibv_context *, struct ibv_async_event *), 1)                                   \
    X(void, ibv_ack_async_event, (struct ibv_async_event *), 1)                                                        \
    /* Of which RoCE version a GID is: rdma-core 32. */                                                                \
    X(int, _ibv_query_gid_ex, (struct ibv_context *, uint32_t, uint32_t, struct ibv_gid_entry *, uint32_t, size_t), 0) \
    /* Memory of a process that forks: before rdma-core 44, and kernels before 5.12. */                                \
    X(int, ibv_fork_init, (void), 0)                                                                                   \
    X(enum ibv_fork_status, ibv_is_fork_initialized, (void), 0)                                                        \
    /* Requests by calls: 26. */                                                                                       \
    X(struct ibv_qp_ex *, ibv_qp_to_qp_ex, (struct ibv_qp *), 0)                                                       \
    /* Relaxed ordering: 28. Dmabufs: 34. */                                                                           \
    X(struct ibv_mr *, ibv_reg_mr_iova2, (struct ibv_pd *, void *, size_t, uint64_t, unsigned int), 0)                 \
    X(struct ibv_mr *, ibv_reg_dmabuf_mr, (struct ibv_pd *, uint64_t, size_t, uint64_t, int, int), 0)

/* verbs.h makes macros of these names. */
#undef ibv_query_port
#undef ibv_reg_mr

typedef struct verbs_library {
#define VERBS_MEMBER(type, name, arguments, needed) type(*name) arguments;
    VERBS_FUNCTIONS(VERBS_MEMBER)
#undef VERBS_MEMBER
    void (*own[VERBS_OWN])(void); /* of the vendor's own library, in the order of verbs_transport.functions */
    char path[256];
} verbs_library;

/* --------------------------------------------------------------------------------------------------------- options */

#define VERBS_UNSET (-1)

/* Bits: of which transports an option is. */
#define VERBS_RC 1u
#define VERBS_SRD 2u

typedef struct verbs_options {
    char library[256];
    char own_library[256];                           /* the vendor's */
    int32_t port, gid, pkey;                         /* VERBS_UNSET: chosen */
    int32_t mtu;                                     /* bytes; VERBS_UNSET: what the port has */
    int32_t hop_limit, traffic_class, service_level; /* of every packet */
    int32_t flow_label, udp_sport; /* the second is made of the first; 0: the NIC's own choice, of each queue pair */
    int32_t timeout, retry, rnr_retry, rnr_timer; /* as IBTA numbers them */
    int32_t rd_atomic, inline_bytes;
    int32_t relaxed, visible, limits_only, srq, atomics, dmabuf, calls, unsolicited;
} verbs_options;

/* `options.library` "": UCCL_EP_LIBIBVERBS in the environment, else libibverbs.so.1. It stays loaded. */
uccl_ep_status verbs_library_open(const uccl_ep_host *host, const verbs_options *options, verbs_library *library);

uccl_ep_status verbs_options_parse(const uccl_ep_host *host, const char *text, verbs_options *options);

/* ----------------------------------------------------------------------------------------------- vendors, limits */

/* What a NIC has, after its vendor looked at it. All numbers are the device's own unless the vendor lowered them. */
typedef struct verbs_limits {
    uint32_t max_qp, max_qp_wr, max_cqe, max_sge;
    uint32_t max_srq_wr;                       /* 0: no shared receive queue */
    uint32_t initiator_depth, responder_depth; /* reads and atomics outstanding, of a queue pair */
    uint32_t device_responders;                /* of all queue pairs of the NIC together; 0: they do not share */
    uint32_t inline_bytes;                     /* to ask for; what is granted is read back */
    uint32_t max_batch;                        /* work requests a doorbell; 0: no limit known */
    uint64_t max_message, max_region, max_inflight_bytes;
    bool atomics;
    bool ordered; /* writes of a queue pair become visible in order: a promise of the vendor's, not of IBTA's */
    uint32_t max_receives; /* receive requests of a queue pair; 0: as many as others */
    bool unsolicited;      /* immediates may come without a receive */
    bool rnr_retry;        /* how often a receiver is asked again that is not ready can be set */
} verbs_limits;

typedef struct verbs_model {
    uint32_t part; /* vendor_part_id */
    const char *name;
} verbs_model;

typedef struct verbs_vendor {
    const char *vendor, *family;
    uint32_t ids[4];           /* vendor_id of ibv_query_device (OEMs have their own), ended by 0 */
    uint32_t pci;              /* vendor of the PCI device */
    uint32_t first_part;       /* vendor_part_id of the oldest that will do; 0: any */
    const verbs_model *models; /* ended by a NULL name */
    /* From what the device says to what is used of it. */
    void (*limit)(const struct ibv_device_attr *attributes, verbs_limits *limits);
    /* A line for a vendor_err, or NULL. */
    const char *(*describe)(uint32_t vendor_error);
    /* How often ibv_poll_cq may fail on end before the queue counts as broken; 0: not once. */
    uint32_t poll_failures;
    /* Its library may not be able to post more than one request by calls: they are lists unless calls=1 asks. */
    bool lists;
    /* Its library may not add what it is told to: adds are tried before they are promised. What mends it; NULL: all do.
     */
    const char *adds;
} verbs_vendor;

/* Of the library that this is linked into. */
extern const verbs_vendor verbs_this_vendor;
extern const char verbs_backend_name[];

/* --------------------------------------------------------------------------------------------------------- devices */

/* One port of one NIC, as it is used. */
typedef struct verbs_port {
    uint8_t number, link_layer; /* IBV_LINK_LAYER_* */
    uint8_t gid_index;
    uint16_t lid, pkey_index, pkey;
    uint32_t mtu; /* enum ibv_mtu */
    uint64_t max_message;
    union ibv_gid gid;
    char why[128]; /* why this GID */
} verbs_port;

/* What one look at a device found. */
typedef struct verbs_found {
    char name[64], address[64];
    int32_t numa_node;
    uint32_t pci_vendor; /* 0: not known */
    struct ibv_device_attr attributes;
    struct ibv_port_attr port_attributes;
    verbs_port port;
    verbs_limits limits;
    char unusable[256]; /* why not; empty: it can be used */
} verbs_found;

/* Look at `device` and, where `context` is not NULL, leave it open there if it can be used. */
void verbs_look(const verbs_library *library, const verbs_options *options, struct ibv_device *device,
                verbs_found *found, struct ibv_context **context);
/* How bytes travel. */
typedef struct verbs_transport {
    uint32_t options; /* VERBS_RC or VERBS_SRD */
    /* The vendor's own library and its functions, NULL: none is needed; and what is said where it is missing. */
    const char *library, *environment, *functions[VERBS_OWN], *remedy;
    /* Can the device carry it, and by which port? Fills port and limits. False, and text[VERBS_TEXT] says why not. */
    bool (*look)(const verbs_library *library, const verbs_options *options, struct ibv_device *device,
                 struct ibv_context *context, verbs_found *found, char *text);
    /* What follows for host memory: flags and numbers; the rest is common. */
    void (*promise)(const verbs_options *options, const verbs_found *found, uint32_t nics, uccl_ep_caps *caps);
    /* Do adds add, with each NIC of this device? OK, and text[VERBS_TEXT] says why not, or is empty. NULL: it has none.
     */
    uccl_ep_status (*try_adds)(uccl_ep_device *device, char *text);
    bool flush_gpu;      /* what an immediate tells of may not be visible in a GPU's memory yet */
    bool by_number;      /* peers are known by queue pairs: the table verbs_nic.qp_peer is wanted */
    uint32_t max_chunks; /* pieces that a region may be registered in */
} verbs_transport;

/* Of the library that this is linked into. */
extern const verbs_transport verbs_this_transport;

/* The limits that any device tells, before its vendor and its transport look at them. */
verbs_limits verbs_common_limits(const verbs_options *options, const verbs_found *found);
void verbs_capabilities(const verbs_library *library, const verbs_options *options, const verbs_found *found,
                        uint32_t nics, const uccl_ep_host *host, uccl_ep_caps *caps);
const char *verbs_model_name(const struct ibv_device_attr *attributes, char text[64]);
/* Zeroed memory of which only what is touched costs any; NULL, and errno. */
void *verbs_reserve(size_t bytes);
void verbs_release(void *memory, size_t bytes);
/* How far a NIC is from the GPU, or from this thread: smaller is nearer. */
uint32_t verbs_distance(const uccl_ep_host *host, const verbs_found *found);
/* gid.c. False, and text[VERBS_TEXT] says why. */
bool verbs_port_choose(const verbs_library *library, const verbs_options *options, struct ibv_context *context,
                       const char *name, uint32_t ports, verbs_port *port, struct ibv_port_attr *attributes,
                       char *text);

/* Of IPv4? Two ports reach each other only if both are, or neither. */
bool verbs_gid_is_ipv4(const uint8_t raw[16]);
/* The address of a port may have been replaced since it was chosen. False: there is none any more. */
bool verbs_port_refresh(const verbs_library *library, struct ibv_context *context, verbs_port *port);

/* A region as one NIC has it: pieces of `chunk` bytes, the last one shorter. */
typedef struct verbs_keys {
    uint32_t lkey[VERBS_MAX_CHUNKS], rkey[VERBS_MAX_CHUNKS];
    struct ibv_mr *mr[VERBS_MAX_CHUNKS];
} verbs_keys;

typedef struct verbs_region {
    uint64_t bytes;   /* 0: not registered */
    uint64_t address; /* of its first byte, as work requests name it */
    uint64_t chunk;
    uint32_t chunk_log2, chunks, access, kind;
    verbs_keys keys[VERBS_MAX_NICS];
} verbs_region;

/* A peer's region, as one endpoint's NIC reaches it. */
typedef struct verbs_remote {
    uint64_t bytes, address, chunk;
    uint32_t *rkeys; /* [nics][chunks] */
    uint32_t chunks, chunk_log2;
} verbs_remote;

typedef struct verbs_nic {
    struct ibv_context *context;
    struct ibv_pd *pd;
    verbs_found found;
    uint16_t *qp_peer; /* [2^24]: number of a queue pair to its peer + 1; pages that nobody touched are not there */
    /* Where atomics and reads bring what nobody wants. */
    struct ibv_mr *scratch_mr;
    void *scratch;
    _Atomic uint32_t lost; /* an event said that the NIC is gone */
    /* Of datagrams: address handles, which endpoints share (../efa/handle.c). */
    struct efa_handle *handles;
    pthread_mutex_t handles_lock;
} verbs_nic;

struct uccl_ep_device {
    const uccl_ep_host *host;
    verbs_library library;
    verbs_options options;
    uccl_ep_caps caps;
    verbs_nic nic[VERBS_MAX_NICS];
    uint32_t nics, rank, peers;
    _Atomic uint32_t endpoints; /* open ones: connections of one are made while another is closed */
    verbs_region region[UCCL_EP_REGIONS];
    verbs_remote *remote[UCCL_EP_REGIONS]; /* [peers] */
};

/* ---------------------------------------------------------------------------------------------------------- modules */

/* Text and code for the error that is about to be returned; gives `status`. */
uccl_ep_status verbs_fail(const uccl_ep_host *host, uccl_ep_status status, int32_t code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

uccl_ep_status verbs_device_open(const uccl_ep_host *host, const char *name, const char *options,
                                 uccl_ep_device **device, uccl_ep_caps *caps);
void verbs_device_close(uccl_ep_device *device);
/* No region is registered, and none of a peer's known. */
void verbs_regions_forget(uccl_ep_device *device);
uccl_ep_status verbs_opened(uccl_ep_device *device, uccl_ep_device_info *info);
uccl_ep_status verbs_query(const uccl_ep_host *host, uint32_t index, uccl_ep_device_info *info);

uccl_ep_status verbs_region_register(uccl_ep_device *device, uccl_ep_region region, const uccl_ep_memory *memory);
void verbs_region_deregister(uccl_ep_device *device, uccl_ep_region region);
uccl_ep_status verbs_region_export(uccl_ep_device *device, uccl_ep_region region, void *blob, uint32_t *bytes);
uccl_ep_status verbs_region_import(uccl_ep_device *device, uint32_t peer, uccl_ep_region region, const void *blob,
                                   uint32_t bytes);
/* What failed registration of host memory needs. */
const char *verbs_registration_remedy(int error, uint32_t kind);

/* ------------------------------------------------------------------------------------------------- statuses, events */

/* Both numbers in one: the status of libibverbs, and above it what the vendor adds. */
int32_t verbs_code_of(const struct ibv_wc *wc);
int32_t verbs_status_of(uint32_t wc_status); /* uccl_ep_status of an enum ibv_wc_status */
void verbs_describe(uccl_ep_device *device, int32_t status, int32_t vendor_code, char *text, uint32_t bytes);
/* Read what the NIC has to say. Any thread. */
void verbs_take_events(const uccl_ep_device *device, verbs_nic *nic);
/* For events(): is the NIC gone, and not *told yet? */
int32_t verbs_tell_loss(const uccl_ep_device *device, verbs_nic *nic, bool *told, uccl_ep_event *events, uint32_t max);
/* For flush_local(). */
uccl_ep_status verbs_flush_gpu(const uccl_ep_device *device, const verbs_nic *nic, uccl_ep_region region);

/* ------------------------------------------------------------------- what a transport defines: its part of the table
 */

uccl_ep_status verbs_endpoint_open(uccl_ep_device *device, const uccl_ep_endpoint_config *config,
                                   uccl_ep_endpoint **endpoint);
void verbs_endpoint_close(uccl_ep_endpoint *endpoint);
uccl_ep_status verbs_endpoint_address(uccl_ep_endpoint *endpoint, void *blob, uint32_t *bytes);
uccl_ep_status verbs_peer_address(uccl_ep_endpoint *endpoint, uint32_t peer, void *blob, uint32_t *bytes);
uccl_ep_status verbs_connect(uccl_ep_endpoint *endpoint, uint32_t peer, const void *blob, uint32_t bytes);
uccl_ep_status verbs_connect_poll(uccl_ep_endpoint *endpoint, uint32_t peer);
uccl_ep_status verbs_disconnect(uccl_ep_endpoint *endpoint, uint32_t peer);
uccl_ep_status verbs_submit(uccl_ep_endpoint *endpoint, uint32_t peer, const uccl_ep_operation *operations, uint32_t n,
                            uint32_t flags, uint32_t *accepted);
int32_t verbs_poll(uccl_ep_endpoint *endpoint, uccl_ep_completion *completions, uint32_t max);
uccl_ep_status verbs_replenish(uccl_ep_endpoint *endpoint, uint32_t peer, uint32_t n);
int32_t verbs_events(uccl_ep_endpoint *endpoint, uccl_ep_event *events, uint32_t max);
uccl_ep_status verbs_flush_local(uccl_ep_endpoint *endpoint, uccl_ep_region region);
/* An event: a queue pair takes no more receives of a shared queue. Any thread. */
void verbs_last_receive(void *qp_context);

#endif
