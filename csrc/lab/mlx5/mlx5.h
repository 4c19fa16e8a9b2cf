/* SPDX-License-Identifier: Apache-2.0
 *
 * mlx5.h: a ConnectX as libmlx5 sees it. Layouts: rdma-core, providers/mlx5 (mlx5dv.h, wqe.h); all numbers in queues
 * are big-endian.
 */
#ifndef UCCL_EP_LAB_MLX5_H
#define UCCL_EP_LAB_MLX5_H

#include <endian.h>
#include <string.h>

#include "lab.h"

#define MLX5_BLOCK 64u         /* a work queue entry takes whole blocks */
#define MLX5_UNIT 16u          /* and consists of segments of so many bytes */
#define MLX5_UNITS 63u         /* at most */
#define MLX5_NO_KEY 0x100u     /* ends a list of pieces that is shorter than its entry */
#define MLX5_NEVER 0xffffffffu /* no doorbell record reads like this */

struct mlx5_cq {
    uint8_t *entries;
    uint32_t *doorbell; /* [0] consumer index, [1] arming */
    uint32_t n, size;   /* entries of the ring, a power of two; bytes of one: 64 or 128 */
    uint32_t produced;
    uint32_t solicited; /* produced, when the last entry with the solicited bit had been written */
    uint32_t arm;       /* the record as last seen */
    uint32_t fired;     /* sequence number of the arming that has had its event; 4: none */
};

struct mlx5_srq {
    uint8_t *entries;
    uint32_t *doorbell; /* receives posted so far, 16 bits */
    uint32_t n, shift;
    uint32_t index; /* of the next one: entries are a list */
    uint16_t taken;
};

struct mlx5_qp {
    uint8_t *receives, *sends;
    uint32_t *doorbell; /* [0] receives posted so far, [1] blocks of the send queue, 16 bits each */
    uint32_t receive_n, receive_shift, send_blocks;
    uint16_t received, sent;
    uint32_t index; /* the program's, for its completions */
};

/* queue.c */
bool mlx5_fetch(lab_qp *qp, struct lab_work *work);
bool mlx5_fetch_receive(lab_qp *qp, struct lab_receive *receive);
bool mlx5_fetch_shared_receive(lab_srq *srq, struct lab_receive *receive);
uint32_t mlx5_shared_receives(lab_srq *srq);
uint32_t mlx5_cq_used(lab_cq *cq);
void mlx5_complete(lab_cq *cq, const struct lab_done *done);
void mlx5_look(lab_cq *cq);
void mlx5_ring(const lab_qp *qp, enum lab_ring_kind kind, struct lab_ring *ring);
/* The rest of the ring's life is in another one: the last entry of the old one says so. */
void mlx5_move(struct mlx5_cq *cq, uint8_t *entries, uint32_t n);

/* A record that the program writes while we read it. */
static inline uint32_t mlx5_record(const uint32_t *at) {
    return be32toh(__atomic_load_n(at, __ATOMIC_ACQUIRE));
}

#endif
