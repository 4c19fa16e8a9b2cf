/* SPDX-License-Identifier: Apache-2.0
 *
 * AWS Elastic Fabric Adapter: scalable reliable datagrams (SRD).
 *
 *   efa.c       the vendor: devices, generations, statuses
 *   srd.c       the transport: what a device has to have, and what is promised
 *   endpoint.c  a queue pair for all peers, its completion queue, receives
 *   connect.c   addresses, address handles
 *   submit.c    operations to work requests
 *   complete.c  completions, which come in any order
 *
 * One queue pair of an endpoint reaches all peers: a NIC has 256 of them for all processes. An address handle says
 * where a peer's NIC is. Both ends make one: a NIC refuses what comes from one that it has no handle for.
 *
 * Nothing is ordered: neither messages, nor their packets, nor completions. Each operation has a completion of its own,
 * failed ones too, and the queue pair goes on behind a failure.
 *
 * An immediate is 32 bits on the wire: 24 of the core's, and above them the number of the connection, which the target
 * chose. What is left of an earlier connection is known by it (ERR-6), however late it comes.
 */
#ifndef UCCL_EP_EFA_H
#define UCCL_EP_EFA_H

#include "../verbs/fault.h"
#include "../verbs/queue.h"

/*
 * efadv.h of rdma-core, as of version 65: what older headers lack is declared here, and looked for at run time. Layouts
 * grew within what was reserved, so 16 and 32 bytes are what each version knows; a flag is used only where the device's
 * capabilities, which the library passes on if it knows them, have it.
 */
#define EFADV_READ (1u << 0)                /* EFADV_DEVICE_ATTR_CAPS_RDMA_READ */
#define EFADV_RNR_RETRY (1u << 1)           /* ..._RNR_RETRY */
#define EFADV_WRITE (1u << 3)               /* ..._RDMA_WRITE: 46 */
#define EFADV_UNSOLICITED (1u << 4)         /* ..._UNSOLICITED_WRITE_RECV: 52 */
#define EFADV_QP_UNSOLICITED ((uint16_t)1)  /* EFADV_QP_FLAGS_UNSOLICITED_WRITE_RECV: 52 */
#define EFADV_QP_INLINE_WRITE ((uint16_t)2) /* EFADV_QP_FLAGS_INLINE_WRITE: 63 */
#define EFADV_SRD 0u                        /* EFADV_QP_DRIVER_TYPE_SRD */

struct efadv_device_attr {
    uint64_t comp_mask;
    uint32_t max_sq_wr, max_rq_wr;
    uint16_t max_sq_sge, max_rq_sge;
    uint16_t inline_buf_size;
    uint16_t inline_buf_size_ex; /* 63; before: reserved, and zero */
    uint32_t device_caps;
    uint32_t max_rdma_size;
};

struct efadv_qp_init_attr {
    uint64_t comp_mask;
    uint32_t driver_qp_type;
    uint16_t flags; /* 52; before: reserved, and refused unless zero */
    uint8_t sl;     /* 52 */
    uint8_t reserved;
};

struct efadv_ah_attr {
    uint64_t comp_mask;
    uint16_t ahn;
    uint8_t reserved[6];
};

_Static_assert(sizeof(struct efadv_device_attr) == 32 && sizeof(struct efadv_qp_init_attr) == 16 &&
                   sizeof(struct efadv_ah_attr) == 16,
               "as libefa has them");

typedef int (*efadv_query_device_function)(struct ibv_context *, struct efadv_device_attr *, uint32_t bytes);
typedef struct ibv_qp *(*efadv_create_qp_ex_function)(struct ibv_context *, struct ibv_qp_init_attr_ex *,
                                                      struct efadv_qp_init_attr *, uint32_t bytes);
typedef int (*efadv_query_ah_function)(struct ibv_ah *, struct efadv_ah_attr *, uint32_t bytes);
/* Their places in verbs_library.own. */
enum { EFA_QUERY_DEVICE, EFA_CREATE_QP, EFA_QUERY_AH };

#define EFA_IMMEDIATE_BITS 24u
#define EFA_HANDLES 65536u    /* numbers of address handles */
#define EFA_NO_HANDLE 0xffffu /* "unknown", in a completion (efa_io_defs.h) */

/* wr_id. Of a receive that was not posted it is 0. */
#define EFA_WR_SEND (1ull << 62)
#define EFA_WR_RECEIVE (1ull << 63)

typedef enum efa_state { EFA_IDLE, EFA_CONNECTED, EFA_DRAINING } efa_state;

typedef struct efa_peer {
    struct ibv_ah *ah; /* that of `shared` */
    struct efa_handle *shared;
    uint32_t state; /* efa_state */
    uint32_t qp_number, qkey;
    uint32_t outstanding; /* operations */
    uint32_t taken;       /* receives that it took and that were not given back */
    uint16_t handle;      /* the number of `ah`, as completions name it */
    uint16_t next;        /* rank + 1 of the next one behind the same number: another process on that NIC */
    uint8_t gid[16];
    uint8_t theirs, ours; /* numbers of the connection: in immediates to it, and from it */
} efa_peer;

/* An operation under way. */
typedef struct efa_slot {
    uint64_t cookie;
    uint32_t peer;
    uint32_t uses; /* a completion of an earlier use is none of this one */
} efa_slot;

struct uccl_ep_endpoint {
    uccl_ep_device *device;
    verbs_nic *nic;
    uint32_t nic_index, index, rank, peers;
    uint32_t depth;         /* operations under way at most */
    uint32_t receives_peer; /* immediates that a peer has under way at most */
    uint32_t granted_inline, qkey;
    bool unsolicited; /* immediates take no receives */
    bool stranger_told;
    verbs_queue queue; /* of completions; the context of its events */
    struct ibv_qp *qp;
    struct ibv_qp_ex *calls;
    efa_slot *slots;
    uint32_t *free; /* [depth] slots that are free, a stack */
    uint32_t n_free;
    uint16_t *by_handle; /* [EFA_HANDLES]: rank + 1 of the first peer there */
    efa_peer peer[];
};

/* uccl_ep_status of a completion that failed. */
int32_t efa_status_of(const struct ibv_wc *wc);
/* n receives. */
uccl_ep_status efa_post_receives(uccl_ep_endpoint *endpoint, uint32_t n);
/* Empty the completion queue on the side. */
uccl_ep_status efa_collect(uccl_ep_endpoint *endpoint);
/* A handle for a peer's gid: its own or that of others on that NIC (handle.c). */
uccl_ep_status efa_make_handle(uccl_ep_endpoint *endpoint, uint32_t peer);
/* It needs none any more: nothing more comes from it. The handle goes with the last that uses it. */
void efa_drop_handle(uccl_ep_endpoint *endpoint, uint32_t peer);

#endif
