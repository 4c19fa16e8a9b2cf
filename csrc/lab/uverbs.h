/* SPDX-License-Identifier: Apache-2.0
 *
 * uverbs.h: a command on its way through uverbs.c and qp.c.
 */
#ifndef UCCL_EP_LAB_UVERBS_H
#define UCCL_EP_LAB_UVERBS_H

#include <rdma/ib_user_verbs.h>

#include "control.h"

#define LAB_CORE_BYTES 512u

struct lab_command {
    lab_context *context;
    struct lab_call call;                   /* the vendor's part */
    _Alignas(8) uint8_t in[LAB_CORE_BYTES]; /* the core structure; zeroes where the program's is shorter */
    _Alignas(8) uint8_t out[LAB_CORE_BYTES];
};

/* The NIC of this process is there. */
int lab_nic_ready(lab_context *context);
int lab_query_device(lab_device *device, struct ib_uverbs_ex_query_device_resp *core, struct lab_call *call);

/* qp.c */
int lab_create_qp(struct lab_command *c);
int lab_ex_create_qp(struct lab_command *c);
int lab_query_qp(struct lab_command *c);
int lab_modify_qp(struct lab_command *c);
int lab_ex_modify_qp(struct lab_command *c);
int lab_destroy_qp(struct lab_command *c);

#endif
