/* SPDX-License-Identifier: Apache-2.0
 *
 * nic.c: the NIC's thread. Being written: what is not there says so.
 */
#include "lab.h"

int lab_nic_open(lab_device *device) {
    return lab_unsupported("queue pairs of %s", device->name);
}

void lab_nic_wake(void) {
}

uint32_t lab_slot(void) {
    return 0;
}

int lab_region_add(lab_mr *mr) {
    return lab_unsupported("registration (%llu bytes)", (unsigned long long)mr->length);
}

void lab_region_remove(lab_mr *mr) {
    (void)mr;
}

int lab_flow_open(lab_qp *qp) {
    return lab_unsupported("queue pair %u", qp->number);
}

int lab_flow_modify(lab_qp *qp, enum lab_qp_state from) {
    return lab_unsupported("queue pair %u from state %d", qp->number, from);
}

void lab_flow_close(lab_qp *qp) {
    (void)qp;
}

void lab_cq_forget(lab_cq *cq) {
    (void)cq;
}
