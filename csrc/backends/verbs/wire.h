/* SPDX-License-Identifier: Apache-2.0
 *
 * wire.h: what ranks tell each other of queue pairs and memory, through the core's exchanges. All ranks run one version
 * on machines of one byte order (the core's exchange makes sure of the version), so fields are in host order (little
 * endian on all machines that are built for) without padding. What comes in is untrusted and checked.
 *
 *   verbs_address  what endpoint_address() writes: of one endpoint, for all peers. 40 bytes
 *   verbs_pair     what peer_address() writes: of one endpoint, for one peer. 8 bytes. connect() gets a verbs_address
 *                  with the verbs_pair for this rank right behind it
 *   efa_address    the same two of the backend efa: 44 and 4 bytes
 *   efa_pair
 *   verbs_blob     what region_export() writes: 36 bytes, then a remote key for each NIC and each piece
 */
#ifndef UCCL_EP_VERBS_WIRE_H
#define UCCL_EP_VERBS_WIRE_H

#include <stddef.h>
#include <stdint.h>

#define VERBS_ADDRESS_MAGIC 0x61627675u /* "uvba" */
#define EFA_ADDRESS_MAGIC 0x61657675u   /* "uvea" */
#define VERBS_REGION_MAGIC 0x72627675u  /* "uvbr" */

typedef struct verbs_address {
    uint32_t magic;
    uint32_t rank, peers, index; /* of the rank, how many ranks, of the endpoint */
    uint16_t pkey;               /* partition, and in the high bit whether the port is a full member of it */
    uint16_t lid;                /* InfiniBand */
    uint8_t link_layer;          /* IBV_LINK_LAYER_*: 1 InfiniBand, 2 Ethernet */
    uint8_t mtu;                 /* enum ibv_mtu: 1 is 256 bytes, 5 is 4096. Both ends take the smaller one */
    uint8_t responder_depth;     /* reads and atomics that a queue pair takes: the peer's max_rd_atomic at most */
    uint8_t nics;                /* of the rank: the same on all */
    uint8_t gid[16];             /* RoCE */
} verbs_address;

typedef struct verbs_pair {
    uint32_t qp_number; /* 24 bits */
    uint32_t psn;       /* of the first packet that it sends: 24 bits */
} verbs_pair;

typedef struct efa_address {
    uint32_t magic;
    uint32_t rank, peers, index; /* of the rank, how many ranks, of the endpoint */
    uint32_t qp_number;          /* of the endpoint, for all peers */
    uint32_t qkey;               /* what is sent to it carries this */
    uint8_t nics;                /* of the rank: the same on all */
    uint8_t unsolicited;         /* 1: immediates take no receives of it */
    uint8_t reserved[2];
    uint8_t gid[16];
} efa_address;

typedef struct efa_pair {
    uint32_t connection; /* 8 bits: the highest of every immediate that this endpoint takes from the peer */
} efa_pair;

/* Byte `offset` of the region lies at `address` + offset, and is reached by the key of piece offset / chunk. */
typedef struct verbs_blob {
    uint32_t magic;
    uint16_t nics, chunks;
    uint64_t bytes;
    uint64_t address; /* as remote_addr of a work request */
    uint64_t chunk;   /* bytes of a piece: a power of two; 2^62: there is one piece */
    uint32_t region;  /* uccl_ep_region */
    uint32_t rkeys[]; /* [nics][chunks] */
} verbs_blob;
#define VERBS_BLOB_HEAD offsetof(verbs_blob, rkeys)

_Static_assert(sizeof(verbs_address) == 40 && sizeof(verbs_pair) == 8 && VERBS_BLOB_HEAD == 36 &&
                   sizeof(efa_address) == 44 && sizeof(efa_pair) == 4,
               "the same on all machines");

#endif
