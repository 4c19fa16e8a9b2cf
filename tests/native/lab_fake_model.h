/* SPDX-License-Identifier: Apache-2.0
 *
 * lab_fake_model.h: a vendor that does not exist, so that the lab's NIC is tested without anybody's library: queues are
 * rings of decoded entries in plain memory, doorbells are words that the NIC's thread looks at. And the objects that
 * the control path makes otherwise.
 *
 * Threads: one posts to a queue pair and polls its queues; fake_* that make or change objects take lab_lock.
 */
#ifndef UCCL_EP_LAB_FAKE_MODEL_H
#define UCCL_EP_LAB_FAKE_MODEL_H

#include "lab/lab.h"

#define FAKE_DEPTH 512u /* of every ring */
#define FAKE_EVENTS 64u
#define FAKE_LOCAL_WRITE 1u
#define FAKE_REMOTE (1u | 2u | 4u | 8u) /* all that ibv_reg_mr may grant */

/* knobs: "profile=NAME,knob=value,..."; fabric: whom it meets. Before anything else, once. */
lab_device *fake_device(const char *fabric, const char *profile, const char *knobs);
lab_pd *fake_pd(lab_device *device);
lab_mr *fake_mr(lab_pd *pd, void *start, uint64_t bytes, uint32_t access);
void fake_mr_end(lab_mr *mr);
lab_cq *fake_cq(lab_pd *pd, uint32_t entries);
lab_srq *fake_srq(lab_pd *pd);
lab_qp *fake_qp(lab_pd *pd, enum lab_qp_type type, lab_cq *send_cq, lab_cq *recv_cq, lab_srq *srq);
void fake_qp_end(lab_qp *qp);
void fake_qp_state(lab_qp *qp, enum lab_qp_state state);
enum lab_qp_state fake_qp_state_now(lab_qp *qp);
/* RESET to RTS, with all rights, 16 reads, timeout 12 and 3 retries (about 67 ms), for ever on a missing receive. */
void fake_connect(lab_qp *qp, uint32_t dest_qpn);
lab_ah *fake_ah(lab_pd *pd, const struct in6_addr *gid);
void fake_ah_end(lab_ah *ah);

/* False: the ring is full. `work` is copied up to its inline bytes. */
bool fake_post(lab_qp *qp, const struct lab_work *work);
bool fake_post_receive(lab_qp *qp, const struct lab_receive *receive);
bool fake_post_shared(lab_srq *srq, const struct lab_receive *receive);
bool fake_poll(lab_cq *cq, struct lab_done *done);
/* Successes that took no entry (unsignalled). */
uint32_t fake_silent(lab_cq *cq);
void fake_arm(lab_cq *cq); /* the next entry counts */
uint32_t fake_notified(lab_cq *cq);
/* How often the event came. */
uint32_t fake_events(enum lab_event event);

#endif
